# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for flash_attn_tests.py: fovea's functions stand in for flash_attn while its own tests run."""

import importlib.util
import json
import math
import random
import sys
import time
import types
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/gpu"))

import dropout  # noqa: E402

import fovea.integrations  # noqa: E402
from fovea.integrations import _flash  # noqa: E402

# Tests of something else than attention without a cache, by a part of their names.
LEFT_OUT = {
    "kvcache": "of caches", "paged": "of caches", "combine": "of a part of their kernels", "generator_arg": "of their compiled module",
    "bw_compatibility": "of the schema of their operators", "cache_separates": "of their compiler's cache",
    "metadata": "of their scheduler", "sm100": "of other GPUs", "sm120": "of other GPUs", "fp8": "of other types",
    "ex2_emu": "of other GPUs", "bwd_preallocated": "of a private function", "mla": "of qv",
    "invalid_head_dim": "that head dimensions are refused which fovea takes",
}  # fmt: skip
STARTED = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--fovea-version", choices=("2", "3", "4"))
    parser.addoption("--fovea-source", type=Path)
    parser.addoption("--fovea-device")
    parser.addoption("--fovea-sample", type=int, help="so many combinations of parameters of each test")
    parser.addoption("--fovea-longest", type=int, help="leave out longer sequences")
    parser.addoption("--fovea-seconds", type=float)
    parser.addoption("--fovea-report", type=Path)


def missing(name):
    def function(*_, **__):
        raise NotImplementedError(f"{name}: fovea has no such function")

    return function


def module(name, **contents):
    made = types.ModuleType(name)
    made.__dict__.update(contents)
    sys.modules[name] = made
    return made


def pytest_configure(config):
    if config.getoption("--fovea-device") == "cpu":
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=2**60, multi_processor_count=132)
        torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    version = config.getoption("--fovea-version")
    fovea.integrations.install("flash_attn" if version == "2" else f"flash_attn_{version}")
    config.results = {}
    if version == "2":
        # Used by tests of caches alone, and to interpret probabilities, which here are one block.
        module("flash_attn.layers", __path__=[])
        module("flash_attn.layers.rotary", apply_rotary_emb=missing("apply_rotary_emb"))
        interface = sys.modules["flash_attn.flash_attn_interface"]
        interface._get_block_size_n = lambda *_: 1 << 30
        interface.USE_TRITON_ROCM = False
        with_probabilities()
    elif version == "3":
        interface = sys.modules["flash_attn_interface"]
        interface.flash_attn_combine = missing("flash_attn_combine")
        interface.get_scheduler_metadata = missing("get_scheduler_metadata")
    else:
        interface = sys.modules["flash_attn.cute.interface"]
        interface.get_scheduler_metadata = lambda *_, **__: None  # their kernels' plan; fovea's functions accept and ignore it
        interface._flash_attn_bwd_sparse_mla = missing("_flash_attn_bwd_sparse_mla")
        module("flash_attn.cute.cache_utils", JITCache=dict)
        spec = importlib.util.spec_from_file_location("flash_attn.cute.testing", config.getoption("--fovea-source") / "flash_attn/cute/testing.py")
        testing = importlib.util.module_from_spec(spec)
        sys.modules["flash_attn.cute.testing"] = testing
        spec.loader.exec_module(testing)


# ---- dropout ----


def with_probabilities():
    """flash_attn returns, for its tests, the probabilities before they are normalised, with a minus sign where they are dropped.
    fovea returns none: here they are computed again, by the formula, and dropout's decisions by its rule."""
    calls = []

    def seeded(function):
        def call(*tensors, **options):
            if options.get("dropout_p"):
                options["seed"] = int(torch.randint(0, 2**62, ()))
                calls.append(options["seed"])
            return function(*tensors, **options)

        return call

    _flash.attention, _flash.attention_qkv = seeded(_flash.attention), seeded(_flash.attention_qkv)

    def wrap(name, function):
        def call(*arguments, **options):
            calls.clear()
            found = function(*arguments, **options)
            if calls and options.get("return_attn_probs"):
                return (*found[:2], probabilities(name, arguments, options, calls[0]))
            return found

        return call

    package, interface = sys.modules["flash_attn"], sys.modules["flash_attn.flash_attn_interface"]
    for name, function in list(vars(package).items()):
        if name.endswith("_func"):
            setattr(package, name, wrap(name, function))
            setattr(interface, name, getattr(package, name))


def split(name, arguments):
    """q, k, v and the other arguments."""
    if "qkvpacked" in name:
        return *arguments[0].unbind(-3), arguments[1:]
    if "kvpacked" in name:
        return arguments[0], *arguments[1].unbind(-3), arguments[2:]
    return *arguments[:3], arguments[3:]


