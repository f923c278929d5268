#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fovea's GPU speed beside its peers, in one run on one device.

Each case is checked first (sampled heads against fp64), then timed: forward and backward apart, medians of three runs
in which the contenders take turns, N(0, 1) inputs in as many copies as outgrow the L2 cache. FLOPs are those of allowed
(query, key) pairs. `refused` means that a contender has no kernel for the case. Numbers are recorded, never asserted.

examples:
  bench/gpu/run.py                                                  every row, PyTorch's contenders
  bench/gpu/run.py --filter dense --filter triangle                 some rows
  bench/gpu/run.py --quick --seconds 100                            a row of each kind, in the time that there is
  bench/gpu/run.py --all --json bench/results/gpu.json              with FlexAttention and what else is importable
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402

import fovea  # noqa: E402
from cases import QUICK, Case, all_cases  # noqa: E402
from contenders import CONTENDERS, SLOW_TO_COMPILE, Inputs, Refused, make_inputs  # noqa: E402

L2_BYTES = 3 * 60e6
RUNS = 3


# ---- check ----


def check(case: Case, x: Inputs) -> str:
    """Ours against fp64 on the first and the last head of the first and the last batch entry; "" if it is right."""
    out = CONTENDERS["ours"](case, x)()
    grads = [] if case.forward_only else torch.autograd.grad(out, x.leaves, x.grad_out)
    tolerance = 1e-4 if case.dtype == "fp32" else 3e-2
    worst = ""

    def compare(what, actual, right, least=1e-3):
        nonlocal worst
        error = (actual.double() - right).abs().max().item()
        if not error <= tolerance * (right.abs().max().item() + least):
            worst = worst or f"{what} off by {error:.3g} of {right.abs().max().item():.3g}"

    group = case.hq // case.heads_k
    starts = [sum(case.lengths[:n]) for n in range(len(case.lengths))]
    for b in {0, (len(case.lengths) or case.batch) - 1}:
        for h in {0, case.hq - 1}:
            if case.lengths:
                rows = slice(starts[b], starts[b] + case.lengths[b])
                at = lambda t, head: t.detach()[rows, head]  # noqa: B023, E731
            else:
                at = lambda t, head: t.detach()[b, head]  # noqa: B023, E731
            q = at(x.q, h).double().requires_grad_()
            k, v = (at(t, h // group).double().requires_grad_() for t in (x.k, x.v))
            s, allowed = scores(case, x, q, k, b, h)
            keep = 1.0
            if case.dropout:
                if b or h:  # the mask is made on the CPU, from the first head on
                    continue
                mask = fovea.dropout_mask(1, 1, *s.shape, case.dropout, seed=1)[0, 0]
                threshold = int(case.dropout * 65536 + 0.5)
                keep = torch.from_numpy(mask).cuda().double() * 65536 / (65536 - threshold)
            s = s.masked_fill(~allowed, -math.inf)
            if case.sink:
                p = torch.softmax(torch.cat([s, x.sink.detach()[h].double().expand(len(s), 1)], 1), 1)[:, :-1]
            else:
                p = torch.softmax(s, 1)
            right = (p * keep) @ v
            compare(f"out[{b}, {h}]", at(out, h), right)
            if grads:
                grad_q, grad_k, grad_v = torch.autograd.grad(right, (q, k, v), at(x.grad_out, h).double())
                compare(f"grad_q[{b}, {h}]", at(grads[0], h), grad_q)
                if group == 1:
                    compare(f"grad_k[{b}, {h}]", at(grads[1], h), grad_k)
                    compare(f"grad_v[{b}, {h}]", at(grads[2], h), grad_v)
    if grads and x.bias is not None and x.bias.requires_grad:
        right, size = bias_gradient(case, x)
        over = [d for d, n in ((0, x.bias.shape[2]), (1, x.bias.shape[3])) if n == 1]
        if over:
            right, size = right.sum(over, keepdim=True), size.sum(over, keepdim=True)
        compare("grad_bias", grads[3][-1, -1], right, 0.1 * size.max().item())
    return worst


def scores(case, x, q, k, b, h):
    s = q @ k.mT / math.sqrt(case.d)
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    for bias in (x.bias, x.bias2):
        if bias is not None:
            s = s + bias.detach()[b % bias.shape[0], h % bias.shape[1]].double()
    i = torch.arange(s.shape[0], device="cuda")[:, None] + s.shape[1] - s.shape[0]
    j = torch.arange(s.shape[1], device="cuda")
    if case.alibi:
        s = s - x.slopes[h].double() * (i - j).abs()
    allowed = torch.ones(s.shape, dtype=torch.bool, device="cuda")
    if case.causal:
        allowed &= j <= i
    if case.window[0] >= 0:
        allowed &= j >= i - case.window[0]
    if case.window[1] >= 0:
        allowed &= j <= i + case.window[1]
    if x.mask is not None:
        allowed &= x.mask[b, 0]
    return s, allowed


def bias_gradient(case, x):
    """Of the last plane, summed over what it was broadcast over, and the sum of its terms' sizes: a bias without keys
    has a gradient of 0, to which large terms add up."""
    total = size = 0
    for b in range(case.batch) if not case.bias[0] else [case.batch - 1]:
        for h in range(case.hq) if not case.bias[1] else [case.hq - 1]:
            one = lambda t: t.detach()[b, h].double()  # noqa: B023, E731
            s, allowed = scores(case, x, one(x.q), one(x.k), b, h)
            p = torch.softmax(s.masked_fill(~allowed, -math.inf), 1)
            dp = one(x.grad_out) @ one(x.v).mT
            ds = p * (dp - (p * dp).sum(1, keepdim=True))
            total, size = total + ds, size + ds.abs()
    return total, size


# ---- kernels ----


def precompile(cases: list[Case]) -> None:
    """Ours, on all cores, by the command where it is built; otherwise each is compiled when it is first needed."""
    command = Path(os.environ.get("FOVEA_BUILD", ROOT / "build")) / "cli" / "fovea"
    if not command.exists():
        return
    started = time.monotonic()
    environment = dict(os.environ)
    if "FOVEA_NVRTC" not in environment:  # the one that comes with PyTorch: the command does not look there
        found = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*"))
        if found:
            environment["FOVEA_NVRTC"] = str(found[-1])
    lines = "\n".join(case.line() for case in cases)
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


def graphed(call) -> object:
    """Ten of a call in one CUDA graph, on the stream that the call was warmed up on: autograd remembers streams."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(10):
            call()
    return graph.replay


class Runner:
    """A contender on a case: one function forward and one backward for each copy of the inputs."""

    def __init__(self, name: str, case: Case, copies: list[Inputs]) -> None:
        self.name = name
        self.case = case
        self.seconds: dict[str, list] = {"forward": [], "backward": []}
        self.count: dict[str, int] = {}
        self.peak = 0
        self.graph = 10 if case.graph else 1
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

    def _in_graphs(self, function, x: Inputs) -> None:
        def both():
            return torch.autograd.grad(function(), x.leaves, x.grad_out)

        self.forward = [graphed(self._without_gradient(function))]
        self.backward = [graphed(both)]

    @staticmethod
    def _without_gradient(function):
        def run():
            with torch.no_grad():
                return function()

        return run

    def _backward(self, function, x):
        out = function()
        return lambda: torch.autograd.grad(out, x.leaves, x.grad_out, retain_graph=True)

    def measure(self, seconds: float) -> None:
        for way, calls in (("forward", self.forward), ("backward", self.backward)):
            if not calls:
                continue
            if way not in self.count:
                timed(calls, 1)
                self.count[way] = max(2, min(400, int(seconds / max(timed(calls, 1), 1e-6))))
            self.seconds[way].append(timed(calls, self.count[way]) / self.graph)

    def median(self, way: str) -> float | None:
        return statistics.median(self.seconds[way]) if self.seconds[way] else None


def measure(case: Case, names: list[str], seconds: float) -> dict:
    first = make_inputs(case)
    copies = [first]
    while len(copies) < 8 and len(copies) * first.bytes() < L2_BYTES and not case.graph:
        copies.append(make_inputs(case, first))
    row: dict = {"name": case.name, "group": case.group, "beside": case.beside, "fault": check(case, first)}
    row["flops"] = [case.flops(False), case.flops(True)]
    row["bytes"] = case.bytes_read_and_written()
    row["results"] = {}
    runners = []
    for name in names:
        try:
            runners.append(Runner(name, case, copies))
        except Exception as error:  # a peer may refuse in any way it likes; what it says is kept
            if name == "ours":
                raise
            why = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            row["results"][name] = {"refused": why.strip().splitlines()[-1][:200] if why.strip() else "?"}
    for turn in range(RUNS):
        for runner in runners[turn:] + runners[:turn]:
            runner.measure(seconds)
    for runner in runners:
        row["results"][runner.name] = {
            "forward_us": round((runner.median("forward") or 0) * 1e6, 2),
            "backward_us": round((runner.median("backward") or 0) * 1e6, 2),
            "peak_mib": round(runner.peak / 2**20, 1),
        }
    return row


# ---- what is shown ----


def rate(row: dict, name: str, way: int) -> float | None:
    result = row["results"].get(name, {})
    time_us = result.get(("forward_us", "backward_us")[way])
    return row["flops"][way] / time_us / 1e6 if time_us else None


def line(row: dict, names: list[str]) -> str:
    cells = [f"{row['name']:36}"]
    for name in names:
        result = row["results"].get(name)
        if result is None or "refused" in result:
            cells.append(f"{'-':>13}")
        elif row["group"] == "small":
            cells.append(f"{result['forward_us']:6.1f}/{result['backward_us']:6.1f}")
        else:
            forward, backward = rate(row, name, 0), rate(row, name, 1)
            cells.append(f"{forward or 0:6.0f}/{backward or 0:6.0f}")
    peak = row["results"]["ours"]["peak_mib"]
    return " ".join(cells) + f" {peak:7.0f} MiB" + (f"  WRONG: {row['fault']}" if row["fault"] else "")


def machine(given: str) -> dict:
    properties = torch.cuda.get_device_properties(0)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "fovea": fovea.__version__,
        "commit": given or commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", action="append", default=[], help="only rows whose name contains one of these")
    parser.add_argument("--group", action="append", default=[], help="dense, features, patterns, small")
    parser.add_argument("--quick", action="store_true", help="a row of each kind")
    parser.add_argument("--all", action="store_true", help="FlexAttention and FlashAttention-4 too: seconds of compilation a row")
    parser.add_argument("--only", action="append", default=[], help="contenders besides ours")
    parser.add_argument("--each", type=float, default=0.03, help="seconds of one timing (0.03)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop before the next row then")
    parser.add_argument("--commit", default="", help="of the code, where there is no git to ask")
    parser.add_argument("--json", type=Path, help="write the rows there; rows of earlier runs that were not measured stay")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench/gpu: no CUDA device here")
        return 1
    chosen = [
        case
        for case in all_cases()
        if (not options.filter or any(part in case.name for part in options.filter))
        and (not options.group or case.group in options.group)
        and (not options.quick or case.name in QUICK)
    ]
    order = {"features": 0, "small": 1, "dense": 2, "patterns": 3}  # should time be up
    chosen.sort(key=lambda case: (order[case.group], case.name not in QUICK))
    if not chosen:
        parser.error("no row is of that name; there are: " + ", ".join(case.name for case in all_cases()))
    warnings.filterwarnings("ignore")  # PyTorch's, of why a peer refuses
    names = [n for n in CONTENDERS if options.all or n not in SLOW_TO_COMPILE]
    if options.only:
        names = ["ours", *(n for n in CONTENDERS if n in options.only)]
    about = machine(options.commit)
    print(f"{about}\nTFLOP/s forward / backward (small: microseconds, forward / both); the peak is ours, of the backward")
    print(f"{'':36} " + " ".join(f"{n:>13}" for n in names))
    started, rows, failed = time.monotonic(), [], 0
    precompile(chosen)
    for case in chosen:
        if time.monotonic() - started > options.seconds:
            print(f"stopped after {len(rows)} of {len(chosen)} rows: the time was up")
            break
        try:
            contenders = ["ours"] if case.group == "patterns" and not options.only else names
            rows.append({**measure(case, contenders, options.each), "commit": about["commit"], "date": about["date"]})
            print(line(rows[-1], names), flush=True)
            failed += bool(rows[-1]["fault"])
        except Exception as error:
            failed += 1
            print(f"{case.name:36} ours: {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()
        if options.json and rows:
            save(options.json, about, rows)
    summary(rows)
    return 1 if failed else 0


def save(path: Path, about: dict, rows: list[dict]) -> None:
    """After each row, so that nothing is lost when time is up; rows of earlier runs that were not measured stay."""
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    order = {case.name: n for n, case in enumerate(all_cases())}
    merged = {row["name"]: row for row in [*before, *rows] if row["name"] in order}
    data = {"machine": about, "runs": RUNS, "rows": sorted(merged.values(), key=lambda row: order[row["name"]])}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def summary(rows: list[dict]) -> None:
    """Geometric means of the dense cells, by head dimension, beside each peer."""
    for d in (64, 128, 256):
        cells = [row for row in rows if row["name"].startswith(f"dense d{d} ") and row["group"] == "dense"]
        for peer in ("mem-efficient", "FlashAttention-2", "cuDNN"):
            ratios = [
                [rate(row, "ours", way) / rate(row, peer, way) for row in cells if rate(row, peer, way) and rate(row, "ours", way)]
                for way in (0, 1)
            ]
            if all(ratios):
                means = [math.exp(statistics.fmean(map(math.log, r))) for r in ratios]
                print(f"dense D={d} over {peer}: forward {means[0]:.2f} (least {min(ratios[0]):.2f}), "
                      f"backward {means[1]:.2f} (least {min(ratios[1]):.2f}), {len(ratios[0])} cells")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
