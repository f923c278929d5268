# SPDX-License-Identifier: Apache-2.0
"""Together with the rest of PyTorch: opcheck, torch.compile, export, autocast, checkpointing, vmap, modes, threads."""

import io
import random
import sys
import threading

import pytest
import torch
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cases
from fovea.torch import _operators, attention

FEATURES = [
    {},
    {"rows": "short", "causal": True, "window": (2, -1), "heads": (4, 2), "bias": "b1,1,h,q,k", "sink": True},
    {"rows": "two_level", "bias": "b1,1,h,q,k", "bias2": "b1,b2,1,1,k", "mask": "b1,b2,1,1,k", "layout": "bshd"},
    {"rows": "packed_padded", "alibi": "bh", "softcap": 1.5, "dims": (5, 3), "bias": "h,1,k"},
    {"used": "qk", "mask": "dead", "dropout": ("fovea", 0.25), "sink": True},
]
ids = lambda row: cases.name_of({**cases.PLAIN, **row})  # noqa: E731


def problem(row, dtype=torch.float64):
    """(function of the differentiable tensors, those tensors)"""
    case = cases.make({**cases.PLAIN, **row}, dtype)
    names = list(case.inputs)

    def function(*tensors):
        inputs = dict(zip(names, tensors))
        options = {**case.options, **{n: x for n, x in inputs.items() if n not in ("q", "k", "v")}}
        return attention(inputs["q"], inputs["k"], inputs["v"], return_lse=True, **options)

    return function, [x.detach().clone().requires_grad_() for x in case.inputs.values()]


def gradients(function, tensors):
    out, lse = function(*tensors)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)).sum()
    loss = loss + torch.where(lse.isfinite(), lse, 0).sum()
    return [out, lse, *torch.autograd.grad(loss, tensors)]


def assert_equal(got, want):
    for x, y in zip(got, want):
        assert x.dtype == y.dtype and x.stride() == y.stride()
        assert torch.equal(x, y)


def operator_arguments(row):
    """What reaches fovea::attention."""
    seen = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, args))
            return func(*args, **(kwargs or {}))

    function, tensors = problem(row)
    with Spy():
        function(*(x.detach() for x in tensors))
        function, tensors = problem(row)
        gradients(function, tensors)
    forward = [args for func, args in seen if func is _operators.attention]
    backward = [args for func, args in seen if func is _operators.attention_backward]
    assert len(forward) == 2 and len(backward) == 1
    return forward[0], backward[0]


@pytest.mark.parametrize("row", FEATURES, ids=ids)
def test_opcheck(row):
    forward, backward = operator_arguments(row)
    wanted = tuple(
        x.detach().clone().requires_grad_() if i in _operators._INDEX and x is not None else x
        for i, x in enumerate(forward)
    )
    opcheck(_operators.attention, wanted)
    opcheck(_operators.attention_backward, tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in backward))


def test_opcheck_seed():
    opcheck(_operators.seed, ([torch.randn(3), torch.randn(2)],), test_utils=("test_schema", "test_faketensor"))


# ---- torch.compile and torch.export ----


@pytest.mark.parametrize("row", FEATURES, ids=ids)
def test_compile_fullgraph(row):
    function, tensors = problem(row)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(compiled, tensors), gradients(function, tensors))


def test_compile_with_inductor():
    """Inductor lays memory out and plans its reuse: strides have to be what the fakes say."""

    def block(x, w, bias):
        q, k, v = (x @ w).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return attention(q * 2, k, v, bias=bias.exp(), causal=True, return_lse=True)

    tensors = [torch.randn(s, requires_grad=True) for s in ((2, 6, 12), (12, 48), (1, 2, 6, 6))]
    got = gradients(torch.compile(block, fullgraph=True), tensors)
    for x, y in zip(got, gradients(block, tensors)):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y)


def test_compile_dynamic_shapes():
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, n: attention(q, q, q, causal=True, seed=n, dropout_p=0.5),
                             fullgraph=True, dynamic=True, backend=backend)  # fmt: skip
    for n in (5, 8, 13):
        q = torch.randn(2, 4, n, 16)
        assert torch.equal(compiled(q, n), attention(q, q, q, causal=True, seed=n, dropout_p=0.5))
    assert len(frames) == 1


