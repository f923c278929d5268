# SPDX-License-Identifier: Apache-2.0
"""Many Python threads that use everything at once, and calls in the middle of a call: each gets the bits that it gets
alone. It runs with the GIL and, on a free-threaded Python, without it; `-s` prints which."""

import os
import random
import signal
import sys
import sysconfig
import threading

import ml_dtypes
import numpy as np
import pytest

import fovea
from fake_dlpack import FakeArray, VersionedArray

THREADS = 12
ROUNDS = 300 if os.environ.get("FOVEA_LONG") else 25


def normal(*shape, seed, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def arrays(rows, heads=2, dim=16, dtype=np.float32):
    return [normal(2, rows, heads, dim, seed=seed, dtype=dtype) for seed in (1, 2, 3)]


SHARED = fovea.Attention(causal=True, softcap=20.0, dropout_p=0.2, seed=5)
SEQUENCES = [normal(n, 2, 16, seed=n) for n in (5, 33, 1)]


def dense(rows, **options):
    q, k, v = arrays(rows, **options)
    out, lse = fovea.attention(q, k, v, return_lse=True)
    return [out, lse, *fovea.attention_backward(np.ones_like(out), q, k, v, out, lse)[:3]]


def shared_object():
    q, k, v = arrays(40)
    bias = normal(1, 2, 40, 40, seed=4)
    out, lse = SHARED(q, k, v, bias=bias, return_lse=True)
    grads = SHARED.backward(out, q, k, v, out, lse, bias=bias)
    other = SHARED.with_(offset=3)
    return [out, lse, grads.q, grads.bias, other(q, k, v), SHARED.explain(q, k, v).splitlines()[0]]


def packed():
    rows, ends, longest = fovea.pack(SEQUENCES)
    lengths = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest)
    out, lse = fovea.attention(rows, rows, rows, causal=True, return_lse=True, **lengths)
    grads = fovea.attention_backward(out, rows, rows, rows, out, lse, causal=True, **lengths)
    return [*fovea.unpack(out, ends), grads.k, ends.copy()]


def other_libraries():
    q, k, v = arrays(21, dtype=ml_dtypes.bfloat16)
    out = fovea.attention(VersionedArray(q), FakeArray(k), v)
    return [out.array.view(np.uint16).copy()]  # its memory is the result's, which ends here


def refused():
    q, k, v = arrays(9)
    said = []
    for call in (
        lambda: fovea.attention(q, k[:, :4], v),
        lambda: fovea.attention(q, k, v, bias=np.zeros((3, 9, 9), np.float32)),
        lambda: fovea.attention(q, k, v, is_causal=True),
        lambda: fovea.attention(q, k, v, backend="none"),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            call()
        said.append(str(caught.value))
    return said


def explained():
    q, k, v = arrays(12)
    fovea.prepare(q, k, v, need="q")
    lines = [fovea.explain(q, k, v, causal=True), fovea.explain("bwd b=2 hq=8 sq=512 sk=512 d=64 bf16", arch="sm_90")]
    return [*(text.splitlines()[0] for text in lines), sorted(fovea.backends())]  # below: the number of threads


def mask():
    return [fovea.dropout_mask(2, 3, 50, 60, 0.3, seed=7, offset=1)]


WORK = {
    "dense 7": lambda: dense(7),
    "dense 130": lambda: dense(130),
    "dense fp64": lambda: dense(30, dtype=np.float64),
    "large workspace": lambda: dense(300, heads=8, dim=64),
    "shared object": shared_object,
    "packed": packed,
    "other libraries": other_libraries,
    "refused": refused,
    "explained": explained,
    "mask": mask,
}


def same(got, want):
    return len(got) == len(want) and all(
        np.array_equal(x, y) if isinstance(y, np.ndarray) else x == y for x, y in zip(got, want)
    )


@pytest.fixture
def eager_switches():
    """Threads are interrupted as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
    fovea.set_num_threads(0)


def test_stress(eager_switches):
    free = bool(sysconfig.get_config_var("Py_GIL_DISABLED")) and not sys._is_gil_enabled()
    print(f"Python {sys.version.split()[0]}, {'without' if free else 'with'} the GIL")
    want = {name: work() for name, work in WORK.items()}
    wrong = []
    start = threading.Barrier(THREADS)

    def run(index):
        order = random.Random(index)
        start.wait()
        for _ in range(ROUNDS):
            name = order.choice(list(WORK))
            if order.random() < 0.1:
                fovea.set_num_threads(order.randrange(4))
            try:
                if not same(WORK[name](), want[name]):
                    wrong.append(name)
            except BaseException as error:
                wrong.append(f"{name}: {error!r}")

    threads = [threading.Thread(target=run, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, (len(wrong), wrong[:5])


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")
def test_calls_in_signal_handlers():
    """A handler interrupts calls of its own thread with smaller and larger ones."""
    sizes = (3, 64, 200)
    want = {rows: dense(rows) for rows in sizes}
    wrong, handled = [], []

    def handler(*_):
        rows = sizes[len(handled) % len(sizes)]
        handled.append(rows)
        if not same(dense(rows), want[rows]):
            wrong.append(rows)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        for n in range(3000):
            signal.setitimer(signal.ITIMER_REAL, 1e-5 * (1 + n % 40))
            rows = sizes[n % len(sizes)]
            if not same(dense(rows), want[rows]):
                wrong.append(rows)
            if len(handled) > 300:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(handled) > 50 and not wrong
