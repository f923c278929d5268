#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the stages of the test suite, says how long each took, and counts the tests in the last line.

A stage either counts its tests (GoogleTest and pytest report them) or counts as one. The first column of the
table at the end is what to type to repeat a stage alone: `tools/test.py asan`. With --lanes 2 two stages run at once,
each in a process of its own whose output is printed when it ends; `build` comes first. CPU minutes are those of all
processes that a stage starts.
"""

import argparse
import json
import os
import platform
import queue
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLANG = ("-DCMAKE_CXX_COMPILER=clang++", "-DCMAKE_C_COMPILER=clang")
NEEDS = {"asanfuzz": "asan", "readers": "asan", "asantorch": "asan", "wheel": "torch", "models": "torch"}  # a stage that uses what another has built
# More memory than there is, is an error and not the end.
ASAN = {"FOVEA_CASES": "reduced", "ASAN_OPTIONS": "allocator_may_return_null=1"}


@dataclass
class Count:
    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def add(self, other):
        self.passed += other.passed
        self.failed += other.failed
        self.skipped += other.skipped


class Runner:
    def __init__(self, arguments):
        self.build = (ROOT / arguments.build).resolve()
        self.jobs = arguments.jobs
        self.fuzz_seconds = arguments.fuzz_seconds

    # ---- how things are run ----

    def run(self, *command, env=None, cwd=ROOT, seconds=None):
        """Runs a command with its output shown; true if it ended with 0, and within so many seconds."""
        print("$", " ".join(str(part) for part in command), flush=True)
        merged = dict(os.environ, **{key: str(value) for key, value in (env or {}).items()})
        try:
            return subprocess.run([str(part) for part in command], env=merged, cwd=cwd, timeout=seconds).returncode == 0
        except subprocess.TimeoutExpired:
            print(f"{command[0]}: killed, as it did not end within {seconds} s", flush=True)
            return False

    def one(self, ok):
        return Count(1, 0) if ok else Count(0, 1)

    # Threads that wait for one another for ever would otherwise be seen as nothing at all.
    def googletest(self, binary, env=None, filter="*", seconds=2700):
        # Where `make test` puts NVRTC's wheel, if there is no toolkit.
        env = {"FOVEA_SITE_PACKAGES": sysconfig.get_path("purelib"), **(env or {})}
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            ok = self.run(binary, "--gtest_brief=1", f"--gtest_filter={filter}", f"--gtest_output=json:{report}", env=env,
                          seconds=seconds)
            if not report.exists():
                print(f"{binary} ended without a report")
                return Count(0, 1)
            tests = [test for suite in json.loads(report.read_text())["testsuites"] for test in suite["testsuite"]]
        count = Count()
        for test in tests:
            if test.get("result") == "SKIPPED":
                count.skipped += 1
            elif test.get("failures"):
                count.failed += 1
            elif test["status"] == "RUN":
                count.passed += 1
        if not ok and not count.failed:
            count.failed += 1
        return count

    def pytest(self, *paths, env=None, python=sys.executable):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            ok = self.run(python, "-m", "pytest", "-q", "-rs", "--durations=8", "-p", "no:cacheprovider",
                          f"--junitxml={report}", *paths, env=env)
            if not report.exists():
                print("pytest ended without a report")
                return Count(0, 1)
            suite = xml.etree.ElementTree.parse(report).getroot().find("testsuite")
        failed = int(suite.get("failures")) + int(suite.get("errors"))
        skipped = int(suite.get("skipped"))
        passed = int(suite.get("tests")) - failed - skipped
        if not ok and not failed or not passed:
            failed += 1
        return Count(passed, failed, skipped)

    def cmake(self, build, *options, targets=()):
        ok = self.run("cmake", "--preset", "release", "-B", build, *options)
        target = ["--target", *targets] if targets else []
        return ok and self.run("cmake", "--build", build, f"-j{self.jobs}", *target)

    # ---- the stages ----

    def tidy(self, folders, checks, together=False):
        """clang-tidy over the build's units in these folders, as the build compiles them; the kernels once, for the
        baseline instruction set. What most of the time goes into are the headers of the standard library; `together`
        reads several units, of different namespaces, at once, and alone only those whose names meet."""
        commands = json.loads((self.build / "compile_commands.json").read_text())
        unique = {}
        for entry in commands:
            file = Path(entry["file"])
            if any(file.is_relative_to(ROOT / name) for name in folders) and not file.is_relative_to(self.build):
                for option in (" -static-libgcc", " -Wno-restrict", " -fno-schedule-insns"):  # GCC's alone
                    entry["command"] = entry["command"].replace(option, "")
                unique.setdefault(entry["file"], entry)
        if not unique:
            return False
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            entries, units_of = (self.groups(unique, folder) if together else
                                 (list(unique.values()), {file: [file] for file in unique}))  # fmt: skip
            (folder / "compile_commands.json").write_text(json.dumps(entries + together * list(unique.values())))
            print(f"$ clang-tidy {checks} ... of {len(unique)} files, {len(entries)} runs", flush=True)

            def one(file):
                return subprocess.run(
                    ["clang-tidy", "--quiet", checks, f"--config-file={ROOT}/.clang-tidy", "-p", folder, file], cwd=ROOT,
                    stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # fmt: skip

            def checked(file):
                done = one(file)
                if done.returncode and len(units_of[file]) > 1:  # names that meet, or a finding: it will say so again
                    return [(unit, one(unit)) for unit in units_of[file]]
                return [(file, done)]

            with ThreadPoolExecutor(self.jobs) as pool:
                results = [result for results in pool.map(checked, sorted(units_of)) for result in results]
        print(f"{sum(file in unique for file, _ in results)} files read alone")
        bad = [done.stdout for _, done in results if done.returncode]
        print("".join(bad), end="", flush=True)
        return not bad

    def groups(self, unique, folder):
        """Units that include several of those files, one of a namespace each, with the include folders of all. Files in C
        stay alone."""
        waiting = {}
        for file in sorted(file for file in unique if file.endswith(".cpp")):
            found = re.search(r"^namespace ([\w:]+) \{", Path(file).read_text(), re.MULTILINE)
            waiting.setdefault(found[1] if found else file, []).append(file)
        entries, units_of = [], {}
        while any(waiting.values()):
            files = [of.pop(0) for of in waiting.values() if of]
            unit = str(folder / f"unit{len(entries)}.cpp")
            Path(unit).write_text("".join(f'#include "{file}"  // NOLINT\n' for file in files))
            entry = dict(unique[files[0]], file=unit)
            words = shlex.split(entry["command"].replace(files[0], unit))
            for file in files[1:]:
                others = shlex.split(unique[file]["command"])
                pairs = zip(others, [*others[1:], ""])
                words += [word for option, value in pairs for word in
                          ([option, value] if option == "-isystem" else [option] if option[:2] in ("-I", "-D") else [])]  # fmt: skip
            entry["command"] = shlex.join(words)
            entries.append(entry)
            units_of[unit] = files
        for file in unique.keys() - {file for files in units_of.values() for file in files}:
            entries.append(unique[file])
            units_of[file] = [file]
        return entries, units_of

    def stage_lint(self):
        """clang-format over everything, kernels too; clang-tidy without its analyzer over the library and the command"""
        listed = subprocess.run(["git", "ls-files", "*.h", "*.cpp", "*.c", "*.cuh"], cwd=ROOT,
                                capture_output=True, text=True)
        count = self.one(self.run("clang-format", "--dry-run", "--Werror", *listed.stdout.split()))
        count.add(self.one(self.tidy(["src", "cli"], "--checks=-clang-analyzer-*", together=True)))
        return count

    def stage_tidy(self):
        """clang-tidy with its analyzer over everything: half an hour on two cores"""
        return self.one(self.tidy(["."], "--checks="))

    def stage_build(self):
        """everything, warnings as errors"""
        return self.one(self.cmake(self.build))

    def stage_cpp(self):
        """GoogleTest: the definition, the core, the case table on every instruction set"""
        return self.googletest(self.build / "tests/cpp/fovea_tests", seconds=1800)

    def stage_python(self):
        """pytest: the oracle, the Python package, the command, the documentation's examples"""
        return self.pytest("tests/python", env={"FOVEA_BUILD": self.build})

    def environment(self, variable, folder, package):
        """The Python of an environment that make builds if need be; None, which is a failure, if it lacks the package."""
        venv = os.environ.get(variable, folder)
        self.run("make", "--no-print-directory", f"{venv}/.ready")
        python = ROOT / venv / "bin/python"
        if python.exists() and self.run(python, "-c", f"import {package}; print('{package}', {package}.__version__)"):
            return python
        print(f"{python}: no {package} there; `make {venv}/.ready` installs it")
        return None

    def stage_emulated(self):
        """pytest: the GPU kernels on the CPU, a few problems with two schedules each, and planted faults"""
        return self.pytest("tests/emulated", env={"FOVEA_BUILD": self.build})

    def stage_torch(self):
        """pytest: fovea.torch and fovea.integrations, in .venv-torch, which is made if need be; no torch is a failure"""
        python = self.environment("VENV_TORCH", ".venv-torch", "torch")
        if python is None:
            return Count(0, 1)
        count = self.pytest("tests/torch", env={"FOVEA_BUILD": self.build}, python=python)
        # Tests for a GPU, to test them themselves.
        paths = [f"tests/gpu/test_{name}.py" for name in ("dropout", "enable", "cuts")]
        count.add(self.pytest(*paths, env={"FOVEA_BUILD": self.build, "FOVEA_TEST_DEVICE": "cpu"}, python=python))
        count.add(self.pytest("tests/integrations", env={"FOVEA_BUILD": self.build}, python=python))
        # Again where the path in C is not the fastest one: in Python alone, and as with PyTorch before 2.14.
        names = ["bad_input", "gradients", "transforms"]
        for choice, more in (("0", ["enable", "sdpa", "calls", "qkv"]), ("methods", [])):
            paths = [f"tests/torch/test_{name}.py" for name in names + more]
            env = {"FOVEA_BUILD": self.build, "FOVEA_TORCH_FAST": choice, "FOVEA_RANDOM": "60"}
            count.add(self.pytest(*paths, env=env, python=python))
        return count

    def stage_torch_python(self):
        """pytest: all of fovea.torch's tests again with FOVEA_TORCH_FAST=0, in the environment of the stage torch"""
        python = self.environment("VENV_TORCH", ".venv-torch", "torch")
        if python is None:
            return Count(0, 1)
        return self.pytest("tests/torch", env={"FOVEA_BUILD": self.build, "FOVEA_TORCH_FAST": "0"}, python=python)

    def stage_models(self):
        """pytest: fovea.integrations with transformers, diffusers, Megatron-Core and xFormers themselves, in
        .venv-integrations, which is made if need be and takes PyTorch from .venv-torch"""
        python = self.environment("VENV_INTEGRATIONS", ".venv-integrations", "transformers")
        if python is None:
            return Count(0, 1)
        paths = [f"tests/models/test_{name}.py" for name in ("models", "transformers", "diffusers", "megatron", "xformers", "hub", "programs")]
        return self.pytest(*paths, env={"FOVEA_BUILD": self.build}, python=python)

    def stage_jax(self):
        """pytest: fovea.jax on four devices of the CPU, in .venv-jax, which is made if need be; no JAX is a failure"""
        python = self.environment("VENV_JAX", ".venv-jax", "jax")
        if python is None:
            return Count(0, 1)
        return self.pytest("tests/jax", env={"FOVEA_BUILD": self.build}, python=python)

    def stage_torch_oldest(self):
        """pytest: fovea.torch with the oldest PyTorch that is supported, in .venv-torch-oldest, which is made if need be"""
        python = self.environment("VENV_TORCH_OLDEST", ".venv-torch-oldest", "torch")
        if python is None:
            return Count(0, 1)
        return self.pytest("tests/torch", env={"FOVEA_BUILD": self.build}, python=python)

    def stage_asan(self):
        """the second compiler builds everything, with AddressSanitizer and UndefinedBehaviorSanitizer: a reduced case
        table, all other tests in C++"""
        build = ROOT / "build-asan"
        if not self.cmake(build, "-DFOVEA_SANITIZE=address,undefined", *CLANG):
            return Count(0, 1)
        return self.googletest(build / "tests/cpp/fovea_tests", env=ASAN)

    def stage_asanfuzz(self):
        """ten seconds of fuzzing in the build of the stage asan"""
        return self.one(self.run(ROOT / "build-asan/tests/fuzz/fuzz_capi", "--seconds", 10, env=ASAN))

    def stage_asantorch(self):
        """pytest: the fast path of fovea.torch and enable() with the library and the extension of the stage asan"""
        build = ROOT / "build-asan"
        python = self.environment("VENV_TORCH", ".venv-torch", "torch")
        if python is None or not self.cmake(build, "-DFOVEA_SANITIZE=address,undefined", *CLANG, targets=["fovea"]):
            return Count(0, 1)
        # Python and PyTorch have no sanitizer, so its runtime is there before them; and so is what throws exceptions, which it
        # intercepts. They do not free all that they hold. Python's objects shall each be a piece of memory.
        names = (f"libclang_rt.asan-{platform.machine()}.so", "libstdc++.so.6")
        found = [subprocess.run(["clang", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip() for name in names]
        env = {"LD_PRELOAD": ":".join(found), "ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=0",
               "UBSAN_OPTIONS": "print_stacktrace=1", "PYTHONMALLOC": "malloc", "FOVEA_BUILD": build, "FOVEA_RANDOM": 300}  # fmt: skip
        planted = "import ctypes; ctypes.memset(ctypes.create_string_buffer(8), 0, 9999)"
        done = subprocess.run([python, "-c", planted], env={**os.environ, **{key: str(value) for key, value in env.items()}},
                              capture_output=True, text=True)  # fmt: skip
        print("the sanitizer finds a planted error:", "heap-buffer-overflow" in done.stderr, flush=True)
        count = self.one("heap-buffer-overflow" in done.stderr)
        # Not those that compile, count bytes of the process or start others. A report goes where pytest would keep it to itself.
        for path, chosen in (("fast", "not references and not compiled and not environment"), ("enable", "test_fuzz")):
            count.add(self.pytest(f"tests/torch/test_{path}.py", "--capture=sys", "-k", chosen, env=env, python=python))
        return count

    def stage_tsan(self):
        """ThreadSanitizer on a reduced case table and on whatever else starts threads"""
        build = ROOT / "build-tsan"
        tests = ["cases_test.cpp", "cpu_test.cpp", "jit_cache_test.cpp"]
        if not self.cmake(build, "-DFOVEA_SANITIZE=thread", f"-DFOVEA_TEST_SOURCES={';'.join(tests)}",
                          targets=("fovea_tests",)):
            return Count(0, 1)
        return self.googletest(build / "tests/cpp/fovea_tests", env={"FOVEA_CASES": "reduced"})

    def stage_kernels(self):
        """the manifest of GPU kernels: every row within its limits; what is not current compiled, 400 at most; 60 of
        what is, which must agree (tools/kernels.py)"""
        return self.one(self.run(sys.executable, "tools/kernels.py", "--check", "--build", self.build, "--jobs", self.jobs))

    def stage_nvrtc(self):
        """a sample of the GPU kernels with the oldest NVRTC that is supported and with the newest on PyPI"""
        count = Count()
        # 12.4 does not know sm_120.
        for wheel, architectures in (("nvidia-cuda-nvrtc-cu12==12.4.*", ("sm_80", "sm_90")),
                                     ("nvidia-cuda-nvrtc", ("sm_80", "sm_90", "sm_120"))):
            with tempfile.TemporaryDirectory() as folder:
                if not self.run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, wheel):
                    count.failed += 1
                    continue
                library, = Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")
                count.add(self.googletest(
                    self.build / "tests/cpp/fovea_tests", env={"FOVEA_NVRTC": library, "FOVEA_KERNELS": 10},
                    filter=":".join(f"*CudaKernels*/{name}" for name in architectures)))
        return count

    def stage_fuzz(self):
        """random and hostile calls of the C ABI, then twenty seconds of them without products of bf16, where bf16 is compared, too, and
        ten for a GPU whose driver and compiler are played"""
        program, played = self.build / "tests/fuzz/fuzz_capi", self.build / "tests/cpp/fake"
        count = self.one(self.run(program, "--seconds", self.fuzz_seconds))
        count.add(self.one(self.run(program, "--seconds", 20, env={"FOVEA_CPU_ISA": "portable"})))
        environment = {"LD_LIBRARY_PATH": played, "FOVEA_NVRTC": played / "libnvrtc.so.13", "FOVEA_CACHE_DIR": "none"}
        count.add(self.one(self.run(program, "--cuda", "--seconds", 10, env=environment)))
        return count

    def stage_readers(self):
        """libFuzzer, a minute each: problem lines, .npy and .safetensors files; by the second compiler, with sanitizers"""
        build, corpora = ROOT / "build-asan", ROOT / "tests/fuzz/corpus"
        names = sorted(path.name for path in corpora.iterdir())
        if not self.cmake(build, "-DFOVEA_SANITIZE=address,undefined", *CLANG,
                          targets=[f"fuzz_{name}" for name in names]):
            return Count(0, 1)
        count = Count()
        for name in names:
            with tempfile.TemporaryDirectory() as found:  # what it finds is kept there, the corpus is not changed
                count.add(self.one(self.run(
                    build / f"tests/fuzz/fuzz_{name}", f"-max_total_time={self.fuzz_seconds}", "-max_len=65536",
                    "-timeout=20", "-verbosity=0", "-print_final_stats=1", f"-artifact_prefix={build}/{name}-",
                    found, corpora / name, env={"ASAN_OPTIONS": "allocator_may_return_null=1"})))
        return count

    def stage_clang(self):
        """the second compiler builds everything, optimised, and runs the tests in C++"""
        build = ROOT / "build-clang"
        if not self.cmake(build, *CLANG):
            return Count(0, 1)
        return self.googletest(build / "tests/cpp/fovea_tests")

    def use(self, source, build, *options):
        """Configures and builds a user's project, and runs what it makes."""
        return (self.run("cmake", "-S", source, "-B", build, *options)
                and self.run("cmake", "--build", build, f"-j{self.jobs}")
                and self.run(build / "example") and self.run(build / "example_c"))

    def use_installed(self, prefix, folder):
        """By find_package, then by pkg-config."""
        example = ROOT / "examples/installed"
        count = self.one(self.use(example, folder / "by_cmake", f"-DCMAKE_PREFIX_PATH={prefix}"))
        libraries = next(prefix.glob("**/pkgconfig"))
        flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fovea"], text=True, stdout=subprocess.PIPE,
                               env={**os.environ, "PKG_CONFIG_PATH": str(libraries)}).stdout.split()
        ok = bool(flags)
        for compiler, file in (("g++", "main.cpp"), ("gcc", "main.c")):
            program = folder / f"by_pkg_config_{compiler}"
            ok = (ok and self.run(compiler, example / file, "-o", program, *flags)
                  and self.run(program, env={"LD_LIBRARY_PATH": libraries.parent}))
        count.add(self.one(ok))
        return count

    def stage_installed(self):
        """users' projects: with an installed copy, shared and static, by find_package and by pkg-config; with fovea as a
        part of theirs, by add_subdirectory and FetchContent"""
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            if not self.run("cmake", "--install", self.build, "--prefix", folder / "shared"):
                return Count(0, 1)
            count = self.use_installed(folder / "shared", folder)
            build = ROOT / "build-embedded"  # static, as a user's project may say of all its libraries
            for fetched in ("OFF", "ON"):
                count.add(self.one(self.use(
                    ROOT / "examples/embedded", build, f"-DFOVEA_FOLDER={ROOT}", f"-DFOVEA_FETCHED={fetched}",
                    "-DBUILD_SHARED_LIBS=OFF", "-DFOVEA_INSTALL=ON", "-DCMAKE_BUILD_TYPE=Debug")))
            if not self.run("cmake", "--install", build, "--prefix", folder / "static"):
                count.failed += 1
                return count
            (folder / "with_static").mkdir()
            count.add(self.use_installed(folder / "static", folder / "with_static"))
            return count

    def stage_abi(self):
        """the C ABI beside the last release's, and that changes which break programs are found"""
        count = self.one(self.run(sys.executable, ROOT / "tools/abi.py"))
        count.add(self.one(self.run(sys.executable, ROOT / "tools/abi.py", "--test")))
        return count

    def stage_docs(self):
        """the documentation site without a warning; every public name in it; a real browser searches and takes pictures"""
        python = Path(os.environ.get("VENV_DOCS", ROOT / ".venv-docs")) / "bin/python"
        count = self.one(self.run("make", "docs", f"BUILD={self.build}", f"JOBS={self.jobs}"))
        if not count.failed:
            count.add(self.pytest("tests/docs", python=python))
        return count

    def stage_wheel(self):
        """both wheels, built unless $FOVEA_WHEELS has them: in bare environments of the oldest and the newest Python,
        beside PyTorch, and for aarch64 under qemu-user; the source distribution"""
        folder = os.environ.get("FOVEA_WHEELS")
        target = ".venv-wheels/.ready" if folder else "wheels"
        if not (self.run("tools/deps.sh", "build", "wheel") and self.run("make", "--no-print-directory", f"JOBS={self.jobs}", target)):
            return Count(0, 1)
        return self.pytest("tests/wheel", "-s", env={"FOVEA_WHEELS": folder or ROOT / "dist"})

    def stage_demo(self):
        """the demo for a few steps, its gradients checked"""
        binary = self.build / "examples/train_lm/train_lm"
        count = self.one(self.run(binary, "--check-gradients"))
        with tempfile.TemporaryDirectory() as folder:
            count.add(self.one(self.run(binary, "--seconds", 10, "--output", folder)))
        return count


