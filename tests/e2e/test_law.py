#!/usr/bin/python3
"""The law, with real processes: whatever happens to workers and coordinator, the weights are those of the undisturbed run."""

import os
import signal

from harness import LOST_S, STRICT, Cluster, check, main, pb, reference, tiny_job

STEPS = 150


def expect_equal(cluster, **changes):
    sha = cluster.wait_finished()
    check(sha == reference(**changes), f"weights {sha} differ from the undisturbed run's {reference(**changes)}")


def test_any_number_of_workers():
    for workers in (2, 3, 4, 7):
        with Cluster() as cluster:
            cluster.start_coordinator()
            cluster.submit(tiny_job(cluster, steps=20, workers__min=workers))
            for _ in range(workers):
                cluster.start_worker()
            expect_equal(cluster, steps=20)
            check(cluster.job().generations == 1, "one generation is enough")


def test_uneven_leaf_counts():
    for leaves, workers in ((5, 2), (7, 3), (13, 4)):
        with Cluster() as cluster:
            cluster.start_coordinator()
            cluster.submit(tiny_job(cluster, steps=12, leaves=leaves, workers__min=workers))
            for _ in range(workers):
                cluster.start_worker()
            expect_equal(cluster, steps=12, leaves=leaves)


def test_threads_do_not_matter():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=20, workers__min=2))
        cluster.start_worker(threads=3)
        cluster.start_worker(threads=8)
        expect_equal(cluster, steps=20)


def running(cluster, workers, steps=STEPS, **changes):
    return cluster.running(workers, steps=steps, **changes)


def test_worker_killed():
    with Cluster() as cluster:
        with running(cluster, 3) as workers:
            workers[1].kill()
            event = cluster.wait_event(lambda e: e.kind == "generation_go" and "lost" in e.text)
            check("2 workers continue" in event.text, event.text)
        expect_equal(cluster, steps=STEPS)
        check(cluster.job().replayed_steps == 0, "no step is replayed when a replica lives")


def test_two_workers_killed_at_once():
    with Cluster() as cluster:
        with running(cluster, 4) as workers:
            workers[0].kill()
            workers[2].kill()
        expect_equal(cluster, steps=STEPS)
        check(cluster.job().replayed_steps == 0, "no step is replayed when a replica lives")


def test_worker_killed_during_recovery():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=STEPS))
        first = cluster.start_worker()
        cluster.start_worker(fault="worker.parked:2")  # dies when it parks for the second generation change
        cluster.start_worker()
        with cluster.slowed():
            cluster.wait_step(5)
            first.kill()
            cluster.wait_step(40)
            cluster.start_worker()
            cluster.wait_event(lambda e: e.kind == "generation_go" and e.generation > 2)
        expect_equal(cluster, steps=STEPS)


def test_coordinator_killed_costs_no_step():
    with Cluster() as cluster:
        with running(cluster, 3, steps=STEPS * 4):
            generation = cluster.job().generation
            before = len([e for e in cluster.events if e.kind == "generation_go"])
            cluster.coordinator.kill()
            cluster.coordinator.wait()
            cluster.start_coordinator()
            cluster.wait_event("worker_reattached")
        sha = cluster.wait_finished()
        check(sha == reference(steps=STEPS * 4), "weights differ")
        goes = [e for e in cluster.events if e.kind == "generation_go"]
        check(cluster.job().generation == 0 or cluster.job().generation == generation, "the generation changed")
        check(len(goes) <= max(before, 1), f"a restart of the coordinator formed a new generation: {[e.text for e in goes]}")


def test_coordinator_and_worker_killed():
    with Cluster(flags=STRICT) as cluster:
        with running(cluster, 3) as workers:
            cluster.coordinator.kill()
            workers[0].kill()
            cluster.coordinator.wait()
            cluster.start_coordinator()
        expect_equal(cluster, steps=STEPS)


def test_growth_and_shrink():
    with Cluster() as cluster:
        with running(cluster, 1) as workers:
            cluster.start_worker()
            cluster.start_worker()
            cluster.wait_event(lambda e: e.kind == "generation_go" and "3 workers" in e.text)
            workers[0].kill(signal.SIGTERM)
            check(workers[0].wait() == 0, "a worker that was told to leave ends with 0")
            cluster.wait_event(lambda e: e.kind == "generation_go" and "2 workers" in e.text)
        expect_equal(cluster, steps=STEPS)
        check(cluster.job().replayed_steps == 0, "planned changes replay nothing")


