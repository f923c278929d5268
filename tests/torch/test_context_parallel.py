# SPDX-License-Identifier: Apache-2.0
"""context_parallel over 2, 3 and 4 processes with gloo: the bits of one process where they are promised."""

import contextlib
import importlib.util
import io
import itertools
import os
import random
import re
import socket
from pathlib import Path

import parallel_cases
import pytest
import torch
import torch.multiprocessing

from conftest import ROOT
from fovea.torch import Rows, context_parallel, explain_context_parallel

TABLE = parallel_cases.table()


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("row", TABLE, ids=parallel_cases.name_of)
def test_one_process(ranks, n, row):
    ranks.run(n, parallel_cases.check, row)


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("row", [row for row in TABLE if row["move"] == "heads"], ids=parallel_cases.name_of)
def test_blocks_of_heads(ranks, n, row):
    ranks.run(n, parallel_cases.check_blocks, row)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_masks_of_dropout(ranks, n):
    ranks.run(n, parallel_cases.masks_of_dropout)


@pytest.mark.parametrize("heads, length, window, bits", [
    (16, 1200, (-1, -1), True), (2, 1300, (300, 0), False), (1, 3000, (-1, -1), False),
])  # fmt: skip
def test_several_blocks_of_keys(ranks, heads, length, window, bits):
    ranks.run(2, parallel_cases.long, heads, length, window, bits)


@pytest.mark.parametrize("row", TABLE[::4], ids=parallel_cases.name_of)
def test_one_rank(ranks, row):
    """A group of one rank computes what attention() does."""
    ranks.run(1, parallel_cases.check, row)


SHAPE = (1, 4, "rows", 8)
PACKED = ("rows", 4, 8)
BIAS = torch.zeros(1, 4, 40, 40)


@pytest.mark.parametrize("kind, length, options, shape, error, text", [
    ("zigzag", 40, {"dropout_p": 0.1, "move": "keys"}, SHAPE, NotImplementedError, "dropout_p: 0.1, with move='keys' and a piece that begins"),
    ("zigzag", 40, {"dropout_p": 0.1, "rng": "torch_mem_efficient"}, (1, 3, "rows", 8), NotImplementedError,
     "no movement computes this: rng: 'torch_mem_efficient', with move='keys'"),
    ("contiguous", 32, {"dropout_p": 0.1, "seqused_k": torch.tensor([3]), "align": "bottom_right", "causal": True, "move": "keys"}, SHAPE,
     NotImplementedError, "seqused_q and seqused_k: not the same tensor, with dropout"),
    ("zigzag", 40, {"move": "heads"}, (1, 3, "rows", 8), NotImplementedError, "k: 3 heads, with move='heads' over 2 ranks"),
    ("zigzag", 40, {"seqused_k": torch.tensor([3]), "causal": True}, SHAPE, ValueError, "align: None with causal, other lengths"),
    ("contiguous", 32, {"position_q": 8, "dropout_p": 0.1, "move": "keys"}, SHAPE, ValueError, "; accepted with dropout: a multiple of 16"),
    ("packed", [0, 30, 40], {"bias": BIAS[..., :20], "move": "keys"}, PACKED, ValueError, "the rows and keys of whole sequences"),
    ("packed", [0, 30, 40], {"cu_seqlens_q": torch.tensor([0, 40])}, PACKED, ValueError, "cu_seqlens_q: given"),
    ("zigzag", 40, {"bias": BIAS}, SHAPE, ValueError, "bias: shape 1x4x40x40; accepted with move='keys'"),
    ("zigzag", 40, {"sink": torch.zeros(3), "move": "keys"}, SHAPE, ValueError, "sink: shape 3; accepted: 4 heads"),
    ("packed", [0, 30, 40], {"bias": BIAS[:1, :, :1, :30], "move": "ring"}, PACKED, NotImplementedError, "bias: given, with move='ring'"),
    ("zigzag", 40, {"dropout_p": 0.1, "move": "ring"}, SHAPE, NotImplementedError, "dropout_p: 0.1, with move='ring' and a piece"),
    ("zigzag", 40, {"move": "rings"}, SHAPE, ValueError, "move: 'rings'; accepted: None, 'keys', 'heads', 'ring'"),
    ("zigzag", 40, {}, (1, 4, 7, 8), ValueError, "q: 7 rows; accepted: "),
    ("zigzag", 40, {"is_causal": True}, SHAPE, TypeError, "is_causal: not an option"),
    ("zigzag", 40, {"batch_shape": (1, 1)}, SHAPE, ValueError, "batch_shape: given; accepted: None"),
    ("zigzag", 40, {"align": "left"}, SHAPE, ValueError, "align: 'left'"),
    ("zigzag", 40, {"softcap": -1.0}, SHAPE, ValueError, "softcap"),
])  # fmt: skip
def test_refusals(ranks, kind, length, options, shape, error, text):
    ranks.run(2, parallel_cases.refused, kind, length, options, shape, error, text)


