# SPDX-License-Identifier: Apache-2.0
"""The tag that enable() adds to the keys of PyTorch's compile caches: torch.compiler.config.cache_key_tag.

PyTorch keeps compiled graphs on disk by a key that has what was traced: scaled_dot_product_attention as one node, whatever
computes it. The tag says what does. It has to be there for every thread and beside a program's own tag. From 2.15 on a value
that is set holds for one thread or task alone: there the setting's ContextVar gets a stand-in, which adds the tag to what is
read. In older versions the value holds for the process, and a program that sets its own one after enable() takes the tag away.

Private names of PyTorch that this file uses: _config of torch.compiler.config, and user_override, env_value_default and default of
what it has.
"""

from __future__ import annotations

import contextvars
import re
import zlib
from typing import Any

import torch

from .._library import version
from . import _fastest
from ._enable_state import Settings

_OURS = re.compile(r";fovea-[^;]*;")


class _Tagged:
    """Stands in for the setting's ContextVar. PyTorch writes back what it has read, perhaps after another switch: no tag is kept."""

    def __init__(self, theirs: Any, unset: str) -> None:
        self._theirs = theirs
        self._unset = unset
        self.tag = ""

    def get(self, *default: Any) -> Any:
        value = self._theirs.get(*default)
        return (value if isinstance(value, str) else self._unset) + self.tag if self.tag else value

    def set(self, value: Any) -> Any:
        return self._theirs.set(_without(value))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._theirs, name)


def _without(value: Any) -> Any:
    return _OURS.sub("", value) if isinstance(value, str) else value


def _text(value: Any) -> str:
    """PyTorch reads "1" and "0" of a variable as a bool."""
    return value if isinstance(value, str) else str(int(value)) if isinstance(value, bool) else ""


def _stand_in() -> Any:
    """The one that is there, else a new one; None where the setting is no ContextVar."""
    entry: Any = getattr(torch.compiler.config, "_config", {}).get("cache_key_tag")
    theirs = getattr(entry, "user_override", None)
    if isinstance(theirs, contextvars.ContextVar):
        unset = _text(getattr(entry, "env_value_default", None)) or _text(entry.default)
        theirs = entry.user_override = _Tagged(theirs, unset)
    return theirs if isinstance(theirs, _Tagged) else None


def put(tag: str) -> None:
    """In the place of the one that is there; either may be empty."""
    stand_in = _stand_in()
    config = torch.compiler.config
    if stand_in is not None:
        stand_in.tag = tag
    else:
        config.cache_key_tag = _without(_text(config.cache_key_tag)) + tag


def tag_of(settings: Settings) -> str:
    tag = f";fovea-{version()} {'+'.join(settings.devices)} prefer={settings.prefer} strict={settings.strict}"
    if settings.prefer is not None:  # what a decision depends on besides the call: the table, and its section for the CPU
        cpu = [_fastest.section_of(torch.device("cpu"), is_bf16) for is_bf16 in (False, True)]
        tag += f" {zlib.crc32(_fastest.contents()):08x} {'+'.join(cpu)} {_fastest.vendor()}"
    return tag + (" operators;" if settings.operators else ";")
