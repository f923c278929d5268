# SPDX-License-Identifier: Apache-2.0
"""Small problems for the oracle: every feature of the specification, and every pair of their values."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np

from covering import covering

TYPES = {"fp64": np.float64, "fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}

# The first value of each is the plain one.
FEATURES = {
    "type": ["fp64", "fp32", "fp16", "bf16"],
    "rows": ["square", "short", "long", "two_level", "packed", "packed_padded", "packed_two_level"],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "dims": [(4, 4), (5, 3), (3, 6)],
    "used": ["", "q", "k", "qk"],
    "causal": [False, True],
    "window": [(-1, -1), (2, 1), (-1, 1), (2, -1), (0, 0)],
    "align": ["bottom_right", "top_left"],
    "shifted": ["", "one", "each", "both"],
    "streams": ["", "bh", "1h", "b1"],
    "scale": [None, -0.7, 0.0],
    "softcap": [0.0, 1.5],
    "bias": ["", "b1,b2,h,q,k", "b1,1,h,q,k", "1,b2,1,q,1", "1,1,h,1,k"],
    "bias_type": ["own", "fp32", "bf16"],
    "bias2": ["", "b1,b2,1,1,k", "1,1,h,q,k"],
    "mask": ["", "b1,b2,h,q,k", "b1,b2,1,1,k", "dead"],
    "alibi": ["", "h", "bh"],
    "sink": [False, True],
    "dropout": [None, ("fovea", 0.3), ("torch_mem_efficient", 0.3), ("fovea", 1.0)],
    "dlse": [False, True],
    "strides": ["contiguous", "strided"],
}

PLAIN = {name: values[0] for name, values in FEATURES.items()}


def legal(row):
    """With positions: no other alignment, no dropout by PyTorch's rule. `row` may lack features."""
    torch_rule = (row.get("dropout") or ("",))[0] == "torch_mem_efficient"
    return not row.get("shifted") or (row.get("align") != "top_left" and not torch_rule)


def pairwise():
    return covering(FEATURES, legal)


def singles():
    """The plain problem with one feature at a time."""
    return [PLAIN] + [{**PLAIN, name: value} for name, values in FEATURES.items() for value in values[1:]]


def name_of(row):
    return " ".join(f"{name}={value}" for name, value in row.items() if value != PLAIN[name]) or "plain"


def strided(array):
    """The same values in a larger array: reversed, with gaps."""
    if array.ndim == 0:
        return array
    holder = np.zeros(tuple(2 * n + 1 for n in array.shape), array.dtype)
    view = holder[tuple(slice(None, None, -2) for _ in array.shape)]
    view = view[tuple(slice(0, n) for n in array.shape)]
    view[...] = array
    return view


def plane_shape(spec, batch, heads, rows_q, rows_k):
    """"b1,1,h,q,k" -> the shape of a bias or mask over this batch (of one level or two)."""
    b1, b2, h, q, k = spec.split(",")
    first = [n if name != "1" else 1 for name, n in zip((b1, b2), batch)] if len(batch) == 2 else \
        [batch[0] if b1 != "1" or b2 != "1" else 1]
    return (*first, *(n if name != "1" else 1 for name, n in ((h, heads), (q, rows_q), (k, rows_k))))


SIZES = {"square": (5, 5), "short": (3, 19), "long": (18, 3), "two_level": (3, 4)}
LENGTHS = ([3, 0, 5, 2], [4, 3, 0, 6])
USED = ([2, 1, 3, 0], [3, 2, 0, 5])


