#!/usr/bin/python3
"""What workers remember: traces of all ranks on one clock, who holds the others up, logs through the coordinator."""

import fcntl
import json
import os
import re
import signal
import subprocess
import threading

from harness import BUILD, COUNTED, SLOW, STRICT, Cluster, check, connect, main, pb, run, tiny_job
from muster.v1 import recall_pb2 as recall

GO = "generation 1: go"


def trace(cluster, *args):
    path = os.path.join(cluster.dir, "trace.json")
    run(cluster, "trace", "tiny", "--out", path, *args, code=0)
    with open(path) as file:
        return json.load(file)["traceEvents"]


def check_spans(events, rank):
    """Spans of a rank nest, none is left open by a step that has ended, and time does not go back."""
    open_spans, last, steps = [], 0, []
    for event in (e for e in events if e["pid"] == rank and e["ph"] in "BE"):
        check(event["ts"] >= last, f"time goes back: {event}")
        last = event["ts"]
        if event["ph"] == "B":
            open_spans.append(event)
            if event["name"] == "step":
                steps.append(event["args"]["number"])
        else:
            check(open_spans and open_spans.pop()["name"] == event["name"], f"does not nest: {event}")
    return steps, [e["name"] for e in open_spans]


def test_a_trace_has_all_ranks_on_one_clock():
    with Cluster() as cluster, cluster.running(2, steps=1000000, checkpoint_every=0, eval__every=0):
        cluster.wait_step(cluster.job().steps_done + 12)
        events = trace(cluster)
        for rank in (0, 1):
            steps, _ = check_spans(events, rank)
            check(steps == list(range(steps[0], steps[-1] + 1)) and len(steps) >= 10, f"rank {rank} has steps {steps}")
            names = {e["name"] for e in events if e["pid"] == rank}
            check({"forward", "backward", "reduce", "vote", "update", "send", "receive"} <= names, f"{names}")
        # What one sends the other receives: both saw the same exchange at about the same time.
        first, last = steps[2], steps[3]
        events = trace(cluster, "--steps", f"{first}:{last}")
        for rank in (0, 1):
            steps, still_open = check_spans(events, rank)
            check(steps == [first, last] and not still_open, f"rank {rank}: {steps}, open {still_open}")
        error = sum(e["args"]["clock_error_us"] for e in events if e["name"] == "process_name")
        votes = {(e["pid"], e["ph"]): e["ts"] for e in events if e["name"] == "vote" and e["args"]["number"] == last and e["ph"] in "BE"}
        check(votes[0, "E"] + error >= votes[1, "B"] and votes[1, "E"] + error >= votes[0, "B"], f"nobody leaves a vote before all have entered it: {votes}")
        run(cluster, "trace", "tiny", "--out", "/no/such/dir/x", code=1, fragments=["/no/such/dir/x"])
        run(cluster, "trace", "absent", "--out", "/dev/null", code=4, fragments=["'absent'"])
        run(cluster, "trace", "tiny", "--out", "/dev/null", "--steps", "5:3", code=2, fragments=["5:3", "FIRST:LAST"])
        cluster.cancel()


def test_a_signal_makes_a_worker_log_what_it_did_last():
    with Cluster() as cluster, cluster.running(2, steps=1000000, checkpoint_every=0, eval__every=0):
        cluster.wait_step(3)
        cluster.workers[0].kill(signal.SIGUSR2)
        name = next(w.name for w in cluster.list_workers() if w.pid == cluster.workers[0].pid)

        def logged():
            out = run(cluster, "logs", name, "-n", "512", code=0)
            return (re.search(r'msg="flight: (begin|end) of (send|receive)" .*age_us=\d+ number=\d+ bytes=\d+ peer=1$', out.replace("peer=0", "peer=1"), re.M)
                    and re.search(r'msg="thread: \d+ [^"]*system call', out))
        cluster.wait_until(logged, 20, "nothing was logged")
        step = cluster.job().steps_done
        cluster.wait_step(step + 3)  # it goes on
        cluster.cancel()


