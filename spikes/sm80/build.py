# SPDX-License-Identifier: Apache-2.0
"""Compile one instance of a kernel with NVRTC: build(kernel, arch, field=value, ...) -> (cubin, symbol, log). No GPU needed."""
import ctypes, glob, os, re, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
MATH = ["scalar.h", "band.h", "dropout.h"]  # of src/math, as they are, given to NVRTC as named headers
FILES = ["ptx.cuh", "spec.cuh"]


def find_nvrtc():
    names = []
    for folder in sys.path:
        names += sorted(glob.glob(os.path.join(folder, "nvidia/cu13/lib/libnvrtc.so.13*")) + glob.glob(os.path.join(folder, "nvidia/cuda_nvrtc/lib/libnvrtc.so.*")))
    names += sorted(glob.glob("/usr/local/cuda/lib64/libnvrtc.so.*")) + ["libnvrtc.so"]
    for name in names:
        if "builtins" in name or "alt" in name:
            continue
        try:
            return ctypes.CDLL(name)
        except OSError:
            pass
    raise OSError("no NVRTC")


nvrtc = find_nvrtc()


def text(value):
    return str(value).lower() if isinstance(value, bool) else "fovea::" + value if "::" in str(value) else str(value)


ORDER = re.findall(r"^    \S+ (\w+) = ", open(os.path.join(HERE, "spec.cuh")).read(), re.M)


def build(kernel, arch, **fields):
    unknown = set(fields) - set(ORDER)
    assert not unknown, unknown
    fields["arch"] = arch
    spec = "fovea::Spec{" + ", ".join(f".{n} = {text(fields[n])}" for n in ORDER if n in fields) + "}"
    file = {"forward": "forward.cuh", "bias_gradient": "bias_gradient.cuh", "wide_forward": "wide_forward.cuh", "wide_backward": "wide_backward.cuh",
            "bias_gradient_sum": "bias_gradient.cuh", **dict.fromkeys(("fp32_measure", "fp32_split", "fp32_forward", "fp32_prepare", "fp32_backward", "fp32_convert"), "fp32.cuh")}.get(kernel, "backward.cuh")
    headers = [open(os.path.join(HERE, "../../src/math", f), "rb").read() for f in MATH]
    array = lambda xs: (ctypes.c_char_p * len(xs))(*xs)
    source = "".join(f'#include "{f}"\n' for f in MATH) + "".join(open(os.path.join(HERE, f)).read() for f in FILES + [file]) + f"\nconstexpr auto instance = &fovea::{kernel}<{spec}>;\n"
    program = ctypes.c_void_p()
    check = lambda r: None if r == 0 else (_ for _ in ()).throw(RuntimeError(f"nvrtc {r}"))
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", len(MATH), array(headers), array([f.encode() for f in MATH])))
    expression = f"fovea::{kernel}<{spec}>".encode()
    check(nvrtc.nvrtcAddNameExpression(program, expression))
    options = [f"--gpu-architecture=sm_{arch}".encode(), b"--std=c++20", b"-default-device", b"--ptxas-options=-v", b"--diag-suppress=177"]
    start = time.time()
    result = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    seconds = time.time() - start
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    log = log.value.decode()
    if result:
        raise RuntimeError(f"{kernel} {spec}\n{log}")
    name = ctypes.c_char_p()
    check(nvrtc.nvrtcGetLoweredName(program, expression, ctypes.byref(name)))
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    symbol = name.value.decode()
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return cubin.raw, symbol, log, seconds


def resources(log):
    find = lambda p: [int(x) for x in re.findall(p, log)]
    return dict(registers=max(find(r"Used (\d+) registers"), default=None), stack=max(find(r"(\d+) bytes stack"), default=0), spills=sum(find(r"(\d+) bytes spill")))


if __name__ == "__main__":  # build.py kernel arch field=value ...
    cubin, symbol, log, seconds = build(sys.argv[1], int(sys.argv[2]), **dict(x.split("=") for x in sys.argv[3:]))
    if os.environ.get("CUBIN"):
        open(os.environ["CUBIN"], "wb").write(cubin)
    print(*sys.argv[1:], resources(log), f"{seconds:.2f} s")
