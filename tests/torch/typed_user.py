# SPDX-License-Identifier: Apache-2.0
"""Code of a user, for mypy --strict: it is never run. An assert_type fails if the type is another one, and each
`type: ignore` fails if there is no such error."""

from typing import Union

import torch
from torch import Tensor
from typing_extensions import assert_type

import fovea.torch


class Block(torch.nn.Module):
    def forward(self, q: Tensor, bias: Tensor, flag: bool) -> Tensor:
        attention = fovea.torch.attention
        assert_type(attention(q, q, q, bias=bias, causal=True, window=(3, -1)), Tensor)
        assert_type(attention(q, q, q, dropout_p=0.1, seed=q, return_lse=False), Tensor)
        assert_type(attention(q, q, q, return_lse=flag), Union[Tensor, tuple[Tensor, Tensor]])
        assert_type(attention(q, q, q, return_lse=True), tuple[Tensor, Tensor])
        assert_type(fovea.torch.attention_qkv(q, 2, layout="bshd"), Tensor)
        assert_type(fovea.torch.attention_qkv(q, 2, return_lse=True), tuple[Tensor, Tensor])
        out, _lse = attention(q, q, q, layout="bshd", align="top_left", return_lse=True)
        return out


def mistakes(q: Tensor) -> None:
    fovea.torch.attention(q, q, q, q)  # type: ignore[call-overload]
    fovea.torch.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    fovea.torch.attention(q, q, [1.0])  # type: ignore[call-overload]
    fovea.torch.attention(q, q, q, layout="sbhd")  # type: ignore[call-overload]
    fovea.torch.attention(q, q, q, scale="1")  # type: ignore[call-overload]


def switches() -> None:
    with fovea.torch.enabled(devices="cpu", prefer=None):
        assert_type(fovea.torch.is_enabled(), bool)
    fovea.torch.enable(devices=["cuda", "cpu"], strict=True)
    assert_type(fovea.torch.stats()["handed_back"], dict[str, int])
    assert_type(fovea.torch.stats()["problems"], list[str])
    fovea.torch.enable(operators=True)
    assert_type(fovea.torch.stats()["operators"], dict[str, int])
    assert_type(fovea.torch.aten.owners(), dict[str, str])
    fovea.torch.enable(prefer="slowest")  # type: ignore[arg-type]
    fovea.torch.enable(devices="tpu")  # type: ignore[arg-type]
