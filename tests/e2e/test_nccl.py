#!/usr/bin/python3
"""Workers on emulated GPUs that exchange over NCCL: the weights are those of a CPU, whatever fails."""

import signal

from gpu_jobs import SMALL, expect_equal, over_nccl, start, start_gpu_worker, with_nccl
from harness import COUNTED, STRICT, Cluster, check, log_of, main, refused_worker, tiny_job


GRID = dict(parallel__tp=2, parallel__pp=2)
DEEP = dict(model__layers=3)


@with_nccl
def test_exchanges_between_gpus_go_over_nccl():
    for workers, groups, changes, model in (
            (2, "2 replicas", {}, {}),
            (3, "3 replicas", {"parallel__optimizer_sharding": True}, {}),
            (4, "tensor group of 2, 2 replicas", {"parallel__tp": 2}, {}),
            (2, "2 stages, tied embedding on 2 stages", {"parallel__pp": 2}, {}),
            (3, "3 stages, tied embedding on 2 stages", {"parallel__pp": 3}, DEEP),
            (4, "tensor group of 2, 2 stages, tied embedding on 2 stages", GRID, {}),
            (4, "2 replicas, 2 stages, tied embedding on 2 stages", {"parallel__pp": 2, "parallel__optimizer_sharding": True}, {})):
        with Cluster() as cluster:
            processes = start(cluster, workers, **changes, **model)
            expect_equal(cluster, **model)
            check(sum(f"(here: {groups})" in log_of(process) for process in processes) >= 2, f"not over NCCL ({groups}):\n" + log_of(processes[0]))
            check(all(over_nccl(process) for process in processes), "not all workers exchanged over NCCL")


