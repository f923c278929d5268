# SPDX-License-Identifier: Apache-2.0
"""The case table: small problems in which every pair of feature values occurs (tests/python/covering.py)."""

from types import SimpleNamespace

import torch

import fovea
import naive
from covering import covering

# The first value of each is the plain one.
FEATURES = {
    "rows": ["square", "short", "long", "two_level", "packed", "packed_padded", "packed_two_level", "empty"],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "dims": [(4, 4), (5, 3), (3, 6)],
    "used": ["", "q", "k", "qk"],
    "causal": [False, True],
    "window": [(-1, -1), (2, 1), (-1, 1), (2, -1)],
    "align": ["bottom_right", "top_left"],
    "scale": [None, -0.7],
    "softcap": [0.0, 1.5],
    "bias": ["", "b1,b2,h,q,k", "b1,1,h,q,k", "1,b2,1,q,1", "h,1,k"],
    "bias2": ["", "b1,b2,1,1,k", "1,1,h,q,k"],
    "mask": ["", "b1,b2,h,q,k", "b1,b2,1,1,k", "dead"],
    "alibi": ["", "h", "bh"],
    "sink": [False, True],
    "dropout": [None, ("fovea", 0.25), ("torch_mem_efficient", 0.25)],
    "layout": ["bhsd", "bshd"],
    "strides": ["contiguous", "strided"],
}
PLAIN = {name: values[0] for name, values in FEATURES.items()}


def rows():
    return covering(FEATURES)


def name_of(row):
    return " ".join(f"{name}={value}" for name, value in row.items() if value != PLAIN[name]) or "plain"


def plane(spec, batch, heads, rows_q, rows_k):
    """"b1,1,h,q,k" -> the shape of a bias or mask over this batch (of one level or two)."""
    names = spec.split(",")
    sizes = {"h": heads, "q": rows_q, "k": rows_k}
    shape = [sizes.get(name, 1) for name in names[-3:]]
    if len(names) == 5:
        levels = names[:2]
        if len(batch) == 2:
            shape = [n if name != "1" else 1 for name, n in zip(levels, batch)] + shape
        else:
            shape = [batch[0] if levels != ["1", "1"] else 1, *shape]
    return shape


def strided(x):
    """The same values in a larger tensor, with gaps and with its last two dimensions the other way round."""
    if x.dim() < 2:
        return x
    holder = torch.zeros([2 * n + 1 for n in x.transpose(-1, -2).shape], dtype=x.dtype)
    view = holder[tuple(slice(1, None, 2) for _ in range(x.dim()))].transpose(-1, -2)
    return view.copy_(x)


def make(row, dtype=torch.float64, seed=0):
    """q, k, v, options (of fovea.torch.attention) and `inputs`, the names of what is differentiable."""
    torch.manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lay = strided if row["strides"] == "strided" else lambda x: x
    normal = lambda *shape, type=dtype: lay(torch.randn(*shape, dtype=torch.float64).to(type))  # noqa: E731
    (heads, heads_k), (dim, dim_v) = row["heads"], row["dims"]
    options = {"layout": row["layout"]}
    packed = row["rows"].startswith("packed")
    if packed:
        lengths_q, lengths_k = [3, 0, 5, 2], [4, 3, 0, 6]
        batch = (2, 2) if row["rows"] == "packed_two_level" else (4,)
        extra = 2 if row["rows"] == "packed_padded" else 0
        options["cu_seqlens_q"] = torch.tensor([0, *lengths_q]).cumsum(0).int()
        options["cu_seqlens_k"] = torch.tensor([0, *lengths_k]).cumsum(0)
        rows_q, rows_k = max(lengths_q) + extra, max(lengths_k) + extra
        options.update(max_seqlen_q=rows_q, max_seqlen_k=rows_k)
        if len(batch) == 2:
            options["batch_shape"] = batch
        q = normal(sum(lengths_q) + extra, heads, dim)
        k = normal(sum(lengths_k) + extra, heads_k, dim)
        v = normal(sum(lengths_k) + extra, heads_k, dim_v)
    else:
        batch = (2, 2) if row["rows"] == "two_level" else (2,)
        sizes = {"square": (5, 5), "short": (3, 7), "long": (6, 3), "two_level": (3, 4), "empty": (0, 4)}
        rows_q, rows_k = sizes[row["rows"]]
        lengths_q, lengths_k = [rows_q] * 2 * len(batch), [rows_k] * 2 * len(batch)
        q, k, v = (normal(*batch, h, n, d) for h, n, d in
                   ((heads, rows_q, dim), (heads_k, rows_k, dim), (heads_k, rows_k, dim_v)))
        if row["layout"] == "bshd":
            q, k, v = (lay(x.transpose(-2, -3).contiguous()) for x in (q, k, v))
    entries = len(lengths_q)
    if "q" in row["used"]:
        lengths_q = [min(n, m) for n, m in zip([2, 1, 3, 0], lengths_q)]
        options["seqused_q"] = torch.tensor(lengths_q, dtype=torch.int32)
    if "k" in row["used"]:
        lengths_k = [min(n, m) for n, m in zip([3, 2, 0, 5], lengths_k)]
        options["seqused_k"] = torch.tensor(lengths_k, dtype=torch.int32)
    for name in ("causal", "window", "align", "softcap", "scale"):
        options[name] = row[name]
    for name in ("bias", "bias2"):
        if row[name]:
            options[name] = normal(*plane(row[name], batch, heads, rows_q, rows_k))
    if row["mask"] == "dead":
        options["mask"] = torch.rand(rows_q, rows_k) < 0.7
        options["mask"][::2] = False
    elif row["mask"]:
        options["mask"] = torch.rand(plane(row["mask"], batch, heads, rows_q, rows_k)) < 0.7
    if row["alibi"]:
        options["alibi_slopes"] = torch.rand((heads,) if row["alibi"] == "h" else (entries, heads), dtype=wide)
    if row["sink"]:
        options["sink"] = normal(heads, type=wide)
    if row["dropout"]:
        rule, p = row["dropout"]
        options.update(rng=rule, dropout_p=p, seed=0xF23456789ABCDEF0 + seed, offset=0x1F00000003)
    case = SimpleNamespace(q=q, k=k, v=v, options=options, batch=batch, heads=heads, rows=(rows_q, rows_k),
                           lengths=(lengths_q, lengths_k), packed=packed)
    case.inputs = {"q": q, "k": k, "v": v, **{n: options[n] for n in ("bias", "bias2", "sink") if n in options}}
    return case


