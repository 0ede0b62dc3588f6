"""A service of a real vLLM: many slow, idle and unsteady clients, and `serve` and `smoke` killed at any moment.

These clients come by an address of this machine that is not 127.0.0.1, and to the proxy they have that address. Beside
them one who has the key asks by 127.0.0.1, which is another one to it. Times are those of a warm server: what comes
late is tried again, since other work may be to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from kills import Victim
from request_trials import HELLO, MODEL
from watched import free_port, until

from benchmarks.scripted_tiny.scripts import CHAT
from sparkpin.core.files import PARTIAL
from sparkpin.core.paths import Paths
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import service
from sparkpin.serve.address import key_path
from sparkpin.serve.served import PROXY, name_of, status
from sparkpin.smoke.server import containers_of, prefix

pytestmark = pytest.mark.slow

ADDRESS = "192.0.2.1"  # for documentation (RFC 5737): nobody has it
IDLE = 5  # seconds, as the proxy allows here
SECONDS, TRIES = 2.0, 3
GENERATING = 10.0  # beside others for whom it generates, on cores that other tests have, too; a stall takes longer
CANCELS, SLOW, OPEN = 200, 500, 2500
MOVES, STARTS, SMOKES = 6, 3, 3  # kills
BODY = {"model": MODEL, "messages": HELLO, "temperature": 0}
CONTROL = BODY | {"max_tokens": 40}
STREAM = BODY | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
NOBODY = (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError)


@dataclass
class Site:
    """A service that others may reach."""

    paths: Paths
    engine: Engine
    stages: dict[str, Release]
    port: int

    def line(self, *words: str, seconds: float = 0) -> Victim:
        return Victim(words, {"SPARKPIN_HOME": str(self.paths.home)}, seconds)

    def serve(self, port: int) -> Victim:
        return self.line("serve", self.stages["base"].tag, "--port", str(port))

    @property
    def key(self) -> str:
        return key_path(self.paths, MODEL).read_text().strip()

    @property
    def parts(self) -> list[Container]:
        """The server first."""
        filters = {"label": f"sparkpin.home={self.paths.home}"}
        found = self.engine.client.containers.list(all=True, filters=filters, ignore_removed=True)
        return sorted(found, key=lambda container: str(container.name))

    def ask(self, key: str, port: int = 0) -> int:
        """The status; 0 where nobody is there."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            reply = httpx.post(
                f"http://127.0.0.1:{port or self.port}/v1/chat/completions", json=CONTROL, headers=headers, timeout=60
            )
        except NOBODY:
            return 0
        if reply.status_code == 200:
            assert reply.json()["choices"][0]["message"]["content"] == CHAT.expected_content
        return reply.status_code

    def control(self) -> float:
        begin = time.monotonic()
        assert self.ask(self.key) == 200
        return time.monotonic() - begin

    def crowd(self, act: Callable[[], Coroutine[Any, Any, Counter[str]]]) -> tuple[Counter[str], float]:
        """What came of those others, and the slowest control beside them."""
        slowest = 0.0
        with ThreadPoolExecutor(1) as pool:
            others = pool.submit(asyncio.run, act())
            while not others.done():
                slowest = max(slowest, self.control())
        return others.result(), slowest

    def stood(self, act: Callable[[], Coroutine[Any, Any, Counter[str]]], seconds: float = SECONDS) -> Counter[str]:
        limit = max(seconds, 10 * statistics.median(self.control() for _ in range(5)))
        for _ in range(TRIES):
            found, slowest = self.crowd(act)
            print(f"{dict(found)}, slowest control {slowest:.2f} s of {limit:.1f} s")
            if slowest <= limit:
                break
        assert slowest <= limit
        return found


