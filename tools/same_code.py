#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether two trees compile to the same GPU machine code. No GPU is needed.

    tools/same_code.py --save /tmp/before.gz                    what the plans of build/ compile now
    tools/same_code.py --old /tmp/before.gz                     after an edit and a build: what differs
    tools/same_code.py --old ../main/build --filter sm90_backward --all
    tools/same_code.py --old /tmp/before.gz --spec alibi        kernels with one field alone
    tools/same_code.py --old /tmp/before.gz --line 'bwd b=4 hq=16 sq=4096 sk=4096 d=128 bf16' --arch sm_90

Kernels are those that plans take for the case table, the golden plans, the GPU benchmark's rows and
tests/kernels/problems.txt. Two of them are compared where the same problem on the same architecture takes them in the
same place, whatever they are called. What the preprocessor makes the same text of is not compiled: a comment or a file
that moves changes nothing. Of the rest a sample is compiled, of every kernel some, --all of them if asked for.

  same machine code      byte by byte
  same opcodes           in the same order; registers, constants or addresses differ
  different              registers, spills, local memory, serialised products, and the first opcodes that differ

Exit code 1 if a kernel is different (with --strict also where only the opcodes are the same), or does not compile.
"""

import argparse
import difflib
import random
import re
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path

import machine_code
from machine_code import Listing, compile_all


def listing_of(given, architectures, lines):
    path = Path(given)
    if path.is_file() and path.suffix == ".gz":
        return Listing.of_file(path)
    return Listing.of_build(path.parent if path.is_file() else path, architectures, lines, table=lines is None)


def pairs_of(old, new, architectures):
    """{(number in old, number in new): [(architecture, problem line), ...]}, and what has no counterpart."""
    pairs, alone = defaultdict(list), []
    before = {(architecture, line): kernels for architecture, line, kernels in old.uses}
    for architecture, line, after in new.uses:
        kernels = before.get((architecture, line))
        if kernels is None or architecture not in architectures:
            continue
        if len(kernels) == len(after):
            found = list(zip(kernels, after))
        else:  # by name, those of one name in their order

            def named(listing, numbers):
                seen = Counter()
                for number in numbers:
                    seen[listing.name(number)] += 1
                    yield (listing.name(number), seen[listing.name(number)]), number

            left, right = dict(named(old, kernels)), dict(named(new, after))
            found = [(left[name], right[name]) for name in left if name in right]
            alone += [(f"{architecture} {line}", f"{name}, only {where}")
                      for names, others, where in ((left, right, "before"), (right, left, "after"))
                      for name, _ in names if (name, _) not in others]  # fmt: skip
        for pair in found:
            pairs[pair].append((architecture, line))
    return pairs, alone


def sampled(pairs, name_of, count, seed):
    """So many, in turn of every kernel and architecture."""
    groups = defaultdict(list)
    for pair in sorted(pairs):
        groups[name_of(pair)].append(pair)
    chooser = random.Random(seed)
    for group in groups.values():
        chooser.shuffle(group)
    chosen = []
    while len(chosen) < count and any(groups.values()):
        for group in groups.values():
            if group and len(chosen) < count:
                chosen.append(group.pop())
    return chosen


def numbers(result):
    return (f"{result['registers']:4} registers {result['spills']:5} spilt {result['stack']:5} local "
            f"{len(result['losses'])} serialised {result['instructions']:6} instructions  "
            f"{' '.join(sorted(set(result['losses'])))}")  # fmt: skip


def first_difference(old, new, context):
    diff = list(difflib.unified_diff(old, new, "before", "after", lineterm="", n=3))[2:]
    more = len(diff) - context
    return diff[:context] + ([f"... {more} more lines"] if more > 0 else [])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", metavar="BUILD", help="a build directory, its libfovea.so, or a file of --save")
    parser.add_argument("--new", metavar="BUILD", default="build", help="the same (build)")
    parser.add_argument("--save", metavar="FILE.gz", help="keep what the plans of --new compile, text and all, and end")
    parser.add_argument("--arch", default="sm_80,sm_90", help="architectures (sm_80,sm_90; sm_90a's kernels are sm_90's)")
    parser.add_argument("--filter", default="", metavar="TEXT", help="kernels whose name has this (either name)")
    parser.add_argument("--spec", default="", metavar="REGEX", help="kernels whose Spec matches: 'alibi.*dropout'")
    parser.add_argument("--line", action="append", help="this problem alone, instead of all; may be repeated")
    parser.add_argument("--sample", type=int, default=40, metavar="N", help="how many are compiled (40)")
    parser.add_argument("--all", action="store_true", help="compile all whose text changed")
    parser.add_argument("--seed", type=int, help="of the sample (a new one each time, printed)")
    parser.add_argument("--jobs", type=int, default=0, help="compilations at once (all cores)")
    parser.add_argument("--context", type=int, default=24, metavar="N", help="lines of opcodes shown of a difference (24)")
    parser.add_argument("--strict", action="store_true", help="renamed registers count as different")
    given = parser.parse_args()
    # sm_90a is what some kernels of a plan for sm_90 are compiled for.
    architectures = [name.removesuffix("a") for name in given.arch.split(",")]

    new = listing_of(given.new, architectures, given.line)
    if given.save:
        new.save(given.save)
        print(f"{given.save}: {len(new.kernels)} kernels of {len(new.uses)} plans")
        return 0
    if not given.old:
        parser.error("--old or --save is needed")
    old = listing_of(given.old, architectures, given.line)
    pairs, alone = pairs_of(old, new, architectures)
    if not pairs:
        raise SystemExit("no problem in common: nothing was compared")
    pairs = {(a, b): uses for (a, b), uses in pairs.items() if given.filter in old.name(a) or given.filter in new.name(b)}
    if not pairs:
        raise SystemExit(f"no kernel's name has '{given.filter}'; there are: "
                         + ", ".join(sorted({new.name(b) for b in range(len(new.kernels))})))
    specs = {(a, b): old.kernels[a]["argument"] + "\n" + new.kernels[b]["argument"] for a, b in pairs}
    pairs = {pair: uses for pair, uses in pairs.items() if re.search(given.spec, specs[pair])}
    if not pairs:
        raise SystemExit(f"no kernel's Spec matches '{given.spec}'; one of them is {next(iter(specs.values()))}")
    same_text = [pair for pair in pairs if old.key(pair[0]) == new.key(pair[1])]
    changed = {pair: uses for pair, uses in pairs.items() if old.key(pair[0]) != new.key(pair[1])}
    name_of = lambda pair: f"{new.kernels[pair[1]]['architecture']} {new.name(pair[1])}"  # noqa: E731
    seed = random.randrange(10**6) if given.seed is None else given.seed
    chosen = list(changed) if given.all else sampled(changed, name_of, given.sample, seed)
    print(f"{len(pairs)} pairs of kernels: {len(same_text)} of the same text; {len(changed)} changed, {len(chosen)} of "
          f"them compared" + ("" if given.all or len(chosen) == len(changed) else f" (--seed {seed}; --all takes all)")
          + f", by NVRTC {machine_code.compiler()[1]}", flush=True)  # fmt: skip
    for where, what in alone[:10]:
        print(f"  {what}: {where}")
    if len(alone) > 10:
        print(f"  ... and {len(alone) - 10} more without a counterpart")

    wanted = sorted({(0, a) for a, _ in chosen} | {(1, b) for _, b in chosen}, key=lambda one: one[1])
    results, counts, ratios, bad = {}, Counter(), [], []
    partner = defaultdict(list)
    for a, b in chosen:
        partner[0, a].append((a, b))
        partner[1, b].append((a, b))

    def done(one, result, error):
        results[one] = result
        if error:
            counts["does not compile"] += 1
            print(f"{'after' if one[0] else 'before'}: {error}", flush=True)
        for pair in partner[one]:
            left, right = results.get((0, pair[0])), results.get((1, pair[1]))
            if left and right:
                check_pair(pair, left, right)
        if sys.stderr.isatty():
            print(f"\r{len(results)} of {len(wanted)} compiled", end="", file=sys.stderr)

    def check_pair(pair, left, right):
        ratios.append(right["seconds"] / max(left["seconds"], 0.001))
        facts = ("registers", "spills", "stack", "losses")
        if left["code"] == right["code"] and all(left[fact] == right[fact] for fact in facts):
            counts["same machine code"] += 1
            return
        same = left["opcodes"] == right["opcodes"]
        kind = "same opcodes" if same else "different"
        counts[kind] += 1
        if same and all(left[fact] == right[fact] for fact in facts) and not given.strict:
            return
        bad.append(pair)
        architecture, line = changed[pair][0]
        print(f"\n{kind}: {name_of(pair)} of {architecture} '{line}'"
              + (f" and {len(changed[pair]) - 1} more" if len(changed[pair]) > 1 else ""))  # fmt: skip
        print(f"  before {numbers(left)}\n  after  {numbers(right)}")
        for difference in [] if same else first_difference(left["list"], right["list"], given.context):
            print(f"    {difference}")
        sys.stdout.flush()

    compile_all((old, new), wanted, given.jobs, done)
    names = ["same machine code", "same opcodes", "different", "does not compile"]
    print(", ".join(f"{counts[name]} {name}" for name in names if counts[name]) or "nothing to compile: the text is the same")
    if len(ratios) > 2:
        print(f"CPU seconds to compile, after over before: median {statistics.median(ratios):.2f}, largest {max(ratios):.2f}")
    return 1 if bad or counts["does not compile"] else 0


if __name__ == "__main__":
    sys.exit(main())
