"""Start a Docker engine where none answers, and cope with what a killed one left behind.

Measured with dockerd 20.10. It refuses to start while its pid file names a process that exists, whichever (a zombie
too); it waits 15 s and gives up while containerd's pid file does. It does clean up sockets, containers and most mounts
by itself; that takes 10 s where containers were running, since each is first asked to stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkpin.core import files
from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.endpoint import ask, named_engine

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
START_TIMEOUT = 120.0  # seconds
STOP_TIMEOUT = 60.0
UNMOUNT_TIMEOUT = 10.0
LOG_LINES = 15
LOG_LIMIT = 10 << 20  # bytes; a longer log is put aside when the next engine starts


JOIN_GROUP = "sudo usermod -aG docker $USER, then log in again"
NAMED_NEXT = "start that engine, or `unset DOCKER_HOST` (`docker context use default`) to use this machine's own"


@dataclass(frozen=True)
class Daemon:
    """Where one engine keeps its things.

    options: what dockerd is started with; wrapper: the command that runs dockerd; settings: the text of the
    configuration file, where an option names one; is_system: systemd may own it.
    """

    socket: Path
    data_root: Path
    exec_root: Path
    pidfile: Path
    log: Path
    options: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()
    settings: str = "{}"
    is_system: bool = False

    @classmethod
    def system(cls, paths: Paths, config: Path = Path("/etc/docker/daemon.json")) -> Daemon:
        """The machine's own engine, at the default socket, with whatever its configuration file says.

        Nothing is passed on the command line: dockerd refuses an option that the file sets as well.
        """
        settings = read_settings(config)
        return cls(
            socket=Path("/var/run/docker.sock"),
            data_root=Path(settings.get("data-root", "/var/lib/docker")),
            exec_root=Path(settings.get("exec-root", "/var/run/docker")),
            pidfile=Path(settings.get("pidfile", "/var/run/docker.pid")),
            log=paths.engine / "dockerd.log",
            is_system=True,
        )

    @classmethod
    def private(cls, folder: Path, data_root: Path | None = None) -> Daemon:
        """A second engine with everything below `folder` (but `data_root`), in a network namespace of its own.

        In a shared one it would take away the first engine's docker0: with a bridge to replace it by its own, and with
        --bridge=none too, which removes what it takes for left over. `folder` must be short: a socket's path has 107
        bytes.
        """
        folder = folder.resolve()
        own = cls(
            socket=folder / "docker.sock",
            data_root=data_root or folder / "data",
            exec_root=folder / "exec",
            pidfile=folder / "docker.pid",
            log=folder / "dockerd.log",
        )
        options = (
            f"--config-file={folder / 'daemon.json'}",
            f"--host=unix://{own.socket}",
            f"--data-root={own.data_root}",
            f"--exec-root={own.exec_root}",
            f"--pidfile={own.pidfile}",
            "--bridge=none",
            "--iptables=false",
            "--ip-forward=false",
            "--ip-masq=false",
        )
        return replace(own, options=options, wrapper=("unshare", "--net"))

    @property
    def pidfiles(self) -> tuple[tuple[Path, str], ...]:
        """With the program of each."""
        return (self.pidfile, "dockerd"), (self.exec_root / "containerd/containerd.pid", "containerd")


def read_settings(config: Path) -> dict[str, Any]:
    """dockerd's configuration; an absent or unreadable one gives nothing (dockerd itself complains of it)."""
    try:
        value = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def start_engine(paths: Paths, say: Say, daemon: Daemon | None = None) -> str:
    """Version of the engine that answers, started when none did. HostError when none can be had.

    An engine that the user names (DOCKER_HOST, a context) is theirs: it answers or that is the error.
    """
    daemon = daemon or Daemon.system(paths)
    host = named_engine() if daemon.is_system else None
    url = host or f"unix://{daemon.socket}"
    try:
        version = ask(url)
    except PermissionError:
        raise HostError(f"no permission to talk to the Docker engine at {url}", next_step=JOIN_GROUP) from None
    if version:
        return version
    if host:
        raise HostError(
            f"no Docker engine answers at {host}, which DOCKER_HOST or docker's context names", next_step=NAMED_NEXT
        )
    has_systemd = daemon.is_system and Path("/run/systemd/system").is_dir()
    if os.geteuid() != 0:
        raise HostError("no Docker engine answers, and only root may start one", next_step=start_command(has_systemd))
    with files.lock(daemon.log.parent / ".lock", on_wait=lambda: say("another run is starting the Docker engine")):
        if version := ask(url):
            return version
        if has_systemd:
            return start_by_systemd(url, say)
        return start_directly(daemon, url, say)


def start_command(has_systemd: bool) -> str:
    """What a user who is not root types to start the machine's own engine."""
    return "sudo systemctl start docker" if has_systemd else "sudo sh -c 'setsid dockerd >/dev/null 2>&1 &'"


def start_by_systemd(url: str, say: Say) -> str:
    say("starting the Docker engine: systemctl start docker")
    done = subprocess.run(["systemctl", "start", "docker"], capture_output=True, text=True, check=False)
    if done.returncode == 0 and (version := wait_for(url, lambda: None, say)):
        return version
    raise HostError(
        f"`systemctl start docker` did not bring up an engine at {url}: {done.stderr.strip()}",
        next_step="journalctl -u docker -n 50 tells why",
    )


