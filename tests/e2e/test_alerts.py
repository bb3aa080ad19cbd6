#!/usr/bin/python3
"""Alerts, Grafana and the lists in the docs against what there is: every metric that a rule or a panel asks for is on the page of a coordinator with
a job, every alert fires when it is to (promtool) and has a runbook section and vice versa, every event and time class is documented and vice versa,
and a real Prometheus scrapes a running job, evaluates the rules, and an alert reaches who is on duty by way of Alertmanager, and so does its end.

    test_alerts.py [TEST...]"""

import contextlib
import http.server
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import urllib.parse
import urllib.request

from harness import ROOT, SLOW, Process, Skipped, check, main, run, tiny_job
from test_http import get, metrics, serving

RULES = os.path.join(ROOT, "deploy/prometheus/rules.yml")
NAME = re.compile(r"\b(?:muster_[a-z_]+|grpc_server_[a-z_]+)\b")


def text_of(*path):
    with open(os.path.join(ROOT, *path)) as file:
        return file.read()


def tool(name):
    if not shutil.which(name):
        raise Skipped(f"there is no {name} (Debian packages prometheus, prometheus-alertmanager)")
    return name


def same(left, right, what):
    check(left == right, f"{what}: {sorted(left - right)} are missing on one side, {sorted(right - left)} on the other")


def test_rules_are_well_formed_and_fire():
    tool("promtool")
    for words in (["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"]):
        done = subprocess.run(["promtool", *words], cwd=os.path.dirname(RULES), capture_output=True, text=True, timeout=60 * SLOW)
        check(done.returncode == 0, f"promtool {' '.join(words)}: {done.stdout}{done.stderr}")
    alerts, tested = re.findall(r"alert: (\w+)", text_of(RULES)), re.findall(r"- name: (\w+)", text_of("deploy/prometheus/rules_test.yml"))
    check(sorted(alerts) == sorted(tested) == sorted(set(alerts)), "an alert without a test, or twice")


def test_docs_list_what_there_is():
    docs, rules = text_of("docs/operations.md"), text_of(RULES)
    alerts = set(re.findall(r"alert: (\w+)", rules))
    same(alerts, set(re.findall(r"^### (Muster\w+)$", docs, re.M)), "alerts and sections of docs/operations.md")
    same({name.lower() for name in alerts}, set(re.findall(r"runbook: docs/operations.md#(\w+)", rules)), "alerts and their runbooks")
    sources = "".join(text_of("coordinator", folder, name) for folder in ("", "core") for name in os.listdir(os.path.join(ROOT, "coordinator", folder))
                      if name.endswith(".c"))
    calls = re.findall(r"\bevent(?:_of_name)?\(\s*coord,\s*(?:MU_EVENT_\w+|severity),\s*([^,]*),", sources)
    kinds = set(re.findall(r'"([a-z_]+)"', " ".join(calls))) | set(re.findall(r'\.kind = "([a-z_]+)"', sources))
    kinds |= set(re.findall(r'"(job_(?:finished|failed|cancelled))"', sources))
    section = docs[docs.index("\n## Events\n"):]
    rows = re.findall(r"^\| (`[^|]*`) \| (?:info|warning|error)", section[:section.index("\n## ", 5)], re.M)
    same(kinds, set(re.findall(r"`([a-z_]+)`", " ".join(rows))), "events and their list in docs/operations.md")
    classes = set(re.findall(r'"([a-z_]+)"', re.search(r"mu_time_class_names\[MU_TIME_CLASS_COUNT\] = \{(.*?)\}", sources, re.S).group(1)))
    section = docs[docs.index("\n## Goodput\n"):docs.index("\n## Series\n")]
    missing = {name for name in classes if not re.search(rf"\b{name}\b", section)}
    check(not missing, f"time classes that docs/operations.md does not explain: {missing}")
    page = text_of("coordinator/dashboard/index.html")
    check(classes == set(re.findall(r"(\w+): \['--", page[page.index("const CLASSES"):page.index("const STATES")])), "time classes of the dashboard")


def every_metric_is_there(address):
    page = get(address, "/metrics")[1]
    there = set(re.findall(r"^# TYPE (\S+)", page, re.M))
    there |= {name.split("{")[0] for name in re.findall(r"^(\S+) ", page, re.M)}
    asked = set(NAME.findall(re.sub(r"#.*|runbook:.*|summary:.*", "", text_of(RULES))))
    for panel in json.loads(text_of("deploy/grafana/muster.json"))["panels"]:
        for target in panel["targets"]:
            asked |= set(NAME.findall(target["expr"]))
    check(asked <= there, f"rules or panels ask for what is not there: {sorted(asked - there)}")


