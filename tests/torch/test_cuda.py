# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors, as far as a machine without a GPU shows: they are traced, and the call that would go to a device
carries its index, its current stream and addresses as they are. What the library answers is for it to say."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fovea
from fovea import _abi
from fovea.torch import _call, attention


def test_traced_for_a_device():
    with FakeTensorMode():
        q = torch.empty(2, 4, 128, 64, device="cuda:1", dtype=torch.bfloat16)
        out, lse = attention(q, q, q, causal=True, dropout_p=0.1, return_lse=True)
        assert out.device == lse.device == torch.device("cuda:1")
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
        options = arguments(q)
        grad = torch.ops.fovea.attention_backward(out, None, out, lse, [False, True] + 4 * [False], *options)[1]
        assert grad.device == q.device and grad.shape == q.shape
        with pytest.raises(ValueError, match="k: on cuda:0; accepted: cuda:1, where q lies"):
            attention(q, torch.empty_like(q, device="cuda:0"), q)


class OnDevice:
    """A CPU tensor that says it lies on a device."""

    device = torch.device("cuda", 1)

    def __init__(self, tensor):
        self._tensor = tensor

    def __getattr__(self, name):
        return getattr(self._tensor, name)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(_call, "_current_stream", lambda index: {OnDevice.device.index: 0x1234}[index])


def arguments(q, seed_tensor=None, **changes):
    return _call.Arguments(
        q, q, q, *[None] * 9, seed_tensor, None, 0, 0, None, False, -1, -1, None, 0.0, 0.5, "fovea", 0, 0, 0, "bhsd", 0,
        None,
    )._replace(**changes)  # fmt: skip


def test_the_problem_of_a_device(device):
    q, seed = torch.randn(1, 2, 8, 16), torch.tensor(7)
    a = arguments(OnDevice(q), OnDevice(seed))
    problem = _call._Problem(a)
    problem.place(a, [*a[:3], seed])
    raw = problem.raw
    assert (raw.device, raw.device_index, raw.stream) == (1, 1, 0x1234)
    assert raw.seed_ptr == seed.data_ptr()
    of_q = _abi.TENSOR.unpack(ctypes.string_at(raw.q, _abi.TENSOR.size))
    assert of_q[1] == q.data_ptr()
    assert of_q[6:10] == (1, 8, 2, 16)


@pytest.mark.skipif("cuda" in os.environ.get("FOVEA_BACKEND", ""), reason="a backend is forced")
def test_refused_with_the_words_of_explain(device):
    """Until this build has CUDA kernels."""
    why = fovea.backends()["cuda"]
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(NotImplementedError) as caught:
        _call.forward(*arguments(OnDevice(q)))
    assert f"cuda: {why}" in str(caught.value)
    assert "device=cuda" in str(caught.value)


def test_lengths_on_a_device_are_not_read(device):
    """Reading them would wait for the device: the alignment has to be said."""
    q = OnDevice(torch.randn(6, 2, 16))
    lengths, others = (OnDevice(torch.tensor([0, 2, 6])) for _ in range(2))
    with pytest.raises(ValueError, match="align: None with causal, lengths that lie on the device; accepted"):
        _call.forward(*arguments(q, causal=True, cu_seqlens_q=lengths, cu_seqlens_k=others))


def test_the_same_lengths_of_64_bits_stay_the_same(device, monkeypatch):
    """They are converted once: that both sides have them is known by the tensor."""
    seen = []
    monkeypatch.setattr(_call, "compute", lambda arguments, return_lse: (seen.append(arguments), (None, None))[1])
    q, used = torch.randn(2, 2, 4, 16), torch.tensor([2, 4])
    attention(q, q, q, causal=True, seqused_q=used, seqused_k=used)
    attention(q, q, q, causal=True, seqused_q=used, seqused_k=used.clone())
    same, others = (_call.Arguments(*a) for a in seen)
    assert same.seqused_q is same.seqused_k and same.seqused_q.dtype == torch.int32
    assert others.seqused_q is not others.seqused_k
    on_device = OnDevice(same.seqused_q)
    _call._need_no_align(arguments(OnDevice(q), causal=True, seqused_q=on_device, seqused_k=on_device))


