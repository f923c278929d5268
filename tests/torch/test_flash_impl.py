# SPDX-License-Identifier: Apache-2.0
"""What calls PyTorch's flash operators, with fovea as their implementation: varlen_attn and the ring attention of two processes
with gloo. PyTorch itself has no such kernels for the CPU."""

import inspect
import os
import tempfile

import naive
import pytest
import torch
import torch.multiprocessing
from torch.nn import attention

import fovea.torch
from conftest import restore_flash_impl

WORLD = 2

pytestmark = pytest.mark.skipif(
    not hasattr(attention, "activate_flash_attention_impl"), reason=fovea.torch.aten.flash_impl()
)


@pytest.fixture
def active():
    attention.activate_flash_attention_impl("fovea")
    yield
    restore_flash_impl()


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)])
def test_varlen_attn(window, active):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    with_windows = "window_size" in inspect.signature(varlen.varlen_attn).parameters
    if window[0] > 0 and not with_windows:
        pytest.skip(f"PyTorch {torch.__version__}: varlen_attn has no windows")
    options = {"window_size": window} if with_windows else {"is_causal": window[1] == 0}
    q, k, v = (torch.randn(17, 2, 8, requires_grad=True) for _ in range(3))
    grad_out = torch.randn(17, 2, 8)
    ends = torch.tensor([0, 6, 17], dtype=torch.int32)
    out = varlen.varlen_attn(q, k, v, ends, ends, 11, 11, **options)
    got = [out, *torch.autograd.grad(out, (q, k, v), grad_out)]
    parts = []
    for begin, end in ((0, 6), (6, 17)):
        one = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        parts.append(naive.attention(*one, causal=window[1] == 0, window=window)[0].transpose(0, 1))
    right = torch.cat(parts)
    for x, y in zip(got, [right, *torch.autograd.grad(right, (q, k, v), grad_out)]):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def tensors():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, 8 * WORLD, 8, generator=generator) for _ in range(4)]


def ring(rank, folder, is_causal):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as ours

    ours._cp_options.enable_load_balance = False
    attention.activate_flash_attention_impl("fovea")
    mesh = init_device_mesh("cpu", (WORLD,))
    q, k, v, grad_out = (x.chunk(WORLD, 2)[rank].contiguous() for x in tensors())
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = ours._scaled_dot_product_ring_flash_attention(mesh, q, k, v, is_causal=is_causal)
    grads = ours._scaled_dot_product_ring_flash_attention_backward(
        mesh, grad_out, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, is_causal, seed, offset
    )
    torch.save([out, *grads], os.path.join(folder, f"results{rank}"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("is_causal", [False, True])
def test_ring_attention(is_causal):
    """Each process has half of the queries and of the keys; PyTorch merges the parts by their logsumexps."""
    pytest.importorskip("torch.distributed.tensor.experimental._context_parallel")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(ring, args=(folder, is_causal), nprocs=WORLD, start_method="spawn")
        found = [torch.load(os.path.join(folder, f"results{rank}")) for rank in range(WORLD)]
    q, k, v, grad_out = (x.requires_grad_() for x in tensors())
    right = naive.attention(q, k, v, causal=is_causal)[0]
    for name, y, *parts in zip(("out", "q", "k", "v"), [right, *torch.autograd.grad(right, (q, k, v), grad_out)], *found):
        torch.testing.assert_close(torch.cat(parts, 2), y, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
