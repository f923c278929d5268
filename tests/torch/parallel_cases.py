# SPDX-License-Identifier: Apache-2.0
"""context_parallel's cases: small problems in which every pair of feature values occurs that today's calls can compute, each compared
with one process that has all rows. Ranks run these functions (ranks.py)."""

import contextlib
import copy
import re
from unittest import mock

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from covering import covering
import fovea
from fovea.torch import (
    Rows, _attention, _parallel_blocks, _parallel_call, _parallel_fetch, _parallel_heads, _parallel_keys, _parallel_parts, _parallel_positions, attention, context_parallel,
    explain_context_parallel,
)  # fmt: skip

# The first value of each is the plain one. The numbers of key heads are multiples of the ranks; "one" is one key head.
FEATURES = {
    "move": ["keys", "heads", "ring"],
    "kind": ["zigzag", "contiguous", "packed", "packed contiguous"],
    "length": [70, 20, 0],  # with blocks of 8: uneven; empty ranks; no rows at all
    "dtype": ["float32", "bfloat16", "float64"],
    "heads": ["equal", "grouped", "many", "one"],
    "batch": ["one", "two"],  # levels
    "causal": [True, False],
    "window": [(-1, -1), (9, 0), (5, 3), (-1, 4), (11, -1)],
    "softcap": [0.0, 1.5],
    "bias": ["", "h,q,k", "1,q,k", "b,h,q,k", "h,1,k", "b,1,1,k"],
    "bias2": ["", "h,1,k", "1,q,k"],
    "mask": ["", "b,1,1,k", "h,q,k", "dead"],
    "alibi": ["", "h", "bh"],
    "sink": [False, True],
    "used": ["", "same", "k"],
    "align": [None, "bottom_right", "top_left"],
    "position": ["", "number", "each"],
    "dropout": [None, "fovea", "torch_mem_efficient"],
    "layout": ["bhsd", "bshd"],
    "lse": [False, True],  # whether it has a gradient
}
PLAIN = {name: values[0] for name, values in FEATURES.items()}
DOCUMENTS = [3, 41, 0, 8, 18]  # of packed rows


def legal(row):
    """Whether a row can be computed. Every other one is refused by name (test_refusals)."""
    r = {**PLAIN, **row}
    planes = [r[name] for name in ("bias", "bias2", "mask")]
    banded = r["causal"] or r["window"] != (-1, -1) or r["alibi"]
    if r["kind"].startswith("packed") and (r["length"] != 70 or r["layout"] != "bhsd"):
        return False
    if r["batch"] == "two" and (r["alibi"] == "bh" or any(p.startswith("b,") for p in planes)):
        return False  # shapes that these tests do not make
    if r["position"] and (r["align"] or r["dropout"] == "torch_mem_efficient"):
        return False  # attention() refuses it
    if r["used"] == "k" and banded and not (r["align"] or r["position"]):
        return False  # so it does here
    if r["move"] == "heads":
        return r["heads"] != "one"
    if r["move"] == "ring" and r["kind"].startswith("packed") and any(planes):
        return False
    if r["dropout"] and r["used"] == "k" and banded and r["align"] == "bottom_right":
        return False
    return r["dropout"] != "torch_mem_efficient"


def table():
    return covering(FEATURES, legal)


def name_of(row):
    return " ".join(f"{name}={value}" for name, value in row.items() if value != PLAIN[name]) or "plain"


def heads_of(row, ranks):
    return {"equal": (ranks, ranks), "grouped": (4 * ranks, 2 * ranks), "many": (4 * ranks, 4 * ranks), "one": (3, 1)}[row["heads"]]


def make(row, ranks, dtype, seed=1):
    """The whole problem: q, k, v and options, the same on every rank."""
    torch.manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(torch.bfloat16).to(dtype)  # noqa: E731
    heads, heads_k = heads_of(row, ranks)
    packed = row["kind"].startswith("packed")
    batch = {"one": (2,), "two": (2, 3)}[row["batch"]]
    options = {name: row[name] for name in ("causal", "window", "softcap")}
    if packed:
        length, total = max(DOCUMENTS), sum(DOCUMENTS)
        ends = torch.tensor([0, *DOCUMENTS]).cumsum(0).int()
        options.update(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=length, max_seqlen_k=length)
        entries = len(DOCUMENTS)
        if row["batch"] == "two":
            options["batch_shape"] = (1, entries)
        q, k, v = normal(total, heads, 8), normal(total, heads_k, 8), normal(total, heads_k, 6)
    else:
        length = row["length"]
        entries = 6 if row["batch"] == "two" else 2
        q, k, v = (normal(*batch, h, length, d) for h, d in ((heads, 8), (heads_k, 8), (heads_k, 6)))
        if row["layout"] == "bshd":
            q, k, v = (x.transpose(-2, -3).contiguous() for x in (q, k, v))
            options["layout"] = "bshd"

    def plane(spec):
        sizes = {"b": entries, "h": heads, "q": length, "k": length}
        return [sizes.get(name, 1) for name in spec.split(",")]

    for name in ("bias", "bias2"):
        if row[name]:
            options[name] = normal(*plane(row[name]))
    if row["mask"] == "dead":
        options["mask"] = torch.rand(length, length) < 0.7
        options["mask"][::3] = False
    elif row["mask"]:
        options["mask"] = torch.rand(plane(row["mask"])) < 0.7
    if row["alibi"]:
        options["alibi_slopes"] = torch.rand((heads,) if row["alibi"] == "h" else (entries, heads), dtype=wide)
    if row["sink"]:
        options["sink"] = normal(heads).to(wide)
    if row["used"]:
        used = torch.randint(0, length + 1, (entries,), dtype=torch.int32)
        if packed:
            used = used.minimum(torch.tensor(DOCUMENTS)).int()
        options["seqused_k"] = used
        if row["used"] == "same":
            options["seqused_q"] = used
    options["align"] = row["align"]
    if row["position"]:
        options.update(position_q=32, position_k=16)
    if row["position"] == "each":
        options["positions_q"] = torch.randint(0, 3, (entries,)) * 16
        options["positions_k"] = torch.randint(0, 3, (entries,)) * 16
    if row["dropout"]:
        options.update(rng=row["dropout"], dropout_p=0.25, seed=7, offset=3)
    return q, k, v, options


