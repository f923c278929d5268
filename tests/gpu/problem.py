# SPDX-License-Identifier: Apache-2.0
"""The one-line text form of a problem in Python: what the case table's rows and the random problems are made from.

parse() reads what `fovea cases` prints; Problem.line() writes the line back, so that a failure can be repeated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

TYPES = ("fp32", "fp16", "bf16", "fp64")


@dataclass
class Plane:
    """A bias or mask: which of (batch 1, batch 2, head, query, key) it really has, and its type."""

    extents: tuple
    type: str


@dataclass
class Problem:
    batch: tuple = (1,)  # (B,) or (B1, B2)
    hq: int = 1
    hk: int = 1
    sq: int = 0  # packed: max_seqlen
    sk: int = 0
    d: int = 64
    dv: int = 64
    type: str = "bf16"
    layout: str = "bshd"
    skew: int = 0
    seqs_q: list | None = None  # packed: the lengths
    seqs_k: list | None = None
    total_q: int = 0
    total_k: int = 0
    used_q: list | None = None
    used_k: list | None = None
    causal: bool = False
    top_left: bool = False
    window: tuple = (-1, -1)
    position: tuple | None = None  # of query 0 and key 0
    positions_q: list | None = None  # added to these, by batch entry
    positions_k: list | None = None
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = ""  # "", "h" or "b,h"
    sink: bool = False
    bias: Plane | None = None
    bias2: Plane | None = None
    mask: Plane | None = None
    dropout: float = 0.0
    rng: str = "fovea"
    seed: int = 0
    offset: int = 0
    streams: Plane | None = None  # (batch 1, batch 2, head)
    need: tuple = ("q", "k", "v")
    wide: tuple = ()  # results of fp32 beside inputs of 16 bits; out of both directions
    add: tuple = ()  # gradients that are added to what is there
    det: bool = False
    dlse: bool = False
    values: str = "normal"
    case_seed: int = 0  # of the numbers
    text: str = ""  # the line it was parsed from
    extra: dict = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        return self.seqs_q is not None

    @property
    def batch_size(self) -> int:
        return math.prod(self.batch)

    @property
    def rows_q(self) -> int:
        return self.total_q if self.packed else self.sq

    @property
    def rows_k(self) -> int:
        return self.total_k if self.packed else self.sk

    def adds(self, backward: bool) -> tuple:
        """What a direction combines with what is there. The forward of a line that adds gradients merges its out, if that is of fp32."""
        if backward:
            return self.add
        return ("out",) if self.add and (self.type not in ("bf16", "fp16") or "out" in self.wide) else ()

    @property
    def scale_or_default(self) -> float:
        if self.scale is not None:
            return self.scale
        return 1 / math.sqrt(self.d) if self.d else 1.0

    @property
    def has_positions(self) -> bool:
        return any(x is not None for x in (self.position, self.positions_q, self.positions_k))

    def first_positions(self, side: str) -> list:
        """Of the first row of each sequence; with has_positions."""
        first = (self.position or (0, 0))["qk".index(side)]
        return [first + at for at in getattr(self, f"positions_{side}") or [0] * self.batch_size]

    def lengths(self, side: str) -> list:
        """Of each sequence: as packed, no more than is used."""
        packed, used = (self.seqs_q, self.used_q) if side == "q" else (self.seqs_k, self.used_k)
        full = packed if packed is not None else [self.sq if side == "q" else self.sk] * self.batch_size
        return [min(n, m) for n, m in zip(full, used)] if used is not None else list(full)

    def line(self) -> str:
        if self.text:
            return self.text
        words = ["bwd", "b=" + "x".join(map(str, self.batch)), f"hq={self.hq}"]
        words += [f"hk={self.hk}"] * (self.hk != self.hq)
        if not self.packed:
            words += [f"sq={self.sq}", f"sk={self.sk}"]
        words += [f"d={self.d}"] + [f"dv={self.dv}"] * (self.dv != self.d) + [self.type]
        words += [f"layout={self.layout}"] * (self.layout != "bshd") + [f"skew={self.skew}"] * (self.skew != 0)
        if self.packed:
            for side in "qk":
                words.append(f"seqs_{side}=" + ",".join(map(str, getattr(self, f"seqs_{side}"))))
                words += [f"total_{side}={getattr(self, f'total_{side}')}", f"max_{side}={getattr(self, f's{side}')}"]
        for side in "qk":
            used = getattr(self, f"used_{side}")
            if used is not None:
                words.append(f"used_{side}=" + ",".join(map(str, used)))
        words += ["causal"] * self.causal + ["align=tl"] * self.top_left
        words += [f"window={self.window[0]},{self.window[1]}"] * (self.window != (-1, -1))
        words += ["pos={},{}".format(*self.position)] if self.position is not None else []
        for side in "qk":
            at = getattr(self, f"positions_{side}")
            words += [f"pos_{side}=" + ",".join(map(str, at))] if at is not None else []
        words += [f"scale={self.scale}"] * (self.scale is not None) + [f"softcap={self.softcap}"] * (self.softcap != 0)
        words += [f"alibi={self.alibi}"] * (self.alibi != "") + ["sink"] * self.sink
        for name in ("bias", "bias2", "mask"):
            plane = getattr(self, name)
            if plane is not None:
                words.append(f"{name}={self._extents(plane)}" + (f":{plane.type}" if name != "mask" else ""))
        if self.dropout:
            words += [f"dropout={self.dropout}", f"rng={self.rng}", f"seed={self.seed}", f"offset={self.offset}"]
            words += [f"streams={self._extents(self.streams)}"] if self.streams is not None else []
        words += ["need=" + ",".join(self.need)] + ["det"] * self.det + ["dlse"] * self.dlse
        words += [f"{key}=" + ",".join(names) for key, names in (("wide", self.wide), ("add", self.add)) if names]
        return " ".join([*words, f"values={self.values}"])

    def _extents(self, plane: Plane) -> str:
        names = ("b1", "b2", "h", "q", "k") if len(self.batch) == 2 else ("b", "", "h", "q", "k")
        return ",".join(name if has else "1" for name, has in zip(names, plane.extents) if name)


def _plane(text: str, two_level: bool, default: str) -> Plane:
    dims, _, kind = text.partition(":")
    *batch, head, query, key = dims.split(",")
    if two_level and len(batch) == 1:  # one name for both levels
        levels = {"b": (True, True), "b1": (True, False), "b2": (False, True), "1": (False, False)}[batch[0]]
    else:
        levels = tuple(name != "1" for name in batch) + (False,) * (2 - len(batch))
    return Plane((*levels, head != "1", query != "1", key != "1"), kind or default)


def _lengths(text: str) -> list:
    found = []
    for part in text.split(","):
        length, _, times = part.partition("x")
        found += [int(length)] * int(times or 1)
    return found


def parse(line: str) -> Problem:
    p = Problem(text=line.strip())
    words = {}
    for word in line.split():
        key, _, value = word.partition("=")
        words[key] = value
    p.batch = tuple(map(int, words["b"].split("x")))
    two_level = len(p.batch) == 2
    p.hq = int(words.get("hq", 1))
    p.hk = int(words.get("hk", p.hq))
    p.d = int(words["d"])
    p.dv = int(words.get("dv", p.d))
    p.type = next(name for name in TYPES if name in words)
    p.layout = words.get("layout", "bshd")
    p.skew = int(words.get("skew", 0))
    if "seqs_q" in words:
        p.seqs_q, p.seqs_k = _lengths(words["seqs_q"]), _lengths(words["seqs_k"])
        p.total_q = int(words.get("total_q", sum(p.seqs_q)))
        p.total_k = int(words.get("total_k", sum(p.seqs_k)))
        p.sq = int(words.get("max_q", max(p.seqs_q)))
        p.sk = int(words.get("max_k", max(p.seqs_k)))
    else:
        p.sq, p.sk = int(words["sq"]), int(words.get("sk", words["sq"]))
    for side in "qk":
        if words.get(f"used_{side}"):
            setattr(p, f"used_{side}", _lengths(words[f"used_{side}"]))
    p.causal = "causal" in words
    p.top_left = words.get("align", words.get("causal")) == "tl"
    if "window" in words:
        p.window = tuple(map(int, words["window"].split(",")))
    if "pos" in words:
        p.position = tuple(map(int, words["pos"].split(",")))
    for side in "qk":
        if words.get(f"pos_{side}"):
            setattr(p, f"positions_{side}", _lengths(words[f"pos_{side}"]))
    p.scale = float(words["scale"]) if "scale" in words else None
    p.softcap = float(words.get("softcap", 0))
    p.alibi = words.get("alibi", "")
    p.sink = "sink" in words
    for name in ("bias", "bias2"):
        if name in words:
            setattr(p, name, _plane(words[name], two_level, p.type))
    if "mask" in words:
        p.mask = _plane(words["mask"], two_level, "bool")
    p.dropout = float(words.get("dropout", 0))
    p.rng = words.get("rng", "fovea")
    p.seed = int(words.get("seed", "0"), 0)
    p.offset = int(words.get("offset", "0"), 0)
    if "streams" in words:
        *batch, head = (name != "1" for name in words["streams"].split(","))
        p.streams = Plane((*batch, *(False,) * (2 - len(batch)), head), "int64")
    need = words.get("need", "all")
    if need == "all":
        there = ("q", "k", "v", *(n for n in ("bias", "bias2", "sink") if getattr(p, n)))
        p.need = there
    else:
        p.need = tuple(name for name in need.split(",") if name and name != "none")
    p.wide, p.add = (tuple(words[key].split(",")) if key in words else () for key in ("wide", "add"))
    p.det = "det" in words
    p.dlse = "dlse" in words
    p.values = words.get("values", "normal")
    unknown = set(words) - _KEYS
    assert not unknown, f"{line}: {unknown}"
    return p


_KEYS = set(
    "bwd fwd b hq hk sq sk d dv fp32 fp16 bf16 fp64 layout skew seqs_q seqs_k total_q total_k max_q max_k used_q used_k "
    "causal align window pos pos_q pos_k scale softcap alibi sink bias bias2 mask dropout rng seed offset streams need det lse dlse wide add values".split()
)

