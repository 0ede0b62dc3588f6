"""Quantise the trained weights into the two repositories that pins/models/trained-tiny.yaml names as folders.

    .venv/bin/python -m benchmarks.trained_tiny.quantise

writes pins/models/trained-tiny/int4 and fp8 (2 s), whose hashes pins/models/trained-tiny.lock has. Each operation on a
float32 number is one that IEEE 754 rounds correctly, and sums add in one order, so every machine makes the same bytes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.scripted_tiny.layout import (
    FP8_MAX,
    GROUP,
    Plain,
    fp8_parts,
    int4_parts,
    is_int4,
    write_repository,
)
from sparkpin.checkpoint.from_gguf import SAFETENSORS, bf16
from sparkpin.checkpoint.repository import CONFIG
from sparkpin.checkpoint.safetensors import parse_header

Floats = NDArray[np.float32]
MODEL = Path(__file__).resolve().parents[2] / "pins/models/trained-tiny"
TEXTS = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
LINEAR = re.compile(r"\.(\w+_proj|in_proj_qkv|in_proj_z)\.weight$")
STEPS = (7.0, 7.25, 7.5, 7.75, 8.0, 8.5, 9.0, 9.5, 10.0, 11.0)
"""A group's largest weight in INT4 steps, of which the one with the least error is taken. Beyond 7 or 8 it is cut."""


def int4_tensors(name: str, raw: NDArray[np.uint16]) -> dict[str, Plain]:
    """A BF16 weight ``[N, K]``, both multiples of 128, in AutoRound's auto_gptq packing.

    qweight: I32 ``[K/8, N]``, eight nibbles along K, lowest first; qzeros: I32 ``[K/128, N/8]``, zero point minus one;
    scales: F16 ``[K/128, N]``. Value = (nibble - 8) * scale.
    """
    n, k = raw.shape
    groups = floats(raw).reshape(n, k // GROUP, GROUP)
    peak = np.abs(groups).max(axis=2)
    scales, codes, least = np.zeros_like(peak), np.zeros_like(groups), np.full_like(peak, np.inf)
    for step in STEPS:
        # As F16 holds it; its smallest number in place of 0, by which nothing can be divided.
        scale = np.maximum((peak / np.float32(step)).astype(np.float16), np.float16(2**-24)).astype(np.float32)
        code = np.clip(np.rint(groups / scale[..., None]), -8, 7)
        error = added(np.square(groups - code * scale[..., None]))
        better = error < least
        scales, least = np.where(better, scale, scales), np.where(better, error, least)
        codes = np.where(better[..., None], code, codes)
    eights = (codes + 8).astype(np.uint32).reshape(n, k // 8, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    words = np.bitwise_or.reduce(eights, axis=2).T.astype("<u4").tobytes()
    return int4_parts(name, n, k, words, scales.T.astype("<f2").tobytes())


def fp8_tensors(name: str, raw: NDArray[np.uint16]) -> dict[str, Plain]:
    """A BF16 weight in E4M3, and BF16 scales of 128 x 128 blocks. Value = E4M3 * scale."""
    n, k = raw.shape
    blocks = floats(raw).reshape(n // GROUP, GROUP, k // GROUP, GROUP)
    stored = bf16(np.abs(blocks).max(axis=(1, 3)) / np.float32(FP8_MAX))
    scale = floats(stored)
    codes = e4m3(blocks / np.where(scale == 0, 1, scale).astype(np.float32)[:, None, :, None])
    return fp8_parts(name, n, k, codes.tobytes(), stored.tobytes())


def floats(raw: NDArray[np.uint16]) -> Floats:
    """BF16 bits as numbers."""
    return (raw.astype(np.uint32) << 16).view(np.float32)


def added(values: Floats) -> Floats:
    """Sums over the last axis, a power of two long: halves onto halves, so that no machine adds in another order."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def e4m3(values: Floats) -> NDArray[np.uint8]:
    """The nearest E4M3 bytes, ties to the even one, saturating at 448."""
    exponent, mantissa = np.divmod(np.arange(0x7F), 8)  # the last code, 0x7F, is no number
    known = np.where(exponent, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9).astype(np.float32)
    above = (known[:-1] + known[1:]) / 2
    above[1::2] = np.nextafter(above[1::2], np.float32(0))  # a tie between an odd code and the next goes up
    codes = np.searchsorted(above, np.abs(values)).astype(np.uint8)
    return np.where(np.signbit(values), codes | np.uint8(0x80), codes)


def quantise(folder: Path, int4: Path, fp8: Path) -> None:
    """folder: with BF16 weights and the configs of both. Folders `int4` and `fp8` that are there are replaced."""
    data = (folder / SAFETENSORS).read_bytes()
    body, every, mtp = dict[str, Plain](), dict[str, Plain](), dict[str, Plain]()
    for name, info in parse_header(data, file_size=len(data), origin=str(folder)).tensors.items():
        plain = {name: Plain(info.dtype, info.shape, data[info.begin : info.end])}
        is_linear = LINEAR.search(name)  # of multiples of 128 both ways
        raw = np.frombuffer(plain[name].data, "<u2").reshape(info.shape) if is_linear else np.empty(0, "<u2")
        every |= fp8_tensors(name, raw) if is_linear else plain
        if name.startswith("mtp."):
            mtp |= plain
        else:
            body |= int4_tensors(name, raw) if is_linear and is_int4(name) else plain
    for target, config, tensors, extra in (
        (int4, "config.int4.json", body, mtp),
        (fp8, "config.fp8.json", every, None),
    ):
        texts = {text: (folder / text).read_bytes() for text in TEXTS} | {CONFIG: (folder / config).read_bytes()}
        write_repository(target, texts, tensors, json.loads(texts[CONFIG])["num_hidden_layers"], extra)


if __name__ == "__main__":
    quantise(MODEL, MODEL / "int4", MODEL / "fp8")
