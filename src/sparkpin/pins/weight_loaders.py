"""Which of vLLM's loaders reads the weights, from the memory that is free. Pure. Its needs: docs/memory.md.

The fast ones copy a file, or a ring of tensors, to the GPU before it goes to its place; vLLM's own maps files and goes
tensor by tensor. On a machine whose GPU shares the memory, too much of that stops the machine and not only the server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkpin.pins.vllm_command import flag_value, set_flag

FLAG = "--load-format"
DEFAULT, FAST, INSTANT = "auto", "fastsafetensors", "instanttensor"
GIB = 1 << 30
PROCESS = 6 * GIB  # libraries, CUDA's context, what the server itself allocates meanwhile
RING = 4 * GIB  # instanttensor: 512 reads of 8 MiB in flight
SHARE = 2  # of what is free it takes half at most, and refuses to load for want of more
TOOK = re.compile(r"Loading weights took ([\d.]+) seconds")


@dataclass(frozen=True)
class WeightBytes:
    """Bytes: all of the checkpoint's tensors, its largest file, its largest tensor."""

    total: int
    file: int
    tensor: int


@dataclass(frozen=True)
class Loader:
    """format: vLLM's word. chosen: here, so that the flag is to be set; else the command line says it."""

    format: str
    reason: str
    chosen: bool

    @property
    def line(self) -> str:
        return f"loader: {'' if self.chosen else 'as told, '}{self.format}: {self.reason}"

    def applied(self, argv: Sequence[str]) -> list[str]:
        return set_flag(argv, FLAG, self.format) if self.chosen and self.format != DEFAULT else list(argv)


def choose(argv: Sequence[str], versions: Mapping[str, str], weights: WeightBytes, free: int) -> Loader:
    """The fastest that fits, on a GPU. A loader that the command line names stays, and what speaks against it is said.

    versions: of what the image holds, by distribution. free: bytes, before the server starts.
    """
    told = flag_value(argv, FLAG)
    if told is not None and told not in (FAST, INSTANT):
        return Loader(told, "of the command line", chosen=False)
    why = {name: obstacle(name, versions, weights, free) for name in (FAST, INSTANT)}
    if told is not None:
        against = f"WARNING, it {why[told]}" if why[told] else ""
        return Loader(told, against or fits(told, weights, free), chosen=False)
    for name in (FAST, INSTANT):
        if not why[name]:
            return Loader(name, fits(name, weights, free), chosen=True)
    return Loader(DEFAULT, f"{FAST} {why[FAST]}; {INSTANT} {why[INSTANT]}", chosen=True)


def needed(name: str, weights: WeightBytes) -> int:
    """Bytes at the moment when most is held: the model's parameters are all there before the first file is read."""
    if name == FAST:
        return weights.total + 2 * weights.file + PROCESS  # one is read while another is copied (parallel_loader.py)
    return weights.total + SHARE * max(RING, 3 * weights.tensor) + PROCESS


def obstacle(name: str, versions: Mapping[str, str], weights: WeightBytes, free: int) -> str:
    if name not in versions:
        return "is not in the image"
    if (need := needed(name, weights)) > free:
        return f"needs {gib(need)} for a moment, {gib(free)} are free"
    return ""


def fits(name: str, weights: WeightBytes, free: int) -> str:
    what = f"files of up to {gib(weights.file)}" if name == FAST else f"tensors of up to {gib(weights.tensor)}"
    return f"{gib(needed(name, weights))} for a moment, for {what}, and {gib(free)} are free"


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def seconds(log: bytes) -> float | None:
    """What vLLM's log says that reading weights took, a draft model's included; None where it says nothing."""
    found = [float(match) for match in TOOK.findall(log.decode(errors="replace"))]
    return round(sum(found), 2) if found else None
