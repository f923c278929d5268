#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times a training step of models of transformers as PyTorch computes scaled_dot_product_attention, and with
fovea.torch.enable(): forward and backward in bf16 (on the CPU fp32), without an optimizer. One model, and the two take
turns, so that whatever else changes the speed of the machine concerns both. A row has the median step of each, and the median
of the ratios of neighbouring steps.

examples:
  bench/torch/steps.py                             Llama, BERT and ViT: less than a minute on an H200
  bench/torch/steps.py --json bench/results/torch_steps.json   what docs/enable.md's table is made from
  bench/torch/steps.py --prefer none bert          fovea computes every call that it can
  bench/torch/steps.py --size small --device cpu   whether it runs at all
"""

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench/torch"), str(ROOT / "tools")]

from models import MODELS, inputs  # noqa: E402  (it sets the environment for the imports below)

import torch  # noqa: E402
import transformers  # noqa: E402

import fovea.torch  # noqa: E402
import records  # noqa: E402

NAMES = ("llama", "bert", "vit")
LAYERS = {"llama": 8}  # more than models.py has, whose "eager" needs the memory


def training_step(name, size, device):
    """The model, its number of layers, and a function that takes a step and returns its milliseconds."""
    kind, config, arguments, sizes = MODELS[name]
    if size == "small":
        arguments = {**arguments, "num_hidden_layers": 2}
    elif name in LAYERS:
        arguments = {**arguments, "num_hidden_layers": LAYERS[name]}
    cuda = device == "cuda"
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, kind)._from_config(getattr(transformers, config)(**arguments), attn_implementation="sdpa")
    model = model.to(torch.bfloat16 if cuda else torch.float32).train()
    given = inputs(name, *sizes[size], device)
    wait = torch.cuda.synchronize if cuda else (lambda: None)

    def step():
        model.zero_grad(set_to_none=True)
        wait()
        begin = time.perf_counter()
        model(**given).loss.backward()
        wait()
        return (time.perf_counter() - begin) * 1e3

    return arguments.get("num_hidden_layers", model.config.num_hidden_layers), step


def measure(name, options, seconds):
    layers, step = training_step(name, options.size, options.device)
    batch, length = MODELS[name][3][options.size][:2]

    def enabled():
        with fovea.torch.enabled(prefer=None if options.prefer == "none" else "fastest"):
            return step()

    for _ in range(2):  # kernels are compiled in the first steps
        step(), enabled()
    fovea.torch.reset_stats()
    pairs, end = [], time.monotonic() + seconds
    while len(pairs) < options.steps and (len(pairs) < 3 or time.monotonic() < end):
        pairs.append((step(), enabled()))
    seen = fovea.torch.stats()
    return {
        "model": name, "layers": layers, "batch": batch, "length": length, "prefer": options.prefer, "steps": len(pairs),
        "pytorch_ms": round(statistics.median(pair[0] for pair in pairs), 2),
        "fovea_ms": round(statistics.median(pair[1] for pair in pairs), 2),
        "ratio": round(statistics.median(pair[1] / pair[0] for pair in pairs), 3),
        "served": seen["served"] // len(pairs), "handed_back": seen["handed_back"],
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; default: {', '.join(NAMES)}")
    parser.add_argument("--prefer", choices=("fastest", "none"), default="fastest", help="as of fovea.torch.enable()")
    parser.add_argument("--size", choices=("large", "medium", "small"), default="large")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=40, help="of each, that are timed (default 40)")
    parser.add_argument("--seconds", type=float, default=12, help="for the steps of each model; but three are timed (default 12)")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    options = parser.parse_args()
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"unknown model {unknown[0]}; there are {', '.join(MODELS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees none; --device cpu --size small runs anywhere")
    rows = []
    for name in options.models or NAMES:
        rows.append(measure(name, options, options.seconds))
        print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if options.json:
        records.write(options.json, {
            "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "torch": torch.__version__,
            "transformers": transformers.__version__, **records.when(),
            "size": options.size, "rows": rows})  # fmt: skip
    bad = [row["model"] for row in rows if row["served"] == 0 and not row["handed_back"]]
    return f"no call of scaled_dot_product_attention was seen: {bad}" if bad else 0


if __name__ == "__main__":
    sys.exit(main())
