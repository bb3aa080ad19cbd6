#!/usr/bin/python3
"""Data parallelism on one machine: two workers of one thread each against one worker of two threads, the same job. Real processes.

    MU_BUILD=build/release bench/bench_dp.py [--layers 12] [--leaves 8] [--micro 4] [--length 256] [--steps 3]

GPT-2 124M by default (channels 768, vocabulary 50257), 8 leaves of 4 sequences of 256 tokens. Step times are read from the first
worker's ledger, after one step for warming up. Also the largest resident memory of a worker against the memory model
(plan/memory.h). The same bits come out of both: the losses are compared."""

import argparse
import os
import re
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests/e2e"))
from harness import BUILD, Cluster, Failure, pb  # noqa: E402

LINE = re.compile(r"applied generation=\d+ step=(\d+) mono_us=(\d+)")
HEADS, CHANNELS, CONTEXT, VOCAB = 12, 768, 1024, 50257
TARGET = 0.93


def job_spec(cluster, args):
    return pb.JobSpec(
        name="bench",
        model=pb.ModelSpec(family=pb.MODEL_FAMILY_GPT2, layers=args.layers, heads=HEADS, channels=CHANNELS, context=CONTEXT, vocab=VOCAB),
        data=pb.DataSpec(path=cluster.data, tokens=pb.TOKEN_FORMAT_BYTES),
        batch=pb.BatchSpec(sequences=args.leaves * args.micro, micro=args.micro, accumulate=1, length=args.length),
        steps=args.steps + 1, optimizer=pb.OptimizerSpec(lr=1e-4), workers=pb.WorkerPolicy(min=1, max=2))


def peak_mib(pid):
    with open(f"/proc/{pid}/status") as f:
        return int(re.search(r"VmHWM:\s+(\d+) kB", f.read()).group(1)) / 1024


def train(args, workers, threads):
    """(median step in seconds, largest resident MiB of a worker, SHA-256 of the final weights)"""
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[])
        spec = job_spec(cluster, args)
        spec.workers.min = workers
        cluster.submit(spec)
        ledger = os.path.join(cluster.dir, "ledger")
        limit_s = 120 + 120 * (args.steps + 1)
        for i in range(workers):
            cluster.start_worker(job="bench", threads=threads, flags=["--ledger", ledger] if i == 0 else [])
        cluster.wait_step(args.steps, job="bench", limit_s=limit_s)
        peaks = [peak_mib(worker.pid) for worker in cluster.workers if worker.alive()]
        sha = cluster.wait_finished("bench", limit_s=limit_s)
        with open(ledger) as f:
            at = [int(us) * 1e-6 for _, us in LINE.findall(f.read())]
        return statistics.median(b - a for a, b in zip(at, at[1:])), max(peaks, default=0.0), sha


def model_mib(args, workers, threads):
    numbers = [args.layers, HEADS, CHANNELS, CONTEXT, VOCAB, args.leaves * args.micro, args.micro, args.length, workers, threads]
    out = subprocess.run([os.path.join(BUILD, "bench/memory_model"), *map(str, numbers)], capture_output=True, text=True, check=True)
    return float(out.stdout.split()[0])


def row(what, measured, target, reached):
    print(f"| {what} | {measured} | {target} | {'' if reached is None else 'yes' if reached else '**no**'} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("leaves", 8), ("micro", 4), ("length", 256), ("steps", 3)):
        parser.add_argument("--" + name, type=int, default=value)
    args = parser.parse_args()
    tokens = args.leaves * args.micro * args.length
    one_s, one_mib, one_sha = train(args, 1, 2)
    two_s, two_mib, two_sha = train(args, 2, 1)
    size = f"GPT-2 of {args.layers} layers, {args.leaves} leaves of {args.micro} x {args.length} tokens"
    row(f"{size}: two workers of one thread against one of two", f"{tokens / two_s:.0f} against {tokens / one_s:.0f} tokens/s = "
        f"{100 * one_s / two_s:.1f} %", ">= 93 %", one_s / two_s >= TARGET)
    row("the same: final weights", "the same SHA-256" if one_sha == two_sha else "DIFFERENT", "the same", one_sha == two_sha)
    for workers, threads, mib in ((1, 2, one_mib), (2, 1, two_mib)):
        model = model_mib(args, workers, threads)
        row(f"the same: largest resident memory of a worker of {workers}", f"{mib:.0f} MiB; memory model {model:.0f} ({100 * mib / model:.0f} %)",
            "", None)
    return 0 if one_sha == two_sha else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"bench_dp: {failure}")
