# SPDX-License-Identifier: Apache-2.0
"""The fast path: what C computes has the bits of what Python computes, it declines what it must not compute, and where
it cannot be used Python takes over."""

import contextlib
import ctypes
import gc
import os
import re
import resource
import subprocess
import sys
import types

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import cases
import fovea.torch
from fovea import _library
from fovea.torch import _attention, _call, _eager, _enable, _enable_decisions, _enable_state, _fast, _fastest, _sdpa, attention, attention_qkv, disable, enable, reset_stats, stats

ROWS = cases.rows()
WAYS = ("1", "exchange alone", "methods")


@pytest.fixture(autouse=True)
def loaded_again():
    yield
    _fast.load()


@pytest.fixture
def way(request, monkeypatch):
    """One of WAYS. Without the extension there is nothing to test, which is an error where it was to be built."""
    monkeypatch.setenv("FOVEA_TORCH_FAST", "methods" if request.param == "methods" else "1")
    if request.param == "exchange alone":
        without(monkeypatch, "aoti_torch_empty_strided")
    _fast.load()
    assert _fast.fast_path().startswith("C, "), _fast.fast_path()
    return request.param


@pytest.fixture
def in_python(monkeypatch):
    """The calls that Python computed, forward or backward."""
    seen = []
    forward, backward = _attention._attention, _eager.direct_gradients
    monkeypatch.setattr(_attention, "_attention", lambda *a, **o: (seen.append("forward"), forward(*a, **o))[1])
    monkeypatch.setattr(_eager, "direct_gradients", lambda *a: (seen.append("backward"), backward(*a))[1])
    return seen


both = pytest.mark.parametrize("way", WAYS, indirect=True)


def results(row, seed=1, dtype=torch.float32):
    case = cases.make(row, dtype, seed)
    inputs = {name: x.detach().requires_grad_() for name, x in case.inputs.items()}
    options = {**case.options, **{name: x for name, x in inputs.items() if name not in ("q", "k", "v")}}
    out, lse = attention(inputs["q"], inputs["k"], inputs["v"], return_lse=True, **options)
    only = attention(inputs["q"], inputs["k"], inputs["v"], **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).reshape(out.shape)
    loss = (out * weights).sum() + torch.where(lse.isfinite(), lse, 0).sum()
    with torch.no_grad():
        alone = attention(inputs["q"], inputs["k"], inputs["v"], **options)
    grads = torch.autograd.grad(loss, list(inputs.values()))
    return [out, lse, only, alone, *grads, *torch.autograd.grad((only * weights).sum(), list(inputs.values()))]


