"""Quality runs paired by seed: what a recipe costs or gains in bits per byte, stability and generalisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pandas as pd

from lmperf.design import ALPHA
from lmperf.records import InputError, QualitySpec, from_json, read_json
from lmperf.statistics import FEWEST_ROUNDS, Interval, holm, interval, signed_rank_p
from lmperf.tables import frame, write_csv

QUALITY_COLUMNS = (
    "recipe", "stressed", "dimension", "metric", "unit", "value", "baseline_value", "ratio", "ci_low", "ci_high", "n",
    "sigma", "margin", "verdict", "status", "reason",
)  # fmt: skip
SMALLEST_MARGIN = 0.005  # non-inferior within max(2 sigma, 0.5 %)
GRADIENT_MARGIN = 0.25  # gradient norms differ between architectures without being a fault
SPEED_MARGIN = 0.02
SEEDS_FOR_SIGMA = 5
COUNTS = ("nonfinite_steps", "loss_spikes", "skipped_scaler_steps")


@dataclass(frozen=True)
class Run:
    """One quality run as its file tells it."""

    spec: QualitySpec
    outcome: Mapping[str, Any]

    @property
    def status(self) -> str:
        """ok, or the typed failure."""
        return str(self.outcome.get("status", "crashed"))

    @property
    def diverged(self) -> bool:
        """Whether training was lost: diverged by the run's own account, or no finite loss at the end."""
        steady = self.outcome.get("stability") or {}
        return bool(steady.get("diverged")) or (self.status in ("ok", "unstable") and self.bits is None)

    @property
    def bits(self) -> float | None:
        """Bits per byte at the end."""
        return finite((self.outcome.get("final") or {}).get("bits_per_byte"))

    def curve(self, x: str) -> list[tuple[float, float]]:
        """Points (x, bits per byte) of the curve, x being "tokens" or "wall_s", sorted by x."""
        points = [(finite(p.get(x)), finite(p.get("bits_per_byte"))) for p in self.outcome.get("curve") or ()]
        return sorted((a, b) for a, b in points if a is not None and b is not None)

    def stable(self, name: str) -> float | None:
        """A count or norm from the run's stability record."""
        return finite((self.outcome.get("stability") or {}).get(name))


def finite(value: Any) -> float | None:
    """The value as a float, or None where there is none."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def read_runs(files: Sequence[Path]) -> list[Run]:
    """Read quality files; one without a spec is an `InputError` that names it."""
    runs = []
    for path in files:
        outcome = read_json(path)
        if not isinstance(outcome, dict) or "spec" not in outcome:
            raise InputError(f"{path}: no quality run (it has no spec); train this run again")
        runs.append(Run(from_json(QualitySpec, outcome["spec"]), outcome))
    return runs


def quality_table(quality_files: Sequence[Path], out: Path) -> pd.DataFrame:
    """Compare every recipe's runs with the baseline's of the same seeds and write quality.csv (QUALITY_COLUMNS)."""
    groups: dict[tuple[str, bool], dict[int, Run]] = {}
    for run in read_runs(quality_files):
        groups.setdefault((run.spec.recipe, run.spec.stressed), {})[run.spec.seed] = run
    rows: list[dict[str, Any]] = []
    for (recipe, stressed), runs in groups.items():
        base = groups.get(("baseline", stressed), {})
        rows += [{"recipe": recipe, "stressed": stressed, **row} for row in recipe_rows(recipe, runs, base)]
    _settle_better(rows)
    return write_csv(frame(rows, QUALITY_COLUMNS), Path(out) / "quality.csv")


def recipe_rows(recipe: str, runs: Mapping[int, Run], base: Mapping[int, Run]) -> Iterator[dict[str, Any]]:
    """All rows of one recipe at one learning rate against the baseline's runs."""
    trial = Trial(recipe, runs, base)
    yield trial.compared("accuracy", "bits_per_byte", "bits/byte", lambda run: run.bits)
    yield trial.paired("accuracy", "bits_per_byte_equal_time", "bits/byte", equal_time)
    yield trial.time_to_target()
    yield trial.paired("accuracy", "token_efficiency", "ratio", token_efficiency, margin=SPEED_MARGIN, higher=True)
    yield trial.paired("speed", "matched_speedup", "ratio", matched_speedup, margin=SPEED_MARGIN, higher=True)
    yield trial.compared("speed", "tokens_per_s", "tokens/s", _plain("tokens_per_s"), margin=SPEED_MARGIN, higher=True)
    yield trial.compared("memory", "peak_memory_bytes", "bytes", _plain("peak_memory_bytes"), margin=SPEED_MARGIN)
    yield trial.diverged_share()
    yield from (trial.counted(name) for name in COUNTS)
    norm = "grad_norm_p99"
    yield trial.compared("stability", norm, "norm", lambda run: run.stable(norm), margin=GRADIENT_MARGIN)
    yield from trial.generalisation()


