# SPDX-License-Identifier: Apache-2.0
"""tools/test.py itself: what it makes of a program that does not end."""

import importlib.util
import sys
import time

from conftest import ROOT


def load():
    spec = importlib.util.spec_from_file_location("stages", ROOT / "tools/test.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_program_that_does_not_end_is_a_failure(capfd, tmp_path):
    """Threads that wait for one another are seen as that alone."""
    stages = load()
    runner = object.__new__(stages.Runner)
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\nexec sleep 600\n")
    hangs.chmod(0o700)
    begin = time.monotonic()
    count = runner.googletest(hangs, seconds=1)
    assert (count.passed, count.failed) == (0, 1)
    assert time.monotonic() - begin < 60
    assert f"{hangs}: killed, as it did not end within 1 s" in capfd.readouterr().out
