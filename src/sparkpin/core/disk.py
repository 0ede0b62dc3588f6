"""What files and folders take from the disk, and taking them away."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.errors import DiskError

BLOCK = 512  # bytes; the unit of st_blocks, whatever the file system


def freed_bytes(groups: Mapping[str, Iterable[Path]]) -> dict[str, int]:
    """Bytes that the disk gets back, by group, when all paths of all groups are removed, in this order.

    A file with several links counts once, where its last link goes, and as nothing while another link stays. Paths that
    are not there, or lie below another one, count as nothing.
    """
    links: dict[tuple[int, int], int] = {}
    counted: set[Path] = set()
    freed: dict[str, int] = {}
    for group, paths in groups.items():
        freed[group] = 0
        for entry in (entry for path in paths for entry in entries(path)):
            with contextlib.suppress(FileNotFoundError):
                status = entry.lstat()
                if entry in counted:
                    continue
                counted.add(entry)
                inode = (status.st_dev, status.st_ino)
                links[inode] = links.get(inode, 0) + 1
                # A folder's links are its subfolders, and it always goes with them.
                if (entry.is_dir() and not entry.is_symlink()) or links[inode] == status.st_nlink:
                    freed[group] += status.st_blocks * BLOCK
    return freed


def entries(path: Path) -> Iterator[Path]:
    """The path, and all below it when it is a folder."""
    yield path
    if path.is_dir() and not path.is_symlink():
        yield from path.rglob("*")


def last_touched(path: Path) -> float:
    """Seconds since the epoch of the last change of a file or of anything in a folder; a new link to a file is one."""
    times = [path.lstat().st_ctime]
    for entry in path.rglob("*") if path.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # a run that works there is the newest of all
            times.append(entry.lstat().st_ctime)
    return max(times)


def partials(root: Path) -> Iterator[Path]:
    """What runs have begun and not finished, or been killed at."""
    for parent, folders, names in os.walk(root):
        found = [name for name in (*folders, *names) if name.startswith(files.PARTIAL)]
        yield from (Path(parent, name) for name in found)
        folders[:] = [name for name in folders if name not in found]


def remove_path(path: Path) -> None:
    """Remove a file or folder, or DiskError. One that is not there is no error.

    A folder is renamed first: a removal that is killed must not leave half a checkpoint that looks whole.
    """
    left = path
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        doomed = Path(tempfile.mkdtemp(prefix=files.PARTIAL, dir=path.parent))
        left = path.replace(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise DiskError(f"cannot remove {path}: {error}", next_step=f"sudo rm -r {left}") from error
