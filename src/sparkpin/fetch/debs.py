"""Debian packages: which ones a stack needs, by apt; and their files, from a mirror or Debian's snapshot archive.

apt works in a private root: the host's own system and package lists stay untouched. The mirror is the one that the
host's apt uses for the suite (after `apt-get update`), else Debian's own. At `lock`, apt checks the signatures of the
package lists; afterwards the lock's SHA-256 decides, wherever a file comes from.
"""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote, urlsplit

from sparkpin.core.errors import HostError, IntegrityError, ManifestError, NetworkError, SparkpinError
from sparkpin.core.files import disk_errors
from sparkpin.core.terminal import Say
from sparkpin.fetch.hub import retry_after
from sparkpin.fetch.store import LOST, Store
from sparkpin.pins.schema import LockedDeb, Stack

if TYPE_CHECKING:
    import httpx

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
ARCHITECTURES = {"linux/amd64": "amd64", "linux/arm64": "arm64"}
HOST_PACKAGES = "apt-get install debian-archive-keyring"
OFFLINE = "connect to the network (apt's own proxy settings apply), then run the command again"
MIRROR = "http://deb.debian.org"
SNAPSHOT = "https://snapshot.debian.org"
"""Keeps every version of every package, by archive and time. SPARKPIN_SNAPSHOT names another one of that layout."""
TIME = "%Y%m%dT%H%M%SZ"
URI = re.compile(r"^'(?P<uri>[^']+)' (?P<file>\S+\.deb) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})$")
TRIES = 4
SILENCE = 30.0  # seconds without an answer after which a connection counts as broken
PATIENCE = 600.0  # seconds of pauses in one run, all together
PROGRESS_SECONDS = 5.0
BUSY = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Apt:
    """A private apt root: an empty system of one suite and architecture; its package lists are fetched and verified.

    mirrors: see `mirrors_of`.
    """

    root: Path
    mirrors: Sequence[tuple[str, str]]

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run an apt program on this root. Its callers know what a failure means. apt ends by itself where a mirror
        does not answer."""
        env = {**os.environ, "APT_CONFIG": str(self.root / "apt.conf"), "LC_ALL": "C.UTF-8"}
        return subprocess.run(argv, cwd=self.root, env=env, capture_output=True, text=True, check=False)

    def closure(self, stack: Stack) -> list[LockedDeb]:
        """Everything that a new system of Essential packages plus `debian.packages` holds, sorted by name."""
        # usr-is-merged: rootfs merges /usr itself, so the package that would do it, and Perl with it, stays out.
        wanted = ["?essential", "usr-is-merged", *stack.debian.packages]
        done = self.run("apt-get", "-qq", "--print-uris", "install", *wanted)
        if done.returncode != 0:
            raise ManifestError(
                f"pins/stacks/{stack.name}.yaml",
                "debian.packages",
                stack.debian.packages,
                f"packages that Debian {stack.debian.suite} has and that fit together; apt says:\n{tail(done)}",
            )
        return parse_uris(done.stdout, self.mirrors)


def parse_uris(text: str, mirrors: Sequence[tuple[str, str]]) -> list[LockedDeb]:
    """What `apt-get --print-uris` prints, as rows of a lock."""
    debs = []
    for line in text.splitlines():
        match = URI.match(line)
        found = [row for row in mirrors if match and match["uri"].startswith(row[0])]
        if not (match and found):
            raise NetworkError(f"apt names a package without size and SHA-256: {line!r}")
        uri, release = max(found, key=lambda row: len(row[0]))
        name, version, _ = match["file"].split("_", 2)
        debs.append(
            LockedDeb(
                name=name,
                version=unquote(version),
                file=match["file"],
                size=int(match["size"]),
                sha256=match["sha256"],
                path=unquote(match["uri"].removeprefix(uri)),
                archive=archive_of(release),
            )
        )
    return sorted(debs, key=lambda deb: deb.name)


def archive_of(release: str) -> str:
    """The archive in which Debian keeps a release: its point releases and updates lie in one, security in another."""
    return "debian-security" if release.endswith("-security") else "debian"


def tail(done: subprocess.CompletedProcess[str], lines: int = 8) -> str:
    """The last lines of a program's output."""
    text = [line for line in without_login((done.stdout or "") + done.stderr).splitlines() if line.strip()]
    return "\n".join(f"    {line}" for line in text[-lines:])


