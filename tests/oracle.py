# SPDX-License-Identifier: Apache-2.0
"""The specification in NumPy, fp64 and plain loops over (b, h, i, j); nothing of fovea is imported.

fovea defines a formula once and reads it everywhere, so a mistake in the definition would be shared by every
backend. This file is the second opinion: the reference is tested against it, its gradients against finite
differences of its own forward, its dropout against published vectors. It is written for a reader with the
specification (docs/semantics.md) beside it, and in no other respect optimised.

    forward(q, k, v, **options)                       -> out, lse
    backward(grad_out, q, k, v, out, lse, **options)  -> {"q": ..., "k": ..., "v": ..., "bias": ..., ...}
    accumulated(held, out, lse), added(held, grads)   -> the same where a call accumulates into what its tensors hold

Shapes are the specification's; `batch_shape` gives packed sequences a batch of two levels. Rows that do not exist
(beyond seqused, past the last entry of cu_seqlens) hold `fill` in whatever comes back.
"""

import math

import numpy as np

MASK32 = 0xFFFFFFFF

# ---- dropout ----


def philox4x32(counter, key, rounds=10):
    """Random123's Philox-4x32; four counter words and two key words give four words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0 = 0xD2511F53 * c0
        p1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0 = (k0 + 0x9E3779B9) & MASK32
        k1 = (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def philox2x32(counter, keys, rounds):
    """Philox-2x32 whose even rounds use keys[0] and whose odd rounds use keys[1]; Random123's if they are equal."""
    x, y = counter
    for r in range(rounds):
        product = 0xD256D193 * x
        key = (keys[r % 2] + r * 0x9E3779B9) & MASK32
        x, y = (product >> 32) ^ y ^ key, product & MASK32
    return x, y


def words(value):
    """The low and the high word of 64 bits."""
    return value & MASK32, (value >> 32) & MASK32


def head_words(seed, offset, n):
    low, high = words(n)
    return philox4x32((*words(offset), low, high ^ 0x666F7665), words(seed))


def dropout_value(seed, offset, n, i, j):
    """u(i, j) of the rule `fovea`, 16 bits; n is the head's stream, i and j are positions."""
    k0, k1, w0, w1 = head_words(seed, offset, n)
    folded_i = (i >> 4) * 8 + (i & 7)
    folded_j = (j >> 4) * 8 + (j & 7)
    x, y = philox2x32((folded_i ^ w0, folded_j ^ w1), (k0, k1), 8)
    e = 2 * ((i >> 3) & 1) + ((j >> 3) & 1)
    return (y << 32 | x) >> (16 * e) & 0xFFFF


def torch_uniform(seed, index):
    """Number `index` of the Philox-4x32-10 stream of the seed, uniform in (0, 1], in fp32 as on the device."""
    index &= (1 << 64) - 1
    word = philox4x32((*words(index >> 2), 0, 0), words(seed))[index & 3]
    return np.float32(np.float32(word) * np.float32(2.0**-32)) + np.float32(2.0**-33)


def keep_factor(p, rng):
    """What kept elements are multiplied by; 0 where nothing is kept."""
    if rng == "fovea":
        threshold = math.floor(p * 65536 + 0.5)
        return 0.0 if threshold == 65536 else 65536 / (65536 - threshold)
    return 0.0 if p >= 1 else 1 / (1 - float(np.float32(p)))


def keeps(p, seed, offset, rng, n, i, j, plane, row):
    """Whether (i, j) is kept; plane and row are the elements of a head and of a row of scores."""
    if p == 0:
        return True
    if rng == "fovea":
        return dropout_value(seed, offset, n, i, j) >= math.floor(p * 65536 + 0.5)
    return bool(torch_uniform(seed, offset + n * plane + i * row + j) > np.float32(p))


# ---- the operation ----


