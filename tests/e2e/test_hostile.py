#!/usr/bin/python3
"""Hostile clients: malformed and oversized messages, workers that differ, floods, idle connections, slow watchers. Each gets one line that
names what is wrong; the jobs that have nothing to do with it end with the weights they would have had anyway.

    test_hostile.py [--full] [TEST...]    --full: 10,000 idle connections instead of 2,000"""

import contextlib
import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time

import grpc
import harness
from harness import (BUILD, FAST, ROOT, SLOW, Cluster, Failure, api, check, connect, main, needs_mounts, pb, reference, refused_worker, rpc_error, run,
                     tiny_job)
from test_security import SecureCluster

subprocess.run(["protoc", "-I", os.path.join(ROOT, "proto"), "--python_out", os.path.join(BUILD, "python"),
                os.path.join(ROOT, "proto/muster/v1/session.proto")], check=True)
from muster.v1 import session_pb2 as session  # noqa: E402

FULL = "--full" in sys.argv
sys.argv = [word for word in sys.argv if word != "--full"]
STEPS = 150


def call_raw(cluster, path, request=b"", timeout_s=10):
    with connect(cluster.address) as channel:
        call = channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)
        return rpc_error(lambda: call(request, timeout=timeout_s * SLOW))


class Attach:
    """One worker's stream, byte by byte."""

    def __init__(self, cluster, channel=None):
        self.own = None if channel else connect(cluster.address)
        self.ready = threading.Semaphore(0)
        self.queue = []
        attach = (channel or self.own).stream_stream("/muster.v1.WorkerService/Attach", request_serializer=bytes,
                                                     response_deserializer=session.CoordinatorMessage.FromString)
        self.call = attach(self.requests(), timeout=60 * SLOW)

    def requests(self):
        while True:
            self.ready.acquire()
            if not self.queue:
                return
            yield self.queue.pop(0)

    def say(self, message):
        self.queue.append(message if isinstance(message, bytes) else message.SerializeToString())
        self.ready.release()
        return self

    def hear(self):
        return next(self.call)

    def end(self):
        """The status the coordinator ends the stream with, and what it said before."""
        heard = []
        try:
            for message in self.call:
                heard.append(message)
            return grpc.StatusCode.OK, "", heard
        except grpc.RpcError as error:
            return error.code(), error.details(), heard

    def close(self):
        self.call.cancel()
        self.ready.release()
        if self.own:
            self.own.close()


with open(os.path.join(ROOT, "plan/session.h")) as header:
    PROTOCOL = int(re.search(r"MU_PROTOCOL_VERSION = (\d+)", header.read()).group(1))


def hello(job="tiny", **changes):
    message = session.Hello(protocol_version=PROTOCOL, incarnation=os.urandom(16), software_version="0.1.0", job=job, host="elsewhere",
                            address="127.0.0.1:9", backend="cpu", pid=1, threads=1, memory_bytes=1 << 30)
    message.status.phase = pb.WORKER_PHASE_SPARE
    for key, value in changes.items():
        setattr(message, key, value)
    return session.WorkerMessage(hello=message)


def reject_of(cluster, message):
    attach = Attach(cluster).say(message)
    try:
        answer = attach.hear()
        check(answer.WhichOneof("kind") == "reject", f"not a Reject: {answer}")
        check("\n" not in answer.reject.text and answer.reject.text, "one line")
        return answer.reject
    finally:
        attach.close()


def running_job(cluster, workers=1, steps=STEPS, flags=FAST):
    if not cluster.coordinator:
        cluster.start_coordinator(flags=flags)
    cluster.submit(tiny_job(cluster, steps=steps, checkpoint_every=0))
    cluster.submit(tiny_job(cluster, name="hold"))  # has no workers: for streams that need a job that is not over
    for _ in range(workers):
        cluster.start_worker()
    cluster.wait_step(3)


def undisturbed_end(cluster):
    check(cluster.wait_finished() == reference(steps=STEPS), "weights differ")
    check(cluster.job().workers_lost == 0 and cluster.job().generations <= 1, "the job was disturbed")


