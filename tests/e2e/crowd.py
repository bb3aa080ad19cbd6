#!/usr/bin/python3
"""Thousands of clients of a coordinator in one process, each with a connection and a loopback address of its own: to musterd each is another host.

    crowd.py ADDRESS KIND [--clients 2000] [--each-s 1]

KIND:
  slow     asks for all jobs and watches all events, and takes no byte of the answers
  silent   says nothing at all, or greets and says nothing, or opens a worker's stream and says nothing
  hostile  what is no HTTP/2, no gRPC, no message; messages, headers, pings, settings and resets without end; Hellos that are wrong
  many     well behaved: watches all events, and asks for a job once in --each-s

A client acts once in --each-s seconds, and comes back when it was disconnected. Lines on standard input: `go` (it answers `ready` when all are connected
and have acted once), `rest` (all disconnect: `rested`), and its end. Says last what was done, as JSON."""

import argparse
import contextlib
import json
import os
import random
import resource
import select
import socket
import struct
import sys
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
SERVICE, ATTACH = "/muster.v1.MusterService/", "/muster.v1.WorkerService/Attach"
FRAME_BYTES, READ_BYTES = 1 << 14, 1 << 16


# ---- HTTP/2 (RFC 9113, 4.1; RFC 7541, 6.2.2: literals without indexing) ----

def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name, value):
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def greeting(window=65535):
    """`window`: what the server may send on a stream before we take some of it."""
    return PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, window))


def open_stream(stream, path, flags=END_HEADERS):
    fields = (b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"x"), (b"te", b"trailers"), \
             (b"content-type", b"application/grpc")
    return frame(HEADERS, flags, stream, b"".join(literal(*field) for field in fields))


def message(stream, body, last=True):
    """In frames of what every server takes (RFC 9113, 4.2)."""
    framed = b"\0" + struct.pack(">I", len(body)) + body
    starts = range(0, len(framed), FRAME_BYTES)
    return b"".join(frame(DATA, END_STREAM if last and at == starts[-1] else 0, stream, framed[at:at + FRAME_BYTES]) for at in starts)


def call(stream, path, body):
    return open_stream(stream, path) + message(stream, body)


# ---- messages, byte by byte: field number and wire type, then the value ----

ALL_JOBS = b"\x08\xe8\x07"             # ListJobsRequest: page_size 1000
ALL_EVENTS = b"\x18\x01"               # WatchEventsRequest: follow
NEW_EVENTS = b"\x18\x01\x20\x01"       # and newest 1
ONE_JOB = b"\x0a\x04tiny"              # GetJobRequest: name


class Client:
    """What all kinds have: it greets, acts, and reads what comes."""

    reads = True

    def __init__(self, number, rng):
        self.number, self.rng = number, rng
        self.turn, self.again()

    turn = 0

    def again(self):
        """A new connection."""
        self.stream, self.acted, self.rest = -1, 0, b""

    def next_stream(self):
        self.stream += 2
        return self.stream

    def greet(self):
        return greeting()

    def act(self):
        return b""

    def take(self, data, counts):
        """Counts the ends of calls: frames that say so, of those that came whole."""
        data = self.rest + data
        while len(data) >= 9:
            size = int.from_bytes(data[:3], "big")
            if len(data) < 9 + size:
                break
            kind, flags = data[3], data[4]
            if kind == HEADERS and flags & END_STREAM:
                counts["answers"] += 1
            data = data[9 + size:]
        self.rest = data
        return b""


class Slow(Client):
    """Half of them let the server send nothing at all on a stream, the others what it may send to anybody: 64 KiB that lie in the sockets."""

    reads = False

    def greet(self):
        return greeting(0 if self.number % 2 else 65535)

    def act(self):
        watch = call(self.next_stream(), SERVICE + "WatchEvents", ALL_EVENTS) if self.acted == 0 else b""
        return watch + call(self.next_stream(), SERVICE + "ListJobs", ALL_JOBS)


class Silent(Client):
    def greet(self):
        return greeting() if self.number % 3 else b""

    def act(self):
        return open_stream(self.next_stream(), ATTACH) if self.number % 3 == 2 and self.acted == 0 else b""


