# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="fovea": tiny random models of transformers, each beside "eager" and "sdpa": results and every
parameter's gradient, plain, padded on either side and packed, and the calls that fovea computed counted.

With FOVEA_TEST_DEVICE=cuda they run on a GPU, with FOVEA_TEST_DTYPE=bfloat16 in another type. `make test-models` sets
FOVEA_ALL_MODELS, with which every model and variant is compiled, too.
"""

import ast
import inspect
import os
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("python", "tests/models")]
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import masking_utils  # noqa: E402

import fovea.integrations  # noqa: E402
from without import taken_away  # noqa: E402
from fovea.integrations import transformers as ours  # noqa: E402

DEVICE = os.environ.get("FOVEA_TEST_DEVICE", "cpu")
DTYPE = getattr(torch, os.environ.get("FOVEA_TEST_DTYPE", "float32"))
ALL_MODELS = os.environ.get("FOVEA_ALL_MODELS") == "1"
LENGTH = 20

ours.register()

DECODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
           "vocab_size": 99, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
           "max_position_embeddings": 256, "pad_token_id": 0}
VISION = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
# All experts: in 16 bits rounding would choose others for some tokens (test_what_chooses_experts).
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
SLIDING = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
          "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
          "first_k_dense_replace": 1}
ALL = ("plain", "right", "left", "packed")
PADDED = ("plain", "right", "left")

# name: (class, configuration, its arguments, calls of attention in a step, variants)
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, 4, ALL),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**DECODER, **SLIDING}, 4, ALL),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**DECODER, **SLIDING, **QWEN_EXPERTS}, 4, ALL),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 16}, 4, ALL),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 5}, 4, ALL),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {**DECODER, "sliding_window": 5, **EXPERTS}, 4, ALL),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16,
                                                     "attn_logit_softcapping": 2.0}, 4, ALL),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**DECODER, "head_dim": 16, "sliding_window": 5,
                                                         "query_pre_attn_scalar": 16}, 4, ALL),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**DECODER, "head_dim": 16, "sliding_window": 5, **EXPERTS}, 4, ALL),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {**DECODER, "head_dim": 16, "attention_chunk_size": 8,
                                                         "intermediate_size_mlp": 96, **EXPERTS}, 4, ALL),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", {**DECODER, **LATENT}, 4, ALL),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 99, "n_positions": 256,
                                               "bos_token_id": 1, "eos_token_id": 2}, 2, PADDED),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER, 2, PADDED),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", {**ENCODER, "local_attention": 8, "global_attn_every_n_layers": 2}, 2, PADDED),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4,
                                                      "vocab_size": 99, "decoder_start_token_id": 0, "dropout_rate": 0.0}, 6,
           ("plain", "right")),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, 2, ("plain",)),
    "swin": ("SwinForImageClassification", "SwinConfig", {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2],
                                                          "num_heads": [2, 4], "window_size": 4}, 4, ("plain",)),
    "clip": ("CLIPModel", "CLIPConfig", {
        "text_config": {**ENCODER, "projection_dim": 32, "eos_token_id": 2, "bos_token_id": 1},
        "vision_config": {**VISION, "projection_dim": 32}, "projection_dim": 32}, 4, ("plain",)),
    "beit": ("BeitForImageClassification", "BeitConfig", {**VISION, "use_relative_position_bias": True}, 2, ("plain",)),
    "doge": ("DogeForCausalLM", "DogeConfig", {**DECODER, "sliding_window": 5}, 4, ALL),
}  # fmt: skip
REFUSED_BY_SDPA = ("gemma2", "gpt_oss")
WINDOWS = ("qwen2", "qwen2_moe", "mistral", "phimoe", "gemma2", "gemma3", "gpt_oss", "modernbert")

# What older versions lack, of which docs/integrations/transformers.md says so.
TRANSFORMERS = tuple(int(part) for part in transformers.__version__.split(".")[:2])
older_transformers = pytest.mark.skipif(TRANSFORMERS < (5, 23), reason=f"transformers {transformers.__version__}: before 5.23")
older_torch = pytest.mark.skipif(tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14), reason=(
    f"PyTorch {torch.__version__}: before 2.14 torch.compile does not look into the closures that windows are told by"))  # fmt: skip


def model_of(name, implementation, dtype=DTYPE, **more):
    kind, config, arguments, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)._from_config(
        getattr(transformers, config)(**{**arguments, **more}), attn_implementation=implementation)
    model = model.float().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for attribute in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    model.config.layerdrop = 0.0
    model.config.use_cache = False
    torch.manual_seed(5)
    for parameter in model.parameters():  # so that sinks, tables of positions and the like are not 0
        parameter.data.add_(torch.randn(parameter.shape) * 0.05)
    return model.to(DEVICE, dtype)


def inputs_of(name, variant):
    """Arguments of the model, and which of its results count: those of padding do not."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(3, 3, 32, 32, generator=generator)
    if name in ("vit", "swin", "beit"):
        return {"pixel_values": pixels}, None
    ids = torch.randint(3, 99, (3, LENGTH), generator=generator)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    if variant == "packed":
        positions = torch.cat([torch.arange(7), torch.arange(9), torch.arange(4)])[None]
        return {"input_ids": ids[:1], "position_ids": positions}, None
    keep = mask.bool()
    if variant == "right":
        mask[1, 13:] = 0
        keep = mask.bool()
    elif variant == "left":
        mask[1, :7] = 0
        keep = mask.bool()
    arguments = {"input_ids": ids, "attention_mask": mask}
    if name == "t5":
        arguments["labels"] = torch.randint(3, 99, (3, 11), generator=generator)
        keep = None
    if name == "clip":
        arguments.update(pixel_values=pixels, return_loss=True)
        keep = None
    return arguments, keep


