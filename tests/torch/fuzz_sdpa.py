#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Random calls of scaled_dot_product_attention with fovea.torch.enable() in force, beside PyTorch's math path.

Each call is random in ranks, batches that broadcast, heads, masks, biases, gradients, autocast, inference mode and
types; one in ten is malformed. A float64 result may differ by 1e-12 of its size. Any other may have twice the error that
PyTorch has in the same type (the larger one of its math path and of the kernel that it takes), plus two units in the last
place. PyTorch's math path keeps the weights for the backward; every fused kernel computes them again, from an output and
a logsumexp that are rounded. Where PyTorch has no fused kernel for a call, the naive evaluation that does so
(tests/torch/naive.py) may stand for PyTorch's error; the last line says how often it did. Gradients have the shapes of PyTorch's, and an exception is of the same kind.
The largest error of a few numbers depends on chance. So a call in fp32 or 16 bits that is over its bound is computed with eight other draws of the numbers,
and is wrong if the sum of the errors is over the sum of the bounds.

A bias that is broadcast over the keys has the gradient 0: terms that cancel. Its size is then the sum of their absolute
values, since each has been rounded.

On a GPU PyTorch's fused kernels refuse some calls that its math path computes, such as a bias of another type, and with
PyTorch 2.11 they fault with some masks that are broadcast over the keys, after which a process can use the GPU no more. So another process runs them, and is replaced
after a fault. Such calls are compared with the math path alone; the last lines count them. fovea's calls are waited for
one by one: a fault of fovea's ends the run, and the call is described.

examples:
  tests/torch/fuzz_sdpa.py                         5,000 calls on the CPU
  tests/torch/fuzz_sdpa.py --device cuda           the same on a GPU: some minutes of compiling kernels first
  tests/torch/fuzz_sdpa.py --only 1234             one of them alone, described
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/torch")]
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))

import naive  # noqa: E402
import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

import fovea.torch  # noqa: E402

