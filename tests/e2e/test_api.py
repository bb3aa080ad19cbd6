#!/usr/bin/python3
"""Changes that are made once, revisions, typed errors, events that are no longer kept. Arguments: only the tests named."""

import os
import subprocess
import uuid

import grpc

from harness import BUILD, FAST, ROOT, SLOW, Cluster, api, check, connect, main, pb, tiny_job
from proxy import LosesAnswer

subprocess.run(["protoc", "-I", os.path.join(ROOT, "proto"), "--python_out", os.path.join(BUILD, "python"),
                os.path.join(ROOT, "proto/muster/v1/error.proto")], check=True)
from muster.v1 import error_pb2  # noqa: E402

MUSTER = os.path.join(BUILD, "cli/muster")


def call(cluster, method, timeout_s=10, **fields):
    return cluster.call(method, getattr(api, method + "Request")(**fields), getattr(api, method + "Response"), timeout_s)


def refusal(action):
    """(code, reason, details by the last word of their type, text) of a call that fails."""
    try:
        action()
    except grpc.RpcError as error:
        packed = dict(error.trailing_metadata())["grpc-status-details-bin"]
        status = error_pb2.ErrorStatus.FromString(packed)
        check(status.code == error.code().value[0] and status.message == error.details(), "the details say the same as the status")
        types = {"ErrorInfo": error_pb2.ErrorInfo, "BadRequest": error_pb2.ErrorFields, "RetryInfo": error_pb2.ErrorRetry}
        details = {one.type_url.rsplit(".", 1)[-1]: one for one in status.details}
        details = {name: types[name].FromString(one.value) for name, one in details.items()}
        check(details["ErrorInfo"].domain == "muster.v1", "domain")
        return error.code(), details["ErrorInfo"].reason, details, error.details()
    raise AssertionError("it did not fail")


def values(details):
    return {pair.key: pair.value for pair in details["ErrorInfo"].metadata}


def test_a_change_is_made_once_over_crashes():
    with Cluster() as cluster:
        cluster.start_coordinator()
        submit, cancel = {"spec": tiny_job(cluster), "request_id": uuid.uuid4().bytes}, {"name": "tiny", "request_id": uuid.uuid4().bytes}
        first = call(cluster, "SubmitJob", **submit)
        check(not first.existed, "new")
        for _ in range(2):
            again = call(cluster, "SubmitJob", **submit)
            check(not again.existed and again.job.uid == first.job.uid, "the same answer")
            cluster.coordinator.kill()
            cluster.coordinator.wait()
            cluster.start_coordinator()
        call(cluster, "CancelJob", **cancel)
        second = call(cluster, "SubmitJob", spec=submit["spec"], request_id=uuid.uuid4().bytes)
        check(not second.existed and second.job.uid != first.job.uid, "the job was over, so it is another one")
        call(cluster, "CancelJob", **cancel)  # was made, of the first job
        check(cluster.job().state == pb.JOB_STATE_PENDING and cluster.job().uid == second.job.uid, "the second job is not cancelled")
        late = call(cluster, "SubmitJob", **submit)
        check(late.job.uid == first.job.uid and not late.job.HasField("spec"), "all that is known of the first one")
        code, reason, _, text = refusal(lambda: call(cluster, "CancelJob", name="tiny", reason="else", request_id=cancel["request_id"]))
        check(code == grpc.StatusCode.INVALID_ARGUMENT and reason == "REQUEST_ID_REUSED", f"{code} {reason} {text}")
        code, reason, _, _ = refusal(lambda: call(cluster, "TriggerCheckpoint", job="tiny", request_id=cancel["request_id"]))
        check(reason == "REQUEST_ID_REUSED", "the method is part of it")
        code, reason, details, _ = refusal(lambda: call(cluster, "UndrainWorker", worker="w", request_id=b"short"))
        check(reason == "FIELD_INVALID" and details["BadRequest"].field_violations[0].field == "request_id", f"{code} {reason}")


