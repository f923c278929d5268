#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The manifest of GPU kernels, tests/kernels/manifest.txt: what NVRTC makes of every kernel that plans take.

    tools/kernels.py             compile what changed, write it; goes on where it was stopped (make kernels)
    tools/kernels.py --status    how much is current
    tools/kernels.py --check     what CI does: limits of every row, what is not current (a sample, if it is much), and a
                                 random sample of what is, which must agree

A row is a kernel: architecture, name, the first problem line that takes it; registers, bytes of spills and of local
memory, products that were serialised, instructions, the hash of its opcodes; last the hash of what was compiled: text
(without comments, and whatever file it stands in), template argument, options, and versions of NVRTC and nvdisasm. "The
same code" means that the column of opcodes is unchanged. sm_80 and sm_90 (sm_90a) are there in full, newer
architectures by sample. Problems are those that tools/same_code.py takes, too. No GPU is needed.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import machine_code
from machine_code import ROOT, Listing, compile_all, digest

MANIFEST = ROOT / "tests" / "kernels" / "manifest.txt"
FULL = ("sm_80", "sm_90")
SAMPLED = ("sm_89", "sm_100", "sm_103", "sm_120")
SAMPLE = 60  # kernels of each of those
FACTS = ("registers", "spills", "stack", "serialised", "instructions", "opcodes")
HEADER = "# architecture  kernel  registers spills local serialised instructions  opcodes  compiled-from  problem\n"


def facts_of(result):
    return (result["registers"], result["spills"], result["stack"], len(result["losses"]), result["instructions"],
            result["opcodes"][:16])  # fmt: skip


class Kernels:
    """The kernels of a listing by the manifest's keys: (architecture, name, problem line)."""

    def __init__(self, listing):
        self.listing = listing
        self.numbers = {}
        known, seen = set(), Counter()
        groups = defaultdict(list)
        for architecture, line, numbers in self.listing.uses:
            for number in numbers:
                if number not in known:
                    known.add(number)
                    name = self.listing.name(number)
                    code = self.listing.kernels[number]["architecture"]
                    seen[code, name, line] += 1
                    of_line = seen[code, name, line]  # kernels of one name: others where addresses are not aligned
                    key = (code, name + (f"/{of_line}" if of_line > 1 else ""), line)
                    if architecture in FULL:
                        self.numbers[key] = number
                    else:
                        groups[architecture, name].append((digest(" ".join(key)), key, number))
        for architecture in SAMPLED:
            # The same ones, as long as they are there: in turn of every kernel those of the least hash.
            turns = [sorted(group) for (of, _), group in sorted(groups.items()) if of == architecture]
            chosen = sorted((place, one) for group in turns for place, one in enumerate(group))[:SAMPLE]
            self.numbers.update({key: number for _, (_, key, number) in chosen})

    def hash_of(self, key):
        return self.listing.key(self.numbers[key])[:16]

    def faults(self, key, facts):
        kernel = self.listing.kernels[self.numbers[key]]
        registers, spills, local, serialised, *_ = facts
        if registers > kernel["registers"]:
            yield f"{registers} registers a thread; its blocks have {kernel['registers']}"
        if spills > kernel["spill"]:
            yield f"{spills} bytes spilt; accepted: {kernel['spill']}"
        if local > kernel["local"]:
            yield f"{local} bytes of local memory; accepted: {kernel['local']}"
        if serialised:
            yield f"{serialised} messages of serialised products or an ignored setmaxnreg"


def read():
    """{key: (facts, hash of what was compiled)}"""
    rows = {}
    for line in MANIFEST.read_text().splitlines() if MANIFEST.exists() else []:
        if not line.startswith("#"):
            architecture, name, *numbers, opcodes, made_from, problem = line.split(None, 9)
            rows[architecture, name, problem] = ((*map(int, numbers), opcodes), made_from)
    return rows


def write(rows):
    def text(key):
        architecture, name, problem = key
        (registers, spills, local, serialised, instructions, opcodes), made_from = rows[key]
        return (f"{architecture:6} {name:22} {registers:3} {spills:3} {local:3} {serialised} {instructions:5} {opcodes} "
                f"{made_from} {problem}\n")  # fmt: skip

    new = MANIFEST.with_suffix(".new")
    new.write_text(HEADER + "".join(text(key) for key in sorted(rows)))
    os.replace(new, MANIFEST)


def current_of(kernels, rows):
    return {key for key in kernels.numbers if key in rows and rows[key][1] == kernels.hash_of(key)}


def order(keys):
    """In turn of every kernel and architecture, so that whatever comes first is spread over all."""
    groups = defaultdict(list)
    for key in sorted(keys):
        groups[key[0], key[1].split("/")[0]].append(key)
    chooser = random.Random(0)
    places = []
    for group in groups.values():
        chooser.shuffle(group)
        places += [((place + 0.5) / len(group), key) for place, key in enumerate(group)]
    return [key for _, key in sorted(places)]


