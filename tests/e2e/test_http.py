#!/usr/bin/python3
"""/livez, /readyz, /metrics and /api/v1 of a coordinator with a job that trains and loses a worker: the numbers are those of the service, promtool
has nothing to say against the page, the list in docs/operations.md is complete, and readers who are many, slow, rude or in the wrong place disturb
nobody.

    test_http.py [TEST...]"""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess

from harness import BUILD, FAST, ROOT, SLOW, STRICT, Cluster, api, check, main, pb, reference, rpc_error, run, tiny_job
from test_hostile import PROTOCOL, Attach, hello

STEPS = 150
SLOW_READERS = 100
DASHBOARDS = 200


@contextlib.contextmanager
def serving(workers=2, flags=()):
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*FAST, "--http", "127.0.0.1:0", *flags])
        for i in range(workers):
            cluster.start_worker(name=f"w{i}")
        yield cluster, http_address(cluster)


def http_address(cluster):
    found = None

    def look():
        nonlocal found
        with open(os.path.join(cluster.dir, "musterd.log")) as f:
            found = re.search(r"dashboard at https?://([\d.]+):(\d+)/", f.read())
        return found
    cluster.wait_until(look, 10, "musterd says no HTTP address")
    return found.group(1), int(found.group(2))


def get(address, path, method="GET", **headers):
    connection = http.client.HTTPConnection(*address, timeout=10 * SLOW)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def metrics(address):
    """{name{labels}: value}"""
    status, page = get(address, "/metrics")
    check(status == 200, f"/metrics: {status}")
    return {m.group(1): float(m.group(2)) for m in re.finditer(r"^((?:muster|grpc)_\S+(?:\{.*\})?) (\S+)$", page, re.M)}


def every_second_is_in_one_class(cluster, job, page):
    """One of two workers was killed: the accounts of both add up to wall time, and the page says the same."""
    goodput = cluster.call("GetGoodput", api.GetGoodputRequest(job="tiny"), api.GetGoodputResponse)
    accounts = sorted(goodput.accounts, key=lambda account: account.worker)
    check([a.worker for a in accounts] == ["w0", "w1"], f"accounts of {[a.worker for a in accounts]}")
    for account in accounts:
        wall_s = (job.ended_wall_us - account.began_wall_us) * 1e-6
        check(abs(account.total_seconds - wall_s) <= 0.01 * wall_s, f"{account.worker}: {account.total_seconds} s of {wall_s} s")
        parts = [getattr(account.seconds, field.name) for field in account.seconds.DESCRIPTOR.fields]
        check(abs(sum(parts) - account.total_seconds) < 1e-6, f"{account.worker}: the parts do not add up: {account}")
    check(accounts[0].seconds.useful > 0 and accounts[1].seconds.down > 0, f"nothing useful, or nobody is down: {goodput}")
    check(goodput.total.recovery_detect > 0 and goodput.total.recovery_prepare > 0, f"the recovery took no time: {goodput.total}")
    lost = {name: value for name, value in page.items() if name.startswith("muster_lost_seconds_total")}
    check(abs(sum(lost.values()) - goodput.lost_seconds) < 1e-6, f"/metrics: {lost}, the service: {goodput.lost_seconds} s")
    check(abs(page['muster_useful_seconds_total{job="tiny"}'] - goodput.total.useful) < 1e-6, "useful seconds differ")
    report = run(cluster, "report", "tiny", code=0)
    check("recovery_detect" in report and re.search(r"w1 +gone", report), report)
    same = json.loads(run(cluster, "-o", "json", "report", "tiny", code=0))
    check({a["worker"]: a["lost_seconds"] for a in same["accounts"]} == {a.worker: a.lost_seconds for a in accounts}, str(same))


