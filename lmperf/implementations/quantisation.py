"""Linear layers with int8 weights: dynamic, static, weight-only, and the fake-quantised one they are trained as."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS = 127  # symmetric int8: −127 … 127, so that negation never overflows

#: torch 2.13's weight-only CPU kernel reads past the end of rows that are no multiple of 16 (wrong sums, crashes).
KERNEL_MULTIPLE = 32


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight (n, k) → int8 (n, k) and one fp32 scale a row (n,), symmetric: weight ≈ int8 · scale."""
    scale = weight.detach().float().abs().amax(dim=1).clamp(min=1e-12) / LEVELS
    return (weight.detach().float() / scale[:, None]).round().clamp(-LEVELS, LEVELS).to(torch.int8), scale


def activation_levels() -> int:
    """Positive levels of an activation: 127 where the CPU sums int8 products exactly (VNNI), else 63.

    Older instructions add pairs of products in 16 bits and saturate silently with the full range.
    """
    return LEVELS if torch.cpu._is_vnni_supported() else 63


class Int8Linear(nn.Module):
    """y = x·Wᵀ + b with W (n, k) in int8; `input_scale` None: the activation's scale is found anew in each call.

    On a CPU the weights live only in the layout of the int8 kernel (`packed`); elsewhere as a buffer.
    """

    def __init__(self, linear: nn.Linear, *, input_scale: float | None = None) -> None:
        super().__init__()
        self.in_features, self.out_features, self.input_scale = linear.in_features, linear.out_features, input_scale
        self.packed: Any = None
        bias = None if linear.bias is None else linear.bias.detach().float()
        integers, scale = quantise_rows(linear.weight)
        if linear.weight.device.type == "cpu":
            self.packed = pack(integers, scale, bias)
        else:
            self.register_buffer("integers", integers)
            self.register_buffer("scale", scale)
            self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        if self.packed is None:
            return self._integer_product(rows.flatten(0, -2)).unflatten(0, x.shape[:-1]).to(x.dtype)
        levels = activation_levels()
        if self.input_scale is None:
            return torch.ops.quantized.linear_dynamic(rows, self.packed, levels < LEVELS).to(x.dtype)
        product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
        return product(rows, self.input_scale / levels, levels + 1, self.packed).to(x.dtype)

    def _integer_product(self, rows: Tensor) -> Tensor:
        """The same with `torch._int_mm`, whose CUDA kernel wants more than 16 rows."""
        scale = (rows.abs().amax() if self.input_scale is None else rows.new_tensor(self.input_scale)) / LEVELS
        quantised = (rows / scale.clamp(min=1e-12)).round().clamp(-LEVELS, LEVELS).to(torch.int8)
        padded = F.pad(quantised, (0, 0, 0, max(0, 32 - rows.shape[0])))
        sums = torch._int_mm(padded, self.integers.t())[: rows.shape[0]]
        y = sums.float() * (scale * self.scale)
        return y if self.bias is None else y + self.bias

    def tensors(self) -> dict[str, Tensor]:
        """What is stored: int8 weights (n, k), scales (n,), bias (n,)."""
        if self.packed is None:
            return dict(self.named_buffers())
        weight, bias = torch.ops.quantized.linear_unpack(self.packed)
        found = {"integers": weight.int_repr(), "scale": weight.q_per_channel_scales().float()}
        return found if bias is None else {**found, "bias": bias}

    def dense_weight(self) -> Tensor:
        """The fp32 weights (n, k) that the integers stand for."""
        stored = self.tensors()
        return stored["integers"].float() * stored["scale"][:, None]


def pack(integers: Tensor, scale: Tensor, bias: Tensor | None) -> Any:
    """int8 (n, k), scales (n,), bias (n,) in the layout of the CPU's int8 kernel."""
    zeros = torch.zeros(len(scale), dtype=torch.long)
    with warnings.catch_warnings():
        # The creation of quantised tensors is to leave PyTorch one day; the kernel behind it has no other entry yet.
        warnings.simplefilter("ignore", UserWarning)
        quantised = torch._make_per_channel_quantized_tensor(integers, scale.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(quantised, bias)


class WeightOnlyLinear(nn.Module):
    """y = x·Wᵀ + b with W (n, k) stored in int8 and expanded inside the kernel; products in bf16 on a CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        integers, scale = quantise_rows(linear.weight)
        self.register_buffer("integers", integers)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and self.in_features % KERNEL_MULTIPLE == 0:
            # The kernel's fp32 form is not vectorised: bf16 in, bf16 out.
            rows = x.flatten(0, -2).to(torch.bfloat16)
            y = torch._weight_int8pack_mm(rows, self.integers, self.scale.to(torch.bfloat16)).float()
        else:
            y = F.linear(x.flatten(0, -2), self.integers.to(x.dtype)).float() * self.scale
        y = y if self.bias is None else y + self.bias
        return y.unflatten(0, x.shape[:-1]).to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """What is stored: int8 weights (n, k), scales (n,), bias (n,)."""
        return dict(self.named_buffers())

    def dense_weight(self) -> Tensor:
        """The fp32 weights (n, k) that the integers stand for."""
        return self.integers.float() * self.scale[:, None]


def replace_linears(module: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> int:
    """Replace every plain `nn.Linear` (or subclass) below `module` by `make(it)`; returns how many.

    A tied or untied head is no child of the blocks: embedding and head stay dense.
    """
    count = 0
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
            count += 1
        else:
            count += replace_linears(child, make)
    return count
