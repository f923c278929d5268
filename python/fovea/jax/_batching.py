# SPDX-License-Identifier: Apache-2.0
"""The rule of vmap: the mapped dimension becomes a level of the batch, so that all slices are one call.

A batch has at most two levels. A third, as of vmap in vmap of tensors with a batch, is merged with one of the others where every
bias and mask has both of them, or neither. Packed sequences, mapped sinks, sinks whose gradient is needed, and dropout (a
slice has the mask that it has alone) take one call for each slice, in a loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Callable, Optional

import jax
import jax.numpy as jnp

from ._call import SEED, Call, Shape

_PLANES = ("bias", "bias2", "mask")
_ROWS = ("q", "k", "v", "out", "lse", "grad_out", "grad_lse")


def rule(attention: Callable[..., Any], operands: Sequence[Any], dims: Sequence[Optional[int]], *, call: Call) -> Any:
    """The batching rule of the primitive that attention() binds."""
    size = next(x.shape[dim] for x, dim in zip(operands, dims) if dim is not None)
    results = _folded(attention, size, operands, dims, call)
    if results is None:
        mapped = [jnp.moveaxis(x, dim, 0) for x, dim in zip(operands, dims) if dim is not None]

        def one(parts: Sequence[Any]) -> Any:
            each = iter(parts)
            return attention(call, *(x if dim is None else next(each) for x, dim in zip(operands, dims)))

        results = jax.lax.map(one, mapped)
    return results, [0] * len(call.results)


def _first(x: Any, dim: Optional[int], size: int) -> Any:
    """The tensor with the mapped dimension in front."""
    return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)


def _folded(
    attention: Callable[..., Any], size: int, operands: Sequence[Any], dims: Sequence[Optional[int]], call: Call
) -> Any:
    """The results of one call for all slices, or None if there is none."""
    at = dict(zip(call.given, dims))
    given = dict(zip(call.given, operands))
    if call.packed or SEED in call.given or at.get("sink") is not None or "grad_sink" in call.results:
        return None
    levels = given["q"].ndim - (at["q"] is not None) - 3  # of a slice
    for name in _PLANES:
        if name in given:
            wanted = f"grad_{name}" in call.results
            x, dim = given[name], at[name]
            rank = x.ndim - (dim is not None)
            if rank > levels + 3:
                return None
            x = _first(x, dim, size) if dim is not None or wanted else x[None]
            given[name] = x.reshape(x.shape[0], *(1,) * (levels + 3 - rank), *x.shape[1:])
    for name in _ROWS:
        if name in given:
            given[name] = _first(given[name], at[name], size)
    outer = given["q"].shape[: levels + 1]
    for name in ("seqused_q", "seqused_k"):
        if name in given:
            given[name] = _first(given[name], at[name], size).reshape(-1)
    slopes = given.get("alibi_slopes")
    if slopes is not None and (at["alibi_slopes"] is not None or slopes.ndim > 1):
        slopes = _first(slopes, at["alibi_slopes"], size)
        if slopes.ndim == 2:
            slopes = jnp.broadcast_to(slopes[:, None], (size, math.prod(outer[1:]), slopes.shape[-1]))
        given["alibi_slopes"] = slopes.reshape(-1, slopes.shape[-1])
    merge = 0 if levels == 1 else _mergeable(outer, [given[name].shape for name in _PLANES if name in given])
    if merge is None:
        return None

    def merged(shape: Shape) -> Shape:
        if levels == 1:
            return shape
        return (*shape[:merge], shape[merge] * shape[merge + 1], *shape[merge + 2 :])

    for name in (*_PLANES, *_ROWS):
        if name in given:
            given[name] = given[name].reshape(merged(given[name].shape))
    found = attention(call, *(given[name] for name in call.given))
    shaped = []
    for name, x in zip(call.results, found):
        if name in ("out", "lse") or name[len("grad_") :] in ("q", "k", "v"):
            shape = (*outer, *x.shape[len(merged(outer)) :])
        else:
            of = name[len("grad_") :]
            original, dim = operands[call.given.index(of)], at[of]
            shape = (size, *(n for index, n in enumerate(original.shape) if index != dim))
        shaped.append(x.reshape(shape))
    return shaped


def _mergeable(outer: Shape, planes: Sequence[Shape]) -> Optional[int]:
    """Which of three levels can be merged with its next one: every plane has both, or neither."""
    for index in range(2):
        pair = outer[index : index + 2]
        if all(plane[index : index + 2] in (pair, (1, 1)) for plane in planes):
            return index
    return None
