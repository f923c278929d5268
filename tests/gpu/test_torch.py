# SPDX-License-Identifier: Apache-2.0
"""fovea.torch on CUDA tensors: autograd, streams, graphs, seeds, devices, torch.compile, and that nothing waits."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import fovea.torch
from fovea.torch import attention

pytestmark = pytest.mark.cuda


def normal(*shape, device, dtype=torch.bfloat16, grad=True):
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)


def qkv(device, shape=(2, 4, 130, 64), **options):
    return [normal(*shape, device=device, **options) for _ in range(3)]


def sdpa64(q, k, v, bias=None, causal=False):
    """(out, gradients of q, k, v and bias) in fp64, for a gradient of ones."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    b = None if bias is None else bias.detach().double().requires_grad_()
    s = leaves[0] @ leaves[1].mT / q.shape[-1] ** 0.5
    s = s if b is None else s + b
    if causal:
        s = s.masked_fill(~torch.ones_like(s, dtype=torch.bool).tril(), -torch.inf)
    out = torch.softmax(s, -1) @ leaves[2]
    out.sum().backward()
    return [out.detach(), *(x.grad for x in leaves), None if b is None else b.grad]


def close(actual, right, what=""):
    torch.testing.assert_close(actual.double(), right, rtol=0.02, atol=0.02, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_autograd(dtype, device):
    q, k, v = qkv(device, dtype=dtype)
    bias = normal(1, 4, 130, 130, device=device, dtype=dtype)
    out = attention(q, k, v, bias=bias, causal=True)
    assert out.device == q.device
    out.sum().backward()
    right = sdpa64(q, k, v, bias, causal=True)
    for name, actual, one in zip(("out", "q", "k", "v", "bias"), (out, q.grad, k.grad, v.grad, bias.grad), right):
        close(actual, one, name)


def test_nothing_waits_for_the_device(device):
    """PyTorch raises at whatever synchronises, and a graph's capture at more."""
    q, k, v = qkv(device)
    bias = normal(1, 1, 130, 130, device=device)
    lengths = torch.tensor([0, 100, 260], device=device, dtype=torch.int32)
    packed = [x.detach().transpose(1, 2).reshape(260, 4, 64).requires_grad_() for x in (q, k, v)]
    steps = [
        lambda: attention(q, k, v, bias=bias, causal=True, dropout_p=0.1),
        lambda: attention(*packed, cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=160, max_seqlen_k=160),
    ]
    for step in steps:
        step().sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in steps:
            step().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_max_seqlen_on_the_device_is_refused(device):
    """Its number would have to be waited for, in each call."""
    q = torch.randn(64, 4, 64, device=device, dtype=torch.bfloat16)
    lengths = torch.tensor([0, 20, 64], device=device, dtype=torch.int32)
    options = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_k=44)
    longest = lengths.diff().max()
    for call in (attention, fovea.attention):
        with pytest.raises(TypeError, match="max_seqlen_q: .*every call would wait for; accepted: an integer"):
            call(q, q, q, max_seqlen_q=longest, **options)
    expected = attention(q, q, q, max_seqlen_q=44, **options)
    assert torch.equal(attention(q, q, q, max_seqlen_q=longest.cpu(), **options), expected)


