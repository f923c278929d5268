# SPDX-License-Identifier: Apache-2.0
"""What a call says to a keyword that it does not have. Nothing here runs in a call that is right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Optional

# What other libraries call it, or do not need here.
_ELSEWHERE = {
    "is_causal": 'causal=True, with align="top_left" where Sq and Sk differ',
    "attn_mask": "mask= for bool (true takes part), bias= for numbers that are added to the scores",
    "attention_mask": "mask= for bool (true takes part), bias= for numbers that are added to the scores",
    "key_padding_mask": "mask=, true where a key takes part, as (B, 1, 1, Sk), or seqused_k=, its lengths",
    "attn_bias": "bias=",
    "dropout": "dropout_p=",
    "p": "dropout_p=",
    "dropout_seed": "seed=",
    "enable_gqa": "not needed, k and v may have fewer heads than q",
    "need_weights": "the probabilities are never kept, return_lse=True returns their denominators",
    "return_attn_probs": "the probabilities are never kept, return_lse=True returns their denominators",
    "softmax_scale": "scale=",
    "window_size": "window=",
    "logits_soft_cap": "softcap=",
    "s_aux": "sink=",
    "learnable_sink": "sink=",
    "cache_seqlens": "seqused_k=",
    "return_softmax_lse": "return_lse=True",
}


def cure(name: str, options: Iterable[str]) -> str:
    """For a keyword that is none of `options`: what it is called here; "" if nothing is like it."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    near = difflib.get_close_matches(name, options, 1, 0.7)
    return f"did you mean {near[0]}?" if near else ""


def instead(name: str, options: Iterable[str]) -> str:
    """The same, or all that there is."""
    options = list(options)
    return cure(name, options) or f"accepted: {', '.join(options)}"


def refuse(
    function: str,
    first: str,
    positional: tuple[object, ...],
    unknown: Mapping[str, object],
    options: Optional[Iterable[str]],
) -> TypeError:
    """For a call with more arguments by position than `first`, or with keywords that are none of `options`."""
    if unknown:
        name = next(iter(unknown))
        return TypeError(f"{name}: not an option; {instead(name, options or ())}")
    count = first.count(",") + 1
    return TypeError(
        f"{function}: {count + len(positional)} arguments by position; accepted: {first}, and everything else by name, "
        "as mask=..."
    )
