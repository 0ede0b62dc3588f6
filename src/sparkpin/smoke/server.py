"""The container under test: no network, a Unix socket in a mounted folder, gone when the test ends, however it ends.

It is what `serve` starts (`releases.container.server_settings`), with the same process 1 (`releases.inside`). A release
for several machines has a container for each on this one, in one network namespace without a network.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sparkpin.core.errors import BusyError
from sparkpin.core.files import lock
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host import ssh
from sparkpin.host.containers import Container, Mount, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.pins.nodes import nodes_of, on_loopback
from sparkpin.releases import container as running
from sparkpin.releases import inside
from sparkpin.releases.current import how_it_failed
from sparkpin.releases.postmortem import Death, report
from sparkpin.releases.record import Release
from sparkpin.smoke.startup import NotReady, StartFault, wait_for_answer

if TYPE_CHECKING:
    from sparkpin.smoke.client import Client

T = TypeVar("T")
Asked: TypeAlias = "tuple[Server, Client]"
Serving: TypeAlias = "contextlib.AbstractContextManager[Asked]"
LABEL = "sparkpin.smoke"
LOCK = ".smoke.lock"  # with the home, since that is whose containers a smoke test removes
WAITING = "waiting for invoke up, smoke, quality, bench or bisect to end: one server is asked at a time"
SOCKET_FOLDER = "/run/sparkpin"
SOCKET = "s"  # as in a service's folder: the same proxy may stand before it
NODE_FOLDER = "/run/sparkpin-node"  # of process 1
STOP_SECONDS = 10
ANSWER_SECONDS = 120  # of a check, where its case says nothing else


@dataclass(frozen=True)
class Place:
    """One machine of a release, which may be for several: then its node.

    checkpoint: its folder there; memory: bytes that the container may take; env: what it adds to the release's; where:
    the URL of another machine, "" for this one; compilers: at a time, at a first start; None without a GPU.
    """

    engine: Engine
    checkpoint: Path | str
    memory: int | None
    node: running.Node | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    where: str = ""
    compilers: int | None = None

    @property
    def has_gpu(self) -> bool:
        return self.compilers is not None

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """The engine's; those of another machine name it."""
        with ssh.errors_of(self.where) if self.where else contextlib.nullcontext(), engine_errors():
            yield


def owner(paths: Paths, *, elsewhere: bool = False) -> str:
    """The label's value: tells this home's containers from those of another home on the same engine. elsewhere: on
    another machine, which may have a home of the same name."""
    home = ssh.owner(str(paths.home)) if elsewhere else str(paths.home)
    return hashlib.sha256(home.encode()).hexdigest()[:16]


def prefix(paths: Paths) -> str:
    """Of this home's socket folders, which lie in a cache that other homes may share."""
    return f"smoke-{owner(paths)[:8]}-"


def containers_of(paths: Paths, engine: Engine, *, elsewhere: bool = False) -> list[Container]:
    """Of this home's tests."""
    label = f"{LABEL}={owner(paths, elsewhere=elsewhere)}"
    with engine_errors():
        return list(engine.client.containers.list(all=True, filters={"label": label}, ignore_removed=True))


def remove_leftovers(paths: Paths, engine: Engine, others: Sequence[Engine] = ()) -> None:
    """Remove what killed runs left. Call it only while holding the lock of the smoke test. others: of other machines
    that they may have used."""
    there = [container for other in others for container in containers_of(paths, other, elsewhere=True)]
    for left in (*containers_of(paths, engine), *there):
        say(f"removing {left.name}, left by a smoke test that was killed")
        with engine_errors():
            left.remove(force=True, v=True)
    for folder in paths.work.glob(f"{prefix(paths)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers(
    paths: Paths, engine: Engine, others: Sequence[Engine] = (), *, dry_run: bool = False
) -> frozenset[str]:
    """Remove what killed runs left, unless a smoke test runs now: then they are not left over. Ids of this machine's
    containers."""
    with contextlib.suppress(BusyError), lock(paths.home / LOCK, wait=False):
        found = frozenset(str(container.id) for container in containers_of(paths, engine))
        if not dry_run:
            remove_leftovers(paths, engine, others)
        return found
    return frozenset()


