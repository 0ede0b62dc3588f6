"""One model over two machines, with drafts and all mods of v2-tq: a release is carried to the other, smoked, served,
switched, brought back and stopped. Each start costs that of two vLLMs.

The other machine is a Docker engine in a network namespace of this one, with a cable between, behind a real ssh server.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkout import Checkout
from docker.models.containers import Container
from two_hosts import OtherHost, other_host
from watched import free_port, signal_processes, until

from benchmarks.scripted_tiny.scripts import CHAT
from sparkpin.core.errors import (
    BusyError,
    CheckpointError,
    DownError,
    EngineError,
    HostError,
    InputError,
    NetworkError,
)
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.pins.nodes import STORE_PORT
from sparkpin.releases.record import Release, Releases
from sparkpin.serve.address import listeners
from sparkpin.smoke import mods
from sparkpin.smoke.server import LABEL, owner

pytestmark = pytest.mark.slow

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
    copy.done("build", "--checkpoint-only", "--recipe", RECIPE)
    return records.of_recipe(RECIPE)[-1]


@pytest.fixture(scope="module")
def first(copy: Checkout, records: Releases) -> Release:
    return made_release(copy, records)


def refused(copy: Checkout, error: type[Any], said: str, *arguments: str) -> str:
    done = copy.invoke(*arguments)
    assert done.returncode == error.exit_code and said in done.stderr, done.stdout + done.stderr
    return done.stderr


def interrupted(copy: Checkout, *arguments: str, once: Callable[[], bool] = lambda: True, said: str = "") -> str:
    """All that a command says that gets Ctrl-C once it has said `said` and `once` is true. As by a terminal, its
    children get it, too."""
    run, told = copy.start(*arguments), ""
    assert run.stdout is not None
    while said not in told and (line := run.stdout.readline()):
        told += line
    until(lambda: once() or run.poll() is not None)
    os.killpg(run.pid, signal.SIGINT)
    return told + run.communicate()[0]


def ranks(host: OtherHost) -> list[Container]:
    """ignore_removed: those that look at a machine come and go."""
    return list(host.engine.client.containers.list(all=True, ignore_removed=True))


def nothing_runs(copy: Checkout, host: OtherHost) -> bool:
    label = {"label": f"sparkpin.home={copy.home}"}
    return not ranks(host) and not Engine.connect().client.containers.list(all=True, filters=label, ignore_removed=True)


def served(copy: Checkout) -> dict[str, Any]:
    rows: list[dict[str, Any]] = json.loads(copy.invoke("status", "--json").stdout)  # whether it is down or not
    return next(row for row in rows if row["recipe"] == RECIPE)


def answers(copy: Checkout) -> bool:
    url = served(copy)["url"]
    body = {"model": "scripted-pair", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    reply = httpx.post(f"{url}/chat/completions", json=body, timeout=60)
    return bool(reply.json()["choices"][0]["message"]["content"].strip() == CHAT.content)


def test_what_is_missing_stops_it_before_anything_starts(
    copy: Checkout, host: OtherHost, records: Releases, first: Release
) -> None:
    pass_by_hand(records, first)
    pair = ("serve", first.tag, "--nodes", f"here,{host.url}", "--link", host.own)
    away = "ssh://root@127.0.0.1:9"
    refused(copy, NetworkError, f"{away.removeprefix('ssh://')}", "serve", first.tag, "--nodes", f"here,{away}")
    refused(copy, EngineError, f"invoke export {first.tag} {host.url} --with-checkpoint", *pair)
    assert nothing_runs(copy, host)
    assert first.tag in copy.done("export", first.tag, host.url, "--with-checkpoint")
    part = next(folder_of(host, first).glob("*.safetensors"))
    whole = part.read_bytes()
    part.chmod(0o644)
    part.write_bytes(whole[:100])
    refused(copy, CheckpointError, f"invoke export {first.tag} {host.url} --with-checkpoint", *pair)
    part.write_bytes(whole)
    host.there("route", "add", "default", "dev", host.other)
    refused(copy, HostError, "--shared-link", *pair)
    host.there("route", "del", "default")
    assert "interrupted" in interrupted(copy, *pair, said="link ")  # nothing is started yet
    assert nothing_runs(copy, host)


def test_smoke_over_the_link(copy: Checkout, host: OtherHost, records: Releases, first: Release) -> None:
    smoke = ("smoke", first.tag, "--nodes", host.url, "--link", host.own)
    assert "interrupted" in interrupted(copy, *smoke, once=lambda: any(LABEL in one.labels for one in ranks(host)))
    assert nothing_runs(copy, host)
    left, others = [
        host.engine.client.containers.create(first.tag, labels={LABEL: owner(records.paths, elsewhere=elsewhere)})
        for elsewhere in (True, False)  # of a killed run, and of that machine's own home of the same name
    ]
    told = copy.invoke(*smoke)
    assert told.returncode == 0 and left.name in told.stderr, told.stdout + told.stderr
    assert [one.id for one in ranks(host)] == [others.id]
    others.remove()
    host.engine.client.containers.create(first.tag, labels={LABEL: owner(records.paths, elsewhere=True)})
    copy.done("stop")  # which knows the machines by now
    assert records.get(first.tag).smoke_passed and nothing_runs(copy, host)
    evidence = records.evidence(first) / "smoke"
    result = json.loads((evidence / "result.json").read_text())
    assert {"acceptance", "mods", "long-text"} <= set(first.demands.checks)
    assert result["passed"] and result["acceptance"] == 1.0 and result["drafted_tokens"] > 100
    logs = [(evidence / name).read_bytes() for name in ("server.log", "server-1.log")]
    assert b"(Worker_TP0" in logs[0] and b"(Worker_TP1" in logs[1], "halves, each in a container of its own"
    for log, more in zip(logs, ({"guard": 1}, {}), strict=True):  # the first answers requests
        reports_of_a_half([dict(one.value) for one in mods.reports(log)], more)
    copy.done("promote", first.tag)


def reports_of_a_half(reports: list[dict[str, Any]], more: dict[str, int]) -> None:
    """What the mods of one rank of two say. The drafter has a head and a cache of its own. more: mod -> how often."""
    active = Counter(one["mod"] for one in reports if one.get("event") == "active")
    assert active == {"hybrid-int4-fp8": 1, "vllm-cpu": 1, "int8-lm-head": 2, "turboquant": 2, **more}
    heads = [one for one in reports if one["mod"] == "int8-lm-head"]
    assert [(head["V"], head["outlier_columns"]) for head in heads] == [(512, 5)] * 2, "made of this half at load"
    agreed = [one for one in reports if one.get("event") == mods.AGREED]
    assert [one["ranks"] for one in agreed] == [2, 2] and sum("turboquant in use" in one["on"] for one in agreed) == 1


def test_both_machines_start_anew(copy: Checkout, host: OtherHost, first: Release) -> None:
    """The unit waits for the other machine, whose engine starts its container by itself. The own engine has others'
    containers: ours end as a reboot ends them, while they start."""
    serve = ("serve", "--recipe", RECIPE)  # the machines are known since the smoke test
    assert "detached" in interrupted(copy, *serve, said="started ")
    assert served(copy)["release"] == first.tag and len(ranks(host)) == 1, "as of one machine: it goes on starting"
    unit = copy.invoke("serve", "--unit", "--recipe", RECIPE)
    assert f"at {host.url}: sudo systemctl enable docker" in unit.stdout
    rows = [line.partition("=")[::2] for line in unit.stdout.splitlines()]
    env = copy.env | dict(shlex.split(value)[0].split("=", 1) for name, value in rows if name == "Environment")
    wait, start = (shlex.split(value) for name, value in rows if name in ("ExecStartPre", "ExecStart"))
    host.shut_down()
    for container in Engine.connect().client.containers.list(filters={"label": f"sparkpin.home={copy.home}"}):
        container.stop(timeout=60)
    waits = subprocess.Popen(wait, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(timeout=8)
    host.boot()
    (other,) = ranks(host)
    assert other.status == "running" and waits.wait(timeout=60) == 0, waits.communicate()
    done = subprocess.run(start, cwd=copy.folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and first.tag in done.stdout and answers(copy), done.stdout + done.stderr
    assert served(copy)["release"] == first.tag


def test_two_machines_serve_one_model(copy: Checkout, host: OtherHost, first: Release) -> None:
    own = str(ipaddress.ip_network(host.network)[1])
    assert {line.split()[3] for line in listeners(STORE_PORT).splitlines()} == {f"{own}:{STORE_PORT}"}
    refused(copy, BusyError, f"port {STORE_PORT} is taken", "smoke", first.tag, "--nodes", host.url)
    (other,) = ranks(host)
    # A busy machine may not answer in the few seconds that `status` gives it.
    until(lambda: [(one["where"], one["state"]) for one in served(copy)["machines"]] == [(host.url, "running")], 120)
    settings = other.attrs["HostConfig"]
    assert (settings["NetworkMode"], settings["ReadonlyRootfs"], settings["CapDrop"]) == ("host", True, ["ALL"])
    assert other.attrs["Config"]["User"].startswith("10001") and not settings["Devices"]
    assert settings["RestartPolicy"]["Name"] == "unless-stopped"
    assert served(copy)["restarts"] == other.attrs["RestartCount"] == 0, "neither took the other for gone"
    log = copy.done("logs", "--recipe", RECIPE, "--lines", "3").splitlines()
    assert {line.partition(" | ")[0] for line in log} == {"here", host.url}


@pytest.fixture(scope="module")
def serving(copy: Checkout, host: OtherHost, records: Releases, first: Release) -> Release:
    """The first release, which serves already unless a test runs without those before."""
    copy.done("export", first.tag, host.url, "--with-checkpoint")
    if not records.get(first.tag).smoke_passed:
        pass_by_hand(records, first)
        copy.done("promote", first.tag)
    copy.done("serve", first.tag, "--nodes", host.url, "--link", host.own)
    return first


def pass_by_hand(records: Releases, release: Release) -> None:
    """One smoke test is enough here."""
    records.update(release.tag, lambda one: dataclasses.replace(one, state="passed", smoke={"passed": True}))


@pytest.mark.parametrize("rank", [1, 0])
@pytest.mark.usefixtures("serving")
def test_what_ends_one_machine_ends_both_and_they_answer_again(copy: Checkout, host: OtherHost, rank: int) -> None:
    before = processes(copy, host)
    signal_processes(containers(copy, host)[rank], "VLLM::Worker", "KILL")
    until(lambda: not set(processes(copy, host)) & set(before) and served(copy)["ready"], 900)
    assert answers(copy)
    assert [one[0] for one in processes(copy, host)] == [one[0] for one in before], "Docker started them again"


def refused_while_it_answers(copy: Checkout, host: OtherHost, records: Releases, second: Release) -> None:
    """What is wrong with the new pair is found before the old one is stopped."""
    before, serve = processes(copy, host), ("serve", "--recipe", RECIPE)
    part = folder_of(host, second) / "config.json"  # small, and read by nobody who serves
    whole = part.read_bytes()
    part.chmod(0o644)
    part.write_bytes(whole[:-1])
    refused(copy, CheckpointError, host.url, *serve)
    part.write_bytes(whole)
    refused(copy, InputError, "expected one interface in 127.0.0.0/8", *serve, "--link", "127.0.0.0/8")
    seqs, more = "--max-num-seqs {max_num_seqs}", "--max-num-batched-tokens 50000000"  # 264 GiB, by the plan
    copy.replace(f"recipes/{RECIPE}.yaml", seqs, f"{seqs} {more}")
    large = made_release(copy, records)
    pass_by_hand(records, large)
    copy.replace(f"recipes/{RECIPE}.yaml", f"{seqs} {more}", seqs)
    copy.done("export", large.tag, host.url, "--with-checkpoint")
    assert f"{large.tag} needs 264." in refused(copy, HostError, "once it is stopped", "serve", large.tag)
    assert processes(copy, host) == before and answers(copy)


def containers(copy: Checkout, host: OtherHost) -> list[Container]:
    """Of each rank."""
    label = {"label": [f"sparkpin.home={copy.home}", "sparkpin.release"]}
    return [*Engine.connect().client.containers.list(filters=label), *ranks(host)]


def processes(copy: Checkout, host: OtherHost) -> list[Any]:
    """Process 1 of each rank."""
    both = containers(copy, host)
    return [(one.id, one.attrs["State"]["Pid"], one.attrs["State"]["StartedAt"]) for one in both]


def folder_of(host: OtherHost, release: Release) -> Path:
    """Of a release's checkpoint there."""
    return host.ssh.home / f"carried/{release.model}/{release.checkpoint_key[:16]}"


