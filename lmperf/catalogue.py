"""The catalogue of variants read from source text alone, so that planning and Snakemake's parse load no torch."""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lmperf.records import InputError

#: The axes, in the fixed order in which their changes are applied to a recipe.
AXES = ("attention", "norm", "matmul", "precision", "dataloader", "generation", "compression", "graph", "distributed")

PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class Entry:
    """What a variant's decorator and docstring say, without importing it."""

    axis: str
    name: str
    summary: str
    source: str
    fidelity: str
    requires: tuple[str, ...]
    baseline: bool
    control: bool
    quality_run: bool

    @property
    def key(self) -> str:
        """The full name, `axis/name`."""
        return f"{self.axis}/{self.name}"


def suggest(word: str, allowed: Iterable[str]) -> str:
    """` (did you mean X?)` when something close is allowed, else an empty text."""
    near = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return f" (did you mean {near[0]!r}?)" if near else ""


def read_entries(path: Path) -> list[Entry]:
    """The variants that a source file registers with `@variant("axis", ...)`."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as Python ({error})") from None
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found += [_entry(node, call, path) for call in map(_variant_call, node.decorator_list) if call]
    return found


def _variant_call(node: ast.expr) -> ast.Call | None:
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    return node if name == "variant" else None


def _entry(function: ast.FunctionDef, call: ast.Call, path: Path) -> Entry:
    words: dict[str, object] = {}
    for keyword in call.keywords:
        if keyword.arg in ("fidelity", "requires", "baseline", "control", "quality_run"):
            try:
                words[keyword.arg] = ast.literal_eval(keyword.value)
            except ValueError:
                raise InputError(f"{path}:{call.lineno}: {keyword.arg} of @variant must be a literal") from None
    try:
        axis = ast.literal_eval(call.args[0])
    except ValueError:
        raise InputError(f"{path}:{call.lineno}: the axis of @variant must be a literal text") from None
    if axis not in AXES:
        raise InputError(
            f"{path}:{call.lineno}: axis {axis!r} is unknown{suggest(str(axis), AXES)}; allowed: {', '.join(AXES)}"
        )
    fidelity = str(words.get("fidelity", "exact"))
    summary = (ast.get_docstring(function) or "").partition("\n")[0].rstrip(".")
    quality = words.get("quality_run")
    return Entry(
        axis=axis, name=function.name, summary=summary, source=f"{path}:{function.lineno}", fidelity=fidelity,
        requires=tuple(words.get("requires", ())), baseline=bool(words.get("baseline")),
        control=bool(words.get("control")),
        quality_run=fidelity == "quality" if quality is None else bool(quality),
    )  # fmt: skip


@lru_cache(maxsize=8)
def catalogue(plugins: tuple[str, ...] = ()) -> dict[str, Entry]:
    """All variants by key, built-in ones first, then those of plugin files."""
    found: dict[str, Entry] = {}
    for path in [*sorted((PACKAGE / "variants").glob("*.py")), *(plugin_file(p) for p in plugins)]:
        for entry in read_entries(path):
            if entry.key in found:
                raise InputError(f"{path}: variant {entry.key} is already registered in {found[entry.key].source}")
            found[entry.key] = entry
    return found


def plugin_file(plugin: str) -> Path:
    """The source file of a plugin: a path ending in .py, or an importable `package.module`."""
    if plugin.endswith(".py"):
        path = Path(plugin)
        if not path.is_file():
            raise InputError(f"plugins: {plugin!r} is no file")
        return path
    from importlib.util import find_spec

    try:
        spec = find_spec(plugin)
    except (ImportError, ValueError):
        spec = None
    if spec is None or spec.origin is None:
        raise InputError(f"plugins: {plugin!r} is neither a .py file nor an importable module")
    return Path(spec.origin)


def source_hash(paths: Sequence[Path | str]) -> str:
    """12 hex digits over the named sources (relative to the package) and their content, whatever the mtimes."""
    total = hashlib.sha256()
    for path in sorted({_resolve(p) for p in paths}):
        total.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def _resolve(path: Path | str) -> Path:
    path = Path(path)
    return path if path.is_absolute() else PACKAGE / path
