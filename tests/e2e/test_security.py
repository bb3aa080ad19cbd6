#!/usr/bin/python3
"""Mutual TLS between real processes: a job trains over it to the same weights; who has no certificate, a foreign or an expired one learns so
in one line; certificates are replaced without a restart; each role may do what it should; who is on the list of the denied is cut off.

    test_security.py [TEST...]"""

import glob
import http.client
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import time
import urllib.request
import warnings

import grpc

from harness import BUILD, FAST, ROOT, SLOW, Cluster, Process, api, check, connect, log_of, main, reference, rpc_error, run, tiny_job

from muster.v1 import token_pb2 as tokens

STEPS = 30
MUSTER = os.path.join(BUILD, "cli/muster")
NO_TLS = {"MUSTER_TLS_CA": "", "MUSTER_TLS_CERT": "", "MUSTER_TLS_KEY": ""}


class SecureCluster(Cluster):
    def __init__(self):
        super().__init__()
        self.pki = os.path.join(self.dir, "pki")
        self.deny = os.path.join(self.dir, "denied")
        cert("ca", self.pki)
        self.issue("coordinator/c", "--hosts", "localhost,127.0.0.1")
        for role in ("worker", "viewer", "operator", "admin"):
            self.issue(f"{role}/x")
        self.credentials = self.credentials_of("admin/x")

    def issue(self, identity, *args):
        cert("issue", self.pki, identity, *args)

    def paths(self, identity, pki=None):
        return [os.path.join(pki or self.pki, name) for name in ("ca.crt", identity.replace("/", "-") + ".crt", identity.replace("/", "-") + ".key")]

    def flags(self, identity, pki=None):
        ca, own, key = self.paths(identity, pki)
        return ["--tls-ca", ca, "--tls-cert", own, "--tls-key", key]

    def credentials_of(self, identity, pki=None):
        ca, own, key = (open(path, "rb").read() for path in self.paths(identity, pki))
        return grpc.ssl_channel_credentials(open(self.paths(identity)[0], "rb").read() if pki else ca, key, own)

    def start(self, flags=FAST):
        open(self.deny, "a").close()
        self.start_coordinator(flags=[*flags, *self.flags("coordinator/c"), "--tls-deny", self.deny])

    def worker(self, identity="worker/x", **more):
        return self.start_worker(flags=self.flags(identity), **more)

    def reload_seen(self, text, count=1):
        self.wait_until(lambda: log_of(self.coordinator).count(text) >= count, 5, f"musterd does not say '{text}'")


def cert(*args, code=0):
    done = subprocess.run([MUSTER, "cert", *args], capture_output=True, text=True, timeout=20 * SLOW)
    check(done.returncode == code, f"muster cert {args}: {done.returncode} {done.stderr}")
    return done.stderr


def served_serial(cluster):
    """The serial number of the certificate that musterd shows to a new connection."""
    ca, own, key = cluster.paths("viewer/x")
    shown = subprocess.run(["openssl", "s_client", "-connect", cluster.address, "-alpn", "h2", "-CAfile", ca, "-cert", own, "-key", key],
                           input="", capture_output=True, encoding="latin-1", timeout=10 * SLOW).stdout
    return subprocess.run(["openssl", "x509", "-noout", "-serial"], input=shown, capture_output=True, text=True).stdout


def test_trains_over_mutual_tls():
    with SecureCluster() as cluster:
        cluster.start()
        cluster.submit(tiny_job(cluster, steps=STEPS))
        ca, own, key = cluster.paths("worker/x")
        cluster.worker()
        cluster.start_worker(env={"MUSTER_TLS_CA": ca, "MUSTER_TLS_CERT": own, "MUSTER_TLS_KEY": key})
        check(cluster.wait_finished() == reference(steps=STEPS), "the weights differ from those without TLS")
        check("tiny" in run(cluster, *cluster.flags("viewer/x"), "status", code=0), "muster status shows no job")


def test_keys_are_private():
    with SecureCluster() as cluster:
        keys = [name for name in os.listdir(cluster.pki) if name.endswith(".key")]
        check(len(keys) == 6, f"keys: {keys}")
        for name in keys:
            mode = stat.S_IMODE(os.stat(os.path.join(cluster.pki, name)).st_mode)
            check(mode == 0o600, f"{name} has mode {mode:o}")
        check("exists" in cert("ca", cluster.pki, code=5), "a CA was overwritten")
        for wrong in (["root/x"], ["worker/"], ["worker/a,b"], ["worker/x", "--hosts", "h"], ["coordinator/c"], ["worker/x", "--valid", "0d"]):
            check(cert("issue", cluster.pki, *wrong, code=2).count("\n") == 1, f"{wrong}: not one line")
        os.chmod(cluster.paths("worker/x")[2], 0o644)
        cluster.start()
        check(cluster.worker().wait() != 0, "a key that others may read was used")
        check("chmod 600" in log_of(cluster.workers[0]), "no word of the key's mode")


