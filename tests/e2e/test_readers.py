#!/usr/bin/python3
"""Who may read over HTTP, by a token: programs, Prometheus and browsers get in with one; who has none, a wrong, an old or a revoked one, or one for
joining, learns so and gets nothing; the token stands nowhere but where it was told.

    test_readers.py [TEST...]"""

import base64
import contextlib
import glob
import http.client
import os
import re
import ssl
import time

import grpc

from browser import Browser
from harness import FAST, SLOW, Cluster, Process, check, log_of, main, rpc_error, run, tiny_job
from test_alerts import free_port, query, tool
from test_http import get, http_address
from test_security import P256, JoinCluster, SecureCluster, https_of, request_of

CLOSED = ("/", "/metrics", "/api/v1/jobs", "/api/v1/events?newest=5", "/nothing")


@contextlib.contextmanager
def closed():
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*FAST, "--http", "127.0.0.1:0", "--http-auth"])
        yield cluster, http_address(cluster)


def token_of(cluster, *args, flags=()):
    return run(cluster, *flags, "token", "create", "--role", "viewer", *args, code=0).strip()


def bearer(text):
    return {"Authorization": f"Bearer {text}"}


def basic(text, name="ann"):
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{text}".encode()).decode()}


def test_on_the_loopback_only_with_a_token_if_so_wanted():
    with closed() as (cluster, address):
        for path in CLOSED:
            connection = http.client.HTTPConnection(*address, timeout=10 * SLOW)
            connection.request("GET", path)
            reply = connection.getresponse()
            text, asked = reply.read().decode(), reply.headers.get_all("WWW-Authenticate")
            check(reply.status == 401 and "muster token create --role viewer" in text and "muster_" not in text and "<html" not in text, f"{path}: {reply.status} {text}")
            check(asked == ['Basic realm="muster", charset="UTF-8"', 'Bearer realm="muster"'], f"{path}: {asked}")
        for path in ("/livez", "/readyz"):
            check(get(address, path) == (200, "ok\n"), f"{path} is for everybody")
        text = token_of(cluster)
        for headers in (bearer(text), basic(text), basic(text, "")):
            for path, status in zip(CLOSED, (200, 200, 200, 200, 404)):
                check(get(address, path, **headers)[0] == status, f"{path} with {headers}")
        flipped = text[:-1] + ("0" if text[-1] != "0" else "1")
        for headers in (bearer(flipped), basic(flipped), bearer(text[:-1]), bearer(""), bearer("x" * 5000), {"Authorization": text}, {"Authorization": f"Digest {text}"}, basic(":" + text),
                        bearer(text[:24] + token_of(cluster)[24:])):
            status, said = get(address, "/metrics", **headers)
            check(status == 401 and "mistyped, revoked, over" in said and text not in said, f"{headers}: {status} {said}")
        check(get(address, "/metrics", method="POST", **bearer(text))[0] == 405 and get(address, "/metrics", Host="evil.example", **bearer(text))[0] == 403, "the other rules hold")
        run(cluster, "token", "create", code=5, fragments=["without --ca-key"])
        for words, code, said in ((["--role", "operator"], 2, "worker or viewer"), (["--role", "viewer", "--valid", "3700d"], 2, "--valid"), (["--role", "viewer", "--worker", "h7"], 1, "for no worker")):
            run(cluster, "token", "create", *words, code=code, fragments=[said])


