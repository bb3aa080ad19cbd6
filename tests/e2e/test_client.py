#!/usr/bin/python3
"""The Python client as pip installs it, against real processes. Arguments: only the tests named."""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import threading
import time

try:
    import grpc
except ModuleNotFoundError:
    print("skip test_client: this Python has no grpcio (scripts/setup test)")
    raise SystemExit(0) from None

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.abspath(os.environ.get("MU_BUILD", os.path.join(ROOT, "build")))
INSTALLED = os.path.join(BUILD, "client")


def install():
    """As a user would, but from this machine alone. pip builds beside the sources, which are not ours to write to: so from a copy."""
    shutil.rmtree(INSTALLED, ignore_errors=True)
    copy = os.path.join(INSTALLED, "source")
    shutil.copytree(os.path.join(ROOT, "clients/python"), copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--root-user-action=ignore", "--no-deps",
                    "--no-build-isolation", "--no-index", "--target", os.path.join(INSTALLED, "site"), copy], check=True)
    sys.path.insert(0, os.path.join(INSTALLED, "site"))


install()
import muster  # noqa: E402: before harness, whose own stubs are of the same name
from harness import SLOW, Cluster, check, main, tiny_job  # noqa: E402
from muster.v1 import job_pb2 as pb  # noqa: E402
from proxy import LosesAnswer  # noqa: E402
from test_security import SecureCluster  # noqa: E402

LONG = 100000  # steps: never over by itself


def raised(kind, action):
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def test_a_job_is_submitted_followed_scaled_saved_drained_and_measured():
    with Cluster() as cluster:
        cluster.start_coordinator()
        with muster.Client(cluster.address, timeout=20 * SLOW) as client:
            spec = tiny_job(cluster, steps=LONG, checkpoint_every=0)
            job, existed = client.submit(spec)
            check(not existed and job.state == pb.JOB_STATE_PENDING and client.submit(spec)[1], "submitted once")
            for name in ("w1", "w2", "w3"):
                cluster.start_worker(name=name)
            working = []
            for event in client.watch(job="tiny"):
                if event.kind == "generation_go":
                    working.append(client.job("tiny").layout.dp)
                    if working[-1] == 3:
                        break
            before = client.job("tiny").revision
            scaled = client.scale("tiny", max=2, expected_revision=before)
            check(scaled.spec.workers.max == 2, "scaled")
            go = next(event for event in client.watch(job="tiny", after=scaled.revision) if event.kind == "generation_go")
            check(go.text.split(" workers")[0].endswith("2"), go.text)
            stale = raised(muster.RevisionChanged, lambda: client.scale("tiny", max=3, expected_revision=before))
            check(stale.revision == scaled.revision and stale.advice, f"{stale.values}")
            saved = client.wait_checkpoint("tiny", client.checkpoint("tiny"), timeout=30 * SLOW)
            check(saved.state == pb.CHECKPOINT_STATE_COMMITTED and os.path.isdir(saved.dir), f"{saved}")
            member = next(w.name for w in client.workers("tiny") if w.state == pb.WORKER_STATE_MEMBER)
            client.drain(member, reason="test")
            next(event for event in client.watch(job="tiny", after=go.number) if event.kind == "worker_draining" and event.worker == member)
            cluster.wait_until(lambda: member not in [w.name for w in client.workers("tiny")], 20, "the drained worker is still there")
            client.undrain(member)
            cluster.wait_until(lambda: len({row.worker for row in client.timings("tiny")}) == 2, 20, "two workers have no timings")
            rows = client.timings("tiny", last=2)
            text, columns = str(rows).splitlines(), rows.columns()
            check(text[0].split()[:2] == ["worker", "rank"] and len(text) == 1 + len(rows) == 1 + len(columns["total"]), str(rows))
            check(all(0 < row.total and row.total >= row.forward and row.loss > 0 for row in rows), str(rows))
            check(rows.slowest().worker in columns["worker"] and len(rows[:1]) == 1, "rows")
            accounts = client.goodput("tiny")
            check({row.worker for row in rows} <= {a.worker for a in accounts} and sum(a.seconds.useful for a in accounts) > 0, str(accounts))
            raised(TimeoutError, lambda: client.wait("tiny", timeout=0.2))
            client.cancel("tiny", reason="enough")
            over = client.wait("tiny", timeout=20 * SLOW)
            check(over.state == pb.JOB_STATE_CANCELLED and "enough" in over.text, over.text)
            check([job.name for job in client.jobs()] == ["tiny"], "jobs")


def test_errors_are_typed():
    with Cluster() as cluster:
        cluster.start_coordinator()
        with muster.Client(cluster.address, timeout=20 * SLOW) as client:
            error = raised(muster.NotFound, lambda: client.job("none"))
            check(error.reason == "JOB_UNKNOWN" and str(error) == "there is no job 'none'", f"{error.reason} {error}")
            error = raised(muster.InvalidRequest, lambda: client.submit(tiny_job(cluster, steps=0)))
            check(error.reason == "FIELD_INVALID" and error.field == "steps" and error.retry_after is None, f"{error.field}: {error}")
            client.submit(tiny_job(cluster))
            error = raised(muster.AlreadyExists, lambda: client.submit(tiny_job(cluster, steps=77)))
            check(error.reason == "JOB_EXISTS" and error.code == grpc.StatusCode.ALREADY_EXISTS, f"{error.reason}")
            error = raised(muster.Conflict, lambda: client.checkpoint("tiny"))
            check(error.reason == "JOB_NOT_STEPPING" and error.retry_after == 1.0, f"{error.reason} {error.retry_after}")
            raised(muster.InvalidRequest, lambda: next(client.watch(after=1000)))
        with muster.Client("127.0.0.1:1", timeout=0.5) as nobody:
            start = time.monotonic()
            raised(muster.Unavailable, nobody.jobs)
            check(time.monotonic() - start < 20 * SLOW, "it gives up")


