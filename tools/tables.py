#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of the README and the documents: between `<!-- table: NAME -->` and `<!-- end -->`.

Support comes from the library itself (explain), speed from the committed files in bench/results. With --check
nothing is written, and a table that would change is an error.
"""

import argparse
import itertools
import json
import math
import os
import re
import statistics
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]

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

    def supported(direction, type_, options, extra):
        lines = [problem_line(direction, type_, one, extra) for one in options.split("|")]
        return all(re.search(r"^cpu: used: ", fovea.explain(line), re.M) for line in lines)

    rows = ["| on the CPU | " + " | ".join(f"{type_} forward / backward" for type_ in TYPES) + " |", "| --- " * (len(TYPES) + 1) + "|"]
    for name, options, extra in FEATURES:
        cells = []
        for type_ in TYPES:
            answers = [supported(direction, type_, options, extra) for direction in ("fwd", "bwd")]
            cells.append(" / ".join("yes" if answer else "**no**" for answer in answers))
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return rows


CPU_SHORT = ("S=2048 D=128", "S=2048 D=128 causal", "S=2048 D=64", "S=2048 D=64, bias and its gradient", "S=2048 D=64, fp16")  # of the README


def cpu(short=False):
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
        if short and row["name"] not in CPU_SHORT:
            continue
        shares = ["" if "one thread" in row["name"] else f"{row[which] / best:.2f}" for which in ("forward", "backward")]  # of as many threads
        rows.append(f"| {row['name']} | {row['forward']:.0f} | {shares[0]} | {row['backward']:.0f} | {shares[1]} |")
    return rows


N_MATMUL = 2048  # of bench/cpu/pytorch.py
CPU_PEERS_SHORT = ("S=2048 D=128", "S=2048 D=128 causal", "S=2048 D=64", "S=2048 D=128, bf16", "S=1024 D=64, bias and its gradient",
                   "S=1024 D=64, dropout 0.1", "one query, 65536 keys, D=128", "one query, 65536 keys, D=128, bf16")  # fmt: skip


def cpu_peers(name="cpu_pytorch", short=False):
    """fovea's speed, PyTorch's and their ratio; a pair of columns for each instruction set."""
    data = json.loads((ROOT / f"bench/results/{name}.json").read_text())
    sets = [one["isa"] for one in data["instruction_sets"]]
    threads = "one thread, processor time" if data["threads"] == 1 else f"{data['threads']} threads"
    in_bf16 = lambda one: f" (bf16: {one['matmul_bf16']:.0f})" if "matmul_bf16" in one else ""  # noqa: E731
    products = ", ".join(f"{one['matmul']:.0f}{in_bf16(one)} with {one['isa']}" for one in data["instruction_sets"])
    rows = [
        f"{data['cpu']}, {threads}; PyTorch {data['instruction_sets'][0]['torch']} in the same process, within the same instruction set. "
        f"fovea / PyTorch in GFLOP/s of allowed pairs, and fovea's speed as a multiple of PyTorch's; PyTorch's {N_MATMUL}³ matrix product alone, in fp32: "
        f"{products}. Medians of {data['rounds']} alternating calls on a machine busy with other work, {data['date']}, "
        f"commit {data['commit']}; repeat with `bench/cpu/pytorch.py{''.join(f' --isa {isa}' for isa in sets)} --rounds {data['rounds']}"
        f"{' --threads ' + str(data['threads']) if data['threads'] > 1 else ''}`.",
        "",
        "| problem | " + " | ".join(f"{isa} {which}" for isa in sets for which in ("forward", "backward")) + " |",
        "| --- |" + " --- |" * 2 * len(sets),
    ]
    found = {(row["isa"], row["name"]): row for row in data["rows"]}
    for problem in dict.fromkeys(row["name"] for row in data["rows"]):
        if short and problem not in CPU_PEERS_SHORT:
            continue
        cells = []
        for isa in sets:
            for which in ("forward", "backward"):
                speeds = found.get((isa, problem), {}).get(which)
                cells.append("" if speeds is None else "{:.{n}f} / {:.{n}f} = {:.2f}".format(
                    *speeds, speeds[0] / speeds[1], n=0 if min(speeds) >= 20 else 1))  # fmt: skip
        rows.append(f"| {problem} | " + " | ".join(cells) + " |")
    for problem in dict.fromkeys(row["name"] for row in data["rows"] if "of_product" in row):
        if short and problem not in CPU_PEERS_SHORT:
            continue
        shares = [found.get((isa, problem), {}).get("of_product", {}).get(which) for isa in sets for which in ("forward", "backward")]
        rows.append(f"| {problem}, of the matrix product in turns | " + " | ".join("" if x is None else f"{x:.2f}" for x in shares) + " |")
    return rows


def torch_host(name="torch_host", arguments=""):
    data = json.loads((ROOT / f"bench/results/{name}.json").read_text())
    machine = data["machine"]
    rows = [
        f"Microseconds of one call on {data['type']} tensors of {data['shape']}; one thread, {machine['cpu']}, Python {machine['python']}, "
        f"PyTorch {machine['torch']}. The least of {data['rounds']} interleaved batches of {data['calls']} calls on a shared machine, "
        f"{data['date']}, commit {data['commit']}; repeat with `bench/torch/host_time.py{arguments}`.",
        "",
        "| | no gradient wanted | gradient wanted | and the backward |",
        "| --- | --- | --- | --- |",
    ]
    for row in data["rows"]:
        cells = ("" if x is None else f"{x:.0f}" for x in row["microseconds"])
        rows.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    return rows


def torch_steps():
    data = json.loads((ROOT / "bench/results/torch_steps.json").read_text())
    names = {"llama": "Llama, 16/4 heads, D=128", "bert": "BERT-base, half of the rows padded, dropout 0.1", "vit": "ViT-B"}
    rows = [
        f"A training step (bf16, forward and backward, no optimizer), PyTorch and `enable()` in turns; {data['device']}, PyTorch {data['torch']}, "
        f"transformers {data['transformers']}, {data['date']}, commit {data['commit']}; repeat with `bench/torch/steps.py`.",
        "",
        "| model | PyTorch, ms | with `enable()` | ratio | calls computed by fovea |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in data["rows"]:
        length = f"{row['length']} x {row['length']} pixels" if row["model"] == "vit" else f"S={row['length']}"
        calls = f"{row['served']} of {row['served'] + sum(row['handed_back'].values()) // row['steps']}"
        rows.append(f"| {names[row['model']]}, {row['layers']} layers, B={row['batch']}, {length} | {row['pytorch_ms']:.1f} | {row['fovea_ms']:.1f} | "
                    f"{row['ratio']:.3f} | {calls} |")  # fmt: skip
    return rows


MODELS = {
    "mistral": "Mistral, window 1024, D=128, 16/4 heads", "gpt_oss": "GPT-OSS, sinks, window 128 in every other layer, D=64, 32/4 heads",
    "gpt_oss_few": "GPT-OSS, the same, with two small experts", "gemma2": "Gemma 2, softcap, window 1024 in every other layer, D=256, 8/4 heads",
    "t5": "T5-base, encoder and decoder, learned bias, dropout 0.1", "bert": "BERT-base, half of the rows padded, dropout 0.1",
    "llama": "Llama, D=128, 16/4 heads", "vit": "ViT-B",
}  # fmt: skip


def result(name):
    path = ROOT / f"bench/results/{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def measured(data, rows, name=None):
    """When and at which commits: rows that were measured again later have a date and a commit of their own. Where there are
    several commits, each with what `name` calls its rows."""
    names = {}  # by day and commit, in their order and each once
    for row in rows:
        day, commit = row.get("date", data.get("date")), row.get("commit", data.get("commit"))
        names.setdefault(day, {}).setdefault(commit, {})[name(row) if name else ""] = None
    several = sum(map(len, names.values())) > 1 and name

    def of_day(commits):
        texts = [commit + (f" ({', '.join(commits[commit])})" if several else "") for commit in sorted(commits)]
        return f"commit{'s' * (len(texts) > 1)} {' and '.join(filter(None, (', '.join(texts[:-1]), texts[-1])))}"

    return "; ".join(f"{day}, {of_day(names[day])}" for day in sorted(names))


def models(short=False):
    data = result("models")
    short_title = lambda row: MODELS[row["model"]].partition(",")[0]  # noqa: E731
    rows = [
        "A training step of models of transformers (bf16, forward and backward, no optimizer), by `attn_implementation`: median and most memory; "
        f"{data['device']}, PyTorch {data['torch']}, transformers {data['transformers']}, {measured(data, data['rows'], short_title)}; repeat with "
        "`bench/torch/models.py --size large`.",
        "",
        "| model | eager | sdpa | fovea | times the speed of eager | of sdpa |" + ("" if short else " GPU busy, ms: eager / sdpa / fovea |"),
        "| --- | --- | --- | --- | --- | --- |" + ("" if short else " --- |"),
    ]
    for (name, title), mode in itertools.product(MODELS.items(), (None, "default", "reduce-overhead")):
        by = {row["implementation"]: row for row in data["rows"] if (row["model"], row.get("compiled")) == (name, mode)}
        if "fovea" not in by:
            continue
        ours = by["fovea"]
        memory = lambda row: f", {row['GiB']:.1f} GiB" if row["GiB"] else ""  # noqa: E731
        cell = lambda row: "refused" if "ms" not in row else f"{row['ms']:.1f} ms{memory(row)}"  # noqa: B023, E731
        times = lambda row: f"{row['ms'] / ours['ms']:.2f}" if "ms" in row else ""  # noqa: B023, E731
        length = {"vit": f"{ours['length']} x {ours['length']} pixels", "t5": f"S={ours['length']} and {ours['length'] // 4}"}.get(name, f"S={ours['length']}")
        title += {None: "", "default": ", by `torch.compile`"}.get(mode, f", by `torch.compile`, {mode}")
        line = (f"| {title}, {ours['layers']} layers, B={ours['batch']}, {length} | {cell(by['eager'])} | {cell(by['sdpa'])} | **{cell(ours)}** | "
                f"{times(by['eager'])} | {times(by['sdpa'])} |")  # fmt: skip
        if not short:
            busy = [by[which].get("busy_ms") for which in ("eager", "sdpa", "fovea")]
            line += " " + (" / ".join(f"{x:.1f}" if x else "–" for x in busy) if any(busy) else "") + " |"
        rows.append(line)
    return rows


def jax():
    data = result("jax")
    ratios = [row["theirs"] / row["ours"] for row in data["rows"]]
    names = {"plain": "plain", "causal": "causal", "bias": "a bias, its gradient"}
    lengths = sorted({row["s"] for row in data["rows"]})
    rows = [
        f"`fovea.jax` beside `jax.nn.dot_product_attention(implementation=\"cudnn\")`: bfloat16, {data['tokens']:,} tokens, {data['heads']} heads, ms (cuDNN / fovea: "
        f"times its speed). {data['device']}, JAX {data['jax']}, {measured(data, data['rows'])}; repeat with `bench/gpu/jax_peers.py`. {len(ratios)} rows: "
        f"{min(ratios):.2f} to {max(ratios):.2f}, geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}. The host's time for a small "
        f"jitted call: {data['host_us']['theirs']:.0f} us, fovea {data['host_us']['ours']:.0f} us.",
        "",
        "| | D | | " + " | ".join(f"S={s}" for s in lengths) + " |",
        "| --- | --- | --- |" + " --- |" * len(lengths),
    ]
    for kind in names:
        for d in sorted({row["d"] for row in data["rows"]}):
            for training in (True, False):
                cells = []
                for s in lengths:
                    row = next((r for r in data["rows"] if (r["kind"], r["d"], r["training"], r["s"]) == (kind, d, training, s)), None)
                    cells.append(f"{row['theirs']:.2f} / {row['ours']:.2f}: **{row['theirs'] / row['ours']:.2f}**" if row else "")
                rows.append(f"| {names[kind]} | {d} | {'forward and backward' if training else 'forward'} | " + " | ".join(cells) + " |")
    return rows


def triangle():
    data = result("triangle")
    rows = [
        "`triangle_attention` of (1, N, 4, N, 32) in bf16, a bias of (1, 1, 4, N, N) with its gradient, and a mask of keys: `random` hides a tenth of each row's, `padding` the last tenth of all rows'; forward / backward in ms, in brackets the MiB that "
        f"the backward allocates. {data['device']}, PyTorch {data['torch']}, cuEquivariance {data['cuequivariance']}, {measured(data, data['rows'])}; repeat with "
        "`bench/torch/triangle.py`.",
        "",
        "| N | mask of keys | bias | SDPA, the bias expanded | cuEquivariance | fovea in its place | times the speed of cuEquivariance, forward and backward |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    kind = lambda row: (row["n"], row["mask"], row["bias"])  # noqa: E731
    for n, mask, bias in dict.fromkeys(map(kind, data["rows"])):
        by = {row["name"]: row for row in data["rows"] if kind(row) == (n, mask, bias)}
        cells, both = [], {}
        for name in ("sdpa", "cuEquivariance", "fovea"):
            row = by.get(name, {})
            if "forward_ms" in row:
                both[name] = row["forward_ms"] + row["backward_ms"]
                cells.append(f"{row['forward_ms']:.2f} / {row['backward_ms']:.2f} [{row['backward_mib']}]")
            else:
                cells.append("–")
        ratio = f"{both['cuEquivariance'] / both['fovea']:.2f}" if "cuEquivariance" in both and "fovea" in both else ""
        rows.append(f"| {n} | {mask} | {bias} | {cells[0]} | {cells[1]} | **{cells[2]}** | {ratio} |")
    return rows


def several_gpus(name="several_gpus", peers=("PyTorch cuDNN", "PyTorch FlashAttention-2")):
    data = result(name)
    machine, gpus = data["machine"], data["machine"]["gpus"]
    ways = ("keys", "heads", "ring")
    beside = " PyTorch's context_parallel is compared with fovea on one GPU, too." if peers else ""
    rows = [
        f"T(1) / ({gpus} T({gpus})), forward and backward together, bf16, D = 128: 1.0 is perfect. **Bold** is what `context_parallel` chooses.{beside} "
        f"{gpus} {machine['gpu']}, PyTorch {machine['torch']}, NCCL {machine['nccl']}, medians of {data['rows'][0]['turns']} turns, "
        f"{measured(data, data['rows'])}; repeat with `bench/torch/several_gpus.py`.",
        "",
        f"| problem | one GPU, ms | {' | '.join([*ways, *(name.replace(' ', ', ', 1) for name in peers)])} |",
        "| " + " | ".join(["---"] * (2 + len(ways) + len(peers))) + " |",
    ]
    for row in data["rows"]:
        found, whole = row["results"], "{:.1f} / {:.1f}".format(*row["one_ms"])
        if "DTensor" in found:
            rows.append(f"| {row['name']}, 4 heads, D = 32 | {whole} | DTensor **{found['DTensor']['efficiency']:.3f}**{' | –' * (len(ways) + len(peers) - 1)} |")
            continue
        cells = [f"{found[name]['efficiency']:.3f}" if "efficiency" in found.get(name, {}) else "–" for name in (*ways, *peers)]
        at = ways.index(row["chosen"])
        cells[at] = f"**{cells[at]}**"
        turns = "" if row["turns"] == data["rows"][0]["turns"] else f" ({row['turns']} turn{'s' * (row['turns'] > 1)})"
        rows.append(f"| {row['name']}{turns} | {whole} | {' | '.join(cells)} |")
    return rows


def first_step():
    data = result("first_step")
    rows = [
        f"Milliseconds of the first training step of a Llama with 8 layers (B={data['batch']}, S={data['length']}), each in a process of its own, and of the second; {data['device']}, "
        f"PyTorch {data['torch']}, {data['date']}, commit {data['commit']}; repeat with `bench/torch/first_step.py`.",
        "",
        "| | first step | second step |",
        "| --- | --- | --- |",
    ]
    listed = lambda values: ", ".join(f"{value:,.0f}" for value in values)  # noqa: E731
    return rows + [f"| {row['kind']} | {listed(row['first_ms'])} | {listed(row['second_ms'])} |" for row in data["rows"]]


def training():
    data = result("training")
    if data is None:
        return ["Not measured yet."]
    names = {"gpt": "GPT, 6 layers, causal", "t5": "T5, 3 and 3 layers, learned bias, dropout 0.1"}
    rows = [
        f"Loss (nats a byte) of two small models, from the same weights on the same batches; {data['device']}, PyTorch {data['torch']}, "
        f"{measured(data, data['rows'])}; repeat with `bench/torch/converge.py`.",
        "",
        f"| model | attention | steps | first step | last {5 * data['point']} steps | held-out text |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    rows += [f"| {names[row['model']]} | {row['run']} | {row['steps']:,} | {row['first']:.4f} | {row['last']:.4f} | {row['held_out']:.4f} |" for row in data["rows"]]
    return rows


# ---- the GPU: bench/gpu/run.py ----

PEERS = ["mem-efficient", "FlashAttention-2", "cuDNN", "FlexAttention", "FlashAttention-4", "cuEquivariance"]
SLOW_TO_COMPILE = ("FlexAttention", "FlashAttention-4")  # as bench/gpu/contenders.py has it
WAYS = ("forward_us", "backward_us")


def gpu_rows(*groups):
    data = json.loads((ROOT / "bench/results/gpu.json").read_text())
    return data, [row for row in data["rows"] if row["group"] in groups]


def gpu_rate(row, name, way, device=False):
    """TFLOP/s, None if this one did not compute it; with `device` under a CUDA graph, where it could be captured."""
    result = row["results"].get(name, {})
    microseconds = (device and result.get(("forward_device_us", "backward_device_us")[way])) or result.get(WAYS[way])
    return row["flops"][way] / microseconds / 1e6 if microseconds else None


def gpu_cell(row, name):
    """Forward / backward in the row's unit: TFLOP/s, ms, or GB/s of q, k, v and out where memory bounds it."""
    result = row["results"].get(name, {})
    times = [result.get(way) for way in WAYS]
    if not any(times):
        return ""
    if row["unit"] == "GB/s":
        return f"{row['bytes'] / times[0] / 1e3:.0f} GB/s"
    if row["unit"] == "ms":
        return " / ".join(f"{time / 1e3:.3f}" if time else "–" for time in times) + " ms"
    return " / ".join("–" if not time else f"{gpu_rate(row, name, way):.0f}" for way, time in enumerate(times))


