#!/usr/bin/env python3
"""Checks steps written by dump_step against independent implementations in double precision.

usage: check_step.py DUMP_STEP_PROGRAM

NumPy: forward, backward (written out by hand, no shared code), global-norm clipping and AdamW of GPT-2; every tensor must agree to
1e-4 relative to its own largest element. PyTorch, where it is installed: gradients of GPT-2 and Llama by autograd to 1e-3, and the
loss of each of the first 20 steps of training to 1e-4 relative."""
import subprocess
import sys
import tempfile

import numpy as np

try:
    import torch
except ImportError:
    torch = None

TOLERANCE = 1e-4
GPT2, LLAMA = 1, 2
NONE, SELECTIVE, FULL = 1, 2, 3
CASES = [
    # family layers heads kv_heads channels hidden context vocab slices micro length accumulate threads recompute
    (GPT2, 2, 3, 0, 48, 0, 40, 101, 1, 2, 33, 2, 2, NONE),
    (GPT2, 1, 1, 0, 20, 0, 9, 17, 1, 1, 9, 1, 1, NONE),
    (GPT2, 3, 2, 0, 32, 0, 80, 257, 1, 3, 80, 1, 3, FULL),
    (GPT2, 2, 4, 0, 48, 0, 40, 101, 4, 2, 32, 2, 2, SELECTIVE),
    (LLAMA, 2, 6, 2, 48, 100, 40, 101, 1, 2, 33, 2, 2, NONE),
    (LLAMA, 3, 8, 4, 64, 172, 70, 257, 4, 2, 70, 1, 3, SELECTIVE),
    (LLAMA, 1, 2, 2, 16, 20, 9, 17, 2, 2, 9, 3, 1, FULL),
]


def read_dump(path):
    """Header, tensors by name with the slices of each, tokens, targets, flat arrays."""
    header, tensors = {}, {}
    with open(path, "rb") as file:
        for line in iter(file.readline, b"data\n"):
            key, *values = line.decode().split()
            if key == "tensor":
                name, numbers = values[0].split("#")[0], [int(v) for v in values[1:]]
                tensors.setdefault(name, []).append(numbers)
            else:
                header[key] = [float(v) for v in values]
        flat = int(header["flat"][0])
        shape = tuple(int(v) for v in header["batch"])
        count = shape[0] * shape[1] * shape[2]
        tokens, targets = (np.fromfile(file, "<i4", count).reshape(shape) for _ in range(2))
        floats = [np.fromfile(file, "<f4", flat).astype(np.float64) for _ in range(5)]
    return header, tensors, tokens, targets, floats


def take(tensors, flat):
    """Whole tensors, put together from their slices."""
    out = {}
    for name, slices in tensors.items():
        full_rows, full_columns = slices[0][4:6]
        whole = np.full((full_rows, full_columns), np.nan)
        for offset, rows, columns, _, _, _, axis, *parts in slices:
            value = flat[offset:offset + rows * columns].reshape(rows, columns)
            at = 0
            for first, size in zip(parts[::2], parts[1::2]):
                if axis == 0:
                    whole[first:first + size] = value[at:at + size]
                else:
                    whole[:, first:first + size] = value[:, at:at + size]
                at += size
        assert not np.isnan(whole).any(), name
        out[name] = whole[:, 0] if full_columns == 1 else whole
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


def compare(what, mine, reference, tolerance=TOLERANCE):
    error = np.abs(mine - reference).max() / max(np.abs(reference).max(), 1e-30)
    if not error <= tolerance:
        sys.exit(f"check_step: {what}: relative error {error:.2e} exceeds {tolerance:g}")
    return error


def check_numpy(dump):
    header, tensors, tokens, targets, (params, grads, m, v, updated) = dump
    layers, heads = int(header["config"][1]), int(header["config"][2])
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
    for name, slices in tensors.items():
        g = expected[name] * scale
        m1 = (beta1 * first[name] + (1 - beta1) * g) / (1 - beta1 ** update)
        v1 = (beta2 * second[name] + (1 - beta2) * g * g) / (1 - beta2 ** update)
        step = lr * (m1 / (np.sqrt(v1) + eps) + (decay if slices[0][3] else 0.0) * w[name])
        worst = max(worst, compare("update of " + name, after[name] - w[name], -step))
    return worst


# ---- PyTorch ----


