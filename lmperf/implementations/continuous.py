"""Continuous batching: requests join a running batch as soon as a slot is free, and leave when they are done.

Linear layers run over all rows at once; attention runs over rows of equal length together (Yu et al. 2022, Orca).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmperf.implementations.decoding import greedy
from lmperf.model import rotate


@dataclass(frozen=True)
class Request:
    """A prompt (length,) int64 and how many tokens are wanted."""

    prompt: Tensor
    new_tokens: int


class SlotCache:
    """Keys and values of requests of different lengths, one slot each: (slots, kv_heads, capacity, d) a layer."""

    def __init__(self, model: nn.Module, slots: int, capacity: int) -> None:
        shape, weight = model.shape, model.embedding.weight
        size = (slots, shape.kv_heads, capacity, shape.head_dim)
        self.keys = [weight.new_zeros(size) for _ in range(shape.layers)]
        self.values = [weight.new_zeros(size) for _ in range(shape.layers)]
        self.lengths = [0] * slots

    def append(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one token's k, v (rows, kv_heads, d) of each slot at its own position."""
        self.keys[layer][slots, :, positions] = k
        self.values[layer][slots, :, positions] = v

    def rows(self, layer: int, slots: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Keys and values (rows, kv_heads, length, d) of slots of one length: a view where the slots are neighbours."""
        first, last = slots[0], slots[-1]
        chosen = slice(first, last + 1) if last - first + 1 == len(slots) else list(slots)
        return self.keys[layer][chosen, :, :length], self.values[layer][chosen, :, :length]


class SlotView:
    """One slot as the cache of a forward pass over a single prompt."""

    def __init__(self, cache: SlotCache, slot: int) -> None:
        self.cache, self.slot, self.length = cache, slot, 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `model.Cache.update`; batch 1."""
        stop = self.length + k.shape[2]
        keys, values = self.cache.keys[layer][self.slot], self.cache.values[layer][self.slot]
        keys[:, self.length : stop], values[:, self.length : stop] = k[0], v[0]
        return keys[None, :, :stop], values[None, :, :stop]

    def advance(self, tokens: int) -> None:
        """See `model.Cache.advance`."""
        self.length += tokens
        self.cache.lengths[self.slot] = self.length


def decode_rows(model: nn.Module, tokens: Tensor, slots: list[int], cache: SlotCache) -> Tensor:
    """The next token of each row, tokens (rows,) → (rows,), rows standing at different positions of `slots`."""
    lengths = [cache.lengths[slot] for slot in slots]
    positions = torch.tensor(lengths, device=tokens.device)
    where = torch.tensor(slots, device=tokens.device)
    groups = groups_of(lengths)
    x = model.embedding(tokens)[:, None]
    if model.position is not None:
        x = x + model.position(positions)[:, None]
    for layer, block in enumerate(model.blocks):
        x = x + _attend(block.attention, block.norm_1(x), layer, slots, where, positions, groups, cache)
        x = x + block.feed_forward(block.norm_2(x))
    for slot in slots:
        cache.lengths[slot] += 1
    following: Tensor = model.logits(model.norm(x)[:, -1]).argmax(dim=-1)
    return following


def groups_of(lengths: Sequence[int]) -> dict[int, list[int]]:
    """Rows by their length."""
    groups: dict[int, list[int]] = {}
    for row, length in enumerate(lengths):
        groups.setdefault(length, []).append(row)
    return groups


def _attend(
    attention: nn.Module, x: Tensor, layer: int, slots: list[int], where: Tensor, positions: Tensor,
    groups: dict[int, list[int]], cache: SlotCache,
) -> Tensor:  # fmt: skip
    d = attention.shape.head_dim
    q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in attention.projection(x))
    if attention.shape.position == "rotary":  # `rotate` takes one position a place: rows stand in for places
        q, k = (rotate(t.transpose(0, 2), positions).transpose(0, 2) for t in (q, k))
    cache.append(layer, where, positions, k[:, :, 0], v[:, :, 0])
    mixed = torch.empty_like(q)
    for length, rows in groups.items():
        keys, values = cache.rows(layer, [slots[row] for row in rows], length + 1)
        mixed[rows] = attention.attention(q[rows], keys, values)
    out: Tensor = attention.output(mixed.transpose(1, 2).flatten(-2))
    return out


@dataclass(frozen=True)
class ContinuousBatch:
    """The generate slot of `continuous_batch`: at most `slots` requests run at once."""

    slots: int = 8

    @torch.no_grad()
    def serve(self, model: nn.Module, requests: Sequence[Request]) -> Iterator[tuple[int, Tensor]]:
        """(request number, its next token, a scalar) in the order in which tokens are made."""
        capacity = max((len(r.prompt) + r.new_tokens for r in requests), default=1)
        cache = SlotCache(model, self.slots, capacity)
        waiting = deque((number, r) for number, r in enumerate(requests) if r.new_tokens > 0)
        free, running = list(range(self.slots)), dict[int, tuple[int, int, Tensor]]()  # slot: number, left, last token
        while waiting or running:
            while waiting and free:
                number, request = waiting.popleft()
                slot = free.pop(0)
                token = greedy(model, request.prompt[None], SlotView(cache, slot))[0]
                running[slot] = (number, request.new_tokens - 1, token)
                yield number, token
            self._leave(running, free)
            if not running:
                continue
            slots = sorted(running)
            tokens = decode_rows(model, torch.stack([running[slot][2] for slot in slots]), slots, cache)
            for slot, token in zip(slots, tokens, strict=True):
                number, left, _ = running[slot]
                running[slot] = (number, left - 1, token)
                yield number, token
            self._leave(running, free)

    def _leave(self, running: dict[int, tuple[int, int, Tensor]], free: list[int]) -> None:
        for slot in [slot for slot, (_, left, _) in running.items() if left == 0]:
            del running[slot]
            free.append(slot)
        free.sort()

    def __call__(self, model: nn.Module, prompt: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """prompt (batch, length) → new_tokens × (batch,); a row of tokens is given when every request has its own."""
        made: list[list[Tensor]] = [[] for _ in prompt]
        given = 0
        for number, token in self.serve(model, [Request(row, new_tokens) for row in prompt]):
            made[number].append(token)
            while given < new_tokens and all(len(row) > given for row in made):
                yield torch.stack([row[given] for row in made])
                given += 1
