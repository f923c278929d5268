# SPDX-License-Identifier: Apache-2.0
"""context_parallel where something is wrong: every rank gets an error that names it, and none waits for the others."""

import contextlib
import datetime
import os
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh

from fovea.torch import Rows, _parallel_blocks, attention, context_parallel, explain_context_parallel

MOVES = ("keys", "heads", "ring")


def mesh_of(group, shape=(2, 2)):
    return DeviceMesh("cpu", torch.arange(dist.get_world_size(group)).view(shape))


# ---- arguments ----


def a_rank_with_one_row(group):
    """It cannot tell its row of a bias from one that is broadcast."""
    n = dist.get_world_size(group)
    length = 16 * (n - 1) + 1
    q, k, v = (torch.randn(1, 2 * n, length, 8) for _ in range(3))
    rows = Rows.contiguous(length, group, block=16)
    assert min(rows.counts) == 1
    for bias in (torch.randn(1, 2 * n, length, length), torch.randn(1, 2 * n, 1, length)):
        leaf = bias.clone().requires_grad_()
        attention(q, k, v, bias=leaf, causal=True).sum().backward()
        part = (lambda x: rows.take(x, 2)) if bias.shape[2] > 1 else lambda x: x
        mine = part(bias).clone().requires_grad_()
        given = [rows.take(x, 2) for x in (q, k, v)]
        assert "move: keys, as bias has queries" in explain_context_parallel(*given, rows=rows, bias=mine, causal=True)
        out = context_parallel(*given, rows=rows, bias=mine, causal=True)
        out.sum().backward()
        assert torch.equal(out, rows.take(attention(q, k, v, bias=bias, causal=True), 2))
        if bias.shape[2] == 1:
            dist.all_reduce(mine.grad, group=group)
        torch.testing.assert_close(mine.grad, part(leaf.grad))


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_with_one_row(ranks, n):
    ranks.run(n, a_rank_with_one_row)


def one_row_of_all(group):
    """All heads of a plane without queries, or this rank's of one with queries: told apart by their number."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    q, k, bias = torch.randn(1, 2 * n, 1, 8), torch.randn(1, 2 * n, 1, 8), torch.randn(1, 2 * n, 1, 1)
    rows = Rows.contiguous(1, group)
    want = rows.take(attention(q, k, k, bias=bias), 2)
    for given in (bias, bias.narrow(1, 2 * rank, 2)):
        assert torch.equal(context_parallel(*(rows.take(x, 2) for x in (q, k, k)), rows=rows, move="heads", bias=given), want)


def test_one_row_of_all(ranks):
    ranks.run(2, one_row_of_all)


def refused(group, kind, length, move, shapes, options, error, text):
    """Every rank refuses a call, so that the next one is computed. `move` may be a mesh; `shapes` are those of wrong tensors."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    where, move = (mesh_of(group), None) if move == "mesh" else (group, move)
    rows = getattr(Rows, kind)(length, where, block=16)
    q = torch.randn((rows.count, n, 8) if kind == "packed" else (1, n, rows.count, 8))
    types = {"mask": torch.bool, "seqused_k": torch.int32}
    wrong = {name: torch.ones(shape, dtype=types.get(name, torch.float32)) for name, shape in shapes.items()}
    with pytest.raises(error) as found:
        context_parallel(q, q, q, rows=rows, move=move, **wrong, **options)
    assert str(found.value).startswith(f"rank {rank} of {n}: {text}"), str(found.value)
    assert context_parallel(q, q, q, rows=rows, move=move).shape == q.shape


@pytest.mark.parametrize("shapes, text", [
    ({"sink": (2,)}, "sink: shape 2; accepted: 4 heads"),
    ({"sink": (8,)}, "sink: shape 8; accepted: 4 heads"),
    ({"alibi_slopes": (2,)}, "alibi_slopes: shape 2; accepted: 4 heads"),
    ({"bias": (2, 1, 40)}, "bias: shape 2x1x40; accepted with move="),
    ({"bias": (4, 39, 40)}, "bias: shape 4x39x40; accepted with move="),
    ({"mask": (1, 39)}, "mask: shape 1x39; accepted with move="),
    ({"bias2": (2, 1, 1, 40)}, "bias2: shape 2x1x1x40; accepted with move="),
    ({"bias2": (1, 1, 1, 1, 40)}, "bias2: shape 1x1x1x1x40; accepted with move="),
    ({"seqused_k": (5,)}, "seqused_k: shape 5; accepted: (B), 1"),
])  # fmt: skip
@pytest.mark.parametrize("move", [*MOVES, "mesh"])
def test_sizes_are_refused_before_the_first_collective(ranks, move, shapes, text):
    ranks.run(4, refused, "zigzag", 40, move, shapes, {}, ValueError, text)


