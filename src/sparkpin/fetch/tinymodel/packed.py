"""A trained model of the project's own, whose BF16 weights are quantised here into the real pair's two repositories.

Each operation on a float32 number is one that IEEE 754 rounds correctly, and sums add in one order, so every machine
makes the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkpin.checkpoint.from_gguf import SAFETENSORS, bf16
from sparkpin.checkpoint.safetensors import parse_header
from sparkpin.core.errors import CheckpointError, IntegrityError, ManifestError
from sparkpin.core.files import atomic_file
from sparkpin.fetch.tinymodel.network import Plain, Tensors
from sparkpin.fetch.tinymodel.repositories import Pair
from sparkpin.fetch.tinymodel.weights import FP8_MAX, GROUP, fp8_value
from sparkpin.pins.schema import PackedFolder

Floats = NDArray[np.float32]
TEXTS = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
LINEAR = re.compile(r"\.(\w+_proj|in_proj_qkv|in_proj_z)\.weight$")
STEPS = (7.0, 7.25, 7.5, 7.75, 8.0, 8.5, 9.0, 9.5, 10.0, 11.0)
"""A group's largest weight in INT4 steps, of which the one with the least error is taken. Beyond 7 or 8 it is cut."""


@dataclass(frozen=True)
class Trained:
    """raw: BF16 ``[rows, cols]``, both multiples of 128."""

    raw: NDArray[np.uint16]

    @property
    def rows(self) -> int:
        return int(self.raw.shape[0])

    @property
    def cols(self) -> int:
        return int(self.raw.shape[1])

    def bf16(self) -> bytes:
        return self.raw.tobytes()

    def int4(self) -> tuple[bytes, bytes, bytes]:
        """As `weights.to_int4`: qweight, qzeros, scales."""
        n, k = self.raw.shape
        groups = floats(self.raw).reshape(n, k // GROUP, GROUP)
        peak = np.abs(groups).max(axis=2)
        scales, codes, least = np.zeros_like(peak), np.zeros_like(groups), np.full_like(peak, np.inf)
        for step in STEPS:
            scale = rounded_scale(peak, step)
            code = np.clip(np.rint(groups / scale[..., None]), -8, 7)
            error = added(np.square(groups - code * scale[..., None]))
            better = error < least
            scales, least = np.where(better, scale, scales), np.where(better, error, least)
            codes = np.where(better[..., None], code, codes)
        eights = (codes + 8).astype(np.uint32).reshape(n, k // 8, 8) << np.arange(0, 32, 4, dtype=np.uint32)
        words = np.bitwise_or.reduce(eights, axis=2).T.astype("<u4")
        return words.tobytes(), b"\x77" * (k // GROUP * n // 2), scales.T.astype("<f2").tobytes()

    def fp8(self) -> tuple[bytes, bytes]:
        """As `weights.to_fp8`: E4M3, and BF16 scales of blocks."""
        n, k = self.raw.shape
        blocks = floats(self.raw).reshape(n // GROUP, GROUP, k // GROUP, GROUP)
        stored = bf16(np.abs(blocks).max(axis=(1, 3)) / np.float32(FP8_MAX))
        scale = floats(stored)
        codes = e4m3(blocks / np.where(scale == 0, 1, scale).astype(np.float32)[:, None, :, None])
        return codes.tobytes(), stored.tobytes()


def floats(raw: NDArray[np.uint16]) -> Floats:
    """BF16 bits as numbers."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def rounded_scale(peak: Floats, step: float) -> Floats:
    """``peak / step`` as F16 holds it; its smallest number in place of 0, by which nothing can be divided."""
    return np.maximum((peak / np.float32(step)).astype(np.float16), np.float16(2**-24)).astype(np.float32)


def added(values: Floats) -> Floats:
    """Sums over the last axis, a power of two long: halves onto halves, so that no machine adds in another order."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def e4m3(values: Floats) -> NDArray[np.uint8]:
    """The nearest E4M3 bytes, ties to the even one, saturating at 448."""
    known = np.array([fp8_value(code) for code in range(0x7F)], np.float32)
    above = (known[:-1] + known[1:]) / 2
    above[1::2] = np.nextafter(above[1::2], np.float32(0))  # a tie between an odd code and the next goes up
    codes = np.searchsorted(above, np.abs(values)).astype(np.uint8)
    return np.where(np.signbit(values), codes | np.uint8(0x80), codes)


def pack(project: Path, name: str, packed: PackedFolder, int4: Path, fp8: Path) -> None:
    """Write both repositories of the pin `name`. IntegrityError for weights that are not the pinned ones,
    CheckpointError for such as cannot be packed."""
    folder = project / packed.folder
    config = config_of(project, name, packed)
    tensors = weights_of(folder / SAFETENSORS, name, packed)
    body = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    mtp = {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}

    def texts(made: Path) -> None:
        for text in TEXTS:
            with atomic_file(made / text) as file:
                file.write(content(folder / text, name))

    Pair(config, body, mtp, texts, iters=0).write(int4, fp8)


def config_of(project: Path, name: str, packed: PackedFolder) -> dict[str, Any]:
    """config.json of the folder."""
    path = project / packed.folder / "config.json"
    try:
        value = json.loads(content(path, name))
    except ValueError:
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("num_hidden_layers"), int):
        step = f"git restore {packed.folder}"
        raise ManifestError(path, "num_hidden_layers", value, "a JSON object with a whole number", next_step=step)
    return value


def weights_of(path: Path, name: str, packed: PackedFolder) -> Tensors:
    """Tensors by name, of bytes that were hashed before anything reads them."""
    data = content(path, name)
    seen = hashlib.sha256(data).hexdigest()
    if seen != packed.sha256:
        raise IntegrityError(
            f"{path}: saw SHA-256 {seen} of {len(data)} bytes, wanted {packed.sha256}",
            next_step=f"git restore {packed.folder}; for newly trained weights, set packed.sha256 in "
            f"pins/models/{name}.yaml, then: invoke lock --model {name}",
        )
    found: dict[str, Trained | Plain] = {}
    for info in parse_header(data, file_size=len(data), origin=str(path)).tensors.values():
        part = data[info.begin : info.end]
        found[info.name] = Plain(info.dtype, info.shape, part)
        if LINEAR.search(info.name):
            fits = info.dtype == "BF16" and len(info.shape) == 2 and not any(size % GROUP for size in info.shape)
            raw = np.frombuffer(part, "<u2")
            if not fits or (raw & 0x7F80 == 0x7F80).any():
                seen = f"{info.dtype} {list(info.shape)}" if not fits else "NaN or infinity"
                raise CheckpointError(
                    f"{path}: {info.name}: saw {seen}, wanted BF16 numbers in a matrix of multiples of {GROUP}",
                    next_step=f"export the trained model anew, then: invoke lock --model {name}",
                )
            found[info.name] = Trained(raw.reshape(info.shape))
    return found


def content(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise IntegrityError(
            f"{path}: {error.strerror}, wanted the file of pins/models/{name}.yaml",
            next_step=f"git restore {path.parent}",
        ) from None
