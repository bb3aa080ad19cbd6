#!/usr/bin/python3
"""Mutual TLS between real processes: a job trains over it to the same weights; who has no certificate, a foreign or an expired one learns so
in one line; certificates are replaced without a restart; each role may do what it should; who is on the list of the denied is cut off.

    test_security.py [TEST...]"""

import os
import stat
import subprocess
import time

import grpc

from harness import BUILD, FAST, Cluster, Process, api, check, connect, log_of, main, reference, rpc_error, run, tiny_job

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
    done = subprocess.run([MUSTER, "cert", *args], capture_output=True, text=True, timeout=20)
    check(done.returncode == code, f"muster cert {args}: {done.returncode} {done.stderr}")
    return done.stderr


def served_serial(cluster):
    """The serial number of the certificate that musterd shows to a new connection."""
    ca, own, key = cluster.paths("viewer/x")
    shown = subprocess.run(["openssl", "s_client", "-connect", cluster.address, "-alpn", "h2", "-CAfile", ca, "-cert", own, "-key", key],
                           input="", capture_output=True, encoding="latin-1", timeout=10).stdout
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
                code, text = rpc_error(lambda: stub(b"", timeout=5))
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
        worker = cluster.worker("admin/x")
        cluster.wait_until(lambda: "Attach needs the role worker" in log_of(worker), 5, "an admin may attach, or is not told")


def test_the_denied_are_cut_off():
    with SecureCluster() as cluster:
        cluster.issue("worker/bad")
        cluster.start()
        cluster.submit(tiny_job(cluster, steps=100000))
        cluster.worker(name="w-good")
        cluster.worker("worker/bad", name="bad")
        cluster.wait_event(lambda e: e.kind == "worker_attached" and "bad" in e.text)
        with connect(cluster.address, cluster.credentials_of("viewer/x")) as channel:
            stub = channel.unary_stream("/muster.v1.MusterService/WatchEvents", request_serializer=lambda m: m.SerializeToString())
            watch = stub(api.WatchEventsRequest(follow=True), timeout=10)
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
        check("w-good" in [w.name for w in cluster.list_workers("tiny")], "the other worker is gone")


def test_listening_in_the_open_needs_tls_or_consent():
    with SecureCluster() as cluster:
        musterd = [os.path.join(BUILD, "coordinator/musterd"), "--volatile", "--listen"]
        for listen in ("0.0.0.0:0", "[::]:0", "127.example.org:0"):
            done = subprocess.run([*musterd, listen], capture_output=True, text=True, timeout=10)
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


if __name__ == "__main__":
    main([test_trains_over_mutual_tls, test_keys_are_private, test_strangers_learn_why, test_a_certificate_serves_on_its_own_side_only, test_replaced_certificates_are_used, test_roles,
          test_the_denied_are_cut_off, test_listening_in_the_open_needs_tls_or_consent])
