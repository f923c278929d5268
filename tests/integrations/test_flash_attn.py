# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn 2, 3 and 4 against the formula in PyTorch, in float64: values, logsumexps and gradients.
Signatures are compared with those that the libraries' documentation has."""

import inspect
import itertools
import math

import pytest
import torch

import fovea.integrations
import naive
from fovea.integrations import _bert_padding, _flash, flash_attn, flash_attn_3, flash_attn_4
from fovea.torch import attention_qkv

VERSIONS = {"flash_attn": flash_attn, "flash_attn_3": flash_attn_3, "flash_attn_4": flash_attn_4}

# ---- signatures: names, order and defaults ----

SECOND = ("dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
          "deterministic=False, return_attn_probs=False")
SCALES = "q_descale=None, k_descale=None, v_descale=None"
THIRD = (f"softmax_scale=None, causal=False, qv=None, {SCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
         "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False")
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn": {
        "flash_attn_func": f"q, k, v, {SECOND}",
        "flash_attn_kvpacked_func": f"q, kv, {SECOND}",
        "flash_attn_qkvpacked_func": f"qkv, {SECOND}",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {SECOND}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {SECOND}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {SECOND}",
        "flash_attn_with_kvcache":
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, "
            "cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
            "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
        "_flash_attn_forward":
            "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
            "return_softmax",
        "_flash_attn_backward":
            "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, "
            "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None",
        "_flash_attn_varlen_forward":
            f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, "
            "alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False, "
            "num_splits=0",
        "_flash_attn_varlen_backward":
            f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left, "
            "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False",
    },
    "flash_attn_3": {
        "flash_attn_func": f"q, k, v, {THIRD}",
        "flash_attn_qkvpacked_func":
            f"qkv, softmax_scale=None, causal=False, {SCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
            "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, {THIRD}",
        "flash_attn_with_kvcache":
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
            f"max_seqlen_q=None, rotary_seqlens=None, {SCALES}, softmax_scale=None, causal=False, window_size=(-1, -1), "
            "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, "
            "sm_margin=0, return_softmax_lse=False",
        "_flash_attn_forward":
            "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, "
            "seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, "
            f"leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, {SCALES}, softmax_scale=None, causal=False, "
            "window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
            "scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
        "_flash_attn_backward":
            "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
            "window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
    },
    "flash_attn_4": {
        "flash_attn_func":
            "q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False, window_size=(None, None), "
            "learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, score_mod=None, "
            "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
            "block_sparse_tensors_bwd=None, return_lse=False",
        "flash_attn_varlen_func":
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, "
            "seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
            "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, "
            "score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, "
            "return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False",
        "_flash_attn_fwd":
            "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
            "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
            "window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
            "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, "
            "block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, "
            f"{SCALES}, gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None, "
            "disable_scheduler_metadata=False, gather_bwd_recompute_p=False",
        "_flash_attn_bwd":
            "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
            "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
            "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, "
            "AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
            "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
            "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, "
            "learnable_sink=None",
    },
}  # fmt: skip


@pytest.mark.parametrize("version, function", [(v, f) for v, its in SIGNATURES.items() for f in its])
def test_signature(version, function):
    parameters = inspect.signature(getattr(VERSIONS[version], function)).parameters.values()
    written = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(written) == SIGNATURES[version][function]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_every_public_function_has_its_signature_here():
    for version, module in VERSIONS.items():
        assert set(module.__all__) <= set(SIGNATURES[version])


# ---- the formula ----

WINDOWS = [(-1, -1), (3, 0), (2, 2), (-1, 1), (4, -7)]


def inputs(sq, sk, heads=4, heads_k=2, dim=8, dim_v=8, batch=2):
    torch.manual_seed(sq * 100 + sk)
    shapes = ((batch, sq, heads, dim), (batch, sk, heads_k, dim), (batch, sk, heads_k, dim_v))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def formula(q, k, v, window=(-1, -1), softcap=0.0, **options):
    """(B, S, H, D) in and out, lse (B, H, S)."""
    window = tuple(-1 if side is None or side < 0 else side for side in window)
    out, lse = naive.attention(*(x.transpose(1, 2) for x in (q, k, v)), window=window, softcap=max(softcap, 0), **options)
    return out.transpose(1, 2), lse


def close(got, want):
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def compare(got, want, leaves, lse=None):
    """Results, and the gradients of a sum of each with weights; `lse` are both logsumexps, whose gradient is taken, too."""
    weights = torch.randn_like(want)
    losses = [(x * weights).sum() for x in (got, want)]
    close(got, want)
    if lse is not None:
        close(*lse)
        finite = lse[1].isfinite()
        more = torch.randn_like(lse[1])[finite]
        losses = [loss + (one[finite] * more).sum() for loss, one in zip(losses, lse)]
    mine, theirs = (torch.autograd.grad(loss, leaves) for loss in losses)
    for one, other in zip(mine, theirs):
        close(one, other)


