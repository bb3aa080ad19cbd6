#!/usr/bin/python3
"""Workers that compute on a GPU, an emulated one (muster-worker-sim): in fp32 the weights are those of workers on the CPU."""

import json
import os
import re

from gpu_jobs import SIM, SMALL, expect_equal, over_nccl, start, start_gpu_worker, with_nccl
from harness import BUILD, FAST, Cluster, check, log_of, main, pb, refused_worker, run, tiny_job, undisturbed
from test_http import get, http_address, metrics


def test_layouts_have_the_bits_of_the_cpu():
    for workers, changes in ((1, {}), (3, {}), (2, {"parallel__tp": 2}), (2, {"parallel__pp": 2}), (2, {"parallel__optimizer_sharding": True})):
        with Cluster() as cluster:
            start(cluster, workers, **changes)
            expect_equal(cluster)
            backends = {w.backend for w in cluster.list_workers()}
            check(backends <= {"cuda"}, f"workers say that they are {backends}")


def test_a_killed_worker_is_survived():
    with Cluster() as cluster:
        with cluster.slowed():
            workers = start(cluster, 2, workers__min=1, steps=30)
            cluster.wait_until(lambda: cluster.job().world == 2 and cluster.job().steps_done >= 1, 30, "two workers did not step together")
            workers[0].kill()
            cluster.wait_event(lambda e: e.kind == "generation_go" and "lost" in e.text)
        expect_equal(cluster, steps=30)


def test_a_job_is_rebased_from_cpu_to_gpu_and_back():
    """Each goes on from the first checkpoint of the one before, by order, and the record says so. The emulated GPU has the CPU's bits."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 1, "steps": 8, "checkpoint__keep": 100}))
        cluster.start_worker()
        whole = cluster.wait_finished()
        on_gpu = dict(program=SIM, flags=("--device", "cuda:0"), env={"CUDASIM_DELAY_US": "100"})
        for job, name, where in (("tiny", "gpu", on_gpu), ("gpu", "back", {})):
            own = [one for one in cluster.checkpoints(job) if one.state == pb.CHECKPOINT_STATE_COMMITTED and not one.borrowed_from]
            first = min(own, key=lambda one: one.step)
            said = run(cluster, "job", "rebase", job, "--checkpoint", str(first.number), name, code=0)
            check(f"job {name} begins at step {first.step}" in said and "numeric identity of its first worker" in said, said)
            cluster.coordinator.kill()  # the order is in the records
            cluster.coordinator.wait()
            cluster.start_coordinator()
            shown = run(cluster, "describe", "job", name, code=0)
            check(f"rebased      from step {first.step}, by" in shown and "first worker, which has not come yet" in shown, shown)
            cluster.start_worker(job=name, **where)
            check(cluster.wait_finished(name) == whole, f"job {name} has other weights")
            origin = cluster.job(name).origin
            shown = run(cluster, "describe", "job", name, code=0)
            check(origin.rebased_to and f"from numeric identity {origin.rebased_from.hex()} to {origin.rebased_to.hex()}" in shown, shown)
            check("goes on from step" in shown, shown)


BF16 = dict(SMALL, compute=pb.COMPUTE_BF16, steps=6)


def test_a_bf16_job_has_one_result_in_every_layout():
    """Stages, slices and replicas; then two workers, one of which is killed, which is another layout on the way."""
    found = {}
    for workers, changes in ((1, {}), (2, {"parallel__tp": 2}), (2, {"parallel__pp": 2}), (2, {"parallel__optimizer_sharding": True})):
        with Cluster() as cluster:
            start(cluster, workers, **{**BF16, **changes})
            found[str(changes)] = cluster.wait_finished()
    alone = found["{}"]
    check(set(found.values()) == {alone}, f"layouts have different weights: {found}")
    check(alone != undisturbed({**BF16, "compute": pb.COMPUTE_FP32}), "bf16 has the bits of fp32")
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **BF16))
        with cluster.slowed():
            workers = [start_gpu_worker(cluster) for _ in range(2)]
            cluster.wait_until(lambda: cluster.job().world == 2 and cluster.job().steps_done >= 1, 30, "two workers did not step together")
            workers[0].kill()
            cluster.wait_event(lambda e: e.kind == "generation_go" and "lost" in e.text)
        sha = cluster.wait_finished()
        check(sha == alone, f"weights {sha} after a loss differ from {alone}")


def test_a_bf16_job_is_not_given_to_a_cpu():
    """It is refused in one line, told once, before it has loaded anything; a GPU then does the job, and a rebase to fp32 lets a CPU go on."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **{**BF16, "steps": 4}))
        for name in ("cpu", "cpu"):
            worker = cluster.start_worker(name=name)
            refused_worker(worker, "compute: job 'tiny' is in bf16", "'cpu'", "--device cuda:N", "--compute fp32")
            check("loading data" not in log_of(worker), log_of(worker))
        cluster.wait_event(lambda e: e.kind == "worker_refused" and e.worker == "cpu" and "bf16" in e.text)
        start_gpu_worker(cluster)
        cluster.wait_finished()
        check(len([e for e in cluster.events if e.kind == "worker_refused"]) == 1, "the same refusal is told twice")
        check("bf16, by GPUs alone" in run(cluster, "describe", "job", "tiny", code=0), "describe does not say bf16")
        first = str(min(cluster.checkpoints(), key=lambda one: one.step).number)
        said = run(cluster, "job", "branch", "tiny", "--checkpoint", first, "same", "--compute", "fp32", code=2)
        check("--compute" in said, said)
        said = run(cluster, "job", "rebase", "tiny", "--checkpoint", first, "moved", "--compute", "half", code=2)
        check("fp32 or bf16" in said, said)
        run(cluster, "job", "rebase", "tiny", "--checkpoint", first, "moved", "--compute", "fp32", code=0)
        check("bf16" not in run(cluster, "describe", "job", "moved", code=0), "still bf16")
        cluster.start_worker(job="moved")
        cluster.wait_finished("moved")
        check([e for e in cluster.events if e.kind == "job_branched" and "in fp32" in e.text], "the event does not say fp32")


