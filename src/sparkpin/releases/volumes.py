"""Checkpoints in Docker volumes: for engines of other machines, which have none of this machine's folders."""

from __future__ import annotations

import io
import json
import tarfile
from typing import Any

from sparkpin.checkpoint.content import RECORD
from sparkpin.core.errors import IntegrityError
from sparkpin.host.containers import NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.pins.vllm_command import MODEL_PATH
from sparkpin.releases.record import Release

LABEL = "sparkpin.checkpoint"  # its value is the checkpoint key


def volume_name(checkpoint_key: str) -> str:
    return f"sparkpin-checkpoint-{checkpoint_key[:16]}"


def checkpoint_volume(engine: Engine, release: Release) -> str | None:
    """The volume that has the release's checkpoint whole, to be mounted read-only at MODEL_PATH; None where there is
    none. The engine must have the release's image. IntegrityError for a volume of that name that is not ours.
    """
    name = volume_name(release.checkpoint_key)
    with engine_errors():
        try:
            require_own(name, engine.client.volumes.get(name).attrs, release)
        except NotFound:
            return None
        volumes = {name: {"bind": MODEL_PATH, "mode": "ro"}}
        container = engine.containers.create(release.tag, volumes=volumes, network_mode="none")  # is never started
        try:
            pieces, _ = container.get_archive(f"{MODEL_PATH}/{RECORD}")
            made = record_in(b"".join(pieces))
        except NotFound:
            return None
        finally:
            container.remove(force=True, v=True)
    return name if made.get("key") == release.checkpoint_key else None


def record_in(archive: bytes) -> dict[str, Any]:
    """The record of a checkpoint, from the tar that Docker gives of one file; {} for one that cannot be read."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            file = tar.extractfile(tar.getmembers()[0])
            value = json.loads(file.read() if file else b"")
    except (tarfile.TarError, ValueError, IndexError):
        return {}
    return value if isinstance(value, dict) else {}


def require_own(name: str, attrs: dict[str, Any], release: Release) -> None:
    if (seen := (attrs.get("Labels") or {}).get(LABEL)) != release.checkpoint_key:
        raise IntegrityError(
            f"volume {name}: label {LABEL}: saw {seen}, wanted {release.checkpoint_key}",
            next_step=f"look whose it is; then there: docker volume rm {name}",
        )
