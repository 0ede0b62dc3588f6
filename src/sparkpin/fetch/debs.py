"""Debian packages: which ones a stack needs, by apt; and their files, from a mirror or Debian's snapshot archive.

apt works in a private root: the host's own system and package lists stay untouched. The mirror is the one that the
host's apt uses for the suite (after `apt-get update`), else Debian's own. At `lock`, apt checks the signatures of the
package lists; afterwards the lock's SHA-256 decides, wherever a file comes from.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import quote, unquote

from sparkpin.core.errors import HostError, ManifestError, NetworkError
from sparkpin.fetch.store import Store
from sparkpin.fetch.transfer import fetch_files
from sparkpin.fetch.web import Address, open_client, without_login
from sparkpin.pins.schema import LockedDeb, Stack

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ARCHITECTURES = {"linux/amd64": "amd64", "linux/arm64": "arm64"}
MIRROR = "http://deb.debian.org"
SNAPSHOT = "https://snapshot.debian.org"
"""Keeps every version of every package, by archive and time. SPARKPIN_SNAPSHOT names another one of that layout."""
TIME = "%Y%m%dT%H%M%SZ"
ACQUIRE = re.compile("Acquire::(?:https?|ftp|Retries|ForceIPv|Check-Valid-Until)")
URI = re.compile(r"^'(?P<uri>[^']+)' (?P<file>\S+\.deb) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})$")


def debian_closure(root: Path, stack: Stack) -> list[LockedDeb]:
    """Everything that a new system of Essential packages plus `debian.packages` holds, sorted by name. Network.

    root: an empty folder, which becomes a private apt root: an empty system of one suite and architecture.
    """
    if not KEYRING.is_file() or not shutil.which("apt-get"):
        raise HostError(
            f"apt or Debian's archive keyring ({KEYRING}) is missing",
            next_step="apt-get install debian-archive-keyring",
        )
    for folder in ("etc/apt/preferences.d", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial"):
        (root / folder).mkdir(parents=True)
    (root / "status").touch()
    host, mirrors = host_apt("apt-config", "dump", "--no-empty"), mirrors_of(stack.debian.suite)
    (root / "apt.conf").write_text(apt_conf(root, ARCHITECTURES[stack.platform], host))
    rows = (f"deb [signed-by={KEYRING}] {uri} {release} main\n" for uri, release in mirrors)
    (root / "etc/apt/sources.list").write_text("".join(rows))

    def apt_get(*argv: str) -> subprocess.CompletedProcess[str]:
        """apt ends by itself where a mirror does not answer."""
        env = {**os.environ, "APT_CONFIG": str(root / "apt.conf"), "LC_ALL": "C.UTF-8"}
        argv = ("apt-get", "-qq", *argv)
        return subprocess.run(argv, cwd=root, env=env, capture_output=True, text=True, check=False)

    done = apt_get("--error-on=any", "update")
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))
    if done.returncode:
        cause = f"apt could not fetch the package lists of {stack.debian.suite}:\n{tail(done)}"
        raise NetworkError(cause, next_step="connect to the network (apt's own proxy settings apply), then try again")
    # usr-is-merged: rootfs merges /usr itself, so the package that would do it, and Perl with it, stays out.
    done = apt_get("--print-uris", "install", "?essential", "usr-is-merged", *stack.debian.packages)
    if done.returncode:
        expected = f"packages that Debian {stack.debian.suite} has and that fit together; apt says:\n{tail(done)}"
        raise ManifestError(f"pins/stacks/{stack.name}.yaml", "debian.packages", stack.debian.packages, expected)
    return parse_uris(done.stdout, mirrors)


def parse_uris(text: str, mirrors: Sequence[tuple[str, str]]) -> list[LockedDeb]:
    """What `apt-get --print-uris` prints, as rows of a lock."""
    debs = []
    for line in text.splitlines():
        match = URI.match(line)
        found = [row for row in mirrors if match and match["uri"].startswith(row[0])]
        if not (match and found):
            raise NetworkError(f"apt: got {line!r}, expected a mirror's package with size and SHA-256")
        uri, release = max(found, key=lambda row: len(row[0]))
        name, version, _ = match["file"].split("_", 2)
        place = {"path": unquote(match["uri"].removeprefix(uri)), "archive": archive_of(release)}
        content = {"file": match["file"], "size": int(match["size"]), "sha256": match["sha256"]}
        debs.append(LockedDeb.model_validate({"name": name, "version": unquote(version)} | content | place))
    return sorted(debs, key=lambda deb: deb.name)


def archive_of(release: str) -> str:
    """The archive in which Debian keeps a release: its point releases and updates lie in one, security in another."""
    return "debian-security" if release.endswith("-security") else "debian"


def tail(done: subprocess.CompletedProcess[str], lines: int = 8) -> str:
    """The last lines of a program's output."""
    text = [line for line in without_login((done.stdout or "") + done.stderr).splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in text[-lines:])


