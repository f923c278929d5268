# SPDX-License-Identifier: Apache-2.0
"""Which NVRTC the Python package and the command take: wherever Python finds packages, the same one whatever is
imported first. Driver and NVRTC are the ones that tests/cpp/fake plays; kernels are names."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from conftest import BUILD, ROOT

FAKE = BUILD / "tests" / "cpp" / "fake"
# A torch that loads an NVRTC of its own, from where nothing looks.
TORCH = """
import ctypes, pathlib
ctypes.CDLL(str(pathlib.Path(__file__).with_name("libnvrtc.so.13")), mode=ctypes.RTLD_GLOBAL)
"""
# A call for a GPU, but for the memory there, which preparing it does not look at.
PREPARE = """
import ctypes, numpy as np
from fovea import _abi, _api, _library, _problem
q = np.zeros((1, 64, 1, 64), np.float16)
problem = _problem.Problem(q, q, q, {**_api._SHARED})
out = problem.new("out")
problem.raw.device = 1  # FOVEA_CUDA
_library.check(_library.lib.fovea_prepare(ctypes.byref(problem.raw), _abi.FORWARD))
"""


def put_nvrtc(folder, version):
    """As a wheel, a toolkit or PyTorch has it; the file beside it tells the version."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(FAKE / "libnvrtc.so.13", folder / "libnvrtc.so.13")
    (folder / f"libnvrtc-builtins.so.{version}").touch()
    return folder / "libnvrtc.so.13"


@pytest.fixture
def packages(tmp_path):
    """A folder of packages: NVRTC's wheel, and a torch."""
    folder = tmp_path / "elsewhere" / "site-packages"
    put_nvrtc(folder / "nvidia" / "cu13" / "lib", "13.0")
    put_nvrtc(folder / "torch", "13.2")
    (folder / "torch" / "__init__.py").write_text(TORCH)
    return folder


def numpy_alone(tmp_path):
    """A folder of packages with NumPy and without the NVRTC of this environment."""
    folder = tmp_path / "numpy alone"
    if not folder.exists():
        folder.mkdir()
        for path in Path(sysconfig.get_path("purelib")).glob("numpy*"):
            (folder / path.name).symlink_to(path)
    return folder


def run(script_or_command, tmp_path, python=None, **variables):
    """By a Python that sees no packages but the ones given here, if none is named."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FOVEA_", "CUDA_", "CONDA_"))}
    path = [str(ROOT / "python"), str(numpy_alone(tmp_path)), *filter(None, [variables.pop("path", None)])]
    environment |= {
        "PYTHONPATH": os.pathsep.join(path), "LD_LIBRARY_PATH": str(FAKE), "FOVEA_LIBRARY": str(BUILD / "libfovea.so"),
        "FOVEA_CACHE_DIR": str(tmp_path / "cache"), **variables,
    }  # fmt: skip
    python = [sys.executable, "-S"] if python is None else [python]
    command = [*python, *(["-c", script_or_command] if isinstance(script_or_command, str) else script_or_command)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def nvrtc(text):
    (line,) = re.findall(r"^NVRTC +(.*)$", text, re.M)
    return line


@pytest.mark.parametrize("first", ["", "import torch, fovea", "import fovea, torch"])
def test_no_import_changes_it(packages, tmp_path, first):
    text = run(f"{first}\nimport fovea\nprint(fovea.explain())", tmp_path, path=str(packages))
    assert nvrtc(text) == f"13.0, {packages}/nvidia/cu13/lib/libnvrtc.so.13 (found by Python's path)"


def test_the_same_entries_in_the_cache(packages, tmp_path):
    """Compiled once: with torch before or after, and by the command."""
    def entries():
        return sorted(path.name for path in (tmp_path / "cache").glob("*.kernel"))

    run(f"import fovea\n{PREPARE}", tmp_path, path=str(packages))
    compiled = entries()
    assert compiled
    for order in ("import torch, fovea", "import fovea, torch"):
        run(f"{order}\n{PREPARE}", tmp_path, path=str(packages))
        assert entries() == compiled


def test_every_way_in_which_python_finds_packages(packages, tmp_path):
    expected = nvrtc(run("import fovea; print(fovea.explain())", tmp_path, path=str(packages)))

    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    script = "import fovea; print(fovea.explain())"
    assert str(packages) not in nvrtc(run(script, tmp_path, python))
    (inside,) = environment.glob("lib/python*/site-packages")
    (inside / "others.pth").write_text(f"{packages}\n")
    assert nvrtc(run(script, tmp_path, python)) == expected

    other = tmp_path / "other"  # the user's own packages are the system's to such a one
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", other], check=True)
    user = tmp_path / "user" / "lib" / inside.parent.name / "site-packages"
    user.parent.mkdir(parents=True)
    user.symlink_to(packages)
    found = nvrtc(run(script, tmp_path, other / "bin" / "python", PYTHONUSERBASE=str(tmp_path / "user")))
    assert found == expected


def test_the_command_of_the_package_takes_the_same_one(packages, tmp_path):
    expected = nvrtc(run("import fovea; print(fovea.explain())", tmp_path, path=str(packages)))
    found = nvrtc(run(["-m", "fovea", "explain"], tmp_path, path=str(packages)))
    assert found == expected.replace("Python's path", "FOVEA_NVRTC_FOLDERS")


def test_what_is_named_comes_first_and_the_toolkit_later(packages, tmp_path):
    script = "import fovea; print(fovea.explain())"
    toolkit = put_nvrtc(tmp_path / "toolkit" / "lib64", "13.1")
    found = nvrtc(run(script, tmp_path, path=str(packages), CUDA_HOME=str(tmp_path / "toolkit")))
    assert found.startswith("13.0, ") and found.endswith("(found by Python's path)")
    assert nvrtc(run(script, tmp_path, CUDA_HOME=str(tmp_path / "toolkit"))) == f"13.1, {toolkit} (found by CUDA_HOME)"
    named = nvrtc(run(script, tmp_path, path=str(packages), FOVEA_NVRTC=str(toolkit)))
    assert named == f"13.1, {toolkit} (found by FOVEA_NVRTC)"


def test_one_that_the_driver_cannot_use_is_named(packages, tmp_path):
    """The played driver is of CUDA 13."""
    newer = packages / "nvidia" / "cu14" / "lib"
    newer.mkdir(parents=True)
    (newer / "libnvrtc.so.14").touch()
    (newer / "libnvrtc-builtins.so.14.0").touch()
    found = nvrtc(run("import fovea; print(fovea.explain())", tmp_path, path=str(packages)))
    assert found == (
        f"13.0, {packages}/nvidia/cu13/lib/libnvrtc.so.13 (found by Python's path; passed over: "
        f"{newer}/libnvrtc.so.14 is 14.0: newer than the driver's CUDA 13)"
    )
