"""What the program of another machine says, held against what ours would say.

The container is a stand-in with a real socket: a real one runs our program, which never says any of this.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import made_releases
import pytest

from sparkpin.bundle import copy as transfer
from sparkpin.checkpoint.content import RECORD
from sparkpin.core.errors import EngineError
from sparkpin.host.containers import Attached, Container

ROWS = {"a.safetensors": {"size": 4, "sha256": hashlib.sha256(b"data").hexdigest()}}
WANT = {"file": "a.safetensors", "offset": 0, "sha256": hashlib.sha256(b"").hexdigest()}


class Stranger:
    """A container that answers the given bytes, and then ends or says no more."""

    name = "stranger"

    def __init__(self, said: bytes, *, ends: bool) -> None:
        self.ours, self.theirs = socket.socketpair()
        threading.Thread(target=self.say, args=[said, ends], daemon=True).start()

    def say(self, said: bytes, ends: bool) -> None:
        with contextlib.suppress(OSError):
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
    [framed(b"[" * 50_000 + b"\n"), framed(b"[]\n"), framed(b"x\n"), framed(bytes(17 << 20)), b""],
    ids=["nested", "no object", "no JSON", "17 MiB", "nothing"],
)
def test_whatever_it_says_an_answer_is_not_waited_for_longer(said: bytes) -> None:
    with attached(framed(b'{"a": 1}\n') + said, ends=not said) as there:
        assert there.answers.get(timeout=10) == {"a": 1}
        assert there.answers.get(timeout=20) is None
        there.answers.put(None)
        with pytest.raises(EngineError):
            there.answer()


def test_its_words_move_no_cursor() -> None:
    lines: list[str] = []
    with attached(framed(b'{"said": "a\\u001b[2J"}\n{"whole": true}\n')) as there:
        assert transfer.answer_of(there, lines.append) == {"whole": True}
    assert len(lines) == 1 and "\x1b" not in lines[0]


@pytest.mark.parametrize(
    "answers",
    [
        [{"wants": [WANT | {"file": "/etc/passwd"}], "free": 2**60}],
        [{"wants": [WANT | {"offset": -1}], "free": 2**60}],
        [{"wants": [WANT | {"offset": 5}], "free": 2**60}],
        [{"wants": [WANT | {"offset": 0.5}], "free": 2**60}],
        [{"wants": [{}], "free": 2**60}],
        [{"wants": 1, "free": 2**60}],
        [{"wants": [WANT], "free": "much"}],
        [{}],
        [{"failed": "x"}],
        [{"wants": [WANT], "free": 2**60}, {"sha256": ROWS["a.safetensors"]["sha256"]}, {"wants": []}],
    ],
)
def test_it_gets_files_of_the_checkpoint_and_has_to_say_that_it_has_them(
    answers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"data")
    (tmp_path / RECORD).write_text(json.dumps({"files": ROWS}))
    said = b"".join(json.dumps(answer).encode() + b"\n" for answer in answers)
    monkeypatch.setattr(transfer.volumes, "receiving", lambda *_: attached(framed(said)))
    with pytest.raises(EngineError):
        transfer.carry(cast(Any, None), made_releases.release(1), tmp_path, print)
