# SPDX-License-Identifier: Apache-2.0
"""register_with_pytorch: PyTorch's own context parallelism with fovea::attention as an operator that it knows.

While PyTorch's context parallelism is on, it replaces operators in DTensor's dispatcher from a table. All of that is private to
PyTorch, so it is accepted for versions with which it was tested.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from . import _call, _dtensor, _parallel_call, _parallel_keys
from ._call import DIFFERENTIABLE
from ._rows import Rows

_TESTED = ((2, 15),)
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_plans: dict[Any, Rows] = {}
_MOST_PLANS = 64


def register_with_pytorch() -> None:
    """Makes PyTorch's context parallelism compute fovea.torch.attention().

    PyTorch wraps a module whose inputs are q, k and v, by ``parallelize_module(module, mesh, _ContextParallel(seq_dim=2,
    attention_type=_ContextParallel.AttentionType.SDPA))``, with its head-tail load balancer or without one. While PyTorch's dispatcher for
    it is on (``_enable_context_parallel_dispatcher()``, before this call or after it), a call of attention() in such a module is computed
    as context_parallel(move="keys") does, with what that can compute. A bias or mask with queries is a DTensor of this rank's rows,
    Shard() along them; without the load balancer it may be whole, Replicate(). ``torch.distributed.tensor.experimental.context_parallel()``
    itself replaces scaled_dot_product_attention only.

    Raises:
        NotImplementedError: This version of PyTorch is not one that was tested.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version not in _TESTED:
        accepted = ", ".join(".".join(map(str, tested)) for tested in _TESTED)
        raise NotImplementedError(
            f"register_with_pytorch: PyTorch {torch.__version__}, whose context parallelism is private; accepted: {accepted}; "
            "fovea.torch.context_parallel() needs no registration"
        )
    from ._operators import attention, attention_backward

    theirs: Any = importlib.import_module(_MODULE)
    ours = {attention: _forward, attention_backward: _backward}
    theirs.custom_ops.update(ours)
    if _dtensor.in_pytorchs_ring():  # whose dispatcher has a copy of that table
        from torch.distributed.tensor import DTensor

        DTensor._op_dispatcher._custom_op_handlers.update(ours)


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    call, wrap = _call_of(args)
    out, lse = _parallel_keys.keys_forward(call)
    rows = call.rows_dim + out.dim()
    return wrap(out, rows), wrap(lse, lse.dim() - 1)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from torch.distributed.tensor import DTensor, Partial

    grad_out, grad_lse, out, lse, need, *rest = args
    given = tuple(rest)
    call, wrap = _call_of(given, dict(zip(DIFFERENTIABLE, need)))
    rows = call.rows_dim + out.dim()
    local: list[Any] = [None if x is None else _local(x, at) for x, at in ((grad_out, rows), (grad_lse, lse.dim() - 1), (out, rows), (lse, lse.dim() - 1))]
    grads: Any = _parallel_keys.keys_backward(call, need, *local)
    results = []
    for name, grad, at in zip(DIFFERENTIABLE, grads, _call.DIFFERENTIABLE_AT):
        if grad is None:
            results.append(wrap(local[0].new_empty(0), None))
        elif name in ("q", "k", "v"):
            results.append(wrap(grad, rows))
        elif not _is_distributed(given[at]):
            results.append(grad)
        elif name != "sink" and grad.dim() >= 2 and grad.shape[-2] != 1:
            results.append(wrap(grad, grad.dim() - 2))
        else:  # every rank has it whole, and this rank's part of its gradient
            results.append(DTensor.from_local(grad, given[at].device_mesh, [Partial()], run_check=False))
    return tuple(results)


def _is_distributed(x: Any) -> bool:
    return isinstance(x, Tensor) and hasattr(x, "device_mesh")


def _local(x: Any, rows: int) -> Tensor:
    """This rank's rows of a tensor; what is whole, whole."""
    if not _is_distributed(x):
        tensor: Tensor = x
        return tensor
    from torch.distributed.tensor import Replicate, Shard

    if x.placements == (Replicate(),) or rows >= x.dim():
        x = x.redistribute(placements=[Shard(rows)]) if rows < x.dim() and x.shape[rows] != 1 else x
    elif x.placements != (Shard(rows),):
        x = x.redistribute(placements=[Shard(rows)])
    local: Tensor = x._local_tensor
    return local


def _call_of(given: tuple[Any, ...], wants: Any = None) -> tuple[_parallel_call.Call, Any]:
    """The call, and what makes a DTensor of its results."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    a, shard = _call.split(given)
    q: Any = a.q
    rows_at = q.dim() - 2 if a.heads_first else q.dim() - 3
    for name in ("q", "k", "v"):
        x: Any = getattr(a, name)
        if not _is_distributed(x) or x.placements != (Shard(rows_at),):
            where = x.placements if _is_distributed(x) else "no DTensor"
            raise NotImplementedError(
                f"{name}: {where}, while PyTorch's context parallelism is on; accepted: Shard({rows_at}) on a mesh of one dimension, its rows"
            )
    mesh = q.device_mesh
    theirs: Any = importlib.import_module(_MODULE)
    kind = "zigzag" if theirs._cp_options.enable_load_balance else "contiguous"
    key = (kind, q.shape[rows_at], mesh.get_group())  # meshes are equal though their groups were made anew
    if key not in _plans:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        _plans[key] = getattr(Rows, kind)(q.shape[rows_at], mesh, block=1)
    options: dict[str, Any] = {
        name: getattr(a, name) for name in ("scale", "causal", "softcap", "dropout_p", "rng", "layout", "backend", "alibi_slopes", "sink")
    }
    options.update(window=(a.window_left, a.window_right), deterministic=bool(a.deterministic), align=a.align)
    whole = {name: getattr(a, name) for name in ("seqused_q", "seqused_k", "alibi_slopes", "sink")}
    whole.update(seed=a.seed if a.seed_tensor is None else a.seed_tensor, offset=a.offset if a.offset_tensor is None else a.offset_tensor)
    whole.update({} if shard is None else shard._asdict())
    options.update({name: x.full_tensor() if _is_distributed(x) else x for name, x in whole.items()})
    for name in ("bias", "bias2", "mask"):
        x = getattr(a, name)
        if kind == "zigzag" and _is_distributed(x) and x.placements == (Replicate(),) and x.dim() > 1 and x.shape[-2] != 1:
            raise NotImplementedError(
                f"{name}: whole, while the load balancer of PyTorch's context parallelism rearranges rows; accepted: a DTensor of this "
                f"rank's rows as the balancer has them, Shard({x.dim() - 2}), such as _context_parallel_shard() makes"
            )
        options[name] = None if x is None else _local(x, x.dim() - 2)
    k: Any = a.k
    v: Any = a.v
    call = _parallel_call.prepare(q._local_tensor, k._local_tensor, v._local_tensor, _plans[key], "keys", options)
    for name in ("bias", "bias2"):
        plane = options[name]
        if wants and wants[name] and (plane.dim() < 3 or plane.shape[-3] == 1):
            call = call._replace(groups=1)  # its gradient is summed over all heads

    def wrap(local: Tensor, rows: Any) -> Any:
        if rows is None:
            return DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        shape = list(local.shape)
        shape[rows] = call.rows.total
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, mesh, [Shard(rows)], run_check=False, shape=torch.Size(shape), stride=stride)

    return call, wrap
