# SPDX-License-Identifier: Apache-2.0
"""A GPT and the loop that trains it, in plain PyTorch: attention is scaled_dot_product_attention."""

import torch
from torch import nn
from torch.nn import functional

TEXT = "How vexingly quick daft zebras jump; the five boxing wizards see it, and sphinxes of black quartz judge their vow. " * 8


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, c // self.heads).transpose(1, 2) for part in self.qkv(x).split(c, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(b, t, c))


class GPT(nn.Module):
    def __init__(self, width=64, heads=4, layers=2, block=48):
        super().__init__()
        self.tokens = nn.Embedding(128, width)
        self.places = nn.Embedding(block, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.LayerNorm(width), "attention": Attention(width, heads),
                "mlp": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
            }) for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(width, 128, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = x + layer["attention"](layer["norm"](x))
            x = x + layer["mlp"](x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def main():
    torch.manual_seed(1337)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = torch.tensor(list(TEXT.encode()), dtype=torch.long)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(12):
        at = torch.randint(len(data) - 49, (8,))
        ids = torch.stack([data[i : i + 48] for i in at]).to(device)
        targets = torch.stack([data[i + 1 : i + 49] for i in at]).to(device)
        loss = model(ids, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
