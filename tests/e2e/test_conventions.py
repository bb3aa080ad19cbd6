#!/usr/bin/env python3
"""What gRPC tools expect of every server: health, reflection, error details, asked by the clients of PyPI. Arguments: only the tests named."""

import glob
import os
import sys

import google
import grpc

from harness import ROOT, SLOW, Cluster, Failure, api, check, connect, main, needs_mounts, rpc_error, tiny_job
from test_bad_input import MIB, Disk

for site in glob.glob(os.path.join(ROOT, "build/venv/lib/python3*/site-packages")):
    sys.path.append(site)
    google.__path__.append(os.path.join(site, "google"))  # one package in two places
try:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
    from google.rpc import error_details_pb2
    from grpc_status import rpc_status
except ModuleNotFoundError as error:
    raise SystemExit(f"{error}: run scripts/setup test") from None
from google.protobuf import descriptor_pool, message_factory  # noqa: E402

SERVICES = ["grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection",
            "muster.v1.DiagnosticService", "muster.v1.MusterService", "muster.v1.ProbeService", "muster.v1.TokenService",
            "muster.v1.WorkerService"]
Health = health_pb2.HealthCheckResponse


def test_health_is_told_and_watched():
    with Cluster() as cluster:
        cluster.start_coordinator()
        with connect(cluster.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ["", *SERVICES]:
                check(health.Check(health_pb2.HealthCheckRequest(service=service), timeout=10 * SLOW).status == Health.SERVING, service)
            code, text = rpc_error(lambda: health.Check(health_pb2.HealthCheckRequest(service="no.such"), timeout=10 * SLOW))
            check(code == grpc.StatusCode.NOT_FOUND and "no.such" in text, f"{code} {text}")
            unknown = health.Watch(health_pb2.HealthCheckRequest(service="no.such"), timeout=60 * SLOW)
            check(next(unknown).status == Health.SERVICE_UNKNOWN, "Watch of an unknown service")
            watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICES[3]), timeout=60 * SLOW)
            check(next(watch).status == Health.SERVING, "the first answer is the present")
            cluster.coordinator.kill(15)
            check(next(watch).status == Health.NOT_SERVING, "a stop is told before the end")
            code, text = rpc_error(lambda: next(watch))
            check(code == grpc.StatusCode.UNAVAILABLE and "stopping" in text, f"{code} {text}")
            check(cluster.coordinator.wait() == 0, "it stopped in good order")


@needs_mounts
def test_a_full_store_is_not_serving_until_there_is_space():
    with Cluster() as cluster, Disk(os.path.join(cluster.dir, "store"), 128) as disk:
        cluster.start_coordinator(flags=["--reserve-mib", "32"])
        with connect(cluster.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=60 * SLOW)
            check(next(watch).status == Health.SERVING, "there is space")
            disk.fill(leave=8 * MIB)
            check(next(watch).status == Health.NOT_SERVING, "the store is full")
            check(rpc_error(lambda: cluster.submit(tiny_job(cluster)))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED, "a change is refused")
            found = details_of(lambda: cluster.submit(tiny_job(cluster)))
            check(found["ErrorInfo"].reason == "STORE_FULL" and found["RetryInfo"].retry_delay.seconds > 0, f"{found}")
            disk.empty()
            check(next(watch).status == Health.SERVING, "there is space again")


def ask(channel, version, *requests):
    stub = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                                 request_serializer=lambda m: m.SerializeToString(),
                                 response_deserializer=reflection_pb2.ServerReflectionResponse.FromString)
    return list(stub(iter(requests), timeout=10 * SLOW))


def test_a_client_without_our_files_can_call_us():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster))
        with connect(cluster.address) as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            check(sorted(database.get_services()) == SERVICES, f"{list(database.get_services())}")
            pool = descriptor_pool.DescriptorPool(database)
            method = pool.FindServiceByName("muster.v1.MusterService").methods_by_name["ListJobs"]
            factory = message_factory.MessageFactory(pool)
            request, response = factory.GetPrototype(method.input_type), factory.GetPrototype(method.output_type)
            call = channel.unary_unary("/muster.v1.MusterService/ListJobs", request_serializer=request.SerializeToString,
                                       response_deserializer=response.FromString)
            check([job.name for job in call(request(), timeout=10 * SLOW).jobs] == ["tiny"], "a call made from reflection alone")
            check(pool.FindMessageTypeByName("muster.v1.JobSpec").fields_by_name["name"].number == 1, "a message of an imported file")


def test_reflection_answers_every_kind_of_question_in_both_versions():
    Request = reflection_pb2.ServerReflectionRequest
    with Cluster() as cluster:
        cluster.start_coordinator()
        with connect(cluster.address) as channel:
            for version in ("v1", "v1alpha"):
                answers = ask(channel, version, Request(list_services=""), Request(host="h", file_by_filename="muster/v1/job.proto"),
                              Request(file_containing_symbol="muster.v1.MusterService.SubmitJob"),
                              Request(file_containing_symbol="muster.v1.JobSpec"), Request(file_containing_symbol="muster.v1.JobState"),
                              Request(file_containing_symbol="muster.v1.Nothing"), Request(file_by_filename="records.proto"),
                              Request(all_extension_numbers_of_type="muster.v1.Job"), Request())
                check(sorted(s.name for s in answers[0].list_services_response.service) == SERVICES, "list")
                check(answers[1].valid_host == "h" and answers[1].original_request.file_by_filename == "muster/v1/job.proto", "original")
                check([len(a.file_descriptor_response.file_descriptor_proto) for a in answers[1:5]] == [1, 2, 1, 1], "with imports")
                check([a.error_response.error_code for a in answers[5:]] == [5, 5, 5, 3], "what is not there")
            code = rpc_error(lambda: list(channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")(
                iter([b"\x0a\xff\xff"]), timeout=10 * SLOW)))[0]
            check(code == grpc.StatusCode.INVALID_ARGUMENT, f"garbage: {code}")


def details_of(action):
    """What google.rpc's own messages say about a failure."""
    try:
        action()
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)  # checks that it agrees with the call's status
        kinds = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
        found = {}
        for detail in status.details:
            for kind in kinds:
                if detail.Is(kind.DESCRIPTOR):
                    found[kind.__name__] = kind()
                    detail.Unpack(found[kind.__name__])
        return found
    raise Failure("it did not fail")


def test_failures_are_read_by_the_usual_library():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster))
        found = details_of(lambda: cluster.submit(tiny_job(cluster, steps=0)))
        check(found["ErrorInfo"].domain == "muster.v1" and found["ErrorInfo"].reason == "FIELD_INVALID", f"{found}")
        check(found["BadRequest"].field_violations[0].field == "steps", f"{found}")
        found = details_of(lambda: cluster.call("CancelJob", api.CancelJobRequest(name="tiny", expected_revision=77), api.CancelJobResponse))
        check(dict(found["ErrorInfo"].metadata)["revision"] == str(cluster.job().revision), f"{found}")
        order = lambda: cluster.call("TriggerCheckpoint", api.TriggerCheckpointRequest(job="tiny"), api.TriggerCheckpointResponse)  # noqa: E731
        check(details_of(order)["RetryInfo"].retry_delay.ToMilliseconds() == 1000, "again after a second")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
