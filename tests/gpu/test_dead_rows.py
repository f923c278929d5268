# SPDX-License-Identifier: Apache-2.0
"""Queries that meet no key: every gradient through them is exactly 0, whatever their grad_out holds."""

import math

import pytest
import torch

from fovea.torch import attention

SQ, SK, DEAD = 300, 210, 90  # the first DEAD queries meet no key, or as many as the band has it


def problem(device, way, dims, dtype, queries=SQ, keys=SK, dead=DEAD, batch=2, heads=2):
    """Leaves, options, and which queries are dead: (B, H, Sq)."""
    generator = torch.Generator(device).manual_seed(6)

    def random(*shape):
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    shapes = (queries, dims[0]), (keys, dims[0]), (keys, dims[1])
    leaves = [random(batch, heads, *shape) for shape in shapes]
    is_dead = torch.arange(queries, device=device) < dead
    options = {}
    if way == "causal":
        options = dict(causal=True, align="bottom_right")
        is_dead = torch.arange(queries, device=device) < queries - keys
    elif way == "window":
        options = dict(window=(40, 20), align="bottom_right")
        is_dead = torch.arange(queries, device=device) < queries - keys - 20
    elif way == "mask":
        mask = torch.rand(batch, 1, queries, keys, device=device, generator=generator) < 0.8
        options = dict(mask=mask & ~is_dead[:, None])
        is_dead = ~options["mask"].any(-1).squeeze(1)[:, None]
    elif way == "query mask":
        options = dict(mask=~is_dead[None, None, :, None])
    elif way in ("bias", "shared bias"):
        bias = random(batch if way == "bias" else 1, heads, queries, keys).masked_fill_(is_dead[:, None], -torch.inf)
        leaves.append(bias)
    elif way == "key mask":  # the last entry has no key at all
        options = dict(
            mask=(torch.arange(batch, device=device) < batch - 1)[:, None, None, None].expand(batch, 1, 1, keys)
        )
        is_dead = (torch.arange(batch, device=device) == batch - 1)[:, None, None]
    elif way == "used":  # and so do these queries
        used = torch.tensor([keys // 2] * (batch - 1) + [0], device=device, dtype=torch.int32)
        options = dict(seqused_k=used, causal=True, align="bottom_right")
        shift = used - queries
        is_dead = (torch.arange(queries, device=device) + shift[:, None] < 0)[:, None]
    return leaves, options, is_dead.expand(batch, heads, queries)


def check(device, way, dims, dtype, deterministic=False, **shape):
    leaves, options, dead = problem(device, way, dims, dtype, **shape)
    for x in leaves:
        x.requires_grad_()
    if len(leaves) > 3:
        options["bias"] = leaves[3]
    out = attention(*leaves[:3], deterministic=deterministic, **options)
    generator = torch.Generator(device).manual_seed(7)
    grad_out = torch.randn(out.shape, device=device, dtype=dtype, generator=generator).masked_fill_(dead[..., None], 0)
    usual = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    assert dead.any() and not dead.all()
    assert not out[dead].any() and not usual[0][dead].any()
    for value in (math.inf, math.nan):
        spoilt = torch.autograd.grad(out, leaves, grad_out.masked_fill(dead[..., None], value), retain_graph=True)
        for name, x, y in zip(("q", "k", "v", "bias"), usual, spoilt):
            # The gradient of a shared bias is computed anew, by other roundings, for a tile that holds anything infinite.
            exact = deterministic and name != "bias"
            tolerance = 0 if exact else 0.02 * x.abs().max().item()
            wrong = (~((y - x).abs() <= tolerance)).sum().item()
            assert not wrong, f"{value}: d{name}: {wrong} of {y.numel()} differ, {(~y.isfinite()).sum()} are not finite"


WAYS = ["causal", "window", "mask", "query mask", "key mask", "bias", "shared bias", "used"]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_dead_rows(way, dims, deterministic, device):
    check(device, way, dims, torch.bfloat16, deterministic)


@pytest.mark.parametrize("dims, dtype", [
    ((32, 32), torch.float16), ((60, 60), torch.float16), ((80, 80), torch.bfloat16), ((512, 512), torch.bfloat16),
    ((64, 64), torch.float32), ((96, 96), torch.float32), ((512, 64), torch.float32),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("way", ["causal", "mask", "bias"])
def test_dead_rows_of_other_kernels(way, dims, dtype, device):
    check(device, way, dims, dtype)


@pytest.mark.parametrize("way", ["causal", "mask", "query mask", "key mask", "shared bias"])
@pytest.mark.parametrize("queries, keys", [(49, 33), (49, 30), (64, 64), (33, 17)])
def test_dead_rows_of_short_sequences(way, queries, keys, device):
    if way == "causal" and queries == keys:
        pytest.skip("no query is dead")
    check(device, way, (32, 32), torch.bfloat16, queries=queries, keys=keys, dead=queries // 3, batch=40)