def test_compile_draws_the_seeds_of_eager_mode():
    q = torch.randn(1, 2, 16, 8)
    function = lambda q: attention(q, q, q, dropout_p=0.5)  # noqa: E731
    compiled = torch.compile(function, fullgraph=True)
    torch.manual_seed(3)
    want = [function(q) for _ in range(3)]
    torch.manual_seed(3)
    got = [compiled(q) for _ in range(3)]
    assert not torch.equal(want[0], want[1])
    for x, y in zip(got, want):
        assert torch.equal(x, y)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)
        self.bias = torch.nn.Parameter(torch.randn(2, 1, 1))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, bias=self.bias, causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    module, x = Module(), torch.randn(3, 5, 16)
    rows = {0: torch.export.Dim("batch"), 1: torch.export.Dim("rows")}
    program = torch.export.export(module, (x,), dynamic_shapes=(rows,), strict=strict)
    assert any(node.target is torch.ops.fovea.attention.default for node in program.graph.nodes)
    memory = io.BytesIO()
    torch.export.save(program, memory)
    memory.seek(0)
    loaded = torch.export.load(memory).module()
    for shape in ((3, 5, 16), (2, 9, 16)):
        y = torch.randn(shape)
        torch.testing.assert_close(loaded(y), module(y))
    loaded(x).sum().backward()
    module(x).sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(loaded.get_parameter(name).grad, parameter.grad)


