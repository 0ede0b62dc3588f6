"""Bring everything that a lock names into the store. The only network use besides `invoke lock`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sparkpin.core import files
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch.debs import fetch_debs
from sparkpin.fetch.lock_stack import check_unique
from sparkpin.fetch.store import Store, missing
from sparkpin.fetch.wheels import DOWNLOADS, fetch_wheels, target_of
from sparkpin.pins.schema import Stack, StackLock


@dataclass(frozen=True)
class FetchReport:
    """files, bytes_total: of the lock; bytes_fetched: what was not in the store, or not right."""

    files: int
    bytes_total: int
    bytes_fetched: int


def fetch_stack(paths: Paths, stack: Stack, lock: StackLock, say: Say) -> FetchReport:
    """Everything of the lock into the store, verified. Files that are there are read again; a damaged one is replaced.

    Touches no network when nothing is missing. What cannot be had keeps nothing else from being fetched. Raises
    NetworkError, IntegrityError (other bytes than in the lock; nothing of that file is stored) or DiskError.
    """
    check_unique(lock, f"pins/stacks/{lock.stack}.lock")
    store = Store(paths.store)
    with files.lock(paths.locks / "store.lock", on_wait=lambda: say("waiting for another run that fetches")):
        store.sweep()
        absent = {file.sha256 for file in missing(((file, store.path(file.sha256)) for file in lock.files), say)}
        wheels = [wheel for wheel in lock.wheels if wheel.sha256 in absent]
        debs = [deb for deb in lock.debs if deb.sha256 in absent]
        wanted = [*wheels, *debs]
        if wanted:
            size, copies = sum(file.size for file in wanted), sorted(wheel.size for wheel in wheels)[-DOWNLOADS:]
            files.require_space(paths.store, size + sum(copies), "the locked files", "SPARKPIN_CACHE")  # pip copies
            say(f"fetch {stack.name}: {len(wanted)} files, {size / 1e6:.1f} MB")
            with ThreadPoolExecutor(1) as pool:  # what fails, the other part is fetched to its end
                job = pool.submit(fetch_debs, stack, lock.time, debs, store, say)
                if wheels:
                    fetch_wheels(stack.python.torch_backend, target_of(stack, lock.debs), wheels, store, say)
            job.result()
    total = lock.files
    return FetchReport(len(total), sum(f.size for f in total), sum(f.size for f in wanted))


def require_fetched(paths: Paths, lock: StackLock) -> None:
    """InputError when the store lacks a file of the lock. Looks at sizes only: a file is verified when it is used."""
    store = Store(paths.store)
    locked = lock.files
    if absent := [file for file in locked if not store.has(file)]:
        first = ", ".join(file.file for file in absent[:3]) + (", ..." if len(absent) > 3 else "")
        raise InputError(
            f"{len(absent)} of {len(locked)} locked files are not in the store {paths.store}: {first}",
            next_step="`invoke build --fetch-only` with a network, or `invoke import` of a bundle that has its store",
        )
