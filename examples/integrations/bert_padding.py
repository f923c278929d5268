# SPDX-License-Identifier: Apache-2.0
"""An encoder that leaves the padding out where flash_attn is there, as many models with code of their own do, and computes attention
with a mask where it is not."""

import torch
from torch import nn

try:
    from flash_attn import flash_attn_varlen_qkvpacked_func
    from flash_attn.bert_padding import pad_input, unpad_input
except ImportError:
    flash_attn_varlen_qkvpacked_func = None


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.dim = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        if flash_attn_varlen_qkvpacked_func is not None:
            rows, indices, offsets, longest, *_ = unpad_input(x, mask)
            qkv = self.qkv(rows).view(-1, 3, self.heads, self.dim)
            y = flash_attn_varlen_qkvpacked_func(qkv, offsets, longest, 0.0)
            return pad_input(self.out(y.flatten(1)), indices, *x.shape[:2])
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * self.dim**-0.5
        weights = scores.masked_fill(~mask[:, None, None].bool(), float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2)) * mask[..., None]


class Encoder(nn.Module):
    def __init__(self, width=48, heads=4, layers=2, words=200):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.attention = nn.ModuleList(SelfAttention(width, heads) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, ids, mask):
        x = self.words(ids)
        for attention, mlp in zip(self.attention, self.mlp):
            x = x + attention(x, mask)
            x = x + mlp(x)
        return self.head(x)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Encoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(0, 200, (6, 40)).to(device)
    mask = (torch.arange(40) < torch.tensor([40, 3, 17, 29, 8, 40])[:, None]).long().to(device)
    hidden = (torch.rand(6, 40) < 0.15).to(device) & mask.bool()
    for step in range(10):
        logits = model(ids.masked_fill(hidden, 1), mask)
        loss = nn.functional.cross_entropy(logits[hidden], ids[hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
