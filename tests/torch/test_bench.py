# SPDX-License-Identifier: Apache-2.0
"""What bench/gpu refuses on its command line, which needs no GPU, and that host_time.py and fastest.py of bench/torch run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench/gpu"


def bench(program, *arguments, **environment):
    return subprocess.run([sys.executable, BENCH / program, *arguments], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment})  # fmt: skip


@pytest.mark.parametrize("arguments, words", [
    (("--shard", "3"), "--shard: '3'; accepted: I/N with 0 <= I < N"),
    (("--shard", "5/3"), "--shard: '5/3'; accepted: I/N"),
    (("--shard", "0/0"), "--shard: '0/0'; accepted: I/N"),
    (("--after", "nosuch"), "--after 'nosuch': none of the rows"),
    (("--only", "nosuch"), "cuDNN"),
], ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")  # fmt: skip
def test_arguments_of_the_benchmark(arguments, words):
    done = bench("run.py", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr and words in done.stderr, done.stderr


def test_help_lists_the_contenders():
    said = " ".join(bench("run.py", "--help").stdout.split())
    assert "some of: ours, mem-efficient, FlashAttention-2, cuDNN" in said


def test_shards_are_the_rows():
    rows = [bench("run.py", "--group", "dense", "--lines", *more).stdout.splitlines()
            for more in ((), ("--shard", "0/2"), ("--shard", "1/2"))]  # fmt: skip
    assert len(rows[0]) > 2 and sorted(rows[0]) == sorted(rows[1] + rows[2])


def test_host_time_in_pytorch_needs_no_program(tmp_path):
    said = {part: bench("host.py", "--only", part, "--program", str(tmp_path / "none")) for part in ("torch", "calls")}
    assert "--target bench_host" in said["calls"].stderr
    assert said["torch"].returncode == 1 and "no CUDA device that PyTorch sees" in said["torch"].stderr, said["torch"]


def test_host_times_on_the_cpu(tmp_path):
    """Every row is measured, each in the columns that it has."""
    path = tmp_path / "host.json"
    program = BENCH.parent / "torch/host_time.py"
    done = bench(program, "--rounds", "1", "--calls", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["microseconds"] for row in json.loads(path.read_text())["rows"]}
    assert sum("handed back" in name for name in rows) == 2 and all(any(times) for times in rows.values()), rows


def test_the_table_of_what_is_faster_is_measured(tmp_path):
    """Each library computes in its turn."""
    path = tmp_path / "table.json"
    program = BENCH.parent / "torch/fastest.py"
    part = ("--kind", "mask of keys", "--dtype", "float32")
    done = bench(program, *part, "--rounds", "1", "--batch-ms", "0.1", "--output", str(path))
    assert done.returncode == 0, done.stderr
    (section,) = json.loads(path.read_text())["sections"].values()
    assert len(section["rows"]) == 12 + 10 and all(row["fovea_us"] > 0 and row["pytorch_us"] > 0 for row in section["rows"])
    refused = bench(program, *part, "--write")
    assert refused.returncode == 2 and "is measured as a whole" in refused.stderr


# ---- two builds alternately ----


def scripted(seconds):
    """Measurements that were written down: each call gives the next."""
    left = list(seconds)
    return lambda: {"forward": left.pop(0)}


def test_ratios_are_of_one_turn_each():
    sys.path.insert(0, str(BENCH))
    import beside

    # The machine slows down by a factor of ten on its way, which a ratio of medians would see.
    found = beside.compare(scripted([1, 10, 10]), scripted([1.1, 11, 11]))
    assert found["forward"]["ratio"] == pytest.approx(1.1) and "again" not in found["forward"]
    assert "forward 1.100 (1.100 to 1.100)" in beside.line("row", found)


def test_turns_alternate():
    sys.path.insert(0, str(BENCH))
    import beside

    order = []

    def side(name):
        return lambda: order.append(name) or {"forward": 1.0}

    beside.take_turns(3, side("ours"), side("other"))
    assert order == ["ours", "other", "other", "ours", "ours", "other"]


def test_a_row_that_is_slower_is_repeated():
    sys.path.insert(0, str(BENCH))
    import beside

    lucky = beside.compare(scripted([1] * 8), scripted([0.95, 0.97, 1, 1, 1, 1.01, 1, 0.9]))
    slow = beside.compare(scripted([1] * 8), scripted([0.95, 0.97, 1, 0.98, 0.98, 0.98, 1, 0.9]))
    fast = beside.compare(scripted([1] * 3), scripted([0.98, 0.98, 0.98]))
    assert beside.verdict(lucky["forward"]) == 1 and beside.verdict(slow["forward"]) == pytest.approx(0.98)
    assert "forward 0.970 (0.950 to 1.000) again 0.980 (0.900 to 1.000)" in beside.line("slow", slow)
    said = beside.summary({"lucky": lucky, "slow": slow, "fast": fast})
    assert said == ["forward: 3 rows, median 0.980, least 0.980", "slower, under 0.99 in 5 more turns: 1", "  slow, forward: 0.980"]


def test_each_build_is_called_in_its_turn(tmp_path, monkeypatch):
    """By copies of this build: fovea.torch calls the other inside of called() alone, and its problems are not mixed."""
    import ctypes
    import shutil

    import fovea._library
    import torch
    from fovea.torch import _call, _fast, attention

    sys.path.insert(0, str(BENCH))
    import beside

    with pytest.raises(ValueError, match="is the library that is measured; accepted: another build's"):
        beside.Library(fovea._library.path)
    other = beside.Library(Path(shutil.copy(fovea._library.path, tmp_path / "libfovea.so")))
    assert other.lib._handle != fovea._library.lib._handle
    own, kept = _call.lib, _call._kept
    x = torch.randn(1, 2, 16, 24, requires_grad=True)  # no other test's shape
    problems = lambda kept: {id(problem) for each in kept.values() for problem in each}  # noqa: E731
    seen = []  # calls of the other

    def forward(problem, workspace, size):
        seen.append(size)
        return real(problem, workspace, size)

    other.lib.fovea_forward.argtypes = None
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    real, other.lib.fovea_forward = kind(ctypes.cast(other.lib.fovea_forward, ctypes.c_void_p).value), kind(forward)
    with other.called():
        attention(x, x, x)
        assert len(seen) in (1, 2)  # twice where the workspace that is kept was too small
    before = len(seen)
    attention(x, x, x)
    assert len(seen) == before
    other = beside.Library(other.path)
    monkeypatch.setenv("FOVEA_TORCH_FAST", "0")
    with other.called():
        assert _call.lib is other.lib and fovea._library.lib is other.lib
        by_other = torch.autograd.grad(attention(x, x, x).sum(), x)[0]
        assert other.kept and not problems(other.kept) & problems(kept)
    assert _call.lib is own and _call._kept is kept and fovea._library.lib is own
    assert torch.equal(torch.autograd.grad(attention(x, x, x).sum(), x)[0], by_other)
    monkeypatch.undo()
    _fast.load()


@pytest.mark.parametrize("arguments, words", [
    (("--beside", "nosuch.so"), "--beside nosuch.so: no such file; accepted: the libfovea.so of another build"),
    (("--beside", __file__, "--all"), "--beside with --all: it measures fovea alone"),
], ids=lambda x: x[-1] if isinstance(x, tuple) else "")  # fmt: skip
def test_arguments_of_beside(arguments, words):
    done = bench("run.py", *arguments)
    assert done.returncode == 2 and "Traceback" not in done.stderr and words in done.stderr, done.stderr
