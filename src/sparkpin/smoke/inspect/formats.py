"""Which kernels a model of each format takes, and whether the image has them for a GPU, as PTX, or not at all. Pure.

What vLLM chooses was read in the source of 0.32 and 0.33 for 12.1; a flag (--moe-backend, --attention-backend) may
choose another. The order in which rows of one use stand is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sparkpin.smoke.inspect.gpu import Coverage, coverages
from sparkpin.smoke.inspect.scan import ImageFacts

# From 0.33 (or some before) vLLM's operators lie in libraries of torch's stable interface.
OPERATORS = ("*/vllm/_C_stable_libtorch*.so", "*/vllm/_C.abi3.so")
EXPERTS = ("*/vllm/_moe_C_stable_libtorch*.so", "*/vllm/_moe_C*.so")
FA2 = ("*/_vllm_fa2_C*.so",)


@dataclass(frozen=True)
class Kernel:
    """libraries: patterns, the first that is there counts; package: compiles its kernels when they are first wanted."""

    use: str
    name: str
    libraries: tuple[str, ...] = ()
    package: str = ""


KERNELS = (
    Kernel("INT4, experts", "Marlin", EXPERTS),
    Kernel("INT4, other layers", "Marlin", OPERATORS),
    Kernel("NVFP4, experts", "FlashInfer CUTLASS", package="flashinfer-python"),
    Kernel("NVFP4, experts", "vLLM CUTLASS", OPERATORS),
    Kernel("NVFP4, experts", "Marlin (--moe-backend marlin)", EXPERTS),
    Kernel("NVFP4, other layers", "FlashInfer CUTLASS", package="flashinfer-python"),
    Kernel("NVFP4, other layers", "vLLM CUTLASS", OPERATORS),
    Kernel("FP8, experts", "Triton", package="triton"),
    Kernel("FP8, experts", "Marlin (--moe-backend marlin)", EXPERTS),
    Kernel("FP8, other layers", "vLLM CUTLASS", OPERATORS),
    Kernel("BF16, experts", "Triton", package="triton"),
    Kernel("attention", "FlashAttention 2", FA2),
    Kernel("attention", "FlashInfer", package="flashinfer-python"),
    Kernel("attention", "Triton", package="triton"),
)


@dataclass(frozen=True)
class Taken:
    """ready: native, PTX (the driver compiles it), compiled at first use, none, or missing (not in the image)."""

    use: str
    kernel: str
    ready: str
    where: str


def taken(facts: ImageFacts, sm: int) -> list[Taken]:
    """Nothing where there is no vLLM with GPU code: an image for a CPU."""
    rows = coverages(facts, sm)
    if not any(_first(rows, patterns) for patterns in (OPERATORS, EXPERTS, FA2)):
        return []
    return [_taken(kernel, rows, facts) for kernel in KERNELS]


def _taken(kernel: Kernel, rows: Iterable[Coverage], facts: ImageFacts) -> Taken:
    if kernel.package:
        found = facts.package(kernel.package)
        where = f"{found.name} {found.version}" if found else f"no {kernel.package}"
        return Taken(kernel.use, kernel.name, "compiled at first use" if found else "missing", where)
    row = _first(rows, kernel.libraries)
    if row is None:
        return Taken(kernel.use, kernel.name, "missing", f"no {kernel.libraries[0].rpartition('/')[2]}")
    ready = {"runs": "native", "PTX only": "PTX", "none": "none"}[row.verdict]
    counts = f"{row.runs} native, {row.compiles} PTX, {row.neither} neither"
    return Taken(kernel.use, kernel.name, ready, f"{row.path.rpartition('/')[2]}: {counts}")


def _first(rows: Iterable[Coverage], patterns: Iterable[str]) -> Coverage | None:
    rows = list(rows)
    return next((row for pattern in patterns for row in rows if fnmatchcase(row.path, pattern)), None)