def _plain(key: str) -> Callable[[Run], float | None]:
    return lambda run: finite(run.outcome.get(key))


def _settle_better(rows: Sequence[dict[str, Any]]) -> None:
    """Turn "better" into "non-inferior" where it does not survive Holm's correction over the recipes of a metric."""
    families: dict[tuple[bool, str], list[dict[str, Any]]] = {}
    for row in rows:
        if row.get("p") is not None:
            families.setdefault((row["stressed"], row["metric"]), []).append(row)
    for family in families.values():
        for row, p in zip(family, holm([row["p"] for row in family]), strict=True):
            if row["verdict"] == "better" and p > ALPHA:
                row |= {"verdict": "non-inferior", "reason": _joined(row["reason"], f"p = {p:.2g} after Holm")}


def _joined(*reasons: str | None) -> str | None:
    return "; ".join(reason for reason in reasons if reason) or None


def equal_time(run: Run, base: Run) -> tuple[float, float] | None:
    """(run's, baseline's) bits per byte when the quicker of the two is done (training seconds, interpolated)."""
    ours, theirs = run.curve("wall_s"), base.curve("wall_s")
    if len(ours) < 2 or len(theirs) < 2:
        return None
    end = min(ours[-1][0], theirs[-1][0])
    return _at(ours, end), _at(theirs, end)


def _at(curve: Sequence[tuple[float, float]], x: float) -> float:
    return float(np.interp(x, [p[0] for p in curve], [p[1] for p in curve]))


def first_reached(curve: Sequence[tuple[float, float]], target: float) -> float | None:
    """The x at which the curve first is at `target` or below, linear between points; None where it never is."""
    for (x0, y0), (x1, y1) in zip(curve, curve[1:], strict=False):
        if y0 <= target:
            return x0
        if y1 <= target:
            return x0 + (x1 - x0) * (y0 - target) / (y0 - y1)
    return curve[-1][0] if curve and curve[-1][1] <= target else None


def token_efficiency(run: Run, base: Run) -> tuple[float, float] | None:
    """(tokens the baseline needs for the run's final loss, tokens the run used), read from the baseline's own curve.

    A run that ended better than the baseline ever got is priced at the baseline's last point, a lower bound.
    """
    curve, used = base.curve("tokens"), run.curve("tokens")
    if run.bits is None or len(curve) < 2 or not used:
        return None
    needed = first_reached(curve, run.bits)
    needed = curve[-1][0] if needed is None else needed
    return (needed, used[-1][0]) if needed > 0 and used[-1][0] > 0 else None


def matched_speedup(run: Run, base: Run) -> tuple[float, float] | None:
    """(run's throughput × its token efficiency, baseline's throughput): how much sooner the same quality is there."""
    tokens = token_efficiency(run, base)
    fast, slow = finite(run.outcome.get("tokens_per_s")), finite(base.outcome.get("tokens_per_s"))
    return (fast * tokens[0] / tokens[1], slow) if tokens and fast and slow else None


