# SPDX-License-Identifier: Apache-2.0
"""The wheels in $FOVEA_WHEELS (`make wheels` builds them) as their users install them.

x86-64: into bare environments of the oldest and the newest Python of this machine, with no compiler on the PATH and
nothing of the checkout in sight; and beside PyTorch, in the environment that `make test-torch` keeps. aarch64: the
library and the command under qemu-user, with Debian's glibc for it.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
WHEELS = Path(os.environ["FOVEA_WHEELS"])
TORCH = ROOT / os.environ.get("VENV_TORCH", ".venv-torch")
QEMU, SYSROOT = "qemu-aarch64", Path("/usr/aarch64-linux-gnu")
(ZIG,) = ROOT.glob(".venv-wheels/lib/python*/site-packages/ziglang/zig")
PROBLEM = "fwd b=2 hq=8 hk=2 sq=512 sk=512 d=64 bf16"
OLDEST = (3, 9)

FIRST_RESULT = """
import numpy as np, fovea
q, k, v = (np.random.default_rng(i).standard_normal((2, 37, 4, 16), dtype=np.float32) for i in range(3))
out, lse = fovea.attention(q, k, v, causal=True, return_lse=True)
s = np.where(np.tri(37, dtype=bool), np.einsum("bqhd,bkhd->bhqk", q, k) / 4, -np.inf)
p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
assert np.allclose(out, np.einsum("bhqk,bkhd->bqhd", p, v), atol=1e-5)
"""
BACKWARD = """
g = np.ones_like(out)
grads = fovea.attention_backward(g, q, k, v, out, lse, causal=True)
assert np.allclose(grads.v, np.einsum("bhqk,bqhd->bkhd", p, g), atol=1e-5)
ds = p * (np.einsum("bqhd,bkhd->bhqk", g, v) - np.einsum("bqhd,bqhd->bhq", g, out)[..., None]) / 4
assert np.allclose(grads.q, np.einsum("bhqk,bkhd->bqhd", ds, k), atol=1e-5)
assert np.allclose(grads.k, np.einsum("bhqk,bqhd->bkhd", ds, q), atol=1e-5)
"""
TORCH_RESULT = """
import torch, fovea.torch
q, k, v = (torch.randn(2, 4, 37, 16, requires_grad=True) for _ in range(3))
fovea.torch.attention(q, k, v, causal=True).sum().backward()
ours = q.grad.clone(); q.grad = None
torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
assert torch.allclose(ours, q.grad, atol=1e-5)
assert fovea.torch.fast_path().startswith("C, "), fovea.torch.fast_path()
print("PyTorch", torch.__version__)
"""


def the_wheel(arch):
    (wheel,) = WHEELS.glob(f"fovea_attention-*-py3-none-manylinux_2_28_{arch}.whl")
    return wheel


def version_of(python):
    done = subprocess.run(
        [python, "-c", "import ensurepip, sys, venv; print(*sys.version_info[:2])"], capture_output=True, text=True
    )
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None


def pythons():
    """The oldest and the newest that can be used: on the PATH, Debian's and pyenv's."""
    names = [f"{folder}/python3.{minor}" for minor in range(9, 20) for folder in os.environ["PATH"].split(os.pathsep)]
    places = [*map(Path, names), *Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python3"), Path(sys.executable)]
    found = {}
    for place in places:
        if place.is_file():
            version = version_of(place)
            if version is not None and version >= OLDEST:
                found.setdefault(version, place)
    return {min(found): found[min(found)], max(found): found[max(found)]}


class Bare:
    """An environment in which only the wheel and what it requires are installed, and no program is on the PATH."""

    def __init__(self, python, folder):
        subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
        self.folder, self.bin = folder, folder / "venv" / "bin"

    def run(self, *command, status=0, **variables):
        environment = {"PATH": str(self.bin), "HOME": str(self.folder), **variables}
        for name, value in os.environ.items():  # how pip reaches its index
            if name.startswith("PIP_") or name.lower().endswith("_proxy") or name.startswith("SSL_"):
                environment.setdefault(name, value)
        done = subprocess.run(
            [str(self.bin / command[0]), *map(str, command[1:])], cwd=self.folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == status, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stderr if status else done.stdout


@pytest.fixture(scope="module", params=pythons().items(), ids=lambda item: ".".join(map(str, item[0])))
def bare(request, tmp_path_factory):
    """Installed, and the first result computed; how long that took is printed."""
    version, python = request.param
    environment = Bare(python, tmp_path_factory.mktemp("bare"))
    start = time.monotonic()
    environment.run("python", "-m", "pip", "install", "-q", "--only-binary=:all:", the_wheel("x86_64"))
    installed = time.monotonic()
    environment.run("python", "-c", FIRST_RESULT)
    end = time.monotonic()
    print(f"\nPython {'.'.join(map(str, version))} ({python}): pip install {installed - start:.1f} s, "
          f"first result {end - installed:.1f} s, together {end - start:.1f} s")  # fmt: skip
    return environment


def test_it_is_the_installed_one(bare):
    out = bare.run("python", "-c", "import fovea; print(fovea.__file__, fovea._library.path, sep='\\n')")
    assert all(line.startswith(str(bare.folder / "venv")) for line in out.splitlines())


def test_backward(bare):
    bare.run("python", "-c", FIRST_RESULT + BACKWARD)


@pytest.mark.parametrize("isa", ["portable", "sse4", "avx2", "avx512", "avx512_bf16", "amx"])
def test_every_instruction_set(bare, isa):
    done = subprocess.run(
        [bare.bin / "python", "-c", FIRST_RESULT + BACKWARD],
        env={"PATH": "", "FOVEA_CPU_ISA": isa}, capture_output=True, text=True,
    )  # fmt: skip
    if "needs a processor with" in done.stderr:
        pytest.skip(f"this machine has no {isa}")
    assert done.returncode == 0, done.stderr


def loops_of(library):
    """The short inner loops of a library, each a list of its instructions."""
    done = subprocess.run(["objdump", "-d", "--no-show-raw-insn", library], capture_output=True, text=True, check=True)
    code = [(int(found[1], 16), found[2]) for found in re.finditer(r"^ +([0-9a-f]+):\t(.*)$", done.stdout, re.M)]
    number = {address: n for n, (address, _) in enumerate(code)}
    for n, (_, instruction) in enumerate(code):
        jump = re.match(r"j\w+ +([0-9a-f]+)", instruction)
        if jump and 0 < n - number.get(int(jump[1], 16), n) < 100:
            yield [instruction for _, instruction in code[number[int(jump[1], 16)] : n]]


def test_products_stay_in_registers(bare):
    """The inner loops of fp32 products: 12 x 2 sums with AVX-512 and 4 x 3 with AVX2, none of them on the stack."""
    library = bare.run("python", "-c", "import fovea; print(fovea._library.path)").strip()
    loops = list(loops_of(library))
    for register, sums in (("zmm", 24), ("ymm", 12)):
        found = [loop for loop in loops if sum(bool(re.match(rf"vfmadd\d+ps .*%{register}", code)) for code in loop) == sums]
        assert len(found) >= 2, f"A by rows and by columns, {register}"  # see Lhs in src/cpu/isa/gemm.h
        assert not [code for loop in found for code in loop if "(%rsp)" in code or "(%rbp)" in code], register


def test_explain(bare):
    text = bare.run("python", "-c", "import fovea; print(fovea.explain())")
    assert re.search(r"^backend +cpu +available$", text, re.M)
    assert re.search(r"^NVRTC +.", text, re.M)


def test_the_command(bare):
    version = bare.run("python", "-c", "import fovea; print(fovea.__version__)").strip()
    assert bare.run("fovea", "--version").split() == ["fovea", version]
    assert bare.run("python", "-m", "fovea", "--version").split() == ["fovea", version]
    # But for the first folder of sys.path, which is the script's own or the current one.
    first, second = (re.sub(r"(?m)^FOVEA_NVRTC_FOLDERS .*$", "", bare.run(*command, "explain"))
                     for command in (("fovea",), ("python", "-m", "fovea")))  # fmt: skip
    assert first == second
    assert "1 passed, 0 failed" in bare.run("fovea", "check", "fwd b=1 hq=2 sq=40 sk=40 d=32 fp32 causal")
    done = subprocess.run([bare.bin / "fovea", "explain", "fwd nonsense"], capture_output=True, text=True)
    assert done.returncode == 2, "the exit code of the command is passed on"


def test_kernels_ahead_of_time(bare):
    """Which kernels a problem needs is known without NVRTC; to compile one without it is an error that says what to do."""
    listed = bare.run("fovea", "precompile", "--list", "--arch", "sm_90", PROBLEM, FOVEA_NVRTC="/nowhere")
    assert "sm90_forward" in listed
    error = bare.run("fovea", "precompile", "--arch", "sm_90", PROBLEM, status=2, FOVEA_NVRTC="/nowhere")
    assert "FOVEA_NVRTC: '/nowhere'" in error and "accepted: the file libnvrtc.so" in error
    (line,) = re.findall(r"^NVRTC +(.*)$", bare.run("fovea", "explain"), re.M)
    if line[0].isdigit():
        print(f"\nThis machine has NVRTC {line}")
    else:
        assert "pip install" in line


def kernels_found(installed, precompile):
    """The lines of tools/wheel_kernels.txt need no compiler: the keys of the kernels that came along are this library's."""
    lines = ("--arch", "sm_90", "--file", ROOT / "tools" / "wheel_kernels.txt")
    said = precompile(*lines, FOVEA_PRECOMPILED_DIR=str(installed), FOVEA_NVRTC="/nowhere")
    kernels = len(list(installed.glob("*.kernel")))
    assert kernels > 100
    assert re.search(rf"^{kernels} kernels: 0 compiled, {kernels} were there", said, re.M), said
    return kernels


