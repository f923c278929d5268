# SPDX-License-Identifier: Apache-2.0
"""Every refusal of the Python package: the exception's type, that its text names the argument, what was given and
what would be accepted, and that nothing was written."""

import contextlib
import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import fovea
from fake_dlpack import DeviceArray, FakeArray, GradArray, NegatedArray, PairArray, VersionedArray

B, SQ, SK, HQ, HK, D, DV = 2, 6, 9, 4, 2, 8, 5
SENTINEL = 7.0


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def read_only(array):
    array.flags.writeable = False
    return array


class OnADevice:
    """One number, as PyTorch's and CuPy's arrays of a GPU have it: reading it waits."""

    __cuda_array_interface__ = {"shape": (), "typestr": "<i4", "data": (1 << 44, False), "version": 3}

    def __index__(self):
        raise AssertionError("it was read")


class Described:
    """Memory as __array_interface__ describes it, which may be wrong."""

    def __init__(self, **changes):
        self.array = zeros(B, SQ, HQ, D)
        self.__array_interface__ = {**self.array.__array_interface__, **changes}


class Problem:
    """A legal problem with everything in it; a case changes one thing of it."""

    def __init__(self, packed=False):
        rows_q, rows_k, batch = ((11,), (14,), 3) if packed else ((B, SQ), (B, SK), B)
        sq, sk = (5, 7) if packed else (SQ, SK)
        self.q, self.k, self.v = zeros(*rows_q, HQ, D), zeros(*rows_k, HK, D), zeros(*rows_k, HK, DV)
        self.options = dict(
            bias=zeros(1, HQ, sq, sk),
            bias2=zeros(batch, 1, 1, sk),
            mask=np.ones((batch, 1, sq, sk), bool),
            alibi_slopes=zeros(HQ),
            sink=zeros(HQ),
            align="top_left",
            causal=True,
        )
        if packed:
            self.options.update(
                cu_seqlens_q=np.array([0, 4, 6, 11], np.int32),
                cu_seqlens_k=np.array([0, 5, 7, 14], np.int32),
                max_seqlen_q=5,
                max_seqlen_k=7,
            )
        self.out = np.full((*rows_q, HQ, DV), SENTINEL, np.float32)
        self.lse = zeros(HQ, *rows_q) if packed else zeros(B, HQ, SQ)
        self.grads_out = {
            name: np.full(np.shape(array), SENTINEL, np.float32)
            for name, array in (("q", self.q), ("k", self.k), ("v", self.v))
        }
        self.grads_out.update(
            {n: np.full(self.options[n].shape, SENTINEL, np.float32) for n in ("bias", "bias2", "sink")}
        )
        self.backward = dict(grad_out=np.ones_like(self.out), out=zeros(*self.out.shape), lse=self.lse)

    def change(self, changes):
        for name, value in changes.items():
            if name in ("q", "k", "v"):
                setattr(self, name, value)
            elif name == "out=":
                self.given_out = value
            elif name in ("grad_out", "out", "lse", "grad_lse", "need", "grads_out"):
                self.backward[name] = value
            else:
                self.options[name] = value

    def run_forward(self):
        out = getattr(self, "given_out", self.out)
        return fovea.attention(self.q, self.k, self.v, out=out, return_lse=True, **self.options)

    def run_backward(self):
        named = {"grads_out": self.grads_out, **self.backward}
        first = [named.pop(name) for name in ("grad_out",)]
        last = [named.pop(name) for name in ("out", "lse")]
        return fovea.attention_backward(*first, self.q, self.k, self.v, *last, **named, **self.options)

    def check_untouched(self):
        for array in (self.out, *self.grads_out.values()):
            assert (array == SENTINEL).all()


def test_the_problem_is_legal():
    """Without a change nothing is refused: every case below is about its change alone."""
    for packed in (False, True):
        problem = Problem(packed)
        problem.run_forward()
        problem.run_backward()
        with pytest.raises(AssertionError):
            problem.check_untouched()


half, double, bf16 = np.float16, np.float64, ml_dtypes.bfloat16
swapped = np.dtype(np.float32).newbyteorder()
odd = np.zeros((B, SQ, HQ, D), [("number", np.float32), ("more", np.uint8)])["number"]  # 5 bytes apart
unaligned = np.zeros(B * SQ * HQ * D * 4 + 1, np.uint8)[1:].view(np.float32).reshape(B, SQ, HQ, D)

