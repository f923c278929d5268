# SPDX-License-Identifier: Apache-2.0
"""JAX's primitives of fovea: how a call is typed, lowered, mapped, partitioned and differentiated.

    fovea_attention   a forward or a backward, for every device of a mesh: it has the rules of vmap and of derivatives,
                      and lowers to custom_partitioning around the next one
    fovea_call        the same on one device, which lowers to XLA's custom call of src/python/xla.c

The handlers are registered with XLA's typed FFI when this module is imported. On CUDA devices the workspace is one more
result of the custom call: memory of XLA's that lives as long as a captured command buffer may replay the call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch as _dispatch
from jax.experimental import custom_partitioning as _partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _abi, _library
from .._problem import DIFFERENTIABLE
from . import _batching, _partition
from ._call import Aval, Call, Problem

_FILE = "_xla.so"
_TARGETS = {_abi.FORWARD: "fovea_forward", _abi.BACKWARD: "fovea_backward"}


if not hasattr(jax, "ffi"):
    raise ImportError(f"fovea.jax: JAX {jax.__version__}; accepted: 0.5.0 or newer, which has jax.ffi")
# JAX has no types of these.
_pycapsule: Any = jax.ffi.pycapsule
_spec: Any = jax.sharding.PartitionSpec
_aval: Any = jax.core.ShapedArray
_custom_partitioning: Any = _partitioning.custom_partitioning


def _register() -> None:
    path = _library.path.resolve().parent / _FILE
    try:
        handlers = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"fovea.jax: {path} cannot be used: {error}") from error
    library = _library.lib
    called = ("fovea_forward", "fovea_backward", "fovea_workspace", "fovea_last_error")
    handlers.fovea_xla_connect(*(ctypes.cast(getattr(library, name), ctypes.c_void_p) for name in called))
    for direction in ("forward", "backward"):
        for device, platform in (("cpu", "cpu"), ("cuda", "CUDA")):
            function = getattr(handlers, f"fovea_xla_{direction}_{device}")
            jax.ffi.register_ffi_target(f"fovea_{direction}", _pycapsule(function), platform=platform)


_register()


def avals_of(call: Call, operands: Sequence[Any]) -> dict[str, Aval]:
    """Shapes and types by name."""
    return {name: (tuple(x.shape), str(x.dtype)) for name, x in zip(call.given, operands)}


def _abstract(*operands: Any, call: Call) -> list[Any]:
    avals = avals_of(call, operands)
    Problem(call, avals).check()
    results = [(shape, np.dtype(_dtype(name))) for shape, name in call.results_of(avals)]
    model = operands[0]
    if varying(model):  # within shard_map results vary over the axes over which the operands do
        return [
            model.update(shape=shape, dtype=dtype, weak_type=False, sharding=_replicated(model.sharding, len(shape)))
            for shape, dtype in results
        ]
    return [_aval(shape, dtype) for shape, dtype in results]


def _replicated(sharding: Any, rank: int) -> Any:
    return sharding.update(spec=_spec(*(None,) * rank))


def varying(aval: Any) -> frozenset[str]:
    """The axes of shard_map over which a value varies. JAX 0.10 has another name for it than those before."""
    axes = getattr(aval, "manual_axis_type", None)
    found: frozenset[str] = axes.varying if axes is not None else getattr(aval, "vma", frozenset())
    return found


def _dtype(name: str) -> Any:
    return jnp.bfloat16 if name == "bfloat16" else name


# ---- one device ----

call_p: Any = Primitive("fovea_call")
call_p.multiple_results = True
call_p.def_abstract_eval(_abstract)


def _lower(ctx: Any, *operands: Any, call: Call) -> Any:
    return jax.ffi.ffi_lowering(_TARGETS[call.direction])(ctx, *operands, **call.attributes())


def _lower_on_cuda(ctx: Any, *operands: Any, call: Call) -> Any:
    bytes_ = Problem(call, avals_of(call, ctx.avals_in), _device_index()).workspace()
    with_workspace = ctx.replace(avals_out=[*ctx.avals_out, _aval((bytes_,), np.dtype(np.uint8))])
    return _lower(with_workspace, *operands, call=call)[:-1]


def _device_index() -> int:
    """A device whose numbers decide the size of workspaces: those of a process are of one kind."""
    try:
        return int(jax.local_devices(backend="cuda")[0].local_hardware_id or 0)
    except RuntimeError:  # no GPU here: what is lowered is for another machine
        return 0


mlir.register_lowering(call_p, _lower, platform="cpu")
mlir.register_lowering(call_p, _lower_on_cuda, platform="cuda")


# ---- several devices ----


def _of_call(call: Call, *operands: Any) -> tuple[Any, ...]:
    return tuple(call_p.bind(*operands, call=call))


_partitioned: Any = _custom_partitioning(_of_call, static_argnums=(0,))
_partition.define(_partitioned, _of_call)

attention_p: Any = Primitive("fovea_attention")
attention_p.multiple_results = True
attention_p.def_abstract_eval(_abstract)


def attention(call: Call, *operands: Any) -> list[Any]:
    """The results of a call, in the order of call.results."""
    results: list[Any] = attention_p.bind(*operands, call=call)
    return results


@functools.lru_cache(maxsize=512)
def _compiled(call: Call) -> Any:
    return jax.jit(functools.partial(attention, call))


attention_p.def_impl(lambda *operands, call: _compiled(call)(*operands))
# custom_partitioning needs the devices when it is lowered, which JAX (0.5 to 0.10) must be told of a primitive that hides it.
# The set has no public name. Without it XLA gathers what is sharded, and nothing else changes.
_need_devices: Any = getattr(_dispatch, "prim_requires_devices_during_lowering", None)
if _need_devices is not None:
    _need_devices.add(attention_p)
_inside = _partitioned if _need_devices is not None else _of_call
mlir.register_lowering(
    attention_p, mlir.lower_fun(lambda *operands, call: _inside(call, *operands), multiple_results=True)
)
batching.primitive_batchers[attention_p] = functools.partial(_batching.rule, attention)


def _refuse_derivative(*_: Any, call: Call, **__: Any) -> NoReturn:
    which = "a second derivative" if call.direction == _abi.BACKWARD else "forward-mode differentiation or a second derivative"
    raise NotImplementedError(f"fovea.jax.attention: {which}; accepted: first derivatives in reverse mode, as of jax.grad")


for _primitive in (attention_p, call_p):
    ad.primitive_jvps[_primitive] = _refuse_derivative


# ---- derivatives ----


@jax.tree_util.register_static
class _Need(tuple[bool, ...]):
    """Of each operand whether its gradient is needed."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def differentiable(call: Call, *operands: Any) -> tuple[Any, ...]:
    """The results of a forward, with their derivatives."""
    return tuple(attention(call, *operands))


