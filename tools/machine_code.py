# SPDX-License-Identifier: Apache-2.0
"""Machine code of the GPU kernels that plans take: which there are, what they are compiled from, what NVRTC makes of
them. No GPU is needed. tools/same_code.py and tools/kernels.py stand on this.

Compilations are kept, by a hash of everything that they depend on, in FOVEA_CODE_CACHE (~/.cache/fovea-code): every
checkout of a user shares them. So are NVRTC and nvdisasm, in the versions that tests/requirements.txt pins, where this
Python does not have them.
"""

import gzip
import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import nvrtc

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("FOVEA_CODE_CACHE", Path.home() / ".cache" / "fovea-code"))
FORMAT = "1"  # of what is kept; part of every key


# ---- the compiler and the disassembler: exactly these ----


def pinned(package):
    """The folder that has the wheel `package` in the version of tests/requirements.txt; it is installed if need be."""
    version = re.search(rf"^{package}==(\S+)$", (ROOT / "tests" / "requirements.txt").read_text(), re.MULTILINE)[1]
    kept = CACHE / f"{package}-{version}"
    for folder in [*map(Path, sys.path), *ROOT.glob(".venv/lib/python*/site-packages"), kept]:
        if any(d.version == version for d in importlib.metadata.distributions(name=package, path=[str(folder)])):
            return folder, version
    print(f"{package} {version}: installing it in {kept}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps",
                    "--target", kept, f"{package}=={version}"], check=True)
    return kept, version


@lru_cache(None)
def compiler():
    """NVRTC's file and its exact version."""
    folder, version = pinned("nvidia-cuda-nvrtc")
    return next(folder.glob("nvidia/cu*/lib/libnvrtc.so.[0-9]*")), version


@lru_cache(None)
def disassembler():
    folder, version = pinned("nvidia-cuda-nvdisasm")
    file = next(folder.glob("nvidia/cu*/bin/nvdisasm"))
    file.chmod(0o755)
    return file, version


# ---- which kernels there are ----


def problem_lines():
    """The problems whose kernels are looked at, beside the case table: those of tests/kernels/problems.txt, of the
    golden plans and of the GPU benchmark."""
    sys.path.insert(0, str(ROOT / "bench" / "gpu"))
    import cases

    lines = (ROOT / "tests" / "kernels" / "problems.txt").read_text().splitlines()
    golden = (ROOT / "tests" / "cpp" / "golden" / "cuda_plans.txt").read_text()
    lines += re.findall(r"^sm_\d+a?: (.*)$", golden, re.MULTILINE)
    for case in cases.all_cases():
        lines += case.lines()
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


class Listing:
    """What list_kernels of a build says: texts, kernels, and which problem uses which kernels."""

    def __init__(self, listed):
        self.listed = listed
        self.kernels, self.uses = listed["kernels"], listed["uses"]
        self.files = {name: listed["texts"][number] for name, number in listed["files"].items()}
        self._flat, self._keys = {}, {}

    @classmethod
    def of_build(cls, build, architectures, lines=None, table=True):
        program = Path(build) / "tests" / "kernels" / "list_kernels"
        if not program.exists():
            raise SystemExit(f"{program} is not there; cmake --build {build} --target list_kernels makes it")
        command = [program, "--arch", ",".join(architectures), *["--table"] * table]
        done = subprocess.run(command, input="\n".join(problem_lines() if lines is None else lines) + "\n", text=True,
                              stdout=subprocess.PIPE)
        if done.returncode:
            raise SystemExit(f"{program} ended with {done.returncode}")
        return cls(json.loads(done.stdout))

    @classmethod
    def of_file(cls, file):
        return cls(json.loads(gzip.decompress(Path(file).read_bytes())))

    def save(self, file):
        Path(file).write_bytes(gzip.compress(json.dumps(self.listed).encode(), mtime=0))

    def text_hash(self, name):
        """Of what a file's text comes to: its includes written out, without comments and include guards. A comment, a
        file that is renamed, moved or split changes nothing."""
        if name not in self._flat:
            seen, parts = set(), []

            def add(name):
                if name not in self.files:
                    raise SystemExit(f'#include "{name}": the library has no such file')
                text = stripped(self.files[name])
                if id(self.files[name]) not in seen:
                    seen.add(id(self.files[name]))
                    for line in text.splitlines():
                        included = re.match(r'#include "(.*)"$', line)
                        add(included[1]) if included else parts.append(line)

            add(name)
            self._flat[name] = digest(joined("\n".join(parts)))
        return self._flat[name]

    def name(self, number):
        return self.kernels[number]["kernel"].split("::")[-1]

    def key(self, number):
        """A hash of all that the machine code depends on."""
        if number not in self._keys:
            kernel = self.kernels[number]
            self._keys[number] = digest(json.dumps([
                FORMAT, self.text_hash(kernel["file"]), kernel["kernel"], kernel["argument"], kernel["architecture"],
                self.listed["options"], kernel["options"], compiler()[1], disassembler()[1]]))  # fmt: skip
        return self._keys[number]


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