def compile_keys(kernels, keys, jobs, fresh, each):
    """each(key, facts, error) for all; shows how far it is."""
    key_of = {(0, kernels.numbers[key]): key for key in keys}
    begin = time.monotonic()
    finished = cpu = 0

    def done(one, result, error):
        nonlocal finished, cpu
        finished += 1
        cpu += result["seconds"] if result else 0
        each(key_of[one], facts_of(result) if result else None, error)
        left = (time.monotonic() - begin) / finished * (len(keys) - finished)
        if sys.stderr.isatty() or finished % 100 == 0 or finished == len(keys):
            print(f"{finished} of {len(keys)} kernels, {cpu:.0f} CPU seconds, {left / 60:.0f} minutes left",
                  end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)  # fmt: skip

    compile_all((kernels.listing,), list(key_of), jobs, done, fresh)
    if sys.stderr.isatty():
        print(file=sys.stderr)


def refresh(kernels, rows, current, jobs):
    rows = {key: row for key, row in rows.items() if key in kernels.numbers}
    stale = [key for key in kernels.numbers if key not in current]
    print(f"{len(current)} of {len(kernels.numbers)} kernels are current; {len(stale)} are compiled by NVRTC "
          f"{machine_code.compiler()[1]}", flush=True)  # fmt: skip
    written, faults, changed = time.monotonic(), 0, 0

    def each(key, facts, error):
        nonlocal written, faults, changed
        if error:
            faults += 1
            print(error, flush=True)
            return
        if key in rows and rows[key][0][-1] != facts[-1]:
            changed += 1
        rows[key] = (facts, kernels.hash_of(key))
        for fault in kernels.faults(key, facts):
            faults += 1
            print(f"{' '.join(key)}: {fault}", flush=True)
        if time.monotonic() - written > 20:
            write(rows)
            written = time.monotonic()

    try:
        compile_keys(kernels, order(stale), jobs, False, each)
    finally:
        write(rows)
    print(f"{MANIFEST}: {len(rows)} kernels; of those that were there before {changed} have other code")
    return faults


def check(kernels, rows, current, jobs, most, agree, seed):
    """Three checks; how many failed."""
    keys = set(kernels.numbers)
    stale = order([key for key in keys if key not in current])
    taken = stale[:most]
    failed, faults, spills = 0, [], 0
    for key in sorted(current):
        spills += rows[key][0][1] > 0
        faults += [f"{' '.join(key)}: {fault}" for fault in kernels.faults(key, rows[key][0])]
    print(f"manifest: {len(current)} of {len(keys)} kernels are current, {spills} of them with a spill; "
          f"{len(set(rows) - keys)} rows are of kernels that no plan takes")  # fmt: skip
    failed += report("rows of the manifest", faults)

    faults.clear()

    def check_row(key, facts, error):
        faults.extend([error] if error else [f"{' '.join(key)}: {fault}" for fault in kernels.faults(key, facts)])

    compile_keys(kernels, taken, jobs, True, check_row)
    print(f"without a current row: {len(stale)}; {len(taken)} of them compiled, {len(stale) - len(taken)} left "
          "(make kernels compiles all)" if stale else "every kernel has a current row")  # fmt: skip
    failed += report("kernels without a current row", faults)

    faults.clear()
    chosen = random.Random(seed).sample(sorted(current), min(agree, len(current)))

    def same(key, facts, error):
        if error or facts != rows[key][0]:
            faults.append(error or f"{' '.join(key)}: {dict(zip(FACTS, facts))}, the manifest has {rows[key][0]}")

    compile_keys(kernels, chosen, jobs, True, same)
    print(f"{len(chosen)} with a current row compiled again (--seed {seed})")
    failed += report("rows that do not agree", faults)
    return failed


def report(what, faults):
    for fault in faults[:20]:
        print(f"  {fault}")
    print(f"{what}: {len(faults) or 'no'} faults", flush=True)
    return bool(faults)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="build directory (build)")
    parser.add_argument("--jobs", type=int, default=0, help="compilations at once (all cores)")
    parser.add_argument("--status", action="store_true", help="only say how much is current")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where something is wrong")
    parser.add_argument("--most", type=int, default=400, metavar="N", help="--check: how many without a current row (400)")
    parser.add_argument("--agree", type=int, default=60, metavar="N", help="--check: how many with a current one (60)")
    parser.add_argument("--seed", type=int, help="--check: of the random sample (a new one each time, printed)")
    given = parser.parse_args()
    kernels, rows = Kernels(Listing.of_build(given.build, FULL + SAMPLED)), read()
    current = current_of(kernels, rows)
    if given.status:
        print(f"{len(current)} of {len(kernels.numbers)} kernels are current")
        return 0
    if given.check:
        seed = random.randrange(10**6) if given.seed is None else given.seed
        return 1 if check(kernels, rows, current, given.jobs, given.most, given.agree, seed) else 0
    return 1 if refresh(kernels, rows, current, given.jobs) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped; what was compiled is kept")
