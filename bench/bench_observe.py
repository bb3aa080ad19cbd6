#!/usr/bin/python3
"""What it costs to be watched: the same job with everything that observes it switched on and off, in turns. Real processes.

    MU_BUILD=build/release bench/bench_observe.py [--steps 60] [--rounds 7] [--dashboards 200]

Off: workers without vital signs, flight recorder and step reports (one a minute), musterd without HTTP. On: all defaults, /metrics scraped each
second, and a dashboard that is open. Then on with 200 dashboards, 50 readers that take nothing and 50 that went away. Two workers share the first core,
musterd and all readers have the others, as if they were on another machine. The steps are short (tens of milliseconds), so what does not depend
on the model's size weighs most; the median of all steps of all rounds counts."""

import argparse
import contextlib
import http.client
import os
import socket
import statistics
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests/e2e"))
from bench_dp import LINE, row  # noqa: E402
from harness import Cluster, Failure, pb  # noqa: E402
from test_http import Dashboard, http_address  # noqa: E402

OFF = ["--vitals-every", "0", "--report-every", "60000", "--no-flight"]
SCRAPE_S, DASHBOARD_S, OVERHEAD_MAX = 1.0, 2.0, 0.005
CORES = sorted(os.sched_getaffinity(0))


class Readers:
    """Scrapes each second, polls as so many dashboards do, and keeps connections that nobody reads from."""

    def __init__(self, address, dashboards, rude):
        self.address, self.stop, self.failures, self.answers = address, threading.Event(), [], 0
        self.stack = contextlib.ExitStack()
        for i in range(2 * rude):
            s = self.stack.enter_context(socket.create_connection(address))
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            s.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 20)
            if i % 2:
                s.close()
        self.open = [Dashboard(self.stack, address) for _ in range(dashboards)]
        self.threads = [threading.Thread(target=self.every, args=(SCRAPE_S, self.scrape)), threading.Thread(target=self.every, args=(DASHBOARD_S, self.poll))]
        for thread in self.threads:
            thread.start()

    def every(self, seconds, what):
        due = time.monotonic()
        while not self.stop.wait(max(0, due - time.monotonic())):
            due = max(due + seconds, time.monotonic())
            try:
                what()
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(error)

    def scrape(self):
        with contextlib.closing(http.client.HTTPConnection(*self.address, timeout=10)) as connection:
            connection.request("GET", "/metrics")
            self.answers += connection.getresponse().status == 200

    def poll(self):
        for path in Dashboard.PATHS:
            for dashboard in self.open:
                dashboard.ask(path)
            for dashboard in self.open:
                self.answers += dashboard.take()[0] == 200

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()
        self.stack.close()
        if self.failures or not self.answers:
            raise Failure(f"a reader was not served: {self.failures[:1]}")


def job_spec(cluster, args):
    return pb.JobSpec(name="tiny", model=pb.ModelSpec(family=pb.MODEL_FAMILY_GPT2, layers=4, heads=4, channels=256, context=128, vocab=256),
                      data=pb.DataSpec(path=cluster.data, tokens=pb.TOKEN_FORMAT_BYTES), batch=pb.BatchSpec(sequences=4, micro=1, accumulate=1, length=128),
                      steps=args.steps + 1, optimizer=pb.OptimizerSpec(lr=1e-4), workers=pb.WorkerPolicy(min=2, max=2))


def steps_of(args, flags, dashboards, rude):
    """Seconds of each step but the first."""
    with Cluster() as cluster:
        cluster.start_coordinator(flags=["--http", "127.0.0.1:0"] if dashboards else [])
        cluster.submit(job_spec(cluster, args))
        readers = Readers(http_address(cluster), dashboards, rude) if dashboards else None
        ledger = os.path.join(cluster.dir, "ledger")
        os.sched_setaffinity(0, CORES[:1])  # inherited by who is started now
        for i in range(2):
            cluster.start_worker(job="tiny", threads=1, flags=[*flags, *(["--ledger", ledger] if i == 0 else [])])
        os.sched_setaffinity(0, CORES[1:] or CORES)
        cluster.wait_finished("tiny", limit_s=600)
        if readers:
            readers.end()
        with open(ledger) as file:
            at = [int(us) * 1e-6 for _, us in LINE.findall(file.read())]
        return [b - a for a, b in zip(at, at[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("steps", 60), ("rounds", 7), ("dashboards", 200)):
        parser.add_argument("--" + name, type=int, default=value)
    args = parser.parse_args()
    os.sched_setaffinity(0, CORES[1:] or CORES)
    variants = {"off": (OFF, 0, 0), "on": ([], 1, 0), "crowded": ([], args.dashboards, 50)}
    steps = {name: [] for name in variants}
    for _ in range(args.rounds):
        for name, how in variants.items():
            steps[name] += steps_of(args, *how)
    median = {name: statistics.median(values) for name, values in steps.items()}
    for name, what, target in (("on", "two workers on one core, all that observes them on against off, a scrape each second, one dashboard", f"<= +{100 * OVERHEAD_MAX} %"),
                               ("crowded", f"the same with {args.dashboards} dashboards, 50 readers that take nothing, 50 that went away", "no effect")):
        cost = median[name] / median["off"] - 1
        row(what, f"{1e3 * median[name]:.2f} against {1e3 * median['off']:.2f} ms a step: {100 * cost:+.2f} % ({len(steps[name])} steps each)", target, cost <= OVERHEAD_MAX)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"bench_observe: {failure}")
