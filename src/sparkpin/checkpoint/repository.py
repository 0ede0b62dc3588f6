"""A model repository as its headers, index and config describe it: no tensor's bytes.

A checkpoint has more than 100,000 tensors, so only their names and files stay in memory; headers are parsed one file at
a time, whenever they are needed.
"""

from __future__ import annotations

import json
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sparkpin.checkpoint.safetensors import Header, TensorInfo, parse_header
from sparkpin.core.errors import CheckpointError, IntegrityError
from sparkpin.core.files import CHUNK

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
FETCH = "invoke build --fetch-only"
OTHER = "choose another revision of this repository in pins/models/"


class TensorPlace(NamedTuple):
    """Where a tensor's bytes lie: `info.begin` to `info.end` of `file` in a repository, by the pin's name of it."""

    repository: str
    file: str
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class Listing:
    """What is known of a repository before a tensor's bytes are here.

    name: the pin's; origin: for messages, "repo at revision" or a folder; files: path -> size, all of them;
    headers: safetensors file of the top folder -> its first bytes (length prefix and JSON); texts: the index and the
    config, where there is one. Both may read a file at each access: see FileBytes. mend: the next step for a broken
    file, where the caller knows a better one.
    """

    name: str
    origin: str
    files: Mapping[str, int]
    headers: Mapping[str, bytes]
    texts: Mapping[str, bytes]
    mend: str = ""

    @property
    def size(self) -> int:
        return sum(self.files.values())

    def error(self, where: str, cause: str, step: str = OTHER) -> CheckpointError:
        """where: appended to the origin, a file of it or nothing."""
        return CheckpointError(f"{self.origin}{where}: {cause}", next_step=self.mend or step)


class FileBytes(UserDict[str, Any]):
    """Bytes that are read from a file at each access, so that the headers of a repository are never all in memory."""

    def __init__(self, paths: Mapping[str, Path], read: Callable[[Path], bytes] = Path.read_bytes) -> None:
        super().__init__(paths)
        self.read = read

    def __getitem__(self, name: str) -> bytes:
        return self.read(self.data[name])


class ByteRange(NamedTuple):
    """Bytes `begin` to `end` of a file."""

    path: Path
    begin: int
    end: int

    def chunks(self) -> Iterator[memoryview]:
        """Each is overwritten by the next one. IntegrityError for a file that ends before the range."""
        left = self.end - self.begin
        buffer = memoryview(bytearray(min(CHUNK, left)))
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.begin)
            while left:
                if not (size := file.readinto(buffer[:left])):
                    cause = f"{self.path}: got {self.end - left} bytes, expected {self.end} and more"
                    raise IntegrityError(cause, next_step=FETCH)
                yield buffer[:size]
                left -= size


class Places(NamedTuple):
    """Where bytes lie on this machine. folders: repository -> its files, of those fetched completely.

    tensors: repository -> tensor -> a file of just its bytes, where only those are fetched.
    """

    folders: Mapping[str, Path]
    tensors: Mapping[str, Mapping[str, Path]]

    def linked(self, path: str, of: str) -> Path:
        """Where a file lies that a checkpoint takes over as `path` from the repository `of`."""
        return self.folders[of] / path.removeprefix(f"{of}/")

    def of(self, source: TensorPlace, length: int) -> ByteRange:
        """Bytes from the beginning of a tensor on."""
        if folder := self.folders.get(source.repository):
            return ByteRange(folder / source.file, source.info.begin, source.info.begin + length)
        return ByteRange(self.tensors[source.repository][source.info.name], 0, length)


@dataclass(frozen=True, slots=True)
class ReadRepository:
    """A repository that was read and is consistent.

    listed: tensor -> file for what the index lists, or every tensor if there is no index (loaders then read all
    safetensors files); unlisted: the others. found: the tensors that `read_repository` was asked for. listed_bytes: of
    the tensors in `listed`. index: without its weight_map; None if there is none.
    """

    listing: Listing
    listed: dict[str, str]
    unlisted: dict[str, str]
    found: Mapping[str, TensorPlace]
    listed_bytes: int
    index: Mapping[str, Any] | None
    config: Mapping[str, Any]

    @property
    def origin(self) -> str:
        return self.listing.origin

    def file_of(self, tensor: str) -> str | None:
        return self.listed.get(tensor) or self.unlisted.get(tensor)


def is_shard(file: str) -> bool:
    """Loaders look for safetensors files in the top folder only."""
    return "/" not in file and file.endswith(".safetensors")


def header_of(listing: Listing, file: str) -> Header:
    try:
        return parse_header(listing.headers[file], file_size=listing.files[file], origin=f"{listing.origin}/{file}")
    except IntegrityError as error:
        raise IntegrityError(error.message, next_step=listing.mend or error.next_step) from None


def read_repository(listing: Listing, wanted: Callable[[str], bool] = lambda name: False) -> ReadRepository:
    """Read and cross-check headers, index and config, in one pass. wanted: names whose places go to `found`.

    Raises IntegrityError for a file that is cut short or no safetensors file, CheckpointError for a tensor in two files
    and for an index that lists what is not there.
    """
    index = read_index(listing) if INDEX in listing.texts else None
    weight_map: dict[str, str] = {} if index is None else index.pop("weight_map")
    files: dict[str, str] = {}
    found: dict[str, TensorPlace] = {}
    listed_bytes = 0
    for file in sorted(listing.headers):
        for name, info in header_of(listing, file).tensors.items():
            if name in files:
                raise listing.error("", f"got tensor {name!r} in {files[name]} and in {file}, expected it in one")
            files[name] = file
            if index is None or name in weight_map:
                listed_bytes += info.nbytes
            if wanted(name):
                found[name] = TensorPlace(listing.name, file, info)
    for name, file in weight_map.items():
        if files.get(name) != file:
            cause = f"weight_map[{name!r}]: got {file}, expected {files.get(name, 'no such key: no file has it')}"
            raise listing.error(f"/{INDEX}", cause)
    if not files:
        raise listing.error("", "no tensors in its safetensors files", FETCH)
    listed = files if index is None else {name: files[name] for name in weight_map}
    unlisted = {name: file for name, file in files.items() if name not in listed}
    config = read_json(listing, CONFIG) if CONFIG in listing.texts else {}
    return ReadRepository(listing, listed, unlisted, found, listed_bytes, index, config)


def read_index(listing: Listing) -> dict[str, Any]:
    """Its weight_map is a mapping of strings, and so is its metadata, if there is any, of whatever."""
    index = read_json(listing, INDEX)
    for key, value in {"weight_map": index.get("weight_map"), "metadata": index.get("metadata") or {}}.items():
        if not isinstance(value, dict):
            raise listing.error(f"/{INDEX}", f"{key}: got {value!r:.80}, expected a mapping")
    for name, file in index["weight_map"].items():
        if not isinstance(file, str):
            raise listing.error(f"/{INDEX}", f"weight_map[{name!r}]: got {file!r}, expected the name of a file")
    return index


def read_json(listing: Listing, file: str) -> dict[str, Any]:
    try:
        value = json.loads(listing.texts[file])
    except (ValueError, RecursionError) as error:
        raise listing.error(f"/{file}", f"{error}, expected JSON", FETCH) from None
    if not isinstance(value, dict):
        raise listing.error(f"/{file}", f"got {type(value).__name__}, expected a JSON object", FETCH)
    return value
