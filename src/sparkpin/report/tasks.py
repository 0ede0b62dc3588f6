"""The task `report`: gather, draw, write or serve."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sparkpin import ui
from sparkpin.errors import InputError
from sparkpin.files import atomic_file, output_file
from sparkpin.paths import Paths
from sparkpin.report.facts import Report
from sparkpin.report.gather import gather
from sparkpin.report.markdown import markdown
from sparkpin.report.offer import HOST, server
from sparkpin.report.page import TITLE, html


def report(*, recipe: str | None, out: str, serve: bool, port: int, as_markdown: bool) -> None:
    """Ctrl-C ends the server."""
    if serve and (out or as_markdown):
        raise InputError(
            f"--open serves the page, and writes no {'table' if as_markdown else 'file'}",
            next_step=f"leave out --open, or {'--markdown' if as_markdown else '--out'}",
        )
    paths = Paths.from_env()
    own = b"" if as_markdown else TITLE.encode()  # a table is text, which people edit before they post it
    target = output_file("--out", out, own=own) if out else paths.home / file_name(recipe)
    made = gather(paths, recipe)
    for fault in made.all_faults:
        ui.say(ui.printable(fault))
    if as_markdown:
        table = markdown(made)
        if not out:
            ui.show(table)
            return
        write(target, f"{table}\n".encode(), made)
        return
    page = html(made).encode()
    if serve:
        with server(page, port) as offered:
            ui.show(f"http://{HOST}:{offered.server_port}/ (Ctrl-C ends it)")
            with contextlib.suppress(KeyboardInterrupt):
                offered.serve_forever()
        return
    write(target, page, made)


def file_name(recipe: str | None) -> str:
    """One recipe's page does not take the place of all recipes'."""
    return f"report-{recipe}.html" if recipe else "report.html"


def write(path: Path, content: bytes, made: Report) -> None:
    with atomic_file(path) as file:
        file.write(content)
    count = ui.count(sum(len(part.items) for part in made.recipes), "release")
    ui.show(f"{path.absolute()}: {count}, {ui.small_size(len(content))}")
