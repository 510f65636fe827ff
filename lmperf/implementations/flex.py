"""Attention through torch.compile: the reference's own code compiled, and FlexAttention with causal or window masks."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lmperf import reference
from lmperf.implementations.facts import Facts, declare
from lmperf.implementations.window import WINDOW

NO_BACKWARD = "FlexAttention has no backward on a CPU in this PyTorch"


@lru_cache(maxsize=2)
def compiled_function(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` compiled once a process.

    fullgraph: after eight shapes torch.compile would run it uncompiled without a word; like this it is an error.
    """
    return torch.compile(function, dynamic=False, fullgraph=True)


def compiled(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """The reference attention under torch.compile: shapes as in the contract, one compilation a shape."""
    return compiled_function(reference.attention)(q, k, v, scale=scale)


@lru_cache(maxsize=16)
def block_mask(queries: int, keys: int, window: int | None, device: str) -> Any:
    """FlexAttention's block mask: causal with the last query aligned to the last key, within `window` keys."""
    from torch.nn.attention.flex_attention import create_block_mask

    offset = keys - queries

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        causal = key <= query + offset
        return causal if window is None else causal & (key > query + offset - window)

    return create_block_mask(visible, None, None, queries, keys, device=device)


def flexible(window: int | None = None) -> Callable[..., Tensor]:
    """Compiled FlexAttention (Dong et al. 2024, arXiv 2412.05496), causal, with or without a window."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        if not q.is_cuda:
            if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
                raise NotImplementedError(NO_BACKWARD)
            q, k, v = q.detach(), k.detach(), v.detach()
        mask = block_mask(q.shape[-2], k.shape[-2], window, str(q.device))
        grouped = q.shape[1] != k.shape[1]
        return compiled_function(flex_attention)(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)

    return declare(attention, Facts(window=window, static_shapes=True, no_cpu_backward=NO_BACKWARD))


declare(compiled, Facts(static_shapes=True))
flex = flexible()
flex_window = flexible(WINDOW)
