#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The host time of one call of fovea.torch.attention beside PyTorch's scaled_dot_product_attention and beside the
same operator made with torch.library.custom_op, on CPU tensors so small that computing takes next to nothing.

With --device cuda: the host time of calls on a GPU, which returns before the GPU has computed, in bfloat16. The GPU is
waited for between the batches, outside of what is timed.

The rounds are interleaved: each measures every row once over a batch of calls. What is reported is a row's least
batch, since whatever else runs on the machine only ever adds; one thread everywhere.

examples:
  bench/torch/host_time.py                                        a table
  bench/torch/host_time.py --json bench/results/torch_host.json   what docs/torch.md's table is made from
  bench/torch/host_time.py --device cuda                          on a GPU, less than a minute
"""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]

import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

import fovea  # noqa: E402
import fovea.torch  # noqa: E402
import records  # noqa: E402
from fovea.torch import _call, _fast, _fastest, _operators, attention  # noqa: E402

SHAPES = {"cpu": (1, 2, 8, 16), "cuda": (1, 8, 128, 64)}
TYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def custom_op():
    """fovea::attention once more, by custom_op and register_autograd."""

    def run(*arguments):
        return _call.forward(*arguments)

    op = torch.library.custom_op(
        "fovea_bench::attention", run, mutates_args=(), schema=f"({_operators._ARGUMENTS}) -> (Tensor, Tensor)"
    )

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[: _call.TENSORS], *output)
        ctx.options = inputs[_call.TENSORS :]
        ctx.inputs = len(inputs)

    def backward(ctx, grad_out, grad_lse):
        *tensors, out, lse = ctx.saved_tensors
        need = [ctx.needs_input_grad[index] for index in _operators._INDEX]
        found = iter(_call.backward(grad_out, grad_lse, out, lse, need, *tensors, *ctx.options))
        grads = [None] * ctx.inputs
        for index, wanted in zip(_operators._INDEX, need):
            if wanted:
                grads[index] = next(found)
        return tuple(grads)

    op.register_autograd(backward, setup_context=setup_context)
    return op


class Nothing(torch.autograd.Function):
    """Computes nothing: what autograd takes of a call and its backward."""

    @staticmethod
    def forward(ctx, q, k, v):
        return q.view_as(q)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad, grad


def arguments_of(q, k, v):
    return (q, k, v, *[None] * 11, 0, 0, None, False, -1, -1, None, 0.0, 0.0, "fovea", 0, 0, 0, "bhsd", 0, None)


@contextlib.contextmanager
def fast(choice):
    """fovea.torch as with this FOVEA_TORCH_FAST."""
    before = os.environ.get("FOVEA_TORCH_FAST")
    os.environ["FOVEA_TORCH_FAST"] = choice
    _fast.load()
    if choice != "0" and not _fast.fast_path().startswith("C"):
        sys.exit(f"fovea.torch.fast_path(): {_fast.fast_path()}")
    try:
        yield
    finally:
        os.environ.pop("FOVEA_TORCH_FAST") if before is None else os.environ.update(FOVEA_TORCH_FAST=before)
        _fast.load()


@contextlib.contextmanager
def through_enable():
    with fast("1"), fovea.torch.enabled(prefer=None):
        yield


@contextlib.contextmanager
def handed_back():
    """Through enable(), which leaves the call to PyTorch, as its kernel is faster."""
    before, _fastest.slower = _fastest.slower, lambda *call: True
    try:
        with fast("1"), fovea.torch.enabled():
            yield
    finally:
        _fastest.slower = before


@contextlib.contextmanager
def math_through_enable():
    """Which Python has to look at each time."""
    with through_enable(), sdpa_kernel(SDPBackend.MATH):
        yield


def rows(device):
    """By name: a call without gradients, one whose result wants them, and what is done around a batch of calls."""
    make = lambda **options: torch.randn(SHAPES[device], dtype=TYPES[device], device=device, **options)  # noqa: E731
    plain = [make() for _ in range(3)]
    leaves = [make(requires_grad=True) for _ in range(3)]
    of = lambda call: (lambda: call(*plain), lambda: call(*leaves))  # noqa: E731
    found = {
        "scaled_dot_product_attention": (*of(sdpa), contextlib.nullcontext),
        "**fovea.torch.attention**": (*of(attention), lambda: fast("1")),
        "the same, through enable()": (*of(sdpa), through_enable),
        "the same, through enable(), handed back": (*of(sdpa), handed_back),
        "the same, tensors by their methods": (*of(attention), lambda: fast("methods")),
        "the same, in Python": (*of(attention), lambda: fast("0")),
        "a torch.autograd.Function that computes nothing": (None, of(Nothing.apply)[1], contextlib.nullcontext),
    }
    if device == "cpu":
        array = [x.transpose(1, 2).contiguous().numpy() for x in plain]
        by_custom_op = custom_op()
        found.update({
            "scaled_dot_product_attention, its math path": (*of(sdpa), lambda: sdpa_kernel(SDPBackend.MATH)),
            "the same, through enable(), handed back by Python": (*of(sdpa), math_through_enable),
            "fovea.torch.attention, through the dispatcher":
                (*of(lambda *qkv: _operators.attention(*arguments_of(*qkv))), contextlib.nullcontext),
            "fovea.torch.attention, made by custom_op and register_autograd":
                (*of(lambda *qkv: by_custom_op(*arguments_of(*qkv))), contextlib.nullcontext),
            "fovea.attention, NumPy arrays": (lambda: fovea.attention(*array), None, contextlib.nullcontext),
        })  # fmt: skip
    return found


def batch(function, calls, wait):
    for _ in range(calls):  # after another row's, caches have to be filled again
        function()
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    took = (time.perf_counter() - start) / calls * 1e6
    wait()
    return took


def with_backward(function, grad):
    def run():
        out = function()
        (out[0] if isinstance(out, tuple) else out).backward(grad)

    return run


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=10, help="in a batch: few, so that some batch is not interrupted")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("host_time.py: no CUDA device that PyTorch sees")
    torch.set_num_threads(1)
    fovea.set_num_threads(1)

    table = rows(options.device)
    grad = torch.ones(SHAPES[options.device], dtype=TYPES[options.device], device=options.device)
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    least = {name: [float("inf")] * 3 for name in table}
    for _ in range(options.rounds):
        for name, (plain, leaf, around) in table.items():
            functions = [plain, leaf, with_backward(leaf, grad) if leaf else None]
            with around():
                for column, function in enumerate(functions):
                    if function is not None:
                        least[name][column] = min(least[name][column], batch(function, options.calls, wait))
    print(f"{'microseconds':64}       no    wants  and the\n{'':64} gradient gradient backward")
    for name, columns in least.items():
        print(f"{name:64}", *(f"{x:8.1f}" if x < 1e9 else "        " for x in columns))
    if options.json:
        cpu = records.processor()
        data = {
            "machine": {
                "cpu": cpu if options.device == "cpu" else f"{torch.cuda.get_device_name()}, {cpu}",
                "python": sys.version.split()[0],
                "torch": torch.__version__,
            },
            **records.when(),
            "shape": "x".join(map(str, SHAPES[options.device])),
            "type": str(TYPES[options.device]).removeprefix("torch."),
            "rounds": options.rounds,
            "calls": options.calls,
            "rows": [
                {"name": name, "microseconds": [round(x, 1) if x < 1e9 else None for x in columns]}
                for name, columns in least.items()
            ],
        }
        records.write(options.json, data)


if __name__ == "__main__":
    main()