# what is changed: the exception, and what its text has besides the argument's name
BOTH = {
    "q, k, v": [
        (dict(q=None), TypeError, "q: a NoneType; accepted: an array"),
        (dict(q=Described(shape=(B, -SQ, HQ, D))), ValueError, "q: a Described whose __array_interface__ NumPy refuses: neg.*; accepted"),
        (dict(q=Described(strides=(4,))), ValueError, "q: a Described whose __array_interface__ NumPy refuses: mismatch.*; accepted"),
        (dict(q=Described(typestr="junk")), ValueError, "q: a Described whose __array_interface__ NumPy refuses: .*; accepted"),
        (dict(k=PairArray(zeros(B, SK, HK, D))), TypeError, "k: float32x2; accepted: float32, float16, bfloat16 or float64"),
        (dict(q=[[1.0]]), TypeError, "q: a list; accepted: an array"),
        (dict(k="key"), TypeError, "k: a str; accepted: an array"),
        (dict(q=zeros(SQ, D)), ValueError, r"q: shape 6x8; accepted: \(B, S, H, D\) or \(B1, B2, S, H, D\)"),
        (dict(v=zeros(SK, HK, DV)), ValueError, r"v: shape 9x2x5; accepted: \(B, S, Hk, Dv\)"),
        (dict(q=zeros(1, 1, B, SQ, HQ, D)), ValueError, "q: shape 1x1x2x6x4x8; accepted"),
        (dict(k=zeros(1, B, SK, HK, D)), ValueError, "k: shape 1x2x9x2x8; accepted: the rank of q, 4"),
        (dict(q=zeros(B, SQ, HQ, D, dtype=np.int32)), TypeError, "q: int32; accepted: fp32, fp16, bf16, fp64"),
        (dict(q=zeros(B, SQ, HQ, D, dtype=np.uint8)), TypeError, "q: uint8; accepted: float32, float16, bfloat16"),
        (dict(q=zeros(B, SQ, HQ, D, dtype=np.complex64)), TypeError, "q: complex64; accepted"),
        (dict(q=zeros(B, SQ, HQ, D, dtype=object)), TypeError, "q: object; accepted"),
        (dict(q=zeros(B, SQ, HQ, D, dtype=swapped)), TypeError, f"q: {swapped}; accepted: float32"),
        (dict(q=zeros(B, SQ, HQ, D, dtype=ml_dtypes.float8_e4m3fn)), TypeError, "q: float8_e4m3fn; accepted"),
        (dict(k=zeros(B, SK, HK, D, dtype=half)), TypeError, "k: fp16; accepted: fp32, the type of q"),
        (dict(v=zeros(B, SK, HK, DV, dtype=bf16)), TypeError, "v: bf16; accepted: fp32, the type of q"),
        (dict(k=zeros(B, SK, HK, D + 1)), ValueError, "k: shape 2x9x2x9, head_dim 9; accepted: that of q, 8"),
        (dict(k=zeros(B, SK, 3, D)), ValueError, "k: shape 2x9x3x8, 3 heads; accepted: a divisor of q's 4"),
        (dict(k=zeros(B + 1, SK, HK, D)), ValueError, "k: shape 3x9x2x8; accepted: the batch of q, 2"),
        (dict(v=zeros(B, SK + 1, HK, DV)), ValueError, "v: shape 2x10x2x5; accepted.*2x9x2x5"),
        (dict(q=odd), ValueError, "q: strides of .* bytes, or an address, that do not fall on its 4-byte elements"),
        (dict(q=unaligned), ValueError, "q: strides of .* bytes, or an address"),
        (dict(q=np.ma.zeros((B, SQ, HQ, D), np.float32)), TypeError, "q: a masked array; accepted"),
        (dict(q=GradArray(zeros(B, SQ, HQ, D))), ValueError, "q: a GradArray that does not give.*requires? grad"),
        (dict(k=NegatedArray(zeros(B, SK, HK, D))), ValueError, "k: a NegatedArray whose memory holds.*accepted: .*resolve_neg"),
        (dict(v=DeviceArray(zeros(B, SK, HK, DV))), ValueError, "v: lies on CUDA device 0; accepted: the CPU, where q lies"),
    ],
    "bias and mask": [
        (dict(bias=zeros(B, HQ, SQ, SK - 1)), ValueError, "bias: shape 2x4x6x8 does not broadcast to B=2, Hq=4, Sq=6"),
        (dict(bias2=zeros(3, 1, 1, SK)), ValueError, "bias2: shape 3x1x1x9 does not broadcast to B=2"),
        (dict(bias=zeros(1, B, HQ, SQ, SK)), ValueError, "bias: shape 1x2x4x6x9 does not broadcast"),
        (dict(bias=zeros(1, 1, 1, 1, 1, SK)), ValueError, "bias: shape 1x1x1x1x1x9; accepted: at most 5 dimensions"),
        (dict(bias=zeros(SQ, SK, dtype=bool)), TypeError, "bias: bool; accepted: .*goes into mask"),
        (dict(bias=zeros(SQ, SK, dtype=np.int64)), TypeError, "bias: int64; accepted: fp32"),
        (dict(bias=zeros(SQ, SK, dtype=double)), TypeError, "bias: fp64; accepted: fp32, fp16, bf16"),
        (dict(bias2=3.0), TypeError, "bias2: a float; accepted: an array"),
        (dict(mask=zeros(SQ, SK)), TypeError, "mask: fp32; accepted: bool; .*go into bias"),
        (dict(mask=zeros(SQ, SK, dtype=double)), TypeError, "mask: fp64; accepted: bool; .*go into bias"),
        (dict(mask=zeros(SQ, SK, dtype=np.uint8)), TypeError, "mask: uint8; accepted: bool"),
        (dict(mask=zeros(SQ, SK, dtype=np.int64)), TypeError, "mask: int64; accepted: bool"),
        (dict(mask=zeros(SK, SQ, dtype=bool)), ValueError, "mask: shape 9x6 does not broadcast to"),
        (dict(mask=zeros(B, SK, dtype=bool)), ValueError, "Sk=9; did you mean 2x1x1x9, one for each key?"),
    ],
    "alibi_slopes and sink": [
        (dict(alibi_slopes=zeros(HK)), ValueError, r"alibi_slopes: shape 2; accepted: \(Hq\), \(B, Hq\) or \(B1, B2, Hq\), 4"),
        (dict(alibi_slopes=zeros(3, HQ)), ValueError, r"alibi_slopes: shape 3x4; accepted: .*2x4"),
        (dict(alibi_slopes=zeros(HQ, dtype=half)), TypeError, "alibi_slopes: fp16; accepted: fp32"),
        (dict(alibi_slopes=[0.5, 0.25]), ValueError, r"alibi_slopes: shape 2; accepted: \(Hq\)"),
        (dict(alibi_slopes=[None] * 4), TypeError, "alibi_slopes: a list of other things than numbers; accepted"),
        (dict(alibi_slopes=0.5), TypeError, "alibi_slopes: a float; accepted: an array"),
        (dict(sink=zeros(HQ, 1)), ValueError, r"sink: shape 4x1; accepted: \(Hq\), 4"),
        (dict(sink=zeros(HQ, dtype=double)), TypeError, "sink: fp64; accepted: fp32"),
    ],
    "numbers": [
        (dict(scale=float("nan")), ValueError, "scale: nan; accepted: a finite number"),
        (dict(scale=float("inf")), ValueError, "scale: inf; accepted: a finite number"),
        (dict(scale="auto"), TypeError, "scale: 'auto'; accepted: a number"),
        (dict(scale=10**400), ValueError, "scale: an integer beyond all floating-point numbers; accepted: a finite one"),
        (dict(causal="no"), TypeError, "causal: 'no'; accepted: True or False"),
        (dict(causal=np.array([True, False])), TypeError, "causal: array.*; accepted: True or False"),
        (dict(deterministic=None), TypeError, "deterministic: None; accepted: True or False"),
        (dict(scale=[1, 2]), TypeError, r"scale: \[1, 2\]; accepted: a number"),
        (dict(softcap=-1.0), ValueError, r"softcap: -1; accepted: 0 \(none\)"),
        (dict(softcap=float("inf")), ValueError, "softcap: inf; accepted"),
        (dict(softcap=None), TypeError, "softcap: None; accepted: a number"),
        (dict(window=(-2, 0)), ValueError, r"window: -2; accepted: -1 \(unbounded\) or more"),
        (dict(window=(0, -7)), ValueError, "window: -7; accepted"),
        (dict(window=(5, None)), TypeError, "window: None; accepted: an integer, -1 for unbounded"),
        (dict(window=5), TypeError, r"window: 5; accepted: a pair \(left, right\)"),
        (dict(window=(1, 2, 3)), TypeError, r"window: \(1, 2, 3\); accepted: a pair"),
        (dict(window=(1.5, 2)), TypeError, "window: 1.5; accepted: an integer"),
        (dict(window=(2**70, 2)), ValueError, "window: 1180591620717411303424; accepted: an integer of 64 bits"),
        (dict(dropout_p=-0.1, seed=1), ValueError, "dropout_p: -0.1; accepted: 0 <= dropout_p <= 1"),
        (dict(dropout_p=1.5, seed=1), ValueError, "dropout_p: 1.5; accepted"),
        (dict(dropout_p=float("nan"), seed=1), ValueError, "dropout_p: nan; accepted"),
        (dict(dropout_p=0.1), ValueError, "seed: None with dropout_p=0.1; accepted: an integer of up to 64 bits"),
        (dict(dropout_p=0.1, seed=2**64), ValueError, "seed: 18446744073709551616; accepted: an integer of up to 64"),
        (dict(dropout_p=0.1, seed=-(2**63) - 1), ValueError, "seed: -9223372036854775809; accepted"),
        (dict(dropout_p=0.1, seed=True), TypeError, "seed: True; accepted: an integer of up to 64 bits"),
        (dict(offset=False), TypeError, "offset: False; accepted: an integer of up to 64 bits"),
        (dict(offset=-(2**63) - 1), ValueError, "accepted: an integer of up to 64 bits, a negative one as its two's compl"),
        (dict(dropout_p=0.1, seed=1.5), TypeError, "seed: 1.5; accepted: an integer of up to 64 bits, or an array"),
        (dict(dropout_p=0.1, seed=zeros(1)), TypeError, "seed: an array of type float32; accepted"),
        (dict(dropout_p=0.1, seed=zeros(2, dtype=np.int64)), ValueError, "seed: an array of shape 2; accepted"),
        (dict(dropout_p=0.1, seed=1, offset="3"), TypeError, "offset: '3'; accepted"),
        (dict(offset=2**64), ValueError, "offset: 18446744073709551616; accepted"),
        (dict(rng="philox"), ValueError, "rng: 'philox'; accepted: 'fovea', 'torch_mem_efficient'"),
        (dict(stream=3), ValueError, "stream: 0x3; accepted: NULL on the CPU"),
        (dict(stream="default"), TypeError, "stream: 'default'; accepted: an integer, .*cuda_stream"),
    ],
    "choices": [
        (dict(align="left"), ValueError, "align: 'left'; accepted: 'bottom_right', 'top_left'"),
        (dict(align=0), ValueError, "align: 0; accepted"),
        (dict(align=[]), ValueError, r"align: \[\]; accepted"),
        (dict(align=None), ValueError, r"align: None with causal, Sq=6 and Sk=9; accepted: 'bottom_right'.*'top_left'"),
        (dict(align=None, causal=False, window=(3, 3)), ValueError, "align: None with window, Sq=6 and Sk=9"),
        (dict(align=None, causal=False), ValueError, "align: None with alibi_slopes, Sq=6 and Sk=9"),
        (dict(align=None, seqused_k=np.array([6, 5], np.int32)), ValueError, "align: None with .*Sk=5 in sequence 1"),
        (dict(layout="sbhd"), ValueError, "layout: 'sbhd'; accepted: 'bshd', 'bhsd'"),
        (dict(layout="bhsd"), ValueError, "k: shape 2x9x2x8, 9 heads; accepted: a divisor of q's 6 heads"),
        (dict(backend="tpu"), ValueError, "backend: 'tpu'; accepted: cpu, cuda, reference"),
        (dict(backend=1), TypeError, "backend: 1; accepted: a name"),
        (dict(backend="cpu\0"), ValueError, r"backend: 'cpu\\x00'; accepted: cpu, cuda, reference"),
        (dict(backend="\udcff"), ValueError, r"backend: '\\udcff'; accepted: cpu, cuda, reference"),
        (dict(backend="cuda"), NotImplementedError, "no backend can compute.*cuda: the tensors lie on the CPU"),
    ],
    "lengths, dense": [
        (dict(seqused_q=np.array([1, 7], np.int32)), ValueError, "seqused_q: 7 at index 1; accepted: 0 to .* 6"),
        (dict(seqused_k=np.array([-1, 7], np.int32)), ValueError, "seqused_k: -1 at index 0; accepted"),
        (dict(seqused_q=np.array([1], np.int32)), ValueError, r"seqused_q: shape 1; accepted: \(B\), 2"),
        (dict(seqused_q=np.array([1, 2], np.uint32)), TypeError, "seqused_q: uint32; accepted: int32"),
        (dict(seqused_q=np.array([1, 2**32 + 2])), ValueError, "seqused_q: 4294967298 at index 1; accepted: 0 to 2147483647"),
        (dict(seqused_k=[1, 10]), ValueError, "seqused_k: 10 at index 1; accepted: 0 to .* 9"),
        (dict(seqused_k=[1, "b"]), TypeError, "seqused_k: a list of other things than numbers; accepted: numbers"),
        (dict(seqused_k=[1, 2**70]), ValueError, "seqused_k: 1180591620717411303424 at index 1; accepted: integers"),
        (dict(seqused_k=[1, 2**63]), ValueError, "seqused_k: 9223372036854775808 at index 1; accepted: integers"),
        (dict(seqused_k=([1], [1, 2])), TypeError, "seqused_k: a tuple of other things than numbers; accepted"),
        (dict(max_seqlen_q=6), ValueError, "max_seqlen_q: 6 without cu_seqlens; accepted"),
        (dict(batch_shape=(1, 2)), ValueError, "batch_shape: given without cu_seqlens; accepted: None"),
    ],
}  # fmt: skip

