"""Registries of images, through skopeo: it knows their protocol, their certificates and where credentials lie.

Every command names a folder in OCI layout on this machine and a place in the registry. What it brings is checked by who
asked for it. Credentials are those of `docker login` or `skopeo login`; none is an argument.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sparkpin.core.errors import DiskError, HostError, InputError, IntegrityError, NetworkError, SparkpinError, clipped
from sparkpin.core.terminal import printable

SHAPE = "oci://HOST[:PORT]/NAME, with :TAG or @sha256:DIGEST behind it where one image is meant"
PLACE = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-f:]+\](?::[0-9]{1,5})?)"
    r"/(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))?"
)
LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:|$)")
ABSENT = re.compile(
    r"reading manifest \S+ in \S+: (manifest unknown|name unknown|StatusCode: 404|unknown: .*not found)", re.I
)
DENIED = ("unauthorized", "authentication required", "denied", "invalid username/password", "status 401", "status 403")
DAMAGED = ("did not match", "Digest mismatch", "digest mismatch", "invalid digest", "unexpected EOF")
SECONDS = 120  # that a registry may take for a manifest
Told = Callable[[Callable[[], int | None]], AbstractContextManager[object]]
"""Goes on while skopeo works; is given what tells the bytes that it has sent or stored."""


@dataclass(frozen=True)
class Registry:
    """host: with its port; name: of the repository; tag, digest: of an image, "" where none is named; ca: PEM file of
    the authority that the host's certificate is from, None for those of the system and of /etc/docker/certs.d."""

    host: str
    name: str
    tag: str = ""
    digest: str = ""
    ca: Path | None = None

    @classmethod
    def parse(cls, url: str, ca: str = "") -> Registry:
        """InputError for no such place, for credentials in it, and for an authority that is no file."""
        if ca and not Path(ca).is_file():
            raise InputError(f"--ca {ca}: there is no such file", next_step="name the PEM file of the authority")
        if found := PLACE.fullmatch(url):
            parts = {key: value or "" for key, value in found.groupdict().items()}
            return cls(**parts, ca=Path(ca).absolute() if ca else None)
        place = url.partition("://")[2].partition("/")[0]
        if "@" in place:  # and not shown again
            raise InputError("credentials in a place: every user of this machine sees them", next_step=login(place))
        raise InputError(f"got {url!r}, expected {SHAPE}", next_step="the same command with such a place")

    def __str__(self) -> str:
        return f"oci://{self.host}/{self.name}{self.reference}"

    @property
    def reference(self) -> str:
        return f"@{self.digest}" if self.digest else f":{self.tag}" if self.tag else ""

    def manifest(self, reference: str) -> bytes | None:
        """The bytes under ":TAG" or "@sha256:...", None where the registry has none."""
        try:
            return self.run(["inspect", "--raw"], ["--tls-verify", "--cert-dir"], self.at(reference), seconds=SECONDS)
        except AbsentError:
            return None

    def push(self, layout: Path, image: str, reference: str, told: Told = nullcontext) -> None:
        """An image of the layout, as it is: blobs that the registry has are not sent."""
        self.copy([f"oci:{layout}:{image}", self.at(reference)], "dest", "--preserve-digests", told=told)

    def push_index(self, layout: Path, index: str, reference: str) -> None:
        """An index alone: what it names is there. skopeo writes it anew, and 1.9 without the types of artifacts."""
        self.copy([f"oci:{layout}:{index}", self.at(reference)], "dest", "--multi-arch", "index-only")

    def fetch(self, layout: Path, reference: str, image: str, told: Told = nullcontext) -> None:
        """An image into the layout. A blob that lies there under its digest is not asked for, and not read."""
        self.copy([self.at(reference), f"oci:{layout}:{image}"], "src", "--preserve-digests", told=told)

    def at(self, reference: str) -> str:
        return f"docker://{self.host}/{self.name}{reference}"

    def copy(self, places: list[str], side: str, *options: str, told: Told = nullcontext) -> None:
        self.run(["copy", "-q", *options], [f"--{side}-tls-verify", f"--{side}-cert-dir"], *places, told=told)

    def run(
        self, command: list[str], trust: list[str], *places: str, seconds: int | None = None, told: Told = nullcontext
    ) -> bytes:
        program = shutil.which("skopeo")
        if program is None:
            raise HostError("registries need skopeo, which is not there", next_step="apt-get install skopeo (as root)")
        # sparkpin decides what is trusted, so skopeo needs no policy of its own. Plain HTTP goes to this machine alone.
        with self.certificates() as folder:
            own = [trust[1], folder] if folder else [f"{trust[0]}=false"] if LOOPBACK.match(self.host) else []
            argv = [program, "--insecure-policy", *command, *own, *places]
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            with (
                subprocess.Popen(argv, stdin=nothing, stdout=pipe, stderr=pipe, env=environment()) as process,
                told(partial(written, process.pid)),
            ):
                try:
                    out, err = process.communicate(timeout=seconds)
                except subprocess.TimeoutExpired:
                    raise NetworkError(f"{self} did not answer within {seconds} s", next_step="try again") from None
                finally:
                    process.kill()
        if process.returncode:
            raise self.failed(err.decode(errors="replace"))
        return out

    @contextmanager
    def certificates(self) -> Iterator[str]:
        """A folder with the authority as skopeo wants it, "" for none."""
        if self.ca is None:
            yield ""
            return
        with tempfile.TemporaryDirectory(prefix="sparkpin-ca-") as folder:
            (Path(folder) / "ca.crt").symlink_to(self.ca)
            yield folder

    def failed(self, said: str) -> SparkpinError:
        lines = [line for line in said.strip().splitlines() if "level=fatal" in line] or said.strip().splitlines()
        last = lines[-1] if lines else "skopeo said nothing"
        why = printable((last.partition('msg="')[2].removesuffix('"') or last).replace('\\"', '"'))
        message = f"{self}: {clipped(why)}"
        if "permission denied" in said:
            step = "let this user read the file of --ca, and write SPARKPIN_CACHE"
            return DiskError(message, next_step=step)
        if any(word in said for word in DENIED):
            return NetworkError(message, next_step=login(self.host))
        if ABSENT.search(said):
            return AbsentError(message, next_step="look at the name, and whether it was published")
        if "no space left" in said:
            return DiskError(message, next_step="free space, there or in SPARKPIN_CACHE")
        if "x509" in said or "certificate" in said:
            return NetworkError(message, next_step="--ca FILE names the authority of a registry of your own")
        if any(word in said for word in DAMAGED):
            step = "the same command again; if it says the same, the registry's copy is damaged: publish it anew there"
            return IntegrityError(message, next_step=step)
        return NetworkError(message, next_step="look at the host's name and the network, then the same command again")


def written(pid: int) -> int | None:
    """Bytes, to files and connections together; None once the process has ended. skopeo tells a terminal alone."""
    with suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/io").read_text().split()[3])
    return None


class AbsentError(NetworkError):
    """The registry has nothing under a name."""


def login(host: str) -> str:
    return f"docker login {host.rpartition('@')[2]}, or skopeo login with the same name; then the same command again"


def environment() -> dict[str, str]:
    """Docker's own variable for the folder of its config.json, which skopeo has under another name."""
    known = dict(os.environ)
    if (folder := known.get("DOCKER_CONFIG")) and (Path(folder) / "config.json").is_file():
        known.setdefault("REGISTRY_AUTH_FILE", f"{folder}/config.json")
    return known
