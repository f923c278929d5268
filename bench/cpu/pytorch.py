#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fovea's CPU speed beside scaled_dot_product_attention of PyTorch and PyTorch's matrix product, within each instruction set.

Results and gradients are compared first, but for dropout, whose masks differ; a row that differs ends the benchmark.
Each instruction set is a process of its own, in which PyTorch and its libraries keep to that set as well (with avx512 they may
multiply bf16 by AVX512-BF16, where there is that). Calls alternate; what
is reported are medians over the rounds. With one thread (the default) it is the processor time of that thread, which other work
on the machine disturbs less; with more threads it is wall time. FLOPs are those of allowed (query, key) pairs: 4 D per pair
forward, 10 D backward. Of packed sequences PyTorch computes one after the other, which on a CPU is faster than its nested
tensors. Needs PyTorch. Numbers are recorded, never asserted.

examples:
  .venv-torch/bin/python bench/cpu/pytorch.py                   a table; `make test-torch` makes that environment
  bench/cpu/pytorch.py --isa amx --threads 2 --filter bf16      some rows, on two threads
  bench/cpu/pytorch.py --isa avx512_bf16 --isa avx2 --rounds 5  what docs/performance.md has
"""

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools"), str(ROOT / "bench/torch")]
import records  # noqa: E402
from fastest import WITHIN  # noqa: E402

N = 2048  # of the matrix product
# Without AMX in PyTorch's libraries, which would take it for bf16.
LIMITS = WITHIN | {"avx512": WITHIN["avx512_bf16"]}
PRODUCT_OF = {"float32": "matmul", "bfloat16": "matmul_bf16"}
BESIDE_PRODUCT = "S=2048 D=128"  # rows in whose turns the matrix product is timed, too
AGREE = {"float32": 1e-4, "bfloat16": 0.05}  # of the largest number of a tensor: what two right results may be apart
PACKED = [32 * n for n in range(1, 17)]  # lengths of sequences


def rows():
    """name, type, batch, query heads, key heads, queries, keys, head dimension, options; no backward with one query"""
    for dim in (64, 128):
        for length in (1024, 2048):
            for causal in (False, True):
                name = f"S={length} D={dim}{' causal' if causal else ''}"
                yield name, "float32", 1, 4, 4, length, length, dim, {"causal": causal}
    for dim in (64, 128):
        for length, causal in ((1024, False), (2048, False), (2048, True)):
            yield f"S={length} D={dim}{' causal' if causal else ''}, bf16", "bfloat16", 1, 4, 4, length, length, dim, {"causal": causal}
    yield "S=1024 D=64, bias and its gradient", "float32", 1, 4, 4, 1024, 1024, 64, {"bias": True}
    yield "S=1024 D=64, dropout 0.1", "float32", 1, 4, 4, 1024, 1024, 64, {"dropout": 0.1}
    yield "S=1024 D=64, 8 query heads, 2 key heads", "float32", 1, 8, 2, 1024, 1024, 64, {}
    yield "S=1024 D=40", "float32", 1, 4, 4, 1024, 1024, 40, {}
    yield "S=1024 D=80", "float32", 1, 4, 4, 1024, 1024, 80, {}
    yield "packed: 16 sequences of 32 to 512, D=64", "float32", 1, 4, 4, sum(PACKED), sum(PACKED), 64, {"packed": True}
    yield "S=64 D=64, B=16", "float32", 16, 8, 8, 64, 64, 64, {}
    yield "one query, 4096 keys, D=128", "float32", 1, 8, 8, 1, 4096, 128, {}
    yield "one query, 65536 keys, D=128", "float32", 1, 8, 8, 1, 65536, 128, {}
    yield "one query, 4096 keys, D=128, bf16", "bfloat16", 1, 8, 8, 1, 4096, 128, {}
    yield "one query, 65536 keys, D=128, bf16", "bfloat16", 1, 8, 8, 1, 65536, 128, {}


def medians(functions, rounds, clock):
    times = [[] for _ in functions]
    for number in range(rounds + 1):
        for function, taken in zip(functions, times):
            start = clock()
            function()
            if number > 0:  # the first warms up
                taken.append(clock() - start)
    return [statistics.median(taken) for taken in times]


def compare(name, dtype, ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        apart = ((one.float() - other.float()).abs().max() / other.float().abs().max()).item()
        if not apart <= AGREE[dtype]:  # nor NaN
            sys.exit(f"{name}: fovea's result and PyTorch's are {apart:.2g} of the largest number apart; accepted: {AGREE[dtype]}")


def measure(isa, threads, rounds, words):
    """In this process: one JSON object a line, the matrix product's rate first."""
    import torch

    import fovea
    import fovea.torch

    if refused := re.search(r"^FOVEA_CPU_ISA +REFUSED +(.*)$", fovea.explain(), re.MULTILINE):
        sys.exit(f"--isa {refused[1]}")
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    fovea.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    sdpa = torch.nn.functional.scaled_dot_product_attention
    a, b = torch.randn(N, N), torch.randn(N, N)
    products = {"matmul": lambda: a @ b}
    if isa not in ("avx2", "sse4", "portable"):  # there PyTorch's product in bf16 takes minutes
        a16, b16 = a.bfloat16(), b.bfloat16()
        products["matmul_bf16"] = lambda: a16 @ b16
    rates = {name: 2e-9 * N**3 / taken for name, taken in zip(products, medians(list(products.values()), rounds, clock))}
    print(json.dumps({"isa": isa, "torch": torch.__version__, **rates}), flush=True)
    for name, dtype, batch, heads, heads_k, sq, sk, dim, options in rows():
        if not all(word in name for word in words):
            continue
        packed = options.get("packed", False)
        shapes = [(batch, heads, sq, dim), (batch, heads_k, sk, dim), (batch, heads_k, sk, dim)]
        if packed:  # (total, H, D)
            shapes = [(sq, heads, dim)] * 3
            lengths = torch.tensor([0, *PACKED]).cumsum(0).int()
        q, k, v = (torch.randn(shape, dtype=getattr(torch, dtype)) for shape in shapes)
        bias = torch.randn(1, heads, sq, sk) if options.get("bias") else None
        grad = torch.randn_like(q)
        causal, dropout = options.get("causal", False), options.get("dropout", 0.0)
        inputs = [q, k, v] if bias is None else [q, k, v, bias]

        def ours():
            more = {"dropout_p": dropout, "seed": 1} if dropout else {}
            if packed:
                more = {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths, "max_seqlen_q": max(PACKED), "max_seqlen_k": max(PACKED)}
            return fovea.torch.attention(q, k, v, bias=bias, causal=causal, **more)

        def theirs():
            if packed:
                each = (x.transpose(0, 1).split(PACKED, 1) for x in (q, k, v))
                return torch.cat([sdpa(*one).transpose(0, 1) for one in zip(*each)])
            return sdpa(q, k, v, bias, dropout, causal, enable_gqa=heads != heads_k)

        pairs = batch * heads * (sq * (sq + 1) / 2 if causal else sq * sk)
        if packed:
            pairs = heads * sum(n * n for n in PACKED)
        row = {"isa": isa, "name": name}
        beside = [products[PRODUCT_OF[dtype]]] if name.startswith(BESIDE_PRODUCT) and PRODUCT_OF[dtype] in products else []
        if not dropout:
            compare(name, dtype, [ours()], [theirs()])
        with torch.no_grad():
            *seconds, product = medians([ours, theirs, *beside], rounds, clock) + [None] * (not beside)
        row["forward"] = [4e-9 * pairs * dim / x for x in seconds]
        if beside:
            row["of_product"] = {"forward": row["forward"][0] / (2e-9 * N**3 / product)}
        row["gigabytes_per_second"] = 1e-9 * (k.nbytes + v.nbytes) / seconds[0]
        if sq > 1:
            for tensor in inputs:
                tensor.requires_grad_()
            outs = ours(), theirs()
            backward = [lambda out=out: torch.autograd.grad(out, inputs, grad, retain_graph=True) for out in outs]
            if not dropout:
                compare(f"{name}, backward", dtype, *(run() for run in backward))
            *seconds, product = medians(backward + beside, rounds, clock) + [None] * (not beside)
            row["backward"] = [1e-8 * pairs * dim / x for x in seconds]
            if beside:
                row["of_product"]["backward"] = row["backward"][0] / (2e-9 * N**3 / product)
        print(json.dumps(row), flush=True)


