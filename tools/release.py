#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds a release from a clean tree: the source distribution and both wheels, twice, and the bits must be the same;
then tests them (tests/wheel) and writes their checksums. Nothing is uploaded or tagged: the last lines say how.

Asked for before anything is built: nothing uncommitted; a version (include/fovea/c.h) that CHANGELOG.md has a section
for, with a date; no tag of that version on another commit.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import wheels  # noqa: E402


def fail(message):
    sys.exit(f"release: {message}")


def git(*arguments, cwd=ROOT):
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def faults(root, version):
    """Why this tree cannot be released as this version; none is good."""
    status = git("status", "--porcelain", cwd=root)
    if status is None:
        yield f"{root} is no git checkout"
    elif status:
        yield f"the tree has changes that are not committed:\n{status}"
    changelog = root / "CHANGELOG.md"
    heading = rf"(?m)^## \[?v?{re.escape(version)}\]?\b.*\d{{4}}-\d{{2}}-\d{{2}}"
    if not changelog.is_file():
        yield "there is no CHANGELOG.md"
    elif not re.search(heading, changelog.read_text()):
        yield f"CHANGELOG.md has no section '## {version} (YYYY-MM-DD)'; include/fovea/c.h has the version"
    tagged = git("rev-list", "-n", "1", f"v{version}", cwd=root)
    if tagged and tagged != git("rev-parse", "HEAD", cwd=root):
        yield f"the tag v{version} is on another commit, {tagged[:12]}; a new release needs a new version in include/fovea/c.h"


def sums(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def build(out, work, jobs):
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "wheels.py", "--out", out, "--work", work, "--jobs", str(jobs)], cwd=ROOT
    )
    if done.returncode != 0:
        fail("it does not build; see above")
    return sums(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="parallel jobs (all cores)")
    parser.add_argument("--check", action="store_true", help="only say whether the tree can be released")
    arguments = parser.parse_args()
    version = wheels.version()
    if found := list(faults(ROOT, version)):
        fail("\n  ".join([f"{version} cannot be released:", *found]))
    print(f"release {version} of {git('rev-parse', 'HEAD')[:12]}", flush=True)
    if arguments.check:
        return
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:  # what `make wheels` left may be used again; here everything is new
        built = build(out, ROOT / "build-wheels", arguments.jobs)
        again = build(Path(folder) / "dist", Path(folder) / "work", arguments.jobs)
    if built != again:
        different = [name for name in built if built[name] != again.get(name)]
        fail(f"built twice, the bits of {', '.join(different)} are not the same")
    print("built twice, the same bits")
    done = subprocess.run(
        [ROOT / ".venv" / "bin" / "python", ROOT / "tools" / "test.py", "wheel"], cwd=ROOT, env={**os.environ, "FOVEA_WHEELS": str(out)}
    )
    if done.returncode != 0:
        fail("the tests of the wheels failed")
    (out / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in built.items()))
    print((out / "SHA256SUMS").read_text(), end="")
    print(f"Now: git tag -s v{version} && git push --tags; then upload dist/*.whl and dist/*.tar.gz, with twine for example.")


if __name__ == "__main__":
    main()
