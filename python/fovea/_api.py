# SPDX-License-Identifier: Apache-2.0
"""The functions that users call. _problem.py turns their keywords into a fovea_problem, _arrays.py their arrays into
addresses, shapes and strides. The C library computes; docs/semantics.md defines what."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, Optional, TypeVar, Union, overload

import numpy as np

from . import _abi, _help, _library, _options
from ._arrays import Maker, View, place_of, read
from ._library import check, encoded, lib, text
from ._problem import (
    _RNG,
    DIFFERENTIABLE,
    Problem,
    choose,
    flag,
    need_seed,
    needed,
    real,
    shape_text,
    word,
    word_view,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Unpack

    from ._options import Align, CallOptions, Direction, Layout, Options, PlannedOptions, Rng

Array = TypeVar("Array")  # NumPy's, or any with __dlpack__, __array_interface__ or __cuda_array_interface__
NumPyArray = TypeVar("NumPyArray", bound="np.ndarray[Any, Any]")


class Gradients(NamedTuple):
    """The gradients that attention_backward() returns, by name or by position.

    A gradient that was not requested is None. Each has the shape and the type of its input.

    Attributes:
        q: Gradient of q.
        k: Gradient of k.
        v: Gradient of v.
        bias: Gradient of bias, in the shape in which bias was given.
        bias2: Gradient of bias2, likewise.
        sink: Gradient of sink, (Hq,).

    Example:
        >>> import numpy as np, fovea
        >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
        >>> out, lse = fovea.attention(q, k, v, return_lse=True)
        >>> grads = fovea.attention_backward(np.ones_like(out), q, k, v, out, lse)
        >>> grad_q, grad_k, grad_v, *_ = grads
        >>> grads.v is grad_v, grads.bias is None
        (True, True)
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


