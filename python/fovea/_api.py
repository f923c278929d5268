# SPDX-License-Identifier: Apache-2.0
"""The functions that users call. Their keywords become a fovea_problem in _problem.py, their arrays memory in
_arrays.py; what is computed is the C library's business, and docs/semantics.md says what that is."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, NoReturn, Optional, TypeVar, Union

import numpy as np

from fovea import _abi, _help, _library
from fovea._arrays import Maker, View, place_of, read
from fovea._library import check, lib, text
from fovea._problem import (
    _RNG,
    DIFFERENTIABLE,
    Problem,
    choose,
    need_seed,
    needed,
    real,
    shape_text,
    word,
    word_view,
)

Array = TypeVar("Array")  # NumPy's, or any with __dlpack__ or __array_interface__


class Gradients(NamedTuple):
    """What attention_backward returns: a tuple of six, None where a gradient was not asked for.

    By name, grads.bias, or in this order: grad_q, grad_k, grad_v, *_ = attention_backward(...).
    """

    q: Any = None
    k: Any = None
    v: Any = None
    bias: Any = None
    bias2: Any = None
    sink: Any = None

    def __repr__(self) -> str:
        shown = (
            f"{name}={'None' if grad is None else f'<{shape_text(tuple(grad.shape))} {grad.dtype}>'}"
            if grad is None or (hasattr(grad, "shape") and hasattr(grad, "dtype"))
            else f"{name}=<{type(grad).__name__}>"
            for name, grad in zip(self._fields, self)
        )
        return f"Gradients({', '.join(shown)})"


def attention(
    q: Array,
    k: Any,
    v: Any,
    *more: NoReturn,
    bias: Any = None,
    bias2: Any = None,
    mask: Any = None,
    scale: Optional[float] = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    align: Optional[str] = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    offset: Any = 0,
    rng: str = "fovea",
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    batch_shape: Optional[Sequence[int]] = None,
    layout: str = "bshd",
    deterministic: bool = False,
    return_lse: bool = False,
    out: Any = None,
    backend: Optional[str] = None,
    stream: Optional[int] = None,
    **unknown: NoReturn,
) -> Any:
    """softmax(scale * q @ k.T + ...) @ v, exactly, in memory linear in the sequence length.

    q is (B, S, Hq, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv); layout="bhsd" has S and H the other way round, five
    dimensions are a batch of two levels (B1, B2), and with cu_seqlens_q and cu_seqlens_k all three are packed,
    (total, H, D). The types are float32, float16, bfloat16 or float64.

    bias, bias2    added to the scaled (and soft-capped) scores; they broadcast to (B, Hq, Sq, Sk)
    mask           bool, true takes part; broadcasts likewise
    scale          1 / sqrt(D) unless given
    causal         query i sees the keys j <= i + shift
    window         (left, right): and those with i + shift - left <= j <= i + shift + right; -1 is unbounded
    align          "bottom_right": shift = Sk - Sq; "top_left": shift = 0; has to be said where they differ
    softcap        s becomes softcap * tanh(s / softcap); 0 for none
    alibi_slopes   (Hq), (B, Hq) or (B1, B2, Hq): -slope * |i + shift - j| is added; on the CPU these and the lengths
                   below may be lists, float64 slopes are rounded to float32 (but with float64 q), int64 seqused do
    sink           (Hq): one more logit of each head in the denominator, without a value
    dropout_p, seed, offset, rng
                   drops each probability with p; the mask is a function of seed and offset (integers, or arrays of
                   one int64) and of the place, so that the backward, given the same two, draws it again; a negative
                   integer stands for its two's complement of 64 bits
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, batch_shape
                   B + 1 offsets of packed sequences; the longest, which bias and mask have to reach; (B1, B2)
    seqused_q, seqused_k
                   (B), int32: only so many rows of each sequence exist
    deterministic  the same bits in every run; on the CPU they always are
    return_lse     also returns the logarithm of each row's denominator, which the backward needs
    out            an array to write into
    backend        one of fovea.backends(), instead of the best
    stream         the address of the CUDA stream to work on, instead of the current one of q's library

    Returns out, or (out, lse): of q's library, type and layout. lse is (B, Hq, Sq), packed (Hq, total_q), float32
    (float64 with float64 q).
    """
    if more or unknown:
        raise _help.refuse("attention", "q, k, v", more, unknown, attention.__kwdefaults__)
    problem = Problem(q, k, v, locals())
    if out is None:
        fresh = problem.new("out")
    else:
        problem.into("out", out)
    lse = problem.new("lse") if return_lse else None
    problem.run(_abi.FORWARD)
    result = fresh.result() if out is None else out
    return result if lse is None else (result, lse.result())


def attention_backward(
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *more: NoReturn,
    grad_lse: Any = None,
    need: Union[str, Iterable[str], None] = None,
    grads_out: Union[Mapping[str, Any], Gradients, None] = None,
    bias: Any = None,
    bias2: Any = None,
    mask: Any = None,
    scale: Optional[float] = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    align: Optional[str] = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    offset: Any = 0,
    rng: str = "fovea",
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    batch_shape: Optional[Sequence[int]] = None,
    layout: str = "bshd",
    deterministic: bool = False,
    backend: Optional[str] = None,
    stream: Optional[int] = None,
    **unknown: NoReturn,
) -> Gradients:
    """The gradients of attention(q, k, v, ...), given those of out (and, where lse was used, of lse).

    out and lse are what attention(..., return_lse=True) returned, and every other keyword is to be the same as
    there; fovea.Attention sees to that.

    need       which gradients: names of "q", "k", "v", "bias", "bias2", "sink"; None is every one that was given.
               What is not asked for is not computed; to ask for nothing is refused.
    grads_out  arrays to write into, by those names; packed views of one tensor are fine

    The gradient of a bias has the shape of that bias as it was given: the sum over what was broadcast is done.
    """
    if more or unknown:
        first = "grad_out, q, k, v, out, lse"
        raise _help.refuse("attention_backward", first, more, unknown, attention_backward.__kwdefaults__)
    problem = Problem(q, k, v, locals())
    problem.give("grad_out", grad_out)
    problem.give("out", out)
    problem.give("lse", lse)
    if grad_lse is not None:
        problem.give("grad_lse", grad_lse)
    names = needed(need, [name for name in DIFFERENTIABLE if name in problem.views])
    into = _by_name(grads_out)
    for name in into:
        if name not in DIFFERENTIABLE:
            raise ValueError(f"grads_out: {name!r}, which names no gradient; accepted: {', '.join(names)}")
        if name not in names:
            raise ValueError(f"grads_out: {name!r}, which is not asked for; accepted: {', '.join(names)}")
    fresh = {}
    for name in names:
        if name in into:
            problem.into(f"grad_{name}", into[name])
        else:
            fresh[name] = problem.new(f"grad_{name}")
    problem.run(_abi.BACKWARD)
    return Gradients(**into, **{name: array.result() for name, array in fresh.items()})


def _by_name(grads_out: Any) -> dict[str, Any]:
    if grads_out is None:
        return {}
    if isinstance(grads_out, Gradients):
        grads_out = grads_out._asdict()
    if not isinstance(grads_out, Mapping):
        raise TypeError(f"grads_out: a {type(grads_out).__name__}; accepted: a dict of arrays by name, or Gradients")
    return {name: array for name, array in grads_out.items() if array is not None}


def dropout_mask(
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    p: float,
    *,
    seed: Any,
    offset: Any = 0,
    rng: str = "fovea",
) -> np.ndarray:
    """The dropout decisions of attention(..., dropout_p=p, seed=seed, offset=offset) as a bool array of
    (batch, heads, seqlen_q, seqlen_k): true is kept."""
    shape = tuple(
        _count(name, n)
        for name, n in zip(("batch", "heads", "seqlen_q", "seqlen_k"), (batch, heads, seqlen_q, seqlen_k))
    )
    rule = choose("rng", rng, _RNG)
    seed, offset = _value("seed", seed), _value("offset", offset)
    mask = np.empty(shape, np.bool_)
    check(lib.fovea_dropout_mask(*shape, real("p", p), seed, offset, rule, mask.ctypes.data))
    return mask


def _count(name: str, value: Any) -> int:
    if not isinstance(value, Integral):
        raise TypeError(f"{name}: {value!r}; accepted: an integer")
    number = int(value)
    if not 0 <= number < 2**63:
        raise ValueError(f"{name}: {number}; accepted: 0 to {2**63 - 1}")
    return number


def _value(name: str, value: Any) -> int:
    if isinstance(value, Integral):
        return word(name, value)
    return word(name, word_view(name, value).numpy().item())


def pack(arrays: Iterable[Any]) -> tuple[Any, Any, int]:
    """Sequences of different lengths, each (S, H, D), as attention takes them: (packed, cu_seqlens, max_seqlen).

    packed is (total, H, D) and of the first array's library, cu_seqlens the int32 offsets (int64 past 2^31).
    """
    arrays = list(arrays)
    if not arrays:
        raise ValueError("arrays: an empty list; accepted: at least one array")
    place = place_of("arrays[0]", arrays[0], None)
    views = [read(f"arrays[{index}]", array, place) for index, array in enumerate(arrays)]
    first = views[0]
    for index, view in enumerate(views):
        if len(view.shape) != 3:
            raise ValueError(
                f"arrays[{index}]: shape {shape_text(view.shape)}; accepted: (S, H, D), one sequence in each array"
            )
        if view.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"arrays[{index}]: shape {shape_text(view.shape)}; accepted: any length, followed by "
                f"{shape_text(first.shape[1:])} as in arrays[0]"
            )
        if view.type != first.type:
            raise TypeError(f"arrays[{index}]: {view.type}; accepted: {first.type}, as in arrays[0]")
    lengths = [view.shape[0] for view in views]
    total = sum(lengths)
    kind = "int32" if total < 2**31 else "int64"
    if place is not None:
        memory = place.memory
        if not memory.owns(arrays[0]):
            raise NotImplementedError(
                f"arrays[0]: a {type(arrays[0]).__name__} on a CUDA device; accepted: PyTorch's or CuPy's arrays"
            )
        ends = [0, *itertools.accumulate(lengths)]
        return memory.join(arrays), memory.integers(place.index, ends, kind), max(lengths)
    maker = Maker("arrays[0]", arrays[0])
    packed = maker.empty((total, *first.shape[1:]), first.type)
    offsets = maker.empty((len(arrays) + 1,), kind)
    np.concatenate([_bits(view) for view in views], out=_bits(packed.view))
    offsets.view.numpy()[0] = 0
    np.cumsum(lengths, out=offsets.view.numpy()[1:])
    return packed.result(), offsets.result(), max(lengths)


def unpack(packed: Any, cu_seqlens: Any) -> list[Any]:
    """The sequences of a packed array, views of it: what pack() was given, or the same of a result.

    packed is (total, ...), of any library whose arrays are sliced as NumPy's; lse, (Hq, total), is unpacked as lse.T.
    Offsets that lie on a device are read, which waits for it.
    """
    shape = getattr(packed, "shape", None)
    if not shape or not hasattr(packed, "__getitem__"):
        given = f"a {type(packed).__name__}" if shape is None else f"shape {shape_text(tuple(shape))}"
        raise TypeError(f"packed: {given}; accepted: an array (total, H, D) that can be sliced")
    ends = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens
    if not isinstance(ends, (list, tuple)):
        ends = read("cu_seqlens", cu_seqlens).numpy().tolist()
    if not isinstance(ends, (list, tuple)) or not all(isinstance(end, Integral) for end in ends):
        raise TypeError("cu_seqlens: not a vector of integers; accepted: the B + 1 offsets that pack() returns")
    total = shape[0]
    if not ends or ends[0] != 0 or ends[-1] > total or any(end < start for start, end in zip(ends, ends[1:])):
        text = ", ".join(map(str, ends if len(ends) <= 8 else [*ends[:7], "..."]))
        raise ValueError(
            f"cu_seqlens: {text}; accepted: offsets that begin with 0, never fall and end at most with {total}"
        )
    return [packed[start:end] for start, end in zip(ends, ends[1:])]


def _bits(view: View) -> np.ndarray:
    """bfloat16 as integers: NumPy alone does not know it."""
    array = view.numpy()
    return array.view(np.uint16) if view.type == "bfloat16" else array


def set_num_threads(n: int) -> None:
    """Threads of a call on the CPU; 0: as many as this process may use, which is where it starts."""
    if not isinstance(n, Integral):
        raise TypeError(f"n: {n!r}; accepted: an integer")
    number = int(n)
    try:
        check(lib.fovea_set_num_threads(max(-1, min(number, 2**31 - 1))))
    except ValueError as error:  # the library knows how many are accepted, and has seen an int
        accepted = str(error).partition("; ")[2]
        raise ValueError(f"n: {number}; {accepted}") from None


def num_threads() -> int:
    """Threads of a call on the CPU."""
    return lib.fovea_num_threads()


def backends() -> dict[str, str]:
    """Each backend's name, and "available" or why it is not."""
    return dict(line.split("\t", 1) for line in text(lib.fovea_backends).splitlines())