def test_malformed_and_oversized_messages_end_their_call_and_nothing_else():
    with Cluster() as cluster:
        with cluster.slowed():
            running_job(cluster)
            for service in ("MusterService", "WorkerService"):
                code, _ = call_raw(cluster, f"/muster.v1.{service}/NoSuch")
                check(code == grpc.StatusCode.UNIMPLEMENTED, f"unknown method of {service}: {code}")
            for path in ("/nothing.at.all/X", "/"):
                check(call_raw(cluster, path)[0] == grpc.StatusCode.UNIMPLEMENTED, f"method {path}")
            methods = [m for m in open(os.path.join(ROOT, "proto/muster/v1/service.proto")).read().split() if m.endswith(")") or "(" in m]
            names = sorted({word.split("(")[0] for word in methods if word[0].isupper() and "(" in word and word.split("(")[0].isalpha()})
            check("SubmitJob" in names and "GetTimings" in names, f"{names}")
            rng = random.Random(4)
            for name in names:
                path = "/muster.v1.MusterService/" + name
                check(call_raw(cluster, path, b"\x0a\xff\xff\xff\xff")[0] == grpc.StatusCode.INVALID_ARGUMENT, f"{name}: cut off")
                check(call_raw(cluster, path, b"\x0a\x80\x80\x08" + b"a" * (1 << 17))[0] == grpc.StatusCode.RESOURCE_EXHAUSTED, f"{name}: large")
                for _ in range(5):
                    code, text = call_raw(cluster, path, rng.randbytes(rng.randrange(1, 200)))
                    check(code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE,
                                       grpc.StatusCode.DEADLINE_EXCEEDED) and text, f"{name}: {code} {text}")

            attach = Attach(cluster).say(b"\x0a\xff\xff")
            code, text, heard = attach.end()
            check(code == grpc.StatusCode.INVALID_ARGUMENT and heard[0].reject.reason == session.REJECT_REASON_INVALID, f"{code} {text}")
            attach = Attach(cluster).say(b"\x12" + b"\xff" * (1 << 17))
            code, text, _ = attach.end()
            check(code == grpc.StatusCode.RESOURCE_EXHAUSTED, f"a message over the limit: {code} {text}")
            attach = Attach(cluster).say(session.WorkerMessage(heartbeat=session.Heartbeat(progress=1, phase=pb.WORKER_PHASE_SPARE)))
            code, text, heard = attach.end()
            check(code == grpc.StatusCode.INVALID_ARGUMENT and "first message of a stream must be hello" in text, f"{code} {text}")
            attach = Attach(cluster).say(hello("hold", name="later"))
            check(attach.hear().welcome.name == "later", "a good Hello is welcomed")
            attach.say(b"\xff\xff\xff")
            code, text, _ = attach.end()
            check(code == grpc.StatusCode.INVALID_ARGUMENT and "WorkerMessage" in text, f"garbage after Hello: {code} {text}")
            for junk in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", rng.randbytes(4096), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(4096)):
                with socket.create_connection(tuple(cluster.address.rsplit(":", 1)), timeout=10 * SLOW) as raw:
                    with contextlib.suppress(OSError):
                        raw.sendall(junk)
                        while raw.recv(65536):
                            pass
        undisturbed_end(cluster)


def test_a_worker_that_differs_is_refused_with_what_differs():
    with Cluster() as cluster:
        with cluster.slowed():
            running_job(cluster)
            attach = Attach(cluster).say(hello(name="probe"))
            uid = attach.hear().welcome.job_uid
            attach.close()
            reject = reject_of(cluster, hello(protocol_version=PROTOCOL + 1, software_version="9.9.9"))
            check(reject.reason == session.REJECT_REASON_VERSION and f"protocol {PROTOCOL + 1}" in reject.text and "9.9.9" in reject.text and
                  "same version" in reject.text, f"{reject}")
            prepared = dict(prepared_job=True, job_uid=uid)
            reject = reject_of(cluster, hello(name="odd", numeric_identity=b"\x01" * 16, data_hash=b"\x02" * 16, **prepared))
            check(reject.reason == session.REJECT_REASON_IDENTITY and "numeric identity " + "01" * 16 in reject.text and "'odd'" in reject.text and
                  "elsewhere" in reject.text, f"{reject}")
            check(reject_of(cluster, hello(job="absent")).reason == session.REJECT_REASON_NO_JOB, "unknown job")
            reject = reject_of(cluster, hello(name="w0"))
            check(reject.reason == session.REJECT_REASON_BUSY and "'w0'" in reject.text and "--name" in reject.text, f"{reject}")
        undisturbed_end(cluster)
        reject = reject_of(cluster, hello())
        check(reject.reason == session.REJECT_REASON_JOB_OVER and "'tiny' is over" in reject.text, f"{reject}")


