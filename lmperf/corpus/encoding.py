"""All text of all splits → token shards: batches are read, encoded and written at the same time, in a fixed order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmperf.corpus import splits
from lmperf.corpus.accelerator import Encode, Engine
from lmperf.corpus.split_texts import Pieces, pieces
from lmperf.corpus.token_shards import SplitWriter, token_dtype

UNDER_WAY = 4  # batches: one being encoded (the library has threads of its own), the others wait for that or a disk


@dataclass(frozen=True)
class Part:
    """What one batch adds to one split: its tokens (uint32), where documents end in them, UTF-8 bytes of the text."""

    split: int
    tokens: np.ndarray
    ends: np.ndarray
    size: int


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
    writers = [SplitWriter(folder, name, token_dtype(vocab_size), metadata) for name in chosen.splits]
    total, done = int(np.where(chosen.split >= 0, chosen.take, 0).sum()), 0
    batches = _batched(pieces(found, chosen), engine.batch_bytes)
    with closing(_pipeline(batches, engine.encode, end_of_text, writers)) as sizes:
        for size in sizes:
            done += size
            progress(f"tokenized {done / 1e6:.1f} of {total / 1e6:.1f} MB")
    return {writer.name: writer.close() for writer in writers}


def _pipeline(
    batches: Iterable[Pieces], encode: Encode, end_of_text: int, writers: Sequence[SplitWriter]
) -> Iterator[int]:
    """Read here, encode in a second thread and write in a third, all in the order of `batches`; yields bytes done."""

    def write(encoded: Future[list[Part]]) -> int:
        parts = encoded.result()
        for part in parts:
            writers[part.split].add(part.tokens, ends=part.ends, size=part.size)
        return sum(part.size for part in parts)

    under_way: deque[Future[int]] = deque()
    with ThreadPoolExecutor(1) as encoding, ThreadPoolExecutor(1) as writing:
        for batch in batches:
            under_way.append(writing.submit(write, encoding.submit(_parts, batch, encode, end_of_text)))
            if len(under_way) > UNDER_WAY:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


def _batched(groups: Iterable[Pieces], limit: int) -> Iterator[Pieces]:
    """Batches of about `limit` bytes."""
    waiting: list[Pieces] = []
    size = 0
    for group in groups:
        waiting.append(group)
        size += int(group.size.sum())
        if size >= limit:
            yield _joined(waiting)
            waiting, size = [], 0
    if waiting:
        yield _joined(waiting)


def _joined(groups: list[Pieces]) -> Pieces:
    """One batch of several groups, sorted by split; reading order stays within a split."""
    split, size, last = (np.concatenate([group[field] for group in groups]) for field in (1, 2, 3))
    texts = [text for group in groups for text in group.texts]
    order = np.argsort(split, kind="stable")
    return Pieces([texts[index] for index in order.tolist()], split[order], size[order], last[order])


def _parts(batch: Pieces, encode: Encode, end_of_text: int) -> list[Part]:
    """A batch encoded: each split's tokens, with the end-of-text id after every piece that closes a document."""
    ids, lengths = encode(batch.texts)
    stops = np.cumsum(lengths)
    bounds = np.flatnonzero(np.diff(batch.split)) + 1
    parts = []
    for first, stop in zip((0, *bounds), (*bounds, len(stops)), strict=True):
        start = int(stops[first - 1]) if first else 0
        closing = stops[first:stop][batch.last[first:stop]] - start
        tokens = np.insert(ids[start : stops[stop - 1]], closing, end_of_text)
        ends = closing + np.arange(len(closing))
        parts.append(Part(int(batch.split[first]), tokens, ends, int(batch.size[first:stop].sum())))
    return parts
