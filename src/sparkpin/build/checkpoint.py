"""Checkpoints of a model: what their sources lack is fetched, then they are planned, built or compared."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from sparkpin.checkpoint.content import REBUILD, RECORD, Hashes, is_complete, is_made_here
from sparkpin.checkpoint.plan import CheckpointPlan, make_plan
from sparkpin.checkpoint.steps import checkpoint_key, used_repositories
from sparkpin.checkpoint.verify import verify_checkpoint
from sparkpin.checkpoint.write import checkpoint_folder, disk_needed, hold_model, record, write_checkpoint
from sparkpin.core import files, terminal
from sparkpin.core.errors import CheckpointError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.fetch import model
from sparkpin.fetch.model_files import repository_folder
from sparkpin.pins.schema import ModelLock, ModelPin


def build_checkpoint(paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str], *, deep: bool = False) -> Path:
    """The folder of the checkpoint that `steps` make of the model; built if it is not there yet.

    deep: from a base that is read again, though it was found right before. What a bundle brought is built again: of it
    only its release says that it is this checkpoint. Fetches what the steps use. Raises what `fetch_model` and
    `make_plan` raise, and DiskError if the disk cannot take it. Two runs at once build it once; what a killed run had
    finished, the next one goes on from.
    """
    key = checkpoint_key(pin, lock, steps)
    folder = checkpoint_folder(paths, pin, lock, steps)
    if is_made_here(folder, key):
        return folder
    with hold_model(paths, pin.name):
        if is_made_here(folder, key):
            return folder
        used = used_repositories(pin, steps)
        plan = make_plan(model.listings(paths, pin, lock, only=used), pin, steps)  # before 72 GB are fetched
        places = model.fetch_model(paths, pin, lock, only=used, deep=deep)
        for note in plan.notes:
            say(note)
        write_checkpoint(folder, pin, lock, plan, places, Hashes.here(paths))
    return folder


def plan_checkpoint(paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> CheckpointPlan:
    """What `build_checkpoint` would do; `summary` prints it. Fetches headers only; a model from
    a GGUF file has them once it is converted. Writes nothing else."""
    return make_plan(model.listings(paths, pin, lock, only=used_repositories(pin, steps)), pin, steps)


def verify_built(paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> Path:
    """Compare a checkpoint that was built before with its sources, all bytes of it. Gives its folder.

    Sources that are no longer in the cache are fetched. Raises CheckpointError if it is not there or differs.
    """
    folder = checkpoint_folder(paths, pin, lock, steps)
    if not folder.is_dir():
        step = f"invoke build --checkpoint-only --model {pin.name}, or with its --stage, makes it"
        raise CheckpointError(f"{folder}: no such checkpoint of {pin.name}", next_step=step)
    used = used_repositories(pin, steps)
    places = model.fetch_model(paths, pin, lock, only=used, deep=True)
    plan = make_plan(model.listings(paths, pin, lock, only=used), pin, steps)
    written = verify_checkpoint(folder, places, plan)
    written |= {text.path: hashlib.sha256(text.data).hexdigest() for text in plan.texts}
    is_whole = is_complete(folder, checkpoint_key(pin, lock, steps))
    if not is_whole or (folder / RECORD).read_bytes() != record(pin, lock, plan, written):
        raise CheckpointError(f"{folder / RECORD}: is not the record of this checkpoint", next_step=REBUILD)
    return folder


def disk_line(paths: Paths, pin: ModelPin, lock: ModelLock, plan: CheckpointPlan) -> str:
    """Bytes that building would take, and that are free, for people."""
    folder = checkpoint_folder(paths, pin, lock, plan.steps)
    if is_made_here(folder, checkpoint_key(pin, lock, plan.steps)):
        return f"disk: nothing needed, {folder} is there"
    needed = disk_needed(folder, repository_folder(paths, lock.repositories[pin.base]), plan)
    free = shutil.disk_usage(files.existing_parent(folder)).free
    enough = "" if free >= needed else ": NOT ENOUGH"
    return f"disk: {terminal.size(needed)} needed in {folder.parent}, {terminal.size(free)} free{enough}"
