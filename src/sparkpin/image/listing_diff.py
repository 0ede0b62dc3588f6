"""What differs between the contents of two images, field by field. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

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
    common = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(before, after, strict=False)))
    below = image_contents(before[:common])  # mostly all but one layer: merged once
    old, new = (image_contents(side[common:], below) for side in (before, after))
    both = ((old[path][1], new[path][1]) for path in old if path in new and old[path] is not new[path])
    return ContentsDifference(
        added=tuple(entry for path, (_, entry) in new.items() if path not in old),
        removed=tuple(entry for path, (_, entry) in old.items() if path not in new),
        changed=tuple(change for one, other in both for change in changes(one, other)),
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
