#!/usr/bin/python3
"""Many clients of a coordinator in one process, each with a connection and a loopback address of its own: to musterd each is another host.

    crowd.py ADDRESS KIND [--clients 2000] [--each-s 1]

A client acts once in --each-s seconds, and comes back when it was disconnected. Writes `ready` when all are connected and have acted, and when its
standard input ends, as JSON what was done. What the kinds do: KINDS, below."""

import argparse
import contextlib
import json
import random
import resource
import select
import socket
import ssl
import struct
import sys
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
SERVICE, ATTACH = "/muster.v1.MusterService/", "/muster.v1.WorkerService/Attach"
FRAME_BYTES, READ_BYTES, SLICES = 1 << 14, 1 << 16, 50


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


# ---- requests, byte by byte: field number and wire type, then the value ----

ALL_JOBS = b"\x08\xe8\x07"             # ListJobsRequest: page_size 1000
ALL_EVENTS = b"\x18\x01"               # WatchEventsRequest: follow
NEW_EVENTS = b"\x18\x01\x20\x01"       # and newest 1
ONE_JOB = b"\x0a\x04tiny"              # GetJobRequest: name


# ---- what clients do: bytes of greet() when they come, of act(client) in each turn ----

class Client:
    reads = True
    greet = staticmethod(greeting)

    def __init__(self, number):
        self.number, self.rng, self.turn = number, random.Random(number), 0

    def again(self):
        """A new connection."""
        self.stream, self.acted = -1, 0

    def next_stream(self):
        self.stream += 2
        return self.stream

    def take(self, data):
        """What to answer."""
        return b""


class Idle(Client):
    """Connects and says nothing."""
    greet = staticmethod(bytes)

    def act(self):
        return b""


