#!/usr/bin/python3
"""What a checkpoint costs a running job, and how fast it is committed. Real processes on this machine.

    MU_BUILD=build/release bench/bench_checkpoint.py [--checkpoints 8] [--layers 8] [--channels 384] [--dir DIR]

One job, two workers of one thread each; checkpoints are ordered one after the other. For each of them:
  stall      what the workers report for the copy at the boundary (the slower one counts)
  commit     from the end of the copy to the event that says it is committed, which includes writing, checksums, fsync, manifest,
             and the record in the store
  slowdown   median step between boundary and commit, against the median of the steps around
Beside them, in the same run: the rate of memcpy with one thread for each core (its half is the bound for the copy), and fio's
sequential write of as many bytes in the same directory with 8 MiB blocks and fsync, while nothing else runs.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "tests/e2e"))
from harness import Cluster, Failure, api, pb  # noqa: E402

LINE = re.compile(r"applied generation=(\d+) step=(\d+) mono_us=(\d+)")
ROUNDS, PAUSE_STEPS, DISK_SHARE, WORKERS = 3, 12, 0.8, 2


def memcpy_rate(total_bytes):
    """Bytes copied per second by one thread for each core, best of ROUNDS; the buffers are touched before."""
    cores = len(os.sched_getaffinity(0))
    size = total_bytes // cores
    pairs = [(ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)) for _ in range(cores)]
    best = 0.0
    for _ in range(ROUNDS + 1):  # the first one warms up
        threads = [threading.Thread(target=ctypes.memmove, args=(a, b, size)) for a, b in pairs]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = max(best, size * cores / (time.monotonic() - start))
    return best


def disk_rate(directory, size):
    """Bytes per second of fio's sequential write, fsync included: median of ROUNDS."""
    rates = []
    for _ in range(ROUNDS):
        path = os.path.join(directory, "fio.bin")
        argv = ["fio", "--name=seq", f"--filename={path}", "--rw=write", "--bs=8m", f"--size={size}", "--end_fsync=1",
                "--ioengine=psync", "--fallocate=posix", "--output-format=json"]
        out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        job = json.loads(out)["jobs"][0]
        rates.append(job["write"]["io_bytes"] / (job["write"]["runtime"] * 1e-3))
        os.unlink(path)
    return statistics.median(rates)


def job_spec(cluster, args):
    return pb.JobSpec(
        name="bench",
        model=pb.ModelSpec(family=pb.MODEL_FAMILY_GPT2, layers=args.layers, heads=args.channels // 64, channels=args.channels,
                           context=32, vocab=256),
        data=pb.DataSpec(path=cluster.data, tokens=pb.TOKEN_FORMAT_BYTES),
        batch=pb.BatchSpec(sequences=4, micro=1, accumulate=1, length=32),
        steps=1000000, optimizer=pb.OptimizerSpec(lr=1e-3), workers=pb.WorkerPolicy(min=WORKERS, max=WORKERS),
        checkpoint=pb.CheckpointPolicy(path=os.path.join(cluster.dir, "ckpt"), keep=2))


def applied(path):
    """{step: seconds} of a worker: when the update step -> step + 1 was in."""
    with open(path) as f:
        return {int(step): int(us) * 1e-6 for _, step, us in LINE.findall(f.read())}


def stall_us(cluster, step):
    """The copy at the boundary `step`, of the worker that took longest; None while not reported."""
    reply = cluster.call("GetTimings", api.GetTimingsRequest(job="bench", per_worker=64, page_size=1000), api.GetTimingsResponse)
    copies = [t.snapshot_us for t in reply.timings if t.snapshot_us and t.steps_done - t.step_count <= step <= t.steps_done + 1]
    return max(copies) if len(copies) >= WORKERS else None


class Measured:
    def __init__(self):
        self.size, self.stalls, self.commits, self.slow, self.normal = 0, [], [], [], []


