"""The front of a server: a reverse proxy in a container of its own, on the aiohttp of the release's image.

The server's container has no network. It listens on a Unix socket in a volume that both share, and what of it can be
asked, by whom and how much at a time stands in `rules`. No key, address or name of a client reaches the server.

The host says in the file `upstream` whose socket is asked, and may change that at any time: requests under way stay
with the server that has them, so that a switch from one to the next loses none.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from sparkpin.serve.rules import CERT, KEY, OPEN, PATHS, PORT, SETTINGS, SOCKET, TLS_KEY, UPSTREAM, Limits

BODIES = 8  # of the greatest size, held at a time; of one address half as many
RETRY_SECONDS = "5"
HANDSHAKE_SECONDS = 10
BACKLOG = 1024  # of connections not yet taken; past it the kernel may forget one whose client believes that it stands
PASSED = ("Accept", "Content-Type")  # others choose a rank, a priority or the name of a request
KEPT_BACK = frozenset(  # of an answer: what belongs to one connection (RFC 9110, 7.6.1), or is ours to say
    {"connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer", "transfer-encoding"}
    | {"upgrade", "date", "server"}
)


class Refused(Exception):
    """A request that is not passed on."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Listener(socket.socket):
    """Takes no more connections than the limits allow, in all and of one address. Those whose TLS handshake has not
    ended count, too, which no protocol sees.

    strangers: those that no request has been let through by. They keep nobody out: where there is no room, one of them
    goes, the oldest of the address that has most.
    """

    def __init__(self, limits: Limits, port: int, strangers: dict[Any, None]) -> None:
        super().__init__(socket.AF_INET, socket.SOCK_STREAM)
        self.limits, self.taken, self.strangers = limits, dict[Any, socket.socket](), strangers
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(("0.0.0.0", port))
        self.setblocking(False)

    def accept(self) -> tuple[socket.socket, Any]:
        """ConnectionAbortedError, which asyncio takes for a client that has gone, where it is one too many."""
        made, peer = super().accept()
        self.taken = {name: one for name, one in self.taken.items() if one.fileno() >= 0}
        for gone in self.strangers.keys() - self.taken.keys():
            del self.strangers[gone]
        names = Counter(map(address, self.taken))
        own = names[address(peer)] >= self.limits.client_connections
        if (own or names.total() >= self.limits.connections) and not self.made_room(address(peer) if own else None):
            made.close()
            raise ConnectionAbortedError
        self.taken[peer], self.strangers[peer] = made, None
        return made, peer

    def made_room(self, name: str | None) -> bool:
        """Whether a stranger has gone, of that address; None: of any."""
        names = Counter(map(address, self.strangers))
        most = name or max(names, key=names.__getitem__, default=None)
        oldest = next((peer for peer in self.strangers if address(peer) == most), None)
        if oldest is None:
            return False
        del self.strangers[oldest]
        with contextlib.suppress(OSError):
            self.taken.pop(oldest).shutdown(socket.SHUT_RDWR)  # its protocol sees an end, and closes it
        return True