@pytest.fixture(scope="module")
def site(main_job: Releases, stages: dict[str, Release], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, before[1]), before[1]))
    paths, engine = replace(main_job.paths, home=tmp_path_factory.mktemp("service")), Engine.connect()
    for name in ("releases", "images", "inputs", "checkpoints"):
        shutil.copytree(main_job.paths.home / name, paths.home / name)
    made = Site(paths, engine, stages, free_port())
    subprocess.run(["ip", "addr", "replace", f"{ADDRESS}/32", "dev", "lo"], check=True)
    try:
        options = ("--host", "0.0.0.0", "--limit", f"per_second=1000000,idle={IDLE},hold=1")
        begin = made.serve(made.port)
        replace(begin, line=[*begin.line, *options]).done()
        yield made
    finally:
        service.stop(paths, engine, None)
        subprocess.run(["ip", "addr", "del", f"{ADDRESS}/32", "dev", "lo"], check=True)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_cancelled_streams(site: Site, record_property: Callable[[str, object], None]) -> None:
    """Each after its first part: its request ends in the server, too."""

    async def cancelled() -> Counter[str]:
        found = Counter[str]()
        headers = {"Authorization": f"Bearer {site.key}"}
        limits = asyncio.Semaphore(3)  # the server answers four at a time
        async with httpx.AsyncClient(base_url=f"http://{ADDRESS}:{site.port}", headers=headers, timeout=60) as http:

            async def cancel() -> None:
                async with limits, http.stream("POST", "/v1/chat/completions", json=STREAM) as reply:
                    found[str(reply.status_code)] += 1
                    await anext(reply.aiter_raw())

            await asyncio.gather(*(cancel() for _ in range(CANCELS)))
        return found

    assert site.stood(cancelled, GENERATING) == {"200": CANCELS}

    def under_way() -> float:
        url, headers = f"http://127.0.0.1:{site.port}/metrics", {"Authorization": f"Bearer {site.key}"}
        text = httpx.get(url, headers=headers, timeout=60).text
        return sum(map(float, re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)", text, re.MULTILINE)))

    until(lambda: under_way() == 0, 60)
    record_property("trials", CANCELS)


def test_slow_clients(site: Site, record_property: Callable[[str, object], None]) -> None:
    """Who has the key, and sends a body byte by byte, gets its share of requests for as long as a body may take."""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {site.key}\r\nContent-Length: 999\r\n"
        "Content-Type: application/json\r\n"
    )

    async def slow() -> Counter[str]:
        found = Counter[str]()

        async def send() -> None:
            reader, writer = await asyncio.open_connection(ADDRESS, site.port)
            writer.write(f"{head}\r\n".encode())
            answer = asyncio.create_task(reader.read(12))
            with contextlib.suppress(OSError):
                while not answer.done():
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.wait([answer], timeout=0.5)
            try:
                found[(await answer).decode() or "closed"] += 1
            except OSError:
                found["closed"] += 1
            writer.close()

        await asyncio.gather(*(send() for _ in range(SLOW)))
        return found

    found = site.stood(slow)
    assert found.total() == SLOW and set(found) <= {"HTTP/1.1 408", "HTTP/1.1 429", "closed"} and found["HTTP/1.1 408"]
    record_property("trials", SLOW)


