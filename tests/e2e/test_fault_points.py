#!/usr/bin/python3
"""SIGKILL, and SIGSTOP for longer than the lost timeout followed by SIGCONT, at every named fault point of a worker and of the
coordinator: the weights are always those of the undisturbed run. The points come from scripts/fault-points; one that no scenario reaches is a failure.

    test_fault_points.py            a sample: every point is killed; every third of a worker, every sixth of the coordinator is stopped
    test_fault_points.py --full     all, each also at its second and third passage
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import grpc
from harness import COUNTED, ROOT, SLOW, Cluster, Failure, check, pb, tiny_job, undisturbed

STEPS = 160
LOST_S = 0.8  # many are lost here, and who is lost for being slow changes no weights
STRICT = [*COUNTED, "--suspect-ms", "300", "--lost-ms", "800"]
JOB = dict(steps=STEPS, checkpoint_every=8, checkpoint__keep=1)


GRID = dict(JOB, model__slices=2)
SHARDED = {"parallel__tp": 1, "parallel__pp": 1, "parallel__optimizer_sharding": True}
STAGES = {"parallel__tp": 2, "parallel__pp": 2, "parallel__optimizer_sharding": True}
BUDDIES = {"parallel__tp": 1, "parallel__pp": 2, "parallel__dp": 1, "parallel__redundancy": pb.REDUNDANCY_BUDDY}
GRID_POINTS = {"worker.gather": (3, SHARDED), "worker.tensor": (4, STAGES), "worker.pipeline": (4, STAGES), "worker.tied": (4, STAGES),
               "worker.digest": (4, STAGES), "worker.buddy": (2, BUDDIES)}


LOCAL_POINTS = ("worker.keep", "worker.files", "coord.send.keep")  # of checkpoints on the hosts' own disks
FIRST = ("worker.comm.welcome", "worker.feed.give", "worker.feed.update", "worker.feed.end")


def points(role):
    out = subprocess.run([os.path.join(ROOT, "scripts/fault-points")], capture_output=True, text=True, check=True).stdout
    return [line for line in out.split() if line.startswith(role + ".")]


def finish(cluster, reference):
    sha = cluster.wait_finished(limit_s=60)
    check(sha == reference, f"weights {sha} differ from the undisturbed run's {reference}")


class NotReached(Failure):
    """The job may have been over before the faulty worker had started: worth another try, of a slower job."""


def patiently(scenario, *args):
    for attempt in range(4):
        try:
            with Cluster(flags=STRICT) as cluster, cluster.slowed() if attempt else contextlib.nullcontext():
                return scenario(cluster, *args)
        except NotReached:
            if attempt == 3:
                raise


def worker_scenario(cluster, point, reference, stop):
    """Two healthy workers; the faulty one joins (it gets its state while they step), steps, saves, and lives through two further changes."""
    cluster.start_coordinator()
    cluster.submit(tiny_job(cluster, **JOB))
    fault = point + (",stop" if stop else "")
    if point.startswith(FIRST):  # who is dialled, who gives: the one that was there first
        faulty = cluster.start_worker(fault=fault)
        cluster.wait_step(1)
        cluster.start_worker()
    else:
        cluster.start_worker()
        cluster.start_worker()
        cluster.wait_step(3)
        faulty = cluster.start_worker(fault=fault)
    extra = []

    def reached():
        return cluster.faults_reached() or cluster.job().state > 2

    # Points of parking need a change of membership while the faulty one is in: a loss, which waits for nobody to be fed.
    deadline = time.monotonic() + 30 * SLOW
    while not reached():
        if not extra and cluster.job().world == 3:
            extra.append(cluster.workers[0].kill() if point.startswith("worker.parked") else cluster.start_worker())
        if time.monotonic() > deadline:
            raise Failure("the point was never reached and the job does not end")
        time.sleep(0.005)
    if not cluster.faults_reached():
        raise NotReached("no scenario reaches this point")
    if stop:
        finished = lambda e: e.kind == "job_finished"  # noqa: E731: it may hold nobody up any more
        cluster.wait_event(lambda e: (e.kind == "worker_lost") or finished(e) or e.kind == "worker_left", limit_s=20)
        faulty.kill(signal.SIGCONT)
    finish(cluster, reference)
    if stop:
        check(faulty.wait() in (0, 1), f"the stopped worker ended with {faulty.popen.returncode}")


def transfer_scenario(cluster, point, reference, stop):
    """State moves while others stand still where somebody is lost: the faulty worker, a spare until then, takes its place."""
    cluster.start_coordinator()
    cluster.submit(tiny_job(cluster, **JOB, workers__max=2))
    lost = cluster.start_worker()
    cluster.start_worker()
    cluster.wait_step(3)
    faulty = cluster.start_worker(name="faulty", fault=point + (",stop" if stop else ""))

    def over():
        return cluster.faults_reached() or cluster.job().state > 2
    cluster.wait_until(lambda: over() or any(w.name == "faulty" and w.state == pb.WORKER_STATE_SPARE for w in cluster.list_workers()), 30, "no spare")
    lost.kill()
    cluster.wait_until(over, 60, "the point was never reached and the job does not end")
    if not cluster.faults_reached():
        raise NotReached("no scenario reaches this point")
    if stop:
        cluster.wait_event(lambda e: (e.kind in ("worker_lost", "worker_left") and e.worker == "faulty") or e.kind == "job_finished", limit_s=20)
        faulty.kill(signal.SIGCONT)
    finish(cluster, reference)
    if stop:
        check(faulty.wait() in (0, 1), f"the stopped worker ended with {faulty.popen.returncode}")


def grid_scenario(cluster, point, reference, stop, workers, layout):
    """What only happens between the ranks of a layout: the faulty worker is one of them, and then another one takes its place."""
    cluster.start_coordinator()
    cluster.submit(tiny_job(cluster, **GRID, **layout, workers__min=workers))
    faulty = cluster.start_worker(fault=point + (",stop" if stop else ""))
    for _ in range(workers - 1):
        cluster.start_worker()
    cluster.wait_until(lambda: cluster.faults_reached() or cluster.job().state > 2, 60, "the point was never reached and the job does not end")
    if not cluster.faults_reached():
        raise NotReached("no scenario reaches this point")
    if stop:
        cluster.wait_event(lambda e: e.kind in ("worker_lost", "job_finished", "worker_left"), limit_s=20)
        faulty.kill(signal.SIGCONT)
    else:
        cluster.start_worker()
    finish(cluster, reference)
    if layout is BUDDIES:
        check(cluster.job().replayed_steps == 0, "steps were replayed although the other one has everything")
    if stop:
        check(faulty.wait() in (0, 1), f"the stopped worker ended with {faulty.popen.returncode}")


def local_scenario(cluster, point, reference, stop):
    """Three hosts with disks of their own; the first one's worker, or the coordinator, is faulty; another worker comes to that host."""
    fault, of_worker = point + (",stop" if stop else ""), point.startswith("worker.")
    cluster.start_coordinator(fault=None if of_worker else fault)
    if not of_worker:
        cluster.keep_coordinator()
        if stop:
            wake_later(cluster)
    job = tiny_job(cluster, **JOB, checkpoint__kind=pb.CHECKPOINT_KIND_LOCAL, checkpoint__path=os.path.join(cluster.dir, "disk-%h"))
    cluster.retry(lambda: cluster.submit(job))
    workers = [cluster.start_worker(flags=["--host-id", host], fault=fault if of_worker and host == "a" else None) for host in "abc"]
    cluster.wait_until(lambda: cluster.faults_reached() or cluster.retry(cluster.job).state > 2, 60, "the point was never reached and the job does not end")
    if not cluster.faults_reached():
        raise NotReached("no scenario reaches this point")
    if of_worker and stop:
        cluster.wait_event(lambda e: e.kind in ("worker_lost", "job_finished", "worker_left"), limit_s=20)
        workers[0].kill(signal.SIGCONT)
    elif of_worker:
        cluster.start_worker(flags=["--host-id", "a"])
    finish(cluster, reference)


