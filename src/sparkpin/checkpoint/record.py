"""sparkpin.json in a checkpoint: how it was made. No times, no paths: same inputs, same bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.content import REBUILD, RECORD
from sparkpin.checkpoint.plan import FORMAT, MTP_FP8, CheckpointPlan, taken, used_repositories
from sparkpin.checkpoint.shards import WrittenFile
from sparkpin.core.errors import CheckpointError
from sparkpin.pins.schema import DRAFTER, ModelLock, ModelPin


def record(pin: ModelPin, lock: ModelLock, plan: CheckpointPlan, key: str, written: Mapping[str, WrittenFile]) -> bytes:
    """The text of sparkpin.json. written: by path, what was not linked.

    sources: repositories and revisions; of the base the files that were rewritten, of the others the tensors that were
    taken, with the SHA-256 that the lock has.
    """
    published = {file.file: file.sha256 for file in lock.repositories[pin.base].files}
    dumped = pin.model_dump(mode="json", include={"hybrid": {"rules"}, "mtp": {"file", "tensors", "source"}})
    dumped |= {MTP_FP8: pin.mtp.model_dump(mode="json", include={"rules"})} if pin.mtp else {}
    sources: dict[str, dict[str, Any]] = {
        name: {"repo": lock.repositories[name].repo, "revision": lock.repositories[name].revision}
        for name in used_repositories(pin, plan.steps)
    }
    sources[pin.base]["files"] = {file: published[file] for file in written if file in published}
    for name, tensors in taken(plan).items():
        if pin.is_whole(name):
            continue
        known = {tensor.name: tensor.sha256 for tensor in lock.repositories[name].tensors}
        sources[name]["tensors"] = {source.info.name: known.get(source.info.name, "") for source in tensors}
    value = {
        "builder": FORMAT,
        "model": pin.name,
        "key": key,
        "steps": [{"step": step, **(dumped.get(step) or {})} for step in plan.steps],
        "sources": sources,
        "files": file_rows(pin, lock, plan, written),
    }
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def file_rows(
    pin: ModelPin, lock: ModelLock, plan: CheckpointPlan, written: Mapping[str, WrittenFile]
) -> dict[str, dict[str, Any]]:
    """File -> its size and SHA-256, as the record has them: of what is linked the lock's."""
    published = {file.file: file for file in lock.repositories[pin.base].files}
    if pin.drafter:
        published |= {f"{DRAFTER}/{file.file}": file for file in lock.repositories[DRAFTER].files}
    linked = {link.path: published[link.path] for link in plan.links}
    rows = {path: WrittenFile(path, file.size, file.sha256) for path, file in linked.items()} | dict(written)
    return {path: {"size": file.size, "sha256": file.sha256} for path, file in rows.items()}


def texts_written(plan: CheckpointPlan) -> dict[str, WrittenFile]:
    return {t.path: WrittenFile(t.path, len(t.data), hashlib.sha256(t.data).hexdigest()) for t in plan.texts}


def check_record(folder: Path, wanted: Mapping[str, Any]) -> None:
    """The record has each file with its size and SHA-256. CheckpointError for the first that it says otherwise of."""
    said = json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]
    for name, row in wanted.items():
        if said[name] != row:
            cause = f"files[{name!r}]: saw {said[name]}, wanted {row}, which its bytes are"
            raise CheckpointError(f"{folder / RECORD}: {cause}", next_step=REBUILD)
