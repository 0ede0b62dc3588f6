"""What differs between the contents of two layers or images, field by field. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sparkpin.image.listing import MARKS, Contents, PathEntry, image_contents

METADATA = ("mode", "uid", "gid", "capability")
SAME_DATA = {"file", "hardlink"}  # a second name of a file may come to hold its data: still the same file


@dataclass(frozen=True, order=True)
class FieldChange:
    """One field of a path that both sides have.

    field: "content" (SHA-256), "kind", "link", "device", or one of METADATA; before, after: as a person writes them.
    """

    path: str
    field: str
    before: str
    after: str


@dataclass(frozen=True)
class ContentsDifference:
    """Sorted by path. One path may stand in `changed` several times, once for each field."""

    added: tuple[PathEntry, ...]
    removed: tuple[PathEntry, ...]
    changed: tuple[FieldChange, ...]

    @property
    def identical(self) -> bool:
        return not (self.added or self.removed or self.changed)

    @property
    def only_metadata(self) -> bool:
        """Every path is there on both sides with the same data; at most modes, owners or capabilities differ."""
        return not (self.added or self.removed) and all(change.field in METADATA for change in self.changed)


def compare_contents(before: Contents, after: Contents) -> ContentsDifference:
    """What differs between two listings, of layers (marks of deletion count) or of whole images.

    Which package a path belongs to is no difference.
    """
    old, new = {key_of(entry): entry for entry in before}, {key_of(entry): entry for entry in after}
    return ContentsDifference(
        added=tuple(new[key] for key in sorted(new.keys() - old.keys())),
        removed=tuple(old[key] for key in sorted(old.keys() - new.keys())),
        changed=tuple(
            change
            for key in sorted(old.keys() & new.keys())
            if old[key] is not new[key]
            for change in changes(old[key], new[key])
        ),
    )


def key_of(entry: PathEntry) -> tuple[str, str]:
    """A layer may hold a folder and, under the same path, the mark that hides what is below it."""
    return entry.path, entry.kind if entry.kind in MARKS else ""


def changes(old: PathEntry, new: PathEntry) -> Iterator[FieldChange]:
    if old.kind != new.kind:
        yield FieldChange(old.path, "kind", old.kind, new.kind)
        if {old.kind, new.kind} != SAME_DATA:
            return  # the modes of a file and of a link say nothing about each other
    values = [
        ("content", old.sha256, new.sha256),
        ("link", old.link, new.link),
        ("device", "{}:{}".format(*old.device), "{}:{}".format(*new.device)),
        ("mode", f"{old.mode:04o}", f"{new.mode:04o}"),
        ("uid", str(old.uid), str(new.uid)),
        ("gid", str(old.gid), str(new.gid)),
        ("capability", old.capability, new.capability),
    ]
    for name, was, now in values:
        if was != now:
            yield FieldChange(old.path, name, was, now)


Images = tuple[dict[str, PathEntry], dict[str, PathEntry]]


def images_apart(before: Sequence[str], after: Sequence[str], read: Callable[[str], Contents]) -> Images:
    """Two images as containers see them, without paths of which the layers say already that they are the same.

    before, after: diff IDs, lowest first. Layers that both images have at the bottom and at the top can make no
    difference by themselves: of those only what the layers between them touch, hide or stand in is looked at.
    """
    listings = {diff_id: read(diff_id) for diff_id in {*before, *after}} if tuple(before) != tuple(after) else {}

    def seen(side: Sequence[str]) -> dict[str, PathEntry]:
        return {path: entry for path, (_, entry) in image_contents([listings[d] for d in side]).items()}

    return (seen(before), seen(after)) if listings else ({}, {})


def common(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
