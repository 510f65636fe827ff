"""Session files as read: samples of closed rounds, one arm's values by round, and how each metric is to be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lmperf.records import CheckFailed, InputError, Metric, Sample, SessionSpec, from_json, read_lines
from lmperf.statistics import SIZE_WORDS, SPEED_WORDS

BASELINE, CONTROL = "baseline", "baseline_prime"


@dataclass(frozen=True)
class Kind:
    """How a metric is read: which way is better, the two words of its verdict, and whether it is a counted quantity."""

    lower_is_better: bool | None
    words: tuple[str, str] = SPEED_WORDS
    counted: bool = False
    utilisation: bool = False


TIME = Kind(True)
RATE = Kind(False)
SIZE = Kind(True, SIZE_WORDS, counted=True)
SHARE_HIGH = Kind(False, SIZE_WORDS, counted=True)
UTILISATION = Kind(False, SIZE_WORDS, utilisation=True)
UNKNOWN = Kind(None)

KINDS = {
    "wait_share": Kind(True, SIZE_WORDS),
    "hit_rate": SHARE_HIGH,
    "break_even_steps": Kind(True, SIZE_WORDS),
    "comm_share": Kind(True, SIZE_WORDS),
    "wire_reduction": SHARE_HIGH,
}


def kind_of(metric: str, unit: str) -> Kind:
    """The reading of a metric by its name, else by the ending of its name and its unit."""
    if metric in KINDS:
        return KINDS[metric]
    if metric.startswith(("mfu", "hfu", "mbu", "flops")):
        return UTILISATION
    if metric.endswith("recall"):
        return SHARE_HIGH
    if metric.endswith(("_per_s", "bandwidth")) or unit.endswith("/s"):
        return UNKNOWN if metric.startswith("break_even") else RATE
    if metric.endswith("_s") or unit == "s":
        return TIME
    return SIZE if unit == "bytes" or "bytes" in metric else UNKNOWN


@dataclass(frozen=True)
class Session:
    """One session file as read: its spec, one fingerprint, the samples of closed rounds, and the memory lines."""

    path: Path
    spec: SessionSpec
    fingerprint: str
    samples: tuple[Sample, ...]
    memory: tuple[Mapping[str, Any], ...]
    rounds: int
    finished: bool

    @cached_property
    def index(self) -> dict[tuple[str, str], dict[int, Sample]]:
        """(arm, cell) to round to sample."""
        found: dict[tuple[str, str], dict[int, Sample]] = {}
        for sample in self.samples:
            found.setdefault((sample.arm, sample.cell), {})[sample.round] = sample
        return found


def read_session(path: Path | str) -> Session:
    """Read a session file; rounds that no round line closed are left out, and two fingerprints are a `CheckFailed`."""
    path = Path(path)
    lines = read_lines(path)
    if not lines or lines[0].get("kind") != "header":
        raise InputError(f"{path}: the first line is no session header; measure this session again")
    spec = from_json(SessionSpec, lines[0]["spec"])
    return Session(
        path=path,
        spec=spec,
        fingerprint=_one_fingerprint(path, lines),
        samples=tuple(_closed_samples(path, lines)),
        memory=tuple({(m["arm"], m["cell"]): m for m in lines if m.get("kind") == "memory"}.values()),
        rounds=sum(line.get("kind") == "round" for line in lines),
        finished=lines[-1].get("kind") == "end",
    )


def _one_fingerprint(path: Path, lines: Sequence[Mapping[str, Any]]) -> str:
    seen = {str(line["fingerprint"]) for line in lines if "fingerprint" in line}
    seen |= {str(line["details"]["fingerprint"]) for line in lines if "fingerprint" in (line.get("details") or {})}
    if len(seen) != 1:
        listed = " and ".join(sorted(seen)) or "none"
        raise CheckFailed(f"{path}: a session is one machine in one environment, but its lines name {listed}")
    return seen.pop()


def _closed_samples(path: Path, lines: Sequence[Mapping[str, Any]]) -> Iterator[Sample]:
    """Samples of closed rounds; where a killed round was measured again its last samples stand."""
    waiting: dict[int, dict[tuple[str, str], Sample]] = {}
    closed: set[int] = set()
    for line in lines:
        if line.get("kind") == "sample":
            sample = from_json(Sample, {key: value for key, value in line.items() if key != "kind"})
            waiting.setdefault(sample.round, {})[sample.arm, sample.cell] = sample
        elif line.get("kind") == "round":
            if line["round"] in closed:
                raise CheckFailed(f"{path}: round {line['round']} is closed twice, so it would be counted twice")
            closed.add(line["round"])
            yield from waiting.pop(line["round"], {}).values()


def measured(sample: Sample) -> dict[str, Metric]:
    """The metrics of an ok sample, with tokens/s and FLOP/s from the step time where those are known."""
    if sample.status != "ok":
        return {}
    metrics = {name: metric for name, metric in sample.metrics.items() if metric.value is not None}
    tokens = sample.details.get("tokens_per_step")
    time = metrics.get("step_time_s")
    flops = sample.details.get("flops_per_step")
    if tokens and time and time.value:
        metrics["tokens_per_s"] = Metric("tokens/s", tokens / time.value)
    if flops and time and time.value:
        metrics["flops_per_s"] = Metric("FLOP/s", flops / time.value)
    return metrics


@dataclass(frozen=True)
class ArmRounds:
    """One arm at one cell and metric: its value by round, its typed failure if any, and the red badges by round."""

    name: str
    values: Mapping[int, float]
    samples: Mapping[int, Sample]

    @property
    def failures(self) -> list[Sample]:
        """The samples that did not end well."""
        return [sample for sample in self.samples.values() if sample.status != "ok"]

    @property
    def status(self) -> str | None:
        """ok; the commonest failure where no round went well; "unstable" where only some did; None without samples."""
        if not self.samples:
            return None
        if not self.failures:
            return "ok"
        common = Counter(sample.status for sample in self.failures).most_common(1)[0][0]
        return common if len(self.failures) == len(self.samples) else "unstable"

    @property
    def reason(self) -> str | None:
        """What went wrong, in how many rounds and in which phase."""
        if not self.failures:
            return None if self.samples else "no closed round"
        first = self.failures[0]
        text = first.reason or first.status
        text += f" (phase: {first.phase})" if first.phase else ""
        some = len(self.failures) < len(self.samples)
        return f"{first.status} in {len(self.failures)} of {len(self.samples)} rounds: {text}" if some else text


def arm_rounds(session: Session, arm: str, cell: str, metric: str) -> ArmRounds:
    """One arm's values of a metric at a cell, by round."""
    samples = session.index.get((arm, cell), {})
    values = {n: measured(s)[metric].value for n, s in samples.items() if metric in measured(s)}
    return ArmRounds(arm, {n: float(value) for n, value in values.items() if value is not None}, samples)


def memory_values(session: Session, cell: str, metric: str = "peak_memory_bytes") -> dict[str, float | None]:
    """Arm to the value of its memory process sample at this cell, None where that failed."""
    lines = {line["arm"]: line for line in session.memory if line["cell"] == cell}
    return {arm: memory_value(line, metric) for arm, line in lines.items()}


def memory_value(line: Mapping[str, Any] | None, metric: str) -> float | None:
    """A metric of one memory line, None where the line or the metric is missing."""
    value = ((line or {}).get("metrics") or {}).get(metric, {}).get("value")
    return None if value is None else float(value)
