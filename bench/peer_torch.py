#!/usr/bin/env python3
"""The step of bench_step and bench_gpu in PyTorch: GPT-2, forward, backward, clipping and AdamW.

usage: peer_torch.py [--micro B] [--length T] [--threads N] [--steps K] [--layers L] [--heads H] [--channels C] [--vocab V] [--accumulate A]
                     [--cuda] [--bf16] [--compile] [--name N] [--out FOLDER]

Runs under the python3 that starts it: Debian's python3-torch, or a virtual environment with PyTorch from PyPI. On the CPU malloc is tuned
as a careful user would (the program restarts itself with the settings): by default glibc gives large tensors back after each use and
every step page-faults anew, which halves PyTorch's speed. On a GPU: fused AdamW, flash attention, bf16 by autocast with parameters in
fp32, torch.compile. Prints tokens per second (median of K steps after two for warming up); --out writes FOLDER/rows and FOLDER/json
as bench_gpu does."""
import argparse
import contextlib
import math
import os
import statistics
import sys
import time

KEEP = str(4 << 30)
TUNING = {"MALLOC_MMAP_THRESHOLD_": KEEP, "MALLOC_TRIM_THRESHOLD_": KEEP, "MALLOC_TOP_PAD_": str(256 << 20)}


def parse():
    parser = argparse.ArgumentParser()
    for name, value in (("micro", 4), ("length", 256), ("threads", len(os.sched_getaffinity(0))), ("steps", 5), ("layers", 12), ("heads", 12),
                        ("channels", 768), ("vocab", 50257), ("accumulate", 1)):
        parser.add_argument("--" + name, type=int, default=value)
    for name in ("cuda", "bf16", "compile"):
        parser.add_argument("--" + name, action="store_true")
    parser.add_argument("--name", default="gpt2-124m")
    parser.add_argument("--out")
    return parser.parse_args()


def restart_tuned(threads):
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") == KEEP:
        return
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    env.update(TUNING, OMP_NUM_THREADS=str(threads))
    os.execve(sys.executable, [sys.executable, *sys.argv], env)


options = parse()
if not options.cuda:
    restart_tuned(options.threads)

import torch  # noqa: E402  (after the restart: it is slow to import)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

VOCAB, CONTEXT, CHANNELS, HEADS = options.vocab, max(1024, options.length), options.channels, options.heads


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.qkv, self.proj = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.fc, self.out = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)

    def attention(self, x, mask):
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in self.qkv(x).split(CHANNELS, 2))
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            score = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
            y = score.masked_fill(mask, float("-inf")).softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, length, CHANNELS))

    def forward(self, x, mask):
        x = x + self.attention(self.ln1(x), mask)
        return x + self.out(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, CHANNELS), nn.Embedding(CONTEXT, CHANNELS)
        self.blocks, self.lnf = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(CHANNELS)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets, mask):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        logits = F.linear(self.lnf(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def make_optimizer(model):
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    try:
        return torch.optim.AdamW(model.parameters(), **settings, fused=True)  # the fastest one, where it exists
    except (TypeError, RuntimeError):
        return torch.optim.AdamW(model.parameters(), **settings)


def train(device):
    """Seconds of each step, and the last loss."""
    model = GPT2(options.layers).to(device)
    optimizer = make_optimizer(model)
    run = torch.compile(model) if options.compile else model
    data = torch.randint(0, VOCAB, (options.micro, options.length + 1), device=device)
    tokens, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    mask = torch.triu(torch.ones(options.length, options.length, dtype=torch.bool, device=device), 1)
    seconds = []
    for _ in range(options.steps + 2):
        start, value = time.monotonic(), 0.0
        optimizer.zero_grad(set_to_none=options.cuda)
        for _ in range(options.accumulate):
            with torch.autocast("cuda" if options.cuda else "cpu", torch.bfloat16) if options.bf16 else contextlib.nullcontext():
                loss = run(tokens, targets, mask) / options.accumulate
            loss.backward()
            value += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = value.item()
        if options.cuda:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - start)
    return seconds[2:], value


def main():
    torch.manual_seed(1)
    torch.set_num_threads(options.threads)
    if options.cuda and not torch.cuda.is_available():
        sys.exit(f"PyTorch {torch.__version__} sees no GPU")
    if options.compile and not hasattr(torch, "compile"):
        sys.exit(f"PyTorch {torch.__version__} has no torch.compile")
    seconds, loss = train("cuda" if options.cuda else "cpu")
    median, kind = statistics.median(seconds), "bf16" if options.bf16 else "fp32"
    speed = options.micro * options.length * options.accumulate / median
    how = f"{'torch.compile, ' if options.compile else ''}{kind}"
    print(f"PyTorch {torch.__version__}, B{options.micro} x T{options.length}, {how}, {options.threads} threads")
    print(f"  step        {1e3 * median:8.1f} ms  (median of {options.steps}; loss {loss:.4f})")
    print(f"  speed       {speed:8.1f} tokens/s")
    if options.out:
        with open(os.path.join(options.out, "rows"), "w") as rows, open(os.path.join(options.out, "json"), "w") as found:
            rows.write(f"{options.name} PyTorch\t{1e3 * median:.2f} ms\t{speed:.0f} tokens/s, {torch.__version__}, {how}\n")
            found.write(f',{{"measure":"torch","model":"{options.name}","step_s":{median:.6g},"tokens_per_second":{speed:.6g},'
                        f'"version":"{torch.__version__}","compiled":{str(options.compile).lower()}}}')


main()
