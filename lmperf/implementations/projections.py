"""Linear layers merged into one product; they load the weights of the separate layers by the reference's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmperf.recipe import BuildContext
from lmperf.records import ModelShape


def accept_separate(module: nn.Module, merged: str, parts: tuple[str, ...]) -> None:
    """Let `module.<merged>` load a state dict that holds weight and bias of `parts` apart, joined in this order."""

    def join(_: nn.Module, state: dict[str, Tensor], prefix: str, *__: Any) -> None:
        for kind in ("weight", "bias"):
            names = [f"{prefix}{part}.{kind}" for part in parts]
            if all(name in state for name in names):
                state[f"{prefix}{merged}.{kind}"] = torch.cat([state.pop(name) for name in names])

    module.register_load_state_dict_pre_hook(join)


class FusedQKV(nn.Module):
    """One linear layer for queries, keys and values: x (batch, length, d_model) → q, k, v as views of its output."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.widths = (queries, keys, keys)
        self.qkv = nn.Linear(shape.d_model, sum(self.widths))
        accept_separate(self, "qkv", ("query", "key", "value"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv(x).split(self.widths, dim=-1)


class FusedGateUp(nn.Module):
    """SwiGLU feed-forward whose gate and up projections are one linear layer (Shazeer 2020, eq. 6)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        if shape.activation != "swiglu":
            raise NotImplementedError(f"activation {shape.activation!r} has no gate to merge; it needs 'swiglu'")
        self.gate_up = nn.Linear(shape.d_model, 2 * shape.d_ff)
        self.down = nn.Linear(shape.d_ff, shape.d_model)
        accept_separate(self, "gate_up", ("gate", "up"))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def without_biases(model: nn.Module, context: BuildContext) -> nn.Module:
    """Remove the bias of every linear layer; they start at zero, so that the model is the same function at first."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.bias = None
    return model
