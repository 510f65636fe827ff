"""A whole file as one document: plain text, source code, markup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from lmperf.corpus.decoding import Plain, Unreadable, candidates, to_utf8, utf8_chunks
from lmperf.corpus.events import HEAD, LARGE, Event, Input, LargeText, Notes, Problem, Text
from lmperf.corpus.markup import html_text

Transform = Callable[[Iterator[bytes]], Iterator[bytes]]


def read_text(source: Input, stream: Plain, notes: Notes) -> Iterator[Event]:
    """The file as it is."""
    yield from _whole(source, stream, notes, lambda chunks: chunks)


def read_html(source: Input, stream: Plain, notes: Notes) -> Iterator[Event]:
    """The file without its markup."""
    yield from _whole(source, stream, notes, html_text)


def _whole(source: Input, stream: Plain, notes: Notes, transform: Transform) -> Iterator[Event]:
    try:
        data = stream.read_up_to(LARGE + 1)
        if len(data) > LARGE:
            yield LargeText(_attempts(source, data[:HEAD], transform), {"offset": 0})
            return
        utf8, encoding = to_utf8(data, source.encoding)
        content = b"".join(transform(iter((utf8,))))
    except Unreadable as error:
        yield Problem(str(error), max(stream.offset, 1), {"offset": 0})
        return
    notes.encodings[encoding] += 1
    yield Text(content)


def _attempts(
    source: Input, head: bytes, transform: Transform
) -> tuple[tuple[str, Callable[[], Iterator[bytes]]], ...]:
    def chunks(encoding: str) -> Iterator[bytes]:
        with source.plain() as stream:  # read from the start: a first encoding may have failed near the end
            yield from transform(utf8_chunks(stream, encoding))

    return tuple((encoding, partial(chunks, encoding)) for encoding in candidates(head, source.encoding))
