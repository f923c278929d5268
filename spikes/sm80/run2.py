# SPDX-License-Identifier: Apache-2.0
"""Bias and its gradient, dropout, wide head dimensions. run2.py [what ...]: check, bias, triangle, dropout, wide."""
from harness import *
start = time.time()
what = sys.argv[1:] or ["check", "bias", "triangle", "dropout", "wide", "dense"]
nan = lambda *xs: [x.fill_(float("nan")) for x in xs if x is not None]

if "check" in what:
    for D in (32, 64, 128):
        for bias, causal, drop, Hk in (((1, 4), False, 0, 4), ((2, 1), True, 0, 2), ((1, 1), False, 0.1, 2), ((2, 4), True, 0.3, 4), (None, True, 0.1, 2), (None, False, 0.5, 4)):
            P = Problem(2, 4, 333, D, Sk=461, Hk=Hk, causal=causal, bias=bias, dropout=drop)
            label = f"d{D} bias={bias} c{int(causal)} drop={drop}"
            try:
                variants = [P.backward()] + ([P.wide_backward()] if D == 128 else [])
                check("fwd " + label, P, ["o", "lse"], P.forward())
                for run in variants:
                    nan(P.dq, P.dk, P.dv, P.dbias)
                    bg = P.bias_gradient(chunks=2 if causal and bias == (2, 1) else 1) if bias and not (P.store_ds() and run is variants[0]) else None
                    check("bwd " + label, P, ["dq", "dk", "dv"] + (["dbias"] if bias else []), None, lambda: run(bias_gradient=bg))
            except Exception as x: print("FAIL", label, x); failures.append(label)
    for D, bias in ((64, (1, 4)),):
        P = Problem(2, 4, 333, D, Sk=461, bias=bias, bias_odd=True)
        check(f"fwd odd bias d{D}", P, ["o", "lse"], P.forward()); check(f"bwd odd bias d{D}", P, ["dq", "dk", "dv"], None, P.backward())
    for D in (128, 256, 512):
        for causal in (False, True):
            P = Problem(2, 4, 333, D, Sk=461, Hk=2, causal=causal)
            try:
                if D > 128: check(f"wide fwd d{D} c{int(causal)}", P, ["o", "lse"], P.wide_forward())
                else: P.forward()()
                check(f"wide bwd d{D} c{int(causal)}", P, ["dq", "dk", "dv"], None, P.wide_backward())
            except Exception as x: print("FAIL", D, x); failures.append(f"wide {D}")
    for D in (64, 128):
        P = Problem(2, 4, 333, D, Sk=461, Hk=2, causal=True, type="Type::fp16")
        check(f"fp16 d{D}", P, ["o", "lse", "dq", "dk", "dv"], P.forward(), P.backward())
    print(f"checked {time.time() - start:.1f} s", flush=True)


def variants(make, options):
    fs = {}
    for i, v in enumerate(options):
        try: fs[f"v{i}"] = make(**v)
        except Exception as x: print("FAIL", v, str(x)[:200])
    return fs


def bias_case(label, P, peer, fv, bv, gv, chunks):
    row(f"fwd {label}", flops(P), {**variants(P.forward, fv), **peers(P, peer)})
    P.forward()()
    bgs = variants(lambda chunks=1, **v: P.bias_gradient(chunks=chunks, **v), gv)
    fs = {}
    for n, run in variants(P.backward, bv).items(): fs[n] = (lambda run=run: run(bias_gradient=None if P.store_ds() else list(bgs.values())[0]))
    if P.D == 128:
        for n, run in variants(P.wide_backward, [dict(), dict(split_q=4)]).items(): fs["w" + n] = (lambda run=run: run(bias_gradient=list(bgs.values())[0]))
    row(f"bwd {label}", flops(P, True), {**fs, **peers(P, peer, True, True)})
    run = P.backward(**bv[0])
    row(f"  main alone", flops(P, True), {n: (lambda r=r: r(1)) for n, r in variants(P.backward, bv).items()})
    row(f"  dbias alone, its own flops", flops(P), {n: (lambda bg=bg: run(3, bg)) for n, bg in bgs.items()})


