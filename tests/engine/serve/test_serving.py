"""What watches a server: crash, hang, want of memory, the key, and what a killed run leaves; on a real engine, with a
stand-in for vLLM whose faults are real ones. tests/e2e/serve/test_serving_vllm.py does it with vLLM itself."""

from __future__ import annotations

import dataclasses
import json
import re
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import TYPE_CHECKING

import docker.errors
import httpx
import pytest
from docker.models.containers import Container
from heard import heard
from watched import await_start, free_port, signal_processes, until

from sparkpin.cli import serve as clients
from sparkpin.core.errors import DownError, SmokeError, SparkpinError
from sparkpin.host.engine import Engine
from sparkpin.releases import container as running
from sparkpin.releases import inside
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import (
    crash_facts,
    launch,
    linked,
    logs,
    memory_limit,
    proxy,
    service,
    status,
    switching,
)
from sparkpin.serve import served as services
from sparkpin.serve.address import Limits
from sparkpin.serve.clients import how_to_ask
from sparkpin.serve.launch import SOCKETS
from sparkpin.serve.linked import Part
from sparkpin.serve.memory_limit import Room

if TYPE_CHECKING:
    from fake_release import FakeSite  # pytest loads it itself, below

pytest_plugins = ["fake_release"]
TWICE = "restarts=2"


def watch_closely(monkeypatch: pytest.MonkeyPatch, failures: int = 2) -> None:
    monkeypatch.setattr(launch, "INTERVAL", 1)
    monkeypatch.setattr(launch, "FAILURES", failures)


