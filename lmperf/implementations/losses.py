"""Cross-entropy without the full logits: a few hundred tokens at a time, gradients made in the same pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: Tokens whose logits exist at once.
CHUNK = 512


class ChunkedCrossEntropy(torch.autograd.Function):
    """hidden (n, d), head (vocab, d), targets (n,) → mean loss (nats), in O(CHUNK · vocab) memory.

    The forward pass forms both gradients while a chunk's logits are there (Hsu et al. 2024), so that no product is
    done twice.  They are kept undivided by n and unscaled, so that fp16 does not lose them before a loss scale comes.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        dtype = product_dtype(hidden)
        rows, weight = hidden.to(dtype), head.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        training = any(ctx.needs_input_grad)
        hidden_gradient = torch.empty_like(rows) if training else None
        head_gradient = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if training else None
        for start in range(0, rows.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            logits = (rows[part] @ weight.t()).float()
            total += F.cross_entropy(logits, targets[part], reduction="sum")
            if training:
                error = softmax_minus_target_(logits, targets[part]).to(dtype)
                torch.mm(error, weight, out=hidden_gradient[part])
                head_gradient += error.t() @ rows[part]
        ctx.save_for_backward(hidden_gradient, head_gradient)
        ctx.dtypes = hidden.dtype, head.dtype
        return total / rows.shape[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, head_gradient = ctx.saved_tensors
        scale = gradient / hidden_gradient.shape[0]
        return (hidden_gradient * scale).to(ctx.dtypes[0]), (head_gradient * scale).to(ctx.dtypes[1]), None


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which autocast would run x's matrix products here."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def softmax_minus_target_(logits: Tensor, targets: Tensor) -> Tensor:
    """logits (n, vocab) → softmax(logits) − one-hot(targets): the gradient of the summed loss, in fp32, in place."""
    torch.softmax(logits, dim=-1, out=logits)
    logits[torch.arange(len(targets), device=logits.device), targets] -= 1
    return logits


def chunked_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean negative log likelihood (nats) as `lmperf.reference.cross_entropy`, without the full logits."""
    return ChunkedCrossEntropy.apply(hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1))


def padded_reference(hidden: Tensor, head: Tensor, targets: Tensor, *, multiple: int = 64) -> Tensor:
    """The loss of a vocabulary padded with rows of zeros, written without them: each adds a logit of 0 (an oracle)."""
    logits = F.pad(F.linear(hidden, head), (0, -head.shape[0] % multiple))
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())