def test_fake_and_meta_tensors():
    q = torch.empty(2, 4, 7, 16, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out, lse = attention(q, q, q, return_lse=True)
    assert out.device.type == "meta" and out.shape == q.shape and out.dtype == q.dtype
    assert lse.shape == (2, 4, 7) and lse.dtype == torch.float32
    out.sum().backward()
    assert q.grad.shape == q.shape


# ---- autocast, checkpointing ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    q, k, v, bias = (torch.randn(1, 2, 5, n, requires_grad=True) for n in (8, 8, 8, 5))
    mixed = [q, k.detach().to(dtype), v, bias]
    with torch.autocast("cpu", dtype):
        out = attention(*mixed[:3], bias=bias)
        assert out.dtype == dtype
        doubled = attention(q.double(), k.double(), v.double())
        assert doubled.dtype == torch.float64  # as everywhere in autocast
    want = attention(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias)
    assert torch.equal(out, want)
    grads = torch.autograd.grad(out.float().sum(), (q, v, bias))
    for x, y in zip(grads, torch.autograd.grad(want.float().sum(), (q, v, bias))):
        assert x.dtype == torch.float32 and torch.equal(x, y)


def test_autocast_leaves_the_bias_as_it_is():
    """What bfloat16 would round away is still there."""
    q = torch.randn(1, 1, 4, 8)
    bias = 256 + torch.rand(1, 1, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attention(q, q, q, bias=bias, return_lse=True)
    rounded = attention(*[q.bfloat16()] * 3, bias=bias.bfloat16(), return_lse=True)[1]
    kept = attention(*[q.bfloat16()] * 3, bias=bias, return_lse=True)[1]
    assert torch.equal(lse, kept) and not torch.equal(lse, rounded)


def test_autocast_under_compile():
    q = torch.randn(1, 2, 5, 8, requires_grad=True)

    def function(q):
        with torch.autocast("cpu", torch.bfloat16):
            return attention(q, q, q, return_lse=True)

    assert_equal(gradients(torch.compile(function, fullgraph=True, backend="aot_eager"), [q]), gradients(function, [q]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_mask(reentrant):
    q = torch.randn(1, 2, 16, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)

    def block(q):
        q = q @ weight
        return attention(q, q, q, dropout_p=0.5)

    results = []
    for run in (block, lambda q: checkpoint(block, q, use_reentrant=reentrant)):
        torch.manual_seed(5)
        out = run(q)
        torch.randn(3)  # the generator moves on before the backward
        q.grad = weight.grad = None
        (out**2).sum().backward()  # reentrant checkpointing knows no torch.autograd.grad
        results.append([out, q.grad, weight.grad])
    assert_equal(*results)


def test_selective_checkpointing_sees_the_operator():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    seen = []

    def policy(context, op, *args, **kwargs):
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE if op is _operators.attention else CheckpointPolicy.PREFER_RECOMPUTE

    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    block = lambda q: attention(q * 2, q, q, dropout_p=0.5)  # noqa: E731
    out = checkpoint(block, q, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    out.sum().backward()
    assert _operators.attention in seen


# ---- seeds and determinism ----


def test_seeds_come_from_the_generator():
    q = torch.randn(1, 2, 16, 8)
    draw = lambda: attention(q, q, q, dropout_p=0.5)  # noqa: E731
    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert torch.equal(draw(), first) and torch.equal(draw(), second)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    attention(q, q, q)
    assert torch.equal(state, torch.get_rng_state())  # without dropout nothing is drawn


def test_seed_and_offset_by_hand():
    import fovea

    q = torch.randn(1, 2, 16, 8)
    for seed, offset in ((7, 3), (2**64 - 1, 2**63), (-1, 0)):
        want = fovea.attention(q, q, q, layout="bhsd", dropout_p=0.5, seed=seed, offset=offset)
        assert torch.equal(attention(q, q, q, dropout_p=0.5, seed=seed, offset=offset), want)
    # a tensor is read when the call computes
    one = torch.tensor([7])
    got = attention(q, q, q, dropout_p=0.5, seed=one, offset=torch.tensor(3))
    assert torch.equal(got, attention(q, q, q, dropout_p=0.5, seed=7, offset=3))


def flags_of_calls(monkeypatch, refuse_deterministic=False):
    """The flags with which the library is asked; it may be made to refuse what is deterministic."""
    from fovea import _abi
    from fovea.torch import _call

    seen = []

    class Library:
        def __getattr__(self, name):
            return getattr(real, name)

        def call(self, function, raw, *workspace):
            if refuse_deterministic and raw.contents.flags & _abi.DETERMINISTIC:
                return _abi.UNSUPPORTED
            status = function(raw, *workspace)
            if status == _abi.OK:
                seen.append(raw.contents.flags & _abi.DETERMINISTIC)
            return status

        def fovea_forward(self, *arguments):
            return self.call(real.fovea_forward, *arguments)

        def fovea_backward(self, *arguments):
            return self.call(real.fovea_backward, *arguments)

    real = _call.lib
    monkeypatch.setattr(_call, "lib", Library())
    return seen


def test_deterministic_algorithms(monkeypatch, python_path):
    from fovea import _abi

    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    seen = flags_of_calls(monkeypatch)
    attention(q, q, q).sum().backward()
    assert seen == [0, 0]
    attention(q, q, q, deterministic=True).sum().backward()
    assert seen[2:] == [_abi.DETERMINISTIC] * 2
    torch.use_deterministic_algorithms(True)
    attention(q, q, q).sum().backward()
    assert seen[4:] == [_abi.DETERMINISTIC] * 2
    torch.use_deterministic_algorithms(True, warn_only=True)
    attention(q, q, q).sum().backward()
    assert seen[6:] == [_abi.DETERMINISTIC] * 2


def test_deterministic_warn_only(monkeypatch, python_path):
    """Where no backend is deterministic: refused, or computed with a warning."""
    q = torch.randn(1, 2, 16, 8)
    want = attention(q, q, q)
    seen = flags_of_calls(monkeypatch, refuse_deterministic=True)
    torch.use_deterministic_algorithms(True)
    with pytest.raises(NotImplementedError):
        attention(q, q, q)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for _ in range(2):  # in each call, also after one that has been kept
        with pytest.warns(UserWarning, match="not deterministic here"):
            assert torch.equal(attention(q, q, q), want)
    assert seen == [0, 0]


# ---- vmap and torch.func ----


def loop(function, tensors, dims, size):
    return torch.stack([
        function(*(x if dim is None else x.select(dim, n) for x, dim in zip(tensors, dims))) for n in range(size)
    ])  # fmt: skip


VMAPS = {
    "all": (dict(), (0, 0, 0, None)),
    "q alone": (dict(), (1, None, None, None)),
    "bias alone": (dict(), (None, None, None, 0)),
    "bias and k": (dict(causal=True), (None, 2, None, 1)),
    "dropout": (dict(dropout_p=0.5, seed=3), (0, 0, 0, None)),
    "sink": (dict(sink=torch.tensor([0.5, -1.0], dtype=torch.float64)), (0, None, 0, 0)),
    "slopes": (dict(alibi_slopes=torch.rand(2, 2, dtype=torch.float64)), (0, 0, 0, None)),
    "used": (dict(seqused_k=torch.tensor([2, 4], dtype=torch.int32)), (0, None, None, 0)),
    "backwards": (dict(layout="bshd"), (0, 0, 0, None)),
}


@pytest.mark.parametrize("options,dims", VMAPS.values(), ids=VMAPS)
def test_vmap(options, dims):
    size = 3
    shapes = [(2, 2, 4, 8), (2, 2, 4, 8), (2, 2, 4, 6), (2, 4, 4)]
    if options.get("layout") == "bshd":
        shapes = [(2, 4, 2, 8), (2, 4, 2, 8), (2, 4, 2, 6), (2, 4, 4)]
    tensors = []
    for shape, dim in zip(shapes, dims):
        if dim is not None:
            shape = (*shape[:dim], size, *shape[dim:])
        tensors.append(torch.randn(shape, dtype=torch.float64, requires_grad=True))
    function = lambda q, k, v, bias: attention(q, k, v, bias=bias, **options)  # noqa: E731
    got = torch.vmap(function, in_dims=dims)(*tensors)
    want = loop(function, tensors, dims, size)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    weights = torch.randn_like(got)
    for x, y in zip(torch.autograd.grad((got * weights).sum(), tensors), torch.autograd.grad((want * weights).sum(), tensors)):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def _lengths(*values):
    return torch.tensor(values, dtype=torch.int32)


# Of a batch of 2 with 4 heads: what is mapped beside q (its slices' shape, or its values), in which dimension of it.
MAPPED = {
    "slopes of heads": {"alibi_slopes": ((4,), 0)},
    "slopes of heads, last": {"alibi_slopes": ((4,), 1)},
    "slopes of batch and heads": {"alibi_slopes": ((2, 4), 1)},
    "sink": {"sink": ((4,), 1)},
    "mask": {"mask": ((2, 4, 5, 5), 0)},
    "mask of keys": {"mask": ((5,), 1)},
    "mask of a sequence": {"mask": ((2, 1, 5, 5), 2)},
    "used queries": {"seqused_q": (torch.stack([_lengths(5, 3), _lengths(0, 4), _lengths(2, 2)]), 0)},
    "used keys": {"seqused_k": (torch.stack([_lengths(5, 3), _lengths(1, 4), _lengths(2, 5)], dim=1), 1)},
    "second bias": {"bias2": ((4, 1, 5), 1)},
    "several": {
        "alibi_slopes": ((2, 4), 0),
        "mask": ((4, 5, 5), 1),
        "seqused_k": (torch.stack([_lengths(5, 3), _lengths(1, 4), _lengths(2, 5)]), 0),
        "sink": ((4,), 0),
    },
}


@pytest.mark.parametrize("q_is_mapped", [True, False], ids=["q", ""])
@pytest.mark.parametrize("mapped", MAPPED.values(), ids=MAPPED)
def test_vmap_of_other_tensors(mapped, q_is_mapped):
    """Each of them has its slice in each call, and the gradients are those of the calls one by one."""
    size = 3
    q = torch.randn((size, 2, 4, 5, 8) if q_is_mapped else (2, 4, 5, 8), dtype=torch.float64, requires_grad=True)
    tensors, dims = [q], [0 if q_is_mapped else None]
    for name, (slices, dim) in mapped.items():
        if isinstance(slices, torch.Tensor):
            tensor = slices
        else:
            tensor = torch.randn((*slices[:dim], size, *slices[dim:]), dtype=torch.float64)
            tensor = tensor > 0 if name == "mask" else tensor.requires_grad_(name != "alibi_slopes")
        tensors.append(tensor)
        dims.append(dim)
    function = lambda q, *others: attention(  # noqa: E731
        q, q, q, causal=True, align="bottom_right", **dict(zip(mapped, others)))
    got = torch.vmap(function, in_dims=tuple(dims))(*tensors)
    want = loop(function, tensors, dims, size)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    weights = torch.randn_like(got)
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    for x, y in zip(torch.autograd.grad((got * weights).sum(), differentiable),
                    torch.autograd.grad((want * weights).sum(), differentiable)):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_vmap_of_packed_and_of_two_levels():
    cu_seqlens = torch.tensor([0, 2, 5])
    q = torch.randn(3, 5, 2, 8, dtype=torch.float64)
    function = lambda q: attention(q, q, q, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)  # noqa: E731
    assert torch.equal(torch.vmap(function)(q), loop(function, [q], [0], 3))
    q = torch.randn(3, 2, 2, 2, 5, 8, dtype=torch.float64)
    function = lambda q: attention(q, q, q)  # noqa: E731
    assert torch.equal(torch.vmap(function)(q), loop(function, [q], [0], 3))


def test_vmap_folds_into_one_call():
    from fovea.torch import _call

    calls = []
    real = _call.lib
    q = torch.randn(3, 2, 2, 4, 8)

    class Library:
        def __getattr__(self, name):
            if name == "fovea_forward":
                calls.append(name)
            return getattr(real, name)

    _call.lib = Library()
    try:
        torch.vmap(lambda q: attention(q, q, q))(q)
    finally:
        _call.lib = real
    assert len(calls) == 1


def test_gradients_of_each_sample():
    """torch.func.vmap over torch.func.grad: the gradient of a shared bias for each sample."""
    q = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    bias = torch.randn(2, 4, 4, dtype=torch.float64)
    weights = torch.randn(2, 4, 8, dtype=torch.float64)
    loss = lambda bias, q: (attention(q[None], q[None], q[None], bias=bias)[0] * weights).sum()  # noqa: E731
    got = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, 0))(bias, q)
    for n in range(3):
        want = torch.func.grad(loss, argnums=(0, 1))(bias, q[n])
        leaf = bias.clone().requires_grad_(), q[n].clone().requires_grad_()
        plain = torch.autograd.grad(loss(*leaf), leaf)
        for x, y, z in zip(got, want, plain):
            torch.testing.assert_close(x[n], y)
            torch.testing.assert_close(y, z)


def test_vmap_and_randomness():
    q = torch.randn(1, 2, 16, 8).expand(3, 1, 2, 16, 8)
    function = lambda q: attention(q, q, q, dropout_p=0.5)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(function)(q)
    same = torch.vmap(function, randomness="same")(q)
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    different = torch.vmap(function, randomness="different")(q)
    assert not torch.equal(different[0], different[1]) and not torch.equal(different[1], different[2])


def test_vmap_and_randomness_of_any_mapped_tensor():
    """q is the same for all slices, and something else is mapped."""
    q = torch.randn(1, 2, 16, 8)
    k = q.expand(3, 1, 2, 16, 8)
    function = lambda k: attention(q, k, k, dropout_p=0.5)  # noqa: E731
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(function)(k)
    different = torch.vmap(function, randomness="different")(k)
    assert not torch.equal(different[0], different[1])
    same = torch.vmap(function, randomness="same")(k)
    assert torch.equal(same[0], same[1])


def test_torch_func_jvp_is_refused_by_name():
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: attention(q, q, q), (q,), (q,))


# ---- what records ----


def test_the_profiler_sees_the_operator():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attention(q, q, q).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"fovea::attention", "fovea::attention_backward"} <= names


def test_lazy_negation_is_resolved():
    z = torch.randn(1, 2, 4, 8, dtype=torch.complex64)
    negative = z.conj().imag
    assert negative.is_neg()
    assert torch.equal(attention(negative, negative, negative), attention(*[negative.resolve_neg()] * 3))


def test_lazy_negation_of_a_gradient_is_resolved():
    """As a result that goes on as the imaginary part of a complex number gets it."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    weights = torch.randn(1, 2, 4, 8, dtype=torch.complex64)
    seen = []

    def loss(out):
        out.register_hook(lambda grad: seen.append(grad.is_neg()))
        return (torch.complex(torch.zeros_like(out), out).conj() * weights).real.sum()

    got = torch.autograd.grad(loss(attention(q, q, q)), q)[0]
    want = torch.autograd.grad((attention(q, q, q) * weights.imag).sum(), q)[0]
    assert seen == [True]
    torch.testing.assert_close(got, want)


def test_gradients_without_memory():
    """PyTorch has zeros that lie nowhere."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out, lse = attention(q, q, q, return_lse=True)
    zeros = torch._efficientzerotensor(out.shape)
    assert not torch.autograd.grad(out, q, zeros)[0].any()


# ---- batched gradients, functionalize, floating-point operations ----


@pytest.mark.parametrize("row", FEATURES, ids=ids)
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients(row, create_graph):
    """is_grads_batched=True gives what a call for each gradient gives, through out, through lse and through both."""
    function, tensors = problem(row)
    out, lse = function(*tensors)
    grads = torch.randn(3, *out.shape, dtype=out.dtype), torch.randn(3, *lse.shape, dtype=lse.dtype) * lse.isfinite()
    for which in ((0,), (1,), (0, 1)):
        given, heads = [(out, lse)[i] for i in which], [grads[i] for i in which]
        options = dict(create_graph=create_graph, retain_graph=True, allow_unused=True)
        got = torch.autograd.grad(given, tensors, heads, is_grads_batched=True, **options)
        each = [torch.autograd.grad(given, tensors, [g[i] for g in heads], **options) for i in range(3)]
        for x, parts in zip(got, zip(*each)):
            torch.testing.assert_close(x, torch.stack(parts))


def test_batched_gradients_elsewhere():
    """What is built on them: jacobian(vectorize=True) and gradcheck(check_batched_grad=True)."""
    q, k, v = (torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    jacobian = torch.autograd.functional.jacobian
    function = lambda q: attention(q, k, v, causal=True)  # noqa: E731
    torch.testing.assert_close(jacobian(function, q, vectorize=True), jacobian(function, q))
    assert torch.autograd.gradcheck(
        lambda *x: attention(*x, return_lse=True), (q, k, v), check_batched_grad=True, fast_mode=True
    )


def test_functionalize():
    q = torch.randn(2, 1, 2, 6, 8)
    function = lambda q: attention(q, q, q, causal=True, return_lse=True)  # noqa: E731
    assert_equal(torch.func.functionalize(function)(q[0]), function(q[0]))
    assert_equal(torch.func.functionalize(torch.func.vmap(function))(q), torch.func.vmap(function)(q))


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def test_floating_point_operations():
    """As PyTorch counts its own, whatever the layout; packed sequences count each by itself."""
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 13, 8), torch.randn(2, 2, 13, 5)
    dense = 2 * 2 * 4 * 9 * 13
    rows = [x.transpose(1, 2) for x in (q, k, v)]
    assert flops(lambda: attention(q, k, v)) == flops(lambda: attention(*rows, layout="bshd")) == dense * (8 + 5)
    x = torch.randn(2, 4, 7, 8, requires_grad=True)
    ours, theirs = (
        flops(lambda f=f: f(x, x, x).sum().backward())
        for f in (attention, torch.nn.functional.scaled_dot_product_attention)
    )
    assert ours == 2 * 2 * 4 * 7 * 7 * (8 + 8 + 5 * 8)
    assert theirs in (ours, 0)  # 0: PyTorch 2.9 counts none of its kernel on the CPU
    learns = v.clone().requires_grad_()
    assert flops(lambda: attention(q, k, learns).sum().backward()) == dense * (2 * (8 + 5) + 5)
    packed, cu_seqlens = torch.randn(9, 4, 8), torch.tensor([0, 2, 9])
    call = lambda x: attention(x, x, x, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)  # noqa: E731
    assert flops(lambda: call(packed)) == 2 * 4 * (2 * 2 + 7 * 7) * 16
    assert flops(lambda: attention(q.to("meta"), k.to("meta"), v.to("meta"))) == dense * 13


@pytest.mark.filterwarnings("ignore")
def test_jit_trace():
    """A recorded call computes for what it is given later."""
    x, y = (torch.randn(1, 2, 4, 8) for _ in range(2))
    traced = torch.jit.trace(lambda x: attention(x, x, x, causal=True), (x,))
    assert torch.equal(traced(y), attention(y, y, y, causal=True))


def test_parameters_subclasses_and_inference_mode():
    q = torch.nn.Parameter(torch.randn(1, 2, 4, 8))
    want = attention(q, q, q).detach()
    with torch.inference_mode():
        assert torch.equal(attention(q, q, q), want)
        x = q.clone()
    assert torch.equal(attention(x, x, x), want)  # an inference tensor, outside

    class Tagged(torch.Tensor):
        pass

    tagged = q.detach().as_subclass(Tagged)
    out = attention(tagged, tagged, tagged)
    assert torch.equal(out.as_subclass(torch.Tensor), want)


def test_threads():
    """Many threads, each with other problems in another order, forward and backward: the bits of each by itself. They
    share the problems that are kept."""
    rows = [*FEATURES, {"dims": (16, 16)}, {"heads": (4, 2), "causal": True}]
    problems = [problem(row) for row in rows]
    want = [gradients(*each) for each in problems]
    wrong = []

    def work(index):
        order = random.Random(index)
        for _ in range(12):
            n = order.randrange(len(problems))
            try:
                if not all(map(torch.equal, gradients(*problems[n]), want[n])):
                    wrong.append(n)
            except BaseException as error:
                wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(before)
    assert not wrong, wrong


def test_saved_tensors_hooks():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x, lambda x: x):
        out = attention(q, q, q)
    out.sum().backward()
    assert packed.count(q.shape) == 4  # q, k, v and out
    assert (1, 2, 4) in packed


def test_inplace_change_of_what_was_saved_is_seen():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    k = torch.randn(1, 2, 4, 8)
    out = attention(q, k, k)
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