@overload
def attention(
    q: Array,
    k: Any,
    v: Any,
    *,
    return_lse: Literal[False] = False,
    out: Optional[Array] = None,
    lse: Any = None,
    accumulate: bool = False,
    **options: Unpack[Options],
) -> Array: ...
@overload
def attention(
    q: NumPyArray,
    k: Any,
    v: Any,
    *,
    return_lse: Literal[True],
    out: Optional[NumPyArray] = None,
    lse: Any = None,
    accumulate: bool = False,
    **options: Unpack[Options],
) -> tuple[NumPyArray, NDArray[np.floating[Any]]]: ...
@overload
def attention(
    q: Array, k: Any, v: Any, *, return_lse: Literal[True], out: Optional[Array] = None, lse: Any = None,
    accumulate: bool = False, **options: Unpack[Options],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def attention(
    q: Array, k: Any, v: Any, *, return_lse: bool, out: Optional[Array] = None, lse: Any = None, accumulate: bool = False,
    **options: Unpack[Options],
) -> Union[Array, tuple[Array, Any]]: ...  # fmt: skip
def attention(
    q: Any,
    k: Any,
    v: Any,
    *more: NoReturn,
    bias: Any = None,
    bias2: Any = None,
    mask: Any = None,
    scale: Optional[float] = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    align: Optional[Align] = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    offset: Any = 0,
    rng: Rng = "fovea",
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    batch_shape: Optional[Sequence[int]] = None,
    position_q: Optional[int] = None,
    position_k: Optional[int] = None,
    positions_q: Any = None,
    positions_k: Any = None,
    dropout_streams: Any = None,
    layout: Layout = "bshd",
    deterministic: bool = False,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    accumulate: bool = False,
    backend: Optional[str] = None,
    stream: Optional[int] = None,
    **unknown: NoReturn,
) -> Any:
    """Computes softmax(scale * q @ k.T + ...) @ v exactly, in memory linear in the sequence lengths.

    Arrays are NumPy's, or any with ``__dlpack__``, ``__array_interface__`` or ``__cuda_array_interface__``, on the CPU
    or all on one CUDA device. In the shapes below B is the batch, Sq and Sk are the numbers of queries and keys, Hq and
    Hk the numbers of heads, D and Dv the head dimensions of q and k and of v. Two variants of these shapes exist. A
    batch may have two levels, (B1, B2, S, H, D). With cu_seqlens_q and cu_seqlens_k the sequences are packed one after
    the other without padding, (total, H, D). docs/semantics.md states the formula.

    Args:
        q: Queries, (B, Sq, Hq, D): float32, float16, bfloat16 or, on the CPU, float64.
        k: Keys, (B, Sk, Hk, D), of q's type. Hq is a multiple of Hk; query head h reads key head h // (Hq // Hk).
        v: Values, (B, Sk, Hk, Dv), of q's type.
        bias: Added to the scaled and soft-capped scores. It broadcasts to (B, Hq, Sq, Sk), with packed sequences to
            (B, Hq, max_seqlen_q, max_seqlen_k). Any floating-point type; float64 only with float64 q.
        bias2: A second bias, likewise.
        mask: bool, true where a pair of query and key takes part. It broadcasts as bias does.
        scale: Factor of the scores; None is 1 / sqrt(D).
        causal: Query i sees the keys j <= i + shift; see align.
        window: (left, right), in positions: query i sees the keys from i + shift - left to i + shift + right. -1 is
            unbounded.
        align: "bottom_right" makes shift = Sk - Sq, so that the last query meets the last key, as in FlashAttention.
            "top_left" makes shift = 0, as PyTorch's is_causal does. With causal, window or alibi_slopes it is
            required where Sq and Sk differ, unless positions are given.
        softcap: c > 0 replaces a score s by c * tanh(s / c), before biases are added. 0: none.
        alibi_slopes: (Hq,), (B, Hq) or (B1, B2, Hq): adds -slope * abs(i + shift - j). float32; on the CPU a list or
            float64 is rounded to float32, unless q is float64. It has no gradient.
        sink: (Hq,): one more logit of each head in the softmax, without a value. float32; float64 with float64 q.
        dropout_p: Probability in [0, 1] with which each attention weight is dropped.
        seed: With dropout_p: an integer of up to 64 bits, or an array of one int64 or uint64 that is read when the call
            computes. The mask is a function of seed, offset and the position, so the backward draws the same one again.
            A negative integer is read as its two's complement.
        offset: Likewise. Another offset, like another seed, gives an unrelated mask.
        rng: "fovea", or "torch_mem_efficient" for the masks of PyTorch's memory-efficient kernel, bit for bit.
        cu_seqlens_q: (B + 1,), int32 or int64: packed sequence b has the query rows cu_seqlens_q[b] to
            cu_seqlens_q[b + 1]. On the CPU it may be a list, as may the three other arrays of lengths.
        cu_seqlens_k: The same for the keys.
        max_seqlen_q: At least the length of the longest packed sequence; with seqused_q at least the longest used length.
            None reads it from cu_seqlens_q, which is possible on the CPU only.
        max_seqlen_k: The same for the keys.
        seqused_q: (B,), int32 (on the CPU also int64): how many query rows of each sequence exist, from its first row on.
        seqused_k: The same for the keys.
        batch_shape: (B1, B2): makes the packed sequences a batch of two levels.
        position_q: The position of query 0 in a larger problem, of which this call computes a part. If one of the four
            positions is given, those that are not count as 0, shift is the position of query 0 minus that of key 0, and
            dropout decides about a pair by its positions. align is then left out. With dropout a multiple of 16.
        position_k: The position of key 0, likewise.
        positions_q: (B,), int64: a number for each sequence that is added to position_q. On the CPU it may be a list.
        positions_k: The same for the keys.
        dropout_streams: The number of each head's stream of random numbers for dropout, int64. It broadcasts to (B, Hq),
            with two levels to (B1, B2, Hq). None: b * Hq + h.
        layout: The order of dimensions of q, k, v and out: "bshd" is (B, S, H, D), "bhsd" is (B, H, S, D).
            fovea.torch.attention has the other default.
        deterministic: The same inputs give the same bits in every run. On the CPU they always do.
        return_lse: Also returns the logsumexp of each query's scores, which the backward needs.
        out: An array to write the result into, of q's type, or float32 where that has 16 bits.
        lse: An array to write the logsumexp into.
        accumulate: out and lse, float32 or float64, hold the result over other keys, and get that over those keys and these. A
            row without keys has 0 and -inf there. A sink takes part in one of the calls.
        backend: A name from fovea.backends(); None takes the best that can compute the problem.
        stream: The address of the CUDA stream to compute on; None takes the current stream of q's library.

    Returns:
        out, an array of q's library, type and layout, (B, Sq, Hq, Dv). With return_lse the pair (out, lse), where lse
        is (B, Hq, Sq) in every layout, packed (Hq, total_q), and float32 (float64 with float64 q).

    Raises:
        ValueError: A shape or a value is not accepted. Every error names the argument, what it was and what is
            accepted, and nothing has been written.
        TypeError: A type or a keyword is not accepted.
        NotImplementedError: No backend here computes this problem; explain() says why.
        MemoryError: There is too little memory.

    Example:
        >>> import numpy as np, fovea
        >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)           # batch, sequence, heads, head dimension
        >>> out, lse = fovea.attention(q, k, v, causal=True, return_lse=True)
        >>> out.shape, lse.shape
        ((1, 4, 2, 8), (1, 2, 4))
    """
    if more or unknown:
        raise _help.refuse("attention", "q, k, v", more, unknown, attention.__kwdefaults__)
    problem = Problem(q, k, v, locals())
    if out is None:
        fresh = problem.new("out")
    else:
        problem.into("out", out)
    if accumulate and (out is None or lse is None):
        raise ValueError(f"{'out' if out is None else 'lse'}: None with accumulate; accepted: the array of a result over other keys")
    made = problem.new("lse") if return_lse and lse is None else None
    if lse is not None:
        problem.into("lse", lse)
    if flag("accumulate", accumulate):
        problem.raw.accumulate = _abi.ACCUMULATE_OUT
    problem.run(_abi.FORWARD)
    result = fresh.result() if out is None else out
    return (result, lse if made is None else made.result()) if return_lse else result


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
    accumulate: Union[str, Iterable[str]] = (),
    bias: Any = None,
    bias2: Any = None,
    mask: Any = None,
    scale: Optional[float] = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    align: Optional[Align] = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    offset: Any = 0,
    rng: Rng = "fovea",
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    batch_shape: Optional[Sequence[int]] = None,
    position_q: Optional[int] = None,
    position_k: Optional[int] = None,
    positions_q: Any = None,
    positions_k: Any = None,
    dropout_streams: Any = None,
    layout: Layout = "bshd",
    deterministic: bool = False,
    backend: Optional[str] = None,
    stream: Optional[int] = None,
    **unknown: NoReturn,
) -> Gradients:
    """Computes the gradients of attention(q, k, v, ...) from that of its result.

    The keywords from bias on are those of attention(). They must have the values that they had in the forward:
    fovea cannot check that. An object of fovea.Attention keeps them equal.

    Args:
        grad_out: Gradient of out, of out's shape and type.
        q: As in the forward.
        k: As in the forward.
        v: As in the forward.
        out: What attention(..., return_lse=True) returned.
        lse: Likewise.
        grad_lse: Gradient of lse, of its shape and type, where something depends on lse.
        need: Which gradients to compute: names out of "q", "k", "v", "bias", "bias2" and "sink", as a list or separated
            by commas. None computes that of every input that was given.
        grads_out: Arrays to write gradients into, by those names. They may be views of one array, such as a packed
            tensor of q, k and v, and float32 where the input has 16 bits.
        accumulate: Names of grads_out, as in need. These gradients are added to what the arrays hold, float32 or float64.
        bias: This and all that follow: as in attention().
        bias2: See attention().
        mask: See attention().
        scale: See attention().
        causal: See attention().
        window: See attention().
        align: See attention().
        softcap: See attention().
        alibi_slopes: See attention().
        sink: See attention().
        dropout_p: See attention().
        seed: See attention().
        offset: See attention().
        rng: See attention().
        cu_seqlens_q: See attention().
        cu_seqlens_k: See attention().
        max_seqlen_q: See attention().
        max_seqlen_k: See attention().
        seqused_q: See attention().
        seqused_k: See attention().
        batch_shape: See attention().
        position_q: See attention().
        position_k: See attention().
        positions_q: See attention().
        positions_k: See attention().
        dropout_streams: See attention().
        layout: See attention().
        deterministic: See attention().
        backend: See attention().
        stream: See attention().

    Returns:
        A tuple of six, with None for what was not requested. Each gradient has the shape, the type and the library of
        its input. That of a bias is summed over every dimension that was broadcast.

    Raises:
        ValueError: As attention(). Also for an empty need, and one that names an input that was not given.
        TypeError: As attention().
        NotImplementedError: As attention().
        MemoryError: As attention().

    Example:
        >>> import numpy as np, fovea
        >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
        >>> out, lse = fovea.attention(q, k, v, causal=True, return_lse=True)
        >>> grads = fovea.attention_backward(np.ones_like(out), q, k, v, out, lse, causal=True, need="q,k")
        >>> grads.k.shape, grads.v is None
        ((1, 4, 2, 8), True)
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
            raise ValueError(f"grads_out: {name!r}, which need does not name; accepted: {', '.join(names)}")
    fresh = {}
    for name in names:
        if name in into:
            problem.into(f"grad_{name}", into[name])
        else:
            fresh[name] = problem.new(f"grad_{name}")
    for name in accumulate.split(",") if isinstance(accumulate, str) and accumulate else accumulate:
        if name not in into:
            raise ValueError(f"accumulate: {name!r}; accepted: names of grads_out, {', '.join(into) or 'which is not given'}")
        problem.raw.accumulate |= _abi.ACCUMULATE_GRADS[name]
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
    rng: Rng = "fovea",
) -> NDArray[np.bool_]:
    """Returns which attention weights attention(..., dropout_p=p, seed=seed, offset=offset) keeps.

    Args:
        batch: B, the number of sequences.
        heads: Hq, the number of query heads.
        seqlen_q: Sq, the number of queries.
        seqlen_k: Sk, the number of keys.
        p: Probability with which a weight is dropped.
        seed: An integer of up to 64 bits, or an array of one int64 or uint64 on the CPU.
        offset: Likewise.
        rng: The rule: "fovea" or "torch_mem_efficient".

    Returns:
        A bool array of (batch, heads, seqlen_q, seqlen_k), true where a weight is kept.

    Raises:
        ValueError: A number is out of its range.
        TypeError: An argument has a wrong type.

    Example:
        >>> import fovea
        >>> fovea.dropout_mask(1, 2, 3, 4, 0.1, seed=7).shape
        (1, 2, 3, 4)
    """
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


@overload
def pack(arrays: Iterable[NumPyArray]) -> tuple[NumPyArray, NDArray[np.signedinteger[Any]], int]: ...
@overload
def pack(arrays: Iterable[Array]) -> tuple[Array, Array, int]: ...
def pack(arrays: Iterable[Any]) -> tuple[Any, Any, int]:
    """Joins sequences of different lengths into one packed array.

    Args:
        arrays: At least one array (S, H, D). S may differ; H, D, the type and the device may not.

    Returns:
        (packed, cu_seqlens, max_seqlen): packed is (total, H, D) and of the first array's library; cu_seqlens holds the
        B + 1 offsets of the sequences, int32 (int64 from 2^31 rows on); max_seqlen is the longest length, an int.

    Raises:
        ValueError: There is no array, or a shape does not fit the first one.
        TypeError: A type is not that of the first array.
        NotImplementedError: The arrays lie on a CUDA device and are neither PyTorch's nor CuPy's.

    Example:
        >>> import numpy as np, fovea
        >>> packed, cu_seqlens, longest = fovea.pack([np.ones((n, 2, 8), np.float32) for n in (5, 3)])
        >>> packed.shape, cu_seqlens.tolist(), longest
        ((8, 2, 8), [0, 5, 8], 5)
    """
    if not isinstance(arrays, Iterable):
        raise TypeError(f"arrays: a {type(arrays).__name__}; accepted: a sequence of arrays")
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


def unpack(packed: Array, cu_seqlens: Any) -> list[Array]:
    """Returns the sequences of a packed array, each a view of it.

    Args:
        packed: (total, ...), of any library whose arrays are sliced as NumPy's are: what pack() made, or a result or a
            gradient of the same rows. lse, (Hq, total), is unpacked as lse.T.
        cu_seqlens: The B + 1 offsets, as pack() returns them. Reading offsets on a CUDA device waits for the device.

    Returns:
        A list of B arrays (S, ...).

    Raises:
        ValueError: The offsets do not start at 0, decrease, or pass the end of packed.
        TypeError: packed cannot be sliced, or cu_seqlens is not a vector of integers.

    Example:
        >>> import numpy as np, fovea
        >>> [part.shape for part in fovea.unpack(np.ones((8, 2, 8)), [0, 5, 8])]
        [(5, 2, 8), (3, 2, 8)]
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
    sliced: Any = packed
    return [sliced[start:end] for start, end in zip(ends, ends[1:])]


