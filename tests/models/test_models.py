# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries, as they are, with fovea.torch.enable(prefer=None): tiny and random, each result and every
parameter's gradient beside PyTorch's own kernels, and the calls that fovea computed counted.

`make test-models` makes an environment for them, by requirements.txt, and runs them. With FOVEA_TEST_DEVICE=cuda they
run on a GPU.
"""

import os
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

import fovea.torch  # noqa: E402

DEVICE = os.environ.get("FOVEA_TEST_DEVICE", "cpu")
ALL = os.environ.get("FOVEA_ALL_MODELS") == "1"  # none is skipped for want of its library
VOCABULARY = 99


def image():
    return torch.randn(2, 3, 32, 32)


def tokens(length=12):
    return torch.randint(3, VOCABULARY, (2, length))


def padding(length=12):
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, 8:] = 0
    return mask


# Each makes (the model, positional arguments, keyword arguments).


def timm_vit():
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5), (image(),), {}


def timm_beit():
    """A learned bias of relative positions."""
    import timm

    model = timm.create_model("beit_base_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=2,
                              num_classes=5)  # fmt: skip
    return model, (image(),), {}


def timm_swin():
    """A learned bias and a mask of windows."""
    import timm

    timm.layers.set_fused_attn(True, experimental=True)
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(2, 2), num_heads=(2, 4),
                              embed_dim=16, num_classes=5)  # fmt: skip
    return model, (image(),), {}


def timm_eva02():
    import timm

    return timm.create_model("eva02_tiny_patch14_224", img_size=28, depth=2, num_classes=5), (torch.randn(2, 3, 28, 28),), {}


def diffusers_sd3():
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
        joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, out_channels=4,
    )  # fmt: skip
    return model, (), {
        "hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 5, 16),
        "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([1]),
    }  # fmt: skip


def diffusers_unet():
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), block_out_channels=(32, 64), cross_attention_dim=16,
        attention_head_dim=8, norm_num_groups=8, layers_per_block=1,
    )  # fmt: skip
    return model, (torch.randn(1, 4, 8, 8), torch.tensor([1]), torch.randn(1, 5, 16)), {}


def diffusers_flux():
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    return model, (), {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]), "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(8, 3),
    }  # fmt: skip


def of_transformers(kind, config, **sizes):
    import transformers

    configuration = getattr(transformers, config)(vocab_size=VOCABULARY, **sizes)
    configuration._attn_implementation = "sdpa"
    model = getattr(transformers, kind)._from_config(configuration, attn_implementation="sdpa").float().eval()
    model.config.use_cache = False
    return model


def transformers_llama():
    """Grouped heads, a padded batch."""
    model = of_transformers("LlamaForCausalLM", "LlamaConfig", hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    return model, (), {"input_ids": tokens(), "attention_mask": padding()}


def transformers_t5():
    """A learned bias of relative positions, made from an embedding, an encoder and a decoder."""
    model = of_transformers("T5ForConditionalGeneration", "T5Config", d_model=64, d_kv=16, d_ff=96, num_layers=2,
                            num_heads=4, decoder_start_token_id=0)  # fmt: skip
    return model, (), {"input_ids": tokens(), "labels": tokens()}


def litgpt_gpt():
    from litgpt import GPT, Config

    model = GPT(Config(block_size=32, vocab_size=VOCABULARY, n_layer=2, n_head=4, n_query_groups=2, n_embd=64))
    return model, (tokens(),), {}


def torchtune_llama():
    from torchtune.models.llama3 import llama3

    model = llama3(vocab_size=VOCABULARY, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=64, max_seq_len=64)
    return model, (tokens(),), {}


def encoder_and_decoder():
    model = nn.Transformer(32, 4, 2, 2, 64, dropout=0.0, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(9).to(DEVICE)
    return model, (torch.randn(2, 12, 32), torch.randn(2, 9, 32)), {"tgt_mask": causal, "tgt_is_causal": True}


def protein_rows():
    """Attention of the rows of a pair representation: five dimensions, one bias for all rows, made by a layer; a mask of
    keys goes into it, as such models do it."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 96)
            self.bias = nn.Linear(16, 4, bias=False)

        def forward(self, pair, exists):
            q, k, v = self.qkv(pair).unflatten(-1, (3, 4, 8)).permute(3, 0, 1, 4, 2, 5)  # (B, N, H, N, 8)
            bias = self.bias(pair).permute(0, 3, 1, 2).unsqueeze(1)  # (B, 1, H, N, N)
            bias = bias + torch.where(exists, 0.0, -1e9)[:, None, None, None]
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    exists = torch.ones(2, 7, dtype=torch.bool)
    exists[1, 5:] = False
    return Rows(), (torch.randn(2, 7, 7, 16), exists), {}


