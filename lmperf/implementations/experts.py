"""A small mixture of experts in place of a feed-forward block, for the gradient compression that is meant for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmperf.recipe import BuildContext
from lmperf.records import ModelShape


class Expert(nn.Module):
    """d_model → d_ff → d_model with GELU."""

    def __init__(self, shape: ModelShape, generator: torch.Generator) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(shape.d_ff, shape.d_model, generator=generator) * 0.02)
        self.down = nn.Parameter(torch.randn(shape.d_model, shape.d_ff, generator=generator) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)


class MixtureOfExperts(nn.Module):
    """Each token goes to the one expert that the router likes best (Fedus et al. 2021, arXiv 2101.03961)."""

    def __init__(self, shape: ModelShape, count: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.router = nn.Parameter(torch.randn(count, shape.d_model, generator=generator) * 0.02)
        self.experts = nn.ModuleList(Expert(shape, generator) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., d_model) → same; the output is weighted by the router's probability, so that the router learns."""
        tokens = x.flatten(0, -2)
        weight, choice = F.linear(tokens, self.router).softmax(dim=-1).max(dim=-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            chosen = (choice == number).nonzero().squeeze(1)
            out = out.index_add(0, chosen, expert(tokens[chosen]) * weight[chosen, None])
        return out.view_as(x)


@dataclass(frozen=True)
class InstallExperts:
    """Replaces the last block's feed-forward by `count` experts; the same weights on every rank."""

    count: int = 4

    def __call__(self, model: nn.Module, context: BuildContext) -> nn.Module:
        """The model with its mixture of experts."""
        mixture = MixtureOfExperts(model.shape, self.count, context.seed).to(context.device)
        model.blocks[-1].feed_forward = mixture
        return model

    @property
    def alone(self) -> InstallExperts:
        """The same model in one process."""
        return self
