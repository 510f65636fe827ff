"""Lossy gradient averages with error feedback: what one step leaves out is added to the next one's gradient."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from lmperf.implementations.collectives import (
    ACCOUNT,
    all_gather,
    all_reduce,
    count_dense,
    flatten,
    gradients,
    group_place,
    ring_bytes,
    scatter_back,
    world_size,
)

#: What a model's compressors remember from step to step, by name; it goes when the model goes.
_MEMORY: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def memory_of(model: nn.Module) -> dict[str, Any]:
    """The compressors' memory of this model."""
    return _MEMORY.setdefault(model, {})


@dataclass(frozen=True)
class BFloat16:
    """Gradients travel as bfloat16 and are averaged in fp32 (an all-gather, so that no sum is rounded)."""

    lossy: ClassVar[bool] = True

    def __call__(self, model: nn.Module) -> None:
        """Average the model's gradients in place."""
        grads = gradients(model)
        count_dense(grads)
        with ACCOUNT.clock("compress_s"):
            flat = flatten(grads).to(torch.bfloat16)
        parts = all_gather(flat.view(torch.uint8))  # gloo knows no bfloat16
        with ACCOUNT.clock("compress_s"):
            mean = torch.stack([part.view(torch.bfloat16).float() for part in parts]).mean(dim=0)
            scatter_back(mean, grads)


def pack_signs(values: Tensor) -> Tensor:
    """One bit for each value (1: not negative), eight to a byte: (n,) → uint8 (⌈n / 8⌉,)."""
    return torch.from_numpy(np.packbits((values >= 0).cpu().numpy())).to(values.device)


def unpack_signs(packed: Tensor, count: int) -> Tensor:
    """The inverse of `pack_signs`: ±1 as fp32 (count,)."""
    bits = torch.from_numpy(np.unpackbits(packed.cpu().numpy(), count=count)).to(packed.device)
    return bits.float().mul_(2).sub_(1)


@dataclass(frozen=True)
class OneBit:
    """The sign of each gradient and one mean magnitude a tensor (Seide et al. 2014; 1-bit with error feedback)."""

    lossy: ClassVar[bool] = True

    def __call__(self, model: nn.Module) -> None:
        """Average the model's gradients in place."""
        grads = gradients(model)
        count_dense(grads)
        memory = memory_of(model)
        sizes = [g.numel() for g in grads]
        with ACCOUNT.clock("compress_s"):
            wanted = flatten(grads) + memory.get("one_bit", 0.0)
            scales = torch.stack([part.abs().mean() for part in wanted.split(sizes)])
            packed = pack_signs(wanted)
            payload = torch.cat([packed, scales.view(torch.uint8)])
        parts = all_gather(payload)
        with ACCOUNT.clock("compress_s"):
            decoded = [self._decode(part, sizes, len(packed)) for part in parts]
            memory["one_bit"] = wanted - decoded[group_place()[0]]
            scatter_back(torch.stack(decoded).mean(dim=0), grads)

    def _decode(self, payload: Tensor, sizes: Sequence[int], bytes_of_signs: int) -> Tensor:
        scales = payload[bytes_of_signs:].clone().view(torch.float32)
        lengths = torch.tensor(sizes, device=scales.device)
        return unpack_signs(payload[:bytes_of_signs], sum(sizes)) * scales.repeat_interleave(lengths)


def average_largest(grads: Sequence[Tensor], density: float, memory: dict[str, Any], name: str) -> None:
    """Average only the largest `density` share of the entries (by magnitude over all `grads`), with error feedback."""
    with ACCOUNT.clock("compress_s"):
        wanted = flatten(grads) + memory.get(name, 0.0)
        kept = max(1, int(density * wanted.numel()))
        places = wanted.abs().topk(kept, sorted=False).indices
        values = wanted[places]
        memory[name] = wanted.index_fill(0, places, 0.0)
    all_places, all_values = all_gather(places.to(torch.int32)), all_gather(values)
    with ACCOUNT.clock("compress_s"):
        total = torch.zeros_like(wanted)
        for where, what in zip(all_places, all_values, strict=True):
            total.index_add_(0, where.long(), what)
        scatter_back(total.div_(world_size()), grads)


