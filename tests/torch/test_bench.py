# SPDX-License-Identifier: Apache-2.0
"""What bench/gpu refuses on its command line, which needs no GPU."""

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
