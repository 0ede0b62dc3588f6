"""What another machine answers about a checkpoint is not believed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import made_releases
import pytest

from sparkpin.core.errors import EngineError
from sparkpin.distribute.engines import read_answer
from sparkpin.releases import volumes

ROWS = {"a.safetensors": {"size": 4}}


def test_the_files_that_are_lacking_there() -> None:
    assert read_answer({"lacking": ["a.safetensors"], "free": 2**60}, ROWS).lacking == ["a.safetensors"]


@pytest.mark.parametrize(
    "answer",
    [
        {"lacking": ["/etc/passwd"], "free": 2**60},
        {"lacking": [["a.safetensors"]], "free": 2**60},
        {"lacking": "a.safetensors", "free": 2**60},
        {"lacking": [], "free": "much"},
        {"complete": 1},
        {},
    ],
)
def test_an_answer_that_is_none(answer: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        read_answer(answer, ROWS)


class Container(SimpleNamespace):
    """No host here answers wrongly by itself."""

    def logs(self, *, stdout: bool = True, stderr: bool = True) -> bytes:
        return self.output if stdout else self.errors  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: None


@pytest.mark.parametrize("output", [b"", b"3", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"failed": "a\\u001b[2J"}'])
def test_a_program_that_fails_or_answers_something_else(monkeypatch: pytest.MonkeyPatch, output: bytes) -> None:
    container, removed = Container(output=output, errors=b"\x1b[2J"), list[Any]()
    monkeypatch.setattr(volumes, "sweep", lambda *_: None)
    monkeypatch.setattr(volumes, "create", lambda *_, **__: container)
    monkeypatch.setattr(volumes, "put", lambda *_: None)
    monkeypatch.setattr(volumes, "remove", removed.append)
    engine: Any = None
    with pytest.raises(EngineError) as caught:
        volumes.ask(engine, made_releases.release(1), {"folder": "/model"}, mode="ro")
    assert "\x1b" not in str(caught.value) and removed == [container]
