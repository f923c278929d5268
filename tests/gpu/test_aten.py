# SPDX-License-Identifier: Apache-2.0
"""fovea.torch.aten beside PyTorch's own kernels, argument for argument: sizes, strides and types of every result, values within
twice PyTorch's own error, seeds and offsets, dropout bit for bit, a backward of one after a forward of the other, and what calls
these operators: nested tensors, varlen_attn, enable(operators=True), CUDA graphs."""

import math
import warnings

import pytest
import torch

from fovea.torch import aten, disable, enable, reset_stats, stats
from fovea.torch.aten import _compute, _owners

pytestmark = pytest.mark.cuda
PYTORCH = torch.ops.aten
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def off():
    reset_stats()
    yield
    disable()
    reset_stats()
    if hasattr(torch.nn.attention, "restore_flash_attention_impl") and torch.nn.attention.current_flash_attention_impl():
        torch.nn.attention.restore_flash_attention_impl()
    assert aten.owners() == {}


@pytest.fixture
def computed(monkeypatch):
    """How often fovea's library computes."""
    calls = []
    compute = _compute._compute
    monkeypatch.setattr(_compute, "_compute", lambda *args: (calls.append(args[0]), compute(*args))[1])
    return calls


def view(shape, kind, device, dtype):
    """(B, H, S, D) as programs have it."""
    batch, heads, rows, dim = shape
    if kind == "contiguous":
        return torch.randn(shape, device=device, dtype=dtype)
    if kind == "heads side by side":
        return torch.randn(batch, rows, heads, dim, device=device, dtype=dtype).transpose(1, 2)
    return torch.randn(batch, rows, 3, heads, dim, device=device, dtype=dtype)[:, :, 1].transpose(1, 2)  # of packed qkv


VIEWS = ["contiguous", "heads side by side", "of packed qkv"]


def swap(*tensors):
    return [x.transpose(1, 2) for x in tensors]


def formula(q, k, v, grad_out, bias=None, causal=False, bottom_right=False, window=0, scale=None, keep=None, p=0.0):
    """out, logsumexp and gradients in float64, (B, H, S, D)."""
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, *(() if bias is None else (bias,)))]
    q, k, v = leaves[:3]
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if bias is not None:
        s = s + leaves[3]
    rows, keys = s.shape[-2:]
    i = torch.arange(rows, device=q.device)[:, None] + (keys - rows if bottom_right else 0)
    j = torch.arange(keys, device=q.device)
    if causal:
        s = s.masked_fill(j > i, -math.inf)
    if window:
        s = s.masked_fill(j <= i - window, -math.inf)
    weights = torch.softmax(s, -1).nan_to_num(0)
    if keep is not None:
        weights = weights * keep / (1 - p)
    out = weights @ v
    return [out.detach(), s.detach().logsumexp(-1), *torch.autograd.grad(out, leaves, grad_out.double())]


def layout(x):
    if not isinstance(x, torch.Tensor):
        return x
    return tuple(x.shape), tuple(s for s, n in zip(x.stride(), x.shape) if n > 1) if x.numel() else (), x.dtype


def same_layouts(ours, theirs, where="", names=None, without=()):
    for at, (x, y) in enumerate(zip(ours, theirs)):
        if at not in without:
            assert layout(x) == layout(y), f"{where} result {at}: ours {layout(x)}, PyTorch's {layout(y)}"
    assert len(ours) == len(theirs)


def as_good(name, ours, theirs, right):
    """Within twice PyTorch's error."""
    ours, theirs, finite = ours.double(), theirs.double(), right.isfinite()
    error, their_error = ((x - right)[finite].abs().max().item() for x in (ours, theirs))
    size = right[finite].abs().max().item()
    unit = 2**-20 if ours.dtype == torch.float32 else 2**-8
    assert error <= 2 * their_error + 2 * unit * size + 1e-6, f"{name}: error {error:.3g}, PyTorch's {their_error:.3g}, size {size:.3g}"


def all_as_good(ours, theirs, right, which="ours"):
    for name, *three in zip(("out", "logsumexp", "grad_q", "grad_k", "grad_v", "grad_bias"), ours, theirs, right):
        as_good(f"{which}: {name}", *three)


