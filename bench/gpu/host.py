#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a GPU call costs the host: one call through the C ABI, with addresses that change every call; one through
fovea.torch beside PyTorch's scaled_dot_product_attention; kernels from the cache on disk to what can be launched; and
the compilation of the slowest kernels from nothing, on two cores.

The first, the third and the fourth are measured by bench_host (host.cpp) without Python's time. Problems are so small
that the device keeps up with the host. Numbers are recorded, never asserted.

examples:
  cmake --build build --target bench_host && bench/gpu/host.py
  bench/gpu/host.py --json bench/results/gpu_host.json     what docs/performance.md's table is made from
  bench/gpu/host.py --only compiles --find                 no GPU: which kernels of the case table compile longest
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools"), str(ROOT / "tests/gpu")]

import records  # noqa: E402
BUILD = Path(os.environ.get("FOVEA_BUILD", ROOT / "build"))

SMALL = "b=1 hq=8 sq=128 sk=128"
CALLS = {
    "forward, D=64": f"fwd {SMALL} d=64 bf16",
    "forward, D=128, causal": f"fwd {SMALL} d=128 bf16 causal lse",
    "forward, a bias 1,h,q,k": f"fwd {SMALL} d=64 bf16 bias=1,h,q,k:bf16 lse",
    "forward, packed, causal": "fwd b=4 hq=8 d=128 bf16 seqs_q=128x4 seqs_k=128x4 causal lse",
    "forward, fp32": f"fwd {SMALL} d=64 fp32",
    "backward, D=64": f"bwd {SMALL} d=64 bf16 need=q,k,v",
    "backward, D=128, causal": f"bwd {SMALL} d=128 bf16 causal need=q,k,v",
    "backward, D=256": f"bwd {SMALL} d=256 bf16 need=q,k,v",
    "backward, a bias 1,h,q,k and its gradient": f"bwd {SMALL} d=64 bf16 bias=1,h,q,k:bf16 need=q,k,v,bias",
    "backward, fp32": f"bwd {SMALL} d=64 fp32 need=q,k,v",
}
LONG = "b=4 hq=16 sq=2048 sk=2048"
LOADS = [  # the first is there for the library's own start
    f"fwd {LONG} d=64 bf16",
    f"fwd {LONG} d=128 bf16",
    f"fwd {LONG} d=128 bf16 causal",
    f"fwd {LONG} d=256 bf16",
    f"fwd {LONG} d=64 bf16 bias=1,h,q,k:bf16",
    f"fwd {LONG} d=64 bf16 dropout=0.1",
    f"fwd {LONG} d=64 fp32",
    f"bwd {LONG} d=64 bf16 need=q,k,v",
    f"bwd {LONG} d=128 bf16 causal need=q,k,v",
    f"bwd {LONG} d=64 bf16 bias=1,h,q,k:bf16 need=q,k,v,bias",
]
SLOWEST = 8  # kernels, which are compiled once more by themselves
RUNS = 3


