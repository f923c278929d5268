# SPDX-License-Identifier: Apache-2.0
"""The operators' schemas: programs that an earlier version saved run with this one, and what is planned is refused by name."""

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


# ---- arguments that are planned ----


def arguments(q, **planned):
    """Of fovea::attention."""
    return (q, q, q, *[None] * 11, 0, 0, None, False, -1, -1, None, 0.0, 0.0, "fovea", 0, 0, 0, "bhsd", 0, None), planned


PLANNED = {
    "position_q": 0,
    "position_k": 16,
    "positions_q": torch.zeros(1, dtype=torch.int64),
    "positions_k": torch.zeros(1, dtype=torch.int64),
    "dropout_streams": torch.zeros(1, 2, dtype=torch.int64),
}


def test_the_schema_has_what_is_planned():
    last = _operators.attention._schema.arguments[len(_call.Arguments._fields) :]
    assert {argument.name: argument.default_value for argument in last} == dict.fromkeys(PLANNED)
    results = _operators.attention_backward._schema.returns
    assert [result.name for result in results] == [f"grad_{name}" for name in _call.DIFFERENTIABLE]


@pytest.mark.parametrize("where", ["eager", "autograd", "fake", "compile", "vmap"])
@pytest.mark.parametrize("name", PLANNED)
def test_what_is_planned_is_refused(name, where):
    q = torch.randn(1, 2, 4, 8, requires_grad=where == "autograd")
    planned = {name: PLANNED[name]}
    if where == "fake":
        q = q.to("meta")
        planned = {key: x.to("meta") if isinstance(x, torch.Tensor) else x for key, x in planned.items()}

    def call(q):
        given, more = arguments(q, **planned)
        return torch.ops.fovea.attention(*given, **more)

    run = {"compile": torch.compile(call, fullgraph=True, backend="aot_eager"), "vmap": torch.vmap(call)}.get(where, call)
    with pytest.raises(Exception, match=f"{name}: given, and no backend of this version has it; accepted: None"):
        run(q[None] if where == "vmap" else q)


@pytest.mark.parametrize("name", PLANNED)
def test_what_is_planned_is_refused_in_the_backward(name):
    q = torch.randn(1, 2, 4, 8)
    out, lse = attention(q, q, q, return_lse=True)
    given, planned = arguments(q, **{name: PLANNED[name]})
    with pytest.raises(NotImplementedError, match=f"{name}: given"):
        torch.ops.fovea.attention_backward(out, None, out, lse, [True] * 3 + [False] * 3, *given, **planned)


def test_planned_arguments_of_none_are_accepted():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    given, planned = arguments(q, **dict.fromkeys(PLANNED))
    out, _ = torch.ops.fovea.attention(*given, **planned)
    out.sum().backward()
    other = q.detach().clone().requires_grad_()
    attention(other, other, other).sum().backward()
    assert torch.equal(q.grad, other.grad)


def test_six_gradients():
    q = torch.randn(1, 2, 4, 8)
    out, lse = attention(q, q, q, return_lse=True)
    given, _ = arguments(q)
    grads = torch.ops.fovea.attention_backward(out, None, out, lse, [True, False, True, False, False, False], *given)
    assert [tuple(x.shape) for x in grads] == [q.shape, (0,), q.shape, (0,), (0,), (0,)]
    with pytest.raises(ValueError, match="need: 2 values; accepted: one for each of q, k, v, bias, bias2, sink"):
        torch.ops.fovea.attention_backward(out, None, out, lse, [True, False], *given)
