# SPDX-License-Identifier: Apache-2.0
"""Every option, forward and every gradient under jit, beside the fp64 reference of the C library, on JAX's first device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fovea
import fovea.jax

# Of each case: q's, k's and v's shapes, arrays by shape (or a maker of a fixed one), options. The dtype of biases is q's.
B, S, H, D = 2, 37, 4, 16
ROWS = {"q": (B, S, H, D), "k": (B, S, H, D), "v": (B, S, H, D)}
TWO = {"q": (2, 3, 19, 4, 8), "k": (2, 3, 23, 2, 8), "v": (2, 3, 23, 2, 8)}
LENGTHS = np.array([37, 11], np.int32)
CU_Q, CU_K = np.array([0, 5, 5, 26], np.int32), np.array([0, 9, 12, 30], np.int32)
MASK = np.random.default_rng(7).random((B, 1, S, S)) < 0.7
KEY = np.array([17, 4, 5, 6], np.uint32)
CASES = {
    "plain": (ROWS, {}),
    "grouped": ({**ROWS, "k": (B, 50, 2, D), "v": (B, 50, 2, 24)}, {"causal": True, "align": "bottom_right"}),
    "one key head": ({**ROWS, "k": (B, 50, 1, D), "v": (B, 50, 1, D)}, {"causal": True, "align": "top_left"}),
    "window": (ROWS, {"window": (6, 2), "scale": 0.3}),
    "softcap": (ROWS, {"softcap": 3.0, "causal": True}),
    "shared bias": ({**ROWS, "bias": (1, H, S, S)}, {"causal": True}),
    "two biases": ({**ROWS, "bias": (B, 1, 1, S), "bias2": (H, S, S)}, {"mask": MASK}),
    "slopes": (ROWS, {"alibi_slopes": np.array([0.5, 0.25, 0.125, 0.0625], np.float32)}),
    "sink": ({**ROWS, "sink": (H,)}, {"window": (9, 0)}),
    "lengths": (ROWS, {"seqused_q": LENGTHS, "seqused_k": LENGTHS[::-1].copy(), "causal": True, "align": "bottom_right"}),
    "packed": (
        {"q": (26, 4, 16), "k": (30, 2, 16), "v": (30, 2, 16), "bias": (1, 4, 21, 18)},
        {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_K, "max_seqlen_q": 21, "max_seqlen_k": 18, "causal": True,
         "align": "bottom_right"},
    ),
    "two levels": ({**TWO, "bias": (2, 1, 4, 19, 23)}, {}),
    "heads first": ({"q": (B, H, S, D), "k": (B, 2, S, D), "v": (B, 2, S, D), "bias": (H, S, S)}, {"layout": "bhsd"}),
    "dropout": ({**ROWS, "bias": (1, H, S, S)}, {"dropout_p": 0.2, "causal": True, "dropout_key": KEY}),
    "deterministic": ({**ROWS, "bias": (1, 1, S, S)}, {"deterministic": True}),
}  # fmt: skip
# On a GPU the kernels split a number of 32 bits into two of 16.
TOLERANCE = {"float32": 1e-5 if jax.default_backend() == "cpu" else 5e-5, "float16": 4e-3, "bfloat16": 3e-2}


def reference(arrays, options, grad_out, grad_lse):
    """out, lse and the gradients, in fp64."""
    options = dict(options)
    key = options.pop("dropout_key", None)
    if key is not None:
        options.update(seed=int(key[0]) | int(key[1]) << 32, offset=int(key[2]) | int(key[3]) << 32)
    options.setdefault("backend", "reference")
    if "alibi_slopes" in options:
        options["alibi_slopes"] = options["alibi_slopes"].astype(np.float64)
    options.pop("deterministic", None)
    rows = [arrays[name] for name in ("q", "k", "v")]
    options.update({name: x for name, x in arrays.items() if name not in ("q", "k", "v")})
    out, lse = fovea.attention(*rows, return_lse=True, **options)
    grads = fovea.attention_backward(grad_out, *rows, out, lse, grad_lse=grad_lse, **options)
    return out, lse, {name: getattr(grads, name) for name in arrays}


def far(found, wanted):
    """The largest difference, as a part of the largest number."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted)
    finite = np.isfinite(wanted)
    assert found.shape == wanted.shape and (np.isfinite(found) == finite).all()
    assert (found[~finite] == wanted[~finite]).all()
    found, wanted = found[finite], wanted[finite]
    return np.abs(found - wanted).max(initial=0) / max(1e-3, np.abs(wanted).max(initial=0))


RUNS = [(case, dtype) for case in CASES for dtype in ("float32", "bfloat16")]
RUNS += [(case, "float16") for case in ("plain", "grouped", "packed")]


@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_case(case, dtype):
    shapes, options = CASES[case]
    random = np.random.default_rng(3)
    arrays = {
        name: jnp.asarray(random.standard_normal(shape), "float32" if name == "sink" else dtype) for name, shape in shapes.items()
    }
    given = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}

    def run(arrays):
        others = {name: x for name, x in arrays.items() if name not in ("q", "k", "v")}
        return fovea.jax.attention(arrays["q"], arrays["k"], arrays["v"], return_lse=True, **others, **given)

    with_gradients = jax.jit(lambda arrays, cotangents: (lambda out, pull: (out, pull(cotangents)[0]))(*jax.vjp(run, arrays)))
    shapes_of = jax.eval_shape(run, arrays)
    grad_out = jnp.asarray(random.standard_normal(shapes_of[0].shape), dtype)
    grad_lse = jnp.asarray(random.standard_normal(shapes_of[1].shape), "float32")
    (out, lse), grads = with_gradients(arrays, (grad_out, grad_lse))

    exact = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    wanted_out, wanted_lse, wanted = reference(exact, options, np.asarray(grad_out, np.float64), np.asarray(grad_lse, np.float64))
    assert out.dtype == dtype and lse.dtype == jnp.float32
    assert far(out, wanted_out) < TOLERANCE[dtype]
    assert far(lse, wanted_lse) < TOLERANCE["float32"]
    for name, grad in grads.items():
        assert grad.dtype == arrays[name].dtype, name
        assert far(grad, wanted[name]) < TOLERANCE[dtype], name
