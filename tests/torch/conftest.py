# SPDX-License-Identifier: Apache-2.0
"""The tests use the checkout: the package from python/, the library from $FOVEA_BUILD (build/) or $FOVEA_LIBRARY."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))
# Child processes of the tests import the same package.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
sys.path[:0] = [str(ROOT / name) for name in ("python", "tests/torch", "tests/python", "tests")]

import torch  # noqa: E402  (a missing torch is a failure, not a skip)


@pytest.fixture(autouse=True)
def fresh_state():
    """Every test starts from the same generator, and leaves PyTorch's global switches as it found them."""
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)


def restore_flash_impl():
    """PyTorch's own flash operators again. PyTorch 2.10 can activate an implementation, and has no function that restores its own."""
    attention = torch.nn.attention
    if hasattr(attention, "restore_flash_attention_impl"):
        attention.restore_flash_attention_impl()
        return
    registry = attention._registry
    for handle in registry._FLASH_ATTENTION_HANDLES.values():
        handle.remove()
    registry._FLASH_ATTENTION_HANDLES.clear()
    registry._FLASH_ATTENTION_ACTIVE = None


@pytest.fixture
def python_path():
    """Calls are computed by Python: for tests that look into it."""
    from fovea.torch import _fast

    _fast.switch_off()
    yield
    _fast.load()


@pytest.fixture(scope="session")
def ranks():
    """Processes of a group (ranks.py), which tests of several files share."""
    from ranks import Ranks

    ranks = Ranks()
    yield ranks
    ranks.close()
