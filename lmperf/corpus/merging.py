"""Merge the files of one source: read, clean, deduplicate, write; count everything that is not written."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, BinaryIO

from lmperf.corpus.cleaning import clean, clean_chunks, digest_of_pieces, normalised
from lmperf.corpus.decoding import CHUNK, Unreadable, is_utf8
from lmperf.corpus.deduplication import Seen
from lmperf.corpus.events import LARGE, Input, LargeText, Notes, Problem, Text
from lmperf.corpus.formats import is_plain, text_keys
from lmperf.corpus.pieces import pieces
from lmperf.corpus.reading import read_documents
from lmperf.corpus.walking import Entry, Walk, display
from lmperf.corpus.writing import ShardWriter

log = logging.getLogger(__name__)

PROGRESS_BYTES = 1 << 22
TRIES = 3
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # a file that became a FIFO must not block


@dataclass
class Tally:
    """What became of one source's content."""

    documents: int = 0
    bytes: int = 0
    duplicates: int = 0
    duplicate_bytes: int = 0
    quarantined: int = 0
    quarantined_bytes: int = 0
    changed: list[str] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    reasons: Counter[str] = field(default_factory=Counter)


@dataclass
class Merger:
    """Merges sources into one folder of shards; documents seen in an earlier source are duplicates in a later one."""

    out: Path
    quarantine: IO[str]
    shard_bytes: int
    progress: Callable[[int], None]
    seen: Seen = field(default_factory=Seen)

    def merge(self, source: Mapping[str, Any], walk: Walk) -> tuple[Tally, ShardWriter]:
        """Merge all files of `walk`; `source` has name, domain and perhaps encoding and text_key."""
        writer = ShardWriter(self.out, source["name"], source["domain"], self.shard_bytes)
        merge = _SourceMerge(self, source, walk, writer)
        try:
            for name, reason in walk.problems:
                merge.set_aside(name, Problem(reason, 0, {"offset": 0}))
            merge.files()
            writer.finish()
        except BaseException:
            writer.abandon()
            raise
        return merge.tally, writer


