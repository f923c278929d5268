#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times a training step of models of transformers on a GPU: forward and backward in bf16 (on the CPU fp32), without an optimizer, with
attn_implementation "eager", "sdpa" and "fovea". Models are random and have layers of the sizes that their families have. Each row
has the median time of a step, the time that the GPU was busy in one, the most memory, the loss, and how far its gradient is from
that of "eager". The steps of "sdpa" and "fovea" are taken in turns, so that whatever else changes the speed of the machine
concerns both. Where the GPU is busy for less than a step takes, the step waits for the host.

examples:
  bench/torch/models.py                         every model: a minute and a half on an H200, a part of it for compiling kernels
  bench/torch/models.py --size large --json bench/results/models.json      the table of the README; "eager" of Mistral takes 128 GiB
  bench/torch/models.py mistral t5 --steps 10
  bench/torch/models.py t5 --size large --compile       where a step of the plain model waits for the host
  bench/torch/models.py --size small --device cpu llama    whether it runs at all
"""

import argparse
import contextlib
import gc
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tools")]
if "FOVEA_BUILD" in os.environ:
    os.environ.setdefault("FOVEA_LIBRARY", str(Path(os.environ["FOVEA_BUILD"]).resolve() / "libfovea.so"))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

IMPLEMENTATIONS = ("eager", "sdpa", "fovea")
TURNS = ("sdpa", "fovea")
VOCABULARY = 8192  # small: what is measured is not the embedding
LARGE_LAYERS = 8  # of decoders in "large"


def decoder(heads, heads_k, dim, layers, **more):
    width = heads * dim
    return {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": heads_k, "head_dim": dim, "vocab_size": VOCABULARY, "max_position_embeddings": 16384,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False, **more}


# name: (class, configuration, its arguments, {size: (batch, length)}). Decoders have 4 layers in "medium", all models 2 in "small".
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", decoder(16, 4, 128, 4), {"short": (4, 2048), "large": (4, 4096), "medium": (2, 4096), "small": (1, 128)}),
    "mistral": ("MistralForCausalLM", "MistralConfig", decoder(16, 4, 128, 4, sliding_window=1024),
                {"large": (2, 8192), "medium": (1, 8192), "small": (1, 128)}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config",
               decoder(8, 4, 256, 4, sliding_window=1024, query_pre_attn_scalar=256, attn_logit_softcapping=50.0),
               {"large": (2, 4096), "medium": (2, 4096), "small": (1, 128)}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig",
                decoder(32, 4, 64, 4, sliding_window=128, intermediate_size=2048, num_local_experts=4, num_experts_per_tok=2,
                        rope_parameters={"rope_type": "default", "rope_theta": 150000.0}),
                {"large": (2, 4096), "medium": (1, 4096), "small": (1, 128)}),
    # Few and small experts, so that more of the step is attention.
    "gpt_oss_few": ("GptOssForCausalLM", "GptOssConfig",
                    decoder(32, 4, 64, 4, sliding_window=128, intermediate_size=1024, num_local_experts=2, num_experts_per_tok=1,
                            rope_parameters={"rope_type": "default", "rope_theta": 150000.0}),
                    {"large": (2, 4096), "medium": (1, 4096), "small": (1, 128)}),
    "bert": ("BertForMaskedLM", "BertConfig",
             {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
              "vocab_size": VOCABULARY}, {"large": (64, 512), "medium": (32, 512), "small": (2, 128)}),
    "t5": ("T5ForConditionalGeneration", "T5Config",
           {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": VOCABULARY,
            "decoder_start_token_id": 0}, {"large": (16, 1024), "medium": (8, 1024), "small": (1, 128)}),
    "vit": ("ViTForImageClassification", "ViTConfig", {}, {"large": (128, 224), "medium": (64, 224), "small": (1, 224)}),
}  # fmt: skip


def inputs(name, batch, length, device):
    import torch

    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(batch, 3, length, length, generator=generator).to(device, torch.bfloat16 if device == "cuda" else None),
                "labels": torch.zeros(batch, dtype=torch.long, device=device)}
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator).to(device)
    given = {"input_ids": ids, "labels": ids}
    if name == "bert":  # half of the rows are padded
        given["attention_mask"] = (torch.arange(length, device=device) < torch.where(
            torch.arange(batch, device=device) % 2 == 0, length, length * 5 // 8)[:, None]).long()  # fmt: skip
    if name == "t5":
        given["labels"] = ids[:, : length // 4].contiguous()
    return given


def arguments_of(name, size):
    """Of the configuration."""
    arguments = MODELS[name][2]
    if size == "small":
        return {**arguments, "num_layers" if name == "t5" else "num_hidden_layers": 2}
    return {**arguments, "num_hidden_layers": LARGE_LAYERS} if size == "large" and "head_dim" in arguments else arguments


def set_implementation(model, name):
    """Of attention. The model's own function does not reach T5's encoder and decoder, which have copies of the configuration."""
    for module in model.modules():
        if hasattr(module, "set_attn_implementation"):
            module.set_attn_implementation(name)


class Steps:
    """The training steps of one model."""

    def __init__(self, name, size, device):
        import torch
        import transformers

        kind, config, _, sizes = MODELS[name]
        self.cuda = device == "cuda"
        self.wait = torch.cuda.synchronize if self.cuda else (lambda: None)
        torch.manual_seed(0)
        with torch.device(device):
            model = getattr(transformers, kind)._from_config(getattr(transformers, config)(**arguments_of(name, size)))
        self.model = model.to(torch.bfloat16 if self.cuda else torch.float32)
        self.given = inputs(name, *sizes[size], device)
        self.about = {"model": name, "layers": model.config.num_hidden_layers, "batch": sizes[size][0], "length": sizes[size][1]}

    def step(self):
        self.model.zero_grad(set_to_none=True)
        self.wait()
        begin = time.perf_counter()
        loss = self.model(**self.given).loss
        loss.backward()
        self.wait()
        return (time.perf_counter() - begin) * 1e3, loss

    def first(self, implementation):
        """A row without its time, and the gradients of a step without dropout. Kernels are compiled here."""
        import torch

        import fovea.integrations

        set_implementation(self.model, implementation)
        fovea.integrations.reset_stats()
        self.model.eval()
        loss = self.step()[1].item()
        grads = torch.cat([p.grad.flatten()[:100_000].float() for p in self.model.parameters() if p.grad is not None])
        calls = fovea.integrations.stats().get("transformers", {}).get("served", 0)
        self.model.train()
        self.step()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        self.step()
        memory = round(torch.cuda.max_memory_allocated() / 2**30, 2) if self.cuda else None
        return {**self.about, "implementation": implementation, "GiB": memory, "loss": round(loss, 4), "calls": calls}, grads

    def times(self, implementations, steps):
        """Milliseconds of each step by implementation, which take turns."""
        found = {name: [] for name in implementations}
        for _ in range(steps):
            for name in implementations:
                if len(implementations) > 1:
                    set_implementation(self.model, name)
                found[name].append(self.step()[0])
        return found

    def compile(self, mode, implementations):
        """By torch.compile, for training, and the memory of a step by implementation. Each is a graph of its own."""
        import torch

        memory = {}
        self.model.train()
        self.model.compile(dynamic=False, mode=mode)
        for name in implementations:
            set_implementation(self.model, name)
            for _ in range(3):
                self.step()
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
                self.step()
                in_graphs = mode == "reduce-overhead"  # CUDA graphs have pools of their own, which are not counted
                memory[name] = None if in_graphs else round(torch.cuda.max_memory_allocated() / 2**30, 2)
        return memory

    def busy_ms(self, implementation):
        """Milliseconds of a step in which the GPU computes or copies; None where the profiler cannot see it."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        if not self.cuda:
            return None
        set_implementation(self.model, implementation)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.step()
        spent = sum(e.time_range.elapsed_us() for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA)
        return round(spent / 1e3, 2) or None