@contextlib.contextmanager
def exclusive_run(paths: Paths, engine: Engine, others: Sequence[Engine] = ()) -> Iterator[None]:
    """No other smoke test, benchmark or the like of this home runs meanwhile. Removes what killed runs left. others: of
    other machines that it uses."""
    with lock(paths.home / LOCK, on_wait=WAITING):
        remove_leftovers(paths, engine, others)
        yield


class Server:
    """A release's containers, which have been started, rank 0 first.

    socket: where it is asked; timeout: seconds until it answers. None of either for one that stays. start_seconds:
    until it answered.
    """

    def __init__(
        self, release: Release, containers: Mapping[Container, Place], socket: Path = Path(), timeout: float = 0
    ) -> None:
        self.release, self.containers, self.socket, self.timeout = release, containers, socket, timeout
        self.start_seconds = 0.0

    @property
    def argv(self) -> list[str]:
        """Rank 0's command."""
        return list(next(iter(self.containers)).attrs["Config"]["Cmd"])

    def ask_each(self, ask: Callable[[Container], T]) -> list[T]:
        """By rank."""
        found = []
        for container, place in self.containers.items():
            with place.errors():
                found.append(ask(container))
        return found

    def logs(self) -> tuple[bytes, ...]:
        return tuple(self.ask_each(running.log_of))

    def ended(self) -> tuple[int, str] | None:
        """Rank and reason of one that does not run any more; of several the one that did not end because of another."""
        found = [(rank, reason) for rank, reason in enumerate(self.ask_each(running.exit_reason)) if reason]
        codes = [container.attrs["State"].get("ExitCode") for container in self.containers]
        return min(found, key=lambda one: codes[one[0]] == inside.PEER_LOST, default=None)

    def exit_reason(self, wait: float = 0) -> str | None:
        """Why the container does not run any more. A connection breaks up to `wait` seconds before the engine knows."""
        until = time.monotonic() + wait
        while not (found := self.ended()) and time.monotonic() < until:
            time.sleep(0.1)
        return found and (f"of rank {found[0]} " if len(self.containers) > 1 else "") + found[1]

    def is_open(self) -> bool:
        """Whether its socket is there. It belongs to the container's user; only root could connect to it otherwise."""
        if not self.socket.is_socket():
            return False
        if not os.access(self.socket, os.W_OK):
            with engine_errors():
                next(iter(self.containers)).exec_run(["chmod", "a+rw", f"{SOCKET_FOLDER}/{SOCKET}"])
        return True

    def wait_ready(self, client: Client, next_step: str = "") -> None:
        """Return once /health answers; raise NotReady, with a post-mortem, as soon as a container ends, or after the
        time allowed."""
        try:
            self.start_seconds, _ = wait_for_answer(
                lambda: (self.exit_reason(), self.logs()[0]),
                lambda: self.is_open() and client.healthy(),
                self.timeout,
            )
        except StartFault as fault:
            (rank, _), logs, release = self.ended() or (0, ""), self.logs(), self.release
            death = Death(release.tag, release.recipe, str(fault), 0, "", (), logs[rank])
            raise NotReady("\n".join(report(death)), logs, next_step=next_step) from None

    def stop(self) -> None:
        """End the server, unless it stays, so that its log is complete. Its exit code is no matter."""
        if self.timeout:
            self.ask_each(lambda container: container.stop(timeout=STOP_SECONDS))


