# SPDX-License-Identifier: Apache-2.0
"""The arguments of scaled_dot_product_attention as those of fovea.torch.attention.

read() looks at shapes and types alone. It returns a Form, which turns the tensors of such a call into arguments and the
result into the shape that PyTorch's has, or the reason why there is none. Where PyTorch itself refuses a call, there is
a reason as well, so that PyTorch raises its own error.

PyTorch takes tensors of any rank from 2 on. The last two dimensions are rows and columns, the third from the end are the
heads, and all before them is the batch; with three dimensions there are no heads. Heads and batches broadcast. fovea has
a batch of one or of two levels, over each of which a mask or a bias may be broadcast. So the dimensions of the batch are
joined into one level, or into two where the mask has only some of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

Shape = tuple[Any, ...]  # of int, or torch.SymInt while tracing

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MALFORMED = "arguments that PyTorch refuses"  # of whatever kind: its error says it
RANK_OF_MASK = "a mask of fewer than two dimensions, or of four with query and key of three"


class Form:
    """How such a call becomes one of attention(). `batch` is None where nothing has to be reshaped."""

    __slots__ = ("batch", "heads", "heads_kv", "lead", "mask_batch", "mask_lead", "rank")

    def __init__(self, rank: int, lead: Shape = (), heads: Any = 1, heads_kv: Any = 1) -> None:
        self.rank = rank
        self.lead = lead
        self.heads = heads
        self.heads_kv = heads_kv
        self.batch: Optional[Shape] = None
        self.mask_lead: Shape = ()
        self.mask_batch: Shape = ()

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
        batch = self.batch
        if batch is None:
            return q, k, v, mask
        q, k, v = (
            self._rows(x, heads, batch) for x, heads in ((q, self.heads), (k, self.heads_kv), (v, self.heads_kv))
        )
        if mask is not None:
            *_, rows, columns = mask.shape
            here = mask.shape[-3] if self._has_heads(mask) else 1
            lead = mask.shape[: -3 if self.rank > 3 or self.heads != 1 else -2]
            if lead:
                mask = mask.reshape(*(1,) * (len(self.lead) - len(lead)), *lead, here, rows, columns)
                mask = mask.expand(*self.mask_lead, here, rows, columns)
                mask = mask.reshape(*self.mask_batch, here, rows, columns)
        return q, k, v, mask

    def has_heads(self) -> bool:
        """Whether the result has a dimension of heads."""
        return self.batch is None or self.rank > 3 or bool(self.heads != 1)

    def shape_of_result(self, q: Tensor, v: Tensor) -> Shape:
        return (*self.lead, *([self.heads] if self.has_heads() else []), q.shape[-2], v.shape[-1])

    def _has_heads(self, tensor: Tensor) -> bool:
        return tensor.dim() > 2 and (self.rank > 3 or bool(self.heads != 1))

    def _rows(self, x: Tensor, heads: Any, batch: Shape) -> Tensor:
        rows, columns = x.shape[-2:]
        if not self._has_heads(x):
            x = x.unsqueeze(-3)
        return x.expand(*self.lead, heads, rows, columns).reshape(*batch, heads, rows, columns)

    def result(self, out: Tensor) -> Tensor:
        if self.batch is None:
            return out
        rows, columns = out.shape[-2:]
        if self.has_heads():
            return out.reshape(*self.lead, self.heads, rows, columns)
        return out.reshape(*self.lead, rows, columns)


def _broadcast(*shapes: Shape) -> Optional[Shape]:
    """Of shapes of one rank; None if they do not broadcast."""
    out = []
    for sizes in zip(*shapes):
        size: Any = 1
        for one in sizes:
            if one != 1:
                if size != 1 and one != size:
                    return None
                size = one
        out.append(size)
    return tuple(out)


def _types(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> Optional[str]:
    if q.dtype not in FLOATS:
        return f"tensors of {str(q.dtype).removeprefix('torch.')}"
    if k.dtype != q.dtype or v.dtype != q.dtype:
        return MALFORMED
    if q.dtype == torch.float64 and q.device.type != "cpu":
        return "float64 on a GPU"
    for tensor in (k, v, mask):
        if tensor is not None and tensor.device != q.device:
            return "tensors of several devices"
    if mask is not None and mask.dtype not in (torch.bool, torch.float32, q.dtype):
        return MALFORMED
    return None


def why_not_numbers(dropout_p: Any, scale: Any) -> Optional[str]:
    if not 0 <= dropout_p <= 1:
        return MALFORMED
    if isinstance(scale, float) and not math.isfinite(scale):
        return "a scale that is not finite"
    return None


def read(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout_p: Any, is_causal: bool, scale: Any,
    enable_gqa: bool,
) -> Union[Form, str]:  # fmt: skip
    """What the arguments become, or why fovea does not compute them."""
    why = _types(q, k, v, mask)
    if why is not None:
        return why
    if mask is not None and is_causal:
        return MALFORMED
    why = why_not_numbers(dropout_p, scale)
    if why is not None:
        return why
    rank = max(q.dim(), k.dim(), v.dim())
    if min(q.dim(), k.dim(), v.dim()) < 2:
        return MALFORMED
    if mask is not None:
        of_scores = max(q.dim(), k.dim())
        if mask.dim() < 2 or (mask.dim() == 4 and of_scores == 3):  # PyTorch's math path computes some
            return RANK_OF_MASK
        if mask.dim() > of_scores:
            return MALFORMED
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return MALFORMED
    if 0 in q.shape or 0 in k.shape or 0 in v.shape:
        return "empty tensors"

    shapes = [(*(1,) * (rank - x.dim()), *x.shape[:-2]) for x in (q, k, v)]
    grouped = False
    if enable_gqa:
        if min(q.dim(), k.dim(), v.dim()) < 3:
            return MALFORMED
        heads_q, heads_k, heads_v = (shape[-1] for shape in shapes)
        grouped = bool(heads_k != heads_q or heads_v != heads_q)
        if grouped and (heads_q % heads_k != 0 or heads_q % heads_v != 0):
            return MALFORMED
        if grouped and heads_k != heads_v:
            return "keys and values with different numbers of heads"
    if rank > 3 or grouped:
        leads, heads = [shape[:-1] for shape in shapes], [(shape[-1],) for shape in shapes]
    else:
        leads, heads = shapes, [(1,)] * 3
    scores = _broadcast(*leads[:2])  # the batch of the scores, to which a mask is added
    lead = None if scores is None else _broadcast(scores, leads[2])
    all_heads = heads[0] if grouped else _broadcast(*heads)
    heads_of_scores = heads[0] if grouped else _broadcast(*heads[:2])
    if scores is None or lead is None or all_heads is None or heads_of_scores is None:
        return MALFORMED
    heads_kv = heads[1][0] if heads[1] == heads[2] else all_heads[0]
    # A dimension of the batch that the mask has: not 1.
    mask_lead: Shape = (1,) * len(lead)
    if mask is not None:
        there = (*(1,) * (rank - mask.dim()), *mask.shape)
        wanted = (*scores, *(heads_of_scores if rank > 3 or grouped else ()), q.shape[-2], k.shape[-2])
        if any(have != 1 and have != want for have, want in zip(there, wanted)):
            return MALFORMED
        mask_lead = there[: len(lead)]

    form = Form(rank, lead, all_heads[0], heads_kv)
    as_they_are = (
        rank in (4, 5) and all(x.dim() == rank for x in (q, k, v)) and leads[0] == lead and leads[1] == lead
        and leads[2] == lead and heads[0] == all_heads
        and heads[1] == heads[2]
    )  # fmt: skip
    if not as_they_are:
        form.batch, form.mask_lead, form.mask_batch = _levels(lead, mask_lead)
    return form


def _levels(lead: Shape, mask_lead: Shape) -> tuple[Shape, Shape, Shape]:
    """The batch as one level or two; what the mask's dimensions are expanded to, and then joined to."""
    full = [bool(have != 1) for have in mask_lead]
    counts = [index for index, size in enumerate(lead) if size != 1]  # one of size 1 is both there and broadcast
    kinds = [full[index] for index in counts]
    changes = [at for at in range(1, len(kinds)) if kinds[at] != kinds[at - 1]]
    if not changes:
        whole = _product(lead)
        return (whole,), tuple(mask_lead), (whole if any(full) else 1,)
    split = counts[changes[0]]
    # More than one change: the mask is copied over what is left of the batch.
    expanded = list(mask_lead)
    if len(changes) > 1:
        expanded[split:] = lead[split:]
    first, second = _product(lead[:split]), _product(lead[split:])
    return (first, second), tuple(expanded), (_product(expanded[:split]), _product(expanded[split:]))


def _product(sizes: Sequence[Any]) -> Any:
    product: Any = 1
    for size in sizes:
        product = product * size
    return product