def explain(*arguments: Any, direction: Optional[str] = None, arch: Optional[str] = None, **options: Any) -> str:
    """Which backend computes a problem, and why each other one does not.

    explain(q, k, v, causal=True)                  for these arrays
    explain(q, k, v, direction="backward")         for their backward; need=... or grad_lse=... mean it, too
    explain("fwd b=2 hq=8 sq=512 d=64 bf16 ...")   for a problem in its one-line form
    explain(..., arch="sm_90")                     for a GPU of this architecture, which need not be there
    explain()                                      what this machine has: backends, threads, GPUs, compiler, cache
    """
    if not arguments:
        _refuse(options if arch is None else {"arch": arch, **options}, "explain() without a problem")
        return _doctor()
    if len(arguments) == 1 and isinstance(arguments[0], str):
        _refuse(options, "a problem in one line says everything itself")
        return _explain_line(arguments[0], arch)
    if len(arguments) != 3:
        raise TypeError(f"explain: {len(arguments)} arguments; accepted: none, a line, or q, k, v")
    need = options.pop("need", None)
    return_lse = options.pop("return_lse", False)
    grad_lse = options.pop("grad_lse", None)
    of_backward = "need" if need is not None else "grad_lse" if grad_lse is not None else None
    if direction is None:
        way = _abi.FORWARD if of_backward is None else _abi.BACKWARD
    else:
        way = choose("direction", direction, {"forward": _abi.FORWARD, "backward": _abi.BACKWARD})
        if way == _abi.FORWARD and of_backward is not None:
            raise ValueError(f"{of_backward}: given with direction='forward'; accepted: direction='backward', or none")
    for name in options:
        if name == "backward":
            raise TypeError('backward: not an option; direction="backward"')
        _known(name, ("direction", "need", "grad_lse", "return_lse", "arch"))
    problem = Problem(*arguments, {**_SHARED, **options})
    problem.expect("out")
    if way == _abi.FORWARD:
        if return_lse:
            problem.expect("lse")
    else:
        problem.expect("lse")
        raw = problem.raw
        raw.grad_out = raw.out
        if grad_lse is not None:
            raw.grad_lse = raw.lse
        for name in needed(need, [name for name in DIFFERENTIABLE if name in problem.views]):
            problem.expect(f"grad_{name}")
    return problem.explain(way) if arch is None else _explain_line(problem.describe(way), arch)


