"""What the report shows of the attention sweeps: growth, crossings, the table at one length, lines of the figures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmperf.quantities import finite
from lmperf.scaling import FEWEST_LENGTHS

Row = Mapping[str, Any]

SHOWN_LENGTH = 2048  # tokens; the longest measured length stands in where this one was not measured
HEAD_DIM = 64  # of the figures, where it was swept
TIME, MEMORY = "step_time_s", "peak_memory_bytes"
NAMES = {TIME: "time", MEMORY: "memory"}
AXIS_LABELS = {TIME: "time of one call (s)", MEMORY: "peak tensor memory (MiB)"}
BASELINE, FORWARD = "baseline", "operator_forward"
SAME = ("workload", "kind", "metric", "length", "sweep", "device", "dtype", "fingerprint")
NOTHING: Row = dict.fromkeys(("value", "ratio", "ci_low", "ci_high", "verdict", "status", "reason"))


def sweep_sections(rows: Sequence[Row]) -> dict[str, list[dict[str, Any]]]:
    """Session to its sweeps of two lengths and more, the one that is drawn first, from the rows of attention.csv."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["session"], row["sweep"] or ""), []).append(row)
    found: dict[str, list[dict[str, Any]]] = {}
    for (session, _), mine in groups.items():
        sweep = one_sweep(mine, rows)
        if len(sweep["lengths"]) > 1:
            found.setdefault(session, []).append(sweep)
    return {session: sorted(sweeps, key=drawn_first) for session, sweeps in found.items()}


def drawn_first(sweep: Mapping[str, Any]) -> tuple[bool, int]:
    """The order of a session's sweeps: head size 64 (an operator's own when none is named), then the most lengths."""
    named = re.search(r"\bhead_dim=(\d+)", sweep["shared"])
    return (named is not None and int(named[1]) != HEAD_DIM, -len(sweep["lengths"]))


def one_sweep(rows: Sequence[Row], everything: Sequence[Row]) -> dict[str, Any]:
    """A sweep's tables; `everything` holds the other sessions' rows, for the forward pass beside forward + backward."""
    first = rows[0]
    lengths = sorted({int(row["length"]) for row in rows if row["length"]})
    length = SHOWN_LENGTH if SHOWN_LENGTH in lengths or not lengths else lengths[-1]
    crossings = [row for row in rows if row["kind"] == "crossover"]
    others = [row["other"] for row in rows if row["kind"] == "length" and row["other"] not in (None, BASELINE)]
    second = others[0] if others else None
    at_length = length_lines([row for row in rows if row["length"] == str(length)], second)
    return {
        "session": first["session"],
        "shared": first["sweep"] or "",
        "what": first["workload"].removeprefix("operator_").replace("_", " + "),
        "lengths": lengths,
        "fewest": FEWEST_LENGTHS,
        "growth": list(growth_lines(rows)),
        "crossings": [[pair(row) for row in part if row["value"]] for part in split(crossings, {BASELINE, second})],
        "apart": [pair(row) for row in crossings if not row["value"]],
        "length": length,
        "asked": SHOWN_LENGTH,
        "second": second,
        "forward": forward_alone(first, everything, length),
        "at_length": at_length,
        "utilised": any(line["mfu"]["value"] for line in at_length),
    }


def forward_alone(like: Row, everything: Sequence[Row], length: int) -> dict[str, str]:
    """Variant to its forward time at the sizes of a session of forward + backward, where one session has it."""
    if like["workload"] == FORWARD:
        return {}
    same = [{**like, "workload": FORWARD, "kind": "length", "metric": TIME, "length": str(length)}[key] for key in SAME]
    return {row["variant"]: row["value"] for row in everything if [row[key] for key in SAME] == same and row["value"]}


def split(rows: Sequence[Row], references: set[str | None]) -> tuple[list[Row], list[Row]]:
    """Crossover rows with one of the references in the pair, and the others."""
    with_reference = [row for row in rows if references & {row["variant"], row["other"]}]
    return with_reference, [row for row in rows if row not in with_reference]


def variant_name(name: str) -> str:
    """An arm as the page calls it."""
    return "naive (baseline)" if name == BASELINE else name


def growth_lines(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """One line a variant that was measured at all: the growth rows of its time and of its memory."""
    lines: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["kind"] == "growth":
            line = lines.setdefault(row["variant"], {"variant": variant_name(row["variant"])})
            line[NAMES[row["metric"]]] = row
    yield from (line for line in lines.values() if {line[what]["n"] for what in NAMES.values()} != {"0"})


def pair(row: Row) -> dict[str, Any]:
    """A crossover row in words."""
    names = f"{variant_name(row['variant'])} and {variant_name(row['other'])}"
    return {**row, "names": names, "what": NAMES[row["metric"]]}


def length_lines(rows: Sequence[Row], second: str | None) -> list[dict[str, Any]]:
    """One line a variant at one length: time, memory and utilisation, and the ratios to both references."""
    found: dict[str, dict[tuple[str, bool], Row]] = {}
    for row in rows:
        found.setdefault(row["variant"], {})[row["metric"], row["other"] not in (None, BASELINE)] = row
    wanted = [(metric, other) for metric in (TIME, MEMORY) for other in (False, True) if second or not other]
    return [
        {
            "name": name, "variant": variant_name(name), "ratios": [mine.get(key, NOTHING) for key in wanted],
            "time": mine.get((TIME, False), NOTHING), "memory": mine.get((MEMORY, False), NOTHING),
            "mfu": mine.get(("mfu", False), NOTHING),
        }
        for name, mine in found.items()
    ]  # fmt: skip


def series(rows: Sequence[Row], sweep: Mapping[str, Any], metric: str) -> dict[str, list[tuple[float, float]]]:
    """Variant to (length, value) of one sweep: seconds, or MiB of memory."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        mine = row["session"] == sweep["session"] and (row["sweep"] or "") == sweep["shared"]
        if mine and row["kind"] == "length" and row["metric"] == metric and row["other"] in (None, BASELINE):
            value = finite(row["value"])
            if value:
                place = points.setdefault(variant_name(row["variant"]), [])
                place.append((float(row["length"]), value * (2**-20 if metric == MEMORY else 1)))
    return {name: sorted(values) for name, values in points.items()}


def labels(sweep: Mapping[str, Any], metric: str) -> dict[str, str]:
    """Variant to its line in a figure's legend: the fitted exponent where three lengths or more gave one."""
    found = {}
    for line in sweep["growth"]:
        exponent = finite((line.get(NAMES[metric]) or {}).get("value"))
        found[line["variant"]] = line["variant"] + (f": ∝ T^{exponent:.2f}" if exponent is not None else "")
    return found
