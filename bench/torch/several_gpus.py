#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How much faster several GPUs are than one: T(1) / (R * T(R)) of fovea.torch.context_parallel over the R GPUs of a machine, forward
and backward. 1.0 is perfect.

A row is a problem. T(1) is fovea.torch.attention of the whole problem on one of these GPUs. T(R) is the slowest rank's time, for each
movement of docs/several-gpus.md that applies, and for PyTorch's own context_parallel with cuDNN and with FlashAttention-2. They are
measured in turns, and a ratio is of one turn. PyTorch's are shown as parts of R times fovea's T(1), too, so columns compare.

Each row is checked first: out and all gradients of every rank beside one GPU's (root mean square of the difference over that of the
result). In that call the most memory is measured that a rank had beside its inputs, results and gradients, and set beside what
explain_context_parallel names. PyTorch's context_parallel has no biases, windows and packed rows; its dropout has another mask, so it
is timed and not checked there.

With two H200 all rows take about five minutes, of which two are compilation (estimated). Rows that the time does not reach are named.

examples:
  bench/torch/several_gpus.py                                     every row, on all GPUs of the machine
  bench/torch/several_gpus.py --json bench/results/several_gpus.json
  bench/torch/several_gpus.py --seconds 120 --filter causal       some rows, for two minutes
  bench/torch/several_gpus.py --ranks 2 --move keys --no-peers    two of the GPUs, one movement
  bench/torch/several_gpus.py --dry-run                           tiny problems over two processes of a CPU: whether it runs at all
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import math
import os
import random
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402
from torch import Tensor  # noqa: E402

import fovea  # noqa: E402
import records  # noqa: E402
from fovea.torch import Rows, attention, context_parallel, explain_context_parallel  # noqa: E402

MOVES = ("keys", "heads", "ring")
PEERS = {"PyTorch cuDNN": "CUDNN_ATTENTION", "PyTorch FlashAttention-2": "FLASH_ATTENTION"}
PATIENCE = 120  # seconds without any progress, after which processes are ended
WRONG = {"cuda": 2e-2, "cpu": 1e-4}  # the greatest difference from one GPU that is right, in bf16 and in fp32
MIB = 2**20


# ---- rows ----


class Row(NamedTuple):
    name: str
    kind: str  # of the plan; "triangle": no plan, but DTensors
    heads: tuple[int, int]
    length: int
    floor: float
    goal: float
    dim: int = 128
    options: dict[str, Any] = {}
    bias: bool = False
    pytorch: str = ""  # why PyTorch's context_parallel cannot compute it


def all_rows(ranks: int, memory: int, tiny: bool) -> list[Row]:
    """`memory`: bytes of a GPU, which limit the length of the row with a bias. `tiny`: a CPU's problems, named like the others."""
    long, half, triangle, dim = (512, 256, 24, 16) if tiny else (131072, 65536, 1536, 128)
    heads, grouped, with_bias = ((4, 4), (8, 4), (4, 4)) if tiny else ((16, 16), (32, 8), (8, 8))
    window = 16 if tiny else 4096
    biased = half if tiny else bias_length(ranks, memory)
    causal = {"causal": True}
    return [
        Row("causal 128k 16/16", "zigzag", heads, long, 0.95, 0.98, dim, causal),
        Row("causal 128k 32/8", "zigzag", grouped, long, 0.98, 0.987, dim, causal),
        Row("causal 64k 16/16", "zigzag", heads, half, 0.93, 0.96, dim, causal),
        Row("dropout 0.1, 128k", "zigzag", heads, long, 0.93, 0.97, dim, {**causal, "dropout_p": 0.1, "seed": 1}),
        Row("window 4096, 128k", "contiguous", heads, long, 0.93, 0.97, dim, {**causal, "window": (window - 1, 0)}, pytorch="no windows"),
        Row(f"bias, {biased // 1024 or biased}{'k' * (biased >= 1024)} 8/8", "zigzag", with_bias, biased, 0.93, 0.97, dim, causal, True,
            pytorch="no bias"),
        Row("packed 1k to 64k", "packed", heads, long, 0.93, 0.97, dim, causal, pytorch="no packed rows"),
        Row("packed, contiguous", "packed contiguous", heads, long, 0.93, 0.97, dim, causal, pytorch="no packed rows"),
        Row(f"triangle N={triangle}", "triangle", (4, 4), triangle, 0.93, 0.97, min(dim, 32), {}, True, pytorch="no bias"),
    ]  # fmt: skip


