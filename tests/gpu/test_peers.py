# SPDX-License-Identifier: Apache-2.0
"""What other attention kernels get wrong without a word, as cases. Each line names whose fault it was, as far as known;
all are compared as those of the case table."""

import math

import pytest
import torch

from fovea.torch import attention
from problem import parse
from tensors import Tensors
from trial import Trial

LINES = {
    "Sq % 128 == 64 with a mask": "bwd b=2 hq=2 sq=192 sk=192 d=64 bf16 mask=b,1,q,k need=q,k,v",
    "Sq % 128 == 64 with a mask, causal, D=128": "bwd b=2 hq=2 sq=320 sk=448 d=128 bf16 causal mask=b,h,q,k need=q,k,v",
    "fp32 bias with bf16 q": "bwd b=2 hq=2 sq=130 sk=130 d=64 bf16 bias=1,h,q,k:fp32 need=q,k,v,bias",
    "bf16 bias with fp16 q": "bwd b=2 hq=2 sq=130 sk=130 d=64 fp16 bias=b,h,q,k:bf16 need=q,k,v,bias",
    "random-state offsets past 2^32": "bwd b=2 hq=2 sq=130 sk=130 d=64 bf16 dropout=0.2 rng=torch_mem_efficient seed=5 offset=0x100000003 need=q,k,v",
    "random-state offsets across 2^32": "bwd b=2 hq=2 sq=130 sk=130 d=64 bf16 dropout=0.2 rng=torch_mem_efficient seed=5 offset=0xffffff00 need=q,k,v",
    "seed and offset past 2^32, the rule fovea": "bwd b=2 hq=2 sq=130 sk=130 d=64 bf16 dropout=0.2 seed=0x500000007 offset=0x100000003 need=q,k,v",
    "ALiBi, of which a backward knows nothing": "bwd b=2 hq=2 sq=130 sk=130 d=64 bf16 causal alibi=b,h need=q,k,v",
    "only the bias requires a gradient": "bwd b=2 hq=2 sq=130 sk=200 d=64 bf16 bias=1,h,q,k need=bias",
    "only a key bias requires a gradient": "bwd b=3 hq=2 sq=130 sk=200 d=64 bf16 bias=b,1,1,k need=bias",
    "only the sink requires a gradient": "bwd b=2 hq=2 sq=130 sk=200 d=64 bf16 sink need=sink",
    "keys that are no multiple of 8 with a bias": "bwd b=2 hq=2 sq=100 sk=77 d=64 bf16 bias=b,h,q,k need=q,k,v,bias",
    "odd bias rows, unaligned": "bwd b=2 hq=2 sq=67 sk=67 d=64 bf16 skew=1 bias=1,h,q,k need=q,k,v,bias",
    "dead rows": "bwd b=2 hq=2 sq=90 sk=90 d=64 bf16 mask=b,h,q,k need=q,k,v values=dead_rows",
    "rows without keys, bottom-right causal": "bwd b=2 hq=2 sq=200 sk=70 d=64 bf16 causal need=q,k,v",
    "row of the type's lowest number": "bwd b=2 hq=2 sq=90 sk=90 d=64 bf16 bias=b,h,q,k need=v values=lowest",
    "a sequence without keys": "bwd b=4 hq=2 d=64 bf16 seqs_q=33,17,0,17 seqs_k=50,0,17,50 need=q,k,v",
    "one query, split keys": "bwd b=1 hq=2 sq=1 sk=3000 d=128 bf16 need=q,k,v",
    "one query, split keys, scores of 1e30": "bwd b=1 hq=2 sq=1 sk=3000 d=128 bf16 bias=1,h,q,k need=v values=huge",
    "fp32 beside a sink that takes all but 1e-13": "bwd b=2 hq=2 sq=130 sk=140 d=64 fp32 sink need=q,k,v,sink values=large_sink",
    "fp32 beside such a sink, D=128, GQA": "bwd b=2 hq=4 hk=2 sq=130 sk=140 d=128 fp32 causal sink need=q,k,v values=large_sink",
    "fp32 beside such a sink, D=600": "bwd b=1 hq=2 sq=70 sk=90 d=600 fp32 sink need=q,k,v values=large_sink",
    "fp16, one in 65536 is kept": "bwd b=2 hq=2 sq=130 sk=130 d=64 fp16 dropout=0.99999 need=q,k,v",
    "one key": "bwd b=2 hq=2 sq=300 sk=1 d=128 bf16 need=q,k,v",
    "negative scale": "bwd b=2 hq=2 sq=130 sk=130 d=64 bf16 scale=-0.5 causal need=q,k,v",
    "large scores": "bwd b=2 hq=2 sq=130 sk=130 d=128 fp16 need=q,k,v values=large_scores",
    "D=8": "bwd b=2 hq=2 sq=130 sk=130 d=8 bf16 need=q,k,v",
    "D=1": "bwd b=2 hq=2 sq=40 sk=50 d=1 bf16 need=q,k,v",
    "D=512": "bwd b=2 hq=2 sq=130 sk=140 d=512 bf16 need=q,k,v",
    "D=520, Dv=1000": "bwd b=1 hq=2 sq=70 sk=90 d=520 dv=1000 bf16 need=q,k,v",
    "MQA, 16 heads": "bwd b=1 hq=16 hk=1 sq=100 sk=130 d=64 bf16 need=q,k,v",
}


