#!/usr/bin/python3
"""What slices, recomputation and the other family cost a step on one worker: bench_step in turns.

    MU_BUILD=build/release bench/bench_slices.py [--layers 12] [--micro 4] [--length 256] [--steps 3] [--rounds 2]

GPT-2 124M by default. In each round every case runs once, so that what else the machine does meets all of them; the step time of a case
is the median over the rounds (of medians). Slices decide bits, so each number of them is another job; recomputation is the same."""

import argparse
import os
import re
import statistics
import subprocess
import sys

BUILD = os.path.abspath(os.environ.get("MU_BUILD", os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "build")))
SLICED_ROOM = 1.12
# name, options, compared with, most times as long
CASES = (("GPT-2, 1 slice", {}, None, None),
         ("GPT-2, 2 slices", {"slices": 2}, "GPT-2, 1 slice", SLICED_ROOM),
         ("GPT-2, 4 slices", {"slices": 4}, "GPT-2, 1 slice", SLICED_ROOM),
         ("GPT-2, selective recomputation", {"recompute": "selective"}, "GPT-2, 1 slice", None),
         ("GPT-2, full recomputation", {"recompute": "full"}, "GPT-2, 1 slice", None),
         ("Llama, 1 slice", {"family": "llama"}, "GPT-2, 1 slice", None),
         ("Llama, 4 slices", {"family": "llama", "slices": 4}, "Llama, 1 slice", SLICED_ROOM))


def number(what, text):
    return float(re.search(rf"^ *{what} +([0-9.]+)", text, re.M).group(1))


def measure(args, options):
    """(step in ms, speed in tokens/s, peak MiB, processor time of a step in ms, first line)"""
    argv = [os.path.join(BUILD, "bench/bench_step"), "--floor", "no"]
    for name in ("layers", "micro", "length", "steps"):
        argv += ["--" + name, str(getattr(args, name))]
    for name, value in options.items():
        argv += ["--" + name, str(value)]
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return number("step", out), number("speed", out), number("peak memory", out), number("processor", out), out.split("\n", 1)[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("micro", 4), ("length", 256), ("steps", 3), ("rounds", 2)):
        parser.add_argument("--" + name, type=int, default=value)
    args = parser.parse_args()
    got = {name: [] for name, *_ in CASES}
    for _ in range(args.rounds):
        for name, options, *_ in CASES:
            got[name].append(measure(args, options))
    for name, _, other, most in CASES:
        step, speed, peak, processor = (statistics.median(row[i] for row in got[name]) for i in range(4))
        first, ratio, against = got[name][0][4], "", None
        if other:
            against = step / statistics.median(row[0] for row in got[other])
            ratio = f" = {against:.3f} times as long as {other} (processor time {processor / statistics.median(row[3] for row in got[other]):.3f} times)"
        size = first.split(" parameters")[0].split(" ")[-1]
        print(f"| step of one worker, {args.layers} layers, B{args.micro} x T{args.length}: {name} ({size} parameters) | "
              f"{step:.1f} ms{ratio}; {speed:.1f} tokens/s; {peak:.0f} MiB | {f'at most {most:.2f} times' if most else ''} | "
              f"{'' if not most else 'yes' if against <= most else '**no**'} |", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:
        sys.exit(f"bench_slices: {' '.join(error.cmd)}: {error.stderr.strip()}")
