# SPDX-License-Identifier: Apache-2.0
"""fovea.torch.attention: turns the arguments of users into those of the operator.

The checks here are of what the C library cannot see: whether the arguments are tensors of one device, whether a
gradient is requested where there is none, and choices by name. The library checks the rest, with its own messages.
torch.compile and torch.export trace this file, so it uses only what they can trace.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Optional, Union, overload

import torch
from torch import Tensor

from .. import _help
from .._problem import WORD, flag, real, shape_text, window_side
from . import _call, _dtensor, _eager, _fast, _operators, _vmap  # noqa: F401  (_vmap registers its rules)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .._options import Align, Layout, Rng
    from ._options import Options

_ALIGNS = (None, "bottom_right", "top_left")
_LAYOUTS = ("bhsd", "bshd")
_RNGS = ("fovea", "torch_mem_efficient")
_DEVICES = ("cpu", "cuda", "meta")
_HALVES = (torch.bfloat16, torch.float16)
_CONVERTED_SLOPES = (*_HALVES, torch.float64)
_UNBOUNDED = (-1, -1)
_any_autocast = torch._C._is_any_autocast_enabled


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Union[Tensor, tuple[Tensor, Tensor]]: ...
def attention(q: Tensor, k: Tensor, v: Tensor, *more: NoReturn, **options: Any) -> Any:
    """Computes softmax(scale * q @ k.T + ...) @ v exactly, with every gradient, in memory linear in the lengths.

    It is differentiable in q, k, v, bias, bias2 and sink, through out and through lse. All tensors lie on one device,
    the CPU or a CUDA device, where the work is put on the current stream. In the shapes below B is the batch, Sq and Sk
    are the numbers of queries and keys, Hq and Hk the numbers of heads, D and Dv the head dimensions of q and k and of
    v. Three variants of these shapes exist. A batch may have two levels, (B1, B2, H, S, D). With cu_seqlens_q and
    cu_seqlens_k the sequences are packed one after the other without padding, (total, H, D). Nested tensors of layout
    torch.jagged, (B, H, j, D), are packed already. docs/semantics.md states the formula, docs/torch.md how this works
    together with the rest of PyTorch.

    Args:
        q: Queries, (B, Hq, Sq, D): float32, float16, bfloat16 or, on the CPU, float64.
        k: Keys, (B, Hk, Sk, D), of q's type. Hq is a multiple of Hk; query head h reads key head h // (Hq // Hk).
        v: Values, (B, Hk, Sk, Dv), of q's type.
        bias: Added to the scaled and soft-capped scores. It broadcasts to (B, Hq, Sq, Sk), with packed sequences to
            (B, Hq, max_seqlen_q, max_seqlen_k). Any floating-point type; float64 only with float64 q. Its gradient has
            the shape of the bias as it was given, so do not expand a bias that is shared.
        bias2: A second bias, likewise.
        mask: bool, true where a pair of query and key takes part. It broadcasts as bias does.
        scale: Factor of the scores; None is 1 / sqrt(D).
        causal: Query i sees the keys j <= i + shift; see align.
        window: (left, right), in positions: query i sees the keys from i + shift - left to i + shift + right. -1 is
            unbounded.
        align: "bottom_right" makes shift = Sk - Sq, so that the last query meets the last key, as in FlashAttention.
            "top_left" makes shift = 0, as is_causal of scaled_dot_product_attention does. With causal, window or
            alibi_slopes it is required where Sq and Sk differ, unless positions are given.
        softcap: c > 0 replaces a score s by c * tanh(s / c), before biases are added. 0: none.
        alibi_slopes: (Hq,), (B, Hq) or (B1, B2, Hq): adds -slope * abs(i + shift - j). It has no gradient. It is
            converted to float32, or to float64 with float64 q.
        sink: (Hq,): one more logit of each head in the softmax, without a value. float32 (float64 with float64 q) or 16
            bits; its gradient has its type.
        dropout_p: Probability in [0, 1] with which each attention weight is dropped.
        seed: None draws a seed from PyTorch's generator of the device, so that torch.manual_seed and checkpointing
            govern it. Otherwise an integer of up to 64 bits, or a tensor of one int64 on the device.
        offset: An integer or a tensor like seed. Another offset, like another seed, gives an unrelated mask.
        rng: "fovea", or "torch_mem_efficient" for the masks of PyTorch's memory-efficient kernel, bit for bit.
        cu_seqlens_q: (B + 1,), int32 or int64: packed sequence b has the query rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1].
        cu_seqlens_k: The same for the keys.
        max_seqlen_q: At least the length of the longest packed sequence; with seqused_q at least the longest used length.
            None reads it from cu_seqlens_q, which is possible on the CPU only.
        max_seqlen_k: The same for the keys.
        seqused_q: (B,), int32 or int64: how many query rows of each sequence exist, from its first row on.
        seqused_k: The same for the keys.
        batch_shape: (B1, B2): makes the packed sequences a batch of two levels.
        position_q: The position of query 0 in a larger problem, of which this call computes a part. If one of the four
            positions is given, those that are not count as 0, shift is the position of query 0 minus that of key 0, and
            dropout decides about a pair by its positions. align is then left out. With dropout a multiple of 16.
        position_k: The position of key 0, likewise.
        positions_q: (B,), int64: a number for each sequence that is added to position_q.
        positions_k: The same for the keys.
        dropout_streams: The number of each head's stream of random numbers for dropout, int64. It broadcasts to (B, Hq),
            with two levels to (B1, B2, Hq). None: b * Hq + h.
        layout: The order of dimensions of q, k, v and out: "bhsd" is (B, H, S, D), "bshd" is (B, S, H, D).
            fovea.attention has the other default.
        deterministic: The same inputs give the same bits in every run. torch.use_deterministic_algorithms(True) turns
            it on as well. On the CPU they always do.
        return_lse: Also returns the logsumexp of each query's scores.
        backend: A name from fovea.backends(); None takes the best that can compute the problem.

    Returns:
        out, (B, Hq, Sq, Dv) in q's layout and type. With return_lse the pair (out, lse), where lse is (B, Hq, Sq) in
        every layout, packed (Hq, total_q), and float32 (float64 with float64 q).

    Raises:
        ValueError: A shape or a value is not accepted. Every error names the argument, what it was and what is
            accepted.
        TypeError: A type or a keyword is not accepted.
        NotImplementedError: No backend here computes this problem, or a second derivative or a forward-mode derivative
            is requested.
        MemoryError: There is too little memory.

    Example:
        >>> import torch, fovea.torch
        >>> q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True) for _ in range(3))     # batch, heads, sequence, D
        >>> fovea.torch.attention(q, k, v, causal=True).sum().backward()
        >>> q.grad.shape
        torch.Size([1, 2, 4, 8])
    """
    # The fast path returns None for what it leaves to Python. Compilers trace Python alone.
    if not (torch.compiler.is_compiling() or more):
        found = _fast.attention(q, k, v, options)
        if found is not None:
            return found
    return _attention(q, k, v, *more, **options)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *more: NoReturn,
    bias: Optional[Tensor] = None,
    bias2: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    scale: Optional[float] = None,
    causal: bool = False,
    window: tuple[int, int] = _UNBOUNDED,
    align: Optional[Align] = None,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    seed: Union[int, Tensor, None] = None,
    offset: Union[int, Tensor] = 0,
    rng: Rng = "fovea",
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    batch_shape: Optional[Sequence[int]] = None,
    position_q: Optional[int] = None,
    position_k: Optional[int] = None,
    positions_q: Optional[Tensor] = None,
    positions_k: Optional[Tensor] = None,
    dropout_streams: Optional[Tensor] = None,
    layout: Layout = "bhsd",
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Optional[str] = None,
    _packed: Any = None,
    **unknown: NoReturn,
) -> Any:
    """attention() in Python. Its signature is that of attention(), whose keywords stay together for the fast path. `_packed` is
    attention_qkv()'s: the tensor and the dimension that q, k and v are views of."""
    if more or unknown:
        raise _refuse_arguments(more, unknown)
    seed_tensor = offset_tensor = None
    drawn = False
    if seed is None:
        seed = 0
        drawn = dropout_p != 0
    elif isinstance(seed, Tensor):
        seed_tensor, seed = seed, 0
    else:
        seed = _word("seed", seed)
    if type(offset) is not int or offset != 0:
        if isinstance(offset, Tensor):
            offset_tensor, offset = offset, 0
        else:
            offset = _word("offset", offset)

    # Models in 16 bits have sinks and slopes of 16 bits, and PyTorch's integers have 64. The library accepts one type.
    if sink is not None and isinstance(sink, Tensor) and sink.dtype in _HALVES:
        sink = _wider(sink, q)
    if alibi_slopes is not None and isinstance(alibi_slopes, Tensor):
        if alibi_slopes.dtype in _CONVERTED_SLOPES or (alibi_slopes.dtype is torch.float32 and getattr(q, "dtype", None) is torch.float64):
            alibi_slopes = _wider(alibi_slopes, q)
    if seqused_q is not None and isinstance(seqused_q, Tensor) and seqused_q.dtype == torch.int64:
        same = seqused_q is seqused_k  # equal lengths on both sides are recognised by the tensor, not by its values
        seqused_q = _narrower(seqused_q)
        if same:
            seqused_k = seqused_q
    if seqused_k is not None and isinstance(seqused_k, Tensor) and seqused_k.dtype == torch.int64:
        seqused_k = _narrower(seqused_k)

    tensors = (q, k, v, bias, bias2, mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
               seed_tensor, offset_tensor)  # fmt: skip
    given = (position_q, position_k, positions_q, positions_k, dropout_streams)
    is_shard = any(one is not None for one in given)
    shard = _shard(given, q) if is_shard else ()
    compiling = torch.compiler.is_compiling()
    # Plain tensors need no dispatcher, unless something watches it (`direct`, below). learns: one of them requires a gradient.
    plain = learns = False
    if not (compiling or q is None or k is None or v is None):
        plain, learns = _eager.survey((*tensors, *shard[2:]) if is_shard else tensors)
    if not plain or q.is_meta:
        plain = False
        _check_tensors(tensors)
        if q.is_nested:
            if is_shard:
                raise NotImplementedError("position_q, positions_q, dropout_streams: given with nested tensors; accepted: None")
            return _nested(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, layout, return_lse,
                           bias=bias, bias2=bias2, mask=mask, scale=scale, causal=causal, window=window, align=align,
                           softcap=softcap, alibi_slopes=alibi_slopes, sink=sink, dropout_p=dropout_p,
                           seed=(None if drawn else seed) if seed_tensor is None else seed_tensor,
                           offset=offset if offset_tensor is None else offset_tensor, rng=rng,
                           max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, batch_shape=batch_shape,
                           deterministic=deterministic, backend=backend)  # fmt: skip
    if alibi_slopes is not None and alibi_slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "alibi_slopes: requires_grad, and it has no gradient; accepted: alibi_slopes.detach(), or the same "
            "numbers as a bias, which has one"
        )
    options = _checked_options(scale, causal, window, align, softcap, dropout_p, rng, max_seqlen_q, max_seqlen_k,
                               0 if batch_shape is None else _batch_outer(batch_shape, cu_seqlens_q, cu_seqlens_k),
                               layout, deterministic, backend)  # fmt: skip
    of_packed = q
    if _any_autocast() and not q.is_meta and torch.is_autocast_enabled(q.device.type):
        q, k, v = _autocast(q, k, v)
        tensors = (q, k, v, *tensors[3:])

    direct = plain and not _eager.is_watched()
    if drawn and not _dtensor.is_one(q):
        draw = _operators.draw_seed if direct else _operators.seed
        tensors = (*tensors[:12], draw([x for x in tensors if x is not None]), offset_tensor)
    if not plain and _dtensor.is_one(q):
        if drawn:
            raise NotImplementedError(
                f"seed: None with dropout_p={dropout_p} and DTensors; accepted: an integer, the same on every rank"
            )
        whole: Any = (*tensors, seed, offset, *options)
        arguments = _call.shortest(_dtensor.with_places(_call.Arguments._make(whole), _call.Shard(*shard)))
    else:
        arguments = (*tensors, seed, offset, *options, *shard)
    if direct:
        if learns and torch.is_grad_enabled():
            if _packed is not None and q is of_packed:
                return _eager.packed_attention(arguments, return_lse, *_packed)
            return _eager.direct_attention(arguments, return_lse)
        out, lse = _call.compute(arguments, return_lse)
    elif not compiling and torch._C._are_functorch_transforms_active() and not _operators.functionalizes():
        out, lse = _operators.Attention.apply(*arguments)
    else:
        out, lse = _operators.attention(*arguments)
    return (out, lse) if return_lse else out