def test_switch_and_back(copy: Checkout, host: OtherHost, records: Releases, serving: Release) -> None:
    first = serving
    copy.replace(f"recipes/{RECIPE}.yaml", "max_model_len: 2048", "max_model_len: 4096")
    second = made_release(copy, records)
    pass_by_hand(records, second)
    refused(copy, EngineError, f"invoke export {second.tag} {host.url} --with-checkpoint", "promote", second.tag)
    copy.done("export", second.tag, host.url, "--with-checkpoint")
    copy.done("promote", second.tag)
    refused_while_it_answers(copy, host, records, second)
    copy.done("serve", "--recipe", RECIPE)  # on the same machines, which it knows
    assert served(copy)["release"] == second.tag and answers(copy) and len(ranks(host)) == 1
    host.engine.client.api.tag(first.tag, "aside/image", "1")
    host.engine.untag(first.tag)
    refused(copy, EngineError, f"invoke export {first.tag}", "rollback", "--recipe", RECIPE, "--serve")
    assert records.current_tag(RECIPE) == second.tag and served(copy)["release"] == second.tag
    host.engine.tag("aside/image:1", first.tag)
    copy.done("rollback", "--recipe", RECIPE, "--serve")
    assert served(copy)["release"] == first.tag and answers(copy) and len(ranks(host)) == 1


@pytest.mark.usefixtures("serving")
def test_a_machine_that_is_away(copy: Checkout, host: OtherHost) -> None:
    allowed = (host.ssh.folder / "allowed").read_text()
    host.ssh.refuse()
    assert [one["state"].partition(":")[0] for one in served(copy)["machines"]] == ["away"]
    assert host.url in copy.invoke("stop", "--recipe", RECIPE).stderr
    assert ranks(host) and copy.invoke("status").returncode != DownError.exit_code
    (host.ssh.folder / "allowed").write_text(allowed)
    copy.done("stop", "--recipe", RECIPE)
    assert nothing_runs(copy, host)
