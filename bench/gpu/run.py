#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fovea's GPU speed beside its peers, in one run on one device.

Each case is checked first, ours and FlexAttention (sampled heads against fp64), then timed: forward and backward apart,
medians of three runs in which the contenders alternate, N(0, 1) inputs in as many copies as outgrow the L2 cache. FLOPs
are those of allowed (query, key) pairs. `refused` means that a contender has no kernel for the case. Numbers are recorded,
never asserted.

examples:
  bench/gpu/run.py                                                  every row, PyTorch's contenders
  bench/gpu/run.py --filter dense --filter triangle                 some rows
  bench/gpu/run.py --quick --seconds 100                            a row of each kind, in the time that there is
  bench/gpu/run.py --all --json bench/results/gpu.json              with FlexAttention and what else is importable
  bench/gpu/run.py --beside old/build/libfovea.so                   this build's speed over another's, row by row
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(Path(__file__).resolve().parent), str(ROOT / "tools"), str(ROOT / "tests/gpu")]

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit(f"bench/gpu/run.py: {sys.executable} has no PyTorch; run it with a Python that has it (tools/gpu.sh: PYTHON=...)")

import beside  # noqa: E402
import dropout  # noqa: E402
import fovea  # noqa: E402
import records  # noqa: E402
from cases import QUICK, Case, all_cases  # noqa: E402
from contenders import CHECKED, CONTENDERS, DEVICE, SLOW_TO_COMPILE, Inputs, Refused, make_inputs  # noqa: E402

L2_BYTES = 3 * 60e6
RUNS = 3
PATIENCE = 25  # seconds


# ---- check ----


