# SPDX-License-Identifier: Apache-2.0
"""fovea.torch.enable() with what traces, compiles, exports and distributes programs."""

import io
import json
import os
import subprocess
import sys
import tempfile
import warnings

import pytest
import torch
import torch.multiprocessing
from test_enable import close, counted, qkv, results
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import scaled_dot_product_attention as sdpa

from conftest import ROOT
from fovea.torch import _enable, _enable_decisions, _enable_jagged, disable, enable, enabled, reset_stats, stats


@pytest.fixture(autouse=True)
def off():
    reset_stats()
    yield
    disable()
    reset_stats()


def recording(graphs):
    """A backend that keeps the text of the forward and of the backward."""

    def keep(graph, inputs):
        graphs.append(graph.code)
        return graph

    return aot_autograd(fw_compiler=keep, bw_compiler=keep)


# ---- torch.compile ----


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}], ids=str)
def test_compiled_graphs_have_the_operator(options):
    tensors = qkv()
    bias = torch.randn(1, 4, 6, 6, requires_grad=True) if not options else None
    leaves = [*tensors, *([] if bias is None else [bias])]
    call = lambda: sdpa(*tensors, attn_mask=bias, **options)  # noqa: E731
    graphs = []
    enable(prefer=None)
    torch.manual_seed(1)
    want = results(call, *leaves)
    assert counted() == (1, 0, 0)
    torch.manual_seed(1)
    got = results(torch.compile(call, fullgraph=True, backend=recording(graphs)), *leaves)
    close(got, want)
    assert "fovea.attention.default" in graphs[0] and "fovea.attention_backward" in graphs[1]
    served, traced, handed_back = counted()
    assert served == 1 and traced >= 1 and handed_back == 0


def test_traces_are_counted_and_runs_are_not():
    tensors = qkv()
    enable(prefer=None)
    call = torch.compile(lambda *x: sdpa(*x), fullgraph=True, backend="aot_eager")
    for _ in range(3):
        call(*tensors)
    once = counted()
    assert once[0] == 0 and once[1] >= 1
    call(*tensors)
    assert counted() == once


def test_problems_of_graphs():
    """Those that `fovea precompile` needs, as in eager mode; with dynamic shapes those of the sizes of the trace."""
    tensors = qkv()
    enable(prefer=None)
    sdpa(*tensors)
    want = stats()["problems"]
    assert len(want) == 2
    for options in ({}, {"dynamic": True}):
        reset_stats()
        torch._dynamo.reset()
        torch.compile(lambda *x: sdpa(*x), fullgraph=True, backend="aot_eager", **options)(*tensors)
        assert counted()[0] == 0 and stats()["problems"] == want


def test_switching_compiles_anew():
    """A compiled function is not guarded on what computes attention."""
    graphs = []
    call = torch.compile(lambda *x: sdpa(*x), fullgraph=True, backend=recording(graphs))
    tensors = qkv(grad=False)
    want = call(*tensors)
    enable(prefer=None)
    close([call(*tensors)], [want])
    disable()
    call(*tensors)
    assert ["fovea" in graph for graph in graphs] == [False, True, False]


def test_switching_within_compiled_code_is_refused():
    def call(x):
        enable()
        return x + 1

    with pytest.raises(Exception, match=r"fovea.torch.enable: called from code that torch.compile traces|Unsupported"):
        torch.compile(call, fullgraph=True, backend="eager")(torch.ones(2))
    assert not _enable.is_enabled()


def test_dynamic_shapes_are_one_graph():
    graphs = []
    enable()  # the decision about speed must not add a guard
    call = torch.compile(lambda q, k, v, m: sdpa(q, k, v, m), fullgraph=True, dynamic=True, backend=recording(graphs))
    for batch, rows in ((2, 6), (3, 9), (5, 200)):
        q, k, v = qkv(batch, 4, rows, 8, grad=False)
        mask = torch.rand(1, 1, rows, rows) < 0.9
        want = _enable_decisions.composite(q, k, v, mask)
        close([call(q, k, v, mask)], [want])
    assert len(graphs) == 1


