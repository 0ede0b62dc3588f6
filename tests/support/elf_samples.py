"""Small ELF files and containers of GPU code, byte by byte after the System V ABI and what nvcc writes.

A writer of its own, so that a mistake in the reader's idea of the form shows.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sparkpin.smoke.inspect.scan import ImageFacts, scan
from sparkpin.smoke.inspect.tree import in_folder

AARCH64, X86_64 = 183, 62
PTX, CUBIN = 1, 2
PLAIN, SPECIFIC, FAMILY, ZSTD = 0x11, 0x100011, 0x1200011, 0x8000


class Strings:
    def __init__(self) -> None:
        self.data = b"\0"

    def add(self, text: str) -> int:
        place = len(self.data)
        self.data += text.encode() + b"\0"
        return place


def entry(kind: int, arch: int, flags: int = PLAIN, payload: bytes = b"\x7fELF....") -> bytes:
    """One entry of a container: 64 bytes of header (112 for a family's, as nvcc 13 writes it), padded payload."""
    size = 112 if flags & 0x1000000 else 64
    payload += b"\0" * (-len(payload) % 8)
    head = struct.pack("<HHIQ", kind, 0x101, size, len(payload)) + struct.pack("<QII", 0, 0x80008, arch)
    head += struct.pack("<QQQQ", 0, flags, 0, 0)[: size - len(head)]
    return head.ljust(size, b"\0") + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


@dataclass
class Elf:
    """undefined, weak, defined: symbols. versions_needed: file -> names; versions: those offered."""

    machine: int = AARCH64
    soname: str = ""
    needed: Sequence[str] = ()
    undefined: Iterable[str] = ()
    weak: Iterable[str] = ()
    defined: Iterable[str] = ()
    versions_needed: Mapping[str, Sequence[str]] = field(default_factory=dict)
    versions: Sequence[str] = ()
    gpu: bytes = b""
    gpu_section: str = ".nv_fatbin"

    def __bytes__(self) -> bytes:
        strings = Strings()
        symbols = bytes(24)
        for names, info, where in ((self.undefined, 0x10, 0), (self.weak, 0x20, 0), (self.defined, 0x12, 1)):
            for name in names:
                symbols += struct.pack("<IBBHQQ", strings.add(name), info, 0, where, 0, 0)
        dynamic = b"".join(struct.pack("<QQ", 1, strings.add(name)) for name in self.needed)
        for tag, text in ((14, self.soname),):
            dynamic += struct.pack("<QQ", tag, strings.add(text)) if text else b""
        dynamic += bytes(16)
        needs = b""
        for number, (file, names) in enumerate(self.versions_needed.items(), 1):
            size = 16 + 16 * len(names)
            last = number == len(self.versions_needed)
            needs += struct.pack("<HHIII", 1, len(names), strings.add(file), 16, 0 if last else size)
            for place, name in enumerate(names, 1):
                needs += struct.pack("<IHHII", 0, 0, 2, strings.add(name), 16 if place < len(names) else 0)
        has = b""
        for number, name in enumerate(self.versions, 1):
            last = number == len(self.versions)
            has += struct.pack("<HHHHIII", 1, 0, number, 1, 0, 20, 0 if last else 28)
            has += struct.pack("<II", strings.add(name), 0)
        sections = [  # name, type, data, link, info
            (".dynstr", 3, strings.data, 0, 0),
            (".dynsym", 11, symbols, 1, 1),
            (".dynamic", 6, dynamic, 1, 0),
        ]
        if needs:
            sections.append((".gnu.version_r", 0x6FFFFFFE, needs, 1, len(self.versions_needed)))
        if has:
            sections.append((".gnu.version_d", 0x6FFFFFFD, has, 1, len(self.versions)))
        if self.gpu:
            sections.append((self.gpu_section, 1, self.gpu, 0, 0))
        return file_of(self.machine, sections)


def file_of(machine: int, sections: Sequence[tuple[str, int, bytes, int, int]]) -> bytes:
    names, body = Strings(), b""
    table = bytes(64)
    numbers = [names.add(name) for name, *_ in sections] + [names.add(".shstrtab")]
    for number, (_, kind, data, link, info) in zip(numbers, [*sections, ("", 3, names.data, 0, 0)], strict=True):
        rows = {11: 24, 6: 16}.get(kind, 0)
        table += struct.pack("<IIQQQQIIQQ", number, kind, 0, 0, 64 + len(body), len(data), link, info, 8, rows)
        body += data + b"\0" * (-len(data) % 8)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHIQQQ", 3, machine, 1, 0, 0, 64 + len(body))
    head += struct.pack("<IHHHHHH", 0, 64, 56, 0, 64, len(sections) + 2, len(sections) + 1)
    return head + body + table


GPU = bytes(Elf(gpu=container(entry(CUBIN, 120, PLAIN))))


def put(folder: Path, files: Mapping[str, bytes | Elf | str]) -> Path:
    """Write them: paths below the folder, and content; "-> x" is a link to x. Returns the folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str) and content.startswith("-> "):
            path.symlink_to(content[3:])
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else bytes(content))
            path.chmod(0o755)
    return folder


def facts_of(folder: Path) -> ImageFacts:
    return scan(in_folder(folder))


SAMPLE_ROOT: dict[str, bytes | Elf | str] = {
    "usr/lib/libreal.so.1": Elf(soname="libreal.so.1", defined=["one"]),
    "usr/lib/libreal.so": "-> libreal.so.1",
    "opt/app/module.so": GPU,
    "opt/app/broken.so": GPU[:200],
    "opt/app/script.sh": "#!/bin/sh\necho not a library\n",
    "opt/site-packages/made-1.dist-info/METADATA": "Name: made\nVersion: 1\n",
}


def server_files(cuda: str | None = "13.0") -> dict[str, bytes | Elf | str]:
    """What says that vLLM and PyTorch are there."""
    return {
        "opt/site-packages/vllm-0.33.0.dist-info/METADATA": "Name: vllm\nVersion: 0.33.0\n",
        "opt/site-packages/torch/version.py": f"__version__ = '2.14.0'\ncuda = {cuda!r}\n",
    }