# How many calls a step makes: a model that fovea does not compute any more is a failure.
MODELS = {
    timm_vit: 2, timm_beit: 2, timm_swin: 4, timm_eva02: 2, diffusers_sd3: 2, diffusers_unet: 8, diffusers_flux: 2,
    transformers_llama: 2, transformers_t5: 6, litgpt_gpt: 2, torchtune_llama: 2, encoder_and_decoder: 6, protein_rows: 1,
}  # fmt: skip


def moved(value):
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def step(model, arguments, keywords, double=False):
    """The result and the gradient of every parameter that has one, by name."""
    if double:
        model = model.double()
        arguments, keywords = (
            [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments],
            {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in keywords.items()},
        )
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    out = model(*arguments, **keywords)
    out = out[0] if isinstance(out, tuple) else getattr(out, "logits", getattr(out, "sample", out))
    weights = torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape).to(out.dtype)
    (out * weights).sum().backward()
    return {"out": out.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def error(got, want):
    """Of each, relative to its largest element, or to a millionth of the largest of all: some gradients are 0."""
    floor = 1e-6 * max(x.abs().max().item() for x in want.values())
    return {
        name: ((got[name].double() - x.double()).abs().max() / max(x.abs().max().item(), floor)).item()
        for name, x in want.items()
    }


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_model(make):
    torch.manual_seed(0)
    try:
        model, arguments, keywords = make()
    except ModuleNotFoundError as missing:
        if ALL:
            raise
        pytest.skip(f"{missing}; `make test-models` installs it")
    model = model.to(DEVICE)
    arguments, keywords = [moved(x) for x in arguments], {name: moved(x) for name, x in keywords.items()}
    theirs = step(model, arguments, keywords)
    with sdpa_kernel(SDPBackend.MATH):
        math = step(model, arguments, keywords)
    fovea.torch.reset_stats()
    with fovea.torch.enabled(prefer=None):
        ours = step(model, arguments, keywords)
    seen = fovea.torch.stats()
    with sdpa_kernel(SDPBackend.MATH):
        exact = step(model, arguments, keywords, double=True)
    assert seen["handed_back"] == {}
    assert seen["served"] == MODELS[make], seen
    assert ours.keys() == exact.keys()
    mine, of_theirs, of_math = (error(x, exact) for x in (ours, theirs, math))
    ratios = []
    for name in exact:
        # As close to the exact numbers as PyTorch's own kernels, which differ from one another: one tensor's largest error is chance.
        pytorchs = max(of_theirs[name], of_math[name])
        allowed = 2 * max(pytorchs, sorted(of_theirs.values())[len(of_theirs) // 2]) + 1e-7
        assert mine[name] <= allowed, f"{name}: {mine[name]:.3g} of {allowed:.3g}"
        ratios.append((mine[name] + 1e-12) / (pytorchs + 1e-12))
    assert statistics.median(ratios) <= 1.25
    print(f"{make.__name__}: {seen['served']} calls, {len(exact)} tensors, median error {statistics.median(ratios):.2f} of PyTorch's; "
          f"the largest {max(mine.values()):.2g}, PyTorch's {max(of_theirs.values()):.2g}, its math path's {max(of_math.values()):.2g}")  # fmt: skip
