#!/usr/bin/python3
"""Workers that were told to end do, whatever they are waiting for, and leave no process behind: starting, resolving the coordinator's name, joining,
connecting, greeting, waiting to try again; alone, under a supervisor, and in the background."""

import contextlib
import glob
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from concurrent import futures

import grpc
import harness
from harness import BUILD, SLOW, Cluster, check, log_of, main, needs_mounts, tiny_job
from test_supervisor import WORKER, is_gone

PROMPT_S = 1.5  # a worker waits half a second for its last messages, and two for threads that do not end


class Crowd:
    """Two workers alone and two supervisors, of three workers in all, and whatever they start: found by a mark in their environment."""

    CONNECTIONS = 5

    def __init__(self, cluster, address, flags=(), runner=()):
        self.cluster, self.env = cluster, dict(os.environ, MUSTER_TEST_MARK=uuid.uuid4().hex)
        self.mark = f"MUSTER_TEST_MARK={self.env['MUSTER_TEST_MARK']}".encode()
        before, harness.RUNNER = harness.RUNNER, [*runner, *harness.RUNNER]
        try:
            self.leaders = [self.start(address, [*flags, *words]) for words in
                            (("--name", "w1"), ("--name", "w2"), ("--name", "h1", "--device", "cpu", "--slots", "2"), ("--name", "h2", "--device", "cpu"))]
        finally:
            harness.RUNNER = before

    def start(self, address, words):
        self.cluster.count += 1
        process = harness.Process(self.cluster, f"crowd{self.cluster.count}",
                                  [WORKER, "--coordinator", address, "--job", "tiny", "--threads", "1", *words], self.env)
        self.cluster.workers.append(process)
        return process

    def logs(self):
        return "".join(log_of(leader) for leader in self.leaders)

    def left(self):
        """The processes with our mark that live."""
        found = []
        for path in glob.glob("/proc/[0-9]*/environ"):
            with contextlib.suppress(OSError), open(path, "rb") as f:
                pid = int(path.split("/")[2])
                if self.mark in f.read().split(b"\0") and not is_gone(pid):
                    found.append(pid)
        return found

    def end(self, what, codes=(0,)):
        """Half of them by SIGTERM, half by SIGINT."""
        check(all(leader.alive() for leader in self.leaders), f"{what}: somebody has left already: {self.logs()}")
        for i, leader in enumerate(self.leaders):
            leader.kill(signal.SIGINT if i % 2 else signal.SIGTERM)
        since = time.monotonic()
        ends = [leader.wait(PROMPT_S) for leader in self.leaders]
        check(all(code in codes for code in ends), f"{what}: exit codes {ends} after {time.monotonic() - since:.1f} s: {self.logs()}")
        check(not self.left(), f"{what}: left behind: {self.left()}")


def listen(backlog=64):
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(backlog)
    return listener, "127.0.0.1:%d" % listener.getsockname()[1]


