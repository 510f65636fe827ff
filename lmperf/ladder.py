"""The stacked recipe taken apart: ladder up and down, leave-one-out, interactions, and each change's share of the gain.

All of it comes from paired rounds of one session; the gains of single changes are never summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from lmperf.comparing import Block
from lmperf.readings import BASELINE, Session, arm_rounds, kind_of, memory_values
from lmperf.statistics import FEWEST_ROUNDS, interval, judge_arms

LADDER_COLUMNS = (
    "kind", "step", "recipe", "variant", "metric", "ratio", "ci_low", "ci_high", "increment", "increment_low",
    "increment_high", "share", "n", "verdict", "reason",
)  # fmt: skip
MOST_OF_THE_GAIN = 0.9

Recipe = frozenset[str]


@dataclass(frozen=True)
class Rung:
    """One comparison inside the stack: `recipe` beside `before`, which differs by `variant` (or declared pair)."""

    kind: str  # "up", "down", "leave one out", "alone", "interaction"
    step: int
    recipe: Recipe
    before: Recipe
    variant: str


def rungs(stack: Sequence[str], arms: Iterable[Recipe]) -> Iterator[Rung]:
    """All comparisons of a stack in its order, whatever the arms' names; pairs are the arms of two changes."""
    whole = frozenset(stack)
    for step, variant in enumerate(stack, 1):
        yield Rung("up", step, frozenset(stack[:step]), frozenset(stack[: step - 1]), variant)
    for step, variant in enumerate(stack, 1):
        yield Rung("down", step, frozenset(stack[step:]), frozenset(stack[step - 1 :]), variant)
    for step, variant in enumerate(stack, 1):
        yield Rung("leave one out", step, whole - {variant}, whole, variant)
    for step, variant in enumerate(stack, 1):
        yield Rung("alone", step, frozenset({variant}), frozenset(), variant)
    pairs = sorted({tuple(sorted(arm)) for arm in arms if len(arm) == 2})
    for step, pair in enumerate(pairs, 1):
        yield Rung("interaction", step, frozenset(pair), frozenset(), " + ".join(pair))


class Costs:
    """Log costs of every recipe of a stack session by round (or once, for memory), and which of them a badge caps."""

    def __init__(self, session: Session, metric: str, smallest_effect: float) -> None:
        self.metric = metric
        self.cell = session.spec.cells[-1].label
        self.recipes = {frozenset(arm.variants): arm.name for arm in reversed(session.spec.arms) if arm.variants}
        self.recipes[frozenset()] = BASELINE
        self.counted = metric.endswith("bytes")
        self.smallest_effect, self.delta, self.capped = smallest_effect, smallest_effect, {}
        self.logs = self._memory(session) if self.counted else self._times(session)

    def _memory(self, session: Session) -> dict[str, dict[int, float]]:
        sizes = memory_values(session, self.cell, self.metric)
        return {arm: {1: math.log(size)} for arm, size in sizes.items() if size}

    def _times(self, session: Session) -> dict[str, dict[int, float]]:
        arms = {a.name: arm_rounds(session, a.name, self.cell, self.metric) for a in session.spec.arms}
        block = Block(kind_of(self.metric, "s"), arms[BASELINE], arms, self.smallest_effect)
        self.delta = block.delta
        self.capped = {name: reasons for name in arms if name != BASELINE and (reasons := block.caps(name))}
        return {name: {n: math.log(v) for n, v in arm.values.items() if v > 0} for name, arm in arms.items()}

    def of(self, recipe: Recipe) -> dict[int, float]:
        """Log cost of a recipe by round; empty where it was not measured."""
        return self.logs.get(self.recipes.get(recipe, ""), {})

    def ratio(self, *terms: tuple[int, Recipe]) -> list[float]:
        """Sum of sign × log cost over the rounds in which all the terms were measured."""
        rounds = set.intersection(*(set(self.of(recipe)) for _, recipe in terms))
        return [sum(sign * self.of(recipe)[n] for sign, recipe in terms) for n in sorted(rounds)]

    def caps(self, *recipes: Recipe) -> list[str]:
        """Why a comparison of these recipes may not be more than inconclusive."""
        names = [self.recipes.get(recipe, "") for recipe in recipes]
        return list(dict.fromkeys(reason for name in names for reason in self.capped.get(name, ())))


