# SPDX-License-Identifier: Apache-2.0
"""Every refusal: the exception's type, and that its text names the argument, what was given and what is accepted."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import fovea.torch
from fovea.torch import _call, attention

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 6, 9, 8, 5


def good(**changes):
    options = dict(
        q=torch.randn(B, H, SQ, D),
        k=torch.randn(B, HK, SK, D),
        v=torch.randn(B, HK, SK, DV),
        bias=torch.randn(1, H, SQ, SK),
        mask=torch.ones(B, 1, 1, SK, dtype=torch.bool),
        alibi_slopes=torch.rand(H),
        sink=torch.zeros(H),
        causal=True,
        align="top_left",
    )
    options.update(changes)
    return {name: x for name, x in options.items() if not isinstance(x, type(None)) or name in "qkv"}


def packed(**changes):
    cu_seqlens = torch.tensor([0, 4, 6, 11], dtype=torch.int32)
    options = dict(q=torch.randn(11, H, D), k=torch.randn(11, HK, D), v=torch.randn(11, HK, DV),
                   cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)  # fmt: skip
    options.update(changes)
    return options


def test_what_is_good():
    assert attention(**good()).shape == (B, H, SQ, DV)
    assert attention(**packed()).shape == (11, H, DV)


OTHER = torch.empty(B, HK, SK, D, device="meta")

# name of the case: (what is changed, exception, what its text holds)
CASES = {
    "no tensor": (good(q=np.zeros((B, H, SQ, D))), TypeError, "q: a ndarray; accepted: a torch.Tensor"),
    "none": (good(k=None), TypeError, "k: None; accepted: a torch.Tensor"),
    "bias no tensor": (good(bias=1.0), TypeError, "bias: a float; accepted: a torch.Tensor"),
    "slopes as a list": (good(alibi_slopes=[1.0] * H), TypeError, "alibi_slopes: a list; accepted: a torch.Tensor"),
    "device of k": (good(k=OTHER), ValueError, "k: on meta; accepted: cpu, where q lies"),
    "device of mask": (good(mask=torch.ones(1, device="meta")), ValueError, "mask: on meta; accepted: cpu"),
    "device of seed": (good(dropout_p=0.1, seed=torch.zeros(1, dtype=torch.int64, device="meta")), ValueError,
                       "seed: on meta; accepted: cpu"),
    "type of k": (good(k=torch.randn(B, HK, SK, D).half()), TypeError, "k: fp16; accepted: .*fp32"),
    "integers": (good(q=torch.zeros(B, H, SQ, D, dtype=torch.int32)), TypeError, "q: int32; accepted: "),
    "bytes": (good(v=torch.zeros(B, HK, SK, D, dtype=torch.uint8)), TypeError, "v: uint8; accepted: float32"),
    "complex": (good(q=torch.zeros(B, H, SQ, D, dtype=torch.complex64)), TypeError, "q: complex64; accepted: float32"),
    "float mask": (good(mask=torch.zeros(SQ, SK)), TypeError, "mask: fp32; accepted: bool; numbers .* go into bias"),
    "float mask that learns": (good(mask=torch.zeros(SQ, SK, requires_grad=True)), TypeError, "mask: fp32; .* go into bias"),
    "uint8 mask": (good(mask=torch.ones(SQ, SK, dtype=torch.uint8)), TypeError, "mask: uint8; accepted: bool"),
    "integer bias": (good(bias=torch.zeros(SQ, SK, dtype=torch.int64)), TypeError, "bias: int64; accepted"),
    "bool bias": (good(bias=torch.ones(SQ, SK, dtype=torch.bool)), TypeError, "bias: bool; accepted"),
    "slopes that learn": (good(alibi_slopes=torch.rand(H, requires_grad=True)), ValueError,
                          "alibi_slopes: requires_grad, .*no gradient; accepted: .*detach.*bias"),
    "scale that learns": (good(scale=torch.ones(1, requires_grad=True)), TypeError,
                          "scale: a Tensor; accepted: a number, which has no gradient; .*multiply q"),
    "softcap that learns": (good(softcap=torch.ones(())), TypeError, "softcap: a Tensor; accepted: a number"),
    "scale text": (good(scale="1"), TypeError, "scale: '1'; accepted: a number"),
    "scale list": (good(scale=[1]), TypeError, r"scale: \[1\]; accepted: a number"),
    "scale beyond floats": (good(scale=10**400), ValueError, "scale: an integer beyond .*; accepted: a finite one"),
    "causal as a tensor": (good(causal=torch.tensor(True)), TypeError, "causal: tensor.*; accepted: True or False"),
    "causal as text": (good(causal="no"), TypeError, "causal: 'no'; accepted: True or False"),
    "deterministic": (good(deterministic="yes"), TypeError, "deterministic: 'yes'; accepted: True or False"),
    "infinite scale": (good(scale=float("inf")), ValueError, "scale: inf; accepted"),
    "softcap": (good(softcap=-1.0), ValueError, "softcap: -1; accepted"),
    "dropout": (good(dropout_p=1.5), ValueError, "dropout_p: 1.5; accepted"),
    "seed text": (good(dropout_p=0.5, seed="x"), TypeError, "seed: 'x'; accepted: an integer"),
    "seed float": (good(dropout_p=0.5, seed=1.5), TypeError, "seed: 1.5; accepted: an integer"),
    "seed too large": (good(dropout_p=0.5, seed=2**64), ValueError, f"seed: {2**64}; accepted: .*64 bits"),
    "seed type": (good(dropout_p=0.5, seed=torch.zeros(1)), TypeError, "seed: a tensor of float32; accepted: .*int64"),
    "seed shape": (good(dropout_p=0.5, seed=torch.zeros(2, 1, dtype=torch.int64)), ValueError,
                   "seed: a tensor of shape 2x1; accepted: .*one int64"),
    "offset that is no integer": (good(offset=0.0), TypeError, "offset: 0.0; accepted: an integer"),
    "offset type": (good(dropout_p=0.5, offset=torch.zeros(1)), TypeError, "offset: a tensor of float32; accepted"),
    "rng": (good(dropout_p=0.5, rng="philox"), ValueError, "rng: 'philox'; accepted: 'fovea', 'torch_mem_efficient'"),
    "align": (good(align="left"), ValueError, "align: 'left'; accepted: None, 'bottom_right', 'top_left'"),
    "no align": (good(align=None), ValueError, "align: None with causal, Sq=6 and Sk=9; accepted: 'bottom_right' .* 'top_left'"),
    "no align, window": (good(align=None, causal=False, window=(2, 2)), ValueError, "align: None with window, Sq=6"),
    "no align, slopes": (good(align=None, causal=False), ValueError, "align: None with alibi_slopes, Sq=6 and Sk=9"),
    "no align, packed": (packed(causal=True, cu_seqlens_k=torch.tensor([0, 4, 7, 11])), ValueError,
                         "align: None with causal, Sq=2 and Sk=3 in sequence 1; accepted"),
    "no align, used": (good(align=None, seqused_k=torch.tensor([6, 3], dtype=torch.int32)), ValueError,
                       "align: None with causal, Sq=6 and Sk=3 in sequence 1; accepted"),
    "layout": (good(layout="sbhd"), ValueError, "layout: 'sbhd'; accepted: 'bhsd', 'bshd'"),
    "window": (good(window=3), TypeError, "window: 3; accepted: a pair"),
    "window of text": (good(window=("a", 1)), TypeError, "window: 'a'; accepted: an integer"),
    "window of none": (good(window=(5, None)), TypeError, "window: None; accepted: an integer, -1 for unbounded"),
    "is_causal": (good(is_causal=True), TypeError, 'is_causal: not an option; causal=True, with align="top_left"'),
    "attn_mask": (good(attn_mask=1), TypeError, "attn_mask: not an option; mask= for bool .*bias="),
    "typo": (good(causl=True), TypeError, r"causl: not an option; did you mean causal\?"),
    "out": (good(out=1), TypeError, "out: not an option; accepted: bias, bias2"),
    "seed of bool": (good(seed=True), TypeError, "seed: True; accepted: an integer of up to 64 bits"),
    "window beyond 64 bits": (good(window=(2**64 + 2, 0)), ValueError, f"window: {2**64 + 2}; accepted: .*64 bits"),
    "window below": (good(window=(-2, 1)), ValueError, r"window: -2; accepted: -1 \(unbounded\)"),
    "backend": (good(backend="tpu"), ValueError, "backend: .*tpu.*accepted"),
    "backend type": (good(backend=3), TypeError, "backend: 3; accepted: a name"),
    "dimensions": (good(q=torch.randn(H, SQ, D)), ValueError, r"q: shape 4x6x8; accepted: \(B, Hq, S, D\) or \(B1, B2"),
    "dimensions of v": (good(v=torch.randn(2)), ValueError, r"v: shape 2; accepted: \(B, Hk, S, Dv\)"),
    "packed dimensions": (packed(k=torch.randn(1, 11, HK, D)), ValueError,
                          r"k: shape 1x11x2x8; accepted: \(total, Hk, D\), as cu_seqlens are given"),
    "head dim": (good(k=torch.randn(B, HK, SK, D + 1)), ValueError, "k: shape 2x2x9x9, head_dim 9; accepted: that of q, 8$"),
    "rows of v": (good(v=torch.randn(B, HK, SK - 1, DV)), ValueError, r"v: shape 2x2x8x5; accepted: \(B, Hk, Sk, Dv\), 2x2x9x5$"),
    "heads": (good(k=torch.randn(B, 3, SK, D), v=torch.randn(B, 3, SK, DV)), ValueError, "3.*accepted"),
    "batch": (good(k=torch.randn(3, HK, SK, D)), ValueError, "k: shape"),
    "bias shape": (good(bias=torch.randn(H, SQ, SK + 1)), ValueError, "bias: shape 4x6x10 does not broadcast to B=2, Hq=4, Sq=6, Sk=9$"),
    "six dimensions": (good(bias=torch.randn(1, 1, 1, H, SQ, SK)), ValueError, "bias: shape 1x1x1x4x6x9; accepted: at most 5"),
    "sink shape": (good(sink=torch.zeros(H + 1)), ValueError, "sink: shape 5; accepted"),
    "sink type": (good(sink=torch.zeros(H).int()), TypeError, "sink: int32; accepted"),
    "slopes type": (good(alibi_slopes=torch.zeros(H, dtype=torch.int64)), TypeError, "alibi_slopes: int64; accepted"),
    "mask of int64": (good(mask=torch.ones(SQ, SK, dtype=torch.int64)), TypeError, "mask: int64; accepted: bool; mask != 0"),
    "mask of uint8": (good(mask=torch.ones(SQ, SK, dtype=torch.uint8)), TypeError, "mask: uint8; accepted: bool; mask != 0"),
    "layouts confused": (good(layout="bshd"), ValueError, r"; with layout='bhsd', \(B, H, S, D\), these shapes agree \(the def"),
    "sliding_window": (good(sliding_window=4), TypeError, r"sliding_window: not an option; window=\(n - 1, 0\)"),
    "one cu_seqlens": (packed(cu_seqlens_k=None), ValueError, "cu_seqlens_k"),
    "cu_seqlens type": (packed(cu_seqlens_q=torch.tensor([0.0, 11.0])), TypeError, "cu_seqlens_q: fp32; accepted"),
    "cu_seqlens fall": (packed(cu_seqlens_q=torch.tensor([0, 6, 4, 11])), ValueError, "cu_seqlens_q"),
    "max_seqlen": (packed(max_seqlen_q=4.5), TypeError, "max_seqlen_q: 4.5; accepted: an integer"),
    "max_seqlen beyond 64 bits": (packed(max_seqlen_k=2**64 + 9), ValueError, "max_seqlen_k: .*; accepted: .*64 bits"),
    "max_seqlen, dense": (good(max_seqlen_q=7), ValueError, "max_seqlen_q: 7 without cu_seqlens; accepted: none"),
    "max_seqlen too short": (packed(max_seqlen_q=2), ValueError, "max_seqlen_q"),
    "batch_shape": (packed(batch_shape=(2, 2)), ValueError, "batch_shape: 2x2; accepted: B1 x B2 = 3"),
    "batch_shape type": (packed(batch_shape=3), TypeError, "batch_shape: 3; accepted: a pair"),
    "batch_shape, dense": (good(batch_shape=(1, 2)), ValueError, "batch_shape: given without cu_seqlens; accepted: None"),
    "seqused type": (good(seqused_k=torch.tensor([6.0, 3.0])), TypeError, "seqused_k: fp32; accepted: int32"),
    "seqused past 2^32": (good(seqused_k=torch.tensor([6, 2**32 + 3])), ValueError, "seqused_k: 2147483647 at index 1"),
    "seqused too long": (good(seqused_k=torch.tensor([6, 30], dtype=torch.int32)), ValueError, "seqused_k"),
}  # fmt: skip


@pytest.mark.parametrize("changed,kind,text", CASES.values(), ids=CASES)
def test_refused(changed, kind, text):
    with pytest.raises(kind) as caught:
        attention(**changed)
    assert caught.type is kind
    assert re.search(text, str(caught.value)), caught.value


@pytest.mark.parametrize("changed,kind,text", [CASES[n] for n in ("type of k", "float mask", "bias shape", "heads")])
def test_refused_through_the_dispatcher(changed, kind, text):
    """With a gradient, and where a profiler watches: the same words."""
    changed = {n: x.requires_grad_() if n == "q" else x for n, x in changed.items()}
    with torch.profiler.profile(), pytest.raises(kind, match=text):
        attention(**changed)
    with pytest.raises(kind, match=text):
        attention(**changed)
    changed["q"].requires_grad_(False)


@pytest.mark.parametrize("name,value,text", [
    ("rng", "xyz", "rng: 'xyz'; accepted: 'fovea', 'torch_mem_efficient'"),
    ("align", "xyz", "align: 'xyz'; accepted: 'bottom_right', 'top_left', None"),
    ("layout", "xyz", "layout: 'xyz'; accepted: 'bshd', 'bhsd'"),
])  # fmt: skip
def test_refused_by_the_operator(name, value, text):
    """Exported programs call it without fovea.torch.attention before it."""
    q = torch.randn(B, H, SQ, D)
    arguments = dict(q=q, k=q, v=q, seed=0, offset=0, scale=None, causal=False, window_left=-1, window_right=-1, align=None,
                     softcap=0.0, dropout_p=0.0, rng="fovea", max_seqlen_q=0, max_seqlen_k=0, batch_outer=0, layout="bhsd",
                     deterministic=0, backend=None)  # fmt: skip
    arguments = [{**arguments, name: value}.get(field) for field in _call.Arguments._fields]
    with pytest.raises(ValueError, match=re.escape(text)):
        torch.ops.fovea.attention(*arguments)


def test_a_gradient_of_what_is_not_there_is_refused_by_the_operator():
    q = torch.randn(B, H, SQ, D)
    lse = torch.zeros(B, H, SQ)
    arguments = [q, q, q, *[None] * 11, 0, 0, None, False, -1, -1, None, 0.0, 0.0, "fovea", 0, 0, 0, "bhsd", 0, None]
    need = [True, False, False, True, False, False]
    with pytest.raises(ValueError, match="need: 'bias', which is not given; accepted: q, k, v"):
        torch.ops.fovea.attention_backward(q, None, q, lse, need, *arguments)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        with pytest.raises(ValueError, match="need: 'bias', which is not given; accepted: q, k, v"):
            torch.ops.fovea.attention_backward(q, None, q, lse, need, *arguments)


def test_a_mask_by_position():
    with pytest.raises(TypeError, match="attention: 4 arguments by position; accepted: q, k, v, and everything else by name"):
        attention(*[torch.randn(B, H, SQ, D)] * 4)


def test_slopes_that_would_learn_are_fine_where_nothing_does():
    with torch.no_grad():
        attention(**good(alibi_slopes=torch.rand(H, requires_grad=True)))


@pytest.mark.filterwarnings("ignore")
def test_layouts_of_memory():
    sparse = torch.zeros(B, HK, SK, D).to_sparse()
    with pytest.raises(TypeError, match=r"k: a tensor of layout torch.sparse_coo; accepted: a dense one"):
        attention(**good(k=sparse))
    q = torch.zeros(B, H, SQ, D).to_sparse()
    with pytest.raises(TypeError, match=r"q: a tensor of layout torch.sparse_coo; accepted: a dense one"):
        attention(**good(q=q))


def test_refused_while_tracing():
    def function(q, k, v):
        return attention(q, k, v, layout="sbhd")

    q = torch.randn(B, H, SQ, D)
    with pytest.raises(Exception, match="layout: 'sbhd'; accepted: 'bhsd', 'bshd'"):
        torch.compile(function, backend="aot_eager")(q, q, q)


def test_nothing_is_left_behind_by_a_refusal():
    inputs = good(bias=torch.randn(H, SQ, SK + 1), q=torch.randn(B, H, SQ, D, requires_grad=True))
    with pytest.raises(ValueError):
        attention(**inputs)
    assert attention(**good()).shape == (B, H, SQ, DV)


# ---- nested tensors ----


def nested(*lengths, heads=H, dim=D):
    return torch.nested.nested_tensor([torch.randn(n, heads, dim) for n in lengths], layout=torch.jagged)


@pytest.mark.filterwarnings("ignore")
def test_nested():
    x = nested(3, 5)
    turned = x.transpose(1, 2)
    assert attention(turned, turned, turned).shape == turned.shape
    refused = [
        (dict(q=turned, k=torch.randn(2, H, 5, D), v=turned), TypeError, "k: a dense tensor, where q is nested"),
        (dict(q=x, k=x, v=x), ValueError, r"q: a nested tensor of shape .*accepted: \(B, H, j, D\)"),
        (dict(q=turned, k=turned, v=turned, layout="bshd"), ValueError, r"q: a nested tensor .*accepted: \(B, j, H, D\)"),
        (dict(q=turned, k=turned, v=turned, cu_seqlens_q=torch.tensor([0, 1])), ValueError, "cu_seqlens_q: given with a nested q"),
        (dict(q=turned, k=turned, v=turned, seqused_k=torch.tensor([0, 1])), ValueError, "seqused_k: given with a nested q"),
        (dict(q=turned, k=turned, v=nested(5, 3).transpose(1, 2)), ValueError, "v: sequences of other lengths"),
        (dict(q=torch.randn(2, H, 5, D), k=turned, v=turned), TypeError, "k: a nested tensor, where q is none"),
        (dict(q=turned, k=turned, v=turned, layout="x"), ValueError, "layout: 'x'; accepted"),
    ]  # fmt: skip
    for given, kind, text in refused:
        with pytest.raises(kind, match=text):
            attention(**given)
    on_meta = [torch.nested.nested_tensor_from_jagged(torch.empty(8, H, D, device="meta"), torch.empty(3, dtype=torch.int64,
               device="meta")).transpose(1, 2) for _ in range(2)]  # fmt: skip
    with pytest.raises(ValueError, match="v: offsets of its own on meta; accepted: the tensor that k has"):
        attention(on_meta[0], on_meta[0], on_meta[1])
    strided = torch.nested.nested_tensor([torch.randn(H, 3, D), torch.randn(H, 5, D)])
    with pytest.raises(TypeError, match=r"q: a nested tensor of layout torch.strided; accepted: .*torch.nested.nested_tensor\(\.\.\., layout=torch.jagged\)"):
        attention(strided, strided, strided)
    gaps = torch.nested.nested_tensor_from_jagged(torch.randn(9, H, D), torch.tensor([0, 4, 9]), torch.tensor([2, 5]))
    with pytest.raises(NotImplementedError, match="q: a nested tensor with gaps; accepted: one without"):
        attention(*[gaps.transpose(1, 2)] * 3)


# ---- PyTorch itself ----


def test_versions():
    refuse = fovea.torch._refuse_old
    refuse(torch.__version__)
    for fine in ("2.9.0", "2.15.0+cu132", "3.0.0a0+gitabc", "2.10.1"):
        refuse(fine)
    for old in ("2.8.0", "2.8.9+cpu", "1.13.1"):
        with pytest.raises(ImportError, match=f"PyTorch {re.escape(old)}; accepted: 2.9 or newer"):
            refuse(old)


def test_a_missing_torch_is_named():
    code = "import sys; sys.modules['torch'] = None; import fovea; import fovea.torch"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "ImportError: fovea.torch needs PyTorch, which cannot be imported here" in ended.stderr
