"""Checkpoints in Docker volumes: for engines of other machines, which have none of this machine's folders.

What runs there is `checkpoint/receive.py`, in a short container of the release's own image, without a network.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sparkpin
from sparkpin.core.errors import CheckpointError, IntegrityError
from sparkpin.core.terminal import Say
from sparkpin.host.containers import APIError, Attached, Container, Mount, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.pins.vllm_flags import MODEL_PATH
from sparkpin.releases.container import CONFLICT, HOME, PYTHON, apart, put, sandbox
from sparkpin.releases.record import Release

LABEL = "sparkpin.checkpoint"  # of the volume, and of a container that works in it; its value is the checkpoint key
ENDS = ["created", "exited"]  # where a run that is killed leaves a container
MOMENT_SECONDS, LOOK_SECONDS = 10.0, 0.5
FOLDER, PROGRAM = "/run/sparkpin", "receive.pyz"
PARTS = ("core/errors.py", "core/files.py", "core/paths.py", "checkpoint/content.py", "checkpoint/receive.py")
"""Files of this package that it consists of, beside each folder's `__init__.py`."""


def volume_name(checkpoint_key: str) -> str:
    return f"sparkpin-checkpoint-{checkpoint_key[:16]}"


def checkpoint_volume(engine: Engine, release: Release) -> str | None:
    """The volume that has the release's checkpoint whole, to be mounted read-only at MODEL_PATH; None where there is
    none, or one that is half there. The engine must have the release's image.

    Looks at its files as `check_content` does, and hashes no large one. IntegrityError for a volume of that name that
    is not ours, CheckpointError for files that were changed.
    """
    name = volume_name(release.checkpoint_key)
    with engine_errors():
        try:
            require_own(name, engine.client.volumes.get(name).attrs, release.checkpoint_key)
        except NotFound:
            return None
        sweep(engine, LABEL)
        container = create(engine, release, name, at=MODEL_PATH, mode="ro")
    with started(container) as there:
        there.send(json.dumps({"key": release.checkpoint_key}).encode() + b"\n")
        answer = there.answer()
    if "changed" in answer:
        step = f"invoke export {release.tag} URL --with-checkpoint sends what differs again"
        raise CheckpointError(f"volume {name}: {answer['changed']}", next_step=step)
    return name if answer.get("whole") else None


@contextlib.contextmanager
def receiving(engine: Engine, release: Release, say: Say) -> Iterator[Attached]:
    """A container that takes the release's checkpoint into its volume, which is made where it is not there.

    One at a time, by the container's name. Mounted over the user's home, a new volume takes its owner from there.
    """
    name = volume_name(release.checkpoint_key)
    with engine_errors():
        volume = engine.client.volumes.create(name, labels={LABEL: release.checkpoint_key})
        require_own(name, volume.attrs, release.checkpoint_key)
        while True:
            try:
                container = create(engine, release, name, at=HOME, mode="rw", name=name)
                break
            except APIError as error:
                if error.status_code != CONFLICT:
                    raise
            make_way(engine, name, say)
    with started(container) as there:
        yield there


def make_way(engine: Engine, name: str, say: Say) -> None:
    """Wait for another run's container, or remove what one that was killed did not start."""
    with contextlib.suppress(NotFound):
        other = engine.containers.get(name)
        if not is_left(other) and other.status == "running":
            say(f"waiting for another run that fills volume {name}")
            other.wait(condition="removed")
        else:
            remove(other)


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


def create(engine: Engine, release: Release, volume: str, *, at: str, mode: str, name: str | None = None) -> Container:
    """A container that was not started, with the program in it. It goes when the program ends, which it does when its
    standard input does."""
    container: Container = engine.containers.create(
        release.tag,
        name=name,
        entrypoint=[*PYTHON, f"{FOLDER}/{PROGRAM}", at],
        command=[],
        labels={LABEL: release.checkpoint_key},
        stdin_open=True,
        auto_remove=True,
        mounts=[Mount(target=FOLDER, source=None, type="volume")],  # goes with the container
        volumes={volume: {"bind": at, "mode": mode}},
        **apart(sandbox({}, memory=None)),
    )
    try:
        put(container, FOLDER, {PROGRAM: program()})
    except BaseException:
        remove(container)
        raise
    return container


@contextlib.contextmanager
def started(container: Container) -> Iterator[Attached]:
    """Attached before it starts, so that none of its words is lost."""
    try:
        there = Attached(container)
        with engine_errors():
            container.start()
        with contextlib.closing(there):
            yield there
    finally:
        with engine_errors():
            remove(container)


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
    """`receive` with what it imports, as an archive that Python runs."""
    sources, buffer = Path(sparkpin.__file__).parent, io.BytesIO()
    folders = sorted({parent for part in PARTS for parent in Path(part).parents})
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in (*(f"{folder}/__init__.py" for folder in folders), *PARTS):
            path = sources / name
            archive.write(path, f"sparkpin/{path.relative_to(sources)}")
        archive.writestr("__main__.py", "from sparkpin.checkpoint.receive import main\n\nmain()\n")
    return buffer.getvalue()
