"""What a layer holds, file by file, and which package each file comes from.

Listings are kept beside the build records, so that two images can be compared, and a file explained, without reading
gigabytes again.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib.util
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
from sparkpin.image.layer_tar import ROOM, CanonicalLayer, Member

FORMAT = 1
LIMIT = 1 << 26  # bytes of a listing; that of a layer with 30,000 files has 6 million
ENTRIES, ROW = 400_000, 1 << 16  # of a listing; bytes of an entry
BATCH = 100  # entries that are parsed at once: what is not valid costs no more memory than they take
# What may name owners in a layer of which nothing is known. Real ones: lists of 4 million bytes, 20 folders in a path.
LIST = 1 << 24  # bytes of a RECORD or of a list of dpkg's
PATH, DEPTH = 4096, 128  # characters of a path, as the kernel allows; folders in it
FOLLOWED = 40  # symbolic links in a path, as the kernel follows them
ALL_FOLLOWED = 1 << 20  # for all paths of a layer
KINDS = {b"0": "file", b"1": "hardlink", b"2": "symlink", b"3": "char", b"4": "block", b"5": "dir", b"6": "fifo"}
LISTED = frozenset({*KINDS.values(), "whiteout", "opaque"})
MARK, OPAQUE = ".wh.", ".wh..wh..opq"  # OCI image specification, "Whiteouts"
DPKG = re.compile(r"var/lib/dpkg/info/(?P<name>[^/:]+)(?::[a-z0-9]+)?\.[a-z0-9]+")
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
    return entries(layer, file_hashes(layer))


def file_hashes(layer: CanonicalLayer) -> dict[bytes, str]:
    """SHA-256 (hex) of each file's data, by its path."""
    sums: dict[bytes, str] = {}
    large = hashlib.sha256()  # of a file that does not end in the piece that it begins in
    buffer = bytearray(ROOM)
    for span in layer.spans():
        view = span.read(layer.source, buffer)
        for member, start, end in span.files:
            if end - start == member.size:
                sums[member.path] = hashlib.sha256(view[start:end]).hexdigest()
                continue
            if member.path not in sums:
                large = hashlib.sha256()
            large.update(view[start:end])
            sums[member.path] = large.hexdigest()
    return sums


def entries(layer: CanonicalLayer, sums: Mapping[bytes, str]) -> Contents:
    """The contents of a layer. sums: its files' SHA-256 (hex) by path."""
    owner = owners(layer)

    def entry(member: Member) -> PathEntry:
        path = text(member.path)
        folder, _, name = path.rpartition("/")
        if name.startswith(MARK):
            mark = name == OPAQUE
            return PathEntry(
                folder if mark else f"{folder}/{name[4:]}".lstrip("/"), "opaque" if mark else "whiteout", 0, 0, 0, 0
            )
        return PathEntry(
            path,
            KINDS[member.kind],
            member.mode,
            member.uid,
            member.gid,
            member.size,
            sums.get(member.link if member.kind == b"1" else member.path, ""),
            text(member.link),
            member.device,
            member.capability.hex(),
            owner.get(path, ""),
        )

    return tuple(entry(member) for member in layer.members)


def text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def owners(layer: CanonicalLayer) -> dict[str, str]:
    """Path -> package, for all but folders: from dpkg's file lists and the wheels' RECORDs that lie in the layer.

    A list that is larger than any real one, or cannot be read, names none.
    """
    names = {text(member.path): member for member in layer.members if member.kind != b"5"}
    links = Links({path: text(m.link) for path, m in names.items() if m.kind == b"2" and len(m.link) <= PATH})
    sources = {path: source for path in names if (source := source_of(path))}
    wanted = names.keys() | sources.values()  # a list may name much more than there is
    found: dict[str, str] = {}
    for path, member in names.items():
        if not is_sound(path):
            continue
        listed: Iterable[str] = ()
        if deb := DPKG.fullmatch(path):
            found[path] = owner = f"deb:{deb['name']}"
            if path.endswith(".list") and member.size <= LIST:
                listed = map(links.real, text(layer.read(member)).splitlines())
        elif wheel := DIST_INFO.fullmatch(path):
            found[path] = owner = f"wheel:{canonicalize_name(wheel['name'])}"
            if wheel["file"] == "RECORD" and member.size <= LIST:
                site = "/" + (wheel["site"] or "")
                listed = (posixpath.normpath(site + file).lstrip("/") for file in recorded(text(layer.read(member))))
        else:
            continue
        found.update((name, owner) for name in listed if name in wanted)
    found.update((path, found[source]) for path, source in sources.items() if source in found)
    return {path: found[path] for path in names if path in found}