def start_directly(daemon: Daemon, url: str, say: Say) -> str:
    """Run dockerd in a session of its own, so that it outlives this process."""
    command = shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")
    if command is None:
        raise HostError("no Docker engine answers and there is no dockerd to start", next_step="invoke doctor")
    if running := owner_of(daemon.pidfile, "dockerd"):
        say(f"dockerd runs (process {running}) and does not answer yet: waiting")
        if version := wait_for(url, lambda: None if owner_of(daemon.pidfile, "dockerd") else "it ended", say):
            return version
        raise HostError(
            f"dockerd (process {running}) runs and does not answer at {url}",
            next_step=f"stop it (`kill {running}`), then the same command again",
        )
    clear_left_over(daemon, say)
    argv = [*daemon.wrapper, command, *daemon.options]
    for option in daemon.options:
        if option.startswith("--config-file="):  # else it reads /etc/docker/daemon.json, and refuses options set there
            Path(option.partition("=")[2]).write_text(f"{daemon.settings}\n")
    if daemon.log.exists() and daemon.log.stat().st_size > LOG_LIMIT:
        daemon.log.replace(daemon.log.with_suffix(".log.1"))
    say(f"starting the Docker engine (log: {daemon.log})")
    with daemon.log.open("ab") as log:
        start = log.tell()
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"},
            start_new_session=True,
        )

    def ended() -> str | None:
        code = process.poll()
        return None if code is None else f"it ended with exit code {code}"

    if version := wait_for(url, ended, say):
        return version
    why = ended() or f"no answer within {START_TIMEOUT:.0f} s"
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT)
    raise HostError(
        f"the Docker engine did not start: {why}. Last lines of {daemon.log}:\n{last_lines(daemon.log, start)}",
        next_step="mend what these lines say, then the same command again",
    )


def wait_for(url: str, ended: Callable[[], str | None], say: Say) -> str | None:
    """The engine's version once it answers; None when it ended or did not answer in time."""
    started = told = time.monotonic()
    while time.monotonic() - started < START_TIMEOUT:
        if version := ask(url):
            return version
        if ended():
            return None
        if time.monotonic() - told > 5:
            told = time.monotonic()
            say(f"waiting for the Docker engine ({told - started:.0f} s)")
        time.sleep(0.1)
    return None


def clear_left_over(daemon: Daemon, say: Say) -> None:
    """Remove pid files that name no engine of ours; everything else dockerd clears by itself."""
    for pidfile, name in daemon.pidfiles:
        if pidfile.exists() and owner_of(pidfile, name) is None:
            say(f"removing {pidfile}: the engine that wrote it is gone")
            pidfile.unlink(missing_ok=True)


def owner_of(pidfile: Path, name: str, proc: Path = Path("/proc")) -> int | None:
    """The process that a pid file names, if it lives and is the named program; None if its number is another's now."""
    try:
        pid = int(pidfile.read_text().strip())
        # "<pid> (<name>) <state> ...": the name may hold blanks and brackets
        head, _, rest = (proc / str(pid) / "stat").read_text().rpartition(")")
    except (OSError, ValueError):
        return None
    comm, state = head.partition("(")[2], rest.split()[0]
    return pid if comm == name and state not in "ZX" else None


def last_lines(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-LOG_LINES:])


def stop_engine(daemon: Daemon, say: Say) -> None:
    """Stop a private engine and unmount what it left mounted. Works on one that was killed as well."""
    if daemon.is_system:
        raise ValueError("the machine's own engine is not ours to stop")
    for pidfile, name in daemon.pidfiles:
        pid = owner_of(pidfile, name)
        if pid is not None:
            say(f"stopping {name} (process {pid})")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
            wait_for_end(pidfile, name, pid)
        pidfile.unlink(missing_ok=True)
    for mount in mounts_below(daemon.exec_root, daemon.data_root):
        unmount(mount)


def unmount(mount: Path) -> None:
    """Tried for a while: a process that was killed is gone from /proc before its last thread lets go of its files."""
    started = time.monotonic()
    while (done := subprocess.run(["umount", str(mount)], capture_output=True, text=True, check=False)).returncode:
        if time.monotonic() - started > UNMOUNT_TIMEOUT:
            raise HostError(f"cannot unmount {mount}: {done.stderr.strip()}", next_step=f"sudo umount -l {mount}")
        time.sleep(0.1)


def wait_for_end(pidfile: Path, name: str, pid: int) -> None:
    started = time.monotonic()
    while owner_of(pidfile, name) == pid:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        if time.monotonic() - started > STOP_TIMEOUT:
            raise HostError(f"{name} (process {pid}) did not stop in {STOP_TIMEOUT:.0f} s", next_step=f"kill -9 {pid}")
        time.sleep(0.05)


def mounts_below(*roots: Path) -> list[Path]:
    """Mount points at or below the roots, the last mounted first."""
    texts = [line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    points = [Path(text.encode().decode("unicode_escape")) for text in texts]  # blanks stand as \040
    return [point for point in reversed(points) if any(point.is_relative_to(root) for root in roots)]
