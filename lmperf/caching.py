"""Caches of keys and values for decoding: one that grows and one allocated beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from lmperf.records import ModelShape


class DynamicCache:
    """Grows by concatenation: each update copies what is held (O(length) a token), no size need be known."""

    def __init__(self) -> None:
        self.length = 0
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (batch, kv_heads, new, d) → all keys and values (batch, kv_heads, length + new, d)."""
        if layer == len(self.layers):
            self.layers.append((k, v))
        else:
            old_k, old_v = self.layers[layer]
            self.layers[layer] = (torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2))
        return self.layers[layer]

    def advance(self, tokens: int) -> None:
        """Count `tokens` new tokens as held."""
        self.length += tokens

    def crop(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        self.length = min(self.length, length)
        self.layers = [(k[:, :, : self.length], v[:, :, : self.length]) for k, v in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held."""
        return sum(k.numel() * k.element_size() + v.numel() * v.element_size() for k, v in self.layers)


class StaticCache:
    """Keys and values of at most `capacity` tokens, one buffer a layer, allocated before the first token."""

    def __init__(
        self, shape: ModelShape, batch: int, capacity: int, *, device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        size = (batch, shape.kv_heads, capacity, shape.head_dim)
        self.length, self.capacity = 0, capacity
        self.keys = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, device=device, dtype=dtype) for _ in range(shape.layers)]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (batch, kv_heads, new, d) in place; returns views (batch, kv_heads, length + new, d)."""
        stop = self.length + k.shape[2]
        if stop > self.capacity:
            raise ValueError(f"StaticCache: {stop} tokens, its capacity is {self.capacity}")
        self.keys[layer][:, :, self.length : stop] = k
        self.values[layer][:, :, self.length : stop] = v
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]

    def advance(self, tokens: int) -> None:
        """Count `tokens` new tokens as held."""
        self.length += tokens

    def crop(self, length: int) -> None:
        """Forget everything after the first `length` tokens (the buffers stay)."""
        self.length = min(self.length, length)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, filled or not."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


def kv_cache_bytes(shape: ModelShape, batch: int, tokens: int, *, element_bytes: int = 4) -> int:
    """Bytes of keys and values of `tokens` tokens: 2 · layers · batch · kv_heads · tokens · d · element size."""
    return 2 * shape.layers * batch * shape.kv_heads * tokens * shape.head_dim * element_bytes
