#!/usr/bin/python3
"""Workers that compute on a GPU (emulated: muster-worker-sim). Their fp32 weights are those of the CPU's workers, whatever the layout."""

import os
import signal

from harness import BUILD, Cluster, check, log_of, main, pb, refused_worker, run, tiny_job, undisturbed

STEPS = 6
SMALL = dict(steps=STEPS, leaves=4, checkpoint_every=3, model__slices=2, batch__length=16, eval__every=3, eval__sequences=2)
REFERENCE = {}


def reference():
    """What the CPU makes of the job."""
    if not REFERENCE:
        REFERENCE["sha"] = undisturbed(SMALL)
    return REFERENCE["sha"]


def start_gpu_worker(cluster, env=None, flags=(), **others):
    return cluster.start_worker(program="worker/muster-worker-sim", flags=("--device", "cuda:0", *flags), env=env, **others)


def start(cluster, workers, **changes):
    cluster.start_coordinator()
    cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": workers, **changes}))
    return [start_gpu_worker(cluster) for _ in range(workers)]


def expect_equal(cluster):
    sha = cluster.wait_finished()
    check(sha == reference(), f"weights {sha} differ from the CPU's {reference()}")


def test_layouts_have_the_bits_of_the_cpu():
    for workers, changes in ((1, {}), (3, {}), (2, {"parallel__tp": 2}), (2, {"parallel__pp": 2}), (2, {"parallel__optimizer_sharding": True})):
        with Cluster() as cluster:
            start(cluster, workers, **changes)
            expect_equal(cluster)


def test_both_kinds_of_workers_train_one_job():
    """In fp32 their numeric identity is one."""
    with Cluster() as cluster:
        start(cluster, 2)[1].kill()
        cluster.start_worker()
        expect_equal(cluster)


main([test_layouts_have_the_bits_of_the_cpu, test_both_kinds_of_workers_train_one_job])
