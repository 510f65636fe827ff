"""Correct before fast: a recipe's loss, gradients and optimizer against its oracle, in fp32, on fresh random inputs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmperf import model, reference, registry
from lmperf.catalogue import AXES
from lmperf.recipe import OptimizerFactory, Recipe
from lmperf.records import ModelShape
from lmperf.workloads.base import CheckOutcome

CHECK_LAYERS = 2  # an error in a layer shows in two of them; all layers of a large model would cost minutes
WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Expectation:
    """What an arm owes: the recipe that is its truth, its fidelity and tolerances; `oracle` None = no truth known."""

    oracle: Recipe | None
    fidelity: str = "exact"
    rtol: float = 1e-4
    atol: float = 1e-5


def expectation(keys: Sequence[str], plugins: Sequence[str] = ()) -> Expectation:
    """The truth of an arm made of the variants `keys`: the baseline with those variants' oracles applied.

    A `quality` variant without an oracle is another function: nothing but finite numbers can be asked of it.
    """
    order = {axis: number for number, axis in enumerate(AXES)}
    entries = sorted((registry.get(key, plugins) for key in keys), key=lambda v: order[v.axis])
    recipe: Recipe | None = Recipe()
    fidelity, rtol, atol = "exact", 1e-4, 1e-5
    for entry in entries:
        if entry.fidelity == "quality" and entry.oracle is None:
            recipe = None
        if recipe is not None and entry.oracle is not None:
            recipe = entry.oracle(recipe)
        rtol, atol = max(rtol, entry.rtol), max(atol, entry.atol)
        if entry.fidelity != "exact" and fidelity != "quality":
            fidelity = entry.fidelity
    return Expectation(recipe, fidelity, rtol, atol)


class TrainingCheck:
    """Builds the arm's and the oracle's models once; each call compares them on the fresh inputs of a seed."""

    def __init__(
        self, recipe: Recipe, expected: Expectation, shape: ModelShape, *, device: str = "cpu", length: int = 64,
        weights_seed: int = 0,
    ) -> None:  # fmt: skip
        small = dataclasses.replace(shape, layers=min(shape.layers, CHECK_LAYERS))
        self.shape, self.device, self.expected = small, device, expected
        self.length = min(length, recipe.shape(small).context_length)
        self.recipe = recipe
        self.arm = _stepper(small, recipe, device, weights_seed)
        self.truth = _stepper(small, expected.oracle, device, weights_seed) if expected.oracle is not None else None

    def __call__(self, seed: int) -> CheckOutcome:
        """Compare on the random tokens of `seed`: loss, every gradient that both have, and the optimizer's update."""
        x, y = random_tokens(self.shape.vocab_size, max(2, self.recipe.accumulate), self.length, seed, self.device)
        loss, gradients = _loss_and_gradients(self.arm, x, y)
        if self.truth is None:
            return finite({"loss": loss, **gradients})
        true_loss, true_gradients = _loss_and_gradients(self.truth, x, y)
        outcome = compare(
            {"loss": loss, **gradients}, {"loss": true_loss, **true_gradients}, self.expected.rtol, self.expected.atol
        )
        if not outcome.passed or self.expected.fidelity == "quality":
            return outcome
        return check_optimizer(self.recipe.optimizer, seed, outcome)


def check_training(
    recipe: Recipe, oracle: Recipe | None, shape: ModelShape, device: str, seed: int, rtol: float, atol: float,
    fidelity: str,
) -> CheckOutcome:  # fmt: skip
    """Compare a recipe with its oracle once: loss and gradients in fp32 on the fresh random inputs of `seed`.

    `oracle` None: the recipe is a function of its own and only has to give finite numbers.
    """
    expected = Expectation(oracle, fidelity, rtol, atol)
    return TrainingCheck(recipe, expected, shape, device=device, length=shape.context_length)(seed)


def check_forward(arm: nn.Module, truth: nn.Module | None, x: Tensor, expected: Expectation) -> CheckOutcome:
    """Compare two models' logits on the tokens x (batch, length) without gradients."""
    with torch.no_grad():
        got = model_of(arm).logits(arm(x))
        if truth is None:
            return finite({"logits": got})
        return compare({"logits": got}, {"logits": truth.logits(truth(x))}, expected.rtol, expected.atol)


def model_of(wrapped: nn.Module) -> nn.Module:
    """The language model inside wrappers (compiled, distributed)."""
    while not hasattr(wrapped, "logits"):
        wrapped = getattr(wrapped, "_orig_mod", None) or wrapped.module
    return wrapped


