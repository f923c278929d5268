# SPDX-License-Identifier: Apache-2.0
"""The core_attention of Megatron-Core's layer specifications.

>>> from fovea.integrations.megatron import CoreAttention
>>> spec.submodules.self_attention.submodules.core_attention = CoreAttention  # doctest: +SKIP

install("megatron") makes it the core_attention of Megatron's own specifications of GPT-like layers. Megatron-Core is imported
by install() and where a learned sink is saved, and nowhere else. docs/integrations/megatron.md has every argument.
"""

# The names of Megatron-Core that this file uses and that may change are those of _NEEDED, and the arguments that its own
# DotProductAttention takes: Megatron hands CoreAttention the same. install() raises an ImportError where one is another. Of a
# configuration this file reads the attributes that are named below.

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from typing import Any, Optional

import torch
from torch import Tensor

from ..torch import attention
from . import _counts, _flash, _needs
from ._needs import Needed
from ._stand_in import Patches

__all__ = ["CoreAttention"]

_NAME = "megatron"
_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attention_bias", "mask": "attention_mask"}  # of fovea's arguments
_CLASS = "CoreAttention"

_CAUSAL = ("causal", "padding_causal")


class CoreAttention(torch.nn.Module):
    """A core_attention for Megatron-Core's attention layers, in the place of DotProductAttention or TEDotProductAttention.

    Unlike the first it takes a bias and packed sequences, and does not make the scores; unlike the second it gives the bias a
    gradient in the shape that the bias has, and needs no Transformer Engine.

    Args:
        config: A TransformerConfig. Read are attention_dropout, window_size, window_attn_skip_freq, softmax_type,
            deterministic_mode, sequence_parallel, num_attention_heads, tensor_model_parallel_size, params_dtype, init_method,
            perform_initialization, use_cpu_initialization. Refused are context_parallel_size > 1, qk_clip,
            log_max_attention_logit, fp8_dot_product_attention and fp8_multi_head_attention.
        layer_number: Counted from 1: which layers have a window.
        attn_mask_type: An AttnMaskType, for calls that give none.
        attention_type: Of no effect.
        attention_dropout: In the place of config.attention_dropout.
        softmax_scale: None is 1 / sqrt(D).
        k_channels: Of no effect: shapes say it.
        v_channels: The same.
        num_splits: Of no effect.
        cp_comm_type: Of no effect.
        pg_collection: Its `tp` is the group that shares the heads.

    Raises:
        NotImplementedError: The configuration asks for what fovea does not have.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: Optional[float] = None,
        softmax_scale: Optional[float] = None,
        *,
        k_channels: Optional[int] = None,
        v_channels: Optional[int] = None,
        num_splits: Optional[int] = None,
        cp_comm_type: Optional[str] = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        if getattr(config, "context_parallel_size", 1) > 1:
            _flash.refuse(_CLASS, "context_parallel_size", str(config.context_parallel_size), "1")
        for name in ("qk_clip", "log_max_attention_logit", "fp8_dot_product_attention", "fp8_multi_head_attention"):
            if getattr(config, name, False):
                _flash.refuse(_CLASS, name, "True, and fovea has no such feature", "False")
        self.config = config
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.dropout_p = float(config.attention_dropout if attention_dropout is None else attention_dropout)
        self.softmax_scale = softmax_scale
        self.window = self._window_of_layer()
        self.tp_group = getattr(pg_collection, "tp", None)
        shards = config.tensor_model_parallel_size if self.tp_group is None else self.tp_group.size()
        self.softmax_offset = self._offset(config.num_attention_heads // shards)

    def _window_of_layer(self) -> tuple[int, int]:
        window = getattr(self.config, "window_size", None)
        skip = getattr(self.config, "window_attn_skip_freq", None)
        if not window or (isinstance(skip, int) and self.layer_number % skip == 0):
            return -1, -1
        if isinstance(skip, list) and not skip[self.layer_number - 1]:
            return -1, -1
        return _flash.unbounded(window)

    def _offset(self, heads: int) -> Optional[Tensor]:
        """What softmax_type adds to the denominator, as logarithms for each head; under the name that Megatron saves it by."""
        kind = getattr(self.config, "softmax_type", "vanilla")
        if kind == "vanilla":
            return None
        on_cpu = getattr(self.config, "use_cpu_initialization", False) or not torch.cuda.is_available()
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        if kind == "off-by-one":
            return torch.zeros(heads, dtype=self.config.params_dtype, device=device)
        if kind != "learnable":
            _flash.refuse(_CLASS, "softmax_type", repr(kind), "'vanilla', 'off-by-one', 'learnable'")
        offset = torch.nn.Parameter(torch.empty(heads, dtype=self.config.params_dtype, device=device))
        if self.config.perform_initialization:
            self.config.init_method(offset)
        return offset

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Optional[Tensor],
        attn_mask_type: Any = None,
        attention_bias: Optional[Tensor] = None,
        packed_seq_params: Any = None,
        num_splits: Optional[int] = None,
    ) -> Tensor:
        """The attention of one layer.

        Args:
            query: (Sq, B, H, D), or packed (T, H, D): float32, float16, bfloat16 or, on the CPU, float64.
            key: (Sk, B, Hk, D), or packed (Tk, Hk, D). Hk divides H.
            value: (Sk, B, Hk, Dv), or packed (Tk, Hk, Dv).
            attention_mask: None, or a bool tensor that broadcasts to (B, H, Sq, Sk); **True is hidden**. It hides besides what
                attn_mask_type hides. Of packed sequences it is not read.
            attn_mask_type: An AttnMaskType; None is that of the layer. padding_causal and, for packed sequences, causal are
                aligned at the top left.
            attention_bias: None, or a tensor that broadcasts to (B, H, Sq, Sk), added after the scale, which has a gradient in
                its own shape.
            packed_seq_params: A PackedSeqParams of qkv_format "thd": cu_seqlens_q and cu_seqlens_kv; if the padded ones are
                given, these are where sequences begin, and the others say how long they are. Rows of padding are 0.
            num_splits: Of no effect.

        Returns:
            (Sq, B, H * Dv), or packed (T, H * Dv).

        Raises:
            NotImplementedError: A form that fovea does not have.
            ValueError: A shape or a value is not accepted.
            TypeError: A type is not accepted.
        """
        kind = (attn_mask_type or self.attn_mask_type).name
        options: dict[str, Any] = {
            "causal": kind in _CAUSAL or kind == "causal_bottom_right", "align": "bottom_right", "window": self.window,
            "bias": attention_bias, "sink": self._sink(query), "scale": self.softmax_scale,
            "dropout_p": self.dropout_p if self.training else 0.0,
            "deterministic": bool(getattr(self.config, "deterministic_mode", False)),
        }  # fmt: skip
        if getattr(packed_seq_params, "qkv_format", None) == "thd":
            return self._packed(query, key, value, kind, packed_seq_params, options)
        if packed_seq_params is not None:
            _flash.refuse(_CLASS, "packed_seq_params.qkv_format", repr(packed_seq_params.qkv_format), "'thd'")
        rows, batch = query.shape[:2]
        if kind in _CAUSAL and 1 < rows != key.shape[0]:
            _flash.refuse(_CLASS, "attn_mask_type", f"{kind} with {rows} queries and {key.shape[0]} keys, which Megatron has no "
                          "one meaning for", "causal_bottom_right, or as many")  # fmt: skip
        if attention_mask is not None:
            if not isinstance(attention_mask, Tensor) or attention_mask.dtype != torch.bool:
                raise TypeError(f"attention_mask: {type(attention_mask).__name__}; accepted: one tensor of bools, True is hidden")
            options["mask"] = ~attention_mask
        tensors = (query, key, value)
        alike = key.shape[1] == value.shape[1] == batch  # others would pass for groups of heads
        if attention_mask is None and attention_bias is None and alike and all(_side_by_side(x) for x in tensors):
            # One sequence of B * H heads: the result has Megatron's order of dimensions without a copy.
            if options["sink"] is not None:
                options["sink"] = options["sink"].repeat(batch)
            out = self._compute(*(x.flatten(1, 2).unsqueeze(0) for x in tensors), layout="bshd", **options)
            return out.view(rows, batch, query.shape[2] * value.shape[3])
        out = self._compute(*(x.transpose(0, 1) for x in tensors), layout="bshd", **options)
        return out.transpose(0, 1).flatten(2).contiguous()

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, kind: str, params: Any, options: dict[str, Any]) -> Tensor:
        if getattr(params, "cp_group", None) is not None:
            _flash.refuse(_CLASS, "packed_seq_params.cp_group", "a group", "None")
        query, key, value = (x.squeeze(1) if x.dim() == 4 else x for x in (query, key, value))
        if kind in _CAUSAL:
            options["align"] = "top_left"
        for side, lengths, padded, longest in (
            ("q", params.cu_seqlens_q, getattr(params, "cu_seqlens_q_padded", None), params.max_seqlen_q),
            ("k", params.cu_seqlens_kv, getattr(params, "cu_seqlens_kv_padded", None), params.max_seqlen_kv),
        ):
            options[f"cu_seqlens_{side}"] = lengths if padded is None else padded
            if padded is not None and padded is not lengths:
                same = side == "k" and lengths is params.cu_seqlens_q and "seqused_q" in options
                options[f"seqused_{side}"] = options["seqused_q"] if same else lengths.diff()
            options[f"max_seqlen_{side}"] = int(lengths.diff().max() if longest is None else longest)
        out = self._compute(query, key, value, **options)
        return out.flatten(1)

    def _sink(self, query: Tensor) -> Optional[Tensor]:
        offset = self.softmax_offset
        return None if offset is None else offset.to(query.device)

    def _compute(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        with self._generator(options["dropout_p"]):
            out: Tensor = _counts.call(_NAME, attention, q, k, v, names=_NAMES, **options)
        return out

    def _generator(self, dropout_p: float) -> contextlib.AbstractContextManager[Any]:
        """Ranks of a tensor-parallel group have other heads, and draw seeds of their own. With sequence_parallel the layer around
        has seen to it."""
        random = sys.modules.get("megatron.core.tensor_parallel.random")
        if dropout_p > 0 and random is not None and not self.config.sequence_parallel:
            tracker = random.get_cuda_rng_tracker()
            if tracker.is_initialized():
                forked: contextlib.AbstractContextManager[Any] = tracker.fork()
                return forked
        return contextlib.nullcontext()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Megatron's distributed checkpoints: a learned offset is shared out by heads, under the name of Megatron's own layer.

        Args:
            prefix: What names begin with.
            sharded_offsets: Handed on.
            metadata: Its "dp_cp_group" is handed on.

        Returns:
            ShardedTensors by name.
        """
        utils: Any = importlib.import_module("megatron.core.transformer.utils")
        own = self.state_dict(prefix="", keep_vars=True)
        return utils.make_sharded_tensors_for_checkpoint(
            own, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=(metadata or {}).get("dp_cp_group")
        )