def test_bf16_on_another_class_of_gpu_is_another_identity():
    with Cluster() as cluster:
        start(cluster, 1, **{**BF16, "steps": 100000})
        cluster.wait_until(lambda: cluster.job().steps_done >= 1, 30, "no step")
        older = start_gpu_worker(cluster, "cuda:1", env={"CUDASIM_DEVICES": "2:NVIDIA A100-SIM:8.0"})
        refused_worker(older, "numeric identity", "differs from the job's")
        cluster.wait_event(lambda e: e.kind == "worker_refused" and "numeric identity" in e.text)


def test_a_gpu_that_fails_takes_only_its_worker_along():
    """Errors that stay: whatever the worker calls next fails of them, too."""
    for place, words in (("kernel:600", "illegal memory access"), ("kernel:600=214", "uncorrectable ECC error"), ("kernel:600=719", "launch failure")):
        with Cluster() as cluster:
            cluster.start_coordinator()
            cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 2}))
            start_gpu_worker(cluster)
            broken = start_gpu_worker(cluster, env={"CUDASIM_FAIL": place})
            lost = cluster.wait_event("worker_lost")
            check("GPU 1" in lost.text and words in lost.text, lost.text)
            refused_worker(broken, "GPU 1", words)
            start_gpu_worker(cluster)
            expect_equal(cluster)


def goes_on_without(env, *words):
    """A second worker that can never take part, whatever it tries, is kept out in the end, with one line that says why; the first one goes on."""
    steps = 24
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*FAST, "--crash-limit", "1"])
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 1, "steps": steps}))
        with cluster.slowed():
            start_gpu_worker(cluster)
            cluster.wait_until(lambda: cluster.job().steps_done >= 1, 30, "no step")
            start_gpu_worker(cluster, env=env)
            kept_out = cluster.wait_event("worker_quarantined")
            check(all(word in kept_out.text for word in words), kept_out.text)
        expect_equal(cluster, steps=steps)


def test_memory_that_another_program_takes_keeps_only_its_worker_out():
    goes_on_without({"CUDASIM_FAIL": ",".join(["cuMemCreate:1"] * 300)}, "gradient buffers: GPU 1: no memory for 2 MiB more", "3584 of 4096 MiB are free",
                    "does another program use it?", "parallel.tp times parallel.pp")


@with_nccl
def test_nccl_that_never_connects_keeps_only_its_worker_out():
    goes_on_without({"CUDASIM_FAIL": ",".join(["nccl init:1"] * 50)}, "NCCL during the meeting of 2 ranks", "NCCL_SOCKET_IFNAME")


