# SPDX-License-Identifier: Apache-2.0
"""fovea.integrations.xformers with xFormers' own bias classes, each against its materialize(), with gradients."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("python", "tests/models")]
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))

import torch  # noqa: E402
import xformers.ops  # noqa: E402
from xformers.ops import fmha  # noqa: E402
from xformers.ops.fmha import attn_bias as classes  # noqa: E402

import fovea.integrations  # noqa: E402
from fovea.integrations import xformers as ours  # noqa: E402
from without import taken_away  # noqa: E402

Q, K, USED = [3, 5, 2], [4, 6, 6], [4, 5, 6]
both = classes.BlockDiagonalMask.from_seqlens
padded = {"q_seqlen": Q, "kv_padding": 8, "kv_seqlen": USED}
gappy = {"q_seqlen": Q, "kv_seqstarts": [0, 6, 14, 24], "kv_seqlen": USED}

# (bias, queries, keys)
BIASES = [
    (classes.LowerTriangularMask(), 5, 9),
    (classes.LowerTriangularFromBottomRightMask(), 5, 9),
    (classes.LowerTriangularFromBottomRightLocalAttentionMask(3), 5, 9),
    (classes.LocalAttentionFromBottomRightMask(2, 3), 5, 9),
    (classes.LowerTriangularMaskWithTensorBias(torch.randn(1, 3, 7, 7, dtype=torch.float64)), 7, 7),
    (both(Q, K), 10, 16),
    (both(Q).make_causal(), 10, 10),
    (both(Q, K).make_causal_from_bottomright(), 10, 16),
    (both(Q).make_local_attention(2), 10, 10),
    (both(Q, K).make_local_attention_from_bottomright(3), 10, 16),
    (classes.BlockDiagonalPaddedKeysMask.from_seqlens(**padded), 10, 24),
    (classes.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(**padded), 10, 24),
    (classes.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(**padded, window_left=2, window_right=1), 10, 24),
    (classes.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(**padded, window_size=3), 10, 24),
    (classes.BlockDiagonalGappyKeysMask.from_seqlens(**gappy), 10, 24),
    (classes.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(**gappy), 10, 24),
]


@pytest.mark.parametrize("bias, sq, sk", BIASES, ids=lambda x: type(x).__name__ if not isinstance(x, int) else "")
def test_class(bias, sq, sk):
    q, k, v = (torch.randn(1, n, 3, 8, dtype=torch.float64, requires_grad=True) for n in (sq, sk, sk))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5 + bias.materialize((1, 3, sq, sk)).double()
    want = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1).nan_to_num(0), v)
    fovea.integrations.reset_stats()
    fovea.integrations.install("xformers")
    try:
        got = xformers.ops.memory_efficient_attention(q, k, v, attn_bias=bias)
        with torch.no_grad():
            out, lse = xformers.ops.memory_efficient_attention_forward_requires_grad(q, k, v, attn_bias=bias)
        weights = torch.randn_like(want)
        found = fmha.memory_efficient_attention_backward(weights, out, lse, q, k, v, attn_bias=bias)
    finally:
        fovea.integrations.uninstall("xformers")
    assert fovea.integrations.stats()["xformers"] == {"served": 3, "traced": 0, "handed_back": {}}
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    exact = torch.autograd.grad((want * weights).sum(), (q, k, v))
    for mine in (torch.autograd.grad((got * weights).sum(), (q, k, v)), found):
        for one, other in zip(mine, exact):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_every_class_is_known_or_paged():
    """A class that a new version adds is refused by name; this test names it."""
    names = {name for name, kind in vars(classes).items() if isinstance(kind, type) and issubclass(kind, classes.AttentionBias)}
    unknown = names - set(ours._READERS) - {"AttentionBias"}
    assert {name for name in unknown if not name.startswith("Paged")} == set()
    assert {type(bias).__name__ for bias, _, _ in BIASES} == set(ours._READERS)


@pytest.mark.parametrize("needed", ours._NEEDED, ids=lambda needed: f"{needed.module}.{needed.name}")
def test_without_a_name_nothing_is_patched(needed, monkeypatch):
    own = fmha.memory_efficient_attention_forward
    taken_away(needed, monkeypatch)
    with pytest.raises(ImportError, match=f"needs xFormers as of 0.0.35: {needed.module} has no {needed.name}$"):
        fovea.integrations.install("xformers")
    monkeypatch.undo()
    assert fmha.memory_efficient_attention_forward is own


@pytest.mark.parametrize("bias, sq, sk", BIASES, ids=lambda x: type(x).__name__ if not isinstance(x, int) else "")
def test_classes_with_another_name(bias, sq, sk):
    """A class whose attributes have other names is refused, each of them: lengths that are not found do not count as full."""
    q = torch.zeros(1, sq, 1, 8)
    asked = []

    class Asked:
        def __init__(self, inner, path=""):
            self.inner, self.path = inner, path

        def __getattr__(self, name):
            asked.append(f"{self.path}{name}")
            value = getattr(self.inner, name)
            return Asked(value, f"{self.path}{name}.") if name.endswith("_seqinfo") else value

    reader = ours._READERS[type(bias).__name__]
    reader(Asked(bias), q)

    class Lacks(Asked):
        def __getattr__(self, name):
            if f"{self.path}{name}" == lacking:
                raise AttributeError(f"no {name}")
            value = getattr(self.inner, name)
            return Lacks(value, f"{self.path}{name}.") if name.endswith("_seqinfo") else value

    Lacks.__name__ = type(bias).__name__
    for lacking in asked:
        with pytest.raises(NotImplementedError, match=f"^attn_bias: {type(bias).__name__} as fovea does not know it: no "):
            ours._options(Lacks(bias), q)
    with_lengths = "PaddedKeys" in type(bias).__name__ or "GappyKeys" in type(bias).__name__
    assert ("k_seqinfo.seqlen" in asked) == with_lengths
