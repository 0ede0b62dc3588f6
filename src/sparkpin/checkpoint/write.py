"""Carry out a plan: a checkpoint folder that is complete and verified, or is not there.

Every byte that is written passes through this process once, for its SHA-256, which goes into the record and into the
table of hashes. Shards that a killed run finished are known by that table, and stay if their hash is right again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.content import OWN, RECORD, Hashes, bad
from sparkpin.checkpoint.draft import Shard
from sparkpin.checkpoint.plan import CheckpointPlan, donor_tensors
from sparkpin.checkpoint.repository import ByteRange, Places
from sparkpin.checkpoint.steps import FORMAT, MTP_FP8, checkpoint_key, used_repositories
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.pins.schema import DRAFTER, ModelLock, ModelPin

SPARE = 64 << 20
"""Bytes that must stay free on the disk besides what is written."""

UNFINISHED = ".unfinished"
THREADS = 3
"""Shards at once: while one waits for the disk, others are hashed. A kill costs what is begun, so no more than that."""

STEP = 16 << 20
"""Bytes after which the kernel is asked to drop a file's pages: it drops what is on disk, and begins to write what is
not, without waiting for it."""


class GatheringStopped(Exception):
    """Another part of the work failed, or a person stopped it."""


def checkpoint_folder(paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> Path:
    return paths.checkpoints / pin.name / checkpoint_key(pin, lock, steps)[:16]


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint grows; named after its key, so that a later run finds what an earlier one finished."""
    return folder.with_name(f"{files.PARTIAL}{folder.name}")


def hold_model(paths: Paths, model: str) -> contextlib.AbstractContextManager[None]:
    """One run at a time makes a checkpoint of a model."""
    waiting = f"waiting for another run that builds a checkpoint of {model}"
    return files.lock(paths.locks / f"checkpoint-{model}.lock", on_wait=waiting)


def write_checkpoint(
    folder: Path, pin: ModelPin, lock: ModelLock, plan: CheckpointPlan, places: Places, hashes: Hashes
) -> None:
    """Write everything next to `folder` and rename it last. Only while holding the model's lock.

    Raises CheckpointError for sources that are no longer the locked ones when their bytes have been written, DiskError
    and what reading raises; shards that were finished then stay for the next run.
    """
    partial = partial_folder(folder)
    for left in folder.parent.glob(files.PARTIAL + "*"):
        if left != partial:
            shutil.rmtree(left, ignore_errors=True)
    needed = disk_needed(folder, places.folders[plan.base], plan)
    files.require_space(folder.parent, needed, "the checkpoint's files", "SPARKPIN_HOME")
    if folder.exists():
        say(f"checkpoint {folder.name} came from another machine, or is damaged: building it again")
        set_aside(folder)
    with files.disk_errors(folder.parent):
        partial.mkdir(parents=True, exist_ok=True)
        written = write_shards(partial, plan, places, hashes)
        try:
            check_sources(lock, places, hashes)
            # Without index and config, which come last, nobody takes the folder for a model.
            for link in plan.links:
                hashes.link(link_or_copy, places.linked(link.path, link.of or plan.base), partial / link.path)
            written |= {text.path: hashlib.sha256(text.data).hexdigest() for text in plan.texts}
            for name, data in (*plan.texts, (RECORD, record(pin, lock, plan, written))):
                with files.atomic_file(partial / name, 0o444) as file:
                    file.write(data)
            check_files(partial, plan)
        except CheckpointError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        for path in sorted({partial, *(child for child in partial.rglob("*") if child.is_dir())}):
            files.sync_folder(path)
        partial.replace(folder)
        files.sync_folder(folder.parent)
    for name, row in file_rows(pin, lock, plan, written).items():
        hashes.note(folder / name, row["sha256"])
    hashes.save()


def write_shards(partial: Path, plan: CheckpointPlan, places: Places, hashes: Hashes) -> dict[str, str]:
    """Let a folder hold the shards of the plan, several at once; gives their SHA-256, with which they are in the table
    of hashes. What a killed run finished is hashed, and written again if it differs; everything else there is removed.
    """
    sizes, stop = {shard.path: shard.size for shard in plan.shards}, threading.Event()
    for path in partial.rglob("*"):
        name = path.relative_to(partial).as_posix()
        if path.is_file() and not (sizes.get(name) == path.stat().st_size and hashes.known(path)):
            path.unlink()

    def write(number: int, shard: Shard) -> str:
        path = partial / shard.path
        if path.exists():
            say(f"checking {shard.path}, which an earlier run finished")
            sha256, _ = files.sha256_file(path)
            if sha256 == hashes.known(path):
                return sha256
            path.unlink()
        if stop.is_set():
            raise GatheringStopped
        say(f"writing {shard.path} ({number} of {len(plan.shards)}, {shard.size / 1e6:,.1f} MB)")
        unfinished = path.with_name(path.name + UNFINISHED)
        sha256 = gather(unfinished, shard.header, (places.of(*span) for span in shard.spans), stop)
        unfinished.replace(path)
        files.sync_folder(partial)
        hashes.note(path, sha256)
        hashes.save()
        return sha256

    with ThreadPoolExecutor(THREADS, "shard") as pool:
        futures = [pool.submit(write, number, shard) for number, shard in enumerate(plan.shards, 1)]
        try:
            return {shard.path: future.result() for shard, future in zip(plan.shards, futures, strict=True)}
        except BaseException:
            stop.set()
            raise


