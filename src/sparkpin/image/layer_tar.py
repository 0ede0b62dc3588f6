"""One canonical tar for what an image layer holds, whichever engine wrote it, and when.

Members are sorted by path components, so that a directory precedes its content; every mtime is EPOCH; owners are
numbers; the first name of a hard-linked file carries the data. GNU format, because it stores any name as it is; PAX
only where an extended attribute needs it. `tarfile` reads and writes the headers: its bytes are the same from Python
3.11 to 3.13, and the tests compare them with literal digests.
"""

from __future__ import annotations

import hashlib
import itertools
import posixpath
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import AnyStr, BinaryIO, NamedTuple, Self

from sparkpin.core.errors import BuildError
from sparkpin.core.files import EPOCH
from sparkpin.image.archive import AGAIN, BLOCK, END, Slice, file_header, padded, padding

REGULAR, HARDLINK, SYMLINK, DIRECTORY = tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE
DEVICES = (tarfile.CHRTYPE, tarfile.BLKTYPE)
KINDS = (REGULAR, tarfile.AREGTYPE, HARDLINK, SYMLINK, *DEVICES, DIRECTORY, tarfile.FIFOTYPE)
ABOUT_NEXT = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE)  # headers about the next member
NAME = 100  # bytes of a name or link that a header has room for
MAX_HEADER = 1 << 20  # bytes of a header about the next member
MAX_SIZE, MAX_NUMBER = 1 << 62, 1 << 32  # a member's size, and a user's or a device's number, are below
GNU, PAX = b"ustar  \0", b"ustar\x0000"
TEXT = ("utf-8", "surrogateescape")  # names as text, which keeps bytes that are not UTF-8
CAPABILITY = "SCHILY.xattr.security.capability"  # engines disagree on every other attribute

# What a build step leaves behind without meaning to: mount points, name files of the build container, caches.
# The root file system has these folders, and no layer above it has a say in them.
FOLDERS = (b"tmp", b"var/tmp", b"run", b"proc", b"sys", b"dev", b"root/.cache")
OF_ENGINES = (b".dockerenv", b"etc/hostname", b"etc/hosts", b"etc/resolv.conf", b"etc/mtab")
EPHEMERAL = frozenset({*FOLDERS, *OF_ENGINES, b"var/cache/ldconfig/aux-cache"})
EPHEMERAL_PREFIXES = tuple(name + b"/" for name in FOLDERS)


class Member(NamedTuple):
    """path, link: bytes without a slash at either end; offset: where the data lies in the source."""

    path: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    size: int = 0
    link: bytes = b""
    device: tuple[int, int] = (0, 0)
    capability: bytes = b""
    offset: int = 0

    @property
    def order(self) -> bytes:
        return self.path.replace(b"/", b"\0")  # sorts as the list of the path's components does


@dataclass
class CanonicalLayer:
    """The members of a layer in their order. size: bytes of the tar that `chunks` yields.

    sums: SHA-256 (hex) of each file's data by path, once `chunks` has gone through: the listing needs them, and the
    gigabytes are read only once.
    """

    source: BinaryIO
    members: tuple[Member, ...]
    size: int
    sums: dict[bytes, str] = field(default_factory=dict)

    def chunks(self) -> Iterator[bytes]:
        """The tar, in pieces of very different sizes."""
        for member in self.members:
            yield header(member)
            digest = hashlib.sha256()
            for chunk in self.data(member).chunks():
                digest.update(chunk)
                yield chunk
            yield padding(member.size)
            if member.kind == REGULAR:
                self.sums[member.path] = digest.hexdigest()
        yield END

    def data(self, member: Member) -> Slice:
        return Slice(self.source, member.offset, member.size)


def read_layer(source: BinaryIO, *, everything: bool = False, folder: bytes = b"") -> CanonicalLayer:
    """The canonical form of a layer's tar (seekable, uncompressed), read from its headers only.

    everything: keep what is ephemeral, too, as a root file system does. folder: of the tar, that is the layer's root.
    """
    members = read_members(source)
    found = link_first(members_below(folder, members) if folder else members, everything=everything)
    return canonical_layer(source, (found if everything else keep_lasting(found)).values())