def sets_here():
    """The instruction set that is in use, and avx2."""
    from fovea.torch._fastest import instruction_sets

    sets = instruction_sets()
    return list(dict.fromkeys([*(name for name, used in sets.items() if used), *(["avx2"] if "avx2" in sets else [])]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", action="append", metavar="NAME", help="an instruction set (default: the one in use here, and avx2); can be repeated")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--filter", action="append", default=[], metavar="WORD", help="only rows with this in their name; can be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was measured, over a file that is there")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not any(all(word in row[0] for word in arguments.filter) for row in rows()):
        parser.error(f"--filter: no row has the words {' '.join(arguments.filter)}")
    cores = len(os.sched_getaffinity(0))
    if not 1 <= arguments.threads <= cores:
        parser.error(f"--threads {arguments.threads}: accepted: 1 to {cores}, as many cores as this process may use")
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: accepted: 1 and more")
    if arguments.json and not arguments.json.resolve().parent.is_dir():
        parser.error(f"--json {arguments.json}: there is no folder {arguments.json.resolve().parent}")
    if importlib.util.find_spec("torch") is None:
        parser.error(f"{sys.executable} has no PyTorch; `make test-torch` makes an environment that has it: .venv-torch/bin/python {sys.argv[0]}")
    if arguments.child:
        return measure(arguments.isa[0], arguments.threads, arguments.rounds, arguments.filter)
    print("one thread, processor time" if arguments.threads == 1 else f"{arguments.threads} threads, wall time", flush=True)
    machines, found = [], []
    for isa in arguments.isa or sets_here():
        command = [sys.executable, __file__, "--child", "--isa", isa, "--threads", str(arguments.threads), "--rounds", str(arguments.rounds)]
        for word in arguments.filter:
            command += ["--filter", word]
        environment = {**os.environ, **LIMITS.get(isa, {}), "FOVEA_CPU_ISA": isa, "OMP_NUM_THREADS": str(arguments.threads)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout:
                row = json.loads(line)
                (machines if "matmul" in row else found).append(row)
                if "matmul" in row:
                    in_bf16 = f", in bf16 {row['matmul_bf16']:.0f}" if "matmul_bf16" in row else ""
                    print(f"{isa}, PyTorch {row['torch']}; matrix product {row['matmul']:.0f} GFLOP/s{in_bf16}", flush=True)
                    continue
                cells = [f"{which} {row[which][0]:6.1f} / {row[which][1]:6.1f} = {row[which][0] / row[which][1]:5.2f}"
                         for which in ("forward", "backward") if which in row]  # fmt: skip
                if "of_product" in row:
                    cells.append(f"of the matrix product {' / '.join(f'{x:.2f}' for x in row['of_product'].values())}")
                print(f"  {row['name']:42}{'   '.join(cells)}", flush=True)
        if child.returncode != 0:
            sys.exit(f"{isa}: the measuring process ended with {child.returncode}")
    if arguments.json:
        records.write(arguments.json, {
            **records.when(), "rounds": arguments.rounds, "cpu": records.processor(),
            "threads": arguments.threads, "instruction_sets": machines, "rows": found,
        })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
