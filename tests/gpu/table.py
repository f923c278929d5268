# SPDX-License-Identifier: Apache-2.0
"""The case table, as the command `fovea cases` prints it, and the subset of it that sanitizers run."""

import functools
import re
import subprocess
import sys
from pathlib import Path

from conftest import BUILD
from problem import Problem, parse


@functools.cache
def rows() -> list[Problem]:
    command = BUILD / "cli" / "fovea"
    if not command.exists():
        raise FileNotFoundError(f"{command}: build the target fovea_cli, or say with FOVEA_BUILD where it is built")
    listed = subprocess.run([command, "cases"], capture_output=True, text=True, check=True).stdout.splitlines()
    table = [parse(line) for line in listed]
    for number, problem in enumerate(table, 1):
        problem.case_seed = number
    return table


def on_device(p: Problem) -> Problem:
    """A row of fp64, which CUDA has not, as one of fp32."""
    if p.type != "fp64":
        return p
    narrow = parse(re.sub(r"\bfp64\b", "fp32", p.line()))
    narrow.case_seed = p.case_seed
    return narrow


def features_of(p: Problem) -> set[str]:
    """What a sanitizer should have seen once; sizes and lengths are left out, their kinds are not."""
    words = set()
    for word in p.line().split():
        key, _, value = word.partition("=")
        if key in ("bwd", "b", "sq", "sk", "seed", "offset") or key.startswith(("seqs", "total", "max", "used")):
            continue
        words.add(word)
    words.add(f"batch levels={len(p.batch)}")
    words.add(f"rows={'packed' if p.packed else 'dense'}")
    words.update(f"used_{side}" for side in "qk" if getattr(p, f"used_{side}") is not None)
    if re.search(r" mask=\S*,1,k\b", p.line()) and p.sk >= 1024:
        words.add("a mask of many keys")
    return words


# Kernels of which no row of the table is large enough, or wide enough.
LARGER = [
    "bwd b=1 hq=5 sq=100 sk=1500 d=64 bf16 sink",  # the last tiles in parts
    "bwd b=1 hq=1 sq=300 sk=2300 d=128 fp16 wide=out",  # keys in parts
    "bwd b=1 hq=140 sq=200 sk=200 d=128 bf16",  # equal tiles, more than multiprocessors
    "bwd b=1 hq=34 sq=700 sk=512 d=128 bf16",  # the last blocks of keys in parts
    "bwd b=2 hq=2 hk=1 sq=150 sk=200 d=512 bf16 causal",  # pairs of blocks
    "bwd b=2 hq=2 sq=140 sk=200 d=320 dv=300 bf16 bias=b,h,q,k mask=b,1,q,k dropout=0.1 sink",
    "bwd b=3 hq=2 d=512 bf16 seqs_q=150,0,130 seqs_k=170,33,190 window=40,0",
    "bwd b=1 hq=1 sq=200 sk=2300 d=512 bf16 wide=out",
    "bwd b=16 hq=4 sq=256 sk=256 d=64 bf16 bias=1,h,q,k",  # sums of a bias in memory
    "bwd b=4 hq=40 sq=150 sk=201 d=128 bf16 bias=1,h,q,k",  # and in clusters, whose rows begin anywhere
    "bwd b=2 hq=2 sq=199 sk=201 d=64 bf16 bias=b,h,q,k",  # rows that begin anywhere
    "bwd b=2 hq=2 sq=200 sk=77 d=64 bf16",  # one launch
    "bwd b=9 hq=4 d=128 bf16 causal seqs_q=300x9 seqs_k=300x9 used_k=300,0,1,100,128,129,300,256,5",  # the last heads by turns
]


@functools.cache
def sanitize_rows(most: int = 60) -> set[int]:
    """Greedily: the row that adds most features for its size, until each feature value of a CUDA row is there."""
    table = rows()
    size = lambda p: p.batch_size * p.hq * (p.sq + 16) * (p.sk + 16) * (p.d + p.dv)  # noqa: E731
    wanted = {n: features_of(p) for n, p in enumerate(table) if p.type != "fp64" and size(p) < 8e7}
    missing = set().union(*wanted.values())
    chosen: set[int] = set()
    while missing and len(chosen) < most:
        best = max(wanted, key=lambda n: (len(wanted[n] & missing) / size(table[n]) ** 0.25, -n))
        chosen.add(best)
        missing -= wanted.pop(best)
    return chosen


def nvrtc() -> str:
    """The NVRTC that comes with PyTorch: for the command, which does not look into Python's folders."""
    import torch

    found = sorted(Path(torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.*"))
    return str(found[-1]) if found else ""


def lines_of_tests() -> list[str]:
    """Of the tests that have problem lines besides the case table's."""
    import test_backward_edges
    import test_determinism
    import test_few_keys
    import test_memory
    import test_odd_rows
    import test_peers
    import test_random
    import test_shared_bias
    import test_split_keys
    import test_wide

    random = [test_random.random_problem(seed).line() for seed in range(test_random.COUNT)]
    edges = [f"bwd {line}" for lines in (test_backward_edges.SHAPES, test_backward_edges.FULL, test_backward_edges.FEW) for line in lines]
    wide = [*(p.line() for p in test_wide.wide_rows()), *test_wide.LARGER]
    ways = [*test_few_keys.LINES, *test_shared_bias.LINES, *test_split_keys.LINES]
    others = [*wide, *ways, *test_determinism.LINES, *test_determinism.LONGER, *test_memory.LINES, *test_odd_rows.LINES]
    return [*random, *test_peers.LINES.values(), *edges, *others]


if __name__ == "__main__":  # the sanitizers' rows for `fovea precompile`; --tests: the other tests'; --nvrtc
    if "--nvrtc" in sys.argv:
        print(nvrtc())
    else:
        lines = lines_of_tests() if "--tests" in sys.argv else [*(rows()[n].line() for n in sorted(sanitize_rows())), *LARGER]
        for line in lines:
            print(re.sub(r" (values|skew)=\S+", "", line))