def test_hosts_that_cannot_reach_each_other_are_not_used_together():
    """The second worker's network has no route to the first one's address: both live, the link is to blame, and the first one goes on."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 1, "steps": 24}))

        def begin(index):
            flags = ("--device", f"cuda:{index}", "--host-id", f"h{index}", "--data-addr", f"127.0.0.{2 + index}", "--connect-timeout", "500")
            env = {"CUDASIM_DEVICES": "16", "CUDASIM_DELAY_US": "100", "LD_PRELOAD": os.path.join(BUILD, "tests/lib/libunreachable.so"),
                   "MU_UNREACHABLE": f"127.0.0.{3 - index}"}
            return cluster.start_worker(program=SIM, flags=flags, env=env)

        with cluster.slowed():
            begin(0)
            cluster.wait_until(lambda: cluster.job().steps_done >= 1, 30, "no step")
            begin(1)
            link = cluster.wait_event("link_failed")
            check("cannot connect to 127.0.0.2:" in link.text and "No route to host" in link.text and "--data-addr" in link.text, link.text)
        expect_equal(cluster, steps=24)
        check(not any(e.kind == "worker_lost" for e in cluster.events), "a worker was lost")


def test_a_gpu_is_one_workers():
    with Cluster() as cluster:
        first = start(cluster, 1, steps=100000)[0]
        cluster.wait_until(lambda: cluster.job().steps_done >= 1, 30, "no step")
        second = start_gpu_worker(cluster, "cuda:0", env={"CUDASIM_DEVICES": "16"})
        cluster.wait_until(lambda: "is in use by the live worker" in log_of(second), 30, f"not refused:\n{log_of(second)}")
        check("GPU-" in log_of(second) and cluster.job().world == 1, log_of(second))
        first.kill()
        cluster.wait_until(lambda: "attached as" in log_of(second), 60, "the GPU is free again, and not taken")


def test_all_gpus_of_a_host():
    """One supervisor, one worker for each GPU."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 2}))
        supervisor = cluster.start_worker(program=SIM, name="host", flags=("--device", "all"), env={"CUDASIM_DEVICES": "2", "CUDASIM_DELAY_US": "100"})
        expect_equal(cluster)
        check(supervisor.wait() == 0, log_of(supervisor))
        attached = {e.worker for e in cluster.events if e.kind == "worker_attached"}
        check(attached == {"host-cuda0", "host-cuda1"}, f"attached: {attached}")


@with_nccl
def test_an_abort_that_hangs_is_ended_by_the_supervisor():
    """Of two GPUs of a host one's exchange fails, and NCCL cannot be ended there: the supervisor kills that worker at once, the other one goes on, and the
    killed one comes back as another process and takes part again."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 1, "steps": 40}))
        env = {"CUDASIM_DEVICES": "2", "CUDASIM_DELAY_US": "100", "CUDASIM_FAIL": "nccl async:9,nccl abort hang:1",
               "CUDASIM_FAIL_ONCE": os.path.join(cluster.dir, "failed")}
        supervisor = cluster.start_worker(program=SIM, name="host", flags=("--device", "all"), env=env)
        with cluster.slowed():
            cluster.wait_until(lambda: over_nccl(supervisor), 60, "no NCCL between the two")
            told = cluster.wait_event("worker_exited")
            check("was killed, for it was stuck: 1 of the communicators did not abort in time" in told.text and "it is started again" in told.text, told.text)
            lost = [e for e in cluster.events if e.kind == "worker_lost"]
            check(len(lost) == 1 and lost[0].worker == told.worker and "says its supervisor" in lost[0].text, f"{lost}")
            back = cluster.wait_event(lambda e: e.kind == "worker_attached" and e.worker == told.worker, after=lost[0].number)
            cluster.wait_event(lambda e: e.kind == "generation_go" and "2 workers" in e.text, after=back.number)
        expect_equal(cluster, steps=40)
        check(supervisor.wait() == 0, log_of(supervisor))


class Driver:
    """What the stand-in for the driver's management library tells of the GPUs of workers."""

    def __init__(self, cluster):
        self.path = os.path.join(cluster.dir, "driver")
        libraries = os.path.join(cluster.dir, "lib")
        os.makedirs(libraries)
        os.symlink(os.path.join(BUILD, "tests/cudasim/libnvml_stand_in.so"), os.path.join(libraries, "libnvidia-ml.so.1"))
        self.env = {"LD_LIBRARY_PATH": libraries, "CUDASIM_NVML": self.path}

    def tell(self, *lines):
        with open(self.path, "a") as file:
            file.write("".join(line + "\n" for line in lines))


