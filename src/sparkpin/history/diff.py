"""What differs between two releases, as data. Pure: texts and listings come from the caller's functions."""

from __future__ import annotations

import difflib
import shlex
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from packaging.version import InvalidVersion, Version

from sparkpin.image.listing import Contents, ContentsDifference, compare_images
from sparkpin.pins.vllm_flags import parse_flags

Verdict = Literal["added", "removed", "up", "down", "changed", "bytes"]
Read = Callable[[str], bytes | None]
LOCKS = ".lock"
TREE_NAME = "the working tree"  # the side that is no release


@dataclass(frozen=True)
class VersionedPart:
    """A package, tool or mod. sha256: of its file; "" where no build has made it yet (a mod's wheel)."""

    version: str
    sha256: str


@dataclass(frozen=True)
class Side:
    """One of two things that are compared: a release, or what the working tree would make."""

    name: str
    key: str  # release key
    recipe: str
    stage: str
    stack: str
    model: str
    image: str  # config digest, "" while it is not built
    debs: Mapping[str, VersionedPart]
    wheels: Mapping[str, VersionedPart]
    tools: Mapping[str, VersionedPart]
    mods: Mapping[str, VersionedPart]
    files: Mapping[str, str]  # project path -> SHA-256
    argv: tuple[str, ...]
    env: Mapping[str, str]
    checkpoint: Mapping[str, str]  # its key, and what it is made from, as far as that can be read
    layers: tuple[str, ...] | None  # diff IDs; None where a listing is missing
    drafter: str = ""  # the pin of a second model, "" for none

    @property
    def names(self) -> dict[str, str]:
        found = {name: getattr(self, name) for name in ("recipe", "stage", "stack", "model", "drafter")}
        return {name: value for name, value in found.items() if value}


@dataclass(frozen=True)
class PartChange:
    """verdict: "changed" of versions that no order knows, and of a mod's sources; "bytes": the same version in another
    file.
    """

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

    moved: the same flags stand in another order; contents: None where the layers of a side are not listed here.
    """

    before: Side
    after: Side
    names: tuple[ValueChange, ...]
    debs: tuple[PartChange, ...]
    wheels: tuple[PartChange, ...]
    tools: tuple[PartChange, ...]
    mods: tuple[PartChange, ...]
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
        parts = (*self.debs, *self.wheels, *self.tools, *self.mods)
        values = (*self.names, *self.files, *self.flags, *self.env, *self.checkpoint)
        same_contents = self.contents is None or self.contents.identical
        same_key = self.before.key == self.after.key
        return not (parts or values or self.moved) and same_contents and same_key and not self.other_image


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
        debs=tuple(parts_apart("debs", before.debs, after.debs)),
        wheels=tuple(parts_apart("wheels", before.wheels, after.wheels)),
        tools=tuple(parts_apart("tools", before.tools, after.tools)),
        mods=tuple(parts_apart("mods", before.mods, after.mods, edited)),
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
    kind: str, before: Mapping[str, VersionedPart], after: Mapping[str, VersionedPart], edited: Collection[str] = ()
) -> Iterator[PartChange]:
    """edited: mods of which a source file differs."""
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        verdict = part_verdict(kind, old, new)
        if name in edited and verdict in (None, "bytes"):
            verdict = "changed"
        if verdict:
            yield PartChange(name, verdict, old, new)


def part_verdict(kind: str, old: VersionedPart | None, new: VersionedPart | None) -> Verdict | None:
    if old is None or new is None:
        return "added" if new else "removed"
    if old.version != new.version:
        return debian_direction(old.version, new.version) if kind == "debs" else direction(old.version, new.version)
    return "bytes" if old.sha256 and new.sha256 and old.sha256 != new.sha256 else None


def direction(before: str, after: str) -> Verdict:
    """In Python's order (PEP 440). "changed" where that does not know a version, or counts both as one (1.0, 1.0.0)."""
    try:
        was, now = Version(before), Version(after)
    except InvalidVersion:
        return "changed"
    return "changed" if was == now else "up" if was < now else "down"


def debian_direction(before: str, after: str) -> Verdict:
    """In dpkg's order; "changed" without dpkg, and for what it does not take."""
    if not (before[:1].isalnum() and after[:1].isalnum()):  # a stranger's version must be no option of it
        return "changed"
    try:
        return "up" if is_older_deb(before, after) else "down" if is_older_deb(after, before) else "changed"
    except FileNotFoundError:
        return "changed"


def is_older_deb(one: str, other: str) -> bool:
    command = ["dpkg", "--compare-versions", one, "lt", other]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


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