PACKED = [
    (dict(q=zeros(1, 11, HQ, D)), ValueError, r"q: shape 1x11x4x8; accepted: \(total, H, D\), as cu_seqlens are given"),
    (dict(cu_seqlens_k=None), ValueError, "cu_seqlens_k: not given beside cu_seqlens_q; accepted: both, or neither"),
    (dict(cu_seqlens_q=None), ValueError, "cu_seqlens_q: not given beside cu_seqlens_k; accepted"),
    (dict(cu_seqlens_q=[0, 4, 6, 12]), ValueError, "cu_seqlens_q: 12 at index 3; accepted: .*11"),
    (dict(cu_seqlens_q=[0, 4.0, 6, 11]), TypeError, "cu_seqlens_q: fp64; accepted: int32, int64"),
    (dict(cu_seqlens_q=zeros(4)), TypeError, "cu_seqlens_q: fp32; accepted: int32, int64"),
    (dict(cu_seqlens_q=zeros(4, dtype=np.uint32)), TypeError, "cu_seqlens_q: uint32; accepted: int32 or int64"),
    (dict(cu_seqlens_q=zeros(0, dtype=np.int32)), ValueError, r"cu_seqlens_q: shape 0; accepted: \(B \+ 1\)"),
    (dict(cu_seqlens_q=zeros(2, 2, dtype=np.int32)), ValueError, r"cu_seqlens_q: shape 2x2; accepted: \(B \+ 1\)"),
    (dict(cu_seqlens_q=np.array([0, 4, 11], np.int32)), ValueError, "cu_seqlens_k: shape 4; accepted: that of"),
    (dict(cu_seqlens_q=np.array([1, 4, 6, 11], np.int32)), ValueError, "cu_seqlens_q: begins with 1; accepted: 0"),
    (dict(cu_seqlens_q=np.array([0, 6, 4, 11], np.int32)), ValueError, "cu_seqlens_q: 4 at index 2 after 6; accepted"),
    (dict(cu_seqlens_k=np.array([0, 4, 6, 15], np.int32)), ValueError, "cu_seqlens_k: 15 at index 3; accepted: .*14"),
    (dict(max_seqlen_q=4), ValueError, "max_seqlen_q: 4; accepted: at least the longest sequence .*5"),
    (dict(max_seqlen_k=-1), ValueError, "max_seqlen_k: -1; accepted"),
    (dict(max_seqlen_k=7.0), TypeError, "max_seqlen_k: 7.0; accepted: an integer"),
    (dict(max_seqlen_k=OnADevice()), TypeError, "max_seqlen_k: an array of a CUDA device, .*wait for; accepted: an integer"),
    (dict(max_seqlen_k=8), ValueError, "bias: shape 1x4x5x7 does not .*=3.*=4, max_seqlen_q=5, max_seqlen_k=8"),
    (dict(batch_shape=(2, 2)), ValueError, "batch_shape: 2x2; accepted: B1 x B2 = 3, the number of sequences"),
    (dict(batch_shape=(0, 3)), ValueError, "batch_shape: 0x3; accepted"),
    (dict(batch_shape=3), TypeError, r"batch_shape: 3; accepted: a pair of integers \(B1, B2\)"),
    (dict(batch_shape=("a", "b")), TypeError, "batch_shape: .*; accepted: a pair of integers"),
    (dict(layout="bhsd"), ValueError, "layout: 'bhsd' with cu_seqlens; accepted: 'bshd'"),
    (dict(align=None), ValueError, r"align: None with causal, Sq=4 and Sk=5 in sequence 0; accepted"),
    (dict(seqused_q=np.array([1, 3, 1], np.int32)), ValueError, "seqused_q: 3 at index 1; accepted: 0 to .* 2"),
    (dict(alibi_slopes=zeros(2, HQ)), ValueError, "alibi_slopes: shape 2x4; accepted: .*3x4"),
]  # fmt: skip

