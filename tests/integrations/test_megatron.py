# SPDX-License-Identifier: Apache-2.0
"""CoreAttention against the formula, in float64: (S, B, H, D), masks of which True is hidden, biases, windows, sinks, packed
sequences. Megatron's configuration, enumeration and lengths are played here; tests/models/test_megatron.py has its own."""

import enum
import itertools
import sys
import types
from types import SimpleNamespace

import pytest
import torch

import naive
from fovea.integrations import install, megatron, uninstall
from fovea.integrations.megatron import CoreAttention

Kind = enum.Enum("Kind", "padding causal no_mask padding_causal arbitrary causal_bottom_right")
ALIGN = {"causal": "top_left", "padding_causal": "top_left"}


def configuration(**changed):
    plain = {"attention_dropout": 0.0, "num_attention_heads": 4, "tensor_model_parallel_size": 1, "params_dtype": torch.float64,
             "init_method": torch.nn.init.normal_, "perform_initialization": True, "use_cpu_initialization": True,
             "sequence_parallel": False, "context_parallel_size": 1, "window_size": None, "softmax_type": "vanilla"}  # fmt: skip
    return SimpleNamespace(**{**plain, **changed})


def layer(kind=Kind.causal, number=1, scale=None, **changed):
    return CoreAttention(config=configuration(**changed), layer_number=number, attn_mask_type=kind, attention_type="self",
                         softmax_scale=scale, cp_comm_type=None, pg_collection=None)  # fmt: skip


def tensor(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def sequences(sq=5, sk=5, batch=2):
    return tensor(sq, batch, 4, 8), tensor(sk, batch, 2, 8), tensor(sk, batch, 2, 6)


def formula(q, k, v, **options):
    """(S, B, H, D) in, (S, B, H * D) out."""
    return naive.attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)), **options)[0].permute(2, 0, 1, 3).flatten(2)


def compare(got, want, leaves):
    assert got.shape == want.shape and got.is_contiguous()
    weights = torch.randn_like(want)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    mine, theirs = (torch.autograd.grad((x * weights).sum(), leaves) for x in (got, want))
    for one, other in zip(mine, theirs):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind, sq, sk, options", [
    (Kind.causal, 5, 5, {"causal": True}),
    (Kind.causal, 1, 7, {}),
    (Kind.causal_bottom_right, 3, 7, {"causal": True}),
    (Kind.no_mask, 5, 7, {}),
    (Kind.padding, 5, 7, {}),
    (Kind.arbitrary, 5, 7, {}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("given", [False, True])
def test_kinds_of_masks(kind, sq, sk, options, given, computed):
    """Of the layer, and of the call, which comes first."""
    q, k, v = leaves = sequences(sq, sk)
    own = layer(Kind.no_mask if given else kind, scale=0.3)
    compare(own(q, k, v, None, attn_mask_type=kind if given else None), formula(q, k, v, scale=0.3, **options), leaves)
    computed("megatron", 1)


@pytest.mark.parametrize("shape", [(2, 1, 1, 5), (1, 1, 5, 5), (2, 1, 5, 5)])
@pytest.mark.parametrize("kind", [Kind.padding, Kind.padding_causal, Kind.arbitrary, Kind.no_mask])
def test_masks_hide_where_they_are_true(shape, kind, computed):
    q, k, v = leaves = sequences()
    hidden = torch.rand(shape) < 0.4
    want = formula(q, k, v, mask=~hidden, causal=kind == Kind.padding_causal)
    compare(layer(kind)(q, k, v, hidden), want, leaves)
    computed("megatron", 1)


@pytest.mark.parametrize("shape", [(1, 4, 5, 5), (2, 4, 5, 5), (2, 1, 1, 5), (4, 5, 5)])
def test_biases(shape, computed):
    """After the scale, in the shape that they have."""
    q, k, v, bias = leaves = *sequences(), tensor(*shape)
    compare(layer(scale=0.5)(q, k, v, None, attention_bias=bias), formula(q, k, v, bias=bias, scale=0.5, causal=True), leaves)
    computed("megatron", 1)


@pytest.mark.parametrize("skip, windowed", [(None, [1, 2, 3, 4]), (2, [1, 3]), ([1, 0, 0, 1], [1, 4])], ids=str)
def test_windows_of_layers(skip, windowed, computed):
    q, k, v = leaves = sequences(8, 8)
    for number in range(1, 5):
        own = layer(number=number, window_size=(2, 0), window_attn_skip_freq=skip)
        window = (2, 0) if number in windowed else (-1, -1)
        compare(own(q, k, v, None), formula(q, k, v, causal=True, window=window), leaves)
    q, k, v = leaves = sequences(3, 8)
    compare(layer(Kind.no_mask, window_size=(2, 1))(q, k, v, None), formula(q, k, v, window=(2, 1)), leaves)
    computed("megatron", 5)


@pytest.mark.parametrize("masked", [False, True])
def test_sinks(masked, computed):
    """softmax_type: none, of 0, learned by head."""
    q, k, v = leaves = sequences()
    mask = torch.rand(2, 1, 5, 5) < 0.3 if masked else None
    options = {"causal": True, "mask": None if mask is None else ~mask}
    assert layer().softmax_offset is None and layer().state_dict() == {}
    zeros = layer(softmax_type="off-by-one")
    compare(zeros(q, k, v, mask), formula(q, k, v, sink=torch.zeros(4, dtype=torch.float64), **options), leaves)
    assert zeros.state_dict() == {}
    learned = layer(softmax_type="learnable")
    assert list(learned.state_dict()) == ["softmax_offset"]
    compare(learned(q, k, v, mask), formula(q, k, v, sink=learned.softmax_offset, **options), [*leaves, learned.softmax_offset])
    computed("megatron", 2)


def lengths_of(q_lengths, k_lengths, q_spans=None, k_spans=None, longest=True):
    def starts(lengths):
        return lengths and torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)

    return SimpleNamespace(
        qkv_format="thd", cu_seqlens_q=starts(q_lengths), cu_seqlens_kv=starts(k_lengths), cu_seqlens_q_padded=starts(q_spans),
        cu_seqlens_kv_padded=starts(k_spans), max_seqlen_q=max(q_lengths) if longest else None,
        max_seqlen_kv=max(k_lengths) if longest else None, cp_group=None,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [Kind.causal, Kind.padding_causal, Kind.padding, Kind.no_mask, Kind.causal_bottom_right])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("longest", [False, True])