def torch_attention(q, k, v, heads, kv_heads):
    batch, length, channels = q.shape
    size = channels // heads
    q = q.view(batch, length, heads, size).transpose(1, 2)
    k, v = (x.view(batch, length, kv_heads, size).transpose(1, 2).repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    score = (q @ k.transpose(-2, -1)) / size ** 0.5
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    y = score.masked_fill(mask, float("-inf")).softmax(-1) @ v
    return y.transpose(1, 2).reshape(batch, length, channels)


def torch_rotary(x, heads, base):
    """Hugging Face's apply_rotary_pos_emb."""
    batch, length, width = x.shape
    size = width // heads
    inverse = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), inverse)
    angle = torch.cat((angle, angle), -1)[None, :, None, :]
    x = x.view(batch, length, heads, size)
    turned = torch.cat((-x[..., size // 2:], x[..., :size // 2]), -1)
    return (x * angle.cos() + turned * angle.sin()).reshape(batch, length, width)


def torch_rms(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w


def torch_gpt2(w, tokens, layers, heads):
    norm = lambda x, n: torch.nn.functional.layer_norm(x, x.shape[-1:], w[n + ".weight"], w[n + ".bias"], 1e-5)
    linear = lambda x, n: x @ w[n + ".weight"] + w[n + ".bias"]
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][:tokens.shape[1]]
    for i in range(layers):
        n = f"transformer.h.{i}."
        q, k, v = linear(norm(x, n + "ln_1"), n + "attn.c_attn").chunk(3, -1)
        x = x + linear(torch_attention(q, k, v, heads, heads), n + "attn.c_proj")
        up = linear(norm(x, n + "ln_2"), n + "mlp.c_fc")
        act = 0.5 * up * (1 + torch.tanh((2 / np.pi) ** 0.5 * (up + 0.044715 * up ** 3)))
        x = x + linear(act, n + "mlp.c_proj")
    return norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T


def torch_llama(w, tokens, layers, heads, kv_heads, base):
    x = w["model.embed_tokens.weight"][tokens]
    channels = x.shape[-1]
    kv = channels // heads * kv_heads
    for i in range(layers):
        n = f"model.layers.{i}."
        q, k, v = (torch_rms(x, w[n + "input_layernorm.weight"]) @ w[n + "self_attn.qkv_proj.weight"]).split((channels, kv, kv), -1)
        y = torch_attention(torch_rotary(q, heads, base), torch_rotary(k, kv_heads, base), v, heads, kv_heads)
        x = x + y @ w[n + "self_attn.o_proj.weight"]
        gate, up = (torch_rms(x, w[n + "post_attention_layernorm.weight"]) @ w[n + "mlp.gate_up_proj.weight"]).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w[n + "mlp.down_proj.weight"]
    return torch_rms(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def torch_loss(w, header, tokens, targets):
    """Sum of token losses over all micro-batches."""
    family, layers, heads, kv_heads = (int(v) for v in header["config"][:4])
    if family == LLAMA:
        logits = torch_llama(w, tokens, layers, heads, kv_heads, header["rope_base"][0])
    else:
        logits = torch_gpt2(w, tokens, layers, heads)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")


def torch_curve(w, header, tensors, tokens, targets, steps):
    lr, beta1, beta2, eps, decay = header["adamw"][:5]
    first = {name: torch.zeros_like(x) for name, x in w.items()}
    second = {name: torch.zeros_like(x) for name, x in w.items()}
    curve = []
    for step in range(1, steps + 1):
        loss = torch_loss(w, header, tokens, targets) / tokens.numel()
        curve.append(loss.item())
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values()))))
        norm = sum(g.pow(2).sum() for g in grads.values()).sqrt().item()
        with torch.no_grad():
            for name, x in w.items():
                g = grads[name] * min(1.0, 1.0 / norm)
                first[name].mul_(beta1).add_(g, alpha=1 - beta1)
                second[name].mul_(beta2).addcmul_(g, g, value=1 - beta2)
                direction = first[name] / (1 - beta1 ** step) / ((second[name] / (1 - beta2 ** step)).sqrt() + eps)
                x -= lr * (direction + (decay if tensors[name][0][3] else 0.0) * x)
    return np.array(curve)


def check_torch(dump):
    header, tensors, tokens, targets, (params, grads, *_) = dump
    mine = take(tensors, grads)
    w = {name: torch.tensor(x, requires_grad=True) for name, x in take(tensors, params).items()}
    tokens, targets = (torch.tensor(x.reshape(-1, x.shape[-1]), dtype=torch.int64) for x in (tokens, targets))
    loss = torch_loss(w, header, tokens, targets)
    worst = compare("PyTorch: loss", np.array(header["loss"]), np.array([loss.item()]))
    expected = torch.autograd.grad(loss / tokens.numel(), list(w.values()))
    for name, g in zip(w, expected):
        worst = max(worst, compare("PyTorch: gradient of " + name, mine[name], g.numpy(), 1e-3))
    curve = np.array(header["curve"])
    other = torch_curve(w, header, tensors, tokens, targets, len(curve))
    error = np.abs(curve / other - 1).max()
    if not error <= 1e-4:
        sys.exit(f"check_step: PyTorch: losses of {len(curve)} steps: relative error {error:.2e} exceeds 1e-4")
    if not curve[-1] < curve[0]:
        sys.exit(f"check_step: the loss does not fall: {curve[0]:.4f} to {curve[-1]:.4f}")
    return worst, error


def check(program, case):
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([program, file.name, *map(str, case)], check=True)
        dump = read_dump(file.name)
    says = []
    if case[0] == GPT2:
        says.append(f"NumPy {check_numpy(dump):.1e}")
    if torch:
        says.append("PyTorch {:.1e}, losses of 20 steps {:.1e}".format(*check_torch(dump)))
    print(f"check_step: {'GPT-2' if case[0] == GPT2 else 'Llama'} {case[1:]}: {len(dump[1])} tensors; worst relative errors: "
          + ("; ".join(says) or "not checked, there is no PyTorch"), flush=True)


if len(sys.argv) != 2:
    sys.exit("usage: check_step.py DUMP_STEP_PROGRAM")
if not torch:
    print(f"check_step: {sys.executable} has no PyTorch: Llama and the loss curves are not checked (Debian: python3-torch)")
else:
    torch.set_num_threads(1)
for each in CASES:
    check(sys.argv[1], each)
