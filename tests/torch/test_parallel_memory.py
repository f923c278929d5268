# SPDX-License-Identifier: Apache-2.0
"""The memory of context_parallel on a rank: inputs, results and the buffers that explain_context_parallel names, counted over gloo."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fovea.torch import Rows, _parallel_call, context_parallel, explain_context_parallel

SMALL = 2**16  # indices, lengths


class Counted(TorchDispatchMode):
    """The bytes of all tensors that operators make, and the most that there were at once."""

    def __init__(self):
        super().__init__()
        self.there = {}
        self.most = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for storage in (x.untyped_storage() for x in tree_leaves(found) if isinstance(x, torch.Tensor)):
            if storage._cdata not in given:  # neither a view nor in place, such as gloo's of its own tensors
                self.there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            del storage
        for _ in range(6):
            if self.now() > self.most:
                time.sleep(0.005)  # gloo's thread lets go of what it sent
        self.most = max(self.most, self.now())
        return found

    def now(self):
        self.there = {key: (ref, size) for key, (ref, size) in self.there.items() if not ref.expired()}
        return sum(size for _, size in self.there.values())


def bytes_of(*tensors):
    return sum(x.untyped_storage().nbytes() for x in tensors)


def named(text, when):
    line = re.search(f"^{when}: (.*)$", text, re.M)
    return sum(int(size) for size in re.findall(r"(\d+) bytes", line[1])) if line else 0


def measured(group, kind, move, options, dtype, shape=None):
    """Per moment: what was counted besides inputs and results, and what explain names."""
    from torch.distributed.device_mesh import DeviceMesh

    n = dist.get_world_size(group)
    where = group if shape is None else DeviceMesh("cpu", torch.arange(n).view(shape))
    ends = [0, 700, 720, 1440]
    rows = Rows.packed(ends, where, block=16) if kind == "packed" else getattr(Rows, kind)(1440, where, block=16)
    heads, usual = 12, _parallel_call.BUFFER_BYTES
    size = (rows.count, heads, 32) if kind == "packed" else (1, heads, rows.count, 32)
    learn = options.get("learn", "qkv")
    q, k, v = (torch.randn(size, dtype=dtype, requires_grad=name in learn) for name in "qkv")
    own = heads // {"heads": n, "both": 0 if shape is None else shape[1]}.get(move, 1)
    planes = {
        "rows": (own, 1440 if move == "heads" else (rows.over_keys or rows).count, 1440), "keys": (heads, 1, 1440), "": None,
        "packed": (heads, rows.longest, rows.longest),
    }  # fmt: skip
    plane = planes[options.get("bias", "")]
    given = {name: x for name, x in options.items() if name not in ("bias", "learn")}
    inputs = [x for x in (q, k, v) if x.requires_grad]
    if plane:
        given["bias"] = torch.randn(plane, dtype=dtype, requires_grad=True)
        inputs.append(given["bias"])
    _parallel_call.BUFFER_BYTES = 1440 * heads * 64 * q.element_size() // 4  # four groups of heads
    try:
        text = explain_context_parallel(q, k, v, rows=rows, move=None if move == "both" else move, **given)
        call = lambda: context_parallel(q, k, v, rows=rows, move=None if move == "both" else move, return_lse=True, **given)  # noqa: E731
        grads = [x.detach().clone() for x in call()]
        with Counted() as forward:
            out, lse = call()
        told = named(text, "kept for the backward")
        for _ in range(100):
            kept = forward.now() - bytes_of(out, lse)
            if kept <= told:
                break
            time.sleep(0.01)  # gloo's thread lets go of what it sent
        with forward:
            forward.most, first = 0, forward.most
            found = torch.autograd.grad((out, lse), inputs, grads)
        results = bytes_of(out, lse)
        return {
            "buffers of the forward": (first - results, named(text, "buffers of the forward")),
            "kept for the backward": (kept, told),
            "buffers of the backward": (forward.most - results - bytes_of(*found), named(text, "buffers of the backward")),
        }
    finally:
        _parallel_call.BUFFER_BYTES = usual


@pytest.mark.parametrize("n, kind, move, options, dtype, shape", [
    (2, "contiguous", "keys", {}, "float32", None),
    (3, "zigzag", "keys", {"causal": True}, "bfloat16", None),
    (2, "zigzag", "keys", {"bias": "rows"}, "float32", None),
    (2, "zigzag", "keys", {"bias": "keys"}, "bfloat16", None),
    (2, "packed", "keys", {"causal": True}, "float32", None),
    (2, "packed", "keys", {"bias": "packed"}, "float32", None),
    (2, "contiguous", "heads", {}, "bfloat16", None),
    (3, "zigzag", "heads", {"bias": "rows"}, "float32", None),
    (2, "zigzag", "heads", {"learn": "q"}, "float32", None),
    (3, "contiguous", "heads", {"learn": "kv"}, "float32", None),
    (2, "contiguous", "ring", {}, "float32", None),
    (3, "zigzag", "ring", {"causal": True, "bias": "rows"}, "bfloat16", None),
    (4, "zigzag", "both", {}, "bfloat16", (2, 2)),
    (4, "contiguous", "both", {"bias": "keys"}, "float32", (2, 2)),
])  # fmt: skip
def test_no_more_than_is_named(ranks, n, kind, move, options, dtype, shape):
    for moments in ranks.run(n, measured, kind, move, options, getattr(torch, dtype), shape):
        for when, (counted, told) in moments.items():
            # Of "keys" all buffers are there at once. The others' are the most of several moments, of which some lack results.
            assert (0.95 if move == "keys" else 0.65) * told <= counted + SMALL and counted <= told + SMALL, (when, counted, told)
