# SPDX-License-Identifier: Apache-2.0
"""The operators of this package as operators of PyTorch: fovea::<name>, with PyTorch's schema, fake functions, and autograd.

@operator(schema, fake, backward, saved) makes one of a function that computes it; `draws` says that it draws random numbers.
Autograd is one torch.autograd.Function for all forwards: `saved` says which arguments of the operator `backward` follow from a
forward's arguments and results. Whatever else is differentiated raises an error.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, NamedTuple, NoReturn, Optional

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from .. import _operators

Result = tuple[Any, ...]
Saved = Callable[[dict[str, Any], Result], dict[str, Any]]

_below_autograd = torch._C._AutoDispatchBelowAutograd


class Operator(NamedTuple):
    name: str
    compute: Callable[..., Any]
    overload: Any  # torch.ops.fovea.<name>.default
    signature: inspect.Signature

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments


OPERATORS: dict[str, Operator] = {}


def operator(
    schema: str, fake: Callable[..., Any], backward: Optional[str] = None, saved: Optional[Saved] = None, draws: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        name = compute.__name__
        library = _operators.library
        tags = (torch.Tag.pt2_compliant_tag, *((torch.Tag.nondeterministic_seeded,) if draws else ()))
        library.define(name + schema, tags=tags)
        for device in ("CPU", "CUDA"):
            library.impl(name, compute, device)
        registry: Any = torch.library
        registry.register_fake(f"{_operators.NAMESPACE}::{name}", fake, lib=library)
        found = Operator(name, compute, getattr(_operators.operators, name).default, inspect.signature(compute))
        OPERATORS[name] = found
        formula = flop_registry.get(getattr(torch.ops.aten, name, None))
        if formula is not None:
            flop_registry[getattr(_operators.operators, name)] = formula
        library.impl(name, _differentiable(found, backward, saved), "Autograd")
        return compute

    return register


def _differentiable(forward: Operator, backward: Optional[str], saved: Optional[Saved]) -> Callable[..., Any]:
    """The kernel for autograd."""

    def call(*args: Any, **kwargs: Any) -> Any:
        given = forward.bind(args, kwargs)
        learns = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given.values())
        if learns and backward is not None:
            return _Differentiable.apply(forward, backward, saved, *given.values())
        if learns:
            return _WithoutDerivative.apply(forward, *given.values())
        with _below_autograd():
            return forward.overload(*args, **kwargs)

    return call


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Operator, backward: str, saved: Saved, *values: Any) -> Any:
        given = dict(zip(operator.signature.parameters, values))
        with _below_autograd():
            results = operator.overload(**given)
        kept = saved(given, results)
        ctx.set_materialize_grads(False)
        ctx.tensors = [name for name, value in kept.items() if isinstance(value, Tensor)]
        ctx.save_for_backward(*(kept[name] for name in ctx.tensors))
        ctx.rest = {name: value for name, value in kept.items() if name not in ctx.tensors}
        ctx.inputs = list(given)
        ctx.operator = backward
        ctx.mark_non_differentiable(*(x for x in results[1:] if isinstance(x, Tensor)))
        return results

    @staticmethod
    def backward(ctx: Any, grad_out: Optional[Tensor], *_: Any) -> tuple[Any, ...]:
        grads: dict[str, Any] = {}
        if grad_out is not None:
            backward = OPERATORS[ctx.operator]
            given = {**ctx.rest, **dict(zip(ctx.tensors, ctx.saved_tensors))}
            first = next(iter(backward.signature.parameters))
            found = backward.overload(**{first: grad_out, **given})
            bias = "attn_bias" if "attn_bias" in ctx.inputs else "bias"
            grads = dict(zip(("query", "key", "value", bias), found))
        wanted = zip(ctx.inputs, ctx.needs_input_grad[3:])
        return (None, None, None, *(grads.get(name) if need else None for name, need in wanted))


class _WithoutDerivative(torch.autograd.Function):
    """An operator that has no backward, such as a backward with create_graph=True. Only differentiating it is an error."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, *values: Any) -> Any:
        ctx.operator = operator.name
        with _below_autograd():
            return operator.overload(**dict(zip(operator.signature.parameters, values)))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(
            f"{ctx.operator}: differentiated; accepted: first derivatives of a forward that does not write into its arguments, or "
            "torch.nn.functional.scaled_dot_product_attention with its math backend where second ones are needed"
        )
