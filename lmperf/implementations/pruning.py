"""Weights set to zero: by a threshold that follows training, 2 of every 4, or once with fine-tuning after it."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmperf.implementations.execution import blocks_of
from lmperf.implementations.quantisation import replace_linears
from lmperf.recipe import BuildContext

SAMPLE = 8192  # weights that the threshold of a training step is estimated from
FINETUNE_STEPS = 50
FINETUNE_RATE = 3e-4


def threshold(weight: Tensor, share: float) -> Tensor:
    """The magnitude () below which `share` of the weight's elements lie."""
    magnitudes = weight.detach().abs().flatten().float()
    return magnitudes.kthvalue(max(1, round(share * magnitudes.numel()))).values


class ThresholdLinear(nn.Linear):
    """A linear layer that uses only weights above its threshold; all weights keep their gradient and may come back."""

    share: float

    def forward(self, x: Tensor) -> Tensor:
        sample = self.weight.detach().flatten()[:: max(1, self.weight.numel() // SAMPLE)]
        kept = self.weight.detach().abs() > threshold(sample, self.share)
        # The value of the masked weights, the gradient of all of them.
        weight = self.weight + (self.weight * kept - self.weight).detach()
        return F.linear(x, weight, self.bias)


def train_sparse(model: nn.Module, context: BuildContext, *, share: float) -> nn.Module:
    """Make every linear layer of the blocks a `ThresholdLinear` with `share` of its weights unused."""

    def change(layer: nn.Linear) -> nn.Linear:
        layer.__class__ = ThresholdLinear
        layer.share = share
        return layer

    replace_linears(blocks_of(model), change)
    return model


@torch.no_grad()
def bake(model: nn.Module, context: BuildContext, *, share: float) -> nn.Module:
    """Set exactly `share` of each linear layer's weights to zero for good and make it a plain `nn.Linear` again."""

    def change(layer: nn.Linear) -> nn.Linear:
        layer.weight *= layer.weight.abs() > threshold(layer.weight, share)
        layer.__class__ = nn.Linear
        return layer

    replace_linears(blocks_of(model), change)
    return model


def prune_and_finetune(model: nn.Module, context: BuildContext, *, share: float) -> nn.Module:
    """Prune once by magnitude, then train on with the zeros held (Han et al. 2015); no batches: only prune."""
    bake(model, context, share=share)
    weights = [m.weight for m in blocks_of(model).modules() if isinstance(m, nn.Linear)]
    masks = [(weight != 0).to(weight.dtype) for weight in weights]
    optimizer = torch.optim.AdamW(model.parameters(), lr=FINETUNE_RATE, weight_decay=0.0)
    for x, y in islice(context.batches() if context.batches else (), FINETUNE_STEPS):
        optimizer.zero_grad(set_to_none=True)
        model(x, y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_mul_(weights, masks)
    optimizer.zero_grad(set_to_none=True)
    return model


def two_of_four(weight: Tensor) -> Tensor:
    """weight (n, k), k a multiple of 4 → the same with the two smallest of every four neighbours in a row zeroed."""
    if weight.shape[1] % 4:
        raise NotImplementedError(f"2:4 sparsity needs rows of a multiple of 4 weights, got {weight.shape[1]}")
    groups = weight.detach().unflatten(1, (-1, 4))
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, groups.abs().topk(2, dim=-1).indices, True)
    return (groups * kept).flatten(1)


class SemiStructuredLinear(nn.Module):
    """y = x·Wᵀ + b with W (n, k) stored as the two kept values of every four and their places, in bf16 (CUDA)."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        pruned = two_of_four(linear.weight).to(torch.bfloat16)
        self.weight = torch.sparse.to_sparse_semi_structured(pruned)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().to(torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2).to(torch.bfloat16)
        return F.linear(rows, self.weight, self.bias).unflatten(0, x.shape[:-1]).to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """What is stored: kept values, their places, the bias."""
        stored = {"packed": self.weight.packed, "meta": self.weight.meta, "bias": self.bias}
        return {name: tensor for name, tensor in stored.items() if tensor is not None}

    def dense_weight(self) -> Tensor:
        """The fp32 weights (n, k) with their zeros."""
        return self.weight.to_dense().float()


@torch.no_grad()
def to_semi_structured(model: nn.Module, context: BuildContext) -> nn.Module:
    """Make every linear layer of the blocks a `SemiStructuredLinear`."""
    replace_linears(blocks_of(model), SemiStructuredLinear)
    return model
