#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of the README and the documents: between `<!-- table: NAME -->` and `<!-- end -->`.

Support comes from the library itself (explain), speed from the committed files in bench/results. With --check
nothing is written, and a table that would change is an error.
"""

import argparse
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]

# Each row adds one feature to a plain problem, in each of the ways that '|' separates; all of them together are the
# last row.
FEATURES = [
    ("plain", "", ""),
    ("causal, both alignments", "causal | causal align=tl", ""),
    ("sliding window", "window=16,4 | window=16,4 align=tl", ""),
    ("additive bias, **its gradient**", "bias=1,h,q,k", "bias"),
    ("a second bias, broadcast otherwise, its gradient", "bias=1,h,q,k bias2=b,1,1,k", "bias,bias2"),
    ("bool mask", "mask=b,1,1,k", ""),
    ("dropout, both rules", "dropout=0.1 | dropout=0.1 rng=torch_mem_efficient", ""),
    ("ALiBi", "alibi=h", ""),
    ("softcap", "softcap=30", ""),
    ("sinks, **their gradient**", "sink", "sink"),
    ("gradient of logsumexp", "", "dlse"),
    ("GQA, MQA", "hk=2 | hk=1", ""),
    ("Dv ≠ D", "dv=48", ""),
    ("variable length", "packed", ""),
    ("deterministic", "det", ""),
    ("all of them at once", "hk=1 dv=48 packed causal align=tl window=16,4 bias=1,h,q,k bias2=b,1,1,k mask=b,1,1,k dropout=0.1 "
     "rng=torch_mem_efficient alibi=h softcap=30 sink det", "bias,bias2,sink dlse"),
]
TYPES = ["fp32", "fp16", "bf16", "fp64"]


def problem_line(direction, type_, options, extra):
    words = options.split()
    packed = "packed" in words
    words = [word for word in words if word != "packed"]
    heads_k = "" if any(word.startswith("hk=") for word in words) else "hk=4"
    sizes = "seqs_q=33,64 seqs_k=64,70" if packed else "sq=64 sk=70"
    line = [direction, "b=2", "hq=4", heads_k, sizes, "d=64", type_, *words]
    if direction == "bwd":
        needs, dlse = [], []
        for word in extra.split():
            (dlse if word == "dlse" else needs).append(word)
        line += [",".join(["need=q,k,v", *needs]), *dlse]
    return " ".join(word for word in line if word)


def support():
    sys.path.insert(0, str(ROOT / "python"))
    import fovea

    def served(direction, type_, options, extra):
        lines = [problem_line(direction, type_, one, extra) for one in options.split("|")]
        return all(re.search(r"^cpu: serves: ", fovea.explain(line), re.M) for line in lines)

    rows = ["| on the CPU | " + " | ".join(f"{type_} forward / backward" for type_ in TYPES) + " |", "| --- " * (len(TYPES) + 1) + "|"]
    for name, options, extra in FEATURES:
        cells = []
        for type_ in TYPES:
            answers = [served(direction, type_, options, extra) for direction in ("fwd", "bwd")]
            cells.append(" / ".join("yes" if answer else "**no**" for answer in answers))
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


def cpu():
    path = ROOT / "bench/results/cpu.json"
    data = json.loads(path.read_text())
    machine = data["machine"]
    rows = [
        f"{machine['cpu']}, {machine['threads']} threads, {machine['isa']}; fp32, GFLOP/s of allowed pairs, and as a share of the best "
        f"{data['matmul']['n']}³ matrix product of the same run ({data['matmul']['best']['name']}: {data['matmul']['best']['gflops']:.0f}). "
        f"Medians of {data['rounds']} interleaved rounds on a shared machine, {data['date']}, commit {data['commit']}; "
        "repeat with `make bench`.",
        "",
        "| problem | forward | share | backward | share |",
        "| --- | --- | --- | --- | --- |",
    ]
    best = data["matmul"]["best"]["gflops"]
    for row in data["rows"]:
        forward, backward = row["forward"], row["backward"]
        rows.append(f"| {row['name']} | {forward:.0f} | {forward / best:.2f} | {backward:.0f} | {backward / best:.2f} |")
    return rows


def torch_host():
    data = json.loads((ROOT / "bench/results/torch_host.json").read_text())
    machine = data["machine"]
    rows = [
        f"Microseconds of one call on float32 tensors of {data['shape']}; one thread, {machine['cpu']}, Python {machine['python']}, "
        f"PyTorch {machine['torch']}. The least of {data['rounds']} interleaved batches of {data['calls']} calls on a shared machine, "
        f"{data['date']}, commit {data['commit']}; repeat with `bench/torch/host_time.py`.",
        "",
        "| | no gradient wanted | gradient wanted | and the backward |",
        "| --- | --- | --- | --- |",
    ]
    for row in data["rows"]:
        cells = ("" if x is None else f"{x:.0f}" for x in row["microseconds"])
        rows.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return rows


TABLES = {"support": support, "cpu": cpu, "torch_host": torch_host}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table would change")
    arguments = parser.parse_args()
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()

        def replace(match):
            return f"<!-- table: {match[1]} -->\n" + "\n".join(TABLES[match[1]]()) + "\n<!-- end -->"

        new = re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end -->", replace, text, flags=re.S)
        if new != text:
            stale.append(name)
            if not arguments.check:
                path.write_text(new)
    for name in stale:
        print(f"{name}: " + ("stale; run tools/tables.py" if arguments.check else "rewritten"))
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
