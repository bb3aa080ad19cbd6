#!/usr/bin/python3
"""Layouts with real processes: tensor, pipeline and sharded data parallelism end with the weights of one worker alone, whatever happens.

    test_layouts.py [--full] [TEST...]    --full: the whole matrix instead of a sample"""

import os
import signal
import sys
import threading

from harness import FAST, STRICT, Cluster, check, main, pb, reference, tiny_job

FULL = "--full" in sys.argv
sys.argv = [word for word in sys.argv if word != "--full"]
STEPS = 120
GPT2 = {"model__layers": 4, "model__heads": 4, "model__slices": 4}
LLAMA = dict(GPT2, model__family=pb.MODEL_FAMILY_LLAMA, model__kv_heads=4, model__hidden=96, model__dropout=0.0)


def layout(tp=1, pp=1, dp=0, sharded=False, recompute=pb.RECOMPUTE_NONE, buddies=False):
    fields = {"parallel__tp": tp, "parallel__pp": pp, "parallel__dp": dp, "parallel__optimizer_sharding": sharded, "parallel__recompute": recompute}
    return dict(fields, parallel__redundancy=pb.REDUNDANCY_BUDDY) if buddies else fields


def running(cluster, workers, family, steps=STEPS, **changes):
    return cluster.running(workers, steps=steps, **family, **changes)


def expect_equal(cluster, family, steps=STEPS, **changes):
    """The layout's own fields are no part of the law: the reference is one worker that has none of them."""
    sha = cluster.wait_finished()
    wanted = reference(steps=steps, **family, **changes)
    check(sha == wanted, f"weights {sha} differ from one worker's {wanted}")


def run_layout(family, tp, pp, dp, sharded=False, recompute=pb.RECOMPUTE_NONE):
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=12, **family, **layout(tp, pp, dp, sharded, recompute)))
        for _ in range(tp * pp * dp):
            cluster.start_worker()
        expect_equal(cluster, family, steps=12)
        goes = [e.text for e in cluster.events if e.kind == "generation_go"]
        check(len(goes) == 1 and f"as tp {tp} x pp {pp} x dp {dp}" in goes[0], f"not one generation in the layout asked for: {goes}")


def test_every_layout_ends_with_the_same_weights():
    cases = [(2, 1, 1, False), (4, 1, 1, False), (1, 2, 1, False), (1, 4, 1, False), (1, 3, 2, True), (2, 2, 2, False), (2, 2, 2, True), (1, 1, 3, True)]
    if FULL:
        cases = [(tp, pp, dp, sharded) for tp in (1, 2, 4) for pp in (1, 2, 3, 4) for dp in (1, 2, 3, 4) if 1 < tp * pp * dp <= 8
                 for sharded in (False, True)]
    recomputes = (pb.RECOMPUTE_NONE, pb.RECOMPUTE_SELECTIVE, pb.RECOMPUTE_FULL)
    for family in (GPT2, LLAMA):
        for i, (tp, pp, dp, sharded) in enumerate(cases):
            for recompute in recomputes if FULL else [recomputes[i % 3]]:
                run_layout(family, tp, pp, dp, sharded, recompute)


def test_a_replica_of_tensor_and_stage_is_lost():
    with Cluster() as cluster:
        with running(cluster, 8, GPT2, **layout(2, 2)) as workers:
            workers[3].kill()
            lost = cluster.wait_event("worker_lost")
            cluster.wait_event(lambda e: e.kind == "generation_go" and e.number > lost.number)
            cluster.start_worker()
            cluster.wait_event(lambda e: e.kind == "generation_go" and "8 workers" in e.text and e.number > lost.number)
        expect_equal(cluster, GPT2)
        check(cluster.job().replayed_steps == 0, "another replica holds everything: no step is replayed")


