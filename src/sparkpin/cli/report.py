"""The task `report`: gather, draw, write."""

from __future__ import annotations

from sparkpin.core import terminal
from sparkpin.core.files import atomic_file, output_file
from sparkpin.core.paths import Paths
from sparkpin.report.gather import gather
from sparkpin.report.page import TITLE, html, markdown


def report(*, recipe: str | None, out: str, as_markdown: bool) -> None:
    paths = Paths.from_env()
    mark = b"" if as_markdown else TITLE.encode()  # a table is text, which people edit before they post it
    # One recipe's page does not take the place of all recipes'.
    name = f"report-{recipe}.html" if recipe else "report.html"
    target = output_file("--out", out, mark=mark) if out else paths.home / name
    made = gather(paths, recipe)
    for fault in made.all_faults:
        terminal.say(terminal.printable(fault))
    if as_markdown and not out:
        terminal.show(markdown(made))
        return
    content = (f"{markdown(made)}\n" if as_markdown else html(made)).encode()
    with atomic_file(target) as file:
        file.write(content)
    count = terminal.count(sum(len(part.items) for part in made.recipes), "release")
    terminal.show(f"{target.absolute()}: {count}, {terminal.size(len(content))}")
