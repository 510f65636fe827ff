"""Tables that become cards on a narrow screen: every cell learns its column's heading, the style sheet does the rest.

Done once over the finished page, so that no template has to write a heading twice.
"""

from __future__ import annotations

from html import escape
from html.parser import HTMLParser

EMPTY = ("", "–")


def with_cards(page: str) -> str:
    """The page with `data-label` (its column's heading) and one wrapping <div> in every table cell of its bodies.

    A cell that holds nothing but a dash is marked `data-empty`.  Nothing else changes, byte for byte.
    """
    cells = Cells(page)
    cells.feed(page)
    cells.close()
    parts, position = [], 0
    for place, text in sorted(cells.insertions, key=lambda item: item[0]):
        parts += [page[position:place], text]
        position = place
    return "".join([*parts, page[position:]])


class Cells(HTMLParser):
    """Walks a page and notes what is to be inserted where: (position, text)."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.insertions: list[tuple[int, str]] = []
        self.headings: list[str] = []
        self.column = 0
        self.inside: str | None = None  # th or td while inside one
        self.text: list[str] = []
        self.start = 0  # just after the name of the open cell's tag
        self.lines = [0]
        for line in page.split("\n"):
            self.lines.append(self.lines[-1] + len(line) + 1)

    @property
    def position(self) -> int:
        """Where in the page the tag being read begins."""
        line, offset = self.getpos()
        return self.lines[line - 1] + offset

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A table forgets the headings of the one before, a row starts at its first column, a cell begins."""
        if tag == "table":
            self.headings = []
        elif tag == "tr":
            self.column = 0
        elif tag in ("th", "td"):
            self.inside, self.text, self.start = tag, [], self.position + len(tag) + 1
            if tag == "td":
                self.insertions.append((self.position + len(self.get_starttag_text() or ""), "<div>"))
        elif tag == "img":
            self.text.append(tag)  # a picture is no empty cell

    def handle_data(self, data: str) -> None:
        """Text of the cell that is open."""
        if self.inside:
            self.text.append(data)

    def handle_endtag(self, tag: str) -> None:
        """A heading is kept; a cell gets its label, and the end of its wrapper."""
        if tag != self.inside:
            return
        text = " ".join("".join(self.text).split())
        if tag == "th":
            self.headings.append(text)
        else:
            self.insertions += [(self.start, self.attributes(text)), (self.position, "</div>")]
            self.column += 1
        self.inside = None

    def attributes(self, text: str) -> str:
        """The open cell's new attributes."""
        label = self.headings[self.column] if self.column < len(self.headings) else ""
        made = f' data-label="{escape(label)}"' if label else ""
        return made + (" data-empty" if text in EMPTY else "")
