# SPDX-License-Identifier: Apache-2.0
"""Code of a user, for mypy --strict: it is never run. An assert_type fails if the type is another one, and each
`type: ignore` fails if there is no such error."""

from typing import Any, Union

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import fovea


class Elsewhere:
    """An array of another library."""


def calls(q: NDArray[np.float16], flag: bool, other: Elsewhere) -> None:
    assert_type(fovea.attention(q, q, q), NDArray[np.float16])
    assert_type(fovea.attention(q, q, q, causal=True, window=(3, -1), align="top_left", out=q), NDArray[np.float16])
    assert_type(fovea.attention(q, q, q, return_lse=True), tuple[NDArray[np.float16], NDArray[np.floating[Any]]])
    assert_type(fovea.attention(other, other, other), Elsewhere)
    assert_type(fovea.attention(other, other, other, return_lse=True), tuple[Elsewhere, Elsewhere])
    assert_type(fovea.attention(other, other, other, return_lse=flag), Union[Elsewhere, tuple[Elsewhere, Any]])
    out, lse = fovea.attention(q, q, q, return_lse=True)
    grads = fovea.attention_backward(out, q, q, q, out, lse, need=["q", "k"], grads_out={"q": q})
    assert_type(grads, fovea.Gradients)
    grad_q, *_ = grads
    attend = fovea.Attention(causal=True, softcap=30.0)
    assert_type(attend(q, q, q), NDArray[np.float16])
    assert_type(attend(q, q, q, bias=q, return_lse=True), tuple[NDArray[np.float16], NDArray[np.floating[Any]]])
    assert_type(attend(other, other, other, return_lse=True), tuple[Elsewhere, Elsewhere])
    assert_type(attend.with_(offset=1), fovea.Attention)
    assert_type(attend.backward(out, q, q, q, out, lse, need="q"), fovea.Gradients)
    assert_type(fovea.pack([q, q]), tuple[NDArray[np.float16], NDArray[np.signedinteger[Any]], int])
    assert_type(fovea.pack([other]), tuple[Elsewhere, Elsewhere, int])
    assert_type(fovea.unpack(q, [0, 1]), list[NDArray[np.float16]])
    assert_type(fovea.dropout_mask(1, 2, 3, 4, 0.1, seed=0), NDArray[np.bool_])
    assert_type(fovea.explain(), str)
    assert_type(fovea.explain("fwd b=1", arch="sm_90"), str)
    assert_type(fovea.explain(q, q, q, causal=True, need="q"), str)
    assert_type(fovea.backends(), dict[str, str])
    fovea.prepare(q, q, q, causal=True, direction="backward", return_lse=True)
    options: dict[str, Any] = dict(causal=True)
    assert_type(fovea.attention(q, q, q, **options), Any)


def mistakes(q: NDArray[np.float32]) -> None:
    fovea.attention(q, q, q, q)  # type: ignore[call-overload]
    fovea.attention(q, q, q, is_causal=True)  # type: ignore[call-overload]
    fovea.attention(q, q, q, causal="yes")  # type: ignore[call-overload]
    fovea.attention(q, q, q, layout="sbhd")  # type: ignore[call-overload]
    fovea.attention(q, q, q, align="left")  # type: ignore[call-overload]
    fovea.attention_backward(q, q, q, q, q, q, return_lse=True)  # type: ignore[arg-type]
    fovea.Attention(casual=True)  # type: ignore[call-arg]
    fovea.Attention()(q, q, q, causal=True)  # type: ignore[call-overload]
    fovea.explain(q, q)  # type: ignore[call-overload]
    fovea.atention(q, q, q)  # type: ignore[attr-defined]
