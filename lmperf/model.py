"""A small decoder-only transformer built from a recipe, and its one training step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmperf import reference
from lmperf.recipe import BuildContext, Recipe
from lmperf.records import InputError, ModelShape


class Cache(Protocol):
    """Keys and values of earlier tokens, one entry a layer; `update` appends and returns all of them."""

    length: int  # tokens held before this forward pass

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v (batch, kv_heads, new, d) → all keys and values (batch, kv_heads, length + new, d)."""
        ...

    def advance(self, tokens: int) -> None:
        """Called once after a forward pass over `tokens` new tokens."""
        ...


def rotate(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary position embedding (Su et al. 2021): x (batch, heads, length, d), positions (length,)."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions.to(torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class AttentionBlock(nn.Module):
    """Projection, the recipe's attention, output projection; x (batch, length, d_model) → same."""

    def __init__(self, shape: ModelShape, recipe: Recipe, layer: int) -> None:
        super().__init__()
        self.layer, self.shape = layer, shape
        self.projection = recipe.projection(shape)
        self.output = nn.Linear(shape.d_model, shape.d_model)
        self.attention = recipe.attention

    def forward(self, x: Tensor, positions: Tensor, cache: Cache | None = None) -> Tensor:
        q, k, v = self.projection(x)
        d = self.shape.head_dim
        q, k, v = (t.unflatten(-1, (-1, d)).transpose(1, 2) for t in (q, k, v))
        if self.shape.position == "rotary":
            q, k = rotate(q, positions), rotate(k, positions)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        return self.output(self.attention(q, k, v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: ModelShape, recipe: Recipe, layer: int) -> None:
        super().__init__()
        self.norm_1 = recipe.norm(shape.d_model)
        self.attention = AttentionBlock(shape, recipe, layer)
        self.norm_2 = recipe.norm(shape.d_model)
        self.feed_forward = recipe.feed_forward(shape)

    def forward(self, x: Tensor, positions: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.attention(self.norm_1(x), positions, cache)
        return x + self.feed_forward(self.norm_2(x))


class LanguageModel(nn.Module):
    """Decoder-only transformer: tokens (batch, length) int64 → hidden (batch, length, d_model)."""

    def __init__(self, shape: ModelShape, recipe: Recipe) -> None:
        super().__init__()
        self.shape = shape
        recipe = recipe.replace(norm=reference.norm_of(shape, recipe.norm))
        rows = math.ceil(shape.vocab_size / recipe.pad_vocab_to) * recipe.pad_vocab_to
        self.embedding = nn.Embedding(rows, shape.d_model)
        self.position = nn.Embedding(shape.context_length, shape.d_model) if shape.position == "learned" else None
        self.blocks = nn.ModuleList(Block(shape, recipe, layer) for layer in range(shape.layers))
        self.norm = recipe.norm(shape.d_model)
        self.head = None if shape.tied_head else nn.Linear(shape.d_model, rows, bias=False)
        self.loss_function = recipe.loss

    def forward(self, tokens: Tensor, targets: Tensor | None = None, *, cache: Cache | None = None) -> Tensor:
        """Hidden states, or the mean loss (nats, scalar) when `targets` are given."""
        past = 0 if cache is None else cache.length
        positions = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position(positions)
        for block in self.blocks:
            x = block(x, positions, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        x = self.norm(x)
        return x if targets is None else self.loss_function(x, self.head_weight, targets)

    @property
    def head_weight(self) -> Tensor:
        """(rows, d_model): the embedding when tied; rows that pad the vocabulary are ordinary, never-seen tokens."""
        return self.embedding.weight if self.head is None else self.head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden (…, d_model) → logits over the real vocabulary (…, vocab_size)."""
        return F.linear(hidden, self.head_weight[: self.shape.vocab_size])


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """GPT-2's initialisation (Radford et al. 2019): N(0, 0.02), output projections / √(2·layers), biases 0."""
    layers = model.shape.layers
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            if name.endswith("bias"):
                parameter.zero_()
            continue
        # One generator a parameter, so that a recipe with other modules still starts from the same weights.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + _name_number(name))
        scaled = name.endswith(("output.weight", "down.weight"))
        parameter.copy_(
            torch.randn(parameter.shape, generator=generator) * (0.02 / math.sqrt(2 * layers) if scaled else 0.02)
        )


def _name_number(name: str) -> int:
    return int.from_bytes(name.encode()[-24:], "big") % 1_000_003


def skeleton(shape: ModelShape, recipe: Recipe, seed: int) -> LanguageModel:
    """The fp32 model of a recipe's module slots, started from the reference model's weights of this seed.

    Modules that lay their weights out differently (fused QKV) accept the reference's names in a load_state_dict
    pre-hook, so that every recipe of one shape starts as the same function.
    """
    truth = LanguageModel(shape, Recipe())
    initialise(truth, seed)
    model = LanguageModel(shape, recipe)
    initialise(model, seed)
    state = truth.state_dict()
    rows = model.embedding.weight.shape[0]
    for name in ("embedding.weight", "head.weight"):
        if name in state and state[name].shape[0] < rows:
            state[name] = F.pad(state[name], (0, 0, 0, rows - state[name].shape[0]))
    model.load_state_dict(state, strict=False)
    return model


def build(
    shape: ModelShape, recipe: Recipe, *, seed: int, device: str = "cpu", context: BuildContext | None = None
) -> nn.Module:
    """Build a recipe's model: modules, weights of `seed`, device, parameter precision, then transforms by stage."""
    shape = recipe.shape(shape)
    context = context or BuildContext(shape=shape, device=device, seed=seed)
    model: nn.Module = skeleton(shape, recipe, seed).to(device=device, dtype=recipe.precision.parameters)
    if recipe.precision.convert is not None:
        model = recipe.precision.convert(model)
    model = apply_transforms(model, recipe.transforms, context)
    return recipe.parallel.wrap(model, context) if recipe.parallel is not None else model


def apply_transforms(model: nn.Module, transforms: Sequence[Any], context: BuildContext) -> nn.Module:
    """Apply transforms in the order of their stages (stable within a stage)."""
    for transform in sorted(transforms, key=lambda t: t.stage):
        model = transform.apply(model, context)
    return model


def apply_runtime(recipe: Recipe) -> None:
    """Process-wide settings of a recipe (float32 matmul precision, TF32); once, at the start of a process."""
    torch.set_float32_matmul_precision(recipe.precision.matmul)
    torch.backends.cuda.matmul.allow_tf32 = recipe.precision.tf32
    torch.backends.cudnn.allow_tf32 = recipe.precision.tf32


def autocast(recipe: Recipe, device: str) -> Any:
    """The autocast context of a recipe, or a null context."""
    dtype = recipe.precision.autocast
    return nullcontext() if dtype is None else torch.autocast(device_type=device.split(":")[0], dtype=dtype)


@dataclass(frozen=True)
class StepReport:
    """What one training step tells: loss (nats), gradient norm before clipping, whether the update was left out.

    `scale` is the loss scale that this step was taken with; None without a scaler.
    """

    loss: Tensor
    gradient_norm: Tensor
    skipped: bool = False
    scale: float | None = None


class TrainingStep:
    """zero_grad → forward → loss → backward → clip → AdamW, as the recipe's slots say.

    Call it with x, y (batch, length) int64 on the model's device.  With `recipe.accumulate` = a the batch is cut
    into a micro-batches along dim 0.
    """

    def __init__(
        self, model: nn.Module, recipe: Recipe, *, learning_rate: float, device: str = "cpu", clip: float = 1.0,
        weight_decay: float = 0.1,
    ) -> None:  # fmt: skip
        self.model, self.recipe, self.device, self.clip = model, recipe, device, clip
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = (
            [p.detach().float().requires_grad_() for p in self.parameters] if recipe.precision.master_weights else None
        )
        self.optimizer = recipe.optimizer(
            self.masters or self.parameters, learning_rate=learning_rate, weight_decay=weight_decay
        )
        kind = device.split(":")[0]
        self.scaler = torch.amp.GradScaler(kind) if recipe.precision.scaler else None

    def __call__(self, x: Tensor, y: Tensor) -> StepReport:
        self.zero_grad()
        loss = self.forward_backward(x, y)
        if self.recipe.parallel is not None and self.recipe.parallel.synchronise is not None:
            self.recipe.parallel.synchronise(self.model)
        report = self.update(loss)
        for hook in self.recipe.after_step:
            hook()
        return report

    def zero_grad(self) -> None:
        """Drop the gradients of parameters and master weights."""
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self.parameters if self.masters else ():
            parameter.grad = None

    def forward_backward(self, x: Tensor, y: Tensor) -> Tensor:
        """Forward and backward over all micro-batches; returns the mean loss, detached."""
        parts = self.recipe.accumulate
        if x.shape[0] % parts:
            raise InputError(f"batch_size {x.shape[0]} cannot be cut into {parts} equal micro-batches")
        total = torch.zeros((), device=x.device)
        for part_x, part_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            with ExitStack() as stack:
                for context in self.recipe.step_contexts:
                    stack.enter_context(context())
                with autocast(self.recipe, self.device):
                    loss = self.model(part_x, part_y) / parts
                (self.scaler.scale(loss) if self.scaler else loss).backward()
            total += loss.detach().float()
        return total

    def update(self, loss: Tensor) -> StepReport:
        """Unscale, clip and apply the update; with a scaler a non-finite step is skipped."""
        targets = self.parameters
        if self.masters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
            targets = self.masters
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(targets, self.clip)
        skipped, scale = False, None
        if self.scaler:
            scale = self.scaler.get_scale()
            skipped = not bool(torch.isfinite(norm))
            self.scaler.step(self.optimizer)
            # "frozen" is the loop that leaves update() out.  GradScaler itself then stops the loop at its second
            # step with a RuntimeError (`numerics.missing_update_error`); where that guard is absent or worked round,
            # the scale never moves, and a gradient that overflows at it is skipped for ever.  That is what runs here.
            self.scaler.update(new_scale=None if self.recipe.precision.scaler == "dynamic" else scale)
        else:
            self.optimizer.step()
        self._copy_masters()
        return StepReport(loss=loss, gradient_norm=norm, skipped=skipped, scale=scale)

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for master, parameter in zip(self.masters or (), self.parameters if self.masters else (), strict=True):
            parameter.copy_(master)
