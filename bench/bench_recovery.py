#!/usr/bin/python3
"""How long training stands still when a worker is killed, and when one joins. Real processes on this machine.

    MU_BUILD=build/release bench/bench_recovery.py [losses = 50] [growths = 20]

Recovery: from SIGKILL to the end of the first step of the survivors, minus a normal step (median of the steps just before).
Growth: the longest pause between two updates of an old member over the change, minus a normal step; and from the joiner's being ready
(attached) to its first update, in steps.
Times are read from the workers' ledgers (monotonic clock, one line per applied update).
"""

import os
import re
import statistics
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests/e2e"))
from harness import Cluster, Failure, pb  # noqa: E402

LINE = re.compile(r"applied generation=(\d+) step=(\d+) mono_us=(\d+)")


def job(cluster, steps=1000000):
    """About 20 ms a step on two slow cores: 0.8 M parameters, 8 leaves."""
    return pb.JobSpec(
        name="bench",
        model=pb.ModelSpec(family=pb.MODEL_FAMILY_GPT2, layers=4, heads=4, channels=128, context=64, vocab=256),
        data=pb.DataSpec(path=cluster.data, tokens=pb.TOKEN_FORMAT_BYTES),
        batch=pb.BatchSpec(sequences=16, micro=2, accumulate=1, length=64),
        steps=steps, optimizer=pb.OptimizerSpec(lr=1e-3), workers=pb.WorkerPolicy(min=1, max=8))


def applied(path):
    """[(generation, step, seconds)] of a worker, in order."""
    try:
        with open(path) as f:
            return [(int(g), int(s), int(us) * 1e-6) for g, s, us in LINE.findall(f.read())]
    except FileNotFoundError:
        return []


def normal_step(rows):
    gaps = [b[2] - a[2] for a, b in zip(rows, rows[1:]) if a[0] == b[0]]
    return statistics.median(gaps[-30:])


class Bench:
    def __init__(self, cluster):
        self.cluster, self.count, self.members = cluster, 0, []

    def add(self):
        self.count += 1
        ledger = os.path.join(self.cluster.dir, f"ledger{self.count}")
        worker = self.cluster.start_worker(job="bench", flags=["--ledger", ledger])
        self.members.append((worker, ledger))
        return worker, ledger

    def wait_steps(self, ledger, rows, generation_above=-1, limit_s=30):
        def there():
            got = [r for r in applied(ledger) if r[0] > generation_above]
            return got if len(got) >= rows else None
        return self.cluster.wait_until(there, limit_s, "steps did not come")


def main():
    losses = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    growths = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    recovery, pauses, joins, steps_s = [], [], [], []
    with Cluster() as cluster:
        cluster.start_coordinator(flags=["--crash-limit", "1000"])
        cluster.submit(job(cluster))
        bench = Bench(cluster)
        for _ in range(4):
            bench.add()
        for i in range(max(losses, growths)):
            keeper = bench.members[0][1]
            cluster.wait_until(lambda: cluster.job("bench").world == 4, 30, "four workers")
            bench.wait_steps(keeper, 25, generation_above=cluster.job("bench").generation - 1)
            rows = applied(keeper)
            step, generation = normal_step(rows), rows[-1][0]
            steps_s.append(step)
            victim, _ = bench.members.pop(1 + i % 3)
            killed = time.monotonic()
            victim.kill()
            after = bench.wait_steps(keeper, 1, generation_above=generation)
            recovery.append(after[0][2] - killed - step)
            rows = bench.wait_steps(keeper, 15, generation_above=generation)
            step, generation = normal_step(rows), rows[-1][0]
            _, ledger = bench.add()
            joined = bench.wait_steps(ledger, 1)
            whole = bench.wait_steps(keeper, 3, generation_above=generation)
            old = [r for r in applied(keeper) if r[0] == generation][-1]
            pauses.append(whole[0][2] - old[2] - step)
            joins.append(joined[0][1] - old[1])
    ms = [1e3 * value for value in recovery]
    print(f"normal step, 4 workers: median {1e3 * statistics.median(steps_s):.1f} ms")
    print(f"recovery from SIGKILL, {len(ms)} times: median {statistics.median(ms):.1f} ms, worst {max(ms):.1f} ms  (target 200, 1000)")
    ms = [1e3 * value for value in pauses]
    print(f"growth, others stop, {len(ms)} times: median {statistics.median(ms):.1f} ms, worst {max(ms):.1f} ms  (target 100)")
    print(f"growth, joiner's first update after the last one of the old generation, steps: worst {max(joins)}  (target 1)")


if __name__ == "__main__":
    main()
