"""Attention of optional packages, in the contract of `reference.attention`; each is imported when first called."""

from __future__ import annotations

from torch import Tensor

from lmperf.implementations.sdpa import need_16_bit
from lmperf.reference import repeat_heads


def flash_attn(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """flash_attn_func on (batch, length, heads, d); since 2.1 its causal mask aligns the last query to the last key."""
    from flash_attn import flash_attn_func

    need_16_bit(q, "flash_attn")
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)


def xformers(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """memory_efficient_attention on (batch, length, heads, d) with the mask aligned at the bottom right."""
    from xformers.ops import LowerTriangularFromBottomRightMask, memory_efficient_attention

    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = memory_efficient_attention(q, k, v, attn_bias=LowerTriangularFromBottomRightMask(), scale=scale)
    return out.transpose(1, 2)
