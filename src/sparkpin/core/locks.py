"""What runs at the same time leave each other: claims against `prune`, and folders for what the engine saves."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sparkpin.core.errors import BusyError
from sparkpin.core.files import lock
from sparkpin.core.paths import Paths

PRUNE_LOCK = "prune.lock"


@contextlib.contextmanager
def claim(paths: Paths, *, exclusive: bool = False) -> Iterator[None]:
    """Builds and imports keep what they have written, or found, until a release's record names it: no prune removes
    anything meanwhile, and they do not wait for each other.

    exclusive: for prune, before all other locks, since builds take theirs after this one. A home may be used with
    several caches, and a cache with several homes, so there is a lock in each, always taken in this order.
    """
    line = f"waiting for {'builds and imports that run now' if exclusive else 'a prune'} to end"
    with (
        lock(paths.home / PRUNE_LOCK, shared=not exclusive, on_wait=line),
        lock(paths.locks / PRUNE_LOCK, shared=not exclusive, on_wait=line),
    ):
        yield


@contextlib.contextmanager
def saving_folder(paths: Paths) -> Iterator[Path]:
    """A folder of this run's own for what the engine saves: as large as the image, so what a killed run left, whose
    lock is free, goes."""
    with contextlib.ExitStack() as stack:
        with lock(paths.locks / "saved.lock"):
            paths.work.mkdir(parents=True, exist_ok=True)
            for left in paths.work.glob("saved-*"):
                with contextlib.suppress(BusyError), lock(left / "lock", wait=False):
                    shutil.rmtree(left, ignore_errors=True)
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="saved-", dir=paths.work)))
            stack.enter_context(lock(work / "lock"))
        yield work
