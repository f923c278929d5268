# SPDX-License-Identifier: Apache-2.0
"""Attention with the arguments of others: jax.nn.dot_product_attention, and the attention functions of flax."""

from __future__ import annotations

from typing import Any, Literal, Optional, Union

import jax
import jax.numpy as jnp

from .._problem import flag, shape_text
from ._attention import _array, attention


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Optional[Any] = None,
    mask: Optional[Any] = None,
    *,
    scale: Optional[float] = None,
    is_causal: bool = False,
    query_seq_lengths: Optional[Any] = None,
    key_value_seq_lengths: Optional[Any] = None,
    local_window_size: Union[int, tuple[int, int], None] = None,
    implementation: Optional[Literal["xla", "cudnn"]] = None,
    return_residual: bool = False,
) -> Any:
    """Computes what jax.nn.dot_product_attention computes, argument for argument.

    It differs in three things. A row without any key gives 0 (there: the mean of all values). Biases have their gradient in the
    shape given, summed inside. The logsumexp has a gradient and is float32.

    Args:
        query: (B, T, N, H) or (T, N, H).
        key: (B, S, K, H) or (S, K, H), of the same type. N is a multiple of K.
        value: (B, S, K, H) or (S, K, H); its last dimension may differ.
        bias: Added to the scores; it broadcasts to (B, N, T, S) or (N, T, S).
        mask: bool, true where a pair takes part; it broadcasts as bias does.
        scale: Factor of the scores; None is 1 / sqrt(H).
        is_causal: Query i sees the keys j <= i, from the top left, whatever the lengths.
        query_seq_lengths: (B,), int32: rows beyond are 0.
        key_value_seq_lengths: (B,), int32: keys beyond take no part.
        local_window_size: (left, right), or an integer for both: query i sees the keys i - left to i + right.
        implementation: None, "xla" or "cudnn"; it has no effect.
        return_residual: Also returns the logsumexp of each query's scores, (B, T, N) or (T, N).

    Returns:
        An array of query's shape and type, with return_residual the pair of it and the logsumexp.

    Raises:
        ValueError: See attention().
        TypeError: See attention().
        NotImplementedError: See attention().

    Example:
        >>> import jax, fovea.jax
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))           # batch, sequence, heads, D
        >>> fovea.jax.dot_product_attention(q, k, v, is_causal=True).shape
        (1, 4, 2, 8)
    """
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(f"implementation: {implementation!r}; accepted: None, 'xla', 'cudnn'")
    arrays = [_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    ranks = {x.ndim for x in arrays}
    if ranks not in ({3}, {4}):
        shapes = ", ".join(shape_text(x.shape) for x in arrays)
        raise ValueError(f"query, key, value: shapes {shapes}; accepted: (B, T, N, H) or (T, N, H), all of them alike")
    alone = ranks == {3}
    if alone:
        arrays = [x[None] for x in arrays]
    window = (-1, -1)
    if local_window_size is not None:
        window = (local_window_size, local_window_size) if isinstance(local_window_size, int) else local_window_size
        # JAX takes a negative side for a number of keys, fovea for no end.
        if isinstance(window, (tuple, list)) and any(hasattr(side, "__index__") and side < 0 for side in window):
            raise ValueError(f"local_window_size: {local_window_size!r}; accepted: sides of 0 or more, or None")
    out, lse = attention(
        *arrays, bias=bias, mask=mask, scale=scale, causal=is_causal, window=window, align="top_left",
        seqused_q=query_seq_lengths, seqused_k=key_value_seq_lengths, return_lse=True,
    )  # fmt: skip
    lse = jnp.swapaxes(lse, 1, 2)
    if alone:
        out, lse = out[0], lse[0]
    return (out, lse) if flag("return_residual", return_residual) else out


def flax_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Optional[Any] = None,
    mask: Optional[Any] = None,
    broadcast_dropout: bool = True,
    dropout_rng: Optional[Any] = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Optional[Any] = None,
    precision: Optional[Any] = None,
    module: Optional[Any] = None,
    is_causal: bool = False,
    **unknown: Any,
) -> jax.Array:
    """Attention for flax: attention_fn= of linen.MultiHeadDotProductAttention and of nnx.MultiHeadAttention.

    Args:
        query: (..., Sq, H, D), with any number of batch dimensions.
        key: (..., Sk, H, D).
        value: (..., Sk, H, Dv).
        bias: Added to the scores; it broadcasts to (..., H, Sq, Sk).
        mask: Not 0 where a pair takes part, of any type; it broadcasts as bias does.
        broadcast_dropout: One mask of dropout for the whole batch, flax's default. It is refused with dropout: set it to False.
        dropout_rng: A key of jax.random, for dropout.
        dropout_rate: Probability with which each attention weight is dropped.
        deterministic: No dropout. (Not fovea's option of that name.)
        dtype: The type of the computation; None is that of the arguments.
        precision: Has no effect.
        module: Where flax would record the weights, which do not exist here: refused unless None.
        is_causal: Query i sees the keys j <= i.
        **unknown: Other arguments of flax's functions: refused unless they are None or False.

    Returns:
        An array of (..., Sq, H, Dv).

    Raises:
        NotImplementedError: Dropout that is broadcast, or weights that are to be recorded. See also attention().
        ValueError: See attention().
        TypeError: See attention().

    Example:
        >>> import jax, fovea.jax
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))           # batch, sequence, heads, D
        >>> fovea.jax.flax_attention(q, k, v, is_causal=True).shape
        (1, 4, 2, 8)
    """
    for name, given in {"module": module, **unknown}.items():
        if given is not None and given is not False:
            raise NotImplementedError(f"{name}: given; accepted: None, as the attention weights do not exist")
    dropout = 0.0 if deterministic else dropout_rate
    if dropout != 0 and broadcast_dropout:
        raise NotImplementedError("broadcast_dropout: True with dropout; accepted: False, a mask for each of the batch")
    arrays = [_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    wanted = dtype if dtype is not None else jnp.result_type(*arrays)
    arrays = [x.astype(wanted) for x in arrays]
    batch = arrays[0].shape[:-3]
    planes = [None if x is None else _array(name, x) for name, x in (("bias", bias), ("mask", mask))]
    if len(batch) not in (1, 2):

        def folded(x: Any) -> Any:
            if x is None or len(batch) == 0:
                return x
            return jnp.broadcast_to(x, (*batch, *x.shape[max(0, x.ndim - 3) :])).reshape(-1, *x.shape[-3:])

        planes = [x if x is None or x.ndim <= 3 else folded(x) for x in planes]
        arrays = [x.reshape(-1, *x.shape[-3:]) for x in arrays]
    if planes[1] is not None:
        planes[1] = planes[1].astype(bool)
    out = attention(
        *arrays, bias=planes[0], mask=planes[1], causal=is_causal, align="top_left", dropout_p=dropout,
        dropout_key=dropout_rng if dropout != 0 else None,
    )  # fmt: skip
    return out if len(batch) in (1, 2) else out.reshape(*batch, *out.shape[1:])