def ladder_rows(session: Session, stack: Sequence[str], smallest_effect: float) -> list[dict[str, Any]]:
    """All rows of ladder.csv for step time and peak memory."""
    rows: list[dict[str, Any]] = []
    for metric in ("step_time_s", "peak_memory_bytes"):
        costs = Costs(session, metric, smallest_effect)
        if not costs.logs:
            continue
        steps = list(rungs(stack, [frozenset(arm.variants) for arm in session.spec.arms]))
        for kind in dict.fromkeys(rung.kind for rung in steps):
            rows += kind_rows([rung for rung in steps if rung.kind == kind], costs)
        rows += attribution(stack, costs)
    return rows


def increments(rung: Rung, costs: Costs) -> list[float]:
    """Log ratio of the step from `before` to `recipe`; for a pair, of the pair to the product of its two changes."""
    if rung.kind != "interaction":
        return costs.ratio((1, rung.recipe), (-1, rung.before))
    first, second = (frozenset({variant}) for variant in sorted(rung.recipe))
    return costs.ratio((1, rung.recipe), (-1, first), (-1, second), (1, frozenset()))


def kind_rows(steps: Sequence[Rung], costs: Costs) -> Iterator[dict[str, Any]]:
    """Rows of one kind, Holm-corrected over its steps."""
    logs = {rung.variant: increments(rung, costs) for rung in steps}
    capped = {rung.variant: costs.caps(rung.recipe, rung.before) for rung in steps}
    findings = judge_arms(
        {name: values for name, values in logs.items() if values}, costs.delta,
        same_delta=costs.smallest_effect, capped=frozenset(name for name, reasons in capped.items() if reasons),
        words=("better", "worse") if steps[0].kind == "interaction" or costs.counted else ("faster", "slower"),
    )  # fmt: skip
    for rung in steps:
        values = logs[rung.variant]
        row = _row(rung, costs) | {"n": len(values), "verdict": "not measured", "reason": "an arm was not measured"}
        if values:
            found = findings[rung.variant].interval
            row |= {"increment": math.exp(sum(values) / len(values)), "verdict": findings[rung.variant].verdict}
            row["reason"] = "; ".join(capped[rung.variant]) or None
            if found:
                row |= {"increment": found.estimate, "increment_low": found.low, "increment_high": found.high}
            if costs.counted:
                row |= _counted_verdict(values[0])
            elif len(values) < FEWEST_ROUNDS:
                row["reason"] = f"n = {len(values)}: no interval below {FEWEST_ROUNDS} rounds"
        yield row


def _counted_verdict(log_ratio: float) -> dict[str, Any]:
    word = "same" if abs(math.expm1(log_ratio)) <= 0.01 else "better" if log_ratio < 0 else "worse"
    return {"verdict": word, "reason": "deterministic, n = 1"}


def _row(rung: Rung, costs: Costs) -> dict[str, Any]:
    """The step's names and its recipe's whole ratio to the baseline."""
    row = {"kind": rung.kind, "step": rung.step, "recipe": named(rung.recipe), "variant": rung.variant}
    row["metric"] = costs.metric
    if not rung.recipe:
        return row | {"ratio": 1.0}  # the ladder's foot is the baseline itself
    whole = costs.ratio((1, rung.recipe), (-1, frozenset()))
    found = interval(whole)
    if found:
        return row | {"ratio": found.estimate, "ci_low": found.low, "ci_high": found.high}
    return row | ({"ratio": math.exp(sum(whole) / len(whole))} if whole else {})


