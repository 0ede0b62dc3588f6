"""What a person sees: progress lines with the time since the start, tables, errors."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Sequence
from typing import Literal

STARTED = time.monotonic()
LOG = logging.getLogger("sparkpin")


class Typed:
    """The program that was typed: what it prints to type next names the same one."""

    program = "invoke"


def typed(text: str) -> str:
    """A hint as it is to be typed. Hints are written with `invoke`, as the README types it."""
    return text if Typed.program == "invoke" else re.sub(r"(?<![\w/])invoke (?=[a-z])", f"{Typed.program} ", text)


def say(line: str) -> None:
    """One line of progress, to standard error so that --json output stays clean; of any thread."""
    LOG.log(logging.WARNING if line.startswith("warning") else logging.INFO, line)


def detail(line: str) -> None:
    """One line of progress that only --verbose asks for."""
    LOG.debug(line)


class Progress(logging.Handler):
    """Prints each line with the seconds since the start."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"[{time.monotonic() - STARTED:6.1f}s] {typed(tame(record.msg))}", file=sys.stderr, flush=True)


LOG.propagate = False
LOG.addHandler(Progress())
LOG.setLevel(logging.INFO)  # --verbose: DEBUG, --quiet: WARNING


def show(text: str = "") -> None:
    """One line, or several, of what a command is for."""
    print(typed(text), flush=True)


def show_file(text: str) -> None:
    """A file's text as it is."""
    print(text, flush=True)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on standard output. Where it is wider than the terminal (COLUMNS, 80 in a pipe), texts take several
    lines; words are never cut, since a tag that cannot be copied is of no use, so lines may be longer. States have
    colours on a terminal, unless there is NO_COLOR.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    texts = [["" if cell is None else typed(str(cell)) for cell in row] for row in rows]
    wide, least, gaps = [], [], 2 * (len(columns) - 1)
    for column in zip(columns, *texts, strict=True):
        wide.append(max(map(cell_len, column)))
        least.append(max(min(wide[-1], NARROW), *(cell_len(word) for text in column for word in text.split() or [""])))
    room = max(Console().width, 80) - gaps
    while sum(wide) > room and wide != least:
        wide[max((at for at in range(len(wide)) if wide[at] > least[at]), key=wide.__getitem__)] -= 1
    drawing = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for title, width, *cells in zip(columns, wide, *texts, strict=True):
        side: Literal["left", "right"] = "right" if any(cells) and all(map(NUMBER.fullmatch, cells)) else "left"
        drawing.add_column(title, width=width, justify=side)
    for row in texts:  # a str would be read as markup
        drawing.add_row(*(Text(text, COLOURS.get(text.partition(" ")[0].rstrip(":"), "")) for text in row))
    console = Console(width=sum(wide) + gaps)
    with console.capture() as drawn:
        console.print(drawing)
    for line in drawn.get().splitlines():
        print(line.rstrip(), flush=True)


NARROW = 20  # columns of a terminal that a text keeps; dates and sizes are shorter
NUMBER = re.compile(r"|-|missing|[-+~]?\d[\d.,]*( ?(B|[kM]B|GB|[KMG]iB|s|ms|x|%))?")  # what is aligned right
COLOURS = dict.fromkeys(("current", "passed", "ok", "identical", "good"), "green")
COLOURS |= dict.fromkeys(("failed", "MISSING", "different", "bad"), "red")
COLOURS |= dict.fromkeys(("inspected", "advice"), "yellow")


def show_json(value: object) -> None:
    """In ASCII: what comes from paths and answers may be no text that the terminal takes."""
    show_file(json.dumps(value, indent=2, sort_keys=True))


def size(count: int | None) -> str:
    """Bytes in decimal units, as Docker prints them."""
    if count is None:
        return "-"
    if count < 100_000:
        return f"{count / 1e3:.1f} kB" if count >= 1000 else f"{count} B"
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def gib(count: int) -> str:
    """Bytes of memory, in binary units."""
    if count >= 1 << 30 or not count:
        return f"{count / (1 << 30):,.2f} GiB"
    return f"{count / (1 << 20):,.1f} MiB" if count >= 100_000 else f"{count / 1024:,.1f} KiB"


def figure(value: float, digits: int = 3) -> str:
    """The digits that count, and all digits of what is before the point, up to a billion."""
    plain = 10 ** (digits - 1) <= abs(value) < 1e9
    return f"{value:,.0f}" if plain else f"{value:.{digits}g}"


def count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"


def duration(value: float) -> str:
    """Seconds of which nobody needs the fraction."""
    minutes = round(value / 60)
    if value < 90:
        return f"{value:.0f} s"
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"


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
    """A text that others may have written a part of, without what a terminal would obey."""
    return "".join(c if c in "\n\t" else printable(c) for c in text)
