"""Causal sliding-window attention by blocks: each block of queries sees its own and the block of keys before it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lmperf.implementations.facts import Facts, declare
from lmperf.reference import causal_mask, repeat_heads

#: Keys that a query sees, itself among them (Beltagy et al. 2020 and Mistral use such bands).
WINDOW = 128


def window_mask(queries: int, keys: int, window: int, device: torch.device | str | None = None) -> Tensor:
    """Boolean (queries, keys), True for the last `window` keys up to each query's own (last aligned to last)."""
    return causal_mask(queries, keys, device).triu(keys - queries - window + 1)


def naive_window(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int = WINDOW) -> Tensor:
    """The same function with every score materialised and a dense mask: the oracle of `sliding_window`."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = q @ k.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    mask = window_mask(q.shape[-2], k.shape[-2], window, q.device)
    return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v


def sliding_window(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int = WINDOW) -> Tensor:
    """Causal attention to the last `window` keys, time and memory O(length · window): shapes as in the contract."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    queries = q.shape[-2]
    k, v = k[..., -(queries + window - 1) :, :], v[..., -(queries + window - 1) :, :]
    if queries <= window:
        mask = window_mask(queries, k.shape[-2], window, q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    blocks = -(-queries // window)
    mask = block_mask(blocks, queries, k.shape[-2], window, q.device)
    q_blocks = F.pad(q, (0, 0, blocks * window - queries, 0)).flatten(0, 1).unflatten(1, (blocks, window))
    out = F.scaled_dot_product_attention(
        q_blocks, overlapping(k, blocks, window), overlapping(v, blocks, window), attn_mask=mask, scale=scale
    )
    return out.flatten(1, 2).unflatten(0, q.shape[:2])[:, :, -queries:]


def overlapping(x: Tensor, blocks: int, window: int) -> Tensor:
    """Keys (batch, heads, keys, d), padded in front, as (batch · heads, blocks, 2 · window, d) that overlap by half."""
    padded = F.pad(x, (0, 0, (blocks + 1) * window - x.shape[-2], 0)).flatten(0, 1)
    halves = padded.unflatten(1, (blocks + 1, window))
    return torch.cat([halves[:, :-1], halves[:, 1:]], dim=2)


def block_mask(blocks: int, queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """Boolean (1, blocks, window, 2 · window), True where a query may look.

    Padding queries see everything (their rows are cut off later): a row without any key would give NaN gradients.
    """
    block = torch.arange(blocks, device=device)[:, None, None]
    row = torch.arange(window, device=device)[None, :, None]
    column = torch.arange(2 * window, device=device)[None, None, :]
    band = (column > row) & (column <= row + window)
    real_key = block * window + column >= (blocks + 1) * window - keys
    padding_query = block * window + row < blocks * window - queries
    return (band & real_key | padding_query)[None]


declare(sliding_window, Facts(window=WINDOW))
