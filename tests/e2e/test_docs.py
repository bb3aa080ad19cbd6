#!/usr/bin/python3
"""The commands that README.md and docs/*.md show: each is run here, or is listed with the reason why not; of those that are only listed, our own
programs still check the words: a subcommand or an option that does not exist fails.

    test_docs.py [TEST...]"""

import glob
import os
import re
import shlex
import shutil
import subprocess

from harness import BUILD, ROOT, SLOW, Cluster, Failure, check, main, tiny_job

PROGRAMS = {"muster": "cli/muster", "musterd": "coordinator/musterd", "muster-worker": "worker/muster-worker"}
PATH = os.pathsep.join([os.path.join(BUILD, os.path.dirname(p)) for p in PROGRAMS.values()] + [os.environ["PATH"]])
RUN = [  # in the order of each document, beside a job kjv with workers a, b and c
    r"muster cert (ca|issue) ", r"protoc ", r"muster up examples/tiny\.yaml", r"for w in 1 3 7; do muster up",
    r"muster (status|workers)$", r"muster timings kjv$", r"muster checkpoint kjv$", r"muster checkpoints kjv$", r"muster drain b ",
    r"muster (report|diagnose) (kjv|hang)$", r"muster node ls$", r"muster plan ",
]
LISTED = [
    (r"(\./)?scripts/|cmake |ninja |ctest |cpack |bench/run|TSAN_OPTIONS=|MU_BUILD=|build/tests/sim/sim|MU_FAULT_AT=|/tmp/gpu-check/run",
     "installs, builds or tests all of Muster, or needs a GPU: CI's own steps"),
    (r"dpkg |systemctl ", "needs root and systemd"),
    (r"curl |openssl ", "other programs; test_http.py and test_security.py ask the same of the coordinator"),
    (r"musterd |muster-worker ", "runs until it is stopped; every other test starts it"),
    (r"MU_CPU_ISA=(scalar|avx2) ", "takes minutes without vector instructions; needs a processor with AVX2"),
    (r"for layout in ", "works on a job file that the reader writes; test_layouts.py compares the layouts"),
    (r"muster launch ", "needs several machines; test_launch.py runs these very commands against hosts of its own"),
    (r"(\(umask 077; )?muster token ", "needs a coordinator with a CA's key; test_security.py"),
    (r"muster (events -f|watch) ", "goes on for as long as the job; test_cli.py"),
    (r"muster (snapshot|import|export|generate|checkpoint verify) ", "works on files of an earlier run; test_cli.py and test_interchange.py"),
    (r"muster (probe|simulate) ", "takes minutes at the size shown"),
    (r"muster (-o json )?(submit|scale|job amend|job branch|cancel|status|trace|logs|describe|report|node) ",
     "names a job, a worker, a host or a report of that document's own history; test_cli.py, test_amend.py, test_branch.py"),
]


def commands():
    """(document:line, command) of every block of shell and of every line after a prompt."""
    for path in [os.path.join(ROOT, "README.md"), *sorted(glob.glob(os.path.join(ROOT, "docs/*.md")))]:
        inside, kind, whole = False, "", ""
        for number, line in enumerate(open(path).read().split("\n"), 1):
            fence = re.match(r" *```(.*)", line)
            if fence:
                inside, kind, whole = not inside, fence.group(1), ""
                continue
            text = line.strip()
            shell = kind in ("sh", "bash", "shell", "console")
            if not inside or not (whole or shell and text or kind in ("", "console") and re.match(r"\$ |# (dpkg|systemctl) ", text)):
                continue
            whole += re.sub(r"^([$>]|#(?= (dpkg|systemctl))) ", "", text)
            if whole.endswith("\\"):
                whole = whole[:-1]
                continue
            if whole.startswith("for ") and "done" not in whole:
                whole += " "
                continue
            if not whole.startswith("#"):
                yield f"{os.path.relpath(path, ROOT)}:{number}", re.sub(r"\s+# .*", "", whole)
            whole = ""


def words_exist(where, command, env):
    """Our own programs know each subcommand and option of a command that is not run."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    parts = [[]]
    for token in lexer:
        if token == "do" or re.fullmatch(r"[();&|<>]+", token):
            parts.append([])
        elif token != "..." and not (not parts[-1] and re.match(r"[A-Z_]+=", token)):
            parts[-1].append(token)
    for words in parts:
        program = os.path.basename(words[0]) if words else ""
        if program not in PROGRAMS:
            continue
        options = [w.split("=")[0] for w in words[1:] if w.startswith("--") and w != "--"]
        usage = subprocess.run([os.path.join(BUILD, PROGRAMS[program]), "--help"], capture_output=True, text=True, env=env, timeout=60 * SLOW).stdout
        if program == "muster":
            rest = words[3:] if words[1] == "-o" else words[1:]
            entry = re.search(rf"^  {re.escape(rest[0])} .*\n(?:   .*\n)*", usage, re.M)
            check(entry, f"{where}: muster has no '{rest[0]}': {command}")
            if rest[0] in ("job", "node", "token", "cert", "snapshot"):
                check(re.search(rf"\b{re.escape(rest[1])}\b", entry.group(0)), f"{where}: muster {rest[0]} has no '{rest[1]}': {command}")
            if "--" in words:  # what follows is for muster-worker
                options = [w for w in words[1:words.index("--")] if w.startswith("--")]
            usage = entry.group(0)
        for option in options:
            check(re.search(rf"{re.escape(option)}(?![\w-])", usage), f"{where}: {program} has no '{option}': {command}")


def test_every_command_of_the_documents_runs_or_says_why_not():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, name="kjv", steps=1000000, checkpoint_every=1000000))
        for name in "abc":
            cluster.start_worker(job="kjv", name=name)
        cluster.wait_step(20, job="kjv")
        for name in ("examples", "proto"):  # copies: checkpoints go beside the job files
            shutil.copytree(os.path.join(ROOT, name), os.path.join(cluster.dir, name))
        env = dict(os.environ, PATH=PATH, MUSTER_COORDINATOR=cluster.address)
        seen = ran = 0
        wrong = []
        for where, command in commands():
            seen += 1
            try:
                if any(re.match(r, command) for r in RUN):
                    ran += 1
                    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=cluster.dir, env=env, capture_output=True, text=True,
                                          timeout=120 * SLOW)
                    check(done.returncode == 0, f"{where}: {command}: exit {done.returncode}: {done.stdout[-300:]}{done.stderr[-500:]}")
                else:
                    check(any(re.match(r, command) for r, _ in LISTED), f"{where}: is neither run nor listed with a reason: {command}")
                    words_exist(where, command, env)
            except Failure as failure:
                wrong.append(str(failure))
        check(not wrong, "\n".join(wrong))
        check(seen > 80 and ran > 15, f"{seen} commands found, {ran} run: are the blocks still recognized?")


if __name__ == "__main__":
    main([value for name, value in list(globals().items()) if name.startswith("test_")])