def make(row, seed=0, sizes=None, lengths=None, used=USED):
    """(q, k, v, options, grad_out, grad_lse) of a row of FEATURES. `sizes`, `lengths` and `used` are in place of SIZES, LENGTHS and USED."""
    rng = np.random.default_rng(seed)
    element = TYPES[row["type"]]
    wide = np.float64 if row["type"] == "fp64" else np.float32
    lay = strided if row["strides"] == "strided" else lambda x: x
    normal = lambda *shape, type=element: lay(rng.standard_normal(shape).astype(type))
    (heads, heads_k), (dim, dim_v) = row["heads"], row["dims"]
    options = {}

    if row["rows"].startswith("packed"):
        lengths_q, lengths_k = lengths or LENGTHS
        batch = (2, 2) if row["rows"] == "packed_two_level" else (4,)
        extra = 2 if row["rows"] == "packed_padded" else 0
        options["cu_seqlens_q"] = np.cumsum([0, *lengths_q]).astype(np.int32)
        options["cu_seqlens_k"] = np.cumsum([0, *lengths_k]).astype(np.int64)
        rows_q, rows_k = max(lengths_q) + extra, max(lengths_k) + extra
        options["max_seqlen_q"], options["max_seqlen_k"] = rows_q, rows_k
        if len(batch) == 2:
            options["batch_shape"] = batch
        shape_q, shape_k = (sum(lengths_q) + extra,), (sum(lengths_k) + extra,)
    else:
        batch = (2, 2) if row["rows"] == "two_level" else (2,)
        rows_q, rows_k = (sizes or SIZES)[row["rows"]]
        lengths_q, lengths_k = rows_q, rows_k
        shape_q, shape_k = (*batch, rows_q), (*batch, rows_k)
    entries = int(np.prod(batch))
    q, k, v = normal(*shape_q, heads, dim), normal(*shape_k, heads_k, dim), normal(*shape_k, heads_k, dim_v)

    if "q" in row["used"]:
        options["seqused_q"] = np.minimum(used[0][:entries], lengths_q).astype(np.int32)
    if "k" in row["used"]:
        options["seqused_k"] = np.minimum(used[1][:entries], lengths_k).astype(np.int32)
    options.update(causal=row["causal"], window=row["window"], align=row["align"], softcap=row["softcap"])
    unit = 16 if row["dropout"] else 1  # with dropout positions are multiples of 16
    if row["shifted"] in ("one", "both"):
        options.update(position_q=3 * unit, position_k=unit)
    if row["shifted"] in ("each", "both"):
        options["positions_q"] = (np.array([1, 0, 5, 2])[:entries] * unit)[:: -1 if lay is strided else 1]
        options["positions_k"] = np.array([2, 1, 0, 2])[:entries] * unit
    if row["streams"]:
        shape = {"bh": (*batch, heads), "1h": (heads,), "b1": (*batch, 1)}[row["streams"]]
        options["dropout_streams"] = lay(rng.integers(-2**63, 2**63, shape))
    if row["scale"] is not None:
        options["scale"] = row["scale"]
    bias_type = element if row["bias_type"] == "own" else TYPES[row["bias_type"]]
    if row["bias"]:
        options["bias"] = normal(*plane_shape(row["bias"], batch, heads, rows_q, rows_k), type=bias_type)
    if row["bias2"]:
        options["bias2"] = normal(*plane_shape(row["bias2"], batch, heads, rows_q, rows_k), type=element)
    if row["mask"] == "dead":
        mask = rng.random((rows_q, rows_k)) < 0.7
        mask[::2] = False
        options["mask"] = lay(mask)
    elif row["mask"]:
        options["mask"] = lay(rng.random(plane_shape(row["mask"], batch, heads, rows_q, rows_k)) < 0.7)
    if row["alibi"]:
        options["alibi_slopes"] = lay(rng.random((heads,) if row["alibi"] == "h" else (entries, heads)).astype(wide))
    if row["sink"]:
        options["sink"] = normal(heads, type=wide)
    if row["dropout"]:
        rule, p = row["dropout"]
        options.update(rng=rule, dropout_p=p, seed=0x123456789ABCDEF0 + seed, offset=0x1F00000003)
    grad_out = normal(*shape_q, heads, dim_v)
    lse_shape = (heads, shape_q[0]) if "cu_seqlens_q" in options else (*batch, heads, rows_q)
    grad_lse = normal(*lse_shape, type=wide) if row["dlse"] else None
    return SimpleNamespace(q=q, k=k, v=v, options=options, grad_out=grad_out, grad_lse=grad_lse,
                           shape_out=(*shape_q, heads, dim_v), lse_shape=lse_shape, element=element, wide=wide)
