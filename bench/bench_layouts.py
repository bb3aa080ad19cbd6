#!/usr/bin/python3
"""What a layout costs: two workers of one thread each against one worker of two threads, the same job. Real processes.

    MU_BUILD=build/release bench/bench_layouts.py [--layers 12] [--leaves 8] [--micro 4] [--length 256] [--steps 2] [--rounds 2]
                                                 [--vocab 50257] [--only NAME]

GPT-2 124M by default (channels 768, vocabulary 50257, 2 slices), 8 leaves of 4 sequences of 256 tokens. In each round every case runs
once, one after the other, so that what else the machine does meets all of them; a case's time is the median of the steps of all rounds
after one for warming up, read from the first worker's ledger. All cases must end with the same SHA-256 of the weights. Beside each
case: what the workers say of where the time of their steps went (the largest share of any worker)."""

import argparse
import os
import re
import signal
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests/e2e"))
from harness import Cluster, Failure, api, pb  # noqa: E402

LINE = re.compile(r"applied generation=\d+ step=(\d+) mono_us=(\d+)")
HEADS, CHANNELS, CONTEXT, SLICES = 12, 768, 1024, 2
PIPELINE_ROOM = 0.05  # beyond the bubble


class Case:
    def __init__(self, name, workers, threads, target, **parallel):
        self.name, self.workers, self.threads, self.target, self.parallel = name, workers, threads, target, parallel
        self.steps_s, self.cpu_s, self.shas, self.shares, self.layout, self.stages = [], [], set(), {}, "", ""

    def step_s(self):
        return statistics.median(self.steps_s)


def cases(leaves):
    """The first one is what the others are compared with."""
    return [Case("one worker", 1, 2, None, tp=1, pp=1, dp=1),
            Case("tp 2", 2, 1, 0.12, tp=2, pp=1, dp=1),
            Case("pp 2", 2, 1, 1 / leaves + PIPELINE_ROOM, tp=1, pp=2, dp=1),
            Case("dp 2", 2, 1, None, tp=1, pp=1, dp=2),
            Case("dp 2, sharded moments (ZeRO-1)", 2, 1, 0.03, tp=1, pp=1, dp=2, optimizer_sharding=True)]


def job_spec(cluster, args, case):
    return pb.JobSpec(
        name="bench",
        model=pb.ModelSpec(family=pb.MODEL_FAMILY_GPT2, layers=args.layers, heads=HEADS, channels=CHANNELS, context=CONTEXT, vocab=args.vocab,
                           slices=SLICES),
        data=pb.DataSpec(path=cluster.data, tokens=pb.TOKEN_FORMAT_BYTES),
        batch=pb.BatchSpec(sequences=args.leaves * args.micro, micro=args.micro, accumulate=1, length=args.length),
        steps=args.steps + 1, optimizer=pb.OptimizerSpec(lr=1e-4), parallel=pb.ParallelSpec(**case.parallel),
        workers=pb.WorkerPolicy(min=case.workers, max=case.workers))


def note_shares(cluster, case):
    """Largest share of a worker's steps for each part."""
    reply = cluster.call("GetTimings", api.GetTimingsRequest(job="bench", per_worker=64), api.GetTimingsResponse)
    totals = {}
    for timing in reply.timings:
        mine = totals.setdefault(timing.worker, dict.fromkeys(("total", "communicate", "wait", "optimizer"), 0))
        for part in mine:
            mine[part] += getattr(timing, part + "_us")
    for mine in totals.values():
        for part in ("communicate", "wait", "optimizer"):
            share = mine[part] / mine["total"] if mine["total"] else 0.0
            case.shares[part] = max(case.shares.get(part, 0.0), share)


def cpu_seconds(cluster):
    """Of all workers, all threads, so far."""
    ticks = 0
    for worker in cluster.workers:
        with open(f"/proc/{worker.pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def train(args, case):
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[])
        cluster.submit(job_spec(cluster, args, case))
        ledger = os.path.join(cluster.dir, "ledger")
        limit_s = 120 + 120 * (args.steps + 1)
        for i in range(case.workers):
            cluster.start_worker(job="bench", threads=case.threads, flags=["--ledger", ledger] if i == 0 else [])
        cluster.wait_step(1, job="bench", limit_s=limit_s)
        first_s = cpu_seconds(cluster)
        cluster.wait_step(args.steps, job="bench", limit_s=limit_s)
        if args.steps > 1:
            case.cpu_s.append((cpu_seconds(cluster) - first_s) / (args.steps - 1))
        note_shares(cluster, case)
        first = list(cluster.job("bench").layout.stage_first)
        case.stages = "stages of " + " and ".join(str(b - a) for a, b in zip(first, first[1:])) + " layers, " if len(first) > 2 else ""
        case.shas.add(cluster.wait_finished("bench", limit_s=limit_s))
        case.layout = next(e.text for e in cluster.events if e.kind == "generation_go")
        with open(ledger) as f:
            at = [int(us) * 1e-6 for _, us in LINE.findall(f.read())]
        case.steps_s += [b - a for a, b in zip(at, at[1:])]


def row(what, measured, target, reached):
    print(f"| {what} | {measured} | {target} | {'' if reached is None else 'yes' if reached else '**no**'} |", flush=True)


def say(case, one, size, leaves):
    cost = case.step_s() / one.step_s() - 1
    parts = ", ".join(f"{part} {100 * share:.1f} %" for part, share in case.shares.items())
    if case.cpu_s:
        parts += f"; processor time {100 * (statistics.median(case.cpu_s) / statistics.median(one.cpu_s) - 1):+.1f} %"
    bubble = f", {case.stages}bubble (p - 1) / m = {100 / leaves:.1f} %" if case.parallel["pp"] == 2 else ""
    room = f"bubble + {100 * PIPELINE_ROOM:.0f} %" if bubble else f"{100 * case.target:.0f} %" if case.target is not None else ""
    row(f"{size}: {case.name} against one worker of two threads",
        f"{100 * cost:+.1f} % ({1e3 * case.step_s():.0f} against {1e3 * one.step_s():.0f} ms a step{bubble}; most of a worker's step: {parts})",
        f"at most {room}" if room else "", None if case.target is None else cost <= case.target)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("leaves", 8), ("micro", 4), ("length", 256), ("steps", 2), ("rounds", 2), ("vocab", 50257)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--only", default="", help="the cases whose name contains it, beside the first one")
    args = parser.parse_args()
    one, *others = [case for i, case in enumerate(cases(args.leaves)) if i == 0 or args.only in case.name]
    for _ in range(args.rounds):
        for case in (one, *others):
            train(args, case)
    size = f"GPT-2 of {args.layers} layers, {args.leaves} leaves of {args.micro} x {args.length} tokens, {SLICES} slices"
    for case in others:
        say(case, one, size, args.leaves)
        print(f"{case.name}: {case.layout}", file=sys.stderr)
    shas = set().union(*(case.shas for case in (one, *others)))
    row("the same: final weights of all of them", "the same SHA-256" if len(shas) == 1 else "DIFFERENT", "the same", len(shas) == 1)
    return 0 if len(shas) == 1 else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # its processes with it
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"bench_layouts: {failure}")
