#!/usr/bin/python3
"""What exactness costs: one worker, the same job with `numerics: exact` and `fast`, and exact with 1, 2 and 4 slices, which one worker
holds. Real processes.

    MU_BUILD=build/release bench/bench_fast.py [--layers 6] [--leaves 8] [--micro 2] [--length 256] [--steps 4] [--rounds 3]

GPT-2's width by default (channels 768, vocabulary 50257), 8 leaves of 2 sequences of 256 tokens: fast adds all 8 in one gradient
buffer, exact adds them by the tree. The variants take turns, several rounds; the median of all their steps counts."""

import argparse
import os
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests/e2e"))
from bench_dp import LINE, job_spec, row  # noqa: E402
from harness import Cluster, Failure, pb  # noqa: E402

VARIANTS = {"exact": (pb.NUMERICS_EXACT, 1), "fast": (pb.NUMERICS_FAST, 1), "2 slices": (pb.NUMERICS_EXACT, 2), "4 slices": (pb.NUMERICS_EXACT, 4),
            "fast, 4 slices": (pb.NUMERICS_FAST, 4)}
LOSS_MAX = 0.03


def steps_of(args, numerics, slices):
    """Seconds of each step but the first."""
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[])
        spec = job_spec(cluster, args)
        spec.numerics, spec.model.slices = numerics, slices
        cluster.submit(spec)
        ledger = os.path.join(cluster.dir, "ledger")
        cluster.start_worker(job="bench", threads=os.cpu_count(), flags=["--ledger", ledger])
        cluster.wait_finished("bench", limit_s=120 + 120 * (args.steps + 1))
        with open(ledger) as file:
            at = [int(us) * 1e-6 for _, us in LINE.findall(file.read())]
        return [b - a for a, b in zip(at, at[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 6), ("leaves", 8), ("micro", 2), ("length", 256), ("steps", 4), ("rounds", 3)):
        parser.add_argument("--" + name, type=int, default=value)
    args = parser.parse_args()
    steps = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name, (numerics, slices) in VARIANTS.items():
            steps[name] += steps_of(args, numerics, slices)
    median = {name: statistics.median(values) for name, values in steps.items()}
    size = f"GPT-2 of {args.layers} layers, {args.leaves} leaves of {args.micro} x {args.length} tokens, one worker"
    cost = median["exact"] / median["fast"] - 1
    row(f"{size}: exact against fast", f"{1e3 * median['exact']:.0f} against {1e3 * median['fast']:.0f} ms a step: {100 * cost:+.1f} %", "<= +3 %",
        cost <= LOSS_MAX)
    for name in ("2 slices", "4 slices"):
        row(f"the same: exact with {name}, all here, against one", f"{1e3 * median[name]:.0f} ms a step: {100 * (median[name] / median['exact'] - 1):+.1f} %",
            "", None)
    row("the same: exact against fast with 4 slices", f"{100 * (median['4 slices'] / median['fast, 4 slices'] - 1):+.1f} %", "<= +3 %",
        median["4 slices"] / median["fast, 4 slices"] - 1 <= LOSS_MAX)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"bench_fast: {failure}")