def test_metrics_say_what_the_service_says():
    with serving() as (cluster, address):
        check(get(address, "/livez") == (200, "ok\n") and get(address, "/readyz") == (200, "ok\n"), "not alive and ready")
        with cluster.slowed():
            cluster.submit(tiny_job(cluster, steps=STEPS))
            cluster.wait_together(2)
            cluster.workers[1].kill()
            cluster.wait_event(lambda e: e.kind == "worker_lost")
        sha = cluster.wait_finished()
        check(sha == reference(steps=STEPS), "the weights differ from the undisturbed run's")
        cluster.wait_until(lambda: metrics(address)['muster_jobs{state="finished"}'] == 1, 5, "the end does not show")
        job, page = cluster.job(), metrics(address)
        for name, value in (("step", job.steps_done), ("steps_wanted", STEPS), ("samples", job.steps_done * job.spec.batch.sequences), ("workers_lost_total", 1), ("loss", job.result.loss),
                            ("checkpoint_interval_steps", job.spec.checkpoint.every)):
            got = page[f'muster_job_{name}{{job="tiny"}}']
            check(abs(got - value) <= 1e-9 * abs(value), f"muster_job_{name} is {got}, not {value}")
        every_second_is_in_one_class(cluster, job, page)
        check(page["muster_events_total"] >= len(cluster.events), "events are missing")
        if shutil.which("promtool"):
            text = get(address, "/metrics")[1]
            lint = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
            check(lint.returncode == 0, f"promtool: {lint.stdout}{lint.stderr}")
        with open(os.path.join(ROOT, "docs/operations.md")) as f:
            documented = set(re.findall(r"`((?:muster|grpc_server)_[a-z_]+)`", f.read()))
        names = set(re.findall(r"^# TYPE (\S+)", get(address, "/metrics")[1], re.M))
        check(names == documented, f"not in docs/operations.md: {sorted(names - documented)}; documented, but not there: {sorted(documented - names)}")


def test_when_the_last_checkpoint_was_outlives_the_coordinator():
    """Killed and started again on its store, while nobody works for the job: step and time of the newest commit are those of the record."""
    names = [f'muster_job_checkpoint_{word}{{job="tiny"}}' for word in ("step", "timestamp_seconds")]
    with serving(workers=1) as (cluster, address):
        cluster.submit(tiny_job(cluster, steps=1000000, eval__every=0, checkpoint_every=0))
        cluster.wait_step(3)
        check([metrics(address)[name] for name in (*names, 'muster_job_checkpoint_interval_steps{job="tiny"}')] == [0, 0, 0], "a checkpoint before the first one")
        run(cluster, "checkpoint", "tiny", code=0)
        cluster.wait_event("checkpoint_committed")
        cluster.workers[0].kill()
        cluster.wait_event("worker_lost")
        (newest,) = cluster.checkpoints()
        cluster.wait_until(lambda: metrics(address)[names[0]] == newest.step, 10, "the checkpoint does not show")
        page = metrics(address)
        before = [page[name] for name in names]
        check(abs(before[1] - cluster.job().last_checkpoint_wall_us * 1e-6) < 1e-3, f"{before} of {newest}")
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        cluster.start_coordinator(flags=[*FAST, "--http", f"{address[0]}:{address[1]}"])
        page = metrics(address)
        check([page[name] for name in names] == before, f"{[page[name] for name in names]}, not {before}")


def of(page, name, **labels):
    """The sum over the samples of that name that have these labels."""
    return sum(value for key, value in page.items() if key.split("{")[0] == name and all(f'{label}="{wanted}"' in key for label, wanted in labels.items()))


def test_calls_are_counted_as_grpc_servers_commonly_do():
    with serving(workers=1) as (cluster, address):
        for _ in range(3):
            cluster.call("ListNodes", api.ListNodesRequest(), api.ListNodesResponse)
        for _ in range(2):
            code, _ = rpc_error(lambda: cluster.call("GetJob", api.GetJobRequest(name="absent"), api.GetJobResponse))
            check(code.name == "NOT_FOUND", code)
        cluster.wait_until(lambda: of(metrics(address), "grpc_server_handled_total", grpc_method="GetJob", grpc_code="NOT_FOUND") == 2, 5, "the calls do not show")
        page, service = metrics(address), {"grpc_type": "unary", "grpc_service": "muster.v1.MusterService"}
        for method, calls, answers, code in (("ListNodes", 3, 3, "OK"), ("GetJob", 2, 0, "NOT_FOUND"), ("CancelJob", 0, 0, "OK")):
            seen = [of(page, f"grpc_server_{word}", grpc_method=method, **service) for word in ("started_total", "msg_received_total", "msg_sent_total", "handling_seconds_count")]
            check(seen == [calls, calls, answers, calls], f"{method}: {seen}")
            check(of(page, "grpc_server_handled_total", grpc_method=method, grpc_code=code, **service) == of(page, "grpc_server_handled_total", grpc_method=method) == calls, f"{method}: by code")
        check(of(page, "grpc_server_handling_seconds_bucket", grpc_method="ListNodes", le="+Inf") == 3 and of(page, "grpc_server_handling_seconds_sum", grpc_method="ListNodes") > 0, "how long they took")
        attach = {"grpc_type": "bidi_stream", "grpc_service": "muster.v1.WorkerService", "grpc_method": "Attach"}
        for word in ("started_total", "msg_received_total", "msg_sent_total"):
            cluster.wait_until(lambda: of(metrics(address), f"grpc_server_{word}", **attach) >= 1, 10, f"a worker's stream: {word}")
        check(of(metrics(address), "grpc_server_handling_seconds_count", **attach) == 0, "streams last as long as workers do")


