# SPDX-License-Identifier: Apache-2.0
"""The wheel: that it builds from this tree, works with every Python from 3.9, contains what it should and nothing else, and
works where nothing of the checkout is in sight."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from conftest import BUILD, ROOT

PACKAGE = ROOT / "python" / "fovea"
AUTOLOAD = ROOT / "python" / "fovea_autoload"  # what PyTorch calls


def header_version():
    text = (ROOT / "include" / "fovea" / "c.h").read_text()
    return ".".join(re.search(rf"FOVEA_VERSION_{part} (\d+)", text).group(1) for part in ("MAJOR", "MINOR", "PATCH"))


def clean_environment():
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FOVEA_LIBRARY")}


def run(*command, cwd, **environment):
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean_environment() | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def build_folder(tmp_path_factory):
    """pip builds in isolation, with the backend that pyproject.toml names; the objects are kept here for the next
    test, which builds the same library."""
    return f"--config-settings=build-dir={tmp_path_factory.mktemp('build')}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, build_folder):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", build_folder, "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.iterdir()
    return built


class Environment:
    """A virtual environment without pip. It sees the packages of the environment that runs the tests (for NumPy)
    through a .pth file."""

    def __init__(self, folder, **options):
        venv.create(folder, **options)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        self.sees(sysconfig.get_path("purelib"))

    def sees(self, folder):
        with (self.packages / "others.pth").open("a") as file:
            file.write(f"{folder}\n")

    def install(self, *arguments):
        run(sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-deps", *arguments, cwd=self.folder)

    def computes(self, name="fovea", **environment):
        """Forward and backward, compared with NumPy; returns where the package and the library are."""
        script = (
            f"import numpy as np, {name} as fovea\n"
            "q = np.random.default_rng(0).standard_normal((1, 5, 2, 8))\n"
            "out, lse = fovea.attention(q, q, q, return_lse=True)\n"
            "s = np.einsum('bqhd,bkhd->bhqk', q, q) / np.sqrt(8)\n"
            "p = np.exp(s) / np.exp(s).sum(-1, keepdims=True)\n"
            "assert np.allclose(out, np.einsum('bhqk,bkhd->bqhd', p, q))\n"
            "assert fovea.attention_backward(out, q, q, q, out, lse).q.shape == q.shape\n"
            "print(fovea.__version__, fovea.__file__, fovea._library.path, sep='\\n')\n"
        )
        version, package, library = run(self.python, "-c", script, cwd=self.folder, **environment).splitlines()
        assert version == header_version()
        return Path(package).parent, Path(library)


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "venv")


@pytest.mark.slow
def test_name(wheel):
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("fovea_attention", header_version(), "py3", "none")
    assert platform != "any"


@pytest.mark.slow
def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = {name for name in names if ".dist-info/" not in name}
    kinds = (".py", ".typed", ".json")
    sources = {
        str(path.relative_to(PACKAGE.parent)) for folder in (PACKAGE, AUTOLOAD) for path in folder.rglob("*")
        if path.suffix in kinds
    }  # fmt: skip
    library = "libfovea.dylib" if sys.platform == "darwin" else "libfovea.so"
    headers = {f"fovea/{path.relative_to(ROOT)}" for path in (ROOT / "include/fovea").rglob("*.h")}
    assert inside == {*sources, *headers, f"fovea/{library}", "fovea/_fast.abi3.so", "fovea/_xla.so"}
    assert {"fovea/__init__.py", "fovea/py.typed", "fovea/torch/__init__.py", "fovea/torch/fastest.json"} <= sources
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


def what_pytorch_calls(environment):
    """PyTorch loads and calls each entry point of this group. Without FOVEA_TORCH ours imports nothing of fovea."""
    script = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "found = [point for point in entry_points(group='torch.backends') if point.name == 'fovea']\n"
        "found[0].load()()\n"
        "print(len(found), sys.modules['fovea_autoload'].__file__, any(n.split('.')[0] == 'fovea' for n in sys.modules))\n"
    )
    assert "FOVEA_TORCH" not in os.environ
    count, file, imported = run(environment.python, "-c", script, cwd=environment.folder).split()
    assert (count, imported) == ("1", "False")
    return Path(file).parent


@pytest.mark.slow
def test_installed(wheel, environment):
    environment.install(wheel)
    assert what_pytorch_calls(environment) == environment.packages / "fovea_autoload"
    inside = environment.packages / "fovea"
    assert environment.computes() == (inside, inside / "libfovea.so")


@pytest.mark.slow
def test_installed_where_another_environment_sees_it(wheel, environment, tmp_path):
    """By a .pth file; by --system-site-packages, which shows the user's own packages, too."""
    environment.install("--target", tmp_path / "elsewhere", wheel)
    environment.sees(tmp_path / "elsewhere")
    inside = tmp_path / "elsewhere" / "fovea"
    assert environment.computes() == (inside, inside / "libfovea.so")

    user = tmp_path / "user"
    base = Path(getattr(sys, "_base_executable", sys.executable))
    run(base, "-m", "pip", "install", "-q", "--no-deps", "--user", wheel, cwd=tmp_path, PYTHONUSERBASE=str(user))
    (inside,) = user.glob("lib/python*/site-packages/fovea")
    other = Environment(tmp_path / "other", system_site_packages=True)
    assert other.computes(PYTHONUSERBASE=str(user)) == (inside, inside / "libfovea.so")