def padded_bias(batch, heads, sq, sk, device, dtype):
    return torch.randn(batch, heads, sq, (sk + 15) // 16 * 16, device=device, dtype=dtype)[..., :sk]


# ---- dense ----


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("sq, sk, causal, with_bias", [(128, 128, False, True), (75, 130, True, False), (130, 77, True, True)])
def test_scaled_efficient(sq, sk, causal, with_bias, kind, dtype, device):
    q, k, v = (view((2, 3, rows, 64), kind, device, dtype) for rows in (sq, sk, sk))
    bias = padded_bias(2, 3, sq, sk, device, dtype) if with_bias else None
    grad_out = view((2, 3, sq, 64), kind, device, dtype)
    ours, theirs = (op(q, k, v, bias, True, 0.0, causal) for op in (aten._scaled_dot_product_efficient_attention,
                                                                    PYTORCH._scaled_dot_product_efficient_attention))  # fmt: skip
    same_layouts(ours, theirs, "forward")
    masks = [[True, True, True, with_bias], [True, True, True, False], [False, True, False, with_bias]]
    right = formula(q, k, v, grad_out, bias, causal)
    for mask in masks:
        grads = {}
        for name, op, results in (("ours", aten, ours), ("theirs", PYTORCH, theirs), ("ours after theirs", aten, theirs),
                                  ("theirs after ours", PYTORCH, ours)):  # fmt: skip
            grads[name] = op._scaled_dot_product_efficient_attention_backward(
                grad_out, q, k, v, bias, results[0], results[1], results[2], results[3], 0.0, mask, causal
            )
            same_layouts(grads[name], grads["ours"], f"{name}, {mask}")
        # PyTorch does not write those parts of the bias's gradient that a causal mask hides whole blocks of.
        hidden = torch.ones(sq, sk, dtype=torch.bool, device=device).triu(1) if causal else torch.zeros((), dtype=torch.bool, device=device)
        for name in grads:
            if grads[name][3] is not None:
                if name.startswith("ours"):
                    assert not grads[name][3].masked_select(hidden).any(), name
                grads[name] = (*grads[name][:3], grads[name][3].masked_fill(hidden, 0))
        want = [theirs[0], theirs[1][:, :, :sq], *(x for x in grads["theirs"] if x is not None)]
        for name in grads:
            first = ours if name.startswith("ours") else theirs
            all_as_good([first[0], first[1][:, :, :sq], *(x for x in grads[name] if x is not None)], want, right, name)


@pytest.mark.parametrize("kind, window", [(0, 0), (1, 0), (2, 0), (1, 17), (2, 17)])
@pytest.mark.parametrize("sq, sk", [(96, 96), (64, 130)])
def test_efficient(sq, sk, kind, window, device):
    """(B, S, H, D): mask types and windows; shared storage."""
    q, k, v, grad_out = swap(*(view((2, 3, rows, 32), "heads side by side", device, torch.bfloat16) for rows in (sq, sk, sk, sq)))
    forward = (q, k, v, None, None, None, None, None, 0.0, kind, True)
    ours, theirs = (op._efficient_attention_forward(*forward, window_size=window or None, scale=0.2) for op in (aten, PYTORCH))
    same_layouts(ours, theirs, "forward")
    right = formula(*swap(q, k, v, grad_out), causal=kind > 0, bottom_right=kind == 2, window=window, scale=0.2)
    grads = {}
    for name, op in (("ours", aten), ("theirs", PYTORCH)):
        grads[name] = op._efficient_attention_backward(
            grad_out, q, k, v, None, theirs[0], None, None, theirs[4], theirs[5], theirs[1], 0.0, theirs[2], theirs[3], kind, False,
            scale=0.2, window_size=window or None,
        )  # fmt: skip
    same_layouts(grads["ours"], grads["theirs"], "backward")
    flat = lambda results, grads: [results[0].transpose(1, 2), results[1][:, :, :sq], *swap(*grads[:3])]  # noqa: E731
    all_as_good(flat(ours, grads["ours"]), flat(theirs, grads["theirs"]), right)
    if sq == sk:
        shared = [
            op._efficient_attention_backward(
                grad_out, q, k, v, None, theirs[0], None, None, sq, sk, theirs[1], 0.0, theirs[2], theirs[3], kind, False, scale=0.2,
                window_size=window or None, num_splits_key=1, shared_storage_dqdkdv=True)
            for op in (aten, PYTORCH)
        ]  # fmt: skip
        same_layouts(*shared, "shared storage")
        assert all(torch.equal(x, y) for x, y in zip(shared[0][:3], grads["ours"]))


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("sq, sk, causal", [(128, 128, True), (75, 130, False), (64, 200, True)])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_scaled_flash(dtype, sq, sk, causal, kind, device):
    q, k, v, grad_out = (view((2, 3, rows, 64), kind, device, dtype) for rows in (sq, sk, sk, sq))
    ours, theirs = (op._scaled_dot_product_flash_attention(q, k, v, 0.0, causal) for op in (aten, PYTORCH))
    same_layouts(ours, theirs, "forward")
    right = formula(q, k, v, grad_out, causal=causal, bottom_right=True)
    grads = {}
    for name, op, results in (("theirs", PYTORCH, theirs), ("ours after theirs", aten, theirs), ("theirs after ours", PYTORCH, ours)):
        grads[name] = op._scaled_dot_product_flash_attention_backward(
            grad_out, q, k, v, *results[:2], None, None, sq, sk, 0.0, causal, *results[6:8]
        )
        same_layouts(grads[name], grads["theirs"], name)
        first = theirs if name.startswith("theirs") else ours
        all_as_good([*first[:2], *grads[name]], [*theirs[:2], *grads["theirs"]], right)


@pytest.mark.parametrize("left, right_, causal", [(None, None, False), (None, None, True), (-1, 0, True), (20, 0, False), (20, 5, False)])
def test_flash(left, right_, causal, device):
    """(B, S, H, D): windows, grouped heads."""
    q, k, v, grad_out = swap(*(
        view((2, heads, rows, 64), "heads side by side", device, torch.bfloat16) for heads, rows in ((4, 100), (2, 130), (2, 130), (4, 100))
    ))  # fmt: skip
    sizes = {"window_size_left": left, "window_size_right": right_, "scale": 0.2}
    ours, theirs = (op._flash_attention_forward(q, k, v, None, None, 100, 130, 0.0, causal, False, **sizes) for op in (aten, PYTORCH))
    same_layouts(ours, theirs, "forward")
    grads = [
        op._flash_attention_backward(grad_out, q, k, v, *theirs[:2], None, None, 100, 130, 0.0, causal, *theirs[2:4], **sizes)
        for op in (aten, PYTORCH)
    ]
    same_layouts(*grads, "backward")
    want = [theirs[0].float(), theirs[1], *(x.float() for x in grads[1])]
    for name, x, y in zip(("out", "logsumexp", "q", "k", "v"), [ours[0].float(), ours[1], *(x.float() for x in grads[0])], want):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2, msg=lambda text, name=name: f"{name}: {text}")


