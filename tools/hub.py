#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the folder of a repository of kernels that the package `kernels` loads, and by it transformers
(attn_implementation="owner/name").

    tools/hub.py OUT                     from build/libfovea.so
    tools/hub.py OUT --build /elsewhere

OUT/build has one folder for each of torch-cuda and torch-cpu, and in it the package fovea with its shared library. Nothing in it is
linked against PyTorch or CUDA, so one folder suits every version of them. Its operators have a namespace of their own, with the version
and a hash of the contents in it: another version, or an installed fovea, may be in the same process.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INIT = '''# SPDX-License-Identifier: Apache-2.0
"""Exact fused attention, forward and backward: the package fovea, version {version}."""

from .fovea.integrations._hub import flash_attn_func, flash_attn_varlen_func
from .fovea.torch import attention

__all__ = ["attention", "flash_attn_func", "flash_attn_varlen_func"]
__version__ = "{version}"
'''


def make(out, build):
    version = ".".join(re.findall(r"#define FOVEA_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", (ROOT / "include/fovea/c.h").read_text()))
    libraries = [build / name for name in ("libfovea.so", "_fast.abi3.so") if (build / name).is_file()]
    if not libraries or libraries[0].name != "libfovea.so":
        sys.exit(f"{build / 'libfovea.so'} does not exist: run `make build`, or give --build")
    sources = sorted((ROOT / "python/fovea").rglob("*.py"))
    digest = hashlib.sha256()
    for path in [*sources, *libraries]:
        digest.update(path.read_bytes())
    name = f"fovea_{version.replace('.', '_')}_{digest.hexdigest()[:8]}"
    for backend in ("cuda", "cpu"):
        variant = out / "build" / f"torch-{backend}"
        shutil.rmtree(variant, ignore_errors=True)
        for path in sources:
            target = variant / path.relative_to(ROOT / "python")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
        for path in libraries:
            shutil.copy(path, variant / "fovea" / path.name)
        (variant / "__init__.py").write_text(INIT.format(version=version))
        (variant / "metadata.json").write_text(json.dumps({
            "name": "fovea", "id": f"{name}_{backend}", "version": 1, "license": "apache-2.0", "python-depends": [],
            "backend": {"type": backend}}, indent=1) + "\n")  # fmt: skip
        print(variant)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder that is made")
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="where libfovea.so is (build)")
    given = parser.parse_args()
    make(given.out, given.build)


if __name__ == "__main__":
    main()
