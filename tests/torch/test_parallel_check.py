# SPDX-License-Identifier: Apache-2.0
"""FOVEA_CHECK_RANKS=1: every rank of context_parallel raises where what has to be the same on all of them is not, and names it."""

import contextlib
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fovea.torch import Rows, _attention, _parallel_check, context_parallel

checked = mock.patch.dict(os.environ, {"FOVEA_CHECK_RANKS": "1"})
HEADS, LENGTH = 12, 40  # heads of 2, 3 and 4 ranks
I32 = torch.int32


def changed(x, at=0, by=1):
    """The same with another number."""
    y = x.clone()
    y.view(-1)[at] += by
    return y


MANY = torch.arange(HEADS) / 8
SINK = torch.linspace(0, 1, HEADS)
PADDING = torch.ones(LENGTH, dtype=torch.bool)
EACH = torch.tensor([16, 32], dtype=I32)
STREAMS = torch.arange(2 * HEADS).view(2, HEADS)
DROPOUT = {"dropout_p": 0.25, "seed": 7}

# By option: what all ranks but one have, what that one has, other options, and what errors say of the two values.
DIFFERENT = {
    "bias": (torch.zeros(HEADS, 1, LENGTH), changed(torch.zeros(HEADS, 1, LENGTH), LENGTH), {}, "float32 12x1x40 on cpu hash "),
    "bias2": (torch.zeros(LENGTH), changed(torch.zeros(LENGTH)), {}, "float32 40 on cpu hash "),
    "mask": (PADDING, PADDING & (torch.arange(LENGTH) < 20), {}, "bool 40 on cpu hash "),
    "alibi_slopes": (MANY, changed(MANY), {}, "float32 12 on cpu hash "),
    "sink": (SINK, changed(SINK, HEADS - 1, 1e-7), {}, "float32 12 on cpu hash "),
    "seqused_q": (EACH, changed(EACH), {"seqused_k": EACH, "causal": False}, "int32 2 on cpu [16, 32]", "int32 2 on cpu [17, 32]"),
    "seqused_k": (EACH, changed(EACH, 1), {"causal": False}, "int32 2 on cpu [16, 32]", "int32 2 on cpu [16, 33]"),
    "scale": (2.0, 3.0, {}, "2.0", "3.0"),
    "causal": (True, False, {}, "True", "False"),
    "window": ((5, 3), (5, 4), {}, "(5, 3)", "(5, 4)"),
    "align": (None, "top_left", {}, "None", "'top_left'"),
    "softcap": (0.0, 1.5, {}, "0.0", "1.5"),
    "dropout_p": (0.25, 0.5, {"seed": 7}, "0.25", "0.5"),
    "seed": (7, 8, {"dropout_p": 0.25}, "7", "8"),
    "offset": (3, 4, DROPOUT, "3", "4"),
    "rng": ("fovea", "torch_mem_efficient", {**DROPOUT, "move": "heads"}, "'fovea'", "'torch_mem_efficient'"),
    "position_q": (16, 32, {}, "16", "32"),
    "position_k": (0, 16, {}, "0", "16"),
    "positions_q": (EACH.long(), changed(EACH.long(), 1, 16), {}, "int64 2 on cpu [16, 32]", "int64 2 on cpu [16, 48]"),
    "positions_k": (EACH.long(), None, {}, "int64 2 on cpu [16, 32]", "None"),
    "dropout_streams": (STREAMS, changed(STREAMS), DROPOUT, "int64 2x12 on cpu hash "),
    "batch_shape": ((1, 2), (2, 1), {"kind": "packed"}, "(1, 2)", "(2, 1)"),
    "layout": ("bhsd", "bshd", {}, "'bhsd'", "'bshd'"),
    "deterministic": (False, True, {}, "False", "True"),
    "backend": (None, "cpu", {}, "None", "'cpu'"),
}  # fmt: skip
# Other things than options: what the odd rank does in place of the others.
OTHERS = {
    "a seed's tensor": ("seed", "int64  on cpu [7]", "int64  on cpu [8]"),
    "no seed": ("seed", "7", "None"),
    "move": ("move", "keys", "ring"),
    "lengths": ("rows", "packed of [17, 23] rows over ", "packed of [18, 22] rows over "),
    "many lengths": ("rows", "packed of 10 numbers, hash ", "packed of 10 numbers, hash "),
    "block": ("rows", "in blocks of 16", "in blocks of 8"),
    "kind": ("rows", "zigzag of [40]", "contiguous of [40]"),
    "type": ("k", "float32 2x12xrowsx8 on cpu", "bfloat16 2x12xrowsx8 on cpu"),
    "batch": ("v", "float32 2x12xrowsx8 on cpu", "float32 3x12xrowsx8 on cpu"),
    "gradient": ("q", "float32 2x12xrowsx8 on cpu", "float32 2x12xrowsx8 on cpu with gradient"),
    "no grad": ("torch.is_grad_enabled()", "True", "False"),
    "a bias without queries": ("bias", "float32 12xrowsx40 on cpu", "float32 12x1x40 on cpu "),
    "a bias of fewer heads": ("bias", "float32 12xrowsx40 on cpu", "float32 1xrowsx40 on cpu"),
    "a refusal": (),
}


