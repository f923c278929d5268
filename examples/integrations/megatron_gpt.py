# SPDX-License-Identifier: Apache-2.0
"""A GPT of Megatron-Core by its own specification of layers, on one GPU."""

import os
import tempfile

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig


def train():
    cuda = torch.cuda.is_available()
    if cuda:
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0, hidden_dropout=0.0,
        use_cpu_initialization=not cuda, gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=96, max_sequence_length=64, position_embedding_type="rope")
    device = "cuda" if cuda else "cpu"
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(96, (2, 20)).to(device)
    places = torch.arange(20).expand(2, 20).to(device)
    hidden = torch.ones(20, 20).triu(1).bool()[None, None].to(device)
    for step in range(6):
        loss = model(ids, places, hidden, labels=ids.roll(-1, 1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{os.path.join(folder, 'store')}", world_size=1, rank=0)
        parallel_state.initialize_model_parallel()
        try:
            train()
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
