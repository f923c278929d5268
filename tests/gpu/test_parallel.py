# SPDX-License-Identifier: Apache-2.0
"""context_parallel on one GPU: processes are the ranks, which share the device, and gloo moves what NCCL would, by way of the CPU. out,
lse and every gradient beside fp64, with at most twice the error of one call.

Several GPUs and NCCL are measured by bench/torch/several_gpus.py, which compares its results, too."""

import ctypes
import math
import sys
from pathlib import Path
from unittest import mock

import dropout
import pytest
import torch
import torch.distributed as dist

from fovea import _abi, _library
from fovea.torch import Rows, _call, _fast, _parallel_call, _parallel_workspace, attention, context_parallel

pytestmark = pytest.mark.alone  # processes of its own
LENGTH, DOCUMENTS = 1000, [300, 7, 433, 0, 260]
CASES = {
    "causal": {},
    "full, d128": {"causal": False, "dim": 128},
    "bias": {"bias": True},
    "dropout": {"dropout_p": 0.2, "seed": 2**40 + 3, "offset": 5},
    "window": {"window": (100, 0), "kind": "contiguous"},
    "packed": {"kind": "packed"},
    "packed dropout": {"kind": "packed", "dropout_p": 0.2, "seed": 7, "offset": 0},
    "bias dropout window": {"bias": True, "dropout_p": 0.1, "seed": 9, "offset": 1, "window": (200, 0), "dtype": "float16"},
    "float32": {"dtype": "float32", "bias": True},
}


# ---- ranks ----


class Staged:
    """A collective whose result comes to the device when it is waited for."""

    def __init__(self, work, pairs):
        self.work, self.pairs = work, pairs

    def wait(self):
        if self.work is not None:
            self.work.wait()
        for device, host in self.pairs:
            device.copy_(host)


