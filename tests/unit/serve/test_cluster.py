"""Which machines a release is served on: what is said, what is kept, what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from ipaddress import IPv4Interface
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from sparkpin.core.errors import BusyError, EngineError, HostError, InputError
from sparkpin.core.paths import Paths
from sparkpin.pins.nodes import STORE_PORT
from sparkpin.releases import runs_here
from sparkpin.serve import cluster, crash_facts, linked, memory_limit, served, switching
from sparkpin.serve.cluster import Cluster, ClusterOptions
from sparkpin.serve.link import HostFacts, Interface
from sparkpin.serve.linked import Part

PAIR: Any = SimpleNamespace(tag="sparkpin/p:base-1", recipe="p", argv=("vllm", "serve", "/model", "--nnodes", "2"))
ALONE: Any = SimpleNamespace(tag="sparkpin/r:base-1", recipe="r", argv=("vllm", "serve", "/model"))
KEPT = Cluster(("here", "ssh://b"), "10.0.0.0/24", True)


@pytest.mark.parametrize("text", ["here,ssh://b", "ssh://b", "ssh://b/,here", " ssh://b , here "])
def test_this_machine_is_rank_0_named_or_not(text: str) -> None:
    assert ClusterOptions(text).applied(None, PAIR) == Cluster(("here", "ssh://b"))


def test_options_change_what_was_kept() -> None:
    assert ClusterOptions().applied(KEPT, PAIR) == KEPT and ClusterOptions("ssh://b").applied(KEPT, PAIR) == KEPT
    assert ClusterOptions("ssh://c").applied(KEPT, PAIR) == Cluster(
        ("here", "ssh://c")
    )  # what was taken there is not here
    assert ClusterOptions(link="eth1").applied(KEPT, PAIR) == Cluster(KEPT.urls, "eth1")
    assert ClusterOptions(shared=True).applied(Cluster(KEPT.urls, "l"), PAIR) == Cluster(KEPT.urls, "l", True)
    assert ClusterOptions().applied(KEPT, ALONE) is None


@pytest.mark.parametrize(
    ("options", "release"),
    [
        (ClusterOptions(), PAIR),
        (ClusterOptions("here"), PAIR),
        (ClusterOptions("ssh://b,ssh://b"), PAIR),
        (ClusterOptions("spark2"), PAIR),
        (ClusterOptions("ssh://b"), ALONE),
    ],
)
def test_what_does_not_fit_is_refused(options: ClusterOptions, release: Any) -> None:
    with pytest.raises(InputError):
        options.applied(None, release)


def test_the_machines_are_kept(tmp_path: Path) -> None:
    assert served.read(tmp_path, "p.1").urls == ("here",) and served.recorded(tmp_path) == {}
    former = served.Service(cluster=Cluster(("here", "ssh://c")))
    served.write(tmp_path, "p.1", served.Service(cluster=KEPT, former=former))
    assert served.read(tmp_path, "p.1").cluster == KEPT and [*served.recorded(tmp_path)] == ["p.1"]
    assert served.read(tmp_path, "p.1").urls == ("here", "ssh://b", "ssh://c") and served.recorded(tmp_path, "p") == {}
    served.record_path(tmp_path, "p.1").write_text('{"cluster": 3}')
    with pytest.raises(InputError, match=r"p\.1\.served\.json"):
        served.read(tmp_path, "p.1")


TOLD: dict[str, Any] = {
    "interfaces": [{"name": "e", "place": "10.0.0.1/255.0.0.0", "up": True, "rdma": []}],
    "default_routes": [], "driver": "", "memory_available": 1, "record": "r", "gpus": [],
}  # fmt: skip


FACE = TOLD["interfaces"][0]
WRONG: list[tuple[str, Any]] = [
    ("interfaces", 3),
    ("interfaces", [{**FACE, "place": "x"}]),
    ("memory_available", float("inf")),
    ("gpus", 1),
]
LOGS = [b"", b"3", b"[]", b"{", b"\xff", b"[" * 100_000, b"{}"]


@pytest.mark.parametrize("log", LOGS + [json.dumps({**TOLD, key: value}).encode() for key, value in WRONG])
def test_what_another_machine_answers_is_not_believed(log: bytes) -> None:
    """No host here answers wrongly by itself."""
    engine = MagicMock()
    machine, container = cluster.Machine("ssh://b", engine), engine.client.containers.create.return_value
    container.logs.return_value = b"a warning of Python's\n" + json.dumps(TOLD).encode()
    assert cluster.examined(machine, PAIR, "/checkpoint").interfaces[0].name == "e"
    container.logs.return_value = log
    with pytest.raises(HostError, match="ssh://b"):
        cluster.examined(machine, PAIR, "/checkpoint")
    assert container.remove.call_count == 2


def part(where: str, **attributes: Any) -> Part:
    running = {"status": "running", "attrs": {"State": {"Status": "running"}}, "labels": {}}
    return Part(cluster.Machine(where, MagicMock()), MagicMock(**running | attributes))


def test_a_node_that_stays_down_is_not_whole_nor_waited_for() -> None:
    both = [part("here"), part("ssh://b")]
    both[1].container.logs.return_value = b"sparkpin: starting the server\n"
    assert linked.runs_everywhere(both, 2) and not linked.runs_everywhere(both, 3)
    assert switching.look(both, PAIR)[0] is None
    both[1].container.logs.return_value = b"sparkpin: stays down: it has been started again 5 times\n"
    assert not linked.runs_everywhere(both, 2) and "ssh://b" in str(switching.look(both, PAIR)[0])


def test_a_machine_that_answers_once_and_no_more_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = MagicMock()
    engine.client.containers.get.side_effect = EngineError("Read timed out")
    reached = [cluster.Machine("ssh://b", engine)], dict[str, Any]()
    monkeypatch.setattr(linked, "reached", lambda urls: contextlib.nullcontext(reached))
    monkeypatch.setattr(linked, "try_read", lambda *_: SimpleNamespace(others=("ssh://b",)))
    assert "Read timed out" in linked.states("/home", "p")["ssh://b"]


def test_a_machine_that_is_away_stops_nothing() -> None:
    """Of those that are there each is asked."""
    parts, asked = [part("here"), part("ssh://b"), part("ssh://c")], list[str]()

    def act(one: Part) -> None:
        if one.machine.where == "ssh://b":
            raise EngineError("no answer")
        asked.append(one.machine.where)

    linked.for_all(parts, act)
    assert sorted(asked) == ["here", "ssh://c"]


def test_nothing_is_made_where_a_machine_is_away() -> None:
    """The former pair cannot be brought back then; what there is of it stays."""
    here, there = (SimpleNamespace(where=where, release=PAIR) for where in KEPT.urls)
    orders: Any = [here, there]
    with pytest.raises(HostError):
        linked.create("/home", {"here": part("here").machine}, orders, volume="v")


def test_what_another_machine_s_server_left_is_kept_under_its_own_name(tmp_path: Path) -> None:
    host = {"RestartPolicy": {"Name": "unless-stopped"}}
    dead = {"State": {"Status": "exited", "ExitCode": 72}, "HostConfig": host, "RestartCount": 0}
    log = b"sparkpin: starting the server\nsparkpin: ended: a worker has gone from torch's store\n"
    head = part("here", labels={"sparkpin.release": PAIR.tag}, attrs={**dead, "State": {"Status": "created"}})
    peer = part("ssh://c", attrs=dead, logs=lambda **_: log, labels={"sparkpin.release": "../../evil"})
    linked.remove(Paths(tmp_path, tmp_path, tmp_path), "p", [head, peer])
    assert (tmp_path / "serve/p/base-1/c" / crash_facts.LOG).read_bytes() == log


GIB = 1 << 30


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`cluster.check` of two machines with 100 and 60 GiB, for a release that needs 40 in 100 and 50 in 60 GiB. What
    Docker and ssh would tell is given."""
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")
    faces = [Interface("e", IPv4Interface(f"10.0.0.{n}/24"), True) for n in (1, 2)]
    facts = {
        where: HostFacts((face,), (), "", (), free * GIB, "r", where)
        for where, face, free in zip(KEPT.urls, faces, (70, 55), strict=True)
    }
    machines = {url: cluster.Machine(url, MagicMock(total=n)) for url, n in zip(KEPT.urls, (100, 60), strict=True)}
    needed = {100: 40, 60: 50}

    def room_for(paths: Paths, engine: Any, release: Any, checkpoint: Path, available: int) -> memory_limit.Room:
        plan: Any = SimpleNamespace(needed=needed[engine.total] * GIB, hints=())
        return memory_limit.Room(90 * GIB, plan)

    monkeypatch.setattr(memory_limit, "room_for", room_for)
    monkeypatch.setattr(runs_here, "uses_gpu", lambda *_: False)
    monkeypatch.setattr(cluster, "require_model", lambda *_: "/there")
    monkeypatch.setattr(cluster, "examined", lambda machine, release, folder: facts[machine.where])
    monkeypatch.setattr(cluster, "listeners", lambda port: "")

    def check(freed: dict[str, int] | None = None, **free: int) -> cluster.Checked:
        for where, more in free.items():
            name = "here" if where == "here" else "ssh://b"
            facts[name] = dataclasses.replace(facts[name], memory_available=more * GIB)
        return cluster.check(paths, machines, Cluster(KEPT.urls, "e"), PAIR, tmp_path, "127.0.0.1", freed or {})

    return check


def test_each_machine_has_to_have_the_memory_of_its_own_plan(two: Any) -> None:
    assert [room.plan.needed for room in two().rooms] == [40 * GIB, 50 * GIB]
    with pytest.raises(HostError, match=r"^here: .*needs 40.00 GiB, and 39.00 GiB are free"):
        two(here=39)
    with pytest.raises(HostError, match=r"^ssh://b: .*needs 50.00 GiB, and 41.00 GiB are free"):
        two(here=40, there=41)
    assert two({"here": 0, "ssh://b": 9 * GIB}).folders[1] == "/there", "a server of the recipe gives 9 back"


def test_the_store_s_port_has_to_be_free_unless_the_recipe_s_server_has_it(
    two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    monkeypatch.setattr(cluster, "listeners", lambda port: asked.append(port) or "another")  # type: ignore[func-returns-value]
    with pytest.raises(BusyError, match=str(STORE_PORT)):
        two()
    assert two({"here": 1}) and asked == [STORE_PORT]