def gpu_of(address, worker):
    signs = json.loads(get(address, f"/api/v1/workers?worker={worker}")[1])["workers"][0].get("vitals") or {}
    return signs.get("gpu") or {}


def test_health_of_a_gpu_is_told_and_one_that_failed_is_left():
    """Of two GPUs one falls off the bus while kernels run on it: its worker says so and leaves before anybody waits for it, the other one goes on."""
    with Cluster() as cluster:
        cluster.start_coordinator(flags=["--http", "127.0.0.1:0"])
        address = http_address(cluster)
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 1, "steps": 12}))
        driver = Driver(cluster)
        driver.tell("set nvmlDeviceGetUtilizationRates 97", "set used 75161927680", "set total 150323855360", "set nvmlDeviceGetPowerUsage 650000",
                        "set nvmlDeviceGetTemperature 88", "set nvmlDeviceGetCurrentClocksThrottleReasons 64", "field 144 1", "field 4 2")
        with cluster.slowed():
            first, second = (cluster.start_worker(program=SIM, name=f"g{i}", flags=("--device", f"cuda:{i}", "--vitals-every", "50"),
                                                  env={"CUDASIM_DEVICES": "2", **env}) for i, env in enumerate(({}, driver.env)))
            cluster.wait_until(lambda: cluster.job().world == 2 and gpu_of(address, "g1").get("temperature_celsius"), 30, "nothing is told of the GPU")
            page = metrics(address)
            expected = {'muster_gpu_count{job="tiny"}': 1, 'muster_gpu_unwatched{job="tiny"}': 1, 'muster_gpu_utilisation_ratio{job="tiny"}': 0.97,
                        'muster_gpu_memory_ratio{job="tiny"}': 0.5, 'muster_gpu_power_watts{job="tiny"}': 650, 'muster_gpu_throttled{job="tiny"}': 1,
                        'muster_gpu_temperature_celsius{job="tiny"}': 88, 'muster_gpu_rows_bad{job="tiny"}': 1, 'muster_gpu_ecc_uncorrected{job="tiny"}': 2,
                        'muster_worker_gpu_temperature_celsius{job="tiny",worker="g1"}': 88, "muster_gpu_failures_total": 0}
            for name, value in expected.items():
                check(page.get(name) == value, f"{name} is {page.get(name)}, not {value}")
            shown = run(cluster, "describe", "worker", "g1", code=0)
            check("busy 97 %" in shown and "88 C" in shown and "thermal slowdown by hardware" in shown, shown)
            check("it comes with NVIDIA's driver" in run(cluster, "describe", "worker", "g0", code=0), "g0 has no driver's library")
            driver.tell("xid 63", "xid 79")
            lost = cluster.wait_event("worker_lost")
            check(lost.worker == "g1" and "Xid 79, GPU has fallen off the bus" in lost.text, lost.text)
            refused_worker(second, "Xid 79")
        cluster.wait_until(lambda: metrics(address)["muster_gpu_failures_total"] == 1, 10, "the failure is not counted")
        check(metrics(address)["muster_gpu_xids_total"] == 2, "errors of the driver are not counted")
        expect_equal(cluster, steps=12)
        check(first.wait() == 0, log_of(first))


def test_a_driver_that_hangs_harms_nobody():
    with Cluster() as cluster:
        cluster.start_coordinator()
        driver = Driver(cluster)
        driver.tell("hang nvmlDeviceGetMemoryInfo")
        cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 1}))
        with cluster.slowed():
            worker = start_gpu_worker(cluster, env=driver.env)
            cluster.wait_until(lambda: "cudasim: nvmlDeviceGetMemoryInfo hangs" in log_of(worker), 30, "the driver was never asked")
        expect_equal(cluster)
        check(worker.wait() == 0, log_of(worker))


def test_checkpoints_pass_between_cpu_and_gpu():
    """Written by GPUs, verified, gone on from by a CPU, and the other way round. A job of both kinds at once is one job: their identity is the same."""
    for first, second in ((start_gpu_worker, Cluster.start_worker), (Cluster.start_worker, start_gpu_worker)):
        with Cluster() as cluster:
            cluster.start_coordinator()
            cluster.submit(tiny_job(cluster, **{**SMALL, "workers__min": 2, "steps": 20}))
            with cluster.slowed():
                workers = [first(cluster), first(cluster)]
                cluster.wait_event("checkpoint_committed")
                for worker in workers:
                    worker.kill()
                    worker.wait()
            newest = max((c for c in cluster.checkpoints() if c.state == pb.CHECKPOINT_STATE_COMMITTED), key=lambda c: c.step)
            run(cluster, "checkpoint", "verify", newest.dir, code=0)
            second(cluster)
            first(cluster)
            cluster.wait_event(lambda e: e.kind == "generation_go" and "continue" in e.text and "at step 0" not in e.text)
            expect_equal(cluster, steps=20)


