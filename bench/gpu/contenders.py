# SPDX-License-Identifier: Apache-2.0
"""Whoever computes a case: ours, PyTorch's three fused kernels, FlexAttention, and what is importable besides.

A contender is a function of (case, inputs) that gives a function of no arguments, which computes out; it raises
where the contender cannot do the case. Inputs lie in memory as (B, S, H, D), which all of them like, and are handed
over as views of (B, H, S, D).
"""

from __future__ import annotations

import inspect
import math
import os
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from cases import Case


class Refused(Exception):
    """The contender has no kernel for the case."""


DEVICE = os.environ.get("FOVEA_BENCH_DEVICE", "cuda")  # "cpu": for the check alone, of small problems


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
    leaves: dict = field(default_factory=dict)  # what a gradient is asked for, by name

    def bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v, self.grad_out))


def make_inputs(case: Case, shared: Optional[Inputs] = None) -> Inputs:
    """N(0, 1); biases and masks, which may be large, are those of `shared` where there is one."""
    # A generator of our own: PyTorch's is of no use any more once some contender's capture has failed.
    generator = torch.Generator(DEVICE).manual_seed(1 if shared is None else torch.initial_seed() % 1000 + 2)
    normal = lambda *shape, dtype=case.type: torch.randn(  # noqa: E731
        *shape, device=DEVICE, dtype=dtype, generator=generator
    )
    if case.lengths:
        total = sum(case.lengths)
        q, k, v = (normal(total, h, d) for h, d in
                   ((case.hq, case.d), (case.heads_k, case.d), (case.heads_k, case.dim_v)))  # fmt: skip
        grad_out = normal(total, case.hq, case.dim_v)
    else:
        q, k, v = (normal(*case.levels, s, h, d).transpose(-3, -2) for s, h, d in
                   ((case.sq, case.hq, case.d), (case.rows_k, case.heads_k, case.d),
                    (case.rows_k, case.heads_k, case.dim_v)))  # fmt: skip
        grad_out = normal(*case.levels, case.sq, case.hq, case.dim_v).transpose(-3, -2)
    x = Inputs(q, k, v, grad_out)
    if shared is not None:
        x.bias, x.bias2, x.mask, x.sink, x.slopes, x.cu_seqlens = (
            shared.bias, shared.bias2, shared.mask, shared.sink, shared.slopes, shared.cu_seqlens,
        )  # fmt: skip
    else:
        rows, keys = (max(case.lengths),) * 2 if case.lengths else (case.sq, case.rows_k)
        if case.bias:
            batch = (case.outer if case.outer else case.entries) if case.bias[0] else 1
            lead = (batch, 1) if case.outer else (batch,)
            dtype = {"": case.type, "fp32": torch.float32}[case.bias_type]
            shape = (*lead, case.hq if case.bias[1] else 1, rows if case.bias_rows else 1,
                     (keys if case.bias_keys else 1) + case.bias_pad)  # fmt: skip
            x.bias = normal(*shape, dtype=dtype)[..., : shape[-1] - case.bias_pad].detach()
        if case.bias2:
            x.bias2 = normal(*case.levels, 1, 1, keys)
        if case.mask:
            shape = (*case.levels, 1, rows if case.mask == "full" else 1, keys)
            x.mask = torch.rand(shape, device=DEVICE, generator=generator) < 0.9
        if case.sink:
            x.sink = normal(case.hq, dtype=torch.float32)
        if case.alibi:
            x.slopes = torch.rand(case.hq, device=DEVICE, generator=generator) / 8
        if case.lengths:
            x.cu_seqlens = torch.tensor([0, *case.lengths], device=DEVICE).cumsum(0).int()
    x.leaves = {name: getattr(x, name).requires_grad_() for name in case.gradients}
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


