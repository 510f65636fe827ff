"""What this machine is, what can run on it and why not, and a checklist on a configuration with its measurements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lmperf import registry
from lmperf.config import SIZES
from lmperf.machine import fingerprint, machine
from lmperf.tables import read_csv

Row = Mapping[str, str | None]

BETTER, WORSE, EVEN = (
    frozenset({"faster", "better"}),
    frozenset({"slower", "worse"}),
    frozenset({"same", "small difference"}),
)
ALIGNMENT = 64
WAIT_PASS, WAIT_FAIL = 0.02, 0.10  # share of a step spent waiting for data
POOLING = ("MALLOC_MMAP_MAX_", "LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
MIXED = ("bf16_autocast", "fp16_autocast_scaler", "bf16_fp32_master")
GUARDS = ("qk_norm", "softcap")


@dataclass(frozen=True)
class Item:
    """One point of the checklist; `measurement` is None when nothing was measured here."""

    item: str
    status: str  # pass | warn | fail | unknown
    why: str
    measurement: dict[str, Any] | None = None


@dataclass(frozen=True)
class Evidence:
    """The configuration and what was measured on this very machine."""

    config: Mapping[str, Any]
    results: Sequence[Row] = ()
    quality: Sequence[Row] = ()
    elsewhere: int = 0  # rows of results.csv that another machine measured
    stack: frozenset[str] = field(default_factory=frozenset)

    def rows(self, variants: Iterable[str], metrics: Sequence[str]) -> list[Row]:
        """Rows with a ratio for these variants ("axis/name") and metrics."""
        wanted = set(variants)
        return [
            row for row in self.results
            if f"{row['axis']}/{row['variant']}" in wanted and row["metric"] in metrics and number(row["ratio"])
        ]  # fmt: skip

    def facts(self, text: str) -> str:
        """What the configuration says, or that there is none."""
        return text if self.config else "no configuration given"

    def not_measured(self, run: str) -> str:
        """What to say when there is no measurement."""
        other = " (there are results of another machine, which say nothing about this one)" if self.elsewhere else ""
        return f"not measured here{other}: run `{run}`"


def doctor(config_like: Mapping[str, Any] | None, tables: Path | None) -> dict[str, Any]:
    """{"machine", "fingerprint", "can_run", "checklist"} for a configuration (as plain values) and a tables folder."""
    facts = machine()
    mine = fingerprint(facts)
    plugins = tuple((config_like or {}).get("plugins") or ())
    evidence = gather(config_like, tables, mine)
    return {
        "machine": facts,
        "fingerprint": mine,
        "can_run": can_run(plugins),
        "checklist": [asdict(item) for item in checklist(evidence)],
    }


def gather(config_like: Mapping[str, Any] | None, tables: Path | None, mine: str) -> Evidence:
    """Read results.csv and quality.csv, keeping the rows that this machine measured."""
    config = config_like or {}
    results = read_csv(tables / "results.csv") if tables else []
    own = [row for row in results if row.get("fingerprint") == mine]
    # quality.csv has no fingerprint of its own; it stands beside the results it was made with.
    quality = read_csv(tables / "quality.csv") if tables and (own or not results) else []
    stack = frozenset((config.get("ablation") or {}).get("stack") or ())
    return Evidence(config, own, quality, len(results) - len(own), stack)


def can_run(plugins: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Every variant with its availability on this machine and the reason when it has none."""
    found = []
    for key, entry in registry.variants(plugins=plugins).items():
        reason = entry.unavailable()
        reason = "; ".join(dict.fromkeys(reason.split("; "))) if reason else None  # "no CUDA device" once is enough
        found.append({"variant": key, "available": reason is None, "reason": reason})
    return found


def checklist(evidence: Evidence) -> list[Item]:
    """The six points of claim B11; `ablation.stack` is the recipe that the configuration means to use."""
    return [
        aligned(evidence), dynamic_epsilon(evidence), guarded_attention(evidence), pooled_memory(evidence),
        mixed_precision(evidence), parallel_loader(evidence),
    ]  # fmt: skip


def number(text: str | None) -> float | None:
    """A cell as a finite number, None when it is empty or none."""
    try:
        value = float(text) if text else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def measurement(row: Row) -> dict[str, Any]:
    """The part of a result row that stands behind a verdict."""
    numbers = {key: number(row[key]) for key in ("value", "baseline_value", "ratio", "ci_low", "ci_high")}
    words = {key: row[key] for key in ("axis", "variant", "workload", "shape", "metric", "verdict", "session")}
    return {**words, **numbers}


def judge(item: str, in_use: bool, facts: str, rows: Sequence[Row], evidence: Evidence, run: str) -> Item:
    """Judge an optimisation by its best measured row: a gain left unused fails, so does a loss in use."""
    if not rows:
        return Item(item, "unknown", f"{facts}; {evidence.not_measured(run)}")
    row = min(rows, key=lambda r: (r["verdict"] not in BETTER, number(r["ratio"])))
    status, words = verdict(in_use, row["verdict"])
    name = f"{row['axis']}/{row['variant']}"
    ratio = f"{row['metric']} × {number(row['ratio']):.3f} under {row['workload']}, {row['verdict']}"
    return Item(item, status, f"{facts}; {words} ({name}: {ratio})", measurement(row))


