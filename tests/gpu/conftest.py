# SPDX-License-Identifier: Apache-2.0
"""The tests of the CUDA backend. They use the checkout: the package from python/, the library and the command from
$FOVEA_BUILD (build/), and the first CUDA device that PyTorch sees; without one every test is skipped and says why.

FOVEA_TEST_DEVICE=cpu runs those that know nothing of CUDA on the CPU backend: whoever changes these tests checks with
it that a failure on a GPU is the kernels'. FOVEA_TEST_DEVICE=compile compiles the small kernels of test_device*.py
without a GPU (a skipped test was compiled, a failed one was not). --shard and --report are for run.py, which spreads the tests over processes.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("FOVEA_BUILD", ROOT / "build")).resolve()
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(BUILD / "libfovea.so"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
sys.path[:0] = [str(ROOT / name) for name in ("python", "tests/gpu")]

try:
    import torch
except ImportError:
    torch = None
    collect_ignore_glob = ["test_*.py"]

NAME = os.environ.get("FOVEA_TEST_DEVICE", "cuda")
KEPT = 4 << 30  # bytes of the device's memory that a process may keep from one test to the next
STICKY = 70  # exit code: a fault of the device that every later call of the process would see


def pytest_addoption(parser):
    parser.addoption("--shard", default="0/1", help="I/N: every N-th test, from the I-th on")
    parser.addoption("--report", type=Path, help="append a line of JSON for each test as it ends")
    parser.addoption("--after", default="", help="leave out the tests up to this one (within the shard)")


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: knows of CUDA itself (streams, graphs, devices), so it has no CPU form")
    config.addinivalue_line("markers", "alone: needs the device to itself (much memory, or measures memory)")
    config.addinivalue_line("markers", "sanitize: small, for compute-sanitizer; together they cover every feature")
    if torch and NAME == "cpu":
        torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    index, count = map(int, config.getoption("--shard").split("/"))
    items[:] = items[index::count]
    after = config.getoption("--after")
    if after:
        names = [item.nodeid for item in items]
        items[:] = items[names.index(after) + 1 :]
    for item in items:
        if NAME == "cuda" and not torch.cuda.is_available() and "nogpu" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here (torch.cuda.is_available() is False)"))
        elif NAME == "compile" and not item.path.name.startswith("test_device"):
            item.add_marker(pytest.mark.skip(reason="FOVEA_TEST_DEVICE=compile, and this one has no text to compile"))
        elif NAME == "cpu" and "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="FOVEA_TEST_DEVICE=cpu, and this one is about CUDA itself"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    path = item.config.getoption("--report")
    if path:
        path.with_suffix(".at").write_text(item.nodeid)  # which test it was, if the process does not survive it


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    path = item.config.getoption("--report")
    if path and (call.when == "call" or report.outcome != "passed"):
        line = {"test": item.nodeid, "outcome": report.outcome, "seconds": round(call.duration, 3)}
        line.update(item.user_properties)
        if report.failed:
            line["why"] = str(call.excinfo.value)[:2000] if call.excinfo else report.longreprtext[-2000:]
        with open(path, "a") as file:
            file.write(json.dumps(line) + "\n")
    if report.failed and NAME == "cuda" and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            pytest.exit(f"{item.nodeid} left the device in error: {error}", STICKY)
    return report


@pytest.fixture(scope="session")
def device():
    return torch.device(NAME, 0) if NAME == "cuda" else torch.device(NAME)


@pytest.fixture(autouse=True)
def fresh_state():
    torch.manual_seed(0)  # nothing is collected without PyTorch
    yield
    torch.use_deterministic_algorithms(False)
    if NAME == "cuda" and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()  # the processes of run.py share the device


def pytest_report_header(config):
    if torch is None:
        return "no test runs: the GPU tests compare with PyTorch, which is not installed here"
    if NAME == "cuda" and torch.cuda.is_available():
        return f"GPU: {torch.cuda.get_device_name(0)}; PyTorch {torch.__version__}; {time.strftime('%H:%M:%S')}"
    return f"device: {NAME}; CUDA available: {torch.cuda.is_available()}"
