"""The tables of an ELF file that decide whether it loads: what it needs, what it offers, its GPU code.

Only headers and tables are read. 64-bit little-endian files of x86-64 and aarch64; of other machines' files the machine
alone, and of a GPU's (.cubin) what it was compiled for.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from sparkpin.smoke.inspect import fatbin
from sparkpin.smoke.inspect.reading import Reader

MAGIC = b"\x7fELF"
X86_64, AARCH64, CUDA = 62, 183, 190
MACHINES = {X86_64: "x86-64", AARCH64: "aarch64"}
OTHER_MACHINES = {3: "x86", 21: "ppc64", 22: "s390x", 40: "arm", CUDA: "cuda", 224: "amdgpu", 243: "riscv", 247: "bpf"}
SYMBOLS, DYNAMIC, NOBITS, NAMES, VERSIONS_HAD, VERSIONS_NEEDED = 11, 6, 8, 3, 0x6FFFFFFD, 0x6FFFFFFE
NEEDED, SONAME, RPATH, RUNPATH = 1, 14, 15, 29
GLOBAL, WEAK, UNIQUE = 1, 2, 10
SHARED = 3
COMPILER_NOTE = b".note.nv.tkinfo"
FATBINS = (b".nv_fatbin", b"__nv_relfatbin")
ENTRIES = 1 << 16  # of the dynamic section and of lists of versions


@dataclass(frozen=True)
class Library:
    """machine: e_machine. undefined: names of strong undefined symbols. versions_needed: file -> versions wanted of it
    ("GLIBC_2.34"); versions: those it offers. code: GPU code, how many compilation units of each composition.
    """

    path: str
    machine: int
    dynamic: bool = False
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    undefined: frozenset[bytes] = frozenset()
    defined: frozenset[bytes] = field(default=frozenset(), repr=False)
    versions_needed: Mapping[str, frozenset[str]] = field(default_factory=dict)
    versions: frozenset[str] = frozenset()
    code: tuple[tuple[fatbin.Unit, int], ...] = ()

    @property
    def machine_name(self) -> str:
        return MACHINES.get(self.machine) or OTHER_MACHINES.get(self.machine) or f"machine {self.machine}"


class Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry: int


def read_library(file: BinaryIO, path: str) -> Library:
    """The tables of one file. Raises InspectionError for one that is cut short or contradicts itself."""
    source = Reader(file, path)
    head = source.at(0, 64 if source.size >= 64 else 20, "the ELF header")
    if head[:4] != MAGIC:
        raise source.wrong(f"begins with {head[:4]!r}, wanted {MAGIC!r}: not an ELF file")
    machine = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    if head[4:6] != b"\x02\x01" or len(head) < 64:
        if machine in MACHINES and head[4] == 2:
            raise source.wrong(f"{len(head)} bytes of header, byte order {head[5]}; wanted 64, little-endian")
        return Library(path, machine)
    if machine == CUDA:
        return Library(path, machine, code=(((cubin_code(source, head),), 1),))
    if machine not in MACHINES:
        return Library(path, machine)
    return of_sections(source, machine, head)


def of_sections(source: Reader, machine: int, head: bytes) -> Library:
    sections, names = section_table(source, head)
    code: Counter[fatbin.Unit] = Counter()
    for section in sections:
        if section.kind != NOBITS and name_at(source, names, section.name) in FATBINS:
            code.update(fatbin.read_units(source, section.offset, section.size))
    library = Library(source.name, machine, code=tuple(sorted(code.items())))
    dynamic = next((section for section in sections if section.kind == DYNAMIC), None)
    if dynamic is None:
        return library
    strings = linked(source, sections, dynamic)
    text: dict[int, list[str]] = {tag: [] for tag in (NEEDED, SONAME, RPATH, RUNPATH)}
    rows = source.at(dynamic.offset, dynamic.size // 16 * 16, "the dynamic section", limit=16 * ENTRIES)
    for tag, value in struct.iter_unpack("<QQ", rows):
        if tag == 0:
            break
        if tag in text:
            text[tag].append(name_at(source, strings, value).decode("utf-8", "surrogateescape"))
    defined, undefined = symbols(source, sections)
    return Library(
        source.name,
        machine,
        dynamic=True,
        soname=(text[SONAME] or [""])[0],
        needed=tuple(text[NEEDED]),
        rpath=folders(text[RPATH]),
        runpath=folders(text[RUNPATH]),
        undefined=frozenset(undefined),
        defined=frozenset(defined),
        versions_needed=versions_needed(source, sections),
        versions=frozenset(versions_had(source, sections)),
        code=library.code,
    )


def cubin_code(source: Reader, head: bytes) -> fatbin.Code:
    """What a .cubin file was compiled for, by its compiler's note; by its header where it has none."""
    sections, names = section_table(source, head)
    for section in sections:
        if name_at(source, names, section.name) == COMPILER_NOTE:
            note = source.at(section.offset, section.size, "the compiler's note", limit=1 << 16)
            if match := re.search(rb"-arch sm_(\d{2,3})([af]?)\b", note):
                return fatbin.Code(fatbin.CUBIN, int(match[1]), match[2].decode())
    return fatbin.cubin_code(head)


