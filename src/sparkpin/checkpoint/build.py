"""Carry out a plan: a checkpoint folder that is whole and verified, or is not there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sparkpin import files, hub
from sparkpin.checkpoint.plan import (
    FORMAT,
    Plan,
    Shard,
    checkpoint_key,
    header_for,
    in_order,
    make_plan,
    used_repositories,
)
from sparkpin.checkpoint.repository import Places
from sparkpin.checkpoint.safetensors import read_header
from sparkpin.checkpoint.verify import REBUILD, RECORD, Reader, verify_checkpoint
from sparkpin.errors import CheckpointError
from sparkpin.paths import Paths
from sparkpin.schema import ModelLock, ModelPin

IMPORTED = ".imported"  # an empty file in a checkpoint that a bundle brought
SPARE = 64 << 20
"""Bytes that must stay free on the disk beside what is written."""


def checkpoint_folder(paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str]) -> Path:
    return paths.checkpoints / pin.name / checkpoint_key(pin, lock, steps)[:16]


def build_checkpoint(
    paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str], say: Callable[[str], None]
) -> Path:
    """The folder of the checkpoint that `steps` make of the model; built if it is not there yet.

    What a bundle brought is made anew: of it only its release says that it is this checkpoint.
    Fetches the repositories that the steps use. Raises what `hub.fetch_model` and `make_plan` raise, and DiskError if
    the disk cannot take it. Two runs at once build it once; a killed run leaves a partial folder that the next removes.
    """
    key = checkpoint_key(pin, lock, steps)
    folder = checkpoint_folder(paths, pin, lock, steps)
    if is_made_here(folder, key):
        return folder
    with hold_model(paths, pin.name, say):
        if is_made_here(folder, key):
            return folder
        files.sweep(folder.parent)
        used = used_repositories(pin, steps)
        places = hub.fetch_model(paths, pin, lock, say, only=used)
        plan = make_plan(hub.listings(paths, pin, lock, say), pin, steps)
        check_disk(folder, places.folders[pin.base], plan)
        if folder.exists():
            why = "came from another machine" if is_imported(folder) else "is damaged or incomplete"
            say(f"checkpoint {folder.name} {why}: building it again")
            set_aside(folder)
        with files.atomic_folder(folder) as partial:
            written = write_plan(partial, places, plan, say)
            (partial / RECORD).write_bytes(record(pin, lock, plan, key, written))
            say(f"comparing {pin.name} {folder.name} with its sources, tensor by tensor")
            verify_checkpoint(partial, places, plan)
    return folder


def hold_model(paths: Paths, model: str, say: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """One run at a time makes a checkpoint of a model."""
    return files.lock(
        paths.locks / f"checkpoint-{model}.lock",
        on_wait=lambda: say(f"waiting for another run that builds a checkpoint of {model}"),
    )


def plan_checkpoint(
    paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str], say: Callable[[str], None]
) -> Plan:
    """What `build_checkpoint` would do: `plan.lines()` for people. Fetches headers only, writes nothing else."""
    return make_plan(hub.listings(paths, pin, lock, say), pin, steps)


def verify_built(
    paths: Paths, pin: ModelPin, lock: ModelLock, steps: Sequence[str], say: Callable[[str], None]
) -> Path:
    """Compare a checkpoint that was built before with its sources, all bytes of it. Gives its folder.

    Sources that are no longer in the cache are fetched. Raises CheckpointError if it is not there or differs.
    """
    folder = checkpoint_folder(paths, pin, lock, steps)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint of {pin.name}", next_step="invoke checkpoint")
    used = used_repositories(pin, steps)
    places = hub.fetch_model(paths, pin, lock, say, only=used)
    verify_checkpoint(folder, places, make_plan(hub.listings(paths, pin, lock, say), pin, steps))
    if not is_complete(folder, checkpoint_key(pin, lock, steps)):
        raise CheckpointError(f"{folder / RECORD}: is not the record of this checkpoint", next_step=REBUILD)
    return folder


def is_made_here(folder: Path, key: str) -> bool:
    return is_complete(folder, key) and not is_imported(folder)


def is_imported(folder: Path) -> bool:
    return (folder / IMPORTED).exists()


def is_complete(folder: Path, key: str) -> bool:
    """Cheap: the record is of this key and names every file with the size that it has. Bytes: `verify_checkpoint`."""
    try:
        made = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if made["key"] != key:
            return False
        seen = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
        del seen[RECORD]
        seen.pop(IMPORTED, None)
        return bool(seen == {name: entry["size"] for name, entry in made["files"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_plan(partial: Path, places: Places, plan: Plan, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Write everything into a folder; gives size and SHA-256 of each file that is not a link."""
    written: dict[str, dict[str, Any]] = {}
    base = places.folders[plan.base]
    for link in plan.links:
        link_or_copy(base / link.path, partial / link.path)
    for number, shard in enumerate(plan.shards, 1):
        say(f"writing {shard.path} ({number} of {len(plan.shards)}, {shard.size / 1e6:.1f} MB)")
        written[shard.path] = write_shard(partial / shard.path, shard, plan.base, places)
    for text in plan.texts:
        (partial / text.path).write_bytes(text.data)
        written[text.path] = {"size": len(text.data), "sha256": hashlib.sha256(text.data).hexdigest()}
    return written


