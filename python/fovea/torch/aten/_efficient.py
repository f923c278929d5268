# SPDX-License-Identifier: Apache-2.0
"""The memory-efficient operators: _efficient_attention_forward and _backward with (B, S, H, D), or packed with (1, total, H, D),
and _scaled_dot_product_efficient_attention and _backward with (B, H, S, D).

logsumexp has its rows padded to a multiple of 32, with +inf. custom_mask_type is 0 for none, 1 for a causal mask that is aligned
at the top left, 2 at the bottom right; a window_size w > 0 leaves the last w keys of each query, and needs a causal mask.

Dropout draws the bits of PyTorch's kernel. Dense, that is the rule torch_mem_efficient of docs/semantics.md. Packed, PyTorch's
forward numbers the random numbers of every sequence and every head from the same one on, so each of them is one call here.
The backward here draws those of the forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from . import _compute
from ._compute import named, refuse
from ._register import Result, operator

_ALIGNS = (None, "top_left", "bottom_right")  # by custom_mask_type
_LSE_ROWS = 32  # logsumexp's rows are a multiple


def _mask(custom_mask_type: int, window_size: Optional[int]) -> dict[str, Any]:
    if custom_mask_type not in (0, 1, 2):
        raise refuse("custom_mask_type", custom_mask_type, "0 (none), 1 (causal, top left) or 2 (causal, bottom right)")
    window = window_size or 0
    if window < 0 or (window > 0 and custom_mask_type == 0):
        raise refuse("window_size", window, "0 or None; with a causal custom_mask_type a positive number")
    if custom_mask_type == 0:
        return {}
    mask: dict[str, Any] = {"causal": True, "align": _ALIGNS[custom_mask_type]}
    return {**mask, "window_left": window - 1, "window_right": 0} if window else mask


def _check(
    query: Tensor, key: Tensor, value: Tensor, bias: Optional[Tensor], cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor], max_seqlen_q: Optional[int], seqlen_k: Optional[Tensor] = None,
) -> None:  # fmt: skip
    _compute.need_rank(4, "(B, S, H, D)", query=query, key=key, value=value)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise refuse("cu_seqlens_k", "one of the two without the other", "both or none")
    if cu_seqlens_q is None:
        if seqlen_k is not None:
            raise refuse("seqlen_k", "given without cu_seqlens_k, where PyTorch's kernel ignores it", "None")
        return
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.shape[0] != 1:
            raise refuse(name, _compute.shape(tensor), "(1, total, H, D), as cu_seqlens_q is given")
    if bias is not None:
        raise refuse("bias", "given with cu_seqlens_q", "None")
    if not max_seqlen_q:
        raise refuse("max_seqlen_q", max_seqlen_q, "the longest sequence's length, as cu_seqlens_q is given")


# ---- results ----


def _new_logsumexp(query: Tensor, cu_seqlens_q: Optional[Tensor], max_seqlen_q: Any, wanted: bool) -> Tensor:
    batch = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    rows = _compute.padded(max_seqlen_q, _LSE_ROWS) if wanted else 0
    return torch.empty((batch, query.shape[-2], rows), dtype=torch.float32, device=query.device)


def _lengths(
    query: Tensor, key: Tensor, cu_seqlens_q: Optional[Tensor], max_seqlen_q: Any, max_seqlen_k: Any
) -> tuple[Any, Any]:
    """Of the longest sequences."""
    longest_q = query.shape[1] if cu_seqlens_q is None else max_seqlen_q
    return longest_q, key.shape[1] if max_seqlen_k is None else max_seqlen_k


def _new_grad_bias(bias: Tensor) -> Tensor:
    """Its rows begin at multiples of 16 elements."""
    *outer, columns = bias.shape
    return bias.new_empty((*outer, _compute.padded(columns, 16)))[..., :columns]


# ---- packed sequences ----


class _Rows(NamedTuple):
    """Where a row of packed queries is in logsumexp. A row of no sequence is in one that lies behind it."""

    at: Tensor
    sequences: int
    padded: int


def _rows(query: Tensor, cu_seqlens_q: Tensor, logsumexp: Tensor) -> _Rows:
    count, padded = logsumexp.shape[0], logsumexp.shape[2]
    ends = cu_seqlens_q.long()
    row = torch.arange(query.shape[1], device=query.device)
    sequence = torch.bucketize(row, ends[1:].contiguous(), right=True)
    at = sequence * padded + row - ends[sequence]
    return _Rows(torch.where(sequence < count, at, count * padded), count, padded)


def _scatter(lse: Tensor, rows: _Rows, logsumexp: Tensor) -> None:
    """From (H, total) to (sequences, H, padded)."""
    heads = lse.shape[0]
    flat = lse.new_full((heads, rows.sequences * rows.padded + 1), float("inf"))
    flat[:, rows.at] = lse
    logsumexp.copy_(flat[:, :-1].view(heads, rows.sequences, rows.padded).transpose(0, 1))


def _gather(logsumexp: Tensor, rows: _Rows) -> Tensor:
    heads = logsumexp.shape[1]
    flat = logsumexp.transpose(0, 1).reshape(heads, rows.sequences * rows.padded)
    return torch.cat((flat, flat.new_full((heads, 1), float("inf"))), 1)[:, rows.at]


class _Piece(NamedTuple):
    """One head of one sequence: its rows of the packed tensors, and its place in logsumexp. Heads of a group share `head_k`."""

    q: slice
    k: slice
    sequence: int
    head: int
    head_k: int

    def queries(self, tensor: Tensor) -> Tensor:
        return tensor[:, self.q, self.head : self.head + 1]

    def keys(self, tensor: Tensor) -> Tensor:
        return tensor[:, self.k, self.head_k : self.head_k + 1]

    def own_keys(self, tensor: Tensor) -> Tensor:
        """Of a tensor that has every query head's keys."""
        return tensor[:, self.k, self.head : self.head + 1]

    def lse(self, tensor: Tensor) -> Tensor:
        return tensor[self.sequence : self.sequence + 1, self.head : self.head + 1, : self.q.stop - self.q.start]