if "bias" in what:
    bias_case("bias[1,H] s2048 d64", Problem(8, 16, 2048, 64, bias=(1, 16)), ["mem"], [dict(), dict(lazy=True), dict(step=32, ctas=3, lazy=True), dict(step=32, ctas=3, lazy=True, q_registers=False)],
              [dict(delay=False)], [dict(), dict(ctas=2, stages=1), dict(ctas=1, stages=1)], 1)
    bias_case("bias[1,H] s4096 d128", Problem(4, 16, 4096, 128, bias=(1, 16)), ["mem"], [dict(step=32)], [dict()], [dict(), dict(warps=4, split_q=2), dict(warps=4, split_q=2, step=64, ctas=2, part=32)], 1)
    P = Problem(8, 16, 2048, 64, bias=(8, 16)); bias_case("bias[B,H] s2048 d64", P, ["mem"], [dict()], [dict(delay=False)], [dict()], 1); del P
if "triangle" in what:
    for N in (384, 768):
        P = Problem(N, 4, N, 32, bias=(1, 4))
        c = 11 if N == 384 else 4
        bias_case(f"triangle {N}", P, ["mem"], [dict(ctas=3), dict(ctas=3, lazy=True), dict(ctas=3, step=32, lazy=True), dict(ctas=4, step=32, q_registers=False, lazy=True)], [dict(), dict(warps=4, tiles=2, ctas=3, step=32), dict(warps=4, tiles=2, part=16, ctas=3)],
                  [dict(chunks=c), dict(chunks=c * 2), dict(chunks=c, split_q=2, ctas=3)], c)
        del P
if "dropout" in what:
    for B, H, D, causal in ((4, 32, 64, False), (4, 16, 128, False), (4, 16, 128, True)):
        P = Problem(B, H, 4096, D, causal=causal, dropout=0.1)
        row(f"fwd dropout d{D} {'causal' if causal else ''}", flops(P), {**variants(P.forward, [dict(lazy=True), dict(lazy=True, q_registers=False), dict(lazy=True, early=True), dict(lazy=True, early=True, q_registers=False), dict(lazy=True, early=True, step=32, q_registers=False), dict(lazy=True, early=True, step=32, ctas=3, q_registers=False)]), **peers(P, ["flash", "cudnn"])})
        P.forward()()
        row(f"bwd dropout d{D} {'causal' if causal else ''}", flops(P, True), {**variants(P.backward, [dict(), dict(part=32)] if D == 128 else [dict(), dict(delay=False)]), **({"w" + n: r for n, r in variants(P.wide_backward, [dict(split_q=4)]).items()} if D == 128 else {}), **peers(P, ["flash", "cudnn"], True)})
if "wide" in what:
    for B, H, S, D, causal in ((4, 16, 4096, 128, False), (4, 16, 4096, 128, True), (4, 8, 4096, 256, False), (4, 8, 4096, 256, True), (8, 4, 2048, 512, False)):
        P = Problem(B, H, S, D, causal=causal)
        label = f"wide d{D} s{S} {'causal' if causal else ''}"
        peer = ["mem"] if D == 512 else ["flash"]
        if D > 128: row("fwd " + label, flops(P), {**variants(P.wide_forward, [dict(), dict(tiles=2, split_q=2)]), **peers(P, peer)}); P.wide_forward()()
        else: P.forward()()
        bv = {128: [dict(), dict(split_q=4), dict(split_q=1)], 256: [dict(), dict(split_q=4), dict(tiles=1, split_k=4), dict(split_o=4)], 512: [dict(), dict(split_q=2)]}[D]
        row("bwd " + label, flops(P, True), {**variants(P.wide_backward, bv), **peers(P, peer, True)})
        run = P.wide_backward()
        ms = timed([lambda: run(0), lambda: run(1), lambda: run(2)])
        rows.append(f"    prepare, main, convert ms: {ms[0]:.3f} {ms[1]:.3f} {ms[2]:.3f}")
        del P
if "dense" in what:
    for D in (64, 128):
        P = Problem(4, 2048 // D, 4096, D)
        P.forward()()
        row(f"bwd D={D}", flops(P, True), {**variants(P.backward, [dict(), dict(part=32), dict(split_q=4)] + ([dict(warps=4, ctas=2)] if D == 128 else [dict(part=64)])), **peers(P, ["flash"], True)})
print(f"{time.time() - start:.1f} s")
finish()