@contextlib.contextmanager
def container_of(
    paths: Paths,
    engine: Engine,
    release: Release,
    what: str,
    *,
    prepare: Callable[[Container], None] = lambda container: None,
    place: Place | None = None,
    **settings: Any,
) -> Iterator[Container]:
    """A container of the release's image, started, and removed in the end. settings: of the SDK's `create`; prepare:
    called before its start; place: the engine's machine, where it may be another."""
    errors, name = place.errors if place else engine_errors, f"sparkpin-{what}-{release.name}-{secrets.token_hex(3)}"
    labels = {LABEL: owner(paths, elsewhere=bool(place and place.where)), "sparkpin.release": release.tag}
    try:
        with errors():
            container = engine.client.containers.create(release.tag, name=name, labels=labels, **settings)
            prepare(container)
            container.start()
        yield container
    finally:  # by its name: Ctrl-C may come before its ID
        with errors(), contextlib.suppress(NotFound):
            engine.client.api.remove_container(name, v=True, force=True)


@contextlib.contextmanager
def private_folder(paths: Paths) -> Iterator[Path]:
    """For what is mounted; it keeps other people of the host out."""
    paths.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix(paths), dir=paths.work, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def own_server(
    paths: Paths, release: Release, places: Sequence[Place], *, limit: int = ANSWER_SECONDS
) -> Iterator[Asked]:
    """A container of the release, or one for each of its nodes, without a network, once it answers. All are removed in
    the end, with the folder of the socket.

    places: the machines of the nodes, this one first; or this one alone, for all of them. limit: seconds of an answer.

    Raises:
        NotReady: it does not start.
        EngineError, IntegrityError: the engine refuses, or the tag is gone or names another image.
        CheckpointError: the container's user could not read the checkpoint.
    """
    from sparkpin.smoke.client import Client  # slow to import, and `prune` needs only what killed runs left

    checkpoint, nodes = Path(places[0].checkpoint), nodes_of(release.argv)
    running.require_readable(checkpoint)
    running.require_image(places[0].engine, release)
    with private_folder(paths) as private, contextlib.ExitStack() as stack:
        folder, containers = private / "run", dict[Container, Place]()
        folder.mkdir()
        folder.chmod(0o777)  # for the container's user
        for rank in range(nodes):
            place = places[rank % len(places)]
            if nodes > len(places):
                network = f"container:{next(iter(containers)).id}" if containers else "none"
                node = running.Node(on_loopback(rank), network, gpu=rank if place.has_gpu else None)
                place = replace(place, node=node)
            containers[stack.enter_context(server_at(paths, release, place, folder))] = place
        server = Server(release, containers, folder / SOCKET, running.ready_timeout(checkpoint))
        client = stack.enter_context(Client.unix(server.socket, timeout=limit))
        server.wait_ready(
            client, how_it_failed(paths, release) if release.smoke_failed else f"invoke smoke {release.tag}"
        )
        yield server, client


def server_at(
    paths: Paths, release: Release, place: Place, folder: Path
) -> contextlib.AbstractContextManager[Container]:
    """folder: where the socket comes to lie."""
    socket, with_env = f"{SOCKET_FOLDER}/{SOCKET}", replace(release, env={**release.env, **place.env})
    limits = {"memory": place.memory, "gpus": place.has_gpu}
    with place.errors():
        settings = running.server_settings(
            place.engine, with_env, place.checkpoint, socket, place.node, place.compilers, **limits
        )
    if not place.where:
        settings["volumes"][str(folder)] = {"bind": SOCKET_FOLDER, "mode": "rw"}
    settings["mounts"] = [Mount(target=NODE_FOLDER, source=None, type="volume")]  # goes with the container
    # Nobody starts it again: one restart allowed, or its exit code would be 0.
    files = running.process_one(place.node, {"socket": socket, "restarts": 1, "floor": running.floor_of(place.has_gpu)})
    prepare = partial(running.put, folder=NODE_FOLDER, files=files, owned=("state",))
    entrypoint = [*running.PYTHON, f"{NODE_FOLDER}/inside.py", "run"]
    return container_of(
        paths, place.engine, release, "smoke", prepare=prepare, place=place, entrypoint=entrypoint, **settings
    )