def _explain_line(line: str, arch: Optional[str]) -> str:
    if arch is None:
        return text(lib.fovea_explain_line, line.encode(), tolerate=_abi.UNSUPPORTED)
    if not isinstance(arch, str):
        raise TypeError(f"arch: {arch!r}; accepted: an architecture's name, such as 'sm_90'")
    return text(lib.fovea_explain_for, line.encode(), arch.encode(), tolerate=_abi.UNSUPPORTED)


def prepare(
    q: Any, k: Any, v: Any, *, direction: str = "forward", need: Any = None, grad_lse: Any = None, **options: Any
) -> None:
    """Compiles (or reads from the cache) and loads the kernels of attention(q, k, v, ...), so that the call itself does
    not: before a CUDA graph captures it, or to have the time spent before the first call.

    Options are the call's, return_lse too. direction="backward", or need or grad_lse, prepares
    attention_backward(..., q, k, v, ...) for results as these functions make them. Nothing is computed, and on the CPU
    there is nothing to do.
    """
    way = choose("direction", direction, {"forward": _abi.FORWARD, "backward": _abi.BACKWARD})
    if need is not None or grad_lse is not None:
        way = _abi.BACKWARD
    return_lse = options.pop("return_lse", False)
    for name in options:
        _known(name, ("direction", "need", "grad_lse", "return_lse"))
    problem = Problem(q, k, v, {**_SHARED, **options})
    made = [problem.new("out")]
    if return_lse or way == _abi.BACKWARD:
        made.append(problem.new("lse"))
    if way == _abi.BACKWARD:
        problem.raw.grad_out = problem.raw.out
        if grad_lse is not None:
            problem.raw.grad_lse = problem.raw.lse
        made += [
            problem.new(f"grad_{name}") for name in needed(need, [x for x in DIFFERENTIABLE if x in problem.views])
        ]
    problem.prepare(way)


