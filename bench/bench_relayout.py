#!/usr/bin/python3
"""How long training stands still when a loss changes the layout. Real processes on this machine.

    MU_BUILD=build/release bench/bench_relayout.py [--losses 10] [--layers 8] [--channels 320] [--only NAME]

Four workers of one thread train 10 M parameters; one is killed (SIGKILL), the other three go on in another layout, then a new one joins
and the first layout returns. The victim changes each time. Recovery: from the kill to the end of the survivors' first step in the new
layout, minus a normal step *of the new layout* (median of the steps that follow: fewer workers need longer for each). Its parts, medians:
  noticed    from the kill to the event that says the worker is lost
  prepared   from there to Go: plan, connections, memory, state that moves
  first step from Go to the end of the first step
"""

import argparse
import os
import signal
import statistics
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from bench_recovery import Bench, applied, normal_step, pb  # noqa: E402
from harness import Cluster, Failure  # noqa: E402

WORKERS, NORMAL_STEPS, TARGET_MS = 4, 4, 400
# name, leaves, the job's own layout
CASES = (("tp 2, replicas as many as there are", 4, {"tp": 2, "pp": 1}),
         ("pp 2, replicas as many as there are", 4, {"tp": 1, "pp": 2}),
         ("sharded moments, replicas as many as there are", 4, {"tp": 1, "pp": 1, "optimizer_sharding": True}),
         ("all automatic, two leaves", 2, {}))


class Measured:
    def __init__(self):
        self.recovery_s, self.noticed_s, self.prepared_s, self.first_s, self.steps_s = [], [], [], [], []
        self.replayed, self.texts = 0, set()


def job_spec(cluster, args, leaves, parallel):
    return pb.JobSpec(
        name="bench",
        model=pb.ModelSpec(family=pb.MODEL_FAMILY_GPT2, layers=args.layers, heads=8, channels=args.channels, context=64, vocab=256, slices=4),
        data=pb.DataSpec(path=cluster.data, tokens=pb.TOKEN_FORMAT_BYTES),
        batch=pb.BatchSpec(sequences=leaves, micro=1, accumulate=1, length=64),
        steps=1000000, optimizer=pb.OptimizerSpec(lr=1e-4), parallel=pb.ParallelSpec(**parallel),
        workers=pb.WorkerPolicy(min=1, max=WORKERS),
        checkpoint=pb.CheckpointPolicy(path=os.path.join(cluster.dir, "ckpt"), every=20, keep=2))


def layout_in(event):
    return event.text.split(" as ", 1)[1].split(" at step", 1)[0]


def all_working(event):
    return event.kind == "generation_go" and f"{WORKERS} workers" in event.text


def lose_one(cluster, bench, measured, turn):
    """Kills a worker that is not the first one, waits for the others, brings a new one in."""
    last = cluster.events[-1].number
    keeper = bench.members[0][1]
    before = applied(keeper)[-1][0]
    victim, _ = bench.members.pop(1 + turn % (WORKERS - 1))
    wall_s, killed = time.time(), time.monotonic()
    victim.kill()
    lost = cluster.wait_event("worker_lost", after=last)
    go = cluster.wait_event("generation_go", after=lost.number)

    def stepped():
        """Of all survivors: the first update in the new generation, and a few more (one that became idle steps along with the others)."""
        rows = [[r for r in applied(ledger) if r[0] > before] for _, ledger in bench.members]
        return max(rows, key=len) if max(map(len, rows)) > NORMAL_STEPS else None

    rows = cluster.wait_until(stepped, 60, "steps did not come")
    normal = normal_step(rows)
    measured.steps_s.append(normal)
    measured.recovery_s.append(rows[0][2] - killed - normal)
    measured.noticed_s.append(lost.wall_us * 1e-6 - wall_s)
    measured.prepared_s.append((go.wall_us - lost.wall_us) * 1e-6)
    measured.first_s.append(rows[0][2] - killed - (go.wall_us * 1e-6 - wall_s))
    changed = layout_in(go)
    bench.add()
    back = cluster.wait_event(lambda e: all_working(e), limit_s=60, after=go.number)
    measured.texts.add(f"{changed}, and back as {layout_in(back)}")
    cluster.wait_until(lambda: applied(keeper)[-1][0] == back.generation, 30, "no step of four workers")


def measure(args, leaves, parallel):
    measured = Measured()
    with Cluster() as cluster:
        cluster.start_coordinator(flags=["--crash-limit", "1000"])
        cluster.submit(job_spec(cluster, args, leaves, parallel))
        bench = Bench(cluster)
        for _ in range(WORKERS):
            bench.add()
        go = cluster.wait_event(all_working, limit_s=60)
        cluster.wait_until(lambda: applied(bench.members[0][1])[-1:] and applied(bench.members[0][1])[-1][0] == go.generation, 60,
                           "four workers made no step")
        for turn in range(args.losses):
            lose_one(cluster, bench, measured, turn)
        measured.replayed = cluster.job("bench").replayed_steps
    return measured


def ms(values):
    return f"{1e3 * statistics.median(values):.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("losses", 10), ("layers", 8), ("channels", 320)):
        parser.add_argument("--" + name, type=int, default=value)
    parser.add_argument("--only", default="", help="the cases whose name contains it")
    args = parser.parse_args()
    for name, leaves, parallel in CASES:
        if args.only not in name:
            continue
        got = measure(args, leaves, parallel)
        print(f"{name}: went on as {'; '.join(sorted(got.texts))}", file=sys.stderr, flush=True)
        median = 1e3 * statistics.median(got.recovery_s)
        print(f"| SIGKILL of one of {WORKERS} workers, {name}: to the first step in the new layout, less a normal step of it ({ms(got.steps_s)} ms) | "
              f"median {median:.0f} ms, worst {1e3 * max(got.recovery_s):.0f} ms ({len(got.recovery_s)} times: noticed {ms(got.noticed_s)}, prepared "
              f"{ms(got.prepared_s)}, Go to the end of the first step {ms(got.first_s)} ms; {got.replayed} steps replayed) | median < {TARGET_MS} ms | "
              f"{'yes' if median < TARGET_MS else '**no**'} |", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # its processes with it
    try:
        main()
    except Failure as failure:
        sys.exit(f"bench_relayout: {failure}")
