# SPDX-License-Identifier: Apache-2.0
"""Dropout's decisions read back out of the kernels and compared bit for bit with fovea.dropout_mask, which computes on
the CPU.

Forward: scores are equal and v is one-hot, so an element of out is not 0 iff its key was kept. Backward: grad_v with a
one-hot grad_out; and grad_q (one-hot k), grad_k (one-hot q) and grad_bias with an out of zeros, so that delta is 0 and
ds is 0 iff the element was dropped.
"""

import itertools

import pytest
import torch

import dropout
import fovea
from fovea.torch import attention

RULES = ["fovea", "torch_mem_efficient"]
OFFSETS = [(7, 11), (0x123456789ABCDEF0, 0xFFFFFFFE), (2**63 + 5, 2**33 + 1), (3, 2**64 - 1), (9, 2**40 + 8)]
TYPES = [torch.bfloat16, torch.float16, torch.float32]
BATCH, HEADS = 2, 3


def mask_of(rng, p, seed, offset, sq, sk, device):
    return torch.from_numpy(fovea.dropout_mask(BATCH, HEADS, sq, sk, p, seed=seed, offset=offset, rng=rng)).to(device)


def one_hot(rows, columns, device, dtype, first):
    """Row first + c has its one in column c."""
    x = torch.zeros(rows, columns, device=device, dtype=dtype)
    x[range(first, min(first + columns, rows)), range(min(columns, rows - first))] = 1
    return x.expand(BATCH, HEADS, rows, columns)


def read_forward(options, sq, sk, dim, device, dtype):
    q = torch.zeros(BATCH, HEADS, sq, dim, device=device, dtype=dtype)
    k = torch.zeros(BATCH, HEADS, sk, dim, device=device, dtype=dtype)
    outs = [attention(q, k, one_hot(sk, dim, device, dtype, at), **options) for at in range(0, sk, dim)]
    return torch.cat(outs, -1)[..., :sk] != 0


def read_backward(options, sq, sk, dim, device, dtype, what):
    """The decisions by one of the gradients."""
    zeros = lambda rows: torch.zeros(BATCH, HEADS, rows, dim, device=device, dtype=dtype)  # noqa: E731
    ones = lambda rows: torch.ones(BATCH, HEADS, rows, dim, device=device, dtype=dtype)  # noqa: E731
    q, k, v, grad_out = zeros(sq), zeros(sk), ones(sk), ones(sq)
    rows, steps = {"v": (sq, sq), "q": (sk, sk), "k": (sq, sq), "bias": (0, 1)}[what]
    found = []
    for at in range(0, steps, dim):
        hot = one_hot(rows, dim, device, dtype, at) if rows else None
        if what == "v":
            grad_out = hot
        elif what == "q":
            k = hot
        elif what == "k":
            q = hot
        found.append(gradient(q, k, v, grad_out, options, what))
    if what == "bias":
        return found[0] != 0
    kept = torch.cat(found, -1) != 0  # v, k: (B, H, Sk, Sq); q: (B, H, Sq, Sk)
    return kept[..., :sk] if what == "q" else kept[..., :sq].transpose(-1, -2)


def gradient(q, k, v, grad_out, options, what):
    bias = None
    if what == "bias":
        bias = torch.zeros(BATCH, HEADS, q.shape[2], k.shape[2], device=q.device, dtype=q.dtype)
    out = torch.zeros_like(grad_out)
    lse = torch.zeros(q.shape[:3], device=q.device)
    none = [None] * 9
    none[0] = bias
    need = [what == name for name in ("q", "k", "v", "bias", "bias2", "sink")]
    signed = lambda n: n - 2**64 if n >= 2**63 else n  # noqa: E731
    grads = torch.ops.fovea.attention_backward(
        grad_out, None, out, lse, need, q, k, v, *none, None, None, signed(options["seed"]), signed(options["offset"]),
        1.0, False, -1, -1, None, 0.0, options["dropout_p"], options["rng"], 0, 0, 0, "bhsd",
        int(options.get("deterministic", False)), None,
    )  # fmt: skip
    return grads[need.index(True)]