def test_strangers_learn_why():
    with SecureCluster() as cluster:
        cluster.start()
        other = os.path.join(cluster.dir, "other")
        cert("ca", other)
        cert("issue", other, "admin/x")
        cluster.issue("admin/old", "--valid", "1s")
        old = cluster.credentials_of("admin/old")
        time.sleep(1.1)
        run(cluster, "status", code=3, fragments=["does it want TLS", "--tls-cert"])
        run(cluster, *cluster.flags("admin/x", other), "status", code=3, fragments=["not of the CA that --tls-ca names"])
        mixed = ["--tls-ca", cluster.paths("admin/x")[0], *cluster.flags("admin/x", other)[2:]]
        run(cluster, *mixed, "status", code=3, fragments=["with a certificate of its CA"])
        run(cluster, *cluster.flags("admin/old"), "status", code=1, fragments=["expired", "muster cert issue"])
        run(cluster, "--tls-ca", cluster.paths("admin/x")[0], "status", code=1, fragments=["certificate is missing"])
        mute = cluster.start_worker(flags=["--give-up-after", "1"])
        check(mute.wait() == 3, f"a worker without certificate ended with {mute.popen.returncode}")
        check(log_of(mute).count("does it want TLS") == 1, log_of(mute))
        # The coordinator itself turns away what our own clients would not have tried.
        for credentials in (old, cluster.credentials_of("admin/x", other), grpc.ssl_channel_credentials(open(cluster.paths("admin/x")[0], "rb").read())):
            with connect(cluster.address, credentials) as channel:
                stub = channel.unary_unary("/grpc.health.v1.Health/Check")
                code, text = rpc_error(lambda: stub(b"", timeout=5 * SLOW))
                check(code == grpc.StatusCode.UNAVAILABLE, f"{code}: {text}")


def test_a_certificate_serves_on_its_own_side_only():
    with SecureCluster() as cluster:
        cluster.start()
        cluster.credentials = cluster.credentials_of("coordinator/c")
        code, text = rpc_error(cluster.job)
        check(code == grpc.StatusCode.UNAVAILABLE, f"a client shows the coordinator's certificate: {code} {text}")
        address = os.path.join(cluster.dir, "false")
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        false = Process(cluster, "false", [os.path.join(BUILD, "coordinator/musterd"), "--volatile", "--listen", "127.0.0.1:0", "--address-file", address,
                                           *cluster.flags("worker/x")])
        try:
            cluster.wait_until(lambda: os.path.exists(address), 10, "the false coordinator does not listen", watch=false)
            cluster.address = open(address).read().strip()
            run(cluster, *cluster.flags("admin/x"), "status", code=3, fragments=["its certificate"])
        finally:
            false.kill()
            false.wait()


def test_replaced_certificates_are_used():
    with SecureCluster() as cluster:
        cluster.start()
        before = served_serial(cluster)
        check("serial=" in before, f"no certificate: {before}")
        cluster.issue("coordinator/c", "--hosts", "localhost,127.0.0.1")
        cluster.reload_seen("replaced certificate")
        cluster.wait_until(lambda: served_serial(cluster) not in ("", before), 5, "the former certificate is still shown")
        with open(cluster.paths("coordinator/c")[1], "w") as file:
            file.write("nonsense")
        cluster.reload_seen("the former certificate stays in use")
        run(cluster, *cluster.flags("viewer/x"), "status", code=0)


def test_a_running_worker_changes_to_another_ca():
    """CA, certificate and key of a worker are replaced while it trains; then those of the coordinator: only the new ones fit together."""
    with SecureCluster() as cluster:
        other, own = os.path.join(cluster.dir, "other"), os.path.join(cluster.dir, "own")
        cert("ca", other)
        for identity, *more in (("coordinator/c", "--hosts", "localhost,127.0.0.1"), ("worker/x",), ("admin/x",)):
            cert("issue", other, identity, *more)
        mine = [os.path.join(own, name) for name in ("ca.crt", "worker.crt", "worker.key")]

        def replace(pki):
            os.makedirs(own, exist_ok=True)
            for source, path in zip(cluster.paths("worker/x", pki), mine):
                shutil.copy(source, path + ".new")
                os.replace(path + ".new", path)

        replace(cluster.pki)
        cluster.start()
        cluster.submit(tiny_job(cluster, steps=1000000))
        worker = cluster.start_worker(flags=[word for pair in zip(("--tls-ca", "--tls-cert", "--tls-key"), mine) for word in pair])
        cluster.wait_step(3)
        replace(other)
        cluster.wait_step(cluster.job().steps_done + 3)
        check(worker.alive() and not [e for e in cluster.events if e.kind == "worker_lost"], "what is connected stays so")
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        ca, crt, key = (open(path, "rb").read() for path in cluster.paths("admin/x", other))
        cluster.credentials = grpc.ssl_channel_credentials(ca, key, crt)
        cluster.start_coordinator(flags=[*FAST, *cluster.flags("coordinator/c", other)])
        cluster.wait_event("worker_reattached")
        check(cluster.job().workers_lost == 0, "the worker was lost")


