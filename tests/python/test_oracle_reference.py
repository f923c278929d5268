# SPDX-License-Identifier: Apache-2.0
"""The fp64 reference, through the Python package, against the oracle: every feature and every pair of features."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT / "tests/python"))
sys.path.insert(0, str(ROOT / "python"))
import fovea  # noqa: E402
import oracle  # noqa: E402
import oracle_cases  # noqa: E402

UNTOUCHED = 777.0
ULP = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def untouched(shape, element):
    return np.full(shape, UNTOUCHED, element)


def assert_rounded(name, actual, expected):
    """Equal but for one rounding to the actual's type, and what sums in another order make of fp64."""
    assert actual.shape == expected.shape, name
    ulp = ULP[actual.dtype.name]
    absolute = {"float16": 2.0**-24, "bfloat16": 2.0**-40}.get(actual.dtype.name, 1e-13)
    relative = 1e-11 if ulp == ULP["float64"] else 0.51 * ulp
    np.testing.assert_allclose(actual.astype(np.float64), expected, rtol=relative, atol=absolute, err_msg=name)


def check(row, seed):
    case = oracle_cases.make(row, seed)
    expected, expected_lse = oracle.forward(case.q, case.k, case.v, fill=UNTOUCHED, **case.options)
    out = untouched(case.shape_out, case.element)
    returned, lse = fovea.attention(case.q, case.k, case.v, out=out, return_lse=True, backend="reference", **case.options)
    assert returned is out
    assert lse.dtype == case.wide
    exists = expected_lse != UNTOUCHED
    # 777 is not a bf16; what was written there before is what has to be there now.
    expected[expected == UNTOUCHED] = float(np.asarray(UNTOUCHED).astype(case.element))
    assert_rounded("out", out, expected)
    assert_rounded("lse", lse[exists], expected_lse[exists])

    # The backward from the out and lse as they were rounded; rows that do not exist hold anything.
    lse = np.where(exists, lse, np.array(np.nan, lse.dtype))
    given = np.where(out == np.asarray(UNTOUCHED).astype(case.element), np.array(np.nan, case.element), out)
    inputs = {"q": case.q, "k": case.k, "v": case.v, **{n: case.options[n] for n in ("bias", "bias2", "sink") if n in case.options}}
    grads_out = {name: untouched(value.shape, value.dtype) for name, value in inputs.items()}
    fovea.attention_backward(case.grad_out, case.q, case.k, case.v, given, lse, grad_lse=case.grad_lse,
                             grads_out=grads_out, backend="reference", **case.options)
    expected = oracle.backward(case.grad_out, case.q, case.k, case.v, given, lse, grad_lse=case.grad_lse,
                               fill=UNTOUCHED, **case.options)
    assert set(expected) == set(grads_out)
    for name, grad in expected.items():
        grad[grad == UNTOUCHED] = float(np.asarray(UNTOUCHED).astype(grads_out[name].dtype))
        assert_rounded(f"grad_{name}", grads_out[name], grad)


@pytest.mark.parametrize("row", oracle_cases.singles(), ids=oracle_cases.name_of)
def test_every_feature(row):
    check(row, seed=3)


@pytest.mark.parametrize("row", oracle_cases.pairwise(), ids=oracle_cases.name_of)
def test_every_pair_of_features(row):
    check(row, seed=4)


def assert_accumulated(name, actual, expected, held):
    """Up to the roundings of what is held and of the sum, which may be smaller than both."""
    ulp = max(ULP[actual.dtype.name], 1e-11)
    size = np.maximum(np.abs(np.where(np.isfinite(held), held, 0)), np.abs(np.where(np.isfinite(expected), expected, 0)))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(actual), finite, err_msg=name)
    assert np.all(np.abs(actual[finite] - expected[finite]) <= 2 * ulp * size[finite] + 1e-13), name


