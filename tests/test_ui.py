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

from sparkpin import ui

COLUMNS = ("what", "count", "size", "after", "tensors", "type", "why")
LONG = "model.language_model.layers.*.mlp.shared_expert.{down_proj,gate_proj,up_proj}.weight_scale_inv"
WHY = "in model_extra_tensors.safetensors; the index left it out"
ROWS = [
    ("replaced", "12", "0.4 MB", "0.2 MB", LONG, "BF16 -> F8_E4M3", WHY),
    ("kept", "1", "2 B", "", "a.*", "I32", ""),
]
PROGRAM = f"from sparkpin import ui; ui.table({COLUMNS!r}, {ROWS!r})"


def in_terminal(width: int) -> list[str]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 25, width, 0, 0))
    env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
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


def test_in_a_pipe_rows_are_whole_and_not_padded(capsys: pytest.CaptureFixture[str]) -> None:
    ui.table(COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert any(LONG in line and line.endswith(WHY) for line in lines)
    assert [line for line in lines if line != line.rstrip()] == []
