"""The API key of a server that other machines can reach: a file of the home that only its owner may read.

It is not in a command line, a label or a container's settings, where `ps` and `docker inspect` would show it, nor in
any file of a container: the proxy gets its SHA-256.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import stat
from pathlib import Path

from sparkpin.core.errors import InputError
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths

BYTES = 32


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    return ipaddress.ip_address(host).is_loopback


def path_of(paths: Paths, recipe: str) -> Path:
    return paths.home / "keys" / recipe


def key_for(paths: Paths, recipe: str, host: str) -> str | None:
    """The recipe's key, made where there is none yet; None for a server that only this machine reaches."""
    if is_local(host):
        return None
    path = path_of(paths, recipe)
    if not path.exists():
        write(path, secrets.token_urlsafe(BYTES))
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise InputError(
            f"{path}: mode {mode:o} lets others read the API key, expected 600", next_step=f"chmod 600 {path}"
        )
    key = path.read_text(encoding="utf-8").strip()
    if len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"{path}: expected a key of at least 16 letters and digits", next_step=f"rm {path}; `serve` makes one"
        )
    return key


def write(path: Path, key: str) -> None:
    """A file, and its folder, for its owner alone."""
    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    with atomic_file(path, mode=0o600) as file:
        file.write(f"{key}\n".encode())


def mark(key: str) -> str:
    """Tells whether a server runs with this key."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