@pytest.mark.parametrize("n", [2, 3])
def test_seed_is_drawn_once(ranks, n):
    ranks.run(n, parallel_cases.drawn_seed)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_take_and_give(ranks, n):
    ranks.run(n, parallel_cases.taken_and_given)


def test_surroundings(ranks):
    ranks.run(2, parallel_cases.surroundings)


def test_groups_of_heads(ranks):
    ranks.run(2, parallel_cases.many_groups, 40 * 2 * 16 * 4)


@pytest.mark.parametrize("options", [
    {"window": (20, 0)}, {"window": (40, 10)}, {"causal": True, "window": (0, -1)}, {"window": (20, 0), "dropout_p": 0.3},
    {"window": (30, 5), "causal": True, "deterministic": True}, {"window": (16, 0), "softcap": 2.0},
    {"window": (30, 0), "position_q": 7, "position_k": 40}, {"window": (5, 0), "position_k": 700}, {"window": (5, 5), "position_q": 9000},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
@pytest.mark.parametrize("n", [2, 3])
def test_keys_of_a_window(ranks, n, kind, options):
    received = ranks.run(n, parallel_cases.keys_of_a_window, kind, options)
    row = 2 * 2 * 2 * 8 * 4  # bytes of a row of keys and values
    if kind == "contiguous" and options == {"window": (20, 0)}:
        assert received == [32 * row] * n  # 20 rows, from a multiple of 16 on


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("options, planes, learns, groups, layout", [
    ({}, [], "qkv", 1, "bhsd"),
    ({"causal": False}, [], "qkv", 2, "bshd"),
    ({"softcap": 2.0}, ["mask", "alibi_slopes"], "qkv", 2, "bhsd"),
    ({"dropout_p": 0.2, "seed": 5}, [], ["q", "k", "v", "sink"], 2, "bshd"),
    ({"dropout_p": 0.2, "seed": 5}, ["seqused", "bias"], "kv", 1, "bhsd"),
    ({}, [], ["v", "sink"], 1, "bshd"),
    ({}, ["mask", "seqused"], "k", 1, "bhsd"),
    ({"window": (0, 0)}, [], "qkv", 1, "bhsd"),
], ids=str)  # fmt: skip
def test_gradients_of_own_keys(ranks, n, options, planes, learns, groups, layout):
    ranks.run(n, parallel_cases.own_gradients, {"window": (20, 0), **options}, planes, list(learns), groups, layout)


@pytest.mark.parametrize("kind, shape, options", [
    ("zigzag", (2, 2), {"causal": True, "bias": "h,q,k", "sink": True, "alibi": "bh"}),
    ("zigzag", (2, 2), {"causal": True, "length": 20, "mask": "h,q,k", "softcap": 1.5}),
    ("contiguous", (2, 2), {"causal": False, "window": (5, 3), "bias": "h,1,k"}),
    ("packed", (2, 2), {"causal": True, "alibi": "bh", "bias": "h,1,k"}),
    ("zigzag", (2, 1, 2), {"causal": True, "used": "same"}),
    ("zigzag", (1, 4), {"causal": False, "bias": "h,q,k"}),
    ("zigzag", (2, 2), {"causal": True, "dropout": "fovea", "bias": "h,q,k", "window": (5, 3), "align": "top_left"}),
    ("packed", (2, 2), {"causal": False, "dropout": "fovea", "alibi": "h", "batch": "two"}),
])  # fmt: skip
def test_mesh_of_two_dimensions(ranks, kind, shape, options):
    ranks.run(4, parallel_cases.two_dimensions, kind, shape, options)


def test_deterministic(ranks):
    ranks.run(4, parallel_cases.same_twice)


# ---- the example ----

SMALL = ["--length", "600", "--steps", "4", "--layers", "1"]


TRAIN = ROOT / "examples/several_gpus/train.py"


def example(*arguments, path=TRAIN):
    spec = importlib.util.spec_from_file_location("train", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        module.main([*SMALL, *arguments])
    return said.getvalue()


def as_a_rank(rank, ranks, ports, folder):
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
    for number, (port, arguments) in enumerate(zip(ports, WAYS[ranks])):
        os.environ["MASTER_PORT"] = str(port)
        said = example(*arguments)
        if rank == 0:
            Path(folder, f"{ranks}-{number}").write_text(said)


# How many processes run it with which arguments.
WAYS = {
    2: [["--wrap", "ddp", "--move", "keys"], ["--wrap", "fsdp", "--move", "heads"], ["--context", "1"]],
    4: [["--context", "2", "--wrap", "fsdp"], ["--context", "2", "--wrap", "ddp", "--move", "ring"]],
}


def losses(said):
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]


def by_processes(ranks, folder):
    ports = []
    for _ in WAYS[ranks]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    torch.multiprocessing.start_processes(as_a_rank, args=(ranks, ports, str(folder)), nprocs=ranks, start_method="spawn")
    return [losses((folder / f"{ranks}-{number}").read_text()) for number in range(len(WAYS[ranks]))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="compares processes on a CPU")
def test_example(tmp_path):
    """A model trained over processes, with the gradients of DDP and of FSDP, has the losses of one process for each sequence. And the
    lines that make it context parallel are two: without them it is a program for one rank, with the same losses."""
    alone = losses(example())
    assert len(alone) == 4 and alone[-1] < alone[0]
    lines = TRAIN.read_text().splitlines(keepends=True)
    ordinary = [line for line in lines if not line.endswith("  # several ranks\n")]
    assert len(ordinary) == len(lines) - 2
    (tmp_path / "ordinary.py").write_text("".join(ordinary))
    assert losses(example(path=tmp_path / "ordinary.py")) == alone

    ddp, fsdp, data_parallel = by_processes(2, tmp_path)
    assert ddp == pytest.approx(alone, rel=1e-5) and fsdp == pytest.approx(alone, rel=1e-5)
    assert data_parallel[0] != alone[0]  # of two sequences
    for found in by_processes(4, tmp_path):
        assert found == pytest.approx(data_parallel, rel=1e-5)


def test_example_refuses_a_context_that_does_not_divide(capsys):
    with pytest.raises(SystemExit):
        example("--context", "3")
    assert "--context: 3; accepted: a divisor of the 1 ranks" in capsys.readouterr().err


# ---- plans, without processes ----


@pytest.mark.parametrize("n", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("length", [0, 1, 100, 8192, 131072, 131073])
def test_every_row_has_one_rank(n, length):
    plans = [Rows.zigzag(length, n), Rows.contiguous(length, n), Rows.packed([0, length // 3, length // 3, length], n)]
    for rows in plans:
        seen = {b: [] for b in range(len(rows.lengths))}
        for pieces in rows.pieces:
            for piece in pieces:
                seen[piece.sequence].append((piece.start, piece.start + piece.rows))
                assert piece.rows > 0 and piece.start % 128 == 0
            assert all(sum(p.sequence == b for p in pieces) <= 2 for b in seen)
        for b, ranges in seen.items():
            ends = [0, *itertools.chain.from_iterable(sorted(ranges)), rows.lengths[b]]
            assert ends[::2] == ends[1::2]  # each begins where the one before it ends


def pairs(rows, causal, left, right):
    """By counting."""
    found = []
    for pieces in rows.pieces:
        count = 0
        for piece in pieces:
            length = rows.lengths[piece.sequence]
            for i in range(piece.start, piece.start + piece.rows):
                last = i if causal else length - 1 if right < 0 else min(length - 1, i + right)
                count += last - (0 if left < 0 else max(0, i - left)) + 1
        found.append(count)
    return max(found) * len(found) / sum(found)


@pytest.mark.parametrize("window", [(-1, -1), (100, 0), (300, 7), (-1, 20), (5000, -1), (20, 5000)])
@pytest.mark.parametrize("causal", [False, True])
def test_balance_counts_pairs(window, causal):
    for rows in (Rows.zigzag(1000, 3, block=16), Rows.contiguous(777, 4, block=16), Rows.packed([0, 700, 710, 1500], 3, block=16)):
        assert rows.balance(causal, window) == pytest.approx(pairs(rows, causal, *window))


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
def test_balance_of_one_sequence(n):
    for length in (131072, 1 << 20):
        assert Rows.zigzag(length, n).balance() == 1.0
        assert Rows.contiguous(length, n).balance(causal=False) == 1.0
        assert max(Rows.zigzag(length, n).counts) == length // n
        assert Rows.contiguous(length, n).balance(window=(4095, 0)) < 1.05
    assert Rows.contiguous(131072, n).balance() > 1.4  # what zigzag is for
    rows = Rows.zigzag(131072 - 5000, n)  # no multiple of anything
    assert rows.balance() < 1.13 and max(rows.counts) <= 131072 // n


def documents(total, seed):
    """Lengths from 1k to 64k, of which short ones are the most."""
    draw, lengths = random.Random(seed), []
    while sum(lengths) < total:
        lengths.append(min(total - sum(lengths), 65536, int(1024 * draw.paretovariate(1.0))))
    return lengths


@pytest.mark.parametrize("n", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("seed", range(3))
def test_balance_of_documents(n, seed):
    lengths = documents(131072, seed)
    rows = Rows.packed([0, *itertools.accumulate(lengths)], n)
    busiest, fullest = rows.balance(), max(rows.counts) * n / sum(lengths)
    assert max(busiest, fullest) < (1.1 if n <= 8 else 1.25)


def test_explain_needs_no_group():
    q, k = torch.empty(1, 32, 65536, 128, dtype=torch.bfloat16, device="meta"), torch.empty(1, 8, 65536, 128, dtype=torch.bfloat16, device="meta")
    text = explain_context_parallel(q, k, k, rows=Rows.zigzag(131072, 2), causal=True)
    assert text.splitlines()[1].startswith("move: heads, as on one node it computes whole sequences")
    text = explain_context_parallel(q, k, k, rows=Rows.zigzag(131072, 2), move="keys", causal=True)
    assert "groups of heads: 2; each has 268435456 bytes" in text
    assert f"received in the forward: {65536 * 2 * 8 * 128 * 2} bytes" in text
    text = explain_context_parallel(q, k, k, rows=Rows.contiguous(131072, 2), causal=True, window=(4095, 0))
    assert text.splitlines()[1].startswith("move: keys, as a rank receives far fewer bytes, ")
    assert f"received in the forward: {4096 * 2 * 8 * 128 * 2} bytes" in text
    text = explain_context_parallel(q, k, k, rows=Rows.zigzag(131072, 2), move="ring", causal=True)
    assert "steps: 2; each receives 268435456 bytes" in text and "1073741824 bytes of gradients in float32" in text
    text = explain_context_parallel(q, k, k, rows=Rows.zigzag(131072, 2), move="heads")
    assert f"received in the forward: {32768 * 128 * 80 * 2} bytes; in the backward: the same" in text
    text = explain_context_parallel(q.requires_grad_(), k, k, rows=Rows.zigzag(131072, 2), move="heads")
    assert f"in the backward: {32768 * 128 * 64 * 2} bytes" in text  # without the gradients of k and v
    q.requires_grad_(False)
    text = explain_context_parallel(q, k, k, rows=Rows.contiguous(131072, 2), causal=True)
    assert "move: heads, as the rows are unbalanced for keys, 1.50" in text
    with pytest.raises(ValueError, match="without a group"):
        context_parallel(q, k, k, rows=Rows.zigzag(131072, 2))


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("move", ["keys", "heads", "exchange", "ring"])
def test_subsets_of_gradients(ranks, kind, move):
    ranks.run(2, parallel_cases.subsets_of_gradients, kind, move)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "packed"])
@pytest.mark.parametrize("exchange, groups", [(False, 1), (True, 1), (True, 4)])
@pytest.mark.parametrize("names", [["q"], ["v"], ["k", "v"], ["q", "k", "v"], ["sink"], ["q", "sink"]], ids="-".join)
def test_gradients_that_nobody_needs_do_not_move(ranks, names, exchange, groups, kind):
    assert all(ranks.run(2, parallel_cases.gradients_that_move, exchange, kind, groups, names))


@pytest.mark.parametrize("move", ["keys", "ring"])
def test_lengths_are_cut_once(ranks, move):
    ranks.run(3, parallel_cases.lengths_are_cut_once, move)


@pytest.mark.parametrize("most_again", [0, 512])
def test_error_in_an_own_part(ranks, most_again):
    ranks.run(2, parallel_cases.error_in_an_own_part, most_again)


def test_give_has_one_derivative(ranks):
    ranks.run(2, parallel_cases.give_has_one_derivative)


@pytest.mark.parametrize("move", ["keys", "heads", "ring"])
def test_derivatives_that_are_refused(ranks, move):
    ranks.run(2, parallel_cases.derivatives_that_are_refused, move)


def test_small_errors(ranks):
    ranks.run(2, parallel_cases.small_errors)


@pytest.mark.parametrize("move", ["keys", "heads"])
def test_lse_in_the_loss_of_one_rank(ranks, move):
    ranks.run(2, parallel_cases.lse_in_the_loss_of_one_rank, move)