def test_the_only_holder_of_a_stage_is_lost():
    """One checkpoint, on demand: what is done after it is lost with the stage, however fast the workers are."""
    changes = dict(steps=3 * STEPS, checkpoint_every=0)
    with Cluster() as cluster:
        with running(cluster, 2, LLAMA, **changes, **layout(1, 2)) as workers:
            cluster.checkpoint()
            cluster.wait_event("checkpoint_committed")
            cluster.wait_step(max(c.step for c in cluster.checkpoints() if c.state == pb.CHECKPOINT_STATE_COMMITTED) + 1)
            workers[1].kill()
            cluster.wait_event("worker_lost")
            cluster.start_worker()
            cluster.wait_event("steps_replayed")
        expect_equal(cluster, LLAMA, **changes)


def kill_group(cluster, workers, **coordinates):
    """SIGKILL at once for all workers with these coordinates (dp, pp); those that were killed."""
    found = {w.pid for w in cluster.list_workers("tiny") if w.HasField("coordinates") and all(getattr(w.coordinates, k) == v for k, v in coordinates.items())}
    group = [worker for worker in workers if worker.pid in found]
    for worker in group:
        worker.kill()
    return group


def test_a_whole_tensor_group_is_lost_and_its_replica_goes_on():
    """All ranks of one replica, then all of one stage of it: the other replica holds everything."""
    for pp, killed in ((1, {"dp": 1}), (2, {"dp": 0, "pp": 1})):
        with Cluster() as cluster:
            with running(cluster, 4 * pp, GPT2, **layout(tp=2, pp=pp)) as workers:
                check("x dp 2" in cluster.wait_event("generation_go").text, "not two replicas")
                check(len(kill_group(cluster, workers, **killed)) == 2, f"not the 2 ranks of a tensor group: {killed}")
                lost = cluster.wait_event("worker_lost")
                go = cluster.wait_event(lambda e: e.kind == "generation_go" and f"as tp 2 x pp {pp} x dp 1" in e.text, after=lost.number)
                check("0 steps replayed" in go.text, go.text)
            expect_equal(cluster, GPT2)
            check(cluster.job().replayed_steps == 0, "another replica holds everything: no step is replayed")


def test_the_only_tensor_group_of_a_stage_is_lost():
    """No other replica, no buddy: back to the one checkpoint, whose step all had passed, with two workers in the place of the lost ones."""
    changes = dict(steps=2 * STEPS, checkpoint_every=0)
    with Cluster() as cluster:
        with running(cluster, 4, GPT2, **changes, **layout(tp=2, pp=2, dp=1)) as workers:
            cluster.checkpoint()
            cluster.wait_event("checkpoint_committed")
            saved = max(c.step for c in cluster.checkpoints() if c.state == pb.CHECKPOINT_STATE_COMMITTED)
            cluster.wait_step(saved + 1)
            check(len(kill_group(cluster, workers, pp=1)) == 2, "not the 2 ranks of a stage")
            lost = cluster.wait_event("worker_lost")
            for _ in range(2):
                cluster.start_worker()
            back = cluster.wait_event("steps_replayed")
            go = cluster.wait_event(lambda e: e.kind == "generation_go" and "4 workers" in e.text, after=lost.number)
            check("state from checkpoint" in go.text and f"at step {saved}" in go.text and "checkpoint" in back.text, f"{go.text}; {back.text}")
        expect_equal(cluster, GPT2, **changes)
        check(cluster.job().replayed_steps > 0, "what was replayed is not counted")


def test_the_only_holder_of_a_stage_is_drained():
    with Cluster() as cluster:
        with running(cluster, 2, GPT2, steps=3 * STEPS, **layout(1, 2)):
            cluster.start_worker(name="fresh")
            cluster.wait_event(lambda e: e.kind == "worker_attached" and e.worker == "fresh")
            cluster.drain("w1", "memory errors")
            cluster.wait_event(lambda e: e.kind == "worker_left" and e.worker == "w1")
        expect_equal(cluster, GPT2, steps=3 * STEPS)
        check(cluster.job().replayed_steps == 0, "a drained worker hands over what it alone holds")