def _bits(view: View) -> np.ndarray[Any, Any]:
    """bfloat16 as integers, because NumPy alone does not have that type."""
    array = view.numpy()
    return array.view(np.uint16) if view.type == "bfloat16" else array


def set_num_threads(n: int) -> None:
    """Sets how many threads a call on the CPU uses.

    Args:
        n: The number of threads. 0, the initial state, means as many as this process may use. In a process with PyTorch
            it means not more than PyTorch uses, and its threads do the work.

    Raises:
        ValueError: n is out of its range.
        TypeError: n is not an integer.
    """
    if not isinstance(n, Integral):
        raise TypeError(f"n: {n!r}; accepted: an integer")
    number = int(n)
    try:
        check(lib.fovea_set_num_threads(max(-1, min(number, 2**31 - 1))))
    except ValueError as error:  # the library knows how many are accepted, and has seen an int
        accepted = str(error).partition("; ")[2]
        raise ValueError(f"n: {number}; {accepted}") from None


def num_threads() -> int:
    """Returns how many threads a call on the CPU uses."""
    return int(lib.fovea_num_threads())


def backends() -> dict[str, str]:
    """Returns the state of each backend: its name, and "available" or the reason why it is not.

    Example:
        >>> import fovea
        >>> fovea.backends()["cpu"]
        'available'
    """
    pairs = (line.partition("\t") for line in text(lib.fovea_backends).splitlines())
    return {name: state for name, _, state in pairs}


