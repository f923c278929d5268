# SPDX-License-Identifier: Apache-2.0
"""The command `fovea`, as `python -m fovea`: `python -m fovea --help` lists its subcommands.

The command is a separate program, which wheels contain beside the library. This module passes it the folders in which
Python finds packages, so that it takes the same NVRTC as `import fovea`, and then replaces this process by it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

from . import _library


def _find() -> Path:
    places = [Path(__file__).resolve().parent / "bin" / "fovea", _library.path.parent / "cli" / "fovea"]
    for place in places:
        if place.is_file():
            return place
    sys.exit(
        f"fovea: the command was not found at {places[0]} or {places[1]}: in a checkout `make build` compiles it; pip does so "
        "with `pip install . --config-settings=cmake.define.FOVEA_COMMAND=ON`; wheels contain it"
    )


def main() -> NoReturn:
    """Runs the command with the arguments of this process, and ends with its exit code."""
    command = _find()
    folders = [*_library.nvrtc_folders(), os.environ.get("FOVEA_NVRTC_FOLDERS", "")]
    environment = {**os.environ, "FOVEA_NVRTC_FOLDERS": ":".join(filter(None, folders))}
    os.execve(command, ["fovea", *sys.argv[1:]], environment)


if __name__ == "__main__":
    main()