def test_a_crash_and_a_hang_end_in_a_new_start_and_the_last_one_in_a_post_mortem(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch_closely(monkeypatch, failures=3)
    served = site.start(port=site.port, host="127.0.0.2", limit=TWICE)
    container = site.engine.client.containers.get(served.container)
    check = container.attrs["Config"]["Healthcheck"]
    assert check["Test"][0] == "CMD" and check["Test"][-1] == "health" and check["Retries"] == 2
    await_start(container, 0, served)
    signal_processes(container, "vllm serve", "KILL")
    await_start(container, 1, served)
    assert b"sparkpin: ended by signal 9 (SIGKILL)" in container.logs()
    logs.logs(site.paths, site.engine, "fake", lines=2, follow=False)
    assert crash_facts.REPORT in capsys.readouterr().err, "it answers again, and its death is not forgotten"

    with httpx.Client(trust_env=False, timeout=60) as client:
        client.post(f"{served.url}/completions", json={"prompt": "hang"})
        assert client.get(f"http://127.0.0.2:{site.port}/health").status_code == 200, (
            "as vLLM's, while its engine hangs"
        )

    def healths() -> list[str]:
        every = services.status(site.engine)  # also of other homes, whose servers may be ill at this time
        return [one.health for one in every if one.home == str(site.paths.home) and one.restarts == 1]

    until(lambda: healths() == ["unhealthy"], 60)
    with pytest.raises(DownError, match="hangs: failure"):
        status.status(site.paths, site.engine, as_json=True)
    await_start(container, 2, served)
    assert b"sparkpin: ended: it stopped answering requests" in container.logs()

    signal_processes(container, "vllm serve", "KILL")  # once more than it may be started again
    until(lambda: not services.is_running(site.engine.client.containers.get(served.container)))
    capsys.readouterr()
    with pytest.raises(DownError, match=f"{site.release.tag} is down: the server "):
        status.status(site.paths, site.engine, as_json=False)
    told = capsys.readouterr().out
    assert "failed too often and stays down; Docker started it again 2 times" in told
    assert "that means: a process of the server was killed from outside" in told
    assert re.search(r"memory now: .* GB of .* GB available, the server's limit is ", told)
    logs.logs(site.paths, site.engine, "fake", lines=2, follow=False)
    assert capsys.readouterr().out.splitlines()[-1] == "sparkpin: stays down: it has been started again 2 times"
    with httpx.Client(trust_env=False, timeout=60) as client:
        down = client.post(f"{served.url}/completions", json={"prompt": "x"})
    assert (down.status_code, down.headers["Retry-After"]) == (503, "5")
    anew = site.start()  # which removes the container that has the evidence
    kept = crash_facts.folder_of(site.paths, "fake", site.release.name) / crash_facts.REPORT
    assert "killed from outside" in kept.read_text()
    assert (anew.restarts, anew.address.host, anew.address.port) == (0, "127.0.0.2", site.port), "at its address"
    status.status(site.paths, site.engine, as_json=False)


def test_a_followed_log_goes_on_over_a_restart_and_ends_with_the_server(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch_closely(monkeypatch)
    served, out = site.start(port=site.port), list[str]()
    container = site.engine.client.containers.get(served.container)

    def starts() -> int:
        out.append(capsys.readouterr().out)
        return "".join(out).count("Application startup complete")

    follow = Thread(target=logs.logs, args=(site.paths, Engine.connect(), "fake"), kwargs={"lines": 99, "follow": True})
    follow.start()
    until(lambda: starts() == 1)
    signal_processes(container, "vllm serve", "KILL")
    await_start(container, 1, served)
    until(lambda: starts() == 2)
    said = heard()
    service.stop(site.paths, site.engine, None)
    assert any("stopped while healthy" in line and crash_facts.REPORT in line for line in said)
    follow.join(60)
    assert not follow.is_alive() and starts() == 2 and "ended by signal 9" in "".join(out)


def test_what_passes_its_memory_limit_is_ended_and_says_so(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "room_for", lambda *_: Room(256 << 20, None))
    greedy = site.faulty("memory")
    with pytest.raises(SmokeError) as caught:
        site.start(greedy, port=site.port)
    text = str(caught.value)
    assert "exited with 137" in text and "the kernel killed 1 of its processes because memory ran out" in text
    assert "that means: it passed its memory limit" in text and "what to do: invoke plan --recipe fake" in text
    assert "the server's limit is 268.4 MB" in text


def test_a_server_that_would_leave_the_machine_no_memory_is_ended_and_says_so(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 256 MiB more than are left above the reserve; its limit is far higher."""
    monkeypatch.setattr(memory_limit, "room_for", lambda *_: Room(2 << 30, None))
    monkeypatch.setattr(running, "floor_of", lambda _: memory_limit.available() - (256 << 20))
    with pytest.raises(SmokeError) as caught:
        site.start(site.faulty("memory"), port=site.port)
    text = str(caught.value)
    assert f"exited with {inside.NO_RESERVE}" in text
    assert "the machine was about to run out of memory" in text and "invoke plan --recipe fake" in text


def test_a_key_is_wanted_from_others_and_shown_to_nobody(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    served = site.start(port=site.port, host="0.0.0.0")
    file = site.paths.home / "keys/fake"
    key = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(key) == 43
    container = site.engine.client.containers.get(served.container)
    front = site.engine.client.containers.get(served.container + services.PROXY)
    for part in (container, front):
        assert key not in json.dumps(part.attrs) and key.encode() not in part.logs()
        assert key not in json.dumps(part.top(ps_args="-eo pid,args"))
    body = {"model": served.model, "prompt": "x"}
    with httpx.Client(trust_env=False, timeout=60) as client:
        assert client.post(f"{served.url}/completions", json=body).status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert client.post(f"{served.url}/completions", json=body, headers=headers).status_code == 200
    assert str(file) in how_to_ask(site.paths, served)[1]
    Releases(site.paths).save(site.release)
    capsys.readouterr()
    clients.facts_of_server(site.paths, None)
    assert f"export SPARKPIN_API_KEY=$(cat {file})" in capsys.readouterr().err
    clients.facts_of_server(site.paths, None, key="SPARKPIN_API_KEY")
    assert capsys.readouterr().err == ""
    assert site.start() == served, "left alone"
    file.unlink()
    anew = site.start()
    assert file.read_text().strip() != key and anew.started == served.started
    assert httpx.post(f"{served.url}/completions", json=body, headers=headers, trust_env=False).status_code == 401


@pytest.mark.parametrize("name", ["say", "look", "fault_of"])
def test_ctrl_c_leaves_the_server_to_start(site: FakeSite, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From the word "started" on; also while its address is asked."""
    whole = getattr(switching, name)

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(switching, name, whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(switching, name, interrupted)
    with pytest.raises(switching.Detached, match=f"start.* {site.release.tag}"):
        site.start(port=site.port)
    container = services.find(site.engine, services.name_of(site.paths, "fake"))
    assert container is not None and container.attrs["HostConfig"]["RestartPolicy"]["Name"] == "on-failure"
    said = heard()
    assert site.start().ready
    assert said[0] == f"{site.release.tag} already runs as {container.name}"


def test_ctrl_c_while_the_former_one_ends_brings_it_back(
    site: FakeSite, newer: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker has asked it to end by then."""
    served, stop = site.start(port=site.port), Container.stop

    def interrupted(container: Container, **options: object) -> None:
        monkeypatch.setattr(Container, "stop", stop)
        container.kill(signal="SIGTERM")
        raise KeyboardInterrupt

    monkeypatch.setattr(Container, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        site.start(newer)
    until(lambda: [one.ready for one in services.status(site.engine) if one.home == served.home] == [True])
    assert services.running_release(site.paths, site.engine, "fake") == site.release.tag
    assert parts_of(site) == [served.container, served.container + services.PROXY]


def labels_of(record: services.Service, release: Release) -> dict[str, str]:
    return {**record.orders[0].labels, services.RELEASE_LABEL: release.tag}


LEFT = ("noted", "gone", "made", "proxy gone", "proxy made", "gate shut")


@pytest.mark.parametrize("left", LEFT)
def test_what_a_killed_run_leaves_is_put_right(site: FakeSite, newer: Release, left: str) -> None:
    """Of a switch. By the next `serve`, which trusts nothing that was made and never started; nothing of it stays after
    `stop`."""
    containers, home = site.engine.client.containers, site.paths.home
    served = site.start(port=site.port)
    server, front = containers.get(served.container), containers.get(served.container + services.PROXY)
    record = services.read(home, "fake")
    wanted = dataclasses.replace(record.orders[0], release=newer, labels=labels_of(record, newer))
    services.write(home, "fake", record.model_copy(update={"orders": (wanted,), "former": record}))
    if left in ("gone", "made"):
        server.remove(force=True, v=True)
    if left in ("proxy gone", "proxy made"):
        front.remove(force=True, v=True)
    if left == "made":
        made_like(site.engine, server, served.container)
    elif left == "proxy made":
        made_like(site.engine, front, served.container + services.PROXY)
    elif left == "gate shut":
        running.put(front, launch.FOLDER, {proxy.GATE: b"wait"})
    again = site.start()
    assert again.ready and (again.container, again.address.port) == (served.container, served.address.port)
    assert (again.started == served.started) == (left not in ("gone", "made"))
    assert parts_of(site) == [served.container, served.container + services.PROXY]
    service.stop(site.paths, site.engine, None)
    assert parts_of(site) == []
    with pytest.raises(docker.errors.NotFound):
        site.engine.client.volumes.get(served.container)


@pytest.mark.parametrize("early", [False, True])
def test_what_a_killed_switch_was_from_answers_where_the_next_does_not(
    site: FakeSite, newer: Release, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not there any more, but in the record. early: the next one is not even made."""
    served = site.start(port=site.port)
    record = services.read(site.paths.home, "fake")
    wanted = dataclasses.replace(record.orders[0], release=newer, labels=labels_of(record, newer))
    services.write(site.paths.home, "fake", record.model_copy(update={"orders": (wanted,), "former": record}))
    site.engine.client.containers.get(served.container).remove(force=True, v=True)
    if early:
        monkeypatch.setattr(switching.Switch, "end_old", fail)
    with pytest.raises(SmokeError):
        site.start(dataclasses.replace(newer, env={"FAKE_VLLM": "exit"}), port=free_port())
    until(lambda: switching.fault_of(served, None) == "")
    assert services.running_release(site.paths, site.engine, "fake") == served.release


def made_like(engine: Engine, container: Container, name: str) -> None:
    """One with its labels that does nothing and was never started."""
    engine.client.containers.create(container.attrs["Config"]["Image"], ["true"], name=name, labels=container.labels)


def parts_of(site: FakeSite) -> list[str]:
    return sorted(str(container.name) for container in site.containers())


@pytest.mark.parametrize("moves", [False, True])
def test_one_that_nobody_reaches_leaves_the_former_one(
    site: FakeSite, newer: Release, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the new one stays when it answers within, and not at its address."""
    served = site.start(port=site.port)
    monkeypatch.setattr(switching, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(switching, "fault_of", lambda *_: "a firewall")
    with pytest.raises(SmokeError, match="answers within its container, and not at"):
        site.start(newer, port=free_port() if moves else None)
    monkeypatch.undo()
    until(lambda: switching.fault_of(served, None) == "")
    assert parts_of(site) == [served.container, served.container + services.PROXY]


def test_a_switch_loses_no_request(site: FakeSite, newer: Release) -> None:
    """What is under way gets its answer from the server that has it; what comes meanwhile waits."""
    old, done = site.start(port=site.port), threading.Event()

    def ask(words: str) -> int:
        return post(f"{old.url}/completions", words)

    def ask_on() -> set[int]:
        found = set()
        while not done.is_set():
            found.add(ask("x"))
        return found

    with ThreadPoolExecutor() as pool:
        slow = pool.submit(ask, "slow")
        front = site.engine.client.containers.get(old.container + services.PROXY)
        until(lambda: proxy.requests_under_way(front) == 1)
        others = [pool.submit(ask_on) for _ in range(3)]
        try:
            new = site.start(newer)
        finally:
            done.set()
        assert slow.done() and slow.result() == 200 and ask("x") == 200
        assert [other.result() for other in others] == [{200}] * 3
    assert new.container == old.container and new.started != old.started


def test_what_does_not_end_within_the_drain_is_broken_off(site: FakeSite, newer: Release) -> None:
    """Nobody waits for a request that hangs, and vLLM itself would."""
    old = site.start(port=site.port)
    with ThreadPoolExecutor() as pool:
        assert post(f"{old.url}/completions", "hang") == 200
        hung = pool.submit(post, f"{old.url}/completions", "x")
        time.sleep(1)
        assert site.start(newer, drain=1).ready
        assert hung.result() in (502, 503)


def test_other_settings_break_no_request(site: FakeSite) -> None:
    """The proxy's container stays."""
    old = site.start(port=site.port)
    front = site.engine.client.containers.get(old.container + services.PROXY)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(post, f"{old.url}/completions", "slow")
        until(lambda: proxy.requests_under_way(front) == 1)
        new = site.start(limit="body=1000", allow="/score")
        assert not slow.done() and proxy.requests_under_way(front) == 1, "also of a worker from before"
        assert slow.result() == 200
    assert (new.address.allow, new.address.limits) == (("/score",), Limits(body=1000))
    until(lambda: post(f"{new.url}/completions", "x" * 1000) == 413)
    assert site.engine.client.containers.get(front.name).id == front.id
    front.kill()
    assert proxy.requests_under_way(front) is None, "which is not quiet"


def post(url: str, prompt: str) -> int:
    return httpx.post(url, json={"prompt": prompt}, trust_env=False, timeout=120).status_code


def test_a_switch_that_is_broken_off_while_requests_end_leaves_the_former_one(
    site: FakeSite, newer: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits then is answered."""
    old = site.start(port=site.port)
    with ThreadPoolExecutor() as pool:
        asked = []

        def broken_off(*_: object) -> None:
            asked.append(pool.submit(post, f"{old.url}/completions", "x"))
            time.sleep(1)
            assert not asked[0].done(), "it waits for the next server"
            raise KeyboardInterrupt

        monkeypatch.setattr(switching, "wait_quiet", broken_off)
        with pytest.raises(KeyboardInterrupt):
            site.start(newer)
        assert asked[0].result() == 200
    assert parts_of(site) == [old.container, old.container + services.PROXY]
    assert site.start() == old


@pytest.mark.parametrize("bad", [False, True])
def test_a_switch_that_nobody_waits_for_keeps_the_former_one_until_the_next_answers(
    site: FakeSite, newer: Release, bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command again ends it."""
    old = site.start(port=site.port)
    wanted = dataclasses.replace(newer, env={"FAKE_VLLM": "exit"}) if bad else newer
    monkeypatch.setattr(switching, "until_ready", interrupt)
    with pytest.raises(switching.Detached):
        site.start(wanted)
    monkeypatch.undo()
    former = services.read(site.paths.home, "fake").former
    assert former and former.orders[0].release == site.release
    assert [s.container for s in services.status(site.engine) if s.home == str(site.paths.home)] == [old.container]
    if bad:
        with pytest.raises(SmokeError):
            site.start(wanted)
    else:
        assert site.start(wanted).release == newer.tag
    assert services.running_release(site.paths, site.engine, "fake") == (old.release if bad else newer.tag)
    assert parts_of(site) == [old.container, old.container + services.PROXY]
    assert post(f"{old.url}/completions", "x") == 200


def test_clients_wait_for_the_former_one_whatever_the_next_one_said_last(
    site: FakeSite, newer: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one failed too often, so that the proxy refused what came."""
    old = site.start(port=site.port)

    def fails(parts: list[Part], *_: object, **__: object) -> float:
        parts[0].container.stop()
        running.put(parts[0].container, SOCKETS, {f"server/{inside.PROXY_STATE}": inside.DOWN.encode()})
        raise SmokeError("it stays down", next_step="")

    monkeypatch.setattr(switching, "until_ready", fails)
    with pytest.raises(SmokeError):
        site.start(newer)
    assert post(f"{old.url}/completions", "x") == 200


@pytest.mark.parametrize("late", [False, True])
def test_what_is_stopped_while_it_starts_stays_stopped(
    site: FakeSite, newer: Release, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither it nor the former one comes back."""
    site.start(port=site.port)

    def stopped(*_: object, **__: object) -> None:
        service.stop(site.paths, site.engine, None)
        if not late:
            raise SmokeError("it was stopped", next_step="")

    monkeypatch.setattr(linked if late else switching, "keep_up" if late else "until_ready", stopped)
    with pytest.raises(SparkpinError):
        site.start(newer)
    assert parts_of(site) == [] and services.read(site.paths.home, "fake").orders == ()


def fail(*_: object) -> None:
    raise SmokeError("planted", next_step="")


def interrupt(*_: object, **__: object) -> float:
    raise KeyboardInterrupt
