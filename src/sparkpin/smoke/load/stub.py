"""A stand-in for NVIDIA's driver library: every function that an image wants of it, each of which says "no device".

The file is written byte by byte after the System V ABI, so it needs no compiler, is the same every time and can be
made for either machine on both. It is mounted into a container, never put into an image. (LIEF 1.0 cannot make a file
from nothing, only change one, and takes 12 MB.) It has no sections: a loader reads segments alone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence

from sparkpin.smoke.inspect.elf import AARCH64, X86_64
from sparkpin.smoke.inspect.linking import Linker
from sparkpin.smoke.inspect.scan import ImageFacts

SONAME = "libcuda.so.1"
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
DRIVER = re.compile(rb"cu[A-Z][A-Za-z0-9_]*")  # cuInit; cublasCreate and cudaMalloc are of libraries in the image
CODE = {
    X86_64: b"\xb8" + struct.pack("<I", NO_DEVICE) + b"\xc3",  # mov eax, 100; ret
    AARCH64: struct.pack("<II", 0x52800000 | NO_DEVICE << 5, 0xD65F03C0),  # mov w0, #100; ret
}
PAGE = 0x10000  # the largest that aarch64 has
HEADER, SEGMENT, SYMBOL = 64, 56, 24


def wanted_symbols(facts: ImageFacts, machine: int) -> list[str]:
    """Functions of the driver that libraries of the image want and nothing which they load defines, sorted."""
    linker, found = Linker(facts, ()), set[bytes]()
    for library in facts.libraries.values():
        wanted = {name for name in library.undefined if DRIVER.fullmatch(name)} if library.machine == machine else None
        if wanted:
            found |= wanted.difference(*(other.defined for other in linker.closure(library)))
    return sorted(name.decode() for name in found)


def is_wanted(facts: ImageFacts, machine: int, symbols: Sequence[str]) -> bool:
    """Whether a library of the image needs the driver's, be it for no function. symbols: from `wanted_symbols`."""
    libraries = [library for library in facts.libraries.values() if library.machine == machine]
    return bool(symbols) or any(SONAME in library.needed for library in libraries)


def stub(names: Sequence[str], machine: int, soname: str = SONAME) -> bytes:
    """A shared object for `machine` that defines these functions. All are the same few bytes of code."""
    strings, places = string_table([soname, *names])
    text = HEADER + 4 * SEGMENT
    code = CODE[machine]
    symbols_at = aligned(text + len(code))
    symbols = bytes(SYMBOL) + b"".join(
        struct.pack("<IBBHQQ", place, 0x12, 0, 4, text, len(code)) for place in places[1:]
    )
    strings_at = symbols_at + len(symbols)
    table_at = aligned(strings_at + len(strings))
    order = [*range(1, len(names) + 1), 0]
    table = struct.pack(f"<{len(names) + 4}I", 1, len(names) + 1, order[0], 0, *order[1:])  # DT_HASH: all in one bucket
    read_only = table_at + len(table)
    dynamic_at = aligned(read_only)
    rows = ((14, places[0]), (4, table_at), (5, strings_at), (6, symbols_at), (10, len(strings)), (11, SYMBOL), (0, 0))
    dynamic = b"".join(struct.pack("<QQ", tag, value) for tag, value in rows)  # SONAME, HASH, STRTAB, SYMTAB, sizes
    address = dynamic_at + PAGE  # on a page of its own, for the loader writes there
    segments = (
        struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, read_only, read_only, PAGE),  # LOAD, read and execute
        struct.pack("<IIQQQQQQ", 1, 6, dynamic_at, address, address, len(dynamic), len(dynamic), PAGE),  # read, write
        struct.pack("<IIQQQQQQ", 2, 6, dynamic_at, address, address, len(dynamic), len(dynamic), 8),  # DYNAMIC
        struct.pack("<IIQQQQQQ", 0x6474E551, 6, 0, 0, 0, 0, 0, 16),  # GNU_STACK: not to be executed
    )
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQ", 3, machine, 1, 0, HEADER, 0)
    head += struct.pack("<IHHHHHH", 0, HEADER, SEGMENT, len(segments), 0, 0, 0)
    file = bytearray(head + b"".join(segments) + code)
    for place, part in ((symbols_at, symbols), (strings_at, strings), (table_at, table), (dynamic_at, dynamic)):
        file += bytes(place - len(file)) + part
    return bytes(file)


def aligned(offset: int) -> int:
    return offset + -offset % 8


def string_table(texts: Iterable[str]) -> tuple[bytes, list[int]]:
    """The table, and where each text begins in it."""
    data, places = b"\0", []
    for text in texts:
        places.append(len(data))
        data += text.encode() + b"\0"
    return data, places