@overload
def explain() -> str: ...
@overload
def explain(line: str, /, *, arch: Optional[str] = None) -> str: ...
@overload
def explain(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    direction: Optional[Direction] = None,
    need: Union[str, Iterable[str], None] = None,
    grad_lse: Any = None,
    arch: Optional[str] = None,
    **options: Unpack[PlannedOptions],
) -> str: ...
def explain(*arguments: Any, direction: Optional[str] = None, arch: Optional[str] = None, **options: Any) -> str:
    """Returns a text that names the backend and kernels of a problem, and why each other backend does not compute it.

    It takes no argument, one problem line, or q, k and v with the keywords of a call. It computes no attention.

    Args:
        *arguments: No argument: the text describes this machine, its backends, threads, GPUs, compiler and kernel cache.
            A string: a problem line, such as "fwd b=2 hq=8 sq=512 sk=512 d=64 bf16 causal". Three arrays: q, k and v
            of a call, of which shapes, types and strides matter and values do not.
        direction: "forward" (the default) or "backward". need and grad_lse imply "backward".
        arch: Plans for a GPU of this architecture, such as "sm_90". This machine needs no such GPU.
        **options: The keywords of attention(), and need and grad_lse of attention_backward().

    Returns:
        Lines of text. For a problem, the first line is "problem: " and the problem line, which the command
        ``fovea explain`` accepts and a bug report needs.

    Raises:
        ValueError: As attention().
        TypeError: As attention().

    Example:
        >>> import numpy as np, fovea
        >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
        >>> fovea.explain(q, k, v, causal=True).splitlines()[0]
        'problem: fwd b=1 hq=2 sq=4 sk=4 d=8 fp32 causal'
    """
    if not arguments:
        _refuse(options if arch is None else {"arch": arch, **options}, "explain() without a problem")
        return _machine()
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
        return text(lib.fovea_explain_line, encoded(line), tolerate=_abi.UNSUPPORTED)
    if not isinstance(arch, str):
        raise TypeError(f"arch: {arch!r}; accepted: an architecture's name, such as 'sm_90'")
    return text(lib.fovea_explain_for, encoded(line), encoded(arch), tolerate=_abi.UNSUPPORTED)