def plan(row, group):
    block = 16 if row.get("dropout") else 8
    if row["kind"].startswith("packed"):
        return Rows.packed(torch.tensor([0, *DOCUMENTS]).cumsum(0), group, block=block, contiguous=row["kind"] != "packed")
    return getattr(Rows, row["kind"])(row["length"], group, block=block)


PLANES = ("bias", "bias2")
INPUTS = ("q", "k", "v", "bias", "bias2", "sink")


def run(function, q, k, v, options, grad_out, grad_lse, **more):
    """out, lse and the gradients by name."""
    leaves = {name: x.clone().requires_grad_() for name, x in {"q": q, "k": k, "v": v, **options}.items() if name in INPUTS}
    given = {**options, **{name: x for name, x in leaves.items() if name not in "qkv"}}
    out, lse = function(leaves["q"], leaves["k"], leaves["v"], return_lse=True, **given, **more)
    torch.autograd.backward([out] + [lse] * (grad_lse is not None), [grad_out] + [grad_lse] * (grad_lse is not None))
    return {"out": out.detach(), "lse": lse.detach(), **{name: x.grad for name, x in leaves.items()}}


def check_blocks(group, row):
    """The same with small messages between rows and heads, from place to place."""
    usual = _parallel_blocks.Exchange
    with mock.patch.multiple(_parallel_blocks, LEAST_BYTES=0, MOST_MESSAGES=1000), \
            mock.patch.object(_parallel_heads, "LEAST_HEADS", 1), mock.patch.object(_parallel_heads, "Exchange", mock.Mock(wraps=usual)) as made:  # fmt: skip
        check(group, row)
        groups = 4 if row["heads"] == "many" and not (row["bias"] or row["bias2"]) else 1
        assert row["length"] == 0 or [call.args[-1] for call in made.call_args_list] == [groups, groups], made.call_args_list
        with mock.patch.object(_parallel_blocks, "MOST_COPIES", 0):  # as with many pieces
            check(group, row)


