#!/usr/bin/env python3
"""musterd as a process: options, exit codes, what it says when it cannot start, signals, SIGKILL, many idle connections, and the example
client against it. One argument: only the tests named."""

import contextlib
import json
import os
import shutil
import signal
import stat
import socket
import subprocess
import sys

import grpc

from harness import BUILD, FAST, ROOT, SLOW, Cluster, Failure, api, check, main, pb, reference, tiny_job

MUSTERD = os.path.join(BUILD, "coordinator/musterd")


def run(*args, limit_s=20):
    done = subprocess.run([MUSTERD, *args], capture_output=True, text=True, timeout=limit_s * SLOW)
    return done.returncode, done.stdout, done.stderr


def expect_refusal(code, words, *args):
    got, _, err = run(*args)
    check(got == code, f"musterd {' '.join(args)} ended with {got}, not {code}: {err}")
    check(all(word in err for word in words), f"musterd {' '.join(args)} says '{err.strip()}', not {words}")


def test_rates_that_were_probed_are_predicted_by():
    """A file that cannot be taken ends musterd with one line that says where; a good one is what steps are predicted by, from the first on."""
    def predicted():
        return cluster.call("GetGoodput", api.GetGoodputRequest(job="tiny"), api.GetGoodputResponse).prediction.predicted

    with Cluster() as cluster:
        path = os.path.join(cluster.dir, "probed.yaml")
        device = "device: {type: h100-sxm}\nnodes: 1\n"
        for text, words in ((device, [path, "worker is missing"]), (device + "worker: {flops: -1}\n", [f"{path}:3", "flops", "-1"]),
                            (device + "worker: {flops: 0}\n", [f"{path}:3", "flops", "above 0"]),
                            (device + "worker: {link_rate: nan}\n", [f"{path}:3", "link_rate", "nan"]),
                            (device + "worker: {rows_rate: .inf}\n", [f"{path}:3", "rows_rate", ".inf"]),
                            (device + "worker: {latency_s: 1e19}\n", [f"{path}:3", "latency_s", "1e19"]),
                            (device + "worker: {speed: 1}\n", [f"{path}:3", "speed"]), ("]", [path])):
            with open(path, "w") as file:
                file.write(text)
            code, _, err = run("--volatile", "--listen", "127.0.0.1:0", "--rates", path)
            check(code == 1 and len(err.splitlines()) == 1 and all(word in err for word in words), f"for {text!r}: {code}, {err!r}, not {words}")
        code, _, err = run("--volatile", "--listen", "127.0.0.1:0", "--rates", path + "x")
        check(code == 1 and len(err.splitlines()) == 1 and path + "x" in err, err)
        with open(path, "w") as file:
            file.write(device + "worker: {fixed_s: 1000}\n")  # no worker is so slow: only the file can say it
        cluster.start_coordinator(flags=[*FAST, "--rates", path])
        cluster.start_worker(name="w0")
        cluster.submit(tiny_job(cluster, steps=1000000, eval__every=0))
        cluster.wait_step(1)
        terms = predicted()
        check(sum(getattr(terms, field.name) for field in terms.DESCRIPTOR.fields) > 1000, f"predicted by other rates: {terms}")


def test_options_are_judged():
    code, out, _ = run("--version")
    check(code == 0 and out.startswith("musterd "), "--version")
    code, out, _ = run("--help")
    check(code == 0 and "--data-dir" in out and "--lost-ms" in out, "--help")
    expect_refusal(2, ["--data-dir"])
    expect_refusal(2, ["--volatile", "--data-dir"], "--volatile", "--data-dir", "/tmp/x")
    expect_refusal(2, ["--lost-ms", "12x"], "--volatile", "--lost-ms", "12x")
    expect_refusal(2, ["--lost-ms", "--suspect-ms"], "--volatile", "--lost-ms", "3000", "--suspect-ms", "3000")
    expect_refusal(2, ["--suspect-ms"], "--volatile", "--heartbeat-ms", "2000", "--suspect-ms", "2500")
    expect_refusal(2, ["--log-level", "loud"], "--volatile", "--log-level", "loud")
    expect_refusal(2, ["extra"], "--volatile", "extra")
    expect_refusal(2, ["--bogus"], "--volatile", "--bogus")
    expect_refusal(1, ["nowhere:port"], "--volatile", "--insecure-listen", "--listen", "nowhere:port")
    expect_refusal(2, ["--tls-ca", "--insecure-listen"], "--volatile", "--listen", "nowhere:port")
    expect_refusal(1, ["the key is missing"], "--volatile", "--tls-ca", "a", "--tls-cert", "b")
    expect_refusal(2, ["--tls-deny", "--tls-ca"], "--volatile", "--tls-deny", "a")
    expect_refusal(1, ["data directory"], "--data-dir", "/proc/no/such", "--listen", "127.0.0.1:0")