def test_inductor_and_its_pattern_of_attention():
    """Inductor lays memory out by what the operator says. It also makes attention of a softmax between two products."""
    tensors = qkv()

    def block(q, k, v):
        return sdpa(q * 2, k, v, is_causal=True).transpose(1, 2).flatten(2) + 1

    def by_hand(q, k, v):
        return torch.softmax((q @ k.transpose(-2, -1)).div(8**0.5), -1) @ v

    want = results(lambda: block(*tensors), *tensors), by_hand(*tensors)
    enable(prefer=None)
    compiled = torch.compile(block, fullgraph=True)
    close(results(lambda: compiled(*tensors), *tensors), want[0])
    with torch.no_grad():
        close([torch.compile(by_hand)(*tensors)], [want[1]])
    assert counted()[1] >= 1


def test_handed_back_in_a_graph():
    graphs = []
    q, k, v = qkv(grad=False)
    k = torch.cat([k, k], -2)
    v = torch.cat([v, v], -2)
    enable(prefer=None)
    call = torch.compile(lambda q, k, v: sdpa(q, k, v, scale=float("inf")), fullgraph=True, backend=recording(graphs))
    call(q, k, v)
    assert "fovea" not in graphs[0] and "scaled_dot_product" in graphs[0]
    assert set(stats()["handed_back"]) == {"a scale that is not finite"}


def test_nested_tensors_in_compiled_code_are_pytorchs():
    """Their function is not an operator, and what replaces it counts, which Dynamo would guard on."""
    leaf = torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in (5, 9)], layout=torch.jagged)
    call = lambda leaf: sdpa(*[leaf.transpose(1, 2)] * 3).transpose(1, 2)  # noqa: E731
    want = call(leaf).values()
    enable(prefer=None)
    got = torch.compile(call, backend="aot_eager")(leaf)
    close([got.values()], [want])
    served, traced, _ = counted()
    assert served == traced == 0 and stats()["handed_back"].keys() == {_enable_jagged._COMPILED}
    enable(prefer=None, strict=True)
    with pytest.raises(RuntimeError, match=f"{_enable_jagged._COMPILED}; fovea does not compute this"):
        torch.compile(call, backend="aot_eager")(leaf)


# ---- compile caches ----

CACHED = """
import json, os, sys, torch
if sys.argv[1] != "off":
    import fovea.torch
    fovea.torch.enable(**{"prefer": None, **json.loads(sys.argv[2])})
    from fovea.torch import _fastest
    _fastest.slower = lambda *call: "FOVEA_CPU_ISA" in os.environ  # the table may say so of one instruction set
tensors = [torch.ones(2, 4, 16, 8) for _ in range(3)]
call = torch.compile(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v), fullgraph=True)
if "thread" in sys.argv:
    import threading
    thread = threading.Thread(target=call, args=tensors)
    thread.start()
    thread.join()
else:
    call(*tensors)
counters = torch._dynamo.utils.counters["aot_autograd"]
from torch.profiler import profile
with profile() as seen:
    call(*tensors)
print(json.dumps({"fovea": any("fovea::attention" in e.key for e in seen.key_averages()),
                  "imported": "fovea" in sys.modules, "hit": counters["autograd_cache_hit"]}))
"""


