"""The naive, readable implementation of every slot: the numerical truth that all variants are checked against."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmperf.records import ModelShape


def causal_mask(queries: int, keys: int, device: torch.device | str | None = None) -> Tensor:
    """Boolean (queries, keys), True where a query may look: the last query is aligned to the last key."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Grouped heads (batch, kv_heads, length, d) repeated to (batch, heads, length, d)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal attention with every score materialised: softmax(q kᵀ · scale) v (Vaswani et al. 2017, eq. 1).

    q (batch, heads, queries, d); k, v (batch, kv_heads, keys, d), keys ≥ queries, heads a multiple of kv_heads;
    returns (batch, heads, queries, d).  `scale` defaults to 1/√d.
    """
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = q @ k.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    scores = scores.masked_fill(~causal_mask(q.shape[-2], k.shape[-2], q.device), float("-inf"))
    return scores.softmax(dim=-1) @ v


def layer_norm(dim: int) -> nn.Module:
    """LayerNorm over the last dimension, ε = 1e-5 (Ba et al. 2016)."""
    return nn.LayerNorm(dim, eps=1e-5)


def rms_norm(dim: int) -> nn.Module:
    """RMSNorm over the last dimension, ε = 1e-6 (Zhang and Sennrich 2019)."""
    return nn.RMSNorm(dim, eps=1e-6)


def norm_of(shape: ModelShape, chosen: Callable[[int], nn.Module]) -> Callable[[int], nn.Module]:
    """The norm slot when a variant set it, else the one that the model's shape names."""
    return rms_norm if shape.norm == "rmsnorm" and chosen is layer_norm else chosen


class SeparateQKV(nn.Module):
    """Three linear layers: x (batch, length, d_model) → q (…, heads·d), k and v (…, kv_heads·d)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.query = nn.Linear(shape.d_model, shape.heads * shape.head_dim)
        self.key = nn.Linear(shape.d_model, shape.kv_heads * shape.head_dim)
        self.value = nn.Linear(shape.d_model, shape.kv_heads * shape.head_dim)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(x), self.key(x), self.value(x)


class FeedForward(nn.Module):
    """d_model → d_ff → d_model with GELU, or SwiGLU's gate (Shazeer 2020) when the shape asks for it."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gated = shape.activation == "swiglu"
        self.up = nn.Linear(shape.d_model, shape.d_ff)
        if self.gated:
            self.gate = nn.Linear(shape.d_model, shape.d_ff)
        self.down = nn.Linear(shape.d_ff, shape.d_model)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x) if self.gated else F.gelu(self.up(x))
        return self.down(hidden)


def cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log likelihood (nats): hidden (…, d), head (vocab, d), targets (…) → scalar."""
    logits = F.linear(hidden, head)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def adamw(
    parameters: Iterable[nn.Parameter], *, learning_rate: float, weight_decay: float = 0.1
) -> torch.optim.Optimizer:
    """AdamW with PyTorch's own choice of implementation (Loshchilov and Hutter 2019); decay on matrices only."""
    return torch.optim.AdamW(decay_groups(parameters, weight_decay), lr=learning_rate, betas=(0.9, 0.95))


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: matrices with weight decay, vectors and scalars without."""
    trained = [p for p in parameters if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


@dataclass(frozen=True)
class LoaderSource:
    """What a loader reads: token shards (`tokens`, `split`), the raw text shards (`texts`) and the order of batches."""

    tokens: Path
    split: str
    batch_size: int
    length: int
    seed: int
    start: int = 0  # first batch, for resuming in the middle of an epoch
    texts: Path | None = None
    scratch: Path | None = None  # a folder of this sample's own, removed afterwards


Batches = Iterator[tuple[Tensor, Tensor]]


def arrow_loader(source: LoaderSource) -> Batches:
    """Endless (x, y) int64 batches (batch, length) from memory-mapped Arrow token shards, in the main process."""
    from lmperf.corpus.datasets import Order, TokenData, batches

    data = TokenData.open(source.tokens, source.split)
    order = Order(len(data), source.length, source.batch_size, source.seed)
    return batches(data, order, start=source.start)


@torch.no_grad()
def generate_without_cache(model: nn.Module, prompt: Tensor, new_tokens: int) -> Iterator[Tensor]:
    """Greedy decoding that recomputes everything for each token: prompt (batch, length) → new_tokens × (batch,)."""
    tokens = prompt
    for _ in range(new_tokens):
        following = model.logits(model(tokens)[:, -1]).argmax(dim=-1)
        tokens = torch.cat([tokens, following[:, None]], dim=1)
        yield following
