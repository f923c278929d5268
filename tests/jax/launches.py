# SPDX-License-Identifier: Apache-2.0
"""For test_protocol.py, in a process whose libcuda.so.1 computes nothing: a problem with lengths is lowered for a GPU and then
computed there. Prints how many kernels the call launches without having been lowered, how many after it was, and how many if the
lengths had no address when it was lowered."""

import ctypes

import conftest  # noqa: F401

import fovea.jax  # noqa: F401
from fovea import _abi
from fovea._library import check, lib
from fovea.jax import _call

ROWS, LENGTHS = ((2, 37, 4, 16), "bfloat16"), ((2,), "int32")
AVALS = {"q": ROWS, "k": ROWS, "v": ROWS, "seqused_q": LENGTHS, "seqused_k": LENGTHS}


def launches(call):
    """The problem as XLA's handler has it: every tensor has an address."""
    problem = _call.Problem(call, AVALS, 0)
    memory = ctypes.create_string_buffer(1 << 24)
    address = (ctypes.addressof(memory) + 4095) // 4096 * 4096
    for number, tensor in enumerate(problem._kept):
        ctypes.c_void_p.from_buffer(tensor, ctypes.sizeof(ctypes.c_size_t)).value = address + (number << 18)
    counted = ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "fake_launches")
    before = counted.value
    check(lib.fovea_forward(ctypes.byref(problem.raw), address + (1 << 23), 1 << 20))
    return counted.value - before


def call_of(left):
    return _call.Call(
        _abi.FORWARD, tuple(AVALS), ("out", "lse"), True, left, -1, "top_left", None, 0.0, 0.0, 0, 0, 0, False, False, None
    )


if __name__ == "__main__":
    print(launches(call_of(5)), end=" ")
    _call.Problem(call_of(6), AVALS, 0).workspace()  # as lowering does
    print(launches(call_of(6)), end=" ")
    _call._ADDRESS = 0
    _call.Problem(call_of(7), AVALS, 0).workspace()
    _call._ADDRESS = 4096
    print(launches(call_of(7)))
