# SPDX-License-Identifier: Apache-2.0
"""Programs as their users write them, and the same with the line that docs/integrations/programs.md adds: the same losses. Those that
need no other package than PyTorch; the others are in tests/models and tests/jax."""

import re
import sys

import pytest

import fovea.integrations
import fovea.torch
from conftest import ROOT

sys.path.append(str(ROOT / "tests"))

import programs  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_left():
    fovea.torch.reset_stats()
    yield
    fovea.torch.disable()
    for name in ("flash_attn", "triangle"):
        fovea.integrations.uninstall(name)


def test_gpt(tmp_path):
    programs.compare("gpt", tmp_path)
    seen = fovea.torch.stats()
    assert seen["served"] == 2 * 12, seen


@pytest.mark.parametrize("name, integration, calls", [("bert_padding", "flash_attn", 2 * 10), ("triangle", "triangle", 2 * 10)])
def test_program(name, integration, calls, tmp_path):
    programs.compare(name, tmp_path)
    assert fovea.integrations.stats() == {integration: {"served": calls, "traced": 0, "handed_back": {}}}


def test_every_program_is_on_the_page():
    page = (ROOT / "docs/integrations/programs.md").read_text()
    assert sorted(re.findall(r"^\| \[(\w+)\.py\]", page, re.M)) == sorted(path.stem for path in programs.PROGRAMS.glob("*.py"))
