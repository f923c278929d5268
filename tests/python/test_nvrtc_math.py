# SPDX-License-Identifier: Apache-2.0
"""src/math compiles under NVRTC, without any header of anyone's: not even CUDA's. No GPU is needed.

A kernel that uses everything in it is compiled to machine code for three architectures. NVRTC is that of /usr/local/cuda, else of
the wheel nvidia-cuda-nvrtc; where there is neither this fails (`make test` fetches the wheel).
"""

import ctypes
import glob
import importlib.util
import re
from pathlib import Path

import pytest

MATH = Path(__file__).resolve().parents[2] / "src/math"

HEADERS = sorted(MATH.glob("*.h"))
KERNEL = "".join(f'#include "{path.name}"\n' for path in HEADERS).encode() + b"""
using namespace fovea::math;

struct Spec {
  int head_dim;
  bool softcap;
  Rng rng;
};

template <Spec S, class T>
__global__ void kernel(T* out, Band<i32> band, Score<T> score, Dropout dropout, Rows rows, Strides strides) {
  const Sequence sequence = rows.sequence(blockIdx.x);
  const DropoutOfHead head = DropoutOfHead::make(dropout, blockIdx.x, sequence.q_len * sequence.k_len, sequence.k_len);
  const i32 i = threadIdx.x;
  const Interval<i32> keys = band.keys_of_rows(i, i + 1);
  T maximum = -Limits<T>::infinity(), sum = 0, gradient = 0;
  const SmallCap<T> cap = SmallCap<T>::make(0.125, 30);
  for (i32 j = keys.begin; j < keys.end; ++j) {
    if (band.tile(i, i + 1, j, j + 1) == TileClass::kEmpty || !band.queries_of(j).contains(i)) continue;
    const Dual<T> s = score.template of_dot_with_derivative<S.softcap>(out[j], T(1)) + alibi(T(j - i), T(0.5));
    const T raised = fovea::math::max(maximum, s.value);
    sum = sum * correction(maximum, raised) + (head.keep(i, j) ? weight(s.value, reference_of(raised)) : T(0));
    maximum = raised;
    gradient += grad_score(probability(s.value, backward_reference(sum)), s.derivative, delta(sum, T(1)));
    gradient += out[j] <= cap.largest ? cap.of(out[j]) : T(0);
  }
  sum = sum_with_sink(sum, reference_of(maximum), T(1));
  const i64 at = rows.offset(strides, blockIdx.x, rows.head_k(blockIdx.y), i);
  out[at] = logsumexp(reference_of(maximum), sum) + inverse_of_sum(sum) + gradient + grad_sink(T(1), sum, T(2)) +
            T(dropout.factor()) + (band.queries_of_keys(i, i + 1).empty() ? T(1) : T(0)) +
            (band.allowed(i, i) && rows.packed() ? T(1) : T(0));
}
template __global__ void kernel<Spec{64, true, Rng::kFovea}>(float*, Band<i32>, Score<float>, Dropout, Rows, Strides);
template __global__ void kernel<Spec{80, false, Rng::kTorchMemEfficient}>(double*, Band<i32>, Score<double>, Dropout,
                                                                          Rows, Strides);
"""


def nvrtc():
    """The library, loaded, and where it was found."""
    found = sorted(glob.glob("/usr/local/cuda/lib64/libnvrtc.so*"))
    for package in ("nvidia.cuda_nvrtc", "nvidia.cu13"):
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in spec.submodule_search_locations if spec else []:
            found += sorted(glob.glob(f"{folder}/lib/libnvrtc.so*"))
    found = [path for path in found if "builtins" not in path and ".alt." not in path]
    assert found, "NVRTC is missing: install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`"
    return ctypes.CDLL(found[0])


def compile_kernel(source, architecture):
    """(status, log, PTX)."""
    library = nvrtc()
    program = ctypes.c_void_p()
    array = lambda values: (ctypes.c_char_p * len(values))(*values)
    assert library.nvrtcCreateProgram(
        ctypes.byref(program), source, b"kernel.cu", len(HEADERS), array([path.read_bytes() for path in HEADERS]),
        array([path.name.encode() for path in HEADERS])) == 0
    # No standard or toolkit header can be found, even by accident.
    options = [b"-std=c++20", b"-default-device", b"-arch=" + architecture.encode(), b"-no-source-include"]
    status = library.nvrtcCompileProgram(program, len(options), array(options))

    def text(size_function, text_function):
        size = ctypes.c_size_t()
        size_function(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        text_function(program, buffer)
        return buffer.value.decode()

    log = text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
    return status, log, text(library.nvrtcGetPTXSize, library.nvrtcGetPTX) if status == 0 else ""


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_everything_in_math_compiles(architecture):
    status, log, ptx = compile_kernel(KERNEL, architecture)
    if status != 0 and architecture == "sm_120" and "invalid value for --gpu-architecture" in log:
        pytest.skip("this NVRTC is older than sm_120")
    assert status == 0, log
    assert "error" not in log
    assert ptx.count(".entry") == 2
    # Nothing is left to be called: every function was inlined or belongs to this text.
    assert not re.findall(r"\.extern \.func", ptx)


def test_a_mistake_is_noticed():
    status, log, _ = compile_kernel(KERNEL + b"static_assert(Band<i32>::make(4, 6, true, 1, -1, false).low == 7);", "sm_80")
    assert status != 0 and "static assertion failed" in log
