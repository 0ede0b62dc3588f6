"""What differs between the contents of two images, field by field. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparkpin.image.listing import Contents, PathEntry, image_contents

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


def compare_images(before: Sequence[Contents], after: Sequence[Contents]) -> ContentsDifference:
    """What differs between two images as containers see them. before, after: their layers, lowest first.

    Which package a path belongs to is no difference.
    """
    old, new = ({path: entry for path, (_, entry) in image_contents(side).items()} for side in (before, after))
    both = (path for path in old if path in new and old[path] is not new[path])
    return ContentsDifference(
        added=tuple(entry for path, entry in new.items() if path not in old),
        removed=tuple(entry for path, entry in old.items() if path not in new),
        changed=tuple(change for path in both for change in changes(old[path], new[path])),
    )


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
