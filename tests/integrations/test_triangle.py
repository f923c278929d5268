# SPDX-License-Identifier: Apache-2.0
"""triangle_attention, attention_pair_bias and DS4Sci_EvoformerAttention against formulas in PyTorch, in float64, with every
gradient; and as programs find them."""

import importlib
import inspect
import math
import sys
import types

import pytest
import torch
from torch.nn import functional

import fovea.integrations
from fovea.integrations import evoformer, install, triangle, uninstall

B, N, H, Q, K, D = 2, 3, 2, 5, 6, 8

PAIR_BIAS = (
    "single_repr, pair_repr, mask, num_heads, w_ln_a, b_ln_a, w_proj_q, b_proj_q, w_proj_k, w_proj_v, w_proj_g, w_proj_o, "
    "w_proj_z=None, b_proj_o=None, b_proj_z=None, w_ln_z=None, b_ln_z=None, inf=1000000.0, eps=1e-05, attn_scale=None, "
    "return_z_proj=False, is_cached_z_proj=False, *b_proj_k=None, *b_proj_v=None, *w_ln_q=None, *b_ln_q=None, *w_ln_k=None, "
    "*b_ln_k=None, *b_proj_g=None, *norm_kind='layer_norm'"
)


@pytest.mark.parametrize("function, signature", [
    (triangle.triangle_attention, "q, k, v, bias, mask=None, scale=None, return_aux=False, *kv_lengths=None, *exact=None"),
    (triangle.attention_pair_bias, PAIR_BIAS),
    (evoformer.DS4Sci_EvoformerAttention, "Q, K, V, biases"),
])  # fmt: skip
def test_signature(function, signature):
    """As the libraries' documentation has them; `exact` is ours. * marks what is given by name."""
    written = []
    for p in inspect.signature(function).parameters.values():
        star = "*" if p.kind is p.KEYWORD_ONLY else ""
        written.append(star + (p.name if p.default is p.empty else f"{p.name}={p.default!r}"))
    assert ", ".join(written) == signature


@pytest.fixture(autouse=True)
def not_exact():
    yield
    triangle.set_exact(False)


def tensor(*shape, grad=True):
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def qkv():
    return tensor(B, N, H, Q, D), tensor(B, N, H, K, D), tensor(B, N, H, K, D)


def close(got, want, tolerance=1e-11):
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def compare(got, want, leaves, rows=1.0, tolerance=1e-11):
    """Results and gradients; `rows` are weights of 0 for those that do not count."""
    weights = torch.randn_like(want) * rows
    close(got * (weights != 0), want * (weights != 0), tolerance)
    for one, other in zip(*(torch.autograd.grad((x * weights).sum(), leaves, retain_graph=True) for x in (got, want))):
        close(one, other, tolerance)


LARGE = 1e-6  # next to -1e9, doubles have seven digits after the point


def formula(q, k, v, bias, mask=None, scale=None, lowest=-1e9):
    s = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1])) + bias
    if mask is not None:
        s = s + torch.where(mask, 0.0, lowest)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def test_triangle_attention(computed):
    q, k, v = qkv()
    bias = tensor(B, 1, H, Q, K)
    compare(triangle.triangle_attention(q, k, v, bias, None, 0.3), formula(q, k, v, bias, scale=0.3)[0], [q, k, v, bias])
    out, lse, largest = triangle.triangle_attention(q, k, v, bias, return_aux=True)
    want, want_lse = formula(q, k, v, bias)
    compare(out, want, [q, k, v, bias])
    close(lse, want_lse)
    assert largest is None
    four = triangle.triangle_attention(q[0], k[0], v[0], bias[0])
    compare(four, want[:1], [q, k, v, bias])  # cuequivariance, too, gives five dimensions, and programs take [0] of them
    mixed, lse, _ = triangle.triangle_attention(q[0], k[:1], v[0], bias[0], return_aux=True)
    compare(mixed, want[:1], [q, k, v, bias])
    close(lse, want_lse[:1])
    computed("triangle", 4)


