# SPDX-License-Identifier: Apache-2.0
"""A user's code, for mypy: test_protocol.py."""

import jax
import jax.numpy as jnp

import fovea.jax


def loss(q: jax.Array, bias: jax.Array) -> jax.Array:
    out: jax.Array = fovea.jax.attention(q, q, q, bias=bias, causal=True)
    both: tuple[jax.Array, jax.Array] = fovea.jax.attention(q, q, q, return_lse=True)
    return jnp.sum(out) + jnp.sum(both[1])


def wrong(q: jax.Array) -> None:
    number: int = fovea.jax.attention(q, q, q)  # type: ignore[assignment]
    print(number)