def clean():
    import torch

    gc.collect()
    with contextlib.suppress(Exception):
        torch.cuda.empty_cache()


def measure(name, size, device, steps, seconds_left, compiled=None):
    """Its rows. compiled: the mode of torch.compile; times and memory are those of compiled models, the loss and the gradients not."""
    import torch

    model = Steps(name, size, device)
    rows, exact = {}, None
    for implementation in IMPLEMENTATIONS:
        try:
            if seconds_left() <= 0:
                raise TimeoutError("left out, the time is over")
            row, grads = model.first(implementation)
            if exact is None:
                exact = grads
            row["gradient"] = f"{((grads - exact).norm() / exact.norm()).item():.2e}"
            if implementation not in TURNS and not compiled:
                row["times"], row["busy_ms"] = model.times([implementation], steps)[implementation], model.busy_ms(implementation)
        except (torch.OutOfMemoryError, ValueError, NotImplementedError, RuntimeError, TimeoutError) as error:
            row = {**model.about, "implementation": implementation, "error": f"{type(error).__name__}: {str(error)[:160]}"}
        rows[implementation] = row
        model.model.zero_grad(set_to_none=True)
        grads = None
        clean()
    turns = [one for one in (IMPLEMENTATIONS if compiled else TURNS) if "error" not in rows[one]]
    if compiled:
        for implementation, memory in model.compile(compiled, turns).items():
            rows[implementation].update(GiB=memory, compiled=compiled)
    for implementation, times in model.times(turns, steps).items():
        rows[implementation].update(times=times, busy_ms=model.busy_ms(implementation))
    for row in rows.values():
        if "times" in row:
            times = row.pop("times")
            row.update(steps=len(times), ms=round(statistics.median(times), 2), best=round(min(times), 2))
    return list(rows.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--size", choices=("large", "medium", "small"), default="medium")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=7, help="steps that are timed (default 7)")
    parser.add_argument("--compile", nargs="?", const="default", metavar="MODE",
                        help="time the models as torch.compile makes them, in this mode (default); some minutes for each")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=600, help="begin no further row after so many seconds")
    parser.add_argument("--json", type=Path, help="write the rows here as well; those of other models stay in it")
    parser.add_argument("--commit", default="", help="of the code, where there is no git to ask")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.models if name not in MODELS]
    if unknown:
        parser.error(f"unknown model {unknown[0]}; there are {', '.join(MODELS)}")
    import torch
    import transformers

    import fovea.integrations
    import records

    fovea.integrations.install("transformers")
    rows, begin = [], time.monotonic()
    head = {"device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu", "torch": torch.__version__,
            "transformers": transformers.__version__, "size": arguments.size}  # fmt: skip
    for name in arguments.models or MODELS:
        found = measure(name, arguments.size, arguments.device, arguments.steps, lambda: arguments.seconds - time.monotonic() + begin,
                        arguments.compile)
        rows += [{**row, **records.when(arguments.commit)} for row in found]
        clean()
        for row in found:
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if arguments.json:  # after each model, so that what was measured is there whatever comes
            records.write(arguments.json, {
                **head, "rows": [*records.kept(arguments.json, rows, "model", "compiled", **head), *rows]})  # fmt: skip
    failed = [row for row in rows if row["implementation"] == "fovea" and ("error" in row or not row["calls"])]
    print(f"{len(rows)} rows in {time.monotonic() - begin:.0f} s; fovea failed or computed nothing: {[r['model'] for r in failed]}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
