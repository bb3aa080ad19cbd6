#!/usr/bin/python3
"""`numerics: fast` with real processes: close to exact in every layout, the same bits in the same layout, and lost workers cost it nothing
but the bits. Arguments: only the tests named."""

import json
import os

from harness import Cluster, check, main, pb, tiny_job

GPT2 = {"model__heads": 4, "model__slices": 2, "batch__accumulate": 1, "batch__sequences": 16, "batch__micro": 2}
LLAMA = dict(GPT2, model__family=pb.MODEL_FAMILY_LLAMA, model__kv_heads=4, model__hidden=96, model__dropout=0.0)
STEPS = 20


def train(workers=1, numerics=pb.NUMERICS_FAST, **changes):
    """Losses of training and of held-out data at the end, the weights' hash, the texts of what went on."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=STEPS, numerics=numerics, workers__min=workers, **changes))
        for _ in range(workers):
            cluster.start_worker()
        sha256 = cluster.wait_finished()
        job = cluster.job()
        goes = [event.text for event in cluster.events if event.kind == "generation_go"]
        return job.result.loss, job.eval_loss, sha256, goes


def layouts():
    return {"alone": (1, {}), "replicas": (3, {"parallel__dp": 3}), "sharded": (2, {"parallel__dp": 2, "parallel__optimizer_sharding": True}),
            "tensor": (2, {"parallel__tp": 2}), "stages": (2, {"parallel__pp": 2}),
            "all": (8, {"parallel__tp": 2, "parallel__pp": 2, "parallel__dp": 2})}


def test_fast_is_close_to_exact_in_every_layout():
    for family in (GPT2, LLAMA, dict(GPT2, model__slices=1, batch__accumulate=2, batch__micro=1)):
        exact = train(numerics=pb.NUMERICS_EXACT, **family)
        ends = {}
        for name, (workers, layout) in layouts().items():
            if family["model__slices"] == 1 and "parallel__tp" in layout:
                continue
            ends[name] = train(workers, **family, **layout)
            for what, mine, wanted in zip(("loss", "held-out loss"), ends[name], exact):
                check(abs(mine - wanted) < 1e-4 * wanted, f"{name}: {what} is {mine}, exact is {wanted}")
        check(ends["alone"][2] != exact[2], "fast has the bits of exact: is it fast at all?")


def test_the_same_layout_gives_the_same_bits():
    for name in ("alone", "tensor", "stages"):
        workers, layout = layouts()[name]
        first, second = (train(workers, **GPT2, **layout) for _ in range(2))
        check(first == second, f"{name}: {first} and then {second}")


def test_a_lost_worker_costs_nothing_but_the_bits():
    with Cluster() as cluster:
        with cluster.running(3, steps=200, numerics=pb.NUMERICS_FAST, **GPT2) as workers:
            workers[0].kill()
            cluster.start_worker()
            cluster.wait_event("worker_lost")
        cluster.wait_finished()
        fast = cluster.job()
        check(fast.replayed_steps == 0, f"{fast.replayed_steps} steps were done again")
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=200, numerics=pb.NUMERICS_EXACT, **GPT2))
        cluster.start_worker()
        cluster.wait_finished()
        exact = cluster.job()
    check(abs(fast.eval_loss - exact.eval_loss) < 0.05 * exact.eval_loss, f"held-out loss {fast.eval_loss}, exact {exact.eval_loss}")


def test_exact_and_fast_are_two_identities():
    """A worker's numeric identity, which checkpoints carry, tells them apart."""
    found = {}
    for numerics in (pb.NUMERICS_EXACT, pb.NUMERICS_FAST):
        with Cluster() as cluster:
            cluster.start_coordinator()
            cluster.submit(tiny_job(cluster, steps=10, numerics=numerics))
            cluster.start_worker()
            cluster.wait_finished()
            with open(os.path.join(cluster.checkpoints()[-1].dir, "manifest.json")) as file:
                found[numerics] = json.load(file)["manifest"]["numeric_identity"]
    check(len(set(found.values())) == 2, f"identities: {found}")


if __name__ == "__main__":
    main([test for name, test in list(globals().items()) if name.startswith("test_")])
