# SPDX-License-Identifier: Apache-2.0
"""The operators that are registered with PyTorch, and their autograd.

    fovea::attention            out and lse
    fovea::attention_backward   six gradients, each an empty tensor where `need` is false
    fovea::seed                 one random number of the device's generator, which stays on the device

Programs that torch.export and AOTInductor have saved name these operators, their arguments and the numbers of their
results. So arguments are only ever added, at the end and with a default (docs/versions.md).

They are registered with torch.library.Library.define and impl, and differentiated by one torch.autograd.Function:
torch.library.custom_op with register_autograd does the same for several times the host time (docs/torch.md).

A call goes through the dispatcher if something watches or transforms operators: tracing, vmap, tensor subclasses,
dispatch modes, the profiler. Plain tensors in eager mode do not come here (_eager.py).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NoReturn, Optional

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from .. import _abi
from . import _call, _dtensor
from ._call import DIFFERENTIABLE, TENSORS, Arguments

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? bias2, Tensor? mask, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? seed_tensor, "
    "Tensor? offset_tensor, SymInt seed, SymInt offset, float? scale, bool causal, SymInt window_left, "
    "SymInt window_right, str? align, float softcap, float dropout_p, str rng, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, SymInt batch_outer, str layout, int deterministic, str? backend, " + _call.MORE
)
_INDEX = _call.DIFFERENTIABLE_AT
_SIX = operator.itemgetter(*_INDEX)
_SHARDS = len(_abi.SHARDS)  # tensors, the last arguments where they are given

_registry: Any = torch.library  # PyTorch types these functions in part, and otherwise in each version
# A copy of the package within another one has operators of its own, so that two versions may be in one process.
_PACKAGE = __name__.rpartition(".torch.")[0]
NAMESPACE = _PACKAGE.replace(".", "_")
library = _registry.Library(NAMESPACE, "DEF")
library.define(
    f"attention({_ARGUMENTS}) -> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    f"attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[] need, {_ARGUMENTS}) "
    f"-> ({', '.join(f'Tensor grad_{name}' for name in DIFFERENTIABLE)})",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "seed(Tensor[] of) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
operators: Any = getattr(torch.ops, NAMESPACE)
attention = operators.attention.default
attention_backward = operators.attention_backward.default
seed = operators.seed.default

_below_autograd = torch._C._AutoDispatchBelowAutograd


def draw_seed(of: Sequence[Tensor]) -> Tensor:
    """A seed for a call with these tensors. torch.vmap finds by any of them whether the call is mapped."""
    return torch.empty((), dtype=torch.int64, device=of[0].device).random_()


def _six(found: Sequence[Tensor], need: Sequence[bool], grad_out: Tensor) -> tuple[Tensor, ...]:
    """The results of fovea::attention_backward. Empty tensors stand for gradients that are not needed: tracing and vmap
    expect a tensor of each result."""
    each = iter(found)
    return tuple(next(each) if wanted else grad_out.new_empty(0) for wanted in need)


def _backward(
    grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor, need: Sequence[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    _need_six(need)
    return _six(_call.backward(grad_out, grad_lse, out, lse, need, *arguments), need, grad_out)


def _need_six(need: Sequence[bool]) -> None:
    if len(need) != len(DIFFERENTIABLE):
        raise ValueError(f"need: {len(need)} values; accepted: one for each of {', '.join(DIFFERENTIABLE)}")


for _device in ("CPU", "CUDA"):
    library.impl("attention", _call.forward, _device)
    library.impl("attention_backward", _backward, _device)
    library.impl("seed", draw_seed, _device)


# ---- fake implementations, for tracing ----


def _fake_attention(*arguments: Any) -> tuple[Tensor, Tensor]:
    a = _call.split(arguments)[0]
    _call.check_ranks(a)
    return _call.new_out(a, _call.out_layout(a)), _call.new_lse(a, _call.lse_shape(a))


def _fake_backward(
    grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor, need: Sequence[bool], *arguments: Any
) -> tuple[Tensor, ...]:
    _need_six(need)
    a = _call.split(arguments)[0]
    return _six([_call.new_grad(a, name, partial=False) for name, wanted in zip(DIFFERENTIABLE, need) if wanted], need, grad_out)


def _fake_seed(of: Sequence[Tensor]) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=of[0].device)


for _name, _fake in (("attention", _fake_attention), ("attention_backward", _fake_backward), ("seed", _fake_seed)):
    _registry.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=library)


# ---- autograd ----


class Attention(torch.autograd.Function):
    """fovea::attention with its gradients. torch.func requires setup_context and generate_vmap_rule."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        with _below_autograd():
            out, lse = attention(*arguments)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.set_materialize_grads(False)
        options, shard = inputs[TENSORS:-_SHARDS], inputs[-_SHARDS:]
        if len(inputs) == len(Arguments._fields):
            options, shard = inputs[TENSORS:], ()
        ctx.save_for_backward(*inputs[:TENSORS], *shard, *output)
        ctx.options = options

    @staticmethod
    def backward(ctx: Any, grad_out: Optional[Tensor], grad_lse: Optional[Tensor]) -> tuple[Any, ...]:
        need = list(_SIX(ctx.needs_input_grad))
        grads: list[Optional[Tensor]] = [None] * len(ctx.needs_input_grad)
        for index, grad in zip(_INDEX, _gradients(ctx, need, grad_out, grad_lse)):
            grads[index] = grad
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError("fovea.torch.attention: forward-mode differentiation; accepted: reverse mode")


