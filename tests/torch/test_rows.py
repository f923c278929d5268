# SPDX-License-Identifier: Apache-2.0
"""fovea.torch.Rows have their plans from the library's planner; it is compared with a second implementation in Python."""

import ctypes
import itertools
import random
import sys

import pytest

from conftest import ROOT
from fovea import _abi
from fovea.torch import Rows

sys.path.insert(0, str(ROOT / "tests/python"))
import rows_formulas  # noqa: E402


def lengths(draw):
    """Few long ones, many short ones, empty ones, some alike."""
    found = [int(100 * draw.paretovariate(0.7)) % 20000 for _ in range(draw.randrange(12))]
    return [n for n in found for _ in range(draw.choice([1, 1, 1, 3]))] + [0] * draw.randrange(2)


@pytest.mark.parametrize("seed", range(300))
def test_plans_are_those_of_the_formulas(seed):
    draw = random.Random(seed)
    ranks, block = draw.choice([1, 2, 3, 4, 5, 7, 8, 16, 64]), draw.choice([1, 7, 16, 128, 128, 1000])
    packed, length = lengths(draw), draw.choice([0, 1, 100, 8192, 9999, draw.randrange(200000)])
    for kind, given, rows in (
        ("zigzag", [length], Rows.zigzag(length, ranks, block=block)),
        ("contiguous", [length], Rows.contiguous(length, ranks, block=block)),
        ("packed", packed, Rows.packed([0, *itertools.accumulate(packed)], ranks, block=block)),
        ("packed contiguous", packed, Rows.packed([0, *itertools.accumulate(packed)], ranks, block=block, contiguous=True)),
    ):
        expected = rows_formulas.plan(kind, given, ranks, block)
        assert rows.pieces == tuple(expected), (kind, given, ranks, block)
        assert rows.counts == tuple(sum(piece.rows for piece in mine) for mine in expected)
        assert rows.lengths == tuple(given) and rows.total == sum(given) and rows.ranks == ranks


@pytest.mark.parametrize("seed", range(40))
def test_balance_is_that_of_the_formulas(seed):
    draw = random.Random(seed)
    given, ranks = [n % 700 for n in lengths(draw)], draw.choice([1, 2, 3, 5])
    causal, window = draw.choice([True, False]), (draw.choice([-1, 0, 5, 300]), draw.choice([-1, 0, 5, 300]))
    kind = draw.choice(["packed", "packed contiguous"])
    rows = Rows.packed([0, *itertools.accumulate(given)], ranks, block=16, contiguous=kind != "packed")
    right = 0 if causal else window[1]
    pairs = [rows_formulas.count_of_pairs(mine, given, window[0], right) for mine in rows_formulas.plan(kind, given, ranks, 16)]
    assert rows.balance(causal, window) == (max(pairs) * ranks / sum(pairs) if sum(pairs) else 1.0)


@pytest.mark.parametrize("seed", range(60))
def test_plans_over_two_dimensions(seed):
    draw = random.Random(seed)
    ranks, members, block = draw.choice([1, 2, 3]), draw.choice([1, 2, 4, 5]), draw.choice([1, 16, 128])
    kind = draw.choice(["zigzag", "contiguous", "packed", "packed contiguous"])
    given = lengths(draw) if "packed" in kind else [draw.randrange(5000)]
    rows = Rows(kind, given, ranks * members, ranks, block, members)
    assert rows.pieces == tuple(map(tuple, rows_formulas.plan(kind, given, ranks, block, members)))
    assert rows.ranks == ranks * members


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: Rows.zigzag(2**31 + 1, 2), ValueError, "lengths: 2147483649 at place 0; accepted: 0 or more, and at most 2147483648 rows"),
        (lambda: Rows.zigzag(2**64, 2), ValueError, "rows: 18446744073709551616; accepted: at most 2^31"),
        (lambda: Rows.contiguous(10, 2, block=2**70), ValueError, "block: "),
        (lambda: Rows.contiguous(10, 70000), ValueError, "ranks: 70000; accepted: 1 to 65536"),
        (lambda: Rows.contiguous(10, 2**40), ValueError, "ranks: 1099511627776; accepted: 1 to 65536"),
        (lambda: Rows.contiguous(10, 2**64 + 2), ValueError, "ranks: 18446744073709551618; accepted: "),
        (lambda: Rows.zigzag(10, 2).balance(window=(-5, 0)), ValueError, "window: -5; accepted: -1"),
        (lambda: Rows.zigzag(10, 2).balance(window=(2**70, 0)), ValueError, "window: 1180591620717411303424; accepted: an integer of 64 bits"),
    ],
)
def test_what_the_planner_refuses(make, error, says):
    with pytest.raises(error) as refused:
        make()
    assert says in str(refused.value)


def test_a_window_of_any_size():
    assert Rows.zigzag(1000, 2).balance(False, (2**62, 2**62)) == Rows.zigzag(1000, 2).balance(False)


def test_the_struct_has_no_field_that_is_not_used():
    """A field that c.h gets has to be thought of here."""
    assert [name for name, *_ in _abi.Rows._fields_] == [
        "size", "kind", "flags", "ranks", "head_ranks", "block", "sequences", "lengths", "window_left", "window_right", "rows", "pairs",
        "sends", "receives", "piece_counts", "pieces", "piece_capacity", "balance"]  # fmt: skip
    assert ctypes.sizeof(_abi.Rows) == 136
