#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own attention tests, without fovea and through fovea.torch.enable(): which of them fail because of fovea?

    tests/models/pytorch_tests.py --source ~/pytorch            # a source tree of the installed version; nothing of it is in this repository
    tests/models/pytorch_tests.py --source ~/pytorch --operators -k "TestSDPACudaOnly"

PyTorch's tests need `pip install expecttest`.

Each file runs twice at once, in processes of its own. A test that passes without fovea and not with it has to be explained by a line of
pytorch_differences.json, {"test's name": {"said": "what the failure says", "why": "..."}}, both regular expressions that are searched for. So a wrong
number does not pass for an error that was expected. The last line counts; the exit status is 1 if a failure is not explained.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LATE = "no time left"  # of the plugin
PATIENCE = 120  # seconds for reading the tests, and for the last one


def outcomes(path, options, arguments, sample, seconds):
    """By the test's name: "passed", "failed", "skipped", "late", and the beginning of what a failure said. And fovea's counts."""
    with tempfile.TemporaryDirectory() as folder:
        report, counts = Path(folder, "report.xml"), Path(folder, "stats.json")
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), str(ROOT / "python"), os.environ.get("PYTHONPATH")])),
        }  # fmt: skip
        if "FOVEA_BUILD" in env:
            env.setdefault("FOVEA_LIBRARY", str(Path(env["FOVEA_BUILD"]).resolve() / "libfovea.so"))
        command = [
            sys.executable, "-m", "pytest", str(path), "-q", "-p", "pytorch_plugin", "-p", "no:cacheprovider", "--tb=line", "--no-header",
            f"--junitxml={report}", "--rootdir", str(path.parent), f"--fovea-enable={json.dumps(options)}",
            f"--fovea-counts={counts}", f"--fovea-sample={sample}", f"--fovea-seconds={seconds}", *arguments,
        ]  # fmt: skip
        begun = time.time()
        try:
            done = subprocess.run(command, cwd=path.parent, env=env, capture_output=True, text=True, timeout=seconds + PATIENCE)
        except subprocess.TimeoutExpired:
            sys.exit(f"{path.name}: a test did not end within {PATIENCE} s")
        if not report.is_file():
            sys.exit(f"{path.name}: pytest did not run: {(done.stdout + done.stderr)[-2000:]}")
        found = {}
        for case in xml.etree.ElementTree.parse(report).iter("testcase"):
            bad = case.find("failure") if case.find("failure") is not None else case.find("error")
            skipped = case.find("skipped")
            late = skipped is not None and LATE in (skipped.get("message") or "")
            kind = "failed" if bad is not None else "late" if late else "skipped" if skipped is not None else "passed"
            said = "" if bad is None else " ".join((bad.get("message") or bad.text or "").split())[:300]
            found[f"{case.get('classname', '').rsplit('.', 1)[-1]}::{case.get('name')}"] = kind, said
        print(f"{path.name}, {'without fovea' if options is None else f'with enable({options})'}: {len(found)} tests, "
              f"{sum(kind == 'passed' for kind, _ in found.values())} passed, "
              f"{sum(kind == 'failed' for kind, _ in found.values())} failed, "
              f"{sum(kind == 'late' for kind, _ in found.values())} not begun, {time.time() - begun:.0f} s", flush=True)  # fmt: skip
        return found, json.loads(counts.read_text()) if counts.is_file() else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="PyTorch's source tree, of the version that is installed")
    parser.add_argument("--tests", nargs="+", default=["test/test_transformers.py"], help="files in it (test/test_transformers.py)")
    parser.add_argument("--devices", nargs="+", default=["cuda", "cpu"], help="enable()'s devices")
    parser.add_argument("--operators", action="store_true", help="enable(operators=True), too")
    parser.add_argument("--only-operators", action="store_true", help="the operators alone: scaled_dot_product_attention chooses among them")
    parser.add_argument("--sample", type=int, default=1, help="of each test every N-th combination of its parameters")
    parser.add_argument("-k", help="pytest's: only tests whose names match")
    parser.add_argument("--seconds", type=int, default=7200, help="tests that have not begun so long after they were collected are left out (7200)")
    given = parser.parse_args()
    explained = json.loads((HERE / "pytorch_differences.json").read_text())
    arguments = ["-k", given.k] if given.k else []
    options = {"devices": given.devices, "prefer": None, "operators": given.operators, "only_operators": given.only_operators}
    fovea_only = unexplained = total = compared = 0
    for name in given.tests:
        path = (given.source / name).resolve()
        if not path.is_file():
            parser.error(f"{path} does not exist; --source takes a tree of PyTorch's sources, --tests files in it")
        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(outcomes, path, how, arguments, given.sample, given.seconds) for how in (None, options)]
            (without, _), (with_fovea, counts) = (run.result() for run in runs)
        total += len(with_fovea)
        for test, (kind, said) in sorted(with_fovea.items()):
            before = without.get(test, ("missing", ""))[0]
            compared += before == "passed" and kind in ("passed", "failed")
            if before == "passed" and kind == "failed":
                why = next((x["why"] for name, x in explained.items() if re.search(name, test) and re.search(x["said"], said)), None)
                fovea_only += 1
                unexplained += why is None
                print(f"  {test}\n      {said}\n      {f'explained: {why}' if why else 'NOT EXPLAINED'}")
        print("counts: " + json.dumps(counts, indent=1)[:3000])
        if not counts.get("served") and not counts.get("operators"):
            print(f"{name}: fovea computed nothing")
            unexplained += 1
    print(f"{total} tests, {compared} pass without fovea and ran with it, {fovea_only} of them fail, {unexplained} are not explained")
    sys.exit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
