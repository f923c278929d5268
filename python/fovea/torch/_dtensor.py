# SPDX-License-Identifier: Apache-2.0
"""DTensor's rules for fovea::attention and fovea::attention_backward (docs/several-gpus.md).

How q is sharded over a dimension of the mesh decides: along the batch, the heads, or the rows, where k and v are then gathered. What
else is sharded has to fit to that or to be whole, in which case it is cut without communication. So the placements of a call are those
of q, and DTensor has nothing to choose. with_places() adds to a call what tells a rank which rows and heads it has: positions and
streams of dropout. What these rules do not have is refused by name: DTensor would gather the operands and compute
everything on every rank.

The rules are registered by the first call that finds torch.distributed.tensor imported, as importing it takes half a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Optional

import torch

from . import _ahead, _call
from .._problem import need_align
from ._call import DIFFERENTIABLE, TENSORS, Arguments, Shard

_ready = False


def ready(attention: Any, attention_backward: Any) -> None:
    """Registers the rules of these operators, once there can be a DTensor."""
    if not _ready and "torch.distributed.tensor" in sys.modules:
        _register(attention, attention_backward)


def _register(attention: Any, attention_backward: Any) -> None:
    global _ready
    _ready = True
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import register_sharding

    rule: Any = register_sharding
    rule(attention)(_forward)
    rule(attention_backward)(_backward)
    # What a decision is kept for has to include `need`, on which the results of the backward depend, and every option.
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    for op, first in ((attention, TENSORS), (attention_backward, 4)):
        propagator.register_op_strategy(op, propagator.op_strategy_funcs[op], RuntimeSchemaInfo(first, needs_pytree=True))


def is_one(tensor: Any) -> bool:
    """Whether a tensor is a DTensor. Without importing what defines them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(tensor) is module.DTensor


def in_pytorchs_ring() -> bool:
    """Whether PyTorch's context parallelism is in force, which takes DTensors apart in PyTorch's fused operators."""
    module = sys.modules.get("torch.distributed.tensor")
    handlers = getattr(module.DTensor._op_dispatcher, "_custom_op_handlers", {}) if module is not None else {}
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def _are_rearranged() -> bool:
    """Whether the rows that PyTorch's context parallelism gave out last are not adjacent ones (DTensors themselves do not say so)."""
    theirs: Any = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    mode = getattr(theirs, "_dispatch_mode", None)
    by_modules = mode is not None and mode is getattr(getattr(theirs, "_DispatchMode", None), "MODULE_WRAPPER", None)
    return by_modules and bool(getattr(getattr(theirs, "_cp_options", None), "enable_load_balance", False))


