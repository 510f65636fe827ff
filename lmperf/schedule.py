"""The learning rate over a run: linear warm-up, then a cosine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

FINAL_RATE = 0.1  # share of the learning rate left at the end of the cosine


def learning_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then a cosine down to `FINAL_RATE` (Loshchilov and Hutter 2017)."""
    warmup = min(warmup, steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float], factor: float) -> None:
    """Scale every group's own learning rate by `factor`, in place where it is a tensor (compiled optimizers)."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate * factor)
        else:
            group["lr"] = rate * factor
