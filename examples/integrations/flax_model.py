# SPDX-License-Identifier: Apache-2.0
"""A flax model whose attention is jax.nn.dot_product_attention, trained with jit and grad."""

import jax
import jax.numpy as jnp
from flax import linen as nn


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        q, k, v = jnp.split(nn.Dense(3 * x.shape[-1])(nn.LayerNorm()(x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in (q, k, v))
        slope = self.param("slope", nn.initializers.ones, (self.heads,))
        places = jnp.arange(x.shape[1])
        bias = -jnp.abs(slope)[:, None, None] * jnp.abs(places[:, None] - places)  # learned, shared by the batch
        y = jax.nn.dot_product_attention(q, k, v, bias=bias[None], is_causal=True)
        x = x + nn.Dense(x.shape[-1])(y.reshape(x.shape))
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x))))


class Model(nn.Module):
    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(32, 32)(ids)
        for _ in range(2):
            x = Block(4)(x)
        return nn.Dense(32)(x)


def main():
    model = Model()
    ids = jax.random.randint(jax.random.key(0), (4, 24), 0, 32)
    parameters = model.init(jax.random.key(1), ids[:, :-1])

    @jax.jit
    def step(parameters):
        def loss_of(parameters):
            logits = jax.nn.log_softmax(model.apply(parameters, ids[:, :-1]))
            return -jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1).mean()

        loss, gradients = jax.value_and_grad(loss_of)(parameters)
        return loss, jax.tree.map(lambda x, g: x - 0.3 * g, parameters, gradients)

    for n in range(8):
        loss, parameters = step(parameters)
        print(f"step {n} loss {float(loss):.6f}")


if __name__ == "__main__":
    main()