class Many(Client):
    def act(self):
        watch = call(self.next_stream(), SERVICE + "WatchEvents", NEW_EVENTS) if self.acted == 0 else b""
        return watch + call(self.next_stream(), SERVICE + "GetJob", ONE_JOB)

    def take(self, data, counts):
        counts["read"] += len(data)
        super().take(data, counts)
        return frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", len(data)))


class Hostile(Client):
    """One attack each, of all that follow."""

    def greet(self):
        self.attack = self.attacks[self.number % len(self.attacks)]
        self.reads = self.attack not in (Hostile.pings, Hostile.settings)
        return b"" if self.attack in (Hostile.noise, Hostile.http1) else greeting()

    def act(self):
        return self.attack(self)

    def noise(self):
        return self.rng.randbytes(4096)

    def http1(self):
        return b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 8000 + b"\r\n"

    def torn(self):
        """A message that ends in the middle of a field, to every method in turn."""
        self.turn += 1
        names = "SubmitJob GetJob ListJobs CancelJob ListWorkers DrainWorker ScaleJob AmendJob BranchJob WatchEvents GetTimings OrderNode".split()
        return call(self.next_stream(), SERVICE + names[self.turn % len(names)], b"\x0a\xff\xff\xff\xff" + self.rng.randbytes(40))

    def endless_message(self):
        """2 GiB are announced, and come bit by bit."""
        if self.acted == 0:
            self.next_stream()
            return open_stream(self.stream, ATTACH) + frame(DATA, 0, self.stream, b"\0\x7f\xff\xff\xff" + b"x" * 16000)
        return frame(DATA, 0, self.stream, b"x" * 16000)

    def too_large(self):
        stream = self.next_stream()
        body = message(stream, b"\x0a\x80\x80\x08" + b"a" * (1 << 17), last=False)
        return open_stream(stream, SERVICE + "SubmitJob") + body[:3 * (FRAME_BYTES + 9)]  # the server takes no more before it has read any

    def wrong_hello(self):
        stream = self.next_stream()
        return open_stream(stream, ATTACH) + message(stream, b"\x0a\x10\x08\x01\x12\x0c" + self.rng.randbytes(12), last=False)

    def fields_without_end(self):
        stream = self.next_stream()
        return open_stream(stream, SERVICE + "GetJob") + message(stream, b"".join(b"\xf8%c\x01" % (0x10 + i % 100) for i in range(20000)))

    def no_method(self):
        return call(self.next_stream(), "/no.such/Method%d" % self.rng.randrange(1000), b"")

    def endless_headers(self):
        """A head that never ends: names and values that the server must keep, or drop."""
        more = b"".join(literal(b"x-%05d" % self.rng.randrange(100000), b"v" * 100) for _ in range(100))
        if self.acted == 0:
            return open_stream(self.next_stream(), SERVICE + "GetJob", flags=0) + frame(CONTINUATION, 0, self.stream, more)
        return frame(CONTINUATION, 0, self.stream, more)

    def resets(self):
        """Opened and reset at once (CVE-2023-44487)."""
        words = b""
        for _ in range(50):
            words += open_stream(self.next_stream(), SERVICE + "ListJobs") + frame(RST_STREAM, 0, self.stream, struct.pack(">I", 8))
        return words

    def pings(self):
        return b"".join(frame(PING, 0, 0, self.rng.randbytes(8)) for _ in range(100))

    def settings(self):
        return frame(SETTINGS, 0, 0, struct.pack(">HI", 3, 100)) * 100


Hostile.attacks = [Hostile.noise, Hostile.http1, Hostile.torn, Hostile.endless_message, Hostile.too_large, Hostile.wrong_hello,
                   Hostile.fields_without_end, Hostile.no_method, Hostile.endless_headers, Hostile.resets, Hostile.pings, Hostile.settings]
KINDS = {"slow": Slow, "silent": Silent, "hostile": Hostile, "many": Many}


