"""Types that travel between stages, their JSON, and the small file helpers that every stage shares (no torch)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

SCHEMA_VERSION = 1
HASHED_AT_ONCE = 4 << 20  # bytes; between two portions a thread that hashes has to wait for Python's lock

STATUSES = (
    "ok",
    "oom_device",
    "oom_host",
    "timeout",
    "unsupported",
    "incorrect",
    "unstable",
    "implausible",
    "crashed",
    "skipped_dominated",
)
VERDICTS = ("faster", "slower", "same", "small difference", "inconclusive", "better", "worse", "not measured")


class InputError(ValueError):
    """Bad input from the user: one line that names the key or file, the value and what is allowed (exit code 2)."""


class CheckFailed(RuntimeError):
    """A check on the run as a whole failed: one line that says which (exit code 1)."""


@contextmanager
def atomic_write(path: Path | str, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a temporary file beside `path` and rename it over `path` on success, so that no reader sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:80]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, mode, **({} if "b" in mode else {"encoding": "utf-8"})) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path | str, value: Any) -> None:
    """Write `value` as indented JSON with sorted keys; NaN and infinity are refused, since they are no JSON."""
    with atomic_write(path) as stream:
        json.dump(value, stream, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False, default=_plain)
        stream.write("\n")


def read_json(path: Path | str) -> Any:
    """Read a JSON file; a file that is missing or no JSON is an `InputError` that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no JSON value: {value!r}")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hex digits."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(HASHED_AT_ONCE))
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def canonical_json(value: Any) -> str:
    """The one JSON text of `value` (sorted keys, no spaces), fit for hashing and for a command line."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_plain)


def digest(value: Any, length: int = 12) -> str:
    """The first `length` hex digits of the SHA-256 of `value`'s canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:length]


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer; `kv_heads` < `heads` means grouped heads."""

    vocab_size: int = 1024
    context_length: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    d_model: int = 256
    d_ff: int = 1024
    position: str = "learned"  # learned | rotary
    activation: str = "gelu"  # gelu | swiglu
    norm: str = "layernorm"  # layernorm | rmsnorm
    tied_head: bool = True

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.d_model // self.heads


@dataclass(frozen=True)
class ArmSpec:
    """One recipe inside a session: `variants` are names `axis/name` applied to the baseline in the fixed order."""

    name: str  # "baseline", "baseline_prime" (the A/A control) or the variant's name
    variants: tuple[str, ...] = ()
    inject_slowdown: float = 0.0  # qualify only: this share of the timed work is done again


@dataclass(frozen=True)
class Cell:
    """One shape at which every arm of a session is measured, e.g. label "T=512", params {"length": 512}."""

    label: str
    params: Mapping[str, Any] = field(default_factory=dict)
    size: float = 1.0  # an order of cost: after an OOM or a timeout, larger cells of that arm are skipped


@dataclass(frozen=True)
class SessionSpec:
    """Everything one timing session needs; JSON-serialisable, so that a changed spec re-runs it and only it."""

    session: str  # file stem, "<axis>.<workload>"
    axis: str
    workload: str
    arms: tuple[ArmSpec, ...]
    cells: tuple[Cell, ...]
    model: ModelShape
    batch_size: int
    sequence_length: int
    rounds: int
    seed: int
    device: str  # "cpu" | "cuda"
    dtype: str = "float32"
    threads: int = 2
    blocks: int = 5
    block_s: float = 0.1
    warmup_s: float = 0.5
    warmup_steps: int = 3
    warmup_cap_s: float = 5.0
    time_limit_s: float = 60.0  # one process sample
    memory_limit_bytes: int | None = None  # None: 80 % of the machine's free memory
    environment: Mapping[str, str] = field(default_factory=dict)  # set before Python starts, same for all arms
    learning_rate: float = 1e-3
    data: str | None = None  # data/tokens folder, where the workload reads tokens
    texts: str | None = None  # data/shards folder, where the loader axis needs raw text
    plugins: tuple[str, ...] = ()
    code: str = ""  # hash of the sources this session is made of
    options: Mapping[str, Any] = field(default_factory=dict)  # workload specific


@dataclass(frozen=True)
class QualitySpec:
    """One training run to a fixed number of tokens: one recipe, one seed."""

    run: str  # file stem, "<recipe>.s<seed>" (".stress" appended at the stressed learning rate)
    recipe: str  # "baseline", a variant's "axis/name", "stack", "stack-minus-<...>"
    variants: tuple[str, ...]
    seed: int
    model: ModelShape
    batch_size: int
    sequence_length: int
    steps: int
    learning_rate: float
    device: str
    data: str
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    evaluate_every: int = 50
    evaluation_batches: int = 8
    long_context: int = 2  # also evaluated at this multiple of sequence_length (rotary positions only)
    stressed: bool = False
    threads: int = 1
    time_limit_s: float = 900.0
    environment: Mapping[str, str] = field(default_factory=dict)  # set before Python starts
    plugins: tuple[str, ...] = ()
    code: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """One measured quantity of a process sample: `value` (median of blocks), the raw `blocks`; None = not measured."""

    unit: str
    value: float | None
    blocks: tuple[float, ...] = ()


@dataclass(frozen=True)
class Sample:
    """One fresh process's answer for one arm, cell and round."""

    arm: str
    cell: str
    round: int
    status: str = "ok"  # one of STATUSES
    reason: str | None = None
    phase: str | None = None  # where a failure happened: build, check, warm-up, timing, memory, after-check
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    badges: tuple[str, ...] = ()  # red ones cap the verdict: contention, throttling, recompilation, not_stationary, ...
    details: Mapping[str, Any] = field(
        default_factory=dict
    )  # warm-up curve, thread count, check errors, timestamps, ...


