#!/usr/bin/python3
"""What buddies cost: two replicas with sharded moments (ZeRO-1), `redundancy: buddy` against none, in turns. Real processes.

    MU_BUILD=build/release bench/bench_buddies.py [--layers 8] [--leaves 8] [--micro 2] [--length 256] [--steps 5] [--rounds 3]

30M parameters by default (channels 512, vocabulary 8192), 4 leaves of 2 sequences of 256 tokens for each of two workers of one thread. The
workers claim to be on different hosts, so they talk over TCP, and the loopback's own counter says how many bytes a step moves. A case's
time is the median of its steps of all rounds after one for warming up, from the first worker's ledger. Both cases must end with the
same SHA-256 of the weights."""

import argparse
import os
import statistics
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests/e2e"))
from bench_dp import LINE, peak_mib, row  # noqa: E402
from bench_layouts import cpu_seconds  # noqa: E402
from harness import Cluster, Failure, pb  # noqa: E402

HEADS, CHANNELS, CONTEXT, VOCAB = 8, 512, 256, 8192
WORKERS = 2
COST_MAX = 0.03


class Case:
    def __init__(self, name, redundancy):
        self.name, self.redundancy = name, redundancy
        self.steps_s, self.bytes, self.cpu_s, self.peaks_mib, self.shas = [], [], [], [], set()


def job_spec(cluster, args, case):
    return pb.JobSpec(
        name="bench",
        model=pb.ModelSpec(family=pb.MODEL_FAMILY_GPT2, layers=args.layers, heads=HEADS, channels=CHANNELS, context=CONTEXT, vocab=VOCAB),
        data=pb.DataSpec(path=cluster.data, tokens=pb.TOKEN_FORMAT_BYTES),
        batch=pb.BatchSpec(sequences=args.leaves * args.micro, micro=args.micro, accumulate=1, length=args.length),
        steps=args.steps + 1, optimizer=pb.OptimizerSpec(lr=1e-4),
        parallel=pb.ParallelSpec(tp=1, pp=1, dp=WORKERS, optimizer_sharding=True, redundancy=case.redundancy),
        workers=pb.WorkerPolicy(min=WORKERS, max=WORKERS))


def loopback_bytes():
    with open("/sys/class/net/lo/statistics/rx_bytes") as f:
        return int(f.read())


def train(args, case):
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[])
        cluster.submit(job_spec(cluster, args, case))
        ledger = os.path.join(cluster.dir, "ledger")
        for i in range(WORKERS):
            cluster.start_worker(job="bench", flags=["--host-id", f"h{i}"] + (["--ledger", ledger] if i == 0 else []))
        cluster.wait_step(1, job="bench", limit_s=300)
        bytes_first, cpu_first = loopback_bytes(), cpu_seconds(cluster)
        cluster.wait_step(args.steps, job="bench", limit_s=300)
        case.bytes.append((loopback_bytes() - bytes_first) / (args.steps - 1))
        case.cpu_s.append((cpu_seconds(cluster) - cpu_first) / (args.steps - 1))
        case.peaks_mib.append(max(peak_mib(worker.pid) for worker in cluster.workers))
        case.shas.add(cluster.wait_finished("bench", limit_s=300))
        with open(ledger) as f:
            at = [int(us) * 1e-6 for _, us in LINE.findall(f.read())]
        case.steps_s += [b - a for a, b in zip(at, at[1:])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 8), ("leaves", 8), ("micro", 2), ("length", 256), ("steps", 5), ("rounds", 3)):
        parser.add_argument("--" + name, type=int, default=value)
    args = parser.parse_args()
    none, buddy = cases = [Case("none", pb.REDUNDANCY_NONE), Case("buddy", pb.REDUNDANCY_BUDDY)]
    for _ in range(args.rounds):
        for case in cases:
            train(args, case)
    median = statistics.median
    cost = median(buddy.steps_s) / median(none.steps_s) - 1
    size = f"GPT-2 of {args.layers} layers of {CHANNELS}, {args.leaves} leaves of {args.micro} x {args.length} tokens, dp 2, sharded moments"
    row(f"{size}: buddies against none",
        f"{100 * cost:+.1f} % ({1e3 * median(buddy.steps_s):.0f} against {1e3 * median(none.steps_s):.0f} ms a step; processor time "
        f"{100 * (median(buddy.cpu_s) / median(none.cpu_s) - 1):+.1f} %; {1e-6 * median(buddy.bytes):.0f} against {1e-6 * median(none.bytes):.0f} MB "
        f"moved in a step; largest resident set {median(buddy.peaks_mib):.0f} against {median(none.peaks_mib):.0f} MiB)",
        f"at most {100 * COST_MAX:.0f} %", cost <= COST_MAX)
    same = len(buddy.shas | none.shas) == 1
    row("the same: final weights", "the same SHA-256" if same else "DIFFERENT", "the same", same)
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Failure as failure:
        sys.exit(f"bench_buddies: {failure}")