def test_refusals_and_broken_streams_are_counted_by_reason():
    names = ("muster_refused_hellos_total", "muster_fenced_messages_total", "muster_stream_losses_total")
    with serving(workers=3, flags=STRICT) as (cluster, address):
        cluster.submit(tiny_job(cluster, steps=1000000, eval__every=0))
        cluster.wait_together(3)
        check(all(of(metrics(address), name, reason=reason) == 0 for name, reason in zip(names, ("busy", "lost", "reset"))), "something was refused before")
        cluster.start_worker("absent", name="w8")
        cluster.start_worker(name="w0", flags=["--give-up-after", "1"])  # it is in use
        cluster.wait_until(lambda: of(metrics(address), names[0], reason="no_job") > 0 and of(metrics(address), names[0], reason="busy") > 0, 20, "refused workers do not show")
        cluster.workers[1].kill()
        cluster.wait_event("worker_lost")
        cluster.wait_until(lambda: of(metrics(address), names[2], reason="reset") >= 1, 5, "a stream that broke does not show")
        cluster.workers[2].kill(signal.SIGSTOP)
        lost = cluster.wait_event(lambda e: e.kind == "worker_lost" and e.worker == "w2")
        cluster.wait_event("generation_go", after=lost.number)
        cluster.workers[2].kill(signal.SIGCONT)
        cluster.wait_event(lambda e: e.kind == "worker_attached" and e.worker == "w2" and e.number > lost.number)
        cluster.wait_until(lambda: of(metrics(address), names[1]) > 0 and of(metrics(address), names[0], reason="fenced") > 0, 10, "what was fenced does not show")
        page = metrics(address)
        check(sum(of(page, name, reason=reason) for name, reason in ((names[0], "version"), (names[0], "identity"), (names[0], "invalid"), (names[2], "malformed"), (names[2], "slow"))) == 0, "for no reason")
        Attach(cluster).say(b"\x0a\xff\xff").end()
        Attach(cluster).say(hello(software_version="\x01")).end()
        Attach(cluster).say(hello(job="absent", protocol_version=PROTOCOL + 1)).end()
        attach = Attach(cluster).say(hello(name="probe"))
        check(attach.hear().WhichOneof("kind") == "welcome", "a worker like others")
        attach.say(b"\x12\xff\xff").end()

        def counts():
            page = metrics(address)
            return [of(page, name, reason=reason) for name, reason in ((names[0], "invalid"), (names[0], "version"), (names[2], "malformed"))]
        cluster.wait_until(lambda: counts() == [2, 1, 1], 10, "malformed, of another version, malformed later")
        cluster.cancel()


def api_of(address, path, status=200):
    got, text = get(address, f"/api/v1/{path}")
    check(got == status, f"/api/v1/{path}: {got} {text[:200]}")
    return json.loads(text)


def test_api_says_what_the_service_says():
    with serving() as (cluster, address):
        cluster.submit(tiny_job(cluster, steps=20))
        cluster.wait_finished()
        cluster.submit(tiny_job(cluster, name="other", steps=20))
        job, listed = cluster.job(), api_of(address, "jobs")["jobs"]
        check([j["name"] for j in listed] == ["other", "tiny"], f"jobs: {[j['name'] for j in listed]}")
        one = api_of(address, "job?name=tiny")["job"]
        check(one["weights_sha256"] == job.weights_sha256.hex() and one["state"] == "finished" and one["spec"]["steps"] == 20, str(one))
        check(abs(one["result"]["loss"] - job.result.loss) < 1e-12, "the loss differs")
        first = api_of(address, "jobs?page_size=1")
        check(len(first["jobs"]) == 1 and first["next_page_token"] == "other", str(first)[:200])
        check(api_of(address, "jobs?page_size=1&page_token=other")["jobs"][0]["name"] == "tiny", "the second page")
        check([c["number"] for c in api_of(address, "checkpoints?job=tiny")["checkpoints"]] == [c.number for c in cluster.checkpoints()], "checkpoints")
        check(api_of(address, "goodput?job=tiny")["total"]["useful"] > 0, "goodput")
        check(api_of(address, "workers") == {"workers": [], "next_page_token": ""}, "workers of jobs that are over")
        check(api_of(address, "timings?job=other")["timings"] == [], "timings of nobody")
        last = api_of(address, "events?newest=2&job=tiny")["events"]
        told = [e for e in cluster.events if e.job == "tiny"][-2:]
        check([(e["number"], e["kind"], e["text"]) for e in last] == [(e.number, e.kind, e.text) for e in told], f"{last} {told}")
        check(not api_of(address, f"events?after_event={cluster.events[-1].number + 1}")["events"], "events that were not told yet")
        series = api_of(address, "series?job=tiny&seconds=60")
        check(series["bucket_seconds"] == 2 and series["columns"][:3] == ["time", "step", "loss"], str(series))
        for path, status, text in (("job?name=none", 404, "no job"), ("nothing", 404, "there are jobs"), ("jobs?page_size=x", 400, "page_size"),
                                   ("job?name=%ff", 400, "not allowed"), ("series", 400, "job"), ("series?job=tiny&seconds=-1", 400, "seconds"),
                                   ("goodput?job=tiny&spec=1", 400, "no parameter"), ("jobs?page_size=5000000000", 400, "page_size")):
            check(text in api_of(address, path, status)["error"], path)
        check(get(address, "/api/v1/jobs?x=" + "a" * 600)[0] == 414, "a query without end")
        status, page = get(address, "/")
        check(status == 200 and "<title>Muster</title>" in page and "src=" not in page, "the dashboard is no page that stands alone")


