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
from sparkpin.pins.vllm_flags import flag_value
from sparkpin.releases.record import Release

BYTES = 32


def path_of(paths: Paths, recipe: str) -> Path:
    return paths.home / "keys" / recipe


def key_for(paths: Paths, recipe: str, host: str) -> str | None:
    """The recipe's key, made where there is none yet; None for a server that only this machine reaches."""
    if ipaddress.ip_address(host).is_loopback:
        return None
    path = path_of(paths, recipe)
    if not path.exists():
        path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        with atomic_file(path, mode=0o600) as file:
            file.write(f"{secrets.token_urlsafe(BYTES)}\n".encode())
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


def key_of(paths: Paths, release: Release, host: str) -> str | None:
    """The recipe's own key, if it brings one, else the home's for a server that others can reach."""
    given = flag_value(release.argv, "--api-key") or release.env.get("VLLM_API_KEY")
    return given or key_for(paths, release.recipe, host)


def mark(key: str) -> str:
    """Tells whether a server runs with this key."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]
