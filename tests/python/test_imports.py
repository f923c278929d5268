# SPDX-License-Identifier: Apache-2.0
"""What is done as soon as a module has been imported: by all that wait for it, and not because somebody looked for it."""

import importlib
import importlib.util
import sys

import pytest

from fovea._imports import after


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    yield "waited_for"
    sys.meta_path[:] = before
    sys.modules.pop("waited_for", None)


def test_all_that_wait(module):
    seen = []
    for name in ("first", "second", "third"):
        after(module, lambda name=name: seen.append((name, sys.modules[module].value)))
    assert seen == []
    importlib.import_module(module)
    assert sorted(seen) == [("first", 1), ("second", 1), ("third", 1)]
    after(module, lambda: seen.append("now"))
    assert seen[-1] == "now"
    importlib.reload(sys.modules[module])
    assert len(seen) == 4


def test_to_look_for_it_is_not_to_import_it(module):
    seen, finders = [], list(sys.meta_path)
    after(module, lambda: seen.append(1))
    assert importlib.util.find_spec(module).origin.endswith("waited_for.py") and seen == []
    importlib.import_module(module)
    assert seen == [1] and sys.meta_path == finders


def test_one_that_does_not_exist():
    finders = list(sys.meta_path)
    after("there_is_no_such_module", lambda: pytest.fail("called"))
    try:
        assert importlib.util.find_spec("there_is_no_such_module") is None
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("there_is_no_such_module")
    finally:
        sys.meta_path[:] = finders
