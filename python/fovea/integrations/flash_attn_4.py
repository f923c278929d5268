# SPDX-License-Identifier: Apache-2.0
"""The functions of FlashAttention-4, computed by fovea. install("flash_attn_4") puts them in the place of the package
flash_attn.cute.

They return (out, lse) always, and lse is None where neither a gradient nor return_lse needs it. docs/integrations/flash_attn.md
has every argument.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch
from torch import Tensor

from . import _flash
from ._stand_in import StandIn

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]

_NAME = "flash_attn_4"
_VERSION = "4.0.0b36"  # is imitated


def _placed(causal: bool, window: _flash.Window, align: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """FlashAttention-4's rule: a negative side moves the window off the diagonal, unless it leaves nothing of it: then there is no
    window. A moved window is one with another shift; `align` makes the positions that give the usual one."""
    left, right = _flash.pair(window)
    right = 0 if causal else right
    if left is not None and right is not None and left + right < 0:
        return {"window_size": (None, None)}
    if right is not None and right < 0:
        moved, left, right = right, None if left is None else left + right, 0
    elif left is not None and left < 0:
        moved, left, right = -left, 0, None if right is None else left + right
    else:
        return {"window_size": (left, right)}
    positions = align()
    positions["position_q"] = positions.get("position_q", 0) + moved
    return {"window_size": (left, right), "align": None, **positions}


def _lengths(x: Tensor, cu_seqlens: Optional[Tensor], seqused: Optional[Tensor]) -> Union[int, Tensor]:
    """Of the sequences; one number where all are as long."""
    if seqused is not None:
        return seqused.long()
    return x.shape[1] if cu_seqlens is None else cu_seqlens.diff().long()


def _compute(
    q: Tensor, k: Tensor, v: Tensor, learnable_sink: Optional[Tensor], return_lse: bool, **options: Any
) -> tuple[Tensor, Optional[Tensor]]:
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, learnable_sink) if x is not None)
    found = _flash.compute(_NAME, q, k, v, sink=learnable_sink, return_lse=bool(return_lse) or learns, **options)
    if not (return_lse or learns):
        return found, None
    out, lse = found
    return out, lse if return_lse else lse.detach()


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Optional[Tensor] = None,
    gather_kv_indices: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[Optional[int], Optional[int]] = (None, None),
    learnable_sink: Optional[Tensor] = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    score_mod: Optional[Callable[..., Any]] = None,
    score_mod_bwd: Optional[Callable[..., Any]] = None,
    mask_mod: Optional[Callable[..., Any]] = None,
    aux_tensors: Optional[list[Tensor]] = None,
    aux_scalars: Optional[tuple[Any, ...]] = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[Tensor, Optional[Tensor]]:
    """flash_attn.cute.flash_attn_func.

    Args:
        q: (B, Sq, Hq, D): float32, float16, bfloat16 or, on the CPU, float64.
        k: (B, Sk, Hk, D). Hq is a multiple of Hk.
        v: (B, Sk, Hk, Dv).
        qv: Refused unless None.
        gather_kv_indices: Refused unless None.
        softmax_scale: None is 1 / sqrt(D).
        causal: Aligned at the bottom right.
        window_size: (left, right), inclusive, around i + Sk - Sq. None: unbounded. Both are unbounded if left + right < 0; another
            negative side leaves the diagonal out.
        learnable_sink: (Hq,): one more logit of each head, without a value. It has a gradient.
        softcap: 0 or less: none.
        num_splits: Of no effect: fovea chooses it.
        pack_gqa: Of no effect.
        deterministic: The backward gives the same bits in every run.
        score_mod: Refused unless None; a bias, softcap or slopes of fovea.torch.attention may do what it does.
        score_mod_bwd: Refused unless None.
        mask_mod: Refused unless None; a mask of fovea.torch.attention may do what it does.
        aux_tensors: Refused unless None.
        aux_scalars: Refused unless None.
        block_sparse_tensors: Refused unless None.
        block_sparse_tensors_bwd: Refused unless None.
        return_lse: Always returns the logsumexp, and makes it differentiable.

    Returns:
        (out, lse): out is (B, Sq, Hq, Dv); lse is (B, Hq, Sq), float32, -inf for rows without keys. lse is None if
        return_lse is not set and nothing has a gradient.

    Raises:
        NotImplementedError: An argument that is refused is given.
        ValueError: A shape or a value is not accepted.
        TypeError: A type is not accepted.
    """
    _flash.refuse_given(
        "flash_attn_func", qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip
    return _compute(
        q, k, v, learnable_sink, return_lse, softmax_scale=softmax_scale, causal=causal, softcap=softcap, deterministic=bool(deterministic),
        **_placed(causal, window_size, lambda: {"position_q": k.shape[1] - q.shape[1]}),
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    min_seqlen_k: Optional[int] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    gather_kv_indices: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[Optional[int], Optional[int]] = (None, None),
    learnable_sink: Optional[Tensor] = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    score_mod: Optional[Callable[..., Any]] = None,
    score_mod_bwd: Optional[Callable[..., Any]] = None,
    mask_mod: Optional[Callable[..., Any]] = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Optional[list[Tensor]] = None,
    aux_scalars: Optional[tuple[Any, ...]] = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: Optional[int] = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Optional[Tensor]]:
    """flash_attn.cute.flash_attn_varlen_func: packed sequences, or a padded batch with lengths, on either side.

    Args:
        q: (total_q, Hq, D) with cu_seqlens_q, else (B, Sq, Hq, D).
        k: (total_k, Hk, D) with cu_seqlens_k, else (B, Sk, Hk, D).
        v: As k, with Dv.
        qv: See flash_attn_func().
        cu_seqlens_q: (B + 1,), int32: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        cu_seqlens_k: The same for the keys.
        max_seqlen_q: At least the longest length. None: the number of rows, which is a bound.
        max_seqlen_k: The same for the keys.
        min_seqlen_k: Of no effect.
        seqused_q: (B,), int32: how many rows of each sequence exist. The others are 0 in out.
        seqused_k: The same for the keys.
        gather_kv_indices: See flash_attn_func().
        page_table: Refused unless None: fovea has no paged keys and values.
        softmax_scale: See flash_attn_func().
        causal: See flash_attn_func().
        window_size: See flash_attn_func().
        learnable_sink: See flash_attn_func().
        softcap: See flash_attn_func().
        num_splits: Of no effect.
        pack_gqa: Of no effect.
        deterministic: See flash_attn_func().
        score_mod: See flash_attn_func().
        score_mod_bwd: See flash_attn_func().
        mask_mod: See flash_attn_func().
        block_sparse_tensors: See flash_attn_func().
        aux_tensors: See flash_attn_func().
        aux_scalars: See flash_attn_func().
        return_lse: See flash_attn_func().
        scheduler_metadata: Of no effect.
        seqlen_k_per_split: Of no effect.
        disable_scheduler_metadata: Of no effect.

    Returns:
        (out, lse): out has q's shape, with Dv; lse is (Hq, total_q), of a padded batch (B, Hq, Sq). lse is None if
        return_lse is not set and nothing has a gradient.

    Raises:
        NotImplementedError: An argument that is refused is given.
        ValueError: A shape or a value is not accepted.
        TypeError: A type is not accepted.
    """
    _flash.refuse_given(
        "flash_attn_varlen_func", qv=qv, gather_kv_indices=gather_kv_indices, page_table=page_table, score_mod=score_mod,
        score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors,
        aux_tensors=aux_tensors, aux_scalars=aux_scalars,
    )  # fmt: skip
    rows, options = _problem(
        q, k, v, causal, window_size, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    )
    out, lse = _compute(
        *rows, learnable_sink, return_lse, softmax_scale=softmax_scale, softcap=softcap, deterministic=bool(deterministic), **options
    )
    return _shaped(out, lse, q)


Rows = tuple[Tensor, Tensor, Tensor]


def _problem(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: _flash.Window, cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor],
    max_seqlen_q: Optional[int], max_seqlen_k: Optional[int], seqused_q: Optional[Tensor], seqused_k: Optional[Tensor],
) -> tuple[Rows, dict[str, Any]]:  # fmt: skip
    """q, k and v, all packed or all padded, and the options of their rows."""

    def aligned() -> dict[str, Any]:
        shift = _lengths(k, cu_seqlens_k, seqused_k) - _lengths(q, cu_seqlens_q, seqused_q)
        return {"positions_q": shift} if isinstance(shift, Tensor) else {"position_q": shift}

    options = {"causal": causal, "seqused_q": seqused_q, "seqused_k": seqused_k, **_placed(causal, window, aligned)}
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return (q, k, v), options
    # One side may be a padded batch: its sequences lie at equal distances.
    if cu_seqlens_q is None:
        q, cu_seqlens_q, max_seqlen_q = q.flatten(0, 1), _equal_distances(q), q.shape[1]
    if cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k = _equal_distances(k), k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    options.update(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=_longest(max_seqlen_q, q),
        max_seqlen_k=_longest(max_seqlen_k, k),
    )  # fmt: skip
    return (q, k, v), options


def _shaped(out: Tensor, lse: Optional[Tensor], q: Tensor) -> tuple[Tensor, Optional[Tensor]]:
    """The results for q as it was given."""
    if out.dim() < q.dim():
        out = out.view(*q.shape[:2], *out.shape[1:])
        lse = None if lse is None else lse.view(lse.shape[0], *q.shape[:2]).transpose(0, 1)
    return out, lse


def _equal_distances(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def _longest(given: Optional[int], x: Tensor) -> int:
    return x.shape[0] if given is None else int(given)


# ---- private names of flash_attn.cute.interface: PyTorch, trainers and packages for several GPUs import them ----


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    min_seqlen_k: Optional[int] = None,
    page_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    softcap: Optional[float] = None,
    window_size_left: Optional[int] = None,
    window_size_right: Optional[int] = None,
    learnable_sink: Optional[Tensor] = None,
    tile_mn: Optional[tuple[int, int]] = None,
    mma_pv_is_rs: Optional[bool] = None,
    intra_wg_overlap: Optional[bool] = None,
    num_threads: int = 384,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    _arch: Optional[int] = None,
    score_mod: Optional[Callable[..., Any]] = None,
    mask_mod: Optional[Callable[..., Any]] = None,
    block_sparse_tensors: Any = None,
    return_lse: bool = False,
    out: Optional[Tensor] = None,
    lse: Optional[Tensor] = None,
    aux_tensors: Optional[list[Tensor]] = None,
    aux_scalars: Optional[tuple[Any, ...]] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    gather_kv_indices: Optional[Tensor] = None,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: Optional[int] = None,
    disable_scheduler_metadata: bool = False,
    gather_bwd_recompute_p: bool = False,
) -> tuple[Tensor, Optional[Tensor], None, None, None]:
    """(out, lse, None, None, None); lse is None if nobody asks for it. It has no gradient."""
    _flash.refuse_given(
        "_flash_attn_fwd", qv=qv, page_table=page_table, score_mod=score_mod, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, gather_kv_indices=gather_kv_indices,
    )  # fmt: skip
    rows, options = _problem(
        q, k, v, causal, (window_size_left, window_size_right), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    )
    found, its_lse = _shaped(*_flash.forward(_NAME, *rows, softmax_scale=softmax_scale, softcap=softcap, sink=learnable_sink, **options), q)
    found = found if out is None else out.copy_(found)
    if lse is not None and its_lse is not None:
        return found, lse.copy_(its_lse), None, None, None
    # As there, also without autograd: a backward of its own may follow.
    wanted = return_lse or any(x is not None and x.requires_grad for x in (q, k, v, learnable_sink))
    return found, its_lse if wanted else None, None, None, None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: Optional[int] = None,
    window_size_right: Optional[int] = None,
    m_block_size: int = 64,
    n_block_size: int = 128,
    num_threads: int = 256,
    pack_gqa: bool = False,
    num_stages_Q: int = 2,
    num_stages_dO: int = 2,
    SdP_swapAB: bool = False,
    dKV_swapAB: bool = False,
    dQ_swapAB: bool = False,
    AtomLayoutMSdP: int = 2,
    AtomLayoutNdKV: int = 2,
    AtomLayoutMdQ: int = 2,
    V_in_regs: bool = False,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    deterministic: bool = False,
    dq: Optional[Tensor] = None,
    dk: Optional[Tensor] = None,
    dv: Optional[Tensor] = None,
    score_mod: Optional[Callable[..., Any]] = None,
    score_mod_bwd: Optional[Callable[..., Any]] = None,
    mask_mod: Optional[Callable[..., Any]] = None,
    aux_tensors: Optional[list[Tensor]] = None,
    aux_scalars: Optional[tuple[Any, ...]] = None,
    block_sparse_tensors: Any = None,
    dlse: Optional[Tensor] = None,
    learnable_sink: Optional[Tensor] = None,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv), with a learnable_sink (dq, dk, dv, dsink): in the tensors that are given, else in new ones. dlse is the gradient of
    lse."""
    _flash.refuse_given(
        "_flash_attn_bwd", score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors,
        aux_scalars=aux_scalars, block_sparse_tensors=block_sparse_tensors,
    )  # fmt: skip
    rows, options = _problem(
        q, k, v, causal, (window_size_left, window_size_right), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k
    )
    if rows[0].dim() < q.dim():  # what _shaped() did in the forward
        out, dout = out.flatten(0, 1), dout.flatten(0, 1)
        lse, dlse = lse.transpose(0, 1).flatten(1), None if dlse is None else dlse.transpose(0, 1).flatten(1)
    found = _flash.gradients(
        _NAME, dout, *rows, out, lse, dlse=dlse, sink=learnable_sink, softmax_scale=softmax_scale, softcap=softcap,
        deterministic=bool(deterministic), **options,
    )  # fmt: skip
    shaped = [grad.reshape(like.shape) for grad, like in zip(found, (q, k, v))]
    return (*(grad if into is None else into.copy_(grad) for grad, into in zip(shaped, (dq, dk, dv))), *found[3:])


# ---- in the package's place ----

_functions = {name: globals()[name] for name in __all__}
_stand_in = StandIn(_NAME, "flash-attn-4", _VERSION, {
    "flash_attn.cute": {**_functions, "__version__": _VERSION},
    "flash_attn.cute.interface": {**_functions, "_flash_attn_fwd": _flash_attn_fwd, "_flash_attn_bwd": _flash_attn_bwd},
}, looks_once=_flash.LOOKS_ONCE)  # fmt: skip


def _install(force: bool) -> None:
    _stand_in.install(force)


def _uninstall() -> None:
    _stand_in.uninstall()
