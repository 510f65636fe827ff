"""Paired intervals, equivalence verdicts, Holm's correction and detectable effects, for few rounds.

All effects are log ratios variant / baseline of one round; what a reader sees is a ratio (1.0 = no difference).
Why each choice was made: docs/decisions/statistics.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from lmperf.design import ALPHA

FEWEST_ROUNDS = 3  # below this no interval is given at all
FEWEST_EXACT_ROUNDS = 6  # below this the signed-rank test cannot reach 5 % two-sided, so Student's t stands in
SPEED_WORDS = ("faster", "slower")
SIZE_WORDS = ("better", "worse")

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A ratio with its confidence interval; `indicative` marks the Student interval of 3 to 5 rounds."""

    estimate: float
    low: float
    high: float
    n: int
    method: str  # "signed rank" | "student"
    indicative: bool
    confidence: float = 0.95

    @property
    def excludes_1(self) -> bool:
        """Whether the interval lies wholly on one side of "no difference"."""
        return self.low > 1.0 or self.high < 1.0

    @property
    def floor(self) -> float:
        """The interval's far bound as a fraction: 0.03 means that a difference of 3 % either way cannot be excluded."""
        return math.expm1(max(abs(math.log(self.low)), abs(math.log(self.high))))

    def inverse(self) -> Interval:
        """The same finding as a ratio the other way round (a time's interval as a rate's)."""
        return replace(self, estimate=1 / self.estimate, low=1 / self.high, high=1 / self.low)


