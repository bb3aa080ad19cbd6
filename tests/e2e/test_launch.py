#!/usr/bin/env python3
"""Workers on many hosts over ssh: a private sshd on the loopback, and hosts made of network namespaces. One argument: only the tests named."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess

import grpc

from harness import BUILD, SLOW, Cluster, Skipped, check, documented, main, pb, tiny_job

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/usr/local/sbin")
LONG = 1000000
JOB = """
job: {name}
model: {{family: gpt2, layers: 2, heads: 2, channels: 32, context: 32, vocab: 256, dropout: 0.1}}
data: {{path: {data}, tokens: bytes, holdout: 0.1}}
batch: {{sequences: 16, micro: 1, accumulate: 2, length: 32}}
steps: {steps}
optimizer: {{lr: 1.0e-3, warmup: 5}}
checkpoint: {{path: {dir}/ckpt, every: 10, keep: 3}}
eval: {{every: 10, sequences: 4}}
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Hosts:
    """A private sshd with its own keys, and a client's configuration in which every node* is that sshd.

    bare* answers but has no muster-worker; gone* is a port where nobody listens; mute* one where nobody answers."""

    def __init__(self, cluster, listen="127.0.0.1", prefix=()):
        if not SSHD or not shutil.which("ssh"):
            raise Skipped("there is no OpenSSH server or client")
        self.cluster, self.dir = cluster, os.path.join(cluster.dir, f"ssh-{listen}")
        os.mkdir(self.dir, 0o700)
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", 0o755, exist_ok=True)  # where sshd locks its unprivileged half up
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", os.path.join(self.dir, name)], check=True)
        shutil.copy(os.path.join(self.dir, "user.pub"), os.path.join(self.dir, "authorized"))
        self.port, self.bare_port = free_port(), free_port()
        self.mute = socket.socket()
        self.mute.bind(("127.0.0.1", 0))
        self.mute.listen(16)
        self.gone_port = free_port()
        self.write_config(listen)
        with open(os.path.join(self.dir, "log"), "w") as log:
            self.sshd = subprocess.Popen([*prefix, SSHD, "-D", "-e", "-f", os.path.join(self.dir, "sshd_config")], stdout=log, stderr=log)
        ask = "ip netns exec" if prefix else ""
        cluster.wait_until(lambda: self.ssh("node1", "true").returncode == 0, 15, f"sshd does not answer {ask} {self.dir}")

    def write_config(self, listen):
        environment = f"HOME={self.dir} XDG_STATE_HOME={self.dir}"
        with open(os.path.join(self.dir, "sshd_config"), "w") as f:
            f.write(f"""
Port {self.port}
Port {self.bare_port}
ListenAddress {listen}
HostKey {self.dir}/host
AuthorizedKeysFile {self.dir}/authorized
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
PermitUserRC no
Match LocalPort {self.port}
  SetEnv PATH={BUILD}/worker:/usr/bin:/bin {environment}
Match LocalPort {self.bare_port}
  SetEnv PATH=/usr/bin:/bin {environment}
""")
        user = pwd.getpwuid(os.geteuid()).pw_name
        with open(os.path.join(self.dir, "host.pub")) as f:
            key = " ".join(f.read().split()[:2])
        with open(os.path.join(self.dir, "known_hosts"), "w") as f:
            f.write(f"node {key}\n")
        self.config = os.path.join(self.dir, "ssh_config")
        with open(self.config, "w") as f:
            for pattern, port in (("bare*", self.bare_port), ("gone*", self.gone_port), ("mute*", self.mute.getsockname()[1]), ("*", self.port)):
                f.write(f"Host {pattern}\n  Port {port}\n")
            f.write(f"  HostName {listen}\n  User {user}\n  IdentityFile {self.dir}/user\n  IdentitiesOnly yes\n  HostKeyAlias node\n"
                    f"  UserKnownHostsFile {self.dir}/known_hosts\n  StrictHostKeyChecking yes\n  LogLevel ERROR\n")

    def ssh(self, host, *command):
        return subprocess.run(["ssh", "-F", self.config, "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host, *command], capture_output=True,
                              text=True)

    def kill_launched(self):
        """Workers that were launched outlive their ssh and their coordinator, for whose return they wait."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as f:
                    launched = f"HOME={self.dir}".encode() in f.read().split(b"\0")
                if launched:
                    os.kill(int(pid), signal.SIGKILL)
            except OSError:
                pass  # gone, or somebody else's

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill_launched()
        self.sshd.send_signal(signal.SIGTERM)
        self.sshd.wait()
        self.mute.close()


def launch(cluster, hosts, names, *words, worker=("--device", "cpu", "--threads", "1"), address=None, options=()):
    done = subprocess.run([os.path.join(BUILD, "cli/muster"), *options, "--coordinator", address or cluster.address, "launch", "--hosts", names, "--ssh",
                           f"ssh -F {hosts.config}", *words, "--", *worker], capture_output=True, text=True, timeout=120 * SLOW)
    return done.returncode, done.stdout, done.stderr


def shell(cluster, hosts, command):
    """As a person types it, with the programs in the PATH."""
    env = dict(os.environ, MUSTER_SSH=f"ssh -F {hosts.config}", MUSTER_COORDINATOR=cluster.address, PATH=f"{BUILD}/cli:{os.environ['PATH']}")
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120 * SLOW, cwd=cluster.dir, env=env)


def job_file(cluster, steps=30, name="tiny"):
    path = os.path.join(cluster.dir, f"{name}.yaml")
    with open(path, "w") as f:
        f.write(JOB.format(name=name, data=cluster.data, dir=cluster.dir, steps=steps))
    return path


def names(cluster):
    return sorted(w.name for w in cluster.list_workers())


def end(cluster, job="tiny"):
    """No job leaves its workers behind: they were put into the background of other sessions."""
    try:
        if cluster.job(job).state <= pb.JOB_STATE_RUNNING:
            cluster.cancel(job)
    except grpc.RpcError:
        return
    cluster.wait_until(lambda: not cluster.list_workers(), 20, "workers stay behind")


def test_hosts_are_started_each_failure_is_a_line_and_more_are_added():
    """The first two commands are those of the documents."""
    with Cluster() as cluster, Hosts(cluster) as hosts:
        cluster.start_coordinator()
        first, second = documented("### Many hosts over ssh")
        job_file(cluster, LONG, "kjv")
        with open(os.path.join(cluster.dir, "hosts.txt"), "w") as f:
            f.write("# rack 2\nnode[03-04]\nbare1,gone1 # both are of no use\n")
        done = shell(cluster, hosts, first)
        check(done.returncode == 0 and "\n2 of 2 hosts work for job kjv\n" in done.stdout and not done.stderr, f"{done}")
        check(names(cluster) == ["node01-cpu0", "node02-cpu0"], f"{names(cluster)}")
        go = cluster.wait_event("generation_go")
        done = shell(cluster, hosts, second)
        err = done.stderr
        check(done.returncode == 1 and "2 of 4 hosts work for job kjv; each host was given the coordinator 127.0.0.1:" in done.stdout, f"{done}")
        why = {line.split(":")[1].strip(): line for line in err.splitlines()}
        check(len(why) == 2 and err.count("\n") == 2, err)
        check("answers, but there is no program 'muster-worker' there: install it" in why["bare1"], err)
        check("ssh: " in why["gone1"] and "refused" in why["gone1"], err)
        check(names(cluster) == ["node01-cpu0", "node02-cpu0", "node03-cpu0", "node03-cpu1", "node04-cpu0", "node04-cpu1"], f"{names(cluster)}")
        cluster.wait_event(lambda e: e.kind == "generation_go" and "6 workers" in e.text, 60, after=go.number)
        code, out, err = launch(cluster, hosts, "mute1", "--add", "kjv", "--within", "1")
        check(code == 1 and err.count("\n") == 1 and ("timed out" in err or "no answer in time" in err), err)
        code, out, err = launch(cluster, hosts, f"{pwd.getpwuid(os.geteuid()).pw_name}@Node-03.rack", "--add", "kjv")
        check(code == 0 and "1 of 1 hosts work for job kjv\n" in out and not err, f"{code} {out} {err}")
        check(names(cluster)[0] == "node-03.rack-cpu0", f"{names(cluster)}")
        end(cluster, "kjv")


def test_a_wrong_address_is_told_and_nothing_stays_behind():
    """The coordinator's address is right here and wrong there: it names the other host itself."""
    with Cluster() as cluster, Hosts(cluster) as hosts:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, steps=LONG))
        wrong = f"127.0.0.1:{free_port()}"
        code, out, err = launch(cluster, hosts, "node1", "--add", "tiny", "--within", "1",
                                worker=("--device", "cpu", "--threads", "1"), address=wrong)
        check(code == 3 and wrong in err, f"muster itself cannot connect: {code} {err}")
        script = os.path.join(cluster.dir, "elsewhere")
        with open(script, "w") as f:  # as if the hosts saw another network than we do
            f.write(f"""#!/bin/sh
for last; do :; done
exec ssh -F {hosts.config} -o BatchMode=yes node1 "$(printf %s "$last" | sed 's/{cluster.address}/{wrong}/')"
""")
        os.chmod(script, 0o755)
        done = subprocess.run([os.path.join(BUILD, "cli/muster"), "--coordinator", cluster.address, "launch", "--add", "--hosts", "node1", "--ssh", script,
                               "tiny", "--", "--device", "cpu", "--give-up-after", "1"], capture_output=True, text=True, timeout=60 * SLOW)
        check(done.returncode == 1 and done.stderr.count("\n") == 1, f"{done.returncode} {done.stderr}")
        check("node1: node1-cpu0 exited with code 3: " in done.stderr and wrong in done.stderr, done.stderr)
        cluster.wait_until(lambda: not subprocess.run(["pgrep", "-f", f"coordinator[ =]{wrong}"], capture_output=True).stdout, 10, "left behind")
        check(not cluster.list_workers(), "nobody works")
        end(cluster)


