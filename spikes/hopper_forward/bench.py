# SPDX-License-Identifier: Apache-2.0
"""Checks and measures specs of hopper_forward.cu on a Hopper GPU beside PyTorch's own kernels.

python3 bench.py SUITE [seconds]; the suites are at the end of this file. Per case and variant: error against fp64 over the
error of the naive formula in bf16 (must be at most 2), `races` = differing runs of 100, TFLOP/s (median of three
interleaved runs) beside the peers of the same run.
"""
import ctypes, math, statistics, sys, time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import build
from build import Spec

cuda = ctypes.CDLL("libcuda.so.1")
CASES = []


def check(code, what=""):
    if code:
        raise RuntimeError(f"driver error {code} {what}")


class TensorMap(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]


FIELDS = [("out", ctypes.c_void_p), ("lse", ctypes.c_void_p), ("counters", ctypes.c_void_p), ("cu_q", ctypes.c_void_p), ("cu_k", ctypes.c_void_p), ("tile_list", ctypes.c_void_p), ("tile_count", ctypes.c_void_p),
          ("out_b", ctypes.c_int64), ("out_s", ctypes.c_int64), ("out_h", ctypes.c_int64)]
FIELDS += [(n, ctypes.c_int) for n in "batch heads group sq sk shift left right row_tiles tiles heads_in_group batch_inner bias_b bias_h".split()]
FIELDS += [(n, ctypes.c_float) for n in "scale scale_log2 cap_in cap_out cap_log2 keep_scale".split()] + [("threshold", ctypes.c_uint32), ("seed", ctypes.c_uint64), ("offset", ctypes.c_uint64)]


class Arguments(ctypes.Structure):
    _fields_ = [("q", TensorMap), ("k", TensorMap), ("v", TensorMap), ("o", TensorMap), ("bias", TensorMap)] + FIELDS


def tensor_map(x, box_columns, box_rows):
    """x: B, H, S, D view; dimensions of size 1 may have any stride."""
    dims = [x.shape[3], x.shape[2], x.shape[1], x.shape[0]]
    strides = [x.stride(2) * 2, x.stride(1) * 2, x.stride(0) * 2]
    m = (ctypes.c_uint64 * 48)()
    at = (ctypes.addressof(m) + 63) // 64 * 64
    swizzle = {128: 3, 64: 2, 32: 1}[box_columns * 2]
    check(cuda.cuTensorMapEncodeTiled(ctypes.c_void_p(at), 9, 4, ctypes.c_void_p(x.data_ptr()), (ctypes.c_uint64 * 4)(*dims), (ctypes.c_uint64 * 3)(*strides),
                                      (ctypes.c_uint32 * 4)(box_columns, box_rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1), 0, swizzle, 3, 0), "tensor map")
    return TensorMap.from_buffer_copy((ctypes.c_char * 128).from_address(at))


def panel(d):
    return 64 if d % 64 == 0 else 32 if d % 32 == 0 else 16


