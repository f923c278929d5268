# SPDX-License-Identifier: Apache-2.0
"""Our declarations of XLA's FFI are those of the header that jaxlib brings; what the handlers answer; docs and types."""

import ctypes
import doctest
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import fovea
import fovea.jax
from conftest import ROOT
from fovea._library import lib, text
from fovea.jax import _call, _options
from typing_check import assert_typed

# Ours, theirs, and fields of both, in pairs. The last fields of theirs may be newer than ours.
STRUCTS = [
    ("XlaExtension", "XLA_FFI_Extension_Base", "struct_size type next"),
    ("XlaVersion", "XLA_FFI_Api_Version", "struct_size extension=extension_start major=major_version minor=minor_version"),
    ("XlaMetadata", "XLA_FFI_Metadata", "struct_size version=api_version traits"),
    ("XlaMetadataExtension", "XLA_FFI_Metadata_Extension", "base=extension_base metadata"),
    ("XlaErrorArgs", "XLA_FFI_Error_Create_Args", "struct_size extension=extension_start message code=errc"),
    ("XlaStreamArgs", "XLA_FFI_Stream_Get_Args", "struct_size extension=extension_start context=ctx stream"),
    ("XlaOrdinalArgs", "XLA_FFI_DeviceOrdinal_Get_Args", "struct_size extension=extension_start context=ctx ordinal=device_ordinal"),
    ("XlaApi", "XLA_FFI_Api", "struct_size extension=extension_start version=api_version internal=internal_api "
     "error_create=XLA_FFI_Error_Create stream_get=XLA_FFI_Stream_Get device_ordinal_get=XLA_FFI_DeviceOrdinal_Get"),
    ("XlaBuffer", "XLA_FFI_Buffer", "struct_size extension=extension_start dtype data rank dims"),
    ("XlaBuffers", "XLA_FFI_Args", "struct_size extension=extension_start size types items=args"),
    ("XlaBuffers", "XLA_FFI_Rets", "struct_size extension=extension_start size types items=rets"),
    ("XlaSpan", "XLA_FFI_ByteSpan", "data=ptr size=len"),
    ("XlaArray", "XLA_FFI_Array", "dtype size data"),
    ("XlaAttributes", "XLA_FFI_Attrs", "struct_size extension=extension_start size types names values=attrs"),
    ("XlaCallFrame", "XLA_FFI_CallFrame", "struct_size extension=extension_start api context=ctx stage arguments=args results=rets "
     "attributes=attrs"),
]  # fmt: skip
VALUES = [
    ("kXlaPred", "XLA_FFI_DataType_PRED"), ("kXlaS32", "XLA_FFI_DataType_S32"), ("kXlaS64", "XLA_FFI_DataType_S64"),
    ("kXlaF16", "XLA_FFI_DataType_F16"), ("kXlaF32", "XLA_FFI_DataType_F32"), ("kXlaF64", "XLA_FFI_DataType_F64"),
    ("kXlaBf16", "XLA_FFI_DataType_BF16"), ("kXlaInvalidArgument", "XLA_FFI_Error_Code_INVALID_ARGUMENT"),
    ("kXlaResourceExhausted", "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED"), ("kXlaUnimplemented", "XLA_FFI_Error_Code_UNIMPLEMENTED"),
    ("kXlaInternal", "XLA_FFI_Error_Code_INTERNAL"), ("kXlaMetadataExtension", "XLA_FFI_Extension_Metadata"),
    ("kXlaCommandBufferCompatible", "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE"), ("kXlaMajor", "XLA_FFI_API_MAJOR"),
    ("1", "XLA_FFI_ArgType_BUFFER"), ("1", "XLA_FFI_AttrType_ARRAY"), ("4", "XLA_FFI_AttrType_STRING"),
]  # fmt: skip


def compiles(tmp_path, structs, values):
    lines = ['#include "python/xla_ffi.h"', '#include "xla/ffi/api/c_api.h"']
    for ours, theirs, fields in structs:
        for pair in fields.split():
            mine, _, yours = pair.partition("=")
            yours = yours or mine
            lines.append(f'_Static_assert(offsetof({ours}, {mine}) == offsetof({theirs}, {yours}), "{ours}.{mine}");')
            lines.append(f'_Static_assert(sizeof((({ours}*)0)->{mine}) == sizeof((({theirs}*)0)->{yours}), "{ours}.{mine} size");')
        lines.append(f'_Static_assert(sizeof({ours}) <= sizeof({theirs}), "{ours}");')
    lines += [f'_Static_assert((int){ours} == (int){theirs}, "{ours}");' for ours, theirs in values]
    source = tmp_path / "layout.c"
    source.write_text("\n".join(lines) + "\n")
    command = ["cc", "-std=c11", "-fsyntax-only", "-I", ROOT / "src", "-I", jax.ffi.include_dir(), source]
    return subprocess.run(command, capture_output=True, text=True)


def test_declarations_have_the_layout_of_jaxlib(tmp_path):
    done = compiles(tmp_path, STRUCTS, VALUES)
    assert done.returncode == 0, done.stderr


def test_another_layout_is_found(tmp_path):
    """The check itself."""
    done = compiles(tmp_path, [("XlaBuffer", "XLA_FFI_Buffer", "data=rank")], [("kXlaF16", "XLA_FFI_DataType_BF16")])
    assert '"XlaBuffer.data"' in done.stderr and '"kXlaF16"' in done.stderr


