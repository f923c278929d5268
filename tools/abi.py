#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the C ABI with that of the last release, by libabigail (Debian: abigail-tools).

    tools/abi.py            compares with tests/abi/fovea.abi; ends with 1 where programs that were compiled before would break
    tools/abi.py --write    writes that file anew: part of a release
    tools/abi.py --test     plants changes in c.h, one after the other, and says whether each is found

What may change: structs grow at their end (each says its own size), functions and numbers of enums are added.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "tests/abi/fovea.abi"

# (what, as it stands in c.h, what it becomes, whether compiled programs go on working)
PLANTED = (
    ("a field goes", "  int64_t batch_outer;", "  // int64_t batch_outer;", False),
    ("two fields change places", "  int32_t align;  /* fovea_align */\n  int32_t rng;",
     "  int32_t rng;  /* fovea_align */\n  uint32_t align;", False),
    ("a field comes in between", "  double scale; ", "  double field; double scale; ", False),
    ("a field has another type", "  double softcap;", "  float softcap;", False),
    ("a field comes at the end of another type", "} fovea_tensor;", "  int64_t field;\n} fovea_tensor;", True),
    ("a field comes at the end", "} fovea_problem;", "  int64_t field;\n} fovea_problem;", True),
    ("an argument has another type", "void* workspace, size_t workspace_bytes);",
     "void* workspace, unsigned workspace_bytes);", False),
    ("a status has another number", "FOVEA_OUT_OF_MEMORY = 4,", "FOVEA_OUT_OF_MEMORY = 7,", False),
    ("a status more", "FOVEA_INTERNAL_ERROR = 6", "FOVEA_INTERNAL_ERROR = 6, FOVEA_NEW = 7", True),
    ("a function goes", "FOVEA_API int fovea_num_threads(void);", "", False),
    ("a function more", "FOVEA_API int fovea_num_threads(void);",
     "FOVEA_API int fovea_num_threads(void);\nFOVEA_API int fovea_new(void);", True),
)


def run(*command, **options):
    return subprocess.run([str(part) for part in command], text=True, capture_output=True, **options)


def dump(header: str, output: Path) -> None:
    """The ABI of a library with the functions that this c.h declares. Their bodies are no part of it."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "fovea").mkdir()
        (folder / "fovea/c.h").write_text(header)
        bodies = re.sub(r"/\*.*?\*/", "", header, flags=re.S)
        declared = re.findall(r"^FOVEA_API ([^;]+?)\s*\(([^;]*)\);", bodies, re.M | re.S)
        source = '#include "fovea/c.h"\n' + "".join(
            f"{result}({arguments}) {{ return 0; }}\n" for result, arguments in declared)
        (folder / "abi.c").write_text(source)
        library = folder / "libfovea.so"
        for command in (
            ("gcc", "-std=c99", "-g", "-fPIC", "-shared", "-w", "-I", folder, folder / "abi.c", "-o", library),
            ("abidw", "--headers-dir", folder / "fovea", "--no-corpus-path", "--no-comp-dir-path", "--no-show-locs",
             "--out-file", output, library),
        ):
            done = run(*command)
            if done.returncode != 0:
                sys.exit(f"{command[0]}: {done.stdout}{done.stderr}")


def only_grows(report: str) -> bool:
    """Whether abidiff's report of leaf changes tells of nothing but structs with more fields behind the last. (Its own
    suppressions of that, in version 2.2, suppress fields of other types, too.)"""
    size = 0
    for line in filter(None, map(str.strip, report.splitlines())):
        if grown := re.fullmatch(r"type size changed from (\d+) to \d+ \(in bits\)", line):
            size = int(grown[1])
        elif field := re.fullmatch(r"'.*', at offset (\d+) \(in bits\)", line):
            if int(field[1]) < size or not size:
                return False
        elif re.fullmatch(r"'struct fovea_\w+' changed:", line):
            size = 0
        elif not re.fullmatch(r"\d+ data member insertions?:|.* summary: .*", line):
            return False
    return True


def compare(header: str) -> tuple[bool, str]:
    """Whether programs of the last release go on working, and what is different."""
    with tempfile.TemporaryDirectory() as folder:
        present = Path(folder) / "present.abi"
        dump(header, present)
        done = run("abidiff", "--leaf-changes-only", "--no-added-syms", BASELINE, present)
    if done.returncode & 3:  # of its own, or of how it was called
        sys.exit(f"abidiff: {done.stdout}{done.stderr}")
    return done.returncode == 0 or only_grows(done.stdout), done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="the ABI of now becomes that of the last release")
    parser.add_argument("--test", action="store_true", help="whether planted changes are found")
    arguments = parser.parse_args()
    header = (ROOT / "include/fovea/c.h").read_text()
    if arguments.write:
        dump(header, BASELINE)
        print(f"{BASELINE.relative_to(ROOT)}: {len(BASELINE.read_text().splitlines())} lines")
        return 0
    if arguments.test:
        wrong = 0
        for what, before, after, works in PLANTED:
            assert header.count(before) >= 1, f"c.h has no {before!r}"
            same, text = compare(header.replace(before, after, 1))
            wrong += same != works
            print(f"{'as it should be' if same == works else 'WRONG':16}{'accepted' if same else 'refused':10}{what}")
            if same != works:
                print(text)
        return 1 if wrong else 0
    same, text = compare(header)
    print("" if same else text, "the C ABI is that of the last release, or an extension of it" if same else
          "programs that were compiled with the last release's c.h would break")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
