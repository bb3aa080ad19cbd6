#!/usr/bin/python3
"""Jobs that begin with a checkpoint of another one, and jobs that go back to one of their own. Arguments: only the tests named."""

import os
import threading

import grpc

from harness import Cluster, check, main, pb, reference, run, tiny_job
from test_amend import weights
from test_api import call, refusal


def branch(cluster, checkpoint, name, job="tiny", **fields):
    amendment = pb.Amendment(**fields) if fields else None
    return call(cluster, "BranchJob", job=job, checkpoint=checkpoint, name=name, amendment=amendment, by="tests").job


def roll_back(cluster, checkpoint, **fields):
    return call(cluster, "AmendJob", job="tiny", amendment=pb.Amendment(roll_back_to=checkpoint, **fields), by="tests").job


def saved(cluster, job="tiny"):
    """Committed checkpoints; which steps they are of depends on how fast the machine is."""
    return [one for one in cluster.checkpoints(job) if one.state == pb.CHECKPOINT_STATE_COMMITTED and not one.borrowed_from]


def restart_coordinator(cluster):
    cluster.coordinator.kill()
    cluster.coordinator.wait()
    cluster.start_coordinator()


def test_a_branch_has_the_weights_of_its_record():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, checkpoint_every=5, checkpoint__keep=100))
        with cluster.slowed():
            cluster.start_worker()
            whole = cluster.wait_finished()
        check(whole == reference(), "the origin")
        first, second = saved(cluster)[:2]
        twin = branch(cluster, first.number, "twin")
        check(twin.origin.job == "tiny" and twin.origin.step == first.step and twin.steps_done == first.step, f"{twin.origin}")
        restart_coordinator(cluster)
        changes = {"lr": 0.002, "skip_first": second.step * 16 + 80, "skip_count": 20}
        branch(cluster, second.number, "late", **changes)
        for name in ("twin", "late"):
            cluster.start_worker(job=name)
            cluster.start_worker(job=name)
        check(cluster.wait_finished("twin") == whole, "a branch that changes nothing ends as its origin")
        check(all(not one.borrowed_from for one in cluster.checkpoints("twin")), "it has its own now")
        check(cluster.job("twin").steps_done == 30, "to the end")
        late = cluster.wait_finished("late")
        run(cluster, "describe", "job", "late", code=0)
    check(late == weights([dict(changes, at_step=second.step)])[0], "as if the origin had been amended there")


def test_a_borrowed_checkpoint_is_kept():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=1000000, checkpoint_every=5, checkpoint__keep=1))
        cluster.start_worker()
        cluster.wait_event(lambda event: event.kind == "checkpoint_committed")
        for _ in range(50):  # it may be gone already
            number = cluster.job().last_checkpoint
            try:
                branch(cluster, number, "twin", steps=1000000)
                break
            except grpc.RpcError:
                continue
        borrowed = cluster.checkpoints("twin")[0]
        check(borrowed.borrowed_from == "tiny" and borrowed.number == number, f"{borrowed}")
        cluster.wait_until(lambda: cluster.job().last_checkpoint > number + 3, 30, "more checkpoints of the origin")
        restart_coordinator(cluster)
        newest = cluster.job().last_checkpoint
        cluster.wait_until(lambda: cluster.job().last_checkpoint > newest + 2, 30, "checkpoints after a restart")
        kept = next(one for one in cluster.checkpoints() if one.number == number)
        check(kept.state == pb.CHECKPOINT_STATE_COMMITTED and kept.borrowers == 1 and os.path.exists(os.path.join(kept.dir, "manifest.json")), f"{kept}")
        listed = run(cluster, "checkpoints", "tiny", code=0)
        check("committed, borrowed" in listed and "committed, of job tiny" in run(cluster, "checkpoints", "twin", code=0), listed)
        cluster.start_worker(job="twin")
        cluster.wait_until(lambda: any(not one.borrowed_from for one in cluster.checkpoints("twin")), 30, "a checkpoint of the branch's own")
        cluster.wait_until(lambda: not os.path.exists(kept.dir), 30, "the origin's policy takes it back")
        check(os.path.isdir(cluster.dir), "the rest stays")


