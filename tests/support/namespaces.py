"""Other network namespaces of this machine, as other machines stand to a port that it publishes. For root."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from watched import until


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
def beside(pid: int | None, net: str) -> Iterator[tuple[int, str]]:
    """Another network namespace with a link to that of a process; a process in it, and its address: net.2, at net.1."""
    near, far = f"{net}.1", f"{net}.2"
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
