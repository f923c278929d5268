# SPDX-License-Identifier: Apache-2.0
"""python/fovea/_abi.py against a C program compiled from include/fovea/c.h: sizes, offsets, constants, functions."""

import ctypes
import re
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT
from fovea import _abi, _library

HEADER = ROOT / "include" / "fovea" / "c.h"
TENSOR_FIELDS = ("size", "data", "dtype", "rank", "flags", "reserved", "shape", "stride")
PROBLEM_FIELDS = tuple(field for field, *_ in _abi.Problem._fields_)
ROWS_FIELDS = tuple(field for field, *_ in _abi.Rows._fields_)
STRUCTS = {"fovea_tensor": TENSOR_FIELDS, "fovea_problem": PROBLEM_FIELDS, "fovea_rows": ROWS_FIELDS}
# Constants of c.h by the names that _abi.py gives them.
CONSTANTS = {
    **{f"FOVEA_{name}": name for name in (
        "OK", "INVALID_ARGUMENT", "INVALID_TYPE", "UNSUPPORTED", "OUT_OF_MEMORY", "DEVICE_ERROR", "INTERNAL_ERROR",
        "FP32", "FP16", "BF16", "FP64", "BOOL", "INT32", "INT64", "FORWARD", "BACKWARD", "BOTTOM_RIGHT", "TOP_LEFT",
        "RNG_FOVEA", "RNG_TORCH_MEM_EFFICIENT", "MAX_RANK", "TENSOR_STRIDED", "CAUSAL", "DETERMINISTIC", "SCALE",
        "WINDOW", "CLEAR_ROWS", "POSITIONS", "ACCUMULATE_OUT", "VERSION_MAJOR", "VERSION_MINOR", "ROWS_ZIGZAG",
        "ROWS_CONTIGUOUS", "ROWS_PACKED")},
}  # fmt: skip


GRADS = {f"FOVEA_ACCUMULATE_GRAD_{name.upper()}": bit for name, bit in _abi.ACCUMULATE_GRADS.items()}


@pytest.fixture(scope="module")
def c_says(tmp_path_factory):
    """What a C compiler makes of the header: {"fovea_tensor.shape": (offset, size), "FOVEA_FP32": value, ...}."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "this test needs a C compiler: cc, gcc or clang"
    lines = []
    for name, fields in STRUCTS.items():
        lines.append(f'printf("{name} 0 %zu\\n", sizeof({name}));')
        for field in fields:
            lines.append(
                f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name}*)0)->{field}));'
            )
    for constant in (*CONSTANTS, *GRADS):
        lines.append(f'printf("{constant} 0 %lld\\n", (long long){constant});')
    folder = tmp_path_factory.mktemp("abi")
    source, program = folder / "abi.c", folder / "abi"
    source.write_text(
        "#include <stdio.h>\n#include <fovea/c.h>\nint main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    subprocess.run(
        [
            compiler,
            "-std=c99",
            "-pedantic",
            "-Wall",
            "-Wextra",
            "-Werror",
            f"-I{ROOT / 'include'}",
            source,
            "-o",
            program,
        ],
        check=True,
    )
    output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: (int(first), int(second)) for name, first, second in map(str.split, output.splitlines())}


@pytest.mark.parametrize("struct", ["Problem", "Rows"])
def test_structs_with_fields(c_says, struct):
    kind, name = getattr(_abi, struct), f"fovea_{struct.lower()}"
    assert ctypes.sizeof(kind) == c_says[name][1]
    for field in STRUCTS[name]:
        descriptor = getattr(kind, field)
        assert (descriptor.offset, descriptor.size) == c_says[f"{name}.{field}"], field


def test_tensor(c_says):
    assert _abi.TENSOR.size == c_says["fovea_tensor"][1]
    values = iter(range(1, 100))
    packed = _abi.TENSOR.pack(*range(1, 7 + 2 * _abi.MAX_RANK))
    for field in TENSOR_FIELDS:
        offset, size = c_says[f"fovea_tensor.{field}"]
        count = _abi.MAX_RANK if field in ("shape", "stride") else 1
        for _ in range(count):
            number = packed[offset : offset + size // count]
            assert int.from_bytes(number, sys.byteorder) == next(values), field
            offset += size // count


@pytest.mark.parametrize("name", STRUCTS)
def test_no_field_is_missing(name):
    body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", HEADER.read_text(), re.S).group(1)
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    fields = re.findall(r"(\w+)(?:\[\w+\])?;", body)
    assert tuple(fields) == STRUCTS[name]


def test_constants(c_says):
    for c_name, name in CONSTANTS.items():
        assert getattr(_abi, name) == c_says[c_name][1], name
    for c_name, bit in GRADS.items():
        assert bit == c_says[c_name][1], c_name


def test_every_function_is_declared():
    declared = set(re.findall(r"FOVEA_API [\w ]+\*?\s?(fovea_\w+)\(", HEADER.read_text()))
    assert declared == set(_abi.FUNCTIONS)
    for name in declared:
        assert getattr(_library.lib, name).argtypes == _abi.FUNCTIONS[name][1]


def test_version():
    parts = [
        re.search(rf"FOVEA_VERSION_{part} (\d+)", HEADER.read_text()).group(1) for part in ("MAJOR", "MINOR", "PATCH")
    ]
    assert _library.version() == ".".join(parts)


def test_an_older_library_is_loaded_for_comparisons_alone(tmp_path):
    """bench/gpu/run.py --beside measures builds of before, which lack functions of today."""
    source, path = tmp_path / "older.c", tmp_path / "older.so"
    source.write_text("int fovea_version(void) { return 100; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(ImportError, match="cannot be used"):
        _library._load(path)
    older = _library._load(path, older=True)
    assert older.fovea_version() == 100
    assert not hasattr(older, "fovea_explain")


@pytest.mark.parametrize("number, version", [(200, "0.2"), (0, "0.0"), (10100, "1.1")])
def test_a_library_of_another_minor_version_is_refused(tmp_path, number, version):
    """Before 1.0 a minor version may change the API."""
    source, path = tmp_path / "other.c", tmp_path / "other.so"
    functions = "\n".join(f"int {name}(void) {{ return {number}; }}" for name in _abi.FUNCTIONS)
    source.write_text(functions + "\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    with pytest.raises(ImportError, match=f"is of version {version}, and this package is for {_abi.VERSION_MAJOR}.{_abi.VERSION_MINOR}: install both together"):
        _library._load(path)
    assert _library._load(path, older=True).fovea_version() == number
