# SPDX-License-Identifier: Apache-2.0
"""The integrations that need nothing but PyTorch. Those of other libraries are in tests/models."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
sys.path[:0] = [str(ROOT / name) for name in ("python", "tests/integrations", "tests/torch", "tests/python")]

import torch  # noqa: E402

import fovea.integrations  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_state():
    """Every test starts from the same generator and from counts of 0, and leaves nothing installed."""
    torch.manual_seed(0)
    fovea.integrations.reset_stats()
    yield
    fovea.integrations.uninstall(*(set(fovea.integrations.available()) - {"transformers"}))


@pytest.fixture
def computed():
    """Asserts that an integration computed so many calls, and handed none back."""

    def check(name, calls):
        assert fovea.integrations.stats()[name] == {"served": calls, "traced": 0, "handed_back": {}}
        fovea.integrations.reset_stats()

    return check