def verdict(in_use: bool, word: str | None) -> tuple[str, str]:
    """Status and words for an optimisation that is in use or not, by what was measured of it."""
    if word in BETTER:
        return ("pass", "it pays here") if in_use else ("fail", "a measured gain is not used")
    if word in WORSE:
        return ("fail", "it is in use and does harm here") if in_use else ("pass", "it would do harm here")
    if word in EVEN:
        return ("pass", "it makes no difference here")
    return ("warn", "the measurement cannot tell yet: more rounds")


def model_dimensions(config: Mapping[str, Any]) -> dict[str, int]:
    """d_model, d_ff, head size and vocabulary of a configuration, as far as it says them."""
    model = config.get("model") or {}
    sizes = {**SIZES.get(model.get("size") or "", {}), **{k: v for k, v in model.items() if v and k != "size"}}
    found = {key: int(sizes[key]) for key in ("d_model", "d_ff") if key in sizes}
    if "d_model" in sizes and "heads" in sizes:
        found["key and value width"] = (
            int(sizes["d_model"]) // int(sizes["heads"]) * int(sizes.get("kv_heads") or sizes["heads"])
        )
    vocabulary = (config.get("tokenizer") or {}).get("vocab_size") or model.get("vocab_size")
    return found | ({"vocab_size": int(vocabulary)} if vocabulary else {})


def aligned(evidence: Evidence) -> Item:
    """Matmul dimensions are multiples of 64."""
    name, run = "matmul dimensions aligned to 64", "lmperf measure --session matmul.training_step"
    sizes = model_dimensions(evidence.config)
    if not sizes:
        return Item(name, "unknown", "no configuration: pass one with --config")
    off = {key: size for key, size in sizes.items() if size % ALIGNMENT}
    metrics = ("step_time_s",)
    if off and "matmul/padded_vocab" in evidence.stack:
        off.pop("vocab_size", None)
    if off:
        facts = "not multiples of 64: " + ", ".join(f"{key} {size}" for key, size in off.items())
        helpful = ["matmul/aligned_64", *(["matmul/padded_vocab"] if "vocab_size" in off else [])]
        return judge(name, False, facts, evidence.rows(helpful, metrics), evidence, run)
    facts = ", ".join(f"{key} {size}" for key, size in sizes.items()) + " are multiples of 64"
    rows = evidence.rows(("matmul/unaligned",), metrics)
    if not rows:
        return Item(name, "unknown", f"{facts}; whether that matters is {evidence.not_measured(run)}")
    row = rows[0]
    matters = "unaligned ones are slower here" if row["verdict"] in WORSE else "no loss from unaligned ones was shown"
    return Item(name, "pass", f"{facts}; {matters} (× {number(row['ratio']):.3f})", measurement(row))


def stability_rows(evidence: Evidence, recipe: str) -> dict[str, Row]:
    """Rows of quality.csv on a recipe's stability by metric, the stressed learning rate's where it was run."""
    rows = [r for r in evidence.quality if r["recipe"] == recipe and r["dimension"] == "stability"]
    return {str(row["metric"]): row for row in sorted(rows, key=lambda r: r["stressed"] == "True")}


def stable_enough(name: str, remedies: Sequence[str], facts: str, evidence: Evidence, run: str) -> Item:
    """Judge a guard against instability by quality runs: needed only where the baseline is unstable without it."""
    used = [key for key in remedies if key in evidence.stack]
    recipe = used[0] if used else "baseline"
    rows = stability_rows(evidence, recipe)
    counts = {key: number(row["value"]) for key, row in rows.items() if key in ("diverged_share", "nonfinite_steps")}
    known = {key: value for key, value in counts.items() if value is not None}
    if not known:
        return Item(name, "unknown", f"{facts}; {evidence.not_measured(run)}")
    shown = ", ".join(f"{key} {value:g}" for key, value in known.items())
    found = {"recipe": recipe, **known}
    if not any(known.values()):
        return Item(name, "pass", f"{facts}; {recipe} trains stably here ({shown})", found)
    status = "warn" if used or not known.get("diverged_share") else "fail"
    return Item(name, status, f"{facts}; {recipe} is not stable here ({shown})", found)


def dynamic_epsilon(evidence: Evidence) -> Item:
    """The norm's ε follows the batch size, where a fixed one is unstable."""
    name, run = "dynamic ε in the norm", "lmperf train --set 'quality.variants=[norm/dynamic_eps]'"
    batch = (evidence.config.get("training") or {}).get("batch_size")
    if batch is None:
        return Item(name, "unknown", "no configuration: pass one with --config")
    written = 1e-5 * (1 + math.log(batch / 512))
    if "norm/dynamic_eps_as_written" in evidence.stack and written <= 0:
        why = f"ε as the article writes it is {written:.2g} at batch {batch}: negative, so small variances give NaN"
        return Item(name, "fail", why, {"batch_size": batch, "epsilon": written})
    facts = f"batch {batch}; ε is {'dynamic' if 'norm/dynamic_eps' in evidence.stack else 'fixed'}"
    return stable_enough(name, ("norm/dynamic_eps",), facts, evidence, run)


