"""The front, in this process, before a stand-in for vLLM on a Unix socket. tests/adversary does it with vLLM itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_vllm
import front_trials
import httpx
import pytest
from certificates import certificate

from sparkpin.serve import front, rules
from sparkpin.serve.rules import Limits

KEY = "k" * 43
HEADERS = {"Authorization": f"Bearer {KEY}"}
BODY = {"model": "scripted-tiny", "prompt": "x"}


class Site:
    """A front that listens, and what reached the server behind it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack, self.seen = folder, stack, list[str]()

    def start(self, limits: Limits | None = None, allow: tuple[str, ...] = (), key: str | None = KEY) -> httpx.Client:
        settings = {"limits": asdict(limits or Limits()), "allow": allow}
        (self.folder / rules.SETTINGS).write_text(json.dumps(settings))
        (self.folder / rules.UPSTREAM).write_text("a")
        if key:
            (self.folder / rules.KEY).write_text(key)
        self.port = self.stack.enter_context(listening(self.folder))
        base = f"http://127.0.0.1:{self.port}"
        return self.stack.enter_context(httpx.Client(base_url=base, headers=HEADERS, trust_env=False, timeout=60))

    def server(self, name: str, reply: Callable[[str], None] = len) -> fake_vllm.UnixServer:
        """A server whose socket lies there. reply: does what it does before each answer."""
        (self.folder / name).mkdir()

        class Handler(fake_vllm.Handler):
            def reply(handler, body: dict[str, Any]) -> None:
                self.seen.append(f"{name} {handler.command} {handler.path} {handler.headers.get('Authorization')}")
                reply(handler.path)
                super().reply(body)

        made = fake_vllm.UnixServer(str(self.folder / name / rules.SOCKET), Handler)
        self.stack.enter_context(fake_vllm.serving(made))
        return made


