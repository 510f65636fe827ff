"""What an attention function tells about itself beside its values: read by the operator workload and the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Facts:
    """Facts of an attention function; the defaults hold for one that declares nothing."""

    window: int | None = None  # keys that a query sees at most, for counting FLOPs
    dense: bool = True  # False: FLOPs depend on the data and are not counted
    static_shapes: bool = False  # compiled for each shape: checks use the measured shape only
    no_cpu_backward: str | None = None  # why there is no backward on a CPU
    arrange: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = (
        None  # layout, outside the clock
    )
    recall: Callable[[Tensor, Tensor], float] | None = None  # recall of the true top keys for q, k


def declare(function: F, facts: Facts) -> F:
    """Attach facts to an attention function and return it."""
    function.facts = facts  # type: ignore[attr-defined]
    return function


def facts_of(function: Callable[..., Any]) -> Facts:
    """The facts that a function declares, else the defaults."""
    return getattr(function, "facts", Facts())