def _pieces(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, seqlen_k: Optional[Tensor]
) -> Iterator[_Piece]:
    """With dropout every head of every sequence draws the same random numbers: each is a call of its own."""
    if _compute.capturing(query):
        raise NotImplementedError("dropout_p: not 0 with packed sequences while a CUDA graph is captured; accepted: 0")
    group = _group(query, key)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    used = [end - begin for begin, end in zip(ends_k, ends_k[1:])] if seqlen_k is None else seqlen_k.tolist()
    for sequence, (begin, end) in enumerate(zip(ends_q, ends_q[1:])):
        if end > begin:
            first = ends_k[sequence]
            for head in range(query.shape[2]):
                yield _Piece(slice(begin, end), slice(first, first + used[sequence]), sequence, head, head // group)


def _group(query: Tensor, key: Tensor) -> int:
    """How many query heads have the same keys."""
    heads, heads_k = query.shape[2], key.shape[2]
    if heads_k == 0 or heads % heads_k:
        raise refuse("key", _compute.shape(key), f"a number of heads that divides query's {heads}")
    return int(heads // heads_k)


# ---- the operators ----


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Optional[Tensor], cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor], max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float, custom_mask_type: int,
    compute_log_sumexp: bool = False, *, scale: Optional[float] = None, seqlen_k: Optional[Tensor] = None,
    window_size: Optional[int] = None,
) -> Result:  # fmt: skip
    longest = _lengths(query, key, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    logsumexp = _new_logsumexp(query, cu_seqlens_q, longest[0], compute_log_sumexp)
    return out, logsumexp, *_compute.no_numbers(query, dropout_p), *longest


def _saved_forward(given: dict[str, Any], results: Result) -> dict[str, Any]:
    """The backward's arguments but the gradient."""
    out, logsumexp, seed, offset, max_seqlen_q, max_seqlen_k = results
    bias = given["bias"]
    kept = ("query", "key", "value", "bias", "cu_seqlens_q", "cu_seqlens_k", "dropout_p", "custom_mask_type", "scale", "window_size")
    return {
        **{name: given[name] for name in kept}, "out": out, "logsumexp": logsumexp, "philox_seed": seed,
        "philox_offset": offset, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
        "bias_requires_grad": bias is not None and bias.requires_grad,
    }  # fmt: skip


def _fake_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Optional[Tensor], out: Tensor,
    cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor], max_seqlen_q: Any, max_seqlen_k: Any,
    logsumexp: Tensor, dropout_p: float, philox_seed: Tensor, philox_offset: Tensor, custom_mask_type: int,
    bias_requires_grad: bool, *, scale: Optional[float] = None, num_splits_key: Optional[int] = None,
    window_size: Optional[int] = None, shared_storage_dqdkdv: bool = False,
) -> Result:  # fmt: skip
    grads: tuple[Tensor, ...]
    if shared_storage_dqdkdv:
        if query.shape != key.shape or query.shape != value.shape:
            given = ", ".join(map(_compute.shape, (query, key, value)))
            raise refuse("shared_storage_dqdkdv", f"True with {given}", "query, key and value of one shape")
        grads = query.new_empty((*query.shape[:2], 3, *query.shape[2:])).unbind(2)
    else:
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
    return *grads, _new_grad_bias(bias) if bias is not None and bias_requires_grad else None


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float dropout_p, int custom_mask_type, bool compute_log_sumexp=False, "
    "*, float? scale=None, Tensor? seqlen_k=None, int? window_size=None) -> (Tensor output, Tensor logsumexp, "
    "Tensor philox_seed, Tensor philox_offset, SymInt max_seqlen_batch_q, SymInt max_seqlen_batch_k)",
    _fake_forward, "_efficient_attention_backward", _saved_forward, draws=True,
)  # fmt: skip
def _efficient_attention_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Optional[Tensor], cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor], max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float, custom_mask_type: int,
    compute_log_sumexp: bool = False, *, scale: Optional[float] = None, seqlen_k: Optional[Tensor] = None,
    window_size: Optional[int] = None,
) -> Result:  # fmt: skip
    _check(query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqlen_k)
    mask = _mask(custom_mask_type, window_size)
    longest = _lengths(query, key, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    logsumexp = _new_logsumexp(query, cu_seqlens_q, longest[0], compute_log_sumexp)
    options = {"scale": scale, **mask}
    pieces: Sequence[_Piece] = ()
    seed, offset = _compute.no_numbers(query, dropout_p)
    with named(seqused_k="seqlen_k"):
        if dropout_p:
            if cu_seqlens_q is None or cu_seqlens_k is None:
                _compute.check(_compute.arguments(query, key, value, bias=bias, dropout_p=dropout_p, **options), out)
            else:
                pieces = list(_pieces(query, key, cu_seqlens_q, cu_seqlens_k, seqlen_k))
                for piece in pieces[:1]:
                    of_piece = piece.queries(query), piece.keys(key), piece.keys(value)
                    _compute.check(_compute.arguments(*of_piece, dropout_p=dropout_p, **options), piece.queries(out))
            seed, offset = _compute.draw(query, query.shape[0] * query.shape[2] * query.shape[1] * key.shape[1])
            options.update(_compute.random_numbers(query, dropout_p, seed, offset))
        if cu_seqlens_q is None or cu_seqlens_k is None:
            rows = query.shape[1]
            lse = logsumexp[:, :, :rows] if compute_log_sumexp else None
            _compute.forward(_compute.arguments(query, key, value, bias=bias, **options), out, lse)
            if compute_log_sumexp and logsumexp.shape[2] != rows:
                logsumexp[:, :, rows:] = float("inf")
        elif dropout_p:
            out.zero_()
            logsumexp.fill_(float("inf"))
            for piece in pieces:
                a = _compute.arguments(piece.queries(query), piece.keys(key), piece.keys(value), **options)
                _compute.forward(a, piece.queries(out), piece.lse(logsumexp) if compute_log_sumexp else None)
        else:
            a = _compute.arguments(
                query[0], key[0], value[0], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqlen_k,
                max_seqlen_q=longest[0], max_seqlen_k=longest[1], **options,
            )  # fmt: skip
            lse = None
            if compute_log_sumexp:
                lse = torch.empty((query.shape[2], query.shape[1]), dtype=torch.float32, device=query.device)
            _compute.forward(a, out[0], lse)
            if lse is not None:
                _scatter(lse, _rows(query, cu_seqlens_q, logsumexp), logsumexp)
    return out, logsumexp, seed, offset, *longest


@operator(
    "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor logsumexp, float dropout_p, "
    "Tensor philox_seed, Tensor philox_offset, int custom_mask_type, bool bias_requires_grad, *, float? scale=None, "
    "int? num_splits_key=None, int? window_size=None, bool shared_storage_dqdkdv=False) -> (Tensor, Tensor, Tensor, "
    "Tensor)",
    _fake_backward,
)  # fmt: skip
def _efficient_attention_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Optional[Tensor], out: Tensor,
    cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor], max_seqlen_q: Any, max_seqlen_k: Any,
    logsumexp: Tensor, dropout_p: float, philox_seed: Tensor, philox_offset: Tensor, custom_mask_type: int,
    bias_requires_grad: bool, *, scale: Optional[float] = None, num_splits_key: Optional[int] = None,
    window_size: Optional[int] = None, shared_storage_dqdkdv: bool = False,
) -> Result:  # fmt: skip
    results = _fake_backward(
        grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, logsumexp, dropout_p,
        philox_seed, philox_offset, custom_mask_type, bias_requires_grad, shared_storage_dqdkdv=shared_storage_dqdkdv,
    )  # fmt: skip
    _backward(
        results, grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        logsumexp, dropout_p, philox_seed, philox_offset, custom_mask_type, scale, window_size,
    )  # fmt: skip
    return results


