"""Two reports of one machine, verdict by verdict: what got better, what got worse, what came and went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmperf.readings import BASELINE, CONTROL, kind_of
from lmperf.records import InputError
from lmperf.tables import read_csv

KEY = ("axis", "variant", "workload", "shape", "metric", "device", "dtype")
DIFF_COLUMNS = ("table", "what", "old_verdict", "new_verdict", "old_ratio", "new_ratio", "change", "reason")
GOOD = ("faster", "better", "non-inferior", "reproduced")
BAD = ("slower", "worse", "inferior")
LEVEL = ("same", "small difference")

Row = Mapping[str, Any]


def diff(old: Path, new: Path) -> tuple[list[dict[str, Any]], bool]:
    """Rows (DIFF_COLUMNS) of all verdicts of two report folders, changed ones first, and whether anything got worse.

    Raises `InputError` where a folder holds no results, or where a session was measured on another machine.
    """
    before, after = _results(old), _results(new)
    _same_machine(old, before, new, after)
    rows = list(_result_changes(before, after))
    for name, key in (("ablation", ("recipe", "dimension", "metric")), ("claims", ("id", "statement"))):
        rows += _table_changes(name, key, _table(old, name), _table(new, name))
    order = {"worse": 0, "better": 1, "changed": 2, "gone": 3, "new": 4, "same": 5}
    rows.sort(key=lambda row: order[row["change"]])
    return rows, any(row["change"] == "worse" for row in rows)


def diff_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The changed rows as text, one line each, and a last line of counts."""
    lines = []
    for row in rows:
        if row["change"] != "same":
            words = " -> ".join(str(row[name] or "-") for name in ("old_verdict", "new_verdict"))
            ratios = " -> ".join("-" if row[n] is None else f"{row[n]:.3f}" for n in ("old_ratio", "new_ratio"))
            reason = f" ({row['reason']})" if row["reason"] else ""
            lines.append(f"{row['change']:8} {row['what']}: {words}, ratio {ratios}{reason}")
    counts = Counter(row["change"] for row in rows)
    return [*lines, ", ".join(f"{count} {change}" for change, count in counts.items()) or "nothing to compare"]


def _table(folder: Path, name: str) -> list[dict[str, str | None]]:
    return read_csv(Path(folder) / "tables" / f"{name}.csv")


def _results(folder: Path) -> dict[tuple[str | None, ...], Row]:
    rows = _table(folder, "results")
    if not rows:
        raise InputError(f"{folder}: no report (tables/results.csv is missing or empty)")
    missing = [name for name in (*KEY, "verdict", "fingerprint") if name not in rows[0]]
    if missing:
        raise InputError(f"{folder}: tables/results.csv has no column {missing[0]!r}")
    compared = [row for row in rows if row["variant"] not in (BASELINE, CONTROL)]
    return {tuple(row[name] for name in KEY): row for row in compared}


def _same_machine(old: Path, before: Mapping[Any, Row], new: Path, after: Mapping[Any, Row]) -> None:
    """Refuse when any comparison that both reports hold was measured on two machines, or none could ever match."""
    first, second = ({row["fingerprint"] for row in rows.values()} for rows in (before, after))
    unlike = [key for key in before.keys() & after.keys() if before[key]["fingerprint"] != after[key]["fingerprint"]]
    if unlike or (first and second and not first & second):
        raise InputError(
            f"{old} and {new}: measured on different machines or environments "
            f"({', '.join(sorted(map(str, first)))} and {', '.join(sorted(map(str, second)))}); "
            "only reports of one fingerprint may be compared"
        )


def _result_changes(before: Mapping[Any, Row], after: Mapping[Any, Row]) -> Iterator[dict[str, Any]]:
    for key in dict.fromkeys([*before, *after]):
        one, two = before.get(key), after.get(key)
        axis, variant, workload, shape, metric, *_ = key
        row = _pair("results", f"{axis}/{variant}, {workload} at {shape}, {metric}", one, two)
        if one and two:
            row |= _change(one, two) or _shift(one, two)
        yield row


def _table_changes(
    name: str, key: Sequence[str], before: Sequence[Row], after: Sequence[Row]
) -> Iterator[dict[str, Any]]:
    """Verdicts of the ablation (non-inferior to inferior is worse) and of the claims (a change is neither)."""
    old = {tuple(row.get(part) for part in key): row for row in before}
    new = {tuple(row.get(part) for part in key): row for row in after}
    for names in dict.fromkeys([*old, *new]):
        one, two = old.get(names), new.get(names)
        if name == "ablation" and names[1] in ("speed", "memory") and names[2] != "matched_speedup":
            continue  # these are rows of the results already
        row = _pair(name, ", ".join(str(part) for part in names), one, two)
        if one and two:
            change = _change(one, two) or {"change": "same"}
            if name == "claims" and change["change"] != "same":
                change = {"change": "changed", "reason": two.get("reason")}
            row |= change
        yield row


def _pair(table: str, what: str, one: Row | None, two: Row | None) -> dict[str, Any]:
    return {
        "table": table, "what": what,
        "old_verdict": one and one["verdict"], "new_verdict": two and two["verdict"],
        "old_ratio": _number(one, "ratio", "value"), "new_ratio": _number(two, "ratio", "value"),
        "change": "gone" if two is None else "new", "reason": None,
    }  # fmt: skip


def _number(row: Row | None, *names: str) -> float | None:
    value = next((row[name] for name in names if name in row), None) if row else None
    return float(value) if value else None


def _failed(row: Row) -> bool:
    return row.get("status") not in (None, "ok", "missed")


def _change(one: Row, two: Row) -> dict[str, Any] | None:
    """The change that statuses or verdicts tell; None where they are the same."""
    if _failed(one) != _failed(two):
        worse = _failed(two)
        return {"change": "worse" if worse else "better", "reason": f"{one['status']} before, {two['status']} now"}
    old, new = one["verdict"], two["verdict"]
    if old == new:
        return None
    ranks = _rank(old), _rank(new)
    if None in ranks or ranks[0] == ranks[1]:
        return {"change": "changed", "reason": two.get("reason")}
    word = "worse" if ranks[1] < ranks[0] else "better"
    return {"change": word, "reason": f"{old} before, {new} now"}


def _rank(verdict: str | None) -> int | None:
    """Good above level above bad; None for words that say nothing sure, whose change is no loss and no gain."""
    return 2 if verdict in GOOD else 1 if verdict in LEVEL else 0 if verdict in BAD else None


def _shift(one: Row, two: Row) -> dict[str, Any]:
    """The same verdict with intervals that do not overlap: the effect itself has moved."""
    bounds = [_number(row, name) for row in (one, two) for name in ("ci_low", "ci_high")]
    if None in bounds or (bounds[3] >= bounds[0] and bounds[2] <= bounds[1]):
        return {"change": "same"}
    lower_is_better = kind_of(str(two["metric"]), str(two.get("unit"))).lower_is_better
    if lower_is_better is None:
        return {"change": "changed", "reason": "the intervals do not overlap"}
    fell = bounds[3] < bounds[0]
    return {"change": "better" if fell == lower_is_better else "worse", "reason": "the intervals do not overlap"}