def test_what_a_branch_may_not_be():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster))
        cluster.start_worker()
        cluster.wait_finished()
        number = saved(cluster)[-1].number
        for action, reason in ((lambda: branch(cluster, 99, "twin"), "CHECKPOINT_UNKNOWN"), (lambda: branch(cluster, number, "tiny"), "FIELD_INVALID"),
                               (lambda: branch(cluster, number, "twin"), "FIELD_INVALID"), (lambda: branch(cluster, number, "twin", steps=20), "FIELD_INVALID"),
                               (lambda: branch(cluster, 1, "twin", job="none"), "JOB_UNKNOWN"), (lambda: roll_back(cluster, number), "JOB_OVER"),
                               (lambda: branch(cluster, number, "twin", roll_back_to=1, steps=40), "FIELD_INVALID")):
            told = refusal(action)
            check(told[1] == reason, f"{told} instead of {reason}")
        request = {"job": "tiny", "checkpoint": number, "name": "twin", "amendment": pb.Amendment(steps=40), "request_id": os.urandom(16), "by": "tests"}
        first = call(cluster, "BranchJob", **request).job
        check(call(cluster, "BranchJob", **request).job.uid == first.uid, "made once")
        told = refusal(lambda: branch(cluster, number, "twin", steps=40))
        check(told[1] == "JOB_EXISTS", f"{told}")
        revision = cluster.job().revision
        told = refusal(lambda: call(cluster, "BranchJob", job="tiny", checkpoint=number, name="other", expected_revision=revision + 1))
        check(told[1] == "REVISION_CHANGED", f"{told}")
        told = refusal(lambda: call(cluster, "SubmitJob", spec=tiny_job(cluster, name="twin")))
        check(told[1] == "JOB_EXISTS", f"a branch is no submitted job: {told}")
        run(cluster, "job", "branch", "tiny", "other", code=2)
        out = run(cluster, "job", "branch", "tiny", "other", "--checkpoint", str(number), "--steps", "40", "--path", os.path.join(cluster.dir, "elsewhere"), code=0)
        check("begins at step 30" in out and cluster.job("other").spec.checkpoint.path.endswith("elsewhere"), out)


def rolled_back(back, end):
    return weights([{"lr": 0.002, "steps": end, "skip_first": back * 16 + 40, "skip_count": 30, "at_step": back}], steps=1000000)


def test_rolled_back_while_it_runs():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=1000000, checkpoint__keep=100000))
        cluster.start_worker()
        cluster.start_worker()
        cluster.wait_until(lambda: len(saved(cluster)) >= 3, 30, "three checkpoints")
        call(cluster, "AmendJob", job="tiny", amendment=pb.Amendment(lr=0.005))  # goes with what is undone
        cluster.wait_event(lambda event: event.kind == "amendment_settled")
        to = saved(cluster)[1]
        end = to.step + 40
        fields = {"lr": 0.002, "steps": end, "skip_first": to.step * 16 + 40, "skip_count": 30}
        job = roll_back(cluster, to.number, **fields)
        restart_coordinator(cluster)  # right after the answer
        check(job.steps_done == to.step and job.state == pb.JOB_STATE_RUNNING, f"{job.steps_done}")
        sha256 = cluster.wait_finished()
        told = run(cluster, "describe", "job", "tiny", code=0)
        check(f"rolled back to checkpoint {to.number} from step" in told and "lr 0.005" not in told.split("amendment", 1)[1].split("\n", 1)[0], told)
        later = [one for one in cluster.checkpoints() if one.state == pb.CHECKPOINT_STATE_VOID]
        check(not later and all(one.step <= end for one in cluster.checkpoints()), "what was undone is deleted")
        told = cluster.wait_event(lambda event: event.kind == "job_rolled_back").text
        check(f"to step {to.step}, checkpoint {to.number}, by tests (amendment 2)" in told, told)
    check((sha256, end) == rolled_back(to.step, end), "as if it had been known from the beginning")