async def closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until the server has closed it. Where the kernel dropped the client's last packet of the handshake (its queue was
    full), the client alone believes in a connection: ConnectionResetError, once it sends a byte."""
    end = asyncio.create_task(reader.read(1))
    if not (await asyncio.wait([end], timeout=60))[0]:
        writer.write(b" ")
    await asyncio.wait_for(end, 30)


def test_idle_connections(site: Site, record_property: Callable[[str, object], None]) -> None:
    """They ask nothing: one address holds its share of them for a while, the others are closed at once."""

    async def idle() -> Counter[str]:
        found = Counter[str]()
        gate = asyncio.Semaphore(100)
        begin = time.monotonic()

        async def hold() -> None:
            try:
                async with gate:
                    reader, writer = await asyncio.open_connection(ADDRESS, site.port)
                opened = time.monotonic()
                await closed(reader, writer)
            except ConnectionError:
                found["refused"] += 1
                return
            found["held" if time.monotonic() - opened > 1 else "closed at once"] += 1
            writer.close()

        await asyncio.wait_for(asyncio.gather(*(hold() for _ in range(OPEN))), 120)
        print(f"{OPEN} connections in {time.monotonic() - begin:.0f} s")
        return found

    found = site.stood(idle)
    assert found.total() == OPEN and found["held"]
    record_property("trials", OPEN)


def coherent(site: Site, ports: set[int]) -> None:
    """At each port the release answers to the key alone, or nobody does."""
    for port in ports:
        assert site.ask("", port) in (401, 503, 0) and site.ask("wrong", port) in (401, 503, 0)
        assert site.ask(site.key, port) in (200, 503, 0)


def test_killed_while_the_proxy_is_replaced(site: Site, record_property: Callable[[str, object], None]) -> None:
    first, ports = site.parts[0], (site.port, free_port())
    moves, back = site.serve(ports[1]), site.serve(ports[0])
    moves.done()
    back.done()
    for _ in moves.kills(MOVES, back.done):
        coherent(site, set(ports))
        back.done()
        assert site.ask(site.key) == 200 and site.ask("") == 401 and site.ask("", ports[1]) == 0
        assert [part.name for part in site.parts] == [first.name, f"{first.name}{PROXY}"]
        assert site.parts[0].id == first.id, "the server goes on"
    record_property("trials", MOVES)


def test_killed_while_another_release_is_started(site: Site, record_property: Callable[[str, object], None]) -> None:
    other, back = site.line("serve", site.stages["hybrid"].tag, seconds=8), site.serve(site.port)
    for _ in other.kills(STARTS):
        coherent(site, {site.port})
        back.done()
        assert site.ask(site.key) == 200 and site.ask("") == 401
        [server, front] = site.parts
        assert server.labels["sparkpin.release"] == site.stages["base"].tag and front.name == f"{server.name}{PROXY}"
    record_property("trials", STARTS)


def test_killed_smoke_tests(site: Site, record_property: Callable[[str, object], None]) -> None:
    records, release = Releases(site.paths), site.stages["base"]
    evidence = records.evidence(release) / "smoke"

    def known() -> tuple[Release, dict[str, bytes]]:
        return records.get(release.tag), {path.name: path.read_bytes() for path in evidence.iterdir()}

    before, smoke = known(), site.line("smoke", release.tag, seconds=10)
    for _ in smoke.kills(SMOKES):
        assert known() == before and not records.readable(release.recipe)[1]
        assert len(containers_of(site.paths, site.engine)) <= 1
        assert site.ask(site.key) == 200, "what is served has nothing to do with it"
    smoke.done()
    assert records.get(release.tag).smoke_passed and known() != before
    assert containers_of(site.paths, site.engine) == [] and not list(site.paths.work.glob(f"{prefix(site.paths)}*"))
    assert not list(site.paths.home.rglob(f"{PARTIAL}*"))
    record_property("trials", SMOKES)


def test_no_key_and_no_privilege_has_leaked(site: Site) -> None:
    """After all of the above."""
    assert name_of(site.paths, MODEL) == site.parts[0].name
    places = {"status": repr(status(site.engine))}
    for part in site.parts:
        host, name = part.attrs["HostConfig"], str(part.name)
        image = site.engine.client.images.get(part.attrs["Image"])
        told: dict[str, Any] = {"inspect": part.attrs, "image": image.attrs, "history": image.history()}
        told |= {"processes": part.top(ps_args="-eo pid,args"), "changes": part.diff()}
        places |= {f"{name} {what}": json.dumps(value) for what, value in told.items()}
        places[f"{name} log"] = part.logs().decode(errors="replace")
        assert (host["Privileged"], host["CapDrop"], host["ReadonlyRootfs"]) == (False, ["ALL"], True)
        assert host["CapAdd"] in (None, []) and "no-new-privileges:true" in host["SecurityOpt"]
        self = part.exec_run(["python", "-c", "print(open('/proc/1/status').read())"]).output.decode()
        assert re.search(r"^Uid:\s+10001\s", self, re.MULTILINE) and re.search(r"^NoNewPrivs:\s+1$", self, re.MULTILINE)
        assert re.findall(r"^Cap(?:Eff|Prm|Bnd|Inh|Amb):\s+(\w+)$", self, re.MULTILINE) == ["0" * 16] * 5
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            places[str(line)] = line.read_bytes().decode(errors="replace")
    for root in (site.paths.home, *site.paths.work.glob(f"{prefix(site.paths)}*")):
        places |= {str(file): file.read_bytes().decode("latin-1") for file in root.rglob("*") if file.is_file()}
    found = [place for place, text in places.items() if site.key in text]
    assert found == [str(key_path(site.paths, MODEL))], "in its own file, and so the search finds it"
    print(f"looked for in {len(places)} places")
