# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/beside.py, which calls another build of fovea: one from before fields were added to fovea_problem."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench/gpu"))

import beside  # noqa: E402
from fovea import _library  # noqa: E402
from fovea.torch import _call, _fast  # noqa: E402


class Older:
    """Refuses every problem, as a library does whose struct is shorter."""

    def __init__(self, message):
        self.message = message

    def fovea_workspace(self, *_):
        return 1

    def fovea_last_error(self):
        return self.message


@pytest.mark.parametrize("said, size", [(b"problem: size 360; accepted: sizeof(fovea_problem), 320", 320), (b"q: not given", _call._PROBLEM_SIZE)])
def test_an_older_library_gets_the_problem_that_it_knows(monkeypatch, tmp_path, said, size):
    older = Older(said)
    monkeypatch.setattr(_library, "_load", lambda *_, **__: older)
    path = tmp_path / "libfovea.so"
    path.touch()
    found = beside.Library(path)
    monkeypatch.setattr(_fast, "attention", lambda *_: None)  # C's, which there may be none of
    before = _call.lib, _call._PROBLEM_SIZE, _fast.attention
    monkeypatch.setattr(_fast, "load", lambda: setattr(_fast, "attention", before[2]))
    with found.called():
        assert (_call.lib, _call._PROBLEM_SIZE) == (older, size)
        assert (_fast.attention is before[2]) == (size == before[1])
    assert (_call.lib, _call._PROBLEM_SIZE, _fast.attention) == before