def step(model, arguments, keep):
    arguments = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    if "pixel_values" in arguments:
        arguments["pixel_values"] = arguments["pixel_values"].to(next(model.parameters()).dtype)
    out = model(**arguments)
    out = getattr(out, "logits", None) if getattr(out, "logits", None) is not None else out.logits_per_text
    out = out if keep is None else out[keep.to(DEVICE)]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, out.dtype)
    (out * weights).mean().backward()
    return {"out": out.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def error(got, want):
    """Of each, relative to its largest element, or to a thousandth of the largest of all: some gradients are 0."""
    floor = 1e-3 * max(x.abs().max().item() for x in want.values())
    return {n: ((got[n].double() - x.double()).abs().max() / max(x.abs().max().item(), floor)).item() for n, x in want.items()}


def of_sdpa(name, arguments, keep, exact):
    """How far "sdpa" is from eager in float32; "eager" in this type where a model refuses sdpa: None in float32."""
    if name not in REFUSED_BY_SDPA:
        return error(step(model_of(name, "sdpa"), arguments, keep), exact)
    if TRANSFORMERS >= (5, 23):  # before, sdpa left Gemma 2's softcap out
        with pytest.raises(ValueError):
            model_of(name, "sdpa")
    return None if DTYPE == torch.float32 else error(step(model_of(name, "eager"), arguments, keep), exact)


def close_as_sdpa(mine, theirs):
    """The largest error of one tensor is chance, so each may be five times sdpa's and the middle one may not."""
    if theirs is None:
        assert max(mine.values()) <= (1e-5 if DEVICE == "cpu" else 1e-4), mine
        return
    middle = sorted(theirs.values())[len(theirs) // 2]
    # Roundings; sdpa makes none where it computes as eager does (BEiT, Doge).
    least = 1e-4 if DEVICE != "cpu" else 2e-6 if DTYPE == torch.float32 else 0.0
    for parameter in theirs:
        allowed = 5 * max(theirs[parameter], middle) + least
        assert mine[parameter] <= allowed, f"{parameter}: {mine[parameter]:.3g} of {allowed:.3g}"
    assert sorted(mine.values())[len(mine) // 2] <= 1.5 * middle + least / 2


@pytest.mark.parametrize("name, variant", [(name, variant) for name in MODELS for variant in MODELS[name][4]])
def test_model(name, variant):
    if name == "phimoe" and DTYPE != torch.float32:
        pytest.skip("Phi-MoE's weights of experts jump at a threshold, which rounding crosses: test_what_chooses_experts")
    arguments, keep = inputs_of(name, variant)
    exact = step(model_of(name, "eager", torch.float32), arguments, keep)
    fovea.integrations.reset_stats()
    got = step(model_of(name, "fovea"), arguments, keep)
    seen = fovea.integrations.stats()
    assert seen == {"transformers": {"served": MODELS[name][3], "traced": 0, "handed_back": {}}}
    assert got.keys() == exact.keys()
    mine, theirs = error(got, exact), of_sdpa(name, arguments, keep, exact)
    close_as_sdpa(mine, theirs)
    beside = "sdpa refuses it" if theirs is None or name in REFUSED_BY_SDPA else f"sdpa's {max(theirs.values()):.2g}"
    print(f"{name}, {variant}: {len(exact)} tensors, the largest error {max(mine.values()):.2g}, {beside}")


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize("name, experts, chosen", [("gpt_oss", 2, 1), ("gpt_oss", 4, 2), ("phimoe", 2, 2)])
def test_what_chooses_experts(name, experts, chosen, variant):
    """Models with a choice, in bf16. One token that gets another expert than in float32, as two scores are nearly equal, moves
    the result by ten times what rounding does, with eager as well; so does one whose weights cross Phi-MoE's threshold. So the
    layers are compared up to the first such token: the input of each router is as close to float32 as eager's, and a result that
    is not has such a token before it."""
    arguments, keep = inputs_of(name, variant)

    def run(implementation, dtype):
        model = model_of(name, implementation, dtype, num_local_experts=experts, num_experts_per_tok=chosen)
        hidden, choices = [], []

        def look(module, given, results):
            _, weights, indices = results
            hidden.append(given[0].detach().double().flatten(0, -2))
            choices.append(torch.zeros(len(weights), experts, device=DEVICE).scatter(1, indices, weights.detach().float()))

        for module in model.modules():
            if type(module).__name__ in ("GptOssTopKRouter", "PhimoeTopKRouter"):
                module.register_forward_hook(look)
        out = step(model, arguments, keep)
        assert len(hidden) == MODELS[name][3]
        real = torch.ones(len(hidden[0]), dtype=torch.bool) if keep is None else keep.flatten()
        real = real.to(DEVICE)
        return out, [x[real] for x in hidden], [x[real] for x in choices]

    exact, exact_hidden, exact_choices = run("eager", torch.float32)
    runs = {how: run(how, torch.bfloat16) for how in ("eager", "fovea")}
    others = {how: [int(((x - y).abs() > 0.1).any(-1).sum()) for x, y in zip(found[2], exact_choices)] for how, found in runs.items()}
    before = {how: next((at for at, count in enumerate(counts) if count), len(counts)) for how, counts in others.items()}
    for at in range(min(min(before.values()) + 1, len(exact_hidden))):
        mine, theirs = ((runs[how][1][at] - exact_hidden[at]).abs().max() for how in ("fovea", "eager"))
        assert mine <= 3 * theirs, f"layer {at}: {mine:.3g} of {3 * theirs:.3g}"
    mine, theirs = (error(runs[how][0], exact)["out"] for how in ("fovea", "eager"))
    assert mine <= 0.1 or before["fovea"] < len(exact_hidden), f"{mine:.3g}, and every token has its experts"
    print(f"{name}, {variant}, {chosen} of {experts}: tokens of each layer with other experts {others}, errors {mine:.2g}, eager's {theirs:.2g}")


# ---- the mask function ----


def mask_of(name, variant, **more):
    """The masks that the layers get."""
    found = []
    model = model_of(name, "fovea", **more)
    real = ours._attention

    def look(module, query, key, value, attention_mask, *rest, **options):
        found.append(attention_mask)
        return real(module, query, key, value, attention_mask, *rest, **options)

    transformers.modeling_utils.AttentionInterface.register("fovea", look)
    try:
        arguments, keep = inputs_of(name, variant)
        step(model, arguments, keep)
    finally:
        ours.register()
    return found


@pytest.mark.parametrize("name, variant, patterns", [
    ("llama", "plain", {(True, -1, False, False)}),
    ("llama", "right", {(True, -1, True, False)}),
    pytest.param("llama", "packed", {(True, -1, False, True)}, marks=older_transformers),
    ("qwen2", "plain", {(True, -1, False, False), (True, 5, False, False)}),
    ("mistral", "left", {(True, 5, True, False)}),
    ("bert", "right", {(False, -1, True, False)}),
    ("modernbert", "plain", {(False, -1, False, False), (False, 4, False, False)}),
])  # fmt: skip
def test_patterns(name, variant, patterns):
    """No mask is made: the layers get the pattern, in a view of no more memory than the padding."""
    found = mask_of(name, variant)
    seen = set()
    for mask in found:
        assert mask.dim() == 5 and mask.stride(4) == 0 and mask.untyped_storage().nbytes() <= 3 * LENGTH * 8
        pattern, padded = ours._read(mask)
        seen.add((pattern.causal, pattern.window, padded, pattern.documents is not None))
    assert seen == patterns


@pytest.mark.parametrize("name", ["llama4", "doge", "beit"])
def test_masks_in_full(name):
    """Chunks are no pattern that fovea has; some models change their masks."""
    masks = [mask for mask in mask_of(name, "plain") if mask is not None]
    assert any(mask.dim() == 4 for mask in masks)


def test_without_the_mask_function_it_is_wrong():
    """The attention function alone would get no mask at all."""
    arguments, keep = inputs_of("mistral", "right")
    want = step(model_of("mistral", "eager"), arguments, keep)
    mapping = transformers.masking_utils.AttentionMaskInterface._global_mapping
    taken = mapping.pop("fovea")
    try:
        got = step(model_of("mistral", "fovea"), arguments, keep)
    finally:
        mapping["fovea"] = taken
    assert error(got, want)["out"] > 0.01


def test_a_mask_that_a_model_changed_is_refused():
    mask = torch.ones((), dtype=torch.bool).expand(2, 1, 1, 9, ours._coded(ours._Pattern(True, -1), False))
    q = torch.randn(2, 2, 9, 8)
    for changed in (1.0 - mask.float(), mask & torch.ones(9, mask.shape[4], dtype=torch.bool).tril(), mask.expand(2, 3, 1, 9, -1)):
        with pytest.raises(NotImplementedError, match="this model changed a mask that fovea made"):
            ours._attention(None, q, q, q, changed)
    copied = mask.contiguous()
    assert torch.equal(ours._attention(None, q, q, q, copied)[0], ours._attention(None, q, q, q, mask)[0])


def test_keywords_that_carry_a_mask_or_a_sink_are_refused():
    q = torch.randn(2, 2, 9, 8)
    for name in ours._REFUSED:
        with pytest.raises(NotImplementedError, match=f"^{name}: given"):
            ours._attention(None, q, q, q, None, **{name: torch.zeros(1)})
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    bias = {"position_bias": torch.zeros(1, 2, 9, 9), "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    code = ours._coded(ours._Pattern(True, -1), False)
    for mask in (None, torch.ones((), dtype=torch.bool).expand(2, 1, 1, 9, code)):
        with pytest.raises(NotImplementedError, match="^cu_seq_lens_q: given with position_bias"):
            ours._attention(None, q, q, q, mask, **bias)
    documents = torch.tensor([[0] * 4 + [1] * 5] * 2, dtype=torch.int32)[:, None, None, :, None].expand(2, 1, 1, 9, code)
    assert torch.equal(ours._attention(None, q, q, q, documents, **bias)[0],  # which say the same
                       ours._attention(None, q, q, q, documents, position_bias=bias["position_bias"])[0])  # fmt: skip


def test_documents_and_the_last_queries_alone():
    """As models compute that keep the last logits only; and batches of one key, and of nothing."""
    q, documents = torch.randn(1, 2, 9, 8), torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]], dtype=torch.int32)
    code = ours._coded(ours._Pattern(True, -1), False)
    mask = documents[:, None, None, :, None].expand(1, 1, 1, 9, code)
    whole = ours._attention(None, q, q, q, mask)[0]
    torch.testing.assert_close(ours._attention(None, q[:, :, -3:], q, q, mask)[0], whole[:, -3:])
    two = torch.cat([q, q.flip(1)])
    torch.testing.assert_close(ours._attention(None, two, q, q, None)[0], ours._attention(None, two, *[q.expand(2, -1, -1, -1)] * 2, None)[0])
    assert ours._attention(None, q[:0], q[:0], q[:0], mask[:0])[0].shape == (0, 9, 2, 8)


@pytest.mark.parametrize("kind, config, arguments", [
    ("MptForCausalLM", "MptConfig", {"d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 99, "max_seq_len": 256}),
    ("BloomForCausalLM", "BloomConfig", {"hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 99}),
])  # fmt: skip
def test_models_that_compute_attention_themselves(kind, config, arguments):
    model = getattr(transformers, kind)._from_config(getattr(transformers, config)(**arguments), attn_implementation="fovea")
    with pytest.raises(NotImplementedError, match=r'computes attention by itself.*accepted: attn_implementation="eager"'):
        model(input_ids=torch.arange(8)[None])


MODELING = sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"))
MAKES_MASKS = re.compile(r"\bcreate_\w*mask\w*\(|\bcreate_masks_for_generate\(")


def test_every_modeling_file():
    """A model that makes masks by transformers' functions either calls the interface, holds a model that does, or is refused:
    nothing else may get a descriptor."""
    kinds = {"calls": 0, "holds": 0, "refused": 0}
    for path in MODELING:
        text = path.read_text()
        if "masking_utils" not in text or not MAKES_MASKS.search(text):
            continue
        kind = "calls" if "ALL_ATTENTION_FUNCTIONS" in text else "holds" if "_supports_attention_backend = True" in text else "refused"
        kinds[kind] += 1
        if kind == "holds":  # nothing that weights keys may be in it
            assert "softmax(" not in text and "torch.matmul(" not in text, path
    print(f"{len(MODELING)} modeling files: {kinds}")
    assert kinds["calls"] > 200 and 0 < kinds["holds"] < 12 and kinds["refused"] > 20


# Of no effect on which keys a query sees: positions are in the embeddings already.
HARMLESS = {"position_ids", "deterministic"}
# They keep the last queries alone where a mask allows it (gemma4), or make their mask of numbers instead of bools (glm5_next).
SDPA_ALONE = {"gemma4", "gemma4_unified", "glm5_next"}


def test_every_keyword_of_the_interface_is_known():
    """What a model hands to the attention function, and models that put a choice of keys into the mask for eager and sdpa alone: they
    hand it over for others, and that is refused."""
    known = set(inspect.signature(ours._attention).parameters) | HARMLESS | set(ours._REFUSED)
    calls = 0
    for path in MODELING:
        text = path.read_text()
        if "ALL_ATTENTION_FUNCTIONS" not in text:
            continue
        handed = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith(("attention_interface", "attn_interface")):
                calls += 1
                words = {word.arg for word in node.keywords if word.arg}
                assert words <= known, (path, ast.unparse(node))
                handed |= words & set(ours._REFUSED)
        if re.search(r"_attn_implementation in \(.*\"sdpa\"", text):
            assert handed, path
        if re.search(r"_attn_implementation == \"sdpa\"", text):
            assert path.parent.name in SDPA_ALONE, path
    print(f"{calls} calls of the interface")
    assert calls > 300


@older_transformers
@pytest.mark.parametrize("name", [
    "causal_mask_function", "bidirectional_mask_function", "sliding_window_causal_mask_function", "prepare_padding_mask",
    "sliding_window_bidirectional_mask_function", "packed_sequence_compatibility_function", "sdpa_mask"])
def test_private_names(name):
    """Of masking_utils, as of transformers 5.23."""
    assert callable(getattr(masking_utils, name))


@pytest.mark.parametrize("needed", ours._NEEDED, ids=lambda needed: needed.name)
def test_without_a_name_it_is_not_registered(needed, monkeypatch):
    """A sentence at register(), not an error of a model; where FOVEA_TORCH is set, a warning."""
    taken_away(needed, monkeypatch)
    why = f"{needed.module} has no {needed.name}$"
    if needed.name.endswith(".register"):  # every abstract class has a method of this name; both classes inherit theirs
        why = r"transformers\.\w+\.Attention\w*Interface.register does not take 2 arguments$"
    with pytest.raises(ImportError, match=f"needs transformers from 5.4 on: {why}"):
        ours.register("another")
    with pytest.warns(UserWarning, match=f"FOVEA_TORCH: fovea.integrations.transformers needs .*{why}"):
        fovea.integrations._register()
    assert "another" not in transformers.modeling_utils.AttentionInterface._global_mapping


def test_an_older_transformers_is_not_registered(monkeypatch):
    """Before 5.4 mask functions got a cache_position."""
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(ImportError, match="needs transformers from 5.4 on: .*sdpa_mask has no parameter q_length$"):
        ours.register()


@older_transformers
def test_patterns_by_name():
    """What the names of closures are read for."""
    documents = torch.zeros(1, 4, dtype=torch.long)
    window = masking_utils.sliding_window_causal_mask_function(7)
    both = masking_utils.packed_sequence_compatibility_function(window, documents, documents)
    read = lambda function: ours._pattern(function, masking_utils)  # noqa: E731
    assert read(window) == (True, 7, None)
    assert read(masking_utils.sliding_window_bidirectional_mask_function(7)) == (False, 7, None)
    assert read(both)[:2] == (True, 7) and read(both).documents is documents
    chunked = masking_utils.chunked_causal_mask_function(3, torch.zeros(1, dtype=torch.long))
    for other in (chunked, masking_utils.or_masks(window, chunked), lambda *_: True,
                  masking_utils.and_masks(chunked, masking_utils.causal_mask_function)):
        assert read(other) is None


# ---- what programs do ----


GENERATE = [name for name in MODELS if "CausalLM" in MODELS[name][0] or name in ("gpt2", "t5")]
LATER = ("llama4", "t5")  # set_attn_implementation() did not reach T5's parts, Llama 4 did not run with a static cache


def generated(name, implementations, cache, **options):
    """What each implementation generates for a padded batch; what fovea counted."""
    model = model_of(name, "eager").eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    if name != "t5":  # which reads with an encoder
        mask = mask.flip(1)
    found = {}
    for implementation in implementations:
        if implementation == "sdpa" and name in REFUSED_BY_SDPA:
            continue
        model.set_attn_implementation(implementation)
        fovea.integrations.reset_stats()
        with torch.no_grad():
            found[implementation] = model.generate(
                ids, attention_mask=mask, max_new_tokens=10, do_sample=False, cache_implementation=cache, use_cache=True,
                return_dict_in_generate=True, output_logits=True, **options[implementation])
    return found, fovea.integrations.stats()


def the_same_tokens(found):
    """And logits as close to eager's as sdpa's are. In 16 bits two tokens may be as likely: up to the first other one."""
    want, got = found["eager"], found["fovea"]
    same = (want.sequences == got.sequences).all(0)[-len(want.logits) :]
    assert DTYPE != torch.float32 or same.all()
    steps = len(want.logits) if same.all() else int(same.int().argmin()) + 1
    errors = {how: max((x.double() - y.double()).abs().max().item() for x, y in list(zip(of.logits, want.logits))[:steps])
              for how, of in found.items() if how == "fovea" or DTYPE == torch.float32}  # fmt: skip
    largest = max(x.abs().max().item() for x in want.logits)
    rounding = 0.03 if DTYPE != torch.float32 else 2e-6 if DEVICE == "cpu" else 1e-4
    assert errors["fovea"] <= 3 * errors.get("sdpa", 0.0) + rounding * largest, errors


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=older_transformers) if name in LATER else name for name in GENERATE])
def test_generation(name, cache):
    """The same tokens as eager, with a padded batch, and logits as close to its own as sdpa's."""
    options = {"disable_compile": True}
    found, seen = generated(name, ("eager", "sdpa", "fovea"), cache, eager=options, sdpa=options, fovea=options)
    calls = 2 + 4 * 10 if name == "t5" else MODELS[name][3] * 10
    assert seen == {"transformers": {"served": calls, "traced": 0, "handed_back": {}}}
    the_same_tokens(found)


# Llama 4's cache cannot be compiled.
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=older_transformers) if name in LATER else name
    for name in GENERATE if (name != "llama4" if ALL_MODELS else name in ("llama", "gpt_oss", "t5"))])  # fmt: skip
