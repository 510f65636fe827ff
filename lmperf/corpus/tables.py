"""Documents out of tables of separated values with a header line."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator

from lmperf.corpus.decoding import Plain, Unreadable, to_utf8
from lmperf.corpus.events import Event, Input, Notes, Problem, Text
from lmperf.corpus.formats import text_keys
from lmperf.corpus.lines import Lines, as_utf8

Row = tuple[int, int, list[str] | str]  # line number, bytes, cells or the reason why there are none
LONGEST_ROW = 32 << 20  # csv holds a cell in four bytes a character


def read_table(source: Input, stream: Plain, notes: Notes, delimiter: str) -> Iterator[Event]:
    """One document a row; a row of another width than the header's is set aside."""
    csv.field_size_limit(sys.maxsize)
    lines = _CountedLines(Lines(source, as_utf8(source, stream, notes)))
    column: int | None = None
    width = 0
    for number, size, row in _rows(lines, delimiter):
        if isinstance(row, str):
            yield Problem(row, size, {"line": number})
        elif column is None:
            column, width = _text_column(row, source.text_key), len(row)
            if column is None:
                yield Problem(
                    _no_column(row, source), size + sum(size for _, size, _ in _rows(lines, delimiter)), {"line": 1}
                )
                return
        elif len(row) != width:
            yield Problem(f"{len(row)} columns, the header has {width}", size, {"line": number})
        else:
            yield from _cell(row[column], source, {"line": number}, size, notes)
    if lines.source.damage:
        yield Problem(lines.source.damage, 1, {"line": lines.number + 1})


def _cell(cell: str, source: Input, where: dict[str, int], size: int, notes: Notes) -> Iterator[Event]:
    if not cell:
        notes.empty += 1
        return
    try:
        utf8, encoding = to_utf8(cell.encode("utf-8", "surrogateescape"), source.encoding, nuls=True)
    except Unreadable as error:
        yield Problem(str(error), size, where)
        return
    notes.encodings[encoding] += 1
    yield Text(utf8)


def _no_column(header: list[str], source: Input) -> str:
    shown = ", ".join(header)[:200].encode("utf-8", "backslashreplace").decode()
    return f"no column {' or '.join(map(repr, text_keys(source.text_key)))}; columns: {shown}"


def _text_column(header: list[str], text_key: str | None) -> int | None:
    for key in text_keys(text_key):
        if key in header:
            return header.index(key)
    return 0 if len(header) == 1 and not text_key else None


class _CountedLines:
    """Lines for csv.reader: bytes that are no UTF-8 travel as surrogates, so that each cell is decoded by itself."""

    def __init__(self, source: Lines) -> None:
        self.source = source
        self.number = self.size = 0
        self._lines = iter(source)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.size > LONGEST_ROW:
            raise csv.Error("a row longer than 32 MiB, or a quote that is never closed")
        self.number, line = next(self._lines)
        self.size += len(line) + 1
        return line.decode("utf-8", "surrogateescape") + "\n"


def _rows(lines: _CountedLines, delimiter: str) -> Iterator[Row]:
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        lines.size, start = 0, lines.number + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield start, lines.size, str(error)
            continue
        if row:
            yield start, lines.size, row
