"""Write the shards of a plan: several at once, each whole or not there, the finished ones kept for the next run.

A shard that is whole and on disk gets a line in the journal with the SHA-256 of what was sent there; a later run of the
same plan trusts such a shard once its hash is right again.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from sparkpin.checkpoint.content import JOURNAL
from sparkpin.checkpoint.copying import ByteRange, gather, write_all
from sparkpin.checkpoint.layout import Shard
from sparkpin.checkpoint.plan import CheckpointPlan
from sparkpin.checkpoint.repository import Places
from sparkpin.checkpoint.safetensors import read_header_bytes
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError
from sparkpin.core.terminal import Say

UNFINISHED = ".unfinished"
THREADS = 2
"""Shards at once: while one waits for the disk, another is hashed. A kill costs what is begun, so no more than that."""


class WrittenFile(NamedTuple):
    """What lies on disk under a name."""

    path: str
    size: int
    sha256: str


def write_shards(folder: Path, plan: CheckpointPlan, places: Places, key: str, say: Say) -> dict[str, WrittenFile]:
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


def finished(folder: Path, plan: CheckpointPlan, key: str, say: Say) -> dict[str, WrittenFile]:
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


def read_journal(folder: Path, key: str) -> list[WrittenFile]:
    """The lines of the journal; none if it is of another plan. A line that a kill cut in two says nothing."""
    entries = []
    try:
        lines = (folder / JOURNAL).read_text(encoding="utf-8").splitlines()
        if json.loads(lines[0]) != {"key": key}:
            return []
        for line in lines[1:]:
            value = json.loads(line)
            entries.append(WrittenFile(str(value["path"]), int(value["size"]), str(value["sha256"])))
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return entries


def write_journal(folder: Path, key: str, entries: Iterable[WrittenFile]) -> None:
    with files.atomic_file(folder / JOURNAL) as file:
        file.write((json.dumps({"key": key}) + "\n").encode())
        for entry in entries:
            file.write(journal_line(entry))


def journal_line(entry: WrittenFile) -> bytes:
    return (json.dumps(entry._asdict()) + "\n").encode()


class Work:
    """One call of `write_shards`."""

    def __init__(self, folder: Path, plan: CheckpointPlan, places: Places, say: Say) -> None:
        self.folder, self.plan, self.places, self.say = folder, plan, places, say
        self.stop = threading.Event()

    def all(self, left: Sequence[Shard], before: int) -> dict[str, WrittenFile]:
        """Write shards; before: how many of the plan's were there. A finished one is kept, whatever comes of others."""
        done: dict[str, WrittenFile] = {}
        running: dict[Future[str], Shard] = {}
        with ThreadPoolExecutor(THREADS, "shard") as pool, (self.folder / JOURNAL).open("ab") as journal:

            def settle() -> None:
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in sorted(ended, key=lambda future: future.exception() is not None):
                    entry = self.named(running.pop(future), future.result())
                    write_all(journal.fileno(), journal_line(entry))
                    os.fsync(journal.fileno())
                    done[entry.path] = entry

            try:
                for number, shard in enumerate(left, before + 1):
                    if len(running) == THREADS:
                        settle()
                    self.say(f"writing {shard.path} ({number} of {len(self.plan.shards)}, {shard.size / 1e6:,.1f} MB)")
                    running[pool.submit(self.write, shard)] = shard
                while running:
                    settle()
            except BaseException:
                self.stop.set()
                raise
        return done

    def named(self, shard: Shard, sha256: str) -> WrittenFile:
        """Give a written shard its name."""
        unfinished = self.unfinished(shard)
        if unfinished.stat().st_size != shard.size or read_header_bytes(unfinished) != shard.header:
            raise CheckpointError(
                f"{unfinished}: what was written is not there ({unfinished.stat().st_size} bytes, wanted {shard.size}, "
                "or another header)",
                next_step="the same command again; if it stays, look at the disk (dmesg)",
            )
        unfinished.replace(self.folder / shard.path)
        files.sync_folder(self.folder)
        return WrittenFile(shard.path, shard.size, sha256)

    def unfinished(self, shard: Shard) -> Path:
        return self.folder / (shard.path + UNFINISHED)

    def write(self, shard: Shard) -> str:
        runs: list[ByteRange] = []
        for span in shard.spans:
            path, begin = self.places.of(span.first)
            runs.append(ByteRange(path, begin, begin + span.length))
        return gather(self.unfinished(shard), shard.size, shard.header, runs, self.stop)
