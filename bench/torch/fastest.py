#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the table by which fovea.torch.enable(prefer="fastest") hands calls back: scaled_dot_product_attention
computed by fovea beside PyTorch's own, for each kind of call, type and size. Both times include the way through
enable(), so that they are what a program sees. With --write it puts a section for this device into
python/fovea/torch/fastest.json; the other sections stay.

The two are measured alternately; what is reported is the least batch, since whatever else runs only ever adds. On the CPU
each has one thread, as both divide their work over threads, and on a shared machine threads mostly wait for one another.
There is a section for each instruction set: with --isa avx2 both libraries are told to take no newer one. Some only multiply bf16
otherwise than an older one; these sections have bf16 alone, and the older one's section has the other types. On Intel's processors
a section is for these alone ("cpu avx2 intel").

examples:
  bench/torch/fastest.py                                    the table of this machine's CPU, printed
  bench/torch/fastest.py --isa avx512 --isa avx2 --isa sse4 --isa portable --write
  bench/torch/fastest.py --isa avx512_bf16 --write          bf16 alone: a processor that has its products, AMD since Zen 4
  bench/torch/fastest.py --dtype float16                    how far fp16 is from bf16, whose rows are used for it
  bench/torch/fastest.py --kind plain --dtype float32       a part of the table
  bench/torch/fastest.py --device cuda --write              under 3 minutes, most of them for compiling kernels
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import records  # noqa: E402

TABLE = ROOT / "python/fovea/torch/fastest.json"
KINDS = ("plain", "causal", "mask of keys", "mask", "bias", "learned bias", "dropout", "other rank")
# batch, heads, queries, keys, head dimension
SIZES = {
    "cpu": [(1, 2, 16, 16, 64), (2, 8, 128, 128, 64), (1, 8, 512, 512, 64), (1, 2, 2048, 2048, 64), (4, 8, 1, 1024, 64),
            (32, 4, 49, 49, 32), (1, 4, 512, 512, 128), (1, 2, 8, 8, 16), (4, 8, 64, 64, 64), (8, 8, 1, 512, 64),
            (2, 8, 1024, 77, 40), (1, 4, 256, 256, 256)],
    "cuda": [(2, 8, 128, 128, 64), (8, 16, 512, 512, 64), (4, 16, 4096, 4096, 64), (16, 32, 1, 4096, 64),
             (512, 4, 49, 49, 64), (8, 16, 512, 512, 128), (2, 16, 8192, 8192, 128)],
}  # fmt: skip
SSE4 = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_CBWR": "COMPATIBLE"}  # on AMD's processors MKL heeds this alone
# What makes the other libraries of this process keep to an instruction set.
WITHIN = {
    "amx": {},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3"},  # no AMX
    "neon_bf16": {},
    "neon": {},
    "avx512": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "sse4": SSE4,
    "portable": SSE4,
}
LONGEST_ROW = 2.0  # seconds, after which two rounds are enough
LARGEST_MASK = 2**29  # elements: the larger ones do not fit


def rows_of(device, dtypes, kinds):
    for dtype in dtypes:
        for size in SIZES[device]:
            for kind in kinds:
                if device == "cuda" and dtype == "float32" and size[4] == 128:
                    continue
                for backward in (True,) if kind == "learned bias" else (False, True):
                    if not (backward and size[2] == 1):  # one query: decoding
                        yield kind, dtype, backward, size


def problem(torch, kind, dtype, backward, size, device):
    """A function that makes one call, with its backward if one is wanted."""
    batch, heads, sq, sk, d = size
    make = lambda n: torch.randn(batch, heads, n, d, device=device, dtype=dtype, requires_grad=backward)  # noqa: E731
    q, k, v = make(sq), make(sk), make(sk)
    options = {}
    if kind == "causal":
        options["is_causal"] = True
    elif kind == "mask of keys":
        options["attn_mask"] = torch.rand(batch, 1, 1, sk, device=device) < 0.8
    elif kind == "mask":
        options["attn_mask"] = torch.rand(1, 1, sq, sk, device=device) < 0.8
    elif kind in ("bias", "learned bias", "other rank"):
        bias = torch.randn(1, heads, sq, sk, device=device, dtype=dtype, requires_grad=kind == "learned bias" or backward)
        options["attn_mask"] = bias.detach() if kind == "bias" else bias
    if kind == "dropout":
        options["dropout_p"] = 0.1
    if kind == "other rank":  # as protein models have it: the bias is one for all of the second dimension
        q, k, v = (x.detach().unsqueeze(0).requires_grad_(backward) for x in (q, k, v))
        options["attn_mask"] = options["attn_mask"].detach().unsqueeze(0).requires_grad_(backward)
    leaves = [x for x in (q, k, v, options.get("attn_mask")) if x is not None and x.requires_grad]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    weights = torch.randn_like(q[..., :1]).expand(*q.shape[:-1], d) if backward else None

    def call():
        out = sdpa(q, k, v, **options)
        if backward:
            torch.autograd.grad(out, leaves, weights)

    return call


def seconds(call, calls, synchronize):
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize()
    return (time.perf_counter() - start) / calls