def test_old_and_revoked_tokens_are_none_and_all_outlive_the_coordinator():
    with closed() as (cluster, address):
        text, revoked, short = token_of(cluster), token_of(cluster, "--valid", "90d"), token_of(cluster, "--valid", "2s")
        began, kept = time.monotonic(), http.client.HTTPConnection(*address, timeout=10 * SLOW)

        def asks(token):  # over a connection that was there before
            kept.request("GET", "/metrics", headers=bearer(token))
            with kept.getresponse() as reply:
                reply.read()
                return reply.status
        check(asks(text) == asks(revoked) == 200, "tokens that are good")
        check(asks(short) == 200 or time.monotonic() - began > 1.5, "one that is good for two seconds")
        lines = run(cluster, "token", "ls", code=0).splitlines()
        check(any(re.match(rf"{revoked[7:23]} +viewer +- +many +\d+s +(2159|2160)h\d\dm +1 +\d+s +- ", line) for line in lines), f"{lines}")
        run(cluster, "token", "revoke", revoked[7:23], code=0)
        check(asks(revoked) == 401 and asks(text) == 200, "revoked, and not")
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        cluster.start_coordinator(flags=[*FAST, "--http", f"{address[0]}:{address[1]}", "--http-auth"])
        kept.close()
        check(asks(revoked) == 401 and asks(text) == 200, "after a restart")
        cluster.wait_until(lambda: time.monotonic() - began > 2.1, 10, "time stands still")
        check(asks(short) == 401, "the time is over")
        check([line.split()[0] for line in run(cluster, "token", "ls", code=0).splitlines()[1:]] == [text[7:23]], "what is over is forgotten")


def test_a_token_stands_nowhere_but_where_it_was_told():
    with closed() as (cluster, address):
        text = token_of(cluster)
        wrong = text[:30] + "0123456789" + text[40:]
        check(get(address, "/metrics", **bearer(text))[0] == 200 and get(address, "/metrics", **bearer(wrong))[0] == 401 and get(address, f"/api/v1/{text}", **basic(text))[0] == 404, "tried")
        cluster.wait_until(lambda: "HTTP: 127.0.0.1 showed a token that is not good" in log_of(cluster.coordinator), 5, "the log says nothing of a wrong token")
        for path in range(20):
            get(address, f"/{path}", **bearer(wrong))
        bundle = os.path.join(cluster.dir, "bundle.tar")
        run(cluster, "debug", "bundle", "-O", bundle, code=0)
        run(cluster, "snapshot", "save", os.path.join(cluster.dir, "snapshot"), code=0)
        cluster.coordinator.kill(15)
        check(cluster.coordinator.wait() == 0 and log_of(cluster.coordinator).count("showed a token") == 1, "a line for each wrong token")
        for name in glob.glob(os.path.join(cluster.dir, "**"), recursive=True):
            if os.path.isfile(name):
                with open(name, "rb") as file:
                    content = file.read()
                for secret in (text[24:], wrong[24:]):
                    check(secret.encode() not in content and bytes.fromhex(secret) not in content, f"the token is in {name}")


def test_over_https_a_token_or_a_certificate():
    with JoinCluster() as cluster:
        cluster.start(flags=[*FAST, "--http", "0.0.0.0:0"])
        port, _ = https_of(cluster)
        admin = cluster.flags("admin/x")

        def ask(path, identity=None, **headers):
            context = ssl.create_default_context(cafile=cluster.paths("viewer/x")[0])
            if identity:
                context.load_cert_chain(*cluster.paths(identity)[1:])
            with contextlib.closing(http.client.HTTPSConnection("localhost", port, timeout=20 * SLOW, context=context)) as connection:
                connection.request("GET", path, headers=headers)
                reply = connection.getresponse()
                return reply.status, reply.read().decode()
        text, joining = token_of(cluster, flags=admin), cluster.token()[0]
        for path in CLOSED:
            check(ask(path)[0] == 401, f"{path} without anything")
        for headers in (bearer(text), basic(text)):
            check(ask("/metrics", **headers)[0] == 200 and ask("/metrics", "worker/x", **headers)[0] == 200, f"{headers}")
        check(ask("/metrics", "viewer/x")[0] == 200 and ask("/metrics", "viewer/x", **bearer(joining))[0] == 200, "a certificate is enough")
        for identity in (None, "worker/x"):
            check(ask("/metrics", identity, **bearer(joining))[0] == 401, f"a join token, {identity}")
        check(ask("/metrics", "worker/x")[0] == 403 and ask("/livez")[0] == 200, "a worker, and a probe")
        code, message = rpc_error(lambda: cluster.ask(text, request_of(cluster, "thief", *P256), "thief"))
        check(code == grpc.StatusCode.PERMISSION_DENIED and "is not one of this coordinator's" in message, f"joining with a viewer's token: {code} {message}")
        run(cluster, *cluster.flags("operator/x"), "token", "create", "--role", "viewer", code=6, fragments=["needs the role admin"])
        lines = run(cluster, *admin, "token", "ls", code=0)
        check(re.search(rf"^{text[7:23]} +viewer +- .*muster://admin/x$", lines, re.M) and re.search(rf"^{joining[7:23]} +worker +any ", lines, re.M), lines)
        run(cluster, *admin, "token", "revoke", text[7:23], code=0)
        check(ask("/metrics", **bearer(text))[0] == 401, "a revoked one")
    with SecureCluster() as cluster:  # nothing signs certificates here
        cluster.start(flags=[*FAST, "--http", "0.0.0.0:0"])
        token_of(cluster, flags=cluster.flags("admin/x"))
        run(cluster, *cluster.flags("admin/x"), "token", "create", code=5, fragments=["without --ca-key"])


