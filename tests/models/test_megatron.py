# SPDX-License-Identifier: Apache-2.0
"""CoreAttention in Megatron-Core's own models, beside its DotProductAttention: losses and every gradient. Megatron makes
tensors on the current GPU whatever its inputs; on the CPU torch.cuda.current_device() says "cpu", and so do its two functions that
make masks."""

import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("python", "tests/models")]
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))

import torch  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it says that Transformer Engine and Apex are not there
    from megatron.core import parallel_state, tensor_parallel  # noqa: E402
    from megatron.core.fusions import fused_softmax  # noqa: E402
    from megatron.core.models.gpt import GPTModel  # noqa: E402
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
    from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
    from megatron.core.transformer import TransformerConfig  # noqa: E402
    from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402

import fovea.integrations  # noqa: E402
from fovea.integrations import megatron as integration  # noqa: E402
from without import taken_away  # noqa: E402
from fovea.integrations.megatron import CoreAttention  # noqa: E402

DEVICE = os.environ.get("FOVEA_TEST_DEVICE", "cpu")
ROWS, BATCH, VOCABULARY = 12, 2, 96


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", world_size=1, rank=0)
    parallel_state.initialize_model_parallel()
    if DEVICE == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    torch.manual_seed(0)
    fovea.integrations.reset_stats()
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
        monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext))
        monkeypatch.setattr(fused_softmax, "get_default_causal_mask", lambda sq: torch.ones(sq, sq).triu(1).bool())
        monkeypatch.setattr(
            fused_softmax, "get_sliding_window_causal_mask",
            lambda sq, sk, window: ~torch.ones(sq, sk).bool().triu(sk - sq - window[0]).tril(sk - sq + window[1]),
        )  # fmt: skip
    yield
    fovea.integrations.uninstall("megatron")


def computed(calls):
    seen = fovea.integrations.stats().get("megatron", {"served": 0})
    assert seen["served"] == calls, seen
    fovea.integrations.reset_stats()


def gpt(core, **changed):
    """A model of two layers whose core_attention is `core`, or what Megatron's specification says."""
    sizes = {
        "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "use_cpu_initialization": DEVICE == "cpu", "attention_softmax_in_fp32": True, "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "add_bias_linear": False, **changed,
    }  # fmt: skip
    config = TransformerConfig(num_query_groups=2, **sizes)
    spec = get_gpt_layer_local_spec()
    if core is not None:
        spec.submodules.self_attention.submodules.core_attention = core
    torch.manual_seed(0)
    model = GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=64, position_embedding_type="rope")
    for name, parameter in model.named_parameters():
        if name.endswith("softmax_offset"):
            torch.nn.init.normal_(parameter)
    return model.to(DEVICE)


def tokens(*shape):
    return torch.randint(VOCABULARY, shape, device=DEVICE)


def step(model, ids, mask, **options):
    positions = torch.arange(ids.shape[1], device=DEVICE).expand_as(ids)
    loss = model(ids, positions, mask, labels=ids.roll(-1, 1), **options)
    loss.sum().backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def compare(got, want):
    assert got.keys() == want.keys() and len(got) > 10
    for name, tensor in want.items():
        difference = (got[name] - tensor).abs().max() / tensor.abs().max()
        assert difference < 1e-4, f"{name}: {difference:.2g}"


def documents():
    """Two documents in each row: a causal mask that ends at their borders."""
    number = torch.arange(ROWS, device=DEVICE) >= 5
    return ~((number[:, None] == number) & torch.ones(ROWS, ROWS, device=DEVICE).tril().bool())[None, None]


@pytest.mark.parametrize("changed", [
    {}, {"window_size": (3, 0)}, {"window_size": (3, 0), "window_attn_skip_freq": 2}, {"apply_query_key_layer_scaling": True},
    {"softmax_type": "learnable"}, {"recompute_granularity": "selective"},
], ids=lambda x: ",".join(x))  # fmt: skip
def test_gpt(changed):
    if "recompute_granularity" in changed and DEVICE == "cpu":
        pytest.skip("Megatron's checkpointing keeps the state of a GPU's generator: FOVEA_TEST_DEVICE=cuda")
    theirs, ours = gpt(DotProductAttention, **changed), gpt(CoreAttention, **changed)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    ids = tokens(BATCH, ROWS)
    want = step(theirs, ids, None)
    computed(0)
    compare(step(ours, ids, None), want)
    computed(4 if "recompute_granularity" in changed else 2)


def test_a_mask_of_documents():
    theirs, ours = gpt(DotProductAttention), gpt(CoreAttention)
    ids = tokens(BATCH, ROWS)
    compare(step(ours, ids, documents()), step(theirs, ids, documents()))
    computed(2)


def test_packed_documents():
    """One row of packed sequences is what the mask of the documents gives. Megatron's own layer has no packed form."""
    theirs, ours = gpt(DotProductAttention), gpt(CoreAttention)
    ids = tokens(1, ROWS)
    starts = torch.tensor([0, 5, ROWS], dtype=torch.int32, device=DEVICE)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=7, max_seqlen_kv=7)
    got = step(ours, ids, None, packed_seq_params=packed)
    computed(2)
    # Positions start again in each packed document; rotations are relative, so the rows are the same.
    compare(got, step(theirs, ids, documents()))


def test_install():
    """Megatron's specifications of local layers then have it."""
    fovea.integrations.install("megatron")
    assert isinstance(gpt(None).decoder.layers[0].self_attention.core_attention, CoreAttention)
    fovea.integrations.uninstall("megatron")
    assert isinstance(gpt(None).decoder.layers[0].self_attention.core_attention, DotProductAttention)


@pytest.mark.parametrize("needed", integration._NEEDED, ids=lambda needed: needed.name)
def test_without_a_name_nothing_is_patched(needed, monkeypatch):
    """Nor where a function lacks a parameter that fovea gives it, as before 0.16."""
    changes = [taken_away]
    if needed.parameters:
        changes.append(lambda needed, patch: patch.setattr(sys.modules[needed.module], needed.name, lambda state_dict, prefix: None))
    for change, why in zip(changes, (f"has no {needed.name}$", f"{needed.name} has no parameter {needed.parameters[:1] and needed.parameters[0]}$")):
        with monkeypatch.context() as patch:
            change(needed, patch)
            with pytest.raises(ImportError, match=f"needs megatron-core from 0.16 on: {needed.module}[ .]{why}"):
                fovea.integrations.install("megatron")
        assert isinstance(gpt(None).decoder.layers[0].self_attention.core_attention, DotProductAttention)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_an_argument_that_fovea_does_not_know(method, monkeypatch):
    """Megatron would hand it to CoreAttention."""
    monkeypatch.setattr(DotProductAttention, method, lambda self, query, new_argument=None: None)
    with pytest.raises(ImportError, match="has a parameter (query|new_argument), which fovea does not know$"):
        fovea.integrations.install("megatron")


def test_distributed_checkpoints_of_learned_sinks():
    """Under the names that Megatron's own layer gives them, shared out by heads in the same way."""
    ours, theirs = (gpt(core, softmax_type="learnable").sharded_state_dict() for core in (CoreAttention, DotProductAttention))
    offsets = [name for name in theirs if name.endswith("softmax_offset")]
    assert ours.keys() == theirs.keys() and offsets
    for name in offsets:
        one, other = ours[name], theirs[name]
        assert (one.key, one.global_shape, one.global_offset, one.axis_fragmentations, one.replica_id) == (
            other.key, other.global_shape, other.global_offset, other.axis_fragmentations, other.replica_id)  # fmt: skip
