# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn, cuEquivariance, DeepSpeed4Science, xFormers and Megatron-Core on CUDA tensors, in bf16, against formulas in float64,
with gradients."""

import enum
import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import ROOT

sys.path.append(str(ROOT / "tests" / "torch"))

import fovea.integrations  # noqa: E402
import naive  # noqa: E402
from fovea.integrations import evoformer, flash_attn, flash_attn_3, flash_attn_4, megatron, triangle, xformers  # noqa: E402

LENGTHS_Q, LENGTHS_K = [130, 0, 77, 256], [200, 64, 77, 100]


def leaves_of(device, *shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.bfloat16).to(device).requires_grad_() for shape in shapes]


def formula(tensors, window, **options):
    """(B, S, H, D) on the CPU in float64; lse (B, H, S)."""
    out, lse = naive.attention(*(x.transpose(1, 2) for x in tensors), window=window, **options)
    return out.transpose(1, 2), lse


def check(got, leaves, want, exact, lse=None):
    weights = torch.randn_like(want)
    found = [got, *torch.autograd.grad((got * weights.to(got)).sum(), leaves)]
    wanted = [want, *torch.autograd.grad((want * weights).sum(), exact, retain_graph=True)]
    for one, other in zip(found, wanted):
        scale = other.abs().max().item()
        assert (one.double().cpu() - other).abs().max().item() <= 0.02 * scale
    if lse is not None:
        torch.testing.assert_close(lse[0].double().cpu(), lse[1], rtol=1e-2, atol=2e-2)


def exact_of(leaves):
    return [x.detach().double().cpu().requires_grad_() for x in leaves]


@pytest.mark.parametrize("version", ["flash_attn", "flash_attn_3", "flash_attn_4"])
@pytest.mark.parametrize("causal, window, softcap", [(False, (-1, -1), 0.0), (True, (-1, -1), 0.0), (True, (64, 0), 5.0), (False, (32, 32), 0.0)])
def test_dense(version, causal, window, softcap, device):
    """256 queries and 200 keys: 56 rows have no key under a causal mask."""
    leaves = leaves_of(device, (2, 256, 4, 64), (2, 200, 2, 64), (2, 200, 2, 64))
    exact = exact_of(leaves)
    fovea.integrations.reset_stats()
    options = {"causal": causal, "softcap": softcap}
    if version == "flash_attn":
        slopes = torch.rand(4)
        out, lse, _ = flash_attn.flash_attn_func(*leaves, window_size=window, alibi_slopes=slopes.to(device),
                                                 return_attn_probs=True, **options)
        want, want_lse = formula(exact, window, alibi_slopes=slopes.double(), **options)
        want_lse = want_lse.masked_fill(want_lse == -math.inf, math.inf)
    elif version == "flash_attn_3":
        out, lse = flash_attn_3.flash_attn_func(*leaves, window_size=window, return_attn_probs=True, **options)
        want, want_lse = formula(exact, window, **options)
    else:
        sink = torch.randn(4).to(device, torch.bfloat16).requires_grad_()
        out, lse = flash_attn_4.flash_attn_func(*leaves, window_size=window, learnable_sink=sink, return_lse=True, **options)
        leaves.append(sink)
        exact.append(sink.detach().double().cpu().requires_grad_())
        want, want_lse = formula(exact[:3], window, sink=exact[3], **options)
    check(out, leaves, want, exact, (lse, want_lse))
    assert fovea.integrations.stats()[version]["served"] == 1


def offsets(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def varlen_formula(tensors, **options):
    parts = zip(tensors[0].split(LENGTHS_Q), tensors[1].split(LENGTHS_K), tensors[2].split(LENGTHS_K))
    outs, lses = zip(*(formula([x[None] for x in one], (-1, -1), **options) for one in parts))
    return torch.cat([x[0] for x in outs]), torch.cat([x[0] for x in lses], dim=-1)


@pytest.mark.parametrize("causal", [False, True])
def test_varlen(causal, device):
    leaves = leaves_of(device, (sum(LENGTHS_Q), 4, 64), (sum(LENGTHS_K), 2, 64), (sum(LENGTHS_K), 2, 64))
    exact = exact_of(leaves)
    want, want_lse = varlen_formula(exact, causal=causal)
    lengths = offsets(LENGTHS_Q, device), offsets(LENGTHS_K, device), max(LENGTHS_Q), max(LENGTHS_K)
    out, lse = flash_attn_3.flash_attn_varlen_func(*leaves, *lengths, causal=causal, return_attn_probs=True)
    check(out, leaves, want, exact, (lse, want_lse))
    infinite = want_lse.masked_fill(want_lse == -math.inf, math.inf)
    out, lse, _ = flash_attn.flash_attn_varlen_func(*leaves, *lengths, causal=causal, return_attn_probs=True)
    check(out, leaves, want, exact, (lse, infinite))
    out, lse = flash_attn_4.flash_attn_varlen_func(*leaves, None, *lengths[:2], causal=causal, return_lse=True)
    check(out, leaves, want, exact, (lse, want_lse))


def test_packed_qkv_and_private_functions(device):
    (qkv,) = leaves_of(device, (2, 192, 3, 4, 64))
    exact = exact_of([qkv])
    want, _ = formula(exact[0].unbind(2), (-1, -1), causal=True)
    check(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), [qkv], want, exact)
    q, k, v = (x.detach().contiguous() for x in qkv.unbind(2))
    options = (0.0, 0.125, True, -1, -1, 0.0, None)
    out, lse, _, state = flash_attn._flash_attn_forward(q, k, v, *options, False)
    dout = torch.randn_like(out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    flash_attn._flash_attn_backward(dout, q, k, v, out, lse, *grads, *options, False, state)
    (wanted,) = torch.autograd.grad((want * dout.double().cpu()).sum(), exact)
    for one, other in zip(grads, wanted.unbind(2)):
        assert (one.double().cpu() - other).abs().max() <= 0.02 * other.abs().max()


def test_cache(device):
    """One new key behind 100 and 0 old ones."""
    q, k, v, *caches = (x.detach() for x in leaves_of(device, (2, 1, 4, 64), *[(2, 1, 2, 64)] * 2, *[(2, 256, 2, 64)] * 2))
    lengths = torch.tensor([100, 0], dtype=torch.int32, device=device)
    out, lse = flash_attn.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True, return_softmax_lse=True)
    for b, n in enumerate((100, 0)):
        assert torch.equal(caches[0][b, n], k[b, 0]) and torch.equal(caches[1][b, n], v[b, 0])
        exact = [x[b : b + 1].double().cpu() for x in (q, *(cache[:, : n + 1] for cache in caches))]
        want, want_lse = formula(exact, (-1, -1), causal=True)
        assert (out[b : b + 1].double().cpu() - want).abs().max() <= 0.02 * want.abs().max()
        torch.testing.assert_close(lse[b : b + 1].double().cpu(), want_lse, rtol=1e-2, atol=1e-2)


def test_padding(device):
    (x,) = leaves_of(device, (3, 40, 4, 64))
    mask = torch.arange(40, device=device) < torch.tensor([40, 0, 13], device=device)[:, None]
    from fovea.integrations import _bert_padding

    rows, indices, cu_seqlens, longest, _ = _bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask]) and cu_seqlens.tolist() == [0, 40, 40, 53] and longest == 40
    assert torch.equal(_bert_padding.pad_input(rows, indices, 3, 40), torch.where(mask[..., None, None], x, 0))


@pytest.mark.parametrize("how", ["mask", "lengths", "exact"])
def test_triangle_attention(how, device):
    """(B, N, H, S, D) with a bias of (B, 1, H, S, S), a row of which has no key at all."""
    leaves = leaves_of(device, *[(2, 24, 4, 72, 32)] * 3, (2, 1, 4, 72, 72))
    exact = exact_of(leaves)
    lengths = torch.randint(1, 73, (2, 24, 1, 1, 1), dtype=torch.int32)
    lengths[0, 0] = 0
    mask = torch.arange(72) < lengths
    options = {"kv_lengths": lengths.to(device)} if how == "lengths" else {"mask": mask.to(device), "exact": how == "exact"}
    out = triangle.triangle_attention(*leaves, **options)
    s = exact[0] @ exact[1].transpose(-1, -2) / math.sqrt(32) + exact[3] + torch.where(mask, 0.0, -1e9)
    want = s.softmax(-1) @ exact[2]
    alive = mask.any(-1, keepdim=True)
    if how == "exact":  # -1e9 leaves nothing of a score in float32
        assert (out[0, 0].double().cpu() - exact[2][0, 0].mean(-2, keepdim=True)).abs().max() < 0.02
    else:
        assert (out[0, 0] == 0).all()
    check(out * alive.to(device), leaves, want * alive, exact)


def test_evoformer(device):
    leaves = leaves_of(device, *[(1, 24, 72, 4, 32)] * 3, (1, 24, 1, 1, 72), (1, 1, 4, 72, 72))
    exact = exact_of(leaves)
    out = evoformer.DS4Sci_EvoformerAttention(*leaves[:3], leaves[3:])
    s = torch.einsum("bnqhd,bnkhd->bnhqk", *exact[:2]) / math.sqrt(32) + exact[3] + exact[4]
    check(out, leaves, torch.einsum("bnhqk,bnkhd->bnqhd", s.softmax(-1), exact[2]), exact)


def alone(exact, spans_q, spans_k, lengths_q, lengths_k, **options):
    """Each packed sequence by itself, (S, H, D); rows of padding are 0."""
    outs = []
    for q, k, v, rows, keys in zip(*(x.split(spans) for x, spans in zip(exact, (spans_q, spans_k, spans_k))), lengths_q, lengths_k):
        one = formula((q[None, :rows], k[None, :keys], v[None, :keys]), (-1, -1), **options)[0][0]
        outs.append(torch.nn.functional.pad(one, (0, 0, 0, 0, 0, q.shape[0] - rows)))
    return torch.cat(outs)


def test_xformers(device):
    """Keys with padding between them, and the backward as a function of its own; parts that are merged."""
    spans = [256, 64, 80, 128]
    bias = type("BlockDiagonalCausalWithOffsetPaddedKeysMask", (), {})()
    bias.q_seqinfo = SimpleNamespace(seqstart=offsets(LENGTHS_Q, device), max_seqlen=256)
    bias.k_seqinfo = SimpleNamespace(seqstart=offsets(spans, device), max_seqlen=256,
                                     seqlen=torch.tensor(LENGTHS_K, dtype=torch.int32, device=device))  # fmt: skip
    leaves = leaves_of(device, (1, sum(LENGTHS_Q), 4, 64), (1, sum(spans), 4, 64), (1, sum(spans), 4, 64))
    exact = exact_of(leaves)
    want = alone([x[0] for x in exact], LENGTHS_Q, spans, LENGTHS_Q, LENGTHS_K, causal=True)[None]
    check(xformers.memory_efficient_attention(*leaves, bias), leaves, want, exact)
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(*leaves, bias)
    weights = torch.randn_like(want)
    found = xformers.memory_efficient_attention_backward(weights.to(out), out, lse, *leaves, bias)
    for one, other in zip(found, torch.autograd.grad((want * weights).sum(), exact)):
        assert (one.double().cpu() - other).abs().max() <= 0.02 * other.abs().max()

    leaves = leaves_of(device, (2, 130, 2, 64), (2, 200, 2, 64), (2, 200, 2, 64))
    exact = exact_of(leaves)
    q, k, v = leaves
    parts = [xformers.memory_efficient_attention_partial(q, k[:, at], v[:, at]) for at in (slice(0, 70), slice(70, 200))]
    merged, lse = xformers.merge_attentions(*zip(*parts))
    want, want_lse = formula(exact, (-1, -1))
    check(merged, leaves, want, exact, (lse, want_lse))


@pytest.mark.parametrize("packed", [False, True])
def test_megatron(packed, device):
    """Four sequences side by side as one of all their heads, with a learned sink; packed with padding; with a bias."""
    kinds = enum.Enum("kinds", "causal")
    configuration = SimpleNamespace(
        attention_dropout=0.0, num_attention_heads=4, tensor_model_parallel_size=1, softmax_type="learnable", params_dtype=torch.bfloat16,
        perform_initialization=True, init_method=torch.nn.init.normal_, sequence_parallel=False,
    )  # fmt: skip
    core = megatron.CoreAttention(configuration, 1, kinds.causal, "self")
    sink = core.softmax_offset
    exact_sink = sink.detach().double().cpu().requires_grad_()
    if packed:
        spans, lengths = [256, 64, 80, 128], [200, 64, 77, 100]
        leaves = leaves_of(device, (sum(spans), 4, 64), (sum(spans), 2, 64), (sum(spans), 2, 64))
        exact = exact_of(leaves)
        starts = offsets(lengths, device)
        params = SimpleNamespace(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=256, max_seqlen_kv=256,
                                 cu_seqlens_q_padded=offsets(spans, device), cu_seqlens_kv_padded=offsets(spans, device))  # fmt: skip
        want = alone(exact, spans, spans, lengths, lengths, causal=True, sink=exact_sink).flatten(1)
        check(core(*leaves, None, packed_seq_params=params), [*leaves, sink], want, [*exact, exact_sink])
        return
    leaves = leaves_of(device, (130, 4, 4, 64), (130, 4, 2, 64), (130, 4, 2, 64), (1, 4, 130, 130))
    exact = exact_of(leaves)
    for given in (3, 4):
        bias = leaves[3] if given == 4 else None
        out = formula([x.transpose(0, 1) for x in exact[:3]], (-1, -1), causal=True, sink=exact_sink,
                      bias=exact[3] if given == 4 else None)[0]  # fmt: skip
        got = core(*leaves[:3], None, attention_bias=bias)
        check(got, [*leaves[:given], sink], out.transpose(0, 1).flatten(2), [*exact[:given], exact_sink])
