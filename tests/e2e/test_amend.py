#!/usr/bin/python3
"""The law holds for the amended record: whoever computes it, and whoever dies. Arguments: only the tests named."""

import contextlib
import os

import grpc

from harness import FAST, STRICT, Cluster, check, main, pb, run, tiny_job
from test_api import call, refusal


def amend(cluster, **fields):
    return call(cluster, "AmendJob", job="tiny", amendment=pb.Amendment(**fields)).job


def settled(job):
    return [(one.version, one.at_step) for one in job.spec.amendments if one.settled]


def weights(amendments, workers=1, trouble=False, **changes):
    """SHA-256 of the job with those amendments, made before it has any worker, so that each takes effect where it says."""
    with Cluster(flags=STRICT if trouble else FAST) as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **changes))
        for one in amendments:
            amend(cluster, **one)
        if trouble:
            cluster.coordinator.kill()
            cluster.coordinator.wait()
            cluster.start_coordinator()
        with cluster.slowed() if trouble else contextlib.nullcontext():
            for _ in range(workers):
                worker = cluster.start_worker()
            if trouble:
                cluster.wait_step(5)
                worker.kill()
                cluster.coordinator.kill()
                cluster.coordinator.wait()
                cluster.start_coordinator()
                cluster.start_worker()
        sha256, job = cluster.wait_finished(), cluster.job()
        check(settled(job) == [(i + 1, one["at_step"]) for i, one in enumerate(amendments)], f"all of them: {job.spec.amendments}")
        check(job.steps_done == job.steps, f"{job.steps_done} of {job.steps}")
        return sha256, job.steps_done


SCHEDULE = [{"lr": 0.002, "at_step": 12}, {"steps": 48, "checkpoint_every": 7, "at_step": 20}, {"skip_first": 500, "skip_count": 40, "at_step": 24}]


def test_an_amended_run_has_one_result():
    alone, steps = weights(SCHEDULE)
    check(steps == 48, f"longer: {steps}")
    check(weights(SCHEDULE, workers=3, trouble=True) == (alone, 48), "the same with three workers, over deaths of both sides")
    check(weights(SCHEDULE[:2])[0] != alone, "what is skipped shows")
    plain = weights([], steps=48)[0]
    check(plain != alone and weights([{"steps": 48, "at_step": 1}])[0] == plain, "while the rate warms up the steps do not show")


def test_amended_while_it_runs():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=1000000))
        cluster.start_worker()
        cluster.start_worker()
        cluster.wait_step(3)
        amend(cluster, lr=0.001)
        cluster.coordinator.kill()  # right after the answer
        cluster.coordinator.wait()
        cluster.start_coordinator()
        cluster.wait_event(lambda event: event.kind == "amendment_settled")
        for _ in range(50):  # shorter than it is by now would be refused
            try:
                amend(cluster, steps=cluster.job().steps_done + 200)
                break
            except grpc.RpcError:
                continue
        sha256, job = cluster.wait_finished(), cluster.job()
        steps = dict(settled(job))
        check(sorted(steps) == [1, 2], f"{job.spec.amendments}")
        check(steps[1] >= 3 and job.steps_done == max(job.spec.amendments[-1].steps, steps[2]), f"{steps} {job.steps_done}")
        end = job.spec.amendments[-1].steps
        told = run(cluster, "describe", "job", "tiny", code=0)
        check(f"from step {steps[1]}: lr 0.001" in told and f"from step {steps[2]}: steps {end}" in told, told)
    again = weights([{"lr": 0.001, "at_step": steps[1]}, {"steps": end, "at_step": steps[2]}], steps=1000000)
    check(again == (sha256, job.steps_done), "as if it had been known from the beginning")


def test_what_is_refused():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster))
        for fields, word in (({}, "nothing to change"), ({"lr": 20}, "not allowed"), ({"min_lr": 5}, "optimizer.min_lr"), ({"lr": 0.001, "at_step": 31}, "at_step"),
                             ({"steps": 5, "at_step": 9}, "steps"), ({"checkpoint_every": 7, "checkpoint_keep_every": 10}, "keep_every")):
            code, reason, _, text = refusal(lambda: amend(cluster, **fields))
            check(code == grpc.StatusCode.INVALID_ARGUMENT and word in text, f"{fields}: {code} {reason} {text}")
        amend(cluster, skip_first=100, skip_count=50)
        code, _, _, text = refusal(lambda: amend(cluster, skip_first=120, skip_count=1))
        check(code == grpc.StatusCode.INVALID_ARGUMENT and "amendment 1 skips" in text, text)
        revision = amend(cluster, checkpoint_keep=2).revision
        code, reason, _, _ = refusal(lambda: call(cluster, "AmendJob", job="tiny", amendment=pb.Amendment(lr=1), expected_revision=revision - 1))
        check(reason == "REVISION_CHANGED", reason)
        request = {"job": "tiny", "amendment": pb.Amendment(lr=0.001), "request_id": os.urandom(16)}
        first = call(cluster, "AmendJob", **request).job
        check(call(cluster, "AmendJob", **request).job.revision == first.revision and first.spec.newest_amendment == 3, "made once")
        run(cluster, "job", "amend", "tiny", "--steps", "40", "--at-step", "10", code=0)
        run(cluster, "job", "amend", "tiny", code=2)
        run(cluster, "job", "amend", "tiny", "--skip", "12", code=2)
        run(cluster, "job", "amend", "none", "--lr", "0.1", code=4)
        check(cluster.job().steps == 40 and cluster.job().spec.steps == 30, "the end, and as it was submitted")
        existed = call(cluster, "SubmitJob", spec=tiny_job(cluster)).existed
        check(existed, "still the same job")
        cluster.cancel()
        code, reason, _, _ = refusal(lambda: amend(cluster, lr=0.001))
        check(reason == "JOB_OVER", reason)


if __name__ == "__main__":
    main([test_an_amended_run_has_one_result, test_amended_while_it_runs, test_what_is_refused])