def test_a_job_is_rolled_back_and_branched_and_hosts_have_revisions():
    with Cluster() as cluster:
        cluster.start_coordinator()
        with muster.Client(cluster.address, timeout=20 * SLOW) as client, cluster.slowed():
            client.submit(tiny_job(cluster, checkpoint_every=5, checkpoint__keep=100))
            cluster.start_worker()
            client.wait("tiny", timeout=60 * SLOW)
            first = client.checkpoints("tiny")[0]  # which step it is of depends on how fast the machine is
            raised(muster.Conflict, lambda: client.roll_back("tiny", first.number))
            raised(muster.NotFound, lambda: client.branch("tiny", 99, "twin"))
            twin = client.branch("tiny", first.number, "twin", by="somebody", lr=0.002, steps=40)
            check(twin.origin.job == "tiny" and twin.steps == 40 and twin.steps_done == first.step < 30, f"{twin}")
            check(client.checkpoints("twin")[0].borrowed_from == "tiny", "borrowed")
            back = client.roll_back("twin", first.number, steps=35, expected_revision=twin.revision)
            check(back.steps == 35 and back.spec.newest_amendment == 2, f"{back}")
            raised(muster.RevisionChanged, lambda: client.roll_back("twin", first.number, expected_revision=twin.revision))
            client.cordon("h9", "dust", expected_revision=0)
            node, = [one for one in client.nodes() if one.name == "h9"]
            raised(muster.RevisionChanged, lambda: client.drain_node("h9", "dust", expected_revision=0))
            client.drain_node("h9", "dust", expected_revision=node.revision)
            raised(muster.RevisionChanged, lambda: client.resume("h9", expected_revision=node.revision))
            client.resume("h9")
            raised(muster.RevisionChanged, lambda: client.undrain("h9", expected_revision=7))


def test_a_lost_answer_and_a_restart_are_not_noticed():
    with Cluster() as cluster:
        cluster.start_coordinator()
        with muster.Client(cluster.address, timeout=60 * SLOW) as direct:
            proxy = LosesAnswer(cluster.address, "/SubmitJob")
            answers = []
            with muster.Client(proxy.address, timeout=60 * SLOW) as client:
                asking = threading.Thread(target=lambda: answers.append(client.submit(tiny_job(cluster))))
                asking.start()
                check(proxy.asked.wait(30 * SLOW), "it asked")
                cluster.wait_until(direct.jobs, 10, "the job is not there")
                proxy.cut()
                asking.join(60 * SLOW)
            (job, existed), = answers
            check(not existed and job.uid == direct.job("tiny").uid, "as if nothing had been lost")
            watch = direct.watch(job="tiny")
            check(next(watch).kind == "job_submitted", "the past")
            cluster.coordinator.kill()
            cluster.coordinator.wait()
            cluster.start_coordinator()
            direct.cancel("tiny")
            check(next(watch).kind == "job_cancelled", "goes on after the restart, without a repetition")
            watch.close()
            proxy.close()


def test_it_speaks_mutual_tls_and_is_told_what_its_certificate_may_do():
    with SecureCluster() as cluster:
        cluster.start()
        with muster.Client(cluster.address, tls=muster.Tls(*cluster.paths("operator/x")), timeout=20 * SLOW) as operator:
            check(not operator.submit(tiny_job(cluster))[1], "submitted")
        with muster.Client(cluster.address, tls=muster.Tls(*cluster.paths("viewer/x")), timeout=20 * SLOW) as viewer:
            check(viewer.job("tiny").name == "tiny" and next(viewer.watch()).kind == "job_submitted", "it may look")
            error = raised(muster.Refused, lambda: viewer.cancel("tiny"))
            check(error.reason == "PERMISSION_DENIED" and "needs the role operator" in str(error), f"{error.reason} {error}")
        with muster.Client(cluster.address, timeout=1) as nobody:
            raised(muster.Unavailable, nobody.jobs)


def test_the_program_in_the_readme_runs():
    with open(os.path.join(ROOT, "clients/python/README.md")) as file:
        program = file.read().split("```python\n")[1].split("```")[0]
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.start_worker(job="kjv")
        for name, own in (("127.0.0.1:7070", cluster.address), ("/data/text.txt", cluster.data), ("/tmp/kjv", os.path.join(cluster.dir, "kjv"))):
            check(program.count(f'"{name}"') == 1, f"the README no longer says {name}")
            program = program.replace(name, own)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(program, "README.md", "exec"), {})
        lines = output.getvalue().splitlines()
        check(lines[-1] == cluster.job("kjv").weights_sha256.hex() != "", lines[-1])
        check(lines[0].startswith("1 job_submitted") and any(line.startswith("worker  rank") for line in lines), output.getvalue())


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
