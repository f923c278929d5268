# SPDX-License-Identifier: Apache-2.0
"""Every row of the case table, forward and backward, against the formula in fp64 by the specification's rule; then
once more inside a CUDA graph's capture, replayed twice."""

import os
import re

import pytest
import torch

import fovea
from problem import parse
from table import LARGER, features_of, on_device, rows, sanitize_rows
from trial import Trial

ROWS = [
    pytest.param(n, id=f"{n + 1}", marks=[pytest.mark.sanitize] if n in sanitize_rows() else []) for n in range(len(rows()))
]


@pytest.mark.parametrize("n", ROWS)
def test_row(n, device, record_property):
    p = rows()[n]
    if device.type == "cuda" and p.type == "fp64":
        refusals = Trial(p, device).test()
        assert len(refusals) == 2 and all("fp64 on a CUDA device" in text for text in refusals), refusals
        p = on_device(p)
    record_property("line", p.line())
    trial = Trial(p, device)
    faults = trial.test()
    if device.type == "cuda" and "FOVEA_SANITIZE" not in os.environ:
        faults += trial.test_captured()
    for way in ("forward", "backward", "captured"):
        record_property(way, not any(fault.startswith(way) for fault in faults))
    assert not faults, "\n".join([p.line(), *faults])


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("line", LARGER)
def test_what_no_row_takes(line, device):
    p = parse(line)
    p.case_seed = 1
    faults = Trial(p, device).test()
    assert not faults, "\n".join([line, *faults])


@pytest.mark.cuda
def test_columns_apart_in_outputs_are_refused_or_right(device):
    holder = torch.full((1, 8, 2, 32), 7.0, device=device, dtype=torch.bfloat16)
    out = holder[..., ::2]
    q = torch.randn(1, 8, 2, 16, device=device, dtype=torch.bfloat16)
    try:
        fovea.attention(q, q, q, out=out)
    except NotImplementedError as error:
        assert "out: stride 2 in its last dimension" in str(error)
    else:
        assert torch.equal(out, fovea.attention(q, q, q)) and (holder[..., 1::2] == 7).all()


def test_table_is_complete():
    assert len(rows()) > 600
    chosen = sanitize_rows()
    assert len(chosen) <= 60
    seen = set().union(*(features_of(rows()[n]) for n in chosen))
    there = set().union(*(features_of(p) for p in rows() if p.type != "fp64"))
    assert not there - seen
    kinds = {re.sub(r"=.*(:\w+)", r"=\1", word) if "bias" in word else word.partition("=")[0] for word in seen}
    for kind in ("bias=:fp32", "bias=:bf16", "bias=:fp16", "bias2=:fp32", "mask", "alibi", "sink", "dropout", "softcap"):
        assert kind in kinds, kind
    assert {"bias=b,h,q,k:bf16", "bias=1,h,q,k:bf16", "bias=b,1,1,k:bf16", "bias=b,h,q,1:bf16", "mask=b,h,q,k", "mask=b,1,1,k",
            "a mask of many keys"} <= seen  # fmt: skip


def test_backend_is_there(device):
    assert fovea.backends()["cuda" if device.type == "cuda" else "cpu"] == "available"
    if device.type == "cuda":
        assert torch.cuda.get_device_capability(device) >= (8, 0)
