"""The proxy's container: HAProxy of a release's image. Clients reach a recipe's server by it, from one to the next.

The server's container has no network. It listens on a Unix socket in a folder of a volume that both share. New requests
wait until it does, and while the host has shut the gate, a file of the proxy (`hold.lua`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket as sockets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.containers import APIError, Container, Mount, NotFound, Ulimit
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.pins.reading import read_yaml
from sparkpin.releases import container as running
from sparkpin.releases.container import HOME_LABEL
from sparkpin.releases.record import Release
from sparkpin.serve import launch
from sparkpin.serve.address import Address
from sparkpin.serve.launch import FOLDER, SERVER, SOCKETS
from sparkpin.serve.served import LABEL, PROXY, PROXY_LABEL, find, is_running
from sparkpin.smoke.server import Asked, Serving, container_of
from sparkpin.smoke.startup import NotReady

RULES = read_yaml(Path(__file__).with_name("rules.yaml"))
CONFIG, HOLD, PEM, GATE = "haproxy.cfg", "hold.lua", "tls.pem", "gate"  # files in FOLDER
STATE = "state"  # a folder there, for HAProxy's own sockets
PORT = 8000  # within its container
CLIENTS = "clients"  # instead of it, for a test: a socket next to the server's
MEMORY = 512 << 20
START_SECONDS = 10.0
LEAST_HOLD, MOST_HOLD = 300, 600  # seconds
SLOW_DISK = 200e6  # bytes a second
PRINT = "import sys; [sys.stdout.buffer.write(open(name, 'rb').read()) for name in sys.argv[1:]]"
ASK = """
import re, socket, sys
def ask(words):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(sys.argv[1])
        link.sendall(words.encode() + b"\\n")
        link.shutdown(socket.SHUT_WR)  # else it waits for more
        return b"".join(iter(lambda: link.recv(65536), b"")).decode()
for worker in re.findall(r"^(\\d+)\\s+worker", ask("show proc"), re.M):  # those before a reload, too
    print(ask(f"@!{worker} {sys.argv[2]}"))
"""


@dataclass(frozen=True)
class ProxyOrder:
    """name: of the server; image: that of a release, for its HAProxy; key: what clients have to give, None for none;
    tls: certificate and key as PEM; hold: as of `Limits`, where those have none."""

    name: str
    home: str
    recipe: str
    image: str
    address: Address
    key: str | None
    tls: bytes | None
    hold: int = MOST_HOLD

    @property
    def files(self) -> dict[str, bytes]:
        """In FOLDER. The key itself is in none of them."""
        found = {
            CONFIG: self.config(FOLDER, SERVER, f"0.0.0.0:{PORT}").encode(),
            HOLD: Path(__file__).with_name(HOLD).read_bytes(),
            GATE: b"",  # open
        }
        return found | ({PEM: self.tls} if self.tls else {})

    def config(self, folder: str, server: str, bind: str) -> str:
        from jinja2 import Environment, StrictUndefined  # slow to import

        jinja = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
        host = self.address.host
        return jinja.from_string(Path(__file__).with_name("proxy.cfg.j2").read_text()).render(
            folder=folder,
            server=server,
            bind=bind,
            limits=self.address.limits,
            hold=self.address.limits.hold or self.hold,
            answers=RULES["answers"],
            paths=RULES["paths"],
            allow=list(self.address.allow),
            key=hashlib.sha256(self.key.encode()).hexdigest() if self.key else "",
            hosts=["localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host, sockets.gethostname()],
            tls=self.tls is not None,
        )

    @property
    def mark(self) -> str:
        """Tells whether a container can go on with these files. Not its image: it goes on when another is served."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of the SDK's `containers.create`, as JSON takes them."""
        box = self.box
        return box | {
            "network": running.NETWORK,
            "ports": {f"{PORT}/tcp": (self.address.host, self.address.port)},
            "mounts": [*box["mounts"], Mount(target=SOCKETS, source=self.name, type="volume", read_only=True)],
            "restart_policy": {"Name": "on-failure"},
        }

    @property
    def box(self) -> dict[str, Any]:
        """The same, without where it listens and what it asks."""
        files = 1024 + 4 * self.address.limits.connections  # HAProxy does not start with less than it may need
        box = running.sandbox({}, memory=MEMORY)
        del box["tmpfs"]
        return box | {
            "entrypoint": ["haproxy", "-W", "-S", f"{FOLDER}/{STATE}/master,mode,600", "-f", f"{FOLDER}/{CONFIG}"],
            "command": [],
            "log_config": running.kept_log("10m"),
            "mounts": [Mount(target=FOLDER, source=None, type="volume")],  # goes with the container
            "ulimits": [Ulimit(name="nofile", soft=files, hard=files)],
            "pids_limit": 64,
            "working_dir": "/",
        }


def hold_for(release: Release, checkpoint: Path, drain: float = 0) -> int:
    """Seconds that a request waits for a server of a release where nobody says how long. drain: seconds that the server
    before it may take to end.

    Three times what its smoke test took to start, mostly on this machine with its disk, loader and compilers; a plan
    knows bytes alone. But never less than five minutes and weights of a disk whose cache was lost: the smoke test may
    have found them in memory, or a server that ran already, and the machine may have other work by now.
    """
    seconds = (release.smoke or {}).get("ready_seconds") or MOST_HOLD
    return int(min(MOST_HOLD, drain + max(3 * seconds, LEAST_HOLD + running.folder_size(checkpoint) / SLOW_DISK)))


