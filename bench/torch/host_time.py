#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The host time of one call of fovea.torch.attention beside PyTorch's scaled_dot_product_attention and beside the
same operator made with torch.library.custom_op, on CPU tensors so small that computing takes next to nothing.

The rounds are interleaved: each measures every row once over a batch of calls. What is reported is a row's least
batch, since whatever else runs on the machine only ever adds; one thread everywhere.

examples:
  bench/torch/host_time.py                                        a table
  bench/torch/host_time.py --json bench/results/torch_host.json   what docs/torch.md's table is made from
"""

import argparse
import datetime
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]

import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as sdpa  # noqa: E402

import fovea  # noqa: E402
import records  # noqa: E402
from fovea.torch import _call, _operators, attention  # noqa: E402

SHAPE = (1, 2, 8, 16)


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

    def backward(ctx, grad_out, grad_lse):
        *tensors, out, lse = ctx.saved_tensors
        need = [ctx.needs_input_grad[index] for index in _operators._INDEX]
        found = iter(_call.backward(grad_out, grad_lse, out, lse, need, *tensors, *ctx.options))
        grads = [None] * len(_call.Arguments._fields)
        for index, wanted in zip(_operators._INDEX, need):
            if wanted:
                grads[index] = next(found)
        return tuple(grads)

    op.register_autograd(backward, setup_context=setup_context)
    return op


def arguments_of(q, k, v):
    return (q, k, v, *[None] * 11, 0, 0, None, False, -1, -1, None, 0.0, 0.0, "fovea", 0, 0, 0, "bhsd", 0, None)


def rows():
    """By name: a call without gradients, one whose result wants them, and the path that SDPA is held to."""
    plain = [torch.randn(SHAPE) for _ in range(3)]
    leaves = [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]
    array = [x.transpose(1, 2).contiguous().numpy() for x in plain]
    by_custom_op = custom_op()
    of = lambda call: (lambda: call(*plain), lambda: call(*leaves))  # noqa: E731
    return {
        "scaled_dot_product_attention": (*of(sdpa), None),
        "scaled_dot_product_attention, its math path": (*of(sdpa), SDPBackend.MATH),
        "**fovea.torch.attention**": (*of(attention), None),
        "the same, through the dispatcher": (*of(lambda *qkv: _operators.attention(*arguments_of(*qkv))), None),
        "the same, made by custom_op and register_autograd": (*of(lambda *qkv: by_custom_op(*arguments_of(*qkv))), None),
        "fovea.attention, NumPy arrays": (lambda: fovea.attention(*array), None, None),
    }


def batch(function, calls):
    for _ in range(calls):  # after another row's, caches have to be filled again
        function()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls * 1e6


def with_backward(function):
    def run():
        out = function()
        (out[0] if isinstance(out, tuple) else out).backward(GRAD)

    return run


GRAD = torch.ones(SHAPE)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=10, help="in a batch: few, so that some batch is not interrupted")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    fovea.set_num_threads(1)

    table = rows()
    least = {name: [float("inf")] * 3 for name in table}
    for _ in range(options.rounds):
        for name, (plain, leaf, path) in table.items():
            functions = [plain, leaf, with_backward(leaf) if leaf else None]
            for column, function in enumerate(functions):
                if function is None:
                    continue
                with nullcontext() if path is None else sdpa_kernel(path):
                    took = batch(function, options.calls)
                least[name][column] = min(least[name][column], took)
    for name, (forward, tracked, both) in least.items():
        print(f"{name:52} {forward:8.1f} {tracked:8.1f} {both:8.1f}")
    if options.json:
        cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        data = {
            "machine": {"cpu": cpu, "python": sys.version.split()[0], "torch": torch.__version__},
            "date": datetime.date.today().isoformat(),
            "commit": commit.stdout.strip(),
            "shape": "x".join(map(str, SHAPE)),
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
