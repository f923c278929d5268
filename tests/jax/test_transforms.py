# SPDX-License-Identifier: Apache-2.0
"""jit, grad, vmap, remat, shard_map, sharded arrays under plain jit, dropout from keys, flax, and jax.nn's own function."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fovea
import fovea.jax

attention = fovea.jax.attention


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def close(found, wanted, tolerance=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * max(1, float(jnp.abs(y).max()))), found, wanted)


def mesh_of(shape, names):
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), names)


# ---- jax.nn.dot_product_attention ----

THEIRS = [
    {},
    {"is_causal": True, "scale": 0.4},
    {"local_window_size": 3},
    {"local_window_size": (5, 1), "is_causal": True},
    {"query_seq_lengths": jnp.array([9, 4]), "key_value_seq_lengths": jnp.array([11, 6])},
    {"query_seq_lengths": jnp.array([9, 4]), "key_value_seq_lengths": jnp.array([11, 6]), "is_causal": True},
    {"bias": normal(8, 1, 4, 9, 11), "mask": jax.random.bernoulli(jax.random.key(3), 0.8, (2, 1, 9, 11)).at[..., 0].set(True)},
]


@pytest.mark.parametrize("options", THEIRS, ids=lambda options: "+".join(options) or "plain")
@pytest.mark.parametrize("heads", [4, 2])
def test_dot_product_attention(options, heads):
    q, k, v = normal(0, 2, 9, 4, 16), normal(1, 2, 11, heads, 16), normal(2, 2, 11, heads, 16)
    options = {**options}
    bias = {"bias": options.pop("bias")} if "bias" in options else {}

    def both(function):
        return jax.jit(jax.value_and_grad(lambda a, b: (function(*a, **b, **options) * q[..., ::-1]).sum(), (0, 1)))((q, k, v), bias)

    close(both(fovea.jax.dot_product_attention), both(jax.nn.dot_product_attention), 2e-5)


def test_dot_product_attention_without_a_batch():
    q, k, v = (normal(n, 9, 4, 16) for n in range(3))
    out, lse = fovea.jax.dot_product_attention(q, k, v, return_residual=True, implementation="cudnn")
    close(out, jax.nn.dot_product_attention(q, k, v))
    scores = jnp.einsum("tnh,snh->tns", q, k) / 4
    close(lse, jax.nn.logsumexp(scores, axis=-1))


# ---- vmap ----


def slices(function, size, *arguments):
    return jax.tree.map(lambda *x: jnp.stack(x), *(function(*jax.tree.map(lambda x: x[n], arguments)) for n in range(size)))  # noqa: B023


ARRAYS = {
    "bias": normal(5, 3, 4, 7, 7), "bias2": normal(6, 3, 2, 1, 1, 7), "alibi_slopes": jnp.abs(normal(7, 3, 4)),
    "seqused_k": jnp.array([[7, 3], [5, 5], [1, 7]], jnp.int32), "sink": normal(9, 3, 4),
}  # fmt: skip


@pytest.mark.parametrize("names", [(), ("bias",), ("bias", "bias2"), ("alibi_slopes",), ("seqused_k",), ("sink",)], ids=str)
def test_vmap(names):
    """Slices in one call are what each slice is alone, with every gradient."""
    rows = tuple(normal(n, 3, 2, 7, 4, 8) for n in range(3))
    more = {name: ARRAYS[name] for name in names}
    learnt = {name: x for name, x in more.items() if name not in ("alibi_slopes", "seqused_k")}
    fixed = {name: x for name, x in more.items() if name not in learnt}

    def loss(rows, learnt, fixed):
        out, lse = attention(*rows, return_lse=True, **learnt, **fixed)
        return (out * jnp.cos(out)).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    one = jax.value_and_grad(loss, (0, 1))
    close(jax.jit(jax.vmap(one))(rows, learnt, fixed), slices(one, 3, rows, learnt, fixed))


def test_vmap_is_one_call_and_maps_only_what_is_mapped():
    q, bias = normal(0, 5, 2, 7, 4, 8), normal(3, 4, 7, 7)
    k = q[0]
    jaxpr = str(jax.make_jaxpr(jax.vmap(lambda q: attention(q, k, k, bias=bias)))(q))
    assert jaxpr.count("fovea_attention") == 1 and "scan" not in jaxpr
    close(jax.vmap(lambda q: attention(q, k, k, bias=bias))(q), jnp.stack([attention(x, k, k, bias=bias) for x in q]))


def test_vmap_in_vmap_merges_levels():
    q = normal(0, 2, 3, 2, 7, 4, 8)
    for bias, calls in ((normal(3, 4, 7, 7), 1), (normal(3, 2, 4, 7, 7), 1)):
        function = jax.vmap(jax.vmap(lambda q: attention(q, q, q, bias=bias)))  # noqa: B023
        jaxpr = str(jax.make_jaxpr(function)(q))
        assert jaxpr.count("fovea_attention") == calls and "scan" not in jaxpr
        wanted = [[attention(x, x, x, bias=bias) for x in row] for row in q]
        close(function(q), jnp.stack([jnp.stack(row) for row in wanted]))


def test_vmap_without_one_call_for_all():
    """Biases that differ in both mapped dimensions and not in the batch between; the packed form; dropout."""
    q, bias = normal(0, 2, 3, 2, 7, 4, 8), normal(3, 2, 3, 2, 4, 7, 7)
    other = normal(4, 3, 4, 7, 7)
    function = jax.vmap(jax.vmap(lambda q, b, c: attention(q, q, q, bias=b, bias2=c)), in_axes=(0, 0, None))
    wanted = [[attention(x, x, x, bias=b, bias2=other[n]) for n, (x, b) in enumerate(zip(*rows))] for rows in zip(q, bias)]
    close(function(q, bias, other), jnp.stack([jnp.stack(row) for row in wanted]))

    packed, cu = normal(1, 3, 9, 4, 8), jnp.array([0, 4, 9])
    one = jax.grad(lambda x: (attention(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu) ** 2).sum())
    close(jax.vmap(one)(packed), slices(one, 3, packed))

    keys = jax.random.split(jax.random.key(1), 3)
    rows = normal(1, 3, 2, 7, 4, 8)

    def dropped(x, key):
        return attention(x, x, x, dropout_p=0.5, dropout_key=key)

    close(jax.vmap(dropped)(rows, keys), jnp.stack([dropped(x, key) for x, key in zip(rows, keys)]))


# ---- gradients ----


def test_remat_computes_again_and_gives_the_same():
    q = normal(0, 2, 7, 4, 8)
    key = jax.random.key(3)

    def loss(q):
        return (attention(q, q, q, causal=True, dropout_p=0.3, dropout_key=key) ** 2).sum()

    again = jax.grad(jax.checkpoint(loss))
    close(again(q), jax.grad(loss)(q))
    assert str(jax.make_jaxpr(again)(q)).count("fovea_attention[") == 2 + 1  # forward, forward again, backward


def test_only_what_is_needed_is_computed():
    q, bias = normal(0, 1, 7, 2, 8), normal(1, 2, 7, 7)
    jaxpr = str(jax.make_jaxpr(jax.grad(lambda b: attention(q, q, q, bias=b).sum()))(bias))
    assert "results=('grad_bias',)" in jaxpr
    plain = jax.jit(lambda q: attention(q, q, q)).lower(q).as_text()
    assert plain.count("@fovea_forward(") == 1 and "-> tensor<1x7x2x8xf32>" in plain  # no lse


def test_of_lse_alone():
    q, k = normal(0, 1, 7, 2, 8), normal(1, 1, 7, 2, 8)

    def by_formula(q):
        return jax.nn.logsumexp(jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(8), axis=-1).sum()

    close(jax.grad(lambda q: attention(q, k, k, return_lse=True)[1].sum())(q), jax.grad(by_formula)(q))


def test_types_of_gradients():
    q = normal(0, 1, 7, 2, 8).astype(jnp.bfloat16)
    bias, sink = normal(1, 2, 7, 7), normal(2, 2).astype(jnp.bfloat16)
    grads = jax.grad(lambda *x: attention(x[0], q, q, bias=x[1], sink=x[2]).sum().astype(jnp.float32), (0, 1, 2))(q, bias, sink)
    assert [str(x.dtype) for x in grads] == ["bfloat16", "float32", "bfloat16"]


# ---- dropout ----


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_dropout_has_the_bits_of_the_library(impl):
    """With v the unit matrix an output row is its row of weights."""
    size, p = 24, 0.4
    key = jax.random.key(11, impl=impl)
    words = [int(word) for word in jax.random.key_data(key)] + [0, 0]
    v = jnp.broadcast_to(jnp.eye(size)[None, :, None], (2, size, 3, size))
    q = normal(0, 2, size, 3, 8)
    out = jax.jit(lambda key: attention(q, q, v, dropout_p=p, dropout_key=key))(key)
    seed, offset = words[0] | words[1] << 32, words[2] | words[3] << 32
    kept = fovea.dropout_mask(2, 3, size, size, p, seed=seed, offset=offset)
    assert ((np.asarray(out).transpose(0, 2, 1, 3) != 0) == (np.asarray(kept) != 0)).all()
    other = attention(q, q, v, dropout_p=p, dropout_key=jax.random.split(key)[0])
    assert not np.array_equal(other, out)
    close(attention(q, q, v, dropout_p=p, dropout_key=jax.random.key_data(key)), out, 0)


# ---- several devices ----

SPECS = {"batch": P("x"), "heads": P(None, None, "x"), "both": P("x", None, "y"), "rows": P(None, "x")}


@pytest.mark.parametrize("where", SPECS)
@pytest.mark.parametrize("key_heads", [8, 4, 1])
def test_sharded_arrays_under_jit(where, key_heads):
    """Batch and heads stay where they are, and nothing is gathered; the shared bias's gradient is summed."""
    spec = SPECS[where]
    mesh = mesh_of((2, 2), ("x", "y")) if where == "both" else mesh_of((4,), ("x",))
    q, k, v = normal(0, 4, 12, 8, 16), normal(1, 4, 12, key_heads, 16), normal(2, 4, 12, key_heads, 16)
    bias = normal(3, 1, 8, 12, 12)
    split = [jax.device_put(x, NamedSharding(mesh, spec)) for x in (q,)]
    of_keys = P(*spec[:2]) if key_heads == 1 else spec
    split += [jax.device_put(x, NamedSharding(mesh, of_keys)) for x in (k, v)]

    def loss(q, k, v, bias):
        out, lse = attention(q, k, v, bias=bias, causal=True, return_lse=True)
        return (out**2).sum() + lse.sum()

    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))
    close(function(*split, bias), function(q, k, v, bias), 5e-6)
    if where != "rows":
        compiled = function.lower(*split, bias).compile()
        text = compiled.as_text()
        assert "fovea_forward" in text and "fovea_backward" in text
        assert "all-gather" not in text and "all-to-all" not in text and "collective-permute" not in text
        assert function(*split, bias)[1][0].sharding.is_equivalent_to(split[0].sharding, 4)


