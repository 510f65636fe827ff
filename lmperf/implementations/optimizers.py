"""AdamW in PyTorch's three implementations, with the baseline's groups and moments."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from lmperf.reference import decay_groups


def adamw(
    parameters: Iterable[nn.Parameter], *, learning_rate: float, weight_decay: float = 0.1, foreach: bool = False,
    fused: bool = False,
) -> torch.optim.Optimizer:  # fmt: skip
    """AdamW as a loop over parameters, as `foreach` operations over lists of them, or as one `fused` kernel."""
    groups = decay_groups(parameters, weight_decay)
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), foreach=foreach, fused=fused)
