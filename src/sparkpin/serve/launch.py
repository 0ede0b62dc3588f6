"""The container of a server: closed in, watched by process 1 and by Docker's health check (see `inside`)."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import EngineError
from sparkpin.host.containers import APIError, Container, Healthcheck, LogConfig, Mount
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.pins.vllm_command import drop_flags, served_name, set_flag
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.serve import inside
from sparkpin.serve.ports import busy

FOLDER = "/run/sparkpin"
PROGRAM = f"{FOLDER}/inside.py"
PYTHON = ("python", "-IS")  # nothing of the image's packages: quick to start, and not theirs to change
INSIDE = 8000  # the port within the container
HIDDEN = "sparkpin-hidden"
SECOND = 10**9  # Docker counts in nanoseconds
PORT_TAKEN = r"port is already allocated|address already in use"


@dataclass(frozen=True)
class Health:
    """How a server is watched: a request each `interval` seconds, with `timeout` seconds for its answer.

    After `failures` in a row the server is ended, for Docker to start it again, at most `restarts` times.
    """

    interval: float = 30
    timeout: float = 60
    failures: int = 3
    restarts: int = 5


@dataclass(frozen=True)
class LaunchOrder:
    """What is to be served, and how. memory: limit in bytes, swap included; labels: whose it is; timeout: seconds that
    its start may take; key: what clients have to give, None for none."""

    release: Release
    checkpoint: Path
    host: str
    port: int
    memory: int | None
    gpus: bool
    labels: Mapping[str, str]
    timeout: float
    key: str | None = None
    health: Health = Health()

    @property
    def argv(self) -> list[str]:
        """The key comes as a file: words of a command line are for everybody to read."""
        argv = set_flag(drop_flags(self.release.argv, "--uds", "--api-key"), "--host", "0.0.0.0")
        return set_flag(argv, "--port", INSIDE)  # within the container only


def create(engine: Engine, name: str, wanted: LaunchOrder, *, hidden: bool) -> Container:
    """A container that has not been started. hidden: its port is published only once it is `connect`ed."""
    release = wanted.release
    settings = running.options(
        release,
        wanted.checkpoint,
        memory=wanted.memory,
        gpus=wanted.gpus,
        cache=running.cache_volume(engine, release),
    )
    if wanted.key is not None:
        settings["environment"].pop("VLLM_API_KEY", None)
    container = engine.client.containers.create(
        release.tag,
        name=name,
        entrypoint=[*PYTHON, PROGRAM, "run"],
        command=wanted.argv,
        network=hidden_network(engine) if hidden else running.network(engine),
        ports={f"{INSIDE}/tcp": (wanted.host, wanted.port)},
        labels=dict(wanted.labels),
        log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": "50m", "max-file": "3"}),
        healthcheck=healthcheck(wanted),
        mounts=[Mount(target=FOLDER, source=None, type="volume")],  # goes with the container
        **settings,
    )
    try:
        if not container.put_archive(FOLDER, parts(wanted)):
            raise EngineError(f"the engine did not take the files of {name}", next_step="invoke doctor")
    except BaseException:
        remove(container)
        raise
    return container


def healthcheck(wanted: LaunchOrder) -> Healthcheck:
    health = wanted.health
    return Healthcheck(
        test=["CMD", *PYTHON, PROGRAM, "health"],
        interval=int(health.interval * SECOND),
        # The request has its own limit, and two looks at the metrics come with it.
        timeout=int((health.timeout + 3 * inside.METRICS_SECONDS) * SECOND),
        start_period=int(wanted.timeout * SECOND),
        retries=health.failures,
    )


def parts(wanted: LaunchOrder) -> bytes:
    """A tar of what is in FOLDER. The container's user can read it and change nothing."""
    settings = {
        "model": served_name(wanted.release.argv),
        "port": INSIDE,
        "timeout": wanted.health.timeout,
        "failures": wanted.health.failures,
        "start": wanted.timeout,
    }
    files = {"inside.py": Path(inside.__file__).read_bytes(), inside.SETTINGS: json.dumps(settings).encode()}
    if wanted.key is not None:
        files[inside.KEY] = wanted.key.encode()
    return packed(files, secret={inside.KEY})


def packed(files: Mapping[str, bytes], secret: Set[str]) -> bytes:
    """A tar. Everybody can read its files, the secret ones the container's user alone."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o400 if name in secret else 0o444
            member.uid = member.gid = running.UID if name in secret else 0
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def hidden_network(engine: Engine) -> str:
    """An internal network: Docker publishes no port of a container that is in no other."""
    return running.made_network(engine, HIDDEN, internal=True, labels={"sparkpin.network": "hidden"})


def connect(engine: Engine, container: Container, host: str, port: int) -> None:
    """Publish a hidden container's port. BusyError when somebody else has it."""
    with port_errors(engine, host, port):
        engine.client.networks.get(running.network(engine)).connect(container)
    with engine_errors():
        container.reload()
        if HIDDEN in container.attrs["NetworkSettings"]["Networks"]:
            engine.client.networks.get(HIDDEN).disconnect(container)


def disconnect(engine: Engine, container: Container) -> None:
    """Free a container's port; it goes on, and nobody reaches it."""
    with engine_errors():
        engine.client.networks.get(running.network(engine)).disconnect(container, force=True)


def end(container: Container) -> None:
    """At once: a second less than `stop`, and Docker does not start it again, either. It may have ended by itself."""
    with engine_errors():
        try:
            container.kill()
        except APIError as error:
            if error.status_code != running.CONFLICT:
                raise


def start(engine: Engine, container: Container, host: str, port: int) -> None:
    with port_errors(engine, host, port):
        container.start()


@contextlib.contextmanager
def port_errors(engine: Engine, host: str, port: int) -> Iterator[None]:
    """Turn Docker's word for a port that is taken into BusyError with its holder."""
    with engine_errors():
        try:
            yield
        except APIError as error:
            if re.search(PORT_TAKEN, str(error.explanation)):
                raise busy(engine, host, port) from None
            raise


def keep_up(container: Container, health: Health) -> None:
    """Have Docker start the server again when it fails; only once it was ready, so that a bad release ends at once."""
    with engine_errors():
        container.update(restart_policy={"Name": "on-failure", "MaximumRetryCount": health.restarts})


def remove(container: Container) -> None:
    """With the volume of its own; the cache's has a name and stays."""
    with engine_errors():
        container.remove(force=True, v=True)


def asks(container: Container) -> tuple[bool, str]:
    """Whether it answers a real request, asked from within; and what came."""
    try:
        result = container.exec_run([*PYTHON, PROGRAM, "ask"])
    except APIError as error:  # it has just ended
        return False, str(error.explanation)
    output = result.output if isinstance(result.output, bytes) else b""
    return result.exit_code == 0, output.decode(errors="replace").strip()