def test_who_holds_the_others_up_is_named():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=1000000, workers__min=3, checkpoint_every=0, eval__every=0))
        workers = [cluster.start_worker() for _ in range(3)]
        cluster.wait_step(5)

        def moves():  # or nobody had time for a step in these two seconds
            out = run(cluster, "diagnose", "tiny", code=0)
            return "the job moves" in out and len(out.splitlines()) == 5
        cluster.wait_until(moves, 20, "it is not told that the job moves")
        view = next(w for w in cluster.list_workers() if w.rank == 2)
        stopped = next(w for w in workers if w.pid == view.pid)
        stopped.kill(signal.SIGSTOP)

        def verdict():
            out = run(cluster, "diagnose", "tiny", code=0)
            waits = re.search(r"^0 +\S+ +\d+ +\w+ \d+ +[\d.]+ s +(\S+)$", out, re.M)
            return waits and "2" in waits[1].split(",") and "held up by rank 2 (worker " + view.name in out
        cluster.wait_until(verdict, 20, "rank 2 was not blamed")
        stopped.kill(signal.SIGCONT)
        step = cluster.job().steps_done
        cluster.wait_step(step + 5)
        cluster.cancel()


def test_a_loss_leaves_a_report():
    """A worker that stops answering is given up; what the others waited for is told, and outlives the coordinator."""
    with Cluster(flags=STRICT) as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=1000000, workers__min=3, checkpoint_every=0, eval__every=0))
        workers = [cluster.start_worker() for _ in range(3)]
        cluster.wait_step(5)
        check(run(cluster, "report", "hang", code=0).split()[0] == "REPORT", "an empty list")

        def listed():
            return {report["number"]: report for report in map(json.loads, run(cluster, "-o", "json", "report", "hang", code=0).splitlines())}

        def lose_rank_1(after):
            view = next(w for w in cluster.list_workers() if w.rank == 1)
            stopped = next(w for w in workers if w.pid == view.pid)
            stopped.kill(signal.SIGSTOP)
            before, lost = len(listed()), cluster.wait_event("worker_lost", after=after)
            cluster.wait_until(lambda: len(listed()) > before, 20, "no report")
            return view, stopped, lost.number, listed()[max(listed())]
        view, stopped, lost, report = lose_rank_1(0)
        for _ in range(3):  # who had no time to answer for two seconds is missing there
            if report["answered"] == 2:
                break
            stopped.kill(signal.SIGCONT)
            go = cluster.wait_event(lambda e: e.kind == "generation_go" and "3 workers" in e.text, after=lost)
            cluster.wait_step(go.step + 5)
            view, stopped, lost, report = lose_rank_1(lost)
        check(report["worker"] == view.name and report["job"] == "tiny" and report["asked"] == 3 and report["answered"] == 2 and
              f"held up by rank 1 (worker {view.name}): does not answer" == report["verdict"], f"{report}")

        def shown():
            out = run(cluster, "report", "hang", str(report["number"]), code=0)
            check(re.search(rf"^1 +{view.name} +- +has not answered", out, re.M), out)
            for rank in (0, 2):  # as of before they heard of the loss
                check(re.search(rf"^{rank} +\S+ +\d+ +(gather|reduce|vote) \d+ +[\d.]+ s +\S*1\S*$", out, re.M), out)
            return out
        before = shown()
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        cluster.start_coordinator()
        check(shown() == before, "the report is not the same after a restart")
        run(cluster, "report", "hang", "7", code=4, fragments=["hang report 7"])
        run(cluster, "report", "hang", "x", code=2, fragments=["'x'"])
        run(cluster, "report", "tiny", "1", code=2, fragments=["'1'"])
        cluster.cancel()


