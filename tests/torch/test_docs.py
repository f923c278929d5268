# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/torch.md, docs/enable.md, docs/operators.md, docs/several-gpus.md, docs/coming.md, README.md and the package's docstring run, and print what they say."""

import doctest

import pytest

import fovea.torch
from conftest import ROOT


@pytest.fixture(autouse=True)
def counts_of_its_own():
    """Examples print how many calls were served: neither they nor the tests after them count those of others."""
    fovea.torch.reset_stats()
    yield
    fovea.torch.reset_stats()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page, least", [("torch", 20), ("coming", 15), ("enable", 8), ("operators", 8), ("several-gpus", 8)])
def test_docs(page, least):
    result = doctest.testfile(str(ROOT / f"docs/{page}.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted > least


def test_readme():
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert result.failed == 0
    assert result.attempted > 5


def test_docstring():
    for module in (fovea.torch, fovea.torch._attention, fovea.torch._fast, fovea.torch._enable, fovea.torch._parallel, fovea.torch._rows):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted >= 2