def call_of(group, case, odd):
    """What rank 1, the odd one, or another rank computes."""
    options, kind, more, block, lengths, batch = {"causal": True, "move": "keys"}, "zigzag", {}, 16, [17, 23], 2
    odd_about = case if odd else ""
    if case in DIFFERENT:
        usual, other, given, *_ = DIFFERENT[case]
        more = {**given, case: other if odd else usual}
        kind = more.pop("kind", kind)
    elif case == "a seed's tensor":
        more = {"dropout_p": 0.25, "seed": torch.tensor(8 if odd else 7)}
    elif case == "no seed":
        more = {"dropout_p": 0.25, "seed": None if odd else 7}
    elif case == "move":
        more = {"move": "ring" if odd else "keys"}
    elif case in ("lengths", "many lengths"):
        kind = "packed"
        lengths = ([18, 22] if odd else lengths) if case == "lengths" else [4] * 8 + ([3, 5] if odd else [4, 4])
    elif case.startswith("a bias"):
        more = {"bias": (1 if odd_about == "a bias of fewer heads" else HEADS, 1 if odd_about == "a bias without queries" else "rows", LENGTH)}
    elif odd_about == "a refusal":
        more = {"scale": "much"}
    block = 8 if odd_about == "block" else block
    kind = "contiguous" if odd_about == "kind" else kind
    batch = 3 if odd_about == "batch" else batch
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = Rows.packed(ends, group, block=block) if kind == "packed" else getattr(Rows, kind)(LENGTH, group, block=block)
    x = torch.randn((rows.count, HEADS, 8) if kind == "packed" else (batch, HEADS, rows.count, 8))
    options = {**options, **more}
    if options.get("layout") == "bshd":
        x = x.transpose(1, 2)
    if isinstance(options.get("bias"), tuple):
        options["bias"] = torch.randn([rows.count if size == "rows" else size for size in options["bias"]])
    q, k, v = x.clone().requires_grad_(odd_about == "gradient"), x.clone(), x.clone()
    if odd_about == "type":
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    mode = torch.no_grad() if odd_about == "no grad" else contextlib.nullcontext()

    def compute():
        with mode:
            return context_parallel(q, k, v, rows=rows, **options)

    return compute


@checked
def compared(group, case):
    """What every rank says, and that the group can be used afterwards."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    try:
        call_of(group, case, rank == 1)()
    except (ValueError, TypeError) as error:
        text = str(error)
    else:
        raise AssertionError("computed")
    assert text.startswith(f"rank {rank} of {n}: "), text
    call_of(group, case, False)()
    return text.removeprefix(f"rank {rank} of {n}: ")


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("case", [*DIFFERENT, *OTHERS])
def test_what_differs_is_named_on_every_rank(ranks, case, n):
    texts = ranks.run(n, compared, case)
    if case == "a refusal":
        assert texts[0] == f"rank 1 refuses its arguments: TypeError: {texts[1]}" and texts[1].startswith("scale: "), texts
        return
    name, *values = (case, *DIFFERENT[case][3:]) if case in DIFFERENT else OTHERS[case]
    usual, other = values if len(values) == 2 else values * 2
    assert len(set(texts)) == 1 and texts[0].startswith("the ranks' arguments differ: "), texts
    said = [part for part in texts[0].removeprefix("the ranks' arguments differ: ").split("; ") if part.startswith(f"{name}: ")]
    assert len(said) == 1, texts
    them = "rank 0" if n == 2 else "ranks 0, 2, 3"
    one, differs = said[0].split(f" on {them}, but ")
    assert usual in one and other in differs and differs.endswith(" on rank 1") and differs != f"{one.removeprefix(f'{name}: ')} on rank 1"
    assert texts[0].endswith("; accepted: the same on every rank")


def test_every_option_is_compared():
    not_given = {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}  # Rows has them
    assert set(DIFFERENT) == set(_attention._OPTIONS) - not_given - {"return_lse"}  # which says what a rank wants to know


@checked
def alike(group):
    """What differs by right: rows and their numbers, biases with queries, the generators of all ranks but the first."""
    rank = dist.get_rank(group)
    for length, block in ((LENGTH, 16), (17, 16), (1, 128)):  # some ranks have one row, which looks like one that is broadcast
        for move in ("keys", "ring", "heads"):
            rows = Rows.contiguous(length, group, block=block)
            torch.manual_seed(rank)
            q = torch.randn(1, HEADS, rows.count, 8, requires_grad=True)
            own = (HEADS // rows.ranks, length, length) if move == "heads" else (HEADS, rows.count, length)
            options = {"bias": torch.randn(own, requires_grad=True), "mask": torch.rand(own) < 0.9, "dropout_p": 0.1, "causal": True}
            context_parallel(q, q, q, rows=rows, move=move, **options).sum().backward()


def test_what_may_differ(ranks):
    ranks.run(3, alike)


@checked
def over_a_mesh(group, case):
    from torch.distributed.device_mesh import DeviceMesh

    rows = Rows.zigzag(LENGTH, DeviceMesh("cpu", torch.arange(4).view(2, 2)), block=16)
    rank = dist.get_rank(group)
    torch.manual_seed(rank)
    q = torch.randn(1, HEADS, rows.count, 8)
    bias, sink = torch.randn(HEADS // 2, rows.over_keys.count, LENGTH), SINK
    context_parallel(q, q, q, rows=rows, bias=bias, sink=sink)
    try:
        context_parallel(q, q, q, rows=rows, bias=bias, sink=changed(sink) if rank == 2 else sink)
    except ValueError as error:
        return str(error)
    raise AssertionError("computed")


def test_a_mesh_of_two_dimensions(ranks):
    for rank, text in enumerate(ranks.run(4, over_a_mesh, "sink")):
        assert text.startswith(f"rank {rank} of 4: the ranks' arguments differ: sink: float32 12 on cpu hash "), text
        assert " on ranks 0, 1, 3, but " in text and " on rank 2; accepted" in text


def test_ranks_are_numbered():
    for ranks, said in (([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([0, 2, 3, 4, 7], "ranks 0, 2 to 4, 7")):
        assert _parallel_check._numbered(ranks) == said