def test_two_levels_and_packed_are_split():
    mesh = mesh_of((4,), ("x",))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    q, bias = normal(0, 2, 4, 7, 4, 8), normal(1, 2, 1, 4, 7, 7)
    function = jax.jit(jax.grad(lambda q, b: (attention(q, q, q, bias=b) ** 2).sum(), (0, 1)))
    for spec in ((None, "x"), (None, None, None, "x")):
        split = put(q, *spec)
        close(function(split, bias), function(q, bias))
        assert "all-gather" not in function.lower(split, bias).compile().as_text()
    packed, cu = normal(0, 12, 4, 8), jnp.array([0, 5, 12])
    packed_function = jax.jit(lambda q: attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu))
    split = put(packed, None, "x")
    close(packed_function(split), packed_function(packed), 0)
    assert "all-gather" not in packed_function.lower(split).compile().as_text()


@pytest.mark.parametrize("check", [True, False])
def test_shard_map(check):
    mesh = mesh_of((4,), ("x",))
    q, bias = normal(0, 8, 9, 4, 16), normal(1, 1, 4, 9, 9)

    def loss(run):
        return jax.jit(jax.value_and_grad(lambda q, b: (run(q, b) ** 2).sum(), (0, 1)))

    def run(q, b):
        return attention(q, q, q, bias=b, causal=True)

    shard_map = getattr(jax, "shard_map", None)
    if shard_map is None:
        from jax.experimental.shard_map import shard_map
    name = "check_vma" if hasattr(jax, "shard_map") else "check_rep"
    if check and name == "check_rep":
        pytest.skip("JAX before 0.7 has no types of what varies: it takes check_rep=False")
    mapped = shard_map(run, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), **{name: check})
    close(loss(mapped)(q, bias), loss(run)(q, bias))