@needs_mounts
def test_a_worker_with_other_data_is_refused():
    with Cluster() as cluster:
        with cluster.slowed():
            running_job(cluster)
            other = os.path.join(cluster.dir, "other.txt")
            with open(cluster.data, "rb") as file, open(other, "wb") as out:
                out.write(file.read().replace(b"lazy", b"busy"))
            before = harness.RUNNER
            harness.RUNNER = ["unshare", "-m", "sh", "-c", f"mount --bind '{other}' '{cluster.data}' && exec \"$@\"", "sh", *before]
            try:
                worker = cluster.start_worker()
            finally:
                harness.RUNNER = before
            refused_worker(worker, f"data {cluster.data} has content hash", "the same file")
        undisturbed_end(cluster)


BAD_HELLOS = {
    "name": dict(name="Not-A-Name"),
    "name ": dict(name="x" * 64),
    "job": dict(job=""),
    "job ": dict(job="../../etc"),
    "host": dict(host="h" * 64),
    "host ": dict(host="a\tb"),
    "host  ": dict(host="h" * 10000),
    "address": dict(address="a" * 300),
    "backend": dict(backend="b" * 16),
    "software_version": dict(software_version="v" * 40),
    "incarnation": dict(incarnation=b""),
    "incarnation ": dict(incarnation=b"\0" * 16),
    "incarnation  ": dict(incarnation=b"x" * 17),
    "job_uid": dict(job_uid=b"x" * 5),
    "numeric_identity": dict(prepared_job=True, job_uid=b"x" * 16, numeric_identity=b"x" * 15, data_hash=b"x" * 16),
}


