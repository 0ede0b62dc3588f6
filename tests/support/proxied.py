"""HAProxy of this machine with the configuration that a service's has, before stand-ins for vLLM on Unix sockets."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_vllm
import httpx
import pytest
from watched import free_port

from sparkpin.releases import inside
from sparkpin.serve import proxy
from sparkpin.serve.address import Address, Limits
from sparkpin.serve.launch import SOCKET
from sparkpin.serve.proxy import ProxyOrder

KEY = "k" * 43
HEADERS = {"Authorization": f"Bearer {KEY}"}
ORDER = ProxyOrder("unit", "/home", "fake", "image", Address(), KEY, None)


class Site:
    """A proxy that listens, and what reached the servers behind it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.seen, self.port = folder, stack, list[str](), 0
        (folder / proxy.STATE).mkdir()
        self.server_folder = folder / "server"
        self.server_folder.mkdir()

    def start(
        self, limits: Limits | None = None, allow: tuple[str, ...] = (), key: str | None = KEY, tls: bytes | None = None
    ) -> httpx.Client:
        self.port = free_port()
        order = replace(ORDER, address=Address(allow=allow, limits=limits or Limits()), key=key, tls=tls)
        for name, data in order.files.items():
            (self.folder / name).write_bytes(data)
        config = order.config(str(self.folder), str(self.server_folder), f"127.0.0.1:{self.port}")
        (self.folder / proxy.CONFIG).write_text(config)
        self.stack.enter_context(running(self.folder, self.port))
        base = f"http://127.0.0.1:{self.port}"
        return self.stack.enter_context(httpx.Client(base_url=base, headers=HEADERS, trust_env=False, timeout=60))

    def say(self, word: str) -> None:
        """As process 1 of the server does."""
        (self.server_folder / inside.PROXY_STATE).write_text(word)

    def shut(self, word: str = "wait") -> None:
        """The gate, as the host does; "": open it."""
        (self.folder / proxy.GATE).write_text(word)

    def server(self, reply: Callable[[str], None] = len) -> fake_vllm.UnixServer:  # type: ignore[assignment]
        """A server that listens. reply: does what it does before each answer."""

        class Handler(fake_vllm.Handler):
            def do_POST(handler) -> None:
                if "Content-Length" not in handler.headers:
                    while size := int(handler.rfile.readline(), 16):
                        handler.rfile.read(size + 2)
                    handler.rfile.readline()
                    handler.headers["Content-Length"] = "0"
                    return handler.reply({})
                return super().do_POST()

            def reply(handler, body: dict[str, Any]) -> None:
                kept = {name: value for name, value in handler.headers.items() if name.lower() not in FRAME}
                self.seen.append(f"{handler.command} {handler.path} {kept}")
                reply(handler.path)
                super().reply(body)

        made = fake_vllm.UnixServer(str(self.server_folder / SOCKET), Handler)
        self.stack.enter_context(fake_vllm.serving(made))
        self.say(inside.UP)
        return made

    def ask_proxy(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.folder / proxy.STATE / "worker"))
            link.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: link.recv(65536), b"")).decode()


FRAME = ("content-length", "content-type", "accept", "connection")


@contextlib.contextmanager
def running(folder: Path, port: int) -> Iterator[None]:
    program = shutil.which("haproxy") or "/usr/sbin/haproxy"
    if not Path(program).exists():
        pytest.skip("no haproxy (tests/packages.txt)")
    with subprocess.Popen([program, "-db", "-f", str(folder / proxy.CONFIG)]) as process:
        try:
            until(lambda: listens(port) or process.poll() is not None)
            assert process.poll() is None, "its configuration is refused"
            yield
        finally:
            process.kill()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return True
    return False


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@contextlib.contextmanager
def site_in(folder: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(folder, stack)
