# SPDX-License-Identifier: Apache-2.0
"""The command `fovea`: every subcommand against the oracle, and everything that it has to refuse, by name."""

import json
import os
import random
import re
import shlex
import struct
import subprocess
import sys

import numpy as np
import pytest

from conftest import BUILD, ROOT
from test_nvrtc_math import nvrtc

sys.path.insert(0, str(ROOT / "tests"))
import oracle  # noqa: E402

FOVEA = BUILD / "cli" / "fovea"
DONE, CHECK_FAILED, BAD_INPUT, UNSUPPORTED, FAILED = range(5)


def fovea(*arguments, cwd=None, env=None):
    return subprocess.run([str(FOVEA), *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=300,
                          env={**os.environ, **(env or {})})


def refused(*arguments, code=BAD_INPUT, says=(), cwd=None, env=None):
    """The command says no, with this exit code, all of these words, and nothing on standard output."""
    done = fovea(*arguments, cwd=cwd, env=env)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    for word in [says] if isinstance(says, str) else says:
        assert word in done.stderr, (word, done.stderr)
    assert "terminate called" not in done.stderr
    assert done.stdout == ""
    return done


def succeeds(*arguments, cwd=None, env=None):
    done = fovea(*arguments, cwd=cwd, env=env)
    assert done.returncode == DONE, (done.returncode, done.stdout, done.stderr)
    return done.stdout


# ---- a .safetensors writer and reader of the test's own ----

DTYPES = {"float32": "F32", "float16": "F16", "float64": "F64", "bool": "BOOL", "int32": "I32", "int64": "I64",
          "bfloat16": "BF16"}


def to_bf16(array):
    """The bits of bf16, rounded to nearest even; numpy has no such type of its own."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors(tensors, bf16=()):
    header, data = {}, b""
    for name, array in tensors.items():
        kind = str(array.dtype)
        if name in bf16:
            array, kind = to_bf16(array), "bfloat16"
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": DTYPES[kind], "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return pack(header, data)


def load(path):
    raw = path.read_bytes()
    size, = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + size])
    assert (8 + size) % 8 == 0
    tensors = {}
    kinds = {value: key for key, value in DTYPES.items()}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        kind = kinds[entry["dtype"]]
        flat = np.frombuffer(raw[8 + size + begin:8 + size + end], np.uint16 if kind == "bfloat16" else kind)
        tensors[name] = (from_bf16(flat) if kind == "bfloat16" else flat).reshape(entry["shape"])
    return tensors


RNG = np.random.default_rng(0)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def qkv(b=2, sq=5, sk=7, hq=4, hk=2, d=8, dv=6, dtype=np.float32):
    return {"q": normal(b, sq, hq, d, dtype=dtype), "k": normal(b, sk, hk, d, dtype=dtype), "v": normal(b, sk, hk, dv, dtype=dtype)}


def near(actual, expected, tolerance=2e-5):
    assert actual.shape == expected.shape
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=tolerance, atol=tolerance)


# ---- run ----


@pytest.fixture
def here(tmp_path):
    return tmp_path


def put(folder, name, tensors, **options):
    path = folder / name
    path.write_bytes(safetensors(tensors, **options))
    return path


OPTIONS = [
    ("", {}),
    ("causal", {"causal": True}),
    ("causal=tl softcap=3 scale=0.3", {"causal": True, "align": "top_left", "softcap": 3.0, "scale": 0.3}),
    ("window=2,1", {"window": (2, 1)}),
    ("dropout=0.25 seed=7 offset=3", {"dropout_p": 0.25, "seed": 7, "offset": 3}),
    ("dropout=0.25 seed=7 rng=torch_mem_efficient", {"dropout_p": 0.25, "seed": 7, "rng": "torch_mem_efficient"}),
    ("b=2 hq=4 hk=2 sq=5 sk=7 d=8 dv=6 fp32 causal", {"causal": True}),
]


@pytest.mark.parametrize("line, options", OPTIONS)
def test_run_forward(here, line, options):
    tensors = qkv()
    put(here, "in.safetensors", tensors)
    text = succeeds("run", "in.safetensors", "-o", "out.safetensors", "-p", line, cwd=here)
    got = load(here / "out.safetensors")
    out, lse = oracle.forward(**tensors, **options)
    assert set(got) == {"out", "lse"}
    near(got["out"], out)
    near(got["lse"], lse)
    assert "fwd b=2 hq=4 hk=2 sq=5 sk=7 d=8 dv=6 fp32" in text
    assert re.search(r"^forward: (\d+ us|\d+\.\d+ ms)$", text, re.M)
    # What a default decides is said where it matters: lengths that differ, dropout.
    needs_alignment = any(word in ("causal", "window=2,1") for word in line.split())
    assert ("note: bottom-right: the last query meets the last key; with align=tl" in text) == needs_alignment
    assert ("dropout: seed=7 offset=" in text) == ("dropout" in line)


def test_run_says_which_dropout_was_drawn(here):
    put(here, "in.safetensors", qkv())
    text = succeeds("run", "in.safetensors", "-o", "out.safetensors", "-p", "dropout=0.1", cwd=here)
    assert "dropout: seed=0 offset=0; another seed draws another mask" in text


def test_run_says_where_causal_starts_only_where_lengths_differ(here):
    put(here, "in.safetensors", qkv(sk=5))
    assert "note:" not in succeeds("run", "in.safetensors", "-o", "out.safetensors", "-p", "causal", cwd=here)
    put(here, "in.safetensors", qkv())
    for line in ("causal align=br", "causal align=tl", "softcap=2"):
        assert "note:" not in succeeds("run", "in.safetensors", "-o", "out.safetensors", "--force", "-p", line, cwd=here)


def test_run_says_how_fast_where_that_is_arithmetic(here):
    put(here, "in.safetensors", qkv(sq=200, sk=200, hq=8, hk=8, d=32, dv=32))
    text = succeeds("run", "in.safetensors", "-o", "out.safetensors", cwd=here)
    rate = re.search(r"^forward: [\d.]+ (?:us|ms), ([\d.]+) GFLOP/s of allowed pairs$", text, re.M)
    assert rate and float(rate.group(1)) > 0


def test_run_backward_with_everything(here):
    tensors = qkv()
    planes = {"bias": normal(1, 4, 5, 7), "bias2": normal(2, 1, 1, 7), "sink": normal(4), "alibi_slopes": abs(normal(4)),
              "mask": RNG.random((2, 1, 5, 7)) < 0.7}
    grads = {"grad_out": normal(2, 5, 4, 6), "grad_lse": normal(2, 4, 5)}
    put(here, "in.safetensors", {**tensors, **planes, **grads})
    succeeds("run", "in.safetensors", "-o", "out.safetensors", "--backward", "-p", "causal softcap=5", cwd=here)
    got = load(here / "out.safetensors")
    options = dict(planes, causal=True, softcap=5.0)
    out, lse = oracle.forward(**tensors, **options)
    expected = oracle.backward(grads["grad_out"], **tensors, out=out, lse=lse, grad_lse=grads["grad_lse"], **options)
    near(got["out"], out)
    assert set(got) == {"out", "lse"} | {f"grad_{name}" for name in ("q", "k", "v", "bias", "bias2", "sink")}
    for name in ("q", "k", "v", "bias", "bias2", "sink"):
        near(got[f"grad_{name}"], expected[name], 1e-4)


def test_run_only_the_gradients_that_are_needed(here):
    tensors = {**qkv(), "bias": normal(4, 1, 7), "grad_out": normal(2, 5, 4, 6)}
    put(here, "in.safetensors", tensors)
    succeeds("run", "in.safetensors", "-o", "out.safetensors", "--backward", "-p", "need=k,bias", cwd=here)
    got = load(here / "out.safetensors")
    assert set(got) == {"out", "lse", "grad_k", "grad_bias"}
    assert got["grad_bias"].shape == (4, 1, 7)


def test_run_packed(here):
    cu_q, cu_k = np.array([0, 3, 3, 8], np.int32), np.array([0, 4, 6, 13], np.int64)
    tensors = {"q": normal(8, 2, 4), "k": normal(13, 2, 4), "v": normal(13, 2, 4), "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    put(here, "in.safetensors", {**tensors, "seqused_k": np.array([4, 1, 5], np.int32)})
    succeeds("run", "in.safetensors", "-o", "out.safetensors", "-p", "causal", cwd=here)
    got = load(here / "out.safetensors")
    out, lse = oracle.forward(**tensors, seqused_k=[4, 1, 5], causal=True)
    near(got["out"], out)
    near(got["lse"], lse)


def test_run_packed_with_two_levels(here):
    cu = np.array([0, 3, 3, 8, 10], np.int32)
    tensors = {"q": normal(10, 2, 4), "k": normal(10, 2, 4), "v": normal(10, 2, 4), "cu_seqlens_q": cu, "cu_seqlens_k": cu,
               "bias": normal(1, 2, 2, 5, 5)}
    put(here, "in.safetensors", tensors)
    succeeds("run", "in.safetensors", "-o", "out.safetensors", "-p", "b=2x2", cwd=here)
    out, _ = oracle.forward(**tensors, batch_shape=(2, 2))
    near(load(here / "out.safetensors")["out"], out)


def test_run_layout_bhsd(here):
    tensors = {**qkv(), "grad_out": normal(2, 5, 4, 6)}
    swapped = {name: array.transpose(0, 2, 1, 3) for name, array in tensors.items()}
    put(here, "in.safetensors", swapped)
    succeeds("run", "in.safetensors", "-o", "out.safetensors", "--backward", "-p", "layout=bhsd", cwd=here)
    got = load(here / "out.safetensors")
    grad_out = tensors.pop("grad_out")
    out, lse = oracle.forward(**tensors)
    expected = oracle.backward(grad_out, **tensors, out=out, lse=lse)
    near(got["out"], out.transpose(0, 2, 1, 3))
    near(got["lse"], lse)
    near(got["grad_k"], expected["k"].transpose(0, 2, 1, 3), 1e-4)


@pytest.mark.parametrize("dtype, tolerance", [(np.float16, 5e-3), (np.float64, 1e-12)])
def test_run_types(here, dtype, tolerance):
    tensors = qkv(dtype=dtype)
    put(here, "in.safetensors", tensors)
    succeeds("run", "in.safetensors", "-o", "out.safetensors", cwd=here)
    got = load(here / "out.safetensors")
    assert got["out"].dtype == dtype and got["lse"].dtype == (np.float64 if dtype == np.float64 else np.float32)
    near(got["out"], oracle.forward(**tensors)[0], tolerance)


def test_run_bf16(here):
    tensors = qkv()
    put(here, "in.safetensors", tensors, bf16="qkv")
    text = succeeds("run", "in.safetensors", "-o", "out.safetensors", cwd=here)
    assert "bf16" in text
    near(load(here / "out.safetensors")["out"], oracle.forward(**{n: from_bf16(to_bf16(a)) for n, a in tensors.items()})[0], 2e-2)


@pytest.mark.parametrize("order", ["C", "F"])
def test_run_npy(here, order):
    tensors = {**qkv(), "bias": normal(4, 5, 7)}
    for name, array in tensors.items():
        np.save(here / f"{name}.npy", np.asarray(array, order=order))
    (here / "results").mkdir()
    files = [part for name in tensors for part in (f"--{name}", f"{name}.npy")]
    succeeds("run", *files, "-o", "results", cwd=here)
    out, lse = oracle.forward(**tensors)
    near(np.load(here / "results/out.npy"), out)
    near(np.load(here / "results/lse.npy"), lse)


def test_run_npy_versions(here):
    tensors = qkv()
    for name, version in zip("qkv", [(1, 0), (2, 0), (3, 0)]):
        with open(here / f"{name}.npy", "wb") as file:
            np.lib.format.write_array(file, tensors[name], version=version)
    succeeds("run", "--q", "q.npy", "--k", "k.npy", "--v", "v.npy", "-o", "new/", cwd=here)
    near(np.load(here / "new/out.npy"), oracle.forward(**tensors)[0])


def test_run_mixes_files(here):
    tensors = {**qkv(), "sink": normal(4)}
    put(here, "in.safetensors", {name: tensors[name] for name in "qk"})
    put(here, "others.safetensors", {name: tensors[name] for name in ("v", "sink")})
    np.save(here / "sink.npy", tensors["sink"])
    succeeds("run", "in.safetensors", "--v", "others.safetensors", "--sink", "sink.npy", "-o", "out.safetensors", cwd=here)
    near(load(here / "out.safetensors")["out"], oracle.forward(**tensors)[0])


def test_run_empty(here):
    put(here, "in.safetensors", qkv(sq=0))
    succeeds("run", "in.safetensors", "-o", "out.safetensors", cwd=here)
    assert load(here / "out.safetensors")["out"].shape == (2, 0, 4, 6)


def test_run_never_overwrites_without_force(here):
    put(here, "in.safetensors", qkv())
    (here / "out.safetensors").write_text("mine")
    refused("run", "in.safetensors", "-o", "out.safetensors", cwd=here, says=("out.safetensors", "exists already", "--force"))
    assert (here / "out.safetensors").read_text() == "mine"
    succeeds("run", "in.safetensors", "-o", "out.safetensors", "--force", cwd=here)
    before = (here / "in.safetensors").read_bytes()
    refused("run", "in.safetensors", "-o", "./in.safetensors", "--force", cwd=here, says="./in.safetensors is an input of this call; give another name")
    assert (here / "in.safetensors").read_bytes() == before
    assert "out" in load(here / "out.safetensors")
    (here / "folder").mkdir()
    np.save(here / "folder/lse.npy", np.zeros(1))
    refused("run", "in.safetensors", "-o", "folder", cwd=here, says=("lse.npy", "exists already"))
    assert sorted(os.listdir(here / "folder")) == ["lse.npy"]
    assert not [name for name in os.listdir(here) if name.endswith(".part")]


def test_run_wrong_problem_lines(here):
    put(here, "in.safetensors", qkv())
    for line, says in [
        ("sq=6", ("'sq=6'", "does not agree", "sq=5")),
        ("bf16", ("'bf16'", "does not agree", "fp32")),
        ("bias=1,h,q,k", ("bias", "does not agree")),
        ("causl", ("causl: not a word of it; did you mean causal?", "fovea explain --help")),
        ("window=1", ("window", "LEFT,RIGHT")),
        ("dropout=2", ("dropout", "0 <= p <= 1")),
        ("softcap=-1", ("softcap",)),
        ("layout=qkv3", ("layout=qkv3", "layout=bshd", "layout=bhsd")),
        ("backend=gpu", ("backend", "gpu", "cpu")),
        ("need=q", ("need", "bwd")),
        ("bwd", ("bwd", "--backward")),
        ("causal causal", ("causal", "once")),
    ]:
        refused("run", "in.safetensors", "-o", "out.safetensors", "-p", line, cwd=here, says=says)
        assert not (here / "out.safetensors").exists()
    refused("run", "in.safetensors", "-o", "o.safetensors", "-p", "backend=cuda", cwd=here, code=UNSUPPORTED, says="cuda")


def test_run_wrong_tensors(here):
    good = qkv()
    for change, says in [
        ({"q": normal(2, 5, 4)}, ("q: shape 2x5x4", "(B, Sq, Hq, D)")),
        ({"q": normal(2, 5, 3, 8)}, ("3", "2")),
        ({"k": normal(2, 7, 2, 9)}, ("k",)),
        ({"v": normal(2, 7, 2, 6, dtype=np.float64)}, ("v", "fp64", "fp32")),
        ({"q": np.zeros((2, 5, 4, 8), np.int32)}, ("q", "int32")),
        ({"mask": normal(2, 4, 5, 7)}, ("mask", "bool", "bias")),
        ({"bias": normal(3, 5, 7)}, ("bias",)),
        ({"sink": normal(3)}, ("sink",)),
        ({"grad_out": normal(2, 5, 4, 6)}, ("grad_out", "--backward")),
        ({"grad_lse": normal(2, 4, 5)}, ("--backward",)),
        ({"biass": normal(4, 5, 7)}, ("biass", "did you mean bias")),
        ({"something": normal(1)}, ("something", "accepted", "alibi_slopes")),
        ({"bias": normal(1, 1, 1, 1, 1, 1)}, ("bias", "6 dimensions", "at most 5")),
        ({"cu_seqlens_q": np.array([0, 5], np.int32)}, ("cu_seqlens_k",)),
    ]:
        put(here, "in.safetensors", {**good, **change})
        refused("run", "in.safetensors", "-o", "out.safetensors", cwd=here, says=says)
        assert not (here / "out.safetensors").exists()
    for missing in "qkv":
        put(here, "in.safetensors", {name: array for name, array in good.items() if name != missing})
        refused("run", "in.safetensors", "-o", "out.safetensors", cwd=here, says=(f"{missing} is missing", f"--{missing} FILE"))
    put(here, "in.safetensors", good)
    refused("run", "in.safetensors", "-o", "out.safetensors", "--backward", cwd=here, says="grad_out is missing")
    refused("run", "in.safetensors", "-o", "out.safetensors", "--q", "in.safetensors", cwd=here, says=("q", "give it once"))
    # What is wrong with the backward alone is said before the forward is computed, and before a folder is made.
    put(here, "in.safetensors", {**good, "grad_out": normal(2, 5, 4, 5)})
    refused("run", "in.safetensors", "-o", "results/", "--backward", cwd=here, says=("grad_out: shape 2x5x4x5", "2x5x4x6"))
    assert not (here / "results").exists()
    put(here, "in.safetensors", good)
    put(here, "bad.safetensors", {**good, "cu_seqlens_q": np.array([0, 5, 3], np.int32), "cu_seqlens_k": np.array([0, 3, 7], np.int32)})
    refused("run", "bad.safetensors", "-o", "out.safetensors", cwd=here)


def test_run_where_results_go(here):
    put(here, "in.safetensors", qkv())
    put(here, "bf16.safetensors", qkv(), bf16="qkv")
    (here / "folder").mkdir()
    refused("run", "in.safetensors", cwd=here, says="--output")
    refused("run", "in.safetensors", "-o", "out.npz", cwd=here, says=("out.npz", ".safetensors", "folder"))
    refused("run", "in.safetensors", "-o", "results2", cwd=here, says="; did you mean results2/?")
    assert not (here / "results2").exists()
    refused("run", "in.safetensors", "-o", "no/such/out.safetensors", cwd=here, says="there is no folder no/such")
    refused("run", "bf16.safetensors", "-o", "folder", cwd=here, says=("bf16", ".npy cannot carry", ".safetensors"))
    (here / "x.safetensors").mkdir()
    refused("run", "in.safetensors", "-o", "x.safetensors", cwd=here, says="a folder")
    assert os.listdir(here / "folder") == []


# ---- files that are not what they should be ----


def test_files_that_cannot_be_read(here):
    run = ("run", "-o", "out.safetensors")
    refused(*run, "missing.safetensors", cwd=here, says=("missing.safetensors", "no such file"))
    refused(*run, ".", cwd=here, says="a folder, where a file is expected")
    refused(*run, "/dev/null", cwd=here, says="not a regular file")
    (here / "q.npy").write_bytes(b"")
    refused(*run, "q.npy", cwd=here, says=("q.npy", "holds one array", "--q q.npy"))
    refused(*run, "--q", "q.npy", cwd=here, says=("q.npy", "not an .npy file"))
    refused(*run, "--q", "q.txt", cwd=here, says=("q.txt", "accepted: .npy or .safetensors"))
    put(here, "other.safetensors", {"x": normal(1)})
    refused(*run, "--q", "other.safetensors", cwd=here, says=("has no tensor 'q'", "it has: x"))
    (here / "folder").mkdir()
    refused(*run, "--q", "folder", cwd=here, says="--q folder: a folder, where a file is expected")
    for text in ("hello\n", "# A file of text, which begins with a title\n", "A" * 8):
        (here / "text.safetensors").write_text(text)
        refused(*run, "text.safetensors", cwd=here, says="text.safetensors: not a .safetensors file")
    (here / "small.safetensors").write_bytes(struct.pack("<Q", 99) + b"no header")
    refused(*run, "small.safetensors", cwd=here, says="small.safetensors: not a .safetensors file")
    if os.geteuid() != 0:  # root may read everything
        secret = put(here, "secret.safetensors", qkv())
        secret.chmod(0)
        refused(*run, "secret.safetensors", cwd=here, says="Permission denied")


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE_SAFETENSORS = {
    "empty": (b"", "truncated"),
    "seven bytes": (b"\0" * 7, "truncated"),
    "header past the end": (struct.pack("<Q", 100) + b"{}", "truncated"),
    "header of 2^63": (struct.pack("<Q", 1 << 63) + b"{}", "not a .safetensors file"),
    "header of all ones": (b"\xff" * 16, "not a .safetensors file"),
    "not JSON": (pack(b"PK\3\4 something else"), "not JSON"),
    "not UTF-8": (pack(b'{"\xff\xfe": 1}'), "not JSON"),
    "a list": (pack([]), "not a JSON object"),
    "deep": (pack(b"[" * 100000), "nests lists or objects more than 3 deep"),
    # Printed as a value, this would take the whole stack.
    "a deep type": (pack(b'{"q": {"dtype": ' + b"[" * 200000 + b"]" * 200000 + b', "shape": [], "data_offsets": [0, 4]}}', b"\0" * 4),
                    "nests lists or objects more than 3 deep"),
    "beyond all numbers": (pack(b'{"q": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 8]}}'), "too large"),
    "a name with a NUL": (pack({"q\0r": 1}), "tensor 'q?r': its entry has not dtype"),
    "entry is a number": (pack({"q": 1}), "dtype, shape and data_offsets"),
    "no shape": (pack({"q": {"dtype": "F32", "data_offsets": [0, 8]}}, b"\0" * 8), "dtype, shape and data_offsets"),
    "unknown type": (pack({"q": {**ONE, "dtype": "F8_E4M3"}}, b"\0" * 8), "BF16"),
    "type is a number": (pack({"q": {**ONE, "dtype": 3}}, b"\0" * 8), "accepted"),
    "negative dimension": (pack({"q": {**ONE, "shape": [-2]}}, b"\0" * 8), "not a list of counts"),
    "fractional dimension": (pack({"q": {**ONE, "shape": [2.0]}}, b"\0" * 8), "not a list of counts"),
    "too many elements": (pack({"q": {**ONE, "shape": [1 << 40, 1 << 40]}}, b"\0" * 8), "more elements"),
    "2^64 elements": (pack({"q": {**ONE, "shape": [1 << 63, 2]}}, b"\0" * 8), "more elements"),
    "beyond 64 bits": (pack(b'{"q": {"dtype": "F32", "shape": [99999999999999999999999], "data_offsets": [0, 8]}}'), "counts"),
    "offsets reversed": (pack({"q": {**ONE, "data_offsets": [8, 0]}}, b"\0" * 8), "do not hold its 8 bytes"),
    "offsets too short": (pack({"q": {**ONE, "data_offsets": [0, 4]}}, b"\0" * 8), "do not hold its 8 bytes"),
    "three offsets": (pack({"q": {**ONE, "data_offsets": [0, 8, 8]}}, b"\0" * 8), "not two counts"),
    "overlap": (pack({"q": ONE, "k": {**ONE, "data_offsets": [4, 12]}}, b"\0" * 12), "within the tensor before it"),
    "the same bytes": (pack({"q": ONE, "k": ONE}, b"\0" * 8), "within the tensor before it"),
    "a gap": (pack({"q": ONE, "k": {**ONE, "data_offsets": [16, 24]}}, b"\0" * 24), "past the tensor before it"),
    "truncated data": (pack({"q": ONE}, b"\0" * 7), "truncated"),
    "huge and not there": (pack({"q": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}), "truncated"),
    "trailing bytes": (pack({"q": ONE}, b"\0" * 9), "1 bytes follow"),
    "the same name twice": (pack(b'{"q": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
                                 b'"q": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', b"\0" * 8), "two tensors"),
}


@pytest.mark.parametrize("name", HOSTILE_SAFETENSORS)
def test_hostile_safetensors(here, name):
    content, says = HOSTILE_SAFETENSORS[name]
    (here / "in.safetensors").write_bytes(content)
    refused("run", "in.safetensors", "-o", "out.safetensors", cwd=here, says=("in.safetensors", says))


def test_metadata_is_no_tensor(here):
    tensors = qkv()
    raw = safetensors(tensors)
    size, = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8:8 + size])
    (here / "in.safetensors").write_bytes(pack({"__metadata__": {"format": "pt"}, **header}, raw[8 + size:]))
    succeeds("run", "in.safetensors", "-o", "out.safetensors", cwd=here)


def npy(header, data=b"", version=1, length=None):
    text = header.encode() if isinstance(header, str) else header
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", size) + text + data


def npy_of(descr="'<f4'", order="False", shape="(2,)", data=b"\0" * 8):
    return npy(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}", data)


HOSTILE_NPY = {
    "another format": (b"PK\3\4 and so on", "not an .npy file"),
    "the magic alone": (b"\x93NUMPY", "truncated"),
    "a part of the magic": (b"\x93NUM", "truncated"),
    "version 9": (npy("{}", version=9), "version 9"),
    "header past the end": (npy("{}", length=5000), "truncated"),
    "header of 4 GB": (npy("{}", version=2, length=0xFFFFFFFF), "not a readable .npy header"),
    "header is no dictionary": (npy("[1, 2]"), "not a readable .npy header"),
    "an unknown key": (npy("{'colour': 'red', }"), "unknown key 'colour'"),
    "no shape": (npy("{'descr': '<f4', 'fortran_order': False, }"), "missing"),
    "an endless string": (npy("{'descr"), "a string is missing"),
    "order is 7": (npy_of(order="7"), "neither True nor False"),
    "a negative dimension": (npy_of(shape="(-2,)"), "tuple of counts"),
    "a huge dimension": (npy_of(shape="(99999999999999999999999,)"), "tuple of counts"),
    "too many elements": (npy_of(shape="(4611686018427387904, 8)"), "more elements"),
    "huge and not there": (npy_of(shape="(1099511627776,)"), "truncated"),
    "truncated data": (npy_of(data=b"\0" * 7), "truncated"),
    "trailing bytes": (npy_of(data=b"\0" * 12), "4 bytes follow"),
    "big-endian": (npy_of(descr="'>f4'"), "big-endian"),
    "bf16": (npy_of(descr="'|V2'", data=b"\0" * 4), ".npy cannot carry bf16; give it as .safetensors"),
    "bf16 of ml_dtypes": (npy_of(descr="'<V2'", data=b"\0" * 4), ".npy cannot carry bf16; give it as .safetensors"),
    "complex": (npy_of(descr="'<c8'"), "accepted: '<f4' (fp32)"),
    "text": (npy_of(descr="'<U4'"), "accepted"),
    "objects": (npy_of(descr="'|O'"), "accepted"),
    "fields": (npy_of(descr="[('x', '<f4')]"), "structured"),
}


@pytest.mark.parametrize("name", HOSTILE_NPY)
def test_hostile_npy(here, name):
    content, says = HOSTILE_NPY[name]
    (here / "q.npy").write_bytes(content)
    refused("run", "--q", "q.npy", "-o", "out.safetensors", cwd=here, says=("q.npy", says))


def test_files_with_changed_bytes(here):
    """Whatever a file holds, the command ends with a result or a named error."""
    rng = random.Random(1)
    put(here, "good.safetensors", qkv(b=1, sq=2, sk=2))
    np.save(here / "good.npy", normal(1, 2, 4, 8))
    codes = set()
    for turn in range(150):
        name = ("good.safetensors", "good.npy")[turn % 2]
        raw = bytearray((here / name).read_bytes())
        for _ in range(rng.randint(1, 4)):
            raw[rng.randrange(min(len(raw), 300))] = rng.choice([0, 255, 34, 45, 57, 91, 93, 123, 125, rng.randrange(256)])
        if rng.random() < 0.3:
            raw = raw[:rng.randrange(len(raw))]
        changed = here / f"changed{name[4:]}"
        changed.write_bytes(raw)
        source = ("good.safetensors", "--bias", changed) if turn % 2 else (changed,)
        done = fovea("run", *source, "-o", "out.safetensors", "--force", cwd=here)
        assert done.returncode in (DONE, BAD_INPUT), (turn, done.returncode, done.stderr)
        assert done.returncode == DONE or done.stderr.startswith("fovea: ")
        codes.add(done.returncode)
    assert codes == {DONE, BAD_INPUT}


# ---- check, cases ----


def test_check_some_rows():
    text = succeeds("check", "--table", "reduced", "fp64", "causal")
    passed, failed = map(int, re.search(r"(\d+) passed, (\d+) failed", text).groups())
    assert passed > 0 and failed == 0


def test_check_random_problems():
    lines = succeeds("cases", "--random", "40", "--seed", "3").splitlines()
    assert len(set(lines)) == 40
    assert lines == succeeds("cases", "--random", "40", "--seed", "3").splitlines()
    assert lines[10:] == succeeds("cases", "--random", "30", "--seed", "13").splitlines()
    table = set(succeeds("cases").splitlines())
    assert not table & set(lines), "these are no rows of the table"
    for word in ("causal", "bias", "dropout", "seqs_q", "dv=", "window="):
        assert any(word in line for line in lines), word
    text = succeeds("check", "--random", "40", "--seed", "3", "causal")
    count = sum(" causal" in line for line in lines)
    assert count > 3 and f"{count} rows" in text and f"{count} passed, 0 failed" in text


def test_check_every_instruction_set():
    text = succeeds("check", "bwd b=2 hq=4 hk=2 sq=50 sk=33 d=24 fp32 causal bias=1,h,q,k dropout=0.2 seed=5", "--isa", "all",
                    "--gradients")
    assert "portable" in text
    passed = int(re.search(r"(\d+) passed, 0 failed", text).group(1))
    assert passed >= 2


def test_check_fails_where_a_row_fails():
    done = fovea("check", "bwd b=1 hq=1 sq=8 sk=8 d=8 fp32", env={"FOVEA_BACKEND": "cuda"})
    assert done.returncode == CHECK_FAILED
    assert "never moved to a CUDA device" in done.stdout
    assert "FAILED bwd b=1" in done.stdout and "0 passed, 1 failed" in done.stdout


def test_check_refuses():
    refused("check", "bf17", says=("bf17", "no row of the table", "no problem line"))
    refused("check", "--isa", "avx9", says=("avx9", "avx2"))
    refused("check", "--table", "half", says=("half", "full", "reduced"))
    refused("check", "--random", "0", says=("--random", "1", "1000000"))
    refused("check", "--random", "5", "--table", "reduced", says=("--random", "--table"))
    refused("check", "--seed", "5", says=("--seed", "--random"))
    refused("check", "--random", "2", "--seed", "-1", says=("--seed", "-1"))
    refused("check", "--random", "2", "bf17", says=("bf17", "none of the 2 problems"))
    refused("check", "--backend", "cuda", code=UNSUPPORTED, says=("cuda", "computes on the CPU", "fovea check --device cuda"))
    refused("check", "--backend", "gpu", says=("gpu", "accepted: cpu"))
    refused("check", "--gradiens", says=("--gradiens", "--gradients"))
    refused("check", "--seconds", "5", says=("--seconds", "only with --device cuda"))
    refused("check", "--report", "r.txt", says=("--report", "only with --device cuda"))
    refused("check", "--device", "gpu", says=("--device gpu", "cpu, cuda, cuda:N"))
    refused("check", "--device", "cuda:x", says=("--device cuda:x", "cpu, cuda, cuda:N"))
    refused("check", "--device", "cuda", "--isa", "avx2", says=("--isa", "only for the CPU"))
    refused("check", "--device", "cuda", "--gradients", says=("--gradients", "only for the CPU"))
    refused("check", "--device", "cuda", "--backend", "cpu", says=("--backend cpu", "only for the CPU"))


FAKE = BUILD / "tests" / "cpp" / "fake"


def check_on_a_fake_gpu(*arguments, **env):
    """With the driver and the NVRTC of tests/cpp/fake: kernels are launched, and compute nothing."""
    played = {"LD_LIBRARY_PATH": str(FAKE), "FOVEA_NVRTC": str(FAKE / "libnvrtc.so.13"), "FOVEA_CACHE_DIR": "none"}
    return fovea("check", "--device", "cuda", *arguments, env={**played, "FOVEA_KERNEL": "", **env})


def test_check_of_a_failed_row_again():
    """A FAILED line of a GPU's check is a command's argument as it stands: problem and kind of numbers."""
    line = "bwd b=2 hq=4 hk=2 sq=20 sk=33 d=24 fp16 causal bias=b,h,q,k values=huge"
    done = check_on_a_fake_gpu(line)
    assert done.returncode == CHECK_FAILED and f"FAILED {line}\n" in done.stdout, (done.stdout, done.stderr)
    assert "1 passed, 0 failed" in succeeds("check", line)
    assert "1 passed, 0 failed" in succeeds("check", *line.split())
    refused = fovea("check", line.replace("huge", "hugo"))
    assert refused.returncode == BAD_INPUT and refused.stderr.endswith(
        "values=hugo: accepted: normal, large_scores, one_hot, dead_rows, minus_infinity, huge, lowest, denormal, "
        "nan_where_masked; did you mean huge?\n"), refused.stderr


@pytest.mark.parametrize("values, features, missing", [
    ("lowest", "", "a bias with queries"), ("lowest", "bias=1,1,1,k", "a bias with queries"), ("huge", "mask=1,1,q,k", "a bias"),
    ("minus_infinity", "", "a bias"), ("dead_rows", "bias=b,h,1,k mask=b,1,1,k", "a mask or a bias with queries"),
    ("nan_where_masked", "causal", "a bias"),
    ("nan_where_masked", "bias=b,h,q,k", "a mask or a band that leaves scores out"),
])  # fmt: skip
def test_check_of_numbers_that_have_no_place(values, features, missing):
    refused = fovea("check", f"b=2 hq=2 sq=15 sk=9 d=16 {features} values={values}")
    assert refused.returncode == BAD_INPUT and f": values={values} needs {missing}" in refused.stderr, refused.stderr


def test_check_on_a_gpu_reports(tmp_path):
    line = "bwd b=2 hq=4 hk=2 sq=20 sk=33 d=24 fp16 causal"
    done = check_on_a_fake_gpu(line, "--report", tmp_path / "report.txt", HOME=str(FAKE.parent))
    assert done.returncode == CHECK_FAILED and done.stderr == "", (done.stdout, done.stderr)  # nothing is computed
    report = (tmp_path / "report.txt").read_text()
    for text in (done.stdout, report):
        assert f"FAILED {line} values=normal\n  out: element 0 of" in text
        assert "\n  grad_v: element" in text
        assert "1 of 1 rows: 0 passed, 1 failed, 0 skipped; " in text
        for known in ("fovea: ", "driver: CUDA 13.0", "GPU: 0: played, compute capability 9.0, 132", "NVRTC: 13.0, ~/fake/",
                      "found by FOVEA_NVRTC"):
            assert known in text, known
        assert float(re.search(r"(?m)^  out +(\S+)  bwd", text).group(1)) > 1  # the largest error, divided by the allowed one
        assert str(FAKE) not in text  # the home folder is "~"
    assert f"arguments: --device cuda --table full {line}\n" in report
    assert "checked: GPU 0: played, compute capability 9.0, 132 multiprocessors" in report
    assert re.search(r"(?m)^date: \d{4}-\d\d-\d\d \d\d:\d\d UTC$", report)
    again = check_on_a_fake_gpu(line, "--report", tmp_path / "report.txt")
    assert again.returncode == BAD_INPUT and "report.txt" in again.stderr and again.stdout == ""
    other = check_on_a_fake_gpu(line, FAKE_CAPABILITY="8")
    assert "FAILED" in other.stdout and "compute capability 8.0" in other.stdout


def test_check_of_a_forward_compares_every_gradient():
    done = check_on_a_fake_gpu("fwd b=1 hq=2 sq=20 sk=33 d=24 fp16 bias=1,h,q,k bias2=b,1,1,k sink")
    assert done.returncode == CHECK_FAILED  # nothing is computed
    for name in ("out", "lse", "grad_q", "grad_k", "grad_v", "grad_bias", "grad_bias2", "grad_sink"):
        assert re.search(rf"(?m)^  {name}: ", done.stdout), (name, done.stdout)


def test_check_on_a_gpu_ends_in_time():
    done = check_on_a_fake_gpu("--seconds", "0.5", "--jobs", "2")
    reached, rows, left = map(int, re.search(r"(\d+) of (\d+) rows: .*; (\d+) not reached \(--seconds 0.5\)", done.stdout).groups())
    assert 0 < reached < rows and reached + left == rows and rows > 500


def test_check_on_a_gpu_stops_after_a_fault():
    done = check_on_a_fake_gpu("--table", "reduced", FAKE_FAULT="700")
    assert done.returncode == CHECK_FAILED
    assert done.stdout.count("FAILED bwd") == 1 and "cuMemcpyDtoHAsync: PLAYED_ERROR 700" in done.stdout
    assert re.search(r"1 of \d+ rows: 0 passed, 1 failed, 0 skipped; \d+ not reached \(after a fault of the device", done.stdout)


def test_check_on_a_gpu_ends_where_a_kernel_does_not(tmp_path):
    done = check_on_a_fake_gpu("--table", "reduced", "--limit", "1", "--report", tmp_path / "r.txt", FAKE_SECONDS="100")
    assert done.returncode == CHECK_FAILED
    for text in (done.stdout, (tmp_path / "r.txt").read_text()):
        assert text.count("FAILED bwd") == 1 and "did not end within 1 s" in text
    assert re.search(r"not reached \(a kernel did not end\)", (tmp_path / "r.txt").read_text())


def test_check_without_a_gpu_that_can_compute():
    done = check_on_a_fake_gpu("bwd b=1 hq=1 sq=8 sk=8 d=8 fp32", FAKE_CAPABILITY="7")
    assert done.returncode == UNSUPPORTED and "compute capability 7.0; accepted: 8.0 or newer" in done.stdout + done.stderr
    refused("check", "--device", "cuda:7", "bf16", env={"LD_LIBRARY_PATH": str(FAKE), "FOVEA_NVRTC": str(FAKE / "libnvrtc.so.13")},
            says=("7 was given", "0 to 1 are there"))
    if "no NVIDIA driver" in fovea("explain").stdout:
        refused("check", "--device", "cuda", code=UNSUPPORTED, says="no NVIDIA driver")


def test_cases_are_problem_lines():
    lines = succeeds("cases").splitlines()
    assert len(lines) >= 400 and len(set(lines)) == len(lines)
    for line in lines[::37]:
        assert "values=" in line
        problem = re.sub(r" values=\S+", "", line)
        assert problem in succeeds("explain", problem)
    some = succeeds("cases", "bf16", "!causal").splitlines()
    assert some and all(" bf16 " in line and " causal" not in line for line in some)
    assert len(succeeds("cases", "--table", "reduced").splitlines()) < len(lines)


# ---- bench ----


def test_bench_json(here):
    line = "fwd b=1 hq=2 sq=64 sk=64 d=16 fp32 causal"
    text = succeeds("bench", line, "--json", "b.json", cwd=here)
    assert re.search(r"fovea \d+\.\d+\.\d+, .*threads.*\n\s+GFLOP/s\s+ms\s+problem\n.*causal", text)
    result = json.loads((here / "b.json").read_text())
    row, = result["rows"]
    pairs = 64 * 65 / 2
    assert row["problem"] == line and row["flops_of_allowed_pairs"] == 4 * 16 * pairs * 2
    assert row["gflops_per_second"] == pytest.approx(row["flops_of_allowed_pairs"] / row["seconds"] / 1e9)
    assert sorted(row["seconds_of_rounds"])[1] == row["seconds"] > 0
    assert result["threads"] >= 1 and result["isa"]
    refused("bench", line, "--json", "b.json", cwd=here, says=("b.json", "exists already"))
    on_stdout = json.loads(succeeds("bench", line, "--json", "-"))
    assert on_stdout["rows"][0]["problem"] == line


def test_bench_rows():
    lines = succeeds("bench", "--list").splitlines()
    assert len(lines) > 10
    assert all(line.startswith("bwd") for line in succeeds("bench", "bwd", "--list").splitlines())
    refused("bench", "fastest", says=("fastest", "--list"))
    refused("bench", "--lst", says=("--lst", "--list"))


def test_bench_counts_flops_of_allowed_pairs_alone():
    rows = {}
    for options in ("", "window=3,0", "causal", "dv=8"):
        line = f"bwd b=1 hq=1 sq=20 sk=30 d=16 fp32 {options}".strip()
        result, = json.loads(succeeds("bench", line, "--json", "-"))["rows"]
        rows[options] = result["flops_of_allowed_pairs"]
    assert rows[""] == 10 * 16 * 20 * 30
    assert rows["causal"] == 10 * 16 * sum(i + 10 + 1 for i in range(20))
    assert rows["window=3,0"] == 10 * 16 * 4 * 20
    assert rows["dv=8"] == 2 * (3 * 16 + 2 * 8) * 20 * 30


# ---- explain ----


def test_explain_a_problem():
    text = succeeds("explain", "fwd b=2 hq=4 sq=128 d=64 bf16 causal")
    assert "problem: fwd b=2 hq=4 sq=128 sk=128 d=64 bf16 causal" in text and "cpu: used" in text and "workspace" in text
    assert text == succeeds("explain", "fwd", "b=2", "hq=4", "sq=128", "d=64", "bf16", "causal")
    done = fovea("explain", "fwd b=1 sq=8 d=8 backend=cuda")
    assert done.returncode == UNSUPPORTED and "cuda" in done.stdout
    done = fovea("explain", "fwd device=cuda fp64 b=1 hq=1 sq=2 sk=2 d=4")
    assert done.returncode == UNSUPPORTED and "cuda: not used: q: fp64 on a CUDA device" in done.stdout
    forced = succeeds("explain", "fwd b=1 sq=8 d=8", env={"FOVEA_BACKEND": "reference"})
    assert "reference: used" in forced


def test_explain_refuses():
    refused("explain", "fwd sq=1", says=("d=N",))
    refused("explain", "fwd sq=1 d=8 hq=3 hk=2", says=("hk", "divisor"))
    refused("explain", "fwd sq=one d=8", says=("sq", "one"))
    refused("explain", "fwd sq=1 d=8 windw=1,1", says=("windw: not a word of it; did you mean window?",))
    refused("explain", "fwd b=2 d=8", says=("sq: missing",))


def test_explain_for_a_gpu_that_need_not_be_there():
    line = "bwd b=2 hq=4 sq=512 sk=512 d=64 bf16 bias=1,h,q,k need=q,k,v,bias"
    text = succeeds("explain", "--arch", "sm_90", line)
    assert text.startswith("problem: bwd b=2 hq=4 sq=512 sk=512 d=64 bf16 bias=1,h,q,k device=cuda\ncuda: used: for sm_90: ")
    assert "sm90_backward, " in text and re.search(r"^workspace: \d+ bytes$", text, re.M)
    both = succeeds("explain", "-a", "sm_80,sm_90", *line.split())
    assert both.endswith(text) and "sm90_backward: compute capability other than 9.0" in both
    refused("explain", "--arch", "", line, says="architecture: ''")
    refused("explain", "--arch", "sm_77", line, says=("architecture: 'sm_77'", "accepted: sm_80"))
    refused("explain", "--arch", "sm_90", says="--arch: without a problem")
    refused("explain", "--arch", "sm_90", line + " backend=cpu", says="backend=cpu: for a GPU's architecture; accepted: backend=cuda")
    done = fovea("explain", "--arch", "sm_90", "fwd b=1 hq=1 sq=2 d=4 fp64")
    assert done.returncode == UNSUPPORTED and "cuda: not used: q: fp64 on a CUDA device" in done.stdout


def test_explain_the_machine():
    text = succeeds("explain", env={"FOVEA_CPU_ISA": "portable", "FOVEA_BAKCEND": "cpu"})
    assert re.search(r"instruction set\s+portable\s+in use", text)
    assert re.search(r"threads\s+\d+ ", text)
    assert re.search(r"backend\s+cpu\s+available", text)
    assert re.search(r"FOVEA_CPU_ISA\s+portable", text)
    assert re.search(r"FOVEA_BAKCEND.*nothing reads it; did you mean FOVEA_BACKEND", text)


@pytest.mark.parametrize("arguments", [("check", "bf16"), ("bench", "fwd b=1 hq=1 sq=64 sk=64 d=64 bf16")])
def test_an_instruction_set_that_is_none_is_refused_before_any_row(arguments):
    done = refused(*arguments, says="FOVEA_CPU_ISA: 'avx513'; accepted: ", env={"FOVEA_CPU_ISA": "avx513"})
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    "name, value, why",
    [
        ("FOVEA_BACKEND", "gpu", "'gpu'; accepted: cpu, cuda, reference"),
        ("FOVEA_CPU_ISA", "sse", "'sse'; accepted: .*portable"),
        ("FOVEA_CPU_ISA", "Portable", r"'Portable'; accepted: .*; did you mean portable\?"),
        ("FOVEA_CHECK", "yes", "'yes'; accepted: 0, 1"),
        ("FOVEA_KERNEL", "sm75", "'sm75'; accepted: generic, sm80, sm90"),
        ("FOVEA_JIT", "never", "'never'; accepted: jit, cache, off"),
        ("FOVEA_CACHE_DIR", "/proc/version", ".*it is no folder"),
        ("FOVEA_CACHE_MAX_MB", "1GB", "'1GB'; accepted: a number of megabytes"),
        ("FOVEA_PRECOMPILED_DIR", "/nowhere", ".*/nowhere: No such file or directory"),
        ("FOVEA_NVRTC", "/nowhere/libnvrtc.so", "'/nowhere/libnvrtc.so': no such file or folder; accepted: .*libnvrtc.so"),
        ("FOVEA_KERNEL_TEXT", "/nowhere", "'/nowhere' has no math/ with the text of kernels; accepted: the folder src"),
        ("FOVEA_LOG", "all", "'all'; accepted: jit, or not set"),
        ("FOVEA_DUMP", "/proc/version/dump", ".*/proc/version is no folder"),
        ("FOVEA_LIBRARY", "/nowhere", "'/nowhere': no such file"),
        ("FOVEA_BUILD", "/nowhere", "'/nowhere': no such folder"),
        ("FOVEA_CASES", "few", "'few': accepted: reduced"),
        ("FOVEA_KERNELS", "many", "'many': accepted: a number, all"),
        ("FOVEA_TEST_DEVICE", "gpu", "'gpu': accepted: cuda, cpu, compile"),
        ("FOVEA_TORCH_FAST", "9", "'9': accepted: 1, methods, 0"),
    ],
)
def test_explain_checks_variables(name, value, why):
    text = succeeds("explain", env={name: value})
    assert re.search(rf"^{name} +REFUSED +{why}", text, re.M), text
    assert text.count("REFUSED") == 1


def test_explain_knows_every_variable_that_the_library_reads():
    """By the literal names in its sources: one that is missing here would be called unread."""
    sources = [*(ROOT / "src").rglob("*.cpp"), *(ROOT / "src").rglob("*.h")]
    read = {name for path in sources for name in re.findall(r'(?:getenv|environment|variable)\("(FOVEA_\w+)"\)', path.read_text())}
    assert len(read) > 5
    documented = {name for path in (ROOT / "docs").glob("*.md") for name in re.findall(r"^\| `(FOVEA_\w+)", path.read_text(), re.M)}
    assert len(documented) > 10
    reference = set(re.findall(r"\{envvar\} (FOVEA_\w+)", (ROOT / "docs/reference/environment.md").read_text()))
    assert len(reference) > 20
    read |= documented | reference
    text = succeeds("explain", env={name: "" for name in read if name not in ("FOVEA_CPU_ISA", "FOVEA_BACKEND")})
    assert "nothing reads it" not in text
    for name in read:
        assert re.search(rf"^{name} ", text, re.M), name


def test_explain_leaves_out_variables_of_tests_that_are_not_set():
    text = succeeds("explain", env={"FOVEA_LONG": "1"})
    assert re.search(r"^FOVEA_LONG +1 +tests in Python", text, re.M) and re.search(r"^FOVEA_JIT +not set", text, re.M)
    assert not re.search(r"^FOVEA_\w+ +not set +(tests|tools|reduced)", text, re.M)


# ---- the command itself ----


def test_help_has_examples_at_every_level():
    for command in ([], ["run"], ["check"], ["cases"], ["bench"], ["explain"], ["rows"]):
        text = succeeds(*command, "--help")
        assert "Examples:" in text and "fovea" in text.split("Examples:")[1], command
    top = succeeds("--help")
    for command in ("run", "check", "cases", "bench", "explain", "rows"):
        assert command in top
    assert "Exit codes:" in top


def test_help_lists_every_word_of_the_problem_line():
    done = refused("explain", "xyzzy=1", says="xyzzy: not a word of it; accepted: fwd, bwd, ")
    words = re.search(r"accepted: (.*) \(fovea", done.stderr).group(1).split(", ")
    assert len(words) > 30
    for command in ("run", "cases", "explain"):
        listed = succeeds(command, "--help").split("words, each at most once, in any order:")[1]
        for word in words:
            assert re.search(rf"(?<![\w=]){word}(?!\w)", listed), (command, word)


def test_help_lists_every_kind_of_values():
    listed = succeeds("cases", "--help").split("values=, ")[1]
    kinds = {re.search(r" values=(\w+)$", line).group(1) for line in succeeds("cases").splitlines()}
    assert len(kinds) > 5 and all(re.search(rf"\b{kind}\b", listed) for kind in kinds)


def run_examples(here, lines):
    """Runs command lines of texts for people, with files of the names that they use."""
    put(here, "inputs.safetensors", {**qkv(sq=7), "sink": normal(4)})
    put(here, "in.safetensors", qkv(sq=7))
    for name, array in {**qkv(sq=7), "b": normal(4, 7, 7), "do": normal(2, 7, 4, 6)}.items():
        np.save(here / f"{name}.npy", array)
    for line in lines:
        words = shlex.split(line.split("|")[0])
        at = words.index("fovea")
        arguments = words[at + 1:] + (["--force"] if words[at + 1] == "run" else [])
        succeeds(*arguments, cwd=here, env=dict(word.split("=") for word in words[:at]))


def test_help_examples_are_accepted(here):
    lines = []
    for command in ("run", "explain", "cases", "rows"):
        examples = succeeds(command, "--help").split("Examples:")[1].split("\n\n")[0]
        lines += examples.strip().splitlines()
    assert len(lines) >= 8
    run_examples(here, lines)


def test_examples_of_the_documentation_are_accepted(here):
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/cli.md").read_text(), re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) >= 12
    # Those that take long are for people.
    run_examples(here, [line for line in lines if not line.startswith("fovea bench") and line != "fovea check"])


def test_rows():
    """The text of the documentation, and which words it is made of."""
    shown, = re.findall(r"prints\n\n```text\n(zigzag: .*?)```", (ROOT / "docs/cli.md").read_text(), re.S)
    assert succeeds("rows", "s=1000 causal ranks=2") == shown == succeeds("rows", "ranks=2", "causal", "s=1000")
    eight = succeeds("rows", "s=131072 causal ranks=8")
    assert "balance: 1.000 in pairs, 1.000 in rows" in eight and "    7      16384        1073750016      1.000      16384     114688  57344..73728" in eight
    contiguous = succeeds("rows", "s=131072 causal ranks=8 contiguous")
    assert contiguous.startswith("contiguous: ") and "balance: 1.875" in contiguous and "hint: zigzag" in contiguous
    assert succeeds("rows", "s=1000 window=10,-1 ranks=2").startswith("contiguous: ")
    several = succeeds("rows", "seqs=50,700,0,250 block=16 ranks=3 causal contiguous")
    assert several.startswith("contiguous: 1000 rows of 4 sequences") and "#0:0..50 #1:0..272" in several and "hint: packed" in several
    assert succeeds("rows", "s=1000 causal window=100,0 ranks=2 zigzag").startswith("zigzag: ")
    packed = succeeds("rows", "seqs=3000,100x9,0 causal ranks=2 block=16")
    assert packed.startswith("packed: 3900 rows of 11 sequences over 2 ranks; pieces begin at multiples of 16 rows\n") and "#0:0..752 #1:0..100" in packed
    assert "and 1 more" in packed
    mesh = succeeds("rows", "s=4096 causal ranks=2x4")
    assert "over 8 ranks (2 for keys x 4 for heads)" in mesh and "balance: 1.000 in pairs" in mesh
    assert "balance: 1.000" in succeeds("rows", "s=0 ranks=3")


def test_rows_refuses():
    for line, says in (
        ("s=10", "no ranks=; accepted: ranks=N, or ranks=KxH"),
        ("ranks=2", "neither s= nor seqs=; accepted: s=LENGTH"),
        ("s=8 ranks=2x", "ranks=2x; accepted: ranks=1 or more"),
        ("s=10 seqs=3 ranks=2", "both s= and seqs=; accepted: s=LENGTH"),
        ("s=ten ranks=2", "s=ten; accepted: s=0 or more, an integer"),
        ("s=-1 ranks=2", "s=-1; accepted: s=0 or more"),
        ("s=10 ranks=0", "ranks=0; accepted: ranks=1 or more"),
        ("s=10 ranks=2x3x4", "ranks=2x3x4; accepted: ranks=N, or ranks=KxH"),
        ("s=10 ranks=99999", "ranks: 99999; accepted: 1 to 65536"),
        ("s=9999999999 ranks=2", "lengths: 9999999999 at place 0; accepted: "),
        ("s=10 ranks=2 block=0", "block=0; accepted: block=1 or more"),
        ("s=10 ranks=2 window=3", "window=3; accepted: window=LEFT,RIGHT"),
        ("s=10 ranks=2 window=-2,3", "window=-2; accepted: window=-1 or more"),
        ("s=10 ranks=2 causal=br", "causal=br; accepted: causal"),
        ("s ranks=2", "s; accepted: s=, with a value"),
        ("s=10 s=11 ranks=2", "s=11; accepted: s once"),
        ("s=10 ranks=2 zigzag contiguous", "more than one of them"),
        ("s=10 ranks=2 packed", "packed, with s=; accepted: packed with seqs="),
        ("seqs=10 ranks=2 zigzag", "seqs=, with zigzag; accepted: "),
        ("seqs=10x0 ranks=2", "seqs=10x0; accepted: seqs=1 or more"),
        ("seqs=1x5000000 ranks=2", "LENGTHxTIMES, at most 4194304 sequences"),
        ("s=10 rank=2", "'rank=2' is no word of a line of rows; did you mean ranks?"),
        ("xyzzy", "accepted: s, seqs, ranks, causal, window, zigzag, contiguous, packed, block"),
    ):
        refused("rows", line, says=says)
    refused("rows", says="rows")
    listed = succeeds("rows", "--help").split("words, each at most once, in any order:")[1]
    for word in ("s=", "seqs=", "ranks=", "causal", "window=", "zigzag", "contiguous", "packed", "block="):
        assert f"\n  {word}" in listed or f"  {word}" in listed


def test_version():
    header = (ROOT / "include/fovea/c.h").read_text()
    version = ".".join(re.search(rf"FOVEA_VERSION_{part} (\d+)", header).group(1) for part in ("MAJOR", "MINOR", "PATCH"))
    assert succeeds("--version").strip() == f"fovea {version}"


def test_unknown_words_and_what_was_meant():
    refused("chek", says=("unknown command 'chek'", "did you mean check?", "fovea --help"))
    refused("xyzzy", says=("unknown command 'xyzzy'", "accepted: run, check, cases, bench, explain"))
    refused("--verson", says=("--verson", "--version"))
    refused("run", "--mas", "m.npy", says=("--mas", "--mask", "fovea run --help"))
    refused("run", "a", "b", says=("run", "'b'"))
    # Words of the problem line that were taken for options.
    refused("run", "a", "--causal", says=("unknown option --causal; did you mean -p causal[=br|tl]?", "go into -p"))
    refused("run", "a", "--windw=3,0", says="unknown option --windw=3,0; did you mean -p window=LEFT,RIGHT?")
    refused("explain", "--causal", says=("did you mean causal[=br|tl]?", "have no dashes"))
    done = fovea()
    assert done.returncode == BAD_INPUT and "Examples:" in done.stdout


def test_progress_and_errors_are_not_on_standard_output(here):
    put(here, "in.safetensors", qkv())
    done = fovea("run", "in.safetensors", "-o", "out.safetensors", cwd=here)
    assert done.stderr == ""
    done = fovea("bench", "fwd b=1 hq=1 sq=16 sk=16 d=8 fp32", "--json", "-")
    json.loads(done.stdout)


# ---- precompile ----

PLAIN = "b=1 hq=1 sq=16 sk=16 d=16 bf16"


def precompile(*arguments, folder, **more):
    """Into this folder, with the NVRTC that these tests have."""
    environment = {"FOVEA_CACHE_DIR": str(folder), "FOVEA_JIT": "", "FOVEA_PRECOMPILED_DIR": "",
                   "FOVEA_NVRTC": nvrtc()._name, **more}
    return succeeds("precompile", *arguments, env=environment)


def test_precompile_lists_what_a_problem_needs():
    listed = lambda *more: succeeds("precompile", "--list", *more).splitlines()  # noqa: E731
    forward = listed("--arch", "sm_80", f"fwd {PLAIN}")
    assert [line.split("<")[0] for line in forward] == ["sm_80 fovea::cuda::generic_forward", "sm_80 fovea::cuda::prepare_pack"]
    both = listed("--arch", "sm_80", PLAIN)
    assert set(forward) < set(both) and any("generic_backward<" in line for line in both)
    assert len(set(both)) == len(both)
    # Each problem and each architecture adds what is new; a file as well, comments and empty lines left out.
    assert listed("--arch", "sm_80", PLAIN, PLAIN) == both
    assert len(listed("--arch", "sm_80,sm_120", PLAIN)) == 2 * len(both)


def test_precompile_serves_products_of_every_size():
    """80 blocks: too few for a GPU of 108 multiprocessors that holds two on each, enough for one of 56."""
    line = ("fwd b=1 hq=10 sq=1024 sk=4096 d=64 bf16",)
    listed = lambda *more: set(succeeds("precompile", "--list", "--arch", "sm_80", *more).splitlines())  # noqa: E731
    large, small = listed("-m", "108", *line), listed("-m", "56", *line)
    split = [kernel for kernel in large - small if ".split = true" in kernel]
    assert split and not any(".split" in kernel for kernel in small)
    assert listed(*line) == listed("--multiprocessors", "56,108", *line) == large | small
    refused("precompile", "-m", "56", *line, says="--arch")


def test_precompile_reads_problems_from_a_file(here):
    (here / "problems.txt").write_text(f"# a comment\n\nfwd {PLAIN}\nfwd {PLAIN} causal\n")
    listed = succeeds("precompile", "--list", "--arch", "sm_80", "--file", "problems.txt", cwd=here)
    assert listed == succeeds("precompile", "--list", "--arch", "sm_80", f"fwd {PLAIN}", f"fwd {PLAIN} causal")


def test_precompile_names_the_line(here):
    """Of a file, or which of several arguments, in whatever way it is wrong."""
    line = ("precompile", "--list", "--arch", "sm_80")
    for wrong, says in [
        ("fwd sq=8 d=8 hq=x", "problem line: hq: 'x'"),
        ("sq=8 d=8 hq=3 hk=2", "problem line: hk: '2'"),
        ("fwd sq=8 d=8 windw=1,1", "problem line: windw: not a word of it; did you mean window?"),
        ("bwd sq=10 d=1 b=100000000000 hq=100000000000", "q: shape "),
        ("sq=8 d=8 device=cpu", "device=cpu: in "),
    ]:
        (here / "problems.txt").write_text(f"# a comment\n\nfwd {PLAIN}\n{wrong}\n")
        refused(*line, "--file", "problems.txt", cwd=here, says=f"fovea: problems.txt:4: {says}")
        refused(*line, f"fwd {PLAIN}", wrong, says=f"fovea: problem 2: {says}")
        refused(*line, wrong, says=f"fovea: {says}")
    (here / "problems.txt").write_text(f"fwd {PLAIN}\n\nfwd b=1 sq=8 d=8 fp64\nfwd b=1 sq=8 d=100000 bf16")
    done = fovea("precompile", "--list", "--arch", "sm_80", "--file", "problems.txt", cwd=here)
    assert done.returncode == UNSUPPORTED
    assert "\nproblems.txt:3: fwd " in done.stderr and "\nproblems.txt:4: fwd " in done.stderr, done.stderr


def test_precompile_compiles_once(here):
    line = ("--arch", "sm_80", "--jobs", "1", f"fwd {PLAIN}")
    assert precompile(*line, folder=here / "kernels").startswith("2 kernels: 2 compiled, 0 were there; ")
    assert len(list((here / "kernels").glob("*.kernel"))) == 2
    assert precompile(*line, folder=here / "kernels").startswith("2 kernels: 0 compiled, 2 were there; ")
    # The folder can be used as it is on another machine.
    again = precompile(*line, folder=here / "other", FOVEA_PRECOMPILED_DIR=str(here / "kernels"))
    assert again.startswith("2 kernels: 0 compiled, 2 were there; ")


def test_precompile_refuses_by_name(here):
    line = ("--arch", "sm_80", f"fwd {PLAIN}")
    refused("precompile", "--arch", "sm_80", says="no problem is given")
    refused("precompile", "--arch", "sm_77", f"fwd {PLAIN}", says=("architecture: 'sm_77'", "accepted: sm_80"))
    refused("precompile", "--arch", "sm_80", "fwd b=1 hq=x", says="hq: 'x'")
    for word in ("device=cpu", "backend=reference"):
        refused("precompile", "--list", "--arch", "sm_80", f"fwd {PLAIN} {word}", says=(f"{word}: in ", "accepted is device=cuda"))
    refused("precompile", "--arch", "sm_80", "--file", "nowhere", cwd=here, says="nowhere: cannot be read")
    refused("precompile", *line, env={"FOVEA_JIT": "off"}, says="FOVEA_JIT")
    refused("precompile", *line, env={"FOVEA_JIT": "", "FOVEA_CACHE_DIR": "none"}, says="FOVEA_CACHE_DIR")
    # Problems that no kernel can compute are named; the others are compiled.
    wide = f"fwd {PLAIN}".replace("d=16", "d=100000")
    done = fovea("precompile", "--list", *line, wide)
    assert done.returncode == UNSUPPORTED and "head_dim 100000; accepted: at most 65536" in done.stderr
    assert "generic_forward<" in done.stdout
    double = fovea("precompile", "--list", "--arch", "sm_80", f"fwd {PLAIN}".replace("bf16", "fp64"))
    assert double.returncode == UNSUPPORTED and "fp64; accepted on a GPU: fp32, fp16, bf16" in double.stderr