TYPES = [torch.float64, torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [(5, 5), (4, 7), (7, 4), (1, 6), (33, 40)]
DIMS = [(8, 8), (8, 8), (16, 16), (8, 24), (5, 3)]
DIMS_ON_A_GPU = [(64, 64), (64, 64), (32, 32), (64, 32)]  # each is some kernels


class Case:
    """A random call. `make()` gives its tensors, the same each time."""

    def __init__(self, seed, device):
        r = random.Random(seed)
        self.seed, self.device = seed, device
        self.draw = 0  # of the numbers
        on_cpu = device == "cpu"
        rank = r.choice([2, 3, 3, 4, 4, 4, 4, 4, 5, 5, 6, 7])
        lead = [r.choice([1, 2, 3]) for _ in range(max(rank - 3, 1) if rank > 2 else 0)]
        (self.sq, self.sk), (d, dv) = r.choice(LENGTHS), r.choice(DIMS if on_cpu else DIMS_ON_A_GPU)
        heads_k, times = r.choice([1, 2]), r.choice([1, 1, 2])
        self.gqa = rank > 3 and times > 1
        heads_q = heads_k * times if self.gqa else heads_k
        if rank > 3 and not self.gqa and r.random() < 0.1:
            heads_q, heads_k = r.choice([(2, 1), (1, 2)])
        self.gqa = self.gqa or (rank > 2 and r.random() < 0.05)

        def shape(heads, rows, columns):
            batch = [n if r.random() < 0.9 else 1 for n in lead] if r.random() < 0.25 else lead
            whole = [*batch, *([heads] if rank > 3 else []), rows, columns]
            return whole[r.randrange(len(whole) - 1) :] if r.random() < 0.04 else whole

        self.shapes = [shape(heads_q, self.sq, d), shape(heads_k, self.sk, d), shape(heads_k, self.sk, dv)]
        if heads_q != heads_k and not self.gqa:
            heads_q = max(heads_q, heads_k)
        self.dtype = r.choice(TYPES if on_cpu else TYPES[1:])
        self.mask = self.mask_dtype = None
        self.causal = r.random() < 0.25
        if not self.causal and r.random() < 0.75:
            full = [*lead, *([heads_q] if rank > 3 else []), self.sq, self.sk]
            self.mask = [n if r.random() < 0.6 else 1 for n in full[len(full) - r.randint(2, len(full)) :]]
            self.mask_dtype = r.choice([torch.bool, self.dtype, self.dtype, torch.float32])
        self.scale = r.choice([None, None, 0.3, -0.5])
        self.learns = [r.random() < 0.7 for _ in range(3)] + [r.random() < 0.7]
        self.how = r.choice(["gradients"] * 4 + ["autocast"] * 2 + ["no_grad", "inference_mode", "strided"])
        if self.dtype == torch.float16 and self.how == "autocast":
            self.how = "gradients"
        self.dtypes, self.dropout_p = [self.dtype] * 3, 0.0
        self.malformed = r.random() < 0.1
        if self.malformed:
            self.spoil(r)

    def spoil(self, r):
        """Some of these PyTorch computes nevertheless, such as empty tensors. Values with other rows than keys are not here: PyTorch's
        kernel for the CPU does not look, and reads or writes behind the tensor's end."""
        which = r.choice(["mask type", "rank", "columns", "causal and mask", "heads", "mask rank", "mask shape", "type", "batch",
                          "dropout", "float of the mask", "longer mask", "empty", "integers"])  # fmt: skip
        if which == "mask type":
            self.mask, self.mask_dtype = [self.sq, self.sk], torch.int64
        elif which == "rank":
            self.shapes[r.randrange(3)] = [8]
        elif which == "columns":
            self.shapes[r.randrange(2)][-1] += 1
        elif which == "causal and mask":
            self.causal, self.mask, self.mask_dtype = True, [self.sq, self.sk], torch.bool
        elif which == "heads" and len(self.shapes[0]) > 3 and all(len(shape) > 2 for shape in self.shapes[1:]):
            self.shapes[0][-3] = 5
            self.shapes[1][-3] = self.shapes[2][-3] = 3
        elif which == "mask rank":
            self.mask, self.mask_dtype = [self.sk], torch.bool
        elif which == "type":
            self.dtypes[r.randrange(3)] = r.choice([dtype for dtype in TYPES if dtype != self.dtype])
        elif which == "batch" and all(len(shape) > 2 for shape in self.shapes):
            self.shapes[r.randrange(3)][0] = 7
        elif which == "dropout":
            self.dropout_p = r.choice([-0.1, 1.5, float("nan")])
        elif which == "float of the mask":
            self.mask, self.mask_dtype = [self.sq, self.sk], r.choice([dtype for dtype in TYPES if dtype != self.dtype])
        elif which == "longer mask":
            self.mask, self.mask_dtype = [1] * (len(self.shapes[0]) - 1) + [self.sq, self.sk], torch.bool
        elif which == "empty":
            for at, dim in r.choice([((0, -2),), ((2, -1),), ((1, -2), (2, -2)), ((0, -1), (1, -1))]):
                self.shapes[at][dim] = 0
        elif which == "integers":
            self.dtypes = [r.choice([torch.int64, torch.uint8])] * 3
        else:
            self.mask, self.mask_dtype = [self.sq + 1, self.sk], torch.bool

    def __str__(self):
        names = ("shapes", "dtypes", "dropout_p", "mask", "mask_dtype", "causal", "scale", "gqa", "how", "learns", "malformed")
        return f"case {self.seed}: " + ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def make(self):
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.draw)
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes]
        tensors.append(None)
        if self.mask is not None:
            mask = torch.randn(self.mask, generator=generator, dtype=torch.float64)
            tensors[3] = mask > -0.4 if self.mask_dtype == torch.bool else mask
        dtypes = [*self.dtypes, self.mask_dtype]
        made = []
        for tensor, dtype, learns in zip(tensors, dtypes, self.learns):
            if tensor is not None:
                tensor = tensor.to(dtype).to(self.device)
                if self.how == "strided" and tensor.dim() > 2:
                    tensor = tensor.transpose(-2, -3).contiguous().transpose(-2, -3)
                tensor.requires_grad_(learns and tensor.is_floating_point())
            made.append(tensor)
        return made

    def run_naively(self):
        """The same by tests/torch/naive.py, on the CPU."""
        tensors = self.make()
        for index, x in enumerate(tensors):
            if x is not None and x.is_floating_point():
                rounded = torch.bfloat16 if self.how == "autocast" and self.dtype != torch.float64 else x.dtype
                tensors[index] = x.detach().cpu().to(rounded).requires_grad_(x.requires_grad)
        q, k, v, mask = tensors
        if max(x.dim() for x in (q, k, v)) < 4 and not self.gqa:  # no heads
            q, k, v, mask = (x.unsqueeze(-3) if x is not None and x.dim() > 2 else x for x in (q, k, v, mask))
        lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        heads = 1 if q.dim() < 3 else max(x.shape[-3] for x in (q, k, v) if x.dim() > 2)
        q, k, v = (x.expand(*lead, x.shape[-3] if self.gqa else heads, *x.shape[-2:]) for x in (q, k, v))
        planes = {} if mask is None else {"mask" if mask.dtype == torch.bool else "bias": mask.cpu()}
        out, _ = naive.attention(q, k, v, scale=self.scale, causal=self.causal, align="top_left", twice=True, **planes)
        weights = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).to(out.dtype)
        grads = []
        if out.requires_grad and "_" not in self.how:
            leaves = [x for x in tensors if x is not None and x.requires_grad]
            grads = torch.autograd.grad((out * weights.view(out.shape)).sum(), leaves)
        return [out.detach(), *grads]

    def run(self, convert=None, math=False):
        """out and the gradients of what learns. With `convert` in that type, of the numbers that this type has; sets
        `cancelling`, the sum of the absolute values of what a gradient of the mask is the sum of."""
        tensors = self.make()
        self.cancelling = 0.0
        if convert is not None:
            rounded = torch.bfloat16 if self.how == "autocast" and self.dtype != torch.float64 else None
            for index, x in enumerate(tensors):
                if x is not None and x.is_floating_point():
                    rounded_x = x.detach().to(rounded) if rounded else x.detach()
                    tensors[index] = rounded_x.to(convert).requires_grad_(x.requires_grad)
        q, k, v, mask = tensors
        whole = None
        if convert is not None and mask is not None and mask.requires_grad and mask.shape[-1] == 1:
            mask = whole = mask.expand(*mask.shape[:-1], self.sk)
        with ExitStack() as stack:
            if self.how == "no_grad":
                stack.enter_context(torch.no_grad())
            elif self.how == "inference_mode":
                stack.enter_context(torch.inference_mode())
            elif self.how == "autocast" and convert is None:
                stack.enter_context(torch.autocast(self.device, torch.bfloat16))
            if math:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            out = sdpa(q, k, v, mask, self.dropout_p, self.causal, scale=self.scale, enable_gqa=self.gqa)
        leaves = [x for x in tensors if x is not None and x.requires_grad]
        grads = []
        if out.requires_grad:
            weights = torch.cos(torch.arange(out.numel(), dtype=torch.float64)).to(out.device).to(out.dtype)
            loss = (out * weights.view(out.shape)).sum()
            if whole is not None:
                (terms,) = torch.autograd.grad(loss, whole, retain_graph=True)
                self.cancelling = terms.abs().sum(-1).max().item()
            grads = list(torch.autograd.grad(loss, leaves))
        return [out.detach(), *grads]


