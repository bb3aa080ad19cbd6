#!/usr/bin/env python3
"""Units, the Debian package, the batch script: checked by the programs that will read them. One argument: only the tests named."""

import glob
import os
import re
import shutil
import subprocess
import tempfile

from harness import BUILD, ROOT, SLOW, Skipped, check, documented, main

UNITS = os.path.join(ROOT, "deploy/systemd")
EXPOSURE = 2.6  # of 10, by systemd's own table: what the units permit may grow only on purpose


def run(*words, **options):
    done = subprocess.run(words, capture_output=True, text=True, timeout=120 * SLOW, **options)
    check(done.returncode == 0, f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def test_units_are_what_systemd_takes_and_keep_their_hardening():
    if not shutil.which("systemd-analyze"):
        raise Skipped("there is no systemd-analyze")
    with tempfile.TemporaryDirectory() as folder:
        for path in glob.glob(os.path.join(UNITS, "*.service")):
            with open(path) as f:
                text = f.read()
            for program in ("coordinator/musterd", "worker/muster-worker"):  # systemd looks whether they are there
                text = text.replace(f"/usr/bin/{os.path.basename(program)} ", f"{os.path.join(BUILD, program)} ")
            with open(os.path.join(folder, os.path.basename(path)), "w") as f:
                f.write(text)
        for unit in ("musterd.service", "muster-worker@kjv.service"):
            said = run("systemd-analyze", "verify", "--man=no", os.path.join(folder, unit))
            check(not said.strip(), f"{unit}: {said}")
        for unit in ("musterd.service", "muster-worker@.service"):
            said = run("systemd-analyze", "security", "--offline=true", "--no-pager", os.path.join(folder, unit))
            exposure = float(re.search(r"exposure level for \S+: ([0-9.]+)", said).group(1))
            check(exposure <= EXPOSURE, f"{unit}: exposure {exposure}")


def test_units_use_options_that_exist():
    for name, program in (("musterd", "coordinator/musterd"), ("muster-worker@", "worker/muster-worker")):
        text = run(os.path.join(BUILD, program), "--help")
        for path in (f"{name}.service", "musterd.conf" if name == "musterd" else "worker.conf"):
            with open(os.path.join(UNITS, path)) as f:
                words = [line for line in f if line.startswith(("ExecStart=", "MUSTER", "#MUSTER"))]
            for option in re.findall(r"--[a-z-]+", " ".join(words)):
                check(f"{option} " in text, f"{path}: {option} is no option of {name}")


def make_package(folder):
    missing = [program for program in ("cpack", "dpkg-shlibdeps", "file") if not shutil.which(program)]
    if missing:
        raise Skipped(f"making the package needs {', '.join(missing)}")
    (command,) = documented("### As services")
    run(*command.split(), "-B", folder, cwd=BUILD)
    (package,) = glob.glob(os.path.join(folder, "*.deb"))
    return package


def copy_with_libraries(root, program):
    """What a program needs to run in a root without anything: its libraries."""
    for path in {program, *re.findall(r"(/\S+) \(0x", run("ldd", program))}:
        target = root + path
        if not os.path.exists(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy(path, target)


def test_the_package_installs_into_a_clean_root_and_runs_there():
    if os.geteuid() != 0:
        raise Skipped("dpkg --root and chroot need root")
    if not shutil.which("systemd-sysusers"):
        raise Skipped("there is no systemd-sysusers, which makes the user")
    with tempfile.TemporaryDirectory() as folder:
        package, root = make_package(folder), os.path.join(folder, "root")
        os.makedirs(os.path.join(root, "var/lib/dpkg/info"))
        os.makedirs(os.path.join(root, "var/lib/dpkg/updates"))
        open(os.path.join(root, "var/lib/dpkg/status"), "w").close()
        # Its dependencies are copied afterwards; the scripts run outside and are told the root.
        dpkg = ("dpkg", f"--root={root}", "--force-script-chrootless", "--force-depends")
        said = run(*dpkg, "-i", package)
        with open(os.path.join(root, "etc/passwd")) as f:
            users = f.read()
        check(re.search(r"^muster:[^:]*:\d+:\d+:[^:]*:/var/lib/muster:\S*nologin$", users, re.M), f"no user: {users}")
        for path in ("usr/lib/systemd/system/musterd.service", "usr/lib/systemd/system/muster-worker@.service",
                     "usr/share/doc/muster/operations.md", "usr/share/doc/muster/slurm/muster.sbatch"):
            check(os.path.isfile(os.path.join(root, path)), f"{path} is missing; dpkg says: {said}")
        depends = run("dpkg-deb", "-f", package, "Depends")
        check("librocksdb" in depends and "libgrpc" in depends, depends)
        for program in ("muster", "musterd", "muster-worker"):
            copy_with_libraries(root, os.path.join(BUILD, {"muster": "cli", "musterd": "coordinator", "muster-worker": "worker"}[program], program))
            check(run("chroot", root, f"/usr/bin/{program}", "version" if program == "muster" else "--version").startswith(program), program)
        # What an administrator changed outlives an update; it goes with a purge.
        conf = os.path.join(root, "etc/muster/musterd.conf")
        with open(conf, "a") as f:
            f.write("# ours\n")
        run(*dpkg, "--force-confold", "-i", package)
        with open(conf) as f:
            check(f.read().endswith("# ours\n"), "the change is lost")
        run(*dpkg, "-r", "muster")
        check(os.path.exists(conf) and not os.path.exists(os.path.join(root, "usr/bin/musterd")), "a removal keeps the configuration")
        os.makedirs(os.path.join(root, "var/lib/muster/store"))
        run(*dpkg, "-P", "muster")
        check(not os.path.exists(conf) and not os.path.exists(os.path.join(root, "var/lib/muster")), "a purge leaves nothing")


def test_scripts_have_no_errors_of_syntax():
    for path in glob.glob(os.path.join(ROOT, "deploy/debian/p*")):
        run("sh", "-n", path)
    run("bash", "-n", os.path.join(ROOT, "deploy/slurm/muster.sbatch"))
    script = open(os.path.join(ROOT, "deploy/slurm/muster.sbatch")).read()
    for program, options in (("worker/muster-worker", ["--device", "--job"]), ("coordinator/musterd", ["--data-dir", "--insecure-listen", "--address-file"])):
        text = run(os.path.join(BUILD, program), "--help")
        check(all(option in script and f"{option} " in text for option in options), f"{program}: {options}")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
