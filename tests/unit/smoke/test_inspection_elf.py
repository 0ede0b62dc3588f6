"""Reading ELF tables and GPU code: made-up files, the machine's own libraries, and damaged files."""

from __future__ import annotations

import io
import lzma
import struct

import pytest
from elf_samples import AARCH64, CUBIN, FAMILY, PLAIN, PTX, SPECIFIC, ZSTD, Elf, container, entry
from places import DATA

from sparkpin.core.errors import InspectionError
from sparkpin.smoke.inspect.elf import Library, read_library
from sparkpin.smoke.inspect.fatbin import Code

DATA = DATA / "inspection"
SAMPLE = Elf(
    soname="libsample.so.1",
    needed=["libtorch.so", "libcudart.so.13"],
    undefined=["_ZN3c104cuda12device_countEv"],
    weak=["__gmon_start__"],
    defined=["sample", "sample_two"],
    versions_needed={"libc.so.6": ["GLIBC_2.17", "GLIBC_2.34"], "libm.so.6": ["GLIBC_2.29"]},
    versions=["libsample.so.1", "SAMPLE_1.0"],
)


def read(data: bytes) -> Library:
    return read_library(io.BytesIO(data), "lib/sample.so")


def test_tables_of_a_library() -> None:
    assert read(bytes(SAMPLE)) == Library(
        "lib/sample.so",
        AARCH64,
        dynamic=True,
        soname="libsample.so.1",
        needed=("libtorch.so", "libcudart.so.13"),
        undefined=frozenset({b"_ZN3c104cuda12device_countEv"}),
        defined=frozenset({b"sample", b"sample_two"}),
        versions_needed={"libc.so.6": frozenset({"GLIBC_2.17", "GLIBC_2.34"}), "libm.so.6": frozenset({"GLIBC_2.29"})},
        versions=frozenset({"libsample.so.1", "SAMPLE_1.0"}),
    )


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
        (Code("cubin", 90, "a"), Code("cubin", 120, "f"), Code("ptx", 80, "")): 1,
        (Code("cubin", 121, "a"),): 2,
        (Code("kind 8", 120, ""),): 1,
    }
    assert [code.name for code in library.code[1][0]] in (["sm_121a"], ["sm_90a", "sm_120f", "compute_80"])
    relocatable = read(bytes(Elf(gpu=container(entry(CUBIN, 120)), gpu_section="__nv_relfatbin")))
    assert relocatable.code == (((Code("cubin", 120, ""),), 1),)
    assert read(bytes(Elf(gpu=container(entry(CUBIN, 120)), gpu_section=".data"))).code == ()


@pytest.mark.parametrize("file", ["kernels.so", "kernels.o"])
def test_gpu_code_as_nvcc_writes_it(file: str) -> None:
    ((unit, count),) = read(lzma.decompress((DATA / f"{file}.xz").read_bytes())).code
    assert count == 1
    assert sorted(code.name for code in unit) == [
        "compute_120f", "compute_80", "sm_120", "sm_120a", "sm_121a", "sm_121f", "sm_90a",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "data",
    [
        bytes(SAMPLE)[:30],
        bytes(SAMPLE)[:-64],
        bytes(Elf(gpu=container(entry(CUBIN, 90))[:-8])),
        bytes(Elf(gpu=b"garbage! garbage")),
        bytes(Elf(gpu=struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64) + bytes(64))),
    ],
)
def test_a_damaged_file_is_named(data: bytes) -> None:
    with pytest.raises(InspectionError, match=r"^lib/sample\.so is damaged: "):
        read(data)
