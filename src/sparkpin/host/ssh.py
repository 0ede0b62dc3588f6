"""Engines of other machines: unix://, tcp:// (as DOCKER_HOST) and ssh://.

Over ssh each connection to the engine is an `ssh HOST docker system dial-stdio`, as the Docker CLI makes it, behind a
local socket: keys, agents, jump hosts and known hosts stay ssh's business. The SDK's own way needs paramiko and keeps
to itself why ssh failed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socketserver
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import docker

from sparkpin.core.errors import DiskError, EngineError, HostError, InputError, NetworkError
from sparkpin.host.engine import TIMEOUT, Engine, engine_errors

OPTIONS = ("-T", "-o", "BatchMode=yes")
SECONDS = 30  # that a host may take to answer
# All connections go through the first, so that a key that wants to be touched is touched once. What a killed run leaves
# ends by itself.
SHARED = ("-o", "ControlMaster=auto", "-o", "ControlPersist=60", "-o")
DIAL = ("docker", "system", "dial-stdio")
SHAPES = "ssh://user@host[:port], unix:///path/of/docker.sock or tcp://host:port"
AGAIN = "the same command with --to"


@contextlib.contextmanager
def engine_at(url: str, seconds: int = SECONDS) -> Iterator[Engine]:
    """The engine at a url, for as long as the block runs. seconds: that an ssh host may take to answer.

    Raises InputError for no such url, NetworkError when ssh does not get there, EngineError when no engine answers.
    """
    scheme, host, port = place_of(url)
    if scheme not in ("ssh", "unix", "tcp"):
        raise InputError(f"saw {url!r}, wanted {SHAPES}", next_step=f"{AGAIN} ssh://user@host")
    if scheme == "tcp" and not (host and port):
        step = f"{AGAIN} tcp://{host or 'host'}:2375, or whatever port that engine listens on"
        raise InputError(f"saw {url!r}, wanted tcp://host:port", next_step=step)
    with bridge(url, seconds) if scheme == "ssh" else contextlib.nullcontext(url) as local:
        with errors_of(url):
            engine = connect(local)
        with contextlib.closing(engine.client):
            yield engine


@contextlib.contextmanager
def errors_of(url: str) -> Iterator[None]:
    """Errors of the engine at a url say so: two engines take part in a copy."""
    try:
        yield
    except EngineError as error:
        said = error.message.replace("at the default socket", "there")
        raise EngineError(f"{url}: {said}", next_step=f"docker -H {url} info") from None
    except DiskError as error:
        raise DiskError(f"{url}: {error.message}", next_step="free space there (invoke prune --keep 2)") from None


def connect(url: str) -> Engine:
    environment = {**os.environ, "DOCKER_HOST": url}
    with engine_errors():
        client = docker.DockerClient.from_env(timeout=TIMEOUT, environment=environment)
        client.ping()
    return Engine(client)


def place_of(url: str) -> tuple[str, str, int | None]:
    """(scheme, host, port). InputError for a port that is none."""
    try:
        parts = urlsplit(url)
        return parts.scheme, host_of(parts.netloc), parts.port
    except ValueError as error:
        raise InputError(f"{url}: {error}", next_step=f"{AGAIN} {SHAPES}") from None


def ssh_command(url: str, *options: str) -> list[str]:
    _, host, port = place_of(url)
    parts = urlsplit(url)
    if not host or parts.path not in ("", "/") or parts.password or parts.query or parts.fragment:
        login = f"{parts.username}@" if parts.username else ""
        number = f":{port}" if port else ""
        step = f"{AGAIN} ssh://{login}{host or 'HOST'}{number} (keys and jump hosts belong into ~/.ssh/config)"
        raise InputError(f"saw {url!r}, wanted ssh://user@host[:port]", next_step=step)
    program = shutil.which("ssh")
    if program is None:
        raise HostError("there is no ssh on this machine", next_step="apt-get install openssh-client (as root)")
    user = ["-l", parts.username] if parts.username else []
    return [program, *OPTIONS, *options, *user, *(["-p", str(port)] if port else []), "--", host]


def host_of(netloc: str) -> str:
    """As it is written: names in ~/.ssh/config have upper case, too, which `hostname` of urllib takes from them."""
    place = netloc.rpartition("@")[2]
    return place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]


@contextlib.contextmanager
def bridge(url: str, seconds: int) -> Iterator[str]:
    """A local socket (its url) behind which the engine of an ssh host answers."""
    with tempfile.TemporaryDirectory(prefix="sparkpin-ssh-") as folder, contextlib.ExitStack() as stack:
        shared = (*SHARED, f"ControlPath={folder}/ssh", "-o", f"ConnectTimeout={seconds}")
        command = ssh_command(url, *shared)
        require_docker(url, command, seconds)
        stack.callback(subprocess.run, ssh_command(url, *shared, "-O", "exit"), stderr=subprocess.DEVNULL)
        socket = Path(folder) / "docker.sock"
        running: list[subprocess.Popen[bytes]] = []

        class SocketHandler(socketserver.BaseRequestHandler):
            """ssh gets the connection itself as its input and output."""

            def handle(self) -> None:
                process = subprocess.Popen(
                    [*command, *DIAL], stdin=self.request, stdout=self.request, stderr=subprocess.DEVNULL
                )
                running.append(process)
                process.wait()

        class SocketServer(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True
            block_on_close = False

        with SocketServer(str(socket), SocketHandler) as server:
            threading.Thread(target=server.serve_forever, args=(0.05,), name="ssh", daemon=True).start()
            try:
                yield f"unix://{socket}"
            finally:
                server.shutdown()
                for process in running:
                    process.terminate()


def require_docker(url: str, command: list[str], seconds: int) -> None:
    """One try whose failure can be read: whether ssh gets there, and whether docker there reaches an engine."""
    argv = [*command, "docker", "version", "--format", "{{.Server.Version}}"]
    with tempfile.TemporaryFile() as errors:  # no pipe: the shared connection holds on to it
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, timeout=4 * seconds
            )
        except subprocess.TimeoutExpired:
            raise NetworkError(
                f"{url}: no answer within {4 * seconds} s", next_step=f"ssh {url} docker info: does it answer?"
            ) from None
        errors.seek(0)
        words = errors.read().decode(errors="replace").split()
    if not done.returncode:
        return
    said = " ".join(words) or f"it ended with exit code {done.returncode}"
    if done.returncode == 255:
        target = url.removeprefix("ssh://").rstrip("/")
        raise NetworkError(f"ssh does not get to {target}: {said}", next_step=way_in(url, said))
    if done.returncode == 127:
        raise EngineError(f"{url}: there is no docker: {said}", next_step="install Docker there (./install.sh)")
    raise EngineError(
        f"{url}: its Docker engine does not answer: {said}",
        next_step=f"ssh {url} docker info; the user there may have to be in the group docker",
    )


def way_in(url: str, said: str) -> str:
    """What to do about ssh's reason not to get there."""
    _, host, port = place_of(url)
    if "resolve hostname" in said:
        return f"correct the name {host}, or give it an address (DNS, /etc/hosts, HostName in ~/.ssh/config)"
    if "Host key verification failed" in said:
        return f"`ssh {url}` once by hand, to look at its key and take it"
    if "Permission denied" in said:
        return f"`ssh {url}` has to work without a password (ssh-keygen, ssh-copy-id)"
    return f"look whether {host} is on and ssh listens there at port {port or 22}; `ssh {url}` has to work"