@both
def test_the_bits_of_python(way, in_python):
    """The whole case table, forward and backward, with and without a gradient wanted."""
    got = []
    for row in ROWS:
        in_python.clear()
        got.append(results(row))
        assert bool(in_python) == (row["rows"] == "packed_two_level"), cases.name_of(row)  # batch_shape
    _fast.switch_off()
    for row, ours in zip(ROWS, got):
        for x, y in zip(ours, results(row)):
            assert torch.equal(x, y) and x.dtype == y.dtype and x.stride() == y.stride(), cases.name_of(row)
            assert x.requires_grad == y.requires_grad


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_ordinary_calls_stay_in_c(way, dtype, in_python):
    """None of these is computed by Python."""
    q, k, v = (torch.randn(2, 4, 5, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    more = {
        "bias": torch.randn(1, 4, 5, 5, requires_grad=True), "mask": torch.rand(2, 1, 5, 5) > 0.2,
        "sink": torch.randn(4, dtype=wide, requires_grad=True), "softcap": 2.0, "scale": 0.3,
    }  # fmt: skip
    for options in ({}, {"causal": True}, more, {"dropout_p": 0.5}, {"dropout_p": 0.5, "seed": 2**63}, {"window": (2, 0)},
                    {"layout": "bshd"}, {"return_lse": True}, {"deterministic": True, "align": "top_left", "scale": 1},
                    {"bias": torch.randn(4, 5, 5, requires_grad=True).expand(2, 4, 5, 5)}):  # fmt: skip
        out = attention(q, k, v, **options)
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()
        out.detach().sum()
        with torch.no_grad():
            attention(q, k, v, **options)
        with torch.inference_mode():
            attention(q, k, v, **options)
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    rows = torch.randn(5, 2, 8, dtype=dtype, requires_grad=True)
    attention(rows, rows, rows, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True).sum().backward()
    if dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            attention(q, k, v).sum().backward()
    assert in_python == []


@both
def test_seeds_are_those_of_python(way):
    q = torch.randn(1, 2, 16, 8)
    seen = []
    for switch in (lambda: None, _fast.switch_off):
        switch()
        torch.manual_seed(4)
        seen.append([attention(q, q, q, dropout_p=0.5) for _ in range(3)])
    for x, y in zip(*seen):
        assert torch.equal(x, y)
    assert not torch.equal(seen[0][0], seen[0][1])


class Tagged(torch.Tensor):
    pass


def _q(**options):
    return torch.randn(1, 2, 4, 8, **options)


DECLINED = {
    "no tensor": ((None, _q(), _q()), {}),
    "a subclass": ((_q().as_subclass(Tagged), _q(), _q()), {}),
    "a sparse tensor": ((_q().to_sparse(), _q(), _q()), {}),
    "a nested tensor": ((torch.nested.nested_tensor([torch.randn(2, 4, 8)]), _q(), _q()), {}),
    "a pending negation": ((torch.randn(1, 2, 4, 8, dtype=torch.complex64).conj().imag, _q(), _q()), {}),
    "a meta tensor": ((_q(device="meta"), _q(device="meta"), _q(device="meta")), {}),
    "integers": ((torch.ones(1, 2, 4, 8, dtype=torch.int32),) * 3, {}),
    "bytes": ((torch.ones(1, 2, 4, 8, dtype=torch.uint8),) * 3, {}),
    "zeros without memory": ((torch._efficientzerotensor((1, 2, 4, 8)), _q(), _q()), {}),
    "two dimensions": ((_q()[0, 0],) * 3, {}),
    "six dimensions": ((_q()[None, None],) * 3, {}),
    "another shape": ((_q(), _q()[..., :4], _q()), {}),
    "an unknown keyword": ((_q(),) * 3, {"is_causal": True}),
    "a number for causal": ((_q(),) * 3, {"causal": 1}),
    "a mask of numbers": ((_q(),) * 3, {"mask": torch.ones(4, 4)}),
    "slopes that learn": ((_q(),) * 3, {"alibi_slopes": torch.rand(2, requires_grad=True)}),
    "slopes of 64 bits": ((_q(),) * 3, {"alibi_slopes": torch.rand(2, dtype=torch.float64)}),
    "a sink of 16 bits": ((_q(),) * 3, {"sink": torch.rand(2).bfloat16()}),
    "lengths of 64 bits": ((_q(),) * 3, {"seqused_k": torch.tensor([3])}),
    "a window of three": ((_q(),) * 3, {"window": (1, 2, 3)}),
    "a window on a wrong side": ((_q(),) * 3, {"window": (-2, 0)}),
    "no alignment": ((_q(), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)), {"causal": True}),
    "an alignment by another name": ((_q(),) * 3, {"align": "middle"}),
    "a seed of 65 bits": ((_q(),) * 3, {"seed": 2**64}),
    "a seed of two numbers": ((_q(),) * 3, {"seed": torch.tensor([1, 2])}),
    "True as an offset": ((_q(),) * 3, {"offset": True}),
    "no offset": ((_q(),) * 3, {"offset": None}),
    "a backend": ((_q(),) * 3, {"backend": "reference"}),
    "a shape of the batch": ((_q(),) * 3, {"batch_shape": (1, 1)}),
    "a truth that is none": ((_q(),) * 3, {"return_lse": 1}),
    "text for a scale": ((_q(),) * 3, {"scale": "1"}),
    "a scale that is no number": ((_q(),) * 3, {"scale": float("nan")}),
}


@both
@pytest.mark.parametrize("given, options", DECLINED.values(), ids=DECLINED)
def test_declined(way, given, options, capfd):
    """Python then computes or refuses them; nothing is left behind, and libtorch prints nothing."""
    assert _fast.attention(*given, options) is None
    assert capfd.readouterr() == ("", "")


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def nvtx():
    """torch.autograd.profiler.emit_nvtx(), which needs a GPU only to wait for it."""
    profiler = torch.autograd.profiler
    config = profiler.ProfilerConfig(profiler.ProfilerState.NVTX, *[False] * 5, torch._C._profiler._ExperimentalConfig())
    torch._C._autograd._enable_profiler(config, set())
    try:
        yield
    finally:
        torch._C._autograd._disable_profiler()


WATCHERS = {
    "a mode": Mode,
    "ranges of NVTX": nvtx,
    "the profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "forward mode": torch.autograd.forward_ad.dual_level,
    "autocast to another type": lambda: torch.autocast("cpu", torch.bfloat16),
}


@both
@pytest.mark.parametrize("watcher", WATCHERS.values(), ids=WATCHERS)
def test_declined_while_something_watches(way, watcher):
    q = torch.randn(1, 2, 4, 8)
    assert _fast.attention(q, q, q, {}) is not None
    with watcher():
        assert _fast.attention(q, q, q, {}) is None
    assert _fast.attention(q, q, q, {}) is not None


@both
def test_declined_inside_of_transforms(way):
    seen = []

    def call(q):
        seen.append(_fast.attention(q, q, q, {}))
        return q.sum()

    torch.vmap(call)(torch.randn(2, 1, 2, 4, 8))
    torch.func.grad(call)(torch.randn(1, 2, 4, 8))
    torch.jit.trace(lambda q: call(q), (torch.randn(1, 2, 4, 8),), check_trace=False)
    assert seen == [None] * 3


@both
def test_declined_in_the_backward(way, in_python):
    """Gradients that something has to see, or that lie nowhere."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = attention(q, q, q)
    want = torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)[0]
    assert in_python == []
    zeros = torch.autograd.grad(out, q, torch._efficientzerotensor(out.shape), retain_graph=True)[0]
    assert not zeros.any() and in_python == ["backward"]
    with Mode():
        assert torch.equal(torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)[0], want)
    batched = torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True, retain_graph=True)[0]
    assert torch.equal(batched[1], want) and len(in_python) == 3
    twice = torch.autograd.grad(out, q, torch.ones_like(out), create_graph=True)[0]
    assert torch.equal(twice, want) and len(in_python) == 4
    with pytest.raises(NotImplementedError, match="double backward"):
        twice.sum().backward()


@both
def test_an_exception_of_a_hook_goes_on(way, in_python):
    q = torch.randn(1, 2, 4, 8, requires_grad=True)

    def refuse(x):
        raise LookupError("by a hook")

    with torch.autograd.graph.saved_tensors_hooks(refuse, lambda x: x), pytest.raises(LookupError, match="by a hook"):
        attention(q, q, q)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, refuse):
        out = attention(q, q, q)
    with pytest.raises(LookupError, match="by a hook"):
        out.sum().backward()
    assert in_python == []


@both
def test_the_graph_is_freed_once(way):
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = attention(q, q, q).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()


def compiled_calls():
    """By name, functions of the tensors q, k, v and a bias. Of one shape, so that a graph of one must not serve another."""
    lengths = torch.tensor([0, 3, 4], dtype=torch.int32)
    rows = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "align": "top_left"}
    return {
        "causal": lambda q, k, v, bias: attention(q, k, v, causal=True).cos(),
        "a scale": lambda q, k, v, bias: attention(q, k, v, scale=0.5).cos(),
        "another scale": lambda q, k, v, bias: attention(q, k, v, scale=0.25).cos(),
        "a bias": lambda q, k, v, bias: attention(q, k, v, bias=bias, window=(2, 1), softcap=3.0, align="top_left").cos(),
        "lse": lambda q, k, v, bias: attention(q, k, v, return_lse=True)[1].cos(),
        "dropout": lambda q, k, v, bias: attention(q, k, v, dropout_p=0.5).cos(),
        "a seed": lambda q, k, v, bias: attention(q, k, v, dropout_p=0.5, seed=2**63 + 5).cos(),
        "packed rows": lambda q, k, v, bias: attention(*(x[0].transpose(0, 1) for x in (q, k, v)), causal=True, **rows).cos(),
        "sdpa": lambda q, k, v, bias: sdpa(q, k, v, bias, scale=0.5).cos(),
        "qkv": lambda q, k, v, bias: attention_qkv(torch.stack([q, k, v]), 0, bias=bias).cos(),
        "two calls": lambda q, k, v, bias: attention(attention(q, k, v), k, v, bias=bias).cos(),
    }


@pytest.mark.parametrize("fast", [True, False], ids=["c", "python"])
def test_compiled_autograd(fast, monkeypatch, request):
    """It traces the backward, as one graph, in which fovea::attention_backward is a node."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph

    monkeypatch.setenv("FOVEA_TORCH_FAST", str(int(fast)))
    _fast.load()
    assert fovea.torch.fast_path().startswith("C, " if fast else "Python, ")
    for after in (torch._dynamo.reset, reset_stats, disable):
        request.addfinalizer(after)
    enable(prefer=None)
    compiler = torch.compile(backend=keep, fullgraph=True)
    calls = {name: call for name, call in compiled_calls().items() if fast or name in ("causal", "a bias", "qkv")}
    counts = []
    for _ in range(2):
        for name, call in calls.items():
            torch.manual_seed(3)
            leaves = [torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3)]
            leaves.append(torch.randn(1, 2, 4, 4, requires_grad=True))
            loss = call(*leaves).sum()
            want = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
            with torch._dynamo.compiled_autograd._enable(compiler):
                loss.backward()
            for x, y in zip(leaves, want):
                assert (x.grad is None) if y is None else torch.equal(x.grad, y), name
        counts.append(len(graphs))
    assert 3 <= counts[0] == counts[1]  # the second time all graphs are there
    assert all("fovea.attention_backward" in graph for graph in graphs)


