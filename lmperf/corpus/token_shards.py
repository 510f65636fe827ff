"""Token shards: Arrow IPC files of one column `tokens` in one record batch, so that a reader maps them as one array."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa

from lmperf.records import file_sha256

SHARD_BYTES = 64 << 20  # of tokens: what the writer holds in memory for one split


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest type that holds every id of a vocabulary: uint16 up to 65,536 ids, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def file_stem(split: str) -> str:
    """A split's name as part of a file name: a domain may be called anything."""
    stem = quote(split, safe="")
    return stem if len(stem) <= 100 else f"domain.{hashlib.sha256(split.encode()).hexdigest()[:32]}"


class SplitWriter:
    """Collects the tokens of one split and writes `<split>-00000.arrow`, `-00001`, … of 64 MiB each, the last of less.

    A shard is cut at its size wherever that falls, so that the files do not depend on how the tokens were handed over.
    """

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], metadata: Mapping[str, str]) -> None:
        self.name = name
        self._folder = folder
        self._dtype = dtype
        self._schema = pa.schema(
            [pa.field("tokens", pa.from_numpy_dtype(dtype), nullable=False)], {**metadata, "split": name}
        )
        self._buffer = np.empty(SHARD_BYTES // dtype.itemsize, dtype)  # touched, and so in memory, only where written
        self._tokens = self._documents = 0  # of the shard in progress
        self._size = 0
        self._shards: list[dict[str, Any]] = []

    def add(self, tokens: np.ndarray, *, ends: np.ndarray, size: int) -> None:
        """Append `tokens` (1-D), which stand for `size` UTF-8 bytes; `ends` are the places that close a document."""
        if tokens.size and int(tokens.max()) > np.iinfo(self._dtype).max:
            raise ValueError(f"split {self.name}: token id {int(tokens.max())} does not fit {self._dtype.name}")
        self._size += size
        start = 0
        while start < len(tokens):
            stop = min(len(tokens), start + len(self._buffer) - self._tokens)
            self._buffer[self._tokens : self._tokens + stop - start] = tokens[start:stop]
            self._tokens += stop - start
            self._documents += int(np.diff(np.searchsorted(ends, (start, stop)))[0])
            start = stop
            if self._tokens == len(self._buffer):
                self._write()

    def _write(self) -> None:
        path = self._folder / f"{file_stem(self.name)}-{len(self._shards):05d}.arrow"
        # Not `pa.array`: that imports pandas, half a second.
        tokens = pa.Array.from_buffers(
            self._schema[0].type, self._tokens, [None, pa.py_buffer(self._buffer[: self._tokens])]
        )
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, self._schema) as writer:
            writer.write_batch(pa.record_batch([tokens], schema=self._schema))
        entry = {"file": path.name, "sha256": file_sha256(path), "tokens": self._tokens, "documents": self._documents}
        self._shards.append(entry)
        self._tokens = self._documents = 0

    def close(self) -> dict[str, Any]:
        """Write what is left and return the split's manifest entry."""
        if self._tokens:
            self._write()
        total = {key: sum(shard[key] for shard in self._shards) for key in ("tokens", "documents")}
        return {"shards": self._shards, **total, "bytes": self._size}
