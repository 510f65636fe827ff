"""Which of the package's own source files a stage is made of, so that editing one re-runs that stage and no other.

A stage is made of its entry module and of all package modules that this one imports, followed through the source
text.  The registry, the axes and the workloads are never followed: a session names its own axis and workload, so
that editing `variants/attention.py` re-runs the attention sessions and nothing else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from lmperf.catalogue import PACKAGE, plugin_file, source_hash

#: Modules whose edits are no change of what is measured, or that name everything and so would re-run everything.
NOT_FOLLOWED = ("registry", "catalogue", "variants", "workloads", "config", "planning", "sources", "qualify", "doctor")


@lru_cache(maxsize=256)
def closure(entry: Path) -> frozenset[Path]:
    """The entry file and every package file that it imports, transitively, but for those `NOT_FOLLOWED`."""
    found, queue = {entry}, [entry]
    while queue:
        for file in _imported_files(queue.pop()):
            if file not in found:
                found.add(file)
                queue.append(file)
    return frozenset(found)


@lru_cache(maxsize=512)
def _imported_files(path: Path) -> tuple[Path, ...]:
    files = []
    for name in _imports(path) if path.is_file() else ():
        parts = name.split(".")
        if parts[0] == "lmperf" and len(parts) > 1 and parts[1] not in NOT_FOLLOWED:
            # `from lmperf.a import b` may name a module b or something inside the module a
            tried = (PACKAGE.joinpath(*parts[1:]).with_suffix(".py"), PACKAGE.joinpath(*parts[1:-1]).with_suffix(".py"))
            files += [file for file in tried if file.is_file()]
    return tuple(files)


def _imports(path: Path) -> Iterable[str]:
    """Dotted names imported anywhere in a file; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def axis_files(axes: Iterable[str]) -> set[Path]:
    """The axes' own files with the modules they import."""
    files = [PACKAGE / "variants" / f"{axis}.py" for axis in axes]
    return set().union(*(closure(file) for file in files if file.is_file()))


def session_code(axes: Sequence[str], workload: str, plugins: Sequence[str]) -> str:
    """Hash over a session's sources: the measuring core, its workload's file, its axes' files and the plugins."""
    own = workload_file(workload)
    files = closure(PACKAGE / "sessions.py") | axis_files(axes) | {PACKAGE / "workloads" / "base.py"}
    files |= closure(own) if own else set()
    return _hash([*files, *map(plugin_file, plugins)])


def quality_code(axes: Sequence[str], plugins: Sequence[str]) -> str:
    """Hash over a quality run's sources, its process environment's among them."""
    own = [*closure(PACKAGE / "training.py"), PACKAGE / "environments.py"]
    return _hash([*own, *axis_files(axes), *map(plugin_file, plugins)])


def stage_code(*entries: str) -> str:
    """Hash over the stages' entry modules with what they import; folders and other files stand for themselves."""
    files: set[Path] = set()
    for name in entries:
        path = PACKAGE / name
        if path.suffix == ".py" and path.is_file():
            files |= closure(path)
        else:
            files |= set(path.rglob("*.*")) if path.is_dir() else {path}
    return _hash(files)


def _hash(files: Iterable[Path]) -> str:
    return source_hash([file for file in files if file.is_file()])


@lru_cache(maxsize=32)
def workload_file(workload: str) -> Path | None:
    """The file of `lmperf.workloads` that registers a workload's name, found by its decorator."""
    for path in sorted((PACKAGE / "workloads").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and workload in _registered(node):
                return path
    return None


def _registered(function: ast.FunctionDef) -> list[object]:
    calls = [c for c in function.decorator_list if isinstance(c, ast.Call) and getattr(c.func, "id", "") == "workload"]
    return [call.args[0].value for call in calls if call.args and isinstance(call.args[0], ast.Constant)]
