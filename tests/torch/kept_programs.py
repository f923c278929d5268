#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the programs in tests/torch/kept, which test_exported.py loads: what torch.export and AOTInductor save must run
with later versions of fovea. Files of a version that was released are never made again; a new version adds its own.

    PYTHONPATH=python .venv-torch/bin/python tests/torch/kept_programs.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch

import fovea
import fovea.torch

KEPT = Path(__file__).resolve().parent / "kept"
NEED = [True, True, False, True, False, True]


class Program(torch.nn.Module):
    """The operators as programs call them: a forward with many options, and its backward."""

    def forward(self, q, k, v, bias, mask, sink):
        options = (None, mask, None, sink, *[None] * 6, 7, 3, 0.5, True, 2, -1, "top_left", 1.5, 0.25, "fovea", 0, 0, 0,
                   "bhsd", 0, None)  # fmt: skip
        out, lse = torch.ops.fovea.attention(q, k, v, bias, *options)
        grads = torch.ops.fovea.attention_backward(out * 2, lse * 3, out, lse, NEED, q, k, v, bias, *options)
        return out, lse, *[grad for grad, wanted in zip(grads, NEED) if wanted]


def inputs() -> tuple[torch.Tensor, ...]:
    """The same numbers in every version of PyTorch."""
    wave = lambda *shape: torch.arange(torch.Size(shape).numel()).mul(0.7).sin().reshape(shape)  # noqa: E731
    rows = wave(1, 4, 5, 8), wave(1, 2, 6, 8).cos(), wave(1, 2, 6, 4)
    return (*rows, wave(1, 1, 5, 6), wave(5, 6) > -0.8, wave(4))


def small(package: Path) -> None:
    """Leaves the sources and the symbols out, which are nine tenths of it, and names of folders of this machine."""
    with zipfile.ZipFile(package) as file:
        parts = {name: file.read(name) for name in file.namelist() if not name.endswith(".cpp")}
    for name in (name for name in parts if name.endswith(".so")):
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder, "library.so")
            library.write_bytes(parts[name])
            subprocess.run(["strip", "--strip-all", library], check=True)
            here = sys.prefix.encode()  # names of PyTorch's headers, in the texts of checks
            parts[name] = library.read_bytes().replace(here, b"/" * len(here))
    with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in parts.items():
            file.writestr(name, content)


def main() -> None:
    folder = KEPT / fovea.__version__
    folder.mkdir(parents=True, exist_ok=True)
    program = torch.export.export(Program(), inputs())
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    torch.export.save(program, folder / "program.pt2")
    # Machine code for every x86-64 processor.
    options = {"cpp.march": "", "cpp.simdlen": 1}
    torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "package.pt2"), inductor_configs=options)
    small(folder / "package.pt2")
    for path in sorted(folder.iterdir()):
        print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    sys.exit(main())
