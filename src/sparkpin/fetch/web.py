"""Files at an address: ranges over one HTTP connection for each server, and what its answers mean."""

from __future__ import annotations

import contextlib
import re
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from sparkpin.core.errors import HostError, IntegrityError, NetworkError
from sparkpin.fetch.store import LOST
from sparkpin.fetch.transfer import AGAIN, Piece, Source, Temporary

if TYPE_CHECKING:
    import httpx

SILENCE = 30.0  # seconds without an answer, or between two chunks of it, after which a connection counts as broken
CONFIG = "look at `pip config list` and the network, then run the command again"
LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2")  # ours, and huggingface_hub's: it depends on its version


def open_client(proxy: str | None, certificates: str | None = None) -> httpx.Client:
    """proxy: in place of those of the environment; certificates: a file of them, in place of the system's.
    HostError for a proxy of another kind than HTTP, and for certificates that cannot be read."""
    import httpx  # slow to import

    headers = {"Accept-Encoding": "identity"}
    try:
        verify = ssl.create_default_context(cafile=certificates)
        return httpx.Client(proxy=proxy, verify=verify, headers=headers, follow_redirects=True, timeout=SILENCE)
    except (ImportError, ValueError, OSError) as error:
        where = f"proxy {proxy or 'of the environment'}, certificates {certificates or 'of the system'}"
        step = "set an http:// or https:// proxy and a file of certificates: `pip config list`, HTTPS_PROXY, ALL_PROXY"
        raise HostError(without_login(f"cannot use {where}: {error}"), next_step=step) from error


@dataclass(frozen=True)
class Address(Source):
    """Where one file lies."""

    client: httpx.Client
    url: str

    @property
    def host(self) -> str:
        return urlsplit(without_login(self.url)).netloc

    def place(self, file: str) -> str:
        return without_login(self.url)

    @contextlib.contextmanager
    def ask(self, method: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Raises Temporary and NetworkError."""
        place = self.place("")
        with lost_connections(place), self.client.stream(method, self.url, headers=headers) as answer:
            cause = f"{place} answers {answer.status_code}"
            if is_busy(answer.status_code):
                raise Temporary(cause, retry_after(answer.headers))
            if answer.status_code >= 400:
                is_login = answer.status_code in (401, 403, 407)
                raise NetworkError(cause, next_step=CONFIG if is_login else LOST)
            yield answer

    @contextlib.contextmanager
    def open(self, piece: Piece, begin: int, *, again: bool) -> Iterator[Iterator[bytes]]:
        with self.ask("GET", span_headers(piece, begin, again=again)) as answer:
            yield content_of(answer, piece, begin, self.place(piece.file))

    def size(self, file: str) -> int:
        with self.ask("HEAD", {}) as answer:
            if (length := answer.headers.get("Content-Length", "")).isdecimal():
                return int(length)
            raise NetworkError(f"{self.place('')}: got no Content-Length, expected the file's size", next_step=CONFIG)


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


def span_headers(piece: Piece, begin: int, *, again: bool) -> dict[str, str]:
    """A complete file needs no range. again: past caches."""
    headers = {"Accept-Encoding": "identity"} | ({"Cache-Control": "no-cache"} if again else {})
    is_complete = (begin, piece.end) == (0, piece.size)
    return headers | ({} if is_complete else {"Range": f"bytes={begin}-{piece.end - 1}"})


def content_of(answer: Any, piece: Piece, begin: int, what: str) -> Iterator[bytes]:
    """A piece's bytes from `begin` on from an answer of httpx, and no more of them.

    A server that ignores ranges sends the complete file. Its start is dropped where the file's rest is wanted, and only
    there: 5 GB are too much for the 3 MB of a tensor. NetworkError for another range, IntegrityError for another file.
    """
    names = ("Content-Range", "Content-Length", "Content-Encoding")
    has = {name: answer.headers[name] for name in names if name in answer.headers}
    is_range, span = answer.status_code == 206, f"bytes {begin}-{piece.end - 1}"
    fits = has.get("Content-Range") in (f"{span}/{piece.size}", f"{span}/*") if is_range else piece.end == piece.size
    if not fits or has.get("Content-Encoding", "identity") != "identity":
        got = f"status {answer.status_code} with {has}, expected {span} of {piece.size}"
        step = "the server, or a proxy before it, ignores byte ranges: fetch past that proxy (NO_PROXY)"
        raise NetworkError(f"{what}: got {got}", next_step=step)
    skip, left = 0 if is_range else begin, piece.end - begin
    if not is_range and (length := int(has.get("Content-Length", piece.size))) != piece.size:
        raise IntegrityError(f"{what} has other bytes: got {length} of them, expected {piece.size}")
    for chunk in answer.iter_raw():
        rest = chunk[skip:]
        skip = max(0, skip - len(chunk))
        if len(rest) > left:
            raise IntegrityError(f"{what} has other bytes: got more than {piece.size}")
        left -= len(rest)
        yield rest


def retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a server asks us to wait; 0 where it does not say. Of a date, which few send, nothing is taken: the
    pauses grow without it."""
    value = headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0
