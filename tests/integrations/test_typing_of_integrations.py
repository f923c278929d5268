# SPDX-License-Identifier: Apache-2.0
"""mypy --strict accepts fovea.integrations, and every public function's docstring has its arguments."""

import importlib
import inspect
import re

import pytest

import fovea.integrations
from conftest import ROOT
from typing_check import CACHE, assert_typed


def test_mypy():
    files = sorted((ROOT / "python" / "fovea" / "integrations").glob("*.py"))
    assert len(files) > 4
    assert_typed(CACHE, *files, ROOT / "python" / "fovea_autoload" / "__init__.py")


def functions():
    for name in ("", *fovea.integrations.available()):
        module = importlib.import_module(f"fovea.integrations.{name}".rstrip("."))
        for own in module.__all__:
            if inspect.isfunction(getattr(module, own)):
                yield pytest.param(getattr(module, own), id=f"{name}.{own}")


@pytest.mark.parametrize("function", list(functions()))
def test_every_argument_is_described(function):
    """All of them, or what differs from another function that has them."""
    text = inspect.getdoc(function)
    section = re.search(r"^Args:\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    described = re.findall(r"^    \*?(\w+): ", section.group(1), re.MULTILINE) if section else []
    assert described == list(inspect.signature(function).parameters) or re.search(r"The rest is as in \w+\(\)\.$", text)
