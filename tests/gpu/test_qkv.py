# SPDX-License-Identifier: Apache-2.0
"""fovea.torch.attention_qkv on a device: the bits of attention(), and a gradient without a copy."""

import pytest
import torch

from fovea.torch import attention, attention_qkv

CASES = {
    "bshd": ((2, 130, 3, 4, 64), 2, {"layout": "bshd", "causal": True}),
    "bhsd": ((2, 3, 4, 130, 64), 1, {}),
    "first": ((3, 2, 4, 130, 128), 0, {"dropout_p": 0.2, "seed": 3}),
    "packed": ((200, 3, 4, 64), 1, {"causal": True, "max_seqlen_q": 130, "max_seqlen_k": 130}),
    "columns apart": ((2, 130, 4, 64, 3), 4, {"layout": "bshd"}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_qkv(case, dtype, device):
    shape, dim, options = CASES[case]
    if case == "packed":
        ends = torch.tensor([0, 50, 180], dtype=torch.int32, device=device)
        options = {**options, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    qkv = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    for _ in range(2):
        got, want = attention_qkv(qkv, dim, deterministic=True, **options), attention(*qkv.unbind(dim), deterministic=True, **options)
        assert torch.equal(got, want)
        grad_out = torch.randn_like(got)
        (packed,), (right,) = (torch.autograd.grad(out, qkv, grad_out) for out in (got, want))
        assert packed.stride() == qkv.stride() and torch.equal(packed, right)


@pytest.mark.cuda
def test_memory(device):
    """The backward makes one tensor of qkv's size, and not three and a copy of them."""
    qkv = torch.randn(4, 2048, 3, 16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    size = qkv.numel() * qkv.element_size()

    def made(call):
        """Bytes that the backward allocates, one after the other."""
        allocated = lambda: torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]  # noqa: E731
        out = call()
        grad_out = torch.ones_like(out)
        torch.autograd.grad(out, qkv, grad_out, retain_graph=True)
        before = allocated()
        torch.autograd.grad(out, qkv, grad_out)
        return allocated() - before

    of_views = made(lambda: attention(*qkv.unbind(2), layout="bshd"))
    of_one = made(lambda: attention_qkv(qkv, 2, layout="bshd"))
    assert of_one <= of_views - 0.99 * size, f"{of_one} and {of_views} bytes; qkv has {size}"
