"""One model over two machines: a release is carried to the other, smoked, served, switched, brought back and stopped.

The other machine is a Docker engine in a network namespace of this one, with a cable between, behind a real ssh server.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkout import Checkout
from docker.models.containers import Container
from two_hosts import OtherHost, other_host
from watched import free_port

from sparkpin.core.errors import BusyError, CheckpointError, DownError, EngineError, HostError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.fetch.tinymodel.scripts import CHAT
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.volumes import volume_name
from sparkpin.smoke.server import LABEL, owner

RECIPE = "two-engines"


@dataclasses.dataclass(frozen=True)
class Head(Checkout):
    """path: a PATH on which `ssh` knows the other machine."""

    path: str = ""

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, "PATH": self.path}


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OtherHost]:
    with other_host(tmp_path_factory.mktemp("other")) as host:
        yield host


@pytest.fixture(scope="module")
def copy(host: OtherHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkout]:
    made = dataclasses.replace(Head.make(tmp_path_factory.mktemp("head") / "copy"), path=host.ssh.path)
    (made.folder / f"recipes/{RECIPE}.yaml").write_text(
        (made.folder / "recipes/scripted-pair.yaml")
        .read_text()
        .replace("name: scripted-pair\n", f"name: {RECIPE}\n", 1)
        .replace("container: sparkpin/scripted-pair", f"container: sparkpin/{RECIPE}")
        .replace("stage: v2-tq", "stage: base")
        .replace("port: 8000", f"port: {free_port()}")
    )
    yield made
    made.invoke("stop", "--recipe", RECIPE)
    made.remove_tags(RECIPE)


@pytest.fixture(scope="module")
def records(copy: Checkout) -> Releases:
    return Releases(dataclasses.replace(Paths.from_env(copy.folder), home=copy.home))


def made_release(copy: Checkout, records: Releases) -> Release:
    copy.done("build", "--recipe", RECIPE)
    copy.done("checkpoint", "--recipe", RECIPE)
    return records.of_recipe(RECIPE)[-1]


@pytest.fixture(scope="module")
def first(copy: Checkout, records: Releases) -> Release:
    return made_release(copy, records)


def refused(copy: Checkout, error: type[Any], said: str, *arguments: str) -> str:
    done = copy.invoke(*arguments)
    assert done.returncode == error.exit_code and said in done.stderr, done.stdout + done.stderr
    return done.stderr


def ranks(host: OtherHost) -> list[Container]:
    return list(host.engine.client.containers.list(all=True))


def nothing_runs(copy: Checkout, host: OtherHost) -> bool:
    label = {"label": f"sparkpin.home={copy.home}"}
    return not ranks(host) and not Engine.connect().client.containers.list(all=True, filters=label)


def served(copy: Checkout) -> dict[str, Any]:
    rows: list[dict[str, Any]] = json.loads(copy.done("status", "--json"))
    return next(row for row in rows if row["recipe"] == RECIPE)


def answers(copy: Checkout) -> bool:
    url = served(copy)["url"]
    body = {"model": "scripted-pair", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    reply = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
    return bool(reply.json()["choices"][0]["message"]["content"].strip() == CHAT.content)


def test_what_is_missing_stops_it_before_anything_starts(copy: Checkout, host: OtherHost, first: Release) -> None:
    pair = ("serve", first.tag, "--nodes", f"here,{host.url}", "--link", host.own)
    away = "ssh://root@127.0.0.1:9"
    refused(copy, NetworkError, f"{away.removeprefix('ssh://')}", "serve", first.tag, "--nodes", f"here,{away}")
    refused(copy, EngineError, f"invoke copy {first.tag} --to {host.url} --with-checkpoint", *pair)
    assert nothing_runs(copy, host)
    assert first.tag in copy.done("copy", first.tag, "--to", host.url, "--with-checkpoint")
    volume = Path(host.engine.client.volumes.get(volume_name(first.checkpoint_key)).attrs["Mountpoint"])
    part = next(volume.glob("*.safetensors"))
    whole = part.read_bytes()
    part.write_bytes(whole[:100])
    refused(copy, CheckpointError, f"--to {host.url} --with-checkpoint", *pair)
    part.write_bytes(whole)
    host.there("link", "set", host.other, "mtu", "1400")
    refused(copy, HostError, f"1400 ({host.other})", *pair)
    host.there("link", "set", host.other, "mtu", "9000")
    host.there("route", "add", "default", "dev", host.other)
    refused(copy, HostError, "--shared-link", *pair)
    host.there("route", "del", "default")
    assert host.network in copy.done("doctor", "--nodes", f"here,{host.url}", "--link", host.network)
    assert nothing_runs(copy, host)


def test_smoke_over_the_link(copy: Checkout, host: OtherHost, records: Releases, first: Release) -> None:
    left, others = [
        host.engine.containers.create(first.tag, labels={LABEL: owner(records.paths, elsewhere=elsewhere)})
        for elsewhere in (True, False)  # of a killed run, and of that machine's own home of the same name
    ]
    told = copy.invoke("smoke", first.tag, "--nodes", host.url, "--link", host.own)
    assert told.returncode == 0 and left.name in told.stderr, told.stdout + told.stderr
    assert [one.id for one in ranks(host)] == [others.id]
    others.remove()
    host.engine.containers.create(first.tag, labels={LABEL: owner(records.paths, elsewhere=True)})
    copy.done("stop")  # which knows the machines by now
    assert records.get(first.tag).smoke_passed and nothing_runs(copy, host)
    evidence = records.evidence(first) / "smoke"
    assert all("sparkpin" in (evidence / name).read_text() for name in ("server.log", "server-1.log"))
    copy.done("promote", first.tag)


def test_two_machines_serve_one_model(copy: Checkout, host: OtherHost, first: Release) -> None:
    told = copy.done("serve", "--recipe", RECIPE)  # the machines are known since the smoke test
    assert first.tag in told and answers(copy)
    refused(copy, BusyError, f"invoke stop --recipe {RECIPE}", "smoke", first.tag, "--nodes", host.url)
    (other,) = ranks(host)
    assert [(node["where"], node["state"]) for node in served(copy)["nodes"]] == [(host.url, "running")]
    settings = other.attrs["HostConfig"]
    assert (settings["NetworkMode"], settings["ReadonlyRootfs"], settings["CapDrop"]) == ("host", True, ["ALL"])
    assert other.attrs["Config"]["User"].startswith("10001") and not settings["Devices"]
    assert settings["RestartPolicy"]["Name"] == "unless-stopped"
    key = (copy.home / f"keys/{RECIPE}.nodes").read_text().strip()
    assert key not in json.dumps(other.attrs)
    log = copy.done("logs", "--recipe", RECIPE, "--lines", "3").splitlines()
    assert {line.partition(" | ")[0] for line in log} == {"here", host.url}


def test_switch_and_back(copy: Checkout, host: OtherHost, records: Releases, first: Release) -> None:
    copy.replace(f"recipes/{RECIPE}.yaml", "max_model_len: 2048", "max_model_len: 4096")
    second = made_release(copy, records)
    # That it passed is written by hand: one smoke test is enough here.
    records.update(second.tag, lambda one: dataclasses.replace(one, state="passed", smoke={"passed": True}))
    refused(copy, EngineError, f"invoke copy {second.tag} --to {host.url} --with-checkpoint", "promote", second.tag)
    copy.done("copy", second.tag, "--to", host.url, "--with-checkpoint")
    copy.done("promote", second.tag)
    copy.done("serve", "--recipe", RECIPE)  # on the same machines, which it knows
    assert served(copy)["release"] == second.tag and answers(copy) and len(ranks(host)) == 1
    host.engine.client.api.tag(first.tag, "aside/image", "1")
    host.engine.untag(first.tag)
    refused(copy, EngineError, f"invoke copy {first.tag}", "rollback", "--recipe", RECIPE, "--serve")
    assert records.current_tag(RECIPE) == second.tag and served(copy)["release"] == second.tag
    host.engine.tag("aside/image:1", first.tag)
    copy.done("rollback", "--recipe", RECIPE, "--serve")
    assert served(copy)["release"] == first.tag and answers(copy) and len(ranks(host)) == 1


def test_a_machine_that_is_away(copy: Checkout, host: OtherHost) -> None:
    allowed = (host.ssh.folder / "allowed").read_text()
    host.ssh.refuse()
    assert [node["state"] for node in served(copy)["nodes"]] == ["away"]
    assert host.url in copy.invoke("stop", "--recipe", RECIPE).stderr
    assert ranks(host) and copy.invoke("status").returncode != DownError.exit_code
    (host.ssh.folder / "allowed").write_text(allowed)
    copy.done("stop", "--recipe", RECIPE)
    assert nothing_runs(copy, host)
