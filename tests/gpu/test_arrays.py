# SPDX-License-Identifier: Apache-2.0
"""fovea.attention on arrays of CUDA devices: PyTorch's, CuPy's, and those that have __cuda_array_interface__ alone."""

import numpy as np
import pytest
import torch

import fovea

pytestmark = pytest.mark.cuda
B, S, H, D = 2, 70, 4, 64


def right(q, k, v):
    """(out, gradients for a gradient of ones), in fp64; (B, S, H, D)."""
    leaves = [x.double().transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    out = torch.softmax(leaves[0] @ leaves[1].mT / D**0.5, -1) @ leaves[2]
    out.sum().backward()
    return out.detach().transpose(1, 2), [x.grad.transpose(1, 2) for x in leaves]


def close(actual, expected):
    torch.testing.assert_close(actual.double(), expected, rtol=0.02, atol=0.02)


@pytest.fixture
def tensors(device):
    return [torch.randn(B, S, H, D, device=device, dtype=torch.float16) for _ in range(3)]


def test_pytorch(tensors, device):
    out, lse = fovea.attention(*tensors, return_lse=True)
    assert isinstance(out, torch.Tensor) and out.device == device and lse.shape == (B, H, S)
    grads = fovea.attention_backward(torch.ones_like(out), *tensors, out, lse)
    expected, expected_grads = right(*tensors)
    close(out, expected)
    for actual, one in zip((grads.q, grads.k, grads.v), expected_grads):
        close(actual, one)


def test_bfloat16_into_an_array(tensors):
    tensors = [x.bfloat16() for x in tensors]
    out = torch.empty_like(tensors[0])
    assert fovea.attention(*tensors, out=out) is out
    close(out, right(*tensors)[0])


class Interface:
    """What has __cuda_array_interface__ alone, such as arrays of Numba."""

    def __init__(self, tensor, stream=None):
        self.tensor = tensor
        self.__cuda_array_interface__ = dict(tensor.__cuda_array_interface__, stream=stream)


def test_cuda_array_interface(tensors, device):
    out = fovea.attention(*(Interface(x) for x in tensors))
    assert isinstance(out, torch.Tensor)
    close(out, right(*tensors)[0])


def test_cuda_array_interface_of_another_stream(tensors, device):
    """What a producer has put on its stream comes first."""
    stream = torch.cuda.Stream()
    late = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, y in zip(late, tensors):
            x.copy_(y)
    out = fovea.attention(*(Interface(x, stream.cuda_stream) for x in late))
    close(out, right(*tensors)[0])


def test_stream(tensors):
    stream = torch.cuda.Stream()
    expected = fovea.attention(*tensors)
    late = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, y in zip(late, tensors):
            x.copy_(y)
    out = fovea.attention(*late, stream=stream.cuda_stream)
    stream.synchronize()
    assert torch.equal(out, expected)


def test_cupy(tensors, device):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed here")
    arrays = [cupy.from_dlpack(x) for x in tensors]
    out, lse = fovea.attention(*arrays, return_lse=True)
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    grads = fovea.attention_backward(cupy.ones_like(out), *arrays, out, lse)
    expected, expected_grads = right(*tensors)
    close(torch.from_dlpack(out), expected)
    close(torch.from_dlpack(grads.k), expected_grads[1])


def test_jax(tensors):
    jax = pytest.importorskip("jax", reason="JAX is not installed here")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU here")
    with torch.cuda.device(tensors[0].device):  # JAX may change the current device when it starts
        arrays = [jax.dlpack.from_dlpack(x) for x in tensors]
    out = fovea.attention(*arrays)
    assert isinstance(out, jax.Array)
    close(torch.from_numpy(np.asarray(out)).cuda(), right(*tensors)[0])


def test_prepared_for_a_capture(tensors):
    """Kernels of a softcap that nobody had: loaded before the capture, which would refuse to."""
    q, k, v = tensors
    fovea.prepare(q, k, v, softcap=3.25, return_lse=True)
    fovea.prepare(q, k, v, softcap=3.25, direction="backward")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fovea.attention(q, k, v, softcap=3.25, return_lse=True)
        grads = fovea.attention_backward(out, q, k, v, out, lse, softcap=3.25)
    graph.replay()
    again = fovea.attention_backward(out, q, k, v, out, lse, softcap=3.25)
    assert torch.equal(out, fovea.attention(q, k, v, softcap=3.25))
    for actual, one in zip(grads[:3], again[:3]):
        close(actual, one.double())


def test_packed(tensors):
    parts = [x[0, :n] for x, n in zip(tensors, (5, 70, 33))]
    packed, cu_seqlens, longest = fovea.pack(parts)
    assert packed.is_cuda and cu_seqlens.tolist() == [0, 5, 75, 108] and longest == 70
    out = fovea.attention(packed, packed, packed, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
                          max_seqlen_q=longest, max_seqlen_k=longest)  # fmt: skip
    assert out.shape == packed.shape and out.isfinite().all()


def test_seed_on_the_device(tensors, device):
    seed = torch.tensor([7], device=device)
    one = fovea.attention(*tensors, dropout_p=0.3, seed=seed, offset=2)
    assert torch.equal(one, fovea.attention(*tensors, dropout_p=0.3, seed=7, offset=2))


several = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs several CUDA devices, and there are {torch.cuda.device_count()}"
)