@pytest.mark.parametrize("rng", RULES)
@pytest.mark.parametrize("seed, offset", OFFSETS)
def test_written_down_twice(rng, seed, offset, device):
    """These tests' own statement of the rules against the library's."""
    row = torch.full((BATCH,), 77, device=device)
    streams = torch.arange(BATCH * HEADS, device=device).reshape(BATCH, HEADS)
    for p in (0.1, 0.6, 0.999):
        ours = dropout.kept(rng, p, seed, offset, streams, 50, 77, row)
        assert torch.equal(ours, mask_of(rng, p, seed, offset, 50, 77, device))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sq, sk, dim", [(48, 48, 64), (130, 75, 32), (75, 130, 128), (17, 300, 256)])
@pytest.mark.parametrize("rng", RULES)
def test_forward(rng, sq, sk, dim, dtype, device):
    for seed, offset in OFFSETS:
        options = {"dropout_p": 0.3, "seed": seed, "offset": offset, "rng": rng}
        kept = read_forward(options, sq, sk, dim, device, dtype)
        assert torch.equal(kept, mask_of(rng, 0.3, seed, offset, sq, sk, device)), (seed, offset)


@pytest.mark.parametrize("what", ["v", "q", "k", "bias"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sq, sk, dim", [(48, 48, 64), (130, 75, 32), (75, 132, 128), (40, 92, 256)])
@pytest.mark.parametrize("rng", RULES)
def test_backward(rng, sq, sk, dim, dtype, what, device):
    # Numbers of the stream that four keys share, and those where they do not begin at a multiple of four.
    for deterministic, (seed, offset) in itertools.product((False, True), (OFFSETS[1], OFFSETS[-1])):
        options = {"dropout_p": 0.3, "seed": seed, "offset": offset, "rng": rng, "deterministic": deterministic}
        kept = read_backward(options, sq, sk, dim, device, dtype, what)
        assert torch.equal(kept, mask_of(rng, 0.3, seed, offset, sq, sk, device)), (deterministic, offset)


@pytest.mark.parametrize("rng", RULES)
def test_seeds_on_the_device(rng, device):
    """A tensor's value is added to the number that is given: the same decisions as of their sum."""
    q = torch.zeros(BATCH, HEADS, 40, 64, device=device, dtype=torch.bfloat16)
    v = one_hot(40, 64, device, torch.bfloat16, 0)
    seed, offset = (torch.tensor(n, device=device) for n in (2**40 + 3, 2**35))
    out = attention(q, q, v, dropout_p=0.3, seed=seed, offset=offset, rng=rng)
    kept = mask_of(rng, 0.3, 2**40 + 3, 2**35, 40, 40, device)
    assert torch.equal(out[..., :40] != 0, kept)


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.5, 1.0])
@pytest.mark.parametrize("rng", RULES)
def test_edges(rng, p, device):
    q = torch.randn(BATCH, HEADS, 33, 16, device=device, requires_grad=True)
    v = torch.randn(BATCH, HEADS, 33, 16, device=device, requires_grad=True)
    out = attention(q, q, v, dropout_p=p, seed=1, offset=2, rng=rng)
    out.sum().backward()
    if p == 1.0:
        assert not out.any() and not q.grad.any() and not v.grad.any()
    else:
        kept = mask_of(rng, p, 1, 2, 33, 33, device).double()
        weight = torch.softmax(q.detach().double() @ q.detach().double().mT / 4, -1)
        right = (weight * kept * dropout.factor(rng, p)) @ v.detach().double()
        torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("rng", RULES)
