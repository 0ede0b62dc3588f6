"""The front's container: clients reach a recipe's server by it, from one server to the next (see `front`)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparkpin.host.containers import APIError, Container, Mount, Ulimit
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases import container as running
from sparkpin.releases.container import HOME_LABEL
from sparkpin.serve import keys, launch
from sparkpin.serve.address import Address
from sparkpin.serve.launch import FOLDER, SOCKET_LABEL
from sparkpin.serve.ports import busy
from sparkpin.serve.rules import CERT, KEY, PORT, SETTINGS, SOCKETS, TLS_KEY, UPSTREAM
from sparkpin.serve.served import ADDRESS_LABEL, FORMER, FRONT, KEY_LABEL, LABEL, find, is_running
from sparkpin.serve.tls import Tls
from sparkpin.serve.waiting import Detached

OWN = ("__init__.py", "serve/__init__.py")  # that make packages of the folders
PARTS = ("front", "rules")  # of `sparkpin.serve`: all that the front imports of it
START = f"import sys; sys.path.insert(0, {FOLDER!r}); from sparkpin.serve import front; front.main(*sys.argv[1:])"
SAME_LABEL = "sparkpin.front.mark"
MEMORY = 1 << 30
NO_SUCH = 404  # Docker's word for what is not there
PORT_TAKEN = r"port is already allocated|address already in use"


@dataclass(frozen=True)
class FrontOrder:
    """name: of the server; image: that of a release, for its Python and aiohttp; key: what clients have to give, None
    for none."""

    name: str
    home: str
    recipe: str
    image: str
    address: Address
    key: str | None
    tls: Tls | None

    @property
    def files(self) -> dict[str, bytes]:
        """In FOLDER, without UPSTREAM."""
        settings = {"limits": asdict(self.address.limits), "allow": self.address.allow}
        found = {f"sparkpin/{name}": b"" for name in OWN}
        for name in PARTS:
            found[f"sparkpin/serve/{name}.py"] = Path(__file__).with_name(f"{name}.py").read_bytes()
        found[SETTINGS] = json.dumps(settings).encode()
        if self.key is not None:
            found[KEY] = self.key.encode()
        if self.tls is not None:
            found |= {CERT: self.tls.cert, TLS_KEY: self.tls.key}
        return found

    @property
    def mark(self) -> str:
        """Tells whether a front is the same. Not its image: it goes on when another release is served."""
        told = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in self.files.items())
        return hashlib.sha256(json.dumps([self.address.text, told, self.settings]).encode()).hexdigest()

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the SDK's `containers.create`, as JSON takes them."""
        box = running.sandbox({}, memory=MEMORY)
        del box["tmpfs"]
        return {
            "entrypoint": ["python", "-I", "-c", START, FOLDER, SOCKETS],
            "command": [],
            "network": running.NETWORK,
            "ports": {f"{PORT}/tcp": (self.address.host, self.address.port)},
            "log_config": running.kept_log("10m"),
            "mounts": [
                Mount(target=FOLDER, source=None, type="volume"),  # goes with the container
                Mount(target=SOCKETS, source=self.name, type="volume", read_only=True),
            ],
            "restart_policy": {"Name": "on-failure"},
            "ulimits": [Ulimit(name="nofile", soft=2048, hard=2048)],
            **box | {"pids_limit": 64, "working_dir": "/"},
        }


@contextlib.contextmanager
def opened(engine: Engine, order: FrontOrder, folder: str) -> Iterator[Container]:
    """The front of a service as it is ordered, for a server whose socket is in `folder`.

    One that is the same goes on. Another one takes its place; that is there again when what follows fails.

    BusyError: somebody else has the port.
    """
    old = find(engine, order.name + FRONT)
    with engine_errors():
        if old is not None and old.labels.get(SAME_LABEL) == order.mark:
            if not is_running(old):
                start(engine, old, order.address)
            yield old
            return
        if old is not None:
            launch.end(old)
            old.rename(order.name + FRONT + FORMER)
    new = None
    try:
        with engine_errors():
            new = create(engine, order)
            use(new, folder)
            start(engine, new, order.address)
        yield new
    except Detached:
        raise
    except BaseException:
        if new is not None:
            launch.remove(new)
        if old is not None:
            with engine_errors():
                old.rename(order.name + FRONT)
                old.start()
        raise
    finally:
        if old is not None and find(engine, order.name + FRONT) != old:
            launch.remove(old)


def create(engine: Engine, order: FrontOrder) -> Container:
    labels = {HOME_LABEL: order.home, LABEL: order.recipe, ADDRESS_LABEL: order.address.text, SAME_LABEL: order.mark}
    if order.key is not None:
        labels[KEY_LABEL] = keys.mark(order.key)
    running.network(engine)
    container = engine.client.containers.create(order.image, name=order.name + FRONT, labels=labels, **order.settings)
    try:
        running.put(container, FOLDER, order.files, secret={KEY, TLS_KEY})
    except BaseException:
        launch.remove(container)
        raise
    return container


def use(front: Container, folder: str) -> None:
    """From now on requests go to the server whose socket is there."""
    running.put(front, FOLDER, {UPSTREAM: folder.encode()})


def drop_sockets(engine: Engine, name: str) -> None:
    """The volume of a service, unless a container still has it."""
    with engine_errors():
        try:
            engine.client.volumes.get(name).remove()
        except APIError as error:
            if error.status_code not in (NO_SUCH, running.CONFLICT):
                raise


def folder_of(server: Container | None) -> str:
    """Where the next server's socket is to lie: not where this one's does."""
    return "b" if server is not None and server.labels.get(SOCKET_LABEL) == "a" else "a"


def start(engine: Engine, front: Container, address: Address) -> None:
    """BusyError where Docker says that the port is taken."""
    with engine_errors():
        try:
            front.start()
        except APIError as error:
            if re.search(PORT_TAKEN, str(error.explanation)):
                raise busy(engine, address.host, address.port) from None
            raise