def test_port_and_directory_in_use_are_told():
    with Cluster() as cluster:
        cluster.start_coordinator()
        expect_refusal(1, [cluster.address, "in use"], "--volatile", "--listen", cluster.address)
        expect_refusal(1, ["store", str(cluster.coordinator.pid)], "--data-dir", os.path.join(cluster.dir, "store"), "--listen",
                       "127.0.0.1:0")
        check(cluster.coordinator.alive(), "the first one goes on")


def test_sigkill_loses_nothing_that_was_acknowledged():
    with Cluster() as cluster:
        cluster.start_coordinator()
        uids = {}
        for i in range(5):
            uids[f"job-{i}"] = cluster.submit(tiny_job(cluster, name=f"job-{i}")).job.uid
        cluster.cancel("job-3", "not wanted")
        cluster.wait_event("job_cancelled")
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        cluster.start_coordinator()
        for name, uid in uids.items():
            job = cluster.job(name)
            check(job.uid == uid, f"{name} is another job after the restart")
            check((job.state == pb.JOB_STATE_CANCELLED) == (name == "job-3"), f"{name} is {pb.JobState.Name(job.state)}")
        check(cluster.job("job-3").text.find("not wanted") >= 0, "the reason is kept")
        check(cluster.submit(tiny_job(cluster, name="job-1")).existed, "submitting again is harmless")


def test_sigterm_ends_in_good_order_and_workers_go_on():
    with Cluster() as cluster:
        with cluster.running(1, steps=200) as (worker,):
            cluster.coordinator.kill(signal.SIGTERM)
            check(cluster.coordinator.wait() == 0, "exit code of a graceful stop")
            check(worker.alive(), "the worker goes on without a coordinator")
            cluster.start_coordinator()
        cluster.wait_finished()
        check(cluster.job().generations <= 1 and cluster.job().workers_lost == 0, "nobody was lost")


def test_idle_connections_do_not_keep_others_out():
    """Connections without a call, and streams that say nothing."""
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*FAST, "--max-workers", "64"])
        host, port = cluster.address.rsplit(":", 1)
        idle = [socket.create_connection((host, int(port)), timeout=10 * SLOW) for _ in range(500)]
        with grpc.insecure_channel(cluster.address) as channel:
            attach = channel.stream_stream("/muster.v1.WorkerService/Attach", request_serializer=bytes, response_deserializer=bytes)
            streams = [attach(iter_forever(cluster)) for _ in range(50)]
            cluster.submit(tiny_job(cluster))
            check(cluster.job().name == "tiny", "requests are answered")
            cluster.start_worker()
            cluster.wait_finished()
            for stream in streams:
                stream.cancel()
        for connection in idle:
            connection.close()


def iter_forever(cluster):
    cluster.watch_stop.wait(60 * SLOW)
    yield from ()


def test_example_client_runs_a_job():
    with Cluster() as cluster:
        cluster.start_coordinator()
        try:
            import grpc_tools  # noqa: F401
        except ImportError:
            raise Failure("the Python package grpcio-tools is not installed") from None
        client = subprocess.Popen([sys.executable, os.path.join(ROOT, "examples/client.py"), cluster.address, "example", cluster.data, "15"],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        cluster.wait_event("job_submitted")
        cluster.start_worker(job="example")
        out, _ = client.communicate(timeout=60 * SLOW)
        check(client.returncode == 0, f"client.py ended with {client.returncode}: {out}")
        check("job_finished" in out and "JOB_STATE_FINISHED at step 15" in out, f"client.py says: {out}")
        job = cluster.job("example")
        check(job.weights_sha256.hex() in out, "the hash of the weights is printed")


def test_unknown_method_and_malformed_request_are_answered_at_once():
    with Cluster() as cluster:
        cluster.start_coordinator()
        with grpc.insecure_channel(cluster.address) as channel:
            def code_of(path, request):
                try:
                    channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)(request, timeout=10 * SLOW)
                    return grpc.StatusCode.OK
                except grpc.RpcError as error:
                    return error.code()
            check(code_of("/muster.v1.MusterService/Nothing", b"") == grpc.StatusCode.UNIMPLEMENTED, "unknown method")
            check(code_of("/muster.v1.MusterService/GetJob", b"\x0a\xff\xff") == grpc.StatusCode.INVALID_ARGUMENT, "malformed request")
            check(code_of("/muster.v1.MusterService/GetJob", b"\x0a\x03a\x00b") == grpc.StatusCode.INVALID_ARGUMENT, "embedded NUL")
            check(code_of("/muster.v1.MusterService/GetJob", b"\x0a\x80\x80\x08" + b"a" * (1 << 17)) ==
                  grpc.StatusCode.RESOURCE_EXHAUSTED, "oversized request")
            check(code_of("/muster.v1.MusterService/ListJobs", api.ListJobsRequest().SerializeToString()) == grpc.StatusCode.OK,
                  "goes on")



