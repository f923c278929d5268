# SPDX-License-Identifier: Apache-2.0
"""Dense and causal, forward and backward."""
from harness import *
import sys, itertools
start = time.time()
def go(items):  # precompile what is asked for in parallel
    precompile(items); print(f"compiled {len(items)} in {time.time() - start:.1f} s")

FV = {64: [dict(), dict(lazy=True), dict(ones=True), dict(step=128), dict(step=128, q_registers=False), dict(ctas=3, q_registers=False, step=32), dict(ctas=3, q_registers=False)],
      128: [dict(), dict(lazy=True), dict(ones=True), dict(ones=True, lazy=True), dict(step=32), dict(step=32, lazy=True), dict(warps=8, tiles=1, ctas=2, step=64)],
      256: [dict(), dict(lazy=True), dict(ones=True), dict(ones=True, lazy=True)]}
BV = {64: [dict(), dict(delay=True), dict(warps=4, ctas=2), dict(warps=4, ctas=2, delay=True), dict(warps=4, ctas=2, split_q=1), dict(warps=4, ctas=2, part=64), dict(split_q=4)],
      128: [dict(), dict(part=32), dict(part=32, delay=True), dict(split_q=4), dict(split_q=4, part=32, delay=True), dict(split_q=4, delay=True), dict(part=16, split_q=4)]}
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
    pass
finish()
