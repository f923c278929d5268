# SPDX-License-Identifier: Apache-2.0
"""mypy --strict accepts fovea.torch, and finds the types and the mistakes in a user's code. Docstrings and types have
the arguments of the signature."""

import inspect
import re

import torch

import fovea.torch
from conftest import ROOT
from fovea.torch import _options
from typing_check import CACHE, assert_typed


def test_mypy():
    files = sorted((ROOT / "python" / "fovea" / "torch").rglob("*.py"))
    assert len(files) > 4
    # In PyTorch 2.9 and 2.10 the function that every operator is called by has no types.
    untyped = getattr(torch.autograd.Function.apply, "__annotations__", None) == {}
    options = ["--allow-untyped-calls"] if untyped else []
    assert_typed(CACHE, *files, ROOT / "tests" / "torch" / "typed_user.py", options=options)


def test_every_argument_has_a_type_and_a_line_in_the_docstring():
    function = fovea.torch.attention
    parameters = inspect.signature(function).parameters.values()
    keywords = {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    assert set(_options.Options.__annotations__) == keywords - {"return_lse"}
    section = re.search(r"^Args:\n(.*?)\n\n", inspect.getdoc(function), re.DOTALL | re.MULTILINE).group(1)
    taken = [name for name in inspect.signature(function).parameters if name not in ("more", "unknown")]
    assert re.findall(r"^    (\w+): ", section, re.MULTILINE) == taken
