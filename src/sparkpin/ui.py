"""What a person sees: progress lines with the time since the start, tables, errors."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

STARTED = time.monotonic()


def say(line: str) -> None:
    """One line of progress, to standard error so that --json output stays clean."""
    print(f"[{time.monotonic() - STARTED:6.1f}s] {line}", file=sys.stderr, flush=True)


def show(text: str = "") -> None:
    print(text, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on standard output. It is never cut: a tag that cannot be copied is of no use. On a terminal that is too
    narrow the columns `why` and `holds` take several lines; with long patterns (`tensors`) those, too."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        grid.add_column(
            column,
            no_wrap=column not in ("why", "holds"),
            justify="right" if column in RIGHT or column.startswith("users at ") else "left",
        )
    for row in rows:
        grid.add_row(*(Text("" if cell is None else str(cell)) for cell in row))  # a str would be read as markup
    here = Console()
    needed = Console(width=1000).measure(grid)
    wanted = max(needed.minimum, min(needed.maximum, here.width)) if here.is_terminal else needed.maximum
    if wanted > here.width >= 80 and here.is_terminal and "tensors" in columns:
        wanted = here.width
        for title, cells in zip(columns, grid.columns, strict=True):
            if title in FOLDED:
                cells.no_wrap, cells.overflow = False, "fold"
    console = Console(width=max(wanted, 80))
    with console.capture() as drawn:
        console.print(grid)
    for line in drawn.get().splitlines():
        print(line.rstrip(), flush=True)


FOLDED = {"tensors", "type", "why"}
RIGHT = {"size", "own size", "build", "ready", "freed", "count"}
RIGHT |= {"runs", "PTX", "neither"}
RIGHT |= {"in the checkpoint", "in memory", "block", "bytes a token", "states a request", "tokens", "concurrency"}


def size(count: int | None) -> str:
    """Bytes as decimal MB or GB, as Docker prints them."""
    if count is None:
        return "-"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def small_size(count: int) -> str:
    """As `size`, but small files do not come to 0.0 MB."""
    return size(count) if count >= 100_000 else f"{count / 1e3:.1f} kB" if count >= 1000 else f"{count} B"


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def digest(value: str | None) -> str:
    """The first 12 digits, as Docker prints them."""
    return value.removeprefix("sha256:")[:12] if value else "missing"


def printable(path: str) -> str:
    """A path as one line that a terminal takes: bytes that are not UTF-8, and control characters, as escapes."""
    return "".join(c if c.isprintable() else escaped(c) for c in path)


def escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # how Python carries a byte that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def tame(text: str) -> str:
    """A text of several lines, which strangers may have had a word in, without what a terminal would obey.

    Tabs and ends of lines stay.
    """
    return "".join(c if c in "\n\t" else printable(c) for c in text)