def bring(engine: Engine, order: ProxyOrder, drain: float = 0) -> Container:
    """The proxy of a service as it is ordered.

    One with other settings takes them while its requests go on. Where the address or its container is to be another,
    the former one ends its requests first (drain: seconds that they get).
    """
    proxy = find(engine, order.name + PROXY)
    if proxy is not None and (proxy.labels.get(PROXY_LABEL) != order.mark or proxy.status == "created"):
        if is_running(proxy):
            say(f"the proxy is replaced, once its requests have ended (at most {drain:.0f} s)")
            end(proxy, drain)
        launch.remove(proxy)
        proxy = None
    if proxy is None:
        proxy = create(engine, order)
    elif not is_running(proxy) or has_other_files(proxy, order.files):
        running.put(proxy, FOLDER, order.files, secret={CONFIG, PEM})
        if is_running(proxy):
            say("the proxy takes its new settings; requests under way continue")
            with engine_errors():
                proxy.kill(signal="SIGUSR2")
    if not is_running(proxy):
        with engine_errors():
            proxy.start()
        until = time.monotonic() + START_SECONDS
        while requests_under_way(proxy) is None and time.monotonic() < until:  # its port is open before it listens
            time.sleep(0.05)
    return proxy


def has_other_files(proxy: Container, files: dict[str, bytes]) -> bool:
    with engine_errors():
        done = proxy.exec_run([*running.PYTHON, "-c", PRINT, *(f"{FOLDER}/{name}" for name in files)])
    return bool(done.output != b"".join(files.values()))


def end(proxy: Container, seconds: float) -> None:
    """It takes nothing new, and ends with its last request, if that comes in so many seconds."""
    with engine_errors():
        proxy.kill(signal="SIGUSR1")
        until = time.monotonic() + seconds
        while is_running(proxy) and time.monotonic() < until:
            time.sleep(0.1)
            proxy.reload()


def create(engine: Engine, order: ProxyOrder) -> Container:
    labels = {HOME_LABEL: order.home, LABEL: order.recipe, PROXY_LABEL: order.mark}
    with engine_errors():
        running.network(engine)
    fill = partial(running.put, folder=FOLDER, files=order.files, secret={CONFIG, PEM}, owned=(STATE,))
    return launch.create_filled(engine, order.image, fill, name=order.name + PROXY, labels=labels, **order.settings)


@contextlib.contextmanager
def before(paths: Paths, serving: Serving) -> Iterator[Asked]:
    """A server that is tested, asked by the proxy that a service of it would have: without a network, by a socket next
    to the server's, and gone with it. One whose image has no HAProxy is asked itself, and a line says so.

    NotReady where the proxy lets no request through.
    """
    from sparkpin.smoke.client import Client  # slow to import, and most tasks ask no server

    with serving as (server, direct):
        release, (container, place) = server.release, next(iter(server.containers.items()))
        with engine_errors():
            has_one = container.exec_run(["haproxy", "-v"]).exit_code == 0
        if not has_one:
            say(f"proxy skipped: {release.tag} has no HAProxy, so its server is asked without one")
            yield server, direct
            return
        order = ProxyOrder(
            "", str(paths.home), release.recipe, release.tag, Address.of_command(release.argv), None, None
        )
        config = order.config(FOLDER, SERVER, f"unix@{SERVER}/{CLIENTS} mode 666")
        files = order.files | {CONFIG: config.encode()}
        settings = running.apart(order.box) | {"volumes": {str(server.socket.parent): {"bind": SERVER, "mode": "rw"}}}
        prepare = partial(running.put, folder=FOLDER, files=files, secret={CONFIG}, owned=(STATE,))
        with (
            container_of(paths, place.engine, release, "proxy", prepare=prepare, **settings) as proxy,
            Client.unix(server.socket.with_name(CLIENTS), timeout=direct.timeout) as client,
        ):
            until = time.monotonic() + START_SECONDS
            while not client.healthy():
                if time.monotonic() > until:
                    cause = f"the proxy lets no request through: {running.last_lines(running.log_of(proxy))}"
                    raise NotReady(cause, server.logs(), next_step=f"invoke smoke {release.tag}")
                time.sleep(0.05)
            yield server, client


@contextlib.contextmanager
def shut(proxy: Container) -> Iterator[None]:
    """New requests wait meanwhile."""
    running.put(proxy, FOLDER, {GATE: b"wait"})
    try:
        yield
    finally:
        running.put(proxy, FOLDER, {GATE: b""})


def requests_under_way(proxy: Container) -> int | None:
    """At the server, by HAProxy's own count. None where it is not known, which does not mean that there are none."""
    counts = re.findall(r"^server,BACKEND,(?:[^,]*,){2}(\d+),", ask(proxy, "show stat server 2 -1"), re.MULTILINE)
    return sum(map(int, counts)) if counts else None


def break_off(proxy: Container) -> None:
    """The requests of the server end now: no client takes what it has for the whole."""
    ask(proxy, "shutdown sessions server server/s")


def ask(proxy: Container, command: str) -> str:
    """What all workers answer; "" where the proxy does not run."""
    with engine_errors():
        try:
            done = proxy.exec_run([*running.PYTHON, "-c", ASK, f"{FOLDER}/{STATE}/master", command])
        except APIError:  # it has just ended
            return ""
    output = done.output if isinstance(done.output, bytes) else b""
    return output.decode(errors="replace") if done.exit_code == 0 else ""


def remove(engine: Engine, name: str) -> bool:
    """With the volume of a service, unless a container still has it. Whether there was a proxy."""
    proxy = find(engine, name + PROXY)
    if proxy is not None:
        launch.remove(proxy)
    with engine_errors():
        try:
            engine.client.volumes.get(name).remove()
        except NotFound:
            pass
        except APIError as error:
            if error.status_code != running.CONFLICT:
                raise
    return proxy is not None
