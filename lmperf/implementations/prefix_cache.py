"""Keys and values of shared prompt prefixes, kept in blocks: found by a hash, believed only after a comparison."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lmperf.caching import DynamicCache
from lmperf.implementations.decoding import decode

Hash = Callable[[bytes, bytes], bytes]
MOST_BYTES = 256 << 20  # of keys and values


def chain_hash(before: bytes, tokens: bytes) -> bytes:
    """Hash of a block's tokens and of everything before them (`before`: the hash of the block before)."""
    return hashlib.sha256(before + tokens).digest()[:16]


def weights_version(model: nn.Module) -> tuple[int, ...]:
    """Changes whenever a weight is written in place or replaced."""
    return tuple(number for p in model.parameters() for number in (id(p), p._version))


@dataclass(frozen=True, eq=False)
class Block:
    """One block of one prompt: its tokens, the block before it (by identity) and keys and values of every layer."""

    tokens: bytes
    before: Block | None
    version: tuple[int, ...]
    layers: tuple[tuple[Tensor, Tensor], ...]  # k, v (kv_heads, block, d)
    checksum: tuple[float, ...]

    def intact(self) -> bool:
        """Whether keys and values are still those that were stored."""
        return checksum(self.layers) == self.checksum


def checksum(layers: tuple[tuple[Tensor, Tensor], ...]) -> tuple[float, ...]:
    """A sum of each layer's keys and values in fp64."""
    return tuple(float(k.double().sum() + 2 * v.double().sum()) for k, v in layers)


def layer_bytes(layers: tuple[tuple[Tensor, Tensor], ...]) -> int:
    """Bytes of a block's keys and values."""
    return sum(t.numel() * t.element_size() for pair in layers for t in pair)


@dataclass
class PrefixCache:
    """Blocks by hash, least recently used ones dropped; a hit is compared with what it claims to be.

    Checked on every hit: the tokens themselves, that the block before is the very one just matched (so all earlier
    tokens agree too), the weights' version, and a checksum of keys and values.  What fails is dropped and counted.
    """

    block: int = 128
    hash: Hash = chain_hash
    most_bytes: int = MOST_BYTES
    blocks: OrderedDict[bytes, Block] = field(default_factory=OrderedDict)
    asked_tokens: int = 0
    hit_tokens: int = 0
    rejected: int = 0
    nbytes: int = 0  # of keys and values held

    def match(self, prompt: Tensor, version: tuple[int, ...]) -> list[Block]:
        """The longest verified chain of blocks for prompt (length,); at least one token is left to compute."""
        found: list[Block] = []
        for key, tokens in self._chain(prompt, (len(prompt) - 1) // self.block):
            entry = self.blocks.get(key)
            if entry is None:
                break
            before = found[-1] if found else None
            same = entry.tokens == tokens and entry.before is before and entry.version == version
            if not (same and entry.intact()):
                self.rejected += 1
                self._drop(key)
                break
            self.blocks.move_to_end(key)
            found.append(entry)
        return found

    def store(
        self, prompt: Tensor, row: int, cache: DynamicCache, known: list[Block], version: tuple[int, ...]
    ) -> None:
        """Keep the whole blocks of prompt (length,) that are not `known` yet, from row `row` of `cache`."""
        before = known[-1] if known else None
        for number, (key, tokens) in enumerate(self._chain(prompt, len(prompt) // self.block)):
            if number < len(known):
                continue
            held = self.blocks.get(key)
            if held is not None and held.tokens == tokens and held.before is before and held.version == version:
                before = held
                continue
            span = slice(number * self.block, (number + 1) * self.block)
            layers = tuple((k[row, :, span].clone(), v[row, :, span].clone()) for k, v in cache.layers)
            if held is not None:
                self._drop(key)
            before = self.blocks[key] = Block(tokens, before, version, layers, checksum(layers))
            self.blocks.move_to_end(key)
            self.nbytes += layer_bytes(layers)
        while self.nbytes > self.most_bytes:
            self._drop(next(iter(self.blocks)))

    def _drop(self, key: bytes) -> None:
        self.nbytes -= layer_bytes(self.blocks.pop(key).layers)

    def _chain(self, prompt: Tensor, count: int) -> Iterator[tuple[bytes, bytes]]:
        key = b""
        for part in prompt[: count * self.block].view(count, self.block).cpu():
            tokens = part.numpy().tobytes()
            key = self.hash(key, tokens)
            yield key, tokens

    @property
    def hit_rate(self) -> float | None:
        """Share of prompt tokens that were not computed, or None before any prompt."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else None

    def clear(self) -> None:
        """Forget all blocks and counts."""
        self.blocks.clear()
        self.asked_tokens = self.hit_tokens = self.rejected = self.nbytes = 0


_CACHES: weakref.WeakKeyDictionary[nn.Module, dict[int, PrefixCache]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class WithPrefixCache:
    """Greedy decoding that starts from the blocks of earlier prompts: the generate slot of `prefix_cache`."""

    block: int = 128

    def cache(self, model: nn.Module) -> PrefixCache:
        """The model's blocks of this size."""
        return _CACHES.setdefault(model, {}).setdefault(self.block, PrefixCache(self.block))

    @torch.no_grad()
    def __call__(self, model: nn.Module, prompt: Tensor, new_tokens: int) -> Iterator[Tensor]:
        """prompt (batch, length) → new_tokens × (batch,); rows share the length of the shortest match."""
        held, version = self.cache(model), weights_version(model)
        chains = [held.match(row, version) for row in prompt]
        shared = min(len(chain) for chain in chains)
        chains = [chain[:shared] for chain in chains]
        cache = joined(chains)
        held.asked_tokens += prompt.numel()
        held.hit_tokens += prompt.shape[0] * cache.length
        tokens = decode(model, prompt[:, cache.length :], new_tokens, cache)
        if new_tokens:
            yield next(tokens)
        for number, (row, chain) in enumerate(zip(prompt, chains, strict=True)):
            held.store(row, number, cache, chain, version)
        yield from tokens


def joined(chains: list[list[Block]]) -> DynamicCache:
    """A cache of the rows' blocks, one chain a row, all of one length."""
    cache = DynamicCache()
    if not chains[0]:
        return cache
    for layer in range(len(chains[0][0].layers)):
        keys = torch.stack([torch.cat([block.layers[layer][0] for block in chain], dim=1) for chain in chains])
        values = torch.stack([torch.cat([block.layers[layer][1] for block in chain], dim=1) for chain in chains])
        cache.update(layer, keys, values)
    cache.advance(cache.layers[0][0].shape[2])
    return cache