# ---- references and memory ----


@both
def test_references(way):
    """After 100,000 calls nothing is held: no object more, and no memory."""
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    bias, seed = torch.randn(1, 1, 8, 8, requires_grad=True), torch.tensor(3)
    options = {"bias": bias, "causal": True, "dropout_p": 0.25, "seed": seed, "window": (3, 4), "return_lse": True}
    declined = {"bias": bias, "causal": True, "window": (3, 4), "is_causal": 1}
    held = [q, k, v, bias, seed, options, declined, *options.values(), torch.float32, None, (3, 4), _fast.FastAttention]

    def calls(count):
        for _ in range(count):
            with torch.no_grad():
                _fast.attention(q, k, v, options)
            _fast.attention(q, k, v, declined)
            out, lse = attention(q, k, v, **options)
            torch.autograd.grad(out.sum() + lse.sum(), (q, v, bias))

    calls(500)
    gc.collect()
    objects, references = len(gc.get_objects()), [sys.getrefcount(x) for x in held]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls(25_000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 50
    for x, before in zip(held, references):
        assert abs(sys.getrefcount(x) - before) < 2500, x  # one in ten calls; None's changes by some hundreds with the rest of the process
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 8 << 10  # KB; 100,000 tensors of 1 KB have 100 MB


# ---- scaled_dot_product_attention through enable() ----


@pytest.fixture
def python_kernel(monkeypatch):
    """How many calls the kernel in Python got."""
    seen = []
    kernel = _enable.compute
    monkeypatch.setattr(_enable, "compute", lambda *a, **o: (seen.append(a), kernel(*a, **o))[1])
    yield seen
    disable()
    reset_stats()


def sdpa_calls():
    """Calls that C computes, by name."""
    make = lambda *shape, **o: torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), **o)  # noqa: E731
    q, k, v = (make(2, 4, 6, 8).requires_grad_() for _ in range(3))
    few = make(2, 2, 6, 8).requires_grad_()
    bias = make(1, 4, 6, 6).requires_grad_()
    five = make(2, 3, 4, 6, 8).requires_grad_()
    half = q.detach().bfloat16().requires_grad_()
    return {
        "plain": ((q, k, v), {}),
        "causal": ((q, k, v), {"is_causal": True}),
        "mask": ((q, k, v, torch.rand(2, 1, 1, 6) < 0.7), {}),
        "bias": ((q, k, v, bias), {}),
        "bias of another type": ((half, half, half, bias), {}),
        "scale": ((q, k, v), {"scale": 0.3}),
        "grouped": ((q, few, few), {"enable_gqa": True}),
        "five dimensions": ((five, five, five), {}),
        "float64": ((q.detach().double(),) * 3, {}),
        "dropout": ((q, k, v), {"dropout_p": 0.5}),
    }


