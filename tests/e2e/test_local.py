#!/usr/bin/python3
"""Checkpoints of kind local: every host has a directory of its own, every piece is on two hosts."""

import contextlib
import glob
import hashlib
import os
import re
import shutil
import signal
import subprocess

from harness import BUILD, STRICT, Cluster, check, log_of, main, pb, reference, rpc_error, run, tiny_job
from test_api import call

STEPS = 500
LOCAL = dict(checkpoint__kind=pb.CHECKPOINT_KIND_LOCAL)


def host_dir(cluster, host):
    return os.path.join(cluster.dir, "disk-" + host)


def local_job(cluster, **changes):
    """%h in the path stands for the host: here hosts are names on one machine."""
    return tiny_job(cluster, checkpoint__path=os.path.join(cluster.dir, "disk-%h"), **LOCAL, **changes)


@contextlib.contextmanager
def running(cluster, hosts, **changes):
    cluster.start_coordinator()
    cluster.submit(local_job(cluster, workers__min=len(hosts), **changes))
    workers = {}
    with cluster.slowed():
        for host in hosts:  # one after the other: the ring of hosts is in this order then
            workers[host] = cluster.start_worker(name="on-" + host, flags=["--host-id", host])
            cluster.wait_event(lambda e: e.kind == "worker_attached" and e.worker == "on-" + host)
        cluster.wait_together(len(hosts))
        yield workers


def committed(cluster):
    return [c for c in cluster.checkpoints() if c.state == pb.CHECKPOINT_STATE_COMMITTED]


def save(cluster):
    """A checkpoint on demand, committed."""
    number = cluster.checkpoint()
    cluster.wait_until(lambda: any(c.number == number for c in committed(cluster)), 30, f"checkpoint {number} is not committed")
    return next(c for c in committed(cluster) if c.number == number)


def pieces(cluster, host, checkpoint):
    path = checkpoint.dir.replace("%h", host)
    return {os.path.basename(p) for p in glob.glob(path + "/*.safetensors")}


def expect_equal(cluster, **changes):
    sha = cluster.wait_finished()
    check(sha == reference(**changes), f"weights {sha} differ from the undisturbed run's {reference(**changes)}")


def test_every_piece_is_on_two_hosts():
    with Cluster() as cluster:
        with running(cluster, "abc", steps=50 * STEPS, checkpoint_every=0):
            checkpoint = save(cluster)
            here = {host: pieces(cluster, host, checkpoint) for host in "abc"}
            every = set().union(*here.values())
            check(len(every) == 3, f"not three pieces: {here}")
            for piece in every:
                check(sum(piece in names for names in here.values()) == 2, f"{piece} is not on two hosts: {here}")
            dirs = [checkpoint.dir.replace("%h", host) for host in "abc"]
            verify = subprocess.run([os.path.join(BUILD, "cli/muster"), "checkpoint", "verify", *dirs], capture_output=True, text=True)
            check(verify.returncode == 0, f"verify: {verify.stdout}{verify.stderr}")
            cluster.cancel()


def test_what_hosts_hold_is_branched_from_when_it_is_brought_together():
    with Cluster() as cluster:
        with running(cluster, "ab", steps=50 * STEPS, checkpoint_every=0):
            checkpoint, together = save(cluster), os.path.join(cluster.dir, "together")
            told = rpc_error(lambda: call(cluster, "BranchJob", job="tiny", checkpoint=checkpoint.number, name="twin"))
            check(told[0].name == "INVALID_ARGUMENT" and "checkpoint.kind local" in told[1] and "init.path" in told[1], f"{told}")
            for host in "ab":
                shutil.copytree(checkpoint.dir.replace("%h", host), together, dirs_exist_ok=True)
            run(cluster, "checkpoint", "verify", together, code=0)
            with open(os.path.join(together, "manifest.json"), "rb") as file:
                sha256 = hashlib.sha256(file.read()).hexdigest()
            cluster.submit(tiny_job(cluster, name="twin", steps=5, init__path=together, init__sha256=sha256))
            worker = cluster.start_worker(job="twin")
            check(worker.wait() == 0, log_of(worker))
            twin = cluster.job("twin")
            check(twin.steps_done == 5 and twin.weights_sha256.hex() != reference(steps=5), "it has not begun with these weights")
            cluster.cancel()


def kill_all(cluster, workers):
    """Everybody at once; returns when the coordinator knows that nobody is left."""
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
    cluster.wait_until(lambda: cluster.job().attached == 0, 20, "the workers are not known to be gone")


