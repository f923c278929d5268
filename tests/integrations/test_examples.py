# SPDX-License-Identifier: Apache-2.0
"""The examples of the integrations' pages and docstrings run, and print what they say."""

import doctest

import pytest

import fovea.integrations
from conftest import ROOT


@pytest.mark.parametrize("page, least", [("integrations", 7), ("integrations/flash_attn", 4), ("integrations/triangle", 10)])
def test_docs(page, least):
    result = doctest.testfile(str(ROOT / f"docs/{page}.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted > least


def test_docstrings():
    assert doctest.testmod(fovea.integrations) == (0, 6)


def test_every_integration_is_on_the_page():
    page = (ROOT / "docs/integrations.md").read_text()
    assert [name for name in fovea.integrations.available() if f'`"{name}"`' not in page] == []