@with_nccl
def test_stages_survive_a_death_and_grow_again():
    """Two stages of two replicas each: one is killed, the others go on as two stages; with a new one they are four again."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 2, "parallel__pp": 2, "steps": 24}))
        with cluster.slowed():
            workers = [start_gpu_worker(cluster) for _ in range(4)]
            cluster.wait_until(lambda: cluster.job().world == 4 and cluster.job().steps_done >= 1, 60, "four workers did not step together")
            workers[3].kill()
            lost = cluster.wait_event(lambda e: e.kind == "generation_go" and "lost" in e.text)
            start_gpu_worker(cluster)
            cluster.wait_event(lambda e: e.kind == "generation_go" and "4 workers" in e.text, after=lost.number)
        expect_equal(cluster, steps=24)


@with_nccl
def test_errors_between_stages_lose_nobody():
    """An error of NCCL at different places of a step: all park, and go on with the same bits."""
    for place in ("nccl async:13", "ncclRecv:21"):
        with Cluster() as cluster:
            cluster.start_coordinator()
            cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 2, "parallel__pp": 2}))
            start_gpu_worker(cluster)
            broken = start_gpu_worker(cluster, env={"CUDASIM_FAIL": place})
            expect_equal(cluster)
            check("NCCL during" in log_of(broken), f"no error at {place}:\n{log_of(broken)}")
            check(not any(e.kind == "worker_lost" for e in cluster.events), f"a worker was lost at {place}")


@with_nccl
def test_a_block_between_stages_that_never_comes_is_given_up():
    """All live, all wait: all are revoked, abort their communicators, and begin anew."""
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*COUNTED, "--hang-floor-ms", "1500"])
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 2, "parallel__pp": 2}))
        workers = [start_gpu_worker(cluster), start_gpu_worker(cluster, env={"CUDASIM_FAIL": "nccl hang:5"})]
        cluster.wait_until(lambda: all(over_nccl(worker) for worker in workers), 30, "no NCCL between the two")
        expect_equal(cluster)
        check(any("everybody waits for everybody" in e.text for e in cluster.events), f"nothing hung: {[e.text for e in cluster.events]}")


@with_nccl
def test_recorded_kernels_exchange_too():
    """Without dropout each layer is a CUDA graph, exchanges of the tensor group with it. One that cannot be launched loses its worker alone."""
    plain = dict(model__dropout=0)
    with Cluster() as cluster:
        start(cluster, 4, **GRID, **plain)
        expect_equal(cluster, **plain)
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **{**SMALL, **plain, "workers__min": 2, "parallel__tp": 2}))
        start_gpu_worker(cluster)
        broken = start_gpu_worker(cluster, env={"CUDASIM_FAIL": "cudaGraphLaunch:60"})
        lost = cluster.wait_event("worker_lost")
        check("GPU 1, recorded kernels" in lost.text, lost.text)
        refused_worker(broken, "GPU 1, recorded kernels")
        start_gpu_worker(cluster)
        expect_equal(cluster, **plain)


@with_nccl
def test_a_tensor_group_records_together_or_not_at_all():
    """NCCL wants an operation in the graphs of all ranks or of none. Who is told not to record is asked before; who cannot is found out, and loses nobody."""
    plain = dict(model__dropout=0)
    unable = "could not record kernels as a CUDA graph as the others of its tensor group do: all go on without"
    for flags, env in ((("--no-graphs",), None), ((), {"CUDASIM_FAIL": "cudaStreamBeginCapture:2"}), ((), {"CUDASIM_FAIL": "cudaGraphInstantiate:3"})):
        with Cluster() as cluster:
            cluster.start_coordinator()
            cluster.submit(tiny_job(cluster, **{**SMALL, **plain, "workers__min": 2, "parallel__tp": 2}))
            start_gpu_worker(cluster)
            other = start_gpu_worker(cluster, env=env, flags=flags)
            expect_equal(cluster, **plain)
            check((unable in log_of(other)) == bool(env), f"{flags} {env}:\n{log_of(other)}")
            check(not any(e.kind == "worker_lost" for e in cluster.events), f"a worker was lost: {flags} {env}")


@with_nccl
def test_growth_and_a_hang_over_nccl():
    """A second worker joins; it stands still inside an exchange: the other one's communicators are given up, and it goes on alone."""
    with Cluster(flags=STRICT) as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 1, "steps": 24}))
        with cluster.slowed():
            first = start_gpu_worker(cluster)
            cluster.wait_until(lambda: cluster.job().steps_done >= 1, 30, "no step")
            second = start_gpu_worker(cluster)
            grown = cluster.wait_event(lambda e: e.kind == "generation_go" and "2 workers" in e.text)
            cluster.wait_until(lambda: over_nccl(first) and over_nccl(second), 10, "no NCCL between the two")
            second.kill(signal.SIGSTOP)
            cluster.wait_event(lambda e: e.kind == "generation_go" and "lost" in e.text, after=grown.number)
            second.kill()
        expect_equal(cluster, steps=24)
        check(first.wait() == 0, log_of(first))


@with_nccl
def test_an_error_of_nccl_loses_nobody():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 2}))
        start_gpu_worker(cluster)
        broken = start_gpu_worker(cluster, env={"CUDASIM_FAIL": "nccl async:9"})
        expect_equal(cluster)
        check("NCCL during" in log_of(broken), log_of(broken))
        check(not any(e.kind == "worker_lost" for e in cluster.events), "a worker was lost")


@with_nccl
def test_versions_of_nccl_must_be_the_same():
    with Cluster() as cluster:
        start(cluster, 1, steps=100000)
        cluster.wait_until(lambda: cluster.job().steps_done >= 1, 30, "no step")
        other = start_gpu_worker(cluster, env={"CUDASIM_NCCL_VERSION": "20505"})
        refused_worker(other, "NCCL 2.5.5", "install the same libnccl.so.2")


main([test_exchanges_between_gpus_go_over_nccl, test_stages_survive_a_death_and_grow_again, test_errors_between_stages_lose_nobody,
      test_a_block_between_stages_that_never_comes_is_given_up, test_recorded_kernels_exchange_too,
      test_a_tensor_group_records_together_or_not_at_all, test_growth_and_a_hang_over_nccl, test_an_error_of_nccl_loses_nobody,
      test_versions_of_nccl_must_be_the_same])
