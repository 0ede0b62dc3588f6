"""The task `report`: gather, draw, write."""

from __future__ import annotations

from typing import Annotated

from sparkpin.cli.tasks import task
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, say, show, size
from sparkpin.report import page
from sparkpin.report.gather import gather


@task("releases")
def report(
    paths: Paths,
    *,
    recipe: Annotated[str | None, "releases of this recipe only (default: every recipe's)"] = None,
    markdown: Annotated[bool, "print a table for a forum post instead"] = False,
) -> None:
    """Write the releases with their evidence as one HTML page."""
    made = gather(paths, recipe)
    for fault in made.all_faults:
        say(printable(fault))
    if markdown:
        show(page.markdown(made))
        return
    # One recipe's page does not take the place of all recipes'.
    target, content = paths.home / (f"report-{recipe}.html" if recipe else "report.html"), page.html(made).encode()
    with atomic_file(target) as file:
        file.write(content)
    show(f"{target}: {count(sum(len(part.items) for part in made.recipes), 'release')}, {size(len(content))}")
