"""Serving with a real engine and real ports."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import docker.errors
import httpx
import pytest

from sparkpin import commands, serve
from sparkpin.clients import tasks as clients
from sparkpin.container import HOME_LABEL
from sparkpin.engine import Engine
from sparkpin.errors import BusyError, InputError, SmokeError
from sparkpin.paths import Paths
from sparkpin.releases import Release, Releases, tag_of
from sparkpin.serving import served as services
from sparkpin.serving import switching

pytest_plugins = ["fake_release"]
pytestmark = pytest.mark.engine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def other_home(paths: Paths, tmp_path: Path) -> Paths:
    return dataclasses.replace(paths, home=tmp_path / "other-home")


@pytest.fixture
def name(paths: Paths) -> str:
    return services.name_of(paths, "fake")


@pytest.fixture
def port(fake_engine: Engine, paths: Paths, other_home: Paths) -> Iterator[int]:
    yield free_port()
    for home in (paths.home, other_home.home):
        for container in fake_engine.client.containers.list(all=True, filters={"label": f"{HOME_LABEL}={home}"}):
            container.remove(force=True, v=True)


@pytest.fixture
def newer(fake_engine: Engine, release: Release) -> Iterator[Release]:
    """Another release of the recipe; the same image is enough."""
    key = "12" * 32
    newer = dataclasses.replace(release, key=key, tag=tag_of("fake", "base", key))
    fake_engine.tag(release.tag, newer.tag)
    yield newer
    fake_engine.untag(newer.tag)


def quiet(line: str) -> None:
    pass


def test_a_release_is_served_on_this_machine_only(
    paths: Paths,
    name: str,
    fake_engine: Engine,
    release: Release,
    checkpoint: Path,
    port: int,
) -> None:
    said: list[str] = []
    served = serve.start(paths, fake_engine, release, checkpoint, port=port, say=said.append)
    assert served.url == f"http://127.0.0.1:{port}/v1" and served.ready and served.state == "running"
    assert served.release == release.tag and served.model == "scripted-tiny"
    assert said[-1].endswith(f"at {served.url} (model scripted-tiny)")
    answer = httpx.post(f"{served.url}/completions", json={"prompt": "x"}, trust_env=False)
    assert answer.json()["choices"][0]["text"].startswith(" a pinned build")
    container = fake_engine.client.containers.get(name)
    host = container.attrs["HostConfig"]
    assert container.ports == {"8000/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}]}
    assert host["RestartPolicy"] == {"Name": "on-failure", "MaximumRetryCount": 5}
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["SecurityOpt"] == ["no-new-privileges:true"]
    assert container.attrs["Config"]["User"] == "10001:10001"
    assert b'"model_writable": false' in container.logs() and b'"home_writable": true' in container.logs()


def test_a_client_is_told_what_the_server_itself_says(
    paths: Paths, fake_engine: Engine, release: Release, checkpoint: Path, port: int
) -> None:
    """Its command line has no length, and its recipe is nowhere."""
    Releases(paths).save(release)
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    facts = clients.facts(paths, None)
    assert facts.url == f"http://127.0.0.1:{port}/v1" and facts.model == "scripted-tiny"
    assert (facts.context, facts.output) == (2048, 512) and facts.input == ("text",)
    assert clients.running(paths, "another") is None


def test_serving_it_again_leaves_it_alone(
    paths: Paths,
    name: str,
    fake_engine: Engine,
    release: Release,
    checkpoint: Path,
    port: int,
) -> None:
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    before = fake_engine.client.containers.get(name).id
    said: list[str] = []
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=said.append)
    assert said == [f"{release.tag} already runs as {name}"], "what its log said as it started is no news"
    assert fake_engine.client.containers.get(name).id == before


@pytest.mark.parametrize("beside", [False, True])
def test_another_port_or_release_replaces_it(
    paths: Paths,
    name: str,
    fake_engine: Engine,
    release: Release,
    newer: Release,
    checkpoint: Path,
    port: int,
    beside: bool,
) -> None:
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    other = free_port()
    moved = serve.start(paths, fake_engine, release, checkpoint, port=other, say=quiet, beside=beside)
    assert moved.port == other and moved.ready
    said: list[str] = []
    served = serve.start(paths, fake_engine, newer, checkpoint, say=said.append, beside=beside)
    stopped = [line for line in said if line.startswith(f"stopping {release.tag}")]
    switched = [line for line in said if line.startswith("switched after ") and line.endswith(release.tag)]
    assert bool(switched) == beside and bool(stopped) != beside
    assert served.release == newer.tag and served.ready and served.port == other, "it keeps the address of what ran"
    assert [s.container for s in services.status(fake_engine) if s.recipe == "fake"] == [name]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))  # the former port is free again
    networks = fake_engine.client.containers.get(name).attrs["NetworkSettings"]["Networks"]
    assert list(networks) == ["sparkpin"]


def test_what_answers_until_serve_is_told_after_serve(
    paths: Paths,
    fake_engine: Engine,
    release: Release,
    newer: Release,
    checkpoint: Path,
    port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands.next_serve(paths, newer)
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    commands.next_serve(paths, newer)
    commands.next_serve(paths, release)
    assert capsys.readouterr().out.splitlines() == [
        "next: invoke serve",
        f"next: invoke serve (until then {release.tag} still answers)",
        "it is being served already",
    ]


@pytest.mark.parametrize("beside", [False, True])
def test_a_release_that_does_not_start_gives_way_to_the_former_one(
    paths: Paths,
    name: str,
    fake_engine: Engine,
    release: Release,
    newer: Release,
    checkpoint: Path,
    port: int,
    beside: bool,
) -> None:
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    before = fake_engine.client.containers.get(name).attrs["State"]["StartedAt"]
    said: list[str] = []
    bad = dataclasses.replace(newer, env={"FAKE_VLLM": "exit"})
    with pytest.raises(SmokeError, match=r"exited with 1\nfirst error: RuntimeError: no such architecture") as caught:
        serve.start(paths, fake_engine, bad, checkpoint, port=port, say=said.append, beside=beside)
    assert newer.tag in str(caught.value)
    assert said[-1] == (f"{release.tag} still answers" if beside else f"starting {release.tag} again")
    container = fake_engine.client.containers.get(name)
    assert container.labels["sparkpin.release"] == release.tag
    assert (container.attrs["State"]["StartedAt"] == before) == beside
    served = serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    assert served.ready and [c.name for c in services.services(fake_engine) if "fake" in str(c.name)] == [name]
    kept = paths.home / "serve/fake" / newer.name
    assert "no such architecture" in (kept / "server.log").read_text()
    assert "first error: RuntimeError: no such architecture" in (kept / "post-mortem.txt").read_text()


def test_a_first_release_that_does_not_start_leaves_nothing(
    paths: Paths,
    name: str,
    fake_engine: Engine,
    release: Release,
    checkpoint: Path,
    port: int,
) -> None:
    with pytest.raises(SmokeError):
        serve.start(
            paths,
            fake_engine,
            dataclasses.replace(release, env={"FAKE_VLLM": "exit"}),
            checkpoint,
            port=port,
            say=quiet,
        )
    assert services.find(fake_engine, name) is None


def test_a_former_one_left_by_a_killed_run_is_taken_up(
    paths: Paths,
    name: str,
    fake_engine: Engine,
    release: Release,
    newer: Release,
    checkpoint: Path,
    port: int,
) -> None:
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    container = fake_engine.client.containers.get(name)
    container.stop(timeout=5)
    container.rename(name + switching.FORMER)
    assert serve.start(paths, fake_engine, newer, checkpoint, port=port, say=quiet).ready
    with pytest.raises(docker.errors.NotFound):
        container.reload()


def test_a_taken_port_is_told_with_its_holder(
    paths: Paths,
    name: str,
    fake_engine: Engine,
    release: Release,
    checkpoint: Path,
    port: int,
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        with pytest.raises(BusyError) as caught:
            serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    assert f"port {port} on 127.0.0.1 is taken by " in caught.value.message
    assert f"(process {os.getpid()})" in caught.value.message
    assert caught.value.next_step.endswith(f"invoke serve --port {port + 1}")
    assert services.find(fake_engine, name) is None


def test_a_taken_port_does_not_end_what_is_served(
    paths: Paths,
    fake_engine: Engine,
    release: Release,
    newer: Release,
    checkpoint: Path,
    port: int,
) -> None:
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(BusyError):
            serve.start(paths, fake_engine, newer, checkpoint, port=holder.getsockname()[1], say=quiet)
    (served,) = (s for s in services.status(fake_engine) if s.recipe == "fake")
    assert served.ready and served.release == release.tag


def test_a_port_that_another_recipe_s_container_has(
    paths: Paths,
    name: str,
    fake_engine: Engine,
    release: Release,
    checkpoint: Path,
    port: int,
) -> None:
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    with pytest.raises(BusyError, match=f"taken by the container {name}"):
        serve.start(paths, fake_engine, dataclasses.replace(release, recipe="other"), checkpoint, port=port, say=quiet)
    assert services.find(fake_engine, services.name_of(paths, "other")) is None


def test_homes_on_one_engine_serve_side_by_side(
    paths: Paths,
    name: str,
    other_home: Paths,
    fake_engine: Engine,
    release: Release,
    newer: Release,
    checkpoint: Path,
    port: int,
) -> None:
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    with pytest.raises(BusyError) as caught:
        serve.start(other_home, fake_engine, release, checkpoint, port=port, say=quiet)
    assert f"the container {name}, a server of the home {paths.home}" in caught.value.message
    assert f"SPARKPIN_HOME={paths.home} invoke stop" in caught.value.next_step
    said: list[str] = []
    second = free_port()
    serve.start(other_home, fake_engine, newer, checkpoint, port=second, say=said.append)
    assert not [line for line in said if "stopping" in line]
    both = {(served.home, served.release, served.port) for served in services.status(fake_engine) if served.ready}
    assert {(str(paths.home), release.tag, port), (str(other_home.home), newer.tag, second)} <= both
    assert services.running_release(paths, fake_engine, "fake") == release.tag
    assert serve.stop(other_home, fake_engine, None, quiet) == (services.name_of(other_home, "fake"),)
    assert serve.stop(other_home, fake_engine, None, quiet) == ()
    with pytest.raises(InputError, match="no service of recipe 'fake' runs"):
        serve.stop(other_home, fake_engine, "fake", quiet)
    assert services.running_release(paths, fake_engine, "fake") == release.tag


@pytest.mark.parametrize("bad", [0, 70000])
def test_a_port_that_is_none(
    paths: Paths,
    fake_engine: Engine,
    release: Release,
    checkpoint: Path,
    bad: int,
) -> None:
    with pytest.raises(InputError, match=f"port {bad}: wanted 1 to 65535"):
        serve.start(paths, fake_engine, release, checkpoint, port=bad, say=quiet)


def test_stop_and_status(
    paths: Paths,
    name: str,
    fake_engine: Engine,
    release: Release,
    checkpoint: Path,
    port: int,
) -> None:
    serve.start(paths, fake_engine, release, checkpoint, port=port, say=quiet)
    assert [(s.recipe, s.port, s.ready) for s in services.status(fake_engine) if s.recipe == "fake"] == [
        ("fake", port, True)
    ]
    assert serve.stop(paths, fake_engine, "fake", quiet) == (name,)
    assert not [s for s in services.status(fake_engine) if s.recipe == "fake"]
    with pytest.raises(InputError, match="no service of recipe 'fake' runs"):
        serve.stop(paths, fake_engine, "fake", quiet)
