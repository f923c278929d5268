# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn 2.8, computed by fovea. install("flash_attn") puts them in the package's place.

Signatures, layouts and conventions are flash_attn's: (B, S, H, D), causal masks and windows aligned at the bottom right,
a logsumexp of +inf for rows without keys. docs/integrations/flash_attn.md has every argument.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .._problem import shape_text
from . import _bert_padding, _flash
from ._stand_in import StandIn

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_NAME = "flash_attn"
_VERSION = "2.8.4"  # is imitated: programs compare flash_attn.__version__


def _theirs(lse: Tensor) -> Tensor:
    """The logsumexp of a row without keys is +inf there."""
    return lse.masked_fill(lse == -math.inf, math.inf)


def _result(found: Any, return_attn_probs: bool) -> Any:
    return (found[0], _theirs(found[1]), None) if return_attn_probs else found


def _unpacked(kv: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    if kv.dim() != rank or kv.shape[-3] != 2:
        accepted = "(B, Sk, 2, Hk, D)" if rank == 5 else "(total_k, 2, Hk, D)"
        raise ValueError(f"kv: shape {shape_text(kv.shape)}; accepted: {accepted}")
    k, v = kv.unbind(-3)
    return k, v


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_func.

    Args:
        q: (B, Sq, Hq, D): float32, float16, bfloat16 or, on the CPU, float64.
        k: (B, Sk, Hk, D). Hq is a multiple of Hk.
        v: (B, Sk, Hk, Dv).
        dropout_p: Probability in [0, 1]. The masks are not flash_attn's; the seed comes from PyTorch's generator.
        softmax_scale: None is 1 / sqrt(D).
        causal: Aligned at the bottom right.
        window_size: (left, right), inclusive, around i + Sk - Sq. Negative: unbounded.
        softcap: 0 or less: none.
        alibi_slopes: (Hq,) or (B, Hq). They have no gradient.
        deterministic: The backward gives the same bits in every run.
        return_attn_probs: Also returns the logsumexp. Probabilities are never returned.

    Returns:
        out, (B, Sq, Hq, Dv). With return_attn_probs (out, lse, None): lse is (B, Hq, Sq), float32, +inf for rows without
        keys, and has a gradient.

    Raises:
        ValueError: A shape or a value is not accepted.
        TypeError: A type is not accepted.
    """
    found = _flash.compute(
        _NAME, q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, deterministic=bool(deterministic),
        return_lse=bool(return_attn_probs),
    )  # fmt: skip
    return _result(found, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_kvpacked_func: kv is (B, Sk, 2, Hk, D). The rest is as in flash_attn_func()."""
    k, v = _unpacked(kv, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_qkvpacked_func: qkv is (B, S, 3, H, D). The rest is as in flash_attn_func()."""
    found = _flash.compute_qkv(
        _NAME, qkv, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=bool(deterministic), return_lse=bool(return_attn_probs),
    )  # fmt: skip
    return _result(found, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func: packed sequences.

    Args:
        q: (total_q, Hq, D).
        k: (total_k, Hk, D).
        v: (total_k, Hk, Dv).
        cu_seqlens_q: (B + 1,), int32: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        cu_seqlens_k: The same for the keys.
        max_seqlen_q: At least the longest length.
        max_seqlen_k: The same for the keys.
        dropout_p: See flash_attn_func().
        softmax_scale: See flash_attn_func().
        causal: See flash_attn_func().
        window_size: See flash_attn_func().
        softcap: See flash_attn_func().
        alibi_slopes: See flash_attn_func().
        deterministic: See flash_attn_func().
        return_attn_probs: See flash_attn_func().
        block_table: Refused unless None: fovea has no paged keys and values.

    Returns:
        out, (total_q, Hq, Dv). With return_attn_probs (out, lse, None): lse is (Hq, total_q).

    Raises:
        NotImplementedError: block_table is given.
        ValueError: A shape or a value is not accepted.
        TypeError: A type is not accepted.
    """
    _flash.refuse_given("flash_attn_varlen_func", block_table=block_table)
    found = _flash.compute(
        _NAME, q, k, v, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, deterministic=bool(deterministic),
        return_lse=bool(return_attn_probs), cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=_flash.number(max_seqlen_q), max_seqlen_k=_flash.number(max_seqlen_k),
    )  # fmt: skip
    return _result(found, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_varlen_kvpacked_func: kv is (total_k, 2, Hk, D). The rest is as in flash_attn_varlen_func()."""
    k, v = _unpacked(kv, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_varlen_qkvpacked_func: qkv is (total, 3, H, D). The rest is as in flash_attn_varlen_func()."""
    longest = _flash.number(max_seqlen)
    found = _flash.compute_qkv(
        _NAME, qkv, dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, deterministic=bool(deterministic), return_lse=bool(return_attn_probs), cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest,
    )  # fmt: skip
    return _result(found, return_attn_probs)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Union[int, Tensor, None] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn.flash_attn_with_kvcache without pages, rotary embedding and padding at the left. It has no gradient.

    Args:
        q: (B, Sq, Hq, D).
        k_cache: (B or more, Sk, Hk, D).
        v_cache: (B or more, Sk, Hk, Dv).
        k: (B, n, Hk, D): new keys, which are written into k_cache behind the first cache_seqlens ones.
        v: The same for the values.
        rotary_cos: Refused unless None.
        rotary_sin: Refused unless None.
        cache_seqlens: A length or (B,), int32: how many keys of each sequence exist. None: all.
        cache_batch_idx: (B,), int: which sequences of the caches. They are copied.
        cache_leftpad: Refused unless None.
        block_table: Refused unless None.
        softmax_scale: See flash_attn_func().
        causal: Aligned at the bottom right of the keys that exist.
        window_size: See flash_attn_func().
        softcap: See flash_attn_func().
        rotary_interleaved: Of no effect, as rotary embedding is refused.
        alibi_slopes: See flash_attn_func().
        num_splits: Of no effect: fovea chooses it.
        return_softmax_lse: Also returns the logsumexp.

    Returns:
        out, (B, Sq, Hq, Dv), or (out, lse), where lse is (B, Hq, Sq).

    Raises:
        NotImplementedError: An argument that is refused is given.
        ValueError: A shape or a value is not accepted.
        TypeError: A type is not accepted.
    """
    function = "flash_attn_with_kvcache"
    _flash.refuse_given(
        function, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad, block_table=block_table
    )
    found = _flash.with_cache(
        _NAME, function, q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, bool(return_softmax_lse),
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
    )  # fmt: skip
    return (found[0], _theirs(found[1])) if return_softmax_lse else found


# ---- private names of flash_attn.flash_attn_interface: packages for several GPUs and diffusers import them ----


def _seed_of(dropout_p: float, rng_state: Optional[Tensor]) -> Optional[Tensor]:
    if dropout_p == 0:
        return None
    if rng_state is None:
        raise ValueError("rng_state: None with dropout; accepted: what the forward returned")
    return rng_state.reshape(-1)[0]


def _new_seed(dropout_p: float, q: Tensor) -> Tensor:
    """In the place of flash_attn's rng_state, (2,): the seed, and a number that nothing reads."""
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if dropout_p != 0:
        state[0] = _flash.new_seed(q)
    return state


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    return_softmax: bool,
) -> tuple[Tensor, Tensor, None, Tensor]:
    """(out, lse, None, rng_state)."""
    state = _new_seed(dropout_p, q)
    out, lse = _flash.forward(
        _NAME, q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, alibi_slopes=alibi_slopes, dropout_p=dropout_p, seed=_seed_of(dropout_p, state),
    )  # fmt: skip
    return out, _theirs(lse), None, state


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
) -> None:
    """Writes dq, dk and dv. flash_attn also returns the sums of dout * out of each row; this returns None."""
    _flash.backward(
        _NAME, dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale=softmax_scale, causal=causal,
        window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
        dropout_p=dropout_p, seed=_seed_of(dropout_p, rng_state), deterministic=deterministic,
    )  # fmt: skip


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor, None, Tensor]:
    """(out, lse, None, rng_state). Rows that belong to no sequence are 0, whatever zero_tensors is."""
    _flash.refuse_given("_flash_attn_varlen_forward", block_table=block_table, leftpad_k=leftpad_k)
    state = _new_seed(dropout_p, q)
    out, lse = _flash.forward(
        _NAME, q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, alibi_slopes=alibi_slopes, dropout_p=dropout_p, seed=_seed_of(dropout_p, state),
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=_flash.number(max_seqlen_q),
        max_seqlen_k=_flash.number(max_seqlen_k), seqused_k=seqused_k,
    )  # fmt: skip
    return out, _theirs(lse), None, state


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
    deterministic: bool,
    rng_state: Optional[Tensor] = None,
    zero_tensors: bool = False,
) -> None:
    """Writes dq, dk and dv, and returns None."""
    _flash.backward(
        _NAME, dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale=softmax_scale, causal=causal,
        window_size=(window_size_left, window_size_right), softcap=softcap, alibi_slopes=alibi_slopes,
        dropout_p=dropout_p, seed=_seed_of(dropout_p, rng_state), deterministic=deterministic,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=_flash.number(max_seqlen_q),
        max_seqlen_k=_flash.number(max_seqlen_k),
    )  # fmt: skip


