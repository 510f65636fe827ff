"""Sharded state: an AdamW whose moments are divided among the ranks, FSDP2, and PyTorch's own DDP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from lmperf import reference
from lmperf.implementations.collectives import ACCOUNT, all_gather, group_place, ring_bytes
from lmperf.recipe import BuildContext


def divide(sizes: Sequence[int], parts: int) -> list[int]:
    """The owner of each item: the largest first, each to the part that has least so far."""
    loads, owners = [0] * parts, [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[item] = loads.index(min(loads))
        loads[owners[item]] += sizes[item]
    return owners


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW that keeps moments for its own parameters only (ZeRO stage 1, Rajbhandari et al. 2020).

    Gradients must already be averaged.  Each rank updates its part, then all parts are gathered.
    """

    def __init__(self, groups: list[dict[str, Any]], *, learning_rate: float) -> None:
        super().__init__(groups, {"lr": learning_rate, "betas": (0.9, 0.95), "eps": 1e-8})
        self.rank, self.world_size = group_place()
        everything = [p for group in self.param_groups for p in group["params"]]
        owners = divide([p.numel() for p in everything], self.world_size)
        self.parts = [[p for p, o in zip(everything, owners, strict=True) if o == r] for r in range(self.world_size)]
        mine = {id(p) for p in self.parts[self.rank]}
        own = [{**group, "params": [p for p in group["params"] if id(p) in mine]} for group in self.param_groups]
        self.inner = torch.optim.AdamW(own)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update this rank's parameters, then fetch the others' from their owners."""
        for group, own in zip(self.param_groups, self.inner.param_groups, strict=True):
            own.update({name: group[name] for name in ("lr", "betas", "eps", "weight_decay")})  # schedules
        self.inner.step()
        if self.world_size > 1:
            self._share()

    def _share(self) -> None:
        longest = max(sum(p.numel() for p in part) for part in self.parts)
        mine = [p.reshape(-1) for p in self.parts[self.rank]]
        sample = self.param_groups[0]["params"][0]
        filled = sum(p.numel() for p in mine)
        flat = torch.cat([*mine, torch.zeros(longest - filled, dtype=sample.dtype, device=sample.device)])
        for rank, gathered in enumerate(all_gather(flat)):
            if rank == self.rank:
                continue
            sizes = [p.numel() for p in self.parts[rank]]
            for parameter, part in zip(self.parts[rank], gathered[: sum(sizes)].split(sizes), strict=True):
                parameter.copy_(part.view_as(parameter))


@dataclass(frozen=True)
class ZeroOptimizer:
    """The optimizer slot of `zero1`; `unsharded` is what it must agree with."""

    def __call__(
        self, parameters: Iterable[nn.Parameter], *, learning_rate: float, weight_decay: float = 0.1
    ) -> torch.optim.Optimizer:
        """See `reference.adamw`."""
        return ShardedAdamW(reference.decay_groups(parameters, weight_decay), learning_rate=learning_rate)

    @property
    def unsharded(self) -> Any:
        """The reference AdamW."""
        return reference.adamw


@dataclass(frozen=True)
class TorchDDP:
    """Wraps the model in PyTorch's DistributedDataParallel with buckets of `bucket_mb`."""

    bucket_mb: float = 25.0

    def __call__(self, model: nn.Module, context: BuildContext) -> nn.Module:
        """The wrapped model; its backward averages the gradients."""
        from torch.nn.parallel import DistributedDataParallel

        wrapped = DistributedDataParallel(model, bucket_cap_mb=self.bucket_mb, gradient_as_bucket_view=True)
        size = ring_bytes(total_bytes(model))
        wrapped.register_forward_pre_hook(_counter(size, size))
        return wrapped


def total_bytes(model: nn.Module) -> int:
    """Bytes of all trained parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)


def _counter(sent: float, dense: float) -> Any:
    def count(module: nn.Module, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            ACCOUNT.sent_bytes += sent
            ACCOUNT.dense_bytes += dense

    return count


@dataclass(frozen=True)
class FullyShard:
    """FSDP2: parameters, gradients and moments sharded by block (Zhao et al. 2023, arXiv 2304.11277)."""

    def __call__(self, model: nn.Module, context: BuildContext) -> nn.Module:
        """Shard every block, then the rest."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        size = dist.get_world_size()
        mesh = init_device_mesh(context.device.split(":")[0], (size,))
        blocks = sum(total_bytes(block) for block in model.blocks)
        every = total_bytes(model)
        # Gather all for forward, the blocks again for backward (the root stays whole), scatter all gradients.
        sent = (size - 1) / size * (every + blocks) + self._scatter_bytes(every)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.register_forward_pre_hook(_counter(sent, ring_bytes(every)))
        return model

    def _scatter_bytes(self, size: int) -> float:
        # A ring's reduce-scatter is half of an all-reduce; gloo does a whole one and keeps a part.
        return ring_bytes(size) * (1.0 if dist.get_backend() == "gloo" else 0.5)
