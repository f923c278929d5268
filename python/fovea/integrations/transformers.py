# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="fovea" for the models of transformers.

>>> import fovea.integrations.transformers
>>> fovea.integrations.transformers.register()  # doctest: +SKIP

Two functions are registered. The attention function maps the arguments of transformers' attention interface. The mask
function says which pattern a mask has instead of making it: causal, sliding, bidirectional, packed documents, each with or
without padding. docs/integrations/transformers.md has every argument and every pattern.
"""

# A model may use a mask in ways that the interface knows nothing of: it may add numbers to it, or multiply scores by
# itself. A mask of keys alone in the place of a causal one would then be wrong without a word. So a pattern is told by a
# tensor that no model can take for a mask: five dimensions, (B, 1, 1, Sk, n), where the size n of the last one, of stride 0,
# is the pattern's code and the others hold the padding of the keys or, as int32, the number of each token's document.
#
# Private names of transformers that this file uses, each checked by tests/models/test_transformers.py: in masking_utils the
# names of the functions that mask functions are made by and of their variables (sliding_window, packed_sequence_mask,
# mask_function). Where one of them is another, the mask is made in full, which is slower. Without one of _NEEDED register()
# raises an ImportError.

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Optional

import torch
from torch import Tensor

from ..torch import attention
from . import _counts, _needs
from ._needs import Needed

__all__ = ["register"]

_NAME = "transformers"
_IMPLEMENTATION = "fovea"

_MASKING = "transformers.masking_utils"
_VERSIONS = "transformers from 5.4 on"
_NEEDED = (
    Needed("transformers.modeling_utils", "AttentionInterface.register", by_position=2),
    Needed(_MASKING, "AttentionMaskInterface.register", by_position=2),
    Needed(_MASKING, "causal_mask_function"),
    Needed(_MASKING, "bidirectional_mask_function"),
    Needed(_MASKING, "prepare_padding_mask"),
    Needed(_MASKING, "sdpa_mask", ("q_length",)),  # before 5.4 it took a cache_position
)

# Keywords of the interface that say which keys a query sees, or add a sink of its own: without them the result is another one.
_REFUSED = ("indices", "block_indices", "sinks")

# Models that change the masks that they get, by the type in their configuration: they get masks in full.
_CHANGE_MASKS = ("beit", "data2vec-vision", "doge")


def register(name: str = _IMPLEMENTATION) -> None:
    """Makes attn_implementation="fovea" known to transformers.

    After it, ``from_pretrained(..., attn_implementation="fovea")`` and ``model.set_attn_implementation("fovea")`` make fovea
    compute the attention of every model that calls transformers' attention interface. Models that do not call it refuse the
    name with NotImplementedError. Where FOVEA_TORCH is set, `import transformers` calls this.

    Args:
        name: The name under which it is registered.

    Raises:
        ImportError: transformers is not installed, is older than 5.4, or has changed what this file uses.

    Example:
        >>> import fovea.integrations.transformers
        >>> fovea.integrations.transformers.register()  # doctest: +SKIP
        >>> model = LlamaForCausalLM.from_pretrained(path, attn_implementation="fovea")  # doctest: +SKIP
    """
    _needs.require(_NAME, _VERSIONS, _NEEDED)
    modeling: Any = importlib.import_module("transformers.modeling_utils")
    masking: Any = importlib.import_module(_MASKING)
    modeling.AttentionInterface.register(name, _attention)
    masking.AttentionMaskInterface.register(name, _mask)


# ---- masks ----


class _Pattern(NamedTuple):
    causal: bool
    window: int  # causal: how many keys, the query's own among them; else how far on each side; -1: unbounded
    documents: Optional[Tensor] = None

    def options(self) -> dict[str, Any]:
        if self.window < 0:
            window = (-1, -1)
        else:
            window = (self.window - 1, 0) if self.causal else (self.window, self.window)
        return {"causal": self.causal, "window": window, "align": "bottom_right"}


def _coded(pattern: _Pattern, padded: bool) -> int:
    # At least 2: a dimension of 1 has any stride where torch.compile traces.
    return 2 + int(padded) + 2 * int(pattern.causal) + 4 * (pattern.window + 1)


def _decoded(n: int) -> tuple[_Pattern, bool]:
    code = n - 2
    return _Pattern(bool(code // 2 % 2), code // 4 - 1), bool(code % 2)


def _pattern(function: Any, masking: Any) -> Optional[_Pattern]:
    """Of a mask function of transformers; None for any other. They are closures, known by the names of their makers."""
    if function is masking.causal_mask_function:
        return _Pattern(True, -1)
    if function is masking.bidirectional_mask_function:
        return _Pattern(False, -1)
    both = _variables(function, "and_masks", "mask_functions")
    if not isinstance(both, tuple) or len(both) != 2:
        return None
    first, second = both
    if second is masking.causal_mask_function:
        window = _variables(first, "sliding_window_overlay", "sliding_window")
        return _Pattern(True, window) if type(window) is int and window >= 1 else None
    if second is masking.bidirectional_mask_function:
        window = _variables(first, "sliding_window_bidirectional_overlay", "sliding_window")
        return _Pattern(False, window) if type(window) is int and window >= 0 else None
    documents = _variables(first, "packed_sequence_mask_function", "packed_sequence_mask")
    inner = _variables(second, "remap_positions_for_packed_sequence", "mask_function")
    if documents is None or inner is None:
        return None
    pattern = _pattern(inner, masking)
    return None if pattern is None or pattern.documents is not None else pattern._replace(documents=documents)


def _variables(function: Any, maker: str, name: str) -> Any:
    """A variable of a closure, if this function of masking_utils made it."""
    qualified = getattr(function, "__qualname__", "")
    code = getattr(function, "__code__", None)
    if not qualified.startswith(f"{maker}.<locals>.") or code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Optional[Callable[..., Any]] = None,
    attention_mask: Optional[Tensor] = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    config: Any = None,
    device: Any = "cpu",
    **kwargs: Any,
) -> Tensor:
    """A pattern's descriptor, or a bool mask of (B, 1, Sq, Sk)."""
    masking: Any = sys.modules[_MASKING]
    if mask_function is None:
        mask_function = masking.causal_mask_function
    _refuse_models_of_their_own(config)
    if attention_mask is not None and attention_mask.dim() == 5:
        return attention_mask  # of generate(): the model asks again, where masks of four dimensions do not come here
    pattern = _pattern(mask_function, masking)
    dense = pattern is None or getattr(config, "model_type", None) in _CHANGE_MASKS
    if pattern is not None and not dense:
        # A model that asks for a mask in full is going to work with it. That of packed documents never is to be skipped.
        wanted = allow_is_causal_skip if pattern.causal else allow_is_bidirectional_skip
        dense = pattern.documents is None and not wanted
        # A static cache has more keys than there are, and a tensor for how many.
        aligned = type(q_offset) is int and type(kv_offset) is int and q_offset + q_length == kv_offset + kv_length
        dense |= not aligned and (pattern.causal or pattern.window >= 0 or pattern.documents is not None)
    if pattern is None or dense:
        made: Tensor = masking.sdpa_mask(
            batch_size, q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
            attention_mask=attention_mask, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, device=device,
            **kwargs,
        )  # fmt: skip
        return made
    if pattern.documents is not None:
        numbers: Tensor = pattern.documents.to(torch.int32)
        return numbers[:, None, None, :, None].expand(-1, -1, -1, -1, _coded(pattern, False))
    padding: Optional[Tensor] = masking.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        # Reading it would break a graph; where nothing is traced, most masks turn out to be none.
        if not _traced(padding) and bool(padding.all()):
            padding = None
    if padding is None:
        shape = (batch_size, 1, 1, kv_length, _coded(pattern, False))
        return torch.ones((), dtype=torch.bool, device=device).expand(shape)
    return padding[:, None, None, :, None].expand(-1, -1, -1, -1, _coded(pattern, True))


