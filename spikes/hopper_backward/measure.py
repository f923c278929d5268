# SPDX-License-Identifier: Apache-2.0
"""Checks the kernels against fp64, measures them beside PyTorch's, prints a short table last.
usage: measure.py [group ...]   groups: see GROUPS at the end"""
import os, sys, math, statistics
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
import engine
from engine import Params, BiasParams, SmallParams

gpu = engine.Gpu()
dev = "cuda"
SMS = torch.cuda.get_device_properties(0).multi_processor_count
PDL = not os.environ.get("NO_PDL")


checks, LOG = [], open(os.environ.get("OUT", "/tmp") + "/log", "a")


def log(line, quiet=False):
    LOG.write(line + "\n")
    LOG.flush()
    if not quiet:
        print(line, flush=True)


def up(x, n):
    return (x + n - 1) // n * n


class Problem:
    """q, k, v, o, do: B, S, H, D; bias: planes (B1 * H), S, S or None; entries b // (B / B1) share a plane"""

    def __init__(self, B, H, S, D, bias=None, causal=False, b1=1, std=1.0, reference=True, mean=0.0):
        self.B, self.H, self.S, self.D, self.causal, self.b1 = B, H, S, D, causal, b1
        r = lambda *s: torch.randn(*s, device=dev, dtype=torch.float32)
        self.q, self.k, self.v, self.do = [(r(B, S, H, D) * std).bfloat16() for _ in range(4)]
        self.bias = (r(b1 * H, S, S) * 1.0 + mean).bfloat16() if bias else None
        self.scale = 1 / math.sqrt(D)
        self.o = torch.empty_like(self.q)
        self.lse = torch.empty(B, H, S, device=dev)
        if reference:
            self.reference()

    def heads(self, chunk=1 << 27):
        per = max(1, chunk // (self.H * self.S * self.S))
        for b in range(0, self.B, per):
            yield b, min(self.B, b + per)

    def scores(self, b0, b1, dtype):
        q, k = self.q[b0:b1].to(dtype), self.k[b0:b1].to(dtype)
        s = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale
        if self.bias is not None:
            planes = self.bias.view(self.b1, self.H, self.S, self.S).to(dtype)
            which = torch.arange(b0, b1, device=dev) // (self.B // self.b1)
            s = s + planes[which]
        if self.causal:
            s = s.masked_fill(torch.ones(self.S, self.S, device=dev, dtype=torch.bool).triu(1), -math.inf)
        return s

    def forward_fast(self):
        """o and lse in fp32, for timing"""
        for b0, b1 in self.heads(1 << 28):
            s = self.scores(b0, b1, torch.float32)
            self.lse[b0:b1] = torch.logsumexp(s, -1)
            self.o[b0:b1] = torch.einsum("bhij,bjhd->bihd", s.softmax(-1).bfloat16(), self.v[b0:b1]).bfloat16()

    def reference(self):
        """fp64, and the same formula with the kernels' own roundings (fp32 sums, P and dS in bf16)"""
        self.ref, self.naive = {}, {}
        for kind, dtype in (("ref", torch.float64), ("naive", torch.float32)):
            out = {n: torch.zeros(self.B, self.S, self.H, self.D, device=dev, dtype=dtype) for n in ("dq", "dk", "dv")}
            if self.bias is not None:
                out["dbias"] = torch.zeros(self.b1, self.H, self.S, self.S, device=dev, dtype=dtype)
            for b0, b1 in self.heads():
                s = self.scores(b0, b1, dtype)
                lse = torch.logsumexp(s, -1)
                p = torch.exp(s - lse[..., None])
                v, do = self.v[b0:b1].to(dtype), self.do[b0:b1].to(dtype)
                if kind == "ref":
                    o = torch.einsum("bhij,bjhd->bihd", p, v)
                    self.o[b0:b1] = o.bfloat16()
                    self.lse[b0:b1] = lse.float()
                else:
                    o = self.o[b0:b1].float()
                delta = torch.einsum("bihd,bihd->bhi", o, do)
                dp = torch.einsum("bihd,bjhd->bhij", do, v)
                ds = p * (dp - delta[..., None])
                if kind == "naive":
                    if self.bias is not None:
                        out["dbias"] += ds.bfloat16().to(dtype).view(-1, self.H, self.S, self.S).sum(0) if self.b1 == 1 else 0
                        if self.b1 > 1:
                            for b in range(b0, b1):
                                out["dbias"][b // (self.B // self.b1)] += ds[b - b0].bfloat16().to(dtype)
                    p, ds = p.bfloat16().float(), ds.bfloat16().float()
                elif self.bias is not None:
                    for b in range(b0, b1):
                        out["dbias"][b // (self.B // self.b1)] += ds[b - b0]
                out["dv"][b0:b1] = torch.einsum("bhij,bihd->bjhd", p, do)
                out["dq"][b0:b1] = torch.einsum("bhij,bjhd->bihd", ds, self.k[b0:b1].to(dtype)) * self.scale
                out["dk"][b0:b1] = torch.einsum("bhij,bihd->bjhd", ds, self.q[b0:b1].to(dtype)) * self.scale
            setattr(self, kind, {n: (x.bfloat16().double() if kind == "naive" else x) for n, x in out.items()})

    def flops(self):
        return 10 * self.B * self.H * self.S * self.S * self.D * (0.5 if self.causal else 1)


class Backward:
    """One configuration on one problem: outputs, workspace, launches."""
    FIELDS = "d groups blocks rows stages tiles kv dq bias causal delta".split()
    FINAL, PASSES, REDUCE, BULK = range(4)

    def __init__(self, pr, groups, blocks, rows, stages, tiles, kv, dq, early=0, want_dbias=True, bias_cfg=None, fast=True, chunks=None, grid=None):
        self.pr = pr
        B, H, S, D = pr.B, pr.H, pr.S, pr.D
        has = pr.bias is not None
        whole = dq in (self.FINAL, self.PASSES)
        b = lambda x: "true" if x else "false"
        keys = groups * blocks * 64
        self.name = f"backward<Spec{{{D},{groups},{blocks},{rows},{stages},{tiles},{kv},{dq},{early},{b(has)},{b(pr.causal)},{b(whole)},{b(S % keys)}}}>"
        width = min(128, 2 * D)
        stage = (80 * 64 if rows == 80 else 64 * (D // 2 if early == 2 else D)) * 4 if dq == self.BULK else 0
        self.smem = kv * 2 * keys * D * 2 + stages * 2 * rows * D * 2 + tiles * rows * keys * 2 + groups * stage + stages * rows * 8 + 8 * (2 * kv + 3 * stages + 3 * tiles) + (stages * rows * D * 2 if whole else 0)
        self.threads = (groups + 1) * 128
        self.f = gpu.function(self.name, self.smem)
        padded = up(S, 80 if rows == 80 else 128)
        passes = up(S, keys) // keys
        assert dq != self.FINAL or passes == 1
        items = B * H if whole else B * H * passes
        self.grid = grid or (min(items, SMS) if whole else items)
        z = lambda *s, dtype=torch.float32: torch.empty(*s, device=dev, dtype=dtype)
        self.dq, self.dk, self.dv = [torch.empty_like(pr.q) for _ in range(3)]
        self.lse_rows, self.delta_rows = z(B * H, padded), z(B * H, padded)
        self.acc = z(self.grid * padded * D if dq == self.PASSES else B * H * padded * D if not whole else 1)
        self.peak = sum(x.numel() * 4 for x in (self.lse_rows, self.delta_rows, self.acc))
        P = lambda t: t.data_ptr()
        s4 = (S * H * D, H * D, D)
        self.params = Params(P(pr.o), P(pr.do), P(pr.lse), P(self.lse_rows), P(self.delta_rows), P(self.acc), P(self.dq), P(self.dk), P(self.dv),
                             *s4, *s4, *s4, *s4, B, H, S, padded, passes, items, B // pr.b1, H, 0, 1, pr.scale)
        dims, strides = (D, S, H, B), (H * D * 2, D * 2, S * H * D * 2)
        tm = lambda t, rows_: gpu.tensor_map(t, dims, strides, (width // 2, rows_, 1, 1), width)
        mb = lambda rows_: gpu.tensor_map(pr.bias, (S, S, pr.b1 * H), (S * 2, S * S * 2), (64, rows_, 1), 128) if has else engine.TensorMap()
        self.args = (tm(pr.o, rows), tm(pr.q, rows), tm(pr.do, rows), tm(pr.k, blocks * 64), tm(pr.v, blocks * 64), mb(rows), self.params)
        self.whole = whole
        if not whole:
            self.prepare, self.convert = gpu.function(f"prepare<{D},{b(has)}>"), gpu.function("convert_80<0>" if rows == 80 else f"convert<{D}>")
            self.prepare_grid, self.convert_grid = (up(padded * H * D // 8, 256) // 256, B), B * H * padded // (80 if rows == 80 else 64)
            self.convert_block = 256 if rows == 80 else 4 * D
        self.want, self.fused = has and want_dbias, False
        if self.want:
            bg, bn, bs, bb = bias_cfg or {32: (3, 64, 6, 2), 64: (3, 64, 4, 1), 128: (3, 64, 2, 1)}[D]
            brows = bg * 64
            self.bname = f"bias_gradient<BiasSpec{{{D},{bg},{bn},{bs},{bb},{b(pr.causal)},{b(not whole and rows == 64 and bg == 3)},"
            self.fast = fast
            self.bsmem = bs * (brows + 128) * D * 2 + bb * brows * 256 + 16 * (bs + bb)
            self.bthreads = (bg + 1) * 128
            self.bexact, self.bfast, self.bsum = gpu.function(self.bname + "false}>", self.bsmem), gpu.function(self.bname + "true}>", self.bsmem), gpu.function("bias_sum<0>")
            tiles_ = up(S, 128) // 128 * (up(S, brows) // brows) * pr.b1 * H
            n = B // pr.b1
            if chunks is None:  # fewest chunks whose waves are at least 95% full, up to 16
                fill = lambda c: tiles_ * c / (up(tiles_ * c, SMS))
                good = [c for c in range(1, min(16, n) + 1) if fill(c) >= 0.95]
                chunks = good[0] if good else max(range(1, min(16, n) + 1), key=fill)
            self.chunks = chunks
            self.partial = z(chunks * pr.b1 * H * S * S if chunks > 1 else 1)
            self.dbias = torch.empty_like(pr.bias)
            self.peak += self.partial.numel() * 4
            self.flags = torch.full((tiles_ * chunks * bg * 4,), 1, device=dev, dtype=torch.int32)
            self.bgrid = min(SMS, tiles_ * chunks)
            self.bparams = BiasParams(P(self.lse_rows), P(self.delta_rows), P(self.dbias), P(self.partial), P(self.flags) if fast else 0, B, H, S, padded, n, chunks, tiles_ * chunks, pr.scale, 0)
            self.bargs = (tm(pr.q, brows), tm(pr.do, brows), tm(pr.k, 128), tm(pr.v, 128), mb(brows), self.bparams, self.params)
            self.fused = not self.whole and fast and rows == 64 and bg == 3

    def main(self, fused=False):
        st = torch.cuda.current_stream().cuda_stream
        if not self.whole:
            gpu.launch(self.prepare, self.prepare_grid, 256, 0, (self.params,), st)
        gpu.launch(self.f, self.grid, self.threads, self.smem, self.args, st, not self.whole and PDL)
        if not self.whole and not fused:
            gpu.launch(self.convert, self.convert_grid, self.convert_block, 0, (self.params,), st, PDL)

    def bias_part(self):
        st = torch.cuda.current_stream().cuda_stream
        if self.fast:
            gpu.launch(self.bfast, self.bgrid, self.bthreads, self.bsmem, self.bargs, st)
        gpu.launch(self.bexact, self.bgrid, self.bthreads, self.bsmem, self.bargs, st, self.fast and PDL)
        if self.chunks > 1:
            gpu.launch(self.bsum, up(self.dbias.numel(), 1024) // 1024, 256, 0, (self.bparams,), st, PDL)

    def __call__(self):
        self.main(self.fused)
        if self.want:
            self.bias_part()

    def outputs(self):
        o = {"dq": self.dq, "dk": self.dk, "dv": self.dv}
        if self.want:
            o["dbias"] = self.dbias
        return o

    def check(self, label, repeats=0):
        pr = self.pr
        for x in self.outputs().values():
            x.fill_(math.nan)
        for x in (self.lse_rows, self.delta_rows, self.acc) + ((self.partial,) if self.want else ()):
            x.fill_(math.nan)
        self()
        torch.cuda.synchronize()
        line, good = [], True
        for n, x in self.outputs().items():
            ref, naive = pr.ref[n], pr.naive[n]
            x = x.double().view(ref.shape)
            e, en = (x - ref).abs(), (naive - ref).abs()
            small = 1e-5 * ref.abs().max().item()
            ok = e.max().item() <= 2 * en.max().item() + small and e.mean().item() <= 2 * en.mean().item() + small and not x.isnan().any().item()
            good &= ok
            line.append(f"{n} {e.max().item() / en.max().item():.2f}/{e.mean().item() / en.mean().item():.2f}{'' if ok else ' WRONG'}")
        same = ""
        if repeats:
            first = {n: x.clone() for n, x in self.outputs().items()}
            differ = 0
            for _ in range(repeats):
                for x in self.outputs().values():
                    x.fill_(math.nan)
                self()
                differ += any(not torch.equal(x, first[n]) for n, x in self.outputs().items() if self.whole or n != "dq")
            same = f"  {repeats - differ}/{repeats} identical"
            good &= differ == 0
        checks.append(good)
        log(f"{'ok  ' if good else 'FAIL'} {label}: max/mean error over naive: {', '.join(line)}{same}", good)
        return good


class Small(Backward):
    """backward_small: S <= 64"""

    def __init__(self, pr, groups=3, slots=3, want_dbias=True):
        self.pr, self.whole = pr, True
        B, H, S, D = pr.B, pr.H, pr.S, pr.D
        has = pr.bias is not None
        self.want = has and want_dbias
        b = lambda x: "true" if x else "false"
        self.name = f"backward_small<SmallSpec{{{D},{groups},{slots},{b(has)},{b(self.want)}}}>"
        self.smem = groups * (slots * 5 * 64 * D * 2 + 8192) + groups * 1024 + groups * slots * 16
        self.f, self.bsum = gpu.function(self.name, self.smem), gpu.function("small_bias_sum<0>")
        planes, n = pr.b1 * H, B // pr.b1
        self.planes, self.threads = planes, (groups + 1) * 128
        per = max(1, min(SMS // planes, up(n, groups) // groups))
        self.grid, self.workers = per * planes, engine.C.c_int(per * groups)
        self.dq, self.dk, self.dv = [torch.empty_like(pr.q) for _ in range(3)]
        self.partial = torch.empty(planes * per * groups * 4096 if self.want else 1, device=dev)
        self.dbias = torch.empty_like(pr.bias) if has else None
        self.lse_rows = self.delta_rows = self.acc = self.partial
        P = lambda t: t.data_ptr() if t is not None else 0
        self.params = SmallParams(P(pr.lse), P(pr.bias), P(self.partial), P(self.dbias), P(self.dq), P(self.dk), P(self.dv), S * H * D, H * D, D, B, H, S, n, pr.scale)
        dims, strides = (D, S, H, B), (H * D * 2, D * 2, S * H * D * 2)
        tm = lambda t: gpu.tensor_map(t, dims, strides, (D, 64, 1, 1), D * 2)
        self.args = (tm(pr.q), tm(pr.k), tm(pr.v), tm(pr.do), tm(pr.o), self.params)

    def __call__(self):
        st = torch.cuda.current_stream().cuda_stream
        gpu.launch(self.f, self.grid, self.threads, self.smem, self.args, st)
        if self.want:
            gpu.launch(self.bsum, self.planes * 8, 128, 0, (self.params, self.workers), st, PDL)


def sdpa(pr, backend, grad_bias=True, use_bias=True):
    """-> a function that runs the backward alone, or None where refused"""
    q, k, v = [x.transpose(1, 2).detach().requires_grad_() for x in (pr.q, pr.k, pr.v)]
    leaves, mask = [q, k, v], None
    if pr.bias is not None and use_bias:
        leaf = pr.bias.view(pr.b1, 1, pr.H, pr.S, pr.S).detach().requires_grad_(grad_bias)
        mask = leaf.expand(pr.b1, pr.B // pr.b1, pr.H, pr.S, pr.S).reshape(pr.B, pr.H, pr.S, pr.S) if pr.b1 > 1 else leaf.view(1, pr.H, pr.S, pr.S).expand(pr.B, -1, -1, -1)
        if grad_bias:
            leaves.append(leaf)
    try:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=pr.causal, scale=pr.scale)
        do = pr.do.transpose(1, 2)
        run = lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)
        run()
        torch.cuda.synchronize()
        return run
    except RuntimeError as e:
        print("refused:", str(e).splitlines()[0][:90])
        return None


def once(fn, n):
    """n calls back to back, so that the host's time hides behind the GPU's"""
    a, b = torch.cuda.Event(True), torch.cuda.Event(True)
    torch.cuda.synchronize()
    torch.cuda._sleep(400000)  # the first calls are queued before the clock starts
    a.record()
    for _ in range(n):
        fn()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / n


def measure(fns, n=8):
    """medians of three interleaved runs, ms"""
    rows = {k: [] for k in fns}
    for f in fns.values():
        f(); f()
    torch.cuda.synchronize()
    for _ in range(3):
        for k, f in fns.items():
            rows[k].append(once(f, n))
    return {k: statistics.median(v) for k, v in rows.items()}


table = []


def report(label, pr, fns, flops=None):
    t = measure({k: f for k, f in fns.items() if f})
    fl = pr.flops()
    table.append(label + ": " + "  ".join(f"{k} {fl / t[k] / 1e9:.0f} ({t[k] * 1000:.0f} us)" for k in t))
    log(table[-1], True)


WHOLE = dict(groups=3, blocks=2, rows=64)


WHOLES = {"a": dict(stages=4, tiles=2, kv=1), "b": dict(stages=6, tiles=2, kv=1), "c": dict(stages=2, tiles=2, kv=2), "d": dict(groups=2, blocks=3, stages=2, tiles=2, kv=2), "e": dict(stages=2, tiles=3, kv=1), "f": dict(stages=2, tiles=3, kv=1, early=1), "g": dict(stages=2, tiles=3, kv=1, early=3), "h": dict(stages=2, tiles=2, kv=2, early=3)}


def triangle():
    for B, H, S, kw in ((40, 4, 384, {}), (12, 4, 384, dict(b1=3)), (37, 4, 328, {}), (10, 4, 768, {})):
        pr = Problem(B, H, S, 32, bias=True, **kw)
        mode = Backward.FINAL if S <= 384 else Backward.PASSES
        for n, c in [x for x in WHOLES.items() if x[0] in "fh"]:
            Backward(pr, **{**WHOLE, **c}, dq=mode).check(f"whole {n} B={B} S={S} {kw}", 100 if S == 384 else 20)
        Backward(pr, **{**WHOLE, **c}, dq=mode, bias_cfg=(2, 128, 6, 2)).check(f"whole {n} B={B} S={S} {kw} bias 2x128", 20)
    for B, S in ((384, 384), (768, 768)):
        mode = Backward.FINAL if S <= 384 else Backward.PASSES
        for bias in (True, False):
            pr = Problem(B, 4, S, 32, bias=bias, reference=False)
            pr.forward_fast()
            fns = {}
            for n, c in [x for x in WHOLES.items() if x[0] in "fh"]:
                x = Backward(pr, **{**WHOLE, **c}, dq=mode)
                fns["main " + n] = x.main
            if bias:
                fns["all"] = Backward(pr, **{**WHOLE, **WHOLES["f"]}, dq=mode)
                print(f"chunks {x.chunks}, workspace {x.peak / 2**20:.0f} MiB")
                fns["dbias"] = x.bias_part
                y = Backward(pr, **{**WHOLE, **c}, dq=mode, fast=False)
                y.main()
                fns["dbias exact"] = y.bias_part
            if S == 384:
                fns["mem-eff"] = sdpa(pr, SDPBackend.EFFICIENT_ATTENTION)
            if not bias:
                fns["cudnn"] = sdpa(pr, SDPBackend.CUDNN_ATTENTION)
            report(f"triangle {S} bias={bias}", pr, fns)


def small():
    for B, H, S, D, kw in ((600, 4, 49, 32, dict(bias=True)), (60, 4, 64, 32, dict(bias=True, b1=3)), (700, 3, 33, 32, {}), (200, 4, 49, 64, dict(bias=True)), (300, 4, 64, 64, {})):
        pr = Problem(B, H, S, D, **kw)
        for c in (dict(groups=3, slots=3), dict(groups=3, slots=2)) if D == 32 else (dict(groups=2, slots=2),):
            Small(pr, **c).check(f"small {c} B={B} S={S} D={D} {kw}", 100)
    # Swin, and AlphaFold-like windows
    for B, H, S, D in ((4096, 4, 49, 32), (4096, 4, 64, 32), (256, 4, 64, 32)):
        for bias in (True, False):
            pr = Problem(B, H, S, D, bias=bias, reference=False)
            pr.forward_fast()
            report(f"small B={B} S={S} D={D} bias={bias}", pr, {"3x3": Small(pr), "3x2": Small(pr, 3, 2), "mem-eff": sdpa(pr, SDPBackend.EFFICIENT_ATTENTION),
                                                                "flash": None if bias else sdpa(pr, SDPBackend.FLASH_ATTENTION), "cudnn": None if bias else sdpa(pr, SDPBackend.CUDNN_ATTENTION)})


def medium():
    """ViT and BERT: the whole-head kernel at D = 64"""
    for B, H, S, kw in ((30, 4, 197, {}), (20, 8, 512, dict(causal=True)), (20, 8, 512, {}), (20, 8, 256, dict(bias=True))):
        pr = Problem(B, H, S, 64, **kw)
        for n, c in MEDIUM.items():
            mode = 0 if S <= c["groups"] * c["blocks"] * 64 else 1
            Backward(pr, **c, dq=mode).check(f"whole {n} B={B} S={S} D=64 {kw}", 50)
    for B, H, S in ((256, 12, 197), (64, 12, 512), (64, 32, 1024)):
        pr = Problem(B, H, S, 64, reference=False)
        pr.forward_fast()
        fns = {n: Backward(pr, **c, dq=0 if S <= c["groups"] * c["blocks"] * 64 else 1) for n, c in MEDIUM.items()}
        fns["2x128 bulk"] = Backward(pr, **CFG64["64:2x128 bulk"])
        fns["cudnn"], fns["fa2"] = sdpa(pr, SDPBackend.CUDNN_ATTENTION), sdpa(pr, SDPBackend.FLASH_ATTENTION)
        report(f"B={B} S={S} D=64", pr, fns)


MEDIUM = {"2x128k": dict(groups=2, blocks=2, rows=64, stages=2, tiles=2, kv=1), "2x128k mid": dict(groups=2, blocks=2, rows=64, stages=2, tiles=2, kv=1, early=3),
          "3x64k early": dict(groups=3, blocks=1, rows=64, stages=4, tiles=2, kv=1, early=1)}


def adversarial():
    """large scores, biases that turn them round, biases of -inf and of 1e9, a far mean"""
    for name, std, edit, mean in (("plain", 1, None, 0), ("mean 30", 1, None, 30), ("mean -1e4", 1, None, -1e4), ("std 6", 6, None, 0),
                                  ("turned", 5, lambda b, s: b.copy_((-s.mean(0) * 1.0).bfloat16()), 0), ("-inf", 1, lambda b, s: b.masked_fill_(torch.rand_like(b.float()) < 0.5, -math.inf), 0),
                                  ("1e9 columns", 1, lambda b, s: b[..., ::3].fill_(1e9), 0), ("-1e9 all", 1, lambda b, s: b.fill_(-1e9), 0)):
        for D, cfg in ((32, dict(**WHOLE, **WHOLES["f"], dq=0)), (64, CFG64["64:3x64 red"])):
            pr = Problem(6, 2, 384, D, bias=True, std=std, reference=False, mean=mean)
            if edit:
                keep, pr.bias = pr.bias, None
                s = pr.scores(0, 6, torch.float32)
                pr.bias = keep
                if name == "turned":  # one batch entry's scores are undone, the others' are not
                    s = s[:1]
                edit(pr.bias.view(2, 384, 384), s)
            pr.reference()
            x = Backward(pr, **cfg)
            x.check(f"adversarial {name} D={D}", 5)
            log(f"    flagged {int((x.flags.view(-1, 12) != 0).any(1).sum())} of {x.flags.numel() // 12}", True)


def dense_small_check():
    for D, cfgs in ((64, CFG64), (128, CFG128)):
        for bias in (False, True):
            for causal in (False, True):
                for S in (512, 456):
                    pr = Problem(3, 4, S, D, bias=bias, causal=causal)
                    for name, c in cfgs.items():
                        if bias and c.get("plain"):
                            continue
                        Backward(pr, **{k: v for k, v in c.items() if k != "plain"}).check(f"{name} S={S} bias={bias} causal={causal}", 30 if S == 512 else 0)


CFG64 = {"64:3x64 red": dict(groups=3, blocks=1, rows=64, stages=4, tiles=3, kv=1, dq=2),
         "64:3x64 bulk": dict(groups=3, blocks=1, rows=64, stages=3, tiles=2, kv=1, dq=3),
         "64:2x128 bulk": dict(groups=2, blocks=1, rows=128, stages=2, tiles=2, kv=1, dq=3)}
CFG128 = {"128:2x64 red": dict(groups=2, blocks=1, rows=64, stages=2, tiles=3, kv=1, dq=2),
          "128:2x80 bulk": dict(groups=2, blocks=1, rows=80, stages=2, tiles=2, kv=1, dq=3),
          "128:2x64 red split": dict(groups=2, blocks=1, rows=64, stages=2, tiles=3, kv=1, dq=2, early=2)}


def dense():
    for D, cfgs, shapes in ((64, CFG64, ((16, 32, 1024), (4, 32, 4096))), (128, CFG128, ((16, 16, 1024), (4, 16, 4096)))):
        for B, H, S in shapes:
            for causal in (False, True):
                pr = Problem(B, H, S, D, causal=causal, reference=False)
                pr.forward_fast()
                fns = {n: Backward(pr, **{k: v for k, v in c.items() if k != "plain"}) for n, c in cfgs.items()}
                if D == 64 and B * H > 100:
                    fns["passes 2x128k"] = Backward(pr, **MEDIUM["2x128k mid"], dq=1)
                x = fns["64:2x128 bulk" if D == 64 else "128:2x64 red"]
                st = lambda: torch.cuda.current_stream().cuda_stream
                fns["prepare"] = lambda x=x: gpu.launch(x.prepare, x.prepare_grid, 256, 0, (x.params,), st())
                fns["convert"] = lambda x=x: gpu.launch(x.convert, x.convert_grid, x.convert_block, 0, (x.params,), st())
                fns["cudnn"], fns["fa2"] = sdpa(pr, SDPBackend.CUDNN_ATTENTION), sdpa(pr, SDPBackend.FLASH_ATTENTION)
                report(f"D={D} S={S} causal={causal}", pr, fns)


def bias():
    for D, cfgs, (B, H, S) in ((64, CFG64, (8, 16, 2048)), (128, CFG128, (4, 16, 4096))):
        pr = Problem(B, H, S, D, bias=True, reference=False)
        pr.forward_fast()
        fns = {}
        for n, c in cfgs.items():
            if not c.get("plain"):
                x = Backward(pr, **c)
                fns[n], fns[n + " main"] = x, x.main
        fns["dbias"] = x.bias_part
        for n, kw in (("2x128", dict(bias_cfg=(2, 128, 4, 2))), ("exact", dict(fast=False))) if D == 64 else (("2x128", dict(bias_cfg=(2, 128, 3, 1))), ("exact", dict(fast=False))):
            y = Backward(pr, **c, **kw)
            y.main()
            fns["dbias " + n] = y.bias_part
        fns["mem-eff"] = sdpa(pr, SDPBackend.EFFICIENT_ATTENTION)
        fns["cudnn nobias"] = sdpa(pr, SDPBackend.CUDNN_ATTENTION, use_bias=False)
        report(f"bias 1,H D={D} S={S}", pr, fns)


def once_each():
    """for a profiler: each main kernel and bias kernel once, after a warm-up"""
    for pr, c in ((Problem(384, 4, 384, 32, bias=True, reference=False), dict(**WHOLE, **WHOLES["c"], dq=0)), (Problem(8, 16, 2048, 64, bias=True, reference=False), CFG64["64:3x64 red"]),
                  (Problem(4, 16, 4096, 128, bias=True, reference=False), CFG128["128:2x64 red"])):
        pr.forward_fast()
        x = Backward(pr, **c)
        x()
        torch.cuda.synchronize()


def yardstick():
    a, b = [torch.randn(8192, 8192, device=dev, dtype=torch.bfloat16) for _ in range(2)]
    t = measure({"matmul": lambda: a @ b})["matmul"]
    table.append(f"matmul 8192: {2 * 8192**3 / t / 1e9:.0f} TFLOP/s; " + os.popen("nvidia-smi --query-gpu=clocks.sm,power.draw,clocks_event_reasons.active --format=csv,noheader").read().strip())


GROUPS = dict(yardstick=yardstick, adversarial=adversarial, small=small, medium=medium, once=once_each, triangle=triangle, check=dense_small_check, dense=dense, bias=bias)

if __name__ == "__main__":
    print(torch.cuda.get_device_name(0), torch.__version__, torch.backends.cudnn.version())
    for g in sys.argv[1:] or [g for g in GROUPS if g != 'once']:
        try:
            GROUPS[g]()
        except Exception as e:
            import traceback
            traceback.print_exc()
            if "ILLEGAL" in str(e) or "illegal" in str(e) or "Launch" in str(e):
                break
    for n, (s, r) in gpu.times.items():
        log(f"compiled in {s:.2f} s, {r} bytes local: {n}", True)
    print(f"{sum(checks)} of {len(checks)} checks passed; slowest compile {max(s for s, r in gpu.times.values()):.2f} s; local memory: {[(n, r) for n, (s, r) in gpu.times.items() if r > 40]}")
    print("TFLOP/s:")
    for line in table:
        print(" ", line)
