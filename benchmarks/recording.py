"""A terminal recording as SVG, of commands that really ran: docs/images/first-answer.svg.

usage: python benchmarks/recording.py record FILE.json LINE...    run each shell line in a terminal, keep its output
       python benchmarks/recording.py draw FILE.json FILE.svg     draw what was kept; benchmarks/recordings has it

What a terminal would have overwritten is left out, and nothing else.
"""

from __future__ import annotations

import json
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 110


def typed(line: str) -> dict[str, str]:
    """Run a line in a pseudo terminal. Returns it with its output, as text."""
    chunks: list[bytes] = []

    def read(fd: int) -> bytes:
        chunks.append(os.read(fd, 4096))
        return chunks[-1]

    os.environ["COLUMNS"] = str(WIDTH)
    code = os.waitstatus_to_exitcode(pty.spawn(["bash", "-c", line], read))
    if code:
        sys.exit(f"{line}: exit code {code}")
    text = b"".join(chunks).decode().replace("\r\n", "\n")
    lines = [one.rpartition("\r")[2] for one in text.splitlines()]
    return {"line": line, "output": "\n".join(lines)}


def draw(steps: list[dict[str, str]], path: Path) -> None:
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for step in steps:
        console.print(Text("$ ", style="bold green") + Text(step["line"], style="bold"))
        console.print(Text.from_ansi(step["output"]))
        console.print()
    svg = console.export_svg(title="sparkpin: first answer, and back", unique_id="sparkpin")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # fonts of a server far away
    path.write_text(svg.replace("Fira Code", "ui-monospace, monospace"), encoding="utf-8")


def main() -> None:
    command, file, *rest = sys.argv[1:]
    if command == "record":
        Path(file).write_text(json.dumps([typed(line) for line in rest], indent=1) + "\n", encoding="utf-8")
    else:
        draw(json.loads(Path(file).read_text(encoding="utf-8")), Path(rest[0]))


if __name__ == "__main__":
    main()
