"""Reading ELF tables and GPU code: made-up files, the machine's own libraries, and files that lie."""

from __future__ import annotations

import ctypes
import io
import lzma
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from elf_samples import AARCH64, CUBIN, FAMILY, PLAIN, PTX, SPECIFIC, ZSTD, Elf, container, cubin, entry
from places import DATA

from sparkpin.core.errors import InspectionError
from sparkpin.smoke.inspect.elf import CUDA, MACHINES, Library, read_library
from sparkpin.smoke.inspect.fatbin import Code

DATA = DATA / "inspection"
SAMPLE = Elf(
    soname="libsample.so.1",
    needed=["libtorch.so", "libcudart.so.13"],
    runpath="$ORIGIN/../lib:/opt/lib",
    undefined=["_ZN3c104cuda12device_countEv"],
    weak=["__gmon_start__"],
    defined=["sample", "sample_two"],
    versions_needed={"libc.so.6": ["GLIBC_2.17", "GLIBC_2.34"], "libm.so.6": ["GLIBC_2.29"]},
    versions=["libsample.so.1", "SAMPLE_1.0"],
)


def changed(section: int, place: int, form: str, change: Callable[[int], int]) -> bytes:
    """The sample, but for one number in the row of a section."""
    data = bytearray(bytes(SAMPLE))
    row = struct.unpack_from("<Q", data, 40)[0] + 64 * section
    struct.pack_into(form, data, row + place, change(struct.unpack_from(form, data, row + place)[0]))
    return bytes(data)


def read(data: bytes) -> Library:
    return read_library(io.BytesIO(data), "lib/sample.so")


def test_tables_of_a_library() -> None:
    assert read(bytes(SAMPLE)) == Library(
        "lib/sample.so",
        AARCH64,
        dynamic=True,
        soname="libsample.so.1",
        needed=("libtorch.so", "libcudart.so.13"),
        runpath=("$ORIGIN/../lib", "/opt/lib"),
        undefined=frozenset({b"_ZN3c104cuda12device_countEv"}),
        defined=frozenset({b"sample", b"sample_two"}),
        versions_needed={"libc.so.6": frozenset({"GLIBC_2.17", "GLIBC_2.34"}), "libm.so.6": frozenset({"GLIBC_2.29"})},
        versions=frozenset({"libsample.so.1", "SAMPLE_1.0"}),
    )


def test_real_libraries_of_this_machine() -> None:
    """The C library that this Python has loaded: what the reader says it defines, the loader finds."""
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so.6" in line)
    with open(path, "rb") as file:
        library = read_library(file, path)
    assert library.soname == "libc.so.6"
    assert MACHINES[library.machine] == os.uname().machine.replace("_", "-")
    assert {"GLIBC_2.17", "GLIBC_2.34"} <= library.versions
    loaded = ctypes.CDLL(path)
    functions = [name.decode() for name in sorted(library.defined) if name.decode().startswith("str")]
    assert len(functions) > 30
    assert all(hasattr(loaded, name) for name in functions)
    assert b"no_such_function" not in library.defined


def test_gpu_code_of_each_unit() -> None:
    units = [
        container(entry(CUBIN, 90, SPECIFIC), entry(CUBIN, 120, FAMILY | ZSTD), entry(PTX, 80, PLAIN | ZSTD)),
        bytes(48),  # padding, as the linker leaves it
        container(entry(CUBIN, 121, SPECIFIC)),
        container(entry(CUBIN, 121, SPECIFIC)),
        container(entry(8, 120)),
    ]
    library = read(bytes(Elf(gpu=b"".join(units))))
    assert dict(library.code) == {
        (Code("cubin", 90, "a"), Code("cubin", 120, "f", True), Code("ptx", 80, "", True)): 1,
        (Code("cubin", 121, "a"),): 2,
        (Code("kind 8", 120, ""),): 1,
    }
    assert [code.name for code in library.code[1][0]] in (["sm_121a"], ["sm_90a", "sm_120f", "compute_80"])
    relocatable = read(bytes(Elf(gpu=container(entry(CUBIN, 120)), gpu_section="__nv_relfatbin")))
    assert relocatable.code == (((Code("cubin", 120, ""),), 1),)
    assert read(bytes(Elf(gpu=container(entry(CUBIN, 120)), gpu_section=".data"))).code == ()


@pytest.mark.parametrize(
    ("data", "name"),
    [
        # e_flags of flashinfer-cubin 0.6.8.post1's files, and of FlashAttention 2 in vLLM 0.33.0's aarch64 wheel.
        (cubin(0x6006402), "sm_100"),
        (cubin(0x600670A), "sm_103a"),
        (cubin(0x1000640C), "sm_100a"),
        (cubin(0x6005004), "sm_80"),
        (cubin(0x5A055A, abi=7), "sm_90"),
        (cubin(0x5A0D5A, abi=7), "sm_90a"),
    ],
)
def test_cubin_files(data: bytes, name: str) -> None:
    library = read(data)
    assert library.machine == CUDA
    assert [code.name for unit, _ in library.code for code in unit] == [name]


