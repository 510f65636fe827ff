"""Held-out loss in bits per byte: the same fixed windows for every recipe and seed, always scored in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmperf.corpus.datasets import TokenData
from lmperf.model import autocast
from lmperf.recipe import Recipe
from lmperf.records import InputError, read_json


@dataclass(frozen=True)
class Windows:
    """Fixed windows of one split: (batch, length + 1) token arrays spread evenly over it, and its bytes per token."""

    batches: tuple[np.ndarray, ...]
    length: int
    bytes_per_token: float

    def pairs(self, device: str) -> Iterator[tuple[Tensor, Tensor]]:
        """(x, y) int64 (batch, length) on the device."""
        for batch in self.batches:
            tokens = torch.from_numpy(batch).to(device)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def cut(self, length: int) -> Windows:
        """The same tokens in windows of `length`, which must divide this length."""
        if self.length % length:
            raise ValueError(f"length={length} does not divide {self.length}")
        parts = []
        for batch in self.batches:
            starts = range(0, self.length, length)
            parts.append(np.concatenate([batch[:, start : start + length + 1] for start in starts]))
        return Windows(tuple(parts), length, self.bytes_per_token)


def split_names(tokens: Path | str) -> tuple[str, ...]:
    """Names of the splits that the token folder's manifest lists."""
    return tuple(read_json(Path(tokens) / "manifest.json")["splits"])


def held_out_windows(tokens: Path | str, split: str, *, length: int, batch_size: int, batches: int) -> Windows:
    """Up to `batches` × `batch_size` windows of a split, evenly spread; independent of any seed."""
    data = TokenData.open(tokens, split)
    available = (len(data) - 1) // length
    if available < 1:
        raise InputError(f"{tokens}: split {split!r} has {len(data)} tokens; one window needs {length + 1}")
    count = min(available, batches * batch_size)
    starts = np.linspace(0, available - 1, count).round().astype(np.int64) * length
    arrays = [data.read_batch(part, length + 1) for part in np.array_split(starts, math.ceil(count / batch_size))]
    return Windows(tuple(arrays), length, data.bytes_per_token)


def unwrap(model: nn.Module) -> nn.Module:
    """The model under data-parallel wrappers, where `logits` lives."""
    while not hasattr(model, "logits") and hasattr(model, "module"):
        model = model.module
    return model


@torch.no_grad()
def token_losses(model: nn.Module, recipe: Recipe, x: Tensor, y: Tensor, device: str) -> Tensor:
    """Negative log likelihood in nats of every target: x, y (batch, length) → float64 (batch, length).

    The hidden states come in the recipe's own precision; the softmax is fp32, since a bf16 loss near 2 moves in
    steps of 0.016 and would drown what is to be compared.
    """
    with autocast(recipe, device):
        hidden = model(x)
        rows = [unwrap(model).logits(hidden[i : i + 1]) for i in range(x.shape[0])]
    parts = [F.cross_entropy(row[0].float(), y[i], reduction="none") for i, row in enumerate(rows)]
    return torch.stack(parts).double()


def evaluate(model: nn.Module, recipe: Recipe, windows: Windows, device: str) -> Tensor:
    """Losses of all targets of `windows`, float64 (rows, length); the model's training mode is put back.

    Compiled parts run eagerly: the same function, without a graph for each shape that only evaluation sees.
    """
    mode = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            return torch.cat([token_losses(model, recipe, x, y, device).cpu() for x, y in windows.pairs(device)])
    finally:
        model.train(mode)


def score(losses: Tensor, bytes_per_token: float) -> dict[str, float | None]:
    """Mean loss (nats a token) and bits per byte; both None when a loss is not finite."""
    mean = losses.mean().item()
    if not math.isfinite(mean):
        return {"loss": None, "bits_per_byte": None}
    return {"loss": mean, "bits_per_byte": mean / math.log(2) / bytes_per_token}


def evaluate_score(model: nn.Module, recipe: Recipe, windows: Windows, device: str) -> dict[str, float | None]:
    """`score` of the model on `windows`."""
    return score(evaluate(model, recipe, windows, device), windows.bytes_per_token)


def long_context(model: nn.Module, recipe: Recipe, windows: Windows, trained: int, device: str) -> dict[str, Any]:
    """A context longer than trained against the same tokens cut to the trained length, in bits per byte.

    `beyond` is the loss on the positions after the trained length only, `gain` trained minus long (above 0: the
    longer context helps).
    """
    losses = evaluate(model, recipe, windows, device)
    whole = score(losses, windows.bytes_per_token)
    short = evaluate_score(model, recipe, windows.cut(trained), device)
    beyond = score(losses[:, trained:], windows.bytes_per_token)
    known = whole["bits_per_byte"] is not None and short["bits_per_byte"] is not None
    return {
        "length": windows.length,
        "trained_length": trained,
        **whole,
        "bits_per_byte_at_trained_length": short["bits_per_byte"],
        "bits_per_byte_beyond": beyond["bits_per_byte"],
        "gain": short["bits_per_byte"] - whole["bits_per_byte"] if known else None,
    }
