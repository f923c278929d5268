# SPDX-License-Identifier: Apache-2.0
"""context_parallel: attention of sequences whose rows lie on several ranks (docs/several-gpus.md).

_parallel_call.py checks a call and chooses how it is computed, _parallel_keys.py, _parallel_heads.py and _parallel_ring.py are the ways
(_parallel_parts.py: the calls of "keys"; _parallel_edges.py: its backward under a short window).
_parallel_positions.py says which keys rows can see, _parallel_fetch.py fetches them, and _rows.py has the plan and the collectives.
_parallel_check.py compares the calls of the ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Optional, Union, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._imports import after
from . import _ahead, _parallel_check, _parallel_memory, _rows
from ._parallel_call import of_rank, prepare, saying_rank, short
from ._parallel_heads import groups_of_heads
from ._parallel_operators import MOVERS, in_graph
from ._rows import Rows

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._options import Options

Move = Literal["keys", "heads", "ring"]


@overload
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Rows, move: Optional[Move] = None, return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Rows, move: Optional[Move] = None, return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Rows, move: Optional[Move] = None, return_lse: bool, **options: Unpack[Options]
) -> Union[Tensor, tuple[Tensor, Tensor]]: ...
def context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Rows, move: Optional[Move] = None, return_lse: bool = False, **options: Any
) -> Any:
    """Computes attention() of sequences whose rows lie on the ranks of a group; each rank has and gets its own rows.

    Every rank of the group calls it with equal options. On a CPU out, lse and the gradients of q and of biases with queries have the
    bits of one process, with the exceptions that docs/several-gpus.md names; gradients of k and v are summed over ranks in fp32 (on a GPU
    not under a short window, where each rank forms those of its own keys).
    Gradients are those of the sum of the ranks' losses: what every rank has whole (sink, biases without queries) gets this rank's
    part, to be summed over the ranks like any parameter's gradient.

    With move="keys" a rank fetches the keys and values that its rows can see. A bias or mask with queries has this rank's rows and
    all keys, in natural order; with packed rows it is whole. With move="heads" an all-to-all gives each rank all rows of some heads.
    The number of key heads is a multiple of the number of ranks. A bias or mask with queries has all rows, and this rank's Hq / ranks
    heads or one.
    Dropout's mask is that of one device. With move="keys" the pieces then begin at multiples of 16 rows. With move="ring" the keys go
    round the ranks, for keys that do not fit: arguments are those of "keys", and out, lse and all gradients are sums in fp32 over
    the keys of the ranks, so not the bits of one process. Packed rows then have no biases and masks.

    Args:
        q: This rank's rows of the queries, (B, Hq, rows.count, D) or another shape of attention(). With Rows.packed
            (rows.count, Hq, D).
        k: The same rows of the keys.
        v: The same rows of the values.
        rows: Which rows each rank has. With those of a mesh of two dimensions a bias or mask with queries has the rows of
            rows.over_keys.mine and Hq / (ranks of the second dimension) heads, or one.
        move: "keys", "heads", "ring", or None to choose one of the first two; explain_context_parallel() prints the choice and its reason.
        return_lse: Also returns this rank's rows of the logsumexp, differentiable.
        **options: Those of attention(). cu_seqlens and max_seqlen are not given: rows has the lengths. seqused has those of
            whole sequences. sink, alibi_slopes and biases without queries are whole on every rank. seed=None draws a
            seed on the group's first rank for all.

    Returns:
        This rank's rows of what attention() returns.

    Raises:
        ValueError: See attention(). Errors begin with the rank. With FOVEA_CHECK_RANKS=1 in the environment the ranks first compare
            their arguments, of what each has whole the values, too, and all of them raise if these differ or if one rank's are wrong.
        TypeError: See attention().
        NotImplementedError: This movement cannot compute the problem; the error names the argument.
        RuntimeError: A collective failed: another rank is gone, or made another call.

    Example:
        >>> import torch, torch.distributed, fovea.torch
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> rows = fovea.torch.Rows.zigzag(6)
        >>> q, k, v = (rows.take(torch.randn(1, 2, 6, 8), dim=2) for _ in range(3))
        >>> fovea.torch.context_parallel(q, k, v, rows=rows, causal=True).shape
        torch.Size([1, 2, 6, 8])
        >>> torch.distributed.destroy_process_group()
    """
    if _ahead.is_traced() and isinstance(rows, Rows) and rows.kind != "packed":
        return in_graph(q, k, v, rows, move, return_lse, options)
    return _outside_graphs(q, k, v, rows, move, return_lse, options)


def explain_context_parallel(
    q: Tensor, k: Tensor, v: Tensor, *, rows: Rows, move: Optional[Move] = None, **options: Unpack[Options]
) -> str:
    """Says how context_parallel() would compute a call, without computing or communicating.

    Args:
        q: See context_parallel(), like all other arguments. Tensors of the device "meta" are enough.
        k: The same.
        v: The same.
        rows: The same. A plan without a group is read as rank 0's.
        move: The same.
        **options: The same.

    Returns:
        str: Lines: the rows, the movement and why, the balance, the buffers and the bytes that a rank receives.

    Raises:
        ValueError: See context_parallel().
        TypeError: See context_parallel().
        NotImplementedError: See context_parallel().
    """
    call = prepare(q, k, v, rows, move, dict(options))
    s = call.sizes
    lines = [
        repr(rows),
        f"move: {call.move}, as {call.reason}",
        f"rows of a rank: {min(rows.counts)} to {max(rows.counts)}; pieces: {min(map(len, rows.pieces))} to {max(map(len, rows.pieces))}",
    ]
    if call.move == "keys":
        more = f"{s.returned_bytes} bytes of gradients in {short(_rows.wide(q.dtype))}"
        if call.owns:
            more = f"{s.edge_bytes} bytes of the next rank's first rows: gradients of keys are no sums over ranks"
        lines += [
            f"pairs of the busiest rank over the mean: {call.balance:.3f}",
            f"groups of heads: {call.groups}; each has {s.group_bytes} bytes of keys and values",
            f"received in the forward: {s.fetched_bytes} bytes, of which {s.exposed_bytes} before the first call",
            f"received in the backward: {'' if call.keeps else 'the same, and '}{more}",
        ]
    elif call.move == "heads":
        back = "the same" if s.exchanged_back_bytes == s.exchanged_bytes else f"{s.exchanged_back_bytes} bytes"
        lines += [
            f"groups of heads: {groups_of_heads(call, rows)}",
            f"received in the forward: {s.exchanged_bytes} bytes; in the backward: {back}",
        ]
    elif call.move == "ring":
        lines += [
            f"pairs of the busiest rank over the mean: {call.balance:.3f}",
            f"steps: {rows.ranks}; each receives {s.round_bytes} bytes of keys and values",
            f"received in the forward: {(rows.ranks - 1) * s.round_bytes} bytes",
            f"received in the backward: the same, and {s.ring_bytes} bytes of gradients in {short(_rows.wide(q.dtype))}",
        ]
    return "\n".join(lines + _parallel_memory.lines(call))


def _compute(q: Tensor, k: Tensor, v: Tensor, rows: Any, move: Any, return_lse: bool, options: dict[str, Any]) -> Any:
    if not isinstance(rows, Rows):
        raise TypeError(f"rows: a {type(rows).__name__}; accepted: what Rows.zigzag, Rows.contiguous or Rows.packed made")
    rows._rank()
    _refuse_transforms(rows, (q, k, v, *options.values()))
    wrong: Optional[Exception] = None
    call: Any = None
    try:
        call = prepare(q, k, v, rows, move, options)
    except Exception as error:
        if rows.ranks == 1 or not _parallel_check.asked_for():
            raise of_rank(rows, error) from None
        wrong = error
    if _parallel_check.asked_for():
        _parallel_check.compare(rows, call, wrong)
    with saying_rank(rows):
        out, lse = MOVERS[call.move](call)
    if return_lse and call.move in ("heads", "both") and out.requires_grad and lse.requires_grad:
        out, lse = _Together.apply(out, lse)
    return (out, lse) if return_lse else out


class _Together(torch.autograd.Function):
    """If one has a gradient, the other one has, too: 0 where this rank's loss leaves it out. What moves is then the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _refuse_transforms(rows: Rows, given: Any) -> None:
    """What PyTorch would refuse without naming the call, some ranks later than others."""
    parts: Any = forward_ad.unpack_dual
    if torch._C._are_functorch_transforms_active():
        what = "a transform of torch.func (grad, jvp, vmap)"
    elif forward_ad._current_level >= 0 and any(isinstance(x, Tensor) and parts(x).tangent is not None for x in given):
        what = "forward-mode derivatives"
    else:
        return
    raise of_rank(rows, NotImplementedError(f"context_parallel: {what}; accepted: first derivatives by torch.autograd"))


_outside_graphs: Any = _compute


def _mark() -> None:
    """With packed rows a compiled function has a break there: a graph has one plan, and each batch of packed rows another one. Marking
    it imports torch._dynamo, which takes a second: only programs that compile need it."""
    global _outside_graphs
    disable: Any = torch.compiler.disable
    _outside_graphs = disable(_compute)


after("torch._dynamo", _mark)
