"""The whole flow without Snakemake: the same verbs and files, skipping what is current."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from lmperf.planning import Plan, threads
from lmperf.records import CheckFailed
from lmperf.steps import Stamps, Step, command, steps


def stamps_of(plan: Plan) -> Stamps:
    """The memory of earlier runs, beside the results."""
    return Stamps(Path(plan.reports))


def pending(plan: Plan) -> Iterator[tuple[Step, str]]:
    """The steps that would run, each with its reason; a step whose input will be re-made runs too."""
    stamps = stamps_of(plan)
    remade: dict[str, str] = {}
    for step in steps(plan):
        upstream = next((remade[name] for name in step.inputs if name in remade), None)
        reason = stamps.reason(step) or (f"follows {upstream}" if upstream else None)
        if reason:
            remade |= dict.fromkeys(step.outputs, step.name)
            yield step, reason


def run(plan: Plan, tell: Callable[[str], None]) -> int:
    """Run every step that is not current, timed ones alone, quality runs side by side; returns how many ran."""
    stamps, done, batch = stamps_of(plan), 0, []
    for step in steps(plan):
        if batch and not step.parallel:
            done += _together(batch, plan, tell)
            batch = []
        reason = stamps.reason(step)
        if reason is None:
            continue
        if step.parallel:
            batch.append(step)
            continue
        tell(f"{step.name}: {reason}")
        _execute(step, plan)
        done += 1
    return done + (_together(batch, plan, tell) if batch else 0)


def _together(batch: list[Step], plan: Plan, tell: Callable[[str], None]) -> int:
    with ThreadPoolExecutor(max_workers=max(1, threads(plan.config))) as pool:
        for step, _ in zip(batch, pool.map(lambda step: _execute(step, plan), batch), strict=True):
            tell(f"{step.name}: done")
    return len(batch)


def _execute(step: Step, plan: Plan) -> None:
    words = [sys.executable, "-m", "lmperf", *command(step, plan.data, plan.reports)]
    if subprocess.run(words, check=False).returncode != 0:
        raise CheckFailed(f"{step.name} failed; its message is above")
