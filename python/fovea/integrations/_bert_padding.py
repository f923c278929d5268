# SPDX-License-Identifier: Apache-2.0
"""flash_attn.bert_padding: rows of a padded batch, taken out and put back."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows of `input`, (rows, ...), with these numbers, in their order."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of so many rows, (first_axis_dim, ...), with `values` in the rows `indices` and 0 elsewhere."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The rows with these numbers, and `input` itself without a gradient."""
    return index_first_axis(input, indices), input.detach()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Optional[Tensor] = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows that a mask of a padded batch has.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or int: rows that take part.
        unused_mask: (B, S): rows that are allocated as well, and take no part.

    Returns:
        The rows, (total, ...); their numbers in (B * S), int64; cu_seqlens, (B + 1,), int32; the longest length; how many
        rows of each sequence take part, (B,), int32.
    """
    used = attention_mask.sum(-1, dtype=torch.int32)
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(-1, dtype=torch.int32)
    indices = taken.reshape(-1).nonzero().reshape(-1)
    return (*_packed(hidden_states, indices, lengths), used)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Packs rows that each hold several sequences one after the other.

    Args:
        hidden_states: (B, S, ...).
        attention_mask_in_length: (B, S), int: the lengths of the sequences of each row, then zeros.

    Returns:
        As unpad_input(), without its last result; each sequence has its own entry in cu_seqlens.
    """
    rows = attention_mask_in_length.sum(-1)
    exists = torch.arange(attention_mask_in_length.shape[1], device=rows.device) < rows[:, None]
    indices = exists.reshape(-1).nonzero().reshape(-1)
    lengths = attention_mask_in_length.reshape(-1)
    return _packed(hidden_states, indices, lengths[lengths != 0].to(torch.int32))


def _packed(hidden_states: Tensor, indices: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    longest = int(lengths.max()) if lengths.numel() else 0
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(total, ...) back as (batch, seqlen, ...), with 0 in the rows that `indices` does not have."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])