def cached(folder, mode, *how, **options):
    done = subprocess.run([sys.executable, "-c", CACHED, mode, json.dumps(options), *how], capture_output=True, text=True,
                          env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_compile_caches_do_not_mix_when_fovea_is_second(tmp_path):
    """The key of PyTorch's cache has attention as one node, whoever computes it: without the tag the second process
    runs what the first has kept."""
    assert cached(tmp_path, "off") == {"fovea": False, "imported": False, "hit": 0}
    assert cached(tmp_path, "on") == {"fovea": True, "imported": True, "hit": 0}
    assert cached(tmp_path, "on") == {"fovea": True, "imported": True, "hit": 1}  # its own


def test_compile_caches_do_not_mix_when_fovea_is_first(tmp_path):
    assert cached(tmp_path, "on") == {"fovea": True, "imported": True, "hit": 0}
    assert cached(tmp_path, "off") == {"fovea": False, "imported": False, "hit": 0}


@pytest.mark.parametrize("first, second", [("off", "on"), ("on", "off")])
def test_compile_caches_do_not_mix_in_other_threads(first, second, tmp_path):
    """From PyTorch 2.15 on a value of its configuration holds in one thread alone."""
    for mode in (first, second):
        assert cached(tmp_path, mode, "thread") == {"fovea": mode == "on", "imported": mode == "on", "hit": 0}


SWITCHED = """
import json, os, sys, torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
leaves = [torch.linspace(-1, 1, 1024).view(2, 4, 16, 8).roll(n).requires_grad_() for n in range(3)]
def results():
    call = torch.compile(lambda q, k, v: sdpa(q, k, v, is_causal=True), backend=sys.argv[1], fullgraph=True)
    out = call(*leaves)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]
want = results() if sys.argv[2][0] == "-" else None
import fovea.torch
found = []
for switch in sys.argv[2].lstrip("-"):
    fovea.torch.disable() if switch == "0" else fovea.torch.enable(prefer=None, operators=switch == "2")
    fovea.torch.reset_stats()
    got = results()
    want = want or got
    error = max((x - y).abs().max().item() for x, y in zip(got, want))
    found.append([fovea.torch.stats()["traced"] > 0, error < 1e-5])
print(json.dumps(found))
"""


@pytest.mark.parametrize("backend, switches", [
    *(("aot_eager", switches) for switches in ("-101", "101", "1210", "-2010")), ("inductor", "-101")])
def test_every_switch_reaches_what_is_compiled(tmp_path, backend, switches):
    """In a process of its own; "-" compiles before fovea is imported. PyTorch's copy of the dispatcher's table, if it is kept, gives
    graphs of before: without fovea, or without gradients."""
    done = subprocess.run([sys.executable, "-c", SWITCHED, backend, switches], capture_output=True, text=True,
                          env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[switch != "0", True] for switch in switches.lstrip("-")]


@pytest.mark.parametrize("first", ["portable", ""])
def test_compile_caches_do_not_mix_between_instruction_sets(tmp_path, first, monkeypatch):
    """prefer="fastest" decides by the instruction set, and a graph keeps what was decided."""
    for isa in (first, "" if first else "portable"):
        monkeypatch.setenv("FOVEA_CPU_ISA", isa) if isa else monkeypatch.delenv("FOVEA_CPU_ISA", raising=False)
        assert cached(tmp_path, "on", prefer="fastest") == {"fovea": not isa, "imported": True, "hit": 0}


# ---- torch.export ----


class Attention(nn.Module):
    def forward(self, q, k, v):
        return sdpa(q, k, v, is_causal=True)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_is_pytorchs(strict):
    """It keeps scaled_dot_product_attention as a node. So it runs on fovea where that is enabled, and without it
    elsewhere."""
    tensors = tuple(qkv(grad=False))
    want = sdpa(*tensors, is_causal=True)
    with enabled(prefer=None):
        program = torch.export.export(Attention(), tensors, strict=strict)
    assert "scaled_dot_product_attention" in program.graph_module.code and "fovea" not in program.graph_module.code
    kept = io.BytesIO()
    torch.export.save(program, kept)
    kept.seek(0)
    loaded = torch.export.load(kept).module()
    reset_stats()
    close([loaded(*tensors)], [want])
    assert counted() == (0, 0, 0)
    enable(prefer=None)
    close([loaded(*tensors)], [want])
    assert counted() == (1, 0, 0)


def test_decompositions_of_an_exported_program():
    """run_decompositions() takes the operator apart without fovea. While fovea is enabled it is not composite, and newer
    versions of PyTorch (2.15) leave it; what comes out computes the same in either case."""
    tensors = tuple(qkv(grad=False))
    program = torch.export.export(Attention(), tensors)
    assert "aten.scaled_dot_product_attention.default" not in program.run_decompositions().graph_module.code
    with enabled(prefer=None):
        decomposed = program.run_decompositions()
    if torch.__version__ >= "2.15":
        assert "aten.scaled_dot_product_attention.default" in decomposed.graph_module.code
    close([decomposed.module()(*tensors)], [sdpa(*tensors, is_causal=True)])


def test_aotinductor_packages(tmp_path):
    """A package made while enabled has fovea::attention, and runs in a process that has imported fovea.torch."""
    tensors = tuple(qkv(grad=False))
    want = sdpa(*tensors, is_causal=True)
    with enabled(prefer=None), torch.no_grad():
        program = torch.export.export(Attention(), tensors)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attention.pt2"))
    with torch.profiler.profile() as seen:
        close([torch._inductor.aoti_load_package(path)(*tensors)], [want])
    assert any("fovea::attention" in event.key for event in seen.key_averages())


def test_jit_trace():
    tensors = tuple(qkv(grad=False))
    want = sdpa(*tensors)
    enable(prefer=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda *x: sdpa(*x), tensors)
    assert "scaled_dot_product_attention" in str(traced.graph) and "fovea" not in str(traced.graph)
    reset_stats()
    close([traced(*tensors)], [want])
    assert counted() == (1, 0, 0)


# ---- torch.func, modes, subclasses ----


def test_torch_func_is_pytorchs():
    """All of it: vmap of a gradient, and forward mode."""
    q, k, v = qkv(grad=False)
    calls = [
        lambda: torch.func.grad(lambda q: sdpa(q, k, v).cos().sum())(q),
        lambda: torch.vmap(torch.func.grad(lambda q: sdpa(q[None], k[:1], v[:1]).cos().sum()))(q),
        lambda: torch.vmap(sdpa)(q, k, v),
    ]
    want = [call() for call in calls]
    enable(prefer=None)
    close([call() for call in calls], want)
    # vmap alone decomposes the call before fovea sees it.
    assert counted()[0] == 0 and stats()["handed_back"] == {"a transform of torch.func": 2}


def test_the_profiler_and_dispatch_modes_see_the_operator():
    tensors = qkv(grad=False)
    enable(prefer=None)
    with torch.profiler.profile() as seen:
        sdpa(*tensors)
    keys = {event.key for event in seen.key_averages()}
    assert {"aten::scaled_dot_product_attention", "fovea::attention"} <= keys


# ---- several processes ----

WORLD = 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(16, 48), nn.Linear(16, 48)])
        self.bias = nn.ParameterList([torch.randn(2, 7, 7), torch.randn(2, 7, 7)])

    def forward(self, x):
        for project, bias in zip(self.qkv, self.bias):
            q, k, v = project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            x = x + sdpa(q, k, v, bias).transpose(1, 2).flatten(2)
        return x


