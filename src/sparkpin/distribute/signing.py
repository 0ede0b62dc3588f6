"""Signatures by ssh keys: `ssh-keygen -Y`, so that keys, agents and expiry stay ssh's business.

~/.config/sparkpin/signing_key       or SPARKPIN_SIGNING_KEY: a private key, or a public one whose private part an
                                     agent holds
~/.config/sparkpin/allowed_signers   or SPARKPIN_ALLOWED_SIGNERS: whom to trust, see ssh-keygen(1)
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import HostError, InputError, IntegrityError

NAMESPACE = "sparkpin"  # a signature that was made for something else does not count
SIGNING_KEY, ALLOWED_SIGNERS = "SPARKPIN_SIGNING_KEY", "SPARKPIN_ALLOWED_SIGNERS"
DEFAULTS = {SIGNING_KEY: "signing_key", ALLOWED_SIGNERS: "allowed_signers"}  # in the folder of configurations
LINE = 'NAME namespaces="sparkpin" ssh-ed25519 AAAA...'
PATIENCE = 60  # seconds; an agent may wait for somebody to touch a token


@dataclass(frozen=True)
class Keys:
    """signing: the key to sign with; allowed: whom to trust. None where nothing is configured."""

    signing: Path | None = None
    allowed: Path | None = None

    @classmethod
    def from_env(cls) -> Keys:
        """InputError for a variable that names no file."""
        return cls(configured(SIGNING_KEY), configured(ALLOWED_SIGNERS))


def config_folder() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "sparkpin"


def places(variable: str) -> str:
    """Where a key or a list of signers is looked for, in words."""
    return f"{config_folder() / DEFAULTS[variable]} or {variable}"


def configured(variable: str) -> Path | None:
    if name := os.environ.get(variable):
        path = Path(name).expanduser().absolute()
        if not path.is_file():
            raise InputError(f"{variable}={name}: there is no such file", next_step=f"correct or unset {variable}")
        return path
    path = config_folder() / DEFAULTS[variable]
    return path if path.is_file() else None


def how_to_trust(where: object) -> str:
    """The next step where nobody said to trust a key, whose fingerprint was told."""
    look = "find out whose key that is: their `ssh-keygen -lf KEY.pub` shows the same"
    return f"{look}; if you trust it, write into {where}: {LINE}"


class UntrustedError(IntegrityError):
    """What holds lacks a signature by a key that somebody said to trust."""


@dataclass(frozen=True)
class Signer:
    """Whose signature it is. principal: as in allowed_signers, None where nobody is configured to be trusted."""

    key: str
    principal: str | None

    def __str__(self) -> str:
        return f"{self.principal} ({self.key})" if self.principal else self.key


def sign(data: bytes, key: Path, namespace: str = NAMESPACE) -> bytes:
    """An armored SSH signature. HostError when ssh-keygen or the key cannot be used; never asks for a passphrase."""
    done = ssh_keygen("-Y", "sign", "-f", str(key), "-n", namespace, data=data)
    if done.returncode or not done.stdout.startswith(b"-----BEGIN SSH SIGNATURE-----"):
        why, step = reason(done), f"name a key in {SIGNING_KEY} that ssh-keygen can sign with"
        if "passphrase" in why:  # which ssh-keygen calls incorrect, though nobody was asked for it
            why = "it has a passphrase, and nothing asks for one here"
            step = f"ssh-add {key}, and name its public part in {SIGNING_KEY} ({key}.pub)"
        elif key.suffix == ".pub":
            step = f"ssh-add the private part of {key}: a public key signs through an agent"
        raise HostError(f"cannot sign with {key}: {why}", next_step=f"{step}; then the same command again")
    return done.stdout


def verify(data: bytes, signature: bytes, allowed: Path | None) -> Signer:
    """Who signed exactly these bytes.

    IntegrityError for a signature over other bytes or for another purpose, UntrustedError for a signer who is not in
    `allowed` (or is there no longer, or not yet). Of several lines with one key ssh-keygen looks at the first.
    """
    with tempfile.TemporaryDirectory(prefix="sparkpin-signature-") as folder:
        file = Path(folder) / "signature"
        file.write_bytes(signature)
        done = ssh_keygen("-Y", "check-novalidate", "-n", NAMESPACE, "-s", str(file), data=data)
        found = re.search(rb"signature with (.*)", done.stdout)
        if done.returncode or not found:
            raise IntegrityError(
                f"the signature is not over this statement, or damaged: {reason(done)}",
                next_step="get statement and signature again from where they came",
            )
        key = found[1].decode(errors="replace").strip()
        if allowed is None:
            return Signer(key, None)
        done = ssh_keygen("-Y", "find-principals", "-f", str(allowed), "-s", str(file))
        principal = next(iter(done.stdout.decode(errors="replace").splitlines()), "")
        if principal:
            whose = ("-f", str(allowed), "-I", principal)
            done = ssh_keygen("-Y", "verify", *whose, "-n", NAMESPACE, "-s", str(file), data=data)
            if not done.returncode:
                return Signer(key, principal)
        why = reason(done)
    step = how_to_trust(allowed)
    raise UntrustedError(f"signed with {key}, which {allowed} does not allow: {why}", next_step=step)


def ssh_keygen(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("ssh-keygen")
    if program is None:
        raise HostError(
            "signatures need ssh-keygen, which is not there", next_step="apt-get install openssh-client (as root)"
        )
    # Without a terminal and without askpass nothing can ask for a passphrase and wait for ever.
    environment = {**os.environ, "SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}
    try:
        return subprocess.run(
            [program, *arguments],
            input=data,
            capture_output=True,
            timeout=PATIENCE,
            env=environment,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise HostError(
            f"ssh-keygen did not answer within {PATIENCE} s", next_step="look whether ssh-agent waits for you"
        ) from None


def reason(done: subprocess.CompletedProcess[bytes]) -> str:
    """What ssh-keygen gave as its reason, first line, without the question that nobody answered."""
    lines = (done.stderr + b"\n" + done.stdout).decode(errors="replace").strip().splitlines()
    return lines[0].rpartition("passphrase: ")[2].strip() if lines else f"ssh-keygen ended with {done.returncode}"
