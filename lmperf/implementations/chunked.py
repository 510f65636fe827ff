"""Exact attention in tiles: online softmax forward, recomputation backward, no score matrix kept.

The forward keeps the output and the log-sum-exp of every query (Dao 2023, arXiv 2307.08691, algorithm 1); the backward
recomputes each tile's probabilities from them (algorithm 2).  Memory is O(length · block), time that of dense causal
attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: Tile sizes: a tile's scores (heads · block²·4 bytes) should stay in the last cache level.
QUERY_BLOCK = 128
KEY_BLOCK = 512


def tiles(queries: int, keys: int, causal: bool, blocks: tuple[int, int]) -> Iterator[tuple[slice, list[slice]]]:
    """Each block of queries with the blocks of keys that it can see (wholly masked ones are left out)."""
    query_block, key_block = blocks
    for start in range(0, queries, query_block):
        stop = min(start + query_block, queries)
        visible = min(keys, stop + keys - queries) if causal else keys
        yield slice(start, stop), [slice(j, min(j + key_block, visible)) for j in range(0, visible, key_block)]


def mask_tile(scores: Tensor, rows: slice, columns: slice, offset: int) -> None:
    """Set scores (..., rows, columns) of keys in a query's future to −∞ in place; offset = keys − queries."""
    first_hidden = rows.start + offset + 1
    if columns.stop <= first_hidden:
        return  # the whole tile lies in the past
    start = max(columns.start, first_hidden)
    hidden = torch.ones(scores.shape[-2], columns.stop - start, dtype=torch.bool, device=scores.device)
    scores[..., start - columns.start :].masked_fill_(hidden.triu(first_hidden - start), float("-inf"))


class TiledAttention(torch.autograd.Function):
    """Attention over q (pairs, group, queries, d) and k, v (pairs, keys, d), where pairs = batch · kv_heads.

    The query heads of a group share a key head, so that keys are never repeated.  Arguments after v: scale,
    causal, softcap (scores become c·tanh(score / c); None leaves them), (query block, key block).
    Returns (output in q's dtype, log-sum-exp (pairs, group, queries) fp32); only the output carries a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None,
        blocks: tuple[int, int],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with torch.autocast(q.device.type, enabled=False):
            out, lse = forward_tiles(q, k, v, scale, causal, softcap, blocks)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal, ctx.softcap, ctx.blocks = scale, causal, softcap, blocks
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(d_out.device.type, enabled=False):
            grads = backward_tiles(*ctx.saved_tensors, d_out, ctx.scale, ctx.causal, ctx.softcap, ctx.blocks)
        return *grads, None, None, None, None


def forward_tiles(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, softcap: float | None, blocks: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, tile by tile, in fp32 (Milakov and Gimelshein 2018: the softmax's running maximum)."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    offset = k.shape[-2] - q.shape[-2]
    for rows, blocks_of_keys in tiles(q.shape[-2], k.shape[-2], causal, blocks):
        q_rows = flat(q, rows) * scale
        top = total = result = None
        for columns in blocks_of_keys:
            scores = tile_scores(q_rows, k, rows, columns, q.shape[1], offset if causal else None, softcap)
            highest = scores.amax(dim=-1, keepdim=True)
            v_block = v[:, columns].float()
            if top is None:
                top = highest
                total = scores.sub_(top).exp_().sum(dim=-1, keepdim=True)
                result = torch.bmm(scores, v_block)
                continue
            new_top = torch.maximum(top, highest)
            shrink = top.sub_(new_top).exp_()
            total.mul_(shrink).add_(scores.sub_(new_top).exp_().sum(dim=-1, keepdim=True))
            result.mul_(shrink).baddbmm_(scores, v_block)
            top = new_top
        shape = (*q.shape[:2], rows.stop - rows.start)
        out[:, :, rows] = result.div_(total).view(*shape, -1)
        lse[:, :, rows] = total.log_().add_(top).view(shape)
    return out, lse


def backward_tiles(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor,
    scale: float, causal: bool, softcap: float | None, blocks: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v from the saved output and log-sum-exp, recomputing each tile's probabilities."""
    d_q = torch.empty_like(q, memory_format=torch.contiguous_format)
    d_k = torch.zeros(k.shape, dtype=torch.float32, device=k.device)
    d_v = torch.zeros_like(d_k)
    offset = k.shape[-2] - q.shape[-2]
    for rows, blocks_of_keys in tiles(q.shape[-2], k.shape[-2], causal, blocks):
        q_rows, d_rows = flat(q, rows) * scale, flat(d_out, rows)
        # D = rowsum(dO ∘ O): the softmax's Jacobian needs nothing else of the row.
        row_dot = (d_rows * flat(out, rows)).sum(dim=-1, keepdim=True)
        row_lse = lse[:, :, rows].reshape(len(q), -1, 1)
        d_rows_q = torch.zeros_like(q_rows)
        for columns in blocks_of_keys:
            p = tile_scores(q_rows, k, rows, columns, q.shape[1], offset if causal else None, softcap)
            slope = None if softcap is None else (p / softcap).square_().neg_().add_(1).nan_to_num_(neginf=0.0)
            p.sub_(row_lse).exp_()
            d_v[:, columns].baddbmm_(p.transpose(1, 2), d_rows)
            d_p = torch.bmm(d_rows, v[:, columns].float().transpose(1, 2))
            d_scores = d_p.sub_(row_dot).mul_(p)
            if slope is not None:
                d_scores.mul_(slope)
            d_k[:, columns].baddbmm_(d_scores.transpose(1, 2), q_rows)
            d_rows_q.baddbmm_(d_scores, k[:, columns].float())
        d_q[:, :, rows] = d_rows_q.mul_(scale).view(*q.shape[:2], rows.stop - rows.start, -1)
    return d_q, d_k.to(k.dtype), d_v.to(v.dtype)


