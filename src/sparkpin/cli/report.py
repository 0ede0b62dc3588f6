"""The task `report`: gather, draw, write."""

from __future__ import annotations

from typing import Annotated

from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.files import atomic_file, output_file
from sparkpin.core.paths import Paths
from sparkpin.report import page
from sparkpin.report.gather import gather


@task("releases")
def report(
    *,
    recipe: Annotated[str | None, "releases of this recipe only (default: every recipe's)"] = None,
    out: Annotated[
        str, "file to write (default: report.html or report-RECIPE.html in SPARKPIN_HOME; --markdown prints)", "FILE"
    ] = "",
    markdown: Annotated[bool, "a table for a forum post instead"] = False,
) -> None:
    """Write the releases with their evidence as one HTML page."""
    paths = Paths.from_env()
    mark = b"" if markdown else page.TITLE.encode()  # a table is text, which people edit before they post it
    # One recipe's page does not take the place of all recipes'.
    name = f"report-{recipe}.html" if recipe else "report.html"
    target = output_file("--out", out, mark=mark) if out else paths.home / name
    made = gather(paths, recipe)
    for fault in made.all_faults:
        terminal.say(terminal.printable(fault))
    if markdown and not out:
        terminal.show(page.markdown(made))
        return
    content = (f"{page.markdown(made)}\n" if markdown else page.html(made)).encode()
    with atomic_file(target) as file:
        file.write(content)
    count = terminal.count(sum(len(part.items) for part in made.recipes), "release")
    terminal.show(f"{target.absolute()}: {count}, {terminal.size(len(content))}")
