# SPDX-License-Identifier: Apache-2.0
"""enable(): fovea computes the calls of torch.nn.functional.scaled_dot_product_attention.

PyTorch's operator aten::scaled_dot_product_attention is composite: it chooses a fused operator in C++, and has no
kernel of its own for the CPU and for CUDA. enable() registers one there and under autograd. So every caller is reached, from
Python, from C++ and from what torch.compile traces, and masks have their shape still. What fovea does not compute, or
computes more slowly, goes back to the composite.

    _enable.py            what users call, and what is put into PyTorch and taken away
    _enable_kernel.py     a call: fovea's result, or the composite's
    _enable_decisions.py  which of them, and how, for each kind of call
    _enable_order.py      the order of the result's dimensions in memory
    _enable_jagged.py     nested tensors, which reach no operator
    _enable_state.py      settings, counts and reasons
    _enable_tag.py        what PyTorch's compile caches know of it
    _sdpa.py              the arguments as those of fovea.torch.attention
    _fastest.py           where PyTorch is faster, as measured

Private names of PyTorch that these files use, each checked by tests/torch/test_enable.py: OpOverload.decompose and _op_dk,
torch.nested._internal.ops.jagged_scaled_dot_product_attention, _dynamo_marked_constant of
functions, _is_zerotensor of tensors, _values, _ragged_idx and _get_max_seqlen of nested tensors, the functions of torch._C that stand below
the imports, torch._guards.CompileContext, and those of _enable_order.py and _enable_tag.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Sequence
from typing import Any, Literal, Optional, Union

import torch
from torch._guards import CompileContext

from .. import _api
from . import _ahead, _enable_tag, _fast, _operators
from ._enable_decisions import for_c
from ._enable_jagged import in_the_place_of, nested_module
from ._enable_kernel import OWNER, compute, give_back, why_not_operator
from ._enable_state import NAME, Block, Settings, Stats, count_operator, counts, hand_back, state
from .aten import _owners
from .aten._register import OPERATORS

Device = Literal["cuda", "cpu"]
Prefer = Literal["fastest"]

SAVE_IN_CHECKPOINTS = (_operators.attention,)
"""The operators whose results a policy of selective checkpointing should keep, as it keeps those of PyTorch's own."""

_DEVICES = ("cuda", "cpu")
_PREFERENCES = ("fastest", None)

