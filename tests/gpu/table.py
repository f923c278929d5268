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
        lines = lines_of_tests() if "--tests" in sys.argv else [rows()[n].line() for n in sorted(sanitize_rows())]
        for line in lines:
            print(re.sub(r" (values|skew)=\S+", "", line))
