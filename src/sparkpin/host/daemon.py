"""Which Docker engine is meant, whether it answers, and how to start one where none does.

With the standard library alone: ./install.sh asks before .venv exists.

Measured with dockerd 20.10. It refuses to start while its pid file names a process that exists, whichever (a zombie
too); it waits 15 s and gives up while containerd's pid file does. It does clean up sockets, containers and most mounts
by itself; that takes 10 s where containers were running, since each is first asked to stop.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sparkpin.core import files
from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import Say
from sparkpin.host.machine import SYSTEM_PATH, find_program, output

START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 60.0
LOG_LINES = 15
SOCKET = Path("/var/run/docker.sock")
DEFAULT_HOSTS = (None, "", f"unix://{SOCKET}", "unix:///run/docker.sock")
JOIN_GROUP = "sudo usermod -aG docker $USER, then log in again"
NAMED_NEXT = "start that engine, or `unset DOCKER_HOST` (`docker context use default`) to use this machine's own"


def environment() -> dict[str, str]:
    """What leads Docker's CLI and SDK to the engine that the user means: DOCKER_HOST, else the CLI's context."""
    found = {key: value for key, value in os.environ.items() if key.startswith("DOCKER_")}
    if "DOCKER_HOST" not in found and (host := context_host(found)):
        found["DOCKER_HOST"] = host
    return found


def context_host(variables: Mapping[str, str]) -> str:
    """The engine of the CLI's current context; "" for the default one, and for one that only the CLI can make out."""
    folder = Path(variables.get("DOCKER_CONFIG") or Path.home() / ".docker")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        name = variables.get("DOCKER_CONTEXT") or json.loads((folder / "config.json").read_text())["currentContext"]
        place = hashlib.sha256(name.encode()).hexdigest()
        if name != "default" and not (folder / "contexts/tls" / place).exists():
            meta = json.loads((folder / "contexts/meta" / place / "meta.json").read_text())
            return str(meta["Endpoints"]["docker"]["Host"])
    return ""


def named_engine() -> str | None:
    """The engine that the user names by DOCKER_HOST or a context of the CLI; None for this machine's own."""
    host = environment().get("DOCKER_HOST")
    return None if host in DEFAULT_HOSTS else host


