"""Which Docker engine is meant, and whether it answers.

With the standard library alone: ./install.sh asks before .venv exists.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

OWN = (None, "", "unix:///var/run/docker.sock", "unix:///run/docker.sock")


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def environment() -> dict[str, str]:
    found = {key: value for key, value in os.environ.items() if key.startswith("DOCKER_")}
    if "DOCKER_HOST" not in found:
        with contextlib.suppress(Exception):  # no SDK yet, or a context that cannot be read: the CLI's to complain of
            import docker

            context = docker.ContextAPI.get_current_context()
            if context is not None and context.Host and not context.TLSConfig:
                found["DOCKER_HOST"] = context.Host
    return found


def named_engine() -> str | None:
    """The engine that the user names by DOCKER_HOST or a context of the CLI; None for this machine's own."""
    host = environment().get("DOCKER_HOST")
    return None if host in OWN else host


def elsewhere(url: str | None, info: Mapping[str, Any]) -> str:
    """The name of the machine that an engine runs on, as its `info` tells it; "" when that is this machine.

    url: where it was found. The address of an engine that is named does not tell: a socket may be forwarded from
    another machine, and tcp may lead back to this one.
    """
    if url in OWN:
        return ""
    here = (socket.gethostname(), platform.release(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    there = (info.get("Name"), info.get("KernelVersion"), info.get("MemTotal"))
    return "" if here == there else str(there[0] or "another machine")


def ask(url: str, timeout: float = 10) -> str | None:
    """The version of the engine at a url, or None when none answers. PermissionError when it may not be asked."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return version(UnixConnection(parts.path, timeout))
    if parts.scheme in ("tcp", "http") and not os.environ.get("DOCKER_TLS_VERIFY"):
        return version(http.client.HTTPConnection(parts.hostname or "", parts.port or 2375, timeout=timeout))
    return ask_by_sdk(url, timeout)


def version(connection: http.client.HTTPConnection) -> str | None:
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/version")
            return str(json.load(connection.getresponse())["Version"])
        except PermissionError:
            raise
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return None


def ask_by_sdk(url: str, timeout: float) -> str | None:
    """For what the standard library cannot speak alone: TLS with Docker's certificates, ssh."""
    import docker
    import docker.errors
    import requests

    try:
        client = docker.DockerClient.from_env(timeout=int(timeout), environment={**os.environ, "DOCKER_HOST": url})
        with contextlib.closing(client):
            return str(client.version()["Version"])
    except (docker.errors.DockerException, requests.exceptions.RequestException):
        return None
