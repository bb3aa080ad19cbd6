#!/usr/bin/env python3
"""Checks one training step written by dump_step against an independent implementation in NumPy, double precision.

usage: check_step.py DUMP_STEP_PROGRAM

Forward, backward (written out by hand, no shared code), global-norm clipping and AdamW of GPT-2; every tensor must agree to 1e-4
relative to its own largest element."""
import subprocess
import sys
import tempfile

import numpy as np

TOLERANCE = 1e-4
CASES = [
    # layers heads channels context vocab micro length accumulate threads
    (2, 3, 48, 40, 101, 2, 33, 2, 2),
    (1, 1, 20, 9, 17, 1, 9, 1, 1),
    (3, 2, 32, 80, 257, 3, 80, 1, 3),
]


def read_dump(path):
    header, tensors = {}, {}
    with open(path, "rb") as file:
        for line in iter(file.readline, b"data\n"):
            key, *values = line.decode().split()
            if key == "tensor":
                name, offset, rows, columns, decay = values
                tensors[name] = (int(offset), int(rows), int(columns), decay == "1")
            else:
                header[key] = [float(v) for v in values]
        flat = int(header["flat"][0])
        shape = tuple(int(v) for v in header["batch"])
        count = shape[0] * shape[1] * shape[2]
        tokens, targets = (np.fromfile(file, "<i4", count).reshape(shape) for _ in range(2))
        floats = [np.fromfile(file, "<f4", flat).astype(np.float64) for _ in range(5)]
    return header, tensors, tokens, targets, floats


def take(tensors, flat):
    out = {}
    for name, (offset, rows, columns, _) in tensors.items():
        value = flat[offset:offset + rows * columns]
        out[name] = value if columns == 1 else value.reshape(rows, columns)
    return out


def norm_forward(x, w, b):
    mean = x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return (x - mean) * rstd * w + b, (x - mean) * rstd, rstd


def norm_backward(dy, w, normal, rstd):
    g = dy * w
    dx = rstd * (g - g.mean(-1, keepdims=True) - normal * (g * normal).mean(-1, keepdims=True))
    return dx, (dy * normal).sum((0, 1)), dy.sum((0, 1))


def gelu(x):
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + t), slope


def heads_of(x, heads):
    batch, length, channels = x.shape
    return x.reshape(batch, length, heads, channels // heads).transpose(0, 2, 1, 3)


def joined(x):
    batch, heads, length, size = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, heads * size)