def guarded_attention(evidence: Evidence) -> Item:
    """Attention scores are kept in range: the softmax subtracts its maximum, and a guard bounds the scores."""
    name, run = "numeric guard in attention", "lmperf train --set 'quality.variants=[attention/qk_norm]'"
    keys = [f"attention/{guard}" for guard in GUARDS]
    used = sorted(set(keys) & evidence.stack)
    bare = "the softmax subtracts its maximum; no guard on the scores besides"
    facts = evidence.facts(f"{used[0]} is in the stack" if used else bare)
    return stable_enough(name, keys, facts, evidence, run)


def pooled_memory(evidence: Evidence) -> Item:
    """Freed memory is kept for the next step instead of going back to the system."""
    environment = (evidence.config.get("measure") or {}).get("environment") or {}
    keys = ("graph/allocator", "graph/preallocated")
    reasons = [key for key in POOLING if key in environment] + sorted(set(keys) & evidence.stack)
    if str(evidence.config.get("device", "")).startswith("cuda"):
        reasons.append("CUDA's caching allocator")
    unpooled = "the allocator gives every large tensor back"
    facts = evidence.facts(f"pooled by {', '.join(reasons)}" if reasons else unpooled)
    used = bool(set(keys) & evidence.stack)
    rows = evidence.rows(keys, ("step_time_s", "peak_memory_bytes"))
    found = judge("memory pooled", used, facts, rows, evidence, "lmperf measure --session graph.training_step")
    if found.status == "fail" and reasons and not used:
        return Item(found.item, "warn", found.why, found.measurement)  # pooled already, and more was to be had
    return found


def mixed_precision(evidence: Evidence) -> Item:
    """Products run in a 16-bit format and what is summed or updated stays in 32 bits; fp16 has its scaler."""
    name, run = "mixed-precision gradients", "lmperf measure --session precision.training_step"
    unsafe = sorted(evidence.stack & {"precision/fp16_unscaled", "precision/fp16_no_update"})
    if unsafe:
        return Item(name, "fail", f"{unsafe[0]} is in the stack: a negative control without a working loss scaler")
    used = sorted({f"precision/{key}" for key in MIXED} & evidence.stack)
    rows = evidence.rows(used or [f"precision/{key}" for key in MIXED], ("step_time_s",))
    facts = evidence.facts(f"{used[0]} is in the stack" if used else "the step runs in one precision")
    return judge(name, bool(used), facts, rows, evidence, run)


def parallel_loader(evidence: Evidence) -> Item:
    """The training step hardly ever waits for data."""
    name, run = "loader parallel enough", "lmperf measure --session dataloader.loading_in_step"
    waits = [r for r in evidence.results if r["metric"] == "wait_share" and number(r["baseline_value"]) is not None]
    if waits:
        share = number(waits[0]["baseline_value"])
        status = "pass" if share <= WAIT_PASS else "warn" if share <= WAIT_FAIL else "fail"
        return Item(name, status, f"{share:.1%} of a training step is waiting for data", measurement(waits[0]))
    loads = baseline_rate(evidence, "loading")
    trains = baseline_rate(evidence, "training_step")
    if loads is None or trains is None:
        return Item(name, "unknown", f"the share of waiting is {evidence.not_measured(run)}")
    times = number(loads["baseline_value"]) / number(trains["baseline_value"])
    status = "pass" if times >= 1 / WAIT_PASS else "warn" if times >= 1 / WAIT_FAIL else "fail"
    return Item(name, status, f"the loader alone is {times:.1f} times as fast as the step", measurement(loads))


def baseline_rate(evidence: Evidence, workload: str) -> Row | None:
    """A row that holds the baseline's tokens/s under a workload."""
    found = (r for r in evidence.results if r["workload"] == workload and r["metric"] == "tokens_per_s")
    return next((row for row in found if number(row["baseline_value"])), None)


def doctor_lines(outcome: Mapping[str, Any]) -> list[str]:
    """The outcome as lines for a terminal."""
    facts = outcome["machine"]
    cpu = facts["cpu"]
    lines = [
        f"machine {outcome['fingerprint']}: {cpu['model']}, {cpu['cores']} cores, "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB, {facts['gpu'] or 'no GPU'}, torch {facts['torch']}",
        f"instruction sets: {', '.join(cpu['instruction_sets']) or 'unknown'}",
        "",
    ]
    blocked = [entry for entry in outcome["can_run"] if not entry["available"]]
    lines.append(f"{len(outcome['can_run']) - len(blocked)} of {len(outcome['can_run'])} variants can run here")
    lines += [f"  {entry['variant']}: {entry['reason']}" for entry in blocked]
    lines += ["", "checklist"]
    return lines + [f"  {item['status']:<8}{item['item']}: {item['why']}" for item in outcome["checklist"]]