@pytest.mark.parametrize("name", LINES)
def test_fault(name, device):
    p = parse(LINES[name])
    p.case_seed = 8
    faults = Trial(p, device).test()
    assert not faults, "\n".join([p.line(), *faults])


@pytest.mark.parametrize("line", [
    "bwd b=4096 hq=1 sq=40 sk=48 d=32 bf16 bias=1,1,q,k:fp32 need=q,k,v,bias values=one_sign",
    "bwd b=2048 hq=2 sq=40 sk=48 d=64 fp16 bias=1,1,q,k:fp32 need=bias values=one_sign",
    "bwd b=4096 hq=1 sq=33 sk=48 d=64 bf16 bias=1,h,1,k:fp32 need=bias values=one_sign",
    "bwd b=64x64 hq=1 sq=40 sk=48 d=32 bf16 bias=1,1,h,q,k:fp32 need=bias det values=one_sign",
    "bwd b=4096 hq=1 sq=80 sk=136 d=32 bf16 bias=1,1,q,k:fp32 need=q,k,v,bias values=one_sign",
    "bwd b=1024 hq=4 sq=80 sk=136 d=64 fp16 bias=1,1,q,k:fp32 need=q,k,v,bias det values=one_sign",
    "bwd b=64x64 hq=1 sq=72 sk=136 d=128 bf16 bias=1,1,h,q,k:fp32 bias2=b1,b2,1,1,k need=bias,bias2 values=one_sign",
    "bwd b=4096 hq=1 sq=80 sk=136 d=64 bf16 bias=1,1,1,k:fp32 need=q,k,v,bias values=one_sign",
    "bwd b=4096 hq=1 sq=80 sk=136 d=32 bf16 bias=1,1,q,k need=q,k,v,bias values=one_sign",
    "bwd b=4096 hq=1 sq=40 sk=48 d=32 fp16 bias=1,1,q,k need=q,k,v,bias values=one_sign",
    "bwd b=4096 hq=1 sq=40 sk=48 d=32 fp32 bias=1,1,q,k need=q,k,v,bias values=one_sign",
])  # fmt: skip
def test_sum_of_4096_terms_of_one_sign(line, device):
    """A bias's gradient with a mean far from 0: in fp32 it loses nothing, in 16 bits two digits. Of a bias of 16 bits the
    sum is rounded once."""
    p = parse(line)
    p.case_seed = 8
    trial = Trial(p, device)
    trial.prepare(True)
    trial.run(True)
    right = trial.right["grad_bias"][0]
    grad = trial.tensors["grad_bias"]
    rounding = torch.finfo(grad.buffer.dtype).eps / 2 if grad.type != "fp32" else 0.0
    right = right.reshape(grad.shape)
    error = ((grad.buffer[grad.index].double() - right).abs() - rounding * right.abs()).max().item()
    assert right.abs().max().item() > 10, "the terms cancel"
    assert error <= 1e-5 * right.abs().max().item(), f"{error:.3g} of {right.abs().max().item():.3g}"


