#!/usr/bin/python3
"""Bad input and full disks: each gives one line that names what is wrong, where, and what is allowed; it changes nothing, hangs nobody, and
the jobs that have nothing to do with it end with the weights they would have had anyway.

What needs file systems of its own mounts them in a namespace of this process; without the right to do so those tests are skipped."""

import contextlib
import os
import random
import signal
import struct
import subprocess

import grpc
from harness import BUILD, FAST, SLOW, STRICT, Cluster, api, check, main, needs_mounts, pb, reference, refused_worker, rpc_error, run, tiny_job

MUSTER = os.path.join(BUILD, "cli/muster")
STEPS = 150
STORE_STEPS = 600  # slowed, enough for two restarts of the coordinator
MIB = 1 << 20


# ---- file systems of our own ----

class Disk:
    """A small file system that can be filled and made read-only."""

    def __init__(self, path, size_mib):
        self.path = path
        os.makedirs(path, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "muster-test", path], check=True)

    def free(self):
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize

    def fill(self, leave):
        with open(os.path.join(self.path, "filler"), "ab") as file:
            while self.free() > leave:
                with contextlib.suppress(OSError):
                    file.write(b"\xff" * min(MIB, self.free() - leave))
                    file.flush()

    def empty(self):
        os.unlink(os.path.join(self.path, "filler"))

    def remount(self, how):
        subprocess.run(["mount", "-o", f"remount,{how}", self.path], check=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        subprocess.run(["umount", "-l", self.path], check=True)


# ---- job files ----

GOOD = """\
job: tiny
model: {family: gpt2, layers: 2, heads: 2, channels: 32, context: 32, vocab: 256}
data: {path: data.txt, tokens: bytes, holdout: 0.1}
batch: {sequences: 16, micro: 1, accumulate: 2, length: 32}
steps: 30
optimizer: {kind: adamw, lr: 1.0e-3, min_lr: 1.0e-4, warmup: 5, betas: [0.9, 0.95], weight_decay: 0.1, clip: 1.0}
parallel: {tp: auto, pp: auto, slices: 1}
workers: {min: 1, max: 64, spares: 0}
checkpoint: {path: ckpt, kind: shared, every: 10, keep: 3}
eval: {every: 10, sequences: 4}
numerics: exact
seed: 1337
"""

# What is replaced, by what, and what the line must say.
BAD_JOBS = (
    ("job: tiny", "job: Tiny", [":1:", "job:", "Tiny", "a-z"]),
    ("job: tiny\n", "", ["job:", "missing"]),
    ("job: tiny", "job: " + "x" * 64, [":1:", "63"]),
    ("layers: 2", "layers: 0", [":2:", "model.layers", "0"]),
    ("layers: 2", "layers: -1", [":2:", "model.layers", "-1"]),
    ("layers: 2", "layers: two", [":2:", "model.layers", "two"]),
    ("layers: 2", "layers: 99999999999999999999", [":2:", "model.layers", "99999999999999999999"]),
    ("layers: 2", "layrs: 2", [":2:", "layrs", "layers"]),
    ("layers: 2, ", "", [":2:", "model.layers", "missing"]),
    ("heads: 2", "heads: 3", [":2:", "model.heads", "3"]),
    ("vocab: 256", "vocab: 255", [":2:", "model.vocab", "255", "256"]),
    ("vocab: 256}", "vocab: 256, dropout: 1.0}", [":2:", "model.dropout", "1"]),
    ("family: gpt2", "family: bert", [":2:", "model.family", "bert", "gpt2 or llama"]),
    ("family: gpt2", "family: llama", [":2:", "model.hidden", "missing"]),
    ("family: gpt2", "family: llama, hidden: 88, kv_heads: 3", [":2:", "model.kv_heads", "3", "1 to 2"]),
    ("vocab: 256", "vocab: 256, kv_heads: 1", [":2:", "model.kv_heads", "1", "model.heads (2)"]),
    ("path: data.txt", "path: ''", [":3:", "data.path"]),
    ("path: data.txt", "path: ~/data.txt", [":3:", "data.path", "~"]),
    ("tokens: bytes", "tokens: words", [":3:", "data.tokens", "words", "bytes"]),
    ("holdout: 0.1", "holdout: 0.6", [":3:", "data.holdout", "0.6", "0.5"]),
    ("holdout: 0.1", "holdout: nan", [":3:", "data.holdout", "nan"]),
    ("holdout: 0.1", "holdout: 0.0", ["eval", "holdout"]),
    ("sequences: 16", "sequences: 15", [":4:", "batch.sequences", "15", "2"]),
    ("sequences: 16", "sequences: 0", [":4:", "batch.sequences", "0"]),
    ("micro: 1", "micro: 0", [":4:", "batch.micro", "0"]),
    ("length: 32", "length: 33", [":4:", "batch.length", "33", "32"]),
    ("steps: 30", "steps: 0", [":5:", "steps", "0"]),
    ("steps: 30", "steps: 1e3", [":5:", "steps", "1e3"]),
    ("steps: 30\n", "steps: 30\nsteps: 40\n", [":6:", "steps", "twice"]),
    ("lr: 1.0e-3", "lr: -1", [":6:", "optimizer.lr", "-1"]),
    ("min_lr: 1.0e-4", "min_lr: 1.0e-2", [":6:", "optimizer.min_lr", "0.01"]),
    ("warmup: 5", "warmup: 31", [":6:", "optimizer.warmup", "31", "30"]),
    ("betas: [0.9, 0.95]", "betas: [0.9]", [":6:", "optimizer.betas"]),
    ("betas: [0.9, 0.95]", "betas: [0.9, 1.0]", [":6:", "beta", "1"]),
    ("kind: adamw", "kind: sgd", [":6:", "optimizer.kind", "sgd", "adamw"]),
    ("clip: 1.0", "clip: inf", [":6:", "optimizer.clip", "inf"]),
    ("tp: auto", "tp: 2", [":7:", "parallel.tp", "2", "parallel.slices (1)", "use 1"]),
    ("tp: auto", "tp: 0", [":7:", "parallel.tp", "0", "auto"]),
    ("pp: auto", "pp: 3", [":7:", "parallel.pp", "3", "auto, or 1 to 2"]),
    ("pp: auto", "pp: auto, dp: 9", [":7:", "parallel.dp", "9", "auto, or 1 to 8"]),
    ("slices: 1", "slices: 3", [":7:", "parallel.slices", "3", "use 2"]),
    ("slices: 1", "slices: 4", [":7:", "parallel.slices", "4", "model.heads (2)", "use 2"]),
    ("slices: 1", "slices: 1, redundancy: raid", [":7:", "parallel.redundancy", "raid", "none or buddy"]),
    ("slices: 1", "slices: 1, recompute: some", [":7:", "parallel.recompute", "some", "none, selective or full"]),
    ("min: 1,", "min: 65,", [":8:", "workers.min", "65", "64"]),
    ("max: 64", "max: 0", [":8:", "workers.max", "0"]),
    ("path: ckpt, ", "", [":9:", "checkpoint.path", "missing"]),
    ("kind: shared", "kind: remote", [":9:", "checkpoint.kind"]),
    ("keep: 3", "keep: 0", [":9:", "checkpoint.keep", "0"]),
    ("every: 10, keep", "every: often, keep", [":9:", "checkpoint.every", "often"]),
    ("eval: {every: 10, ", "eval: {", [":10:", "eval.every", "missing"]),
    ("sequences: 4", "sequences: 0", [":10:", "eval.sequences", "0"]),
    ("numerics: exact", "numerics: fuzzy", [":11:", "numerics", "fuzzy", "exact"]),
    ("seed: 1337", "seed: 18446744073709551616", [":12:", "seed", "18446744073709551616"]),
    ("steps: 30", "steps: [30]", [":5:", "steps", "list"]),
    ("model: {", "model: 7\nother: {", [":2:", "model", "group"]),
    ("seed: 1337", "seed: &s 1337\nsteps2: *s", [":12:", "anchors"]),
    ("seed: 1337", "\tseed: 1337", [":12:"]),
    ("steps: 30", "steps: {30", [":"]),
)


def test_a_bad_job_file_is_refused_with_its_line():
    with Cluster() as cluster:
        cluster.start_coordinator()
        path = os.path.join(cluster.dir, "job.yaml")

        def submit(content, code=1, fragments=(), where="job.yaml"):
            with open(path, "wb") as file:
                file.write(content if isinstance(content, bytes) else content.encode())
            run(cluster, "submit", path, code=code, fragments=[where, *fragments])

        for old, new, fragments in BAD_JOBS:
            check(GOOD.count(old) == 1, f"'{old}' is not there once")
            submit(GOOD.replace(old, new), fragments=fragments)
        submit("", fragments=["empty"])
        submit("# nothing\n", fragments=["job"])
        submit(b"\x7fELF\0\0\0\0" + random.Random(1).randbytes(500), fragments=["zero bytes"])
        submit(random.Random(2).randbytes(3000).replace(b"\0", b"x"))
        submit(b"job: \xff\xfe\n" + GOOD[10:].encode())
        submit("job: a\n" + "# padding\n" * 200000, fragments=["larger"])
        submit("- a\n- b\n")
        submit("job: " + "[" * 5000, fragments=[":1:"])
        run(cluster, "submit", cluster.dir, code=1, fragments=[cluster.dir, "directory"])
        run(cluster, "submit", os.path.join(cluster.dir, "absent.yaml"), code=4, fragments=["absent.yaml"])
        check(not cluster.call("ListJobs", api.ListJobsRequest(), api.ListJobsResponse).jobs, "something was submitted")
        with open(path, "w") as file:
            file.write(GOOD)
        run(cluster, "submit", path, code=0)


def test_a_bad_spec_of_another_client_is_refused_too():
    with Cluster() as cluster:
        cluster.start_coordinator()
        for changes, fragments in (
            ({"model__heads": 3}, ["model.heads", "3"]),
            ({"model__layers": 1 << 31}, ["model.layers"]),
            ({"batch__sequences": 15}, ["batch.sequences", "15"]),
            ({"batch__length": 33}, ["batch.length", "33"]),
            ({"data__path": "relative"}, ["data.path"]),
            ({"data__path": "/" + "x" * 600}, ["path"]),
            ({"data__path": "/a\nb"}, ["path"]),
            ({"data__holdout": float("nan")}, ["holdout"]),
            ({"optimizer__lr": float("inf")}, ["optimizer.lr"]),
            ({"optimizer__beta2": 1.0}, ["beta"]),
            ({"steps": 1 << 63}, ["steps"]),
            ({"checkpoint__path": "relative"}, ["checkpoint.path"]),
            ({"checkpoint__kind": 3}, ["checkpoint.kind"]),
            ({"workers__min": 100}, ["workers.min"]),
            ({"name": "Upper"}, ["name", "Upper"]),
            ({"name": ""}, ["name"]),
            ({"numerics": 99}, ["numerics"]),
        ):
            code, text = rpc_error(lambda: cluster.submit(tiny_job(cluster, **changes)))
            check(code == grpc.StatusCode.INVALID_ARGUMENT and "\n" not in text, f"{changes}: {code} {text}")
            for fragment in fragments:
                check(fragment in text, f"{changes}: '{fragment}' is missing in: {text}")
        code, text = rpc_error(lambda: cluster.call("SubmitJob", api.SubmitJobRequest(), api.SubmitJobResponse))
        check(code == grpc.StatusCode.INVALID_ARGUMENT and "spec" in text, f"{code} {text}")
        check(not cluster.call("ListJobs", api.ListJobsRequest(), api.ListJobsResponse).jobs, "something was submitted")


# ---- data ----

def shard(tokens, width=2, magic=None, version=None, count=None):
    magic = magic if magic is not None else (20240520 if width == 2 else 20240801)
    version = version if version is not None else (1 if width == 2 else 7)
    header = struct.pack("<3i", magic, version, len(tokens) if count is None else count).ljust(1024, b"\0")
    return header + struct.pack(f"<{len(tokens)}{'H' if width == 2 else 'I'}", *tokens)


def test_bad_data_ends_the_worker_and_the_job_waits():
    tokens = [i * 7 % 250 for i in range(4000)]
    outside = list(tokens)
    outside[3500] = 256
    llmc = {"data__tokens": pb.TOKEN_FORMAT_LLMC}
    cases = {  # content of the file (None: absent), changes of the job, what the line says
        "absent": (None, {}, ["cannot open"]),
        "empty": (b"", {}, ["0 tokens", "batch.length"]),
        "short": (b"x" * 30, {}, ["30 tokens", "33"]),
        "held-out": (b"x" * 200, {}, ["eval.every", "holdout"]),
        "garbage": (random.Random(3).randbytes(5000), llmc, ["magic"]),
        "text": (b"plain text, not a shard. " * 100, llmc, ["magic", "bytes"]),
        "header-only": (b"x" * 100, llmc, ["100 bytes", "1024"]),
        "version": (shard(tokens, version=3), llmc, ["version 3"]),
        "truncated": (shard(tokens)[:-10], llmc, ["9014 bytes", "truncated"]),
        "followed": (shard(tokens) + b"more", llmc, ["garbage"]),
        "none": (shard([], count=0), llmc, ["token count 0"]),
        "negative": (shard(tokens, count=-5), llmc, ["token count -5"]),
        "outside": (shard(outside), llmc, ["token 3500", "token 256", "model.vocab 256", "0 to 255", "byte 8024"]),
        "outside-wide": (shard(outside, width=4), llmc, ["token 3500", "token 256", "byte 15024"]),
    }
    with Cluster() as cluster:
        cluster.start_coordinator()
        started = {}
        for name, (content, changes, _) in cases.items():
            path = os.path.join(cluster.dir, name + ".bin")
            if content is not None:
                with open(path, "wb") as file:
                    file.write(content)
            cluster.submit(tiny_job(cluster, name=name, data__path=path, **changes))
            started[name] = cluster.start_worker(job=name)
            if len(started) % 4 == 0:
                started[name].wait()
        for name, (_, _, fragments) in cases.items():
            refused_worker(started[name], f"{name}.bin", *fragments)
            told = cluster.wait_event(lambda e: e.job == name and e.kind == "worker_leaving")
            check(f"{name}.bin" in told.text, f"the coordinator does not know why: {told.text}")
            check(cluster.job(name).state == pb.JOB_STATE_PENDING, f"job {name} does not wait")
        for kind in ("directory", "pipe"):
            path = os.path.join(cluster.dir, kind + ".bin")
            os.mkdir(path) if kind == "directory" else os.mkfifo(path)
            cluster.submit(tiny_job(cluster, name=kind, data__path=path))
            refused_worker(cluster.start_worker(job=kind), f"{kind}.bin", "regular file")
        cluster.submit(tiny_job(cluster, name="glob", data__path=os.path.join(cluster.dir, "no-*.bin"), **llmc))
        refused_worker(cluster.start_worker(job="glob"), "no-*.bin", "no data file matches")
        with open(os.path.join(cluster.dir, "truncated.bin"), "wb") as file:
            file.write(shard(tokens))
        cluster.start_worker(job="truncated")
        cluster.wait_finished("truncated")


def test_data_changed_in_use_is_noticed_and_the_job_goes_on_when_it_is_back():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=STEPS, checkpoint_every=20))
        with cluster.slowed():
            worker = cluster.start_worker()
            cluster.wait_event("checkpoint_committed")
            with open(cluster.data, "r+b") as file:
                good = file.read()
                file.seek(0)
                file.write(good.replace(b"lazy", b"busy"))
            cluster.wait_event(lambda e: e.kind == "worker_lost" and "changed while in use" in e.text and cluster.data in e.text)
        worker.kill()
        with open(cluster.data, "wb") as file:
            file.write(good)
        cluster.start_worker()
        check(cluster.wait_finished() == reference(steps=STEPS), "weights differ")


