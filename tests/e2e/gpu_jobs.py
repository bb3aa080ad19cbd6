"""Jobs of workers on emulated GPUs (muster-worker-sim): small enough for an emulation, and what a CPU makes of the same."""

import os

from harness import BUILD, check, log_of, tiny_job, undisturbed

SMALL = dict(steps=4, optimizer__warmup=2, leaves=4, checkpoint_every=2, model__slices=2, batch__length=16, eval__every=2, eval__sequences=2)
SIM = "worker/muster-worker-sim"
REFERENCES = {}


def start_gpu_worker(cluster, device=None, env=None, flags=()):
    """On a GPU of its own, unless `device` says which."""
    env = {"CUDASIM_DELAY_US": "100", **({} if device else {"CUDASIM_DEVICES": "16"}), **(env or {})}
    cluster.gpus = getattr(cluster, "gpus", -1) + 1
    return cluster.start_worker(program=SIM, flags=("--device", device or f"cuda:{cluster.gpus}", *flags), env=env)


def start(cluster, workers, **changes):
    cluster.start_coordinator()
    cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": workers, **changes}))
    return [start_gpu_worker(cluster) for _ in range(workers)]


def expect_equal(cluster, **changes):
    """What a worker on the CPU makes of the same job."""
    key = tuple(sorted(changes.items()))
    if key not in REFERENCES:
        REFERENCES[key] = undisturbed({**SMALL, **changes})
    sha = cluster.wait_finished()
    check(sha == REFERENCES[key], f"weights {sha} differ from the CPU's {REFERENCES[key]}")


def has_nccl():
    """Where nccl.h was found, the emulation has NCCL."""
    with open(os.path.join(BUILD, SIM), "rb") as file:
        return b"nccl stall" in file.read()


def with_nccl(test):
    def tested():
        if has_nccl():
            test()
        else:
            print(f"{test.__name__} left out: built without nccl.h")
    tested.__name__ = test.__name__
    return tested


def over_nccl(worker):
    return "GPUs exchange with NCCL" in log_of(worker)