def test_compiled_generation(name):
    """generate() compiles the steps after the first one as one graph each. It does so on a GPU; here it is told to."""
    torch._dynamo.reset()
    how = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    how._compile_all_devices = True
    options = {"eager": {"disable_compile": True}, "fovea": {"compile_config": how}}
    found, seen = generated(name, ("eager", "fovea"), "static", **options)
    step = 4 if name == "t5" else MODELS[name][3]  # of a decoder
    seen = seen["transformers"]
    assert seen["served"] == step + 2 * (name == "t5")  # the first step, and T5's encoder
    assert seen["traced"] in (step, 2 * step) and seen["handed_back"] == {}
    the_same_tokens(found)


# What cannot be compiled with any implementation: Doge's gradient (softplus_backward, PyTorch 2.15); as one graph, T5 and DeepSeek-V3
# before transformers 5.23.
@pytest.mark.parametrize("name, variant", [
    pytest.param(name, variant, marks=[older_torch] * (name in WINDOWS) + [older_transformers] * (name in ("deepseek_v3", "t5")))
    for name in MODELS if name != "doge"
    for variant in (MODELS[name][4] if ALL_MODELS or name in ("llama", "qwen2") else MODELS[name][4][:1])])  # fmt: skip
def test_compiled(name, variant):
    """One graph, with fovea's operator in it, as close to eager as sdpa is."""
    arguments, keep = inputs_of(name, variant)
    exact = step(model_of(name, "eager", torch.float32), arguments, keep)
    torch._dynamo.reset()
    model = model_of(name, "fovea")
    fovea.integrations.reset_stats()
    got = step(torch.compile(model, backend="aot_eager", fullgraph=True), arguments, keep)
    assert fovea.integrations.stats()["transformers"] == {"served": 0, "traced": MODELS[name][3], "handed_back": {}}
    got = {n.removeprefix("_orig_mod."): x for n, x in got.items()}
    assert got.keys() == exact.keys()
    if name != "phimoe" or DTYPE == torch.float32:  # test_model says why
        close_as_sdpa(error(got, exact), of_sdpa(name, arguments, keep, exact))


