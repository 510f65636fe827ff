"""Greedy decoding with caches: every function gives the tokens of `reference.generate_without_cache`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from lmperf.caching import DynamicCache, StaticCache
from lmperf.model import Cache


def greedy(model: nn.Module, tokens: Tensor, cache: Cache) -> Tensor:
    """The most likely token after `tokens` (batch, length), which are added to `cache`: (batch,)."""
    following: Tensor = model.logits(model(tokens, cache=cache)[:, -1]).argmax(dim=-1)
    return following


def decode(model: nn.Module, prompt: Tensor, new_tokens: int, cache: Cache) -> Iterator[Tensor]:
    """`new_tokens` × (batch,) after prompt (batch, length), of which `cache` may already hold what came before."""
    tokens = prompt
    for _ in range(new_tokens):
        following = greedy(model, tokens, cache)
        yield following
        tokens = following[:, None]


@torch.no_grad()
def with_dynamic_cache(model: nn.Module, prompt: Tensor, new_tokens: int) -> Iterator[Tensor]:
    """Greedy decoding with a growing cache: prompt (batch, length) → new_tokens × (batch,)."""
    yield from decode(model, prompt, new_tokens, DynamicCache())


@torch.no_grad()
def with_static_cache(model: nn.Module, prompt: Tensor, new_tokens: int) -> Iterator[Tensor]:
    """Greedy decoding with a cache of the final size: prompt (batch, length) → new_tokens × (batch,)."""
    yield from decode(model, prompt, new_tokens, static_cache_for(model, prompt, new_tokens))


def static_cache_for(model: nn.Module, prompt: Tensor, new_tokens: int) -> StaticCache:
    """A cache that holds prompt (batch, length) and `new_tokens` further tokens, in the model's own type."""
    weight = model.embedding.weight
    batch, length = prompt.shape
    return StaticCache(model.shape, batch, length + new_tokens, device=weight.device, dtype=weight.dtype)


@lru_cache(maxsize=2)
def compiled_greedy(backend: str) -> Callable[[nn.Module, Tensor, Cache], Tensor]:
    """`greedy` compiled once for all lengths: the position is a symbol, the cache's buffers are inputs."""
    return torch.compile(greedy, dynamic=True, backend=backend)


@dataclass(frozen=True)
class StaticCompiled:
    """A static cache with the one-token step compiled; the prompt is read by the plain model.

    One graph serves every length of two tokens or more (one token is a constant to the compiler).
    """

    backend: str = "inductor"

    @torch.no_grad()
    def __call__(self, model: nn.Module, prompt: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """prompt (batch, length) → new_tokens × (batch,)."""
        step = compiled_greedy(self.backend)
        cache = static_cache_for(model, prompt, new_tokens)
        following = None
        for _ in range(new_tokens):
            if following is None:
                following = greedy(model, prompt, cache)
            else:
                following = step(model, following[:, None], cache)
            yield following


def find_draft(tokens: list[int], longest: int, most: int) -> list[int]:
    """What followed the latest earlier occurrence of the last n tokens (n = longest … 1), up to `most` tokens."""
    for size in range(min(longest, len(tokens) - 1), 0, -1):
        tail = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tail:
                return tokens[start + size : start + size + most]
    return []


@dataclass(frozen=True)
class PromptLookup:
    """Speculative decoding with drafts looked up in the text so far (Saxena 2023): exact under greedy decoding.

    A draft is read in one forward pass and kept as far as it is what the model itself would have said; with several
    rows, as far as that holds for all of them.
    """

    longest: int = 3
    most: int = 8

    @torch.no_grad()
    def __call__(self, model: nn.Module, prompt: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """prompt (batch, length) → new_tokens × (batch,)."""
        cache = static_cache_for(model, prompt, new_tokens)
        rows: list[list[int]] = prompt.tolist()
        pending, made = prompt, 0
        while made < new_tokens:
            drafts = self._drafts(rows, new_tokens - made - 1).to(prompt.device) if made else prompt[:, :0]
            said = self._read(model, torch.cat([pending, drafts], dim=1), drafts.shape[1], cache)
            kept = agreed(drafts, said)
            cache.crop(cache.length - (drafts.shape[1] - kept))
            for following in said[:, : kept + 1].unbind(dim=1):
                made += 1
                yield following
            for row, new in zip(rows, said[:, : kept + 1].tolist(), strict=True):
                row += new
            pending = said[:, kept : kept + 1]

    def _drafts(self, rows: list[list[int]], most: int) -> Tensor:
        found = [find_draft(row, self.longest, min(self.most, most)) for row in rows]
        size = min(len(draft) for draft in found)
        return torch.tensor([d[:size] for d in found], dtype=torch.long).view(len(rows), size)

    def _read(self, model: nn.Module, tokens: Tensor, drafted: int, cache: Cache) -> Tensor:
        """The model's own next token after the last certain token and after each drafted one: (batch, drafted + 1)."""
        hidden = model(tokens, cache=cache)
        said: Tensor = model.logits(hidden[:, -(drafted + 1) :]).argmax(dim=-1)
        return said


def agreed(drafts: Tensor, said: Tensor) -> int:
    """How many drafted tokens (batch, n) are what the model said (batch, n + 1), in every row."""
    same = (drafts == said[:, :-1]).long().cumprod(dim=1)
    return int(same.sum(dim=1).min()) if same.numel() else 0
