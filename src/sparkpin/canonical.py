"""One canonical tar for what an image layer holds, whichever engine wrote it, and when.

Members are sorted by path components, so that a directory precedes its content; every mtime is EPOCH; owners are
numbers; the first name of a hard-linked file carries the data. The headers are written here and not by `tarfile`, whose
bytes may change with Python's version. GNU format, because it stores any name as it is; PAX only where an extended
attribute needs it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import posixpath
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO, Self

from sparkpin.epoch import EPOCH
from sparkpin.errors import BuildError
from sparkpin.files import CHUNK

BLOCK = 512
ZEROS = b"\0" * BLOCK
END = 2 * ZEROS
STRIDE = 1 << 17  # bytes read at once where files are small
REGULAR, HARDLINK, DIRECTORY = b"0", b"1", b"5"
KINDS = (REGULAR, HARDLINK, b"2", b"3", b"4", DIRECTORY, b"6")
CAPABILITY = "SCHILY.xattr.security.capability"  # engines disagree on every other attribute

# What a build step leaves behind without meaning to: mount points, name files of the build container, caches.
# The root file system has these folders, and no layer above it has a say in them.
EPHEMERAL_FILES = frozenset(
    {".dockerenv", "etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/mtab", "var/cache/ldconfig/aux-cache"}
)
EPHEMERAL_FOLDERS = ("tmp", "var/tmp", "run", "proc", "sys", "dev", "root/.cache")
EPHEMERAL_NAMES = frozenset(name.encode() for name in (*EPHEMERAL_FILES, *EPHEMERAL_FOLDERS))
EPHEMERAL_PREFIXES = tuple(f"{name}/".encode() for name in EPHEMERAL_FOLDERS)


class Slice(io.RawIOBase):
    """A read-only window of `size` bytes at `start` of a seekable file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self.file, self.start, self.size, self.position = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size - self.position)
        self.file.seek(self.start + self.position)
        data = self.file.read(left if size is None or size < 0 else min(size, left))
        self.position += len(data)
        return data


@dataclass(frozen=True, slots=True)
class Member:
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


@dataclass(frozen=True)
class CanonicalLayer:
    """The members of a layer in their order. `size`: bytes of the tar that `chunks` yields."""

    source: BinaryIO
    members: tuple[Member, ...]
    size: int

    def chunks(self, sums: dict[bytes, str] | None = None) -> Iterator[bytes]:
        """The tar, in pieces of at most CHUNK bytes. sums: gets the SHA-256 (hex) of each file's data by its path."""
        small: list[bytes] = []  # joined: most headers and files are too short to be worth a call of their own
        waiting = 0
        for part in self.parts(sums):
            if waiting + len(part) > STRIDE:
                yield b"".join(small)
                small, waiting = [], 0
            if len(part) > STRIDE:
                yield part
            else:
                small.append(part)
                waiting += len(part)
        yield b"".join(small)

    def parts(self, sums: dict[bytes, str] | None) -> Iterator[bytes]:
        """Each header, each file's data, each file's padding, the end."""
        window = Window(self.source)
        for member in self.members:
            yield header(member)
            if member.kind == REGULAR:
                digest = hashlib.sha256()
                for data in window.read(member):
                    if sums is not None:
                        digest.update(data)
                    yield data
                yield ZEROS[: -member.size % BLOCK]
                if sums is not None:
                    sums[member.path] = digest.hexdigest()
        yield END

    def read(self, member: Member) -> bytes:
        """All of a file's data: for small files."""
        return b"".join(Window(self.source).read(member))


class Window:
    """Reads files' data from a source in long strides: members that follow each other cost no calls of their own."""

    def __init__(self, source: BinaryIO) -> None:
        self.source, self.start, self.data = source, 0, b""

    def read(self, member: Member) -> Iterator[bytes]:
        """A file's data, in pieces of at most CHUNK bytes."""
        position, end = member.offset, member.offset + member.size
        while position < end:
            if not self.start <= position < self.start + len(self.data):
                self.source.seek(position)
                self.start, self.data = position, self.source.read(min(CHUNK, max(end - position, STRIDE)))
                if not self.data:
                    raise BuildError(f"the layer ends within {member.path!r}", next_step="run the build again")
            piece = self.data[position - self.start : end - self.start]
            position += len(piece)
            yield piece


