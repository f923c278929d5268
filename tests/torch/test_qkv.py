# SPDX-License-Identifier: Apache-2.0
"""fovea.torch.attention_qkv: equal to attention() of the three views, with a gradient that is written in one tensor."""

import pytest
import torch

from fovea.torch import _call, attention, attention_qkv

CASES = {
    "bshd": ((2, 7, 3, 4, 8), 2, {"layout": "bshd", "causal": True}),
    "bhsd": ((2, 3, 4, 7, 8), 1, {}),
    "first": ((3, 2, 4, 7, 8), 0, {"softcap": 3.0}),
    "two levels": ((2, 2, 7, 3, 4, 8), -3, {"layout": "bshd"}),
    "packed": ((17, 3, 4, 8), 1, {"cu_seqlens_q": [0, 6, 17], "cu_seqlens_k": [0, 6, 17], "causal": True}),
    "packed, rows of no sequence": ((20, 3, 4, 8), 1, {"cu_seqlens_q": [0, 6, 17], "cu_seqlens_k": [0, 6, 17]}),
    "dropout": ((2, 7, 3, 4, 8), 2, {"layout": "bshd", "dropout_p": 0.3, "seed": 5}),
}  # fmt: skip


def made(case, dtype=torch.float32):
    shape, dim, options = CASES[case]
    options = {name: torch.tensor(x, dtype=torch.int32) if name.startswith("cu") else x for name, x in options.items()}
    return torch.randn(shape, dtype=dtype, requires_grad=True), dim, options


@pytest.fixture
def copies(monkeypatch):
    """How often three gradients are put together."""
    found = []
    stack = torch.stack
    monkeypatch.setattr(torch, "stack", lambda *args: (found.append(args), stack(*args))[1])
    return found


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_numbers(case, return_lse, copies):
    """Twice, as a kept problem computes the second call."""
    for _ in range(2):
        qkv, dim, options = made(case)
        got = attention_qkv(qkv, dim, return_lse=return_lse, **options)
        want = attention(*qkv.unbind(dim), return_lse=return_lse, **options)
        got, want = (x if return_lse else (x,) for x in (got, want))
        assert all(torch.equal(x, y) for x, y in zip(got, want))
        grads = [torch.randn_like(x) for x in got]
        (packed,), (right,) = (torch.autograd.grad(x, qkv, grads) for x in (got, want))
        assert torch.equal(packed, right) and packed.stride() == qkv.stride()
    assert not copies


def test_the_gradient_is_written_where_it_belongs(monkeypatch):
    """One tensor of qkv's size is made in the backward, and no other one."""
    qkv, dim, options = made("bshd")
    written = []
    backward = _call.backward
    monkeypatch.setattr(_call, "backward", lambda *args, into: (written.append(into), backward(*args, into=into))[1])
    (grad,) = torch.autograd.grad(attention_qkv(qkv, dim, **options).sum(), qkv)
    assert [x.data_ptr() for x in written[0].values()] == [x.data_ptr() for x in grad.unbind(dim)]


@pytest.mark.parametrize("learnt", [True, False])
def test_with_a_bias(learnt):
    qkv, dim, options = made("bhsd")
    bias, sink = torch.randn(1, 4, 7, 7, requires_grad=learnt), torch.randn(4, requires_grad=True)
    leaves = [qkv, sink, *([bias] if learnt else [])]
    got, want = (
        torch.autograd.grad(out.cos().sum(), leaves)
        for out in (attention_qkv(qkv, dim, bias=bias, sink=sink), attention(*qkv.unbind(dim), bias=bias, sink=sink))
    )
    assert all(torch.equal(x, y) for x, y in zip(got, want))


def test_only_the_bias_learns():
    qkv, dim, _ = made("bhsd")
    bias = torch.randn(1, 4, 7, 7, requires_grad=True)
    attention_qkv(qkv.detach(), dim, bias=bias).sum().backward()
    assert bias.grad is not None


def test_gradcheck():
    qkv, dim, options = made("bshd", torch.float64)
    torch.autograd.gradcheck(lambda x: attention_qkv(x[:1, :4], dim, **options), qkv)
    with pytest.raises(NotImplementedError, match="double backward"):
        (grad,) = torch.autograd.grad(attention_qkv(qkv, dim, **options).sum(), qkv, create_graph=True)
        grad.sum().backward()


def test_with_the_rest_of_pytorch():
    qkv, dim, options = made("bshd")
    want = attention_qkv(qkv, dim, **options)
    (right,) = torch.autograd.grad(want.cos().sum(), qkv)
    compiled = torch.compile(lambda x: attention_qkv(x, dim, **options), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(qkv).cos().sum(), qkv)[0], right)
    func = torch.func.grad(lambda x: attention_qkv(x, dim, **options).cos().sum())
    torch.testing.assert_close(func(qkv.detach()), right)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_qkv(qkv, dim, **options)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(torch.autograd.grad(out.float().cos().sum(), qkv)[0], right, rtol=0.1, atol=0.1)
    with torch.profiler.profile() as seen:  # the dispatcher's way in the backward, too
        (watched,) = torch.autograd.grad(attention_qkv(qkv, dim, **options).cos().sum(), qkv)
    assert torch.equal(watched, right) and any("fovea::attention" in event.key for event in seen.key_averages())


@pytest.mark.parametrize("dim", [0, 5, -6, None, 3])
def test_bad_input(dim):
    with pytest.raises(ValueError, match=r"dim: .*, of qkv of shape 2x7x3x4x8; accepted: a dimension of 3, for q, k and v"):
        attention_qkv(torch.randn(2, 7, 3, 4, 8), dim)
    with pytest.raises(TypeError, match="qkv: a list; accepted"):
        attention_qkv([1, 2, 3], 0)
    with pytest.raises(TypeError, match="is_causal: not an option; causal=True"):
        attention_qkv(torch.randn(2, 7, 3, 4, 8, requires_grad=True), 2, is_causal=True)
