"""Bring everything that a lock names into the store. The only network use besides `invoke lock`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.errors import InputError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch import transfer
from sparkpin.fetch.debs import open_apt
from sparkpin.fetch.lock_stack import check_unique, scratch_folder
from sparkpin.fetch.pip_settings import indexes
from sparkpin.fetch.store import LOST, Store, missing
from sparkpin.fetch.transfer import Piece
from sparkpin.fetch.uv_resolver import offered
from sparkpin.fetch.wheels import WheelTarget, http_client, origin_of, target_of
from sparkpin.pins.schema import LockedFile, Stack, StackLock

DEBS = 48  # packages that apt fetches at once
PACKAGE_LISTS = 80_000_000  # bytes; apt's lists of a Debian suite, unpacked


@dataclass(frozen=True)
class FetchReport:
    """files, bytes_total: of the lock; bytes_fetched: what was not in the store, or not right."""

    files: int
    bytes_total: int
    bytes_fetched: int


def fetch_stack(paths: Paths, stack: Stack, lock: StackLock, say: Say) -> FetchReport:
    """Everything of the lock into the store, verified. Files that are there are read again; a damaged one is replaced.

    Touches no network when nothing is missing. A wheel that a killed run began is gone on with. Raises NetworkError,
    IntegrityError (the index has other bytes than the lock; nothing of that file is stored) or DiskError.
    """
    check_unique(lock, f"pins/stacks/{lock.stack}.lock")
    store = Store(paths.store)
    with files.lock(paths.locks / "store.lock", on_wait=lambda: say("waiting for another run that fetches")):
        store.sweep()
        growing = {f"{file.sha256}.part" for file in lock.files}
        for part in (store.root / "incoming/wheels").glob("*.part"):
            if part.name not in growing:  # begun for a lock that has changed since
                part.unlink()
        wheels, debs = (
            missing(((file, store.path(file.sha256)) for file in part), say) for part in (lock.wheels, lock.debs)
        )
        wanted = [*wheels, *debs]
        if wanted:
            # apt hangs on a full disk, so there is no finding out on the way.
            needed = sum(file.size for file in wanted) + (PACKAGE_LISTS if debs else 0)
            files.require_space(paths.store, needed, "the locked files", "SPARKPIN_CACHE")
            folder, target = scratch_folder(paths), target_of(stack, lock.debs)
            say(f"fetch {stack.name}: {len(wanted)} files, {sum(file.size for file in wanted) / 1e6:.1f} MB")
            try:
                with ThreadPoolExecutor(1) as pool:  # what fails, the other part is fetched to its end and kept
                    job = pool.submit(fetch_debs, stack, debs, store, folder, say)
                    if wheels:
                        fetch_wheels(stack.name, stack.python.torch_backend, target, wheels, store, say)
                job.result()
            finally:
                files.sweep(folder.parent)
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


def fetch_wheels(
    name: str,
    backend: str,
    target: WheelTarget,
    wanted: Sequence[LockedFile],
    store: Store,
    say: Say,
    advice: str = LOST,
) -> None:
    """Wheels by byte ranges. One that nobody offers keeps no other from being fetched; it is raised then.

    name: what they are for; backend: see `uv_resolver.resolve`; advice: for one that is gone, or another.
    """
    env, grow = indexes(), store.root / "incoming/wheels"
    pieces = list[Piece]()
    with http_client(env) as client:
        urls, faults = offered(backend, target, wanted, env, advice)
        for wheel, url in urls:
            what = f"{wheel.file} (sha256={wheel.sha256})"
            origin = origin_of(url, what, client, advice)
            size, grown = wheel.size, grow / f"{wheel.sha256}.part"
            place = store.path(wheel.sha256)
            pieces.append(Piece(origin, wheel.file, size, 0, size, grown, place, wheel.sha256, mode=0o644))
        transfer.fetch(pieces, say, title=f"fetching {name}", advice="")
    if faults:
        raise faults[0]
    shutil.rmtree(grow, ignore_errors=True)


def fetch_debs(stack: Stack, wanted: Sequence[LockedFile], store: Store, scratch: Path, say: Say) -> None:
    """By apt, which tells nothing while it works: so each part is told when it is in the store."""
    if not wanted:
        return
    root, folder = scratch / "apt", scratch / "debs"
    root.mkdir()
    folder.mkdir()
    say(f"  Debian {stack.system.suite}: package lists")
    apt, size = open_apt(root, stack), sum(file.size for file in wanted)
    for start in range(0, len(wanted), DEBS):
        part = wanted[start : start + DEBS]
        apt.download(part, folder)
        for file in part:
            if not (folder / file.file).is_file():
                seen = ", ".join(sorted(path.name for path in folder.glob("*.*"))) or "nothing"
                raise IntegrityError(f"{file.file} came under another name; there is: {seen}", next_step="invoke lock")
            try:
                store.add(folder / file.file, file)
            except IntegrityError as error:
                raise IntegrityError(error.message, next_step=f"nothing of it was stored. {LOST}") from None
            (folder / file.file).unlink()  # the disk has room for one copy of each
        done = wanted[: start + DEBS]
        stored = sum(file.size for file in done)
        say(f"  Debian packages: {len(done)} of {len(wanted)}, {stored / 1e6:,.1f} of {size / 1e6:,.1f} MB")
