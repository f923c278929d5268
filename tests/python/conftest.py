# SPDX-License-Identifier: Apache-2.0
"""The tests use the checkout: the package from python/, the library and the command from $FOVEA_BUILD (build/).
They build nothing but small programs of their own."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = Path(os.environ.get("FOVEA_BUILD", ROOT / "build")).resolve()

if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(BUILD / "libfovea.so"))
# Child processes of the tests import the same package.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "python"), os.environ.get("PYTHONPATH")]))
sys.path.insert(0, str(ROOT / "python"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