def test_growth_and_shrink_of_stages():
    with Cluster() as cluster:
        with running(cluster, 2, LLAMA, steps=3 * STEPS, **layout(1, 2, sharded=True)) as workers:
            for _ in range(2):
                cluster.start_worker()
            cluster.wait_event(lambda e: e.kind == "generation_go" and "4 workers" in e.text)
            workers[0].kill(signal.SIGTERM)
            check(workers[0].wait() == 0, "a worker that was told to leave ends with 0")
        expect_equal(cluster, LLAMA, steps=3 * STEPS)
        check(cluster.job().replayed_steps == 0, "planned changes replay nothing")


def change_while_others_step(family, sizes, **fields):
    """From each size to the next, by newcomers or by a drain: nobody stands still for state to move."""
    with Cluster() as cluster:
        steps = 3 * STEPS
        with running(cluster, sizes[0], family, steps=steps, **layout(**fields)) as workers:
            go = cluster.wait_event("generation_go")
            for size in sizes[1:]:
                while len(workers) < size:
                    workers.append(cluster.start_worker())
                if len(workers) > size:
                    workers.pop(0).kill(signal.SIGTERM)
                go = cluster.wait_event(lambda e: e.kind == "generation_go" and f"{size} workers" in e.text, after=go.number)
                check("0 steps replayed, 0 bytes moved" in go.text, go.text)
            check(any(e.kind == "state_fed" for e in cluster.events), "nobody was fed")
            check(not [e for e in cluster.events if e.kind == "feed_failed"], "a feed failed")
        expect_equal(cluster, family, steps=steps)


def test_chunks_of_a_sharded_optimizer_change_hands_while_others_step():
    change_while_others_step(GPT2, (2, 3, 2), sharded=True)
    change_while_others_step(LLAMA, (2, 4, 3), sharded=True, buddies=True)


def test_stages_change_hands_while_others_step():
    change_while_others_step(GPT2, (2, 3, 2), pp=0, dp=1)
    change_while_others_step(LLAMA, (2, 4), tp=2, pp=0, dp=1)


def test_spares_with_an_older_state_are_fed_like_newcomers():
    """Two members too many become spares, and members again some steps later."""
    with Cluster() as cluster:
        with running(cluster, 4, GPT2, steps=2 * STEPS, **layout(1, 2)):
            cluster.scale(2)
            shrunk = cluster.wait_event(lambda e: e.kind == "generation_go" and "2 workers" in e.text)
            cluster.wait_step(cluster.job().steps_done + 2)
            cluster.scale(4)
            grown = cluster.wait_event(lambda e: e.kind == "generation_go" and "4 workers" in e.text, after=shrunk.number)
            check("0 steps replayed, 0 bytes moved" in grown.text, grown.text)
            fed = {e.worker for e in cluster.events if e.kind == "state_fed" and shrunk.number < e.number < grown.number}
            check(len(fed) >= 2, f"fed: {fed}")
        expect_equal(cluster, GPT2, steps=2 * STEPS)
        check(cluster.job().replayed_steps == 0, "planned changes replay nothing")


def test_tensor_ranks_come_and_die():
    """tp 1, then 2, then 1: one dies while it is fed, the next one when it holds half of every matrix, for which its buddy stands in."""
    with Cluster() as cluster:
        with running(cluster, 1, LLAMA, steps=2 * STEPS, **layout(tp=0, pp=1, dp=1, buddies=True)):
            dies = cluster.start_worker(name="dies")
            cluster.wait_event(lambda e: e.kind == "state_fed" and e.worker == "dies")
            dies.kill()
            half = cluster.start_worker(name="half")
            fed = cluster.wait_event(lambda e: e.kind == "state_fed" and e.worker == "half")
            grown = cluster.wait_event(lambda e: e.kind == "generation_go" and "2 workers" in e.text, after=fed.number)
            check("as tp 2 x pp 1 x dp 1" in grown.text and "0 steps replayed, 0 bytes moved" in grown.text, grown.text)
            cluster.wait_step(cluster.job().steps_done + 2)
            half.kill()
            alone = cluster.wait_event(lambda e: e.kind == "generation_go", after=grown.number)
            check("as tp 1 x pp 1 x dp 1" in alone.text and "0 steps replayed" in alone.text, alone.text)
        expect_equal(cluster, LLAMA, steps=2 * STEPS)


