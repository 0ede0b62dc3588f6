"""Lines that tell how far long work is: also while nothing moves, and never two in a row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest

from sparkpin.core import progress as telling
from sparkpin.core.progress import progress, waiting


def test_bytes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(telling, "EVERY", 0.0)
    with progress(said.append, 3_000_000, after="the engine unpacks them") as add:
        add(1_000_000)
        add(2_000_000)
        add(1)  # a tar is larger than what it holds
    assert "  1.0 of 3.0 MB" in said and said[-1] == "  3.0 of 3.0 MB: the engine unpacks them"
    with progress(said.append) as add:
        add(2_500_000)
    assert said[-1] == "  2.5 MB"


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (
            partial(progress, total=2_000_000, before="the engine gathers them"),
            "  0.0 of 2.0 MB: the engine gathers them",
        ),
        (partial(waiting, what="asking the engine"), "  asking the engine, "),
    ],
)
def test_silence_is_told(
    work: Callable[..., AbstractContextManager[object]], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes, as from an engine that gathers what it was asked for, or one that knows no end."""
    monkeypatch.setattr(telling, "EVERY", 0.0)
    heard, said = threading.Event(), list[str]()

    def say(line: str) -> None:
        said.append(line)
        heard.set()

    with work(say):
        assert heard.wait(60)
    assert said[0].startswith(told)
    assert not any(thread.name == "progress" for thread in threading.enumerate())


def test_short_work_says_nothing() -> None:
    said: list[str] = []
    with progress(said.append, 2) as add:
        add(1)
        add(1)
    assert said == []
