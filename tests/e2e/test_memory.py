#!/usr/bin/python3
"""Memory with real processes: what a sharded optimizer takes of a rank, as the allocator counts it and as the kernel does; and a job for which
there is too little, which waits, says how much is short, and goes on when a worker brings it."""

import os
import re

from harness import Cluster, check, log_of, main, pb, reference, tiny_job

MIB = 1 << 20
WIDE = {"model__layers": 4, "model__heads": 4, "model__channels": 128, "leaves": 3}  # alone 64 MiB, in two stages 51
WIDER = dict(WIDE, model__channels=256, batch__length=16, batch__accumulate=1, batch__sequences=3)  # alone 147 MiB, with buddies 152 for two and 142 for three
STEPS = 60
LARGE = {"model__layers": 6, "model__heads": 8, "model__channels": 512, "batch__accumulate": 1, "batch__length": 16, "batch__sequences": 8}
CHUNK = 256 << 10  # bytes of a whole chunk, which has one owner; the last one of a cell is smaller
SLACK = 8 * MIB    # of a resident set: of the C library, gRPC and threads, and huge pages at both ends of a part of both moments


def start_on_host(cluster, host, mib):
    """Each is alone on its host, and so has all that this has."""
    return cluster.start_worker(name="on-" + host, flags=["--host-id", host, "--memory", str(mib)])


def is_short(cluster, mib, after=0):
    """The event that says so, with numbers that fit together."""
    event = cluster.wait_event(lambda e: e.kind == "job_waiting" and "MiB" in e.text, after=after)
    found = re.search(r"no layout of \d+ workers? fits in memory: the smallest \(tp \d+ x pp \d+ x dp \d+\) needs (\d+) MiB a worker, (\d+) MiB are there: "
                      r"(\d+) MiB short", event.text)
    check(found, f"not which resource is short and by how much: {event.text}")
    need, there, short = map(int, found.groups())
    check(there == mib and short == need - there > 0, f"the numbers do not fit together: {event.text}")
    return event


def expect_equal(cluster, **changes):
    sha = cluster.wait_finished()
    check(sha == reference(**changes), f"weights {sha} differ from the undisturbed run's {reference(**changes)}")


def go_after(cluster, event, layout):
    return cluster.wait_event(lambda e: e.kind == "generation_go" and f"as {layout}" in e.text, after=event.number)


def test_a_model_too_large_for_one_worker_waits_for_the_second():
    """Then one of the two is lost, and half of the layers with it: the other half does not fit into what is left, and waits for another."""
    changes, mib = dict(WIDE, steps=STEPS, checkpoint_every=10), 57
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **changes, parallel__dp=1))
        first = start_on_host(cluster, "a", mib)
        short = is_short(cluster, mib)
        check("MiB short" in cluster.job().text, f"the job does not say so: {cluster.job().text}")
        with cluster.slowed():
            start_on_host(cluster, "b", mib)
            go = go_after(cluster, short, "tp 1 x pp 2 x dp 1")
            cluster.wait_event("checkpoint_committed")
            first.kill()
            again = is_short(cluster, mib, after=go.number)
            start_on_host(cluster, "c", mib)
            back = go_after(cluster, again, "tp 1 x pp 2 x dp 1")
            check("state from checkpoint" in back.text, back.text)
        expect_equal(cluster, **changes)


def test_what_is_left_after_a_loss_is_too_small_and_keeps_the_state():
    """Three divide the optimizer, and mirror each other's part; for two it is too large. They keep everything until a third comes: no step is lost."""
    changes, mib = dict(WIDER, steps=STEPS), 144
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **changes, parallel__tp=1, parallel__pp=1, parallel__optimizer_sharding=True,
                                parallel__redundancy=pb.REDUNDANCY_BUDDY))
        with cluster.slowed():
            workers = [start_on_host(cluster, host, mib) for host in "ab"]
            short = is_short(cluster, mib)
            start_on_host(cluster, "c", mib)
            go = go_after(cluster, short, "tp 1 x pp 1 x dp 3")
            cluster.wait_step(5)
            workers[1].kill()
            short = is_short(cluster, mib, after=go.number)
            step = cluster.job().steps_done
            start_on_host(cluster, "d", mib)
            back = go_after(cluster, short, "tp 1 x pp 1 x dp 3")
            check("0 steps replayed" in back.text and f"at step {step}" in back.text, back.text)
        expect_equal(cluster, **changes)
        check(cluster.job().replayed_steps == 0, "the two that were left held everything")


def account_of(worker):
    """What it said that it holds in its newest generation, bytes, by kind."""
    line = [line for line in log_of(worker).split("\n") if "memory held" in line][-1]
    return {kind: int(size) for kind, size in re.findall(r" (\w+)_bytes=(\d+)", line)}


def peak_of(worker):
    """Bytes; the kernel's."""
    with open(f"/proc/{worker.pid}/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))


def measure(dp, **parallel):
    """(account, peak) of each worker of so many replicas, after two steps: everything is allocated before the first."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        fields = {f"parallel__{key}": value for key, value in parallel.items()}
        cluster.submit(tiny_job(cluster, steps=1000, workers__min=dp, **LARGE, parallel__dp=dp, **fields))
        workers = [cluster.start_worker() for _ in range(dp)]
        cluster.wait_step(2, limit_s=60)
        measured = [(account_of(worker), peak_of(worker)) for worker in workers]
        cluster.cancel()
        cluster.wait_over()
        return measured


def test_a_sharded_optimizer_takes_its_part_of_a_rank():
    """Moments of a rank are total / dp, with a buddy twice that (at most all), by the allocator's account; all else is what it is without sharding;
    and what the kernel counts beside the account is the same for every rank of every run."""
    alone = measure(1)
    whole, beside = alone[0][0]["moments"], [peak - sum(account.values()) for account, peak in alone]
    for dp in (2, 4):
        runs = [measure(dp), measure(dp, optimizer_sharding=True), measure(dp, optimizer_sharding=True, redundancy=pb.REDUNDANCY_BUDDY)]
        for ranks, copies in zip(runs, (dp, 1, 2)):
            moments = [account["moments"] for account, _ in ranks]
            pages = 4 * dp * os.sysconf("SC_PAGESIZE")  # one that two parts share is there twice: of two kinds, at both ends
            check(0 <= sum(moments) - copies * whole <= pages, f"dp {dp}: moments {moments} are not {copies} x {whole}")
            check(all(abs(size - copies * whole / dp) <= 4 * CHUNK for size in moments), f"dp {dp}: moments {moments} are not divided evenly")
            for kind in ("parameters", "gradients", "staging", "snapshot"):
                sizes, wanted = (sorted(account[kind] for account, _ in run) for run in (ranks, runs[0]))
                check(sizes == wanted, f"dp {dp}: {kind} {sizes}, without sharding {wanted}")
            beside += [peak - sum(account.values()) for account, peak in ranks]
    check(max(beside) - min(beside) <= SLACK, f"resident beside the account: {sorted(beside)}")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