def attention_forward(qkv, heads):
    q, k, v = (heads_of(part, heads) for part in np.split(qkv, 3, -1))
    score = q @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
    score = np.where(np.tril(np.ones(score.shape[-2:], bool)), score, -np.inf)
    p = np.exp(score - score.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return joined(p @ v), (q, k, v, p)


def attention_backward(dout, saved):
    q, k, v, p = saved
    dout = heads_of(dout, q.shape[1])
    dp = dout @ v.transpose(0, 1, 3, 2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    parts = ds @ k, ds.transpose(0, 1, 3, 2) @ q, p.transpose(0, 1, 3, 2) @ dout
    return np.concatenate([joined(part) for part in parts], -1)


def linear_backward(grads, name, x, w, dy):
    grads[name + ".weight"] += np.einsum("bti,bto->io", x, dy)
    grads[name + ".bias"] += dy.sum((0, 1))
    return dy @ w[name + ".weight"].T


def forward_backward(w, grads, tokens, targets, layers, heads, divisor):
    length = tokens.shape[1]
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:length]
    saved = []
    for i in range(layers):
        n = f"transformer.h.{i}."
        ln1, normal1, rstd1 = norm_forward(x, w[n + "ln_1.weight"], w[n + "ln_1.bias"])
        qkv = ln1 @ w[n + "attn.c_attn.weight"] + w[n + "attn.c_attn.bias"]
        att, kept = attention_forward(qkv, heads)
        x = x + att @ w[n + "attn.c_proj.weight"] + w[n + "attn.c_proj.bias"]
        ln2, normal2, rstd2 = norm_forward(x, w[n + "ln_2.weight"], w[n + "ln_2.bias"])
        fc = ln2 @ w[n + "mlp.c_fc.weight"] + w[n + "mlp.c_fc.bias"]
        act, slope = gelu(fc)
        x = x + act @ w[n + "mlp.c_proj.weight"] + w[n + "mlp.c_proj.bias"]
        saved.append((ln1, normal1, rstd1, kept, att, ln2, normal2, rstd2, act, slope))
    lnf, normalf, rstdf = norm_forward(x, w["transformer.ln_f.weight"], w["transformer.ln_f.bias"])
    wte = w["transformer.wte.weight"]
    logits = lnf @ wte.T
    top = logits.max(-1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    counted = targets >= 0
    aim = np.where(counted, targets, 0)[..., None]
    loss = ((lse - np.take_along_axis(logits, aim, -1))[..., 0] * counted).sum()

    d = np.exp(logits - lse)
    np.put_along_axis(d, aim, np.take_along_axis(d, aim, -1) - 1, -1)
    d *= counted[..., None] / divisor
    grads["transformer.wte.weight"] += np.einsum("btv,btc->vc", d, lnf)
    dx, dw, db = norm_backward(d @ wte, w["transformer.ln_f.weight"], normalf, rstdf)
    grads["transformer.ln_f.weight"] += dw
    grads["transformer.ln_f.bias"] += db
    for i in reversed(range(layers)):
        n = f"transformer.h.{i}."
        ln1, normal1, rstd1, kept, att, ln2, normal2, rstd2, act, slope = saved[i]
        dfc = linear_backward(grads, n + "mlp.c_proj", act, w, dx) * slope
        d, dw, db = norm_backward(linear_backward(grads, n + "mlp.c_fc", ln2, w, dfc), w[n + "ln_2.weight"], normal2, rstd2)
        grads[n + "ln_2.weight"] += dw
        grads[n + "ln_2.bias"] += db
        dx = dx + d
        dqkv = attention_backward(linear_backward(grads, n + "attn.c_proj", att, w, dx), kept)
        d, dw, db = norm_backward(linear_backward(grads, n + "attn.c_attn", ln1, w, dqkv), w[n + "ln_1.weight"], normal1, rstd1)
        grads[n + "ln_1.weight"] += dw
        grads[n + "ln_1.bias"] += db
        dx = dx + d
    np.add.at(grads["transformer.wte.weight"], tokens, dx)
    grads["transformer.wpe.weight"][:length] += dx.sum(0)
    return loss


def compare(what, mine, reference):
    error = np.abs(mine - reference).max() / max(np.abs(reference).max(), 1e-30)
    if not error <= TOLERANCE:
        sys.exit(f"check_step: {what}: relative error {error:.2e} exceeds {TOLERANCE:g}")
    return error


def check(program, case):
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([program, file.name, *map(str, case)], check=True)
        header, tensors, tokens, targets, (params, grads, m, v, updated) = read_dump(file.name)
    layers, heads = int(header["config"][0]), int(header["config"][1])
    w, mine = take(tensors, params), take(tensors, grads)
    expected = {name: np.zeros_like(value) for name, value in w.items()}
    loss = sum(forward_backward(w, expected, t, a, layers, heads, tokens.size) for t, a in zip(tokens, targets))
    worst = compare("loss", np.array(header["loss"]), np.array([loss]))
    for name in tensors:
        worst = max(worst, compare("gradient of " + name, mine[name], expected[name]))
    norm = np.sqrt(sum((g ** 2).sum() for g in expected.values()))
    worst = max(worst, compare("gradient norm", np.array(header["norm"]), np.array([norm])))

    lr, beta1, beta2, eps, decay, clip, update = header["adamw"]
    scale = min(1.0, clip / norm)
    first, second, after = take(tensors, m), take(tensors, v), take(tensors, updated)
    for name, (_, _, _, decayed) in tensors.items():
        g = expected[name] * scale
        m1 = (beta1 * first[name] + (1 - beta1) * g) / (1 - beta1 ** update)
        v1 = (beta2 * second[name] + (1 - beta2) * g * g) / (1 - beta2 ** update)
        step = lr * (m1 / (np.sqrt(v1) + eps) + (decay if decayed else 0.0) * w[name])
        worst = max(worst, compare("update of " + name, after[name] - w[name], -step))
    print(f"check_step: layers, heads, channels, context, vocab, micro, length, accumulate, threads = {case}: "
          f"{len(tensors)} tensors agree, worst relative error {worst:.1e}")


if len(sys.argv) != 2:
    sys.exit("usage: check_step.py DUMP_STEP_PROGRAM")
for each in CASES:
    check(sys.argv[1], each)