def test_what_cannot_compute_says_why_in_one_line():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **SMALL, parallel__tp=1, parallel__pp=1))
        for env, device, *fragments in (
                ({"CUDASIM_DRIVER_VERSION": "0"}, "cuda:0", "cuda:0", "no NVIDIA driver"),
                ({"CUDASIM_DRIVER_VERSION": "12040"}, "cuda:0", "up to 12.4", "needs 13.0", "update the driver"),
                ({"CUDASIM_DEVICES": "0"}, "cuda:0", "no GPU", "CUDA_VISIBLE_DEVICES"),
                ({"CUDASIM_DEVICES": "2"}, "cuda:2", "cuda:2", "cuda:0 to cuda:1"),
                ({"CUDASIM_DEVICES": "1:Old GPU:7.0"}, "cuda:0", "Old GPU", "compute capability 7.0", "-DCMAKE_CUDA_ARCHITECTURES=70"),
                ({"CUDASIM_FAIL": "cudaSetDevice:1"}, "cuda:0", "cannot be used", "busy or unavailable"),
                ({"CUDASIM_DEVICES": "1:Small GPU:9.0:100"}, "cuda:0", "512 MiB for the kernels' workspace", "100 of 100 MiB are free"),
                ({"CUDASIM_DEVICES": "1:Small GPU:9.0:516"}, "cuda:0", "parameters and moments", "are needed", "of 516 MiB are free", "parallel.tp times parallel.pp")):
            worker = start_gpu_worker(cluster, device, env=env)
            refused_worker(worker, *fragments)
        for env, *fragments in (({"CUDASIM_FAIL": "cudaHostAlloc:2"}, "2 MiB of pinned host memory", "ulimit -l"),
                                ({"CUDASIM_FAIL": "cudaHostAlloc:4"}, "numeric identity", "KiB of host memory"),
                                ({"CUDASIM_FAIL": "cudaStreamCreate:1"}, "GPU 0", "stream", "out of memory")):
            refused_worker(start_gpu_worker(cluster, "cuda:0", env=env), *fragments)
        worker = start_gpu_worker(cluster, "cuda:x")
        check(worker.wait() == 2 and "cuda:0, cuda:1" in log_of(worker), log_of(worker))
        worker = cluster.start_worker(flags=("--device", "cuda:1"), env={"CUDA_VISIBLE_DEVICES": ""})
        check(worker.wait() in (1, 2) and "cuda:1" in log_of(worker), log_of(worker))
    with Cluster() as cluster:  # the state fits, a micro-batch does not: which one would
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **{**SMALL, "batch__micro": 4096, "batch__sequences": 8192, "batch__length": 32, "parallel__tp": 1, "parallel__pp": 1}))
        last = refused_worker(start_gpu_worker(cluster, "cuda:0", env={"CUDASIM_DEVICES": "1:Small GPU:9.0:1024"}), "activations:", "MiB are needed", "free on cuda:0")
        needed, would = (int(found) for found in re.search(r"(\d+) MiB are needed.*batch.micro: \d+ with parallel.recompute: \w+ would need (\d+) MiB", last).groups())
        check(would < 512 < needed, last)


main([test_layouts_have_the_bits_of_the_cpu, test_a_killed_worker_is_survived, test_a_job_is_rebased_from_cpu_to_gpu_and_back,
      test_a_bf16_job_has_one_result_in_every_layout, test_a_bf16_job_is_not_given_to_a_cpu, test_bf16_on_another_class_of_gpu_is_another_identity,
      test_a_gpu_that_fails_takes_only_its_worker_along, test_memory_that_another_program_takes_keeps_only_its_worker_out,
      test_nccl_that_never_connects_keeps_only_its_worker_out, test_hosts_that_cannot_reach_each_other_are_not_used_together,
      test_a_gpu_is_one_workers, test_all_gpus_of_a_host,
      test_an_abort_that_hangs_is_ended_by_the_supervisor,
      test_health_of_a_gpu_is_told_and_one_that_failed_is_left, test_a_driver_that_hangs_harms_nobody,
      test_checkpoints_pass_between_cpu_and_gpu, test_what_cannot_compute_says_why_in_one_line])
