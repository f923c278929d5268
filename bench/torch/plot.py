#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws bench/results/models.json, time and memory of training steps, as docs/images/models.svg, and bench/results/training.json, the
losses of bench/torch/converge.py, as docs/images/training.svg. Needs matplotlib."""

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
COLOURS = {"eager": "#7f7f7f", "sdpa": "#1f77b4", "fovea": "#d62728", "sdpa, another seed": "#9ecae1"}
NAMES = {"mistral": "Mistral\nwindow", "gpt_oss": "GPT-OSS\nsinks,\nwindow", "gemma2": "Gemma 2\nsoftcap,\nwindow", "t5": "T5-base\nlearned\nbias",
         "bert": "BERT-base\npadded", "llama": "Llama", "vit": "ViT-B"}  # fmt: skip


def save(figure, name):
    figure.tight_layout()
    path = ROOT / "docs/images" / name
    figure.savefig(path, metadata={"Date": None})
    print(path.relative_to(ROOT))


def models(data):
    names = [name for name in NAMES if any(row["model"] == name for row in data["rows"])]
    figure, panels = plt.subplots(1, 2, figsize=(11, 3.6))
    for axes, key, title in zip(panels, ("ms", "GiB"), ("a training step, ms", "most memory, GiB")):
        for n, implementation in enumerate(("eager", "sdpa", "fovea")):
            by = {row["model"]: row for row in data["rows"]
                  if row["implementation"] == implementation and "compiled" not in row}
            heights = [by.get(name, {}).get(key) or 0 for name in names]
            bars = axes.bar([at + (n - 1) * 0.28 for at in range(len(names))], heights, 0.27, color=COLOURS[implementation], label=implementation)
            axes.bar_label(bars, [f"{x:.0f}" if x else "–" for x in heights], fontsize=6)
        axes.set_xticks(range(len(names)), [NAMES[name] for name in names], fontsize=7)
        axes.set_title(title)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.suptitle(f"attn_implementation of transformers, bf16; {data['device']}", fontsize=9)
    save(figure, "models.svg")


def training(data):
    names = list(dict.fromkeys(row["model"] for row in data["rows"]))
    figure, panels = plt.subplots(1, len(names), figsize=(5.5 * len(names), 3.4), squeeze=False)
    for axes, name in zip(panels[0], names):
        for row in data["rows"]:
            if row["model"] == name:
                steps = [(n + 1) * data["point"] for n in range(len(row["losses"]))]
                axes.plot(steps, row["losses"], color=COLOURS[row["run"]], label=row["run"], linewidth=1, linestyle="--" if row["run"] == "fovea" else "-")
        axes.set_title({"gpt": "GPT", "t5": "T5: learned bias, dropout"}.get(name, name))
        axes.set_xlabel("step")
        axes.set_ylabel(f"loss, mean of {data['point']} steps")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    save(figure, "training.svg")


def main():
    matplotlib.rcParams.update({"svg.hashsalt": "fovea", "svg.fonttype": "none", "font.size": 8})
    for name, draw in (("models", models), ("training", training)):
        path = ROOT / f"bench/results/{name}.json"
        if path.exists():
            draw(json.loads(path.read_text()))


if __name__ == "__main__":
    main()
