# SPDX-License-Identifier: Apache-2.0
"""Dropout's two rules written down again from docs/semantics.md, on tensors of 64-bit words; nothing of fovea."""

from __future__ import annotations

import torch

_LOW = 0xFFFFFFFF


def _words(value: int) -> tuple[int, int]:
    return value & _LOW, value >> 32 & _LOW


def _multiply(a: torch.Tensor, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(high, low) word of a product of two words; what wraps in int64 are the same bits."""
    product = a * b
    return product >> 32 & _LOW, product & _LOW


def philox4x32(counter: tuple, key: tuple) -> tuple:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + 0x9E3779B9 & _LOW, k1 + 0xBB67AE85 & _LOW
    return c0, c1, c2, c3


def kept(rng: str, p: float, seed: int, offset: int, streams: torch.Tensor, sq: int, sk: int, row_stride: torch.Tensor | None,
         first_q: torch.Tensor | None = None, first_k: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
    """(batch, heads, sq, sk), true is kept. `streams`: int64 (batch, heads), without any of their own b * heads + h;
    `row_stride` (torch_mem_efficient): a row's elements in each batch entry; `first_q`, `first_k`: int64 (batch,), the
    positions of row and column 0."""
    seed, offset = seed % 2**64, offset % 2**64
    batch, heads = streams.shape
    n = streams[:, :, None, None]
    i = torch.arange(sq, device=n.device)[:, None]
    j = torch.arange(sk, device=n.device)[None, :]
    if first_q is not None:
        i = i + first_q[:, None, None, None]
    if first_k is not None:
        j = j + first_k[:, None, None, None]
    if rng == "fovea":
        threshold = int(p * 65536 + 0.5)
        word = lambda x: torch.full_like(n, x)  # noqa: E731
        low, high = _words(offset)
        k0, k1, w0, w1 = philox4x32((word(low), word(high), n & _LOW, n >> 32 & _LOW ^ 0x666F7665), _words(seed))
        fold = lambda x: (x >> 4) * 8 + (x & 7)  # noqa: E731
        x, y = (fold(i) ^ w0).expand(batch, heads, sq, sk), (fold(j) ^ w1).expand(batch, heads, sq, sk)
        for r in range(8):
            high, low = _multiply(x, 0xD256D193)
            x, y = high ^ y ^ ((k0 if r % 2 == 0 else k1) + r * 0x9E3779B9 & _LOW), low
        word = torch.where(i >> 3 & 1 == 1, y, x)
        return (word >> 16 * (j >> 3 & 1) & 0xFFFF) >= threshold
    signed = offset - 2**64 if offset >= 2**63 else offset
    number = signed + n * (sq * sk) + i * row_stride.reshape(-1, 1, 1, 1) + j
    block = number >> 2 & 0x3FFFFFFFFFFFFFFF
    zero = torch.zeros_like(block)
    words = philox4x32((block & _LOW, block >> 32, zero, zero), _words(seed))
    lane = number & 3
    word = torch.where(lane < 2, torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3]))
    uniform = word.float() * 2.0**-32 + 2.0**-33
    return uniform > torch.tensor(p, dtype=torch.float32, device=n.device)


def factor(rng: str, p: float) -> float:
    """What kept values are multiplied by."""
    if rng == "fovea":
        threshold = int(p * 65536 + 0.5)
        return 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    p = torch.tensor(p, dtype=torch.float32).item()  # uniforms are compared in fp32
    return 1 / (1 - p) if p < 1 else 0.0
