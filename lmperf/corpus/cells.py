"""One row of separated values of any size as a stream: one cell of it in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lmperf.corpus.decoding import Unreadable


class CellScanner:
    """Reads one row out of UTF-8 pieces and holds no more than one piece of it."""

    def __init__(self, chunks: Iterator[bytes], delimiter: str) -> None:
        self._chunks, self._delimiter = chunks, delimiter.encode()
        self._bare = re.compile(rb"[^\r\n" + re.escape(self._delimiter) + rb"]*+")
        self._data, self._at = b"", 0

    def cell(self, column: int, width: int) -> Iterator[bytes]:
        """The pieces of the cell `column`; `Unreadable` unless the row has `width` cells."""
        count = 0
        while True:
            for piece in self._cell():
                if count == column and piece:
                    yield piece
            count += 1
            if self._peek() != self._delimiter:
                break
            self._at += 1
        if self._peek() not in (b"", b"\r", b"\n"):
            raise Unreadable("something follows a closing quote")
        if count != width:
            raise Unreadable(f"{count} columns, the header has {width}")

    def _peek(self) -> bytes:
        if self._at >= len(self._data):
            self._data, self._at = next(self._chunks, b""), 0
        return self._data[self._at : self._at + 1]

    def _cell(self) -> Iterator[bytes]:
        if self._peek() != b'"':
            yield from self._bare_cell()
            return
        self._at += 1
        while self._peek():
            end = self._data.find(b'"', self._at)
            if end < 0:
                end = len(self._data)
            yield self._data[self._at : end]
            self._at = end
            if end < len(self._data):
                self._at += 1
                if self._peek() != b'"':
                    return
                self._at += 1
                yield b'"'
        raise Unreadable("a quote is never closed")

    def _bare_cell(self) -> Iterator[bytes]:
        while self._peek():
            end = self._bare.match(self._data, self._at).end()  # type: ignore[union-attr]
            yield self._data[self._at : end]
            self._at = end
            if end < len(self._data):
                return
