"""Files that are either whole or absent: temporary name, fsync, rename; hashes; locks between runs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import IO, Any

from sparkpin.core.errors import BusyError, DiskError, InputError
from sparkpin.core.terminal import say

CHUNK = 1 << 20
# 2026-01-01T00:00:00Z, the date of every built byte. No commit's date: an image must not change because a README did.
EPOCH = 1767225600
PARTIAL = ".partial-"  # every unfinished file or folder starts so; nothing reads them and `sweep` removes them


def sha256_file(path: Path) -> tuple[str, int]:
    """SHA-256 (hex) and size in bytes of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()


def sha256_of(file: RawIOBase) -> str:
    """SHA-256 (hex) of all of an open file, which may be a part of another."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


def git_blob_sha1(data: bytes) -> str:
    """The hash that git, and so the Hub's listing, has for a small file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn "no space", "quota", "read-only", "not yours", and a folder that cannot be made, into one clear error that
    names it; a file elsewhere that may not be opened, into one that names that file."""
    try:
        yield
    except OSError as error:
        name = error.filename if error.filename2 is None and isinstance(error.filename, str | Path) else where
        is_within, cause = Path(name).is_relative_to(where) or Path(name) in where.parents, f"{error.strerror}"
        if isinstance(error, PermissionError):
            if not is_within:
                raise DiskError(f"cannot open {name}: {cause}", next_step=f"chmod a+r {name}") from error
            cause, step = f"{cause} ({error.filename})", f"sudo chown -R $USER {where}, or set"
        elif isinstance(error, FileNotFoundError) and Path(name) in (where, *where.parents) and error.filename:
            cause, step = f"{name} cannot be created ({cause})", "set"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            cause += f" ({shutil.disk_usage(existing_parent(where)).free / 1e6:.0f} MB free)"
            step = "free space there (`invoke prune --keep 2` removes old releases), or set"
        else:
            raise
        raise DiskError(
            f"cannot write to {where}: {cause}",
            next_step=f"{step} SPARKPIN_CACHE and SPARKPIN_HOME to folders of your own on a disk with room",
        ) from error


def output_file(option: str, name: str, *, like: str = "NAME") -> Path:
    """Where a command is to write what it makes. like: a name for the hint.

    InputError for a folder, for a file that may be somebody's work, and where no folder is there to hold it.
    """
    path = Path(name).absolute()
    if path.is_dir():
        cause, step = "is a folder, expected a file", f"name one in it: {option} {path / like}"
    elif not path.parent.is_dir():
        cause, step = f"there is no folder {path.parent}", f"mkdir -p {path.parent}"
    elif path.exists():
        cause, step = "is there already, and is not overwritten", f"name another file, or rm {shlex.quote(str(path))}"
    else:
        return path
    raise InputError(f"{option} {name}: {cause}", next_step=step)


def require_space(folder: Path, needed: int, what: str, variable: str) -> None:
    """DiskError, before the first byte is written, when the disk of `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(existing_parent(folder)).free
    if free < needed:
        raise DiskError(
            f"{what} need {needed:,} bytes in {folder}, {free:,} are free",
            next_step=f"free space there, or set {variable} to a folder on a larger disk",
        )


def existing_parent(path: Path) -> Path:
    """The nearest folder at or above `path` that exists."""
    while not path.exists():
        path = path.parent
    return path


@contextlib.contextmanager
def atomic_file(path: Path, mode: int = 0o644) -> Iterator[IO[bytes]]:
    """A file that appears under `path` complete and synced, or not at all; `prune` finds what a killed writer left."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=PARTIAL, dir=path.parent)
        partial = Path(name)
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            partial.replace(path)
            sync_folder(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder that appears under `path` complete, or not at all. `path` must not exist yet.

    Files are synced before the rename, so that a crash cannot leave a folder with empty files.
    """
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=path.parent))
        try:
            yield partial
            for file in sorted(partial.rglob("*")):
                if file.is_file() and not file.is_symlink():
                    sync_file(file)
            partial.chmod(0o755)
            partial.replace(path)
            sync_folder(path.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def write_json(path: Path, value: Any, mode: int = 0o644) -> None:
    """Write indented JSON with sorted keys, atomically."""
    with atomic_file(path, mode) as file:
        file.write((json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


sync_folder = sync_file


def sweep(folder: Path) -> None:
    """Remove what killed runs left half-made in `folder`. Call it only while holding the lock of that folder."""
    for left in folder.glob(PARTIAL + "*"):
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


@contextlib.contextmanager
def lock(path: Path, *, shared: bool = False, wait: bool = True, on_wait: str = "") -> Iterator[None]:
    """Hold an advisory lock between processes; the kernel frees it when the holder dies, however it dies.

    shared: together with others who share it. With `wait`, prints `on_wait` where there is something to wait for;
    without, raises BusyError.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        try:
            fcntl.flock(file, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise BusyError(f"another run holds {path}", next_step="wait for it to end, then try again") from None
            if on_wait:
                say(on_wait)
            fcntl.flock(file, how)
        yield
