"""Attention with altered scores: a shifted scale, normalised queries and keys, capped scores; and their naive forms."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from lmperf.implementations import sdpa
from lmperf.implementations.chunked import capped
from lmperf.reference import attention, causal_mask, repeat_heads

#: Added to √d before dividing the scores by it: a published remedy that multiplies them by 0.991 at d = 64.
SCALE_OFFSET = 0.07
#: Scores stay within ±SOFTCAP (Gemma 2, arXiv 2408.00118, uses 50 in attention).
SOFTCAP = 50.0


def offset_scale(d: int, scale: float | None) -> float:
    """1 / (√d + 0.07), or 1 / (1 / scale + 0.07) for another base scale."""
    return 1 / ((math.sqrt(d) if scale is None else 1 / scale) + SCALE_OFFSET)


def scale_offset(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Fused causal attention with the scores divided by √d + 0.07: shapes as in the contract."""
    return sdpa.attend(q, k, v, scale=offset_scale(q.shape[-1], scale))


def naive_scale_offset(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """The same from materialised scores: queries shrunk beforehand, then plain attention with scale 1."""
    return attention(q * offset_scale(q.shape[-1], scale), k, v, scale=1.0)


def qk_norm(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Fused causal attention on q and k of unit root mean square a head (Dehghani et al. 2023, without weights)."""
    d = q.shape[-1:]
    return sdpa.attend(F.rms_norm(q, d, eps=1e-6), F.rms_norm(k, d, eps=1e-6), v, scale=scale)


def naive_qk_norm(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """The same with the norm written out and materialised scores."""
    q, k = (x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    return attention(q, k, v, scale=scale)


softcap = capped(SOFTCAP)


def naive_softcap(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """softmax(50 · tanh(q kᵀ · scale / 50)) v with every score materialised: the oracle of `softcap`."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    scores = q @ k.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    scores = SOFTCAP * (scores / SOFTCAP).tanh()
    hidden = ~causal_mask(q.shape[-2], k.shape[-2], q.device)
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v