def _refuse(options: Mapping[str, Any], why: str) -> None:
    if options:
        raise TypeError(f"{', '.join(options)}: {why}; accepted: no options")


def _known(name: str, more: Sequence[str] = ()) -> None:
    if name not in _SHARED:
        raise TypeError(f"{name}: not an option; {_help.instead(name, (*_SHARED, *more))}")


def _doctor() -> str:
    lines = [f"fovea {_library.version()}", f"library   {_library.path}", f"threads   {num_threads()}"]
    lines += [f"backend   {name}: {state}" for name, state in backends().items()]
    facts = [line.split("\t", 1) for line in text(lib.fovea_machine).splitlines()]
    refused = {name: why for name, why in facts if name.startswith("FOVEA_")}
    lines += [f"{name:<9} {value}" for name, value in facts if name not in refused]
    for name, value in sorted(os.environ.items()):
        if name.startswith("FOVEA_"):
            lines.append(f"REFUSED   {name}: {refused[name]}" if name in refused else f"set       {name}={value}")
    return "\n".join(lines)


# What forward and backward share, with its defaults: read from the one signature that states them.
_SHARED: dict[str, Any] = {
    name: default for name, default in (attention.__kwdefaults__ or {}).items() if name not in ("return_lse", "out")
}
_TENSORS = (
    "bias",
    "bias2",
    "mask",
    "alibi_slopes",
    "sink",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "batch_shape",
    "stream",
)