def by_way_of_the_cpu():
    """gloo has no sends of a device's tensors, and not every version has its other collectives: all go through copies on the CPU."""
    if hasattr(dist, "staged"):
        return
    dist.staged = True
    room = lambda x: torch.empty(x.shape, dtype=x.dtype)  # noqa: E731
    gather, scatter, exchange, broadcast = dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_to_all_single, dist.broadcast
    several = dist.batch_isend_irecv

    def finish(work, pairs, async_op):
        staged = Staged(work, pairs)
        if async_op:
            return staged
        staged.wait()
        return None

    def all_gather_into_tensor(output, tensor, group=None, async_op=False):
        host = room(output)
        return finish(gather(host, tensor.cpu(), group=group, async_op=True), [(output, host)], async_op)

    def reduce_scatter_tensor(output, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        host = room(output)
        return finish(scatter(host, tensor.cpu(), op=op, group=group, async_op=True), [(output, host)], async_op)

    def all_to_all_single(output, tensor, receives=None, sends=None, group=None, async_op=False):
        host = room(output)
        return finish(exchange(host, tensor.cpu(), receives, sends, group=group, async_op=True), [(output, host)], async_op)

    def broadcast_(tensor, src=None, group=None, async_op=False):
        host = tensor.cpu()
        return finish(broadcast(host, src, group=group, async_op=True), [(tensor, host)], async_op)

    def batch_isend_irecv(operations):
        hosts = [x.tensor.cpu() if x.op is dist.isend else room(x.tensor) for x in operations]
        works = several([dist.P2POp(x.op, host, x.peer, x.group, x.tag) for x, host in zip(operations, hosts)])
        return [Staged(All(works), [(x.tensor, host) for x, host in zip(operations, hosts) if x.op is dist.irecv])]

    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = all_gather_into_tensor, reduce_scatter_tensor
    dist.all_to_all_single, dist.broadcast, dist.batch_isend_irecv = all_to_all_single, broadcast_, batch_isend_irecv


class All:
    """One work of several."""

    def __init__(self, works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


# ---- fp64 ----


def exact(q, k, v, bias, options, lengths):
    """out (rows, H, D) and lse (H, rows) of packed rows, by autograd; q, k, v, bias in fp64."""
    heads, dim, outs, lses, first = q.shape[1], q.shape[2], [], [], 0
    for number, length in enumerate(lengths):
        one = lambda x: x[first : first + length].transpose(0, 1)  # noqa: B023, E731
        qs, ks, vs = one(q), *(one(x).repeat_interleave(heads // k.shape[1], 0) for x in (k, v))
        first += length
        s = qs @ ks.mT / math.sqrt(dim)
        if bias is not None:
            s = s + bias
        i, j = (torch.arange(length, device=q.device) for _ in range(2))
        behind = i[:, None] - j
        if options.get("causal"):
            s = s.masked_fill(behind < 0, -math.inf)
        if "window" in options:
            left, right = options["window"]
            s = s.masked_fill((behind > left) | (behind < -right), -math.inf)
        p = torch.softmax(s, -1)
        if options.get("dropout_p"):
            streams = torch.arange(heads, device=q.device)[None] + number * heads
            kept = dropout.kept("fovea", options["dropout_p"], options["seed"], options["offset"], streams, length, length, None)[0]
            p = p * kept * dropout.factor("fovea", options["dropout_p"])
        outs.append((p @ vs).transpose(0, 1))
        lses.append(torch.logsumexp(s, -1))
    return torch.cat(outs), torch.cat(lses, -1)


# ---- a case, on a rank ----


def check(group, name, case, move):
    by_way_of_the_cpu()
    device, n = torch.device(name, 0) if name == "cuda" else torch.device(name), dist.get_world_size(group)
    options = {"causal": True, **case}
    kind, dim, dtype = options.pop("kind", "zigzag"), options.pop("dim", 64), getattr(torch, options.pop("dtype", "bfloat16"))
    packed, heads, heads_k = kind == "packed", 2 * n, n
    generator = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)  # noqa: E731
    lengths = DOCUMENTS if packed else [LENGTH]
    total = sum(lengths)
    whole = {x: normal(total, h, dim) for x, h in (("q", heads), ("k", heads_k), ("v", heads_k))}
    if options.pop("bias", False):
        whole["bias"] = normal(heads, total, total)
    grad_out, grad_lse = normal(total, heads, dim), normal(heads, total).float()
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = Rows.packed(ends, group, block=16) if packed else getattr(Rows, kind)(LENGTH, group, block=16)

    def given(x):
        """As the call has it: a batch of one, or packed."""
        return x if packed else x.transpose(0, 1)[None]

    def part(name, x):
        """This rank's part of what is packed."""
        if name == "bias":
            each = heads // n
            return x.narrow(0, dist.get_rank(group) * each, each) if move == "heads" else rows.take(x, 1)
        return rows.take(x, 1 if name == "lse" else 0)

    def run(function, inputs, grads, **more):
        """out, lse and gradients, in packed form."""
        leaves = {key: (x if key == "bias" else given(x)).detach().requires_grad_() for key, x in inputs.items()}
        bias = {"bias": leaves["bias"]} if "bias" in leaves else {}
        out, lse = function(leaves["q"], leaves["k"], leaves["v"], return_lse=True, **bias, **options, **more)
        found = torch.autograd.grad((out, lse), list(leaves.values()), (given(grads[0]), grads[1] if packed else grads[1][None]))
        back = lambda x: x if packed else x[0].transpose(0, 1)  # noqa: E731
        results = {"out": back(out), "lse": lse if packed else lse[0]}
        return {**results, **{key: x if key == "bias" else back(x) for key, x in zip(leaves, found)}}

    of_one = {}
    if packed:
        of_one.update(dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ends.int().to(device)))
        of_one.update(dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), max(lengths)))
    one = run(attention, whole, (grad_out, grad_lse), **of_one)
    wide = {key: x.double().requires_grad_() for key, x in whole.items()}
    results = exact(wide["q"], wide["k"], wide["v"], wide.get("bias"), options, lengths)
    right = {"out": results[0], "lse": results[1]}
    right.update(zip(wide, torch.autograd.grad(results, list(wide.values()), (grad_out.double(), grad_lse.double()))))
    mine = {key: part(key, x) for key, x in whole.items()}
    got = run(context_parallel, mine, (rows.take(grad_out, 0), rows.take(grad_lse, 1)), rows=rows, move=move)
    wrong = []  # raised at the end: other ranks wait for this one's collectives
    for key, x in got.items():
        assert x.dtype == one[key].dtype and x.device.type == device.type, key
        wanted = part(key, right[key])
        size = right[key].square().mean().sqrt().item()
        error = (x.double() - wanted).square().mean().sqrt().item()
        of_one_call = (part(key, one[key]).double() - wanted).square().mean().sqrt().item()
        if not error <= 2 * of_one_call + torch.finfo(x.dtype).eps * size / 2:
            wrong.append(f"{key}: error {error:.3g}, of one call {of_one_call:.3g}, size {size:.3g}")
    assert not wrong, "\n".join(wrong)


