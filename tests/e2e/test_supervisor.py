#!/usr/bin/env python3
"""Several workers on one host under one supervisor: starts, deaths, restarts, signals, the service manager. One argument: only the tests
named."""

import os
import re
import signal
import socket
import subprocess

from harness import BUILD, SLOW, Cluster, Failure, Process, check, documented, log_of, main, reference, run, tiny_job

WORKER = os.path.join(BUILD, "worker/muster-worker")
LONG = 1000000  # steps that no machine makes while a test looks at them


def start_supervisor(cluster, slots=2, name="node", flags=(), env=None, job="tiny"):
    cluster.count += 1
    supervisor = Process(cluster, f"supervisor{cluster.count}", [
        WORKER, "--coordinator", cluster.address, "--job", job, "--device", "cpu", "--slots", str(slots), "--name", name, "--threads", "1",
        "--unix-dir", cluster.dir, *flags], env)
    cluster.workers.append(supervisor)
    return supervisor


def children(process):
    """name -> pid of the workers of a supervisor that live."""
    found = {}
    for pid in subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True).stdout.split():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                words = f.read().decode().split("\0")
            if "--name" in words and state_of(pid) != "Z":
                found[words[words.index("--name") + 1]] = int(pid)
        except OSError:
            pass
    return found


def state_of(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def is_gone(pid):
    return state_of(pid) in ("", "Z")


def members(cluster, count):
    """Waits until so many workers are members; name -> worker."""
    def look():
        workers = {w.name: w for w in cluster.list_workers() if w.state == 3}
        return workers if len(workers) == count else None
    return cluster.wait_until(look, 20, f"{count} members")


def begin(cluster, slots=2, flags=(), **changes):
    cluster.start_coordinator(flags=["--heartbeat-ms", "200", "--suspect-ms", "20000", "--lost-ms", "60000", "--reattach-grace-ms", "50000", *flags])
    cluster.submit(tiny_job(cluster, **changes))
    supervisor = start_supervisor(cluster, slots)
    members(cluster, slots)
    return supervisor


def test_a_host_of_two_slots_trains_to_the_same_weights():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster))
        supervisor = start_supervisor(cluster, 2)
        check(cluster.wait_finished() == reference(), "other weights")
        check(supervisor.wait() == 0, f"the supervisor ended with {supervisor.popen.returncode}")
        check("node-cpu0 (pid" in log_of(supervisor) and "node-cpu1 started" in log_of(supervisor), "both slots are told")


def test_a_killed_worker_is_lost_at_once_and_started_again():
    """Every other way to notice the death takes 50 s here: the supervisor's word alone makes it quick."""
    with Cluster() as cluster:
        supervisor = begin(cluster, 1, steps=LONG)  # alone: no peer sees it die
        pid = children(supervisor)["node-cpu0"]
        os.kill(pid, signal.SIGKILL)
        lost = cluster.wait_event("worker_lost", 10)
        check("was killed by signal 9 (SIGKILL), says its supervisor" in lost.text, lost.text)
        told = cluster.wait_event("worker_exited", 10)
        check(told.worker == "node-cpu0" and f"(pid {pid})" in told.text and "it is started again" in told.text, told.text)
        cluster.wait_event(lambda e: e.kind == "generation_go", 20, after=lost.number)
        check(children(supervisor)["node-cpu0"] != pid, "another process")
        cluster.cancel()
        check(supervisor.wait() == 0, "the job is over")


def test_a_stopped_stream_does_not_hide_a_death():
    """The coordinator sleeps while the worker dies, and hears of both ends when it goes on."""
    with Cluster() as cluster:
        supervisor = begin(cluster, 2, steps=LONG)
        cluster.coordinator.kill(signal.SIGSTOP)
        os.kill(children(supervisor)["node-cpu1"], signal.SIGKILL)
        cluster.wait_until(lambda: "node-cpu1 (pid" in log_of(supervisor), 10, "the supervisor saw nothing")
        cluster.coordinator.kill(signal.SIGCONT)
        cluster.wait_event("worker_exited", 20)
        members(cluster, 2)
        cluster.cancel()
        check(supervisor.wait() == 0, "the job is over")


def test_a_question_by_signal_is_passed_on():
    with Cluster() as cluster:
        supervisor = begin(cluster, 2, steps=LONG)
        before = children(supervisor)
        supervisor.kill(signal.SIGUSR2)
        for name in before:
            cluster.wait_until(lambda: "flight: " in subprocess.run([os.path.join(BUILD, "cli/muster"), "--coordinator", cluster.address, "logs", name],
                                                                    capture_output=True, text=True).stdout, 20, f"{name} logged nothing")
        check(children(supervisor) == before, "the workers go on")
        cluster.cancel()
        check(supervisor.wait() == 0, "the job is over")


