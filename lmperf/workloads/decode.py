"""Workload `decode`: one token at a time with a key-value cache, as generation spends its time (compression axis)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import torch
from torch import Tensor, nn

from lmperf import registry
from lmperf.implementations.model_size import linear_weights, memory_bytes, token_flops, write_weights
from lmperf.model import apply_runtime, apply_transforms, autocast, build, skeleton
from lmperf.recipe import BuildContext
from lmperf.records import InputError, ModelShape
from lmperf.workloads.base import CheckOutcome, Prepared, Setting, workload


class FixedCache:
    """Keys and values in buffers of one size, made at the first use; `length` may be set back to decode again."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.length, self.capacity = 0, capacity
        self._buffers: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v (batch, kv_heads, new, d) after `length` tokens; returns views of everything so far."""
        held = self._buffers[layer]
        if held is None:
            size = (*k.shape[:2], self.capacity, k.shape[-1])
            held = self._buffers[layer] = (k.new_zeros(size), v.new_zeros(size))
        end = self.length + k.shape[2]
        for buffer, new in zip(held, (k, v), strict=True):
            buffer[:, :, self.length : end] = new
        return held[0][:, :, :end], held[1][:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` new tokens."""
        self.length += tokens


def random_tokens(shape: ModelShape, size: tuple[int, int], seed: int, device: str) -> Tensor:
    """Uniform tokens of `size` (batch, length) int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(shape.vocab_size, size, generator=generator).to(device)


def _calibration(setting: Setting, shape: ModelShape) -> Iterator[tuple[Tensor, Tensor]]:
    """Four small (x, y) batches: speed and size do not depend on what the weights were calibrated on."""
    length = min(64, shape.context_length)
    for number in range(4):
        tokens = random_tokens(shape, (4, length + 1), setting.seed * 100 + number, setting.device)
        yield tokens[:, :-1], tokens[:, 1:]


def finished_model(setting: Setting) -> nn.Module:
    """The arm's model after its `transforms` and `finish`, in evaluation mode."""
    shape = setting.recipe.shape(setting.spec.model)
    context = BuildContext(shape, setting.device, setting.seed, lambda: _calibration(setting, shape))
    apply_runtime(setting.recipe)
    model = build(setting.spec.model, setting.recipe, seed=setting.seed, device=setting.device, context=context)
    return apply_transforms(model, setting.recipe.finish, context).eval()


def dense_twin(model: nn.Module, setting: Setting) -> nn.Module:
    """A plain fp32 model with the weights that the arm's compressed ones stand for: the naive form of the same arm."""
    shape = setting.recipe.shape(setting.spec.model)
    twin = skeleton(shape, setting.recipe.replace(transforms=(), finish=()), setting.seed).to(setting.device)
    state = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    state |= {f"{path}.weight": weight for path, weight in linear_weights(model)}
    wanted = twin.state_dict()
    twin.load_state_dict({name: value.float() for name, value in state.items() if name in wanted}, strict=False)
    return twin.eval()


@torch.inference_mode()
def _decode(model: nn.Module, setting: Setting, tokens: Tensor, cache: FixedCache) -> Tensor:
    with autocast(setting.recipe, setting.device):
        return model.logits(model(tokens, cache=cache)[:, -1])


def _check(model: nn.Module, setting: Setting, past: int, seed: int) -> CheckOutcome:
    """Logits of one token decoded after `past` others against the dense twin's full forward pass in fp32."""
    shape = model.shape
    tokens = random_tokens(shape, (2, past + 1), seed, setting.device)
    cache = FixedCache(shape.layers, past + 1)
    if past:
        _decode(model, setting, tokens[:, :-1], cache)
    found = _decode(model, setting, tokens[:, -1:], cache).float()
    with torch.inference_mode():
        twin = dense_twin(model, setting)
        wanted = twin.logits(twin(tokens)[:, -1])
    error = float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    entries = [registry.get(key, setting.spec.plugins) for key in setting.arm.variants]
    allowed = max([1e-4, *(entry.rtol for entry in entries)])
    message = f"relative RMS error of the logits {error:.2e}, allowed {allowed:.0e}"
    return CheckOutcome(passed=error <= allowed, message=message, max_error=error)


@workload("decode")
def decode(setting: Setting) -> Prepared:
    """One token for each of `batch` sequences (default 1) after `length` cached tokens (default: half the context)."""
    shape = setting.recipe.shape(setting.spec.model)
    past, batch = int(setting.param("length", shape.context_length // 2)), int(setting.param("batch", 1))
    if not 0 < past < shape.context_length:
        raise InputError(f"decode: length {past} is out of range; allowed: 1 to {shape.context_length - 1}")
    model = finished_model(setting)
    cache = FixedCache(shape.layers, past + 1)
    _decode(model, setting, random_tokens(shape, (batch, past), setting.seed, setting.device), cache)
    tokens = cycle([random_tokens(shape, (batch, 1), setting.seed + n, setting.device) for n in range(1, 5)])

    def step() -> Tensor:
        cache.length = past
        return _decode(model, setting, next(tokens), cache).argmax(dim=-1)

    dense, effective = (batch * token_flops(model, past=past, effective=kind) for kind in (False, True))
    once = {
        "model_bytes": ("B", float(memory_bytes(model))),
        "model_disk_bytes": ("B", float(write_weights(model, setting.scratch / "weights.bin"))),
        "flops_dense": ("FLOP", dense),
        "flops_effective": ("FLOP", effective),
    }
    return Prepared(
        step=step, check=lambda seed: _check(model, setting, past, seed), tokens_per_step=float(batch),
        flops_per_step=dense, once=once, model=model,
    )  # fmt: skip
