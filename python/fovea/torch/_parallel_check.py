# SPDX-License-Identifier: Apache-2.0
"""FOVEA_CHECK_RANKS=1: the ranks of context_parallel compare what has to be the same on all of them before anything moves.

Ranks whose calls differ in a shape or an option wait for one another, or take one message for another one. Ranks that differ in the values
of what each of them has whole (lengths, a sink, slopes, a seed) get results that belong to no problem.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterable
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

from . import _rows
from ._parallel_call import PLANES, Call, of_rank, short
from ._rows import Rows

NAME = "FOVEA_CHECK_RANKS"
FEW = 8  # values that an error has; of more it has a hash


def asked_for() -> bool:
    return os.environ.get(NAME, "0") == "1"


def compare(rows: Rows, call: Optional[Call], wrong: Optional[Exception]) -> None:
    """Gathers what every rank has, or its error. All ranks raise if one is wrong or different."""
    mine = {} if call is None else _arguments(call)
    told: list[Any] = [None] * rows.ranks
    with _rows.naming(rows, f"{NAME}=1"):
        dist.all_gather_object(told, (mine, None if wrong is None else f"{type(wrong).__name__}: {wrong}"), group=rows.group)
    if wrong is not None:
        raise of_rank(rows, wrong)
    for rank, (_, error) in enumerate(told):
        if error is not None:
            raise ValueError(f"{_rows._name(rows)}: rank {rank} refuses its arguments: {error}")
    differ = []
    for name in dict.fromkeys(name for arguments, _ in told for name in arguments):
        ranks: dict[str, list[int]] = {}
        for rank, (arguments, _) in enumerate(told):
            ranks.setdefault(arguments.get(name, "None"), []).append(rank)
        if len(ranks) > 1:
            differ.append(f"{name}: " + ", but ".join(f"{value} on {_numbered(them)}" for value, them in ranks.items()))
    if differ:
        raise ValueError(f"{_rows._name(rows)}: the ranks' arguments differ: {'; '.join(differ)}; accepted: the same on every rank")


def _arguments(call: Call) -> dict[str, str]:
    """What has to be the same on every rank, by name: all but the rows' own number and values."""
    rows, o = call.rows, call.options
    kind, lengths, *numbers = rows._asked
    found = {
        "rows": f"{kind} of {_values(lengths)} rows over {' x '.join(map(str, numbers[:2]))} ranks in blocks of {numbers[2]}",
        "the rows' pieces": _hash(repr(rows.pieces).encode()),
        "move": call.move,
        "groups of heads": str(call.groups),
        "torch.is_grad_enabled()": str(torch.is_grad_enabled()),  # without it a rank has no backward, for which the others wait
    }
    for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
        shape = [str(n) for n in x.shape]
        shape[call.rows_dim] = "rows"
        found[name] = _described(x, shape)
    for name, value in o.items():
        found[name] = _tensor(call, name, value) if isinstance(value, Tensor) else repr(value)
    return found


def _tensor(call: Call, name: str, x: Tensor) -> str:
    if name not in PLANES or _is_whole(call.rows, x):
        return f"{_described(x, x.shape)} {_values(x)}"
    shape = [str(n) for n in x.shape]
    if call.move != "heads" and len(shape) >= 2 and call.rows.kind != "packed":
        shape[-2] = "rows"
    return _described(x, shape)


def _is_whole(rows: Rows, plane: Tensor) -> bool:
    """Whether every rank has all of a bias or mask, as it has no queries. Where a rank has one row, its row of one that has queries has
    the same shape, and every rank answers no."""
    if plane.dim() < 2:
        return True
    counts = (rows.longest,) if rows.kind == "packed" else (rows.over_keys or rows).counts
    return plane.shape[-2] == 1 and 1 not in counts


def _described(x: Tensor, shape: Iterable[Any]) -> str:
    return f"{short(x.dtype)} {'x'.join(map(str, shape))} on {x.device.type}{' with gradient' if x.requires_grad else ''}"


def _values(x: Any) -> str:
    """Few as they are, more by a hash. Of a device's tensor they are read, for which the host waits."""
    if isinstance(x, Tensor):
        count, x = x.numel(), x.detach().cpu().contiguous()
        if count > FEW:
            return _hash(ctypes.string_at(x.data_ptr(), count * x.element_size()))
        x = x.flatten().tolist()
    return f"[{', '.join(map(str, x))}]" if len(x) <= FEW else f"{len(x)} numbers, {_hash(repr(x).encode())}"


def _hash(data: bytes) -> str:
    return f"hash {hashlib.blake2b(data, digest_size=6).hexdigest()}"


def _numbered(ranks: list[int]) -> str:
    """rank 3; ranks 0, 2 to 7"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    each = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(each)}"
