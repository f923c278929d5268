# SPDX-License-Identifier: Apache-2.0
"""examples/parallel: attention by several processes through fovea/parallel.h is that of one, and what they say when it is not."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from conftest import BUILD, ROOT

FOLDER = ROOT / "examples/parallel"
FLAGS = ("-std=c++17", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT}/include")
LINK = (f"-L{BUILD}", "-lfovea", f"-Wl,-rpath,{BUILD}")


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **options)


def compiled(source, program, *flags):
    done = run("g++", *FLAGS, source, "-o", program, *flags)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    return compiled(FOLDER / "processes.cpp", tmp_path_factory.mktemp("parallel") / "processes", *LINK)


@pytest.mark.parametrize("how", ["keys", "heads"])
@pytest.mark.parametrize("ranks, rows", [(1, 300), (2, 1000), (3, 777), (4, 1000), (6, 600)])
def test_processes_compute_what_one_does(processes, ranks, how, rows):
    """600 rows are less than a piece for each of 6 ranks: some have no rows."""
    done = run(processes, ranks, how, rows)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^rank \d+  (\w+) +(\d+) of +(\d+) elements have other bits.*: right$", done.stdout, re.M)
    assert len(lines) == 5 * ranks
    assert all(different == "0" for name, different, _ in lines if name in ("out", "lse", "grad_q"))
    assert sum(int(count) for name, _, count in lines if name == "lse") == rows * (4 * ranks if how == "heads" else 8)
    assert done.stdout.endswith(f"{ranks} ranks, {how}: as one process\n")


def test_a_wrong_result_is_found(tmp_path):
    """With another seed on the second rank its dropout mask is another one, and so are the sums over ranks."""
    text = (FOLDER / "processes.cpp").read_text()
    wrong = text.replace("const fovea::Options options = example::options();",
                         "fovea::Options options = example::options(); options.seed += group.rank;")
    assert wrong != text
    (tmp_path / "wrong.cpp").write_text(wrong.replace('"attention.h"', f'"{FOLDER}/attention.h"'))
    done = run(compiled(tmp_path / "wrong.cpp", tmp_path / "wrong", *LINK), 2)
    assert done.returncode == 1 and re.search(r"rank 0  grad_v .*: WRONG", done.stdout) and "2 ranks, keys: FAILED" in done.stdout


def test_a_rank_that_is_gone(tmp_path):
    """The others end with an error that names their rank, and do not wait for ever."""
    text = (FOLDER / "processes.cpp").read_text()
    gone = text.replace("      int status = 1;\n", "      int status = 1;\n      if (rank == 1) {\n        _exit(3);\n      }\n")
    assert gone != text
    (tmp_path / "gone.cpp").write_text(gone.replace('"attention.h"', f'"{FOLDER}/attention.h"'))
    done = run(compiled(tmp_path / "gone.cpp", tmp_path / "gone", *LINK), 3)
    assert done.returncode == 1 and "rank 0 of 3: a rank is gone" in done.stderr and "rank 2 of 3: a rank is gone" in done.stderr


@pytest.mark.parametrize("arguments", [("0",), ("2", "sideways"), ("2", "keys", "0"), ("99",)])
def test_arguments_that_are_refused(processes, arguments):
    done = run(processes, *arguments)
    assert done.returncode == 2 and "usage: " in done.stderr and done.stdout == ""


def headers_of_nccl():
    folders = [ROOT / "tests/cpp/fake/nccl", *map(Path, ("/usr/include", "/usr/local/include", "/usr/local/cuda/include"))]
    return [folder for folder in folders if (folder / "nccl.h").exists() and (folder / "cuda_runtime_api.h").exists()]


def test_the_example_for_nccl_reaches_the_gpus(tmp_path):
    """With a driver, a compiler and an NCCL that are played: tables, buffers and calls of a device are refused by nothing, and the
    comparison finds that nothing was computed."""
    played = BUILD / "tests/cpp/fake"
    program = compiled(FOLDER / "nccl.cpp", tmp_path / "nccl", "-I", ROOT / "tests/cpp/fake/nccl", *LINK, "-lpthread")
    env = {**os.environ, "LD_LIBRARY_PATH": str(played), "FOVEA_NVRTC": str(played / "libnvrtc.so.13"), "FOVEA_CACHE_DIR": "none"}
    done = run(program, "heads", env=env)
    assert done.stderr == "" and done.stdout.count(": WRONG\n") == 10, done.stdout + done.stderr
    assert done.returncode == 1 and done.stdout.endswith("2 ranks on 2 GPUs, heads: FAILED\n")
    assert run(program, "sideways", env=env).returncode == 2


@pytest.mark.parametrize("folder", headers_of_nccl(), ids=str)
def test_the_example_for_nccl_compiles(folder, tmp_path):
    """With the headers that are played, and with NVIDIA's own where they are."""
    compiled(FOLDER / "nccl.cpp", tmp_path / "nccl.o", "-c", "-isystem", folder)