def cudnn(call):
    """Its kernels do not exist for everything."""
    try:
        return call()
    except RuntimeError as error:
        pytest.skip(f"PyTorch {torch.__version__}'s cuDNN operator: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("kind", VIEWS[:2])
@pytest.mark.parametrize("causal, with_bias", [(False, False), (True, False), (False, True)])
def test_scaled_cudnn(causal, with_bias, kind, device):
    q, k, v, grad_out = (view((2, 3, 128, 64), kind, device, torch.bfloat16) for _ in range(4))
    bias = torch.randn(2, 3, 128, 128, device=device, dtype=torch.bfloat16) if with_bias else None
    theirs = cudnn(lambda: PYTORCH._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal))
    ours = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal)
    same_layouts(ours, theirs, "forward", without=(1,))
    assert ours[1].numel() == theirs[1].numel(), f"logsumexp: ours {layout(ours[1])}, PyTorch's {layout(theirs[1])}"
    given = lambda results: (grad_out, q, k, v, *results[:2], *results[6:8], bias, None, None, 128, 128, 0.0, causal)  # noqa: E731
    want = cudnn(lambda: PYTORCH._scaled_dot_product_cudnn_attention_backward(*given(theirs)))
    grads = aten._scaled_dot_product_cudnn_attention_backward(*given(theirs))
    same_layouts(grads, want, "backward")
    right = formula(q, k, v, grad_out, bias, causal)
    lse = lambda results: results[1].reshape(2, 3, 128)  # noqa: E731
    all_as_good([ours[0], lse(ours), *grads], [theirs[0], lse(theirs), *want], right)
    assert layout(ours[1]) == layout(theirs[1]), f"logsumexp: ours {layout(ours[1])}, PyTorch's {layout(theirs[1])}"