def test_a_job_that_does_not_fit_into_memory_waits_and_says_what_is_short():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, model__layers=96, model__heads=96, model__channels=12288, model__context=2048, batch__length=2048))
        worker = cluster.start_worker()
        waiting = cluster.wait_event("job_waiting")
        for fragment in ("no layout of 1 worker fits in memory", "MiB a worker", "MiB are there", "MiB short"):
            check(fragment in waiting.text, f"'{fragment}' is missing: {waiting.text}")
        check(cluster.job().state == pb.JOB_STATE_PENDING and worker.alive(), "the job waits for more workers, and its worker with it")


# ---- checkpoints: full and read-only disks ----

def committed(cluster, job="tiny"):
    return [c for c in cluster.checkpoints(job) if c.state == pb.CHECKPOINT_STATE_COMMITTED]


def manifests(path):
    return [name for name in os.listdir(path) if os.path.exists(os.path.join(path, name, "manifest.json"))]


@needs_mounts
def test_a_full_disk_fails_checkpoints_and_nothing_else():
    steps = 240
    with Cluster() as cluster, Disk(os.path.join(cluster.dir, "ckpt-tiny"), 8) as disk:
        disk.fill(leave=64 << 10)
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=steps, checkpoint_every=60, workers__min=2))
        cluster.start_worker()
        cluster.start_worker()
        with cluster.slowed():
            failed = cluster.wait_event("checkpoint_failed")
            check(disk.path in failed.text and "No space left" in failed.text and failed.severity == pb.EVENT_SEVERITY_ERROR, failed.text)
            cluster.wait_step(cluster.job().steps_done + 10)
            check(not committed(cluster) and not manifests(disk.path), "a partial checkpoint is listed")
            disk.empty()
            saved = cluster.wait_event("checkpoint_committed")
            (first, *_) = committed(cluster)
            run(cluster, "checkpoint", "verify", first.dir, code=0)
            disk.fill(leave=64 << 10)
        # The last one cannot be saved: the job has done its steps, says so, and waits for room.
        cluster.wait_until(lambda: cluster.job().phase == pb.JOB_PHASE_FINALIZING, 60, "it did not come to its end")
        cluster.wait_event(lambda e: e.kind == "checkpoint_failed" and e.number > saved.number and "No space left" in e.text and
                           cluster.job().phase == pb.JOB_PHASE_FINALIZING)
        job = cluster.job()
        check(job.state == pb.JOB_STATE_RUNNING and job.steps_done == steps, f"state {job.state} at step {job.steps_done}")
        disk.empty()
        check(cluster.wait_finished() == reference(steps=steps), "weights differ")
        check(cluster.job().replayed_steps == 0 and cluster.job().workers_lost == 0, "the workers suffered")
        check(committed(cluster)[-1].step == steps, "the last checkpoint is that of the last step")
        cluster.wait_until(lambda: len(os.listdir(disk.path)) <= 1 + len(committed(cluster)), 10,
                           f"remains of failed checkpoints: {os.listdir(disk.path)}")


