# SPDX-License-Identifier: Apache-2.0
"""enable(): fovea computes the calls of torch.nn.functional.scaled_dot_product_attention.

PyTorch's operator aten::scaled_dot_product_attention is composite: it chooses a fused operator in C++, and has no
kernel of its own for the CPU and for CUDA. enable() registers one there and under autograd. So every caller is reached, from
Python, from C++ and from what torch.compile traces, and masks have their shape still. What fovea does not compute, or
computes more slowly, goes back to the composite. _sdpa.py maps the arguments, _fastest.py knows what is slower.

Private names of PyTorch that this file uses, each checked by tests/torch/test_enable.py: OpOverload.decompose and _op_dk,
torch.library.Library._destroy, torch.nested._internal.ops.jagged_scaled_dot_product_attention, _dynamo_marked_constant of
functions, _is_zerotensor of tensors, _values, _ragged_idx and _get_max_seqlen of nested tensors, and the functions of torch._C that stand below the imports.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Optional, TypedDict, Union

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend

from .. import _abi
from .._library import lib, text, version
from . import _ahead, _call, _dtensor, _fast, _fastest, _operators, _sdpa
from ._attention import _autocast, attention
from .aten import _owners
from .aten._register import OPERATORS

Device = Literal["cuda", "cpu"]
Prefer = Literal["fastest"]

SAVE_IN_CHECKPOINTS = (_operators.attention,)
"""The operators whose results a policy of selective checkpointing should keep, as it keeps those of PyTorch's own."""

_NAME = "scaled_dot_product_attention"
_DEVICES = ("cuda", "cpu")
_PREFERENCES = ("fastest", None)
_MOST_KEPT = 4096  # decisions, and problems for stats()
_MOST_REASONS = 256  # some have a number of the call in them
_OTHERS = f"other reasons, after the first {_MOST_REASONS}"

_operator: Any = torch.ops.aten.scaled_dot_product_attention.default
_composite: Any = _operator.decompose  # PyTorch's own: to call the operator again would come back here
_composite_now: Any = functools.partial(_operator._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)  # of an eager call
_library: Any = torch.library
_transforms = torch._C._are_functorch_transforms_active
_order = torch._C._get_sdp_priority_order
_allowed = {
    SDPBackend.MATH.value: torch._C._get_math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION.value: torch._C._get_flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION.value: torch._C._get_mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION.value: torch._C._get_cudnn_sdp_enabled,
}

_EAGER = (Tensor, torch.nn.Parameter)
_TRACED = (FakeTensor, FunctionalTensor)

# Reasons that are somebody's wish or mistake, and no limit of fovea: `strict` does not raise for them, and only of
# _UNMEASURED is warned, because a user of such a device may expect otherwise.
_MATH = "the math path comes first (sdpa_kernel)"
_SLOWER = "PyTorch's kernel is faster, as measured"
_UNMEASURED = "not measured on this kind of device, where plain and causal attention stays with PyTorch unless prefer=None"
_WISHES = (_MATH, _SLOWER, _UNMEASURED, _sdpa.MALFORMED)


class Stats(TypedDict):
    """See stats()."""

    served: int
    traced: int
    handed_back: dict[str, int]
    problems: list[str]
    operators: dict[str, int]


class _Settings(NamedTuple):
    devices: tuple[str, ...]
    prefer: Optional[str]
    strict: bool
    operators: bool


