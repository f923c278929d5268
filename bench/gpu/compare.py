#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares two files of results and prints the rows whose speed changed by more than noise.

Each row is compared with its own repetitions: a row has moved if its median changed by more than the repetitions of both
files were apart, but at least by --noise. Files that were written before repetitions were recorded have only medians; then
--noise alone decides. With --beside the speeds are first divided by a peer's of the same file, which takes out that one
machine is faster than another.

examples:
  bench/gpu/compare.py old.json bench/results/gpu.json
  git show HEAD~3:bench/results/gpu.json > old.json; bench/gpu/compare.py old.json bench/results/gpu.json --beside cuDNN
  bench/gpu/compare.py old.json new.json --of cuDNN         how far the same peer moved: the machines' difference
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path

WAYS = ("forward", "backward")


def timing(row: dict, name: str, way: str) -> tuple[float, float] | None:
    """(microseconds, how far apart the repetitions were, as a part of that) of a contender, or None."""
    result = row["results"].get(name, {})
    median = result.get(f"{way}_us")
    if not median:
        return None
    least, most = result.get(f"{way}_range_us") or (median, median)
    return median, (most - least) / median


def changes(old: dict, new: dict, name: str, beside: str, noise: float) -> list[tuple]:
    """(row, way, speed new over old, noise, moved) of every row that both files have."""
    rows = {row["name"]: row for row in old["rows"]}
    found = []
    for row in new["rows"]:
        before = rows.get(row["name"])
        for way in WAYS if before else ():
            pairs = [(timing(before, one, way), timing(row, one, way)) for one in filter(None, (name, beside))]
            if not all(a and b for a, b in pairs):
                continue
            ratio = pairs[0][0][0] / pairs[0][1][0]
            if beside:
                ratio *= pairs[1][1][0] / pairs[1][0][0]
            allowed = max(noise, sum(one[1] for pair in pairs for one in pair))
            found.append((row["name"], way, ratio, allowed, abs(math.log(ratio)) > math.log1p(allowed)))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--of", default="ours", metavar="NAME", help="the contender that is compared (ours)")
    parser.add_argument("--beside", default="", metavar="NAME", help="compare the speed relative to this contender's")
    parser.add_argument("--noise", type=float, default=0.03, help="what is noise in any case, as a part (0.03)")
    parser.add_argument("--all", action="store_true", help="print rows that did not move, too")
    options = parser.parse_args()
    files = []
    for path in (options.old, options.new):
        try:
            files.append(json.loads(path.read_text()))
            assert all("results" in row for row in files[-1]["rows"])
        except (OSError, ValueError, KeyError, AssertionError, TypeError) as error:
            sys.exit(f"{path}: not a file of results that bench/gpu/run.py writes ({type(error).__name__}: {error})")
    old, new = files
    found = changes(old, new, options.of, options.beside, options.noise)
    if not found:
        sys.exit(f"no row has a time of {options.of}" + (f" and {options.beside}" if options.beside else "") + " in both files")
    moved = [change for change in found if change[-1]]
    for name, way, ratio, allowed, is_moved in sorted(found if options.all else moved, key=lambda change: change[2]):
        print(f"{ratio:6.3f}  {way:8}  {name}  (noise {allowed:.3f}){'' if is_moved or not options.all else '  level'}")
    for way in WAYS:
        ratios = [ratio for _, one, ratio, _, _ in found if one == way]
        if ratios:
            print(f"{way}: geometric mean {math.exp(statistics.fmean(map(math.log, ratios))):.3f} of {len(ratios)} rows, new speed over old")
    missing = {row["name"] for row in old["rows"]} ^ {row["name"] for row in new["rows"]}
    print(f"{len(moved)} of {len(found)} moved" + (f"; {len(missing)} rows are in one file only" if missing else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