def test_packed_sequences(kind, padded, longest, computed):
    """Each as if it were alone; rows of padding are 0, and get no gradients."""
    q_lengths, k_lengths = [3, 5, 2], [4, 5, 6]
    q_spans, k_spans = ([4, 8, 4], [4, 8, 8]) if padded else (q_lengths, k_lengths)
    q, k, v = leaves = tensor(sum(q_spans), 4, 8), tensor(sum(k_spans), 2, 8), tensor(sum(k_spans), 2, 6)
    outs = []
    for at, (one, two, three) in enumerate(zip(q.split(q_spans), k.split(k_spans), v.split(k_spans))):
        lone = formula(one[: q_lengths[at], None], two[: k_lengths[at], None], three[: k_lengths[at], None],
                       causal="causal" in kind.name, align=ALIGN.get(kind.name, "bottom_right"))  # fmt: skip
        outs.append(torch.nn.functional.pad(lone[:, 0], (0, 0, 0, q_spans[at] - q_lengths[at])))
    params = lengths_of(q_lengths, k_lengths, *((q_spans, k_spans) if padded else ()), longest=longest)
    compare(layer(kind)(q, k, v, None, packed_seq_params=params), torch.cat(outs), leaves)
    dense = layer(kind)(*(x.unsqueeze(1) for x in leaves), None, packed_seq_params=params)
    torch.testing.assert_close(dense, torch.cat(outs))
    computed("megatron", 2)


def test_packed_sequences_with_one_padding_for_queries_and_keys(computed):
    """As Megatron gives them: one tensor for both sides."""
    params = lengths_of([3, 2], [3, 2], [4, 4], [4, 4])
    params.cu_seqlens_kv = params.cu_seqlens_q
    q, k, v = tensor(8, 4, 8), tensor(8, 2, 8), tensor(8, 2, 8)
    got = layer()(q, k, v, None, packed_seq_params=params)
    for first, last in ((0, 3), (4, 6)):
        want = formula(*(x[first:last, None] for x in (q, k, v)), causal=True)[:, 0]
        torch.testing.assert_close(got[first:last], want)
    computed("megatron", 1)


