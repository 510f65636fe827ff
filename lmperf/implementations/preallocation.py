"""Linear layers that write their output into one buffer for good, and an optimizer that keeps gradient buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lmperf.recipe import BuildContext
from lmperf.reference import decay_groups


class IntoBuffer(torch.autograd.Function):
    """x (…, k), weight (n, k), bias (n,) or None, buffer (rows, n) → the buffer, filled with x·Wᵀ + b, as (…, n)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        if bias is None:
            torch.mm(rows, weight.t(), out=buffer)
        else:
            torch.addmm(bias, rows, weight.t(), out=buffer)
        # An alias shares the version counter: a backward pass through a graph whose buffer was written again since
        # fails loudly instead of using the wrong activations.
        return buffer.detach().view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, gradient_rows = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        wants = ctx.needs_input_grad
        return (
            (gradient_rows @ weight).view(x.shape) if wants[0] else None,
            gradient_rows.t() @ rows if wants[1] else None,
            gradient_rows.sum(0) if wants[2] else None,
            None,
        )


class BufferedLinear(nn.Linear):
    """`nn.Linear` whose training output lives in one buffer, made for the first shape and reused in every step.

    Without gradients (generation, evaluation) outputs may be kept by the caller, so there it is a plain linear layer.
    """

    buffer: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        return IntoBuffer.apply(x, weight, bias, self._buffer_for(x))

    def _buffer_for(self, x: Tensor) -> Tensor:
        size = (x.numel() // x.shape[-1], self.out_features)
        held = self.buffer
        if held is None or held.shape != size or held.dtype != x.dtype or held.device != x.device:
            held = self.buffer = torch.empty(size, dtype=x.dtype, device=x.device)
        return held


def preallocate(model: nn.Module, context: BuildContext) -> nn.Module:
    """Make every linear layer a `BufferedLinear`, weights kept."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = BufferedLinear
    return model


class KeepingAdamW(torch.optim.AdamW):
    """AdamW that fills gradients with zeros instead of dropping them, so that their memory is allocated once."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero all gradients in place, whatever is asked."""
        super().zero_grad(set_to_none=False)


def adamw_keeping_gradients(
    parameters: Iterable[nn.Parameter], *, learning_rate: float, weight_decay: float = 0.1
) -> torch.optim.Optimizer:
    """The baseline's AdamW with gradient buffers that stay."""
    return KeepingAdamW(decay_groups(parameters, weight_decay), lr=learning_rate, betas=(0.9, 0.95))
