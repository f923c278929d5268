# SPDX-License-Identifier: Apache-2.0
"""DDP and FSDP on two processes with gloo: the same gradients as one process over the whole batch."""

import os
import tempfile

import pytest
import torch
import torch.multiprocessing
from torch import nn

from fovea.torch import attention

WORLD = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(16, 48), nn.Linear(16, 48)])
        self.bias = nn.ParameterList([torch.randn(2, 7, 7), torch.randn(2, 7, 7)])
        self.sink = nn.Parameter(torch.randn(2))

    def forward(self, x):
        for qkv, bias in zip(self.qkv, self.bias):
            q, k, v = qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            x = x + attention(q, k, v, bias=bias, sink=self.sink, causal=True).transpose(1, 2).flatten(2)
        return x


def made():
    torch.manual_seed(0)
    return Model(), torch.randn(2 * WORLD, 7, 16)


def run(rank, folder, kind):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model, x = made()
    plain = model
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model.qkv:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model(x.chunk(WORLD)[rank]).square().sum().div(2).backward()
    # DDP and FSDP average over the processes, each of which has half of the batch.
    grads = {name: p.grad.full_tensor() if kind == "fsdp" else p.grad for name, p in plain.named_parameters()}
    if rank == 0:
        torch.save(grads, os.path.join(folder, "grads"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes(kind):
    model, x = made()
    model(x).square().sum().div(2 * WORLD).backward()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(run, args=(folder, kind), nprocs=WORLD, start_method="spawn")
        grads = torch.load(os.path.join(folder, "grads"))
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-6)
