"""Grouped heads without repeating keys, and keys laid out badly on purpose."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from lmperf import reference
from lmperf.implementations.facts import Facts, declare
from lmperf.records import ModelShape


def share_heads(shape: ModelShape) -> ModelShape:
    """Half as many key-value heads as query heads (Ainslie et al. 2023, arXiv 2305.13245); one for an odd number."""
    return dataclasses.replace(shape, kv_heads=shape.heads // 2 if shape.heads % 2 == 0 else 1)


def one_head(shape: ModelShape) -> ModelShape:
    """One key-value head for all query heads (Shazeer 2019, arXiv 1911.02150)."""
    return dataclasses.replace(shape, kv_heads=1)


def grouped(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal attention where the query heads of a group are rows of one product with their shared keys.

    q (batch, heads, queries, d); k, v (batch, kv_heads, keys, d); no key or value is copied for a head.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    rows = q.unflatten(1, (k.shape[1], -1))  # (batch, kv_heads, group, queries, d)
    scores = rows.flatten(2, 3) @ k.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    hidden = ~reference.causal_mask(queries, keys, q.device)
    scores = scores.unflatten(2, (-1, queries)).masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (scores.flatten(2, 3) @ v).unflatten(2, (-1, queries)).flatten(1, 2)


def spread(x: Tensor) -> Tensor:
    """The same numbers with a gap after each: the last dimension has stride 2 (already spread: unchanged)."""
    if x.stride(-1) != 1 or x.shape[-1] == 1:
        return x
    return torch.stack([x, torch.zeros_like(x)], dim=-1).flatten(-2)[..., ::2]


def strided(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """The reference attention on keys and values with gaps; the operator workload spreads them outside the clock."""
    return reference.attention(q, spread(k), spread(v), scale=scale)


declare(strided, Facts(arrange=lambda q, k, v: (q, spread(k), spread(v))))
