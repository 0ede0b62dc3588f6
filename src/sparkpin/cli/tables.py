"""The tables of `up`, `build`, `smoke` and `images`, for a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from sparkpin.core import terminal
from sparkpin.releases.record import Release, state_text


def end_of(tag: str) -> str:
    """What follows the recipe: any task takes it for the whole tag."""
    return tag.partition(":")[2]


def tables(columns: Sequence[str], tags: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """One table for each recipe, whose name stands once above it. rows: without the tag."""
    recipes = [f"{tag.partition(':')[0]}:" for tag in tags]
    for recipe in dict.fromkeys(recipes):
        terminal.show(recipe)
        mine = [(end_of(tag), *row) for tag, row, own in zip(tags, rows, recipes, strict=True) if own == recipe]
        terminal.table(columns, mine)


def show_built(made: Sequence[Release]) -> None:
    rows = []
    for r in made:
        seconds, verdict = terminal.seconds(r.build_seconds), r.smoke_text.partition(":")[0]
        rows.append((terminal.digest(r.image), terminal.size(r.size), seconds, verdict))
    tables(("release", "image", "size", "build", "smoke"), [r.tag for r in made], rows)


def show_images(rows: Sequence[Mapping[str, Any]], shared: int | None) -> None:
    """rows: and shared: see `current.ImageRows`."""
    tables(
        ("release", "state", "smoke", "size", "own size", "created"),
        [r["tag"] for r in rows],
        [
            (
                state_text(r["state"]),
                r["smoke"].partition(":")[0].replace("passed in", "passed"),
                terminal.size(r["size"]) if r["image"] else "missing",
                terminal.size(r["unique_size"] or None),  # of most stages others have every layer
                re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*$", r"\1 \2", r["created"]),
            )
            for r in rows
        ],
    )
    for row in rows:
        name = end_of(row["tag"])
        if ":" in row["smoke"]:
            terminal.show(f"{name}: smoke test {row['smoke']}")
        if protection := row["protected"]:
            note = terminal.printable(protection["note"])
            terminal.show(f"{name}: kept since {protection['since'][:10]}{f': {note}' if note else ''}")
    if gone := [row["tag"] for row in rows if not row["image"]]:
        terminal.show(f"missing: the engine has not {images_gone(gone)}")
    if shared is not None:
        terminal.show(
            f"own size: layers that no other image has. Those that images share, once: {terminal.size(shared)}."
        )


def images_gone(tags: Sequence[str]) -> str:
    """What follows `the engine has not`: one line, however many there are."""
    if len(tags) == 1:
        return f"the image of {end_of(tags[0])}: invoke reproduce {end_of(tags[0])} --keep"
    return f"the images of {len(tags)} releases: invoke reproduce TAG --keep makes one again"
