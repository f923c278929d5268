# SPDX-License-Identifier: Apache-2.0
"""Parts of a problem, each an ordinary call with positions and streams of dropout, are together the whole problem.

Each row of oracle_cases (every pair of features) is computed whole and in parts, cut at random along heads, queries or keys. Of cuts
along heads and queries out, lse, grad_q and the gradients of biases with queries have the bits of the whole. What is summed over parts,
and everything where keys are cut, agrees up to rounding.
"""

from collections import Counter

import numpy as np
import pytest

import fovea
import oracle_cases

BITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
SIZES = {"square": (64, 64), "short": (33, 150), "long": (150, 33), "two_level": (48, 64)}
LENGTHS = ([48, 0, 70, 33], [64, 48, 0, 97])
KNOWN = {"align", "alibi_slopes", "batch_shape", "bias", "bias2", "causal", "cu_seqlens_k", "cu_seqlens_q", "dropout_p",
         "dropout_streams", "mask", "max_seqlen_k", "max_seqlen_q", "offset", "position_k", "position_q", "positions_k", "positions_q",
         "rng", "scale", "seed", "seqused_k", "seqused_q", "sink", "softcap", "window"}  # fmt: skip
USED = ([40, 17, 33, 0], [50, 20, 0, 33])


def whole(row, seed):
    """The case, its positions for each sequence, and lengths (Sq, Sk) of each sequence."""
    case = oracle_cases.make(row, seed, sizes=SIZES, lengths=LENGTHS, used=USED)
    o = case.options
    entries = int(np.prod(o.get("batch_shape") or (len(o["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in o else case.q.shape[:-3])))
    lengths = []
    for side, x in (("q", case.q), ("k", case.k)):
        cu = o.get(f"cu_seqlens_{side}")
        each = np.full(entries, x.shape[-3]) if cu is None else np.diff(cu)
        used = o.get(f"seqused_{side}")
        lengths.append(each if used is None else np.minimum(each, used))
    return case, entries, lengths


RULE = "rng='torch_mem_efficient': a row's random numbers depend on all rows and keys"
MOVED = "dropout and a band that the lengths move: its mask counts from 0, positions would move it"
ONE_GROUP = "one key head: nothing to cut"


def positions(case, entries, lengths):
    """Positions that mean what the options mean, or why there are none."""
    o = case.options
    if any(name.startswith("position") for name in o):
        first = [np.full(entries, o.get(f"position_{side}") or 0) + np.asarray(o.get(f"positions_{side}", 0)) for side in "qk"]
        return np.stack(first).astype(np.int64)
    shift = lengths[1] - lengths[0] if o["align"] == "bottom_right" else np.zeros(entries)
    banded = o["causal"] or o["window"] != (-1, -1) or "alibi_slopes" in o
    if "dropout_p" in o:
        if o["rng"] != "fovea":
            return RULE
        if banded and shift.any():
            return MOVED
        shift = np.zeros(entries)
    return np.stack([np.maximum(shift, 0), np.maximum(-shift, 0)]).astype(np.int64)


class Parts:
    """One sequence of a case: its tensors as dense ones of batch 1, from which parts are taken."""

    def __init__(self, case, entries, lengths, first, b):
        o = case.options
        levels = o.get("batch_shape") or case.q.shape[:-3] or (entries,)
        index = np.unravel_index(b, levels)
        self.nq, self.nk = lengths[0][b], lengths[1][b]
        packed = "cu_seqlens_q" in o
        q0, k0 = (o["cu_seqlens_q"][b], o["cu_seqlens_k"][b]) if packed else (0, 0)
        self.row_q = (slice(q0, q0 + self.nq),) if packed else (*index, slice(0, self.nq))
        self.row_k = (slice(k0, k0 + self.nk),) if packed else (*index, slice(0, self.nk))
        self.lse = (slice(None), slice(q0, q0 + self.nq)) if packed else (*index, slice(None), slice(0, self.nq))
        self.q, self.k, self.v = case.q[self.row_q], case.k[self.row_k], case.v[self.row_k]
        self.grad_out = case.grad_out[self.row_q]
        self.grad_lse = None if case.grad_lse is None else case.grad_lse[self.lse]
        self.options = {n: o[n] for n in ("causal", "window", "softcap", "scale", "sink", "dropout_p", "seed", "offset") if n in o}
        unknown = set(o) - KNOWN
        assert not unknown, f"{unknown}: not cut here; name them in KNOWN, and cut them if they have rows, keys or heads"
        self.planes = {}
        for name in ("bias", "bias2", "mask"):
            if name in o:
                plane = o[name]
                plane = plane.reshape((1,) * (len(levels) + 3 - plane.ndim) + plane.shape)
                at = tuple(0 if n == 1 else i for n, i in zip(plane.shape, index))
                plane = plane[at]
                self.planes[name] = plane[:, : self.nq if plane.shape[1] > 1 else 1, : self.nk if plane.shape[2] > 1 else 1]
        slopes = o.get("alibi_slopes")
        self.slopes = None if slopes is None else slopes if slopes.ndim == 1 else slopes[b]
        heads = self.q.shape[1]
        streams = o.get("dropout_streams")
        self.streams = np.arange(b * heads, (b + 1) * heads) if streams is None else np.broadcast_to(streams, (*levels, heads))[index]
        self.first = first[:, b]

    def options_of(self, heads, rows, keys):
        options = dict(self.options, position_q=int(self.first[0]) + rows.start, position_k=int(self.first[1]) + keys.start,
                       dropout_streams=self.streams[None, heads])
        for name, plane in self.planes.items():
            options[name] = plane[tuple(one if n > 1 else slice(None) for n, one in zip(plane.shape, (heads, rows, keys)))][None]
        if self.slopes is not None:
            options["alibi_slopes"] = self.slopes[heads]
        if "sink" in options:
            options["sink"] = options["sink"][heads]
        return options

    def forward(self, heads, rows, keys, sink=True):
        heads_k = self.heads_k(heads)
        options = self.options_of(heads, rows, keys)
        if not sink:
            options.pop("sink", None)
        out, lse = fovea.attention(self.q[None, rows, heads], self.k[None, keys, heads_k], self.v[None, keys, heads_k],
                                   return_lse=True, **options)
        return out[0], lse[0]

    def backward(self, heads, rows, keys, out, lse):
        heads_k = self.heads_k(heads)
        grad_lse = None if self.grad_lse is None else self.grad_lse[None, heads, rows]
        grads = fovea.attention_backward(
            self.grad_out[None, rows, heads], self.q[None, rows, heads], self.k[None, keys, heads_k], self.v[None, keys, heads_k],
            out[None], lse[None], grad_lse=grad_lse, **self.options_of(heads, rows, keys))
        return {name: grad if name == "sink" else grad[0] for name, grad in grads._asdict().items() if grad is not None}

    def heads_k(self, heads):
        group = self.q.shape[1] // self.k.shape[1]
        return slice(heads.start // group, heads.stop // group)


def cuts(rng, length, unit):
    """Random slices of multiples of `unit` that make up `length`: two or three, where that is longer than one unit."""
    inner = sorted({int(n) * unit for n in rng.integers(1, -(-length // unit), 2)}) if length > unit else []
    return [slice(a, b) for a, b in zip([0, *inner], [*inner, length])]


def close(name, element, actual, expected, size):
    """Equal up to some roundings of the element's type, of numbers of this size."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=max(8 * BITS[element] * size, 1e-300), err_msg=name)


def check(row, seed, along):
    """Returns why the row was skipped, or None."""
    case, entries, lengths = whole(row, seed)
    first = positions(case, entries, lengths)
    if isinstance(first, str):
        return first
    cut = False
    rng = np.random.default_rng(seed)
    unit = 16 if "dropout_p" in case.options else 1
    out, lse = fovea.attention(case.q, case.k, case.v, return_lse=True, **case.options)
    for b in range(entries):
        part = Parts(case, entries, lengths, first, b)
        all_heads, all_rows, all_keys = slice(0, part.q.shape[1]), slice(0, part.nq), slice(0, part.nk)
        group = part.q.shape[1] // part.k.shape[1]
        parts = {"heads": [(one, all_rows, all_keys) for one in cuts(rng, part.q.shape[1], group)],
                 "queries": [(all_heads, one, all_keys) for one in cuts(rng, int(part.nq), unit)],
                 "keys": [(all_heads, all_rows, one) for one in cuts(rng, int(part.nk), unit)]}[along]
        cut |= len(parts) > 1
        whole_out, whole_lse = out[part.row_q], lse[part.lse]
        # A backward of the sequence alone: gradients of biases are summed over sequences otherwise.
        whole_grads = part.backward(all_heads, all_rows, all_keys, whole_out, whole_lse)
        size = {name: float(np.max(np.abs(grad.astype(np.float64)), initial=1)) for name, grad in whole_grads.items()}
        element = case.q.dtype.name
        if along == "keys":
            merge(part, parts, whole_out, whole_lse, element)
        sums = {name: np.zeros(grad.shape) for name, grad in whole_grads.items()}
        for heads, rows, keys in parts:
            is_first = (heads, rows, keys) == parts[0]
            if along != "keys":
                out_of_part, lse_of_part = part.forward(heads, rows, keys)
                assert np.array_equal(out_of_part, whole_out[rows, heads]), f"out: {heads} {rows}"
                assert np.array_equal(lse_of_part, whole_lse[heads, rows]), f"lse: {heads} {rows}"
            grads = part.backward(heads, rows, keys, whole_out[rows, heads], whole_lse[heads, rows])
            at = {"q": (rows, heads), "k": (keys, part.heads_k(heads)), "v": (keys, part.heads_k(heads)), "sink": (heads,)}
            for name, grad in grads.items():
                if name == "sink" and along == "keys" and not is_first:
                    continue  # a row's whole share, by the logsumexp of all keys: every part has it
                whole_grad = whole_grads[name]
                place = at.get(name) or tuple(one if n > 1 else slice(None) for n, one in zip(whole_grad.shape, (heads, rows, keys)))
                sums[name][place] += grad.astype(np.float64)
                # A part of one row cannot tell its row of a bias from one that is broadcast: it sums in another order.
                own = {"heads": name in "qkv" or (name != "sink" and whole_grad.shape[0] > 1),
                       "queries": name == "q" or (name.startswith("bias") and grad.shape[1] > 1), "keys": False}[along]
                if own:
                    assert np.array_equal(grad, whole_grad[place]), f"grad_{name}: {heads} {rows}"
        if along == "queries":
            check_sums(part, parts, whole_out, whole_lse, sums)
        for name, total in sums.items():
            close(f"grad_{name}", whole_grads[name].dtype.name, total, whole_grads[name], size[name] * max(len(parts), 2))
    if cut:
        return None
    assert along == "heads" and part.k.shape[1] == 1, "compared with itself"
    return ONE_GROUP


def check_sums(part, parts, out, lse, sums):
    """Gradients that calls add to fp32 (fp64) arrays are the sums of the parts' own, before those are rounded."""
    into = {name: np.zeros(total.shape, np.float64 if out.dtype == np.float64 else np.float32) for name, total in sums.items() if name in "kv"}
    for heads, rows, keys in parts:
        options = part.options_of(heads, rows, keys)
        grad_lse = None if part.grad_lse is None else part.grad_lse[None, heads, rows]
        found = fovea.attention_backward(
            part.grad_out[None, rows, heads], part.q[None, rows, heads], part.k[None, keys], part.v[None, keys], out[None, rows, heads],
            lse[None, heads, rows], grad_lse=grad_lse, need="k,v", grads_out={name: total[None] for name, total in into.items()},
            accumulate="k,v", **options)
        assert found.q is None and (found.k.size == 0 or np.shares_memory(found.k, into["k"]))
    for name, total in into.items():
        size = float(np.max(np.abs(sums[name]), initial=1))
        close(f"accumulated grad_{name}", part.k.dtype.name, total, sums[name], size * max(len(parts), 2))


def merge(part, parts, out, lse, element):
    """Results over some keys each, merged by their logsumexp. The sink takes part once."""
    states = [part.forward(*one, sink=n == 0) for n, one in enumerate(parts)]
    top = np.max([state[1] for state in states], axis=0).astype(np.float64)
    top = np.where(np.isfinite(top), top, 0)
    weights = [np.exp(state[1].astype(np.float64) - top) for state in states]
    total = sum(weights)
    merged = sum(weight.T[..., None] * state[0].astype(np.float64) for weight, state in zip(weights, states))
    merged = merged / np.where(total == 0, 1, total).T[..., None]
    finite = total > 0
    assert np.array_equal(finite, np.isfinite(lse.astype(np.float64)))
    # Of 16 bits each part is rounded; kept weights of dropout are larger than 1.
    close("out", element, merged, out, 8 * float(np.max(np.abs(part.v.astype(np.float64)), initial=1)))
    close("lse", lse.dtype.name, top[finite] + np.log(total[finite]), lse[finite], float(np.max(np.abs(lse[finite]), initial=1)))
    accumulate(part, parts, out, lse, element)


def accumulate(part, parts, out, lse, element):
    """The same by calls that accumulate into one result, of fp32 where out has 16 bits: equal up to out's own rounding."""
    wide = np.float64 if out.dtype == np.float64 else np.float32
    into, sums = np.zeros((1, *out.shape), wide), np.full((1, *lse.shape), -np.inf, wide)
    for n, (heads, rows, keys) in enumerate(parts):
        options = part.options_of(heads, rows, keys)
        if n > 0:
            options.pop("sink", None)
        heads_k = part.heads_k(heads)
        fovea.attention(part.q[None, rows, heads], part.k[None, keys, heads_k], part.v[None, keys, heads_k], out=into, lse=sums,
                        accumulate=True, **options)
    finite = np.isfinite(lse.astype(np.float64))
    assert np.array_equal(finite, np.isfinite(sums[0]))
    size = float(np.max(np.abs(part.v.astype(np.float64)), initial=1))
    close("accumulated out", element, into[0], out, 4 * size)
    close("accumulated lse", lse.dtype.name, sums[0][finite], lse[finite], float(np.max(np.abs(lse[finite]), initial=1)))


@pytest.mark.parametrize("along", ["heads", "queries", "keys"])
def test_any_cut_is_the_whole(along, capsys):
    rows = oracle_cases.singles() + oracle_cases.pairwise()
    skipped = Counter()
    for seed, row in enumerate(rows):
        try:
            skipped[check(row, seed, along)] += 1
        except AssertionError as error:
            raise AssertionError(f"{oracle_cases.name_of(row)}, seed {seed}: {error}") from None
    compared = skipped.pop(None)
    with capsys.disabled():
        print(f"\ncut along {along}: {compared} of {len(rows)} rows", *(f"{n} skipped, {why}" for why, n in skipped.items()), sep="; ")
    by_rule = sum((row["dropout"] or ("",))[0] == "torch_mem_efficient" for row in rows)
    of_one_group = sum(row["heads"][1] == 1 and (row["dropout"] or ("",))[0] != "torch_mem_efficient" for row in rows) * (along == "heads")
    assert skipped[RULE] == by_rule and skipped[ONE_GROUP] == of_one_group and skipped[MOVED] <= len(rows) / 20, skipped
    assert compared == len(rows) - sum(skipped.values()) >= len(rows) * 2 / 3


def test_accumulate_refuses():
    q = np.ones((1, 4, 2, 8), np.float32)
    half = q.astype(np.float16)
    out, lse = np.zeros_like(q), np.full((1, 2, 4), -np.inf, np.float32)
    grads = {"grad_out": q, "q": q, "k": q, "v": q, "out": out, "lse": lse}
    for call, text in (
        (lambda: fovea.attention(q, q, q, accumulate=True), "out: None with accumulate"),
        (lambda: fovea.attention(q, q, q, out=out, accumulate=True), "lse: None with accumulate"),
        (lambda: fovea.attention(half, half, half, out=half.copy(), lse=lse, accumulate=True), "accumulate: out, which is fp16; accepted"),
        (lambda: fovea.attention_backward(**grads, accumulate="k"), "accumulate: 'k'; accepted: names of grads_out, which is not given"),
        (lambda: fovea.attention_backward(**grads, grads_out={"v": out.copy()}, accumulate=["k"]), "accumulate: 'k'; accepted: names of grads_out, v"),
    ):
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value).startswith(text), raised.value
    with pytest.raises(TypeError, match="out: fp64; accepted: fp16, fp32, the type of q or fp32"):
        fovea.attention(half, half, half, out=q.astype(np.float64))
    assert not out.any() and np.isinf(lse).all()


def test_a_wrong_position_is_seen():
    """The comparison can fail: a part whose rows stand elsewhere has another result, with each user of positions."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 64, 2, 8), np.float32) for _ in range(3))
    for options in ({"causal": True}, {"window": (5, 5)}, {"alibi_slopes": [0.1, 0.2]}, {"dropout_p": 0.5, "seed": 3}):
        whole = fovea.attention(q, k, v, align=None if "dropout_p" in options else "top_left", **options)
        right = fovea.attention(q[:, 32:], k, v, position_q=32, **options)
        wrong = fovea.attention(q[:, 32:], k, v, position_q=16, **options)
        assert np.array_equal(right, whole[:, 32:]) and not np.array_equal(wrong, whole[:, 32:]), options
