"""JSON values one after the other out of a stream, by the standard decoder, as long as each fits into memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from lmperf.corpus.decoding import CHUNK, Unreadable
from lmperf.corpus.events import LARGE
from lmperf.corpus.scanning import JsonScanner

TOO_LARGE = object()
_BLANK = re.compile(r"[ \t\n\r]*")
_ESCAPE = "surrogateescape"  # bytes that are no UTF-8 spoil the one value they stand in, not its neighbours


class Window:
    """A window over a stream of UTF-8 that holds no more than the current value and one chunk."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._text, self._at, self._ended = stream, "", 0, False
        self._decode = codecs.getincrementaldecoder("utf-8")(_ESCAPE).decode
        self._decoder = json.JSONDecoder()
        self.offset = 0  # bytes consumed

    def _next(self) -> str:
        while not self._ended:
            chunk = self._stream.read(CHUNK)
            self._ended = not chunk
            if text := self._decode(chunk, final=self._ended):
                return text
        return ""

    def _more(self) -> bool:
        text = self._next()
        self._text, self._at = self._text[self._at :] + text, 0
        return bool(text)

    def _skip_blank(self) -> None:
        while True:
            end = _BLANK.match(self._text, self._at).end()  # type: ignore[union-attr]
            self.offset, self._at = self.offset + end - self._at, end
            if end < len(self._text) or not self._more():
                return

    def next_is(self, char: str) -> bool:
        """Whether the next character, white space apart, is `char`."""
        self._skip_blank()
        return self._text.startswith(char, self._at)

    def expect(self, char: str) -> None:
        """Consume `char`, or raise `Unreadable`."""
        if not self.next_is(char):
            raise Unreadable(f"not valid JSON: {char!r} expected at byte {self.offset}")
        self._at, self.offset = self._at + 1, self.offset + 1

    def value(self) -> tuple[Any, bool]:
        """The next value and whether its bytes were UTF-8; (`TOO_LARGE`, True) if it is too long."""
        self._skip_blank()
        wanted = CHUNK
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or not self._more():  # a number at the window's end may go on
                    return value, self._consume(end)
            except RecursionError:
                raise Unreadable("JSON nested too deeply") from None
            except ValueError as error:
                if not self._grow(wanted):
                    raise Unreadable(f"not valid JSON: {error} at byte {self.offset}") from None
            if len(self._text) - self._at > LARGE:
                return TOO_LARGE, True
            wanted *= 2

    def _grow(self, wanted: int) -> bool:
        before = len(self._text) - self._at
        while len(self._text) - self._at < before + wanted and self._more():
            pass
        return len(self._text) - self._at > before

    def _consume(self, end: int) -> bool:
        raw = self._text[self._at : end]
        self._at = end
        try:
            self.offset += len(raw.encode())
        except UnicodeEncodeError:
            self.offset += len(raw.encode("utf-8", _ESCAPE))
            return False
        return True

    def spool_value(self, spool: BinaryIO) -> None:
        """Consume the next value, of any size, and write its bytes to `spool`."""
        scanner = JsonScanner(self._bytes(), spool)
        scanner.skip()
        self._text, self._at = scanner.remainder().decode("utf-8", _ESCAPE), 0
        self.offset += scanner.consumed

    def _bytes(self) -> Iterator[bytes]:
        yield self._text[self._at :].encode("utf-8", _ESCAPE)
        while text := self._next():
            yield text.encode("utf-8", _ESCAPE)

    def end(self) -> None:
        """Nothing but white space may follow."""
        self._skip_blank()
        if self._at < len(self._text):
            raise Unreadable(f"not valid JSON: something follows the array at byte {self.offset}")

    def rest(self) -> int:
        """Consume the rest and return its size in bytes."""
        size = len(self._text) - self._at
        try:
            while text := self._next():
                size += len(text)
        except Unreadable:
            pass  # the damage has been told already
        return size
