"""Checkpoints in Docker volumes: for engines of other machines, which have none of this machine's folders.

What runs there is `checkpoint/content.py`, in a short container of the release's own image, without a network.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sparkpin
from sparkpin.core.errors import CheckpointError, EngineError, IntegrityError
from sparkpin.core.terminal import printable
from sparkpin.host.containers import APIError, Container, Mount, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.pins.vllm_flags import MODEL_PATH
from sparkpin.releases.container import CONFLICT, PYTHON, apart, put, sandbox
from sparkpin.releases.record import Release

LABEL = "sparkpin.checkpoint"  # of the volume, and of a container that works in it; its value is the checkpoint key
ENDS = ["created", "exited"]  # where a run that is killed leaves a container
MOMENT_SECONDS, LOOK_SECONDS = 10.0, 0.5
FOLDER, PROGRAM, ORDER = "/run/sparkpin", "content.pyz", "order.json"
WAIT_SECONDS = 6 * 3600
"""For the hash of a checkpoint."""

PARTS = ("core/errors.py", "core/terminal.py", "core/files.py", "core/paths.py", "checkpoint/content.py")
"""Files of this package that it consists of, beside each folder's `__init__.py`."""


def volume_name(checkpoint_key: str) -> str:
    return f"sparkpin-checkpoint-{checkpoint_key[:16]}"


def checkpoint_volume(engine: Engine, release: Release) -> str | None:
    """The volume that has the release's complete checkpoint, to be mounted read-only at MODEL_PATH; None where there is
    none, or one that is half there. The engine must have the release's image.

    Checks its files as `check_content` does, and hashes no large one that may be right. IntegrityError for a volume of
    that name that is not ours, CheckpointError for files that were changed.
    """
    name = volume_name(release.checkpoint_key)
    with engine_errors():
        try:
            require_own(name, engine.client.volumes.get(name).attrs, release.checkpoint_key)
        except NotFound:
            return None
    order = {"do": "look", "folder": MODEL_PATH, "key": release.checkpoint_key}
    answer = ask(engine, release, order, mode="ro,nocopy")  # else an empty volume gets the owner of the image's folder
    if "changed" in answer:
        step = f"invoke export {release.tag} URL --with-checkpoint sends what differs again"
        raise CheckpointError(f"volume {name}: {answer['changed']}", next_step=step)
    return name if answer.get("complete") is True else None


def make_volume(engine: Engine, release: Release) -> None:
    """The volume for the release's checkpoint, where it is not there. IntegrityError for one that is not ours."""
    name = volume_name(release.checkpoint_key)
    with engine_errors():
        volume = engine.client.volumes.create(name, labels={LABEL: release.checkpoint_key})
    require_own(name, volume.attrs, release.checkpoint_key)


def ask(engine: Engine, release: Release, order: Mapping[str, Any], *, mode: str) -> dict[str, Any]:
    """The program's answer to an order, in a short container that has the checkpoint's volume in the order's folder.

    EngineError for a program that fails, or answers something else: the machine there may be anybody's.
    """
    with engine_errors():
        sweep(engine, LABEL)
        container = create(engine, release, LABEL, at=order["folder"], mode=mode)
        try:
            put(container, FOLDER, {PROGRAM: program(), ORDER: json.dumps(order).encode()})
            container.start()
            container.wait(timeout=WAIT_SECONDS)
            output, errors = container.logs(stderr=False), container.logs(stdout=False)
        finally:
            remove(container)
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(output)
        if isinstance(answer, dict) and "failed" not in answer:
            return answer
        errors = str(answer).encode()
    cause = " ".join(printable(errors.decode(errors="replace"))[-400:].split()) or "it answered nothing"
    raise EngineError(f"volume {volume_name(release.checkpoint_key)}: {cause}", next_step="the same command again")


def sweep(engine: Engine, label: str) -> None:
    """Remove the containers with a label that killed runs left. Those of runs that go on stay."""
    for one in engine.containers.list(all=True, filters={"label": label, "status": ENDS}, ignore_removed=True):
        with contextlib.suppress(NotFound):
            if is_left(one):
                remove(one)


def is_left(container: Container) -> bool:
    """Whether nobody is about to start it, or to remove it: both take a run a moment."""
    until = time.monotonic() + MOMENT_SECONDS
    while container.status in ENDS and time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        container.reload()
    return container.status in ENDS


def require_own(name: str, attrs: dict[str, Any], key: str, label: str = LABEL) -> None:
    if (seen := (attrs.get("Labels") or {}).get(label)) != key:
        raise IntegrityError(
            f"volume {name} there: label {label}: got {seen}, expected {key}",
            next_step=f"find out whose it is; it goes with (there): docker volume rm {name}",
        )


def create(engine: Engine, release: Release, label: str, *, at: str, mode: str) -> Container:
    """A container that was not started, with the checkpoint's volume at a folder. label: its name."""
    container: Container = engine.containers.create(
        release.tag,
        entrypoint=[*PYTHON, f"{FOLDER}/{PROGRAM}", f"{FOLDER}/{ORDER}"],
        command=[],
        labels={label: release.checkpoint_key},
        mounts=[Mount(target=FOLDER, source=None, type="volume")],  # goes with the container
        volumes={volume_name(release.checkpoint_key): {"bind": at, "mode": mode}},
        **apart(sandbox({}, memory=None)),
    )
    return container


def remove(container: Container) -> None:
    """With the volume of its own. It may have gone by itself, or be about to: then wait, for it holds its volume."""
    with contextlib.suppress(NotFound):
        try:
            container.remove(force=True, v=True)
        except APIError as error:
            if error.status_code != CONFLICT:
                raise
            container.wait(condition="removed")


def program() -> bytes:
    """`content` with what it imports, as an archive that Python runs."""
    sources, buffer = Path(sparkpin.__file__).parent, io.BytesIO()
    folders = sorted({parent for part in PARTS for parent in Path(part).parents})
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in (*(f"{folder}/__init__.py" for folder in folders), *PARTS):
            path = sources / name
            archive.write(path, f"sparkpin/{path.relative_to(sources)}")
        archive.writestr("__main__.py", "from sparkpin.checkpoint.content import main\n\nmain()\n")
    return buffer.getvalue()
