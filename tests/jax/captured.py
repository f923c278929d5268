# SPDX-License-Identifier: Apache-2.0
"""For test_command_buffers.py, in a process of its own, as XLA reads its flags once: a jitted function of several calls runs
some times. Prints how often XLA called fovea, and a hash of every result and gradient."""

import ctypes
import hashlib

import conftest  # noqa: F401

import jax
import jax.numpy as jnp
import numpy as np

import fovea.jax
from fovea import _library
from fovea.jax import _primitives

RUNS = 6
COMPUTE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
called = 0


def counted(name):
    function = COMPUTE((name, _library.lib))

    def call(*arguments):
        global called
        called += 1
        return function(*arguments)

    return COMPUTE(call)


def loss(arrays, lengths, key):
    q, k, v, bias, sink = arrays
    one = fovea.jax.attention(q, k, v, bias=bias, causal=True, deterministic=True)
    two = fovea.jax.attention(jnp.sin(one), k, v, sink=sink, seqused_q=lengths, seqused_k=lengths, deterministic=True)
    three = fovea.jax.attention(two + one, k, v, dropout_p=0.2, dropout_key=key, window=(17, 3), deterministic=True)
    return (three.astype(jnp.float32) ** 2).sum()


def main():
    library = _library.lib
    computing = [counted("fovea_forward"), counted("fovea_backward")]
    others = [ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in ("fovea_workspace", "fovea_last_error")]
    handlers = ctypes.CDLL(str(_library.path.resolve().parent / _primitives._FILE))
    handlers.fovea_xla_connect(*(ctypes.cast(one, ctypes.c_void_p) for one in computing), *others)

    random = np.random.default_rng(1)
    shapes = [(2, 130, 4, 64), (2, 130, 2, 64), (2, 130, 2, 64), (1, 4, 130, 130), (4,)]
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.bfloat16) for shape in shapes]
    lengths = jnp.array([130, 77], jnp.int32)
    step = jax.jit(jax.value_and_grad(loss))
    digest = hashlib.sha256()
    for run in range(RUNS):  # other values, which a replay reads from the same or from other memory
        found = step([x * (1 + run / 8) for x in arrays], lengths - run, jax.random.key(run))
        for x in jax.tree.leaves(jax.block_until_ready(found)):
            assert np.isfinite(np.asarray(x, np.float32)).all()
            digest.update(np.asarray(x).tobytes())
    print(called, digest.hexdigest())


if __name__ == "__main__":
    main()