@needs_mounts
def test_a_read_only_disk_fails_checkpoints_and_nothing_else():
    with Cluster() as cluster, Disk(os.path.join(cluster.dir, "ckpt-tiny"), 16) as disk:
        disk.remount("ro")
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=STEPS, checkpoint_every=40))
        cluster.start_worker()
        with cluster.slowed():
            failed = cluster.wait_event("checkpoint_failed")
            check(disk.path in failed.text and "Read-only file system" in failed.text, failed.text)
            run(cluster, "checkpoint", "tiny", code=0)
            again = cluster.wait_event("checkpoint_failed", after=failed.number)
            cluster.wait_step(cluster.job().steps_done + 20)
            check(not committed(cluster), "a checkpoint is listed")
            disk.remount("rw")
            cluster.wait_event("checkpoint_committed", after=again.number)
        check(cluster.wait_finished() == reference(steps=STEPS), "weights differ")


def test_a_checkpoint_path_that_is_no_directory_is_told():
    with Cluster() as cluster:
        cluster.start_coordinator()
        path = os.path.join(cluster.dir, "ckpt-tiny")
        open(path, "w").close()
        cluster.submit(tiny_job(cluster, steps=STEPS, checkpoint_every=0))
        cluster.start_worker()
        failed = cluster.wait_event("checkpoint_failed")
        check(path in failed.text and "is not a directory" in failed.text, failed.text)
        job = cluster.job()
        check(job.phase == pb.JOB_PHASE_FINALIZING and job.steps_done == STEPS, f"phase {job.phase} at step {job.steps_done}")
        os.unlink(path)
        check(cluster.wait_finished() == reference(steps=STEPS), "weights differ")


