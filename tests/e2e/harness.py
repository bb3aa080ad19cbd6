"""Real processes for end-to-end tests: a coordinator, workers, faults, and what the service says about them.

    with Cluster(build, data) as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=30))
        cluster.start_worker(); cluster.start_worker()
        job = cluster.wait_over()

Every wait has a limit and is driven by the service's own event stream; nothing sleeps for a guess. On failure `dump()` prints logs.
"""

import contextlib
import ctypes
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import grpc


def compile_protos(build, root):
    """Python messages from our .proto files, made once per build folder."""
    out = os.path.join(build, "python")
    protos = [os.path.join(root, "proto/muster/v1", name) for name in ("job.proto", "service.proto", "token.proto", "recall.proto", "probe.proto")]
    marker = os.path.join(out, "muster/v1/service_pb2.py")
    if not os.path.exists(marker) or any(os.path.getmtime(p) > os.path.getmtime(marker) for p in protos):
        os.makedirs(out, exist_ok=True)
        subprocess.run(["protoc", "-I", os.path.join(root, "proto"), "--python_out", out, *protos], check=True)
    sys.path.insert(0, out)


ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
BUILD = os.path.abspath(os.environ.get("MU_BUILD", os.path.join(ROOT, "build")))
compile_protos(BUILD, ROOT)
from muster.v1 import job_pb2 as pb  # noqa: E402
from muster.v1 import service_pb2 as api  # noqa: E402

COUNTED = ["--heartbeat-ms", "100", "--reattach-grace-ms", "300", "--rebalance-ms", "0"]  # generations are; the speeds of a busy machine are not
FAST = [*COUNTED, "--suspect-ms", "20000", "--lost-ms", "60000"]  # nobody is lost for being slow: deaths are seen by broken streams
LOST_S = 3
STRICT = [*COUNTED, "--suspect-ms", "1000", "--lost-ms", "3000"]  # where somebody is to be lost who says nothing, or who never comes back
RUNNER = os.environ.get("MU_RUNNER", "").split()  # e.g. a sanitizer's wrapper
SANITIZED = float(os.environ.get("MU_SLOW", "1")) > 1
SLOW = 4 * float(os.environ.get("MU_SLOW", "1"))  # stretches every limit: they end what hangs, and measure nothing


class Failure(Exception):
    pass


def tiny_job(cluster, name="tiny", steps=30, leaves=8, checkpoint_every=10, **changes):
    """A GPT of 30,000 parameters: milliseconds a step, every mechanism of a large one."""
    spec = pb.JobSpec(
        name=name,
        model=pb.ModelSpec(family=pb.MODEL_FAMILY_GPT2, layers=2, heads=2, channels=32, context=32, vocab=256, dropout=0.1),
        data=pb.DataSpec(path=cluster.data, tokens=pb.TOKEN_FORMAT_BYTES, holdout=0.1),
        batch=pb.BatchSpec(sequences=leaves * 2, micro=1, accumulate=2, length=32),
        steps=steps,
        optimizer=pb.OptimizerSpec(lr=1e-3, warmup=5),
        workers=pb.WorkerPolicy(min=1, max=64),
        checkpoint=pb.CheckpointPolicy(path=os.path.join(cluster.dir, "ckpt-" + name), every=checkpoint_every, keep=3),
        eval=pb.EvalPolicy(every=10, sequences=4),
    )
    for key, value in changes.items():
        target, field = spec, key
        while "__" in field:
            head, field = field.split("__", 1)
            target = getattr(target, head)
        setattr(target, field, value)
    return spec


