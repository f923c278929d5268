# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/python.md and of docstrings run, and print what they say. Docstrings name every argument."""

import doctest
import inspect
import re

import pytest

import fovea
from fovea import _options
from conftest import ROOT


def test_docs():
    result = doctest.testfile(str(ROOT / "docs" / "python.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert result.attempted > 30


def test_docstrings():
    result = doctest.testmod(fovea)
    assert result.failed == 0
    assert result.attempted > 25


METHODS = ("__call__", "backward", "explain", "prepare", "with_")


@pytest.mark.parametrize(
    "function", [*(getattr(fovea, name) for name in fovea.__all__), *(getattr(fovea.Attention, name) for name in METHODS)]
)
def test_docstrings_name_every_argument(function):
    """In the order of the signature, under "Args:" (a tuple's fields under "Attributes:")."""
    text = inspect.getdoc(function)
    section = re.search(r"^(?:Args|Attributes):\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
    named = re.findall(r"^    \*{0,2}(\w+): ", section.group(1), re.MULTILINE) if section else []
    taken = [name for name in inspect.signature(function).parameters if name not in ("self", "more", "unknown")]
    assert named == taken
    assert "\n\n" not in text or re.match(r"[^\n]+\n\n", text), "a summary of one line comes first"


def test_types_have_every_keyword():
    """What a type checker takes is what the functions take, and an Attention fixes the rest."""
    shared = set(fovea.attention.__kwdefaults__) & set(fovea.attention_backward.__kwdefaults__) - {"accumulate"}
    assert set(_options.Options.__annotations__) == shared
    assert set(_options.CallOptions.__annotations__) < shared
