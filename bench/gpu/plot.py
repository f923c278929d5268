#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the dense cells of bench/results/gpu.json over the sequence length: docs/images/gpu_dense.svg, all of them, and
docs/images/gpu_short.svg, a small picture for the README. Needs matplotlib."""

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


def draw(data, ways, kinds, path, size):
    """One picture: a row of axes for each direction, a column for each (head dimension, causal)."""
    rows = [row for row in data["rows"] if row["group"] == "dense"]
    figure, grid = plt.subplots(len(ways), len(kinds), figsize=size, sharex=True, squeeze=False)
    for line, way in enumerate(ways):
        for column, (d, causal) in enumerate(kinds):
            axes = grid[line][column]
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
            axes.set_title(f"{('forward', 'backward')[way]}, D={d}{', causal' if causal == 'c' else ''}")
    for axes in grid[-1]:
        axes.set_xlabel("sequence length")
    for axes in grid[:, 0]:
        axes.set_ylabel("TFLOP/s")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(labels), frameon=False)
    figure.suptitle(f"bf16, 16,384 tokens; {data['machine']['gpu']}")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    print(path.relative_to(ROOT))


def main():
    data = json.loads((ROOT / "bench/results/gpu.json").read_text())
    if not any(row["group"] == "dense" for row in data["rows"]):
        sys.exit("bench/results/gpu.json has no dense rows")
    matplotlib.rcParams.update({"svg.hashsalt": "fovea", "svg.fonttype": "none", "font.size": 8})
    images = ROOT / "docs/images"
    draw(data, (0, 1), [(d, c) for d in (64, 128, 256) for c in "fc"], images / "gpu_dense.svg", (15, 5.5))
    matplotlib.rcParams.update({"font.size": 9})
    draw(data, (0, 1), [(64, "f"), (128, "c")], images / "gpu_short.svg", (7.5, 5))


if __name__ == "__main__":
    main()
