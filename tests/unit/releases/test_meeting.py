"""Nodes that meet, over real sockets of 127.0.0.1: who is let in, who is not, and when they part.

tests/engine/serve/test_peers.py has them as process 1 of containers.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import resource
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from watched import free_port, until

from sparkpin.releases import peers
from sparkpin.releases.peers import Peers, Refused

KEY = b"5e" * 32


class Site:
    """Nodes of one set. said: what each told its log."""

    def __init__(self, nodes: int = 2) -> None:
        self.port, self.nodes, self.said = free_port(), nodes, list[str]()
        self.lost: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def node(self, rank: int, *, key: bytes = KEY, release: str = "a" * 64, silent: int = 60, **more: Any) -> Peers:
        section = {"rank": rank, "nodes": self.nodes, "own": "127.0.0.1", "head": "127.0.0.1", "port": self.port}
        section |= {"silent": silent, "release": release} | more
        same = {"release": section["release"], "checkpoint": "c" * 64, "nodes": section["nodes"]}
        made = Peers(
            section,
            key,
            json.dumps(same),
            say=self.said.append,
            beat=lambda: None,
            lost=lambda why: self.lost.put((rank, why)),
        )
        made.start()
        return made

    def listens(self) -> bool:
        return any("waiting for" in line for line in self.said)

    def connection(self, own: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20, source_address=(own, 0))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(peers, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(peers, "TELL_SECONDS", 0.0)


@pytest.fixture
def site() -> Site:
    return Site()


def meet(*nodes: Peers) -> None:
    for node in nodes:
        node.met.result(timeout=60)


def test_an_empty_key_is_nobodys(site: Site) -> None:
    with pytest.raises(Refused, match="empty"):
        site.node(0, key=b"")


def test_three_meet_in_any_order_and_part_together() -> None:
    site = Site(3)
    last = site.node(2)
    until(lambda: any("calling again" in line for line in site.said), 60)
    nodes = [site.node(0), site.node(1), last]
    meet(*nodes)
    assert site.lost.empty()
    with pytest.raises(OSError):
        site.connection()  # nothing listens any more
    end(nodes[2])
    parted = dict(site.lost.get(timeout=60) for _ in range(3))
    assert parted[0] == "rank 2 closed the connection" and parted[1] == "rank 0 closed the connection"


def end(node: Peers) -> None:
    def fail() -> None:
        raise RuntimeError("ended by the test")

    node.beat = fail


@contextlib.contextmanager
def freezing(node: Peers) -> Iterator[None]:
    """Its event loop stands still, as its process does when somebody stops it."""
    going, stopped = threading.Event(), threading.Event()

    def stand() -> None:
        stopped.set()
        going.wait(60)

    node.beat = stand
    assert stopped.wait(60)
    yield
    node.beat = lambda: None
    going.set()


def test_a_silent_one_is_let_go_and_one_that_stood_still_does_not_blame_the_others(site: Site) -> None:
    head, worker = site.node(0, silent=4), site.node(1)
    meet(head, worker)
    with freezing(worker):
        assert site.lost.get(timeout=60) == (0, "rank 1 was silent for 4 s")
    assert site.lost.get(timeout=60) == (1, "rank 0 closed the connection")


def test_who_listens_in_the_place_of_rank_0_learns_no_release(site: Site) -> None:
    with socket.create_server(("127.0.0.1", site.port)) as listener:
        worker = site.node(1)
        connection, _ = listener.accept()
        with connection, connection.makefile("rwb", buffering=0) as lines:
            lines.write(b"00" * 32 + b"\n")
            rank, nonce, proof = lines.readline().decode().split()
            assert rank == "1" and proof == proof_of("caller", "00" * 32, nonce, "1")
            lines.write(f"{proof} {worker.release}\n".encode())  # its own proof, sent back
            assert lines.readline() == b"", "it says no more"
    until(lambda: any("it has not the key of these nodes; calling again" in line for line in site.said), 60)


def proof_of(*words: str) -> str:
    return hmac.new(KEY, "\n".join(words).encode(), hashlib.sha256).hexdigest()


def test_a_recorded_handshake_opens_nothing(site: Site) -> None:
    head = site.node(0)
    until(site.listens, 60)
    with site.connection() as first, first.makefile("rwb", buffering=0) as lines:
        nonce = lines.readline().decode().strip()
        said = f"1 {'11' * 32} {proof_of('caller', nonce, '11' * 32, '1')}\n".encode()
        lines.write(said)
        assert lines.readline().split(b" ", 1)[1].strip() == head.release.encode(), "it has the key"
    with site.connection() as again, again.makefile("rwb", buffering=0) as lines:
        assert lines.readline().decode().strip() != nonce
        lines.write(said)
        assert lines.readline() == b""
    assert not head.met.done()


HOSTILE = {
    "nothing": b"",
    "garbage": bytes(range(256)) * 4 + b"\n",
    "a line without an end": b"1" * (1 << 20),
    "no rank": b"99 " + b"1" * 64 + b" " + b"0" * 64 + b"\n",
}


@pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
def test_strangers_see_a_nonce_and_hold_nobody_up(site: Site, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    """The head itself drops them: at once, and who says nothing after a while."""
    monkeypatch.setattr(peers, "HANDSHAKE_SECONDS", 600 if said else 0.2)
    head = site.node(0)
    until(site.listens, 60)
    with site.connection() as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said)
        seen = bytearray()
        with contextlib.suppress(ConnectionError):
            while part := stranger.recv(4096):
                seen += part
        assert len(seen) in (0, 65), "the nonce; none where much was said, whose rest came back as a reset"
    monkeypatch.setattr(peers, "HANDSHAKE_SECONDS", 5)
    meet(head, site.node(1))


def test_a_listener_that_says_nothing_is_called_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HANDSHAKE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", site.port)):
        worker = site.node(1)
        until(lambda: any("TimeoutError; calling again" in line for line in site.said), 60)
    monkeypatch.setattr(peers, "HANDSHAKE_SECONDS", 5)
    meet(worker, site.node(0))


def is_closed(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def test_five_hundred_that_say_nothing(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another address, as on a link: where there are too many, those go first."""
    monkeypatch.setattr(peers, "HANDSHAKE_SECONDS", 600)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    head = site.node(0)
    until(site.listens, 60)
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(site.connection())
        held = [stack.enter_context(site.connection("127.0.0.2")) for _ in range(500)]
        until(lambda: sum(map(is_closed, held)) == 501 - peers.STRANGERS, 60)
        assert not is_closed(own), "though it is the oldest of all"
        meet(head, site.node(1))


def test_a_worker_that_was_started_again_before_all_were_there_counts_once() -> None:
    site = Site(3)
    head = site.node(0)
    site.node(1)
    until(lambda: any("rank 1 is here" in line for line in site.said), 60)
    site.node(1)
    until(lambda: sum("rank 1 is here, 1 of 2" in line for line in site.said) > 1, 60)
    assert not head.met.done()
    meet(site.node(2), head)


def test_a_checkpoint_without_its_record_is_refused(tmp_path: Path) -> None:
    section = {"release": "a" * 64, "nodes": 2}
    with pytest.raises(Refused, match="not complete"):
        peers.release_here(section, tmp_path / "sparkpin.json")
    (tmp_path / "sparkpin.json").write_text("{}")
    told = json.loads(peers.release_here(section, tmp_path / "sparkpin.json"))
    assert told == section | {"checkpoint": hashlib.sha256(b"{}").hexdigest()}


def test_the_address_may_come_later(site: Site) -> None:
    with socket.create_server(("127.0.0.1", site.port)):
        head = site.node(0)
        until(lambda: any("cannot listen" in line for line in site.said), 60)
    meet(head, site.node(1))
