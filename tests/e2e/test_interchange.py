#!/usr/bin/python3
"""Data and models of other programs, end to end: token files, imports, jobs that start from a checkpoint. Arguments: only the tests
named."""

import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import struct
import subprocess
import tempfile

from harness import BUILD, SLOW, Cluster, check, main, pb, reference, refused_worker, tiny_job

MUSTER = os.path.join(BUILD, "cli/muster")
OK, FAILURE, USAGE, NOT_FOUND, CONFLICT = 0, 1, 2, 4, 5


def megatron(stem, documents, width=2, version=1):
    """A Megatron-LM indexed data set: NAME.bin has the tokens, NAME.idx lengths, positions and documents."""
    kind, code = ("H", 8) if width == 2 else ("i", 4)
    with open(stem + ".bin", "wb") as file:
        for tokens in documents:
            file.write(struct.pack(f"<{len(tokens)}{kind}", *tokens))
    lengths = [len(tokens) for tokens in documents]
    positions = [sum(lengths[:i]) * width for i in range(len(lengths))]
    with open(stem + ".idx", "wb") as file:
        file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", version, code, len(lengths), len(lengths) + 1))
        file.write(struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *positions))
        file.write(struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1)))
    return stem + ".bin"


def lines_of(path):
    with open(path, "rb") as file:
        return [list(line) for line in file.read().splitlines(keepends=True)]


# ---- token files ----

def test_megatron_data_trains_like_the_bytes_it_holds():
    """The same tokens in another format, in one file or several, whatever their width: the same weights."""
    for width, cut in ((2, None), (4, 1234)):
        with Cluster() as cluster:
            cluster.start_coordinator()
            documents = lines_of(cluster.data)
            megatron(os.path.join(cluster.dir, "set-0"), documents[:cut], width)
            if cut:
                megatron(os.path.join(cluster.dir, "set-1"), documents[cut:], width)
            cluster.submit(tiny_job(cluster, data__path=os.path.join(cluster.dir, "set-*.bin"),
                                    data__tokens=pb.TOKEN_FORMAT_MEGATRON))
            for _ in range(2):
                cluster.start_worker()
            check(cluster.wait_finished() == reference(), "the format of the data changes the weights")


def test_bad_megatron_data_ends_the_worker():
    with Cluster() as cluster:
        cluster.start_coordinator()
        documents = lines_of(cluster.data)[:200]
        cases = {}
        for name, fragments in (("no-index", ["no-index.idx", "cannot open"]), ("version", ["version.idx", "version 2"]),
                                ("cut", ["cut.idx"]), ("short", ["short.idx"])):
            cases[name] = (megatron(os.path.join(cluster.dir, name), documents, version=2 if name == "version" else 1), fragments)
        os.unlink(os.path.join(cluster.dir, "no-index.idx"))
        os.truncate(os.path.join(cluster.dir, "cut.idx"), 100)
        os.truncate(os.path.join(cluster.dir, "short.bin"), 1000)
        for name, (path, fragments) in cases.items():
            cluster.submit(tiny_job(cluster, name=name, data__path=path, data__tokens=pb.TOKEN_FORMAT_MEGATRON))
            refused_worker(cluster.start_worker(job=name), *fragments)


# ---- models ----

LAYERS, HEADS, CHANNELS, CONTEXT, VOCAB = 2, 4, 32, 32, 256
CONFIG = {"model_type": "gpt2", "n_layer": LAYERS, "n_head": HEADS, "n_embd": CHANNELS, "n_positions": CONTEXT, "vocab_size": VOCAB}
JOB = """\
job: {name}
model: {{layers: {layers}, heads: 4, channels: 32, context: 32, vocab: {vocab}}}
data: {{path: {data}, holdout: 0.1}}
batch: {{sequences: 8, micro: 1, accumulate: 1}}
steps: {steps}
optimizer: {{lr: 1.0e-3}}
parallel: {{slices: {slices}{parallel}}}
init: {{path: {init}}}
"""


def safetensors(path, tensors):
    """`tensors`: name -> (shape, floats)."""
    header, at = {}, 0
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * len(values)]}
        at += 4 * len(values)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(struct.pack(f"<{len(values)}f", *values))


