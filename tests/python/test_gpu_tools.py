# SPDX-License-Identifier: Apache-2.0
"""What tools/gpu.sh and bench/gpu say where something is missing: no GPU is needed to be told so."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT


def gpu(*arguments, python):
    return subprocess.run([ROOT / "tools/gpu.sh", *arguments], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHON": str(python)})


def played(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_needs_no_device(word):
    done = gpu(word, python="/no/such/python")
    assert done.returncode == 0 and "tools/gpu.sh sanitize [TOOL ...]" in done.stdout and "set -uo" not in done.stdout


def test_a_word_that_is_no_command():
    done = gpu("chekc", python="/no/such/python")
    assert done.returncode == 2 and "tools/gpu.sh check" in done.stdout


def test_what_is_missing_is_told_apart(tmp_path):
    no_torch = played(tmp_path / "no_torch", "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1")
    no_device = played(tmp_path / "no_device", 'case "$2" in *is_available*) exit 1 ;; esac')
    for python, words in (
        ("/no/such/python", "no Python of the name /no/such/python"),
        (no_torch, f"{no_torch} cannot import PyTorch (ModuleNotFoundError: No module named 'torch')"),
        (no_device, f"no CUDA device that the PyTorch of {no_device} sees"),
    ):
        done = gpu("check", python=python)
        assert done.returncode == 1 and words in done.stdout and "PYTHON=..." in done.stdout, done


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is here")
def test_the_benchmark_without_pytorch_says_so():
    done = subprocess.run([sys.executable, ROOT / "bench/gpu/run.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "has no PyTorch" in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_tables_say_how_their_columns_are_measured():
    sys.path.insert(0, str(ROOT / "tools"))
    import tables

    data = {"machine": dict.fromkeys(("gpu", "torch", "cuda", "cudnn"), "x"), "runs": 3}
    row = {"date": "2026-01-01", "commit": "c", "results": {"ours": {"forward_us": 1.0}, "FlexAttention": {"refused": "no"}}}
    assert "repeat with `tools/gpu.sh bench`." in tables.gpu_head(data, [row])
    row["results"]["FlashAttention-4"] = {"forward_us": 1.0}
    assert "repeat with `tools/gpu.sh bench --all`." in tables.gpu_head(data, [row])
    (slow,) = [line for line in (ROOT / "bench/gpu/contenders.py").read_text().splitlines() if line.startswith("SLOW_TO")]
    assert slow == f"SLOW_TO_COMPILE = {tables.SLOW_TO_COMPILE}".replace("'", '"')


def test_results_have_one_row_a_line(tmp_path):
    sys.path.insert(0, str(ROOT / "tools"))
    import records

    data = {"machine": {"gpu": "x"}, "runs": 3, "rows": [{"name": f'"row {n}', "results": {"ours": {"forward_us": 1.5}}} for n in range(3)], "none": []}
    records.write(tmp_path / "new" / "results.json", data)
    written = (tmp_path / "new" / "results.json").read_text()
    assert json.loads(written) == data and sum("forward_us" in line for line in written.splitlines()) == 3, written
    for path in sorted((ROOT / "bench/results").glob("*.json")):
        assert path.read_text() == records.text(json.loads(path.read_text())), f"{path}: not as tools/records.py writes it"


def results(path, speeds, spread, peer=1.0):
    """A file of two rows; `speeds` in TFLOP/s-like units, 1 / microseconds."""
    rows = []
    for name, speed in speeds.items():
        ours = {"forward_us": 1000 / speed}
        if spread:
            ours["forward_range_us"] = [1000 / speed * (1 - spread / 2), 1000 / speed * (1 + spread / 2)]
        rows.append({"name": name, "results": {"ours": ours, "cuDNN": {"forward_us": 1000 / peer}}})
    path.write_text(json.dumps({"rows": rows}))
    return path


def compare(*arguments):
    done = subprocess.run([sys.executable, ROOT / "bench/gpu/compare.py", *map(str, arguments)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_compare_prints_what_moved_beyond_the_runs_own_spread(tmp_path):
    old = results(tmp_path / "old.json", {"a": 1.0, "b": 1.0, "gone": 1.0}, 0.01)
    new = results(tmp_path / "new.json", {"a": 1.1, "b": 1.02}, 0.01)
    code, text = compare(old, new)
    assert code == 0 and "1.100  forward   a" in text and "  b" not in text and "1 of 2 moved; 1 rows are in one file" in text, text
    code, text = compare(old, results(tmp_path / "noisy.json", {"a": 1.1, "b": 1.02}, 0.12))
    assert "0 of 2 moved" in text, text
    code, text = compare(results(tmp_path / "medians.json", {"a": 1.0, "b": 1.0}, 0), new, "--noise", "0.015")
    assert "2 of 2 moved" in text, text  # only medians on one side: --noise decides


def test_compare_takes_out_the_machine_by_a_peer(tmp_path):
    old = results(tmp_path / "old.json", {"a": 1.0, "b": 1.0}, 0)
    new = results(tmp_path / "new.json", {"a": 1.2, "b": 1.5}, 0, peer=1.2)
    assert "2 of 2 moved" in compare(old, new)[1]
    text = compare(old, new, "--beside", "cuDNN")[1]
    assert "1 of 2 moved" in text and "1.250  forward   b" in text, text
    assert "1.200" in compare(old, new, "--of", "cuDNN")[1]


def test_compare_refuses_what_is_no_file_of_results(tmp_path):
    (tmp_path / "no.json").write_text('{"rows": [{}]}')
    good = results(tmp_path / "good.json", {"a": 1.0}, 0)
    for bad in (tmp_path / "no.json", tmp_path / "missing.json"):
        code, text = compare(bad, good)
        assert code == 1 and str(bad) in text and "Traceback" not in text, text
    assert "no row has a time of FA5" in compare(good, good, "--of", "FA5")[1]


def test_the_report_says_of_which_machine_it_is(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tests/gpu')!r}); import run; print(run.machine())"

    def machine(build):
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                              env={**os.environ, "FOVEA_BUILD": str(build)}).stdout

    played(tmp_path / "fovea", "echo 'fovea 0.1.0'; echo 'GPU 0 H200'")
    (tmp_path / "cli").mkdir()
    (tmp_path / "fovea").rename(tmp_path / "cli" / "fovea")
    text = machine(tmp_path)
    assert "fovea explain:\nfovea 0.1.0\nGPU 0 H200" in text and "commit: " in text and "PyTorch:" in text, text
    assert "fovea explain: FileNotFoundError" in machine(tmp_path / "nowhere")


def test_text_of_pictures_is_text():
    for name in ("gpu_dense", "gpu_short"):
        picture = (ROOT / f"docs/images/{name}.svg").read_text()
        assert "TFLOP/s</text>" in picture and ">FlashAttention-4</text>" in picture and "DejaVuSans-" not in picture, name