class Handshake(Client):
    """Begins TLS: half of them with half a ClientHello; the others say no more after it."""

    def greet(self):
        out = ssl.MemoryBIO()
        with contextlib.suppress(ssl.SSLWantReadError):
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).wrap_bio(ssl.MemoryBIO(), out, server_hostname="x").do_handshake()
        hello = out.read()
        return hello[:len(hello) // 2] if self.number % 2 else hello

    def act(self):
        return b""


class Greeted(Client):
    """Says what every HTTP/2 client says first, and nothing more."""

    def act(self):
        return b""


class Streams(Client):
    """Opens calls, and sends no request."""
    paths = [SERVICE + "GetJob", SERVICE + "WatchEvents", ATTACH]

    def act(self):
        if self.acted == 20:
            return b""
        return b"".join(open_stream(self.next_stream(), path) for path in self.paths * 4)


class Slow(Client):
    """Watches all events and asks for all jobs again and again, and takes nothing. Half of them let the server send nothing at all on a stream, the
    others what it may send to anybody: 64 KiB that lie in the sockets."""
    reads = False

    def greet(self):
        return greeting(0 if self.number % 2 else 65535)

    def act(self):
        watch = call(self.next_stream(), SERVICE + "WatchEvents", ALL_EVENTS) if self.acted == 0 else b""
        return watch + call(self.next_stream(), SERVICE + "ListJobs", ALL_JOBS)


class Busy(Client):
    """Well behaved: watches new events, and asks for a job in each turn."""

    def act(self):
        watch = call(self.next_stream(), SERVICE + "WatchEvents", NEW_EVENTS) if self.acted == 0 else b""
        return watch + call(self.next_stream(), SERVICE + "GetJob", ONE_JOB)

    def take(self, data):
        return frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", len(data)))


class Noise(Client):
    """What is no HTTP/2."""
    greet = staticmethod(bytes)

    def act(self):
        return b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"y" * 8000 + b"\r\n" if self.number % 2 else self.rng.randbytes(4096)


class Torn(Client):
    """Requests that end in the middle of a field, in turn to every method, and to methods that there are not."""
    names = "SubmitJob GetJob ListJobs CancelJob ListWorkers DrainWorker ScaleJob AmendJob BranchJob WatchEvents GetTimings OrderNode Nothing".split()

    def act(self):
        self.turn += 1
        return call(self.next_stream(), SERVICE + self.names[self.turn % len(self.names)], b"\x0a\xff\xff\xff\xff" + self.rng.randbytes(40))


class EndlessBody(Client):
    """2 GiB are announced, and come bit by bit."""

    def act(self):
        begin = open_stream(self.next_stream(), ATTACH) + frame(DATA, 0, self.stream, b"\0\x7f\xff\xff\xff") if self.acted == 0 else b""
        return begin + frame(DATA, 0, self.stream, b"x" * 16000)


class HalfBodies(Client):
    """Bodies within the limit that stop before their end, one more in each turn."""

    def act(self):
        body = b"\0" + struct.pack(">I", 60000) + b"x" * 16000
        return open_stream(self.next_stream(), SERVICE + "SubmitJob") + frame(DATA, 0, self.stream, body)


class EndlessHeaders(Client):
    """A head that never ends: names and values that the server must keep, or drop."""

    def act(self):
        more = b"".join(literal(b"x-%05d" % self.rng.randrange(100000), b"v" * 100) for _ in range(100))
        begin = open_stream(self.next_stream(), SERVICE + "GetJob", flags=0) if self.acted == 0 else b""
        return begin + frame(CONTINUATION, 0, self.stream, more)


class WrongHello(Client):
    """Workers' first messages that are none."""

    def act(self):
        return open_stream(self.next_stream(), ATTACH) + message(self.stream, b"\x0a\x10\x08\x01\x12\x0c" + self.rng.randbytes(12), last=False)


class Fields(Client):
    """Requests of 20,000 fields that nobody knows."""

    def act(self):
        return call(self.next_stream(), SERVICE + "GetJob", b"".join(b"\xf8%c\x01" % (0x10 + i % 100) for i in range(20000)))


class Resets(Client):
    """Opened and reset at once (CVE-2023-44487)."""

    def act(self):
        return b"".join(open_stream(self.next_stream(), SERVICE + "ListJobs") + frame(RST_STREAM, 0, self.stream, struct.pack(">I", 8)) for _ in range(50))


class Pings(Client):
    """Asks, a hundred times in each turn, for answers that it does not take."""
    reads = False

    def act(self):
        if self.number % 2:
            return frame(SETTINGS, 0, 0, struct.pack(">HI", 3, 100)) * 100
        return b"".join(frame(PING, 0, 0, self.rng.randbytes(8)) for _ in range(100))


KINDS = {"idle": Idle, "handshake": Handshake, "greeted": Greeted, "streams": Streams, "slow": Slow, "busy": Busy, "noise": Noise, "torn": Torn,
         "endless-body": EndlessBody, "half-bodies": HalfBodies, "endless-headers": EndlessHeaders, "wrong-hello": WrongHello, "fields": Fields,
         "resets": Resets, "pings": Pings}


class Crowd:
    def __init__(self, address, kind, count, each_s):
        host, port = address.rsplit(":", 1)
        self.address, self.each_s = (host, int(port)), each_s
        self.clients = [KINDS[kind](i) for i in range(count)]
        self.missing = list(self.clients)
        self.poll = select.epoll()
        self.open = {}  # descriptor -> (socket, client)
        self.waiting = {}  # descriptor -> bytes that the socket has not taken
        self.counts = dict(opened=0, closed=0, acts=0, sent=0, read=0)

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
        self.poll.register(raw.fileno(), self.wanted(client))
        self.counts["opened"] += 1
        self.send(raw, client, client.greet())

    def wanted(self, client, also=0):
        return select.EPOLLRDHUP | also | (select.EPOLLIN if client.reads else 0)

    def drop(self, fd):
        raw, client = self.open.pop(fd)
        self.waiting.pop(fd, None)
        self.poll.unregister(fd)
        raw.close()
        self.counts["closed"] += 1
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
            self.poll.modify(fd, self.wanted(client, select.EPOLLOUT))

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
            data = b""
            with contextlib.suppress(OSError):
                data = raw.recv(READ_BYTES)
            if not data:
                self.drop(fd)
                return
            self.counts["read"] += len(data)
            if fd not in self.waiting:
                self.send(raw, client, client.take(data))
        elif events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
            self.drop(fd)
            return
        if events & select.EPOLLOUT and fd in self.waiting:
            words = self.waiting.pop(fd)
            self.poll.modify(fd, self.wanted(client))
            self.send(raw, client, words)

    def connect_missing(self, most):
        back, self.missing = self.missing[:most], self.missing[most:]
        for client in back:
            try:
                self.connect(client)
            except OSError:
                self.missing.append(client)

    def round(self):
        """Each acts once, evenly spread."""
        began = time.monotonic()
        for part in range(SLICES):
            self.connect_missing(len(self.clients) // SLICES + 1)
            for fd, (_, client) in list(self.open.items()):
                if client.number % SLICES == part:
                    self.act(fd)
            until = began + (part + 1) * self.each_s / SLICES
            while True:
                for fd, events in self.poll.poll(max(0, until - time.monotonic())):
                    if fd in self.open:
                        self.look(fd, events)
                if time.monotonic() >= until:
                    break

    def run(self):
        for count in range(sys.maxsize):
            self.round()
            if count == 1:
                print("ready", flush=True)
            if select.select([sys.stdin], [], [], 0)[0]:
                return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--clients", type=int, default=2000)
    parser.add_argument("--each-s", type=float, default=1)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < args.clients + 100:
        sys.exit(f"crowd: only {hard} open files are allowed, {args.clients + 100} are needed: ulimit -n")
    crowd = Crowd(args.address, args.kind, args.clients, args.each_s)
    crowd.run()
    print(json.dumps(dict(crowd.counts, open=len(crowd.open))), flush=True)


if __name__ == "__main__":
    main()
