#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the GPU tests with pytest, spread over processes that share the device (most of a first run is compilation,
which needs no GPU), then those that need the device to themselves; prints what failed, by feature, last.

A process that a fault of the device has made useless is started again behind the test that did it. Tests that found no memory
beside those of other processes run once more, by themselves.

examples:
  tests/gpu/run.py                            everything
  tests/gpu/run.py -k test_row --seconds 120  the case table, as much of it as two minutes allow
  tests/gpu/run.py --alone --seconds 120      what needs the device to itself (memory, tensors past 2^31), one after another
  tests/gpu/run.py --summary summary.md       what failed, in a file as well
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STICKY = 70  # conftest.py


class Shard:
    """One process of pytest, and its successors."""

    def __init__(self, command: list, report: Path) -> None:
        self.command = command
        self.report = report
        self.log = report.with_suffix(".log")
        self.died: list[str] = []
        self.start("")

    def start(self, after: str) -> None:
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [*self.command, "--report", self.report, *(["--after", after] if after else [])],
                stdout=log, stderr=subprocess.STDOUT, env={"OMP_NUM_THREADS": "2", **os.environ},  # there are many
            )  # fmt: skip

    def lines(self) -> list[dict]:
        if not self.report.exists():
            return []
        return [json.loads(line) for line in self.report.read_text().splitlines()]

    def finished(self) -> bool:
        code = self.process.poll()
        if code is None:
            return False
        at_file = self.report.with_suffix(".at")
        if code not in (0, 1, 5) and len(self.died) < 40 and at_file.exists():  # 5: no test left
            at = at_file.read_text()
            at_file.unlink()
            self.died.append(at)
            if code != STICKY:  # it could not say so itself
                line = {"test": at, "outcome": "failed", "why": f"the process ended with {code}"}
                with open(self.report, "a") as file:
                    file.write(json.dumps(line) + "\n")
            self.start(at)
            return False
        return True


def launch(shards: int, arguments: list, expression: str, folder: Path, name: str, tests: list[str] | None = None) -> list[Shard]:
    base = [sys.executable, "-m", "pytest", "-q", "-rN", "--tb=short", "-p", "no:cacheprovider", *(tests or [HERE]), *arguments]
    return [
        Shard([*base, "-m", expression, "--shard", f"{n}/{shards}"], folder / f"{name}{n}.json") for n in range(shards)
    ]


def wait(running: list[Shard], deadline: float, started: float) -> bool:
    """Until all are done, or the deadline; prints progress."""
    shown = 0.0
    while not all([shard.finished() for shard in running]):
        now = time.monotonic()
        if now > deadline:
            for shard in running:
                if shard.process.poll() is None:
                    shard.process.kill()
            return False
        if now - shown > 15:
            shown = now
            outcomes = collections.Counter(line["outcome"] for shard in running for line in shard.lines())
            print(f"{now - started:5.0f} s: {dict(outcomes)}", flush=True)
        time.sleep(0.2)
    return True


def words(line: str) -> set[str]:
    found = set()
    for word in line.split():
        key, _, value = word.partition("=")
        if key in ("bwd", "seed", "offset", "b", "sq", "sk") or key.startswith(("seqs", "total", "max")):
            continue
        found.add(key if key.startswith(("used", "window", "scale", "softcap")) else word)
    found.add("packed" if "seqs_q" in line else "dense")
    found.add("two-level" if re.search(r"b=\d+x", line) else "one level")
    return found


def machine() -> str:
    """What the report is of: commit, PyTorch, and what the command says of fovea, driver, GPU and NVRTC."""
    build = Path(os.environ.get("FOVEA_BUILD", HERE.parents[1] / "build"))
    commands = {
        "commit": ["git", "-C", HERE, "describe", "--always", "--dirty"],
        "PyTorch": [sys.executable, "-c", "import torch; print(torch.__version__)"],
        "fovea explain": [build / "cli" / "fovea", "explain"],
    }
    text = []
    for name, command in commands.items():
        try:
            done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=60)
            said = (done.stdout if done.returncode == 0 else done.stderr).strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            said = f"{type(error).__name__}: {error}"
        text.append(f"{name}:{' ' if chr(10) not in said else chr(10)}{said}")
    return "\n".join(text)


