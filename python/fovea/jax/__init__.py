# SPDX-License-Identifier: Apache-2.0
"""fovea for JAX: exact fused attention with every gradient, under jit, grad, vmap, remat and shard_map.

attention() is the operator, dot_product_attention() has the arguments of jax.nn.dot_product_attention, and
flax_attention() those of flax's attention functions. docs/jax.md describes them argument by argument.

>>> import jax, fovea.jax
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))       # batch, sequence, heads, head dimension
>>> jax.jit(lambda q, k, v: fovea.jax.attention(q, k, v, causal=True))(q, k, v).shape
(1, 4, 2, 8)
"""

try:
    import jax as _jax
except ImportError as _error:  # pragma: no cover
    raise ImportError("fovea.jax needs JAX: pip install jax, or jax[cuda12] for NVIDIA GPUs") from _error

from ._attention import attention
from ._others import dot_product_attention, flax_attention

del _jax

__all__ = ["attention", "dot_product_attention", "flax_attention"]

for _name in __all__:  # help() and documentation name what users import
    globals()[_name].__module__ = __name__
del _name