RED_BADGES = (
    "contention",
    "throttling",
    "recompilation",
    "not_stationary",
    "aa_excludes_1",
    "low_clock",
    "flops_mismatch",
)


def to_json(value: Any) -> dict[str, Any]:
    """A dataclass as plain JSON values."""
    return json.loads(canonical_json(dataclasses.asdict(value)))


def from_json(kind: type[Any], value: Mapping[str, Any]) -> Any:
    """Rebuild a record of `kind` from `to_json`'s output; an unknown or missing key is an `InputError`."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = set(value) - set(fields)
    if unknown:
        raise InputError(f"{kind.__name__}: unknown key {sorted(unknown)[0]!r}; allowed: {', '.join(fields)}")
    try:
        return kind(**{name: _NESTED.get((kind.__name__, name), _freeze)(item) for name, item in value.items()})
    except TypeError as error:
        raise InputError(f"{kind.__name__}: {error}") from None


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, list) else value


def _many(kind: type[Any]) -> Any:
    return lambda items: tuple(from_json(kind, item) for item in items)


_NESTED = {
    ("SessionSpec", "arms"): _many(ArmSpec),
    ("SessionSpec", "cells"): _many(Cell),
    ("SessionSpec", "model"): lambda item: from_json(ModelShape, item),
    ("QualitySpec", "model"): lambda item: from_json(ModelShape, item),
    ("Sample", "metrics"): lambda items: {name: from_json(Metric, item) for name, item in items.items()},
}


def read_lines(path: Path | str) -> list[dict[str, Any]]:
    """The whole lines of a JSON-lines file; a half-written last line (no newline) is dropped."""
    path = Path(path)
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    lines = []
    for number, line in enumerate(whole.split(b"\n"), 1):
        if line.strip():
            try:
                lines.append(json.loads(line))
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise InputError(
                    f"{path}: line {number} is not valid JSON; delete the file to measure it again"
                ) from None
    return lines


RESULT_COLUMNS = (
    "axis", "variant", "workload", "shape", "metric", "unit", "value", "baseline_value", "ratio", "ci_low", "ci_high",
    "rounds", "noise_floor", "mde", "verdict", "status", "reason", "device", "dtype", "session", "fingerprint",
    "config_hash",
)  # fmt: skip

Samples = Sequence[Sample]
