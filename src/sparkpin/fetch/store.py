"""The content-addressed store: every fetched file under its SHA-256, whole or absent."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import IntegrityError
from sparkpin.core.files import CHUNK, atomic_file, disk_errors, sha256_file
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

    @property
    def incoming(self) -> Path:
        """What is on its way here. Only for who holds the store's lock."""
        return self.root / "incoming"

    def path(self, sha256: str) -> Path:
        return self.root / sha256[:2] / sha256

    def has(self, file: LockedFile) -> bool:
        """Whether the file is here and of the right size. Cheap: reads no content."""
        try:
            return self.path(file.sha256).stat().st_size == file.size
        except FileNotFoundError:
            return False

    def verified(self, file: LockedFile) -> Path:
        """The file's path, after reading all of it. IntegrityError when it is missing or not what was locked."""
        path = self.path(file.sha256)
        if not path.is_file():
            raise IntegrityError(
                f"{file.file} (size={file.size}, sha256={file.sha256}) is not in the store {self.root}",
                next_step=self.next_step,
            )
        sha256, size = sha256_file(path)
        check(file, sha256, size, f"{file.file} in the store ({path})", self.next_step)
        return path

    def add(self, source: Path, file: LockedFile) -> Path:
        """Take a copy of a file in. Raises IntegrityError, and keeps nothing, when it is not what was locked."""
        path, digest, size = self.path(file.sha256), hashlib.sha256(), 0
        with source.open("rb") as opened, atomic_file(path) as target:
            while chunk := opened.read(CHUNK):
                digest.update(chunk)
                size += target.write(chunk)
            check(file, digest.hexdigest(), size, str(source), self.next_step)
        return path

    def link(self, file: LockedFile, target: Path) -> None:
        """Put the verified file at `target`: a hard link, or a copy on another file system."""
        source = self.verified(file)
        with disk_errors(target.parent):
            try:
                from sparkpin.checkpoint.write import link_or_copy  # slow to import

                link_or_copy(source, target)
            except OSError:
                target.unlink(missing_ok=True)
                raise


def check(file: LockedFile, sha256: str, size: int, what: str, next_step: str = FETCH) -> None:
    """Compare bytes that were read with the lock; IntegrityError names both sides."""
    if (sha256, size) != (file.sha256, file.size):
        raise IntegrityError.mismatch(
            what, expected_size=file.size, expected_sha256=file.sha256, size=size, sha256=sha256, next_step=next_step
        )


def find_missing(
    wanted: Iterable[tuple[LockedFile, Path]],
    hash_of: Callable[[Path], str] = lambda path: sha256_file(path)[0],
    *,
    remove: bool = True,
) -> list[LockedFile]:
    """The files that are absent, or damaged, which is reported. hash_of: SHA-256 of what is there.

    remove: what is damaged goes: who looks at sizes alone finds no file then, not a wrong one.
    """
    rows = list(wanted)

    def fault(row: tuple[LockedFile, Path]) -> str | None:
        file, path = row
        if not path.is_file():
            return ""
        if (size := path.stat().st_size) != file.size:
            return f"got size {size}, expected {file.size}"
        sha256 = hash_of(path)
        return None if sha256 == file.sha256 else f"got sha256 {sha256}, expected {file.sha256}"

    with ThreadPoolExecutor(HASH_WORKERS) as pool:
        faults = list(pool.map(fault, rows))
    for (file, path), why in zip(rows, faults, strict=True):
        if why:
            what = file.file if file.name == file.file else f"{file.name} of {file.file}"
            say(f"{path} ({what}) is damaged ({why}) and has to be fetched again")
            if remove:
                path.unlink(missing_ok=True)
    return [file for (file, _), why in zip(rows, faults, strict=True) if why is not None]