def gpt2_tensors():
    """Random, but the last norm gives the first unit vector whatever comes in: logits are the first column of the embedding."""
    source = random.Random(7)
    c, tensors = CHANNELS, {}
    shapes = {"ln_1.weight": [c], "ln_1.bias": [c], "attn.c_attn.weight": [c, 3 * c], "attn.c_attn.bias": [3 * c],
              "attn.c_proj.weight": [c, c], "attn.c_proj.bias": [c], "ln_2.weight": [c], "ln_2.bias": [c],
              "mlp.c_fc.weight": [c, 4 * c], "mlp.c_fc.bias": [4 * c], "mlp.c_proj.weight": [4 * c, c], "mlp.c_proj.bias": [c]}
    names = {"transformer.wte.weight": [VOCAB, c], "transformer.wpe.weight": [CONTEXT, c]}
    for layer in range(LAYERS):
        names.update({f"transformer.h.{layer}.{name}": shape for name, shape in shapes.items()})
    for name, shape in names.items():
        # rounded to what 32 bits hold, so that what is read back can be compared
        count = math.prod(shape)
        tensors[name] = (shape, list(struct.unpack(f"<{count}f", struct.pack(f"<{count}f", *(source.gauss(0, 0.1) for _ in range(count))))))
    tensors["transformer.ln_f.weight"] = ([c], [0.0] * c)
    tensors["transformer.ln_f.bias"] = ([c], [1.0] + [0.0] * (c - 1))
    return tensors


def gpt2_directory(path, **changes):
    os.mkdir(path)
    with open(os.path.join(path, "config.json"), "w") as file:
        json.dump(dict(CONFIG, **changes), file)
    safetensors(os.path.join(path, "model.safetensors"), gpt2_tensors())
    return path


def muster(*args, code=OK, fragments=()):
    """Runs muster; what it printed. On failure exactly one line on stderr, with all the fragments."""
    done = subprocess.run([MUSTER, *args], capture_output=True, text=True, timeout=60 * SLOW, stdin=subprocess.DEVNULL)
    shown = f"muster {' '.join(args)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    check(done.returncode == code, f"not exit {code}: {shown}")
    check(code == OK or (done.stderr.count("\n") == 1 and done.stderr.startswith("muster") and not done.stdout), f"not one line: {shown}")
    for fragment in fragments:
        check(fragment in done.stdout + done.stderr, f"'{fragment}' is missing: {shown}")
    return done.stdout


def import_gpt2(cluster, slices=1, name="imported"):
    source = os.path.join(cluster.dir, "gpt2")
    if not os.path.exists(source):
        gpt2_directory(source)
    out = os.path.join(cluster.dir, name)
    muster("import", "--format", "hf-gpt2", "--from", source, "--out", out, "--slices", str(slices),
           fragments=["layers: 2", "channels: 32", f"slices: {slices}"])
    return out


def job_file(cluster, init, name="tiny", data=None, steps=12, slices=1, parallel="", layers=LAYERS, vocab=VOCAB):
    path = os.path.join(cluster.dir, name + ".yaml")
    with open(path, "w") as file:
        file.write(JOB.format(name=name, init=init, data=data or cluster.data, steps=steps, slices=slices, parallel=parallel, layers=layers,
                              vocab=vocab))
    return path


def submit(cluster, *args, **options):
    return muster("--coordinator", cluster.address, "submit", *args, **options)


def test_a_job_starts_from_an_imported_model():
    """Its first loss is the one that the model has by hand: of data with a single byte, the log of the sum minus that byte's logit."""
    logits = gpt2_tensors()["transformer.wte.weight"][1][::CHANNELS]
    expected = math.log(sum(map(math.exp, logits))) - logits[ord("x")]
    for slices in (1, 2):
        with Cluster() as cluster:
            cluster.start_coordinator()
            data = os.path.join(cluster.dir, "x.txt")
            with open(data, "w") as file:
                file.write("x" * 10000)
            submit(cluster, job_file(cluster, import_gpt2(cluster, slices), data=data, steps=1, slices=slices))
            cluster.start_worker()
            cluster.wait_finished()
            loss = cluster.job().result.loss
            check(abs(loss - expected) < 1e-5, f"the first loss is {loss}, the imported model's is {expected}")


def test_training_goes_on_from_an_import_with_the_same_weights_in_every_layout():
    with Cluster() as cluster:
        cluster.start_coordinator()
        init = import_gpt2(cluster, slices=2)
        moved = os.path.join(cluster.dir, "moved")
        shutil.copytree(init, moved)
        weights = {}
        for name, workers, parallel, path in (("one", 1, "", init), ("replicas", 3, "", init), ("tensor", 2, ", tp: 2", init),
                                              ("stages", 2, ", pp: 2", moved), ("all", 8, ", tp: 2, pp: 2, optimizer_sharding: true", moved)):
            submit(cluster, job_file(cluster, path, name=name, slices=2, parallel=parallel))
            for _ in range(workers):
                cluster.start_worker(job=name)
            weights[name] = cluster.wait_finished(name)
        check(len(set(weights.values())) == 1, f"weights differ: {weights}")
        submit(cluster, job_file(cluster, init, name="one", slices=2))  # the same job again is harmless
        # Of random values the end is another.
        with open(os.path.join(cluster.dir, "one.yaml")) as file:
            text = file.read().replace("job: one", "job: random")
        with open(os.path.join(cluster.dir, "random.yaml"), "w") as file:
            file.write(text[:text.index("init:")])
        submit(cluster, os.path.join(cluster.dir, "random.yaml"))
        cluster.start_worker(job="random")
        check(cluster.wait_finished("random") != weights["one"], "the import has no effect")


