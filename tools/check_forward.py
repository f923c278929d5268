#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check the forward of the CUDA backend alone, through the library: random problems that a kernel serves, against fp64
by the specification's rule, then ten times more for equal bits.

    tools/check_forward.py                          sm90_forward, 400 problems, 14 processes
    tools/check_forward.py --kernel generic_forward --count 100 --seconds 60

Problems are larger than the case table's: many tiles a multiprocessor, several steps a tile, every head dimension.
"""

import argparse
import collections
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = str(ROOT / "python")
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "gpu")]


def random_problem(seed):
    from problem import Plane, Problem

    r = random.Random(seed)
    chance = lambda p: r.random() < p  # noqa: E731
    p = Problem(case_seed=50_000 + seed, type=r.choice(["bf16", "bf16", "fp16"]))
    p.batch = r.choice([(1,), (2,), (3,), (2, 2), (7,)])
    p.hk = r.choice([1, 2, 3, 8])
    p.hq = p.hk * r.choice([1, 1, 2, 4])
    multiples = [16, 32, 48, 80, 96, 112, 144, 160, 176, 192, 208, 224, 240]
    p.d = r.choice([64, 64, 128, 128, 256, *multiples, r.randint(1, 256)])
    p.dv = p.d if chance(0.7) else r.choice([16, 32, 64, 80, 128, 192, 256, r.randint(1, 256)])
    length = lambda: r.choice([r.randint(1, 130), r.randint(1, 700), r.randint(700, 1500), 64 * r.randint(1, 20)])  # noqa: E731
    p.sq = length()
    p.sk = p.sq if chance(0.5) else length()
    while p.batch_size * p.hq * p.sq * p.sk > 4e7:
        p.hk, p.hq = 1, p.hq // p.hk
        p.batch = (2,)
        p.sq, p.sk = (p.sq + 1) // 2 if p.sq * p.sk > 2e6 else p.sq, p.sk
    p.layout = r.choice(["bshd", "bshd", "bhsd", "strided"])
    if chance(0.25):
        p.seqs_q, p.seqs_k = ([r.randint(0, n) for _ in range(p.batch_size)] for n in (p.sq, p.sk))
        p.total_q, p.total_k = max(sum(p.seqs_q) + 3, 1), max(sum(p.seqs_k) + 5, 1)
    for side, seqs, rows in (("q", p.seqs_q, p.sq), ("k", p.seqs_k, p.sk)):
        if chance(0.1):
            setattr(p, f"used_{side}", [r.randint(0, n) for n in (seqs or [rows] * p.batch_size)])
    p.causal = chance(0.4)
    p.top_left = chance(0.3)
    if chance(0.3):
        p.window = (r.choice([-1, 0, r.randint(1, 400)]), r.choice([-1, 0, r.randint(1, 400)]))
    p.scale = r.choice([None, None, None, None, 0.5, -0.1])
    p.softcap = r.choice([0.0, 0.0, 0.0, 3.0, 30.0])
    p.alibi = r.choice(["", "", "", "h", "b,h"])
    p.sink = chance(0.2)
    extents = lambda: (chance(0.5), len(p.batch) == 2 and chance(0.5), chance(0.5), chance(0.8), chance(0.8))  # noqa: E731
    if chance(0.4):
        p.bias = Plane(extents(), r.choice([p.type, p.type, p.type, "bf16", "fp16"]))
    if chance(0.15):
        p.bias2 = Plane(extents(), r.choice([p.type, "bf16", "fp16"]))
    if chance(0.25):
        p.mask = Plane(extents(), "bool")
    if chance(0.3):
        p.dropout, p.seed, p.offset = r.choice([0.1, 0.3, 0.5, 0.9]), r.getrandbits(64), r.getrandbits(64)
        p.rng = r.choice(["fovea", "fovea", "torch_mem_efficient"])
    if chance(0.1) and not p.seqs_q:  # few queries, whose heads may be packed
        p.sq = r.choice([1, 1, 2, 5])
        p.used_q = None
    return p


def worker(given):
    import ctypes

    import torch
    from library import Call
    from tensors import Tensors
    from trial import Trial

    from fovea._library import lib, text

    device = torch.device("cuda", 0)
    table = []
    if given.table:
        from table import rows

        table = [p for p in rows() if p.type in ("bf16", "fp16") and p.d <= 256 and p.dv <= 256]
        given.count = min(given.count, len(table) - given.first)
    end = time.time() + given.seconds
    for seed in range(given.first + given.shard, given.first + given.count, given.processes):
        if time.time() > end:
            break
        p = table[seed] if given.table else random_problem(seed)
        line = f"[{seed}] {p.line()}"
        try:
            call = Call(Tensors(p, device))
            why = text(lib.fovea_explain, ctypes.byref(call.raw), 0)
            if given.kernel not in why or f"{given.kernel}:" in why:
                print("other", line, "|", why.split(given.kernel + ":")[-1][:80].strip().replace("\n", " "), flush=True)
                continue
            print("begun", line, flush=True)
            trial = Trial(p, device)
            trial.prepare(False)
            trial.run(False)
            faults = trial.judge(False)
            outputs = trial.tensors.outputs(False)
            first = [t.buffer.clone() for t in outputs]
            for _ in range(10):
                trial.prepare(False)
                trial.run(False)
                bits = [torch.equal(a.view(torch.uint8), t.buffer.view(torch.uint8)) for a, t in zip(first, outputs)]
                if not all(bits):
                    faults.append("bits differ between runs")
                    break
            print("wrong" if faults else "right", line, "|", "; ".join(faults), flush=True)
        except Exception as error:  # a fault of the device ends this process, and is reported
            print("error", line, "|", type(error).__name__, str(error)[:600], flush=True)
            try:
                torch.cuda.synchronize()
            except Exception:
                return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="sm90_forward")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--table", action="store_true", help="rows of the case table instead")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--shard", type=int, default=-1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.shard >= 0:
        return worker(given)
    folder = Path(tempfile.mkdtemp())
    started = []
    for n in range(given.processes):
        with open(folder / str(n), "w") as out:
            started.append(subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--shard", str(n)], stdout=out,
                                            stderr=subprocess.STDOUT))  # fmt: skip
    end = time.time() + given.seconds + 20
    while time.time() < end and any(process.poll() is None for process in started):
        time.sleep(0.2)
    lines = []
    for n, process in enumerate(started):
        own = (folder / str(n)).read_text().splitlines()
        if process.poll() is None:
            process.kill()
            own.append(f"hangs {(own or ['?'])[-1]}")
        elif process.returncode:
            own.append(f"died ({process.returncode}) {(own or ['?'])[-1]}")
        lines += [line for line in own if not line.startswith("begun")]
    counts = collections.Counter(line.split()[0] for line in lines if line.strip())
    others = collections.Counter(line.split("|")[-1].strip() for line in lines if line.startswith("other"))
    words = lambda line: [w for w in line.split("|")[0].split()[2:]]  # noqa: E731
    sizes = ("b=", "h", "sq=", "sk=", "seqs", "total", "max", "used", "seed", "offset")
    name = lambda w: w.split("=")[0] if w.startswith(sizes) else w  # noqa: E731
    seen, bad = collections.Counter(), collections.Counter()
    for line in lines:
        if line.startswith(("right", "wrong", "error")):
            for word in {name(w) for w in words(line)}:
                seen[word] += 1
                bad[word] += not line.startswith("right")
    for line in [x for x in lines if not x.startswith(("right", "other"))][:60]:
        print(line[:900])
    for why, n in others.most_common(20):
        print(f"passed over {n}: {why}")
    worst = sorted((w for w in seen if bad[w]), key=lambda w: -bad[w] / seen[w])
    print("bad by feature:", ", ".join(f"{w} {bad[w]}/{seen[w]}" for w in worst)[:1500])
    print(dict(counts))
    return int(counts["right"] == 0 or counts["wrong"] + counts["error"] + counts["hangs"] + counts["died"] > 0)


if __name__ == "__main__":
    sys.exit(main())