@contextmanager
def listening(folder: Path) -> Iterator[int]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)  # a front that does not begin leaves it
    thread.start()

    async def listen() -> tuple[front.Front, asyncio.Server]:
        made = front.Front(folder, folder)
        return made, await front.listen(made, 0)

    async def close() -> None:
        server.close()
        for session in made.sessions.values():
            await session.close()
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    made, server = asyncio.run_coroutine_threadsafe(listen(), loop).result()
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        asyncio.run_coroutine_threadsafe(close(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_blank_key_opens_nothing(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(ValueError, match="blank key"):
        Site(tmp_path, stack).start(key=" \n")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(tmp_path, stack)


def test_no_trial_reaches_the_server(site: Site) -> None:
    site.server("a")
    site.start(Limits(per_second=10**6, idle=1))
    tried = list(front_trials.trials(KEY))
    through = [trial.why for trial in tried if not front_trials.refused(front_trials.sent(site.port, trial.raw))]
    assert through == [] and site.seen == []


def test_what_agents_need_is_answered_and_the_key_stays_here(site: Site) -> None:
    site.server("a")
    client = site.start()
    for path, method in rules.PATHS.items():
        if path in ("/v1/models", "/v1/completions", "/metrics", rules.OPEN):
            asked = client.request(method, path, json=BODY if method == "POST" else None)
            assert asked.status_code == 200, path
    asked = client.post("/v1/completions?beta=true", json=BODY, headers={"Authorization": "", "x-api-key": KEY})
    assert asked.status_code == 401, "a header that is there has to be right"
    with httpx.Client(base_url=client.base_url, trust_env=False) as other:
        assert other.post("/v1/completions", json=BODY, headers={"x-api-key": KEY}).status_code == 200
        assert other.get("/health").status_code == 200 and other.get("/v1/models").status_code == 401
    assert site.seen and not [line for line in site.seen if not line.endswith(" None")]


def test_without_a_key_the_table_counts_and_more_is_opened_by_name(site: Site) -> None:
    site.server("a")
    client = site.start(key=None, allow=("/pooling",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_vllm, "kind_of", lambda path, body: path)
        assert client.post("/pooling", json=BODY).status_code == 200
        assert client.post("/score", json=BODY).status_code == 404


def test_with_a_certificate_there_is_tls_and_nothing_else(site: Site, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path / "own")
    site.server("a")
    shutil.copy(cert, tmp_path / rules.CERT)
    shutil.copy(key, tmp_path / rules.TLS_KEY)
    plain = site.start(Limits(client_connections=3))
    with pytest.raises(httpx.RemoteProtocolError):
        plain.get("/health")
    trust = ssl.create_default_context(cafile=cert)
    with httpx.Client(base_url=f"https://127.0.0.1:{site.port}", headers=HEADERS, trust_env=False, verify=trust) as own:
        assert own.post("/v1/completions", json=BODY).status_code == 200
        with ExitStack() as links:  # one is `own`; the others begin no handshake, and count all the same
            silent = [links.enter_context(front_trials.opened(site.port, b"")) for _ in range(3)]
            silent[0].settimeout(5)  # a handshake has 10 s
            assert front_trials.ended(silent[0])
            assert own.get("/health").status_code == 200


def test_what_is_too_large_or_too_slow_is_refused(site: Site) -> None:
    site.server("a")
    client = site.start(Limits(body=1000, idle=1))
    assert client.post("/v1/completions", json={"prompt": "x" * 1000}).status_code == 413
    assert client.post("/v1/completions", content=iter([b"x" * 600] * 2)).status_code == 413
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n\r\n"
    for slow in ("", "GET /v1/mod", "GET /v1/models HTTP/1.1\r\nHost: x\r\nA: b"):
        with front_trials.opened(site.port, slow.encode()) as link:
            assert link.recv(1) == b"", "closed"
    with front_trials.opened(site.port, head.encode()) as link:
        assert link.recv(12) == b"HTTP/1.1 408"


def test_bodies_take_room_as_they_come(site: Site) -> None:
    site.server("a")
    client = site.start(Limits(body=1000))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 1000\r\n\r\n"
    with ExitStack() as links:
        for _ in range(20):
            links.enter_context(front_trials.opened(site.port, head.encode()))
        assert client.post("/v1/completions", json=BODY).status_code == 200
        made = [links.enter_context(front_trials.opened(site.port, head.encode() + b" " * 990)) for _ in range(5)]
        assert made[-1].recv(12) == b"HTTP/1.1 503"
        assert client.post("/v1/completions", json=BODY | {"x": "x" * 100}).status_code == 503
        for link in made:
            link.close()
        until(lambda: client.post("/v1/completions", json=BODY).status_code == 200)


def test_one_address_gets_its_share_and_all_together_theirs(site: Site) -> None:
    go = threading.Event()
    site.server("a", lambda path: path == "/health" or (go.wait(60) and None))
    limits = Limits(per_client=2, requests=2)
    client = site.start(limits)
    statuses: list[tuple[int, str | None]] = []

    def ask() -> None:
        reply = client.post("/v1/completions", json=BODY)
        statuses.append((reply.status_code, reply.headers.get("Retry-After")))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(statuses) == 1)
    go.set()
    for thread in threads:
        thread.join()
    assert sorted(statuses, key=str) == [(200, None), (200, None), (429, "5")]
    assert client.post("/v1/completions", json=BODY).status_code == 200

    few = replace(limits, per_client=9, per_second=3)
    with httpx.Client(base_url=f"http://127.0.0.1:{again(site, few)}", headers=HEADERS, trust_env=False) as other:
        assert 429 in {other.get("/health").status_code for _ in range(20)}
    with ExitStack() as links:
        port = again(site, replace(limits, client_connections=2))
        made = [links.enter_context(front_trials.opened(port, b"")) for _ in range(3)]
        made[0].settimeout(30)
        assert front_trials.ended(made[0])


def test_who_shows_no_key_keeps_nobody_out(site: Site) -> None:
    """From three addresses, as many connections as there may be, silent and refused ones."""
    site.server("a")
    limits = Limits(connections=12, client_connections=10, per_second=10**6)
    client = site.start(limits)
    assert client.get("/v1/models").status_code == 200
    with ExitStack() as links:
        made = []
        for number in range(60):
            words = b"" if number % 2 else b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
            source = (f"127.0.0.{2 + number % 3}", 0) if number < 40 else ("127.0.0.1", 0)
            link = links.enter_context(socket.create_connection(("127.0.0.1", site.port), 30, source))
            link.sendall(words)
            made.append(link)
            if number % 10 == 9:  # a new connection from the address of some of them, and one that is kept
                assert again_by(site.port) == 200 == client.get("/v1/models").status_code
        assert front_trials.ended(made[1]), "the oldest"
        for link in made:
            link.settimeout(0.01)
        assert len([link for link in made if is_open(link)]) <= limits.connections


def is_open(link: socket.socket) -> bool:
    try:
        while link.recv(65536):
            pass
    except TimeoutError:
        return True
    except ConnectionResetError:
        pass
    return False


def again_by(port: int) -> int:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS, trust_env=False, timeout=60) as other:
        return other.post("/v1/completions", json=BODY).status_code


def test_refusals_take_a_line_a_second_and_no_answer_names_its_server(
    site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "time", SimpleNamespace(monotonic=lambda: 7.0))  # all are of one second
    site.server("a")
    client = site.start()
    answers = [client.get("/none") for _ in range(9)] + [client.get("/v1/models")]
    assert not [reply for reply in answers if "server" in reply.headers]
    bad = front_trials.opened(site.port, b"GET  /x HTTP/1.1\r\n\r\n")
    with bad as link:
        assert b"400 Bad" in (said := link.recv(65536)) and b"aiohttp" not in said
    assert capsys.readouterr().out.count("/none") == 1


def again(site: Site, limits: Limits) -> int:
    site.start(limits)
    return site.port


def test_a_client_that_goes_away_ends_its_request(site: Site) -> None:
    began, gone = threading.Event(), threading.Event()
    made = site.server("a", lambda path: began.set())
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


def test_a_stream_comes_part_by_part_and_a_switch_breaks_none(site: Site) -> None:
    old, _ = site.server("a"), site.server("b")
    client = site.start()
    old.fault = lambda kind, reply: (200, fake_vllm.STREAM, b"0123456789" * 4 + b"<trickle>")  # type: ignore[method-assign]
    with client.stream("POST", "/v1/completions", json=BODY) as reply:
        parts = reply.iter_raw()
        first = next(parts)
        (site.folder / rules.UPSTREAM).write_text("b")
        assert client.post("/v1/completions", json=BODY).json()["choices"]
        assert len(first) < 40 and first + b"".join(parts) == b"0123456789" * 4 + b"<trickle>"
    (site.folder / rules.UPSTREAM).write_text("")
    assert client.post("/v1/completions", json=BODY).status_code == 200
    assert [line[0] for line in site.seen] == ["a", "b", "b"], "what is being written is not read"


def test_a_server_that_is_away_or_breaks_off_is_told(site: Site) -> None:
    client = site.start()
    reply = client.post("/v1/completions", json=BODY)
    assert (reply.status_code, reply.headers["Retry-After"]) == (503, "5")
    made = site.server("a")
    made.fault = lambda kind, reply: (200, fake_vllm.JSON, b'{"half": <reset>')  # type: ignore[method-assign]
    with pytest.raises(httpx.RemoteProtocolError):
        client.post("/v1/completions", json=BODY)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
