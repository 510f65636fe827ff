"""Documents out of records: JSON lines, a JSON array, one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lmperf.corpus.cleaning import encode
from lmperf.corpus.decoding import CHUNK, Plain, Unreadable, to_utf8
from lmperf.corpus.events import LARGE, Event, Input, Notes, Problem, Text
from lmperf.corpus.formats import text_keys
from lmperf.corpus.lines import Lines, as_utf8
from lmperf.corpus.texts import read_text

_MISSING = object()


def read_jsonl(source: Input, stream: Plain, notes: Notes) -> Iterator[Event]:
    """One document a line; a line that is no JSON object with a text is set aside alone."""
    lines = Lines(as_utf8(source, stream, notes))
    last = 0
    for number, line in lines:
        last = number
        if line.strip():
            yield from _json_line(source, line, {"line": number}, notes)
    if lines.damage:
        yield Problem(lines.damage, 1, {"line": last + 1})


def _json_line(source: Input, line: bytes, where: dict[str, int], notes: Notes) -> Iterator[Event]:
    try:
        utf8, encoding = to_utf8(line, source.encoding)
        value = parse_json(utf8.decode())
    except Unreadable as error:
        yield Problem(str(error), len(line), where)
        return
    notes.encodings[encoding] += 1
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
    try:
        value = parse_json(to_utf8(head, source.encoding)[0].decode())
    except Unreadable:
        value = None
    if len(head) < LARGE and isinstance(find_text(value, source.text_key), str):
        stream.read_up_to(len(head))
        yield from record_events(value, source.text_key, len(head), {"offset": 0}, notes)
    else:
        yield from read_text(source, stream, notes)


def read_json_array(source: Input, stream: Plain, notes: Notes) -> Iterator[Event]:
    """One document an element; from the first element that is no JSON on, the rest is set aside."""
    window = _Window(as_utf8(source, stream, notes))
    try:
        window.expect("[")
        while not window.next_is("]"):
            start = window.offset
            value = window.value()
            yield from record_events(value, source.text_key, window.offset - start, {"offset": start}, notes)
            if not window.next_is(","):
                window.expect("]")
                break
            window.expect(",")
        window.end()
    except Unreadable as error:
        offset = window.offset
        yield Problem(str(error), max(window.rest(), 1), {"offset": offset})


class _Window:
    """JSON values one after the other out of a stream of UTF-8, holding no more than the current value."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._bytes, self._text, self._at, self._ended = stream, b"", "", 0, False
        self._decoder = json.JSONDecoder()
        self.offset = 0  # bytes consumed

    def _more(self) -> bool:
        chunk = b"" if self._ended else self._stream.read(CHUNK)
        self._ended = not chunk
        data = self._bytes + chunk
        try:
            text, self._bytes = data.decode(), b""
        except UnicodeDecodeError as error:
            if len(data) - error.start > 3 or not chunk:
                raise Unreadable(f"not valid utf-8 near byte {self.offset}") from None
            text, self._bytes = data[: error.start].decode(), data[error.start :]
        self._text, self._at = self._text[self._at :] + text, 0
        return bool(chunk)

    def _skip_blank(self) -> None:
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] in " \t\r\n":
                end += 1
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

    def value(self) -> Any:
        """The next JSON value; the window grows until it holds it."""
        self._skip_blank()
        wanted = CHUNK
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
                if end < len(self._text) or self._ended:  # a number at the window's end may go on
                    break
            except RecursionError:
                raise Unreadable("JSON nested too deeply") from None
            except ValueError as error:
                if self._ended:
                    raise Unreadable(f"not valid JSON: {error} at byte {self.offset}") from None
            while len(self._text) - self._at < wanted and self._more():
                pass
            if len(self._text) - self._at < wanted:
                self._more()
            wanted *= 2
        self.offset += len(self._text[self._at : end].encode("utf-8", "surrogatepass"))
        self._at = end
        return value

    def end(self) -> None:
        """Nothing but white space may follow."""
        self._skip_blank()
        if self._at < len(self._text):
            raise Unreadable(f"not valid JSON: something follows the array at byte {self.offset}")

    def rest(self) -> int:
        """Consume the rest and return its size in bytes."""
        size = len(self._text) - self._at + len(self._bytes)
        try:
            while chunk := self._stream.read(CHUNK):
                size += len(chunk)
        except Unreadable:
            pass  # the damage has been told already
        return size
