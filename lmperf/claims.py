"""The published claims put to the test: each figure beside what was measured here, with one verdict and its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from lmperf.claim_checks import CHECKS
from lmperf.evidence import Evidence, Outcome, find_quality, find_result
from lmperf.records import InputError
from lmperf.tables import frame, records, write_csv

CLAIM_COLUMNS = ("id", "statement", "claimed", "measured", "ci_low", "ci_high", "verdict", "reason")
CLAIM_VERDICTS = ("reproduced", "direction only", "no effect", "contradicted", "inconclusive", "not testable here")
CLAIMS_FILE = Path(__file__).with_name("claims.yaml")
UNSOURCED = " [no public source]"


@dataclass(frozen=True)
class ClaimTest:
    """One figure of a claim and the comparison that tests it (see the head of claims.yaml)."""

    what: str
    claimed: str
    table: str | None = None
    axis: str | None = None
    recipe: str | None = None
    variant: tuple[str, ...] = ()
    versus: tuple[str, ...] = ()
    workload: tuple[str, ...] = ()
    metric: str | None = None
    shape: str | None = None
    stressed: bool = False
    ratio: float | None = None
    direction: str | None = None
    within: float | None = None
    invert: bool = False
    harm: bool = False
    requires: str | None = None
    check: str | None = None
    never: str | None = None

    @property
    def expected(self) -> str:
        """Which way the claimed effect goes: less, more or none."""
        return self.direction or ("less" if self.ratio is not None and self.ratio < 1 else "more")


@dataclass(frozen=True)
class Claim:
    """One published claim and its tests."""

    id: str
    statement: str
    source: str | None
    tests: tuple[ClaimTest, ...] = field(default=())


def load_claims(path: Path = CLAIMS_FILE) -> list[Claim]:
    """Read the claims; an unknown key, an unknown check or a test without expectation is an `InputError`."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [_claim(path, entry) for entry in entries]


def _claim(path: Path, entry: Mapping[str, Any]) -> Claim:
    unknown = set(entry) - {"id", "statement", "source", "tests"}
    if unknown:
        raise InputError(f"{path}: claim {entry.get('id')}: unknown key {sorted(unknown)[0]!r}")
    tests = tuple(_test(path, entry["id"], item) for item in entry["tests"])
    return Claim(entry["id"], entry["statement"], entry["source"], tests)


def _test(path: Path, claim: str, item: Mapping[str, Any]) -> ClaimTest:
    allowed = [f.name for f in fields(ClaimTest)]
    unknown = set(item) - set(allowed)
    if unknown:
        raise InputError(
            f"{path}: claim {claim}: unknown key {sorted(unknown)[0]!r} in a test; allowed: {', '.join(allowed)}"
        )
    several = {"variant", "versus", "workload"}
    test = ClaimTest(**{key: _names(value) if key in several else value for key, value in item.items()})
    expectations = [test.ratio, test.direction, test.within, test.check, test.never]
    if sum(value is not None for value in expectations) != 1:
        raise InputError(f"{path}: claim {claim}: {test.what!r} needs one of ratio, direction, within, check, never")
    if test.check is not None and test.check not in CHECKS:
        raise InputError(f"{path}: claim {claim}: check {test.check!r} is unknown; allowed: {', '.join(CHECKS)}")
    return test


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def judge(results: pd.DataFrame, quality: pd.DataFrame, tables_dir: Path, machine: Mapping[str, Any]) -> pd.DataFrame:
    """Judge every claim against this run's tables and write claims.csv, one row a test of a claim (CLAIM_COLUMNS)."""
    evidence = Evidence(records(results), records(quality), Path(tables_dir), machine)
    rows = [claim_row(claim, test, evidence) for claim in load_claims() for test in claim.tests]
    return write_csv(frame(rows, CLAIM_COLUMNS), Path(tables_dir) / "claims.csv")


def claim_row(claim: Claim, test: ClaimTest, evidence: Evidence) -> dict[str, Any]:
    """One row of claims.csv."""
    outcome = judge_test(test, evidence)
    statement = f"{claim.statement}{'' if claim.source else UNSOURCED}: {test.what}"
    measured = {"measured": outcome.measured, "ci_low": outcome.low, "ci_high": outcome.high}
    return {
        "id": claim.id, "statement": statement, "claimed": test.claimed, **measured,
        "verdict": outcome.verdict, "reason": outcome.reason,
    }  # fmt: skip


def judge_test(test: ClaimTest, evidence: Evidence) -> Outcome:
    """What this run says about one figure of a claim."""
    if test.never:
        return Outcome("not testable here", test.never)
    if test.requires == "cuda" and not evidence.has_cuda:
        return Outcome("not testable here", "no CUDA device")
    if test.check:
        return CHECKS[test.check](evidence)
    found = (find_quality if test.table == "quality" else find_result)(test, evidence)
    return found if isinstance(found, Outcome) else found.against(test)