@pytest.mark.parametrize("sq, sk", [(7, 7), (5, 9), (9, 5)])
@pytest.mark.parametrize("version", VERSIONS)
def test_dense(version, sq, sk, computed):
    """Every combination of causal, window and softcap, with grouped heads; 9 queries and 5 keys leave rows without any."""
    module, calls = VERSIONS[version], 0
    for causal, window, softcap in itertools.product((False, True), WINDOWS, (0.0, 1.5, -1.0)):
        q, k, v = leaves = inputs(sq, sk)
        options = dict(causal=causal, softcap=softcap)
        if version == "flash_attn":
            slopes = torch.rand(4, dtype=torch.float64)
            out, lse, probabilities = module.flash_attn_func(q, k, v, 0.0, None, window_size=window, alibi_slopes=slopes,
                                                             return_attn_probs=True, **options)
            assert probabilities is None
            want, want_lse = formula(q, k, v, window, alibi_slopes=slopes, **options)
            want_lse = want_lse.masked_fill(want_lse == -math.inf, math.inf)
        elif version == "flash_attn_3":
            out, lse = module.flash_attn_func(q, k, v, None, causal, window_size=window, softcap=softcap, return_attn_probs=True)
            want, want_lse = formula(q, k, v, window, **options)
        else:
            sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
            leaves.append(sink)
            none = tuple(None if side < 0 else side for side in window)
            out, lse = module.flash_attn_func(q, k, v, window_size=none, learnable_sink=sink, return_lse=True, **options)
            want, want_lse = formula(q, k, v, window, sink=sink, **options)
        compare(out, want, leaves, (lse, want_lse))
        calls += 1
    computed(version, calls)


def test_rows_without_keys():
    """9 queries and 5 keys, causal: the first four see none. out is 0, the logsumexp +inf in version 2, else -inf."""
    q, k, v = inputs(9, 5)
    for version, infinite in (("flash_attn", math.inf), ("flash_attn_3", -math.inf), ("flash_attn_4", -math.inf)):
        module = VERSIONS[version]
        wanted = {"return_lse": True} if version == "flash_attn_4" else {"return_attn_probs": True}
        out, lse = module.flash_attn_func(q, k, v, causal=True, **wanted)[:2]
        assert (out[:, :4] == 0).all() and (lse[:, :, :4] == infinite).all() and lse[:, :, 4:].isfinite().all()
        assert all(x.isfinite().all() for x in torch.autograd.grad(out.sum() + lse[:, :, 4:].sum(), (q, k, v)))


def test_results():
    """What each version returns."""
    q, k, v = inputs(4, 4)
    assert isinstance(flash_attn.flash_attn_func(q, k, v), torch.Tensor)
    assert isinstance(flash_attn_3.flash_attn_func(q, k, v), torch.Tensor)
    out, lse = flash_attn_4.flash_attn_func(q, k, v)
    assert lse is not None and not lse.requires_grad and out.requires_grad
    assert flash_attn_4.flash_attn_func(*(x.detach() for x in (q, k, v)))[1] is None
    assert flash_attn_4.flash_attn_func(q, k, v, return_lse=True)[1].requires_grad
    assert not flash_attn.flash_attn_func(q, k, v, alibi_slopes=torch.rand(4, requires_grad=True)).isnan().any()


def nodes(out):
    """Names of the steps of a backward."""
    found, left = [], [out.grad_fn]
    while left:
        node = left.pop()
        found.append(node.name())
        left += [after for after, _ in node.next_functions if after is not None]
    return sorted(found)


def test_packed_tensors(computed):
    """qkv and kv as one tensor, whose gradient is one tensor."""
    qkv = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(2, 9, 2, 2, 8, dtype=torch.float64, requires_grad=True)
    q = torch.randn(2, 6, 4, 8, dtype=torch.float64, requires_grad=True)
    compare(flash_attn.flash_attn_qkvpacked_func(qkv, 0.0, 0.3, True), formula(*qkv.unbind(2), scale=0.3, causal=True)[0], [qkv])
    compare(flash_attn.flash_attn_kvpacked_func(q, kv, causal=True), formula(q, *kv.unbind(2), causal=True)[0], [q, kv])
    computed("flash_attn", 2)
    compare(flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True), formula(*qkv.unbind(2), causal=True)[0], [qkv])
    grouped = torch.randn(2, 6, 8, 8, dtype=torch.float64, requires_grad=True)
    parts = grouped[:, :, :4], grouped[:, :, 4:6], grouped[:, :, 6:]
    compare(flash_attn_3.flash_attn_qkvpacked_func(grouped, num_heads_q=4), formula(*parts)[0], [grouped])
    computed("flash_attn_3", 2)
    with pytest.raises(ValueError, match="num_heads_q: 5 with a qkv of 8 heads"):
        flash_attn_3.flash_attn_qkvpacked_func(grouped, num_heads_q=5)


# ---- variable lengths ----

LENGTHS_Q, LENGTHS_K = [3, 0, 5, 2], [4, 2, 5, 1]


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def varlen_inputs():
    q = torch.randn(sum(LENGTHS_Q), 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(sum(LENGTHS_K), 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    return q, k, v


def varlen_formula(q, k, v, lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, **options):
    """Each sequence by itself; lse is (H, total)."""
    outs, lses = [], []
    for one_q, one_k, one_v in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k)):
        out, lse = formula(one_q[None], one_k[None], one_v[None], **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=-1)


