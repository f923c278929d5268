# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for pytorch_tests.py: fovea is enabled while PyTorch's tests run, and counts are written at the end."""

import json
import time

import pytest

import fovea.torch
from fovea.torch.aten import _owners

COUNTS = {"handed_back": {}, "operators": {}}
LATE = "no time left"


def count(kind, name):
    COUNTS[kind][name] = COUNTS[kind].get(name, 0) + 1


def pytest_addoption(parser):
    parser.addoption("--fovea-enable", type=json.loads, help="arguments of enable() as JSON, or null")
    parser.addoption("--fovea-counts", help="the file for the counts")
    parser.addoption("--fovea-sample", type=int, help="of each test every N-th combination of its parameters")
    parser.addoption("--fovea-seconds", type=float, help="tests that have not begun so long after they were collected are skipped")


def pytest_configure(config):
    options = config.getoption("--fovea-enable")
    if options is None:
        return
    if not options.pop("only_operators"):
        fovea.torch.enable(**options)
        return
    owner = _owners.Owner("PyTorch's tests", lambda *_: "", lambda name: count("operators", name),
                          lambda name, why, device: count("handed_back", f"{name}: {why}"))  # fmt: skip
    _owners.take(owner, [name for name in fovea.torch.aten.__all__ if name.startswith("_")], options["devices"])


def pytest_collection_modifyitems(config, items):
    """Of each test, which has many parameters, every N-th."""
    functions = {}
    for item in items:
        functions.setdefault(getattr(item, "originalname", item.name).split("_batch_size")[0], []).append(item)
    config.fovea_end = time.monotonic() + config.getoption("--fovea-seconds")
    items[:] = [item for found in functions.values() for item in found[:: config.getoption("--fovea-sample")]]


def pytest_runtest_setup(item):
    if time.monotonic() > item.config.fovea_end:
        pytest.skip(LATE)


def pytest_unconfigure(config):
    stats = {name: x for name, x in fovea.torch.stats().items() if name != "problems"}
    if any(COUNTS.values()):
        stats = COUNTS
    with open(config.getoption("--fovea-counts"), "w") as file:
        json.dump(stats, file)