def test_newcomers_get_their_state_while_others_step():
    """Growth, then a drain with somebody to take the place: nothing is moved while members stand still."""
    with Cluster() as cluster:
        with running(cluster, 2, steps=STEPS * 3, workers__max=3):
            cluster.start_worker()
            grown = cluster.wait_event(lambda e: e.kind == "generation_go" and "3 workers" in e.text)
            cluster.start_worker()
            cluster.wait_until(lambda: any(w.name == "w3" and w.state == pb.WORKER_STATE_SPARE for w in cluster.list_workers()), 20, "no spare")
            cluster.drain("w1", "memory errors")
            replaced = cluster.wait_event(lambda e: e.kind == "generation_go" and "3 workers" in e.text, after=grown.number)
            for go in (grown, replaced):
                check(" 0 bytes moved" in go.text, go.text)
            fed = [e.worker for e in cluster.events if e.kind == "state_fed"]
            check(fed == ["w2", "w3"], f"fed: {fed}")
        expect_equal(cluster, steps=STEPS * 3)
        check(cluster.job().replayed_steps == 0, "planned changes replay nothing")


def test_drain():
    with Cluster() as cluster:
        with running(cluster, 3) as workers:
            cluster.drain("w1", "memory errors")
            cluster.wait_event(lambda e: e.kind == "generation_go" and "2 workers" in e.text)
            cluster.wait_event(lambda e: e.kind == "worker_left" and e.worker == "w1")
            cluster.wait_until(lambda: any(not w.alive() and w.popen.returncode == 0 for w in workers), 10, "the drained worker did not end with 0")
            again = cluster.start_worker(name="w1")
            check(again.wait() == 1, "a drained name is refused")
            check("undrain" in open(again.log).read(), "and it is told how to lift it")
        expect_equal(cluster, steps=STEPS)


def test_stopped_worker_is_fenced_and_comes_back():
    with Cluster(flags=STRICT) as cluster:
        with running(cluster, 3, steps=STEPS * 2) as workers:
            workers[2].kill(signal.SIGSTOP)
            lost = cluster.wait_event("worker_lost")
            check("no sign of life" in lost.text, lost.text)
            cluster.wait_event(lambda e: e.kind == "generation_go" and "2 workers" in e.text)
            workers[2].kill(signal.SIGCONT)
            cluster.wait_event(lambda e: e.kind == "worker_attached" and e.number > lost.number)
            cluster.wait_event(lambda e: e.kind == "generation_go" and "3 workers" in e.text and e.number > lost.number)
            check(not [e for e in cluster.events if e.kind == "feed_failed"], "what was revoked before does not disturb the feed")
        expect_equal(cluster, steps=STEPS * 2)


def test_stopped_coordinator_blames_nobody():
    with Cluster(flags=STRICT) as cluster:
        with running(cluster, 3, steps=STEPS * 4):
            cluster.coordinator.kill(signal.SIGSTOP)
            cluster.watch_stop.wait(LOST_S * 1.5)  # that is what is tested
            cluster.coordinator.kill(signal.SIGCONT)
        sha = cluster.wait_finished()
        check(sha == reference(steps=STEPS * 4), "weights differ")
        check(not [e for e in cluster.events if e.kind == "worker_lost"], "a paused coordinator declared a worker lost")


def test_everything_killed_resumes_from_checkpoint():
    with Cluster(flags=STRICT) as cluster:
        with running(cluster, 3, steps=STEPS, checkpoint_every=20) as workers:
            cluster.wait_event("checkpoint_committed")
            cluster.wait_step(30)
            for process in [*workers, cluster.coordinator]:
                process.kill()
            for process in [*workers, cluster.coordinator]:
                process.wait()
            cluster.start_coordinator()
            cluster.start_worker()
            cluster.start_worker()
            cluster.wait_event(lambda e: e.kind == "generation_go" and e.generation > 1 and "continue" in e.text and "at step 0" not in e.text)
        expect_equal(cluster, steps=STEPS, checkpoint_every=20)


