# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer and a T5 that learns to reverse what it reads. The implementation of attention is an argument."""

import argparse
import tempfile

import torch
from transformers import T5Config, T5ForConditionalGeneration, Trainer, TrainerCallback, TrainingArguments


class Reversed(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, at):
        ids = torch.randint(3, 60, (24,), generator=torch.Generator().manual_seed(at))
        used = 24 - at % 7
        ids[used:] = 0
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids[:used].flip(0)[:16].contiguous()}


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            print(f"step {state.global_step} loss {float(logs['loss']):.6f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attention", default="eager", help="transformers' attn_implementation")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = T5Config(vocab_size=60, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)
    model = T5ForConditionalGeneration._from_config(config, attn_implementation=arguments.attention)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(folder, per_device_train_batch_size=8, max_steps=8, logging_steps=1, learning_rate=3e-3, report_to=[],
                                    save_strategy="no", disable_tqdm=True, logging_strategy="steps")  # fmt: skip
        trainer = Trainer(model, options, train_dataset=Reversed(), callbacks=[Print()])
        trainer.train()


if __name__ == "__main__":
    main()