def _shard(given: tuple[Any, ...], q: Any) -> tuple[Any, ...]:
    """position_q, position_k, positions_q, positions_k, dropout_streams."""
    names = _call.Shard._fields
    numbers = [None if one is None else _integer(name, one) for name, one in zip(names, given[:2])]
    for name, one in zip(names[2:], given[2:]):
        if one is not None and not isinstance(one, Tensor):
            raise TypeError(f"{name}: a {type(one).__name__}; accepted: a torch.Tensor of int64")
        if one is not None and isinstance(q, Tensor) and one.device != q.device:
            raise ValueError(f"{name}: on {one.device}; accepted: {q.device}, where q lies")
    return (*numbers, *given[2:])


def _wider(tensor: Tensor, q: Any) -> Tensor:
    """Converts a tensor; the gradient has the type of the tensor that was given."""
    return tensor.to(torch.float64 if isinstance(q, Tensor) and q.dtype == torch.float64 else torch.float32)


def _narrower(lengths: Tensor) -> Tensor:
    """Converts lengths; one that 32 bits cannot hold stays out of range instead of becoming another length."""
    return lengths.clamp(-1, 2**31 - 1).to(torch.int32)


def _refuse_arguments(more: tuple[Any, ...], unknown: dict[str, Any]) -> TypeError:
    return _help.refuse("attention", "q, k, v", more, unknown, _OPTIONS)