class Crowd:
    def __init__(self, args):
        host, port = args.address.rsplit(":", 1)
        self.address, self.each_s = (host, int(port)), args.each_s
        self.clients = [KINDS[args.kind](i, random.Random(i)) for i in range(args.clients)]
        self.poll = select.epoll()
        self.open = {}  # descriptor -> (socket, client)
        self.waiting = {}  # descriptor -> bytes that the socket has not taken
        self.missing = []
        self.counts = dict(opened=0, closed=0, acts=0, sent=0, read=0, answers=0, most=0)

    def connect(self, client):
        raw = socket.socket()
        raw.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
        if not client.reads:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.bind((f"127.1.{client.number // 250}.{1 + client.number % 250}", 0))
        raw.connect(self.address)  # on the loopback at once, or the listener's queue is full and the kernel tries again
        raw.setblocking(False)
        client.again()
        self.open[raw.fileno()] = (raw, client)
        self.poll.register(raw.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        self.counts["opened"] += 1
        self.counts["most"] = max(self.counts["most"], len(self.open))
        self.send(raw, client, client.greet())
        if not client.reads and raw.fileno() in self.open:
            self.poll.modify(raw.fileno(), select.EPOLLRDHUP)

    def drop(self, fd, by_server=True):
        raw, client = self.open.pop(fd)
        self.waiting.pop(fd, None)
        self.poll.unregister(fd)
        raw.close()
        self.counts["closed"] += by_server
        self.missing.append(client)

    def send(self, raw, client, words):
        """What the socket does not take waits, and until it is gone the client does nothing new."""
        fd = raw.fileno()
        try:
            sent = raw.send(words) if words else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self.drop(fd)
            return
        self.counts["sent"] += sent
        if sent < len(words):
            self.waiting[fd] = words[sent:]
            self.poll.modify(fd, select.EPOLLOUT | select.EPOLLRDHUP | (select.EPOLLIN if client.reads else 0))

    def flush(self, fd):
        raw, client = self.open[fd]
        words = self.waiting.pop(fd)
        self.poll.modify(fd, select.EPOLLRDHUP | (select.EPOLLIN if client.reads else 0))
        self.send(raw, client, words)

    def act(self, fd):
        raw, client = self.open[fd]
        if fd in self.waiting:
            return
        words = client.act()
        client.acted += 1
        self.counts["acts"] += 1
        self.send(raw, client, words)

    def look(self, fd, events):
        raw, client = self.open[fd]
        if events & select.EPOLLIN:
            try:
                data = raw.recv(READ_BYTES)
            except OSError:
                data = b""
            if not data:
                self.drop(fd)
                return
            answer = client.take(data, self.counts)
            if answer and fd not in self.waiting:
                self.send(raw, client, answer)
        elif events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            self.drop(fd)
            return
        if events & select.EPOLLOUT and fd in self.waiting:
            self.flush(fd)

    def turn(self, until):
        for fd, events in self.poll.poll(max(0, until - time.monotonic())):
            if fd in self.open:
                self.look(fd, events)

    def connect_missing(self, most):
        back, self.missing = self.missing[:most], self.missing[most:]
        for client in back:
            with contextlib.suppress(OSError):
                self.connect(client)
                continue
            self.missing.append(client)

    def run(self):
        """Rounds of --each-s, in which each acts once, evenly spread; `go` and `rest` in between."""
        going, told = False, False
        while True:
            ready, _, _ = select.select([sys.stdin], [], [], None if not going else 0)
            if ready:
                line = sys.stdin.readline().strip()
                if not line:
                    return
                going, told = line == "go", False
                if not going:
                    for fd in list(self.open):
                        self.drop(fd, by_server=False)
                    self.missing = []
                    print("rested", flush=True)
                    continue
                self.missing = list(self.clients)
            self.round()
            if not told:
                told = True
                print("ready", flush=True)

    def round(self):
        began = time.monotonic()
        slices = 50
        for part in range(slices):
            self.connect_missing(len(self.clients) // slices + 1)
            for fd, (_, client) in list(self.open.items()):
                if client.number % slices == part:
                    self.act(fd)
            self.turn(time.monotonic())
            until = began + (part + 1) * self.each_s / slices
            while time.monotonic() < until:
                self.turn(until)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--each-s", type=float, default=1)
    parser.add_argument("--attack", choices=[attack.__name__ for attack in Hostile.attacks], help="of kind hostile: only this one")
    args = parser.parse_args()
    if args.attack:
        Hostile.attacks = [getattr(Hostile, args.attack)]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < args.clients + 100:
        sys.exit(f"crowd: only {hard} open files are allowed, {args.clients + 100} are needed: ulimit -n")
    crowd = Crowd(args)
    crowd.run()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps(dict(crowd.counts, open=len(crowd.open), cpu_s=used.ru_utime + used.ru_stime)), flush=True)


if __name__ == "__main__":
    main()
