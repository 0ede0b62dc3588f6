"""Which Docker engine is meant, whether it answers, and how to start one where none does.

Measured with dockerd 20.10. It refuses to start while its pid file names a process that exists, whichever (a zombie
too); it waits 15 s and gives up while containerd's pid file does. It does clean up sockets, containers and most mounts
by itself; that takes 10 s where containers were running, since each is first asked to stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import requests
from docker.context import ContextAPI

from sparkpin.core import files
from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say
from sparkpin.host.machine import SYSTEM_PATH, find_program

START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 60.0
LOG_LINES = 15
SOCKET = Path("/var/run/docker.sock")
DEFAULT_HOSTS = (None, "", f"unix://{SOCKET}", "unix:///run/docker.sock")
JOIN_GROUP = "sudo usermod -aG docker $USER, then log in again"
NAMED_NEXT = "start that engine, or `unset DOCKER_HOST` (`docker context use default`) to use this machine's own"


def environment() -> dict[str, str]:
    """What leads Docker's CLI and SDK to the engine that the user means: DOCKER_HOST, else the CLI's context.

    A context with certificates is left to the CLI, which alone has them.
    """
    found = {key: value for key, value in os.environ.items() if key.startswith("DOCKER_")}
    if "DOCKER_HOST" not in found:
        context = ContextAPI.get_context(found.get("DOCKER_CONTEXT"))
        if context and context.name != "default" and "docker" not in context.tls_cfg:
            found["DOCKER_HOST"] = str(context.Host)
    return found


def named_engine() -> str | None:
    """The engine that the user names by DOCKER_HOST or a context of the CLI; None for this machine's own."""
    host = environment().get("DOCKER_HOST")
    return None if host in DEFAULT_HOSTS else host


def ask(url: str, timeout: int = 10) -> str | None:
    """The version of the engine at a url, or None when none answers. PermissionError when it may not be asked."""
    try:
        client = docker.DockerClient.from_env(timeout=timeout, environment={**environment(), "DOCKER_HOST": url})
        with contextlib.closing(client):
            return str(client.version()["Version"])
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        if "PermissionError" in str(error):
            raise PermissionError(url) from None
        return None


@dataclass(frozen=True)
class Daemon:
    """A second engine with everything below `folder` (but its data, if that is named), in its own network namespace.

    In a shared one it would take away the first engine's docker0: with a bridge to replace it by its own, and with
    the bridge "none" too, which removes what it takes for left over. `folder` must be short: a socket's path has
    107 bytes. settings: of its configuration file; wrapper: the command that runs dockerd.
    """

    folder: Path
    settings: Mapping[str, Any]
    wrapper: tuple[str, ...] = ("unshare", "--net")

    @classmethod
    def private(cls, folder: Path, data_root: Path | None = None) -> Daemon:
        folder = folder.resolve()
        settings = {
            "hosts": [f"unix://{folder / 'docker.sock'}"],
            "data-root": str(data_root or folder / "data"),
            "exec-root": str(folder / "exec"),
            "pidfile": str(folder / "docker.pid"),
            "bridge": "none",
            "iptables": False,
            "ip-forward": False,
            "ip-masq": False,
        }
        return cls(folder, settings)

    @property
    def socket(self) -> Path:
        return self.folder / "docker.sock"

    @property
    def data_root(self) -> Path:
        return Path(self.settings["data-root"])

    @property
    def pidfile(self) -> Path:
        return self.folder / "docker.pid"

    @property
    def pidfiles(self) -> tuple[tuple[Path, str], ...]:
        """With the program of each."""
        return (self.pidfile, "dockerd"), (self.folder / "exec/containerd/containerd.pid", "containerd")