def recorded(record: str) -> list[str]:
    """The files in a wheel's RECORD; none where it is no CSV."""
    try:
        return [row[0] for row in csv.reader(record.splitlines()) if row]
    except csv.Error:
        return []


def is_sound(path: str) -> bool:
    """That a path can be one of a real file system: of longer ones a few bytes could ask for hours of work."""
    return len(path) <= PATH and path.count("/") <= DEPTH


def source_of(path: str) -> str:
    """The module that a file of bytecode was compiled from; "" for other files."""
    if "/__pycache__/" not in path:
        return ""
    try:
        return importlib.util.source_from_cache(path)
    except ValueError:
        return ""


@dataclass
class Links:
    """A layer's symbolic links, path -> target. left: how many more are followed."""

    targets: Mapping[str, str]
    left: int = ALL_FOLLOWED

    def real(self, row: str) -> str:
        """A path of dpkg's with the folders that are links followed: /bin/sh is usr/bin/sh. "" for none."""
        path = row.strip("/")
        for _ in range(FOLLOWED):
            if not is_sound(path):
                return ""
            folder = next((folder for folder in above(path) if folder in self.targets), None)
            if folder is None:
                break
            if not self.left:
                return ""
            self.left -= 1
            target = posixpath.join("/", posixpath.dirname(folder), self.targets[folder])
            path = posixpath.normpath(target + path[len(folder) :]).lstrip("/")
        return path


def above(path: str) -> Iterator[str]:
    """The folders over a path, the nearest first, the root ("") last."""
    while path:
        path = path.rpartition("/")[0]
        yield path


def image_contents(layers: Sequence[Contents]) -> dict[str, tuple[int, PathEntry]]:
    """Path -> (number of its layer, entry) as a container sees it, sorted by path. layers: lowest first.

    Deletion marks work on the layers below theirs; what is not a folder hides a folder of its name with all below.
    """
    seen: dict[str, tuple[int, PathEntry]] = {}
    folders: set[str] = set()  # of the layers below; more than there still are does no harm
    for number, layer in enumerate(layers):
        own = {entry.path: (number, entry) for entry in layer if entry.kind not in ("whiteout", "opaque")}
        gone = {entry.path for entry in layer if entry.kind == "whiteout"}
        # A folder need not be named for what is in it to be there: it is one all the same.
        parents = parents_of(own)
        gone |= {folder for folder in parents if folder in seen and seen[folder][1].kind != "dir"}
        bare = {path for path, (_, entry) in own.items() if entry.kind != "dir" and path in folders}
        bare |= gone | {entry.path for entry in layer if entry.kind == "opaque"}
        if bare:
            seen = {path: value for path, value in seen.items() if path not in gone and bare.isdisjoint(above(path))}
        seen |= own
        folders |= parents
    return dict(sorted(seen.items()))


def parents_of(paths: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in paths:
        for folder in above(path):
            if folder in found:
                break
            found.add(folder)
    return found


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
        head, *lines = data.split(b"\n")
        del data
        if lines.pop() or max(map(len, [head, *lines])) > ROW:
            raise ValueError(f"it has no lines, or one of more than {ROW:,} bytes")
        if (found := json.loads(head)) != (wanted := {"contents": FORMAT, "entries": len(lines)}):
            raise ValueError(f"saw {found}, wanted {wanted}")
        batches = (lines[start : start + BATCH] for start in range(0, len(lines), BATCH))
        rows = (json.loads(b"[" + b",".join(batch) + b"]") for batch in batches)
        contents = tuple(parse_entry(values) for batch in rows for values in batch)
        if len(contents) != len(lines):
            raise ValueError("it has lines of more than one entry")
        return contents
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise IntegrityError(f"no listing of a layer's contents: {error}") from None


def parse_entry(values: Any) -> PathEntry:
    """ValueError or TypeError for what `row` would not write."""
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