def test_current_stream(device):
    """Work goes to the stream that is current, forward and backward: it sees what was put there before it."""
    stream = torch.cuda.Stream()
    q, k, v = qkv(device, (2, 4, 512, 64))
    expected = attention(q, k, v).detach()
    late = [torch.zeros_like(x).requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # long enough for a call on another stream to come before the copies
        with torch.no_grad():
            for x, y in zip(late, (q, k, v)):
                x.copy_(y)
        out = attention(*late)
        out.sum().backward()
    stream.synchronize()
    assert torch.equal(out, expected)
    right = sdpa64(q, k, v)
    close(late[0].grad, right[1])


def test_graph_of_forward_and_backward(device):
    q, k, v = qkv(device)
    bias = normal(1, 4, 130, 130, device=device)
    leaves = (q, k, v, bias)
    run = lambda: torch.autograd.grad(attention(q, k, v, bias=bias).sum(), leaves)  # noqa: E731
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = run()
    for _ in range(3):
        with torch.no_grad():
            for x in leaves:
                x.normal_()
        graph.replay()
        right = sdpa64(q, k, v, bias)
        for name, actual, one in zip(("q", "k", "v", "bias"), grads, right[1:]):
            close(actual, one, name)


def test_first_call_in_a_capture_is_named_or_works(device):
    """A kernel that was never loaded: the capture works all the same, or the error says what to do before it."""
    q, k, v = qkv(device, (1, 2, 45, 176), grad=False)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = attention(q, k, v, softcap=3.0)
    except RuntimeError as error:  # the end of the capture may have one of PyTorch's own
        said = f"{error} {error.__context__}"
        assert "fovea_prepare" in said, said
        torch.cuda.synchronize()
        return
    graph.replay()
    assert torch.equal(out, attention(q, k, v, softcap=3.0))


AHEAD = """
import sys, threading, time, torch, fovea.torch

q, k, v = (torch.randn(2, 4, 512, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
with torch.no_grad():
    fovea.torch.attention(q, k, v, causal=True)
assert threading.active_count() == 1
print("--", file=sys.stderr, flush=True)
out = fovea.torch.attention(q, k, v, causal=True)
while threading.active_count() > 1:
    time.sleep(0.01)
print("--", file=sys.stderr, flush=True)
out.sum().backward()
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("how", ["1", "0"], ids=["C", "Python"])
def test_a_forward_begins_with_the_kernels_of_its_backward(how, device):
    """The forward compiles them, the backward finds them all; without a gradient wanted nothing is begun."""
    env = {**os.environ, "FOVEA_TORCH_FAST": how, "FOVEA_LOG": "jit", "FOVEA_CACHE_DIR": "none"}
    done = subprocess.run([sys.executable, "-c", AHEAD], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    alone, forward, backward = done.stderr.split("--\n")
    assert "_forward" in alone and "_backward" not in alone, done.stderr
    assert "_backward" in forward and "compiled" not in backward, done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_scores_of_a_billion(head_dim, dtype, device):
    """Each query is one of the keys, and every other score is smaller by millions: its value comes out as it is."""
    q = (torch.randint(0, 2, (1, 2, 200, head_dim), device=device) * 2 - 1).to(dtype) * 16000
    v = normal(1, 2, 200, head_dim, device=device, dtype=dtype)
    for causal in (False, True):
        out = attention(q, q, v, causal=causal)
        assert torch.allclose(out, v, rtol=1e-6, atol=0) if dtype == torch.float32 else torch.equal(out, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_infinity_in_v_stays_in_its_column(dtype, device):
    q, k, v = qkv(device, dtype=dtype, grad=False)
    right = sdpa64(q, k, v, causal=True)[0]
    v[0, 1, 5, 3] = torch.inf
    out = attention(q, k, v, causal=True)
    assert not out[0, 1, 5:, 3].isfinite().any(), "where the key takes part"
    out[0, 1, :, 3] = right[0, 1, :, 3].to(dtype)
    close(out, right)


@pytest.mark.parametrize("rng", ["fovea", "torch_mem_efficient"])
def test_drawn_seed(rng, device):
    q, k, v = qkv(device)
    torch.manual_seed(3)
    one = attention(q, k, v, dropout_p=0.3, rng=rng)
    two = attention(q, k, v, dropout_p=0.3, rng=rng)
    torch.manual_seed(3)
    again = attention(q, k, v, dropout_p=0.3, rng=rng)
    assert torch.equal(one, again) and not torch.equal(one, two)


def test_unaligned_after_aligned(device):
    """The same shapes and strides at another address: rows that have to be copied first need other workspace."""
    memory = torch.randn(2 * 4 * 130 * 64 + 64, device=device, dtype=torch.bfloat16)
    for skip in (0, 1, 0, 8, 3):
        q = memory[skip : skip + 2 * 4 * 130 * 64].reshape(2, 4, 130, 64).detach().requires_grad_()
        out = attention(q, q, q)
        out.sum().backward()
        leaves = [q.detach().double().requires_grad_() for _ in range(3)]
        right = torch.softmax(leaves[0] @ leaves[1].mT / 8, -1) @ leaves[2]
        right.sum().backward()
        close(out, right.detach())
        torch.testing.assert_close(q.grad.double(), sum(x.grad for x in leaves), rtol=0.06, atol=0.06)  # three roundings


@pytest.mark.parametrize("view", ["transposed", "sliced", "packed qkv", "columns apart", "expanded"])
def test_strides(view, device):
    base = torch.randn(2, 70, 3, 4, 64, device=device, dtype=torch.bfloat16)
    if view == "packed qkv":
        q, k, v = (base[:, :, n].transpose(1, 2) for n in range(3))
    elif view == "transposed":
        q, k, v = (torch.randn(2, 4, 64, 70, device=device, dtype=torch.bfloat16).mT for _ in range(3))
    elif view == "columns apart":
        q, k, v = (torch.randn(2, 4, 70, 128, device=device, dtype=torch.bfloat16)[..., ::2] for _ in range(3))
    elif view == "expanded":
        q, k, v = (torch.randn(1, 4, 70, 64, device=device, dtype=torch.bfloat16).expand(2, -1, -1, -1) for _ in range(3))
    else:
        q, k, v = (torch.randn(2, 4, 80, 72, device=device, dtype=torch.bfloat16)[:, :, 5:75, 3:67] for _ in range(3))
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attention(q, k, v)
    out.sum().backward()
    right = sdpa64(q, k, v)
    for name, actual, one in zip(("out", "q", "k", "v"), (out, q.grad, k.grad, v.grad), right):
        close(actual, one, name)


def test_autocast(device):
    q, k, v = qkv(device, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    close(q.grad, sdpa64(q, k, v)[1])


def test_nested_tensors(device):
    parts = [torch.randn(n, 4, 64, device=device, dtype=torch.bfloat16) for n in (5, 70, 33)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2).requires_grad_()
    out = attention(nested, nested, nested)
    for one, part in zip(out.unbind(), parts):
        x = part.transpose(0, 1)
        close(one, sdpa64(x, x, x)[0])


def test_lse_and_its_gradient(device):
    q, k, v = qkv(device, dtype=torch.float32)
    out, lse = attention(q, k, v, return_lse=True)
    (lse.sum() + out.sum()).backward()
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    s = leaves[0] @ leaves[1].mT / 8
    (torch.logsumexp(s, -1).sum() + (torch.softmax(s, -1) @ leaves[2]).sum()).backward()
    torch.testing.assert_close(lse.double(), torch.logsumexp(s, -1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q.grad.double(), leaves[0].grad, rtol=1e-3, atol=1e-4)


def test_threads(device):
    """Threads that have no context of their own yet, each with another shape and its own stream."""
    faults = []

    def work(n):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    q, k, v = qkv(device, (1, 2, 40 + n, 64))
                    out = attention(q, k, v)
                    out.sum().backward()
                    torch.cuda.current_stream().synchronize()
                    close(q.grad, sdpa64(q, k, v)[1])
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[0]


def test_one_shape_on_several_streams_and_in_a_graph(device):
    """The problem is kept from call to call, its workspace is not."""
    rounds, streams = 50, [torch.cuda.Stream() for _ in range(3)]
    leaves = qkv(device, (2, 4, 512, 64))

    def run():
        out = attention(*leaves, causal=True, deterministic=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    want = run()
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[0]):
            captured = run()
    torch.cuda.synchronize()
    found = []
    for _ in range(rounds):
        with torch.cuda.stream(streams[0]):
            graph.replay()
        for stream in streams[1:]:
            with torch.cuda.stream(stream):
                found.append(run())
    torch.cuda.synchronize()
    assert all(torch.equal(x, y) for results in [captured, *found] for x, y in zip(results, want))


def one_step(there, seed):
    """Forward and backward with a bias and dropout on a device that may not be the current one; numbers on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    leaves = [torch.randn(2, 4, n, m, generator=generator).to(there, torch.bfloat16).requires_grad_()
              for n, m in ((130, 64), (130, 64), (130, 64), (130, 130))]  # fmt: skip
    out = attention(*leaves[:3], bias=leaves[3], causal=True, dropout_p=0.1, seed=3, deterministic=True)
    assert out.device == there
    out.sum().backward()
    return [x.cpu() for x in (out.detach(), *(leaf.grad for leaf in leaves))]


several = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs several CUDA devices, and there are {torch.cuda.device_count()}"
)