class Trial:
    """One recipe's runs beside the baseline's, by seed."""

    def __init__(self, recipe: str, runs: Mapping[int, Run], base: Mapping[int, Run]) -> None:
        self.is_baseline = recipe == "baseline"
        self.runs, self.base = runs, base
        self.seeds = sorted(runs.keys() & base.keys())
        self.lost = [seed for seed, run in runs.items() if run.diverged]
        self.base_lost = [seed for seed, run in base.items() if run.diverged]
        failed = [run for run in runs.values() if run.status not in ("ok", "unstable")]
        self.failure = failed[0] if failed else None

    @property
    def status(self) -> str:
        """ok, unstable (a seed diverged), or the typed failure of a run."""
        if self.failure:
            return self.failure.status
        return "unstable" if self.lost else "ok"

    def row(self, dimension: str, metric: str, unit: str, **known: Any) -> dict[str, Any]:
        """A row of which nothing is measured yet but what is `known`."""
        reason = self.failure.outcome.get("reason") or self.failure.status if self.failure else None
        empty = {"verdict": "not measured", "reason": reason, "n": 0, "status": self.status}
        return {"dimension": dimension, "metric": metric, "unit": unit, **empty, **known}

    def compared(
        self, dimension: str, metric: str, unit: str, value: Callable[[Run], float | None], **how: Any
    ) -> dict[str, Any]:
        """A row of a quantity that each run has by itself, with the baseline's own spread as sigma."""
        own = [v for run in self.runs.values() if (v := value(run)) is not None]
        spread = [v for run in self.base.values() if (v := value(run)) is not None]
        sigma = stdev(spread) / fmean(spread) if len(spread) >= SEEDS_FOR_SIGMA and fmean(spread) > 0 else None

        def both(run: Run, base: Run) -> tuple[float, float] | None:
            ours, theirs = value(run), value(base)
            return None if ours is None or theirs is None else (ours, theirs)

        row = self.paired(dimension, metric, unit, both, sigma=sigma, **how)
        if self.is_baseline and own:
            row |= {"value": fmean(own), "n": len(own), "sigma": sigma, "reason": "the baseline itself"}
        elif own and row["value"] is None:
            row["value"] = fmean(own)
        return row

    def paired(
        self,
        dimension: str,
        metric: str,
        unit: str,
        both: Callable[[Run, Run], tuple[float, float] | None],
        *,
        sigma: float | None = None,
        margin: float | None = None,
        higher: bool = False,
    ) -> dict[str, Any]:
        """A row from (recipe's, baseline's) values of the same seed; `higher`: more is better."""
        row = self.row(dimension, metric, unit, value=None)
        if self.is_baseline:
            return row | {"reason": "the baseline itself"}
        pairs = [p for seed in self.seeds if (p := both(self.runs[seed], self.base[seed])) and min(p) > 0]
        if not pairs:
            return row | {"reason": row["reason"] or "no pair of runs of the same seed has this"}
        logs = [math.log(ours / theirs) for ours, theirs in pairs]
        found = interval(logs)
        allowed = margin if margin is not None else max(SMALLEST_MARGIN, 2 * (sigma or 0.0))
        row |= {"value": fmean(p[0] for p in pairs), "baseline_value": fmean(p[1] for p in pairs), "n": len(pairs)}
        row |= {"ratio": math.exp(fmean(logs)) if found is None else found.estimate, "sigma": sigma, "margin": allowed}
        if found is None:
            return row | {"verdict": "inconclusive", "reason": f"n = {len(pairs)}: {FEWEST_ROUNDS} paired seeds needed"}
        row |= {"ci_low": found.low, "ci_high": found.high, "p": signed_rank_p(logs)}
        return row | self._judged(found.inverse() if higher else found, allowed, row, sigma is None and margin is None)

    def _judged(self, cost: Interval, margin: float, row: Mapping[str, Any], no_sigma: bool) -> dict[str, Any]:
        """Verdict and reason of a cost ratio (less is better) within a margin, and of lost seeds."""
        reasons = [row["reason"]] if row["reason"] else []
        if no_sigma:
            reasons.append(f"margin {SMALLEST_MARGIN:.1%}: the baseline's spread needs {SEEDS_FOR_SIGMA} seeds")
        if cost.indicative:
            reasons.append(f"indicative (n = {cost.n})")
        if len(self.lost) > len(self.base_lost):
            word = "inferior" if 2 * len(self.lost) > len(self.runs) else "inconclusive"
            reasons.append(f"diverged in {len(self.lost)} of {len(self.runs)} seeds")
        elif self.failure:
            word = "inconclusive"
        else:
            word = quality_word(cost, margin)
        if word == "inconclusive":
            reasons.append(f"up to {cost.high - 1:.1%} worse cannot be excluded, {margin:.1%} is allowed")
        return {"verdict": word, "reason": _joined(*reasons)}

    def time_to_target(self) -> dict[str, Any]:
        """Training seconds until the loss that every baseline run reaches; never reached is a miss (∞)."""
        row = self.row("accuracy", "time_to_target_s", "s", value=None)
        ends = [run.bits for run in self.base.values() if run.bits is not None]
        if self.is_baseline or not ends or not self.seeds:
            return row | {"reason": "the baseline itself" if self.is_baseline else row["reason"] or "no baseline run"}
        target = max(ends) * (1 + SMALLEST_MARGIN)  # rounding, or noise within the margin, is no miss
        times = {seed: first_reached(self.runs[seed].curve("wall_s"), target) for seed in self.seeds}
        missed = [seed for seed, seconds in times.items() if seconds is None]
        if not missed:
            timed = lambda run, base: _both_times(run, base, target)  # noqa: E731
            return self.paired("accuracy", "time_to_target_s", "s", timed, margin=SPEED_MARGIN)
        word = "inferior" if len(missed) == len(times) >= FEWEST_ROUNDS else "inconclusive"
        note = f"missed {target:.4f} bits per byte in {len(missed)} of {len(times)} seeds (infinite time)"
        return row | {"status": "missed", "n": len(times), "verdict": word, "reason": _joined(row["reason"], note)}

    def diverged_share(self) -> dict[str, Any]:
        """Share of the seeds that diverged: inferior when most did and the baseline did not."""
        row = self.row("stability", "diverged_share", "share")
        trained = [run for run in self.runs.values() if run.status in ("ok", "unstable")]
        if not trained:
            return row
        share, base = len(self.lost) / len(trained), len(self.base_lost) / max(1, len(self.base))
        row |= {"value": share, "baseline_value": base, "n": len(trained)}
        if self.is_baseline:
            return row | {"reason": "the baseline itself"}
        few = len(trained) < FEWEST_ROUNDS
        word = "non-inferior" if share <= base else "inferior" if share > max(0.5, base) else "inconclusive"
        return row | {"verdict": "inconclusive" if few else word, "reason": f"n = {len(trained)} seeds"}

    def counted(self, name: str) -> dict[str, Any]:
        """Mean events a run: inferior when every paired seed has more than the baseline, non-inferior when none has."""
        row = self.row("stability", name, "steps a run")
        own = [v for run in self.runs.values() if (v := run.stable(name)) is not None]
        row |= {"value": fmean(own) if own else None, "n": len(own)}
        if self.is_baseline or not own:
            return row | {"reason": "the baseline itself" if self.is_baseline else row["reason"] or "not counted here"}
        # a run without a loss scaler skips no step for it
        pairs = [(self.runs[s].stable(name), self.base[s].stable(name) or 0.0) for s in self.seeds]
        more = [ours > theirs for ours, theirs in pairs if ours is not None]
        row["baseline_value"] = fmean(theirs for _, theirs in pairs) if pairs else None
        if len(more) < FEWEST_ROUNDS:
            return row | {"verdict": "inconclusive", "reason": f"n = {len(more)}: {FEWEST_ROUNDS} paired seeds needed"}
        word = "inferior" if all(more) else "inconclusive" if any(more) else "non-inferior"
        return row | {"verdict": word, "reason": f"more than the baseline in {sum(more)} of {len(more)} seeds"}

    def generalisation(self) -> Iterator[dict[str, Any]]:
        """Rows of held-out text, of each further domain and of each longer context that any run was evaluated on."""
        yield self.compared("generalisation", "held_out", "bits/byte", _grouped("held_out", "bits_per_byte"))
        everyone = [*self.runs.values(), *self.base.values()]
        for name in sorted({name for run in everyone for name in run.outcome.get("domains") or ()}):
            yield self.compared("generalisation", f"domains.{name}", "bits/byte", _grouped("domains", name))
        for name in sorted({name for run in everyone for name in longer_contexts(run)}):
            longer = lambda run, name=name: longer_contexts(run).get(name)  # noqa: E731
            yield self.compared("generalisation", f"long_context.{name}", "bits/byte", longer)


