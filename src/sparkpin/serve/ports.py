"""Ports of this machine: whether one is free, and who has it."""

from __future__ import annotations

import errno
import re
import socket

from sparkpin.core.errors import BusyError, InputError
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.machine import output
from sparkpin.releases.container import HOME_LABEL


def require_free(engine: Engine, host: str, port: int) -> None:
    """Raise BusyError when something listens at the address."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise InputError(
                    f"cannot listen on {host}:{port}: {error.strerror}",
                    next_step="an address of this machine, --host 127.0.0.1 or 0.0.0.0, or another port",
                ) from None
            holder, home = port_holder(engine, port)
            whose = f", a server of the home {home}" if home else ""
            raise BusyError(
                f"port {port} on {host} is taken{f' by {holder}{whose}' if holder else ''}",
                next_step=f"stop that{f' (SPARKPIN_HOME={home} invoke stop)' if home else ''}, or choose another port: "
                f"the same command with --port {port + 1 if port < 65535 else port - 1}",
            ) from None


def port_holder(engine: Engine, port: int) -> tuple[str, str]:
    """The container or process that listens on a port of this machine, "" where neither can be seen; and SPARKPIN_HOME
    of the release that it serves, "" for what is no server of ours."""
    with engine_errors():
        for container in engine.client.containers.list(filters={"publish": str(port)}, ignore_removed=True):
            return f"the container {container.name}", container.labels.get(HOME_LABEL, "")
    found = re.search(r'users:\(\("(.*?)",pid=(\d+)', listeners(port))  # other people's are shown to root alone
    return (f"{found[1]} (process {found[2]})" if found else ""), ""


def listeners(port: int) -> str:
    """A line of ss(8) for each TCP socket that listens on a port, with its process; "" where none does."""
    return output(["ss", "-Hltnp", f"sport = :{port}"]) or ""