def test_the_same_lengths_on_a_device_need_no_alignment(device):
    q, lengths = OnDevice(torch.randn(6, 2, 16)), OnDevice(torch.tensor([0, 2, 6]))
    _call._need_no_align(arguments(q, causal=True, cu_seqlens_q=lengths, cu_seqlens_k=lengths))


# ---- the backward's kernels, compiled while its forward runs ----

AHEAD = """
import sys, threading, time, torch
from fovea.torch import _ahead, _call
from test_cuda import OnDevice, arguments

OnDevice.device = torch.device("cuda", 0)
_call._current_stream = lambda index: 0

started = []

class Thread(threading.Thread):
    def start(self):
        started.append(self.name)
        super().start()

threading.Thread = Thread

def call(batch, learns=(True, True, True), **changes):
    started.clear()
    make = lambda wants: OnDevice(torch.randn(batch, 4, 128, 64, dtype=torch.bfloat16, requires_grad=wants))
    q, k, v = map(make, learns)
    _ahead.begin_backward(arguments(q)._replace(k=k, v=v, align="top_left", **changes))
    return started

def wait():
    while threading.active_count() > 1:
        time.sleep(0.01)
    print("--", flush=True, file=sys.stderr)

assert call(2) == ["fovea: kernels of a backward"]
wait()
assert call(3) == []  # of that kind
assert len(call(2, causal=True)) == 1
wait()
call(2, (False, True, True))
wait()
call(2, seed_tensor=OnDevice(torch.tensor(3)), backend="cpu")  # refused: the backward would say so
wait()
call(2, layout="bhds")
wait()
call(2, softcap=2.0)  # the end of the process waits for it
"""


@pytest.mark.skipif("cuda" in os.environ.get("FOVEA_BACKEND", ""), reason="a backend is forced")
def test_kernels_of_a_backward_begin_ahead():
    """With the driver and the NVRTC that tests/cpp/fake plays."""
    library = Path(fovea._library.path)
    fake = library.parent / "tests" / "cpp" / "fake"
    env = {"LD_LIBRARY_PATH": str(fake), "FOVEA_NVRTC": str(fake / "libnvrtc.so.13"), "FOVEA_CACHE_DIR": "none",
           "FOVEA_LOG": "jit", "FOVEA_LIBRARY": str(library), "FOVEA_JIT": "jit"}  # fmt: skip
    paths = os.pathsep.join([str(Path(fovea.__file__).parents[1]), str(Path(__file__).parent)])
    done = subprocess.run([sys.executable, "-c", AHEAD], env={**os.environ, "PYTHONPATH": paths, **env}, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 0 and not done.stdout, done.stderr
    parts = done.stderr.split("--\n")
    plain, causal, less, backend, layout, last = (part.count("fovea: jit: compiled") for part in parts)
    assert plain >= 1 and causal >= 1 and less >= 2 and last >= 1 and backend == layout == 0, done.stderr
    assert "_backward" in parts[0] and "_forward" not in done.stderr
    assert ".banded = true" in parts[1] and ".dq = true" not in parts[2]


def test_only_the_first_forward_of_a_kind_begins_them(device):
    """It is called before the library, which refuses this problem here."""
    q = torch.randn(1, 2, 8, 16)
    seen = []
    with pytest.raises(NotImplementedError):
        _call.compute(tuple(arguments(OnDevice(q))), True, seen.append)
    assert len(seen) == 1
    for _ in range(2):
        _call.compute(tuple(arguments(q)), True, seen.append)
    assert len(seen) == 1  # on the CPU nothing is compiled
