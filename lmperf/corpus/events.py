"""What reading a file gives: whole texts, large texts in pieces, problems; and the input and notes that go with it."""

from __future__ import annotations

import io
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from lmperf.corpus.decoding import Plain

LARGE = 8 << 20  # bytes; a longer document is never held whole in memory
HEAD = 1 << 16


@dataclass(frozen=True, slots=True)
class Text:
    """One document as UTF-8."""

    data: bytes


@dataclass(frozen=True, slots=True)
class LargeText:
    """One document too large for memory: each attempt gives its UTF-8 pieces or raises `Unreadable`."""

    attempts: tuple[tuple[str, Callable[[], Iterator[bytes]]], ...]
    where: dict[str, int]
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Content set aside: why, how many bytes, and where in the file ({"line": n} or {"offset": n})."""

    reason: str
    size: int
    where: dict[str, int] = field(default_factory=dict)


Event = Text | LargeText | Problem


@dataclass
class Notes:
    """Counts that reading leaves: formats, encodings, records without text, bytes of content seen."""

    formats: Counter[str] = field(default_factory=Counter)
    encodings: Counter[str] = field(default_factory=Counter)
    cleaning: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    content_bytes: int = 0


@dataclass(frozen=True)
class Input:
    """One file to read: its path, its reported name, its content if already read, and the source's options."""

    path: bytes
    name: bytes
    scratch: Path  # a folder for what must be spooled to disk
    data: bytes | None = None
    encoding: str | None = None
    text_key: str | None = None

    def open(self) -> BinaryIO:
        """A new binary stream over the raw content."""
        return io.BytesIO(self.data) if self.data is not None else open(self.path, "rb")

    def plain(self) -> Plain:
        """A new stream with compression taken off."""
        return Plain(self.open())

    @contextmanager
    def spool(self) -> Iterator[BinaryIO]:
        """A temporary file that has no name and so cannot be left behind."""
        with tempfile.TemporaryFile(dir=self.scratch) as stream:
            yield stream
