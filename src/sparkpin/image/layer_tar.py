"""One canonical tar for what an image layer holds, whichever engine wrote it, and when.

Members are sorted by path components, so that a directory precedes its content; every mtime is EPOCH; owners are
numbers; the first name of a hard-linked file carries the data. The headers are written here and not by `tarfile`, whose
bytes may change with Python's version. GNU format, because it stores any name as it is; PAX only where an extended
attribute needs it.
"""

from __future__ import annotations

import functools
import io
import posixpath
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from sparkpin.core.epoch import EPOCH
from sparkpin.core.errors import BuildError
from sparkpin.core.files import CHUNK

BLOCK = 512
ZEROS = b"\0" * BLOCK
END = 2 * ZEROS
ROOM = CHUNK + (1 << 14)  # bytes of a piece and of the last member's headers
STRIDE = 1 << 17  # bytes read at once for headers
REGULAR, HARDLINK, SYMLINK, DIRECTORY = b"0", b"1", b"2", b"5"
DEVICES = (b"3", b"4")
KINDS = (REGULAR, HARDLINK, SYMLINK, *DEVICES, DIRECTORY, b"6")
EXTRA = (b"L", b"K", b"x")  # tell of the member after them
TOLD = 1 << 20  # bytes of such headers before one member
SIZES, OWNERS = 1 << 62, 1 << 32  # above a member's size, and above a user's or a device's number
GNU, PAX = b"ustar  \0", b"ustar\x0000"
LONG = {b"L": b"path", b"K": b"linkpath"}
# name; mode, uid, gid; size; (mtime); checksum; kind; link; magic; (names of owners); device; prefix of the name
split_header = struct.Struct("100s24s12s12x8s1s100s8s64x8s8s155s12x").unpack
AGAIN = "run the build again"
CAPABILITY = b"SCHILY.xattr.security.capability"  # engines disagree on every other attribute

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

    def chunks(self) -> Iterator[bytes]:
        """All of it. BuildError where the file ends before."""
        self.position = 0
        while chunk := self.read(CHUNK):
            yield chunk
        if left := self.size - self.position:
            raise BuildError(f"a layer of {self.size} bytes ends {left} bytes too soon", next_step=AGAIN)

    def readinto(self, view: memoryview | bytearray) -> int:  # type: ignore[override]
        self.file.seek(self.start + self.position)
        got: int = self.file.readinto(memoryview(view)[: max(0, self.size - self.position)])  # type: ignore[attr-defined]
        self.position += got
        return got


class Member(NamedTuple):  # made ten thousand times for a layer: a dataclass takes three times as long
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
class TarSpan:
    """A piece of a canonical tar, planned before it is read.

    written: (start, bytes) of headers and padding; copied: [start, end, offset in the source] of stretches to read, in
    which what is written lies, too: a layer in canonical order differs from its source in the headers only, and many
    files come with one call. files: (member, start, end) of each file's data.
    """

    size: int = 0
    written: list[tuple[int, bytes]] = field(default_factory=list)
    copied: list[list[int]] = field(default_factory=list)
    files: list[tuple[Member, int, int]] = field(default_factory=list)

    def write(self, data: bytes) -> None:
        self.written.append((self.size, data))
        self.size += len(data)

    def copy(self, member: Member, begin: int, end: int) -> None:
        """Bytes `begin` to `end` of a file."""
        start, offset = self.size, member.offset + begin
        self.size += end - begin
        self.files.append((member, start, self.size))
        if self.copied:
            last = self.copied[-1]
            if offset - last[2] == start - last[0]:
                last[1] = self.size
                return
        self.copied.append([start, self.size, offset])

    def read(self, source: BinaryIO, buffer: bytearray | None = None) -> memoryview:
        """The piece, in the buffer if it has room there."""
        view = memoryview(buffer if buffer and len(buffer) >= self.size else bytearray(self.size))[: self.size]
        for start, end, offset in self.copied:
            source.seek(offset)
            needed = offset + end - start
            while start < end:
                if not (got := source.readinto(view[start:end])):  # type: ignore[attr-defined]
                    raise BuildError(f"the layer ends before byte {needed:,}", next_step=AGAIN)
                start += got
        for start, piece in self.written:
            view[start : start + len(piece)] = piece
        return view