def ask(url: str, timeout: float = 10) -> str | None:
    """The version of the engine at a url, or None when none answers. PermissionError when it may not be asked."""
    parts = urlsplit(url)
    if parts.scheme not in ("unix", "tcp", "http") or (parts.scheme != "unix" and os.environ.get("DOCKER_TLS_VERIFY")):
        text = output(("docker", "-H", url, "version", "--format", "{{.Server.Version}}"), timeout)
        return text.strip() or None if text else None
    connection = http.client.HTTPConnection(parts.hostname or "localhost", parts.port or 2375, timeout=timeout)
    with contextlib.closing(connection):
        try:
            if parts.scheme == "unix":
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(timeout)
                connection.sock.connect(parts.path)
            connection.request("GET", "/version")
            return str(json.load(connection.getresponse())["Version"])
        except PermissionError:
            raise
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True)
class Daemon:
    """One engine. config: its configuration file; settings: what that says, or is to say; wrapper: the command that
    runs dockerd; is_system: the machine's own, which systemd may start, and of which nothing is changed."""

    config: Path
    settings: Mapping[str, Any]
    log: Path
    wrapper: tuple[str, ...] = ()
    is_system: bool = False

    @classmethod
    def system(cls, paths: Paths, config: Path = Path("/etc/docker/daemon.json")) -> Daemon:
        """The machine's own engine, at the default socket, with whatever its configuration file says."""
        try:
            settings = dict(json.loads(config.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):  # dockerd itself complains of it
            settings = {}
        return cls(config, settings, paths.engine / "dockerd.log", is_system=True)

    @classmethod
    def private(cls, folder: Path, data_root: Path | None = None) -> Daemon:
        """A second engine with everything below `folder` (but `data_root`), in a network namespace of its own.

        In a shared one it would take away the first engine's docker0: with a bridge to replace it by its own, and with
        the bridge "none" too, which removes what it takes for left over. `folder` must be short: a socket's path has
        107 bytes.
        """
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
        return cls(folder / "daemon.json", settings, folder / "dockerd.log", ("unshare", "--net"))

    @property
    def socket(self) -> Path:
        return SOCKET if self.is_system else self.config.parent / "docker.sock"

    @property
    def data_root(self) -> Path:
        return Path(self.settings.get("data-root", "/var/lib/docker"))

    @property
    def exec_root(self) -> Path:
        return Path(self.settings.get("exec-root", "/var/run/docker"))

    @property
    def pidfile(self) -> Path:
        return Path(self.settings.get("pidfile", "/var/run/docker.pid"))

    @property
    def pidfiles(self) -> tuple[tuple[Path, str], ...]:
        """With the program of each."""
        return (self.pidfile, "dockerd"), (self.exec_root / "containerd/containerd.pid", "containerd")


def start_engine(paths: Paths, say: Say, daemon: Daemon | None = None) -> str:
    """Version of the engine that answers, started when none did. HostError when none can be had.

    An engine that the user names (DOCKER_HOST, a context) is theirs: it answers or that is the error.
    """
    daemon = daemon or Daemon.system(paths)
    named = named_engine() if daemon.is_system else None
    url = named or f"unix://{daemon.socket}"
    try:
        version = ask(url)
    except PermissionError:
        raise HostError(f"no permission to talk to the Docker engine at {url}", next_step=JOIN_GROUP) from None
    if version:
        return version
    if named:
        raise HostError(
            f"no Docker engine answers at {url}, which DOCKER_HOST or docker's context names", next_step=NAMED_NEXT
        )
    has_systemd = daemon.is_system and Path("/run/systemd/system").is_dir()
    if os.geteuid() != 0:
        raise HostError("no Docker engine answers, and only root may start one", next_step=start_command(has_systemd))
    with files.lock(daemon.log.parent / ".lock", on_wait=lambda: say("another run is starting the Docker engine")):
        return ask(url) or (start_by_systemd(url, say) if has_systemd else start_directly(daemon, url, say))


def start_command(has_systemd: bool) -> str:
    """What a user who is not root types to start the machine's own engine."""
    return "sudo systemctl start docker" if has_systemd else "sudo sh -c 'setsid dockerd >/dev/null 2>&1 &'"


def start_by_systemd(url: str, say: Say) -> str:
    say("starting the Docker engine: systemctl start docker")
    done = subprocess.run(["systemctl", "start", "docker"], capture_output=True, text=True, check=False)
    if done.returncode == 0 and (version := wait_for(url, lambda: True, say)):
        return version
    raise HostError(
        f"`systemctl start docker` did not bring up an engine at {url}: {done.stderr.strip()}",
        next_step="journalctl -u docker -n 50 shows why",
    )


def start_directly(daemon: Daemon, url: str, say: Say) -> str:
    """Run dockerd in a session of its own, so that it outlives this process."""
    command = find_program("dockerd")
    if command is None:
        raise HostError("no Docker engine answers and there is no dockerd to start", next_step="invoke doctor")
    if pid := owner_of(daemon.pidfile, "dockerd"):
        say(f"dockerd runs (process {pid}) and does not answer yet: waiting")
        if version := wait_for(url, lambda: owner_of(daemon.pidfile, "dockerd") is not None, say):
            return version
        raise HostError(
            f"dockerd (process {pid}) runs and does not answer at {url}",
            next_step=f"stop it (`kill {pid}`), then the same command again",
        )
    for pidfile, name in daemon.pidfiles:
        if pidfile.exists() and owner_of(pidfile, name) is None:
            say(f"removing {pidfile}: the engine that wrote it is gone")
            pidfile.unlink(missing_ok=True)
    options = []
    if not daemon.is_system:
        daemon.config.write_text(json.dumps(daemon.settings))
        options = [f"--config-file={daemon.config}"]
    if daemon.log.exists():
        daemon.log.replace(daemon.log.with_suffix(".log.1"))
    say(f"starting the Docker engine (log: {daemon.log})")
    with daemon.log.open("wb") as log:
        process = subprocess.Popen(
            [*daemon.wrapper, command, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"},
            start_new_session=True,
        )
    if version := wait_for(url, lambda: process.poll() is None, say):
        return version
    why = f"no answer within {START_TIMEOUT:.0f} s"
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
    else:
        why = f"it ended with exit code {process.returncode}"
    last = "\n".join(f"  {line}" for line in daemon.log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    raise HostError(
        f"the Docker engine did not start: {why}. Last lines of {daemon.log}:\n{last}",
        next_step="fix what these lines name, then the same command again",
    )


def wait_for(url: str, runs: Callable[[], bool], say: Say) -> str | None:
    """The engine's version once it answers; None when it does not run any more or did not answer in time."""
    with waiting(say, "waiting for the Docker engine"):
        until(lambda: ask(url) is not None or not runs(), START_TIMEOUT)
    return ask(url)


def owner_of(pidfile: Path, name: str, proc: Path = Path("/proc")) -> int | None:
    """The process that a pid file names, if it lives and is the named program; None if its number is another's now."""
    try:
        pid = int(pidfile.read_text().strip())
        # "<pid> (<name>) <state> ...": the name may hold blanks and brackets
        head, _, rest = (proc / str(pid) / "stat").read_text().rpartition(")")
    except (OSError, ValueError):
        return None
    return pid if head.partition("(")[2] == name and rest.split()[0] not in "ZX" else None


def stop_engine(daemon: Daemon, say: Say) -> None:
    """Stop a private engine and unmount what it left mounted. Works on one that was killed as well."""
    if daemon.is_system:
        raise ValueError("the machine's own engine is not ours to stop")
    for pidfile, name in daemon.pidfiles:
        if pid := owner_of(pidfile, name):
            say(f"stopping {name} (process {pid})")
            stop_process(pidfile, name, pid)
        pidfile.unlink(missing_ok=True)
    for mount in mounts_below(daemon.exec_root, daemon.data_root):
        unmount(mount)


def stop_process(pidfile: Path, name: str, pid: int) -> None:
    def has_ended() -> bool:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        return owner_of(pidfile, name) != pid

    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    if not until(has_ended, STOP_TIMEOUT):
        raise HostError(f"{name} (process {pid}) does not stop", next_step=f"kill -9 {pid}")


def unmount(mount: Path) -> None:
    """Tried for a while: a process that was killed is gone from /proc before its last thread lets go of its files."""
    if not until(lambda: output(("umount", str(mount))) is not None, STOP_TIMEOUT):
        raise HostError(f"cannot unmount {mount}", next_step=f"sudo umount -l {mount}")


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