def main():
    stages = {name[len("stage_"):]: getattr(Runner, name).__doc__ for name in vars(Runner) if name.startswith("stage_")}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="stages:\n" + "\n".join(f"  {name:10} {text}" for name, text in stages.items()))
    parser.add_argument("stages", nargs="+", metavar="stage", choices=[*stages, "all"], help="'all', or any of those below")
    parser.add_argument("--build", default="build", help="build directory (build)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel jobs (all cores)")
    parser.add_argument("--fuzz-seconds", type=int, default=60, help="how long `fuzz` runs (60)")
    parser.add_argument("--lanes", type=int, default=1, help="stages that run at once (1)")
    parser.add_argument("--after", type=Path, metavar="FILE", help="count the stages of an earlier run's --report too")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table as JSON")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # one stage: where its count goes
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = list(stages) if "all" in arguments.stages else arguments.stages
    if arguments.only:
        chosen = [arguments.only]
    elif "all" in arguments.stages:  # lint reads what the build writes
        chosen.remove("lint")
        chosen.insert(chosen.index("build") + 1, "lint")

    if arguments.child:
        count = getattr(Runner(arguments), f"stage_{chosen[0]}")()
        arguments.child.write_text(json.dumps([count.passed, count.failed, count.skipped]))
        return 0
    before = json.loads(arguments.after.read_text()) if arguments.after else {"wall": 0, "stages": []}
    start = time.monotonic()
    rows = [Row(name, seconds, cpu, Count(*counts)) for name, seconds, cpu, *counts in before["stages"]]
    rows += run_stages(chosen, stages, arguments.lanes)
    wall = before["wall"] + time.monotonic() - start
    if arguments.report:
        arguments.report.write_text(json.dumps({"wall": wall, "stages": [
            [row.name, row.seconds, row.cpu, row.count.passed, row.count.failed, row.count.skipped] for row in rows]}))
    total = Count()
    print(f"\n{'stage':12}{'seconds':>8}{'CPU min':>9}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for row in rows:
        total.add(row.count)
        print(f"{row.name:12}{row.seconds:8.0f}{row.cpu / 60:9.1f}{row.count.passed:8}{row.count.failed:8}{row.count.skipped:8}")
    print(f"{'all':12}{wall:8.0f}{sum(row.cpu for row in rows) / 60:9.1f}"
          + (f"    {arguments.lanes} stages at once" if arguments.lanes > 1 else ""))
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed or not total.passed else 0


@dataclass
class Row:
    name: str
    seconds: float
    cpu: float
    count: Count


def run_stages(names, documented, lanes):
    """A row each, in the order of `names`; so many at once, but `build` alone and before the others."""
    rows, waiting, lock = {}, queue.SimpleQueue(), threading.Lock()

    def run(name, shown):
        with tempfile.TemporaryDirectory() as folder:
            result, log = Path(folder) / "count.json", Path(folder) / "log"
            start = time.monotonic()
            with log.open("w") as output:
                # The same arguments again; what is last is what counts.
                child = subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--child", result, "--only", name],
                                         stdout=None if shown else output, stderr=None if shown else subprocess.STDOUT)
                _, _, usage = os.wait4(child.pid, 0)
            count = Count(*json.loads(result.read_text())) if result.exists() else Count(0, 1)
            row = rows[name] = Row(name, time.monotonic() - start, usage.ru_utime + usage.ru_stime, count)
            with lock:
                if not shown:
                    print(f"\n== {name}: {documented[name]}\n{log.read_text(errors='replace')}", end="")
                print(f"-- {name}: {count.passed} passed, {count.failed} failed, {count.skipped} skipped in {row.seconds:.0f} s, "
                      f"{row.cpu / 60:.1f} CPU minutes", flush=True)

    def lane():
        while True:
            try:
                first = waiting.get_nowait()
            except queue.Empty:
                return
            for name in [first, *(name for name in names if NEEDS.get(name) == first)]:
                with lock:
                    print(f"\n== {name}: begins", flush=True)
                run(name, shown=False)

    for name in names:
        if lanes == 1 or name == "build":
            print(f"\n== {name}: {documented[name]}", flush=True)
            run(name, shown=True)
        elif NEEDS.get(name) not in names:
            waiting.put(name)
    threads = [threading.Thread(target=lane) for _ in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [rows[name] for name in names]


if __name__ == "__main__":
    assert shutil.which("cmake"), "cmake is missing: run `make deps`"
    sys.exit(main())
