# SPDX-License-Identifier: Apache-2.0
"""tools/wheels.py and tools/release.py as far as nothing has to be compiled: the links of the long description, how a
wheel is packed, and which trees cannot be released. The stage `wheel` of tools/test.py builds and tries wheels."""

import subprocess
import sys
import zipfile

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import release
import wheels

TEXT = """
![a picture](docs/images/a.svg) See [the page](docs/torch.md#graphs), [outside](https://example.org/x) and [here](#how).
"""


def test_links_of_the_long_description():
    base = "https://example.org/us/fovea/{}/v1.2.3"
    assert wheels.with_absolute_links(TEXT, base) == (
        "\n![a picture](https://example.org/us/fovea/raw/v1.2.3/docs/images/a.svg) "
        "See [the page](https://example.org/us/fovea/blob/v1.2.3/docs/torch.md#graphs), "
        "[outside](https://example.org/x) and [here](#how).\n"
    )
    assert wheels.with_absolute_links(TEXT, "") == (
        "\n See the page, [outside](https://example.org/x) and [here](#how).\n"
    )


@pytest.mark.parametrize("repository", ["", "https://example.org/us/fovea"])
def test_the_long_description_has_no_relative_link(repository):
    text = wheels.with_absolute_links((ROOT / "README.md").read_text(), repository and f"{repository}/{{}}/v1")
    relative = [part for part in text.split("](")[1:] if not part.startswith(("https://", "http://", "#"))]
    assert not relative


def a_wheel(folder, order):
    folder.mkdir()
    path = folder / "fovea_attention-1.0.0-py3-none-linux_x86_64.whl"
    content = {
        "fovea/bin/fovea": "program", "fovea/__init__.py": "text", "fovea_attention-1.0.0.dist-info/RECORD": "old",
        "fovea_attention-1.0.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-linux_x86_64\n",
    }  # fmt: skip
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(content, reverse=order):
            about = zipfile.ZipInfo(name, (2020 + order, 1, 1, 0, 0, 0))
            about.external_attr = (0o100755 if name.endswith("bin/fovea") else 0o100644) << 16
            archive.writestr(about, content[name])
    return path


def test_packing(tmp_path, monkeypatch):
    """The same bits from the same files, whatever their order and time; the platform is in name and metadata."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    packed = []
    for order in (False, True):
        (tmp_path / f"out{order}").mkdir()
        wheel = a_wheel(tmp_path / f"in{order}", order)
        kernels = tmp_path / f"kernels{order}"
        kernels.mkdir()
        for name in sorted(("a.kernel", "b.kernel"), reverse=order):
            (kernels / name).write_text(name)
        packed.append(wheels.pack(wheel, kernels, "manylinux_2_28_x86_64", tmp_path / f"out{order}"))
    first, second = packed
    assert first.name == "fovea_attention-1.0.0-py3-none-manylinux_2_28_x86_64.whl"
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert archive.namelist()[-1].endswith("RECORD")
        assert archive.read("fovea/libfovea.kernels/b.kernel") == b"b.kernel"
        about = archive.read("fovea_attention-1.0.0.dist-info/WHEEL").decode()
        assert about == "Wheel-Version: 1.0\nTag: py3-none-manylinux_2_28_x86_64\n"
        assert archive.getinfo("fovea/bin/fovea").external_attr >> 16 == 0o100755
        assert archive.getinfo("fovea/__init__.py").external_attr >> 16 == 0o100644
        record = archive.read("fovea_attention-1.0.0.dist-info/RECORD").decode()
        assert "fovea/__init__.py,sha256=mC2ePrmW9VnmM_TRlN7zdh2Qn1o7ZH0ahR_q1nwyydE,4\n" in record
        assert record.endswith("RECORD,,\n")


@pytest.fixture
def repository(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## 1.2.3 (2026-01-31)\n\n- all\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "one")
    return tmp_path, git


def test_a_tree_that_can_be_released(repository):
    tree, git = repository
    assert not list(release.faults(tree, "1.2.3"))
    git("tag", "v1.2.3")
    assert not list(release.faults(tree, "1.2.3"))


def test_trees_that_cannot(repository):
    tree, git = repository
    (fault,) = release.faults(tree, "1.2.4")
    assert fault.startswith("CHANGELOG.md has no section '## 1.2.4 (YYYY-MM-DD)'")
    git("tag", "v1.2.3")
    (tree / "more").write_text("more")
    (fault,) = release.faults(tree, "1.2.3")
    assert fault.endswith("?? more")
    git("add", "-A")
    git("commit", "-q", "-m", "two")
    (fault,) = release.faults(tree, "1.2.3")
    assert fault.startswith("the tag v1.2.3 is on another commit")
    git("rm", "-q", "CHANGELOG.md")
    git("commit", "-q", "-m", "three")
    assert "there is no CHANGELOG.md" in list(release.faults(tree, "1.2.3"))
