"""The named checks of claims that are no single row of a table: stages, shares of recipes, warm-up, attribution."""

from __future__ import annotations

from collections.abc import Callable

from lmperf.evidence import DIFFERENT, QUALITY_DIRECTIONS, Evidence, Outcome
from lmperf.readings import BASELINE, CONTROL
from lmperf.records import read_json
from lmperf.tables import read_csv


def profile_stage(evidence: Evidence) -> Outcome:
    """A1: the profile stage left a trace and a table of hotspots."""
    traces = list((evidence.tables.parent / "profile").rglob("*.json*"))
    rows = read_csv(evidence.tables / "hotspots.csv")
    if not rows:
        return Outcome("not testable here", "the profile stage was not run: hotspots.csv is missing")
    if not traces:
        return Outcome("contradicted", "the profile stage left a table but no trace for TensorBoard")
    return Outcome("reproduced", f"{len(rows)} hotspots and a trace for TensorBoard", float(len(rows)))


def top_hotspots(evidence: Evidence) -> Outcome:
    """A8: the three operators with most self time."""
    rows = read_csv(evidence.tables / "hotspots.csv")
    if len(rows) < 3:
        return Outcome("not testable here", "the profile stage was not run: hotspots.csv has no three rows")
    names = [str(next(iter(row.values()))) for row in rows[:3]]
    shares = [float(row["share"]) for row in rows[:3] if row.get("share")]
    return Outcome("reproduced", f"top three: {', '.join(names)}", sum(shares) if shares else None)


def three_dimensions(evidence: Evidence) -> Outcome:
    """A2: share of the measured training-step arms with throughput, memory and a utilisation."""
    arms: dict[tuple[str, str, str], set[str]] = {}
    for row in evidence.results:
        if row["workload"] == "training_step" and row["variant"] != CONTROL and row["value"] is not None:
            arms.setdefault((row["session"], row["variant"], row["shape"]), set()).add(_dimension(row["metric"]))
    timed = {arm: found for arm, found in arms.items() if "throughput" in found}
    if not timed:
        return Outcome("not testable here", "no training-step session was run")
    whole = [arm for arm, found in timed.items() if {"throughput", "memory", "intensity"} <= found]
    share = len(whole) / len(timed)
    lacking = next((f"{arm[1]} of {arm[0]} lacks one" for arm in timed if arm not in whole), "none lacks one")
    verdict = "reproduced" if share == 1 else "direction only" if whole else "inconclusive"
    return Outcome(verdict, f"{len(whole)} of {len(timed)} arms have all three; {lacking}", share)


def _dimension(metric: str) -> str:
    if metric == "tokens_per_s":
        return "throughput"
    if metric == "peak_memory_bytes":
        return "memory"
    return "intensity" if metric.startswith(("mfu", "hfu", "flops")) else "other"


def warm_up(evidence: Evidence) -> Outcome:
    """A3: the baseline's first step against its steady step, of the training step where one was measured."""
    rows = [row for row in read_csv(evidence.tables / "warmup.csv") if row["place"] == "0"]
    if not rows:
        return Outcome("not testable here", "no session kept its warm-up curve")
    row = next((row for row in rows if row["workload"] == "training_step"), rows[0])
    ratio, low, high = (float(row[key]) if row[key] else None for key in ("ratio", "ci_low", "ci_high"))
    note = f"first step / steady step in {row['session']} at {row['shape']}, n = {row['n']}"
    if low is None or high is None or ratio is None:
        return Outcome("inconclusive", f"{note}: no interval", ratio)
    if low > 1 + DIFFERENT:
        return Outcome("reproduced", note, ratio, low, high)
    if high < 1 - DIFFERENT:
        return Outcome("contradicted", note, ratio, low, high)
    same = low >= 1 - DIFFERENT and high <= 1 + DIFFERENT
    return Outcome("no effect" if same else "inconclusive", note, ratio, low, high)


def prefix_reuse(evidence: Evidence) -> Outcome:
    """B2: the hit rate of the prefix cache on requests that share prefixes."""
    rows = [r for r in evidence.results if r["metric"] == "hit_rate" and str(r["variant"]).startswith("prefix_cache")]
    rows = [row for row in rows if row["value"] is not None]
    if not rows:
        return Outcome("not testable here", "prefix_cache was not measured: not in this preset's sessions")
    rate = rows[-1]["value"]
    verdict = "reproduced" if rate >= 0.4 else "direction only" if rate > 0 else "no effect"
    return Outcome(verdict, f"hit rate at {rows[-1]['shape']}; it follows from how much the requests share", rate)


