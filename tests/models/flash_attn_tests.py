#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""flash_attn's own tests with fovea's functions in its place: a sample of each test but those of caches.

    tests/models/flash_attn_tests.py --source ~/flash-attention               # a tree of its sources; nothing of it is in this repository
    tests/models/flash_attn_tests.py --source ~/flash-attention --versions 3 --sample 40
    tests/models/flash_attn_tests.py --source ~/flash-attention --device cpu --longest 200 --sample 4     without a GPU

The tests need `pip install einops pytest`. Each version runs in a process of its own. What fovea refuses by name
(NotImplementedError) is counted as refused; everything else that does not pass is a failure, and the exit status is then 1.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# The file of each version, and what lies beside it.
TESTS = {"2": ("tests/test_flash_attn.py",), "3": ("hopper/test_flash_attn.py", "hopper/test_util.py", "hopper/padding.py"),
         "4": ("tests/cute/test_flash_attn.py",)}  # fmt: skip
# attention_chunk is refused by name, and this test would stop there before it comes to anything else.
CHUNKS = "[torch.randint(1, seqlen_k * 2, (1,)).item(), 0]"


def run(version, given, folder):
    for name in TESTS[version]:
        text = (given.source / name).read_text()
        text = text.replace(CHUNKS, "[0]")
        if given.device == "cpu":
            text = text.replace('"cuda"', '"cpu"').replace("'cuda'", "'cpu'")
        (folder / Path(name).name).write_text(text)
    report = folder / "report.json"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), str(ROOT / "python"), os.environ.get("PYTHONPATH")]))}
    if "FOVEA_BUILD" in env:
        env.setdefault("FOVEA_LIBRARY", str(Path(env["FOVEA_BUILD"]).resolve() / "libfovea.so"))
    command = [
        sys.executable, "-m", "pytest", "test_flash_attn.py", "-q", "-p", "flash_attn_plugin", "-p", "no:cacheprovider", "--tb=no", "--no-header",
        "--rootdir", str(folder), "--noconftest", "-W", "ignore", "--show-capture=no", f"--fovea-version={version}", f"--fovea-source={given.source}", f"--fovea-device={given.device}",
        f"--fovea-sample={given.sample}", f"--fovea-longest={given.longest}", f"--fovea-seconds={given.seconds}", f"--fovea-report={report}",
    ]  # fmt: skip
    if given.k:
        command += ["-k", given.k]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if not report.is_file() or done.returncode > 1:
        sys.exit(f"version {version}: pytest did not run: {(done.stdout + done.stderr)[-3000:]}")
    return json.loads(report.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a tree of flash_attn's sources")
    parser.add_argument("--versions", nargs="+", choices=TESTS, default=list(TESTS), help="2, 3, 4 (all)")
    parser.add_argument("--sample", type=int, default=20, help="so many combinations of parameters of each test (20)")
    parser.add_argument("--longest", type=int, default=0, help="leave out longer sequences (0: none)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="on the CPU the tests' text is changed: their device is named in it")
    parser.add_argument("--seconds", type=float, default=3600, help="of each version; tests that are not begun then count as skipped (3600)")
    parser.add_argument("--json", type=Path, help="where the results of each test go")
    parser.add_argument("-k", help="pytest's: only tests whose names match")
    given = parser.parse_args()
    given.source = given.source.resolve()
    everything, failed = {}, 0
    for version in given.versions:
        if not (given.source / TESTS[version][0]).is_file():
            parser.error(f"{given.source / TESTS[version][0]} does not exist; --source takes a tree of flash_attn's sources")
        with tempfile.TemporaryDirectory() as folder:
            found = everything[version] = run(version, given, Path(folder))
        print(f"flash_attn {version}:")
        for name, counts in found["tests"].items():
            failed += len(counts["failed"])
            print(f"  {name}: {counts['passed']} passed, {sum(counts['refused'].values())} refused, "
                  f"{sum(counts['skipped'].values())} skipped, {len(counts['failed'])} failed")  # fmt: skip
            for test, said in counts["failed"].items():
                print(f"      FAILED {test}: {said}")
        for kind in ("refused", "skipped"):
            reasons = Counter()
            for counts in found["tests"].values():
                reasons.update(counts[kind])
            for why, times in reasons.most_common():
                print(f"  {kind} {times}: {why}")
        print(f"  calls of fovea: {json.dumps(found['served'])}", flush=True)
        if not any(counts["served"] for counts in found["served"].values()):
            failed += 1
            print("  FAILED: fovea computed nothing")
    if given.json:
        given.json.write_text(json.dumps(everything, indent=1) + "\n")
    passed = sum(counts["passed"] for found in everything.values() for counts in found["tests"].values())
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
