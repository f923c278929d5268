# SPDX-License-Identifier: Apache-2.0
"""Every dense cell beside PyTorch's kernels, then other head dimensions and shapes. run_dense.py [dense] [other]"""
from harness import *
what = sys.argv[1:] or ["dense", "other"]
start = time.time()
def cell(label, P, which=("flash", "mem", "cudnn"), forward=None, backward=None):
    f = (forward or P.forward)()
    fs = {"ours": f, **peers(P, which)}
    ms = timed(list(fs.values()), target=0.008)
    f()
    b = backward() if backward else P.best_backward()
    bs = {"ours": b, **peers(P, which, True)}
    bms = timed(list(bs.values()), target=0.012)
    t = dict(zip(fs, (flops(P) / x / 1e9 for x in ms))), dict(zip(bs, (flops(P, True) / x / 1e9 for x in bms)))
    best = "flash" if "flash" in t[0] and t[0]["flash"] == t[0]["flash"] else "mem"
    r = f"| {label} | " + " | ".join(f"{t[0].get(n, float('nan')):.0f} / {t[1].get(n, float('nan')):.0f}" for n in ("ours", *which)) + f" | {t[0]['ours'] / t[0][best]:.2f}, {t[1]['ours'] / t[1][best]:.2f} |"
    rows.append(r); print(r, flush=True)
    return t[0]['ours'] / t[0][best], t[1]['ours'] / t[1][best]

ratios = []
if "dense" in what:
    for D in (64, 128, 256):
        for S in (1024, 2048, 4096, 8192, 16384):
            for c in (False, True):
                P = Problem(16384 // S, 2048 // D, S, D, causal=c)
                ratios.append((D, S, c, *cell(f"{D} | {S} | {'yes' if c else 'no'}", P)))
                del P
    print(f"dense {time.time() - start:.1f} s")
if "other" in what:
    for label, P in (("d32 s4096 f", lambda: Problem(4, 64, 4096, 32)), ("d96 s4096 f", lambda: Problem(4, 20, 4096, 96)), ("odd s2047 d80 c", lambda: Problem(8, 16, 2047, 80, causal=True)),
                     ("cross 4096x77 d64", lambda: Problem(16, 16, 4096, 64, Sk=77)), ("fp16 s4096 d128", lambda: Problem(4, 16, 4096, 128, type="Type::fp16"))):
        P = P(); cell(label, P); del P
    P = Problem(4, 20, 4096, 96); P.forward()()
    row("bwd d96: narrow, wide", flops(P, True), dict(narrow=P.backward(), wide=P.wide_backward()))
    P = Problem(8, 16, 2047, 80, causal=True); P.forward()()
    row("bwd d80: narrow, wide", flops(P, True), dict(narrow=P.backward(), wide=P.wide_backward()))
for r in sorted(ratios, key=lambda r: min(r[3:]))[:6]: print("lowest", r)
print(f"{time.time() - start:.1f} s")
finish()