def _side_by_side(x: Tensor) -> bool:
    """Whether the heads of all sequences are at one distance, so that (S, B, H, D) is also (S, B * H, D)."""
    return x.shape[1] == 1 or x.stride(1) == x.shape[2] * x.stride(2)


# ---- in Megatron's specifications ----

_VERSIONS = "megatron-core from 0.16 on"
_LOCAL = Needed("megatron.core.models.backends", "LocalSpecProvider.core_attention")
_ENGINE = Needed("megatron.core.extensions.transformer_engine_spec_provider", "TESpecProvider.core_attention")
_OWN = Needed("megatron.core.transformer.dot_product_attention", "DotProductAttention.forward")
_NEEDED = (
    _LOCAL,
    _OWN,
    Needed("megatron.core.transformer.utils", "make_sharded_tensors_for_checkpoint", ("tp_group", "dp_cp_group")),
    Needed("megatron.core.tensor_parallel.random", "get_cuda_rng_tracker"),
)
_patches = Patches()


def _core_attention(self: Any) -> type:
    return CoreAttention


def _install(force: bool) -> None:
    if _patches.before:
        return
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise ImportError(
            "install: megatron-core is not installed; accepted: the package, or the class fovea.integrations.megatron.CoreAttention"
        )
    _needs.require(_NAME, _VERSIONS, _NEEDED)
    own: Any = importlib.import_module(_OWN.module)
    for method in ("__init__", "forward"):
        _needs.require_known(_NAME, _VERSIONS, getattr(own.DotProductAttention, method), getattr(CoreAttention, method))
    providers = [_LOCAL]
    with contextlib.suppress(ImportError):  # without Transformer Engine
        importlib.import_module(_ENGINE.module)
        providers.append(_ENGINE)
    _needs.require(_NAME, _VERSIONS, providers)
    for provider in providers:
        name, _, method = provider.name.partition(".")
        _patches.put(getattr(importlib.import_module(provider.module), name), method, _core_attention)


def _uninstall() -> None:
    _patches.undo()