@several
@pytest.mark.parametrize("kind", [lambda x: x, Interface, "jax"], ids=["PyTorch", "__cuda_array_interface__", "JAX"])
def test_no_call_changes_the_current_device(tensors, kind):
    """Whatever device is current and wherever arrays lie: they are read, results lie beside them, and the current device
    is what it was."""
    if kind == "jax":
        jax = pytest.importorskip("jax", reason="JAX is not installed here")
        if jax.default_backend() != "gpu":
            pytest.skip("JAX sees no GPU here")
        kind = jax.dlpack.from_dlpack
    expected = right(*tensors)[0]
    for index in range(torch.cuda.device_count()):
        there = torch.device("cuda", index)
        with torch.cuda.device(there):
            arrays = [kind(x.to(there)) for x in tensors]
        # The interface does not say which device it lies on: the current one is taken.
        for current in [index] if kind is Interface else range(torch.cuda.device_count()):
            with torch.cuda.device(current):
                fovea.explain(*arrays)
                fovea.prepare(*arrays, need="q,k,v")
                out, lse = fovea.attention(*arrays, return_lse=True)
                assert torch.cuda.current_device() == current
                grads = fovea.attention_backward(out, *arrays, out, lse)
                assert torch.cuda.current_device() == current
                with torch.cuda.device(there):
                    results = [torch.from_dlpack(x) for x in (out, grads.q)]
                assert all(x.device == there and x.isfinite().all() for x in results)
                close(results[0].to(expected.device), expected)
                if isinstance(out, torch.Tensor):
                    packed, cu_seqlens, longest = fovea.pack([x[0] for x in arrays] if kind is not Interface else [out[0]])
                    assert packed.device == cu_seqlens.device == there and longest == S
                    assert torch.cuda.current_device() == current


def test_refused(tensors):
    q, k, v = tensors
    for changed, message in (
        (lambda: fovea.attention(q, k.cpu(), v), "k: lies on the CPU; accepted: CUDA device 0"),
        (lambda: fovea.attention(q.cpu(), k, v), "k: lies on CUDA device 0; accepted: the CPU"),
        (lambda: fovea.attention(q, k, v, bias=np.zeros((S, S), np.float32)), "bias: lies on the CPU"),
        (lambda: fovea.attention(q, k, v, dropout_p=0.1, seed=np.array([3])), "seed: lies on the CPU"),
    ):
        with pytest.raises(ValueError, match=message):
            changed()
    lengths, others = (torch.tensor([0, 70], device="cuda", dtype=torch.int32) for _ in range(2))
    with pytest.raises(ValueError, match="lengths that lie on the device"):
        fovea.attention(q[0], k[0], v[0], causal=True, cu_seqlens_q=lengths, cu_seqlens_k=others, max_seqlen_q=70,
                        max_seqlen_k=70)  # fmt: skip