def test_what_cannot_be_launched_is_refused_before_any_host_is_asked():
    with Cluster() as cluster, Hosts(cluster) as hosts:
        cluster.start_coordinator()
        for words, code, fragment in [(("--add", "no-such-job"), 4, "no-such-job"), (("--add", "Bad Name"), 2, "name of a job"),
                                      ((job_file(cluster), "--fanout", "0"), 2, "1 to 1024"), (("/nowhere.yaml",), 4, "/nowhere.yaml")]:
            got, out, err = launch(cluster, hosts, "node1", *words)
            check(got == code and fragment in err and err.count("\n") == 1, f"{words}: {got} {err}")
        got, out, err = launch(cluster, hosts, "node[1-", job_file(cluster))
        check(got == 1 and "closing bracket" in err and not out, f"{got} {out} {err}")
        check(not cluster.list_workers(), "nobody was started")
        code, out, err = launch(cluster, hosts, "node1,bare1", job_file(cluster, LONG), options=("-o", "json"))
        lines = [json.loads(line) for line in out[out.rindex("\n}\n") + 3:].splitlines()]
        check(code == 1 and sorted((line["host"], line["ok"]) for line in lines) == [("bare1", False), ("node1", True)], out)
        cluster.cancel()
        cluster.wait_event("job_cancelled")
        got, out, err = launch(cluster, hosts, "node1", "--add", "tiny")
        check(got == 5 and "is over (cancelled)" in err, f"{got} {err}")
        end(cluster)


