"""Where what is fetched of a model lies: whole files by repository and revision, headers and tensors in the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparkpin.checkpoint import shapes
from sparkpin.checkpoint.repository import CONFIG, INDEX, FileBytes, Listing, read_json
from sparkpin.checkpoint.safetensors import read_header_bytes
from sparkpin.core.files import sha256_file
from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.fetch.transfer import Folder
from sparkpin.pins.schema import LockedFile, ModelLock, ModelPin, PinnedRepository, RepositoryLock

TEXTS = (INDEX, CONFIG)


def repository_folder(paths: Paths, repository: PinnedRepository | RepositoryLock) -> Path:
    return paths.models / repository.repo / repository.revision


def download_folder(paths: Paths, repository: RepositoryLock) -> Path:
    """What `lock` has fetched and not hashed yet, of this repository at this revision."""
    return paths.models / repository.repo / f"{repository.revision}.download"


def fetched_of(entry: RepositoryLock, *, is_whole: bool) -> RepositoryLock:
    """What is fetched of a repository: all files of the base; index, config, headers and tensors of a donor."""
    if is_whole:
        return entry.model_copy(update={"headers": [], "tensors": []})
    return entry.model_copy(update={"files": [file for file in entry.files if file.file in TEXTS]})


def named_parts(entry: RepositoryLock) -> Iterator[tuple[str, LockedFile]]:
    """A header and a tensor are named as if their safetensors file were a folder."""
    yield from ((file.file, file) for file in entry.files)
    yield from ((f"{header.file}/__header__", header) for header in entry.headers)
    yield from ((f"{tensor.file}/{tensor.name}", tensor) for tensor in entry.tensors)


def blobs_of(entry: RepositoryLock) -> list[LockedFile]:
    """What lies in the store."""
    return [*entry.headers, *entry.tensors]


def own_folder(paths: Paths, pin: ModelPin, name: str) -> Folder | None:
    """The folder of this machine that stands for a repository. It is somebody's own: only read, never mended."""
    if not pin.repositories[name].folder:
        return None
    folder = paths.project / pin.repositories[name].folder
    # To lock what is broken would make it right.
    mend = f"put an intact copy of it into {folder}, which sparkpin only reads; then: "
    return Folder(folder, f"{mend}invoke lock --model {pin.name}")


def listing_of(paths: Paths, pin: ModelPin, name: str, entry: RepositoryLock) -> Listing:
    """From what is here: a header of a whole file may be read from the file."""
    folder, store = repository_folder(paths, entry), Store(paths.store)
    sizes = {file.file: file.size for file in entry.files}
    headers = {row.file: store.path(row.sha256) if store.has(row) else folder / row.file for row in entry.headers}
    texts = {file: folder / file for file in TEXTS if file in sizes}
    local = own_folder(paths, pin, name)
    origin = str(local.folder) if local else f"{entry.repo} at {entry.revision[:12]}"
    mend = local.next_step if local else ""
    return Listing(name, origin, sizes, FileBytes(headers, read_header_bytes), FileBytes(texts), mend)


def config_here(paths: Paths, pin: ModelPin, lock: ModelLock | None, name: str = "") -> dict[str, Any] | None:
    """config.json of a model's base, or its drafter's: as locked where it was fetched, else what is known without it,
    else None. name: the pin's of the repository. CheckpointError where anybody published something else."""
    name = name or pin.base
    owner, repo = pin.owner(name), pin.repositories[name].repo
    if lock and (entry := lock.repositories.get(name)):
        path, hashes = repository_folder(paths, entry) / CONFIG, {file.file: file.sha256 for file in entry.files}
        if path.is_file() and sha256_file(path)[0] == hashes.get(CONFIG):
            return read_json(listing_of(paths, pin, name, entry), CONFIG)
    if owner.packed:
        from sparkpin.fetch.packed import config_ahead

        return config_ahead(paths.project, owner.packed, repo)
    return shapes.config_ahead(paths.project, repo)
