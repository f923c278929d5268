# SPDX-License-Identifier: Apache-2.0
"""bench/torch/several_gpus.py without a GPU: tiny problems over two processes, its arithmetic, and what it says where it cannot measure."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT

PROGRAM = ROOT / "bench/torch/several_gpus.py"


def bench(*arguments):
    return subprocess.run([sys.executable, PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})  # fmt: skip


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("several_gpus", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_kind_of_row(tmp_path):
    """A plan of each kind, every movement, and what PyTorch's context_parallel says; each compared with one process."""
    some = [word for name in ("64k", "bias", "window", "triangle") for word in ("--filter", name)]
    done = bench("--dry-run", *some, "--json", tmp_path / "rows.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert list(rows) == ["causal 64k 16/16", "window 4096, 128k", "bias, 256 8/8", "packed 1k to 64k", "triangle N=24"]
    for name, row in rows.items():
        ours = ["DTensor", "by hand"] if name.startswith("triangle") else ["keys", "heads", "ring"]
        assert [key for key in row["results"] if not key.startswith("PyTorch")] == ours and len(row["one_ms"]) == 2
        for key in ours:
            result = row["results"][key]
            assert max(result["error"].values()) < 1e-5 and ("grad_bias" in result["error"]) == name.startswith(("bias", "triangle"))
            assert result["efficiency"] > 0 and len(result["ms"]) == 2 and "wrong" not in result
    assert set(rows["causal 64k 16/16"]["results"]) > {"PyTorch cuDNN", "PyTorch FlashAttention-2"}
    last = done.stdout[done.stdout.index("T(1) / (2 T(2))") :]
    assert last.count("*") == 1 + 4 and all(name in last for name in rows), last


def test_what_cannot_be_measured_is_said():
    done = bench()
    assert done.returncode == 1 and "no CUDA device that PyTorch sees; --dry-run needs none" in done.stdout
    done = bench("--dry-run", "--seconds", "0", "--filter", "causal")
    assert done.returncode == 1 and "not measured: causal 128k 16/16; causal 128k 32/8; causal 64k 16/16" in done.stdout
    for arguments, words in (
        (("--dry-run", "--filter", "nosuch"), "no row is of that name; there are: causal 128k 16/16; "),
        (("--dry-run", "--ranks", "-1"), "--ranks -1; accepted: 1 to any number"),
    ):
        done = bench(*arguments)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_ratios_are_of_one_turn_and_of_the_slowest_rank(program):
    results = {"keys": {}}
    turns = [[(5.0, 15.0), (5.0, 16.0)], [(5.0, 17.0), (4.0, 15.0)], [(5.0, 15.0), (5.0, 15.0)]]
    times = {"one": [[(10.0, 30.0), (11.0, 30.0)]] * 3, "keys": turns}
    found = program.numbers(times, results, 2)
    assert found["one_ms"] == [10, 30] and found["one_ms_by_gpu"] == [40, 41] and found["turns"] == 3
    assert results["keys"]["ms"] == [5, 16] and results["keys"]["efficiency"] == round(40 / 42, 3)
    assert (results["keys"]["least"], results["keys"]["most"]) == (round(40 / 44, 3), 1.0)


def test_the_bias_fits(program):
    """On cards of 80 and 141 GB: the whole bias and its gradient, and a rank's part of both and of what is compared."""
    assert program.bias_length(2, 85_000_000_000) == program.bias_length(2, 150_000_000_000) == 32768
    assert program.bias_length(2, 40_000_000_000) == 16384


def test_memory_is_read_from_what_explain_says(program):
    text = "move: keys\nbuffers of the forward: 100 bytes of keys, 20 bytes of results\nbuffers of the backward: 7 bytes of sums"
    assert [program.named_bytes(text, f"buffers of the {way}") for way in ("forward", "backward")] == [120, 7]
    assert program.named_bytes(text, "kept for the backward") == 0


def test_differences_are_relative(program):
    torch = program.torch
    want = torch.randn(3, 100, 8)
    assert program.difference(want * 1.01, want) == pytest.approx(0.01, rel=1e-4) and program.difference(want, want) == 0
