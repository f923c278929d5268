#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The first training step of a model, which is when fovea compiles its kernels: by PyTorch alone, with fovea.torch.enable() and no
kernel on disk, and with those that this step has left there. With --wheel also with the library of a wheel, which brings kernels
along, and no other kernel on disk. Each in a process of its own, several times in turns. What is timed begins when the model is on the
device, and ends when the device has finished; the second step follows.

examples:
  bench/torch/first_step.py                              Llama, 8 layers
  bench/torch/first_step.py --wheel dist/*x86_64.whl     and with the wheel's kernels
  bench/torch/first_step.py --size small --device cpu    whether it runs at all
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench/torch"), str(ROOT / "tools")]

KINDS = ("PyTorch", "fovea, no kernel on disk", "fovea, kernels on disk")
OF_A_WHEEL = "fovea, a wheel's kernels alone"


def child(options):
    import steps
    import torch
    from models import MODELS

    import fovea.torch

    _, step = steps.training_step(options.model, options.size, options.device)
    if options.child != KINDS[0]:
        fovea.torch.enable(prefer=None)
    first, second = step(), step()
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    batch, length = MODELS[options.model][3][options.size][:2]
    print(json.dumps({"batch": batch, "length": length, "first_ms": first, "second_ms": second, "served": fovea.torch.stats()["served"], "device": device,
                      "torch": torch.__version__}))  # fmt: skip


def measured(kind, cache, **variables):
    """Of a process of its own."""
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child", kind], capture_output=True, text=True,
                          env={**os.environ, "FOVEA_CACHE_DIR": cache, **variables})  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{kind}: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="llama", help="of bench/torch/models.py (llama)")
    parser.add_argument("--size", choices=("short", "large", "medium", "small"), default="large",
                        help="of the model: batch and length (large)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheel", type=Path, help="of this machine's processor, with the kernels of tools/wheel_kernels.txt")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind (3)")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options)
    import records

    found = {kind: [] for kind in (*KINDS, *([OF_A_WHEEL] if options.wheel else []))}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as unpacked:
            for kind in found:
                if kind == OF_A_WHEEL:
                    with zipfile.ZipFile(options.wheel) as archive:
                        archive.extractall(unpacked)
                    row = measured(kind, unpacked + "/cache", FOVEA_LIBRARY=unpacked + "/fovea/libfovea.so")
                else:
                    row = measured(kind, cache)
                found[kind].append(row)
                print(kind, " ".join(f"{name}={value}" for name, value in row.items()), flush=True)
    if any(bool(row["served"]) == (kind == KINDS[0]) for kind, rows in found.items() for row in rows):
        sys.exit("a kind's calls were not computed by the library that it names")
    rows = [{"kind": kind, **{name: [round(row[name], 1) for row in rows] for name in ("first_ms", "second_ms")}}
            for kind, rows in found.items()]  # fmt: skip
    if options.json:
        one = found[KINDS[0]][0]
        records.write(options.json, {"device": one["device"], "torch": one["torch"], **records.when(), "model": options.model, "size": options.size,
                                     "batch": one["batch"], "length": one["length"], "rows": rows})  # fmt: skip
    return None


if __name__ == "__main__":
    main()