def test_all_workers_killed_go_back_to_the_checkpoint():
    """One checkpoint, on demand: whatever is done after it is lost with the workers, however fast they are."""
    changes = dict(steps=6 * STEPS, checkpoint_every=0)
    with Cluster() as cluster:
        with running(cluster, 2, **changes) as workers:
            cluster.checkpoint()
            cluster.wait_event("checkpoint_committed")
            cluster.wait_step(max(c.step for c in cluster.checkpoints() if c.state == pb.CHECKPOINT_STATE_COMMITTED) + 1)
            for worker in workers:
                worker.kill()
            cluster.wait_event("worker_lost")
            cluster.start_worker()
            back = cluster.wait_event("steps_replayed")
        expect_equal(cluster, **changes)
        check(cluster.job().replayed_steps > 0 and "checkpoint" in back.text, "replayed steps are counted and explained")


def test_last_worker_leaves_in_good_order():
    with Cluster() as cluster:
        with running(cluster, 1) as workers:
            workers[0].kill(signal.SIGTERM)
            check(workers[0].wait() == 0, "a worker that was told to leave ends with 0")
            left = cluster.wait_event("worker_left")
            check([e for e in cluster.events if e.kind == "checkpoint_committed" and e.number < left.number], "its state was not saved")
            cluster.start_worker()
        expect_equal(cluster, steps=STEPS)
        check(cluster.job().replayed_steps == 0, "a graceful leave replays nothing")


def test_no_sample_is_lost_or_repeated():
    """Every update that was applied is made of every leaf exactly once, and leaf L of step S is sequences S*B + L*per_leaf ...: read from
    the ledgers of all workers, of a run with deaths and growth. A step computed again after a loss counts by the generation that applied
    it (or had completed its sum)."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=STEPS))
        ledgers = [os.path.join(cluster.dir, f"ledger{i}") for i in range(5)]
        workers = [cluster.start_worker(flags=["--ledger", ledger]) for ledger in ledgers[:3]]
        with cluster.slowed():
            cluster.wait_step(10)
            workers[1].kill()
            cluster.wait_step(30)
            cluster.start_worker(flags=["--ledger", ledgers[3]])
            cluster.wait_step(60)
            workers[0].kill()
            newest = cluster.start_worker(flags=["--ledger", ledgers[4]])
            cluster.wait_until(newest.trains, 30, "the last worker did not join")
        expect_equal(cluster, steps=STEPS)
        leaves, applied = {}, {}
        for ledger in ledgers:
            for line in open(ledger):
                kind, *fields = line.split()
                row = {key: int(value) for key, value in (field.split("=") for field in fields)}
                if kind == "leaf":
                    check(row["first"] == row["step"] * 16 + row["leaf"] * 2 and row["count"] == 2, f"wrong samples: {line}")
                    leaves.setdefault((row["step"], row["generation"]), []).append(row["leaf"])
                elif kind == "applied":
                    applied.setdefault(row["step"], set()).add(row["generation"])
        check(sorted(applied) == list(range(STEPS)), "an update is missing")
        for step in applied:
            complete = [g for (s, g), found in leaves.items() if s == step and sorted(found) == list(range(8))]
            check(complete, f"no generation computed every leaf of step {step} exactly once")
            check(min(applied[step]) >= min(complete), f"step {step} was applied before its sum was complete")


def test_many_jobs_at_once():
    with Cluster() as cluster:
        cluster.start_coordinator()
        for name in ("a", "b", "c"):
            cluster.submit(tiny_job(cluster, name=name, steps=20))
            cluster.start_worker(job=name)
        shas = {cluster.wait_finished(name) for name in ("a", "b", "c")}
        check(shas == {reference(steps=20)}, f"jobs that differ in name alone have the same weights: {shas}")


def test_data_is_checked():
    with Cluster() as cluster:
        cluster.start_coordinator()
        os.makedirs(os.path.join(cluster.dir, "empty"))
        cluster.submit(tiny_job(cluster, name="nodata", data__path=os.path.join(cluster.dir, "absent")))
        worker = cluster.start_worker(job="nodata")
        check(worker.wait() == 1, "missing data ends the worker with 1")
        check("absent" in open(worker.log).read(), "and the line names the file")
        check(cluster.job("nodata").state == pb.JOB_STATE_PENDING, "the job itself goes on waiting")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
