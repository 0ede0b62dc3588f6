"""A real vLLM, killed, stopped, starved of memory and replaced while clients ask. Needs what ./install.sh leaves."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Iterator
from unittest import mock

import httpx
import pytest
from checkout import Checkout
from docker.models.containers import Container
from watched import await_start, free_port, until

from sparkpin.build.make import checkpoint_of
from sparkpin.core.errors import SmokeError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import launch, service
from sparkpin.serve import served as services
from sparkpin.serve.address import AddressOptions
from sparkpin.serve.launch import FOLDER

RECIPE = "watched"
pytestmark = pytest.mark.slow
GRACE = 1  # seconds until process 1 has ended what is left of a server; vLLM answers 500 for 10 by itself
HOG = """
open("/proc/{engine}/oom_score_adj", "w").write("1000")  # the one that the kernel is to choose
hoard = []
while True:
    hoard.append(b"x" * (64 << 20))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    made = Checkout.make(tmp_path_factory.mktemp("watched") / "copy")
    yield made
    made.invoke("stop", "--recipe", RECIPE)
    made.remove_tags(RECIPE)


@pytest.fixture(scope="module")
def paths(copy: Checkout) -> Paths:
    return dataclasses.replace(Paths.from_env(copy.folder), home=copy.home)


def made_release(copy: Checkout, paths: Paths) -> Release:
    """A release that may be promoted. That it passed is written by hand: smoke tests run elsewhere."""
    copy.done("build", "--recipe", RECIPE)
    records = Releases(paths)
    newest = records.of_recipe(RECIPE)[-1]
    records.update(newest.tag, lambda _: dataclasses.replace(newest, state="passed", smoke={"passed": True}))
    checkpoint_of(paths, newest)
    copy.done("promote", newest.tag)
    return records.get(newest.tag)


@pytest.fixture(scope="module")
def first(copy: Checkout, paths: Paths) -> Release:
    copy.add_recipe(RECIPE, **{"stage: v2-tq": "stage: base"})
    return made_release(copy, paths)


@pytest.fixture(scope="module")
def second(copy: Checkout, paths: Paths, first: Release) -> Release:
    copy.replace(f"recipes/{RECIPE}.yaml", "max_model_len: 2048", "max_model_len: 8192")
    return made_release(copy, paths)


@pytest.fixture(scope="module", autouse=True)
def closely() -> Iterator[None]:
    """A hang is waited for."""
    with mock.patch.multiple(launch, INTERVAL=2, FAILURES=5):
        yield


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def served(paths: Paths, second: Release, port: int) -> services.Served:
    checkpoint = checkpoint_of(paths, second)
    return service.start(paths, Engine.connect(), second, checkpoint, options=AddressOptions(port))


@pytest.fixture
def container(served: services.Served) -> Container:
    return Engine.connect().client.containers.get(served.container)