def hidden_pairs(case: Case, x: Inputs) -> Optional[Tensor]:
    """What a mask hides, causality and windows included: (B or 1, 1, Sq or 1, Sk); None: nothing."""
    hidden = None
    if case.causal or case.window != (-1, -1):
        i = torch.arange(case.sq, device=DEVICE)[:, None] + case.rows_k - case.sq
        j = torch.arange(case.rows_k, device=DEVICE)
        right = 0 if case.causal else case.window[1]
        hidden = j > i + right if right >= 0 else torch.zeros(case.sq, case.rows_k, device=DEVICE, dtype=torch.bool)
        if case.window[0] >= 0:
            hidden = hidden | (j < i - case.window[0])
        hidden = hidden[None, None]
    if x.mask is not None:
        hidden = ~x.mask if hidden is None else hidden | ~x.mask
    return hidden


def by_sdpa(backend: SDPBackend) -> Callable[[Case, Inputs], Callable[[], Tensor]]:
    """What it has no option for is put into its one mask, as its users do: what needs no gradient is added before."""

    def contender(case: Case, x: Inputs) -> Callable[[], Tensor]:
        if case.softcap or case.sink or case.lengths or case.deterministic:
            raise Refused("not of its options")
        q, k, v = (t.flatten(0, 1) for t in (x.q, x.k, x.v)) if case.outer else (x.q, x.k, x.v)
        whole = (case.batch, case.hq, case.sq, case.rows_k)
        causal = case.causal and case.sq == case.rows_k and x.bias is None and x.mask is None and not case.alibi
        causal = causal and case.window == (-1, -1)
        hidden = None if causal else hidden_pairs(case, x)
        terms = [t for t in (x.bias, x.bias2) if t is not None]
        if case.alibi:
            i = torch.arange(case.sq, device=DEVICE)[:, None] + case.rows_k - case.sq
            j = torch.arange(case.rows_k, device=DEVICE)
            terms.append((-x.slopes[:, None, None] * (i - j).abs()).to(case.type)[None])
        if hidden is not None and terms:
            none = torch.zeros(hidden.shape, device=DEVICE, dtype=case.type)
            terms.append(none.masked_fill(hidden, -math.inf))

        def total(parts: list) -> Tensor:
            given = parts[0]
            for part in parts[1:]:
                given = given + part
            given = given.to(case.type)
            if given.dim() == 5:
                given = given.expand(*case.levels, *whole[1:]).flatten(0, 1)
            return given.expand(whole)

        mask = None
        learns = any(t.requires_grad for t in terms)
        if not terms and hidden is not None:
            mask = (~hidden).expand(whole)
        elif terms and (not learns or (len(terms) == 1 and terms[0].dim() == 4 and terms[0].dtype == case.type)):
            mask = total(terms)

        def run() -> Tensor:
            given = total(terms) if terms and mask is None else mask
            with sdpa_kernel(backend):
                out = sdpa(q, k, v, attn_mask=given, is_causal=causal, dropout_p=case.dropout, enable_gqa=case.hq != case.heads_k)
            return out.unflatten(0, case.levels) if case.outer else out

        return run

    return contender


def varlen_flash(case: Case, x: Inputs) -> Callable[[], Tensor]:
    """FlashAttention-2 as PyTorch has it: packed sequences and windows, which its SDPA does not reach."""
    dense = by_sdpa(SDPBackend.FLASH_ATTENTION)
    windowed = case.window != (-1, -1)
    if not (case.lengths or windowed) or case.bias or case.mask or case.bias2:
        return dense(case, x)
    if case.softcap or case.sink or case.alibi or case.dropout or case.deterministic:
        raise Refused("not of its options")
    from torch.nn.attention.varlen import varlen_attn

    accepted = inspect.signature(varlen_attn).parameters
    left, right = case.window[0], 0 if case.causal else case.window[1]
    if "window_size" in accepted:
        options: dict = {"window_size": (left, right)}
    elif windowed:
        raise Refused("this PyTorch's has no windows")
    else:
        options = {"is_causal": case.causal}
    if case.hq != case.heads_k and "enable_gqa" in accepted:
        options["enable_gqa"] = True
    if case.lengths:
        longest, ends = max(case.lengths), x.cu_seqlens
        return lambda: varlen_attn(x.q, x.k, x.v, ends, ends, longest, longest, **options)
    ends_q, ends_k = (torch.arange(case.batch + 1, device=DEVICE, dtype=torch.int32) * n for n in (case.sq, case.rows_k))
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (x.q, x.k, x.v)]

    def run() -> Tensor:
        out = varlen_attn(*packed, ends_q, ends_k, case.sq, case.rows_k, **options)
        return out.unflatten(0, (case.batch, case.sq)).transpose(1, 2)

    return run