class Namespaces:
    """Hosts of their own: network namespaces on one bridge, each with an address and an sshd."""

    def __init__(self, count):
        self.made, self.tag = [], f"mu{os.getpid() % 100000}"
        if os.geteuid() != 0 or not shutil.which("ip", path="/usr/sbin:/sbin:/usr/bin"):
            raise Skipped("network namespaces need root and iproute2")
        net = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 250}"
        self.bridge, self.address = self.tag, f"{net}.1"
        self.hosts = [(f"{self.tag}n{i}", f"{net}.{i + 10}") for i in range(count)]
        try:
            self.ip("link", "add", self.bridge, "type", "bridge")
            self.ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
            self.ip("link", "set", self.bridge, "up")
            for i, (name, address) in enumerate(self.hosts):
                self.ip("netns", "add", name)
                self.made.append(name)
                self.ip("link", "add", f"{self.tag}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
                self.ip("link", "set", f"{self.tag}v{i}", "master", self.bridge, "up")
                for words in (("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up"), ("link", "set", "lo", "up")):
                    self.ip("-n", name, *words)
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise Skipped(f"network namespaces are not permitted here: {error.stderr.decode().strip()}") from None

    @staticmethod
    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in self.made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], capture_output=True)


def test_hosts_of_their_own_networks_train_together():
    with Cluster() as cluster, Namespaces(2) as space:
        cluster.address = f"{space.address}:{free_port()}"
        cluster.start_coordinator(flags=["--insecure-listen"])
        sshds = [Hosts(cluster, address, ("ip", "netns", "exec", name)) for name, address in space.hosts]
        try:
            whole = os.path.join(cluster.dir, "ssh_config")
            with open(whole, "w") as f:
                for i, hosts in enumerate(sshds):
                    f.write(f"Match originalhost node{i}\n  Include {hosts.config}\n")
            sshds[0].config = whole
            code, out, err = launch(cluster, sshds[0], "node[0-1]", job_file(cluster, LONG), worker=("--device", "cpu", "--threads", "1"))
            check(code == 0 and "2 of 2 hosts" in out, f"{code} {out} {err}")
            workers = {w.name: w for w in cluster.list_workers()}
            for i, (_, address) in enumerate(space.hosts):
                check(f"tcp={address}:" in workers[f"node{i}-cpu0"].address, f"{workers}")
            go = cluster.wait_event(lambda e: e.kind == "generation_go" and e.text.startswith("2 workers"), 60)
            cluster.wait_step(go.step + 5)  # both train
            end(cluster)
        finally:
            for hosts in sshds:
                hosts.__exit__()


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
