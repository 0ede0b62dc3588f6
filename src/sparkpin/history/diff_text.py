"""What differs in a person's words: lines of text, and the same as plain data for machines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from sparkpin.core import terminal
from sparkpin.history.diff import TREE_NAME, Difference, PartChange, Side, TextChange, ValueChange

TITLES = {"debs": "Debian packages", "wheels": "Python packages", "tools": "tools of the build"}
WORDS = {"changed": "changed", "bytes": "other file", "added": "in", "removed": "out"}


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
    order = ["the same flags in another order"] * found.moved
    plain = [
        ("what it is", [value_line(change) for change in found.names]),
        *((title, columns(sorted(map(part_row, found.parts[kind])))) for kind, title in TITLES.items()),
        ("mods", [*mod_lines(found)]),
        ("vllm serve", [*order, *(value_line(change, named=True) for change in found.flags)]),
        ("environment of the server", [value_line(change) for change in found.env]),
        ("checkpoint", [value_line(change) for change in found.checkpoint]),
        ("files that people edit", [line for change in files for line in text_change(change)]),
    ]
    yield from ((title, lines) for title, lines in plain if lines)
    if found.contents is None:
        if not found.identical:
            yield "files in the images", [to_know(side) for side in (found.before, found.after) if side.layers is None]
    elif not found.contents.identical:
        lines = sorted(path_lines(found))
        title = f"files in the images: {len(lines):,} differ"
        yield (title, lines) if all_files else (f"{title} (--files lists them)", [])


def to_know(side: Side) -> str:
    """What it takes to see the files of an image of which no listing is there."""
    command = f"invoke build --recipe {side.names['recipe']} --stage {side.names['stage']}"
    if side.image and side.name != TREE_NAME:
        command = f"invoke reproduce {side.name} --keep"
    return f"there is no listing of the layers of {side.name}; one comes with: {command}"


def value_line(change: ValueChange, *, named: bool = False) -> str:
    """named: its values say themselves what they are of."""
    name = "" if named else f"{change.name} "
    if change.before is None:
        return f"+ {name}{change.after}"
    if change.after is None:
        return f"- {name}{change.before}"
    return f"~ {name}{change.before or '(empty)'} -> {change.after or '(empty)'}"


def part_row(change: PartChange) -> tuple[str, str, str]:
    both = [part for part in (change.before, change.after) if part]
    versions = " -> ".join(dict.fromkeys(part.version for part in both))
    hashes = " -> ".join(part.sha256[:12] for part in both)
    return WORDS[change.verdict], change.name, versions + f": sha256 {hashes}" * (change.verdict == "bytes")


def mod_lines(found: Difference) -> Iterator[str]:
    """Each mod that differs, and under it the texts of its sources that do."""
    for change in found.parts["mods"]:
        yield " ".join(part_row(change))
        if change.before and change.after:
            for file in found.files:
                if file.path.startswith(f"mods/{change.name}/"):
                    yield from (f"  {line}" for line in text_change(file))


def text_change(change: TextChange) -> Iterator[str]:
    sign = "+" if change.before is None else "-" if change.after is None else "~"
    yield f"{sign} {change.path}{f': {change.note}' if change.note else ''}"
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
        value[name] = {key: value[name][key] for key in ("name", "key", "image")} | value[name]["names"]
    parts = value.pop("parts")
    return {"identical": found.identical, **parts, **value}
