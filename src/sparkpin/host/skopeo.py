"""Registries of images, through skopeo: it knows their protocol, their certificates and where credentials lie.

Every command names a folder in OCI layout on this machine and a place in the registry. What it brings is checked by who
asked for it. Credentials are those of `docker login` or `skopeo login`; none is an argument.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import DiskError, InputError, IntegrityError, NetworkError, SparkpinError, clipped
from sparkpin.core.terminal import printable
from sparkpin.host.machine import require_program


class AbsentError(NetworkError):
    """The registry has nothing under a name."""


SHAPE = "oci://HOST[:PORT]/NAME, then :TAG or @sha256:DIGEST for one image"
PLACE = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9a-f:]+\](?::[0-9]{1,5})?)"
    r"/(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127})|@(?P<digest>sha256:[0-9a-f]{64}))?"
)
LOOPBACK = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:|$)")
MANIFEST = 4 << 20  # bytes of a manifest: skopeo takes no more
SECONDS = 120  # that a registry may take for a manifest
# What skopeo prints -> the error, and the next command; {host} is the registry's. The first that fits counts.
FAILURES: tuple[tuple[str, type[SparkpinError], str], ...] = (
    (r"permission denied|no space left", DiskError, "look at the disk, SPARKPIN_CACHE and the file of --ca"),
    (r"unauthorized|authentication required|denied|status 40[13]", NetworkError, "docker login {host}"),
    (r"manifest unknown|name unknown|StatusCode: 404|unknown: .*not found", AbsentError, "correct the name"),
    (r"did not match|digest mismatch|invalid digest|unexpected EOF|too large", IntegrityError, "publish it again"),
    (r"x509|certificate", NetworkError, "--ca FILE names the authority of a registry of your own"),
    (r"", NetworkError, "look at the host's name and the network, then the same command again"),
)


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
            step = f"docker login {place.rpartition('@')[2]}, then the same command without them"
            raise InputError("credentials in a place: every user of this machine sees them", next_step=step)
        step = "the same command with such a place; what is in a file: invoke import FILE"
        raise InputError(f"got {url!r}, expected {SHAPE}", next_step=step)

    def __str__(self) -> str:
        return f"oci://{self.host}/{self.name}{self.reference}"

    @property
    def reference(self) -> str:
        return f"@{self.digest}" if self.digest else f":{self.tag}" if self.tag else ""

    def manifest(self, reference: str) -> bytes | None:
        """The bytes under ":TAG" or "@sha256:...", None where the registry has none."""
        try:
            return self.run("", "inspect", "--raw", self.at(reference), seconds=SECONDS)
        except AbsentError:
            return None

    def push(self, layout: Path, image: str, reference: str) -> None:
        """An image of the layout, as it is: blobs that the registry has are not sent."""
        self.run("dest-", "copy", "-q", "--preserve-digests", f"oci:{layout}:{image}", self.at(reference))

    def fetch(self, layout: Path, reference: str, image: str, largest: int) -> None:
        """An image into the layout. A blob that lies there under its digest is not asked for, and not read.

        largest: bytes of its blobs. skopeo compares digests at the end of a blob, so a registry that sends without end
        is stopped by the kernel.
        """
        words = ("-q", "--preserve-digests", self.at(reference), f"oci:{layout}:{image}")
        self.run("src-", "copy", *words, largest=largest + MANIFEST)

    def at(self, reference: str) -> str:
        return f"docker://{self.host}/{self.name}{reference}"

    def run(self, side: str, command: str, *words: str, seconds: int | None = None, largest: int = 0) -> bytes:
        """What a command of skopeo prints. side: of a copy, where the registry stands in it ("src-", "dest-");
        largest: bytes of a file that it may write, 0 for any number."""
        program = require_program("skopeo", package="skopeo")
        limit = ["prlimit", f"--fsize={largest}"] if largest else []
        with tempfile.TemporaryDirectory(prefix="sparkpin-ca-") as folder:
            trust = []
            if self.ca:
                (Path(folder) / "ca.crt").symlink_to(self.ca)
                trust = [f"--{side}cert-dir", folder]
            elif LOOPBACK.match(self.host):  # plain HTTP goes to this machine alone
                trust = [f"--{side}tls-verify=false"]
            # sparkpin decides what is trusted, so skopeo needs no policy of its own.
            argv = [*limit, program, "--insecure-policy", command, *trust, *words]
            try:
                done = subprocess.run(argv, capture_output=True, env=environment(), timeout=seconds, check=False)
            except subprocess.TimeoutExpired:
                raise NetworkError(f"{self} did not answer within {seconds} s", next_step="try again") from None
        if done.returncode:
            raise self.failed(done.stderr.decode(errors="replace"))
        return done.stdout

    def failed(self, output: str) -> SparkpinError:
        fatal = re.findall(r'level=fatal msg="(.*)"$', output.strip(), re.M) or output.strip().splitlines()
        why = printable(fatal[-1].replace('\\"', '"')) if fatal else "skopeo printed nothing"
        kind, step = next((kind, step) for pattern, kind, step in FAILURES if re.search(pattern, output, re.I))
        return kind(f"{self}: {clipped(why)}", next_step=step.format(host=self.host))


def environment() -> dict[str, str]:
    """Docker's own variable for the folder of its config.json, which skopeo has under another name."""
    known = dict(os.environ)
    if (folder := known.get("DOCKER_CONFIG")) and (Path(folder) / "config.json").is_file():
        known.setdefault("REGISTRY_AUTH_FILE", f"{folder}/config.json")
    return known