def test_triangle_attention_with_a_mask(computed):
    """A row without keys: 0, or with `exact` what cuequivariance computes, its gradients as well."""
    q, k, v = qkv()
    bias = tensor(B, 1, H, Q, K)
    mask = torch.rand(B, N, 1, 1, K) < 0.6
    mask[0, 0] = False
    mask[:, 1:, ..., 0] = mask[1, :, ..., 0] = True
    want, _ = formula(q, k, v, bias, mask)
    alive = mask.any(-1, keepdim=True).double()
    for given in (mask, mask.long()):
        out = triangle.triangle_attention(q, k, v, bias, given)
        compare(out, want, [q, k, v, bias], rows=alive)
        assert (out[0, 0] == 0).all()
    compare(triangle.triangle_attention(q, k, v, bias, mask, exact=True), want, [q, k, v, bias], tolerance=LARGE)
    triangle.set_exact(True)
    compare(triangle.triangle_attention(q, k, v, bias, mask), want, [q, k, v, bias], tolerance=LARGE)
    compare(triangle.triangle_attention(q[0], k[0], v[0], bias[0], mask[0]), want[:1], [q, k, v, bias], tolerance=LARGE)
    assert (triangle.triangle_attention(q, k, v, bias, mask, exact=False)[0, 0] == 0).all()
    computed("triangle", 6)


def test_triangle_attention_with_lengths(computed):
    q, k, v = qkv()
    bias = tensor(B, 1, H, Q, K)
    lengths = torch.tensor([[6, 3, 1], [99, 2, 5]], dtype=torch.int32).view(B, N, 1, 1, 1)
    mask = torch.arange(K) < lengths
    compare(triangle.triangle_attention(q, k, v, bias, kv_lengths=lengths), formula(q, k, v, bias, mask)[0], [q, k, v, bias])
    lengths = lengths.clone()
    lengths[0, 0] = 0
    want, _ = formula(q, k, v, bias, torch.arange(K) < lengths)
    compare(triangle.triangle_attention(q, k, v, bias, kv_lengths=lengths, exact=True), want, [q, k, v, bias], tolerance=LARGE)
    assert (triangle.triangle_attention(q, k, v, bias, kv_lengths=lengths)[0, 0] == 0).all()
    computed("triangle", 3)
    with pytest.raises(ValueError, match="kv_lengths: given with mask"):
        triangle.triangle_attention(q, k, v, bias, mask, kv_lengths=lengths)
    with pytest.raises(TypeError, match="bias: None; accepted: "):
        triangle.triangle_attention(q, k, v, None)


def pair_bias_formula(single, pair, mask, p, rms=False, scale=None):
    normal = (lambda x, w, b: functional.rms_norm(x, x.shape[-1:], w, 1e-5)) if rms else (
        lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b, 1e-5))
    batch, each = pair.shape[0], single.shape[0] // pair.shape[0]
    a = normal(single, p["w_ln_a"], p["b_ln_a"])
    q, k, v = (a @ p[f"w_proj_{x}"].T + (0 if p.get(f"b_proj_{x}") is None else p[f"b_proj_{x}"]) for x in "qkv")
    for x in "qk":
        if p.get(f"w_ln_{x}") is not None:
            made = normal(q if x == "q" else k, p[f"w_ln_{x}"], p.get(f"b_ln_{x}"))
            q, k = (made, k) if x == "q" else (q, made)
    z = normal(pair, p["w_ln_z"], p["b_ln_z"]) @ p["w_proj_z"].T + p["b_proj_z"]
    z = z.permute(0, 3, 1, 2)
    q, k, v = (x.unflatten(-1, (H, -1)).transpose(1, 2) for x in (q, k, v))
    s = q @ k.transpose(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1])) + z.repeat_interleave(each, 0)
    if mask is not None:
        keys = mask if mask.shape[0] == single.shape[0] else mask.repeat_interleave(each, 0)
        s = s - 1e6 * (1 - keys.double())[:, None, None]
    o = (s.softmax(-1) @ v).transpose(1, 2).flatten(2)
    assert batch * each == single.shape[0]
    return (o * torch.sigmoid(a @ p["w_proj_g"].T)) @ p["w_proj_o"].T + p["b_proj_o"], z


