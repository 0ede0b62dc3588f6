"""Write the shards of a plan: several at once, each whole or not there, the finished ones kept for the next run.

While the kernel copies a shard, another thread reads the same bytes at their sources and hashes them, so that the
SHA-256 says what should be in the file, not what is. A shard that is whole, on disk and hashed gets a line in the
journal; a later run of the same plan trusts such a shard once its hash is right again.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, NamedTuple

from sparkpin import files
from sparkpin.checkpoint.copying import Copier, Reader, Run, Stopped, write_all
from sparkpin.checkpoint.layout import Shard, header_for, in_order
from sparkpin.checkpoint.plan import Plan
from sparkpin.checkpoint.repository import Places, Source
from sparkpin.checkpoint.safetensors import read_header, read_header_bytes
from sparkpin.errors import CheckpointError

JOURNAL = "journal"
UNFINISHED = ".unfinished"
THREADS = max(2, min(8, os.cpu_count() or 2))


class Written(NamedTuple):
    """What lies on disk under a name."""

    path: str
    size: int
    sha256: str


class Contents(NamedTuple):
    """What a shard will hold: its header, then the runs of bytes, one behind the other."""

    header: bytes
    runs: list[Run]


def write_shards(folder: Path, plan: Plan, places: Places, key: str, say: Callable[[str], None]) -> dict[str, Written]:
    """Let `folder` hold the shards of the plan. What a killed run finished is hashed, and written anew if it differs.

    Raises what reading and writing raise; shards that were finished then stay for the next run.
    """
    with files.disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        done = finished(folder, plan, key, say)
        left = [shard for shard in plan.shards if shard.path not in done]
        if left:
            done |= Work(folder, plan, places, say).all(left, len(done))
    return done


def finished(folder: Path, plan: Plan, key: str, say: Callable[[str], None]) -> dict[str, Written]:
    """The shards that the journal names and whose bytes are what it says. Everything else is removed."""
    known = {entry.path: entry for entry in read_journal(folder, key)}
    sizes = {shard.path: shard.size for shard in plan.shards}
    there = [path for path in folder.rglob("*") if path.is_file() and path != folder / JOURNAL]
    candidates = []
    for path in there:
        entry = known.get(path.relative_to(folder).as_posix())
        if entry and sizes.get(entry.path) == entry.size == path.stat().st_size:
            candidates.append(entry)
        else:
            path.unlink()
    if candidates:
        say(f"checking {len(candidates)} of {len(plan.shards)} shards that an earlier run finished")
    with ThreadPoolExecutor(THREADS) as pool:
        hashes = pool.map(lambda entry: files.sha256_file(folder / entry.path)[0], candidates)
        right = {entry.path: entry for entry, sha256 in zip(candidates, hashes, strict=True) if entry.sha256 == sha256}
    for entry in candidates:
        if entry.path not in right:
            say(f"{entry.path} is not what it was: writing it again")
            (folder / entry.path).unlink()
    write_journal(folder, key, right.values())
    return right


def read_journal(folder: Path, key: str) -> list[Written]:
    """The lines of the journal; none if it is of another plan. A line that a kill cut in two says nothing."""
    entries = []
    try:
        lines = (folder / JOURNAL).read_text(encoding="utf-8").splitlines()
        if json.loads(lines[0]) != {"key": key}:
            return []
        for line in lines[1:]:
            value = json.loads(line)
            entries.append(Written(str(value["path"]), int(value["size"]), str(value["sha256"])))
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return entries


def write_journal(folder: Path, key: str, entries: Iterable[Written]) -> None:
    with files.atomic_file(folder / JOURNAL) as file:
        file.write((json.dumps({"key": key}) + "\n").encode())
        for entry in entries:
            file.write(journal_line(entry))


def journal_line(entry: Written) -> bytes:
    return (json.dumps(entry._asdict()) + "\n").encode()


class Running(NamedTuple):
    """A shard that threads are at."""

    shard: Shard
    header: bytes
    copied: Future[None]
    hashed: Future[str]


class Work:
    """One call of `write_shards`."""

    def __init__(self, folder: Path, plan: Plan, places: Places, say: Callable[[str], None]) -> None:
        self.folder, self.plan, self.places, self.say = folder, plan, places, say
        self.stop = threading.Event()

    def all(self, left: Sequence[Shard], before: int) -> dict[str, Written]:
        done: dict[str, Written] = {}
        running: deque[Running] = deque()
        with ThreadPoolExecutor(THREADS, "checkpoint") as pool, (self.folder / JOURNAL).open("ab") as journal:
            try:
                for number, shard in enumerate(left, before + 1):
                    contents = self.contents(shard)
                    self.say(f"writing {shard.path} ({number} of {len(self.plan.shards)}, {shard.size / 1e6:,.1f} MB)")
                    copied, hashed = pool.submit(self.copy, shard, contents), pool.submit(self.hash, contents)
                    running.append(Running(shard, contents.header, copied, hashed))
                    while len(running) >= THREADS or (running and shard is left[-1]):
                        entry = self.settle(running.popleft())
                        write_all(journal.fileno(), journal_line(entry))
                        os.fsync(journal.fileno())
                        done[entry.path] = entry
            except BaseException:
                self.stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        return done

    def settle(self, running: Running) -> Written:
        """Wait for a shard and give it its name."""
        shard = running.shard
        parts: list[Future[Any]] = [running.copied, running.hashed]
        for part in wait_for(parts, return_when=FIRST_EXCEPTION).done:
            part.result()
        unfinished = self.folder / (shard.path + UNFINISHED)
        if unfinished.stat().st_size != shard.size or read_header_bytes(unfinished) != running.header:
            raise CheckpointError(
                f"{unfinished}: what was written is not there ({unfinished.stat().st_size} bytes, wanted {shard.size}, "
                "or another header)",
                next_step="the same command again; if it stays, look at the disk (dmesg)",
            )
        unfinished.replace(self.folder / shard.path)
        files.sync_folder(self.folder)
        return Written(shard.path, shard.size, running.hashed.result())

    def contents(self, shard: Shard) -> Contents:
        base = self.places.folders[self.plan.base]
        header = read_header(base / shard.path) if shard.in_base else None
        sources = in_order(shard, header, self.plan.base)
        first, runs = header_for(shard, sources), list(joined(sources, self.places))
        size = len(first) + sum(run.end - run.begin for run in runs)
        if size != shard.size:
            raise CheckpointError(
                f"{base / shard.path}: its header is not the one that the plan was made from "
                f"({size} bytes would be written, wanted {shard.size})",
                next_step="invoke fetch",
            )
        return Contents(first, runs)

    def copy(self, shard: Shard, contents: Contents) -> None:
        path = self.folder / (shard.path + UNFINISHED)
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(target, contents.header)
            copier = Copier(target, self.stop)
            with Reader() as reader:
                for run in contents.runs:
                    copier.copy(reader, run)
            os.fsync(target)
        finally:
            os.close(target)

    def hash(self, contents: Contents) -> str:
        digest = hashlib.sha256(contents.header)
        with Reader() as reader:
            for run in contents.runs:
                for chunk in reader.chunks(*run):
                    if self.stop.is_set():
                        raise Stopped
                    digest.update(chunk)
        return digest.hexdigest()


def joined(sources: Iterable[Source], places: Places) -> Iterator[Run]:
    """Where the tensors lie, as few runs as there can be."""
    last: Run | None = None
    for source in sources:
        if not source.info.nbytes:
            continue
        path, begin = places.of(source)
        end = begin + source.info.nbytes
        if last and (last.path, last.end) == (path, begin):
            last = Run(path, last.begin, end)
            continue
        if last:
            yield last
        last = Run(path, begin, end)
    if last:
        yield last