@lru_cache(maxsize=256)
def signed_rank_cdf(n: int) -> tuple[float, ...]:
    """P(W <= w) for w = 0 … n(n+1)/2 under the exact null distribution of Wilcoxon's signed-rank sum of n values."""
    counts = np.zeros(n * (n + 1) // 2 + 1)
    counts[0] = 1.0
    for rank in range(1, n + 1):
        counts[rank:] = counts[rank:] + counts[: counts.size - rank]
        counts /= 2.0  # the counts are kept as probabilities, so that large n cannot overflow
    return tuple(np.cumsum(counts).clip(0.0, 1.0).tolist())


def walsh_averages(log_ratios: ArrayLike) -> Floats:
    """All pairwise means (i <= j) of the last axis, sorted: (..., n) to (..., n(n+1)/2); Hodges and Lehmann, 1963."""
    values = np.asarray(log_ratios, dtype=float)
    first, second = np.triu_indices(values.shape[-1])
    return np.sort((values[..., first] + values[..., second]) / 2.0, axis=-1)


def log_bounds(log_ratios: ArrayLike, confidence: float = 0.95) -> tuple[Floats, Floats, Floats]:
    """(estimate, low, high) of log ratios over the last axis, shape (..., n): signed rank for n >= 6, else Student.

    Where n is too small for `confidence` the signed-rank bounds are infinite: no finite interval has that coverage.
    """
    values = np.asarray(log_ratios, dtype=float)
    if values.shape[-1] < FEWEST_EXACT_ROUNDS:
        return _student_bounds(values, confidence)
    averages = walsh_averages(values)
    tail = np.searchsorted(signed_rank_cdf(values.shape[-1]), (1 - confidence) / 2 * (1 + 1e-12), side="right")
    estimate = np.median(averages, axis=-1)
    if tail == 0:
        return estimate, np.full_like(estimate, -np.inf), np.full_like(estimate, np.inf)
    return estimate, averages[..., tail - 1], averages[..., averages.shape[-1] - tail]


def _student_bounds(values: Floats, confidence: float) -> tuple[Floats, Floats, Floats]:
    n = values.shape[-1]
    mean = values.mean(axis=-1)
    half = special.stdtrit(n - 1, (1 + confidence) / 2) * values.std(axis=-1, ddof=1) / math.sqrt(n)
    return mean, mean - half, mean + half


def interval(log_ratios: ArrayLike, confidence: float = 0.95) -> Interval | None:
    """The ratio and its interval from one log ratio a round, or None below three rounds.

    n >= 6: Hodges-Lehmann estimate with the exact signed-rank interval; n = 3 to 5: Student's t, marked indicative.
    """
    values = np.asarray(log_ratios, dtype=float)
    if not np.all(np.isfinite(values)):
        raise ValueError(f"log_ratios: {values.tolist()} has a value that is not finite; only finite ones are allowed")
    if values.size < FEWEST_ROUNDS:
        return None
    estimate, low, high = (float(np.exp(bound)) for bound in log_bounds(values, confidence))
    few = values.size < FEWEST_EXACT_ROUNDS
    return Interval(estimate, low, high, int(values.size), "student" if few else "signed rank", few, confidence)


def one_sided_p(log_ratios: ArrayLike, bound: float) -> Floats:
    """P values (over the last axis) against "the effect is `bound` or more", in favour of "it is less".

    Values equal to the bound count against the claim, so ties make the test conservative; it is the exact inversion of
    `log_bounds` (p <= a/2 just when the upper bound at confidence 1 - a lies below `bound`).
    """
    values = np.asarray(log_ratios, dtype=float)
    n = values.shape[-1]
    if n < FEWEST_EXACT_ROUNDS:
        return _student_p(values, bound)
    above = (walsh_averages(values) >= bound).sum(axis=-1)
    return np.asarray(signed_rank_cdf(n))[above]


def _student_p(values: Floats, bound: float) -> Floats:
    n = values.shape[-1]
    mean, spread = values.mean(axis=-1), values.std(axis=-1, ddof=1) / math.sqrt(n)
    with np.errstate(divide="ignore", invalid="ignore"):
        statistic = np.where(mean == bound, 0.0, (mean - bound) / spread)
    return np.asarray(special.stdtr(n - 1, statistic))


def signed_rank_p(log_ratios: ArrayLike, bound: float = 0.0) -> float:
    """Two-sided p value against "the effect equals `bound`" (signed rank for n >= 6, Student's t for 3 to 5)."""
    values = np.asarray(log_ratios, dtype=float)
    return float(min(1.0, 2.0 * min(one_sided_p(values, bound), one_sided_p(-values, -bound))))


def claim_p(log_ratios: ArrayLike, delta: float, same_delta: float | None = None) -> Floats:
    """P value of the strongest claim that each row of log ratios (shape (..., n)) supports about the margins.

    The claims: beyond 1 ± delta (twice the smaller one-sided p), or within 1 ± same_delta (two one-sided tests, twice
    the larger). When both are false they fail on opposite sides, each at half its level, so that the smaller of them
    stands for the arm in Holm's correction.
    """
    values = np.asarray(log_ratios, dtype=float)
    low, high = math.log1p(-delta), math.log1p(delta)
    beyond = np.minimum(one_sided_p(values, low), one_sided_p(-values, -high))
    within = _within_p(values, delta if same_delta is None else same_delta)
    return np.minimum(1.0, 2.0 * np.minimum(beyond, within))


def _within_p(values: Floats, delta: float) -> Floats:
    return np.maximum(one_sided_p(-values, -math.log1p(-delta)), one_sided_p(values, math.log1p(delta)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p values, in the order given (Holm, 1979)."""
    adjusted, running = [0.0] * len(p_values), 0.0
    for place, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        running = max(running, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = running
    return adjusted


def verdict(
    found: Interval | None,
    delta: float,
    *,
    lower_is_better: bool = True,
    p_holm: float | None = None,
    capped: bool = False,
    words: tuple[str, str] = SPEED_WORDS,
    p_one: float | None = None,
    same_delta: float | None = None,
) -> str:
    """One word of `records.VERDICTS` for a ratio's interval and the margins 1 ± delta.

    `p_holm` is the Holm-adjusted `claim_p` of this arm (None: a single arm); above 5 % nothing is claimed. `p_one` is
    the adjusted p against "no difference", needed for "small difference". `same_delta` is the smallest effect of
    interest where the noise floor has widened delta: noise must make nothing "same" or "small". `capped`: a red badge.
    """
    if found is None or capped or (p_holm is not None and p_holm > ALPHA):
        return "inconclusive"
    good, bad = words if lower_is_better else words[::-1]
    if found.high < 1 - delta:
        return good
    if found.low > 1 + delta:
        return bad
    level = delta if same_delta is None else same_delta
    if not (1 - level <= found.low and found.high <= 1 + level):
        return "inconclusive"
    return "small difference" if found.excludes_1 and (p_one is None or p_one <= ALPHA) else "same"


@dataclass(frozen=True)
class Finding:
    """What one arm's rounds say beside the other arms of its session: interval, adjusted p values and the verdict."""

    interval: Interval | None
    p_holm: float | None
    p_one: float | None
    verdict: str


def judge_arms(
    arms: Mapping[str, Sequence[float]],
    delta: float,
    *,
    lower_is_better: bool = True,
    capped: frozenset[str] = frozenset(),
    words: tuple[str, str] = SPEED_WORDS,
    same_delta: float | None = None,
) -> dict[str, Finding]:
    """Findings of all arms of a session at one cell and metric from their log ratios, Holm-corrected over the arms."""
    able = [name for name, values in arms.items() if len(values) >= FEWEST_ROUNDS]
    claims = dict(zip(able, holm([float(claim_p(arms[name], delta, same_delta)) for name in able]), strict=True))
    ones = dict(zip(able, holm([signed_rank_p(arms[name]) for name in able]), strict=True))
    findings = {}
    for name, values in arms.items():
        found, p_holm, p_one = interval(values), claims.get(name), ones.get(name)
        word = verdict(
            found, delta, lower_is_better=lower_is_better, words=words, capped=name in capped,
            p_holm=p_holm, p_one=p_one, same_delta=same_delta,
        )  # fmt: skip
        findings[name] = Finding(found, p_holm, p_one, word)
    return findings


def detectable_effect(log_ratios: ArrayLike, delta: float, *, arms: int = 1, power: float = 0.8) -> float | None:
    """The smallest effect (a fraction: 0.04 = 4 %) that rounds with this scatter show with probability `power`.

    margin + half-width at Holm's strictest level (alpha / arms) + the allowance for power; None where no effect,
    however large, could have been shown (too few rounds).
    """
    values = np.asarray(log_ratios, dtype=float)
    n = values.size
    if n < FEWEST_ROUNDS:
        return None
    confidence = 1 - ALPHA / arms
    estimate, low, high = log_bounds(values, confidence)
    half = float(max(high - estimate, estimate - low))
    if not math.isfinite(half):
        return None
    spread = float(values.std(ddof=1)) / math.sqrt(n)
    half = max(half, float(special.stdtrit(n - 1, (1 + confidence) / 2)) * spread)
    return math.expm1(math.log1p(delta) + half + float(special.stdtrit(n - 1, power)) * spread)


def binomial_interval(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper-Pearson interval of a rate: k hits in n trials."""
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"k, n: {k}, {n} is not allowed; 0 <= k <= n and n >= 1")
    tail = (1 - confidence) / 2
    low = 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, tail))
    high = 1.0 if k == n else float(special.betaincinv(k + 1, n - k, 1 - tail))
    return low, high