@pytest.mark.parametrize("kind, length", [("contiguous", 20), ("packed", [0, 8, 16])])
@pytest.mark.parametrize("move", ["keys", "ring"])
def test_a_rank_without_rows_refuses_what_the_others_do(ranks, move, kind, length):
    ranks.run(4, refused, kind, length, move, {}, {"backend": "cuda"}, NotImplementedError, "no backend can compute")


# ---- between forward and backward ----


def changed_in_place(group, move):
    rows = Rows.zigzag(40, group, block=16)
    q = torch.randn(1, dist.get_world_size(group), rows.count, 8, requires_grad=True)
    mask, used = torch.rand(40 if move == "heads" else rows.count, 40) < 0.7, torch.tensor([30], dtype=torch.int32)
    for name, x in (("mask", mask), ("seqused_k", used)):
        out = context_parallel(q, q, q, rows=rows, move=move, **{name: x})
        x.fill_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("move", MOVES)
def test_a_tensor_that_was_changed_in_place(ranks, move):
    ranks.run(2, changed_in_place, move)


def inference_first(group, kind, move):
    rows = Rows.packed([0, 30, 64], group, block=16) if kind == "packed" else Rows.zigzag(64, group, block=16)
    n, at = dist.get_world_size(group), 0 if kind == "packed" else 2
    q = torch.randn((rows.count, n, 8) if kind == "packed" else (1, n, rows.count, 8), requires_grad=True)
    with torch.inference_mode():
        context_parallel(q, q, q, rows=rows, move=move, causal=True)
        rows.give(q, at)
    context_parallel(q, q, q, rows=rows, move=move, causal=True).sum().backward()
    rows.give(q, at).sum().backward()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("kind", ["zigzag", "packed"])
def test_inference_then_training(ranks, kind, move, n):
    ranks.run(n, inference_first, kind, move)


# ---- collectives ----


def arguments(group, move):
    """q of a plan, and what to call context_parallel with."""
    n = dist.get_world_size(group)
    rows = Rows.zigzag(64, mesh_of(group) if move == "mesh" else group, block=16)
    q = torch.randn(1, 2 * n, rows.count, 8, requires_grad=True)
    return q, {"rows": rows, "move": None if move == "mesh" else move, "causal": True}


def from_place_to_place():
    """With small messages, too, heads go from place to place in groups, as long ones do: "exchange" below."""
    return mock.patch.multiple(_parallel_blocks, LEAST_BYTES=0, MOST_MESSAGES=1000)


GRADIENTS = "the gradients of keys and values"


def failing(group, move, collective, at_once, in_backward, what):
    """A collective that fails when it is started, or when it is waited for. Keys are sent before their gradients."""
    if move == "exchange":
        with from_place_to_place():
            return failing(group, "heads", collective, at_once, in_backward, what)
    q, given = arguments(group, move)
    out = context_parallel(q, q, q, **given) if in_backward else None
    usual, left = getattr(dist, collective), [what == GRADIENTS]

    def broken(*arguments, **options):
        if left[0]:
            left[0] = False
            return usual(*arguments, **options)

        def wait():
            raise RuntimeError("a cable")

        if at_once:
            wait()
        usual(*arguments, **{**options, "async_op": True}).wait() if collective != "batch_isend_irecv" else None
        work = SimpleNamespace(wait=wait)
        return [work] if collective == "batch_isend_irecv" else work

    setattr(dist, collective, broken)
    try:
        with pytest.raises(RuntimeError) as found:
            out.sum().backward() if in_backward else context_parallel(q, q, q, **given)
    finally:
        setattr(dist, collective, usual)
    text = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}: {what}: the collective failed: a cable; "
    assert str(found.value).startswith(text), str(found.value)