def check(group, row, seed=1, of_sink=None):
    """One case: what has to be equal, bit for bit, and what is summed over ranks, against fp64. With `of_sink` nothing but the error of the
    sink's gradient and its bound, which are added there."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    dtype = getattr(torch, row["dtype"])
    q, k, v, options = make(row, n, dtype, seed)
    packed = row["kind"].startswith("packed")
    at, heads_at = (0, 1) if packed else (-3, -2) if row["layout"] == "bshd" else (-2, -3)
    lse_at = -1
    heads = q.shape[heads_at]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = [*q.shape[:-1], v.shape[-1]]
    grad_out = torch.randn(shape, dtype=torch.float64).to(dtype)
    lse_shape = (heads, q.shape[0]) if packed else [*q.shape[:-3], heads, q.shape[at]]
    grad_lse = torch.randn(lse_shape, dtype=torch.float64).to(wide) if row["lse"] else None
    want = run(attention, q, k, v, options, grad_out, grad_lse)

    rows = plan(row, group)
    assert rows.count == rows.counts[rank] and sum(rows.counts) == rows.total
    take = lambda x, dim: rows.take(x, dim)  # noqa: E731
    mine = {name: x for name, x in options.items() if name not in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")}

    def part(name, x):
        """What this rank has of a bias or mask, or of its gradient."""
        if x.dim() < 2 or x.shape[-2] == 1:
            return x
        if row["move"] != "heads":
            return x if packed else take(x, -2)
        each = heads // n
        return x if x.dim() < 3 or x.shape[-3] == 1 else x.narrow(-3, rank * each, each)

    for name in ("bias", "bias2", "mask"):
        if name in mine:
            mine[name] = part(name, mine[name])
    local = [take(x, at) for x in (q, k, v)]
    with mock.patch.object(_parallel_call, "FEW_BYTES", 0):  # small problems, too, have two groups of heads
        got = run(context_parallel, *local, mine, take(grad_out, at), None if grad_lse is None else take(grad_lse, lse_at),
                  rows=rows, move=row["move"])  # fmt: skip

    summed, close = set(), set()
    wrong = []  # raised at the end: other ranks wait for this one's collectives
    for name, x in got.items():
        whole = want[name]
        if row["move"] == "ring" and (name in ("out", "lse", "q") or (name in PLANES and whole.shape[-2] != 1)):
            close.add(name)
        elif name in ("out", "q"):
            wrong += _same(name, x, take(whole, at))
        elif name == "lse":
            wrong += _same(name, x, take(whole, lse_at))
        elif name in "kv":
            if row["move"] == "heads":
                wrong += _same(name, x, take(whole, at))
            else:
                summed.add(name)
        elif name == "sink":
            summed.add(name)
        elif whole.shape[-2] != 1 and ((row["move"] == "keys" and not packed) or (row["move"] == "heads" and whole.dim() >= 3 and whole.shape[-3] != 1)):
            wrong += _same(name, x, part(name, whole))
        else:
            summed.add(name)
    up = lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    exact = run(attention, up(q), up(k), up(v), {name: up(x) for name, x in options.items()}, up(grad_out), up(grad_lse))
    for name in sorted(close):
        parts = [part(name, x) if name in PLANES else take(x, lse_at if name == "lse" else at) for x in (want[name], exact[name])]
        assert got[name].dtype == want[name].dtype
        alike = [x.isfinite() for x in (got[name], *parts)]  # the logsumexp of a row without keys
        wrong += [] if torch.equal(alike[0], alike[2]) else [f"{name}: other elements are finite"]
        numbers = [x.double()[alike[0]] for x in (got[name], *parts)]
        wrong += _within(name, *numbers, got[name].dtype)
    if of_sink is not None:
        x = got["sink"].double()
        dist.all_reduce(x, group=group)
        of_sink.append(_error(x, want["sink"], exact["sink"], dtype))
        return
    for name in sorted(summed):
        x = got[name].double()
        if name in "kv":
            wrong += _within(name, x, take(want[name], at), take(exact[name], at), dtype)
        else:
            dist.all_reduce(x, group=group)  # as the gradient of a parameter is
            if row["move"] == "keys" and packed and row.get(name) == "b,h,q,k":  # each rank has its own rows and zeros
                wrong += _same(name, x.to(want[name].dtype), want[name])
            # The ring's sink: its gradient is made of another out than one call's, with roundings of q's type, and of three numbers the
            # error of one call can be small by chance. So it is judged by other numbers as well, which every rank sees alike.
            if name == "sink" and row["move"] == "ring":
                each = [_error(x, want[name], exact[name], dtype)]
                for other in range(2, 10) if each[0][0] > each[0][1] else ():
                    check(group, row, other, each)
                error, bound = map(sum, zip(*each))
                wrong += [] if error <= bound else [f"sink: errors {error:.3g} of {len(each)} draws, accepted {bound:.3g}"]
            else:
                wrong += _within(name, x, want[name], exact[name], options[name].dtype)
    assert not wrong, "\n".join(wrong)


def _same(name, got, want):
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"{name}: {got.shape} {got.dtype}, {want.shape} {want.dtype}"]
    if torch.equal(got, want):
        return []
    return [f"{name}: {(got != want).sum()} of {got.numel()} differ, by up to {(got.double() - want.double()).abs().max():.3g}"]


def _within(name, got, one, exact, dtype):
    error, bound = _error(got, one, exact, dtype)
    return [] if error <= bound else [f"{name}: error {error:.3g}, accepted {bound:.3g}"]


def _error(got, one, exact, dtype):
    """The error of what is summed over ranks, in the mean square, and what is accepted: at most twice one call's, and some roundings of its
    size. Of fp64 nothing more exact is known, and what cancels shows roundings of its terms: tests/gpu/test_cuts.py saw 11."""
    if exact.numel() == 0:
        return 0.0, 0.0
    error, of_one = ((x.double() - exact).square().mean().sqrt().item() for x in (got, one))
    size = exact.square().mean().sqrt().item()
    return error, 2 * of_one + torch.finfo(dtype).eps * size * (64 if dtype == torch.float64 else 0.5)


# ---- single cases ----


def masks_of_dropout(group):
    """The mask of dropout over any number of ranks is that of one device, bit for bit. With equal scores and the identity for values,
    out is not 0 where a pair is kept."""
    n = dist.get_world_size(group)
    length, dropout = 70, {"dropout_p": 0.3, "seed": 2**40 + 5, "offset": 11}
    kept = torch.from_numpy(fovea.dropout_mask(2, n, length, length, 0.3, seed=2**40 + 5, offset=11))
    assert 0.65 < kept.float().mean() < 0.75
    eye = torch.eye(length).expand(2, n, length, length)
    for move in ("keys", "heads", "ring"):
        for rows in (Rows.zigzag(length, group, block=16), Rows.contiguous(length, group, block=16)):
            zeros = torch.zeros(2, n, rows.count, 8)
            out = context_parallel(zeros, zeros, rows.take(eye, 2), rows=rows, move=move, **dropout)
            assert torch.equal(out != 0, rows.take(kept, 2)), (move, rows)
    if n == 4:
        from torch.distributed.device_mesh import DeviceMesh

        for kind in ("zigzag", "contiguous"):
            rows = getattr(Rows, kind)(length, DeviceMesh("cpu", [[0, 1], [2, 3]]), block=16)
            zeros = torch.zeros(2, n, rows.count, 8)
            out = context_parallel(zeros, zeros, rows.take(eye, 2), rows=rows, **dropout)
            assert torch.equal(out != 0, rows.take(kept, 2)), rows


def refused(group, kind, length, options, shape, error, text):
    """Every rank refuses a call, with an error that names it."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = getattr(Rows, kind)(length, group, block=8)
    made = {name: value(rank, n) if callable(value) else value for name, value in options.items()}
    q, k, v = (torch.randn(*(rows.count if size == "rows" else size for size in shape)) for _ in range(3))
    try:
        context_parallel(q, k, v, rows=rows, **made)
    except error as found:
        assert str(found).startswith(f"rank {rank} of {n}: ") and text in str(found), str(found)
    else:
        raise AssertionError(f"computed; expected: {text}")


