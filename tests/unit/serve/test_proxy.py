"""The proxy's HAProxy before stand-ins for vLLM on Unix sockets. tests/adversary does it with vLLM itself."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import fake_vllm
import httpx
import proxy_trials
import pytest
from certificates import certificate
from heard import heard
from made_releases import release
from proxied import HEADERS, KEY, ORDER, Site, site_in, until

from sparkpin.core.paths import Paths
from sparkpin.releases import inside
from sparkpin.serve import proxy
from sparkpin.serve.address import Address, Limits, read_tls

BODY = {"model": "scripted-tiny", "prompt": "x"}
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_in(tmp_path) as made:
        yield made


def ask(client: httpx.Client) -> int:
    return client.post("/v1/completions", json=BODY).status_code


def test_no_trial_reaches_the_server(site: Site) -> None:
    site.server()
    site.start(Limits(per_second=10**6, idle=1))
    tried = list(proxy_trials.trials(KEY))
    through = [trial.why for trial in tried if not proxy_trials.refused(proxy_trials.sent(site.port, trial.raw))]
    assert through == [] and site.seen == []


def test_what_agents_need_is_answered_and_nothing_of_the_client_goes_on(site: Site) -> None:
    site.server()
    client = site.start()
    for path in ("/v1/models", "/metrics", "/health"):
        assert client.get(path).status_code == 200, path
    headers = {"X-Request-Id": "1", "X-Data-Parallel-Rank": "1", "priority": "1", "X-Forwarded-For": "10.0.0.1"}
    assert client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    assert client.post("/v1/completions", json=BODY, headers={"Authorization": "", "x-api-key": KEY}).status_code == 401
    with httpx.Client(base_url=client.base_url, trust_env=False) as other:
        assert other.post("/v1/completions", json=BODY, headers={"x-api-key": KEY}).status_code == 200
        assert other.get("/health").status_code == 200 and other.get("/v1/models").status_code == 401
        assert other.get("/v1/models", headers={"Authorization": f"bearer  {KEY}"}).status_code == 200
    kept = str({"host": "server", "x-forwarded-for": "client"})
    assert site.seen and not [line for line in site.seen if not line.endswith(kept)]


def test_without_a_key_the_table_counts_and_the_host_is_this_machine(site: Site) -> None:
    site.server()
    client = site.start(key=None, allow=("/pooling",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_vllm, "kind_of", lambda path, body: path)
        assert client.post("/pooling", json=BODY).status_code == 200
        assert client.post("/score", json=BODY).status_code == 404
    for host in ("localhost:1", "[::1]:1", "evil.example", "127.0.0.1.evil", ""):
        status = client.get("/health", headers={"Host": host}).status_code
        assert status == (200 if host.endswith(":1") else 403), host
    assert client.post("/v1/completions", content="{}", headers={"Content-Type": "text/plain"}).status_code == 415


def test_with_a_certificate_there_is_tls_and_nothing_else(site: Site, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path / "own")
    site.server()
    plain = site.start(Limits(idle=2), tls=read_tls(cert, key))
    with pytest.raises(httpx.RemoteProtocolError):
        plain.get("/health")
    trust = ssl.create_default_context(cafile=cert)
    with httpx.Client(base_url=f"https://127.0.0.1:{site.port}", headers=HEADERS, trust_env=False, verify=trust) as own:
        assert ask(own) == 200
        with proxy_trials.opened(site.port, b"") as silent:
            assert proxy_trials.ended(silent), "a handshake that does not begin"


def test_what_is_too_large_or_too_slow_is_refused(site: Site) -> None:
    site.server()
    client = site.start(Limits(body=50_000, idle=1))
    chunked = {"Content-Type": "application/json"}
    assert client.post("/v1/completions", json={"prompt": "x" * 50_000}).status_code == 413
    assert client.post("/v1/completions", content=iter([b'{"prompt":"x', b'"}']), headers=chunked).status_code == 200
    assert client.post("/v1/completions", content=iter([b"x" * 600] * 80), headers=chunked).status_code == 411
    for slow in ("", "GET /v1/mod", "GET /v1/models HTTP/1.1\r\nHost: x\r\nA: b"):
        with proxy_trials.opened(site.port, slow.encode()) as link:
            assert link.recv(65536)[:12] in (b"", b"HTTP/1.1 408") and proxy_trials.ended(link)
    with proxy_trials.opened(site.port, f"{HEAD}Content-Length: 9\r\n\r\n".encode()) as link:
        assert link.recv(12) == b"HTTP/1.1 408"


def test_a_large_body_comes_without_a_pause(site: Site) -> None:
    """curl waits a second for 100 Continue."""
    site.server()
    site.start()
    with proxy_trials.opened(site.port, f"{HEAD}Content-Length: 2\r\nExpect: 100-continue\r\n\r\n".encode()) as link:
        assert link.recv(65536).startswith(b"HTTP/1.1 100 ")
        link.sendall(b"{}")
        assert link.recv(12) == b"HTTP/1.1 200"


def test_one_address_gets_its_share_and_all_together_theirs(site: Site) -> None:
    go = threading.Event()
    site.server(lambda path: None if path == "/health" else (go.wait(60) and None))
    for limits, status in ((Limits(per_client=2), 429), (Limits(requests=2), 503)):
        client = site.start(limits)
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(client.post, "/v1/completions", json=BODY) for _ in range(3)]
            until(lambda: any(one.done() for one in asked))  # noqa: B023
            go.set()
            replies = sorted((one.result() for one in asked), key=lambda reply: reply.status_code)
        assert [reply.status_code for reply in replies] == [200, 200, status]
        assert replies[2].headers["Retry-After"] == "5"
        assert ask(client) == 200
        go.clear()
    go.set()
    client = site.start(Limits(per_second=5))
    for _ in range(20):
        assert client.get("/health").status_code == 200 and client.get("/none").status_code == 404
    assert ask(client) == 200, "what was refused, and looks at the health, do not count"
    assert 429 in {ask(client) for _ in range(20)}
    site.start(Limits(client_connections=2))
    with ExitStack() as links:
        for _ in range(2):
            links.enter_context(proxy_trials.opened(site.port, b""))
        with pytest.raises(ConnectionResetError):
            links.enter_context(proxy_trials.opened(site.port, b" " * 9)).recv(1)


def test_a_client_that_goes_away_ends_its_request(site: Site) -> None:
    gone = threading.Event()
    made = site.server()
    client = site.start()

    def for_ever(kind: str, reply: fake_vllm.Reply) -> fake_vllm.Reply:
        return 200, fake_vllm.STREAM, b"data: x\n\n" * 1000 + b"<trickle>"

    made.fault = for_ever  # type: ignore[method-assign]
    watch(made, gone)
    with client.stream("POST", "/v1/completions", json=BODY) as reply:
        assert next(reply.iter_raw()).startswith(b"d")
    assert gone.wait(30)


def watch(server: fake_vllm.UnixServer, gone: threading.Event) -> None:
    stock = server.shutdown_request

    def shutdown(request: Any) -> None:
        gone.set()
        stock(request)

    server.shutdown_request = shutdown  # type: ignore[method-assign]


def trickles(server: fake_vllm.UnixServer) -> None:
    server.fault = lambda kind, reply: (200, fake_vllm.STREAM, b"0123456789" * 4 + b"<trickle>")  # type: ignore[method-assign]


def under_way(site: Site) -> str:
    return site.ask_proxy("show stat server 2 -1").splitlines()[1].split(",")[4]


def test_a_stream_comes_part_by_part_while_the_gate_is_shut_and_others_wait(site: Site) -> None:
    trickles(made := site.server())
    client = site.start()
    with client.stream("POST", "/v1/completions", json=BODY) as reply, ThreadPoolExecutor() as pool:
        parts = reply.iter_raw()
        first = next(parts)
        site.shut()
        made.fault = lambda kind, reply: reply  # type: ignore[method-assign]
        waits = pool.submit(ask, client)
        assert client.get("/health").status_code == 503, "who looks is answered at once"
        assert len(first) < 40 and first + b"".join(parts) == b"0123456789" * 4 + b"<trickle>"
        until(lambda: under_way(site) == "0")
        assert not waits.done()
        site.shut("")
        assert waits.result() == 200


def test_a_stream_that_is_broken_off_has_no_end(site: Site) -> None:
    trickles(site.server())
    client = site.start()
    with client.stream("POST", "/v1/completions", json=BODY) as reply:
        next(parts := reply.iter_raw())
        site.ask_proxy("shutdown sessions server server/s")
        with pytest.raises(httpx.RemoteProtocolError):
            list(parts)


def test_requests_wait_for_a_server(site: Site) -> None:
    client = site.start(Limits(hold=60))
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask, client) for _ in range(4)]
        time.sleep(0.5)
        assert client.get("/health").status_code == 503, "who looks is answered at once"
        site.server()
        assert [one.result() for one in asked] == [200] * 4


def test_a_request_waits_as_long_as_a_start_of_the_release_may_take(tmp_path: Path) -> None:
    """By its smoke test; not less than a slow disk takes for the weights, and ten minutes at most."""
    weights = tmp_path / "model.safetensors"
    weights.touch()
    held = []
    for seconds, size in ((None, 0), (0.3, 0), (150.0, 0), (80.0, 40 * 10**9), (500.0, 0)):
        os.truncate(weights, size)
        made = replace(release(1), smoke={"ready_seconds": seconds})
        held.append(proxy.hold_for(made, tmp_path))
    assert held == [600, 300, 450, 500, 600] and proxy.hold_for(made, tmp_path, drain=30) == 600
    assert proxy.hold_for(replace(release(1), smoke={"ready_seconds": 80.0}), tmp_path, drain=30) == 330
    for limits, wanted in ((Limits(), 320), (Limits(hold=7), 7)):
        order = replace(ORDER, address=Address(limits=limits), hold=320)
        assert f"wait_for_server {wanted} " in order.files[proxy.CONFIG].decode()


def connections(site: Site) -> int:
    """Of clients; HAProxy's `scur`."""
    return int(site.ask_proxy("show stat clients 1 -1").splitlines()[1].split(",")[4])


