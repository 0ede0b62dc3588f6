"""What the containers of a service reach, on this machine's Docker and on a newer one: the server nothing, the proxy
the host and no other proxy. A listener of the host and one in another network namespace wait for a word, and write down
whose came."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_image import image_tar
from newer_engine import NEWER, newer_engine
from newer_engine import newer_root as newer_root
from watched import free_port, until

from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine
from sparkpin.serve import served as services
from sparkpin.serve import service
from sparkpin.serve.address import AddressOptions
from sparkpin.serve.rules import PORT

pytest_plugins = ["fake_release"]

TRY = """
import json, os, socket, sys
word, targets = sys.argv[1], json.loads(sys.argv[2])
for host, port in targets:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            with socket.socket(type=kind) as out:
                out.settimeout(2)
                out.connect((host, port))
                out.send(f"{word} {kind.name}".encode())
        except OSError as error:
            print(host, kind.name, error)
try:
    socket.getaddrinfo(f"{word}.example", 80)
except OSError as error:
    print("name", error)
print(sorted(os.listdir("/sys/class/net")))
"""


class Listener:
    """TCP and UDP on a port of all addresses, in the network namespace of the thread that makes it."""

    def __init__(self) -> None:
        self.port, self.heard = 0, set[str]()
        self.tcp = socket.create_server(("0.0.0.0", 0))
        self.port = self.tcp.getsockname()[1]
        self.udp = socket.socket(type=socket.SOCK_DGRAM)
        self.udp.bind(("0.0.0.0", self.port))
        for task in (self.take, self.hear):
            threading.Thread(target=task, daemon=True).start()

    def take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self.tcp.accept()[0] as link:
                    self.heard.add(link.recv(100).decode())

    def hear(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.heard.add(self.udp.recv(100).decode())


def in_namespace(pid: int | None, act: Callable[[], Any]) -> Any:
    """act in a thread that has the network namespace of a process; None: this one's."""

    def enter() -> Any:
        if pid is not None:
            with open(f"/proc/{pid}/ns/net") as file:
                assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000) == 0, ctypes.get_errno()
        return act()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter).result()


@contextlib.contextmanager
def beside(pid: int | None) -> Iterator[tuple[int, str]]:
    """Another network namespace with a link to that of a process; a process in it, and its address."""
    near, far = ("198.51.100.1", "198.51.100.2") if pid is None else ("203.0.113.1", "203.0.113.2")
    with subprocess.Popen(["unshare", "--net", "sleep", "3600"]) as process:
        try:
            until(lambda: os.readlink(f"/proc/{process.pid}/ns/net") != os.readlink("/proc/self/ns/net"))
            name = f"sp{process.pid}"
            ip(pid, "link", "add", name, "type", "veth", "peer", "name", "far", "netns", str(process.pid))
            for where, link, own in ((pid, name, near), (process.pid, "far", far)):
                ip(where, "addr", "add", f"{own}/30", "dev", link)
                ip(where, "link", "set", link, "up")
            ip(process.pid, "route", "add", "default", "via", near)
            yield process.pid, far
        finally:
            process.kill()  # the link goes with its namespace


def ip(pid: int | None, *words: str) -> bytes:
    enter = ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid else []
    return subprocess.run([*enter, "ip", "-json", *words], capture_output=True, check=True).stdout


def addresses(pid: int | None) -> list[str]:
    """Of a process's network namespace."""
    found = [entry["local"] for link in json.loads(ip(pid, "-4", "addr")) for entry in link["addr_info"]]
    return [str(local) for local in found if local != "127.0.0.1"]


def run(container: Container, word: str, targets: list[tuple[str, int]]) -> str:
    done = container.exec_run(["python", "-I", "-c", TRY, word, json.dumps(targets)])
    assert done.exit_code == 0, done.output
    return str(done.output.decode())


@pytest.fixture(params=["own", pytest.param("newer-overlay2", marks=pytest.mark.slow)])
def site(request: pytest.FixtureRequest, tmp_path: Path, project: Path) -> Iterator[tuple[Engine, int | None]]:
    """An engine with the fake release's image, and a process in its network namespace."""
    if request.param == "own":
        yield request.getfixturevalue("fake_engine"), None
        return
    from fake_release import REF

    with newer_engine(request.getfixturevalue("newer_root"), NEWER[request.param]) as engine:
        tar = tmp_path / "rootfs.tar"
        tar.write_bytes(image_tar())
        architecture = "amd64" if os.uname().machine == "x86_64" else "arm64"
        engine.import_rootfs(tar, REF, architecture=architecture, labels={})
        pid = int((Path(engine.host["DOCKER_HOST"].removeprefix("unix://")).parent / "docker.pid").read_text())
        ip(pid, "link", "set", "lo", "up")
        yield engine, pid


def test_the_server_reaches_nothing_and_the_proxy_no_other_proxy(
    site: tuple[Engine, int | None], project: Path, tmp_path: Path
) -> None:
    from fake_release import made_checkpoint, made_release  # pytest has to load it itself, first

    engine, pid = site
    paths, checkpoint = Paths(project, tmp_path / "c", tmp_path / "h"), made_checkpoint(tmp_path / "model")
    release = made_release(engine)

    def served(name: str, port: int) -> services.Served:
        options = AddressOptions(port, host="0.0.0.0")
        return service.start(paths, engine, replace(release, recipe=name), checkpoint, options=options, say=print)

    with beside(pid) as (far, far_address), contextlib.ExitStack() as stack:
        one = in_namespace(pid, lambda: served("one", in_namespace(pid, free_port)))
        stack.callback(service.stop, paths, engine, None, print)
        other = in_namespace(pid, lambda: served("two", in_namespace(pid, free_port)))
        parts = [
            engine.client.containers.get(f"{service.container}{end}") for service in (one, other) for end in FRONTS
        ]
        server, front, _, neighbour = parts
        host, away = in_namespace(pid, Listener), in_namespace(far, Listener)
        neighbours = [one["IPAddress"] for one in neighbour.attrs["NetworkSettings"]["Networks"].values()]
        targets = [(address, host.port) for address in addresses(pid)] + [(far_address, away.port)]
        targets += [(address, PORT) for address in neighbours]

        assert run(server, "server", targets).splitlines()[-1] == "['lo']"
        said = run(front, "front", targets)
        if pid is None:  # the newer engine is started without rules of iptables
            assert all(f"{address} SOCK_STREAM timed out" in said for address in neighbours), said
        assert {"front SOCK_STREAM", "front SOCK_DGRAM"} <= host.heard, "that the trial can fail"
        assert not [word for word in host.heard | away.heard if word.startswith("server")]


FRONTS = ("", services.FRONT)
