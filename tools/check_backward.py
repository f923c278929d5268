#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Check and measure the kernels of the backward on a GPU, without the library: NVRTC, the driver and PyTorch alone.

    tools/check_backward.py check [PATTERN]    every feature against fp64, outputs poisoned, new inputs each run
    tools/check_backward.py speed              beside PyTorch's kernels, a short table last

An error passes where it is at most twice that of the same formula in fp32 with the roundings of the type.
"""

import concurrent.futures
import ctypes
import math
import os
import re
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
import nvrtc  # noqa: E402

ARCH = 90
SHARED = int(os.environ.get("SHARED", 227 * 1024))
MULTI = int(os.environ.get("MULTI", 228 * 1024))
KINDS = {"kBf16": torch.bfloat16, "kFp16": torch.float16, "kFp32": torch.float32}
LOG2E = 1.4426950408889634

# ---- Args, from the text of its headers ----

SCALARS = {"bool": ctypes.c_bool, "int": ctypes.c_int, "float": ctypes.c_float, "i64": ctypes.c_longlong,
           "u64": ctypes.c_ulonglong, "u32": ctypes.c_uint, "math::Rng": ctypes.c_int}


def structure(text, name):
    body = re.search(r"struct " + name + r" \{(.*?)\n\};", text, re.S).group(1)
    body = re.sub(r"//[^\n]*", "", body)
    fields = []
    for kind, names in re.findall(r"^  (?:const )?([\w:]+\*?) ((?:\w+(?: = [^;,]+)?(?:, )?)+);", body, re.M):
        for field in names.split(","):
            field = field.split("=")[0].strip()
            base = kind.removeprefix("math::") if kind not in SCALARS else kind
            fields.append((field, ctypes.c_void_p if kind.endswith("*") else SCALARS[kind] if kind in SCALARS else TYPES[base]))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


TYPES = {}
rows_text = (nvrtc.ROOT / "src/math/rows.h").read_text()
args_text = (nvrtc.ROOT / "src/cuda/device/args.h").read_text()
for n in ("Strides", "Lengths", "Rows"):
    TYPES[n] = structure(rows_text, n)
for n in ("Tensor", "Seed", "Args"):
    TYPES[n] = structure(args_text, n)
Args = TYPES["Args"]

# ---- launching ----

cuda = ctypes.CDLL("libcuda.so.1")
loaded = {}
built = {}
failures = []


def ok(r):
    if r:
        s = ctypes.c_char_p()
        cuda.cuGetErrorString(r, ctypes.byref(s))
        raise RuntimeError(f"CUDA {r} {s.value}")


def key_of(name, file, spec):
    return name, file, tuple(sorted(spec.items()))


def prebuild(keys):
    """All instances, by as many threads as there are processors."""
    keys = [k for k in dict.fromkeys(keys) if k not in built]

    def one(k):
        return k, nvrtc.build(k[0], ARCH, k[1], **dict(k[2]))

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for future in [pool.submit(one, k) for k in keys]:
            try:
                k, b = future.result()
                built[k] = b
            except RuntimeError as x:
                print(str(x)[:3000])
                failures.append("compile")


def kernel(name, file, spec, shared):
    key = key_of(name, file, spec)
    if key not in loaded:
        if key not in built:
            built[key] = nvrtc.build(name, ARCH, file, **spec)
        b = built[key]
        module, f = ctypes.c_void_p(), ctypes.c_void_p()
        ok(cuda.cuModuleLoadData(ctypes.byref(module), b.cubin))
        ok(cuda.cuModuleGetFunction(ctypes.byref(f), module, b.symbol.encode()))
        loaded[key] = f
    ok(cuda.cuFuncSetAttribute(loaded[key], 8, shared))
    return loaded[key]


def launch(f, grid, threads, shared, args):
    if grid == 0:
        return
    p = (ctypes.c_void_p * 1)(ctypes.addressof(args))
    ok(cuda.cuLaunchKernel(f, grid, 1, 1, threads, 1, 1, shared, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), p, None))


def cdiv(a, b):
    return -(-a // b)


# ---- sizes, as sm80_backward_sizes.h has them ----

BIAS = {"kNone": 0, "kBf16": 2, "kFp16": 2, "kFp32": 4}


def size(s):
    return 4 if s["type"] == "kFp32" else 2


def inputs(s, queries, keys, transposed):
    words = keys // 32 if keys >= 32 else 1
    vector = s.get("query_term") if transposed else s.get("key_term")
    return (queries * keys * (BIAS[s.get("bias", "kNone")] + BIAS[s.get("bias2", "kNone")]) + (queries * words * 4 if s.get("mask") else 0) +
            ((queries if transposed else keys) * 4 if vector else 0))


def backward_shared(s):
    keys = s["warps"] * s["tiles"] * 16
    grads = keys * s["step"] * size(s) * (2 if s.get("delay") else 1) if s.get("dq") else 0
    stage = s["step"] * (s["d"] + s["dv"]) * size(s) + 8 * s["step"] + inputs(s, s["step"], keys, True)
    return keys * (s["d"] + s["dv"]) * size(s) + grads + s["stages"] * stage


def wide_shared(s):
    keys = s["grid_s"] * s["tiles"] * 16
    stage = s["step"] * (s["d"] + s["dv"]) * size(s) + 8 * s["step"] + inputs(s, s["step"], keys, True)
    sums = keys * (s["step"] // s["part"]) * 4 if s.get("column_sum") else 0
    return keys * (s["d"] + s["dv"]) * size(s) + 2 * keys * s["step"] * size(s) + sums + s.get("stages", 2) * stage


def dq_shared(s):
    rows = s["warps"] * s["tiles"] * 16
    stage = s["step"] * (s["d"] + s["dv"]) * size(s) + inputs(s, rows, s["step"], False)
    return rows * (s["d"] + s["dv"]) * size(s) + rows * 8 + s.get("stages", 2) * stage


def chunked_shared(s, transposed):
    rows = s["warps"] * s["tiles"] * 16
    buffer = max((rows + s["step"]) * s["d"] * size(s), s["step"] * s["dv"] * size(s), rows * s["dv"])
    queries, keys = (s["step"], rows) if transposed else (rows, s["step"])
    return 2 * buffer + 2 * (8 * queries + inputs(s, queries, keys, transposed))


def bias_shared(s):
    rows = s["grid_s"] * s["tiles"] * 16
    once = s.get("bias", "kNone") != "kNone" and s.get("bias2", "kNone") == "kNone" and not any(s.get(x) for x in ("mask", "key_term", "query_term", "ragged"))
    work = 16 * rows + inputs(s, rows, s["step"], False) * (1 if once else 2) + s.get("stages", 2) * (rows + s["step"]) * (s["d"] + s["dv"]) * size(s)
    return max(work, rows * s["step"] * 2)


def fits(s, shared):
    return shared <= SHARED and (shared + 1024) * s["ctas"] <= MULTI


# ---- configurations: what a planner would choose ----


NAMES = ("warps", "tiles", "step", "part", "ctas", "grid_s", "grid_o", "grid_q", "stages", "delay")
USUAL = (4, 2, 64, 64, 2, 1, 1, 1, 2, False)


def tiles(*values):
    return dict(zip(NAMES, values + USUAL[len(values):]))


def work(s):
    n = sum(bool(s.get(x)) for x in ("softcap", "alibi", "mask", "key_term", "query_term")) + sum(s.get(x, "kNone") != "kNone" for x in ("bias", "bias2", "dropout"))
    return 2 if n >= 3 or "kFp32" in (s.get("bias"), s.get("bias2")) else 1 if n else 0


def narrow_candidates(s):  # as config/sm80_backward.cpp
    w = work(s)
    part = 16 if w else 32
    if s["type"] == "kFp32":
        part = 16 if w == 2 or s.get("softcap") else 32
        return [tiles(4, 1, 32, part, 2, 1, 1, 2), tiles(4, 1, 32, 16, 1, 1, 1, 2), tiles(2, 1, 16, 16, 1, 1, 1, 1)]
    q = 2 if s["d"] % 32 == 0 else 4
    if w == 2:
        c = [tiles(4, 1, 64, 32, 2, 1, 1, q, 2, True), tiles(4, 1, 64, 32, 2, 1, 1, q), tiles(4, 1, 64, 32, 1, 1, 1, q)]
    else:
        one = not any(s.get(x) for x in ("softcap", "alibi", "mask", "key_term", "query_term")) and (not s.get("dropout") or not s.get("bias")) and not s.get("bias2")
        part = 32 if w == 0 or one else 16
        step, q = (64, q) if s.get("dq") else (32, 1)
        c = [tiles(4, 2, step, part, 2, 1, 1, q, 2, True), tiles(4, 2, step, part, 2, 1, 1, q), tiles(4, 2, step, part, 1, 1, 1, q)]
    return c + [tiles(2, 1, 32, 16, 1, 1, 1, 2)]


def wide_candidates(s):
    w = max(s["d"], s["dv"])
    both = lambda step: s["d"] % step == 0 and s["dv"] % step == 0
    if s["type"] == "kFp32":
        if w <= 128:
            return ([tiles(8, 1, 32, 16, 1, 4, 4, 2) if both(64) else tiles(8, 1, 64, 32, 1, 4, 4, 4), tiles(4, 1, 32, 16, 1, 2, 2, 2)] +
                    ([tiles(4, 1, 16, 16, 1, 2, 2, 1)] if both(64) else []) + [tiles(2, 1, 16, 16, 1, 1, 1, 1)])
        if w <= 256:
            return [tiles(8, 1, 32, 16, 1, 2, 2, 2), tiles(4, 1, 16, 16, 1, 1, 1, 1)] if both(64) else [tiles(4, 1, 32, 16, 1, 2, 2, 2), tiles(2, 1, 16, 16, 1, 1, 1, 1)]
        return [tiles(8, 1, 16, 16, 1, 1, 1, 1)]
    if w <= 128:
        if not both(32):
            return [tiles(4, 2, 64, 32, 2, 2, 4, 4), tiles(4, 2, 64, 32, 1, 2, 4, 4), tiles(2, 2, 32, 16, 1, 1, 2, 2)]
        if work(s) == 2:
            return [tiles(8, 1, 64, 32, 1, 4, 4, 4), tiles(4, 2, 32, 16, 1, 2, 2, 2), tiles(2, 1, 16, 16, 1, 1, 1, 1)]
        return [tiles(4, 2, 64, 32, 2, 2, 2, 4 if w <= 96 else 2), tiles(8, 2, 64, 32, 1, 4, 4, 4), tiles(4, 2, 32, 16, 1, 2, 2, 2)]
    if w <= 256:
        best = tiles(8, 2, 64, 16, 1, 2, 2, 2) if s["d"] == s["dv"] and both(64) else tiles(8, 2, 64, 16, 1, 2, 4, 4)
        return [best, tiles(4, 1, 32, 16, 1, 2, 2, 2)] + ([tiles(4, 1, 16, 16, 1, 2, 2, 1)] if both(64) else [])
    return [tiles(8, 1, 32, 8, 1, 2, 2, 1), tiles(8, 1, 16, 8, 1, 2, 2, 1)]


def dq_candidates(s):
    w = max(s["d"], s["dv"])
    if s["type"] == "kFp32":
        share = 4 if s["d"] > 256 else 2 if s["d"] > 128 and work(s) else 1
        return [tiles(4, 1, 32, 0, 2, 1, share), tiles(4, 1, 32, 0, 1, 1, share), tiles(4, 1, 16, 0, 1, 1, share), tiles(2, 1, 16, 0, 1, 1, share),
                tiles(2, 1, 16, 0, 1, 1, share, 1, 1), tiles(1, 1, 16, 0, 1, 1, share, 1, 1)]
    if w <= 64:
        return ([] if work(s) else [tiles(4, 2, 64, 0, 2)]) + [tiles(4, 2, 32, 0, 2), tiles(4, 2, 32, 0, 1), tiles(4, 1, 32, 0, 1)]
    if w <= 128 and work(s) == 2:
        return [tiles(4, 1, 32, 0, 2), tiles(4, 1, 32, 0, 1), tiles(4, 1, 16, 0, 1)]
    if w <= 128:
        return [tiles(4, 2, 32, 0, 2), tiles(4, 2, 32, 0, 1), tiles(4, 1, 32, 0, 1), tiles(4, 1, 16, 0, 1)]
    share = 2 if s["d"] > 256 else 1
    return [tiles(4, 1, 32, 0, 1, 1, share), tiles(4, 1, 16, 0, 1, 1, share), tiles(2, 1, 16, 0, 1, 1, share), tiles(2, 1, 16, 0, 1, 1, share, 1, 1)]


def bias_candidates(s):
    w = max(s["d"], s["dv"])
    if s["type"] == "kFp32":
        c = [tiles(4, 1, 32, 32, 1, 4), tiles(4, 1, 32, 32, 1, 4, 1, 1, 1)]
    elif w <= 32:
        c = [tiles(4, 2, 64, 32, 3, 4), tiles(4, 2, 64, 32, 2, 4), tiles(4, 2, 64, 32, 1, 4), tiles(4, 1, 32, 32, 1, 4)]
    elif w <= 64:
        c = [tiles(4, 2, 128, 64, 1, 2), tiles(4, 2, 64, 32, 1, 4), tiles(4, 1, 32, 32, 1, 4)]
    elif w <= 128:
        c = [tiles(4, 2, 128, 64, 1, 2, 1, 1, 1), tiles(4, 1, 64, 32, 1, 2, 1, 1, 1)]
    else:
        c = []
    if not (work(s) == 1 and (s.get("bias") or s.get("bias2")) and not any(s.get(x) for x in ("softcap", "alibi", "mask", "key_term", "query_term", "dropout"))):
        c = [x for x in c if x["step"] <= 64 and x["ctas"] <= 2]
    return c + [tiles(4, 1, 32, 16, 1, 2, 1, 1, 1), tiles(2, 1, 32, 16, 1, 2, 1, 1, 2), tiles(2, 1, 16, 16, 1, 2, 1, 1, 1), tiles(1, 1, 16, 16, 1, 1, 1, 1, 1)]


def choose(candidates, base, shared):
    for c in candidates(base):
        s = {**base, **c}
        if fits(s, shared(s)):
            return s
    return None


# ---- problems ----


def strides5(x):
    """(batch1, batch2, head, row, col) of a tensor of five dimensions; 0 where it has one element."""
    s = TYPES["Strides"]()
    for i, n in enumerate(("batch1", "batch2", "head", "row", "col")):
        setattr(s, n, x.stride(i) if x.shape[i] > 1 or n == "col" else 0)
    return s


def tensor(x, strides=None):
    t = TYPES["Tensor"]()
    t.data = x.data_ptr()
    t.strides = strides or strides5(x)
    return t


class Problem:
    def __init__(self, B=(1, 2), H=4, Hk=None, S=333, Sk=461, D=64, Dv=None, type="kBf16", causal=False, window=(-1, -1), top_left=False, softcap=0.0,
                 alibi=False, sink=False, dlse=False, bias=None, bias_type=None, bias2=None, bias2_type=None, mask=None, key_term=None, query_term=None, dropout=0.0,
                 rng="fovea", packed=None, used=None, scale=None, fill=1.0, odd_out=False, need=("q", "k", "v", "bias", "bias2", "key", "query", "sink"),
                 two_pass=False, chunks=1, more=None, large_bias=False):
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})
        self.Hk = Hk = Hk or H
        self.Dv = Dv = Dv or D
        B1, B2 = B
        self.batch = B1 * B2
        t = KINDS[type]
        self.scale = D ** -0.5 if scale is None else scale
        dev = dict(device="cuda")
        self.lengths = [(S, Sk)] * self.batch
        self.cu = None
        if packed:  # lengths of queries and keys by sequence
            self.lengths = packed
            self.S = S = max(x for x, _ in packed)
            self.Sk = Sk = max(y for _, y in packed)
        if used:
            self.lengths = used
        pad8 = cdiv(D, 8) * 8
        pad8v = cdiv(Dv, 8) * 8
        self.pad8, self.pad8v = pad8, pad8v

        def make(h, s, d, pad):
            x = torch.full((B1, B2, s, h, pad), 0.0, **dev)
            x[..., :d] = torch.randn(B1, B2, s, h, d, **dev) * fill
            return x.to(t).transpose(2, 3)
        self.q, self.k, self.v, self.do = make(H, S, D, pad8), make(Hk, Sk, D, pad8), make(Hk, Sk, Dv, pad8v), make(H, S, Dv, pad8v)
        for b, (sq, sk) in enumerate(self.lengths):  # what lies behind a sequence is never read
            for x, n in ((self.q, sq), (self.k, sk), (self.v, sk), (self.do, sq)):
                x[b // B2, b % B2, :, n:] = float("nan")
        self.dlse = torch.randn(B1, B2, H, S, **dev) if dlse else None
        self.slopes = torch.rand(B1, B2, H, **dev) * 0.5 if alibi else None
        self.sink = torch.randn(H, **dev) if sink else None

        def plane(shape, kind, width=None):
            """Rows padded to 16 bytes; shape (b1, b2, h, q, k) of ones and sizes by letter"""
            ext = [n if f else 1 for f, n in zip(shape, (B1, B2, H, S, Sk))]
            last = cdiv(ext[-1], 8) * 8
            x = torch.randn(*ext[:-1], last, **dev).to(KINDS[kind])
            x[..., ext[-1]:] = float("nan")
            x = x[..., :ext[-1]]
            if large_bias:
                x[..., ::7] = -float("inf")
                x[..., 1::11] = 300.0
            return x
        self.bias_x = plane(bias, bias_type or ("kBf16" if type == "kFp32" else type)) if bias else None
        self.bias2_x = plane(bias2, bias2_type or "kBf16") if bias2 else None
        self.key_x = plane((*key_term, 0, 1), "kFp32") if key_term else None  # a bias without queries
        self.query_x = None
        if query_term:
            ext = [n if f else 1 for f, n in zip(query_term, (B1, B2, H))]
            self.query_x = torch.randn(*ext, cdiv(S, 4) * 4, 1, **dev)[..., :S, :]
        self.mask_x = None
        if mask:
            ext = [n if f else 1 for f, n in zip(mask, (B1, B2, H))]
            self.mask_x = torch.rand(*ext, S, Sk, **dev) > 0.3
            self.mask_x[..., 5, :] = False
        self.seed, self.offset = 0x123456789ABCDEF, 7
        self.threshold = int(math.floor(dropout * 65536 + 0.5))
        self.keep = None
        if dropout:
            self.keep = fovea_keep(self) if rng == "fovea" else torch_keep(self)
        self.reference()

    # ---- the formula ----

    def formula(self, kind, round):
        """Gradients by sequence; `round`: what a kernel keeps in its type."""
        B1, B2 = self.B
        G = self.H // self.Hk
        full = (B1, B2, self.H, self.S, self.Sk)
        factor = 1.0
        if self.dropout:
            if self.rng == "fovea":
                factor = 65536 / (65536 - self.threshold) if self.threshold < 65536 else 0.0
            else:
                factor = 1 / (1 - self.dropout)
        q, k, v, do = (torch.nan_to_num(x).to(kind) for x in (self.q, self.k, self.v, self.do))
        k, v = k.repeat_interleave(G, 2), v.repeat_interleave(G, 2)
        s = q @ k.transpose(-1, -2) * self.scale
        slope = 1.0
        if self.softcap:
            th = torch.tanh(s / self.softcap)
            s, slope = self.softcap * th, 1 - th * th
        for x in (self.bias_x, self.bias2_x, self.key_x, self.query_x):
            if x is not None:
                s = s + x.to(kind)
        i = torch.arange(self.S, device="cuda")[:, None]
        j = torch.arange(self.Sk, device="cuda")[None]
        allowed = torch.ones(full, dtype=torch.bool, device="cuda")
        for b, (sq, sk) in enumerate(self.lengths):
            shift = 0 if self.top_left else sk - sq
            ok_ = (i < sq) & (j < sk)
            if self.causal:
                ok_ = ok_ & (j <= i + shift)
            if self.window[0] >= 0:
                ok_ = ok_ & (j >= i + shift - self.window[0])
            if self.window[1] >= 0 and not self.causal:
                ok_ = ok_ & (j <= i + shift + self.window[1])
            allowed[b // B2, b % B2] = ok_
            if self.alibi:
                s[b // B2, b % B2] -= self.slopes[b // B2, b % B2, :, None, None].to(kind) * (i + shift - j).abs().to(kind)
        if self.mask_x is not None:
            allowed = allowed & self.mask_x
        s = s.masked_fill(~allowed, -float("inf"))
        logits = s
        if self.sink is not None:
            logits = torch.cat([s, self.sink.to(kind)[:, None, None].expand(B1, B2, self.H, self.S, 1)], -1)
        lse = torch.logsumexp(logits, -1)
        dead = lse == -float("inf")
        p = torch.exp(s - torch.where(dead, torch.zeros_like(lse), lse)[..., None])
        p = torch.where(dead[..., None] | ~allowed, torch.zeros_like(p), p)
        kept = p if self.keep is None else p * self.keep
        o = (round(kept) @ v) * factor
        o = round(o)
        dp = do @ v.transpose(-1, -2)
        if self.keep is not None:
            dp = dp * self.keep * factor
        delta = (do * o).sum(-1)
        if self.dlse is not None:
            delta = delta - self.dlse.to(kind)
        ds = p * (dp - delta[..., None])
        dz = ds * slope
        out = dict(o=o, lse=lse)
        out["dv"] = (round(kept).transpose(-1, -2) @ do * factor).unflatten(2, (self.Hk, G)).sum(3)
        out["dk"] = (round(dz).transpose(-1, -2) @ q * self.scale).unflatten(2, (self.Hk, G)).sum(3)
        out["dq"] = round(dz) @ k * self.scale
        for name, x in (("dbias", self.bias_x), ("dbias2", self.bias2_x), ("dkey", self.key_x), ("dquery", self.query_x)):
            if x is not None:
                dims = [n for n in range(5) if x.shape[n] == 1]
                out[name] = ds.sum(dims, keepdim=True) if dims else ds
        if self.sink is not None:
            ps = torch.exp(self.sink.to(kind)[:, None] - lse)
            rows = torch.zeros(B1, B2, 1, self.S, device="cuda", dtype=torch.bool)
            for b, (sq, _) in enumerate(self.lengths):
                rows[b // B2, b % B2, :, :sq] = True
            out["dsink"] = -(torch.where(rows, ps * delta, torch.zeros_like(ps))).sum((0, 1, 3))
        return out

    def reference(self):
        t = KINDS[self.type]
        torch.backends.cuda.matmul.allow_tf32 = False
        self.want = self.formula(torch.float64, lambda x: x)
        self.own = self.formula(torch.float32, (lambda x: x) if self.type == "kFp32" else (lambda x: x.to(t).float()))
        out = self.own["o"] if self.type == "kFp32" else self.own["o"]
        self.out = out.to(t).contiguous()
        self.lse = self.want["lse"].float().contiguous()

    # ---- kernels ----

    def base(self):
        w = max(self.D, self.Dv)
        step = 128 if w > 256 else 32 if self.type == "kFp32" or w > 128 else 16
        d, dv = cdiv(self.D, step) * step, cdiv(self.Dv, step) * step
        s = dict(type=self.type, d=d, dv=dv)
        if self.causal or self.window != (-1, -1): s["banded"] = True
        if self.packed or self.used: s["ragged"] = True
        if self.softcap: s["softcap"] = True
        kinds = {v: k for k, v in KINDS.items()}
        if self.bias_x is not None: s["bias"] = kinds[self.bias_x.dtype]
        if self.bias2_x is not None: s["bias2"] = kinds[self.bias2_x.dtype]
        if self.mask_x is not None: s["mask"] = True
        if self.key_x is not None: s["key_term"] = True
        if self.query_x is not None: s["query_term"] = True
        if self.alibi: s["alibi"] = True
        if self.dropout: s["dropout"] = "kFovea" if self.rng == "fovea" else "kTorchMemEfficient"
        if self.type == "kFp32" or self.scale <= 0: s["natural"] = True
        return s

    def arguments(self, s):
        a = Args()
        keep = self.alive = []
        B1, B2 = self.B
        r = a.rows
        r.batch1, r.batch2, r.heads_q, r.heads_k = B1, B2, self.H, self.Hk
        r.rows_q, r.rows_k, r.limit_q, r.limit_k = self.S, self.Sk, self.S, self.Sk

        def lengths(values):
            x = torch.tensor(values, dtype=torch.int32, device="cuda")
            keep.append(x)
            v = TYPES["Lengths"]()
            v.data, v.is_64_bit, v.stride = x.data_ptr(), False, 1
            return v
        offsets_q = offsets_k = None
        if self.packed:
            cu_q, cu_k = [0], [0]
            for sq, sk in self.lengths:
                cu_q.append(cu_q[-1] + sq), cu_k.append(cu_k[-1] + sk)
            r.is_packed, r.cu_q, r.cu_k = True, lengths(cu_q), lengths(cu_k)
            r.rows_q, r.rows_k = cu_q[-1], cu_k[-1]
            offsets_q, offsets_k = cu_q, cu_k
        if self.used:
            r.used_q, r.used_k = lengths([x for x, _ in self.used]), lengths([y for _, y in self.used])
        self.offsets = offsets_q, offsets_k

        def pack(x, offsets):  # (b1, b2, h, s, d) to packed rows, or as it is
            if offsets is None: return x
            y = torch.cat([x[b // B2, b % B2, :, :offsets[b + 1] - offsets[b]] for b in range(self.batch)], 1)[None, None]
            y = y.transpose(2, 3).contiguous().transpose(2, 3)
            keep.append(y)
            return y
        self.pack = pack
        pairs = self.type == "kFp32"
        n = self.batch * self.H
        if pairs:
            self.sizes = torch.zeros(7 * n, device="cuda", dtype=torch.float32)
            a.sizes = self.sizes.data_ptr()
            def prepare(x, which, d, h):
                x = torch.nan_to_num(x)
                top = x.abs().amax((3, 4)).flatten()
                self.sizes[which * n:which * n + top.numel()] = top
                e = torch.where(top > 0, 14 - (torch.frexp(top)[1] - 1), torch.zeros_like(top, dtype=torch.int32)).clamp(-100, 100)
                y = x * torch.ldexp(torch.ones_like(top), e).view(*x.shape[:3], 1, 1)
                hi = y.half()
                lo = (y - hi.float()).half()
                z = torch.zeros(*x.shape[:-1], 2 * d, device="cuda", dtype=torch.half)
                z[..., :x.shape[-1]], z[..., d:d + x.shape[-1]] = hi, lo
                z = z.transpose(2, 3).contiguous().transpose(2, 3)
                keep.append(z)
                if which >= 2:
                    m = x.norm(dim=-1).amax(3).flatten() * 1.0001
                    self.sizes[(which + 2) * n:(which + 2) * n + m.numel()] = m
                return z
            q, k, v, do = prepare(self.q, 0, s["d"], self.H), prepare(self.k, 1, s["d"], self.Hk), prepare(self.v, 2, s["dv"], self.Hk), prepare(self.do, 3, s["dv"], self.H)
        else:
            q, k, v, do = self.q, self.k, self.v, self.do
        q, k, v, do = pack(q, offsets_q), pack(k, offsets_k), pack(v, offsets_k), pack(do, offsets_q)
        a.q, a.k, a.v, a.grad_out = tensor(q), tensor(k), tensor(v), tensor(do)
        self.do_raw = pack(self.do, offsets_q)[..., :self.Dv]
        out = self.out[..., :self.Dv]
        self.out_raw = pack(out, offsets_q)
        # lse: rows are the last dimension
        def rows(x):
            x = pack(x[..., None], offsets_q)
            return tensor(x)
        a.lse = rows(self.lse)
        if self.dlse is not None: a.grad_lse = rows(self.dlse)
        a.head_dim, a.head_dim_v = self.pad8, self.pad8v
        a.out_dim, a.out_dim_v = self.D, self.Dv
        a.scale, a.softcap, a.causal, a.top_left = self.scale, self.softcap, self.causal, self.top_left
        a.window_left, a.window_right = self.window
        if self.bias_x is not None: a.bias = tensor(self.bias_x)
        if self.bias2_x is not None: a.bias2 = tensor(self.bias2_x)
        if self.key_x is not None: a.key_term = tensor(self.key_x)
        if self.query_x is not None: a.query_term = tensor(self.query_x)
        if self.mask_x is not None:
            words = cdiv(cdiv(self.Sk, 32), 4) * 4
            m = torch.zeros(*self.mask_x.shape[:-1], words * 32, device="cuda", dtype=torch.int64)
            m[..., :self.Sk] = self.mask_x
            m = (m.unflatten(-1, (words, 32)) << torch.arange(32, device="cuda")).sum(-1)
            m = torch.where(m >= 2 ** 31, m - 2 ** 32, m).to(torch.int32)
            keep.append(m)
            a.mask = tensor(m)
        if self.slopes is not None:
            t = TYPES["Tensor"]()
            t.data = self.slopes.data_ptr()
            t.strides.batch1, t.strides.batch2, t.strides.head = self.slopes.stride()
            a.alibi_slopes = t
        if self.sink is not None: a.sink, a.sink_stride = self.sink.data_ptr(), 1
        a.keep_scale = 1
        if self.dropout:
            a.rng = 0 if self.rng == "fovea" else 1
            a.drop_threshold, a.drop_p = self.threshold, self.dropout
            a.keep_scale = (65536 / (65536 - self.threshold) if self.threshold < 65536 else 0) if self.rng == "fovea" else 1 / (1 - self.dropout)
            a.seed.value, a.offset.value = self.seed, self.offset
            a.dropout_plane = self.S * self.Sk
        # workspace, poisoned
        if self.packed:
            a.padded_rows = (a.rows.rows_q // 128 + self.batch) * 128
        else:
            a.padded_rows = self.batch * cdiv(self.S, 128) * 128
        nan = lambda *shape: torch.full(shape, float("nan"), device="cuda")
        self.row_lse, self.row_delta, self.row_sum = nan(self.H * a.padded_rows), nan(self.H * a.padded_rows), nan(self.H * a.padded_rows)
        a.row_lse, a.row_delta = self.row_lse.data_ptr(), self.row_delta.data_ptr()
        natural = any(s.get(x) for x in ("natural", "softcap", "alibi", "key_term", "query_term")) or any(s.get(x, "kNone") != "kNone" for x in ("bias", "bias2"))
        a.lse_factor = 1 if natural else LOG2E
        return a

    def outputs(self, a):
        """Gradients, poisoned; of odd strides where asked for."""
        t = KINDS[self.type]
        offsets_q, offsets_k = self.offsets
        B1, B2 = self.B
        def make(h, s, d, offsets):
            b1, b2, rows = (B1, B2, s) if offsets is None else (1, 1, offsets[-1])
            width = d + 1 if self.odd_out else d
            x = torch.full((b1, b2, rows, h, width), float("nan"), device="cuda", dtype=t)
            return x[..., :d].transpose(2, 3)
        self.dq, self.dk, self.dv = make(self.H, self.S, self.D, offsets_q), make(self.Hk, self.Sk, self.D, offsets_k), make(self.Hk, self.Sk, self.Dv, offsets_k)
        a.vector_stores = not self.odd_out and self.D % 8 == 0 and self.Dv % 8 == 0
        a.grad_q, a.grad_k, a.grad_v = (tensor(x) if n in self.need else TYPES["Tensor"]() for x, n in ((self.dq, "q"), (self.dk, "k"), (self.dv, "v")))

    def plan(self):
        """[(kernel, file, spec, grid, threads, shared, changes of Args)], without anything launched."""
        base = self.base()
        steps = []
        P = "sm80_backward_prepare.cuh"
        want_dq, want_kv = "q" in self.need, "k" in self.need or "v" in self.need
        columns = self.key_x is not None and "key" in self.need
        chunked = max(base["d"], base["dv"]) > 512
        two = self.two_pass or chunked
        narrow = max(base["d"], base["dv"]) <= 64
        main = dict(base)
        if columns: main["column_sum"] = True
        main.update(dq=want_dq and not two, dkv=want_kv or (want_dq and not two))
        prep = dict(type=self.type, d=base["d"])
        pads = cdiv(self.S, 128)
        steps.append(("backward_prepare", P, prep, self.batch * self.H * pads, 256, 0, "prepare"))
        width = 128 if self.type == "kFp32" else 256
        results_d, results_v = cdiv(self.pad8, width), cdiv(self.pad8v, width)
        if chunked and (main["dkv"] or columns):
            c = choose(lambda s: [tiles(4, 1, 32, 0, 1), tiles(2, 1, 16, 0, 1)], {**main, "d": 64, "dv": width}, lambda s: chunked_shared(s, True))
            steps.append(("sm80_chunked_backward", "sm80_chunked_backward.cuh", c, cdiv(self.Sk, c["warps"] * 16) * self.batch * self.Hk * (results_d + results_v), c["warps"] * 32, chunked_shared(c, True), "main"))
        elif main["dkv"] or columns:
            candidates, shared = (narrow_candidates, backward_shared) if narrow else (wide_candidates, wide_shared)
            more = self.more or (dict((k, int(v)) for k, v in (y.split('=') for y in os.environ['MORE'].split(','))) if os.environ.get('MORE') else None)
            if more:
                c = {**choose(candidates, main, shared), **more}
            else:
                c = choose(candidates, main, shared)
            if c is None: return None
            if not c["dq"]: c.pop("delay", None)
            keys = c["warps"] * c["tiles"] * 16 if narrow else c["grid_s"] * c["tiles"] * 16
            name = "sm80_backward" if narrow else "sm80_wide_backward"
            steps.append((name, name + ".cuh", c, cdiv(self.Sk, keys) * self.batch * self.Hk, c["warps"] * 32, shared(c), "main"))
        if want_dq and not two:
            steps.append(("backward_convert", P, prep, self.batch * self.H * cdiv(self.S, 16), 256, 0, "convert"))
        row_sum = self.query_x is not None and "query" in self.need
        if (want_dq and two) or row_sum:
            wants = {"dq": want_dq and two, "row_sum": row_sum}
            c = None if chunked else choose(dq_candidates, {**base, **wants}, dq_shared)
            if chunked:
                c = choose(lambda s: [tiles(4, 1, 32, 0, 1), tiles(2, 1, 16, 0, 1)], {**base, **wants, "d": 64, "dv": width}, lambda s: chunked_shared(s, False))
                steps.append(("sm80_chunked_backward_dq", "sm80_chunked_backward.cuh", c, cdiv(self.S, c["warps"] * 16) * self.batch * self.H * results_d, c["warps"] * 32, chunked_shared(c, False), "dq"))
        if ((want_dq and two) or row_sum) and not chunked:
            if c is None: return None
            rows = c["warps"] * c["tiles"] * 16
            steps.append(("sm80_backward_dq", "sm80_backward_dq.cuh", c, cdiv(self.S, rows) * self.batch * self.H * c["grid_o"], c["warps"] * 32, dq_shared(c), "dq"))
        for name, x in (("bias", self.bias_x), ("bias2", self.bias2_x)):
            if x is not None and name in self.need:
                kind = "sm80_bias_gradient"
                if chunked:
                    kind = "sm80_chunked_bias_gradient"
                    c = {**base, "grad_bias": base[name], "d": 64, "dv": width, **tiles(4, 1, 32, 0, 1)}
                    shared, rows = 2 * 96 * 64 * size(c) + 2 * (8 * 64 + inputs(c, 64, 32, False)), 64
                else:
                    c = choose(bias_candidates, {**base, "grad_bias": base[name]}, bias_shared)
                    if c is None: return None
                    shared, rows = bias_shared(c), c["grid_s"] * c["tiles"] * 16
                planes = x.shape[0] * x.shape[1] * x.shape[2]
                steps.append((kind, "sm80_chunked_backward.cuh" if chunked else "sm80_bias_gradient.cuh", c, planes * self.chunks * cdiv(self.S, rows) * cdiv(self.Sk, c["step"]), c["warps"] * 32, shared, name))
                if self.chunks > 1:
                    steps.append(("bias_gradient_sum", "sm80_bias_gradient.cuh", dict(grad_bias=base[name]), planes * cdiv(self.S * self.Sk, 256), 256, 0, name))
        if columns:
            planes = self.key_x.shape[0] * self.key_x.shape[1] * self.key_x.shape[2]
            steps.append(("reduce_columns", P, dict(grad_bias="kFp32"), planes * cdiv(self.Sk, 32), 256, 0, "key"))
        if self.query_x is not None and "query" in self.need:
            planes = self.query_x.shape[0] * self.query_x.shape[1] * self.query_x.shape[2]
            steps.append(("reduce_rows", P, dict(grad_bias="kFp32"), planes * cdiv(self.S, 32), 256, 0, "query"))
        if self.sink is not None and "sink" in self.need:
            steps.append(("reduce_sink", P, {}, self.H, 256, 0, "sink"))
        return steps

    def build(self):
        """run(): everything once."""
        steps = self.plan()
        base = self.base()
        a = self.arguments(base)
        self.outputs(a)
        poison = lambda *shape, dtype=torch.float32: torch.full(shape, float("nan"), device="cuda", dtype=dtype)
        launches = []
        self.grads = {}
        tiles = cdiv(self.S, 128)
        self.dq_sum = None
        if any(x[6] == "convert" for x in steps):
            self.dq_sum = poison(self.H * a.padded_rows * base["d"])
            a.dq_sum = self.dq_sum.data_ptr()
        if self.key_x is not None:
            self.column_sum = poison(self.batch * self.H * self.Sk)
            a.column_sum, a.column_pitch = self.column_sum.data_ptr(), self.Sk
        if self.query_x is not None: a.row_sum = self.row_sum.data_ptr()
        if self.sink is not None:
            self.sink_sum, self.grad_sink = poison(self.H * self.batch * tiles), poison(self.H)
            a.sink_sum, a.grad_sink, a.grad_sink_stride = self.sink_sum.data_ptr(), self.grad_sink.data_ptr(), 1
        for name, file, spec, grid, threads, shared, what in steps:
            b = Args()
            ctypes.memmove(ctypes.addressof(b), ctypes.addressof(a), ctypes.sizeof(a))
            if what == "prepare":
                b.out, b.grad_out, b.head_dim_v, b.head_dim = tensor(self.out_raw), tensor(self.do_raw), self.Dv, base["d"]
            if what in ("bias", "bias2", "key", "query"):
                x = {"bias": self.bias_x, "bias2": self.bias2_x, "key": self.key_x, "query": self.query_x}[what]
                if what not in self.grads: self.grads[what] = torch.full_like(torch.empty_strided(x.shape, x.stride(), device="cuda", dtype=x.dtype), float("nan"))
                g = self.grads[what]
                b.grad_bias = tensor(g)
                b.bias_rows, b.bias_keys = x.shape[3], x.shape[4]
                planes = x.shape[0] * x.shape[1] * x.shape[2]
                b.bias_list, b.bias_chunks = self.batch * self.H // planes, self.chunks
                if self.chunks > 1 and what.startswith("bias"):
                    if not hasattr(self, "bias_sum_" + what): setattr(self, "bias_sum_" + what, poison(self.chunks * planes * x.shape[3] * x.shape[4]))
                    b.bias_sum = getattr(self, "bias_sum_" + what).data_ptr()
            launches.append((kernel(name, file, spec, shared), grid, threads, shared, b, what))

        def run(only=None):
            for f, grid, threads, shared, b, what in launches:
                if only is None or what in only:
                    launch(f, grid, threads, shared, b)
        return run

    def results(self):
        B1, B2 = self.B
        offsets_q, offsets_k = self.offsets
        def unpack(x, offsets, s):
            if offsets is None: return x
            y = torch.zeros(B1, B2, x.shape[2], s, x.shape[4], device="cuda", dtype=x.dtype)
            for b in range(self.batch):
                y[b // B2, b % B2, :, :offsets[b + 1] - offsets[b]] = x[0, 0, :, offsets[b]:offsets[b + 1]]
            return y
        out = {}
        if "q" in self.need: out["dq"] = unpack(self.dq, offsets_q, self.S)
        if "k" in self.need: out["dk"] = unpack(self.dk, offsets_k, self.Sk)
        if "v" in self.need: out["dv"] = unpack(self.dv, offsets_k, self.Sk)
        for n, g in self.grads.items(): out["d" + n] = g
        if self.sink is not None and "sink" in self.need: out["dsink"] = self.grad_sink
        return out

    def exists(self, name, x):
        """Only rows that exist are compared: with seqused the others are left untouched."""
        if not self.used or name not in ("dq", "dk", "dv"): return x
        x = x.clone()
        for b, (sq, sk) in enumerate(self.used):
            x[b // self.B[1], b % self.B[1], :, (sq if name == "dq" else sk):] = 0
        return x

    def check(self, label):
        try:
            run = self.build()
            run()
            torch.cuda.synchronize()
        except RuntimeError as x:
            print(f"{label}: {str(x)[:2000]}")
            failures.append(label)
            if "CUDA 7" in str(x): finish()
            return
        line, bad = [], False
        for name, got in self.results().items():
            got = self.exists(name, got)
            d = self.D if name in ("dq", "dk") else self.Dv
            want, own = self.want[name], self.own[name]
            if name in ("dq", "dk", "dv"):
                want, own = want[..., :d], own[..., :d]
                want, own = self.exists(name, want), self.exists(name, own)
            own = own.to(got.dtype)
            e, f = errors(got, want), errors(own, want)
            top = want.abs().max().item()
            unit = top * (2 ** -8 if got.dtype == torch.bfloat16 else 2 ** -11 if got.dtype == torch.float16 else 2 ** -22)
            floor = unit * 0.51 + 1e-6 * top + 1e-10
            if name == "dquery":  # a sum that cancels to nothing: what is left is the rounding of its terms
                floor += 2e-5
            # Sums of few numbers cancel to nothing: an error of the type on numbers of order one is none.
            good = e[0] <= 2 * f[0] + floor and e[1] <= 2 * f[1] + floor * 0.1
            line.append(f"{name} {e[0] / max(f[0], 1e-30):.2f} {e[1] / max(f[1], 1e-30):.2f}{'' if good else f' BAD {e[0]:.2e} {f[0]:.2e} {e[1]:.2e} {f[1]:.2e} top {top:.2e}'}")
            bad = bad or not good
        if bad: failures.append(label)
        print(f"{'BAD ' if bad else 'ok  '}{label}: " + "; ".join(line), flush=True)


def errors(got, want):
    if not torch.isfinite(got).all():
        return float("inf"), float("inf")
    e = (got.double() - want).abs()
    return e.max().item(), e.mean().item()


M32 = 0xFFFFFFFF


def philox_words(seed, offset, n):
    c = [offset & M32, offset >> 32, n & M32, (n >> 32) ^ 0x666F7665]
    a, b = seed & M32, seed >> 32
    for _ in range(10):
        p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(q >> 32) ^ c[1] ^ a, q & M32, (p >> 32) ^ c[3] ^ b, p & M32]
        a, b = (a + 0x9E3779B9) & M32, (b + 0xBB67AE85) & M32
    return c


def wide_product(x, constant):
    """high and low words of a product of 32-bit numbers, in int64"""
    lo16, hi16 = (x & 0xFFFF) * constant, (x >> 16) * constant
    return (hi16 + (lo16 >> 16)) >> 16, (lo16 + ((hi16 & 0xFFFF) << 16)) & M32


def fovea_keep(P):
    i = torch.arange(P.S, device="cuda", dtype=torch.int64)[:, None]
    j = torch.arange(P.Sk, device="cuda", dtype=torch.int64)[None]
    out = torch.empty(P.batch * P.H, P.S, P.Sk, device="cuda", dtype=torch.bool)
    for n in range(P.batch * P.H):
        k0, k1, w0, w1 = philox_words(P.seed, P.offset, n)
        x, y = (((i >> 4) * 8 + (i & 7)) ^ w0).expand(P.S, P.Sk), (((j >> 4) * 8 + (j & 7)) ^ w1).expand(P.S, P.Sk)
        for r in range(8):
            hi, lo = wide_product(x, 0xD256D193)
            x, y = hi ^ y ^ (((k1 if r & 1 else k0) + r * 0x9E3779B9) & M32), lo
        word = torch.where((i >> 3 & 1) == 1, y, x)
        out[n] = torch.where((j >> 3 & 1) == 1, word >> 16, word & 0xFFFF) >= P.threshold
    return out.view(*P.B, P.H, P.S, P.Sk)


def torch_keep(P):
    out = torch.empty(P.batch * P.H, P.S, P.Sk, device="cuda", dtype=torch.bool)
    for n in range(P.batch * P.H):
        sk = P.lengths[n // P.H][1] if P.packed else P.Sk
        i = torch.arange(P.S, device="cuda", dtype=torch.int64)[:, None]
        j = torch.arange(P.Sk, device="cuda", dtype=torch.int64)[None]
        index = P.offset + n * P.S * P.Sk + i * sk + j
        block = index >> 2
        c0, c1, c2, c3 = block & M32, block >> 32, torch.zeros_like(block), torch.zeros_like(block)
        a, b = P.seed & M32, P.seed >> 32
        for _ in range(10):
            h0, l0 = wide_product(c0, 0xD2511F53)
            h1, l1 = wide_product(c2, 0xCD9E8D57)
            c0, c1, c2, c3 = h1 ^ c1 ^ a, l1, h0 ^ c3 ^ b, l0
            a, b = (a + 0x9E3779B9) & M32, (b + 0xBB67AE85) & M32
        lane = index & 3
        word = torch.where(lane == 0, c0, torch.where(lane == 1, c1, torch.where(lane == 2, c2, c3)))
        u = word.to(torch.float32) * 2.3283064365386963e-10 + 1.16415321826934814e-10
        out[n] = u > torch.tensor(P.dropout, dtype=torch.float32)
    return out.view(*P.B, P.H, P.S, P.Sk)


# ---- cases ----


def cases():
    one = dict
    for D in (64, 32, 16, 48, 128, 96, 80, 112, 160, 192, 256, 512):
        yield f"plain d{D}", one(D=D)
        yield f"causal d{D}", one(D=D, causal=True, Hk=2)
    for D in (64, 128):
        yield f"gqa d{D}", one(D=D, Hk=1)
        for w in ((100, 0), (37, 50), (0, 0), (-1, 30), (64, -1)):
            yield f"window {w} d{D}", one(D=D, Hk=2, window=w)
        yield f"dead rows d{D}", one(D=D, S=461, Sk=333, causal=True)
        yield f"top left d{D}", one(D=D, S=461, Sk=333, causal=True, top_left=True)
        yield f"packed d{D}", one(D=D, Hk=2, B=(1, 5), packed=[(100, 200), (1, 1), (0, 50), (333, 77), (64, 0)], causal=True)
        yield f"packed full d{D}", one(D=D, B=(1, 3), packed=[(130, 257), (64, 64), (7, 300)])
        yield f"used d{D}", one(D=D, B=(2, 2), used=[(333, 461), (0, 100), (77, 1), (200, 300)], causal=True)
        yield f"two-level d{D}", one(D=D, B=(2, 3), S=130, Sk=140)
        yield f"fp16 d{D}", one(D=D, type="kFp16", causal=True)
        yield f"odd outputs d{D}", one(D=D, odd_out=True)
        yield f"short d{D}", one(D=D, S=200, Sk=77)
        yield f"one query d{D}", one(D=D, S=1, Sk=500)
        yield f"need q d{D}", one(D=D, need=("q",))
        yield f"need k d{D}", one(D=D, need=("k",))
        yield f"negative scale d{D}", one(D=D, scale=-0.2)
    for D, Dv in ((64, 32), (32, 64), (192, 128), (128, 64), (64, 128), (40, 72), (20, 9), (72, 72), (100, 100), (65, 65), (250, 250), (136, 136), (24, 24), (300, 300), (384, 256)):
        yield f"d{D} dv{Dv}", one(D=D, Dv=Dv, causal=True, Hk=2)
    for D, Dv in ((1024, 1024), (520, 1000), (64, 600), (700, 32)):
        yield f"d{D} dv{Dv}", one(D=D, Dv=Dv, causal=True, Hk=2, S=130, Sk=200)
    yield "d600 everything", one(D=600, B=(2, 2), Hk=2, softcap=5.0, alibi=True, sink=True, dlse=True, bias=(1, 0, 1, 1, 1), mask=(1, 1, 0), key_term=(1, 0, 0), query_term=(0, 0, 1),
                                 dropout=0.2, causal=True, used=[(333, 461), (0, 100), (77, 1), (200, 300)], need=("q", "k", "v", "key", "query", "sink"))
    yield "d600 windows packed", one(D=600, B=(1, 3), packed=[(130, 257), (64, 64), (7, 300)], window=(30, 20), Hk=1, key_term=(1, 1, 0))
    for D in (320, 512):
        yield f"bias d{D}", one(D=D, bias=(0, 1, 0, 1, 1), need=("q", "k", "v"), causal=True)
        yield f"bias fp32 mask d{D}", one(D=D, bias=(0, 1, 0, 1, 1), bias_type="kFp32", mask=(0, 1, 1), dropout=0.2, need=("q", "k", "v"))
        yield f"two passes d{D}", one(D=D, two_pass=True)
    yield "d64 sink dlse", one(sink=True, dlse=True)
    yield "d64 sink dead", one(sink=True, dlse=True, S=461, Sk=333, causal=True)
    for D in (64, 128, 256):
        yield f"softcap d{D}", one(D=D, softcap=2.0, causal=True)
        yield f"alibi d{D}", one(D=D, alibi=True, causal=True)
        yield f"alibi top left d{D}", one(D=D, alibi=True, top_left=True)
        yield f"mask d{D}", one(D=D, mask=(1, 0, 1))
        yield f"mask causal d{D}", one(D=D, mask=(0, 0, 0), causal=True)
        yield f"key term d{D}", one(D=D, key_term=(1, 1, 0), Hk=2)
        yield f"key term h d{D}", one(D=D, key_term=(0, 0, 1), Hk=1, causal=True, B=(2, 2))
        yield f"key term windows d{D}", one(D=D, key_term=(1, 0, 1), Hk=2, window=(10, 10), S=200, Sk=700)
        yield f"query term d{D}", one(D=D, query_term=(1, 1, 1), sink=True, dlse=True)
        yield f"query term b d{D}", one(D=D, query_term=(0, 1, 0), sink=True, dlse=True, B=(2, 2))
        yield f"dropout d{D}", one(D=D, dropout=0.1)
        yield f"dropout causal d{D}", one(D=D, dropout=0.5, causal=True, Hk=2)
        yield f"dropout all d{D}", one(D=D, dropout=1.0) if False else one(D=D, dropout=0.9)
        yield f"dropout torch d{D}", one(D=D, dropout=0.3, rng="torch")
        yield f"bias no grad d{D}", one(D=D, bias=(1, 1, 1, 1, 1), need=("q", "k", "v"))
        yield f"bias fp32 no grad d{D}", one(D=D, bias=(0, 1, 0, 1, 1), bias_type="kFp32", need=("q", "k", "v"), causal=True)
        yield f"bias large no grad d{D}", one(D=D, bias=(0, 1, 0, 1, 1), bias_type="kFp32", need=("q", "k", "v"), large_bias=True)
        yield f"two biases no grad d{D}", one(D=D, bias=(0, 1, 0, 1, 1), bias2=(0, 0, 1, 1, 1), bias2_type="kFp16", need=("q", "k", "v"), S=100, Sk=130)
        yield f"everything d{D}", one(D=D, B=(2, 2), Hk=2, softcap=5.0, alibi=True, sink=True, dlse=True, bias=(1, 0, 1, 1, 1), bias2=(0, 1, 0, 1, 1), bias2_type="kFp32", mask=(1, 1, 0),
                                      key_term=(1, 0, 0), query_term=(0, 0, 1), dropout=0.2, causal=True, used=[(333, 461), (0, 100), (77, 1), (200, 300)], need=("q", "k", "v", "key", "query", "sink"))


def bias_cases():
    for D in (32, 64, 128, 256):
        yield f"dbias 1h d{D}", dict(D=D, bias=(0, 0, 1, 1, 1), Hk=2)
        yield f"dbias b1 d{D}", dict(D=D, bias=(1, 1, 0, 1, 1), causal=True, B=(2, 2))
        yield f"dbias 11 chunks d{D}", dict(D=D, bias=(0, 0, 0, 1, 1), chunks=3)
        yield f"dbias full d{D}", dict(D=D, bias=(1, 1, 1, 1, 1), causal=True)
        yield f"dbias b1.h d{D}", dict(D=D, bias=(1, 0, 1, 1, 1), B=(2, 3), S=130, Sk=140, bias_type="kFp32")
        yield f"dbias two d{D}", dict(D=D, bias=(0, 0, 1, 1, 1), bias2=(0, 1, 0, 1, 1), bias2_type="kFp32", S=200, Sk=130)
        yield f"dbias packed d{D}", dict(D=D, bias=(0, 0, 1, 1, 1), B=(1, 3), packed=[(130, 257), (64, 64), (7, 300)])
        yield f"dbias features d{D}", dict(D=D, bias=(0, 0, 1, 1, 1), softcap=3.0, alibi=True, dropout=0.2, mask=(0, 1, 0), key_term=(0, 1, 0), query_term=(0, 1, 1), sink=True, dlse=True)
        yield f"dbias window d{D}", dict(D=D, bias=(0, 0, 1, 1, 1), window=(20, 10))


    for name, x in (("", {}), (" packed chunks", dict(B=(1, 3), packed=[(130, 257), (64, 64), (7, 300)], chunks=2)), (" fp32", dict(type="kFp32", bias_type="kFp32", causal=True)),
                    (" features", dict(softcap=3.0, dropout=0.2, mask=(0, 1, 0), window=(20, 10)))):
        yield f"dbias d600{name}", dict(**{**dict(D=600, Dv=520, bias=(0, 0, 1, 1, 1), S=130, Sk=200), **x})


def dq_cases():
    for D in (32, 64, 128, 256):
        for name, x in (("plain", {}), ("causal gqa", dict(causal=True, Hk=2)), ("window", dict(window=(37, 50))), ("packed", dict(B=(1, 3), packed=[(130, 257), (64, 64), (7, 300)], causal=True)),
                        ("bias", dict(bias=(0, 1, 0, 1, 1), need=("q", "k", "v"))), ("dropout", dict(dropout=0.1)), ("softcap alibi", dict(softcap=3.0, alibi=True)),
                        ("mask terms", dict(mask=(0, 1, 1), key_term=(1, 1, 0), query_term=(1, 0, 1), sink=True)), ("fp32 bias", dict(bias=(0, 1, 0, 1, 1), bias_type="kFp32", need=("q", "k", "v"))),
                        ("odd", dict(odd_out=True))):
            yield f"two passes {name} d{D}", dict(D=D, two_pass=True, **x)
        yield f"only q d{D}", dict(D=D, two_pass=True, need=("q",))
    yield "two passes d192 dv128", dict(D=192, Dv=128, two_pass=True)
    yield "two passes d72", dict(D=72, two_pass=True, causal=True)


def fp32_cases():
    for D in (64, 32, 48, 96, 128, 256):
        for name, x in (("plain", {}), ("causal gqa", dict(causal=True, Hk=2)), ("bias", dict(bias=(0, 1, 1, 1, 1), bias_type="kFp32", need=("q", "k", "v"))), ("dropout dlse", dict(dropout=0.3, dlse=True, sink=True)),
                        ("softcap alibi", dict(softcap=3.0, alibi=True)), ("mask terms", dict(mask=(0, 1, 1), key_term=(1, 1, 0), query_term=(1, 0, 1))),
                        ("packed", dict(B=(1, 3), packed=[(130, 257), (64, 64), (7, 300)], causal=True))):
            yield f"fp32 {name} d{D}", dict(D=D, type="kFp32", **x)
        yield f"fp32 two passes d{D}", dict(D=D, type="kFp32", two_pass=True, causal=True)
        yield f"fp32 dbias d{D}", dict(D=D, type="kFp32", bias=(0, 0, 1, 1, 1), bias_type="kFp32", causal=True)
    yield "fp32 d20 dv9", dict(D=20, Dv=9, type="kFp32", causal=True)
    yield "fp32 d600 dv520", dict(D=600, Dv=520, type="kFp32", causal=True, Hk=2, key_term=(1, 1, 0), S=130, Sk=200)
    yield "fp32 d512", dict(D=512, type="kFp32", causal=True)


SETS = dict(check=cases, bias=bias_cases, dq=dq_cases, fp32=fp32_cases)


def check(sets, pattern):
    todo = [(n, x) for s in sets for n, x in SETS[s]() if re.search(pattern, n)]
    problems = []
    start = time.time()
    for n, x in todo:
        try:
            p = Problem.__new__(Problem)
            Problem.reference, keep = (lambda self: None), Problem.reference
            fk, tk = globals()["fovea_keep"], globals()["torch_keep"]
            globals()["fovea_keep"] = globals()["torch_keep"] = lambda P: None
            p.__init__(**x)
        finally:
            Problem.reference = keep
            globals()["fovea_keep"], globals()["torch_keep"] = fk, tk
        steps = p.plan()
        if steps is None:
            print("no configuration:", n)
            failures.append(n)
            continue
        problems.append((n, x))
        for step in steps:
            todo_keys.append(key_of(step[0], step[1], step[2]))
    prebuild(todo_keys)
    print(f"{len(set(todo_keys))} instances in {time.time() - start:.1f} s", flush=True)
    for n, x in problems:
        Problem(**x).check(n)
    spilt = [(k, b) for k, b in built.items() if b.spills or b.stack]
    for k, b in spilt:
        print("spills", k[0], {x: y for x, y in k[2]}, b)


todo_keys = []


def finish():
    print("FAILED: " + ", ".join(failures) if failures else "all checks passed", flush=True)
    sys.exit(1 if failures else 0)


# ---- speed ----


def timed(fs, rounds=3, target=0.01):
    counts = []
    for f in fs:
        f()
        torch.cuda.synchronize()
        t = time.time()
        f(), f()
        torch.cuda.synchronize()
        counts.append(max(2, int(target / max((time.time() - t) / 2, 1e-6))))
    times = [[] for _ in fs]
    for _ in range(rounds):
        for n, f in enumerate(fs):
            s, e = torch.cuda.Event(True), torch.cuda.Event(True)
            s.record()
            for _ in range(counts[n]): f()
            e.record()
            torch.cuda.synchronize()
            times[n].append(s.elapsed_time(e) / counts[n])
    return [statistics.median(x) for x in times]


def speed(pattern):
    rows = []
    reference = Problem.reference
    def light(self):  # no reference: inputs only
        t = KINDS[self.type]
        self.out = torch.randn_like(self.do, dtype=torch.float32).to(t)
        self.lse = torch.full((*self.B, self.H, self.S), 8.0, device="cuda")
    Problem.reference = light
    globals()["fovea_keep"] = lambda P: None
    def table():
        for D in (64, 128, 256):
            for S in (1024, 4096, 16384):
                for c in (False, True):
                    yield f"d{D} s{S} {'c' if c else 'f'}", dict(B=(1, 16384 // S), H=2048 // D, S=S, Sk=S, D=D, causal=c), ["flash"]
        yield "bias[1,H] s2048 d64", dict(B=(1, 8), H=16, S=2048, Sk=2048, D=64, bias=(0, 0, 1, 1, 1)), []
        yield "bias[1,H] s4096 d128", dict(B=(1, 4), H=16, S=4096, Sk=4096, D=128, bias=(0, 0, 1, 1, 1)), []
        yield "triangle 384", dict(B=(1, 384), H=4, S=384, Sk=384, D=32, bias=(0, 0, 1, 1, 1), chunks=11), []
        yield "triangle 768", dict(B=(1, 768), H=4, S=768, Sk=768, D=32, bias=(0, 0, 1, 1, 1), chunks=4), []
        for D in (64, 128):
            yield f"dropout s4096 d{D}", dict(B=(1, 4), H=2048 // D, S=4096, Sk=4096, D=D, dropout=0.1), ["flash"]
        yield "gqa 32/8 s4096 d128 c", dict(B=(1, 4), H=32, Hk=8, S=4096, Sk=4096, D=128, causal=True), ["flash"]
        yield "d512 s2048", dict(B=(1, 8), H=4, S=2048, Sk=2048, D=512), []
        yield "d96 s4096", dict(B=(1, 4), H=20, S=4096, Sk=4096, D=96), ["flash"]
        yield "d80 s2047 c", dict(B=(1, 8), H=16, S=2047, Sk=2047, D=80, causal=True), ["flash"]
        yield "d192/128 s4096 c", dict(B=(1, 4), H=16, S=4096, Sk=4096, D=192, Dv=128, causal=True), []
        yield "cross 4096x77 d64", dict(B=(1, 16), H=16, S=4096, Sk=77, D=64), ["flash"]
        for c in (False, True):
            yield f"fp32 s2048 d64 {'c' if c else 'f'}", dict(B=(1, 4), H=16, S=2048, Sk=2048, D=64, type="kFp32", causal=c), []
        yield "fp32 s2048 d128", dict(B=(1, 4), H=8, S=2048, Sk=2048, D=128, type="kFp32"), []
        for D in (64, 128):
            for c in (False, True):
                yield f"two passes s4096 d{D} {'c' if c else 'f'}", dict(B=(1, 4), H=2048 // D, S=4096, Sk=4096, D=D, causal=c, two_pass=True), ["flash"]
        yield "key mask s4096 d64", dict(B=(1, 4), H=32, S=4096, Sk=4096, D=64, key_term=(0, 1, 0), need=("q", "k", "v")), []
        yield "bool mask s4096 d64", dict(B=(1, 4), H=32, S=4096, Sk=4096, D=64, mask=(0, 1, 0), need=("q", "k", "v")), []
        yield "fp32 bias s4096 d64", dict(B=(1, 4), H=32, S=4096, Sk=4096, D=64, bias=(0, 0, 1, 1, 1), bias_type="kFp32", need=("q", "k", "v")), []
        yield "bf16 bias s4096 d64", dict(B=(1, 4), H=32, S=4096, Sk=4096, D=64, bias=(0, 0, 1, 1, 1), need=("q", "k", "v")), []
    todo = [x for x in table() if re.search(pattern, x[0])]
    from torch.nn.attention import SDPBackend, sdpa_kernel
    for label, x, peers in todo:
        P = Problem(**x)
        steps = P.plan()
        if steps is None:
            rows.append(f"{label}: no configuration")
            continue
        prebuild([key_of(s[0], s[1], s[2]) for s in steps])
        try:
            run = P.build()
        except KeyError:
            failures.append(label)
            continue
        pairs = P.S * P.Sk if not P.causal else sum(max(0, min(P.Sk, i + P.Sk - P.S + 1)) for i in range(P.S))
        flops = 5 * P.batch * P.H * pairs * (P.D + P.Dv)
        fs = {"ours": run}
        for part in dict.fromkeys(s[6] for s in steps):
            fs[part] = lambda part=part: run([part])
        for peer in peers:
            flat = lambda t: t.flatten(0, 1).detach().requires_grad_()
            q, k, v = flat(P.q), flat(P.k), flat(P.v)
            if P.H != P.Hk: k, v = (y.detach().repeat_interleave(P.H // P.Hk, 1).requires_grad_() for y in (k, v)) if False else (k, v)
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                o = F.scaled_dot_product_attention(q, k, v, is_causal=P.causal, dropout_p=P.dropout, enable_gqa=P.H != P.Hk)
            do = P.do.flatten(0, 1)
            fs[peer] = lambda o=o, q=q, k=k, v=v, do=do: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
        ms = timed(list(fs.values()))
        t = dict(zip(fs, ms))
        main = next((s for s in steps if s[6] == "main"), steps[0])
        b = built[key_of(main[0], main[1], main[2])]
        rows.append(f"{label:24s} " + "  ".join(f"{n} {flops / m / 1e9:.0f}" if n in ("ours", "flash") else f"{n} {m:.3f}ms" for n, m in t.items()) +
                    (f"  ratio {t['flash'] / t['ours']:.2f}" if "flash" in t else "") + f"  [{b.registers} r {b.spills} spilt]")
        print(rows[-1], flush=True)
    print("\n==== TFLOP/s")
    print("\n".join(rows))


def main():
    torch.zeros(1, device="cuda")
    what = sys.argv[1] if len(sys.argv) > 1 else "check"
    pattern = sys.argv[2] if len(sys.argv) > 2 else ""
    torch.manual_seed(int(os.environ.get("SEED", int(time.time()))))
    if what == "speed":
        speed(pattern)
    else:
        check(list(SETS) if what == "all" else what.split(","), pattern)
    finish()


main()
