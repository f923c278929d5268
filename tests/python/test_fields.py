# SPDX-License-Identifier: Apache-2.0
"""A field that is added to a problem and to nothing else does not compile: none can be forgotten in a plan's key."""

import shutil
import subprocess

import pytest

from conftest import ROOT

USE = """#include "core/fields.h"
namespace fovea {
void use(Problem& problem, Call& call) {
  for_each_field(problem, [](const char*, auto&, Role) {});
  for_each_view(call, [](const char*, auto&, Role) {});
}
}  // namespace fovea
"""


def compiled(folder, change=None):
    """The compiler's status and errors with src/core as it is, or with something put before a line of problem.h."""
    shutil.copytree(ROOT / "src/core", folder / "core")
    if change is not None:
        line, added = change
        header = folder / "core/problem.h"
        text = header.read_text()
        assert text.count(line) == 1
        header.write_text(text.replace(line, f"{added}\n{line}"))
    done = subprocess.run(["c++", "-std=c++20", "-fsyntax-only", "-DFMT_HEADER_ONLY=1", f"-I{folder}", f"-I{ROOT / 'src'}",
                           f"-I{ROOT / 'include'}", "-x", "c++", "-"], input=USE, capture_output=True, text=True)  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_a_forgotten_field_does_not_compile(tmp_path):
    status, errors = compiled(tmp_path / "as_it_is")
    assert status == 0, errors
    for name, change in {
        "problem": ("  bool deterministic = false;", "  bool forgotten = false;"),
        "call": ("  View grad_sink;", "  View forgotten;"),
    }.items():
        status, errors = compiled(tmp_path / name, change)
        assert status != 0 and "fields.h" in errors, errors
        assert "names are provided" in errors or "decomposes into" in errors, errors
