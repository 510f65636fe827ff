"""Memory of one step: tensor peaks by phase, the resident peak, an analytic table and the share that it explains."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from lmperf.devices import Device, Step
from lmperf.records import Metric
from lmperf.workloads.base import Prepared

MARK = "lmperf: the weighed step"
BACKWARD = "autograd::engine::evaluate_function"  # the profiler's name for each node of the backward pass


@dataclass(frozen=True)
class Peaks:
    """Bytes of tensors: alive before the step, at most in its forward part, at most in the whole step."""

    before: int
    forward: int | None
    step: int
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Weighing:
    """All that the memory sample of one arm found, in bytes."""

    peaks: Peaks
    resident: int | None
    table: dict[str, int | None]

    def metrics(self) -> dict[str, Metric]:
        """peak_memory_bytes (tensors), forward_peak_bytes, resident_peak_bytes (the process)."""
        values = {
            "peak_memory_bytes": self.peaks.step,
            "forward_peak_bytes": self.peaks.forward,
            "resident_peak_bytes": self.resident,
        }
        return {name: Metric("bytes", float(value)) for name, value in values.items() if value is not None}

    def details(self, after_build: int | None) -> dict[str, Any]:
        """Phases, counters, the table, and the share of the peak that it explains."""
        known = sum(value for value in self.table.values() if value)
        return {
            "after_build_bytes": after_build,
            "before_step_bytes": self.peaks.before,
            "counters": self.peaks.counters,
            "table": self.table,
            "explained": known / self.peaks.step if self.peaks.step else None,
        }


def peaks(step: Step, device: Device) -> Peaks:
    """Tensor peaks of one call of `step`: CUDA's counters where there are some, else the profiler's memory events."""
    device.reset_peak()
    before = device.memory()
    if before:
        step()
        device.synchronise()
        after = device.memory()
        return Peaks(before["allocated"], None, after["allocated_peak"], after)
    return cpu_peaks(step)


def cpu_peaks(step: Step) -> Peaks:
    """Peaks on the CPU from the profiler's allocations and frees, summed in time order over the second of two steps.

    The profiler leaves out frees of what was allocated before it started (last step's gradients), so the sum is
    anchored at its end, where what is alive can be counted; the first step only makes all that the second one frees.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
        with record_function(MARK):
            step()
    alive = live_tensor_bytes()
    events = recorded.profiler.kineto_results.events()
    begin = min(e.start_ns() for e in events if e.name() == MARK)
    backward = min(
        (e.start_ns() for e in events if e.name().startswith(BACKWARD) and e.start_ns() > begin), default=None
    )
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return anchored_peaks(changes, begin, backward, alive)


def anchored_peaks(changes: Sequence[tuple[int, int]], begin: int, backward: int | None, alive: int) -> Peaks:
    """Peaks of the step from time `begin` on; the (time, bytes) changes end with `alive` bytes alive."""
    current = alive - sum(size for _, size in changes)
    before = top = forward = 0
    for when, size in changes:
        current += size
        if when < begin:
            before = current
            continue
        top = max(top, current)
        if backward is None or when < backward:
            forward = max(forward, current)
    return Peaks(before or alive, max(forward, before), max(top, before, alive))


def live_tensors() -> Iterator[Tensor]:
    """Every tensor that Python knows of, and their gradients."""
    for item in gc.get_objects():
        # type() and not isinstance: asking a lazy module or a weak proxy for its class can run its code.
        if issubclass(type(item), Tensor):
            yield item
            if item.is_leaf and item.grad is not None:
                yield item.grad


def live_tensor_bytes(device: str = "cpu") -> int:
    """Bytes of the distinct storages of all living tensors on a device."""
    return storage_bytes(tensor for tensor in live_tensors() if tensor.device.type == device)


def storage_bytes(tensors: Any) -> int:
    """Bytes of the distinct storages behind tensors; those without one of their own (meta, fake, sparse) count 0."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and type(tensor) in (Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.data_ptr():
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def resident_peak(step: Step) -> int | None:
    """The process's peak resident set over two calls of `step`, helpers' proportional share added; None if unreadable.

    `ru_maxrss` is inherited from whoever forked us; the high-water mark reset through clear_refs is not.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    step()
    step()
    helpers = sum(proportional_bytes(child.pid) for child in psutil.Process().children(recursive=True))
    text = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()
    return int(text[0]) * 1024 + helpers if text else None


def proportional_bytes(pid: int) -> int:
    """A process's proportional share of resident memory (shared pages divided among their users)."""
    try:
        return int(Path(f"/proc/{pid}/smaps_rollup").read_text().partition("\nPss:")[2].split()[0]) * 1024
    except (OSError, IndexError):
        return 0


def analytic_table(prepared: Prepared) -> dict[str, int | None]:
    """Bytes of parameters, gradients, optimizer moments, activations kept for backward, and the KV cache.

    Gradients are counted in full: at the peak of backward all of them exist.  Moments are read from the optimizers
    alive in this process.  None where the word has no meaning for the workload.
    """
    parameters = list(prepared.model.parameters()) if prepared.model is not None else []
    saved = saved_bytes(prepared.step, parameters)
    table: dict[str, int | None] = {"parameters": None, "gradients": None, "moments": None}
    if parameters:
        trained = storage_bytes(p for p in parameters if p.requires_grad)
        moments = storage_bytes(optimizer_tensors())
        trains = saved > 0 or moments > 0 or any(p.grad is not None for p in parameters)
        table = {"parameters": storage_bytes(parameters), "gradients": trained if trains else 0, "moments": moments}
    return {**table, "activations": saved, "kv_cache": _cache(prepared)}


def _cache(prepared: Prepared) -> int | None:
    known = prepared.once.get("kv_cache_bytes")
    return int(known[1]) if known else None


def optimizer_tensors() -> list[Tensor]:
    """State tensors of all optimizers in this process."""
    found = [item for item in gc.get_objects() if issubclass(type(item), torch.optim.Optimizer)]
    states = [value for optimizer in found for state in optimizer.state.values() for value in state.values()]
    return [value for value in states if isinstance(value, Tensor)]


@dataclass
class Ledger:
    """Bytes of distinct storages kept for backward now, and at most; `own` are the parameters' addresses."""

    own: frozenset[int]
    users: dict[int, int] = field(default_factory=dict)
    current: int = 0
    top: int = 0

    def enter(self, address: int, size: int) -> None:
        """One more saved tensor uses this storage."""
        self.users[address] = self.users.get(address, 0) + 1
        if self.users[address] == 1:
            self.current += size
            self.top = max(self.top, self.current)

    def leave(self, address: int, size: int) -> None:
        """One saved tensor of this storage is gone."""
        self.users[address] -= 1
        if self.users[address] == 0:
            self.current -= size


class Kept:
    """A tensor that autograd keeps; it leaves the ledger when backward lets go of it."""

    def __init__(self, tensor: Tensor, ledger: Ledger) -> None:
        self.tensor, self.ledger, self.key = tensor, ledger, (0, 0)
        if tensor.layout == torch.strided and type(tensor) in (Tensor, torch.nn.Parameter):
            storage = tensor.untyped_storage()
            if storage.data_ptr() and storage.data_ptr() not in ledger.own:
                self.key = (storage.data_ptr(), storage.nbytes())
                ledger.enter(*self.key)

    def __del__(self) -> None:
        if self.key[0]:
            self.ledger.leave(*self.key)


def saved_bytes(step: Step, parameters: Sequence[Tensor] = ()) -> int:
    """Most bytes of distinct storages that one call of `step` keeps for backward at a time, parameters left out."""
    ledger = Ledger(frozenset(p.untyped_storage().data_ptr() for p in parameters))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: Kept(tensor, ledger), lambda kept: kept.tensor):
        step()
    return ledger.top
