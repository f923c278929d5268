# SPDX-License-Identifier: Apache-2.0
"""Hints in errors: what an unknown keyword is called here, and whether a layout was confused with the other one. None
of it runs in a call that succeeds."""

from __future__ import annotations

import ctypes
import difflib
from collections.abc import Iterable, Mapping
from typing import Optional

from . import _abi

_PROBABILITIES = "probabilities are never stored; return_lse=True returns the logarithms of their denominators"
_NO_CACHE = "paged caches are not supported; k and v are ordinary arrays, seqused_k= says how many rows of each exist"
_MASKS = "mask= for bool (true takes part), bias= for numbers that are added to the scores"

# How other libraries name an option, and what it is here.
_ELSEWHERE = {
    "query": "q=",
    "key": "k=",
    "value": "v=",
    "is_causal": 'causal=True, with align="top_left" where Sq and Sk differ',
    "attn_mask": _MASKS,
    "attention_mask": _MASKS,
    "key_padding_mask": "mask=, true where a key takes part, as (B, 1, 1, Sk), or seqused_k=, its lengths",
    "head_mask": "scale the heads of the result instead, or leave heads out of q, k and v",
    "block_mask": "causal=, window=, cu_seqlens_q= and cu_seqlens_k=, seqused_k= or mask= instead of a function",
    "mask_mod": "causal=, window=, cu_seqlens_q= and cu_seqlens_k=, seqused_k= or mask= instead of a function",
    "score_mod": "bias=, alibi_slopes=, softcap= or scale= instead of a function",
    "attn_bias": "bias=",
    "position_bias": "bias=",
    "alibi": "alibi_slopes=",
    "dropout": "dropout_p=",
    "dropout_rate": "dropout_p=",
    "p": "dropout_p=",
    "dropout_seed": "seed=",
    "enable_gqa": "not needed, k and v may have fewer heads than q",
    "need_weights": _PROBABILITIES,
    "return_attn_probs": _PROBABILITIES,
    "output_attentions": _PROBABILITIES,
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "window_size": "window=(left, right)",
    "local_window_size": "window=(left, right)",
    "sliding_window": "window=(n - 1, 0) for n positions, the query's own one among them",
    "logits_soft_cap": "softcap=",
    "s_aux": "sink=",
    "learnable_sink": "sink=",
    "cu_seqlens": "cu_seqlens_q= and cu_seqlens_k=",
    "cu_seq_q": "cu_seqlens_q=",
    "cu_seq_k": "cu_seqlens_k=",
    "max_q": "max_seqlen_q=",
    "max_k": "max_seqlen_k=",
    "cache_seqlens": "seqused_k=",
    "kv_lens": "seqused_k=",
    "key_value_seq_lengths": "seqused_k=",
    "query_seq_lengths": "seqused_q=",
    "block_table": _NO_CACHE,
    "page_table": _NO_CACHE,
    "k_cache": _NO_CACHE,
    "v_cache": _NO_CACHE,
    "return_softmax_lse": "return_lse=True",
}


def cure(name: str, options: Iterable[str]) -> str:
    """For a keyword that is not in `options`: what it is called here, or "" if nothing resembles it."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    near = difflib.get_close_matches(name, options, 1, 0.7)
    return f"did you mean {near[0]}?" if near else ""


def instead(name: str, options: Iterable[str]) -> str:
    """The same, or the list of all options."""
    options = list(options)
    return cure(name, options) or f"accepted: {', '.join(options)}"


def refuse(
    function: str,
    first: str,
    positional: tuple[object, ...],
    unknown: Mapping[str, object],
    options: Optional[Iterable[str]],
) -> TypeError:
    """For a call with more arguments by position than `first`, or with keywords that are not in `options`."""
    if unknown:
        name = next(iter(unknown))
        return TypeError(f"{name}: not an option; {instead(name, options or ())}")
    count = first.count(",") + 1
    return TypeError(
        f"{function}: {count + len(positional)} arguments by position; accepted: {first}, and everything else by name, "
        "as mask=..."
    )


# ---- layouts ----

_SHAPED = ("q", "k", "v", "bias", "bias2", "mask", "alibi_slopes", "sink")
_DIMS = {"bshd": "(B, S, H, D)", "bhsd": "(B, H, S, D)"}


def layout_hint(raw: _abi.Problem, layout: str, error: str) -> str:
    """The end of an error about shapes, if they do not agree in `layout` but would in the other one; otherwise ""."""
    name = error.partition(":")[0]
    if name not in (*_SHAPED, "align") or raw.cu_seqlens_q or raw.cu_seqlens_k:
        return ""
    shapes = {name: _shape(getattr(raw, name)) for name in _SHAPED if getattr(raw, name)}
    if any(len(shapes.get(name, ())) not in (4, 5) for name in "qkv"):
        return ""
    other = {name: _swapped(shape) if name in "qkv" else shape for name, shape in shapes.items()}
    if not _agree(other):
        return ""
    if name == "align":  # queries and keys of different lengths are right as they are, unless these look like heads
        rows, heads = shapes["q"][-3], shapes["q"][-2]
        if rows >= heads or other["q"][-3] != other["k"][-3]:
            return ""
    elif _agree(shapes):
        return ""
    instead = "bhsd" if layout == "bshd" else "bshd"
    return (
        f"; with layout={instead!r}, {_DIMS[instead]}, these shapes agree (the default is 'bshd' in fovea and 'bhsd' "
        "in fovea.torch)"
    )


def _shape(address: int) -> tuple[int, ...]:
    """Of a fovea_tensor: rows of queries and keys before heads."""
    fields = _abi.TENSOR.unpack(ctypes.string_at(address, _abi.TENSOR.size))
    rank: int = fields[3]
    return tuple(fields[6 : 6 + rank])


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-3], shape[-2], shape[-3], shape[-1])


def _agree(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the shapes of a dense problem, (B, S, H, D), go together."""
    *batch, rows_q, heads_q, dim = shapes["q"]
    *batch_k, rows_k, heads_k, dim_k = shapes["k"]
    scores = (*batch, heads_q, rows_q, rows_k)
    return (
        batch == batch_k
        and dim == dim_k
        and shapes["k"][:-1] == shapes["v"][:-1]
        and heads_k > 0
        and heads_q % heads_k == 0
        and all(
            len(shape) <= len(scores) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(scores)))
            for name, shape in shapes.items()
            if name in ("bias", "bias2", "mask")
        )
        and all(shapes[name][-1:] == (heads_q,) for name in ("alibi_slopes", "sink") if name in shapes)
    )
