"""Tables as a person sees them: in a terminal of 80 columns, and in a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from sparkpin.core import terminal

COLUMNS = ("what", "count", "size", "after", "tensors", "type", "why")
LONG = "model.language_model.layers.*.mlp.shared_expert.{down_proj,gate_proj,up_proj}.weight_scale_inv"
WHY = "in model_extra_tensors.safetensors; the index left it out"
ROWS = [
    ("replaced", "12", "0.4 MB", "0.2 MB", LONG, "BF16 -> F8_E4M3", WHY),
    ("kept", "1", "2 B", "", "a.*", "I32", ""),
]
DOCTOR = ("", "what", "found", "to mend it")
LISTED = (
    "from sparkpin.commands import recipe; from sparkpin.core.paths import Paths; recipe.recipe_list(Paths.from_env())"
)
PROGRAM = f"from sparkpin.core import terminal as ui; ui.table({COLUMNS!r}, {ROWS!r})"


def in_terminal(width: int, program: str = PROGRAM) -> list[str]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, width, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
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
    assert process.wait() == 0, data.decode()
    return re.sub(r"\x1b\[[0-9;]*m", "", data.decode()).splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_a_plan_stays_within_the_terminal_and_loses_nothing(width: int) -> None:
    lines = in_terminal(width)
    assert max(map(len, lines)) <= width
    begin, end = lines[0].index("tensors"), lines[0].index("type")
    last = next(place for place, line in enumerate(lines) if line.startswith("kept"))
    assert "".join(line[begin:end].strip() for line in lines[2:last]) == LONG
    why = lines[0].index("why")
    assert "".join(line[why:].replace(" ", "") for line in lines[2:last]) == WHY.replace(" ", "")


@pytest.mark.parametrize("width", [80, 120])
def test_doctor_s_states_and_names_stay_whole_and_no_command_is_cut(width: int) -> None:
    """Of a Spark that lacks all; the longest of what doctor tells, as it tells it."""
    fix = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
    found = "nvidia-container-toolkit 1.18.0, and Docker knows neither its runtime nor its hook"
    rows = [("MISSING", "GPU in containers", found, fix), ("advice", "page cache", "3.0 GiB", "x" * 150)]
    program = f"from sparkpin.core import terminal as ui; ui.table({DOCTOR!r}, {rows!r})"
    lines = in_terminal(width, program)
    assert max(map(len, lines)) <= width and "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
    begin, end = lines[0].index("found"), lines[0].index("to mend it")
    assert lines[2][:begin].split("  ") == ["MISSING", "GPU in containers", ""]
    last = next(place for place, line in enumerate(lines) if line.startswith("advice"))
    assert lines[last][:begin].split() == ["advice", "page", "cache"]
    assert " ".join(line[begin:end].strip() for line in lines[2:last]).strip() == found
    assert " ".join(line[end:].strip() for line in lines[2:last]).strip() == fix
    assert "".join(line[end:].strip() for line in lines[last:]) == "x" * 150


@pytest.mark.parametrize(("width", "spared"), [(80, 1), (100, 1), (120, 0)])
def test_the_list_of_recipes_stays_within_the_terminal_and_loses_no_name(width: int, spared: int) -> None:
    """The names of recipes, stacks and stages are typed, so they stay whole; the list is that of this project. Models
    are left out where they would be folded, which is said."""
    lines = in_terminal(width, LISTED)
    piped = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True).stdout
    assert max(map(len, lines)) <= width < max(map(len, piped.splitlines()))
    head = next(line for line in lines if line.startswith("recipe"))
    told = [line for line in lines if line.startswith("left out: model, ")]
    assert len(told) == spared
    titles = ["recipe", "model", "stack", "stage", "what it is"]
    titles = [title for title in titles if title != "model" or not spared]
    places = [head.index(title) for title in titles]
    ends = [*places[1:], width]
    rows: list[list[str]] = []
    for line in lines[lines.index(head) + 2 : len(lines) - spared]:
        cells = [line[begin:end].replace(" ", "") for begin, end in zip(places, ends, strict=True)]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [above + more for above, more in zip(rows[-1], cells, strict=True)]
    whole = [re.split("  +", line.strip()) for line in piped.splitlines()[2:]]
    wanted = [[cell.replace(" ", "") for at, cell in enumerate(row) if at != 1 or not spared] for row in whole]
    assert rows == wanted and all(len(row) == 5 for row in whole)
    assert {"scripted-tiny-spark-seed-source", "qwen3.5-122b"} <= {cells[0] for cells in rows}


def test_a_table_without_long_texts_is_wider_than_the_terminal_and_not_cut() -> None:
    row = ("sparkpin/" + "a" * 60, "b" * 50)
    lines = in_terminal(80, f"from sparkpin.core import terminal as ui; ui.table(('release', 'state'), [{row!r}])")
    assert "".join(lines[2:]) == "  ".join(row)


def test_in_a_pipe_rows_are_whole_and_not_padded(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert any(LONG in line and line.endswith(WHY) for line in lines)
    assert [line for line in lines if line != line.rstrip()] == []
