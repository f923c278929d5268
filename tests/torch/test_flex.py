# SPDX-License-Identifier: Apache-2.0
"""What docs/torch.md says about FlexAttention: each score_mod and mask_mod there beside the options here."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fovea.torch import attention

B, H, SQ, SK, D = 2, 4, 40, 56, 16
SLOPES = torch.rand(H, generator=torch.Generator().manual_seed(1)) / 4
BIAS = torch.randn(1, H, SQ, SK, generator=torch.Generator().manual_seed(2))
TABLE = torch.randn(H, SQ + SK, generator=torch.Generator().manual_seed(3))
OFFSETS = torch.arange(SQ)[:, None] - torch.arange(SK) + SK
LENGTHS = torch.tensor([30, 56], dtype=torch.int32)
CHOICE = torch.rand(B, H, SQ, SK, generator=torch.Generator().manual_seed(4)) < 0.7
DOCUMENT = torch.tensor([0] * 11 + [1] * 20 + [2] * 9)
ENDS = torch.tensor([0, 11, 31, 40], dtype=torch.int32)


def inputs(sk=SK, heads_k=H):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, h, n, D, generator=generator) for h, n in ((H, SQ), (heads_k, sk), (heads_k, sk))]


ROWS = {
    "bias": (lambda s, b, h, i, j: s + BIAS[0][h, i, j], None, {"bias": BIAS}),
    "table": (lambda s, b, h, i, j: s + TABLE[h, i - j + SK], None, {"bias": TABLE[:, OFFSETS].unsqueeze(0)}),
    "slopes": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(), None, {"alibi_slopes": SLOPES, "align": "top_left"}),
    "softcap": (lambda s, b, h, i, j: 3 * torch.tanh(s / 3), None, {"softcap": 3.0}),
    "causal": (None, lambda b, h, i, j: i >= j, {"causal": True, "align": "top_left"}),
    "window": (None, lambda b, h, i, j: (i - j <= 9) & (j - i <= 3), {"window": (9, 3), "align": "top_left"}),
    "lengths": (None, lambda b, h, i, j: j < LENGTHS[b], {"seqused_k": LENGTHS}),
    "condition": (None, lambda b, h, i, j: CHOICE[b, h, i, j], {"mask": CHOICE}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
def test_row(name):
    score_mod, mask_mod, options = ROWS[name]
    q, k, v = inputs()
    block_mask = None if mask_mod is None else create_block_mask(mask_mod, B, H, SQ, SK, device="cpu")
    theirs = flex_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=0.3)
    torch.testing.assert_close(attention(q, k, v, scale=0.3, **options), theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_documents_and_grouped_heads():
    q, k, v = inputs(sk=SQ, heads_k=2)
    block_mask = create_block_mask(lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j], None, None, SQ, SQ, device="cpu")
    theirs = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)
    for b in range(B):
        packed = [x[b].transpose(0, 1).contiguous() for x in (q, k, v)]
        ours = attention(*packed, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, max_seqlen_q=20, max_seqlen_k=20)
        torch.testing.assert_close(ours.transpose(0, 1), theirs[b], atol=1e-5, rtol=1e-5)


def test_a_learned_table():
    """Autograd goes on through the gathering."""
    q, k, v = inputs()
    table = TABLE.clone().requires_grad_()
    attention(q, k, v, bias=table[:, OFFSETS].unsqueeze(0)).square().sum().backward()
    again = TABLE.clone().requires_grad_()
    scores = q @ k.mT / D**0.5 + again[:, OFFSETS]
    (torch.softmax(scores, -1) @ v).square().sum().backward()
    torch.testing.assert_close(table.grad, again.grad, atol=1e-4, rtol=1e-4)
