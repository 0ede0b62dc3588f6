"""Tables as a person sees them: in a terminal, as wide as COLUMNS says, and in a pipe."""

from __future__ import annotations

import re

import pytest

from sparkpin.core.terminal import table

COLUMNS = ("what", "count", "size", "release", "then", "why")
TAG = "sparkpin/qwen3.5-122b:hybrid-0123456789ab"
WHY = "in model_extra_tensors.safetensors; the index left it out"
ROWS = [("replaced", "12", "0.4 MB", TAG, "invoke promote the next one of them", WHY), ("-", "1", "2 B", "a", "", "")]


def rows_of(lines: list[str], titles: list[str]) -> list[list[str]]:
    """The rows below a head, their cells joined again."""
    places = [lines[0].index(title) for title in titles]
    rows: list[list[list[str]]] = []
    for line in lines[2:]:
        cells = [line[begin:end].strip() for begin, end in zip(places, [*places[1:], None], strict=True)]
        if cells[0]:
            rows.append([[] for _ in cells])
        for parts, cell in zip(rows[-1], cells, strict=True):
            parts += [cell] if cell else []
    return [[" ".join(parts) for parts in row] for row in rows]


@pytest.mark.parametrize("width", [124, 1000])
def test_a_table_stays_within_the_terminal_and_loses_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    wanted = [["".join(row[:3]).replace(" ", ""), *row[3:]] for row in ROWS]  # numbers stand at the right
    found = rows_of(lines, ["what", "release", "then", "why"])
    assert [[cells[0].replace(" ", ""), *cells[1:]] for cells in found] == wanted


@pytest.mark.parametrize("columns", ["", "40", "80"])
def test_words_are_whole_where_there_is_no_room_and_nothing_is_narrower_than_80_columns(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    table(COLUMNS, ROWS)
    words = capsys.readouterr().out.split()
    assert {word for row in ROWS for cell in row for word in cell.split()} <= {*words}
    row = ("a b " * 15 + "c", "d " * 8 + "e")
    table(("release", "state"), [row])
    assert capsys.readouterr().out.splitlines()[2:] == ["  ".join(row)]


@pytest.mark.parametrize("no_color", ["", "1"])
def test_states_have_colours_unless_nobody_wants_them(
    no_color: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("NO_COLOR", no_color), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    table(("release", "state"), [("a", "current"), ("x", "failed: chat"), ("y", "built")])
    coloured = [re.findall(r"\x1b\[(3\d)m", line) for line in capsys.readouterr().out.splitlines()[2:]]
    assert coloured == ([[], [], []] if no_color else [["32"], ["31"], []])