@several
def test_every_device_by_turns(device):
    """The same bits on all of them; the current device stays the first."""
    expected = one_step(device, 1)
    for index in [*range(torch.cuda.device_count()), *reversed(range(torch.cuda.device_count()))]:
        for one, other in zip(expected, one_step(torch.device("cuda", index), 1)):
            assert torch.equal(one, other), f"cuda:{index}"
        assert torch.cuda.current_device() == 0
        q, k, v = qkv(torch.device("cuda", index))
        close(attention(q, k, v, causal=True), sdpa64(q, k, v, causal=True)[0], f"cuda:{index}")
    q, k, v = qkv(torch.device("cuda", 1))
    with pytest.raises(ValueError, match="k: on cuda:0; accepted: cuda:1"):
        attention(q, k.to("cuda:0"), v)


@several
def test_every_device_at_once(device):
    """A thread for each, none of which has a context of its own at first."""
    expected = {seed: one_step(device, seed) for seed in range(10)}
    faults = []

    def work(index):
        try:
            for seed in range(10):
                for one, other in zip(expected[seed], one_step(torch.device("cuda", index), seed)):
                    assert torch.equal(one, other), f"cuda:{index}, seed {seed}"
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(torch.cuda.device_count())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[0]


@several
def test_a_graph_on_every_device(device):
    for index in range(torch.cuda.device_count()):
        there = torch.device("cuda", index)
        with torch.cuda.device(there):
            q, k, v = qkv(there, grad=False)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                attention(q, k, v)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out = attention(q, k, v)
            q.normal_()
            graph.replay()
            close(out, sdpa64(q, k, v)[0], f"cuda:{index}")