def summary(lines: list[dict], complete: bool, seconds: float, most: int) -> str:
    """Counts, then failures by kind, by feature and one by one."""
    outcomes = collections.Counter(line["outcome"] for line in lines)
    text = [f"{outcomes['passed']} passed, {outcomes['failed']} failed, {outcomes['skipped']} skipped in {seconds:.0f} s"]
    if not complete:
        text[0] += "; NOT ALL RAN: the time was up"
    rows = [line for line in lines if "test_row[" in line["test"] and line["outcome"] != "skipped"]
    if rows:
        ways = [f"{way} {sum(bool(row.get(way)) for row in rows)}" for way in ("forward", "backward", "captured")]
        text.append(f"rows of the case table right: {', '.join(ways)} of {len(rows)}")
    slowest = sorted(lines, key=lambda line: -line["seconds"] if "seconds" in line else 0)[:8]
    text.append("slowest: " + ", ".join(f"{line['test'].split('::')[-1]} {line.get('seconds', 0):.0f} s" for line in slowest))
    failed = [line for line in lines if line["outcome"] == "failed"]
    if not failed:
        return "\n".join(text)
    kinds = collections.Counter()
    for line in failed:
        first = [part for part in line.get("why", "?").splitlines() if part and not part.startswith(("bwd", "assert not"))]
        for part in first or ["?"]:
            kinds[re.sub(r"[-+]?\d[\d.e+-]*|0x[0-9a-f]+|'[^']*'", "#", part)[:220]] += 1
    text += ["", "by message:"] + [f"{n:6} {kind}" for kind, n in kinds.most_common(25)]
    with_line = [line for line in lines if "line" in line and line["outcome"] != "skipped"]
    for way in ("forward", "backward"):
        total, wrong = collections.Counter(), collections.Counter()
        for line in with_line:
            for word in words(line["line"]):
                total[word] += 1
                wrong[word] += not line.get(way)
        share = sum(not line.get(way) for line in with_line) / max(len(with_line), 1)
        table = sorted(((wrong[word] / total[word], word) for word in total if total[word] >= 4), reverse=True)
        shown = [f"{word} {wrong[word]}/{total[word]}" for part, word in table if part > 1.15 * share][:30]
        text += ["", f"{way}: {share:.2f} fail; more than the rest: " + ("; ".join(shown) or "none")]
    text += ["", "failures, smallest first:"]
    for line in sorted(failed, key=lambda line: len(line.get("why", "")))[:most]:
        text.append(f"- {line['test'].split('/')[-1]}: {line.get('why', '?')[:900]}")
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=1e9, help="stop then, and say so")
    parser.add_argument("--summary", type=Path, help="write the report there: this machine, and the summary with every failure")
    parser.add_argument("--most", type=int, default=15, help="failures to print (15)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--no-alone", action="store_true", help="leave out what needs the device to itself")
    which.add_argument("--alone", action="store_true", help="nothing but what needs the device to itself, in one process")
    options, arguments = parser.parse_known_args()
    started = time.monotonic()
    deadline = started + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        shards = [] if options.alone else launch(options.processes, arguments, "not alone", Path(folder), "shard")
        complete = wait(shards, deadline, started)
        lines = [line for shard in shards for line in shard.lines()]
        crowded = {line["test"] for line in lines if line.get("why", "").startswith("CUDA out of memory")}
        if complete and crowded:
            print(f"{len(crowded)} found no memory beside the others: once more", flush=True)
            ids = [f"{HERE.parents[1]}/{test}" for test in sorted(crowded)]
            again = launch(1, [], "not alone", Path(folder), "again", ids)
            complete = wait(again, deadline, started)
            shards += again
            lines = [line for line in lines if line["test"] not in crowded] + again[0].lines()
        if complete and not options.no_alone:
            alone = launch(1, arguments, "alone", Path(folder), "alone")
            complete = wait(alone, deadline, started)
            shards += alone
            lines += alone[0].lines()
        text = summary(lines, complete, time.monotonic() - started, options.most)
        broken = [shard for shard in shards if shard.process.returncode not in (0, 1, 5)]
        for shard in broken[:2]:
            if not shard.lines() or complete:
                print(shard.log.read_text()[-3000:])
        if options.summary:
            all_of_it = summary(lines, complete, time.monotonic() - started, 10**6)
            options.summary.write_text(f"{machine()}\n\n{all_of_it}\n")
    died = [test.split("::")[-1] for shard in shards for test in shard.died]
    if died:
        text += f"\n{len(died)} tests took their process with them: {', '.join(died[:20])}"
    print(text)
    outcomes = {line["outcome"] for line in lines}
    return 1 if not complete or broken or "failed" in outcomes or "passed" not in outcomes else 0  # all skipped is no proof


if __name__ == "__main__":
    sys.exit(main())