def corrupt(cluster):
    """Flips a bit in every piece of the newest checkpoint."""
    newest = [c for c in cluster.checkpoints() if c.state == pb.CHECKPOINT_STATE_COMMITTED][-1]
    for name in os.listdir(newest.dir):
        if name.endswith(".safetensors"):
            with open(os.path.join(newest.dir, name), "r+b") as f:
                f.seek(-8, os.SEEK_END)
                byte = f.read(1)
                f.seek(-8, os.SEEK_END)
                f.write(bytes([byte[0] ^ 1]))


def wake_later(cluster):
    """Once the coordinator has stopped at its point: waits for longer than the lost timeout, then lets it go on."""
    def wake():
        while not cluster.watch_stop.wait(0.01):
            if cluster.faults_reached():
                cluster.watch_stop.wait(LOST_S * 1.5)
                cluster.coordinator.kill(signal.SIGCONT)
                return
    threading.Thread(target=wake, daemon=True).start()


def coordinator_scenario(cluster, point, reference, stop=False):
    """Attach, growth, a death, a drain, checkpoints and their deletion, a bad checkpoint: the coordinator dies, or stops, once on the way."""
    cluster.start_coordinator(fault=point + (",stop" if stop else ""))
    cluster.keep_coordinator()
    if stop:
        wake_later(cluster)
    job = tiny_job(cluster, **{**JOB, "checkpoint__keep": 2})
    cluster.retry(lambda: cluster.submit(job))
    workers = [cluster.start_worker(name="a"), cluster.start_worker(name="b")]
    cluster.wait_step(3)
    workers.append(cluster.start_worker(name="c"))
    cluster.wait_step(12)
    if point.startswith("coord.send.feed"):  # before a death makes the growth part of a recovery
        cluster.wait_until(lambda: cluster.faults_reached() or cluster.retry(cluster.job).state > 2, 20, "nobody is fed")
    # Killed, a worker's death is seen by its peers, who park by themselves; stopped, they have to be told.
    workers[0].kill(signal.SIGSTOP if point.startswith("coord.send.revoke") else signal.SIGKILL)
    # (While the coordinator stands still the workers go on, and may be done before it knows of anything.)
    def wait_for(worker, *kinds):
        cluster.wait_event(lambda e: (e.kind in kinds and e.worker == worker) or e.kind == "job_finished")

    wait_for("a", "worker_lost", "worker_left")
    wait_for("c", "worker_attached")

    def drained():
        try:
            cluster.retry(lambda: cluster.drain("c"))
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.NOT_FOUND:  # not back yet after the restart
                raise
        return not workers[2].alive()
    cluster.wait_until(drained, 20, "the drained worker does not end")
    check(workers[2].popen.returncode == 0, f"the drained worker ended with {workers[2].popen.returncode}")
    if point.startswith(("coord.persist.bad", "coord.send.snapshot")) or not cluster.faults_reached():
        def two_committed():
            committed = [c for c in cluster.retry(cluster.checkpoints) if c.state == pb.CHECKPOINT_STATE_COMMITTED]
            return len(committed) >= 2 or cluster.retry(cluster.job).state == pb.JOB_STATE_FINISHED
        cluster.wait_until(two_committed, 20, "no two committed checkpoints")
        for worker in workers:
            worker.kill()
        wait_for("b", "worker_lost", "worker_left")
        cluster.retry(lambda: corrupt(cluster))
    workers.append(cluster.start_worker(name="d"))
    finish(cluster, reference)
    if not cluster.faults_reached():
        raise NotReached("no scenario reaches this point")
    check(cluster.restarts == (0 if stop else 1), f"the coordinator was started again {cluster.restarts} times")