def test_crashes_use_up_the_budget_and_undrain_gives_a_new_one():
    with Cluster() as cluster:
        supervisor = begin(cluster, 2, ["--crash-limit", "1"], steps=LONG)
        last = 0
        for _ in range(2):
            victim = cluster.wait_until(lambda: children(supervisor).get("node-cpu1"), 20, "node-cpu1 does not run")
            members(cluster, 2)
            os.kill(victim, signal.SIGKILL)
            last = cluster.wait_event("worker_exited", 20, after=last).number
        check(any(e.kind == "worker_quarantined" for e in cluster.events), "no quarantine")
        cluster.wait_until(lambda: "node-cpu1 waits: quarantined" in log_of(supervisor), 10, "it does not wait")
        check(set(children(supervisor)) == {"node-cpu0"}, f"{children(supervisor)}")
        members(cluster, 1)
        run(cluster, "undrain", "node-cpu1", code=0)
        members(cluster, 2)
        cluster.cancel()
        check(supervisor.wait() == 0, "the job is over")


def test_kill_of_the_supervisor_leaves_no_process_behind():
    with Cluster() as cluster:
        supervisor = begin(cluster, 2, steps=LONG)
        pids = list(children(supervisor).values())
        os.kill(pids[0], signal.SIGSTOP)  # also one that cannot act
        supervisor.kill(signal.SIGKILL)
        cluster.wait_until(lambda: all(map(is_gone, pids)), 10, f"{pids} are left behind")


def test_first_sigterm_is_in_good_order_and_the_second_one_kills():
    with Cluster() as cluster:
        supervisor = begin(cluster, 2, steps=LONG)
        other = start_supervisor(cluster, 1, "other")
        members(cluster, 3)
        pids = list(children(supervisor).values())
        supervisor.kill(signal.SIGTERM)
        check(supervisor.wait() == 0 and all(map(is_gone, pids)), "it left in good order")
        check(not [e for e in cluster.events if e.kind == "worker_lost"], "nobody was lost")
        members(cluster, 1)
        pid = children(other)["other-cpu0"]
        os.kill(pid, signal.SIGSTOP)  # it does not hear the first one
        other.kill(signal.SIGTERM)
        cluster.wait_until(lambda: "leave in good order" in log_of(other), 10, "SIGTERM was not heard")
        check(other.alive() and not is_gone(pid), "it waits")
        other.kill(signal.SIGTERM)
        check(other.wait() == 130 and is_gone(pid), f"exit {other.popen.returncode}")


def test_who_is_refused_says_why_and_is_not_started_again():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, data__path="/nowhere/data.txt"))
        supervisor = start_supervisor(cluster, 2)
        check(supervisor.wait() == 1, f"exit {supervisor.popen.returncode}")
        told = cluster.wait_event("worker_exited", 10)
        check("exited with code 1: " in told.text and "/nowhere/data.txt" in told.text, told.text)
        check(log_of(supervisor).count(" started: pid") == 2, "nobody was started twice")


def detach(cluster, address, *flags):
    log = os.path.join(cluster.dir, "detached.log")
    return subprocess.run([WORKER, "--coordinator", address, "--job", "tiny", "--device", "cpu", "--slots", "2", "--name", "back", "--threads",
                           "1", "--detach", "--log", log, *flags], capture_output=True, text=True, timeout=60 * SLOW), log