def test_roles():
    calls = {"ListJobs": (api.ListJobsRequest(), api.ListJobsResponse, "viewer"), "DrainWorker": (api.DrainWorkerRequest(worker="nobody", reason="r"), api.DrainWorkerResponse, "operator"),
             "CancelJob": (api.CancelJobRequest(name="none"), api.CancelJobResponse, "operator"), "SaveSnapshot": (api.SaveSnapshotRequest(), api.SaveSnapshotResponse, "admin")}
    rank = ["viewer", "operator", "admin"]
    with SecureCluster() as cluster:
        cluster.start()
        for role in ("worker", *rank):
            cluster.credentials = cluster.credentials_of(f"{role}/x")
            for method, (request, response, needed) in calls.items():
                code, text = rpc_error(lambda: cluster.call(method, request, response))
                may = role in rank and rank.index(role) >= rank.index(needed)
                check((code != grpc.StatusCode.PERMISSION_DENIED) == may, f"{role} calls {method}: {code} {text}")
                check(may or text == f"muster://{role}/x has the role {role}; {method} needs the role {needed}", f"{role} calls {method}: {text}")
        run(cluster, *cluster.flags("viewer/x"), "drain", "w", "--reason", "r", code=6, fragments=["muster://viewer/x has the role viewer", "needs the role operator"])
        for role in rank:
            run(cluster, *cluster.flags(f"{role}/x"), "token", "ls", code=0 if role == "admin" else 6)
        worker = cluster.worker("admin/x")
        cluster.wait_until(lambda: "Attach needs the role worker" in log_of(worker), 5, "an admin may attach, or is not told")


def test_the_denied_are_cut_off():
    with SecureCluster() as cluster:
        cluster.issue("worker/bad")
        cluster.start()
        cluster.submit(tiny_job(cluster, steps=1000000))
        cluster.worker(name="x-good")
        cluster.worker("worker/bad", name="bad")
        cluster.wait_event(lambda e: e.kind == "worker_attached" and "bad" in e.text)
        with connect(cluster.address, cluster.credentials_of("viewer/x")) as channel:
            stub = channel.unary_stream("/muster.v1.MusterService/WatchEvents", request_serializer=lambda m: m.SerializeToString())
            watch = stub(api.WatchEventsRequest(follow=True), timeout=10 * SLOW)
            next(watch)
            with open(cluster.deny, "w") as file:
                file.write("# stolen\nmuster://worker/bad # w7\nmuster://viewer/x")
            cluster.reload_seen("calls cut: 2")
            code, text = rpc_error(lambda: list(watch))
            check(code == grpc.StatusCode.PERMISSION_DENIED and "list of denied" in text, f"the watch ended with {code} {text}")
        cluster.wait_event(lambda e: e.kind == "worker_lost" and "bad" in e.text)
        cluster.reload_seen("muster://worker/bad is on the coordinator's list")
        check("list of denied identities" in log_of(cluster.workers[1]), "the denied worker is not told")
        with open(cluster.deny, "w") as file:
            file.write("worker/x\n")
        cluster.reload_seen("the former list stays in force")
        check("x-good" in [w.name for w in cluster.list_workers("tiny")], "the other worker is gone")


def https_of(cluster):
    """musterd's HTTPS listens everywhere; it is asked under the name that its certificate has."""
    found = []
    cluster.wait_until(lambda: found.extend(re.findall(r"dashboard at https://0\.0\.0\.0:(\d+)/", log_of(cluster.coordinator))) or found, 10, "musterd names no HTTPS address")
    port = int(found[-1])

    def ask(identity, path="/metrics", pki=None):
        context = ssl.create_default_context(cafile=cluster.paths("viewer/x")[0])
        if identity:
            context.load_cert_chain(*cluster.paths(identity, pki)[1:])
        connection = http.client.HTTPSConnection("localhost", port, timeout=20 * SLOW, context=context)
        try:
            connection.request("GET", path)
            shown = connection.sock.getpeercert()["serialNumber"]
            reply = connection.getresponse()
            return reply.status, reply.read().decode(), shown
        finally:
            connection.close()
    return port, ask