def returns_during_preparation():
    """The only holder of a part, stopped at the end of its steps, comes back while the others prepare to go on without it: it
    writes a piece of the last checkpoint from the generation it was lost from."""
    changes = dict(steps=100, checkpoint_every=5, leaves=3, model__family=pb.MODEL_FAMILY_LLAMA, model__layers=5, model__heads=4,
                   model__kv_heads=2, model__hidden=44, model__slices=2, model__dropout=0.0)
    reference = undisturbed(changes)
    with Cluster(flags=STRICT) as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, parallel__tp=2, parallel__pp=2, parallel__optimizer_sharding=True, **changes))
        faults = ["worker.prepare.connect:2,sleep=4000", "worker.finished,stop", None, None]
        workers = [cluster.start_worker(name=f"w{i}", fault=fault) for i, fault in enumerate(faults)]
        cluster.wait_event("generation_go")
        cluster.start_worker()
        cluster.wait_event("worker_lost")
        workers[1].kill(signal.SIGCONT)
        cluster.wait_event("worker_returned")
        finish(cluster, reference)


def main():
    full = "--full" in sys.argv
    wanted = [a for a in sys.argv[1:] if not a.startswith("-")]
    reference, grid_reference = undisturbed(JOB), undisturbed(GRID)

    def on_coordinator(point, stop):
        return patiently(local_scenario if point.startswith(LOCAL_POINTS) else coordinator_scenario, point, reference, stop)

    def on_worker(point, hit, stop):
        if point.startswith(LOCAL_POINTS):
            return patiently(local_scenario, point + hit, reference, stop)
        for prefix, (workers, layout) in GRID_POINTS.items():
            if point.startswith(prefix):
                return patiently(grid_scenario, point + hit, grid_reference, stop, workers, layout)
        scenario = transfer_scenario if point.startswith("worker.prepare.transfer") else worker_scenario
        return patiently(scenario, point + hit, reference, stop)

    cases = []
    for i, point in enumerate(points("worker")):
        for hit in ("", ":2", ":3") if full else ("",):
            cases.append((f"worker killed at {point}{hit}", lambda p=point, h=hit: on_worker(p, h, False)))
        if full or i % 3 == 0:
            cases.append((f"worker stopped at {point}", lambda p=point: on_worker(p, "", True)))
    for i, point in enumerate(points("coord")):
        if full or i % 6 == 0:
            cases.append((f"coordinator stopped at {point}", lambda p=point: on_coordinator(p, True)))
        for hit in ("", ":2", ":3") if full else ("",):
            cases.append((f"coordinator killed at {point}{hit}", lambda p=point + hit: on_coordinator(p, False)))
    cases.append(("worker returns during a preparation", returns_during_preparation))
    passed = failed = 0
    for name, case in cases:
        if wanted and not any(word in name for word in wanted):
            continue
        start = time.monotonic()
        try:
            case()
            passed += 1
            print(f"ok   {name} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception as error:  # noqa: BLE001: every failure is reported and counted
            failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {error}", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
