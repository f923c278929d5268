#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fovea's CPU speed beside the best matrix product that this machine's libraries reach, in one run.

The rounds are interleaved: each measures every yardstick (oneDNN, and OpenBLAS under every core type that runs
here) and every case once; what is reported are medians over the rounds. A case is checked before it is timed.
FLOPs are those of allowed (query, key) pairs: 4 D per pair forward, 10 D backward. Numbers are recorded, never
asserted: the machine may be shared.

examples:
  bench/cpu/run.py                                  everything, a table
  bench/cpu/run.py --filter bias --rounds 5         some rows, more rounds
  bench/cpu/run.py --json bench/results/cpu.json    what the README's table is made from
  bench/cpu/run.py --beside dist/libfovea.so        this build's speed over another's, alternately, one thread
"""

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]
import ml_dtypes  # noqa: E402
import records  # noqa: E402

import fovea  # noqa: E402
from fovea import _api, _library, _problem  # noqa: E402

CORE_TYPES = ["", "HASWELL", "ZEN", "SKYLAKEX", "COOPERLAKE", "SAPPHIRERAPIDS"]


class Case:
    """One row: N(0, 1) inputs in as many copies as it takes to outgrow the last-level cache."""

    def __init__(self, name, *, heads=8, seqlen=2048, dim=64, threads=0, bias=False, dtype=np.float32, **options):
        self.name, self.threads, self.options, self.bias = name, threads, options, bias
        rng = np.random.default_rng(0)
        self.shape = (1, seqlen, heads, dim)
        self.copies = max(1, int(128e6 // (4 * np.prod(self.shape) * np.dtype(dtype).itemsize)))
        self.copies = min(self.copies, 8)
        self.q, self.k, self.v, self.grad_out = (
            [rng.standard_normal(self.shape, dtype=np.float32).astype(dtype) for _ in range(self.copies)] for _ in range(4))
        self.tensors = {}
        if bias:
            self.tensors["bias"] = rng.standard_normal((1, heads, seqlen, seqlen), dtype=np.float32)
        self.turn = 0
        pairs = seqlen * (seqlen + 1) / 2 if options.get("causal") else seqlen * seqlen
        self.flops = 4.0 * pairs * heads * dim
        self.out, self.lse = [None] * self.copies, [None] * self.copies

    def forward(self):
        n = self.turn = (self.turn + 1) % self.copies
        self.out[n], self.lse[n] = fovea.attention(self.q[n], self.k[n], self.v[n], return_lse=True, **self.tensors, **self.options)

    def backward(self):
        n = self.turn
        return fovea.attention_backward(self.grad_out[n], self.q[n], self.k[n], self.v[n], self.out[n], self.lse[n],
                                        **self.tensors, **self.options)

    def check(self):
        """A few rows of the first head in fp64; gradients through those rows' queries."""
        self.turn = self.copies - 1
        self.forward()
        grads = self.backward()
        _, seqlen, _, dim = self.shape
        q, k, v, do = (a[0][0, :, 0].astype(np.float64) for a in (self.q, self.k, self.v, self.grad_out))
        p_drop = self.options.get("dropout_p", 0)
        keep = np.ones((seqlen, seqlen))
        if p_drop:
            keep = fovea.dropout_mask(1, 1, seqlen, seqlen, p_drop, seed=self.options["seed"])[0, 0] / (1 - round(p_drop * 65536) / 65536)
        for i in (0, seqlen // 2, seqlen - 1):
            s = k @ q[i] / np.sqrt(dim)
            if self.bias:
                s += self.tensors["bias"][0, 0, i]
            if self.options.get("causal"):
                s[i + 1:] = -np.inf
            p = np.exp(s - s.max())
            p /= p.sum()
            o, dp = (p * keep[i]) @ v, (v @ do[i]) * keep[i]
            dq = (p * (dp - do[i] @ o)) @ k / np.sqrt(dim)
            tolerance = 2e-5 if self.q[0].dtype == np.float32 else 2e-2
            np.testing.assert_allclose(self.out[0][0, i, 0].astype(np.float64), o, atol=tolerance)
            np.testing.assert_allclose(grads.q[0, i, 0].astype(np.float64), dq, atol=tolerance * 4)

    def measure(self, seconds, threads=None, clock=time.perf_counter):
        """Best seconds of one forward and of one backward within this round."""
        fovea.set_num_threads(self.threads if threads is None else threads)
        best = [float("inf"), float("inf")]
        end = time.perf_counter() + seconds
        while True:
            for which, call in enumerate((self.forward, self.backward)):
                start = clock()
                call()
                best[which] = min(best[which], clock() - start)
            if time.perf_counter() > end:
                fovea.set_num_threads(0)
                return best


def cases():
    for dim in (128, 64):
        yield Case(f"S=2048 D={dim}", dim=dim)
        yield Case(f"S=2048 D={dim}, one thread", dim=dim, threads=1)
        yield Case(f"S=2048 D={dim} causal", dim=dim, causal=True)
        yield Case(f"S=2048 D={dim}, bias and its gradient", dim=dim, bias=True)
    yield Case("S=333 D=80, 64 heads", heads=64, seqlen=333, dim=80)
    yield Case("S=2048 D=64, dropout 0.1", dropout_p=0.1, seed=1)
    yield Case("S=16384 D=64, one head", heads=1, seqlen=16384)
    yield Case("S=2048 D=64, fp64", dtype=np.float64)
    yield Case("S=2048 D=64, fp16", dtype=np.float16)


def cases_beside():
    """Rows of one thread for --beside: every type, head dimensions with and without a rest."""
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64):
        for dim in (64, 128):
            yield Case(f"S=1024 D={dim}, {np.dtype(dtype).name}", heads=4, seqlen=1024, dim=dim, dtype=dtype)
    yield Case("S=1024 D=80, float32", heads=4, seqlen=1024, dim=80)
    yield Case("S=1024 D=64 causal", heads=4, seqlen=1024, causal=True)
    yield Case("S=1024 D=64, bias and its gradient", heads=4, seqlen=1024, bias=True)
    yield Case("S=1024 D=64, dropout 0.1", heads=4, seqlen=1024, dropout_p=0.1, seed=1)