def prepare(
    q: Any,
    k: Any,
    v: Any,
    *,
    direction: Direction = "forward",
    need: Union[str, Iterable[str], None] = None,
    grad_lse: Any = None,
    **options: Unpack[PlannedOptions],
) -> None:
    """Compiles and loads the kernels of a call ahead of it, without computing.

    Use it before a CUDA graph captures the call, or to compile before the first call. Kernels that are in the cache are
    not compiled again. On the CPU there is nothing to do.

    Args:
        q: As in the call, like k and v: shapes, types, strides and addresses matter, values do not.
        k: As in the call.
        v: As in the call.
        direction: "forward" or "backward".
        need: As in attention_backward(). It implies direction="backward".
        grad_lse: Likewise.
        **options: The keywords of attention().

    Raises:
        ValueError: As attention().
        TypeError: As attention().
        NotImplementedError: As attention().
        RuntimeError: A kernel could not be compiled or loaded.

    Example:
        >>> import numpy as np, fovea
        >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
        >>> fovea.prepare(q, k, v, causal=True, need="q,k,v")
    """
    way = choose("direction", direction, {"forward": _abi.FORWARD, "backward": _abi.BACKWARD})
    if need is not None or grad_lse is not None:
        way = _abi.BACKWARD
    keywords: dict[str, Any] = {**options}
    return_lse = keywords.pop("return_lse", False)
    for name in keywords:
        _known(name, ("direction", "need", "grad_lse", "return_lse"))
    problem = Problem(q, k, v, {**_SHARED, **keywords})
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


