# SPDX-License-Identifier: Apache-2.0
"""What run.py needs: problems, configurations, launches, the formula in any precision, checks, clocks, PyTorch's kernels."""
import ctypes, math, statistics, sys, time
import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel, SDPBackend
import build

cuda = ctypes.CDLL("libcuda.so.1")
torch.zeros(1, device="cuda")
ARCH = 90
DTYPES = {"Type::bf16": torch.bfloat16, "Type::fp16": torch.float16, "Type::fp32": torch.float32}


class Strides(ctypes.Structure):
    _fields_ = [(n, ctypes.c_longlong) for n in "bhs"]


POINTER, I64, I32, F32, U32, U64 = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float, ctypes.c_uint, ctypes.c_ulonglong


class Args(ctypes.Structure):
    _fields_ = ([(n, POINTER) for n in "q k v o d_o out dk dv".split()] + [(n, Strides) for n in "qs ks vs os dos outs dks dvs".split()] +
                [("bias", POINTER), ("biases", Strides), ("bias_k", I64), ("lse", POINTER), ("lse_pad", POINTER), ("delta_pad", POINTER), ("dq_sum", POINTER),
                 ("dq", POINTER), ("dqs", Strides), ("dbias", POINTER), ("dbias_sum", POINTER)] +
                [(n, I32) for n in "batch heads heads_k sq sk sq_pad list chunks".split()] + [("scale", F32), ("drop", U32), ("keep_scale", F32), ("seed", U64), ("offset", U64)] +
                [(n, POINTER) for n in "qx kx vx dox".split()] + [("low", I32), ("high", I32), ("sizes", POINTER)])


def ok(r):
    if r:
        s = ctypes.c_char_p()
        cuda.cuGetErrorString(r, ctypes.byref(s))
        raise RuntimeError(f"CUDA {r} {s.value}")


loaded = {}


def kernel(name, shared, **spec):
    key = (name, tuple(sorted(spec.items())))
    if key not in loaded:
        cubin, symbol, log, seconds = build.build(name, ARCH, **spec)
        loaded[key] = (cubin, symbol, build.resources(log))
    if len(loaded[key]) == 3:
        cubin, symbol, res = loaded[key]
        module, f = ctypes.c_void_p(), ctypes.c_void_p()
        ok(cuda.cuModuleLoadData(ctypes.byref(module), cubin))
        ok(cuda.cuModuleGetFunction(ctypes.byref(f), module, symbol.encode()))
        ok(cuda.cuFuncSetAttribute(f, 8, shared))
        loaded[key] = (f, res, symbol, cubin)
    return loaded[key][0]


def launch(f, grid, threads, shared, args):
    p = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    ok(cuda.cuLaunchKernel(f, grid, 1, 1, threads, 1, 1, shared, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), p, None))


def strides(x):  # x: b, h, s, d views
    return Strides(x.stride(0) if x.shape[0] > 1 else 0, x.stride(1) if x.shape[1] > 1 else 0, x.stride(2))


