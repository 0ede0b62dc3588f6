"""What is CUDA C++: which variants there are, what they are told, and their cubins, by NVRTC for one architecture.

Importing this needs neither a GPU nor CUDA's libraries. NVRTC and its bindings come with PyTorch for CUDA.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, ClassVar, NamedTuple

from sparkpin_modkit import kernels

from sparkpin_turboquant import MOD
from sparkpin_turboquant.codebook import BITS, edges, magnitudes
from sparkpin_turboquant.formats import GROUP

MERGE_WARPS = 32
"""At most, for each row of a sequence."""
EXPAND_WARPS, ROW_WARPS = 8, 4
"""Of a block, for `expand` and for what works on rows."""
FLOAT16_BELOW = 65504.0 * (1 - 2**-10)
"""What a rounded quotient of it times the divisor stays below float16's largest."""


class Launch(NamedTuple):
    """Which function of a cubin on how many blocks of how many threads, with how many bytes of shared memory."""

    function: str
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0


@dataclass(frozen=True)
class Variant:
    """One compilation of attend.cu.

    rows: tiles of 16 rows, which are query tokens x heads of a KV head. warps: of a block, which works on 16 times as
    many tokens at a time. blocks: for each multiprocessor, which limits registers. wide: queries are of 32 bits, which
    only tests have; those of 16 bits say at run time which type it is.
    """

    head_dim: int
    key_bits: int
    rows: int
    warps: int
    blocks: int
    wide: bool = False
    file: ClassVar[str] = "attend"

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return 16 * self.warps

    @property
    def functions(self) -> dict[str, int]:
        """Name -> the most shared memory that a launch asks for, in bytes."""
        return {"attend": self.shared_bytes, "merge": self.merge_shared_bytes(MERGE_WARPS)}

    @property
    def shared_bytes(self) -> int:
        """As `divide` does it: queries, weights twice, where values lie, then maxima and sums."""
        queries, weights = self.rows * self.head_dim * 32, self.warps * self.rows * 512
        return queries + 2 * weights + 2 * self.warps * 8 + 2 * self.warps * self.rows * 64

    def merge_shared_bytes(self, warps: int) -> int:
        return warps * (self.head_dim + 2) * 4

    def launches(self, args: Args, heads: int) -> tuple[Launch, Launch]:
        """`attend`, then `merge`, which waits for it on the GPU. heads: of the cache, times `splits`."""
        warps = merge_warps(args.programs, args.sequences)
        return (
            Launch("attend", (args.programs, heads, 1), 32 * self.warps, self.shared_bytes),
            Launch("merge", (args.rows, heads, args.sequences), 32 * warps, self.merge_shared_bytes(warps)),
        )

    def source(self) -> str:
        """What a compiler gets."""
        tables = {"KEY_TABLE": table("<e"), "VALUE_TABLE": table("bfloat16")}
        return source_of(self, tables | {"MT": self.rows, "W": self.warps, "CTAS": self.blocks})


