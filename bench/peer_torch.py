#!/usr/bin/env python3
"""The step of bench_step in PyTorch: GPT-2 124M, forward, backward, clipping and AdamW in fp32 on the CPU.

usage: peer_torch.py [--micro B] [--length T] [--threads N] [--steps K] [--layers L]

Runs under the python3 that starts it: Debian's python3-torch, or a virtual environment with PyTorch from PyPI. malloc is tuned as a
careful user would (the program restarts itself with the settings): by default glibc gives large tensors back after each use and
every step page-faults anew, which halves PyTorch's speed. Prints tokens per second (median of K steps after two for warming up)."""
import argparse
import math
import os
import statistics
import sys
import time

KEEP = str(4 << 30)
TUNING = {"MALLOC_MMAP_THRESHOLD_": KEEP, "MALLOC_TRIM_THRESHOLD_": KEEP, "MALLOC_TOP_PAD_": str(256 << 20)}


def parse():
    parser = argparse.ArgumentParser()
    for name, value in (("micro", 4), ("length", 256), ("threads", len(os.sched_getaffinity(0))), ("steps", 5), ("layers", 12)):
        parser.add_argument("--" + name, type=int, default=value)
    return parser.parse_args()


def restart_tuned(threads):
    if os.environ.get("MALLOC_MMAP_THRESHOLD_") == KEEP:
        return
    env = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    env.update(TUNING, OMP_NUM_THREADS=str(threads))
    os.execve(sys.executable, [sys.executable, *sys.argv], env)


options = parse()
restart_tuned(options.threads)

import torch  # noqa: E402  (after the restart: it is slow to import)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

VOCAB, CONTEXT, CHANNELS, HEADS = 50257, 1024, 768, 12


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


def main():
    torch.manual_seed(1)
    torch.set_num_threads(options.threads)
    model = GPT2(options.layers)
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    try:
        optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=True)  # the fastest one, where it exists for CPU
    except (TypeError, RuntimeError):
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    data = torch.randint(0, VOCAB, (options.micro, options.length + 1))
    tokens, targets = data[:, :-1].contiguous(), data[:, 1:].contiguous()
    mask = torch.triu(torch.ones(options.length, options.length, dtype=torch.bool), 1)
    seconds = []
    for _ in range(options.steps + 2):
        start = time.monotonic()
        optimizer.zero_grad(set_to_none=False)
        loss = model(tokens, targets, mask)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        value = loss.item()
        seconds.append(time.monotonic() - start)
    median = statistics.median(seconds[2:])
    print(f"PyTorch {torch.__version__}, B{options.micro} x T{options.length}, fp32, {options.threads} threads")
    print(f"  step        {1e3 * median:8.1f} ms  (median of {options.steps}; loss {value:.4f})")
    print(f"  speed       {options.micro * options.length / median:8.1f} tokens/s")


main()
