#!/usr/bin/python3
"""Checkpoints of kind local: every host has a directory of its own, every piece is on two hosts."""

import glob
import os
import shutil
import signal
import subprocess

from harness import BUILD, Cluster, check, main, pb, reference, tiny_job

STEPS = 1200
LOCAL = dict(checkpoint__kind=pb.CHECKPOINT_KIND_LOCAL)


def host_dir(cluster, host):
    return os.path.join(cluster.dir, "disk-" + host)


def local_job(cluster, **changes):
    """%h in the path stands for the host: here hosts are names on one machine."""
    return tiny_job(cluster, checkpoint__path=os.path.join(cluster.dir, "disk-%h"), **LOCAL, **changes)


def start(cluster, hosts, **changes):
    cluster.start_coordinator()
    cluster.submit(local_job(cluster, workers__min=1, **changes))
    workers = {host: cluster.start_worker(flags=["--host-id", host]) for host in hosts}
    cluster.wait_until(lambda: cluster.job().world == len(hosts) and cluster.job().steps_done >= 5, 20, "the workers did not start together")
    return workers


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
    changes = dict(steps=60, checkpoint_every=20)
    with Cluster() as cluster:
        start(cluster, "abc", **changes)
        expect_equal(cluster, **changes)
        checkpoints = committed(cluster)
        check(len(checkpoints) >= 2, "too few checkpoints")
        for checkpoint in checkpoints:
            here = {host: pieces(cluster, host, checkpoint) for host in "abc"}
            every = set().union(*here.values())
            check(len(every) == 3, f"not three pieces: {here}")
            for piece in every:
                check(sum(piece in names for names in here.values()) == 2, f"{piece} is not on two hosts: {here}")
            dirs = [checkpoint.dir.replace("%h", host) for host in "abc"]
            verify = subprocess.run([os.path.join(BUILD, "cli/muster"), "checkpoint", "verify", *dirs], capture_output=True, text=True)
            check(verify.returncode == 0, f"verify: {verify.stdout}{verify.stderr}")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