def test_an_answer_lost_on_the_way_is_asked_for_again_by_muster():
    with Cluster() as cluster:
        cluster.start_coordinator()
        call(cluster, "SubmitJob", spec=tiny_job(cluster))
        before = cluster.job().revision
        proxy = LosesAnswer(cluster.address, "/ScaleJob")
        muster = subprocess.Popen([MUSTER, "--coordinator", proxy.address, "--timeout", "60", "scale", "tiny", "--max", "3",
                                   "--expected-revision", str(before)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        check(proxy.asked.wait(30 * SLOW), "it asked")
        cluster.wait_until(lambda: cluster.job().revision > before, 10, "the change was not made")
        proxy.cut()
        output = muster.communicate(timeout=60 * SLOW)[0]
        revision = cluster.job().revision
        check(muster.returncode == 0 and f"takes 1 to 3 workers and keeps 0 spares (revision {revision})" in output, output)
        proxy.close()
        gone = subprocess.run([MUSTER, "--coordinator", "127.0.0.1:1", "cancel", "tiny"], capture_output=True, text=True, timeout=60 * SLOW)
        check(gone.returncode == 3 and "cannot connect" in gone.stderr, gone.stderr)


def test_another_revision_is_refused():
    with Cluster() as cluster:
        cluster.start_coordinator()
        seen = call(cluster, "SubmitJob", spec=tiny_job(cluster)).job.revision
        scaled = call(cluster, "ScaleJob", job="tiny", max=5, expected_revision=seen).job
        check(scaled.revision > seen and scaled.spec.workers.max == 5 and scaled.spec.workers.min == 1, f"{scaled.spec.workers}")
        for method, fields in (("ScaleJob", {"job": "tiny", "max": 7}), ("CancelJob", {"name": "tiny"}), ("TriggerCheckpoint", {"job": "tiny"})):
            code, reason, details, text = refusal(lambda: call(cluster, method, expected_revision=seen, **fields))
            check(code == grpc.StatusCode.ABORTED and reason == "REVISION_CHANGED", f"{method}: {code} {reason} {text}")
            check(values(details)["revision"] == str(scaled.revision) and values(details)["advice"], f"{method}: {values(details)}")
        nothing = subprocess.run([MUSTER, "--coordinator", cluster.address, "scale", "tiny"], capture_output=True, text=True)
        check(nothing.returncode == 2 and "give --min, --max or --spares" in nothing.stderr, nothing.stderr)
        command = [MUSTER, "--coordinator", cluster.address, "cancel", "tiny", "--expected-revision", str(seen)]
        refused = subprocess.run([*command, "-o", "json"], capture_output=True, text=True)
        check(refused.returncode == 5 and f'"reason":"REVISION_CHANGED"' in refused.stderr, refused.stderr)
        check(f'"revision":{scaled.revision}' in refused.stderr, refused.stderr)
        subprocess.run([*command[:-1], str(scaled.revision)], check=True, capture_output=True)
        check(cluster.job().state == pb.JOB_STATE_CANCELLED, "the right one is")


def test_failures_say_why():
    with Cluster() as cluster:
        cluster.start_coordinator()
        call(cluster, "SubmitJob", spec=tiny_job(cluster))
        wrong = tiny_job(cluster, name="wrong")
        wrong.batch.micro = 3
        expected = [
            ("GetJob", {"name": "none"}, "NOT_FOUND", "JOB_UNKNOWN", None, False),
            ("GetJob", {"name": "No"}, "INVALID_ARGUMENT", "FIELD_INVALID", "name", False),
            ("SubmitJob", {"spec": wrong}, "INVALID_ARGUMENT", "FIELD_INVALID", "batch", False),
            ("SubmitJob", {}, "INVALID_ARGUMENT", "FIELD_INVALID", "spec", False),
            ("SubmitJob", {"spec": tiny_job(cluster, steps=31)}, "ALREADY_EXISTS", "JOB_EXISTS", None, False),
            ("DrainWorker", {"worker": "none"}, "NOT_FOUND", "WORKER_UNKNOWN", None, False),
            ("TriggerCheckpoint", {"job": "tiny"}, "FAILED_PRECONDITION", "JOB_NOT_STEPPING", None, True),
            ("ScaleJob", {"job": "tiny", "min": 70000}, "INVALID_ARGUMENT", "FIELD_INVALID", "workers.", False),
            ("ListJobs", {"page_token": "No"}, "INVALID_ARGUMENT", "FIELD_INVALID", "page_token", False),
        ]
        for method, fields, code, reason, field, again in expected:
            got = refusal(lambda: call(cluster, method, **fields))
            shown = f"{method} {fields if 'spec' not in fields else ''}: {got[0]} {got[1]} {got[3]}"
            check(got[0].name == code and got[1] == reason and ("RetryInfo" in got[2]) == again, shown)
            if field:
                told = got[2]["BadRequest"].field_violations[0]
                check(told.field.startswith(field) and got[3] == f"{told.field}: {told.description}", f"{shown}: {told}")
        with connect(cluster.address) as channel:
            nothing = channel.unary_unary("/muster.v1.MusterService/Nothing")
            check(refusal(lambda: nothing(b"", timeout=10 * SLOW))[1] == "UNIMPLEMENTED", "what has no reason of its own")


def test_events_that_are_no_longer_kept_are_a_gap_that_says_where_to_go_on():
    kept = 64
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*FAST, "--events-kept", str(kept)])
        call(cluster, "SubmitJob", spec=tiny_job(cluster))
        for i in range(kept + 2):
            call(cluster, "ScaleJob", job="tiny", max=i + 1)
        revision = cluster.job().revision

        def watch(**fields):
            with connect(cluster.address) as channel:
                stub = channel.unary_stream("/muster.v1.MusterService/WatchEvents", response_deserializer=api.WatchEventsResponse.FromString)
                return [r.event.number for r in stub(api.WatchEventsRequest(**fields).SerializeToString(), timeout=10 * SLOW)]
        code, reason, details, text = refusal(lambda: watch(after_event=1))
        check(code == grpc.StatusCode.OUT_OF_RANGE and reason == "EVENTS_COMPACTED", f"{code} {reason} {text}")
        after = int(values(details)["after_event"])
        check(watch(after_event=after) == list(range(after + 1, revision + 1)) and len(watch()) == kept, "all that is kept")
        code, reason, details, _ = refusal(lambda: watch(after_event=revision + 1))
        check(reason == "EVENTS_AHEAD" and values(details)["newest_event"] == str(revision), f"{reason} {details}")
        check(watch(after_event=revision) == [], "nothing has happened since the job's revision")
        with connect(cluster.address) as channel:
            stub = channel.unary_stream("/muster.v1.MusterService/WatchEvents", response_deserializer=api.WatchEventsResponse.FromString)
            stream = stub(api.WatchEventsRequest(after_event=revision, follow=True).SerializeToString(), timeout=60 * SLOW)
            call(cluster, "ScaleJob", job="tiny", max=3)
            check(next(stream).event.number == revision + 1, "it follows")
            cluster.coordinator.kill(15)
            code, reason, details, _ = refusal(lambda: next(stream))
            check(code == grpc.StatusCode.UNAVAILABLE and reason == "STOPPING", f"{code} {reason}")
            check(values(details)["after_event"] == str(revision + 1), f"{values(details)}")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
