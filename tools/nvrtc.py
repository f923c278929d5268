#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compile instances of a kernel of src/cuda/device with the NVRTC of this machine; no GPU and no library is needed.

    tools/nvrtc.py generic_forward d=128 dv=128 lazy=true                       for 8.0, 9.0 and 12.0
    tools/nvrtc.py generic_forward --arch 90 --dump /tmp/x d=64 bias=kBf16      with PTX and machine code

prints registers, spills, stack, seconds and products that ptxas serialised (C7512), and fails where there are such, or
something was spilt. `build` is what tests import.
"""

import argparse
import ctypes
import glob
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVICE = ROOT / "src" / "cuda" / "device"
OPTIONS = ["--std=c++20", "-default-device", "-no-source-include", "--ptxas-options=-v"]


def find_nvrtc():
    """FOVEA_NVRTC, the wheels of this Python, the toolkit, the loader's path."""
    names = [os.environ["FOVEA_NVRTC"]] if "FOVEA_NVRTC" in os.environ else []
    for folder in sys.path:
        for wheel in ("nvidia/cu13/lib", "nvidia/cuda_nvrtc/lib"):
            names += sorted(glob.glob(os.path.join(folder, wheel, "libnvrtc.so.*")))
    names += sorted(glob.glob("/usr/local/cuda/lib64/libnvrtc.so.*")) + ["libnvrtc.so"]
    for name in names:
        try:
            if "alt" not in name:
                return ctypes.CDLL(name)
        except OSError:
            pass
    raise OSError("no NVRTC; set FOVEA_NVRTC to its file")


class Nvrtc:
    def __init__(self):
        self.library = find_nvrtc()
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def call(self, name, *arguments):
        result = getattr(self.library, name)(*arguments)
        if result:
            raise RuntimeError(f"{name}: {self.library.nvrtcGetErrorString(result).decode()}")

    def text(self, program, kind):
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{kind}", program, content)
        return content.raw


def headers():
    """Every file of src/math and src/cuda/device, under the names that they may be included by."""
    found = {}
    for folder in (ROOT / "src" / "math", DEVICE):
        for path in [*folder.rglob("*.h"), *folder.rglob("*.cuh")]:
            text = path.read_bytes()
            found[str(path.relative_to(ROOT / "src"))] = text
            found[str(path.relative_to(folder))] = text
    return found


def file_of(kernel):
    """The file that defines a kernel, as an #include names it."""
    for path in sorted(DEVICE.rglob("*.cuh")):
        if re.search(rf"__global__[^;{{]*\b{kernel}\(", path.read_text()):
            return str(path.relative_to(DEVICE))
    raise ValueError(f"no file of {DEVICE} defines a kernel {kernel}")


def parts_of(kernel):
    """The Spec that a kernel takes, and its parts: [(struct, {field: type}), ...], of one part what it is itself. A
    field that is a struct itself has a dict of its fields for a type."""
    name = re.search(rf"template <(\w+) S>\s*__global__[^;{{]*\b{kernel}\(", (DEVICE / file_of(kernel)).read_text()).group(1)
    text = "".join(path.read_text() for path in [*sorted(DEVICE.rglob("spec.h")), DEVICE / "score" / "position_terms.h"])

    def fields(struct):
        body = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.DOTALL).group(1)
        return {field: kind if default else fields(kind)
                for kind, field, default in re.findall(r"^  (\w+) (\w+)(?:;|( = ))", body, re.MULTILINE)}  # fmt: skip

    bases = re.search(rf"struct {name} : ([\w, ]+) \{{", text)
    return name, [(part, fields(part)) for part in (bases.group(1).split(", ") if bases else [name])]


def spec_text(kernel, fields):
    """A kernel's Spec as C++ text: {'d': 128, 'type': 'kFp16', 'lazy': True}."""
    name, parts = parts_of(kernel)

    def names(kinds):
        return [name for field, kind in kinds.items() for name in (names(kind) if isinstance(kind, dict) else [field])]

    known = [field for _, kinds in parts for field in names(kinds)]
    unknown = set(fields) - set(known)
    if unknown:
        raise ValueError(f"{name} has no {', '.join(sorted(unknown))}; it has {', '.join(known)}")

    def value(kind, given):
        if kind == "bool":
            return "true" if given.lower() in ("true", "1") else "false"
        return given if kind == "int" else f"fovea::cuda::{kind}::{given.split('::')[-1]}"

    def written(kinds):
        return "{" + ", ".join(f".{field} = " + (written(kind) if isinstance(kind, dict) else value(kind, str(fields[field])))
                               for field, kind in kinds.items()
                               if any(name in fields for name in names({field: kind}))) + "}"  # fmt: skip

    texts = [written(kinds) for _, kinds in parts]
    return f"fovea::cuda::{name}" + (texts[0] if len(texts) == 1 else "{" + ", ".join(texts) + "}")


