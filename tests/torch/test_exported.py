# SPDX-License-Identifier: Apache-2.0
"""The operators' schemas: programs that an earlier version saved run with this one, and arguments that were added have defaults."""

import platform

import pytest
import torch

import kept_programs
from fovea.torch import _call, _operators, attention

VERSIONS = sorted(path.name for path in kept_programs.KEPT.iterdir())


def check(run):
    inputs = kept_programs.inputs()
    results = run(*inputs)
    want = kept_programs.Program()(*inputs)
    assert len(results) == len(want) == 2 + sum(kept_programs.NEED)
    for x, y in zip(results, want):
        assert x.shape == y.shape and y.abs().sum() > 0
        torch.testing.assert_close(x, y)


def load(function, path):
    """A program of a newer PyTorch than this one may be unreadable, which says nothing about fovea."""
    made_by, here = (2, 15), tuple(int(part) for part in torch.__version__.split(".")[:2])
    if here < made_by:
        pytest.skip(f"made by PyTorch {'.'.join(map(str, made_by))}, and this is {torch.__version__}")
    return function(str(path))


@pytest.mark.parametrize("version", VERSIONS)
def test_an_exported_program_of_an_earlier_version(version):
    program = load(torch.export.load, kept_programs.KEPT / version / "program.pt2")
    assert [n.name for n in program.graph.nodes if "fovea" in str(n.target)] == ["attention", "attention_backward"]
    check(program.module())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_package_of_an_earlier_version(version):
    if platform.machine() != "x86_64":
        pytest.skip(f"the package holds machine code for x86-64, and this is {platform.machine()}")
    check(load(torch._inductor.aoti_load_package, kept_programs.KEPT / version / "package.pt2"))


# ---- arguments that were added ----


def arguments(q):
    """Of fovea::attention, as the first version had them."""
    return (q, q, q, *[None] * 11, 0, 0, None, False, -1, -1, None, 0.0, 0.0, "fovea", 0, 0, 0, "bhsd", 0, None)


def test_arguments_that_were_added_have_defaults():
    last = _operators.attention._schema.arguments[len(_call.Arguments._fields) :]
    assert [argument.name for argument in last] == list(_call.Shard._fields)
    assert all(argument.default_value is None for argument in last)
    results = _operators.attention_backward._schema.returns
    assert [result.name for result in results] == [f"grad_{name}" for name in _call.DIFFERENTIABLE]


def test_arguments_of_none_are_accepted():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out, _ = torch.ops.fovea.attention(*arguments(q), **dict.fromkeys(_call.Shard._fields))
    out.sum().backward()
    other = q.detach().clone().requires_grad_()
    attention(other, other, other).sum().backward()
    assert torch.equal(q.grad, other.grad)


def test_six_gradients():
    q = torch.randn(1, 2, 4, 8)
    out, lse = attention(q, q, q, return_lse=True)
    given = arguments(q)
    grads = torch.ops.fovea.attention_backward(out, None, out, lse, [True, False, True, False, False, False], *given)
    assert [tuple(x.shape) for x in grads] == [q.shape, (0,), q.shape, (0,), (0,), (0,)]
    with pytest.raises(ValueError, match="need: 2 values; accepted: one for each of q, k, v, bias, bias2, sink"):
        torch.ops.fovea.attention_backward(out, None, out, lse, [True, False], *given)
