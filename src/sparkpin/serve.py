"""A release as a service: one container for each recipe of a home, its port published on this machine only."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import docker.errors
from docker.models.containers import Container
from docker.types import LogConfig

from sparkpin import container as running
from sparkpin.container import HOME_LABEL, Say
from sparkpin.engine import Engine, engine_errors
from sparkpin.errors import InputError, SmokeError
from sparkpin.paths import Paths
from sparkpin.ports import busy, require_free
from sparkpin.recipes import drop_flags, flag_value, served_name, set_flag
from sparkpin.releases import Release
from sparkpin.smoke.server import owner

if TYPE_CHECKING:
    from sparkpin.smoke.client import Client

LABEL = "sparkpin.serve"  # its value is the recipe
RELEASE_LABEL = "sparkpin.release"
PREFIX = "sparkpin-"
FORMER = "-former"
INSIDE = 8000  # the port within the container
DEFAULT_PORT = 8000
RESTARTS = 3  # a server that cannot stay up must not take the machine with it
STOP_SECONDS = 30


@dataclass(frozen=True)
class Served:
    """A service. home: SPARKPIN_HOME of its release; state: Docker's word for the container; ready: whether it answers.

    url: the OpenAI endpoint's base.
    """

    home: str
    recipe: str
    release: str
    container: str
    host: str
    port: int
    model: str
    state: str
    ready: bool

    @property
    def url(self) -> str:
        return f"http://{reachable(self.host)}:{self.port}/v1"


def reachable(host: str) -> str:
    """The address to ask on this machine, for one to listen on."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def name_of(paths: Paths, recipe: str) -> str:
    """The name of a recipe's container. Homes may share an engine, and each serves its own releases."""
    return f"{PREFIX}{recipe}-{owner(paths)[:8]}"


def start(
    paths: Paths,
    engine: Engine,
    release: Release,
    checkpoint: Path,
    *,
    port: int | None = None,
    host: str = "127.0.0.1",
    say: Say,
    gpus: bool = False,
) -> Served:
    """Serve a release and return once it answers. One that already runs at this address is left alone.

    Another release of the home's recipe is stopped first, since two may not fit into the memory; when the new one does
    not become ready, the former one is started again. The container restarts after a crash, three times at most.

    Args:
        port: on the host; None takes the recipe's own (`--port` of its command, else 8000).
        gpus: give the container all GPUs.

    Raises:
        BusyError: someone else has the port; another home's server, too.
        SmokeError: the server did not become ready; with the last lines of its log.
    """
    port = port if port is not None else int(flag_value(release.argv, "--port") or DEFAULT_PORT)
    running.require_readable(checkpoint)
    running.require_here(engine)
    running.require_image(engine, release)
    name = name_of(paths, release.recipe)
    old = find(engine, name)
    if old is not None and is_running(old):
        known = describe(old)
        if (known.release, known.host, known.port) == (release.tag, host, port):
            say(f"{release.tag} already runs as {name}")
            if not known.ready:
                wait_ready(old, known, running.ready_timeout(checkpoint), say)
            keep_up(old)  # a run that was killed while it waited did not get to it
            return describe(old)
        if (known.host, known.port) != (host, port):
            require_free(engine, host, port)
    else:
        require_free(engine, host, port)
    with replaced(engine, name, old, release, say), engine_errors():
        home = {HOME_LABEL: str(paths.home)}
        return launch(engine, name, release, checkpoint, host=host, port=port, gpus=gpus, labels=home, say=say)


def launch(
    engine: Engine,
    name: str,
    release: Release,
    checkpoint: Path,
    *,
    host: str,
    port: int,
    gpus: bool,
    labels: dict[str, str],
    say: Say,
) -> Served:
    """Create, start and wait. A container that does not become ready is removed again."""
    argv = set_flag(drop_flags(release.argv, "--uds"), "--host", "0.0.0.0")  # within the container only
    argv = set_flag(argv, "--port", INSIDE)
    container = engine.client.containers.create(
        release.tag,
        name=name,
        entrypoint=argv[:1],
        command=argv[1:],
        network=running.network(engine),
        ports={f"{INSIDE}/tcp": (host, port)},
        labels={
            **labels,
            LABEL: release.recipe,
            RELEASE_LABEL: release.tag,
            f"{LABEL}.host": host,
            f"{LABEL}.port": str(port),
            f"{LABEL}.model": served_name(release.argv),
        },
        log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": "50m", "max-file": "3"}),
        **running.options(
            release,
            checkpoint,
            memory=None if gpus else running.memory_limit(engine, checkpoint),
            gpus=gpus,
            cache=running.cache_volume(engine, release),
        ),
    )
    try:
        try:
            container.start()
        except docker.errors.APIError as error:
            if re.search(r"port is already allocated|address already in use", str(error.explanation)):
                raise busy(engine, host, port) from None
            raise
        say(f"started {name} from {release.tag}")
        wait_ready(container, describe(container), running.ready_timeout(checkpoint), say)
        keep_up(container)
    except BaseException:
        container.remove(force=True)
        raise
    container.reload()
    return describe(container)


