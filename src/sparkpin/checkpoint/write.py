"""Carry out a plan: a checkpoint folder that is whole and verified, or is not there."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from sparkpin.checkpoint.content import JOURNAL, RECORD, is_imported, note_content
from sparkpin.checkpoint.copying import link_or_copy
from sparkpin.checkpoint.plan import CheckpointPlan, checkpoint_key
from sparkpin.checkpoint.record import record, texts_written
from sparkpin.checkpoint.repository import Places
from sparkpin.checkpoint.shards import UNFINISHED, write_shards
from sparkpin.checkpoint.verify import check_files
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.pins.schema import ModelLock, ModelPin

SPARE = 64 << 20
"""Bytes that must stay free on the disk beside what is written."""


def checkpoint_folder(paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> Path:
    return paths.checkpoints / pin.name / checkpoint_key(pin, lock, steps)[:16]


def write_checkpoint(
    folder: Path,
    pin: ModelPin,
    lock: ModelLock,
    plan: CheckpointPlan,
    places: Places,
    key: str,
    say: Say,
    link: Callable[[Path, Path], None] = link_or_copy,
    still: Callable[[], None] = lambda: None,
) -> None:
    """Write everything beside `folder` and rename it last. Only while holding the model's lock.

    still: raises CheckpointError if the base is no longer what was verified; asked when its bytes are written.
    """
    partial = partial_folder(folder)
    for left in folder.parent.glob(files.PARTIAL + "*"):
        if left != partial:
            remove(left)
    base = places.folders[plan.base]
    check_disk(folder, base, plan)
    if folder.exists():
        why = "came from another machine" if is_imported(folder) else "is damaged or incomplete"
        say(f"checkpoint {folder.name} {why}: building it again")
        set_aside(folder)
    written = write_shards(partial, plan, places, key, say)
    with files.disk_errors(folder.parent):
        try:
            still()
            # Without index and config, which come last, nobody takes the folder for a model.
            for kept in plan.links:
                link(places.linked(kept.path, kept.of or plan.base), partial / kept.path)
            for text in plan.texts:
                write_text(partial / text.path, text.data)
            written |= texts_written(plan)
            write_text(partial / RECORD, record(pin, lock, plan, key, written))
            check_files(partial, plan)
        except CheckpointError:
            remove(partial)
            raise
        for name in (*written, RECORD):  # as the files of the cache: one that is changed by mistake still has its size
            (partial / name).chmod(0o444)
        note_content(partial)
        (partial / JOURNAL).unlink()  # last: until here the next run goes on from the finished shards
        for path in sorted({partial, *(child for child in partial.rglob("*") if child.is_dir())}):
            files.sync_folder(path)
        partial.replace(folder)
        files.sync_folder(folder.parent)


def partial_folder(folder: Path) -> Path:
    """Where a checkpoint grows; named after its key, so that a later run finds what an earlier one finished."""
    return folder.with_name(f"{files.PARTIAL}{folder.name}")


def write_text(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def hold_model(paths: Paths, model: str, say: Say) -> contextlib.AbstractContextManager[None]:
    """One run at a time makes a checkpoint of a model."""
    return files.lock(
        paths.locks / f"checkpoint-{model}.lock",
        on_wait=lambda: say(f"waiting for another run that builds a checkpoint of {model}"),
    )


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
        seen = path.stat()  # a dry run holds no lock
    except FileNotFoundError:
        return 0
    return seen.st_blocks * 512 if seen.st_nlink == 1 else 0


def check_disk(folder: Path, base: Path, plan: CheckpointPlan) -> None:
    """Room for everything that will be written, before the first byte is."""
    files.require_space(folder.parent, disk_needed(folder, base, plan), "the checkpoint's files", "SPARKPIN_HOME")


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def set_aside(folder: Path) -> None:
    """Remove a folder that is not trusted, by a name that no run reads, so that a kill in between is harmless."""
    aside = Path(tempfile.mkdtemp(prefix=files.PARTIAL, dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):
        folder.replace(aside / folder.name)
    shutil.rmtree(aside, ignore_errors=True)