def functionalizes() -> bool:
    """Whether the active transforms of torch.func have functionalize among them, and no differentiation: functionalize
    has a rule for an operator, but none for a torch.autograd.Function."""
    kinds = torch._C._functorch.TransformType
    keys = [transform.key() for transform in torch._C._functorch.get_interpreter_stack() or ()]
    return kinds.Functionalize in keys and kinds.Grad not in keys and kinds.Jvp not in keys


def _gradients(ctx: Any, need: Sequence[bool], grad_out: Optional[Tensor], grad_lse: Optional[Tensor]) -> list[Optional[Tensor]]:
    """The gradients of DIFFERENTIABLE, each None if it is not needed."""
    if grad_out is None and grad_lse is None:
        return [None] * len(need)
    *tensors, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    tensors, shard = tensors[:TENSORS], tensors[TENSORS:]
    found = through_dispatcher(grad_out, grad_lse, out, lse, need, *tensors, *ctx.options, *shard)
    return [grad if wanted else None for grad, wanted in zip(found, need)]


def through_dispatcher(*arguments: Any) -> Any:
    """The six results of fovea::attention_backward."""
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:  # create_graph=True; the gradients of results may have tangents
        return OnceDifferentiable.apply(*arguments)
    return _below(*arguments)


def _below(*arguments: Any) -> Any:
    with _below_autograd():
        return attention_backward(*arguments)


class OnceDifferentiable(torch.autograd.Function):
    """fovea::attention_backward where it may be differentiated. Only that is an error."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        six: tuple[Tensor, ...] = _below(*arguments)
        return six

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(
            "fovea.torch.attention: double backward (the gradient of a gradient); accepted: first derivatives. Where second ones are "
            "needed, call torch.nn.functional.scaled_dot_product_attention under torch.nn.attention.sdpa_kernel(SDPBackend.MATH), "
            "which enable() leaves to PyTorch"
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError("fovea.torch.attention: forward-mode differentiation of a gradient; accepted: none")


def _differentiable_attention(*arguments: Any) -> Any:
    _dtensor.ready(attention, attention_backward)
    return Attention.apply(*_call.shortest(arguments))


library.impl("attention", _differentiable_attention, "Autograd")
library.impl("attention_backward", through_dispatcher, "Autograd")


# ---- floating-point operations ----


def _pairs(a: Arguments) -> int:
    """Pairs of queries and keys over all query heads, without regard to masks, bands and used lengths, as PyTorch does."""
    rows = -2 if a.heads_first else -3
    if not a.packed:
        return a.q.shape[:-1].numel() * a.k.shape[rows]
    heads = a.q.shape[-2]
    cu_seqlens_q: Any = a.cu_seqlens_k if a.cu_seqlens_q is None else a.cu_seqlens_q
    cu_seqlens_k: Any = cu_seqlens_q if a.cu_seqlens_k is None else a.cu_seqlens_k
    if isinstance(a.q, FakeTensor) or a.q.is_meta:  # lengths cannot be read
        return heads * a.q.shape[0] * (a.max_seqlen_k or a.k.shape[0])
    return heads * int((cu_seqlens_q.diff() * cu_seqlens_k.diff()).sum())


@register_flop_formula(operators.attention, get_raw=True)
def _(*arguments: Any, out_val: Any) -> int:
    a = _call.split(arguments)[0]
    return 2 * _pairs(a) * (a.q.shape[-1] + a.v.shape[-1])


@register_flop_formula(operators.attention_backward, get_raw=True)
def _(
    grad_out: Tensor, grad_lse: Optional[Tensor], out: Tensor, lse: Tensor, need: Sequence[bool], *arguments: Any,
    out_val: Any,
) -> int:  # fmt: skip
    """The scores and their gradients, then one product for each gradient of q, k and v."""
    a = _call.split(arguments)[0]
    dim, dim_v = a.q.shape[-1], a.v.shape[-1]
    return 2 * _pairs(a) * (dim + dim_v + need[0] * dim + need[1] * dim + need[2] * dim_v)