class Fault(Exception):
    """After this error the process cannot use the GPU."""


def computed(case):
    """What a call gives, or the error that it raises."""
    error = None
    try:
        found = case.run()
    except Exception as raised:
        error = raised
    if case.device == "cuda":
        try:
            torch.cuda.synchronize()
        except Exception as fault:
            error = Fault(str(fault).splitlines()[0])
    return error or found


def _in_worker(seed, device, draw):
    case = Case(seed, device)
    case.draw = draw
    found = computed(case)
    return found if isinstance(found, Exception) else [x.cpu() for x in found]


class PyTorch:
    """PyTorch's own results by the kernels that it takes: on a GPU from another process."""

    def __init__(self, device, alone=False):
        self.device, self.alone, self.pool, self.apart = device, alone or device == "cuda", None, {}

    def results(self, case):
        """Also an error that is raised. A Fault is one of PyTorch's kernels, as fovea is not enabled there."""
        if not self.alone:
            return computed(case)
        self.pool = self.pool or ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            found = self.pool.submit(_in_worker, case.seed, self.device, case.draw).result()
        except BrokenProcessPool as ended:
            found = Fault(repr(ended))
        if isinstance(found, Fault):
            self.close()
        return found

    def note(self, case, error):
        """That PyTorch's own kernel does not compute this call."""
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self.apart.setdefault(text, []).append(case.seed)

    def close(self):
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)
            self.pool = None


DRAWS = 8


def check(case, ours, pytorch):
    """What is wrong with the results of this call, the empty text if nothing is; whether the naive evaluation had to stand for
    PyTorch's; and whether the call was computed with other draws."""
    wrong, found, with_naive = compare(case, ours, pytorch)
    over = [name for name, (error, allowed, _) in found.items() if not error <= allowed]
    if wrong or not over:
        return wrong, with_naive, False
    again = case.dtype != torch.float64
    if again:
        others = []
        for draw in range(1, DRAWS + 1):
            case.draw = draw
            with fovea.torch.enabled(prefer=None):
                mine = computed(case)
            wrong, each, _ = compare(case, mine, pytorch)
            if wrong or isinstance(mine, Exception):
                return f"draw {draw}: {wrong or mine}", with_naive, again
            others.append(each)
        case.draw = 0
    for name in over:
        error, allowed, size = found[name]
        if again and sum(each[name][0] for each in others) <= sum(each[name][1] for each in others):
            continue
        return f"{name}: error {error:.3g} of {allowed:.3g} allowed, size {size:.3g}", with_naive, again
    return "", with_naive, again


