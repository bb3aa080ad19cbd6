#!/usr/bin/python3
"""How long the old members stand still when a worker joins, for a small and a large model. Real processes on this machine.

    MU_BUILD=build/release bench/bench_growth.py [--growths 5] [--only NAME] [--sharded]

Two workers of one thread train; a third one joins, gets its state while they step, and leaves again (SIGTERM), over and over. The stop is
the pause of an old member between its last update of the old generation and its first of the new one, minus a normal step of the new one.
While fed: the median step from the order to feed to the stop, against the normal step of the old generation. Times are read from the
workers' ledgers (monotonic clock, one line per applied update). --sharded: the optimizer's moments are divided over the replicas, so that
the old members get other chunks of them, too.
"""

import argparse
import os
import signal
import statistics
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_dp import row  # noqa: E402
from bench_recovery import Bench, applied, normal_step, pb  # noqa: E402
from harness import Cluster  # noqa: E402

# name, model, sequences (one leaf each), length, steps that make a normal one
CASES = (("small", dict(layers=4, heads=4, channels=128, context=64, vocab=256), 16, 64, 15),
         ("gpt2-124M", dict(layers=12, heads=12, channels=768, context=1024, vocab=50257), 6, 32, 5))


def job(cluster, model, sequences, length, sharded):
    return pb.JobSpec(
        name="bench", model=pb.ModelSpec(family=pb.MODEL_FAMILY_GPT2, **model),
        data=pb.DataSpec(path=cluster.data, tokens=pb.TOKEN_FORMAT_BYTES),
        batch=pb.BatchSpec(sequences=sequences, micro=1, accumulate=1, length=length),
        steps=1000000, optimizer=pb.OptimizerSpec(lr=1e-4), parallel=pb.ParallelSpec(tp=1, pp=1, optimizer_sharding=sharded), workers=pb.WorkerPolicy(min=1, max=8))


def measure(model, sequences, length, growths, few, sharded):
    stops, steps, fed, texts = [], [], [], []
    with Cluster() as cluster:
        cluster.start_coordinator(flags=["--lost-ms", "20000"])
        cluster.submit(job(cluster, model, sequences, length, sharded))
        bench = Bench(cluster)
        keeper = bench.add()[1]
        bench.add()
        go = cluster.wait_event(lambda e: e.kind == "generation_go" and "2 workers" in e.text, limit_s=120)
        for _ in range(growths):
            old = bench.wait_steps(keeper, few, generation_above=go.generation - 1, limit_s=600)
            before = normal_step(old)
            worker, _ = bench.add()
            grown = cluster.wait_event(lambda e: e.kind == "generation_go" and "3 workers" in e.text, limit_s=600, after=go.number)
            order = [e for e in cluster.events if e.kind == "state_fed" and go.number < e.number < grown.number]
            rows = bench.wait_steps(keeper, few + 1, generation_above=grown.generation - 1, limit_s=600)
            last = [r for r in applied(keeper) if r[0] == go.generation]
            steps.append(before)
            stops.append(rows[0][2] - last[-1][2] - normal_step(rows))
            if order:
                since = [(a, b) for a, b in zip(last, last[1:]) if b[1] > order[0].step]
                fed.append(statistics.median(b[2] - a[2] for a, b in since[-8:]) if since else before)
            texts.append(grown.text)
            worker.kill(signal.SIGTERM)
            bench.members.pop()
            go = cluster.wait_event(lambda e: e.kind == "generation_go" and "2 workers" in e.text, limit_s=120, after=grown.number)
    return stops, steps, fed, texts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growths", type=int, default=5)
    parser.add_argument("--only", default="", help="the cases whose name contains it")
    parser.add_argument("--sharded", action="store_true", help="optimizer_sharding: true")
    args = parser.parse_args()
    for name, model, sequences, length, few in CASES:
        if args.only not in name:
            continue
        stops, steps, fed, texts = measure(model, sequences, length, args.growths, few, args.sharded)
        step = statistics.median(steps)
        moved = sum(" 0 bytes moved" not in text for text in texts)
        stop, worst = statistics.median(stops) / step, max(stops) / step
        row(f"growth of a job of 2 workers by a third, {name}{', sharded moments' if args.sharded else ''}: the others stop ({len(stops)} times, {moved} of them moved state meanwhile)",
            f"median {1e3 * step * stop:.0f} ms = {stop:.2f} steps, worst {worst:.2f} steps (a step takes {1e3 * step:.0f} ms, "
            f"{1e3 * statistics.median(fed):.0f} ms while the newcomer is fed)", "at most 1 step", worst <= 1)


if __name__ == "__main__":
    main()