@pytest.mark.parametrize("line", [
    "bwd b=2 hq=2 sq=90 sk=90 d=64 bf16 mask=b,h,q,k dlse need=q,k,v values=dead_rows",
    "bwd b=2 hq=2 sq=130 sk=200 d=128 fp16 bias=1,h,q,k dlse need=q,k,v,bias values=dead_rows",
    "bwd b=2 hq=2 sq=130 sk=90 d=256 bf16 mask=b,1,q,k dlse need=q,k,v values=dead_rows",
    "bwd b=2 hq=2 sq=90 sk=90 d=32 fp32 mask=b,h,q,k dlse need=q,k,v det values=dead_rows",
    "bwd b=2 hq=2 sq=70 sk=90 d=520 bf16 bias=b,h,q,k dlse need=q,k,v,bias values=dead_rows",
    "bwd b=40 hq=2 sq=49 sk=49 d=32 dv=64 bf16 bias=1,h,q,k dlse need=q,k,v,bias values=dead_rows",
    "bwd b=40 hq=2 sq=49 sk=64 d=64 dv=16 fp16 bias=1,h,q,k dlse need=q,k,v values=dead_rows",
    "bwd b=2 hq=2 sq=90 sk=90 d=64 bf16 bias=b,h,q,1 dlse need=q,k,v,bias values=dead_rows",
])  # fmt: skip
def test_dead_rows_whose_gradients_are_not_finite(line, device, monkeypatch):
    """What a loss says of the logsumexp of -inf is often NaN or infinite: it reaches no gradient."""
    fill = Tensors._fill_family

    def fill_and_spoil(self):
        fill(self)
        rows = torch.arange(self.problem.sq, device=self.device)
        spoilt = torch.tensor([math.nan, math.inf, -math.inf], device=self.device)[rows // 3 % 3]
        self.write_padded("grad_lse", torch.where(rows % 3 == 0, spoilt, self.padded("grad_lse")))

    monkeypatch.setattr(Tensors, "_fill_family", fill_and_spoil)
    p = parse(line)
    p.case_seed = 8
    trial = Trial(p, device)
    trial.prepare(True)
    trial.run(True)
    faults = trial.faults(True)
    assert not faults, "\n".join([p.line(), *faults])


def normal(*shape, device, dtype=torch.bfloat16, grad=False):
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=grad)


def right(q, k, v, bias=None):
    """(out, gradients) in fp64 by autograd, for a gradient of ones."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    b = None if bias is None else bias.detach().double().requires_grad_()
    s = leaves[0] @ leaves[1].mT / q.shape[-1] ** 0.5 + (0 if b is None else b)
    out = torch.softmax(s, -1) @ leaves[2]
    out.sum().backward()
    return out, [x.grad for x in leaves], None if b is None else b.grad


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_of_1e9(dim, dtype, device):
    """A row's largest score takes all of its weight, however large the scores are."""
    q, k, v = (normal(2, 2, 90, dim, device=device, dtype=dtype) for _ in range(3))
    out = attention(q, k, v, scale=1e9)
    largest = (q.double() @ k.double().mT).argmax(-1)
    right = v.gather(2, largest.unsqueeze(-1).expand(-1, -1, -1, dim))
    torch.testing.assert_close(out, right, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("length", [70, 197])
def test_bias_with_stride_0(length, device):
    """An expanded bias is read where it lies, and its gradient is that of every element as given."""
    q, k, v = (normal(3, 2, length, 64, device=device, grad=True) for _ in range(3))
    bias = normal(length, length, device=device).expand(3, 2, length, length).detach().requires_grad_()
    assert bias.stride()[:2] == (0, 0)
    out = attention(q, k, v, bias=bias)
    out.sum().backward()
    truth, (grad_q, _, _), grad_bias = right(q, k, v, bias)
    torch.testing.assert_close(out.double(), truth, rtol=0.02, atol=0.02)
    torch.testing.assert_close(q.grad.double(), grad_q, rtol=0.02, atol=0.02)
    torch.testing.assert_close(bias.grad.double(), grad_bias, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("length", [61, 197])  # packed; moved within the backward
def test_bias_sliced_from_a_padded_one(length, device):
    """A row stride that is no multiple of 8, planes with gaps, and a base that is not aligned."""
    padded = normal(2, 2, length + 9, length + 38, device=device)
    bias = padded[..., :length, 3 : length + 3].detach().requires_grad_()
    q, k, v = (normal(2, 2, length, 64, device=device, grad=True) for _ in range(3))
    out = attention(q, k, v, bias=bias)
    out.sum().backward()
    truth, _, grad_bias = right(q, k, v, bias)
    torch.testing.assert_close(out.double(), truth, rtol=0.02, atol=0.02)
    torch.testing.assert_close(bias.grad.double(), grad_bias, rtol=0.02, atol=0.02)


def test_k_and_v_expanded_over_the_batch(device):
    q = normal(4, 2, 50, 64, device=device, grad=True)
    k, v = (normal(1, 2, 80, 64, device=device) for _ in range(2))
    out = attention(q, k.expand(4, -1, -1, -1), v.expand(4, -1, -1, -1))
    torch.testing.assert_close(out.double(), right(q, k, v)[0], rtol=0.02, atol=0.02)