def members_below(folder: bytes, found: dict[bytes, Member]) -> dict[bytes, Member]:
    """By their paths in the folder. BuildError where one of them is a hard link to a file outside of it."""
    root = folder + b"/"
    inside = {}
    for path, member in found.items():
        if not path.startswith(root):
            continue
        if member.kind == HARDLINK:
            if not member.link.startswith(root):
                raise BuildError(f"{path!r} is a hard link to {member.link!r}, outside of the layer", next_step=AGAIN)
            member = member._replace(link=member.link[len(root) :])
        inside[path[len(root) :]] = member._replace(path=path[len(root) :])
    return inside


def canonical_layer(source: BinaryIO, members: Iterable[Member]) -> CanonicalLayer:
    ordered = tuple(sorted(members, key=lambda member: member.order))
    return CanonicalLayer(source, ordered, sum(map(stored_size, ordered)) + len(END))


class LayerHeader(tarfile.TarInfo):
    """Refuses what no engine writes; `tarfile` itself takes a damaged header for the end of the tar."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        try:
            found = super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if any(buf):
                raise damaged(str(error)) from None
            raise  # zeros, or nothing: the end
        if found.type not in (*KINDS, *ABOUT_NEXT):
            raise damaged(f"{found.name!r} has tar type {found.type!r}")
        if found.type in ABOUT_NEXT and not 0 <= found.size <= MAX_HEADER:
            raise damaged(f"{found.size} bytes of headers before one member")
        if buf[257:265] == GNU:  # it has times where others have the start of the name
            found.name = buf[:NAME].partition(b"\0")[0].decode(encoding, errors)
        return found


def damaged(why: str) -> BuildError:
    return BuildError(f"the layer's tar is damaged, or has what no engine writes: {why}", next_step=AGAIN)


def read_members(source: BinaryIO) -> dict[bytes, Member]:
    """All members of a tar by path: of two with one path, the later, as in tar. Reads ustar, GNU's form and PAX.

    BuildError for damage, and for what no engine writes: the layers of a bundle are a stranger's.
    """
    found: dict[bytes, Member] = {}
    source.seek(0)
    try:
        with tarfile.open(fileobj=source, mode="r:", tarinfo=LayerHeader, encoding=TEXT[0], errors=TEXT[1]) as tar:
            for info in tar:
                if (member := member_of(info)).path:
                    found[member.path] = member
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise damaged(str(error)) from None
    return found


def member_of(info: tarfile.TarInfo) -> Member:
    path, link = clean(info.name.encode(*TEXT)), info.linkname.encode(*TEXT)
    kind = REGULAR if info.type == tarfile.AREGTYPE else info.type
    written = [info.pax_headers.get(key, "0") for key in ("size", "uid", "gid")]  # tarfile takes other text for 0
    numbers = (info.uid, info.gid, info.devmajor, info.devminor)
    if not all(map(str.isdecimal, written)) or not all(0 <= n < MAX_NUMBER for n in numbers):
        raise damaged(f"member {path!r} has the numbers {written}, {numbers}")
    if info.issparse() or not 0 <= info.size < MAX_SIZE:
        raise damaged(f"member {path!r} has holes (is sparse), or a size of {info.size}")
    if path.rpartition(b"/")[2].startswith(b".wh."):
        return Member(path, REGULAR, 0, 0, 0)  # a deletion mark: engines differ in its mode
    mode, size = 0o777 if kind == SYMLINK else info.mode & 0o7777, info.size if kind == REGULAR else 0
    target = clean(link) if kind == HARDLINK else link if kind == SYMLINK else b""
    device = (info.devmajor, info.devminor) if kind in DEVICES else (0, 0)
    capability = info.pax_headers.get(CAPABILITY, "").encode(*TEXT)
    return Member(path, kind, mode, info.uid, info.gid, size, target, device, capability, info.offset_data)


def clean(name: bytes) -> bytes:
    return posixpath.normpath(b"/" + name).lstrip(b"/")


def link_first(found: dict[bytes, Member], *, everything: bool = False) -> dict[bytes, Member]:
    """Let the first lasting name of each hard-linked file carry the data and the others point to it.

    everything: also ephemeral names last.
    """

    ends: dict[bytes, Member] = {}  # by the names on the way there, so that a long chain is walked once

    def carrier(member: Member) -> Member:
        names: set[bytes] = set()
        while member.kind == HARDLINK and member.link in found and member.path not in names:
            names.add(member.path)
            member = ends.get(member.path) or found[member.link]
        ends.update(dict.fromkeys(names, member))
        return member

    names: dict[bytes, list[Member]] = {}
    for member in found.values():
        if member.kind == HARDLINK and (target := carrier(member)).kind != HARDLINK:
            names.setdefault(target.path, [target]).append(member)
    for path, group in names.items():
        lasting = [member for member in group if everything or not is_ephemeral(member.path)] or group
        first, *others = sorted(lasting, key=lambda member: member.order)
        data = found[path]
        found[first.path] = data._replace(path=first.path)
        link = data._replace(kind=HARDLINK, size=0, link=first.path, capability=b"", device=(0, 0))
        found |= {other.path: link._replace(path=other.path) for other in others}
    return found


def is_ephemeral(path: bytes) -> bool:
    return path in EPHEMERAL or path.startswith(EPHEMERAL_PREFIXES)


def keep_lasting(found: dict[bytes, Member]) -> dict[bytes, Member]:
    """Without what is ephemeral, and without the folders that the layer names only because of it."""
    lasting = {path: member for path, member in found.items() if not is_ephemeral(path)}
    for folder in parents(found.keys() - lasting.keys()) - parents(lasting):
        lasting.pop(folder, None)
    return lasting


def parents(paths: Iterable[AnyStr]) -> set[AnyStr]:
    """All folders over these paths, the root ("") among them."""
    found: set[AnyStr] = set()
    for path in paths:
        while path and (path := posixpath.dirname(path)) not in found:
            found.add(path)
    return found


def stored_size(member: Member) -> int:
    plain = not member.capability and len(member.path) < NAME and len(member.link) <= NAME
    return (BLOCK if plain else len(header(member))) + member.size + len(padding(member.size))


def header(member: Member) -> bytes:
    """The header blocks of one member, with the blocks for a long name, a long link or an attribute before it."""
    name = member.path + b"/" * (member.kind == DIRECTORY)
    info = tarfile.TarInfo(name[:NAME].decode(*TEXT))
    info.type, info.linkname = member.kind, member.link[:NAME].decode(*TEXT)
    info.mode, info.uid, info.gid, info.size, info.mtime = *member[2:6], EPOCH
    info.devmajor, info.devminor = member.device
    block = info.tobuf(tarfile.GNU_FORMAT, *TEXT)[-BLOCK:]
    if not member.capability:
        long = ((tarfile.GNUTYPE_LONGLINK, member.link), (tarfile.GNUTYPE_LONGNAME, name))
        return b"".join(header_before("LongLink", k, text + b"\0") for k, text in long if len(text) > NAME) + block
    records = {CAPABILITY.encode(): member.capability}
    if len(name) > NAME:
        records[b"path"] = name
    body = b"".join(pax_record(key, value) for key, value in sorted(records.items()))
    checksum = int(block[148:154], 8) + sum(PAX) - sum(GNU)
    block = b"%b%06o\0 %b%b%b" % (block[:148], checksum, block[156:257], PAX, block[265:])
    return header_before("PaxHeader", tarfile.XHDTYPE, body) + block


def header_before(name: str, kind: bytes, body: bytes) -> bytes:
    return file_header(f"././@{name}", len(body), kind) + padded(body)


def pax_record(key: bytes, value: bytes) -> bytes:
    """`length key=value\\n`, where the length counts itself."""
    rest = b" %b=%b\n" % (key, value)
    return b"%d%b" % (next(n for n in itertools.count(len(rest)) if n == len(rest) + len(str(n))), rest)