@dataclass(frozen=True)
class TopK:
    """The largest entries only, as (place, value) pairs (Stich et al. 2018, arXiv 1809.07599)."""

    density: float = 0.01
    lossy: ClassVar[bool] = True

    def __call__(self, model: nn.Module) -> None:
        """Average the model's gradients in place."""
        grads = gradients(model)
        count_dense(grads)
        average_largest(grads, self.density, memory_of(model), "top_k")


@dataclass(frozen=True)
class ExpertTopK:
    """Only the experts' gradients are cut to their largest entries; everything else is averaged exactly."""

    density: float = 0.1
    lossy: ClassVar[bool] = True

    def __call__(self, model: nn.Module) -> None:
        """Average the model's gradients in place; notes the experts' bytes apart."""
        count_dense(gradients(model))
        named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        dense = [grad for name, grad in named if ".experts." not in name]
        flat = flatten(dense)
        all_reduce(flat)
        scatter_back(flat.div_(world_size()), dense)
        experts = [grad for name, grad in named if ".experts." in name]
        before = ACCOUNT.sent_bytes
        average_largest(experts, self.density, memory_of(model), "experts")
        sizes = 4 * sum(grad.numel() for grad in experts)
        self._note("expert_bytes", ACCOUNT.sent_bytes - before)
        self._note("expert_dense_bytes", ring_bytes(sizes))

    def _note(self, name: str, value: float) -> None:
        ACCOUNT.extra[name] = ACCOUNT.extra.get(name, 0.0) + value


@dataclass(frozen=True)
class PowerSGD:
    """Each matrix as a product of two thin ones of `rank` columns (Vogels et al. 2019, algorithm 1); vectors whole."""

    rank: int = 2
    lossy: ClassVar[bool] = True

    def __call__(self, model: nn.Module) -> None:
        """Average the model's gradients in place: two all-reduces of thin factors and one of the vectors."""
        grads = gradients(model)
        count_dense(grads)
        memory = memory_of(model)
        large = [g for g in grads if self.pays(g)]
        self._average_exactly([g for g in grads if not self.pays(g)])
        with ACCOUNT.clock("compress_s"):
            wanted = [g.flatten(1) + e for g, e in zip(large, self._errors(memory, large), strict=True)]
            left = [m @ q for m, q in zip(wanted, self._factors(memory, large), strict=True)]
        self._average_exactly(left)
        with ACCOUNT.clock("compress_s"):
            left = [torch.linalg.qr(p).Q for p in left]
            right = [m.T @ p for m, p in zip(wanted, left, strict=True)]
        self._average_exactly(right)
        with ACCOUNT.clock("compress_s"):
            memory["power_q"] = right  # warm start of the next step
            memory["power_error"] = [m - p @ q.T for m, p, q in zip(wanted, left, right, strict=True)]
            for grad, p, q in zip(large, left, right, strict=True):
                grad.copy_((p @ q.T).view_as(grad))

    def pays(self, grad: Tensor) -> bool:
        """Whether the two factors are smaller than the matrix."""
        if grad.dim() < 2:
            return False
        rows, columns = grad.flatten(1).shape
        return (rows + columns) * self.rank < rows * columns and min(rows, columns) >= self.rank

    def _errors(self, memory: dict[str, Any], large: list[Tensor]) -> list[Any]:
        return memory.get("power_error") or [0.0] * len(large)

    def _factors(self, memory: dict[str, Any], large: list[Tensor]) -> list[Tensor]:
        if "power_q" not in memory:  # the same start on every rank
            generator = torch.Generator().manual_seed(0)
            shapes = [(grad.flatten(1).shape[1], self.rank) for grad in large]
            memory["power_q"] = [torch.randn(s, generator=generator).to(g) for s, g in zip(shapes, large, strict=True)]
        factors: list[Tensor] = memory["power_q"]
        return factors

    def _average_exactly(self, tensors: list[Tensor]) -> None:
        if tensors:
            flat = flatten(tensors)
            all_reduce(flat)
            scatter_back(flat.div_(world_size()), tensors)
