# SPDX-License-Identifier: Apache-2.0
"""Peak memory by PyTorch's allocator, beyond inputs and outputs: linear in the sequence length, and nothing of the size
of S x S but what the caller gave or asked for."""

import pytest
import torch

from fovea.torch import attention
from problem import Problem, parse

pytestmark = pytest.mark.cuda


def peaks(q, k, v, kind="allocated", **options):
    """Bytes beyond inputs, outputs and gradients that the forward and the backward had at their peak. kind: "requested"
    leaves out what PyTorch's allocator adds to fill its blocks, which is up to 1 MiB of each."""

    def held_now(which="current"):
        return torch.cuda.memory_stats()[f"{kind}_bytes.all.{which}"]

    given = (q, k, v, *(options.get(name) for name in ("bias", "bias2", "sink")))
    leaves = [x for x in given if x is not None and x.requires_grad]
    for _ in range(2):  # the first compiles, and PyTorch's allocator finds its blocks
        for x in leaves:
            x.grad = None
        torch.cuda.synchronize()
        before = held_now()
        torch.cuda.reset_peak_memory_stats()
        out, lse = attention(q, k, v, return_lse=True, **options)
        kept = held_now()
        forward = held_now("peak") - kept
        grad_out = torch.ones_like(out)
        held = held_now()
        torch.cuda.reset_peak_memory_stats()
        grads = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        sizes = sum(x.numel() * x.element_size() for x in grads)
        backward = held_now("peak") - held - sizes
        assert kept - before <= out.numel() * out.element_size() + lse.numel() * 4 + 4096
        del out, lse, grads, grad_out
    return forward, backward