shared = zeros(B, SQ, HQ, DV)
FORWARD = [
    ({"out=": zeros(B, SQ, HQ, D)}, ValueError, "out: shape 2x6x4x8; accepted: .*2x6x4x5"),
    ({"out=": zeros(SQ, HQ, DV)}, ValueError, "out: shape 6x4x5; accepted"),
    ({"out=": zeros(B, SQ, HQ, DV, dtype=double)}, TypeError, "out: fp64; accepted: fp32, the type of q"),
    ({"out=": read_only(zeros(B, SQ, HQ, DV))}, ValueError, "out: a read-only array; accepted: one that can"),
    ({"out=": VersionedArray(read_only(zeros(B, SQ, HQ, DV)))}, ValueError, "out: a read-only array"),
    ({"out=": np.broadcast_to(zeros(1, SQ, HQ, DV), (B, SQ, HQ, DV))}, ValueError, "out: a read-only array"),
    ({"out=": np.lib.stride_tricks.as_strided(zeros(SQ, HQ, DV), (B, SQ, HQ, DV), (0, 80, 20, 4))}, ValueError,
     "out: strides 0x20x5x1 with shape 2x6x4x5 lead two elements to one address"),
    ({"out=": shared, "q": np.lib.stride_tricks.as_strided(shared, (B, SQ, HQ, D), (480, 80, 20, 0))}, ValueError,
     "out: shares memory with q; accepted: memory of its own"),
    ({"out=": [0.0]}, TypeError, "out: a list; accepted: an array"),
    ({"out=": DeviceArray(zeros(B, SQ, HQ, DV))}, ValueError, "out: lies on CUDA device 0; accepted: the CPU"),
]  # fmt: skip

