"""Lines of a byte stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lmperf.corpus.decoding import CHUNK, Plain, Unreadable, mark_of, utf8_chunks
from lmperf.corpus.events import Input, Notes


class Lines:
    """Lines of a byte stream, cut at line feeds alone (never at U+2028 and its like), with their numbers and offsets."""

    def __init__(self, stream: Plain) -> None:
        self.stream = stream
        self.damage: str | None = None

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        number, rest = 0, []
        for chunk in self._chunks():
            first, *others = chunk.split(b"\n")
            rest.append(first)
            for line in others:
                number += 1
                yield number, b"".join(rest)
                rest = [line]
        if any(rest):
            yield number + 1, b"".join(rest)

    def _chunks(self) -> Iterator[bytes]:
        try:
            while chunk := self.stream.read(CHUNK):
                yield chunk
        except Unreadable as error:
            self.damage = str(error)


class _Recoded:
    """A stream in a wide encoding as a stream of UTF-8."""

    def __init__(self, stream: Plain, encoding: str) -> None:
        self._chunks = utf8_chunks(stream, encoding)

    def read(self, size: int = CHUNK) -> bytes:
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
        return _Recoded(stream, encoding)
    return stream
