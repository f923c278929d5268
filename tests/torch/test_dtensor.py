# SPDX-License-Identifier: Apache-2.0
"""DTensors in fovea.torch.attention: batch, heads and rows over 2 to 4 processes with gloo, beside one process."""

import dtensor_cases
import pytest
import torch

import fovea.torch
from fovea.torch import _pytorch_cp


@pytest.mark.parametrize("case, dimension", [
    ("plain", 0), ("plain", 1), ("plain", 2), ("causal", 0), ("causal", 1), ("wide", 0), ("wide", 1), ("wide", 2), ("banded", 0),
    ("banded", 1), ("bshd", 0), ("bshd", 1), ("bshd", 2), ("levels", 0), ("levels", 1), ("levels", 2), ("levels", 3),
    ("causal", 2), ("banded", 2), ("short", 2), ("long", 2), ("placed", 2), ("placed", 0), ("dropout", 0), ("dropout", 1), ("dropout", 2),
    ("dropout levels", 1), ("dropout levels", 2), ("dropout levels", 3),
])  # fmt: skip
@pytest.mark.parametrize("n", [2, 4])
def test_one_process(ranks, n, case, dimension):
    if n == 4 and (case, dimension) == ("levels", 0):
        n = 2  # that level has two entries
    ranks.run(n, dtensor_cases.check, case, dimension)


def test_rows_that_do_not_divide(ranks):
    ranks.run(3, dtensor_cases.check, "wide", 2)


def test_causal_rows_compiled(ranks):
    ranks.run(2, dtensor_cases.check, "causal", 2, (), True)


def test_what_is_whole_is_cut(ranks):
    ranks.run(2, dtensor_cases.check, "causal", 1, ("k", "v", "bias", "sink"))


@pytest.mark.parametrize("compiled", [False, True])
def test_two_dimensions(ranks, compiled):
    ranks.run(4, dtensor_cases.two_dimensions, compiled)


def test_kept_decisions(ranks):
    ranks.run(2, dtensor_cases.kept_decisions)


def test_refusals(ranks):
    ranks.run(2, dtensor_cases.refusals)


@pytest.mark.parametrize("case, dimension", [
    ("plain", 0), ("plain", 1), ("plain", 2), ("causal", 0), ("causal", 1), ("bias", 0), ("bias", 1), ("bias", 2), ("causal", 2),
    ("mask of keys", 0), ("mask of keys", 1), ("mask of keys", 2),
])  # fmt: skip
def test_through_enable(ranks, case, dimension):
    ranks.run(2, dtensor_cases.through_sdpa, case, dimension)


def test_through_enable_compiled(ranks):
    ranks.run(2, dtensor_cases.through_sdpa, "causal", 1, dtensor_cases.B, True)


@pytest.mark.parametrize("n, batch", [(2, 5), (4, 5)])
def test_every_rank_decides_alike(ranks, n, batch):
    """Parts that are not equal, and a rank without any: all ask about the largest part."""
    told = ranks.run(n, dtensor_cases.through_sdpa, "plain", 0, batch)
    assert all(problems == told[0] for problems in told) and f" b={-(-batch // n)} " in told[0][0], told


def test_what_enable_hands_back(ranks):
    ranks.run(2, dtensor_cases.handed_back)


@pytest.mark.parametrize("way, problem", [("weights", "b=4 hq=4 hk=2 "), ("batch", "b=2 hq=8 hk=4 ")])
def test_a_model_through_enable(ranks, way, problem):
    for problems in ranks.run(2, dtensor_cases.parallel_model, way):
        assert all(problem in line for line in problems), problems


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) not in _pytorch_cp._TESTED,
                    reason=f"register_with_pytorch() refuses PyTorch {torch.__version__}")
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("options, with_bias", [
    ({"causal": True}, False), ({"softcap": 2.0, "window": (9, 3), "dropout_p": 0.3, "seed": 1}, True),
])
def test_pytorchs_context_parallel(ranks, n, balanced, options, with_bias):
    ranks.run(n, dtensor_cases.within_pytorchs, balanced, options, with_bias)


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) not in _pytorch_cp._TESTED,
                    reason=f"register_with_pytorch() refuses PyTorch {torch.__version__}")
def test_a_sink_within_pytorchs(ranks):
    ranks.run(2, dtensor_cases.sink_within_pytorchs)


@pytest.mark.skipif(tuple(map(int, torch.__version__.split(".")[:2])) not in _pytorch_cp._TESTED,
                    reason=f"register_with_pytorch() refuses PyTorch {torch.__version__}")
def test_registered_behind_pytorchs_dispatcher(ranks):
    ranks.run(2, dtensor_cases.registered_late)


def test_an_alignment_without_a_band(ranks):
    ranks.run(2, dtensor_cases.aligned_dropout)


def test_other_versions_of_pytorch_are_refused(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.16.0")
    with pytest.raises(NotImplementedError, match=r"PyTorch 2\.16\.0, whose context parallelism is private; accepted: 2\.15"):
        fovea.torch.register_with_pytorch()