def apt_conf(root: Path, architecture: str, host: str) -> str:
    """The private root's configuration. Of the host's, only how files are acquired is kept (proxies, certificates, a
    mirror that is frozen): its hooks would act on the host's caches.
    """
    lines = [line for line in host.splitlines() if ACQUIRE.match(line)]
    settings = {
        "APT::Architecture": architecture,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",  # the user that apt falls back to cannot enter a private cache folder
        "Acquire::Languages": "none",
        "Acquire::ForceHash": "SHA256",  # --print-uris gives MD5 otherwise
        "pkgCacheGen::ForceEssential": ",",  # apt counts itself as Essential otherwise
        "Dir": str(root),  # of etc/apt, too, so that no file of the host's is read
        "Dir::State::Status": str(root / "status"),
    }
    lines += [f'{key} "{value}";' for key, value in settings.items()]
    return "\n".join([*lines, f'APT::Architectures {{ "{architecture}"; }};']) + "\n"


def host_apt(*argv: str) -> str:
    """What a program of the host's apt prints; nothing where the host has none."""
    if not shutil.which(argv[0]):
        return ""
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def mirrors_of(suite: str) -> list[tuple[str, str]]:
    """(URI, release) of the suite, its updates and its security updates: the host's apt's, else Debian's own."""
    releases = (suite, f"{suite}-updates", f"{suite}-security")
    form = "$(ORIGIN) $(RELEASE) $(REPO_URI) $(COMPONENT)"
    rows = [
        line.split()
        for line in host_apt("apt-get", "indextargets", "--format", form, "Created-By: Packages").splitlines()
    ]
    found = {(row[2], row[1]) for row in rows if (row[0], row[-1]) == ("Debian", "main") and row[1] in releases}
    if suite not in {release for _, release in found}:
        found = {(f"{MIRROR}/{archive_of(release)}/", release) for release in releases}
    return sorted(found)


def fetch_debs(stack: Stack, at: str, wanted: Sequence[LockedDeb], store: Store) -> None:
    """Each package into the store: from a mirror, or else from the snapshot archive as it was when it was locked.

    at: the lock's time, "" for an unknown one. One request at a time, by the proxy of the host's apt, else the
    environment's. Raises NetworkError, IntegrityError (other bytes everywhere; none of them is stored) or DiskError.
    """
    proxy = re.search(r'^Acquire::http::Proxy "(http[^"]+)";', host_apt("apt-config", "dump"), re.MULTILINE)
    mirrors = mirrors_of(stack.debian.suite)
    with open_client(proxy[1] if proxy else None) as client:
        sources = [(deb, [Address(client, url) for url in places(deb, mirrors, at)]) for deb in wanted]
        fetch_files(sources, store, title="Debian packages", connections=1)


def places(deb: LockedDeb, mirrors: Sequence[tuple[str, str]], at: str) -> list[str]:
    """URLs of a package, the likeliest first. The snapshot archive is asked for a day later, too: it may have copied
    what the mirror had only after the lock was written.
    """
    path, snapshot = quote(deb.path), os.environ.get("SPARKPIN_SNAPSHOT", SNAPSHOT).rstrip("/")
    fitting = [uri for uri, release in mirrors if uri.startswith("http") and archive_of(release) == deb.archive]
    found = [f"{uri}{path}" for uri in dict.fromkeys(fitting or [f"{MIRROR}/{deb.archive}/"])]
    if at:
        moment = datetime.strptime(at, TIME)
        days = [each.strftime(TIME) for each in (moment, moment + timedelta(days=1))]
        found += [f"{snapshot}/archive/{deb.archive}/{day}/{path}" for day in days]
    return found if deb.path else []
