# SPDX-License-Identifier: Apache-2.0
"""triangle_attention and attention_pair_bias of cuequivariance_torch 0.13, computed by fovea.

install("triangle") puts them in the package's place, or patches them where it is installed. The bias has a gradient of its own
shape, (B, 1, H, Q, K). docs/integrations/triangle.md has every argument.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Optional, Union

import torch
from torch import Tensor
from torch.nn import functional

from .._problem import shape_text
from ..torch import attention
from . import _counts, _needs
from ._needs import Needed
from ._stand_in import Patches, StandIn

__all__ = ["attention_pair_bias", "set_exact", "triangle_attention"]

_NAME = "triangle"
_exact = False


def set_exact(exact: bool) -> None:
    """Chooses the result of queries all of whose keys are masked.

    cuequivariance gives masked scores -1e9, so that such a query gets the mean of all values. fovea's masks give 0. All other
    rows are equal, and so are all gradients if such rows do not reach the loss.

    Args:
        exact: True gives such rows the mean of all values, with a second bias in the place of the mask, which takes longer. In
            float32 and 16 bits the gradients through such rows are too large, by up to the number of keys, because a logsumexp of
            -1e9 has no room for its logarithm. They do not matter where the gradient of these rows' results is 0.
    """
    global _exact
    _exact = bool(exact)


def _masked(mask: Optional[Tensor], q: Tensor, lowest: float, exact: Optional[bool]) -> dict[str, Tensor]:
    """A mask as an option of fovea."""
    if mask is None:
        return {}
    mask = mask.to(torch.bool)
    if not (_exact if exact is None else exact):
        return {"mask": mask}
    if q.dtype == torch.float16:
        lowest = max(lowest, -6e4)
    return {"bias2": torch.where(mask, 0.0, lowest).to(torch.float64 if q.dtype == torch.float64 else torch.float32)}


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Optional[Tensor] = None,
    scale: Optional[float] = None,
    return_aux: bool = False,
    *,
    kv_lengths: Optional[Tensor] = None,
    exact: Optional[bool] = None,
) -> Union[Tensor, tuple[Tensor, Tensor, None]]:
    """cuequivariance_torch.triangle_attention.

    Args:
        q: (B, N, H, Q, D), or (N, H, Q, D) for B = 1: float32, float16, bfloat16 or, on the CPU, float64.
        k: (B, N, H, K, D).
        v: (B, N, H, K, D).
        bias: (B, 1, H, Q, K), any floating-point type. Its gradient has its shape and type.
        mask: (B, N, 1, 1, K), true where a key takes part.
        scale: None is 1 / sqrt(D).
        return_aux: Also returns the logsumexp.
        kv_lengths: (B, N, 1, 1, 1), int32: how many keys of each row exist. Larger numbers than K are K.
        exact: See set_exact(), whose choice None takes. cuequivariance has no such argument.

    Returns:
        out, (B, N, H, Q, D), also where q has four dimensions. With return_aux (out, lse, None): lse is (B, N, H, Q), float32. In the place of None
        cuequivariance has the largest score of each row, which fovea does not compute.

    Raises:
        ValueError: A shape or a value is not accepted; mask and kv_lengths are both given.
        TypeError: A type is not accepted.
    """
    if bias is None:
        raise TypeError("triangle_attention: bias: None; accepted: (B, 1, H, Q, K)")
    if mask is not None and kv_lengths is not None:
        raise ValueError("kv_lengths: given with mask; accepted: one of them")
    if kv_lengths is not None and (_exact if exact is None else exact):
        mask, kv_lengths = torch.arange(k.shape[-2], device=k.device) < kv_lengths, None
    options: dict[str, Any] = _masked(mask, q, -1e9, exact)
    if kv_lengths is not None:
        options["seqused_k"] = kv_lengths.reshape(-1).clamp(max=k.shape[-2])
    q, k, v, bias = (_five(x) for x in (q, k, v, bias))
    options = {name: x if name == "seqused_k" else _five(x) for name, x in options.items()}
    names = {"seqused_k": "kv_lengths", "bias2": "mask"}
    out, lse = _counts.call(_NAME, attention, q, k, v, names=names, bias=bias, scale=scale, return_lse=True, **options)
    return (out, lse, None) if return_aux else out


def _five(x: Tensor) -> Tensor:
    """Dimensions of 1 in front, as cuequivariance puts them there: each tensor for itself, and its results keep them."""
    return x[(None,) * (5 - x.dim())] if x.dim() < 5 else x


def attention_pair_bias(
    single_repr: Tensor,
    pair_repr: Tensor,
    mask: Optional[Tensor],
    num_heads: int,
    w_ln_a: Tensor,
    b_ln_a: Optional[Tensor],
    w_proj_q: Tensor,
    b_proj_q: Optional[Tensor],
    w_proj_k: Tensor,
    w_proj_v: Tensor,
    w_proj_g: Tensor,
    w_proj_o: Tensor,
    w_proj_z: Optional[Tensor] = None,
    b_proj_o: Optional[Tensor] = None,
    b_proj_z: Optional[Tensor] = None,
    w_ln_z: Optional[Tensor] = None,
    b_ln_z: Optional[Tensor] = None,
    inf: float = 1000000.0,
    eps: float = 1e-05,
    attn_scale: Optional[float] = None,
    return_z_proj: bool = False,
    is_cached_z_proj: bool = False,
    *,
    b_proj_k: Optional[Tensor] = None,
    b_proj_v: Optional[Tensor] = None,
    w_ln_q: Optional[Tensor] = None,
    b_ln_q: Optional[Tensor] = None,
    w_ln_k: Optional[Tensor] = None,
    b_ln_k: Optional[Tensor] = None,
    b_proj_g: Optional[Tensor] = None,
    norm_kind: str = "layer_norm",
) -> tuple[Tensor, Optional[Tensor]]:
    """cuequivariance_torch.attention_pair_bias: norms, projections and gate by PyTorch, attention by fovea.

    Args:
        single_repr: (B * M, S, C): M representations share a pair representation, which is not repeated for them.
        pair_repr: (B, S, S, Z), or with is_cached_z_proj the bias itself, (B, H, S, S).
        mask: (B, S) or (B * M, S), nonzero where a key takes part; None: all.
        num_heads: H.
        w_ln_a: (C,): weight of the norm of single_repr.
        b_ln_a: (C,) or None.
        w_proj_q: (H * D, C).
        b_proj_q: (H * D,) or None.
        w_proj_k: (H * D, C).
        w_proj_v: (H * D, C).
        w_proj_g: (H * D, C): the gate's projection.
        w_proj_o: (C, H * D): the projection of the result.
        w_proj_z: (H, Z): the projection of pair_repr to the bias; None only with is_cached_z_proj.
        b_proj_o: (C,) or None.
        b_proj_z: (H,) or None.
        w_ln_z: (Z,) or None: weight of the norm of pair_repr.
        b_ln_z: (Z,) or None.
        inf: With set_exact(True) -inf is added to the scores of masked keys.
        eps: Added to the variance in the norms.
        attn_scale: Factor of the scores; None is 1 / sqrt(D).
        return_z_proj: Also returns the bias.
        is_cached_z_proj: pair_repr is the bias itself.
        b_proj_k: (H * D,) or None.
        b_proj_v: (H * D,) or None.
        w_ln_q: (H * D,) or None: weight of a norm of the queries, which is left out if w_ln_q and b_ln_q are None.
        b_ln_q: (H * D,) or None.
        w_ln_k: (H * D,) or None: the same for the keys.
        b_ln_k: (H * D,) or None.
        b_proj_g: (H * D,) or None.
        norm_kind: "layer_norm", or "rms_norm", which has no biases.

    Returns:
        (out, z): out is (B * M, S, C); z is the bias, (B, H, S, S), or None without return_z_proj.

    Raises:
        ValueError: A shape or a value is not accepted.
        TypeError: A type is not accepted.
    """
    if norm_kind not in ("layer_norm", "rms_norm"):
        raise ValueError(f"norm_kind: {norm_kind!r}; accepted: 'layer_norm', 'rms_norm'")
    given = [name for name, x in (("b_ln_a", b_ln_a), ("b_ln_z", b_ln_z), ("b_ln_q", b_ln_q), ("b_ln_k", b_ln_k)) if x is not None]
    if norm_kind == "rms_norm" and given:
        raise ValueError(f"{given[0]}: given with norm_kind 'rms_norm'; accepted: None")

    def normal(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor]) -> Tensor:
        if norm_kind == "rms_norm":
            return functional.rms_norm(x, x.shape[-1:], weight, eps)
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    linear = functional.linear
    single = normal(single_repr, w_ln_a, b_ln_a)
    q, k, v = linear(single, w_proj_q, b_proj_q), linear(single, w_proj_k, b_proj_k), linear(single, w_proj_v, b_proj_v)
    if w_ln_q is not None or b_ln_q is not None:
        q = normal(q, w_ln_q, b_ln_q)
    if w_ln_k is not None or b_ln_k is not None:
        k = normal(k, w_ln_k, b_ln_k)
    if is_cached_z_proj:
        z = pair_repr
    elif w_proj_z is None:
        raise ValueError("w_proj_z: None; accepted: (H, Z), or None with is_cached_z_proj")
    else:
        z = linear(normal(pair_repr, w_ln_z, b_ln_z), w_proj_z, b_proj_z).movedim(-1, 1)
    batch, rows = z.shape[0], single.shape[1]
    each = single.shape[0] // batch if batch else 1  # representations that share a pair representation
    if each * batch != single.shape[0]:
        raise ValueError(f"single_repr: {single.shape[0]} representations, and pair_repr has {batch}; accepted: a multiple of these")
    for name, x in (("w_proj_q", q), ("w_proj_k", k), ("w_proj_v", v)):
        if num_heads < 1 or x.shape[-1] % num_heads != 0:
            raise ValueError(f"num_heads: {num_heads}, and {name} has {x.shape[-1]} rows; accepted: a divisor of these")
    keys = None
    if mask is not None:
        if mask.shape[-1] != rows or mask.numel() not in (batch * rows, single.shape[0] * rows):
            raise ValueError(f"mask: shape {shape_text(mask.shape)}; accepted: ({batch}, {rows}) or ({single.shape[0]}, {rows})")
        keys = mask.reshape(batch, -1 if mask.numel() else each, 1, 1, rows)  # (B, 1 or M, 1, 1, S)
    q, k, v = (x.view(batch, each, rows, num_heads, x.shape[-1] // num_heads) for x in (q, k, v))
    options: dict[str, Any] = _masked(keys, q, -inf, None)
    names = {"bias": "pair_repr", "scale": "attn_scale"}
    out: Tensor = _counts.call(_NAME, attention, q, k, v, names=names, bias=z.unsqueeze(1), scale=attn_scale, layout="bshd", **options)
    out = out.reshape(single.shape[0], rows, v.shape[-1] * num_heads)
    out = linear(out * linear(single, w_proj_g, b_proj_g).sigmoid(), w_proj_o, b_proj_o)
    return out, z if return_z_proj else None


_functions = {"attention_pair_bias": attention_pair_bias, "triangle_attention": triangle_attention}
_stand_in = StandIn(_NAME, "cuequivariance-torch", "0.13.0", {
    "cuequivariance_torch": {**_functions, "__version__": "0.13.0"},
    "cuequivariance_torch.primitives": {},
    "cuequivariance_torch.primitives.triangle": _functions,
    # OpenFold 3 asks it for the length up to which it computes by itself.
    "cuequivariance_ops_torch.triangle_attention": {"CUEQ_TRIATTN_FALLBACK_THRESHOLD": 0},
})  # fmt: skip
_patches = Patches()


def _install(force: bool) -> None:
    if _patches.before:
        return
    if not _stand_in.made and importlib.util.find_spec("cuequivariance_torch") is not None:
        places = ("cuequivariance_torch", "cuequivariance_torch.primitives.triangle")
        _needs.require(_NAME, "cuequivariance_torch as of 0.13", [Needed(place, "triangle_attention") for place in places])
        for module in map(importlib.import_module, places):
            for name, function in _functions.items():
                if hasattr(module, name):
                    _patches.put(module, name, function)
    else:
        _stand_in.install(force)


def _uninstall() -> None:
    _patches.undo()
    _stand_in.uninstall()