@pytest.mark.slow
def test_editable(environment, build_folder):
    """The package is the checkout's; the library is the one that pip compiled, in site-packages."""
    environment.install(build_folder, "--editable", ROOT)
    package, library = environment.computes()
    assert package == PACKAGE
    assert what_pytorch_calls(environment) == AUTOLOAD
    assert library == environment.packages / "fovea" / "libfovea.so"


def test_the_library_of_a_checkout(tmp_path, monkeypatch):
    """build/ of the checkout, or what `pip install -e` of this very checkout made: the one that was built last."""
    from fovea import _library

    checkout, packages = tmp_path / "check out", tmp_path / "site-packages"
    information = packages / "fovea_attention-0.0.1.dist-info"
    for folder in (checkout / "python" / "fovea", checkout / "include" / "fovea", checkout / "build", packages / "fovea", information):
        folder.mkdir(parents=True)
    (checkout / "include" / "fovea" / "c.h").touch()
    built, editable = checkout / "build" / "libfovea.so", packages / "fovea" / "libfovea.so"
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fovea-attention\nVersion: 0.0.1\n")
    monkeypatch.setattr(_library, "__file__", str(checkout / "python" / "fovea" / "_library.py"))
    monkeypatch.setattr(sys, "path", [str(packages)])
    monkeypatch.delenv("FOVEA_LIBRARY", raising=False)

    def installed_from(folder, **how):
        (information / "direct_url.json").write_text(json.dumps({"url": folder.as_uri(), "dir_info": how}))

    installed_from(checkout, editable=True)
    with pytest.raises(ImportError, match="run `make build` or `pip install -e .`"):
        _library._find()
    editable.touch()
    assert _library._find() == editable
    built.touch()
    os.utime(editable, (1, 1))
    assert _library._find() == built
    os.utime(built, (0, 0))
    assert _library._find() == editable
    installed_from(tmp_path, editable=True)  # another checkout's
    assert _library._find() == built
    installed_from(checkout)  # a copy, not this package
    assert _library._find() == built
    beside = checkout / "python" / "fovea" / "libfovea.so"
    beside.touch()
    assert _library._find() == beside


def test_the_package_under_another_name(environment, tmp_path):
    """As a copy inside of another project, where no fovea is installed."""
    shutil.copytree(PACKAGE, tmp_path / "vendored" / "attention_of_theirs", ignore=shutil.ignore_patterns("__pycache__"))
    environment.sees(tmp_path / "vendored")
    package, _ = environment.computes("attention_of_theirs", FOVEA_LIBRARY=str(BUILD / "libfovea.so"))
    assert package == tmp_path / "vendored" / "attention_of_theirs"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_of_the_package_are_relative(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            names.append(node.module)
        assert not [name for name in names if name.split(".")[0] == "fovea"], f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_syntax_of_python_3_9(path):
    ast.parse(path.read_text(), feature_version=(3, 9))


def test_pytest_and_the_package_agree_on_the_checkout():
    import fovea

    assert fovea.__version__ == header_version()
    assert os.path.dirname(fovea.__file__) == str(PACKAGE)
