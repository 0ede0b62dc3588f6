"""The tables of `up`, `build`, `smoke`, `images` and `prune`, for a terminal of 80 columns."""

from __future__ import annotations

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
    cells, notes = [], []
    for row in rows:
        verdict, colon, _ = row["smoke"].replace("passed in", "passed").partition(":")
        size = terminal.size(row["size"]) if row["image"] else "missing"
        created = row["created"][:16].replace("T", " ")
        cells.append((state_text(row["state"]), verdict, size, terminal.size(row["unique_size"] or None), created))
        if colon:
            notes.append(f"{end_of(row['tag'])}: smoke test {row['smoke']}")
        if kept := row["protected"]:
            notes.append(f"{end_of(row['tag'])}: kept since {kept['since'][:10]} {terminal.printable(kept['note'])}")
    tables(("release", "state", "smoke", "size", "own size", "created"), [row["tag"] for row in rows], cells)
    if gone := [row["tag"] for row in rows if not row["image"]]:
        notes.append(terminal.typed(f"missing: the engine has not {images_gone(gone)}"))
    if shared is not None:
        notes.append(f"own size: in no other image. What images share, counted once: {terminal.size(shared)}.")
    terminal.show("\n".join(notes))


def images_gone(tags: Sequence[str]) -> str:
    """What follows `the engine has not`: one line, however many there are."""
    tag = end_of(tags[0]) if len(tags) == 1 else "TAG"
    return f"{terminal.count(len(tags), 'image')}: invoke reproduce {tag} --keep makes it again"
