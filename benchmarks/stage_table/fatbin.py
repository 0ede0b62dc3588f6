"""Leave out of a library what one GPU does not load: zero the other machine code in its fat binaries.

A fat binary is a header (magic, version, header size, size) and entries, each a header and its payload: PTX (kind 1)
or a cubin (kind 2), for one architecture. What is zeroed keeps its place, so nothing else in the file has to change,
and compresses to nothing.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, CUBIN = 1, 2


@dataclass(frozen=True)
class Entry:
    """kind: PTX or CUBIN; architecture: 90 for sm_90; the payload is ``data[begin:end]``."""

    kind: int
    architecture: int
    begin: int
    end: int


def entries(data: bytes | bytearray) -> Iterator[Entry]:
    """All entries of all fat binaries in a file. What merely looks like a header is passed over."""
    at = 0
    while (at := data.find(MAGIC, at)) >= 0:
        version, header = struct.unpack_from("<HH", data, at + 4)
        (size,) = struct.unpack_from("<Q", data, at + 8)
        end = at + header + size
        if version != 1 or header != 16 or end > len(data):
            at += len(MAGIC)
            continue
        place = at + header
        while place + 48 <= end:
            kind, _, own = struct.unpack_from("<HHI", data, place)
            (payload,) = struct.unpack_from("<Q", data, place + 8)
            (architecture,) = struct.unpack_from("<I", data, place + 28)
            if kind not in (PTX, CUBIN) or own < 48 or place + own + payload > end:
                raise ValueError(
                    f"fat binary at {at:#x}: an entry at {place:#x} of kind {kind}, {own} + {payload} bytes"
                )
            yield Entry(kind, architecture, place + own, place + own + payload)
            place += own + payload
        at = end


Wanted = Callable[[bytes], bool]
"""Whether to keep the PTX or cubin whose payload this is, as it stands in the file."""


def slim(
    data: bytes, architecture: int, cubins: Wanted = lambda _: True, ptx: Wanted = lambda _: False
) -> tuple[bytes, Counter[tuple[int, int]]]:
    """The file with wanted cubins of one architecture and wanted PTX; and bytes kept, by kind and architecture."""
    out = bytearray(data)
    kept: Counter[tuple[int, int]] = Counter()
    for entry in entries(data):
        payload = data[entry.begin : entry.end]
        if entry.architecture == architecture and cubins(payload) if entry.kind == CUBIN else ptx(payload):
            kept[entry.kind, entry.architecture] += entry.end - entry.begin
        else:
            out[entry.begin : entry.end] = bytes(entry.end - entry.begin)
    return bytes(out), kept


def described(kept: Counter[tuple[int, int]]) -> str:
    """What `slim` kept, for a person."""
    names = {PTX: "PTX", CUBIN: "machine code"}
    parts = []
    for (kind, architecture), size in sorted(kept.items(), reverse=True):
        amount = f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
        parts.append(f"{amount} of {names[kind]} for sm_{architecture}")
    return ", ".join(parts) or "nothing for a GPU"