@dataclass(frozen=True)
class CanonicalLayer:
    """The members of a layer in their order. `size`: bytes of the tar that `chunks` yields."""

    source: BinaryIO
    members: tuple[Member, ...]
    size: int

    def chunks(self, buffer: Callable[[], bytearray | None] = lambda: None) -> Iterator[memoryview]:
        """The tar, in pieces of about CHUNK bytes. buffer: is asked for the place of each; ROOM bytes are enough."""
        return (span.read(self.source, buffer()) for span in self.spans())

    def spans(self) -> Iterator[TarSpan]:
        span, rest = TarSpan(), 0
        for member in self.members:
            if span.size >= CHUNK:
                yield span
                span = TarSpan()
            span.write(ZEROS[:rest] + header(member))
            rest = -member.size % BLOCK
            if member.kind == REGULAR:
                begin = 0
                while begin + (room := CHUNK - span.size) < member.size:
                    if room > 0:
                        span.copy(member, begin, begin + room)
                        begin += room
                    yield span
                    span = TarSpan()
                span.copy(member, begin, member.size)
        span.write(ZEROS[:rest] + END)
        yield span

    def read(self, member: Member) -> bytes:
        """All of a file's data: for small files."""
        span = TarSpan()
        span.copy(member, 0, member.size)
        return bytes(span.read(self.source))


def read_layer(source: BinaryIO, *, everything: bool = False, folder: bytes = b"") -> CanonicalLayer:
    """The canonical form of a layer's tar (seekable, uncompressed), read from its headers only.

    everything: keep what is ephemeral, too, as a root file system does. folder: of the tar, that is the layer's root.
    """
    members = read_members(source)
    found = link_first(members_below(folder, members) if folder else members, everything=everything)
    return canonical_layer(source, (found if everything else keep_lasting(found)).values())


def read_layer_of(path: Path, write: Callable[[], object], *, folder: bytes = b"") -> CanonicalLayer:
    """Call `write`, which lets another process write a tar to `path`; the tar's canonical form, its file open."""
    path.unlink(missing_ok=True)  # an older one would be read instead
    write()
    source = path.open("rb", buffering=0)
    try:
        return read_layer(source, folder=folder)
    except BaseException:
        source.close()
        raise


def members_below(folder: bytes, found: dict[bytes, Member]) -> dict[bytes, Member]:
    """By their paths in the folder. BuildError where one of them is a hard link to a file beside it."""
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


