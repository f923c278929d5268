# SPDX-License-Identifier: Apache-2.0
"""The programs of docs/integrations/recipes.md, unedited, for some steps on the CPU: losses beside those without fovea, and the
calls that fovea computed, which FOVEA_TORCH=...,stats prints at their end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(os.environ.get("FOVEA_BUILD", ROOT / "build")).resolve() / "libfovea.so"
RECIPES = ROOT / "docs" / "integrations" / "recipes.md"

PARTS = '''
"""What a recipe reads from disk elsewhere: texts, and a tokenizer."""
import torch


class Tokenizer:
    pad_id = 0


class Texts(torch.utils.data.Dataset):
    def __init__(self, tokenizer=None, **options):
        generator = torch.Generator().manual_seed(1)
        self.lines = [torch.randint(1, 90, (int(n),), generator=generator).tolist() for n in torch.randint(9, 17, (16,), generator=generator)]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, at):
        return {"tokens": list(self.lines[at]), "labels": list(self.lines[at])}
'''

TUNE = """
import json, sys
import torch
from torchtune.models.llama3 import llama3

sizes = json.loads(sys.argv[1])
torch.manual_seed(0)
torch.save(llama3(**sizes).state_dict(), "first/model.pt")
"""

TUNE_CONFIG = """
output_dir: {folder}/out
model: {{_component_: torchtune.models.llama3.llama3, vocab_size: 96, num_layers: 2, num_heads: 4, num_kv_heads: 2, embed_dim: 32, max_seq_len: 64}}
tokenizer: {{_component_: parts.Tokenizer}}
dataset: {{_component_: parts.Texts}}
seed: 1
shuffle: False
checkpointer:
  _component_: torchtune.training.FullModelTorchTuneCheckpointer
  checkpoint_dir: {folder}/first
  checkpoint_files: [model.pt]
  output_dir: {folder}/out
  model_type: LLAMA3
resume_from_checkpoint: False
batch_size: 4
epochs: 1
optimizer: {{_component_: torch.optim.AdamW, lr: 1.0e-2}}
optimizer_in_bwd: False
loss: {{_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}}
max_steps_per_epoch: 3
gradient_accumulation_steps: 1
compile: False
device: cpu
dtype: fp32
metric_logger: {{_component_: torchtune.training.metric_logging.DiskLogger, log_dir: {folder}, filename: log.txt}}
log_every_n_steps: 1
"""

LITGPT = """
import torch
from torch.utils.data import DataLoader
from litgpt import Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.pretrain import setup


class Tokens(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None):
        self.batch_size, self.length = batch_size, max_seq_length

    def train_dataloader(self):
        rows = torch.randint(96, (16, self.length + 1), generator=torch.Generator().manual_seed(1))
        return DataLoader(rows, batch_size=self.batch_size)

    val_dataloader = train_dataloader


