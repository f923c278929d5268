# SPDX-License-Identifier: Apache-2.0
"""For which calls of scaled_dot_product_attention PyTorch's kernel is faster: a table of measurements.

fastest.json has it. bench/torch/fastest.py measures it, on the CPU for each instruction set, on a GPU for its compute
capability. PyTorch's matrix products are faster on Intel's processors: these have sections of their own, such as "cpu avx2 intel",
and what such a section does not have is taken from "cpu avx2". The decision for a call is that of the nearest measured problem of its kind. On a kind of device that was not
measured, plain and causal calls stay with PyTorch, nested tensors too, and fovea takes those with a mask, a bias or dropout
and those of other ranks than four.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from .. import _api
from ._ahead import hint

_FILE = Path(__file__).with_name("fastest.json")
_NOISE = 1.03  # fovea is slower from here on

Section = dict[tuple[str, str, bool], list[tuple[tuple[float, ...], float]]]


@cache
def contents() -> bytes:
    """The table's text."""
    return _FILE.read_bytes()


@cache
def _table() -> dict[str, Section]:
    sections: dict[str, Section] = {}
    for name, section in json.loads(contents())["sections"].items():
        found: Section = {}
        for row in section["rows"]:
            at = position(row["batch"], row["heads"], row["sq"], row["sk"], row["d"])
            key = (row["kind"], row["dtype"], row["backward"])
            found.setdefault(key, []).append((at, row["fovea_us"] / row["pytorch_us"]))
        sections[name] = found
    return sections


def position(batch: int, heads: int, sq: int, sk: int, d: int) -> tuple[float, ...]:
    """Of a problem among others. What is near has about as much work in about the same proportions."""
    return math.log2(batch * heads), math.log2(sq), math.log2(sk), math.log2(d)


FOR_BF16 = {"amx": "avx512", "avx512_bf16": "avx512", "neon_bf16": "neon"}
"""Instruction sets that only multiply bf16 otherwise than another one: their sections have rows of bf16 alone."""


@cache
def instruction_sets() -> dict[str, bool]:
    """Those that this machine has, and which of them is in use."""
    lines = [line.split() for line in _api.explain().splitlines()]
    return {
        line[2]: line[3:] == ["in", "use"]
        for line in lines if line[:2] == ["instruction", "set"] and line[3:] in (["in", "use"], ["available"])
    }  # fmt: skip


@cache
def section_of(device: torch.device, is_bf16: bool = False) -> str:
    """The name of a kind of device: "cpu avx512", "cuda 9.0". For bf16 that of the products: "cpu avx512_bf16". Where the processor
    has AMX, which PyTorch uses, and fovea is told to use another one, nothing was measured, and no section has the name."""
    if device.type == "cuda":
        return "cuda {}.{}".format(*torch.cuda.get_device_capability(device))
    there = instruction_sets()
    used = next((name for name, in_use in there.items() if in_use), "unknown")
    if is_bf16:
        return f"cpu {used} beside amx" if "amx" in there and used != "amx" else f"cpu {used}"
    return f"cpu {FOR_BF16.get(used, used)}"


@cache
def vendor() -> str:
    """Of this machine's processor: "intel" or another name; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    ids = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}
    return next((ids.get(line.split()[-1], "") for line in lines if line.startswith("vendor_id")), "")


def _section(name: str) -> Optional[Section]:
    """This vendor's rows, and the others of this kind of device."""
    own = _table().get(f"{name} {vendor()}")
    general = _table().get(name)
    return {**(general or {}), **own} if own else general


def kind_of(
    rank: int, mask: Optional[tuple[int, ...]], is_bool: bool, learned: bool, is_causal: bool, dropout: bool, equal: bool
) -> str:
    """Of a call: what decides which kernel PyTorch takes. `mask` is its shape, `equal` says that batches agree."""
    if rank != 4 or not equal:
        return "other rank"
    if dropout:
        return "dropout"
    if mask is None:
        return "causal" if is_causal else "plain"
    if not is_bool:
        return "learned bias" if learned else "bias"
    return "mask" if mask[-2] != 1 else "mask of keys"


def slower(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout_p: float, is_causal: bool, backward: bool,
    learned: bool, nested: bool = False,
) -> Optional[bool]:  # fmt: skip
    """Whether PyTorch is faster; None if that was not measured and is to be assumed. `nested`: the sizes are about those of a
    batch of sequences of several lengths."""
    equal = q.dim() == k.dim() == v.dim() and q.shape[:-3] == k.shape[:-3] and k.shape[:-3] == v.shape[:-3]
    kind = kind_of(
        q.dim(), None if mask is None else tuple(mask.shape), mask is not None and mask.dtype is torch.bool, learned,
        is_causal, dropout_p > 0, bool(equal),
    )  # fmt: skip
    section = _section(section_of(q.device, q.dtype is torch.bfloat16))
    if section is None:
        return None if kind in ("plain", "causal") else False
    if nested and q.device.type == "cpu":
        kind = "other rank"  # of these, too, PyTorch's CPU has no fused kernel: five times as long as for dense tensors
    dtype = "float32" if q.dtype in (torch.float32, torch.float64) else "bfloat16"
    rows = section.get((kind, dtype, backward)) or section.get((kind, dtype, True)) or section.get((kind, dtype, False))
    if not rows:
        return None if kind in ("plain", "causal") else False
    rank = q.dim()
    heads = q.shape[-3] if rank > 3 else 1
    batch = 1
    for size in q.shape[: -3 if rank > 3 else -2]:
        batch *= hint(size)
    here = position(batch, hint(heads), hint(q.shape[-2]), hint(k.shape[-2]), hint(q.shape[-1]))
    _, ratio = min(rows, key=lambda row: sum((x - y) ** 2 for x, y in zip(row[0], here)))
    return ratio > _NOISE