def _traced(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(tensor) is not Tensor


def _refuse_models_of_their_own(config: Any) -> None:
    """Models that make masks as all do, and compute attention by themselves, would only fail later."""
    where = getattr(type(config), "__module__", "")
    if not where.startswith("transformers.models."):
        return
    module = sys.modules.get(where.replace(".configuration_", ".modeling_"))
    if module is not None and not _calls_the_interface(module):
        raise NotImplementedError(
            f'attn_implementation="{_IMPLEMENTATION}": {module.__name__} computes attention by itself, and does not call '
            'transformers\' attention interface; accepted: attn_implementation="eager"'
        )


def _calls_the_interface(module: Any) -> bool:
    if hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return True
    # Models that only hold another one, which calls it.
    return any(vars(kind).get("_supports_attention_backend") for kind in vars(module).values() if isinstance(kind, type))


# ---- attention ----


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    position_bias: Optional[Tensor] = None,
    cache: Any = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    max_length_q: Optional[int] = None,
    max_length_k: Optional[int] = None,
    output_attentions: bool = False,
    head_mask: Optional[Tensor] = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query is (B, Hq, Sq, D), key and value (B, Hk, Sk, D); the result is (B, Sq, Hq, D)."""
    if cache is not None:
        raise NotImplementedError("cache: a paged cache; fovea has no paged keys and values; accepted: None")
    if head_mask is not None:
        raise NotImplementedError("head_mask: given, and fovea has no such feature; accepted: None")
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f'{name}: given, and fovea has no such feature; accepted: attn_implementation="eager", or "sdpa" where the model has it'
            )
    if output_attentions:
        _warn_of_probabilities()
    if query.shape[0] != key.shape[0]:  # queries, or keys and values, that are shared by the batch
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {
        "scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout,
        "sink": None if s_aux is None else s_aux.reshape(-1),
    }  # fmt: skip
    given = None if cu_seq_lens_q is None else (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    lengths_beside_a_bias = given is not None and position_bias is not None
    if attention_mask is not None and attention_mask.dim() == 5:
        pattern, padded = _read(attention_mask)
        if lengths_beside_a_bias and pattern.documents is None:
            _refuse_lengths()
        options.update(pattern.options())
        keys = attention_mask[:, :, :, : key.shape[2], 0]
        whole = query.shape[2] == attention_mask.shape[3]  # and not the last few queries alone
        if given is None and pattern.documents is not None and whole and not _traced(attention_mask):
            given = _lengths(attention_mask)
        if given is not None and not padded and position_bias is None:
            return _packed(query, key, value, given, options)
        if pattern.documents is not None:
            options["mask"] = keys == keys.transpose(2, 3)[:, :, keys.shape[3] - query.shape[2] :]
        elif padded:
            options["mask"] = keys
    elif given is not None and attention_mask is None and position_bias is None:
        # The keyword is meant as flash_attn's window: so many keys, the query's own among them, on either side.
        side = -1 if sliding_window is None else sliding_window - 1
        options.update(causal=causal, window=(side, side), align="bottom_right")
        return _packed(query, key, value, given, options)
    elif attention_mask is None:
        if lengths_beside_a_bias:
            _refuse_lengths()
        # As scaled_dot_product_attention's wrapper has it: a window is in the mask, and without one there is none.
        options.update(causal=causal and query.shape[2] > 1, align="top_left")
    elif attention_mask.dim() != 4:
        raise NotImplementedError(f"attention_mask: {attention_mask.dim()} dimensions; accepted: four")
    else:
        mask = attention_mask[..., : key.shape[2]]
        options["mask" if mask.dtype == torch.bool else "bias"] = mask
    if position_bias is not None:
        options["bias2" if "bias" in options else "bias"] = position_bias[..., : key.shape[2]]
    out: Tensor = _counts.call(_NAME, attention, query, key, value, names=_NAMES, **options)
    return out.transpose(1, 2), None


def _refuse_lengths() -> NoReturn:
    raise NotImplementedError("cu_seq_lens_q: given with position_bias; accepted: documents by position_ids, or one of the two")


# Of fovea's arguments.
_NAMES = {"q": "query", "k": "key", "v": "value", "scale": "scaling", "dropout_p": "dropout", "sink": "s_aux", "mask": "attention_mask",
          "cu_seqlens_q": "cu_seq_lens_q", "cu_seqlens_k": "cu_seq_lens_k"}  # fmt: skip


def _read(mask: Tensor) -> tuple[_Pattern, bool]:
    """The pattern of a descriptor, and whether it has padding."""
    kind = mask.dtype
    if kind not in (torch.bool, torch.int32) or mask.shape[1] != 1 or mask.shape[2] != 1 or mask.stride(4) != 0:
        # A copy to another device has lost the stride, and holds the same numbers.
        copied = kind in (torch.bool, torch.int32) and mask.shape[1:3] == (1, 1) and not _traced(mask)
        if not copied or not bool((mask == mask[..., :1]).all()):
            raise NotImplementedError(
                f"attention_mask: this model changed a mask that fovea made (shape {tuple(mask.shape)}, {kind}); accepted: "
                'attn_implementation="sdpa" or "eager" for it'
            )
    pattern, padded = _decoded(mask.shape[4])
    return (pattern._replace(documents=mask) if kind == torch.int32 else pattern), padded


def _lengths(mask: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """cu_seqlens of documents by their numbers, (B, 1, 1, S, n). All layers share one mask: it keeps them."""
    kept: Any = getattr(mask, "_fovea_lengths", None)
    if kept is None:
        numbers = mask[:, 0, 0, :, 0]
        begins = torch.ones_like(numbers, dtype=torch.bool)
        begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
        starts = begins.reshape(-1).nonzero().reshape(-1)
        cu_seqlens = torch.nn.functional.pad(starts, (0, 1), value=numbers.numel()).to(torch.int32)
        longest = int(cu_seqlens.diff().max()) if starts.numel() else 0
        kept = cu_seqlens, cu_seqlens, longest, longest
        mask._fovea_lengths = kept  # type: ignore[attr-defined]
    found: tuple[Tensor, Tensor, int, int] = kept
    return found


def _packed(query: Tensor, key: Tensor, value: Tensor, lengths: Any, options: dict[str, Any]) -> tuple[Tensor, None]:
    """The batch and the sequences in one row of packed sequences."""
    batch, heads, rows, _ = query.shape
    cu_seqlens_q, cu_seqlens_k, longest_q, longest_k = lengths
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    out: Tensor = _counts.call(
        _NAME, attention, q, k, v, names=_NAMES, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
        max_seqlen_q=q.shape[0] if longest_q is None else int(longest_q),
        max_seqlen_k=k.shape[0] if longest_k is None else int(longest_k), **options,
    )  # fmt: skip
    return out.view(batch, rows, heads, value.shape[3]), None


_warned = False


def _warn_of_probabilities() -> None:
    global _warned
    if not _warned and not torch.compiler.is_compiling():
        _warned = True
        warnings.warn(
            f'attn_implementation="{_IMPLEMENTATION}" returns no attention weights (output_attentions=True); accepted: '
            '"eager" for them (said once)', stacklevel=3,
        )  # fmt: skip


# ---- for fovea.integrations.install() ----


def _install(force: bool) -> None:
    register()


def _uninstall() -> None:
    modeling: Any = sys.modules.get("transformers.modeling_utils")
    masking: Any = sys.modules.get(_MASKING)
    for interface in (getattr(modeling, "AttentionInterface", None), getattr(masking, "AttentionMaskInterface", None)):
        if interface is not None:
            interface._global_mapping.pop(_IMPLEMENTATION, None)