def resident_kib(process):
    with open(f"/proc/{process.pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def test_a_flood_of_hostile_hellos_disturbs_nobody():
    with Cluster() as cluster:
        with cluster.slowed():
            running_job(cluster, flags=["--max-workers", "64"])
            raw = [  # strings that a Python message cannot be given
                b"\x0a\x80\x01"[:1],
                session.WorkerMessage(hello=hello().hello).SerializeToString().replace(b"elsewhere", b"else\0here"),
                session.WorkerMessage(hello=hello().hello).SerializeToString().replace(b"elsewhere", b"else\xffhere"),
            ]
            for field, changes in BAD_HELLOS.items():
                reject = reject_of(cluster, hello(**changes))
                check(reject.reason == session.REJECT_REASON_INVALID and field.strip() in reject.text, f"{field}: {reject}")
            for message in raw:
                check(reject_of(cluster, message).reason == session.REJECT_REASON_INVALID, f"{message[:20]}")
            small = resident_kib(cluster.coordinator)
            messages = [hello(**changes).SerializeToString() for changes in BAD_HELLOS.values()] + raw
            with connect(cluster.address) as channel:
                for _ in range(20):
                    streams = [Attach(cluster, channel).say(message) for message in messages * 2]
                    for stream in streams:
                        check(stream.end()[0] == grpc.StatusCode.INVALID_ARGUMENT, "a bad Hello was taken")
            # As many good ones as there is room for, and more.
            streams = [Attach(cluster).say(hello("hold", name=f"flood-{i}")) for i in range(80)]
            answers = [stream.hear() for stream in streams]
            busy = [answer for answer in answers if answer.WhichOneof("kind") == "reject"]
            check(len(busy) >= 80 - 64 and all(a.reject.reason == session.REJECT_REASON_BUSY and "--max-workers" in a.reject.text for a in busy),
                  f"{len(busy)} refused")
            for stream in streams:
                stream.close()
            grown = resident_kib(cluster.coordinator) - small
            check(grown < 64 << 10, f"the coordinator grew by {grown} KiB")
        undisturbed_end(cluster)


def test_idle_connections_and_streams_disturb_nobody():
    count = 10000 if FULL else 2000
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < count + 1000:
        raise Failure(f"only {hard} open files are allowed, {count + 1000} are needed: ulimit -n")
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*FAST, "--connections-per-host", "0"])
        address = tuple(cluster.address.rsplit(":", 1))
        idle = [socket.create_connection(address, timeout=30 * SLOW) for _ in range(count)]
        channels = [connect(cluster.address) for _ in range(5)]
        streams = []
        for channel in channels:
            watch = channel.unary_stream("/muster.v1.MusterService/WatchEvents", request_serializer=lambda m: m.SerializeToString(),
                                         response_deserializer=api.WatchEventsResponse.FromString)
            streams += [watch(api.WatchEventsRequest(follow=True, job="tiny"), timeout=300 * SLOW) for _ in range(50)]
            attach = channel.stream_stream("/muster.v1.WorkerService/Attach", request_serializer=bytes, response_deserializer=bytes)
            streams += [attach(silence(cluster), timeout=300 * SLOW) for _ in range(50)]
        with cluster.slowed():
            running_job(cluster, workers=2, steps=4 * STEPS)
            for _ in range(20):
                cluster.job()
            cluster.start_worker()
            cluster.wait_event(lambda e: e.kind == "generation_go" and "3 workers" in e.text)
        check(cluster.wait_finished() == reference(steps=4 * STEPS), "weights differ")
        check(cluster.job().workers_lost == 0, "workers were lost")
        for stream in streams:
            stream.cancel()
        for channel in channels:
            channel.close()
        for connection in idle:
            connection.close()


def silence(cluster):
    cluster.watch_stop.wait(120 * SLOW)
    yield from ()