@dataclass(frozen=True)
class Access:
    """One compilation of cache.cu. wide: keys, values, queries and results are of 32 bits, which only tests have."""

    head_dim: int
    key_bits: int
    wide: bool = False
    file: ClassVar[str] = "cache"

    @property
    def functions(self) -> dict[str, int]:
        expanded = EXPAND_WARPS * 64 // self.head_dim * 2 * (self.key_bits + BITS) * self.head_dim
        return {"store": ROW_WARPS * self.head_dim, "expand": expanded, "turn": 0, "fold": 0}

    def by_rows(self, function: str, rows: int) -> Launch:
        """A warp for each row."""
        return Launch(function, (-(-rows // ROW_WARPS), 1, 1), 32 * ROW_WARPS, self.functions[function])

    def expand(self, first: int, count: int, heads: int) -> Launch:
        groups = (first + count - 1) // GROUP - first // GROUP + 1
        grid = (-(-groups * self.head_dim // 64 // EXPAND_WARPS), heads, 1)
        return Launch("expand", grid, 32 * EXPAND_WARPS, self.functions["expand"])

    def source(self) -> str:
        """What a compiler gets."""
        levels = magnitudes()
        largest = 127.0 if self.key_bits == 8 else levels[-1], levels[-1]
        most = struct.pack("<2e", *(FLOAT16_BELOW / level for level in largest))
        macros = {
            "EXPAND_WARPS": EXPAND_WARPS,
            "ROW_WARPS": ROW_WARPS,
            "KEY_TABLE": table("<e"),
            "VALUE_TABLE": table("<e"),
            "LEVELS": ", ".join(f"{level!r}f" for level in levels),
            "EDGES": ", ".join(f"{single(edge)!r}f" for edge in edges()),
            "MOST": f"0x{int.from_bytes(most, 'little'):08x}u",
        }
        return source_of(self, macros)


Compiled = Variant | Access


def single(x: float) -> float:
    """The nearest float32: the last digits of a double differ between machines, with their exponential functions."""
    return float(struct.unpack("<f", struct.pack("<f", x))[0])


def source_of(compiled: Compiled, macros: Mapping[str, object]) -> str:
    shared = {"D": compiled.head_dim, "KEY_BITS": compiled.key_bits, "WIDE": int(compiled.wide)}
    defined = "".join(f"#define {name} {value}\n" for name, value in (shared | dict(macros)).items())
    files = resources.files("sparkpin_turboquant")
    return defined + "".join(
        files.joinpath(f"{name}.cu").read_text(encoding="utf-8") for name in ("device", compiled.file)
    )


def merge_warps(programs: int, sequences: int) -> int:
    """How many warps merge a row's partial results, of which a sequence has about programs / sequences."""
    return max(4, min(MERGE_WARPS, programs // (4 * sequences)))


def table(number: str) -> str:
    """High bytes of magnitudes 0 to 3 and 4 to 7, then their low bytes. number: "<e" for float16, or "bfloat16"."""
    encoded = [struct.pack("<e", m) if number == "<e" else struct.pack("<f", m)[2:] for m in magnitudes()]
    words = [bytes(pair[byte] for pair in encoded[i : i + 4]) for byte in (1, 0) for i in (0, 4)]
    return ", ".join(f"0x{int.from_bytes(word, 'little'):08x}u" for word in words)


def key_of(compiled: Compiled, architecture: int) -> str:
    """Names a cubin by all that it is made of, but for the compiler."""
    return hashlib.sha256(b" ".join((*options(architecture), compiled.source().encode()))).hexdigest()


def cubin_of(compiled: Compiled, architecture: int) -> bytes:
    """The cubin: the image's, or that of an earlier start in Triton's cache, or compiled now and kept there."""
    key = key_of(compiled, architecture)
    return kernels.cubin_of(MOD, compiled.file, key, lambda: compile_cubin(compiled, architecture))


class Args(ctypes.Structure):
    """Args of attend.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("part", "logs", "q", "out", "signs", "cache", "table", "lengths")),
        *((name, ctypes.c_void_p) for name in ("starts", "owners")),
        *(
            (name, ctypes.c_int64)
            for name in ("q_stride", "out_stride", "block_bytes", "head_bytes", "values", "norms")
        ),
        ("scale", ctypes.c_float),
        ("heads_share", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("sequences", "programs", "rows", "group", "splits")),
        ("table_width", ctypes.c_int),
        ("block_groups", ctypes.c_int),
        ("block_magic", ctypes.c_uint32),
        ("bfloat", ctypes.c_int),
    )


class At(ctypes.Structure):
    """At of cache.cu, and below its other structures."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("block_bytes", "head_bytes", "values", "norms"))


def _fields(pointers: str, strides: str, numbers: str, at: bool = False) -> list[tuple[str, Any]]:
    return [
        *((name, ctypes.c_void_p) for name in pointers.split()),
        *((name, ctypes.c_int64) for name in strides.split()),
        *([("at", At)] if at else []),
        *((name, ctypes.c_int) for name in numbers.split()),
    ]


class Store(ctypes.Structure):
    _fields_ = _fields(
        "key value cache slots signs", "key_stride value_stride", "tokens heads block_size bfloat", at=True
    )


class Expand(ctypes.Structure):
    _fields_ = _fields("cache row key value", "stride", "first count block_groups overlap", at=True)


class Turn(ctypes.Structure):
    _fields_ = _fields(
        "query key value out new_key new_value signs starts key_starts",
        "stride key_stride value_stride new_stride",
        "tokens heads kv_heads requests bfloat",
    )


class Fold(ctypes.Structure):
    _fields_ = _fields("out logs part part_logs signs", "stride logs_stride part_logs_stride", "tokens heads bfloat")


def options(architecture: int) -> list[bytes]:
    """NVRTC's. architecture: compute capability times ten; from 9.0 on code is for the one chip."""
    chip = f"sm_{architecture}" + ("a" if architecture >= 90 else "")
    return [f"-arch={chip}".encode(), b"-std=c++17", b"-default-device"]


def compile_cubin(compiled: Compiled, architecture: int) -> bytes:
    """A cubin, by NVRTC; no GPU is needed. Raises RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    error, program = nvrtc.nvrtcCreateProgram(compiled.source().encode(), f"{compiled.file}.cu".encode(), 0, [], [])
    _nvrtc(error)
    try:
        chosen = options(architecture)
        (error,) = nvrtc.nvrtcCompileProgram(program, len(chosen), chosen)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"turboquant: {compiled} for {chosen[0].decode()}: {log.decode(errors='replace')}")
        cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        _nvrtc(nvrtc.nvrtcGetCUBIN(program, cubin)[0])
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc(error: Any) -> None:
    if int(error):
        raise RuntimeError(f"turboquant: {error!r}")
