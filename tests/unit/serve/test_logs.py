"""The log of a service: by lines, and over the restarts and changes of its container. Docker is given; a real one is in
tests/engine/serve/test_serving.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import docker.errors
import pytest
from heard import heard

from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.inside import STAYS_DOWN
from sparkpin.serve import crash_facts, linked, logs, status
from sparkpin.serve.served import LABEL, RELEASE_LABEL


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(logs, "GONE_SECONDS", 0.2)


class Service:
    """A container with a log, which ends each stream where a list has ended, and the states that `find` then sees."""

    def __init__(self, name: str, *streams: list[str], size: int = 7, ends: str = "exited") -> None:
        self.id, self.streams, self.size, self.ends = name, list(streams), size, ends
        self.written = list[str]()
        self.attrs = {"State": {"Status": ends, "ExitCode": 0}, "Created": name}

    @property
    def status(self) -> str:
        return "running" if self.streams else self.ends

    def logs(self, *, stream: bool = False, tail: int = 0, since: float | None = None, **_: object) -> Any:
        if not stream:
            return "".join(self.written[-tail:]).encode()
        before = [line for line in self.written if since]  # Docker gives those of the second once more
        new = self.streams.pop(0)
        self.written += [f"2026-01-01T00:00:00.{len(self.written) + n:09d}Z {line}" for n, line in enumerate(new)]
        return self.chunks("".join(before + self.written[len(self.written) - len(new) :]).encode())

    def chunks(self, log: bytes) -> Iterator[bytes]:
        yield from (log[at : at + self.size] for at in range(0, len(log), self.size))
        if self.ends == "broken" and self.streams:
            raise docker.errors.DockerException("the connection was broken")


LINES = ["one\n", 'INFO:      - "GET /metrics HTTP/1.1" 200 OK\n', "two \xe7\n", "three"]


@pytest.mark.parametrize("size", [1, 7, 60, 10_000])
def test_a_followed_log_is_filtered_by_lines_and_not_by_chunks(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    one: Any = Service("a", LINES, size=size)
    logs.follow_log(lambda: one, {}, "a | ")
    assert capsys.readouterr().out == "a | one\na | two \xe7\na | three"


@pytest.mark.parametrize("ends", ["exited", "broken"])
def test_it_goes_on_where_the_container_is_started_again(ends: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where Docker's answer breaks off. No line comes twice, nor any that was read before."""
    one: Any = Service("a", ["one\n", "two\n"], ["three\n"], ends=ends)
    one.written = ["2025-01-01T00:00:00.000000000Z zero\n"]
    lines, moment = logs.last_lines(one, 0)
    assert lines == []
    logs.follow_log(lambda: one, {"a": moment}, "")
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_it_goes_on_in_the_container_that_takes_the_place(capsys: pytest.CaptureFixture[str]) -> None:
    """All of that, which began before the other ended."""
    old: Any = Service("a", ["old\n"] * 3)
    new: Any = Service("b", ["new\n"])
    logs.follow_log(lambda: old if old.streams else new, {}, "")
    assert capsys.readouterr().out == "old\nold\nold\nnew\n"


def test_it_ends_once_nothing_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "GONE_SECONDS", 3600.0)
    down: Any = Service("a", ["x\n", f"sparkpin: {STAYS_DOWN}\n"])
    assert "stays down" in logs.follow_log(lambda: down, {}, "")
    removed: Any = Service("b", ["x\n"])
    assert "removed" in logs.follow_log(lambda: removed if removed.streams else None, {}, "")


IDLE = [
    'INFO:      - "POST /v1/completions HTTP/1.1" 200 OK\n',
    "(APIServer pid=7) INFO 11-29 10:11:18 [loggers.py:335] Engine 000: Avg prompt throughput: 3.2 tokens/s, Avg "
    "generation throughput: 0.1 tokens/s, Running: 0 reqs, Waiting: 0 reqs, CPU KV cache usage: 0.0%\n",
]


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_the_last_lines_are_those_for_people(count: int) -> None:
    """However long nobody has asked anything."""
    one: Any = Service("a", ["one\n", "two\n", *IDLE * 1000])
    list(one.logs(stream=True))
    assert logs.last_lines(one, count)[0] == [b"one\n", b"two\n"][max(2 - count, 0) :]


def test_a_kept_log_stands_for_no_server_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two that run one has to be named."""
    paths, run = Paths(tmp_path, tmp_path, tmp_path), list[Any]()
    folder = tmp_path / "serve/a/base-1"
    folder.mkdir(parents=True)
    for name in (crash_facts.LOG, crash_facts.REPORT):
        (folder / name).write_text("why\n")
    for module in (logs, status):
        monkeypatch.setattr(module, "services", lambda *_: run)
    engine: Any = None
    logs.logs(paths, engine, None, lines=9, follow=False)
    assert capsys.readouterr().out == "why\n"
    run += [SimpleNamespace(labels={LABEL: name}) for name in "ab"]
    with pytest.raises(InputError):
        logs.logs(paths, engine, None, lines=9, follow=False)


def test_the_log_of_a_server_that_was_started_again_ends_with_its_last_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In short, with the place of the rest, which nobody has written before."""
    paths, engine = Paths(tmp_path, tmp_path, tmp_path), cast(Engine, None)
    there: Any = Service("a", [])
    there.written = [
        "sparkpin: starting the server\n",
        "ValueError: of its first life\n",
        "sparkpin: ended with 1\n",
        "sparkpin: starting the server\n",
    ]
    there.labels = {LABEL: "a", RELEASE_LABEL: "sparkpin/a:base-1"}
    there.attrs = {
        "State": {"Status": "running", "ExitCode": 0, "FinishedAt": "2026-01-01T00:00:00Z"},
        "HostConfig": {"RestartPolicy": {"Name": "on-failure"}},
        "RestartCount": 1,
    }
    for module in (logs, status):
        monkeypatch.setattr(module, "services", lambda *_: [there])
    monkeypatch.setattr(linked, "find", lambda *_: there)
    said = heard()
    logs.logs(paths, engine, None, lines=9, follow=False)
    (line,) = said
    assert "of its first life" in line and str(tmp_path / "serve/a/base-1" / crash_facts.REPORT) in line