def drawn_seed(group):
    """seed=None: one mask for all ranks, and generators that stay in step."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = Rows.contiguous(40, group, block=16)
    torch.manual_seed(5 + rank)
    q, k = (torch.randn(1, n, 40, 8) for _ in range(2))
    dist.broadcast(q, 0, group=group)
    dist.broadcast(k, 0, group=group)
    v = torch.eye(40).expand(1, n, 40, 40)
    torch.manual_seed(11 + rank)
    outs = [context_parallel(*(rows.take(x, 2) for x in (q, k, v)), rows=rows, dropout_p=0.5, move=move) for move in ("keys", "heads")]
    state = torch.get_rng_state()
    torch.manual_seed(11)
    wants = [attention(q, k, v, dropout_p=0.5) for _ in range(2)]
    if rank == 0:
        assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(*wants)
    for out, want in zip(outs, wants):
        assert torch.equal(out, rows.take(want, 2))


def taken_and_given(group):
    """rows.take and rows.give are adjoint, for every kind and type."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    packed = (plan({"kind": kind}, group) for kind in ("packed", "packed contiguous"))
    for rows in (Rows.zigzag(37, group, block=4), Rows.contiguous(9, group, block=4), *packed):
        for dtype in (torch.float64, torch.bfloat16):
            x = torch.randn(2, rows.total, 3, dtype=torch.float64).to(dtype).requires_grad_()
            mine = rows.take(x, 1)
            assert torch.equal(mine, x[:, rows.index]) and rows.positions.shape == (rows.count,)
            local = mine.detach().requires_grad_()
            whole = rows.give(local, -2)
            assert torch.equal(whole, x)
            grads = [torch.randn(x.shape, dtype=torch.float64).to(dtype) for _ in range(n)]  # of each rank
            whole.backward(grads[rank])
            want = rows.take(sum(grad.to(torch.float64 if dtype == torch.float64 else torch.float32) for grad in grads), 1).to(dtype)
            torch.testing.assert_close(local.grad, want)
            (mine.double() * 2).sum().backward()
            mask = torch.zeros(rows.total)
            mask[rows.index] = 2
            assert torch.equal(x.grad, mask[None, :, None].expand(x.shape).to(dtype))
    for call, text in ((lambda: rows.take(x[:, :5], 1), "take: 5 rows"), (lambda: rows.give(x[:, :, :2], 2), "give: 2 rows")):
        try:
            call()
        except ValueError as error:
            assert str(error).startswith(f"rank {rank} of {n}: {text}"), str(error)
        else:
            raise AssertionError(text)


def surroundings(group):
    """Autocast, sinks of 16 bits, checkpointing, torch.compile with a break, a DeviceMesh: the same results as without them."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.checkpoint import checkpoint

    n, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = Rows.zigzag(48, DeviceMesh.from_group(group, "cpu"), block=8)
    assert (rows.rank, rows.ranks) == (rank, n)
    q, k, v = (torch.randn(1, 2 * n, 48, 8) for _ in range(3))
    sink = torch.randn(2 * n).bfloat16()
    for move in ("keys", "heads", "ring"):

        def found(wrap, move=move):
            leaves = [rows.take(x, 2).detach().requires_grad_() for x in (q, k, v)] + [sink.clone().requires_grad_()]
            out = wrap(lambda q, k, v, sink: context_parallel(q, k, v, rows=rows, move=move, causal=True, sink=sink), *leaves)
            out.float().square().sum().backward()
            return [out.detach(), *(x.grad for x in leaves)]

        plain = found(lambda f, *x: f(*x))
        assert plain[-1].dtype == torch.bfloat16
        for wrap in (lambda f, *x: checkpoint(f, *x, use_reentrant=False), lambda f, *x: torch.compile(f, backend="eager")(*x)):
            assert all(torch.equal(a, b) for a, b in zip(plain, found(wrap)))
        with torch.autocast("cpu", torch.bfloat16):
            low = found(lambda f, *x: f(*x))
        assert low[0].dtype == torch.bfloat16 and low[1].dtype == torch.float32
        torch.testing.assert_close(low[0].float(), plain[0], atol=0.05, rtol=0.05)


def many_groups(group, byte_limit):
    """The number of groups of heads changes no bit of out, dq and a bias's gradient."""
    rows = Rows.zigzag(40, group, block=8)
    heads = 6
    inputs = [torch.randn(2, h, 40, 8) for h in (2 * heads, heads, heads)]
    bias = torch.randn(2, 2 * heads, 40, 40)
    grad = torch.randn(2, 2 * heads, 40, 8)
    found = []
    usual = _parallel_call.BUFFER_BYTES, _parallel_call.FEW_BYTES
    try:
        for limits in (usual, (usual[0], 0), (byte_limit, 0)):
            _parallel_call.BUFFER_BYTES, _parallel_call.FEW_BYTES = limits
            leaves = [rows.take(x, 2).detach().requires_grad_() for x in (*inputs, bias)]
            text = explain_context_parallel(*leaves[:3], rows=rows, move="keys", bias=leaves[3], causal=True)
            out = context_parallel(*leaves[:3], rows=rows, move="keys", bias=leaves[3], causal=True)
            out.backward(rows.take(grad, 2))
            found.append((text, [out.detach(), *(x.grad for x in leaves)]))
    finally:
        _parallel_call.BUFFER_BYTES, _parallel_call.FEW_BYTES = usual
    for number, (text, results) in zip((1, 2, 6), found):
        assert f"groups of heads: {number};" in text, text
        assert all(torch.equal(a, b) for a, b in zip(results, found[0][1]))


