"""Engines of other machines: unix://, tcp:// (as DOCKER_HOST) and ssh://.

`ssh -L` brings the engine's socket there to a socket here: keys, agents, jump hosts and known hosts stay ssh's
business. The SDK's own way needs paramiko and hides why ssh failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import select
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sparkpin.core.errors import DiskError, EngineError, InputError, NetworkError
from sparkpin.core.terminal import printable
from sparkpin.host.daemon import SOCKET, environment
from sparkpin.host.engine import Engine
from sparkpin.host.machine import require_program, text

SHAPES = "ssh://user@host[:port][/path/of/docker.sock], unix:///path/of/docker.sock or tcp://host:port"
LOGIN = r"(?P<login>(?!-)([^@/?#:]+@(?!-))?(\[[0-9a-f:]+\]|[^@/?#:]+))"
SSH = re.compile(rf"(?P<host>ssh://{LOGIN}(:(?P<port>\d+))?)(?P<socket>/[^?#:]*)?")
LOCAL = re.compile(r"unix:///.+|tcp://[^@/?#:]+:\d+/?")
OPTIONS = ("-T", "-oControlPath=none", "-oBatchMode=yes", "-oServerAliveInterval=15", "-oExitOnForwardFailure=yes")
SECONDS = 30  # that a host may take to answer
WITHOUT_PASSWORD = "has to work without a password (ssh-keygen, ssh-copy-id, ~/.ssh/config)"
MACHINE_ID = Path("/etc/machine-id")


@contextlib.contextmanager
def engine_at(url: str, seconds: int = SECONDS) -> Iterator[Engine]:
    """The engine at a url, for as long as the block runs. seconds: that an ssh host may take to answer.

    Raises InputError for no such url, NetworkError when ssh does not get there, EngineError when no engine answers.
    """
    parts = SSH.fullmatch(url)
    if not parts and not LOCAL.fullmatch(url):
        raise InputError(
            f"got {url.rpartition('@')[2]!r}, expected {SHAPES}",
            next_step="the same command with such a URL (keys, passwords and jump hosts belong in ~/.ssh/config)",
        )
    with forwarded(parts, seconds) if parts else contextlib.nullcontext(url) as local:
        with errors_of(url):
            engine = Engine.connect(environment() | {"DOCKER_HOST": local})
        with contextlib.closing(engine.client):
            yield engine


@contextlib.contextmanager
def errors_of(url: str) -> Iterator[None]:
    """Errors of the engine at a url say so: two engines take part in a copy."""
    try:
        yield
    except EngineError as error:
        step = "" if "invoke doctor" in error.next_step else error.next_step  # that looks at this machine
        raise EngineError(f"{url}: {error.message}", next_step=step or f"docker -H {url} info") from None
    except DiskError as error:
        raise DiskError(f"{url}: {error.message}", next_step=f"free space there; docker -H {url} system df") from None


def owner(home: str) -> str:
    """Whose containers those on another machine are: two machines may have homes of one name, and clones a host's."""
    machine = hashlib.sha256(f"sparkpin {text(MACHINE_ID)}".encode()).hexdigest()[:12]  # machine-id(5): not as it is
    return f"{socket.gethostname()}:{machine}:{home}"


def ssh_command(host: str, script: str, *options: str, seconds: int = SECONDS) -> list[str]:
    """The words that run a script on a host, which stays a URL: ssh itself reads user and port from it, and takes no
    host for an option. seconds: that it may take to answer."""
    program = require_program("ssh", package="openssh-client")
    return [program, *OPTIONS, f"-oConnectTimeout={seconds}", *options, "--", host, script]


def unexpected(host: str, got: str, expected: str) -> NetworkError:
    """For another answer of a script than it can have."""
    step = f"its login scripts must print nothing: ssh {host} true"
    return NetworkError(f"{host}: got {printable(got[-200:])}, expected {expected}", next_step=step)


@contextlib.contextmanager
def forwarded(parts: re.Match[str], seconds: int) -> Iterator[str]:
    """A local socket (its url) behind which the engine of an ssh host answers. One login, so that a key that asks to be
    touched is touched once."""
    with tempfile.TemporaryDirectory(prefix="sparkpin-ssh-") as folder, tempfile.TemporaryFile() as errors:
        local, host = f"{folder}/docker.sock", parts["host"]
        forward = ("-L", f"{local}:{parts['socket'] or SOCKET}")
        process = subprocess.Popen(
            ssh_command(host, "echo connected; exec cat", *forward, seconds=seconds),  # which ends when this end does
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            process_group=0,  # Ctrl-C is for us: what is removed then still goes this way
        )
        try:
            assert process.stdout
            answers, _, _ = select.select([process.stdout], [], [], 4 * seconds)
            if not answers or not process.stdout.readline():
                errors.seek(0)
                cause = " ".join(errors.read().decode(errors="replace").split()) or f"no answer within {4 * seconds} s"
                raise NetworkError(f"ssh does not get to {host}: {cause}", next_step=f"`ssh {host}` {WITHOUT_PASSWORD}")
            yield f"unix://{local}"
        finally:
            process.terminate()
            process.communicate()