def flat(x: Tensor, rows: slice) -> Tensor:
    """Rows of (pairs, group, queries, d) as fp32 (pairs, group · rows, d)."""
    return x[:, :, rows].float().flatten(1, 2)


def tile_scores(
    q_rows: Tensor, k: Tensor, rows: slice, columns: slice, group: int, offset: int | None, softcap: float | None
) -> Tensor:
    """Scores of one tile (pairs, group · rows, columns), capped and masked (offset None: nothing is masked)."""
    scores = torch.bmm(q_rows, k[:, columns].float().transpose(1, 2))
    if softcap is not None:
        scores.div_(softcap).tanh_().mul_(softcap)
    if offset is not None:
        mask_tile(scores.view(len(scores), group, rows.stop - rows.start, -1), rows, columns, offset)
    return scores


def tiled_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, causal: bool = True, softcap: float | None = None,
    blocks: tuple[int, int] = (QUERY_BLOCK, KEY_BLOCK),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention and its log-sum-exp: q (batch, heads, queries, d), k, v (batch, kv_heads, keys, d).

    Returns output (batch, heads, queries, d) and log-sum-exp (batch, heads, queries) in fp32, natural logarithm.
    """
    batch, heads, queries, d = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    if causal and keys < queries:
        raise ValueError(f"causal attention needs keys ≥ queries, got {keys} keys for {queries} queries")
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, got {heads} and {kv_heads}")
    out, lse = TiledAttention.apply(
        q.reshape(batch * kv_heads, heads // kv_heads, queries, d),
        k.reshape(batch * kv_heads, keys, d),
        v.reshape(batch * kv_heads, keys, v.shape[-1]),
        scale if scale is not None else 1 / math.sqrt(d), causal, softcap, blocks,
    )  # fmt: skip
    return out.view(q.shape), lse.view(batch, heads, queries)


@torch.compiler.disable
def chunked(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal tiled attention in the contract of `lmperf.reference.attention`; a graph break under torch.compile."""
    return tiled_attention(q, k, v, scale=scale)[0]


def capped(softcap: float) -> Callable[..., Tensor]:
    """Causal tiled attention with scores capped at ±softcap by tanh (Gemma 2, arXiv 2408.00118)."""

    @torch.compiler.disable
    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        return tiled_attention(q, k, v, scale=scale, softcap=softcap)[0]

    return attention


class FlashFunction(torch.autograd.Function):
    """`apply(Q, K, V, is_causal=False)`: FlashAttention-2 in plain PyTorch; saves Q, K, V, O and the log-sum-exp.

    Q, K, V (batch, length, d) or (batch, heads, length, d); the log-sum-exp is (batch, queries) or
    (batch, heads, queries).  Returns O in Q's shape; backward gives dQ, dK, dV and None.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1])
        grouped = grouped_layout(q, k, v)
        with torch.autocast(q.device.type, enabled=False):
            out, lse = forward_tiles(*grouped, scale, is_causal, None, (QUERY_BLOCK, KEY_BLOCK))
        out = out.view(q.shape)
        ctx.save_for_backward(q, k, v, out, lse.view(q.shape[:-1]))
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        q_in, k_in, v_in = grouped_layout(q, k, v)
        flat_out, flat_lse, flat_d = out.view(q_in.shape), lse.view(q_in.shape[:-1]), d_out.reshape(q_in.shape)
        with torch.autocast(q.device.type, enabled=False):
            d_q, d_k, d_v = backward_tiles(
                q_in, k_in, v_in, flat_out, flat_lse, flat_d, ctx.scale, ctx.is_causal, None, (QUERY_BLOCK, KEY_BLOCK)
            )
        return d_q.view(q.shape), d_k.view(k.shape), d_v.view(v.shape), None


def grouped_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(batch, [heads,] length, d) as q (pairs, group, queries, d) and k, v (pairs, keys, d)."""
    if q.dim() not in (3, 4) or q.dim() != k.dim():
        raise ValueError(f"Q, K, V must be (batch, [heads,] length, d), got {tuple(q.shape)} and {tuple(k.shape)}")
    pairs = len(k) if k.dim() == 3 else k.shape[0] * k.shape[1]
    return (
        q.reshape(pairs, -1, *q.shape[-2:]),
        k.reshape(pairs, *k.shape[-2:]),
        v.reshape(pairs, *v.shape[-2:]),
    )