def test_kernels_that_came_along(bare):
    (installed,) = (bare.folder / "venv" / "lib").glob("python*/site-packages/fovea/libfovea.kernels")
    kernels = kernels_found(installed, lambda *words, **variables: bare.run("fovea", "precompile", *words, **variables))
    for command in (("fovea", "explain"), ("python", "-c", "import fovea; print(fovea.explain())")):
        assert re.search(rf"^installed kernels +{installed}, {kernels} kernels of ", bare.run(*command), re.M)


def test_extras(bare):
    """What [cuda12] and [cuda13] would install: asked of the index, not downloaded."""
    wheel = the_wheel("x86_64")
    for extra, package in {"cuda12": "nvidia-cuda-nvrtc-cu12", "cuda13": "nvidia-cuda-nvrtc"}.items():
        text = bare.run("python", "-m", "pip", "install", "--dry-run", "--only-binary=:all:", f"{wheel}[{extra}]")
        (version,) = re.findall(rf"^Would install .*\b{package}-(\d+)\.", text, re.M)
        assert version == extra[-2:]


def test_a_program_in_c(bare, tmp_path):
    """Compiled here, with the headers and the library of the wheel; it runs without a compiler."""
    include = bare.run("python", "-c", "import fovea; print(fovea.get_include())").strip()
    library = Path(include).parent
    for name, compiler in (("main.c", "cc"), ("main.cpp", "c++")):
        program = tmp_path / name.replace(".", "-")
        subprocess.run(
            [compiler, ROOT / "examples" / "installed" / name, f"-I{include}", f"-L{library}", "-lfovea",
             f"-Wl,-rpath,{library}", "-lm", "-o", program], check=True,
        )  # fmt: skip
        subprocess.run([program], check=True)


