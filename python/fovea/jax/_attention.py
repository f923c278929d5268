# SPDX-License-Identifier: Apache-2.0
"""fovea.jax.attention: turns the arguments of users into those of the primitive.

The checks here are of what the C library cannot see: which arguments are arrays, and choices by name. The library checks
shapes, types and options while JAX traces, with its own messages, and what is in cu_seqlens and seqused when the call
runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Optional, Union, overload

import jax
import jax.numpy as jnp

from .. import _abi
from .._api import backends
from .._problem import (
    _ALIGN, _SWAP, _integer, _length, _window, choose, flag, need_align, real, shape_text,
)  # fmt: skip
from . import _primitives
from ._call import SEED, Call

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._options import Align, Layout
    from ._options import Options

_HALVES = ("bfloat16", "float16")


@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: Literal[False] = False, **options: Unpack[Options]) -> jax.Array: ...
@overload
def attention(q: Any, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[Options]) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(
    q: Any, k: Any, v: Any, *, return_lse: bool, **options: Unpack[Options]
) -> Union[jax.Array, tuple[jax.Array, jax.Array]]: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Optional[Any] = None,
    bias2: Optional[Any] = None,
    mask: Optional[Any] = None,
    scale: Optional[float] = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    align: Optional[Align] = None,
    softcap: float = 0.0,
    alibi_slopes: Optional[Any] = None,
    sink: Optional[Any] = None,
    dropout_p: float = 0.0,
    dropout_key: Optional[Any] = None,
    cu_seqlens_q: Optional[Any] = None,
    cu_seqlens_k: Optional[Any] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    seqused_q: Optional[Any] = None,
    seqused_k: Optional[Any] = None,
    batch_shape: Optional[Sequence[int]] = None,
    layout: Layout = "bshd",
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Optional[str] = None,
) -> Any:
    """Computes softmax(scale * q @ k.T + ...) @ v exactly, with every gradient, in memory linear in the lengths.

    It is differentiable in q, k, v, bias, bias2 and sink, through out and through lse, in reverse mode. It works under jit,
    grad, vmap, remat and shard_map, on the CPU and on NVIDIA GPUs. In the shapes below B is the batch, Sq and Sk are the
    numbers of queries and keys, Hq and Hk the numbers of heads, D and Dv the head dimensions of q and k and of v. Two
    variants of these shapes exist. A batch may have two levels, (B1, B2, S, H, D). With cu_seqlens_q and cu_seqlens_k the
    sequences are packed one after the other without padding, (total, H, D). docs/semantics.md states the formula,
    docs/jax.md how this works together with the rest of JAX.

    Args:
        q: Queries, (B, Sq, Hq, D): float32, float16, bfloat16 or, on the CPU, float64.
        k: Keys, (B, Sk, Hk, D), of q's type. Hq is a multiple of Hk; query head h reads key head h // (Hq // Hk).
        v: Values, (B, Sk, Hk, Dv), of q's type.
        bias: Added to the scaled and soft-capped scores. It broadcasts to (B, Hq, Sq, Sk), with packed sequences to
            (B, Hq, max_seqlen_q, max_seqlen_k). Any floating-point type; float64 only with float64 q. Its gradient has
            the shape of the bias as it was given, so do not broadcast a bias that is shared.
        bias2: A second bias, likewise.
        mask: bool, true where a pair of query and key takes part. It broadcasts as bias does.
        scale: Factor of the scores; None is 1 / sqrt(D). A Python number.
        causal: Query i sees the keys j <= i + shift; see align.
        window: (left, right), in positions: query i sees the keys from i + shift - left to i + shift + right. -1 is
            unbounded.
        align: "bottom_right" makes shift = Sk - Sq, so that the last query meets the last key, as in FlashAttention.
            "top_left" makes shift = 0, as is_causal of jax.nn.dot_product_attention does. With causal, window or
            alibi_slopes it is required where Sq and Sk differ, or where lengths are given.
        softcap: c > 0 replaces a score s by c * tanh(s / c), before biases are added. 0: none.
        alibi_slopes: (Hq,), (B, Hq) or (B1, B2, Hq): adds -slope * abs(i + shift - j). It has no gradient. It is
            converted to float32, or to float64 with float64 q.
        sink: (Hq,): one more logit of each head in the softmax, without a value. float32 (float64 with float64 q) or 16
            bits; its gradient has its type.
        dropout_p: Probability in [0, 1] with which each attention weight is dropped.
        dropout_key: A key of jax.random, which decides the mask of dropout: its first two words are the seed and the
            following ones, if it has four, the offset. Required with dropout_p > 0. Split it for each call. The mask does not
            depend on how arrays are sharded; within shard_map each part is a call of its own.
        cu_seqlens_q: (B + 1,), int32 or int64: packed sequence b has the query rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1].
        cu_seqlens_k: The same for the keys.
        max_seqlen_q: At least the length of the longest packed sequence; with seqused_q at least the longest used length.
            None reads it from cu_seqlens_q when the call runs, which is possible on the CPU only.
        max_seqlen_k: The same for the keys.
        seqused_q: (B,), int32 or int64: how many query rows of each sequence exist, from its first row on.
        seqused_k: The same for the keys.
        batch_shape: (B1, B2): makes the packed sequences a batch of two levels.
        layout: The order of dimensions of q, k, v and out: "bshd" is (B, S, H, D), "bhsd" is (B, H, S, D).
        deterministic: The same inputs give the same bits in every run. On the CPU they always do.
        return_lse: Also returns the logsumexp of each query's scores.
        backend: A name from fovea.backends(); None takes the best that can compute the problem.

    Returns:
        out, (B, Sq, Hq, Dv) in q's layout and type. With return_lse the pair (out, lse), where lse is (B, Hq, Sq) in
        every layout, packed (Hq, total_q), and float32 (float64 with float64 q).

    Raises:
        ValueError: A shape or a value is not accepted. Every error names the argument, what it was and what is
            accepted. What is in cu_seqlens or seqused is checked when the call runs: jax.errors.JaxRuntimeError then has the text.
        TypeError: A type or a keyword is not accepted.
        NotImplementedError: No backend here computes this problem, or a second derivative is requested.
        MemoryError: There is too little memory.

    Example:
        >>> import jax, fovea.jax
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))           # batch, sequence, heads, D
        >>> jax.grad(lambda q: fovea.jax.attention(q, k, v, causal=True).sum())(q).shape
        (1, 4, 2, 8)
    """
    arrays = {"q": _array("q", q), "k": _array("k", k), "v": _array("v", v)}
    optional = {"bias": bias, "bias2": bias2, "mask": mask, "alibi_slopes": alibi_slopes, "sink": sink,
                "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q,
                "seqused_k": seqused_k}  # fmt: skip
    arrays.update((name, _array(name, x)) for name, x in optional.items() if x is not None)
    _convert(arrays)
    packed = cu_seqlens_q is not None or cu_seqlens_k is not None
    heads_first = choose("layout", layout, _SWAP)
    if heads_first and packed:
        raise ValueError("layout: 'bhsd' with cu_seqlens; accepted: 'bshd', as packed tensors are (total, H, D)")
    for name in ("q", "k", "v"):
        rank = arrays[name].ndim
        if rank != 3 if packed else rank not in (4, 5):
            dims = "H, S, D" if heads_first else "S, H, D"
            accepted = "(total, H, D), as cu_seqlens are given" if packed else f"(B, {dims}) or (B1, B2, {dims})"
            raise ValueError(f"{name}: shape {shape_text(arrays[name].shape)}; accepted: {accepted}")
    probability = _number("dropout_p", dropout_p)
    if probability != 0:
        if dropout_key is None:
            raise ValueError(
                f"dropout_key: None with dropout_p={probability:g}; accepted: a key of jax.random, another one for each call"
            )
        arrays[SEED] = _words(dropout_key)
    if backend is not None:
        choose("backend", backend, backends())
    left, right = _window(window)
    call = Call(
        direction=_abi.FORWARD,
        given=tuple(arrays),
        results=("out", "lse") if flag("return_lse", return_lse) else ("out",),
        causal=flag("causal", causal),
        left=left,
        right=right,
        align=align,
        scale=None if scale is None else _number("scale", scale),
        softcap=_number("softcap", softcap),
        dropout_p=probability,
        max_seqlen_q=_length("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=_length("max_seqlen_k", max_seqlen_k),
        batch_outer=0 if batch_shape is None else _batch_outer(batch_shape, arrays),
        heads_first=heads_first,
        deterministic=flag("deterministic", deterministic),
        backend=backend,
    )
    choose("align", align, _ALIGN)
    if align is None:
        same = cu_seqlens_q is cu_seqlens_k and seqused_q is seqused_k
        _need_no_align(call, arrays, same)
    results = _primitives.differentiable(call, *_alike(arrays.values()))
    return tuple(results) if return_lse else results[0]


def _array(name: str, value: Any) -> Any:
    try:
        return jnp.asarray(value)
    except TypeError:
        raise TypeError(f"{name}: a {type(value).__name__}; accepted: an array") from None


def _convert(arrays: dict[str, Any]) -> None:
    """Small inputs in the type that the library accepts; a gradient has the type of what was given."""
    wider = jnp.float64 if arrays["q"].dtype == jnp.float64 else jnp.float32
    for name, kinds in (("sink", _HALVES), ("alibi_slopes", (*_HALVES, "float64"))):
        if name in arrays and str(arrays[name].dtype) in kinds:
            arrays[name] = arrays[name].astype(wider)
    for name in ("seqused_q", "seqused_k"):
        if name in arrays and arrays[name].dtype == jnp.int64:  # what 32 bits cannot hold stays out of range
            arrays[name] = jnp.clip(arrays[name], -1, 2**31 - 1).astype(jnp.int32)


def _number(name: str, value: Any) -> float:
    if isinstance(value, jax.Array):
        hint = "; what is learnt can multiply q" if name == "scale" else ""
        raise TypeError(f"{name}: a jax.Array; accepted: a number of Python's, which has no gradient{hint}")
    return real(name, value)


def _words(key: Any) -> Any:
    """Seed and offset: four words of 32 bits."""
    if not isinstance(key, jax.Array) and not hasattr(key, "dtype"):
        raise TypeError(f"dropout_key: {key!r}; accepted: a key, such as jax.random.key(0)")
    words = jax.random.key_data(key) if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jnp.asarray(key)
    if words.dtype != jnp.uint32 or words.shape not in ((2,), (4,)):
        raise TypeError(
            f"dropout_key: {words.dtype} of shape {shape_text(words.shape)}; accepted: one key, of two or four words of uint32"
        )
    return jnp.concatenate([words, jnp.zeros(4 - words.shape[0], jnp.uint32)])


def _batch_outer(batch_shape: Any, arrays: dict[str, Any]) -> int:
    lengths = arrays.get("cu_seqlens_q", arrays.get("cu_seqlens_k"))
    if lengths is None:
        raise ValueError("batch_shape: given without cu_seqlens; accepted: None, five dimensions say it")
    if not isinstance(batch_shape, (tuple, list)) or len(batch_shape) != 2:
        raise TypeError(f"batch_shape: {batch_shape!r}; accepted: a pair of integers (B1, B2)")
    outer, inner = (_integer("batch_shape", n) for n in batch_shape)
    batch = lengths.shape[0] - 1 if lengths.ndim == 1 else 0
    if outer < 1 or outer * inner != batch:
        given = shape_text((outer, inner))
        raise ValueError(f"batch_shape: {given}; accepted: B1 x B2 = {batch}, the number of sequences")
    return outer


def _need_no_align(call: Call, arrays: dict[str, Any], same_lengths: bool) -> None:
    """Refuses a missing alignment, unless queries and keys have the same lengths."""
    if call.causal:
        what = "causal"
    elif call.left != -1 or call.right != -1:
        what = "window"
    elif "alibi_slopes" in arrays:
        what = "alibi_slopes"
    else:
        return
    sq, sk = (call.rows_first(arrays[name].shape)[-3] for name in ("q", "k"))
    if not same_lengths:
        raise ValueError(need_align(what, "lengths that are not known while JAX traces"))
    if sq != sk and not call.packed:
        raise ValueError(need_align(what, f"Sq={sq} and Sk={sk}"))


def _alike(arrays: Any) -> list[Any]:
    """Within shard_map: every array as varying over the axes that any of them varies over, so that the gradient of
    one that the devices share is summed over them."""
    found = list(arrays)
    if not hasattr(jax, "typeof"):
        return found
    axes = [_primitives.varying(jax.typeof(x)) for x in found]
    union: frozenset[Any] = frozenset().union(*axes)
    if not union:
        return found
    lax: Any = jax.lax

    def vary(x: Any, missing: tuple[Any, ...]) -> Any:
        if not missing:
            return x
        return lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, missing)

    return [vary(x, tuple(union - have)) for x, have in zip(found, axes)]
