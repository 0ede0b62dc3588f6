"""What differs between two releases, as data. Pure: texts and listings come from the caller's functions."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from sparkpin.image.listing import Contents, ContentsDifference, compare_images
from sparkpin.pins.vllm_flags import parse_flags

Verdict = Literal["changed", "bytes", "added", "removed"]
Read = Callable[[str], bytes | None]
KINDS = ("debs", "wheels", "tools", "mods")
LOCKS = ".lock"
TREE_NAME = "the working tree"  # the side that is no release


@dataclass(frozen=True)
class VersionedPart:
    """A package, tool or mod. sha256: of its file; "" where no build has made it yet (a mod's wheel)."""

    version: str
    sha256: str


@dataclass(frozen=True)
class Side:
    """One of two things that are compared: a release, or what the working tree would make.

    key: release key; names: of its recipe, stage, stack, model and drafter, where it has one; image: config digest, ""
    while it is not built; parts: by kind and name; files: project path -> SHA-256; checkpoint: its key, and what it is
    made from, as far as that can be read; layers: diff IDs, None where a listing is missing.
    """

    name: str
    key: str
    names: Mapping[str, str]
    image: str
    parts: Mapping[str, Mapping[str, VersionedPart]]
    files: Mapping[str, str]
    argv: tuple[str, ...]
    env: Mapping[str, str]
    checkpoint: Mapping[str, str]
    layers: tuple[str, ...] | None


@dataclass(frozen=True)
class PartChange:
    """verdict: "changed": another version, or other sources of a mod; "bytes": the same version in another file."""

    name: str
    verdict: Verdict
    before: VersionedPart | None
    after: VersionedPart | None


@dataclass(frozen=True)
class ValueChange:
    """before or after is None where the name is on one side only."""

    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class TextChange:
    """A file of the project. before, after: SHA-256, None where it is absent.

    diff: unified, without heads and line ends; note: why there is none of a text that both sides have.
    """

    path: str
    before: str | None
    after: str | None
    diff: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Difference:
    """All that differs; a part that does not is empty.

    parts: by kind; moved: the same flags stand in another order; contents: None where the layers of a side are not
    listed here.
    """

    before: Side
    after: Side
    names: tuple[ValueChange, ...]
    parts: Mapping[str, tuple[PartChange, ...]]
    files: tuple[TextChange, ...]
    flags: tuple[ValueChange, ...]
    moved: bool
    env: tuple[ValueChange, ...]
    checkpoint: tuple[ValueChange, ...]
    contents: ContentsDifference | None

    @property
    def other_image(self) -> bool:
        """Both images are there, and they are not the same."""
        return "" not in (self.before.image, self.after.image) and self.before.image != self.after.image

    @property
    def identical(self) -> bool:
        """Nothing differs, not even a comment in a manifest."""
        apart = (self.names, *self.parts.values(), self.files, self.flags, self.env, self.checkpoint)
        same_contents = self.contents is None or self.contents.identical
        same_key = self.before.key == self.after.key
        return not (any(apart) or self.moved) and same_contents and same_key and not self.other_image


def compare(before: Side, after: Side, read: Read, listing: Callable[[str], Contents]) -> Difference:
    """read: SHA-256 -> bytes of a project's file, None where they are not here; listing: diff ID -> contents."""
    contents = None
    if before.layers is not None and after.layers is not None:
        changed = before.layers != after.layers
        listings = {diff_id: listing(diff_id) for diff_id in {*before.layers, *after.layers} if changed}
        contents = compare_images(*([listings[d] for d in side if changed] for side in (before.layers, after.layers)))
    files = tuple(compare_files(before, after, read))
    flags = tuple(values_apart(flag_words(before.argv), flag_words(after.argv)))
    edited = {change.path.split("/")[1] for change in files if change.path.startswith("mods/")}
    same_checkpoint = before.checkpoint["key"] == after.checkpoint["key"]
    return Difference(
        before=before,
        after=after,
        names=tuple(values_apart(before.names, after.names)),
        parts={
            kind: tuple(parts_apart(before.parts[kind], after.parts[kind], edited if kind == "mods" else ()))
            for kind in KINDS
        },
        files=files,
        flags=flags,
        moved=not flags and before.argv != after.argv,
        env=tuple(values_apart(before.env, after.env)),
        checkpoint=() if same_checkpoint else tuple(values_apart(before.checkpoint, after.checkpoint)),
        contents=contents,
    )


def values_apart(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[ValueChange]:
    """In the order of `before`, then what only `after` has."""
    for name in [*before, *(name for name in after if name not in before)]:
        if before.get(name) != after.get(name):
            yield ValueChange(name, before.get(name), after.get(name))


def parts_apart(
    before: Mapping[str, VersionedPart], after: Mapping[str, VersionedPart], edited: Collection[str] = ()
) -> Iterator[PartChange]:
    """edited: mods of which a source file differs."""
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield PartChange(name, "added" if new else "removed", old, new)
        elif old.version != new.version or name in edited:
            yield PartChange(name, "changed", old, new)
        elif old.sha256 and new.sha256 and old.sha256 != new.sha256:
            yield PartChange(name, "bytes", old, new)


def compare_files(before: Side, after: Side, read: Read) -> Iterator[TextChange]:
    for path in sorted({*before.files, *after.files}):
        one, other = before.files.get(path), after.files.get(path)
        if one is None or other is None:
            yield TextChange(path, one, other)
        elif one != other and path.endswith(LOCKS):
            yield TextChange(path, one, other, note="its contents are compared above")
        elif one != other:
            yield TextChange(path, one, other, *text_diff(read(one), read(other)))


def text_diff(before: bytes | None, after: bytes | None) -> tuple[tuple[str, ...], str]:
    """(unified diff, why there is none)."""
    if before is None or after is None:
        return (), "its text is not kept here"
    try:
        old, new = before.decode().splitlines(), after.decode().splitlines()
    except UnicodeDecodeError:
        return (), f"not text: {len(before):,} -> {len(after):,} bytes"
    lines = tuple(difflib.unified_diff(old, new, lineterm=""))[2:]  # the first two would name the files
    return (lines, "") if lines else ((), "only its line ends differ")


def flag_words(argv: Iterable[str]) -> dict[str, str]:
    """What each flag sets -> its words as a shell would take them; the words before the first flag are "command"."""
    head, flags = parse_flags(tuple(argv))
    found: dict[str, list[str]] = {"command": head}
    for flag in flags:
        found.setdefault(flag.key, []).extend(flag.words)
    return {key: shlex.join(words) for key, words in found.items()}
