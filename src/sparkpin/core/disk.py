"""When files and folders were last touched, and taking them away."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.errors import DiskError


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
