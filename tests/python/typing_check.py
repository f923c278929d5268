# SPDX-License-Identifier: Apache-2.0
"""mypy --strict over some files, for tests/python and tests/torch."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What mypy knows of PyTorch takes it 14 s: tests/torch and tests/integrations share it, and the next run has it.
CACHE = Path(os.environ.get("FOVEA_BUILD", ROOT / "build")).resolve() / f"mypy{Path(sys.prefix).name}"


def assert_typed(cache, *paths, options=()):
    """mypy has nothing to say. `cache` is a folder that calls may share."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", f"--cache-dir={cache}", *options, *map(str, paths)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT / "python")}
    )
    said = done.stdout + done.stderr
    assert "No module named mypy" not in said, "mypy is missing: pip install -r tests/requirements.txt"
    assert done.returncode == 0 and not said, said
