#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fovea.jax beside jax.nn.dot_product_attention(implementation="cudnn"), on JAX's first GPU, in bfloat16.

Each row is measured in the same process, one after the other and again in the other order, and the better time of each is
taken: milliseconds for a call, from the time of many that are put on the device without waiting. The last lines are the host's
time for a small jitted call, and the geometric mean of the ratios. What fails says so and the rest goes on.

Without a GPU it is beside implementation="xla", which says whether it runs at all: JAX_PLATFORMS=cpu bench/gpu/jax_peers.py --lengths 32
--tokens 64
"""

import argparse
import concurrent.futures
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import fovea.jax

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import records  # noqa: E402

HEADS = 16


def theirs(q, k, v, bias, causal):
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=causal, implementation=implementation)


def ours(q, k, v, bias, causal):
    return fovea.jax.dot_product_attention(q, k, v, bias=bias, is_causal=causal)


def milliseconds(function, arguments, seconds=0.12):
    """Of one call, the calls being put on the device one after the other."""
    jax.block_until_ready(function(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    calls = max(3, int(seconds / max(1e-5, time.perf_counter() - start)))
    start = time.perf_counter()
    for _ in range(calls):
        result = function(*arguments)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / calls * 1e3


def compiled(attention, causal, with_bias, training):
    def forward(q, k, v, bias):
        return attention(q, k, v, bias, causal)

    if not training:
        return jax.jit(forward)

    def train(q, k, v, bias, grad_out):
        wanted = (0, 1, 2, 3) if with_bias else (0, 1, 2)
        return jax.grad(lambda *x: jnp.vdot(forward(*x), grad_out).astype(jnp.float32), argnums=wanted)(q, k, v, bias)

    return jax.jit(train)


def arguments_of(kind, d, s, training, tokens, make):
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, grad_out = (make(key, (tokens // s, s, HEADS, d)) for key in keys[:4])
    bias = make(keys[4], (1, HEADS, s, s)) if kind == "bias" else None
    return (q, k, v, bias, grad_out) if training else (q, k, v, bias)


def both_compiled(kind, d, s, training, tokens):
    """theirs and ours, of XLA."""
    shapes = arguments_of(kind, d, s, training, tokens, lambda _, shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    return [compiled(attention, kind == "causal", kind == "bias", training).lower(*shapes).compile() for attention in (theirs, ours)]


def row(kind, d, s, training, tokens, both):
    """Milliseconds of theirs and of ours."""
    arguments = arguments_of(kind, d, s, training, tokens, lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16))
    times = [[], []]
    for order in ((0, 1), (1, 0)):
        for which in order:
            times[which].append(milliseconds(both[which], arguments))
    return [min(found) for found in times]


def host_us(attention):
    """Microseconds of the host for a small jitted call: it is put on the device, which has nothing else to do."""
    q, k, v = jax.random.normal(jax.random.key(1), (3, 1, 128, 1, 64), jnp.bfloat16)
    function = jax.jit(lambda q, k, v: attention(q, k, v, None, False))
    jax.block_until_ready(function(q, k, v))
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(200):
            result = function(q, k, v)
        best = min(best, (time.perf_counter() - start) / 200 * 1e6)
        jax.block_until_ready(result)
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600, help="no new row is begun after so many (600)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="of the sequences (1024 to 8192)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch (16384)")
    parser.add_argument("--json", type=Path, help="where the rows go")
    arguments = parser.parse_args()
    start = time.monotonic()
    rows, device = [], jax.devices()[0]
    print(f"JAX {jax.__version__}, {device.device_kind}, {arguments.tokens} tokens, {HEADS} heads, bfloat16, ms")
    host = {}
    for attention in (theirs, ours):
        try:
            host[attention.__name__] = round(host_us(attention), 1)
            print(f"host time of a jitted call: {attention.__name__} {host[attention.__name__]:.1f} us", flush=True)
        except Exception as error:
            print(f"host time: {attention.__name__}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    print(f"{'':8}{'D':>5}{'S':>7}{'':>10}{'cuDNN':>10}{'fovea':>10}{'times':>8}")
    problems = [(kind, d, s, training) for s in arguments.lengths for d in (64, 128)
                for kind in ("plain", "causal", "bias") for training in (True, False)]  # fmt: skip
    # XLA and cuDNN compile on several of the host's threads, before anything is timed.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        compiling = {problem: pool.submit(both_compiled, *problem, arguments.tokens) for problem in problems}
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    for problem in problems:
        if time.monotonic() - start > arguments.seconds:
            print(f"left out, {arguments.seconds:g} s are over: {problem}")
            continue
        kind, d, s, training = problem
        name = f"{kind:8}{d:5}{s:7}{'fwd+bwd' if training else 'fwd':>10}"
        try:
            before, now = row(*problem, arguments.tokens, compiling[problem].result())
            rows.append({"kind": kind, "d": d, "s": s, "training": training, "theirs": round(before, 4), "ours": round(now, 4)})
            print(f"{name}{before:10.3f}{now:10.3f}{before / now:8.2f}", flush=True)
        except Exception as error:
            print(f"{name} {type(error).__name__}: {str(error)[:160]!r}", flush=True)
    if rows:
        ratios = [row["theirs"] / row["ours"] for row in rows]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"{len(rows)} rows: times the speed of cuDNN {min(ratios):.2f} to {max(ratios):.2f}, geometric mean {mean:.2f}")
    if arguments.json:
        records.write(arguments.json, {
            "device": device.device_kind, "jax": jax.__version__, **records.when(),
            "tokens": arguments.tokens, "heads": HEADS, "host_us": host, "rows": rows})  # fmt: skip


if __name__ == "__main__":
    main()
