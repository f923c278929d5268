# SPDX-License-Identifier: Apache-2.0
"""DTensor's rules for fovea::attention: ranks run these functions (ranks.py) and compare with one process."""

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fovea.torch
from fovea.torch import _dtensor, attention

B, HQ, HK, S, D = 4, 8, 4, 24, 8
LONG = 64  # rows of a case with dropout, whose parts are multiples of 16 rows


def problem(layout="bhsd", batch=(B,), heads=(HQ, HK), rows=(S, S), **shapes):
    torch.manual_seed(1)
    q, k, v = (torch.randn(*batch, h, n, D) for h, n in ((heads[0], rows[0]), (heads[1], rows[1]), (heads[1], rows[1])))
    if layout == "bshd":
        q, k, v = (x.transpose(-2, -3).contiguous() for x in (q, k, v))
    return q, k, v, {name: torch.randn(shape) for name, shape in shapes.items()}


OPTIONS = {
    "plain": (problem, {}, {}),
    "causal": (problem, {"bias": (1, HQ, S, S), "sink": (HQ,)}, {"causal": True}),
    "wide": (problem, {"bias": (B, 1, S, S), "bias2": (HQ, 1, S), "mask": (B, 1, 1, S)}, {"softcap": 1.5}),
    "banded": (problem, {"alibi_slopes": (B, HQ), "bias": (S,)}, {"window": (5, 2)}),
    "bshd": (lambda **s: problem("bshd", **s), {"bias": (1, HQ, S, S), "sink": (HQ,)}, {}),
    "short": (lambda **s: problem(rows=(S, 40), **s), {"alibi_slopes": (HQ,)}, {"causal": True, "align": "bottom_right"}),
    "long": (lambda **s: problem(rows=(40, S), **s), {}, {"window": (9, 3), "align": "top_left"}),
    "placed": (problem, {"bias": (B, 1, S, S)}, {"causal": True, "position_q": 5, "position_k": 3}),
    "dropout": (lambda **s: problem(rows=(LONG, LONG), **s), {"bias": (1, HQ, LONG, LONG)}, {"causal": True, "dropout_p": 0.4, "seed": 3}),
    "dropout levels": (lambda **s: problem(batch=(2, 4), rows=(LONG, S), **s), {}, {"dropout_p": 0.4, "seed": 3, "position_q": 16}),
    "levels": (lambda **s: problem(batch=(2, 4), **s), {"bias": (2, 1, HQ, S, S), "mask": (2, 4, 1, 1, S)}, {}),
}


def check(group, case, dimension, whole=(), compiled=False):
    """q is sharded along `dimension`, the others as the rule wants them, or whole if they are in `whole`."""
    mesh = DeviceMesh.from_group(group, "cpu")
    compare(mesh, case, [dimension], whole, compiled)