_operator: Any = torch.ops.aten.scaled_dot_product_attention.default
_composite_now: Any = functools.partial(_operator._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)  # of an eager call
_library: Any = torch.library


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
        ValueError: A device or a preference is not accepted, or FOVEA_CPU_ISA names no instruction set that this machine has.
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
    entered several times, and decorate a function. Of blocks that overlap in several threads, the one that was entered last applies.

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
    """May be entered again, also within itself and by another thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._blocks: list[Block] = []

    def __enter__(self) -> None:
        _refuse_while_compiling("enable")
        with state.lock:
            block = Block(state.settings, torch.backends.mha.get_fastpath_enabled())
            try:
                state.blocks.append(block)
                self._blocks.append(block)
                _put(self._settings)
            except BaseException:
                self._forget(block)
                raise

    def __exit__(self, *_: Any) -> None:
        with state.lock:
            own = [block for block in self._blocks if block.thread == threading.get_ident()]
            block = (own or self._blocks)[-1]
            later = state.blocks[state.blocks.index(block) + 1 :]
            self._forget(block)
            if later:  # another thread's was entered later, and applies; what was before is for its end
                later[0].settings, later[0].fastpath = block.settings, block.fastpath
                return
            _put(block.settings)
            if block.settings is not None and block.fastpath:  # although fovea was enabled: the program had turned it on
                torch.backends.mha.set_fastpath_enabled(True)

    def _forget(self, block: Block) -> None:
        for blocks in (state.blocks, self._blocks):
            if block in blocks:
                blocks.remove(block)


def is_enabled() -> bool:
    """Whether enable() is in force.

    Returns:
        True from enable() to disable().
    """
    return state.settings is not None


def stats() -> Stats:
    """Counts the calls of scaled_dot_product_attention since the process began, or since reset_stats().

    Returns:
        A dict. "served": calls that fovea computed. "traced": calls that were put into a graph of torch.compile, which traces a
        call several times; the graph's runs are not counted. "handed_back": by reason, calls that PyTorch computed. "problems": each
        kind of problem that fovea computed or traced, at most 4096, in the form that ``fovea explain`` and ``fovea precompile`` take.
        "operators": by name, calls of PyTorch's operators that fovea computed for enable(operators=True); reasons about them begin
        with the name.
    """
    with counts.lock:
        served, left = _fast.counts()
        handed_back = dict(counts.handed_back)
        for reason, count in left.items():
            handed_back[reason] = handed_back.get(reason, 0) + count
        return {
            "served": counts.served + served,
            "traced": counts.traced,
            "handed_back": handed_back,
            "problems": list(counts.problems),
            "operators": dict(counts.operators),
        }


def print_stats() -> None:
    """Prints stats() on standard error: at the end of a program, if FOVEA_TORCH has the word stats."""
    found = stats()
    lines = [f"process {os.getpid()}: {found['served']} calls of scaled_dot_product_attention computed by fovea, "
             f"{found['traced']} traced"]  # fmt: skip
    lines += [f"{count} calls of {name} computed by fovea" for name, count in found["operators"].items()]
    integrations = sys.modules.get("fovea.integrations")
    for name, own in sorted(integrations.stats().items()) if integrations is not None else ():
        lines.append(f"{name}: {own['served']} calls computed by fovea, {own['traced']} traced")
    lines += [f"{count} calls handed back to PyTorch: {why}" for why, count in found["handed_back"].items()]
    # In one piece: other processes print at the same time.
    sys.stderr.write("".join(f"fovea.torch: {line}\n" for line in lines))


def reset_stats() -> None:
    """Sets what stats() counts to zero."""
    with counts.lock:
        counts.clear()
        _fast.counts(reset=True)
    state.decisions.clear()  # they hold which problems have been noted


def _settings(devices: Any, prefer: Any, strict: Any, operators: Any) -> Settings:
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
    if "cpu" in devices and os.environ.get("FOVEA_CPU_ISA"):  # each call would be handed back for it
        refused = re.search(r"^FOVEA_CPU_ISA +REFUSED +(.*)$", _api.explain(), re.MULTILINE)
        if refused:
            raise ValueError(f"FOVEA_CPU_ISA: {refused[1]}")
    return Settings(tuple(name for name in _DEVICES if name in devices), prefer, strict, operators)


def _refuse_while_compiling(name: str) -> None:
    if _ahead.is_traced() or CompileContext.try_get() is not None:  # this thread compiles
        raise RuntimeError(f"fovea.torch.{name}: called from code that torch.compile traces; accepted: before it")


def _put(settings: Optional[Settings]) -> None:
    with state.lock:
        before = state.settings
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


def _switch(settings: Optional[Settings]) -> None:
    """Nothing is in force after an exception."""
    _take_away()
    try:
        if settings is not None:
            _set_up(settings)
    except BaseException:
        _take_away()
        raise


def _set_up(settings: Settings) -> None:
    state.settings = settings
    state.decisions = {}  # after the settings: another thread decides by these, and would keep it there
    state.warned = set()
    kernel = _fast.connect(compute, state, for_c, give_back, _composite_now, _owners.PLACES)
    # Autograd's are there first and leave last: another thread's call that found the device's alone would lose its gradient.
    for key in (prefix + device.upper() for prefix in ("Autograd", "") for device in settings.devices):
        state.libraries[key] = library = _library.Library("aten", "IMPL")
        library.impl(NAME, kernel, key)
        _owners.keep(NAME, key)
    _owners.forget_dispatch(NAME)
    if settings.operators:
        owner = _owners.Owner(OWNER, why_not_operator, count_operator, lambda name, why, device: hand_back(why, device, name))
        _owners.take(owner, OPERATORS, settings.devices)
    _enable_tag.put(_enable_tag.tag_of(settings))
    nested = nested_module()
    if nested is not None:
        state.jagged_theirs = nested.jagged_scaled_dot_product_attention
        state.jagged = nested.jagged_scaled_dot_product_attention = in_the_place_of(state.jagged_theirs)
    if settings.prefer is None:
        # nn.TransformerEncoderLayer and nn.MultiheadAttention compute all of themselves in C++ in inference, on the CPU
        # without calling scaled_dot_product_attention.
        state.fastpath = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)


def _take_away() -> None:
    """Of what _set_up() has put there, even if an exception ended it."""
    state.settings = None
    state.decisions = {}
    while state.libraries:
        state.libraries.popitem()[1]._destroy()
    _owners.forget_dispatch(NAME)
    _owners.release(OWNER)
    _enable_tag.put("")
    if state.jagged is not None:
        nested = nested_module()
        if nested.jagged_scaled_dot_product_attention is state.jagged:  # no other one was put there
            nested.jagged_scaled_dot_product_attention = state.jagged_theirs
        state.jagged = None
    if state.fastpath is not None:
        if not torch.backends.mha.get_fastpath_enabled():  # the program has not set it since
            torch.backends.mha.set_fastpath_enabled(state.fastpath)
        state.fastpath = None