def test_in_the_open_without_tls_there_is_no_way_around_a_token():
    with Cluster() as cluster:
        cluster.start_coordinator(flags=[*FAST, "--http", "0.0.0.0:0", "--insecure-listen"])
        address = ("127.0.0.1", http_address(cluster)[1])
        check(get(address, "/metrics")[0] == 401 and get(address, "/metrics", **bearer(token_of(cluster)))[0] == 200 and get(address, "/livez")[0] == 200, "in the open")


def test_prometheus_scrapes_with_a_token():
    tool("prometheus")
    with closed() as (cluster, address):
        listen, config = f"127.0.0.1:{free_port()}", os.path.join(cluster.dir, "prometheus.yml")
        text = token_of(cluster)
        jobs = ""
        for name, credentials in (("good", text), ("bad", text[:-8] + "00000000")):
            path = os.path.join(cluster.dir, f"token-{name}")
            with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
                file.write(credentials + "\n")
            jobs += f"  - {{job_name: {name}, authorization: {{credentials_file: {path}}}, static_configs: [{{targets: ['{address[0]}:{address[1]}']}}]}}\n"
        with open(config, "w") as file:
            file.write(f"global: {{scrape_interval: 1s}}\nscrape_configs:\n{jobs}")
        prometheus = Process(cluster, "prometheus", ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={cluster.dir}/tsdb", f"--web.listen-address={listen}"])

        def health():
            try:
                return {target["labels"]["job"]: (target["health"], target["lastError"]) for target in query(listen, "targets")["activeTargets"]}
            except (OSError, ValueError):
                return {}
        try:
            cluster.wait_until(lambda: len(health()) == 2 and all(state != "unknown" for state, _ in health().values()), 40, "Prometheus has not scraped", watch=prometheus)
            check(health()["good"] == ("up", "") and health()["bad"][0] == "down" and "401" in health()["bad"][1], f"{health()}")
            check(query(listen, "query?query=muster_build_info")["result"][0]["metric"]["job"] == "good", "no numbers")
        finally:
            prometheus.kill()
            prometheus.wait()


def test_a_browser_asks_its_user():
    with closed() as (cluster, address), Browser(cluster.dir) as browser:
        text = token_of(cluster)
        page = f"http://{address[0]}:{address[1]}/"
        browser.answer_challenges(None)
        browser.open(page)
        browser.wait("document.body && document.body.innerText.includes('in a browser as the password')")
        browser.answer_challenges(("ann", text))
        cluster.submit(tiny_job(cluster))
        browser.open(page)
        browser.wait("document.body && document.body.dataset.turns >= 1 && document.querySelector('#jobs').innerText.includes('tiny')")
        asked = browser.challenges
        browser.wait("document.body.dataset.turns >= 3", 30)  # what the page asks for goes without further questions
        check(browser.challenges == asked, f"the user was asked {browser.challenges - asked} times more")
        browser.answer_challenges(None)
        run(cluster, "token", "revoke", text[7:23], code=0)
        browser.wait("document.querySelector('#alarms').innerText.includes('does not let you read any more')", 40)
        check("does not let you read" in browser.eval("document.querySelector('#health').innerText"), "the health line")
        check(all("401" in error for error in browser.errors), f"the console says: {browser.errors}")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