# ---- flax ----


def test_flax():
    linen = pytest.importorskip("flax.linen", reason="flax is not installed")
    from flax import nnx

    x = normal(0, 2, 10, 64)
    mask = linen.make_causal_mask(jnp.ones((2, 10)))
    theirs, ours = (linen.MultiHeadDotProductAttention(num_heads=4, qkv_features=64, **more)
                    for more in ({}, {"attention_fn": fovea.jax.flax_attention}))  # fmt: skip
    parameters = theirs.init(jax.random.key(0), x)
    losses = [jax.value_and_grad(lambda p: (m.apply(p, x, mask=mask) ** 2).sum())(parameters) for m in (theirs, ours)]  # noqa: B023
    close(losses[1], losses[0], 2e-5)

    outs = []
    for more in ({}, {"attention_fn": fovea.jax.flax_attention}):
        layer = nnx.MultiHeadAttention(num_heads=4, in_features=64, decode=False, rngs=nnx.Rngs(0), **more)
        outs.append(layer(x, mask=mask))
    close(outs[1], outs[0], 1e-5)
    layer = nnx.MultiHeadAttention(
        num_heads=4, in_features=64, decode=False, rngs=nnx.Rngs(0), attention_fn=fovea.jax.flax_attention, dropout_rate=0.5,
        broadcast_dropout=False, deterministic=False,
    )  # fmt: skip
    first, second = (layer(x, rngs=nnx.Rngs(n)) for n in (1, 2))
    assert not np.array_equal(first, second) and np.array_equal(first, layer(x, rngs=nnx.Rngs(1)))


