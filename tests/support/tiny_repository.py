"""A generated repository, read element by element by the definitions of its formats."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from checkpoint_samples import read_header

from sparkpin.checkpoint.safetensors import TensorInfo
from sparkpin.fetch.packed import INDEX_FILE


class Repo:
    """Every tensor of its safetensors files by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path.name: read_header(path) for path in sorted(folder.glob("*.safetensors"))}
        self.index: dict[str, Any] = json.loads((folder / INDEX_FILE).read_text())
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())

    def info(self, name: str) -> TensorInfo:
        return next(header.tensors[name] for header in self.files.values() if name in header.tensors)

    def data(self, name: str) -> bytes:
        info = self.info(name)
        path = next(self.folder / file for file, header in self.files.items() if name in header.tensors)
        return path.read_bytes()[info.begin : info.end]

    def bf16(self, name: str) -> list[list[float]]:
        info, data = self.info(name), self.data(name)
        assert info.dtype == "BF16"
        cols = info.shape[-1]
        values = struct.unpack(
            f"<{len(data) // 2}f", b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        )
        return [list(values[i : i + cols]) for i in range(0, len(values), cols)]

    def int4(self, stem: str) -> list[list[float]]:
        """Dequantised ``[N, K]`` by the definition of the packing, element by element."""
        k8, n = self.info(f"{stem}.qweight").shape
        words = struct.unpack(f"<{k8 * n}I", self.data(f"{stem}.qweight"))
        zeros = struct.unpack(f"<{k8 // 16 * n // 8}I", self.data(f"{stem}.qzeros"))
        scales = struct.unpack(f"<{k8 // 16 * n}e", self.data(f"{stem}.scales"))

        def value(row: int, col: int) -> float:
            group = col // 128
            zero = (zeros[group * (n // 8) + row // 8] >> 4 * (row % 8) & 15) + 1
            return ((words[col // 8 * n + row] >> 4 * (col % 8) & 15) - zero) * scales[group * n + row]

        return [[value(row, col) for col in range(8 * k8)] for row in range(n)]
