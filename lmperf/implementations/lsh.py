"""Causal attention over hash buckets: a query sees the latest keys that share a bucket with it in any of some rounds.

Angular hashing by random rotations (Andoni et al. 2015) in rounds, as Reformer does (Kitaev et al. 2020, arXiv
2001.04451), with two differences: queries and keys are hashed apart, and which keys a query sees depends on nothing
after it, since "the last WIDTH keys of my bucket" is the same whatever follows.  A query always sees its own key.  This
approximates attention and is another function: `lsh_recall` says how good it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lmperf.implementations.facts import Facts, declare
from lmperf.reference import repeat_heads

ROUNDS = 4
BUCKETS = 32
WIDTH = 64  # keys that a query sees in one round at most
CHUNK = 64  # queries computed together
HIDDEN = -1e9  # finite, so that a query without a key in some round gives weight 0 and no NaN gradient


def hash_buckets(x: Tensor) -> Tensor:
    """Bucket numbers (heads, ROUNDS, length) of x (heads, length, d): the nearest of ± BUCKETS / 2 random directions.

    In double precision, so that a tie never turns on the order of additions.
    """
    generator = torch.Generator().manual_seed(x.shape[-1])
    directions = torch.randn(ROUNDS, x.shape[-1], BUCKETS // 2, generator=generator, dtype=torch.float64)
    projected = x.detach().double()[:, None] @ directions.to(x.device)
    return torch.cat([projected, -projected], dim=-1).argmax(dim=-1)


@dataclass(frozen=True)
class Ranked:
    """One round's keys sorted by bucket, then position, and each query's visible stretch of that order."""

    order: Tensor  # (heads, keys) position of the key at each rank
    rank: Tensor  # (heads, keys) rank of the key at each position
    first: Tensor  # (heads, queries) first visible rank
    last: Tensor  # (heads, queries) last visible rank; below `first` when the bucket holds no key yet


def rank_keys(query_buckets: Tensor, key_buckets: Tensor) -> Ranked:
    """Sort one round's keys; query_buckets (heads, queries), key_buckets (heads, keys), last aligned to last."""
    keys, queries = key_buckets.shape[-1], query_buckets.shape[-1]
    positions = torch.arange(keys, device=key_buckets.device)
    codes, order = (key_buckets * keys + positions).sort(dim=-1)
    rank = torch.empty_like(order).scatter_(1, order, positions.expand_as(order))
    start_of_bucket = torch.searchsorted(codes, query_buckets * keys)
    last = torch.searchsorted(codes, query_buckets * keys + positions[keys - queries :], right=True) - 1
    return Ranked(order, rank, torch.maximum(start_of_bucket, last - WIDTH + 1), last)


@dataclass(frozen=True)
class Chunks:
    """Queries in chunks that look at one block of ranks each: about (queries + keys) / CHUNK of them at most."""

    slots: Tensor  # (heads, chunks, CHUNK) query position, −1 where empty
    block: Tensor  # (heads, chunks) number of the block of CHUNK ranks in which the last visible ranks lie