class Kernel:
    def __init__(self, spec, cubin, name, report):
        self.spec, self.report = spec, report
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuModuleLoadData(ctypes.byref(module), cubin), "load")
        check(cuda.cuModuleGetFunction(ctypes.byref(self.function), module, name), "function")
        check(cuda.cuFuncSetAttribute(self.function, 8, spec.shared_bytes()), "shared memory")
        self.counters = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def bind(self, q, k, v, out, lse, case, bias=None, packed=None):
        s = self.spec
        bhsd = lambda x: x.transpose(1, 2)
        B, sq, H, D = q.shape
        sk, HK = k.shape[1], k.shape[2]
        a = Arguments()
        a.q, a.k, a.v = tensor_map(bhsd(q), panel(s.d), s.rows), tensor_map(bhsd(k), panel(s.d), s.keys), tensor_map(bhsd(v), panel(s.dv), s.keys)
        a.o = tensor_map(bhsd(out), panel(s.dv), 64)
        if bias is not None:
            a.bias = tensor_map(bias, 64, s.rows)
            a.bias_b, a.bias_h = int(bias.shape[0] > 1), int(bias.shape[1] > 1)
        a.out, a.lse, a.counters = out.data_ptr(), lse.data_ptr(), self.counters.data_ptr()
        a.out_b, a.out_s, a.out_h = out.stride(0), out.stride(1), out.stride(2)
        a.batch, a.heads, a.group, a.sq, a.sk, a.shift = B, H, H // HK, sq, sk, sk - sq
        a.left, a.right = case.left if case.left >= 0 else 1 << 30, case.right if case.right >= 0 else 1 << 28
        a.row_tiles = (sq + s.rows - 1) // s.rows
        a.tiles = a.row_tiles * B * H
        a.heads_in_group = max(1, min(B * H, 32 * 1024 * 1024 // (sk * (s.d + s.dv) * 2))) if s.causal else 1
        if bias is not None and bias.shape[0] == 1:
            a.batch_inner, a.heads_in_group = 1, B
        scale = 1 / math.sqrt(D)
        a.scale, a.scale_log2 = scale, scale * math.log2(math.e)
        if case.softcap:
            a.cap_in, a.cap_out, a.cap_log2 = scale / case.softcap, case.softcap, case.softcap * math.log2(math.e)
        p = round(case.dropout * 65536)
        a.threshold, a.keep_scale, a.seed, a.offset = p, 65536 / (65536 - p), case.seed, case.offset
        if packed is not None:
            a.cu_q, a.cu_k, a.tile_list, a.tile_count = (x.data_ptr() for x in packed[:4])
            a.sq, a.tiles = lse.shape[1], packed[4]
        holder = (ctypes.c_char * (ctypes.sizeof(a) + 64))()
        at = (ctypes.addressof(holder) + 63) // 64 * 64
        ctypes.memmove(at, ctypes.addressof(a), ctypes.sizeof(a))
        pointers = (ctypes.c_void_p * 1)(at)
        grid = min(self.sms, a.tiles)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        threads, shared, function = s.threads(), s.shared_bytes(), self.function

        def run(_keep=(holder, pointers, q, k, v, out, lse, bias, packed)):
            check(cuda.cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, shared, stream, pointers, None), "launch")
        return run


@dataclass
class Case:
    name: str
    B: int
    H: int
    sq: int
    sk: int
    d: int
    specs: dict                 # label -> Spec
    dv: int = 0
    HK: int = 0
    left: int = -1
    right: int = -1             # 0: causal
    bias: tuple = ()            # (b, h): sizes of the bias's batch and head dimensions
    softcap: float = 0.0
    dropout: float = 0.0
    seed: int = 42
    offset: int = 7
    measure: bool = True
    verify: bool = True
    peers: tuple = ("cudnn",)
    magnitude: float = 1.0      # of q and k in the check
    bias_kind: str = "normal"
    best: float = 0.0           # what the best peer is worth beside cuDNN, from the table of peers


def varlen(name, lengths, H, D, specs, causal=True, window=-1, lengths_k=None):
    """Packed sequences: checks every sequence of one head against fp64 with NaN behind the ends, then times."""
    lk = lengths_k or lengths
    cu = lambda x: torch.tensor([0] + list(torch.tensor(x).cumsum(0)), dtype=torch.int32, device="cuda")
    cu_q, cu_k = cu(lengths), cu(lk)
    tq, tk = sum(lengths), sum(lk)
    line = f"{name:34}"
    g = lambda n: torch.randn(1, n, H, D, device="cuda", dtype=torch.bfloat16)
    q, k, v = g(tq + 5), g(tk + 5), g(tk + 5)
    q[:, tq:], k[:, tk:], v[:, tk:] = math.nan, math.nan, math.nan
    case = Case(name, 1, H, tq, tk, D, specs, right=0 if causal else -1, left=window)
    pair = sum(pairs(replace(case, sq=a, sk=b)) for a, b in zip(lengths, lk))
    for label, kernel in specs.items():
        s = kernel.spec
        out, lse = torch.full((1, tq + 5, H, D), math.nan, device="cuda", dtype=torch.bfloat16), torch.full((H, tq), math.nan, device="cuda")
        # longest sequences first, in groups of heads whose K and V stay in L2, in a group the longest tiles first
        groups, size = [[]], 0
        for i in sorted(range(len(lk)), key=lambda i: -lk[i]):
            for h in range(H):
                if size + lk[i] * D * 4 > 32 << 20:
                    groups.append([])
                    size = 0
                groups[-1].append((i, h))
                size += lk[i] * D * 4
        tiles = []
        for group in groups:
            tiles += sorted(((min(lk[i], (m + 1) * s.rows + lk[i] - lengths[i]) if causal else lk[i], m, i, h) for i, h in group for m in range((lengths[i] + s.rows - 1) // s.rows)), key=lambda t: (-t[0], t[2], t[3]))
        tile_list = torch.tensor([m << 20 | i << 8 | h for _, m, i, h in tiles], dtype=torch.int32, device="cuda")
        count = torch.tensor([len(tiles)], dtype=torch.int32, device="cuda")
        run = kernel.bind(q, k, v, out, lse, case, packed=(cu_q, cu_k, tile_list, count, len(tiles)))
        run()
        torch.cuda.synchronize()
        worst = 0.0
        for i, (a, b) in enumerate(zip(lengths, lk)):
            h = i % H
            qi, ki, vi = (x[0, c[i]:c[i + 1], h] for x, c in ((q, cu_q), (k, cu_k), (v, cu_k)))
            o64, l64 = reference(qi, ki, vi, case, None, torch.float64)
            o16, _ = reference(qi, ki, vi, case, None, torch.bfloat16)
            e = (out[0, cu_q[i]:cu_q[i + 1], h].double() - o64).abs()
            r = max((e.max() / ((o16.double() - o64).abs().max() + 1e-6)).item(), (e.mean() / ((o16.double() - o64).abs().mean() + 1e-6)).item())
            dl = torch.where(l64 == -math.inf, 0.0, (lse[h, cu_q[i]:cu_q[i + 1]].double() - l64).abs()).max().item()
            worst = max(worst, r if math.isfinite(r) and dl < 2e-5 else math.inf)
        untouched = bool(torch.isnan(out[0, tq:]).all())
        first = out[:, :tq].clone()
        races = 0
        for _ in range(100):
            run()
            races += int(not torch.equal(out[:, :tq], first))
        times = [timed(run) for _ in range(3)]
        ok = worst <= 2 and untouched and races == 0
        line += f" | {label} {4 * H * pair * D / statistics.median(times) / 1e12:.0f} ({worst:.2f} {'ok' if ok else f'WRONG untouched {untouched} races {races}'})"
    print(line, flush=True)


def allowed(case, sq, sk, device):
    i = torch.arange(sq, device=device)[:, None] + (sk - sq)
    j = torch.arange(sk, device=device)[None]
    m = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if case.right >= 0:
        m &= j <= i + case.right
    if case.left >= 0:
        m &= j >= i - case.left
    return m


def reference(q, k, v, case, bias, dtype, keep=None):
    """One head: q, k, v of S x D. dtype float64 is the judge; bfloat16 the naive formula with the kernel's own roundings."""
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    s = (q.to(acc) @ k.to(acc).T) / math.sqrt(q.shape[1])
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    if bias is not None:
        s = s + bias.to(acc)
    s = s.masked_fill(~allowed(case, *s.shape, s.device), -math.inf)
    m = s.amax(1, keepdim=True)
    m = torch.where(m == -math.inf, 0.0, m)
    p = torch.exp(s - m)
    l = p.sum(1, keepdim=True)
    lse = (m + torch.log(l))[:, 0]
    p = p / torch.where(l == 0, 1.0, l)
    if keep is not None:
        p = p * keep * (65536 / (65536 - round(case.dropout * 65536)))
    if dtype != torch.float64:
        p = p.to(dtype).to(acc)
    o = p @ v.to(acc)
    return o if dtype == torch.float64 else o.to(dtype), lse


def make(case, check_sized=False):
    B = min(case.B, 3) if check_sized else case.B
    HK = case.HK or case.H
    H = case.H
    if check_sized:
        group = H // HK
        HK = min(HK, 3)
        H = HK * group
    dv = case.dv or case.d
    g = lambda b, s, h, d: torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16)
    q, k, v = g(B, case.sq, H, case.d), g(B, case.sk, HK, case.d), g(B, case.sk, HK, dv)
    if check_sized:
        q *= case.magnitude
    bias = None
    if case.bias:
        bias = torch.randn(B if case.bias[0] > 1 else 1, H if case.bias[1] > 1 else 1, case.sq, case.sk, device="cuda", dtype=torch.bfloat16)
        if check_sized and case.bias_kind == "causal_low":
            bias.masked_fill_(torch.triu(torch.ones(case.sq, case.sk, dtype=torch.bool, device="cuda"), 1), torch.finfo(torch.bfloat16).min)
        if check_sized and case.bias_kind == "causal_inf":
            bias.masked_fill_(torch.triu(torch.ones(case.sq, case.sk, dtype=torch.bool, device="cuda"), 1), -math.inf)
        if check_sized and case.bias_kind == "ramp":
            bias -= 0.5 * torch.arange(case.sk, device="cuda", dtype=torch.float32)[None, None, None].to(torch.bfloat16)
        if check_sized and case.bias_kind == "steep":
            bias -= 2.0 * torch.arange(case.sk, device="cuda", dtype=torch.float32)[None, None, None].to(torch.bfloat16)
        if check_sized and case.bias_kind == "step":
            bias[..., case.sk // 2:] -= 200
        if check_sized and case.bias_kind == "lowest":
            bias.fill_(torch.finfo(torch.bfloat16).min)
    out = torch.full((B, case.sq, H, dv), math.nan, device="cuda", dtype=torch.bfloat16)
    lse = torch.full((B, H, case.sq), math.nan, device="cuda")
    return q, k, v, out, lse, bias


def verify(case, kernels):
    results = {}
    torch.manual_seed(time.time_ns() % (1 << 40))
    q, k, v, out, lse, bias = make(case, True)
    B, _, H, _ = q.shape
    group = H // k.shape[2]
    picks = [(0, 0), (B - 1, H - 1), (B // 2, H // 2)]
    judged = []
    for b, h in picks:
        bh = bias[b % bias.shape[0], h % bias.shape[1]] if bias is not None else None
        keep = dropout_keep(case, b * H + h, case.sq, case.sk) if case.dropout else None
        args = (q[b, :, h], k[b, :, h // group], v[b, :, h // group], case, bh)
        judged.append((reference(*args, torch.float64, keep), reference(*args, torch.bfloat16, keep)))
    for label, kernel in kernels.items():
        run = kernel.bind(q, k, v, out, lse, case, bias)
        out.fill_(math.nan), lse.fill_(math.nan)
        run()
        torch.cuda.synchronize()
        errors, naives, lse_error = [], [], 0.0
        for (b, h), ((o64, l64), (o16, l16)) in zip(picks, judged):
            errors.append((out[b, :, h].double() - o64).abs())
            naives.append((o16.double() - o64).abs())
            dead = l64 == -math.inf
            d = torch.where(dead, torch.where(lse[b, h] == -math.inf, 0.0, math.inf), (lse[b, h].double() - l64).abs() / (1 + l64.abs()))
            lse_error = max(lse_error, torch.nan_to_num(d, nan=math.inf).max().item())
        error, naive = torch.stack(errors), torch.stack(naives)
        ratio = [(f(error) / (f(naive) + 1e-6)).item() if torch.isfinite(error).all() else math.inf for f in (torch.max, torch.mean)]
        finite = bool(torch.isfinite(out).all()) and not bool(torch.isnan(lse).any())
        first, first_lse = out.clone(), lse.clone()
        races = 0
        for _ in range(100):
            run()
            races += int(not (torch.equal(out, first) and torch.equal(lse, first_lse)))
        results[label] = (ratio, lse_error, races, finite)
    return results


def dropout_keep(case, n, sq, sk):
    M = 0xFFFFFFFF
    c = [case.offset & M, case.offset >> 32, n & M, (n >> 32) ^ 0x666F7665]
    key = [case.seed & M, case.seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ key[0], p1 & M, (p0 >> 32) ^ c[3] ^ key[1], p0 & M]
        key = [(key[0] + 0x9E3779B9) & M, (key[1] + 0xBB67AE85) & M]
    k0, k1, w0, w1 = c
    i = torch.arange(sq, device="cuda")[:, None]
    j = torch.arange(sk, device="cuda")[None]
    x = (((i >> 4) * 8 + (i & 7)) ^ w0) + 0 * j
    y = (((j >> 4) * 8 + (j & 7)) ^ w1) + 0 * i
    for r in range(8):
        K = ((k1 if r & 1 else k0) + r * 0x9E3779B9) & M
        A = 0xD256D193
        lo, hi = A * (x & 0xFFFF), A * (x >> 16)              # 48 bits each
        low = (lo + ((hi & 0xFFFF) << 16))
        high = (hi >> 16) + (low >> 32)
        x, y = high ^ y ^ K, low & M
    word = torch.where((i >> 3) & 1 == 1, y, x)
    u = torch.where((j >> 3) & 1 == 1, word >> 16, word & 0xFFFF)
    return (u >= round(case.dropout * 65536)).to(torch.float32)


def pairs(case):
    if case.right < 0 and case.left < 0:
        return case.sq * case.sk
    i = torch.arange(case.sq) + case.sk - case.sq
    hi = torch.clamp(i + case.right + 1, 0, case.sk) if case.right >= 0 else torch.full_like(i, case.sk)
    lo = torch.clamp(i - case.left, 0, case.sk) if case.left >= 0 else torch.zeros_like(i)
    return int(torch.clamp(hi - lo, min=0).sum())


def peer(name, case, q, k, v, bias):
    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}[name]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    causal = case.right == 0 and case.left < 0

    def run():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, dropout_p=case.dropout, enable_gqa=q.shape[1] != k.shape[1])
    run()
    return run


def timed(run, budget=0.03):
    run()
    torch.cuda.synchronize()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record(), run(), run(), stop.record()
    torch.cuda.synchronize()
    n = max(3, min(200, int(budget / (start.elapsed_time(stop) / 2e3))))
    start.record()
    for _ in range(n):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / n * 1e-3


def build_one(spec):
    try:
        return build.compile(spec)[:3]
    except Exception as e:
        return None, None, f"{spec.text()}: {e}"


def main(suite):
    cases = SUITES[suite]()
    specs = list({s for c in cases for s in c.specs.values()})
    start = time.time()
    with ProcessPoolExecutor(14) as pool:
        built = dict(zip(specs, pool.map(build_one, specs)))
    print(f"{len(specs)} specs in {time.time() - start:.1f} s")
    torch.empty(1, device="cuda")
    kernels = {}
    for s, (cubin, name, report) in built.items():
        print(report)
        if cubin:
            kernels[s] = Kernel(s, cubin, name, report)
    against = []
    table = []
    for case in cases:
        mine = {label: kernels[s] for label, s in case.specs.items() if s in kernels}
        line = f"{case.name:34}"
        try:
            checked = verify(case, mine) if case.verify else {}
            cells = {}
            if case.measure:
                q, k, v, out, lse, bias = make(case)
                runs = {label: kernel.bind(q, k, v, out, lse, case, bias) for label, kernel in mine.items()}
                for p in case.peers:
                    try:
                        runs[p] = peer(p, case, q, k, v, bias)
                    except Exception as e:
                        print(case.name, p, "refused:", str(e)[:100])
                times = {label: [] for label in runs}
                for _ in range(3):
                    for label, run in runs.items():
                        times[label].append(timed(run))
                flops = 2 * case.B * case.H * pairs(case) * (case.d + (case.dv or case.d))
                cells = {label: flops / statistics.median(t) / 1e12 for label, t in times.items()}
                spread = max((max(t) - min(t)) / min(t) for t in times.values())
            for label in list(mine) + [p for p in case.peers if p in cells]:
                text = f" {label} {cells[label]:.0f}" if label in cells else f" {label}"
                if label in checked:
                    ratio, lse_error, races, finite = checked[label]
                    ok = max(ratio) <= 2 and lse_error < 2e-5 and races == 0 and finite
                    text += f" ({ratio[0]:.2f} {ratio[1]:.2f} ok)" if ok else f" (WRONG error {ratio[0]:.3g} {ratio[1]:.3g} lse {lse_error:.2g} races {races} finite {finite})"
                line += " |" + text
            if case.measure:
                if case.best and "cudnn" in cells:
                    line += f" | of cudnn {cells[next(iter(mine))] / cells['cudnn']:.2f}, of the best peer {cells[next(iter(mine))] / cells['cudnn'] / case.best:.3f}"
                    against.append(cells[next(iter(mine))] / cells["cudnn"] / case.best)
                line += f" | {statistics.median(times[next(iter(times))]) * 1e6:.0f} us, spread {spread * 100:.0f}%"
        except Exception as e:
            line += f" FAILED {type(e).__name__} {str(e)[:300]}"
            table.append(line)
            print(line, flush=True)
            if "driver error" in str(e) or "CUDA" in str(e):
                break
            continue
        table.append(line)
        torch.cuda.empty_cache()
        print(f"{time.time() - start:5.1f} {line}", flush=True)
    for name, lengths, H, D, specs, more in VARLEN.get(suite, []):
        with ProcessPoolExecutor(4) as pool:
            built = list(pool.map(build_one, specs.values()))
        try:
            varlen(name, lengths, H, D, {label: Kernel(s, *b) for (label, s), b in zip(specs.items(), built) if b[0]}, **more)
        except Exception as e:
            print(name, "FAILED", type(e).__name__, str(e)[:200], [b[2] for b in built])
    if against:
        print(f"{len(against)} cells, geometric mean {math.exp(statistics.mean(map(math.log, against))):.3f} of the best peer, lowest {min(against):.3f}")
    print(torch.cuda.get_device_name(), torch.__version__, "cuDNN", torch.backends.cudnn.version())


SUITES = {}


def suite(f):
    SUITES[f.__name__] = f
    return f


def dense(D, S, causal, specs, **more):
    H = 2048 // D
    return Case(f"d{D} s{S} {'causal' if causal else 'full'}", 16384 // S, H, S, S, D, specs, right=0 if causal else -1, **more)


B64, B128, B256 = Spec(64, 64, 192, 128, k_stages=3, v_stages=3), Spec(128, 128, 128, 128), Spec(256, 256, 128, 80, q_buffers=1)


def awkward(b64=B64, b128=B128):
    """Small, odd and extreme; not timed."""
    out = []
    for m, S in ((1.0, 77), (30.0, 1000), (1.0, 2047), (5.0, 1500), (1e4, 500)):
        out.append(Case(f"d64 s{S} q*{m:g}", 2, 4, S, S, 64, {"lazy": b64, "exact": replace(b64, lazy=False)}, magnitude=m, measure=False))
        out.append(Case(f"d128 s{S} q*{m:g} causal", 2, 4, S, S, 128, {"lazy": replace(b128, causal=True)}, magnitude=m, measure=False, right=0))
        out.append(Case(f"d64 {S}x{S // 2} q*{m:g} causal", 2, 4, S, S // 2, 64, {"lazy": replace(b64, causal=True)}, magnitude=m, measure=False, right=0))
        out.append(Case(f"d128 {S // 2}x{S} q*{m:g} window", 2, 4, S // 2, S, 128, {"lazy": replace(b128, causal=True, window=True)}, magnitude=m, measure=False, left=100, right=7))
        out.append(Case(f"d64 s{S} q*{m:g} softcap causal", 2, 4, S, S, 64, {"lazy": replace(b64, softcap=True, causal=True)}, magnitude=m, measure=False, right=0, softcap=30.0))
    for kind in ("normal", "ramp", "causal_low", "causal_inf", "lowest", "steep", "step"):
        out.append(Case(f"bias {kind} d64", 2, 4, 512, 640, 64, {"192": replace(b64, bias_stages=2, q_buffers=1, k_stages=2, v_stages=2), "128": replace(b64, rows=128, bias_stages=2)}, bias=(1, 4), bias_kind=kind, measure=False))
        out.append(Case(f"bias {kind} d128 causal", 2, 4, 512, 640, 128, {"128": replace(b128, causal=True, bias_stages=2, q_buffers=1)}, bias=(2, 1), bias_kind=kind, right=0, measure=False))
    for p in (0.1, 0.48):
        out.append(Case(f"dropout {p} d64", 2, 4, 500, 640, 64, {"128": replace(b64, rows=128, dropout=True)}, dropout=p, measure=False))
        out.append(Case(f"dropout {p} d128 causal", 2, 4, 1000, 1000, 128, {"128": replace(b128, causal=True, dropout=True)}, dropout=p, right=0, measure=False))
    return out


BEST = {(64, 0): (1.00, 1.07, 1.16, 1.20, 1.19), (64, 1): (1.00, 1.04, 1.08, 1.18, 1.17), (128, 0): (1.05, 1.07, 1.08, 1.15, 1.17),
        (128, 1): (1.07, 1.13, 1.16, 1.20, 1.15), (256, 0): (1.07, 1.08, 1.10, 1.11, 1.10), (256, 1): (1.06, 1.09, 1.13, 1.19, 1.18)}   # of cuDNN


@suite
def tables():
    """The figures of README.md."""
    out = awkward()
    for D, b in ((64, B64), (128, B128), (256, B256)):
        for causal in (False, True):
            for i, S in enumerate((1024, 2048, 4096, 8192, 16384)):
                t = replace(b, causal=causal)
                out.append(dense(D, S, causal, {"ours": t}, verify=S < 5000, best=BEST[D, causal][i]))
    bias = {"192x128": replace(B64, bias_stages=2, q_buffers=1, k_stages=2, v_stages=2)}
    out.append(Case("bias 1,H d64 s2048", 8, 16, 2048, 2048, 64, bias, bias=(1, 16)))
    out.append(Case("bias B,H d64 s2048", 8, 16, 2048, 2048, 64, bias, bias=(8, 16)))
    b = replace(B128, bias_stages=2, q_buffers=1)
    out.append(Case("bias 1,H d128 s4096", 4, 16, 4096, 4096, 128, {"128x128": b}, bias=(1, 16)))
    b32 = Spec(32, 32, 192, 128, bias_stages=2)
    for N in (384, 768):
        out.append(Case(f"triangle {N}", N, 4, N, N, 32, {"192x128": b32}, bias=(1, 4), peers=("efficient",)))
    out.append(Case("dropout d64 s4096", 4, 32, 4096, 4096, 64, {"128x128": replace(B64, rows=128, dropout=True)}, dropout=0.1, peers=("cudnn", "flash")))
    for right in (-1, 0):
        d = replace(B128, dropout=True, causal=right == 0)
        out.append(Case(f"dropout d128 s4096 {'full' if right else 'causal'}", 4, 16, 4096, 4096, 128, {"128x128": d}, dropout=0.1, right=right, peers=("cudnn", "flash")))
    w = replace(B128, causal=True, window=True)
    out.append(Case("window 512 s16384", 1, 16, 16384, 16384, 128, {"128x128": w}, left=512, right=0, peers=()))
    sc = replace(B128, causal=True, softcap=True, early=2)
    out.append(Case("softcap d128 s4096 causal", 4, 16, 4096, 4096, 128, {"128x128": sc}, softcap=30.0, right=0, peers=()))
    out.append(Case("gqa 32/8 d128 s4096 causal", 4, 32, 4096, 4096, 128, {"128x128": replace(B128, causal=True)}, HK=8, right=0))
    out.append(Case("d192/128 s4096 causal", 4, 16, 4096, 4096, 192, {"128x128": Spec(192, 128, 128, 128, q_buffers=1, causal=True)}, dv=128, right=0))
    out.append(Case("d96 s4096", 4, 20, 4096, 4096, 96, {"192x112": Spec(96, 96, 192, 112)}))
    out.append(Case("d32 s4096", 4, 64, 4096, 4096, 32, {"192x128": Spec(32, 32, 192, 128)}))
    out.append(Case("d80 s2047 causal", 8, 16, 2047, 2047, 80, {"128x128": Spec(80, 80, 128, 128, k_stages=3, v_stages=3, causal=True)}, right=0))
    out.append(Case("cross 4096x77 d64", 16, 16, 4096, 77, 64, {"192x80": Spec(64, 64, 192, 80), "192x128": B64}))
    return out


@suite
def guess():
    """Is the first reference point worth its code; and what is left to choose."""
    no = lambda x: replace(x, guess=False)
    out = [replace(c, specs={k: no(v) for k, v in c.specs.items() if v.lazy}) for c in awkward() if "q*30" in c.name or "steep" in c.name or "ramp" in c.name]
    for D, b in ((64, B64), (128, B128), (256, B256)):
        for causal in (False, True):
            for S in (1024, 4096):
                t = replace(b, causal=causal)
                out.append(dense(D, S, causal, {"": t, "no": no(t)}, verify=False, peers=()))
    t = B128
    out.append(dense(128, 16384, False, {"": t, "no": no(t), "nt": replace(t, turns=False), "no nt": no(replace(t, turns=False)), "160": replace(t, keys=160), "160 no nt": no(replace(t, keys=160, turns=False)), "176": replace(t, keys=176, q_buffers=1), "144": replace(t, keys=144)}, verify=False))
    b32 = Spec(32, 32, 192, 128, bias_stages=2)
    for N in (384, 768):
        out.append(Case(f"triangle {N}", N, 4, N, N, 32, {"": b32, "no": no(b32), "3st": replace(b32, k_stages=3, v_stages=3, bias_stages=3)}, bias=(1, 4), peers=(), verify=False))
    sc = replace(B128, causal=True, softcap=True, early=2)
    out.append(Case("softcap d128 s4096 causal", 4, 16, 4096, 4096, 128, {"e2": sc, "no": no(sc), "nt": replace(sc, turns=False), "e1": replace(sc, early=1), "plain": replace(B128, causal=True)}, softcap=30.0, right=0, peers=(), verify=False))
    d = replace(B128, dropout=True)
    out.append(Case("dropout d128 s4096", 4, 16, 4096, 4096, 128, {"": d, "no": no(d), "e2": replace(d, early=2)}, dropout=0.1, peers=(), verify=False))
    d = replace(B64, rows=128, dropout=True)
    out.append(Case("dropout d64 s4096", 4, 32, 4096, 4096, 64, {"": d, "no": no(d), "no192x80": no(replace(d, rows=192, keys=80)), "160": no(replace(d, keys=160))}, dropout=0.1, peers=(), verify=False))
    w = replace(B128, causal=True, window=True)
    out.append(Case("window 512 s16384", 1, 16, 16384, 16384, 128, {"": w, "no": no(w)}, left=512, right=0, peers=(), verify=False))
    return out


@suite
def together():
    """Every feature at once, and the last choices."""
    out = []
    f = dict(causal=True, window=True, bias_stages=2, softcap=True, dropout=True, q_buffers=1)
    for D, b in ((64, replace(B64, rows=128)), (128, B128)):
        b = replace(b, k_stages=2, v_stages=2, **f)
        out.append(Case(f"all at once d{D} s4096 gqa window 2048", 4, 32, 4096, 4096, D, {"": b, "no": no(b), "nt": replace(b, turns=False), "without the four": replace(b, bias_stages=0, softcap=False, dropout=False, q_buffers=2)}, HK=8, left=2048, right=0, bias=(1, 32), softcap=30.0, dropout=0.1, peers=(), verify=False))
        out.append(Case(f"all at once d{D} small", 2, 4, 704, 704, D, {"": b, "no": no(b)}, HK=2, left=300, right=0, bias=(1, 4), softcap=30.0, dropout=0.1, peers=(), measure=False))
    d = replace(B64, rows=128, dropout=True, keys=160)
    out.append(Case("dropout d64 s4096", 4, 32, 4096, 4096, 64, {"160": d, "192": replace(d, keys=192), "160 e2": replace(d, early=2), "160nt": replace(d, turns=False)}, dropout=0.1))
    d = replace(B128, dropout=True)
    out.append(Case("dropout d128 s4096", 4, 16, 4096, 4096, 128, {"128": d, "160": replace(d, keys=160, q_buffers=1), "144": replace(d, keys=144)}, dropout=0.1))
    sc = replace(B128, causal=True, softcap=True, early=1)
    out.append(Case("softcap d128 s4096 causal", 4, 16, 4096, 4096, 128, {"e1": sc, "e1nt": replace(sc, turns=False), "e1 112": replace(sc, keys=112), "plain": replace(B128, causal=True)}, softcap=30.0, right=0, peers=()))
    b32 = Spec(32, 32, 192, 128, 3, 3, bias_stages=3)
    for N in (384, 768):
        out.append(Case(f"triangle {N}", N, 4, N, N, 32, {"3": b32, "2": replace(b32, k_stages=2, v_stages=2, bias_stages=2), "3nt": replace(b32, turns=False)}, bias=(1, 4), peers=()))
    return out


_v = {"128x128": replace(B128, causal=True, varlen=True)}
_mixed = [128, 256, 384, 512, 640, 1024, 1536, 2048, 1792, 8064]
VARLEN = {}
VARLEN["tables"] = [("varlen odd", [1, 77, 500, 129, 64, 300], 2, 128, _v, dict()), ("varlen odd d64 cross", [1, 77, 500, 129, 64, 300], 2, 64, {"192": replace(B64, varlen=True)}, dict(causal=False, lengths_k=[7, 300, 1, 128, 200, 77])),
                    ("varlen 8x2048", [2048] * 8, 16, 128, _v, dict()), ("varlen mixed", _mixed, 16, 128, _v, dict())]


def profile(names):
    """One launch of each, for ncu."""
    specs = {"64": (64, 4096, False, Spec(64, 64, 192, 128)), "64e": (64, 4096, False, Spec(64, 64, 192, 128, lazy=False)), "128": (128, 4096, False, Spec(128, 128, 128, 128)),
             "128c": (128, 4096, True, Spec(128, 128, 128, 128, causal=True)), "64d": (64, 4096, False, Spec(64, 64, 128, 128, dropout=True)),
             "128d": (128, 4096, False, Spec(128, 128, 128, 128, dropout=True)), "128s": (128, 4096, False, Spec(128, 128, 128, 128, softcap=True))}
    for n in names:
        D, S, causal, spec = specs[n]
        case = dense(D, S, causal, {}, dropout=0.1 * spec.dropout, softcap=30.0 * spec.softcap)
        torch.zeros(1, device="cuda")
        kernel = Kernel(spec, *build.compile(spec)[:3])
        q, k, v, out, lse, bias = make(case)
        kernel.bind(q, k, v, out, lse, case)()
        torch.cuda.synchronize()


if __name__ == "__main__":
    profile(sys.argv[2:]) if sys.argv[1] == "profile" else main(sys.argv[1])
