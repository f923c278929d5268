# SPDX-License-Identifier: Apache-2.0
"""fovea.torch.enable() on CUDA tensors: numbers, what is handed back and warned of, autocast, graphs, determinism.
tests/torch/fuzz_sdpa.py --device cuda compares more random calls."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fovea.torch import disable, enable, enabled, reset_stats, stats


@pytest.fixture(autouse=True)
def off(device):
    reset_stats()
    yield
    disable()
    reset_stats()
    torch.use_deterministic_algorithms(False)


def normal(*shape, device, dtype=torch.bfloat16, grad=True):
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)


def qkv(device, shape=(2, 4, 130, 64), **options):
    return [normal(*shape, device=device, **options) for _ in range(3)]


def results(call, leaves):
    out = call()
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def close(got, want, tolerance=0.03):
    for x, y in zip(got, want):
        assert x.shape == y.shape and x.dtype == y.dtype
        torch.testing.assert_close(x.float(), y.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(130, 64), (4, 130, 64), (2, 4, 130, 64), (2, 3, 4, 130, 64), (2, 1, 3, 4, 130, 64)], ids=len)
@pytest.mark.parametrize("how", ["plain", "causal", "bias"])
def test_against_pytorch(how, shape, dtype, device):
    q, k, v = qkv(device, shape, dtype=dtype)
    options = {"is_causal": True} if how == "causal" else {}
    leaves = [q, k, v]
    if how == "bias":
        options["attn_mask"] = normal(130, 130, device=device, dtype=dtype)
        leaves.append(options["attn_mask"])
    want = results(lambda: sdpa(q, k, v, **options), leaves)
    enable(prefer=None)
    close(results(lambda: sdpa(q, k, v, **options), leaves), want)
    assert stats()["served"] == 1 and not stats()["handed_back"]


@pytest.mark.cuda
def test_autocast(device):
    q, k, v = qkv(device, dtype=torch.float32)
    bias = normal(1, 4, 130, 130, device=device, dtype=torch.float32)

    def run():
        with torch.autocast("cuda", torch.bfloat16):
            out = sdpa(q, k, v, bias)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, bias), torch.ones_like(out))]

    want = run()
    enable(prefer=None)
    close(run(), want)
    assert stats()["served"] == 1


@pytest.mark.cuda
def test_what_is_handed_back_is_said_once(device):
    q = torch.randn(2, 4, 8, 64, device=device, dtype=torch.float64)
    want = sdpa(q, q, q)
    enable(prefer=None)
    with pytest.warns(UserWarning, match="handed back to PyTorch: float64 on a GPU") as said:
        assert torch.equal(sdpa(q, q, q), want)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sdpa(q, q, q)
    assert stats()["handed_back"] == {"float64 on a GPU": 2}


@pytest.mark.cuda
def test_random_calls(device, monkeypatch):
    """40 of tests/torch/fuzz_sdpa.py: a fault of PyTorch's kernels is in a process of their own."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "torch")
    import fuzz_sdpa as fuzz

    said = []
    failures, served = fuzz.run("cuda", range(90000, 90040), show=said.append)
    assert not failures and served > 20, "\n".join(said)


def test_determinism(device):
    """Both directions are planned for it at the forward; results are equal in every run."""
    q, k, v = qkv(device)
    bias = normal(1, 1, 130, 130, device=device)
    enable(prefer=None)
    torch.use_deterministic_algorithms(True)
    first = results(lambda: sdpa(q, k, v, bias), [q, k, v, bias])
    for x, y in zip(first, results(lambda: sdpa(q, k, v, bias), [q, k, v, bias])):
        assert torch.equal(x, y)
    assert stats()["served"] == 2 and all("det" in line.split() for line in stats()["problems"])


def test_the_fast_path_of_an_encoder(device):
    """prefer=None turns it off; with it PyTorch's C++ may or may not ask for attention: what counts is the number."""
    layer = nn.TransformerEncoderLayer(256, 4, 512, 0.0, batch_first=True).to(device, torch.bfloat16).eval()
    x = normal(2, 130, 256, device=device, grad=False)
    with torch.inference_mode():
        want = layer(x)
        enable(prefer=None)
        close([layer(x)], [want])
    assert stats()["served"] == 1


@pytest.mark.cuda
def test_nested_tensors(device):
    parts = [torch.randn(n, 4, 64, device=device, dtype=torch.bfloat16) for n in (50, 130, 7)]
    leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    x = leaf.transpose(1, 2)

    def run():
        out = sdpa(x, x, x, is_causal=True).transpose(1, 2).values()
        return [out.detach(), torch.autograd.grad(out, leaf, torch.ones_like(out))[0].values()]

    want = run()
    enable(prefer=None)
    close(run(), want)
    assert stats()["served"] == 1