def compare(mesh, case, dimensions, whole=(), compiled=False):
    from fovea.torch import _call

    make, shapes, options = OPTIONS[case]
    q, k, v, more = make(**shapes)
    if "mask" in more:
        more["mask"] = more["mask"] > -1
    inputs = {"q": q, "k": k, "v": v, **more}
    learn = [name for name in inputs if name not in ("mask", "alibi_slopes")]

    def run(tensors, grad_out, grad_lse):
        leaves = {name: x.detach().requires_grad_(name in learn) for name, x in tensors.items()}
        layout = "bshd" if case == "bshd" else "bhsd"

        def call(q, k, v, more):
            return attention(q, k, v, return_lse=True, layout=layout, **more, **options)

        f = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
        rest = {name: x for name, x in leaves.items() if name not in "qkv"}
        out, lse = f(leaves["q"], leaves["k"], leaves["v"], rest)
        torch.autograd.backward([out, lse], [grad_out(out), grad_lse(lse)])
        return out.detach(), lse.detach(), {name: leaves[name].grad for name in learn}

    made = {}

    def drawn(name):
        def grad(x):
            made[name] = torch.randn(x.shape)
            return made[name]

        return grad

    out, lse, grads = run(inputs, drawn("out"), drawn("lse"))

    rank = len(q.shape)
    heads, rows, levels = (rank - 2, rank - 3, rank - 3) if case == "bshd" else (rank - 3, rank - 2, rank - 3)
    named = dict.fromkeys(_call.Arguments._fields)
    named.update(inputs, layout="bshd" if case == "bshd" else "bhsd")
    ways = []
    for at in dimensions:
        what = "heads" if at == heads else "rows" if at == rows else "batch"
        ways.append(_dtensor._way(_call.Arguments(**named), what, at, heads, rows, levels))
    placed = {}
    for name, x in inputs.items():
        wanted = [way.tensors[name] for way in ways]
        if name in "kv":
            wanted = [at if at == rows else to for at, to in zip(dimensions, wanted)]
        placed[name] = distribute_tensor(x, mesh, [Replicate() if to is None or name in whole else Shard(to) for to in wanted])
    grad = lambda name: lambda x: distribute_tensor(made[name], mesh, x.placements)  # noqa: E731
    # torch.compile compiles nothing under a dispatch mode.
    with contextlib.nullcontext() if compiled else CommDebugMode() as comm:
        got, got_lse, got_grads = run(placed, grad("out"), grad("lse"))
    assert got.placements == tuple(Shard(way.out) for way in ways), got.placements
    assert torch.equal(got.full_tensor(), out) and torch.equal(got_lse.full_tensor(), lse)
    if rows not in dimensions and not compiled:
        counted = {str(name): n for name, n in comm.get_comm_counts().items()}
        assert not any("gather" in name for name in counted), counted
    for name, grad_whole in grads.items():
        x = got_grads[name]
        if any(p.is_partial() for p in x.placements) or (name in "kv" and rows in dimensions):
            torch.testing.assert_close(x.full_tensor(), grad_whole, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(x.full_tensor(), grad_whole), name


def two_dimensions(group, compiled):
    """Batch and heads over a mesh of 2 x 2."""
    compare(init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")), "causal", [0, 1], compiled=compiled)


def kept_decisions(group):
    """DTensor keeps decisions. Another option, or another set of gradients, is another decision."""
    mesh = DeviceMesh.from_group(group, "cpu")
    q, k, v, _ = problem()
    rows = [distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)]
    attention(*rows)
    refuses(lambda: attention(*rows, dropout_p=0.5, seed=1), "dropout decides about 16 rows together")
    attention(*rows, causal=True)
    attention(*rows)
    heads = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    for learns in ((0,), (0, 1, 2), (1,), (2, 0)):
        leaves = [x.detach().requires_grad_(i in learns) for i, x in enumerate(heads)]
        attention(*leaves).sum().backward()
        whole = [x.detach().requires_grad_(i in learns) for i, x in enumerate((q, k, v))]
        attention(*whole).sum().backward()
        for x, y in zip(leaves, whole):
            assert (x.grad is None) == (y.grad is None)
            assert x.grad is None or torch.equal(x.grad.full_tensor(), y.grad)


def refuses(call, text):
    try:
        call()
    except Exception as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"computed; expected: {text}")


def refusals(group):
    mesh = DeviceMesh.from_group(group, "cpu")
    n = dist.get_world_size(group)
    q, k, v, more = problem(heads=(6, 3), bias=(1, 6, S, S), sink=(6,))

    def on(*placements, **options):
        tensors = {name: distribute_tensor(x, mesh, [p]) for (name, x), p in zip((("q", q), ("k", k), ("v", v)), placements)}
        options = {name: distribute_tensor(more[name], mesh, [x]) if name in more else x for name, x in options.items()}
        return lambda: attention(**tensors, **options)

    one = Shard(1)
    refuses(on(one, one, one), f"q: sharded along its heads (dimension 1) over {n} ranks: k has 3 heads, no multiple of the ranks")
    refuses(on(Shard(3), Replicate(), Replicate()), "a score needs all of it")
    refuses(on(*[Shard(2)] * 3, dropout_p=0.5, seed=1), "dropout decides about 16 rows together, and a rank has 12")
    refuses(on(*[Shard(2)] * 3, dropout_p=0.5, seed=1, rng="torch_mem_efficient"), "rng is 'torch_mem_efficient', and a row's")
    refuses(on(*[Shard(0)] * 3, dropout_p=0.5), "seed: None with dropout_p=0.5 and DTensors; accepted: an integer")
    each = distribute_tensor(torch.zeros(B, dtype=torch.int64), mesh, [Replicate()])
    refuses(on(*[Shard(2)] * 3, causal=True, positions_q=each), "positions_q: given with DTensors whose rows are sharded")
    refuses(on(*[Shard(2)] * 3, causal=True, align="bottom_right", seqused_k=each.int()), "seqused_k: given with DTensors whose rows are sharded")
    known, _dtensor.in_pytorchs_ring = _dtensor.in_pytorchs_ring, lambda: True  # there calls get no positions
    try:
        refuses(on(*[Shard(2)] * 3, window=(3, 3)), "window depends on the numbers of the rows")
        refuses(on(*[Shard(0)] * 3, dropout_p=0.5, seed=1), "dropout_p: 0.5, with q sharded along dimension 0, and the ranks would draw")
    finally:
        _dtensor.in_pytorchs_ring = known
    refuses(on(Shard(0), Shard(2), Shard(0)), "k: sharded along dimension 2 over dimension 0 of the mesh, where q is sharded along its batch")
    refuses(on(Replicate(), Shard(0), Shard(0)), "k: sharded along dimension 0 over dimension 0 of the mesh, where q is whole")
    refuses(on(*[Shard(0)] * 3, bias=Shard(1)), "bias: sharded along dimension 1")
    refuses(on(*[Shard(0)] * 3, bias=Shard(1)), "accepted: Replicate()")
    small = [distribute_tensor(x[:1], mesh, [Replicate()]).redistribute(placements=[Shard(0)]) for x in (q, k, v)]
    refuses(lambda: attention(*small), "its size is 1")
    whole = [distribute_tensor(x, mesh, [Replicate()]) for x in (q, k, v)]
    out = attention(*whole, causal=True, dropout_p=0.5, seed=1)
    assert out.placements == (Replicate(),) and torch.equal(out.to_local(), attention(q, k, v, causal=True, dropout_p=0.5, seed=1))
    half = DTensor.from_local(q / n, mesh, [Partial()])  # a sum that has to be formed
    assert attention(half, *whole[1:]).placements == (Replicate(),)
    with torch.inference_mode():
        ours = [distribute_tensor(x, mesh, [Shard(0)]) for x in (q, k, v)]
        assert torch.equal(attention(*ours).full_tensor(), attention(q, k, v))


