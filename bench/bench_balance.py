#!/usr/bin/python3
"""One of four workers becomes half as fast: how much of what can be had again leaves that move bring back, and when. Real processes.

    MU_BUILD=build/release bench/bench_balance.py [--steady 200] [--times 3]

Each worker has one thread and a CPU quota of its own (a cgroup; root is needed), 0.4 of a core, so that two cores carry four of them. After
40 even steps one worker's quota is halved. The slow step is the median of those from then to the change; what can be had is what four
workers of speeds 1, 1, 1 and 1/2 need at the least, 8/7 of an even step. Regained: how far the median of steps 21 to 60 after the halving
has come back from the slow step towards that. Then so many more steps are watched for leaves that move. The job's weights must be those of
one worker without any quota. Times are read from a worker's ledger (monotonic clock, one line per applied update).
"""

import argparse
import contextlib
import os
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_dp import row  # noqa: E402
from bench_recovery import Bench, applied, pb  # noqa: E402
from harness import Cluster  # noqa: E402

WORKERS, LEAVES, EVEN_STEPS, WITHIN, LOOKED_AT = 4, 32, 40, 20, 40
QUOTA, PERIOD_US = 0.4, 10000
TARGET = 0.8


class Quota:
    """A cgroup of the first or second version, in which all threads of a process share so much of a core."""

    def __init__(self, name):
        first = os.path.isdir("/sys/fs/cgroup/cpu")
        self.path = os.path.join("/sys/fs/cgroup/cpu" if first else "/sys/fs/cgroup", f"muster-bench-{os.getpid()}-{name}")
        self.is_first = first
        os.mkdir(self.path)

    def write(self, file, text):
        with open(os.path.join(self.path, file), "w") as f:
            f.write(text)

    def allow(self, cores):
        quota = int(cores * PERIOD_US)
        if self.is_first:
            self.write("cpu.cfs_period_us", str(PERIOD_US))
            self.write("cpu.cfs_quota_us", str(quota))
        else:
            self.write("cpu.max", f"{quota} {PERIOD_US}")

    def take(self, pid):
        self.write("cgroup.procs", str(pid))

    def remove(self):
        with contextlib.suppress(OSError):
            os.rmdir(self.path)


def job(cluster, steps):
    return pb.JobSpec(
        name="bench", model=pb.ModelSpec(family=pb.MODEL_FAMILY_GPT2, layers=4, heads=4, channels=192, context=64, vocab=256),
        data=pb.DataSpec(path=cluster.data, tokens=pb.TOKEN_FORMAT_BYTES),
        batch=pb.BatchSpec(sequences=LEAVES, micro=1, accumulate=1, length=64),
        steps=steps, optimizer=pb.OptimizerSpec(lr=1e-3), workers=pb.WorkerPolicy(min=1, max=WORKERS))


def gaps(rows, first, last):
    """Times of the steps with these numbers, within generations."""
    return [b[2] - a[2] for a, b in zip(rows, rows[1:]) if a[0] == b[0] and first <= b[1] <= last]


def moves(cluster):
    return [e for e in cluster.events if e.kind in ("leaves_moved", "layers_moved", "worker_demoted")]


def alone(steps):
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[])
        cluster.submit(job(cluster, steps))
        cluster.start_worker(job="bench", threads=2)
        return cluster.wait_finished("bench", limit_s=600)


def measure(steady):
    """(even, slow, regained step in seconds; steps from the halving to the first change; changes within, and in the steady steps; SHA-256)"""
    with Cluster() as cluster, contextlib.ExitStack() as stack:
        cluster.start_coordinator(flags=["--lost-ms", "20000"])
        spec = job(cluster, EVEN_STEPS + WITHIN + LOOKED_AT + steady + 60)
        spec.workers.min = WORKERS
        cluster.submit(spec)
        bench, quotas = Bench(cluster), []
        for i in range(WORKERS):
            quotas.append(Quota(i))
            stack.callback(quotas[-1].remove)
            quotas[-1].allow(QUOTA)
            worker = bench.add()[0]
            quotas[-1].take(worker.pid)
        stack.callback(lambda: [worker.kill() or worker.wait() for worker in cluster.workers if worker.alive()])  # before its cgroup goes
        ledger = bench.members[0][1]
        rows = bench.wait_steps(ledger, EVEN_STEPS, limit_s=120)
        quotas[WORKERS - 1].allow(QUOTA / 2)
        halved = applied(ledger)[-1][1]
        even = statistics.median(gaps(rows, 10, halved))
        moved = cluster.wait_event("leaves_moved", limit_s=120)
        rows = bench.wait_steps(ledger, halved + WITHIN + LOOKED_AT, limit_s=300)
        changed = next(r[1] for r, before in zip(rows[1:], rows) if r[0] > before[0] and r[1] > halved)
        slow = statistics.median(gaps(rows, halved + 2, changed - 1))
        now = statistics.median(gaps(rows, halved + WITHIN + 1, halved + WITHIN + LOOKED_AT))
        until, known = halved + WITHIN + LOOKED_AT, len(moves(cluster))
        bench.wait_steps(ledger, until + steady, limit_s=600)
        sha = cluster.wait_finished("bench", limit_s=600)
        within = [e for e in moves(cluster) if e.step <= until]
        later = [e for e in moves(cluster) if until < e.step <= until + steady]
        assert known <= len(moves(cluster)) and moved in within
        return even, slow, now, changed - halved, len(within), len(later), sha


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steady", type=int, default=200)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    expected = alone(EVEN_STEPS + WITHIN + LOOKED_AT + args.steady + 60)
    results = [measure(args.steady) for _ in range(args.times)]
    shares, late, most = [], 0, 0
    for even, slow, now, _, _, later, _ in results:
        best = even * WORKERS / (WORKERS - 0.5)
        shares.append((slow - now) / (slow - best))
        most = max(most, later)
    late = max(r[3] for r in results)
    same = all(r[6] == expected for r in results)
    even, slow, now = (statistics.median(r[i] for r in results) for i in range(3))
    row(f"one of four workers at half its CPU quota, {LEAVES} leaves ({len(results)} times): what can be had is had again",
        f"{100 * statistics.median(shares):.0f} % (least {100 * min(shares):.0f} %) in steps {WITHIN + 1} to {WITHIN + LOOKED_AT}: {1e3 * even:.0f} ms a step "
        f"before, {1e3 * slow:.0f} slow, {1e3 * now:.0f} then; first change after {late} steps at most; weights {'equal' if same else 'DIFFER'}",
        f">= {100 * TARGET:.0f} % within {WITHIN} steps, equal weights", min(shares) >= TARGET and late <= WITHIN and same)
    row(f"the same: further changes in {args.steady} steps", f"{most} at most", "at most 2", most <= 2)


if __name__ == "__main__":
    main()
