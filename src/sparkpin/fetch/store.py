"""The content-addressed store: every fetched file under its SHA-256, whole or absent."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import DiskError, IntegrityError
from sparkpin.core.files import CHUNK, PARTIAL, atomic_file, disk_errors, lock, sha256_file, sweep
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.pins.schema import LockedFile

FETCH = "invoke build --fetch-only"
LOST = (
    "`invoke import FILE` of a bundle that another machine exported with its store, or copy that machine's store "
    "(SPARKPIN_CACHE); images that were published need no such file: `invoke up --from oci://HOST/NAME`; or `invoke "
    "lock` takes what is offered now"
)
"""The next step for a locked file that no index or mirror offers any more, or of which it has other bytes."""
HASH_WORKERS = min(4, os.cpu_count() or 1)  # hashing frees the interpreter


@dataclass(frozen=True)
class Store:
    """root/ab/abcd...: one file per content. Names, versions and origins are the locks' business.

    next_step: what brings back a file that is missing or damaged.
    """

    root: Path
    next_step: str = FETCH

    def path(self, sha256: str) -> Path:
        return self.root / sha256[:2] / sha256

    def has(self, file: LockedFile) -> bool:
        """Whether the file is here and of the right size. Cheap: reads no content."""
        return is_whole(self.path(file.sha256), file.size)

    def verified(self, file: LockedFile) -> Path:
        """The file's path, after reading all of it. IntegrityError when it is missing or not what was locked."""
        path = self.path(file.sha256)
        if not path.is_file():
            cause = f"{file.file} (size={file.size}, sha256={file.sha256}) is not in the store {self.root}"
            raise IntegrityError(cause, next_step=self.next_step)
        check(file, *sha256_file(path), f"{file.file} in the store ({path})", self.next_step)
        return path

    def add(self, source: Path, file: LockedFile) -> Path:
        """Take a copy of a file in. Raises IntegrityError, and keeps nothing, when it is not what was locked."""
        path, digest = self.path(file.sha256), hashlib.sha256()
        with source.open("rb") as opened, atomic_file(path) as target:
            while chunk := opened.read(CHUNK):
                digest.update(chunk)
                target.write(chunk)
            check(file, digest.hexdigest(), target.tell(), str(source), self.next_step)
        return path

    def link(self, file: LockedFile, target: Path) -> None:
        """Put the verified file at `target`: a hard link, or a copy on another file system."""
        from sparkpin.checkpoint.write import link_or_copy  # slow to import

        source = self.verified(file)
        with disk_errors(target.parent):
            try:
                link_or_copy(source, target)
            except OSError:
                target.unlink(missing_ok=True)
                raise


@contextlib.contextmanager
def locked_store(paths: Paths) -> Iterator[Store]:
    """The store, for who brings something into it."""
    with lock(paths.locks / "store.lock", on_wait="waiting for another run that fetches"):
        yield Store(paths.store)


def is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def move(path: Path, place: Path) -> None:
    """A complete file to its place. DiskError for a folder there, which may be somebody's work."""
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.replace(place)
    except IsADirectoryError as error:
        raise DiskError(f"{place}: got a folder, expected a file or nothing", next_step=f"rm -r {place}") from error


def check(file: LockedFile, sha256: str, size: int, what: str, next_step: str = FETCH) -> None:
    """Compare bytes that were read with the lock; IntegrityError names both sides."""
    if (sha256, size) != (file.sha256, file.size):
        raise IntegrityError.mismatch(what, (sha256, size), (file.sha256, file.size), next_step)


def find_missing(
    wanted: Iterable[tuple[LockedFile, Path]],
    hash_of: Callable[[Path], str] = lambda path: sha256_file(path)[0],
    *,
    remove: bool = True,
) -> list[LockedFile]:
    """The files that are absent, or damaged, which is reported. hash_of: SHA-256 of what is there.

    remove: what is damaged goes: who looks at sizes alone finds no file then, not a wrong one.
    """
    rows, missing = list(wanted), []
    with ThreadPoolExecutor(HASH_WORKERS) as pool:
        hashes = pool.map(lambda row: hash_of(row[1]) if row[1].is_file() else "", rows)
    for (file, path), sha256 in zip(rows, hashes, strict=True):
        if sha256 == file.sha256 and is_whole(path, file.size):
            continue
        missing.append(file)
        if sha256:
            what = f"{file.file} ({file.name}) is damaged in {path}"
            say(f"{what}: got SHA-256 {sha256}, expected {file.sha256}; it has to be fetched again")
            if remove:
                path.unlink()
    return missing


@contextlib.contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder in `folder`, from which what killed runs left goes. Only for who holds its lock."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
        with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as name:
            yield Path(name)