BACKWARD = [
    (dict(grad_out=None), TypeError, "grad_out: a NoneType; accepted: an array"),
    (dict(grad_out=zeros(B, SQ, HQ, D)), ValueError, "grad_out: shape 2x6x4x8; accepted: .*2x6x4x5"),
    (dict(grad_out=zeros(B, SQ, HQ, DV, dtype=half)), TypeError, "grad_out: fp16; accepted: fp32, the type of q"),
    (dict(out=zeros(B, SQ, HQ, DV + 1)), ValueError, "out: shape 2x6x4x6; accepted"),
    (dict(out=zeros(SQ)), ValueError, "out: shape 6; accepted"),
    (dict(lse=None), TypeError, "lse: a NoneType; accepted: an array"),
    (dict(lse=zeros(B, SQ, HQ)), ValueError, r"lse: shape 2x6x4; accepted: \(B, Hq, Sq\), 2x4x6"),
    (dict(lse=zeros(B, HQ, SQ, dtype=double)), TypeError, "lse: fp64; accepted: fp32"),
    (dict(grad_lse=zeros(B, HQ)), ValueError, r"grad_lse: shape 2x4; accepted: \(B, Hq, Sq\)"),
    (dict(need="w"), ValueError, "need: 'w', which has no gradient; accepted: q, k, v, bias, bias2, sink"),
    (dict(need=["scale"]), ValueError, "need: 'scale', which has no gradient"),
    (dict(need=["softcap"]), ValueError, "need: 'softcap', which has no gradient"),
    (dict(need=["alibi_slopes"]), ValueError, "need: 'alibi_slopes', which has no gradient"),
    (dict(need="q,sink", sink=None), ValueError, "need: 'sink', which is not given; accepted: q, k, v, bias, bias2"),
    (dict(need=3), TypeError, "need: 3; accepted: names of"),
    (dict(need="q"), ValueError, "grads_out: 'k', which need does not name; accepted: q"),
    (dict(grads_out={"w": zeros(1)}), ValueError, "grads_out: 'w', which names no gradient; accepted: q, k"),
    (dict(need=()), ValueError, r"need: \(\), which requests nothing; accepted: None, or names of q, k, v, bias"),
    (dict(need=[]), ValueError, r"need: \[\], which requests nothing"),
    (dict(grads_out=[zeros(1)]), TypeError, "grads_out: a list; accepted: a dict of arrays by name, or Gradients"),
    (dict(grads_out={"q": zeros(B, SQ, HQ, D + 1)}), ValueError, "grad_q: shape 2x6x4x9; accepted"),
    (dict(grads_out={"k": zeros(B, SK, HK, D, dtype=half)}), TypeError, "grad_k: fp16; accepted: fp32"),
    (dict(grads_out={"v": read_only(zeros(B, SK, HK, DV))}), ValueError, "grad_v: a read-only array"),
    (dict(grads_out={"bias": zeros(B, HQ, SQ, SK)}), ValueError, "grad_bias: shape 2x4x6x9; accepted: .*1x4x6x9"),
    (dict(grads_out={"bias2": zeros(B, 1, 1, SK, dtype=double)}), TypeError, "grad_bias2: fp64; accepted: fp32"),
    (dict(grads_out={"sink": zeros(1)}), ValueError, r"grad_sink: shape 1; accepted: \(Hq\), 4"),
    (dict(grads_out={"q": "q"}), TypeError, "grad_q: a str; accepted: an array"),
]


