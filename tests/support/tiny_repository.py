"""A generated repository, read by the definitions of its formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_samples import read_header

from sparkpin.checkpoint.repository import INDEX
from sparkpin.checkpoint.safetensors import TensorInfo


class Repo:
    """Every tensor of its safetensors files by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = {path.name: read_header(path) for path in sorted(folder.glob("*.safetensors"))}
        self.index: dict[str, Any] = json.loads((folder / INDEX).read_text())

    def info(self, name: str) -> TensorInfo:
        return next(header.tensors[name] for header in self.files.values() if name in header.tensors)

    def data(self, name: str) -> bytes:
        info = self.info(name)
        path = next(self.folder / file for file, header in self.files.items() if name in header.tensors)
        return path.read_bytes()[info.begin : info.end]

    def int4(self, stem: str) -> np.ndarray:
        """Dequantised ``[N, K]`` by the definition of the packing."""
        k8, n = self.info(f"{stem}.qweight").shape
        words = np.frombuffer(self.data(f"{stem}.qweight"), "<u4").reshape(k8, 1, n)
        zeros = np.frombuffer(self.data(f"{stem}.qzeros"), "<u4").reshape(-1, n // 8, 1)
        scales = np.frombuffer(self.data(f"{stem}.scales"), "<f2").reshape(-1, n).astype(np.float64)
        shifts, group = np.arange(0, 32, 4, dtype=np.uint32), np.arange(8 * k8) // 128
        codes = (words >> shifts[:, None] & 15).reshape(8 * k8, n).astype(np.int64)
        zero = (zeros >> shifts & 15).reshape(-1, n).astype(np.int64) + 1
        return ((codes - zero[group]) * scales[group]).T
