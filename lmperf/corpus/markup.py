"""The text of HTML."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser

from lmperf.corpus.decoding import Unreadable


class _TextOfHtml(HTMLParser):
    """Collects text outside scripts and styles; block elements end lines."""

    SILENT = frozenset(("script", "style", "template", "noscript"))
    BLOCKS = frozenset(
        "address article aside blockquote br dd div dl dt figcaption footer form h1 h2 h3 h4 h5 h6 header hr li main"
        " nav ol p pre section table td th title tr ul".split()
    )

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.pieces: list[str] = []
        self.silent: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in self.SILENT:
            self.silent.append(tag)
        elif tag in self.BLOCKS:
            self._break()

    def handle_endtag(self, tag: str) -> None:
        if tag in self.silent:
            self.silent.remove(tag)
        elif tag in self.BLOCKS:
            self._break()

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.pieces.append(data)

    def _break(self) -> None:
        if self.pieces and not self.pieces[-1].endswith("\n"):
            self.pieces.append("\n")

    def take(self) -> bytes:
        """What was collected since the last call, as UTF-8."""
        text = "".join(self.pieces)
        self.pieces = []
        return text.encode("utf-8", "replace")


def html_text(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The text of HTML given as UTF-8 pieces; markup that the parser cannot follow is `Unreadable`."""
    parser = _TextOfHtml()
    try:
        for chunk in chunks:
            parser.feed(chunk.decode())
            yield parser.take()
        parser.close()
    except AssertionError as error:  # the standard parser's answer to a broken marked section
        raise Unreadable(f"markup that cannot be parsed ({error})") from None
    yield parser.take()