def connect(address, credentials=None):
    """A connection of its own: one that another channel failed to make a moment ago does not count against it."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(address, credentials, options=options) if credentials else grpc.insecure_channel(address, options=options)


class Guardian:
    """Lets no process outlive this one, also when this one is killed. In a session of its own: what ends us does not end it first."""

    def __init__(self):
        self.lock, self.popen = threading.Lock(), None

    def watch(self, pid):
        with self.lock:
            if self.popen is None:
                self.popen = subprocess.Popen([sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "guardian.py")],
                                              stdin=subprocess.PIPE, bufsize=0, start_new_session=True)
            self.popen.stdin.write(b"%d\n" % pid)


GUARDIAN = Guardian()


class Process:
    def __init__(self, cluster, name, argv, env=None):
        self.name, self.log = name, os.path.join(cluster.dir, name + ".log")
        full = dict(os.environ, **(env or {}))
        self.signals, self.held, self.trained = threading.Lock(), False, False
        with open(self.log, "ab") as log:
            self.popen = subprocess.Popen(RUNNER + argv, stdout=log, stderr=log, env=full, cwd=cluster.dir)
        GUARDIAN.watch(self.pid)

    @property
    def pid(self):
        return self.popen.pid

    def alive(self):
        return self.popen.poll() is None

    def kill(self, sig=signal.SIGKILL):
        with self.signals:
            self.held = sig == signal.SIGSTOP or (self.held and sig != signal.SIGCONT)
            if self.alive():
                os.kill(self.pid, sig)

    def pause(self, paused):
        """Stops or continues it, unless the test itself holds it."""
        with self.signals:
            if not self.held and self.alive():
                os.kill(self.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    def trains(self):
        """Has it ever been a member of a generation?"""
        self.trained = self.trained or bool(re.search(r"generation \d+: go", log_of(self)))
        return self.trained

    def wait(self, limit_s=20):
        try:
            return self.popen.wait(limit_s * SLOW)
        except subprocess.TimeoutExpired:
            raise Failure(f"{self.name} (pid {self.pid}) did not end within {limit_s * SLOW:.0f} s") from None


class Cluster:
    def __init__(self, data=None, keep=False, flags=FAST):
        self.dir = tempfile.mkdtemp(prefix="muster-e2e-")
        self.keep = keep
        self.data = data or os.path.join(self.dir, "data.txt")
        if not data:
            with open(self.data, "w") as f:
                for i in range(4000):
                    f.write(f"line {i}: the quick brown fox number {i * i % 997} jumps over {i % 13} lazy dogs\n")
        self.coordinator, self.address, self.workers, self.events = None, None, [], []
        self.options = flags  # musterd's, unless it is started with others
        self.count, self.left = 0, 1.0
        self.restarts = 0
        self.new_events = queue.Queue()
        self.watch_stop = threading.Event()
        self.watcher = None
        self.credentials = None  # of the calls and the watch: plaintext

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if isinstance(value, Exception):
            value.cluster = self.summary()
        self.watch_stop.set()
        for process in [self.coordinator, *self.workers]:
            if process and process.alive():
                process.kill(signal.SIGCONT)
                process.kill()
                process.wait()
        if kind and not issubclass(kind, SystemExit):
            self.dump()
        if not (self.keep or kind):
            shutil.rmtree(self.dir, ignore_errors=True)

    def summary(self):
        """For the one line that says what failed: jobs and newest events, as seen from here."""
        if not self.address:
            return "no coordinator"
        try:
            jobs = self.call("ListJobs", api.ListJobsRequest(), api.ListJobsResponse, timeout_s=2 / SLOW).jobs
            told = [f"{job.name}: {pb.JobState.Name(job.state)[10:]} {pb.JobPhase.Name(job.phase)[10:]} generation {job.generation}, "
                    f"{job.world} of {job.attached} workers, step {job.steps_done} of {job.spec.steps} {job.text}".strip() for job in jobs]
        except (grpc.RpcError, ValueError) as error:
            told = [f"no jobs: {str(error.code() if isinstance(error, grpc.RpcError) else error)}"]
        return "; ".join(told + [f"event {event.number} {event.kind}" for event in self.events[-6:]])

    def dump(self):
        print(f"--- logs in {self.dir}", file=sys.stderr)
        for event in self.events[-40:]:
            print(f"event {event.number} {event.kind}: {event.text}", file=sys.stderr)
        for name in sorted(os.listdir(self.dir)):
            if name.endswith(".log"):
                with open(os.path.join(self.dir, name), errors="replace") as f:
                    lines = f.readlines()[-15:]
                print(f"--- {name}\n{''.join(lines)}", file=sys.stderr)

    # ---- processes ----

    def start_coordinator(self, fault=None, flags=None, env=None):
        """Starts (or restarts, on the same address, store and flags) musterd and returns when it serves."""
        self.options = flags or self.options
        address_file = os.path.join(self.dir, "address")
        if os.path.exists(address_file):
            os.unlink(address_file)
        listen = self.address or "127.0.0.1:0"
        argv = [os.path.join(BUILD, "coordinator/musterd"), "--data-dir", os.path.join(self.dir, "store"), "--listen", listen,
                "--address-file", address_file, *self.options]
        self.coordinator = Process(self, "musterd", argv, self.fault_env(fault, env))
        self.wait_until(lambda: os.path.exists(address_file) and open(address_file).read().strip(), 15,
                        "musterd wrote no address", watch=self.coordinator)
        self.address = open(address_file).read().strip()
        if self.watcher is None:
            self.watcher = threading.Thread(target=self.watch, daemon=True)
            self.watcher.start()
        return self.coordinator

    def keep_coordinator(self):
        """From now on a coordinator that dies is started again, on its store and address, without a fault."""
        def keep():
            while not self.watch_stop.wait(0.02):
                if self.coordinator and not self.coordinator.alive():
                    self.restarts += 1
                    try:
                        self.start_coordinator()
                    except Failure as error:
                        self.new_events.put(error)
                        return
        threading.Thread(target=keep, daemon=True).start()

    def retry(self, action, limit_s=20, also=()):
        """Repeats a request while the coordinator is away (or answers with one of `also`)."""
        codes = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, *also)
        deadline = time.monotonic() + limit_s * SLOW
        while True:
            try:
                return action()
            except grpc.RpcError as error:
                if error.code() not in codes or time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def fault_env(self, fault, env=None):
        extra = dict(env or {})
        if fault:
            extra["MU_FAULT_AT"] = fault
            extra["MU_FAULT_LOG"] = os.path.join(self.dir, "faults")
        return extra

    def start_worker(self, job="tiny", name=None, fault=None, threads=1, env=None, flags=(), program="worker/muster-worker"):
        self.count += 1
        argv = [os.path.join(BUILD, program), "--coordinator", self.address, "--job", job, "--threads", str(threads),
                "--unix-dir", self.dir, "--backoff-max", "400", *flags]
        if name:
            argv += ["--name", name]
        worker = Process(self, f"worker{self.count}", argv, self.fault_env(fault, env))
        worker.held = bool(fault) and fault.endswith(",stop")  # it stops itself: slowed() must not continue it
        self.workers.append(worker)
        return worker

    def steps_left(self):
        """The share of its steps that the job nearest to its end still has before it. While nobody says, it goes on: less and less."""
        try:
            jobs = self.call("ListJobs", api.ListJobsRequest(page_size=1000), api.ListJobsResponse, timeout_s=0.2 / SLOW).jobs if self.address else []
        except grpc.RpcError:
            self.left = max(min(self.left, 0.15), 0.9 * self.left)
            return self.left
        self.left = min((1 - job.steps_done / job.steps for job in jobs if job.steps_done < job.steps), default=1.0)
        return self.left

    @contextlib.contextmanager
    def slowed(self):
        """Workers that train run a tenth of the time, and less the nearer their job is to its end: it outlasts what the test
        does to it, however fast the machine. Who joins does so at full speed, and trains slowly afterwards. With a sanitizer,
        steps are slow enough until the end comes near."""
        stop = threading.Event()
        least, run = (0.0, 0.05) if SANITIZED else (0.045, 0.005)

        def throttle():
            while not stop.is_set():
                slow = [worker for worker in self.workers if worker.alive() and worker.trains()]
                for worker in slow:
                    worker.pause(True)
                stop.wait(min(1.2, max(least, 0.01 / self.steps_left() ** 2)))  # well before it would count as lost
                for worker in slow:
                    worker.pause(False)
                stop.wait(run)
            for worker in self.workers:
                worker.pause(False)

        thread = threading.Thread(target=throttle, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    @contextlib.contextmanager
    def running(self, workers, **changes):
        """A coordinator and tiny_job with these changes, on so many workers, all in its first generation, slowed while the block lasts."""
        self.start_coordinator()
        self.submit(tiny_job(self, workers__min=workers, **changes))
        with self.slowed():
            started = [self.start_worker() for _ in range(workers)]
            self.wait_together(workers)
            yield started

    def wait_together(self, workers, job="tiny"):
        """Waits until so many step; from then on fewer may."""
        self.wait_until(lambda: self.job(job).world == workers and self.job(job).steps_done >= 5, 30, "the workers did not start together")
        self.call("ScaleJob", api.ScaleJobRequest(job=job, min=1), api.ScaleJobResponse)

    def faults_reached(self):
        path = os.path.join(self.dir, "faults")
        return open(path).read().split("\n")[:-1] if os.path.exists(path) else []

    # ---- the service ----

    def call(self, method, request, response_type, timeout_s=10):
        with connect(self.address, self.credentials) as channel:
            stub = channel.unary_unary(f"/muster.v1.MusterService/{method}", request_serializer=lambda m: m.SerializeToString(),
                                       response_deserializer=response_type.FromString)
            return stub(request, timeout=timeout_s * SLOW)

    def submit(self, spec):
        return self.call("SubmitJob", api.SubmitJobRequest(spec=spec), api.SubmitJobResponse)

    def job(self, name="tiny"):
        return self.call("GetJob", api.GetJobRequest(name=name), api.GetJobResponse).job

    def list_workers(self, job=""):
        return self.call("ListWorkers", api.ListWorkersRequest(job=job), api.ListWorkersResponse).workers

    def checkpoints(self, job="tiny"):
        return self.call("ListCheckpoints", api.ListCheckpointsRequest(job=job), api.ListCheckpointsResponse).checkpoints

    def checkpoint(self, job="tiny"):
        """As soon as the job steps: between generations none can be ordered."""
        order = lambda: self.call("TriggerCheckpoint", api.TriggerCheckpointRequest(job=job), api.TriggerCheckpointResponse).number
        return self.retry(order, also=[grpc.StatusCode.FAILED_PRECONDITION])

    def drain(self, worker, reason="test"):
        self.call("DrainWorker", api.DrainWorkerRequest(worker=worker, reason=reason), api.DrainWorkerResponse)

    def scale(self, most, job="tiny"):
        self.call("ScaleJob", api.ScaleJobRequest(job=job, max=most), api.ScaleJobResponse)

    def cancel(self, job="tiny", reason="test"):
        self.call("CancelJob", api.CancelJobRequest(name=job, reason=reason), api.CancelJobResponse)

    def watch(self):
        """Follows all events over restarts of the coordinator; each number exactly once, ascending, without a gap."""
        last = 0
        while not self.watch_stop.is_set():
            try:
                with connect(self.address, self.credentials) as channel:
                    stub = channel.unary_stream("/muster.v1.MusterService/WatchEvents",
                                                request_serializer=lambda m: m.SerializeToString(),
                                                response_deserializer=api.WatchEventsResponse.FromString)
                    for response in stub(api.WatchEventsRequest(after_event=last, follow=True), timeout=600):
                        event = response.event
                        if event.number != last + 1:
                            self.new_events.put(Failure(f"event {event.number} follows event {last}"))
                        last = event.number
                        self.new_events.put(event)
            except grpc.RpcError:
                self.watch_stop.wait(0.05)

    # ---- waiting ----

    def wait_until(self, condition, limit_s, what, watch=None):
        deadline = time.monotonic() + limit_s * SLOW
        while True:
            value = condition()
            if value:
                return value
            if watch is not None and not watch.alive():
                raise Failure(f"{what}: {watch.name} ended with {watch.popen.returncode}")
            if time.monotonic() > deadline:
                raise Failure(f"{what} within {limit_s * SLOW:.0f} s")
            time.sleep(0.01)

    def wait_event(self, match, limit_s=30, after=0):
        """The first event with number > after for which match(event) holds; `match` may be a kind."""
        test = match if callable(match) else lambda event: event.kind == match
        for event in self.events:
            if event.number > after and test(event):
                return event
        deadline = time.monotonic() + limit_s * SLOW
        while True:
            try:
                event = self.new_events.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                raise Failure(f"no event {match if not callable(match) else ''} within {limit_s * SLOW:.0f} s") from None
            if isinstance(event, Failure):
                raise event
            self.events.append(event)
            if event.number > after and test(event):
                return event

    def wait_step(self, step, job="tiny", limit_s=30):
        def reached():
            try:
                return self.job(job).steps_done >= step
            except grpc.RpcError:
                return False
        return self.wait_until(reached, limit_s, f"job {job} did not reach step {step}")

    def wait_over(self, job="tiny", limit_s=60):
        event = self.wait_event(lambda e: e.job == job and e.kind in ("job_finished", "job_failed", "job_cancelled"), limit_s)
        return self.retry(lambda: self.job(event.job))

    def wait_finished(self, job="tiny", limit_s=60):
        over = self.wait_over(job, limit_s)
        if over.state != pb.JOB_STATE_FINISHED:
            raise Failure(f"job {job} ended as {pb.JobState.Name(over.state)}: {over.text}")
        return over.weights_sha256.hex()


def undisturbed(spec_changes=None, data=None, workers=1):
    """SHA-256 of the final weights of the job run by workers that nothing happens to."""
    with Cluster(data) as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, **(spec_changes or {})))
        for _ in range(workers):
            cluster.start_worker()
        return cluster.wait_finished()


MOUNTS = None  # may this process mount? Asked once
REFERENCE = {}


def reference(**changes):
    """The undisturbed end of tiny_job with these changes; one run for all who ask."""
    key = tuple(sorted(changes.items()))
    if key not in REFERENCE:
        REFERENCE[key] = undisturbed(changes)
    return REFERENCE[key]


def check(condition, text):
    if not condition:
        raise Failure(text)


def run(cluster, *args, code, fragments=(), limit_s=30):
    """Runs muster. When it fails: one line, with all the fragments."""
    done = subprocess.run([os.path.join(BUILD, "cli/muster"), "--coordinator", cluster.address, *args], capture_output=True, text=True, timeout=limit_s * SLOW)
    shown = f"muster {' '.join(args)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    check(done.returncode == code, f"not exit {code}: {shown}")
    check(code == 0 or (done.stderr.count("\n") == 1 and not done.stdout), f"not one line: {shown}")
    for fragment in fragments:
        check(fragment in done.stderr, f"'{fragment}' is missing: {shown}")
    return done.stdout or done.stderr


def log_of(process):
    with open(process.log, errors="replace") as file:
        return file.read()


def refused_worker(worker, *fragments):
    """A worker that cannot work ends with 1 and says why in its last line."""
    check(worker.wait() == 1, f"{worker.name} ended with {worker.popen.returncode}")
    last = log_of(worker).rstrip("\n").rsplit("\n", 1)[-1]
    for fragment in fragments:
        check(fragment in last, f"'{fragment}' is missing in the last line: {last}")
    return last


def rpc_error(action):
    try:
        action()
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


def documented(heading, path="docs/operations.md"):
    """The commands that a section of the documents shows, in order."""
    with open(os.path.join(ROOT, path)) as f:
        section = f.read().split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0].split("\n### ", 1)[0]
    commands = [line[2:] for line in section.split("\n") if line.startswith("$ ")]
    check(commands, f"{path}, {heading}: no commands")
    return commands


class Skipped(Exception):
    """Raised by a test that this machine cannot run, with the reason."""


def needs_mounts(test):
    """For tests that mount file systems: in a namespace of this process, which nobody else sees and which ends with it."""
    def wrapped():
        global MOUNTS
        if MOUNTS is None:
            private = os.geteuid() == 0 and ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0  # CLONE_NEWNS
            MOUNTS = private and subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode == 0
        if not MOUNTS:
            raise Skipped("mounting needs root and the right to unshare namespaces")
        test()
    wrapped.__name__ = test.__name__
    return wrapped


def main(tests):
    """Runs the functions given (or those named on the command line) and prints one line each and a closing line."""
    wanted, failed, passed, skipped = sys.argv[1:], 0, 0, 0
    for test in tests:
        if wanted and test.__name__ not in wanted:
            continue
        start = time.monotonic()
        try:
            test()
            passed += 1
            print(f"ok   {test.__name__} ({time.monotonic() - start:.1f} s)", flush=True)
        except Skipped as reason:
            skipped += 1
            print(f"skip {test.__name__}: {reason}", flush=True)
        except Exception as error:  # noqa: BLE001: every failure of a test is reported and counted
            failed += 1
            seen = f" [{error.cluster}]" if hasattr(error, "cluster") else ""
            print(f"FAIL {test.__name__}: {type(error).__name__}: {error}{seen}", flush=True)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(1 if failed or not passed + skipped else 0)
