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


def test_the_comparison_can_fail():
    """One element off by two roundings is seen, in every type."""
    for element in oracle_cases.TYPES.values():
        values = np.array([1.0, 1.5]).astype(element)
        with pytest.raises(AssertionError):
            assert_rounded("values", values, np.array([1.0, 1.5 * (1 + 2 * max(ULP[values.dtype.name], 1e-11))]))


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