setup(
    model_name="tiny", data=Tokens(), devices=1, precision="32-true", logger_name="csv", out_dir="out",
    model_config=Config(name="tiny", block_size=16, vocab_size=96, padded_vocab_size=96, n_layer=2, n_head=4, n_query_groups=2, n_embd=32),
    train=TrainArgs(max_tokens=4 * 16 * 3, global_batch_size=4, micro_batch_size=4, log_interval=1, max_norm=1.0, lr_warmup_steps=1, max_seq_length=16, save_interval=None),
    eval=EvalArgs(interval=1000, max_iters=1, final_validation=False),
)
"""


def run(folder, command, words, folders=()):
    """A program as its users start it; with words in FOVEA_TORCH. PyTorch finds fovea by the entry point that the wheel has."""
    info = folder / "site" / "fovea_attention-0.0.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fovea-attention\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nfovea = fovea_autoload:load\n")
    path = os.pathsep.join([*folders, str(folder), str(folder / "site"), str(ROOT / "python")])
    environment = {**os.environ, "PYTHONPATH": path, "FOVEA_LIBRARY": str(LIBRARY), "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("FOVEA_TORCH", None)
    if words:
        environment["FOVEA_TORCH"] = words
    done = subprocess.run([str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.search(r"fovea.torch: process \d+: (\d+) calls of scaled_dot_product_attention computed by fovea, 0 traced", done.stderr)
    assert bool(found) == bool(words) and "handed back" not in done.stderr, done.stderr[-4000:]
    return done, int(found[1]) if found else 0


def same(got, want):
    assert len(got) == len(want) == 3 and len(set(want)) == 3, (got, want)
    assert got == pytest.approx(want, rel=1e-4)
    print(f"losses {got}, without fovea {want}")


def test_torchtune(tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "first").mkdir()
    (tmp_path / "config.yaml").write_text(TUNE_CONFIG.format(folder=tmp_path))
    sizes = {"vocab_size": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 64}
    run(tmp_path, [sys.executable, "-c", TUNE, json.dumps(sizes)], "")
    losses = []
    for words in ("", "prefer=none,stats"):
        log = tmp_path / "log.txt"
        log.unlink(missing_ok=True)
        command = [Path(sys.executable).with_name("tune"), "run", "full_finetune_single_device", "--config", "config.yaml"]
        _, calls = run(tmp_path, command, words)
        assert calls == (6 if words else 0)  # two layers, three steps
        losses.append([float(x) for x in re.findall(r"loss:(\S+)", log.read_text())])
    same(losses[1], losses[0])


def test_litgpt(tmp_path):
    (tmp_path / "train.py").write_text(LITGPT)
    losses = []
    for words in ("", "prefer=none,stats"):
        done, calls = run(tmp_path, [sys.executable, "train.py", "tiny"], words)  # the name is read again at its end
        assert calls >= 6 and calls % 2 == 0 if words else calls == 0  # two layers, three steps and what it checks before them
        losses.append([float(x) for x in re.findall(r"loss train: (\d+\.\d+)", done.stdout)])
    same(losses[1], losses[0])


TITAN = '''
{recipe}

import torch.nn.functional as F


class Dense(VarlenAttention):
    """The same by a mask of the documents."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config):
        Module.__init__(self)

    def forward(self, q, k, v, *, attention_masks, scale=None, enable_gqa=False, **kwargs):
        batch, length = q.shape[:2]
        starts = attention_masks.cu_seq_q.long()
        number = torch.searchsorted(starts, torch.arange(batch * length), right=True).view(batch, length)
        mask = (number[:, None, :, None] == number[:, None, None, :]) & torch.ones(length, length).tril().bool()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa).transpose(1, 2)


def train(config):
    torch.manual_seed(0)
    model = config.build()
    model.init_states(buffer_device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    positions = torch.cat([torch.arange(n) for n in (20, 12, 32)]).view(2, 32)
    tokens = torch.randint(2048, (2, 32), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        out = model(tokens, positions, model.get_attention_masks(positions))
        loss = F.cross_entropy(out.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


calls = []
computed = fovea.torch.attention
fovea.torch.attention = lambda *tensors, **options: calls.append(1) or computed(*tensors, **options)
ours = llama3_debugmodel_fovea().model_spec.model
got = train(ours)
assert len(calls) == 3 * len(ours.layers), len(calls)
for layer in ours.layers:
    layer.attention.inner_attention = Dense.Config()
print("losses", *got)
print("losses", *train(ours))
'''


def test_torchtitan(tmp_path):
    """The code of the page, with two rows of documents."""
    blocks = re.findall(r"^```python\n(.*?)^```", RECIPES.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 2
    (tmp_path / "train.py").write_text(TITAN.format(recipe="\n".join(blocks)))
    done, _ = run(tmp_path, [sys.executable, "train.py"], "", folders=[str(Path(sys.prefix) / "torchtitan")])
    same(*[[float(x) for x in line.split()] for line in re.findall(r"^losses (.*)$", done.stdout, re.MULTILINE)])
