# SPDX-License-Identifier: Apache-2.0
"""Positions and dropout streams in fovea.torch: parts of a problem have the bits of the whole, in every way that an operator is called.
tests/python/test_shards.py has every feature."""

import pytest
import torch
from fovea.torch import attention

OPTIONS = {
    "causal": {"causal": True},
    "window": {"window": (20, 5)},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.3])},
    "dropout": {"dropout_p": 0.4, "seed": 7, "causal": True},
}
HOW = ["eager", "operator", "compile", "create_graph", "func"]


def inputs(seed=0):
    torch.manual_seed(seed)
    return [torch.randn(2, 2, 64, 8, requires_grad=True) for _ in range(3)]


def called(how, function, *tensors):
    """function(*tensors) and its gradients by the tensors, for a loss whose gradient by the result is the result."""
    if how == "func":
        out, pull = torch.func.vjp(function, *tensors)
        return [out, *pull(out)]
    if how == "compile":
        torch._dynamo.reset()  # else each case counts as one more compilation of one function
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    out = function(*tensors)
    return [out, *torch.autograd.grad(out, tensors, out.detach(), create_graph=how == "create_graph")]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("by", ["number", "tensor"])
def test_rows(name, by, how):
    """Rows of q have the rows of out and of q's gradient."""
    q, k, v = inputs()
    options = OPTIONS[name]
    align = {} if name == "dropout" else {"align": "top_left"}
    whole = called("eager", lambda *x: attention(*x, **options, **align), q, k, v)
    sums = [torch.zeros_like(x) for x in (k, v)]
    for first, last in ((0, 16), (16, 64)):
        at = {"position_q": first} if by == "number" else {"positions_q": torch.tensor([first, first])}
        if how == "operator" and by == "tensor":
            at["position_k"] = 0

        def part(q, k, v, at=at):
            return attention(q, k, v, **options, **at)

        rows = q[:, :, first:last].detach().requires_grad_()
        if how == "operator":
            with torch.profiler.profile():  # which watches operators
                found = called(how, part, rows, k, v)
        else:
            found = called(how, part, rows, k, v)
        assert torch.equal(found[0], whole[0][:, :, first:last])
        assert torch.equal(found[1], whole[1][:, :, first:last])
        for total, grad in zip(sums, found[2:]):
            total += grad.detach()
    for total, grad in zip(sums, whole[2:]):
        torch.testing.assert_close(total, grad)


@pytest.mark.parametrize("how", HOW)
def test_heads_of_dropout(how):
    """A part of the heads and of the batch draws the whole's mask by its streams."""
    q, k, v = inputs(1)
    options = {"dropout_p": 0.5, "seed": 3}
    whole = called("eager", lambda *x: attention(*x, **options), q, k, v)
    for b in range(2):
        for h in range(2):
            one = [x[b : b + 1, h : h + 1].detach().requires_grad_() for x in (q, k, v)]
            streams = torch.tensor([[2 * b + h]])
            found = called(how, lambda *x, streams=streams: attention(*x, **options, dropout_streams=streams), *one)
            for part, x in zip(found, whole):
                assert torch.equal(part, x[b : b + 1, h : h + 1])


def test_bad_input():
    q, k, v = (x.detach() for x in inputs())
    for options, error, text in (
        ({"position_q": 1.5}, TypeError, "position_q: 1.5; accepted: an integer"),
        ({"positions_q": [0, 0]}, TypeError, "positions_q: a list; accepted: a torch.Tensor of int64"),
        ({"positions_q": torch.zeros(2)}, TypeError, "positions_q: fp32; accepted: int64"),
        ({"positions_k": torch.zeros(3, dtype=torch.int64)}, ValueError, "positions_k: shape 3; accepted: (B), 2"),
        ({"positions_k": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, "positions_k: on meta; accepted: cpu"),
        ({"position_q": 8, "dropout_p": 0.1}, ValueError, "position_q: 8; accepted with dropout: a multiple of 16"),
        ({"position_q": 16, "align": "top_left"}, ValueError, "align: top left beside positions"),
        ({"dropout_streams": torch.zeros(3, 2, dtype=torch.int64)}, ValueError, "dropout_streams: shape 3x2 does not broadcast"),
    ):
        with pytest.raises(error) as raised:
            attention(q, k, v, causal=True, **options)
        assert str(raised.value).startswith(text), raised.value
    with pytest.raises(NotImplementedError, match="position_q: given, under torch.vmap; accepted: None"):
        torch.vmap(lambda q: attention(q, k, v, position_q=16, causal=True))(q[None])


def test_kept_problems_are_told_apart():
    """A call with other positions, or with none, is another problem."""
    q, k, v = (x.detach() for x in inputs())
    plain = attention(q, k, v, causal=True)
    moved = [attention(q, k, v, causal=True, position_q=n) for n in (0, 5, 0)]
    each = [attention(q, k, v, causal=True, positions_q=torch.tensor([n, n])) for n in (0, 5)]
    assert torch.equal(moved[0], plain) and torch.equal(moved[2], plain) and not torch.equal(moved[1], plain)
    assert torch.equal(each[0], plain) and torch.equal(each[1], moved[1])
    assert torch.equal(attention(q, k, v, causal=True), plain)
