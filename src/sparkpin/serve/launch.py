"""The container of a server: without a network, watched by process 1 and by Docker's health check (see `inside`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.host.containers import APIError, Container, Healthcheck, Mount, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.pins.vllm_flags import served_name
from sparkpin.releases import container as running
from sparkpin.releases import inside
from sparkpin.releases.container import PYTHON, Node, put
from sparkpin.releases.record import Release
from sparkpin.serve.cluster import HERE

FOLDER = "/run/sparkpin"  # in the containers of both: what the host has put there
SOCKETS = "/run/v"  # in the containers of both: a volume
SERVER, SOCKET = f"{SOCKETS}/server", "s"  # the folder there that is the server's, and its socket in that
PROGRAM = f"{FOLDER}/inside.py"
SOCKET_PATH = f"{SERVER}/{SOCKET}"
SECOND = 10**9  # Docker counts in nanoseconds
INTERVAL = 10.0  # seconds between two tokens that process 1 asks for; each may take `inside.PATIENCE`
FAILURES = 10
"""In a row, until the server is ended, for Docker to start it again (see `Limits`): after more than three minutes.
Docker asks process 1 as often what came of the last one."""
CHECK_SECONDS = 15  # for one health check, on a busy machine


@dataclass(frozen=True)
class LaunchOrder:
    """What is to be served, and how. checkpoint: its folder; memory: limit in bytes, swap included; labels: whose it
    is; timeout: seconds that its start may take; restarts: as of `Limits`; node: which one of several machines, None
    where it is one; where: that machine's URL, or "here"; needed: bytes that it gives back there when it stops;
    compilers: at a time, at a first start."""

    release: Release
    checkpoint: Path
    memory: int | None
    gpus: bool
    labels: Mapping[str, str]
    timeout: float
    restarts: int
    node: Node | None = None
    where: str = HERE
    needed: int = 0
    compilers: int | None = None


def create(engine: Engine, name: str, wanted: LaunchOrder, *, volume: str | None) -> Container:
    """A container that has not been started. It listens in a folder of a volume, which no other server may have
    meanwhile; None: of one that goes with it.

    HostError for a release for several machines without a node.
    """
    release, node = wanted.release, wanted.node
    if node is None:
        running.require_one_node(release)
    limits = {"memory": wanted.memory, "gpus": wanted.gpus}
    settings = running.server_settings(
        engine, release, wanted.checkpoint, SOCKET_PATH, node, wanted.compilers, **limits
    )

    def fill(container: Container) -> None:
        put(container, FOLDER, parts(wanted), owned=("state",))
        # Clients wait for it, whatever the server before it in its folder has left as its last word.
        folder = SERVER.rpartition("/")[2]
        put(container, SOCKETS, {f"{folder}/{inside.PROXY_STATE}": b""}, owned=(folder,))

    return create_filled(
        engine,
        release.tag,
        fill,
        name=name,
        entrypoint=[*PYTHON, PROGRAM, "run"],
        labels=dict(wanted.labels),
        healthcheck=Healthcheck(
            test=["CMD", *PYTHON, PROGRAM, "health"],
            interval=int(INTERVAL * SECOND),
            timeout=CHECK_SECONDS * SECOND,
            start_period=int(wanted.timeout * SECOND),
            retries=2,  # one may fail because the machine is slow
        ),
        mounts=[
            Mount(target=FOLDER, source=None, type="volume"),  # goes with the container
            Mount(target=SOCKETS, source=volume, type="volume"),
        ],
        **settings,
    )


def create_filled(engine: Engine, image: str, fill: Callable[[Container], None], **settings: Any) -> Container:
    """A container with what `fill` puts there, gone again where that fails. settings: of the SDK's `create`."""
    with engine_errors():
        container = engine.client.containers.create(image, **settings)
    try:
        fill(container)
    except BaseException:
        remove(container)
        raise
    return container


def parts(wanted: LaunchOrder) -> dict[str, bytes]:
    """The files in FOLDER. The container's user can read them and change nothing."""
    settings = {
        "model": served_name(wanted.release.argv),
        "socket": SOCKET_PATH,
        "interval": INTERVAL,
        "failures": FAILURES,
        "start": wanted.timeout,
        "restarts": wanted.restarts,
        "floor": running.floor_of(wanted.gpus),
    }
    return running.process_one(wanted.node, settings)


def keep_up(container: Container, wanted: LaunchOrder) -> None:
    """Have Docker start the server again when it fails; only once it was ready, so that a bad release ends at once.

    How often is for process 1 to say: a count of Docker's is never filled up again. Nothing but Docker starts another
    machine's container at boot, and "on-failure" does not, where it was ended in good order: process 1 holds the limit
    there by waiting.
    """
    put(container, FOLDER, {inside.SETTINGS: parts(wanted)[inside.SETTINGS]})  # its limits may be others than they were
    policy = "unless-stopped" if wanted.node and wanted.node.place.rank else "on-failure"
    with engine_errors():
        container.update(restart_policy={"Name": policy})  # type: ignore[arg-type]  # a count is not needed


def remove(container: Container) -> None:
    """With the volume of its own; the cache's has a name and stays. It may have gone already."""
    with engine_errors(), contextlib.suppress(NotFound):
        container.remove(force=True, v=True)


def asks(container: Container) -> bool:
    """Whether it answers a real request, asked from within."""
    try:
        return container.exec_run([*PYTHON, PROGRAM, "ask"]).exit_code == 0
    except APIError:  # it has just ended
        return False
