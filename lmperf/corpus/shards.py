"""Raw sources to merged Arrow shards, and the shards back to texts, each checked against its hash."""

from __future__ import annotations

import errno
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from lmperf.corpus.cleaning import DECLARED
from lmperf.corpus.merging import Merger, Tally
from lmperf.corpus.sources import check_sources
from lmperf.corpus.walking import Walk, walk
from lmperf.corpus.writing import ShardWriter
from lmperf.records import SCHEMA_VERSION, CheckFailed, InputError, atomic_write, file_sha256, read_json, write_json

log = logging.getLogger(__name__)

DUPLICATE_WARNING = 0.3
SOURCE_FIELDS = ("name", "kind", "domain", "licence", "encoding", "text_key", "reproducible")


def ingest(
    sources: Sequence[Mapping[str, Any]],
    raw: Path,
    out: Path,
    *,
    shard_bytes: int = 64 << 20,
    max_quarantine: float = 0.05,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Merge all sources that `raw`/manifest.json has into Arrow shards below `out`; return (and write) their manifest.

    `progress` is called with bytes done and bytes in all. `CheckFailed` when more than `max_quarantine` of the bytes
    was set aside, when there is no document, or when the disk is full; earlier outputs then stay as they were.
    """
    raw, out = Path(raw), Path(out)
    check_sources(sources)
    if shard_bytes < 1:
        raise InputError(f"corpus.shard_bytes: {shard_bytes}; allowed: at least 1")
    chosen = _chosen(sources, raw)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _clear_temporary(out)
        walks = [
            walk(path, exclude=(out, raw, out.parent / "tokens") if source["kind"] == "files" else ())
            for source, path in chosen
        ]
        merged = _merge([source for source, _ in chosen], walks, out, shard_bytes, progress)
        _check(merged, out, max_quarantine)
        manifest = _manifest([source for source, _ in chosen], walks, merged)
        write_json(out / "manifest.json", manifest)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CheckFailed(f"{out}: no space left on the disk; free some and run ingest again") from None
    _remove_stale(out, {shard["file"] for shard in manifest["shards"]})
    return manifest


def _chosen(sources: Sequence[Mapping[str, Any]], raw: Path) -> list[tuple[dict[str, Any], Path]]:
    """The sources that were had, each with its options from the config and the path of its files."""
    options = {source["name"]: source for source in sources}
    chosen = []
    for record in read_json(raw / "manifest.json")["sources"]:
        if record["status"] != "ok":
            continue
        path = Path(record["path"]) if record["kind"] == "files" else raw / record["path"]
        if not path.exists():
            raise InputError(f"source {record['name']!r}: {path} is gone; run fetch-corpus again")
        given = options.get(record["name"], {})
        chosen.append((record | {key: given.get(key) for key in ("encoding", "text_key")}, path))
    return chosen


def _clear_temporary(out: Path) -> None:
    for path in out.iterdir():
        if path.name.startswith(".") and path.name.endswith(".tmp"):
            path.unlink(missing_ok=True)  # left by a killed run


def _merge(
    sources: Sequence[Mapping[str, Any]],
    walks: Sequence[Walk],
    out: Path,
    shard_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> list[tuple[Tally, ShardWriter]]:
    total = sum(entry.size for each in walks for entry in each.files)
    done = 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress:
            progress(done, total)

    with atomic_write(out / "quarantine.jsonl") as quarantine:
        merger = Merger(out, quarantine, shard_bytes, advance)
        return [merger.merge(source, each) for source, each in zip(sources, walks, strict=True)]


def _check(merged: Sequence[tuple[Tally, ShardWriter]], out: Path, max_quarantine: float) -> None:
    tallies = [tally for tally, _ in merged]
    aside = sum(tally.quarantined_bytes for tally in tallies)
    whole = aside + sum(tally.bytes + tally.duplicate_bytes for tally in tallies)
    if whole and aside > max_quarantine * whole:
        reasons = sum((tally.reasons for tally in tallies), Counter())
        common = reasons.most_common(1)[0][0]
        raise CheckFailed(
            f"{aside / whole:.1%} of the bytes was set aside, allowed is corpus.max_quarantine = {max_quarantine:.1%};"
            f" most often: {common} (all in {out / 'quarantine.jsonl'})"
        )
    if not any(tally.documents for tally in tallies):
        raise CheckFailed(f"no document in any source (see {out / 'quarantine.jsonl'})")


def _manifest(
    sources: Sequence[Mapping[str, Any]], walks: Sequence[Walk], merged: Sequence[tuple[Tally, ShardWriter]]
) -> dict[str, Any]:
    records = [
        _source_record(source, each, tally) for source, each, (tally, _) in zip(sources, walks, merged, strict=True)
    ]
    shards = [asdict(shard) for _, writer in merged for shard in writer.shards]
    cleaning = sum((tally.notes.cleaning for tally, _ in merged), Counter())
    return {
        "schema": SCHEMA_VERSION,
        "sources": records,
        "shards": shards,
        "totals": _totals(records, shards),
        "cleaning": {key: {"what": what, "count": cleaning[key]} for key, what in DECLARED.items()},
        "reproducible": all(source.get("reproducible", True) for source in sources),
    }


def _source_record(source: Mapping[str, Any], each: Walk, tally: Tally) -> dict[str, Any]:
    seen = tally.bytes + tally.duplicate_bytes
    share = tally.duplicate_bytes / seen if seen else 0.0
    if share > DUPLICATE_WARNING:
        log.warning("source %s: %.0f %% of its bytes are duplicates and were left out", source["name"], 100 * share)
    return {
        **{key: source.get(key) for key in SOURCE_FIELDS},
        "files": len(each.files),
        **{key: value for key, value in vars(tally).items() if key not in ("notes", "reasons")},
        "duplicate_share": share,
        "empty": tally.notes.empty,
        "content_bytes": tally.notes.content_bytes,
        "formats": dict(+tally.notes.formats),
        "encodings": dict(+tally.notes.encodings),
        "cleaning": dict(+tally.notes.cleaning),
        "skipped": dict(each.skipped),
    }


def _totals(records: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = ("files", "documents", "bytes", "duplicates", "duplicate_bytes", "quarantined", "quarantined_bytes", "empty")
    totals: dict[str, Any] = {key: sum(record[key] for record in records) for key in keys}
    return totals | {"shards": len(shards), "shards_reused": sum(shard["reused"] for shard in shards)}


def _remove_stale(out: Path, current: set[str]) -> None:
    for path in out.iterdir():
        if path.suffix == ".arrow" and path.name not in current:
            path.unlink(missing_ok=True)


def read_shards(shards: Path, *, verify: bool = True) -> Iterator[tuple[str, str, str, str]]:
    """Every document of the shards that the manifest lists: (source, domain, document id, text).

    With `verify`, a shard whose SHA-256 is not the manifest's is an `InputError` that names it, before its first text.
    """
    for path in shard_paths(shards, verify=verify):
        with pa.memory_map(str(path)) as mapped:
            reader = pa.ipc.open_file(mapped)
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                columns = (batch.column(name).to_pylist() for name in ("source", "domain", "document", "text"))
                yield from zip(*columns, strict=True)


def shard_paths(shards: Path, *, verify: bool = True) -> Iterator[Path]:
    """The shards' paths in the manifest's order, each checked (see `read_shards`) when it is asked for."""
    for path, sha256 in _listed(Path(shards)):
        if verify:
            _check_hash(path, sha256)
        yield path


def _listed(shards: Path) -> Iterator[tuple[Path, str]]:
    for record in read_json(shards / "manifest.json")["shards"]:
        path = shards / record["file"]
        if not path.is_file():
            raise InputError(f"{path}: the shard is missing; run ingest again")
        yield path, record["sha256"]


def _check_hash(path: Path, expected: str) -> None:
    if (found := file_sha256(path)) != expected:
        raise InputError(f"{path}: sha256 is {found[:16]}…, expected {expected[:16]}…; run ingest again")


class HashCheck:
    """Checks every shard against its SHA-256 in a second thread while the body of a `with` already reads the shards.

    What the body makes must stay unpublished until `wait` has returned. An error in the body gives way to that of a
    damaged shard, which is then its likely cause.
    """

    def __init__(self, shards: Path) -> None:
        self._listed = list(_listed(Path(shards)))
        self._pool = ThreadPoolExecutor(1)
        self._checks: deque[Future[None]] = deque()

    def start(self) -> None:
        """Begin (`wait` does so too). It keeps the disk busy: what has to be read soon is better read before."""
        self._checks.extend(self._pool.submit(_check_hash, *each) for each in self._listed)
        self._listed = []

    def look(self) -> None:
        """Raise `InputError` for a shard already found to be damaged; never waits."""
        while self._checks and self._checks[0].done():
            self._checks.popleft().result()

    def wait(self) -> None:
        """Return when every shard is known to be whole; `InputError` names the first that is not."""
        self.start()
        while self._checks:
            self._checks.popleft().result()

    def __enter__(self) -> HashCheck:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if isinstance(error, Exception):
                self.wait()
        finally:
            self._pool.shutdown(cancel_futures=True)


def iter_texts(shards: Path, domain: str | None = None, *, verify: bool = True) -> Iterator[str]:
    """The text of every document, of one domain if named."""
    for _, found, _, text in read_shards(shards, verify=verify):
        if domain is None or found == domain:
            yield text
