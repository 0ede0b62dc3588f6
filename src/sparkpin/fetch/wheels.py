"""Wheels: the Python that they are for, and their bytes as an index offers them."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from sparkpin.core.errors import IntegrityError, ManifestError, NetworkError
from sparkpin.core.names import MACHINES
from sparkpin.fetch.origins import SILENCE, FileOrigin, FolderOrigin, Temporary, check_range, wanted_pause
from sparkpin.fetch.pip_settings import with_scheme
from sparkpin.pins.schema import LockedFile, Stack

if TYPE_CHECKING:
    import httpx

LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
NAME_OF_INDEX = re.compile(r"^[\w.-]+=(?=\w+:)")  # uv takes `name=https://...`, too
CONFIG = "look at `pip config list` and the network, then run the command again"


@dataclass(frozen=True)
class WheelTarget:
    """The Python that wheels are for. python: full version; machine: as uname says it; glibc: minor version of 2.x."""

    python: str
    machine: str
    glibc: int

    def platforms(self) -> list[str]:
        """Wheel platforms that run there, best first, as pip ranks them on such a machine (PEP 600)."""
        oldest = 5 if self.machine == "x86_64" else 17
        found = []
        for minor in range(self.glibc, oldest - 1, -1):
            found.append(f"manylinux_2_{minor}_{self.machine}")
            if minor in LEGACY:
                found.append(f"{LEGACY[minor]}_{self.machine}")
        return [*found, f"linux_{self.machine}"]


def target_of(stack: Stack, debs: Iterable[LockedFile]) -> WheelTarget:
    """The target, read from the locked Debian packages or the stack's base: its Python's full version and its glibc."""
    if stack.base:
        return WheelTarget(stack.base.python, MACHINES[stack.platform], stack.base.glibc)
    versions = {deb.name: deb.version for deb in debs}
    python, glibc = versions.get(f"python{stack.python.version}-minimal"), versions.get("libc6")
    if not python or not glibc:
        raise ManifestError(
            f"pins/stacks/{stack.name}.yaml",
            "python.version",
            stack.python.version,
            f"a Python that Debian {stack.system.suite} has, with python3 in debian.packages",
        )
    full, minor = re.match(r"[\d.]+", python), re.match(r"2\.(\d+)", glibc)
    assert full and minor, (python, glibc)
    return WheelTarget(full[0], MACHINES[stack.platform], int(minor[1]))


def http_client(env: Mapping[str, str]) -> httpx.Client:
    """For an index's files, with the certificates of the machine and the indexes' logins, as pip and uv take them.

    env: as for uv, with a proxy and the hosts whose certificates need not be right; httpx reads other proxies itself.
    A login goes to its index's scheme, host and port only, in a header: no message has it.
    """
    import httpx  # slow to import

    words = f"{env.get('UV_DEFAULT_INDEX', '')} {env.get('UV_INDEX', '')}".split()
    indexes = [httpx.URL(NAME_OF_INDEX.sub("", word)) for word in words]

    def log_in(request: httpx.Request) -> httpx.Request:
        url = request.url
        own = [each for each in indexes if (each.scheme, each.host, each.port) == (url.scheme, url.host, url.port)]
        own.sort(key=lambda each: (len(os.path.commonpath([each.path, url.path])), bool(each.userinfo)))
        if not own or not own[-1].userinfo:
            return request
        return next(httpx.BasicAuth(own[-1].username, own[-1].password).auth_flow(request))

    context = ssl.create_default_context(cafile=env.get("SSL_CERT_FILE"))
    mounts = dict[str, httpx.BaseTransport]()
    if (proxy := env.get("ALL_PROXY")) != os.environ.get("ALL_PROXY"):
        mounts["all://"] = httpx.HTTPTransport(verify=context, proxy=proxy)
    for host in (word.rpartition("://")[2] for word in env.get("UV_INSECURE_HOST", "").split()):
        known = {"all": proxy or ""} | getproxies()
        through = "" if proxy_bypass(host) else with_scheme(known.get("https", known["all"]))
        mounts[f"https://{host}"] = httpx.HTTPTransport(verify=False, proxy=through or None)
    return httpx.Client(
        auth=log_in,
        verify=context,
        mounts=mounts,
        headers={"Accept-Encoding": "identity"},
        follow_redirects=True,
        timeout=SILENCE,
    )


@dataclass(frozen=True, eq=False)
class IndexOrigin:
    """A file of a package index. what: for messages; advice: what to do when it is gone, or not what it was."""

    url: str
    what: str
    client: httpx.Client
    advice: str

    @property
    def name(self) -> str:
        return str(urlsplit(self.url).hostname)

    @property
    def mend(self) -> str:
        return f"nothing of it was stored. {self.advice}"

    @contextlib.contextmanager
    def open(self, file: str, begin: int, end: int, size: int, *, anew: bool = False) -> Iterator[Iterator[bytes]]:
        """See FileOrigin. A server that heeds no ranges sends the whole file, of which the start is dropped."""
        import httpx

        headers = {"Cache-Control": "no-cache"} if anew else {}
        headers |= {"Range": f"bytes={begin}-{end - 1}"} if begin else {}
        try:
            with self.client.stream("GET", self.url, headers=headers) as answer:
                if answer.status_code in (404, 410):
                    raise lost(self.what, self.advice)
                if answer.status_code in (408, 429) or answer.status_code >= 500:
                    raise Temporary(f"{self.name} answers {answer.status_code}", wanted_pause(answer.headers))
                if answer.status_code not in (200, 206):
                    raise NetworkError(f"{self.name} answers {answer.status_code} for {self.what}", next_step=CONFIG)
                is_part, told = answer.status_code == 206, answer.headers.get("Content-Length", str(size))
                if not is_part and told != str(size):
                    message = f"integrity mismatch on {self.what}: wanted size={size}; got size={told}"
                    raise IntegrityError(message, next_step=self.mend)
                check_range(answer, begin if is_part else 0, end, size, f"{file} of {self.name}")
                yield answer.iter_raw() if is_part else without(answer.iter_raw(), begin)
        except httpx.RequestError as error:  # redirects in a circle are one, and no TransportError
            cause = f"{self.name} does not answer ({error or type(error).__name__})"
            raise Temporary(cause, next_step=CONFIG) from error


def without(chunks: Iterator[bytes], begin: int) -> Iterator[bytes]:
    for chunk in chunks:
        if kept := chunk[begin:]:
            yield kept
        begin = max(0, begin - len(chunk))


def lost(what: str, advice: str) -> NetworkError:
    return NetworkError(f"{what} is no longer offered by the index", next_step=advice)


def origin_of(url: str, what: str, client: httpx.Client, advice: str) -> FileOrigin:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return FolderOrigin(Path(unquote(parts.path)).parent, "put the right file there, then the same command again")
    return IndexOrigin(url, what, client, advice)


def length(url: str, client: httpx.Client) -> int:
    """The size of what lies at a URL, in bytes. Raises NetworkError. A server that compresses would tell another."""
    import httpx

    if url.startswith("file:"):
        return Path(unquote(urlsplit(url).path)).stat().st_size
    try:
        return int(client.head(url).raise_for_status().headers["Content-Length"])
    except (httpx.HTTPError, KeyError, ValueError) as error:
        raise NetworkError(f"the index tells no size of {url}: {error}", next_step=CONFIG) from error