def bias_length(ranks: int, memory: int) -> int:
    """The longest power of two whose bias of 8 heads in bf16 fits a GPU: it has the whole one, its gradient by one GPU, and a rank's
    part of both and of what is compared, all at once."""
    length = 65536
    while 8 * 2 * length**2 * (2 + 3 / ranks) * 1.1 > memory * 0.93 and length > 1024:
        length //= 2
    return length


def documents(total: int, shortest: int, longest: int) -> list[int]:
    """Lengths of which short ones are the most (Pareto), the same in every run."""
    draw, lengths = random.Random(0), []
    while sum(lengths) < total:
        lengths.append(min(total - sum(lengths), longest, int(shortest * draw.paretovariate(1.0))))
    return lengths


# ---- a rank's problem ----


class Problem:
    """A row's whole problem, which every rank has: for T(1), and to compare with."""

    def __init__(self, row: Row, device: torch.device) -> None:
        self.row, self.device = row, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(len(row.name))
        normal = lambda *shape, of=dtype: torch.randn(shape, device=device, dtype=of, generator=generator)  # noqa: E731
        (hq, hk), n = row.heads, row.length
        self.options = dict(row.options)
        if row.kind == "triangle":
            self.at = 1  # rows of the pair representation are entries of the batch
            shapes = [(1, n, hq, n, row.dim)] * 3
            self.ends: list[int] = []
        elif row.kind.startswith("packed"):
            self.at = 0
            shapes = [(n, h, row.dim) for h in (hq, hk, hk)]
            lengths = documents(n, max(4, n // 128), n // 2)
            self.ends = [0, *itertools.accumulate(lengths)]
        else:
            self.at = 2
            shapes = [(1, h, n, row.dim) for h in (hq, hk, hk)]
            self.ends = []
        self.q, self.k, self.v = (normal(*shape) for shape in shapes)
        self.grad_out = normal(*shapes[0])
        self.bias: Optional[Tensor] = None
        if row.kind == "triangle":
            self.bias = normal(1, 1, hq, n, n, of=torch.float32)
        elif row.bias:
            self.bias = normal(hq, n, n)

    def leaves(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.bias) if x is not None]

    def alone(self) -> Ready:
        """One GPU."""
        options = dict(self.options)
        if self.ends:
            ends = torch.tensor(self.ends, dtype=torch.int32, device=self.device)
            longest = max(b - a for a, b in itertools.pairwise(self.ends))
            options.update(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest)
        leaves = [x.detach().requires_grad_() for x in self.leaves()]
        call = lambda: attention(*leaves[:3], **options, **with_bias(leaves))  # noqa: E731
        return Ready(call, leaves, self.grad_out)


class Ready(NamedTuple):
    """A call with this rank's tensors."""

    call: Callable[[], Tensor]
    leaves: list[Tensor]
    grad_out: Tensor
    around: Callable[[], Any] = contextlib.nullcontext  # in which forward and backward are called
    finish: Callable[[list[Tensor]], list[Tensor]] = list  # of the gradients: sums over ranks
    explained: Callable[[], str] = str


def with_bias(leaves: list[Tensor]) -> dict[str, Tensor]:
    return {"bias": leaves[3]} if len(leaves) > 3 else {}


def plan(problem: Problem) -> Rows:
    row = problem.row
    block = 128 if problem.device.type == "cuda" else 16  # tiny problems are cut, too
    if row.kind.startswith("packed"):
        return Rows.packed(problem.ends, block=block, contiguous=row.kind != "packed")
    rows: Rows = getattr(Rows, row.kind)(row.length, block=block)
    return rows


class Contender(NamedTuple):
    name: str
    ours: bool
    make: Callable[[], Ready]  # anew for every measurement: all of them at once would not fit
    part: Callable[[list[Tensor]], Any]  # what this rank has of [out, *gradients] of one GPU: an iterator
    compared: bool = True


def contenders(problem: Problem, options: argparse.Namespace) -> list[Contender]:
    row = problem.row
    if row.kind == "triangle":
        return triangle(problem)
    rows, found = plan(problem), []
    moves: list[Any] = [move for move in MOVES if move in options.move] if rows.ranks > 1 else [None]
    for move in moves:
        found.append(by_move(problem, rows, move))
    if options.peers and not row.pytorch:
        found += [by_pytorch(problem, rows, name) for name in PEERS]
    return found


def by_move(problem: Problem, rows: Rows, move: Optional[str]) -> Contender:
    def plane(x: Tensor) -> Tensor:
        """This rank's part of a bias or of its gradient."""
        if move != "heads":
            return rows.take(x, -2)
        each = x.shape[-3] // rows.ranks
        return x.narrow(-3, rows._rank() * each, each)

    def part(whole: list[Tensor]) -> Any:
        for n, x in enumerate(whole):
            yield plane(x) if n == 4 else rows.take(x, problem.at)

    def make() -> Ready:
        own = [rows.take(x, problem.at).contiguous() for x in (problem.q, problem.k, problem.v, problem.grad_out)]
        leaves = [*own[:3], *([] if problem.bias is None else [plane(problem.bias).contiguous()])]
        leaves = [x.detach().requires_grad_() for x in leaves]
        given: dict[str, Any] = {"rows": rows, "move": move, **problem.options, **with_bias(leaves)}
        explained = lambda: explain_context_parallel(*leaves[:3], **given)  # noqa: E731
        return Ready(lambda: context_parallel(*leaves[:3], **given), leaves, own[3], explained=explained)

    return Contender(move or "one rank", True, make, part)


def by_pytorch(problem: Problem, rows: Rows, name: str) -> Contender:
    """PyTorch's public context_parallel. It gives a rank the rows that Rows.zigzag does; were they others, the check would say so."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as pytorch_context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh, backend = init_device_mesh(problem.device.type, (rows.ranks,)), getattr(SDPBackend, PEERS[name])
    dropout = problem.options.get("dropout_p", 0.0)

    @contextlib.contextmanager
    def around() -> Any:
        switch = torch.empty(1, 1, rows.total, 1, device=problem.device)  # it wants some tensor to shard
        with pytorch_context_parallel(mesh, buffers=[switch], buffer_seq_dims=[2], no_restore_buffers={switch}), sdpa_kernel(backend):
            yield

    def make() -> Ready:
        *own, grad_out = (rows.take(x, problem.at).contiguous() for x in (problem.q, problem.k, problem.v, problem.grad_out))
        leaves = [x.detach().requires_grad_() for x in own]
        grouped = {"enable_gqa": True} if leaves[0].shape[1] != leaves[1].shape[1] else {}
        # By its name in the module, where context_parallel puts its own.
        call = lambda: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
            *leaves, dropout_p=dropout, is_causal=True, **grouped)  # fmt: skip
        return Ready(call, leaves, grad_out, around)

    return Contender(name, False, make, lambda whole: (rows.take(x, problem.at) for x in whole), compared=not dropout)


def triangle(problem: Problem) -> list[Contender]:
    """Rows of the pair representation over the ranks, by DTensors, and by hand: attention of a rank's rows, and an all-reduce of the
    bias's gradient, which is all that the DTensors do. Every rank gets the whole gradient of the bias."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(problem.device.type, (ranks,))
    sizes = [problem.row.length // ranks + (n < problem.row.length % ranks) for n in range(ranks)]
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    own = lambda x: x[:, rows].contiguous()  # noqa: E731

    def by_hand() -> Ready:
        assert problem.bias is not None
        leaves = [x.detach().requires_grad_() for x in (*map(own, (problem.q, problem.k, problem.v)), problem.bias)]

        def finish(grads: list[Tensor]) -> list[Tensor]:
            dist.all_reduce(grads[3])
            return grads

        return Ready(lambda: attention(*leaves[:3], bias=leaves[3]), leaves, own(problem.grad_out), finish=finish)

    def dtensors() -> Ready:
        assert problem.bias is not None
        whole = lambda x, how: DTensor.from_local(x, mesh, [how], run_check=False)  # noqa: E731
        inputs = [whole(own(x), Shard(1)) for x in (problem.q, problem.k, problem.v)] + [whole(problem.bias, Replicate())]
        leaves = [x.detach().requires_grad_() for x in inputs]

        def finish(grads: list[Tensor]) -> list[Tensor]:
            placed = [*grads[:3], grads[3].redistribute(placements=[Replicate()])]  # type: ignore[attr-defined]
            return [x.to_local() for x in placed]  # type: ignore[attr-defined]

        return Ready(lambda: attention(*leaves[:3], bias=leaves[3]), leaves, whole(own(problem.grad_out), Shard(1)), finish=finish)

    part = lambda whole: (x if n == 4 else x[:, rows] for n, x in enumerate(whole))  # noqa: E731
    return [Contender("DTensor", True, dtensors, part), Contender("by hand", True, by_hand, part)]


# ---- check and measure, on a rank ----


class Group:
    """What ranks tell one another beside what is measured, over gloo."""

    def __init__(self, device: torch.device, alive: Path) -> None:
        self.device, self.alive = device, alive
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.control = dist.new_group(backend="gloo")

    def told(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        self.wait()
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.control)
        if self.rank == 0:
            self.alive.touch()
        return found

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def agree(self, value: Any) -> Any:
        """The first rank's value."""
        return self.told(value)[0]


class Asunder(Exception):
    """Ranks failed differently: collectives that some of them began never end, so the processes cannot be used any more."""


def difference(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`, in fp64 sums over pieces: a bias is too large for a copy in fp32."""
    assert got.shape == want.shape, f"{tuple(got.shape)} instead of {tuple(want.shape)}"
    error = size = 0.0
    for a, b in zip(*(x.detach().flatten(0, -2).split(max(1, 2**26 // max(1, x.shape[-1]))) for x in (got, want))):
        b = b.float()
        error += (a.float() - b).square().sum(dtype=torch.float64).item()
        size += b.square().sum(dtype=torch.float64).item()
    return math.sqrt(error / size) if size else math.sqrt(error)


def local(x: Tensor) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def bytes_of(tensors: list[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in map(local, tensors))


def named_bytes(text: str, when: str) -> int:
    line = re.search(f"^{when}: (.*)$", text, re.MULTILINE)
    return sum(int(size) for size in re.findall(r"(\d+) bytes", line[1])) if line else 0


class Peak:
    """The most memory of the device beside what was there and what is subtracted: of a forward, then of its backward."""

    def __init__(self, device: torch.device) -> None:
        self.on = device.type == "cuda"
        if self.on:
            torch.cuda.synchronize()
            self.before = torch.cuda.memory_allocated()
        self.reset()

    def reset(self) -> None:
        if self.on:
            torch.cuda.reset_peak_memory_stats()

    def beside(self, size: int) -> int:
        if not self.on:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - self.before - size


def check(contender: Contender, problem: Problem, whole: list[Tensor]) -> dict[str, Any]:
    """Compares a contender's results on this rank with one GPU's, and measures its memory."""
    ready = contender.make()
    found: dict[str, Any] = {}
    text = ready.explained()
    with ready.around():
        peak = Peak(problem.device)
        out = ready.call()
        # With out a rank keeps lse in fp32, which is a result, too.
        results = bytes_of([out]) + local(out).numel() // problem.row.dim * 4
        forward = peak.beside(results)
        peak.reset()
        grads = ready.finish(list(torch.autograd.grad(out, ready.leaves, ready.grad_out)))
        backward = peak.beside(results + bytes_of(grads))
    found["peak_bytes"] = [forward, backward]
    if text:
        found["named_bytes"] = [named_bytes(text, f"buffers of the {way}") for way in ("forward", "backward")]
    if contender.compared:
        names = ["out", *(f"grad_{name}" for name in ("q", "k", "v", "bias"))]
        got = [local(out), *map(local, grads)]
        del out, grads, ready
        found["error"] = {name: difference(x, y) for name, x, y in zip(names, got, contender.part(whole))}
    return found


def sample(ready: Ready, count: int, group: Group) -> tuple[float, float]:
    """Milliseconds of a forward and of a backward: means of `count`, after one that is not counted, so that ranks begin together."""
    cuda = group.device.type == "cuda"
    marks: list[Any] = []

    def mark() -> None:
        if not cuda:
            marks.append(time.perf_counter())
            return
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()

    group.told(None)
    with ready.around():
        for n in range(count + (count > 1)):
            if n == (count > 1):
                marks.clear()
            mark()
            out = ready.call()
            mark()
            ready.finish(list(torch.autograd.grad(out, ready.leaves, ready.grad_out)))
            mark()
            del out
    group.wait()
    spent = [(b - a) * 1e3 if not cuda else a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    return tuple(sum(spent[way::3]) / count for way in (0, 1))  # type: ignore[return-value]


def tried(group: Group, function: Callable[[], Any]) -> tuple[Any, str]:
    """What it returned, or why it raised on all ranks."""
    result, error = None, ""
    try:
        result = function()
        group.wait()
    except Exception as raised:
        error = f"{type(raised).__name__}: {' '.join(str(raised).split())[:300]}"
    errors = group.told(error)
    if any(errors) and not all(errors):
        raise Asunder(next(filter(None, errors)))
    return result, errors[0]


def measure(row: Row, options: argparse.Namespace, group: Group, late: Callable[[], bool]) -> dict[str, Any]:
    tiny = options.dry_run
    problem = Problem(row, group.device)
    about: dict[str, Any] = {"name": row.name, "ranks": group.ranks, "heads": list(row.heads), "length": row.length, "dim": row.dim,
                             "floor": row.floor, "goal": row.goal}  # fmt: skip
    if problem.ends:
        about["documents"] = [b - a for a, b in itertools.pairwise(problem.ends)]

    def one() -> list[Tensor]:
        ready = problem.alone()
        out = ready.call()
        return [out.detach(), *torch.autograd.grad(out, ready.leaves, ready.grad_out)]

    whole, error = tried(group, one)
    if error:
        return {**about, "error": f"one GPU: {error}"}
    runners, results = [], {}
    for contender in contenders(problem, options):
        found, error = tried(group, lambda: check(contender, problem, whole))  # noqa: B023
        clean(group.device)
        if error:
            results[contender.name] = {"refused" if not contender.ours or "NotImplementedError" in error else "failed": error}
            continue
        told = group.told(found)
        most = lambda name, at: max(each[name][at] for each in told)  # noqa: B023, E731
        result: dict[str, Any] = {}
        if group.device.type == "cuda":
            result["peak_mib"] = [round(most("peak_bytes", way) / MIB) for way in (0, 1)]
        if "named_bytes" in found:
            result["named_mib"] = [round(most("named_bytes", way) / MIB, None if not tiny else 3) for way in (0, 1)]
        if contender.compared:
            result["error"] = {name: float(f"{most('error', name):.2e}") for name in found["error"]}
            worst = max(result["error"].values())
            if not worst <= WRONG[group.device.type]:
                result["wrong"] = worst
        results[contender.name] = result
        runners.append(contender)
    if row.kind != "triangle" and group.ranks > 1:
        own = [rows_like(x, plan(problem), problem.at) for x in (problem.q, problem.k, problem.v)]
        bias = {} if problem.bias is None else {"bias": rows_like(problem.bias, plan(problem), -2)}
        chosen = explain_context_parallel(*own, rows=plan(problem), **problem.options, **bias)
        about["chosen"] = re.search(r"^move: (\w+)", chosen, re.MULTILINE)[1]  # type: ignore[index]
    del whole
    clean(group.device)

    # A sample has as many calls as take `--each` seconds, the same number on all ranks.
    sides: dict[str, Callable[[], Ready]] = {"one": problem.alone, **{c.name: c.make for c in runners}}
    counts, times = {}, {name: [] for name in sides}
    for name, make in sides.items():
        (first, _) = tried(group, lambda: sample(make(), 1, group))  # noqa: B023
        counts[name] = group.agree(max(1, min(50, round(options.each * 1e3 / sum(first))))) if first else 1
        clean(group.device)
    for turn in range(options.turns):
        if group.agree(turn > 0 and late()):
            break
        for name, make in sides.items():
            spent, error = tried(group, lambda: sample(make(), counts[name], group))  # noqa: B023
            if error:
                raise Asunder(error)
            times[name].append(group.told(spent))
            if row.bias:
                clean(group.device)
    return {**about, **numbers(times, results, group.ranks)}


def rows_like(x: Tensor, rows: Rows, at: int) -> Tensor:
    """Without memory: a tensor of this rank's rows."""
    shape = list(x.shape)
    shape[at] = rows.count
    return torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=True)


def numbers(times: dict[str, list[Any]], results: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Medians over turns. T(1) is the first rank's; of several ranks the slowest counts."""
    one = [each[0] for each in times["one"]]
    middle = lambda values: round(statistics.median(values), 3)  # noqa: E731
    found: dict[str, Any] = {
        "turns": len(one),
        "one_ms": [middle(each[way] for each in one) for way in (0, 1)],
        "one_ms_by_gpu": [middle(sum(each[rank]) for each in times["one"]) for rank in range(ranks)],
        "results": results,
    }
    for name, turns in times.items():
        if name == "one":
            continue
        slowest = [max(each, key=sum) for each in turns]
        ratios = [sum(a) / (ranks * sum(b)) for a, b in zip(one, slowest)]
        results[name].update(
            ms=[middle(each[way] for each in slowest) for way in (0, 1)],
            efficiency=middle(ratios), least=round(min(ratios), 3), most=round(max(ratios), 3),
            by_way=[middle(a[way] / (ranks * b[way]) for a, b in zip(one, slowest)) for way in (0, 1)],
        )  # fmt: skip
    return found


def clean(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def rank_main(rank: int, ranks: int, folder: str, names: list[str], options: argparse.Namespace, started: float, memory: int) -> None:
    """One rank: measures the rows of these names. The first rank writes them to a file, one a line."""
    warnings.filterwarnings("ignore")  # PyTorch's, of why a peer refuses
    at = Path(folder)
    device = torch.device("cpu") if options.dry_run else torch.device("cuda", rank)
    init = {"init_method": f"file://{folder}/store", "rank": rank, "world_size": ranks}
    if options.dry_run:
        torch.set_num_threads(1)
        fovea.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", **init)
    else:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", **init)
    group = Group(device, at / "alive")
    late = lambda: time.time() - started > options.seconds  # noqa: E731

    def note(by: int = 0, **line: Any) -> None:
        if rank == by:
            with open(at / "lines", "a") as file:
                file.write(json.dumps(line) + "\n")

    note(machine=machine(device, ranks))
    for row in (row for row in all_rows(ranks, memory, options.dry_run) if row.name in names):
        if group.agree(late()):
            break
        note(begun=row.name)
        begin = time.monotonic()
        try:
            found = measure(row, options, group, late)
        except Asunder as error:
            note(by=rank, row={"name": row.name, "floor": row.floor, "goal": row.goal, "error": f"rank {rank} of {ranks}: {error}"})
            os._exit(3)  # the parent goes on with new processes
        note(row={**found, "seconds": round(time.monotonic() - begin, 1)})
        clean(device)
    note(ended=True)
    group.told(None)
    os._exit(0)  # taking groups down may wait for ranks that are gone


def machine(device: torch.device, ranks: int) -> dict[str, Any]:
    found = {"gpus": ranks, "torch": torch.__version__, "fovea": fovea.__version__}
    if device.type == "cuda":
        found = {"gpu": torch.cuda.get_device_name(), **found, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
                 "nccl": ".".join(map(str, torch.cuda.nccl.version()))}  # fmt: skip
    else:
        found = {"gpu": "none: processes of a CPU, tiny problems", **found}
    return found


# ---- the command ----


def run(rows: list[Row], ranks: int, options: argparse.Namespace, memory: int) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """The machine, the rows that were measured, and the names of those that were not. Processes that die take one row with them."""
    started, about, measured = time.time(), {}, []
    left = [row.name for row in rows]
    while left and time.time() - started < options.seconds:
        with tempfile.TemporaryDirectory() as folder:
            alive = Path(folder, "alive")
            alive.touch()
            said = in_processes(ranks, (ranks, folder, left, options, started, memory), alive)
            lines = [json.loads(line) for line in Path(folder, "lines").read_text().splitlines()] if Path(folder, "lines").exists() else []
        about = next((line["machine"] for line in lines if "machine" in line), about)
        found = list({line["row"]["name"]: line["row"] for line in lines if "row" in line}.values())
        begun = [line["begun"] for line in lines if "begun" in line]
        if begun and begun[-1] not in [row["name"] for row in found]:
            found.append({"name": begun[-1], "error": said or "its processes ended"})
        measured += found
        left = [name for name in left if name not in [row["name"] for row in found]]
        if any("ended" in line for line in lines):
            break
        if not found:  # they cannot begin at all
            print(f"bench/torch/several_gpus.py: {said or 'the processes ended before the first row'}")
            break
    return about, measured, left


def in_processes(ranks: int, arguments: tuple[Any, ...], alive: Path) -> str:
    """Runs rank_main in so many processes; why they ended, if it was not by themselves."""
    context = torch.multiprocessing.start_processes(rank_main, args=arguments, nprocs=ranks, join=False, start_method="spawn")
    assert context is not None
    shown = 0
    lines = alive.parent / "lines"

    def show() -> None:
        nonlocal shown
        told = lines.read_text().splitlines() if lines.exists() else []
        for line in map(json.loads, told[shown:]):
            if "row" in line:
                print(line_of(line["row"]), flush=True)
        shown = len(told)

    try:
        while not context.join(timeout=0.5):
            show()
            if time.time() - alive.stat().st_mtime > PATIENCE:
                for process in context.processes:
                    process.kill()
                return f"no progress for {PATIENCE} s"
    except (torch.multiprocessing.ProcessRaisedException, torch.multiprocessing.ProcessExitedException) as error:
        return " ".join(str(error).split())[-300:]
    finally:
        show()
    return ""


def line_of(row: dict[str, Any]) -> str:
    """One row in full."""
    if "error" in row:
        return f"{row['name']:20} {row['error']}"
    each = ", ".join(f"{ms:.4g}" for ms in row["one_ms_by_gpu"])
    parts = [f"{row['name']:20} one GPU: {pair(row['one_ms'])} ms; each of them, both: {each}"]
    for name, result in row["results"].items():
        if "ms" not in result:
            parts.append(f"{'':20} {name}: " + "; ".join(f"{key} {value}" for key, value in result.items() if key in ("refused", "failed")))
            continue
        text = f"{name}: {pair(result['ms'])} ms, {result['efficiency']:.3f} ({result['least']:.3f} to {result['most']:.3f})"
        if "error" in result:
            text += "; error " + " ".join(f"{key.removeprefix('grad_')} {value:.1e}" for key, value in result["error"].items())
        if "wrong" in result:
            text += "  WRONG"
        parts.append(f"{'':20} {text}")
    return "\n".join(parts)


def pair(values: list[float]) -> str:
    return " / ".join(f"{value:.4g}" for value in values)


def table(rows: list[dict[str, Any]], ranks: int) -> str:
    """What comes last. A star is the movement that context_parallel chooses by itself."""
    peers = [name for name in PEERS if any(name in row.get("results", {}) for row in rows)]
    head = f"{'':20} {'T(1) ms':>9} {'keys':>7} {'heads':>7} {'ring':>7} {'floor':>6} {'goal':>6} " + " ".join(
        f"{name.removeprefix('PyTorch '):>17}" for name in peers)  # fmt: skip
    lines = [f"T(1) / ({ranks} T({ranks})), forward and backward; * is what context_parallel chooses; cuDNN and FlashAttention-2 are "
             "PyTorch's context_parallel, of fovea's T(1)", head]  # fmt: skip
    memory = ["MiB of a rank beside inputs, results and gradients, forward, backward: measured, of what explain names (the workspace of "
              "attention is not named)"]  # fmt: skip
    for row in rows:
        if "error" in row:
            lines.append(f"{row['name']:20} {row['error'][:100]}")
            continue
        results, names = row["results"], list(MOVES)
        shown = {name: cell(results.get(name), name == row.get("chosen")) for name in (*MOVES, *peers)}
        others = [name for name in results if name not in shown]
        text = f"{row['name']:20} {sum(row['one_ms']):9.4g} "
        if others:  # of triangle attention, and of one rank
            text += f"{', '.join(f'{name} {cell(results[name], False)}' for name in others):>23}"
        else:
            text += " ".join(f"{shown[name]:>7}" for name in names)
        lines.append(text + f" {row['floor']:6} {row['goal']:6} " + " ".join(f"{shown[name]:>17}" for name in peers))
        for name, result in results.items():
            if "peak_mib" in result and "named_mib" in result:
                pairs = zip(result["peak_mib"], result["named_mib"])
                memory.append(f"{row['name']:20} {name:6} " + ", ".join(f"{peak} of {named}" for peak, named in pairs))
    return "\n".join(lines + (memory if len(memory) > 1 else []))


def cell(result: Optional[dict[str, Any]], star: bool) -> str:
    if result is None:
        return "–"
    if "ms" not in result:
        return "failed" if "failed" in result else "refused"
    return "WRONG" if "wrong" in result else f"{result['efficiency']:.3f}" + "*" * star


def save(path: Path, about: dict[str, Any], rows: list[dict[str, Any]], order: list[str]) -> None:
    """Rows of earlier runs that were not measured stay."""
    merged = [*records.kept(path, rows, "name"), *rows]
    place = {name: n for n, name in enumerate(order)}
    records.write(path, {"machine": about, "rows": sorted(merged, key=lambda row: place.get(row["name"], len(place)))})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", action="append", default=[], help="only rows whose name contains one of these")
    parser.add_argument("--ranks", type=int, default=0, help="GPUs (all that there are; with --dry-run 2 processes)")
    parser.add_argument("--move", action="append", default=[], choices=MOVES, help="only these movements")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="without PyTorch's context_parallel")
    parser.add_argument("--seconds", type=float, default=480, help="no row is begun after this time; those that are left are named (480)")
    parser.add_argument("--turns", type=int, default=5, help="how often each is measured (5)")
    parser.add_argument("--each", type=float, default=0.3, help="seconds of one measurement, at least one call (0.3)")
    parser.add_argument("--commit", default="", help="of the code, where there is no git to ask")
    parser.add_argument("--json", type=Path, help="write the rows there; rows of earlier runs that were not measured stay")
    parser.add_argument("--dry-run", action="store_true", help="tiny problems on a CPU, over gloo; its times mean nothing")
    options = parser.parse_args()
    options.move = options.move or list(MOVES)
    if options.dry_run:
        options.turns, options.each = 1, 0.0
    there = 0 if options.dry_run else torch.cuda.device_count()
    ranks = options.ranks or (2 if options.dry_run else there)
    if not options.dry_run and there == 0:
        print("bench/torch/several_gpus.py: no CUDA device that PyTorch sees; --dry-run needs none")
        return 1
    if ranks < 1 or (not options.dry_run and ranks > there):
        parser.error(f"--ranks {options.ranks}; accepted: 1 to {there or 'any number'}, the GPUs of this machine")
    memory = 0 if options.dry_run else torch.cuda.get_device_properties(0).total_memory
    rows = all_rows(ranks, memory, options.dry_run)
    order = [row.name for row in rows]
    rows = [row for row in rows if not options.filter or any(part in row.name for part in options.filter)]
    if not rows:
        parser.error(f"--filter: no row is of that name; there are: {'; '.join(order)}")
    about, measured, dropped = run(rows, ranks, options, memory)
    about = {**about, **records.when(options.commit)}
    if options.json and measured:
        save(options.json, about, [{**row, "date": about["date"], "commit": about["commit"]} for row in measured], order)
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(table(measured, ranks))
    if dropped:
        print(f"not measured: {'; '.join(dropped)}")
    ours = [result for row in measured for name, result in row.get("results", {}).items() if name not in PEERS]
    return int(not measured or any("error" in row for row in measured) or any("wrong" in r or "failed" in r for r in ours))


if __name__ == "__main__":
    sys.exit(main())
