"""Bring everything that a lock names into the store. The only network use besides `invoke lock`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.errors import InputError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch.debs import HowToGet, open_apt
from sparkpin.fetch.lock_stack import check_unique, scratch_folder
from sparkpin.fetch.source_archives import fetch_archives
from sparkpin.fetch.store import Store
from sparkpin.fetch.wheels import TICK, WheelTarget, arrived, download, target_of
from sparkpin.pins.schema import LockedFile, Stack, StackLock

PARALLEL = 4
BIG = 8_000_000  # a wheel of this size is fetched by a pip of its own, so that a killed run loses little
SLICE = 12
PACKAGE_LISTS = 80_000_000  # bytes; apt's lists of a Debian suite, unpacked


@dataclass(frozen=True)
class FetchReport:
    """files, bytes_total: of the lock; bytes_fetched: what was not in the store, or not right."""

    files: int
    bytes_total: int
    bytes_fetched: int


def fetch_stack(paths: Paths, stack: Stack, lock: StackLock, say: Say, how_to_get: HowToGet) -> FetchReport:
    """Everything of the lock into the store, verified. Files that are there are read again; a damaged one is replaced.

    how_to_get: what to do about files that nobody offers any more.
    Touches no network when nothing is missing. A killed run loses only unfinished slices. Raises NetworkError,
    IntegrityError (the index has other bytes than the lock; nothing of that file is stored) or DiskError.
    """
    check_unique(lock, f"pins/stacks/{lock.stack}.lock")
    store = Store(paths.store)
    with files.lock(paths.locks / "store.lock", on_wait=lambda: say("waiting for another run that fetches")):
        store.sweep()
        source = lock.source
        wheels = missing(store, [*lock.wheels, *(source.wheels if source else ())], say)
        underlay = missing(store, lock.underlay, say)
        debs = missing(store, [*lock.debs, *(source.debs if source else ())], say)
        archives = missing(store, source.archives if source else (), say)
        wanted = [*wheels, *underlay, *debs, *archives]
        if wanted:
            # apt hangs on a full disk, so there is no finding out on the way.
            needed = sum(file.size for file in wanted) + (PACKAGE_LISTS if debs else 0)
            files.require_space(paths.store, needed, "the locked files", "SPARKPIN_CACHE")
            folder = scratch_folder(paths)
            try:
                # pip takes one version of a distribution at a time.
                parts, target = [*slices(wheels), *slices(underlay)], target_of(stack, lock.debs)
                if parts or debs:
                    Fetch(stack, target, store, folder, say, how_to_get).run(parts, debs)
                if archives:
                    fetch_archives(stack, target, archives, folder / "source", store, say)
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
            next_step="`invoke fetch` where there is a network, or `invoke import` of a bundle that has its store",
        )


def missing(store: Store, wanted: Iterable[LockedFile], say: Say) -> list[LockedFile]:
    """The files that the store lacks; a damaged one is removed and told."""

    def intact(file: LockedFile) -> bool:
        if not store.path(file.sha256).exists():
            return False
        try:
            store.verified(file)
        except IntegrityError as error:
            say(f"damaged, fetching again: {error.message}")
            store.path(file.sha256).unlink()
            return False
        return True

    rows = list(wanted)
    with ThreadPoolExecutor(PARALLEL) as pool:  # hashing frees the interpreter
        return [file for file, good in zip(rows, pool.map(intact, rows), strict=True) if not good]


@dataclass(frozen=True)
class Fetch:
    """One run's shared parts."""

    stack: Stack
    target: WheelTarget
    store: Store
    folder: Path
    say: Say
    how_to_get: HowToGet

    def run(self, wheels: Sequence[list[LockedFile]], debs: list[LockedFile]) -> None:
        """Fetch slices in parallel. The first failure is raised once the slices that run have ended and are kept."""
        wanted = [*(wheel for part in wheels for wheel in part), *debs]
        count, size = len(wanted), sum(file.size for file in wanted)
        self.say(f"fetch {self.stack.name}: {count} files, {size / 1e6:.1f} MB")
        started, failure = time.monotonic(), None
        with ThreadPoolExecutor(PARALLEL) as pool:
            jobs: dict[Future[None], list[LockedFile]] = {}
            if debs:
                jobs[pool.submit(self.debs, debs)] = debs
            for number, part in enumerate(wheels):
                jobs[pool.submit(self.wheels, part, self.folder / str(number))] = part
            left, done_count, done_size = set(jobs), 0, 0
            try:
                while left:
                    ended, left = wait(left, timeout=TICK, return_when=FIRST_COMPLETED)
                    for job in ended:
                        if job.cancelled():
                            continue
                        if error := job.exception():
                            failure = failure or error
                            pool.shutdown(wait=False, cancel_futures=True)
                            continue
                        done_count += len(jobs[job])
                        done_size += sum(file.size for file in jobs[job])
                    underway = min(arrived(self.folder), size - done_size)
                    self.say(
                        f"  {done_count}/{count} files, {(done_size + underway) / 1e6:.1f}/{size / 1e6:.1f} MB, "
                        f"{time.monotonic() - started:.0f} s"
                    )
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        if failure:
            raise failure

    def debs(self, wanted: list[LockedFile]) -> None:
        root, folder = self.folder / "apt", self.folder / "debs"
        root.mkdir()
        folder.mkdir()
        apt = open_apt(root, self.stack)
        for start in range(0, len(wanted), 4 * SLICE):
            part = wanted[start : start + 4 * SLICE]
            apt.download(part, folder, self.how_to_get)
            self.keep(part, folder)

    def wheels(self, wanted: list[LockedFile], folder: Path) -> None:
        folder.mkdir()
        download(self.stack, self.target, wanted, folder, self.how_to_get)
        self.keep(wanted, folder)

    def keep(self, wanted: list[LockedFile], folder: Path) -> None:
        for file in wanted:
            source = folder / file.file
            if not source.is_file():
                seen = ", ".join(sorted(path.name for path in folder.glob("*.*"))) or "nothing"
                raise IntegrityError(f"{file.file} came under another name; there is: {seen}", next_step="invoke lock")
            try:
                self.store.add(source, file, move=True)
            except IntegrityError as error:
                advice = self.how_to_get([file])
                raise IntegrityError(error.message, next_step=f"nothing of it was stored. {advice}") from None


def slices(wheels: list[LockedFile]) -> Iterator[list[LockedFile]]:
    """Big wheels alone and first, the others by the dozen: four pips stay busy and none is started for a few bytes.

    Alone, too, are those that only PyTorch's own index may have (2.10.0+cu130), which are asked for one by one.
    """
    rows = sorted(wheels, key=lambda wheel: (-wheel.size, wheel.name))
    alone = [wheel for wheel in rows if wheel.size >= BIG or "+" in wheel.version]
    small = [wheel for wheel in rows if wheel not in alone]
    yield from ([wheel] for wheel in alone)
    for start in range(0, len(small), SLICE):
        yield small[start : start + SLICE]