def keys_of_a_window(group, kind, options):
    """As on a GPU, where a rank does not fetch the keys before its window: within rounding of one process."""
    usual = _parallel_positions.TILE, _parallel_positions.may_begin_later, _parallel_parts.start_fetch
    fetches = []
    _parallel_positions.TILE, _parallel_positions.may_begin_later = 16, lambda device: True
    _parallel_parts.start_fetch = lambda *given: (fetches.append(given), usual[2](*given))[1]
    try:
        rows = getattr(Rows, kind)(300, group, block=16)
        inputs = [torch.randn(2, h, 300, 8) for h in (4, 2, 2)] + [torch.randn(4, 300, 300)]
        grad = torch.randn(2, 4, 300, 8)
        given = {"seed": 3, **options}
        whole = [x.clone().requires_grad_() for x in inputs]
        want = attention(*whole[:3], bias=whole[3], **given)
        want.backward(grad)
        leaves = [rows.take(x, 2 if x.dim() == 4 else 1).clone().requires_grad_() for x in inputs]
        got = context_parallel(*leaves[:3], bias=leaves[3], rows=rows, move="keys", **given)
        forward = len(fetches)
        got.backward(rows.take(grad, 2))
        text = explain_context_parallel(*leaves[:3], bias=leaves[3], rows=rows, move="keys", **given)
        options = {**_attention._OPTIONS, **given}
        # A window to the left: rows behind a rank's first ones read its own keys where they lie.
        in_place = kind == "contiguous" and (given["window"][1] == 0 or given.get("causal", False)) and "position_k" not in given
        assert (_parallel_fetch.fetch_plan(rows, options, leaves[0].device).edge is not None) == in_place
        assert len(fetches) == (forward if in_place else 2 * forward) > 0  # what few rows were fetched is kept for the backward
        for x, y in zip([got, *(x.grad for x in leaves)], [want, *(x.grad for x in whole)]):
            torch.testing.assert_close(x, rows.take(y, 2 if y.dim() == 4 else 1), rtol=1e-5, atol=2e-5)
        return int(re.search(r"received in the forward: (\d+) bytes", text)[1])
    finally:
        _parallel_positions.TILE, _parallel_positions.may_begin_later, _parallel_parts.start_fetch = usual


def own_gradients(group, options, planes, learns, groups, layout):
    """As on a GPU, under a window of few rows: each rank forms the gradients of its own keys, from the next rank's first rows, too. In
    fp64 equal to one process; `groups` of heads change nothing; and no gradient of keys moves."""
    usual = _parallel_positions.TILE, _parallel_positions.may_begin_later, _parallel_call.FEW_BYTES, _parallel_call.BUFFER_BYTES
    returns = []
    start_return = _parallel_keys.start_return
    _parallel_positions.TILE, _parallel_positions.may_begin_later = 16, lambda device: True
    _parallel_keys.start_return = lambda *given: (returns.append(given), start_return(*given))[1]
    if groups > 1:
        _parallel_call.FEW_BYTES, _parallel_call.BUFFER_BYTES = 0, 1
    try:
        n, dim = 304, 2 if layout == "bhsd" else 1
        rows = Rows.contiguous(n, group, block=16)
        shapes = [(2, h, n, d) for h, d in ((4, 8), (2, 8), (2, 6))]
        inputs = {name: torch.randn(shape, dtype=torch.float64) for name, shape in zip("qkv", shapes)}
        if layout == "bshd":
            inputs = {name: x.transpose(1, 2).contiguous() for name, x in inputs.items()}
        grad = torch.randn_like(inputs["q"][..., :6])
        grad_lse = torch.randn(2, 4, n, dtype=torch.float64)
        more = {"mask": torch.rand(2, 1, 1, n) < 0.8, "bias": torch.randn(4, 1, n, dtype=torch.float64),
                "alibi_slopes": torch.rand(4, dtype=torch.float64), "seqused": torch.tensor([300, 211], dtype=torch.int32)}  # fmt: skip
        given = {"causal": True, "layout": layout, **options, **{name: more[name] for name in planes if name != "seqused"}}
        if "seqused" in planes:
            given.update(seqused_q=more["seqused"], seqused_k=more["seqused"])
        sink = torch.randn(4, dtype=torch.float64)

        def found(call, take, **how):
            leaves = {name: take(x, dim).clone().requires_grad_(name in learns) for name, x in inputs.items()}
            if "sink" in learns:
                leaves["sink"] = sink.clone().requires_grad_()
            text = explain_context_parallel(**leaves, **given, **how) if how else ""
            out, lse = call(**leaves, **given, **how, return_lse=True)
            out.backward(take(grad, dim), retain_graph=True)  # without a gradient of lse, and with one
            (lse.nan_to_num(neginf=0) * take(grad_lse, 2)).sum().backward()
            return text, [out.detach(), *(leaves[name].grad for name in learns)]

        _, want = found(attention, lambda x, dim: x)
        text, got = found(context_parallel, rows.take, rows=rows, move="keys")
        assert "gradients of keys are no sums over ranks" in text and f"groups of heads: {groups};" in text, text
        assert not returns
        for name, x, y in zip(["out", *learns], got, want):
            if name == "sink":
                dist.all_reduce(x, group=group)
            else:
                y = rows.take(y, dim)
            torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    finally:
        _parallel_positions.TILE, _parallel_positions.may_begin_later, _parallel_call.FEW_BYTES, _parallel_call.BUFFER_BYTES = usual
        _parallel_keys.start_return = start_return