def named(rows):
    return [pytest.param(*row, id=row[2][:60]) for row in rows]


def refuse(problem, call, changes, exception, text):
    problem.change(changes)
    with pytest.raises(exception, match=text) as caught:
        call()
    assert type(caught.value) is exception
    assert "accepted" in str(caught.value) or "no backend" in str(caught.value) or "broadcast" in str(caught.value) \
        or "CUDA" in str(caught.value) or "give its memory" in str(caught.value)  # fmt: skip
    problem.check_untouched()


ALL_BOTH = [row for rows in BOTH.values() for row in rows]


@pytest.mark.parametrize("changes, exception, text", named(ALL_BOTH + FORWARD))
def test_forward(changes, exception, text):
    problem = Problem()
    refuse(problem, problem.run_forward, changes, exception, text)


@pytest.mark.parametrize("changes, exception, text", named(ALL_BOTH + BACKWARD))
def test_backward(changes, exception, text):
    problem = Problem()
    refuse(problem, problem.run_backward, changes, exception, text)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("changes, exception, text", named(PACKED))
def test_packed(direction, changes, exception, text):
    problem = Problem(packed=True)
    refuse(problem, getattr(problem, f"run_{direction}"), changes, exception, text)


@pytest.mark.parametrize("changes, exception, text", named(ALL_BOTH))
def test_explain(changes, exception, text):
    """explain refuses what attention refuses; what no backend can compute it explains."""
    problem = Problem()
    problem.change(changes)
    with contextlib.ExitStack() as stack:
        if "no backend" not in text:
            stack.enter_context(pytest.raises(exception, match=text))
        said = fovea.explain(problem.q, problem.k, problem.v, **problem.options)
    if "no backend" in text:
        assert "cuda: not used: the tensors lie on the CPU" in said


def test_unknown_keywords():
    q = zeros(1, 2, 1, 4)
    for call in (fovea.attention, fovea.explain):
        for name, cure in (
            ("scael", r"did you mean scale\?"),
            ("is_causal", 'causal=True, with align="top_left" where Sq and Sk differ'),
            ("attn_mask", "mask= for bool .*bias= for numbers"),
            ("dropout", "dropout_p="),
            ("enable_gqa", "not needed"),
            ("need_weights", "probabilities are never stored"),
            ("query", "q="),
            ("sliding_window", r"window=\(n - 1, 0\)"),
            ("score_mod", "bias=, alibi_slopes=, softcap= or scale= instead of a function"),
            ("block_mask", "causal=, window=, .* instead of a function"),
            ("block_table", "paged caches are not supported"),
            ("alibi", "alibi_slopes="),
            ("kv_lens", "seqused_k="),
            ("head_mask", "scale the heads of the result"),
            ("zzz", "accepted: bias, bias2, mask"),
        ):
            with pytest.raises(TypeError, match=f"^{name}: not an option; {cure}"):
                call(q, q, q, **{name: 1})
    with pytest.raises(TypeError, match=r"^attention: 4 arguments by position; accepted: q, k, v, and .* by name"):
        fovea.attention(q, q, q, q)
    with pytest.raises(TypeError, match=r"^attention_backward: 8 arguments by .*: grad_out, q, k, v, out, lse"):
        fovea.attention_backward(*[q] * 8)
    with pytest.raises(TypeError, match="return_lse: not an option; accepted: grad_lse, need"):
        fovea.attention_backward(q, q, q, q, q, zeros(1, 1, 2), return_lse=True)
    with pytest.raises(TypeError, match="missing 3 required positional arguments: 'q', 'k', and 'v'"):
        fovea.attention(query=q, key=q, value=q)


@pytest.mark.parametrize("kind", ["uint8", "int8", "int32", "int64"])
def test_a_mask_of_integers_is_made_bool_by_a_comparison(kind):
    """As tokenizers make them. To add them to the scores, which is what bias does, would be wrong without a word."""
    problem = Problem()
    problem.change(dict(mask=np.ones((SQ, SK), kind)))
    with pytest.raises(TypeError, match=f"mask: {kind}; accepted: bool; mask != 0 makes one of a mask of 0 and 1"):
        problem.run_forward()


def test_jax_tracers():
    """Arrays of JAX inside of jax.jit have no memory: the error says what to do instead of naming a class alone."""
    tracer = type("DynamicJaxprTracer", (), {"__module__": "jax._src.interpreters.partial_eval"})()
    with pytest.raises(TypeError, match="q: a DynamicJaxprTracer, which stands for an array .*outside of jax.jit"):
        fovea.attention(tracer, tracer, tracer)


