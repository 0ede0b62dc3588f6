"""Tables as a person sees them: in a terminal of 80 columns, and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import traceback
from collections.abc import Callable

import pytest

from sparkpin.core.terminal import table

COLUMNS = ("what", "count", "size", "release", "then", "why")
TAG = "sparkpin/qwen3.5-122b:hybrid-0123456789ab"
WHY = "in model_extra_tensors.safetensors; the index left it out"
ROWS = [("replaced", "12", "0.4 MB", TAG, "invoke promote the next one of them", WHY), ("-", "1", "2 B", "a", "", "")]


def in_terminal(width: int, show: Callable[[], object], *, escapes: bool = False) -> list[str]:
    """The lines that `show` prints in a terminal of this width, without colours. It runs in a child of this process.

    escapes: with them.
    """
    pid, ours = pty.fork()
    if pid == 0:
        code = 1
        try:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 25, width, 0, 0))
            for name in ("COLUMNS", "LINES"):
                os.environ.pop(name, None)
            os.environ["TERM"] = "xterm"
            with os.fdopen(1, "w", closefd=False) as sys.stdout:
                show()
            code = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    data = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # the end of a terminal that nobody holds any more
            break
        if not chunk:
            break
        data += chunk
    os.close(ours)
    assert os.waitpid(pid, 0)[1] == 0, data.decode()
    text = data.decode()
    return (text if escapes else re.sub(r"\x1b\[[0-9;]*m", "", text)).splitlines()


def rows_of(lines: list[str], titles: list[str], width: int, *, gap: str) -> list[list[str]]:
    """The rows below a head, their cells joined again. gap: between the parts of a cell."""
    places = [lines[0].index(title) for title in titles]
    rows: list[list[list[str]]] = []
    for line in lines[2:]:
        cells = [line[begin:end].strip() for begin, end in zip(places, [*places[1:], width], strict=True)]
        if cells[0]:
            rows.append([[] for _ in cells])
        for parts, cell in zip(rows[-1], cells, strict=True):
            parts += [cell] if cell else []
    return [[gap.join(parts) for parts in row] for row in rows]


@pytest.mark.parametrize("width", [124, 1000])
def test_a_table_stays_within_the_terminal_and_loses_nothing(width: int) -> None:
    lines = in_terminal(width, lambda: table(COLUMNS, ROWS))
    assert max(map(len, lines)) <= width
    wanted = [["".join(row[:3]).replace(" ", ""), *row[3:]] for row in ROWS]  # numbers stand at the right
    found = rows_of(lines, ["what", "release", "then", "why"], width, gap=" ")
    assert [[cells[0].replace(" ", ""), *cells[1:]] for cells in found] == wanted


def test_words_are_whole_in_a_terminal_that_is_too_narrow_for_them() -> None:
    text = " ".join(in_terminal(40, lambda: table(COLUMNS, ROWS))).split()
    assert {word for row in ROWS for cell in row for word in cell.split()} <= {*text}


def test_a_table_without_long_texts_is_wider_than_the_terminal_and_not_cut() -> None:
    row = ("sparkpin/" + "a" * 60, "b" * 50)
    lines = in_terminal(80, lambda: table(("release", "state"), [row]))
    assert "".join(lines[2:]) == "  ".join(row)


@pytest.mark.parametrize("columns", ["", "80", "100"])
def test_a_pipe_is_as_a_terminal_of_80_columns_unless_columns_says_else(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table(COLUMNS, ROWS)
    piped = capsys.readouterr().out.splitlines()
    assert piped == [line.rstrip() for line in in_terminal(int(columns or 80), lambda: table(COLUMNS, ROWS))]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_states_have_colours_unless_nobody_wants_them(monkeypatch: pytest.MonkeyPatch, no_color: str) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    rows = [("a", "current"), ("x", "failed: chat"), ("y", "built")]
    lines = in_terminal(80, lambda: table(("release", "state"), rows), escapes=True)
    coloured = [re.findall(r"\x1b\[(3\d)m", line) for line in lines[2:]]
    assert coloured == ([[], [], []] if no_color else [["32"], ["31"], []])