def make(batch, heads, rows, dim, device, dtype=torch.bfloat16):
    return [torch.randn(batch, rows, heads, dim, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]


@pytest.mark.alone
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


@pytest.mark.alone
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


@pytest.mark.alone
def test_key_mask_is_not_expanded(device):
    mask = torch.rand(4, 1, 1, 8192, device=device) < 0.8
    q, k, v = make(4, 8, 8192, 64, device)
    forward, backward = peaks(q, k, v, mask=mask)
    assert max(forward, backward) <= 8 * q.numel(), (forward, backward)


def tensors_of(p: Problem, device):
    """(q, k, v, options) of a problem line, N(0, 1), rows of all heads side by side."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}
    normal = lambda shape, kind=p.type: torch.randn(shape, device=device, dtype=dtype[kind], requires_grad=True)  # noqa: E731
    options = {"causal": p.causal, "window": p.window, "softcap": p.softcap, "deterministic": p.det, "dropout_p": p.dropout}
    batch = () if p.packed else p.batch
    rows = [normal((*batch, n, heads, dim)) for n, heads, dim in ((p.rows_q, p.hq, p.d), (p.rows_k, p.hk, p.d), (p.rows_k, p.hk, p.dv))]
    if p.packed:
        for side, lengths in (("q", p.seqs_q), ("k", p.seqs_k)):
            options[f"cu_seqlens_{side}"] = torch.tensor([0, *lengths], device=device).cumsum(0).int()
            options[f"max_seqlen_{side}"] = max(lengths)
        options["align"] = "bottom_right"
    else:
        rows = [x.transpose(-3, -2).detach().requires_grad_() for x in rows]
    levels = p.batch if len(p.batch) == 2 else (p.batch[0], 1)
    for name in ("bias", "bias2", "mask"):
        plane = getattr(p, name)
        if plane is not None:
            shape = [n if has else 1 for n, has in zip((*levels, p.hq, p.sq, p.sk), plane.extents)]
            shape = shape if len(p.batch) == 2 else [shape[0], *shape[2:]]
            options[name] = torch.rand(shape, device=device) < 0.9 if name == "mask" else normal(shape, plane.type)
    if p.sink:
        options["sink"] = normal((p.hq,), "fp32")
    return *rows, options


# Backwards that take no more than 1.2 times dq in fp32 on Hopper, whatever the bias's gradient sums and whoever shares it,
# and in whatever order.
LINES = [
    "bwd b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=b,h,q,k need=q,k,v,bias",
    "bwd b=8 hq=16 sq=2048 sk=2048 d=64 bf16 causal bias=b,h,q,k:fp32 need=q,k,v,bias",
    "bwd b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,1,1,k bias2=1,1,q,1 need=q,k,v,bias,bias2",
    "bwd b=8 hq=16 sq=2048 sk=2048 d=64 bf16 bias=1,h,q,k need=q,k,v,bias det",
    "bwd b=512 hq=8 sq=384 sk=384 d=32 bf16 bias=1,h,q,k bias2=b,1,1,k need=q,k,v,bias,bias2",
    "bwd b=3x128 hq=8 sq=384 sk=384 d=32 bf16 bias=b1,1,h,q,k bias2=b1,b2,1,1,k need=q,k,v,bias,bias2",
    "bwd b=4096 hq=4 sq=49 sk=49 d=32 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=4 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal need=q,k,v",
    "bwd b=4 hq=32 hk=8 sq=4096 sk=4096 d=128 bf16 causal need=q,k,v det",
    "bwd b=4 hq=16 sq=4096 sk=4096 d=192 dv=128 bf16 causal softcap=30 sink need=q,k,v,sink",
    "bwd b=4 hq=16 sq=4096 sk=4096 d=128 bf16 dropout=0.1 mask=b,1,q,k need=q,k,v",
    "bwd b=4 hq=16 d=128 bf16 causal seqs_q=2048,4096,1000,9240 seqs_k=2048,4096,1000,9240 need=q,k,v",
    *(f"bwd b=1 hq=2 sq=16384 sk=16384 d={d} bf16 causal need=q,k,v det" for d in (64, 96, 192, 256, 512)),
]


@pytest.mark.parametrize("line", LINES)
def test_gradients_are_finite(line, device):
    """At these sizes. Those that measure run in one process: this one has had their kernels compiled in all of them."""
    p = parse(line)
    q, k, v, options = tensors_of(p, device)
    leaves = [x for x in (q, k, v, options.get("bias"), options.get("bias2"), options.get("sink")) if x is not None]
    out, lse = attention(q, k, v, return_lse=True, **options)
    grads = torch.autograd.grad(out, leaves, torch.randn_like(out))
    for name, x in zip(("out", "lse", *p.need), (out, lse, *grads)):
        assert x.isfinite().all(), name


@pytest.mark.alone
@pytest.mark.parametrize("line", LINES)
def test_nothing_is_expanded(line, device):
    """Neither a bias nor its gradient nor what grouped heads share; of 16 bits not into fp32; nor are dropout's decisions kept."""
    q, k, v, options = tensors_of(parse(line), device)
    forward, backward = peaks(q, k, v, "requested", **options)
    grad_q_fp32 = 4 * q.numel()
    most = 1.2 if torch.cuda.get_device_capability(device) == (9, 0) else 3  # of generic kernels: 49 rows are padded to 128
    assert forward <= 0.1 * grad_q_fp32 + (1 << 16), f"forward: {forward / grad_q_fp32:.3f} times dq in fp32"
    assert backward <= most * grad_q_fp32 + (1 << 16), f"backward: {backward / grad_q_fp32:.3f} times dq in fp32"


@pytest.mark.alone
@pytest.mark.parametrize("line", [
    "bwd b=32 hq=16 sq=512 sk=512 d=128 bf16 bias=1,h,q,k need=q,k,v,bias",
    "bwd b=8 hq=16 sq=2048 sk=2048 d=128 bf16 bias=1,1,q,k need=q,k,v,bias",
    "bwd b=16 hq=16 sq=1024 sk=1024 d=64 bf16 bias=1,h,q,k dropout=0.1 need=q,k,v,bias",
])  # fmt: skip
def test_planes_of_a_shared_bias(line, device):
    """Sums of the bias's gradient in planes, of clusters or by additions in memory: 1.5 times dq more."""
    q, k, v, options = tensors_of(parse(line), device)
    backward = peaks(q, k, v, "requested", **options)[1]
    grad_q_fp32 = 4 * q.numel()
    most = 2.7 if torch.cuda.get_device_capability(device) == (9, 0) else 3
    assert backward <= most * grad_q_fp32 + (1 << 16), f"backward: {backward / grad_q_fp32:.3f} times dq in fp32"