@contextlib.contextmanager
def called(library):
    """Inside of it the package calls this library."""
    modules, own = (_api, _library, _problem), _library.lib
    try:
        for module in modules:
            module.lib = library
        yield
    finally:
        for module in modules:
            module.lib = own


def beside(path, chosen, rounds, seconds):
    """The other library's time over ours, alternately, in the time of this one thread's processor: what else runs on the
    machine counts less. Over 1, ours is faster."""
    other = _library._load(path, older=True)
    names = ("forward", "backward")
    print(f"{path}: its time over that of {_library.path}, medians of {rounds} turns (least to most)")
    rows = []
    for case in chosen:
        with called(other):
            case.check()
        case.check()
        ratios = {name: [] for name in names}
        for turn in range(rounds):
            times = {}
            for library in (other, _library.lib) if turn % 2 else (_library.lib, other):
                with called(library):
                    times[library] = case.measure(seconds, threads=1, clock=time.thread_time)
            for which, name in enumerate(names):
                ratios[name].append(times[other][which] / times[_library.lib][which])
        rows.append({"name": case.name, **ratios})
        print(f"{case.name:42}" + "  ".join(
            f"{name} {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})" for name, values in ratios.items()),
            flush=True)  # fmt: skip
    return rows


def matmul(build, name, core_type, n, seconds):
    binary = build / f"bench/cpu/matmul_{name}"
    if not binary.exists():
        return None
    environment = dict(os.environ, **({"OPENBLAS_CORETYPE": core_type} if core_type else {}))
    done = subprocess.run([binary, str(n), str(seconds)], env=environment, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else None  # a core type that this machine cannot run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="build directory")
    parser.add_argument("--filter", default="", help="only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (3)")
    parser.add_argument("--seconds", type=float, default=1.5, help="per case and round (1.5)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--beside", type=Path, metavar="LIBRARY", help="compare with another build's libfovea.so instead")
    arguments = parser.parse_args()

    all_cases = cases_beside if arguments.beside else cases
    chosen = [case for case in all_cases() if arguments.filter in case.name]
    if not chosen:
        parser.error(f"no case contains '{arguments.filter}'; there are: " + ", ".join(case.name for case in all_cases()))
    if arguments.beside:
        rows = beside(arguments.beside, chosen, arguments.rounds, arguments.seconds)
        if arguments.json:
            records.write(arguments.json, {"beside": str(arguments.beside), "rows": rows})
        return
    size = 2048
    yardsticks = [("onednn", ""), *(("openblas", core_type) for core_type in CORE_TYPES)]
    rates, times = {}, {case.name: [] for case in chosen}
    for case in chosen:
        case.check()
    for number in range(arguments.rounds):
        for name, core_type in yardsticks:
            rate = matmul(arguments.build, name, core_type, size, 0.5)
            if rate is not None:
                rates.setdefault(f"{name} {core_type}".strip(), []).append(rate)
        for case in chosen:
            if sys.stderr.isatty():
                print(f"\rround {number + 1}/{arguments.rounds}: {case.name:40}", end="", file=sys.stderr, flush=True)
            times[case.name].append(case.measure(arguments.seconds))

    products = {name: statistics.median(values) for name, values in rates.items()}
    if not products:
        sys.exit("no matrix product to compare with: run `make bench`, which installs OpenBLAS and oneDNN and builds them")
    best = max(products, key=products.get)
    flops = {case.name: case.flops for case in chosen}
    rows = [{"name": name,
             "forward": statistics.median(flops[name] / f * 1e-9 for f, _ in values),
             "backward": statistics.median(2.5 * flops[name] / b * 1e-9 for _, b in values)} for name, values in times.items()]
    isa = re.search(r"avx512|avx2|sse4|portable|neon", fovea.explain("fwd sq=64 sk=64 d=64"))[0]
    result = {**records.when(), "rounds": arguments.rounds,
              "machine": {"cpu": records.processor(), "threads": fovea.num_threads(), "isa": isa},
              "matmul": {"n": size, "all": products, "best": {"name": best, "gflops": products[best]}}, "rows": rows}
    for name, rate in products.items():
        print(f"{name:42}{rate:8.0f}")
    print(f"\n{'GFLOP/s':42}{'forward':>8}{'share':>7}{'backward':>10}{'share':>7}")
    for row in rows:
        print(f"{row['name']:42}{row['forward']:8.0f}{row['forward'] / products[best]:7.2f}{row['backward']:10.0f}"
              f"{row['backward'] / products[best]:7.2f}")
    if arguments.json:
        records.write(arguments.json, result)


if __name__ == "__main__":
    main()
