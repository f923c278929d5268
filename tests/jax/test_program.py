# SPDX-License-Identifier: Apache-2.0
"""A flax program as its users write it, and the same with the line that docs/integrations/programs.md adds: the same losses."""

import sys

import jax

from conftest import ROOT

sys.path.append(str(ROOT / "tests"))

import programs  # noqa: E402


def test_flax_model(tmp_path, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", jax.nn.dot_product_attention)  # put back afterwards
    programs.compare("flax_model", tmp_path)
    assert jax.nn.dot_product_attention.__module__.startswith("fovea")