def refused(call, says):
    try:
        call()
    except NotImplementedError as error:
        assert says in str(error), error
    else:
        raise AssertionError(f"not refused: {says}")


def registered_late(group):
    """PyTorch's dispatcher is on before fovea is registered."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    from fovea.torch._operators import attention as operator, attention_backward

    for one in (operator, attention_backward):
        theirs.custom_ops.pop(one, None)
    n = dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("context",))
    whole = [torch.randn(2, h, 32 * n, D) for h in (4, 2, 2)]
    balancer = _HeadTailLoadBalancer(32 * n, n, "cpu")
    theirs._enable_context_parallel_dispatcher()
    try:
        fovea.torch.register_with_pytorch()
        mine = theirs._context_parallel_shard(mesh, [x.clone() for x in whole], [2] * 3, balancer)
        out = attention(*(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in mine), causal=True)
    finally:
        theirs._disable_context_parallel_dispatcher()
        (want,) = theirs._context_parallel_shard(mesh, [attention(*whole, causal=True)], [2], balancer)
        theirs._cp_options.enable_load_balance = False
    assert torch.equal(out.to_local(), want)


def aligned_dropout(group):
    """Without a band an alignment means nothing."""
    n = dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    q, k, v = (torch.randn(1, 2, 32 * n, D) for _ in range(3))
    options = {"dropout_p": 0.3, "seed": 1, "align": "top_left"}
    out = attention(*(distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k, v)), **options)
    assert torch.equal(out.full_tensor(), attention(q, k, v, **options))


class Inner(torch.nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v, bias=None):
        return attention(q, k, v, bias=bias, **self.options)


def within_pytorchs(group, balanced, options, with_bias):
    """A module within PyTorch's own context parallelism: out, dq and the bias's gradient have the bits of one process."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    fovea.torch.register_with_pytorch()
    n = dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("context",))
    length = 32 * n  # two pieces a rank, of 16 rows
    whole = [torch.randn(2, h, length, D) for h in (4, 2, 2)] + ([torch.randn(1, 4, length, length)] if with_bias else [])
    grad = torch.randn(2, 4, length, D)
    leaves = [x.clone().requires_grad_() for x in whole]
    out = Inner(options)(*leaves)
    out.backward(grad)
    balancer = _HeadTailLoadBalancer(length, n, "cpu") if balanced else None
    shard = lambda tensors: theirs._context_parallel_shard(mesh, tensors, [2] * len(tensors), balancer)  # noqa: E731
    *mine, local_grad = shard([*whole, grad])
    mine = [x.clone().requires_grad_() for x in mine]
    kind = theirs._ContextParallel(seq_dim=2, attention_type=theirs._ContextParallel.AttentionType.SDPA)
    model = parallelize_module(Inner(options), mesh, kind)
    if balanced and (options.get("causal") or options.get("dropout_p")):  # rows that DTensor takes for adjacent ones
        refused(lambda: model(*mine), "q: DTensors whose rows are sharded, after a load balancer of PyTorch's context parallelism")
    theirs._enable_context_parallel_dispatcher()
    try:
        got = model(*mine)
        got.backward(local_grad)
        if not with_bias:
            try:
                parallelize_module(Inner({"dropout_p": 0.5, "seed": 1, "rng": "torch_mem_efficient"}), mesh, kind)(*mine)
            except NotImplementedError as error:
                assert "rng: 'torch_mem_efficient', with move='keys'" in str(error)
            else:
                raise AssertionError("dropout was computed")
    finally:
        theirs._disable_context_parallel_dispatcher()
        theirs._cp_options.enable_load_balance = False
    want, *grads = shard([out.detach(), *(x.grad for x in leaves)])
    assert torch.equal(got, want)
    for name, x, y in zip(("q", "k", "v", "bias"), mine, grads):
        if name in "kv":
            torch.testing.assert_close(x.grad, y, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(x.grad, y), name


# ---- through enable() ----

SDPA = {
    "plain": (None, {}),
    "causal": (None, {"is_causal": True}),
    "bias": ((1, HQ, S, S), {}),
    "mask of keys": ((B, 1, 1, S), {}),
}


def through_sdpa(group, case, dimension, batch=B, compiled=False):
    """scaled_dot_product_attention of DTensors has the bits of attention() in one process."""
    shape, options = SDPA[case]
    q, k, v, _ = problem(batch=(batch,))
    inputs = [q, k, v] + ([] if shape is None else [torch.randn([batch if n == B else n for n in shape])])
    if case == "mask of keys":
        inputs[3] = inputs[3] > -1
    learn = [i for i, x in enumerate(inputs) if x.is_floating_point()]
    grad = torch.randn(batch, HQ, S, D)

    def run(f, tensors, grad):
        leaves = [x.detach().requires_grad_(i in learn) for i, x in enumerate(tensors)]
        out = f(*leaves)
        return out.detach(), torch.autograd.grad(out, [leaves[i] for i in learn], grad)

    def theirs(q, k, v, mask=None):
        return sdpa(q, k, v, mask, enable_gqa=True, **options)

    def ours(q, k, v, mask=None):
        name = "mask" if case == "mask of keys" else "bias"
        return attention(q, k, v, **{name: mask}, causal="is_causal" in options)

    want, grads = run(ours, inputs, grad)
    mesh = DeviceMesh.from_group(group, "cpu")
    placed = []
    for at, x in enumerate(inputs):
        whole = x.shape[dimension] == 1 or (dimension == 2 and at in (1, 2))
        placed.append(distribute_tensor(x, mesh, [Replicate() if whole else Shard(dimension)]))
    fovea.torch.reset_stats()
    with fovea.torch.enabled(prefer=None):
        f = torch.compile(theirs, backend="aot_eager", fullgraph=True) if compiled else theirs
        got, got_grads = run(f, placed, distribute_tensor(grad, mesh, [Shard(dimension)]))
    stats = fovea.torch.stats()
    assert stats["handed_back"] == {} and (stats["traced"] > 0 if compiled else stats["served"] == 1), stats
    assert got.placements == (Shard(dimension),) and torch.equal(got.full_tensor(), want)
    for i, x, y in zip(learn, got_grads, grads):
        exact = not x.placements[0].is_partial()
        torch.testing.assert_close(x.full_tensor(), y, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5, msg=f"gradient {i}")
    return stats["problems"]


def handed_back(group):
    """What the rules do not have is PyTorch's, on every rank, and said. PyTorch has no rules for its own kernels on a CPU."""
    mesh = DeviceMesh.from_group(group, "cpu")
    q, k, v, _ = problem(heads=(6, 3))
    placed = lambda at: [distribute_tensor(x, mesh, [Shard(at)]) for x in (q, k, v)]  # noqa: E731
    calls = {
        "DTensors: q: sharded along its heads (dimension 1) over 2 ranks: k has 3 heads, no multiple of the ranks":
            lambda: sdpa(*placed(1), enable_gqa=True),
        "DTensors with dropout, whose masks would be equal or unrelated on the ranks":
            lambda: sdpa(*placed(0), dropout_p=0.5, enable_gqa=True),
        "DTensors of other than four or five dimensions, or whose batches or heads broadcast":
            lambda: sdpa(*(distribute_tensor(q[0], mesh, [Shard(0)]) for _ in range(3))),
        "DTensors beside plain tensors": lambda: sdpa(*placed(0)[:2], v, enable_gqa=True),
    }  # fmt: skip
    def counted(call, prefer=None):
        """What is handed back. PyTorch itself searches a placement for each of its operators, for half a minute."""
        seen = []
        composite = fovea.torch._enable_kernel.composite
        fovea.torch._enable_kernel.composite = lambda *a, **o: seen.append(a)
        fovea.torch.reset_stats()
        try:
            with fovea.torch.enabled(prefer=prefer), contextlib.suppress(RuntimeError):  # None is no result of an operator
                call()
        finally:
            fovea.torch._enable_kernel.composite = composite
        found = fovea.torch.stats()["handed_back"]
        fovea.torch.reset_stats()
        assert len(seen) == 1
        return found

    for reason, call in calls.items():
        assert counted(call) == {reason: 1}, reason
    dispatcher = DTensor._op_dispatcher
    before, ring = dispatcher._custom_op_handlers, torch.ops.aten._scaled_dot_product_flash_attention.default
    dispatcher._custom_op_handlers = {**before, ring: None}  # as PyTorch's context_parallel does
    try:
        assert counted(lambda: sdpa(*placed(2), enable_gqa=True)) == {"DTensors within PyTorch's context parallelism": 1}
    finally:
        dispatcher._custom_op_handlers = before
    asked = []  # about the part of a rank
    fastest = fovea.torch._enable_decisions._fastest
    fastest.slower, slower = lambda q, *more: asked.append(tuple(q.shape)) or True, fastest.slower
    try:
        found = counted(lambda: sdpa(*placed(0), enable_gqa=True), "fastest")
    finally:
        fastest.slower = slower
    assert found == {"PyTorch's kernel is faster, as measured": 1} and asked == [(B // 2, 6, S, D)], (found, asked)


class Block(torch.nn.Module):
    """Attention as models write it, for plain tensors and for DTensors."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(HQ * D, n * D, bias=False) for n in (HQ, HK, HK, HQ))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (-1, D)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(sdpa(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2))


def parallel_model(group, way):
    """A model whose weights, or whose batch, lie on several ranks: numbers and gradients of one process with PyTorch's kernels."""
    torch.manual_seed(2)
    plain, spread = Block(), Block()
    spread.load_state_dict(plain.state_dict())
    x = torch.randn(B, S, HQ * D)
    want = plain(x)
    want.square().sum().backward()
    mesh = DeviceMesh.from_group(group, "cpu")
    if way == "weights":
        columns = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
        parallelize_module(spread, mesh, {**columns, "o": RowwiseParallel(use_local_output=False)})
        given = x
    else:
        for module in spread.children():
            module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Replicate()]))
        given = distribute_tensor(x, mesh, [Shard(0)])
    fovea.torch.reset_stats()
    with fovea.torch.enabled(prefer=None):
        out = spread(given)
        out.square().sum().backward()
    stats = fovea.torch.stats()
    assert stats["served"] == 1 and stats["handed_back"] == {}, stats
    torch.testing.assert_close(out.full_tensor(), want, rtol=1e-5, atol=1e-5)
    for name, parameter in spread.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad, rtol=1e-4, atol=1e-4, msg=name)
    return stats["problems"]