@pytest.mark.cuda
def test_a_graph_of_a_training_step(device):
    """Captured once, replayed with new numbers; what is captured has run once before, as PyTorch asks."""
    q, k, v = qkv(device)
    bias = normal(1, 4, 130, 130, device=device)
    leaves = [q, k, v, bias]
    enable(prefer=None)
    results(lambda: sdpa(q, k, v, bias), leaves)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(lambda: sdpa(q, k, v, bias), leaves)
    with torch.no_grad():
        for x in leaves:
            x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    disable()
    close(captured, results(lambda: sdpa(q, k, v, bias), leaves), 0.05)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compile(mode, device):
    tensors = qkv(device)
    call = lambda *x: sdpa(*x, is_causal=True) * 2  # noqa: E731
    want = results(lambda: call(*tensors), tensors)
    enable(prefer=None)
    compiled = torch.compile(call, mode=mode, fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        close([x.clone() for x in results(lambda: compiled(*tensors), tensors)], want)
    assert stats()["traced"] >= 1 and stats()["served"] == 0


@pytest.mark.cuda
def test_nothing_waits_for_the_device(device):
    q, k, v = qkv(device)
    bias = normal(1, 4, 130, 130, device=device)
    enable(prefer=None)
    step = lambda: results(lambda: sdpa(q, k, v, bias, dropout_p=0.1), [q, k, v, bias])  # noqa: E731
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_only_the_device_that_is_named(device):
    q, k, v = qkv(device)
    with enabled("cpu", prefer=None):
        sdpa(q, k, v)
    assert stats()["served"] == 0


@pytest.mark.cuda
def test_distributed_tensors(device, tmp_path):
    """A mesh of one GPU: the rules, and the placements of results and gradients. tests/torch/test_dtensor.py has several ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    q, k, v = qkv(device)
    bias = normal(1, 4, 130, 130, device=device)
    leaves = [q, k, v, bias]
    want = results(lambda: sdpa(q, k, v, bias), leaves)
    torch.distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        placed = [distribute_tensor(x.detach(), mesh, [Shard(1)]).requires_grad_() for x in (q, k, v)]
        placed.append(distribute_tensor(bias.detach(), mesh, [Replicate()]).requires_grad_())
        enable(prefer=None)
        found = results(lambda: sdpa(*placed), placed)
        assert stats()["served"] == 1 and not stats()["handed_back"]
        assert [x.placements for x in found[:4]] == [(Shard(1),)] * 4
        close([x.full_tensor() for x in found], want)
    finally:
        torch.distributed.destroy_process_group()


def in_memory(order, *shape, device, dtype):
    """A tensor whose dimensions lie in this order, the outermost first."""
    x = torch.randn([shape[at] for at in order], device=device, dtype=dtype)
    return x.permute([order.index(at) for at in range(len(shape))])


ORDERS = {"as the shape": (0, 1, 2, 3), "adjacent heads": (0, 2, 1, 3), "rows first": (2, 0, 1, 3)}
OPTIONS = {
    "plain": lambda *of: {},
    "causal": lambda *of: {"is_causal": True},
    "a mask": lambda device, dtype: {"attn_mask": torch.rand(130, 130, device=device) < 0.9},
    "a bias": lambda device, dtype: {"attn_mask": torch.randn(4, 130, 136, device=device, dtype=dtype)[..., :130]},
    "dropout": lambda *of: {"dropout_p": 0.1},
}


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_the_layout_of_a_result(way, order, options, dtype, device):
    """It is that of PyTorch's kernel, whichever it would take."""
    q, k, v = (in_memory(ORDERS[order], 2, 4, 130, 64, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    given = OPTIONS[options](device, dtype)
    call = lambda *x: sdpa(*x, **given)  # noqa: E731
    want = call(q, k, v)
    enable(prefer=None)
    got = (torch.compile(call, backend="aot_eager", fullgraph=True) if way == "compiled" else call)(q, k, v)
    assert stats()["traced" if way == "compiled" else "served"] >= 1 and not stats()["handed_back"]
    assert got.stride() == want.stride()
    torch.autograd.grad(got, (q, k, v), torch.randn_like(got))


@pytest.mark.cuda
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=str)
def test_the_layout_where_the_math_path_is_off(backend, order, device):
    """It is that of the kernel that sdpa_kernel() allows."""
    q, k, v = (in_memory(ORDERS[order], 2, 4, 130, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    with sdpa_kernel(backend):
        want = sdpa(q, k, v)
        enable(prefer=None)
        got = sdpa(q, k, v)
    assert stats()["served"] == 1 and not stats()["handed_back"]
    assert got.stride() == want.stride()
