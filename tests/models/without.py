# SPDX-License-Identifier: Apache-2.0
"""For the tests of what an integration needs: a library that lacks a name."""

import importlib


def taken_away(needed, monkeypatch):
    """Of a fovea.integrations._needs.Needed: its name is not there until the test ends, also where a class inherits it."""
    place = importlib.import_module(needed.module)
    *classes, last = needed.name.split(".")
    for name in classes:
        place = getattr(place, name)
    for owner in getattr(place, "__mro__", [place]):
        if last in vars(owner) and owner is not object:
            monkeypatch.delattr(owner, last)