def body(**more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": "scripted-tiny", "messages": messages, "temperature": 0, **more}


def engine_process(container: Container) -> str:
    """Its number within the container, from the log."""
    return str(re.findall(r"\(EngineCore pid=(\d+)\)", container.logs().decode(errors="replace"))[-1])


class Streams:
    """Four clients that stream all the time. asked: when each request began, and "" or what it lost."""

    def __init__(self, url: str) -> None:
        self.url, self.done, self.asked = f"{url}/chat/completions", threading.Event(), list[tuple[float, str]]()
        self.threads = [threading.Thread(target=self.stream) for _ in range(4)]

    def __enter__(self) -> Streams:
        for thread in self.threads:
            thread.start()
        until(lambda: len(self.asked) > 8)
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        for thread in self.threads:
            thread.join()
        print(f"{len(self.asked)} requests")

    def stream(self) -> None:
        with httpx.Client(trust_env=False, timeout=900) as client:
            while not self.done.is_set():
                began = time.monotonic()
                lost = self.lost(client)
                self.asked.append((began, lost))
                if lost:
                    time.sleep(0.1)  # as a client does: at once again, they would pass the proxy's limit for ever

    def lost(self, client: httpx.Client) -> str:
        more = {"stream": True, "max_tokens": 100, "ignore_eos": True}
        try:
            with client.stream("POST", self.url, json=body(**more)) as reply:
                lines = [line for line in reply.iter_lines() if line]
        except httpx.HTTPError as error:
            return repr(error)
        broken = lines[-1] != "data: [DONE]" or any('"error"' in line for line in lines)
        return "" if reply.status_code == 200 and not broken else f"{reply.status_code}: {lines[-1]}"

    def await_answers(self) -> None:
        """To requests that begin from now on."""
        now = time.monotonic()
        until(lambda: sum(began > now and not lost for began, lost in self.asked) > 8)

    @property
    def losses(self) -> list[tuple[float, str]]:
        return [row for row in self.asked if row[1]]


def test_a_killed_engine_loses_only_what_is_under_way(served: services.Served, container: Container) -> None:
    """Others wait until it is there again."""
    with Streams(served.url) as streams:
        container.exec_run(["python", "-c", f"import os; os.kill({engine_process(container)}, 9)"])
        killed = time.monotonic()
        await_start(container, container.attrs["RestartCount"] + 1, served)
        streams.await_answers()
    assert len(streams.losses) <= 4 and all(began < killed + GRACE for began, _ in streams.losses), streams.losses
    assert b"sparkpin: ended: its engine process has gone" in container.logs()


def test_status_tells_of_a_hang_before_it_is_ended(
    copy: Checkout, served: services.Served, container: Container
) -> None:
    """The engine's process is halted: `/health` goes on answering."""
    restarts = container.attrs["RestartCount"]
    container.exec_run(["python", "-c", f"import os, signal; os.kill({engine_process(container)}, signal.SIGSTOP)"])
    until(lambda: "hangs: " in copy.invoke("status").stdout)
    container.reload()
    assert container.attrs["RestartCount"] == restarts and b"it stopped answering" not in container.logs()
    await_start(container, restarts + 1, served)
    assert b"sparkpin: ended: it stopped answering requests" in container.logs()


def test_a_flag_that_vllm_does_not_know_leaves_the_former_one(
    paths: Paths, served: services.Served, first: Release, second: Release
) -> None:
    bad, options = dataclasses.replace(first, argv=(*second.argv, "--no-such-flag")), AddressOptions(free_port())
    with pytest.raises(SmokeError) as caught:
        service.start(paths, Engine.connect(), bad, checkpoint_of(paths, second), options=options)
    text = str(caught.value)
    assert "error: unrecognized arguments: --no-such-flag" in text
    assert "this vLLM does not know a flag of the recipe" in text
    assert httpx.post(f"{served.url}/chat/completions", json=body(), trust_env=False, timeout=300).status_code == 200


def test_a_switch_a_rollback_and_an_upgrade_lose_no_request(
    copy: Checkout, paths: Paths, first: Release, second: Release, served: services.Served
) -> None:
    """There, back, and back again by `rollback`; then by a sparkpin whose proxy has other settings. 200 requests."""
    with Streams(served.url) as streams:
        for release in (first, second):
            service.start(paths, Engine.connect(), release, checkpoint_of(paths, release))
            streams.await_answers()
        back = copy.invoke("rollback", "--recipe", RECIPE, "--serve")
        streams.await_answers()
        copy.replace("src/sparkpin/serve/proxy.cfg.j2", "nbthread 1", "nbthread 2")
        copy.replace("src/sparkpin/serve/hold.lua", "core.msleep(250)", "core.msleep(200)")
        upgraded = copy.invoke("serve", "--recipe", RECIPE)
        streams.await_answers()
        until(lambda: len(streams.asked) >= 200, 900)
    assert (back.returncode, upgraded.returncode) == (0, 0), back.stderr + upgraded.stderr
    assert f"{first.tag} answers at {served.url}" in back.stdout
    assert streams.losses == []
    proxy = Engine.connect().client.containers.get(served.container + services.PROXY)
    assert b"nbthread 2" in proxy.exec_run(["cat", f"{FOLDER}/haproxy.cfg"]).output
    assert Releases(paths).current_tag(RECIPE) == first.tag
    table = copy.done("status")
    assert first.name in table and "answers" in table


def test_want_of_memory_ends_the_engine_process_and_is_told(copy: Checkout, served: services.Served) -> None:
    container = Engine.connect().client.containers.get(served.container)
    limit = container.attrs["HostConfig"]["Memory"]
    assert 0 < limit < 8 << 30, "the plan's need, and some slack"
    container.exec_run(["python", "-c", HOG.format(engine=engine_process(container))])

    def is_restarted() -> bool:
        container.reload()
        return container.attrs["RestartCount"] >= 1

    until(is_restarted)
    assert re.search(
        rb"sparkpin: ended: the kernel killed \d+ of its processes because memory ran out", container.logs()
    )
    table = copy.done("status")
    assert "that means: it passed its memory limit" in table and f"invoke plan --recipe {RECIPE}" in table
