"""Progress on stderr: a bar on a terminal, a plain line every quarter otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[str], None]
Advance = Callable[[int, int], None]


@contextmanager
def progress_bar(label: str, tell: Tell) -> Iterator[Advance]:
    """Hand out `advance(done, total)` for a stage's work of known size (bytes, documents)."""
    if not sys.stderr.isatty():
        yield _plain(label, tell)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _plain(label: str, tell: Tell) -> Advance:
    told = 0

    def advance(done: int, total: int) -> None:
        nonlocal told
        quarter = 4 * done // total if total else 0
        if quarter > told:
            told = quarter
            tell(f"{label}: {25 * quarter} %")

    return advance
