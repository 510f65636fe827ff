"""Normalisation layers over the last dimension, with the parameter names of `nn.LayerNorm` (weight, bias)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ManualLayerNorm(nn.Module):
    """(x − mean) / √(variance + ε) · weight + bias, one operation at a time; `correction` 1 is Bessel's."""

    def __init__(self, dim: int, *, eps: float = 1e-5, correction: int = 0) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.eps, self.correction = eps, correction

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().sum(dim=-1, keepdim=True) / (x.shape[-1] - self.correction)
        return centred * (variance + self.eps).rsqrt() * self.weight + self.bias


class ManualRMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · weight, one operation at a time (Zhang and Sennrich 2019, eq. 4)."""

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt() * self.weight


class VarMeanLayerNorm(ManualLayerNorm):
    """The same function from `torch.var_mean`: a second way to write it, as an oracle for the first."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, dim=-1, correction=self.correction, keepdim=True)
        return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def dynamic_epsilon(batch: int) -> float:
    """ε(batch) = 1e-5 · (1 + ln(batch / 512)), as the claim writes it: negative below a batch of 512/e ≈ 188.4."""
    return 1e-5 * (1 + math.log(batch / 512))


class DynamicLayerNorm(nn.LayerNorm):
    """LayerNorm whose ε follows the batch, taken as x.shape[0]; never below `floor` (None: as written, unclamped)."""

    def __init__(self, dim: int, *, floor: float | None) -> None:
        super().__init__(dim)
        self.floor = floor

    def epsilon(self, batch: int) -> float:
        """The ε in use for a batch of this many rows."""
        written = dynamic_epsilon(batch)
        return written if self.floor is None else max(written, self.floor)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.epsilon(x.shape[0]))


class ManualDynamicLayerNorm(VarMeanLayerNorm):
    """`DynamicLayerNorm` one operation at a time: its oracle."""

    def __init__(self, dim: int, *, floor: float | None) -> None:
        super().__init__(dim)
        self.floor = floor

    def forward(self, x: Tensor) -> Tensor:
        written = dynamic_epsilon(x.shape[0])
        self.eps = written if self.floor is None else max(written, self.floor)
        return super().forward(x)