def folders(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(folder for path in paths for folder in path.split(":") if folder)


def section_table(source: Reader, head: bytes) -> tuple[list[Section], bytes]:
    """All sections and the table of their names; none of a file that was stripped of them."""
    offset, _, _, _, _, entry, count, names = struct.unpack_from("<QIHHHHHH", head, 40)
    if not offset:
        return [], b""
    if entry != 64:
        raise source.wrong(f"sections of {entry} bytes each, wanted 64")
    if not count or names == 0xFFFF:  # more than the header's 16 bits can say: the first section says it
        first = Section._make(struct.unpack("<IIQQQQIIQQ", source.at(offset, 64, "the first section")))
        count, names = count or first.size, first.link if names == 0xFFFF else names
    table = source.at(offset, 64 * count, "the table of sections")
    sections = [Section._make(row) for row in struct.iter_unpack("<IIQQQQIIQQ", table)]
    if names >= len(sections):
        raise source.wrong(f"section {names} holds the names, but there are {len(sections)}")
    return sections, source.at(sections[names].offset, sections[names].size, "the names of sections")


def linked(source: Reader, sections: Sequence[Section], section: Section) -> bytes:
    """The names that a section's rows point into."""
    if section.link >= len(sections) or sections[section.link].kind != NAMES:
        raise source.wrong(f"a table's names are in section {section.link}, which holds none")
    return source.at(sections[section.link].offset, sections[section.link].size, "a table of names")


def name_at(source: Reader, names: bytes, offset: int) -> bytes:
    end = names.find(b"\0", offset)
    if offset >= len(names) or end < 0:
        raise source.wrong(f"a name at byte {offset} of a table of {len(names)}")
    return names[offset:end]


def symbols(source: Reader, sections: Sequence[Section]) -> tuple[set[bytes], set[bytes]]:
    """Names that the dynamic symbol table defines for others, and those it wants without a way around (not weak)."""
    defined: set[bytes] = set()
    undefined: set[bytes] = set()
    for section in sections:
        if section.kind != SYMBOLS:
            continue
        names = linked(source, sections, section)
        rows = source.at(section.offset, section.size // 24 * 24, "the dynamic symbols")
        for offset, info, visibility, where, _, _ in struct.iter_unpack("<IBBHQQ", rows):
            if not offset:
                continue
            binding = info >> 4
            if not where:
                if binding == GLOBAL:
                    undefined.add(name_at(source, names, offset))
            elif binding in (GLOBAL, WEAK, UNIQUE) and visibility & 3 in (0, 3):
                defined.add(name_at(source, names, offset))
    return defined, undefined


def versions_needed(source: Reader, sections: Sequence[Section]) -> dict[str, frozenset[str]]:
    """.gnu.version_r: file -> names of the versions wanted of it."""
    found: dict[str, frozenset[str]] = {}
    for section in sections:
        if section.kind != VERSIONS_NEEDED:
            continue
        names = linked(source, sections, section)
        rows = source.at(section.offset, section.size, "the versions needed", limit=16 * ENTRIES)
        position, told = 0, 0
        for _ in range(min(section.info, ENTRIES)):
            _, count, file, first, following = unpack(source, "<HHIII", rows, position)
            wanted, place = set(), position + first
            told += count
            if told > ENTRIES:
                raise source.wrong(f"more than {ENTRIES} versions needed")
            for _ in range(count):
                _, flags, _, name, step = unpack(source, "<IHHII", rows, place)
                if not flags & 2:  # weak
                    wanted.add(name_at(source, names, name).decode("utf-8", "replace"))
                if not step:
                    break
                place += step
            key = name_at(source, names, file).decode("utf-8", "surrogateescape")
            found[key] = found.get(key, frozenset()) | wanted
            if not following:
                break
            position += following
    return found


def versions_had(source: Reader, sections: Sequence[Section]) -> set[str]:
    """.gnu.version_d: the versions that the file offers; the first is its own name."""
    found: set[str] = set()
    for section in sections:
        if section.kind != VERSIONS_HAD:
            continue
        names = linked(source, sections, section)
        rows = source.at(section.offset, section.size, "the versions offered", limit=16 * ENTRIES)
        position = 0
        for _ in range(min(section.info, ENTRIES)):
            _, _, _, count, _, first, following = unpack(source, "<HHHHIII", rows, position)
            if count:
                name, _ = unpack(source, "<II", rows, position + first)
                found.add(name_at(source, names, name).decode("utf-8", "replace"))
            if not following:
                break
            position += following
    return found


def unpack(source: Reader, form: str, data: bytes, offset: int) -> tuple[int, ...]:
    if offset + struct.calcsize(form) > len(data):
        raise source.wrong(f"a row at byte {offset} of a table of {len(data)}")
    return struct.unpack_from(form, data, offset)