class Built:
    """Machine code, its symbol, the log and what ptxas said of it."""

    def __init__(self, cubin, symbol, log, ptx, seconds):
        self.cubin, self.symbol, self.log, self.ptx, self.seconds = cubin, symbol, log, ptx, seconds

        def numbers(pattern):
            return [int(x) for x in re.findall(pattern, log)]

        self.registers = max(numbers(r"Used (\d+) registers"), default=0)
        self.stack = sum(numbers(r"(\d+) bytes stack"))
        self.spills = sum(numbers(r"(\d+) bytes spill"))
        self.shared = max(numbers(r"(\d+) bytes smem"), default=0)
        # Products that ptxas serialised, a setmaxnreg that it ignored: as src/cuda/jit/report.cpp has it.
        self.losses = [code or line.strip() for line, code in
                       ((line, (re.findall(r"\((C7\d+)\)", line) or [""])[0]) for line in log.splitlines())
                       if re.search(r"Performance Loss|serialized|setmaxnreg' ignored", line)]

    def __str__(self):
        losses = f", serialised or ignored: {', '.join(self.losses)}" if self.losses else ""
        return (f"{self.registers} registers, {self.spills} bytes spilt, {self.stack} of stack, "
                f"{len(self.cubin)} of code, {self.seconds:.2f} s{losses}")


def compile_text(text, expression, arch, options=(), files=None, base=OPTIONS):
    """NVRTC on text that may include any of `files`, {name: text}, or headers(); arch is a number, 90, or '90a'."""
    nvrtc, files, program = Nvrtc(), files or headers(), ctypes.c_void_p()

    def strings(items):
        return (ctypes.c_char_p * len(items))(*[x if isinstance(x, bytes) else x.encode() for x in items])

    nvrtc.call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"kernel.cu", len(files),
               strings(list(files.values())), strings(list(files)))
    nvrtc.call("nvrtcAddNameExpression", program, expression.encode())
    all_options = [*base, f"--gpu-architecture=sm_{arch}", *options]
    start = time.time()
    result = nvrtc.library.nvrtcCompileProgram(program, len(all_options), strings(all_options))
    seconds = time.time() - start
    log = nvrtc.text(program, "ProgramLog").rstrip(b"\0").decode()
    if result:
        raise RuntimeError(f"{expression} for sm_{arch}\n{log}")
    name = ctypes.c_char_p()
    nvrtc.call("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(name))
    symbol = name.value.decode()
    built = Built(nvrtc.text(program, "CUBIN"), symbol, log, nvrtc.text(program, "PTX"), seconds)
    nvrtc.call("nvrtcDestroyProgram", ctypes.byref(program))
    return built


def build(kernel, arch, file=None, **fields):
    """One instance of a kernel; file: what is included, unless it is the file that defines the kernel."""
    fields["arch"] = int(re.match(r"\d+", str(arch)).group())
    text = f'#include "{file or file_of(kernel)}"\n'
    return compile_text(text, f"fovea::cuda::{kernel}<{spec_text(kernel, fields)}>", arch)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel")
    parser.add_argument("fields", nargs="*", help="field=value of the kernel's Spec")
    parser.add_argument("--file", help="what is included, unless it is the file that defines the kernel")
    parser.add_argument("--arch", default="80,90,120")
    parser.add_argument("--dump", metavar="PREFIX", help="write PREFIX.ARCH.cubin, .ptx")
    parser.add_argument("--log", action="store_true", help="print ptxas's log")
    given = parser.parse_intermixed_args()
    fields = dict(x.split("=") for x in given.fields)
    bad = 0
    for arch in given.arch.split(","):
        built = build(given.kernel, arch, given.file, **fields)
        print(f"sm_{arch} {given.kernel} {' '.join(given.fields)}: {built}", flush=True)
        if given.log:
            print(built.log)
        if given.dump:
            Path(f"{given.dump}.{arch}.cubin").write_bytes(built.cubin)
            Path(f"{given.dump}.{arch}.ptx").write_bytes(built.ptx)
        bad += built.spills > 0 or built.stack > 0 or bool(built.losses)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
