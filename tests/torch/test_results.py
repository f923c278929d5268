# SPDX-License-Identifier: Apache-2.0
"""fovea.attention and its backward with tensors of PyTorch: results of float32 for inputs of 16 bits, and parts of the keys that add
up. tests/python has every feature; here are PyTorch's tensors on each device."""

import fovea
import pytest
import torch
from fovea.torch import attention

PARTS = [slice(0, 16), slice(16, 80), slice(80, 96)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]


def inputs(dtype, device):
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 2, 96, 16, dtype=torch.float64).to(dtype) for _ in range(4))
    return [x.to(device) for x in (q, k, v, grad)]


def error(found, exact):
    assert found.isfinite().all()
    return (found.double() - exact).abs().max().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_add_up(dtype, device):
    q, k, v, grad = inputs(dtype, device)
    exact = [x.double().cpu().requires_grad_() for x in (q, k, v)]
    out_exact = attention(*exact)
    grads_exact = torch.autograd.grad(out_exact, exact, grad.double().cpu())

    out = torch.zeros(q.shape, device=device)
    lse = torch.full(q.shape[:3], -torch.inf, device=device)
    for part in PARTS:
        fovea.attention(q, k[:, :, part], v[:, :, part], layout="bhsd", out=out, lse=lse, accumulate=True)
    whole = [torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)]
    fovea.attention(q, k, v, layout="bhsd", out=whole[0], lse=whole[1])
    rounded = error(attention(q, k, v).cpu(), out_exact.detach())  # out in 16 bits
    assert error(whole[0].cpu(), out_exact.detach()) < rounded
    assert error(out.cpu(), out_exact.detach()) < rounded
    torch.testing.assert_close(lse, whole[1], atol=1e-5, rtol=1e-5)

    sums = {name: torch.zeros(x.shape, device=device) for name, x in zip("qkv", (q, k, v))}
    for part in PARTS:
        into = {"q": sums["q"], "k": sums["k"][:, :, part], "v": sums["v"][:, :, part]}
        found = fovea.attention_backward(grad, q, k[:, :, part], v[:, :, part], out.to(dtype), lse, layout="bhsd",
                                         grads_out=into, accumulate="q")  # fmt: skip
        assert found.q is sums["q"]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    of_autograd = torch.autograd.grad(attention(*leaves), leaves, grad)
    for name, of_call, grad_exact in zip("qkv", of_autograd, grads_exact):
        assert sums[name].dtype == torch.float32
        # Sums are at most as far off as gradients that are rounded to 16 bits, but for the rounding of other terms.
        assert error(sums[name].cpu(), grad_exact) <= 1.5 * error(of_call.cpu(), grad_exact), name


def test_a_result_of_16_bits_does_not_accumulate():
    q, k, v, _ = inputs(torch.bfloat16, "cpu")
    out, lse = torch.zeros_like(q), torch.full(q.shape[:3], -torch.inf)
    with pytest.raises((TypeError, ValueError), match="out"):
        fovea.attention(q, k, v, layout="bhsd", out=out, lse=lse, accumulate=True)
    assert not out.any()
