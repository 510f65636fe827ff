"""Workloads `training_step` (forward, backward, clip, AdamW) and `prefill` (one forward pass over a whole prompt)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lmperf import model
from lmperf.checking import TrainingCheck, check_forward, expectation, model_of, random_tokens
from lmperf.flops import recipe_flops
from lmperf.recipe import Precision, Recipe
from lmperf.records import InputError, ModelShape
from lmperf.workloads.base import CheckOutcome, Prepared, Setting, workload

INPUT_BATCHES = 4  # rotate, so that no cache of one batch's results can help


def cell_sizes(setting: Setting) -> tuple[ModelShape, int, int]:
    """(model shape, batch size, sequence length) of a cell; a position table too short for the length is extended."""
    batch = int(setting.param("batch", setting.spec.batch_size))
    length = int(setting.param("length", setting.spec.sequence_length))
    shape = setting.spec.model
    return dataclasses.replace(shape, context_length=max(shape.context_length, length)), batch, length


def in_dtype(recipe: Recipe, dtype: str) -> Recipe:
    """The recipe under autocast to the session's dtype, unless its own precision slot says otherwise."""
    if dtype == "float32" or recipe.precision != Precision():
        return recipe
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise InputError(f"dtype {dtype!r} is unknown; allowed: float32, bfloat16, float16")
    return recipe.replace(precision=Precision(autocast=kind))


def rotating_batches(setting: Setting, batch: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (x, y) of random tokens, `INPUT_BATCHES` different ones made beforehand on the device."""
    vocabulary = setting.spec.model.vocab_size
    seeds = (setting.seed * 1009 + number for number in range(INPUT_BATCHES))
    return itertools.cycle([random_tokens(vocabulary, batch, length, seed, setting.device) for seed in seeds])


@workload("training_step")
def training_step(setting: Setting) -> Prepared:
    """One optimizer step on a batch of random tokens (batch, length)."""
    shape, batch, length = cell_sizes(setting)
    recipe = in_dtype(setting.recipe, setting.spec.dtype)
    model.apply_runtime(recipe)
    built = model.build(shape, recipe, seed=setting.spec.seed, device=setting.device)
    step = model.TrainingStep(built, recipe, learning_rate=setting.spec.learning_rate, device=setting.device)
    batches = rotating_batches(setting, batch, length)
    return Prepared(
        step=lambda: step(*next(batches)),
        check=lazily(lambda: _training_check(setting, shape, length), recipe),
        tokens_per_step=float(batch * length),
        flops_per_step=float(recipe_flops(recipe, shape, batch, length)["total"]),
        model=built,
    )


def _training_check(setting: Setting, shape: ModelShape, length: int) -> Callable[[int], CheckOutcome]:
    expected = expectation(setting.arm.variants, setting.spec.plugins)
    return TrainingCheck(
        setting.recipe, expected, shape, device=setting.device, length=length, weights_seed=setting.spec.seed
    )


def lazily(make: Callable[[], Callable[[int], CheckOutcome]], recipe: Recipe) -> Callable[[int], CheckOutcome]:
    """A check whose models are built at its first call; process-wide settings are given back to the timed recipe."""
    made: list[Callable[[int], CheckOutcome]] = []

    def check(seed: int) -> CheckOutcome:
        if not made:
            made.append(make())
        try:
            return made[0](seed)
        finally:
            model.apply_runtime(recipe)

    return check


@workload("prefill")
def prefill(setting: Setting) -> Prepared:
    """The forward pass over a prompt (batch, length) and the logits of its last token, without gradients."""
    shape, batch, length = cell_sizes(setting)
    recipe = in_dtype(setting.recipe, setting.spec.dtype)
    model.apply_runtime(recipe)
    built = model.build(shape, recipe, seed=setting.spec.seed, device=setting.device).eval()
    batches = rotating_batches(setting, batch, length)
    inner = model_of(built)

    @torch.no_grad()
    def step() -> Tensor:
        with model.autocast(recipe, setting.device):
            return inner.logits(built(next(batches)[0])[:, -1])

    return Prepared(
        step=step,
        check=lazily(lambda: _prefill_check(setting, shape, length), recipe),
        tokens_per_step=float(batch * length),
        model=built,
    )


def _prefill_check(setting: Setting, shape: ModelShape, length: int) -> Callable[[int], CheckOutcome]:
    expected = expectation(setting.arm.variants, setting.spec.plugins)
    seed, device = setting.spec.seed, setting.device
    arm = model.build(shape, setting.recipe, seed=seed, device=device).eval()
    truth = None
    if expected.oracle is not None:
        truth = model.build(shape, expected.oracle, seed=seed, device=device).eval()

    def check(inputs_seed: int) -> CheckOutcome:
        x, _ = random_tokens(shape.vocab_size, 2, length, inputs_seed, device)
        return check_forward(arm, truth, x, expected)

    return check