def _forward(call: Call, *operands: Any) -> Any:
    need = _Need(x.perturbed and name in DIFFERENTIABLE for name, x in zip(call.given, operands))
    for name, x in zip(call.given, operands):
        if name == "alibi_slopes" and x.perturbed and jnp.issubdtype(x.value.dtype, jnp.floating):
            raise ValueError(
                "alibi_slopes: its gradient is needed, and it has none; accepted: jax.lax.stop_gradient(alibi_slopes), or "
                "the same numbers as a bias, which has one"
            )
    values = tuple(x.value for x in operands)
    out, lse = attention(call._replace(results=("out", "lse")), *values)
    return (out, lse)[: len(call.results)], (values, out, lse, need)


def _backward(call: Call, saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
    values, out, lse, need = saved
    names = [name for name in DIFFERENTIABLE if name in call.given and need[call.given.index(name)]]
    if not names:
        return (None,) * len(values)
    grads = [None if _is_zero(x) else x for x in cotangents]
    grad_out = jnp.zeros_like(out) if grads[0] is None else grads[0]
    grad_lse = grads[1] if len(grads) == 2 else None
    backward = call.backward(names, grad_lse is not None)
    tensors = dict(zip(call.given, values), out=out, lse=lse, grad_out=grad_out, grad_lse=grad_lse)
    found = dict(zip(names, attention(backward, *(tensors[name] for name in backward.given))))
    return tuple(found.get(name) for name in call.given)


def _is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


differentiable.defvjp(_forward, _backward, symbolic_zeros=True)