# ---- packed ----

LENGTHS_Q, LENGTHS_K = [50, 130, 7], [50, 200, 9]


def packed(device, heads=3, heads_k=3, equal=False):
    lengths = (LENGTHS_Q, LENGTHS_Q if equal else LENGTHS_K)
    ends = [torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32, device=device) for x in lengths]
    new = lambda total, h: torch.randn(total, h, 64, device=device, dtype=torch.bfloat16)  # noqa: E731
    q, grad_out = (new(sum(lengths[0]), heads) for _ in range(2))
    k, v = (new(sum(lengths[1]), heads_k) for _ in range(2))
    return (q, k, v, grad_out), ends, [max(x) for x in lengths]


def by_sequence(out, lse_of, grads, tensors, ends, theirs=None, **options):
    """Each sequence beside the formula: (name, ours, right)"""
    for b in range(len(ends[0]) - 1):
        rows, keys = (slice(int(e[b]), int(e[b + 1])) for e in ends)
        one = lambda x, at: x[at].transpose(0, 1)[None]  # noqa: E731
        q, k, v, grad_out = (one(x, at) for x, at in zip(tensors, (rows, keys, keys, rows)))
        right = formula(q, k, v, grad_out, **options)
        got = [one(out, rows), lse_of(b, rows)[None], *(one(g, at) for g, at in zip(grads, (rows, keys, keys)))]
        yield b, got, right


