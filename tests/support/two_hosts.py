"""A second machine, as far as Docker and the network can tell: an engine in a network namespace of its own, a cable to
this one, and a real ssh server that leads to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from private_engine import engine_folder
from ssh_host import SshHost, ssh_host

from sparkpin.host import private_engine as engines
from sparkpin.host.engine import Engine


@dataclass
class OtherHost:
    """engine: of the second machine; ssh: the way to it; own, other: interfaces of the cable, here and there; network:
    its addresses, .1 here and .2 there; space: the name of its network namespace; running: what ends the engine."""

    engine: Engine
    ssh: SshHost
    own: str
    other: str
    network: str
    space: str
    running: contextlib.ExitStack

    @property
    def url(self) -> str:
        return self.ssh.url

    def there(self, *words: str) -> None:
        ip("-n", self.space, *words)

    def shut_down(self) -> None:
        self.running.close()

    def boot(self) -> None:
        """As far as Docker can tell: its engine starts with those of its containers that should run."""
        folder = Path(self.engine.host["DOCKER_HOST"].removeprefix("unix://")).parent
        self.engine = self.running.enter_context(engines.private_engine(folder, enter=entering(self.space)))


def entering(space: str) -> tuple[str, ...]:
    return ("nsenter", f"--net=/run/netns/{space}")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextlib.contextmanager
def other_host(folder: Path) -> Iterator[OtherHost]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 (apt-get install iproute2) for a network namespace")
    name = f"sp{secrets.token_hex(3)}"
    own, other, network = f"{name}a", f"{name}b", f"10.213.{secrets.randbelow(250)}"
    with contextlib.ExitStack() as stack:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
        ip("link", "add", own, "type", "veth", "peer", "name", other, "netns", name)
        stack.callback(lambda: subprocess.run(["ip", "link", "del", own], capture_output=True))
        for space, end, number in (((), own, 1), (("-n", name), other, 2)):
            ip(*space, "address", "add", f"{network}.{number}/24", "dev", end)
            ip(*space, "link", "set", end, "up")
        ip("-n", name, "link", "set", "lo", "up")

        place = stack.enter_context(engine_folder())
        running = stack.enter_context(contextlib.ExitStack())
        engine = running.enter_context(engines.private_engine(place, enter=entering(name)))
        ssh = stack.enter_context(ssh_host(folder / "ssh", engine.host["DOCKER_HOST"]))
        yield OtherHost(engine, ssh, own, other, f"{network}.0/24", name, running)
