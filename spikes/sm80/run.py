# SPDX-License-Identifier: Apache-2.0
"""Check, then measure beside PyTorch's kernels: run.py [check] [spread] [dense] [features]; the tables come last. TFLOP/s: forward 4 B H pairs D, backward 2.5 times that."""
from harness import *
torch.backends.cuda.matmul.allow_tf32 = False
what = sys.argv[1:] or ["check", "spread", "dense", "features"]
start = time.time()
nan = lambda *xs: [x.fill_(float("nan")) for x in xs if x is not None]


def check_all():
    def case(label, names=("o", "lse", "dq", "dk", "dv"), forward={}, backward="best_backward", more={}, bias_gradient=None, deterministic=False, **kw):
        P = Problem(2, 4, kw.pop("S", 333), kw.pop("D"), Sk=kw.pop("Sk", 461), Hk=kw.pop("Hk", 2), **kw)
        f = (P.wide_forward if P.D == 512 else P.forward)(**forward)
        run = getattr(P, backward)(**more)
        bg = P.bias_gradient(chunks=bias_gradient) if bias_gradient else None
        if bg or (P.store_ds() and backward != "two_pass" and P.D in (32, 64)): names = [*names, "dbias"]
        nan(P.o, P.dq, P.dk, P.dv, P.dbias)
        check(label, P, names, f, (lambda: run(bias_gradient=bg)) if bg else run)
        if deterministic:
            first = [x.clone() for x in (P.dq, P.dk, P.dv)]
            for _ in range(20):
                nan(P.dq, P.dk, P.dv); run()
                if not all(torch.equal(x, y) for x, y in zip(first, (P.dq, P.dk, P.dv))): failures.append(f"{label} differs"); break
    for D in (32, 64, 80, 96, 128, 256, 512):
        for causal in (False, True): case(f"d{D} c{int(causal)}", D=D, causal=causal)
    for D in (64, 128): case(f"fp16 d{D}", D=D, causal=True, type="Type::fp16")
    for D in (64, 128): case(f"short keys d{D}", D=D, S=200, Sk=77); case(f"dead rows d{D}", D=D, S=461, Sk=333, causal=True)
    for D in (32, 64, 128):
        for bias, causal, drop, Hk in (((1, 4), False, 0, 4), ((2, 1), True, 0, 2), ((1, 1), False, 0.1, 2), ((2, 4), True, 0.3, 4), (None, True, 0.1, 2), (None, False, 0.5, 4)):
            case(f"d{D} bias={bias} c{int(causal)} drop={drop}", D=D, bias=bias, causal=causal, dropout=drop, Hk=Hk, bias_gradient=None if not bias else 2 if bias == (2, 1) else 1)
        case(f"stored dbias d{D}", D=D, bias=(2, 4), causal=True, Hk=4, backward="backward")
        case(f"two passes d{D}", D=D, bias=(1, 4), causal=True, dropout=0.1, backward="two_pass", deterministic=True)
        case(f"two passes, no mask d{D}", D=D, backward="two_pass", deterministic=True)
        case(f"unaligned bias d{D}", D=D, bias=(2, 4), bias_odd=True, causal=True, backward="backward")
    for D in (64, 128):
        for w in ((100, 0), (37, 50), (0, 0)): P = Problem(2, 4, 333, D, Sk=461, Hk=2, window=w); check(f"window {w} d{D}", P, ["o", "lse"], P.forward())
    for D, f, b, m in ((64, {}, "backward", dict(delay=False)), (128, dict(step=32), "backward", dict(warps=4, tiles=1, step=32, part=32, ctas=1)),
                       (256, dict(warps=4, tiles=1, step=32, ctas=1), "wide_backward", dict(warps=4, tiles=1, split_k=2, split_o=1, step=16, split_q=1))):
        case(f"99 KiB d{D}", D=D, causal=True, forward=f, backward=b, more=m)
    for causal in (False, True):
        for fill in (1.0, 30.0, 1e-6, 1e6):
            P = Problem(2, 4, 333, 64, Sk=461, Hk=2, causal=causal, type="Type::fp32", fill=fill)
            if fill != 1: P.scale = P.scale / fill ** 2 * (100 if fill == 30 else 1)
            if fill == 30: P.v /= 900; P.do *= 7
            if fill == 1: P.q[:, :, 5] *= 1e-3; P.v[..., 7] *= 1e-3; P.do[:, :, 7] *= 1e4
            run = P.fp32()
            check(f"fp32 c{int(causal)} fill={fill}", P, ["o", "lse", "dq", "dk", "dv"], lambda: run(0), lambda: run(2))
    P = Problem(1, 2, 4096, 64, type="Type::fp32"); run = P.fp32()
    check("fp32 s4096", P, ["o", "lse", "dq", "dk", "dv"], lambda: run(0), lambda: run(2))


def cell(label, P, which=("flash", "mem", "cudnn"), forward=None, backward=None, bias_grad=False):
    f = forward or (P.wide_forward if P.D == 512 else P.forward)()
    ms = timed(list((fs := {"ours": f, **peers(P, which)}).values()), target=0.008)
    f()
    b = backward or P.best_backward()
    bms = timed(list((bs := {"ours": b, **peers(P, which, True, bias_grad)}).values()), target=0.012)
    t, u = {n: flops(P) / x / 1e9 for n, x in zip(fs, ms)}, {n: flops(P, True) / x / 1e9 for n, x in zip(bs, bms)}
    show = lambda x: f"{x:.0f}" if x == x else "-"
    best = lambda t: next((t["ours"] / t[n] for n in ("flash", "mem") if n in t and t[n] == t[n]), float("nan"))
    rows.append(f"| {label} | " + " | ".join(f"{show(t.get(n, math.nan))} / {show(u.get(n, math.nan))}" for n in ("ours", "flash", "mem", "cudnn")) + f" | {best(t):.2f}, {best(u):.2f} |")
    print(rows[-1], flush=True)