cdiv = lambda a, b: -(-a // b)

# ---- configurations: what a planner would choose -----------------------------------------------------------------

FORWARD = {32: dict(warps=4, tiles=2, step=64, ctas=3, q_registers=True), 80: dict(warps=4, tiles=2, step=64, ctas=2, lazy=True), 96: dict(warps=4, tiles=2, step=64, ctas=2, lazy=True), 64: dict(warps=4, tiles=2, step=64, ctas=2, q_registers=True), 128: dict(warps=4, tiles=2, step=64, ctas=2, lazy=True),
           256: dict(warps=8, tiles=1, step=64, ctas=1)}
BACKWARD = {80: dict(warps=4, tiles=1, step=64, part=64, ctas=2, split_q=4), 96: dict(warps=4, tiles=1, step=64, part=64, ctas=2, split_q=2), 32: dict(warps=4, tiles=2, step=64, part=32, ctas=2), 64: dict(warps=4, tiles=2, step=64, part=32, ctas=2, delay=True), 128: dict(warps=8, tiles=1, step=64, part=64, ctas=1)}

WIDE_FORWARD = {256: dict(warps=8, tiles=2, step=64, split_q=4), 512: dict(warps=8, tiles=1, step=64, split_q=4)}
WIDE_BACKWARD = {96: dict(warps=4, tiles=2, step=64, split_k=2, split_o=2, split_q=4, ctas=2),
                 128: dict(warps=4, tiles=2, step=64, split_k=2, split_o=2, split_q=2, ctas=2), 256: dict(warps=8, tiles=2, step=64, split_k=2, split_o=2, split_q=2, ctas=1),
                 512: dict(warps=8, tiles=1, step=32, split_k=2, split_o=1, split_q=1, ctas=1)}
DQ = {32: dict(warps=4, tiles=2, step=64, ctas=2), 64: dict(warps=4, tiles=2, step=64, ctas=2), 128: dict(warps=4, tiles=2, step=32, ctas=2)}
BIAS_GRADIENT = {32: dict(warps=4, tiles=2, step=64, split_q=4, ctas=3, part=32), 64: dict(warps=4, tiles=2, step=128, split_q=2, ctas=1, part=64),
                 128: dict(warps=4, tiles=2, step=128, split_q=2, ctas=1, part=64, stages=1)}

WIDE_EIGHT = dict(warps=8, split_k=4, split_o=4, split_q=4, ctas=1)  # with a bias tile two CTAs of four warps do not fit
FP32 = {64: dict(f=dict(warps=4, tiles=1, step=64, ctas=2), b=dict(warps=4, step=32, part=32, ctas=2, split_q=2))}


class Problem:
    def __init__(self, B, H, S, D, Sk=None, Hk=None, causal=False, type="Type::bf16", bias=None, dropout=0.0, bias_odd=False, fill=1.0, window=(-1, -1)):
        self.B, self.H, self.S, self.D, self.Sk, self.Hk = B, H, S, D, Sk or S, Hk or H
        self.causal, self.type, self.dropout, self.window = causal, type, dropout, window
        t = DTYPES[type]
        make = lambda h, s: (torch.randn(B, s, h, D, device="cuda") * fill).to(t).transpose(1, 2)
        self.q, self.k, self.v, self.do = make(H, S), make(self.Hk, self.Sk), make(self.Hk, self.Sk), make(H, S)
        self.bias = None
        if bias:  # bias: (b, h) of the bias, 1 where broadcast
            width = self.Sk + 1 if bias_odd else cdiv(self.Sk, 8) * 8
            make_bias = lambda x: x.to(t)[..., :self.Sk]
            self.bias = make_bias(torch.randn(bias[0], bias[1], S, width, device="cuda"))
        self.bias_kind = "Bias::none" if not bias else "Bias::element" if bias_odd else "Bias::tile"
        poison = lambda x: torch.full_like(x, float("nan"))
        self.o, self.dq, self.dk, self.dv = (poison(x) for x in (self.q, self.q, self.k, self.v))
        self.dbias = make_bias(torch.full((bias[0], bias[1], S, width), float("nan"), device="cuda")) if bias else None
        self.lse = torch.full((B, H, S), float("nan"), device="cuda")
        self.scale = D ** -0.5
        self.seed, self.offset = 0x123456789abcdef, 7
        self.args = None

    def arguments(self, backward=False):
        a = Args()
        for n, x in dict(q=self.q, k=self.k, v=self.v, o=self.o, d_o=self.do, out=self.o, dk=self.dk, dv=self.dv, dq=self.dq, lse=self.lse).items():
            setattr(a, n, x.data_ptr())
        a.qs, a.ks, a.vs, a.os, a.dos, a.outs, a.dks, a.dvs, a.dqs = (strides(x) for x in (self.q, self.k, self.v, self.o, self.do, self.o, self.dk, self.dv, self.dq))
        if self.bias is not None:
            a.bias, a.biases, a.bias_k = self.bias.data_ptr(), strides(self.bias), 1
            a.dbias = self.dbias.data_ptr()
        a.batch, a.heads, a.heads_k, a.sq, a.sk, a.sq_pad, a.scale = self.B, self.H, self.Hk, self.S, self.Sk, cdiv(self.S, 128) * 128, self.scale
        shift, (left, right) = self.Sk - self.S, self.window
        a.low, a.high = shift - (left if left >= 0 else 1 << 29), shift + (0 if self.causal else right if right >= 0 else 1 << 29)
        T = int(math.floor(self.dropout * 65536 + 0.5))
        a.drop, a.keep_scale, a.seed, a.offset = T, 65536 / (65536 - T) if self.dropout else 1.0, self.seed, self.offset
        if backward:
            n = self.B * self.H * a.sq_pad
            if not hasattr(self, "work"): self.work = torch.full((n * (self.D + 2),), float("nan"), device="cuda")  # shared by all variants
            a.lse_pad, a.delta_pad, a.dq_sum = self.work.data_ptr(), self.work.data_ptr() + n * 4, self.work.data_ptr() + n * 8
        return a

    def features(self):
        return {k: v for k, v in dict(type=self.type, d=self.D, causal=self.causal or self.window != (-1, -1), bias=self.bias_kind, dropout=self.dropout > 0).items() if v not in (False, "Bias::none", "Type::bf16")}

    def forward(self, **config):
        c = {**FORWARD[self.D], **config}
        if self.bias is not None and self.D == 128: c = {**c, "step": 32, **config}
        if self.dropout and self.D == 64: c = {**c, "lazy": True, "early": True, **config}
        a = self.arguments()
        M = c["warps"] * c["tiles"] * 16
        shared = M * self.D * 2 + c.get("stages", 2) * (2 * c["step"] * self.D * 2 + (M * c["step"] * 2 if self.bias_kind == "Bias::tile" else 0))
        spec = {**c, **self.features()}
        f = kernel("forward", shared, **spec)
        grid = cdiv(self.S, M) * self.B * self.H
        self.keep = a
        return lambda: launch(f, grid, c["warps"] * 32, shared, a)

    def store_ds(self): return self.bias is not None and tuple(self.bias.shape[:2]) == (self.B, self.H)

    def backward(self, **config):
        c = {**BACKWARD[self.D], **(dict(delay=False) if self.bias is not None else {}), **config}
        N, M = c["warps"] * c["tiles"] * 16, c["step"]
        shared = 2 * N * self.D * 2 + c.get("stages", 2) * (2 * M * self.D * 2 + M * 8 + (M * N * 2 if self.bias_kind == "Bias::tile" else 0)) + N * M * 2 * (2 if c.get("delay") else 1)
        return self.three("backward", {**c, **(dict(store_ds=True) if self.store_ds() else {})}, N, shared)

    def three(self, name, c, N, shared):
        a = self.arguments(True)
        small = {k: v for k, v in self.features().items() if k in ("d", "type", "bias")}
        prepare, f, convert = kernel("prepare", 0, **small), kernel(name, shared, **{**c, **self.features()}), kernel("convert", 0, **{k: v for k, v in small.items() if k != "bias"})
        lanes = self.D // 8 if self.D // 8 in (2, 4, 8, 16, 32) else 32
        grid0 = self.B * self.H * cdiv(a.sq_pad, 256 // lanes)
        grid1 = cdiv(self.Sk, N) * self.B * self.Hk
        grid2 = cdiv(self.B * self.H * self.S * self.D // 8, 256)

        def run(only=None, bias_gradient=None):
            if c.get("store_ds") and self.causal and only is None: self.dbias.zero_()
            if only in (None, 0): launch(prepare, grid0, 256, 0, a)
            if only in (None, 1): launch(f, grid1, c["warps"] * 32, shared, a)
            if only in (None, 2): launch(convert, grid2, 256, 0, a)
            if bias_gradient and only in (None, 3): bias_gradient(a)
        return run

    def wide_forward(self, **config):
        c = {**WIDE_FORWARD[self.D], **config}
        a = self.arguments()
        M = c["split_q"] * c["tiles"] * 16
        N = c["step"]
        shared = M * self.D * 2 + 2 * N * self.D * 2 + M * N * 2 + M * (c["warps"] // c["split_q"]) * 4 + M * 4
        f = kernel("wide_forward", shared, **{**c, **self.features()})
        grid = cdiv(self.S, M) * self.B * self.H
        return lambda: launch(f, grid, c["warps"] * 32, shared, a)

    def wide_backward(self, **config):
        c = {**WIDE_BACKWARD[self.D], **(WIDE_EIGHT if self.D == 128 and self.bias is not None else {}), **config}
        N, M = c["split_k"] * c["tiles"] * 16, c["step"]
        shared = 2 * N * self.D * 2 + c.get("stages", 2) * (2 * M * self.D * 2 + M * 8 + (M * N * 2 if self.bias_kind == "Bias::tile" else 0)) + 2 * N * M * 2
        return self.three("wide_backward", c, N, shared)

    def two_pass(self, **config):
        """deterministic: backward without dQ, then backward_dq"""
        c = {**(BACKWARD if self.D in (32, 64) else WIDE_BACKWARD)[self.D], "dq": False, "delay": False}
        if self.D == 128 and self.bias is not None: c.update(WIDE_EIGHT)
        more = config.pop("b", {})
        c.update(more)
        a = self.arguments(True)
        M = c["step"]
        if self.D in (32, 64):
            name, N = "backward", c["warps"] * c["tiles"] * 16
            shared = 2 * N * self.D * 2 + 2 * (2 * M * self.D * 2 + M * 8 + (M * N * 2 if self.bias_kind == "Bias::tile" else 0))
        else:
            name, N = "wide_backward", c["split_k"] * c["tiles"] * 16
            shared = 2 * N * self.D * 2 + 2 * (2 * M * self.D * 2 + M * 8 + (M * N * 2 if self.bias_kind == "Bias::tile" else 0)) + 2 * N * M * 2
        q = {**DQ[self.D], **config}
        Mq, Nq = q["warps"] * q["tiles"] * 16, q["step"]
        shared_q = 2 * Mq * self.D * 2 + 2 * (2 * Nq * self.D * 2 + (Mq * Nq * 2 if self.bias_kind == "Bias::tile" else 0))
        small = {k: v for k, v in self.features().items() if k in ("d", "type", "bias")}
        prepare, f, g = kernel("prepare", 0, **small, dq=False), kernel(name, shared, **{**c, **self.features()}), kernel("backward_dq", shared_q, **{**q, **self.features()})
        lanes = self.D // 8 if self.D // 8 in (2, 4, 8, 16, 32) else 32
        grid0, grid1, grid2 = self.B * self.H * cdiv(a.sq_pad, 256 // lanes), cdiv(self.Sk, N) * self.B * self.Hk, cdiv(self.S, Mq) * self.B * self.H

        def run(only=None):
            if only in (None, 0): launch(prepare, grid0, 256, 0, a)
            if only in (None, 1): launch(f, grid1, c["warps"] * 32, shared, a)
            if only in (None, 2): launch(g, grid2, q["warps"] * 32, shared_q, a)
        return run

    def bias_gradient(self, chunks=1, **config):
        c = {**BIAS_GRADIENT[self.D], **config}
        M, N = c["split_q"] * c["tiles"] * 16, c["step"]
        shared = M * N * 2 + 2 * M * 8 + c.get("stages", 2) * (M + N) * self.D * 4
        f = kernel("bias_gradient", shared, **{**c, **{k: v for k, v in self.features().items() if k != "bias"}})
        planes = self.bias.shape[0] * self.bias.shape[1]
        grid = cdiv(self.Sk, N) * cdiv(self.S, M) * chunks * planes
        sum_f = kernel("bias_gradient_sum", 0, **{k: v for k, v in self.features().items() if k == "type"}) if chunks > 1 else None
        partial = torch.full((chunks * planes * self.S * self.Sk,), float("nan"), device="cuda") if chunks > 1 else None

        def run(a):
            a.list, a.chunks = self.B * self.H // planes, chunks
            if chunks > 1: a.dbias_sum = partial.data_ptr()
            launch(f, grid, c["warps"] * 32, shared, a)
            if chunks > 1: launch(sum_f, cdiv(planes * self.S * self.Sk, 256), 256, 0, a)
        return run

    def fp32(self, **config):
        """run(which): 0 measure and split q, k, v; 1 forward; 2 measure and split all four, prepare, backward, convert"""
        c = {**FP32[self.D], **config}
        f, bw = {**c.pop("f"), **c.pop("more_f", {})}, {**c.pop("b"), **c.pop("more_b", {})}
        a = self.arguments(True)
        D, BH, BK = self.D, self.B * self.H, self.B * self.Hk
        n = [BH * self.S, BK * self.Sk, BK * self.Sk, BH * self.S]
        if not hasattr(self, "pairs"): self.pairs = torch.full((sum(n) * 2 * D,), float("nan"), device="cuda", dtype=torch.float16)
        a.qx = self.pairs.data_ptr()
        a.kx, a.vx, a.dox = (a.qx + sum(n[:i]) * 4 * D for i in (1, 2, 3))
        if not hasattr(self, "sizes"): self.sizes = torch.zeros(6 * BH, device="cuda", dtype=torch.int32)
        a.sizes = self.sizes.data_ptr()
        extra = dict(causal=True) if self.causal else {}
        M, N = f["warps"] * f["tiles"] * 16, f["step"]
        shared = M * D * 4 + 2 * 2 * N * D * 4
        forward = kernel("fp32_forward", shared, d=D, **f, **extra)
        Nb, Mb = bw["warps"] * 16, bw["step"]
        shared_b = 2 * Nb * D * 4 + 2 * Nb * Mb * 2 + 2 * (2 * Mb * D * 4 + Mb * 8)
        backward = kernel("fp32_backward", shared_b, d=D, **bw, **extra)
        measure, split, prepare, convert = (kernel("fp32_" + k, 0, d=D) for k in ("measure", "split", "prepare", "convert"))
        gm = max(cdiv(self.S, 64) * BH, cdiv(self.Sk, 64) * BK)
        gs = cdiv(max(n) * D // 4, 256)

        def run(which):
            if which in (0, 2):
                self.sizes.zero_()
                for k, g in ((measure, gm), (split, gs)):
                    p = (ctypes.c_void_p * 1)(ctypes.addressof(a))
                    ok(cuda.cuLaunchKernel(k, g, 3 if which == 0 else 4, 1, 256, 1, 1, 0, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), p, None))
            if which in (0, 1): launch(forward, cdiv(self.S, M) * BH, f["warps"] * 32, shared, a)
            if which in (2, 3): launch(prepare, BH * a.sq_pad // 8, 256, 0, a)
            if which in (2, 3): launch(backward, cdiv(self.Sk, Nb) * BK, bw["warps"] * 32, shared_b, a)
            if which in (2, 3): launch(convert, cdiv(BH * self.S * D // 2, 256), 256, 0, a)
        return run

    # The formula in a given type, with `round` applied where a kernel keeps 16 bits. Bottom-right causal.
    def best_backward(self, **config):
        return self.backward(**config) if self.D in (32, 64, 80) else self.wide_backward(**config)

    def naive(self, type, round=lambda x: x, keep=None):
        G = self.H // self.Hk
        q, k, v, do = (x.to(type) for x in (self.q, self.k, self.v, self.do))
        k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
        s = q @ k.transpose(-1, -2) * self.scale
        if self.bias is not None: s = s + self.bias.to(type)
        if self.causal:
            i, j = torch.arange(self.S, device="cuda")[:, None], torch.arange(self.Sk, device="cuda")
            s = s.masked_fill(j > i + self.Sk - self.S, float("-inf"))
        if self.window != (-1, -1):
            i, j = torch.arange(self.S, device="cuda")[:, None] + self.Sk - self.S, torch.arange(self.Sk, device="cuda")
            if self.window[0] >= 0: s = s.masked_fill(j < i - self.window[0], float("-inf"))
            if self.window[1] >= 0: s = s.masked_fill(j > i + self.window[1], float("-inf"))
        lse = torch.logsumexp(s, -1)
        p = torch.nan_to_num(torch.exp(s - lse[..., None]), nan=0.0)
        if keep is None: kept, factor = p, 1.0
        else:
            T = int(math.floor(self.dropout * 65536 + 0.5)); factor = 65536 / (65536 - T)
            kept = p * keep
        o = (round(kept) @ v) * factor
        o16 = round(o)
        dp = do @ v.transpose(-1, -2)
        if keep is not None: dp = dp * keep * factor
        ds = p * (dp - (do * o16).sum(-1, keepdim=True))
        dv = (round(kept).transpose(-1, -2) @ do * factor).unflatten(1, (self.Hk, G)).sum(2)
        dk = (round(ds).transpose(-1, -2) @ q * self.scale).unflatten(1, (self.Hk, G)).sum(2)
        dq = round(ds) @ k * self.scale
        dbias = None
        if self.bias is not None:
            dbias = ds
            for dim in (0, 1):
                if self.bias.shape[dim] == 1: dbias = dbias.sum(dim, keepdim=True)
        return dict(o=o, lse=lse, dq=dq, dk=dk, dv=dv, dbias=dbias)


def philox_keep(P):  # the rule of dropout, by the formula, for every (b, h)
    M32 = 0xFFFFFFFF
    def head(seed, offset, n):
        c = [offset & M32, offset >> 32, n & M32, (n >> 32) ^ 0x666F7665]; a, b = seed & M32, seed >> 32
        for _ in range(10):
            p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(q >> 32) ^ c[1] ^ a, q & M32, (p >> 32) ^ c[3] ^ b, p & M32]
            a, b = (a + 0x9E3779B9) & M32, (b + 0xBB67AE85) & M32
        return c
    i, j = torch.arange(P.S, device="cuda", dtype=torch.int64)[:, None], torch.arange(P.Sk, device="cuda", dtype=torch.int64)[None]
    T = int(math.floor(P.dropout * 65536 + 0.5))
    out = torch.empty(P.B, P.H, P.S, P.Sk, device="cuda", dtype=torch.bool)
    for n in range(P.B * P.H):
        k0, k1, w0, w1 = head(P.seed, P.offset, n)
        x, y = (((i >> 4) * 8 + (i & 7)) ^ w0).expand(P.S, P.Sk), (((j >> 4) * 8 + (j & 7)) ^ w1).expand(P.S, P.Sk)
        for r in range(8):
            lo16, hi16 = (x & 0xFFFF) * 0xD256D193, (x >> 16) * 0xD256D193  # 64-bit product without overflow
            hi = (hi16 + (lo16 >> 16)) >> 16
            lo = (lo16 + ((hi16 & 0xFFFF) << 16)) & M32
            x, y = hi ^ y ^ (((k1 if r & 1 else k0) + r * 0x9E3779B9) & M32), lo
        word = torch.where((i >> 3 & 1) == 1, y, x)
        out[n // P.H, n % P.H] = (torch.where((j >> 3 & 1) == 1, word >> 16, word & 0xFFFF)) >= T
    return out


def errors(got, want):
    e = (got.double() - want.double()).abs()
    if not torch.isfinite(got).all(): return float("nan"), float("nan")
    return e.max().item(), e.mean().item()


failures = []


def check(label, P, names, forward=None, backward=None, extra=None):
    keep = philox_keep(P) if P.dropout else None
    want = P.naive(torch.float64, keep=keep)
    t = DTYPES[P.type]
    plain = P.naive(torch.float32, (lambda x: x.to(t).float()) if t != torch.float32 else (lambda x: x), keep=keep)
    if forward: forward()
    if backward: backward()
    if extra: extra()
    torch.cuda.synchronize()
    report = []
    for n in names:
        got = getattr(P, n)
        if n == "lse":
            dead = torch.isinf(want["lse"])
            good = (got[dead] == float("-inf")).all().item() and ((got - want["lse"])[~dead].abs().max().item() if (~dead).any() else 0) < (1e-5 if t != torch.float32 else max(2e-5, 2 * (plain["lse"] - want["lse"])[~dead].abs().max().item()))
            report.append(f"lse {'ok' if good else 'WRONG'}")
            if not good: failures.append(f"{label} lse")
            continue
        e, m = errors(got, want[n]); pe, pm = errors(plain[n].to(t), want[n])
        tiny = 1e-5 * want[n].abs().max().item() if t != torch.float32 else 1e-7 * want[n].abs().max().item()
        good = e <= 2 * pe + tiny and m <= 2 * pm + tiny
        report.append(f"{n} {e / max(pe, 1e-30):.2f}/{m / max(pm, 1e-30):.2f}{'' if good else ' WRONG %.3g vs %.3g, mean %.3g vs %.3g' % (e, pe, m, pm)}")
        if not good: failures.append(f"{label} {n}")
    print("check", label, "|", "; ".join(report), flush=True)


def timed(fs, target=0.02, rounds=3):
    """Median over three interleaved runs of the mean milliseconds of each function."""
    times = [[] for _ in fs]
    counts = []
    for f in fs:
        try:
            f(); torch.cuda.synchronize()
            s, e = torch.cuda.Event(True), torch.cuda.Event(True)
            s.record(); f(); e.record(); torch.cuda.synchronize()
            counts.append(max(3, min(100, int(target * 1e3 / max(s.elapsed_time(e), 1e-3)))))
        except Exception as x:
            print("  refused:", str(x)[:100].replace("\n", " "))
            counts.append(0)
    for _ in range(rounds):
        for i, f in enumerate(fs):
            if not counts[i]: times[i].append(float("nan")); continue
            f()
            s, e = torch.cuda.Event(True), torch.cuda.Event(True)
            s.record()
            for _ in range(counts[i]): f()
            e.record(); torch.cuda.synchronize()
            times[i].append(s.elapsed_time(e) / counts[i])
    return [statistics.median(x) for x in times]


def peers(P, which, backward=False, bias_grad=False):
    fs = {}
    G = P.H // P.Hk
    for n in which:
        backend = dict(flash=SDPBackend.FLASH_ATTENTION, mem=SDPBackend.EFFICIENT_ATTENTION, cudnn=SDPBackend.CUDNN_ATTENTION)[n]
        q, k, v = (x.detach().requires_grad_(backward) for x in (P.q, P.k, P.v))
        bias = None if P.bias is None else P.bias.detach().requires_grad_(bias_grad)
        def call(backend=backend, q=q, k=k, v=v, bias=bias):
            with sdpa_kernel(backend):
                m = None if bias is None else bias.expand(P.B, P.H, P.S, P.Sk)
                return F.scaled_dot_product_attention(q, k, v, attn_mask=m, is_causal=P.causal, dropout_p=P.dropout, enable_gqa=G > 1)
        if not backward:
            def run(call=call):
                with torch.no_grad(): call()
            fs[n] = run
        else:
            try: o = call()
            except Exception as x:
                print("  refused:", n, str(x)[:80].replace("\n", " ")); continue
            inputs = [q, k, v] + ([bias] if bias_grad else [])
            fs[n] = lambda o=o, inputs=inputs: torch.autograd.grad(o, inputs, P.do, retain_graph=True)
    return fs


rows = []


def row(label, flops, fs):
    ms = timed(list(fs.values()))
    r = f"{label:34s} " + "  ".join(f"{n} {flops / t / 1e9:5.0f}" if t == t else f"{n}   -" for n, t in zip(fs, ms))
    rows.append(r)
    print(r, flush=True)


def flops(P, backward=False):
    pairs = P.S * P.Sk if not P.causal else sum(max(0, min(P.Sk, i + P.Sk - P.S + 1)) for i in range(P.S))
    return 4 * P.B * P.H * pairs * P.D * (2.5 if backward else 1)


def finish():
    print("\n==== table (TFLOP/s)")
    for r in rows: print(r)
    print("FAILED: " + ", ".join(failures) if failures else "all checks passed")
