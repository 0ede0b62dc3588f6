"""The tables of an ELF file that decide whether it loads: what it needs, what it offers, its GPU code.

Only headers and tables are read. 64-bit little-endian files of x86-64 and aarch64; of other machines' files the machine
alone, and of a GPU's (.cubin) what it was compiled for.

Not by pyelftools 0.33: it takes 4 to 5 times as long for libraries and 70 times for a .cubin, of which a package may
have ten thousand, and it follows the lists of a hostile file without an end.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple

from sparkpin.smoke.inspect import fatbin
from sparkpin.smoke.inspect.reading import Reader

MAGIC = b"\x7fELF"
X86_64, AARCH64, CUDA = 62, 183, 190
MACHINES = {X86_64: "x86-64", AARCH64: "aarch64"}
NAMES, DYNAMIC, NOBITS, SYMBOLS, VERSIONS_HAD, VERSIONS_NEEDED = 3, 6, 8, 11, 0x6FFFFFFD, 0x6FFFFFFE
ENTRIES = 1 << 16  # rows of a list of versions or of the dynamic section
TABLES = {  # with the most bytes that they may have
    DYNAMIC: ("the dynamic section", 16 * ENTRIES),
    SYMBOLS: ("the dynamic symbols", 1 << 28),
    VERSIONS_HAD: ("the versions offered", 16 * ENTRIES),
    VERSIONS_NEEDED: ("the versions needed", 16 * ENTRIES),
}
NEEDED, SONAME, RPATH, RUNPATH = 1, 14, 15, 29
GLOBAL, WEAK, UNIQUE = 1, 2, 10
COMPILER_NOTE = b".note.nv.tkinfo"
FATBINS = (b".nv_fatbin", b"__nv_relfatbin")


@dataclass(frozen=True)
class Library:
    path: str
    machine: int  # e_machine
    dynamic: bool = False
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    undefined: frozenset[bytes] = frozenset()  # names of strong symbols
    defined: frozenset[bytes] = field(default=frozenset(), repr=False)
    versions_needed: Mapping[str, frozenset[str]] = field(default_factory=dict)  # file -> of it, "GLIBC_2.34"
    versions: frozenset[str] = frozenset()  # those that it offers
    code: tuple[tuple[fatbin.Unit, int], ...] = ()  # GPU code: how many compilation units of each composition


class Section(NamedTuple):
    name: int
    kind: int
    offset: int
    size: int
    link: int
    info: int


def read_library(file: BinaryIO, path: str) -> Library:
    """The tables of one ELF file. Raises InspectionError for one that is cut short or contradicts itself."""
    source = Reader(file, path)
    head = source.at(0, 64, "the ELF header")
    machine = int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")
    if head[4:6] != b"\x02\x01":
        if machine in MACHINES and head[4] == 2:
            raise source.wrong(f"byte order {head[5]}, wanted 1, little-endian")
        return Library(path, machine)
    if machine == CUDA:
        return Library(path, machine, code=(((cubin_code(source, head),), 1),))
    return of_sections(source, machine, head) if machine in MACHINES else Library(path, machine)


def of_sections(source: Reader, machine: int, head: bytes) -> Library:
    sections, titles = section_table(source, head)
    code: Counter[fatbin.Unit] = Counter()
    text: dict[int, list[str]] = {tag: [] for tag in (NEEDED, SONAME, RPATH, RUNPATH)}
    defined: set[bytes] = set()
    undefined: set[bytes] = set()
    wanted: dict[str, frozenset[str]] = {}
    offered: set[str] = set()
    kinds = [section.kind for section in sections if section.kind in TABLES]
    if len(kinds) > len(set(kinds)):  # many that are one and the same would take for ever
        raise source.wrong("several tables of a kind that there is one of")
    for section in sections:
        if section.kind != NOBITS and name_at(source, titles, section.name) in FATBINS:
            code.update(fatbin.read_units(source, section.offset, section.size))
        if section.kind not in TABLES:
            continue
        what, limit = TABLES[section.kind]
        rows = source.at(section.offset, section.size, what, limit=limit)
        if section.link >= len(sections) or sections[section.link].kind != NAMES:
            raise source.wrong(f"the names of {what} are in section {section.link}, which holds none")
        names = source.at(sections[section.link].offset, sections[section.link].size, "a table of names")
        if section.kind == DYNAMIC:
            for tag, value in struct.iter_unpack("<QQ", rows[: len(rows) // 16 * 16]):
                if tag == 0:
                    break
                if tag in text:
                    text[tag].append(name_at(source, names, value).decode("utf-8", "surrogateescape"))
        elif section.kind == SYMBOLS:
            for offset, info, visibility, where in struct.iter_unpack("<IBBH16x", rows[: len(rows) // 24 * 24]):
                if offset and not where and info >> 4 == GLOBAL:
                    undefined.add(name_at(source, names, offset))
                elif offset and where and info >> 4 in (GLOBAL, WEAK, UNIQUE) and visibility & 3 in (0, 3):
                    defined.add(name_at(source, names, offset))
        elif section.kind == VERSIONS_NEEDED:
            for place, (_, count, file, first, _) in linked(source, rows, "<HHIII", 0, section.info):
                one = {
                    name_at(source, names, name).decode("utf-8", "replace")
                    for _, (_, flags, _, name, _) in linked(source, rows, "<IHHII", place + first, count)
                    if not flags & 2  # weak
                }
                key = name_at(source, names, file).decode("utf-8", "surrogateescape")
                wanted[key] = wanted.get(key, frozenset()) | one
        else:  # of the names of each version the first is its own
            for place, (_, _, _, count, _, first, _) in linked(source, rows, "<HHHHIII", 0, section.info):
                for _, (name, _) in linked(source, rows, "<II", place + first, min(count, 1)):
                    offered.add(name_at(source, names, name).decode("utf-8", "replace"))
    return Library(
        source.name,
        machine,
        dynamic=DYNAMIC in kinds,
        soname=(text[SONAME] or [""])[0],
        needed=tuple(text[NEEDED]),
        rpath=folders(text[RPATH]),
        runpath=folders(text[RUNPATH]),
        undefined=frozenset(undefined),
        defined=frozenset(defined),
        versions_needed=wanted,
        versions=frozenset(offered),
        code=tuple(sorted(code.items())),
    )


def cubin_code(source: Reader, head: bytes) -> fatbin.Code:
    """What a .cubin file was compiled for, by its compiler's note; by its header where it has none."""
    sections, titles = section_table(source, head)
    for section in sections:
        if name_at(source, titles, section.name) == COMPILER_NOTE:
            note = source.at(section.offset, section.size, "the compiler's note", limit=1 << 16)
            if match := re.search(rb"-arch sm_(\d{2,3})([af]?)\b", note):
                return fatbin.Code(fatbin.CUBIN, int(match[1]), match[2].decode())
    return fatbin.cubin_code(head)


