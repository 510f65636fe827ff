"""The text of every split as Python strings, in groups of bounded size whatever the size of a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from lmperf.corpus import splits
from lmperf.corpus.splits import Assignment, Survey, cut_point, record_batches, strings_of
from lmperf.records import InputError


class Pieces(NamedTuple):
    """Stretches of documents, a field a column: a loop over documents in Python may cost more than encoding them."""

    texts: list[str]
    split: np.ndarray  # int32, index into the assignment's splits
    size: np.ndarray  # int64, UTF-8 bytes
    last: np.ndarray  # bool: the stretch closes its document (within its split)


def pieces(found: Survey, chosen: Assignment) -> Iterator[Pieces]:
    """All text of all splits in reading order, in pieces of at most 1 MiB and groups of about as much."""
    number = 0
    for path in found.files:
        for batch in record_batches(path):
            yield from _batch_pieces(*strings_of(batch, "text"), number, chosen)
            number += len(batch)


def _batch_pieces(text: pa.Buffer, offsets: np.ndarray, number: int, chosen: Assignment) -> Iterator[Pieces]:
    """The used texts of one record batch, its first document being `number`: many at once where none has to be cut."""
    rows, sizes = len(offsets) - 1, np.diff(offsets)
    whole = chosen.used_whole(number, number + rows)
    at_once = (whole >= 0) & (sizes > 0) & (sizes <= splits.PIECE_BYTES)
    one_by_one = (chosen.split[number : number + rows] >= 0) & (sizes > 0) & ~at_once
    start = 0
    for row in (*np.flatnonzero(one_by_one).tolist(), rows):
        for group in _groups(start + np.flatnonzero(at_once[start:row]), sizes):
            texts = _strings(text, offsets, group, number)
            yield Pieces(texts, whole[group], sizes[group], np.ones(len(group), dtype=bool))
        if row < rows:
            yield from _document_pieces(number + row, text.slice(int(offsets[row]), int(sizes[row])), chosen)
        start = row + 1


def _groups(rows: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
    """`rows` in groups of about as many bytes as a piece may have."""
    number = np.cumsum(sizes[rows]) // splits.PIECE_BYTES
    bounds = (0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(rows))
    return (rows[first:stop] for first, stop in pairwise(bounds) if first < stop)


def _strings(text: pa.Buffer, offsets: np.ndarray, rows: np.ndarray, number: int) -> list[str]:
    first, stop = int(rows[0]), int(rows[-1]) + 1
    places = offsets[first : stop + 1] - offsets[first]
    together = text.slice(int(offsets[first]), int(places[-1]))
    if stop - first == len(rows) and np.frombuffer(together, np.int8).min() >= 0:
        string = str(together, "ascii")  # one byte a character: each text is a slice
        return [string[start:end] for start, end in pairwise(places.tolist())]
    parts = zip(rows.tolist(), offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
    return [decoded(text.slice(start, end - start), number + row) for row, start, end in parts]


def _document_pieces(number: int, text: pa.Buffer, chosen: Assignment) -> Iterator[Pieces]:
    for split, start, stop in chosen.parts(number, text):
        while start < stop:
            end = min(stop, start + splits.PIECE_BYTES)
            if end < stop:
                end = start + cut_point(text.slice(start), splits.PIECE_BYTES)
            string = decoded(text.slice(start, end - start), number)
            yield Pieces([string], np.array([split], np.int32), np.array([end - start]), np.array([end == stop]))
            start = end


def decoded(part: pa.Buffer, number: int) -> str:
    """A part of document `number` as a string; `InputError` when it is not UTF-8."""
    try:
        return str(part, "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"document {number} of the shards is not valid UTF-8 ({error}); run `lmperf ingest`") from None


def sample_texts(found: Survey, chosen: Assignment, sample: Mapping[int, int]) -> Iterator[str]:
    """The texts of `training_sample`: the start of each document, never reaching beyond its training part."""
    number = 0
    for path in found.files:
        for batch in record_batches(path):
            buffer, offsets = strings_of(batch, "text")
            for row in (row for row in range(len(batch)) if number + row in sample):
                text = buffer.slice(int(offsets[row]), int(offsets[row + 1] - offsets[row]))
                stop = next((stop for split, _, stop in chosen.parts(number + row, text) if split == 0), 0)
                yield decoded(text.slice(0, cut_point(text, min(stop, sample[number + row]))), number + row)
            number += len(batch)