def write_shard(path: Path, shard: Shard, base: str, places: Places) -> dict[str, Any]:
    header = read_header(places.folders[base] / shard.path) if shard.in_base else None
    sources = in_order(shard, header, base)
    first = header_for(shard, sources)
    digest, size = hashlib.sha256(first), len(first)
    with Reader() as reader, files.atomic_file(path) as file:
        file.write(first)
        for source in sources:
            origin, begin = places.of(source)
            for chunk in reader.chunks(origin, begin, begin + source.info.nbytes):
                digest.update(chunk)
                file.write(chunk)
                size += len(chunk)
    return {"size": size, "sha256": digest.hexdigest()}


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link (the cache's files are read-only and never written in place), or a copy where links cannot go."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)


def record(pin: ModelPin, lock: ModelLock, plan: Plan, key: str, written: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The text of sparkpin.json: how the checkpoint was made. No times, no paths: same inputs, same bytes."""
    published = {f.file: {"size": f.size, "sha256": f.sha256} for f in lock.repositories[pin.base].files}
    names = used_repositories(pin, plan.steps)
    parts = {"hybrid": pin.hybrid, "mtp": pin.mtp}
    value = {
        "builder": FORMAT,
        "model": pin.name,
        "key": key,
        "steps": [{"step": s, **(part.model_dump(mode="json") if (part := parts.get(s)) else {})} for s in plan.steps],
        "sources": {
            name: {"repo": lock.repositories[name].repo, "revision": lock.repositories[name].revision} for name in names
        },
        "files": {**{link.path: published[link.path] for link in plan.links}, **written},
    }
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def check_disk(folder: Path, base: Path, plan: Plan) -> None:
    """Room for everything that will be written, before the first byte is."""
    parent = files.existing_parent(folder)
    linked = parent.stat().st_dev == base.stat().st_dev
    needed = plan.written_bytes + (0 if linked else plan.linked_bytes) + SPARE
    files.require_space(folder.parent, needed, "the checkpoint's files", "SPARKPIN_HOME")


def set_aside(folder: Path) -> None:
    """Remove a folder that is not trusted, by a name that no run reads, so that a kill in between is harmless."""
    aside = Path(tempfile.mkdtemp(prefix=files.PARTIAL, dir=folder.parent))
    with contextlib.suppress(FileNotFoundError):
        folder.replace(aside / folder.name)
    shutil.rmtree(aside, ignore_errors=True)
