# SPDX-License-Identifier: Apache-2.0
"""The tests use the checkout: the package from python/, the library from $FOVEA_BUILD (build/) or $FOVEA_LIBRARY. On the
CPU there are four devices. Where JAX has a GPU, test_table.py runs there."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
# Four devices on the CPU; and XLA optimises nothing, as most of the time would go there.
_FLAGS = ("--xla_force_host_platform_device_count=4", "--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path[:0] = [str(ROOT / name) for name in ("python", "tests/jax", "tests/python")]

import jax  # noqa: E402,F401  (a missing JAX is a failure, not a skip)
