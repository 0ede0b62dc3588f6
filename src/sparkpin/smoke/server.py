"""The container under test: no network, a Unix socket in a mounted folder, gone when the test ends, however it ends.

A release for several machines has a container for each on this one, in one network namespace without a network, with
the same process 1 as when it is served (`releases.inside`).
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkpin.core.errors import BusyError
from sparkpin.core.files import lock
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host import ssh
from sparkpin.host.containers import Container, Mount
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.pins.nodes import nodes_of, on_loopback
from sparkpin.pins.vllm_flags import drop_flags, set_flag
from sparkpin.releases import container as running
from sparkpin.releases import inside
from sparkpin.releases.record import Release
from sparkpin.smoke.startup import StartFault, wait_for_answer

if TYPE_CHECKING:  # slow to import, and `prune` needs only what killed runs left
    from sparkpin.smoke.client import Client

LABEL = "sparkpin.smoke"
WAITING = "waiting for invoke up, smoke, quality, bench or bisect to end: one server is asked at a time"
SOCKET_FOLDER = "/run/sparkpin"
SOCKET = "vllm.sock"
NODE_FOLDER = "/run/sparkpin-node"  # of process 1, where there are several containers
STOP_SECONDS = 10


@dataclass(frozen=True)
class Place:
    """One machine of a release, which may be for several: then its node.

    checkpoint: its folder there; env: what it adds to the release's; where: the URL of
    another machine, "" for this one.
    """

    engine: Engine
    checkpoint: Path | str
    node: running.Node | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    where: str = ""

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Errors of another machine's engine name it."""
        return ssh.errors_of(self.where) if self.where else contextlib.nullcontext()


def owner(paths: Paths, *, elsewhere: bool = False) -> str:
    """The label's value: tells this home's containers from those of another home on the same engine. elsewhere: on
    another machine, which may have a home of the same name."""
    home = ssh.owner(str(paths.home)) if elsewhere else str(paths.home)
    return hashlib.sha256(home.encode()).hexdigest()[:16]


def prefix(paths: Paths) -> str:
    """Of this home's socket folders, which lie in a cache that other homes may share."""
    return f"smoke-{owner(paths)[:8]}-"


def own(paths: Paths, engine: Engine, *, elsewhere: bool = False) -> list[Container]:
    """Containers of this home's tests."""
    label = f"{LABEL}={owner(paths, elsewhere=elsewhere)}"
    with engine_errors():
        return list(engine.client.containers.list(all=True, filters={"label": label}, ignore_removed=True))


