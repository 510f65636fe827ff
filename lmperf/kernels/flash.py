"""FlashAttention-2 on Triton kernels as an autograd function; triton is imported when it is first run."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

#: The largest head whose tiles fit a block's shared memory at the sizes below.
LARGEST_HEAD = 128


def launch_options(q: Tensor, *, causal: bool) -> dict[str, Any]:
    """Compile-time arguments of the kernels for this dtype and head size."""
    import triton

    d = q.shape[-1]
    if d > LARGEST_HEAD:
        raise ValueError(f"head size {d} is too large for the Triton kernels; allowed: 1 to {LARGEST_HEAD}")
    wide = q.dtype == torch.float32
    # fp32 tiles of wide heads must still fit the 99 KiB of shared memory of consumer devices.
    block = 64 if not wide else 32 if d <= 64 else 16
    return {
        "CAUSAL": causal,
        # The interpreter's product of two bfloat16 tiles is wrong without an error.
        "UPCAST": q.dtype == torch.bfloat16 and not q.is_cuda,
        "PRECISION": "ieee" if wide else "tf32",
        "ROWS": block,
        "COLUMNS": block,
        "WIDTH": max(16, triton.next_power_of_2(d)),
    }


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and fp32 log-sum-exp: contiguous q (heads, queries, d), k and v (key heads, keys, d)."""
    from lmperf.kernels.flash_kernels import forward_kernel

    (heads, queries, d), (key_heads, keys, _) = q.shape, k.shape
    options = launch_options(q, causal=causal)
    out = torch.empty_like(q)
    lse = torch.empty(heads, queries, dtype=torch.float32, device=q.device)
    grid = (-(-queries // options["ROWS"]), heads)
    forward_kernel[grid](q, k, v, out, lse, scale, queries, keys, d, heads // key_heads, **options)
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; shapes as in `forward`."""
    from lmperf.kernels.flash_kernels import keys_backward_kernel, queries_backward_kernel

    (heads, queries, d), (key_heads, keys, _) = q.shape, k.shape
    options = launch_options(q, causal=causal)
    # D = rowsum(dO ∘ O) (Dao 2023, algorithm 2, line 4)
    row_dot = (d_out.float() * out.float()).sum(dim=-1)
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    shared = (scale, queries, keys, d, heads // key_heads)
    grid = (-(-keys // options["COLUMNS"]), key_heads)
    keys_backward_kernel[grid](q, k, v, d_out, lse, row_dot, d_k, d_v, *shared, **options)
    grid = (-(-queries // options["ROWS"]), heads)
    queries_backward_kernel[grid](q, k, v, d_out, lse, row_dot, d_q, *shared, **options)
    return d_q, d_k, d_v


class FlashFunctionTriton(torch.autograd.Function):
    """`apply(Q, K, V, is_causal=False, scale=None)`; the Triton twin of `variants.attention.FlashFunction`.

    Q (batch, [heads,] queries, d); K, V (batch, [kv_heads,] keys, d), any head size to 128, any length, causal with the
    last query aligned to the last key.  Saves Q, K, V, O and the log-sum-exp (batch, [heads,] queries) in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
    ) -> Tensor:
        if is_causal and k.shape[-2] < q.shape[-2]:
            raise ValueError(f"causal attention needs keys ≥ queries, got {k.shape[-2]} keys, {q.shape[-2]} queries")
        scale = scale if scale is not None else 1 / math.sqrt(q.shape[-1])
        out, lse = forward(*map(joined, (q, k, v)), scale, is_causal)
        out = out.view(q.shape)
        ctx.save_for_backward(q, k, v, out, lse.view(q.shape[:-1]))
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        tensors = (*map(joined, (q, k, v, out)), lse.flatten(0, -2), joined(d_out))
        d_q, d_k, d_v = backward(*tensors, ctx.scale, ctx.is_causal)
        return d_q.view(q.shape), d_k.view(k.shape), d_v.view(v.shape), None, None


def joined(x: Tensor) -> Tensor:
    """(batch, [heads,] length, d) as contiguous (batch · heads, length, d)."""
    return x.contiguous().flatten(0, -3)


@torch.compiler.disable
def triton_flash(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal attention by the Triton kernels, in the contract of `lmperf.reference.attention`."""
    return FlashFunctionTriton.apply(q, k, v, True, scale)
