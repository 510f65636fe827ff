"""Tables about number formats: the dtype of every kind of tensor, gradients that underflow, norms on hard rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lmperf.model import StepReport, TrainingStep, autocast, build
from lmperf.recipe import BuildContext, Recipe
from lmperf.records import ModelShape


@dataclass(frozen=True)
class DtypeRow:
    """The number format of one kind of tensor in a training step, e.g. ("logits", "bfloat16")."""

    tensor: str
    dtype: str


@dataclass(frozen=True)
class NormRow:
    """One norm on one kind of row: share of finite outputs, largest |output|, largest error against fp64 (ε = 1e-5)."""

    case: str
    batch: int
    finite_share: float
    largest: float | None
    error: float | None


def underflow_share(model: nn.Module, *, dtype: torch.dtype | None = None, scale: float = 1.0) -> dict[str, float]:
    """Share of zeros among the gradients of each layer's weight matrices ("blocks.0", "head" …) and over all ("total").

    With a `dtype` the gradients count as it would hold them after times `scale` (the loss scale): zero or subnormal.
    Looks at the gradients that lie in the parameters.  The embeddings are left out, whose rows have a true gradient of
    zero where a batch does not use them, and so are vectors (norms, biases).  Empty where there are no gradients.
    """
    lost: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        layer = layer_of(name)
        if parameter.grad is None or parameter.dim() < 2 or layer in ("embedding", "position"):
            continue
        lost[layer] = lost.get(layer, 0) + int(_too_small(parameter.grad.detach(), dtype, scale).sum())
        sizes[layer] = sizes.get(layer, 0) + parameter.grad.numel()
    if not sizes:
        return {}
    return {"total": sum(lost.values()) / sum(sizes.values()), **{key: lost[key] / sizes[key] for key in sizes}}


def _too_small(gradient: Tensor, dtype: torch.dtype | None, scale: float) -> Tensor:
    if dtype is None:
        return gradient == 0
    return (gradient.float() * scale).to(dtype).float().abs() < torch.finfo(dtype).smallest_normal


def layer_of(parameter: str) -> str:
    """ "blocks.0.norm_1.weight" → "blocks.0"; "embedding.weight" → "embedding"; wrappers' prefixes are dropped."""
    parts = [part for part in parameter.split(".") if part not in ("module", "_orig_mod")]
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def dtype_table(
    recipe: Recipe, shape: ModelShape, *, device: str = "cpu", seed: int = 0, context: BuildContext | None = None
) -> list[DtypeRow]:
    """Number formats in one training step of a recipe's model: parameters, activations, logits, loss, gradients.

    The last row is no tensor's: what `torch.set_float32_matmul_precision` allows inside products of fp32 matrices.
    """
    model = build(shape, recipe, seed=seed, device=device, context=context)
    step = TrainingStep(model, recipe, learning_rate=1e-3, device=device)
    seen: dict[str, torch.dtype] = {}
    handles = [module.register_forward_hook(_note(seen, name)) for name, module in _watched(model)]
    generator = torch.Generator().manual_seed(seed)
    length = min(16, shape.context_length)
    tokens = torch.randint(shape.vocab_size, (2 * recipe.accumulate, length + 1), generator=generator).to(device)
    with autocast(recipe, device):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        logits = model.logits(model(tokens[:, :-1]))
    report = step(tokens[:, :-1], tokens[:, 1:])
    for handle in handles:
        handle.remove()
    kinds = _kinds(step, seen, loss, logits, report)
    rows = [DtypeRow(name, str(dtype).removeprefix("torch.")) for name, dtype in kinds]
    return [*rows, DtypeRow("products of fp32 matrices", recipe.precision.matmul)]


def _watched(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    first = model.blocks[0]
    yield "first linear's output", next(m for m in first.modules() if isinstance(m, nn.Linear))
    yield "norm's output", first.norm_1
    yield "residual stream", first


def _note(seen: dict[str, torch.dtype], name: str) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen[name] = output.dtype

    return hook


def _kinds(
    step: TrainingStep, seen: Mapping[str, torch.dtype], loss: Tensor, logits: Tensor, report: StepReport
) -> Iterator[tuple[str, torch.dtype]]:
    trained = step.masters or step.parameters
    moments = [state["exp_avg"].dtype for state in step.optimizer.state.values() if "exp_avg" in state]
    yield "parameters", step.parameters[0].dtype
    if step.masters:
        yield "master weights", step.masters[0].dtype
    yield from seen.items()
    yield "logits", logits.dtype
    yield "loss", loss.dtype
    yield "gradients", next(p.grad.dtype for p in step.parameters if p.grad is not None)
    yield "gradients for the update", next(p.grad.dtype for p in trained if p.grad is not None)
    yield "gradient norm", report.gradient_norm.dtype
    if moments:
        yield "optimizer's moments", moments[0]


def missing_update_error() -> str | None:
    """What `GradScaler` says at the second step of a loop that leaves `update()` out; None where it says nothing."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    try:
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(parameter.sum()).backward()
            scaler.step(optimizer)
    except RuntimeError as error:
        return str(error)
    return None


#: Kinds of rows that tell norms apart, as (name, scale of the noise, offset): ordinary, tiny variance, constant.
ROW_CASES = (("ordinary", 1.0, 0.0), ("tiny", 1e-4, 0.0), ("tiny on an offset", 1e-3, 10.0), ("constant", 0.0, 3.0))
BATCHES = (8, 188, 189, 512, 2048, 4096)


def norm_table(norm: Callable[[int], nn.Module], *, dim: int = 64, seed: int = 0) -> list[NormRow]:
    """A norm on rows that are easy and hard, by batch (B of x (B, 1, dim)): is it finite, how far off from fp64."""
    module = norm(dim)
    return [
        _norm_row(module, case, batch, _rows(batch, dim, noise, offset, seed))
        for case, noise, offset in ROW_CASES
        for batch in BATCHES
    ]


def _rows(batch: int, dim: int, noise: float, offset: float, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 1, dim, generator=generator) * noise + offset


@torch.no_grad()
def _norm_row(module: nn.Module, case: str, batch: int, x: Tensor) -> NormRow:
    got = module(x).double()
    true = nn.functional.layer_norm(x.double(), (x.shape[-1],), eps=1e-5)
    share = float(torch.isfinite(got).double().mean())
    if share < 1:
        return NormRow(case, batch, share, None, None)
    largest, error = float(got.abs().max()), float((got - true).abs().max())
    return NormRow(case, batch, share, largest if math.isfinite(largest) else None, error)
