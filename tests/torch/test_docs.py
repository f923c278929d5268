# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/torch.md, README.md and the package's docstring run, and print what they say."""

import doctest

import pytest

import fovea.torch
from conftest import ROOT


@pytest.mark.filterwarnings("ignore")
def test_docs():
    result = doctest.testfile(str(ROOT / "docs/torch.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted > 20


def test_readme():
    result = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert result.failed == 0
    assert result.attempted > 5


def test_docstring():
    for module in (fovea.torch, fovea.torch._attention):
        result = doctest.testmod(module)
        assert result.failed == 0
        assert result.attempted > 2
