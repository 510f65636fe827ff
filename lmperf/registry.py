"""The registry of variants: a decorator, the axes and the slots each may change, and what can run on this machine."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from lmperf.catalogue import AXES, suggest
from lmperf.recipe import Recipe
from lmperf.records import InputError

RecipeChange = Callable[[Recipe], Recipe]

#: Slots that a variant of an axis may change (contract tests hold this).
AXIS_SLOTS: dict[str, frozenset[str]] = {
    "attention": frozenset({"attention", "reshape"}),
    "precision": frozenset({"precision"}),
    "dataloader": frozenset({"loader"}),
    "generation": frozenset({"generate", "transforms", "finish"}),
    "norm": frozenset({"norm"}),
    "matmul": frozenset({"projection", "feed_forward", "loss", "matmul", "reshape", "pad_vocab_to", "transforms"}),
    "graph": frozenset({"transforms", "optimizer", "accumulate", "step_contexts", "after_step", "environment"}),
    "distributed": frozenset({"parallel", "optimizer"}),
    "compression": frozenset({"transforms", "finish"}),
}


@dataclass(frozen=True)
class Variant:
    """A named change on one axis; `apply` is the decorated function."""

    axis: str
    name: str
    apply: RecipeChange
    summary: str
    source: str
    fidelity: str = "exact"  # exact | close | quality
    rtol: float = 0.0
    atol: float = 0.0
    requires: tuple[str, ...] = ()
    baseline: bool = False
    control: bool = False  # a negative control: expected to do harm
    quality_run: bool = False
    oracle: RecipeChange | None = None  # the naive form of the same function, when it is not the baseline's

    @property
    def key(self) -> str:
        """The full name, `axis/name`."""
        return f"{self.axis}/{self.name}"

    def unavailable(self) -> str | None:
        """Why it cannot run on this machine, or None."""
        reasons = [reason for need in self.requires if (reason := check_requirement(need))]
        return "; ".join(reasons) or None


_VARIANTS: dict[str, Variant] = {}


def variant(
    axis: str, *, fidelity: str = "exact", rtol: float = 1e-4, atol: float = 1e-5, requires: Sequence[str] = (),
    baseline: bool = False, control: bool = False, quality_run: bool | None = None, oracle: RecipeChange | None = None,
) -> Callable[[RecipeChange], RecipeChange]:  # fmt: skip
    """Register the decorated `recipe -> recipe` function as a variant named after it; keywords must be literals.

    fidelity: "exact" (same numbers up to the order of fp32 additions: rtol/atol still bound that), "close"
    (rtol, atol) or "quality" (another function: it owes a quality run; `oracle` may name its naive form).
    """
    if axis not in AXES:
        raise InputError(f"variant axis {axis!r} is unknown{suggest(axis, AXES)}; allowed: {', '.join(AXES)}")
    if fidelity not in ("exact", "close", "quality"):
        raise InputError(f"variant fidelity {fidelity!r} is unknown; allowed: exact, close, quality")

    def register(function: RecipeChange) -> RecipeChange:
        source = inspect.getsourcefile(function) or "?"
        entry = Variant(
            axis=axis, name=function.__name__, apply=function, summary=first_line(function),
            source=f"{source}:{function.__code__.co_firstlineno}", fidelity=fidelity, rtol=rtol, atol=atol,
            requires=tuple(requires), baseline=baseline, control=control, oracle=oracle,
            quality_run=fidelity == "quality" if quality_run is None else quality_run,
        )  # fmt: skip
        known = _VARIANTS.get(entry.key)
        if known is not None and known.source != entry.source:
            raise InputError(f"variant {entry.key} is registered twice: {known.source} and {entry.source}")
        _VARIANTS[entry.key] = entry
        return function

    return register


def first_line(function: Callable[..., object]) -> str:
    """The first line of a docstring: a variant's description everywhere."""
    text = inspect.getdoc(function)
    if not text:
        raise InputError(f"variant {function.__name__} has no docstring: its first line is its description")
    return text.splitlines()[0].rstrip(".")


@lru_cache(maxsize=1)
def _load_builtin() -> None:
    import lmperf.variants

    for module in pkgutil.iter_modules(lmperf.variants.__path__):
        importlib.import_module(f"lmperf.variants.{module.name}")


def load_plugins(paths: Iterable[str]) -> None:
    """Import plugin files (or `package.module` names) so that their variants register."""
    for path in paths:
        if not path.endswith(".py"):
            importlib.import_module(path)
            continue
        file = Path(path)
        if not file.is_file():
            raise InputError(f"plugins: {path!r} is no file")
        name = f"lmperf_plugin_{file.stem}"
        if getattr(sys.modules.get(name), "__file__", None) == str(file):
            continue
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise InputError(f"plugins: {path!r} cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


def variants(axis: str | None = None, plugins: Iterable[str] = ()) -> dict[str, Variant]:
    """All registered variants by key `axis/name`, in order of registration within the axes' order."""
    _load_builtin()
    load_plugins(plugins)
    order = {name: number for number, name in enumerate(AXES)}
    found = [v for v in _VARIANTS.values() if axis is None or v.axis == axis]
    return {v.key: v for v in sorted(found, key=lambda v: order[v.axis])}


def get(key: str, plugins: Iterable[str] = ()) -> Variant:
    """The variant `axis/name`; LookupError-like `InputError` with a suggestion when unknown."""
    known = variants(plugins=plugins)
    if key not in known:
        raise InputError(f"variant {key!r} is unknown{suggest(key, known)}; `lmperf variants` lists them")
    return known[key]


def compose(keys: Sequence[str], plugins: Iterable[str] = ()) -> Recipe:
    """The recipe that applies variants in the fixed order of the axes (catalogue.AXES), whatever order is given."""
    order = {name: number for number, name in enumerate(AXES)}
    recipe = Recipe()
    for entry in sorted((get(key, plugins) for key in keys), key=lambda v: order[v.axis]):
        recipe = entry.apply(recipe)
    return recipe


def check_requirement(need: str) -> str | None:
    """Why a requirement is not met here, or None.  Known: cuda, sm80, sm89, cxx, package:<name>, fork, tool:<name>."""
    kind, _, name = need.partition(":")
    if kind == "cuda":
        return None if torch.cuda.is_available() else "no CUDA device"
    if kind.startswith("sm") and kind[2:].isdigit():
        if not torch.cuda.is_available():
            return "no CUDA device"
        have = 10 * torch.cuda.get_device_capability()[0] + torch.cuda.get_device_capability()[1]
        return None if have >= int(kind[2:]) else f"needs compute capability {kind}, this device has sm{have}"
    if kind == "cxx":
        found = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
        return None if found else "no C++ compiler (g++) for torch.compile"
    if kind == "package":
        return None if importlib.util.find_spec(name) else f"package {name} is not installed"
    if kind == "tool":
        return None if shutil.which(name) else f"{name} is not installed"
    if kind == "fork":
        return None if sys.platform.startswith("linux") else "needs Linux's fork"
    raise InputError(
        f"requirement {need!r} is unknown; allowed: cuda, sm80, sm89, cxx, package:<name>, tool:<name>, fork"
    )