def test_packed_by_keywords():
    """cu_seq_lens_q and so on, as a collator for flash_attention gives them."""
    arguments, _ = inputs_of("mistral", "packed")
    want = step(model_of("mistral", "eager"), arguments, None)
    offsets = torch.tensor([0, 7, 16, 20], dtype=torch.int32, device=DEVICE)
    fovea.integrations.reset_stats()
    got = step(model_of("mistral", "fovea"), {
        **arguments, "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 9, "max_length_k": 9}, None)
    assert fovea.integrations.stats()["transformers"]["served"] == 4
    assert max(error(got, want).values()) < (1e-4 if DTYPE == torch.float32 else 0.1)


def test_attention_weights_are_warned_of(monkeypatch):
    monkeypatch.setattr(ours, "_warned", False)
    arguments, _ = inputs_of("bert", "plain")
    model = model_of("bert", "fovea")
    with pytest.warns(UserWarning, match=r'returns no attention weights.*"eager"'):
        model(**{n: x.to(DEVICE) for n, x in arguments.items()}, output_attentions=True)


def test_what_is_refused_by_name():
    q = torch.randn(1, 2, 4, 8)
    for name, value in (("cache", object()), ("head_mask", q)):
        with pytest.raises(NotImplementedError, match=f"^{name}: "):
            ours._attention(None, q, q, q, None, **{name: value})
    with pytest.raises(NotImplementedError, match="attention_mask: 2 dimensions"):
        ours._attention(None, q, q, q, torch.ones(1, 4, dtype=torch.bool))