@torch.no_grad()
def probabilities(name, arguments, options, seed):
    """(B, H, Sq, Sk) of exp(score - largest score), negative where dropped."""
    q, k, _, rest = split(name, arguments)
    if "varlen" in name:
        if "qkvpacked" in name:
            rest = (rest[0], *rest)[:2] + (rest[1], *rest[1:])
        offsets, longest, p = rest[:2], [int(x) for x in rest[2:4]], rest[4]
    else:
        offsets = [torch.arange(x.shape[0] + 1) * x.shape[1] for x in (q, k)]
        longest, p = [q.shape[1], k.shape[1]], rest[0]
        q, k = q.flatten(0, 1), k.flatten(0, 1)
    batch, heads = len(offsets[0]) - 1, q.shape[1]
    streams = torch.arange(batch * heads, device=q.device).reshape(batch, heads)
    keep = dropout.kept("fovea", p, seed, 0, streams, *longest, None)
    left, right = (int(side) for side in options.get("window_size", (-1, -1)))
    if options.get("causal"):
        right = 0
    slopes = options.get("alibi_slopes")
    out = torch.zeros(batch, heads, *longest, device=q.device)
    for b in range(batch):
        (q0, q1), (k0, k1) = (tuple(x[b : b + 2].tolist()) for x in offsets)
        rows, keys = q[q0:q1].float(), k[k0:k1].float().repeat_interleave(heads // k.shape[1], 1)
        scores = torch.einsum("thd,shd->hts", rows, keys) / math.sqrt(q.shape[-1])
        distance = torch.arange(q1 - q0, device=q.device)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0, device=q.device)
        if slopes is not None:
            scores -= slopes.expand(batch, heads)[b][:, None, None] * distance.abs()
        if left >= 0:
            scores.masked_fill_(distance > left, -math.inf)
        if right >= 0:
            scores.masked_fill_(-distance > right, -math.inf)
        out[b, :, : q1 - q0, : k1 - k0] = torch.exp(scores - scores.amax(-1, keepdim=True)).nan_to_num(0)
    return torch.where(keep, out, -out.clamp(min=1e-30))


# ---- which tests run, and what becomes of them ----


def length_of(item):
    return max([value for name, value in item.callspec.params.items() if "seqlen" in name and type(value) is int] or [0])


def pytest_collection_modifyitems(config, items):
    chosen, functions = [], {}
    for item in items:
        name = getattr(item, "originalname", item.name)
        if any(part in name for part in LEFT_OUT):
            continue
        limit = config.getoption("--fovea-longest")
        if limit and hasattr(item, "callspec") and length_of(item) > limit:
            continue
        functions.setdefault(name, []).append(item)
    for name, found in functions.items():
        random.Random(name).shuffle(found)
        # Of what is always refused one each; the sample is of the rest.
        plain, refused = [], {}
        for item in found:
            given = getattr(getattr(item, "callspec", None), "params", {})
            why = next((key for key in ("paged_kv_block_size", "page_size", "has_qv") if given.get(key)), None)
            why = "fp8" if given.get("dtype") == getattr(torch, "float8_e4m3fn", None) else why
            if why:
                refused[why] = item
            else:
                plain.append(item)
        chosen.append([*refused.values(), *plain[: config.getoption("--fovea-sample")]])
    # One of each test after the other, so that a limit of time leaves some of each.
    items[:] = [found[n] for n in range(max(map(len, chosen), default=0)) for found in chosen if n < len(found)]


def pytest_runtest_setup(item):
    if time.monotonic() - STARTED > item.config.getoption("--fovea-seconds"):
        pytest.skip("the time is over")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when != "call" and not (report.when == "setup" and report.outcome != "passed"):
        return
    result = report.outcome
    said = ""
    if call.excinfo is not None:
        said = str(call.excinfo.value).strip().splitlines()[0][:200] if str(call.excinfo.value).strip() else repr(call.excinfo.value)
        if isinstance(call.excinfo.value, NotImplementedError) and "fovea" in said:
            report.outcome, result = "skipped", "refused"
            report.longrepr = (str(item.path), 0, f"Skipped: refused: {said}")
        elif result == "failed":
            said = f"{call.excinfo.typename}: {said}"
    found = item.config.results.setdefault(getattr(item, "originalname", item.name), {"passed": 0, "refused": Counter(), "skipped": Counter(), "failed": {}})
    if result == "passed":
        found["passed"] += 1
    elif result == "failed":
        found["failed"][item.name] = said
    else:
        found[result][said] += 1


def pytest_unconfigure(config):
    if config.getoption("--fovea-report"):
        config.getoption("--fovea-report").write_text(json.dumps({"tests": config.results, "served": fovea.integrations.stats()}))
