"""Signatures by real ssh keys: who signed what, and what does not count."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from evidence_samples import Sample

from sparkpin.core.errors import HostError, InputError, IntegrityError
from sparkpin.core.files import atomic_file
from sparkpin.distribute import signing
from sparkpin.distribute.signing import Keys, UntrustedError, attest, sign, verify
from sparkpin.releases.record import SBOM, SIGNATURE, STATEMENT

DATA = b"what is said\n"
pytestmark = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="apt-get install openssh-client")


def keygen(path: Path, passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", path, "-C", ""], check=True)
    return path


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return keygen(tmp_path / "key")


def allow(folder: Path, key: Path, options: str = "") -> Path:
    path = folder / "allowed_signers"
    path.write_text(f"lead@example {options} {key.with_suffix('.pub').read_text()}")
    return path


def test_signer_is_named(tmp_path: Path, key: Path) -> None:
    made = sign(DATA, key)
    signer = verify(DATA, made, allow(tmp_path, key))
    assert signer.principal == "lead@example" and re.match(r"ED25519 key SHA256:\S{43}$", signer.key)
    assert sign(DATA, key) == made
    assert verify(DATA, made, None).principal is None, "nobody is trusted unless configured"


def test_no_signature_over_these_bytes(tmp_path: Path, key: Path) -> None:
    """Of others, damaged, or made for another purpose."""
    other = subprocess.run(["ssh-keygen", "-Y", "sign", "-f", key, "-n", "git"], input=DATA, capture_output=True)
    armour = b"-----BEGIN SSH SIGNATURE-----\nAAAA\n"
    for signature in (sign(DATA + b" ", key), other.stdout, b"", b"garbage", armour):
        with pytest.raises(IntegrityError, match="not over this statement"):
            verify(DATA, signature, allow(tmp_path, key))


@pytest.mark.parametrize("options", ['valid-before="20200101"', 'namespaces="git"', "garbage", None])
def test_allowed_no_longer_for_other_things_or_not_at_all(tmp_path: Path, key: Path, options: str | None) -> None:
    allowed = allow(tmp_path, key, options=options or "")
    made = sign(DATA, key if options else keygen(tmp_path / "other"))
    with pytest.raises(UntrustedError, match="does not allow") as failed:
        verify(DATA, made, allowed)
    assert str(allowed) in failed.value.next_step


def test_passphrase_is_not_asked_for(tmp_path: Path) -> None:
    locked = keygen(tmp_path / "locked", "secret")
    with pytest.raises(HostError) as failed:
        sign(DATA, locked)
    assert f"ssh-add {locked}" in failed.value.next_step


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    socket = tmp_path / "agent"
    running = subprocess.Popen(["ssh-agent", "-D", "-a", str(socket)], stdout=subprocess.PIPE)
    assert running.stdout and running.stdout.readline()  # it says where it listens once it does
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket))
    yield
    running.terminate()
    running.wait()


@pytest.mark.usefixtures("agent")
def test_agent_signs_for_a_public_key(tmp_path: Path, key: Path) -> None:
    public = shutil.copy(key.with_suffix(".pub"), tmp_path / "elsewhere.pub")
    allowed = allow(tmp_path, key)
    with pytest.raises(HostError):
        sign(DATA, Path(public))
    subprocess.run(["ssh-add", "-q", key], check=True)
    key.unlink()
    assert verify(DATA, sign(DATA, Path(public)), allowed).principal == "lead@example"


def test_without_ssh_keygen(key: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError) as failed:
        sign(DATA, key)
    assert "openssh-client" in failed.value.next_step


def test_without_ssh_keygen_the_rest_is_written(own: Sample, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    shutil.rmtree(own.folder)
    assert attest(own.paths, own.release, Keys()) is None
    assert {path.name for path in own.folder.iterdir()} == {SBOM, STATEMENT}


def test_no_run_leaves_a_signature_over_another_statement(
    own: Sample, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is killed."""
    path, written = own.folder / SIGNATURE, list[str]()
    path.write_bytes(sign(DATA, key))

    def watched(target: Path) -> contextlib.AbstractContextManager[IO[bytes]]:
        assert not path.exists()
        written.append(target.name)
        return atomic_file(target)

    monkeypatch.setattr(signing, "atomic_file", watched)
    attest(own.paths, own.release, Keys(key))
    assert written == [SBOM, STATEMENT, SIGNATURE] and path.is_file()


def test_where_keys_are_looked_for(tmp_path: Path, key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for variable in (signing.SIGNING_KEY, signing.ALLOWED_SIGNERS):
        monkeypatch.delenv(variable, raising=False)
    assert Keys.from_env() == Keys()
    folder = tmp_path / "config/sparkpin"
    folder.mkdir(parents=True)
    (folder / "signing_key").touch()
    (folder / "allowed_signers").touch()
    assert Keys.from_env() == Keys(folder / "signing_key", folder / "allowed_signers")
    monkeypatch.setenv(signing.SIGNING_KEY, str(key))
    assert Keys.from_env().signing == key
    monkeypatch.setenv(signing.SIGNING_KEY, str(tmp_path / "none"))
    with pytest.raises(InputError, match="there is no such file"):
        Keys.from_env()
