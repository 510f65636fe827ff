"""int8 with fixed activation scales: found by calibration after training, or learned in quantisation-aware training."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmperf.implementations.execution import blocks_of
from lmperf.implementations.quantisation import LEVELS, Int8Linear, replace_linears
from lmperf.recipe import BuildContext

CALIBRATION_BATCHES = 8
PEAK_DECAY = 0.99  # of the running largest activation, a step of quantisation-aware training


def fake_quantise(x: Tensor, scale: Tensor) -> Tensor:
    """x rounded to scale · {−127 … 127}; the gradient passes unchanged (straight-through, Bengio et al. 2013)."""
    rounded = (x / scale).round().clamp(-LEVELS, LEVELS) * scale
    return x + (rounded - x).detach()


class FakeQuantisedLinear(nn.Linear):
    """A linear layer that trains with the rounding of int8 weights (a scale a row) and inputs (one scale)."""

    peak: Tensor  # () fp32: running largest |input|, 0 before the first training step

    @classmethod
    def of(cls, linear: nn.Linear) -> FakeQuantisedLinear:
        """The same layer (its very parameters) with fake quantisation."""
        linear.__class__ = cls
        linear.register_buffer("peak", torch.zeros((), device=linear.weight.device))
        return linear

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                seen = x.abs().amax().float()
                self.peak = torch.where(self.peak > 0, self.peak.lerp(seen, 1 - PEAK_DECAY), seen)
        weight_scale = self.weight.detach().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / LEVELS
        input_scale = (self.peak / LEVELS).clamp(min=1e-12).to(x.dtype)
        inputs = fake_quantise(x, input_scale) if self.training or bool(self.peak > 0) else x
        return F.linear(inputs, fake_quantise(self.weight, weight_scale), self.bias)


def prepare_training(model: nn.Module, context: BuildContext) -> nn.Module:
    """Make every linear layer of the blocks a `FakeQuantisedLinear`, before training."""
    replace_linears(blocks_of(model), FakeQuantisedLinear.of)
    return model


def calibration_batches(context: BuildContext, name: str) -> list[tuple[Tensor, Tensor]]:
    """The first few (x, y) batches; `ValueError` where nobody gave any."""
    if context.batches is None:
        raise ValueError(f"{name} needs batches to calibrate on: BuildContext.batches is None")
    return list(islice(context.batches(), CALIBRATION_BATCHES))


@torch.no_grad()
def convert_trained(model: nn.Module, context: BuildContext) -> nn.Module:
    """Turn trained `FakeQuantisedLinear` layers into int8 with the scales that training found."""
    layers = [m for m in blocks_of(model).modules() if isinstance(m, FakeQuantisedLinear)]
    if any(float(layer.peak) == 0 for layer in layers):  # never trained: find the scales now
        model.train()
        for x, _ in calibration_batches(context, "qat_int8"):
            model(x)
    replace_linears(blocks_of(model), lambda layer: Int8Linear(layer, input_scale=float(layer.peak)))
    return model


@torch.no_grad()
def calibrate(model: nn.Module, context: BuildContext) -> nn.Module:
    """Find the largest |input| of every linear layer on a few batches, then turn them into int8 (post-training)."""
    peaks: dict[nn.Module, float] = {}

    def watch(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        peaks[layer] = max(peaks.get(layer, 0.0), float(inputs[0].abs().amax()))

    linears = [m for m in blocks_of(model).modules() if isinstance(m, nn.Linear)]
    handles = [layer.register_forward_pre_hook(watch) for layer in linears]
    for x, _ in calibration_batches(context, "ptq_int8"):
        model(x)
    for handle in handles:
        handle.remove()
    replace_linears(blocks_of(model), lambda layer: Int8Linear(layer, input_scale=peaks[layer]))
    return model