def test_each_replay_of_a_graph_draws_a_fresh_mask(rng, device):
    q = torch.zeros(BATCH, HEADS, 40, 64, device=device, dtype=torch.bfloat16)
    v = one_hot(40, 64, device, torch.bfloat16, 0)
    seed = torch.tensor(5, device=device)
    run = lambda: attention(q, q, v, dropout_p=0.3, seed=seed, offset=9, rng=rng)  # noqa: E731
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
        seed += 1
    for step in range(3):
        graph.replay()
        assert torch.equal(out[..., :40] != 0, mask_of(rng, 0.3, 5 + step, 9, 40, 40, device)), step


@pytest.mark.cuda
def test_pytorch_draws_the_same(device):
    """Rule torch_mem_efficient against PyTorch's own memory-efficient kernel, through the mask that it hands out."""
    q = torch.zeros(BATCH, 64, HEADS, 64, device=device, dtype=torch.bfloat16)
    v = one_hot(64, 64, device, torch.bfloat16, 0).transpose(1, 2).contiguous()
    torch.manual_seed(123)
    out, _, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
        q, q, v, None, None, None, None, None, 0.3, 0, True
    )
    ours = attention(*(x.transpose(1, 2) for x in (q, q, v)), dropout_p=0.3, rng="torch_mem_efficient",
                     seed=int(seed), offset=int(offset))  # fmt: skip
    assert torch.equal(ours != 0, out.transpose(1, 2) != 0)


def same_numbers(ours, theirs):
    for name, x, y in zip(("out", "grad_q", "grad_k", "grad_v"), ours, theirs):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.03, msg=lambda text, name=name: f"{name}: {text}")
        assert y.abs().amax() > 0.2, f"{name}: too small for a difference to show"


def ours_with_gradients(q, k, v, grad_out, seed, offset):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, layout="bshd", dropout_p=0.3, rng="torch_mem_efficient", seed=int(seed), offset=int(offset))
    return out, *torch.autograd.grad(out, leaves, grad_out)


@pytest.mark.cuda
def test_pytorch_draws_the_same_in_the_backward(device):
    """Rule torch_mem_efficient against PyTorch's own memory-efficient kernels by what they compute: the result and the
    gradients of q, k and v, which another mask would make different by their own size."""
    normal = lambda n: torch.randn(BATCH, n, HEADS, 64, device=device, dtype=torch.float16)  # noqa: E731
    q, grad_out, k, v = normal(55), normal(55), normal(51), normal(51)
    torch.manual_seed(321)
    out, lse, seed, offset, longest_q, longest_k = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, None, None, None, None, 0.3, 0, True
    )
    theirs = torch.ops.aten._efficient_attention_backward(
        grad_out, q, k, v, None, out, None, None, longest_q, longest_k, lse, 0.3, seed, offset, 0, False
    )
    same_numbers(ours_with_gradients(q, k, v, grad_out, seed, offset), (out, *theirs[:3]))


@pytest.mark.cuda
def test_every_packed_sequence_and_head_of_pytorch_draws_the_first_ones_mask(device):
    """PyTorch's packed operator gives its kernel 0 for the longest keys. So a sequence and head draws what a call with
    that sequence and head alone draws."""
    rows = ([40, 7, 64], [33, 50, 20])  # queries and keys
    ends = [torch.tensor([0, *itertools.accumulate(n)], device=device, dtype=torch.int32) for n in rows]
    normal = lambda n: torch.randn(1, sum(n), HEADS, 64, device=device, dtype=torch.float16)  # noqa: E731
    q, k, v = normal(rows[0]), normal(rows[1]), normal(rows[1])
    torch.manual_seed(321)
    out, _, seed, offset, *_ = torch.ops.aten._efficient_attention_forward(
        q, k, v, None, *ends, max(rows[0]), max(rows[1]), 0.3, 0, True
    )
    for b, head in itertools.product(range(len(rows[0])), range(HEADS)):
        of_q, of_k = (slice(int(end[b]), int(end[b + 1])) for end in ends)
        one = [x[:, rows_of, head : head + 1] for x, rows_of in ((q, of_q), (k, of_k), (v, of_k), (out, of_q))]
        ours, *_ = ours_with_gradients(*one, seed, offset)
        same_numbers((ours,), (one[3],))
