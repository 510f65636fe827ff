"""A matrix product as a Python loop over blocks: what a claim calls blocking, without the vendor library's care."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def blocked_product(a: Tensor, b: Tensor, block: int) -> Tensor:
    """a (m, k) times b (k, n) → (m, n): every block × block product one call, sums in place."""
    out = a.new_zeros(a.shape[0], b.shape[1])
    for i in range(0, a.shape[0], block):
        for j in range(0, b.shape[1], block):
            target = out[i : i + block, j : j + block]
            for p in range(0, a.shape[1], block):
                target.addmm_(a[i : i + block, p : p + block], b[p : p + block, j : j + block])
    return out


class BlockedProduct(torch.autograd.Function):
    """`blocked_product` whose backward pass is blocked too: through autograd it would keep every partial sum."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, block: int) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.block = block
        return blocked_product(a, b, block)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        return (
            blocked_product(gradient, b.t(), ctx.block) if ctx.needs_input_grad[0] else None,
            blocked_product(a.t(), gradient, ctx.block) if ctx.needs_input_grad[1] else None,
            None,
        )


def blocked_matmul(a: Tensor, b: Tensor, *, block: int = 64) -> Tensor:
    """a (…, m, k) @ b (k, n) → (…, m, n) in blocks of `block`; b is one matrix."""
    if b.dim() != 2:
        raise NotImplementedError(f"blocked_matmul takes one matrix on the right, got {tuple(b.shape)}")
    rows = BlockedProduct.apply(a.reshape(-1, a.shape[-1]), b, block)
    return rows.view(*a.shape[:-1], b.shape[1])