def query(prometheus, path):
    with urllib.request.urlopen(f"http://{prometheus}/api/v1/{path}", timeout=10 * SLOW) as answer:
        return json.load(answer)["data"]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Receiver(http.server.HTTPServer):
    """What Alertmanager notifies: (status, name) of each alert in the order of the notices."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.Handler)
        self.notices = []
        self.thread = threading.Thread(target=self.serve_forever)
        self.thread.start()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.notices += [(alert["status"], alert["labels"]["alertname"], alert["annotations"]["runbook"]) for alert in told["alerts"]]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args):
            pass

    def end(self):
        self.shutdown()
        self.thread.join()
        self.server_close()


@contextlib.contextmanager
def monitored(cluster, address):
    """Prometheus with the rules, Alertmanager, and who is notified: (address of Prometheus, its process, receiver)."""
    paths = {name: os.path.join(cluster.dir, name) for name in ("prometheus.yml", "alertmanager.yml", "tsdb", "alerts")}
    prometheus, manager, receiver, started = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", Receiver(), []
    with open(paths["alertmanager.yml"], "w") as file:
        file.write("route: {receiver: test, group_by: [alertname], group_wait: 0s, group_interval: 1s}\n"
                   f"receivers: [{{name: test, webhook_configs: [{{url: 'http://127.0.0.1:{receiver.server_port}/', send_resolved: true}}]}}]\n")
    with open(paths["prometheus.yml"], "w") as file:
        file.write(f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{RULES}]\nscrape_configs:\n"
                   f"  - {{job_name: muster, honor_labels: true, static_configs: [{{targets: ['{address[0]}:{address[1]}']}}]}}\n"
                   f"alerting: {{alertmanagers: [{{static_configs: [{{targets: ['{manager}']}}]}}]}}\n")
    try:
        for name, argv in (("alertmanager", ["prometheus-alertmanager", f"--config.file={paths['alertmanager.yml']}", f"--storage.path={paths['alerts']}",
                                             f"--web.listen-address={manager}", "--cluster.listen-address="]),
                           ("prometheus", ["prometheus", f"--config.file={paths['prometheus.yml']}", f"--storage.tsdb.path={paths['tsdb']}",
                                           f"--web.listen-address={prometheus}"])):
            started.append(Process(cluster, name, argv))
        yield prometheus, started[-1], receiver
    finally:
        for process in started:
            process.kill()
            process.wait()
        receiver.end()


def test_prometheus_scrapes_a_job_and_an_alert_fires_and_resolves():
    tool("prometheus")
    tool("prometheus-alertmanager")
    with serving(workers=2, flags=["--crash-limit", "1"]) as (cluster, address):
        cluster.submit(tiny_job(cluster, steps=1000000, eval__every=0))
        cluster.wait_together(2)
        cluster.wait_event("checkpoint_committed")
        cluster.workers[1].kill()
        cluster.wait_event("worker_lost")
        every_metric_is_there(address)
        with monitored(cluster, address) as (listen, prometheus, receiver):
            def asks(expression):
                try:
                    return query(listen, "query?query=" + urllib.parse.quote(expression))["result"]
                except (OSError, ValueError):
                    return []

            def told(status):
                return any(notice[:2] == (status, "MusterWorkerQuarantined") for notice in receiver.notices)
            cluster.wait_until(lambda: asks('muster_job_workers_lost_total{job="tiny"} == 1'), 40, "Prometheus has not scraped the job", watch=prometheus)
            rules = [rule for group in query(listen, "rules")["groups"] for rule in group["rules"]]
            check(len(rules) == len(re.findall("alert:", text_of(RULES))) and all(r["health"] != "err" for r in rules), f"{[r for r in rules if r['health'] == 'err']}")
            page = metrics(address)
            check(float(asks("muster_events_total")[0]["value"][1]) <= page["muster_events_total"], "Prometheus knows more than there is")
            check(not told("firing"), "an alert without a reason")
            again = cluster.start_worker(name="w1")
            cluster.wait_until(lambda: cluster.job().world == 2, 60, "the worker that came back gets no rank", watch=again)
            again.kill()
            cluster.wait_event("worker_quarantined")
            cluster.wait_until(lambda: told("firing"), 60, "nobody was notified", watch=prometheus)
            run(cluster, "undrain", "w1", code=0)
            cluster.wait_until(lambda: told("resolved"), 60, "the alert does not resolve", watch=prometheus)
            runbooks = {notice[2] for notice in receiver.notices}
            check(all(re.search(f"^### {link.split('#')[1]}$", text_of("docs/operations.md"), re.M | re.I) for link in runbooks), f"{runbooks}")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