def named(recipe: Recipe) -> str:
    """A recipe as text: its changes joined by " + ", or baseline."""
    return " + ".join(sorted(recipe)) or BASELINE


def attribution(stack: Sequence[str], costs: Costs) -> Iterator[dict[str, Any]]:
    """Each change's share of the whole gain: the mean of what it adds on the way up and takes away on the way down.

    Both ladders join the same two recipes, so the shares sum to one without ever summing single gains.
    """
    whole = frozenset(stack)
    gains = [-value for value in costs.ratio((1, whole), (-1, frozenset()))]
    total = sum(gains) / len(gains) if gains else 0.0
    found = interval(gains)
    known = total > 0 and (found is None or found.low > 1)
    shares: dict[str, float] = {}
    for step, variant in enumerate(stack, 1):
        values = _contribution(stack, step - 1, costs)
        row = {"kind": "attribution", "step": step, "recipe": named(whole), "variant": variant, "metric": costs.metric}
        row |= {"n": len(values), **_contributed(values, costs.caps(whole), costs.counted)}
        if values and known:
            shares[variant] = -sum(values) / len(values) / total
            row |= {"share": shares[variant], **_share_bounds(values, total)}
        elif values:
            row["reason"] = "the stack as a whole shows no gain, so there is none to share"
        yield row
    yield _concentration(stack, shares, costs)


def _contribution(stack: Sequence[str], place: int, costs: Costs) -> list[float]:
    """Log cost that the change at `place` adds (below 0: it gains), averaged over both ladders, by round."""
    up = (frozenset(stack[: place + 1]), frozenset(stack[:place]))
    down = (frozenset(stack[place:]), frozenset(stack[place + 1 :]))
    return [value / 2 for value in costs.ratio((1, up[0]), (-1, up[1]), (1, down[0]), (-1, down[1]))]


def _contributed(values: Sequence[float], caps: Sequence[str], counted: bool) -> dict[str, Any]:
    """What one change contributes as a ratio (below 1: it gains), with interval and verdict."""
    if not values:
        return {"verdict": "not measured", "reason": "an arm of a ladder was not measured"}
    mean = math.exp(sum(values) / len(values))
    if counted:
        return {"increment": mean, **_counted_verdict(math.log(mean))}
    found = interval(values)
    if found is None:
        return {"increment": mean, "verdict": "inconclusive", "reason": f"n = {len(values)}: no interval"}
    word = "better" if found.high < 1 else "worse" if found.low > 1 else "inconclusive"
    row = {"increment": found.estimate, "increment_low": found.low, "increment_high": found.high}
    note = "; ".join(caps) or "mean of ladder up and ladder down"
    return row | {"verdict": "inconclusive" if caps else word, "reason": note}


def _share_bounds(values: Sequence[float], total: float) -> dict[str, Any]:
    """The interval of a share: the change's own bounds over the whole gain as measured."""
    found = interval(values)
    return {"ci_low": -math.log(found.high) / total, "ci_high": -math.log(found.low) / total} if found else {}


def _concentration(stack: Sequence[str], shares: Mapping[str, float], costs: Costs) -> dict[str, Any]:
    """The smallest share of the changes that brings 90 % of the gain."""
    row = {"kind": "concentration", "step": len(stack), "recipe": named(frozenset(stack)), "metric": costs.metric}
    row |= {"n": len(shares), "verdict": "not measured", "reason": "not every change has a share"}
    if len(shares) < len(stack):
        return row
    ordered = sorted(shares.values(), reverse=True)
    reached = list(accumulate(ordered))
    changes = next((n for n, share in enumerate(reached, 1) if share >= MOST_OF_THE_GAIN), len(ordered))
    note = (
        f"{changes} of {len(stack)} changes bring {reached[changes - 1]:.0%} of the gain; "
        f"the largest brings {ordered[0]:.0%}"
    )
    return row | {"share": changes / len(stack), "verdict": "inconclusive", "reason": note}