@pytest.mark.parametrize("file", ["kernels.so", "kernels.o"])
def test_gpu_code_as_nvcc_writes_it(file: str) -> None:
    ((unit, count),) = read(lzma.decompress((DATA / f"{file}.xz").read_bytes())).code
    assert count == 1
    assert sorted(code.name for code in unit) == [
        "compute_120f", "compute_80", "sm_120", "sm_120a", "sm_121a", "sm_121f", "sm_90a",
    ]  # fmt: skip


@pytest.mark.parametrize("arch", ["120", "120a", "121f"])
def test_a_cubin_file_as_nvcc_writes_it(arch: str) -> None:
    library = read(lzma.decompress((DATA / f"kernels-{arch}.cubin.xz").read_bytes()))
    assert [code.name for unit, _ in library.code for code in unit] == [f"sm_{arch}"]


def test_files_of_other_machines_say_which() -> None:
    assert read(bytes(Elf(machine=243))) == Library("lib/sample.so", 243)
    assert read(b"\x7fELF\x01\x01\x01".ljust(18, b"\0") + b"\x28\0" + bytes(44)) == Library("lib/sample.so", 40)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x7fELF", "the ELF header at bytes 0 to 64, but the file ends at 4"),
        (bytes(SAMPLE)[:5] + b"\x02" + bytes(SAMPLE)[6:18] + b"\0\xb7" + bytes(SAMPLE)[20:], "byte order 2"),
        (changed(3, 4, "<I", lambda kind: 11), "several tables of a kind"),
        (changed(1, 32, "<Q", lambda size: size - 1), "a name at byte"),  # the last one has no end
        (changed(2, 40, "<I", lambda names: 3), "the names of the dynamic symbols are in section 3, which holds none"),
        (bytes(SAMPLE)[:-64], "the table of sections at bytes"),
        (bytes(SAMPLE)[:40] + struct.pack("<Q", 1 << 62) + bytes(SAMPLE)[48:], "the table of sections"),
        (bytes(SAMPLE)[:62] + b"\xf0\x00" + bytes(SAMPLE)[64:], "section 240 holds the names"),
        (bytes(SAMPLE)[:58] + b"\x28\x00" + bytes(SAMPLE)[60:], "sections of 40 bytes each, wanted 64"),
        (bytes(Elf(gpu=container(entry(CUBIN, 90))[:-8])), "ends at"),
        (bytes(Elf(gpu=b"garbage!")), "no container of GPU code"),
        (bytes(Elf(gpu=struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64) + bytes(64))), "an entry of GPU code"),
    ],
)
def test_a_damaged_file_is_named_with_what_is_wrong(data: bytes, words: str) -> None:
    with pytest.raises(InspectionError, match=r"^lib/sample\.so: ") as caught:
        read(data)
    assert words in caught.value.message


def test_no_damage_ends_in_anything_but_an_inspection_error() -> None:
    gpu = container(entry(CUBIN, 120, FAMILY), entry(PTX, 80)) * 2
    good = bytes(Elf(**{**SAMPLE.__dict__, "gpu": gpu}))
    chance = random.Random(5)
    refused = 0
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(4, len(data))] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        cut = len(data) if chance.random() < 0.7 else chance.randrange(len(data))
        try:
            read(bytes(data[:cut]))
        except InspectionError:
            refused += 1
    assert 500 < refused < 3000


def test_a_list_of_versions_that_repeats_itself_ends() -> None:
    """It names as many files as fit into a number, each with as many versions, a byte after the last."""
    data = bytearray(bytes(Elf(versions_needed={"libc.so.6": ["GLIBC_2.17"]}, versions=["x" * 40] * 4000)))
    row = struct.unpack_from("<Q", data, 40)[0] + 4 * 64
    assert struct.unpack_from("<I", data, row + 4)[0] == 0x6FFFFFFE
    (place,) = struct.unpack_from("<Q", data, row + 24)
    struct.pack_into("<Q", data, row + 32, 100_000)  # size: what comes after is a part of it
    struct.pack_into("<I", data, row + 44, 0xFFFFFFFF)
    for step in range(0, 99_000, 16):
        struct.pack_into("<HHIII", data, place + step, 1, 0xFFFF, 1, 16, 16)
    with pytest.raises(InspectionError, match="row 65537 of its versions"):
        read(bytes(data))


def test_a_large_table_is_not_read() -> None:
    class Huge(io.BytesIO):
        """Says that it is large: stands for a sparse file of a hostile package."""

        def seek(self, offset: int, whence: int = 0) -> int:
            return 1 << 40 if whence == 2 else super().seek(offset, whence)

    data = changed(2, 32, "<Q", lambda size: 1 << 39)
    with pytest.raises(InspectionError, match=r"the dynamic symbols of 549755813888 bytes, wanted at most 268435456"):
        read_library(Huge(data), "lib/sample.so")
