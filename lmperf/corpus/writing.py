"""Arrow IPC shards, content-addressed: a shard ends where its last document says so, its name is its own hash."""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from lmperf.records import file_sha256

BATCH_BYTES = 4 << 20
BATCH_ROWS = 1 << 14
PORTION = 1 << 22  # a multiple of the page size
LONGEST_RUN = 4  # a shard is cut at this multiple of the planned size even where no document asks for it

SCHEMA = pa.schema(
    [
        ("text", pa.large_string()),
        ("document", pa.string()),
        ("source", pa.string()),
        ("domain", pa.string()),
    ]
)


@dataclass(frozen=True)
class Shard:
    """One finished shard: its file name, SHA-256, counts, and whether a file with these bytes was there already."""

    file: str
    sha256: str
    documents: int
    bytes: int
    source: str
    reused: bool


class _HashingFile:
    """A file being written whose SHA-256 is known when it ends."""

    def __init__(self, folder: Path) -> None:
        handle, name = tempfile.mkstemp(dir=folder, prefix=".shard-", suffix=".tmp")
        self.path = Path(name)
        self._stream = os.fdopen(handle, "wb", buffering=0)
        self._hash = hashlib.sha256()
        self.mapped: mmap.mmap | None = None  # what is being written, when it is a mapped file

    @property
    def closed(self) -> bool:
        return self._stream.closed

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        for start in range(0, len(view), PORTION):
            portion = view[start : start + PORTION]
            self._hash.update(portion)
            while portion:  # a full disk gives a short write first, and the error on the next
                portion = portion[self._stream.write(portion) or 0 :]
            if self.mapped is not None and len(view) > PORTION:
                # The pages just written would stay resident to the end of a document of any size.
                self.mapped.madvise(mmap.MADV_DONTNEED, start, PORTION)
        return len(view)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class ShardWriter:
    """Writes the documents of one source into shards of about `shard_bytes`, in the order in which they are added.

    A document ends its shard with a probability of its size over `shard_bytes`, drawn from its own hash. So a document
    more or less moves no boundary but its own, and all other shards keep their bytes and names.
    """

    def __init__(self, folder: Path, source: str, domain: str, shard_bytes: int) -> None:
        self._folder, self._source, self._domain, self._target = folder, source, domain, shard_bytes
        self.shards: list[Shard] = []
        self._file: _HashingFile | None = None
        self._texts: list[bytes] = []
        self._digests: list[bytes] = []
        self._pending = self._bytes = self._documents = 0

    def add(self, data: bytes, digest: bytes) -> None:
        """Add one document (UTF-8, cleaned) with its 16-byte digest."""
        self._texts.append(data)
        self._digests.append(digest)
        self._pending += len(data)
        if self._pending >= BATCH_BYTES or len(self._texts) >= BATCH_ROWS:
            self._flush()
        self._end_document(digest, len(data))

    def add_large(self, spool: BinaryIO, size: int, digest: bytes) -> None:
        """Add the document of `size` bytes that the file `spool` holds, as one row, without having it in memory."""
        self._flush()
        with mmap.mmap(spool.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            self._open().mapped = mapped
            self._write(pa.py_buffer(mapped), np.array([0, size], np.int64), [digest])
            self._open().mapped = None
        self._end_document(digest, size)

    def _end_document(self, digest: bytes, size: int) -> None:
        self._documents += 1
        self._bytes += size
        chosen = int.from_bytes(digest[:8], "big") * self._target < size << 64
        if chosen or self._bytes >= LONGEST_RUN * self._target:
            self.finish()

    def _flush(self) -> None:
        if not self._texts:
            return
        offsets = np.zeros(len(self._texts) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, self._texts), np.int64, len(self._texts)), out=offsets[1:])
        self._write(pa.py_buffer(b"".join(self._texts)), offsets, self._digests)
        self._texts, self._digests, self._pending = [], [], 0

    def _open(self) -> _HashingFile:
        if self._file is None:
            self._file = _HashingFile(self._folder)
            self._arrow = pa.ipc.new_file(pa.PythonFile(self._file, mode="w"), SCHEMA)
        return self._file

    def _write(self, texts: pa.Buffer, offsets: np.ndarray, digests: list[bytes]) -> None:
        self._open()
        rows = len(digests)
        text = pa.LargeStringArray.from_buffers(rows, pa.py_buffer(offsets), texts)
        document = _fixed_width(b"".join(digests).hex().encode(), rows)
        source, domain = (_fixed_width(name.encode() * rows, rows) for name in (self._source, self._domain))
        self._arrow.write_batch(pa.record_batch([text, document, source, domain], schema=SCHEMA))

    def finish(self) -> None:
        """End the current shard, if it holds anything, and give it its name."""
        self._flush()
        if self._file is None:
            return
        self._arrow.close()
        self._file.close()
        sha256 = self._file.sha256
        name = f"{self._source}-{sha256[:16]}.arrow"
        reused = self._settle(self._file.path, self._folder / name, sha256)
        self.shards.append(Shard(name, sha256, self._documents, self._bytes, self._source, reused))
        self._file, self._bytes, self._documents = None, 0, 0

    def _settle(self, fresh: Path, target: Path, sha256: str) -> bool:
        if target.exists() and file_sha256(target) == sha256:
            fresh.unlink()
            return True
        os.chmod(fresh, 0o644)
        # No fsync: a kill loses nothing, and after a power cut the hash in the manifest finds what is not whole.
        os.replace(fresh, target)
        return False

    def abandon(self) -> None:
        """Drop the shard in progress after an error."""
        if self._file is not None:
            self._file.close()
            self._file.path.unlink(missing_ok=True)
            self._file = None


def _fixed_width(data: bytes, rows: int) -> pa.StringArray:
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(len(data) // rows)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(data))
