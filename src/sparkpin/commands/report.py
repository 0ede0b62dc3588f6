"""The task `report`: gather, draw, write or serve."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.files import atomic_file, output_file
from sparkpin.core.paths import Paths
from sparkpin.history.report.facts import Report
from sparkpin.history.report.gather import gather
from sparkpin.history.report.markdown import markdown
from sparkpin.history.report.offer import HOST, server
from sparkpin.history.report.page import TITLE, html


def report(*, recipe: str | None, out: str, serve: bool, port: int, as_markdown: bool) -> None:
    """Ctrl-C ends the server."""
    if serve and (out or as_markdown):
        raise InputError(
            f"--open serves the page, and writes no {'table' if as_markdown else 'file'}",
            next_step=f"leave out --open, or {'--markdown' if as_markdown else '--out'}",
        )
    paths = Paths.from_env()
    own = b"" if as_markdown else TITLE.encode()  # a table is text, which people edit before they post it
    # One recipe's page does not take the place of all recipes'.
    name = f"report-{recipe}.html" if recipe else "report.html"
    target = output_file("--out", out, own=own) if out else paths.home / name
    made = gather(paths, recipe)
    for fault in made.all_faults:
        terminal.say(terminal.printable(fault))
    if as_markdown:
        table = markdown(made)
        if not out:
            terminal.show(table)
            return
        write(target, f"{table}\n".encode(), made)
        return
    page = html(made).encode()
    if serve:
        with server(page, port) as offered:
            terminal.show(f"http://{HOST}:{offered.server_port}/ (Ctrl-C ends it)")
            with contextlib.suppress(KeyboardInterrupt):
                offered.serve_forever()
        return
    write(target, page, made)


def write(path: Path, content: bytes, made: Report) -> None:
    with atomic_file(path) as file:
        file.write(content)
    count = terminal.count(sum(len(part.items) for part in made.recipes), "release")
    terminal.show(f"{path.absolute()}: {count}, {terminal.size(len(content))}")