def packed_as_good(ours, theirs, tensors, ends, **options):
    """`ours` and `theirs`: out, lse of a sequence, gradients."""
    pairs = zip(by_sequence(*ours, tensors, ends, **options), by_sequence(*theirs, tensors, ends, **options))
    for (_, got, right), (_, want, _) in pairs:
        all_as_good(got, want, right)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_efficient_packed(kind, device):
    tensors, ends, longest = packed(device)
    q, k, v, grad_out = (x[None] for x in tensors)
    ours, theirs = (op._efficient_attention_forward(q, k, v, None, *ends, *longest, 0.0, kind, True) for op in (aten, PYTORCH))
    same_layouts(ours, theirs, "forward")
    grads = [
        op._efficient_attention_backward(grad_out, q, k, v, None, theirs[0], *ends, *longest, theirs[1], 0.0, *theirs[2:4], kind, False)
        for op in (aten, PYTORCH)
    ]
    same_layouts(*grads, "backward")
    parts = [(x[0][0], lambda b, rows, x=x: x[1][b, :, : rows.stop - rows.start], [g[0] for g in y[:3]])
             for x, y in zip((ours, theirs), grads)]  # fmt: skip
    packed_as_good(*parts, tensors, ends, causal=kind > 0, bottom_right=kind == 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_k", [4, 2])
def test_flash_packed(heads_k, causal, device):
    tensors, ends, longest = packed(device, 4, heads_k)
    q, k, v, grad_out = tensors
    ours, theirs = (op._flash_attention_forward(q, k, v, *ends, *longest, 0.0, causal, False) for op in (aten, PYTORCH))
    same_layouts(ours, theirs, "forward")
    grads = [
        op._flash_attention_backward(grad_out, q, k, v, *theirs[:2], *ends, *longest, 0.0, causal, *theirs[2:4]) for op in (aten, PYTORCH)
    ]
    same_layouts(*grads, "backward")
    parts = [(x[0], lambda b, rows, x=x: x[1][:, rows], y) for x, y in zip((ours, theirs), grads)]
    packed_as_good(*parts, tensors, ends, causal=causal, bottom_right=True)


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_packed(causal, device):
    tensors, ends, longest = packed(device, equal=True)
    q, k, v, grad_out = tensors
    theirs = cudnn(lambda: PYTORCH._cudnn_attention_forward(q, k, v, None, *ends, *longest, True, 0.0, causal))
    ours = aten._cudnn_attention_forward(q, k, v, None, *ends, *longest, True, 0.0, causal)
    same_layouts(ours, theirs, "forward")
    given = lambda results: (grad_out, q, k, v, *results[:2], *results[6:8], None, *ends, *longest, 0.0, causal)  # noqa: E731
    want = cudnn(lambda: PYTORCH._cudnn_attention_backward(*given(theirs)))
    grads = aten._cudnn_attention_backward(*given(theirs))
    same_layouts(grads, want, "backward")
    parts = [(x[0], lambda b, rows, x=x: x[1].squeeze(-1)[rows].transpose(0, 1), y) for x, y in zip((ours, theirs), (grads, want))]
    packed_as_good(*parts, tensors, ends, causal=causal)


# ---- dropout of the memory-efficient kernel ----


def drawn(op, *args, seed=5):
    """Results, and what is left of the generator."""
    torch.cuda.manual_seed(seed)
    torch.rand(3, device="cuda")  # so that the offset is not 0
    results = op(*args)
    return results, torch.cuda.default_generators[torch.cuda.current_device()].get_offset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sq, sk", [(64, 64), (130, 72), (37, 56)])
@pytest.mark.parametrize("p", [0.1, 0.7])
def test_dropout(p, sq, sk, dtype, device):
    """Seed, offset, where the generator goes on, and each decision, forward and backward."""
    q = torch.zeros(2, 3, sq, 64, device=device, dtype=dtype)
    k = torch.zeros(2, 3, sk, 64, device=device, dtype=dtype)
    v = torch.eye(sk, (sk + 7) // 8 * 8, device=device, dtype=dtype).expand(2, 3, -1, -1).contiguous()
    name = "_scaled_dot_product_efficient_attention"
    (ours, left), (theirs, their_left) = (drawn(getattr(op, name), q, k, v, None, True, p) for op in (aten, PYTORCH))
    assert [int(x) for x in ours[2:4]] == [int(x) for x in theirs[2:4]] and left == their_left
    assert ours[2].device == theirs[2].device
    keep = theirs[0][..., :sk] != 0
    assert 0 < keep.double().mean() < 1 and torch.equal(ours[0][..., :sk] != 0, keep)
    grad_out = torch.zeros(2, 3, sq, v.shape[-1], device=device, dtype=dtype)
    columns = min(sq, v.shape[-1])
    grad_out[:, :, range(columns), range(columns)] = 1
    given = (grad_out, q, k, v, None, *theirs, p, [True, True, True, False])
    grads = [getattr(op, f"{name}_backward")(*given) for op in (aten, PYTORCH)]
    assert torch.equal(grads[0][2] != 0, grads[1][2] != 0)
    assert torch.equal((grads[0][2] != 0)[..., :columns].transpose(-1, -2), keep[:, :, :columns])


@pytest.mark.parametrize("with_bias", [False, True])
def test_dropout_numbers(with_bias, device):
    """On random numbers: both backwards after PyTorch's forward, beside the formula with the mask."""
    p, sq, sk = 0.3, 96, 80
    q, k, v, grad_out = (view((2, 3, rows, 64), "contiguous", device, torch.bfloat16) for rows in (sq, sk, sk, sq))
    bias = padded_bias(2, 3, sq, sk, device, torch.bfloat16) if with_bias else None
    name = "_scaled_dot_product_efficient_attention"
    (ours, _), (theirs, _) = (drawn(getattr(op, name), q, k, v, bias, True, p, True) for op in (aten, PYTORCH))
    import fovea

    keep = torch.from_numpy(fovea.dropout_mask(2, 3, sq, sk, p, seed=int(theirs[2]), offset=int(theirs[3]), rng="torch_mem_efficient"))
    right = formula(q, k, v, grad_out, bias, causal=True, keep=keep.to(device), p=p)
    given = (grad_out, q, k, v, bias, *theirs, p, [True, True, True, with_bias], True)
    grads = [[x for x in getattr(op, f"{name}_backward")(*given) if x is not None] for op in (aten, PYTORCH)]
    if with_bias:
        hidden = torch.ones(sq, sk, dtype=torch.bool, device=device).triu(1)
        assert not grads[0][3].masked_select(hidden).any()
        grads[1][3] = grads[1][3].masked_fill(hidden, 0)
    all_as_good(*([x[0], x[1][:, :, :sq], *y] for x, y in zip((ours, theirs), grads)), right)
    on_device = tuple(x.to(device) for x in theirs[2:4])
    again = getattr(aten, f"{name}_backward")(grad_out, q, k, v, bias, *theirs[:2], *on_device, *given[9:])
    assert all(torch.equal(x, y) for x, y in zip(again[:3], grads[0]))


@pytest.mark.parametrize("sequences, heads", [(1, 1), (3, 2)])
def test_dropout_packed(sequences, heads, device, record_property):
    """The forward's decisions are PyTorch's; the gradient is that of the forward. PyTorch's backward draws other numbers than its
    forward where there are several sequences or heads: that is printed, and not asked for."""
    p = 0.4
    lengths = [40, 64, 9][:sequences]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    total = sum(lengths)
    zeros = torch.zeros(1, total, heads, 64, device=device, dtype=torch.bfloat16)
    hot = torch.cat([torch.eye(64, device=device, dtype=torch.bfloat16)[:n] for n in lengths])[None, :, None].expand(1, total, heads, 64).contiguous()
    (ours, left), (theirs, their_left) = (
        drawn(op._efficient_attention_forward, zeros, zeros, hot, None, ends, ends, max(lengths), max(lengths), p, 0, True)
        for op in (aten, PYTORCH)
    )
    assert [int(x) for x in ours[2:4]] == [int(x) for x in theirs[2:4]] and left == their_left
    same_layouts(ours, theirs, "forward")
    kept = [x[0] != 0 for x in (ours, theirs)]
    assert torch.equal(*kept), f"{(kept[0] != kept[1]).sum().item()} of {kept[0].numel()} decisions differ"
    grads = [
        op._efficient_attention_backward(hot, zeros, zeros, hot, None, theirs[0], ends, ends, *theirs[4:6], theirs[1], p, *theirs[2:4], 0, False)
        for op in (aten, PYTORCH)
    ]
    for b, n in enumerate(lengths):
        at = slice(int(ends[b]), int(ends[b]) + n)
        forward = theirs[0][0, at, :, :n].permute(1, 0, 2) != 0  # (H, i, j)
        of = [(grad[2][0, at, :, :n].permute(1, 2, 0) != 0) for grad in grads]
        assert torch.equal(of[0], forward)
        same = torch.equal(of[1], forward)
        record_property(f"PyTorch's backward draws its forward's mask, sequence {b}", same)
        print(f"PyTorch's backward draws its forward's mask, {sequences} sequences, {heads} heads, sequence {b}: {same}")
        if sequences == heads == 1:
            assert same


# ---- in PyTorch's place ----


def step(q, k, v, p=0.0, op="_scaled_dot_product_flash_attention"):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    more = () if "flash" in op else (None, True)
    torch.cuda.manual_seed(3)
    out = getattr(PYTORCH, op)(*leaves, *more, p)[0]
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def test_enabled_operators(device, computed):
    q, k, v = (view((2, 3, 128, 64), "contiguous", device, torch.bfloat16) for _ in range(3))
    names = [f"_scaled_dot_product_{family}_attention" for family in ("efficient", "flash")]
    want = {name: step(q, k, v, op=name) for name in names}
    enable("cuda", prefer=None, operators=True, strict=True)
    for name in names:
        for x, y in zip(step(q, k, v, op=name), want[name]):
            torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2)
    assert stats()["operators"] == {name + end: 1 for name in names for end in ("", "_backward")} and len(computed) == 4


def test_dropout_of_flash_goes_back(device, computed):
    """Both directions, bit for bit PyTorch's; said once."""
    q, k, v = (view((2, 3, 128, 64), "contiguous", device, torch.bfloat16) for _ in range(3))
    want = step(q, k, v, 0.2)
    enable("cuda", prefer=None, operators=True)
    with pytest.warns(UserWarning, match="_scaled_dot_product_flash_attention is handed back to PyTorch: dropout_p"):
        got = step(q, k, v, 0.2)
    assert torch.equal(got[0], want[0]) and not computed
    for x, y in zip(got, want):
        torch.testing.assert_close(x.float(), y.float(), rtol=1e-2, atol=1e-2)
    assert sum(stats()["handed_back"].values()) == 2
    enable("cuda", prefer=None, operators=True, strict=True)
    with pytest.raises(NotImplementedError, match="_scaled_dot_product_flash_attention: dropout_p"):
        step(q, k, v, 0.2)


def test_what_pytorch_refuses_is_its_error(device):
    q = torch.randn(2, 3, 16, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError) as theirs:
        PYTORCH._efficient_attention_forward(q[0], q, q, None, None, None, None, None, 0.0, 0)
    enable("cuda", prefer=None, operators=True)
    with warnings.catch_warnings(), pytest.raises(RuntimeError) as ours:
        warnings.simplefilter("ignore")
        PYTORCH._efficient_attention_forward(q[0], q, q, None, None, None, None, None, 0.0, 0)
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_the_faster_one(device, computed, monkeypatch):
    """prefer="fastest": dense calls stay with PyTorch where its kernel is faster, packed ones do not."""
    monkeypatch.setattr("fovea.torch._fastest.slower", lambda *args: True)
    q, k, v = (view((2, 3, 128, 64), "contiguous", device, torch.bfloat16) for _ in range(3))
    want = step(q, k, v)
    monkeypatch.setattr("fovea.torch._enable_kernel._slower", {})
    enable("cuda", operators=True)
    assert all(torch.equal(x, y) for x, y in zip(step(q, k, v)[:1], want)) and not computed
    assert list(stats()["handed_back"].values()) == [1, 1]


def test_nested_tensors(device, computed):
    """Through PyTorch's own way, without fovea in the place of scaled_dot_product_attention: prefer and devices are about the operators."""
    parts = [torch.randn(n, 4, 64, device=device, dtype=torch.bfloat16) for n in (50, 130, 7)]
    leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    x = leaf.transpose(1, 2)

    def run():
        with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.FLASH_ATTENTION, torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION]):
            out = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).transpose(1, 2).values()
        return [out.detach(), torch.autograd.grad(out, leaf, torch.ones_like(out))[0].values()]

    want = run()
    assert not computed
    owner = _owners.Owner("a test", lambda *_: "", lambda name: None, lambda *why: pytest.fail(str(why)))
    _owners.take(owner, [name for name in aten.__all__ if name.startswith("_")], ["cuda"])
    try:
        got = run()
    finally:
        _owners.release("a test")
    for a, b in zip(got, want):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
    assert len(computed) == 2


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (30, 0)])
def test_varlen_attn(window, device, computed):
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    tensors, ends, longest = packed(device, equal=True)
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    import inspect

    if "window_size" in inspect.signature(varlen.varlen_attn).parameters:
        options = {"window_size": window}
    elif window == (30, 0):
        pytest.skip(f"PyTorch {torch.__version__}: varlen_attn has no windows")
    else:
        options = {"is_causal": window == (-1, 0)}

    def run():
        out = varlen.varlen_attn(q, k, v, *ends, *longest, **options)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]

    want = run()
    assert not computed
    if hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        torch.nn.attention.activate_flash_attention_impl("fovea")
        assert aten.flash_impl().startswith("registered")
    else:
        enable("cuda", prefer=None, operators=True)
    got = run()
    print(f"varlen_attn, window {window}: {len(computed)} calls of fovea, owners {sorted(set(aten.owners().values()))}")
    for a, b in zip(got, want):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
    assert len(computed) == 2


