"""An LM head's INT8 form from its 16-bit bytes, in numpy and bounded memory: the bytes that the mod's quantiser gives.

mods/int8-lm-head/sparkpin_int8_lm_head/naive.py says what the numbers mean and quantise.py how they are chosen; its
tests compare both byte by byte. Each operation on a float32 number is one that IEEE 754 rounds correctly, and no sum
decides by its last digits, so every machine comes to the same bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sparkpin.checkpoint.copying import RangeReader
from sparkpin.core.errors import CheckpointError

Floats = NDArray[np.float32]
Raw = NDArray[np.uint16]
Dtype = Literal["BF16", "F16"]

ALPHAS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SAMPLE_ROWS = 4096
GAIN = 1e-6
ROOT_OF_2 = 0x3504F3
QMAX = np.float32(127)
LEAST_INFINITE = {"BF16": 0x7F80, "F16": 0x7C00}
"""Without its sign, a number whose bits are not less is infinite or no number."""

ELEMENTS = 1 << 18
"""Weights that are worked on at once: a few float32 copies of them stay in a processor's caches."""


class Int8Head:
    """The INT8 form of ``[rows, columns]`` weights that lie in a file. Computed as it is asked for, by one thread at a
    time; what is kept is a scale for each row and column.
    """

    def __init__(self, path: Path, begin: int, dtype: Dtype, rows: int, columns: int) -> None:
        self.path, self.begin, self.dtype, self.rows, self.columns = path, begin, dtype, rows, columns
        self._lock = threading.Lock()
        self._scales: tuple[Floats, Floats] | None = None

    def scales(self) -> tuple[Floats, Floats]:
        """``[rows]`` and ``[columns]``. Raises CheckpointError for weights with infinities or NaN."""
        with self._lock:
            if self._scales is None:
                columns = self._choose()
                rows = [quantised(part, columns, self.dtype)[1] for part in self._parts()]
                self._scales = np.concatenate(rows), columns
        return self._scales

    def row_scale(self) -> Iterator[memoryview]:
        yield stored(self.scales()[0], self.dtype)

    def column_scale(self) -> Iterator[memoryview]:
        yield stored(self.scales()[1], self.dtype)

    def codes(self) -> Iterator[memoryview]:
        """``[rows, columns]`` int8, some rows at a time."""
        _, columns = self.scales()
        for part in self._parts():
            yield quantised(part, columns, self.dtype)[0].data.cast("B")

    def _choose(self) -> Floats:
        """quantise.choose_column_scale."""
        largest = floats(self._column_amax(), self.dtype)
        sample = self._sample()
        best = np.ones(self.columns, np.float32)
        error = relative_error(sample, best, self.dtype)
        for alpha in ALPHAS:
            candidate = outlier_scales(largest, alpha)
            if (candidate != 1).any():
                found = relative_error(sample, candidate, self.dtype)
                if found < error * (1 - GAIN):
                    best, error = candidate, found
        return best

    def _column_amax(self) -> Raw:
        """``[columns]``, as bits: without their signs, they are in the order of the numbers."""
        largest = np.zeros(self.columns, np.uint16)
        for first, part in zip(range(0, self.rows, self._step), self._raw_parts(), strict=True):
            magnitudes = part & np.uint16(0x7FFF)
            bad = (magnitudes >= LEAST_INFINITE[self.dtype]).any(axis=1)
            if bad.any():
                raise CheckpointError(
                    f"{self.path}: the LM head has NaN or infinity in row {first + int(bad.argmax())}",
                    next_step="choose another base repository in pins/models/, or a stage without `int8-head`",
                )
            np.maximum(largest, magnitudes.max(axis=0), out=largest)
        return largest

    def _sample(self) -> Raw:
        """Evenly spaced rows."""
        step = max(1, self.rows // SAMPLE_ROWS)
        picked = range(0, self.rows, step)[:SAMPLE_ROWS]
        sample = np.empty((len(picked), self.columns), "<u2")
        with RangeReader() as reader:
            for place, row in enumerate(picked):
                self._read(reader, row, sample[place : place + 1])
        return sample

    @property
    def _step(self) -> int:
        return max(1, ELEMENTS // self.columns)

    def _parts(self) -> Iterator[Floats]:
        return (floats(part, self.dtype) for part in self._raw_parts())

    def _raw_parts(self) -> Iterator[Raw]:
        with RangeReader() as reader:
            for row in range(0, self.rows, self._step):
                part = np.empty((min(self.rows - row, self._step), self.columns), "<u2")
                self._read(reader, row, part)
                yield part

    def _read(self, reader: RangeReader, first: int, rows: Raw) -> None:
        """Fill ``[n, columns]`` with the rows from `first` on. Raises IntegrityError if the file ends before them."""
        view = rows.data.cast("B")
        begin = self.begin + 2 * self.columns * first
        end = begin + len(view)
        while begin < end:
            got = reader.into(view, self.path, begin, end)
            view, begin = view[got:], begin + got


def floats(raw: Raw, dtype: Dtype) -> Floats:
    return (raw.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else raw.view("<f2").astype(np.float32)


def stored(values: Floats, dtype: Dtype) -> memoryview:
    """The bytes of numbers that the type holds exactly."""
    raw = (values.view(np.uint32) >> 16).astype("<u2") if dtype == "BF16" else values.astype("<f2")
    return raw.data.cast("B")


def round_up_to(values: Floats, dtype: Dtype) -> Floats:
    """naive.round_up_to."""
    if dtype == "BF16":
        return ((values.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    above = np.where(rounded.astype(np.float32) < values, np.nextafter(rounded, np.float16(np.inf)), rounded)
    return above.astype(np.float32)


def quantised(weight: Floats, column_scale: Floats, dtype: Dtype) -> tuple[NDArray[np.int8], Floats]:
    """naive.quantise."""
    scaled = weight / column_scale
    row_scale = np.abs(scaled).max(axis=1) / QMAX
    row_scale[row_scale == 0] = 1
    row_scale = round_up_to(row_scale, dtype)
    scaled /= row_scale[:, None]
    np.rint(scaled, out=scaled)
    np.clip(scaled, -QMAX, QMAX, out=scaled)
    return scaled.astype(np.int8), row_scale


def outlier_scales(largest: Floats, alpha: float) -> Floats:
    """quantise.outlier_scales."""
    bound = np.float32(alpha) * np.sort(largest)[(len(largest) - 1) // 2]
    ratio = largest / bound if bound > 0 else np.ones_like(largest)
    bits = np.maximum(ratio, np.float32(1)).view(np.uint32) + np.uint32(0x800000 - ROOT_OF_2)
    return (bits & np.uint32(0xFF800000)).view(np.float32)


def relative_error(sample: Raw, column_scale: Floats, dtype: Dtype) -> float:
    """quantise.relative_error."""
    lost = whole = 0.0
    step = max(1, ELEMENTS // sample.shape[1])
    for row in range(0, len(sample), step):
        weight = floats(sample[row : row + step], dtype)
        codes, row_scale = quantised(weight, column_scale, dtype)
        back = codes.astype(np.float32) * row_scale[:, None] * column_scale
        lost += float(np.square((back - weight).astype(np.float64)).sum())
        whole += float(np.square(weight.astype(np.float64)).sum())
    return (lost / whole) ** 0.5 if whole > 0 else 0.0
