"""One JSON value of any size as a stream: the text of a record in pieces, everything else checked and passed over."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from lmperf.corpus.cleaning import encode
from lmperf.corpus.decoding import Unreadable

_BLANK = re.compile(rb"[ \t\n\r]*")
_RUN = re.compile(rb'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_LITERAL = re.compile(rb"true|false|null|NaN|-?Infinity|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
LONGEST_KEY = 1 << 20
LONGEST_NUMBER = 1 << 16
DEEPEST = 200


class JsonScanner:
    """Reads JSON out of UTF-8 pieces (each ending between characters) and holds no more than one piece of it."""

    def __init__(self, chunks: Iterator[bytes], spool: BinaryIO | None = None) -> None:
        self._chunks, self._spool = chunks, spool
        self._data, self._at = b"", 0
        self.consumed = 0  # bytes
        self.surrogates: Counter[str] = Counter()

    def _fill(self) -> bool:
        """Add the next piece; what has been consumed goes to the spool, if there is one."""
        if self._spool is not None:
            self._spool.write(self._data[: self._at])
        self.consumed += self._at
        chunk = next(self._chunks, b"")
        self._data, self._at = self._data[self._at :] + chunk, 0
        return bool(chunk)

    def remainder(self) -> bytes:
        """What was read but not consumed; the spool is brought up to date."""
        if self._spool is not None:
            self._spool.write(self._data[: self._at])
        self.consumed += self._at
        self._data, self._at = self._data[self._at :], 0
        return self._data

    def peek(self) -> bytes:
        """The next byte that is no white space, empty at the end."""
        while True:
            self._at = _BLANK.match(self._data, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._data) or not self._fill():
                return self._data[self._at : self._at + 1]

    def _take(self, char: bytes) -> None:
        if self.peek() != char:
            raise Unreadable(f"not valid JSON: {char.decode()!r} expected at byte {self.consumed + self._at}")
        self._at += 1

    def string(self) -> Iterator[bytes]:
        """The value of the next string as UTF-8 pieces."""
        self._take(b'"')
        while True:
            end = _RUN.match(self._data, self._at).end()  # type: ignore[union-attr]
            ended = self._data[end : end + 1] == b'"'
            if not ended and _HIGH_SURROGATE.search(self._data, max(self._at, end - 6), end):
                end -= 6  # the other half of the pair may stand in the next piece
            if end > self._at:
                piece = self._data[self._at : end]
                self._at = end
                yield self._unescaped(piece)
            if ended:
                self._at += 1
                return
            self._more_of_string()

    def _more_of_string(self) -> None:
        rest = len(self._data) - self._at
        cut_escape = self._data[self._at : self._at + 1] == b"\\" and rest < 12
        if rest and not cut_escape:
            raise Unreadable(f"not valid JSON: bad character in a string at byte {self.consumed + self._at}")
        if not self._fill():
            raise Unreadable("not valid JSON: a string does not end")

    def _unescaped(self, piece: bytes) -> bytes:
        if b"\\" not in piece:
            return piece
        try:
            return encode(json.loads(f'"{piece.decode()}"'), self.surrogates)
        except UnicodeDecodeError:
            raise Unreadable(f"not valid utf-8 before byte {self.consumed + self._at}") from None

    def skip(self, depth: int = 0) -> None:
        """Pass over one value of any kind, checking it."""
        start = self.peek()
        if depth > DEEPEST:
            raise Unreadable("JSON nested too deeply")
        if start == b'"':
            for _ in self.string():
                pass
        elif start == b"{":
            for _ in self._members():
                self.skip(depth + 1)
        elif start == b"[":
            self._skip_array(depth)
        else:
            self._literal()

    def _skip_array(self, depth: int) -> None:
        self._take(b"[")
        while self.peek() != b"]":
            self.skip(depth + 1)
            if self.peek() != b",":
                break
            self._take(b",")
            if self.peek() == b"]":
                raise Unreadable("not valid JSON: a comma before ]")
        self._take(b"]")

    def _literal(self) -> None:
        while True:
            match = _LITERAL.match(self._data, self._at)
            whole = match and match.end() < len(self._data)
            if whole or len(self._data) - self._at > LONGEST_NUMBER or not self._append():
                break
        if not match:
            raise Unreadable(f"not valid JSON: no value at byte {self.consumed + self._at}")
        self._at = match.end()

    def _append(self) -> bool:
        chunk = next(self._chunks, b"")
        self._data += chunk
        return bool(chunk)

    def _members(self) -> Iterator[bytes]:
        """The keys of the next object; the caller consumes each value before it asks for the next key."""
        self._take(b"{")
        while self.peek() != b"}":
            key = b""
            for piece in self.string():
                key += piece
                if len(key) > LONGEST_KEY:
                    raise Unreadable("a JSON key over 1 MiB")
            self._take(b":")
            yield key
            if self.peek() != b",":
                break
            self._take(b",")
            if self.peek() != b'"':
                raise Unreadable("not valid JSON: a comma before }")
        self._take(b"}")

    def text(self, path: tuple[bytes, ...]) -> Iterator[bytes]:
        """The string under `path` in the next value (the value itself where `path` is empty), in pieces."""
        found = yield from self._text(path)
        if not found:
            raise Unreadable(f"no key {b'.'.join(path).decode()!r} with a string")

    def _text(self, path: tuple[bytes, ...]):
        if not path:
            if self.peek() != b'"':
                self.skip()
                return False
            yield from self.string()
            return True
        if self.peek() != b"{":
            self.skip()
            return False
        found = False
        for key in self._members():
            if key == path[0] and not found:
                found = yield from self._text(path[1:])
            else:
                self.skip()
        return found

    def end(self) -> None:
        """Nothing but white space may follow."""
        if self.peek():
            raise Unreadable(f"not valid JSON: something follows the value at byte {self.consumed + self._at}")