def one_checkpoint(cluster, ledgers, result):
    number = cluster.call("TriggerCheckpoint", api.TriggerCheckpointRequest(job="bench"), api.TriggerCheckpointResponse).number

    def committed():
        page = cluster.call("ListCheckpoints", api.ListCheckpointsRequest(job="bench", page_size=1000), api.ListCheckpointsResponse)
        return next((c for c in page.checkpoints if c.number == number and c.committed_wall_us), None)
    checkpoint = cluster.wait_until(committed, 120, f"checkpoint {number} was not committed")
    event = cluster.wait_event(lambda e: e.kind == "checkpoint_committed" and e.text.startswith(f"checkpoint {number} "))
    stall = cluster.wait_until(lambda: stall_us(cluster, checkpoint.step), 30, "no report of the copy")
    cluster.wait_step(checkpoint.step + PAUSE_STEPS, job="bench", limit_s=120)
    wall_of_mono = time.time() - time.monotonic()
    rows = [applied(path) for path in ledgers]
    boundary = max(r[checkpoint.step - 1] for r in rows)
    end = event.wall_us * 1e-6 - wall_of_mono
    result.size = checkpoint.size_bytes
    result.stalls.append(stall)
    result.commits.append(end - boundary - stall * 1e-6)
    for step in rows[0]:
        if step - 1 not in rows[0] or not checkpoint.step - PAUSE_STEPS <= step < checkpoint.step + PAUSE_STEPS:
            continue
        begin, took = rows[0][step - 1], rows[0][step] - rows[0][step - 1]
        if step == checkpoint.step:
            continue  # its time contains the copy, which is measured by itself
        writing = boundary < begin + took / 2 < end
        (result.slow if writing else result.normal).append(took)


def run(args, cluster):
    result = Measured()
    cluster.start_coordinator(flags=[])
    cluster.submit(job_spec(cluster, args))
    ledgers = [os.path.join(cluster.dir, f"ledger{i}") for i in range(WORKERS)]
    for ledger in ledgers:
        cluster.start_worker(job="bench", flags=["--ledger", ledger, "--report-every", "1"])
    cluster.wait_step(PAUSE_STEPS + 2, job="bench", limit_s=180)
    for _ in range(args.checkpoints):
        one_checkpoint(cluster, ledgers, result)
    return result


def row(what, measured, target, reached):
    print(f"| {what} | {measured} | {target} | {'' if reached is None else 'yes' if reached else '**no**'} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--channels", type=int, default=384)
    parser.add_argument("--dir", help="where checkpoints go (default: a temporary directory)")
    args = parser.parse_args()
    if args.dir:
        os.environ["TMPDIR"] = args.dir
    if not shutil.which("fio"):
        sys.exit("bench_checkpoint: fio is not installed (apt-get install fio): nothing to compare the disk with")
    with Cluster() as cluster:
        result = run(args, cluster)
        for process in [*cluster.workers, cluster.coordinator]:
            process.kill()
            process.wait()
        copy = memcpy_rate(result.size)
        disk = disk_rate(cluster.dir, result.size)
    mb = result.size * 1e-6
    allowed_ms = 1e3 * result.size / (copy / 2)
    stall_ms = statistics.median(result.stalls) * 1e-3
    row(f"checkpoint of {mb:.0f} MB: stall at the boundary ({len(result.stalls)} times, 2 workers)",
        f"median {stall_ms:.1f} ms, worst {max(result.stalls) * 1e-3:.1f} ms (memcpy {copy * 1e-9:.1f} GB/s)",
        f"<= {allowed_ms:.1f} ms", stall_ms <= allowed_ms)
    rate = result.size / statistics.median(result.commits)
    row("the same: copy to commit, while training goes on",
        f"{rate * 1e-6:.0f} MB/s = {100 * rate / disk:.0f} % of fio's {disk * 1e-6:.0f} MB/s", ">= 80 %", rate >= DISK_SHARE * disk)
    if result.slow and result.normal:
        slow, normal = 1e3 * statistics.median(result.slow), 1e3 * statistics.median(result.normal)
        row("the same: steps while it is written", f"{slow:.1f} ms against {normal:.1f} ms: {100 * (slow / normal - 1):+.0f} %", "", None)


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"bench_checkpoint: {failure}")
