# SPDX-License-Identifier: Apache-2.0
"""The names of other libraries that an integration uses though they are private or may change: each is looked for before
anything is registered or patched, so that a version without one is told in a sentence and not by a model that fails."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple


class Needed(NamedTuple):
    """A name of a module, and of a function the parameters that must be among its own, and how many it takes by position."""

    module: str
    name: str  # with dots: "Class.method"
    parameters: tuple[str, ...] = ()
    by_position: int = 0


def require(integration: str, versions: str, needed: Sequence[Needed]) -> None:
    """Imports the modules and looks for the names.

    Raises:
        ImportError: One is not there, or has other parameters.
    """
    try:
        for module, name, parameters, by_position in needed:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                if not hasattr(found, part):
                    raise ImportError(f"{module} has no {name}")
                found = getattr(found, part)
            missing = [p for p in parameters if p not in inspect.signature(found).parameters]
            if missing:
                raise ImportError(f"{module}.{name} has no parameter {missing[0]}")
            if by_position:
                try:
                    inspect.signature(found).bind(*[None] * by_position)
                except TypeError:
                    raise ImportError(f"{module}.{name} does not take {by_position} arguments") from None
    except ImportError as error:
        raise ImportError(f"fovea.integrations.{integration} needs {versions}: {error}") from error


def require_known(integration: str, versions: str, theirs: Any, ours: Any) -> None:
    """For a function of ours that is called in the place of theirs.

    Raises:
        ImportError: Theirs has a parameter that ours does not have.
    """
    unknown = [p for p in inspect.signature(theirs).parameters if p not in inspect.signature(ours).parameters]
    if unknown:
        where = f"{theirs.__module__}.{theirs.__qualname__}"
        why = f"{where} has a parameter {unknown[0]}, which fovea does not know"
        raise ImportError(f"fovea.integrations.{integration} needs {versions}: {why}")