def read_members(source: BinaryIO) -> dict[bytes, Member]:
    """All members of a tar by path: of two with one path, the later, as in tar. Reads ustar, GNU's form and PAX.

    Not with `tarfile`, which takes five times as long. BuildError for damage, and for what no engine writes.
    """
    found: dict[bytes, Member] = {}
    window = Window(source)
    told: dict[bytes, bytes] = {}  # by the headers before a member's own, by PAX's names
    position = before = 0  # before: bytes of those headers
    while (head := window.read(position, BLOCK, may_end=True)) and head != ZEROS:
        name, numbers, size_text, checksum, kind, link, magic, major, minor, prefix = split_header(head)
        try:
            mode, uid, gid = plain_numbers(numbers)
            size = int(size_text.rstrip(b"\0 "), 8)
            plain = size >= 0 and byte_sum(head) == whole_sum(checksum)
        except ValueError:
            plain = False
        if not plain:
            mode, uid, gid, size = odd_numbers(head, position)
        position += BLOCK
        name, target, device, capability, holes = name.partition(b"\0")[0], b"", (0, 0), b"", False
        if prefix[0] and magic != GNU:  # GNU has times there
            name = prefix.partition(b"\0")[0] + b"/" + name
        if kind in EXTRA:
            if (before := before + BLOCK + size) > TOLD:
                raise BuildError(f"the layer has {before:,} bytes of headers before one member", next_step=AGAIN)
            data = window.read(position, size)
            told |= pax_records(data) if kind == b"x" else {LONG[kind]: data.partition(b"\0")[0]}
            position += size + -size % BLOCK
            continue
        if before:
            name, link = told.get(b"path", name), told.get(b"linkpath", link)
            size = natural("size", told.get(b"size", size), SIZES)
            uid, gid = (natural("owner", told.get(key, n), OWNERS) for key, n in ((b"uid", uid), (b"gid", gid)))
            capability, holes = told.get(CAPABILITY, b""), any(key.startswith(b"GNU.sparse.") for key in told)
            told, before = {}, 0
        path = clean(name)
        if kind == b"\0":
            kind = DIRECTORY if name.endswith(b"/") else REGULAR
        if kind not in KINDS or holes:
            raise BuildError(
                f"layer member {path!r} has tar type {kind!r}{' and holes (sparse)' * (kind in (b'S', REGULAR))}",
                next_step="report this engine's version",
            )
        if kind != REGULAR:
            size, target = 0, link.partition(b"\0")[0]
            if kind == HARDLINK:
                target = clean(target)
            elif kind == SYMLINK:
                mode = 0o777
            elif kind in DEVICES:
                device = device_number(major), device_number(minor)
        if b".wh." in path and path.rpartition(b"/")[2].startswith(b".wh."):
            found[path] = Member(path, REGULAR, 0, 0, 0)  # a deletion mark: engines differ in its mode
        elif path:
            found[path] = Member(path, kind, mode, uid, gid, size, target, device, capability, position)
        position += size + -size % BLOCK
    return found


class Window:
    """Reads a source forward in long strides: headers that follow each other cost no calls of their own."""

    def __init__(self, source: BinaryIO) -> None:
        self.source, self.start, self.data = source, 0, b""

    def read(self, position: int, size: int, *, may_end: bool = False) -> bytes:
        """may_end: nothing where the source ends just before, else a BuildError."""
        begin = position - self.start
        if begin + size > len(self.data):
            self.source.seek(position)
            self.start, self.data, begin = position, self.source.read(max(size, STRIDE)), 0
        data = self.data[begin : begin + size]
        if len(data) < size and not (may_end and not data):
            raise BuildError(f"the layer ends within byte {position:,} and {position + size:,}", next_step=AGAIN)
        return data


@functools.lru_cache(1 << 10)
def plain_numbers(text: bytes) -> tuple[int, int, int]:
    """mode, uid, gid; few members have ones of their own. ValueError for another form than plain octal."""
    mode, uid, gid = (int(text[start : start + 8].rstrip(b"\0 "), 8) for start in (0, 8, 16))
    if min(uid, gid) < 0:
        raise ValueError
    return mode & 0o7777, uid, gid


@functools.lru_cache(1 << 13)
def whole_sum(checksum: bytes) -> int:
    """The sum of a header with this checksum, which is that of the header with spaces in the checksum's place."""
    return int(checksum.rstrip(b"\0 "), 8) + sum(checksum) - 8 * 32


def byte_sum(data: bytes) -> int:
    """The sum of at most 256 bytes, or of 512 of which half are 0: Adler's lower half is it, below 65,521."""
    return zlib.adler32(data, 0) & 0xFFFF


def odd_numbers(head: bytes, position: int) -> tuple[int, int, int, int]:
    """mode, uid, gid, size: numbers in GNU's binary form, checksums of signed bytes, and what else there was."""
    try:
        info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise BuildError(f"the layer has no tar header at byte {position:,}: {error}", next_step=AGAIN) from None
    uid, gid = natural("owner", info.uid, OWNERS), natural("owner", info.gid, OWNERS)
    return info.mode & 0o7777, uid, gid, natural("size", info.size, SIZES)


def device_number(field: bytes) -> int:
    try:
        return natural("device number", tarfile.nti(field), OWNERS)  # type: ignore[attr-defined]
    except tarfile.HeaderError:
        raise BuildError(f"the layer has a device number {field!r}", next_step=AGAIN) from None