def test_licences(bare):
    with zipfile.ZipFile(the_wheel("x86_64")) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/licenses/" in name}
    for part, words in {"LICENSE": "Apache License", "libhwy-dev": "Apache", "libfmt-dev": "Victor Zverovich",
                        "libcli11-dev": "University of Cincinnati", "nlohmann-json3-dev": "Niels Lohmann",
                        "llvm-libcxx": "LLVM", "zig-compiler-rt": "Permission is hereby granted"}.items():  # fmt: skip
        (text,) = (text for name, text in texts.items() if Path(name).stem == part)
        assert words in text, part


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_no_path_of_the_build_is_in_it(arch):
    """`make release` builds in two folders and compares the bits. A path that came from a build would make them differ."""
    known = rb"/(?:proc|sys|lib|lib64|usr/lib|usr/lib64|usr/local|usr/share|\.cache)/"
    with zipfile.ZipFile(the_wheel(arch)) as archive:
        for name in archive.namelist():
            paths = re.findall(rb'(?<![\w./"<+*-])/(?:[\w.+-]+/)+[\w.+-]+', archive.read(name))
            assert [path for path in paths if not re.match(known, path + b"/")] == [], name
            if name == "fovea/libfovea.so":
                assert b"/proc/cpuinfo" in paths  # the pattern finds what there is