def gather(path: Path, first: bytes, ranges: Iterable[ByteRange], stop: threading.Event) -> str:
    """Write a file, `first` and then ranges of other files; it is on disk, read-only, when this returns its SHA-256.

    It leaves the page cache, where it would drive out other files: a GPU shares that memory on a Spark.
    Raises IntegrityError for a source that ends before its range, OSError and GatheringStopped.
    """
    digest, written, clean = hashlib.sha256(first), len(first), 0
    with path.open("wb") as target:
        target.write(first)
        for chunk in chain.from_iterable(one.chunks() for one in ranges):
            if stop.is_set():
                raise GatheringStopped
            digest.update(chunk)
            target.write(chunk)
            written += len(chunk)
            if written - clean >= STEP:
                os.posix_fadvise(target.fileno(), 0, written, os.POSIX_FADV_DONTNEED)
                clean = written
        target.flush()
        os.fchmod(target.fileno(), 0o444)  # as the files of the cache: nobody changes it by mistake
        os.fsync(target.fileno())
        os.posix_fadvise(target.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


def check_sources(lock: ModelLock, places: Places, hashes: Hashes) -> None:
    """CheckpointError for bytes that have changed since they were verified: what was copied meanwhile may be anything.

    Where only ctime has changed, all is read again: it may be a link that was made or removed.
    """
    for name, folder in places.folders.items():
        for file in lock.repositories[name].files:
            if (got := hashes.sha256(folder / file.file)) != file.sha256:
                cause = f"{folder / file.file}: got sha256 {got}, expected {file.sha256}, as it was before the copy"
                raise CheckpointError(
                    cause, next_step="find out what else writes there, then run the same command again"
                )


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link (the cache's files are read-only and never written in place), or a copy where none can be."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        if target.exists():  # never written through: it may be a link itself
            raise
        shutil.copyfile(source, target)
        target.chmod(0o444)
        files.sync_file(target)


def record(pin: ModelPin, lock: ModelLock, plan: CheckpointPlan, written: Mapping[str, str]) -> bytes:
    """The text of sparkpin.json: no times, no paths, so the same inputs give the same bytes. written: path -> SHA-256
    of what is not linked.

    sources: repositories and revisions; of the base the files that were rewritten, of the others the tensors that were
    taken, with the SHA-256 that the lock has.
    """
    published = {file.file: file.sha256 for file in lock.repositories[pin.base].files}
    dumped = pin.model_dump(mode="json", include={"hybrid": {"rules"}, "mtp": {"file", "tensors", "source"}})
    dumped |= {MTP_FP8: pin.mtp.model_dump(mode="json", include={"rules"})} if pin.mtp else {}
    sources = dict[str, dict[str, Any]]()
    for name in used_repositories(pin, plan.steps):
        sources[name] = lock.repositories[name].model_dump(include={"repo", "revision"})
    sources[pin.base]["files"] = {file: published[file] for file in written if file in published}
    for name, tensors in donor_tensors(plan).items():
        if not pin.is_whole(name):
            known = {tensor.name: tensor.sha256 for tensor in lock.repositories[name].tensors}
            sources[name]["tensors"] = {source.info.name: known.get(source.info.name, "") for source in tensors}
    value = {
        "builder": FORMAT,
        "model": pin.name,
        "key": checkpoint_key(pin, lock, plan.steps),
        "steps": [{"step": step, **(dumped.get(step) or {})} for step in plan.steps],
        "sources": sources,
        "files": file_rows(pin, lock, plan, written),
    }
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def file_rows(
    pin: ModelPin, lock: ModelLock, plan: CheckpointPlan, written: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """File -> its size and SHA-256, as the record has them: of what is linked the lock's. written: as of `record`."""
    published = {file.file: file.sha256 for file in lock.repositories[pin.base].files}
    if pin.drafter:
        published |= {f"{DRAFTER}/{file.file}": file.sha256 for file in lock.repositories[DRAFTER].files}
    sha256 = {link.path: published[link.path] for link in plan.links} | dict(written)
    return {path: {"size": size, "sha256": sha256[path]} for path, size in plan.sizes.items()}


def disk_needed(folder: Path, base: Path, plan: CheckpointPlan) -> int:
    """Bytes that building will take on the disk of `folder`.

    What an earlier run had begun there counts for it, finished or not: it is kept, or goes before its shard is written
    again, and so does a folder that is not trusted.
    """
    linked = files.existing_parent(folder).stat().st_dev == files.existing_parent(base).stat().st_dev
    names = {name for shard in plan.shards for name in (shard.path, shard.path + UNFINISHED)}
    begun = [path for path in partial_folder(folder).glob("*") if path.name in names]
    freed = sum(allocated(path) for path in (*begun, *folder.rglob("*")) if path.is_file())
    return max(0, plan.written_bytes + (0 if linked else plan.linked_bytes) - freed) + SPARE


def allocated(path: Path) -> int:
    """Bytes of the disk that are free again when a file goes: none if it has another name, or has just gone."""
    try:
        found = path.stat()  # a dry run holds no lock
    except FileNotFoundError:
        return 0
    return found.st_blocks * 512 if found.st_nlink == 1 else 0


def set_aside(folder: Path) -> None:
    """Remove a folder that is not trusted, by a name that no run reads, so that a kill in between is harmless."""
    aside = Path(tempfile.mkdtemp(prefix=files.PARTIAL, dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):
        folder.replace(aside / folder.name)
    shutil.rmtree(aside, ignore_errors=True)


def check_files(folder: Path, plan: CheckpointPlan) -> None:
    """Cheap: files, their sizes, index and config are the planned ones. Raises CheckpointError."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    found = {(name, size) for name, size in sizes.items() if name not in OWN}
    for name, _ in sorted(found ^ set(plan.sizes.items())):
        got, expected = (f"{one[name]} bytes" if name in one else "no such file" for one in (sizes, plan.sizes))
        raise bad(folder / name, f"got {got}, expected {expected}")
    for text in plan.texts:
        if (folder / text.path).read_bytes() != text.data:
            raise bad(folder / text.path, "its text is not the planned one")
