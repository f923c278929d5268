# SPDX-License-Identifier: Apache-2.0
"""How many calls each integration computed. Counting is safe where torch.compile traces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict

import torch

from .._imports import after
from ..torch._ahead import is_traced
from ..torch._enable_state import Counted


class Stats(TypedDict):
    """See stats()."""

    served: int
    traced: int
    handed_back: dict[str, int]


_lock = threading.Lock()
_counts: dict[str, Stats] = {}
_NO_NAMES: Mapping[str, str] = {}


def stats() -> dict[str, Stats]:
    """Counts the calls of every integration since the process began, or since reset_stats().

    Returns:
        By the integration's name a dict. "served": calls that fovea computed. "traced": calls that were put into a
        graph of torch.compile, whose runs are not counted. "handed_back": {}, as what fovea cannot compute is refused.
    """
    with _lock:
        return {
            name: {"served": own["served"], "traced": own["traced"], "handed_back": dict(own["handed_back"])}
            for name, own in _counts.items()
        }


def reset_stats() -> None:
    """Sets what stats() counts to zero."""
    with _lock:
        _counts.clear()


def _of(name: str) -> Stats:
    return _counts.setdefault(name, {"served": 0, "traced": 0, "handed_back": {}})


def _add(name: str, key: str) -> bool:
    with _lock:
        own: Any = _of(name)
        own[key] += 1
    return True


def call(name: str, function: Callable[..., Any], *arguments: Any, names: Mapping[str, str] = _NO_NAMES, **options: Any) -> Any:
    """The result of fovea's function. The call is counted if fovea computes it. `names`: what the library calls arguments of fovea
    that have another name there, so that an error names what the program gave."""
    if is_traced():
        _count_trace(name)
        return function(*arguments, **options)
    try:
        with Counted(partial(_add, name, "served")):
            return function(*arguments, **options)
    except (TypeError, ValueError) as error:
        said = str(error)
        argument, colon, rest = said.partition(":")
        # The functions that stand in have no argument `layout`.
        told = names.get(argument, argument) + colon + rest.partition("; with layout=")[0]
        if told != said:
            error.args = (told,)
        raise


def _count_trace(name: str) -> bool:
    """torch.compile calls it once for each trace: a graph that changed a dict would be guarded by its contents."""
    return _add(name, "traced")


def _mark() -> None:
    torch.compiler.assume_constant_result(_count_trace)  # type: ignore[no-untyped-call]


# Marking it imports torch._dynamo, which takes a second, and of which nothing else here has need.
after("torch._dynamo", _mark)