_OPTIONS = {name: value for name, value in (_attention.__kwdefaults__ or {}).items() if name != "_packed"}
_signature = inspect.signature(_attention)
attention.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[parameter for name, parameter in _signature.parameters.items() if name != "_packed"]
)


@overload
def attention_qkv(qkv: Tensor, dim: int, *, return_lse: Literal[False] = False, **options: Unpack[Options]) -> Tensor: ...
@overload
def attention_qkv(
    qkv: Tensor, dim: int, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_qkv(
    qkv: Tensor, dim: int, *, return_lse: bool, **options: Unpack[Options]
) -> Union[Tensor, tuple[Tensor, Tensor]]: ...
def attention_qkv(qkv: Tensor, dim: int, **options: Any) -> Any:
    """attention() of q, k and v that lie in one tensor, whose gradient is one tensor, too.

    It equals ``attention(*qkv.unbind(dim), **options)``. With that, PyTorch copies three gradients together; this has them written
    where they belong. Under torch.compile, torch.func and the like, and under autocast to another type, they are copied.

    Args:
        qkv: q, k and v along the dimension `dim`, such as (B, S, 3, H, D) with dim=2 and layout="bshd", or packed
            (total, 3, H, D) with dim=1 and cu_seqlens.
        dim: The dimension of qkv that has q, k and v.
        **options: Those of attention().

    Returns:
        What attention() returns.

    Raises:
        ValueError: `dim` is no dimension of 3, or see attention().
        TypeError: See attention().
        NotImplementedError: See attention().
        MemoryError: See attention().

    Example:
        >>> import torch, fovea.torch
        >>> qkv = torch.randn(1, 4, 3, 2, 8, requires_grad=True)                     # batch, sequence, 3, heads, D
        >>> fovea.torch.attention_qkv(qkv, 2, layout="bshd", causal=True).sum().backward()
        >>> qkv.grad.shape
        torch.Size([1, 4, 3, 2, 8])
    """
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv: a {type(qkv).__name__}; accepted: a torch.Tensor")
    if not isinstance(dim, int) or not -qkv.dim() <= dim < qkv.dim() or qkv.shape[dim] != 3:
        raise ValueError(f"dim: {dim!r}, of qkv of shape {shape_text(qkv.shape)}; accepted: a dimension of 3, for q, k and v")
    q, k, v = qkv.unbind(dim)
    if torch.compiler.is_compiling() or not (qkv.requires_grad and torch.is_grad_enabled()):
        return attention(q, k, v, **options)
    return _attention(q, k, v, _packed=(qkv, dim), **options)


def _check_tensors(tensors: tuple[Any, ...]) -> None:
    """Refuses arguments that are no tensors or lie on another device, and all but dense tensors, or nested ones with q."""
    q = tensors[0]
    device: Any = q.device if isinstance(q, Tensor) else None
    for index, (name, tensor) in enumerate(zip(_call.NAMES, tensors)):
        if tensor is None and index >= 3:
            continue
        if not isinstance(tensor, Tensor):
            given = "None" if tensor is None else f"a {type(tensor).__name__}"
            raise TypeError(f"{name}: {given}; accepted: a torch.Tensor")
        if tensor.device != device:
            raise ValueError(f"{name}: on {tensor.device}; accepted: {device}, where q lies")
        if tensor.is_nested:
            if not q.is_nested:
                raise TypeError(f"{name}: a nested tensor, where q is none; accepted: a dense one")
        elif tensor.layout is not torch.strided:
            raise TypeError(f"{name}: a tensor of layout {tensor.layout}; accepted: a dense one")
    if device.type not in _DEVICES:
        raise NotImplementedError(f"q: lies on {device}; this build of fovea computes on the CPU and on CUDA devices")


def _autocast(*tensors: Tensor) -> list[Tensor]:
    """q, k and v in the type of a matrix product under autocast. The bias keeps its own."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


# ---- nested tensors ----


def _nested(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any, layout: Any,
    return_lse: bool, **options: Any,
) -> Any:  # fmt: skip
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    lengths.update(seqused_q=seqused_q, seqused_k=seqused_k)
    for name, given in lengths.items():
        if given is not None:
            raise ValueError(f"{name}: given with a nested q; accepted: None, nested tensors have their lengths")
    if layout not in _LAYOUTS:
        _refuse_choice("layout", layout, _LAYOUTS)
    swap = layout == "bhsd"
    q, k, v = (_rows_first(name, x, swap) for name, x in (("q", q), ("k", k), ("v", v)))
    if v.offsets() is not k.offsets():
        if v.device.type != "cpu":  # comparing them would wait for the device
            raise ValueError(f"v: offsets of its own on {v.device}; accepted: the tensor that k has, v.offsets() is k.offsets()")
        if not torch.equal(v.offsets(), k.offsets()):
            raise ValueError("v: sequences of other lengths than those of k; accepted: the same")
    out, lse = attention(
        q.values(), k.values(), v.values(), cu_seqlens_q=q.offsets(), cu_seqlens_k=k.offsets(), layout=layout,
        return_lse=True, **_with_longest(options, q, k),
    )  # fmt: skip
    out = torch.nested.nested_tensor_from_jagged(out, q.offsets())
    if swap:
        out = out.transpose(1, 2)
    if not return_lse:
        return out
    return out, torch.nested.nested_tensor_from_jagged(lse.transpose(0, 1), q.offsets()).transpose(1, 2)


def _rows_first(name: str, tensor: Any, swap: bool) -> Any:
    """(B, j, H, D) of a nested tensor."""
    if not tensor.is_nested or tensor.layout is not torch.jagged:
        kind = f"a nested tensor of layout {tensor.layout}" if tensor.is_nested else "a dense tensor, where q is nested"
        raise TypeError(
            f"{name}: {kind}; accepted: a nested tensor of layout torch.jagged, as torch.nested.nested_tensor(..., "
            "layout=torch.jagged) makes"
        )
    if tensor.lengths() is not None:
        raise NotImplementedError(f"{name}: a nested tensor with gaps; accepted: one without, as of {name}.contiguous()")
    dims = "(B, H, j, D)" if swap else "(B, j, H, D)"
    if tensor.dim() != 4 or tensor._ragged_idx != (2 if swap else 1):
        raise ValueError(f"{name}: a nested tensor of shape {tuple(tensor.shape)}; accepted: {dims}, j its lengths")
    return tensor.transpose(1, 2) if swap else tensor


def _with_longest(options: dict[str, Any], q: Any, k: Any) -> dict[str, Any]:
    """On the CPU the library finds the longest sequence itself."""
    if q.device.type != "cpu":
        for name, nested in (("max_seqlen_q", q), ("max_seqlen_k", k)):
            if options[name] is None:
                options[name] = nested._get_max_seqlen()
    return options


# ---- numbers and choices ----


def _checked_options(
    scale: Any, causal: Any, window: Any, align: Any, softcap: Any, dropout_p: Any, rng: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, batch_outer: int, layout: Any, deterministic: Any, backend: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """The operator's arguments from `scale` on."""
    if align not in _ALIGNS:
        _refuse_choice("align", align, _ALIGNS)
    if layout not in _LAYOUTS:
        _refuse_choice("layout", layout, _LAYOUTS)
    if rng not in _RNGS:
        _refuse_choice("rng", rng, _RNGS)
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: {backend!r}; accepted: a name that fovea.backends() has")
    if deterministic is not False and _flag("deterministic", deterministic):
        order = _call.DETERMINISTIC
    else:
        order = _call.order()
    return (
        scale if scale is None or type(scale) is float else _real("scale", scale),
        causal if type(causal) is bool else _flag("causal", causal),
        *_window(window),
        align,
        softcap if type(softcap) is float else _real("softcap", softcap),
        dropout_p if type(dropout_p) is float else _real("dropout_p", dropout_p),
        rng,
        0 if max_seqlen_q is None else _integer("max_seqlen_q", max_seqlen_q),
        0 if max_seqlen_k is None else _integer("max_seqlen_k", max_seqlen_k),
        batch_outer,
        layout,
        order,
        backend,
    )


def _refuse_choice(name: str, value: Any, choices: tuple[Any, ...]) -> NoReturn:
    raise ValueError(f"{name}: {value!r}; accepted: {', '.join(repr(choice) for choice in choices)}")


def _integer(name: str, value: Any) -> Any:
    """An int, or a torch.SymInt as it is."""
    if isinstance(value, torch.SymInt):
        return value
    number = _index(name, value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name}: {number}; accepted: an integer of 64 bits")
    return number


def _word(name: str, value: Any) -> Any:
    """An integer of up to 64 bits as a signed one, for the dispatcher."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: {value}; accepted: an integer of up to 64 bits")
    number = value if isinstance(value, torch.SymInt) else _index(name, value)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"{name}: {number}; accepted: {WORD}")
    return number - 2**64 if number >= 2**63 else number


def _index(name: str, value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, Tensor) and value.device.type not in ("cpu", "meta"):
        raise TypeError(
            f"{name}: a tensor on {value.device}, which every call would wait for; accepted: an integer, such as {name}.item()"
        )
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {value!r}; accepted: an integer") from None


def _flag(name: str, value: Any) -> bool:
    return bool(value) if isinstance(value, torch.SymBool) else flag(name, value)


def _real(name: str, value: Any) -> float:
    if isinstance(value, Tensor):
        hint = "; what is learnt can multiply q" if name == "scale" else ""
        raise TypeError(f"{name}: a Tensor; accepted: a number, which has no gradient{hint}")
    return float(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else real(name, value)


def _window(window: Any) -> tuple[int, int]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: {window!r}; accepted: a pair (left, right) of integers, -1 for unbounded")
    return window_side(_integer, window[0]), window_side(_integer, window[1])


def _batch_outer(batch_shape: Any, cu_seqlens_q: Optional[Tensor], cu_seqlens_k: Optional[Tensor]) -> Any:
    lengths = cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q
    if lengths is None:
        raise ValueError("batch_shape: given without cu_seqlens; accepted: None, five dimensions say it")
    if not isinstance(batch_shape, (tuple, list)) or len(batch_shape) != 2:
        raise TypeError(f"batch_shape: {batch_shape!r}; accepted: a pair of integers (B1, B2)")
    outer, inner = (_integer("batch_shape", n) for n in batch_shape)
    batch = lengths.shape[0] - 1 if lengths.dim() == 1 else 0
    if outer < 1 or outer * inner != batch:
        given = shape_text((outer, inner))
        raise ValueError(f"batch_shape: {given}; accepted: B1 x B2 = {batch}, the number of sequences")
    return outer
