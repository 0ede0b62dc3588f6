"""What the containers of a service reach, on this machine's Docker and on a newer one: the server nothing, the proxy
the host and no other proxy."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_image import image_tar
from newer_engine import newer_engine
from newer_engine import newer_root as newer_root
from watched import free_port

from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine
from sparkpin.serve import served as services
from sparkpin.serve import service
from sparkpin.serve.address import AddressOptions
from sparkpin.serve.proxy import PORT

pytest_plugins = ["fake_release"]

TRY = """
import json, os, socket, sys
reached = []
for host, port in json.loads(sys.argv[1]):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):  # of a datagram, that there is a route
        try:
            with socket.socket(type=kind) as out:
                out.settimeout(2)
                out.connect((host, port))
            reached.append([host, kind.name])
        except OSError:
            pass
print(json.dumps([sorted(os.listdir("/sys/class/net")), reached]))
"""


def in_namespace(pid: int | None, act: Callable[[], Any]) -> Any:
    """act in a thread that has the network namespace of a process; None: this one's."""

    def enter() -> Any:
        if pid is not None:
            with open(f"/proc/{pid}/ns/net") as file:
                assert ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000) == 0, ctypes.get_errno()
        return act()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(enter).result()


def ip(pid: int | None, *words: str) -> bytes:
    enter = ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid else []
    return subprocess.run([*enter, "ip", "-json", *words], capture_output=True, check=True).stdout


def addresses(pid: int | None) -> list[str]:
    """Of a process's network namespace."""
    found = [entry["local"] for link in json.loads(ip(pid, "-4", "addr")) for entry in link["addr_info"]]
    return [str(local) for local in found if local != "127.0.0.1"]


def reached(container: Container, targets: list[tuple[str, int]]) -> Any:
    """Its interfaces, and what got through."""
    done = container.exec_run(["python", "-I", "-c", TRY, json.dumps(targets)])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.fixture(params=["own", pytest.param("docker-26-overlay2", marks=pytest.mark.slow)])
def site(request: pytest.FixtureRequest, tmp_path: Path, project: Path) -> Iterator[tuple[Engine, int | None]]:
    """An engine with the fake release's image, and a process in its network namespace."""
    if request.param == "own":
        yield request.getfixturevalue("fake_engine"), None
        return
    from fake_release import REF

    with newer_engine(request.param, request.getfixturevalue("newer_root")) as engine:
        tar = tmp_path / "rootfs.tar"
        tar.write_bytes(image_tar())
        architecture = "amd64" if os.uname().machine == "x86_64" else "arm64"
        engine.import_rootfs(tar, REF, architecture=architecture, labels={})
        pid = int(subprocess.check_output(["pgrep", "-of", Path(engine.host["DOCKER_HOST"]).parent.name]))
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
        return service.start(paths, engine, replace(release, recipe=name), checkpoint, options=options)

    with contextlib.ExitStack() as stack:
        one = in_namespace(pid, lambda: served("one", in_namespace(pid, free_port)))
        stack.callback(service.stop, paths, engine, None)
        other = in_namespace(pid, lambda: served("two", in_namespace(pid, free_port)))
        names = (one.container, f"{one.container}{services.PROXY}", f"{other.container}{services.PROXY}")
        server, front, neighbour = map(engine.client.containers.get, names)
        listener = stack.enter_context(in_namespace(pid, lambda: socket.create_server(("0.0.0.0", 0))))
        hosts = [(address, listener.getsockname()[1]) for address in addresses(pid)]
        others = [(one["IPAddress"], PORT) for one in neighbour.attrs["NetworkSettings"]["Networks"].values()]

        assert hosts and others and reached(server, hosts + others) == [["lo"], []]
        through = reached(front, hosts + others)[1]
        assert [hosts[0][0], "SOCK_STREAM"] in through, "that the trial can fail"
        if pid is None:  # the newer engine is started without rules of iptables
            assert not [address for address, _ in others if [address, "SOCK_STREAM"] in through]