def test_confused_layouts():
    """Where shapes do not agree, but would in the other layout, the error says so; and nowhere else."""
    hint = "with layout='{}', ({}), these shapes agree (the default is 'bshd' in fovea and 'bhsd' in fovea.torch)"
    heads_first, rows_first = hint.format("bhsd", "B, H, S, D"), hint.format("bshd", "B, S, H, D")

    def said(layout, q, k, v, **options):
        with pytest.raises(ValueError) as caught:
            fovea.attention(zeros(*q), zeros(*k), zeros(*v), layout=layout, **options)
        return str(caught.value)

    def turned(shape):
        return (*shape[:-3], shape[-2], shape[-3], shape[-1])

    for batch in ((2,), (2, 3)):
        q, k, v = (*batch, 4, 64, 8), (*batch, 2, 96, 8), (*batch, 2, 96, 5)  # (B, H, S, D)
        same = (*batch, 2, 64, 8)
        confused = [
            ("k:", (q, k, v), {}),
            ("bias:", (q, q, q), dict(bias=zeros(1, 4, 64, 64))),
            ("mask:", (q, q, q), dict(mask=zeros(4, 64, 64, dtype=bool))),
            ("sink:", (q, q, q), dict(sink=zeros(4))),
            ("alibi_slopes:", (q, q, q), dict(alibi_slopes=zeros(4))),
            ("align:", (q, same, same), dict(causal=True)),
        ]
        for name, shapes, options in confused:
            text = said("bshd", *shapes, **options)
            assert text.startswith(name) and text.endswith("; " + heads_first), text
        for name, shapes, options in confused[:-1]:
            text = said("bhsd", *map(turned, shapes), **options)
            assert text.startswith(name) and text.endswith("; " + rows_first), text
        right = [
            ((q, k, v), dict(bias=zeros(1, 4, 64, 95))),  # wrong in either layout
            ((q, (*batch, 3, 96, 8), (*batch, 3, 96, 8)), {}),
            ((q, k, v), dict(causal=True)),  # of different lengths, as they may be
            ((q, k, v), dict(window=(-2, 0))),  # wrong in another way
        ]
        for shapes, options in right:
            assert "layout" not in said("bhsd", *shapes, **options)
            assert "layout" not in said("bshd", *map(turned, shapes), **options)


@pytest.mark.parametrize(
    "arguments, exception, text",
    [
        ((-1, 1, 1, 1, 0.5, 0), ValueError, "batch: -1; accepted: 0 to 9223372036854775807"),
        ((1, 1.5, 1, 1, 0.5, 0), TypeError, "heads: 1.5; accepted: an integer"),
        ((1, 1, "4", 1, 0.5, 0), TypeError, "seqlen_q: '4'; accepted"),
        ((1, 1, 1, None, 0.5, 0), TypeError, "seqlen_k: None; accepted"),
        ((1, 1, 1, 1, 1.5, 0), ValueError, "p: 1.5; accepted: 0 <= p <= 1"),
        ((1, 1, 1, 1, "p", 0), TypeError, "p: 'p'; accepted: a number"),
        ((1, 1, 1, 1, 0.5, None), TypeError, "seed: None; accepted: an integer"),
        ((1, 1, 1, 1, 0.5, 2**64), ValueError, "seed: 18446744073709551616; accepted"),
        ((2**40, 2**40, 1, 1, 0.5, 0), (ValueError, MemoryError), None),
    ],
)
def test_dropout_mask(arguments, exception, text):
    *shape_and_p, seed = arguments
    with pytest.raises(exception, match=text):
        fovea.dropout_mask(*shape_and_p, seed=seed)


def test_dropout_mask_rng():
    with pytest.raises(ValueError, match="rng: 'philox'; accepted: 'fovea', 'torch_mem_efficient'"):
        fovea.dropout_mask(1, 1, 1, 1, 0.5, seed=0, rng="philox")


def test_pack():
    with pytest.raises(ValueError, match="arrays: an empty list; accepted: at least one array"):
        fovea.pack([])
    with pytest.raises(
        ValueError, match=r"arrays\[1\]: shape 3x4x9; accepted: any length, followed by 4x8 as in arrays\[0\]"
    ):
        fovea.pack([zeros(2, 4, 8), zeros(3, 4, 9)])
    for shape, text in (((), r"\(\)"), ((3,), "3"), ((3, 4), "3x4"), ((1, 3, 4, 8), "1x3x4x8")):
        with pytest.raises(ValueError, match=rf"arrays\[1\]: shape {text}; accepted: \(S, H, D\)"):
            fovea.pack([zeros(2, 4, 8), zeros(*shape)])
    with pytest.raises(TypeError, match=r"arrays\[1\]: float16; accepted: float32, as in arrays\[0\]"):
        fovea.pack([zeros(2, 4, 8), zeros(3, 4, 8, dtype=half)])
    with pytest.raises(TypeError, match=r"arrays\[0\]: a list; accepted: an array"):
        fovea.pack([[1.0]])
    with pytest.raises(TypeError, match="arrays: a int; accepted: a sequence of arrays"):
        fovea.pack(5)


@pytest.mark.parametrize(
    "packed, cu_seqlens, exception, text",
    [
        ([1.0], [0, 1], TypeError, r"packed: a list; accepted: an array \(total, H, D\)"),
        (zeros(), [0], TypeError, r"packed: shape \(\); accepted"),
        (zeros(5, 2, 4), "05", TypeError, "cu_seqlens: a str; accepted: an array"),
        (zeros(5, 2, 4), [0, 2.5, 5], TypeError, "cu_seqlens: not a vector of integers; accepted"),
        (zeros(5, 2, 4), np.zeros((2, 2), np.int32), TypeError, "cu_seqlens: not a vector of integers; accepted"),
        (zeros(5, 2, 4), [], ValueError, "cu_seqlens: ; accepted: offsets that begin with 0"),
        (zeros(5, 2, 4), [1, 5], ValueError, "cu_seqlens: 1, 5; accepted: offsets that begin with 0"),
        (zeros(5, 2, 4), [0, 3, 2], ValueError, "cu_seqlens: 0, 3, 2; accepted: .* never fall"),
        (zeros(5, 2, 4), [*range(9)], ValueError, r"cu_seqlens: 0, 1, 2, 3, 4, 5, 6, \.\.\.; accepted: .* with 5"),
    ],
)
def test_unpack(packed, cu_seqlens, exception, text):
    with pytest.raises(exception, match=text):
        fovea.unpack(packed, cu_seqlens)


