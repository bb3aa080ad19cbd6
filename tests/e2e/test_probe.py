#!/usr/bin/env python3
"""muster probe of attached workers: what stands out is named, whoever dies or is taken away too, and a job comes first."""

import json
import os
import re
import signal
import subprocess

from harness import (BUILD, SLOW, STRICT, Cluster, api, check, connect, main, pb, reference, run, tiny_job)
from muster.v1 import probe_pb2 as pr

MUSTER = os.path.join(BUILD, "cli/muster")


def call(cluster, method, request, response_type):
    with connect(cluster.address) as channel:
        stub = channel.unary_unary(f"/muster.v1.ProbeService/{method}", request_serializer=lambda m: m.SerializeToString(),
                                   response_deserializer=response_type.FromString)
        return stub(request, timeout=10 * SLOW)


def read(cluster):
    return call(cluster, "ReadProbe", pr.ReadProbeRequest(), pr.ReadProbeResponse)


def finished(cluster):
    return cluster.wait_until(lambda: (lambda probe: probe.is_over and probe)(read(cluster)), 60, "the probe did not end")


def start(cluster, number, env=None):
    """Worker w<number> on a host of its own, with an address of its own."""
    return cluster.start_worker(name=f"w{number}", env=env, flags=["--host-id", f"h{number}", "--data-addr", f"127.0.0.{10 + number}"])


def wait_spares(cluster, count):
    cluster.wait_until(lambda: sum(w.state == pb.WORKER_STATE_SPARE for w in cluster.list_workers()) == count, 30, f"{count} workers were not ready")


def probe(cluster, *args):
    """Of attached workers. On a busy machine something may stand out in any probe: then it ends with 1."""
    done = subprocess.run([MUSTER, "--coordinator", cluster.address, "probe", *args], capture_output=True, text=True, timeout=120 * SLOW)
    check(done.returncode in (0, 1) and not done.stderr, f"{done}")
    return done


def test_one_slow_link_is_named():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, workers__min=9))
        slow = {"LD_PRELOAD": os.path.join(BUILD, "tests/lib/libpaced_link.so"), "MU_PACED_TO": "127.0.0.11", "MU_PACED_RATE": "2000000"}
        for number in range(4):
            start(cluster, number, slow if number == 3 else None)
        wait_spares(cluster, 4)
        path = os.path.join(cluster.dir, "cluster.yaml")
        done = probe(cluster, "--quick", "--mib", "1", "--out", path)
        check(done.returncode == 1, f"something stands out: {done}")
        worst = done.stdout.split("out\n", 1)[1].split("\n")[0]
        rate = re.match(r"  link w1 - w3: .* ([0-9.]+) MB/s from w3", worst)
        check(rate and float(rate.group(1)) < 4, f"{done.stdout}")
        check("w1 on h1: its 3 links" not in done.stdout and "w3 on h3: its 3 links" not in done.stdout, f"a slow link is no slow worker: {done.stdout}")
        found = cluster.wait_event("probe_found")
        check("link w1 - w3" in found.text, found.text)
        plan = subprocess.run([MUSTER, "plan", path, os.path.join(os.path.dirname(__file__), "../../examples/tiny.yaml"), "--fp32", "-o", "json"],
                              capture_output=True, text=True, timeout=60 * SLOW)
        check(plan.returncode == 0 and json.loads(plan.stdout)["plans"][0]["tokens_per_day"] > 0, f"{plan}")
        with open(path) as file:
            check("nodes: 4\n" in file.read(), "four hosts")


def test_who_dies_or_hangs_is_left_out():
    with Cluster(flags=STRICT) as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, workers__min=9))
        workers = [start(cluster, number) for number in range(4)]
        wait_spares(cluster, 4)
        begun = call(cluster, "Probe", pr.ProbeRequest(job="tiny", quick=True), pr.ProbeResponse)
        check(begun.workers == 4, f"{begun}")
        workers[2].kill()  # each is still measuring by itself: that takes half a second at least
        workers[3].kill(signal.SIGSTOP)
        done = finished(cluster)
        out = {done.workers[one.a].name: one.text for one in done.findings if one.kind == pr.PROBE_FINDING_KIND_WORKER_OUT}
        check(set(out) == {"w2", "w3"} and "no sign of life" in out["w3"], f"{out}")
        states = {(done.workers[link.a].name, done.workers[link.b].name): link.state for link in done.links}
        check(states.pop(("w0", "w1")) == pr.PROBE_LINK_STATE_GOOD, f"{states}")
        check(set(states.values()) == {pr.PROBE_LINK_STATE_UNKNOWN}, f"no link is at fault: {states}")
        check(done.workers[0].alone.flops and done.workers[0].ring_rate > 0, f"{done}")
        workers[3].kill(signal.SIGCONT)
        wait_spares(cluster, 3)
        again = json.loads(probe(cluster, "-o", "json", "--quick").stdout)
        check(again["number"] == done.number + 1 and len(again["workers"]) == 3, f"{again}")


def test_a_job_comes_first():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, workers__min=3))
        for number in range(2):
            start(cluster, number)
        wait_spares(cluster, 2)
        call(cluster, "Probe", pr.ProbeRequest(), pr.ProbeResponse)
        with cluster.slowed():
            start(cluster, 2)
            cluster.wait_step(1)
            done = finished(cluster)
            check([worker.text for worker in done.workers] == ["job tiny gave it a rank (step 1 of 3)"] * 2, f"{done.workers}")
            run(cluster, "probe", "--quick", code=5, fragments=["none of 3 attached workers is free"])
        check(cluster.wait_finished() == reference(), "weights differ from the undisturbed run's")


def test_a_job_is_measured_before_it_begins():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.call("SubmitJob", api.SubmitJobRequest(spec=tiny_job(cluster, workers__min=2), preflight=True), api.SubmitJobResponse)
        for number in range(2):
            start(cluster, number)
        over = cluster.wait_event("probe_finished", 60)
        check(over.job == "tiny" and "probe 1 of 2 workers on 2 hosts, 1 pair" in over.text, over.text)
        go = cluster.wait_event("generation_go")
        check(go.number > over.number, f"{go.number} follows {over.number}")
        check(cluster.wait_finished() == reference(), "weights differ from the undisturbed run's")


if __name__ == "__main__":
    main([test_one_slow_link_is_named, test_who_dies_or_hangs_is_left_out, test_a_job_comes_first, test_a_job_is_measured_before_it_begins])
