"""How stable a training run was, from its per-step record alone (no torch)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

SPIKE_WINDOW = 50  # steps whose median and MAD a loss is held against
SPIKE_MADS = 6.0
DIVERGED_FACTOR = 1.5  # a final loss this much above the run's best counts as diverged
LISTED = 100  # steps named in an outcome


@dataclass
class StepRecord:
    """What every training step left behind, one entry a step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)

    def add(self, loss: float, norm: float, skipped: bool, scale: float | None) -> None:
        """Append one step."""
        self.losses.append(loss)
        self.norms.append(norm)
        self.skipped.append(skipped)
        if scale is not None:
            self.scales.append(scale)

    def finite(self, step: int) -> bool:
        """Whether loss and gradient norm of a step were both finite."""
        return math.isfinite(self.losses[step]) and math.isfinite(self.norms[step])

    def trailing_failures(self) -> int:
        """Steps since the last one whose loss was finite and whose update was applied."""
        count = 0
        for loss, skipped in zip(reversed(self.losses), reversed(self.skipped), strict=True):
            if math.isfinite(loss) and not skipped:
                break
            count += 1
        return count


def loss_spikes(losses: Sequence[float], *, window: int = SPIKE_WINDOW, mads: float = SPIKE_MADS) -> list[int]:
    """Steps whose loss lies over the running median + `mads` median absolute deviations of the `window` steps before.

    A running median lags behind a falling loss, so a step counts only once ten steps stand before it.
    """
    found = []
    for step, loss in enumerate(losses):
        before = [value for value in losses[max(0, step - window) : step] if math.isfinite(value)]
        if len(before) < 10 or not math.isfinite(loss):
            continue
        middle = statistics.median(before)
        deviation = statistics.median(abs(value - middle) for value in before)
        if loss > middle + mads * max(deviation, 1e-3 * abs(middle)):
            found.append(step)
    return found


def quantile(values: Sequence[float], share: float) -> float | None:
    """The `share` quantile by linear interpolation of the finite values, None without any."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def why_diverged(record: StepRecord, evaluations: Sequence[float | None]) -> str | None:
    """The reason why a run counts as diverged, or None.

    `evaluations` are the validation losses in order, the first one before any update, None where not finite.
    """
    if not evaluations:
        return None
    first, final = evaluations[0], evaluations[-1]
    if final is None:
        return "the final validation loss is not finite"
    if record.losses and not math.isfinite(record.losses[-1]):
        return "the last training loss is not finite"
    if first is not None and len(evaluations) > 1 and final >= first:
        return f"the final validation loss {final:.3f} is not below the untrained model's {first:.3f}"
    best = min(value for value in evaluations if value is not None)
    if final > DIVERGED_FACTOR * best:
        return f"the final validation loss {final:.3f} is over {DIVERGED_FACTOR} times the run's best {best:.3f}"
    return None


def stability(record: StepRecord, evaluations: Sequence[float | None]) -> dict[str, Any]:
    """Non-finite steps, loss spikes, p99 gradient norm, divergence, and what the loss scaler did.

    `scale` is its trajectory as change points [step, scale]; lists of steps hold the first `LISTED` only.
    """
    steps = range(len(record.losses))
    skipped = [step for step in steps if record.skipped[step]]
    spikes = loss_spikes(record.losses)
    reason = why_diverged(record, evaluations)
    return {
        "steps": len(steps),
        "nonfinite_steps": sum(not record.finite(step) for step in steps),
        "nonfinite_losses": sum(not math.isfinite(loss) for loss in record.losses),
        "nonfinite_gradients": sum(not math.isfinite(norm) for norm in record.norms),
        "loss_spikes": len(spikes),
        "loss_spike_steps": spikes[:LISTED],
        "grad_norm_p99": quantile(record.norms, 0.99),
        "skipped_scaler_steps": len(skipped) if record.scales else None,
        "skipped_at": skipped[:LISTED] if record.scales else None,
        "diverged": reason is not None,
        "diverged_reason": reason,
        "scale": changes(record.scales),
    }


def changes(scales: Sequence[float]) -> list[list[float]]:
    """A scale's trajectory as [step, scale] at the first step and wherever it changed."""
    kept = [[0, scales[0]]] if scales else []
    for step, scale in enumerate(scales):
        if scale != kept[-1][1]:
            kept.append([step, scale])
    return kept
