"""How a cost grows with length: the exponent of a power law and the length at which two curves cross (no torch)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_LENGTHS = 3  # through two points every exponent fits, and nothing says how well


@dataclass(frozen=True)
class Growth:
    """The fit value ∝ length^exponent: exponent with its 95 % interval (None with fewer than three lengths), points."""

    exponent: float
    low: float | None
    high: float | None
    points: int


def measured(lengths: Sequence[float], *series: Sequence[float | None]) -> list[tuple[float, ...]]:
    """(length, value, ...) in order of length, without lengths at which a value is missing.

    ValueError for sequences of unlike length, and for lengths or values that are not positive.
    """
    if any(len(values) != len(lengths) for values in series):
        raise ValueError(f"lengths ({len(lengths)}) and values ({', '.join(str(len(v)) for v in series)}) must match")
    rows = sorted(row for row in zip(lengths, *series, strict=True) if None not in row)
    for row in rows:
        if not all(math.isfinite(number) and number > 0 for number in row):
            raise ValueError(f"lengths and values must be positive and finite, got {row}")
    return rows


def growth_exponent(
    lengths: Sequence[float], values: Sequence[float | None], *, last: int | None = None, confidence: float = 0.95
) -> Growth | None:
    """Least squares of log value on log length; `last`: only that many of the largest lengths (past fixed costs).

    Student's interval of the slope; None when fewer than two different lengths were measured.
    """
    rows = measured(lengths, values)
    rows = rows if last is None else rows[-last:]
    x, y = [math.log(row[0]) for row in rows], [math.log(row[1]) for row in rows]
    n = len(rows)
    if len(set(x)) < 2:
        return None
    x_mean, y_mean = sum(x) / n, sum(y) / n
    spread = sum((a - x_mean) ** 2 for a in x)
    slope = sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread
    if n < FEWEST_LENGTHS:
        return Growth(slope, None, None, n)
    residual = sum((b - y_mean - slope * (a - x_mean)) ** 2 for a, b in zip(x, y, strict=True))
    half = student_quantile(confidence, n - 2) * math.sqrt(residual / (n - 2) / spread)
    return Growth(slope, slope - half, slope + half, n)


def student_quantile(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t."""
    from scipy.stats import t

    return float(t.ppf(0.5 + confidence / 2, freedom))


def crossover(lengths: Sequence[float], a: Sequence[float | None], b: Sequence[float | None]) -> float | None:
    """The length at which the curves a and b cross for the last time, interpolated on log-log axes; None: they do not.

    Curves that only touch, and then part to the sides they came from, do not cross.
    """
    rows = [(math.log(length), math.log(one / other)) for length, one, other in measured(lengths, a, b)]
    crossing = None
    before: tuple[float, float] | None = None  # the last point where the curves differ
    for position, gap in rows:
        if gap == 0:
            continue
        if before is not None and (gap > 0) != (before[1] > 0):
            share = before[1] / (before[1] - gap)
            crossing = math.exp(before[0] + share * (position - before[0]))
        before = (position, gap)
    return crossing
