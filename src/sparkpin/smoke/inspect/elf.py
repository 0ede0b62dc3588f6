"""The tables of an ELF file that decide whether it loads: what it needs, what it offers, its GPU code.

pyelftools reads the file; the symbol tables, of which PyTorch's have a hundred thousand rows, are unpacked here because
that takes it minutes. Files come from locked packages: one that is made to mislead may keep it busy for ever.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection

from sparkpin.core.errors import InspectionError
from sparkpin.smoke.inspect import fatbin

MAGIC = b"\x7fELF"
X86_64, AARCH64 = 62, 183
MACHINES = {X86_64: "x86-64", AARCH64: "aarch64"}
GLOBAL, WEAK, UNIQUE = 1, 2, 10
FATBINS = (".nv_fatbin", "__nv_relfatbin")
DAMAGED = (ELFError, struct.error, ValueError, LookupError, TypeError, AttributeError, AssertionError)


@dataclass(frozen=True)
class Library:
    path: str
    machine: int  # e_machine
    dynamic: bool = False
    soname: str = ""
    needed: tuple[str, ...] = ()
    undefined: frozenset[bytes] = frozenset()  # names of strong symbols
    defined: frozenset[bytes] = field(default=frozenset(), repr=False)
    versions_needed: Mapping[str, frozenset[str]] = field(default_factory=dict)  # file -> of it, "GLIBC_2.34"
    versions: frozenset[str] = frozenset()  # those that it offers
    code: tuple[tuple[fatbin.Unit, int], ...] = ()  # GPU code: how many compilation units of each composition


def read_library(file: BinaryIO, path: str) -> Library:
    """The tables of one ELF file: of a file for another machine than MACHINES the machine alone. Raises InspectionError
    for one that is cut short or contradicts itself."""
    try:
        file.seek(18)
        machine = int.from_bytes(file.read(2), "little")
        if machine not in MACHINES:
            return Library(path, machine)
        return Library(path, machine, **tables(ELFFile(file), file))
    except DAMAGED as error:
        raise InspectionError(
            f"{path} is damaged: {type(error).__name__}: {error}", next_step="fetch the package again"
        ) from None


def tables(elf: Any, file: BinaryIO) -> dict[str, Any]:
    """The fields of a Library."""
    found: dict[str, Any] = {}
    code = Counter[fatbin.Unit]()
    for section in elf.iter_sections():
        kind = section["sh_type"]
        if section.name in FATBINS and kind != "SHT_NOBITS":
            code.update(fatbin.read_units(file, section["sh_offset"], section["sh_size"]))
        elif isinstance(section, DynamicSection):
            found |= dynamic(section)
        elif kind == "SHT_DYNSYM":
            found |= symbols(section.data(), elf.get_section(section["sh_link"]).data())
        elif isinstance(section, GNUVerNeedSection):
            found["versions_needed"] = {
                need.name: frozenset(one.name for one in versions if not one["vna_flags"] & 2)  # 2: weak
                for need, versions in section.iter_versions()
            }
        elif isinstance(section, GNUVerDefSection):  # of the names of each version the first is its own
            found["versions"] = frozenset(next(names).name for _, names in section.iter_versions())
    return found | {"code": tuple(sorted(code.items()))}


def dynamic(section: Any) -> dict[str, Any]:
    needed = tuple(tag.needed for tag in section.iter_tags("DT_NEEDED"))
    return {"dynamic": True, "needed": needed, "soname": "".join(tag.soname for tag in section.iter_tags("DT_SONAME"))}


def symbols(rows: bytes, names: bytes) -> dict[str, Any]:
    defined, undefined = set[bytes](), set[bytes]()
    for offset, info, visibility, where in struct.iter_unpack("<IBBH16x", rows):
        if offset and not where and info >> 4 == GLOBAL:
            undefined.add(names[offset : names.index(b"\0", offset)])
        elif offset and where and info >> 4 in (GLOBAL, WEAK, UNIQUE) and visibility & 3 in (0, 3):
            defined.add(names[offset : names.index(b"\0", offset)])
    return {"defined": frozenset(defined), "undefined": frozenset(undefined)}
