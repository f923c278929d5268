# SPDX-License-Identifier: Apache-2.0
"""How a call is split over a mesh under plain jit: batch and heads stay where they are sharded, and nothing of them is gathered.

Rows and head dimensions are gathered where they are sharded: a row of scores needs all keys. With packed sequences
heads alone are split, because a sequence may lie anywhere. A gradient of something that the devices share, such as
a bias without a batch, is summed over them.

Dropout has one device's mask, however a call is split. A forward and its backward may be split in different ways, as when each has
a jit of its own, and both need the same mask. So the heads of a part keep the numbers that their streams have in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from ._call import SEED, Call, Shape

Factors = tuple[Optional[str], ...]  # of each dimension: "b" or "c", a level of the batch, "h", heads, or None
_spec: Any = jax.sharding.PartitionSpec
_psum: Any = jax.lax.psum
_ROWS = ("q", "k", "v", "out")


class Split:
    """The dimensions of a call's operands and results that can be split."""

    def __init__(self, call: Call, shapes: Mapping[str, Shape]) -> None:
        self._call = call
        q = shapes["q"]
        self.query_heads, self.key_heads = (call.rows_first(shapes[name])[-2] for name in ("q", "k"))
        self.entries = call.entries(shapes)
        has_lengths = "seqused_q" in call.given or "seqused_k" in call.given
        levels = len(q) - 3
        slopes = len(shapes.get("alibi_slopes", ()))
        flat = levels == 2 and (has_lengths or slopes == 2)  # vectors of B1 x B2, which one level alone does not split
        self.levels: Factors = () if call.packed else (None,) * levels if flat else ("b", "c")[:levels]

    def of(self, name: str, shape: Shape) -> Factors:
        """The factors of a tensor. A dimension that is broadcast has none."""
        kind = name[len("grad_") :] if name.startswith("grad_") else name
        heads, rank = "h", len(shape)
        if name == SEED or kind.startswith("cu_seqlens"):
            found: Factors = (None,) * rank
        elif kind in _ROWS:
            if kind in ("k", "v"):
                heads = "h" if self.key_heads > 1 or self.query_heads == 1 else ""
            rows = (heads or None, None, None) if self._call.heads_first else (None, heads or None, None)
            found = (*self.levels, *rows)
        elif kind == "lse":
            found = (*self.levels, heads, None)
        elif kind == "sink":
            found = (heads,)
        elif kind == "alibi_slopes":
            levels = self.levels if rank == 1 + len(self.levels) else (None,) * (rank - 1)
            found = (*levels, heads)
        elif kind.startswith("seqused"):
            found = self.levels if len(self.levels) == 1 else (None,)
        else:  # bias, bias2, mask
            full = (*(self.levels or (None,)), heads, None, None)
            found = full[max(0, len(full) - rank) :]
        return tuple(None if size == 1 else factor for factor, size in zip(found, shape))

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head, of which there are several."""
        return 1 < self.key_heads < self.query_heads

    def rule(self, names: Sequence[tuple[str, Shape]], operands: int) -> tuple[str, dict[str, int]]:
        """Shardy's rule: the names of factors that the dimensions of operands and results have in common."""
        sizes = {"g": self.query_heads // self.key_heads} if self.grouped else {}
        terms = []
        for number, (name, shape) in enumerate(names):
            kind = name[len("grad_") :] if name.startswith("grad_") else name
            heads = "(h g)" if self.grouped and kind not in ("k", "v") else "h"
            dims = [
                heads if factor == "h" else factor or f"x{number}y{dim}z" for dim, factor in enumerate(self.of(name, shape))
            ]
            terms.append(" ".join(dims))
        return ", ".join(terms[:operands]) + " -> " + ", ".join(terms[operands:]), sizes

    def axes(self, mesh: Any, tensors: Sequence[tuple[str, Any]]) -> dict[str, tuple[str, ...]]:
        """The axes of the mesh over which each factor is split: those of the first tensor that is sharded along it."""
        found: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        for name, tensor in tensors:
            spec = getattr(getattr(tensor, "sharding", None), "spec", None) or ()
            for factor, size, axes in zip(self.of(name, tensor.shape), tensor.shape, spec):
                if factor is None or factor in found or axes is None:
                    continue
                names = (axes,) if isinstance(axes, str) else tuple(axes)
                if factor == "h" and self.key_heads > 1:
                    size = self.key_heads
                if not taken & set(names) and size % math.prod(mesh.shape[axis] for axis in names) == 0:
                    found[factor] = names
                    taken.update(names)
        return found

    def streams(self, mesh: Any, axes: Mapping[str, tuple[str, ...]]) -> Any:
        """The numbers of dropout's streams on one device: those that the heads of its part have in the whole."""
        whole = (*self.entries, self.query_heads)
        part = jnp.arange(math.prod(whole), dtype=jnp.uint32).reshape(whole)  # in the order of those that are not given
        for dim, factor in enumerate((*(self.levels or (None,) * len(self.entries)), "h")):
            names = axes.get(factor or "")
            if names:
                size = whole[dim] // math.prod(mesh.shape[axis] for axis in names)
                part = jax.lax.dynamic_slice_in_dim(part, jax.lax.axis_index(names) * size, size, dim)
        # The high words are 0: with 2^32 heads an lse would have 16 GB for each query.
        return jnp.stack([part, jnp.zeros_like(part)], -1)

    def sharding(self, mesh: Any, axes: Mapping[str, tuple[str, ...]], name: str, shape: Shape) -> NamedSharding:
        """The sharding of a tensor."""
        return NamedSharding(mesh, _spec(*(axes.get(factor or "") for factor in self.of(name, shape))))


def define(function: Any, of_call: Callable[..., tuple[Any, ...]]) -> None:
    """Gives the rules to a custom_partitioning of of_call(call, *operands)."""

    def split_of(call: Call, shapes: Sequence[Any]) -> Split:
        return Split(call, {name: tuple(x.shape) for name, x in zip(call.given, shapes)})

    def rule(call: Call, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        names = [(name, tuple(x.shape)) for name, x in zip((*call.given, *call.results), (*operands, *results))]
        return split_of(call, operands).rule(names, len(operands))

    def infer(call: Call, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        split = split_of(call, operands)
        axes = split.axes(mesh, list(zip(call.given, operands)))
        return tuple(split.sharding(mesh, axes, name, x.shape) for name, x in zip(call.results, results))

    def partition(call: Call, mesh: Any, operands: Sequence[Any], results: Sequence[Any]) -> Any:
        split = split_of(call, operands)
        axes = split.axes(mesh, [*zip(call.given, operands), *zip(call.results, results)])
        into = [split.of(name, x.shape) for name, x in zip(call.results, results)]

        def on_one(*parts: Any) -> tuple[Any, ...]:
            of_part = call
            if SEED in call.given and axes:
                of_part = call.with_streams()
                parts = (*parts[:-1], split.streams(mesh, axes), parts[-1])
            found = []
            for factors, part in zip(into, of_call(of_part, *parts)):
                shared = [axis for factor, names in axes.items() if factor not in factors for axis in names]
                found.append(_psum(part, tuple(shared)) if shared else part)
            return tuple(found)

        def of(names: Sequence[str], tensors: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(split.sharding(mesh, axes, name, x.shape) for name, x in zip(names, tensors))

        return mesh, on_one, of(call.results, results), of(call.given, operands)

    function.def_partition(partition=partition, infer_sharding_from_operands=infer, sharding_rule=rule)
