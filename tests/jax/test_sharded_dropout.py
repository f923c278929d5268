# SPDX-License-Identifier: Apache-2.0
"""Dropout of sharded arrays: whatever the sharding, out, lse and gradients have the bits that one device computes. A forward
and its backward may be split in different ways: in eager mode and with a jit for each, the backward sees its own shardings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fovea.jax

KEY = jax.random.key(2)
# More rows than the 16 that dropout folds. Of each case: q's, k's and v's shapes, those of other arrays, options.
S, D = 20, 8
ROWS = {name: (4, S, 4, D) for name in "qkv"}
CASES = {
    "dense": (ROWS, {"causal": True}),
    "heads first": ({name: (4, 4, S, D) for name in "qkv"}, {"layout": "bhsd"}),
    "grouped": ({"q": (2, S, 4, D), "k": (2, S, 2, D), "v": (2, S, 2, D)}, {}),
    "one key head": ({"q": (2, S, 4, D), "k": (2, S, 1, D), "v": (2, S, 1, D)}, {}),
    "shared": ({**ROWS, "bias": (1, 4, S, S), "sink": (4,)}, {}),
    "two levels": ({**{name: (2, 2, S, 4, D) for name in "qkv"}, "bias": (2, 1, 4, S, S)}, {}),
    "lengths": (ROWS, {"seqused_q": [20, 7, 0, 11], "seqused_k": [20, 9, 5, 3]}),
    "two levels, lengths": ({name: (2, 2, S, 4, D) for name in "qkv"}, {"seqused_k": [20, 9, 5, 3]}),
    "packed": ({name: (31, 4, D) for name in "qkv"}, {"cu_seqlens_q": [0, 20, 20, 31], "cu_seqlens_k": [0, 3, 12, 31]}),
    "packed, two levels": (
        {name: (31, 4, D) for name in "qkv"},
        {"cu_seqlens_q": [0, 9, 20, 20, 31], "cu_seqlens_k": [0, 12, 15, 27, 31], "batch_shape": (2, 2)},
    ),
}  # fmt: skip
# Of each run: the case, how q, k and v are sharded, and how out's gradient is.
RUNS = [
    ("dense", P("a"), P("a", None, "b")),
    ("dense", P(None, None, "b"), P("a")),
    ("dense", P("a", None, "b"), P("b", None, "a")),
    ("dense", P(("b", "a")), P()),
    ("dense", P(None, None, ("b", "a")), P(None, "a")),
    ("dense", P(), P("b")),
    ("dense", P("b", "a"), P(None, "b", None, "a")),
    ("heads first", P("a", "b"), P(None, "a")),
    ("grouped", P("b", None, "a"), P("a")),
    ("one key head", P("a"), P(None, None, ("a", "b"))),
    ("shared", P(("a", "b")), P(None, None, "b")),
    ("two levels", P("a", "b"), P(None, "a", None, "b")),
    ("two levels", P(None, "b", None, "a"), P("b")),
    ("lengths", P("b", None, "a"), P("a")),
    ("two levels, lengths", P("a", None, None, "b"), P(None, None, None, ("a", "b"))),
    ("packed", P(None, "a"), P(None, ("b", "a"))),
    ("packed, two levels", P(None, "b"), P()),
]


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))


def put(x, spec):
    return jax.device_put(x, NamedSharding(mesh(), spec))


def normal(seed, shape):
    return jax.random.normal(jax.random.key(seed), shape)


def call_of(options):
    given = {name: jnp.array(x) if isinstance(x, list) else x for name, x in options.items()}
    if any(name.startswith(("cu_", "seqused")) for name in given):
        given["align"] = "top_left"

    def run(arrays):
        rows = (arrays[name] for name in "qkv")
        others = {name: x for name, x in arrays.items() if name not in "qkv"}
        return fovea.jax.attention(*rows, return_lse=True, dropout_p=0.4, dropout_key=KEY, **others, **given)

    return run


def with_gradients(run):
    def function(arrays, cotangents):
        results, pull = jax.vjp(run, arrays)
        return results, pull(cotangents)[0]

    return function


def jitted_apart(run):
    def function(arrays, cotangents):
        results, pull = jax.jit(lambda arrays: jax.vjp(run, arrays))(arrays)
        return results, jax.jit(lambda pull, cotangents: pull(cotangents)[0])(pull, cotangents)

    return function


WAYS = {
    "eager": with_gradients,
    "one jit": lambda run: jax.jit(with_gradients(run)),
    "a jit each": jitted_apart,
    "remat": lambda run: jax.jit(with_gradients(jax.checkpoint(run))),
}


def same(found, wanted, summed):
    """The same bits; of what is summed over devices nearly the same numbers."""
    (results, grads), (wanted_results, wanted_grads) = found, wanted
    for x, y in zip(results, wanted_results):
        np.testing.assert_array_equal(x, y)
    for name, grad in grads.items():
        if name in summed:
            np.testing.assert_allclose(grad, wanted_grads[name], rtol=0, atol=2e-5)
        else:
            np.testing.assert_array_equal(grad, wanted_grads[name], err_msg=name)


# Of cases other than the dense one, eager mode and one jit make the calls of all ways.
ALL = [(*run, way) for run in RUNS for way in (WAYS if run[0] == "dense" else ("eager", "one jit"))]


@pytest.mark.parametrize(("case", "spec", "cotangent", "way"), ALL, ids=str)
def test_mask_is_that_of_one_device(case, spec, cotangent, way):
    shapes, options = CASES[case]
    run = call_of(options)
    arrays = {name: normal(n, shape) for n, (name, shape) in enumerate(shapes.items())}
    cotangents = tuple(normal(9 + n, x.shape) for n, x in enumerate(jax.eval_shape(run, arrays)))
    wanted = with_gradients(run)(arrays, cotangents)
    shared = {"bias", "sink"} | ({"k", "v"} if case == "one key head" else set())
    split = {name: x if name in shared else put(x, spec) for name, x in arrays.items()}
    same(WAYS[way](run)(split, (put(cotangents[0], cotangent), cotangents[1])), wanted, shared)


@pytest.mark.parametrize("spec", [P("a"), P(None, None, ("a", "b")), P("a", None, "b")], ids=str)
def test_nothing_is_gathered(spec):
    arrays = {name: put(normal(n, ROWS[name]), spec) for n, name in enumerate("qkv")}
    run = call_of({})
    cotangents = (arrays["v"], normal(3, (4, 4, S)))
    text = jax.jit(with_gradients(run)).lower(arrays, cotangents).compile().as_text()
    assert "fovea_forward" in text and "fovea_backward" in text
    assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text


def test_one_device_numbers_no_streams():
    """What is not split stays the call that it is without a mesh."""
    arrays = {name: normal(n, ROWS[name]) for n, name in enumerate("qkv")}
    replicated = {name: put(x, P()) for name, x in arrays.items()}
    run = jax.jit(call_of({}))
    for given, streams in ((arrays, False), (replicated, False), ({name: put(x, P("a")) for name, x in arrays.items()}, True)):
        text = run.lower(given).compile().as_text()
        line = next(line for line in text.splitlines() if 'custom_call_target="fovea_forward"' in line)
        assert ("u32[2,4,2]" in line) == streams, line


MAPPED = [P("a"), P(None, "a"), P(None, None, None, ("a", "b")), P("a", "b")]


@pytest.mark.parametrize("way", ["eager", "one jit"])
@pytest.mark.parametrize("spec", MAPPED, ids=str)
def test_vmap(spec, way):
    """Also of sharded arrays a slice has the mask that it has alone, with its own key."""
    arrays = {name: normal(n, (4, *ROWS[name])) for n, name in enumerate("qkv")}
    keys = jax.random.split(KEY, 4)
    cotangent = normal(3, arrays["q"].shape)

    def one(arrays, key):
        return fovea.jax.attention(*(arrays[name] for name in "qkv"), dropout_p=0.4, dropout_key=key)

    def run(arrays):
        return (jax.vmap(one)(arrays, keys),)

    split = {name: put(x, spec) for name, x in arrays.items()}
    wanted = with_gradients(run)(arrays, (cotangent,))
    same(WAYS[way](run)(split, (put(cotangent, P(None, None, None, "b")),)), wanted, set())
    for n in range(4):
        np.testing.assert_array_equal(wanted[0][0][n], one({name: x[n] for name, x in arrays.items()}, keys[n]))


@pytest.mark.parametrize("axes", [{"a", "b"}, {"a"}], ids=lambda axes: "+".join(sorted(axes)))
def test_shard_map(axes):
    """Within shard_map a part is a call of its own, with the mask that it has alone, also where it is sharded over other axes."""
    if not getattr(jax.config, "jax_use_shardy_partitioner", False):
        pytest.skip("JAX before 0.7 has another shard_map and another partitioner")
    arrays = {name: normal(n, ROWS[name]) for n, name in enumerate("qkv")}
    run = call_of({})
    mapped = jax.shard_map(run, mesh=mesh(), in_specs=P("a"), out_specs=P("a"), axis_names=axes)
    cotangents = (normal(3, ROWS["q"]), normal(4, (4, 4, S)))
    halves = [jax.tree.map(lambda x: x[part], (arrays, cotangents)) for part in (slice(2), slice(2, 4))]  # noqa: B023
    wanted = jax.tree.map(lambda *x: jnp.concatenate(x), *(with_gradients(run)(*half) for half in halves))
    split = {name: put(x, P("a", None, "b")) for name, x in arrays.items()}
    same(jax.jit(with_gradients(mapped))(split, cotangents), wanted, set())
