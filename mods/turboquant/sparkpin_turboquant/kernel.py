"""attend.cu's variants: compiled by NVRTC for one architecture, loaded and launched through CUDA's driver.

Importing this needs neither a GPU nor CUDA's libraries. NVRTC and the driver's bindings come with PyTorch for CUDA.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from sparkpin_turboquant.codebook import magnitudes

QUERY_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
MERGE_WARPS = 32
"""At most, for each row of a sequence."""


@dataclass(frozen=True)
class Variant:
    """One compilation.

    rows: tiles of 16 rows, which are query tokens x heads of a KV head. warps: of a block, which works on 16 times as
    many tokens at a time. blocks: for each multiprocessor, which limits registers. query: name of the queries' type.
    """

    head_dim: int
    key_bits: int
    value_bits: int
    rows: int
    warps: int
    blocks: int
    query: str

    @property
    def tokens(self) -> int:
        """Of a tile."""
        return 16 * self.warps

    @property
    def shared_bytes(self) -> int:
        """SHARED of attend.cu."""
        queries, weights = self.rows * self.head_dim * 32, self.warps * self.rows * 512
        return queries + 2 * weights + 2 * self.warps * 8 + 2 * self.warps * self.rows * 64

    def merge_shared_bytes(self, warps: int) -> int:
        return warps * (self.head_dim + 2) * 4

    def source(self) -> str:
        """What a compiler gets."""
        macros = {
            "D": self.head_dim,
            "KEY_BITS": self.key_bits,
            "VALUE_BITS": self.value_bits,
            "MT": self.rows,
            "W": self.warps,
            "CTAS": self.blocks,
            "QUERY": QUERY_TYPES[self.query],
            "KEY_TABLE": table(min(self.key_bits, 4), "<e"),
            "VALUE_TABLE": table(self.value_bits, "bfloat16"),
        }
        text = resources.files("sparkpin_turboquant").joinpath("attend.cu").read_text(encoding="utf-8")
        return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + text


def merge_warps(programs: int, sequences: int) -> int:
    """How many warps merge a row's partial results, of which a sequence has about programs / sequences."""
    return max(4, min(MERGE_WARPS, programs // (4 * sequences)))


def table(bits: int, number: str) -> str:
    """High bytes of magnitudes 0 to 3 and 4 to 7, then their low bytes. number: "<e" for float16, or "bfloat16"."""
    encoded = [struct.pack("<e", m) if number == "<e" else struct.pack("<f", m)[2:] for m in magnitudes(bits)]
    encoded += [b"\0\0"] * (8 - len(encoded))
    words = [bytes(pair[byte] for pair in encoded[i : i + 4]) for byte in (1, 0) for i in (0, 4)]
    return ", ".join(f"0x{int.from_bytes(word, 'little'):08x}u" for word in words)


def key_of(variant: Variant, architecture: int) -> str:
    """Names a cubin by all that it is made of, but for the compiler."""
    return hashlib.sha256(b" ".join((*options(architecture), variant.source().encode()))).hexdigest()


IMAGE = Path("/opt/sparkpin/kernels/turboquant")
"""Where an image has what `ahead` compiled when it was built."""


def cubin_of(variant: Variant, architecture: int) -> bytes:
    """The cubin: the image's, or that of an earlier start in Triton's cache, or compiled now and kept there."""
    from triton import knobs

    kept = Path(knobs.cache.dir) / f"turboquant-{key_of(variant, architecture)}.cubin"
    for file in (IMAGE / kept.name, kept):
        if file.is_file():
            return file.read_bytes()
    cubin = compile_variant(variant, architecture)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=kept.parent, prefix=".turboquant-", delete=False) as file:
        file.write(cubin)
    os.replace(file.name, kept)  # other workers read and write here, too
    return cubin


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
        *((name, ctypes.c_int) for name in ("sequences", "programs", "share", "rows", "group", "splits")),
        ("table_width", ctypes.c_int),
        ("block_groups", ctypes.c_int),
        ("block_magic", ctypes.c_uint32),
    )


def options(architecture: int) -> list[bytes]:
    """NVRTC's. architecture: compute capability times ten; from 9.0 on code is for the one chip."""
    chip = f"sm_{architecture}" + ("a" if architecture >= 90 else "")
    return [f"-arch={chip}".encode(), b"-std=c++17", b"-default-device"]


def compile_variant(variant: Variant, architecture: int) -> bytes:
    """A cubin, by NVRTC; no GPU is needed. Raises RuntimeError with the compiler's log."""
    from cuda.bindings import nvrtc

    error, program = nvrtc.nvrtcCreateProgram(variant.source().encode(), b"attend.cu", 0, [], [])
    _nvrtc(error)
    try:
        chosen = options(architecture)
        (error,) = nvrtc.nvrtcCompileProgram(program, len(chosen), chosen)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"turboquant: {variant} for {chosen[0].decode()}: {log.decode(errors='replace')}")
        cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        _nvrtc(nvrtc.nvrtcGetCUBIN(program, cubin)[0])
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc(error: Any) -> None:
    if int(error):
        raise RuntimeError(f"turboquant: {error!r}")


class Loaded:
    """A variant on the current GPU. Raises RuntimeError where the driver refuses it."""

    def __init__(self, variant: Variant, cubin: bytes) -> None:
        from cuda.bindings import driver

        self.variant, self.driver = variant, driver
        self.module = _driver(driver.cuModuleLoadData(cubin))
        self.attend = self._function(b"attend", variant.shared_bytes)
        self.merge = self._function(b"merge", variant.merge_shared_bytes(MERGE_WARPS))
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        self.overlap = overlap

    def _function(self, name: bytes, shared_bytes: int) -> Any:
        function = _driver(self.driver.cuModuleGetFunction(self.module, name))
        attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _driver(self.driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        return function

    def launch(self, args: Args, heads: int, stream: int, overlap: bool) -> None:
        """`attend`, then `merge`, which waits for it on the GPU. overlap: the GPU starts it early (from 9.0 on)."""
        pointer = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        warps = merge_warps(args.programs, args.sequences)
        grids = (
            (self.attend, (args.programs, heads, 1), 32 * self.variant.warps, self.variant.shared_bytes),
            (self.merge, (args.rows, heads, args.sequences), 32 * warps, self.variant.merge_shared_bytes(warps)),
        )
        for function, grid, threads, shared_bytes in grids:
            config = self.driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = grid
            config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
            config.sharedMemBytes = shared_bytes
            config.hStream = self.driver.CUstream(stream)
            if overlap and function is self.merge:
                config.attrs, config.numAttrs = [self.overlap], 1
            _driver(self.driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointer), 0))


def _driver(result: Any) -> Any:
    """What a call of the driver gives besides its error. Raises RuntimeError for an error."""
    error, *rest = result
    if int(error):
        raise RuntimeError(f"turboquant: CUDA's driver says {error.name}")
    return rest[0] if rest else None


@cache
def loaded(variant: Variant, device: int) -> Loaded:
    """The variant, on the GPU of this number, which is the current one."""
    import torch

    torch.empty(1, device=f"cuda:{device}")  # the driver wants a context, which PyTorch makes with its first tensor
    major, minor = torch.cuda.get_device_capability(device)
    return Loaded(variant, cubin_of(variant, major * 10 + minor))
