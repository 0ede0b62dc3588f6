"""A release's evidence (SBOM, statement, signature), and signatures by ssh keys: `ssh-keygen -Y`, so that keys, agents
and expiry stay ssh's business.

~/.config/sparkpin/signing_key       or SPARKPIN_SIGNING_KEY: a private key, or a public one whose private part an
                                     agent holds
~/.config/sparkpin/allowed_signers   or SPARKPIN_ALLOWED_SIGNERS: whom to trust, see ssh-keygen(1)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import HostError, InputError, IntegrityError, SparkpinError
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT, Release, Releases

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
    name = os.environ.get(variable)
    path = Path(name).expanduser().absolute() if name else config_folder() / DEFAULTS[variable]
    if name and not path.is_file():
        raise InputError(f"{variable}={name}: there is no such file", next_step=f"correct or unset {variable}")
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
    if done.returncode:
        step = f"ssh-add {key.with_suffix('')}, name its public part in {SIGNING_KEY}, then the same command again"
        raise HostError(f"cannot sign with {key}: {reason(done)}", next_step=step)
    return done.stdout


def verify(data: bytes, signature: bytes, allowed: Path | None) -> Signer:
    """Who signed exactly these bytes.

    IntegrityError for a signature over other bytes or for another purpose, UntrustedError for a signer who is not in
    `allowed` (or is there no longer, or not yet). Of several lines with one key ssh-keygen looks at the first.
    """
    with tempfile.NamedTemporaryFile(prefix="sparkpin-signature-") as file:
        file.write(signature)
        file.flush()
        check = ("-n", NAMESPACE, "-s", file.name)
        done = ssh_keygen("-Y", "check-novalidate", *check, data=data)
        found = re.search(r"signature with (.*)", done.stdout.decode(errors="replace"))
        if done.returncode or not found:
            cause = f"the signature is not over this statement, or damaged: {reason(done)}"
            raise IntegrityError(cause, next_step="get statement and signature again from where they came")
        if allowed is None:
            return Signer(found[1].strip(), None)
        done = ssh_keygen("-Y", "find-principals", "-f", str(allowed), "-s", file.name)
        principal = done.stdout.decode(errors="replace").partition("\n")[0]
        if principal:
            done = ssh_keygen("-Y", "verify", "-f", str(allowed), "-I", principal, *check, data=data)
        if principal and not done.returncode:
            return Signer(found[1].strip(), principal)
    cause = f"signed with {found[1].strip()}, which {allowed} does not allow: {reason(done)}"
    raise UntrustedError(cause, next_step=how_to_trust(allowed))


def ssh_keygen(*arguments: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    # Without a terminal and without askpass nothing can ask for a passphrase and wait for ever.
    environment = {**os.environ, "SSH_ASKPASS_REQUIRE": "never", "LC_ALL": "C"}
    argv = ["ssh-keygen", *arguments]
    try:
        return subprocess.run(
            argv, input=data, capture_output=True, timeout=PATIENCE, env=environment, start_new_session=True
        )
    except FileNotFoundError:
        cause, step = "signatures need ssh-keygen, which is not there", "apt-get install openssh-client (as root)"
    except subprocess.TimeoutExpired:
        cause, step = f"ssh-keygen did not answer within {PATIENCE} s", "look whether ssh-agent waits for you"
    raise HostError(cause, next_step=step)


def reason(done: subprocess.CompletedProcess[bytes]) -> str:
    """What ssh-keygen gave as its reason, without the question that nobody answered."""
    lines = (done.stderr + b"\n" + done.stdout).decode(errors="replace").strip().splitlines()
    return lines[0].rpartition("passphrase: ")[2].strip() if lines else f"ssh-keygen ended with {done.returncode}"


def ensure_attested(paths: Paths, release: Release) -> None:
    """For builds: make what is missing, cheaply when nothing is. A key that cannot be used is told, and no failure."""
    try:
        keys = Keys.from_env()
        signed = (Releases(paths).evidence(release) / SIGNATURE).is_file()
        if not is_attested(paths, release) or (keys.signing and not signed):
            attest(paths, release, keys)
    except SparkpinError as error:
        say(f"warning: the evidence of {release.tag} is incomplete: {error}")


def is_attested(paths: Paths, release: Release) -> bool:
    """Whether statement and SBOM are there and are of this very release: a quick look, which `invoke build` takes each
    time; `verify` is thorough."""
    folder = Releases(paths).evidence(release)
    try:
        statement, sbom = ((folder / name).read_bytes() for name in (STATEMENT, SBOM))
    except OSError:
        return False
    wanted = {release.image.removeprefix("sha256:"), hashlib.sha256(sbom).hexdigest(), *release.inputs.values()}
    return all(sha256.encode() in statement for sha256 in {release.key, *wanted})


def attest(paths: Paths, release: Release, keys: Keys) -> Signer | None:
    """Write all of it again: whose signature is there now. One from before stays only if it is over the very statement,
    so that none is ever wrong."""
    # These are slow to import, and most runs find all of it there.
    from sparkpin.build.record import records_of
    from sparkpin.distribute.materials import model_inputs
    from sparkpin.distribute.statement import Attested

    with project_of(paths, release) as project:
        attested = Attested.of(release, records_of(paths, release), model_inputs(project, release))
    folder = Releases(paths).evidence(release)
    with Releases(paths).locked(release.recipe):
        path = folder / SIGNATURE
        old = path.read_bytes() if path.is_file() else b""
        signature = sign(attested.statement, keys.signing) if keys.signing else old
        signer = None
        if signature:  # else ssh-keygen need not be there
            with contextlib.suppress(IntegrityError):  # it is not over this statement
                signer = verify(attested.statement, signature, None)
        if old and (signer is None or signature != old):
            path.unlink()  # first: a run that is killed leaves none beside a statement that it is not over
            if signer is None:
                say(f"{release.tag}: the signature from before is removed: it is not over this statement")
        signed = {SIGNATURE: signature} if signer else {}
        for name, data in ({SBOM: attested.sbom, STATEMENT: attested.statement} | signed).items():
            with atomic_file(folder / name) as file:
                file.write(data)
    return signer