@pytest.mark.parametrize("window", [(-1, -1), (1, 1)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_varlen(version, causal, window, computed):
    q, k, v = leaves = varlen_inputs()
    lengths = offsets(LENGTHS_Q), offsets(LENGTHS_K), 5, 5
    want, want_lse = varlen_formula(q, k, v, causal=causal, window=window)
    function = VERSIONS[version].flash_attn_varlen_func
    if version == "flash_attn":
        out, lse, _ = function(q, k, v, *lengths, causal=causal, window_size=window, return_attn_probs=True)
        want_lse = want_lse.masked_fill(want_lse == -math.inf, math.inf)
    elif version == "flash_attn_3":
        out, lse = function(q, k, v, *lengths, causal=causal, window_size=window, return_attn_probs=True)
    else:
        out, lse = function(q, k, v, None, *lengths[:2], causal=causal, window_size=window, return_lse=True)
    assert lse.shape == (4, sum(LENGTHS_Q))
    compare(out, want, leaves, (lse, want_lse))
    computed(version, 1)


def test_the_gradient_of_a_packed_tensor_is_written_as_one():
    """Not three that are then copied together, which is what unbind() before attention() gives."""
    qkv = torch.randn(2, 6, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    want = nodes(attention_qkv(qkv, 2, layout="bshd", causal=True))
    assert want != nodes(flash_attn.flash_attn_func(*qkv.unbind(2), causal=True))
    for function in (flash_attn.flash_attn_qkvpacked_func, flash_attn_3.flash_attn_qkvpacked_func):
        assert nodes(function(qkv, causal=True)) == want
    packed = qkv[0].detach().requires_grad_()
    assert nodes(flash_attn.flash_attn_varlen_qkvpacked_func(packed, offsets([6]), 6, causal=True)) == want


def test_varlen_packed_tensors(computed):
    qkv = torch.randn(sum(LENGTHS_Q), 3, 4, 8, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(sum(LENGTHS_K), 2, 2, 8, dtype=torch.float64, requires_grad=True)
    q = torch.randn(sum(LENGTHS_Q), 4, 8, dtype=torch.float64, requires_grad=True)
    compare(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets(LENGTHS_Q), torch.tensor(5), causal=True),
            varlen_formula(*qkv.unbind(1), LENGTHS_Q, LENGTHS_Q, causal=True)[0], [qkv])
    compare(flash_attn.flash_attn_varlen_kvpacked_func(q, kv, offsets(LENGTHS_Q), offsets(LENGTHS_K), 5, 5, causal=True),
            varlen_formula(q, *kv.unbind(1), causal=True)[0], [q, kv])
    computed("flash_attn", 2)


def test_used_lengths(computed):
    """Only the first rows of each sequence exist: the others are 0, and the corner is that of the used lengths."""
    q, k, v = varlen_inputs()
    used_q, used_k = [2, 0, 5, 1], [3, 1, 4, 1]
    lengths = offsets(LENGTHS_Q), offsets(LENGTHS_K), 5, 5
    seqused = {name: torch.tensor(used, dtype=torch.int32) for name, used in (("seqused_q", used_q), ("seqused_k", used_k))}
    short = [torch.cat([one[:n] for one, n in zip(x.split(full), used)])
             for x, full, used in ((q, LENGTHS_Q, used_q), (k, LENGTHS_K, used_k), (v, LENGTHS_K, used_k))]
    want, _ = varlen_formula(*short, used_q, used_k, causal=True)
    exists = torch.cat([torch.arange(full) < n for full, n in zip(LENGTHS_Q, used_q)])
    for version, arguments in (("flash_attn_3", lengths), ("flash_attn_4", (None, *lengths))):
        found = VERSIONS[version].flash_attn_varlen_func(q, k, v, *arguments, causal=True, **seqused)
        out = found[0] if version == "flash_attn_4" else found
        close(out[exists], want)
        assert (out[~exists] == 0).all()
        computed(version, 1)


def test_one_side_padded(computed):
    """Version 4 takes a padded batch on one side or on both."""
    q = torch.randn(4, 5, 4, 8, dtype=torch.float64, requires_grad=True)
    _, k, v = varlen_inputs()
    out, lse = flash_attn_4.flash_attn_varlen_func(q, k, v, cu_seqlens_k=offsets(LENGTHS_K), causal=True, return_lse=True)
    want, want_lse = varlen_formula(q.flatten(0, 1), k, v, [5] * 4, LENGTHS_K, causal=True)
    compare(out, want.view_as(out), [q, k, v], (lse, want_lse.view(4, 4, 5).transpose(0, 1)))
    keys = torch.randn(4, 6, 2, 8, dtype=torch.float64)
    used = torch.tensor([4, 2, 6, 1], dtype=torch.int32)
    packed_q = torch.randn(sum(LENGTHS_Q), 4, 8, dtype=torch.float64)
    out, _ = flash_attn_4.flash_attn_varlen_func(packed_q, keys, keys, cu_seqlens_q=offsets(LENGTHS_Q), seqused_k=used, causal=True)
    short = torch.cat([one[:n] for one, n in zip(keys, used)])
    close(out, varlen_formula(packed_q, short, short, LENGTHS_Q, used.tolist(), causal=True)[0])
    out, _ = flash_attn_4.flash_attn_varlen_func(q.detach(), keys, keys, seqused_k=used)
    for b, n in enumerate(used.tolist()):
        close(out[b : b + 1], formula(q[b : b + 1].detach(), keys[b : b + 1, :n], keys[b : b + 1, :n])[0])
    computed("flash_attn_4", 3)


# ---- dropout ----


def test_dropout_comes_from_pytorchs_generator():
    q, k, v = (x.detach() for x in inputs(32, 32))
    first, second = (flash_attn.flash_attn_func(q, k, v, 0.5) for _ in range(2))
    torch.manual_seed(7)
    third = flash_attn.flash_attn_func(q, k, v, 0.5)
    torch.manual_seed(7)
    assert not torch.equal(first, second) and torch.equal(third, flash_attn.flash_attn_func(q, k, v, dropout_p=0.5))


# ---- forward and backward as functions of their own ----


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("packed", [False, True])
def test_private_functions(packed, dropout, computed):
    """Their gradients are those of the public function with the same seed; rows without keys have +inf in between."""
    if packed:
        q, k, v = varlen_inputs()
        lengths = (offsets(LENGTHS_Q), offsets(LENGTHS_K), 5, 5)
        names = "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"
    else:
        q, k, v = inputs(9, 5)
        lengths = ()
        names = "_flash_attn_forward", "_flash_attn_backward"
    forward, backward = (getattr(flash_attn, name) for name in names)
    options = (dropout, 0.4, True, 3, -1, 1.5, torch.rand(4, dtype=torch.float64))
    plain = [x.detach() for x in (q, k, v)]
    torch.manual_seed(3)
    out, lse, probabilities, state = forward(*plain, *lengths, *options, False)
    dout = torch.randn_like(out)
    grads = [torch.full_like(x, math.nan) for x in plain]
    assert backward(dout, *plain, out, lse, *grads, *lengths, *options, True, rng_state=state) is None
    computed("flash_attn", 2)
    public = flash_attn.flash_attn_varlen_func if packed else flash_attn.flash_attn_func
    torch.manual_seed(3)
    want, want_lse, _ = public(q, k, v, *lengths, dropout, 0.4, True, (3, -1), *options[-2:], return_attn_probs=True)
    close(out, want)
    close(lse, want_lse)
    assert (lse == math.inf).any() and probabilities is None and state.shape == (2,)
    for one, other in zip(grads, torch.autograd.grad((want * dout).sum(), (q, k, v))):
        close(one, other)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_private_functions_of_version_3(packed, used, computed):
    """One pair for padded and for packed sequences. The results go where they are asked for."""
    if packed:
        q, k, v = varlen_inputs()
        lengths = {"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_k": offsets(LENGTHS_K), "max_seqlen_q": 5, "max_seqlen_k": 5}
    else:
        q, k, v = inputs(9, 5)
        lengths = {}
    batch = 4 if packed else 2
    some = torch.tensor([1, 0, 5, 1] if packed else [3, 9], dtype=torch.int32)
    seqused = {"q": some, "k": some.clamp(max=5).flip(0).minimum(torch.tensor([4, 2, 5, 1][:batch], dtype=torch.int32))} if used else {"q": None, "k": None}
    plain = [x.detach() for x in (q, k, v)]
    into = torch.full_like(plain[0], math.nan)
    out, lse, *rest = flash_attn_3._flash_attn_forward(
        *plain, out_=into, **lengths, seqused_q=seqused["q"], seqused_k=seqused["k"], softmax_scale=0.4, causal=True,
        window_size_left=3, softcap=1.5)  # fmt: skip
    assert out is into and rest == [None, None]
    dout = torch.randn_like(out)
    grads = [torch.full_like(x, math.nan) for x in plain]
    flash_attn_3._flash_attn_backward(
        dout, *plain, out, lse, sequed_q=seqused["q"], sequed_k=seqused["k"], dq=grads[0], dk=grads[1], dv=grads[2], **lengths,
        softmax_scale=0.4, is_causal=True, window_size_left=3, softcap=1.5)  # fmt: skip
    computed("flash_attn_3", 2)
    if not packed:  # as packed sequences of the lengths that the batch has
        lengths = {"cu_seqlens_q": offsets([9, 9]), "cu_seqlens_k": offsets([5, 5]), "max_seqlen_q": 9, "max_seqlen_k": 5}
    want, want_lse = flash_attn_3.flash_attn_varlen_func(
        *(x if packed else x.flatten(0, 1) for x in (q, k, v)), **lengths, seqused_q=seqused["q"], seqused_k=seqused["k"],
        softmax_scale=0.4, causal=True, window_size=(3, -1), softcap=1.5, return_attn_probs=True)  # fmt: skip
    close(out, want.view_as(out))
    close(lse, want_lse if packed else want_lse.unflatten(1, (2, 9)).transpose(0, 1))
    for one, other in zip(grads, torch.autograd.grad((want.view_as(out) * dout).sum(), (q, k, v))):
        close(one, other)


@pytest.mark.parametrize("window", [(3, None), (2, 2), (None, -2), (-1, 3)], ids=str)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("packed", ["", "q", "k", "qk"])
def test_private_functions_of_version_4(packed, used, window, computed):
    """One pair for all forms: either side padded or packed, windows beside the diagonal, and the gradients of a logsumexp and a sink."""
    rows_q, rows_k = ((sum(full),) if side in packed else (4, 5) for side, full in (("q", LENGTHS_Q), ("k", LENGTHS_K)))
    q = torch.randn(*rows_q, 4, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(*rows_k, 2, dim, dtype=torch.float64, requires_grad=True) for dim in (8, 6))
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    lengths = {}
    for side, full in (("q", LENGTHS_Q), ("k", LENGTHS_K)):
        if side in packed:
            lengths |= {f"cu_seqlens_{side}": offsets(full), f"max_seqlen_{side}": 5}
        if used:
            lengths[f"seqused_{side}"] = torch.tensor([max(n - 1, 0) for n in full], dtype=torch.int32)
    causal = window == (3, None)
    options = dict(causal=causal, softmax_scale=0.4, softcap=1.5, learnable_sink=sink)
    sides = dict(zip(("window_size_left", "window_size_right"), window))
    want, want_lse = flash_attn_4.flash_attn_varlen_func(q, k, v, **lengths, **options, window_size=window, return_lse=True)
    computed("flash_attn_4", 1)

    plain = [x.detach() for x in (q, k, v)]
    out, lse, *rest = flash_attn_4._flash_attn_fwd(*plain, **lengths, **options, **sides)
    close(out, want)
    close(lse, want_lse)
    assert rest == [None] * 3 and not out.requires_grad and not lse.requires_grad
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = flash_attn_4._flash_attn_bwd(*plain, out, dout, lse, **lengths, **options, **sides, dlse=dlse)
    computed("flash_attn_4", 2)
    for one, other in zip(grads, torch.autograd.grad((want, want_lse), (q, k, v, sink), (dout, dlse)), strict=True):
        close(one, other)


@pytest.mark.parametrize("sq, sk", [(9, 5), (5, 9), (4, 0)])
def test_private_functions_of_version_4_by_the_formula(sq, sk, computed):
    """With a sink and without, into tensors that are given. Without keys the logsumexp is the sink."""
    for sink in (None, torch.randn(4, dtype=torch.float64, requires_grad=True)):
        leaves = inputs(sq, sk)
        want, want_lse = formula(*leaves, (3, -1), causal=True, softcap=1.5, sink=sink)
        plain = [x.detach() for x in leaves]
        options = dict(causal=True, softcap=1.5, window_size_left=3, learnable_sink=None if sink is None else sink.detach())
        given = [torch.full_like(x, math.nan) for x in (want.detach(), want_lse.detach())]
        out, lse, *_ = flash_attn_4._flash_attn_fwd(*plain, out=given[0], lse=given[1], **options)
        assert out is given[0] and lse is given[1]
        close(out, want)
        close(lse, want_lse)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse).masked_fill(lse == -math.inf, 0)
        into = [torch.full_like(x, math.nan) for x in plain]
        grads = flash_attn_4._flash_attn_bwd(*plain, out, dout, lse, **options, dlse=dlse, **dict(zip(("dq", "dk", "dv"), into)))
        assert all(one is other for one, other in zip(grads, into))
        leaves += [] if sink is None else [sink]
        wanted = torch.autograd.grad((want, want_lse), leaves, (dout, dlse))
        for one, other in zip(grads, wanted, strict=True):
            close(one, other)
    computed("flash_attn_4", 4)


def test_when_version_4_returns_a_logsumexp():
    """If it is wanted, or if an input requires a gradient, whether autograd is on or not: a backward of its own may follow."""
    q, k, v = inputs(4, 4)
    plain = [x.detach() for x in (q, k, v)]
    assert flash_attn_4._flash_attn_fwd(*plain)[1] is None
    assert flash_attn_4._flash_attn_fwd(*plain, return_lse=True)[1] is not None
    with torch.no_grad():
        assert flash_attn_4._flash_attn_fwd(q, k, v)[1] is not None
        sink = torch.zeros(4, requires_grad=True)
        assert flash_attn_4._flash_attn_fwd(*plain, learnable_sink=sink)[1] is not None


def test_a_sink_of_16_bits():
    """In both directions it is read in fp32, and its gradient has its type."""
    q, k, v, dout = (torch.randn(1, 6, 2, 8, dtype=torch.bfloat16) for _ in range(4))
    sink = torch.randn(2, dtype=torch.bfloat16)
    out, lse, *_ = flash_attn_4._flash_attn_fwd(q, k, v, learnable_sink=sink, return_lse=True)
    grads = flash_attn_4._flash_attn_bwd(q, k, v, out, dout, lse, learnable_sink=sink)
    assert [x.dtype for x in (out, lse, *grads)] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 4]
    leaves = [x.requires_grad_() for x in (q, k, v, sink)]
    want, _ = flash_attn_4.flash_attn_func(q, k, v, learnable_sink=sink)
    assert torch.equal(out, want)
    for one, other in zip(grads, torch.autograd.grad(want, leaves, dout), strict=True):
        assert torch.equal(one, other)


def test_a_backward_with_dropout_needs_the_state():
    q, k, v = (x.detach() for x in inputs(4, 4))
    out, lse, _, _ = flash_attn._flash_attn_forward(q, k, v, 0.5, 0.3, False, -1, -1, 0.0, None, False)
    with pytest.raises(ValueError, match="rng_state: None with dropout"):
        flash_attn._flash_attn_backward(out, q, k, v, out, lse, None, None, None, 0.5, 0.3, False, -1, -1, 0.0, None, False)


# ---- caches ----


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
def test_cache(module, computed):
    """Two new keys behind 3, 5 and 0 old ones, of sequences 4, 0 and 2 of the cache; then a length for all."""
    q, k, v = (torch.randn(3, 2, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    caches = [torch.randn(5, 9, 2, 8, dtype=torch.float64) for _ in range(2)]
    before = [x.clone() for x in caches]
    rows, lengths = [4, 0, 2], [3, 5, 0]
    out, lse = module.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), causal=True, window_size=(4, 0),
        cache_batch_idx=torch.tensor(rows, dtype=torch.int32), return_softmax_lse=True)
    for b, (row, n) in enumerate(zip(rows, lengths)):
        for cache, old, new in zip(caches, before, (k, v)):
            assert torch.equal(cache[row, :n], old[row, :n]) and torch.equal(cache[row, n : n + 2], new[b])
            assert torch.equal(cache[row, n + 2 :], old[row, n + 2 :])
        want, want_lse = formula(q[b : b + 1], *(cache[row : row + 1, : n + 2] for cache in caches), (4, 0), causal=True)
        close(out[b : b + 1], want)
        close(lse[b : b + 1], want_lse)
    for untouched in (1, 3):
        assert all(torch.equal(cache[untouched], old[untouched]) for cache, old in zip(caches, before))
    close(module.flash_attn_with_kvcache(q, *caches, cache_seqlens=6), formula(q, *(x[:3, :6] for x in caches))[0])
    close(module.flash_attn_with_kvcache(q, *caches), formula(q, *(x[:3] for x in caches))[0])
    computed(module._NAME, 3)
    with pytest.raises(ValueError, match="cache_seqlens: None with k"):
        module.flash_attn_with_kvcache(q, *caches, k, v)
    with pytest.raises(ValueError, match="v: None"):
        module.flash_attn_with_kvcache(q, *caches, k)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
@pytest.mark.parametrize("lengths", [8, -1, torch.tensor([3, 8, 0], dtype=torch.int32), torch.tensor([0, 0, -1], dtype=torch.int32)], ids=str)
def test_keys_beyond_the_cache(lengths, module):
    """Two keys in a cache of nine; nothing is written."""
    q = torch.randn(3, 2, 2, 8, dtype=torch.float64)
    caches = [torch.zeros(3, 9, 2, 8, dtype=torch.float64) for _ in range(2)]
    with pytest.raises(ValueError, match=r"^flash_attn_with_kvcache: cache_seqlens: (8|-1), with 2 new keys in a cache of 9; accepted: 0 to 7$"):
        module.flash_attn_with_kvcache(q, *caches, q, q, cache_seqlens=lengths)
    assert all((cache == 0).all() for cache in caches)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
def test_keys_that_do_not_fit_the_cache(module):
    """PyTorch would broadcast them, or write a part. Nothing is written before all of this is looked at."""
    q, new = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 2, 8)
    lengths = torch.zeros(3, dtype=torch.int32)
    for given, says in (
        ({"k": new[:1]}, r"k: shape 1x2x2x8; accepted: \(3, 2, 2, 8\), as k_cache has it"),
        ({"v": new[:, :1]}, r"v: shape 3x1x2x8; accepted: \(3, 2, 2, 8\)"),
        ({"k": new[:, :, :1]}, "k: shape 3x2x1x8"),
        ({"v": new[..., :1]}, "v: shape 3x2x2x1"),
        ({"q": q[..., :4]}, r"q: shape 3x2x4x4; accepted: \(B, Sq, a multiple of 2, 8\)"),
        ({"q": q[:, :, :3]}, "q: shape 3x2x3x8"),
        ({"q": q[0]}, "q: shape 2x4x8"),
        ({"cache_seqlens": torch.tensor(1, dtype=torch.int32)}, r"cache_seqlens: shape .*; accepted: \(3,\)"),
        ({"cache_seqlens": [0, 0, 0]}, "cache_seqlens: a list; accepted: a tensor of int32"),
        ({"cache_seqlens": torch.zeros(3)}, "cache_seqlens: torch.float32; accepted"),
        ({"cache_batch_idx": torch.tensor([1], dtype=torch.int32)}, r"cache_batch_idx: shape 1; accepted: \(3,\)"),
        ({"cache_batch_idx": torch.tensor([0, 1, 3], dtype=torch.int32)}, "cache_batch_idx: 3, and the cache has 3 sequences; accepted: 0 to 2"),
        ({"q": q.double()}, "k_cache: torch.float32; accepted: torch.float64"),
        ({"v_cache": torch.zeros(3, 8, 2, 8)}, r"v_cache: shape 3x8x2x8; accepted: \(3, 9, 2, Dv\)"),
        ({"softmax_scale": torch.ones(1)}, "softmax_scale: a Tensor"),
        ({"q": q.repeat(2, 1, 1, 1), "k": new.repeat(2, 1, 1, 1), "v": new.repeat(2, 1, 1, 1), "cache_seqlens": lengths.repeat(2)},
         "q: shape 6x2x4x8; accepted: at most the 3 sequences"),
    ):  # fmt: skip
        caches = {name: torch.zeros(3, 9, 2, 8) for name in ("k_cache", "v_cache")}
        arguments = {"q": q, **caches, "k": new, "v": new, "cache_seqlens": lengths, **given}
        with pytest.raises((ValueError, TypeError), match=f"^flash_attn_with_kvcache: {says}"):
            module.flash_attn_with_kvcache(**arguments)
        assert all((arguments[name] == 0).all() for name in caches)
    with pytest.raises(TypeError, match="^window_size: "):
        module.flash_attn_with_kvcache(**{**arguments, "q": q, "k": new, "v": new, "cache_seqlens": lengths, "window_size": 3})
    assert all((arguments[name] == 0).all() for name in caches)


