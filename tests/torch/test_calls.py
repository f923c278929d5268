# SPDX-License-Identifier: Apache-2.0
"""Problems that Python keeps from call to call: a call that finds one computes what it would have computed without."""

import random
import subprocess
import sys

import pytest
import torch

import cases
from fovea.torch import _call, attention

ROWS = cases.rows()


@pytest.fixture(autouse=True)
def nothing_kept(python_path):
    _call._kept.clear()


def results(row, seed):
    case = cases.make(row, torch.float32, seed)
    inputs = {name: x.detach().requires_grad_() for name, x in case.inputs.items()}
    options = {**case.options, **{name: x for name, x in inputs.items() if name not in ("q", "k", "v")}}
    out, lse = attention(inputs["q"], inputs["k"], inputs["v"], return_lse=True, **options)
    loss = (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum() + torch.where(lse.isfinite(), lse, 0).sum()
    with torch.no_grad():
        alone = attention(inputs["q"], inputs["k"], inputs["v"], **options)
    return [out, lse, alone, *torch.autograd.grad(loss, list(inputs.values()))]


def test_the_same_bits_with_what_was_kept():
    """The whole case table in another order, each row with other numbers and another seed than the time before."""
    want = []
    for row in ROWS:
        _call._kept.clear()
        want.append(results(row, seed=2))
    _call._kept.clear()
    order = list(range(len(ROWS)))
    for seed in (1, 2):
        random.Random(seed).shuffle(order)
        for index in order:
            got = results(ROWS[index], seed)
            if seed == 2:
                for x, y in zip(got, want[index]):
                    assert torch.equal(x, y) and x.stride() == y.stride(), cases.name_of(ROWS[index])
    assert sum(map(len, _call._kept.values())) == len(_call._kept) > len(ROWS)  # one of each kind: all were used again


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(_call, "_MOST_KEPT", 4)
    for n in range(1, 20):
        q = torch.randn(1, 1, n, 4)
        want = (q @ q.transpose(2, 3) / 2).softmax(-1) @ q
        torch.testing.assert_close(attention(q, q, q), want)
        assert len(_call._kept) <= 4


def test_every_call_is_checked():
    """What the tensors hold may be wrong the second time."""
    q = torch.randn(5, 2, 8)
    cu_seqlens, others = torch.tensor([0, 2, 5]), torch.tensor([0, 2, 5])
    options = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=others, causal=True)
    want = attention(q, q, q, **options)
    others[1] = 3
    with pytest.raises(ValueError, match="align: None with causal, Sq=2 and Sk=3 in sequence 0"):
        attention(q, q, q, **options)
    others[1] = 7
    with pytest.raises(ValueError, match="cu_seqlens_k: 7 at index 1"):
        attention(q, q, q, align="top_left", **options)
    others[1] = 2
    assert torch.equal(attention(q, q, q, **options), want)


def test_a_shape_that_was_refused_is_refused_again():
    q = torch.randn(1, 2, 4, 8)
    for _ in range(2):
        with pytest.raises(ValueError, match="bias: shape 3x4 does not broadcast"):
            attention(q, q, q, bias=torch.zeros(3, 4))
    assert not any(_call._kept.values())


def test_other_tensors_that_lie_elsewhere_are_refused_by_the_operator():
    """Which is what an exported program calls, without fovea.torch.attention before it."""

    class Elsewhere:
        device = torch.device("cuda", 0)

        def __init__(self, tensor):
            self.tensor = tensor

        def __getattr__(self, name):
            return getattr(self.tensor, name)

    q = torch.randn(1, 2, 4, 8)
    arguments = [q, q, q, None, None, Elsewhere(torch.ones(4, 4, dtype=torch.bool)), *[None] * 8, 0, 0, None, False, -1, -1,
                 None, 0.0, 0.0, "fovea", 0, 0, 0, "bhsd", 0, None]  # fmt: skip
    for _ in range(2):
        with pytest.raises(ValueError, match="mask: on cuda:0; accepted: cpu, where q lies"):
            _call.forward(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_sinks_slopes_and_lengths_of_other_types(half, dtype):
    """Converted to what the library takes, and the sink's gradient back again."""
    q, k, v = (torch.randn(2, 4, 9, 8, dtype=dtype) for _ in range(3))
    sink, slopes, used = torch.randn(4).to(half), torch.rand(4).to(half), torch.tensor([4, 9])
    given = sink.clone().requires_grad_()
    out = attention(q, k, v, sink=given, alibi_slopes=slopes, seqused_k=used, align="top_left")
    out.sum().backward()
    same = sink.to(dtype).requires_grad_()
    right = attention(q, k, v, sink=same, alibi_slopes=slopes.to(dtype), seqused_k=used.int(), align="top_left")
    right.sum().backward()
    assert torch.equal(out, right) and given.grad.dtype == half and torch.equal(given.grad, same.grad.to(half))


def test_slopes_of_float64():
    """As torch.tensor of NumPy's numbers makes them: rounded to float32 beside any q but one of float64."""
    q, slopes = torch.randn(2, 4, 9, 8), torch.rand(4, dtype=torch.float64)
    assert torch.equal(attention(q, q, q, alibi_slopes=slopes), attention(q, q, q, alibi_slopes=slopes.float()))
    exact = attention(q.double(), q.double(), q.double(), alibi_slopes=slopes)
    narrow = attention(q.double(), q.double(), q.double(), alibi_slopes=slopes.float())
    assert torch.equal(narrow, attention(q.double(), q.double(), q.double(), alibi_slopes=slopes.float().double()))
    assert not torch.equal(exact, attention(q.double(), q.double(), q.double(), alibi_slopes=slopes.float().double()))


def test_fovea_torch_is_imported_when_it_is_used():
    code = (
        "import sys, fovea\n"
        "assert 'torch' not in sys.modules\n"
        "attention = fovea.torch.attention\n"
        "import fovea.torch\n"
        "assert attention is fovea.torch.attention and 'torch' in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
