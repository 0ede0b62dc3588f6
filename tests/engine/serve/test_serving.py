"""What watches a server: crash, hang, want of memory, the key, and what a killed run leaves; on a real engine, with a
stand-in for vLLM whose faults are real ones. tests/e2e/serve/test_serving_vllm.py does it with vLLM itself."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import stat
from typing import TYPE_CHECKING

import docker.errors
import httpx
import pytest
from docker.models.containers import Container
from docker.models.networks import NetworkCollection
from watched import await_start, free_port, signal_processes, until

from sparkpin.commands import client as clients
from sparkpin.core.errors import InputError, SmokeError
from sparkpin.host.engine import Engine
from sparkpin.releases import container as running
from sparkpin.releases.container import HOME_LABEL
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import crash_facts, launch, memory_limit, service, startup, status, switching, waiting
from sparkpin.serve import served as services
from sparkpin.serve.launch import Health
from sparkpin.serve.memory_limit import Room

if TYPE_CHECKING:
    from fake_release import FakeSite  # pytest loads it itself, below

pytest_plugins = ["fake_release"]
QUICK = Health(interval=1, timeout=5, failures=2, restarts=2)


def quiet(line: str) -> None:
    pass


def test_a_crash_and_a_hang_end_in_a_new_start_and_the_last_one_in_a_post_mortem(
    site: FakeSite, capsys: pytest.CaptureFixture[str]
) -> None:
    served = site.start(port=site.port, health=QUICK)
    container = site.engine.client.containers.get(served.container)
    check = container.attrs["Config"]["Healthcheck"]
    assert check["Test"][0] == "CMD" and check["Test"][-1] == "health" and check["Retries"] == 2
    await_start(container, 0, served)
    signal_processes(container, "vllm serve", "KILL")
    await_start(container, 1, served)
    assert b"sparkpin: ended by signal 9 (SIGKILL)" in container.logs()

    signal_processes(container, "vllm serve", "STOP")
    with httpx.Client(trust_env=False) as client, pytest.raises(httpx.ReadTimeout):
        client.get(f"http://127.0.0.1:{site.port}/health", timeout=httpx.Timeout(60, read=0.5))
    await_start(container, 2, served)
    assert b"sparkpin: ended: it answered no request any more" in container.logs()

    signal_processes(container, "vllm serve", "KILL")  # once more than Docker starts it again
    until(lambda: not services.is_running(site.engine.client.containers.get(served.container)))
    status.status(site.paths, site.engine, as_json=False)
    told = capsys.readouterr().out
    assert "exited with 137; Docker started it again 2 times" in told
    assert "that means: a process of the server was killed from outside" in told
    assert re.search(r"memory now: .* GB of .* GB available, the server's limit is ", told)
    status.logs(site.paths, site.engine, "fake", lines=2, follow=False)
    assert capsys.readouterr().out.splitlines()[-1] == "sparkpin: ended by signal 9 (SIGKILL)"
    assert site.start().restarts == 0, "serve begins anew"


def test_what_passes_its_memory_limit_is_ended_and_says_so(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "room_for", lambda *_: Room(1, 256 << 20, None))
    greedy = site.faulty("memory")
    with pytest.raises(SmokeError) as caught:
        site.start(greedy, port=site.port)
    text = str(caught.value)
    assert "exited with 137" in text and "the kernel killed 1 of its processes for want of memory" in text
    assert "that means: it passed its memory limit" in text and "to mend it: invoke plan --recipe fake" in text
    assert "the server's limit is 268.4 MB" in text


def test_a_key_is_wanted_from_others_and_shown_to_nobody(site: FakeSite, capsys: pytest.CaptureFixture[str]) -> None:
    served = site.start(port=site.port, host="0.0.0.0")
    file = site.paths.home / "keys/fake"
    key = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(key) == 43
    container = site.engine.client.containers.get(served.container)
    assert key not in json.dumps(container.attrs) and key.encode() not in container.logs()
    assert key not in json.dumps(container.top(ps_args="-eo pid,args"))
    body = {"model": served.model, "prompt": "x"}
    with httpx.Client(trust_env=False, timeout=60) as client:
        assert client.post(f"{served.url}/completions", json=body).status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert client.post(f"{served.url}/completions", json=body, headers=headers).status_code == 200
    assert "wants is in" in status.told(site.paths, served)[1]
    Releases(site.paths).save(site.release)
    capsys.readouterr()
    clients.facts(site.paths, None)
    assert f"export SPARKPIN_API_KEY=$(cat {file})" in capsys.readouterr().err
    clients.facts(site.paths, None, key="SPARKPIN_API_KEY")
    assert capsys.readouterr().err == ""
    assert site.start() == dataclasses.replace(served, health=services.describe(container).health), "left alone"
    file.unlink()
    anew = site.start(beside=False)
    assert anew.key != served.key and file.read_text().strip() != key, "a new key is a reason to start anew"


def test_a_network_that_another_home_has_just_made_is_taken(
    fake_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers = {running.NETWORK: running.network, launch.HIDDEN: launch.hidden_network}
    for make in makers.values():
        make(fake_engine)
    monkeypatch.setattr(NetworkCollection, "list", lambda *_, **__: [])
    assert {make(fake_engine) for make in makers.values()} == set(makers)
    monkeypatch.undo()
    for name in makers:
        assert len(fake_engine.client.networks.list(names=[f"^{name}$"])) == 1


def test_ctrl_c_leaves_the_server_to_start(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    look = waiting.look

    def interrupted(container: Container, of: Release) -> tuple[str | None, bytes]:
        monkeypatch.setattr(waiting, "look", look)
        raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "look", interrupted)
    with pytest.raises(switching.Detached, match=f"goes on starting {site.release.tag}"):
        site.start(port=site.port)
    container = services.find(site.engine, services.name_of(site.paths, "fake"))
    assert container is not None and container.attrs["HostConfig"]["RestartPolicy"]["Name"] == "on-failure"
    said: list[str] = []
    assert site.start(say=said.append).ready
    assert said[0] == f"{site.release.tag} already runs as {container.name}"


@pytest.mark.parametrize("left", ["begun", "switched"])
def test_what_a_killed_switch_leaves_is_put_right(site: FakeSite, left: str) -> None:
    served = site.start(port=site.port)
    container = site.engine.client.containers.get(served.container)
    if left == "begun":  # the port was taken from the old one, the new one did not get it
        network = site.engine.client.networks.get("sparkpin")
        network.disconnect(container)
    else:  # the old one is gone, the new one has not its name yet
        container.rename(served.container + switching.NEXT)
    again = site.start()
    assert again.ready and (again.container, again.port, again.started) == (
        served.container,
        served.port,
        served.started,
    )


def test_one_that_nobody_reaches_gives_the_port_back(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the new one stays when it answers within, and not at its address."""
    served = site.start(port=site.port)
    newer = dataclasses.replace(site.release, env={"ANOTHER": "1"}, key="77" * 32)
    monkeypatch.setattr(switching, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(switching, "fault_of", lambda *_: "a firewall")
    with pytest.raises(SmokeError, match="answers within its container, and not at"):
        site.start(newer, port=free_port(), beside=True)
    monkeypatch.undo()
    until(lambda: switching.fault_of(served, None) == "")  # it has its port again
    assert [c.name for c in services.services(site.engine) if c.labels.get(HOME_LABEL) == str(site.paths.home)] == [
        served.container
    ]


def test_who_waits_for_an_answer_at_a_switch_is_told(site: FakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the container's own address, where packets go as those of other machines do: if it were only cut off from its
    network, nobody would tell its clients."""
    monkeypatch.setattr(switching, "requests_under_way", lambda _: 1)
    newer = dataclasses.replace(site.release, env={"ANOTHER": "1"}, key="77" * 32)
    old = site.start(port=site.port)
    with waiting_client(site.engine, old) as client:
        new = site.start(
            newer, port=free_port(), drain=0, beside=True
        )  # another address, so that it is no longer the same
        assert is_closed(client)
    assert new.container == old.container and new.started != old.started

    monkeypatch.setattr(switching, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(switching, "fault_of", lambda *_: "a firewall")
    said: list[str] = []
    with pytest.raises(SmokeError):
        site.start(port=site.port, drain=0, say=said.append, beside=True)
    assert said[-1] == f"starting {newer.tag} again"
    monkeypatch.undo()
    until(lambda: switching.fault_of(new, None) == "")


def test_one_that_ended_by_itself_meanwhile_is_replaced_all_the_same(
    site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = site.start(port=site.port)
    newer = dataclasses.replace(site.release, env={"ANOTHER": "1"}, key="77" * 32)
    monkeypatch.setattr(switching, "requests_under_way", lambda container: container.kill())
    new = site.start(newer, port=free_port(), beside=True)
    assert new.ready and (new.container, new.started != old.started) == (old.container, True)


def waiting_client(engine: Engine, served: services.Served) -> socket.socket:
    (network,) = engine.client.containers.get(served.container).attrs["NetworkSettings"]["Networks"].values()
    return socket.create_connection((network["IPAddress"], launch.INSIDE), timeout=60)


def is_closed(client: socket.socket) -> bool:
    """Whether the other side has said so; TimeoutError if it says nothing."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_start_leaves_what_it_took(site: FakeSite) -> None:
    site.start(port=site.port)
    last = startup.last(crash_facts.folder_of(site.paths, "fake", site.release.name))
    assert last is not None and {"start", "ready"} <= set(last.began) and last.seconds > 0
    kept = json.loads((crash_facts.folder_of(site.paths, "fake", site.release.name) / startup.FILE).read_text())
    assert (kept["load_format"], kept["weights_seconds"]) == ("auto", 0.25), "as the server's log says"
    mounts = site.engine.client.containers.get(services.name_of(site.paths, "fake")).attrs["Mounts"]
    own = next(mount["Name"] for mount in mounts if mount["Destination"] == launch.FOLDER)
    service.stop(site.paths, site.engine, "fake", quiet)
    with pytest.raises(docker.errors.NotFound):
        site.engine.client.volumes.get(own)
    said: list[str] = []
    site.start(port=site.port, say=said.append)
    assert said[1].startswith("the last start took ") or said[2].startswith("the last start took "), said


@pytest.mark.parametrize("host", ["localhost", "example", "1.2.3"])
def test_an_address_to_listen_on_that_is_none(site: FakeSite, host: str) -> None:
    with pytest.raises(InputError, match=f"--host: saw '{host}'"):
        site.start(port=1, host=host)