def without_login(text: str) -> str:
    """A URL of a mirror, or a text with some, without user and password."""
    return re.sub(r"//[^/@\s]+@", "//", text)


def raise_no_space(folder: Path) -> None:
    """A child process met a full disk: raise what this process would."""
    with disk_errors(folder):
        raise OSError(28, os.strerror(28), str(folder))


def open_apt(root: Path, stack: Stack) -> Apt:
    """Make a private apt root in the empty folder `root` and fetch the package lists. Network."""
    if not KEYRING.is_file() or not shutil.which("apt-get"):
        raise HostError(f"apt or Debian's archive keyring ({KEYRING}) is missing", next_step=HOST_PACKAGES)
    for folder in ("none", "lists/partial", "cache/archives/partial", "etc/apt/preferences.d"):
        (root / folder).mkdir(parents=True)
    (root / "status").touch()
    (root / "apt.conf").write_text(
        apt_conf(root, ARCHITECTURES[stack.platform], host_apt("apt-config", "dump", "--no-empty"))
    )
    apt = Apt(root, mirrors_of(stack.debian.suite))
    rows = (f"deb [signed-by={KEYRING}] {uri} {release} main\n" for uri, release in apt.mirrors)
    (root / "sources.list").write_text("".join(rows))
    done = apt.run("apt-get", "-qq", "--error-on=any", "update")
    if done.returncode != 0:
        if "No space left on device" in done.stderr:
            raise_no_space(root)
        raise NetworkError(
            f"apt could not fetch the package lists of {stack.debian.suite}:\n{tail(done)}", next_step=OFFLINE
        )
    return apt


