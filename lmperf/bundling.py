"""Results of several machines beside each other: a bundle carries one machine's report folder, a merge lays them out.

No delta is ever made across machines: the merged page shows, for each comparison, what every machine measured against
its own baseline.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2

from lmperf.cards import with_cards
from lmperf.quantities import show_ratio
from lmperf.records import SCHEMA_VERSION, InputError, atomic_write, canonical_json, read_json, write_json
from lmperf.tables import read_csv

CONTENT = ("sessions/*.jsonl", "quality/*.json", "tables/*.csv", "tables/*.json", "results.parquet", "profile/*.json")
NEEDED = ("tables/results.csv", "tables/machine.json")
MANIFEST = "lmperf-bundle.json"
FOLDERS = ("sessions", "quality", "tables", "profile")
MAX_FILES, MAX_BYTES = 20_000, 4 << 30
KEY = ("axis", "variant", "workload", "shape", "metric", "dtype")
TEMPLATES = Path(__file__).parent / "templates"


def bundle(reports: Path, out: Path) -> int:
    """Write a report folder's results into one tar file; returns how many files it holds.

    The same results give the same bytes: names are sorted, times and owners left out.
    Raises `InputError` for a folder without results.
    """
    reports, out = Path(reports), Path(out)
    files = sorted(path for pattern in CONTENT for path in reports.glob(pattern) if path.is_file())
    names = {path.relative_to(reports).as_posix(): path for path in files}
    for name in NEEDED:
        if name not in names:
            raise InputError(f"{reports}: no results to bundle ({name} is missing); run the workflow first")
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in names.items()}
    fingerprint = read_json(names["tables/machine.json"]).get("fingerprint")
    manifest = {"schema": SCHEMA_VERSION, "kind": "lmperf bundle", "fingerprint": fingerprint, "files": hashes}
    with atomic_write(out, "wb") as stream, tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, MANIFEST, canonical_json(manifest).encode())
        for name, path in names.items():
            _add(tar, name, path.read_bytes())
    return len(names)


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    tar.addfile(entry, io.BytesIO(data))


@dataclass(frozen=True)
class Machine:
    """One machine's results in a merge: its label on the page, its facts, its rows of results.csv."""

    label: str
    facts: Mapping[str, Any]
    rows: Sequence[Mapping[str, str | None]]

    @property
    def fingerprint(self) -> str:
        """The machine's fingerprint."""
        return str(self.facts.get("fingerprint") or "unknown")


def merge(bundles: Sequence[Path], out: Path) -> list[Machine]:
    """Unpack bundles below `out`, one folder each, and write `out/index.html` and `out/side_by_side.json`.

    Raises `InputError` for a file that is no bundle, was changed, or would write outside its folder.
    """
    labels = _labels([Path(path) for path in bundles])
    contents = {label: read_bundle(path) for label, path in labels.items()}
    machines = []
    for label, files in contents.items():
        folder = Path(out) / label
        for name, data in files.items():
            with atomic_write(folder / name, "wb") as stream:
                stream.write(data)
        facts = read_json(folder / "tables" / "machine.json")
        machines.append(Machine(label, facts, read_csv(folder / "tables" / "results.csv")))
    table = side_by_side(machines)
    write_json(Path(out) / "side_by_side.json", {"schema": SCHEMA_VERSION, "rows": table})
    with atomic_write(Path(out) / "index.html") as stream:
        stream.write(page(machines, table))
    return machines


def _labels(paths: Sequence[Path]) -> dict[str, Path]:
    """A folder name for each bundle, from its file's name."""
    labels: dict[str, Path] = {}
    for path in paths:
        name = path.name.removesuffix(".tar")
        if name in labels or name in ("", ".", "..", "index.html", "side_by_side.json"):
            raise InputError(f"{path}: a bundle named {name!r} cannot be merged or is there twice; rename the file")
        labels[name] = path
    return labels


def read_bundle(path: Path) -> dict[str, bytes]:
    """A bundle's files by name, after all checks: only plain files with known names, as the manifest hashed them."""
    try:
        with tarfile.open(path, mode="r:") as tar:
            files = dict(_members(path, tar))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{path}: not a readable tar file ({error})") from None
    manifest = _manifest(path, files.pop(MANIFEST, None))
    found = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    wrong = sorted(name for name in found.keys() | manifest.keys() if found.get(name) != manifest.get(name))
    if wrong:
        raise InputError(f"{path}: {wrong[0]} is not as it was bundled; make the bundle again")
    for name in NEEDED:
        if name not in files:
            raise InputError(f"{path}: holds no {name}")
    return files


def _members(path: Path, tar: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    total = 0
    for count, entry in enumerate(tar, 1):
        total += entry.size
        if count > MAX_FILES or total > MAX_BYTES:
            raise InputError(f"{path}: more than {MAX_FILES} files or {MAX_BYTES} bytes; that is no bundle")
        stream = tar.extractfile(entry) if entry.isreg() else None
        if stream is None or not _allowed(entry.name):
            raise InputError(f"{path}: {entry.name!r} may not be in a bundle; allowed: plain files of a report folder")
        data = stream.read()
        if len(data) != entry.size:
            raise InputError(f"{path}: ends in the middle of {entry.name}")
        yield entry.name, data


def _allowed(name: str) -> bool:
    """Whether a name is one that `bundle` writes: the manifest, or a file of a known kind in a known folder."""
    if name == MANIFEST:
        return True
    pure = PurePosixPath(name)
    plain = pure.as_posix() == name and not pure.is_absolute() and "\\" not in name and "\0" not in name
    known = len(pure.parts) == 1 or (len(pure.parts) == 2 and pure.parts[0] in FOLDERS)
    return plain and known and ".." not in pure.parts and any(pure.match(pattern) for pattern in CONTENT)


def _manifest(path: Path, data: bytes | None) -> dict[str, str]:
    try:
        manifest = json.loads(data or b"null")
        if manifest["kind"] == "lmperf bundle" and manifest["schema"] == SCHEMA_VERSION:
            return dict(manifest["files"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: is no bundle of lmperf (no readable {MANIFEST})") from None
    raise InputError(f"{path}: schema {manifest['schema']!r} is not supported; allowed: {SCHEMA_VERSION}")


def side_by_side(machines: Sequence[Machine]) -> list[dict[str, Any]]:
    """One row per comparison that any machine made, in the first one's order, with each machine's own answer or None.

    Every answer is a ratio to the baseline of its own session on its own machine; nothing is divided across machines.
    """
    answers: dict[tuple[str | None, ...], dict[str, dict[str, Any]]] = {}
    for machine in machines:
        for row in machine.rows:
            if row.get("variant") not in ("baseline", "baseline_prime"):
                answers.setdefault(tuple(row.get(name) for name in KEY), {})[machine.label] = _answer(row)
    return [
        {**dict(zip(KEY, key, strict=True)), "machines": {m.label: given.get(m.label) for m in machines}}
        for key, given in answers.items()
    ]


def _answer(row: Mapping[str, str | None]) -> dict[str, Any]:
    """The cell of one machine: its ratio, interval, verdict and fingerprint as it reported them."""
    numbers = {name: float(row[name]) if row.get(name) else None for name in ("ratio", "ci_low", "ci_high")}
    return {**numbers, **{name: row.get(name) for name in ("verdict", "status", "reason", "rounds", "fingerprint")}}


def page(machines: Sequence[Machine], table: Sequence[Mapping[str, Any]]) -> str:
    """The merged page as HTML."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters["ratio"] = show_ratio
    return with_cards(made.get_template("merged.html.j2").render(machines=machines, table=table))
