"""The tables of `up`, `build`, `smoke`, `images` and `prune`, for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparkpin.core import terminal
from sparkpin.releases.record import state_text


def end_of(tag: str) -> str:
    """What follows the recipe: any task takes it for the whole tag."""
    return tag.partition(":")[2]


def tables(columns: Sequence[str], tags: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """One table for each recipe, whose name stands once above it. rows: without the tag."""
    of_recipe: dict[str, list[Sequence[object]]] = {}
    for tag, row in zip(tags, rows, strict=True):
        of_recipe.setdefault(tag.partition(":")[0], []).append((end_of(tag), *row))
    for recipe, mine in of_recipe.items():
        terminal.show(f"{recipe}:")
        terminal.table(columns, mine)


def show_images(rows: Sequence[Mapping[str, Any]], shared: int | None) -> None:
    """rows: and shared: see `current.ImageRows`."""
    cells, notes = [], []
    for row in rows:
        verdict, colon, _ = row["smoke"].replace("passed in", "passed").partition(":")
        size = terminal.size(row["size"]) if row["image"] else "missing"
        created = row["created"][:16].replace("T", " ")
        cells.append((state_text(row["state"]), verdict, size, terminal.size(row["unique_size"] or None), created))
        if colon:
            notes.append(f"{row['tag']}: smoke test {row['smoke']}")
        if kept := row["protected"]:
            note = f": {terminal.printable(kept['note'])}" * bool(kept["note"])
            notes.append(f"{row['tag']}: kept since {kept['since'][:10]}{note}")
    tables(("release", "state", "smoke", "size", "own size", "created"), [row["tag"] for row in rows], cells)
    if gone := sum(not row["image"] for row in rows):
        lost = f"the engine has not {terminal.count(gone, 'image')}"
        notes.append(terminal.typed(f"missing: {lost}: invoke reproduce TAG --keep makes it again"))
    if shared is not None:
        notes.append(f"own size: in no other image. What images share, counted once: {terminal.size(shared)}.")
    terminal.show("\n".join(notes))