def reference(case, inputs, element=None):
    """(out, lse) of a case by naive.attention, sequence by sequence, differentiable in `inputs`."""
    o = {**case.options, **{name: x for name, x in inputs.items() if name not in ("q", "k", "v")}}
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    if not case.packed and o["layout"] == "bshd":
        q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    rows_q, rows_k = case.rows
    full = (*case.batch, case.heads, rows_q, rows_k)
    planes = {n: o[n].expand(full).flatten(0, len(case.batch) - 1) for n in ("bias", "bias2", "mask") if n in o}
    entries = len(case.lengths[0])
    if not case.packed:
        q, k, v = (x.flatten(0, len(case.batch) - 1) for x in (q, k, v))
        out = [q.new_zeros(case.heads, rows_q, v.shape[-1]) for _ in range(entries)]
    outs, lses = [], []
    for b in range(entries):
        nq, nk = case.lengths[0][b], case.lengths[1][b]
        if case.packed:
            q0, k0 = int(o["cu_seqlens_q"][b]), int(o["cu_seqlens_k"][b])
            rows = [x[start : start + n].transpose(0, 1) for x, start, n in ((q, q0, nq), (k, k0, nk), (v, k0, nk))]
        else:
            rows = [q[b, :, :nq], k[b, :, :nk], v[b, :, :nk]]
        given = {n: x[b, :, :nq, :nk] for n, x in planes.items()}
        if "alibi_slopes" in o:
            slopes = o["alibi_slopes"]
            given["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[b]
        if "sink" in o:
            given["sink"] = o["sink"]
        if o.get("dropout_p"):
            given["keep"], given["keep_factor"] = kept(o, b, entries, case.heads, rows_q, rows_k, nk, nq, case.packed)
        out, lse = naive.attention(*rows, **given, **{n: o[n] for n in ("causal", "window", "align", "softcap", "scale")})
        outs.append(out)
        lses.append(lse)
    if case.packed:
        total = q.shape[0]
        out, lse = q.new_zeros(total, case.heads, v.shape[-1]), torch.full((case.heads, total), -torch.inf).to(lses[0])
        for b in range(entries):
            at = torch.arange(int(o["cu_seqlens_q"][b]), int(o["cu_seqlens_q"][b]) + case.lengths[0][b])
            out = out.index_put((at,), outs[b].transpose(0, 1))
            lse = lse.index_copy(1, at, lses[b])
        return out, lse
    pad = torch.nn.functional.pad
    out = torch.stack([pad(x, (0, 0, 0, rows_q - x.shape[-2])) for x in outs]).unflatten(0, case.batch)
    lse = torch.stack([pad(x, (0, rows_q - x.shape[-1]), value=-torch.inf) for x in lses]).unflatten(0, case.batch)
    return (out.transpose(-2, -3) if o["layout"] == "bshd" else out), lse


def kept(o, b, entries, heads, rows_q, rows_k, nk, nq, packed):
    """Dropout's decisions for a batch entry. Packed, the elements of torch_mem_efficient are counted by rows as long as
    the sequence."""
    seed, offset, p = o["seed"], o["offset"], o["dropout_p"]
    if o["rng"] == "fovea":
        mask = fovea.dropout_mask(entries, heads, rows_q, rows_k, p, seed=seed, offset=offset)[b, :, :nq, :nk]
        return torch.from_numpy(mask), 1 / (1 - p)
    import oracle

    row = nk if packed else rows_k
    mask = [[[oracle.keeps(p, seed, offset, o["rng"], b * heads + h, i, j, rows_q * rows_k, row) for j in range(nk)]
             for i in range(nq)] for h in range(heads)]
    return torch.tensor(mask, dtype=torch.bool).reshape(heads, nq, nk), 1 / (1 - p)
