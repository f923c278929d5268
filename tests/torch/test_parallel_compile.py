# SPDX-License-Identifier: Apache-2.0
"""context_parallel in compiled functions, without a graph break: the bits that it has without torch.compile."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fovea.torch import Rows, _rows, context_parallel


def results(function, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    (out.float().square().sum() + lse.where(lse.isfinite(), 0).sum()).backward()
    return [out.detach(), lse.detach(), *(x.grad for x in leaves)]


def compiled(group, kind, move, options, backend):
    torch._dynamo.reset()
    n = dist.get_world_size(group)
    where = DeviceMesh("cpu", torch.arange(n).view(2, 2)) if move == "mesh" else group
    rows = getattr(Rows, kind)(64, where, block=16)
    tensors = [torch.randn(2, 2 * n, rows.count, 8) for _ in range(3)]
    options = dict(options, move=None if move == "mesh" else move)
    named = []
    for name in ("bias", "sink"):
        if options.pop(name, False):
            named.append(name)
            tensors.append(torch.randn(2 * n) if name == "sink" else torch.randn(2 * n, 1, rows.longest))
    if options.pop("mask", False):
        mine = rows.total if move == "heads" else (rows.over_keys or rows).count
        options["mask"] = torch.rand(mine, rows.total) < 0.8
    if options.pop("used", False):
        options["seqused_q"] = options["seqused_k"] = torch.tensor([30, 50], dtype=torch.int32)

    def attend(q, k, v, *more):
        return context_parallel(q * 1.0, k, v, rows=rows, return_lse=True, **options, **dict(zip(named, more)))

    want = results(attend, tensors)
    graph = torch.compile(attend, backend=backend, fullgraph=True)
    for _ in range(2):
        for name, a, b in zip(("out", "lse", "q", "k", "v", *named), results(graph, tensors), want):
            assert torch.equal(a, b), (name, (a - b).abs().max())
    with torch.no_grad():
        assert torch.equal(graph(*tensors)[0], want[0])


@pytest.mark.parametrize("kind, move, options", [
    ("zigzag", "keys", {"causal": True, "sink": True}),
    ("zigzag", "keys", {"mask": True, "bias": True, "softcap": 1.5}),
    ("contiguous", "keys", {"window": (9, 0), "used": True, "dropout_p": 0.2, "seed": 7}),
    ("zigzag", "heads", {"causal": True, "bias": True, "sink": True, "mask": True}),
    ("contiguous", "heads", {"used": True, "dropout_p": 0.2, "seed": 7, "offset": 3}),
    ("zigzag", "ring", {"causal": True, "sink": True}),
    ("zigzag", "mesh", {"causal": True, "bias": True, "mask": True}),
])  # fmt: skip
def test_one_graph(ranks, kind, move, options):
    ranks.run(4 if move == "mesh" else 2, compiled, kind, move, options, "aot_eager")


def test_one_rank(ranks):
    ranks.run(1, compiled, "zigzag", "keys", {"causal": True, "sink": True}, "aot_eager")


def twice(group, folder, *arguments):
    """The second time graphs come from PyTorch's cache, which all ranks share."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    try:
        compiled(group, *arguments)
        torch._dynamo.utils.counters.clear()
        compiled(group, *arguments)
        return dict(torch._dynamo.utils.counters["aot_autograd"])
    finally:
        os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


@pytest.mark.parametrize("move", ["keys", "heads"])
def test_inductor(ranks, tmp_path, move):
    for counted in ranks.run(2, twice, str(tmp_path), "zigzag", move, {"causal": True, "bias": True}, "inductor"):
        assert counted.get("autograd_cache_hit", 0) > 0, counted


def surroundings(group):
    torch._dynamo.reset()
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = Rows.contiguous(64, group, block=16)

    def graph(**options):
        return torch.compile(lambda q: context_parallel(q, q, q, rows=rows, **options), backend="aot_eager", fullgraph=True)

    # The first rank's seed, whatever the others draw.
    q, found = torch.randn(2, 2 * n, rows.count, 8), []
    for attend in (lambda q: context_parallel(q, q, q, rows=rows, dropout_p=0.3), graph(dropout_p=0.3)):
        torch.manual_seed(5 + rank)
        found += [attend(q), torch.rand(())]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])

    attend = graph(causal=True, move="keys")
    with torch._dynamo.config.patch(error_on_recompile=False):
        for batch in (2, 3, 4, 5):  # of which the last is no new graph
            q = torch.randn(batch, 2 * n, rows.count, 8, requires_grad=True)
            with torch._dynamo.config.patch(error_on_recompile=batch == 5):
                out = attend(q)
            (grad,) = torch.autograd.grad(out.sum(), q)
            want = context_parallel(q, q, q, rows=rows, causal=True, move="keys")
            assert torch.equal(out, want) and torch.equal(grad, torch.autograd.grad(want.sum(), q)[0])

    # A graph outlives its plan, and may be another process's.
    _rows._known.clear()
    assert torch.equal(attend(q), want)
    mesh = Rows.packed([0, 20, 64], DeviceMesh("cpu", torch.arange(n).view(2, 2)), block=16)
    again = _rows.of_handle(mesh.handle)
    _rows._known.clear()
    again = _rows.of_handle(mesh.handle)
    assert again is not mesh and again.pieces == mesh.pieces and again.rank == mesh.rank and again.handle == mesh.handle
    assert again.over_keys.handle == mesh.over_keys.handle and again.over_heads.handle == mesh.over_heads.handle

    with torch.autocast("cpu", torch.bfloat16):
        assert attend(q).dtype == torch.bfloat16
    packed = Rows.packed([0, 20, 64], group, block=16)  # another plan in each batch: a break
    x = torch.randn(packed.count, 2 * n, 8)
    broken = torch.compile(lambda x: context_parallel(x * 1.0, x, x, rows=packed), backend="aot_eager")
    assert torch.equal(broken(x), context_parallel(x, x, x, rows=packed))

    for options, text in (
        ({"sink": torch.zeros(1)}, f"rank {rank} of {n}: sink: shape 1; accepted: 8 heads"),
        ({"is_causal": True}, "is_causal: not an option"),
        ({"cu_seqlens_q": torch.zeros(2)}, "cu_seqlens_q: given; accepted: None"), ({"move": "up"}, "move: 'up'; accepted"),
    ):  # fmt: skip
        with pytest.raises(Exception, match=text):
            graph(**options)(q)


def test_surroundings(ranks):
    ranks.run(4, surroundings)