def test_handlers_answer_with_a_version_that_xla_knows():
    """XLA reads it at registration: the older of its own and of ours."""
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int32

    class Extension(ctypes.Structure):
        _fields_ = [("size", size), ("type", number), ("next", pointer), ("metadata", pointer)]

    class Metadata(ctypes.Structure):
        _fields_ = [("size", size), ("version_size", size), ("extension", pointer), ("major", number), ("minor", number),
                    ("traits", ctypes.c_uint32)]  # fmt: skip

    class Api(ctypes.Structure):
        _fields_ = [("size", size), ("extension", pointer), ("version_size", size), ("more", pointer), ("major", number),
                    ("minor", number)]  # fmt: skip

    class Frame(ctypes.Structure):
        _fields_ = [("size", size), ("extension", pointer), ("api", pointer), ("context", pointer), ("rest", pointer * 20)]

    handlers = ctypes.CDLL(str(fovea._library.path.resolve().parent / "_xla.so"))
    for api, minor in ((None, 1), (1, 1), (2, 2), (3, 3), (9, 3)):
        metadata = Metadata()
        extension = Extension(32, 1, None, ctypes.addressof(metadata))
        spoken = Api(48, None, 24, None, 0, api or 0)
        frame = Frame(96, ctypes.addressof(extension), None if api is None else ctypes.addressof(spoken))
        handlers.fovea_xla_forward_cuda.restype = pointer
        assert handlers.fovea_xla_forward_cuda(ctypes.byref(frame)) is None
        assert (metadata.major, metadata.minor, metadata.traits) == (0, minor, 1)


def test_lengths_on_a_gpu_are_planned_as_they_are_computed():
    """A plan made while JAX lowers, when lengths have no values yet, clears the rows that no sequence has. The fake driver of
    tests/cpp counts launches."""
    fake = Path(os.environ.get("FOVEA_BUILD", ROOT / "build")).resolve() / "tests/cpp/fake"
    assert (fake / "libcuda.so.1").exists(), "cmake --build build --target fovea_fake_cuda fovea_fake_nvrtc"
    environment = {"LD_LIBRARY_PATH": str(fake), "FOVEA_NVRTC": str(fake / "libnvrtc.so.13"), "FOVEA_CACHE_DIR": "none"}
    program = [sys.executable, str(ROOT / "tests/jax/launches.py")]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    plain, lowered, without_address = map(int, done.stdout.split())
    assert plain == lowered == without_address >= 2


def test_order_of_integers():
    """The attribute `integers` is written in Python and read in C."""
    names = re.search(r"typedef enum Integer \{(.*?)kIntegers", (ROOT / "src/python/xla.c").read_text(), re.DOTALL).group(1)
    call = _call.Call(0, ("q", "k", "v", "seed"), ("out",), True, 3, 4, "top_left", None, 0.0, 0.5, 11, 12, 13, True, False, None)
    written = call.attributes()["integers"].tolist()
    found = dict(zip(re.findall(r"k\w+", names), written))
    assert len(found) == len(written) and found == {
        "kGiven": 7, "kResults": 1 << 12, "kSeed": 1, "kFlags": 1 | 8, "kAlign": 1, "kLeft": 3, "kRight": 4, "kMaxQ": 11,
        "kMaxK": 12, "kOuter": 13, "kHeadsFirst": 1}  # fmt: skip


def test_streams_are_numbers_of_64_bits():
    """JAX has words of 32 bits for them."""
    call = _call.Call(0, ("q", "k", "v", "seed"), ("out",), False, -1, -1, None, None, 0.0, 0.5, 0, 0, 0, False, False, None).with_streams()
    rows = ((2, 7, 4, 8), "float32")
    problem = _call.Problem(call, {"q": rows, "k": rows, "v": rows, "dropout_streams": ((2, 4, 2), "uint32")})
    assert "streams=b,h" in text(lib.fovea_describe, ctypes.byref(problem.raw), call.direction)


def test_mypy(tmp_path):
    keywords = {name for name, x in inspect.signature(fovea.jax.attention).parameters.items() if x.kind is x.KEYWORD_ONLY}
    assert set(_options.Options.__annotations__) == keywords - {"return_lse"}
    assert_typed(tmp_path / "mypy", *sorted((ROOT / "python/fovea/jax").glob("*.py")), ROOT / "tests/jax/typed_user.py")


def test_docs():
    result = doctest.testfile(str(ROOT / "docs/jax.md"), module_relative=False)
    assert result.failed == 0 and result.attempted > 12


@pytest.mark.parametrize("name", fovea.jax.__all__)
def test_docstrings(name):
    function = getattr(fovea.jax, name)
    result = doctest.run_docstring_examples(function, {}) or doctest.DocTestRunner().summarize()
    assert result.failed == 0
    section = re.search(r"^Args:\n(.*?)\n\n", inspect.getdoc(function), re.DOTALL | re.MULTILINE).group(1)
    assert re.findall(r"^    \*{0,2}(\w+): ", section, re.MULTILINE) == list(inspect.signature(function).parameters)


def test_signature_is_that_of_jax():
    ours, theirs = (inspect.signature(f).parameters for f in (fovea.jax.dot_product_attention, jax.nn.dot_product_attention))
    known = {name: (x.kind, x.default) for name, x in ours.items()}
    for name, x in theirs.items():
        assert known[name] == (x.kind, x.default)