def test_https_for_those_with_a_role():
    with SecureCluster() as cluster:
        open(cluster.deny, "a").close()
        cluster.start(flags=[*FAST, "--http", "0.0.0.0:0"])
        port, ask = https_of(cluster)
        for identity in ("viewer/x", "operator/x", "admin/x"):
            status, page, shown = ask(identity)
            check(status == 200 and "muster_build_info" in page, f"{identity}: {status} {page[:200]}")
        check(ask("viewer/x", "/")[0] == 200 and ask("viewer/x", "/api/v1/jobs")[1] == '{"jobs":[],"next_page_token":""}', "the dashboard")
        for identity, path, expected, text in (("worker/x", "/metrics", 403, "needs the role viewer"), ("worker/x", "/livez", 200, "ok"), (None, "/metrics", 401, "certificate"),
                                               (None, "/livez", 200, "ok")):
            status, page, _ = ask(identity, path)
            check(status == expected and text in page, f"{identity} {path}: {status} {page[:200]}")
        other = os.path.join(cluster.dir, "other")
        cert("ca", other)
        cert("issue", other, "admin/x")
        check(ask("admin/x", pki=other)[0] == 401, "a certificate of another CA")
        with socket.create_connection(("127.0.0.1", port)) as s:
            s.settimeout(20 * SLOW)
            s.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            check(b"muster_" not in s.recv(65536), "metrics in the clear")
        curl = subprocess.run(["curl", "-sS", "--cacert", cluster.paths("viewer/x")[0], "--cert", cluster.paths("viewer/x")[1], "--key", cluster.paths("viewer/x")[2],
                               f"https://localhost:{port}/livez"], capture_output=True, text=True, timeout=20 * SLOW)
        check(curl.stdout == "ok\n", f"curl: {curl}")
        cluster.issue("coordinator/c", "--hosts", "localhost,127.0.0.1")
        cluster.wait_until(lambda: ask("viewer/x")[2] != shown, 10, "the replaced certificate is not used")
        with open(cluster.deny, "w") as denied:
            denied.write("muster://viewer/x\n")
        cluster.wait_until(lambda: ask("viewer/x")[0] == 403, 10, "the denied may still read")
        check("denied" in ask("viewer/x")[1] and ask("operator/x")[0] == 200, "who is denied, and who is not")


def test_old_versions_of_tls_are_refused():
    with SecureCluster() as cluster:
        cluster.start(flags=[*FAST, "--http", "0.0.0.0:0"])
        ca, own, key = cluster.paths("admin/x")
        for what, port in (("gRPC", int(cluster.address.rsplit(":", 1)[1])), ("HTTP", https_of(cluster)[0])):
            for version, is_good in ((ssl.TLSVersion.TLSv1, False), (ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)):
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.set_ciphers("DEFAULT:@SECLEVEL=0")  # or our own side would not even ask
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that the version is old is the point
                    context.minimum_version = context.maximum_version = version
                context.set_alpn_protocols(["h2"] if what == "gRPC" else ["http/1.1"])
                context.load_verify_locations(ca)
                context.load_cert_chain(own, key)
                error = None  # of the library in gRPC the other side sees no alert, only the end
                with socket.create_connection(("127.0.0.1", port)) as plain:
                    plain.settimeout(20 * SLOW)
                    try:
                        with context.wrap_socket(plain, server_hostname="localhost") as s:
                            check(is_good, f"{what}: {s.version()} is spoken")
                    except ssl.SSLError as reason:
                        error = reason.reason or str(reason)
                check(bool(error) != is_good, f"{what}: {version.name}: {error}")


