# SPDX-License-Identifier: Apache-2.0
"""Programs as users of transformers, diffusers, xFormers and Megatron write them, and the same with the line that
docs/integrations/programs.md adds: the same losses, and every call of attention computed by fovea."""

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402

import fovea.integrations  # noqa: E402
import programs  # noqa: E402

# The integration, and how many calls of attention the program makes.
CALLS = {"trainer": ("transformers", 8 * 6), "diffusion": ("diffusers", 6 * 2), "megatron_gpt": ("megatron", 6 * 2),
         "memory_efficient": ("xformers", 10 * 2)}  # fmt: skip


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Megatron makes tensors on the current GPU, whatever its inputs."""
    if not torch.cuda.is_available():
        from megatron.core import tensor_parallel
        from megatron.core.fusions import fused_softmax

        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
        monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext))
        monkeypatch.setattr(fused_softmax, "get_default_causal_mask", lambda sq: torch.ones(sq, sq).triu(1).bool())


@pytest.mark.parametrize("name", CALLS)
def test_program(name, tmp_path, request):
    integration, calls = CALLS[name]
    if name == "megatron_gpt":
        request.getfixturevalue("on_the_cpu")
    fovea.integrations.reset_stats()
    try:
        programs.compare(name, tmp_path)
        assert fovea.integrations.stats() == {integration: {"served": calls, "traced": 0, "handed_back": {}}}
    finally:
        fovea.integrations.uninstall(integration)