def bench_host(program: Path, *arguments: str, lines: list[str], cores: int = 0, **environment: str) -> list[dict]:
    """What it prints, with `cores` on the first so many of this process's."""

    def confine() -> None:
        if cores:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])

    done = subprocess.run(
        [program, *arguments], input="\n".join(lines), stdout=subprocess.PIPE, text=True, check=True, preexec_fn=confine,
        env={**os.environ, **environment},
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def measure_calls(program: Path) -> list[dict]:
    runs = [bench_host(program, "calls", lines=list(CALLS.values())) for _ in range(RUNS)]
    rows = []
    for name, *of_runs in zip(CALLS, *runs):
        rows.append({"name": name, "launches": of_runs[0]["launches"],
                     "microseconds": statistics.median(run["microseconds"] for run in of_runs)})  # fmt: skip
        print(f"{name:48} {rows[-1]['launches']:3} launches {rows[-1]['microseconds']:8.1f} us", flush=True)
    return rows


def measure_loads(program: Path) -> list[dict]:
    """Each run is a process of its own; one before them fills the cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"FOVEA_CACHE_DIR": folder, "FOVEA_JIT": "jit"}
        bench_host(program, "loads", lines=LOADS, **environment)
        runs = [bench_host(program, "loads", lines=LOADS, **environment) for _ in range(RUNS)]
    rows = []
    for n, line in enumerate(LOADS):
        assert not any(run[n]["compiled"] for run in runs), line
        rows.append({"line": line, "kernels": runs[0][n]["kernels"],
                     "milliseconds": statistics.median(run[n]["milliseconds"] for run in runs)})  # fmt: skip
        print(f"{line:64} {rows[-1]['kernels']} kernels {rows[-1]['milliseconds']:7.2f} ms", flush=True)
    return rows


def slowest(found: list[dict]) -> list[dict]:
    return sorted(found, key=lambda kernel: -kernel["cpu_seconds"])[:SLOWEST]


def measure_compiles(program: Path, known: list[dict], find: bool) -> list[dict]:
    """The slowest of the case table, where they are to be found, else those that were it before; by themselves on two
    cores, with nothing compiled before."""
    if find or not known:
        import table

        backward = [re.sub(r" (values|skew)=\S+", "", problem.line()) for problem in map(table.on_device, table.rows())]
        forward = [re.sub(r" need=\S+| dlse\b", "", line.replace("bwd ", "fwd ", 1)) + " lse" for line in backward]
        lines = forward + backward
        found = bench_host(program, "compiles", str(os.cpu_count()), lines=lines)
        known = slowest(found)
        print(f"{len(found)} kernels of {sum(kernel['cpu_seconds'] for kernel in found):.0f} s")
    lines = list(dict.fromkeys(kernel["line"] for kernel in known))
    again = bench_host(program, "compiles", "1", *(kernel["kernel"] for kernel in known), lines=lines, cores=2)
    if len(again) < len(known):
        print(f"{len(known) - len(again)} of the kernels that were slowest are no more: --find")
    rows = slowest(again)
    for row in rows:
        name = row["kernel"].split("<")[0].rsplit("::")[-1]
        print(f"{name:24} {row['seconds']:6.2f} s, of its thread {row['cpu_seconds']:6.2f}: {row['line'][:110]}", flush=True)
    return rows


def measure_torch() -> list[dict]:
    """Forward, forward of leaves, backward. Each call has tensors of its own; contenders alternate."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    from fovea.torch import attention

    if not torch.cuda.is_available():
        sys.exit("bench/gpu/host.py: no CUDA device that PyTorch sees")
    copies = [[torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)] for _ in range(32)]
    leaves = [[x.detach().clone().requires_grad_() for x in some] for some in copies]
    grad_out = torch.randn_like(copies[0][0])
    contenders = {
        "fovea.torch.attention": (attention, None),
        "scaled_dot_product_attention, cuDNN": (sdpa, SDPBackend.CUDNN_ATTENTION),
        "scaled_dot_product_attention, FlashAttention-2": (sdpa, SDPBackend.FLASH_ATTENTION),
    }

    def took(calls: list) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls) * 1e6

    times: dict = {name: ([], [], []) for name in contenders}
    for turn in range(60):
        for name, (function, backend) in contenders.items():
            with sdpa_kernel(backend or SDPBackend.MATH):
                forward = took([lambda qkv=qkv: function(*qkv) for qkv in copies])
                outs: list = []
                tracked = took([lambda qkv=qkv: outs.append(function(*qkv)) for qkv in leaves])
                pairs = list(zip(outs, leaves))
                backward = took([lambda out=out, qkv=qkv: torch.autograd.grad(out, qkv, grad_out) for out, qkv in pairs])
            if turn >= 5:
                for column, value in zip(times[name], (forward, tracked, backward)):
                    column.append(value)
    rows = [{"name": name, "microseconds": [round(statistics.median(x), 1) for x in three]} for name, three in times.items()]
    for row in rows:
        print(f"{row['name']:48} " + " ".join(f"{x:8.1f}" for x in row["microseconds"]) + " us", flush=True)
    return rows


def machine() -> dict:
    about = {"cpu": records.processor(), "cores": len(os.sched_getaffinity(0)), "python": sys.version.split()[0]}
    try:
        import torch

        about["torch"] = torch.__version__
        about["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    except ImportError:
        pass
    return about


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=BUILD / "bench/gpu/bench_host")
    parser.add_argument("--only", action="append", choices=("calls", "loads", "compiles", "torch"), help="a part, or some")
    parser.add_argument("--find", action="store_true", help="seek the slowest kernels in the whole case table: many minutes of CPU")
    parser.add_argument("--commit", default="", help="of the code, where there is no git to ask")
    parser.add_argument("--json", type=Path, help="write the numbers there; parts that were not measured stay")
    options = parser.parse_args()
    if set(options.only or ("calls",)) != {"torch"} and not options.program.exists():
        parser.error(f"{options.program} is not there: cmake --build {BUILD} --target bench_host")
    if "FOVEA_NVRTC" not in os.environ:
        try:
            import table

            found = table.nvrtc()
        except ImportError:  # no PyTorch
            found = ""
        if found:
            os.environ["FOVEA_NVRTC"] = found
    data = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    known = data.get("compiles", {}).get("rows", [])
    measures = {
        "calls": lambda: measure_calls(options.program),
        "torch": measure_torch,
        "loads": lambda: measure_loads(options.program),
        "compiles": lambda: measure_compiles(options.program, known, options.find),
    }
    for part, measure in measures.items():
        if options.only and part not in options.only:
            continue
        data[part] = {
            "machine": machine(),
            **records.when(options.commit),
            "rows": measure(),
        }
        if options.json:
            records.write(options.json, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
