"""Which machines a release is served on: what is said, what is kept, what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkpin.core.errors import CheckpointError, EngineError, HostError, InputError, NetworkError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.host.containers import NotFound
from sparkpin.serve import linked, nodes
from sparkpin.serve.nodes import Nodes, NodesOptions

PAIR: Any = SimpleNamespace(tag="sparkpin/p:base-1", recipe="p", argv=("vllm", "serve", "/model", "--nnodes", "2"))
ALONE: Any = SimpleNamespace(tag="sparkpin/r:base-1", recipe="r", argv=("vllm", "serve", "/model"))
KEPT = Nodes(("here", "ssh://b"), "10.0.0.0/24", True)


@pytest.mark.parametrize("text", ["here,ssh://b", "ssh://b", "ssh://b/,local", " ssh://b , here "])
def test_this_machine_is_rank_0_named_or_not(text: str) -> None:
    assert NodesOptions(text).applied(None, PAIR) == Nodes(("here", "ssh://b"))


def test_options_change_what_was_kept() -> None:
    assert NodesOptions().applied(KEPT, PAIR) == KEPT and NodesOptions("ssh://b").applied(KEPT, PAIR) == KEPT
    assert NodesOptions("ssh://c").applied(KEPT, PAIR) == Nodes(("here", "ssh://c"))  # what was taken there is not here
    assert NodesOptions(link="eth1").applied(KEPT, PAIR) == Nodes(KEPT.urls, "eth1")
    assert NodesOptions(shared=True).applied(Nodes(KEPT.urls, "l"), PAIR) == Nodes(KEPT.urls, "l", True)
    assert NodesOptions().applied(KEPT, ALONE) is None


@pytest.mark.parametrize(
    ("options", "known", "release", "said"),
    [
        (NodesOptions(), None, PAIR, "is for 2 machines, and none are named"),
        (NodesOptions("here"), None, PAIR, "--nodes names 1"),
        (NodesOptions("ssh://b,ssh://c"), None, PAIR, "--nodes names 3"),
        (NodesOptions("ssh://b,ssh://b"), None, PAIR, "ssh://b is named twice"),
        (NodesOptions("spark2"), None, PAIR, "saw 'spark2'"),
        (NodesOptions("ssh://b"), None, ALONE, "is for one machine"),
        (NodesOptions(link="eth1"), None, ALONE, "is for one machine"),
    ],
)
def test_what_does_not_fit_is_refused(options: NodesOptions, known: Nodes | None, release: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        options.applied(known, release)


def test_the_machines_are_kept(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")
    assert nodes.kept(paths, "p.1") is None and nodes.recipes_kept(paths) == []
    nodes.keep(paths, "p.1", KEPT)
    assert nodes.kept(paths, "p.1") == KEPT and nodes.recipes_kept(paths) == ["p.1"]
    nodes.path_of(paths, "p.1").write_text('{"urls": 3}')
    with pytest.raises(InputError, match=r"p\.1\.nodes\.json"):
        nodes.kept(paths, "p.1")


def test_the_key_is_its_owners_alone(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")
    key = linked.key_of(paths, "p", new=False)
    path = paths.home / "keys/p.nodes"
    assert len(bytes.fromhex(key)) == 32 and path.stat().st_mode & 0o777 == 0o600
    assert linked.key_of(paths, "p", new=False) == key != linked.key_of(paths, "p", new=True)


def test_all_that_is_wrong_is_told_at_once() -> None:
    def act(number: int) -> int:
        if number == 1:
            raise NetworkError("no way to b", next_step="ssh b")
        if number == 2:
            raise CheckpointError("half there at c", next_step="copy it")
        return number

    with pytest.raises(NetworkError, match=r"(?s)no way to b.*half there at c.*ssh b.*copy it") as caught:
        nodes.each([0, 1, 2], act)
    assert caught.value.exit_code == 6
    with pytest.raises(CheckpointError):
        nodes.each([0, 2], act)
    assert nodes.each([0, 3], act) == [0, 3]


def checked(memory: int) -> Any:
    facts = [
        SimpleNamespace(where=where, memory_available=free) for where, free in (("here", 9 << 30), ("ssh://b", memory))
    ]
    room = SimpleNamespace(plan=SimpleNamespace(hints=()), needed=4 << 30)
    return SimpleNamespace(facts=facts, rooms=(room, room))


def test_memory_on_each_machine() -> None:
    nodes.require_rooms(checked(5 << 30), PAIR)
    with pytest.raises(HostError, match=r"^ssh://b: sparkpin/p:base-1 needs 4.00 GiB, and 3.00 GiB are free"):
        nodes.require_rooms(checked(3 << 30), PAIR)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([{"met": []}, {"error": "No route to host"}], r"ssh://b: 10.0.0.2 \(b0\) does not reach 10.0.0.1: No route"),
        ([{"met": []}, {"own": "192.0.2.2", "seconds": 1, "bulk": True}], "starts at 192.0.2.2, not at 10.0.0.2"),
        ([{"met": []}, {"own": "10.0.0.2", "seconds": 1, "bulk": False}], "small packets reach 10.0.0.1"),
        ([{"error": "Address already in use"}, {"error": "Connection refused"}], "port 29502 of 10.0.0.1 is taken"),
        ([{"met": ["10.0.0.2"]}, {"own": "10.0.0.2", "seconds": 0.5, "bulk": True}], ""),
    ],
)
def test_the_link_is_tried(monkeypatch: pytest.MonkeyPatch, answers: list[dict[str, Any]], said: str) -> None:
    """The answers are made up: a switch that drops large packets cannot be had here."""
    faces = [SimpleNamespace(address=f"10.0.0.{n}", name=f"{name}0", mtu=9000) for n, name in ((1, "a"), (2, "b"))]
    machines: Any = [SimpleNamespace(rank=rank, where=where) for rank, where in enumerate(("here", "ssh://b"))]
    link: Any = SimpleNamespace(interfaces=faces)
    monkeypatch.setattr(nodes, "within", lambda machine, *rest: answers[machine.rank])
    if not said:
        assert nodes.meet(link, machines, PAIR) == 0.5
        return
    with pytest.raises(SparkpinError, match=said):
        nodes.meet(link, machines, PAIR)


class Volumes:
    """Of an engine that is not there: what is removed, and one that a container has."""

    def __init__(self) -> None:
        self.left = {"sparkpin-checkpoint-" + letter * 16 for letter in "abcd"}

    def get(self, name: str) -> Any:
        def remove() -> None:
            if "c" * 16 in name:
                raise EngineError("volume is in use")
            self.left.remove(name)

        if name not in self.left:
            raise NotFound(name)
        return SimpleNamespace(remove=remove)


def test_checkpoints_go_from_other_machines_with_their_releases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")
    nodes.keep(paths, "p", Nodes(("here", "ssh://b", "ssh://away")))
    volumes, said = Volumes(), list[str]()
    machine = nodes.Machine(1, "ssh://b", SimpleNamespace(client=SimpleNamespace(volumes=volumes)))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def reached(urls: tuple[str, ...]) -> Iterator[Any]:
        assert urls == ("ssh://b", "ssh://away")
        yield [machine], {"ssh://away": NetworkError("no way")}

    monkeypatch.setattr(linked, "reached", reached)
    a, b, c, gone = (SimpleNamespace(**vars(PAIR), checkpoint_key=letter * 64) for letter in "abce")
    alone = SimpleNamespace(**vars(ALONE), checkpoint_key="d" * 64)
    linked.drop_checkpoints(paths, [a, b, c, gone, alone], [b], said.append)  # type: ignore[list-item]
    assert {name[-1] for name in volumes.left} == {"b", "c", "d"}
    assert any("in use" in line for line in said) and any("ssh://away is away" in line for line in said)
