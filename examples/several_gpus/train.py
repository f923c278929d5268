#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small language model whose sequences lie on several ranks (docs/several-gpus.md).

    python examples/several_gpus/train.py                                  one process: the whole sequence of 64k tokens
    torchrun --nproc-per-node 2 examples/several_gpus/train.py             two: a half each, the same losses
    torchrun --nproc-per-node 2 examples/several_gpus/train.py --wrap fsdp
    torchrun --nproc-per-node 4 examples/several_gpus/train.py --context 2       two sequences, each on two ranks

It computes on GPUs if there are enough, and otherwise on the CPU, where sequences are shorter. The two lines with "several ranks"
are all that makes it context parallel: without them (and with --context 1) it is an ordinary data parallel program, or one for one GPU.
"""

import argparse
import os
import time
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fovea.torch import Rows, attention, context_parallel

VOCABULARY, WIDTH, HEADS, KEY_HEADS, DIM = 64, 64, 4, 2, 16


def rotate(x, positions):
    """Rotary positions, (1, S), of x, (B, H, S, D)."""
    angles = positions[0, :, None] / 10000 ** (torch.arange(0, DIM, 2, device=x.device) / DIM)
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.q = nn.Linear(WIDTH, HEADS * DIM)
        self.kv = nn.Linear(WIDTH, 2 * KEY_HEADS * DIM)
        self.sink = nn.Parameter(torch.zeros(HEADS))
        self.out = nn.Linear(HEADS * DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, positions, attend):
        y = self.norms[0](x)
        q = self.q(y).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, KEY_HEADS, DIM)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, positions), rotate(k, positions)
        attended = attend(q, k, v, causal=True, sink=self.sink)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens, positions, attend):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return F.linear(self.norm(x), self.embedding.weight)


def text(length, number):
    """Sequence number n is a random one of an eighth of its length, again and again: what was before predicts it."""
    generator = torch.Generator().manual_seed(number)
    piece = torch.randint(VOCABULARY, (max(2, length // 8),), generator=generator)
    return piece.repeat(length // len(piece) + 2)[: length + 1][None]


def wrapped(model, wrap, device):
    """Parameters and gradients shared out or summed over all ranks, whatever the ranks do with sequences: both average."""
    if wrap == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=0, help="tokens of the sequence; default: 65536 on GPUs, 2048 on a CPU")
    parser.add_argument("--steps", type=int, default=10, help="default: 10")
    parser.add_argument("--layers", type=int, default=2, help="default: 2")
    parser.add_argument("--move", choices=["keys", "heads", "ring"], help="default: context_parallel chooses")
    parser.add_argument("--wrap", choices=["ddp", "fsdp"], default="ddp", help="what sums the gradients; default: ddp")
    parser.add_argument("--context", type=int, default=0, help="ranks of a sequence, which divide all ranks; default: all")
    options = parser.parse_args(arguments)

    ranks, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    context = options.context or ranks
    if context < 1 or ranks % context:
        parser.error(f"--context: {context}; accepted: a divisor of the {ranks} ranks")
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    where = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_gpus else "gloo", **where)
    length = options.length or (65536 if on_gpus else 2048)

    # Rank r computes sequence r // context of each step; its neighbours with the same one are its context group.
    groups = [dist.new_group(range(first, first + context)) for first in range(0, ranks, context)]
    sequences, mine = ranks // context, dist.get_rank() // context
    group = groups[mine]

    torch.manual_seed(0)
    model = Model(options.layers).to(device)
    run = wrapped(model, options.wrap, device)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    attend = attention
    attend = partial(context_parallel, rows=(rows := Rows.zigzag(length, group)), move=options.move)  # several ranks
    for step in range(options.steps):
        start = time.perf_counter()
        whole = text(length, step * sequences + mine).to(device)
        tokens, targets, positions = whole[:, :-1], whole[:, 1:], torch.arange(length, device=device)[None]
        tokens, targets, positions = (rows.take(x, 1) for x in (tokens, targets, positions))  # several ranks
        logits = run(tokens, positions, attend)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum") / length
        optimizer.zero_grad()
        # Summed over the ranks of a sequence, averaged over sequences: DDP and FSDP divide by all ranks.
        (loss * context).backward()
        optimizer.step()
        total = loss.detach() / sequences
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total:.6f}, {time.perf_counter() - start:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
