"""What a layer holds, file by file, and which package each file comes from; and what differs between two images.

Listings are kept beside the build records, so that two images can be compared, and a file explained, without reading
gigabytes again.
"""

from __future__ import annotations

import csv
import gzip
import json
import operator
import posixpath
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from sparkpin.core.errors import IntegrityError
from sparkpin.core.files import atomic_file
from sparkpin.image.layer_tar import DIRECTORY, HARDLINK, SYMLINK, CanonicalLayer, Member, parents

FORMAT = 1
# A listing in a bundle is a stranger's. That of a layer with 30,000 files has 6 million bytes.
LIMIT, ENTRIES, ROW = 1 << 26, 400_000, 1 << 16  # bytes and entries of a listing, bytes of an entry
# So is a layer, whose lists may name owners. Real ones: lists of 4 million bytes, 20 folders in a path.
LIST, PATH, DEPTH = 1 << 24, 4096, 128  # bytes of a list; characters of a path, and folders in it
KINDS = {b"0": "file", b"1": "hardlink", b"2": "symlink", b"3": "char", b"4": "block", b"5": "dir", b"6": "fifo"}
MARKS = ("whiteout", "opaque")
LISTED = frozenset({*KINDS.values(), *MARKS})
MARK, OPAQUE = ".wh.", ".wh..wh..opq"  # OCI image specification, "Whiteouts"
DPKG = re.compile(r"var/lib/dpkg/info/(?P<name>[^/:]+)(?::[a-z0-9]+)?\.[a-z0-9]+")
SAME_DATA = {"file", "hardlink"}  # a second name of a file may come to hold its data: still the same file
COMPILED = re.compile(r"__pycache__/([^/]+)\.cpython-\d+(?:\.opt-\d)?\.pyc")  # from \1.py
DIST_INFO = re.compile(r"(?P<site>.*/)?(?P<name>[^/][^/-]*)-[^/]*\.dist-info/(?P<file>.*)")


@dataclass(frozen=True, slots=True)
class PathEntry:
    """One path of a layer.

    path: without a slash at either end; bytes that are not UTF-8 as surrogate escapes. Of a "whiteout" it is the path
    that is deleted, of an "opaque" mark the folder whose content of lower layers is hidden.
    kind: "file", "dir", "symlink", "hardlink", "char", "block", "fifo", "whiteout" or "opaque".
    size: bytes of data that the layer stores under this name (none for a hard link).
    sha256: of the data, in hex; a hard link has that of the file it names.
    link: target of a symbolic link as it stands, of a hard link as a path of the layer.
    device: major, minor; capability: security.capability in hex.
    owner: "deb:<name>", "wheel:<normalised name>" or "" where no package of the layer lists the path. Folders have
    none: packages share them.
    """

    path: str
    kind: str
    mode: int
    uid: int
    gid: int
    size: int
    sha256: str = ""
    link: str = ""
    device: tuple[int, int] = (0, 0)
    capability: str = ""
    owner: str = ""


Contents = tuple[PathEntry, ...]
VALUES = operator.attrgetter(*(field.name for field in fields(PathEntry)))
DEFAULTS = tuple(field.default for field in fields(PathEntry))
DEVICE = [field.name for field in fields(PathEntry)].index("device")


def contents_of(layer: CanonicalLayer) -> Contents:
    """What a layer holds. Reads its files, unless they were hashed while the layer was sealed."""
    if not layer.sums:
        for _ in layer.chunks():
            pass
    owner = owners(layer)

    def entry(member: Member) -> PathEntry:
        path = text(member.path)
        folder, name = posixpath.split(path)
        if name == OPAQUE:
            return PathEntry(folder, "opaque", 0, 0, 0, 0)
        if name.startswith(MARK):
            return PathEntry(posixpath.join(folder, name.removeprefix(MARK)), "whiteout", 0, 0, 0, 0)
        sha256 = layer.sums.get(member.link if member.kind == HARDLINK else member.path, "")
        more = sha256, text(member.link), member.device, member.capability.hex(), owner.get(path, "")
        return PathEntry(path, KINDS[member.kind], member.mode, member.uid, member.gid, member.size, *more)

    return tuple(entry(member) for member in layer.members)


def text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def owners(layer: CanonicalLayer) -> dict[str, str]:
    """Path -> package, for all but folders: from dpkg's file lists and the wheels' RECORDs that lie in the layer.

    A list that is larger than any real one, or cannot be read, names none.
    """
    names = {text(member.path): member for member in layer.members if member.kind != DIRECTORY}
    merged = {path: text(one.link) for path, one in names.items() if one.kind == SYMLINK and "/" not in path}
    found: dict[str, str] = {}
    for path, member in names.items():
        listed: Iterable[str] = ()
        if len(path) > PATH or path.count("/") > DEPTH:  # a few bytes of a list could ask for hours of work
            continue
        if deb := DPKG.fullmatch(path):
            found[path] = owner = f"deb:{deb['name']}"
            if path.endswith(".list") and member.size <= LIST:
                listed = (unmerged(row, merged) for row in text(layer.data(member).read()).splitlines())
        elif wheel := DIST_INFO.fullmatch(path):
            found[path] = owner = f"wheel:{canonicalize_name(wheel['name'])}"
            if wheel["file"] == "RECORD" and member.size <= LIST:
                site = "/" + (wheel["site"] or "")
                record = recorded(text(layer.data(member).read()))
                listed = (posixpath.normpath(site + file).lstrip("/") for file in record)
        else:
            continue
        found.update((name, owner) for name in listed if name in names)  # a list may name much more than there is
    compiled = {path: COMPILED.sub(r"\1.py", path) for path in names}
    found.update((path, found[source]) for path, source in compiled.items() if source in found)
    return found


