# SPDX-License-Identifier: Apache-2.0
"""Two builds of fovea in one process, measured alternately: run.py --beside OLD.so.

Both libraries get the same inputs at the same addresses, and the same Python calls them, so the library alone differs. A
ratio is the other build's time over ours in one turn: over 1, ours is faster. The order within a turn alternates.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import statistics
from pathlib import Path
from typing import Any, Callable, Iterator

from fovea import _abi, _library
from fovea.torch import _call, _fast

TURNS = 3
LOW = 0.98  # a row whose median ratio is under this is measured once more,
AGAIN = 5  # in so many turns,
LEAST = 0.99  # whose median should reach this.


class Library:
    """Another libfovea.so, loaded beside fovea's own."""

    def __init__(self, path: Path) -> None:
        if path.samefile(_library.path):
            raise ValueError(f"{path} is the library that is measured; accepted: another build's (to see how much "
                             "timings scatter: a copy of it)")  # fmt: skip
        self.path = path
        self.lib = _library._load(path, older=True)
        self.kept: dict = {}
        self.size = self._problem_size()

    def _problem_size(self) -> int:
        """Fields were added at the end of fovea_problem, and a library refuses a longer one than its own: then its message says how long."""
        problem, needed = _abi.Problem(ctypes.sizeof(_abi.Problem)), ctypes.c_size_t()
        self.lib.fovea_workspace(ctypes.byref(problem), 0, ctypes.byref(needed))
        said = re.search(r"sizeof\(fovea_problem\), (\d+)", self.lib.fovea_last_error().decode())
        return int(said[1]) if said else problem.size

    @contextlib.contextmanager
    def called(self) -> Iterator[None]:
        """Inside of it fovea.torch calls this library. Problems that fovea.torch keeps remember how much workspace they
        need, which a library decides: each library has its own."""
        mine = {"lib": self.lib, "_kept": self.kept, "_PROBLEM_SIZE": self.size}
        own = {name: getattr(_call, name) for name in mine}
        status_of = _library.lib
        try:
            _library.lib = self.lib
            for name, value in mine.items():
                setattr(_call, name, value)
            if self.size == own["_PROBLEM_SIZE"]:
                _fast.load()
            else:
                _fast.switch_off()  # it has the size of its own
            yield
        finally:
            _library.lib = status_of
            for name, value in own.items():
                setattr(_call, name, value)
            _fast.load()


def take_turns(turns: int, ours: Callable[[], dict], other: Callable[[], dict]) -> dict[str, list[float]]:
    """By direction the ratio of each turn. `ours` and `other` measure once, and give the seconds by direction."""
    ratios: dict[str, list[float]] = {}
    for turn in range(turns):
        if turn % 2:
            theirs, mine = other(), ours()
        else:
            mine, theirs = ours(), other()
        for way in mine:
            ratios.setdefault(way, []).append(theirs[way] / mine[way])
    return ratios


def compare(ours: Callable[[], dict], other: Callable[[], dict]) -> dict[str, dict]:
    """By direction: `ratios` of the turns, their median, and `again` where that is low: the ratios of the repetition."""
    first = take_turns(TURNS, ours, other)
    found: dict[str, dict] = {way: {"ratio": statistics.median(ratios), "ratios": ratios} for way, ratios in first.items()}
    low = [way for way in found if found[way]["ratio"] < LOW]
    if low:
        again = take_turns(AGAIN, ours, other)
        for way in low:
            found[way]["again"] = again[way]
    return found


def verdict(cell: dict) -> float:
    """The ratio that counts: the repetition's median where there is one."""
    return statistics.median(cell["again"]) if "again" in cell else cell["ratio"]


def line(name: str, found: dict[str, dict]) -> str:
    cells = []
    for way, cell in found.items():
        text = f"{way.replace('_', ' ')} {cell['ratio']:.3f} ({min(cell['ratios']):.3f} to {max(cell['ratios']):.3f})"
        if "again" in cell:
            text += f" again {verdict(cell):.3f} ({min(cell['again']):.3f} to {max(cell['again']):.3f})"
        cells.append(f"{text:38}")
    return f"{name:36} " + "  ".join(cells).rstrip()


def summary(rows: dict[str, dict[str, dict]]) -> list[str]:
    """`rows`: what compare() found, by row."""
    lines = []
    for way in dict.fromkeys(way for found in rows.values() for way in found):
        values = [verdict(found[way]) for found in rows.values() if way in found]
        lines.append(f"{way.replace('_', ' ')}: {len(values)} rows, median {statistics.median(values):.3f}, least {min(values):.3f}")
    slower = [f"{name}, {way.replace('_', ' ')}: {verdict(cell):.3f}" for name, found in rows.items()
              for way, cell in found.items() if "again" in cell and verdict(cell) < LEAST]  # fmt: skip
    lines.append(f"slower, under {LEAST} in {AGAIN} more turns: {len(slower)}")
    return lines + [f"  {text}" for text in slower]


def as_json(path: Path, rows: dict[str, dict[str, dict]], about: dict) -> dict[str, Any]:
    return {"machine": about, "beside": str(path), "turns": TURNS, "again": AGAIN, "rows": rows}
