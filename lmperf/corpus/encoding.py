"""All text of all splits → token shards: one batch is encoded while those before and after it are handled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from lmperf.corpus import splits
from lmperf.corpus.accelerator import Encode, Engine
from lmperf.corpus.token_shards import SplitWriter, token_dtype

Batch = list[splits.Piece]
Encoded = tuple[np.ndarray, np.ndarray]  # ids of all pieces joined (uint32), ids of each piece (int64)


def encode_splits(
    found: splits.Survey,
    chosen: splits.Assignment,
    engine: Engine,
    folder: Path,
    *,
    vocab_size: int,
    end_of_text: int,
    metadata: Mapping[str, str],
    progress: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Write the token shards of every split into `folder`; returns split name → its manifest entry."""
    dtype = token_dtype(vocab_size)
    writers = [SplitWriter(folder, name, dtype, metadata) for name in chosen.splits]
    total, done = int(np.where(chosen.split >= 0, chosen.take, 0).sum()), 0
    batches = _batched(splits.pieces(found, chosen), engine.batch_bytes)
    for batch, encoded in _encoded(batches, engine.encode):
        _scatter(batch, encoded, end_of_text, writers)
        done += sum(piece.size for piece in batch)
        progress(f"tokenized {done / 1e6:.1f} of {total / 1e6:.1f} MB")
    return {writer.name: writer.close() for writer in writers}


def _batched(pieces: Iterable[splits.Piece], limit: int) -> Iterator[Batch]:
    """Batches of about `limit` bytes, sorted by split; reading order stays within a split."""
    batch: Batch = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size >= limit:
            yield sorted(batch, key=lambda piece: piece.split)
            batch, size = [], 0
    if batch:
        yield sorted(batch, key=lambda piece: piece.split)


def _encoded(batches: Iterable[Batch], encode: Encode) -> Iterator[tuple[Batch, Encoded]]:
    """Every batch with its ids, in order; one batch is encoded (without Python's lock) while the caller works."""
    before: tuple[Batch, Future[Encoded]] | None = None
    with ThreadPoolExecutor(max_workers=1) as pool:
        for batch in batches:
            future = pool.submit(encode, [piece.text for piece in batch])
            if before is not None:
                yield before[0], before[1].result()
            before = batch, future
        if before is not None:
            yield before[0], before[1].result()


def _scatter(batch: Batch, encoded: Encoded, end_of_text: int, writers: list[SplitWriter]) -> None:
    """Hand each split its part of a batch, with the end-of-text id after every piece that closes a document."""
    ids, lengths = encoded
    stops = np.cumsum(lengths)
    last = np.array([piece.last for piece in batch])
    ends = np.searchsorted([piece.split for piece in batch], np.arange(len(writers) + 1))
    for writer, first, stop in zip(writers, ends, ends[1:], strict=False):
        if first == stop:
            continue
        start = int(stops[first - 1]) if first else 0
        closing = stops[first:stop][last[first:stop]] - start
        tokens = np.insert(ids[start : stops[stop - 1]], closing, end_of_text)
        writer.add(tokens, documents=len(closing), size=sum(piece.size for piece in batch[first:stop]))