@pytest.mark.parametrize("rms", [False, True], ids=["layer_norm", "rms_norm"])
@pytest.mark.parametrize("masked", ["none", "pairs", "all"])
@pytest.mark.parametrize("each", [1, 3])
def test_attention_pair_bias(each, masked, rms, computed):
    """Three representations share a pair representation: its bias is not repeated."""
    width, pairs, length = 12, 7, 5
    single, pair = tensor(B * each, length, width), tensor(B, length, length, pairs)
    shapes = {"w_ln_a": (width,), "b_ln_a": (width,), "w_proj_q": (H * D, width), "b_proj_q": (H * D,),
              "w_proj_k": (H * D, width), "w_proj_v": (H * D, width), "w_proj_g": (H * D, width), "w_proj_o": (width, H * D),
              "w_proj_z": (H, pairs), "b_proj_o": (width,), "b_proj_z": (H,), "w_ln_z": (pairs,), "b_ln_z": (pairs,)}
    more = {"b_proj_k": (H * D,), "w_ln_q": (H * D,), "w_ln_k": (H * D,), "b_ln_k": (H * D,)} if each == 3 else {}
    p = {name: None if rms and name.startswith("b_ln") else tensor(*shape) for name, shape in {**shapes, **more}.items()}
    mask = None
    if masked != "none":
        mask = torch.ones(B if masked == "pairs" else B * each, length, dtype=torch.int64)
        mask[0, 3:] = 0
    leaves = [single, pair, *(x for x in p.values() if x is not None)]
    options = {"norm_kind": "rms_norm" if rms else "layer_norm", "attn_scale": 0.4}
    got, z = triangle.attention_pair_bias(single, pair, mask, H, **p, return_z_proj=True, **options)
    want, want_z = pair_bias_formula(single, pair, mask, p, rms, 0.4)
    compare(got, want, leaves)
    close(z, want_z)
    p.update(w_proj_z=None, b_proj_z=None, w_ln_z=None, b_ln_z=None)
    again, none = triangle.attention_pair_bias(single, z, mask, H, **p, is_cached_z_proj=True, **options)
    close(again, want)
    assert none is None
    computed("triangle", 2)


def test_attention_pair_bias_of_an_empty_batch():
    arguments = (tensor(0, 4, 8), tensor(0, 4, 4, 3), torch.ones(0, 4), 2, tensor(8), None, tensor(16, 8), None,
                 *(tensor(16, 8) for _ in range(3)), tensor(8, 16), tensor(2, 3))  # fmt: skip
    assert triangle.attention_pair_bias(*arguments)[0].shape == (0, 4, 8)


def test_attention_pair_bias_refuses():
    x = tensor(1, 4, 8)
    w = tensor(16, 8)
    arguments = (x, tensor(1, 4, 4, 3), None, 2, tensor(8), None, w, None, w, w, w, tensor(8, 16))
    with pytest.raises(ValueError, match="w_proj_z: None"):
        triangle.attention_pair_bias(*arguments)
    with pytest.raises(ValueError, match="norm_kind: 'batch_norm'"):
        triangle.attention_pair_bias(*arguments, norm_kind="batch_norm")
    with pytest.raises(ValueError, match="b_ln_z: given with norm_kind 'rms_norm'"):
        triangle.attention_pair_bias(*arguments, tensor(2, 3), b_ln_z=tensor(3), norm_kind="rms_norm")
    with pytest.raises(ValueError, match="num_heads: 2, and w_proj_v has 15 rows"):
        triangle.attention_pair_bias(*arguments[:9], tensor(15, 8), *arguments[10:], tensor(2, 3))
    with pytest.raises(ValueError, match="num_heads: 3, and w_proj_q has 16 rows"):
        triangle.attention_pair_bias(*arguments[:3], 3, *arguments[4:], tensor(2, 3))
    with pytest.raises(ValueError, match=r"mask: shape .*5.*; accepted: \(1, 4\)"):
        triangle.attention_pair_bias(*arguments[:2], torch.ones(1, 5), *arguments[3:], tensor(2, 3))
    with pytest.raises(ValueError, match="single_repr: 3 representations, and pair_repr has 2"):
        triangle.attention_pair_bias(tensor(3, 4, 8), tensor(2, 4, 4, 3), *arguments[2:], tensor(2, 3))


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_evoformer(first, second, computed):
    q, k, v = (tensor(B, N, Q, H, D) for _ in range(3))
    biases = [tensor(B, N, 1, 1, Q) if first else None, tensor(B, 1, H, Q, Q) if second else None]
    s = torch.einsum("bnqhd,bnkhd->bnhqk", q, k) / math.sqrt(D) + sum(x for x in biases if x is not None)
    want = torch.einsum("bnhqk,bnkhd->bnqhd", s.softmax(-1), v)
    given = list(biases)
    compare(evoformer.DS4Sci_EvoformerAttention(q, k, v, given), want, [q, k, v, *(x for x in biases if x is not None)])
    assert all(one is other for one, other in zip(given, biases)) and len(given) == 2
    close(evoformer.DS4Sci_EvoformerAttention(q, k, v, biases[:1]) if not second else want, want)
    computed("evoformer", 1 + (not second))