def mem_efficient(case: Case, x: Inputs) -> Callable[[], Tensor]:
    if not case.lengths:
        return by_sdpa(SDPBackend.EFFICIENT_ATTENTION)(case, x)
    if case.softcap or case.sink or case.alibi or x.bias is not None or case.deterministic or case.window != (-1, -1) or case.dropout:
        raise Refused("not of its options")
    nested = [torch.nested.nested_tensor_from_jagged(t, x.cu_seqlens.long()).transpose(1, 2) for t in (x.q, x.k, x.v)]

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            return sdpa(*nested, is_causal=case.causal).transpose(1, 2).values()

    return run


_flex = None


def flex(case: Case, x: Inputs) -> Callable[[], Tensor]:
    global _flex
    if case.dropout or case.lengths or case.sink or case.dtype == "fp32" or case.deterministic or case.bias2 or case.outer:
        raise Refused("not of its options")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if _flex is None:
        torch._dynamo.config.cache_size_limit = 256
        torch._functorch.config.donated_buffer = False  # a backward is timed again and again: its graph is kept
        _flex = torch.compile(flex_attention, dynamic=False)
    bias, slopes, mask, cap = x.bias, x.slopes, x.mask, case.softcap
    has_b, has_h, has_q, has_k = (*(case.bias or (False, False)), case.bias_rows, case.bias_keys)
    (left, right), shift, whole = case.window, case.rows_k - case.sq, case.mask == "full"

    def score(s, b, h, i, j):  # what is not asked for is not traced
        if cap:
            s = cap * torch.tanh(s / cap)
        if bias is not None:
            s = s + bias[b if has_b else 0, h if has_h else 0, i if has_q else 0, j if has_k else 0]
        if slopes is not None:
            s = s - slopes[h] * (i + shift - j).abs()
        return s

    def takes_part(b, h, i, j):
        allowed = j >= 0
        if case.causal:
            allowed = allowed & (j <= i + shift)
        if left >= 0:
            allowed = allowed & (j >= i + shift - left)
        if right >= 0:
            allowed = allowed & (j <= i + shift + right)
        if mask is not None:
            allowed = allowed & mask[b, 0, i if whole else 0, j]
        return allowed

    block = None
    if case.causal or left >= 0 or right >= 0 or mask is not None:
        block = create_block_mask(takes_part, None if mask is None else case.batch, None, case.sq, case.rows_k, device=DEVICE)
    changes = cap or bias is not None or slopes is not None
    options = {"score_mod": score if changes else None, "block_mask": block, "enable_gqa": case.hq != case.heads_k}
    return lambda: _flex(x.q, x.k, x.v, **options)


# ---- others, where they are importable ----


def flash4(case: Case, x: Inputs) -> Callable[[], Tensor]:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    if case.dropout or case.dtype == "fp32" or max(case.d, case.dim_v) > 256 or case.bias or case.mask or case.bias2 or case.alibi or case.outer:
        raise Refused("not of its options")
    options: dict = {"causal": case.causal, "softcap": case.softcap, "deterministic": case.deterministic}
    if case.window != (-1, -1):
        options["window_size"] = tuple(None if n < 0 else n for n in case.window)
    if case.sink:
        options["learnable_sink"] = x.sink.bfloat16()
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
    if case.bias != (False, True) or not plane or case.causal or case.dropout or case.mask or case.bias2 or case.lengths or case.deterministic or case.d > 128:
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
CHECKED = ("ours", "FlexAttention")  # whose formula is written by us: it is compared with fp64 before it is timed
