# SPDX-License-Identifier: Apache-2.0
"""What the README shows runs, and its tables are those that tools/tables.py writes."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("FOVEA_BUILD", ROOT / "build"))
README = (ROOT / "README.md").read_text()


def blocks(language):
    found = re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)
    assert found, f"the README has no {language} example"
    return found


def test_python_example_runs():
    for block in blocks("python"):
        done = subprocess.run([sys.executable, "-c", block], env=os.environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for line, printed in zip(re.findall(r"print\(.*#\s*(.*)", block), done.stdout.splitlines(), strict=True):
            assert printed == line


def test_cpp_example_runs(tmp_path):
    for block in blocks("cpp"):
        source = tmp_path / "example.cpp"
        source.write_text(block)
        build = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", source, f"-L{BUILD}", "-lfovea",
                 f"-Wl,-rpath,{BUILD}", "-o", tmp_path / "example"]
        done = subprocess.run([str(part) for part in build], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert subprocess.run([tmp_path / "example"]).returncode == 0


def test_commands_shown_in_the_text_run():
    commands = re.findall(r'`(fovea [^`]*"[^`]*)`', README)
    assert commands
    for command in commands:
        done = subprocess.run([BUILD / "cli/fovea", *shlex.split(command)[1:]], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


def check_tables(**environment):
    return subprocess.run([sys.executable, ROOT / "tools/tables.py", "--check"], env={**os.environ, **environment},
                          capture_output=True, text=True)


def test_tables_are_those_that_the_command_writes():
    done = check_tables()
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_table_of_support_asks_the_library():
    """With a backend that computes nothing on the CPU, nothing is supported, and the table in the README is wrong."""
    done = check_tables(FOVEA_BACKEND="cuda")
    assert done.returncode == 1 and "README.md: stale" in done.stdout, done.stdout + done.stderr
