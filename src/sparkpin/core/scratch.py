"""A folder for what the engine saves: as large as the image, so what a killed run left must not stay."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sparkpin.core.errors import BusyError
from sparkpin.core.files import lock
from sparkpin.core.paths import Paths


@contextlib.contextmanager
def saving_folder(paths: Paths) -> Iterator[Path]:
    """A folder of this run's own. What a killed run left there, whose lock is free, goes."""
    with contextlib.ExitStack() as stack:
        with lock(paths.locks / "saved.lock"):
            paths.work.mkdir(parents=True, exist_ok=True)
            for left in paths.work.glob("saved-*"):
                with contextlib.suppress(BusyError), lock(left / "lock", wait=False):
                    shutil.rmtree(left, ignore_errors=True)
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="saved-", dir=paths.work)))
            stack.enter_context(lock(work / "lock"))
        yield work