def test_a_sharded_optimizer_loses_a_holder():
    with Cluster() as cluster:
        with running(cluster, 3, GPT2, checkpoint_every=10, **layout(1, 1, sharded=True)) as workers:
            cluster.wait_event("checkpoint_committed")
            workers[2].kill()
            cluster.wait_event("worker_lost")
        expect_equal(cluster, GPT2, checkpoint_every=10)


def lose_one_with_buddies(family, workers, newcomer, **fields):
    """One worker dies at once; nobody goes back although it alone owned a part."""
    with Cluster() as cluster:
        with running(cluster, workers, family, steps=3 * STEPS, **layout(buddies=True, **fields)) as started:
            cluster.wait_until(lambda: cluster.job().steps_done >= 10, 30, "no progress")
            started[-1].kill()
            lost = cluster.wait_event("worker_lost")
            if newcomer:
                cluster.start_worker()
            go = cluster.wait_event(lambda e: e.kind == "generation_go" and e.number > lost.number)
            check("state from mirrors, 0 steps replayed" in go.text, f"the buddy's mirror was not the source: {go.text}")
        together = cluster.wait_event("buddies_together")
        words = together.text.split()
        check(words[0] == words[2], f"here all are on one host: {together.text}")
        expect_equal(cluster, family, steps=3 * STEPS)
        check(cluster.job().replayed_steps == 0, "steps were replayed although everything had a second holder")


def test_a_buddy_stands_in_for_a_lost_holder_of_a_sharded_optimizer():
    lose_one_with_buddies(GPT2, 3, False, sharded=True)


def test_a_buddy_stands_in_for_a_lost_stage():
    lose_one_with_buddies(GPT2, 2, True, pp=2, dp=1)
    lose_one_with_buddies(LLAMA, 2, True, pp=2, dp=1)


def test_a_buddy_stands_in_for_a_lost_tensor_rank():
    lose_one_with_buddies(GPT2, 4, True, tp=2, pp=2, dp=1)


def test_buddies_die_one_after_the_other():
    with Cluster() as cluster:
        with running(cluster, 3, GPT2, steps=3 * STEPS, **layout(sharded=True, buddies=True)) as workers:
            after = 0
            for _ in range(3):
                step = cluster.job().steps_done
                cluster.wait_until(lambda: cluster.job().steps_done >= step + 5, 30, "no progress")
                workers.pop(0).kill()
                after = cluster.wait_event("worker_lost", after=after).number
                workers.append(cluster.start_worker())
                cluster.wait_event(lambda e: e.kind == "generation_go" and "3 workers" in e.text, after=after)
        expect_equal(cluster, GPT2, steps=3 * STEPS)
        check(cluster.job().replayed_steps == 0, "one loss at a time costs no step")


def test_a_worker_and_its_buddy_are_lost_together():
    with Cluster() as cluster:
        with running(cluster, 2, LLAMA, steps=3 * STEPS, checkpoint_every=10, **layout(pp=2, dp=1, buddies=True)) as workers:
            cluster.wait_event("checkpoint_committed")
            for worker in workers:
                worker.kill()
            cluster.wait_event("worker_lost")
            for _ in range(2):
                cluster.start_worker()
            go = cluster.wait_event(lambda e: e.kind == "generation_go" and "state from checkpoint" in e.text)
            check("0 bytes moved" in go.text, go.text)
        expect_equal(cluster, LLAMA, steps=3 * STEPS, checkpoint_every=10)


