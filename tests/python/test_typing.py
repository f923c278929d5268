# SPDX-License-Identifier: Apache-2.0
"""mypy --strict accepts the package, and finds the types and the mistakes in a user's code. fovea.torch is checked in
tests/torch, where PyTorch is."""

import pytest

from conftest import ROOT
from typing_check import assert_typed


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("mypy")


def test_the_package(cache):
    files = sorted((ROOT / "python" / "fovea").glob("*.py"))
    assert len(files) > 8
    assert_typed(cache, *files)


def test_the_code_of_a_user(cache):
    assert_typed(cache, ROOT / "tests" / "python" / "typed_user.py")


def test_what_is_wrong_is_found(cache, tmp_path):
    """The check itself: a type that is another one, and an error that does not exist."""
    user = (ROOT / "tests" / "python" / "typed_user.py").read_text()
    wrong = tmp_path / "wrong.py"
    wrong.write_text(user.replace("NDArray[np.float16])", "NDArray[np.float64])").replace("causal=True)  # type", ")  # type"))
    with pytest.raises(AssertionError, match=r'(?s)Expression is of type .*Unused "type: ignore'):
        assert_typed(cache, wrong)


def test_the_package_is_marked_as_typed():
    assert (ROOT / "python" / "fovea" / "py.typed").exists()
