# SPDX-License-Identifier: Apache-2.0
"""What docs/cpp.md and the README say about C++: the program and the pieces that go on from it compile and run, and
their CMake finds an installed copy of the library."""

import re
import shutil
import subprocess

import pytest

from conftest import BUILD, ROOT

TEXT = (ROOT / "docs/cpp.md").read_text()
README = (ROOT / "README.md").read_text()


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def run(*command, cwd=None):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def test_the_program_and_the_pieces_that_go_on_from_it(tmp_path):
    program, *pieces = blocks(TEXT, "cpp")
    assert len(pieces) >= 5
    head, end = program.split("} catch", 1)
    source = tmp_path / "main.cpp"
    source.write_text(head + "".join(pieces) + "} catch" + end)
    run("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", source, f"-L{BUILD}", "-lfovea",
        f"-Wl,-rpath,{BUILD}", "-o", tmp_path / "main")
    output = run(tmp_path / "main")
    first, line, *explained = output.splitlines()
    numbers = re.fullmatch(r"out (\S+), d bias (\S+)", first).groups()
    assert all(float(number) != 0 for number in numbers)
    assert line == "fwd b=2 hq=4 sq=128 sk=128 d=64 fp32 causal bias=1,h,q,k lse"
    assert any(entry.startswith("cpu: used") for entry in explained)


def test_the_error_that_is_shown_is_the_one_that_is_thrown(tmp_path):
    program, = (block for block in blocks(TEXT, "cpp") if "int main" in block)
    wrong = program.replace("statistics = {2, 4, 128};", "statistics = {2, 128, 4};")
    assert wrong != program
    (tmp_path / "main.cpp").write_text(wrong)
    run("g++", "-std=c++17", f"-I{ROOT}/include", tmp_path / "main.cpp", f"-L{BUILD}", "-lfovea", f"-Wl,-rpath,{BUILD}", "-o",
        tmp_path / "main")
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
    shown, = re.findall(r"^  // (invalid argument: .*)$", TEXT, re.M)
    assert done.returncode == 1 and done.stderr == shown + "\n"


def test_the_program_of_several_ranks(tmp_path):
    program, = (block for block in blocks(TEXT, r"c\+\+") if "fovea/parallel.h" in block)
    (tmp_path / "main.cpp").write_text(program)
    run("g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/include", tmp_path / "main.cpp", f"-L{BUILD}", "-lfovea",
        f"-Wl,-rpath,{BUILD}", "-o", tmp_path / "main")
    assert run(tmp_path / "main").startswith("out 0.1, d v 29.9")


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_links_lead_somewhere(link):
    assert (ROOT / "docs" / link).exists()


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """An installed copy, as `cmake --install` makes it."""
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", folder)
    return folder


@pytest.mark.parametrize("text", [TEXT, README], ids=["cpp.md", "README.md"])
def test_cmake_finds_an_installed_copy(text, prefix, tmp_path):
    cmake = blocks(text, "cmake")[0]
    assert "find_package(fovea" in cmake and "fovea::fovea" in cmake
    if "project(" not in cmake:  # lines for a project that is there
        cmake = ("cmake_minimum_required(VERSION 3.16)\nproject(mine LANGUAGES CXX)\nadd_executable(my_program main.cpp)\n"
                 + cmake)
    (tmp_path / "CMakeLists.txt").write_text(cmake)
    (tmp_path / "main.cpp").write_text(blocks(text, "cpp")[0])
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "build")
    run(tmp_path / "build/my_program")


def test_pkg_config_finds_an_installed_copy(prefix, tmp_path):
    """By the line of cpp.md, from where the copy was moved to."""
    moved = tmp_path / "moved"
    shutil.copytree(prefix, moved, symlinks=True)
    folder, = moved.glob("**/pkgconfig")
    line, = re.findall(r"^g\+\+ main.cpp .*pkg-config.*$", TEXT, re.M)
    (tmp_path / "main.cpp").write_text(blocks(TEXT, "cpp")[0])
    run("bash", "-c", f"export PKG_CONFIG_PATH={folder} LD_LIBRARY_PATH={folder.parent}\n{line} && ./a.out", cwd=tmp_path)


def test_ways_to_build_it_as_a_part_are_those_that_are_tested():
    """tools/test.py installed builds examples/embedded in both ways."""
    example = (ROOT / "examples/embedded/CMakeLists.txt").read_text()
    _, part, fetched = blocks(TEXT, "cmake")
    for block in (part, fetched):
        for line in block.splitlines():
            command = re.match(r"\w+\((?:fovea\b|FetchContent\b)?", line)[0]
            assert command in example, line
