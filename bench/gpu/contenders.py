# SPDX-License-Identifier: Apache-2.0
"""Whoever computes a case: ours, PyTorch's three fused kernels, FlexAttention, and what is importable besides.

A contender is a function of (case, inputs) that gives a function of no arguments, which computes out; it raises
where the contender cannot do the case. Inputs lie in memory as (B, S, H, D), which all of them like, and are handed
over as views of (B, H, S, D).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from cases import Case


class Refused(Exception):
    """The contender has no kernel for the case."""


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    bias: Optional[Tensor] = None
    bias2: Optional[Tensor] = None
    mask: Optional[Tensor] = None
    sink: Optional[Tensor] = None
    slopes: Optional[Tensor] = None
    cu_seqlens: Optional[Tensor] = None
    leaves: list = field(default_factory=list)  # what a gradient is asked for

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v, self.grad_out))


def make_inputs(case: Case, shared: Optional[Inputs] = None) -> Inputs:
    """N(0, 1); biases and masks, which may be large, are those of `shared` where there is one."""
    # A generator of our own: PyTorch's is of no use any more once some contender's capture has failed.
    generator = torch.Generator("cuda").manual_seed(1 if shared is None else torch.initial_seed() % 1000 + 2)
    normal = lambda *shape, dtype=case.type: torch.randn(  # noqa: E731
        *shape, device="cuda", dtype=dtype, generator=generator
    )
    if case.lengths:
        total = sum(case.lengths)
        q, k, v = (normal(total, h, d) for h, d in
                   ((case.hq, case.d), (case.heads_k, case.d), (case.heads_k, case.dim_v)))  # fmt: skip
        grad_out = normal(total, case.hq, case.dim_v)
    else:
        q, k, v = (normal(case.batch, s, h, d).transpose(1, 2) for s, h, d in
                   ((case.sq, case.hq, case.d), (case.rows_k, case.heads_k, case.d),
                    (case.rows_k, case.heads_k, case.dim_v)))  # fmt: skip
        grad_out = normal(case.batch, case.sq, case.hq, case.dim_v).transpose(1, 2)
    x = Inputs(q, k, v, grad_out)
    if shared is not None:
        x.bias, x.bias2, x.mask, x.sink, x.slopes, x.cu_seqlens = (
            shared.bias, shared.bias2, shared.mask, shared.sink, shared.slopes, shared.cu_seqlens,
        )  # fmt: skip
    else:
        rows, keys = case.sq, case.rows_k
        if case.bias:
            batch, heads = case.batch if case.bias[0] else 1, case.hq if case.bias[1] else 1
            dtype = {"": case.type, "fp32": torch.float32}[case.bias_type]
            shape = (batch, heads, rows if case.bias_rows else 1, (keys if case.bias_keys else 1) + case.bias_pad)
            x.bias = normal(*shape, dtype=dtype)[..., : shape[-1] - case.bias_pad].detach()
            x.bias.requires_grad_(case.bias_grad)
        if case.bias2:
            x.bias2 = normal(case.batch, 1, 1, keys).requires_grad_()
        if case.mask:
            shape = (case.batch, 1, rows if case.mask == "full" else 1, keys)
            x.mask = torch.rand(shape, device="cuda", generator=generator) < 0.9
        if case.sink:
            x.sink = normal(case.hq, dtype=torch.float32).requires_grad_()
        if case.alibi:
            x.slopes = torch.rand(case.hq, device="cuda", generator=generator) / 8
        if case.lengths:
            ends = torch.tensor([0, *case.lengths], device="cuda").cumsum(0)
            x.cu_seqlens = ends.int()
    x.leaves = [t.requires_grad_() for t in (q, k, v)]
    x.leaves += [t for t in (x.bias, x.bias2, x.sink) if t is not None and t.requires_grad]
    return x


# ---- ours ----


def ours(case: Case, x: Inputs) -> Callable[[], Tensor]:
    from fovea.torch import attention

    options: dict = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
    options.update(bias=x.bias, bias2=x.bias2, mask=x.mask, sink=x.sink, alibi_slopes=x.slopes)
    options["deterministic"] = case.deterministic
    if case.dropout:
        options.update(dropout_p=case.dropout, seed=1, offset=0)
    if case.lengths:
        longest = max(case.lengths)
        options.update(cu_seqlens_q=x.cu_seqlens, cu_seqlens_k=x.cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)
    return lambda: attention(x.q, x.k, x.v, **options)


# ---- PyTorch's ----


def by_sdpa(backend: SDPBackend) -> Callable[[Case, Inputs], Callable[[], Tensor]]:
    def contender(case: Case, x: Inputs) -> Callable[[], Tensor]:
        if case.softcap or case.sink or case.window != (-1, -1) or case.lengths or case.deterministic:
            raise Refused("not of its options")
        if case.causal and case.sq != case.rows_k:
            raise Refused("another alignment")
        added = [t for t in (x.bias, x.bias2) if t is not None]
        if case.alibi:
            raise Refused("not of its options")
        mask = x.mask if not added else None
        if added and x.mask is not None:
            raise Refused("bias and mask")
        if len(added) == 1:
            mask = added[0].expand(case.batch, case.hq, case.sq, case.rows_k)
        elif added:  # it has one bias: the two are added before
            mask = None
        elif mask is not None:
            mask = mask.expand(case.batch, case.hq, case.sq, case.rows_k)

        def run() -> Tensor:
            given = mask if len(added) < 2 else added[0] + added[1]
            with sdpa_kernel(backend):
                return sdpa(x.q, x.k, x.v, attn_mask=given, is_causal=case.causal, dropout_p=case.dropout,
                            enable_gqa=case.hq != case.heads_k)  # fmt: skip

        return run

    return contender


def varlen_flash(case: Case, x: Inputs) -> Callable[[], Tensor]:
    """FlashAttention-2 as PyTorch has it: packed sequences and windows, which its SDPA does not reach."""
    dense = by_sdpa(SDPBackend.FLASH_ATTENTION)
    if not case.lengths:
        return dense(case, x)
    if case.softcap or case.sink or case.alibi or x.bias is not None or case.deterministic:
        raise Refused("not of its options")
    from torch.nn.attention.varlen import varlen_attn

    longest = max(case.lengths)
    try:
        varlen_attn(x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, longest, longest, is_causal=case.causal)
        options = {"is_causal": case.causal}
    except TypeError:  # later versions say it by a window
        options = {"window_size": (-1, 0 if case.causal else -1)}
    return lambda: varlen_attn(x.q, x.k, x.v, x.cu_seqlens, x.cu_seqlens, longest, longest, **options)


def mem_efficient(case: Case, x: Inputs) -> Callable[[], Tensor]:
    if not case.lengths:
        return by_sdpa(SDPBackend.EFFICIENT_ATTENTION)(case, x)
    if case.softcap or case.sink or case.alibi or x.bias is not None or case.deterministic:
        raise Refused("not of its options")
    nested = [torch.nested.nested_tensor_from_jagged(t, x.cu_seqlens.long()).transpose(1, 2) for t in (x.q, x.k, x.v)]

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return sdpa(*nested, is_causal=case.causal).transpose(1, 2).values()

    return run


_flex = None


def flex(case: Case, x: Inputs) -> Callable[[], Tensor]:
    global _flex
    if case.dropout or case.lengths or case.sink or case.dtype == "fp32" or case.deterministic or case.bias2:
        raise Refused("not of its options")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if _flex is None:
        torch._dynamo.config.cache_size_limit = 256
        _flex = torch.compile(flex_attention, dynamic=False)
    score = block = None
    if x.bias is not None:
        has_b, has_h, has_q, has_k = (*case.bias, case.bias_rows, case.bias_keys)
        bias = x.bias

        def score(s, b, h, i, j):
            return s + bias[b if has_b else 0, h if has_h else 0, i if has_q else 0, j if has_k else 0]

    elif case.softcap:

        def score(s, b, h, i, j):
            return case.softcap * torch.tanh(s / case.softcap)

    elif case.alibi:
        slopes = x.slopes

        def score(s, b, h, i, j):
            return s - slopes[h] * (i - j).abs()

    left = case.window[0]
    shift = case.rows_k - case.sq
    if case.causal or left >= 0:
        inside = lambda b, h, i, j: (j <= i + shift) & (j >= i + shift - left if left >= 0 else j >= 0)  # noqa: E731
        block = create_block_mask(inside, None, None, case.sq, case.rows_k, device="cuda")
    elif case.mask:
        mask = x.mask
        whole = case.mask == "full"
        inside = lambda b, h, i, j: mask[b, 0, i if whole else 0, j]  # noqa: E731
        block = create_block_mask(inside, case.batch, None, case.sq, case.rows_k, device="cuda")
    return lambda: _flex(x.q, x.k, x.v, score_mod=score, block_mask=block, enable_gqa=case.hq != case.heads_k)


# ---- others, where they are importable ----


def flash4(case: Case, x: Inputs) -> Callable[[], Tensor]:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if case.dropout or case.dtype == "fp32" or max(case.d, case.dim_v) > 256 or case.bias or case.mask or case.bias2 or case.alibi:
        raise Refused("not of its options")
    options: dict = {"causal": case.causal, "softcap": case.softcap, "deterministic": case.deterministic}
    if case.window != (-1, -1):
        options["window_size"] = tuple(None if n < 0 else n for n in case.window)
    if case.sink:
        options["learnable_sink"] = x.sink.detach().bfloat16()
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    if case.lengths:
        longest = max(case.lengths)
        return lambda: first(flash_attn_varlen_func(
            x.q, x.k, x.v, cu_seqlens_q=x.cu_seqlens, cu_seqlens_k=x.cu_seqlens, max_seqlen_q=longest,
            max_seqlen_k=longest, **options))  # fmt: skip
    turned = [t.transpose(1, 2) for t in (x.q, x.k, x.v)]
    return lambda: first(flash_attn_func(*turned, **options)).transpose(1, 2)


def cuequivariance(case: Case, x: Inputs) -> Callable[[], Tensor]:
    """NVIDIA's triangle attention: one bias for the batch, which it wants in fp32."""
    plane = case.bias_rows and case.bias_keys
    if case.bias != (False, True) or not plane or case.causal or case.dropout or case.mask or case.bias2 or case.lengths or case.deterministic:
        raise Refused("made for triangle attention")
    from cuequivariance_torch import triangle_attention

    q, k, v = (t.unsqueeze(0) for t in (x.q, x.k, x.v))  # (1, N, H, S, D)
    bias = x.bias.unsqueeze(0).float()
    return lambda: triangle_attention(q, k, v, bias=bias, scale=1 / math.sqrt(case.d)).squeeze(0)


CONTENDERS: dict[str, Callable[[Case, Inputs], Callable[[], Tensor]]] = {
    "ours": ours,
    "mem-efficient": mem_efficient,
    "FlashAttention-2": varlen_flash,
    "cuDNN": by_sdpa(SDPBackend.CUDNN_ATTENTION),
    "FlexAttention": flex,
    "FlashAttention-4": flash4,
    "cuEquivariance": cuequivariance,
}
SLOW_TO_COMPILE = ("FlexAttention", "FlashAttention-4")
