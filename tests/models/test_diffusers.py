# SPDX-License-Identifier: Apache-2.0
"""set_attention_backend("fovea") of diffusers beside its backend "native": results and gradients of models, every form of a
mask, what is refused. Every test counts the calls that fovea computed."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("python", "tests/models")]
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))

import diffusers  # noqa: E402
import torch  # noqa: E402
from diffusers.models import attention_dispatch as dispatch  # noqa: E402
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn  # noqa: E402

import fovea.integrations  # noqa: E402
from fovea.integrations import diffusers as ours  # noqa: E402
from without import taken_away  # noqa: E402

DEVICE = os.environ.get("FOVEA_TEST_DEVICE", "cpu")


@pytest.fixture(autouse=True)
def installed():
    torch.manual_seed(0)
    fovea.integrations.reset_stats()
    fovea.integrations.install("diffusers")
    yield
    fovea.integrations.uninstall("diffusers")


def computed(calls):
    seen = fovea.integrations.stats().get("diffusers", {"served": 0})
    assert seen["served"] == calls, seen
    fovea.integrations.reset_stats()


def flux():
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 8, 32),
        "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([1.0, 0.5]), "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(8, 3),
    }  # fmt: skip


def qwen_image():
    """Texts of different lengths: a mask of keys."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, guidance_embeds=False, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    texts = torch.ones(2, 7, dtype=torch.long)
    texts[1, 4:] = 0
    return model, {
        "hidden_states": torch.randn(2, 16, 16), "encoder_hidden_states": torch.randn(2, 7, 16), "encoder_hidden_states_mask": texts,
        "timestep": torch.tensor([1.0, 0.5]), "img_shapes": [(1, 4, 4)] * 2,
    }  # fmt: skip


