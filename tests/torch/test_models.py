# SPDX-License-Identifier: Apache-2.0
"""Two layers of what Llama, T5 and Swin Transformer are made of, randomly initialised: our attention against SDPA's
math path in the same model, output and every parameter's gradient. The float64 model with SDPA is the reference, the
float32 model with SDPA the naive evaluation of the tolerance."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import naive
from fovea.torch import attention


def heads_of(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


def joined(x):
    return x.transpose(-2, -3).flatten(-2)


# ---- Llama: rotary positions, grouped heads, causal, RMSNorm, SwiGLU ----


def rotate(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    a, b = x.split(half, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class LlamaLayer(nn.Module):
    def __init__(self, dim=32, heads=4, heads_k=2):
        super().__init__()
        self.heads, self.heads_k = heads, heads_k
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim * heads_k // heads, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate, self.up = nn.Linear(dim, 64, bias=False), nn.Linear(dim, 64, bias=False)
        self.down = nn.Linear(64, dim, bias=False)

    def forward(self, x, attend, padding):
        y = self.norm1(x)
        k, v = self.kv(y).chunk(2, dim=-1)
        q, k, v = heads_of(self.q(y), self.heads), heads_of(k, self.heads_k), heads_of(v, self.heads_k)
        x = x + self.o(joined(attend(rotate(q), rotate(k), v, padding)))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 32), nn.ModuleList([LlamaLayer(), LlamaLayer()])

    def forward(self, attend, tokens, padding=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, attend, padding)
        return x @ self.embed.weight.T


def llama_ours(q, k, v, padding):
    return attention(q, k, v, causal=True, mask=None if padding is None else padding[:, None, None])


def llama_theirs(q, k, v, padding):
    if padding is None:
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)
    band = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()
    return sdpa(q, k, v, attn_mask=padding[:, None, None] & band, enable_gqa=True)


# ---- T5: a learned bias by relative position, no scaling; a decoder that looks at the encoder ----


class T5Attention(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, attend, memory=None, **options):
        memory = x if memory is None else memory
        q, k, v = (heads_of(y, self.heads) for y in (self.q(x), self.k(memory), self.v(memory)))
        return self.o(joined(attend(q, k, v, **options)))


class T5(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.embed = nn.Embedding(50, dim)
        self.relative = nn.ModuleList([nn.Embedding(8, heads), nn.Embedding(8, heads)])
        self.encoder = nn.ModuleList([T5Attention(), T5Attention()])
        self.decoder = nn.ModuleList([T5Attention(), T5Attention()])
        self.cross = nn.ModuleList([T5Attention(), T5Attention()])
        self.norms = nn.ModuleList([nn.RMSNorm(dim) for _ in range(6)])

    def bias(self, side, rows):
        distance = torch.arange(rows)[None] - torch.arange(rows)[:, None]
        bucket = (distance.abs().clamp(max=3) + 4 * (distance > 0)).long()
        return self.relative[side](bucket).permute(2, 0, 1)[None]

    def forward(self, attend, tokens, targets, padding):
        x, y = self.embed(tokens), self.embed(targets)
        norms = iter(self.norms)
        keys = padding[:, None, None]
        for layer in self.encoder:
            x = x + layer(next(norms)(x), attend, bias=self.bias(0, x.shape[1]), mask=keys)
        for layer, cross in zip(self.decoder, self.cross):
            norm = next(norms)
            y = y + layer(norm(y), attend, bias=self.bias(1, y.shape[1]), causal=True)
            y = y + cross(next(norms)(y), attend, memory=x, mask=keys)
        return y


def t5_ours(q, k, v, **options):
    return attention(q, k, v, scale=1.0, **options)


def t5_theirs(q, k, v, bias=None, mask=None, causal=False):
    if mask is None and causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    if bias is not None:
        mask = bias.masked_fill(~mask, -torch.inf)
    return sdpa(q, k, v, attn_mask=mask, scale=1.0)


# ---- Swin: windows as the second level of the batch, a bias shared by all, a mask of each shifted window ----


class SwinLayer(nn.Module):
    def __init__(self, shift, dim=32, heads=4, window=4):
        super().__init__()
        self.shift, self.heads, self.window = shift, heads, window
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.o = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        relative = at[:, :, None] - at[:, None] + window - 1
        self.index = relative[0] * (2 * window - 1) + relative[1]

    def windows(self, x):
        """(B, 8, 8, C) -> (B, 4, 16, C)"""
        w = self.window
        return x.unflatten(1, (-1, w)).unflatten(3, (-1, w)).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def unwindows(self, x):
        w = self.window
        return x.unflatten(1, (2, 2)).unflatten(3, (w, w)).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def mask(self):
        region = torch.zeros(1, 8, 8, 1)
        for n, rows in enumerate((slice(0, 4), slice(4, 6), slice(6, 8))):
            for m, columns in enumerate((slice(0, 4), slice(4, 6), slice(6, 8))):
                region[:, rows, columns] = 3 * n + m
        of = self.windows(region)[0, ..., 0]
        return of[:, None, :, None] == of[:, None, None, :]  # (windows, 1, 16, 16)

    def forward(self, x, attend):
        y = self.norm1(x).roll((-self.shift, -self.shift), (1, 2))
        q, k, v = (heads_of(z, self.heads) for z in self.qkv(self.windows(y)).chunk(3, dim=-1))
        bias = self.table[self.index].permute(2, 0, 1)
        y = self.o(joined(attend(q, k, v, bias, self.mask() if self.shift else None)))
        x = x + self.unwindows(y).roll((self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([SwinLayer(0), SwinLayer(2)])

    def forward(self, attend, x):
        for layer in self.layers:
            x = layer(x, attend)
        return x


def swin_ours(q, k, v, bias, mask):
    return attention(q, k, v, bias=bias, mask=mask)


def swin_theirs(q, k, v, bias, mask):
    return sdpa(q, k, v, attn_mask=bias if mask is None else bias.masked_fill(~mask, -torch.inf))


# ---- the comparison ----


def compare(model, ours, theirs, *inputs):
    results = []
    with sdpa_kernel(SDPBackend.MATH):
        for attend, dtype in ((ours, torch.float32), (theirs, torch.float64), (theirs, torch.float32)):
            one = copy.deepcopy(model).to(dtype)
            out = one(attend, *(x.to(dtype) if x.is_floating_point() else x for x in inputs))
            weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).reshape(out.shape)
            (out * weights).sum().backward()
            results.append({"out": out, **{name: x.grad for name, x in one.named_parameters()}})
    for name in results[0]:
        naive.assert_as_good_as_naive(name, *(result[name] for result in results))


@pytest.mark.parametrize("padded", [False, True])
def test_llama(padded):
    tokens = torch.randint(50, (2, 24))
    padding = [torch.arange(24) < torch.tensor([24, 15])[:, None]] if padded else []
    compare(Llama(), llama_ours, llama_theirs, tokens, *padding)


def test_t5():
    tokens, targets = torch.randint(50, (2, 24)), torch.randint(50, (2, 10))
    compare(T5(), t5_ours, t5_theirs, tokens, targets, torch.arange(24) < torch.tensor([24, 15])[:, None])


def test_swin():
    compare(Swin(), swin_ours, swin_theirs, torch.randn(2, 8, 8, 32))