def longer_contexts(run: Run) -> dict[str, float | None]:
    """Bits per byte at contexts longer than trained, by length; "beyond" is the part after the trained length."""
    found = run.outcome.get("long_context") or {}
    if "length" not in found:
        return {name: finite(value) for name, value in found.items()}
    parts = {"": "bits_per_byte", ".beyond": "bits_per_byte_beyond"}
    return {f"{found['length']}{part}": finite(found.get(key)) for part, key in parts.items() if key in found}


def _both_times(run: Run, base: Run, target: float) -> tuple[float, float] | None:
    ours, theirs = first_reached(run.curve("wall_s"), target), first_reached(base.curve("wall_s"), target)
    return None if ours is None or theirs is None else (ours, theirs)


def _grouped(group: str, name: str) -> Callable[[Run], float | None]:
    """The run's bits per byte of a domain, stored plainly or as {"bits_per_byte": …}."""

    def value(run: Run) -> float | None:
        found = run.outcome.get(group)
        found = found.get(name) if isinstance(found, Mapping) else found
        return finite(found.get("bits_per_byte") if isinstance(found, Mapping) else found)

    return value


def quality_word(cost: Interval, margin: float) -> str:
    """better (interval below 1), non-inferior (none above 1 + margin), inferior (all above it) or inconclusive."""
    if cost.high < 1:
        return "better"
    if cost.high <= 1 + margin:
        return "non-inferior"
    return "inferior" if cost.low > 1 + margin else "inconclusive"
