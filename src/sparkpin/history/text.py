"""Differences and origins in a person's words: lines of text, and the same as plain data for machines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from sparkpin.core import terminal
from sparkpin.history.comparison import TREE_NAME, Difference, PartChange, Side, TextChange, ValueChange
from sparkpin.history.why import PathOrigin, TracedLayer, TracedPackage
from sparkpin.image.listing import PathEntry
from sparkpin.image.listing_diff import METADATA, Tally, empty_folders

NEEDED = 6  # packages that need another, or lie in a folder
SIDE = ("name", "key", "recipe", "stage", "stack", "model", "image", "host")  # what machines are told of a side
SHOWN = 20  # paths, where not all are asked for
KINDS = {"debs": "Debian packages", "wheels": "Python packages", "tools": "tools of the build", "mods": "mods"}
WORDS = {"up": "up", "down": "down", "changed": "changed", "bytes": "other file", "added": "in", "removed": "out"}
WIDTH = 80  # of a name and two values that still stand on one line


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
    if found.before.host != found.after.host and found.before.host and found.after.host:
        yield f"made on other machines: {found.before.host} -> {found.after.host}"
    if found.identical:
        yield "no difference"
    elif found.before.key == found.after.key and not found.other_image:
        yield f"one release (key {found.before.key[:12]}): what differs decides nothing of it"
    elif found.before.image and found.before.image == found.after.image:
        yield "one image: only what is served differs, and how"


def sections(found: Difference, *, all_files: bool) -> Iterator[tuple[str, list[str]]]:
    """(title, lines) of each part in which something differs."""
    plain = [
        ("what it is", [*value_lines(found.names), *map(stage_line, found.stages)]),
        *((part_title(found, kind), part_lines(getattr(found, kind))) for kind in ("debs", "wheels", "tools")),
        (part_title(found, "mods"), list(mod_lines(found))),
        ("vllm serve", list(flag_lines(found))),
        ("environment of the server", list(value_lines(found.env))),
        ("checkpoint", list(checkpoint_lines(found))),
        ("files that people edit", list(file_lines(found))),
        ("what sparkpin makes of them", list(text_lines(found))),
        ("configuration of the image", list(value_lines(found.config))),
    ]
    yield from ((title, lines) for title, lines in plain if lines)
    if found.contents is None:
        if not found.identical:
            yield "files in the images", [to_know(side) for side in (found.before, found.after) if side.layers is None]
    elif found.contents.identical and found.before.image != found.after.image:
        yield "files in the images: the same", []
    elif not found.contents.identical:
        yield image_title(found), list(image_lines(found, all_files=all_files))


def to_know(side: Side) -> str:
    """What it takes to see the files of an image of which no listing is there."""
    build = f"invoke build --recipe {side.recipe} --stage {side.stage}"
    if not side.image:
        return f"known once {side.name} is built: {build}"
    command = build if side.name == TREE_NAME else f"invoke reproduce {side.name} --keep"
    return f"a listing of the layers of {side.name} is missing: {command} makes it anew"


def value_lines(changes: Iterable[ValueChange]) -> Iterator[str]:
    for change in changes:
        if change.before is None or change.after is None:
            yield f"{'+' if change.before is None else '-'} {change.name} {change.after or change.before or ''}"
        else:
            yield from arrow(change.name, change.before, change.after)


def arrow(name: str, before: str, after: str) -> Iterator[str]:
    if len(name) + len(before) + len(after) > WIDTH:
        yield f"~ {name}"
        yield f"    - {before or '(empty)'}"
        yield f"    + {after or '(empty)'}"
    else:
        yield f"~ {name} {before or '(empty)'} -> {after or '(empty)'}"


def stage_line(change: ValueChange) -> str:
    sign, text = ("+", change.after) if change.before is None else ("-", change.before)
    return f"{sign} stage {change.name}{f': {text}' if text else ''}"


def part_title(found: Difference, kind: str) -> str:
    changes: Sequence[PartChange] = getattr(found, kind)
    verdicts = [change.verdict for change in changes]
    counts = [f"{verdicts.count(verdict)} {word}" for verdict, word in WORDS.items() if verdict in verdicts]
    same = [f"{found.alike[kind]} the same"] if found.alike[kind] else []
    return f"{KINDS[kind]}: {', '.join([*counts, *same])}"


def part_lines(changes: Sequence[PartChange]) -> list[str]:
    order = list(WORDS)
    return columns(part_row(change) for change in sorted(changes, key=lambda change: order.index(change.verdict)))


def part_row(change: PartChange) -> tuple[str, str, str]:
    old, new = change.before, change.after
    word = WORDS[change.verdict]
    if old is None or new is None:
        part = new or old
        assert part
        return word, change.name, f"{part.version}, {size_text(part.size)}"
    if old.version != new.version:
        return word, change.name, f"{old.version} -> {new.version}"
    if change.verdict == "bytes":
        return word, change.name, f"{old.version}: sha256 {old.sha256[:12]} -> {new.sha256[:12]}"
    return word, change.name, old.version


def mod_lines(found: Difference) -> Iterator[str]:
    """Each mod that differs, and under it the texts of its sources that do."""
    for change in found.mods:
        word, name, text = part_row(change)
        yield f"{word} {name} {text}".rstrip()
        if change.before and change.after:
            for file in found.files:
                if file.path.startswith(f"mods/{change.name}/"):
                    yield from (f"  {line}" for line in text_change(file))


def flag_lines(found: Difference) -> Iterator[str]:
    if found.moved:
        yield "the same flags in another order"
    for change in found.flags:
        old, new = (change.before or "").partition(" "), (change.after or "").partition(" ")
        if change.before is None or change.after is None:
            yield f"{'+' if change.before is None else '-'} {change.after or change.before}"
        elif old[0] == new[0] and old[0].startswith("-"):
            yield from arrow(old[0], old[2], new[2])
        else:
            yield f"~ {change.before} -> {change.after}"


def checkpoint_lines(found: Difference) -> Iterator[str]:
    yield from value_lines(found.checkpoint)
    if found.checkpoint and not (found.before.checkpoint.values and found.after.checkpoint.values):
        yield "what one of them was made from cannot be read here"


def file_lines(found: Difference) -> Iterator[str]:
    """Files that no other section tells of."""
    told = {f"stages/{change.name}.yaml" for change in found.stages}
    for change in found.files:
        if change.path not in told and not change.path.startswith("mods/"):
            yield from text_change(change)


def text_lines(found: Difference) -> Iterator[str]:
    """Rendered texts differ without need to say so when the templates or manifests above do."""
    yield from value_lines(found.values)
    for change in found.texts:
        if found.files and change.path.startswith("Dockerfile"):
            continue
        yield from text_change(change)


def text_change(change: TextChange) -> Iterator[str]:
    if change.before is None or change.after is None:
        yield f"{'+' if change.before is None else '-'} {change.path}"
        return
    yield f"~ {change.path}{f': {change.note}' if change.note else ''}"
    yield from (f"    {line}" for line in change.diff)


def image_title(found: Difference) -> str:
    assert found.contents
    total = {name: sum(getattr(tally, name) for tally in found.tallies) for name in ("added", "removed", "changed")}
    total["with another mode or owner"] = sum(tally.metadata for tally in found.tallies)
    counts = ", ".join(f"{number:,} {name}" for name, number in total.items() if number)
    return f"files in the images: {counts or 'folders alone'}"


def image_lines(found: Difference, *, all_files: bool) -> Iterator[str]:
    assert found.contents
    mods = (*found.before.mods.items(), *found.after.mods.items())
    named = {f"wheel:{part.distribution}": f"mod {name}" for name, part in mods}
    yield from columns(tally_row(tally, named) for tally in found.tallies)
    folders = empty_folders(found.contents.added) | empty_folders(found.contents.removed)
    rows = list(path_rows(found, folders, all_files=all_files))
    shown = rows if all_files else rows[:SHOWN]
    if shown:
        yield ""
        yield "each path:" if all_files else "outside of packages that changed, and modes and owners anywhere:"
        yield from shown
    if len(shown) < len(rows):
        yield f"... {len(rows) - len(shown):,} more"
    if not all_files:
        yield "--files lists every path"


def tally_row(tally: Tally, named: dict[str, str]) -> tuple[str, str]:
    parts = []
    if tally.added:
        parts.append(f"{tally.added:,} added ({size_text(tally.added_bytes)})")
    if tally.removed:
        parts.append(f"{tally.removed:,} removed ({size_text(tally.removed_bytes)})")
    if tally.changed:
        sizes = dict.fromkeys(map(size_text, (tally.changed_from, tally.changed_to)))
        parts.append(f"{tally.changed:,} changed ({' -> '.join(sizes)})")
    if tally.metadata:
        parts.append(f"{tally.metadata:,} with another mode or owner")
    return owner_text(tally.owner, named), ", ".join(parts)


def owner_text(owner: str, named: dict[str, str]) -> str:
    return named.get(owner) or owner.replace(":", " ") or "of no package"


def path_rows(found: Difference, folders: set[str], *, all_files: bool) -> Iterator[str]:
    assert found.contents
    quiet = set() if all_files else found.expected

    def wanted(entry: PathEntry) -> bool:
        return (entry.kind != "dir" or entry.path in folders) if not all_files else True

    rows = [(e.path, f"+ {e.path}") for e in found.contents.added if e.owner not in quiet and wanted(e)]
    rows += [(e.path, f"- {e.path}") for e in found.contents.removed if e.owner not in quiet and wanted(e)]
    for change in found.contents.changed:
        if change.field in METADATA or found.owners[change.path] not in quiet:
            before, after = (
                value[:12] if change.field == "content" else value for value in (change.before, change.after)
            )
            rows.append((change.path, f"~ {change.path}: {change.field} {before or 'none'} -> {after or 'none'}"))
    yield from (line for _, line in sorted(rows))


def columns(rows: Iterable[tuple[str, ...]]) -> list[str]:
    """Rows as lines, every column but the last as wide as its widest cell."""
    table = [tuple(map(str, row)) for row in rows]
    if not table:
        return []
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]) - 1)]
    return [
        "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in table
    ]


def size_text(count: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}" if count < 100 * unit else f"{count / unit:.0f} {name}"
    return f"{count} bytes" if count != 1 else "1 byte"


def difference_json(found: Difference) -> dict[str, Any]:
    """All that differs, and of the sides themselves only what they are."""
    whole = asdict(found)
    for name in ("before", "after"):
        whole[name] = {key: whole[name][key] for key in SIDE}
    return {"identical": found.identical, **whole}


def origin_lines(origin: PathOrigin) -> Iterator[str]:
    """The whole answer of `invoke why`."""
    yield from map(tame, columns(origin_rows(origin)))


def origin_rows(origin: PathOrigin) -> list[tuple[str, str]]:
    """(label, text); a text that goes on has no label."""
    place = origin.place
    rows: list[tuple[str, str]] = []
    for link in origin.links:
        assert link.entry
        rows.append(("link", f"/{link.path} -> {link.entry.link}"))
        rows += [("", line) for line in ([f"of {package_text(link.package)}"] if link.package else link.source)]
    if origin.deleted:
        rows.append(("deleted", f"by layer {layer_text(origin.deleted)}; what it was:"))
    rows.append(("path", f"/{place.path}"))
    if place.entry:
        rows.append(("what", entry_text(place.entry) + (", which is not in the image" if origin.dangling else "")))
        if origin.circle:
            rows.append(("", "these links lead round in a circle"))
        if place.entry.sha256:
            rows.append(("sha256", place.entry.sha256))
    if place.layer:
        rows += [("layer", layer_text(place.layer)), ("", place.layer.diff_id)]
    if place.entry and place.entry.kind != "dir":
        rows += [("over", f"the one in layer {layer_text(layer)}") for layer in place.replaced]
    if place.package:
        rows += package_rows(place.package)
    rows += zip(["source", *[""] * len(place.source)], place.source, strict=False)
    rows += below_rows(origin)
    return rows


def layer_text(layer: TracedLayer) -> str:
    name = f" ({layer.name})" if layer.name else ""
    return f"{layer.number} of {layer.of}{name}, stage {layer.stage}"


def entry_text(entry: PathEntry) -> str:
    words = {"dir": "folder", "symlink": "link to", "hardlink": "another name of", "char": "device", "block": "device"}
    parts = [words.get(entry.kind, entry.kind)]
    if entry.link:
        parts[0] += f" {'/' if entry.kind == 'hardlink' else ''}{entry.link}"
    if entry.kind == "file":
        parts.append(size_text(entry.size))
    if entry.kind != "symlink":
        parts.append(f"mode {entry.mode:04o}")
    parts.append(f"owner {entry.uid}:{entry.gid}")
    if entry.capability:
        parts.append(f"capability {entry.capability}")
    return ", ".join(parts)


def package_text(package: TracedPackage) -> str:
    kind = {"deb": "Debian package", "wheel": "wheel", "source": "source", "mod": "mod"}[package.kind]
    return f"{kind} {package.name} {package.version}"


def package_rows(package: TracedPackage) -> Iterator[tuple[str, str]]:
    yield "package", f"{package_text(package)}, {size_text(package.size)}"
    yield "", package.file
    yield "", f"sha256 {package.sha256}"
    yield (
        "locked",
        f"in {package.lock}" if package.lock else "by nobody: its wheel is made here, of the project's files",
    )
    yield from zip(["asked for", *[""] * len(package.asked)], (f"in {where}" for where in package.asked), strict=False)
    needed = [*package.needed[:NEEDED], *([f"{len(package.needed) - NEEDED} more"] if package.needed[NEEDED:] else [])]
    yield from zip(["needed by", *[""] * len(needed)], needed, strict=False)
    if package.chain:
        yield "so", " -> ".join(package.chain)
    if package.note:
        yield "", package.note


def below_rows(origin: PathOrigin) -> Iterator[tuple[str, str]]:
    if not origin.below:
        return
    files, size = (sum(pair[at] for pair in origin.below.values()) for at in (0, 1))
    yield "holds", f"{files:,} files, {size_text(size)}"
    for owner, (count, bytes_) in list(origin.below.items())[:NEEDED]:
        yield "", f"{owner_text(owner, {})}: {count:,}, {size_text(bytes_)}"
    if len(origin.below) > NEEDED:
        yield "", f"and of {len(origin.below) - NEEDED} more packages"


def origin_json(origin: PathOrigin) -> dict[str, Any]:
    return asdict(origin)