def test_what_holds_a_key_leaves_no_core_dump():
    """The kernel gives the files in /proc of a process that it may not dump to root."""
    user = {} if os.getuid() else {"user": 65534, "group": 65534, "extra_groups": []}
    with SecureCluster() as cluster:
        if user:
            subprocess.run(["chown", "-R", "65534:65534", cluster.dir], check=True)
        secret = cluster.flags("coordinator/c")
        programs = {"musterd": [os.path.join(BUILD, "coordinator/musterd"), "--volatile", "--listen", "127.0.0.1:0"],
                    "muster-worker": [os.path.join(BUILD, "worker/muster-worker"), "--coordinator", "127.0.0.1:1", "--job", "tiny"],
                    "muster": [os.path.join(BUILD, "cli/muster"), "--coordinator", "127.0.0.1:1", "events", "-f"]}
        for name, command in programs.items():
            flags = secret if name == "musterd" else cluster.flags("worker/x" if name == "muster-worker" else "admin/x")
            owners = []
            for more in ([], flags):
                process = subprocess.Popen([*command[:1], *more, *command[1:]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=cluster.dir,
                                           env={**os.environ, **NO_TLS}, **user)
                owner = lambda: os.stat(f"/proc/{process.pid}/stat").st_uid
                if more:
                    cluster.wait_until(lambda: owner() == 0 or process.poll() is not None, 10, f"{name}: its memory may be dumped")
                else:
                    cluster.wait_until(lambda: owner() == (user or {"user": os.getuid()})["user"], 10, f"{name} without a key: this test sees nothing")
                owners.append(owner())
                process.kill()
                process.wait()
            check(owners[0] != owners[1] == 0, f"{name}: {owners}")


def test_listening_in_the_open_needs_tls_or_consent():
    with SecureCluster() as cluster:
        musterd = [os.path.join(BUILD, "coordinator/musterd"), "--volatile", "--listen"]
        for listen in ("0.0.0.0:0", "[::]:0", "127.example.org:0"):
            done = subprocess.run([*musterd, listen], capture_output=True, text=True, timeout=10 * SLOW)
            check(done.returncode == 2 and done.stderr.count("\n") == 1 and "--tls-ca" in done.stderr and "--insecure-listen" in done.stderr,
                  f"{listen}: {done.returncode} {done.stderr}")
        for name, flags in (("insecure", ["--insecure-listen"]), ("secure", cluster.flags("coordinator/c"))):
            process = Process(cluster, name, [*musterd, "0.0.0.0:0", *flags], NO_TLS)
            try:
                cluster.wait_until(lambda: "listens on" in log_of(process), 10, "musterd does not listen", watch=process)
            finally:
                process.kill()
                process.wait()
            check(("without encryption" in log_of(process)) == (name == "insecure"), log_of(process))


# ---- join tokens ----


class JoinCluster(SecureCluster):
    def start(self, flags=FAST):
        super().start(flags=[*flags, "--ca-key", os.path.join(self.pki, "ca.key")])

    def token(self, *args):
        """A new one, and the file that it is in."""
        text = run(self, *self.flags("admin/x"), "token", "create", *args, code=0).strip()
        path = os.path.join(self.dir, "token-" + text[7:23])
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(text + "\n")
        return text, path

    def joiner(self, name, path, job="tiny", more=()):
        """A worker that has nothing but the CA's certificate and a token."""
        own = os.path.join(self.dir, name)
        return self.start_worker(job, name=name, flags=["--tls-ca", os.path.join(self.pki, "ca.crt"), "--tls-cert", own + ".crt", "--tls-key", own + ".key",
                                                        "--join-token-file", path, "--give-up-after", "300", *more])

    def refused(self, name, path, *fragments):
        worker = self.joiner(name, path)
        check(worker.wait() == 1, f"{name} ended with {worker.popen.returncode}: {log_of(worker)}")
        for fragment in (*fragments, "cannot join"):
            check(fragment in log_of(worker), f"'{fragment}' is missing: {log_of(worker)}")
        check(not os.path.exists(os.path.join(self.dir, name + ".crt")) and not os.path.exists(os.path.join(self.dir, name + ".key")), "something was written")

    def ask(self, token, request, worker="w"):
        """Join by hand, without a certificate."""
        with open(os.path.join(self.pki, "ca.crt"), "rb") as ca, connect(self.address, grpc.ssl_channel_credentials(ca.read())) as channel:
            stub = channel.unary_unary("/muster.v1.TokenService/Join", request_serializer=lambda m: m.SerializeToString(),
                                       response_deserializer=tokens.JoinResponse.FromString)
            return stub(tokens.JoinRequest(token=token, worker=worker, certificate_request=request), timeout=10 * SLOW)


def request_of(cluster, name, *args):
    """A PKCS #10 request (DER) as OpenSSL makes it, and its key's file."""
    key, out = os.path.join(cluster.dir, name + ".pem"), os.path.join(cluster.dir, name + ".der")
    subprocess.run(["openssl", "req", "-new", "-nodes", "-keyout", key, "-outform", "DER", "-out", out, "-subj", "/CN=admin", *args], check=True, capture_output=True)
    return open(out, "rb").read()


P256 = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")


def test_a_token_makes_a_worker_once():
    with JoinCluster() as cluster:
        cluster.start()
        cluster.submit(tiny_job(cluster, steps=STEPS))
        text, path = cluster.token()
        worker = cluster.joiner("h1", path)
        check(cluster.wait_finished() == reference(steps=STEPS), "the weights differ")
        check(worker.wait() == 0, log_of(worker))
        check(stat.S_IMODE(os.stat(os.path.join(cluster.dir, "h1.key")).st_mode) == 0o600, "the key can be read by others")
        shown = subprocess.run(["openssl", "x509", "-in", os.path.join(cluster.dir, "h1.crt"), "-noout", "-ext", "subjectAltName,extendedKeyUsage"],
                               capture_output=True, text=True, check=True).stdout
        check("URI:muster://worker/h1\n" in shown and "Client" in shown and "Server" not in shown, shown)
        cluster.refused("h2", path, "was used already, by the worker 'h1'")
        cluster.submit(tiny_job(cluster, name="again", steps=5))
        second = cluster.joiner("h1", path, job="again")  # it has its certificate: the token does not matter
        check(second.wait() == 0 and "joined" not in log_of(second), log_of(second))
        secret = text.rsplit(".", 1)[1]
        for name in glob.glob(os.path.join(cluster.dir, "**"), recursive=True):
            if os.path.isfile(name) and name != path:
                with open(name, "rb") as file:
                    content = file.read()
                check(secret.encode() not in content and bytes.fromhex(secret) not in content, f"the token is in {name}")
        check(all(secret not in event.text for event in cluster.events), "the token is in an event")
        listed = run(cluster, *cluster.flags("admin/x"), "token", "ls", code=0)
        check(text[7:23] in listed and "h1" in listed and secret not in listed, listed)


def test_tokens_that_are_not_good_are_refused_and_outlive_the_coordinator():
    with JoinCluster() as cluster:
        cluster.issue("worker/thief")
        cluster.start()
        cluster.submit(tiny_job(cluster, steps=STEPS))
        request = request_of(cluster, "one", *P256)
        used, _ = cluster.token()
        identity = cluster.ask(used, request, "first").identity
        check(identity == "muster://worker/first", identity)
        over, over_path = cluster.token("--valid", "1s")
        revoked, revoked_path = cluster.token()
        named, named_path = cluster.token("--worker", "h7")
        many, many_path = cluster.token("--reusable", "--valid", "2d")
        fresh, fresh_path = cluster.token()
        run(cluster, *cluster.flags("admin/x"), "token", "revoke", revoked[7:23], code=0)
        run(cluster, *cluster.flags("admin/x"), "token", "revoke", revoked[7:23], code=4, fragments=["there is no token"])
        time.sleep(1.1)
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        cluster.start()
        again = cluster.ask(used, request, "first")  # the answer may have been lost: the same key is answered again
        check(again.identity == identity, again.identity)
        for name in ("second", "first"):
            code, message = rpc_error(lambda: cluster.ask(used, request_of(cluster, "two", *P256), name))
            check(code == grpc.StatusCode.PERMISSION_DENIED and "used already" in message, f"{name}: {code} {message}")
        for text in (over, revoked):
            code, message = rpc_error(lambda: cluster.ask(text, request))
            check(code == grpc.StatusCode.PERMISSION_DENIED and ("is not one of this coordinator's" in message or "is over" in message), f"{code} {message}")
        cluster.refused("h9", revoked_path, "is not one of this coordinator's")
        cluster.refused("h8", named_path, "is for the worker 'h7', not for 'h8'")
        for text in ("", "muster-", fresh[:-1], fresh[:-1] + ("0" if fresh[-1] != "0" else "1"), fresh + "0", fresh.replace("muster", "master"), "muster-" + "0" * 16 + fresh[23:],
                     fresh[:24] + "g" * 64, "x" * 5000):
            code, message = rpc_error(lambda: cluster.ask(text, request))
            check(code == grpc.StatusCode.PERMISSION_DENIED and "is not one of this coordinator's" in message, f"{text}: {code} {message}")
        with open(cluster.deny, "w") as file:
            file.write("muster://worker/thief\n")
        cluster.reload_seen("the list of denied identities was read again")
        code, message = rpc_error(lambda: cluster.ask(fresh, request, "thief"))
        check(code == grpc.StatusCode.PERMISSION_DENIED and "list of denied" in message, f"{code} {message}")
        bad = {"garbage": b"0\x03abc", "nothing": b"", "of RSA": request_of(cluster, "rsa", "-newkey", "rsa:2048"), "cut off": request[:-5], "with more behind": request + b"x",
               "of another curve": request_of(cluster, "p384", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384"),
               "not signed by its key": request[:-10] + bytes([request[-10] ^ 1]) + request[-9:]}
        for what, wrong in bad.items():
            code, message = rpc_error(lambda: cluster.ask(fresh, wrong))
            check(code == grpc.StatusCode.INVALID_ARGUMENT and "certificate_request" in message, f"{what}: {code} {message}")
        for wrong in ("", "W", "../x", "x" * 64):
            code, message = rpc_error(lambda: cluster.ask(fresh, request, wrong))
            check(code == grpc.StatusCode.INVALID_ARGUMENT and "worker" in message, f"worker '{wrong}': {code} {message}")
        for name, path in (("h7", named_path), ("m1", many_path), ("m2", many_path), ("f1", fresh_path)):
            cluster.joiner(name, path)
            cluster.wait_until(lambda: os.path.exists(os.path.join(cluster.dir, name + ".crt")), 10, f"{name} got no certificate")
        check(cluster.wait_finished() == reference(steps=STEPS), "the weights differ")
        lines = run(cluster, *cluster.flags("admin/x"), "token", "ls", code=0).splitlines()
        check(any(re.match(rf"{many[7:23]} +worker +any +many .* 2 .* m2 ", line) for line in lines) and not any(over[7:23] in line for line in lines), f"{lines}")


def test_strangers_may_join_and_nothing_else():
    with JoinCluster() as cluster:
        cluster.start()
        with open(os.path.join(cluster.pki, "ca.crt"), "rb") as ca, connect(cluster.address, grpc.ssl_channel_credentials(ca.read())) as channel:
            for name in os.listdir(os.path.join(ROOT, "proto/muster/v1")):
                text = open(os.path.join(ROOT, "proto/muster/v1", name)).read()
                for service, body in re.findall(r"^service (\w+) \{(.*?)^\}", text, re.M | re.S):
                    for method in re.findall(r"rpc (\w+)\(", body):
                        if (service, method) == ("TokenService", "Join"):
                            continue
                        code, message = rpc_error(lambda: list(channel.stream_stream(f"/muster.v1.{service}/{method}")(iter([b""]), timeout=10 * SLOW)))
                        check(code == grpc.StatusCode.PERMISSION_DENIED and "no certificate was shown" in message, f"{service}.{method}: {code} {message}")
            for method in ("grpc.health.v1.Health/Check", "grpc.health.v1.Health/Watch", "grpc.reflection.v1.ServerReflection/ServerReflectionInfo"):
                code, message = rpc_error(lambda: list(channel.stream_stream("/" + method)(iter([b""]), timeout=10 * SLOW)))
                check(code == grpc.StatusCode.PERMISSION_DENIED, f"{method}: {code} {message}")
        other = os.path.join(cluster.dir, "other")
        cert("ca", other)
        cert("issue", other, "admin/x")
        cluster.credentials = cluster.credentials_of("admin/x", other)
        code, message = rpc_error(cluster.job)  # a certificate that is shown is verified, although none would do
        check(code == grpc.StatusCode.UNAVAILABLE, f"{code} {message}")
    with SecureCluster() as cluster:
        cluster.start()
        run(cluster, *cluster.flags("admin/x"), "token", "create", code=5, fragments=["without --ca-key"])
    with Cluster() as cluster:
        cluster.start_coordinator()
        run(cluster, "token", "create", code=5, fragments=["without --ca-key"])
        done = subprocess.run([os.path.join(BUILD, "coordinator/musterd"), "--volatile", "--listen", "127.0.0.1:0", "--ca-key", "x"], capture_output=True, text=True, timeout=10 * SLOW)
        check(done.returncode == 2 and "needs --tls-ca" in done.stderr, f"{done.returncode} {done.stderr}")


def certificate_of(cluster, name):
    """The file and what OpenSSL says of it: serial number and subject, names, end."""
    path = os.path.join(cluster.dir, name + ".crt")
    shown = subprocess.run(["openssl", "x509", "-in", path, "-noout", "-serial", "-subject", "-ext", "subjectAltName", "-enddate"], capture_output=True, text=True, check=True)
    return shown.stdout


def renew(channel, request):
    stub = channel.unary_unary("/muster.v1.TokenService/Renew", request_serializer=lambda m: m.SerializeToString(), response_deserializer=tokens.RenewResponse.FromString)
    return stub(tokens.RenewRequest(certificate_request=request), timeout=10 * SLOW).certificate


def test_certificates_of_joined_workers_are_renewed():
    life_s = int(2 * SLOW)
    with JoinCluster() as cluster:
        cluster.start(flags=[*FAST, "--http", "127.0.0.1:0", "--certificate-valid-s", str(life_s)])
        cluster.submit(tiny_job(cluster, steps=1000000))
        _, path = cluster.token("--reusable")
        alone, several = cluster.joiner("h1", path, more=["--vitals-every", "50"]), cluster.joiner("h2", path, more=["--device", "cpu", "--vitals-every", "50"])
        cluster.wait_until(lambda: len(cluster.list_workers("tiny")) == 2, 10, "not both workers attach")
        before = {name: certificate_of(cluster, name) for name in ("h1", "h2")}
        keys = {name: open(os.path.join(cluster.dir, name + ".key"), "rb").read() for name in before}
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        cluster.wait_until(lambda: "cannot be renewed" in log_of(alone) + log_of(several), 10, "no renewal was tried", watch=alone)
        cluster.start(flags=[*FAST, "--http", "127.0.0.1:0", "--certificate-valid-s", "86400"])
        for worker in (alone, several):
            cluster.wait_until(lambda: "was renewed" in log_of(worker), 5, "the renewal was not tried again", watch=worker)
            check(log_of(worker).count("cannot be renewed") <= 2, "each reason is told once in a row: " + log_of(worker))
        for name, was in before.items():
            now = certificate_of(cluster, name)
            check(now.split("\n")[0] != was.split("\n")[0] and f"URI:muster://worker/{name}\n" in now, f"{was}{now}")
            key = os.path.join(cluster.dir, name + ".key")
            check(open(key, "rb").read() == keys[name] and stat.S_IMODE(os.stat(key).st_mode) == 0o600, "the key is another one")
        check(not [name for name in os.listdir(cluster.dir) if name.endswith(".tmp")], f"{os.listdir(cluster.dir)}")
        tomorrow = lambda: any(line.startswith('muster_job_certificate_expiry_timestamp_seconds{job="tiny"} ') and float(line.split(" ")[1]) > time.time() + 40000
                               for line in metrics_page(cluster).split("\n"))
        cluster.wait_until(tomorrow, 10, "the workers do not tell when their certificates are over")
        check(alone.alive() and several.alive() and not [e for e in cluster.events if e.kind == "worker_lost"], "a worker was lost")
        cluster.cancel()
        check(alone.wait() == 0 and several.wait() == 0, "the workers do not leave")


def metrics_page(cluster):
    pages = lambda: re.findall(r"HTTP: .* (http://\S+/metrics)", log_of(cluster.coordinator))  # noqa: E731
    return urllib.request.urlopen(cluster.wait_until(pages, 10, "musterd names no page")[-1], timeout=10 * SLOW).read().decode()


def test_who_may_renew_what():
    with JoinCluster() as cluster:
        cluster.issue("worker/short", "--valid", "2s")
        cluster.start()
        request = request_of(cluster, "hand", *P256, "-addext", "subjectAltName=URI:muster://admin/root")
        made = cluster.ask(cluster.token()[0], request, "hand")
        own = grpc.ssl_channel_credentials(open(os.path.join(cluster.pki, "ca.crt"), "rb").read(), open(os.path.join(cluster.dir, "hand.pem"), "rb").read(), made.certificate)
        with connect(cluster.address, own) as joined, connect(cluster.address, cluster.credentials_of("worker/short")) as short:
            code, message = rpc_error(lambda: renew(short, request))
            check(code == grpc.StatusCode.FAILED_PRECONDITION and "muster://worker/short was not given for a join token" in message, f"{code} {message}")
            with open(os.path.join(cluster.dir, "hand.crt"), "wb") as file:
                file.write(renew(joined, request))
            shown = certificate_of(cluster, "hand")
            check("URI:muster://worker/hand\n" in shown and "CN = hand" in shown and "root" not in shown, shown)
            for what, wrong in {"garbage": b"0\x03abc", "nothing": b"", "cut off": request[:-5], "not signed by its key": request[:-10] + bytes([request[-10] ^ 1]) + request[-9:]}.items():
                code, message = rpc_error(lambda: renew(joined, wrong))
                check(code == grpc.StatusCode.INVALID_ARGUMENT and "certificate_request" in message, f"{what}: {code} {message}")
            for role in ("viewer", "operator", "admin"):
                with connect(cluster.address, cluster.credentials_of(f"{role}/x")) as channel:
                    code, message = rpc_error(lambda: renew(channel, request))
                    check(code == grpc.StatusCode.PERMISSION_DENIED and "Renew needs the role worker" in message, f"{role}: {code} {message}")
            over = lambda: "muster://worker/short is over" in rpc_error(lambda: renew(short, request))[1]
            cluster.wait_until(over, 10, "over the connection that it was made with, an expired certificate is renewed")
            with open(cluster.deny, "w") as file:
                file.write("muster://worker/hand\n")
            cluster.reload_seen("the list of denied identities was read again")
            code, message = rpc_error(lambda: renew(joined, request))
            check(code == grpc.StatusCode.PERMISSION_DENIED and "list of denied" in message, f"{code} {message}")


def test_a_worker_has_the_name_of_its_certificate():
    with SecureCluster() as cluster:
        cluster.start()
        cluster.submit(tiny_job(cluster, steps=1000000))
        for name in ("y", "xy", "x1"):
            worker = cluster.worker(name=name)
            check(worker.wait() == 1 and f"muster://worker/x may attach as 'x' or 'x-...', not as '{name}'" in log_of(worker), log_of(worker))
        for name in ("x", "x-1", "x.local", None):
            cluster.worker(name=name)
        cluster.wait_until(lambda: len(cluster.list_workers()) == 4, 20, "not all attach")
        names = sorted(worker.name for worker in cluster.list_workers())
        check({"x", "x-1", "x.local"} < set(names), f"{names}")
        check(sum(bool(re.fullmatch("x-[0-9a-f]{6}", name)) for name in names) == 1, f"{names}")


if __name__ == "__main__":
    main([test_trains_over_mutual_tls, test_keys_are_private, test_strangers_learn_why, test_a_certificate_serves_on_its_own_side_only, test_replaced_certificates_are_used,
          test_a_running_worker_changes_to_another_ca, test_roles,
          test_the_denied_are_cut_off, test_https_for_those_with_a_role, test_old_versions_of_tls_are_refused, test_what_holds_a_key_leaves_no_core_dump, test_listening_in_the_open_needs_tls_or_consent, test_a_token_makes_a_worker_once,
          test_tokens_that_are_not_good_are_refused_and_outlive_the_coordinator, test_strangers_may_join_and_nothing_else,
          test_certificates_of_joined_workers_are_renewed, test_who_may_renew_what, test_a_worker_has_the_name_of_its_certificate])