class Connections(web.Server):
    """Those that are open; none that asks nothing stays.

    aiohttp closes those that are idle after an answer; its 3.14.0 does not before a first request.
    """

    def __init__(self, front: Front) -> None:
        self.idle, self.silent = front.limits.idle, dict[web.RequestHandler, asyncio.TimerHandle]()
        super().__init__(
            front.handle,
            request_factory=self.heard,
            handler_cancellation=True,  # a client that goes away ends its request in the server
            keepalive_timeout=front.limits.idle,
            auto_decompress=False,
            access_log=None,
        )

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.silent[handler] = asyncio.get_running_loop().call_later(self.idle, transport.abort)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        self.is_heard(handler)
        super().connection_lost(handler, exc)

    def is_heard(self, handler: web.RequestHandler) -> None:
        if timer := self.silent.pop(handler, None):
            timer.cancel()

    def heard(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        """A request has come, with its headers."""
        self.is_heard(protocol)
        return Request(message, payload, protocol, writer, task, asyncio.get_running_loop())


class Request(web.BaseRequest):
    async def _prepare_hook(self, response: web.StreamResponse) -> None:
        """aiohttp's last call before an answer's headers go."""
        response.headers.pop("Server", None)


def address(peer: Any) -> str:
    return str(peer[0]) if peer else ""


class Front:
    """folder: what the host has put there; sockets: a folder for each server."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        settings = json.loads((folder / SETTINGS).read_text())
        self.folder, self.sockets = folder, sockets
        self.limits = Limits(**settings["limits"])
        self.paths = {path: {method} for path, method in PATHS.items()}
        self.paths |= {path: {"GET", "POST"} for path in settings["allow"]}
        self.key = (folder / KEY).read_text().strip() if (folder / KEY).exists() else None
        if self.key == "":
            raise ValueError(f"{folder / KEY}: a blank key would open the server")
        self.under_way, self.begun, self.held = Counter[str](), Counter[str](), Counter[str]()
        self.second = self.told = self.untold = 0
        self.strangers = dict[Any, None]()
        self.server, self.sessions = "", dict[str, aiohttp.ClientSession]()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        peer = address(request.transport.get_extra_info("peername")) if request.transport else ""
        self.under_way[peer] += 1
        taken = Counter[str]()
        if "Upgrade" in request.headers:  # to nothing; its parser waits for another protocol all the same
            request.protocol.close()
        try:
            self.require_allowed(request, peer)
            if request.method != "POST":
                return await self.pass_on(request, peer, None)
            return await self.pass_on(request, peer, await self.body_of(request, peer, taken))
        except Refused as refused:
            self.tell(f"{peer} {request.method} {request.raw_path[:200]!r}: {refused.status}, {refused}")
            return answer(refused)
        finally:
            self.under_way[peer] -= 1
            self.under_way, self.held = +self.under_way, self.held - taken  # without those who have none

    def tell(self, line: str) -> None:
        """A line a second at most, so that nobody floods the log; the others are counted."""
        if (second := int(time.monotonic())) == self.told:
            self.untold += 1
            return
        print(f"{line}{f' ({self.untold} more before)' if self.untold else ''}", flush=True)
        self.told, self.untold = second, 0

    def require_allowed(self, request: web.BaseRequest, peer: str) -> None:
        """The path is compared as it was sent: no other way of writing it is known here, so none can lead elsewhere."""
        if (second := int(time.monotonic())) != self.second:
            self.second, self.begun = second, Counter()
        self.begun[peer] += 1
        path = request.raw_path.partition("?")[0]
        if self.begun[peer] > self.limits.per_second or self.under_way[peer] > self.limits.per_client:
            raise Refused(429, "too many requests of this address")
        opened = request.method == "GET" and request.raw_path == OPEN
        if self.key and not opened and not self.has_key(request):
            raise Refused(401, "expected the API key, as Authorization: Bearer or x-api-key")
        if path not in self.paths:
            raise Refused(404, "no such path here (`invoke serve --allow PATH` opens one)")
        if request.method not in self.paths[path]:
            raise Refused(405, f"expected {' or '.join(sorted(self.paths[path]))}")
        if self.under_way.total() > self.limits.requests:
            raise Refused(503, "too many requests at a time")
        if request.transport and not (self.key and opened):
            self.strangers.pop(request.transport.get_extra_info("peername"), None)

    def has_key(self, request: web.BaseRequest) -> bool:
        """Of several headers each must be right: a proxy before this one may have looked at another."""
        said = [text.partition(" ") for text in request.headers.getall("Authorization", [])]
        given = [key.strip() if scheme.lower() == "bearer" else "" for scheme, _, key in said]
        given += request.headers.getall("x-api-key", [])
        wanted = hashlib.sha256((self.key or "").encode()).digest()
        right = [hmac.compare_digest(hashlib.sha256(key.encode(errors="replace")).digest(), wanted) for key in given]
        return bool(right) and all(right)

    async def body_of(self, request: web.BaseRequest, peer: str, taken: Counter[str]) -> bytes:
        if (request.content_length or 0) > self.limits.body:
            raise Refused(413, f"expected a body of at most {self.limits.body} bytes")
        if "Content-Encoding" in request.headers:
            raise Refused(415, "expected a body that is not compressed")
        try:
            async with asyncio.timeout(self.limits.idle):
                return b"".join([part async for part in self.parts_of(request, peer, taken)])
        except TimeoutError:
            raise Refused(408, f"the body did not come within {self.limits.idle} s") from None
        except web.RequestPayloadError as error:
            raise Refused(400, f"expected a body as its headers say ({str(error)[:100]})") from None

    async def parts_of(self, request: web.BaseRequest, peer: str, taken: Counter[str]) -> AsyncIterator[bytes]:
        """Of its body, as they come: what is only announced takes no room. taken: gets the bytes, for this address."""
        async for part in request.content.iter_any():
            taken[peer] += len(part)
            self.held[peer] += len(part)
            if taken[peer] > self.limits.body:
                raise Refused(413, f"expected a body of at most {self.limits.body} bytes")
            if max(2 * self.held[peer], self.held.total()) > BODIES * self.limits.body:
                raise Refused(503, "too many large requests at a time")
            yield part

    def upstream(self) -> aiohttp.ClientSession:
        """To the server that the host has named. It is about to be written where it says nothing."""
        with contextlib.suppress(OSError):
            self.server = (self.folder / UPSTREAM).read_text().strip() or self.server
        if self.server not in self.sessions:
            self.sessions[self.server] = aiohttp.ClientSession(
                # A connection for each request: one that is kept may be closed as it is used again.
                connector=aiohttp.UnixConnector(str(self.sockets / self.server / SOCKET), limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.limits.idle),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
            )
        return self.sessions[self.server]

    async def pass_on(self, request: web.BaseRequest, peer: str, body: bytes | None) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in PASSED if name in request.headers and body is not None}
        url = URL(f"http://server{request.raw_path}", encoded=True)
        reply = None
        try:
            async with self.upstream().request(
                request.method,
                url,
                data=body,
                headers=headers | {"X-Forwarded-For": peer},  # for the server's log, and no more
                allow_redirects=False,
            ) as said:
                reply = web.StreamResponse(status=said.status, reason=said.reason)
                for name, value in said.headers.items():
                    if name.lower() not in KEPT_BACK:
                        reply.headers.add(name, value)
                await reply.prepare(request)
                async for part in said.content.iter_any():
                    async with asyncio.timeout(self.limits.idle):
                        await reply.write(part)
                await reply.write_eof()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if reply is None:
                status = 503 if isinstance(error, aiohttp.ClientConnectorError) else 502
                why = "the server is starting, or down" if status == 503 else "the server broke off"
                raise Refused(status, why) from None
            if request.transport:
                request.transport.abort()  # what has come is no whole answer, and must not look like one
        return reply


def answer(refused: Refused) -> web.Response:
    """As OpenAI's API writes an error."""
    error = {"message": str(refused), "type": "front", "code": refused.status}
    retry = {"Retry-After": RETRY_SECONDS} if refused.status in (429, 503) else {}
    return web.json_response({"error": error}, status=refused.status, headers=retry)


async def listen(front: Front, port: int) -> asyncio.Server:
    limits, context = front.limits, None
    if (front.folder / CERT).exists():
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(front.folder / CERT, front.folder / TLS_KEY)
    seconds = min(HANDSHAKE_SECONDS, limits.idle) if context else None
    return await asyncio.get_running_loop().create_server(
        Connections(front),
        sock=Listener(limits, port, front.strangers),
        backlog=BACKLOG,
        ssl=context,
        ssl_handshake_timeout=seconds,
    )


async def serve(folder: Path, sockets: Path) -> None:
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await listen(Front(folder, sockets), PORT)
    print("sparkpin: the front listens", flush=True)
    await ended.wait()


def main(folder: str, sockets: str) -> None:
    asyncio.run(serve(Path(folder), Path(sockets)))