def test_compile(device):
    q, k, v = qkv(device)
    run = torch.compile(lambda *x: attention(*x, causal=True) * 2, backend="aot_eager", fullgraph=True)
    out = run(q, k, v)
    out.sum().backward()
    right = sdpa64(q, k, v, causal=True)
    close(out, right[0] * 2)
    close(q.grad, right[1] * 2)


class Layer(torch.nn.Module):
    """Attention with a bias that is a parameter, times 2, which is exact and the compiler's own."""

    def __init__(self, rows, device, **options):
        super().__init__()
        self.bias = torch.nn.Parameter(normal(1, 4, rows, rows, device=device, grad=False))
        self.options = options

    def forward(self, q, k, v, lengths=None):
        packed = {} if lengths is None else {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
        return attention(q, k, v, bias=self.bias, causal=True, align="top_left", **packed, **self.options) * 2


@pytest.mark.parametrize("way", ["dense", "dense, dropout", "packed, dropout"])
def test_reduce_overhead(way, device, monkeypatch):
    """CUDA graphs made by torch.compile, of the forward and of the backward: warmed up, recorded, replayed. With numbers
    that are new each time, in the same memory (the bias) and in other, the bits are those of eager calls, and dropout
    draws what it draws in them."""
    replays = 0
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph):
        nonlocal replays
        replays += 1
        return replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    rows, options = 130, {"deterministic": True}
    if "dropout" in way:
        options["dropout_p"] = 0.1
    if "packed" in way:
        options.update(max_seqlen_q=rows, max_seqlen_k=rows)
    layer = Layer(rows, device, **options)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for turn in range(6):
        with torch.no_grad():
            layer.bias.normal_()
        inputs = qkv(device)
        if "packed" in way:
            inputs = [x.detach().transpose(1, 2).reshape(2 * rows, 4, 64).requires_grad_() for x in inputs]
            ends = [0, 90 + turn, 90 + turn + rows, 2 * rows]
            inputs.append(torch.tensor(ends, device=device, dtype=torch.int32))
        leaves, grad_out = [*inputs[:3], layer.bias], torch.randn_like(inputs[0])
        before, found = replays, []
        for run in (layer, compiled):
            torch.compiler.cudagraph_mark_step_begin()
            torch.manual_seed(turn)
            out = run(*inputs)
            found.append([out, *torch.autograd.grad(out, leaves, grad_out)])
        for name, eager, graphed in zip(("out", "q", "k", "v", "bias"), *found):
            assert eager.isfinite().all() and torch.equal(eager, graphed), f"{name}, turn {turn}"
        assert turn < 3 or replays - before >= 2, f"turn {turn} replays no CUDA graphs"
        del out, found, eager, graphed


def test_refused_on_a_device(device):
    q, k, v = qkv(device)
    with pytest.raises(NotImplementedError, match="fp64 on a CUDA device"):
        attention(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match=r"bias: on cpu; accepted: cuda:0"):
        attention(q, k, v, bias=torch.zeros(130, 130))


def test_out_of_memory_is_a_memory_error_and_leaves_things_usable(device):
    q, k, v = qkv(device)
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * free, dtype=torch.uint8, device=device)
    close(attention(q, k, v), sdpa64(q, k, v)[0])