def same_twice(group):
    rows = Rows.zigzag(70, group, block=8)
    q, k, v = (rows.take(torch.randn(1, 2, 70, 8), 2) for _ in range(3))

    def found():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        context_parallel(*leaves, rows=rows, causal=True, deterministic=True).sum().backward()
        return [x.grad for x in leaves]

    assert all(torch.equal(a, b) for a, b in zip(found(), found()))


def long(group, heads, length, window, bits):
    """Several blocks of keys. Where the CPU sums a row's keys in another order, the error is at most twice one process's."""
    rows = Rows.zigzag(length, group)
    q, k, v, grad = (torch.randn(1, heads, length, 16) for _ in range(4))
    options = {"causal": True, "window": window, "align": "bottom_right"}
    want = run(attention, q, k, v, options, grad, None)
    exact = run(attention, *(x.double() for x in (q, k, v)), options, grad.double(), None)
    got = run(context_parallel, *(rows.take(x, 2) for x in (q, k, v)), options, rows.take(grad, 2), None, rows=rows, move="keys")
    wrong = []
    for name in ("out", "lse", "q", "k", "v"):
        local = [rows.take(x[name], 2) for x in (want, exact)]
        wrong += _same(name, got[name], local[0]) if bits and name not in "kv" else _within(name, got[name].double(), *local, torch.float32)
    assert not wrong, "\n".join(wrong)


def two_dimensions(group, kind, shape, options):
    """Heads and keys over a mesh: the bits of one process."""
    from torch.distributed.device_mesh import init_device_mesh

    if len(shape) == 3:  # two groups that compute the same
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "keys", "heads"))["keys", "heads"]
        shape = shape[1:]
    else:
        mesh = init_device_mesh("cpu", shape)
    row = {**PLAIN, "kind": kind, "heads": "grouped", **options}
    q, k, v, options = make(row, 2, torch.float32)
    packed = kind == "packed"
    rows = plan(row, mesh)
    assert sum(rows.counts) == rows.total and rows.ranks == mesh.size() and rows.rank == dist.get_rank() % rows.ranks
    at, heads_at = (0, 1) if packed else (-2, -3)
    take = rows.take
    each = q.shape[heads_at] // shape[1]

    def part(x):
        if x.dim() < 2 or x.shape[-2] == 1:
            return x
        return rows.over_keys.take(x, -2).narrow(-3, rows.over_heads.rank * each, each)

    grad_out = torch.randn(*q.shape[:-1], v.shape[-1])
    grad_lse = torch.randn((q.shape[1], q.shape[0]) if packed else q.shape[:-1])
    want = run(attention, q, k, v, options, grad_out, grad_lse)
    up = lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    exact = run(attention, up(q), up(k), up(v), {name: up(x) for name, x in options.items()}, up(grad_out), up(grad_lse))
    mine = {name: part(x) if name in ("bias", "mask") else x for name, x in options.items() if "_seqlen" not in name and "cu_" not in name}
    got = run(context_parallel, *(take(x, at) for x in (q, k, v)), mine, take(grad_out, at), take(grad_lse, -1), rows=rows)
    assert torch.equal(rows.give(take(q, at), at), q)
    wrong = []
    for name, x in got.items():
        if name in ("out", "q"):
            wrong += _same(name, x, take(want[name], at))
        elif name == "lse":
            wrong += _same(name, x, take(want[name], -1))
        elif name in "kv":
            wrong += _within(name, x, take(want[name], at), take(exact[name], at), torch.float32)
        elif name == "bias" and x.shape[-2] != 1:
            wrong += _same(name, x, part(want[name]))
        else:
            dist.all_reduce(x, group=rows.group)
            wrong += _within(name, x, want[name], exact[name], torch.float32)
    assert not wrong, "\n".join(wrong)
    torch_rule = {"dropout_p": 0.1, "rng": "torch_mem_efficient"}
    for bad, text in ((torch_rule, "rng: 'torch_mem_efficient', with move='keys'"), ({"move": "keys"}, "move: 'keys', with rows of a mesh")):
        try:
            context_parallel(*(take(x, at) for x in (q, k, v)), rows=rows, **bad)
        except (NotImplementedError, ValueError) as error:
            assert text in str(error), str(error)
        else:
            raise AssertionError(text)


