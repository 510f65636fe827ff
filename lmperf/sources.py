"""Which of the package's own source files a stage is made of, so that editing one re-runs that stage and no other."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from lmperf.catalogue import PACKAGE, plugin_file, source_hash

#: The measuring core: every timing session is made of these files, whatever its axis.
MEASURING = (
    "records.py", "recipe.py", "reference.py", "model.py", "checking.py", "devices.py", "launching.py", "timing.py",
    "memory.py", "sessions.py", "workloads/base.py",
)  # fmt: skip
TRAINING = ("records.py", "recipe.py", "reference.py", "model.py", "training.py")
FETCHING = ("corpus/sources.py", "corpus/wheels.py")
TOKENIZING = tuple(f"corpus/{name}.py" for name in ("tokenizer", "token_shards", "splits", "accelerator"))
#: Only helper modules of an axis are followed; the registry and the core are named above or left out on purpose.
FOLLOWED = ("implementations", "kernels", "caching")


@lru_cache(maxsize=256)
def imported_helpers(path: Path) -> frozenset[Path]:
    """The helper modules (implementations, kernels, caching) that a file imports, transitively."""
    found: set[Path] = set()
    queue = [path]
    while queue:
        for name in _imports(queue.pop()):
            parts = name.split(".")
            if parts[0] != "lmperf" or len(parts) < 2 or parts[1] not in FOLLOWED:
                continue
            for file in (
                PACKAGE.joinpath(*parts[1:]).with_suffix(".py"),
                PACKAGE.joinpath(*parts[1:-1]).with_suffix(".py"),
            ):
                if file.is_file() and file not in found:
                    found.add(file)
                    queue.append(file)
    return frozenset(found)


def _imports(path: Path) -> Iterable[str]:
    """Dotted names imported anywhere in a file; `from a import b` gives a.b, which may be a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def axis_files(axes: Iterable[str]) -> list[Path]:
    """The axes' own files with the helper modules they import."""
    files = [PACKAGE / "variants" / f"{axis}.py" for axis in axes]
    present = [file for file in files if file.is_file()]
    return [*present, *(helper for file in present for helper in imported_helpers(file))]


def session_code(axes: Sequence[str], workload: str, plugins: Sequence[str]) -> str:
    """Hash over a session's sources: the measuring core, its workload's file, its axes' files and the plugins."""
    own = workload_file(workload)
    helpers = imported_helpers(own) if own else ()
    return _hash([*MEASURING, *([own] if own else []), *helpers, *axis_files(axes), *map(plugin_file, plugins)])


def ingesting() -> list[str]:
    """Files of the ingest stage: all of the corpus package but what fetches, tokenizes or loads."""
    other = {*FETCHING, *TOKENIZING, "corpus/datasets.py", "corpus/state.py"}
    return [name for file in sorted((PACKAGE / "corpus").glob("*.py")) if (name := f"corpus/{file.name}") not in other]


def quality_code(axes: Sequence[str], plugins: Sequence[str]) -> str:
    """Hash over a quality run's sources."""
    return _hash([*TRAINING, *axis_files(axes), *map(plugin_file, plugins)])


def stage_code(*names: str) -> str:
    """Hash over named package files; folders stand for the Python files in them."""
    files: list[Path | str] = []
    for name in names:
        path = PACKAGE / name
        files += sorted(path.glob("*")) if path.is_dir() else [path]
    return _hash([file for file in files if Path(file).is_file()])


def _hash(files: Iterable[Path | str]) -> str:
    resolved = [Path(file) if Path(file).is_absolute() else PACKAGE / file for file in files]
    return source_hash([file for file in resolved if file.is_file()])


@lru_cache(maxsize=32)
def workload_file(workload: str) -> Path | None:
    """The file of `lmperf.workloads` that registers a workload's name, found by its decorator."""
    for path in sorted((PACKAGE / "workloads").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "workload" and call.args:
                        if isinstance(call.args[0], ast.Constant) and call.args[0].value == workload:
                            return path
    return None
