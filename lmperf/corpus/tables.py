"""Documents out of tables of separated values with a header line."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

from lmperf.corpus.cells import CellScanner
from lmperf.corpus.decoding import CHUNK, Plain, Unreadable, candidates, to_utf8, utf8_chunks
from lmperf.corpus.events import HEAD, LARGE, Event, Input, LargeText, Notes, Problem, Text
from lmperf.corpus.formats import text_keys
from lmperf.corpus.lines import Lines, LongLine, as_utf8, rewound

Row = tuple[
    int, int, list[str] | str | BinaryIO
]  # line number, bytes, and cells, a reason, or a row too large for memory


def read_table(source: Input, stream: Plain, notes: Notes, delimiter: str) -> Iterator[Event]:
    """One document a row; a row of another width than the header's is set aside."""
    csv.field_size_limit(sys.maxsize)
    lines = _RowLines(source, Lines(source, as_utf8(source, stream, notes)))
    column: int | None = None
    width = 0
    for number, size, row in _rows(lines, delimiter):
        where = {"line": number}
        if isinstance(row, str):
            yield Problem(row, size, where)
        elif column is None:
            column, width = _text_column(row, source.text_key)
            if column is None:
                rest = sum(size for _, size, _ in _rows(lines, delimiter))
                yield Problem(_no_column(row, source), size + rest, where)
                return
        elif not isinstance(row, list):
            yield _large_row(source, row, delimiter, (column, width), where, size)
        elif len(row) != width:
            yield Problem(f"{len(row)} columns, the header has {width}", size, where)
        else:
            yield from _cell(row[column], source, where, size, notes)
    if lines.damage:
        yield Problem(lines.damage, 1, {"line": lines.number + 1})


def _cell(cell: str, source: Input, where: dict[str, int], size: int, notes: Notes) -> Iterator[Event]:
    if not cell:
        notes.empty += 1
        return
    try:
        utf8, encoding = to_utf8(cell.encode("utf-8", "surrogateescape"), source.encoding, bounded=True)
    except Unreadable as error:
        yield Problem(str(error), size, where)
        return
    notes.encodings[encoding] += 1
    yield Text(utf8)


def _large_row(
    source: Input, spool: BinaryIO, delimiter: str, place: tuple[int, int], where: dict[str, int], size: int
) -> LargeText:
    def chunks(encoding: str) -> Iterator[bytes]:
        yield from CellScanner(utf8_chunks(rewound(spool), encoding), delimiter).cell(*place)

    encodings = candidates(rewound(spool).read(HEAD), source.encoding)
    return LargeText(tuple((encoding, partial(chunks, encoding)) for encoding in encodings), where, size)


def _no_column(header: list[str] | BinaryIO, source: Input) -> str:
    if not isinstance(header, list):
        return "the header line is too long"
    shown = ", ".join(header)[:200].encode("utf-8", "backslashreplace").decode()
    return f"no column {' or '.join(map(repr, text_keys(source.text_key)))}; columns: {shown}"


def _text_column(header: list[str] | BinaryIO, text_key: str | None) -> tuple[int | None, int]:
    """The text's column and the number of columns."""
    if not isinstance(header, list):
        return None, 0
    for key in text_keys(text_key):
        if key in header:
            return header.index(key), len(header)
    return (0, 1) if len(header) == 1 and not text_key else (None, len(header))


class _TooLarge(csv.Error):
    """The row under way does not fit into memory."""


class _RowLines:
    """Lines for csv.reader: bytes that are no UTF-8 travel as surrogates, so that each cell is decoded by itself."""

    def __init__(self, source: Input, lines: Lines) -> None:
        self._source, self._reader, self._lines = source, lines, iter(lines)
        self._row: list[bytes] = []
        self._next: bytes | LongLine = b""
        self.number = self.size = 0

    @property
    def damage(self) -> str | None:
        """Why the file ended before its end, if it did."""
        return self._reader.damage

    def start_row(self) -> None:
        """Forget the lines of the row before."""
        self._row, self.size = [], 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self.number, line = next(self._lines)
        if isinstance(line, LongLine) or self.size + len(line) > LARGE:
            self._next = line
            raise _TooLarge
        self._row.append(line)
        self.size += len(line) + 1
        return line.decode("utf-8", "surrogateescape") + "\n"

    def _spool_row(self, spool: BinaryIO) -> None:
        # The row ends with the first line at whose end no quote is open.
        quotes = 0
        for line in self._row:
            spool.write(line + b"\n")
            quotes += line.count(b'"')
        line: bytes | LongLine | None = self._next
        while line is not None:
            quotes += _copy(line, spool)
            if quotes % 2 == 0:
                break
            self.number, line = next(self._lines, (self.number, None))
        self.size = spool.tell()

    def spool(self) -> Iterator[BinaryIO]:
        """A temporary file, open until the next row is asked for."""
        with self._source.spool() as spool:
            self._spool_row(spool)
            yield spool


def _copy(line: bytes | LongLine, spool: BinaryIO) -> int:
    """Append a line; returns the quotes in it."""
    if not isinstance(line, LongLine):
        spool.write(line + b"\n")
        return line.count(b'"')
    quotes, stream = 0, rewound(line.spool)
    while chunk := stream.read(CHUNK):
        spool.write(chunk)
        quotes += chunk.count(b'"')
    spool.write(b"\n")
    return quotes


def _rows(lines: _RowLines, delimiter: str) -> Iterator[Row]:
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.start_row()
        start = lines.number + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except _TooLarge:
            for spool in lines.spool():
                yield start, lines.size, spool
            continue
        except csv.Error as error:
            yield start, lines.size, str(error)
            continue
        if row:
            yield start, lines.size, row