@pytest.mark.parametrize("module", [flash_attn, flash_attn_3], ids=["2", "3"])
@pytest.mark.parametrize("row", [3, -1])
def test_a_row_that_the_cache_has_not(module, row):
    """Without new keys nothing is written, and PyTorch's own error would not say which argument it is."""
    q, cache = torch.randn(2, 1, 2, 8), torch.zeros(3, 9, 2, 8)
    with pytest.raises(ValueError, match=f"cache_batch_idx: {row}, and the cache has 3 sequences; accepted: 0 to 2"):
        module.flash_attn_with_kvcache(q, cache, cache, cache_batch_idx=torch.tensor([0, row], dtype=torch.int32))


@pytest.mark.parametrize("deterministic, switch, order", [(False, False, 0), (True, False, 1), (False, True, 1)])
def test_pytorchs_switch_of_determinism(deterministic, switch, order):
    """The functions that are a forward or a backward by themselves know it, too."""
    q = torch.randn(1, 3, 2, 8)
    torch.use_deterministic_algorithms(switch)
    try:
        arguments = _flash.operator_arguments(q, q, q, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                                              deterministic=deterministic)  # fmt: skip
    finally:
        torch.use_deterministic_algorithms(False)
    names = [argument.name for argument in torch.ops.fovea.attention.default._schema.arguments]
    assert arguments[names.index("deterministic")] == order


