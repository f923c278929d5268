# SPDX-License-Identifier: Apache-2.0
"""The oracle is right by standards of its own: dropout's published vectors, finite differences, softmax by NumPy."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests/python"))
import oracle  # noqa: E402
import oracle_cases  # noqa: E402
from covering import covered_by, pairs_of  # noqa: E402

# seed, offset, n, i, j, u, head words, folded (i, j), (x, y): the specification's known answers.
KNOWN_ANSWERS = [
    (0x0, 0x0, 0x0, 0, 0, 9096, "8f153672 aa0515e7 1eb61a26 9941fcb2", "06a62388 65087b1c"),
    (0x0, 0x0, 0x0, 0, 8, 1702, "8f153672 aa0515e7 1eb61a26 9941fcb2", "06a62388 65087b1c"),
    (0x0, 0x0, 0x0, 8, 0, 31516, "8f153672 aa0515e7 1eb61a26 9941fcb2", "06a62388 65087b1c"),
    (0x0, 0x0, 0x0, 8, 8, 25864, "8f153672 aa0515e7 1eb61a26 9941fcb2", "06a62388 65087b1c"),
    (0x0, 0x0, 0x0, 0, 1, 46128, "8f153672 aa0515e7 1eb61a26 9941fcb2", "7645b430 45ab92a6"),
    (0x0, 0x0, 0x0, 1, 0, 16118, "8f153672 aa0515e7 1eb61a26 9941fcb2", "89f73ef6 064eba66"),
    (0x1, 0x0, 0x0, 0, 0, 18188, "e8c4af4e 8d2f1c6a 0d8a8b8c e23442db", "2e65470c e50e7a78"),
    (0x0, 0x1, 0x0, 0, 0, 63250, "9e3dc1cd be8ad2ca a82652c1 01301369", "e7def712 fceef256"),
    (0x0, 0x0, 0x1, 0, 0, 47424, "a1fe6ac4 9e7daa01 9dffb87e 84f8a057", "c553b940 1fcb5ee1"),
    (0x2A, 0x7, 0x5, 100, 200, 45306, "a608880c 6b868009 050cadcf 3cce542c", "b0fad92f d9da196f"),
    (0x123456789ABCDEF, 0xFEDCBA9876543210, 0x1FFF, 16383, 16376, 17031, "998c3aec b75bd4d2 1a0f740b 300d56cd",
     "519ce1e2 4287e3f3"),
    (0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF, 0x123456789, 131071, 1000000, 43033,
     "527bae81 cb1f1065 9187b2a6 14cddaac", "8c87434f 14f0a819"),
]


def numbers(text):
    return tuple(int(word, 16) for word in text.split())


def test_philox_of_random123():
    counter = numbers("243f6a88 85a308d3 13198a2e 03707344")
    key = numbers("a4093822 299f31d0")
    assert oracle.philox4x32(counter, key) == numbers("d16cfe09 94fdcceb 5001e420 24126ea1")
    k = 0x13198A2E
    assert oracle.philox2x32(counter[:2], (k, k), 7) == numbers("bedbbe6b e4c770b3")
    assert oracle.philox2x32(counter[:2], (k, k), 10) == numbers("dd7ce038 f62a4c12")


@pytest.mark.parametrize("seed, offset, n, i, j, u, head, call", KNOWN_ANSWERS)
def test_dropout_known_answers(seed, offset, n, i, j, u, head, call):
    k0, k1, w0, w1 = oracle.head_words(seed, offset, n)
    assert (k0, k1, w0, w1) == numbers(head)
    folded = ((i >> 4) * 8 + (i & 7), (j >> 4) * 8 + (j & 7))
    assert oracle.philox2x32((folded[0] ^ w0, folded[1] ^ w1), (k0, k1), 8) == numbers(call)
    assert oracle.dropout_value(seed, offset, n, i, j) == u


def test_torch_uniform_range_and_mean():
    values = [float(oracle.torch_uniform(42, n)) for n in range(2000)]
    assert all(0 < u <= 1 for u in values)
    assert abs(np.mean(values) - 0.5) < 4 * np.sqrt(1 / 12 / len(values))


def test_every_pair_of_feature_values_has_a_case():
    rows = oracle_cases.pairwise()
    every = pairs_of(oracle_cases.FEATURES, oracle_cases.legal)
    assert len(every) > 1500
    assert every <= set().union(*(covered_by(oracle_cases.FEATURES, row) for row in rows))
    assert len(rows) < 80


def test_plain_softmax():
    case = oracle_cases.make({**oracle_cases.PLAIN, "rows": "short"})
    out, lse = oracle.forward(case.q, case.k, case.v)
    s = np.einsum("bihd,bjhd->bhij", case.q, case.k) / np.sqrt(case.q.shape[-1])
    e = np.exp(s)
    np.testing.assert_allclose(lse, np.log(e.sum(-1)), rtol=1e-13)
    np.testing.assert_allclose(out, np.einsum("bhij,bjhd->bihd", e / e.sum(-1, keepdims=True), case.v), rtol=1e-12)


def with_input(case, name, value):
    inputs = {"q": case.q, "k": case.k, "v": case.v}
    options = dict(case.options)
    (inputs if name in inputs else options)[name] = value
    return inputs, options


def loss(case, name, value):
    inputs, options = with_input(case, name, value)
    out, lse = oracle.forward(**inputs, **options)
    total = float((case.grad_out * out).sum())
    if case.grad_lse is not None:
        alive = np.isfinite(lse)
        total += float((case.grad_lse[alive] * lse[alive]).sum())
    return total


FP64_ROWS = [row for row in oracle_cases.pairwise() if row["type"] == "fp64"] + oracle_cases.singles()


@pytest.mark.parametrize("row", [{**row, "bias_type": "own"} for row in FP64_ROWS if row["type"] == "fp64"],
                         ids=oracle_cases.name_of)
def test_gradients_are_finite_differences(row):
    """Along a random direction of each input; the direction covers every element at once."""
    case = oracle_cases.make(row, seed=1)
    out, lse = oracle.forward(case.q, case.k, case.v, **case.options)
    grads = oracle.backward(case.grad_out, case.q, case.k, case.v, out, lse, grad_lse=case.grad_lse, **case.options)
    rng = np.random.default_rng(2)
    for name, grad in grads.items():
        value = getattr(case, name) if name in "qkv" else case.options[name]
        assert grad.shape == value.shape
        direction = rng.standard_normal(value.shape)
        step = 1e-5
        difference = (loss(case, name, value + step * direction) - loss(case, name, value - step * direction)) / (2 * step)
        assert difference == pytest.approx(float((grad * direction).sum()), rel=1e-6, abs=1e-8), name
