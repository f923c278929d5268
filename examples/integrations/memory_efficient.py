# SPDX-License-Identifier: Apache-2.0
"""A transformer over images of different sizes, in one sequence with xFormers' block-diagonal mask; without a GPU, image by image."""

import torch
from torch import nn
from xformers.ops import fmha, memory_efficient_attention


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, mask):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        try:
            y = memory_efficient_attention(q, k, v, attn_bias=mask)
        except NotImplementedError:  # xFormers has no kernel for this device
            y = torch.cat([((a @ b.mT * a.shape[-1] ** -0.5).softmax(-1) @ c).transpose(1, 2)
                           for a, b, c in zip(*(mask.split(part) for part in (q, k, v)))
                           for a, b, c in [[part.transpose(1, 2) for part in (a, b, c)]]], dim=1)  # fmt: skip
        x = x + self.out(y.flatten(2))
        return x + self.mlp(x)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = nn.ModuleList(Block(32, 4) for _ in range(2)).to(device)
    head = nn.Linear(32, 5).to(device)
    optimizer = torch.optim.AdamW([*blocks.parameters(), *head.parameters()], lr=5e-3)
    images = [torch.randn(1, n, 32).to(device) for n in (9, 16, 25)]
    labels = torch.tensor([0, 3, 1]).to(device)
    for step in range(10):
        mask, x = fmha.attn_bias.BlockDiagonalMask.from_tensor_list(images)
        for block in blocks:
            x = block(x, mask)
        loss = nn.functional.cross_entropy(head(torch.cat([image.mean(1) for image in mask.split(x)])), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