def start_engine(paths: Paths, daemon: Daemon | None = None) -> str:
    """Version of the engine that answers, started when none did. HostError when none can be had.

    An engine that the user names (DOCKER_HOST, a context) is theirs: it answers or that is the error. daemon: a
    private one; None: the machine's own.
    """
    named = None if daemon else named_engine()
    url = f"unix://{daemon.socket}" if daemon else named or f"unix://{SOCKET}"
    try:
        version = ask(url)
    except PermissionError:
        raise HostError(f"no permission to talk to the Docker engine at {url}", next_step=JOIN_GROUP) from None
    if version:
        return version
    if named:
        raise HostError(f"{url}, which DOCKER_HOST or docker's context names, does not answer", next_step=NAMED_NEXT)
    if os.geteuid() != 0:
        has_systemd = not daemon and Path("/run/systemd/system").is_dir()
        raise HostError("no Docker engine answers, and only root may start one", next_step=start_command(has_systemd))
    folder = daemon.folder if daemon else paths.engine
    with files.lock(folder / ".lock", on_wait=lambda: say("another run is starting the Docker engine")):
        return ask(url) or run_engine(daemon, folder / "dockerd.log", url)


def start_command(has_systemd: bool) -> str:
    """What a user who is not root types to start the machine's own engine."""
    return "sudo systemctl start docker" if has_systemd else "sudo sh -c 'setsid dockerd >/dev/null 2>&1 &'"


def run_engine(daemon: Daemon | None, log: Path, url: str) -> str:
    """In a session of its own, so that it outlives this process; systemd, if any, runs the machine's own."""
    command = find_program("dockerd")
    if command is None:
        raise HostError("no Docker engine answers and there is no dockerd to start", next_step="invoke doctor")
    argv = [command]
    if daemon:
        clear_pidfiles(daemon)
        config = daemon.folder / "daemon.json"
        config.write_text(json.dumps(daemon.settings))
        argv = [*daemon.wrapper, command, f"--config-file={config}"]
    elif Path("/run/systemd/system").is_dir():
        argv = ["systemctl", "start", "docker"]
    say(f"starting the Docker engine (log: {log})")
    with log.open("wb") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd="/",
            env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"},
            start_new_session=True,
        )
    with waiting("waiting for the Docker engine"):
        until(lambda: ask(url) is not None or bool(process.poll()), START_TIMEOUT)
    if version := ask(url):
        return version
    code = process.poll()
    why = f"it ended with exit code {code}" if code else f"no answer within {START_TIMEOUT:.0f} s"
    process.terminate()
    last = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    raise HostError(
        f"the Docker engine did not start: {why}. Last lines of {log}:\n{last}",
        next_step="fix what these lines name, then the same command again",
    )


def clear_pidfiles(daemon: Daemon) -> None:
    """Those of an engine that was killed."""
    for pidfile, name in daemon.pidfiles:
        if pidfile.exists() and owner_of(pidfile, name) is None:
            say(f"removing {pidfile}: the engine that wrote it is gone")
            pidfile.unlink()


def owner_of(pidfile: Path, name: str, proc: Path = Path("/proc")) -> int | None:
    """The process that a pid file names, if it lives and is the named program; None if its number is another's now."""
    try:
        pid = int(pidfile.read_text().strip())
        # "<pid> (<name>) <state> ...": the name may hold blanks and brackets
        head, _, rest = (proc / str(pid) / "stat").read_text().rpartition(")")
    except (OSError, ValueError):
        return None
    return pid if head.partition("(")[2] == name and rest.split()[0] not in "ZX" else None


def stop_engine(daemon: Daemon) -> None:
    """Stop a private engine and unmount what it left mounted. Works on one that was killed as well."""
    for pidfile, name in daemon.pidfiles:
        if pid := owner_of(pidfile, name):
            say(f"stopping {name} (process {pid})")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            if not until(lambda pidfile=pidfile, name=name: owner_of(pidfile, name) is None, STOP_TIMEOUT):  # type: ignore[misc]
                raise HostError(f"{name} (process {pid}) does not stop", next_step=f"kill -9 {pid}")
        pidfile.unlink(missing_ok=True)
    for mount in mounts_below(daemon.folder, daemon.data_root):
        # Lazily: a process that was killed is gone from /proc before its last thread lets go of its files.
        subprocess.run(["umount", "--lazy", mount], check=False)


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in time."""
    started = time.monotonic()
    while not (met := condition()) and time.monotonic() - started < seconds:
        time.sleep(0.05)
    return met


def mounts_below(*roots: Path) -> list[Path]:
    """Mount points at or below the roots, the last mounted first."""
    texts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = [Path(text.encode().decode("unicode_escape")) for text in texts]  # blanks stand as \040
    return [point for point in reversed(points) if any(point.is_relative_to(root) for root in roots)]
