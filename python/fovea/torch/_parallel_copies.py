# SPDX-License-Identifier: Apache-2.0
"""Copies between tensors that are not adjacent in memory, by the bytes and not by the numbers.

PyTorch's kernel for such copies computes an address for each element, which takes longer than moving one of 16 bits. So elements of 16
bytes are copied, where a row has a multiple of them: the same bits in an eighth of the steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

WIDEST = (torch.complex128, torch.float64)  # types of 16 and 8 bytes that are copied and cleared as they are
# For several tensors at once: a block of that kernel copies 65,536 elements, and few blocks leave a GPU idle (134 MB of 16-byte elements
# took 0.16 ms on an H200).
OF_SEVERAL = (torch.float32,)


def copy(into: Tensor, x: Tensor) -> None:
    """into.copy_(x)"""
    if into.dtype == x.dtype and into.shape == x.shape:
        into, x = _widened(into, x)
    into.copy_(x)


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copies each second tensor into the first one. Those that are adjacent in memory on both sides are copied by one kernel."""
    intos: list[Tensor] = []
    given: list[Tensor] = []
    for into, x in pairs:
        if into.is_contiguous() and x.is_contiguous() and into.shape == x.shape and into.dtype == x.dtype:
            into, x = _widened(into.view(-1), x.view(-1), types=OF_SEVERAL)
            intos.append(into)
            given.append(x)
        else:
            copy(into, x)
    if intos:
        copy_each(intos, given)


def copy_each(intos: list[Tensor], given: list[Tensor]) -> None:
    """The same of tensors that are adjacent in memory on both sides, with the same shapes and strides."""
    several: Any = torch._foreach_copy_
    several(intos, given)


def as_matrices(*tensors: Tensor) -> Optional[list[Tensor]]:
    """(1, ..., 1, rows, width) as (rows, width), to be copied by copy_each(); None if one has other dimensions or is not adjacent."""
    if any(x.shape[:-2].numel() != 1 or not x.is_contiguous() for x in tensors):
        return None
    return [x.view(x.shape[-2:]) for x in _widened(*tensors, types=OF_SEVERAL)]


def rows_of(x: Tensor, index: Tensor) -> Tensor:
    """x.index_select(-2, index)"""
    (wide,) = _widened(x)
    if wide.dim() > 2 and wide.shape[:-2].numel() == 1:  # PyTorch's fast kernel takes rows of a matrix
        rows = wide.view(wide.shape[-2:]).index_select(0, index).view(*wide.shape[:-2], -1, wide.shape[-1])
    else:
        rows = wide.index_select(-2, index)
    return rows.view(x.dtype)


def clear(x: Tensor) -> None:
    """zero_()"""
    (x,) = _widened(x)
    x.zero_()


def _widened(*tensors: Tensor, types: Sequence[torch.dtype] = WIDEST) -> tuple[Tensor, ...]:
    """The same memory with the first type that all of them can have."""
    for wide in types:
        if all(_can_be(wide, x) for x in tensors):
            return tuple(x.view(wide) for x in tensors)
    return tensors


def _can_be(wide: torch.dtype, x: Tensor) -> bool:
    """Whether each row is adjacent numbers of that type, at addresses that are multiples of its size."""
    if not x.is_floating_point() or x.dim() == 0 or x.stride(-1) != 1 or x.numel() == 0:
        return False
    steps = (*x.stride()[:-1], x.storage_offset(), x.shape[-1])
    size = wide.itemsize
    return x.data_ptr() % size == 0 and all(step * x.element_size() % size == 0 for step in steps)
