"""Lines that tell how far long work is: also while nothing moves, and never two in a row."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
from heard import heard

from sparkpin.core import progress as telling
from sparkpin.core.progress import progress, waiting


def test_lines_come_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    said = heard()
    with progress(2) as add:
        add(2)
    assert said == [], "short work"
    monkeypatch.setattr(telling, "EVERY", 0.01)
    for total, counts, last in (
        (3_000_000, (1_000_000,), "  1.0 of 3.0 MB"),
        (3_000_000, (3_000_000, 1), "  3.0 of 3.0 MB: the engine unpacks them"),  # a tar is larger than what it holds
        (None, (2_500_000,), "  2.5 MB"),
    ):
        with progress(total, after="the engine unpacks them") as add:
            for number in counts:
                add(number)
            for _ in range(6000):
                if said and said[-1] == last:
                    break
                time.sleep(0.01)
        assert said[-1] == last


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (partial(progress, 2_000_000, before="gathers"), "  0.0 of 2.0 MB: gathers"),
        (partial(waiting, "asking the engine"), "  asking the engine, "),
    ],
)
def test_silence_is_told(
    work: Callable[..., AbstractContextManager[object]], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes, as from an engine that gathers what it was asked for, or one that knows no end."""
    monkeypatch.setattr(telling, "EVERY", 0.05)
    came = threading.Event()
    said = heard(lambda line: came.set())
    with work():
        assert came.wait(60)
    assert said[0].startswith(told)
    assert not any(thread.name == "progress" for thread in threading.enumerate())