def test_steps_are_compared_with_their_prediction():
    """Stopped nine tenths of the time, workers take far longer than default rates say: told once, by event, report and page alike."""
    def asked():
        return cluster.call("GetGoodput", api.GetGoodputRequest(job="tiny"), api.GetGoodputResponse).prediction

    def seconds(terms):
        return [getattr(terms, field.name) for field in terms.DESCRIPTOR.fields]
    with serving() as (cluster, address):
        with cluster.slowed():
            cluster.submit(tiny_job(cluster, steps=1000000, eval__every=0, workers__min=2))
            cluster.wait_together(2)
            told = cluster.wait_event(lambda e: e.kind == "prediction_off", limit_s=60)
            check(told.severity == pb.EVENT_SEVERITY_INFO and "by default rates" in told.text and told.worker == asked().worker, str(told))
        one, page, report = asked(), metrics(address), run(cluster, "report", "tiny", code=0)
        check(one.steps >= 20 and not one.calibrated and one.layout.dp == 2 and sum(seconds(one.predicted)) > 0, str(one))
        check(one.measured.compute > 0 and one.measured.replicas > 0 and one.measured.vote > 0 and one.measured.tensor == 0, str(one.measured))
        for word, terms in (("predicted", one.predicted), ("measured", one.measured)):
            names = [f'muster_job_step_{word}_seconds{{job="tiny",term="{field.name}"}}' for field in terms.DESCRIPTOR.fields]
            check(all(name in page for name in names), f"not all of {names} are there")
        check(page['muster_job_prediction_off{job="tiny"}'] == 0, "an alert about default rates")
        check(re.search(r"^TERM +PREDICTED +MEASURED", report, re.M) and re.search(r"^To recalibrate.*: 1,1,2,1,none,[\d.]+$", report, re.M), report)
        cluster.cancel()
        cluster.wait_over()
        check(sum(e.kind == "prediction_off" for e in cluster.events) == 1, "told more than once in a generation")


def test_vital_signs_are_shown_by_worker_page_and_command():
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*FAST, "--http", "127.0.0.1:0", "--worker-series", "2"])
        for i in range(2):
            cluster.start_worker(name=f"w{i}", flags=["--vitals-every", "100"])
        address = http_address(cluster)
        cluster.submit(tiny_job(cluster, steps=1000000, eval__every=0))
        cluster.wait_step(5)

        def signs():
            return api_of(address, "workers?worker=w0")["workers"][0]["vitals"] or {"cpus": None, "links": []}
        cluster.wait_until(lambda: signs()["cpus"] is not None and signs()["links"], 30, "no vital signs, or no links among them")
        told = signs()
        check(told["memory_bytes"] > 1 << 20 and told["disk_free_bytes"] > 0 and told["links"][0]["worker"] == "w1", str(told))
        check(all("vitals" not in w or w["vitals"] is None for w in api_of(address, "workers?job=tiny")["workers"]), "lists are longer than they need to be")
        cluster.wait_until(lambda: metrics(address).get('muster_worker_cpu_seconds_total{job="tiny",worker="w1"}', 0) > 0, 10, "no numbers of w1")
        check(metrics(address)['muster_job_memory_bytes{job="tiny"}'] > told["memory_bytes"], "not the sum over the workers")
        text = run(cluster, "describe", "worker", "w0", code=0)
        check(re.search(r"processors +\d.*busy", text) and re.search(r"links +rank \d w1: in .*/s", text), text)
        cluster.start_worker(name="w2", flags=["--vitals-every", "100"])  # one more than --worker-series permits
        cluster.wait_until(lambda: not any(name.startswith("muster_worker_cpu") for name in metrics(address)), 30, "numbers of three workers")


