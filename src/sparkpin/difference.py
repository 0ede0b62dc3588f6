"""What differs between two releases, or between the contents of two images. Pure: no file is read here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sparkpin.contents import Contents, Entry

METADATA = ("mode", "uid", "gid", "capability")
SAME_DATA = {"file", "hardlink"}  # a second name of a file may come to hold its data: still the same file


@dataclass(frozen=True, order=True)
class Change:
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

    added: tuple[Entry, ...]
    removed: tuple[Entry, ...]
    changed: tuple[Change, ...]

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


def key_of(entry: Entry) -> tuple[str, str]:
    """A layer may hold a folder and, under the same path, the mark that hides what is below it."""
    return entry.path, entry.kind if entry.kind in ("whiteout", "opaque") else ""


def changes(old: Entry, new: Entry) -> Iterator[Change]:
    if old.kind != new.kind:
        yield Change(old.path, "kind", old.kind, new.kind)
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
    for field, was, now in values:
        if was != now:
            yield Change(old.path, field, was, now)