def keep_up(container: Container) -> None:
    """Have Docker start the server again when it fails; only once it was ready, so that a bad release ends at once."""
    with engine_errors():
        container.update(restart_policy={"Name": "on-failure", "MaximumRetryCount": RESTARTS})


@contextlib.contextmanager
def replaced(engine: Engine, name: str, old: Container | None, release: Release, say: Say) -> Iterator[None]:
    """The recipe's container so far makes room; it is removed in the end, or started again when the new one fails."""
    former = find(engine, name + FORMER)
    with engine_errors():
        if former is not None:  # a killed run left it between the two
            former.remove(force=True) if old is not None else former.rename(name)
            old = old or find(engine, name)
        was_running = old is not None and is_running(old)
        if old is not None:
            if was_running:
                say(f"stopping {old.labels.get(RELEASE_LABEL, name)}, which {release.tag} replaces")
            old.stop(timeout=STOP_SECONDS)
            old.rename(name + FORMER)
    try:
        yield
    except BaseException:
        if old is not None:
            with engine_errors():
                old.rename(name)
                if was_running:
                    say(f"starting {old.labels.get(RELEASE_LABEL, name)} again")
                    old.start()
        raise
    if old is not None:
        with engine_errors():
            old.remove(force=True)


def wait_ready(container: Container, served: Served, timeout: float, say: Say) -> None:
    """Return once /health answers; SmokeError as soon as the container ends, or after `timeout` seconds."""
    progress = running.Progress(say)
    begin = time.monotonic()
    with client_of(served) as client:
        while True:
            reason, log = running.exit_reason(container), running.log_of(container)
            progress.update(log)
            waited = time.monotonic() - begin
            if reason or waited > timeout:
                raise SmokeError(
                    f"{served.release} did not become ready: "
                    f"{f'the container {reason}' if reason else f'no answer within {timeout:.0f} s'}\n"
                    f"{running.last_lines(log)}",
                    next_step=f"invoke smoke --release {served.release}",
                )
            if client.healthy():
                say(f"ready after {waited:.0f} s at {served.url} (model {served.model})")
                return
            time.sleep(1)


def stop(paths: Paths, engine: Engine, recipe: str | None, say: Say) -> tuple[str, ...]:
    """Stop and remove the container of a recipe of this home, or all of this home; returns their names.

    InputError for a recipe of which nothing is served.
    """
    with engine_errors():
        every = [container for container in services(engine) if container.labels.get(HOME_LABEL) == str(paths.home)]
        chosen = [c for c in every if recipe in (None, c.labels[LABEL])]
        if recipe is not None and not chosen:
            known = ", ".join(sorted({c.labels[LABEL] for c in every}))
            raise InputError(
                f"no service of recipe {recipe!r} runs",
                next_step=f"choose one of: {known}" if known else "invoke serve (nothing is served)",
            )
        for container in chosen:
            say(f"stopping {container.name}")
            container.stop(timeout=STOP_SECONDS)
            container.remove(force=True)
    return tuple(str(container.name) for container in chosen)


def status(engine: Engine) -> tuple[Served, ...]:
    """All services, of all homes, by recipe, whether they run or not."""
    with engine_errors():
        return tuple(sorted((describe(c) for c in services(engine)), key=lambda served: (served.recipe, served.home)))


def services(engine: Engine) -> list[Container]:
    return list(engine.client.containers.list(all=True, filters={"label": LABEL}))


def find(engine: Engine, name: str) -> Container | None:
    with engine_errors():
        try:
            return engine.client.containers.get(name)
        except docker.errors.NotFound:
            return None


def running_release(paths: Paths, engine: Engine, recipe: str) -> str | None:
    """Tag of the release that the container of a recipe of this home runs."""
    container = find(engine, name_of(paths, recipe))
    return container.labels.get(RELEASE_LABEL) if container is not None and is_running(container) else None


def is_running(container: Container) -> bool:
    return container.status in ("running", "restarting", "paused")


def describe(container: Container) -> Served:
    labels = container.labels
    served = Served(
        home=labels.get(HOME_LABEL, ""),
        recipe=labels.get(LABEL, ""),
        release=labels.get(RELEASE_LABEL, ""),
        container=str(container.name),
        host=labels.get(f"{LABEL}.host", "127.0.0.1"),
        port=int(labels.get(f"{LABEL}.port", DEFAULT_PORT)),
        model=labels.get(f"{LABEL}.model", ""),
        state=container.status,
        ready=False,
    )
    if not is_running(container):
        return served
    with client_of(served) as client:
        return Served(**{**served.__dict__, "ready": client.healthy()})


def client_of(served: Served) -> Client:
    from sparkpin.smoke.client import Client  # slow to import, and most tasks ask no server

    return Client.tcp(reachable(served.host).strip("[]"), served.port)
