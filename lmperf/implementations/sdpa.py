"""PyTorch's scaled_dot_product_attention under one forced backend each, in the contract of `reference.attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lmperf.reference import causal_mask


def causal_arguments(q: Tensor, k: Tensor) -> dict[str, Any]:
    """Keyword arguments that align the last query to the last key: `is_causal` alone aligns the first ones."""
    queries, keys = q.shape[-2], k.shape[-2]
    if queries == keys:
        return {"is_causal": True}
    if queries == 1:
        return {}  # one new token sees the whole cache
    if q.is_cuda:
        # A materialised mask would rule the flash kernel out; this subclass is understood by every CUDA backend.
        from torch.nn.attention.bias import causal_lower_right

        return {"attn_mask": causal_lower_right(queries, keys)}
    return {"attn_mask": causal_mask(queries, keys, q.device)}


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal attention by whichever backend PyTorch picks: shapes as in `reference.attention`."""
    return F.scaled_dot_product_attention(
        q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **causal_arguments(q, k)
    )


def need_16_bit(q: Tensor, name: str) -> None:
    """NotImplementedError for dtypes that these CUDA kernels do not take."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"{name} takes float16 or bfloat16 only, got {q.dtype}")


def forced(backend: SDPBackend) -> Callable[..., Tensor]:
    """Attention by this backend or an error: without forcing, PyTorch falls back to another one in silence."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
        if q.is_cuda and backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            need_16_bit(q, backend.name)
        with sdpa_kernel(backend):
            return attend(q, k, v, scale=scale)

    attention.__name__ = f"sdpa_{backend.name.lower()}"
    return attention


math_backend = forced(SDPBackend.MATH)
flash_backend = forced(SDPBackend.FLASH_ATTENTION)
efficient_backend = forced(SDPBackend.EFFICIENT_ATTENTION)
cudnn_backend = forced(SDPBackend.CUDNN_ATTENTION)
