#!/usr/bin/python3
"""Crowds of clients of every bad kind beside a job that trains, each client on a host of its own: the coordinator's memory stays within a bound (but
with a sanitizer, which keeps what was freed), what was refused is counted, no worker is lost, and the weights are what they would have been anyway.

    test_crowd.py [--full] [TEST...]    --full: 2,000 clients of each kind for 20 seconds, instead of some dozens for a few"""

import json
import os
import re
import subprocess
import sys
import time
import urllib.request

import grpc

from harness import FAST, GUARDIAN, SANITIZED, SLOW, Cluster, check, main, pb, reference, tiny_job
from test_hostile import resident_kib
from test_http import http_address
from test_security import SecureCluster

FULL = "--full" in sys.argv
sys.argv = [word for word in sys.argv if word != "--full"]
STEPS, FULL_CLIENTS, FULL_S, FULL_MIB = 150, 2000, 20, 768
FLAGS = [*FAST, "--max-workers", "64", "--max-jobs", "1000", "--http", "127.0.0.1:0"]


class Crowd:
    def __init__(self, address, kind, clients, each_s):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "crowd.py")
        if FULL:
            clients, each_s = FULL_CLIENTS, 1
        self.popen = subprocess.Popen([sys.executable, script, address, kind, "--clients", str(clients), "--each-s", str(each_s)],
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        GUARDIAN.watch(self.popen.pid)
        self.clients, self.kind = clients, kind

    def await_ready(self):
        check(self.popen.stdout.readline() == "ready\n", f"crowd {self.kind}")

    def end(self):
        """What it did."""
        self.popen.stdin.close()
        did = self.popen.stdout.read()
        check(self.popen.wait(60 * SLOW) == 0, f"crowd {self.kind}")
        return json.loads(did)


def refused(cluster):
    """What musterd counts of refusals, by limit."""
    host, port = http_address(cluster)
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10 * SLOW) as answer:
        text = answer.read().decode()
    return {limit: int(float(value)) for limit, value in re.findall(r'^muster_refused_total\{limit="(\w+)"\} (\S+)$', text, re.M)}


def withstand(cluster, start_worker, crowds, hold_s, most_mib, jobs=0, limits=()):
    """The crowds, (kind, clients, each_s), for so long at the same time, beside a job. `limits`: those that must have refused something."""
    for i in range(jobs):
        cluster.submit(tiny_job(cluster, name=f"other-{i}"))
    cluster.submit(tiny_job(cluster, steps=STEPS, checkpoint_every=0))
    with cluster.slowed():
        start_worker()
        start_worker()
        cluster.wait_step(3)
        small = most = resident_kib(cluster.coordinator)
        came = [Crowd(cluster.address, *crowd) for crowd in crowds]
        for crowd in came:
            crowd.await_ready()
        until = time.monotonic() + (FULL_S if FULL else hold_s)
        while time.monotonic() < until:
            most = max(most, resident_kib(cluster.coordinator))
            time.sleep(0.05)  # the next look
        job = cluster.retry(cluster.job, limit_s=60, also=(grpc.StatusCode.RESOURCE_EXHAUSTED,))  # it answers, or says that too many ask
        check(job.state == pb.JOB_STATE_RUNNING, "the job is over before the crowd")
        counts = {}
        if limits:
            cluster.wait_until(lambda: all(refused(cluster)[limit] for limit in limits), 60, f"nothing is refused by {limits}")
            counts = refused(cluster)
        did = {crowd.kind: crowd.end() for crowd in came}
    check(cluster.wait_finished() == reference(steps=STEPS), "weights differ")
    check(cluster.job().workers_lost == 0 and cluster.job().generations <= 2, "the job was disturbed")
    grown, most_mib = (most - small) >> 10, FULL_MIB if FULL else most_mib
    print(f"     +{grown} MiB of {most_mib}; {counts}; {did}", flush=True)
    check(all(did[crowd.kind]["acts"] >= crowd.clients for crowd in came), f"the crowd was not there: {did}")
    check(SANITIZED or grown <= most_mib, f"musterd grew by {grown} MiB, more than {most_mib}: {did}")


def beside_a_job(crowds, hold_s, most_mib, **more):
    with Cluster() as cluster:
        cluster.start_coordinator(flags=FLAGS)
        withstand(cluster, cluster.start_worker, crowds, hold_s, most_mib, **more)


def test_connections_that_say_nothing_and_half_handshakes():
    with SecureCluster() as cluster:
        cluster.start(flags=FAST)
        withstand(cluster, cluster.worker, [("idle", 200, 0.2), ("handshake", 200, 0.2)], 1, 48)


def test_clients_that_only_greet_and_those_that_behave():
    beside_a_job([("greeted", 200, 0.2), ("busy", 50, 0.2)], 1, 48)


def test_streams_that_are_opened_and_not_used():
    beside_a_job([("streams", 40, 0.2)], 5, 128, limits=["awaited_requests"])


def test_readers_that_take_nothing():
    beside_a_job([("slow", 60, 0.1)], 5, 288, jobs=250)


def test_messages_that_never_end():
    beside_a_job([("endless-body", 40, 0.1), ("half-bodies", 40, 0.1)], 4, 128, limits=["owed_bytes"])


def test_headers_that_never_end():
    beside_a_job([("endless-headers", 40, 0.02)], 5, 112, limits=["owed_bytes"])


def test_what_cannot_be_read():
    beside_a_job([(kind, 30, 0.2) for kind in ("noise", "torn", "wrong-hello", "fields", "pings")], 2, 96)


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