def test_one_that_is_killed_is_reported_too_and_so_is_what_somebody_demands():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=1000000, workers__min=2, checkpoint_every=0, eval__every=0))
        workers = [cluster.start_worker() for _ in range(3)]
        cluster.wait_event(lambda e: e.kind == "generation_go" and "3 workers" in e.text)

        def newest(count):
            cluster.wait_until(lambda: len(run(cluster, "-o", "json", "report", "hang", code=0).splitlines()) == count, 20, f"no report {count}")
            return json.loads(run(cluster, "-o", "json", "report", "hang", code=0).splitlines()[0])
        cluster.coordinator.kill(signal.SIGUSR2)
        report = newest(1)
        check(report["worker"] == "" and report["asked"] == report["answered"] == 3 and report["job"] == "tiny", f"{report}")
        out = run(cluster, "report", "hang", "1", "--threads", code=0)
        check(re.match(r"report 1: job tiny, generation \d+, step \d+, at \S+Z, on demand$", out.splitlines()[0]), out)
        for rank in range(3):
            check(re.search(rf"^  rank {rank}, thread \d+ engine: ", out, re.M), out)
        check(re.search(r"^1 +\S+ +tiny +\d+ +- +3 of 3 ", run(cluster, "report", "hang", code=0), re.M), "the list")
        workers[0].kill()
        lost = cluster.wait_event("worker_lost")
        report = newest(2)
        check(report["worker"] == lost.worker and report["asked"] == 3 and report["answered"] == 2, f"{report}")
        check(report["verdict"] == f"held up by rank {report['verdict'].split()[4]} (worker {lost.worker}): does not answer", f"{report}")
        check(re.search(rf"^\d +{lost.worker} +- +has not answered", run(cluster, "report", "hang", "2", code=0), re.M), "where it stood")
        cluster.cancel()


def test_one_that_is_alive_and_stuck_is_reported_with_its_stacks():
    """Its engine writes into a pipe that nobody empties, so that thread stands still while all others of the process go on."""
    with Cluster() as cluster:
        pipe = os.path.join(cluster.dir, "ledger")
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
        cluster.start_coordinator(flags=[*COUNTED, "--hang-floor-ms", "3000"])
        cluster.submit(tiny_job(cluster, steps=1000000, workers__min=3, checkpoint_every=0, eval__every=0))
        workers = [cluster.start_worker(flags=["--ledger", pipe] if i == 1 else []) for i in range(3)]
        lost = cluster.wait_event("worker_lost")
        stuck = run(cluster, "-o", "json", "report", "hang", code=0)
        cluster.wait_until(lambda: run(cluster, "-o", "json", "report", "hang", code=0), 20, f"no report: {stuck}")
        report = json.loads(run(cluster, "-o", "json", "report", "hang", code=0).splitlines()[0])
        check(report["worker"] == lost.worker and report["asked"] == report["answered"] == 3, f"{report}")
        check(re.match(rf"held up by rank \d \(worker {lost.worker}\): \w+ \d+ for [\d.]+ s$", report["verdict"]), report["verdict"])
        out = run(cluster, "report", "hang", str(report["number"]), code=0)
        check(re.search(r"^  rank \d, thread \d+ \S+: S.*; (__)?write < ", out, re.M), out)
        check("no stack" not in out and "threads of 2 more: muster report hang 1 --threads" in out, out)
        full = run(cluster, "report", "hang", str(report["number"]), "--threads", code=0)
        for rank in range(3):  # all threads of all ranks, also those that gRPC started, which wait in epoll or for a condition
            threads = re.findall(rf"^  rank {rank}, thread \d+ (.*?): \w.*, system call .*, \d+ ms of processor time; (.*)$", full, re.M)
            names = {name for name, _ in threads}
            check({"muster-worker", "recollector", "engine"} <= names and any("grpc" in name or "execut" in name for name in names), f"{names} of {full}")
            check(all(" < " in stack for _, stack in threads) and any("libgrpc" in stack or "grpc_" in stack for _, stack in threads), full)
        check(workers[1].alive(), "it is not alive")
        cluster.cancel()
        os.close(reader)