def made():
    torch.manual_seed(0)
    return Model(), torch.randn(2 * WORLD, 7, 16)


def train(rank, folder, kind):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model, x = made()
    plain = model
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model.qkv:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    enable(prefer=None)
    model(x.chunk(WORLD)[rank]).square().sum().div(2).backward()
    served = stats()
    grads = {name: p.grad.full_tensor() if kind == "fsdp" else p.grad for name, p in plain.named_parameters()}
    if rank == 0:
        torch.save({"grads": grads, "stats": served}, os.path.join(folder, "result"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes(kind):
    model, x = made()
    model(x).square().sum().div(2 * WORLD).backward()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(train, args=(folder, kind), nprocs=WORLD, start_method="spawn")
        result = torch.load(os.path.join(folder, "result"))
    assert result["stats"]["served"] == 2 and not result["stats"]["handed_back"]
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0
        torch.testing.assert_close(result["grads"][name], parameter.grad, rtol=1e-5, atol=1e-6)


# ---- without an edited line ----


def entry_point(folder):
    """A folder for PYTHONPATH with what an installed fovea declares in pyproject.toml."""
    lines = (ROOT / "pyproject.toml").read_text().split('[project.entry-points."torch.backends"]\n')[1].split("\n\n")[0]
    name, target = lines.strip().split(" = ")
    info = folder / "fovea_attention-0.0.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fovea-attention\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {target.strip(chr(34))}\n")
    return os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])