def test_a_slow_watcher_is_cut_off_and_told_where_to_resume():
    with Cluster() as cluster:
        cluster.start_coordinator(flags=["--events-kept", "64"])
        cluster.submit(tiny_job(cluster))
        cluster.wait_event("job_submitted")
        channel = grpc.insecure_channel(cluster.address, options=[  # as little on the way as the protocol permits
            ("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)])
        watch = channel.unary_stream("/muster.v1.MusterService/WatchEvents", request_serializer=lambda m: m.SerializeToString(),
                                     response_deserializer=api.WatchEventsResponse.FromString)
        slow = watch(api.WatchEventsRequest(follow=True), timeout=300 * SLOW)
        first = next(slow).event.number  # it is current, and reads no further
        deaf = [watch(api.WatchEventsRequest(follow=True), timeout=300 * SLOW) for _ in range(100)]  # nor do these
        for stream in deaf:
            next(stream)
        small = resident_kib(cluster.coordinator)
        name, host = "n" * 58, "h" * 63
        with connect(cluster.address) as other:
            for turn in range(0, 2400, 20):
                streams = [Attach(cluster, other).say(hello(name=f"{name}{i:05}", host=host)) for i in range(turn, turn + 20)]
                for stream in streams:
                    check(stream.hear().HasField("welcome"), "not welcome")
                    stream.close()
        cluster.wait_event(lambda e: e.number > 4000, limit_s=60)
        grown = resident_kib(cluster.coordinator) - small
        check(grown < 96 << 10, f"the coordinator grew by {grown} KiB")
        for stream in deaf:
            stream.cancel()
        last, code, text = first, grpc.StatusCode.OK, ""
        try:
            for response in slow:
                check(response.event.number == last + 1, "what did arrive has a gap")
                last = response.event.number
        except grpc.RpcError as error:
            code, text = error.code(), error.details()
        check(code == grpc.StatusCode.RESOURCE_EXHAUSTED and f"resume with after_event = {last}" in text, f"{code} {text} after event {last}")
        # From there on events are no longer kept (only 64 are), which is told too, with the number from which on they are.
        code, text = rpc_error(lambda: next(watch(api.WatchEventsRequest(after_event=last))))
        check(code == grpc.StatusCode.OUT_OF_RANGE and f"events {last + 1} to" in text and "after_event = " in text, f"{code} {text}")
        again = int(text.rsplit("= ", 1)[1])
        check(next(watch(api.WatchEventsRequest(after_event=again))).event.number == again + 1, "the number given works")
        run(cluster, "events", "--after", str(last), code=1, fragments=["no longer kept", str(last + 1)])
        channel.close()


def processor_s(process):
    """Of all its threads, so far."""
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_who_asks_too_often_is_refused_and_disturbs_nobody():
    def flood(cluster, credentials, stop, codes):
        with connect(cluster.address, credentials) as channel:
            stub = channel.unary_unary("/muster.v1.MusterService/ListWorkers")
            while not stop.is_set():
                calls = [stub.future(b"", timeout=60 * SLOW) for _ in range(50)]
                for call in calls:
                    codes.append((call.code(), call.details()))

    with SecureCluster() as cluster:
        cluster.start(flags=[*FAST, "--questions-per-second", "20"])
        stop, codes = threading.Event(), []
        threads = [threading.Thread(target=flood, args=(cluster, cluster.credentials_of("viewer/x"), stop, codes)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            cluster.wait_until(lambda: any(code == grpc.StatusCode.RESOURCE_EXHAUSTED for code, _ in codes), 30, "nobody is refused")
            cluster.submit(tiny_job(cluster, steps=STEPS, checkpoint_every=0, workers__min=2))
            for _ in range(2):
                cluster.worker()
            undisturbed_end(cluster)  # asked by another client, which is answered
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        check({code for code, _ in codes} == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}, f"{set(codes)}")
        text = next(text for code, text in codes if code == grpc.StatusCode.RESOURCE_EXHAUSTED)
        check(text.startswith("muster://viewer/x asks more than 20 times a second"), text)


def is_served(raw):
    """Whether the server answers a greeting, or has closed the connection."""
    try:
        raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        return raw.recv(1) != b""
    except (ConnectionResetError, BrokenPipeError):
        return False


def test_without_file_descriptors_the_coordinator_goes_on_and_recovers():
    with Cluster() as cluster:
        running_job(cluster, workers=2, steps=1000000)
        pid = cluster.coordinator.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        address = tuple(cluster.address.rsplit(":", 1))
        steps = cluster.job().steps_done
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(int(fd) for fd in os.listdir(f"/proc/{pid}/fd")) + 2, before[1]))
        held = [socket.create_connection(address, timeout=30 * SLOW)]
        while is_served(held[-1]):  # what others have just given back
            held.append(socket.create_connection(address, timeout=30 * SLOW))
        start, used = time.monotonic(), processor_s(cluster.coordinator)
        for _ in range(300):
            with socket.create_connection(address, timeout=30 * SLOW) as raw:
                check(not is_served(raw), "a connection was taken for which there is no descriptor")
        waiting = [socket.create_connection(address, timeout=30 * SLOW) for _ in range(100)]
        for raw in waiting:  # each is told at once: none hangs
            check(not is_served(raw), "a connection was taken for which there is no descriptor")
            raw.close()
        time.sleep(1)
        used, wall = processor_s(cluster.coordinator) - used, time.monotonic() - start
        check(used < 0.6 * wall, f"the coordinator used {used:.2f} s of {wall:.2f} s: a busy loop")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for raw in held:
            raw.close()
        cluster.retry(cluster.job, limit_s=5)
        cluster.wait_step(steps + 1)
        cluster.start_worker()
        cluster.wait_event(lambda e: e.kind == "worker_attached" and "w2" in e.text)
        check(cluster.coordinator.alive() and cluster.job().workers_lost == 0, "the coordinator did not go on")
        cluster.cancel()
        cluster.wait_over()


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