def test_flax_attention_folds_batches():
    for batch in ((), (2,), (2, 3), (2, 3, 2)):
        q, bias = normal(0, *batch, 7, 4, 8), normal(1, *batch, 1, 7, 7)
        shape = (-1, 7, 4, 8)
        wanted = jax.nn.dot_product_attention(*(q.reshape(shape),) * 3, bias=bias.reshape(-1, 1, 7, 7)).reshape(q.shape)
        close(fovea.jax.flax_attention(q, q, q, bias=bias), wanted)
        shared = jax.nn.dot_product_attention(*(q.reshape(shape),) * 3, bias=bias.reshape(-1, 1, 7, 7)[:1]).reshape(q.shape)
        close(fovea.jax.flax_attention(q, q, q, bias=bias.reshape(-1, 1, 7, 7)[0]), shared)
    q, bias = normal(0, 3, 2, 2, 7, 4, 8), normal(1, 2, 4, 7, 7)  # of the last batch dimension alone
    wanted = fovea.jax.flax_attention(q, q, q, bias=jnp.broadcast_to(bias, (3, 2, *bias.shape)))
    close(fovea.jax.flax_attention(q, q, q, bias=bias), wanted)


# ---- what is refused ----

Q = jnp.ones((2, 7, 4, 8))
REFUSED = [
    (dict(k=jnp.ones((2, 7, 3, 8))), ValueError, "k: shape 2x7x3x8"),
    (dict(q=jnp.ones((7, 4, 8))), ValueError, "q: shape 7x4x8"),
    (dict(q="queries"), TypeError, "q: a str"),
    (dict(v=jnp.ones((2, 7, 4, 8), jnp.int32)), TypeError, "v: int32"),
    (dict(k=jnp.ones((2, 7, 4, 8), jnp.complex64)), TypeError, "k: complex64"),
    (dict(mask=jnp.ones((7, 7))), TypeError, "mask: fp32"),
    (dict(bias=jnp.ones((3, 7, 7))), ValueError, "bias: shape 3x7x7"),
    (dict(bias=jnp.ones((1,) * 6)), ValueError, "bias: shape 1x1x1x1x1x1"),
    (dict(causal=True, k=jnp.ones((2, 9, 4, 8)), v=jnp.ones((2, 9, 4, 8))), ValueError, "align: None with causal"),
    (dict(window=(0, 0), seqused_k=jnp.array([3, 4])), ValueError, "align: None with window"),
    (dict(align="middle"), ValueError, "align: 'middle'"),
    (dict(layout="sbhd"), ValueError, "layout: 'sbhd'"),
    (dict(window=(-3, 0)), ValueError, "window: -3"),
    (dict(scale=jnp.ones(())), TypeError, "scale: a jax.Array"),
    (dict(softcap=-1.0), ValueError, "softcap: -1"),
    (dict(dropout_p=0.5), ValueError, "dropout_key: None"),
    (dict(dropout_p=0.5, dropout_key=3), TypeError, "dropout_key: 3"),
    (dict(dropout_p=0.5, dropout_key=jnp.ones((3,), jnp.uint32)), TypeError, "dropout_key: uint32 of shape 3"),
    (dict(dropout_p=1.5, dropout_key=jax.random.key(0)), ValueError, "dropout_p: 1.5"),
    (dict(batch_shape=(1, 2)), ValueError, "batch_shape: given without cu_seqlens"),
    (dict(backend="tpu"), ValueError, "backend: 'tpu'"),
]