def folders(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(folder for path in paths for folder in path.split(":") if folder)


def section_table(source: Reader, head: bytes) -> tuple[list[Section], bytes]:
    """All sections and the table of their names; none of a file that was stripped of them."""
    offset, entry, count, names = struct.unpack_from("<Q10xHHH", head, 40)
    if not offset:
        return [], b""
    if entry != 64:
        raise source.wrong(f"sections of {entry} bytes each, wanted 64")
    form = "<II16xQQII16x"
    if not count or names == 0xFFFF:  # more than the header's 16 bits can say: the first section says it
        first = Section._make(struct.unpack(form, source.at(offset, 64, "the first section")))
        count, names = count or first.size, first.link if names == 0xFFFF else names
    sections = [
        Section._make(row) for row in struct.iter_unpack(form, source.at(offset, 64 * count, "the table of sections"))
    ]
    if names >= len(sections):
        raise source.wrong(f"section {names} holds the names, but there are {len(sections)}")
    return sections, source.at(sections[names].offset, sections[names].size, "the names of sections")


def name_at(source: Reader, names: bytes, offset: int) -> bytes:
    end = names.find(b"\0", offset)
    if offset >= len(names) or end < 0:
        raise source.wrong(f"a name at byte {offset} of a table of {len(names)}")
    return names[offset:end]


def linked(source: Reader, table: bytes, form: str, place: int, count: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Rows with their places: the last field of each says how far on the next one is."""
    for _ in range(count):
        source.rows += 1
        if source.rows > ENTRIES or place + struct.calcsize(form) > len(table):
            raise source.wrong(f"row {source.rows} of its versions, at byte {place} of a table of {len(table)}")
        row = struct.unpack_from(form, table, place)
        yield place, row
        if not row[-1]:
            break
        place += row[-1]