def test_logs_come_through_the_coordinator():
    with Cluster() as cluster, cluster.running(1, steps=1000000, checkpoint_every=0, eval__every=0) as workers:
        with open(workers[0].log) as file:
            written = file.read().splitlines()
        lines = run(cluster, "logs", "w0", code=0).splitlines()
        check(lines[:len(written)] == written and any(line.endswith(f'msg="{GO}" job=tiny generation=1 rank=0') for line in lines), f"{lines}")
        check(run(cluster, "logs", "w0", "-n", "1", code=0).splitlines() == lines[-1:], "-n")
        objects = [json.loads(line) for line in run(cluster, "-o", "json", "logs", "w0", code=0).splitlines()]
        check([o["text"] for o in objects] == lines and [int(o["number"]) for o in objects] == list(range(1, len(lines) + 1)), f"{objects}")
        run(cluster, "logs", "w9", code=4, fragments=["'w9'"])
        follower = subprocess.Popen([os.path.join(BUILD, "cli/muster"), "--coordinator", cluster.address, "logs", "w0", "-f"],
                                    stdout=subprocess.PIPE, text=True)
        seen, ready = [], threading.Event()

        def read():
            for line in follower.stdout:
                seen.append(line.strip())
                if "generation 2: go" in line:
                    ready.set()
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        joiner = cluster.start_worker(flags=["--log-format", "json"])
        check(ready.wait(30 * SLOW), f"the new lines did not come: {seen[-3:]}")
        follower.terminate()
        follower.wait()
        check(seen[:len(lines)] == lines and len(set(seen)) == len(seen), "each line once")
        joiner.kill()
        cluster.wait_until(lambda: any("generation 2: parked" in line for line in run(cluster, "logs", "w0", code=0).splitlines()), 20, "nothing failed")
        (failed,) = [line for line in run(cluster, "logs", "w0", code=0).splitlines() if "generation 2: parked" in line]
        check(re.search(r'rank (\d).*" job=tiny generation=2 rank=\d peer=\1$', failed), failed)
        with open(joiner.log) as file:
            objects = [json.loads(line) for line in file]
        check([(o["job"], o["generation"]) for o in objects if o["msg"] == "generation 2: go"] == [("tiny", 2)], f"{objects}")
        cluster.cancel()


def call(cluster, method, request, response_type):
    with connect(cluster.address) as channel:
        stub = channel.unary_unary(f"/muster.v1.DiagnosticService/{method}", request_serializer=lambda m: m.SerializeToString(),
                                   response_deserializer=response_type.FromString)
        return stub(request, timeout=10 * SLOW)


def test_answers_are_kept_for_a_while():
    with Cluster() as cluster, cluster.running(2, steps=1000000, checkpoint_every=0, eval__every=0):
        wanted = recall.RecallRequest(job="tiny", flight_records=5000, threads=True, log_lines=10)
        asked = call(cluster, "Recall", wanted, recall.RecallResponse)
        check(sorted(asked.workers) == ["w0", "w1"], f"{asked}")

        def read(number=asked.number, index=0):
            return call(cluster, "ReadRecall", recall.ReadRecallRequest(number=number, index=index), recall.ReadRecallResponse)
        for index in (0, 1):
            cluster.wait_until(lambda: read(index=index).is_complete, 10, "no answer")
            answer = read(index=index)
            check(0 < len(answer.records) <= 5000 and len(answer.log) > 0 and answer.is_member, f"{answer.worker}")
            check(any("muster-worker" in text for text in answer.threads), f"{answer.threads}")
            check(abs(answer.clock_offset_us) <= answer.clock_error_us + 1000, "one machine has one monotonic clock")
        for _ in range(8):
            newest = call(cluster, "Recall", wanted, recall.RecallResponse).number
        check(newest == asked.number + 8, f"{newest}")
        code = None
        try:
            read()
        except Exception as error:  # noqa: BLE001: any other than NOT_FOUND is told below
            code = error.code().name
        check(code == "NOT_FOUND", f"an old recall: {code}")
        check(cluster.job().state == pb.JOB_STATE_RUNNING, "the job goes on")
        cluster.cancel()


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