class Problem:
    """The inputs in fp64, addressed by logical coordinates (b, h, i, j)."""

    def __init__(self, q, k, v, *, bias=None, bias2=None, mask=None, scale=None, causal=False, window=(-1, -1),
                 align="bottom_right", softcap=0.0, alibi_slopes=None, sink=None, dropout_p=0.0, seed=0, offset=0,
                 rng="fovea", cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                 seqused_q=None, seqused_k=None, batch_shape=None, position_q=None, position_k=None, positions_q=None,
                 positions_k=None, dropout_streams=None):
        double = lambda x: None if x is None else np.asarray(x).astype(np.float64)
        self.q, self.k, self.v = double(q), double(k), double(v)
        self.packed = cu_seqlens_q is not None
        if self.packed:
            self.cu_q, self.cu_k = [int(n) for n in cu_seqlens_q], [int(n) for n in cu_seqlens_k]
            self.batch = (len(self.cu_q) - 1,)
            if batch_shape is not None:
                self.batch = tuple(batch_shape)
            longest = lambda cu: max([b - a for a, b in zip(cu, cu[1:])], default=0)
            self.rows_q = longest(self.cu_q) if max_seqlen_q is None else max_seqlen_q
            self.rows_k = longest(self.cu_k) if max_seqlen_k is None else max_seqlen_k
        else:
            self.batch = self.q.shape[:-3]
            self.rows_q, self.rows_k = self.q.shape[-3], self.k.shape[-3]
        self.heads, self.heads_k = self.q.shape[-2], self.k.shape[-2]
        self.used_q, self.used_k = seqused_q, seqused_k
        self.scale = 1 / math.sqrt(self.q.shape[-1]) if scale is None else scale
        self.causal, self.window, self.align, self.softcap = causal, window, align, softcap
        plane = (*self.batch, self.heads, self.rows_q, self.rows_k)
        self.bias_given, self.bias2_given = double(bias), double(bias2)
        spread = lambda x: None if x is None else np.broadcast_to(x, plane)
        self.bias, self.bias2, self.mask = spread(self.bias_given), spread(self.bias2_given), spread(mask)
        self.slopes = double(alibi_slopes)
        self.sink = double(sink)
        self.dropout_p, self.seed, self.offset, self.rng = dropout_p, seed, offset, rng
        entries = math.prod(self.batch)
        given = [x is not None for x in (position_q, position_k, positions_q, positions_k)]
        first = lambda one, each: [(one or 0) + int(n) for n in (np.zeros(entries) if each is None else each)]
        self.first_q, self.first_k = first(position_q, positions_q), first(position_k, positions_k)
        self.shifted = any(given)
        streams = np.arange(entries * self.heads) if dropout_streams is None else dropout_streams
        if dropout_streams is not None:
            streams = np.broadcast_to(streams, (*self.batch, self.heads))
        self.streams = streams.reshape(entries, self.heads)

    def entries(self):
        """(index of the batch entry among all, its index in each level)."""
        return enumerate(np.ndindex(*self.batch))

    def lengths(self, b):
        """(first row of q, rows of q, first row of k, rows of k) of a batch entry."""
        q0, nq, k0, nk = 0, self.rows_q, 0, self.rows_k
        if self.packed:
            q0, nq = self.cu_q[b], self.cu_q[b + 1] - self.cu_q[b]
            k0, nk = self.cu_k[b], self.cu_k[b + 1] - self.cu_k[b]
        if self.used_q is not None:
            nq = min(nq, int(self.used_q[b]))
        if self.used_k is not None:
            nk = min(nk, int(self.used_k[b]))
        return q0, nq, k0, nk

    def row(self, index, head, row):
        """Where row `row` of a head lies in a tensor shaped as q, k, v or out."""
        return (row, head) if self.packed else (*index, row, head)

    def lse_row(self, index, head, row):
        return (head, row) if self.packed else (*index, head, row)

    def shift(self, b, nq, nk):
        if self.shifted:
            return self.first_q[b] - self.first_k[b]
        return nk - nq if self.align == "bottom_right" else 0

    def allowed(self, b, index, h, i, j, nq, nk):
        shift = self.shift(b, nq, nk)
        left, right = self.window
        return ((self.mask is None or bool(self.mask[(*index, h, i, j)]))
                and (not self.causal or j <= i + shift)
                and (left < 0 or i + shift - left <= j)
                and (right < 0 or j <= i + shift + right))

    def score(self, b, index, h, i, j, lengths):
        """s_ij and its derivative by <q_i, k_j>."""
        q0, nq, k0, nk = lengths
        shift = self.shift(b, nq, nk)
        q_i = self.q[self.row(index, h, q0 + i)]
        k_j = self.k[self.row(index, h // (self.heads // self.heads_k), k0 + j)]
        s = self.scale * float(q_i @ k_j)
        derivative = self.scale
        if self.softcap > 0:
            t = math.tanh(s / self.softcap)
            s = self.softcap * t
            derivative *= 1 - t * t
        if self.bias is not None:
            s += self.bias[(*index, h, i, j)]
        if self.bias2 is not None:
            s += self.bias2[(*index, h, i, j)]
        if self.slopes is not None:
            slope = self.slopes[h] if self.slopes.ndim == 1 else self.slopes[b, h]
            s -= slope * abs(i + shift - j)
        return s, derivative

    def keep(self, b, h, i, j, nk):
        """keep_ij / (1 - p_drop)."""
        if self.dropout_p == 0:
            return 1.0
        factor = keep_factor(self.dropout_p, self.rng)
        row = nk if self.packed else self.rows_k
        n = int(self.streams[b, h]) % 2**64
        kept = factor != 0 and keeps(self.dropout_p, self.seed, self.offset, self.rng, n, self.first_q[b] + i,
                                     self.first_k[b] + j, self.rows_q * self.rows_k, row)
        return factor if kept else 0.0


def forward(q, k, v, *, fill=0.0, **options):
    problem = Problem(q, k, v, **options)
    out = np.full((*problem.q.shape[:-1], problem.v.shape[-1]), fill)
    rows = problem.q.shape[0] if problem.packed else problem.q.shape[-3]
    lse = np.full((problem.heads, rows) if problem.packed else (*problem.batch, problem.heads, rows), fill)
    for b, index in problem.entries():
        lengths = q0, nq, k0, nk = problem.lengths(b)
        for h in range(problem.heads):
            h_k = h // (problem.heads // problem.heads_k)
            for i in range(nq):
                scores = {j: problem.score(b, index, h, i, j, lengths)[0] for j in range(nk)
                          if problem.allowed(b, index, h, i, j, nq, nk)}
                logits = list(scores.values()) + ([problem.sink[h]] if problem.sink is not None else [])
                top = max(logits, default=-math.inf)
                o_i = np.zeros(problem.v.shape[-1])
                if top == -math.inf:
                    lse_i = -math.inf
                else:
                    total = sum(math.exp(s - top) for s in logits)
                    lse_i = top + math.log(total)  # which rounds to top where that is huge
                    for j, s in scores.items():
                        p_ij = math.exp(s - top) / total
                        o_i += problem.keep(b, h, i, j, nk) * p_ij * problem.v[problem.row(index, h_k, k0 + j)]
                out[problem.row(index, h, q0 + i)] = o_i
                lse[problem.lse_row(index, h, q0 + i)] = lse_i
    return out, lse


def accumulated(held, out, lse, fill):
    """The result over the keys of two calls: `held`, (out, lse), and another. A row without keys has 0 and -inf. Rows that do not
    exist, where lse is `fill`, keep what they hold."""
    held_out, held_lse = (np.array(x, np.float64) for x in held)
    rows = held_lse.shape
    # The order of out's dimensions is not that of lse: heads are the last but one.
    out, into = np.moveaxis(out, -2, -3), np.moveaxis(held_out, -2, -3)
    for at in np.ndindex(rows):
        if lse[at] == fill:
            continue
        logits = [held_lse[at], lse[at]]
        top = max(logits)
        if top == -math.inf:
            continue
        both = top + math.log(sum(math.exp(x - top) for x in logits))
        into[at] = math.exp(held_lse[at] - both) * into[at] + math.exp(lse[at] - both) * out[at]
        held_lse[at] = both
    return held_out, held_lse


def added(held, grads, fill):
    """Gradients that are added to what is held, by name. Elements that are `fill` belong to rows that do not exist."""
    return {name: np.where(grad == fill, held[name], held[name] + np.where(grad == fill, 0, grad)) for name, grad in grads.items()}


def reduced(expanded, shape):
    """The sum over the dimensions in which `shape` was broadcast."""
    padded = (1,) * (expanded.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, n in enumerate(padded) if n == 1 and expanded.shape[axis] != 1)
    return expanded.sum(axis=axes, keepdims=True).reshape(shape)


def backward(grad_out, q, k, v, out, lse, *, grad_lse=None, fill=0.0, **options):
    problem = Problem(q, k, v, **options)
    grad_out, out, lse = (np.asarray(x).astype(np.float64) for x in (grad_out, out, lse))
    grad_lse = None if grad_lse is None else np.asarray(grad_lse).astype(np.float64)
    plane = (*problem.batch, problem.heads, problem.rows_q, problem.rows_k)
    grads = {"q": np.full(problem.q.shape, fill), "k": np.full(problem.k.shape, fill), "v": np.full(problem.v.shape, fill)}
    grad_scores = np.zeros(plane)
    grad_sink = np.zeros(problem.heads)
    for b, index in problem.entries():  # rows that exist begin at 0
        q0, nq, k0, nk = problem.lengths(b)
        for h in range(problem.heads):
            for i in range(nq):
                grads["q"][problem.row(index, h, q0 + i)] = 0
        for h_k in range(problem.heads_k):
            for j in range(nk):
                grads["k"][problem.row(index, h_k, k0 + j)] = 0
                grads["v"][problem.row(index, h_k, k0 + j)] = 0
    for b, index in problem.entries():
        lengths = q0, nq, k0, nk = problem.lengths(b)
        for h in range(problem.heads):
            h_k = h // (problem.heads // problem.heads_k)
            for i in range(nq):
                at_i = problem.row(index, h, q0 + i)
                lse_i = lse[problem.lse_row(index, h, q0 + i)]
                if lse_i == -math.inf:
                    continue
                do_i = grad_out[at_i]
                delta = float(do_i @ out[at_i])
                if grad_lse is not None:
                    delta -= grad_lse[problem.lse_row(index, h, q0 + i)]
                for j in range(nk):
                    if not problem.allowed(b, index, h, i, j, nq, nk):
                        continue
                    at_j = problem.row(index, h_k, k0 + j)
                    s, derivative = problem.score(b, index, h, i, j, lengths)
                    p = math.exp(s - lse_i)
                    keep = problem.keep(b, h, i, j, nk)
                    dp = keep * float(do_i @ problem.v[at_j])
                    ds = p * (dp - delta)
                    if keep != 0:  # what is dropped has no part, not even as NaN
                        grads["v"][at_j] += keep * p * do_i
                    grads["q"][at_i] += ds * derivative * problem.k[at_j]
                    grads["k"][at_j] += ds * derivative * problem.q[at_i]
                    grad_scores[(*index, h, i, j)] += ds
                if problem.sink is not None:
                    grad_sink[h] -= math.exp(problem.sink[h] - lse_i) * delta
    if problem.bias is not None:
        grads["bias"] = reduced(grad_scores, problem.bias_given.shape)
    if problem.bias2 is not None:
        grads["bias2"] = reduced(grad_scores, problem.bias2_given.shape)
    if problem.sink is not None:
        grads["sink"] = grad_sink
    return grads