class _SourceMerge:
    def __init__(self, merger: Merger, source: Mapping[str, Any], walk: Walk, writer: ShardWriter) -> None:
        self._merger, self._source, self._walk, self._writer = merger, source, walk, writer
        self._encoding, self._text_key = source.get("encoding"), source.get("text_key")
        self.tally = Tally()

    def files(self) -> None:
        """Merge every file, the common case (a small plain text) without detours."""
        keys = tuple(key.encode() for key in text_keys(self._text_key))
        root, notes, done = self._walk.root + b"/", self.tally.notes, 0
        plain = 0
        for entry in self._walk.files:
            name, size, _ = entry
            data = self._read(root + name, entry) if size <= LARGE else None
            if data is not None and 0 not in data and is_plain(data, name, keys) and is_utf8(data):
                plain += 1
                notes.content_bytes += len(data)
                self._document(data)
            elif data is not None or size > LARGE:
                self._any(entry, data)
            done += size
            if done >= PROGRESS_BYTES:
                self._merger.progress(done)
                done = 0
        self._merger.progress(done)
        notes.formats["text"] += plain
        notes.encodings["utf-8"] += plain

    def _any(self, entry: Entry, data: bytes | None) -> None:
        path = self._walk.path(entry.name)
        source = Input(path, entry.name, self._merger.out, data, self._encoding, self._text_key)
        try:
            for event in read_documents(source, self.tally.notes):
                if type(event) is Text:
                    self._document(event.data)
                elif type(event) is Problem:
                    self.set_aside(entry.name, event)
                else:
                    self._large(entry.name, event)
        except FileNotFoundError:
            self.set_aside(entry.name, Problem("vanished before it was read", entry.size, {"offset": 0}))
        except PermissionError as error:
            self.set_aside(entry.name, Problem((error.strerror or "").lower(), entry.size, {"offset": 0}))
        if data is None and _differs(path, entry):
            self._changed(entry.name)

    def _document(self, data: bytes) -> None:
        """Clean, deduplicate and write one document in UTF-8."""
        tally = self.tally
        data = clean(data, tally.notes.cleaning)
        if len(data) > LARGE:
            self._large(b"", LargeText((("utf-8", partial(_slices, data)),), {}), count=False)
            return
        content = normalised(data)
        if not content:
            tally.notes.empty += 1
            return
        digest = sha256(content).digest()[:16]
        if self._merger.seen.add(digest):
            tally.documents += 1
            tally.bytes += len(data)
            self._writer.add(data, digest)
        else:
            tally.duplicates += 1
            tally.duplicate_bytes += len(data)

    def _large(self, name: bytes, event: LargeText, count: bool = True) -> None:
        """A large document goes through a temporary file, since its very end may show it broken or a duplicate."""
        reason, size = "", 0
        for encoding, chunks in event.attempts:
            with tempfile.TemporaryFile(dir=self._merger.out) as spool:
                cleaning: Counter[str] = Counter()
                try:
                    for chunk in clean_chunks(chunks(), cleaning):
                        spool.write(chunk)
                except Unreadable as error:
                    reason, size = reason or str(error), max(size, spool.tell())
                    continue
                self.tally.notes.cleaning.update(cleaning)
                if count:
                    self.tally.notes.encodings[encoding] += 1
                self._spooled(spool)
                return
        self.set_aside(name, Problem(reason, event.size or max(size, 1), event.where))

    def _spooled(self, spool: BinaryIO) -> None:
        size = spool.tell()
        spool.flush()
        spool.seek(0)
        if size <= LARGE:  # markup was most of it
            self._document(spool.read())
            return
        digest = digest_of_pieces(normalised(piece, strip=False) for piece in pieces(spool))
        tally = self.tally
        if not self._merger.seen.add(digest):
            tally.duplicates += 1
            tally.duplicate_bytes += size
            return
        self._writer.add_large(spool, size, digest)
        tally.documents += 1
        tally.bytes += size

    def set_aside(self, name: bytes, problem: Problem) -> None:
        """Put one line into the quarantine file."""
        self.tally.quarantined += 1
        self.tally.quarantined_bytes += problem.size
        self.tally.reasons[re.sub(r"\d+", "…", problem.reason.split(";")[0])[:60]] += 1
        line = {"source": self._source["name"], "file": display(name), **(problem.where or {"offset": 0})}
        line |= {"reason": display(problem.reason.encode("utf-8", "replace")), "bytes": problem.size}
        self._merger.quarantine.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _changed(self, name: bytes) -> None:
        if not self.tally.changed:
            log.warning("source %s: %s changed while it was read", self._source["name"], display(name))
        self.tally.changed.append(display(name))

    def _read(self, path: bytes, entry: Entry) -> bytes | None:
        """The whole of a small file; None (and set aside) when it cannot be read or will not hold still."""
        try:
            _, size, mtime = entry
            for attempt in range(TRIES):
                data, status = _read_file(path, size)
                if status.st_mtime_ns == mtime and status.st_size == size == len(data):
                    return data
                if attempt == 0:
                    self._changed(entry.name)
                size, mtime = status.st_size, status.st_mtime_ns
        except OSError as error:
            self.set_aside(entry.name, Problem((error.strerror or "cannot be read").lower(), entry.size, {"offset": 0}))
            return None
        self.set_aside(entry.name, Problem("it changes faster than it can be read", entry.size, {"offset": 0}))
        return None


def _read_file(path: bytes, size: int) -> tuple[bytes, os.stat_result]:
    """A file's content and its status after the reading."""
    handle = os.open(path, READ_FLAGS)
    try:
        data = os.read(handle, size + 1)
        if len(data) != size:
            rest = [data]
            while chunk := os.read(handle, CHUNK):
                rest.append(chunk)
            data = b"".join(rest)
        return data, os.fstat(handle)
    finally:
        os.close(handle)


def _differs(path: bytes, entry: Entry) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return True
    return (status.st_size, status.st_mtime_ns) != entry[1:]


def _slices(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        end = start + CHUNK
        while end < len(data) and data[end] & 0xC0 == 0x80:
            end += 1
        yield data[start:end]
        start = end