def check_workspace(group, name, case, move):
    """What explain names is what the largest call asks the library for, on this device, too."""
    by_way_of_the_cpu()
    device, n = torch.device(name, 0) if name == "cuda" else torch.device(name), dist.get_world_size(group)
    options = {"causal": True, **case}
    kind, dim, dtype = options.pop("kind", "zigzag"), options.pop("dim", 64), getattr(torch, options.pop("dtype", "bfloat16"))
    ends = torch.tensor([0, *DOCUMENTS]).cumsum(0)
    rows = Rows.packed(ends, group, block=16) if kind == "packed" else getattr(Rows, kind)(LENGTH, group, block=16)
    shape = (lambda h: (rows.count, h, dim)) if kind == "packed" else lambda h: (1, h, rows.count, dim)
    q, k, v = (torch.randn(shape(h), device=device, dtype=dtype, requires_grad=True) for h in (2 * n, n, n))
    if options.pop("bias", False):
        of_rank = (2, LENGTH) if move == "heads" else (2 * n, rows.count)
        options["bias"] = torch.randn(*of_rank, LENGTH, device=device, dtype=dtype, requires_grad=True)
    told = _parallel_workspace.needed(_parallel_call.prepare(q, k, v, rows, move, options))
    found, usual = {_abi.FORWARD: 0, _abi.BACKWARD: 0}, _call._Problem._call_library

    def call(problem, direction):
        size = ctypes.c_size_t()
        assert _library.lib.fovea_workspace(problem._pointer, direction, ctypes.byref(size)) == 0
        found[direction] = max(found[direction], size.value)
        return usual(problem, direction)

    _fast.switch_off()  # which calls the library itself
    try:
        with mock.patch.object(_call._Problem, "_call_library", call):
            context_parallel(q, k, v, rows=rows, move=move, **options).sum().backward()
    finally:
        _fast.load()
    return tuple(found.values()), told


@pytest.fixture(scope="module")
def ranks():
    """Processes that the CPU's tests have, too (tests/torch/ranks.py)."""
    folder = str(Path(__file__).resolve().parents[1] / "torch")
    sys.path.append(folder)  # the children's path is a copy of this one
    from ranks import Ranks

    processes = Ranks()
    yield processes
    processes.close()
    sys.path.remove(folder)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("move", ["keys", "heads", "ring"])
@pytest.mark.parametrize("case", CASES)
def test_ranks(ranks, device, case, move, n):
    ranks.run(n, check, device.type, CASES[case], move)


@pytest.mark.parametrize("move", ["keys", "heads", "ring"])
@pytest.mark.parametrize("case", CASES)
def test_workspace(ranks, device, case, move):
    for found, told in ranks.run(2, check_workspace, device.type, CASES[case], move):
        assert found == told, (found, told)
