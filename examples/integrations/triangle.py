# SPDX-License-Identifier: Apache-2.0
"""A block of triangle attention as models of proteins have it: cuEquivariance's function where it is there, otherwise its formula."""

import torch
from torch import nn

try:
    from cuequivariance_torch import triangle_attention
except ImportError:
    triangle_attention = None


class TriangleAttention(nn.Module):
    def __init__(self, width=16, heads=4, dim=8):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Linear(width, heads, bias=False)
        self.qkv = nn.Linear(width, 3 * heads * dim, bias=False)
        self.gate = nn.Linear(width, heads * dim)
        self.out = nn.Linear(heads * dim, width)

    def forward(self, pairs, mask):
        """pairs: (B, N, N, C); mask: (B, N, N), 1 where a pair exists."""
        x = self.norm(pairs)
        bias = self.bias(x).permute(0, 3, 1, 2)[:, None]  # (B, 1, H, N, N)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.dim)).permute(3, 0, 1, 4, 2, 5)  # (B, N, H, N, D)
        keys = mask[:, :, None, None, :].bool()
        if triangle_attention is not None:
            y = triangle_attention(q, k, v, bias, keys)
        else:
            scores = q @ k.transpose(-1, -2) * self.dim**-0.5 + bias
            y = scores.masked_fill(~keys, -1e9).softmax(-1) @ v
        y = y.transpose(-2, -3).flatten(-2)
        return pairs + self.out(y * self.gate(x).sigmoid())


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.ModuleList(TriangleAttention() for _ in range(2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    pairs, target = (torch.randn(1, 14, 14, 16).to(device) for _ in range(2))
    exists = (torch.arange(14) < 11).float().to(device)
    mask = (exists[:, None] * exists[None, :])[None]
    for step in range(10):
        x = pairs
        for block in model:
            x = block(x, mask)
        loss = ((x - target) ** 2 * mask[..., None]).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