@both
@pytest.mark.parametrize("name", sdpa_calls())
def test_sdpa(way, name, python_kernel):
    """C computes it, with the bits of Python, and says so."""
    tensors, options = sdpa_calls()[name]
    leaves = [x for x in tensors if x.requires_grad]

    def run():
        torch.manual_seed(7)
        out = sdpa(*tensors, **options)
        with torch.inference_mode():
            again = sdpa(*tensors, **options)
        grads = torch.autograd.grad(out.cos().sum(), leaves) if leaves else ()
        return [out, again, *grads]

    enable(prefer=None)
    got = run()
    assert python_kernel == [] and _fast.counts()[0] == stats()["served"] == 2
    problems = stats()["problems"]
    assert len(problems) == 1 + bool(leaves) + (0 if not leaves else 1)  # inference has no lse
    disable()
    reset_stats()
    assert _fast.counts()[0] == 0
    _fast.switch_off()
    enable(prefer=None)
    for x, y in zip(got, run()):
        assert torch.equal(x, y) and x.stride() == y.stride() and x.dtype == y.dtype
    assert len(python_kernel) == stats()["served"] == 2 and stats()["problems"] == problems


SDPA_IN_PYTHON = {
    "three dimensions": lambda: sdpa(*(torch.randn(4, 6, 8) for _ in range(3))),
    "batches that broadcast": lambda: sdpa(torch.randn(2, 4, 6, 8), torch.randn(1, 4, 6, 8), torch.randn(1, 4, 6, 8)),
    "a mode": lambda: under(Mode()),
    "the profiler": lambda: under(WATCHERS["the profiler"]()),
    "a subclass": lambda: sdpa(*(torch.randn(1, 2, 4, 8).as_subclass(Tagged),) * 3),
    "a pending negation": lambda: sdpa(*(torch.randn(1, 2, 4, 8, dtype=torch.complex64).conj().imag,) * 3),
    "warn_only": lambda: deterministic_or_warn(),
}


