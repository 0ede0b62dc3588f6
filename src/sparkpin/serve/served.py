"""What is served, as the engine's containers show it: a server, and the proxy that clients reach it by."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases.container import HOME_LABEL
from sparkpin.serve.address import Address, endpoint, input_errors, reachable
from sparkpin.serve.rules import FOLDER

if TYPE_CHECKING:
    from sparkpin.smoke.client import Client

LABEL = "sparkpin.serve"  # its value is the recipe
RELEASE_LABEL = "sparkpin.release"
COMMAND_LABEL = "sparkpin.command"  # its value is `service.command_mark`
PREFIX = "sparkpin-"
PROXY = "-proxy"
FORMER = "-former"  # while one container takes another's place
PROXY_LABEL = "sparkpin.proxy"  # of the proxy alone; its value is `ProxyOrder.mark`
SETTINGS = "settings.json"  # a file of the proxy: its `ProxySettings`
MODEL_LABEL = "sparkpin.serve.model"
STATUS_SECONDS = 5.0


class ProxySettings(BaseModel):
    """key: `keys.mark` of it, "" for none."""

    address: Address = Address()
    key: str = ""


@dataclass(frozen=True)
class Served:
    """A service. home: SPARKPIN_HOME of its release; state: Docker's word for the container; ready: whether it answers;
    health: what Docker's health check says ("healthy", "unhealthy", "starting", "" where it has none); restarts: how
    often Docker has started it again; started: when it was, the last time, as Docker writes it; key: tells its API key
    from another, "" where it wants none; cert: the file of its TLS certificate, "" for plain HTTP.

    proxy: Docker's word for the proxy, "" where there is none; allow, limits: what is not as it comes.

    url: the OpenAI endpoint's base, for this machine.
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
    health: str = ""
    restarts: int = 0
    started: str = ""
    key: str = ""
    cert: str = ""
    proxy: str = ""
    allow: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return endpoint(reachable(self.host), self.port, tls=bool(self.cert))


def name_of(paths: Paths, recipe: str) -> str:
    """The name of a recipe's container. Homes may share an engine, and each serves its own releases."""
    return base_name(str(paths.home), recipe)


def base_name(home: str, recipe: str) -> str:
    return f"{PREFIX}{recipe}-{hashlib.sha256(home.encode()).hexdigest()[:8]}"


def status(engine: Engine) -> tuple[Served, ...]:
    """All services, of all homes, by recipe, whether they run or not."""
    with engine_errors():
        # One that Docker is removing has no log any more.
        there = (container for container in services(engine) if container.status not in ("removing", "dead"))
        found = (describe(container, proxy_of(engine, container)) for container in there)
        return tuple(sorted(found, key=lambda served: (served.recipe, served.home)))


def services(engine: Engine) -> list[Container]:
    """Those of servers, without their proxies, and without one that gives way to the next."""
    servers = [container for container in parts(engine) if PROXY_LABEL not in container.labels]
    return [container for container in servers if not str(container.name).endswith(FORMER)]


def parts(engine: Engine) -> list[Container]:
    """The containers of all services."""
    return list(engine.client.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True))


def proxy_of(engine: Engine, container: Container) -> Container | None:
    """Of a server's container."""
    return find(engine, base_name(container.labels.get(HOME_LABEL, ""), container.labels.get(LABEL, "")) + PROXY)


def find(engine: Engine, name: str) -> Container | None:
    with engine_errors():
        try:
            return engine.client.containers.get(name)
        except NotFound:
            return None


def running_release(paths: Paths, engine: Engine, recipe: str) -> str | None:
    """Tag of the release that the container of a recipe of this home runs."""
    container = find(engine, name_of(paths, recipe))
    return container.labels.get(RELEASE_LABEL) if container is not None and is_running(container) else None


def is_running(container: Container) -> bool:
    return container.status in ("running", "restarting", "paused")


def describe(container: Container, proxy: Container | None) -> Served:
    labels, settings = container.labels, settings_of(proxy) or ProxySettings()
    address = settings.address
    served = Served(
        home=labels.get(HOME_LABEL, ""),
        recipe=labels.get(LABEL, ""),
        release=labels.get(RELEASE_LABEL, ""),
        container=str(container.name),
        host=address.host,
        port=address.port,
        model=labels.get(MODEL_LABEL, ""),
        state=container.status,
        ready=False,
        health=str((container.attrs["State"].get("Health") or {}).get("Status", "")),
        restarts=int(container.attrs.get("RestartCount", 0)),
        started=str(container.attrs["State"].get("StartedAt", "")),
        key=settings.key,
        cert=address.cert,
        proxy=proxy.status if proxy is not None else "",
        allow=address.allow,
        limits=address.other_limits,
    )
    if not is_running(container) or proxy is None or not is_running(proxy):
        return served
    with client_of(served) as client:
        return replace(served, ready=client.healthy() and served.health != "unhealthy")


def read_file(container: Container, path: str) -> bytes | None:
    """Of a container, whether it runs or not; None where there is none."""
    with engine_errors():
        try:
            parts, _ = container.get_archive(path)
            with tarfile.open(fileobj=io.BytesIO(b"".join(parts))) as tar:
                file = tar.extractfile(tar.getmembers()[0])
                return file.read() if file else None
        except NotFound:
            return None


def settings_of(proxy: Container | None) -> ProxySettings | None:
    """None where there is no proxy."""
    data = read_file(proxy, f"{FOLDER}/{SETTINGS}") if proxy is not None else None
    if data is None:
        return None
    with input_errors(
        "the address of a server: ", "invoke stop, with the SPARKPIN_HOME of that server, then invoke serve"
    ):
        return ProxySettings.model_validate_json(data)


def address_of(proxy: Container | None) -> Address | None:
    """None where there is none."""
    settings = settings_of(proxy)
    return settings.address if settings else None


def address_path(paths: Paths, recipe: str) -> Path:
    return paths.home / "serve" / f".{recipe}.address"


def keep_address(paths: Paths, recipe: str, address: Address) -> None:
    path = address_path(paths, recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(address.model_dump_json().encode())


def kept_address(paths: Paths, recipe: str) -> Address | None:
    """That the recipe was last served at; None where it never was."""
    path = address_path(paths, recipe)
    if not path.is_file():
        return None
    with input_errors(f"{path}: ", f"rm {path}, then serve with the options that you want"):
        return Address.model_validate_json(path.read_bytes())


def client_of(served: Served, key: str | None = None, timeout: float = STATUS_SECONDS) -> Client:
    from sparkpin.smoke.client import Client  # slow to import, and most tasks ask no server

    return Client.tcp(reachable(served.host), served.port, timeout=timeout, key=key, tls=bool(served.cert))