def test_beside_pytorch(tmp_path):
    """In an environment that sees the one with PyTorch."""
    if not (TORCH / "bin" / "python").exists():
        pytest.skip(f"{TORCH} has no PyTorch; `make test-torch` makes it")
    version = version_of(TORCH / "bin" / "python")
    environment = Bare(TORCH / "bin" / "python", tmp_path)
    (packages,) = TORCH.glob("lib/python*/site-packages")
    (inside,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (inside / "others.pth").write_text(f"{packages}\n")
    environment.run("python", "-m", "pip", "install", "-q", "--no-deps", the_wheel("x86_64"))
    print(f"\nPython {'.'.join(map(str, version))}:", environment.run("python", "-c", TORCH_RESULT))
    # PyTorch's wheels bring an NVRTC, and it is found without importing torch.
    lines = {
        re.search(r"^NVRTC +(.*)$", environment.run("python", "-c", f"{first}; import fovea; print(fovea.explain())"), re.M)[1]
        for first in ("pass", "import torch")
    }
    assert len(lines) == 1
    (line,) = lines
    if list(packages.glob("nvidia/*/lib/libnvrtc.so.*")):
        assert "(found by Python's path" in line
        compiled = environment.run("fovea", "precompile", "--arch", "sm_90", PROBLEM, FOVEA_CACHE_DIR=str(tmp_path / "kernels"))
        assert re.match(r"[1-9]\d* kernels?: [1-9]\d* compiled, 0 were there", compiled)
        assert list((tmp_path / "kernels").rglob("*"))
    else:
        print(f"{TORCH} has no NVRTC: nothing compiled")


def test_the_source_distribution(tmp_path):
    """pip takes it, and it has what git tracks. `make wheels` compiled the wheels from it. FOVEA_LONG=1: pip compiles it,
    too (two minutes), with this machine's compiler and without the checkout."""
    (sdist,) = WHEELS.glob("fovea_attention-*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in tracked if not name.startswith(".ci/")} - inside == set()
    environment = Bare(Path(sys.executable), tmp_path)
    long = os.environ.get("FOVEA_LONG") == "1"
    text = environment.run("python", "-m", "pip", "install", *([] if long else ["--dry-run"]), sdist, PATH=os.environ["PATH"])
    assert re.search(rf"^{'Successfully' if long else 'Would'} install.*\bfovea-attention-\d", text, re.M)
    if long:
        environment.run("python", "-c", FIRST_RESULT + BACKWARD)
        assert "--config-settings=cmake.define.FOVEA_COMMAND=ON" in environment.run("fovea", "explain", status=1)


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory):
    """The wheel, unpacked; runs its command under qemu."""
    folder = tmp_path_factory.mktemp("aarch64")
    with zipfile.ZipFile(the_wheel("aarch64")) as archive:
        archive.extractall(folder)
    if shutil.which(QEMU) is None or not SYSROOT.is_dir():
        pytest.fail(f"{QEMU} or {SYSROOT} is missing; `tools/deps.sh wheel` installs them")
    return folder / "fovea"


def under_qemu(program, *arguments, cpu="max", status=0, **variables):
    done = subprocess.run(
        [QEMU, "-cpu", cpu, "-L", SYSROOT, program, *arguments], capture_output=True, text=True, env={**os.environ, **variables}
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def command(aarch64):
    command = aarch64 / "bin" / "fovea"
    command.chmod(0o755)
    return command


def test_kernels_that_came_along_on_aarch64(aarch64, command):
    """The same files as for x86-64."""
    kernels_found(aarch64 / "libfovea.kernels", lambda *words, **variables: under_qemu(command, "precompile", *words, **variables))
    names = []
    for arch in ("x86_64", "aarch64"):
        with zipfile.ZipFile(the_wheel(arch)) as archive:
            names.append({name: archive.read(name) for name in archive.namelist() if "libfovea.kernels/" in name})
    assert names[0] == names[1]


def check_under_qemu(command, *arguments, cpu="max"):
    text = under_qemu(command, "check", "--table", "reduced", *arguments, cpu=cpu)
    passed, failed = map(int, re.search(r"^(\d+) passed, (\d+) failed", text, re.M).groups())
    print(f"\naarch64, {cpu}: {passed} rows of the reduced case table: {' '.join(arguments) or 'all'}")
    assert not failed
    return passed


def test_the_case_table_on_aarch64(command):
    """The command's own check against its fp64 reference: the reduced case table, forward and backward, with products of
    bf16 (FEAT_BF16), then the rows in bf16 without."""
    assert check_under_qemu(command) > 50
    assert check_under_qemu(command, "--isa", "neon", "bf16") > 10


def test_a_processor_without_bf16_products(command):
    """Nothing runs there that it has not; they are refused where they are asked for."""
    assert re.search(r"^instruction set +neon +in use$", under_qemu(command, "explain", cpu="cortex-a72"), re.M)
    assert check_under_qemu(command, "bf16", cpu="cortex-a72") > 10
    assert "neon_bf16" in under_qemu(command, "check", "--isa", "neon_bf16", cpu="cortex-a72", status=2)


def test_the_library_on_aarch64(aarch64, tmp_path):
    program = tmp_path / "example"
    subprocess.run(
        [ZIG, "cc", "-target", "aarch64-linux-gnu.2.28", ROOT / "examples" / "installed" / "main.c", f"-I{aarch64}/include",
         f"-L{aarch64}", "-lfovea", f"-Wl,-rpath,{aarch64}", "-o", program], check=True,
    )  # fmt: skip
    assert "cpu: used" in under_qemu(program)