def natural(what: str, value: int | bytes, limit: int) -> int:
    """The number, which is 0 or more and below the limit."""
    try:
        if 0 <= (found := int(value)) < limit:
            return found
    except ValueError:
        pass
    raise BuildError(f"the layer has a member whose {what} is {str(value)[:40]}", next_step=AGAIN)


def pax_records(data: bytes) -> dict[bytes, bytes]:
    """`length key=value\\n` each, where the length counts itself."""
    found: dict[bytes, bytes] = {}
    position = 0
    while position < len(data):
        length = data[position : position + 20].partition(b" ")[0]
        end = position + int(length) if length.isdigit() else 0
        if not position + len(length) < end <= len(data):
            begin = data[position : position + 40]
            raise BuildError(f"the layer has PAX records that begin {begin!r}", next_step=AGAIN)
        key, _, value = data[position + len(length) + 1 : end - 1].partition(b"=")
        found[key] = value
        position = end
    return found


def clean(name: bytes) -> bytes:
    if b"//" in name or b"/." in name or name[:1] in (b".", b"/"):
        return posixpath.normpath(b"/" + name).lstrip(b"/")
    return name.rstrip(b"/")


def link_first(found: dict[bytes, Member], *, everything: bool = False) -> dict[bytes, Member]:
    """Let the first lasting name of each hard-linked file carry the data and the others point to it.

    everything: also ephemeral names last.
    """

    ends: dict[bytes, Member] = {}  # by the names on the way there, so that a long chain is walked once

    def carrier(member: Member) -> Member:
        seen: set[bytes] = set()
        while member.kind == HARDLINK and member.link in found and member.path not in seen:
            seen.add(member.path)
            member = ends.get(member.path) or found[member.link]
        ends.update(dict.fromkeys(seen, member))
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
        found[first.path] = data._replace(path=first.path)
        for other in others:
            found[other.path] = data._replace(
                path=other.path, kind=HARDLINK, size=0, link=first.path, capability=b"", device=(0, 0)
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
    path, kind, mode, uid, gid, size, link, device, capability, _ = member
    name, extra = path + b"/" * (kind == DIRECTORY), b""
    if capability:
        records = {CAPABILITY: capability}
        if len(name) > 100:
            records[b"path"] = name
        body = b"".join(pax_record(key, value) for key, value in sorted(records.items()))
        extra = block(b"././@PaxHeader", b"x", size=len(body)) + padded(body)
    elif len(name) > 100 or len(link) > 100:
        for extra_kind, value in ((b"K", link), (b"L", name)):
            if len(value) > 100:
                extra += block(b"././@LongLink", extra_kind, size=len(value) + 1) + padded(value + b"\0")
    shown = device if kind in DEVICES else None
    return extra + block(name[:100], kind, mode, uid, gid, size, EPOCH, link[:100], shown, bool(capability))


def block(
    name: bytes,
    kind: bytes,
    mode: int = 0o644,
    uid: int = 0,
    gid: int = 0,
    size: int = 0,
    mtime: int = 0,
    link: bytes = b"",
    device: tuple[int, int] | None = None,
    pax: bool = False,
) -> bytes:
    owner, times, rest, total = frame(kind, mode, uid, gid, mtime, link, device, pax)
    length = number(size, 12)
    return b"%b%b%b%b%06o\0 %b" % (name.ljust(100, b"\0"), owner, length, times, total + byte_sum(name + length), rest)


@functools.lru_cache(1 << 12)
def frame(
    kind: bytes, mode: int, uid: int, gid: int, mtime: int, link: bytes, device: tuple[int, int] | None, pax: bool
) -> tuple[bytes, bytes, bytes, int]:
    """What the headers of many members share: mode and owners, time, all after the checksum, the sum of the bytes."""
    owner = number(mode, 8) + number(uid, 8) + number(gid, 8)
    rest = [kind, link.ljust(100, b"\0"), PAX if pax else GNU, b"\0" * 64]
    rest += [b"".join(number(n, 8) for n in device) if device else b"\0" * 16, b"\0" * 167]
    after = b"".join(rest)
    times = number(mtime, 12)
    return owner, times, after, sum(owner) + sum(times) + sum(b" " * 8) + sum(after)


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
