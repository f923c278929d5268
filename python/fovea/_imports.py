# SPDX-License-Identifier: Apache-2.0
"""Something to do as soon as a module has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Optional


class _Watcher(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self.module = module
        self.then = then

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]], target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if fullname != self.module or self not in sys.meta_path:
            return None
        # Other watchers of the module are asked next. The watch ends when the module is imported: many programs only look for it.
        spec = None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                break
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_then(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then()

        spec.loader.exec_module = execute_and_then  # type: ignore[method-assign]
        return spec


def after(module: str, then: Callable[[], None]) -> None:
    """Calls `then` once: now if the module has been imported, otherwise when it has been."""
    if module in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watcher(module, then))
