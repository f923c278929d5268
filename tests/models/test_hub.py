# SPDX-License-Identifier: Apache-2.0
"""The folder of tools/hub.py through the package `kernels`, and through transformers, whose flash attention then calls it: results and
every gradient beside "eager". transformers wants a newer `kernels` than there is, so its question for the version is answered."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import kernels  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import modeling_utils  # noqa: E402
from transformers.integrations import hub_kernels  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99,
         "use_cache": False, "head_dim": 16}  # fmt: skip
MODELS = {
    "Llama": SIZES,
    "Gemma2": {**SIZES, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    "GptOss": {**SIZES, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub")
    build = Path(os.environ.get("FOVEA_LIBRARY", ROOT / "build/libfovea.so")).resolve().parent
    subprocess.run([sys.executable, ROOT / "tools/hub.py", out, "--build", build], check=True)
    return out


@pytest.fixture
def kernel(folder, monkeypatch):
    monkeypatch.delenv("FOVEA_LIBRARY", raising=False)  # the folder has a library
    return kernels.get_local_kernel(folder, backend="cpu", trust_remote_code=True)


def test_the_package_loads_it(kernel, folder):
    assert kernel.__name__ == json.loads((folder / "build/torch-cpu/metadata.json").read_text())["id"]
    assert Path(sys.modules[f"{kernel.__name__}.fovea._library"].path) == folder / "build/torch-cpu/fovea/libfovea.so"


@pytest.mark.parametrize("name", MODELS)
def test_transformers(name, kernel, monkeypatch):
    for module in (hub_kernels, modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda *_, **__: True, raising=False)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: kernel)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    counts = sys.modules[f"{kernel.__name__}.fovea.integrations._counts"]
    found = []
    for implementation in ("eager", "someone/fovea"):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager")
        if implementation != "eager":
            counts.reset_stats()
            model.set_attn_implementation(implementation, allow_all_kernels=True)
        out = model(ids, attention_mask=mask).logits[mask.bool()]
        out.square().mean().backward()
        found.append({"out": out.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    assert counts.stats()["hub"]["served"] == 2
    want, got = found
    assert want.keys() == got.keys()
    for key, x in want.items():
        assert (got[key] - x).abs().max() <= 1e-4 * max(x.abs().max(), 1e-3 * want["out"].abs().max()), key