# ---- what is refused ----


@pytest.mark.parametrize("window", [5, (1, 2, 3), None])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_window_that_is_no_pair(version, window):
    q, k, v = inputs(4, 4)
    with pytest.raises(TypeError, match=r"^window_size: .*; accepted: \(left, right\)$"):
        VERSIONS[version].flash_attn_func(q, k, v, window_size=window)


def test_packed_keys_that_are_no_pair():
    q = torch.randn(2, 6, 2, 8)
    with pytest.raises(ValueError, match="^kv: shape 2x6x3x2x8; accepted: .B, Sk, 2, Hk, D.$"):
        flash_attn.flash_attn_kvpacked_func(q, torch.randn(2, 6, 3, 2, 8))
    with pytest.raises(ValueError, match="^kv: shape 6x3x2x8; accepted: .total_k, 2, Hk, D.$"):
        flash_attn.flash_attn_varlen_kvpacked_func(q[0], torch.randn(6, 3, 2, 8), offsets([6]), offsets([6]), 6, 6)


REFUSED = {
    "flash_attn": {"flash_attn_varlen_func": ["block_table"],
                   "flash_attn_with_kvcache": ["rotary_cos", "rotary_sin", "cache_leftpad", "block_table"]},
    "flash_attn_3": {
        "flash_attn_func": ["qv", "q_descale", "k_descale", "v_descale", "attention_chunk"],
        "flash_attn_qkvpacked_func": ["q_descale", "k_descale", "v_descale", "attention_chunk"],
        "flash_attn_varlen_func": ["qv", "q_descale", "k_descale", "v_descale", "attention_chunk"],
        "flash_attn_with_kvcache": ["qv", "rotary_cos", "rotary_sin", "cache_leftpad", "page_table", "cu_seqlens_q",
                                    "cu_seqlens_k_new", "rotary_seqlens", "q_descale", "k_descale", "v_descale", "attention_chunk"],
        "_flash_attn_forward": ["k_new", "v_new", "qv", "cu_seqlens_k_new", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos",
                                "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "attention_chunk"],
    },
    "flash_attn_4": {
        "flash_attn_func": ["qv", "gather_kv_indices", "score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars",
                            "block_sparse_tensors", "block_sparse_tensors_bwd"],
        "flash_attn_varlen_func": ["qv", "gather_kv_indices", "page_table", "score_mod", "score_mod_bwd", "mask_mod",
                                   "block_sparse_tensors", "aux_tensors", "aux_scalars"],
        "_flash_attn_fwd": ["qv", "page_table", "score_mod", "mask_mod", "block_sparse_tensors", "aux_tensors", "aux_scalars",
                            "q_descale", "k_descale", "v_descale", "gather_kv_indices"],
        "_flash_attn_bwd": ["score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors"],
    },
}  # fmt: skip


@pytest.mark.parametrize("version, function, argument", [
    (v, f, a) for v, functions in REFUSED.items() for f, arguments in functions.items() for a in arguments])  # fmt: skip
def test_refused_by_name(version, function, argument):
    q = torch.randn(1, 4, 2, 8)
    arguments = [q, q, q]
    if function == "flash_attn_qkvpacked_func":
        arguments = [torch.randn(1, 4, 3, 2, 8)]
    if function == "_flash_attn_bwd":
        arguments = [q] * 5 + [q[..., 0]]
    if function == "flash_attn_varlen_func" and version != "flash_attn_4":
        arguments = [q[0], q[0], q[0], offsets([4]), offsets([4]), 4, 4]
    value = 2 if argument == "attention_chunk" else torch.ones(1)
    with pytest.raises(NotImplementedError, match=rf"^{function}: {argument}: "):
        getattr(VERSIONS[version], function)(*arguments, **{argument: value})
    assert fovea.integrations.stats() == {}


def test_negative_sides_of_version_4():
    """There they move the window off the diagonal, unless nothing of it is left: then there is none."""
    q, k, v = inputs(7, 7)
    for window, causal in (((-1, -1), False), ((3, -4), False), ((-1, 5), True)):
        out, _ = flash_attn_4.flash_attn_func(q, k, v, window_size=window, causal=causal)
        torch.testing.assert_close(out, formula(q, k, v, causal=causal)[0])
    out, _ = flash_attn_4.flash_attn_func(q, k, v, window_size=(2, -1), causal=True)  # causal: the right side is 0
    torch.testing.assert_close(out, formula(q, k, v, (2, 0))[0])


@pytest.mark.parametrize("window", [(None, -2), (-2, None), (3, -1), (-1, 1), (2, -2), (-1, 3)], ids=str)
def test_windows_of_version_4_beside_the_diagonal(window):
    left, right = window

    def formula_of(q, k, v):
        shift = k.shape[1] - q.shape[1]
        distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - shift
        allowed = torch.ones_like(distance, dtype=torch.bool)
        allowed = allowed if left is None else allowed & (distance >= -left)
        allowed = allowed if right is None else allowed & (distance <= right)
        q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
        scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)) / q.shape[-1] ** 0.5
        weights = torch.softmax(scores.masked_fill(~allowed, -math.inf), -1).nan_to_num()  # rows without keys are 0
        return (weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)).transpose(1, 2)

    q, k, v = inputs(7, 9)
    out, _ = flash_attn_4.flash_attn_func(q, k, v, window_size=window)
    torch.testing.assert_close(out, formula_of(q, k, v))
    assert not torch.equal(out, flash_attn_4.flash_attn_func(q, k, v)[0])
    padded, _ = flash_attn_4.flash_attn_varlen_func(q, k, v, window_size=window)
    assert torch.equal(padded, out)
    rows_q, rows_k = [3, 0, 4], [5, 2, 2]
    packed, _ = flash_attn_4.flash_attn_varlen_func(
        q[0], k[0], v[0], cu_seqlens_q=offsets(rows_q), cu_seqlens_k=offsets(rows_k), max_seqlen_q=4, max_seqlen_k=5, window_size=window)  # fmt: skip
    parts = zip(q[0].split(rows_q), k[0].split(rows_k), v[0].split(rows_k))
    torch.testing.assert_close(packed, torch.cat([formula_of(*(x[None] for x in part))[0] for part in parts]))