PROGRAM = """
import os, sys, torch
q = torch.ones(1, 1, 4, 8)
if "EMPTY" in os.environ:
    torch.nn.functional.scaled_dot_product_attention(q[:0], q[:0], q[:0])
torch.nn.functional.scaled_dot_product_attention(q[None], q[None], q[None])
ours = sorted(name for name in sys.modules if name.split(".")[0] == "fovea")
print(bool(ours), "fovea_autoload" in sys.modules)
if ours:
    import fovea.torch
    print(fovea.torch.is_enabled(), fovea.torch.stats()["served"], *fovea.torch._enable_state.state.settings)
"""


def run_program(folder, program=PROGRAM, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "FOVEA_TORCH"}
    environment.update(variables, PYTHONPATH=entry_point(folder))
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("value, printed", [
    (None, ["False True"]),
    ("0", ["False True"]),
    ("1", ["True True", "True 1 ('cuda', 'cpu') fastest False False"]),
    ("sdpa,cpu,prefer=none,strict", ["True True", "True 1 ('cpu',) None True False"]),
    ("CPU, prefer=None", ["True True", "True 1 ('cpu',) None False False"]),
    ("prefer=fastest,operators", ["True True", "True 1 ('cuda', 'cpu') fastest False True"]),
])  # fmt: skip
def test_a_program_without_an_edited_line(tmp_path, value, printed):
    """Nothing of fovea is imported unless FOVEA_TORCH says so."""
    done = run_program(tmp_path, **({} if value is None else {"FOVEA_TORCH": value}))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed and "Overriding" not in done.stderr, done.stderr


@pytest.mark.parametrize("first", [
    "import fovea.torch", "import fovea", "from fovea.torch import attention", "import fovea.torch.aten", "import fovea.integrations",
    "import fovea.integrations.flash_attn", "import torch, fovea.integrations",
])  # fmt: skip
def test_fovea_may_be_imported_before_pytorch(tmp_path, first):
    """Whose import calls the entry point, while a module of fovea is half there."""
    done = run_program(tmp_path, f"{first}{PROGRAM}", FOVEA_TORCH="prefer=none,flash_attn")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True 1 ('cuda', 'cpu') None False False"
    done = run_program(tmp_path, f"{first}\nimport torch, flash_attn; print(flash_attn.flash_attn_func.__module__)", FOVEA_TORCH="flash_attn")
    assert done.returncode == 0 and "fovea" in done.stdout, done.stderr


@pytest.mark.parametrize("value, printed", [
    ("prefer=none,stats", ["1 calls of scaled_dot_product_attention computed by fovea, 0 traced",
                           "1 calls handed back to PyTorch: empty tensors"]),
    ("prefer=none", []),
])  # fmt: skip
def test_a_program_says_at_its_end_what_was_computed(tmp_path, value, printed):
    done = run_program(tmp_path, FOVEA_TORCH=value, EMPTY="1")
    lines = [line for line in done.stderr.splitlines() if line.startswith("fovea.torch: ")]
    assert done.returncode == 0 and len(lines) == len(printed), done.stderr
    assert all(line.endswith(end) for line, end in zip(lines, printed)), lines


def test_a_word_that_is_unknown(tmp_path):
    done = run_program(tmp_path, FOVEA_TORCH="flash")
    assert done.returncode != 0
    assert "FOVEA_TORCH=flash: 'flash' is unknown; accepted: 0 alone, or words of 1, sdpa, cpu, cuda" in done.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in done.stderr  # PyTorch's hint


def test_two_preferences(tmp_path):
    done = run_program(tmp_path, FOVEA_TORCH="prefer=none,prefer=fastest")
    assert done.returncode != 0 and "prefer=none and prefer=fastest; accepted: one of them" in done.stderr


def test_pytorch_can_be_told_not_to_ask(tmp_path):
    done = run_program(tmp_path, FOVEA_TORCH="1", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout.splitlines() == ["False False"], done.stderr