class Attention:
    """attention() and attention_backward() with the same options, fixed when it is made.

    Options are the keywords of attention(). Those that are tensors, or go with them (bias, mask, cu_seqlens_q, ...),
    may be given here or in each call; the others only here: a call that gives one is refused. with_() makes
    another object with some of them changed, such as the next step's dropout offset. Each is an attribute to read.

        attend = fovea.Attention(causal=True, dropout_p=0.1, seed=7)
        out, lse = attend(q, k, v, bias=bias, return_lse=True)
        grads = attend.backward(grad_out, q, k, v, out, lse, bias=bias)
    """

    def __init__(self, **options: Any) -> None:
        for name in options:
            _known(name)
        if options.get("seed") is None:  # no call can give one
            need_seed(real("dropout_p", options.get("dropout_p", 0.0)))
        object.__setattr__(self, "_options", options)

    def __setattr__(self, name: str, value: Any) -> None:
        """Options are fixed; what is none may be one that is misspelt, but for attributes that a class of one's own adds."""
        if name in _SHARED:
            raise AttributeError(f"{name}: fixed when this Attention was made; with_({name}=...) makes another one")
        if type(self) is Attention or _help.cure(name, _SHARED):
            raise AttributeError(
                f"{name}: not an option, and options are fixed when an Attention is made; {_help.instead(name, _SHARED)}"
            )
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Each option by its name, with attention()'s default where it was not given."""
        if name not in _SHARED:
            cure = _help.cure(name, (*_SHARED, "options", "with_", "backward", "explain", "prepare"))
            raise AttributeError(f"{name}: neither an option nor a method of fovea.Attention{cure and '; ' + cure}")
        return self._options.get(name, _SHARED[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_SHARED]

    @property
    def options(self) -> dict[str, Any]:
        """What it was made with."""
        return dict(self._options)

    def with_(self, **changes: Any) -> Attention:
        """Another Attention with some options changed."""
        return Attention(**{**self._options, **changes})

    def __call__(self, q: Any, k: Any, v: Any, *, return_lse: bool = False, out: Any = None, **tensors: Any) -> Any:
        return attention(q, k, v, return_lse=return_lse, out=out, **self._merged(tensors))

    def backward(
        self,
        grad_out: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        *,
        grad_lse: Any = None,
        need: Union[str, Iterable[str], None] = None,
        grads_out: Union[Mapping[str, Any], Gradients, None] = None,
        **tensors: Any,
    ) -> Gradients:
        return attention_backward(
            grad_out, q, k, v, out, lse, grad_lse=grad_lse, need=need, grads_out=grads_out, **self._merged(tensors)
        )

    def explain(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        direction: Optional[str] = None,
        need: Any = None,
        arch: Optional[str] = None,
        **tensors: Any,
    ) -> str:
        return explain(q, k, v, direction=direction, need=need, arch=arch, **self._merged(tensors))

    def prepare(self, q: Any, k: Any, v: Any, **more: Any) -> None:
        tensors = {name: more.pop(name) for name in list(more) if name in _SHARED}
        prepare(q, k, v, **more, **self._merged(tensors))

    def __repr__(self) -> str:
        options = (
            f"{n}={v!r}" if np.isscalar(v) or isinstance(v, tuple) else f"{n}=..." for n, v in self._options.items()
        )
        return f"fovea.Attention({', '.join(options)})"

    def _merged(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        for name in tensors:
            if name in self._options:
                raise TypeError(f"{name}: fixed when this Attention was made; with_({name}=...) makes another one")
            if name not in _TENSORS:
                _known(name)
                raise TypeError(f"{name}: not accepted in a call; with_({name}=...) makes an Attention that has it")
        return {**self._options, **tensors}
