# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/python.md and of the package's docstring run, and print what they say."""

import doctest

import fovea
from conftest import ROOT


def test_docs():
    result = doctest.testfile(str(ROOT / "docs" / "python.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted > 30


def test_docstring():
    result = doctest.testmod(fovea)
    assert result.failed == 0
    assert result.attempted > 2
