# SPDX-License-Identifier: Apache-2.0
"""Triangle attention of Boltz, Protenix and OpenFold 3, their own modules from their packages: with the kernels that fovea is in the
place of beside their formula in PyTorch, results and every gradient.

Each library is imported by a process of its own, as `import` there looks for packages that must be there by then."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = Path(os.environ.get("FOVEA_BUILD", ROOT / "build")).resolve() / "libfovea.so"

PROGRAM = '''
import sys, types
import torch
import fovea.integrations

{more}
fovea.integrations.install(*{installed})
{imports}

N, C, D, H = 20, 16, 8, 4
torch.manual_seed(0)
mask = torch.ones(N, N)
mask[:, 17:] = mask[17:] = 0
mask[:, 0] = 1  # every row has a key: elsewhere programs and fovea differ, and no loss depends on it
mask[0] = 1
for batch in {batches}:
    for kind in (TriangleAttentionStartingNode, TriangleAttentionEndingNode):
        node = kind(C, D, H)
        for parameter in node.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        x = torch.randn(*batch, N, N, C, requires_grad=True)
        here = mask.expand(*batch, N, N)
        weights = torch.randn(x.shape)

        def step(**options):
            out = node(x, mask=here, **options)
            assert out.shape == x.shape
            return [out, *torch.autograd.grad((out * weights).sum(), [x, *node.parameters()])]

        want = step({plain})
        for name, options, tolerance in {kernels}:
            fovea.integrations.reset_stats()
            got = step(**options)
            served = fovea.integrations.stats()[name]["served"]
            assert served == 1, fovea.integrations.stats()
            worst = max(((a - b).abs().max() / b.abs().max().clamp_min(1e-3)).item() for a, b in zip(got, want))
            assert worst < tolerance, (name, batch, kind.__name__, worst)
            print(kind.__name__, list(x.shape), options, f"{{worst:.2g}}")
'''

# DeepSpeed is not installed: a package with nothing but the function, which install() patches.
DEEPSPEED = '''
parent = None
for name in ("deepspeed", "deepspeed.ops", "deepspeed.ops.deepspeed4science", "deepspeed.ops.deepspeed4science.evoformer_attn"):
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace(name=name, submodule_search_locations=[], loader=None, origin=None)
    module.__path__ = []
    sys.modules[name] = module
    if parent is not None:
        setattr(parent, name.rpartition(".")[2], module)
    parent = module
    if "science" in name:
        module.DS4Sci_EvoformerAttention = None
sys.modules["deepspeed"].__version__ = "0.0.0"
'''

# name: (what comes before, imports, shapes of the batch, options of the formula, (integration, options, tolerance))
LIBRARIES = {
    "boltz": ("", "from boltz.model.layers.triangular_attention.attention import TriangleAttentionEndingNode, TriangleAttentionStartingNode",
              [(1,), (2,)], "", [("triangle", {"use_kernels": True}, 1e-4)]),
    "protenix": (DEEPSPEED, '''
import functools
from protenix.model.triangular.triangular import TriangleAttention
TriangleAttentionStartingNode = functools.wraps(TriangleAttention, updated=())(functools.partial(TriangleAttention, starting=True))
TriangleAttentionEndingNode = functools.wraps(TriangleAttention, updated=())(functools.partial(TriangleAttention, starting=False))
''', [()], "triangle_attention='torch'",
                 [("triangle", {"triangle_attention": "cuequivariance"}, 1e-4), ("evoformer", {"triangle_attention": "deepspeed"}, 5e-2)]),
    "openfold3": ("", '''
available, torch.cuda.is_available = torch.cuda.is_available, lambda: True  # OpenFold 3 asks for a GPU when it is imported
from openfold3.core.model.layers.triangular_attention import TriangleAttention, TriangleAttentionEndingNode
torch.cuda.is_available = available
TriangleAttentionStartingNode = TriangleAttention
''', [(1,), (2,)], "",
                  [("triangle", {"use_cueq_triangle_kernels": True}, 1e-4)]),
}  # fmt: skip


@pytest.mark.parametrize("library", LIBRARIES)
def test_triangle_attention(library):
    more, imports, batches, plain, kernels = LIBRARIES[library]
    path = os.pathsep.join([str(Path(sys.prefix) / "proteins"), str(ROOT / "python")])
    environment = {**os.environ, "PYTHONPATH": path, "FOVEA_LIBRARY": str(LIBRARY), "LAYERNORM_TYPE": "torch"}
    program = PROGRAM.format(more=more, imports=imports, batches=batches, plain=plain, kernels=kernels,
                             installed=[name for name, _, _ in kernels])  # fmt: skip
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.count("Triangle") == 2 * len(batches) * len(kernels), done.stdout
    print(done.stdout, end="")