def unmerged(row: str, merged: Mapping[str, str]) -> str:
    """A path of dpkg's where it lies in a merged system: /bin/sh is usr/bin/sh."""
    top, _, rest = row.strip("/").partition("/")
    return f"{merged[top].strip('/')}/{rest}" if rest and top in merged else row.strip("/")


def recorded(record: str) -> list[str]:
    """The files in a wheel's RECORD; none where it is no CSV."""
    try:
        return [row[0] for row in csv.reader(record.splitlines()) if row]
    except csv.Error:
        return []


def image_contents(layers: Iterable[Contents]) -> dict[str, tuple[int, PathEntry]]:
    """Path -> (number of its layer, entry) as a container sees it, sorted by path. layers: lowest first.

    Deletion marks work on the layers below theirs; what is not a folder hides a folder of its name with all below.
    """
    rows, folders = dict[str, tuple[int, PathEntry]](), set[str]()
    for number, layer in enumerate(layers):
        entries = {entry.path: (number, entry) for entry in layer if entry.kind not in MARKS}
        gone = {entry.path for entry in layer if entry.kind == "whiteout"}
        # A folder need not be named for what is in it to be there: it is one all the same.
        implied = parents(entries)
        gone |= {folder for folder in implied if folder in rows and rows[folder][1].kind != "dir"}
        bare = {path for path, (_, entry) in entries.items() if entry.kind != "dir" and path in folders}
        bare |= gone | {entry.path for entry in layer if entry.kind == "opaque"}
        if bare:
            rows = {path: row for path, row in rows.items() if path not in gone and bare.isdisjoint(parents([path]))}
        rows |= entries
        folders |= implied  # more than there still are do no harm
    return dict(sorted(rows.items()))


def write_contents(path: Path, contents: Contents) -> None:
    """One line of JSON for each entry, without the defaults at its end; the same contents give the same bytes."""
    with atomic_file(path) as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as packed:
        packed.write(json_line({"contents": FORMAT, "entries": len(contents)}))
        packed.write(b"".join(json_line(row(entry)) for entry in contents))


def row(entry: PathEntry) -> list[Any]:
    values = list(VALUES(entry))
    while values[-1] == DEFAULTS[len(values) - 1]:
        values.pop()
    return values


def json_line(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def read_contents(path: Path) -> Contents:
    """Raises FileNotFoundError; IntegrityError for a file that is damaged or no listing."""
    try:
        return parse_contents(path.read_bytes())
    except IntegrityError as error:
        raise IntegrityError(f"{path}: {error.message}", next_step=f"rm {path}, then invoke build") from None


def parse_contents(packed: bytes) -> Contents:
    """The listing in these bytes, whoever wrote them.

    IntegrityError for what is none, or has more than LIMIT bytes, ENTRIES entries or ROW bytes in one.
    """
    try:
        unpacking = zlib.decompressobj(wbits=31)  # 31: gzip
        data = unpacking.decompress(packed, LIMIT)
        if not unpacking.eof or unpacking.unused_data:
            raise ValueError(f"it ends too soon, or too late, or is longer than {LIMIT:,} bytes")
        if data.count(b"\n") > ENTRIES + 1:
            raise ValueError(f"it has more than {ENTRIES:,} entries")
        head, *lines = data.removesuffix(b"\n").split(b"\n")
        if max(map(len, [head, *lines])) > ROW:
            raise ValueError(f"it has a line of more than {ROW:,} bytes")
        if (found := json.loads(head)) != (expected := {"contents": FORMAT, "entries": len(lines)}):
            raise ValueError(f"got {found}, expected {expected}")
        return tuple(map(parse_entry, lines))
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise IntegrityError(f"no listing of a layer's contents: {error}") from None


def parse_entry(line: bytes) -> PathEntry:
    """ValueError or TypeError for what `row` would not write."""
    values = json.loads(line)
    if type(values) is not list:
        raise ValueError(f"it has an entry {str(values)[:200]}")
    if len(values) > DEVICE:
        values[DEVICE] = tuple(values[DEVICE])
    entry = PathEntry(*values)
    path, kind, mode, uid, gid, size, sha256, link, device, capability, owner = VALUES(entry)
    texts = {type(path), type(sha256), type(link), type(capability), type(owner)} == {str}
    numbers = {type(mode), type(uid), type(gid), type(size), *map(type, device)} == {int}
    if not (texts and numbers and kind in LISTED and len(device) == 2 and min(mode, uid, gid, size, *device) >= 0):
        raise ValueError(f"it has an entry {str(values)[:200]}")
    return entry


@dataclass(frozen=True, order=True)
class FieldChange:
    """One field of a path that both sides have.

    field: "content" (SHA-256), "kind", "link", "device", "mode", "uid", "gid" or "capability"; before, after: as a
    person writes them.
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


def compare_images(before: Sequence[Contents], after: Sequence[Contents]) -> ContentsDifference:
    """What differs between two images as containers see them. before, after: their layers, lowest first.

    Which package a path belongs to is no difference.
    """
    old, new = ({path: entry for path, (_, entry) in image_contents(side).items()} for side in (before, after))
    return ContentsDifference(
        added=tuple(entry for path, entry in new.items() if path not in old),
        removed=tuple(entry for path, entry in old.items() if path not in new),
        changed=tuple(change for path in old if path in new for change in changes(old[path], new[path])),
    )


def changes(old: PathEntry, new: PathEntry) -> Iterator[FieldChange]:
    if old is new:  # of a layer that both images have
        return
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