@pytest.mark.parametrize("move, collective, at_once, in_backward, what", [
    *((move, "batch_isend_irecv", at_once, back, "keys and values") for move in ("keys", "ring", "mesh") for at_once in (True, False)
      for back in (True, False)),
    *((move, "batch_isend_irecv", at_once, True, GRADIENTS) for move in ("keys", "ring", "mesh") for at_once in (True, False)),
    ("heads", "all_to_all_single", True, False, "q, k and v to heads"),
    ("heads", "all_to_all_single", True, True, "the gradient of out to rows"),
    ("mesh", "all_to_all_single", True, False, "q, k and v to heads"),
    *(("exchange", "batch_isend_irecv", at_once, False, "q, k and v to heads") for at_once in (True, False)),
    *(("exchange", "batch_isend_irecv", at_once, True, "the gradient of out to rows") for at_once in (True, False)),
])  # fmt: skip
def test_a_collective_that_fails(ranks, move, collective, at_once, in_backward, what):
    ranks.run(4, failing, move, collective, at_once, in_backward, what)


def compared(group, move):
    rank = dist.get_rank(group)
    q, given = arguments(group, move)
    os.environ["FOVEA_CHECK_RANKS"] = "1"
    try:
        with pytest.raises(ValueError, match=f"^rank {rank} of 4: the ranks' arguments differ: scale: 2.0 on ranks 0, 2, 3, but 3.0 on rank 1"):
            context_parallel(q, q, q, scale=2.0 + (rank == 1), **given)
    finally:
        del os.environ["FOVEA_CHECK_RANKS"]


@pytest.mark.parametrize("move", [*MOVES, "mesh"])
def test_arguments_that_differ(ranks, move):
    ranks.run(4, compared, move)


# ---- ranks that die, or send other sizes ----

LOST = [(move, how) for move in [*MOVES, "mesh", "exchange"] for how in ("gone in the forward", "gone in the backward", "other sizes")]
for name in ("keys", "ring", "exchange"):
    LOST.remove((name, "other sizes"))  # gloo takes a shorter message for a whole one: FOVEA_CHECK_RANKS=1 finds that


def lose(rank, folder, move, how):
    """Rank 1 goes away, or has other arguments; what the others then say, in files."""
    n = 4 if move == "mesh" else 2
    if rank >= n:
        return
    if move == "exchange":
        from_place_to_place().start()  # this process ends with the case
        move = "heads"
    started = time.monotonic()
    patience = datetime.timedelta(seconds=10 if how == "other sizes" else 60)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n, timeout=patience)
    q, given = arguments(dist.group.WORLD, move)
    out = context_parallel(q, q, q, **given)
    out.sum().backward()  # now all are connected
    out = context_parallel(q, q, q, **given)
    (folder / f"ready {rank}").touch()
    while not all((folder / f"ready {other}").exists() for other in range(n)):
        time.sleep(0.01)
    if rank == 1 and how != "other sizes":
        return
    if rank == 1:
        q = q.bfloat16()  # gloo ends a process that gets more bytes than it expects, so that is this one
    said = "computed"
    try:
        out.sum().backward() if how == "gone in the backward" else context_parallel(q, q, q, **given)
    except RuntimeError as error:
        said = str(error)
    (folder / f"said {rank}").write_text(f"{time.monotonic() - started:.0f} {said}")


def lose_all(rank, folder):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for move, how in LOST:  # each in processes of its own, which need not start PyTorch
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                lose(rank, Path(folder, f"{move} {how}"), move, how)
            os._exit(0)
        os.waitpid(child, 0)


@pytest.fixture(scope="module")
def lost(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost")
    for case in LOST:
        (folder / " ".join(case)).mkdir()
    torch.multiprocessing.start_processes(lose_all, args=(str(folder),), nprocs=4, start_method="spawn")
    return folder


@pytest.mark.parametrize("move, how", LOST)
def test_a_rank_that_is_lost(lost, move, how):
    """The others say who they are and what they waited for, and do not wait for the time limit of a minute."""
    n = 4 if move == "mesh" else 2
    for rank in set(range(n)) - {1}:
        seconds, said = (lost / f"{move} {how}" / f"said {rank}").read_text().split(" ", 1)
        assert said.startswith(f"rank {rank} of {n}: ") and ": the collective failed: " in said and "FOVEA_CHECK_RANKS=1" in said, said
        assert int(seconds) < 40