@pytest.mark.parametrize("rank", [4, 5])
def test_shapes_in_the_order_of_the_caller(rank):
    """layout='bhsd': as they were given, and nothing of it where there is no such order."""
    outer = (3, 2)[5 - rank :]
    q, k, v = zeros(*outer, HQ, SQ, D), zeros(*outer, HK, SK, D), zeros(*outer, HK, SK, DV)
    first = "x".join(map(str, outer))
    cases = [
        (dict(v=v[..., :-1, :]), f"v: shape {first}x2x8x5; accepted: (B, Hk, Sk, Dv), {first}x2x9x5"),
        (dict(k=zeros(*outer, 3, SK, D)), f"k: shape {first}x3x9x8, 3 heads; accepted: a divisor of q's 4 heads"),
        (dict(out=zeros(*outer, HQ, SQ, D)), f"out: shape {first}x4x6x8; accepted: (B, Hq, Sq, Dv), {first}x4x6x5"),
        (dict(bias=zeros(HQ, SQ, SK + 1)), "bias: shape 4x6x10 does not broadcast to"),
        (dict(mask=zeros(1, HQ, SQ, SK + 1, dtype=bool)), "mask: shape 1x4x6x10 does not broadcast to"),
    ]
    for changes, text in cases:
        with pytest.raises(ValueError) as caught:
            fovea.attention(**{**dict(q=q, k=k, v=v, layout="bhsd"), **changes})
        said = str(caught.value)
        assert "layout" not in said
        assert said.startswith(text)


def test_num_threads():
    for bad, exception in ((-1, ValueError), (1.5, TypeError), ("2", TypeError), (None, TypeError)):
        with pytest.raises(exception, match=rf"n: {bad!r}; accepted"):
            fovea.set_num_threads(bad)
    told = set()
    for bad in (-1, 10**9, 2**70, -(2**70)):
        with pytest.raises(ValueError) as caught:
            fovea.set_num_threads(bad)
        assert str(caught.value).startswith(f"n: {bad}; accepted: 0 ")
        told.add(str(caught.value).partition("; ")[2])
    assert len(told) == 1  # one limit, whatever was given


def test_explain_arguments():
    q = zeros(1, 2, 1, 4)
    with pytest.raises(TypeError, match="explain: 2 arguments; accepted: none, a line, or q, k, v"):
        fovea.explain(q, q)
    with pytest.raises(TypeError, match=r"causal: explain\(\) without a problem; accepted: no options"):
        fovea.explain(causal=True)
    with pytest.raises(TypeError, match="causal: a problem in one line says everything itself"):
        fovea.explain("fwd b=1 hq=1 sq=1 sk=1 d=4 fp32", causal=True)
    with pytest.raises(ValueError, match="direction: 'both'; accepted: 'forward', 'backward'"):
        fovea.explain(q, q, q, direction="both")
    for given in (dict(need="q"), dict(grad_lse=zeros(1, 1, 2))):
        name = next(iter(given))
        with pytest.raises(ValueError, match=f"{name}: given with direction='forward'; accepted: direction='backward'"):
            fovea.explain(q, q, q, direction="forward", **given)
    with pytest.raises(ValueError, match=r"need: \(\), which requests nothing"):
        fovea.explain(q, q, q, need=())
    with pytest.raises(TypeError, match='backward: not an option; direction="backward"'):
        fovea.explain(q, q, q, backward=True)
    with pytest.raises(ValueError, match="colour"):
        fovea.explain("fwd b=1 hq=1 sq=1 sk=1 d=4 fp32 colour=red")
    for end in ("\0", "\0 junk", "\udcff"):
        with pytest.raises(ValueError, match=r"^problem line: \\(x00|udcff)"):
            fovea.explain("fwd sq=1 d=4 fp32 " + end)
        with pytest.raises(ValueError, match=r"^architecture: 'sm_90\\.*'; accepted: sm_80"):
            fovea.explain("fwd sq=1 d=4 bf16", arch="sm_90" + end)


def test_bfloat16_without_ml_dtypes():
    """bf16 results for NumPy, asked for by an array of a library that cannot take them, name the package to install."""
    script = (
        "import sys\n"
        "import numpy as np\n"
        "from fake_dlpack import FakeArray\n"
        "import ml_dtypes\n"
        "class Stray(FakeArray): pass\n"
        "Stray.__module__ = 'no.such.module'\n"
        "q = Stray(np.zeros((1, 2, 1, 4), ml_dtypes.bfloat16))\n"
        "import fovea\n"
        "sys.modules['ml_dtypes'] = None\n"
        "try:\n"
        "    fovea.attention(q, q, q)\n"
        "except TypeError as error:\n"
        "    print(error)\n"
    )
    paths = os.pathsep.join([os.path.dirname(__file__), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.stdout == "q: bfloat16, for which NumPy needs the package ml_dtypes: pip install ml_dtypes\n", (
        done.stderr
    )


def test_errors_leave_no_trace():
    """After an error the same thread computes as if nothing had been."""
    problem = Problem()
    want = fovea.attention(problem.q, problem.k, problem.v)
    with pytest.raises(ValueError):
        fovea.attention(problem.q, problem.k[:, :3], problem.v)
    assert np.array_equal(fovea.attention(problem.q, problem.k, problem.v), want)
    assert isinstance(fovea.attention(FakeArray(problem.q), problem.k, problem.v), FakeArray)