class Reference:
    """A case in fp64, a few (batch entry, head) at a time."""

    def __init__(self, case: Case, x: Inputs) -> None:
        self.case, self.x = case, x
        self.group = case.hq // case.heads_k
        self.starts = [sum(case.lengths[:n]) for n in range(len(case.lengths))]

    def rows(self, t: torch.Tensor, entries: list[int], head: int) -> torch.Tensor:
        """(entries, S, columns); of packed rows one entry."""
        t = t.detach()
        if self.case.lengths:
            (b,) = entries
            return t[self.starts[b] : self.starts[b] + self.case.lengths[b], head][None].double()
        return (t.flatten(0, 1) if self.case.outer else t)[entries, head].double()

    def plane(self, t: torch.Tensor, entries: list[int], head: int, rows: int, keys: int) -> torch.Tensor:
        """Of a bias or mask: (entries or 1, rows or 1, keys or 1)."""
        t = t.detach()
        h = head % t.shape[-3]
        if t.dim() == 5:
            inner = self.case.levels[1]
            picked = torch.stack([t[b // inner % t.shape[0], b % inner % t.shape[1], h] for b in entries])
        else:
            picked = t[entries, h] if t.shape[0] > 1 else t[:1, h]
        return picked[:, :rows, :keys]

    def scores(self, q: torch.Tensor, k: torch.Tensor, entries: list[int], head: int) -> tuple:
        """(s, allowed)"""
        case, x = self.case, self.x
        s = q @ k.mT / math.sqrt(case.d)
        rows, keys = s.shape[-2:]
        if case.softcap:
            s = case.softcap * torch.tanh(s / case.softcap)
        for bias in (x.bias, x.bias2):
            if bias is not None:
                s = s + self.plane(bias, entries, head, rows, keys).double()
        i = torch.arange(rows, device=DEVICE)[:, None] + keys - rows
        j = torch.arange(keys, device=DEVICE)
        if case.alibi:
            s = s - x.slopes[head].double() * (i - j).abs()
        allowed = torch.ones(rows, keys, dtype=torch.bool, device=DEVICE)
        if case.causal:
            allowed &= j <= i
        if case.window[0] >= 0:
            allowed &= j >= i - case.window[0]
        if case.window[1] >= 0:
            allowed &= j <= i + case.window[1]
        if x.mask is not None:
            allowed = allowed & self.plane(x.mask, entries, head, rows, keys)
        return s, allowed

    def keep(self, s: torch.Tensor, entries: list[int], head: int) -> torch.Tensor | float:
        """keep / (1 - p_drop) by the rule as tests/gpu has it."""
        p = self.case.dropout
        if not p:
            return 1.0
        rows, keys = s.shape[-2:]
        streams = torch.tensor([[b * self.case.hq + head] for b in entries], device=s.device)
        return dropout.kept("fovea", p, 1, 0, streams, rows, keys, None)[:, 0].double() * dropout.factor("fovea", p)

    def probabilities(self, s: torch.Tensor, allowed: torch.Tensor, head: int) -> torch.Tensor:
        s = s.masked_fill(~allowed, -math.inf)
        if self.x.sink is not None:
            sink = self.x.sink.detach()[head].double().expand(*s.shape[:-1], 1)
            return torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1]
        p = torch.softmax(s, -1)
        return torch.where(allowed.any(-1, keepdim=True), p, 0.0) if self.x.mask is not None else p

    def bias_gradient(self, t: torch.Tensor) -> tuple:
        """Of the last plane, summed over what it was broadcast over, and the sum of its terms' sizes: a bias without keys
        has a gradient of 0, to which large terms add up."""
        case, x = self.case, self.x
        entries = list(range(case.entries))
        if t.dim() == 5:
            inner = case.levels[1]
            last = [b for b in entries if t.shape[0] == 1 or b // inner == t.shape[0] - 1]
            entries = [b for b in last if t.shape[1] == 1 or b % inner == inner - 1]
        elif t.shape[0] > 1:
            entries = entries[-1:]
        total = torch.zeros(t.shape[-2:], device=DEVICE, dtype=torch.float64)
        size = torch.zeros_like(total)
        most = 1 if case.lengths or case.dropout else max(1, 2**26 // (case.sq * case.rows_k))
        over = [d for d in (-2, -1) if t.shape[d] == 1]
        for head in range(case.hq) if t.shape[-3] == 1 else [case.hq - 1]:
            for first in range(0, len(entries), most):
                some = entries[first : first + most]
                one = lambda y, at: self.rows(y, some, at)  # noqa: B023, E731
                s, allowed = self.scores(one(x.q, head), one(x.k, head // self.group), some, head)
                p = self.probabilities(s, allowed, head)
                dp = one(x.grad_out, head) @ one(x.v, head // self.group).mT * self.keep(s, some, head)
                ds = (p * (dp - (p * dp).sum(-1, keepdim=True)))
                for into, part in ((total, ds.sum(0)), (size, ds.abs().sum(0))):
                    part = part.sum(over, keepdim=True) if over else part
                    into[: part.shape[0], : part.shape[1]] += part
        return total, size


def check(case: Case, x: Inputs, name: str = "ours") -> str:
    """A contender against fp64 on the first and the last head of the first and the last batch entry; "" if it is right."""
    out = CONTENDERS[name](case, x)()
    grads: dict = {}
    if not case.forward_only:
        grads = dict(zip(x.leaves, torch.autograd.grad(out, list(x.leaves.values()), x.grad_out)))
    tolerance = 1e-4 if case.dtype == "fp32" else 3e-2
    worst = ""

    def compare(what, actual, right, least=1e-3):
        nonlocal worst
        error = (actual.double() - right).abs().max().item()
        if not error <= tolerance * (right.abs().max().item() + least):
            worst = worst or f"{what} off by {error:.3g} of {right.abs().max().item():.3g}"

    reference = Reference(case, x)
    for b in sorted({0, case.entries - 1}):
        for h in sorted({0, case.hq - 1}):
            at = lambda t, head=h: reference.rows(t, [b], head)  # noqa: B023, E731
            q = at(x.q).requires_grad_()
            k, v = (at(t, h // reference.group).requires_grad_() for t in (x.k, x.v))
            s, allowed = reference.scores(q, k, [b], h)
            right = (reference.probabilities(s, allowed, h) * reference.keep(s.detach(), [b], h)) @ v
            compare(f"out[{b}, {h}]", at(out), right)
            truth = dict(zip("qkv", torch.autograd.grad(right, (q, k, v), at(x.grad_out)) if grads else ()))
            for name in truth:
                if name in grads and (name == "q" or reference.group == 1):
                    compare(f"grad_{name}[{b}, {h}]", at(grads[name]), truth[name])
    for name in ("bias", "bias2"):
        if name in grads:
            right, size = reference.bias_gradient(getattr(x, name))
            last = grads[name].flatten(0, -3)[-1]
            compare(f"grad_{name}", last, right, 0.1 * size.max().item())
    return worst


# ---- kernels ----


def precompile(cases: list[Case], build: Path) -> None:
    """A build's, on all cores, by the command where it is built; otherwise each is compiled when it is first needed."""
    command = build / "cli" / "fovea"
    if not command.exists():
        return
    started = time.monotonic()
    environment = dict(os.environ)
    if "FOVEA_NVRTC" not in environment:  # the one that comes with PyTorch: the command does not look there
        found = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*"))
        if found:
            environment["FOVEA_NVRTC"] = str(found[-1])
    lines = "\n".join(line for case in cases for line in case.lines())
    done = subprocess.run([command, "precompile", "--file", "-"], input=lines, env=environment, capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip().splitlines()
    print(f"precompiled in {time.monotonic() - started:.0f} s: {said[-1] if said else done.returncode}", flush=True)


# ---- time ----


def timed(calls: list, count: int) -> float:
    """Seconds of one call: the copies in turn, so many calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    calls[-1]()
    start.record()
    for n in range(count):
        calls[n % len(calls)]()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def graphed(calls: list, times: int, stream: torch.cuda.Stream) -> object:
    """The calls alternately, so many times, in one CUDA graph, on the stream that they were warmed up on: autograd remembers
    streams."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Relaxed: a peer that loads a kernel or asks an event late may; that our own calls need none of it is tests/gpu's.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        for _ in range(times):
            for call in calls:
                call()
    return graph.replay


def with_leaves_of_its_own(x: Inputs) -> Inputs:
    """The same memory."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in x.leaves.items()}
    return dataclasses.replace(x, **leaves, leaves=leaves)


class Runner:
    """A contender on a case: one function forward and one backward for each copy of the inputs."""

    def __init__(self, name: str, case: Case, copies: list[Inputs]) -> None:
        if name != "ours" and case.need:
            raise Refused("a part of the gradients is measured beside our own")
        self.name = name
        self.case = case
        self.seconds: dict[str, list] = {"forward": [], "backward": [], "forward_device": [], "backward_device": []}
        self.count: dict[str, int] = {}
        self.peak = 0
        self.on_device: dict[str, object] = {}  # of random problems: graphs of all copies
        self.copies = len(copies)
        self.graph = 10 if case.graph else 1
        if name != "ours" and name in CHECKED:
            fault = check(case, copies[0], name)
            if fault:
                raise Refused(f"wrong: {fault}")
        functions = [CONTENDERS[name](case, x) for x in copies]
        with torch.no_grad():
            functions[0]()
        if case.graph:  # forward, and forward and backward together
            self._in_graphs(functions[0], copies[0])
            return
        self.forward = [self._without_gradient(f) for f in functions]
        self.backward = [] if case.forward_only else [self._backward(f, x) for f, x in zip(functions, copies)]
        if self.backward:
            self.backward[0]()
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.backward[0]()
            self.peak = torch.cuda.max_memory_allocated() - held
        # Not PyTorch's memory-efficient kernel with dropout: a captured backward whose forward ran before makes an illegal access,
        # with a mask and without, in PyTorch alone, too, and the process has lost its device.
        if case.group == "random" and not (name == "mem-efficient" and case.dropout):
            try:
                self._on_device(copies)
            except Exception as error:  # a peer that cannot be captured is timed as it is called
                self.on_device = {}
                if name == "ours":
                    raise
                print(f"  {name} under a CUDA graph: {reason_of(error)}", flush=True)

    def _in_graphs(self, function, x: Inputs) -> None:
        def both():
            return torch.autograd.grad(function(), list(x.leaves.values()), x.grad_out, allow_unused=True)

        self.forward, self.backward = ([graphed([call], self.graph, torch.cuda.Stream())] for call in (self._without_gradient(function), both))

    def _on_device(self, copies: list[Inputs]) -> None:
        """What the device takes when nobody waits for the host: a backward is captured where its forward ran, by leaves that no
        other stream has seen. Autograd keeps a leaf's stream as long as some graph has the leaf, and waits for it: where that
        was the default stream, the first capture of a process failed, whoever computed."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            mine = [with_leaves_of_its_own(x) for x in copies]
            functions = [CONTENDERS[self.name](self.case, x) for x in mine]
            backward = [self._backward(f, x) for f, x in zip(functions, mine)]
        self.kept = (mine, functions, backward)  # whose memory the graphs have the addresses of: results, masks, ...
        self.on_device["forward_device"] = graphed([self._without_gradient(f) for f in functions], 1, stream)
        self.on_device["backward_device"] = graphed(backward, 1, stream)

    @staticmethod
    def _without_gradient(function):
        def run():
            with torch.no_grad():
                return function()

        return run

    def _backward(self, function, x):
        out = function()
        leaves = list(x.leaves.values())
        return lambda: torch.autograd.grad(out, leaves, x.grad_out, retain_graph=True, allow_unused=True)

    def measure(self, seconds: float) -> None:
        for way, calls in (("forward", self.forward), ("backward", self.backward)):
            if not calls:
                continue
            if way not in self.count:
                timed(calls, 1)
                self.count[way] = max(2, min(400, int(seconds / max(timed(calls, 1), 1e-6))))
            self.seconds[way].append(timed(calls, self.count[way]) / self.graph)
        for way, graph in self.on_device.items():
            if way not in self.count:
                self.count[way] = max(2, min(100, int(seconds / max(timed([graph], 1), 1e-6))))
            self.seconds[way].append(timed([graph], self.count[way]) / self.copies)

    def measured(self, seconds: float) -> dict[str, float]:
        """Of one more measurement: the seconds by direction."""
        self.measure(seconds)
        return {way: found[-1] for way, found in self.seconds.items() if found}

    def far_behind(self, others: list[Runner]) -> bool:
        """More than twice the best's time both ways: measured once, it is no peer here."""
        ways = [way for way in self.seconds if self.seconds[way]]
        return all(self.median(way) > 2 * min(other.median(way) for other in others if other.seconds[way]) for way in ways)

    def median(self, way: str) -> float | None:
        return statistics.median(self.seconds[way]) if self.seconds[way] else None


def runners_of(case: Case, names: list[str], copies: list[Inputs], results: dict) -> list[Runner]:
    """Those that can do the case; into `results` why the others cannot."""
    runners = []
    for name in sorted(names, key=lambda name: name == "mem-efficient"):  # it last: see is_outrun
        if is_outrun(name, case, runners):
            results[name] = {"refused": "not measured: cuDNN computes this row"}
            continue
        try:
            runners.append(Runner(name, case, copies))
        except Exception as error:  # a peer may refuse in any way it likes; what it says is kept
            if name == "ours":
                raise
            results[name] = {"refused": reason_of(error)}
    return runners


def reason_of(error: Exception) -> str:
    """A line of it: the last, but the first of a CUDA error, which goes on with advice."""
    lines = str(error).strip().splitlines() or ["?"]
    line = lines[0 if lines[0].startswith("CUDA error") else -1]
    return (line if isinstance(error, Refused) else f"{type(error).__name__}: {line}")[:200]


def is_outrun(name: str, case: Case, runners: list[Runner]) -> bool:
    """The memory-efficient kernel takes three times cuDNN's time and more, but for short sequences, masks, few queries: the
    dense table shows it."""
    taken = any(runner.name == "cuDNN" for runner in runners) and case.group != "dense"
    return name == "mem-efficient" and taken and min(case.sq, case.rows_k) >= 256 and not case.mask and not case.graph


def copies_of_inputs(case: Case) -> list[Inputs]:
    """As many as outgrow the L2 cache."""
    first = make_inputs(case)
    copies = [first]
    while len(copies) < 8 and len(copies) * first.bytes() < L2_BYTES and not case.graph:
        copies.append(make_inputs(case, first))
    return copies


def measure_beside(case: Case, other: beside.Library, seconds: float) -> dict[str, dict]:
    """Our times beside those of another build of fovea; results are not checked."""
    copies = copies_of_inputs(case)
    ours = Runner("ours", case, copies)
    with other.called():
        theirs = Runner("ours", case, copies)

    def measured_by_other() -> dict[str, float]:
        with other.called():
            return theirs.measured(seconds)

    return beside.compare(lambda: ours.measured(seconds), measured_by_other)


def measure(case: Case, names: list[str], seconds: float, known: dict) -> dict:
    copies = copies_of_inputs(case)
    first = copies[0]
    row: dict = {"name": case.name, "group": case.group, "beside": case.beside, "target": case.target,
                 "target_of": case.target_of, "unit": case.unit}  # fmt: skip
    row["fault"] = known[case.name] if case.name in known else check(case, first)
    row["flops"] = [case.flops(False), case.flops(True)]
    row["bytes"] = case.bytes_read_and_written()
    if case.group == "random":
        row["line"] = case.lines()[-1]
    row["results"] = {}
    runners = runners_of(case, names, copies, row["results"])
    for turn in range(RUNS):
        for runner in runners[turn % len(runners) :] + runners[: turn % len(runners)]:
            if turn == 0 or runner.name == "ours" or not runner.far_behind(runners):
                runner.measure(seconds)
    for runner in runners:
        row["results"][runner.name] = {
            "forward_us": round((runner.median("forward") or 0) * 1e6, 2),
            "backward_us": round((runner.median("backward") or 0) * 1e6, 2),
            "peak_mib": round(runner.peak / 2**20, 1),
            **{f"{way}_range_us": [round(1e6 * end(seconds), 2) for end in (min, max)]
               for way, seconds in runner.seconds.items() if seconds},
            **{f"{way}_us": round(runner.median(way) * 1e6, 2) for way in runner.on_device},
        }
    return row


# ---- what is shown ----


def rate(row: dict, name: str, way: int, device: bool = False) -> float | None:
    """TFLOP/s; with `device` under a CUDA graph, where the contender could be captured."""
    result = row["results"].get(name, {})
    field = ("forward", "backward")[way]
    time_us = (device and result.get(f"{field}_device_us")) or result.get(f"{field}_us")
    return row["flops"][way] / time_us / 1e6 if time_us else None


def line(row: dict, names: list[str]) -> str:
    cells = [f"{row['name']:36}"]
    for name in names:
        result = row["results"].get(name)
        if result is None or "refused" in result:
            cells.append(f"{'-':>13}")
        elif row["group"] == "small" or row["unit"] == "ms":
            scale = 1 if row["group"] == "small" else 1e3
            cells.append(f"{result['forward_us'] / scale:6.3g}/{result['backward_us'] / scale:6.3g}")
        elif row["unit"] == "GB/s":
            cells.append(f"{row['bytes'] / result['forward_us'] / 1e3:8.0f} GB/s")
        else:
            forward, backward = rate(row, name, 0), rate(row, name, 1)
            cells.append(f"{forward or 0:6.0f}/{backward or 0:6.0f}")
    peak = row["results"]["ours"]["peak_mib"]
    return " ".join(cells) + f" {peak:7.0f} MiB" + (f"  WRONG: {row['fault']}" if row["fault"] else "")


def copy_rate() -> float:
    """GB/s of a copy on the device, bytes read and written."""
    source = torch.empty(2**31, device=DEVICE, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    return round(2 * source.numel() / min(timed([lambda: target.copy_(source)], 5) for _ in range(3)) / 1e9)


def matmul_rate(n: int = 8192) -> float:
    """TFLOP/s of a bf16 matrix product."""
    a, b = (torch.randn(n, n, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return round(2 * n**3 / min(timed([lambda: a @ b], 10) for _ in range(3)) / 1e12)


def machine(given: str) -> dict:
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "copy_gb_per_s": copy_rate(),
        "matmul_tflops": matmul_rate(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "fovea": fovea.__version__,
        **records.when(given),
    }


def shard(text: str) -> tuple[int, int]:
    """argparse's type of I/N."""
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r}; accepted: I/N with 0 <= I < N, such as 0/4")
    return int(index), int(count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", action="append", default=[], help="only rows whose name contains one of these")
    parser.add_argument("--group", action="append", default=[], help="dense, features, subsets, small, random, patterns")
    parser.add_argument("--quick", action="store_true", help="a row of each kind")
    parser.add_argument("--all", action="store_true", help="FlexAttention and FlashAttention-4 too: seconds of compilation a row")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", choices=tuple(CONTENDERS),
                        help="contenders besides ours; some of: %(choices)s")  # fmt: skip
    parser.add_argument("--beside", type=Path, metavar="OLD.so",
                        help="measure this build alternately with another build's libfovea.so, and nothing else: prints the "
                        f"other's time over ours; rows under {beside.LOW} are repeated in {beside.AGAIN} more turns. Python, "
                        "inputs and addresses are the same; results are not checked")  # fmt: skip
    parser.add_argument("--each", type=float, default=0.03, help="seconds of one timing (0.03)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop before the next row then")
    parser.add_argument("--random", type=int, default=10**6, help="how many of the random problems")
    parser.add_argument("--shard", default=(0, 1), type=shard, metavar="I/N", help="every N-th of the rows, from the I-th on (0 is the first)")
    parser.add_argument("--after", default="", help="leave out the rows up to this one")
    parser.add_argument("--commit", default="", help="of the code, where there is no git to ask")
    parser.add_argument("--json", type=Path, help="write the rows there; rows of earlier runs that were not measured stay")
    parser.add_argument("--lines", action="store_true", help="print the rows' problems (for fovea precompile) and end")
    parser.add_argument("--check", type=Path, help="check only, and write there what was found: time can be taken later by")
    parser.add_argument("--checked", type=Path, action="append", default=[], help="a file that --check wrote: those are not checked again")
    parser.add_argument("--warm", action="store_true", help="run everything once without timing it: peers keep what they compile")
    options = parser.parse_args()
    chosen = [
        case
        for case in all_cases()
        if (not options.filter or any(part in case.name for part in options.filter))
        and (not options.group or case.group in options.group)
        and (not options.quick or case.name in QUICK)
        and (case.group != "random" or int(case.name.split()[1]) < options.random)
    ]
    order = ("dense", "features", "subsets", "small", "patterns", "random")  # should time be up
    chosen.sort(key=lambda case: (order.index(case.group), case.name not in QUICK))
    index, count = options.shard
    chosen = chosen[index::count]
    if options.after:
        names = [case.name for case in chosen]
        if options.after not in names:
            parser.error(f"--after {options.after!r}: none of the rows that are chosen (--lines shows their problems)")
        chosen = chosen[names.index(options.after) + 1 :]
    if not chosen:
        parser.error("no row is of that name; there are: " + ", ".join(case.name for case in all_cases() if case.group != "random"))
    if options.beside and not options.beside.is_file():
        parser.error(f"--beside {options.beside}: no such file; accepted: the libfovea.so of another build")
    for name in ("check", "warm", "only", "all"):
        if options.beside and getattr(options, name):
            parser.error(f"--beside with --{name}: it measures fovea alone, and checks nothing")
    if options.lines:
        print("\n".join(line for case in chosen for line in case.lines()))
        return 0
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("bench/gpu: no CUDA device here")
        return 1
    warnings.filterwarnings("ignore")  # PyTorch's, of why a peer refuses
    started = time.monotonic()
    late = lambda: time.monotonic() - started > options.seconds  # noqa: E731
    resumed = lambda name: resume(name, options.seconds - (time.monotonic() - started))  # noqa: E731
    if options.check:
        return check_all(chosen, options.check, late)
    names = [n for n in CONTENDERS if options.all or n not in SLOW_TO_COMPILE]
    if options.only:
        names = [n for n in CONTENDERS if n == "ours" or n in options.only]
    if options.warm:
        return warm(chosen, names, late)
    known = {name: fault for path in options.checked if path.exists() for name, fault in json.loads(path.read_text()).items()}
    about = machine(options.commit)
    build = Path(os.environ.get("FOVEA_BUILD", ROOT / "build"))
    precompile(chosen, build)
    if options.beside:
        return run_beside(chosen, options, about, late, resumed)
    print(f"{about}\nTFLOP/s forward / backward (small: microseconds, forward / both); the peak is ours, of the backward")
    print(f"{'':36} " + " ".join(f"{n:>13}" for n in names))
    rows: list[dict] = []

    def one(case: Case) -> bool:
        rows.append({**measure(case, contenders_of(case, names), options.each, known), "commit": about["commit"], "date": about["date"]})
        print(line(rows[-1], names), flush=True)
        if options.json:
            save(options.json, about, rows)
        return not rows[-1]["fault"]

    failed = in_order(chosen, one, late, resumed)
    summary(rows, names)
    return 1 if failed else 0


def run_beside(cases: list[Case], options: argparse.Namespace, about: dict, late, resumed) -> int:
    """--beside"""
    precompile(cases, options.beside.parent)
    other = beside.Library(options.beside)
    found: dict = {}
    if options.json and options.json.exists():  # rows of earlier runs that were not measured stay
        found = json.loads(options.json.read_text())["rows"]
    print(f"{about}\ntime of {other.path} over ours: median of {beside.TURNS} turns (least to most); over 1: ours is faster")

    def one(case: Case) -> bool:
        found[case.name] = measure_beside(case, other, options.each)
        print(beside.line(case.name, found[case.name]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(beside.as_json(other.path, found, about), indent=1) + "\n")
        return True

    failed = in_order(cases, one, late, resumed)
    print("\n".join(beside.summary(found)))
    return 1 if failed else 0


def in_order(cases: list[Case], one, late, resumed) -> int:
    """`one` for each row until `late`; how many failed: raised, or gave False. After `PATIENCE` seconds of one row, or an
    error that the process does not survive, `resumed` goes on behind it."""
    failed = 0
    for n, case in enumerate(cases):
        if late():
            print(f"stopped after {n} of {len(cases)} rows: the time was up")
            break
        watch = threading.Timer(PATIENCE, resumed, [case.name])
        watch.daemon = True
        watch.start()
        try:
            failed += not one(case)
        except Exception as error:
            failed += 1
            print(f"{case.name:36} ours: {type(error).__name__}: {str(error)[:300]}", flush=True)
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                resumed(case.name)
        watch.cancel()
        torch.cuda.empty_cache()
    return failed


def resume(name: str, seconds: float) -> None:
    """After a fault that every later call of this process would see: a new process goes on behind that row."""
    print(f"{name:36} took its process with it", flush=True)
    os.execv(sys.executable, [sys.executable, *sys.argv, "--after", name, "--seconds", f"{seconds:.0f}"])


def contenders_of(case: Case, names: list[str]) -> list[str]:
    """Which contenders a case is measured with. Patterns and subsets are measured alone. Contenders that compile for seconds do
    not take part in random problems, and FlexAttention, the slowest of them, takes part only in rows marked `flex`."""
    if case.group in ("patterns", "subsets"):
        return ["ours"]
    left_out = SLOW_TO_COMPILE if case.group == "random" else () if case.flex else ("FlexAttention",)
    return [name for name in names if name not in left_out]


def check_all(cases: list[Case], path: Path, late) -> int:
    found: dict = {}
    for case in cases:
        if late():
            print(f"checked {len(found)} of {len(cases)} rows: the time was up")
            break
        try:
            found[case.name] = check(case, make_inputs(case))
        except Exception as error:
            found[case.name] = f"{type(error).__name__}: {str(error)[:300]}"
        if found[case.name]:
            print(f"{case.name}: {found[case.name]}", flush=True)
        path.write_text(json.dumps(found))
    print(f"{len(found)} rows checked, {sum(map(bool, found.values()))} wrong")
    return 1 if any(found.values()) else 0


def warm(cases: list[Case], names: list[str], late) -> int:
    for case in cases:
        if late():
            break
        results: dict = {}
        runners_of(case, [name for name in contenders_of(case, names) if name != "ours"], [make_inputs(case)], results)
        print(f"{case.name}: " + (", ".join(f"{name}: {r['refused']}" for name, r in results.items()) or "ready"), flush=True)
        torch.cuda.empty_cache()
    return 0


def save(path: Path, about: dict, rows: list[dict]) -> None:
    """After each row, so that nothing is lost when time is up; rows of earlier runs that were not measured stay."""
    order = {case.name: n for n, case in enumerate(all_cases())}
    known = [row for row in [*records.kept(path, rows, "name"), *rows] if row["name"] in order]
    data = {"machine": about, "runs": RUNS, "rows": sorted(known, key=lambda row: order[row["name"]])}
    records.write(path, data)


def best_peer(row: dict, way: int, device: bool) -> tuple[float, str] | None:
    """(TFLOP/s, the library)"""
    rates = [(rate(row, name, way, device) or 0, name) for name in row["results"] if name != "ours"]
    return max(rates) if any(r for r, _ in rates) else None


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[int(part * (len(values) - 1))]


def summary(rows: list[dict], names: list[str]) -> None:
    """Geometric means of the dense cells, by head dimension, beside each peer; the random problems' ratios."""
    mean = lambda values: math.exp(statistics.fmean(map(math.log, values)))  # noqa: E731
    for d in (64, 128, 256):
        cells = [row for row in rows if row["name"].startswith(f"dense d{d} ") and row["group"] == "dense"]
        for peer in (*names[1:], "the target"):
            ratios = []
            for way in (0, 1):
                factor = [1 / row["target"][way] if peer == "the target" else 1.0 for row in cells]
                other = "cuDNN" if peer == "the target" else peer
                pairs = [(rate(row, "ours", way), rate(row, other, way), f) for row, f in zip(cells, factor)]
                ratios.append([ours / theirs * f for ours, theirs, f in pairs if ours and theirs])
            if all(ratios):
                print(f"dense D={d} over {peer}: forward {mean(ratios[0]):.2f} (least {min(ratios[0]):.2f}), "
                      f"backward {mean(ratios[1]):.2f} (least {min(ratios[1]):.2f}), {len(ratios[0])} cells")  # fmt: skip
    drawn = [row for row in rows if row["group"] == "random"]
    for way, device in ((0, True), (1, True), (0, False), (1, False)):
        title = ("forward", "backward")[way] + (", on the device" if device else ", as called")
        ours = ("forward", "backward")[way] + ("_device_us" if device else "_us")
        timed_so = [row for row in drawn if row["results"]["ours"].get(ours)]
        beside = [(row, best_peer(row, way, device)) for row in timed_so]
        ratios = sorted((rate(row, "ours", way, device) / peer[0], row["line"], peer[1]) for row, peer in beside if peer)
        if ratios:
            values = [ratio for ratio, *_ in ratios]
            print(f"random, {title}: {len(values)} of {len(timed_so)} have a peer; over the best: median {statistics.median(values):.2f}, "
                  f"tenth percentile {percentile(values, 0.1):.2f}" + "; the worst:" * device)  # fmt: skip
            for ratio, problem, peer in ratios[: 10 * device]:
                print(f"  {ratio:.2f} of {peer}: {problem[:150]}")


if __name__ == "__main__":
    sys.exit(main())
