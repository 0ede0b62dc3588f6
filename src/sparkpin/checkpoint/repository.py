"""A model repository on disk, read from headers, index and config only: no tensor's bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.safetensors import TensorInfo, read_header
from sparkpin.errors import CheckpointError

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
FETCH = "invoke fetch"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor's bytes lie: `info.begin` to `info.end` of `file` in the repository that the pin calls so."""

    repository: str
    file: str
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class Repository:
    """files: every file, relative; tensors: by name; metadata: of each safetensors file.

    weight_map: tensor -> file for what the index lists, or every tensor if there is no index (loaders then read all
    safetensors files). index: the index as read, None if there is none.
    """

    name: str
    folder: Path
    files: tuple[str, ...]
    tensors: Mapping[str, Source]
    metadata: Mapping[str, Mapping[str, str]]
    weight_map: Mapping[str, str]
    index: Mapping[str, Any] | None
    config: Mapping[str, Any]


def read_repository(name: str, folder: Path) -> Repository:
    """Read and cross-check headers, index and config.

    Raises IntegrityError for a file that is cut short or no safetensors file, CheckpointError for a tensor that stands
    in two files and for an index that lists what is not there.
    """
    files = tuple(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))
    tensors: dict[str, Source] = {}
    metadata: dict[str, Mapping[str, str]] = {}
    for file in files:
        if "/" in file or not file.endswith(".safetensors"):
            continue
        header = read_header(folder / file)
        metadata[file] = header.metadata
        for info in header.tensors.values():
            if info.name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {info.name!r} stands in {tensors[info.name].file} and in {file}, wanted in one",
                    next_step="choose another revision of this repository in pins/models/",
                )
            tensors[info.name] = Source(name, file, info)
    if not tensors:
        raise CheckpointError(f"{folder}: no tensors in its safetensors files", next_step=FETCH)
    index = read_json(folder / INDEX) if INDEX in files else None
    weight_map = {tensor: source.file for tensor, source in tensors.items()}
    if index is not None:
        weight_map = index.get("weight_map")  # type: ignore[assignment]
        if not isinstance(weight_map, dict):
            raise CheckpointError(
                f"{folder / INDEX}: weight_map: saw {weight_map!r}, wanted a mapping", next_step=FETCH
            )
        check_weight_map(folder, weight_map, tensors)
    config = read_json(folder / CONFIG) if CONFIG in files else {}
    return Repository(name, folder, files, tensors, metadata, weight_map, index, config)


def check_weight_map(folder: Path, weight_map: Mapping[str, str], tensors: Mapping[str, Source]) -> None:
    """Every tensor that the index lists is in the file that it says."""
    wrong = [name for name, file in weight_map.items() if name not in tensors or tensors[name].file != file]
    if wrong:
        first = wrong[0]
        seen = f"it is in {tensors[first].file}" if first in tensors else "no file has it"
        raise CheckpointError(
            f"{folder / INDEX}: {first!r} is listed in {weight_map[first]}, but {seen} ({len(wrong)} such tensors)",
            next_step="choose another revision of this repository in pins/models/",
        )


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}, wanted JSON", next_step=FETCH) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: saw {type(value).__name__}, wanted a JSON object", next_step=FETCH)
    return value