def gpu_target(data, row):
    """What is to be reached, forward / backward, and ours as a part of it: 1 is reached."""
    parts, targets = [], []
    for way in (0, 1):
        want, ours = (row["target"] or (0, 0))[way], row["results"]["ours"].get(WAYS[way])
        copy = data["machine"].get("copy_gb_per_s")
        if not want or not ours or (row["unit"] == "GB/s" and not copy):
            parts.append("–")
            targets.append("–")
            continue
        if row["unit"] == "ms":
            reached = 1e3 * want / ours
        elif row["unit"] == "GB/s":
            reached = row["bytes"] / ours / 1e3 / copy / want
        else:
            reached = gpu_rate(row, "ours", way) / want
        parts.append(f"{reached:.2f}")
        targets.append(f"{want:.0%} of a copy" if row["unit"] == "GB/s" else f"{want:g}")
    return "" if parts == ["–", "–"] else f"{' / '.join(targets)}: {' / '.join(parts)}"


def gpu_head(data, rows):
    """What was measured, and how to repeat it: only --all measures those that compile for seconds a row."""
    slow = any(row["results"].get(name, {}).get(way) for row in rows for name in SLOW_TO_COMPILE for way in WAYS)
    machine = data["machine"]
    return (
        f"{machine['gpu']}; PyTorch {machine['torch']}, CUDA {machine['cuda']}, cuDNN {machine['cudnn']}. Medians of {data['runs']} "
        f"interleaved runs, {measured(data, rows)}; repeat with `tools/gpu.sh bench{' --all' if slow else ''}`."
    )


