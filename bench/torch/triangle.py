#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Triangle attention on a GPU: cuequivariance_torch.triangle_attention as NVIDIA's package computes it, as fovea computes it through
the stand-in, and PyTorch's scaled_dot_product_attention with four dimensions, its bias expanded. bf16 with a bias in float32, and
in bf16 as under autocast, and its gradient, B=1, H=4, D=32. Milliseconds (medians, taken in turns) and the memory that a backward
allocates.

examples:
  bench/torch/triangle.py                        N=384 and 768, without a mask of keys and with two kinds
  bench/torch/triangle.py --json bench/results/triangle.json
  bench/torch/triangle.py --device cpu --sizes 16      whether it runs at all
"""

import argparse
import importlib.metadata
import itertools
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))

import torch  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

import fovea.integrations  # noqa: E402
import records  # noqa: E402

H, D = 4, 32
CALLS = 10
MASKS = ("none", "random", "padding")


def sdpa(q, k, v, bias, mask):
    """As programs without such a package write it: the bias repeated for every row of pairs, the mask added to it."""
    added = bias if mask is None else bias.masked_fill(~mask, -1e9)
    shape = (q.shape[1], H, q.shape[3], q.shape[3])
    return scaled_dot_product_attention(q[0], k[0], v[0], attn_mask=added[0].to(q.dtype).expand(shape))[None]


def functions():
    """By name, and the version of cuEquivariance. The package's own function first, as the stand-in takes its place."""
    found, version = {}, None
    try:
        import cuequivariance_torch
        from cuequivariance_ops_torch import triangle_attention as _kernels  # noqa: F401  (the package imports without them)

        theirs, version = cuequivariance_torch.triangle_attention, importlib.metadata.version("cuequivariance-torch")
        found["cuEquivariance"] = lambda q, k, v, bias, mask: theirs(q, k, v, bias, mask)
    except ImportError as error:
        print(f"cuEquivariance: {error}")
    fovea.integrations.install("triangle")
    from cuequivariance_torch import triangle_attention

    found["fovea"] = lambda q, k, v, bias, mask: triangle_attention(q, k, v, bias, mask)
    found["sdpa"] = sdpa
    return found, version


def clock(function, cuda):
    """Milliseconds of a call, and what the last one returned. On a GPU there are several calls in a row, as in a program that does not
    wait for each: where the host is faster than the GPU, its time does not count."""
    if not cuda:
        begin = time.perf_counter()
        result = function()
        return (time.perf_counter() - begin) * 1e3, result
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(CALLS):
        result = function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS, result


def mask_of(kind, n):
    """(1, N, 1, 1, N): none, a random tenth of the keys of each row hidden, or the last tenth of all rows, as padding is."""
    if kind == "none":
        return None
    keys = torch.arange(n) < n * 9 // 10 if kind == "padding" else torch.rand(1, n, 1, 1, n) < 0.9
    return keys.expand(1, n, 1, 1, n).contiguous()


def measure(n, masked, bias_type, contenders, options):
    torch.manual_seed(n)
    cuda = options.device == "cuda"
    dtype = torch.bfloat16 if cuda else torch.float32
    q, k, v, grad_out = (torch.randn(1, n, H, n, D).to(options.device, dtype) for _ in range(4))
    bias = torch.randn(1, 1, H, n, n).to(options.device, getattr(torch, bias_type))
    mask = mask_of(masked, n)
    mask = None if mask is None else mask.to(options.device)
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    rows, exact = {}, None
    for name, function in contenders.items():
        rows[name] = row = {"n": n, "mask": masked, "bias": bias_type, "name": name}
        try:
            for _ in range(3):
                out = function(*leaves, mask)
                if cuda:
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                grads = torch.autograd.grad(out, leaves, grad_out)
            row["backward_mib"] = round((torch.cuda.max_memory_allocated() - before) / 2**20) if cuda else None
            found = [out, *grads]
            exact = exact or [x.float() for x in found]
            row["difference"] = f"{max(((x.float() - y).norm() / y.norm()).item() for x, y in zip(found, exact)):.1e}"
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:160]}"
    times = {name: ([], []) for name, row in rows.items() if "error" not in row}
    for _ in range(options.runs):
        for name, (forward, backward) in times.items():
            spent, out = clock(lambda: contenders[name](*leaves, mask), cuda)  # noqa: B023
            forward.append(spent)
            backward.append(clock(lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True), cuda)[0])  # noqa: B023
    for name, (forward, backward) in times.items():
        rows[name].update(forward_ms=round(statistics.median(forward), 3), backward_ms=round(statistics.median(backward), 3))
    for row in rows.values():
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    return list(rows.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[384, 768])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--runs", type=int, default=15, help="of each (15)")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args()
    contenders, version = functions()
    rows = [
        row for n, masked, bias_type in itertools.product(options.sizes, MASKS, ("float32", "bfloat16"))
        for row in measure(n, masked, bias_type, contenders, options)
    ]  # fmt: skip
    seen = fovea.integrations.stats().get("triangle", {})
    print(f"calls of the stand-in that fovea computed: {seen.get('served', 0)}")
    if options.json:
        records.write(options.json, {
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "torch": torch.__version__,
            "cuequivariance": version, **records.when(), "rows": rows})  # fmt: skip
    return any(row["name"] == "fovea" and "error" in row for row in rows) or not seen.get("served")


if __name__ == "__main__":
    sys.exit(main())
