# SPDX-License-Identifier: Apache-2.0
"""Dense and causal, forward and backward."""
from harness import *
import sys, itertools
start = time.time()
def go(items):  # precompile what is asked for in parallel
    precompile(items); print(f"compiled {len(items)} in {time.time() - start:.1f} s")

FV = {64: [dict(), dict(lazy=True), dict(step=128, q_registers=False), dict(step=128, q_registers=True), dict(ctas=3, q_registers=False), dict(warps=8, tiles=1, step=64), dict(warps=8, ctas=1)],
      128: [dict(), dict(lazy=True), dict(warps=8, tiles=1, ctas=1, step=128), dict(warps=8, tiles=1, ctas=2, step=64), dict(step=32)],
      256: [dict(), dict(lazy=True), dict(step=32), dict(warps=4, tiles=1, step=64, ctas=1)]}
BV = {64: [dict(), dict(delay=True), dict(warps=8, tiles=1, part=64), dict(warps=8, tiles=1, part=64, step=128, split_q=4), dict(warps=4, tiles=2, ctas=2), dict(warps=4, tiles=1, part=64, ctas=3)],
      128: [dict(), dict(delay=True), dict(part=32), dict(part=32, delay=True), dict(warps=4, ctas=2), dict(split_q=4)]}
items = []
tests = []
for D in (64, 128, 256):
    for causal in (False, True):
        P = Problem(2, 4, 333 + D, D, Sk=461, Hk=2, causal=causal); tests.append(P)
for P in tests:
    items += [P.forward_spec(**v) for v in FV[P.D]]
    if P.D in BV: items += sum([P.backward_spec(**v) for v in BV[P.D]], [])
go(items)
for P in tests:
    for v in FV[P.D]:
        P.o.fill_(float("nan")); P.lse.fill_(float("nan"))
        try: check(f"fwd d{P.D} c{int(P.causal)} {v}", P, ["o", "lse"], P.forward(**v))
        except Exception as x: print("FAIL", P.D, v, x)
    if P.D in BV:
        for v in BV[P.D]:
            for x in (P.dq, P.dk, P.dv): x.fill_(float("nan"))
            try: check(f"bwd d{P.D} c{int(P.causal)} {v}", P, ["dq", "dk", "dv"], None, P.backward(**v))
            except Exception as x: print("FAIL", P.D, v, x)
print(f"checked {time.time() - start:.1f} s")
for D in (64, 128, 256):
    for S, causal in ((4096, False), (4096, True)):
        P = Problem(16384 // S, 2048 // D, S, D, causal=causal)
        fs = {}
        for i, v in enumerate(FV[D]):
            try: fs[f"v{i}"] = P.forward(**v)
            except Exception as x: print("FAIL", v, x)
        fs.update(peers(P, ["flash", "cudnn"]))
        row(f"fwd D={D} S={S} {'causal' if causal else 'full'}", flops(P), fs)
        if D not in BV: continue
        P.forward()()
        fs = {}
        for i, v in enumerate(BV[D]):
            try: fs[f"v{i}"] = P.backward(**v)
            except Exception as x: print("FAIL", v, x)
        fs.update(peers(P, ["flash", "cudnn"], True))
        row(f"bwd D={D} S={S} {'causal' if causal else 'full'}", flops(P, True), fs)
        run = P.backward()
        ms = timed([lambda: run(0), lambda: run(1), lambda: run(2)])
        rows.append(f"    prepare, main, convert ms: {ms[0]:.3f} {ms[1]:.3f} {ms[2]:.3f}")
        del P
print(f"{time.time() - start:.1f} s")
for key, value in loaded.items():
    if key[0] in ("forward", "backward"): print({k: v for k, v in key[1]}, value[1])
finish()