def subsets_of_gradients(group, kind, move):
    """Each of q, k, v and the sink alone, and none of the others: the same gradient as of one process, and no rank waits."""
    if move == "exchange":
        with mock.patch.multiple(_parallel_blocks, LEAST_BYTES=0, MOST_MESSAGES=1000), mock.patch.object(_parallel_heads, "LEAST_HEADS", 1):
            return subsets_of_gradients(group, kind, "heads")
    rows = getattr(Rows, kind)(64, group, block=8)
    inputs = {name: torch.randn(1, 4, 64, 8, dtype=torch.float64) for name in ("q", "k", "v")}
    inputs["sink"] = torch.randn(4, dtype=torch.float64)
    grad = torch.randn(1, 4, 64, 8, dtype=torch.float64)
    for name in inputs:
        whole = {other: x.clone().requires_grad_(other == name) for other, x in inputs.items()}
        attention(whole["q"], whole["k"], whole["v"], sink=whole["sink"], causal=True).backward(grad)
        part = lambda x: rows.take(x, 2) if x.dim() == 4 else x  # noqa: E731
        own = {other: part(x).clone().requires_grad_(other == name) for other, x in inputs.items()}
        out = context_parallel(own["q"], own["k"], own["v"], sink=own["sink"], causal=True, rows=rows, move=move)
        out.backward(rows.take(grad, 2))
        found = own[name].grad
        if name == "sink":
            dist.all_reduce(found, group=group)
        torch.testing.assert_close(found, part(whole[name].grad), rtol=1e-10, atol=1e-10)


