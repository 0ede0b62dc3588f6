"""Debian packages by apt, from a private apt root: the host's own system and package lists stay untouched.

The mirror is the one that the host's apt uses for the suite (after `apt-get update`), else the one that mmdebstrap
would take. Signatures are checked against Debian's archive keyring in both cases.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from sparkpin.core.errors import HostError, ManifestError, NetworkError
from sparkpin.core.files import disk_errors
from sparkpin.fetch.store import LOST
from sparkpin.pins.schema import LockedFile, Stack

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ARCHITECTURES = {"linux/amd64": "amd64", "linux/arm64": "arm64"}
TIMEOUT = 1200  # seconds; a slow line brings the lists or 48 packages in less
HOST_PACKAGES = "apt-get install mmdebstrap debian-archive-keyring"
OFFLINE = "connect to the network (apt's own proxy settings apply), then run the command again"
URI = re.compile(r"^'[^']+' (?P<file>\S+\.deb) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})$")
NOT_FOUND = re.compile(r"^E: Failed to fetch \S*/(?P<name>[^/\s_]+)_\S*\.deb +(?:404|410) ", re.MULTILINE)
GONE = re.compile(
    r"^E: (?:Version '(?P<version>.+)' for '(?P<name>.+)' was not found|Unable to locate package (?P<unknown>.*))$"
)


@dataclass(frozen=True)
class Apt:
    """A private apt root: an empty system of one suite and architecture; its package lists are fetched and verified."""

    root: Path

    def run(self, *argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run an apt program on this root. Its callers know what a failure means."""
        env = {**os.environ, "APT_CONFIG": str(self.root / "apt.conf"), "LC_ALL": "C.UTF-8"}
        try:
            return subprocess.run(
                argv, cwd=cwd or self.root, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired:
            raise NetworkError(
                f"`{' '.join(argv[:4])} ...` did not end within {TIMEOUT} s",
                next_step="look at the network, the mirror and the free disk space, then the same command again",
            ) from None

    def closure(self, stack: Stack) -> list[LockedFile]:
        """Everything that a new system of Essential packages plus `debian.packages` holds, sorted by name."""
        # usr-is-merged: rootfs merges /usr itself, so the package that would do it, and Perl with it, stays out.
        wanted = ["?essential", "usr-is-merged", *stack.system.packages]
        done = self.run("apt-get", "-qq", "--print-uris", "install", *wanted)
        if done.returncode != 0:
            raise ManifestError(
                f"pins/stacks/{stack.name}.yaml",
                "debian.packages",
                stack.system.packages,
                f"packages that Debian {stack.system.suite} has and that fit together; apt says:\n{tail(done)}",
            )
        return parse_uris(done.stdout)

    def download(self, wanted: Sequence[LockedFile], folder: Path) -> None:
        """Fetch locked packages into a folder, named as in the lock. Raises NetworkError."""
        done = self.run("apt-get", "-qq", "download", *(f"{deb.name}={deb.version}" for deb in wanted), cwd=folder)
        if done.returncode == 0:
            return
        if "No space left on device" in done.stderr:
            raise_no_space(folder)
        if lost := gone(wanted, done.stderr):
            names = ", ".join(f"{deb.file} (sha256={deb.sha256})" for deb in lost)
            raise NetworkError(
                f"no longer offered by the Debian mirror, which keeps only the newest version of a package: {names}",
                next_step=LOST,
            )
        names = ", ".join(deb.file for deb in wanted)
        raise NetworkError(f"apt could not fetch {names}:\n{tail(done)}", next_step=OFFLINE)


def gone(wanted: Sequence[LockedFile], text: str) -> list[LockedFile]:
    """The packages that apt says it has no such version of, or did not find where its lists say they lie."""
    matches = [match for line in text.splitlines() if (match := GONE.match(line))]
    names = {match["name"] or match["unknown"] for match in matches}
    names |= {match["name"] for match in NOT_FOUND.finditer(text)}
    return [deb for deb in wanted if deb.name in names]


def raise_no_space(folder: Path) -> None:
    """A child process met a full disk: say it as this process would."""
    with disk_errors(folder):
        raise OSError(28, os.strerror(28), str(folder))


def parse_uris(text: str) -> list[LockedFile]:
    debs = []
    for line in text.splitlines():
        if not (match := URI.match(line)):
            raise NetworkError(f"apt names a package without size and SHA-256: {line!r}")
        name, version, _ = match["file"].split("_", 2)
        debs.append(
            LockedFile(
                name=name,
                version=unquote(version),
                file=match["file"],
                size=int(match["size"]),
                sha256=match["sha256"],
            )
        )
    return sorted(debs, key=lambda deb: deb.name)


def tail(done: subprocess.CompletedProcess[str], lines: int = 8) -> str:
    """The last lines of what a program said."""
    text = [line for line in ((done.stdout or "") + done.stderr).splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in text[-lines:])


def open_apt(root: Path, stack: Stack) -> Apt:
    """Make a private apt root in the empty folder `root` and fetch the package lists. Network."""
    if not KEYRING.is_file() or not shutil.which("apt-get"):
        raise HostError(f"apt or Debian's archive keyring ({KEYRING}) is missing", next_step=HOST_PACKAGES)
    for folder in ("none", "lists/partial", "cache/archives/partial", "etc/apt/preferences.d"):
        (root / folder).mkdir(parents=True)
    (root / "status").touch()
    dumped = subprocess.run(["apt-config", "dump", "--no-empty"], capture_output=True, text=True, check=False).stdout
    (root / "apt.conf").write_text(apt_conf(root, ARCHITECTURES[stack.platform], dumped))
    (root / "sources.list").write_text("\n".join(sources(stack.system.suite)) + "\n")
    apt = Apt(root)
    done = apt.run("apt-get", "-qq", "--error-on=any", "update")
    if done.returncode != 0:
        if "No space left on device" in done.stderr:
            raise_no_space(root)
        raise NetworkError(
            f"apt could not fetch the package lists of {stack.system.suite}:\n{tail(done)}", next_step=OFFLINE
        )
    return apt


def apt_conf(root: Path, architecture: str, host: str) -> str:
    """The private root's configuration. Of the host's, only how files are acquired (proxies, certificates) is kept:
    its hooks would act on the host's caches.
    """
    kept = [line for line in host.splitlines() if re.match(r"Acquire::(?:https?|ftp|Retries|ForceIPv)", line)]
    own = {
        "APT::Architecture": architecture,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",  # the user that apt falls back to cannot enter a private cache folder
        "Acquire::Languages": "none",
        "Acquire::ForceHash": "SHA256",  # --print-uris says MD5 otherwise
        "pkgCacheGen::ForceEssential": ",",  # apt counts itself as Essential otherwise
        "Dir": str(root),
        "Dir::Etc::Parts": "none",
        "Dir::Etc::Main": "none/apt.conf",
        "Dir::Etc::SourceList": str(root / "sources.list"),
        "Dir::Etc::SourceParts": str(root / "none"),
        "Dir::State::Lists": str(root / "lists"),
        "Dir::State::Status": str(root / "status"),
        "Dir::Cache": str(root / "cache"),
    }
    lines = [f'{key} "{value}";' for key, value in own.items()]
    return "\n".join([*kept, *lines, f'APT::Architectures {{ "{architecture}"; }};']) + "\n"


def sources(suite: str) -> list[str]:
    """Lines of a sources.list for the suite and its updates, from the host's apt or mmdebstrap's default."""
    wanted = {suite, f"{suite}-updates", f"{suite}-security"}
    form = "$(ORIGIN) $(RELEASE) $(REPO_URI) $(COMPONENT)"
    argv = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    shown = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    rows = [line.split() for line in shown.splitlines()]
    own = {(row[2], row[1]) for row in rows if len(row) == 4 and (row[0], row[3]) == ("Debian", "main")}
    own = {(uri, release) for uri, release in own if release in wanted}
    if suite not in {release for _, release in own}:
        own = set(mmdebstrap_sources(suite))
    return [f"deb [signed-by={KEYRING}] {uri} {release} main" for uri, release in sorted(own)]


def mmdebstrap_sources(suite: str) -> list[tuple[str, str]]:
    """(URI, release) as mmdebstrap would take them, read from a run that ends before it does anything."""
    if not shutil.which("mmdebstrap"):
        raise HostError("mmdebstrap is missing", next_step=HOST_PACKAGES)
    hook = '--setup-hook=cat "$1/etc/apt/sources.list" >&2; exit 1'
    argv = ["mmdebstrap", "--variant=custom", "--format=null", hook, suite]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    found = re.findall(r"^deb (?:\[[^\]]*\] )?(\S+) (\S+) main", done.stdout + done.stderr, re.MULTILINE)
    if not found:
        raise HostError(f"mmdebstrap names no mirror for {suite}:\n{tail(done)}", next_step=HOST_PACKAGES)
    return found