@lru_cache(None)
def stripped(text):
    """Without comments, include guards and blank lines."""
    token = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)
    text = token.sub(lambda found: found[0] if found[0][0] in "\"'" else " ", text)
    text = "\n".join(filter(None, (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())))
    guard = re.match(r"#ifndef (\w+)\n#define \1\n(.*)#endif\Z|#pragma once\n(.*)", text, re.DOTALL)
    return guard[guard.lastindex] if guard else text


def joined(text):
    """One line, but for the preprocessor's, without the spaces that mean nothing; a namespace that ends and begins again
    goes on."""
    lines = "".join(f"\n{line}\n" if line.startswith("#") else f"{line} " for line in text.splitlines())
    lines = re.sub(r" *([^\w\s#]) *|\n+", lambda found: found[1] or "\n", lines)
    return lines.replace("}namespace fovea::cuda{", "")


# ---- what NVRTC makes of them ----


def compiled(listing, number, fresh=False):
    """{"registers", "spills", "stack", "losses", "seconds", "instructions", "code", "opcodes", "list"}: code and opcodes
    are hashes, the list is that of the opcodes. `fresh` is compiled even where it was before."""
    key = listing.key(number)
    kept = CACHE / "code" / key[:2] / f"{key}.json.gz"
    if not fresh:
        try:
            return json.loads(gzip.decompress(kept.read_bytes()))
        except (OSError, ValueError, EOFError):
            pass
    kernel = listing.kernels[number]
    start = time.process_time()
    os.environ["FOVEA_NVRTC"] = str(compiler()[0])
    built = nvrtc.compile_text(f'#include "{kernel["file"]}"\n', f'{kernel["kernel"]}<{kernel["argument"]}>',
                               kernel["architecture"].removeprefix("sm_"), kernel["options"], files=listing.files,
                               base=listing.listed["options"])
    opcodes = opcodes_of(built.cubin)
    result = {"registers": built.registers, "spills": built.spills, "stack": built.stack, "losses": built.losses,
              "seconds": round(time.process_time() - start, 3), "instructions": len(opcodes),
              "code": hashlib.sha256(code_of(built.cubin)).hexdigest(), "opcodes": digest("\n".join(opcodes)),
              "list": opcodes}  # fmt: skip
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, delete=False) as file:
        file.write(gzip.compress(json.dumps(result).encode(), 6))
    os.replace(file.name, kept)
    return result


def code_of(cubin):
    """The instructions of all functions of an ELF file, in order."""
    offset, = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, offset + i * size) for i in range(count)]
    strings = sections[names][4]
    code = b""
    for name, _, _, _, begin, length in sections:
        if cubin[strings + name:].startswith(b".text."):
            code += cubin[begin:begin + length]
    return code


def opcodes_of(cubin):
    """['@ IMAD.MOV.U32', ...]: what is predicated is marked; registers and constants are left out."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([disassembler()[0], "-c", file.name], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^ +/\*[0-9a-f]+\*/ +(@\S+ +)?([A-Z][A-Z0-9_.]*)", text, re.MULTILINE)
    return [("@ " if predicate else "") + opcode for predicate, opcode in found]


def _compile_one(given):
    side, number = given
    try:
        return given, compiled(_LISTINGS[side], number, _FRESH), None
    except (RuntimeError, subprocess.CalledProcessError) as error:
        return given, None, str(error)


def _begin(listings, fresh):
    global _LISTINGS, _FRESH
    _LISTINGS, _FRESH = listings, fresh


def compile_all(listings, wanted, jobs=0, done=lambda given, result, error: None, fresh=False):
    """compiled() of [(which listing, number), ...], by several processes; done() is called with each as it is ready."""
    if not wanted:
        return {}
    compiler(), disassembler()  # installed once
    # NVRTC's memory is kept between kernels instead of being given back and cleared anew: a tenth of the time.
    os.environ.update(MALLOC_TRIM_THRESHOLD_=str(1 << 32), MALLOC_MMAP_THRESHOLD_=str(1 << 32),
                      MALLOC_TOP_PAD_=str(1 << 26))
    results = {}
    jobs = min(jobs or os.cpu_count(), max(len(wanted), 1))
    def take(outcomes):
        for given, result, error in outcomes:
            results[given] = result
            done(given, result, error)

    if jobs == 1:
        _begin(listings, fresh)
        take(map(_compile_one, wanted))
    else:
        with multiprocessing.get_context("spawn").Pool(jobs, _begin, (listings, fresh), maxtasksperchild=400) as pool:
            take(pool.imap_unordered(_compile_one, wanted))
    return results