class QuickInfo(tarfile.TarInfo):
    """tarfile's, with a shorter way for the plain headers of most members: half of the time that a layer's take."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        # GNU's header has times where the other has the first part of a long name.
        whole = buf[257:265] == b"ustar  \0" or (buf[257:265] == b"ustar\x0000" and not buf[345])
        if whole and buf[156] in b"0125":
            with contextlib.suppress(ValueError):  # a number that is not plain octal
                mode, uid, gid, size, checksum = (
                    int(buf[start:end].rstrip(b"\0 "), 8)
                    for start, end in ((100, 108), (108, 116), (116, 124), (124, 136), (148, 156))
                )
                if sum(bytes(buf[:148] + b" " * 8 + buf[156:]).replace(b"\0", b"")) == checksum:
                    info = cls(buf[:100].partition(b"\0")[0].decode(encoding, errors))
                    info.type, info.mode, info.uid, info.gid, info.size = bytes(buf[156:157]), mode, uid, gid, size
                    info.linkname = buf[157:257].partition(b"\0")[0].decode(encoding, errors)
                    return info
        return super().frombuf(buf, encoding, errors)


def read_layer(source: BinaryIO, *, below: str = "", everything: bool = False) -> CanonicalLayer:
    """The canonical form of a layer's tar (seekable, uncompressed), read from its headers only.

    below: take only what lies under this folder of the tar, named from there.
    everything: keep what is ephemeral, too, as a root file system does.
    """
    found: dict[bytes, Member] = {}
    with tarfile.open(fileobj=source, mode="r:", encoding="utf-8", errors="surrogateescape", tarinfo=QuickInfo) as tar:
        for info in tar:
            path = clean(info.name)
            if below:
                if not path.startswith(below.encode() + b"/"):
                    continue
                path = path[len(below) + 1 :]
            if path:
                found[path] = convert(info, path, below)  # of two members with one name, the later wins, as in tar
    link_first(found, everything=everything)
    lasting = found if everything else keep_lasting(found)
    members = tuple(sorted(lasting.values(), key=lambda member: member.order))
    return CanonicalLayer(source, members, sum(map(stored_size, members)) + len(END))


def clean(name: str) -> bytes:
    return posixpath.normpath("/" + name).lstrip("/").encode("utf-8", "surrogateescape")


def convert(info: tarfile.TarInfo, path: bytes, below: str) -> Member:
    kind = REGULAR if info.type == tarfile.AREGTYPE else info.type
    if kind not in KINDS or info.issparse():  # no engine writes files with holes; their data would need unfolding
        raise BuildError(
            f"layer member {path!r} has tar type {kind!r}{', sparse' * info.issparse()}",
            next_step="report this engine's version",
        )
    if path.rsplit(b"/", 1)[-1].startswith(b".wh."):
        return Member(path, REGULAR, 0, 0, 0)  # a deletion mark: engines differ in its mode
    link = b""
    if kind == HARDLINK:
        link = clean(info.linkname)[len(below) + 1 if below else 0 :]
    elif info.issym():
        link = info.linkname.encode("utf-8", "surrogateescape")
    return Member(
        path,
        kind,
        0o777 if info.issym() else info.mode & 0o7777,
        info.uid,
        info.gid,
        info.size if kind == REGULAR else 0,
        link,
        (info.devmajor, info.devminor) if kind in (b"3", b"4") else (0, 0),
        info.pax_headers.get(CAPABILITY, "").encode("utf-8", "surrogateescape"),
        info.offset_data,
    )


def link_first(found: dict[bytes, Member], *, everything: bool = False) -> dict[bytes, Member]:
    """Let the first lasting name of each hard-linked file carry the data and the others point to it.

    everything: also ephemeral names last.
    """

    def carrier(member: Member) -> Member:
        seen = {member.path}
        while member.kind == HARDLINK and member.link in found and member.link not in seen:
            member = found[member.link]
            seen.add(member.path)
        return member

    names: dict[bytes, list[Member]] = {}
    for member in found.values():
        if member.kind == HARDLINK and (target := carrier(member)).kind != HARDLINK:
            names.setdefault(target.path, [target]).append(member)
    for path, group in names.items():
        first, *others = (
            sorted((m for m in group if everything or not is_ephemeral(m.path)), key=lambda m: m.order) or group
        )
        data = found[path]
        found[first.path] = replace(data, path=first.path)
        for other in others:
            found[other.path] = replace(
                data, path=other.path, kind=HARDLINK, size=0, link=first.path, capability=b"", device=(0, 0)
            )
    return found


def is_ephemeral(path: bytes) -> bool:
    return path in EPHEMERAL_NAMES or path.startswith(EPHEMERAL_PREFIXES)


def keep_lasting(found: dict[bytes, Member]) -> dict[bytes, Member]:
    """Without what is ephemeral, and without the folders that the layer names only because of it."""
    lasting = {path: member for path, member in found.items() if not is_ephemeral(path)}
    for folder in parents(found.keys() - lasting.keys()) - parents(lasting):
        lasting.pop(folder, None)
    return lasting


def parents(paths: Iterable[bytes]) -> set[bytes]:
    """All folders over the paths, without the root."""
    found: set[bytes] = set()
    for path in paths:
        while (path := path.rpartition(b"/")[0]) and path not in found:
            found.add(path)
    return found


def stored_size(member: Member) -> int:
    plain = not member.capability and len(member.path) < 100 and len(member.link) <= 100
    return (BLOCK if plain else len(header(member))) + member.size + -member.size % BLOCK


def header(member: Member) -> bytes:
    """The header blocks of one member, with the blocks for a long name, a long link or an attribute before it."""
    name = member.path + (b"/" if member.kind == DIRECTORY else b"")
    extra = b""
    if member.capability:
        records = {CAPABILITY.encode(): member.capability}
        if len(name) > 100:
            records[b"path"] = name
        body = b"".join(pax_record(key, value) for key, value in sorted(records.items()))
        extra = block(b"././@PaxHeader", b"x", size=len(body)) + padded(body)
    else:
        for kind, value in ((b"K", member.link), (b"L", name)):
            if len(value) > 100:
                extra += block(b"././@LongLink", kind, size=len(value) + 1) + padded(value + b"\0")
    return extra + block(
        name[:100],
        member.kind,
        mode=member.mode,
        uid=member.uid,
        gid=member.gid,
        size=member.size,
        mtime=EPOCH,
        link=member.link[:100],
        device=member.device if member.kind in (b"3", b"4") else None,
        pax=bool(member.capability),
    )


def block(
    name: bytes,
    kind: bytes,
    *,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    size: int = 0,
    mtime: int = 0,
    link: bytes = b"",
    device: tuple[int, int] | None = None,
    pax: bool = False,
) -> bytes:
    """One header block of 512 bytes."""
    owner, rest, total = frame(kind, mode, uid, gid, mtime, link, device, pax)
    length = number(size, 12)
    checksum = total + sum(name) + sum(length)
    return b"".join((name.ljust(100, b"\0"), owner, length, number(mtime, 12), b"%06o\0 " % checksum, rest))


@functools.lru_cache(1 << 12)
def frame(
    kind: bytes, mode: int, uid: int, gid: int, mtime: int, link: bytes, device: tuple[int, int] | None, pax: bool
) -> tuple[bytes, bytes, int]:
    """What the headers of many members share: mode and owners, all after the checksum, the sum of all the bytes."""
    owner = number(mode, 8) + number(uid, 8) + number(gid, 8)
    rest = [kind, link.ljust(100, b"\0"), b"ustar\x0000" if pax else b"ustar  \0", b"\0" * 64]
    rest += [b"".join(number(n, 8) for n in device) if device else b"\0" * 16, b"\0" * 167]
    after = b"".join(rest)
    return owner, after, sum(owner) + sum(number(mtime, 12)) + sum(b" " * 8) + sum(after)


@functools.lru_cache(1 << 12)
def number(value: int, width: int) -> bytes:
    """Octal, or GNU's base 256 where octal has no room (a file of 8 GiB and more, an owner above 2,097,151)."""
    if value < 8 ** (width - 1):
        return f"{value:0{width - 1}o}\0".encode()
    return b"\x80" + value.to_bytes(width - 1, "big")


def pax_record(key: bytes, value: bytes) -> bytes:
    """`length key=value\\n`, where the length counts itself."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + len(str(len(rest)))
    if length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


def padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % BLOCK)
