# SPDX-License-Identifier: Apache-2.0
"""The wheel: that it builds from this tree, serves every Python from 3.9, holds what it should and nothing else, and
works where nothing of the checkout is in sight."""

import ast
import os
import re
import subprocess
import sys
import venv
import zipfile

import pytest

from conftest import ROOT

PACKAGE = ROOT / "python" / "fovea"


def header_version():
    text = (ROOT / "include" / "fovea" / "c.h").read_text()
    return ".".join(re.search(rf"FOVEA_VERSION_{part} (\d+)", text).group(1) for part in ("MAJOR", "MINOR", "PATCH"))


def clean_environment():
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FOVEA_LIBRARY")}


def run(*command, cwd):
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean_environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built as pip builds it for a user: in isolation, with the backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.iterdir()
    return built


@pytest.mark.slow
def test_name(wheel):
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("fovea_attention", header_version(), "py3", "none")
    assert platform != "any"


@pytest.mark.slow
def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    sources = {f"fovea/{path.relative_to(PACKAGE)}" for path in PACKAGE.rglob("*") if path.suffix in (".py", ".typed")}
    library = "libfovea.dylib" if sys.platform == "darwin" else "libfovea.so"
    assert inside == {*sources, f"fovea/{library}"}
    assert {"fovea/__init__.py", "fovea/py.typed", "fovea/torch/__init__.py"} <= sources
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.slow
def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    lines = archive.read(name).decode().splitlines()
    assert "Name: fovea-attention" in lines
    assert f"Version: {header_version()}" in lines
    assert "Requires-Python: >=3.9" in lines
    required = [line for line in lines if line.startswith("Requires-Dist:") and "extra" not in line]
    assert [line.split()[1].partition(">")[0] for line in required] == ["numpy"]


@pytest.mark.slow
def test_installed_in_an_environment_of_its_own(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    script = (
        "import sys, numpy as np, fovea\n"
        "from fovea import _library\n"
        "assert sys.prefix in fovea.__file__ and sys.prefix in str(_library.path), (fovea.__file__, _library.path)\n"
        "q = np.random.default_rng(0).standard_normal((1, 5, 2, 8))\n"
        "out, lse = fovea.attention(q, q, q, return_lse=True)\n"
        "s = np.einsum('bqhd,bkhd->bhqk', q, q) / np.sqrt(8)\n"
        "p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)\n"
        "assert np.allclose(out, np.einsum('bhqk,bkhd->bqhd', p, q))\n"
        "assert fovea.attention_backward(out, q, q, q, out, lse).q.shape == q.shape\n"
        "print(fovea.__version__)\n"
    )
    assert run(python, "-c", script, cwd=tmp_path).strip() == header_version()


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_syntax_of_python_3_9(path):
    ast.parse(path.read_text(), feature_version=(3, 9))


def test_pytest_and_the_package_agree_on_the_checkout():
    import fovea

    assert fovea.__version__ == header_version()
    assert os.path.dirname(fovea.__file__) == str(PACKAGE)