def remove_leftovers(paths: Paths, engine: Engine, others: Sequence[Engine] = ()) -> None:
    """Remove what killed runs left. Call it only while holding the lock of the smoke test. others: of other machines
    that they may have used."""
    for left in [*own(paths, engine), *(one for other in others for one in own(paths, other, elsewhere=True))]:
        say(f"removing {left.name}, left by a smoke test that was killed")
        with engine_errors():
            left.remove(force=True, v=True)
    for folder in paths.work.glob(f"{prefix(paths)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def leftovers(paths: Paths, engine: Engine) -> frozenset[str]:
    """Ids of the containers that `clear_leftovers` would remove."""
    with contextlib.suppress(BusyError), lock(smoke_lock(paths), wait=False):
        return frozenset(str(container.id) for container in own(paths, engine))
    return frozenset()


def clear_leftovers(paths: Paths, engine: Engine, others: Sequence[Engine] = ()) -> None:
    """Remove what killed runs left, unless a smoke test runs now: then they are not left over."""
    with contextlib.suppress(BusyError), lock(smoke_lock(paths), wait=False):
        remove_leftovers(paths, engine, others)


def smoke_lock(paths: Paths) -> Path:
    """With the home, since that is whose containers a smoke test removes."""
    return paths.home / ".smoke.lock"


@contextlib.contextmanager
def alone(paths: Paths, engine: Engine, others: Sequence[Engine] = ()) -> Iterator[None]:
    """No other smoke test, benchmark or the like of this home runs meanwhile. Removes what killed runs left, and what
    this one leaves. others: of other machines that it uses."""
    with lock(smoke_lock(paths), on_wait=WAITING):
        remove_leftovers(paths, engine, others)
        try:
            yield
        except BaseException:
            remove_leftovers(paths, engine, others)
            raise


def socket_argv(release: Release, path: str = f"{SOCKET_FOLDER}/{SOCKET}") -> list[str]:
    """The release's own command, listening on a socket instead of an address."""
    return set_flag(drop_flags(release.argv, "--host", "--port"), "--uds", path)


@contextlib.contextmanager
def errors_at(place: Place | None) -> Iterator[None]:
    """Errors of this machine's engine, or of a place's."""
    with place.errors() if place else contextlib.nullcontext(), engine_errors():
        yield


class Server:
    """A container that has been started, with those of the other nodes if it has any. `ready_seconds` is set once it
    answers."""

    def __init__(
        self, container: Container, socket: Path, timeout: float, others: Mapping[Container, Place] = {}
    ) -> None:
        """others: the containers of ranks 1 and up, each with its machine."""
        self.container, self.socket, self._timeout = container, socket, timeout
        self.others = others
        self.started = time.monotonic()
        self.ready_seconds: float | None = None

    def log(self) -> bytes:
        return self.log_of(self.container)

    def other_logs(self) -> tuple[bytes, ...]:
        """Of ranks 1 and up."""
        return tuple(self.log_of(container) for container in self.others)

    def log_of(self, container: Container) -> bytes:
        with errors_at(self.others.get(container)):
            return running.log_of(container)

    def ended(self) -> tuple[str, Container] | None:
        """Why one does not run any more, and which; of several the one that did not end because of another."""
        found = []
        for rank, container in enumerate((self.container, *self.others)):
            with errors_at(self.others.get(container)):
                reason = running.exit_reason(container)
            if reason:
                found.append((f"of rank {rank} {reason}" if self.others else reason, container))
        return min(found, key=lambda one: one[1].attrs["State"]["ExitCode"] == inside.PEER_LOST, default=None)

    def exit_reason(self, wait: float = 0) -> str | None:
        """Why the container does not run any more. A connection breaks up to `wait` seconds before the engine knows."""
        until = time.monotonic() + wait
        while not (found := self.ended()) and time.monotonic() < until:
            time.sleep(0.1)
        return found[0] if found else None

    def is_open(self) -> bool:
        """Whether its socket is there. It belongs to the container's user; only root could connect to it otherwise."""
        if not self.socket.is_socket():
            return False
        if not os.access(self.socket, os.W_OK):
            with engine_errors():
                self.container.exec_run(["chmod", "a+rw", f"{SOCKET_FOLDER}/{SOCKET}"])
        return True

    def wait_ready(self, client: Client) -> None:
        """Return once /health answers; raise StartFault as soon as the container ends, or after the time allowed. Its
        text ends with the last words of the one that ended."""
        ended: tuple[str, Container] | None = None

        def look() -> tuple[str | None, bytes]:
            nonlocal ended
            ended = self.ended()
            return (f"the container {ended[0]}" if ended else None), self.log()

        try:
            wait_for_answer(look, lambda watched: self.is_open() and client.healthy(), self._timeout)
        except StartFault as fault:
            log = self.log_of(ended[1]) if ended else self.log()
            raise StartFault(f"{fault}\n{running.last_lines(log)}") from None
        self.ready_seconds = round(time.monotonic() - self.started, 1)

    def stop(self) -> None:
        """End the server so that its log is complete. Its exit code is no matter."""
        for container in (self.container, *self.others):
            with errors_at(self.others.get(container)):
                container.stop(timeout=STOP_SECONDS)


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
    with errors_at(place):
        container = engine.client.containers.create(
            release.tag,
            name=f"sparkpin-{what}-{release.name}-{secrets.token_hex(3)}",
            labels={LABEL: owner(paths, elsewhere=bool(place and place.where)), "sparkpin.release": release.tag},
            **settings,
        )
    try:
        with errors_at(place):
            prepare(container)
            container.start()
        yield container
    finally:
        with errors_at(place):
            container.remove(force=True, v=True)


@contextlib.contextmanager
def private_folder(paths: Paths) -> Iterator[Path]:
    """For what is mounted; it keeps other people of the host out."""
    paths.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=prefix(paths), dir=paths.work, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def started(
    paths: Paths,
    engine: Engine,
    release: Release,
    checkpoint: Path,
    *,
    gpus: bool,
    timeout: float,
    places: Sequence[Place] = (),
) -> Iterator[Server]:
    """A container of the release, or one for each of its nodes, removed in the end with its socket folder.

    places: the machines of the nodes, rank 0 first; none: all nodes are on this one.
    """
    nodes = nodes_of(release.argv)
    with private_folder(paths) as private:
        folder = private / "run"
        folder.mkdir()
        folder.chmod(0o777)  # for the container's user
        argv = socket_argv(release)

        def settings(engine: Engine, source: Path | str, share: int, env: Mapping[str, str]) -> dict[str, Any]:
            with engine_errors():
                found = running.options(
                    replace(release, env={**release.env, **env}) if env else release,
                    source,
                    memory=running.memory_limit(engine, checkpoint, share, gpus=gpus),
                    gpus=gpus,
                    cache=running.cache_volume(engine, release),
                )
            if not isinstance(source, str):
                found["volumes"][str(folder)] = {"bind": SOCKET_FOLDER, "mode": "rw"}
            return running.apart(found)

        if nodes == 1:
            own = settings(engine, checkpoint, 1, {})
            with started_at(paths, release, Place(engine, checkpoint), argv, own) as container:
                yield Server(container, folder / SOCKET, timeout)
            return
        containers = dict[Container, Place]()
        with contextlib.ExitStack() as stack:
            for rank in range(nodes):
                if places:
                    place = places[rank]
                else:
                    network = f"container:{next(iter(containers)).id}" if containers else "none"
                    node = running.Node(on_loopback(rank), network, gpu=rank if gpus else None)
                    place = Place(engine, checkpoint, node)
                with errors_at(place):
                    own = settings(place.engine, place.checkpoint, 1 if places else nodes, place.env)
                containers[stack.enter_context(started_at(paths, release, place, argv, own))] = place
            first, *others = containers
            yield Server(first, folder / SOCKET, timeout, {one: containers[one] for one in others})


def started_at(
    paths: Paths, release: Release, place: Place, argv: Sequence[str], settings: dict[str, Any]
) -> contextlib.AbstractContextManager[Container]:
    """argv: of the server; settings: without what is the node's own."""
    node, gpus = place.node, bool(settings.get("device_requests"))
    # Nobody starts it again: one restart allowed, or its exit code would be 0.
    own_settings = {"socket": f"{SOCKET_FOLDER}/{SOCKET}", "restarts": 1, "floor": running.floor_of(gpus)}
    files = running.process_one(node, own_settings)
    own = (running.at_node(settings, node, gpus=gpus) if node else settings) | {
        "entrypoint": [*running.PYTHON, f"{NODE_FOLDER}/inside.py", "run"],
        "command": running.node_argv(argv, node),
        "mounts": [Mount(target=NODE_FOLDER, source=None, type="volume")],  # goes with the container
    }
    prepare = lambda container: running.put(container, NODE_FOLDER, files, owned=("state",))  # noqa: E731
    return container_of(paths, place.engine, release, "smoke", prepare=prepare, place=place, **own)