def under(context):
    with context:
        return sdpa(*(torch.randn(1, 2, 4, 8),) * 3)


def deterministic_or_warn():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return sdpa(*(torch.randn(1, 2, 4, 8),) * 3)
    finally:
        torch.use_deterministic_algorithms(False)


@both
@pytest.mark.parametrize("call", SDPA_IN_PYTHON.values(), ids=SDPA_IN_PYTHON)
def test_sdpa_in_python(way, call, python_kernel):
    enable(prefer=None)
    for _ in range(2):  # the second time the decision is known
        call()
    assert len(python_kernel) == 2 and _fast.counts()[0] == 0


@both
def test_sdpa_is_handed_back_from_c(way, python_kernel):
    """With the same reasons, and within the same limits, as from Python."""
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    wide = torch.randn(2, 4, 6, 0)
    with pytest.raises(RuntimeError) as said:
        sdpa(q, q[..., :4], q)
    want = sdpa(q, q, q)
    enable(prefer=None)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=re.escape(str(said.value))):
            sdpa(q, q[..., :4], q)
        sdpa(wide, wide, q)
        with sdpa_kernel(SDPBackend.MATH):
            sdpa(q, q, q)
    assert stats()["handed_back"] == {_sdpa.MALFORMED: 2, "empty tensors": 2, _enable_state.MATH: 2}
    assert len(python_kernel) == 2  # those of the math path
    enable(prefer=None, strict=True)
    with pytest.raises(NotImplementedError, match="scaled_dot_product_attention: empty tensors"):
        sdpa(wide, wide, q)
    enable(prefer="fastest")
    _fastest.slower, slower = lambda *a: True, _fastest.slower
    try:
        assert torch.equal(sdpa(q, q, q), want)
    finally:
        _fastest.slower = slower
    assert stats()["handed_back"][_enable_state.SLOWER] == 1 and len(python_kernel) == 3  # what strict raises for


INTERRUPTED = {
    "a forward": ("warn_only", lambda q: attention(q, q, q)),
    "a backward": ("compiling", lambda q: torch.autograd.grad(attention(q, q, q).sum(), q)),
    "a call of PyTorch's": ("warn_only", lambda q: sdpa(q, q, q)),
}


