# SPDX-License-Identifier: Apache-2.0
"""Modules in the place of a package, and its metadata. Programs look for a package in three ways: they import it, they
ask importlib.util.find_spec, and they ask importlib.metadata for its version and for the packages of a distribution."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import threading
import types
from collections.abc import Iterable
from typing import Any, Optional

_lock = threading.RLock()


class StandIn:
    """One or more modules that belong to one distribution.

    Args:
        name: The integration's name.
        distribution: The distribution's name in the metadata.
        version: The version that is imitated.
        modules: By full name what each module has. Parents that are missing are made.
        looks_once: A module that looks for the package when it is imported, and would call into what only the package has. It is
            imported before the stand-in is there.
    """

    def __init__(
        self, name: str, distribution: str, version: str, modules: dict[str, dict[str, Any]], looks_once: str = ""
    ) -> None:
        self.name = name
        self.distribution = distribution
        self.version = version
        self.modules = modules
        self.looks_once = looks_once
        self.top = next(iter(modules)).partition(".")[0]
        self.made: list[str] = []
        self.before: dict[str, types.ModuleType] = {}

    def install(self, force: bool) -> None:
        if self in _finder.stand_ins:
            return
        if not force:
            self._need_nothing_real()
        # Without the lock, which another thread may want that holds the lock of a module's import.
        if self.looks_once and self.looks_once not in sys.modules and _is_there(self.looks_once.partition(".")[0]):
            with contextlib.suppress(Exception):  # one that cannot be imported looks for nothing
                importlib.import_module(self.looks_once)  # and with it, it may be, the package itself
        with _lock:
            if self in _finder.stand_ins:
                return
            for name, contents in self.modules.items():
                self._put(name, contents)
            _finder.stand_ins.append(self)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)

    def _need_nothing_real(self) -> None:
        real = [name for name in self.modules if name in sys.modules and not _is_ours(sys.modules[name])]
        if real:
            raise RuntimeError(
                f"install: {real[0]} is imported already, and is not fovea's; accepted: install({self.name!r}) before "
                "the import, or force=True"
            )
        hidden = [name for name in _with_parents(self.modules) - set(self.modules) if _is_real(name)]
        if hidden:
            both = f", or install({hidden[0]!r}, {self.name!r})" if hidden[0] in _ELSEWHERE.values() else ""
            raise RuntimeError(
                f"install: {self.name} is a part of {hidden[0]}, which is installed, and would hide the rest of it; accepted: "
                f"force=True{both}"
            )

    def _put(self, name: str, contents: dict[str, Any]) -> None:
        parent, _, last = name.rpartition(".")
        if parent and not _is_ours(sys.modules.get(parent)):
            self._put(parent, {})
        module = sys.modules.get(name)
        if module is None or not _is_ours(module):
            if module is not None:
                self.before[name] = module
            module = types.ModuleType(name, f"{name} as fovea computes it; see fovea.integrations.")
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            module.__path__ = []
            sys.modules[name] = module
            self.made.append(name)
        if name in self.modules or not _is_ours(module):
            setattr(module, _MARK, self.what())
        module.__dict__.update(contents)
        if parent:
            setattr(sys.modules[parent], last, module)

    def _heir(self, name: str) -> Optional[StandIn]:
        """Another one that needs this module."""
        return next((other for other in _finder.stand_ins if name in _with_parents(other.modules)), None)

    def what(self) -> str:
        return f"{self.distribution} {self.version}"

    def uninstall(self) -> None:
        with _lock:
            if self not in _finder.stand_ins:
                return
            _finder.stand_ins.remove(self)
            for name, contents in self.modules.items():
                for key in contents:
                    vars(sys.modules.get(name, types.ModuleType(""))).pop(key, None)
            for name in reversed(self.made):
                heir = self._heir(name)
                if heir is not None:
                    heir.made.insert(0, name)
                    setattr(sys.modules[name], _MARK, heir.what())
                elif _is_ours(sys.modules.get(name)):
                    del sys.modules[name]
                    parent, _, last = name.rpartition(".")
                    vars(sys.modules.get(parent, types.ModuleType(""))).pop(last, None)
            for name, module in self.before.items():
                heir = self._heir(name)
                (sys.modules if heir is None else heir.before)[name] = module
            self.made, self.before = [], {}
            if not _finder.stand_ins and _finder in sys.meta_path:
                sys.meta_path.remove(_finder)


_MARK = "__fovea__"
# Modules of one version that another's programs may look for, by the integration that has them.
_ELSEWHERE = {"flash_attn.cute": "flash_attn_4", "flash_attn.flash_attn_interface": "flash_attn", "flash_attn.bert_padding": "flash_attn"}


def _is_real(package: str) -> bool:
    """Whether it is imported or installed, and not fovea's. A folder without code of its own hides nothing."""
    if package in sys.modules:
        return sys.modules[package] is not None and not _is_ours(sys.modules[package])
    if "." in package:  # its parent has been looked at
        return False
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _is_there(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def _is_ours(module: Optional[types.ModuleType]) -> bool:
    return hasattr(module, _MARK)


def _with_parents(names: Iterable[str]) -> set[str]:
    found = set()
    for name in names:
        while name:
            found.add(name)
            name = name.rpartition(".")[0]
    return found


class _Distribution(importlib.metadata.Distribution):
    def __init__(self, stand_in: StandIn) -> None:
        self._stand_in = stand_in

    def read_text(self, filename: str) -> Optional[str]:
        if filename in ("METADATA", "PKG-INFO"):
            return f"Metadata-Version: 2.1\nName: {self._stand_in.distribution}\nVersion: {self._stand_in.version}\n"
        return f"{self._stand_in.top}\n" if filename == "top_level.txt" else None

    def locate_file(self, path: Any) -> Any:
        return path

    @property
    def files(self) -> None:
        return None


def _is_a_question() -> bool:
    """Whether a program asks importlib.util.find_spec(), which says None, and imports nothing. It is three frames above."""
    try:
        return sys._getframe(3).f_globals.get("__name__") == "importlib.util"
    except ValueError:  # so few frames: nobody imports
        return True


class _Finder(importlib.metadata.DistributionFinder):
    """Answers for the metadata, and says what a stand-in does not have."""

    def __init__(self) -> None:
        self.stand_ins: list[StandIn] = []

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        parent = fullname.rpartition(".")[0]
        if parent and _is_ours(sys.modules.get(parent)) and not _is_a_question():
            other = _ELSEWHERE.get(fullname)
            why = f"install({other!r}) has it" if other else "for the rest the package itself has to be installed, without the stand-in"
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: fovea.integrations stands in for {getattr(sys.modules[parent], _MARK)}, "
                f"and has its attention alone; {why}",
                name=fullname,
            )

    def find_distributions(self, context: Any = importlib.metadata.DistributionFinder.Context()) -> Any:  # noqa: B008
        wanted = None if context.name is None else _normal(context.name)
        return [_Distribution(one) for one in self.stand_ins if wanted in (None, _normal(one.distribution))]


def _normal(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


_finder = _Finder()


class Patches:
    """Attributes of modules of an installed package that are replaced, and put back."""

    def __init__(self) -> None:
        self.before: list[tuple[Any, str, Any]] = []

    def put(self, module: Any, name: str, function: Any) -> None:
        self.before.append((module, name, getattr(module, name)))
        setattr(module, name, function)

    def undo(self) -> None:
        while self.before:
            module, name, function = self.before.pop()
            setattr(module, name, function)