def test_readers_in_the_wrong_place_are_told():
    with serving(workers=0) as (cluster, address):
        for path, method, headers, status, text in (("/metrics", "POST", {}, 405, "only GET and HEAD"), ("/nothing", "GET", {}, 404, "/metrics"), ("/api/v1/jobs", "GET", {"Host": "evil.example"}, 403, "not allowed in Host"),
                                                    ("/metrics", "GET", {"Host": "evil.example:80"}, 403, "not allowed in Host"),
                                                    ("/metrics", "GET", {"Host": "localhost"}, 200, "muster_build_info"),
                                                    ("/metrics", "GET", {"Host": "[::1]:80"}, 200, "muster_build_info"),
                                                    ("/livez", "GET", {"X-Long": "a" * 20000}, 431, "")):
            got = get(address, path, method, **headers)
            check(got[0] == status and text in got[1], f"{method} {path} {headers.keys()}: {got[0]} {got[1][:200]}")


class Dashboard:
    """What a browser with the dashboard open asks for every two seconds, on a connection that it keeps."""
    PATHS = ("jobs?page_size=1000", "events?after_event=3&newest=500", "workers?job=tiny&page_size=1000", "goodput?job=tiny&page_size=1000",
             "checkpoints?job=tiny&page_size=1000", "series?job=tiny&seconds=300")

    def __init__(self, stack, address):
        self.connection = stack.enter_context(contextlib.closing(http.client.HTTPConnection(*address, timeout=30 * SLOW)))

    def ask(self, path):
        self.connection.request("GET", "/api/v1/" + path)

    def take(self):
        with self.connection.getresponse() as reply:
            return reply.status, json.loads(reply.read())


def resident_bytes(process):
    with open(f"/proc/{process.pid}/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_many_slow_dead_and_rude_readers_disturb_nobody():
    with serving() as (cluster, address):
        with contextlib.ExitStack() as stack:
            with cluster.slowed():
                cluster.submit(tiny_job(cluster, steps=STEPS))
                cluster.wait_together(2)
                generation = cluster.job().generation
                for i in range(SLOW_READERS):
                    s = stack.enter_context(socket.create_connection(address))
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
                    s.sendall((b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 50, b"\x16\x03\x01garbage\r\n\r\n", b"GET /met", b"")[i % 4])
                    if i % 5 == 0:
                        s.close()
                dashboards = [Dashboard(stack, address) for _ in range(DASHBOARDS)]
                before = resident_bytes(cluster.coordinator)
                for path in Dashboard.PATHS:
                    for dashboard in dashboards:
                        dashboard.ask(path)
                    replies = [dashboard.take() for dashboard in dashboards]
                    check(all(status == 200 for status, _ in replies), f"{path}: {[reply for reply in replies if reply[0] != 200][:1]}")
                    check(get(address, "/metrics")[0] == 200, "a quick reader is not served")
                grown = resident_bytes(cluster.coordinator) - before
                check(grown < 64 << 20, f"{DASHBOARDS} dashboards cost {grown} bytes of memory")
                check(cluster.job().state == pb.JOB_STATE_RUNNING, "the job ended before")
            check(cluster.wait_finished() == reference(steps=STEPS), "the weights differ from the undisturbed run's")
        changes = [e.text for e in cluster.events if e.kind == "worker_lost" or e.kind == "generation_go" and e.generation > generation]
        check(not changes, f"the job was disturbed: {changes}")


def test_an_address_that_cannot_be_used_is_one_line():
    with serving(workers=0) as (cluster, address):
        for listen, text in ((f"{address[0]}:{address[1]}", "is in use"), ("nowhere", "a literal address and a port"),
                             ("example.com:80", "a literal address and a port"), ("127.0.0.1:99999", "a literal address and a port"),
                             ("0.0.0.0:0", "--insecure-listen")):
            run = subprocess.run([os.path.join(BUILD, "coordinator/musterd"), "--volatile", "--listen", "127.0.0.1:0", "--http", listen], capture_output=True,
                                 text=True, timeout=20 * SLOW)
            lines = [line for line in run.stderr.splitlines() if "--http" in line]
            check(run.returncode == 1 and len(lines) == 1 and text in lines[0], f"{listen}: {run.returncode} {run.stderr}")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
