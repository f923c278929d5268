# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the shared library, and turns its statuses into Python's exceptions.

It is looked for in three places: $FOVEA_LIBRARY, beside this package (an installed wheel), and build/ of the
checkout that this package lies in. Calls release the GIL, as every ctypes.CDLL call does.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any, Callable

from fovea import _abi

_FILE = {"darwin": "libfovea.dylib", "win32": "fovea.dll"}.get(sys.platform, "libfovea.so")


def _find() -> Path:
    forced = os.environ.get("FOVEA_LIBRARY")
    if forced:
        if not Path(forced).is_file():
            raise ImportError(f"fovea: FOVEA_LIBRARY is {forced!r}, and no such file exists")
        return Path(forced)
    package = Path(__file__).resolve().parent
    checkout = package.parent.parent
    places = [package / _FILE]
    if (checkout / "include" / "fovea" / "c.h").is_file():
        places.append(checkout / "build" / _FILE)
    for place in places:
        if place.is_file():
            return place
    advice = (
        "run `make build` in the checkout" if len(places) > 1 else "install it anew, with `pip install .` in a checkout"
    )
    raise ImportError(
        f"fovea: its shared library is not at {' nor at '.join(map(str, places))}: {advice}, "
        f"or set FOVEA_LIBRARY to where {_FILE} lies"
    )


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _abi.FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise ImportError(f"fovea: {path} cannot be used: {error}") from error
    major = library.fovea_version() // 10000
    if major != _abi.VERSION_MAJOR:
        raise ImportError(f"fovea: {path} is of version {major}, and this package is for {_abi.VERSION_MAJOR}")
    return library


path = _find()
lib = _load(path)

_EXCEPTIONS: dict[int, type[Exception]] = {
    _abi.INVALID_ARGUMENT: ValueError,
    _abi.INVALID_TYPE: TypeError,
    _abi.UNSUPPORTED: NotImplementedError,
    _abi.OUT_OF_MEMORY: MemoryError,
}


def check(status: int) -> None:
    """Raises what the status of this thread's last call stands for, with the library's own words."""
    if status != _abi.OK:
        raise _EXCEPTIONS.get(status, RuntimeError)(lib.fovea_last_error().decode())


def text(function: Callable[..., int], *arguments: Any, tolerate: int = _abi.OK) -> str:
    """What a function with (text, capacity, needed) at its end writes; with the status `tolerate` it has text too."""
    needed = ctypes.c_size_t(4096)
    while True:
        capacity = needed.value
        buffer = ctypes.create_string_buffer(capacity)
        status = function(*arguments, buffer, capacity, ctypes.byref(needed))
        if status != tolerate:
            check(status)
        if needed.value <= capacity:
            return buffer.value.decode().rstrip("\n")


def version() -> str:
    """Of the library that is loaded."""
    number = lib.fovea_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