def make_chunks(last: Tensor, keys: int) -> Chunks:
    """Group queries whose last visible rank lies in the same block of ranks, and cut the groups at CHUNK queries."""
    heads, queries = last.shape
    most = -(-queries // CHUNK) + -(-keys // CHUNK)
    sorted_last, query = last.clamp_min(0).sort(dim=-1)
    block = sorted_last // CHUNK
    within = torch.arange(queries, device=last.device) - torch.searchsorted(block, block)
    chunk = (within % CHUNK == 0).cumsum(dim=-1) - 1
    slots = torch.full((heads, most * CHUNK), -1, dtype=torch.long, device=last.device)
    slots.scatter_(1, chunk * CHUNK + within % CHUNK, query)
    blocks = torch.zeros(heads, most, dtype=torch.long, device=last.device).scatter_(1, chunk, block)
    return Chunks(slots.unflatten(1, (most, CHUNK)), blocks)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Rows of x (heads, length[, d]) at index (heads, a, b): (heads, a, b[, d])."""
    flat = index.flatten(1)
    if x.dim() == 2:
        return x.gather(1, flat).view(index.shape)
    return x.gather(1, flat[..., None].expand(-1, -1, x.shape[-1])).view(*index.shape, -1)


def one_round(
    q: Tensor, k: Tensor, v: Tensor, scale: float, ranked: Ranked, earlier: list[Ranked]
) -> tuple[Tensor, Tensor]:
    """Output (heads, queries, d) and log-sum-exp (heads, queries) over the keys that no earlier round has seen."""
    keys, queries = k.shape[1], q.shape[1]
    chunks = make_chunks(ranked.last, keys)
    query = chunks.slots.clamp_min(0)
    reach = torch.arange(-WIDTH, CHUNK, device=q.device)
    ranks = chunks.block[..., None] * CHUNK + reach  # (heads, chunks, WIDTH + CHUNK)
    key = pick(ranked.order, ranks.clamp(0, keys - 1))
    seen = stretch(ranked, query, ranks)
    seen &= key[:, :, None, :] != (query + keys - queries)[..., None]  # its own key is added at the end
    for other in earlier:
        seen &= ~stretch(other, query, pick(other.rank, key))
    scores = pick(q, query) @ pick(k, key).transpose(-2, -1) * scale
    scores = scores.masked_fill(~seen, HIDDEN)
    lse = scores.logsumexp(dim=-1)
    out = (scores - lse[..., None]).exp() @ pick(v, key)
    # Back from slots to positions: each query sits in one slot, empty slots go to a row that is cut off.
    slot = chunks.slots.where(chunks.slots >= 0, queries).flatten(1)
    home = torch.empty(len(q), queries + 1, dtype=torch.long, device=q.device)
    home.scatter_(1, slot, torch.arange(slot.shape[1], device=q.device).expand_as(slot))
    home = home[:, None, :queries]
    return pick(out.flatten(1, 2), home)[:, 0], pick(lse.flatten(1), home)[:, 0]


def stretch(ranked: Ranked, query: Tensor, ranks: Tensor) -> Tensor:
    """(heads, chunks, CHUNK, ranks): whether each of the ranks lies in the visible stretch of the query."""
    ranks = ranks[:, :, None, :]
    return (ranks >= pick(ranked.first, query)[..., None]) & (ranks <= pick(ranked.last, query)[..., None])


def lsh(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Hashed causal attention, time and memory O(length · (WIDTH + CHUNK) · ROUNDS): shapes as in the contract."""
    scale = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
    shape, dtype = q.shape, q.dtype
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.float().flatten(0, 1) for x in (q, k, v))
        query_buckets, key_buckets = hash_buckets(q), hash_buckets(k)
        ranked = [rank_keys(query_buckets[:, r], key_buckets[:, r]) for r in range(ROUNDS)]
        parts = [one_round(q, k, v, scale, ranked[r], ranked[:r]) for r in range(ROUNDS)]
        own = (q * k[:, -q.shape[1] :]).sum(dim=-1) * scale
        outputs = torch.stack([v[:, -q.shape[1] :], *(out for out, _ in parts)])
        weights = torch.stack([own, *(lse for _, lse in parts)]).softmax(dim=0)
        return (weights[..., None] * outputs).sum(dim=0).view(shape).to(dtype)


def candidates(q: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Boolean (heads, rows, keys): which keys the queries at positions `rows` see, from the definition.

    q (heads, queries, d), k (heads, keys, d); rows are indices of queries.
    """
    keys, queries = k.shape[1], q.shape[1]
    position = rows + keys - queries
    past = torch.arange(keys, device=k.device) <= position[:, None]
    query_buckets, key_buckets = hash_buckets(q)[..., rows], hash_buckets(k)
    found = torch.arange(keys, device=k.device) == position[:, None]
    for r in range(ROUNDS):
        same = (query_buckets[:, r, :, None] == key_buckets[:, r, None, :]) & past
        later = same.flip(-1).cumsum(dim=-1).flip(-1)  # keys of the bucket from this one to the query
        found = found | (same & (later <= WIDTH))
    return found


def naive_lsh(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """The same function with every score materialised and a dense mask of candidates: the oracle of `lsh`."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    rows = torch.arange(q.shape[-2], device=q.device)
    seen = candidates(q.flatten(0, 1), k.flatten(0, 1), rows).unflatten(0, q.shape[:2])
    scores = q @ k.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    return scores.masked_fill(~seen, float("-inf")).softmax(dim=-1) @ v


@torch.no_grad()
def lsh_recall(q: Tensor, k: Tensor, *, top: int = 16, sample: int = 256) -> float:
    """Share of the `top` keys of highest score that hashed attention sees, over up to `sample` queries a head.

    q (batch, heads, queries, d), k (batch, kv_heads, keys, d); queries that see fewer keys than `top` count with all
    of them.
    """
    k = repeat_heads(k, q.shape[1]).flatten(0, 1).float()
    q = q.flatten(0, 1).float()
    queries, keys = q.shape[1], k.shape[1]
    rows = torch.linspace(0, queries - 1, min(sample, queries), device=q.device).round().long()
    past = torch.arange(keys, device=k.device) <= (rows + keys - queries)[:, None]
    scores = (q[:, rows] @ k.transpose(-2, -1)).masked_fill(~past, float("-inf"))
    best = scores.topk(min(top, keys), dim=-1)
    wanted = best.values.isfinite()
    hit = candidates(q, k, rows).gather(-1, best.indices) & wanted
    return float(hit.sum() / wanted.sum())


declare(lsh, Facts(dense=False, recall=lsh_recall))
