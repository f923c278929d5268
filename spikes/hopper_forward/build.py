# SPDX-License-Identifier: Apache-2.0
"""Compiles specs of hopper_forward.cu with NVRTC; prints registers, spills, warnings and time."""
import ctypes, glob, os, re, sys, time
from dataclasses import dataclass, fields, replace

import wgmma

HERE = os.path.dirname(os.path.abspath(__file__))
MATH = os.path.join(HERE, "../../src/math")


@dataclass(frozen=True)
class Spec:
    d: int
    dv: int
    rows: int
    keys: int
    k_stages: int = 2
    v_stages: int = 2
    q_buffers: int = 2
    causal: bool = False
    window: bool = False
    varlen: bool = False
    bias_stages: int = 0
    softcap: bool = False
    dropout: bool = False
    turns: bool = True
    lazy: bool = True
    direct: bool = False
    guess: bool = True
    vote: int = 1
    early: int = -1
    source: str = "hopper_forward.cu"   # another version of the text, to compare with in one run

    def text(self):
        if self.early < 0:
            return replace(self, early=self.keys // 32).text()
        return "Spec{" + ", ".join(str(int(getattr(self, f.name))) if f.type in (int, "int") else str(getattr(self, f.name)).lower() for f in fields(self) if f.name != "source") + "}"

    def shared_bytes(self):
        return (self.q_buffers * self.rows * max(self.d, self.dv) * 2 + self.k_stages * self.keys * self.d * 2 + self.v_stages * self.keys * self.dv * 2
                + self.bias_stages * self.rows * self.keys * 2 + 512)

    def threads(self):
        return 128 * (self.rows // 64 + 1)


def nvrtc():
    import importlib.util
    roots = []
    spec = importlib.util.find_spec("nvidia")
    if spec and spec.submodule_search_locations:
        for r in spec.submodule_search_locations:
            roots += glob.glob(r + "/**/libnvrtc.so.1*", recursive=True)
    roots += glob.glob("/usr/local/cuda*/lib64/libnvrtc.so.1*") + glob.glob("/usr/local/cuda*/targets/*/lib/libnvrtc.so.1*")
    roots = [r for r in roots if "builtins" not in r]
    return ctypes.CDLL(sorted(roots, key=len)[0])


def compile(spec):
    lib = nvrtc()
    math = "".join(open(os.path.join(MATH, name)).read().replace('#include "scalar.h"', "") for name in ("scalar.h", "band.h", "dropout.h"))
    text = math + wgmma.text(spec.keys, spec.dv) + open(os.path.join(HERE, spec.source)).read()
    program = ctypes.c_void_p()
    assert lib.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"hopper_forward.cu", 0, None, None) == 0
    name = f"forward<{spec.text()}>".encode()
    assert lib.nvrtcAddNameExpression(program, name) == 0
    options = [b"--std=c++20", b"--gpu-architecture=sm_90a", b"--ptxas-options=-v", b"--use_fast_math", b"-default-device"]
    start = time.time()
    code = lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    seconds = time.time() - start
    size = ctypes.c_size_t()
    lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetProgramLog(program, log)
    log = log.value.decode()
    if code:
        raise RuntimeError(log)
    lowered = ctypes.c_char_p()
    assert lib.nvrtcGetLoweredName(program, name, ctypes.byref(lowered)) == 0
    lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    lib.nvrtcGetCUBIN(program, cubin)
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    warnings = sorted(set(re.findall(r"C7\d\d\d", log)))
    report = f"{spec.text()}{'' if spec.source == 'hopper_forward.cu' else ' ' + spec.source}: {registers and registers.group(1)} registers, stack/spill {spills and '/'.join(spills.groups())}, {' '.join(warnings) or 'no warning'}, {spec.shared_bytes()} B shared, {seconds:.2f} s"
    return cubin.raw, lowered.value, report, log


if __name__ == "__main__":
    for text in sys.argv[1:]:
        spec = eval(text, {"Spec": Spec})
        cubin, name, report, log = compile(spec)
        print(report)
        if os.environ.get("LOG"):
            print(log)
        if os.environ.get("CUBIN"):
            open(os.environ["CUBIN"], "wb").write(cubin)