def _backward(
    results: Result, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Optional[Tensor], out: Tensor,
    cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor], max_seqlen_q: Any, max_seqlen_k: Any,
    logsumexp: Tensor, dropout_p: float, seed: Tensor, offset: Tensor, custom_mask_type: int, scale: Optional[float],
    window_size: Optional[int] = None,
) -> None:  # fmt: skip
    """Writes `results`: the gradients of query, key, value and bias, the last of which may be None."""
    _check(query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    _compute.need_rank(4, "(B, S, H, Dv)", grad_out_=grad_out, out=out)
    grads = {name: grad for name, grad in zip(_compute.RESULTS, results) if grad is not None}
    mask = _mask(custom_mask_type, window_size)
    options = {"scale": scale, **mask, **_compute.random_numbers(query, dropout_p, seed, offset)}
    needed = query.shape[1] if cu_seqlens_q is None else max_seqlen_q
    if logsumexp.dim() != 3 or logsumexp.shape[2] < needed:
        raise refuse("logsumexp", _compute.shape(logsumexp), f"(B, H, at least {needed})")
    with named(grad_out="grad_out_", lse="logsumexp"):
        if cu_seqlens_q is None or cu_seqlens_k is None:
            a = _compute.arguments(query, key, value, bias=bias, **options)
            _compute.backward(a, grad_out, out, logsumexp[:, :, : query.shape[1]], grads)
        elif dropout_p:
            # Of keys and values each query head has a gradient of its own, which are then summed.
            shared = _group(query, key) > 1
            own = {
                name: grad.new_empty((*grad.shape[:2], query.shape[2], grad.shape[3])) if shared and name != "q" else grad
                for name, grad in grads.items()
            }
            for grad in own.values():
                grad.zero_()
            for piece in _pieces(query, key, cu_seqlens_q, cu_seqlens_k, None):
                a = _compute.arguments(piece.queries(query), piece.keys(key), piece.keys(value), **options)
                parts = {"q": piece.queries(own["q"]), "k": piece.own_keys(own["k"]), "v": piece.own_keys(own["v"])}
                _compute.backward(a, piece.queries(grad_out), piece.queries(out), piece.lse(logsumexp), parts)
            for name in ("k", "v") if shared else ():
                grads[name].copy_(own[name].unflatten(2, (key.shape[2], -1)).sum(3))
        else:
            a = _compute.arguments(
                query[0], key[0], value[0], cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
                max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options,
            )  # fmt: skip
            lse = _gather(logsumexp, _rows(query, cu_seqlens_q, logsumexp))
            _compute.backward(a, grad_out[0], out[0], lse, {name: grad[0] for name, grad in grads.items()})


def _fake_scaled(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, *rest = _fake_forward(q, k, v, attn_bias, None, None, None, None, dropout_p, 0, compute_log_sumexp)
    return out.transpose(1, 2), *rest[:3]


def _saved_scaled(given: dict[str, Any], results: Result) -> dict[str, Any]:
    out, log_sumexp, seed, offset = results
    kept = ("query", "key", "value", "attn_bias", "dropout_p", "is_causal", "scale")
    tensors = [given[name] for name in kept[:4]]
    return {
        **{name: given[name] for name in kept}, "out": out, "logsumexp": log_sumexp, "philox_seed": seed,
        "philox_offset": offset, "grad_input_mask": [x is not None and x.requires_grad for x in tensors],
    }  # fmt: skip


def _fake_scaled_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], out: Tensor,
    logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: list[bool],
    is_causal: bool = False, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    grads = [x.new_empty([x.shape[at] for at in (0, 2, 1, 3)]).transpose(1, 2) for x in (query, key, value)]
    return *grads, _new_grad_bias(attn_bias) if attn_bias is not None and grad_input_mask[3] else None


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
    "bool is_causal=False, *, float? scale=None) -> (Tensor output, Tensor log_sumexp, Tensor philox_seed, "
    "Tensor philox_offset)",
    _fake_scaled, "_scaled_dot_product_efficient_attention_backward", _saved_scaled, draws=True,
)  # fmt: skip
def _scaled_dot_product_efficient_attention(
    query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], compute_log_sumexp: bool,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    _compute.need_heads_first(query, key, value)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    with named(bias="attn_bias"):
        out, *rest = _efficient_attention_forward(
            q, k, v, attn_bias, None, None, None, None, dropout_p, int(is_causal), compute_log_sumexp, scale=scale
        )
    return out.transpose(1, 2), *rest[:3]


@operator(
    "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor attn_bias, Tensor out, Tensor logsumexp, "
    "Tensor philox_seed, Tensor philox_offset, float dropout_p, bool[4] grad_input_mask, bool is_causal=False, *, "
    "float? scale=None) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake_scaled_backward,
)  # fmt: skip
def _scaled_dot_product_efficient_attention_backward(
    grad_out_: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_bias: Optional[Tensor], out: Tensor,
    logsumexp: Tensor, philox_seed: Tensor, philox_offset: Tensor, dropout_p: float, grad_input_mask: list[bool],
    is_causal: bool = False, *, scale: Optional[float] = None,
) -> Result:  # fmt: skip
    _compute.need_rank(4, "(B, H, S, D)", query=query, key=key, value=value, grad_out_=grad_out_, out=out)
    results = _fake_scaled_backward(
        grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask
    )
    grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out_, query, key, value, out))
    with named(bias="attn_bias"):
        _backward(
            (*(grad.transpose(1, 2) for grad in results[:3]), results[3]), grad_out, q, k, v, attn_bias, out, None, None,
            q.shape[1], k.shape[1], logsumexp, dropout_p, philox_seed, philox_offset, int(is_causal), scale,
        )  # fmt: skip
    return results