def lose_everything_but(hosts, lose_disk="", **more):
    """A checkpoint on three hosts; then all die, some hosts or disks do not come back. Returns the workers' logs."""
    changes = dict(steps=STEPS, checkpoint_every=0)
    with Cluster() as cluster:
        with running(cluster, "abc", **changes, **more) as workers:
            checkpoint = save(cluster)
            cluster.wait_step(checkpoint.step + 1)
            kill_all(cluster, workers.values())
            for host in lose_disk:
                shutil.rmtree(host_dir(cluster, host))
            for host in hosts:
                cluster.start_worker(flags=["--host-id", host])
            go = cluster.wait_event(lambda e: e.kind == "generation_go" and "state from checkpoint" in e.text)
            check(f"at step {checkpoint.step}" in go.text, go.text)
        expect_equal(cluster, **changes)
        check(cluster.job().replayed_steps > 0, "what came after the checkpoint was done again")
        return [log_of(worker) for worker in cluster.workers]


def test_a_disk_is_lost_with_its_host():
    lose_everything_but("abc", lose_disk="b")


def test_between_hosts_everything_is_encrypted():
    """A job with data_tls: steps, state for a worker that joins, files of a checkpoint for a host that never had it; the bits stay the same."""
    logs = lose_everything_but("bcd", lose_disk="a", data_tls=True)
    check(any(re.search(r"generation \d+: [12] connections to other hosts are encrypted \(TLS 1.3\); kernel TLS: (not in use|sends|receives)", log) for log in logs), "no word of TLS")


def test_a_host_does_not_come_back():
    lose_everything_but("ac")


def test_two_neighbours_are_missing_and_the_job_waits():
    changes = dict(steps=STEPS, checkpoint_every=0)
    with Cluster() as cluster:
        with running(cluster, "abcd", **changes) as workers:
            save(cluster)
            kill_all(cluster, workers.values())
            generations = cluster.job().generations
            cluster.start_worker(flags=["--host-id", "a"])
            waits = cluster.wait_event(lambda e: e.kind == "job_waiting" and "cannot be read" in e.text and "host a is" not in e.text)
            check("host b is not there" in waits.text and "host d" in waits.text, waits.text)
            check(cluster.job().generations == generations, "it went on without its state")
            cluster.start_worker(flags=["--host-id", "c"])
            cluster.wait_event(lambda e: e.kind == "generation_go" and "state from checkpoint" in e.text)
        expect_equal(cluster, **changes)


def test_a_damaged_piece_is_read_from_its_other_host():
    changes = dict(steps=STEPS, checkpoint_every=0)
    with Cluster() as cluster:
        with running(cluster, "ab", **changes) as workers:
            checkpoint = save(cluster)
            cluster.wait_until(lambda: any(c.verified for c in committed(cluster)), 20, "not verified")
            kill_all(cluster, workers.values())
            for host, piece in zip("ab", sorted(pieces(cluster, "a", checkpoint))):  # a different piece on each
                with open(os.path.join(checkpoint.dir.replace("%h", host), piece), "r+b") as file:
                    file.seek(-100, os.SEEK_END)
                    byte = file.read(1)
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte[0] ^ 1]))
            for host in "ab":
                cluster.start_worker(flags=["--host-id", host])
            cluster.wait_event(lambda e: e.kind == "generation_go" and "state from checkpoint" in e.text)
        expect_equal(cluster, **changes)
        check(not [e for e in cluster.events if e.kind == "checkpoint_bad"], "one good copy of each piece is enough")


def test_old_checkpoints_go_from_all_hosts():
    changes = dict(steps=100, checkpoint_every=10)
    with Cluster() as cluster:
        with running(cluster, "abc", **changes):
            pass
        expect_equal(cluster, **changes)
        kept = {os.path.basename(c.dir) for c in committed(cluster)}
        for host in "abc":
            here = {name for name in os.listdir(host_dir(cluster, host)) if name[0].isdigit()}
            check(here == kept, f"host {host} has {here}, the coordinator {kept}")


def test_one_host_alone_is_told():
    changes = dict(steps=40, checkpoint_every=0)
    with Cluster() as cluster:
        with running(cluster, "a", **changes):
            cluster.wait_event("checkpoint_single_copy")
        expect_equal(cluster, **changes)


def test_workers_and_coordinator_die_while_pieces_are_copied():
    changes = dict(steps=2 * STEPS, checkpoint_every=15)
    with Cluster(flags=STRICT) as cluster:
        with running(cluster, "abc", **changes) as workers:
            for round, host in enumerate("bca"):
                cluster.wait_event("checkpoint_committed", after=max((e.number for e in cluster.events), default=0))
                workers[host].kill()
                if round == 1:
                    cluster.coordinator.kill()
                    cluster.start_coordinator()
                workers[host] = cluster.start_worker(flags=["--host-id", host])
                cluster.wait_until(lambda: cluster.job().world == 3, 30, "not three again")
        expect_equal(cluster, **changes)


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
