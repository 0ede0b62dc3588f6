"""Plain HTTP to a server, over a Unix socket or TCP; every exchange is recorded as it went over the wire."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import httpx

from sparkpin.core.errors import InputError
from sparkpin.smoke.replies import Exchange, Fault, Reply

MAX_BYTES = 16 << 20  # no answer asked for here comes near; a server that babbles on must not fill the memory

OWN_HOSTS = ("127.0.0.1", "::1", "localhost")  # this machine


def bearer(key: str | None) -> dict[str, str]:
    """The header; without a key none. InputError, which does not repeat it, for a key that no header may hold."""
    if key and not re.fullmatch("[!-~]+", key):
        raise InputError(
            "the key: got a space, a line's end or a character beyond ASCII in it, expected none",
            next_step="set its variable anew, without them: NAME=$(tr -d '[:space:]' <FILE)",
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


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
        return cls(httpx.Client(transport=transport, base_url="http://server"), timeout=timeout, close=[folder])

    @classmethod
    def tcp(cls, host: str, port: int, *, timeout: float = 120, key: str | None = None, tls: bool = False) -> Client:
        """tls: of a server of this machine, whose certificate is for names that others use: it is not checked."""
        address = f"[{host}]" if ":" in host else host
        headers = bearer(key)
        base = f"http{'s' if tls else ''}://{address}:{port}"
        http = httpx.Client(base_url=base, headers=headers, trust_env=False, verify=False)
        return cls(http, timeout=timeout)

    @classmethod
    def url(cls, url: str, *, timeout: float = 120, key: str | None = None) -> Client:
        """Of anybody's server, with or without the /v1 at its end. Of one of this machine as `tcp`; of another the
        certificate is checked, and proxies are used."""
        headers = bearer(key)
        base = url.rstrip("/").removesuffix("/v1")
        far = httpx.URL(base).host not in OWN_HOSTS
        return cls(httpx.Client(base_url=base, headers=headers, trust_env=far, verify=far), timeout=timeout)

    def __exit__(self, *_: object) -> None:
        self._http.close()
        while self._close:
            os.close(self._close.pop())

    def get(self, path: str) -> Reply:
        return self._send("GET", path, None)

    def post(self, path: str, body: dict[str, Any], *, timeout: float | None = None) -> Reply:
        return self._send("POST", path, body, timeout)

    def abandon(self, path: str, body: dict[str, Any]) -> None:
        """Go away after the first bytes of an answer, as a person does who presses Stop."""
        start = time.monotonic()
        try:
            with self._stream("POST", path, body, self.timeout) as response:
                received = next(response.iter_raw(), b"")
                status, kind = response.status_code, response.headers.get("content-type", "")
        except httpx.HTTPError as error:
            raise Fault(f"POST {path}: {type(error).__name__}: {error}") from None
        why = "broken off by the test"
        self.exchanges.append(Exchange("POST", path, body, status, kind, received, time.monotonic() - start, why))
        if status != 200:
            raise Fault(f"POST {path}: status {status}")

    def healthy(self) -> bool:
        """Whether /health answers within a few seconds, if only that too many ask. Not recorded."""
        try:
            return self._http.get("/health", timeout=5).status_code in (200, 429)
        except httpx.HTTPError:
            return False

    def _stream(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> contextlib.AbstractContextManager[httpx.Response]:
        content = (
            None if body is None else json.dumps(body, ensure_ascii=False).encode(errors="replace")
        )  # half an emoji
        headers = {"Accept-Encoding": "identity"} | ({} if body is None else {"Content-Type": "application/json"})
        return self._http.stream(method, path, content=content, headers=headers, timeout=timeout)

    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout: float | None = None) -> Reply:
        """`timeout` bounds the whole exchange, not each read: a server that trickles on is cut off too."""
        start, timeout = time.monotonic(), timeout or self.timeout
        status, content_type, received, fault, first = None, "", bytearray(), "", None
        try:
            with self._stream(method, path, body, timeout) as response:
                status, content_type = response.status_code, response.headers.get("content-type", "")
                for part in response.iter_raw():
                    first = first or time.monotonic() - start
                    received += part
                    if len(received) > MAX_BYTES:
                        raise Fault(f"the answer is longer than {MAX_BYTES} bytes")
                    if time.monotonic() - start > timeout:
                        raise Fault(f"the answer did not end within {timeout:g} s")
        except httpx.TimeoutException:
            fault = f"no answer within {timeout:g} s"
        except httpx.HTTPError as error:
            fault = f"{type(error).__name__}: {error}"
        except Fault as error:
            fault = str(error)
        self.exchanges.append(
            Exchange(method, path, body, status, content_type, bytes(received), time.monotonic() - start, fault, first)
        )
        if fault or status is None:
            raise Fault(f"{method} {path}: {fault}")
        return Reply(status, content_type, bytes(received))
