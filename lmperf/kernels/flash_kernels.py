"""Triton kernels of FlashAttention-2 (Dao 2023, arXiv 2307.08691): forward, dK and dV, dQ.

Every tensor is contiguous: queries (heads of the whole batch, queries, d), keys (key heads of the whole batch, keys,
d).  A head's keys are those of key head `head // group`.  Rows and columns beyond the lengths, and head sizes that are
no power of two, are masked.  Products take the input's dtype and accumulate in fp32; UPCAST turns operands into fp32
first, which Triton's interpreter needs for bfloat16.  Import this module only where triton is installed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(base, rows, columns, length, d, UPCAST: tl.constexpr):
    """Rows of a (length, d) matrix, zero outside it."""
    inside = (rows[:, None] < length) & (columns[None, :] < d)
    tile = tl.load(base + rows[:, None] * d + columns[None, :], mask=inside, other=0.0)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def store_rows(base, tile, rows, columns, length, d):
    """Write rows of a (length, d) matrix in its own dtype."""
    inside = (rows[:, None] < length) & (columns[None, :] < d)
    tl.store(base + rows[:, None] * d + columns[None, :], tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def visible(rows, columns, queries, keys, CAUSAL: tl.constexpr):
    """(rows, columns), True where a query may look: the last query is aligned to the last key."""
    seen = (columns[None, :] < keys) & (rows[:, None] < queries)
    if CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None] + keys - queries)
    return seen


@triton.jit
def forward_kernel(
    Q, K, V, OUT, L, scale, queries, keys, d, group,
    CAUSAL: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of one block of queries: online softmax over blocks of keys (algorithm 1)."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    K += (head // group) * keys * d
    V += (head // group) * keys * d
    q = load_rows(Q + head * queries * d, rows, width, queries, d, UPCAST)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    stop = keys
    if CAUSAL:
        stop = tl.minimum(keys, (tl.program_id(0) + 1) * ROWS + keys - queries)
    for start in range(0, stop, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k = load_rows(K, columns, width, keys, d, UPCAST)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(visible(rows, columns, queries, keys, CAUSAL), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Rows past the end see no key at all: −∞ − −∞ would be NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(p, 1)
        v = load_rows(V, columns, width, keys, d, UPCAST)
        result = result * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)
    store_rows(OUT + head * queries * d, result / total[:, None], rows, width, queries, d)
    tl.store(L + head * queries + rows, top + tl.log(total), mask=rows < queries)


@triton.jit
def probabilities(q, k, lse, rows, columns, scale, queries, keys, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of the softmax (rows, columns), recomputed from the saved log-sum-exp."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    p = tl.exp(scores - lse[:, None])
    return tl.where(visible(rows, columns, queries, keys, CAUSAL), p, 0.0)


@triton.jit
def keys_backward_kernel(
    Q, K, V, DO, L, D, DK, DV, scale, queries, keys, d, group,
    CAUSAL: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys, summed over the query heads of its group (algorithm 2, lines 6 to 19)."""
    key_head = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    width = tl.arange(0, WIDTH)
    k = load_rows(K + key_head * keys * d, columns, width, keys, d, UPCAST)
    v = load_rows(V + key_head * keys * d, columns, width, keys, d, UPCAST)
    d_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    d_v = tl.zeros([COLUMNS, WIDTH], tl.float32)
    first = 0
    if CAUSAL:  # earlier queries do not see this block
        first = tl.maximum(0, tl.program_id(0) * COLUMNS - (keys - queries)) // ROWS * ROWS
    for member in range(0, group):
        head = key_head * group + member
        for start in range(first, queries, ROWS):
            rows = start + tl.arange(0, ROWS)
            q = load_rows(Q + head * queries * d, rows, width, queries, d, UPCAST)
            d_o = load_rows(DO + head * queries * d, rows, width, queries, d, UPCAST)
            lse = tl.load(L + head * queries + rows, mask=rows < queries, other=0.0)
            row_dot = tl.load(D + head * queries + rows, mask=rows < queries, other=0.0)
            p = probabilities(q, k, lse, rows, columns, scale, queries, keys, CAUSAL, PRECISION)
            d_v += tl.dot(tl.trans(p).to(d_o.dtype), d_o, input_precision=PRECISION)
            d_p = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
            d_s = p * (d_p - row_dot[:, None]) * scale
            d_k += tl.dot(tl.trans(d_s).to(q.dtype), q, input_precision=PRECISION)
    store_rows(DK + key_head * keys * d, d_k, columns, width, keys, d)
    store_rows(DV + key_head * keys * d, d_v, columns, width, keys, d)


@triton.jit
def queries_backward_kernel(
    Q, K, V, DO, L, D, DQ, scale, queries, keys, d, group,
    CAUSAL: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries: the keys again, so that no two programs add to the same row."""
    head = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    width = tl.arange(0, WIDTH)
    K += (head // group) * keys * d
    V += (head // group) * keys * d
    q = load_rows(Q + head * queries * d, rows, width, queries, d, UPCAST)
    d_o = load_rows(DO + head * queries * d, rows, width, queries, d, UPCAST)
    lse = tl.load(L + head * queries + rows, mask=rows < queries, other=0.0)
    row_dot = tl.load(D + head * queries + rows, mask=rows < queries, other=0.0)
    d_q = tl.zeros([ROWS, WIDTH], tl.float32)
    stop = keys
    if CAUSAL:
        stop = tl.minimum(keys, (tl.program_id(0) + 1) * ROWS + keys - queries)
    for start in range(0, stop, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k = load_rows(K, columns, width, keys, d, UPCAST)
        v = load_rows(V, columns, width, keys, d, UPCAST)
        p = probabilities(q, k, lse, rows, columns, scale, queries, keys, CAUSAL, PRECISION)
        d_p = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
        d_s = p * (d_p - row_dot[:, None]) * scale
        d_q += tl.dot(d_s.to(k.dtype), k, input_precision=PRECISION)
    store_rows(DQ + head * queries * d, d_q, rows, width, queries, d)
