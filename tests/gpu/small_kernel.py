# SPDX-License-Identifier: Apache-2.0
"""Small kernels around a piece of the device layer: a test gives the body, run() does the rest. Without a GPU the text
is compiled all the same (FOVEA_TEST_DEVICE=compile), and the test ends there.
"""

import ctypes
import math
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import nvrtc

COMPILES = os.environ.get("FOVEA_TEST_DEVICE") == "compile"
DEVICE = torch.device("cpu") if COMPILES else torch.device("cuda", 0)
NAMES = {torch.float32: "float", torch.int32: "int", torch.int64: "long long", torch.bfloat16: "u16",
         torch.float16: "u16", torch.uint8: "unsigned char"}  # fmt: skip


def architecture():
    """90 for a compute capability of 9.0."""
    if COMPILES:
        return 90
    major, minor = torch.cuda.get_device_capability(DEVICE)
    return major * 10 + minor


def driver(name, *arguments):
    cuda = ctypes.CDLL("libcuda.so.1")
    result = getattr(cuda, name)(*arguments)
    assert result == 0, f"{name}: {result}"


class LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class LaunchConfig(ctypes.Structure):
    _fields_ = [("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p),
                ("attributes", ctypes.POINTER(LaunchAttribute)), ("count", ctypes.c_uint)]  # fmt: skip


CLUSTER_DIMENSION, PROGRAMMATIC_STREAM_SERIALIZATION = 4, 6
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class TensorMap:
    """A tensor's map, as tensor_map.h makes them: five dimensions, the innermost first, in boxes of rows that are
    swizzled as their width asks."""

    def __init__(self, tensor, box):
        self.tensor = tensor
        space = ctypes.create_string_buffer(128 + 64)
        self.words = (ctypes.c_uint64 * 16).from_buffer(space, -ctypes.addressof(space) % 64)
        if COMPILES:
            return
        size, kind = tensor.element_size(), {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}[tensor.dtype]
        dims = (ctypes.c_uint64 * 5)(*reversed(tensor.shape))
        strides = (ctypes.c_uint64 * 4)(*[x * size for x in reversed(tensor.stride()[:-1])])
        boxes, ones = (ctypes.c_uint32 * 5)(*box), (ctypes.c_uint32 * 5)(1, 1, 1, 1, 1)
        swizzle = {128: 3, 64: 2, 32: 1}[box[0] * size]
        driver("cuTensorMapEncodeTiled", self.words, kind, 5, ctypes.c_void_p(tensor.data_ptr()), dims, strides, boxes,
               ones, 0, swizzle, 0, 0)  # fmt: skip


def run(body, *parameters, threads=32, blocks=1, cluster=1, times=1, shared=0, files=("score/scores.cuh", "score/mask_edge.cuh", "score/dropout.cuh"), before="", hopper=False):
    """A kernel with this body; its parameters p0, p1, ... are pointers to tensors' elements, or maps of tensors.
    Launched several times, each launch may begin before the one before it has ended. hopper: with what 9.0 alone has."""
    if hopper and architecture() != 90:
        pytest.skip("for compute capability 9.0")
    declared = ", ".join(
        f"const __grid_constant__ TensorMap p{n}" if isinstance(p, TensorMap) else f"{NAMES[p.dtype]}* p{n}"
        for n, p in enumerate(parameters)
    )
    includes = "".join(f'#include "{name}"\n' for name in files)
    text = f"""{includes}
    namespace fovea::cuda {{
    {before}
    template <int kUnused>
    __global__ void __launch_bounds__({threads}, 1) test_kernel({declared}) {{
      extern __shared__ __align__(1024) unsigned char memory[];
      const u32 shared = shared_address(memory);
      const Thread thread;
      const int lane = thread.lane, g = thread.g, t = thread.t;
      (void)shared; (void)lane; (void)g; (void)t;
      {body}
    }}
    }}
    """
    arch = architecture()
    built = nvrtc.compile_text(text, "fovea::cuda::test_kernel<0>", "90a" if hopper else arch)
    if hopper:
        assert built.spills == 0 and "serializ" not in built.log and "setmaxnreg" not in built.log, built.log
    if COMPILES:
        pytest.skip(f"compiled: {built}")
    torch.zeros(1, device=DEVICE)  # a context
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), built.cubin)
    driver("cuModuleGetFunction", ctypes.byref(function), module, built.symbol.encode())
    driver("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    values = [p.words if isinstance(p, TensorMap) else ctypes.c_void_p(p.data_ptr()) for p in parameters]
    array = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(v) for v in values])
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    sizes = (ctypes.c_uint * 7)(blocks, 1, 1, threads, 1, 1, shared)
    for launch in range(times):
        attributes = []
        if cluster > 1:
            attributes.append(LaunchAttribute(CLUSTER_DIMENSION, b"", (cluster, 1, 1)))
        if launch > 0 and arch >= 90:
            attributes.append(LaunchAttribute(PROGRAMMATIC_STREAM_SERIALIZATION, b"", (1,)))
        config = LaunchConfig(sizes, stream, (LaunchAttribute * 2)(*attributes), len(attributes))
        driver("cuLaunchKernelEx", ctypes.byref(config), function, array, None)
    torch.cuda.synchronize()
    driver("cuModuleUnload", module)


def poison(*shape, dtype=torch.float32):
    if dtype.is_floating_point:
        return torch.full(shape, math.nan, dtype=dtype, device=DEVICE)
    return torch.full(shape, -7 if dtype.is_signed else 249, dtype=dtype, device=DEVICE)


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def fragment(accumulators):
    """[row tile][column tile][4] of 32 lanes (first dimension) as a matrix."""
    _, rows, columns, _ = accumulators.shape
    lane = torch.arange(32, device=DEVICE)
    g, t = lane // 4, lane % 4
    matrix = torch.full((rows * 16, columns * 8), math.nan, device=DEVICE)
    for i in range(rows):
        for j in range(columns):
            for e in range(4):
                matrix[i * 16 + g + 8 * (e >> 1), j * 8 + t * 2 + (e & 1)] = accumulators[:, i, j, e]
    return matrix