def test_a_graph_with_dropout(device):
    """The forward is PyTorch's while a graph is captured, where seeds lie on the device; fovea's backward draws the same mask."""
    p, n = 0.3, 64
    q = torch.zeros(1, 2, n, 64, device=device, dtype=torch.bfloat16)
    hot = torch.eye(n, 64, device=device, dtype=torch.bfloat16).expand(1, 2, n, 64).contiguous()
    enable("cuda", prefer=None, operators=True)

    def run():
        results = PYTORCH._scaled_dot_product_efficient_attention(q, q, hot, None, True, p)
        grads = PYTORCH._scaled_dot_product_efficient_attention_backward(hot, q, q, hot, None, *results, p, [True, True, True, False])
        return results[0] != 0, grads[2] != 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward, backward = run()
    masks = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(backward.transpose(-1, -2), forward)
        masks.append(forward.clone())
    assert not torch.equal(*masks)
    assert stats()["operators"]["_scaled_dot_product_efficient_attention_backward"] == 2


def test_compile(device, computed):
    """A graph that has PyTorch's operators: what runs them is looked up at each run, and strides are as traced."""
    q, k, v = (view((2, 3, 128, 64), "contiguous", device, torch.bfloat16).requires_grad_() for _ in range(3))
    call = torch.compile(lambda q, k, v: PYTORCH._scaled_dot_product_efficient_attention(q, k, v, None, True)[0].transpose(1, 2).sin())

    def run():
        out = call(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))]

    want = run()
    enable("cuda", prefer=None, operators=True)
    got = run()
    for a, b in zip(got, want):
        torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2)
    assert len(computed) == 2
