# SPDX-License-Identifier: Apache-2.0
"""The rules of the operators for torch.vmap.

With dense tensors (B, ...) without dropout the mapped dimension becomes the first level of a batch of two levels. All
slices are then one call, and a bias that is not mapped is not copied. Packed sequences, batches that have two levels
already, mapped sinks and dropout (each slice has the mask that it has alone) need one call for each slice.

In the backward every gradient is that of a slice, so each of them has the mapped dimension. torch.func sums over it if
the input had none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from . import _operators
from ._call import DIFFERENTIABLE, Arguments, known

_registry: Any = torch.library
_PER_SEQUENCE = ("seqused_q", "seqused_k")
_PLANES = ("bias", "bias2", "mask")


def _first(tensor: Optional[Tensor], dim: Optional[int], size: int) -> Any:
    """The tensor with the mapped dimension in front, expanded if there was none."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _slices(size: int, dims: Sequence[Optional[int]], arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [
        tuple(x if dim is None else x.select(dim, n) for x, dim in zip(arguments, dims)) for n in range(size)
    ]


def _folded(size: int, dims: Any, a: Any, need: Sequence[bool]) -> Optional[Arguments]:
    """One problem for all slices, or None if there is none."""
    if a.packed or a.dropout_p != 0 or dims.sink is not None:
        return None
    if a.sink is not None and need and need[DIFFERENTIABLE.index("sink")]:
        return None
    if a.q.dim() - (dims.q is not None) != 4:
        return None
    changes: dict[str, Any] = {name: _first(getattr(a, name), getattr(dims, name), size) for name in ("q", "k", "v")}
    batch = changes["q"].shape[1]
    for name in _PLANES:
        tensor, dim = getattr(a, name), getattr(dims, name)
        wanted = bool(need) and name in DIFFERENTIABLE and need[DIFFERENTIABLE.index(name)]
        if tensor is not None and (dim is not None or wanted):
            tensor = _first(tensor, dim, size)
            rank = tensor.dim()
            if rank > 5:
                return None
            changes[name] = tensor.reshape(size, *(1,) * (5 - rank), *tensor.shape[1:])
    for name in _PER_SEQUENCE:
        tensor = getattr(a, name)
        if tensor is not None:
            changes[name] = _first(tensor, getattr(dims, name), size).reshape(-1)
    slopes, dim = a.alibi_slopes, dims.alibi_slopes
    if slopes is not None and (dim is not None or slopes.dim() == 2):
        slopes = _first(slopes, dim, size)
        if slopes.dim() == 2:
            slopes = slopes.unsqueeze(1).expand(-1, batch, -1)
        changes["alibi_slopes"] = slopes.reshape(size * batch, -1)
    folded: Arguments = a._replace(**changes)
    return folded


def _attention(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, ...]:
    size = info.batch_size
    arguments = known(arguments, "under torch.vmap")
    in_dims = in_dims[: len(arguments)]
    folded = _folded(size, Arguments(*in_dims), Arguments(*arguments), ())
    if folded is not None:
        return _operators.attention(*folded), (0, 0)
    results = [_operators.attention(*one) for one in _slices(size, in_dims, arguments)]
    return tuple(torch.stack(parts) for parts in zip(*results)), (0, 0)


def _backward(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, ...]:
    size = info.batch_size
    arguments = (*arguments[:5], *known(arguments[5:], "under torch.vmap"))
    in_dims = tuple(None if isinstance(dim, list) else dim for dim in in_dims[: len(arguments)])  # need: a list
    given: Any = Arguments(*arguments[5:])
    *rows, need = arguments[:5]
    folded = _folded(size, Arguments(*in_dims[5:]), given, need)
    if folded is not None:
        rows = [_first(x, dim, size) for x, dim in zip(rows, in_dims)]
        grads = _operators.attention_backward(*rows, need, *folded)
        shaped = list(grads)
        for index, (name, wanted) in enumerate(zip(DIFFERENTIABLE, need)):
            if wanted:
                tensor, dim = getattr(given, name), getattr(Arguments(*in_dims[5:]), name)
                shaped[index] = grads[index].reshape(_first(tensor, dim, size).shape)
    else:
        results = [_operators.attention_backward(*one) for one in _slices(size, in_dims, arguments)]
        shaped = [torch.stack(parts) if wanted else parts[0] for parts, wanted in zip(zip(*results), need)]
    return tuple(shaped), tuple(0 if wanted else None for wanted in need)


def _seed(info: Any, in_dims: tuple[Any, ...], of: Sequence[Tensor]) -> tuple[Any, ...]:
    if info.randomness == "error":
        raise RuntimeError(
            "fovea.torch.attention: dropout in torch.vmap(randomness='error'); accepted: 'different', 'same', or a seed"
        )
    if info.randomness == "same":
        return _operators.seed(of), None
    return torch.stack([_operators.seed(of) for _ in range(info.batch_size)]), 0


for _name, _rule in (("attention", _attention), ("attention_backward", _backward), ("seed", _seed)):
    _registry.register_vmap(f"{_operators.NAMESPACE}::{_name}", _rule, lib=_operators.library)