def gradients_that_move(group, exchange, kind, groups, names):
    """The bytes of messages that heads send in the backward where q, k, v or the sink by these names learn. Their gradients are right. Of
    all groups' messages two begin at once, the others go with a group's result: at most one is under way beside a computation."""
    rows = Rows.packed([0, 24, 64], group, block=8) if kind == "packed" else getattr(Rows, kind)(64, group, block=8)
    heads, packed = 8 * rows.ranks, kind == "packed"
    at, size = (0, lambda n: (n, heads, 8)) if packed else (2, lambda n: (1, heads, n, 8))
    inputs = {name: torch.randn(size(64), dtype=torch.float64) for name in "qkv"}
    inputs["sink"] = torch.randn(heads, dtype=torch.float64)
    grad = torch.randn(size(64), dtype=torch.float64)
    ends = {} if not packed else {"cu_seqlens_q": torch.tensor([0, 24, 64]), "cu_seqlens_k": torch.tensor([0, 24, 64])}
    whole = {name: x.clone().requires_grad_(name in names) for name, x in inputs.items()}
    attention(whole["q"], whole["k"], whole["v"], sink=whole["sink"], causal=True, **ends).backward(grad)
    part = lambda x: rows.take(x, at) if x.dim() > 1 else x  # noqa: E731
    own = {name: part(x).clone().requires_grad_(name in names) for name, x in inputs.items()}
    sent, batches = [], []
    several, all_to_all = dist.batch_isend_irecv, dist.all_to_all_single

    def counted(operations):
        batches.append(len(operations))
        sent.extend(x.tensor.nbytes for x in operations if x.op is dist.isend)
        return several(operations)

    def counted_too(found, given, receives, sends, **more):
        sent.append(given.nbytes * (sum(sends) - sends[rows.rank]) // max(1, sum(sends)))
        return all_to_all(found, given, receives, sends, **more)

    few = mock.patch.multiple(_parallel_blocks, LEAST_BYTES=0, MOST_MESSAGES=1000) if exchange else contextlib.nullcontext()
    with few, mock.patch.multiple(dist, batch_isend_irecv=counted, all_to_all_single=counted_too), \
            mock.patch.object(_parallel_call, "FEW_BYTES", 0), mock.patch.object(_parallel_heads, "MOST_GROUPS", max(2, groups)), \
            mock.patch.object(_parallel_heads, "LEAST_HEADS", 8 // groups):  # fmt: skip
        assert f"groups of heads: {groups}\n" in explain_context_parallel(own["q"], own["k"], own["v"], rows=rows, move="heads")
        out = context_parallel(own["q"], own["k"], own["v"], sink=own["sink"], causal=True, rows=rows, move="heads")
        forward, of_forward = sum(sent), len(batches)
        out.backward(part(grad))
    if exchange:
        assert of_forward == min(2, groups) + groups, batches
        assert len(batches) - of_forward <= of_forward, batches
    for name in names:
        found = own[name].grad
        if name == "sink":
            dist.all_reduce(found, group=group)
        torch.testing.assert_close(found, part(whole[name].grad), rtol=1e-10, atol=1e-10)
    assert all(own[name].grad is None for name in inputs if name not in names)
    there = rows.count * heads * 8 * 8 * (rows.ranks - 1) // rows.ranks  # this rank's rows of the others' heads
    back = (64 - rows.count) * heads * 8 * 8 // rows.ranks  # the others' rows of this rank's heads
    of_lse = (64 - rows.count) * heads * 8 // rows.ranks
    assert forward == 3 * there + back + of_lse
    return sum(sent) - forward == there + sum(name in "qkv" for name in names) * back


def lengths_are_cut_once(group, move):
    """Of each piece the used rows are counted once, not for each call, which on a GPU would be launches."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.count += operator is torch.ops.aten.clamp_max.default
            return operator(*args, **(kwargs or {}))

    rows = Rows.zigzag(96, group, block=8)
    q, used = torch.randn(2, 2, rows.count, 8), torch.tensor([50, 80], dtype=torch.int32)
    with Counting() as counting:
        context_parallel(q, q, q, rows=rows, move=move, seqused_q=used, seqused_k=used.clone(), causal=True, align="top_left")
    mine, pieces = len(rows.mine), sum(map(len, rows.pieces))
    assert counting.count == mine + (pieces if move == "ring" else mine), counting.count


def error_in_an_own_part(group, most_again):
    """Under a window, while messages are on their way: these are waited for, and the group can be used. most_again: 0 for gradients of
    keys that are sums over ranks, where the fetched keys' gradients move then; else the next rank's first rows do."""
    with mock.patch.object(_parallel_call, "MOST_AGAIN", most_again):
        _error_in_an_own_part(group)


def _error_in_an_own_part(group):
    usual = _parallel_positions.TILE, _parallel_positions.may_begin_later, _parallel_keys._call.backward
    _parallel_positions.TILE, _parallel_positions.may_begin_later = 16, lambda device: True
    rows = Rows.contiguous(300, group, block=16)
    q, k, v = (rows.take(torch.randn(1, 2, 300, 8), 2).requires_grad_() for _ in range(3))
    calls = []

    def failing(*given, into, sums):
        calls.append(given)
        if len(calls) == (1 if rows.rank == 0 else 2):  # the call of its own rows and keys alone; of sums the last one
            raise RuntimeError("no room")
        return usual[2](*given, into=into, sums=sums)

    try:
        out = context_parallel(q, k, v, rows=rows, move="keys", causal=True, window=(20, 0))
        _parallel_keys._call.backward = failing
        try:
            out.sum().backward()
            raise AssertionError("no error")
        except RuntimeError as error:
            assert "no room" in str(error)
        _parallel_keys._call.backward = usual[2]
        dist.barrier(group)
        context_parallel(q, k, v, rows=rows, move="keys", causal=True, window=(20, 0)).sum().backward()
    finally:
        _parallel_positions.TILE, _parallel_positions.may_begin_later, _parallel_keys._call.backward = usual


def give_has_one_derivative(group):
    rows = Rows.contiguous(8, group)
    x = rows.take(torch.randn(8, 3), 0).requires_grad_()
    (first,) = torch.autograd.grad(rows.give(x, 0).pow(3).sum(), x, create_graph=True)
    try:
        first.sum().backward()
        raise AssertionError("no error")
    except RuntimeError as error:
        assert "double backward (the gradient of a gradient); accepted: first derivatives" in str(error)


def derivatives_that_are_refused(group, move):
    """By name, before anything moves."""
    rows = Rows.zigzag(32, group, block=16)
    q, k, v = (rows.take(torch.randn(1, 2, 32, 8), 2).requires_grad_() for _ in range(3))

    def call(q=q):
        return context_parallel(q, k, v, rows=rows, move=move, causal=True)

    def says(run, text):
        try:
            run()
        except (RuntimeError, NotImplementedError) as error:
            assert text in str(error), (move, text, error)
        else:
            raise AssertionError(text)

    first = torch.autograd.grad(call().pow(3).sum(), q, create_graph=True)[0]
    says(lambda: first.sum().backward(), "context_parallel, Rows.give: double backward")
    says(lambda: torch.func.grad(lambda q: call(q).sum())(q.detach()), "context_parallel: a transform of torch.func")
    says(lambda: torch.vmap(call)(torch.stack([q.detach()] * 2)), "context_parallel: a transform of torch.func")

    def forward_mode():
        with forward_ad.dual_level():
            call(forward_ad.make_dual(q.detach(), torch.ones_like(q)))

    says(forward_mode, "context_parallel: forward-mode derivatives")
    out = call()
    says(lambda: torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True), "is_grads_batched=True")
    out = call()  # and first derivatives are there
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def lse_in_the_loss_of_one_rank(group, move):
    rows = Rows.zigzag(64, group, block=16)
    whole = [torch.randn(1, 4, 64, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    q, k, v = (rows.take(x.detach(), 2).requires_grad_() for x in whole)
    out, lse = context_parallel(q, k, v, rows=rows, move=move, causal=True, return_lse=True)
    (out.square().sum() + (lse.sum() if rows.rank == 0 else 0)).backward()
    out, lse = attention(*whole, causal=True, return_lse=True)
    first = sum(lse[..., piece.start : piece.start + piece.rows].sum() for piece in rows.pieces[0])
    (out.square().sum() + first).backward()
    for mine, x in zip((q, k, v), whole):
        torch.testing.assert_close(mine.grad, rows.take(x.grad, 2), rtol=1e-10, atol=1e-10)


def small_errors(group):
    rows = Rows.zigzag(32, group, block=16)
    x = torch.randn(rows.count, 2)
    assert copy.deepcopy(rows) is rows
    others = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() gives a process that is not in it
    for run, kind, text in (
        (lambda: rows.take(x, 5), ValueError, "take: dim=5 of a tensor of 2 dimensions"),
        (lambda: rows.take(x.numpy(), 0), TypeError, "take: a ndarray; accepted: a torch.Tensor"),
        (lambda: rows.give(x, None), TypeError, "dim: None; accepted: an integer"),
        (lambda: rows.give(x.to(torch.int16), 0), RuntimeError, "give of int16"),
        (lambda: rows.balance(window=10), TypeError, "window: 10; accepted: a pair (left, right)"),
        (lambda: Rows.zigzag(32, "cp"), TypeError, "group: 'cp'; accepted: a process group"),
        (lambda: Rows.zigzag(32, True), TypeError, "group: True; accepted: a process group"),
        (lambda: Rows.zigzag(32, others), ValueError, "group: this process is not in it"),
    ):
        try:
            run()
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
