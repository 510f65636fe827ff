"""How fast this machine takes training steps right now: what `lmperf plan` reckons with, in processes of their own.

Run as `python -m lmperf.probing`: one JSON request on stdin, one JSON answer on stdout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lmperf.environments import inherited_with, process_environment
from lmperf.planning import Plan
from lmperf.records import ModelShape, from_json, to_json

TIMED_STEPS = 5
FORMATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Probe:
    """Measured costs: seconds of a start and of steps; what a number format makes of a step's time, against float32."""

    start_s: float  # of a process until torch and the registry are there, one beside it on each further core
    timed_step_s: float  # baseline, the configuration's timed step with all threads
    quality_step_s: float  # baseline, the quality runs' step with one thread, one run beside it on each further core
    slower: Mapping[str, float]  # "bfloat16" → 8.0: emulated here
    formats: Mapping[str, str]  # "precision/bf16_autocast" → "bfloat16"


def probe(plan: Plan, cores: int) -> Probe:
    """Time the plan's two baseline steps, the formats and a start; about ten seconds, nothing is written."""
    timed = plan.profile["session"]
    first = next(iter(plan.quality.values()))
    keys = {key for spec in plan.sessions.values() for arm in spec.arms for key in arm.variants}
    keys |= {key for spec in plan.quality.values() for key in spec.variants}
    environment = plan.config.measure.environment
    common = {"device": timed["device"], "learning_rate": 1e-3, "plugins": list(plan.config.plugins)}
    steps = {"batch": timed["batch_size"], "length": timed["sequence_length"], "threads": cores, "formats": ["float32"]}
    whole = _answers([{**common, **steps, "model": timed["model"], "keys": sorted(keys)}], environment)[0]
    steps = {"batch": first.batch_size, "length": first.sequence_length, "threads": 1, "formats": list(FORMATS)}
    beside = _answers([{**common, **steps, "model": to_json(first.model), "keys": []}] * cores, environment)
    seconds = {name: max(answer["step_s"][name] for answer in beside) for name in FORMATS}
    return Probe(
        start_s=max(answer["start_s"] for answer in beside),
        timed_step_s=whole["step_s"]["float32"],
        quality_step_s=seconds["float32"],
        slower={name: value / seconds["float32"] for name, value in seconds.items()},
        formats=whole["formats"],
    )


def _answers(requests: list[dict[str, Any]], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Each request answered by a process of its own, all at the same time."""
    running = []
    for request in requests:
        settings = inherited_with(process_environment(request["threads"], environment))
        process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings
        )
        running.append((process, json.dumps({**request, "sent": time.time()})))
    for process, text in running:  # all are asked before the first is waited for
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.close()
        process.stdin = None
    answers = []
    for process, _ in running:
        out, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"the probe of this machine's speed ended with exit code {process.returncode}")
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Start time, seconds of a step by number format, and the number format of every variant asked for."""
    import torch

    from lmperf import registry
    from lmperf.utilisation import dtype_of

    torch.set_num_threads(request["threads"])
    plugins = tuple(request["plugins"])
    found = {key: registry.get(key, plugins) for key in request["keys"]}
    able = [key for key, entry in found.items() if not entry.unavailable()]
    formats = {key: dtype_of(registry.compose((key,), plugins)) for key in able}
    started = time.time() - request["sent"]
    return {"start_s": started, "step_s": {f: step_s(request, f) for f in request["formats"]}, "formats": formats}


def step_s(request: Mapping[str, Any], number_format: str) -> float:
    """Seconds of the fastest of some training steps on random tokens, after one that is not counted."""
    import torch

    from lmperf.model import TrainingStep, build
    from lmperf.recipe import Precision, Recipe

    half = None if number_format == "float32" else getattr(torch, number_format)
    recipe, shape = Recipe(precision=Precision(autocast=half)), from_json(ModelShape, request["model"])
    model = build(shape, recipe, seed=0, device=request["device"])
    step = TrainingStep(model, recipe, learning_rate=request["learning_rate"], device=request["device"])
    tokens = torch.randint(shape.vocab_size, (request["batch"], request["length"] + 1)).to(request["device"])
    best = float("inf")
    for number in range(TIMED_STEPS + 1):
        start = time.perf_counter()
        step(tokens[:, :-1], tokens[:, 1:]).loss.item()
        best = min(best, time.perf_counter() - start) if number else best
    return best


def main() -> None:
    """Answer the request on stdin."""
    sys.stdout.write(json.dumps(answer(json.loads(sys.stdin.read()))) + "\n")


if __name__ == "__main__":
    main()