def check_accumulation(row, seed):
    """Results of fp32 and fp64 that are combined with what their tensors hold."""
    case = oracle_cases.make(row, seed)
    wide = np.float64 if case.element == np.float64 else np.float32
    random = np.random.default_rng(seed)
    own_out, own_lse = oracle.forward(case.q, case.k, case.v, fill=UNTOUCHED, **case.options)
    held_lse = random.normal(size=own_lse.shape).astype(wide)
    held_lse[random.random(held_lse.shape) < 0.2] = -np.inf  # rows that have met no key
    held_out = random.normal(size=case.shape_out).astype(wide)
    np.moveaxis(held_out, -2, -3)[held_lse == -np.inf] = 0
    expected, expected_lse = oracle.accumulated((held_out, held_lse), own_out, own_lse, UNTOUCHED)
    out, lse = held_out.copy(), held_lse.copy()
    fovea.attention(case.q, case.k, case.v, out=out, lse=lse, accumulate=True, backend="reference", **case.options)
    assert_accumulated("out", out, expected, held_out)
    assert_accumulated("lse", lse, expected_lse, held_lse)

    inputs = {"q": case.q, "k": case.k, "v": case.v, **{n: case.options[n] for n in ("bias", "bias2", "sink") if n in case.options}}
    exists = own_lse != UNTOUCHED
    given = np.where(own_out == UNTOUCHED, np.nan, own_out).astype(case.element)
    given_lse = np.where(exists, own_lse, np.nan).astype(case.wide)
    held = {name: random.normal(size=value.shape).astype(np.float64 if value.dtype == np.float64 else np.float32)
            for name, value in inputs.items()}  # fmt: skip
    grads_out = {name: value.copy() for name, value in held.items()}
    fovea.attention_backward(case.grad_out, case.q, case.k, case.v, given, given_lse, grad_lse=case.grad_lse, grads_out=grads_out,
                             accumulate=list(grads_out), backend="reference", **case.options)
    own = oracle.backward(case.grad_out, case.q, case.k, case.v, given, given_lse, grad_lse=case.grad_lse, fill=UNTOUCHED,
                          **case.options)
    for name, grad in oracle.added(held, own, UNTOUCHED).items():
        assert_accumulated(f"grad_{name}", grads_out[name], grad, held[name])


@pytest.mark.parametrize("row", oracle_cases.singles(), ids=oracle_cases.name_of)
def test_accumulation(row):
    check_accumulation(row, seed=5)


@pytest.mark.parametrize("row", oracle_cases.pairwise()[::3], ids=oracle_cases.name_of)
def test_accumulation_of_pairs(row):
    check_accumulation(row, seed=6)


def test_the_comparison_can_fail():
    """One element off by two roundings is seen, in every type."""
    for element in oracle_cases.TYPES.values():
        values = np.array([1.0, 1.5]).astype(element)
        with pytest.raises(AssertionError):
            assert_rounded("values", values, np.array([1.0, 1.5 * (1 + 2 * max(ULP[values.dtype.name], 1e-11))]))
        if values.dtype.name in ("float32", "float64"):
            with pytest.raises(AssertionError):
                assert_accumulated("values", values, np.array([1.0, 1.5 * (1 + 4 * max(ULP[values.dtype.name], 1e-11))]), values)


@pytest.mark.parametrize("rng", ["fovea", "torch_mem_efficient"])
@pytest.mark.parametrize("p", [0.0, 0.2, 0.9, 1.0])
def test_dropout_mask(rng, p):
    batch, heads, rows, keys = 2, 2, 21, 18
    seed, offset = 0xFEDCBA9876543210, 0x123456789
    mask = fovea.dropout_mask(batch, heads, rows, keys, p, seed=seed, offset=offset, rng=rng)
    expected = [[[[p < 1 and oracle.keeps(p, seed, offset, rng, b * heads + h, i, j, rows * keys, keys)
                   for j in range(keys)] for i in range(rows)] for h in range(heads)] for b in range(batch)]
    assert mask.dtype == bool and mask.shape == (batch, heads, rows, keys)
    np.testing.assert_array_equal(mask, expected)
