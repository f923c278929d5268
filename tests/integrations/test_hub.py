# SPDX-License-Identifier: Apache-2.0
"""The folder that tools/hub.py makes, loaded as the package `kernels` does: __init__.py by its path, under the name in metadata.json."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fovea
import fovea.torch
from conftest import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub")
    build = Path(os.environ["FOVEA_LIBRARY"]).resolve().parent
    subprocess.run([sys.executable, ROOT / "tools/hub.py", out, "--build", build], check=True, capture_output=True)
    return out


def load(variant, monkeypatch):
    monkeypatch.delenv("FOVEA_LIBRARY", raising=False)  # the folder has a library
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_two_versions_in_one_process(folder, monkeypatch):
    """The installed package, and two copies: each has its own operators and its own shared library."""
    copies = [load(folder / "build" / name, monkeypatch) for name in ("torch-cpu", "torch-cuda")]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 7, 4, 16, requires_grad=True) for _ in range(3))
    sink = torch.randn(4, requires_grad=True)
    want = fovea.torch.attention(q, k, v, causal=True, sink=sink, layout="bshd")
    wanted = torch.autograd.grad(want.square().sum(), (q, k, v, sink))
    for copy in copies:
        assert copy.__version__ == fovea.__version__
        out = copy.flash_attn_func(q, k, v, causal=True, s_aux=sink)
        assert type(out.grad_fn) is not type(want.grad_fn) or copy.attention is not fovea.torch.attention
        torch.testing.assert_close(out, want, rtol=0, atol=0)
        for one, other in zip(torch.autograd.grad(out.square().sum(), (q, k, v, sink)), wanted):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    packed = [x.detach().flatten(0, 1) for x in (q, k, v)]
    offsets = torch.tensor([0, 7, 14], dtype=torch.int32)
    out, lse, _ = copies[0].flash_attn_varlen_func(*packed, offsets, offsets, 7, 7, causal=True, s_aux=sink.detach(), return_attn_probs=True)
    torch.testing.assert_close(out.view_as(want), want.detach())
    assert lse.shape == (4, 14)
    spaces = {sys.modules[f"{copy.__name__}.fovea.torch._operators"].NAMESPACE for copy in copies}
    assert len(spaces) == 2 and "fovea" not in spaces
    for copy, variant in zip(copies, ("torch-cpu", "torch-cuda")):
        library = sys.modules[f"{copy.__name__}.fovea._library"]
        assert library.path == folder / "build" / variant / "fovea/libfovea.so"


def test_compiled(folder, monkeypatch):
    """One graph, with the copy's operator in it."""
    copy = load(folder / "build/torch-cpu", monkeypatch)
    q = torch.randn(1, 5, 2, 8)
    compiled = torch.compile(copy.flash_attn_func, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, q, q, causal=True), copy.flash_attn_func(q, q, q, causal=True))


def test_no_build(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "tools/hub.py", tmp_path / "out", "--build", tmp_path], capture_output=True, text=True)
    assert done.returncode == 1 and "libfovea.so does not exist: run `make build`" in done.stderr and not (tmp_path / "out").exists()