# ---- in the package's place ----

_functions = {name: globals()[name] for name in __all__}
_private = {
    "_flash_attn_backward": _flash_attn_backward,
    "_flash_attn_forward": _flash_attn_forward,
    "_flash_attn_varlen_backward": _flash_attn_varlen_backward,
    "_flash_attn_varlen_forward": _flash_attn_varlen_forward,
    "_wrapped_flash_attn_backward": _flash_attn_backward,
    "_wrapped_flash_attn_forward": _flash_attn_forward,
    "_wrapped_flash_attn_varlen_backward": _flash_attn_varlen_backward,
    "_wrapped_flash_attn_varlen_forward": _flash_attn_varlen_forward,
}
_padding = {name: value for name, value in vars(_bert_padding).items() if name.startswith(("index_", "pad_", "unpad_"))}

_stand_in = StandIn(_NAME, "flash-attn", _VERSION, {
    "flash_attn": {**_functions, "__version__": _VERSION},
    "flash_attn.flash_attn_interface": {**_functions, **_private},
    "flash_attn.bert_padding": _padding,
}, looks_once=_flash.LOOKS_ONCE)  # fmt: skip


def _install(force: bool) -> None:
    _stand_in.install(force)


def _uninstall() -> None:
    _stand_in.uninstall()
