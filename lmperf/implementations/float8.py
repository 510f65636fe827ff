"""Linear layers in 8-bit floating point, one dynamic scale a tensor (Micikevicius et al. 2022, arXiv 2209.05433)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

E4M3 = torch.float8_e4m3fn  # 3 bits of mantissa: activations and weights
E5M2 = torch.float8_e5m2  # 2 bits of mantissa, more range: gradients
MULTIPLE = 16  # the hardware's matrix product needs inner and outer sizes divisible by this


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x → (8-bit tensor of the same shape, fp32 scale ()), so that x ≈ tensor · scale."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def scaled_product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """a (m, k) row-major times b (k, n) column-major, both 8-bit, → bf16 (m, n)."""
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)


class Float8Product(torch.autograd.Function):
    """x (m, k) times weight (n, k) transposed → bf16 (m, n); all three products of a linear layer in 8 bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = quantise(x, E4M3)
        w8, w_scale = quantise(weight, E4M3)
        ctx.save_for_backward(x8, w8, x_scale, w_scale)
        ctx.dtypes = x.dtype, weight.dtype
        return scaled_product(x8, w8.t(), x_scale, w_scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x8, w8, x_scale, w_scale = ctx.saved_tensors
        g8, g_scale = quantise(gradient, E5M2)
        # The second operand must be column-major, hence the two transposed copies.
        x_gradient = scaled_product(g8, w8.t().contiguous().t(), g_scale, w_scale)
        w_gradient = scaled_product(g8.t().contiguous(), x8.t().contiguous().t(), g_scale, x_scale)
        return x_gradient.to(ctx.dtypes[0]), w_gradient.to(ctx.dtypes[1])


class Float8Linear(nn.Linear):
    """`nn.Linear` with fp32 weights whose products run in 8 bits; rows are padded to a multiple of 16."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        padding = -rows.shape[0] % MULTIPLE
        padded = nn.functional.pad(rows, (0, 0, 0, padding)) if padding else rows
        y = Float8Product.apply(padded, self.weight)[: rows.shape[0]]
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.unflatten(0, x.shape[:-1])


def convert(model: nn.Module) -> nn.Module:
    """Make every linear layer of the blocks whose sizes are multiples of 16 a `Float8Linear`, weights kept."""
    for module in model.blocks.modules():
        if type(module) is nn.Linear and module.in_features % MULTIPLE == 0 == module.out_features % MULTIPLE:
            module.__class__ = Float8Linear  # the same parameters, another forward
    return model