def apt_conf(root: Path, architecture: str, host: str) -> str:
    """The private root's configuration. Of the host's, only how files are acquired (proxies, certificates) is kept:
    its hooks would act on the host's caches.
    """
    lines = [line for line in host.splitlines() if re.match(r"Acquire::(?:https?|ftp|Retries|ForceIPv)", line)]
    settings = {
        "APT::Architecture": architecture,
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",  # the user that apt falls back to cannot enter a private cache folder
        "Acquire::Languages": "none",
        "Acquire::ForceHash": "SHA256",  # --print-uris gives MD5 otherwise
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
    found = {(row[2], row[1]) for row in rows if len(row) == 4 and (row[0], row[3]) == ("Debian", "main")}
    found = {(uri, release) for uri, release in found if release in releases}
    if suite not in {release for _, release in found}:
        found = {(f"{MIRROR}/{archive_of(release)}/", release) for release in releases}
    return sorted(found)


def fetch_debs(stack: Stack, at: str, wanted: Sequence[LockedDeb], store: Store, say: Say) -> None:
    """Each package into the store: from a mirror, or else from the snapshot archive as it was when it was locked.

    at: the lock's time. One request at a time. What nobody has keeps no other package from being fetched.
    Raises NetworkError, IntegrityError (other bytes everywhere; nothing of them is stored) or DiskError.
    """
    if not wanted:
        return
    total, done, reported = sum(deb.size for deb in wanted), 0, time.monotonic()
    faults = list[SparkpinError]()
    with archives(stack.debian.suite, at, say) as source:
        for number, deb in enumerate(wanted, 1):
            try:
                source.fetch(deb, store)
            except (IntegrityError, NetworkError) as error:
                faults.append(error)
                if source.is_offline:
                    break
            done += deb.size
            if time.monotonic() - reported >= PROGRESS_SECONDS or number == len(wanted):
                say(f"  Debian packages: {number} of {len(wanted)}, {done / 1e6:,.1f} of {total / 1e6:,.1f} MB")
                reported = time.monotonic()
    for fault in faults[1:]:
        say(fault.message)
    if faults:
        raise faults[0]


@dataclass
class Archives:
    """Where Debian packages lie.

    mirrors: see `mirrors_of`; snapshot: base URL of the snapshot archive; at: the lock's time, "" for an unknown one;
    patience: seconds that this run may still wait; silent: hosts that do not answer, and are not asked again.
    """

    client: httpx.Client
    mirrors: Sequence[tuple[str, str]]
    snapshot: str
    at: str
    say: Say
    patience: float = PATIENCE
    silent: set[str] = field(default_factory=set)
    is_offline: bool = False

    def places(self, deb: LockedDeb) -> list[str]:
        """URLs, the likeliest first. The snapshot archive is asked for a day later, too: it may have copied what the
        mirror had only after the lock was written.
        """
        path, web = quote(deb.path), [row for row in self.mirrors if row[0].startswith("http")]
        mirrors = [uri for uri, release in web if archive_of(release) == deb.archive] or [f"{MIRROR}/{deb.archive}/"]
        found = [f"{uri}{path}" for uri in dict.fromkeys(mirrors)]
        if self.at:
            moment = datetime.strptime(self.at, TIME)
            days = [each.strftime(TIME) for each in (moment, moment + timedelta(days=1))]
            found += [f"{self.snapshot}/archive/{deb.archive}/{day}/{path}" for day in days]
        return found if deb.path else []

    def fetch(self, deb: LockedDeb, store: Store) -> None:
        """From the first place that has it. Raises NetworkError or IntegrityError for one that none has."""
        faults, other, places = list[str](), list[str](), self.places(deb)
        for url in places:
            try:
                if not (fault := self.ask(url, deb, store)):
                    return
            except IntegrityError as error:
                fault = "has other bytes"
                other.append(error.message)
            faults.append(f"{without_login(url)} {fault}")
        where = "\n    ".join(["", *(faults or ["(the lock does not say where it was)"]), *other])
        what = f"cannot fetch {deb.name} {deb.version} ({deb.file}, sha256={deb.sha256}) as it was locked:{where}"
        self.is_offline = bool(places) and self.silent.issuperset(map(host_of, places))
        if other:
            raise IntegrityError(what, next_step=f"nothing of it was stored. {LOST}")
        raise NetworkError(what, next_step=OFFLINE if self.is_offline else LOST)

    def ask(self, url: str, deb: LockedDeb, store: Store) -> str:
        """Bring a package into the store; else why this place has none. IntegrityError for other bytes."""
        import httpx  # slow to import

        host, fault = host_of(url), "does not answer"
        for attempt in range(TRIES if host not in self.silent else 0):
            pause = 2.0**attempt
            try:
                with self.client.stream("GET", url) as answer:
                    if answer.status_code == 200:
                        store.receive(answer.iter_raw(), deb, without_login(url))
                        return ""
                    fault = f"answers {answer.status_code}"
                    if answer.status_code not in BUSY:
                        return fault
                    pause = max(pause, retry_after(answer.headers))
            except httpx.RequestError as error:  # redirects in a circle are one, too
                fault = f"does not answer ({error or type(error).__name__})"
            if attempt + 1 == TRIES or pause > self.patience:
                self.silent.add(host)
                break
            self.say(f"{deb.file}: {host} {fault}; asking again in {pause:.0f} s")
            self.patience -= pause
            time.sleep(pause)
        return fault


@contextmanager
def archives(suite: str, at: str, say: Say) -> Iterator[Archives]:
    """With the proxy of the host's apt, else the environment's."""
    import httpx  # slow to import

    proxy = re.search(r'^Acquire::http::Proxy "(http[^"]+)";', host_apt("apt-config", "dump"), re.MULTILINE)
    with httpx.Client(
        proxy=proxy[1] if proxy else None,
        verify=ssl.create_default_context(),
        headers={"Accept-Encoding": "identity"},
        follow_redirects=True,
        timeout=SILENCE,
    ) as client:
        yield Archives(client, mirrors_of(suite), os.environ.get("SPARKPIN_SNAPSHOT", SNAPSHOT).rstrip("/"), at, say)


def host_of(url: str) -> str:
    return urlsplit(without_login(url)).netloc
