"""Which document goes to which split: a survey of the text shards, and the text of each split piece by piece.

A document is placed by a hash of its identifier, so that adding files moves no document from one split to another and
equal documents always fall on the same side. A corpus of a few documents cannot be split that way: there every
document is cut at the same two positions instead.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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

    def used_whole(self, first: int, stop: int) -> list[int]:
        """For the documents from `first` to before `stop` the split of each that is used uncut, -1 for the others."""
        split = self.split[first:stop]
        cut = (self.take[first:stop] < self.sizes[first:stop]) | ((split <= 2) & (self.by == "position"))
        return np.where(cut, -1, split).tolist()

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


class Piece(NamedTuple):  # a tuple, since a corpus may have millions
    """A stretch of one document: `last` closes the document (within its split)."""

    split: int
    text: str
    size: int  # UTF-8 bytes
    last: bool
    document: int


def survey(shards: Path, *, seed: int, verify: bool = True) -> Survey:
    """Read the document, domain and length columns of every shard; of the text only the offsets are touched."""
    files = tuple(shard_paths(shards, verify=verify))
    names: dict[str, int] = {}
    domain: list[np.ndarray] = []
    sizes: list[np.ndarray] = []
    keys: list[np.ndarray] = []
    for path in files:
        for batch in _record_batches(path):
            column = batch.column("domain").to_pylist()
            domain.append(np.array([names.setdefault(name, len(names)) for name in column], dtype=np.int32))
            sizes.append(pc.binary_length(batch.column("text")).to_numpy(zero_copy_only=False).astype(np.int64))
            keys.append(_keys(batch.column("document").to_pylist(), seed))
    if not sum(len(part) for part in sizes):
        raise InputError(f"{shards}: the shards hold no document; check the sources and their quarantine")
    return Survey(files, tuple(names), np.concatenate(domain), np.concatenate(sizes), np.concatenate(keys))


def _record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: not an Arrow IPC file ({error})") from None
    missing = {"text", "document", "domain"} - set(reader.schema.names)
    if missing:
        raise InputError(f"{path}: column {sorted(missing)[0]!r} is missing; it has {', '.join(reader.schema.names)}")
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def _keys(documents: list[str], seed: int) -> np.ndarray:
    salt = (seed % (1 << 64)).to_bytes(8, "little")
    joined = b"".join(hashlib.blake2b(name.encode(), digest_size=8, salt=salt).digest() for name in documents)
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


def pieces(found: Survey, chosen: Assignment) -> Iterator[Piece]:
    """All text of all splits in reading order, in pieces of at most 1 MiB, whatever the size of a document."""
    number = 0
    for path in found.files:
        for batch in _record_batches(path):
            text, offsets = _text_buffer(batch)
            whole = chosen.used_whole(number, number + len(batch))
            for start, stop, split in zip(offsets, offsets[1:], whole, strict=False):
                document = text.slice(start, stop - start)
                if split >= 0 and 0 < stop - start <= PIECE_BYTES:
                    yield Piece(split, _decoded(document, number), stop - start, True, number)
                elif stop > start:
                    yield from _document_pieces(number, document, chosen)
                number += 1


def _text_buffer(batch: pa.RecordBatch) -> tuple[pa.Buffer, list[int]]:
    """The texts of a batch as one mapped buffer and the offsets in it; Arrow's own scalars would copy each text."""
    column = batch.column("text").cast(pa.large_string())
    offsets = np.frombuffer(column.buffers()[1], dtype=np.int64)[column.offset : column.offset + len(column) + 1]
    return column.buffers()[2] or pa.py_buffer(b""), offsets.tolist()


def _document_pieces(number: int, text: pa.Buffer, chosen: Assignment) -> Iterator[Piece]:
    for split, start, stop in chosen.parts(number, text):
        while start < stop:
            end = min(stop, start + PIECE_BYTES)
            if end < stop:
                end = start + cut_point(text.slice(start), PIECE_BYTES)
            yield Piece(split, _decoded(text.slice(start, end - start), number), end - start, end == stop, number)
            start = end


def _decoded(part: pa.Buffer, number: int) -> str:
    try:
        return part.to_pybytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"document {number} of the shards is not valid UTF-8 ({error}); run `lmperf ingest`") from None


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


def sample_texts(found: Survey, chosen: Assignment, sample: Mapping[int, int]) -> Iterator[str]:
    """The texts of `training_sample`: the start of each document, never reaching beyond its training part."""
    number = 0
    for path in found.files:
        for batch in _record_batches(path):
            buffer, offsets = _text_buffer(batch)
            for row in (row for row in range(len(batch)) if number + row in sample):
                text = buffer.slice(offsets[row], offsets[row + 1] - offsets[row])
                stop = next((stop for split, _, stop in chosen.parts(number + row, text) if split == 0), 0)
                yield _decoded(text.slice(0, cut_point(text, min(stop, sample[number + row]))), number + row)
            number += len(batch)


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
