"""Files that are either whole or absent: temporary name, fsync, rename; hashes; locks between runs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from io import RawIOBase, UnsupportedOperation
from pathlib import Path
from typing import IO, Any

from sparkpin.core.errors import BusyError, DiskError, InputError

CHUNK = 1 << 20
HEAD = 4096  # bytes: enough to tell what kind of file it is
PARTIAL = ".partial-"  # every unfinished file or folder starts so; nothing reads them and `sweep` removes them


def sha256_file(path: Path) -> tuple[str, int]:
    """SHA-256 (hex) and size in bytes of a file, read in chunks."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size


def sha256_of(file: RawIOBase) -> str:
    """SHA-256 (hex) of all of an open file, read in chunks."""
    digest = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


class Joined(RawIOBase):
    """Bytes that come in pieces, of which some may be empty, as a file that can be read once.

    Seeking goes forward only; what is passed over is not copied. So `tarfile` reads an archive as it comes with mode
    "r:" (its stream mode copies a whole buffer for every header).
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces, self.left, self.at = iter(pieces), memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        """Exactly `size` bytes, fewer at the end only."""
        taken, wanted = [], size
        while wanted and (part := self.take(wanted)):
            taken.append(part)
            wanted -= len(part)
        return b"".join(taken)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or offset < self.at:
            raise UnsupportedOperation(f"seek to {offset} from {self.at}: what comes in pieces is read once")
        while self.at < offset and self.take(offset - self.at):
            pass
        return self.at

    def take(self, most: int) -> memoryview:
        """The next bytes as they lie, at most so many (negative: what the piece has); empty at the end."""
        while not self.left:
            piece = next(self.pieces, None)
            if piece is None:
                return self.left
            self.left = memoryview(piece)
        count = len(self.left) if most < 0 else min(most, len(self.left))
        taken, self.left = self.left[:count], self.left[count:]
        self.at += count
        return taken


def git_blob_sha1(data: bytes) -> str:
    """The hash that git, and so the Hub's listing, has for a small file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Turn "no space", "quota", "read-only", "not yours", and a folder that cannot be made, into one clear error that
    names it; a file elsewhere that may not be opened, into one that names that file."""
    try:
        yield
    except PermissionError as error:
        name = error.filename if error.filename2 is None else None
        if isinstance(name, str | Path) and not Path(name).is_relative_to(where) and Path(name) not in where.parents:
            raise DiskError(f"cannot open {name}: {error.strerror}", next_step=f"chmod a+r {name}") from error
        raise DiskError(
            f"cannot write to {where}: {error.strerror} ({error.filename})",
            next_step=f"sudo chown -R $USER {where}, or set SPARKPIN_CACHE and SPARKPIN_HOME to folders of your own",
        ) from error
    except FileNotFoundError as error:
        if not isinstance(error.filename, str | Path) or Path(error.filename) not in (where, *where.parents):
            raise
        raise DiskError(
            f"cannot write to {where}: {error.filename} cannot be made ({error.strerror})",
            next_step="set SPARKPIN_CACHE and SPARKPIN_HOME to folders of a disk",
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        free = shutil.disk_usage(existing_parent(where)).free
        raise DiskError(
            f"cannot write to {where}: {error.strerror} ({free / 1e6:.0f} MB free)",
            next_step="free space there (`invoke prune --keep 2` removes old releases), or set SPARKPIN_CACHE and "
            "SPARKPIN_HOME to a larger disk",
        ) from error


def output_file(option: str, name: str, *, like: str = "NAME", own: bytes = b"") -> Path:
    """Where a command is to write what it makes. like: a name for the hint; own: what the head of a file has that the
    command wrote earlier, and may write again.

    InputError for a folder, for a file that may be somebody's work, and where no folder is there to hold it.
    """
    path = Path(name).absolute()
    if path.is_dir():
        raise InputError(
            f"{option} {name}: is a folder, wanted a file", next_step=f"name one in it: {option} {path / like}"
        )
    if not path.parent.is_dir():
        raise InputError(f"{option} {name}: there is no folder {path.parent}", next_step=f"mkdir -p {path.parent}")
    if path.exists() and not (own and path.is_file() and own in head_of(path)):
        raise InputError(
            f"{option} {name}: is there already, and is not overwritten",
            next_step=f"name another file, or rm {shlex.quote(str(path))}",
        )
    return path


def head_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)


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
    """A file that appears under `path` complete and synced, or not at all."""
    with disk_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, partial = half_written(path)
        try:
            with os.fdopen(fd, "wb") as file:
                yield file
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
                partial.replace(path)  # while its lock is held
            sync_folder(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def half_written(path: Path) -> tuple[int, Path]:
    """A new file, open, beside `path`. Those that killed writers of `path` left there go: a living one holds its lock.

    Without it a partial file would lie about until `prune` finds it old.
    """
    before, after = f"{PARTIAL}{path.name[:100]}.", ".half"
    for left in path.parent.glob(f"{glob.escape(before)}*{after}"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError), left.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left.unlink()
    while True:
        fd, name = tempfile.mkstemp(prefix=before, suffix=after, dir=path.parent)
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return fd, Path(name)
        os.close(fd)  # another writer of `path` came between the two lines, and took it for a dead one's


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


def remove_tree(folder: Path, removed: Callable[[int], object]) -> None:
    """Remove a folder as far as that goes. removed: is told the bytes of each file that went."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = os.path.join(root, name)
            with contextlib.suppress(OSError):
                size = os.lstat(path).st_size
                os.unlink(path)
                removed(size)
        with contextlib.suppress(OSError):
            os.rmdir(root)
    shutil.rmtree(folder, ignore_errors=True)  # links to folders, and what has to be made writable


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
def lock(
    path: Path, *, shared: bool = False, wait: bool = True, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold an advisory lock between processes; the kernel frees it when the holder dies, however it dies.

    shared: together with others who share it. With `wait`, calls `on_wait` once (to tell the person) and then waits;
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
                on_wait()
            fcntl.flock(file, how)
        yield
