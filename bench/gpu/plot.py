#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws bench/results/gpu.json: docs/images/gpu_dense.svg, the dense cells over the sequence length. Needs matplotlib."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
COLOURS = {"ours": "#d62728", "cuDNN": "#1f77b4", "FlashAttention-2": "#2ca02c", "FlashAttention-4": "#9467bd",
           "mem-efficient": "#7f7f7f", "FlexAttention": "#ff7f0e"}  # fmt: skip


def rate(row, name, way):
    time = row["results"].get(name, {}).get(("forward_us", "backward_us")[way])
    return row["flops"][way] / time / 1e6 if time else None


def main():
    data = json.loads((ROOT / "bench/results/gpu.json").read_text())
    rows = [row for row in data["rows"] if row["group"] == "dense"]
    if not rows:
        sys.exit("bench/results/gpu.json has no dense rows")
    matplotlib.rcParams.update({"svg.hashsalt": "fovea", "svg.fonttype": "none", "font.size": 8})
    figure, grid = plt.subplots(2, 6, figsize=(15, 5.5), sharex=True)
    for way, title in enumerate(("forward", "backward")):
        for column, (d, causal) in enumerate((d, c) for d in (64, 128, 256) for c in ("f", "c")):
            axes = grid[way][column]
            cells = [row for row in rows if row["name"].startswith(f"dense d{d} s") and row["name"].endswith(causal)]
            for name, colour in COLOURS.items():
                points = [(int(row["name"].split()[2][1:]), rate(row, name, way)) for row in cells]
                points = [(s, y) for s, y in points if y]
                if points:
                    label = "fovea" if name == "ours" else name
                    axes.plot(*zip(*points), "o-", color=colour, label=label, markersize=3, linewidth=2.2 if name == "ours" else 1.2)
            axes.set_xscale("log", base=2)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            axes.set_title(f"{title}, D={d}{', causal' if causal == 'c' else ''}")
    for axes in grid[1]:
        axes.set_xlabel("sequence length")
    for axes in grid[:, 0]:
        axes.set_ylabel("TFLOP/s")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    figure.suptitle(f"bf16, 16,384 tokens; {data['machine']['gpu']}")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path = ROOT / "docs/images/gpu_dense.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