def sink_within_pytorchs(group):
    """A sink that every rank has whole: its gradient is the sum of the ranks' parts."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

    fovea.torch.register_with_pytorch()
    n = dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("context",))
    length = 32 * n
    whole = [torch.randn(2, h, length, D) for h in (4, 2, 2)] + [torch.randn(4)]
    grad = torch.randn(2, 4, length, D)
    leaves = [x.clone().requires_grad_() for x in whole]
    attention(*leaves[:3], sink=leaves[3], causal=True).backward(grad)
    balancer = _HeadTailLoadBalancer(length, n, "cpu")
    *mine, local_grad = theirs._context_parallel_shard(mesh, [*whole[:3], grad], [2] * 4, balancer)
    placed = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False).requires_grad_() for x in mine]
    sink = DTensor.from_local(whole[3].clone(), mesh, [Replicate()], run_check=False).requires_grad_()
    theirs._enable_context_parallel_dispatcher()
    try:
        out = attention(*placed, sink=sink, causal=True)
        out.backward(DTensor.from_local(local_grad, mesh, [Shard(2)], run_check=False))
        for name, plane in (("bias", torch.randn(1, 4, length, length)), ("mask", torch.ones(2, 1, length, length, dtype=torch.bool))):
            given = {name: DTensor.from_local(plane, mesh, [Replicate()], run_check=False)}
            refused(lambda: attention(*placed, **given), f"{name}: whole, while the load balancer")
    finally:
        theirs._disable_context_parallel_dispatcher()
        theirs._cp_options.enable_load_balance = False
    torch.testing.assert_close(sink.grad.full_tensor(), leaves[3].grad, rtol=1e-5, atol=1e-5)