def test_a_job_starts_from_another_jobs_checkpoint_and_survives_losses():
    with Cluster() as cluster:
        cluster.start_coordinator()
        cluster.submit(tiny_job(cluster, name="first", steps=10, model__heads=4, model__dropout=0.0))
        cluster.start_worker(job="first")
        cluster.wait_finished("first")
        init = cluster.checkpoints("first")[-1].dir
        weights = []
        for name in ("calm", "hit"):
            submit(cluster, job_file(cluster, init, name=name, steps=200))
            with cluster.slowed() if name == "hit" else contextlib.nullcontext():
                workers = [cluster.start_worker(job=name) for _ in range(2)]
                if name == "hit":
                    cluster.wait_until(lambda: cluster.job(name).world == 2 and cluster.job(name).steps_done >= 10, 30, "they do not step together")
                    workers[0].kill()
                    cluster.wait_event("worker_lost")
            weights.append(cluster.wait_finished(name))
        check(weights[0] == weights[1], f"weights differ: {weights}")


def test_a_start_that_cannot_be_is_refused():
    with Cluster() as cluster:
        cluster.start_coordinator()
        init = import_gpt2(cluster)
        for name, changes, fragments in (
            ("layers", {"layers": 3}, ["tiny.yaml:2: model.layers: value 3 is not allowed: 2, as the checkpoint"]),
            ("vocab", {"vocab": 300}, ["tiny.yaml:2: model.vocab: value 300 is not allowed: 256"]),
            ("slices", {"slices": 4}, ["tiny.yaml:7: parallel.slices: value 4 is not allowed: 1", "import with --slices 4"]),
            ("absent", {"init": "nowhere"}, ["tiny.yaml:8: init.path:", "nowhere/manifest.json"]),
            ("empty", {"init": cluster.dir}, ["tiny.yaml:8: init.path:", "manifest.json"]),
        ):
            submit(cluster, job_file(cluster, **{"init": init, **changes}), code=NOT_FOUND if name in ("absent", "empty") else FAILURE, fragments=fragments)
        # Another checkpoint in its place, and one whose piece is damaged: the worker says so.
        submit(cluster, job_file(cluster, init))
        kept = init + ".kept"
        os.rename(init, kept)
        import_gpt2(cluster)
        cluster.start_worker()
        lost = cluster.wait_event(lambda e: e.kind == "worker_lost")
        for fragment in ("init.path", "not the checkpoint that the job was submitted with", "SHA-256"):
            check(fragment in lost.text, f"'{fragment}' is missing: {lost.text}")
        check(cluster.job().steps_done == 0, "it steps all the same")
        shutil.rmtree(init)
        os.rename(kept, init)
        cluster.start_worker()
        cluster.wait_finished()
        piece = next(os.path.join(init, name) for name in sorted(os.listdir(init)) if name.endswith(".safetensors"))
        with open(piece, "r+b") as file:
            file.seek(os.path.getsize(piece) // 6)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        submit(cluster, job_file(cluster, init, name="damaged"))
        cluster.start_worker(job="damaged")
        lost = cluster.wait_event(lambda e: e.kind == "worker_lost" and e.job == "damaged")
        check("init.path" in lost.text and os.path.basename(piece) in lost.text, lost.text)


def test_clients_that_give_a_wrong_start_are_refused():
    """Not by the command line: the worker compares the model too."""
    with Cluster() as cluster:
        cluster.start_coordinator()
        init = import_gpt2(cluster)
        with open(os.path.join(init, "manifest.json"), "rb") as file:
            sha256 = hashlib.sha256(file.read()).hexdigest()
        cluster.submit(tiny_job(cluster, model__heads=2, init__path=init, init__sha256=sha256))
        cluster.start_worker()
        lost = cluster.wait_event("worker_lost")
        check("model.heads: value 2 is not allowed: 4" in lost.text, lost.text)


def test_what_is_imported_is_exported_again():
    with Cluster() as cluster:
        init, out = import_gpt2(cluster, slices=2), os.path.join(cluster.dir, "exported")
        muster("export", "--checkpoint", init, "--format", "hf-gpt2", "--out", out)
        with open(os.path.join(out, "model.safetensors"), "rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header, data = json.loads(file.read(size)), file.read()
        for name, (shape, values) in gpt2_tensors().items():
            entry = header[name]
            begin, end = entry["data_offsets"]
            check(entry["shape"] == shape and data[begin:end] == struct.pack(f"<{len(values)}f", *values), f"tensor {name} has changed")
        muster("export", "--checkpoint", init, "--format", "llm.c", "--out", os.path.join(cluster.dir, "model.bin"))
        muster("import", "--format", "llm.c", "--from", os.path.join(cluster.dir, "model.bin"), "--out", os.path.join(cluster.dir, "again"))
        muster("checkpoint", "verify", os.path.join(cluster.dir, "again"))


def test_bad_imports_and_exports_leave_nothing_behind():
    with tempfile.TemporaryDirectory(prefix="muster-interchange-") as top:
        def at(name):
            return os.path.join(top, name)

        good = gpt2_directory(at("good"))
        muster("import", "--format", "hf-gpt2", "--from", good, "--out", at("ckpt"))
        gpt2_directory(at("relu"), activation_function="relu")
        gpt2_directory(at("wide"), n_embd=64)
        gpt2_directory(at("short"))
        os.truncate(os.path.join(at("short"), "model.safetensors"), 5000)
        gpt2_directory(at("huge"))
        with open(os.path.join(at("huge"), "model.safetensors"), "r+b") as file:
            file.write(struct.pack("<Q", 1 << 60))
        os.mkdir(at("bare"))
        shutil.copytree(at("ckpt"), at("bad"))
        os.truncate(os.path.join(at("bad"), "manifest.json"), 100)
        with open(at("note.txt"), "w") as file:
            file.write("no model")
        out = at("out")
        take = ["import", "--format", "hf-gpt2", "--out", out, "--from"]
        give = ["export", "--format", "hf-gpt2", "--out", out, "--checkpoint"]
        for code, fragments, args in (
            (USAGE, ["required"], ["import"]),
            (USAGE, ["required"], ["export", "--format", "hf-gpt2", "--out", out]),
            (USAGE, ["'onnx'", "hf-gpt2, hf-llama or llm.c"], ["import", "--format", "onnx", "--from", good, "--out", out]),
            (USAGE, ["--slices", "'0'"], take + [good, "--slices", "0"]),
            (USAGE, ["--slices", "'65'"], take + [good, "--slices", "65"]),
            (FAILURE, ["slices"], take + [good, "--slices", "3"]),
            (FAILURE, ["slices"], take + [good, "--slices", "8"]),
            (NOT_FOUND, ["absent"], take + [at("absent")]),
            (NOT_FOUND, ["config.json"], take + [at("bare")]),
            (FAILURE, ["note.txt"], take + [at("note.txt")]),
            (FAILURE, ["activation_function", "gelu_new"], take + [at("relu")]),
            (FAILURE, ["shape"], take + [at("wide")]),
            (FAILURE, ["short/model.safetensors"], take + [at("short")]),
            (FAILURE, ["huge/model.safetensors"], take + [at("huge")]),
            (FAILURE, ["model_type", "llama"], ["import", "--format", "hf-llama", "--from", good, "--out", out]),
            (FAILURE, ["note.txt"], ["import", "--format", "llm.c", "--from", at("note.txt"), "--out", out]),
            (NOT_FOUND, ["manifest.json"], give + [at("bare")]),
            (FAILURE, ["manifest.json"], give + [at("bad")]),
            (FAILURE, ["gpt2"], ["export", "--format", "hf-llama", "--out", out, "--checkpoint", at("ckpt")]),
        ):
            muster(*args, code=code, fragments=fragments)
            check(not os.path.exists(out), f"muster {' '.join(args)} leaves {out}")
        # What is there already is never written over.
        for code, args in ((CONFLICT, ["import", "--format", "hf-gpt2", "--from", good, "--out", at("ckpt")]),
                           (CONFLICT, ["export", "--format", "hf-gpt2", "--checkpoint", at("ckpt"), "--out", good]),
                           (FAILURE, ["export", "--format", "llm.c", "--checkpoint", at("ckpt"), "--out", good])):
            muster(*args, code=code)
        with open(os.path.join(at("ckpt"), "manifest.json"), "rb") as file:
            check(file.read(10), "the checkpoint is gone")


if __name__ == "__main__":
    main([test for name, test in list(globals().items()) if name.startswith("test_")])
