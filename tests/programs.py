# SPDX-License-Identifier: Apache-2.0
"""Runs a program of examples/integrations as it is, and a copy with one line added, and compares their losses."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "examples/integrations"


def losses(path, arguments):
    """What the program prints, by steps."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [str(path), *arguments]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
    return [float(x) for x in re.findall(r"^step \d+ loss (\S+)$", printed.getvalue(), re.M)]


def line_of(name):
    """The line that docs/integrations/programs.md adds to a program, and the arguments that it is started with there."""
    row = re.search(rf"^\| \[{name}\.py\].*$", (ROOT / "docs/integrations/programs.md").read_text(), re.M)
    line, *arguments = re.findall(r"`([^`]+)`", row[0].split("|")[3])
    return line, (arguments[0].split() if arguments else [])


def both(name, folder):
    """The losses without the line and with it."""
    program = PROGRAMS / f"{name}.py"
    line, arguments = line_of(name)
    text = program.read_text()
    at = text.index('"""\n\n', text.index('"""') + 3) + len('"""\n\n')
    copy = Path(folder) / f"{name}.py"
    copy.write_text(f"{text[:at]}{line}\n{text[at:]}")
    return losses(program, []), losses(copy, arguments)


def compare(name, folder, tolerance=1e-4):
    without, with_line = both(name, folder)
    assert len(without) == len(with_line) >= 6
    assert without[-1] < without[0]  # it learns
    for one, other in zip(without, with_line):
        assert abs(one - other) <= tolerance * abs(one), (without, with_line)