def test_detach_returns_when_all_are_attached():
    """As the documents show it."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, "kjv", steps=LONG))
        (command,) = documented("### A host of several devices")
        env = dict(os.environ, MUSTER_COORDINATOR=cluster.address, PATH=f"{BUILD}/worker:{os.environ['PATH']}")
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=60 * SLOW, cwd=cluster.dir, env=env)
        check(done.returncode == 0 and "attached, in the background as pid" in done.stdout, done.stderr)
        check(sorted(w.name for w in cluster.list_workers()) == ["here-cpu0", "here-cpu1"], "both are there")
        pid = int(re.search(r"as pid (\d+)", done.stdout).group(1))
        check(os.getsid(pid) == pid, "in a session of its own")
        cluster.cancel("kjv")
        cluster.wait_until(lambda: is_gone(pid), 20, "it goes when the job is over")
        log = open(os.path.join(cluster.dir, "here.log")).read()
        check("here-cpu1 started" in log and "component=here-cpu0" in log, log)


def test_detach_that_cannot_attach_says_why_and_leaves_nothing():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, data__path="/nowhere/data.txt"))
        nobody = socket.socket()
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        done, log = detach(cluster, address, "--ready-within", "1")
        check(done.returncode == 3 and done.stderr.count("\n") == 1 and "not attached in time" in done.stderr, done.stderr)
        done, log = detach(cluster, address, "--give-up-after", "1")
        check(done.returncode == 3 and done.stderr.count("\n") == 1 and "exited with code 3" in done.stderr, done.stderr)
        check(address in done.stderr, done.stderr)
        left = subprocess.run(["pgrep", "-f", f"--log[ ]{log}|coordinator={address}"], capture_output=True, text=True).stdout
        check(not left, f"left behind: {left}")


def test_hosts_are_cordoned_drained_and_taken_back():
    """As the documents show it."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=LONG))
        hosts = [start_supervisor(cluster, slots, name, ("--host-id", name)) for name, slots in (("node01", 2), ("node02", 1))]
        members(cluster, 3)
        env = dict(os.environ, MUSTER_COORDINATOR=cluster.address, PATH=f"{BUILD}/cli:{os.environ['PATH']}", USER="alice")
        said = {}
        for command in documented("### Nodes"):
            if command.startswith("muster node ls"):
                cluster.wait_event("node_drained")
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30 * SLOW, env=env)
            check(done.returncode == 0, f"{command}: {done.stdout}{done.stderr}")
            said[command.split()[2]] = done.stdout
        check(re.search(r"^node01 +drained +0 +0 .* alice@\S+ +a fan is loud$", said["ls"], re.M), said["ls"])
        check(re.search(r"^node02 +busy, cordoned +1 +1 ", said["ls"], re.M), said["ls"])
        check("deadline     20" in said["describe"] and "by alice@" in said["describe"], said["describe"])
        members(cluster, 3)  # the supervisors have stayed
        check(not [e for e in cluster.events if e.kind == "worker_lost"], "nobody was lost")
        for words, code, fragment in [(("describe", "nobody"), 4, "no node 'nobody'"), (("drain", "node01"), 2, "--reason TEXT is required"),
                                      (("cordon", "node01", "--reason", "x", "--deadline", "1m"), 2, "--deadline"),
                                      (("drain", "n", "--reason", "x", "--deadline", "3w"), 2, "30m"), (("shoot", "node01"), 2, "not a verb")]:
            run(cluster, "node", *words, code=code, fragments=(fragment,))
        cluster.cancel()
        check([host.wait() for host in hosts] == [0, 0], "the job is over")


class Manager:
    """A service manager's socket."""

    def __init__(self, cluster):
        self.path = os.path.join(cluster.dir, "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.settimeout(20 * SLOW)
        self.env = {"NOTIFY_SOCKET": self.path, "WATCHDOG_USEC": "400000"}
        self.said = []

    def wait(self, *wanted):
        """Until all of these lines were said since the last call."""
        left = set(wanted)
        while left:
            try:
                lines = self.socket.recv(4096).decode().split("\n")
            except TimeoutError:
                raise Failure(f"not said: {left}; but: {self.said[-5:]}") from None
            self.said += lines
            left -= set(lines)


def test_both_programs_tell_the_service_manager():
    with Cluster() as cluster:
        manager = Manager(cluster)
        cluster.start_coordinator(env=manager.env)
        manager.wait("READY=1", "WATCHDOG=1")
        cluster.coordinator.kill(signal.SIGTERM)
        manager.wait("STOPPING=1")
        check(cluster.coordinator.wait() == 0, "it stopped")
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=LONG))
        supervisor = start_supervisor(cluster, 2, env=manager.env)
        manager.wait("READY=1", "WATCHDOG=1", "STATUS=2 of 2 workers attached to job tiny")
        with open(f"/proc/{children(supervisor)['node-cpu0']}/environ", "rb") as f:
            check(b"NOTIFY_SOCKET" not in f.read(), "its workers are not the service")
        supervisor.kill(signal.SIGTERM)
        manager.wait("STOPPING=1")
        check(supervisor.wait() == 0, "it stopped")
        plain = cluster.start_worker(env=manager.env)
        manager.wait("READY=1", "WATCHDOG=1")
        plain.kill(signal.SIGTERM)
        check(plain.wait() == 0, "it stopped")


def test_words_that_do_not_fit_together_are_refused():
    for words, fragment in [(["--device", "gpu"], "all, cpu"), (["--slots", "2"], "--slots needs --device"),
                            (["--device", "all", "--slots", "2"], "contradicts"), (["--detach"], "--detach needs --device"),
                            (["--device", "cpu", "--log", "x"], "--log needs --detach"), (["--device", "cpu", "--slots", "0"], "1 to 256"),
                            (["--device", "cpu", "--name", "x" * 60], "at most 54")]:
        done = subprocess.run([WORKER, "--job", "tiny", *words], capture_output=True, text=True, timeout=20 * SLOW)
        check(done.returncode == 2 and fragment in done.stderr, f"{words}: {done.returncode} {done.stderr}")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
