"""A table for a forum post, one a recipe. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from sparkpin.core import terminal
from sparkpin.history.report.facts import Item, RecipePart, Report

COLUMNS = ("release", "state", "built", "smoke", "quality", "speed")


def markdown(report: Report) -> str:
    """Without faults: what is damaged here is nothing for others."""
    made = "\n".join(line for part in report.recipes for line in table(part))
    return made or ("No release that can be read." if report.faults else "No release yet: `invoke up`.")


def table(part: RecipePart) -> Iterator[str]:
    yield f"**{plain(part.name)}**{f': {plain(part.description)}' if part.description else ''}"
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'---|' * len(COLUMNS)}"
    for item in part.items:
        yield f"| {' | '.join(cells(item))} |"
    yield ""
    yield from measured_on(part)
    yield f"{plain(part.memory.headline)}."
    yield ""


def measured_on(part: RecipePart) -> Iterator[str]:
    """No speed without its machine: a line for each that releases were measured on."""
    for where in dict.fromkeys(item.speed.where for item in part.items if item.speed.where):
        names = ", ".join(f"`{item.release.name}`" for item in part.items if item.speed.where == where)
        yield f"Speed of {names}: {plain(where)}."
        yield ""


def cells(item: Item) -> tuple[str, ...]:
    """Names of releases hold nothing that Markdown or HTML would take for its own."""
    evidence = [plain(one.text) for one in item.evidence]
    return f"`{item.release.name}`", item.release.state_text, item.release.created[:10], *evidence


def plain(text: str) -> str:
    """Words that Markdown shows as they are, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&@-])", r"\\\1", terminal.printable(" ".join(text.split())))
