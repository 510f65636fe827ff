"""Which document goes to which split: a survey of the text shards, and the assignment that follows from it.

A document is placed by a hash of its identifier, so that adding files moves no document from one split to another and
equal documents always fall on the same side. A corpus of a few documents cannot be split that way: there every
document is cut at the same two positions instead.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from lmperf.corpus.shards import shard_paths
from lmperf.records import InputError

log = logging.getLogger(__name__)

CORE_SPLITS = ("train", "validation", "test")
FEW_DOCUMENTS = 20  # below this, whole documents cannot give two held-out splits of about the wanted size
PIECE_BYTES = 1 << 20  # no text longer than this is handed to a tokenizer at once
SPACES = b" \t\n\r"


@dataclass(frozen=True)
class Survey:
    """What the shards hold, in reading order: per document its domain (index), size in bytes and hash in [0, 2^64)."""

    files: tuple[Path, ...]
    domains: tuple[str, ...]
    domain: np.ndarray  # (documents,) int32
    sizes: np.ndarray  # (documents,) int64, UTF-8 bytes
    keys: np.ndarray  # (documents,) uint64

    def bytes_of(self, name: str) -> int:
        """UTF-8 bytes of all documents of the domain `name`."""
        return int(self.sizes[self.domain == self.domains.index(name)].sum())


@dataclass(frozen=True)
class Assignment:
    """For every document the split it goes to (index into `splits`, -1: unused) and how many of its bytes are used."""

    splits: tuple[str, ...]
    split: np.ndarray  # (documents,) int32
    take: np.ndarray  # (documents,) int64
    sizes: np.ndarray  # (documents,) int64, as in the survey
    training_domain: str
    by: str  # "document" | "position"
    held_out: float

    def used_whole(self, first: int, stop: int) -> np.ndarray:
        """For the documents from `first` to before `stop` the split of each that is used uncut, -1 for the others."""
        split = self.split[first:stop]
        cut = (self.take[first:stop] < self.sizes[first:stop]) | ((split <= 2) & (self.by == "position"))
        return np.where(cut, -1, split)

    def parts(self, document: int, text: pa.Buffer) -> Iterator[tuple[int, int, int]]:
        """(split, first byte, last byte + 1) for each part of `document` that is used."""
        split, take = int(self.split[document]), int(self.take[document])
        if split < 0 or take == 0:
            return
        if split > 2 or self.by == "document":
            yield split, 0, cut_point(text, take)
            return
        first = cut_point(text, int(text.size * (1 - 2 * self.held_out)))
        second = max(first, cut_point(text, int(text.size * (1 - self.held_out))))
        for index, (start, stop) in enumerate(((0, first), (first, second), (second, text.size))):
            if stop > start:
                yield index, start, stop


def survey(shards: Path, *, seed: int) -> Survey:
    """Read the document, domain and length columns of every shard; of the text only the offsets are touched.

    No shard's hash is looked at: `HashCheck` does that at the same time.
    """
    files = tuple(shard_paths(shards, verify=False))
    names: dict[str, int] = {}
    domain: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    for path in files:
        for batch in record_batches(path, sparsely=True):
            domain.append(_numbered(batch.column("domain"), names))
            sizes.append(np.diff(strings_of(batch, "text")[1]))
            keys.append(_keys(*strings_of(batch, "document"), seed))
    if not sum(len(part) for part in sizes):
        raise InputError(f"{shards}: the shards hold no document; check the sources and their quarantine")
    return Survey(files, tuple(names), np.concatenate(domain), np.concatenate(sizes), np.concatenate(keys))


def record_batches(path: Path, *, sparsely: bool = False) -> Iterator[pa.RecordBatch]:
    """The record batches of a text shard as views of the mapped file; one that is no text shard is an `InputError`.

    `sparsely` when little of it will be looked at: else the system reads the neighbourhood of every place, which
    together is the whole file.
    """
    try:
        reader = pa.ipc.open_file(pa.BufferReader(_mapped(path, sparsely)))
        missing = {"text", "document", "domain"} - set(reader.schema.names)
        if missing:
            has = ", ".join(reader.schema.names)
            raise InputError(f"{path}: column {sorted(missing)[0]!r} is missing; it has {has}")
        for index in range(reader.num_record_batches):
            batch = reader.get_batch(index)
            batch.validate()  # the lengths are those of the buffers: no read goes beyond them
            batch.column("domain").validate(full=True)
            if len(batch):
                yield batch
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(f"{path}: not an Arrow IPC file ({error})") from None


def _mapped(path: Path, sparsely: bool) -> pa.Buffer:
    if not path.stat().st_size:
        raise InputError(f"{path}: not an Arrow IPC file (it is empty)")
    with path.open("rb") as stream:
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    if sparsely and hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    return pa.py_buffer(mapped)


def _numbered(column: pa.Array, names: dict[str, int]) -> np.ndarray:
    """The values of a column as indices into `names`, which takes up new ones in the order of their first use."""
    encoded = column.dictionary_encode()
    numbers = [names.setdefault(name.as_py(), len(names)) for name in encoded.dictionary]
    return np.array(numbers, dtype=np.int32)[np.frombuffer(encoded.indices.buffers()[1], np.int32)[: len(column)]]


def strings_of(batch: pa.RecordBatch, name: str) -> tuple[pa.Buffer, np.ndarray]:
    """A column of strings as one mapped buffer and where each begins in it (int64, one more than there are strings).

    No text is copied, and pandas, which Arrow's own conversions import (half a second), stays out.
    """
    column = batch.column(name).cast(pa.large_string())
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int64)[column.offset : column.offset + len(column) + 1]
    buffer = column.buffers()[2] or pa.py_buffer(b"")
    if offsets[0] < 0 or offsets[-1] > buffer.size or (offsets[1:] < offsets[:-1]).any():
        raise InputError(f"column {name!r} of the shards is damaged; run `lmperf ingest` again")
    return buffer, offsets


def _keys(names: pa.Buffer, offsets: np.ndarray, seed: int) -> np.ndarray:
    salt = (seed % (1 << 64)).to_bytes(8, "little")
    view, places = memoryview(names), offsets.tolist()
    documents = (view[start:stop] for start, stop in pairwise(places))
    joined = b"".join(hashlib.blake2b(name, digest_size=8, salt=salt).digest() for name in documents)
    return np.frombuffer(joined, dtype="<u8")


def assign(found: Survey, *, training_domain: str, held_out: float, domain_bytes: int) -> Assignment:
    """Place every document; each further domain is cut to `domain_bytes` by taking the documents of lowest hash."""
    training = _training_domain(found, training_domain)
    others = sorted(name for name in found.domains if name != training)
    split = np.full(len(found.sizes), -1, dtype=np.int32)
    take = found.sizes.copy()
    in_training = found.domain == found.domains.index(training)
    split[in_training] = _by_hash(found.keys[in_training], held_out)
    for index, name in enumerate(others, start=len(CORE_SPLITS)):
        _take_capped(found, name, index, domain_bytes, split, take)
    by = "document" if _fair(split[in_training], found.sizes[in_training], held_out) else "position"
    if by == "position":
        split[in_training] = 0
    names = (*CORE_SPLITS, *(f"domain.{name}" for name in others))
    return Assignment(names, split, take, found.sizes, training, by, held_out)


def _training_domain(found: Survey, wanted: str) -> str:
    if wanted in found.domains:
        return wanted
    largest = max(sorted(found.domains), key=found.bytes_of)
    log.warning("no document of the domain %r: training on %r, which has the most text", wanted, largest)
    return largest


def _by_hash(keys: np.ndarray, held_out: float) -> np.ndarray:
    share = keys.astype(np.float64) / 2.0**64
    return np.where(share < held_out, 2, np.where(share < 2 * held_out, 1, 0)).astype(np.int32)


def _fair(split: np.ndarray, sizes: np.ndarray, held_out: float) -> bool:
    """Whether splitting whole documents gives held-out splits of at least a quarter of the wanted size."""
    if len(split) < FEW_DOCUMENTS:
        return False
    wanted = held_out * float(sizes.sum())
    return min(float(sizes[split == 1].sum()), float(sizes[split == 2].sum())) >= wanted / 4


def _take_capped(found: Survey, name: str, index: int, limit: int, split: np.ndarray, take: np.ndarray) -> None:
    members = np.flatnonzero(found.domain == found.domains.index(name))
    order = members[np.argsort(found.keys[members], kind="stable")]
    before = np.cumsum(found.sizes[order]) - found.sizes[order]
    chosen = order[before < limit]
    split[chosen] = index
    take[chosen] = np.minimum(found.sizes[chosen], limit - before[before < limit])


def cut_point(text: pa.Buffer, wanted: int) -> int:
    """The last place up to byte `wanted` where `text` may be cut: before white space, else between characters.

    The GPT-2 pattern never lets one piece run from a visible character into white space (of any script), so a cut
    there changes no token. Only when no such place lies within 64 KiB is the text cut between two characters.
    """
    if wanted >= text.size:
        return int(text.size)
    start = max(0, wanted - (1 << 16))
    window = text.slice(start, wanted + 1 - start).to_pybytes()
    head = window
    while (space := max(head.rfind(byte) for byte in SPACES)) > 0:
        head = head[: space + 1].rstrip(SPACES)
        if head and not head[-4:].decode(errors="ignore")[-1:].isspace():
            return start + len(head)
    index = len(window) - 1
    while index > 0 and window[index] & 0xC0 == 0x80:  # inside a character
        index -= 1
    return start + index


def training_sample(found: Survey, chosen: Assignment, limit: int) -> Mapping[int, int]:
    """Document number → bytes of it, for the tokenizer: training documents of highest hash up to `limit` bytes in all.

    One document gives at most an eighth of the sample (an equal share where documents are few), so that no single
    file shapes the vocabulary.
    """
    members = np.flatnonzero(chosen.split == 0)
    share = max(1, limit // min(max(len(members), 1), 8))
    order = members[np.argsort(found.keys[members], kind="stable")[::-1]]
    sizes = np.minimum(found.sizes[order], share)
    before = np.cumsum(sizes) - sizes
    kept = before < limit
    return dict(zip(order[kept].tolist(), np.minimum(sizes, limit - before)[kept].tolist(), strict=True))


def describe(found: Survey, chosen: Assignment) -> dict[str, Any]:
    """How the corpus was split, for the manifest; `cut_documents` were tokenized in several pieces."""
    used = np.where(chosen.split >= 0, chosen.take, 0)
    capped = {
        name: {"documents": int((found.domain == index).sum()), "bytes": found.bytes_of(name)}
        for index, name in enumerate(found.domains)
        if used[found.domain == index].sum() < found.bytes_of(name)
    }
    return {
        "by": chosen.by,
        "held_out": chosen.held_out,
        "capped_domains": capped,
        "cut_documents": int((used > PIECE_BYTES).sum()),
    }
