"""Greedy decoding with caches: every function gives the tokens of `reference.generate_without_cache`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lmperf.caching import DynamicCache, StaticCache
from lmperf.model import Cache


def greedy(model: nn.Module, tokens: Tensor, cache: Cache) -> Tensor:
    """The most likely token after `tokens` (batch, length), which are added to `cache`: (batch,)."""
    following: Tensor = model.logits(model(tokens, cache=cache)[:, -1]).argmax(dim=-1)
    return following


def _decode(model: nn.Module, prompt: Tensor, new_tokens: int, cache: Cache) -> Iterator[Tensor]:
    tokens = prompt
    for _ in range(new_tokens):
        following = greedy(model, tokens, cache)
        yield following
        tokens = following[:, None]


@torch.no_grad()
def with_dynamic_cache(model: nn.Module, prompt: Tensor, new_tokens: int) -> Iterator[Tensor]:
    """Greedy decoding with a growing cache: prompt (batch, length) → new_tokens × (batch,)."""
    yield from _decode(model, prompt, new_tokens, DynamicCache())


@torch.no_grad()
def with_static_cache(model: nn.Module, prompt: Tensor, new_tokens: int) -> Iterator[Tensor]:
    """Greedy decoding with a cache of the final size: prompt (batch, length) → new_tokens × (batch,)."""
    yield from _decode(model, prompt, new_tokens, static_cache_for(model, prompt, new_tokens))


def static_cache_for(model: nn.Module, prompt: Tensor, new_tokens: int) -> StaticCache:
    """A cache that holds prompt (batch, length) and `new_tokens` further tokens, in the model's own type."""
    weight = model.embedding.weight
    batch, length = prompt.shape
    return StaticCache(model.shape, batch, length + new_tokens, device=weight.device, dtype=weight.dtype)
