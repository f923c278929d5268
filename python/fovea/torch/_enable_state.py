# SPDX-License-Identifier: Apache-2.0
"""What enable() has put in force in this process, and what it has counted since."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Optional, TypedDict

import torch

from . import _sdpa
from .aten._register import OPERATORS

NAME = "scaled_dot_product_attention"
MOST_KEPT = 4096  # decisions, and problems for stats()
MOST_REASONS = 256  # some have a number of the call in them
OTHERS = f"other reasons, after the first {MOST_REASONS}"

# Reasons that are what the program asked for, or its mistake, and no limit of fovea: `strict` does not raise for them, and only of
# UNMEASURED is warned, because a user of such a device may expect otherwise.
MATH = "the math path comes first (sdpa_kernel)"
SLOWER = "PyTorch's kernel is faster, as measured"
UNMEASURED = "not measured on this kind of device, where plain and causal attention stays with PyTorch unless prefer=None"
ASKED_FOR = (MATH, SLOWER, UNMEASURED, _sdpa.MALFORMED)


class Settings(NamedTuple):
    devices: tuple[str, ...]
    prefer: Optional[str]
    strict: bool
    operators: bool


class Block:
    """What was in force before a block of enabled() that has not ended."""

    def __init__(self, settings: Optional[Settings], fastpath: bool) -> None:
        self.settings = settings
        self.fastpath = fastpath  # PyTorch's switch
        self.thread = threading.get_ident()


class State:
    """What is in force in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settings: Optional[Settings] = None
        self.blocks: list[Block] = []  # as they were entered
        self.libraries: dict[str, Any] = {}  # that registered a kernel, by key
        self.jagged: Any = None  # what stands in the place of PyTorch's function for nested tensors,
        self.jagged_theirs: Any = None  # which this is
        self.fastpath: Optional[bool] = None  # PyTorch's switch, as it was
        self.decisions: dict[Any, Any] = {}  # by known()'s keys Decision, by C's what for_c() gives
        self.warned: set[str] = set()


class Stats(TypedDict):
    """See stats()."""

    served: int
    traced: int
    handed_back: dict[str, int]
    problems: list[str]
    operators: dict[str, int]


class Counts:
    def __init__(self) -> None:
        self.lock = threading.RLock()  # a signal's handler may ask for stats()
        self.clear()

    def clear(self) -> None:
        self.served = 0
        self.traced = 0
        self.handed_back: dict[str, int] = {}
        self.problems: dict[str, None] = {}
        self.operators: dict[str, int] = {}


state = State()
counts = Counts()


class Counted:
    """A block with one call, which is counted if fovea computes it."""

    def __init__(self, count: Callable[[], object]) -> None:
        self._count = count

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Optional[type], *_: object) -> None:
        # Checkpoints end by this exception what they compute again: after all of it has been computed.
        if kind is None or kind.__name__ == "_StopRecomputationError":
            self._count()


def count_served() -> None:
    with counts.lock:
        counts.served += 1


def count_traced() -> None:
    with counts.lock:
        counts.traced += 1


def count_handed_back(reason: str) -> str:
    """Returns the reason under which it was counted."""
    with counts.lock:
        if is_one_too_many(reason):
            reason = OTHERS
        counts.handed_back[reason] = counts.handed_back.get(reason, 0) + 1
    return reason


def is_one_too_many(reason: str) -> bool:
    return reason not in counts.handed_back and len(counts.handed_back) >= MOST_REASONS


def note(problems: tuple[str, ...]) -> None:
    """For stats(), which has the first MOST_KEPT of them."""
    with counts.lock:
        for line in problems:
            if len(counts.problems) < MOST_KEPT:
                counts.problems[line] = None


def refusal(why: str, name: str = NAME) -> str:
    return f"{name}: {why}; fovea does not compute this. enable(strict=False) hands it back to PyTorch"


def hand_back(why: str, device: torch.device, name: str = NAME, level: int = 3) -> None:
    """Counts a call, of an operator by its name, and warns of it, or raises if `strict` is in force. level: warnings.warn's
    `stacklevel` of the program's own line."""
    reason = count_handed_back(f"{name}: {why}" if name in OPERATORS else why)
    settings = state.settings
    if settings is None or (why in ASKED_FOR and why != UNMEASURED):
        return
    if settings.strict and why not in ASKED_FOR:
        raise NotImplementedError(refusal(why, name))
    if device.type == "cuda" and reason not in state.warned:
        state.warned.add(reason)
        warnings.warn(
            f"fovea.torch.enable: {name} is handed back to PyTorch: {why} (said once; "
            "fovea.torch.stats() counts)", stacklevel=level,
        )  # fmt: skip


def count_operator(name: str) -> None:
    with counts.lock:
        counts.operators[name] = counts.operators.get(name, 0) + 1
