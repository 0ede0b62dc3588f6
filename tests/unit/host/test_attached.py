"""What the program of another machine says, held against what ours would say.

The container is a stand-in with a real socket: a real one runs our program, which never says any of this.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import struct
from collections.abc import Iterator
from typing import Any, cast

import pytest

from sparkpin.core.errors import EngineError
from sparkpin.host.attached import Attached
from sparkpin.host.containers import Container

ROWS = {"a.safetensors": {"size": 4, "sha256": hashlib.sha256(b"data").hexdigest()}}
WANT = {"file": "a.safetensors", "offset": 0, "sha256": hashlib.sha256(b"").hexdigest()}


class Stranger:
    """A container that answers the given bytes, and then ends or says no more."""

    name = "stranger"

    def __init__(self, said: bytes, *, ends: bool) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.theirs.sendall(said)
        if ends:
            self.theirs.shutdown(socket.SHUT_WR)

    def attach_socket(self, **_: Any) -> socket.socket:
        return self.ours


def framed(data: bytes) -> bytes:
    return struct.pack(">BxxxL", 1, len(data)) + data


@contextlib.contextmanager
def attached(said: bytes, *, ends: bool = True) -> Iterator[Attached]:
    stranger = Stranger(said, ends=ends)
    with contextlib.closing(Attached(cast(Container, stranger))) as there, stranger.theirs:
        yield there


@pytest.mark.parametrize(
    "said",
    [framed(b"[" * 50_000 + b"\n"), framed(b"[]\n"), framed(b"x\n"), struct.pack(">BxxxL", 1, 2**32 - 1), b""],
    ids=["nested", "no object", "no JSON", "4 GiB", "nothing"],
)
def test_whatever_it_says_an_answer_is_not_waited_for_longer(said: bytes) -> None:
    with attached(framed(b'{"a": 1}\n') + said, ends=not said) as there:
        assert there.answers.get(timeout=10) == {"a": 1}
        assert there.answers.get(timeout=1) is None
        there.answers.put(None)
        with pytest.raises(EngineError):
            there.answer()