def test_a_failed_job_goes_on():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=1000000, checkpoint__keep=100000))
        worker = cluster.start_worker()
        cluster.wait_until(lambda: len(saved(cluster)) >= 2, 30, "two checkpoints")
        worker.kill()
        worker.wait()
        root = cluster.job().spec.checkpoint.path
        os.rename(root, root + ".away")
        cluster.start_worker()
        cluster.wait_until(lambda: cluster.job().state == pb.JOB_STATE_FAILED, 30, "nothing can be read")
        check(all(one.state == pb.CHECKPOINT_STATE_BAD for one in cluster.checkpoints()), "all are quarantined")
        os.rename(root + ".away", root)
        to = cluster.checkpoints()[0]
        end = to.step + 30
        out = run(cluster, "job", "amend", "tiny", "--roll-back", str(to.number), "--lr", "0.002", "--steps", str(end), "--skip", f"{to.step * 16 + 40}:30", code=0)
        check(f"goes back to checkpoint {to.number}" in out, out)
        restart_coordinator(cluster)
        check(cluster.job().state == pb.JOB_STATE_RUNNING and cluster.job().steps_done == to.step, "it is back")
        cluster.start_worker()
        cluster.wait_event("job_finished")
        sha256 = cluster.job().weights_sha256.hex()
    check((sha256, end) == rolled_back(to.step, end), "the weights of its record")


def test_two_operators():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=1000000, checkpoint__keep=100000))
        cluster.start_worker()
        cluster.wait_until(lambda: len(saved(cluster)) >= 2, 30, "two checkpoints")
        numbers = [one.number for one in saved(cluster)[:2]]
        revision, outcomes = cluster.job().revision, []

        def back(number):
            try:
                call(cluster, "AmendJob", job="tiny", amendment=pb.Amendment(roll_back_to=number), expected_revision=revision)
                outcomes.append("made")
            except grpc.RpcError as error:
                outcomes.append(error.code())

        operators = [threading.Thread(target=back, args=(number,)) for number in numbers]
        for one in operators:
            one.start()
        for one in operators:
            one.join()
        check(outcomes.count("made") == 1, f"one of them: {outcomes}")
        told = refusal(lambda: call(cluster, "OrderNode", node="h9", order=pb.NODE_ORDER_CORDON, reason="dust", expected_revision=3))
        check(told[1] == "REVISION_CHANGED", f"{told}")
        call(cluster, "OrderNode", node="h9", order=pb.NODE_ORDER_CORDON, reason="dust", expected_revision=0)
        node = next(one for one in call(cluster, "ListNodes").nodes if one.name == "h9")
        check(node.revision > 0, f"{node}")
        told = refusal(lambda: call(cluster, "OrderNode", node="h9", order=pb.NODE_ORDER_RESUME, expected_revision=0))
        check(told[1] == "REVISION_CHANGED" and f"revision is {node.revision} " in told[3], f"{told}")
        run(cluster, "node", "resume", "h9", "--expected-revision", str(node.revision), code=0)
        name = cluster.list_workers()[0].name
        told = refusal(lambda: call(cluster, "DrainWorker", worker=name, reason="dust", expected_revision=7))
        check(told[1] == "REVISION_CHANGED", f"{told}")
        run(cluster, "drain", name, "--reason", "dust", "--expected-revision", "0", code=0)
        told = refusal(lambda: call(cluster, "UndrainWorker", worker=name, expected_revision=0))
        check(told[1] == "REVISION_CHANGED", f"{told}")
        run(cluster, "undrain", name, code=0)


if __name__ == "__main__":
    main([test_a_branch_has_the_weights_of_its_record, test_a_borrowed_checkpoint_is_kept, test_what_a_branch_may_not_be, test_rolled_back_while_it_runs,
          test_a_failed_job_goes_on, test_two_operators])