def dense():
    for D in (64, 128, 256):
        for S in (1024, 2048, 4096, 8192, 16384):
            for c in (False, True): cell(f"{D} | {S} | {'yes' if c else 'no'}", Problem(16384 // S, 2048 // D, S, D, causal=c))


def features():
    def with_bias(label, P, chunks=1):
        P.forward()()
        run, bg = P.best_backward() if not P.store_ds() else P.backward(), None if P.store_ds() else P.bias_gradient(chunks=chunks)
        cell(label, P, ["mem"], backward=lambda: run(bias_gradient=bg), bias_grad=True)
    with_bias("bias[1,H] s2048 d64", Problem(8, 16, 2048, 64, bias=(1, 16)))
    with_bias("bias[B,H] s2048 d64", Problem(8, 16, 2048, 64, bias=(8, 16)))
    with_bias("bias[1,H] s4096 d128", Problem(4, 16, 4096, 128, bias=(1, 16)))
    with_bias("triangle 384", Problem(384, 4, 384, 32, bias=(1, 4)), 11)
    with_bias("triangle 768", Problem(768, 4, 768, 32, bias=(1, 4)), 4)
    for B, H, D, c in ((4, 32, 64, False), (4, 16, 128, False), (4, 16, 128, True)): cell(f"dropout.1 s4096 d{D} {'c' if c else ''}", Problem(B, H, 4096, D, causal=c, dropout=0.1))
    cell("gqa 32/8 s4096 d128 c", Problem(4, 32, 4096, 128, Hk=8, causal=True), ["flash", "cudnn"])
    cell("d512 s2048 f", Problem(8, 4, 2048, 512), ["mem"])
    cell("d96 s4096 f", Problem(4, 20, 4096, 96)); cell("d32 s4096 f", Problem(4, 64, 4096, 32)); cell("odd s2047 d80 c", Problem(8, 16, 2047, 80, causal=True))
    cell("cross 4096x77 d64", Problem(16, 16, 4096, 64, Sk=77)); cell("fp16 s4096 d128", Problem(4, 16, 4096, 128, type="Type::fp16"))
    for c in (False, True):
        P = Problem(4, 16, 2048, 64, causal=c, type="Type::fp32"); run = P.fp32()
        cell(f"fp32 s2048 d64 {'c' if c else 'f'}", P, ["mem"], lambda: run(0), lambda: run(2))
    for D in (64, 128):
        for c in (False, True): P = Problem(4, 2048 // D, 4096, D, causal=c); cell(f"two passes (deterministic) s4096 d{D} {'c' if c else 'f'}", P, ["flash"], backward=P.two_pass())
    for D in (64, 128): P = Problem(4, 16, 2048, D, bias=(1, 16), bias_odd=True); cell(f"unaligned bias, no gradient s2048 d{D}", P, [], backward=P.backward())


def spread():
    """Largest error of o (of the formula's own) and of lse over many small problems: what lazy rescaling and sums by the tensor cores cost."""
    for D in (32, 64, 128):
        variants = dict(plain=dict(lazy=False, ones=False), lazy=dict(lazy=True, ones=False), ones=dict(lazy=False, ones=True), both=dict(lazy=True, ones=True))
        ratio, lse = {n: [] for n in variants}, {n: [] for n in variants}
        for k in range(24):
            P = Problem(2, 4, 333, D, Sk=461, causal=k % 2 == 0, bias=(1, 4) if k % 3 == 0 else None)
            want, plain = P.naive(torch.float64), P.naive(torch.float32, lambda x: x.to(torch.bfloat16).float())
            own = errors(plain["o"].to(torch.bfloat16), want["o"])[0]
            for n, v in variants.items():
                P.forward(**v)(); torch.cuda.synchronize()
                ratio[n].append(errors(P.o, want["o"])[0] / own); lse[n].append((P.lse - want["lse"]).abs().max().item())
        rows.append(f"spread d{D}: " + "; ".join(f"{n} median {statistics.median(ratio[n]):.2f} worst {max(ratio[n]):.2f} lse {max(lse[n]):.1e}" for n in variants))
    for c in (False, True):
        P = Problem(4, 16, 4096, 128, causal=c)
        row(f"fwd d128 s4096 {'c' if c else 'f'}", flops(P), {**{n: P.forward(**v) for n, v in variants.items()}, "lazy32": P.forward(lazy=True, ones=False, step=32), **peers(P, ["flash"])})
    P = Problem(4, 32, 4096, 64, dropout=0.1)
    row("fwd dropout d64", flops(P), {"plain": P.forward(lazy=False), "lazy": P.forward(lazy=True), "late": P.forward(early=False, lazy=True), "32": P.forward(lazy=True, step=32), **peers(P, ["flash"])})


for name in what: {"spread": spread, "check": check_all, "dense": dense, "features": features}[name](); print(f"{name} {time.time() - start:.1f} s", flush=True)
for (name, _), v in loaded.items():
    if len(v) == 4 and v[1]["spills"] > 100: print("spills", name, {k: x for k, x in _ if k != "arch"}, v[1])
finish()
