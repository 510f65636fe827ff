"""A recipe: one implementation for every slot of a model run.  `Recipe()` is the baseline.

Slots are applied in one written order when a model is built (`lmperf.model.build`): reshape → modules of the
slots → parameter precision → transforms by stage (compression, recomputation, compile, distributed).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lmperf import reference
from lmperf.records import ModelShape


class Stage(IntEnum):
    """The fixed order in which whole-model transforms are applied."""

    COMPRESSION = 1
    RECOMPUTATION = 2
    COMPILE = 3
    DISTRIBUTED = 4


@dataclass(frozen=True)
class BuildContext:
    """What a transform may need beside the model: `batches()` yields (x, y) for calibration or fine-tuning."""

    shape: ModelShape
    device: str = "cpu"
    seed: int = 0
    batches: Callable[[], Iterator[tuple[Tensor, Tensor]]] | None = None


@dataclass(frozen=True)
class Transform:
    """A change of the whole built model, `apply(model, context) -> model`, at its stage."""

    stage: Stage
    name: str
    apply: Callable[[nn.Module, BuildContext], nn.Module]


@dataclass(frozen=True)
class Precision:
    """Number formats of a run; `scaler` is None, "dynamic", or "frozen" (its update left out)."""

    autocast: torch.dtype | None = None
    parameters: torch.dtype = torch.float32
    master_weights: bool = False
    scaler: str | None = None
    matmul: str = "highest"  # torch.set_float32_matmul_precision
    tf32: bool = False
    convert: Callable[[nn.Module], nn.Module] | None = None  # linear layers of another number format (fp8)


@dataclass(frozen=True)
class Parallel:
    """How a step spans processes: wrap the model, then synchronise gradients after backward (before clipping)."""

    world_size: int
    wrap: Callable[[nn.Module, BuildContext], nn.Module]
    synchronise: Callable[[nn.Module], None] | None = None


class Attention(Protocol):
    """Causal, last query aligned to last key: see `lmperf.reference.attention` for the shapes."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor: ...


class OptimizerFactory(Protocol):
    """See `lmperf.reference.adamw`."""

    def __call__(
        self, parameters: Iterable[nn.Parameter], *, learning_rate: float, weight_decay: float = 0.1
    ) -> torch.optim.Optimizer: ...


Generate = Callable[[nn.Module, Tensor, int], Iterator[Tensor]]


@dataclass(frozen=True)
class Recipe:
    """A full set of choices, one implementation per slot; every default is the baseline's."""

    attention: Attention = reference.attention
    norm: Callable[[int], nn.Module] = reference.layer_norm
    projection: Callable[[ModelShape], nn.Module] = reference.SeparateQKV
    feed_forward: Callable[[ModelShape], nn.Module] = reference.FeedForward
    loss: Callable[[Tensor, Tensor, Tensor], Tensor] = reference.cross_entropy
    optimizer: OptimizerFactory = reference.adamw
    precision: Precision = Precision()
    loader: Callable[[reference.LoaderSource], reference.Batches] = reference.arrow_loader
    generate: Generate = reference.generate_without_cache
    matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul  # the operator workload of the matmul axis
    parallel: Parallel | None = None
    accumulate: int = 1  # micro-batches a step
    reshape: tuple[Callable[[ModelShape], ModelShape], ...] = ()
    transforms: tuple[Transform, ...] = ()  # before training
    finish: tuple[Transform, ...] = ()  # after training (post-training quantisation, pruning)
    step_contexts: tuple[Callable[[], AbstractContextManager[Any]], ...] = ()  # around forward and backward
    after_step: tuple[Callable[[], None], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # set before Python starts
    pad_vocab_to: int = 1  # the vocabulary is padded to a multiple of this

    def replace(self, **slots: Any) -> Recipe:
        """A copy with these slots changed."""
        return dataclasses.replace(self, **slots)

    def extend(self, **slots: Any) -> Recipe:
        """A copy with these items appended to tuple slots (or merged into mapping slots)."""
        merged = {}
        for name, items in slots.items():
            old = getattr(self, name)
            merged[name] = {**old, **items} if isinstance(old, Mapping) else (*old, *items)
        return dataclasses.replace(self, **merged)

    def shape(self, base: ModelShape) -> ModelShape:
        """The model's sizes after all `reshape` changes."""
        for change in self.reshape:
            base = change(base)
        return base


def changed_slots(recipe: Recipe) -> frozenset[str]:
    """Names of the slots in which `recipe` differs from the baseline."""
    baseline = Recipe()
    return frozenset(f.name for f in dataclasses.fields(Recipe) if getattr(recipe, f.name) != getattr(baseline, f.name))
