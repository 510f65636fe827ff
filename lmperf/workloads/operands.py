"""One operator of each axis with its inputs: attention, norm, matrix product, projection, feed-forward, loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lmperf import flops, reference
from lmperf.implementations.facts import facts_of
from lmperf.recipe import Recipe
from lmperf.records import InputError, ModelShape
from lmperf.workloads.base import Setting

Tensors = tuple[Tensor, ...]


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor: nothing is left out of a comparison."""
    return tensor


@dataclass(frozen=True)
class Case:
    """Inputs of one check; `part` cuts every tensor to what the reference computes (independent heads)."""

    inputs: Tensors
    part: Callable[[Tensor], Tensor] = whole


@dataclass(frozen=True)
class Operation:
    """An operator ready to run: `call(*inputs)` gives a tensor or a tuple of them."""

    call: Callable[..., Tensor | Tensors]
    inputs: Callable[[torch.Generator], Tensors]  # fresh inputs at the cell's shape
    cases: Callable[[torch.Generator], Iterator[Case]]  # inputs to check on, the cell's shape or near it first
    implementation: Any  # what the recipe put into the slot
    module: nn.Module | None = None
    tokens: float | None = None
    forward_flops: float | None = None
    arrange: Callable[[Tensors], Tensors] = tuple
    once: dict[str, tuple[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def parameters(self) -> Tensors:
        """Trained tensors beside the inputs."""
        return () if self.module is None else tuple(self.module.parameters())


def dtype_of(setting: Setting) -> torch.dtype:
    """The session's dtype as torch names it."""
    dtype = getattr(torch, setting.spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"dtype {setting.spec.dtype!r} is unknown; allowed: float32, bfloat16, float16")
    return dtype


def normal(setting: Setting, generator: torch.Generator, *size: int) -> Tensor:
    """Standard normal numbers of the session's dtype and device, drawn on the CPU so that seeds agree everywhere."""
    return torch.randn(*size, generator=generator).to(setting.device, dtype_of(setting))


def model_shape(setting: Setting, recipe: Recipe) -> ModelShape:
    """The session's model sizes with the cell's changes, then the recipe's reshape."""
    names = {field.name for field in dataclasses.fields(ModelShape)}
    changed = {name: value for name, value in setting.cell.params.items() if name in names}
    return recipe.shape(dataclasses.replace(setting.spec.model, **changed))


def attention(setting: Setting, recipe: Recipe) -> Operation:
    """softmax(q kᵀ) v at cell sizes batch, heads, kv_heads, length, head_dim; a reshape changes the heads."""
    batch, heads = int(setting.param("batch", 2)), int(setting.param("heads", 8))
    length, d = int(setting.param("length", 512)), int(setting.param("head_dim", 64))
    grouped = int(setting.param("kv_heads", heads))
    shape = recipe.shape(dataclasses.replace(setting.spec.model, heads=heads, kv_heads=grouped, d_model=heads * d))
    heads, kv_heads, call = shape.heads, shape.kv_heads, recipe.attention
    facts = facts_of(call)

    def make(generator: torch.Generator, rows: int, queries: int, keys: int) -> Tensors:
        sizes = ((rows, heads, queries, d), (rows, kv_heads, keys, d), (rows, kv_heads, keys, d))
        return tuple(normal(setting, generator, *size) for size in sizes)

    def cases(generator: torch.Generator) -> Iterator[Case]:
        # Heads do not touch each other: the reference's first group of heads is enough, and small at any length.
        yield Case(make(generator, batch, length, length), lambda t: t[:1, : t.shape[1] // kv_heads])
        for queries, keys in () if facts.static_shapes else ((1, 1), (67, 67), (3, 70)):
            yield Case(make(generator, 1, queries, keys))

    once = {}
    if facts.recall is not None:
        q, k, _ = make(torch.Generator().manual_seed(setting.seed), 1, length, length)
        once["topk_recall"] = ("share", facts.recall(q, k))
    counted = flops.attention_flops(batch, heads, kv_heads, length, length, d, window=facts.window)
    return Operation(
        call=call, implementation=call, inputs=lambda g: make(g, batch, length, length), cases=cases,
        tokens=batch * length, forward_flops=counted if facts.dense else None, once=once,
        arrange=tuple if facts.arrange is None else lambda tensors: facts.arrange(*tensors),
    )  # fmt: skip


def norm(setting: Setting, recipe: Recipe) -> Operation:
    """The recipe's norm over x (rows, dim); weights and bias away from their start, so that a check sees them."""
    rows, dim = int(setting.param("rows", 2048)), int(setting.param("dim", setting.spec.model.d_model))
    module = recipe.norm(dim).to(setting.device, dtype_of(setting))
    randomise(module, seed=7)

    def cases(generator: torch.Generator) -> Iterator[Case]:
        yield Case((normal(setting, generator, rows, dim),))
        yield Case((normal(setting, generator, 2, 3, dim) * 3 + 1,))
        yield Case((normal(setting, generator, 1, dim),))

    return Operation(
        call=module, implementation=recipe.norm, module=module, inputs=lambda g: (normal(setting, g, rows, dim),),
        cases=cases, tokens=rows,
    )  # fmt: skip


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Add small noise to every parameter, the same for parameters of one name."""
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(seed + sum(name.encode()))
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter))


def product(setting: Setting, recipe: Recipe) -> Operation:
    """recipe.matmul on two (n, n) matrices, or (rows, inner) by (inner, columns)."""
    n = int(setting.param("n", 512))
    rows, inner, columns = (int(setting.param(name, n)) for name in ("rows", "inner", "columns"))

    def make(generator: torch.Generator, *size: int) -> Tensors:
        left, right = normal(setting, generator, *size[:2]), normal(setting, generator, *size[1:])
        return left, right / math.sqrt(size[1])

    def cases(generator: torch.Generator) -> Iterator[Case]:
        yield Case(make(generator, *(min(size, 512) for size in (rows, inner, columns))))
        yield Case(make(generator, 67, 131, 35))
        yield Case(make(generator, 1, 5, 1))

    return Operation(
        call=recipe.matmul, implementation=recipe.matmul, inputs=lambda g: make(g, rows, inner, columns),
        cases=cases, forward_flops=2 * rows * inner * columns,
    )  # fmt: skip


def linear(setting: Setting, recipe: Recipe, slot: str) -> Operation:
    """The recipe's projection or feed-forward on x (batch, length, d_model), weights those of the reference."""
    shape = model_shape(setting, recipe)
    if slot == "feed_forward":
        shape = dataclasses.replace(shape, activation="swiglu")
    batch, length = int(setting.param("batch", 4)), int(setting.param("length", setting.spec.sequence_length))
    truth = {"projection": reference.SeparateQKV, "feed_forward": reference.FeedForward}[slot](shape)
    with torch.no_grad():
        for index, parameter in enumerate(truth.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(shape.d_model))
    module = getattr(recipe, slot)(shape)
    module.load_state_dict(truth.state_dict(), strict=False)  # a layer without biases leaves them out
    module.to(setting.device, dtype_of(setting))

    def cases(generator: torch.Generator) -> Iterator[Case]:
        yield Case((normal(setting, generator, batch, length, shape.d_model),))
        yield Case((normal(setting, generator, 3, 1, shape.d_model),))

    groups = flops.forward_groups(dataclasses.replace(shape, layers=1), batch, length)
    return Operation(
        call=module, implementation=(getattr(recipe, slot), shape), module=module, cases=cases, tokens=batch * length,
        inputs=lambda g: (normal(setting, g, batch, length, shape.d_model),),
        forward_flops=groups["qkv_projection" if slot == "projection" else "feed_forward"],
    )  # fmt: skip


def loss(setting: Setting, recipe: Recipe) -> Operation:
    """The recipe's loss on hidden (batch, length, d_model), head (rows, d_model), targets (batch, length)."""
    shape = model_shape(setting, recipe)
    batch, length = int(setting.param("batch", 4)), int(setting.param("length", setting.spec.sequence_length))
    rows = math.ceil(shape.vocab_size / recipe.pad_vocab_to) * recipe.pad_vocab_to

    def make(generator: torch.Generator, *size: int) -> Tensors:
        targets = torch.randint(shape.vocab_size, size, generator=generator).to(setting.device)
        head = normal(setting, generator, rows, shape.d_model) / math.sqrt(shape.d_model)
        return normal(setting, generator, *size, shape.d_model), head, targets

    def cases(generator: torch.Generator) -> Iterator[Case]:
        yield Case(make(generator, batch, length))
        yield Case(make(generator, 3, 67))
        yield Case(make(generator, 1, 1))

    return Operation(
        call=recipe.loss, implementation=(recipe.loss, rows, shape), inputs=lambda g: make(g, batch, length),
        cases=cases, tokens=batch * length, forward_flops=2 * batch * length * rows * shape.d_model,
    )  # fmt: skip


OPERANDS: dict[str, Callable[[Setting, Recipe], Operation]] = {
    "attention": attention,
    "norm": norm,
    "matmul": product,
    "qkv": lambda setting, recipe: linear(setting, recipe, "projection"),
    "gate_up": lambda setting, recipe: linear(setting, recipe, "feed_forward"),
    "loss": loss,
}


def operation(setting: Setting, recipe: Recipe) -> Operation:
    """The operation of the session's axis (cell parameter `operand` on the matmul axis)."""
    axis = setting.spec.axis
    allowed = {"attention": ("attention",), "norm": ("norm",), "matmul": ("matmul", "qkv", "gate_up", "loss")}
    if axis not in allowed:
        raise InputError(f"operator workloads: axis {axis!r} has no operator; allowed: {', '.join(allowed)}")
    operand = setting.param("operand", allowed[axis][0])
    if operand not in allowed[axis]:
        raise InputError(f"operand {operand!r} is unknown on axis {axis}; allowed: {', '.join(allowed[axis])}")
    return OPERANDS[operand](setting, recipe)