def _machine() -> str:
    facts = [("library", str(_library.path)), *(line.split("\t", 1) for line in text(lib.fovea_machine).splitlines())]
    return "\n".join(f"{name:<21} {value}" for name, value in facts)


# What forward and backward share, with its defaults: read from the one signature that states them.
_SHARED: dict[str, Any] = {
    name: default for name, default in (attention.__kwdefaults__ or {}).items() if name not in ("return_lse", "out", "lse", "accumulate")
}
_TENSORS = frozenset(_options.CallOptions.__annotations__)


class Attention:
    """attention() and attention_backward() with the same options, so that the two cannot disagree.

    The options are the keywords of attention() except return_lse and out. They are fixed when the object is made, and
    each can be read as an attribute. Tensors and what goes with them (bias, bias2, mask, alibi_slopes, sink,
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, batch_shape, stream) may be given
    here or in each call; every other option only here.

    Args:
        **options: The options.

    Raises:
        TypeError: A keyword is not an option.
        ValueError: dropout_p is not 0 and there is no seed.

    Example:
        >>> import numpy as np, fovea
        >>> q = k = v = np.ones((1, 4, 2, 8), np.float32)
        >>> attend = fovea.Attention(causal=True, dropout_p=0.1, seed=7)
        >>> out, lse = attend(q, k, v, return_lse=True)
        >>> grads = attend.backward(np.ones_like(out), q, k, v, out, lse)
        >>> attend.with_(offset=1).offset                           # another dropout mask
        1
    """

    _options: Options

    def __init__(self, **options: Unpack[Options]) -> None:
        for name in options:
            _known(name)
        if options.get("seed") is None:  # a call cannot give one
            need_seed(real("dropout_p", options.get("dropout_p", 0.0)))
        object.__setattr__(self, "_options", options)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuses to assign an option, and other names unless a derived class adds them: one may be a misspelt option."""
        if name in _SHARED:
            raise AttributeError(f"{name}: fixed when this Attention was made; with_({name}=...) makes another one")
        if type(self) is Attention or _help.cure(name, _SHARED):
            raise AttributeError(
                f"{name}: not an option, and options are fixed when an Attention is made; {_help.instead(name, _SHARED)}"
            )
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """Returns an option by its name: attention()'s default if it was not given."""
        if name not in _SHARED:
            cure = _help.cure(name, (*_SHARED, "options", "with_", "backward", "explain", "prepare"))
            raise AttributeError(f"{name}: neither an option nor a method of fovea.Attention{cure and '; ' + cure}")
        return self._options.get(name, _SHARED[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_SHARED]

    @property
    def options(self) -> Options:
        """The options that were given, as a new dict."""
        return self._options.copy()

    def with_(self, **changes: Unpack[Options]) -> Attention:
        """Returns another Attention, with some options changed.

        Args:
            **changes: The options that change.
        """
        merged: Any = {**self._options, **changes}
        return Attention(**merged)

    @overload
    def __call__(
        self,
        q: Array,
        k: Any,
        v: Any,
        *,
        return_lse: Literal[False] = False,
        out: Optional[Array] = None,
        **tensors: Unpack[CallOptions],
    ) -> Array: ...
    @overload
    def __call__(
        self,
        q: NumPyArray,
        k: Any,
        v: Any,
        *,
        return_lse: Literal[True],
        out: Optional[NumPyArray] = None,
        **tensors: Unpack[CallOptions],
    ) -> tuple[NumPyArray, NDArray[np.floating[Any]]]: ...
    @overload
    def __call__(
        self,
        q: Array,
        k: Any,
        v: Any,
        *,
        return_lse: Literal[True],
        out: Optional[Array] = None,
        **tensors: Unpack[CallOptions],
    ) -> tuple[Array, Array]: ...
    @overload
    def __call__(
        self, q: Array, k: Any, v: Any, *, return_lse: bool, out: Optional[Array] = None, **tensors: Unpack[CallOptions]
    ) -> Union[Array, tuple[Array, Any]]: ...
    def __call__(self, q: Any, k: Any, v: Any, *, return_lse: bool = False, out: Any = None, **tensors: Any) -> Any:
        """Calls attention() with these options.

        Args:
            q: See attention().
            k: See attention().
            v: See attention().
            return_lse: See attention().
            out: See attention().
            **tensors: Tensors that were not given when this object was made.

        Returns:
            out, or with return_lse the pair (out, lse).
        """
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
        **tensors: Unpack[CallOptions],
    ) -> Gradients:
        """Calls attention_backward() with these options.

        Args:
            grad_out: See attention_backward().
            q: See attention_backward().
            k: See attention_backward().
            v: See attention_backward().
            out: See attention_backward().
            lse: See attention_backward().
            grad_lse: See attention_backward().
            need: See attention_backward().
            grads_out: See attention_backward().
            **tensors: The tensors that were given in the call of the forward.
        """
        return attention_backward(
            grad_out, q, k, v, out, lse, grad_lse=grad_lse, need=need, grads_out=grads_out, **self._merged(tensors)
        )

    def explain(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        direction: Optional[Direction] = None,
        need: Union[str, Iterable[str], None] = None,
        arch: Optional[str] = None,
        **tensors: Unpack[CallOptions],
    ) -> str:
        """Calls explain() with these options.

        Args:
            q: See explain().
            k: See explain().
            v: See explain().
            direction: See explain().
            need: See attention_backward().
            arch: See explain().
            **tensors: Tensors that were not given when this object was made.
        """
        return explain(q, k, v, direction=direction, need=need, arch=arch, **self._merged(tensors))

    def prepare(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        direction: Direction = "forward",
        need: Union[str, Iterable[str], None] = None,
        grad_lse: Any = None,
        return_lse: bool = False,
        **tensors: Unpack[CallOptions],
    ) -> None:
        """Calls prepare() with these options.

        Args:
            q: See prepare().
            k: See prepare().
            v: See prepare().
            direction: See prepare().
            need: See prepare().
            grad_lse: See prepare().
            return_lse: See attention().
            **tensors: Tensors that were not given when this object was made.
        """
        prepare(
            q, k, v, direction=direction, need=need, grad_lse=grad_lse, return_lse=return_lse, **self._merged(tensors)
        )

    def __repr__(self) -> str:
        options = (
            f"{n}={v!r}" if np.isscalar(v) or isinstance(v, tuple) else f"{n}=..." for n, v in self._options.items()
        )
        return f"fovea.Attention({', '.join(options)})"

    def _merged(self, tensors: Mapping[str, Any]) -> Any:
        for name in tensors:
            if name in self._options:
                raise TypeError(f"{name}: fixed when this Attention was made; with_({name}=...) makes another one")
            if name not in _TENSORS:
                _known(name)
                raise TypeError(f"{name}: not accepted in a call; with_({name}=...) makes an Attention that has it")
        return {**self._options, **tensors}
