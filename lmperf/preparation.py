"""One quality run made ready: the process, its batches, the model with its step, the windows it is judged on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lmperf import evaluation
from lmperf.evaluation import Windows
from lmperf.model import TrainingStep, apply_runtime, build
from lmperf.recipe import BuildContext, Recipe
from lmperf.records import InputError, QualitySpec
from lmperf.reference import LoaderSource
from lmperf.stability import StepRecord


@dataclass
class Run:
    """Everything one quality run holds while it trains."""

    spec: QualitySpec
    recipe: Recipe
    model: nn.Module
    step: TrainingStep
    validation: Windows
    rows: slice  # this process's share of each batch
    rates: tuple[float, ...]  # of the optimizer's groups, before the schedule
    steps: StepRecord = field(default_factory=StepRecord)
    curve: list[dict[str, Any]] = field(default_factory=list)
    underflow: dict[str, float] | None = None
    trained_s: float = 0.0  # in steps only, evaluation left out

    @property
    def tokens_per_step(self) -> int:
        """Target tokens that one step learns from."""
        return self.spec.batch_size * self.spec.sequence_length


def settle_process(spec: QualitySpec, recipe: Recipe) -> None:
    """Threads, seeds and the recipe's process-wide settings: what makes two runs of one spec agree."""
    torch.set_num_threads(spec.threads)
    random.seed(spec.seed)
    np.random.seed(spec.seed % 2**32)
    torch.manual_seed(spec.seed)
    apply_runtime(recipe)
    if spec.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def batches_of(spec: QualitySpec, recipe: Recipe, scratch: Path) -> Iterator[tuple[Tensor, Tensor]]:
    """The recipe's own loader over the training split; its order depends on the seed alone, so runs pair up."""
    texts = spec.options.get("texts")
    source = LoaderSource(
        tokens=Path(spec.data), split="train", batch_size=spec.batch_size, length=spec.sequence_length,
        seed=spec.seed, texts=Path(texts) if texts else None, scratch=scratch,
    )  # fmt: skip
    return recipe.loader(source)


def context_of(spec: QualitySpec, recipe: Recipe, scratch: Path) -> BuildContext:
    """What building and after-training transforms may need: the recipe's shape and batches of its own loader."""
    return BuildContext(
        shape=recipe.shape(spec.model), device=spec.device, seed=spec.seed,
        batches=lambda: on_device(batches_of(spec, recipe, scratch), spec.device),
    )  # fmt: skip


def prepare(spec: QualitySpec, recipe: Recipe, scratch: Path, rank: int = 0) -> Run:
    """Build model, step and validation windows; a vocabulary that does not hold the tokens is an `InputError`."""
    check_vocabulary(spec)
    context = context_of(spec, recipe, scratch)
    model = build(spec.model, recipe, seed=spec.seed, device=spec.device, context=context)
    step = TrainingStep(
        model, recipe, learning_rate=spec.learning_rate, device=spec.device, clip=spec.clip,
        weight_decay=spec.weight_decay,
    )  # fmt: skip
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise NotImplementedError("no quality run with sharded parameters: the function is the baseline's")
    share = spec.batch_size // (1 if recipe.parallel is None else recipe.parallel.world_size)
    rates = tuple(float(group["lr"]) for group in step.optimizer.param_groups)
    rows = slice(rank * share, (rank + 1) * share)
    return Run(spec, recipe, model, step, windows(spec, "validation", spec.sequence_length), rows, rates)


def check_vocabulary(spec: QualitySpec) -> None:
    """Refuse tokens that the model's vocabulary does not hold."""
    from lmperf.corpus.datasets import TokenData

    size = TokenData.open(spec.data, "train").vocab_size
    if size > spec.model.vocab_size:
        raise InputError(f"{spec.data}: tokens of a vocabulary of {size}; the model's holds {spec.model.vocab_size}")


def windows(spec: QualitySpec, split: str, length: int) -> Windows:
    """The evaluation windows of a split, about the same number of tokens at every length."""
    batch = max(1, spec.batch_size * spec.sequence_length // length)
    return evaluation.held_out_windows(
        spec.data, split, length=length, batch_size=batch, batches=spec.evaluation_batches
    )


def on_device(batches: Iterator[tuple[Tensor, Tensor]], device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches moved to the device (nothing is copied when they are there)."""
    for x, y in batches:
        yield x.to(device), y.to(device)
