"""benchmarks/stage_table: what is left out of a library that is carried to a GPU."""

from __future__ import annotations

import struct
import sys

import pytest

from checkout import PROJECT

sys.path.append(str(PROJECT / "benchmarks/stage_table"))

import fatbin


def entry(kind: int, architecture: int, payload: bytes) -> bytes:
    header = struct.pack("<HHIQ", kind, 0x101, 64, len(payload)) + bytes(12) + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + payload


def binary(*parts: bytes) -> bytes:
    body = b"".join(parts)
    return fatbin.MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


LIBRARY = b"".join(
    [
        b"ELF" + fatbin.MAGIC + b"no header, but its first four bytes",
        binary(entry(fatbin.CUBIN, 90, b"keep" * 8), entry(fatbin.CUBIN, 120, b"drop" * 8)),
        b"between",
        binary(entry(fatbin.PTX, 80, b"text" * 8)),
        b"end",
    ]
)


@pytest.mark.parametrize("ptx", [False, True])
def test_one_architecture_is_kept_in_place(ptx: bool) -> None:
    data, kept = fatbin.slim(LIBRARY, 90, ptx)
    wanted = LIBRARY.replace(b"drop" * 8, bytes(32))
    assert data == (wanted if ptx else wanted.replace(b"text" * 8, bytes(32)))
    assert kept == ({(fatbin.CUBIN, 90): 32, (fatbin.PTX, 80): 32} if ptx else {(fatbin.CUBIN, 90): 32})


def test_an_entry_that_reaches_too_far_stops() -> None:
    broken = binary(entry(fatbin.CUBIN, 90, b"x" * 32)[:-8])
    with pytest.raises(ValueError, match="fat binary at 0x0: an entry at 0x10 of kind 2"):
        fatbin.slim(broken, 90, False)