class Mute:
    """A server that takes connections, says what it is given, and nothing more."""

    def __init__(self, words=b""):
        self.listener, self.address = listen()
        self.words, self.taken = words, []
        threading.Thread(target=self.take, daemon=True).start()

    def take(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                connection.sendall(self.words)
                self.taken.append(connection)


class Greeter(grpc.GenericRpcHandler):
    """A coordinator that opens streams, hears Hello, and does not answer."""

    def __init__(self):
        self.heard, self.over = threading.Semaphore(0), threading.Event()
        self.server = grpc.server(futures.ThreadPoolExecutor(2 * Crowd.CONNECTIONS), handlers=[self])
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def service(self, details):
        if details.method != "/muster.v1.WorkerService/Attach":
            return None
        return grpc.stream_stream_rpc_method_handler(self.attach)

    def attach(self, messages, context):
        context.send_initial_metadata((("muster-open", "1"),))
        next(messages)
        self.heard.release()
        self.over.wait()
        yield from ()


class Names:
    """A name server of our own on port 53 of a loopback address: it knows nobody, or answers not at all, or says 127.0.0.1."""

    COUNT = 0

    def __init__(self, cluster):
        Names.COUNT += 1
        address = f"127.0.53.{Names.COUNT}"
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((address, 53))
        self.known, self.silent, self.askers = False, False, set()
        self.path = os.path.join(cluster.dir, "resolv.conf")
        with open(self.path, "w") as f:
            f.write(f"nameserver {address}\n")
        self.runner = ["unshare", "-m", "sh", "-c", f"mount --bind '{self.path}' /etc/resolv.conf && exec \"$@\"", "sh"]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                query, asker = self.socket.recvfrom(512)
                self.askers.add(asker)
                if not self.silent:
                    self.socket.sendto(self.answer(query), asker)

    def answer(self, query):
        """RFC 1035, 4.1: a question of one name, of type A or another one."""
        end = query.index(b"\0", 12) + 5
        wants_address = query[end - 4:end - 2] == b"\0\1"
        found = self.known and wants_address
        head = query[:2] + (b"\x81\x80" if self.known else b"\x81\x83") + struct.pack(">HHHH", 1, found, 0, 0)
        record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + bytes([127, 0, 0, 1])
        return head + query[12:end] + (record if found else b"")


def connections_under_way(port):
    """In state SYN_SENT, as /proc/net/tcp has it: those that nobody answers. gRPC's sockets are of IPv6, also for IPv4."""
    lines = [line.split() for path in ("/proc/net/tcp", "/proc/net/tcp6") for line in open(path).readlines()]
    return sum(words[3] == "02" and words[2].endswith(f":{port:04X}") for words in lines)


def test_while_it_starts():
    rng = random.Random(1)
    with Cluster() as cluster:
        listener, address = listen()
        listener.close()
        for _ in range(10):
            crowd = Crowd(cluster, address)
            time.sleep(rng.uniform(0, 0.05))  # wherever they are by then
            crowd.end("starting", (0, -signal.SIGTERM, -signal.SIGINT))  # these: it was not yet itself


def test_while_there_is_no_coordinator():
    with Cluster() as cluster:
        listener, refused = listen()
        listener.close()
        crowd = Crowd(cluster, refused)
        cluster.wait_until(lambda: crowd.logs().count("no coordinator: ") >= crowd.CONNECTIONS, 20, "nobody says that there is nobody")
        crowd.end("waiting to try again")

        crowd = Crowd(cluster, "unix:/nowhere/at/all")
        cluster.wait_until(lambda: crowd.logs().count("no coordinator: ") >= crowd.CONNECTIONS, 20, "nobody says that there is nobody")
        crowd.end("waiting for a Unix socket")

        full, address = listen(0)
        with contextlib.ExitStack() as stack:
            for _ in range(2):  # its queue is full: further ones get no answer at all
                raw = stack.enter_context(socket.socket())
                raw.setblocking(False)
                raw.connect_ex(full.getsockname())
            already = connections_under_way(full.getsockname()[1])
            crowd = Crowd(cluster, address)
            cluster.wait_until(lambda: connections_under_way(full.getsockname()[1]) >= already + crowd.CONNECTIONS, 20, "they do not connect")
            crowd.end("connecting")
            full.close()


def test_while_the_server_is_no_coordinator():
    with Cluster() as cluster:
        for words, what in ((b"", "waiting for HTTP/2"), (b"\0\0\0\4\0\0\0\0\0", "opening a stream")):
            mute = Mute(words)
            crowd = Crowd(cluster, mute.address)
            cluster.wait_until(lambda: len(mute.taken) >= crowd.CONNECTIONS, 20, "they do not connect")
            crowd.end(what)
            mute.listener.close()


def test_while_it_greets():
    with Cluster() as cluster:
        greeter = Greeter()
        crowd = Crowd(cluster, greeter.address)
        for _ in range(crowd.CONNECTIONS):
            check(greeter.heard.acquire(timeout=20 * SLOW), "no Hello")
        crowd.end("waiting for Welcome")
        greeter.over.set()
        greeter.server.stop(None)


def test_while_there_is_no_job():
    with Cluster() as cluster:
        cluster.start_coordinator()
        crowd = Crowd(cluster, cluster.address)
        cluster.wait_until(lambda: crowd.logs().count("no job 'tiny' here yet") >= crowd.CONNECTIONS, 20, "nobody asks for the job")
        crowd.end("waiting for the job")


@needs_mounts
def test_while_names_are_resolved():
    with Cluster() as cluster:
        names = Names(cluster)
        names.silent = True
        crowd = Crowd(cluster, "slow.test:7070", runner=names.runner)
        cluster.wait_until(lambda: len(names.askers) >= crowd.CONNECTIONS, 20, "nobody asks for the name")
        crowd.end("resolving")
        names.silent = False
        crowd = Crowd(cluster, "gone.test:7070", runner=names.runner)
        cluster.wait_until(lambda: crowd.logs().count("the name in 'gone.test:7070' cannot be resolved: ") >= crowd.CONNECTIONS, 20, "no word of it")
        crowd.end("waiting for a name that nobody knows")


@needs_mounts
def test_a_name_that_is_known_later_is_found():
    """And the address that peers are told is the one that reaches the coordinator."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=1000000))
        names = Names(cluster)
        port = cluster.address.rsplit(":", 1)[1]
        crowd = Crowd(cluster, f"muster.test:{port}", runner=names.runner)
        cluster.wait_until(lambda: crowd.logs().count("cannot be resolved") >= crowd.CONNECTIONS, 20, "no word of it")
        gives_up = harness.Process(cluster, "gives-up", [*names.runner, WORKER, "--coordinator", f"muster.test:{port}", "--job", "tiny", "--give-up-after", "1"])
        check(gives_up.wait() == 3 and "cannot be resolved" in log_of(gives_up), f"exit {gives_up.popen.returncode}: {log_of(gives_up)}")
        names.known = True
        cluster.wait_until(lambda: sum(worker.state == 3 for worker in cluster.list_workers()) >= 5, 30, "they do not attach")
        cluster.cancel()
        check([leader.wait() for leader in crowd.leaders] == [0] * 4, "the job is over")


def test_while_it_joins():
    with Cluster() as cluster:
        mute = Mute()
        pki, token = os.path.join(cluster.dir, "pki"), os.path.join(cluster.dir, "token")
        subprocess.run([os.path.join(BUILD, "cli/muster"), "cert", "ca", pki], check=True, capture_output=True)
        with open(os.open(token, os.O_CREAT | os.O_WRONLY, 0o600), "w") as f:
            f.write("0" * 64)
        crowd = Crowd(cluster, mute.address, ["--tls-ca", f"{pki}/ca.crt", "--tls-cert", f"{pki}/w.crt", "--tls-key", f"{pki}/w.key",
                                              "--join-token-file", token])
        cluster.wait_until(lambda: len(mute.taken) >= len(crowd.leaders), 20, "they do not connect")  # a supervisor joins for its workers
        crowd.end("joining")


def test_a_supervisor_that_asks_a_coordinator_which_does_not_answer():
    with Cluster() as cluster:
        cluster.start_coordinator(flags=["--suspect-ms", "20000", "--lost-ms", "60000"])
        cluster.submit(tiny_job(cluster, steps=1000000))
        crowd = Crowd(cluster, cluster.address)
        cluster.wait_until(lambda: sum(worker.state == 3 for worker in cluster.list_workers()) == crowd.CONNECTIONS, 30, "they do not attach")
        cluster.coordinator.kill(signal.SIGSTOP)
        for pid in crowd.left():
            if pid not in [leader.pid for leader in crowd.leaders]:
                os.kill(pid, signal.SIGKILL)
        cluster.wait_until(lambda: crowd.logs().count("was killed by signal 9") == 3, 20, "the supervisors have not noticed")
        for leader in crowd.leaders[:2]:
            leader.kill()  # members, which wait for the coordinator: not the matter here
        crowd.leaders = crowd.leaders[2:]
        crowd.end("asking whether it may start them again")


def test_who_starts_it_in_the_background_and_goes_away():
    """Killed, or its ssh connection broken: it has not been told that the workers are there, so they are not."""
    with Cluster() as cluster:
        mute = Mute()
        for ending in (signal.SIGTERM, signal.SIGKILL):
            taken = len(mute.taken)
            crowd = Crowd(cluster, mute.address)
            log = os.path.join(cluster.dir, f"background{ending}.log")
            cluster.wait_until(lambda: len(mute.taken) >= taken + crowd.CONNECTIONS, 20, "they do not connect")
            others = set(crowd.left())
            starter = crowd.start(mute.address, ["--device", "cpu", "--slots", "2", "--detach", "--ready-within", "3600", "--log", log])
            cluster.wait_until(lambda: len(mute.taken) >= taken + crowd.CONNECTIONS + 2, 20, "it does not connect")
            starter.kill(ending)
            check(starter.wait() == -ending, f"exit {starter.popen.returncode}")
            cluster.wait_until(lambda: set(crowd.left()) <= others, PROMPT_S, "what it has started does not leave")
            crowd.end("beside it")
            with open(log) as f:
                check("who started this in the background has not waited" in f.read(), "why it left")


def test_a_test_or_benchmark_that_is_killed_leaves_nothing():
    """Coordinator, members that go on without it, a supervisor, one that is stopped: all of this file's harness."""
    script = """
import sys, time
from test_leaving import *
with Cluster() as cluster:
    cluster.start_coordinator()
    cluster.submit(tiny_job(cluster, steps=1000000, workers__min=3))
    crowd = Crowd(cluster, cluster.address)
    cluster.wait_until(lambda: sum(worker.state == 3 for worker in cluster.list_workers()) == crowd.CONNECTIONS, 30, "they do not attach")
    crowd.leaders[0].kill(signal.SIGSTOP)
    print(cluster.dir, cluster.coordinator.pid, *crowd.left(), flush=True)
    time.sleep(3600)
"""
    for ending in (signal.SIGKILL, signal.SIGTERM):
        bench = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=os.path.dirname(os.path.abspath(__file__)))
        folder, *pids = bench.stdout.readline().split()
        check(len(pids) == 1 + 7, f"{pids}")
        bench.send_signal(ending)
        bench.wait(20 * SLOW)
        bench.stdout.close()
        deadline = time.monotonic() + 10 * SLOW
        while not all(map(is_gone, pids)):
            check(time.monotonic() < deadline, f"{signal.Signals(ending).name}: left behind: {[pid for pid in pids if not is_gone(pid)]}")
            time.sleep(0.01)
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
