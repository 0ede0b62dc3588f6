"""Requests of an enemy at the proxy, as data. They are sent byte by byte, without a library that would mend them.

ROUTES: every route in vLLM 0.32's and 0.33's sources that rules.yaml does not open.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

SAID = """
/abort_requests /classify /cohere/v2/chat /cohere/v2/chat/render /collective_rpc /detokenize /docs
/docs/oauth2-redirect /inference/v1/abort_requests /v1/decisions
/fault_tolerance/apply /fault_tolerance/status /finish_weight_update /generative_scoring /get_world_size
/inference/v1/generate /init_weight_transfer_engine /invocations /is_paused /is_scaling_elastic_ep /is_sleeping
/kv_event_sources /load /openapi.json /pause /ping /pooling /ready /readyz /redoc /release_kv_cache_memory /rerank
/reset_encoder_cache /reset_mm_cache /reset_prefix_cache /resume /scale_elastic_ep /score /server_info
/shutdown_weight_transfer_engine /sleep /start_draft_weight_update /start_profile /start_weight_update /stop_profile
/tokenizer_info /update_weight_version /update_weights /v1/audio/transcriptions /v1/audio/translations
/v1/chat/completions/batch /v1/chat/completions/derender /v1/chat/completions/render /v1/completions/derender
/v1/completions/render /v1/embeddings /v1/load_lora_adapter /v1/messages/render /v1/realtime /v1/rerank
/v1/responses/render /v1/responses/resp_1 /v1/responses/resp_1/cancel /v1/score /v1/systemone
/v1/unload_lora_adapter /v2/embed /v2/rerank /wake_up /weight_checker /weight_info
"""
ROUTES = SAID.split()
OPENED = ("/metrics", "/version", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/messages")
OPENED += ("/v1/messages/count_tokens", "/v1/responses", "/tokenize")
TRICKS = (
    *("//invocations", "/invocations/", "/INVOCATIONS", "/./invocations", "/v1/../invocations", "/%69nvocations"),
    *("/v1/models/../../invocations", "/health/../invocations", "/health/", "/health/x", "//health", "/HEALTH"),
    *("/health%00", "/health%2f..%2finvocations", "/health;/invocations", "/health/..;/invocations", "/health%20"),
    *("/health#/invocations", "/health?x=1", "/health%3f", "\\invocations", "/\\invocations", "/v1\\models"),
    *("/v1//models", "/v1/models/", "/v1/models/x", "/v1%2fmodels", "/V1/models", "/v1/models%00", "/v1/models;a=b"),
    *("/v1/./models", "/v1/models/.", "/v1/models/..", "/v1/chat//completions", "/v1/chat/completions/", "/v1"),
    *("http://server/invocations", "http://server/health", "https://server/v1/models", "//server/v1/models", "*", "x"),
    *("server:443", "/ｈealth", "/health\u2025", "/v1/models\u0000", "/%2e%2e/invocations", "/..%c0%af/invocations"),
    *("/" + "a" * 9000, "/" + "../" * 500 + "invocations", "/v1/models?" + "x" * 9000),
)
METHODS = ("HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "PROPFIND", "get", "GETT", "G\x00T", "PRI")
KEYS = (  # what a client without the key may say instead; KEY is the right one
    *({"Authorization": text} for text in ("", "Bearer", "Bearer ", "Bearer wrong", "Bearer KEYx", "Basic KEY", "KEY")),
    *({"Authorization": text} for text in ("Bearer KEY KEY", "BearerKEY", "Bearer,KEY", "Bearer null", "Digest KEY")),
    *({"x-api-key": text} for text in ("", "wrong", "KEYx", "Bearer KEY", "key")),
    {"Authorization": "Bearer KEY", "x-api-key": "wrong"},
    {"Authorization": "Bearer wrong", "x-api-key": "KEY"},
    *({name: "/health"} for name in ("X-Original-URL", "X-Rewrite-URL", "X-Forwarded-Path", "X-Forwarded-Prefix")),
    *({"X-Forwarded-For": text} for text in ("127.0.0.1", "::1", "10.0.0.1, 127.0.0.1")),
    *({name: "127.0.0.1"} for name in ("X-Real-IP", "Forwarded", "Client-IP", "True-Client-IP", "X-Client-IP")),
    *({"Host": text} for text in ("localhost", "127.0.0.1", "server", "", "a b")),
    *({"X-HTTP-Method-Override": text} for text in ("GET", "HEAD")),
    *({"Cookie": text} for text in ("key=KEY", "Authorization=Bearer KEY")),
    {"Connection": "Authorization"},
    {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"},
    {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2-Settings": "AAMAAABkAARAAAAAAAIAAAAA"},
    {"Authorization ": "Bearer KEY"},
    {"Proxy-Authorization": "Bearer KEY"},
)
BODY = json.dumps({"model": "scripted-tiny", "prompt": "The sky is blue and", "max_tokens": 1}).encode()
HIDDEN = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
END = b"GET /none HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
FRAMES = (  # more than one idea of where a request ends; what is hidden in them is asked for nobody
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nContent-Length: {len(HIDDEN)}\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1_0\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\n Content-Length: 5\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nA: b\nContent-Length: 5\r\n\r\n",
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc",
    "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "GET /metrics\r\n",
    "GET  /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /metrics HTTP/1.1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "GET /metrics HTTP/9.9\r\nHost: x\r\n\r\n",
    "GET /metrics HTTP/1.1\rHost: x\r\n\r\n",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
)


@dataclass(frozen=True)
class Trial:
    """raw: the bytes; why: what it tries; keyed: whether it has the right key."""

    raw: bytes
    why: str
    keyed: bool


def request(method: str, path: str, headers: Iterable[tuple[str, str]] = ()) -> bytes:
    body = BODY if method == "POST" else b""
    given = [("Host", "server"), ("Content-Type", "application/json"), ("Content-Length", str(len(body))), *headers]
    names = {name for name, _ in headers}
    lines = [f"{name}: {value}" for name, value in given if name != "Host" or "Host" not in names or value != "server"]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + body


def trials(key: str) -> Iterator[Trial]:
    """Each is to be refused, and to reach no server."""
    right = (("Authorization", f"Bearer {key}"),)
    for method in ("GET", "POST"):
        for path in (*ROUTES, *TRICKS):
            if path.partition("?")[0] not in (*OPENED, "/health"):  # a query alone is no trick to one who has the key
                yield Trial(request(method, path, right), f"{method} {path[:60]} with the key", True)
        for path in (*ROUTES, *TRICKS, *OPENED):
            yield Trial(request(method, path), f"{method} {path[:60]} without a key", False)
    for method in METHODS:
        for path in (*OPENED, "/health", "/invocations"):
            yield Trial(request(method, path, right), f"{method} {path} with the key", True)
            yield Trial(request(method, path), f"{method} {path} without a key", False)
    yield Trial(request("POST", "/health"), "POST /health", False)
    for headers in KEYS:
        said = [(name, value.replace("KEY", key)) for name, value in headers.items()]
        for method, path in (("POST", "/v1/completions"), ("POST", "/invocations"), ("GET", "/metrics")):
            yield Trial(request(method, path, said), f"{method} {path}, {headers}", False)
    for frame in FRAMES:
        yield Trial(frame.encode("latin-1") + HIDDEN, f"{frame[:100]!r} without a key", False)


def sent(port: int, raw: bytes) -> list[int]:
    """The status of each answer on one connection, up to that of a request which ends it. The connection stays open
    both ways until then: a client that has gone gets no answer, and nothing would be tried."""
    said = b""
    with opened(port, raw + END) as link, contextlib.suppress(ConnectionError, TimeoutError):
        link.settimeout(3)  # some end within a request, and the proxy waits for the rest of it
        while data := link.recv(65536):
            said += data
    return [int(code) for code in re.findall(rb"^HTTP/1\.[01] (\d{3}) ", said, re.MULTILINE)]


@contextlib.contextmanager
def opened(port: int, raw: bytes) -> Iterator[socket.socket]:
    """A connection on which that was sent, and no more comes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
        link.sendall(raw)
        yield link


def ended(link: socket.socket) -> bool:
    """Whether the other side has closed it; TimeoutError if it says nothing."""
    try:
        return link.recv(1) == b""
    except ConnectionResetError:
        return True


def refused(statuses: list[int]) -> bool:
    return bool(statuses) and all(400 <= status < 500 for status in statuses)
