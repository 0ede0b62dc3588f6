"""What differs in a person's words: lines of text, and the same as plain data for machines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sparkpin.core import terminal
from sparkpin.history.diff import TREE_NAME, Difference, PartChange, Side, TextChange, ValueChange

SIDE = ("name", "key", "recipe", "stage", "stack", "model", "image")  # what machines are given of a side
TITLES = {"debs": "Debian packages", "wheels": "Python packages", "tools": "tools of the build", "mods": "mods"}
WORDS = {"up": "up", "down": "down", "changed": "changed", "bytes": "other file", "added": "in", "removed": "out"}
SHOWN = 20  # paths, where not all are asked for


def difference_lines(found: Difference, *, all_files: bool) -> Iterator[str]:
    """The whole answer of `invoke diff`."""
    yield from map(tame, head(found))
    for title, lines in sections(found, all_files=all_files):
        yield ""
        yield tame(title)
        yield from (tame(f"  {line}".rstrip()) for line in lines)


def tame(line: str) -> str:
    """Names and texts of other people, without what a terminal would obey. Tabs stay."""
    return "\t".join(map(terminal.printable, line.split("\t")))


def head(found: Difference) -> Iterator[str]:
    for sign, side in (("-", found.before), ("+", found.after)):
        image = f"image {terminal.digest(side.image)}" if side.image else "not built yet"
        yield f"{sign} {side.name} ({image})"
    if found.identical:
        yield "no difference"
    elif found.before.key == found.after.key and not found.other_image:
        yield f"one release (key {found.before.key[:12]}): what differs decides nothing of it"
    elif found.before.image and found.before.image == found.after.image:
        yield "one image: only what is served differs, and how"


def sections(found: Difference, *, all_files: bool) -> Iterator[tuple[str, list[str]]]:
    """(title, lines) of each part in which something differs."""
    files = [change for change in found.files if not change.path.startswith("mods/")]
    plain = [
        ("what it is", [*value_lines(found.names)]),
        *((TITLES[kind], part_lines(getattr(found, kind))) for kind in ("debs", "wheels", "tools")),
        ("mods", [*mod_lines(found)]),
        ("vllm serve", [*flag_lines(found)]),
        ("environment of the server", [*value_lines(found.env)]),
        ("checkpoint", [*value_lines(found.checkpoint)]),
        ("files that people edit", [line for change in files for line in text_change(change)]),
    ]
    yield from ((title, lines) for title, lines in plain if lines)
    if found.contents is None:
        if not found.identical:
            yield "files in the images", [to_know(side) for side in (found.before, found.after) if side.layers is None]
    elif not found.contents.identical:
        lines = sorted(path_lines(found))
        more = [] if all_files or len(lines) <= SHOWN else [f"... {len(lines) - SHOWN:,} more: --files"]
        yield f"files in the images: {len(lines):,} differ", [*(lines[:SHOWN] if more else lines), *more]


def to_know(side: Side) -> str:
    """What it takes to see the files of an image of which no listing is there."""
    build = f"invoke build --recipe {side.recipe} --stage {side.stage}"
    if not side.image:
        return f"known once {side.name} is built: {build}"
    command = build if side.name == TREE_NAME else f"invoke reproduce {side.name} --keep"
    return f"a listing of the layers of {side.name} is missing: {command} makes it again"


def value_lines(changes: Iterable[ValueChange]) -> Iterator[str]:
    for change in changes:
        if change.before is None or change.after is None:
            yield f"{'+' if change.before is None else '-'} {change.name} {change.after or change.before or ''}"
        else:
            yield f"~ {change.name} {change.before or '(empty)'} -> {change.after or '(empty)'}"


def part_lines(changes: Sequence[PartChange]) -> list[str]:
    order = list(WORDS)
    return columns(part_row(change) for change in sorted(changes, key=lambda change: order.index(change.verdict)))


def part_row(change: PartChange) -> tuple[str, str, str]:
    old, new, word = change.before, change.after, WORDS[change.verdict]
    if old is None or new is None:
        return word, change.name, (new or old).version  # type: ignore[union-attr]
    if old.version != new.version:
        return word, change.name, f"{old.version} -> {new.version}"
    if change.verdict == "bytes":
        return word, change.name, f"{old.version}: sha256 {old.sha256[:12]} -> {new.sha256[:12]}"
    return word, change.name, old.version


def mod_lines(found: Difference) -> Iterator[str]:
    """Each mod that differs, and under it the texts of its sources that do."""
    for change in found.mods:
        yield " ".join(part_row(change))
        if change.before and change.after:
            for file in found.files:
                if file.path.startswith(f"mods/{change.name}/"):
                    yield from (f"  {line}" for line in text_change(file))


def flag_lines(found: Difference) -> Iterator[str]:
    if found.moved:
        yield "the same flags in another order"
    for change in found.flags:
        if change.before is None or change.after is None:
            yield f"{'+' if change.before is None else '-'} {change.after or change.before}"
        else:
            yield f"~ {change.before} -> {change.after}"


def text_change(change: TextChange) -> Iterator[str]:
    if change.before is None or change.after is None:
        yield f"{'+' if change.before is None else '-'} {change.path}"
        return
    yield f"~ {change.path}{f': {change.note}' if change.note else ''}"
    yield from (f"    {line}" for line in change.diff)


def path_lines(found: Difference) -> Iterator[str]:
    assert found.contents
    yield from (f"+ {entry.path}" for entry in found.contents.added)
    yield from (f"- {entry.path}" for entry in found.contents.removed)
    for change in found.contents.changed:
        old, new = (value[:12] if change.field == "content" else value for value in (change.before, change.after))
        yield f"~ {change.path}: {change.field} {old or 'none'} -> {new or 'none'}"


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows as lines, every column but the last as wide as its widest cell."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in table]


def difference_json(found: Difference) -> dict[str, Any]:
    """All that differs, and of the sides themselves only what they are."""
    value = asdict(found)
    for name in ("before", "after"):
        value[name] = {key: value[name][key] for key in SIDE}
    return {"identical": found.identical, **value}