# ---- checkpoints: damage ----

def job_with_checkpoints(cluster, count):
    """A job killed, with its coordinator, when it has `count` checkpoints; newest last."""
    cluster.start_coordinator(flags=STRICT)
    cluster.submit(tiny_job(cluster, steps=STEPS, checkpoint_every=20, checkpoint__keep=10))
    with cluster.slowed():
        workers = [cluster.start_worker(), cluster.start_worker()]
        cluster.wait_until(lambda: len(committed(cluster)) >= count, 30, "there were never enough checkpoints")
        for sig in (signal.SIGSTOP, signal.SIGKILL):  # all at one point: nobody goes on alone
            for worker in workers:
                worker.kill(sig)
        cluster.coordinator.kill()
        for process in [*workers, cluster.coordinator]:
            process.wait()
    cluster.start_coordinator()
    return committed(cluster)


def piece_of(checkpoint):
    return sorted(os.path.join(checkpoint.dir, name) for name in os.listdir(checkpoint.dir) if name.endswith(".safetensors"))[0]


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


DAMAGES = {
    "a flipped bit": lambda path: flip(path, os.path.getsize(path) // 2),
    "a flipped bit of the header": lambda path: flip(path, 40),
    "a missing last byte": lambda path: os.truncate(path, os.path.getsize(path) - 1),
    "an empty file": lambda path: os.truncate(path, 0),
    "a missing file": os.unlink,
}


def test_a_damaged_checkpoint_is_named_and_an_older_one_is_taken():
    for what, damage in DAMAGES.items():
        with Cluster() as cluster:
            *_, older, newest = job_with_checkpoints(cluster, 2)
            path = piece_of(newest)
            damage(path)
            run(cluster, "checkpoint", "verify", newest.dir, code=1 if os.path.exists(path) else 4, fragments=[path])
            run(cluster, "checkpoint", "verify", older.dir, code=0)
            cluster.start_worker()
            cluster.start_worker()
            bad = cluster.wait_event("checkpoint_bad")
            check(path in bad.text and f"checkpoint {newest.number} " in bad.text and "older" in bad.text, f"{what}: {bad.text}")
            cluster.wait_event(lambda e: e.kind == "generation_go" and f"at step {older.step}" in e.text)
            check(cluster.wait_finished() == reference(steps=STEPS), f"{what}: weights differ")
            states = {c.number: c for c in cluster.checkpoints()}
            check(newest.number not in states or states[newest.number].state == pb.CHECKPOINT_STATE_BAD, f"{what}: still counted as good")


def test_when_no_checkpoint_can_be_loaded_the_job_fails_and_does_not_start_anew():
    with Cluster() as cluster:
        saved = job_with_checkpoints(cluster, 2)
        for checkpoint in saved:
            flip(piece_of(checkpoint), 5000)
        before = cluster.job().generation
        workers = [cluster.start_worker(), cluster.start_worker()]
        over = cluster.wait_over()
        check(over.state == pb.JOB_STATE_FAILED and "checkpoint" in over.text, f"state {over.state}: {over.text}")
        check(not [e for e in cluster.events if e.kind == "generation_go" and e.generation > before], "it started anew")
        check([worker.wait() for worker in workers] == [1, 1], "the workers' exit codes")
        run(cluster, "watch", "tiny", "--after", str(cluster.events[-1].number), code=1, fragments=["job tiny failed: ", over.text])
        for checkpoint in saved:
            check(os.path.exists(piece_of(checkpoint)), "what may still be mended was deleted")


def wait_verified(cluster, number):
    cluster.wait_until(lambda: any(c.number == number and c.verified for c in cluster.checkpoints()), 20,
                       f"checkpoint {number} was not re-read")


def test_a_bit_that_flips_later_is_found_without_anybody_loading_it():
    """Re-reading in the background finds it, tells it, and has the newest one replaced."""
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*FAST, "--scrub-again-s", "1"])
        cluster.submit(tiny_job(cluster, steps=1000000, checkpoint_every=0, checkpoint__keep=10))
        cluster.start_worker()
        cluster.wait_step(5)
        for number in (1, 2):
            check(cluster.checkpoint() == number, "number")
            wait_verified(cluster, number)
        older, newest = committed(cluster)
        check(older.verified and newest.verified, "not shown as verified")
        flip(piece_of(newest), os.path.getsize(piece_of(newest)) // 2)
        bad = cluster.wait_event("checkpoint_bad")
        check(piece_of(newest) in bad.text and "checkpoint 2 " in bad.text and "re-reading" in bad.text, bad.text)
        wait_verified(cluster, 3)
        states = {c.number: (c.state, c.verified) for c in cluster.checkpoints()}
        check(states == {1: (pb.CHECKPOINT_STATE_COMMITTED, True), 2: (pb.CHECKPOINT_STATE_BAD, False),
                         3: (pb.CHECKPOINT_STATE_COMMITTED, True)}, f"{states}")
        check(cluster.job().generation == 1, "training was disturbed")


# ---- the coordinator's own disk ----

@needs_mounts
def test_a_full_store_refuses_changes_and_training_goes_on():
    with Cluster() as cluster, Disk(os.path.join(cluster.dir, "store"), 128) as disk:
        flags = ["--reserve-mib", "32"]
        cluster.start_coordinator(flags=flags)
        cluster.submit(tiny_job(cluster, steps=STORE_STEPS, checkpoint_every=0))
        cluster.submit(tiny_job(cluster, name="other"))
        with cluster.slowed():
            cluster.start_worker()
            cluster.wait_step(5)
            disk.fill(leave=8 * MIB)
            cluster.wait_step(cluster.job().steps_done + 20)
            job = os.path.join(cluster.dir, "job.yaml")
            with open(job, "w") as file:
                file.write(GOOD.replace("job: tiny", "job: third"))
            for args in (["submit", job], ["cancel", "other"], ["drain", "w0", "--reason", "x"], ["checkpoint", "tiny"]):
                run(cluster, *args, code=6, fragments=["refused", disk.path, "MiB free", "reserve of 32.0 MiB"])
            check(cluster.job("other").state == pb.JOB_STATE_PENDING, "something was changed")
            # SIGKILL and a start on the full disk: it serves, or says in one line why it does not; what it knew is known.
            cluster.coordinator.kill()
            cluster.coordinator.wait()
            cluster.start_coordinator(flags=flags)
            check(cluster.job("other").state == pb.JOB_STATE_PENDING and cluster.job().spec.steps == STORE_STEPS, "something was lost")
            run(cluster, "cancel", "other", code=6, fragments=["reserve"])
            # Not one byte left: it runs on; once killed it cannot open its store, and says so instead of dying half-way.
            disk.fill(leave=0)
            cluster.wait_step(cluster.job().steps_done + 5)
            cluster.coordinator.kill()
            cluster.coordinator.wait()
            done = subprocess.run([os.path.join(BUILD, "coordinator/musterd"), "--data-dir", disk.path, "--listen", "127.0.0.1:0", *flags[-2:]],
                                  capture_output=True, text=True, timeout=20 * SLOW)
            check(done.returncode == 1 and disk.path in done.stderr and "0.0 MiB free" in done.stderr and done.stderr.count("\n") == 1,
                  f"exit {done.returncode}: {done.stderr}")
            disk.empty()
            cluster.start_coordinator(flags=flags)
            run(cluster, "submit", job, code=0)
            run(cluster, "cancel", "other", code=0)
        check(cluster.wait_finished() == reference(steps=STORE_STEPS), "weights differ")
        check(cluster.job().workers_lost == 0, "the worker suffered")


if __name__ == "__main__":
    main([test for name, test in list(globals().items()) if name.startswith("test_")])