def test_evoformer_refuses():
    q = tensor(B, N, Q, H, D)
    with pytest.raises(ValueError, match="biases: 3; accepted: at most two"):
        evoformer.DS4Sci_EvoformerAttention(q, q, q, [None] * 3)
    with pytest.raises(ValueError, match="^Q: shape 3x7x2x8; accepted: .B, N, L, H, D.$"):
        evoformer.DS4Sci_EvoformerAttention(torch.zeros(3, 7, 2, 8), q, q, [])
    with pytest.raises(ValueError, match=r"biases\[1\]: shape \(2, 3, 1, 1, 5\); accepted: \(2, 1, 2, 5, 5\)"):
        evoformer.DS4Sci_EvoformerAttention(q, q, q, [None, tensor(B, N, 1, 1, Q)])


# ---- as programs find them ----


def test_a_stand_in_for_cuequivariance():
    install("triangle")
    install("triangle")
    import cuequivariance_torch
    from cuequivariance_ops_torch.triangle_attention import CUEQ_TRIATTN_FALLBACK_THRESHOLD
    from cuequivariance_torch.primitives.triangle import triangle_attention

    assert cuequivariance_torch.triangle_attention is triangle_attention is triangle.triangle_attention
    assert CUEQ_TRIATTN_FALLBACK_THRESHOLD == 0
    uninstall("triangle")
    assert not [name for name in sys.modules if name.startswith("cuequivariance")]


def put(monkeypatch, **modules):
    """Packages that are installed, made of what each has."""
    for name, contents in modules.items():
        name = name.replace("__", ".")
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)


def test_an_installed_cuequivariance_is_patched(monkeypatch):
    own = {"triangle_attention": "theirs", "attention_pair_bias": "theirs", "triangle_multiplicative_update": "theirs"}
    put(monkeypatch, cuequivariance_torch=own, cuequivariance_torch__primitives={}, cuequivariance_torch__primitives__triangle=own)
    install("triangle")
    install("triangle")
    for name in ("cuequivariance_torch", "cuequivariance_torch.primitives.triangle"):
        module = sys.modules[name]
        assert module.triangle_attention is triangle.triangle_attention and module.triangle_multiplicative_update == "theirs"
    uninstall("triangle")
    assert sys.modules["cuequivariance_torch"].triangle_attention == "theirs"
    del sys.modules["cuequivariance_torch.primitives.triangle"].triangle_attention
    with pytest.raises(ImportError, match="cuequivariance_torch.primitives.triangle has no triangle_attention"):
        install("triangle")
    assert sys.modules["cuequivariance_torch"].triangle_attention == "theirs"


def test_deepspeed_is_patched_where_it_is_installed(monkeypatch):
    with pytest.raises(ImportError, match="install: deepspeed is not installed"):
        install("evoformer")
    own = {"DS4Sci_EvoformerAttention": "theirs"}
    put(monkeypatch, deepspeed={}, deepspeed__ops={}, deepspeed__ops__deepspeed4science=own,
        deepspeed__ops__deepspeed4science__evoformer_attn=own)  # fmt: skip
    install("evoformer")
    install("evoformer")
    from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention

    assert DS4Sci_EvoformerAttention is evoformer.DS4Sci_EvoformerAttention
    uninstall("evoformer")
    assert sys.modules["deepspeed.ops.deepspeed4science"].DS4Sci_EvoformerAttention == "theirs"
    del sys.modules["deepspeed.ops.deepspeed4science.evoformer_attn"].DS4Sci_EvoformerAttention
    with pytest.raises(ImportError, match="evoformer_attn has no DS4Sci_EvoformerAttention"):
        install("evoformer")
    assert sys.modules["deepspeed.ops.deepspeed4science"].DS4Sci_EvoformerAttention == "theirs"
    assert fovea.integrations.stats() == {}
