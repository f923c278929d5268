#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains two small models from the same start on the same data with PyTorch's scaled_dot_product_attention and with fovea, and
compares the losses. In bf16 under autocast, AdamW, bytes of the texts of this repository.

    gpt   a GPT of 6 layers: causal, no dropout; fovea through fovea.torch.enable(prefer=None)
    t5    a T5 of transformers, 3 layers: the learned bias with its gradient, dropout 0.1; attn_implementation="fovea". Dropout's
          masks differ, so a second run of "sdpa" with another seed for them shows what that alone changes

examples:
  bench/torch/converge.py --json bench/results/training.json            2,000 steps of each: some minutes on an H200
  bench/torch/converge.py t5 --steps 4 --device cpu --small             whether it runs at all
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import fovea.integrations  # noqa: E402
import fovea.torch  # noqa: E402
import records  # noqa: E402
from models import set_implementation  # noqa: E402

RUNS = {"gpt": ("sdpa", "fovea"), "t5": ("sdpa", "fovea", "sdpa, another seed")}
POINT = 20  # steps that a point of a curve averages
HELD_OUT = 16  # batches


def texts():
    """Bytes: nine tenths to learn from, the rest held out."""
    files = sorted(path for folder in ("docs", "src", "python") for path in (ROOT / folder).rglob("*")
                   if path.suffix in (".md", ".h", ".cpp", ".cuh", ".py"))  # fmt: skip
    data = b"\n".join(path.read_bytes() for path in files)
    whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cut = len(whole) * 9 // 10
    return whole[:cut], whole[cut:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, length):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, rows):
        x = self.tokens(rows[:, :-1]) + self.positions.weight[: rows.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), rows[:, 1:].flatten())


class Training:
    """One model from its start: the same weights and the same batches in every run."""

    def __init__(self, model, options):
        self.name, self.options, small = model, options, options.small
        torch.manual_seed(0)
        if model == "gpt":
            self.source, self.target = (64 if small else 512), 1
            self.model = Gpt(2, 64, 2, self.source) if small else Gpt(6, 512, 8, self.source)
        else:
            import transformers

            self.source, self.target = (64, 16) if small else (512, 128)
            sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4} if small else {
                "d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 3, "num_heads": 8}  # fmt: skip
            config = transformers.T5Config(**sizes, vocab_size=259, dropout_rate=0.1, decoder_start_token_id=0, use_cache=False)
            self.model = transformers.T5ForConditionalGeneration(config)
        self.model.to(options.device)
        self.batch = 4 if small else 32
        self.learnt, self.held_out = texts()

    def rows(self, data, generator):
        """(batch, source + target) bytes."""
        length = self.source + self.target
        starts = torch.randint(0, len(data) - length, (self.batch,), generator=generator)
        return torch.stack([data[at : at + length] for at in starts]).long().to(self.options.device)

    def loss(self, rows):
        with torch.autocast(self.options.device, torch.bfloat16):
            if self.name == "gpt":
                return self.model(rows)
            rows = rows + 3  # T5's first ids have a meaning
            return self.model(input_ids=rows[:, : self.source], labels=rows[:, self.source :].contiguous()).loss

    def run(self, steps):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3 if self.name == "t5" else 6e-4, betas=(0.9, 0.95),
                                      fused=self.options.device == "cuda")
        warm = max(1, steps // 20)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min((n + 1) / warm, max(0.1, 1 - 0.9 * (n - warm) / max(1, steps - warm))))
        generator = torch.Generator().manual_seed(1)
        losses, begin = [], time.perf_counter()
        self.model.train()
        for _ in range(steps):
            loss = self.loss(self.rows(self.learnt, generator))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        losses = torch.stack(losses).float().cpu()
        seconds = time.perf_counter() - begin
        self.model.eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            held_out = sum(self.loss(self.rows(self.held_out, generator)).item() for _ in range(HELD_OUT)) / HELD_OUT
        return losses, held_out, seconds


def train(name, run, options):
    training = Training(name, options)
    torch.manual_seed(8 if "another" in run else 7)  # of dropout
    fovea.torch.reset_stats()
    fovea.integrations.reset_stats()
    if name == "t5":
        set_implementation(training.model, "fovea" if run == "fovea" else "sdpa")
        losses, held_out, seconds = training.run(options.steps)
        calls = fovea.integrations.stats().get("transformers", {}).get("served", 0)
    elif run == "fovea":
        with fovea.torch.enabled(prefer=None):
            losses, held_out, seconds = training.run(options.steps)
        calls = fovea.torch.stats()["served"]
    else:
        losses, held_out, seconds = training.run(options.steps)
        calls = 0
    points = [round(part.mean().item(), 4) for part in losses.split(POINT)]
    return {"model": name, "run": run, "steps": options.steps, "first": round(losses[0].item(), 4), "held_out": round(held_out, 4),
            "last": round(losses[-5 * POINT :].mean().item(), 4), "ms": round(seconds / options.steps * 1e3, 2), "calls": calls,
            **records.when(options.commit), "losses": points}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="gpt, t5 (both)")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="smaller models")
    parser.add_argument("--json", type=Path, help="write the runs here as well; those of other models stay in it")
    parser.add_argument("--commit", default="", help="of the code, where there is no git to ask")
    options = parser.parse_args()
    unknown = [name for name in options.models if name not in RUNS]
    if unknown:
        parser.error(f"unknown model {unknown[0]}; there are {', '.join(RUNS)}")
    fovea.integrations.install("transformers")
    rows = []
    head = {"device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu", "torch": torch.__version__}
    for name in options.models or RUNS:
        for run in RUNS[name]:
            rows.append(train(name, run, options))
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items() if key != "losses"), flush=True)
            print("   ", " ".join(f"{x:.3f}" for x in rows[-1]["losses"][:: max(1, len(rows[-1]["losses"]) // 10)]), flush=True)
            if options.json:  # after each run, so that what was measured is there whatever comes
                records.write(options.json, {
                    **head, "point": POINT, "rows": [*records.kept(options.json, rows, "model", **head), *rows]})  # fmt: skip
    return f"fovea computed nothing: {rows}" if any(row["run"] == "fovea" and not row["calls"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