def test_no_request_waits_for_ever_and_none_for_a_server_that_stays_down(site: Site) -> None:
    client = site.start(Limits(hold=1))
    reply = client.post("/v1/completions", json=BODY)
    assert (reply.status_code, reply.headers["Retry-After"]) == (503, "5")
    client = site.start(Limits(hold=600))
    with socket.socket() as gone, ThreadPoolExecutor() as pool:
        gone.connect(("127.0.0.1", site.port))
        gone.sendall(f"{HEAD}Content-Length: 2\r\n\r\n{{}}".encode())
        asked = pool.submit(ask, client)
        until(lambda: connections(site) == 2)
        gone.close()
        until(lambda: connections(site) == 1)
        site.say(inside.DOWN)
        assert asked.result() == 503


def test_a_server_that_breaks_off_is_told(site: Site) -> None:
    made = site.server()
    client = site.start()
    made.fault = lambda kind, reply: (200, fake_vllm.JSON, b'{"half": <reset>')  # type: ignore[method-assign]
    with pytest.raises(httpx.RemoteProtocolError):
        client.post("/v1/completions", json=BODY)
    made.fault = lambda kind, reply: (500, fake_vllm.JSON, b"{}")  # type: ignore[method-assign]
    assert client.post("/v1/completions", json=BODY).headers["Retry-After"] == "5"

    def closes(kind: str, reply: fake_vllm.Reply) -> fake_vllm.Reply:
        raise ConnectionResetError

    made.fault = closes  # type: ignore[method-assign]
    with httpx.Client(base_url=client.base_url, headers=HEADERS, trust_env=False) as other:
        reply = other.post("/v1/completions", json=BODY)
        assert (reply.status_code, reply.headers["Retry-After"]) == (502, "5")


def test_a_test_of_an_image_without_haproxy_asks_its_server_and_says_so() -> None:
    lines = heard()
    container: Any = Mock(exec_run=lambda _: SimpleNamespace(exit_code=127))
    server: Any = SimpleNamespace(release=SimpleNamespace(tag="t"), containers={container: None})
    client: Any = SimpleNamespace()
    serving = contextlib.nullcontext((server, client))
    with proxy.before(Paths(Path(), Path(), Path()), serving) as found:
        assert found == (server, client)
    assert len(lines) == 1 and lines[0].startswith("proxy skipped: t ")
