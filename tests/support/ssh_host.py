"""A real ssh server on 127.0.0.1, whose far side reaches an engine of the tests' own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin:/bin")
SERVER = """\
Port {port}
ListenAddress 127.0.0.1
LogLevel VERBOSE
HostKey {folder}/host
AuthorizedKeysFile {folder}/allowed
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
SetEnv SPARKPIN_HOME={folder}/home
"""
CLIENT = """\
IdentityFile {folder}/key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known
StrictHostKeyChecking yes
"""


@dataclass(frozen=True)
class SshHost:
    """folder: keys and configuration; path: a PATH on which `ssh` knows them. Its user's data directory is home."""

    folder: Path
    port: int
    socket: str

    @property
    def url(self) -> str:
        """With the path of the engine's socket there."""
        return f"ssh://root@127.0.0.1:{self.port}{self.socket}"

    @property
    def path(self) -> str:
        return f"{self.folder / 'bin'}:{os.environ['PATH']}"

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def refuse(self) -> None:
        (self.folder / "allowed").write_text("")


@contextlib.contextmanager
def ssh_host(folder: Path, engine: str) -> Iterator[SshHost]:
    """engine: the url (unix://) of the one on the far side."""
    if os.geteuid() != 0 or SSHD is None:
        pytest.skip("needs root and sshd (apt-get install openssh-server) for an ssh server of its own")
    folder.mkdir()
    for name in ("host", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "allowed").write_text((folder / "key.pub").read_text())
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "sshd_config").write_text(SERVER.format(port=port, folder=folder))
    (folder / "ssh_config").write_text(CLIENT.format(folder=folder))
    wrapper = folder / "bin/ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
        try:
            wait_for(port, server)
            yield SshHost(folder, port, engine.removeprefix("unix://"))
        finally:
            server.terminate()
            server.wait()


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.05)
    raise AssertionError(f"sshd ended with {server.returncode}")
