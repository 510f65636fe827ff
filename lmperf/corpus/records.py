"""Documents out of records: JSON lines, a JSON array, one JSON object."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO

from lmperf.corpus.cleaning import encode
from lmperf.corpus.decoding import Plain, Unreadable, candidates, mark_of, to_utf8, utf8_chunks
from lmperf.corpus.events import HEAD, LARGE, Event, Input, LargeText, Notes, Problem, Text
from lmperf.corpus.formats import text_keys
from lmperf.corpus.lines import Lines, LongLine, Recoded, as_utf8, rewound
from lmperf.corpus.scanning import JsonScanner
from lmperf.corpus.texts import read_text
from lmperf.corpus.window import TOO_LARGE, Window

_MISSING = object()


def read_jsonl(source: Input, stream: Plain, notes: Notes) -> Iterator[Event]:
    """One document a line; a line that is no JSON object with a text is set aside alone."""
    lines = Lines(source, as_utf8(source, stream, notes))
    last = 0
    for number, line in lines:
        last = number
        if isinstance(line, LongLine):
            yield _long_record(source, partial(rewound, line.spool), {"line": number}, line.size, notes)
        elif line.strip():
            yield from _json_line(source, line, {"line": number}, notes)
    if lines.damage:
        yield Problem(lines.damage, 1, {"line": last + 1})


def _long_record(
    source: Input, again: Callable[[], BinaryIO], where: dict[str, int], size: int, notes: Notes
) -> LargeText:
    """A record too large for memory, in a temporary file: every encoding with every key is one attempt."""

    def chunks(encoding: str, path: tuple[bytes, ...]) -> Iterator[bytes]:
        scanner = JsonScanner(utf8_chunks(again(), encoding))
        yield from scanner.text(path)
        scanner.end()
        notes.cleaning.update(scanner.surrogates)

    encodings = candidates(again().read(HEAD), source.encoding)
    paths = key_paths(source.text_key)
    if again().read(HEAD).lstrip()[:1] == b'"':
        paths = [()]
    return LargeText(tuple((e, partial(chunks, e, path)) for e in encodings for path in paths), where, size)


def key_paths(text_key: str | None) -> list[tuple[bytes, ...]]:
    """The places where the text may be: each key as it is, and with its dots as steps into nested objects."""
    paths = [(key.encode(),) for key in text_keys(text_key)]
    return paths + [tuple(p.encode() for p in key.split(".")) for key in text_keys(text_key) if "." in key]


def _json_line(source: Input, line: bytes, where: dict[str, int], notes: Notes) -> Iterator[Event]:
    try:
        utf8, encoding = to_utf8(line, source.encoding)
        value = parse_json(utf8.decode())
    except Unreadable as error:
        yield Problem(str(error), len(line), where)
        return
    notes.encodings[encoding] += 1
    if line.startswith(codecs.BOM_UTF8):  # files with marks, put together with `cat`
        notes.cleaning["byte_order_mark"] += 1
    yield from record_events(value, source.text_key, len(line), where, notes)


def parse_json(text: str) -> Any:
    """The one JSON value in `text`, else `Unreadable`; numbers are not converted, so none is too long."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise Unreadable("JSON nested too deeply") from None
    except ValueError:  # an integer of more digits than Python converts
        return json.loads(text, parse_int=float)


def record_events(value: Any, text_key: str | None, size: int, where: dict[str, int], notes: Notes) -> Iterator[Event]:
    """The document of one decoded record: a text, nothing for null (counted), or a problem."""
    text = value if isinstance(value, str) else find_text(value, text_key)
    if text is None or text == "":
        notes.empty += 1
    elif isinstance(text, str):
        yield Text(encode(text, notes.cleaning))
    elif text is _MISSING:
        keys = f"; its keys are {', '.join(map(repr, list(value)[:5]))}" if isinstance(value, Mapping) else ""
        yield Problem(f"no key {' or '.join(map(repr, text_keys(text_key)))}{keys}", size, where)
    else:
        yield Problem(f"the text is {type(text).__name__}, not a string", size, where)


def find_text(value: Any, text_key: str | None) -> Any:
    """The value under the text key (a dotted key reaches into nested objects), or a marker where there is none."""
    if not isinstance(value, Mapping):
        return _MISSING
    for key in text_keys(text_key):
        if key in value:
            return value[key]
        inner: Any = value
        for part in key.split("."):
            inner = inner.get(part, _MISSING) if isinstance(inner, Mapping) else _MISSING
        if inner is not _MISSING:
            return inner
    return _MISSING


def read_json_object(source: Input, stream: Plain, notes: Notes) -> Iterator[Event]:
    """A file that holds one JSON object: its text if it has one, else the file itself is the text."""
    head = stream.peek(LARGE)
    if len(head) == LARGE:
        yield _large_object(source, head, notes)
        return
    try:
        value = parse_json(to_utf8(head, source.encoding)[0].decode())
    except Unreadable:
        value = None
    if isinstance(find_text(value, source.text_key), str):
        stream.read_up_to(len(head))
        yield from record_events(value, source.text_key, len(head), {"offset": 0}, notes)
    else:
        yield from read_text(source, stream, notes)


def _large_object(source: Input, head: bytes, notes: Notes) -> LargeText:
    def chunks(encoding: str, path: tuple[bytes, ...] | None) -> Iterator[bytes]:
        with source.plain() as stream:
            utf8 = utf8_chunks(stream, encoding)
            if path is None:
                yield from utf8
                return
            scanner = JsonScanner(utf8)
            yield from scanner.text(path)
            scanner.end()
            notes.cleaning.update(scanner.surrogates)

    places = [*key_paths(source.text_key), None]
    encodings = candidates(head[:HEAD], source.encoding)
    return LargeText(tuple((e, partial(chunks, e, path)) for path in places for e in encodings), {"offset": 0})


def read_json_array(source: Input, stream: Plain, notes: Notes) -> Iterator[Event]:
    """One document an element; from the first element that is no JSON on, the rest is set aside."""
    window = Window(_array_stream(source, stream, notes))
    try:
        window.expect("[")
        more = not window.next_is("]")
        while more:
            yield from _element(source, window, notes)
            more = window.next_is(",")
            if more:
                window.expect(",")
        window.expect("]")
        window.end()
    except Unreadable as error:
        offset = window.offset
        yield Problem(str(error), max(window.rest(), 1), {"offset": offset})


def _element(source: Input, window: Window, notes: Notes) -> Iterator[Event]:
    start = window.offset
    value, clean = window.value()
    where, size = {"offset": start}, window.offset - start
    if value is TOO_LARGE:
        with source.spool() as spool:
            window.spool_value(spool)
            yield _long_record(source, lambda: rewound(spool), where, window.offset - start, notes)
    elif not clean:
        yield Problem("not valid utf-8; declare the source's encoding", size, where)
    else:
        notes.encodings["utf-8"] += 1
        yield from record_events(value, source.text_key, size, where, notes)


def _array_stream(source: Input, stream: Plain, notes: Notes) -> Any:
    """The stream in UTF-8; where an encoding is declared, the file is looked through once to see if it is needed."""
    if not source.encoding or mark_of(stream.peek(8)):
        return as_utf8(source, stream, notes)
    for encoding in candidates(stream.peek(HEAD), source.encoding):
        try:
            with source.plain() as again:
                for _ in utf8_chunks(again, encoding):
                    pass
        except Unreadable:
            continue
        if encoding != "utf-8":
            notes.encodings[encoding] += 1
            return Recoded(stream, encoding)
    return stream