def slow_down(worker, stop):
    """The worker computes a third of the time."""
    while not stop.is_set() and worker.alive():
        worker.kill(signal.SIGSTOP)
        stop.wait(0.02)
        worker.kill(signal.SIGCONT)
        stop.wait(0.01)


def test_layers_move_from_a_slow_worker():
    family, steps = dict(GPT2, model__layers=8, leaves=4), 3 * STEPS
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*FAST, "--rebalance-ms", "150"])
        cluster.submit(tiny_job(cluster, steps=steps, **family, **layout(pp=2)))
        workers = [cluster.start_worker() for _ in range(2)]
        cluster.wait_until(lambda: cluster.job().steps_done >= 5, 30, "the workers did not start")
        before = list(cluster.job().layout.stage_first)

        def moved():
            now = list(cluster.job().layout.stage_first)  # none between generations
            return now and now[1] < before[1]
        first = next(w for w in cluster.list_workers("tiny") if w.HasField("coordinates") and w.coordinates.pp == 0)
        slow, stop = next(w for w in workers if w.pid == first.pid), threading.Event()
        thread = threading.Thread(target=slow_down, args=(slow, stop))
        thread.start()
        try:
            cluster.wait_event("layers_moved")
            cluster.wait_until(moved, 30, "the slow worker kept its layers")
        finally:
            stop.set()
            thread.join()
        expect_equal(cluster, family, steps=steps)
        check(cluster.job().replayed_steps == 0, "a planned change replays nothing")


def test_leaves_move_from_a_slow_worker():
    with Cluster() as cluster:  # so many steps that any gain pays; whichever way leaves are divided, bits are the same
        cluster.start_coordinator(flags=[*FAST, "--rebalance-ms", "150"])
        cluster.submit(tiny_job(cluster, steps=1000000, **GPT2))
        workers, stop = [cluster.start_worker() for _ in range(2)], threading.Event()
        cluster.wait_until(lambda: cluster.job().world == 2 and cluster.job().steps_done >= 5, 30, "the workers did not start")
        generation = cluster.job().generation
        thread = threading.Thread(target=slow_down, args=(workers[0], stop))
        thread.start()
        try:
            moved = cluster.wait_event("leaves_moved")
            check("instead of 4" in moved.text, moved.text)
            cluster.wait_until(lambda: cluster.job().generation > generation, 30, "the leaves did not move")
        finally:
            stop.set()
            thread.join()
        check(cluster.job().replayed_steps == 0, "a planned change replays nothing")


def test_coordinator_killed_costs_no_step():
    with Cluster() as cluster:
        with running(cluster, 4, GPT2, steps=3 * STEPS, **layout(2, 2)):
            generation = cluster.job().generation
            cluster.coordinator.kill()
            cluster.coordinator.wait()
            cluster.start_coordinator()
            cluster.wait_event("worker_reattached")
        expect_equal(cluster, GPT2, steps=3 * STEPS)
        check(cluster.job().generation in (0, generation) and cluster.job().replayed_steps == 0, "the generation changed")


def test_everything_killed_resumes_in_another_layout():
    with Cluster(flags=STRICT) as cluster:
        with running(cluster, 4, LLAMA, checkpoint_every=10, **layout(2, sharded=True)) as workers:
            cluster.wait_event("checkpoint_committed")
            for process in [*workers, cluster.coordinator]:
                process.kill()
            for process in [*workers, cluster.coordinator]:
                process.wait()
            cluster.start_coordinator()
            for _ in range(2):
                cluster.start_worker()
        expect_equal(cluster, LLAMA, checkpoint_every=10)


def test_too_few_workers_wait_and_say_so():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=12, **GPT2, **layout(2, 2)))
        for _ in range(3):
            cluster.start_worker()
        waiting = cluster.wait_event("job_waiting")
        check("4" in waiting.text and "3" in waiting.text, f"not what is short and by how much: {waiting.text}")
        cluster.start_worker()
        expect_equal(cluster, GPT2, steps=12)


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
