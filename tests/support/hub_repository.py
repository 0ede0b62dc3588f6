"""A folder as a Hub repository: its hashes, its commit, and its listings as the Hub's API words them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.core.files import git_blob_sha1
from sparkpin.fetch.packed import commit_of, files_of

_LARGE = ".safetensors"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file of a repository. ``etag`` is SHA-256 of a large file, git's blob SHA-1 of a small one."""

    path: str
    file: Path
    size: int
    etag: str

    @property
    def large(self) -> bool:
        return self.path.endswith(_LARGE)

    @property
    def oid(self) -> str:
        """Git's hash of what git stores: the file, or the pointer that stands for a large one."""
        if not self.large:
            return self.etag
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.etag}\nsize {self.size}\n"
        return git_blob_sha1(pointer.encode())


@dataclass(frozen=True, slots=True)
class Repository:
    name: str
    commit: str
    entries: Mapping[str, Entry]


def scan(folder: Path, name: str) -> Repository:
    entries = {
        path: Entry(path, folder / path, size, sha256 or git_blob_sha1((folder / path).read_bytes()))
        for path, size, sha256 in files_of(folder)
    }
    return Repository(name, commit_of(folder), entries)


def model_info(repository: Repository, *, blobs: bool) -> dict[str, Any]:
    siblings: list[dict[str, Any]] = []
    for entry in repository.entries.values():
        sibling: dict[str, Any] = {"rfilename": entry.path}
        if blobs:
            sibling |= {"blobId": entry.oid, "size": entry.size}
            if entry.large:
                pointer = 127 + len(str(entry.size))
                sibling["lfs"] = {"sha256": entry.etag, "size": entry.size, "pointerSize": pointer}
        siblings.append(sibling)
    return {"id": repository.name, "sha": repository.commit, "siblings": siblings, "tags": []}
