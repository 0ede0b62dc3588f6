"""A model repository as its headers, index and config tell of it: no tensor's bytes.

A checkpoint has more than 100,000 tensors, so what is kept is the names of one index; headers are parsed one file at
a time, as often as somebody asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sparkpin.checkpoint.safetensors import Header, TensorInfo, parse_header, read_header_bytes
from sparkpin.core.errors import CheckpointError, IntegrityError

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
FETCH = "invoke build --fetch-only"
OTHER = "choose another revision of this repository in pins/models/"


class TensorPlace(NamedTuple):
    """Where a tensor's bytes lie: `info.begin` to `info.end` of `file` in the repository that the pin calls so.

    of: the tensor that this one is computed from, if it lies nowhere (int8_head.Computed).
    """

    repository: str
    file: str
    info: TensorInfo
    of: TensorPlace | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """What is known of a repository before a tensor's bytes are here.

    name: the pin's; origin: for messages, "repo at revision" or a folder; files: path -> size, all of them;
    headers: safetensors file of the top folder -> its first bytes (length prefix and JSON); texts: the index and the
    config, where there is one. Both may read a file at each access: see FileBytes. mend: what to do about a file
    that is broken, where that is known better than here.
    """

    name: str
    origin: str
    files: Mapping[str, int]
    headers: Mapping[str, bytes]
    texts: Mapping[str, bytes]
    mend: str = ""


class FileBytes(Mapping[str, bytes]):
    """Bytes that are read from a file at each access, so that the headers of a repository are never all in memory."""

    def __init__(self, paths: Mapping[str, Path], read: Callable[[Path], bytes] = Path.read_bytes) -> None:
        self._paths, self._read = paths, read

    def __getitem__(self, name: str) -> bytes:
        return self._read(self._paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


@dataclass(frozen=True, slots=True)
class Places:
    """Where bytes lie on this machine. folders: repository -> its files, where it is whole.

    tensors: repository -> tensor -> a file of just its bytes, where only those are fetched.
    """

    folders: Mapping[str, Path]
    tensors: Mapping[str, Mapping[str, Path]]

    def linked(self, path: str, of: str) -> Path:
        """Where a file lies that a checkpoint takes over as `path` from the repository `of`."""
        return self.folders[of] / path.removeprefix(f"{of}/")

    def of(self, source: TensorPlace) -> tuple[Path, int]:
        """The file that holds a tensor, and where in it the tensor begins."""
        if folder := self.folders.get(source.repository):
            return folder / source.file, source.info.begin
        path = self.tensors.get(source.repository, {}).get(source.info.name)
        if path is None:
            raise CheckpointError(
                f"{source.info.name} of {source.repository} is not among the tensors that the model's lock names",
                next_step="invoke lock --model MODEL, since its pin has changed",
            )
        return path, 0


@dataclass(frozen=True, slots=True)
class ReadRepository:
    """A repository that was read and holds together.

    listed: tensor -> file for what the index lists, or every tensor if there is no index (loaders then read all
    safetensors files); unlisted: the others. found: what `read_repository` was asked for. listed_bytes: of
    the tensors in `listed`. header_bytes: of all headers. index: as read, without its weight_map; None if there is
    none.
    """

    listing: Listing
    listed: dict[str, str]
    unlisted: dict[str, str]
    found: Mapping[str, TensorPlace]
    listed_bytes: int
    header_bytes: int
    index: Mapping[str, Any] | None
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.listing.name

    @property
    def origin(self) -> str:
        return self.listing.origin

    def file_of(self, tensor: str) -> str | None:
        return self.listed.get(tensor) or self.unlisted.get(tensor)

    def header(self, file: str) -> Header:
        return header_of(self.listing, file)

    def sources(self) -> Iterator[TensorPlace]:
        """Every tensor, file by file in the order of the data."""
        for file in sorted(self.listing.headers):
            yield from (TensorPlace(self.name, file, info) for info in self.header(file).tensors.values())


def listing_of(name: str, folder: Path) -> Listing:
    """A repository whose files are all here."""
    files = {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    headers = FileBytes({file: folder / file for file in files if is_shard(file)}, read_header_bytes)
    texts = FileBytes({file: folder / file for file in (INDEX, CONFIG) if file in files})
    return Listing(name, str(folder), files, headers, texts)


def is_shard(file: str) -> bool:
    """Loaders look for safetensors files in the top folder only."""
    return "/" not in file and file.endswith(".safetensors")


def header_of(listing: Listing, file: str) -> Header:
    try:
        return parse_header(listing.headers[file], file_size=listing.files[file], origin=f"{listing.origin}/{file}")
    except IntegrityError as error:
        raise IntegrityError(error.message, next_step=listing.mend or error.next_step) from None


def read_repository(listing: Listing, wanted: Callable[[str], bool] = lambda name: False) -> ReadRepository:
    """Read and cross-check headers, index and config, in one pass. wanted: names whose sources are kept in `found`.

    Raises IntegrityError for a file that is cut short or no safetensors file, CheckpointError for a tensor that stands
    in two files and for an index that lists what is not there.
    """
    index = read_index(listing) if INDEX in listing.texts else None
    weight_map: dict[str, str] = {} if index is None else index.pop("weight_map")
    found: dict[str, TensorPlace] = {}
    unlisted: dict[str, str] = {}
    seen = header_bytes = listed_bytes = 0
    for file in sorted(listing.headers):
        header = header_of(listing, file)
        header_bytes += header.data_start
        for name, info in header.tensors.items():
            listed = weight_map.get(name)
            if listed == file:
                weight_map[name] = file  # the one string for all of the file, not the index's 8,000 copies
                seen += 1
            elif listed is not None and file_has(listing, listed, name):
                raise twice(listing, name, file, listed)
            elif listed is not None:
                raise misplaced(listing, weight_map, name, f"it is in {file}")
            elif name in unlisted:
                raise twice(listing, name, unlisted[name], file)
            else:
                unlisted[name] = file
            if index is None or listed:
                listed_bytes += info[4] - info[3]
            if wanted(name):
                found[name] = TensorPlace(listing.name, file, info)
    if seen != len(weight_map):
        held = {name for file in listing.headers for name in header_of(listing, file).tensors}
        first = next(name for name in weight_map if name not in held)
        has = weight_map[first] in listing.files
        raise misplaced(listing, weight_map, first, "no file has it" if has else "there is no such file")
    if not (seen or unlisted):
        raise CheckpointError(f"{listing.origin}: no tensors in its safetensors files", next_step=listing.mend or FETCH)
    if index is None:
        weight_map, unlisted = unlisted, {}
    config = read_json(listing, CONFIG) if CONFIG in listing.texts else {}
    return ReadRepository(listing, weight_map, unlisted, found, listed_bytes, header_bytes, index, config)


def file_has(listing: Listing, file: str, tensor: str) -> bool:
    return file in listing.headers and tensor in header_of(listing, file).tensors


def twice(listing: Listing, tensor: str, *files: str) -> CheckpointError:
    one, two = sorted(files)
    return CheckpointError(
        f"{listing.origin}: tensor {tensor!r} stands in {one} and in {two}, wanted in one",
        next_step=listing.mend or OTHER,
    )


def misplaced(listing: Listing, weight_map: Mapping[str, str], tensor: str, seen: str) -> CheckpointError:
    return CheckpointError(
        f"{listing.origin}/{INDEX}: {tensor!r} is listed in {weight_map[tensor]}, but {seen}",
        next_step=listing.mend or OTHER,
    )


def read_index(listing: Listing) -> dict[str, Any]:
    """Its weight_map is a mapping of strings, and so is its metadata, if there is any, of whatever."""
    index = read_json(listing, INDEX)
    weight_map, metadata = index.get("weight_map"), index.get("metadata")
    if not isinstance(weight_map, dict):
        raise wrong_index(listing, "weight_map", type(weight_map).__name__, "a mapping")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise wrong_index(listing, f"weight_map[{name!r}]", repr(file), "the name of a file")
    if metadata is not None and not isinstance(metadata, dict):
        raise wrong_index(listing, "metadata", type(metadata).__name__, "a mapping")
    return index


def wrong_index(listing: Listing, key: str, seen: str, wanted: str) -> CheckpointError:
    where = f"{listing.origin}/{INDEX}"
    return CheckpointError(f"{where}: {key}: saw {seen}, wanted {wanted}", next_step=listing.mend or OTHER)


def read_json(listing: Listing, file: str) -> dict[str, Any]:
    where = f"{listing.origin}/{file}"
    try:
        value = json.loads(listing.texts[file])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {error}, wanted JSON", next_step=listing.mend or FETCH) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where}: saw {type(value).__name__}, wanted a JSON object", next_step=listing.mend or FETCH
        )
    return value
