"""GPU code in a library: the containers of its .nv_fatbin sections, one for each compilation unit.

A container is a header (magic, version, header size, payload size) and entries one after another. An entry's header
says kind, its own size, its payload's, the architecture and flags; payloads are not read. NVIDIA does not publish the
form: this is what nvcc 12 and 13 write, held against real wheels in docs/inspection.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from sparkpin.smoke.inspect.reading import Reader

MAGIC = b"\x50\xed\x55\xba"
HEADER, ENTRY = 16, 64  # bytes; an entry's header has more where it holds a name or options
PTX, CUBIN = "ptx", "cubin"
KINDS = {1: PTX, 2: CUBIN}
SPECIFIC, FAMILY = 0x100000, 0x200000
COMPRESSED = 0x2000 | 0x8000  # LZ4, Zstandard
STEP = 1 << 12
LONGEST = 1 << 16  # bytes of an entry's header
UNITS, IN_UNIT = 1 << 20, 1 << 12
OLD_ABI, SPECIFIC_OLD, SPECIFIC_NEW = 7, 0x800, 0x8


class Code(NamedTuple):
    kind: str  # "ptx", "cubin" or "kind N"
    arch: int  # 121 for sm_121 or compute_121
    suffix: str  # "", "a" (this chip only) or "f" (its family)
    compressed: bool = False

    @property
    def name(self) -> str:
        return f"{'compute' if self.kind == PTX else 'sm'}_{self.arch}{self.suffix}"


Unit = tuple[Code, ...]


def read_units(source: Reader, offset: int, size: int) -> Iterator[Unit]:
    """What each container of a section holds, sorted."""
    end, position, count = offset + size, offset, 0
    if end > source.size:
        raise source.wrong(f"GPU code at bytes {offset} to {end}, but the file ends at {source.size}")
    while (position := next_container(source, position, end)) < end:
        count += 1
        version, head, length = struct.unpack("<HHQ", source.at(position + 4, HEADER - 4, "a container of GPU code"))
        last = position + head + length
        if head < HEADER or last > end or count > UNITS:
            raise source.wrong(f"a container of GPU code at {position}, version {version}, ends at {last}, after {end}")
        yield tuple(sorted(entries(source, position + head, last)))
        position = last


def next_container(source: Reader, position: int, end: int) -> int:
    """Where the next one begins: zeros lie between them. `end` when there is none."""
    while position < end:
        piece = source.at(position, min(STEP, end - position), "GPU code")
        filled = len(piece) - len(piece.lstrip(b"\0"))
        if filled < len(piece):
            if piece[filled : filled + 4] != MAGIC[: len(piece) - filled]:
                raise source.wrong(f"no container of GPU code at {position + filled}: {piece[filled : filled + 4]!r}")
            return position + filled
        position += len(piece)
    return end


def entries(source: Reader, position: int, end: int) -> Iterator[Code]:
    for _ in range(IN_UNIT):
        if position + ENTRY > end:
            return
        row = source.at(position, ENTRY, "an entry of GPU code")
        kind, _, head, size = struct.unpack_from("<HHIQ", row)
        arch, flags = *struct.unpack_from("<I", row, 28), *struct.unpack_from("<Q", row, 40)
        if not ENTRY <= head <= LONGEST or position + head + size > end:
            raise source.wrong(f"an entry of GPU code at {position}: header of {head} bytes, payload of {size}")
        suffix = "a" if flags & SPECIFIC else "f" if flags & FAMILY else ""
        yield Code(KINDS.get(kind, f"kind {kind}"), arch, suffix, bool(flags & COMPRESSED))
        position += head + size
    raise source.wrong(f"more than {IN_UNIT} entries in one container of GPU code")


def cubin_code(head: bytes) -> Code:
    """What a .cubin, a GPU's own ELF file, was compiled for, as far as its first 64 bytes tell.

    nvcc 13.0 does not mark "a" and "f" there; the compilers of flashinfer-cubin's files without a note mark "a".
    """
    flags = int.from_bytes(head[48:52], "little")
    if head[8] <= OLD_ABI:
        return Code(CUBIN, flags & 0xFF, "a" if flags & SPECIFIC_OLD else "")
    return Code(CUBIN, flags >> 8 & 0xFF, "a" if flags & SPECIFIC_NEW else "")
