# SPDX-License-Identifier: Apache-2.0
"""The functions of FlashAttention-3, computed by fovea. install("flash_attn_3") puts them in the place of the module
flash_attn_interface, and of the package flash_attn_3, which has it again.

As flash_attn 2, but without dropout and ALiBi, with the logsumexp alone as second result, and -inf in it for rows without
keys. docs/integrations/flash_attn.md has every argument.
"""

from __future__ import annotations

from typing import Any, Optional, Union

from torch import Tensor

from . import _flash
from ._stand_in import StandIn

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_NAME = "flash_attn_3"
_VERSION = "3.0.0"  # is imitated


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_interface.flash_attn_func.

    Args:
        q: (B, Sq, Hq, D): float32, float16, bfloat16 or, on the CPU, float64.
        k: (B, Sk, Hk, D). Hq is a multiple of Hk.
        v: (B, Sk, Hk, Dv).
        softmax_scale: None is 1 / sqrt(D).
        causal: Aligned at the bottom right.
        qv: Refused unless None.
        q_descale: Refused unless None: fovea has no fp8.
        k_descale: Refused unless None.
        v_descale: Refused unless None.
        window_size: (left, right), inclusive, around i + Sk - Sq. Negative: unbounded.
        attention_chunk: Refused unless 0.
        softcap: 0 or less: none.
        num_splits: Of no effect: fovea chooses it.
        pack_gqa: Of no effect.
        deterministic: The backward gives the same bits in every run.
        sm_margin: Of no effect.
        return_attn_probs: Also returns the logsumexp.

    Returns:
        out, (B, Sq, Hq, Dv), or (out, lse), where lse is (B, Hq, Sq), float32, with a gradient.

    Raises:
        NotImplementedError: An argument that is refused is given.
        ValueError: A shape or a value is not accepted.
        TypeError: A type is not accepted.
    """
    _flash.refuse_given("flash_attn_func", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _flash.refuse_chunk("flash_attn_func", attention_chunk)
    return _flash.compute(
        _NAME, q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=bool(deterministic), return_lse=bool(return_attn_probs),
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: Optional[int] = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_interface.flash_attn_qkvpacked_func.

    Args:
        qkv: (B, S, 3, H, D); or (B, S, Hq + 2 * Hk, D) with num_heads_q.
        softmax_scale: See flash_attn_func().
        causal: See flash_attn_func().
        q_descale: See flash_attn_func().
        k_descale: See flash_attn_func().
        v_descale: See flash_attn_func().
        window_size: See flash_attn_func().
        attention_chunk: See flash_attn_func().
        softcap: See flash_attn_func().
        deterministic: See flash_attn_func().
        num_heads_q: Hq, with a qkv of four dimensions.
        sm_margin: Of no effect.
        return_attn_probs: See flash_attn_func().

    Returns:
        See flash_attn_func().

    Raises:
        NotImplementedError: An argument that is refused is given.
        ValueError: A shape or a value is not accepted.
    """
    _flash.refuse_given("flash_attn_qkvpacked_func", q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _flash.refuse_chunk("flash_attn_qkvpacked_func", attention_chunk)
    options: dict[str, Any] = {
        "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap,
        "deterministic": bool(deterministic), "return_lse": bool(return_attn_probs),
    }  # fmt: skip
    if qkv.dim() == 5:
        return _flash.compute_qkv(_NAME, qkv, **options)
    heads = qkv.shape[-2]
    if num_heads_q is None or not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q: {num_heads_q} with a qkv of {heads} heads; accepted: Hq, where Hq + 2 * Hk = {heads}"
        )
    each = (heads - num_heads_q) // 2
    q, k, v = qkv.split_with_sizes([num_heads_q, each, each], dim=-2)
    return _flash.compute(_NAME, q, k, v, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn_interface.flash_attn_varlen_func: packed sequences.

    Args:
        q: (total_q, Hq, D).
        k: (total_k, Hk, D).
        v: (total_k, Hk, Dv).
        cu_seqlens_q: (B + 1,), int32: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        cu_seqlens_k: The same for the keys.
        max_seqlen_q: At least the longest length.
        max_seqlen_k: The same for the keys.
        seqused_q: (B,), int32: how many rows of each sequence exist. The others are 0 in out.
        seqused_k: The same for the keys.
        softmax_scale: See flash_attn_func().
        causal: See flash_attn_func().
        qv: See flash_attn_func().
        q_descale: See flash_attn_func().
        k_descale: See flash_attn_func().
        v_descale: See flash_attn_func().
        window_size: See flash_attn_func().
        attention_chunk: See flash_attn_func().
        softcap: See flash_attn_func().
        num_splits: Of no effect.
        pack_gqa: Of no effect.
        deterministic: See flash_attn_func().
        sm_margin: Of no effect.
        return_attn_probs: See flash_attn_func().

    Returns:
        out, (total_q, Hq, Dv), or (out, lse), where lse is (Hq, total_q).

    Raises:
        NotImplementedError: An argument that is refused is given.
        ValueError: A shape or a value is not accepted.
        TypeError: A type is not accepted.
    """
    function = "flash_attn_varlen_func"
    _flash.refuse_given(function, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    _flash.refuse_chunk(function, attention_chunk)
    return _flash.compute(
        _NAME, q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=bool(deterministic), return_lse=bool(return_attn_probs), cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k, max_seqlen_q=_flash.number(max_seqlen_q), max_seqlen_k=_flash.number(max_seqlen_k),
        seqused_q=seqused_q, seqused_k=seqused_k,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Union[int, Tensor, None] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn_interface.flash_attn_with_kvcache without pages, rotary embedding, padding at the left and packed queries.

    It has no gradient.

    Args:
        q: (B, Sq, Hq, D).
        k_cache: (B or more, Sk, Hk, D).
        v_cache: (B or more, Sk, Hk, Dv).
        k: (B, n, Hk, D): new keys, which are written into k_cache behind the first cache_seqlens ones.
        v: The same for the values.
        qv: Refused unless None.
        rotary_cos: Refused unless None.
        rotary_sin: Refused unless None.
        cache_seqlens: A length or (B,), int32: how many keys of each sequence exist. None: all.
        cache_batch_idx: (B,), int: which sequences of the caches. They are copied.
        cache_leftpad: Refused unless None.
        page_table: Refused unless None.
        cu_seqlens_q: Refused unless None.
        cu_seqlens_k_new: Refused unless None.
        max_seqlen_q: Of no effect without cu_seqlens_q.
        rotary_seqlens: Refused unless None.
        q_descale: Refused unless None.
        k_descale: Refused unless None.
        v_descale: Refused unless None.
        softmax_scale: See flash_attn_func().
        causal: Aligned at the bottom right of the keys that exist.
        window_size: See flash_attn_func().
        attention_chunk: Refused unless 0.
        softcap: See flash_attn_func().
        rotary_interleaved: Of no effect, as rotary embedding is refused.
        scheduler_metadata: Of no effect.
        num_splits: Of no effect.
        pack_gqa: Of no effect.
        sm_margin: Of no effect.
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
        function, qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad, page_table=page_table,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    _flash.refuse_chunk(function, attention_chunk)
    return _flash.with_cache(
        _NAME, function, q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, bool(return_softmax_lse),
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
    )  # fmt: skip


# ---- private names: Transformer Engine, Megatron and packages for several GPUs import them ----


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Optional[Tensor] = None,
    v_new: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    out_: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    page_table: Optional[Tensor] = None,
    kv_batch_idx: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    seqlens_rotary: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, None, None]:
    """(out, lse, None, None), of padded or of packed sequences. It has no gradient."""
    function = "_flash_attn_forward"
    _flash.refuse_given(
        function, k_new=k_new, v_new=v_new, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, page_table=page_table,
        kv_batch_idx=kv_batch_idx, leftpad_k=leftpad_k, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        seqlens_rotary=seqlens_rotary, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    _flash.refuse_chunk(function, attention_chunk)
    out, lse = _flash.forward(
        _NAME, q, k, v, softmax_scale=softmax_scale, causal=causal, window_size=(window_size_left, window_size_right),
        softcap=softcap, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k,
        max_seqlen_q=_flash.number(max_seqlen_q), max_seqlen_k=_flash.number(max_seqlen_k),
    )  # fmt: skip
    return out if out_ is None else out_.copy_(out), lse, None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    sequed_q: Optional[Tensor] = None,
    sequed_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    dq: Optional[Tensor] = None,
    dk: Optional[Tensor] = None,
    dv: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> None:
    """Writes the gradients into dq, dk and dv. FlashAttention also returns a sum of each row, which nobody reads."""
    _flash.backward(
        _NAME, dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale=softmax_scale, causal=is_causal,
        window_size=(window_size_left, window_size_right), softcap=softcap, deterministic=bool(deterministic),
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=sequed_q, seqused_k=sequed_k,
        max_seqlen_q=_flash.number(max_seqlen_q), max_seqlen_k=_flash.number(max_seqlen_k),
    )  # fmt: skip


_functions = {name: globals()[name] for name in (*__all__, "_flash_attn_forward", "_flash_attn_backward")}
_stand_in = StandIn(_NAME, "flash_attn_3", _VERSION, {
    "flash_attn_interface": {**_functions, "__version__": _VERSION},
    "flash_attn_3": {"__version__": _VERSION}, "flash_attn_3.flash_attn_interface": _functions,
}, looks_once=_flash.LOOKS_ONCE)  # fmt: skip


def _install(force: bool) -> None:
    _stand_in.install(force)


def _uninstall() -> None:
    _stand_in.uninstall()