@both
@pytest.mark.parametrize("name, call", INTERRUPTED.values(), ids=INTERRUPTED)
def test_an_interrupt_goes_on(way, name, call, monkeypatch):
    """Python computes a call again after an exception, but not after one that shall end the program: here of what C asks."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    real = _fast._OBJECTS[name]()
    raised = []

    def once():
        if not raised:
            raised.append(error)
            raise error
        return real()

    monkeypatch.setitem(_fast._OBJECTS, name, lambda: once)
    _fast.load()
    enable(prefer=None)
    torch.use_deterministic_algorithms(name == "warn_only", warn_only=True)
    for error in (KeyboardInterrupt("of a test"), SystemExit("of a test")):
        raised.clear()
        with pytest.raises(type(error), match="of a test"):
            call(q)
    error = LookupError("of a test")
    raised.clear()
    call(q)
    assert raised
    disable()


@both
def test_a_kind_of_call_is_known_by_all_that_decides(way, python_kernel, monkeypatch):
    """Each of these is decided anew, and only once."""
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 7, 8)
    learns = q.detach().requires_grad_()
    mask = torch.ones(6, 6, dtype=torch.bool)
    calls = [
        lambda: sdpa(q, q, q), lambda: sdpa(q, k, k), lambda: sdpa(learns, q, q), lambda: sdpa(q, learns, q),
        lambda: sdpa(q, q, learns), lambda: sdpa(q, q, q, mask), lambda: sdpa(q, q, q, mask[:1]),
        lambda: sdpa(q, q, q, mask.float()), lambda: sdpa(q, q, q, is_causal=True), lambda: sdpa(q, q, q, scale=0.5),
        lambda: sdpa(q, q, q, scale=0.25), lambda: sdpa(q, q, q, dropout_p=0.5), lambda: sdpa(q, q, q, enable_gqa=True),
        lambda: sdpa(q.double(), q.double(), q.double()), lambda: sdpa(q[:1], q[:1], q[:1]),
        lambda: sdpa(q[None], q[None], q[None]), lambda: sdpa(q, q, q[..., :4]),
    ]  # fmt: skip
    decided = []
    real = _enable_decisions.decide
    monkeypatch.setattr(_enable_decisions, "decide", lambda *a: (decided.append(a), real(*a))[1])
    enable(prefer=None)
    for _ in range(2):
        for call in calls:
            call()
    assert len(decided) == len(calls)
    with torch.no_grad():
        sdpa(learns, q, q)
    assert len(decided) == len(calls)  # like one that does not learn
    torch.use_deterministic_algorithms(True)
    try:
        sdpa(q, q, q)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(decided) == len(calls) + 1
    assert _fast.counts()[0] == 2 * len(calls) + 2 and python_kernel == []


@pytest.mark.parametrize("way", ["1", "methods"], indirect=True)
def test_references_of_sdpa(way, request):
    request.addfinalizer(reset_stats)
    request.addfinalizer(disable)
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    bias, wide = torch.randn(1, 1, 8, 8, requires_grad=True), torch.randn(1, 2, 8, 0)
    enable(prefer=None)
    held = [q, k, v, bias, wide, torch.float32, None, True, 0.5, _enable_state.state, _enable.for_c, _enable.give_back]

    def calls(count):
        for _ in range(count):
            torch.autograd.grad(sdpa(q, k, v, bias, scale=0.5).sum(), (q, v, bias))
            sdpa(q[0], k[0], v[0])  # Python's
            sdpa(wide, wide, v)  # PyTorch's

    calls(500)
    gc.collect()
    objects, references = len(gc.get_objects()), [sys.getrefcount(x) for x in held]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    calls(3_000)
    gc.collect()
    assert len(gc.get_objects()) - objects < 50
    for x, before in zip(held, references):
        assert abs(sys.getrefcount(x) - before) < 1000, x  # one in three calls
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 4 << 10


def test_enable_without_c(monkeypatch, python_kernel):
    monkeypatch.setenv("FOVEA_TORCH_FAST", "0")
    _fast.load()
    enable(prefer=None)
    sdpa(*(torch.randn(1, 2, 4, 8),) * 3)
    assert len(python_kernel) == 1 and stats()["served"] == 1 and _fast.counts()[0] == 0


# ---- which path, and why ----


def child(**environment):
    """What fast_path() says in another process."""
    code = "import torch, fovea.torch as t; q = torch.ones(1, 1, 2, 4); t.attention(q, q, q); print(t.fast_path())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


def test_the_environment_decides():
    assert child(FOVEA_TORCH_FAST="1").startswith("C, tensors read by ")
    assert child(FOVEA_TORCH_FAST="0") == "Python, as FOVEA_TORCH_FAST is 0"
    methods = "C, tensors read by methods and made by methods, as FOVEA_TORCH_FAST is 'methods'"
    assert child(FOVEA_TORCH_FAST="methods") == methods
    assert "FOVEA_TORCH_FAST is 'yes'; accepted: 1, methods, 0" in child(FOVEA_TORCH_FAST="yes")


def computes():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    out = attention(q, q, q)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q))
    out.sum().backward()


@pytest.fixture
def extension(monkeypatch):
    monkeypatch.delenv("FOVEA_TORCH_FAST", raising=False)
    _fast.load()
    return _fast._extension()


def test_without_any_one_of_libtorchs_functions(extension, monkeypatch):
    """Tensors are then made by their methods."""
    assert len(extension.STABLE) > 8
    real = _fast._address
    assert fovea.torch.fast_path().endswith(" made by C functions of libtorch")
    for name in extension.STABLE:
        monkeypatch.setattr(_fast, "_address", lambda library, n, name=name: None if n == name else real(library, n))
        _fast.load()
        assert fovea.torch.fast_path().endswith(f" and made by methods, as libtorch lacks {name}")
        computes()


def without(monkeypatch, *names):
    real = _fast._address
    monkeypatch.setattr(_fast, "_address", lambda library, name: None if name in names else real(library, name))
    _fast.load()


def test_without_a_function_that_makes_objects(extension, monkeypatch):
    """PyTorch before 2.14 has one of C++ instead of the stable one."""
    wrappers = [name for name in _fast._WRAPPERS if _fast._address(ctypes.CDLL(torch._C.__file__), name) is not None]
    assert _fast._WRAPPERS[1] in wrappers or _fast._WRAPPERS[2] in wrappers
    for count in range(1, len(wrappers)):
        without(monkeypatch, *wrappers[:count])
        assert fovea.torch.fast_path().endswith(" made by C functions of libtorch")
        computes()
    without(monkeypatch, *wrappers)
    assert fovea.torch.fast_path().endswith(f" made by methods, as libtorch lacks {_fast._WRAPPERS[0]}")
    computes()


def test_without_dlpacks_exchange(extension, monkeypatch):
    monkeypatch.setitem(_fast._OBJECTS, "exchange", lambda: None)
    _fast.load()
    assert fovea.torch.fast_path().startswith("C, tensors read by methods and made by ")
    computes()


def test_with_an_exchange_of_another_version(extension, monkeypatch):
    """Its functions are not called."""
    table = (ctypes.c_uint64 * 8)(2)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = ctypes.create_string_buffer(b"dlpack_exchange_api")
    monkeypatch.setitem(_fast._OBJECTS, "exchange", lambda: new(table, name, None))
    _fast.load()
    assert fovea.torch.fast_path().startswith("C, tensors read by methods and made by ")
    computes()
    _fast.load()


def test_without_any_one_of_the_librarys_functions(extension, monkeypatch):
    real = _fast._address
    for name in ("fovea_forward", "fovea_backward", "fovea_workspace"):
        monkeypatch.setattr(_fast, "_address", lambda library, n, name=name: None if n == name else real(library, n))
        _fast.load()
        assert fovea.torch.fast_path() == f"Python, as the fast path cannot be used: '{name}'"
        computes()


# Where PyTorch has what _fast._OBJECTS asks for,
IN_PYTORCH = {
    "Tensor": (torch, "Tensor"), "Parameter": (torch.nn, "Parameter"), "strided": (torch, "strided"),
    "dtypes": (torch, "uint8"), "modes": (torch._C, "_len_torch_dispatch_stack"),
    "transforms": (torch._C, "_are_functorch_transforms_active"), "profiler": (torch._C._autograd, "_profiler_enabled"),
    "tracing": (torch._C, "_get_tracing_state"), "forward_ad": (torch.autograd.forward_ad, "_current_level"),
    "any_autocast": (torch._C, "_is_any_autocast_enabled"), "autocast_enabled": (torch, "is_autocast_enabled"),
    "autocast_dtype": (torch, "get_autocast_dtype"), "grad_enabled": (torch, "is_grad_enabled"),
    "deterministic": (torch._C, "_get_deterministic_algorithms"),
    "warn_only": (torch, "is_deterministic_algorithms_warn_only_enabled"),
    "apply": (torch._C, "_FunctionBase"), "node": (_fast.FastAttention, "_backward_cls"),
    "compiling": (torch.compiler, "is_compiling"), "empty_like": (torch, "empty_like"),
    "zeros_like": (torch, "zeros_like"), "empty_strided": (torch, "empty_strided"),
    "backend_order": (torch._C, "_get_sdp_priority_order"), "math_allowed": (torch._C, "_get_math_sdp_enabled"),
    "flash_allowed": (torch._C, "_get_flash_sdp_enabled"),
    "efficient_allowed": (torch._C, "_get_mem_efficient_sdp_enabled"),
    "cudnn_allowed": (torch._C, "_get_cudnn_sdp_enabled"),
}  # fmt: skip
# what C calls of fovea itself, and what may be missing.
OURS = ("stream", "draw_seed", "backward", "begin_backward")
OPTIONAL = {"stop": (torch.utils.checkpoint, "_StopRecomputationError"), "exchange": (torch.Tensor, "__dlpack_c_exchange_api__")}
OF_FUNCTIONS = ("to_save", "materialize_grads", "needs_input_grad", "saved_tensors", "apply")


def take_away(name, patch):
    """In PyTorch itself, but for what a class of C has. Returns what fast_path() then names."""
    if name.startswith("_FunctionBase."):
        real = vars(torch._C._FunctionBase)
        patch.setattr(torch._C, "_FunctionBase", type("Base", (), {x: real[x] for x in OF_FUNCTIONS if not name.endswith(f".{x}")}))
    elif name == "node.apply":
        patch.setattr(_fast.FastAttention, "_backward_cls", type("Node", (), {}))
    elif name in OURS:
        patch.delitem(_fast._OBJECTS, name)
        return name
    else:
        owner, attribute = IN_PYTORCH[name]
        for each in owner.__mro__ if name == "node" else [owner]:  # a class inherits it
            if attribute in vars(each):
                patch.delattr(each, attribute)
        return attribute
    return name.split(".")[1]


def test_every_name_is_taken_away_below():
    assert {*IN_PYTORCH, *OURS, *OPTIONAL} == set(_fast._OBJECTS)


@pytest.mark.parametrize("name", [*IN_PYTORCH, *OURS, *(f"_FunctionBase.{name}" for name in OF_FUNCTIONS), "node.apply"])
def test_without_any_one_of_pytorchs_names(extension, monkeypatch, name, in_python):
    with monkeypatch.context() as patch:
        missing = take_away(name, patch)
        _fast.load()
    why = fovea.torch.fast_path()
    assert why.startswith("Python, as the fast path cannot be used: ") and f"'{missing}'" in why, why
    assert (f"PyTorch {torch.__version__} differs from what it knows" in why) == (name not in OURS)
    assert _fast.attention is _fast._declined and _fast.sdpa is None
    computes()
    assert in_python == ["forward", "backward"]
    _fast.load()
    assert fovea.torch.fast_path().startswith("C, ")


@pytest.mark.parametrize("name", OPTIONAL)
def test_without_a_name_that_may_be_missing(extension, monkeypatch, name, in_python):
    with monkeypatch.context() as patch:
        patch.delattr(*OPTIONAL[name], raising=False)
        _fast.load()
    assert fovea.torch.fast_path().startswith(f"C, tensors read by {'methods' if name == 'exchange' else ''}")
    computes()
    assert in_python == []


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError, SystemError])
def test_whatever_else_differs_in_pytorch(extension, monkeypatch, error, in_python):
    """fovea.torch can then still be imported."""

    def differs():
        raise error("of a test")

    with monkeypatch.context() as patch:
        patch.setitem(_fast._OBJECTS, "node", differs)
        _fast.load()
    assert fovea.torch.fast_path().startswith("Python, ") and "of a test" in fovea.torch.fast_path()
    computes()
    assert in_python == ["forward", "backward"]


def test_with_a_node_that_cannot_be_changed(extension, monkeypatch, in_python):
    """An error of start() itself."""
    with monkeypatch.context() as patch:
        patch.setitem(_fast._OBJECTS, "node", lambda: int)
        _fast.load()
    assert fovea.torch.fast_path().startswith("Python, as the fast path cannot be used: ")
    computes()
    assert in_python == ["forward", "backward"]


@pytest.mark.parametrize("why, change", {
    "this Python has no global lock": lambda m: m.setattr(_fast.sysconfig, "get_config_var", lambda name: 1),
    "it needs CPython 3.10 or newer": lambda m: m.setattr(_fast.sys, "version_info", (3, 9, 18)),
    "of another version than this package": lambda m: m.setattr(_fast, "_abi", types.SimpleNamespace(Problem=ctypes.c_int)),
    "does not exist": lambda m: m.setattr(_fast._library, "path", _fast._library.path.with_name("elsewhere") / "x.so"),
}.items())  # fmt: skip
def test_where_it_cannot_be_loaded(extension, monkeypatch, why, change):
    monkeypatch.setattr(_fast, "_EXTENSION", None)
    with monkeypatch.context() as context:
        change(context)
        _fast.load()
        assert fovea.torch.fast_path().startswith("Python, as the fast path cannot be used: ")
        assert why in fovea.torch.fast_path()
        computes()


@pytest.mark.parametrize("other", [10000, 100, 1], ids=["major", "minor", "patch"])
def test_of_another_version_than_the_library(extension, monkeypatch, other, in_python):
    assert extension.VERSION == _library.version()
    number = _library.lib.fovea_version() + other
    with monkeypatch.context() as patch:
        patch.setattr(_fast, "_EXTENSION", None)
        patch.setattr(_library.lib, "fovea_version", lambda: number)
        _fast.load()
        assert f"_fast.abi3.so is of version {extension.VERSION}, and the library of {_library.version()}" in _fast.fast_path()
        assert _fast.fast_path().startswith("Python, ")
    computes()
    assert in_python == ["forward", "backward"]


def test_the_types_are_in_the_order_of_c():
    assert [_call._CODES[dtype] for dtype in _call.TYPES] == list(range(1, 8))


@pytest.mark.parametrize("way", ["1", "methods"], indirect=True)
def test_a_declined_call_draws_one_seed(way):
    """Where Python computes it, or says why not, the generator is as if Python had done it alone."""
    q = torch.randn(1, 2, 8, 16)
    left = []
    for path in ("C", "Python"):
        if path == "Python":
            _fast.switch_off()
        torch.manual_seed(3)
        with pytest.raises(ValueError, match="scale"):
            attention(q, q, q, scale=1e300, dropout_p=0.5)
        left.append(torch.rand(1))
    assert torch.equal(*left)