def test_a_snapshot_that_is_broken_off_harms_nothing():
    """SIGKILL for muster or for musterd while a snapshot is saved: the one of before stays whole, the next one is."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        for i in range(4):
            cluster.submit(tiny_job(cluster, name=f"job-{i}"))
        path = os.path.join(cluster.dir, "saved")
        save = [os.path.join(BUILD, "cli/muster"), "--coordinator", cluster.address, "snapshot", "save", path]
        check(subprocess.run(save, timeout=30 * SLOW).returncode == 0, "the first one is not saved")
        before = open(path, "rb").read()
        begun = lambda: [name for name in os.listdir(cluster.dir) if name.startswith("saved.tmp")]
        for victim in ("muster", "musterd"):
            cluster.coordinator.kill(signal.SIGSTOP)  # so it is under way for certain
            saving = subprocess.Popen(save, stderr=subprocess.PIPE, text=True)
            cluster.wait_until(begun, 20, "it does not begin to save")
            if victim == "muster":
                saving.kill()
                saving.wait()
                (left,) = begun()
                os.unlink(os.path.join(cluster.dir, left))
                cluster.coordinator.kill(signal.SIGCONT)
            else:
                cluster.coordinator.kill()
                cluster.coordinator.wait()
                told = saving.communicate(timeout=30 * SLOW)[1]
                check(saving.returncode == 3 and told.count("\n") == 1, f"exit {saving.returncode}: {told}")
                check(not begun(), "what was begun is left behind")
                cluster.start_coordinator()
            check(open(path, "rb").read() == before, "the snapshot of before was touched")
            check(subprocess.run(save, timeout=30 * SLOW).returncode == 0, "it is not saved afterwards")
            before = open(path, "rb").read()
        restored = os.path.join(cluster.dir, "restored")
        restore = [os.path.join(BUILD, "cli/muster"), "snapshot", "restore", path, "--data-dir", restored]
        check(subprocess.run(restore, stdout=subprocess.DEVNULL, timeout=30 * SLOW).returncode == 0, "the last one cannot be restored")


def test_the_wall_clock_is_set_by_an_hour():
    """Forward and back, under the coordinator and a worker, with a restart in between: nobody is lost and the bits are the same."""
    with Cluster() as cluster:
        clock = os.path.join(cluster.dir, "clock")

        def set_by(seconds):
            with open(clock, "r+b" if os.path.exists(clock) else "w+b") as file:
                file.write(seconds.to_bytes(8, "little", signed=True))

        set_by(0)
        shifted = {"LD_PRELOAD": os.path.join(BUILD, "tests/lib/libshifted_clock.so"), "MU_CLOCK_SHIFT": clock}
        cluster.start_coordinator(flags=FAST, env=shifted)
        cluster.submit(tiny_job(cluster, steps=300, workers__min=2))
        with cluster.slowed():
            for env in (shifted, None):
                cluster.start_worker(env=env)
            cluster.wait_step(5)
            made = cluster.job().created_wall_us
            for seconds in (3600, -3600, 3600):
                set_by(seconds)
                cluster.wait_step(cluster.job().steps_done + 5)
                if seconds < 0:  # records of the future are read
                    cluster.coordinator.kill()
                    cluster.coordinator.wait()
                    cluster.start_coordinator(flags=FAST, env=shifted)
                    cluster.wait_step(cluster.retry(cluster.job).steps_done + 5)
        check(cluster.wait_finished() == reference(steps=300), "the weights differ")
        job = cluster.job()
        check(job.generations <= 1 and job.workers_lost == 0, f"{job.workers_lost} lost, {job.generations} generations")
        check(3500 < (job.ended_wall_us - made) * 1e-6 < 7000, "the clock was not set")


def test_restored_snapshot_takes_back_workers_that_are_ahead():
    """Saved early, restored late: the job goes on from what the workers hold, and no number is given twice."""
    def muster(*args, code=0):
        done = subprocess.run([os.path.join(BUILD, "cli/muster"), "--coordinator", cluster.address, *args], capture_output=True, text=True, timeout=30 * SLOW)
        check(done.returncode == code, f"muster {' '.join(args)}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    with Cluster() as cluster, contextlib.ExitStack() as while_slow:
        while_slow.enter_context(cluster.running(2, steps=300))
        saved, store = os.path.join(cluster.dir, "saved"), os.path.join(cluster.dir, "store")
        muster("snapshot", "save", saved)
        check(stat.S_IMODE(os.stat(saved).st_mode) == 0o600, "others can read the snapshot")
        before = cluster.job().generation
        cluster.start_worker()  # two generations that the snapshot does not know
        cluster.wait_event(lambda e: e.kind == "generation_go" and "3 workers" in e.text)
        cluster.workers[0].kill()
        cluster.wait_event(lambda e: e.kind == "generation_go" and "2 workers continue" in e.text)
        ahead = cluster.job()
        check(ahead.generation >= before + 2, f"generation {ahead.generation} after {before}")
        cluster.wait_step(ahead.steps_done + 10)
        cluster.coordinator.kill(signal.SIGTERM)
        cluster.coordinator.wait()
        check("holds records already" in muster("snapshot", "restore", saved, "--data-dir", store, code=5), "not told")
        cut = os.path.join(cluster.dir, "cut")
        with open(saved, "rb") as whole, open(cut, "wb") as part:
            part.write(whole.read()[:-5])
        told = muster("snapshot", "restore", cut, "--data-dir", cut + ".d", code=1)
        check("cut off" in told and cut in told, told)
        check(not os.path.exists(cut + ".d"), "a data directory was made for a snapshot that is none")
        shutil.rmtree(store)
        said = muster("snapshot", "restore", saved, "--data-dir", store)
        check("epoch 1" in said, said)
        last = max(e.number for e in cluster.events)
        cluster.watch_stop.set()  # numbers jump
        cluster.start_coordinator(flags=["--heartbeat-ms", "100", "--lost-ms", "6000", "--reattach-grace-ms", "2000"])  # slow workers come back slowly
        cluster.wait_until(lambda: cluster.job().world == 2 and cluster.job().steps_done > ahead.steps_done + 10, 30, "the workers did not go on")
        after = cluster.job()
        check(after.generation == (1 << 40) + 1, f"generation {after.generation}")
        events = muster("events", "-o", "json").splitlines()
        check(all(json.loads(e)["number"] > last for e in events), "an event's number was given twice")
        check(any("store_restored" in e for e in events), "not told")
        while_slow.close()
        cluster.wait_until(lambda: cluster.job().state == pb.JOB_STATE_FINISHED, 30, "the job did not finish")
        check(cluster.job().weights_sha256.hex() == reference(steps=300), "the weights differ from the undisturbed run's")
        check(cluster.job().replayed_steps == 0, "steps were done twice")


def test_a_lost_job_is_rebuilt_from_its_checkpoints():
    with Cluster() as cluster:
        with cluster.running(2, steps=200):
            cluster.wait_event("checkpoint_committed")
            (saved, *_) = [c for c in cluster.checkpoints() if c.state == pb.CHECKPOINT_STATE_COMMITTED]
            path = os.path.dirname(saved.dir)
            for process in (cluster.coordinator, *cluster.workers):
                process.kill()
                process.wait()
        store = os.path.join(cluster.dir, "store")
        shutil.rmtree(store)
        argv = [os.path.join(BUILD, "cli/muster"), "catalog", "rebuild", path, "--job", "tiny", "--data-dir", store]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30 * SLOW)
        check(done.returncode == 0 and "checkpoints, the newest of step" in done.stdout, f"{done.stdout}{done.stderr}")
        again = subprocess.run(argv, capture_output=True, text=True, timeout=30 * SLOW)
        check(again.returncode == 5 and "has a job 'tiny' already" in again.stderr, f"{again.stdout}{again.stderr}")
        other = [*argv[:-3], "nobody", "--data-dir", store + ".d"]
        none = subprocess.run(other, capture_output=True, text=True, timeout=30 * SLOW)
        check(none.returncode == 4 and "no checkpoint of job 'nobody'" in none.stderr, f"{none.stdout}{none.stderr}")
        check(not os.path.exists(store + ".d"), "a data directory was made for a job that is not there")
        cluster.watch_stop.set()  # events begin anew
        cluster.start_coordinator()
        check(cluster.job().steps_done >= saved.step, f"step {cluster.job().steps_done}, saved was {saved.step}")
        for _ in range(2):
            cluster.start_worker()
        cluster.wait_until(lambda: cluster.job().state == pb.JOB_STATE_FINISHED, 30, "the job did not finish")
        check(cluster.job().weights_sha256.hex() == reference(steps=200), "the weights differ from the undisturbed run's")


if __name__ == "__main__":
    main([test_options_are_judged, test_rates_that_were_probed_are_predicted_by, test_port_and_directory_in_use_are_told,
          test_sigkill_loses_nothing_that_was_acknowledged,
          test_sigterm_ends_in_good_order_and_workers_go_on, test_idle_connections_do_not_keep_others_out,
          test_unknown_method_and_malformed_request_are_answered_at_once, test_example_client_runs_a_job,
          test_a_snapshot_that_is_broken_off_harms_nothing, test_the_wall_clock_is_set_by_an_hour,
          test_restored_snapshot_takes_back_workers_that_are_ahead, test_a_lost_job_is_rebuilt_from_its_checkpoints])