def expert_bytes(evidence: Evidence) -> Outcome:
    """B13: bytes of the experts' gradients with the largest entries alone, against the same gradients uncompressed."""
    values = {
        row["metric"]: row["value"]
        for row in evidence.results
        if row["variant"] == "moe_topk" and row["metric"] in ("expert_bytes", "expert_dense_bytes")
    }
    sent, dense = values.get("expert_bytes"), values.get("expert_dense_bytes")
    if not sent or not dense:
        return Outcome("not testable here", "distributed/moe_topk was not measured: not in this preset's sessions")
    ratio = sent / dense
    verdict = "reproduced" if ratio <= 0.2 else "direction only" if ratio < 1 else "contradicted"
    return Outcome(verdict, "counted; it follows from the share of entries that is kept", ratio)


def accuracy_verdicts(evidence: Evidence) -> Outcome:
    """A8: share of the recipes with quality runs whose loss has a verdict (inconclusive is none)."""
    rows = [
        r for r in evidence.quality if r["metric"] == "bits_per_byte" and r["recipe"] != BASELINE and not r["stressed"]
    ]
    if not rows:
        return Outcome("not testable here", "no quality run in this preset")
    judged = [row for row in rows if row["verdict"] in QUALITY_DIRECTIONS]
    share = len(judged) / len(rows)
    verdict = "reproduced" if share == 1 else "direction only" if judged else "inconclusive"
    return Outcome(verdict, f"{len(judged)} of {len(rows)} recipes have a verdict on accuracy", share)


def five_dimensions(evidence: Evidence) -> Outcome:
    """B12: share of the recipes that change numerics for which the ablation has a number in all five dimensions."""
    tried = {row["recipe"] for row in evidence.quality if row["recipe"] != BASELINE}
    found: dict[str, set[str]] = {}
    for row in read_csv(evidence.tables / "ablation.csv"):
        if row["recipe"] in tried and row["value"] is not None:
            found.setdefault(str(row["recipe"]), set()).add(str(row["dimension"]))
    if not found:
        return Outcome("not testable here", "the ablation holds no recipe that changes numerics")
    whole = [recipe for recipe, dimensions in found.items() if len(dimensions) == 5]
    lacking = next((f"{r} lacks one" for r in sorted(found) if r not in whole), "none lacks one")
    verdict = "reproduced" if len(whole) == len(found) else "direction only" if whole else "inconclusive"
    return Outcome(verdict, f"{len(whole)} of {len(found)} recipes have all five; {lacking}", len(whole) / len(found))


def checklist(evidence: Evidence) -> Outcome:
    """B11: the items of the doctor's checklist on this configuration."""
    stored = evidence.tables / "checklist.json"
    items = evidence.machine.get("checklist") or (read_json(stored) if stored.exists() else [])
    if not items:
        return Outcome("not testable here", "the tables hold no checklist (lmperf doctor prints it)")
    words = [str(item.get("status") or item.get("result")) for item in items]
    passed = words.count("pass")
    note = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    return Outcome("reproduced" if passed == len(words) else "direction only", note, passed / len(words))


def concentration(evidence: Evidence) -> Outcome:
    """B15: the smallest share of the stack's changes that brings 90 % of its gain in time."""
    rows = [row for row in read_csv(evidence.tables / "ladder.csv") if row["metric"] == "step_time_s"]
    summary = next((row for row in rows if row["kind"] == "concentration"), None)
    if summary is None:
        return Outcome("not testable here", "session stack.training_step was not run: not in this preset")
    if summary["share"] is None:
        return Outcome("inconclusive", summary["reason"] or "the stack shows no gain to share")
    share, changes = float(summary["share"]), int(str(summary["step"]))
    reason, first = summary["reason"] or "", [r for r in rows if r["kind"] == "attribution" and r["share"]]
    largest = max(first, key=lambda row: float(str(row["share"])))
    high = float(largest["ci_high"]) if largest["ci_high"] else None
    if share < 0.1 or (share * changes <= 1 and changes <= 10):
        word = "reproduced" if share < 0.1 else "direction only"
        return Outcome(word, reason, share)
    if changes > 10 or (high is not None and high < 0.9):
        return Outcome("contradicted", reason, share)
    return Outcome("inconclusive", f"{reason}; its interval leaves 90 % open", share)


CHECKS: dict[str, Callable[[Evidence], Outcome]] = {
    check.__name__: check
    for check in (
        profile_stage, top_hotspots, three_dimensions, warm_up, prefix_reuse, accuracy_verdicts, five_dimensions,
        checklist, concentration, expert_bytes,
    )
}  # fmt: skip