def local_shapes(a: Any) -> list[Any]:
    """What the tensors of a call on DTensors are on a rank that has the most of each, so that all ranks decide alike.

    Raises:
        NotImplementedError: The call has no rule.
    """
    specs = a._make([None if x is None else x._spec if at < TENSORS else x for at, x in enumerate(a)])
    if any(x is not None and x.mesh != specs.q.mesh for x in specs[:TENSORS]):
        raise NotImplementedError("DTensors of several meshes")
    ways = _ways(specs, True)
    found: list[Any] = []
    for name, tensor, spec in zip(Arguments._fields, a[:TENSORS], specs):
        if tensor is None:
            found.append(None)
            continue
        shape = list(tensor.shape)
        for ranks, placement in zip(spec.mesh.shape, specs.q.placements):
            at = ways[_dimension("q", placement)].tensors[name]
            if at is not None:
                shape[at] = -(-shape[at] // ranks)
        found.append(_ahead.Shape(tensor, shape, _strides_like(tensor.stride(), shape)))
    return found


def _strides_like(strides: Sequence[int], shape: Sequence[int]) -> list[int]:
    """Strides of a dense tensor whose dimensions lie in the same order. One that is expanded stays so."""
    found, step = [0] * len(shape), 1
    for at in sorted(range(len(shape)), key=lambda at: (strides[at], -at)):
        if strides[at]:
            found[at] = step
            step *= shape[at]
    return found


def with_places(a: Any, given: Shard) -> tuple[Any, ...]:
    """The operator's arguments for DTensors, with positions and streams. positions_q has an entry for each rank and sequence, so that each rank has its own.

    Raises:
        NotImplementedError: They cannot be said.
        ValueError: The alignment is missing.
    """
    if not _ahead.is_traced() and in_pytorchs_ring():
        return (*a, *given)
    levels, heads, rows = _dimensions(a)
    sharded = [_dimension("q", placement) for placement in a.q.placements]
    streams = given.dropout_streams
    if a.dropout_p and streams is None and any(at is not None and at != rows for at in sharded):
        entries = a.q.shape[:levels] if not a.packed else [(a.cu_seqlens_k if a.cu_seqlens_q is None else a.cu_seqlens_q).shape[0] - 1]
        count = a.q.shape[heads]
        for size in entries:
            count = count * size
        streams = _whole(torch.arange(count, device=a.q.device.type).view(*entries, a.q.shape[heads]), a.q.device_mesh)
    banded = a.causal or a.window_left != -1 or a.window_right != -1 or a.alibi_slopes is not None
    if a.packed or rows not in sharded or not (banded or a.dropout_p):
        return (*a, *given._replace(dropout_streams=streams))
    for name in ("positions_q", "positions_k"):
        if getattr(given, name) is not None:
            raise NotImplementedError(f"{name}: given with DTensors whose rows are sharded; accepted: None, or the number position_{name[-1]}")
    if _are_rearranged():
        raise NotImplementedError(
            "q: DTensors whose rows are sharded, after a load balancer of PyTorch's context parallelism rearranged rows; accepted: "
            "fovea.torch.register_with_pytorch() and PyTorch's _enable_context_parallel_dispatcher(), or fovea.torch.context_parallel"
        )
    first, first_k = given.position_q or 0, given.position_k or 0
    if not given.has_positions and not banded:
        a = a._replace(align=None)  # which means nothing then
    elif not given.has_positions:
        sq, sk = a.q.shape[rows], a.k.shape[rows]
        if a.align is None and sq != sk:
            raise ValueError(need_align("causal" if a.causal else "window", f"Sq={sq} and Sk={sk}"))
        if a.align == "bottom_right" and sq != sk:
            if a.dropout_p:
                raise NotImplementedError(
                    f"align: 'bottom_right' with Sq={sq}, Sk={sk}, dropout and DTensors whose rows are sharded; accepted: positions"
                )
            first = sk - sq
        if a.seqused_k is not None and a.align != "top_left":
            raise NotImplementedError(
                "seqused_k: given with DTensors whose rows are sharded and a causal mask, a window or ALiBi; accepted: align='top_left' or positions"
            )
        a = a._replace(align=None)
    start, here = 0, a.q.shape[rows]  # of this rank's rows
    mesh = a.q.device_mesh
    for at, ranks, place in zip(sharded, mesh.shape, mesh.get_coordinate()):
        if at == rows:
            chunk = -(-here // ranks)
            offset = min(place * chunk, here)
            start, here = start + offset, min(chunk, here - offset)
    most = 1  # sequences of the rank that has the most
    for level in range(levels):
        size = a.q.shape[level]
        for at, ranks in zip(sharded, mesh.shape):
            size = -(-size // ranks) if at == level else size
        most = most * size
    from torch.distributed.tensor import DTensor, Shard as Along

    local = torch.full((a.q.to_local().shape[:levels].numel(),), start, device=a.q.device.type)
    each = DTensor.from_local(local, mesh, [Along(0)] * mesh.ndim, run_check=False, shape=torch.Size([most * mesh.size()]), stride=(1,))
    return (*a, first, first_k, each, None, streams)


def _whole(tensor: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


class Placed:
    """Where tensors and results lie if q is sharded in one of the ways. None stands for Replicate()."""

    def __init__(
        self, tensors: dict[str, Optional[int]], out: Optional[int], lse: Optional[int], streams: Optional[int] = None,
        sequences: Optional[int] = None,
    ) -> None:  # fmt: skip
        self.tensors = tensors  # the dimension along which each tensor is sharded
        self.out = out
        self.lse = lse
        self.streams = streams  # from the end
        self.sequences = sequences  # of what has one number for each sequence


def _forward(*arguments: Any) -> list[Any]:
    a, shard, ways = _read(arguments)
    return [([_shard(w.out), _shard(w.lse)], _inputs(a, shard, w, len(arguments))) for w in ways]


def _read(arguments: tuple[Any, ...]) -> tuple[Arguments, Shard, list[Placed]]:
    a, given = _call.split(arguments)
    shard = given or Shard()
    ways = _ways(a, shard.positions_q is not None)
    if a.dropout_p and shard.dropout_streams is None:
        _, _, rows = _dimensions(a)
        for at in ways:
            if at is not None and at != rows:
                raise NotImplementedError(
                    f"dropout_p: {a.dropout_p}, with q sharded along dimension {at}, and the ranks would draw equal masks; accepted: 0"
                )
    return a, shard, list(ways.values())


def _backward(grad_out: Any, grad_lse: Any, out: Any, lse: Any, need: Sequence[bool], *arguments: Any) -> list[Any]:
    from torch.distributed.tensor import Partial

    a, shard, ways = _read(arguments)
    found = []
    for w in ways:
        grads = []
        for name, wanted in zip(DIFFERENTIABLE, need):
            at = w.tensors.get(name)
            # What is whole on every rank gets a part of its gradient on each, unless every rank computes all.
            grads.append(Partial() if wanted and at is None and w.out is not None else _shard(at if wanted else None))
        mine = [_shard(w.out), None if grad_lse is None else _shard(w.lse), _shard(w.out), _shard(w.lse), None]
        found.append((grads, [*mine, *_inputs(a, shard, w, len(arguments))]))
    return found


def _shard(at: Optional[int]) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if at is None else Shard(at)


def _inputs(a: Arguments, shard: Shard, w: Placed, count: int) -> list[Any]:
    found: list[Any] = [None if x is None else _shard(w.tensors[name]) for name, x in zip(Arguments._fields[:TENSORS], a)]
    found += [None] * (count - TENSORS)
    if count > len(a):
        streams: Any = shard.dropout_streams
        along = None if streams is None or w.streams is None else len(streams.shape) + w.streams
        if along is not None and (along < 0 or streams.shape[along] == 1):
            along = None
        for number, tensor, at in ((2, shard.positions_q, 0), (3, shard.positions_k, w.sequences), (4, streams, along)):
            if tensor is not None:
                found[len(a) + number] = _shard(at)
    return found


def _dimensions(a: Any) -> tuple[int, int, int]:
    """Of q: the number of the batch's levels, the dimension of the heads and that of the rows."""
    rank = len(a.q.shape)
    levels = 0 if a.packed else rank - 3
    return levels, levels if a.heads_first else rank - 2, rank - 2 if a.heads_first else rank - 3


def _ways(a: Arguments, positioned: bool) -> dict[Optional[int], Placed]:
    """The ways in which a call is computed over the dimensions of the mesh, by q's dimension that is sharded over one. `positioned`: each
    rank's rows have positions."""
    q: Any = a.q
    levels, heads, rows = _dimensions(a)
    names = {level: "batch" for level in range(levels)}
    names.update({heads: "heads", rows: "rows"})
    shards: dict[Optional[int], int] = {}  # of q's dimensions, by how many ranks each is shared
    placements = [_dimension("q", p) for p in q.placements]
    for size, at in zip(q.mesh.shape, placements):
        shards[at] = shards.get(at, 1) * size
    ways: dict[Optional[int], Placed] = {}
    for at, ranks in shards.items():
        if at is None:
            ways[at] = Placed(dict.fromkeys(Arguments._fields[:TENSORS]), None, None)
            continue
        what = names.get(at, "head dimension")
        why_not = _why_not(a, what, ranks, at, levels, positioned)
        if why_not:
            raise NotImplementedError(
                f"q: sharded along its {what} (dimension {at}) over {ranks} ranks: {why_not}; accepted: another placement, such as "
                f"q.redistribute(placements=[Shard({heads})]), or fovea.torch.context_parallel with local tensors"
            )
        ways[at] = _way(a, what, at, heads, rows, levels)
    # Others fit to q, or are whole and cut without communication.
    for name, x in zip(Arguments._fields[:TENSORS], a):
        if x is None or name == "q":
            continue
        tensor: Any = x
        for number, (of_q, placement) in enumerate(zip(placements, tensor.placements)):
            given, wanted = _dimension(name, placement), ways[of_q].tensors[name]
            gathered = name in ("k", "v") and of_q == rows and given == rows
            if given is not None and given != wanted and not gathered:
                raise NotImplementedError(
                    f"{name}: sharded along dimension {given} over dimension {number} of the mesh, where q is "
                    f"{'whole' if of_q is None else f'sharded along its {names[of_q]}'}: it would be gathered, and work repeated on every rank; "
                    f"accepted: {'Replicate()' if wanted is None else f'Shard({wanted}) or Replicate()'}"
                )
    return ways


def _dimension(name: str, placement: Any) -> Optional[int]:
    """The dimension of a Shard; None for what is whole or a sum that DTensor will form."""
    if not placement.is_shard() and not type(placement).__name__.endswith("Shard"):
        return None
    if type(placement).__name__ != "Shard":
        raise NotImplementedError(f"{name}: placement {placement}; accepted: Shard, Replicate, Partial")
    return int(placement.dim)


def _why_not(a: Arguments, what: str, ranks: int, at: int, levels: int, positioned: bool) -> str:
    if what == "head dimension":
        return "a score needs all of it"
    if what == "batch":
        if a.q.shape[at] < ranks:
            return f"its size is {a.q.shape[at]}"
        if levels == 2 and (a.seqused_q is not None or a.seqused_k is not None):
            return "seqused has one dimension for both levels"
        if a.alibi_slopes is not None and len(a.alibi_slopes.shape) not in (1, levels + 1):
            return "alibi_slopes have one dimension for both levels"
    elif what == "heads":
        heads = a.k.shape[at]
        if heads % ranks:
            return f"k has {heads} heads, no multiple of the ranks"
    elif a.packed:
        return "packed sequences have other rows on each rank"
    else:
        if a.q.shape[at] < ranks:
            return f"its size is {a.q.shape[at]}"
        given = {"causal": a.causal, "window": a.window_left != -1 or a.window_right != -1, "alibi_slopes": a.alibi_slopes is not None,
                 "dropout_p": a.dropout_p != 0}  # fmt: skip
        if a.seqused_q is not None:
            return "seqused_q has the lengths of whole sequences"
        if a.dropout_p and positioned:
            if a.rng != "fovea":
                return f"rng is {a.rng!r}, and a row's random numbers depend on all rows"
            here = a.q.shape[at]
            for size, placement in zip(a.q.mesh.shape, a.q.placements):  # type: ignore[attr-defined]
                if _dimension("q", placement) == at:
                    here = -(-here // size)
                    if here % 16:
                        return f"dropout decides about 16 rows together, and a rank has {here}"
        for name, is_there in given.items():
            if is_there and not positioned:
                return f"{name} depends on the numbers of the rows, which a rank's call does not have"
    return ""


def _way(a: Arguments, what: str, at: int, heads: int, rows: int, levels: int) -> Placed:
    # Biases and masks have the dimensions (batch levels, heads, rows, keys), counted from the end.
    plane = {"heads": -3, "rows": -2}.get(what, at - levels - 3)
    tensors: dict[str, Optional[int]] = dict.fromkeys(Arguments._fields[:TENSORS])
    tensors["q"] = at
    if what != "rows":
        tensors["k"] = tensors["v"] = at
    for name in ("bias", "bias2", "mask"):
        x = getattr(a, name)
        if x is not None and len(x.shape) >= -plane and x.shape[plane] != 1:
            tensors[name] = len(x.shape) + plane
    slopes = a.alibi_slopes
    if what == "heads":
        tensors["sink"] = 0
        if slopes is not None:
            tensors["alibi_slopes"] = len(slopes.shape) - 1
    elif what == "batch":
        tensors["seqused_q"] = tensors["seqused_k"] = 0
        if slopes is not None and len(slopes.shape) > 1:
            tensors["alibi_slopes"] = at
    # lse has the layout (batch levels, heads, rows) always.
    lse = {"heads": levels, "rows": levels + 1}.get(what, at)
    streams = {"heads": -1, "rows": None}.get(what, at - levels - 1)
    return Placed(tensors, at, lse, streams, 0 if what == "batch" else None)
