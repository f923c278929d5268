# SPDX-License-Identifier: Apache-2.0
"""Peak memory by PyTorch's allocator, beyond inputs and outputs: linear in the sequence length, and nothing of the size
of S x S but what the caller gave or asked for."""

import pytest
import torch

from fovea.torch import attention

pytestmark = [pytest.mark.alone, pytest.mark.cuda]


def peaks(q, k, v, **options):
    """Bytes beyond inputs, outputs and gradients that the forward and the backward had at their peak."""
    leaves = [x for x in (q, k, v, options.get("bias")) if x is not None and x.requires_grad]
    for _ in range(2):  # the first compiles, and PyTorch's allocator finds its blocks
        for x in leaves:
            x.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out, lse = attention(q, k, v, return_lse=True, **options)
        kept = torch.cuda.memory_allocated()
        forward = torch.cuda.max_memory_allocated() - kept
        grad_out = torch.ones_like(out)
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        sizes = sum(x.numel() * x.element_size() for x in grads)
        backward = torch.cuda.max_memory_allocated() - held - sizes
        assert kept - before <= out.numel() * out.element_size() + lse.numel() * 4 + 4096
        del out, lse, grads, grad_out
    return forward, backward


def make(batch, heads, rows, dim, device, dtype=torch.bfloat16):
    return [torch.randn(batch, rows, heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize(
    "batch, heads, rows, dim",
    [(8, 16, 2048, 64), (4, 16, 4096, 128), (384, 4, 384, 32), (768, 4, 768, 32)],
)
def test_bias_broadcast_over_the_batch(batch, heads, rows, dim, device):
    """With its gradient: under 1.3 times dq in fp32, 1.2 where Hopper's own kernels run."""
    bias = torch.randn(1, heads, rows, rows, device=device, dtype=torch.bfloat16, requires_grad=True)
    q, k, v = make(batch, heads, rows, dim, device)
    forward, backward = peaks(q, k, v, bias=bias)
    grad_q_fp32 = 4 * q.numel()
    assert forward <= 0.1 * grad_q_fp32 + (1 << 21), forward
    most = 1.2 if torch.cuda.get_device_capability(device) == (9, 0) else 1.3
    assert backward <= most * grad_q_fp32, f"{backward / grad_q_fp32:.2f} times dq in fp32"


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_sequences(dtype, deterministic, device):
    """S x S in bits alone would be 128 MiB a head."""
    q, k, v = make(1, 2, 32_768, 64, device, dtype)
    forward, backward = peaks(q, k, v, causal=True, deterministic=deterministic)
    inputs = 3 * q.numel() * 4
    # fp32: q, k and v as pairs of fp16, which is as much again; in a region of their own the seven largest numbers of each
    # head (Region::kSizes), 256 bytes; and 255 to begin at a multiple of that: one more of the allocator's grains of 512.
    sizes = 512 if dtype == torch.float32 else 0
    assert forward <= inputs + sizes, forward
    assert backward <= 4 * inputs, backward


def test_key_mask_is_not_expanded(device):
    mask = torch.rand(4, 1, 1, 8192, device=device) < 0.8
    q, k, v = make(4, 8, 8192, 64, device)
    forward, backward = peaks(q, k, v, mask=mask)
    assert max(forward, backward) <= 8 * q.numel(), (forward, backward)
