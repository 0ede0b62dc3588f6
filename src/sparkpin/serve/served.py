"""What is served: the record that `serve` keeps of each recipe, and the engine's containers: a server, and the proxy
that clients reach it by."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult

from pydantic import BaseModel

from sparkpin.core.errors import InputError
from sparkpin.core.files import atomic_file, lock
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.containers import Container, NotFound
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases.container import HOME_LABEL
from sparkpin.serve.address import Address, input_errors
from sparkpin.serve.cluster import HERE, Cluster
from sparkpin.serve.launch import LaunchOrder

if TYPE_CHECKING:
    from sparkpin.smoke.client import Client

LABEL = "sparkpin.serve"  # its value is the recipe
RELEASE_LABEL = "sparkpin.release"
PROXY = "-proxy"
PROXY_LABEL = "sparkpin.proxy"  # of the proxy alone; its value is `ProxyOrder.mark`
MODEL_LABEL = "sparkpin.serve.model"
RECORD = ".served.json"
STATUS_SECONDS = 5.0


class Service(BaseModel):
    """What `serve` was told of a recipe. It is written before anything starts, and read by all who come later.

    address: None where it was never served; cluster: its machines, None for this one alone; orders: of its containers,
    the one of this machine first, none once it is stopped; former: what is started again if this does not answer, None
    once it has; answered: when `serve` last had a real request answered, seconds since 1970.
    """

    address: Address | None = None
    cluster: Cluster | None = None
    orders: tuple[LaunchOrder, ...] = ()
    former: Service | None = None
    answered: float = 0

    @property
    def others(self) -> tuple[str, ...]:
        """URLs of the other machines that it runs on."""
        return tuple(order.where for order in self.orders[1:])

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the machines that may have a container of it."""
        known = [HERE, *(self.cluster.urls if self.cluster else ()), *(self.former.urls if self.former else ())]
        return tuple(dict.fromkeys(known))

    @property
    def tags(self) -> set[str]:
        """Of the releases that may be started again."""
        return {order.release.tag for order in self.orders} | (self.former.tags if self.former else set())


def record_path(home: Path, recipe: str) -> Path:
    return home / "serve" / f"{recipe}{RECORD}"


def read(home: Path, recipe: str) -> Service:
    """InputError for a file that is damaged. An empty one for a recipe that was never served, and where another user's
    home may not be read."""
    path = record_path(home, recipe)
    with contextlib.suppress(OSError), input_errors(f"{path}: ", f"rm {path}, then serve with the options you want"):
        return Service.model_validate_json(path.read_bytes())
    return Service()


def try_read(home: Path, recipe: str) -> Service:
    """As `read`; a damaged file is a warning, and counts as none."""
    try:
        return read(home, recipe)
    except InputError as error:
        say(f"warning: {error.message}")
        return Service()


def change(home: Path, recipe: str, changed: Callable[[Service], Service]) -> Service:
    """What was recorded. No other run changes it meanwhile; `stop` does not wait for a whole start, which has another
    lock."""
    with lock(home / "serve" / f".{recipe}.record.lock"):
        record = try_read(home, recipe)
        if (wanted := changed(record)) != record:
            write(home, recipe, wanted)
        return record


def write(home: Path, recipe: str, service: Service) -> None:
    path = record_path(home, recipe)
    with atomic_file(path, mode=0o600) as file:
        file.write(service.model_dump_json().encode())


def recorded(home: Path, recipe: str | None = None) -> dict[str, Service]:
    """All recipes of a home that were ever served, or one."""
    names = [path.name.removesuffix(RECORD) for path in sorted((home / "serve").glob(f"{recipe or '*'}{RECORD}"))]
    return {name: try_read(home, name) for name in names}


def certificate_at(home: Path, url: SplitResult) -> str:
    """PEM file of the certificate of what a data directory serves there; "" for nothing, or for plain HTTP."""
    from sparkpin.smoke.client import OWN_HOSTS  # as in `client_of`

    known = [one.address for one in recorded(home).values() if one.orders and one.address]
    port = url.port or 443
    found = (one for one in known if one.port == port and url.hostname in (*OWN_HOSTS, one.reachable.host))
    return next((one.cert for one in found), "")


