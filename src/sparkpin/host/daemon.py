"""Which Docker engine is meant, whether it answers, and how to start this machine's own where it does not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import docker
import requests
from docker.context import ContextAPI

from sparkpin.core import files
from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say
from sparkpin.host.machine import require_program, search_path

START_TIMEOUT = 120.0  # seconds
LOG_LINES = 15
SOCKET = Path("/var/run/docker.sock")
OWN = f"unix://{SOCKET}"
DEFAULT_HOSTS = (None, "", OWN, "unix:///run/docker.sock")
USE_OWN = "`unset DOCKER_HOST` (`docker context use default`) to use this machine's own"


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


def ask(url: str) -> str | None:
    """The version of the engine at a url, None when none answers."""
    try:
        client = docker.DockerClient.from_env(timeout=10, environment={**environment(), "DOCKER_HOST": url})
        with contextlib.closing(client):
            return str(client.version()["Version"])
    except (docker.errors.DockerException, requests.exceptions.RequestException):
        return None


def start_engine(paths: Paths) -> str:
    """The version of this machine's own engine, started unless another run does it. HostError when none can be had."""
    if os.geteuid() != 0:
        raise HostError("no Docker engine answers, and only root may start one", next_step=start_command())
    log = paths.cache / "engine/dockerd.log"
    with files.lock(log.with_name(".lock"), on_wait="another run is starting the Docker engine"):
        if version := ask(OWN):
            return version
        argv = ["systemctl", "start", "docker"] if has_systemd() else [require_program("dockerd", package="docker.io")]
        return wait_for_engine(spawn(argv, log), OWN, log)


def has_systemd() -> bool:
    return Path("/run/systemd/system").is_dir()  # as sd_booted(3)


def start_command() -> str:
    """What a user who is not root types to start the machine's own engine."""
    return "sudo systemctl start docker" if has_systemd() else "sudo sh -c 'setsid dockerd >/dev/null 2>&1 &'"


def spawn(argv: Sequence[str], log: Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is for us, and the machine's engine outlives this process."""
    say(f"starting the Docker engine (log: {log})")
    env = {**os.environ, "PATH": search_path()}
    with log.open("wb") as out:
        return subprocess.Popen(argv, stdin=stdin, stdout=out, stderr=out, cwd="/", env=env, start_new_session=True)


def wait_for_engine(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    """The version of an engine that was just started. systemctl ends at once, with exit code 0 where all is well."""
    end = time.monotonic() + START_TIMEOUT
    with waiting("waiting for the Docker engine"):
        while not process.poll() and time.monotonic() < end:
            if version := ask(url):
                return version
            time.sleep(0.05)
    code = process.poll()
    why = f"it ended with exit code {code}" if code else f"no answer within {START_TIMEOUT:.0f} s"
    process.terminate()
    last = "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-LOG_LINES:])
    raise HostError(
        f"the Docker engine did not start: {why}. Last lines of {log}:\n{last}",
        next_step="fix what these lines name, then the same command again",
    )