def test_slices_of_one_projection():
    """Queries, keys and values as Megatron's projection has them side by side: their gradients arrive there."""
    mixed = tensor(5, 2, 2, 4 * 8)  # for each group two heads, a key and a value
    q, k, v = mixed.split([16, 8, 8], dim=-1)
    q = q.reshape(5, 2, 4, 8)
    compare(layer()(q, k, v, None), formula(q, k, v, causal=True), [mixed])
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]  # sequences outermost
    compare(layer()(*turned, None), formula(q, k, v, causal=True), [mixed])


def test_dropout(monkeypatch):
    """In training alone; the seed is drawn within the tracker's generator, but not with sequence_parallel."""
    q, k, v = sequences()
    own = layer(attention_dropout=0.5)
    plain = own.eval()(q, k, v, None)
    torch.testing.assert_close(plain, layer()(q, k, v, None))
    own.train()
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(own(q, k, v, None))
    assert torch.equal(*results) and not torch.equal(results[0], plain)

    forks = []

    class Fork:
        def __enter__(self):
            forks.append("fork")

        def __exit__(self, *_):
            pass

    tracker = SimpleNamespace(is_initialized=lambda: True, fork=Fork)
    module = SimpleNamespace(get_cuda_rng_tracker=lambda: tracker)
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel.random", module)
    own(q, k, v, None)
    own.eval()(q, k, v, None)
    layer(attention_dropout=0.5, sequence_parallel=True)(q, k, v, None)
    assert forks == ["fork"]


@pytest.mark.parametrize("rows, batch", [(0, 2), (5, 0)])
def test_nothing_to_attend_to(rows, batch):
    q, k, v = sequences(rows, rows, batch)
    assert layer()(q, k, v, None).shape == (rows, batch, 4 * 6)


def test_what_is_refused():
    q, k, v = sequences(5, 7)
    for name, value in {"context_parallel_size": 2, "qk_clip": True, "log_max_attention_logit": True,
                        "fp8_dot_product_attention": True, "fp8_multi_head_attention": True, "softmax_type": "other"}.items():  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"^CoreAttention: {name}: .*; accepted: "):
            layer(**{name: value})
    with pytest.raises(NotImplementedError, match="^CoreAttention: attn_mask_type: causal with 5 queries and 7 keys"):
        layer()(q, k, v, None)
    with pytest.raises(NotImplementedError, match=r"^CoreAttention: packed_seq_params.qkv_format: 'bshd'; accepted: 'thd'"):
        layer()(q, k, v, None, packed_seq_params=SimpleNamespace(qkv_format="bshd"))
    params = lengths_of([5], [7])
    params.cp_group = "a group"
    with pytest.raises(NotImplementedError, match="^CoreAttention: packed_seq_params.cp_group"):
        layer()(q[:, 0], k[:, 0], v[:, 0], None, packed_seq_params=params)
    # A batch of another size is none of heads.
    for wrong in ((k[:, :1], v[:, :1]), (k.repeat(1, 2, 1, 1)[..., :1, :], v.repeat(1, 2, 1, 1)[..., :1, :])):
        with pytest.raises(ValueError, match="^key: .*the batch of q, 2"):
            layer(Kind.no_mask)(q, *wrong, None)
    for mask in (torch.ones(2, 1, 5, 7), (None, None)):
        with pytest.raises(TypeError, match="^attention_mask: .*accepted: one tensor of bools"):
            layer(Kind.padding)(q, k, v, mask)


def test_specifications_are_patched(monkeypatch):
    with pytest.raises(ImportError, match="install: megatron-core is not installed"):
        install("megatron")
    provider = type("LocalSpecProvider", (), {"core_attention": lambda self: "theirs"})
    contents = {
        "megatron.core.models.backends": {"LocalSpecProvider": provider},
        "megatron.core.transformer.dot_product_attention": {"DotProductAttention": CoreAttention},
        "megatron.core.transformer.utils": {"make_sharded_tensors_for_checkpoint": lambda tp_group, dp_cp_group: None},
        "megatron.core.tensor_parallel.random": {"get_cuda_rng_tracker": lambda: None},
    }
    for name in {".".join(path.split(".")[:n]) for path in contents for n in range(1, 5)}:
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = types.SimpleNamespace(name=name, submodule_search_locations=[])
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    install("megatron")
    install("megatron")
    assert provider().core_attention() is megatron.CoreAttention
    uninstall("megatron")
    assert provider().core_attention() == "theirs"
    del sys.modules["megatron.core.models.backends"].LocalSpecProvider
    with pytest.raises(ImportError, match="needs megatron-core from 0.16 on: megatron.core.models.backends has no LocalSpecProvider"):
        install("megatron")