def test_lengths_that_lie_are_clamped(device):
    """Values on the device cannot be checked without waiting: nothing outside of the tensors is touched by them."""
    q, k, v, grad_out = (torch.randn(50, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(4))
    for ends in ([0, 30, 5000], [0, -7, 50], [60, 20, 10], [-5, 2**30, 2**31 - 1]):
        lengths = torch.tensor(ends, device=device, dtype=torch.int32)
        options = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 50, "max_seqlen_k": 50}
        # Results have as many rows on either side as they have themselves.
        memory = [torch.full((150, 2, 64), 7.0, device=device, dtype=torch.bfloat16) for _ in range(4)]
        out, *grads = (x[50:100] for x in memory)
        _, lse = fovea.attention(q, k, v, out=out, return_lse=True, **options)
        fovea.attention_backward(grad_out, q, k, v, out, lse, grads_out=dict(zip("qkv", grads)), **options)
        for name, x in zip(("out", "grad_q", "grad_k", "grad_v"), memory):
            assert (x[:50] == 7).all() and (x[100:] == 7).all(), f"{name}: rows outside of it were written, {ends}"
    x = torch.randn(2, 2, 40, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    used = torch.tensor([-3, 1000], device=device, dtype=torch.int32)
    attention(x, x, x, seqused_q=used, seqused_k=used).sum().backward()
    torch.cuda.synchronize()


def test_module_is_importable_beside_a_device():
    assert fovea.backends()["cuda"] == "available", fovea.explain()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_no_sequence_owns_are_zeros(device, dtype):
    """Packed with rows behind the last sequence, and with unused ones; dense with unused ones. Fresh memory holds NaN."""
    lengths = torch.tensor([0, 50, 50, 300], dtype=torch.int32)
    used = torch.tensor([40, 0, 250], dtype=torch.int32)
    ends = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": 250, "max_seqlen_k": 250}
    cases = {
        "packed": ((1000, 4, 64), ends, range(300, 1000)),
        "packed, used": ((320, 4, 64), {**ends, "seqused_q": used, "seqused_k": used}, range(40, 50)),
        "dense, used": ((3, 4, 300, 64), {"seqused_q": used, "seqused_k": used}, range(250, 300)),
    }
    for name, (shape, options, missing) in cases.items():
        q, k, v = (torch.randn(shape, dtype=dtype) for _ in range(3))
        results = []
        for place in ("cpu", device):
            there = {key: x.to(place) if torch.is_tensor(x) else x for key, x in options.items()}
            leaves = [x.to(place).requires_grad_() for x in (q, k, v)]
            poison = [torch.full_like(x, torch.nan) for x in leaves * 3]
            del poison
            out, lse = attention(*leaves, return_lse=True, **there)
            results.append([out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
        for what, right, actual in zip(("out", "lse", "dq", "dk", "dv"), *results):
            torch.testing.assert_close(actual.cpu(), right, rtol=0.03, atol=0.03, msg=lambda text: f"{name}: {what}: {text}")
            if what != "lse":
                rows = actual[2, :, list(missing)] if name.startswith("dense") else actual[list(missing)]
                assert not rows.any(), f"{name}: {what}"


@pytest.mark.parametrize("head_dim", [64, 128, 320])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("plane", [(1, 4, 250, 250), (3, 4, 250, 250), (1, 1, 250, 250), (3, 1, 1, 250), (1, 4, 250, 1)], ids=str)
def test_gradients_of_biases_of_sequences_are_written_everywhere(plane, packed, head_dim, device, monkeypatch):
    """Memory held NaN; nobody clears it. What no sequence meets is 0."""
    options = {"seqused_q": torch.tensor([40, 0, 200], dtype=torch.int32), "causal": True, "align": "top_left"}
    shape = (3, 4, 250, head_dim)
    if packed:
        ends = torch.tensor([0, 50, 50, 300], dtype=torch.int32)
        options |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 250, "max_seqlen_k": 250}
        shape = (300, 4, head_dim)
    inputs = [torch.randn(shape).bfloat16() for _ in range(3)] + [torch.randn(plane).bfloat16()]
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **more: empty_like(x, **more).fill_(torch.nan) if x.is_cuda else empty_like(x, **more))
    results = []
    for place in ("cpu", device):
        there = {key: x.to(place) if torch.is_tensor(x) else x for key, x in options.items()}
        leaves = [x.to(place).requires_grad_() for x in inputs]
        out = attention(*leaves[:3], bias=leaves[3], **there)
        results.append(torch.autograd.grad(out, leaves[3], torch.ones_like(out))[0].float().cpu())
    # Without keys the terms of a sum cancel: what is left of them is their rounding.
    torch.testing.assert_close(results[1], results[0], rtol=0.03, atol=0.03 if plane[-1] > 1 else 0.3)
