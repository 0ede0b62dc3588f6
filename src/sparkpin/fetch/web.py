"""Files at an address: ranges over one HTTP connection for each server, and what its answers mean."""

from __future__ import annotations

import contextlib
import re
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.fetch.store import LOST
from sparkpin.fetch.transfer import AGAIN, Missing, Temporary

if TYPE_CHECKING:
    import httpx

SILENCE = 30.0  # seconds without an answer, or between two chunks of it, after which a connection counts as broken
CONFIG = "look at `pip config list` and the network, then run the command again"
LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2")  # ours, and huggingface_hub's: it depends on its version


def open_client(proxy: str | None, certificates: str | None = None) -> httpx.Client:
    """proxy: in place of those of the environment; certificates: a file of them, in place of the system's."""
    import httpx  # slow to import

    return httpx.Client(
        proxy=proxy,
        verify=ssl.create_default_context(cafile=certificates),
        headers={"Accept-Encoding": "identity"},
        follow_redirects=True,
        timeout=SILENCE,
    )


@dataclass(frozen=True)
class Address:
    """Where one file lies."""

    client: httpx.Client
    url: str
    next_step: str = LOST

    @property
    def host(self) -> str:
        return urlsplit(without_login(self.url)).netloc

    def place(self, file: str) -> str:
        return without_login(self.url)

    def local(self, file: str, size: int) -> None:
        return None

    @contextlib.contextmanager
    def ask(self, method: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Raises Temporary, Missing for a file that is not there, and NetworkError for a login that is."""
        place = self.place("")
        with lost_connections(place), self.client.stream(method, self.url, headers=headers) as answer:
            status = answer.status_code
            if is_busy(status):
                raise Temporary(f"{place} answers {status}", retry_after(answer.headers))
            if status in (401, 403, 407):
                raise NetworkError(f"{place} answers {status}", next_step=CONFIG)
            if status >= 400:
                raise Missing(f"{place} answers {status}", next_step=LOST)
            yield answer

    @contextlib.contextmanager
    def open(self, file: str, begin: int, end: int, size: int, *, again: bool) -> Iterator[Iterator[bytes]]:
        with self.ask("GET", span_headers(begin, end, size, again=again)) as answer:
            yield content_of(answer, begin, end, size, self.place(file))

    def size(self, file: str) -> int:
        with self.ask("HEAD", {}) as answer:
            return int(answer.headers.get("Content-Length", -1))


def without_login(text: str) -> str:
    """A URL, or a text with some, without user and password."""
    return re.sub(r"//[^/@\s]+@", "//", text)


@contextlib.contextmanager
def lost_connections(what: str, next_step: str = AGAIN) -> Iterator[None]:
    """The errors of HTTP libraries as Temporary. Redirects in a circle are one, too."""
    try:
        yield
    except Exception as error:
        module = type(error).__module__.partition(".")[0]
        if module not in LIBRARIES and not (module == "builtins" and isinstance(error, ConnectionError | TimeoutError)):
            raise
        cause = without_login(f"{what} does not answer ({error or type(error).__name__})")
        raise Temporary(cause, next_step=next_step) from error


def is_busy(status: int) -> bool:
    return status in (408, 429) or status >= 500


def span_headers(begin: int, end: int, size: int, *, again: bool) -> dict[str, str]:
    """A complete file needs no range. again: past caches."""
    headers = {"Accept-Encoding": "identity"} | ({"Cache-Control": "no-cache"} if again else {})
    return headers | ({"Range": f"bytes={begin}-{end - 1}"} if (begin, end) != (0, size) else {})


def content_of(answer: Any, begin: int, end: int, size: int, what: str) -> Iterator[bytes]:
    """The bytes `begin` to `end` of a file of `size` bytes from an answer of httpx, and no more of them.

    A server that ignores ranges sends the complete file. Its start is dropped where the file's rest is wanted, and only
    there: 5 GB are too much for the 3 MB of a tensor. NetworkError for another range, IntegrityError for another file.
    """
    names = ("Content-Range", "Content-Length", "Content-Encoding")
    has = {name: answer.headers[name] for name in names if name in answer.headers}
    is_range = answer.status_code == 206
    fits = has.get("Content-Range", "") in [f"bytes {begin}-{end - 1}/{total}" for total in (size, "*")]
    if not (fits if is_range else end == size) or has.get("Content-Encoding", "identity") != "identity":
        got, expected = f"status {answer.status_code} with {has}", f"bytes {begin}-{end - 1} of {size}"
        step = "the server, or a proxy before it, ignores byte ranges: fetch past that proxy (NO_PROXY)"
        raise NetworkError(f"{what}: got {got}, expected {expected}", next_step=step)
    skip, left = 0 if is_range else begin, end - begin
    if not is_range and (length := int(has.get("Content-Length", size))) != size:
        raise IntegrityError(f"{what} has other bytes: got {length} of them, expected {size}")
    for chunk in answer.iter_raw():
        rest = chunk[skip:]
        skip = max(0, skip - len(chunk))
        if len(rest) > left:
            raise IntegrityError(f"{what} has other bytes: got more than {size}")
        left -= len(rest)
        yield rest


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks us to wait; 0 where it does not say."""
    value = headers.get("Retry-After", "").strip()
    with contextlib.suppress(ValueError, OverflowError):
        return float(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
    return 0