@dataclass(frozen=True)
class Served:
    """A service. home: data directory of its release; server, proxy: containers as Docker described them last; ready:
    whether it answers."""

    home: str
    recipe: str
    release: str
    model: str
    address: Address
    server: Container
    proxy: Container | None
    ready: bool = False

    @property
    def container(self) -> str:
        """The server's name."""
        return str(self.server.name)

    @property
    def url(self) -> str:
        """The OpenAI endpoint's base, for this machine."""
        return self.address.reachable.url

    @property
    def state(self) -> dict[str, Any]:
        """Of the server, in Docker's words."""
        return dict(self.server.attrs["State"])

    @property
    def started(self) -> str:
        """When the server was, the last time, as Docker writes it."""
        return str(self.state.get("StartedAt", ""))

    @property
    def health(self) -> str:
        """What Docker's health check says: "healthy", "unhealthy", "starting" or "unknown"."""
        return str(self.server.health)

    @property
    def restarts(self) -> int:
        """How often Docker has started it again."""
        return int(self.server.attrs.get("RestartCount", 0))


def name_of(paths: Paths, recipe: str) -> str:
    """The name of a recipe's container. Homes may share an engine, and each serves its own releases."""
    return base_name(str(paths.home), recipe)


def base_name(home: str, recipe: str) -> str:
    return f"sparkpin-{recipe}-{hashlib.sha256(home.encode()).hexdigest()[:8]}"


def status(engine: Engine) -> tuple[Served, ...]:
    """All services, of all homes, by recipe, whether they run or not."""
    # One that Docker is removing has no log any more.
    there = (container for container in services(engine) if container.status not in ("removing", "dead"))
    found = (describe(engine, container) for container in there)
    return tuple(sorted(found, key=lambda served: (served.recipe, served.home)))


def services(engine: Engine, home: Path | None = None) -> list[Container]:
    """Those of servers, without their proxies: of one data directory, or of all."""
    label = f"{HOME_LABEL}={home}" if home else HOME_LABEL
    with engine_errors():
        every = engine.client.containers.list(all=True, filters={"label": [LABEL, label]}, ignore_removed=True)
        return [container for container in every if PROXY_LABEL not in container.labels]


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


def describe(engine: Engine, container: Container) -> Served:
    labels = container.labels
    home, recipe = labels.get(HOME_LABEL, ""), labels.get(LABEL, "")
    proxy = find(engine, base_name(home, recipe) + PROXY)
    service = try_read(Path(home), recipe)
    address = service.address or published(proxy)
    release, model = labels.get(RELEASE_LABEL, ""), labels.get(MODEL_LABEL, "")
    served = Served(home, recipe, release, model, address, container, proxy)
    if not is_running(container) or proxy is None or not is_running(proxy):
        return served
    if service.address is None:  # whether it wants TLS is not known
        return replace(served, ready=served.health == "healthy")
    with client_of(served) as client:
        return replace(served, ready=client.healthy() and served.health != "unhealthy")


def published(proxy: Container | None) -> Address:
    """Where a proxy listens whose record is not there, or may not be read."""
    ports = proxy.attrs["HostConfig"]["PortBindings"] if proxy is not None else {}
    return next((Address(host=one["HostIp"], port=one["HostPort"]) for (one,) in ports.values()), Address())


def client_of(served: Served, key: str | None = None, timeout: float = STATUS_SECONDS) -> Client:
    """A key goes to a server with the certificate of the record alone. Without one any server is asked: a certificate
    that was renewed is the proxy's only from the next `serve` on, and until then the server is ready all the same."""
    from sparkpin.smoke.client import Client, pinned  # slow to import, and most tasks ask no server

    verify = pinned(served.address.cert) if key and served.address.cert else False
    return Client.url(served.url, timeout=timeout, key=key, verify=verify, is_own=True)