def gpu_peers(rows):
    return [name for name in PEERS if any(any(gpu_rate(row, name, way) for way in (0, 1)) for row in rows)]


def gpu_table(note, before, peers, after=()):
    """The first lines of a table: what was measured where, the columns' names."""
    names = [*before, "fovea", *peers, *after]
    return [note, "", "| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]


def gpu_beside_best(row, peers):
    """Our speed over the best peer's, forward / backward."""
    ratios = []
    for way in (0, 1):
        ours, others = gpu_rate(row, "ours", way), [rate for rate in (gpu_rate(row, name, way) for name in peers) if rate]
        ratios.append(f"{ours / max(others):.2f}" if ours and others else "–")
    return " / ".join(ratios)


def gpu_dense():
    data, rows = gpu_rows("dense")
    peers = gpu_peers(rows)
    table = gpu_table(
        gpu_head(data, rows) + " bf16, TFLOP/s of allowed pairs, forward / backward; B * S = 16,384 and H * D = 2,048 in each row. "
        "`fovea / estimated best` compares with an estimate of the best library's speed: cuDNN's speed in this run, times the best of cuDNN, "
        "FlashAttention-3 and FlashAttention-4 over cuDNN in earlier runs of all three on another H200 (`bench/gpu/cases.py`).",
        ["D", "S", "causal"], peers, ["fovea / best of the row", "fovea / estimated best"],
    )
    means = {}
    for row in rows:
        _, d, s, causal = row["name"].split()
        targets = []
        for way in (0, 1):
            ours, yardstick = gpu_rate(row, "ours", way), gpu_rate(row, "cuDNN", way)
            targets.append(f"{ours / yardstick / row['target'][way]:.2f}" if ours and yardstick else "–")
            if ours and yardstick:
                means.setdefault((d[1:], way), []).append(ours / yardstick / row["target"][way])
                means.setdefault(("all", way), []).append(ours / yardstick / row["target"][way])
        cells = [d[1:], s[1:], "yes" if causal == "c" else "no", f"**{gpu_cell(row, 'ours')}**", *(gpu_cell(row, name) for name in peers)]
        table.append("| " + " | ".join([*cells, gpu_beside_best(row, peers), " / ".join(targets)]) + " |")
    for d in sorted({d for d, _ in means}, key=lambda d: (d == "all", d.zfill(3))):
        both = [means.get((d, way), []) for way in (0, 1)]
        mean = " / ".join(f"{math.exp(sum(map(math.log, part)) / len(part)):.2f}" for part in both if part)
        least = " / ".join(f"{min(part):.2f}" for part in both if part)
        table.append(f"| {d} | geometric mean | " + " | " * (len(peers) + 2) + f" | {mean}, least {least} |")
    return table


def gpu_h100():
    """Rows of the tables above on another GPU, each beside its peers there."""
    data = result("gpu_h100")
    peers = gpu_peers(data["rows"])
    table = gpu_table(
        gpu_head(data, data["rows"]).replace("tools/gpu.sh bench", "bench/gpu/run.py --json bench/results/gpu_h100.json")
        + " bf16, TFLOP/s of allowed pairs, forward / backward.",
        ["case"], peers, ["fovea / best of the row"],
    )
    for row in data["rows"]:
        cells = [f"**{gpu_cell(row, 'ours')}**", *(gpu_cell(row, name) for name in peers), gpu_beside_best(row, peers)]
        table.append("| " + " | ".join([row["name"], *cells]) + " |")
    return table


SHORT = {  # of the README
    "dense d64 s4096 f": "D=64, S=4096",
    "dense d128 s4096 f": "D=128, S=4096",
    "dense d128 s4096 c": "D=128, S=4096, causal",
    "dense d256 s4096 f": "D=256, S=4096",
    "bias[1,H] s2048 d64": "a bias 1,H,S,S and its gradient, D=64, S=2048",
    "bias[1,H] s4096 d128": "the same, D=128, S=4096",
    "triangle N768 h4 d32": "triangle attention and its gradient, N=768, D=32",
    "dropout.1 s4096 d128": "dropout 0.1, D=128, S=4096",
    "varlen mixed d128 c": "variable length, 128 to 8064, causal, D=128",
    "fp32 s2048 d64": "fp32, D=64, S=2048",
}


def gpu_short():
    data, _ = gpu_rows("dense")
    by_name = {row["name"]: row for row in data["rows"]}
    rows = [by_name[name] for name in SHORT]
    peers = gpu_peers(rows)
    table = gpu_table(
        gpu_head(data, rows) + " bf16 unless the row names another type; TFLOP/s of allowed pairs, forward / backward.",
        ["problem"], peers,
    )
    for row in rows:
        cells = [f"**{gpu_cell(row, 'ours')}**", *(gpu_cell(row, name) for name in peers)]
        table.append(f"| {SHORT[row['name']]} | " + " | ".join(cells) + " |")
    return table


def gpu_part(row, beside):
    """Ours as a part of our speed on the row without the feature."""
    pairs = [(gpu_rate(row, "ours", way), gpu_rate(beside, "ours", way)) for way in (0, 1)]
    return " / ".join(f"{a / b:.2f}" if a and b else "–" for a, b in pairs)


def gpu_features():
    data, rows = gpu_rows("features")
    peers = gpu_peers(rows)
    by_name = {row["name"]: row for row in data["rows"]}
    table = gpu_table(
        gpu_head(data, rows) + " TFLOP/s of allowed pairs, forward / backward, unless the cell has another unit; in brackets the MiB that fovea's "
        "backward allocates at its peak, gradients included. `with / without`: fovea's speed with the feature over fovea's speed without it "
        "(in brackets the target of this ratio). `target`: the speed that was the aim, then fovea's speed over it.",
        ["case"], peers, ["with / without", "target"],
    )
    for row in rows:
        beside = by_name.get(row["beside"])
        part = gpu_part(row, beside) if beside is not None else ""
        if part and row["target_of"]:
            part += " (" + " / ".join(f"{least:g}" if least else "–" for least in row["target_of"]) + ")"
        peak = row["results"]["ours"]["peak_mib"]
        ours = f"**{gpu_cell(row, 'ours')}**" + (f" [{peak:.0f}]" if peak else "")
        cells = [row["name"], ours, *(gpu_cell(row, name) for name in peers), part, gpu_target(data, row)]
        table.append("| " + " | ".join(cells) + " |")
    return table


def gpu_subsets():
    data, rows = gpu_rows("subsets")
    if not rows:
        return ["Not measured yet."]
    by_name = {row["name"]: row for row in data["rows"]}
    table = [
        gpu_head(data, rows) + " The time of a backward that computes some of the gradients, and its ratio to the time of a backward that computes all.",
        "",
        "| gradients | ms | some / all | target, at most |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        time, whole = row["results"]["ours"]["backward_us"], by_name.get(row["beside"])
        part = f"{time / whole['results']['ours']['backward_us']:.2f}" if whole else ""
        table.append(f"| {row['name']} | {time / 1e3:.3f} | {part} | {row['target'][1]} |")
    return table


def gpu_random():
    data, rows = gpu_rows("random")
    if not rows:
        return ["Not measured yet."]
    table = [
        gpu_head(data, rows) + f" {len(rows)} random problems, always the same (`random_case` in `bench/gpu/cases.py`): our speed over that of "
        "the best of PyTorch's three kernels that can compute the problem, if need be with causality, windows or masks put into its bias. "
        "Timed twice: on the device (a CUDA graph of all copies), and as called from Python, where short problems wait for the host.",
        "",
        "| | have a peer | median | tenth percentile | least |",
        "| --- | --- | --- | --- | --- |",
    ]
    worst = []
    for way, device in ((0, True), (1, True), (0, False), (1, False)):
        title = ("forward", "backward")[way]
        found = []
        for row in rows:
            if device and "backward_device_us" not in row["results"]["ours"]:
                continue
            rate = lambda name: gpu_rate(row, name, way, device) or 0  # noqa: B023, E731
            others = [(rate(name), name) for name in row["results"] if name != "ours"]
            if any(speed for speed, _ in others):
                found.append((rate("ours") / max(others)[0], row["line"].removeprefix("bwd "), max(others)[1]))
        found.sort()
        if not found:
            continue
        ratios = [ratio for ratio, *_ in found]
        tenth = ratios[int(0.1 * (len(ratios) - 1))]
        where = "on the device" if device else "as called"
        table.append(f"| {title}, {where} | {len(found)} | {statistics.median(ratios):.2f} | {tenth:.2f} | {ratios[0]:.2f} |")
        for ratio, problem, peer in found[: 10 * device]:
            short = re.sub(r"seqs_q=(\S+) seqs_k=\S+", lambda m: f"{m[1].count(',') + 1} sequences of up to {max(map(int, m[1].split(',')))}", problem)
            worst.append(f"| {title} | {ratio:.2f} | {peer} | `{short}` |")
    return [*table, "", "The worst ten of each on the device:", "", "| | ours / best | the best | problem |", "| --- | --- | --- | --- |", *worst]


def gpu_small():
    data, rows = gpu_rows("small")
    peers = gpu_peers(rows)
    table = gpu_table(
        gpu_head(data, rows) + " bf16, microseconds under a CUDA graph, forward / forward and backward together (B x H x S x D).",
        ["case"], peers,
    )
    for row in rows:
        cells = []
        for name in ["ours", *peers]:
            pair = [row["results"].get(name, {}).get(way) for way in WAYS]
            cells.append(" / ".join(f"{x:.1f}" if x else "–" for x in pair) if any(pair) else "")
        table.append(f"| {row['name'].removeprefix('small ')} | **{cells[0]}** | " + " | ".join(cells[1:]) + " |")
    return table


def gpu_patterns():
    data, rows = gpu_rows("patterns")
    if not rows:
        return ["Not measured yet."]
    by_name = {row["name"]: row for row in rows}
    table = [
        gpu_head(data, rows) + " A bias of every broadcast pattern with its gradient, B=8, H=16, D=64, bf16: TFLOP/s, forward / backward, "
        "in brackets the MiB that the backward allocates, and both speeds over those without a bias (the target of the backward: 0.6).",
        "",
        "| bias | S=2048 | with / without | S=2047 | with / without |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(row["name"].split()[1] for row in rows):
        cells = []
        for s in ("s2048", "s2047"):
            row, none = by_name.get(f"bias {name} {s}"), by_name.get(f"bias none {s}")
            cells.append(f"{gpu_cell(row, 'ours')} [{row['results']['ours']['peak_mib']:.0f}]" if row else "")
            cells.append(gpu_part(row, none) if row and none and row is not none else "")
        table.append(f"| {name} | " + " | ".join(cells) + " |")
    beside = [(row, by_name.get(row["beside"])) for row in rows]
    ratios = [(gpu_rate(row, "ours", 1) / gpu_rate(none, "ours", 1), row["name"]) for row, none in beside if none]
    least, slowest = min(ratios, default=(0, ""))
    return [*table, "", f"The slowest backward: {slowest}, {least:.2f} of the speed without a bias."] if ratios else table


def gpu_host_head(data, part):
    machine, day, commit = data[part]["machine"], data[part]["date"], data[part]["commit"]
    return f"{machine['cpu']}" + (f", {machine['gpu']}" if machine.get("gpu", "none") != "none" else "") + f"; {day}, commit {commit}"


def gpu_host():
    path = ROOT / "bench/results/gpu_host.json"
    if not path.exists():
        return ["Not measured yet."]
    data = json.loads(path.read_text())
    rows = ["Repeat with `bench/gpu/host.py`; medians.", ""]
    if "calls" in data:
        rows += [
            f"One call through the C ABI, with tensors at other addresses than in the previous call ({gpu_host_head(data, 'calls')}):",
            "", "| call | launches | us |", "| --- | --- | --- |",
            *(f"| {row['name']} | {row['launches']} | {row['microseconds']:.1f} |" for row in data["calls"]["rows"]), "",
        ]  # fmt: skip
    if "torch" in data:
        machine = data["torch"]["machine"]
        rows += [
            f"One call from Python, 1x8x128x64 bf16, us (Python {machine['python']}, PyTorch {machine['torch']}, "
            f"{gpu_host_head(data, 'torch')}):",
            "", "| | no gradient wanted | gradient wanted | the backward |", "| --- | --- | --- | --- |",
            *(f"| {row['name']} | " + " | ".join(f"{x:.0f}" for x in row["microseconds"]) + " |" for row in data["torch"]["rows"]), "",
        ]  # fmt: skip
    if "loads" in data:
        rows += [
            f"From the cache on disk to a kernel that can be launched ({gpu_host_head(data, 'loads')}; the first row includes the library's start):",
            "", "| call | kernels | ms |", "| --- | --- | --- |",
            *(f"| `{row['line']}` | {row['kernels']} | {row['milliseconds']:.2f} |" for row in data["loads"]["rows"]), "",
        ]  # fmt: skip
    if "compiles" in data:
        rows += [
            f"The kernels of the case table for `sm_90` that compile longest, from nothing, one after another on two cores "
            f"({gpu_host_head(data, 'compiles')}; in brackets the thread's own time, to which other work on the machine adds nothing):",
            "", "| kernel | s | of |", "| --- | --- | --- |",
            *(f"| `{row['kernel'].split('<')[0].rsplit('::')[-1]}` | {row['seconds']:.2f} ({row['cpu_seconds']:.2f}) | `{row['line']}` |"
              for row in data["compiles"]["rows"]), "",
        ]  # fmt: skip
    return rows[:-1]


TABLES = {
    "several_gpus": several_gpus,
    "several_gpus_2": lambda: several_gpus("several_gpus_2", ()),
    "several_gpus_4": lambda: several_gpus("several_gpus_4", ()),
    "first_step": first_step,
    "support": support,
    "cpu": cpu,
    "cpu_short": lambda: cpu(short=True),
    "cpu_peers": cpu_peers,
    "cpu_peers_short": partial(cpu_peers, short=True),
    "cpu_peers_intel": partial(cpu_peers, "cpu_pytorch_intel"),
    "cpu_peers_amx": partial(cpu_peers, "cpu_pytorch_amx"),
    "cpu_peers_sse4": partial(cpu_peers, "cpu_pytorch_sse4"),
    "torch_host": torch_host,
    "torch_host_gpu": partial(torch_host, "torch_host_gpu", " --device cuda"),
    "torch_steps": torch_steps,
    "models": models,
    "models_short": partial(models, short=True),
    "jax": jax,
    "triangle": triangle,
    "training": training,
    "gpu_dense": gpu_dense,
    "gpu_h100": gpu_h100,
    "gpu_short": gpu_short,
    "gpu_features": gpu_features,
    "gpu_subsets": gpu_subsets,
    "gpu_random": gpu_random,
    "gpu_small": gpu_small,
    "gpu_patterns": gpu_patterns,
    "gpu_host": gpu_host,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a table would change")
    arguments = parser.parse_args()
    stale = []
    for name in DOCUMENTS:
        path = ROOT / name
        text = path.read_text()

        def replace(match):
            rows = "\n".join(TABLES[match[1]]())
            rows = re.sub(r"(?<=[\d–]) / (?=[\d–])", "\N{NO-BREAK SPACE}/\N{NO-BREAK SPACE}", rows)  # forward / backward on one line
            return f"<!-- table: {match[1]} -->\n{rows}\n<!-- end -->"

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
