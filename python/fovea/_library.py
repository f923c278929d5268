# SPDX-License-Identifier: Apache-2.0
"""Finds and loads the shared library, and turns its statuses into Python's exceptions.

It is looked for in this order:
1. $FOVEA_LIBRARY
2. beside this package: an installed wheel
3. for a package that lies in a checkout, build/ there (`make build`) and what `pip install -e` compiled, which lies
   in site-packages: the one that was built last

Calls release the GIL, as every ctypes.CDLL call does.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Optional
from urllib.parse import urlparse
from urllib.request import url2pathname

from . import _abi

_FILE = {"darwin": "libfovea.dylib", "win32": "fovea.dll"}.get(sys.platform, "libfovea.so")


def _find() -> Path:
    forced = os.environ.get("FOVEA_LIBRARY")
    if forced:
        if not Path(forced).is_file():
            raise ImportError(f"fovea: FOVEA_LIBRARY is {forced!r}, and no such file exists")
        return Path(forced)
    package = Path(__file__).resolve().parent
    beside = package / _FILE
    if beside.is_file():
        return beside
    checkout = package.parent.parent
    if not (checkout / "include" / "fovea" / "c.h").is_file():
        raise ImportError(
            f"fovea: its shared library is not at {beside}: install fovea-attention again, or set FOVEA_LIBRARY to "
            f"where {_FILE} is"
        )
    editable = _editable(checkout)
    built = [place for place in (checkout / "build" / _FILE, editable) if place is not None and place.is_file()]
    if not built:
        raise ImportError(
            f"fovea: its shared library is not at {beside} nor at {checkout / 'build' / _FILE}: run `make build` or "
            f"`pip install -e .` in {checkout}, or set FOVEA_LIBRARY to where {_FILE} is"
        )
    return max(built, key=lambda place: place.stat().st_mtime)


def _editable(checkout: Path) -> Optional[Path]:
    """The library that `pip install -e` of this checkout made: pip writes down which folder was installed."""
    for distribution in metadata.distributions(name="fovea-attention"):
        try:
            origin = json.loads(distribution.read_text("direct_url.json") or "{}")
        except ValueError:  # a file that somebody changed
            continue
        if origin.get("dir_info", {}).get("editable"):
            folder = Path(url2pathname(urlparse(origin["url"]).path))
            if folder.is_dir() and folder.samefile(checkout):
                return Path(str(distribution.locate_file(f"fovea/{_FILE}")))
    return None


def _load(path: Path, older: bool = False) -> ctypes.CDLL:
    """`older`: functions that the library does not have yet are left out; a benchmark compares with such a one."""
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _abi.FUNCTIONS.items():
            if older and not hasattr(library, name):
                continue
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise ImportError(f"fovea: {path} cannot be used: {error}") from error
    major, minor = divmod(library.fovea_version() // 100, 100)
    # An older library does not know the fields of this package's structs, and before 1.0 a newer minor version may have others.
    if not older and (major, minor) != (_abi.VERSION_MAJOR, _abi.VERSION_MINOR):
        raise ImportError(f"fovea: {path} is of version {major}.{minor}, and this package is for {_abi.VERSION_MAJOR}.{_abi.VERSION_MINOR}: "
                          "install both together, or name another library in FOVEA_LIBRARY")  # fmt: skip
    return library


def nvrtc_folders() -> list[str]:
    """Where Python finds packages, and so the wheels with NVRTC: environments that see others, --user and PYTHONPATH
    included. And where conda puts it. The library looks there when it needs NVRTC, not now."""
    folders = [os.path.abspath(folder) for folder in sys.path if folder]  # "": the current folder
    folders += [prefix for prefix in (sys.prefix, sys.base_prefix) if os.path.isdir(os.path.join(prefix, "conda-meta"))]
    return [folder for folder in dict.fromkeys(folders) if ":" not in folder]


path = _find()
lib = _load(path)
lib.fovea_set_nvrtc_folders(os.fsencode(":".join(nvrtc_folders())))

_EXCEPTIONS: dict[int, type[Exception]] = {
    _abi.INVALID_ARGUMENT: ValueError,
    _abi.INVALID_TYPE: TypeError,
    _abi.UNSUPPORTED: NotImplementedError,
    _abi.OUT_OF_MEMORY: MemoryError,
}


def check(status: int) -> None:
    """Raises the exception for the status of this thread's last call, with the message of the library."""
    if status != _abi.OK:
        raise _EXCEPTIONS.get(status, RuntimeError)(lib.fovea_last_error().decode())


def encoded(name: str) -> bytes:
    """A name or line for C, which would end it at a NUL and has no text for half a surrogate pair: these are escaped, and
    C refuses what they make."""
    return name.encode(errors="backslashreplace").replace(b"\0", b"\\x00")


def text(function: Callable[..., int], *arguments: Any, tolerate: int = _abi.OK) -> str:
    """The text that a function with arguments (..., text, capacity, needed) writes, even with the status `tolerate`."""
    needed = ctypes.c_size_t(4096)
    while True:
        capacity = needed.value
        buffer = ctypes.create_string_buffer(capacity)
        status = function(*arguments, buffer, capacity, ctypes.byref(needed))
        if status != tolerate:
            check(status)
        if needed.value <= capacity:
            return buffer.value.decode().rstrip("\n")


def get_include() -> str:
    """The folder of the headers for C and C++: `-I` of it, then `#include <fovea/c.h>` or `<fovea/attention.h>`.

    Returns:
        An absolute path. In a checkout it is include/, in an installed package a folder inside of it. The library to
        link with is libfovea.so; explain() prints where it is.

    >>> import os, fovea
    >>> sorted(name for name in os.listdir(os.path.join(fovea.get_include(), "fovea")) if name.endswith(".h"))
    ['attention.h', 'c.h', 'parallel.h', 'parallel_nccl.h']
    """
    package = Path(__file__).resolve().parent
    folder = package / "include"
    return str(folder if folder.is_dir() else package.parent.parent / "include")


def version() -> str:
    """The version of the loaded library."""
    number = lib.fovea_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
