"""Plain HTTP to a server, over a Unix socket or TCP; every exchange is recorded as it went over the wire.

Server-sent events in it are read strictly (WHATWG HTML, 9.2.6): no client library repairs them first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import ssl
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from sparkpin.core.errors import InputError

MAX_BYTES = 16 << 20  # no answer asked for here comes near; a server that babbles on must not fill the memory
OWN_HOSTS = ("127.0.0.1", "::1", "localhost")  # this machine
DONE = "[DONE]"
Verify = ssl.SSLContext | bool  # a server's certificate, as httpx takes it
PEM_BEGIN, PEM_END = (f"-----{word} CERTIFICATE-----" for word in ("BEGIN", "END"))
NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python's ssl does not name


class Fault(Exception):
    """The server did not give a whole answer: refused, reset, too slow, too long."""


@dataclass(frozen=True)
class Exchange:
    """A request with its answer: one line of exchanges.jsonl. `fault` says why where no whole answer came, and `status`
    is None where none began."""

    method: str
    path: str
    request: dict[str, Any] | None
    status: int | None
    content_type: str
    body: bytes
    seconds: float
    fault: str = ""
    first: float | None = None  # seconds until the answer began
    first_bytes: int = 0  # that came then

    @property
    def start(self) -> str:
        """The first characters, for a message."""
        return repr(self.body[:300].decode(errors="replace"))

    def as_dict(self) -> dict[str, Any]:
        """The body as text; bytes of it that are no UTF-8 as in Python, such as \\xff."""
        known = {name: value for name, value in asdict(self).items() if name not in ("body", "first", "fault")}
        known |= {"response": self.body.decode("utf-8", "backslashreplace"), "seconds": round(self.seconds, 3)}
        return known | ({"fault": self.fault} if self.fault else {})


class Client(contextlib.AbstractContextManager["Client"]):
    """One connection's worth of requests. `exchanges` holds all but the waiting for readiness."""

    def __init__(self, http: httpx.Client, *, timeout: float, close: list[int] | None = None) -> None:
        self._http, self.timeout, self._close = http, timeout, close or []
        self.exchanges: list[Exchange] = []

    @classmethod
    def unix(cls, socket: Path, *, timeout: float = 120) -> Client:
        """Over a Unix socket. The folder is opened first: a socket's own path may have 107 bytes at most."""
        folder = os.open(socket.parent, os.O_PATH | os.O_DIRECTORY)
        transport = httpx.HTTPTransport(uds=f"/proc/self/fd/{folder}/{socket.name}")
        return cls(httpx.Client(transport=transport, base_url="http://localhost"), timeout=timeout, close=[folder])

    @classmethod
    def url(
        cls, url: str, *, timeout: float = 120, key: str | None = None, verify: Verify = True, is_own: bool = False
    ) -> Client:
        """Of anybody's server, with or without the /v1 at its end. is_own: of this machine; to another one proxies are
        used. InputError, which does not repeat it, for a key that no header may hold."""
        if key and not re.fullmatch("[!-~]+", key):
            raise InputError(
                "the key: got a space, a line's end or a character beyond ASCII in it, expected none",
                next_step="set its variable again, without them: NAME=$(tr -d '[:space:]' <FILE)",
            )
        base, headers = url.rstrip("/").removesuffix("/v1"), {"Authorization": f"Bearer {key}"} if key else {}
        far = not is_own and httpx.URL(base).host not in OWN_HOSTS
        return cls(httpx.Client(base_url=base, headers=headers, trust_env=far, verify=verify), timeout=timeout)

    def __exit__(self, *_: object) -> None:
        self._http.close()
        while self._close:
            os.close(self._close.pop())

    def get(self, path: str) -> Exchange:
        return self._send("GET", path, None)

    def metrics(self) -> str:
        """ "" where there are none."""
        with contextlib.suppress(Fault):
            reply = self.get("/metrics")
            if reply.status == 200:
                return reply.body.decode(errors="replace")
        return ""

    def post(self, path: str, body: dict[str, Any], *, timeout: float | None = None) -> Exchange:
        return self._send("POST", path, body, timeout)

    def abandon(self, path: str, body: dict[str, Any]) -> None:
        """Go away after the first bytes of an answer, as a person does who presses Stop."""
        if (reply := self._send("POST", path, body, leaves=True)).status != 200:
            raise Fault(f"POST {path}: status {reply.status}")

    def healthy(self) -> bool:
        """Whether /health answers within a few seconds, if only that too many ask. Not recorded."""
        try:
            return self._http.get("/health", timeout=5).status_code in (200, 429)
        except httpx.HTTPError:
            return False

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None = None, leaves: bool = False
    ) -> Exchange:
        """`timeout` bounds the whole exchange, not each read: a server that trickles on is cut off too. leaves: after
        the first bytes."""
        start, timeout = time.monotonic(), timeout or self.timeout
        status, content_type, received, fault, end = None, "", bytearray(), "", ""
        headers = {"Accept-Encoding": "identity"} | ({} if body is None else {"Content-Type": "application/json"})
        # Half an emoji is replaced.
        text = json.dumps(body, ensure_ascii=False).encode(errors="replace") if body else None
        first: tuple[float, int] | None = None
        try:
            with self._http.stream(method, path, content=text, headers=headers, timeout=timeout) as response:
                status, content_type = response.status_code, response.headers.get("content-type", "")
                for part in response.iter_raw():
                    seconds = time.monotonic() - start
                    first = first or (seconds, len(part))
                    received += part
                    end = "broken off by the test" if leaves else ""
                    if len(received) > MAX_BYTES:
                        fault = f"the answer is longer than {MAX_BYTES} bytes"
                    elif seconds > timeout:
                        fault = f"the answer did not end within {timeout:g} s"
                    if fault or end:
                        break
        except httpx.TimeoutException:
            fault = f"no answer within {timeout:g} s"
        except httpx.HTTPError as error:
            fault = f"{type(error).__name__}: {error}"
        seconds, (begin, size) = time.monotonic() - start, first or (None, 0)
        exchange = Exchange(
            method, path, body, status, content_type, bytes(received), seconds, fault or end, begin, size
        )
        self.exchanges.append(exchange)
        if fault or status is None:
            raise Fault(f"{method} {path}: {fault}")
        return exchange