# ---- bert_padding ----


def test_unpadding_there_and_back():
    x = torch.randn(3, 6, 2, 4, requires_grad=True)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    for b, n in enumerate((4, 0, 6)):
        mask[b, :n] = True
    rows, indices, cu_seqlens, longest, used = _bert_padding.unpad_input(x, mask)
    assert torch.equal(rows, x[mask]) and cu_seqlens.tolist() == [0, 4, 4, 10] and longest == 6 and used.tolist() == [4, 0, 6]
    assert cu_seqlens.dtype == used.dtype == torch.int32 and indices.dtype == torch.int64
    back = _bert_padding.pad_input(rows, indices, 3, 6)
    assert torch.equal(back, torch.where(mask[..., None, None], x, 0))
    (grad,) = torch.autograd.grad((back * 3).sum(), x)
    assert torch.equal(grad, torch.where(mask[..., None, None], 3.0, 0.0).expand_as(x))


def test_unpadding_with_rows_that_take_no_part():
    x = torch.randn(2, 5, 3)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest, used = _bert_padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 5] and cu_seqlens.tolist() == [0, 3, 4] and longest == 3 and used.tolist() == [2, 1]
    assert torch.equal(rows, x.flatten(0, 1)[indices])


def test_unpadding_of_concatenated_sequences():
    x = torch.randn(2, 6, 3)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = _bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9] and cu_seqlens.tolist() == [0, 2, 5, 9] and longest == 4
    assert torch.equal(rows, x.flatten(0, 1)[indices])


def test_rows_by_their_numbers():
    x = torch.randn(5, 2, requires_grad=True)
    numbers = torch.tensor([3, 1])
    rows, rest = _bert_padding.index_first_axis_residual(x, numbers)
    assert torch.equal(rows, x[numbers]) and torch.equal(rest, x) and not rest.requires_grad
    assert torch.equal(_bert_padding.index_first_axis(x, numbers), x[numbers])
    put = _bert_padding.index_put_first_axis(rows, numbers, 5)
    assert torch.equal(put[numbers], rows) and (put[[0, 2, 4]] == 0).all()


# ---- with the rest of PyTorch ----


def test_compiled():
    """The graph has fovea's operator; counts are of traces."""
    import torch._dynamo

    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    function = torch.compile(lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=True), backend=backend, fullgraph=True)
    got = [function(q, k, v) for _ in range(2)]
    assert len(graphs) == 1 and "fovea.attention" in graphs[0]
    assert fovea.integrations.stats() == {"flash_attn": {"served": 0, "traced": 1, "handed_back": {}}}
    torch.testing.assert_close(got[1], flash_attn.flash_attn_func(q, k, v, causal=True))