def wan():
    """A video's attention to itself and to the text."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=256, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    )  # fmt: skip
    return model, {
        "hidden_states": torch.randn(1, 4, 2, 8, 8), "timestep": torch.tensor([3]), "encoder_hidden_states": torch.randn(1, 6, 16),
    }  # fmt: skip


def step(model, arguments):
    model.zero_grad(set_to_none=True)
    out = model(**arguments).sample
    (out * torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape)).sum().backward()
    return {"out": out.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def close(got, want, name):
    scale = max(want.abs().max().item(), 1e-3)
    assert ((got - want).abs().max() / scale).item() < 2e-4, name


@pytest.mark.parametrize("make, calls", [(flux, 2), (qwen_image, 2), (wan, 4)], ids=lambda x: getattr(x, "__name__", ""))
def test_model(make, calls):
    model, arguments = make()
    for parameter in model.parameters():  # some are zero at first, and then gradients are
        torch.nn.init.normal_(parameter, std=0.1)
    model = model.to(DEVICE)
    arguments = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}
    want = step(model, arguments)
    with attention_backend("fovea"):
        got = step(model, arguments)
    computed(calls)
    step(model, arguments)
    computed(0)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        close(got[name], tensor, name)
    model.set_attention_backend("fovea")
    assert torch.equal(step(model, arguments)["out"], got["out"])
    computed(calls)


def tensors(heads=3, of_keys=3):
    return [torch.randn(2, n, h, 8, device=DEVICE, requires_grad=True) for n, h in ((5, heads), (7, of_keys), (7, of_keys))]


def masks():
    keys = torch.ones(2, 7, dtype=torch.bool)
    keys[1, 4:] = False
    yield "none", None
    yield "of keys", keys
    yield "of keys, numbers", torch.randn(2, 7)
    yield "of queries and keys", torch.rand(5, 7) < 0.8
    yield "of heads", torch.rand(3, 5, 7) < 0.8
    yield "of all", torch.rand(2, 3, 5, 7) < 0.8
    yield "of batches, numbers", torch.randn(2, 1, 5, 7)
    yield "of all, numbers", torch.randn(2, 3, 5, 7)


@pytest.mark.parametrize("mask", [pytest.param(mask, id=name) for name, mask in masks()])
def test_masks(mask):
    leaves = tensors()
    if mask is not None:
        mask = mask.to(DEVICE)
        if mask.is_floating_point():
            leaves.append(mask.clone().requires_grad_())
            mask = leaves[-1]
    want, got = (dispatch_attention_fn(*leaves[:3], mask, scale=0.2, backend=name) for name in ("native", "fovea"))
    computed(1)
    close(got, want, "out")
    weights = torch.randn_like(want)
    for one, other in zip(*(torch.autograd.grad((x * weights).sum(), leaves) for x in (got, want))):
        assert one.shape == other.shape
        close(one, other, "gradient")


def test_other_arguments():
    """is_causal aligned at the top left, grouped heads, the logsumexp, dropout."""
    q, k, v = tensors(4, 2)
    for options in ({"is_causal": True, "enable_gqa": True}, {"enable_gqa": True}):
        want, got = (dispatch_attention_fn(q, k, v, backend=name, **options) for name in ("native", "fovea"))
        close(got, want, str(options))
    out, lse = dispatch_attention_fn(q, k, v, backend="fovea", attention_kwargs={"return_lse": True})
    scores = torch.einsum("bqhgd,bkhd->bqhgk", q.unflatten(2, (2, 2)), k) / 8**0.5
    close(out, got, "out")
    close(lse, scores.logsumexp(-1).flatten(2), "lse")
    torch.manual_seed(1)
    first = dispatch_attention_fn(q, k, v, dropout_p=0.5, backend="fovea")
    torch.manual_seed(1)
    assert torch.equal(first, dispatch_attention_fn(q, k, v, dropout_p=0.5, backend="fovea"))
    assert not torch.equal(first, got)
    computed(5)


def test_compiled():
    """One graph."""
    model, arguments = flux()
    model = model.to(DEVICE)
    model.set_attention_backend("fovea")
    arguments = {n: x.to(DEVICE) for n, x in arguments.items()}
    with torch.no_grad():
        want = model(**arguments).sample
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(**arguments).sample
    close(got, want, "out")
    assert fovea.integrations.stats()["diffusers"] == {"served": 2, "traced": 2, "handed_back": {}}


def test_what_is_refused():
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="^diffusers: _parallel_config"):
        dispatch_attention_fn(q, k, v, backend="fovea", parallel_config=object())
    with pytest.raises(TypeError, match="^attn_mask: int64"):
        dispatch_attention_fn(q, k, v, torch.ones(2, 7, dtype=torch.int64, device=DEVICE), backend="fovea")
    computed(0)


# Python's enumerations do not work without their tables, so these cannot be taken away.
TAKEN = [needed for needed in ours._NEEDED if not needed.name.endswith("_")]


@pytest.mark.parametrize("needed", TAKEN, ids=lambda needed: needed.name)
def test_without_a_name_it_is_not_registered(needed, monkeypatch):
    fovea.integrations.uninstall("diffusers")
    if needed.name == "AttentionBackendName.NATIVE":  # which Python's enumerations do not let go
        monkeypatch.setattr(dispatch, "AttentionBackendName", type("Names", (), {}))
    else:
        taken_away(needed, monkeypatch)
    with pytest.raises(ImportError, match=f"needs diffusers from 0.35 on: {needed.module} has no {needed.name}$"):
        ours.register()
    monkeypatch.undo()
    assert "fovea" not in {x.value for x in AttentionBackendName}


def test_with_another_signature_it_is_not_registered(monkeypatch):
    fovea.integrations.uninstall("diffusers")
    monkeypatch.setattr(dispatch._AttentionBackendRegistry, "register", lambda name, checks: None)
    with pytest.raises(ImportError, match="_AttentionBackendRegistry.register has no parameter backend$"):
        ours.register()
    assert "fovea" not in {x.value for x in AttentionBackendName}


def test_uninstalled():
    """Names are gone, and back; the backend of a program that used fovea's is diffusers' own again."""
    assert AttentionBackendName("fovea") is AttentionBackendName.FOVEA
    assert AttentionBackendName.FOVEA in list(AttentionBackendName)
    model, arguments = flux()
    model.set_attention_backend("fovea")
    fovea.integrations.uninstall("diffusers")
    with torch.no_grad():
        model(**arguments)
    computed(2)  # the model keeps what it was told
    dispatch_attention_fn(*tensors())
    computed(0)
    assert not hasattr(AttentionBackendName, "FOVEA") and "fovea" not in {x.value for x in AttentionBackendName}
    with pytest.raises(ValueError, match="fovea"):
        model.set_attention_backend("fovea")
    fovea.integrations.uninstall("diffusers")
    fovea.integrations.install("diffusers")
    fovea.integrations.install("diffusers")
    assert [x.value for x in AttentionBackendName].count("fovea") == 1
    model.set_attention_backend("fovea")
