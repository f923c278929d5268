# SPDX-License-Identifier: Apache-2.0
"""include/fovea/c.h for ctypes, field by field.

Pointers to tensors are plain addresses (c_void_p) here: assigning an address costs a fraction of making a ctypes
pointer. The code that fills a Problem keeps the tensors alive. tests/python/test_abi.py compares every size, offset and
constant below with a C program that is compiled from c.h.
"""

from __future__ import annotations

import ctypes
import struct

VERSION_MAJOR, VERSION_MINOR = 0, 1  # of the ABI that this file mirrors

# fovea_status
OK = 0
INVALID_ARGUMENT = 1
INVALID_TYPE = 2
UNSUPPORTED = 3
OUT_OF_MEMORY = 4
DEVICE_ERROR = 5
INTERNAL_ERROR = 6

# fovea_dtype
FP32 = 1
FP16 = 2
BF16 = 3
FP64 = 4
BOOL = 5
INT32 = 6
INT64 = 7

# fovea_direction, fovea_align, fovea_rng
FORWARD = 0
BACKWARD = 1
BOTTOM_RIGHT = 0
TOP_LEFT = 1
RNG_FOVEA = 0
RNG_TORCH_MEM_EFFICIENT = 1

MAX_RANK = 5
TENSOR_STRIDED = 1  # fovea_tensor::flags

# fovea_problem::flags
CAUSAL = 1
DETERMINISTIC = 2
SCALE = 4
WINDOW = 8
CLEAR_ROWS = 16
POSITIONS = 32

# fovea_rows_kind
ROWS_ZIGZAG = 0
ROWS_CONTIGUOUS = 1
ROWS_PACKED = 2

# fovea_problem::accumulate
ACCUMULATE_OUT = 1
ACCUMULATE_GRADS = {"q": 2, "k": 4, "v": 8, "bias": 16, "bias2": 32, "sink": 64}


# fovea_tensor: size, data, dtype, rank, flags, reserved, shape, stride. A call has up to 25 of them, and packing one
# takes an eighth of the time of making a ctypes structure (0.2 against 1.6 microseconds).
TENSOR = struct.Struct(f"@NPiiII{MAX_RANK}q{MAX_RANK}q")


# The fields of fovea_problem that are `const fovea_tensor*`, in its order: INPUTS, RESULTS, SHARDS.
INPUTS = (
    "q",
    "k",
    "v",
    "bias",
    "bias2",
    "mask",
    "alibi_slopes",
    "sink",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_q",
    "seqused_k",
)
RESULTS = (
    "out",
    "lse",
    "grad_out",
    "grad_lse",
    "grad_q",
    "grad_k",
    "grad_v",
    "grad_bias",
    "grad_bias2",
    "grad_sink",
)
SHARDS = ("positions_q", "positions_k", "dropout_streams")


class Problem(ctypes.Structure):
    """fovea_problem."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("flags", ctypes.c_uint32),
        ("align", ctypes.c_int32),
        ("rng", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        ("backend", ctypes.c_char_p),
        ("stream", ctypes.c_void_p),
        ("scale", ctypes.c_double),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        ("softcap", ctypes.c_double),
        ("dropout_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("seed_ptr", ctypes.c_void_p),
        ("offset_ptr", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in INPUTS),
        ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64),
        ("batch_outer", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in RESULTS),
        ("position_q", ctypes.c_int64),
        ("position_k", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in SHARDS),
        ("accumulate", ctypes.c_uint64),
    ]


class Rows(ctypes.Structure):
    """fovea_rows. Pointers are addresses here, too."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("kind", ctypes.c_int32),
        ("flags", ctypes.c_uint32),
        ("ranks", ctypes.c_int64),
        ("head_ranks", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("sequences", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("window_left", ctypes.c_int64),
        ("window_right", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("rows", "pairs", "sends", "receives", "piece_counts", "pieces")),
        ("piece_capacity", ctypes.c_int64),
        ("balance", ctypes.c_void_p),
    ]


_PROBLEM = ctypes.POINTER(Problem)
_TEXT = (ctypes.c_char_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t))  # text, capacity, needed

# Every function of c.h: its result and its arguments.
FUNCTIONS = {
    "fovea_version": (ctypes.c_int, ()),
    "fovea_last_error": (ctypes.c_char_p, ()),
    "fovea_status_name": (ctypes.c_char_p, (ctypes.c_int,)),
    "fovea_workspace": (ctypes.c_int, (_PROBLEM, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t))),
    "fovea_forward": (ctypes.c_int, (_PROBLEM, ctypes.c_void_p, ctypes.c_size_t)),
    "fovea_backward": (ctypes.c_int, (_PROBLEM, ctypes.c_void_p, ctypes.c_size_t)),
    "fovea_explain": (ctypes.c_int, (_PROBLEM, ctypes.c_int, *_TEXT)),
    "fovea_explain_line": (ctypes.c_int, (ctypes.c_char_p, *_TEXT)),
    "fovea_explain_for": (ctypes.c_int, (ctypes.c_char_p, ctypes.c_char_p, *_TEXT)),
    "fovea_describe": (ctypes.c_int, (_PROBLEM, ctypes.c_int, *_TEXT)),
    "fovea_backends": (ctypes.c_int, _TEXT),
    "fovea_machine": (ctypes.c_int, _TEXT),
    "fovea_set_nvrtc_folders": (ctypes.c_int, (ctypes.c_char_p,)),
    "fovea_dropout_mask": (
        ctypes.c_int,
        (ctypes.c_int64,) * 4 + (ctypes.c_double, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p),
    ),
    "fovea_set_num_threads": (ctypes.c_int, (ctypes.c_int,)),
    "fovea_num_threads": (ctypes.c_int, ()),
    "fovea_prepare": (ctypes.c_int, (_PROBLEM, ctypes.c_int)),
    "fovea_rows_plan": (ctypes.c_int, (ctypes.POINTER(Rows), ctypes.POINTER(ctypes.c_int64))),
}