@pytest.mark.parametrize(("more", "error", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_refused_while_tracing(more, error, text):
    arguments = {"q": Q, "k": Q, "v": Q, **more}
    for function in (attention, lambda **x: jax.eval_shape(lambda: attention(**x))):
        with pytest.raises(error) as caught:
            function(**arguments)
        assert str(caught.value).startswith(text)


def test_refused_when_it_runs():
    """What is in lengths is read by the call; out is not written."""
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT: seqused_k: 99 at index 1"):
        jax.jit(lambda n: attention(Q, Q, Q, seqused_k=n))(jnp.array([3, 99])).block_until_ready()
    packed = jnp.ones((7, 4, 8))
    with pytest.raises(Exception, match=r"INVALID_ARGUMENT: cu_seqlens_q: "):
        cu = jnp.array([0, 5, 3])
        jax.jit(lambda n: attention(packed, packed, packed, cu_seqlens_q=n, cu_seqlens_k=n))(cu).block_until_ready()


def test_derivatives_that_are_refused():
    once = jax.grad(lambda q: (attention(q, Q, Q) ** 2).sum())
    with pytest.raises(NotImplementedError, match=r"fovea.jax.attention: .*second derivative"):
        jax.grad(lambda q: once(q).sum())(Q)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: attention(q, Q, Q), (Q,), (Q,))
    with pytest.raises(ValueError, match="alibi_slopes: its gradient is needed"):
        jax.grad(lambda s: attention(Q, Q, Q, alibi_slopes=s).sum())(jnp.ones(4))


def test_flax_refuses():
    with pytest.raises(NotImplementedError, match="broadcast_dropout: True"):
        fovea.jax.flax_attention(Q, Q, Q, dropout_rate=0.5, dropout_rng=jax.random.key(0))
    with pytest.raises(NotImplementedError, match="module: given"):
        fovea.jax.flax_attention(Q, Q, Q, module=object())
    for window in (-1, (-1, 3), (2, np.int32(-1))):  # JAX computes with such a number as it is
        with pytest.raises(ValueError, match="local_window_size: .*; accepted: sides of 0 or more"):
            fovea.jax.dot_product_attention(Q, Q, Q, local_window_size=window)
    with pytest.raises(ValueError, match="implementation: 'tpu'"):
        fovea.jax.dot_product_attention(Q, Q, Q, implementation="tpu")


def test_empty():
    for b, s, h in itertools.product((0, 2), (0, 3), (0, 4)):
        q = jnp.ones((b, s, h, 8))
        assert attention(q, q, q).shape == q.shape
        assert jax.grad(lambda q: attention(q, q, q).sum())(q).shape == q.shape