def compare(case, ours, pytorch):
    """What is wrong but for numbers; by the result's name its error, how large that may be, and the result's size; and whether the
    naive evaluation had to stand for PyTorch's."""
    with_naive = False
    found = {}
    theirs = pytorch.results(case)
    kinds = [type(of) if isinstance(of, Exception) else None for of in (ours, theirs)]
    if kinds[0] is not None or (case.malformed and kinds[1] is not None):
        # Of a call that is well formed PyTorch's kernel may refuse what its math path computes. Of others the errors are the same.
        wrong = "" if kinds[0] is kinds[1] else f"raises {kinds[0]} ({ours if kinds[0] else ''}), PyTorch {kinds[1]}"
        return wrong, found, with_naive
    if isinstance(theirs, Exception):
        pytorch.note(case, theirs)
        theirs = [case.run(math=True)]
    else:
        theirs = [case.run(math=True), theirs]
    reference = case.run(torch.float64, math=True)
    cancelling = case.cancelling
    names = ["out", *(name for name, x in zip(("query", "key", "value", "mask"), case.make()) if x is not None and x.requires_grad)]
    rounds = None
    for at, (name, mine, want) in enumerate(zip(names, ours, reference)):
        if mine.shape != want.shape or mine.dtype != theirs[0][at].dtype:
            return f"{name}: {mine.shape} {mine.dtype}, PyTorch {want.shape} {theirs[0][at].dtype}", found, with_naive
        if want.numel() == 0:
            continue
        size = max(want.abs().max().item(), cancelling if name == "mask" else 0.0)
        error = (mine.double() - want).abs().max().item()
        if mine.dtype == torch.float64:
            allowed = 1e-12 * max(size, 1)
        else:
            unit = torch.finfo(torch.bfloat16 if case.how == "autocast" and case.dtype != torch.float64 else case.dtype).eps
            unit = max(unit, torch.finfo(mine.dtype).eps)
            of = lambda results: (results[at].cpu().double() - want.cpu()).abs().max().item()  # noqa: B023
            allowed = 2 * max(of(results) for results in theirs) + 2 * unit * size
            if error > allowed and name != "out":
                rounds = rounds or case.run_naively()
                allowed = max(allowed, 2 * of(rounds) + 2 * unit * size)
                with_naive = True
        found[name] = error, allowed, size
    return "", found, with_naive


def run(device, cases, show=print, seconds=float("inf")):
    """The failures, as texts, and how many calls fovea computed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small tensors gain nothing from more
    pytorch = PyTorch(device)
    try:
        return _run(device, cases, show, time.monotonic() + seconds, pytorch)
    finally:
        pytorch.close()
        torch.set_num_threads(threads)


def _run(device, cases, show, end, pytorch):
    failures = []
    fovea.torch.reset_stats()
    done = by_naive = by_draws = 0
    while done < len(cases) and time.monotonic() < end:  # some at a time, as every switch costs PyTorch's caches
        some = [Case(seed, device) for seed in cases[done : done + 100]]
        ours = []
        with fovea.torch.enabled(prefer=None):
            for case in some:
                if time.monotonic() > end:
                    break
                ours.append(computed(case))
                if isinstance(ours[-1], Fault):
                    show(f"{case}\n  FAULT of the device: {ours[-1]}")
                    return [*failures, str(case)], fovea.torch.stats()["served"]
        for case, mine in zip(some, ours):
            try:
                wrong, with_naive, again = check(case, mine, pytorch)
            except Exception as error:
                wrong, with_naive, again = f"cannot be compared: {type(error).__name__}: {error}", False, False
            by_naive += with_naive
            by_draws += again
            if wrong:
                failures.append(f"{case}\n  {wrong}")
                show(failures[-1])
        done += len(ours)
        if done % 500 == 0 and done < len(cases):
            show(f"{done} calls, {len(failures)} wrong")
    stats = fovea.torch.stats()
    served = stats["served"]
    show(f"{done} calls on {device}: {len(failures)} wrong; fovea computed {served}")
    for reason, count in sorted(stats["handed_back"].items(), key=lambda item: -item[1]):
        show(f"  {count:5} handed back: {reason}")
    show(f"  {by_naive:5} times the naive evaluation stood for PyTorch's")
    show(f"  {by_draws:5} times {DRAWS} other draws of the numbers")
    for text, seeds in sorted(pytorch.apart.items()):
        show(f"  {len(seeds):5} PyTorch's own kernel does not compute, such as {seeds[:3]}: {text}")
    return failures, served


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--count", type=int, default=5000, help="how many calls (5000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (0)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time (never)")
    parser.add_argument("--only", type=int, metavar="SEED", help="one call")
    options = parser.parse_args()
    cases = range(options.first, options.first + options.count)
    if options.only is not None:
        cases = range(options.only, options.only + 1)
        print(Case(options.only, options.device))
    failures, served = run(options.device, cases, seconds=options.seconds)
    return 1 if failures or not served else 0


if __name__ == "__main__":
    sys.exit(main())
