"""One rank's replica of a model and its share of the rows; the weights after some steps, for the check."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch import distributed as dist

from lmperf import model
from lmperf.recipe import Parallel, Recipe
from lmperf.records import ModelShape

INPUT_BATCHES = 4
#: AdamW divides by √v + ε: at 1e-8 it turns the rounding noise of gradients that are zero (a key's bias) into full
#: steps, which no two orders of summation agree on.  The check raises ε above that noise, on both sides.
CHECK_EPSILON = 1e-4


@dataclass(frozen=True)
class Plan:
    """What the ranks build and work on: a joined batch of `batch` rows of `length` tokens."""

    recipe: Recipe
    shape: ModelShape
    world_size: int
    batch: int
    length: int
    device: str = "cpu"
    weights_seed: int = 0
    data_seed: int = 0
    learning_rate: float = 1e-3

    def rows(self, rank: int) -> slice:
        """The rows of the joined batch that belong to `rank`."""
        share = self.batch // self.world_size
        return slice(rank * share, (rank + 1) * share)

    def inputs(self, number: int, seed: int, rank: int) -> tuple[Tensor, Tensor]:
        """This rank's x and y of joined batch `number`: random tokens (rows, length), the same on every rank."""
        generator = torch.Generator().manual_seed(seed * 1009 + number)
        tokens = torch.randint(self.shape.vocab_size, (self.batch, self.length + 1), generator=generator)
        mine = tokens[self.rows(rank)].to(self.device)
        return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


@dataclass(frozen=True)
class Weights:
    """All weights (whole, even where ranks hold parts) and the largest difference between ranks."""

    tensors: list[Tensor]
    spread: float


class Worker:
    """A rank's replica and what it can be told: `step`, `local` (no communication), `drop local`, `check <seed>`."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.step = training_step(plan)
        shares = [plan.inputs(number, plan.data_seed, rank) for number in range(INPUT_BATCHES)]
        self.inputs = itertools.cycle(shares)
        self.local: model.TrainingStep | None = None

    def obey(self, text: str) -> object:
        """Do what rank 0 said."""
        word, _, rest = text.partition(" ")
        if word == "step":
            return self.step(*next(self.inputs))
        if word == "local":
            self.local = self.local or training_step(replace(self.plan, recipe=alone(self.plan.recipe)))
            return self.local(*next(self.inputs))
        if word == "drop":
            self.local = None
            return None
        if word == "check":
            return run_steps(self.plan, self.rank, int(rest))
        raise ValueError(f"command {text!r} is unknown; allowed: step, local, drop local, check <seed>")

    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state that this rank holds."""
        optimizer = getattr(self.step.optimizer, "inner", self.step.optimizer)
        held = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in map(local_part, held))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor; any other tensor itself."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def training_step(plan: Plan) -> model.TrainingStep:
    """A model and its step, started from the plan's seed."""
    recipe = with_world_size(plan.recipe, plan.world_size)
    built = model.build(plan.shape, recipe, seed=plan.weights_seed, device=plan.device)
    return model.TrainingStep(built, recipe, learning_rate=plan.learning_rate, device=plan.device)


def with_world_size(recipe: Recipe, world_size: int) -> Recipe:
    """The recipe for this number of ranks."""
    return (
        recipe if recipe.parallel is None else recipe.replace(parallel=replace(recipe.parallel, world_size=world_size))
    )


def alone(recipe: Recipe) -> Recipe:
    """The same function in one process: no communication, an unsharded optimizer, the wrapper's own model changes."""
    optimizer = getattr(recipe.optimizer, "unsharded", recipe.optimizer)
    change = getattr(recipe.parallel.wrap, "alone", None) if recipe.parallel is not None else None
    return recipe.replace(optimizer=optimizer, parallel=None if change is None else Parallel(1, change))


def lossy(recipe: Recipe) -> bool:
    """Whether the ranks' average is an approximation (compressed gradients)."""
    return recipe.parallel is not None and bool(getattr(recipe.parallel.synchronise, "lossy", False))


def run_steps(plan: Plan, rank: int, seed: int, steps: int = 5) -> Weights:
    """Train a fresh replica for `steps` on the fresh batches of `seed`; its weights (every rank must call this)."""
    step = training_step(plan)
    for group in step.optimizer.param_groups:
        group["eps"] = CHECK_EPSILON
    for number in range(steps):
        step(*plan.inputs(number, seed, rank))
    tensors = [whole(p.detach()) for p in step.parameters]
    return Weights(tensors, spread(tensors) if plan.world_size > 1 else 0.0)


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor put together; any other tensor copied."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def spread(tensors: list[Tensor]) -> float:
    """The largest difference of any element between ranks."""
    flat = torch.cat([t.flatten().float() for t in tensors])
    highest, lowest = flat.clone(), flat.neg()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    dist.all_reduce(lowest, op=dist.ReduceOp.MAX)
    return float((highest + lowest).max())
