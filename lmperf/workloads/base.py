"""The interface between what is run (workloads) and how it is timed: a prepared, zero-argument step and its checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmperf.recipe import Recipe
from lmperf.records import ArmSpec, Cell, InputError, SessionSpec


@dataclass(frozen=True)
class Setting:
    """Everything a workload is prepared from, inside a fresh process: spec, arm, cell, the composed recipe, a seed."""

    spec: SessionSpec
    arm: ArmSpec
    cell: Cell
    recipe: Recipe
    seed: int
    scratch: Path  # this process sample's own folder, removed afterwards

    @property
    def device(self) -> str:
        """The device's name, "cpu" or "cuda"."""
        return self.spec.device

    def param(self, name: str, default: Any = None) -> Any:
        """The cell's parameter, else the session's option, else `default`."""
        return self.cell.params.get(name, self.spec.options.get(name, default))


@dataclass(frozen=True)
class CheckOutcome:
    """Agreement with the reference on fresh inputs: `passed`, the largest error seen and what was compared."""

    passed: bool
    message: str
    max_error: float | None = None


@dataclass
class Observations:
    """Quantities that a step measures itself (ttft_s, itl_s, wait_share, bytes_on_wire …), emptied before timing."""

    units: dict[str, str] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, unit: str, value: float) -> None:
        """Append one observation of the metric `name`."""
        self.units[name] = unit
        self.values.setdefault(name, []).append(value)

    def clear(self) -> None:
        """Forget what warm-up observed."""
        self.values.clear()


@dataclass
class Prepared:
    """A workload ready for the clock.

    `step` is one zero-argument call (set-up and input creation are outside; it rotates over ≥ 4 input batches itself).
    `check(seed)` compares with the reference on fresh inputs, forward and gradients, at the arm's fidelity.
    `tokens_per_step` and `flops_per_step` are None where the word has no meaning.  `once` holds metrics known without
    timing, name → (unit, value): model_bytes, kv_cache_bytes …  `close` ends helpers (worker processes, ranks).
    """

    step: Callable[[], Any]
    check: Callable[[int], CheckOutcome] | None = None
    tokens_per_step: float | None = None
    flops_per_step: float | None = None
    observations: Observations = field(default_factory=Observations)
    once: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    close: Callable[[], None] = lambda: None
    model: Any = None  # the built model, for the memory table, where there is one
    before_block: Callable[[], Any] = lambda: None  # outside the clock, before each timed block (cold page cache)


Workload = Callable[[Setting], Prepared]

WORKLOADS: dict[str, Workload] = {}


class Unsupported(RuntimeError):
    """Raised by a variant or workload that cannot run here; the message says why (status `unsupported`)."""


def workload(name: str) -> Callable[[Workload], Workload]:
    """Register the decorated `Setting -> Prepared` function under a workload's name."""

    def register(function: Workload) -> Workload:
        WORKLOADS[name] = function
        return function

    return register


def get_workload(name: str) -> Workload:
    """The workload of this name; all modules of `lmperf.workloads` are imported on first use."""
    import importlib
    import pkgutil

    import lmperf.workloads

    if name not in WORKLOADS:
        for module in pkgutil.iter_modules(lmperf.workloads.__path__):
            importlib.import_module(f"lmperf.workloads.{module.name}")
    if name not in WORKLOADS:
        raise InputError(f"workload {name!r} is unknown; allowed: {', '.join(sorted(WORKLOADS))}")
    return WORKLOADS[name]
