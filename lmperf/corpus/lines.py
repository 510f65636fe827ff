"""Lines of a byte stream; a line too long for memory is put into a temporary file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from lmperf.corpus.decoding import CHUNK, Plain, Unreadable, mark_of, utf8_chunks
from lmperf.corpus.events import LARGE, Input, Notes


@dataclass(frozen=True)
class LongLine:
    """A line of `size` bytes in a temporary file that lives until the next line is asked for."""

    spool: BinaryIO
    size: int


def rewound(spool: BinaryIO) -> BinaryIO:
    """`spool`, to be read from its start."""
    spool.seek(0)
    return spool


class Lines:
    """Lines of a byte stream, cut at line feeds alone (never at U+2028), with their numbers."""

    def __init__(self, source: Input, stream: Any) -> None:
        self.stream = stream
        self.damage: str | None = None
        self._source = source

    def __iter__(self) -> Iterator[tuple[int, bytes | LongLine]]:
        number, chunks = 0, self._read()
        pieces: list[bytes] = []
        size = 0
        for chunk in chunks:
            first, *others = chunk.split(b"\n")
            pieces.append(first)
            size += len(first)
            if size > LARGE:
                with self._source.spool() as spool:
                    spool.writelines(pieces)
                    others = _spool_line(spool, chunks, others)
                    number += 1
                    yield number, LongLine(spool, spool.tell())
                pieces, size = others[:1], sum(map(len, others[:1]))
                others = others[1:]
            for line in others:
                number += 1
                yield number, b"".join(pieces)
                pieces, size = [line], len(line)
        if size:
            yield number + 1, b"".join(pieces)

    def _read(self) -> Iterator[bytes]:
        try:
            while chunk := self.stream.read(CHUNK):
                yield chunk
        except Unreadable as error:
            self.damage = str(error)


def _spool_line(spool: BinaryIO, chunks: Iterator[bytes], others: list[bytes]) -> list[bytes]:
    """Write the rest of the current line; return the lines that follow it in the last chunk."""
    while not others:
        chunk = next(chunks, None)
        if chunk is None:
            break
        first, *others = chunk.split(b"\n")
        spool.write(first)
    return others


class Recoded:
    """A stream in a wide encoding as a stream of UTF-8."""

    def __init__(self, stream: Plain, encoding: str) -> None:
        self._chunks = utf8_chunks(stream, encoding)

    def read(self, size: int = CHUNK) -> bytes:
        """The next piece, whatever its size."""
        return next(self._chunks, b"")


def as_utf8(source: Input, stream: Plain, notes: Notes) -> Any:
    """`stream` so that its line feeds and quotes are single bytes; a mark is taken off."""
    mark = mark_of(stream.peek(8))
    encoding = mark[1] if mark else None
    if mark:
        stream.read_up_to(len(mark[0]))
    declared = (source.encoding or "").lower().replace("_", "-")
    if encoding is None and declared.startswith(("utf-16", "utf-32")):
        encoding = source.encoding
    if encoding and encoding != "utf-8":
        notes.encodings[encoding] += 1
        return Recoded(stream, encoding)
    return stream