class _State:
    """What is in force in this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.settings: Optional[_Settings] = None
        self.libraries: list[Any] = []
        self.tag = ""
        self.jagged: Any = None  # what stands in the place of PyTorch's function for nested tensors,
        self.jagged_theirs: Any = None  # which this is
        self.fastpath: Optional[bool] = None  # PyTorch's switch, as it was
        self.decisions: dict[Any, Any] = {}  # by _known()'s keys _Decision, by C's what _for_c() gives
        self.warned: set[str] = set()


class _Counts:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self.served = 0
        self.traced = 0
        self.handed_back: dict[str, int] = {}
        self.problems: dict[str, None] = {}
        self.operators: dict[str, int] = {}


class Counted:
    """A block with one call, which is counted if fovea computes it."""

    def __init__(self, count: Callable[[], object]) -> None:
        self._count = count

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Optional[type], *_: object) -> None:
        # Checkpoints end by this exception what they compute again: after all of it has been computed.
        if kind is None or kind.__name__ == "_StopRecomputationError":
            self._count()


class _Decision(NamedTuple):
    """About a kind of call: how fovea computes it, or why it does not."""

    form: Optional[_sdpa.Form]
    why_not: str = ""
    problems: tuple[str, ...] = ()


_state = _State()
_counts = _Counts()


# ---- the kernel ----


def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Any:
    traced = distributed = False
    why = ""
    tensor: Any
    for tensor in (query, key, value, attn_mask):
        kind = type(tensor)
        if kind not in _EAGER and tensor is not None:
            if _dtensor.is_one(tensor):
                distributed = True
                kind = type(tensor._local_tensor)
                if kind in _EAGER:
                    continue
            traced = True
            if kind not in _TRACED:
                why = f"a tensor of the type {kind.__name__}"
        if tensor is not None and not why:
            why = _why_not_dense(tensor)
    if not why:
        why = _why_not_now()
    if not why:
        if distributed:
            decision = _known_distributed(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, traced)
        elif traced:
            decision = _decide(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        else:
            decision = _known(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        why = decision.why_not
        if traced and all(x is None or _ahead.has_known_sizes(x) for x in (query, key, value, attn_mask)):
            _note(decision.problems)
    if why:
        return _give_back(why, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    form: Any = decision.form
    q, k, v, mask = form.inputs(query, key, value, attn_mask)
    bias = None
    if mask is not None and mask.dtype is not torch.bool:
        mask, bias = None, mask
    with Counted(_count_traced if traced else _count_served):
        out = attention(q, k, v, bias=bias, mask=mask, dropout_p=dropout_p, causal=is_causal, align="top_left", scale=scale)
    return form.result(out)


def _give_back(
    why: str, q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout_p: float, is_causal: bool,
    scale: Optional[float], enable_gqa: bool,
) -> Any:  # fmt: skip
    """PyTorch's result. C calls this for the first call of a kind."""
    _hand_back(why, q.device)
    with _by_pytorch(why):
        return _composite(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _by_pytorch(why: str) -> AbstractContextManager[None]:
    """For what PyTorch computes because of a wish: the operators that it calls are PyTorch's as well."""
    return _owners.left_to_pytorch() if why in _WISHES and _owners.in_force() else contextlib.nullcontext()


def _for_c(*call: Any) -> Union[bool, str]:
    """The decision about a kind of call as C needs it: True if it is computed as it is, the reason if PyTorch computes it, False
    if Python has to look each time: tensors have to be reshaped, `strict` raises, or there are too many reasons."""
    decision = _known(*call)
    settings, why = _state.settings, decision.why_not
    if why and settings is not None and settings.strict and why not in _WISHES:
        return False
    if why and why not in _counts.handed_back and len(_counts.handed_back) >= _MOST_REASONS:
        return False
    return decision.why_not or (decision.form is not None and decision.form.batch is None)


def _why_not_dense(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}"
    return "a tensor of zeros without memory" if tensor._is_zerotensor() else ""


def _why_not_now() -> str:
    """What stands against every call at this moment."""
    if _transforms():
        # An autograd.Function cannot be called where a transform's interpreter is at work already.
        return "a transform of torch.func"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return _MATH if _math_comes_first() else ""


def _math_comes_first() -> bool:
    """Whether the math path is the first that is allowed, in the order in which PyTorch tries its backends, or none is."""
    first = next((backend for backend in _order() if backend in _allowed and _allowed[backend]()), SDPBackend.MATH.value)
    return bool(first == SDPBackend.MATH.value)


def _count_served() -> None:
    with _counts.lock:
        _counts.served += 1


def _count_traced() -> None:
    with _counts.lock:
        _counts.traced += 1


def _count_handed_back(reason: str) -> str:
    """Returns the reason under which it was counted."""
    with _counts.lock:
        if reason not in _counts.handed_back and len(_counts.handed_back) >= _MOST_REASONS:
            reason = _OTHERS
        _counts.handed_back[reason] = _counts.handed_back.get(reason, 0) + 1
    return reason


def _note(problems: tuple[str, ...]) -> None:
    """For stats(), which has the first _MOST_KEPT of them."""
    with _counts.lock:
        for line in problems:
            if len(_counts.problems) < _MOST_KEPT:
                _counts.problems[line] = None


def _refusal(why: str, name: str = _NAME) -> str:
    return f"{name}: {why}; fovea does not compute this. enable(strict=False) hands it back to PyTorch"


def _hand_back(why: str, device: torch.device, name: str = _NAME) -> None:
    """Counts a call, of an operator by its name, and warns of it, or raises if `strict` is in force."""
    reason = _count_handed_back(f"{name}: {why}" if name in OPERATORS else why)
    settings = _state.settings
    if settings is None or (why in _WISHES and why != _UNMEASURED):
        return
    if settings.strict and why not in _WISHES:
        raise NotImplementedError(_refusal(why, name))
    if device.type == "cuda" and reason not in _state.warned:
        _state.warned.add(reason)
        warnings.warn(
            f"fovea.torch.enable: {name} is handed back to PyTorch: {why} (said once; "
            "fovea.torch.stats() counts)", stacklevel=3,
        )  # fmt: skip


# ---- the operators below it ----

_OWNER = "enable(operators=True)"
_slower: dict[Any, bool] = {}


def _why_not_operator(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Of a dense call on a GPU: whether PyTorch's kernel is faster."""
    settings = _state.settings
    if settings is None or settings.prefer is None or not args[0].is_cuda:
        return ""
    given = OPERATORS[name].bind(args, kwargs)
    if given.get("cum_seq_q") is not None or given.get("cu_seqlens_q") is not None:
        return ""
    q, k, v = given["query"], given["key"], given["value"]
    if not name.startswith(("_scaled", "_cudnn")):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = given.get("attn_bias", given.get("bias"))
    learned = given.get("bias_requires_grad", given.get("grad_input_mask", (False,) * 4)[3])
    backward = name.endswith("backward") or any(x.requires_grad for x in (q, k, v))
    causal = bool(given.get("is_causal", given.get("custom_mask_type")))
    kind = (q.shape, k.shape, v.shape, q.dtype, q.device, None if bias is None else bias.shape, given["dropout_p"] > 0,
            causal, backward, learned)  # fmt: skip
    slower = _slower.get(kind)
    if slower is None:
        if len(_slower) >= _MOST_KEPT:
            _slower.clear()
        found = _fastest.slower(q, k, v, bias, given["dropout_p"], causal, backward, bool(learned))
        slower = _slower[kind] = found is not False
    return _SLOWER if slower else ""


def _count_operator(name: str) -> None:
    with _counts.lock:
        _counts.operators[name] = _counts.operators.get(name, 0) + 1


# ---- decisions ----


def _learns(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor]) -> tuple[bool, ...]:
    """Which gradients are wanted: of q, k, v and the mask."""
    if not torch.is_grad_enabled():
        return (False,) * 4
    return q.requires_grad, k.requires_grad, v.requires_grad, mask is not None and mask.requires_grad


def _known(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout_p: float, is_causal: bool, scale: Optional[float],
    enable_gqa: bool,
) -> _Decision:  # fmt: skip
    """The decision about calls of this kind, which is made for the first of them."""
    kind = (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, dropout_p, is_causal, scale,
        enable_gqa, mask is not None and (mask.shape, mask.dtype, mask.device), _learns(q, k, v, mask), _call.order(),
    )  # fmt: skip
    decision: Optional[_Decision] = _state.decisions.get(kind)
    if decision is None:
        decision = _decide(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
        _keep(kind, decision)
    return decision


def _known_distributed(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Optional[float], enable_gqa: bool,
    traced: bool,
) -> _Decision:  # fmt: skip
    """The decision about a call on DTensors, which is that of all ranks."""
    if _dtensor.in_pytorchs_ring():
        return _Decision(None, "DTensors within PyTorch's context parallelism")
    if not all(x is None or _dtensor.is_one(x) for x in (q, k, v, mask)):
        return _Decision(None, "DTensors beside plain tensors")
    kind = (
        "distributed", q._spec, k._spec, v._spec, mask is not None and mask._spec, dropout_p, is_causal, scale, enable_gqa,
        _learns(q, k, v, mask), _call.order(),
    )  # fmt: skip
    decision: Optional[_Decision] = None if traced else _state.decisions.get(kind)
    if decision is None:
        decision = _decide_distributed(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
        if not traced:
            _keep(kind, decision)
    return decision


def _keep(kind: Any, decision: _Decision) -> None:
    if len(_state.decisions) >= _MOST_KEPT:
        _state.decisions.clear()
    _state.decisions[kind] = decision
    _note(decision.problems)


def _decide_distributed(
    q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Optional[float], enable_gqa: bool
) -> _Decision:
    form = _sdpa.read(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(form, str):
        return _Decision(None, form)
    if form.batch is not None:
        return _Decision(None, "DTensors of other than four or five dimensions, or whose batches or heads broadcast")
    if dropout_p:
        return _Decision(None, "DTensors with dropout, whose masks would be equal or unrelated on the ranks")
    try:
        shapes = _dtensor.local_shapes(_arguments(q, k, v, mask, dropout_p, is_causal, scale))
    except NotImplementedError as error:
        return _Decision(None, "DTensors: " + str(error).split("; accepted")[0])
    q_, k_, v_, bias_, _, mask_ = shapes[:6]
    return _decide(q_, k_, v_, mask_ if bias_ is None else bias_, dropout_p, is_causal, scale, enable_gqa, _learns(q, k, v, mask))


def _decide(
    q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], dropout_p: float, is_causal: bool, scale: Optional[float],
    enable_gqa: bool, learns: Optional[tuple[bool, ...]] = None,
) -> _Decision:  # fmt: skip
    form = _sdpa.read(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa)
    if isinstance(form, str):
        return _Decision(None, form)
    if learns is None:
        learns = _learns(q, k, v, mask)
    why = _why_not_fastest(q, k, v, mask, dropout_p, is_causal, any(learns), learns[3])
    if why:
        return _Decision(None, why)
    with torch.no_grad():
        given = form.inputs(q, k, v, mask)
    q_, k_, v_, mask_ = (_ahead.of(x) for x in given)
    return _planned(form, _arguments(q_, k_, v_, mask_, dropout_p, is_causal, scale), learns)


def _why_not_fastest(*call: Any) -> str:
    """Whether `prefer` leaves a call to PyTorch: the arguments are those of _fastest.slower()."""
    settings = _state.settings
    if settings is None or settings.prefer != "fastest":
        return ""
    slower = _fastest.slower(*call)
    return "" if slower is False else _SLOWER if slower else _UNMEASURED


def _planned(form: Optional[_sdpa.Form], a: Any, learns: tuple[bool, ...]) -> _Decision:
    """The decision for these arguments, whose tensors are shapes. A backward that the library refused after its forward would
    be too late."""
    try:
        return _Decision(form, "", _plan(a, learns))
    except (NotImplementedError, ValueError) as error:  # ValueError: a scale that is too large for fp32
        return _Decision(None, str(error).splitlines()[0])


def _plan(a: Any, learns: tuple[bool, ...]) -> tuple[str, ...]:
    """The one-line forms of the forward and of the backward that may follow. Raises an error if the library refuses one of
    them."""
    lines = []
    for direction in (_abi.FORWARD, _abi.BACKWARD) if any(learns) else (_abi.FORWARD,):
        problem = _ahead.problem_of(a, direction, learns)
        needed = ctypes.c_size_t()
        status = int(lib.fovea_workspace(problem._pointer, direction, ctypes.byref(needed)))
        if status != _abi.OK and not (status == _abi.UNSUPPORTED and a.deterministic == _call.DETERMINISTIC_OR_WARN):
            problem._refuse(status)
        lines.append(text(lib.fovea_describe, problem._pointer, direction))
    return tuple(lines)


def _arguments(q: Any, k: Any, v: Any, mask: Any, dropout_p: float, is_causal: bool, scale: Optional[float]) -> Any:
    """Those of the operator."""
    bias = None
    if mask is not None and mask.dtype is not torch.bool:
        mask, bias = None, mask
    number = float(scale) if isinstance(scale, float) else None
    tensors = [q, k, v, bias, None, mask, *[None] * (_call.TENSORS - 6)]
    rest = [0, 0, number, is_causal, -1, -1, "top_left", 0.0, float(dropout_p), "fovea", 0, 0, 0, "bhsd", _call.order(), None]
    return _call.Arguments._make([*tensors, *rest])


# ---- nested tensors ----

_COMPILED = "nested tensors in compiled code"


def _count_compiled() -> None:
    _count_handed_back(_COMPILED)


# As torch.compiler.assume_constant_result() does, which imports torch._dynamo: where Dynamo would trace it, and put guards on the
# counts, it calls it.
_count_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _in_the_place_of(theirs: Any) -> Any:
    """For nested tensors of layout torch.jagged, which reach no operator. `theirs` is PyTorch's function, which is kept here
    because somebody may keep this one for longer than it is in force."""

    def jagged_scaled_dot_product_attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: Optional[float] = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        settings = _state.settings
        in_force = _state.jagged is jagged_scaled_dot_product_attention
        if settings is None or not in_force or query.device.type not in settings.devices:
            return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if torch.compiler.is_compiling() or any(type(getattr(x, "_values", None)) in _TRACED for x in (query, key, value)):
            _count_compiled()
            if settings.strict:
                raise RuntimeError(_refusal(_COMPILED))
            return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        why = _why_not_now() or _why_not_jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if not why:
            if torch.is_autocast_enabled(query.device.type):
                query, key, value = _autocast(query, key, value)
            why = _known_jagged(query, key, value, dropout_p, is_causal, scale).why_not
        if why:
            try:
                _hand_back(why, query.device)
            except NotImplementedError as error:
                # NestedTensor would take that for a function that it has not got, and call the next one.
                raise RuntimeError(*error.args) from None
            with _by_pytorch(why):
                return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        with Counted(_count_served):
            return attention(query, key, value, dropout_p=dropout_p, causal=is_causal, align="top_left", scale=scale)

    return jagged_scaled_dot_product_attention


def _why_not_jagged(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, is_causal: bool, scale: Any, enable_gqa: bool
) -> str:
    all_three = (query, key, value)
    if not all(isinstance(x, Tensor) and x.is_nested and x.layout is torch.jagged for x in all_three):
        return _sdpa.MALFORMED
    if attn_mask is not None:
        return "nested tensors with a mask"
    q, k, v = rows = [x._values for x in all_three]  # an attribute of a nested tensor takes microseconds, of these it does not
    if any(x._ragged_idx != 2 for x in all_three) or any(x.dim() != 3 for x in rows):
        return "nested tensors that are not of (B, H, j, D)"
    if any(x.lengths() is not None for x in all_three):
        return "nested tensors with gaps"
    if q.dtype not in _sdpa.FLOATS or any(x.dtype != q.dtype or x.device != q.device for x in rows):
        return _sdpa.MALFORMED
    if q.dtype == torch.float64 and q.device.type != "cpu":
        return "float64 on a GPU"
    ends = query.offsets().shape  # one more than the sequences
    if key.offsets().shape != ends or value.offsets().shape != ends or q.shape[2] != k.shape[2]:
        return _sdpa.MALFORMED
    if any(x.numel() == 0 for x in rows):
        return "empty tensors"
    if value.offsets() is not key.offsets():
        return "nested keys and values with offsets of their own"
    if q.shape[0] != k.shape[0] and not (enable_gqa and q.shape[0] % k.shape[0] == 0):
        return _sdpa.MALFORMED
    if k.shape[0] != v.shape[0]:
        return "keys and values with different numbers of heads"
    return _sdpa.why_not_numbers(dropout_p, scale) or ""


def _known_jagged(query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: Any) -> _Decision:
    """The decision about such tensors, by their rows: (H, all sequences' lengths together, D)."""
    q, k, v = query._values, key._values, value._values
    learns = _learns(query, key, value, None)
    kind = (
        "jagged", query.shape[0], q.shape, k.shape, v.shape, q.dtype, q.device, dropout_p, is_causal, scale, learns, _call.order(),
    )  # fmt: skip
    decision: Optional[_Decision] = _state.decisions.get(kind)
    if decision is None:
        decision = _decide_jagged(query, key, value, dropout_p, is_causal, scale, learns)
        _keep(kind, decision)
    return decision


def _decide_jagged(
    query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: Any, learns: tuple[bool, ...]
) -> _Decision:
    rows = [x._values for x in (query, key, value)]
    batch = query.shape[0]
    about = [_ahead.Shape(x, (batch, x.shape[0], max(1, x.shape[1] // batch), x.shape[2]), ()) for x in rows]
    why = _why_not_fastest(*about, None, dropout_p, is_causal, any(learns), False, True)
    if why:
        return _Decision(None, why)
    q, k, v = (_ahead.of(x.transpose(0, 1)) for x in rows)
    a = _arguments(q, k, v, None, dropout_p, is_causal, scale)._replace(
        cu_seqlens_q=_ahead.of(query.offsets()), cu_seqlens_k=_ahead.of(key.offsets()),
        max_seqlen_q=query._get_max_seqlen(), max_seqlen_k=key._get_max_seqlen(),
    )  # fmt: skip
    return _planned(None, a, learns)


# ---- switching ----


def enable(
    devices: Union[Device, Sequence[Device]] = ("cuda", "cpu"),
    prefer: Optional[Prefer] = "fastest",
    strict: bool = False,
    operators: bool = False,
) -> None:
    """Makes fovea compute calls of torch.nn.functional.scaled_dot_product_attention, forward and backward.

    It applies to every thread of this process, until disable(). Calls that fovea does not compute go back to
    PyTorch; stats() counts them with their reasons, and on CUDA fovea warns once for each reason. Compiled functions are
    compiled again. docs/enable.md lists what is computed, what is handed back and what to look out for.

    Args:
        devices: The devices whose calls fovea computes: "cuda", "cpu" or both.
        prefer: "fastest" hands a call back where measurements that come with fovea say that PyTorch's kernel is faster
            for it. None: fovea computes every call that it can.
        strict: Raises NotImplementedError (of nested tensors RuntimeError) instead of handing a call back, except where `prefer` or
            torch.nn.attention.sdpa_kernel asks for PyTorch and where PyTorch itself refuses the arguments.
        operators: Also puts the operators of fovea.torch.aten in the place of PyTorch's, for programs that call
            PyTorch's fused operators directly (docs/operators.md).

    Raises:
        ValueError: A device or a preference is not accepted.
        TypeError: `devices` is neither a name nor a sequence of names, or `strict` or `operators` is no bool.
        RuntimeError: It is called from code that torch.compile traces.

    Example:
        >>> import torch, fovea.torch
        >>> fovea.torch.enable(prefer=None)
        >>> q = k = v = torch.ones(1, 2, 4, 8)
        >>> _ = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> fovea.torch.stats()["served"]
        1
        >>> fovea.torch.disable()
    """
    settings = _settings(devices, prefer, strict, operators)
    _refuse_while_compiling("enable")
    _put(settings)


def disable() -> None:
    """Makes PyTorch compute scaled_dot_product_attention itself again.

    Results that fovea computed keep fovea's backward.

    Raises:
        RuntimeError: It is called from code that torch.compile traces.
    """
    _refuse_while_compiling("disable")
    _put(None)


def enabled(
    devices: Union[Device, Sequence[Device]] = ("cuda", "cpu"),
    prefer: Optional[Prefer] = "fastest",
    strict: bool = False,
    operators: bool = False,
) -> contextlib.AbstractContextManager[None]:
    """A context in which enable() applies, in every thread of the process. Its end restores the previous state. It may be
    entered several times, and decorate a function.

    Args:
        devices: See enable().
        prefer: See enable().
        strict: See enable().
        operators: See enable().

    Raises:
        ValueError: See enable().
        TypeError: See enable().
        RuntimeError: See enable().
    """
    return _Within(_settings(devices, prefer, strict, operators))


class _Within(contextlib.ContextDecorator):
    """May be entered again, also within itself."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._before: list[tuple[Optional[_Settings], bool]] = []

    def __enter__(self) -> None:
        _refuse_while_compiling("enable")
        self._before.append((_state.settings, torch.backends.mha.get_fastpath_enabled()))
        try:
            _put(self._settings)
        except BaseException:
            self._before.pop()
            raise

    def __exit__(self, *_: Any) -> None:
        settings, fastpath = self._before.pop()
        _put(settings)
        if settings is not None and fastpath:  # although fovea was enabled: the program had turned it on
            torch.backends.mha.set_fastpath_enabled(True)


def is_enabled() -> bool:
    """Whether enable() is in force.

    Returns:
        True from enable() to disable().
    """
    return _state.settings is not None


def stats() -> Stats:
    """Counts the calls of scaled_dot_product_attention since the process began, or since reset_stats().

    Returns:
        A dict. "served": calls that fovea computed. "traced": calls that were put into a graph of torch.compile, which traces a
        call several times; the graph's runs are not counted. "handed_back": by reason, calls that PyTorch computed. "problems": each
        kind of problem that fovea computed or traced, at most 4096, in the form that ``fovea explain`` and ``fovea precompile`` take.
        "operators": by name, calls of PyTorch's operators that fovea computed for enable(operators=True); reasons about them begin
        with the name.
    """
    with _counts.lock:
        served, left = _fast.counts()
        handed_back = dict(_counts.handed_back)
        for reason, count in left.items():
            handed_back[reason] = handed_back.get(reason, 0) + count
        return {
            "served": _counts.served + served,
            "traced": _counts.traced,
            "handed_back": handed_back,
            "problems": list(_counts.problems),
            "operators": dict(_counts.operators),
        }


def print_stats() -> None:
    """Prints stats() on standard error: at the end of a program, if FOVEA_TORCH has the word stats."""
    found = stats()
    lines = [f"process {os.getpid()}: {found['served']} calls of scaled_dot_product_attention computed by fovea, "
             f"{found['traced']} traced"]  # fmt: skip
    lines += [f"{count} calls of {name} computed by fovea" for name, count in found["operators"].items()]
    lines += [f"{count} calls handed back to PyTorch: {why}" for why, count in found["handed_back"].items()]
    # In one piece: other processes print at the same time.
    sys.stderr.write("".join(f"fovea.torch: {line}\n" for line in lines))


def reset_stats() -> None:
    """Sets what stats() counts to zero."""
    with _counts.lock:
        _counts.clear()
        _fast.counts(reset=True)
    _state.decisions.clear()  # they hold which problems have been noted


def _settings(devices: Any, prefer: Any, strict: Any, operators: Any) -> _Settings:
    accepted = "'cuda', 'cpu' or both in a tuple"
    if isinstance(devices, str):
        devices = (devices,)
    if not isinstance(devices, (tuple, list, set, frozenset)):
        raise TypeError(f"devices: {devices!r}; accepted: {accepted}")
    unknown = [name for name in devices if name not in _DEVICES]
    if unknown or not devices:
        raise ValueError(f"devices: {unknown[0] if unknown else devices!r}; accepted: {accepted}")
    if prefer not in _PREFERENCES:
        raise ValueError(f"prefer: {prefer!r}; accepted: {', '.join(map(repr, _PREFERENCES))}")
    for name, value in (("strict", strict), ("operators", operators)):
        if not isinstance(value, bool):
            raise TypeError(f"{name}: {value!r}; accepted: True or False")
    return _Settings(tuple(name for name in _DEVICES if name in devices), prefer, strict, operators)


def _refuse_while_compiling(name: str) -> None:
    if torch.compiler.is_compiling():
        raise RuntimeError(f"fovea.torch.{name}: called from code that torch.compile traces; accepted: before it")


def _put(settings: Optional[_Settings]) -> None:
    with _state.lock:
        before = _state.settings
        if settings == before:
            return
        try:
            _switch(settings)
        except BaseException:
            _switch(before)
            raise
        finally:
            # What was compiled before is not guarded on a registration.
            dynamo = sys.modules.get("torch._dynamo")
            if dynamo is not None and hasattr(dynamo, "reset"):
                dynamo.reset()


def _switch(settings: Optional[_Settings]) -> None:
    """Nothing is in force after an exception."""
    _take_away()
    try:
        if settings is not None:
            _set_up(settings)
    except BaseException:
        _take_away()
        raise


def _set_up(settings: _Settings) -> None:
    _state.decisions = {}
    _state.warned = set()
    _state.settings = settings
    kernel = _fast.connect(_scaled_dot_product_attention, _state, _for_c, _give_back, _composite_now, _owners.PLACES)
    # Autograd's are there first and leave last: another thread's call that found the device's alone would lose its gradient.
    for prefix in ("Autograd", ""):
        library = _library.Library("aten", "IMPL")
        _state.libraries.append(library)
        for device in settings.devices:
            library.impl(_NAME, kernel, prefix + device.upper())
    _owners.forget_dispatch(_NAME)
    if settings.operators:
        owner = _owners.Owner(_OWNER, _why_not_operator, _count_operator, lambda name, why, device: _hand_back(why, device, name))
        _owners.take(owner, OPERATORS, settings.devices)
    _set_tag(settings)
    nested = _nested_module()
    if nested is not None:
        _state.jagged_theirs = nested.jagged_scaled_dot_product_attention
        _state.jagged = nested.jagged_scaled_dot_product_attention = _in_the_place_of(_state.jagged_theirs)
    if settings.prefer is None:
        # nn.TransformerEncoderLayer and nn.MultiheadAttention compute all of themselves in C++ in inference, on the CPU
        # without calling scaled_dot_product_attention.
        _state.fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)


def _take_away() -> None:
    """Of what _set_up() has put there, even if an exception ended it."""
    while _state.libraries:
        _state.libraries.pop()._destroy()
        _owners.forget_dispatch(_NAME)
    _owners.release(_OWNER)
    config = torch.compiler.config
    config.cache_key_tag = config.cache_key_tag.replace(_state.tag, "")
    _state.tag = ""
    if _state.jagged is not None:
        nested = _nested_module()
        if nested.jagged_scaled_dot_product_attention is _state.jagged:  # nobody has put another one there
            nested.jagged_scaled_dot_product_attention = _state.jagged_theirs
        _state.jagged = None
    if _state.fastpath is not None:
        if not torch.backends.mha.get_fastpath_enabled():  # the program has not set it since
            torch.backends.mha.set_fastpath_enabled(_state.fastpath)
        _state.fastpath = None
    _state.settings = None


def _set_tag(settings: _Settings) -> None:
    """PyTorch keeps compiled graphs on disk by a key that has what was traced: scaled_dot_product_attention as one
    node, whatever computes it. So this adds to the key what does."""
    config = torch.compiler.config
    devices = "+".join(settings.devices)
    _state.tag = f";fovea-{version()} {devices} prefer={settings.prefer} strict={settings.strict}"
    if settings.prefer is not None:  # what a decision depends on besides the call: the table, and its section for the CPU
        cpu = [_fastest.section_of(torch.device("cpu"), is_bf16) for is_bf16 in (False, True)]
        _state.tag += f" {zlib.crc32(_fastest.contents()):08x} {'+'.join(cpu)} {_fastest.vendor()}"
    if settings.operators:
        _state.tag += " operators"
    config.cache_key_tag = config.cache_key_tag + _state.tag


def _nested_module() -> Any:
    """Where NestedTensor finds its attention; None if this version of PyTorch has it elsewhere."""
    try:
        from torch.nested._internal import ops
    except ImportError:
        return None
    module: Any = ops
    return module if hasattr(module, "jagged_scaled_dot_product_attention") else None

