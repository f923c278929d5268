# SPDX-License-Identifier: Apache-2.0
"""fp32 by three fp16 products."""
from harness import *
torch.backends.cuda.matmul.allow_tf32 = False
for causal in (False, True):
    for fill in (1.0, 30.0, 1e-6, 1e6):
        P = Problem(2, 4, 333, 64, Sk=461, Hk=2, causal=causal, type="Type::fp32", fill=fill)
        if fill != 1: P.scale = P.scale / fill ** 2 * (100 if fill == 30 else 1)
        if fill == 30: P.v /= 900; P.do *= 7
        if fill == 1: P.q[:, :, 5] *= 1e-3; P.v[..., 7] *= 1e-3; P.do[:, :, 7] *= 1e4
        run = P.fp32()
        check(f"fp32 c{int(causal)} fill={fill}", P, ["o", "lse", "dq", "dk", "dv"], lambda: run(0), lambda: run(2))
P = Problem(1, 2, 4096, 64, type="Type::fp32")
run = P.fp32()
check("fp32 s4096", P, ["o", "lse", "dq", "dk", "dv"], lambda: run(0), lambda: run(2))
for causal in (False, True):
    P = Problem(4, 16, 2048, 64, causal=causal, type="Type::fp32")
    F_ = [dict(), dict(more_f=dict(ctas=3)), dict(more_f=dict(tiles=2, step=32)), dict(more_f=dict(step=32, ctas=3))]
    B_ = [dict(), dict(more_b=dict(ctas=3)), dict(more_b=dict(step=64)), dict(more_b=dict(warps=8, ctas=1, step=64)), dict(more_b=dict(part=16))]
    fs, bs = {}, {}
    for i, v in enumerate(F_):
        run = P.fp32(**v); fs[f"v{i}"] = lambda run=run: run(0)
        if i == 0: fs["v0 no split"] = lambda run=run: run(1)
    row(f"fwd fp32 s2048 d64 {'causal' if causal else ''}", flops(P), {**fs, **peers(P, ["mem"])})
    for i, v in enumerate(B_):
        try: run = P.fp32(**v)
        except Exception as x: print("FAIL", v, str(x)[:200]); continue
        run(0); bs[f"v{i}"] = lambda run=run: run(2)
        if i == 0: bs["v0 no split"] = lambda run=run: run(3)
    row(f"bwd fp32 s2048 d64 {'causal' if causal else ''}", flops(P, True), {**bs, **peers(P, ["mem"], True)})
finish()
