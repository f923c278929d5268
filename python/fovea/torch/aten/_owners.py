# SPDX-License-Identifier: Apache-2.0
"""Which of PyTorch's operators fovea computes, and for whom: one registry of kernels in PyTorch's place.

There are two owners: enable(operators=True), and the implementation "fovea" of torch.nn.attention.activate_flash_attention_impl.
Each operator is registered once for a device. There it belongs to the owner that took it first, and then to the other one, if that
has taken it as well: so either may release its operators first. What fovea does not compute, and what the owner leaves to
PyTorch, is computed by the kernel that was there before.

Private names of PyTorch that this file uses: torch.library.Library._destroy, OpOverload._dispatch_cache.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, Callable, NamedTuple, Optional

import torch

from ._register import OPERATORS

_torch_library: Any = torch.library


class Owner(NamedTuple):
    """Of operators. `why_not` may leave a call to PyTorch, by operator, arguments and keywords; "" computes it."""

    name: str
    why_not: Callable[[str, tuple[Any, ...], dict[str, Any]], str]
    served: Callable[[str], None]  # a call that fovea computed
    hand_back: Callable[[str, str, torch.device], None]  # one that PyTorch computes, and why; it may raise


Place = tuple[str, str]  # operator and key

_lock = threading.RLock()
_taken: dict[str, tuple[Owner, frozenset[Place]]] = {}  # by the owner's name
PLACES: dict[Place, Any] = {}  # the libraries that registered a kernel there
_here = threading.local()
_kept: collections.deque[Any] = collections.deque(maxlen=1024)


def exists(name: str) -> bool:
    """Whether this version of PyTorch has the operator."""
    return hasattr(torch.ops.aten, name)


def owners() -> dict[str, str]:
    """The operators of PyTorch that fovea computes now.

    Returns:
        By the operator's name, the name of its owner: "enable(operators=True)" or "activate_flash_attention_impl('fovea')"; both,
        with a comma between, where the CPU's and CUDA's kernel have different ones.

    >>> import fovea.torch
    >>> fovea.torch.aten.owners()
    {}
    """
    with _lock:
        found = {name: [_owner(place) for place in sorted(PLACES) if place[0] == name] for name in OPERATORS}
        return {name: ", ".join(dict.fromkeys(owner.name for owner in there if owner)) for name, there in found.items() if there}


def in_force() -> bool:
    """Whether fovea computes one."""
    return bool(PLACES)


def forget_dispatch(name: str) -> None:
    """After a kernel was registered or taken away. While PyTorch traces, Python chooses the kernel of each key and remembers it, and
    no registration corrects that: a graph would have a kernel that is not in force, or lose gradients where there is none."""
    operator = getattr(torch.ops.aten, name)
    for overload in operator.overloads():
        getattr(operator, overload)._dispatch_cache.clear()


def keep(name: str, key: str) -> None:
    """The kernel of fovea's that was just registered. When it is taken away, PyTorch frees it at once, though another thread may have
    found it and wait for Python's lock in it: so a reference is kept, to the last of them."""
    _kept.append(_kernel_in_force(name, key))


def take(owner: Owner, names: Iterable[str], devices: Iterable[str]) -> None:
    """Puts fovea's kernels in PyTorch's place."""
    wanted = frozenset((name, device.upper()) for name in names if exists(name) for device in devices)
    with _lock:
        _taken[owner.name] = owner, wanted
        _settle()


def release(name: str) -> None:
    """Takes away those of an owner which no other has taken."""
    with _lock:
        _taken.pop(name, None)
        _settle()


def _settle() -> None:
    wanted = {place for _, places in _taken.values() for place in places}
    for place in [place for place in PLACES if place not in wanted]:
        PLACES.pop(place)._destroy()
        forget_dispatch(place[0])
    for place in sorted(wanted - PLACES.keys()):
        name, key = place
        theirs = _kernel_in_force(name, key)
        PLACES[place] = library = _torch_library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # what the caller asked for
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            library.impl(name, _kernel(place, theirs), key, with_keyset=True)
        keep(name, key)
        forget_dispatch(name)


def _kernel_in_force(name: str, key: str) -> Any:
    try:
        return _torch_library.get_kernel(f"aten::{name}", key)
    except RuntimeError:  # there is none
        return None


def _owner(place: Place) -> Optional[Owner]:
    """None while another thread releases it."""
    return next((owner for owner, places in tuple(_taken.values()) if place in places), None)


@contextlib.contextmanager
def left_to_pytorch() -> Iterator[None]:
    """In this thread PyTorch's kernels compute what they call, too."""
    before = getattr(_here, "theirs", False)
    _here.theirs = True
    try:
        yield
    finally:
        _here.theirs = before


def _kernel(place: Place, theirs: Any) -> Callable[..., Any]:
    """`theirs` is PyTorch's kernel, None where there was none."""
    name = place[0]
    operator = OPERATORS[name]

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        owner = _owner(place)
        if theirs is not None and (owner is None or getattr(_here, "theirs", False)):
            return theirs.call_boxed(keys, *args, **kwargs)
        if owner is None:
            return operator.compute(*args, **kwargs)
        why = "" if theirs is None else owner.why_not(name, args, kwargs)
        refusal: Optional[Exception] = None
        if not why:
            try:
                results = operator.compute(*args, **kwargs)
            except (NotImplementedError, ValueError, TypeError) as error:
                if theirs is None:
                    raise
                refusal = error
                why = str(error).splitlines()[0] if isinstance(error, NotImplementedError) else "arguments that fovea refuses"
            else:
                owner.served(name)
                return results
        owner.hand_back(name, why, next(x for x in args if isinstance(x, torch.Tensor)).device)
        try:
            with left_to_pytorch():
                return theirs.call_boxed(keys, *args, **kwargs)
        except RuntimeError as error:
            raise error from refusal

    return kernel