def pinned(certificate: str) -> ssl.SSLContext:
    """Trusts the server with this certificate, whatever names it is for and however old it is. Of other certificates
    only those that the holder of its key has signed, where it may sign any.

    certificate: a PEM file; of a chain the first is the server's. InputError for a file that has none.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    try:
        text = Path(certificate).read_text(errors="replace").partition(PEM_BEGIN)[2]  # remarks may stand before it
        context.load_verify_locations(cadata="".join((PEM_BEGIN, *text.partition(PEM_END)[:2])))
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        step = "invoke serve --tls-cert FILE --tls-key FILE"
        raise InputError(f"{certificate}: {error}; expected the server's certificate", next_step=step) from None
    return context


class BadStream(Fault):
    """The bytes are not the stream of JSON objects that they should be."""


def parse_events(raw: bytes) -> list[str]:
    """The data of each event. A comment or another field is no event; an event that no blank line ends is an error."""
    try:
        text = raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise BadStream(f"not UTF-8 at byte {error.start}: {raw[error.start : error.start + 20]!r}") from None
    *blocks, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n\n")
    if data_of(rest) or rest.rpartition("\n")[2]:
        raise BadStream(f"the stream breaks off inside an event: ...{text[-80:]!r}")
    return ["\n".join(data) for data in map(data_of, blocks) if data]


def data_of(block: str) -> list[str]:
    fields = (line.partition(":") for line in block.split("\n"))
    return [value.removeprefix(" ") for name, _, value in fields if name == "data"]


def parse_chunks(raw: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a stream that ends with ``[DONE]``, and with nothing after it."""
    events = parse_events(raw)
    if not events:
        raise BadStream(f"no event in the answer: {raw[:200]!r}")
    if events[-1] != DONE or DONE in events[:-1]:
        raise BadStream(f"expected {DONE} once, at the end; the last event is {events[-1][:200]!r}")
    chunks = []
    for number, event in enumerate(events[:-1], start=1):
        try:
            chunk = json.loads(event)
        except ValueError as error:
            raise BadStream(f"event {number} is not JSON ({error}): {event[:200]!r}") from None
        if not isinstance(chunk, dict):
            raise BadStream(f"event {number} is no JSON object: {event[:200]!r}")
        if "error" in chunk:
            raise BadStream(f"event {number} is an error: {event[:300]}")
        chunks.append(chunk)
    return chunks