def measure(device, rounds, batch_seconds, dtypes, kinds):
    sys.path[:0] = [str(ROOT / "python")]
    import torch

    import fovea.torch
    from fovea.torch import _enable_state, _fastest

    if device == "cpu":
        torch.set_num_threads(1)
        fovea.set_num_threads(1)
    turn = {"pytorch": False}
    _fastest.slower = lambda *arguments: turn["pytorch"]
    fovea.torch.enable()
    decided = {False: {}, True: {}}  # decisions are kept by kind of call; here they alternate

    def by(pytorch):
        turn["pytorch"] = pytorch
        _enable_state.state.decisions = decided[pytorch]

    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    used = next((name for name, in_use in _fastest.instruction_sets().items() if in_use), "unknown")
    bf16_alone = device == "cpu" and used in _fastest.FOR_BF16
    amx = device == "cpu" and "amx" in _fastest.instruction_sets()  # which PyTorch takes for bf16: that is the section amx
    table = ("bfloat16",) if bf16_alone else ("float32",) if amx and used == "avx512" else ("float32", "bfloat16")
    todo = list(rows_of(device, dtypes or table, kinds or KINDS))
    rows = []
    begin = time.monotonic()
    for number, (kind, dtype, backward, size) in enumerate(todo):
        batch, heads, sq, sk, d = size
        if kind in ("bias", "learned bias", "other rank") and heads * sq * sk > LARGEST_MASK:
            continue
        call = problem(torch, kind, getattr(torch, dtype), backward, size, device)
        least = {}
        calls = {}
        for pytorch in (False, True):
            by(pytorch)
            call()  # kernels are compiled, buffers are there
            took = min(seconds(call, 1, synchronize) for _ in range(2))
            calls[pytorch] = max(1, min(200, round(batch_seconds / max(took, 1e-6))))
            least[pytorch] = took
        end = time.monotonic() + LONGEST_ROW
        for number_of_round in range(rounds):
            if number_of_round > 1 and time.monotonic() > end:
                break
            for pytorch in (False, True):
                by(pytorch)
                least[pytorch] = min(least[pytorch], seconds(call, calls[pytorch], synchronize))
        ours, theirs = least[False] * 1e6, least[True] * 1e6
        rows.append({"kind": kind, "dtype": dtype, "backward": backward, "batch": batch, "heads": heads, "sq": sq, "sk": sk,
                     "d": d, "fovea_us": round(ours, 1), "pytorch_us": round(theirs, 1)})  # fmt: skip
        print(f"{number + 1:4}/{len(todo)} {time.monotonic() - begin:5.0f} s  {kind:13}{dtype:9}"
              f"{'backward' if backward else 'forward':9}{'x'.join(map(str, size)):18}"
              f"{ours:11.1f}{theirs:11.1f} us  {ours / theirs:5.2f}", file=sys.stderr, flush=True)  # fmt: skip
    counts = fovea.torch.stats()
    assert counts["served"] and counts["handed_back"], "one of the two computed nothing"
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    machine = torch.cuda.get_device_name() if device == "cuda" else f"{records.processor()}, one thread"
    name = f"cpu {used}" if bf16_alone else _fastest.section_of(where)
    if device == "cpu" and not bf16_alone and _fastest.vendor() == "intel":
        name += " intel"
    return name, {
        "machine": machine, "pytorch": torch.__version__, "fovea": fovea.__version__, **records.when(),
        "rows": rows,
    }  # fmt: skip


def write(sections, path):
    """A row on each line, so that differences can be read."""
    parts = []
    for name in sorted(sections):
        section = dict(sections[name])
        rows = ",\n".join(f"      {json.dumps(row)}" for row in section.pop("rows"))
        head = "".join(f"      {json.dumps(key)}: {json.dumps(value)},\n" for key, value in section.items())
        parts.append(f'    {json.dumps(name)}: {{\n{head}      "rows": [\n{rows}\n      ]\n    }}')
    path.write_text('{\n  "sections": {\n' + ",\n".join(parts) + "\n  }\n}\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--isa", action="append", choices=list(WITHIN), help="on the CPU; may be given several times")
    parser.add_argument("--dtype", action="append", choices=["float32", "float16", "bfloat16"], help="these alone")
    parser.add_argument("--kind", action="append", choices=KINDS, help="these kinds of calls alone")
    parser.add_argument("--write", action="store_true", help=f"into {TABLE.relative_to(ROOT)}")
    parser.add_argument("--output", type=Path, help="into this file instead")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--batch-ms", type=float, default=3, help="how long a batch of calls takes, about")
    options = parser.parse_args()
    if options.write and (options.dtype or options.kind):
        parser.error("--write with --dtype or --kind: a section of the table is measured as a whole")
    if "FOVEA_BUILD" in os.environ:
        os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))
    if options.isa:  # each in a process of its own: an instruction set is chosen once
        for isa in options.isa:
            again = [a for a in sys.argv[1:] if a != "--isa" and a not in WITHIN and not a.startswith("--isa=")]
            subprocess.run([sys.executable, __file__, *again], check=True,
                           env={**os.environ, **WITHIN[isa], "FOVEA_CPU_ISA": isa})  # fmt: skip
        return
    name, section = measure(options.device, options.rounds, options.batch_ms / 1e3, options.dtype, options.kind)
    slower = sum(row["fovea_us"] > row["pytorch_us"] for row in section["rows"])
    print(f"{name}: {len(section['rows'])} rows; PyTorch is faster in {slower}")
    path = options.output or (TABLE if options.write else None)
    if path:
        sections = json.loads(path.read_text())["sections"] if path.exists() else {}
        sections[name] = section
        write(sections, path)
        print(f"{path}: {', '.join(sorted(sections))}")


if __name__ == "__main__":
    main()