def random_tokens(vocab_size: int, batch: int, length: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Uniform random token ids x and targets y, both (batch, length) int64."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (batch, length + 1), generator=generator)
    return tokens[:, :-1].contiguous().to(device), tokens[:, 1:].contiguous().to(device)


def _stepper(shape: ModelShape, recipe: Recipe, device: str, seed: int) -> model.TrainingStep:
    built = model.build(shape, recipe, seed=seed, device=device)
    return model.TrainingStep(built, recipe, learning_rate=1e-3, device=device)


def _loss_and_gradients(step: model.TrainingStep, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.apply_runtime(step.recipe)  # the matmul precision is process-wide: arm and truth each want their own
    step.zero_grad()
    loss = step.forward_backward(x, y)
    scale = 1.0 / step.scaler.get_scale() if step.scaler else 1.0
    named = step.model.named_parameters()
    return loss, {plain_name(n): _whole(p.grad).float() * scale for n, p in named if p.grad is not None}


def _whole(gradient: Tensor) -> Tensor:
    """The whole gradient of a sharded parameter (a DTensor), any other one as it is."""
    gradient = gradient.detach()
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def plain_name(name: str) -> str:
    """A parameter's name without what compiling and distributing put before it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def finite(values: Mapping[str, Tensor]) -> CheckOutcome:
    """The weakest check: all numbers are finite (a function of its own, priced by its quality run)."""
    for name, value in values.items():
        if not bool(torch.isfinite(value).all()):
            return CheckOutcome(False, f"{name} is not finite")
    return CheckOutcome(True, "a function of its own: finite numbers only; see its quality run")


def compare(got: Mapping[str, Tensor], true: Mapping[str, Tensor], rtol: float, atol: float) -> CheckOutcome:
    """Whether each tensor that both sides have agrees: max|a − b| ≤ atol + rtol · max|b|.

    The bound is on the tensor's largest entry, since a sum in another order moves small entries by more than their
    size. Rows that only one side has (padding) are left out. `max_error` is the largest of max|a − b| / (max|b| +
    atol / rtol): the comparison passes just when that is at most rtol.
    """
    worst, where, failed = 0.0, "", ""
    shared = [name for name in true if name in got]
    for name in shared:
        a, b = _overlap(got[name].detach().float(), true[name].detach().float())
        scale, error = float(b.abs().max()), float((a - b).abs().max())
        if not math.isfinite(error):
            return CheckOutcome(False, f"{name} is not finite", None)
        if error > atol + rtol * scale and not failed:
            failed = f"{name} differs from the reference by {error:.3g} where {atol + rtol * scale:.3g} is allowed"
        # A gradient that is zero but for rounding (a key's bias) has no relative error worth telling.
        relative = error / (scale + atol / rtol) if rtol > 0 else error
        if relative > worst:
            worst, where = relative, name
    if failed:
        return CheckOutcome(False, failed, worst)
    if not shared:
        return CheckOutcome(False, "nothing could be compared with the reference", None)
    return CheckOutcome(True, f"{len(shared)} tensors agree; the largest relative error is in {where or 'none'}", worst)


def _overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    if a.shape == b.shape:
        return a, b
    both = tuple(slice(0, min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
    return a[both], b[both]


def check_optimizer(factory: OptimizerFactory, seed: int, before: CheckOutcome) -> CheckOutcome:
    """Give the arm's and the reference optimizer the same gradients for four steps; their updates must agree."""
    if factory is reference.adamw:
        return before
    torch.set_float32_matmul_precision("highest")
    start = [p.detach().clone() for p in _parameters(seed)]
    updates = [_updates(make, start, seed) for make in (factory, reference.adamw)]
    outcome = compare(*updates, 1e-3, 1e-7)
    return before if outcome.passed else outcome


def _updates(factory: OptimizerFactory, start: Sequence[Tensor], seed: int) -> dict[str, Tensor]:
    """What an optimizer changes in four steps: the difference itself, since a wrong moment is small beside a weight."""
    parameters = [nn.Parameter(value.clone()) for value in start]
    optimizer = factory(parameters, learning_rate=1e-2)
    for number in range(4):
        for index, parameter in enumerate(parameters):
            # Gradients that grow, so that the decay rates of both moments show.
            parameter.grad = (1 + number) ** 2 * _normal(parameter.shape, seed + 100 * number + index)
        optimizer.step()
    named = enumerate(zip(parameters, start, strict=True))
    return {f"update {index} of the optimizer": after.detach() - value for index, (after, value) in named}


def _parameters(seed: int) -> Iterator[nn.Parameter]:
    for index, shape in enumerate(((8, 4), (16,), (3, 5))):
        yield nn.Parameter(_normal(shape, seed * 7 + index))


def _normal(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
