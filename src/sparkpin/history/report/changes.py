"""What changed from one release to the next, from their records alone: no listing of an image is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.history import operands, text
from sparkpin.history.comparison import Difference, Side
from sparkpin.history.report.facts import Changes
from sparkpin.releases.kept_inputs import reason
from sparkpin.releases.record import Release

Sides = Mapping[str, Side | str]
"""Release tag -> what is compared, or why it cannot be."""
KINDS = ("wheels", "debs", "tools")
MOST = 40  # lines of a section


def before(releases: Sequence[Release], release: Release) -> tuple[Release | None, str]:
    """The release that `release` is compared with, and why that one: the former one of its stage, else the newest of
    any. releases: from the oldest to the newest, of one recipe."""
    earlier = [one for one in releases if one.age < release.age]
    same = [one for one in earlier if one.stage == release.stage]
    if same:
        return same[-1], ""
    return (earlier[-1], f"the first release of the stage {release.stage}") if earlier else (None, "")


def read_sides(paths: Paths, releases: Sequence[Release]) -> dict[str, Side | str]:
    found: dict[str, Side | str] = {}
    for release in releases:
        try:
            found[release.tag] = operands.release_side(paths, release)
        except SparkpinError as error:
            found[release.tag] = reason(error)
    return found


def changes_of(paths: Paths, releases: Sequence[Release], known: Sides, release: Release) -> Changes:
    former, why = before(releases, release)
    if former is None:
        return Changes("", "the first release of this recipe")
    command = f"invoke diff {former.tag} {release.tag}"
    old, new = known[former.tag], known[release.tag]
    for side in (old, new):
        if isinstance(side, str):
            return Changes(former.tag, f"cannot be compared: {side}", command=command)
    assert isinstance(old, Side) and isinstance(new, Side)
    found = operands.recorded_difference(paths, old, new)
    return Changes(former.tag, why, tuple(sections(found)), command)


def sections(found: Difference) -> Iterator[tuple[str, tuple[str, ...]]]:
    plain: list[tuple[str, Iterator[str] | list[str]]] = [
        ("what it is", [*text.value_lines(found.names), *map(text.stage_line, found.stages)]),
        ("vllm serve", text.flag_lines(found)),
        ("environment of the server", text.value_lines(found.env)),
        ("checkpoint", text.checkpoint_lines(found)),
        (text.part_title(found, "mods"), text.part_lines(found.mods)),
        *((text.part_title(found, kind), text.part_lines(getattr(found, kind))) for kind in KINDS),
        ("what decides the images", text.value_lines(found.values)),
        ("files that people edit", file_lines(found)),
    ]
    for title, some in plain:
        lines = [line.rstrip() for line in some]
        if lines:
            more = [f"... {len(lines) - MOST} more"] if len(lines) > MOST else []
            yield title, (*lines[:MOST], *more)


def file_lines(found: Difference) -> Iterator[str]:
    """Names alone; a mod's files stand under its name above."""
    for change in found.files:
        if not change.path.startswith("mods/"):
            sign = "+" if change.before is None else "-" if change.after is None else "~"
            yield f"{sign} {change.path}"
