"""Gradient averaging over ranks, written out, with an account of what goes over the wire.

Payloads are counted as a ring sends them (Thakur et al. 2005): all-reduce 2(n-1)/n · size a rank, all-gather
(n-1) · own part.  For n = 2 that is what gloo's own algorithms send too.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

BUCKET_BYTES = 1 << 20  # ddp_overlap: gradients are sent as soon as this much is ready


@dataclass
class Account:
    """What one rank sent and how long it was busy with it since `take` was last called."""

    sent_bytes: float = 0.0
    dense_bytes: float = 0.0  # what an fp32 all-reduce of the same gradients would have sent
    blocked_s: float = 0.0  # inside collectives
    compress_s: float = 0.0  # packing and unpacking
    extra: dict[str, float] = field(default_factory=dict)

    def take(self) -> Account:
        """The counts so far; starts again from nothing."""
        taken = Account(self.sent_bytes, self.dense_bytes, self.blocked_s, self.compress_s, dict(self.extra))
        self.__init__()  # type: ignore[misc]
        return taken

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        """Add the time of the block to `name` ("blocked_s" or "compress_s")."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - start)


ACCOUNT = Account()  # of this process


def group_place() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) without a process group, where an average is the value itself."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def world_size() -> int:
    """Ranks that share the work; 1 without a process group."""
    return group_place()[1]


def ring_bytes(size: float) -> float:
    """Bytes that one rank sends in a ring all-reduce of `size` bytes."""
    return 2 * (world_size() - 1) / world_size() * size


def all_reduce(tensor: Tensor, *, wait: bool = True) -> Any:
    """Sum `tensor` over the ranks in place, counted; with wait=False the pending work is returned."""
    ACCOUNT.sent_bytes += ring_bytes(tensor.numel() * tensor.element_size())
    if world_size() == 1 and wait:
        return None
    if not wait:
        return dist.all_reduce(tensor, async_op=True)
    with ACCOUNT.clock("blocked_s"):
        return dist.all_reduce(tensor)


def all_gather(tensor: Tensor) -> list[Tensor]:
    """The ranks' tensors (all of one size and type), counted."""
    if world_size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(world_size())]
    ACCOUNT.sent_bytes += (world_size() - 1) * tensor.numel() * tensor.element_size()
    with ACCOUNT.clock("blocked_s"):
        dist.all_gather(parts, tensor)
    return parts


def gradients(model: nn.Module) -> list[Tensor]:
    """The gradients of all trained parameters in order; a parameter that took no part gets zeros."""
    found = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(parameter.grad)
    return found


def count_dense(grads: Sequence[Tensor]) -> None:
    """Note what a plain fp32 all-reduce of `grads` would send."""
    ACCOUNT.dense_bytes += ring_bytes(4 * sum(g.numel() for g in grads))


def flatten(grads: Sequence[Tensor]) -> Tensor:
    """One vector of all gradients."""
    return torch.cat([g.reshape(-1) for g in grads])


def scatter_back(flat: Tensor, grads: Sequence[Tensor]) -> None:
    """Copy the parts of `flat` into `grads`."""
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def keep(model: nn.Module, _: Any) -> nn.Module:
    """Wrap nothing: every rank builds the same weights from the same seed, so nothing need be broadcast."""
    return model


def average_per_parameter(model: nn.Module) -> None:
    """One all-reduce for each parameter's gradient, one after the other."""
    grads = gradients(model)
    count_dense(grads)
    for grad in grads:
        all_reduce(grad)
        grad /= world_size()


def average_flat(model: nn.Module) -> None:
    """All gradients in one vector, one all-reduce."""
    grads = gradients(model)
    count_dense(grads)
    flat = flatten(grads)
    all_reduce(flat)
    scatter_back(flat.div_(world_size()), grads)


@dataclass
class Bucket:
    """Parameters whose gradients travel together; `ready` counts those that have theirs."""

    parameters: list[nn.Parameter]
    ready: int = 0
    flat: Tensor | None = None
    work: Any = None

    def send(self) -> None:
        """Start the all-reduce of what is ready (again, when a second micro-batch added to it)."""
        if self.work is not None:
            self.work.wait()
        self.flat = flatten([p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters])
        self.work, self.ready = all_reduce(self.flat, wait=False), 0


_BUCKETS: weakref.WeakKeyDictionary[nn.Module, list[Bucket]] = weakref.WeakKeyDictionary()


def overlap(model: nn.Module, _: Any, *, bucket_bytes: int = BUCKET_BYTES) -> nn.Module:
    """Hook the parameters so that each bucket of gradients is sent while backward computes the next ones."""
    buckets: list[Bucket] = []
    size = 0
    for parameter in reversed([p for p in model.parameters() if p.requires_grad]):  # backward's order, about
        if not buckets or size >= bucket_bytes:
            buckets.append(Bucket([]))
            size = 0
        buckets[-1].parameters.append(parameter)
        size += parameter.numel() * parameter.element_size()
        parameter.register_post_accumulate_grad_hook(_announce(buckets[-1]))
    _BUCKETS[model] = buckets
    return model


def _announce(bucket: Bucket) -> Any:
    def hook(_: Tensor) -> None:
        bucket.ready += 1
        if bucket.ready == len(bucket.parameters):
            bucket.send()

    return hook


def finish_overlap(model: nn.Module) -> None:
    """Wait for the buckets on their way and put the averages in place."""
    count_dense(gradients(model))
    for bucket in _BUCKETS[model]:
        if bucket.ready or bucket.work is None:  # a parameter took no part
            bucket.send()
        with ACCOUNT.clock("blocked_s"):
            bucket.work.wait()
        if bucket.flat is None:
            raise RuntimeError("a bucket was waited for before it was sent")
        scatter_back(bucket.flat.div_(world_size()), [p.grad for p in bucket.parameters if p.grad is not None])
        bucket.work = bucket.flat = None
