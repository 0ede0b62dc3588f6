"""GPU code in a library: the containers of its .nv_fatbin sections, one for each compilation unit.

A container is a header (magic, version, header size, payload size) and entries one after another. An entry's header
has its kind, its own size, its payload's, the architecture and flags; payloads are not read. NVIDIA does not publish
the form: this is what nvcc 12 and 13 write, compared with real wheels in docs/inspection.md. No package of the Python
index reads it, and NVIDIA's cuobjdump is not free to pass on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

MAGIC = 0xBA55ED50
HEADER, ENTRY = 16, 64  # bytes; an entry's header has more where it holds a name or options
PTX, CUBIN = "ptx", "cubin"
KINDS = {1: PTX, 2: CUBIN}
SPECIFIC, FAMILY = 0x100000, 0x200000


class Code(NamedTuple):
    kind: str  # "ptx", "cubin" or "kind N"
    arch: int  # 121 for sm_121 or compute_121
    suffix: str  # "", "a" (this chip only) or "f" (its family)

    @property
    def name(self) -> str:
        return f"{'compute' if self.kind == PTX else 'sm'}_{self.arch}{self.suffix}"


Unit = tuple[Code, ...]


def read_units(file: BinaryIO, offset: int, size: int) -> Iterator[Unit]:
    """What each container of a section holds, sorted. ValueError for what is no container."""
    end = offset + size
    while offset + HEADER <= end:
        file.seek(offset)
        magic, _, head, length = struct.unpack("<IHHQ", file.read(HEADER))
        if not magic:  # padding: containers begin at multiples of 8
            offset += 8
            continue
        if magic != MAGIC or head < HEADER or offset + head + length > end:
            raise ValueError(f"no container of GPU code at byte {offset}")
        yield tuple(sorted(entries(file, offset + head, offset + head + length)))
        offset += head + length


def entries(file: BinaryIO, offset: int, end: int) -> Iterator[Code]:
    while offset + ENTRY <= end:
        file.seek(offset)
        row = file.read(ENTRY)
        kind, _, head, size = struct.unpack_from("<HHIQ", row)
        arch, flags = *struct.unpack_from("<I", row, 28), *struct.unpack_from("<Q", row, 40)
        if head < ENTRY or offset + head + size > end:
            raise ValueError(f"no entry of GPU code at byte {offset}")
        yield Code(KINDS.get(kind, f"kind {kind}"), arch, "a" if flags & SPECIFIC else "f" if flags & FAMILY else "")
        offset += head + size
