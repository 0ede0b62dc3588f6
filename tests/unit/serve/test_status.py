"""What `status` and `logs` show."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
from certificates import certificate
from evidence_samples import PROJECT

from sparkpin.cli import serve as task
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.releases.container import HOME_LABEL
from sparkpin.serve import clients, status, unit
from sparkpin.serve import served as records
from sparkpin.serve.address import Address, Limits
from sparkpin.serve.cluster import Cluster
from sparkpin.serve.served import Served, Service, read, record_path, write


def served_at(home: Path, address: Address, model: str = "m", **more: Any) -> Served:
    """Of which no container is asked."""
    attrs = {"State": {"Status": "running"}}
    server: Any = SimpleNamespace(name="c", status="running", health="unknown", attrs=attrs, **more)
    return Served(str(home), "r", "sparkpin/r:v2-1", model, address, server, None)


def test_a_server_that_another_run_has_just_replaced_starts(tmp_path: Path) -> None:
    """A double: the moment between the engine's list and its log cannot be had otherwise."""

    def gone(**_: object) -> bytes:
        raise docker.errors.NotFound("No such container")

    assert status.state_of(served_at(tmp_path, Address(), logs=gone)).startswith(status.STARTS)


@pytest.mark.parametrize(
    ("other", "ended", "answered", "shown"),
    [
        (False, "2026-01-01T00:00:00Z", 0, True),
        (False, "2026-01-01T00:00:00Z", 2e9, False),  # served again since
        (False, "", 2e9, True),  # it is not known when
        (True, "2026-01-01T00:00:00Z", 0, False),
    ],
)
def test_a_death_is_shown_where_it_was_and_until_the_next_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: bool, ended: str, answered: float, shown: bool
) -> None:
    """Of a server that Docker has started again."""
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    write(paths.home, "r", Service(answered=answered))
    home = tmp_path / "other" if other else paths.home
    served = served_at(home, Address(), logs=lambda **_: b"ValueError: why\nsparkpin: ended with 1\n")
    attrs = {"State": {"Status": "running", "FinishedAt": ended}, "RestartCount": 1, "HostConfig": {}}
    served.server.attrs.update(attrs)
    status.show_more(paths, served)
    assert ("ValueError: why" in capsys.readouterr().out) == shown


STATISTICS = """(APIServer pid=7) INFO 11-29 10:06:55 [loggers.py:1] Avg prompt throughput: 9.9 tokens/s, Running: {}
(APIServer pid=7) INFO 11-29 10:06:55 [metrics.py:1] SpecDecoding metrics: Accepted: 9, Avg Draft acceptance rate: {}
"""
LOAD = "Avg prompt throughput: 9.9 tokens/s, Running: 2"


@pytest.mark.parametrize(
    ("log", "load"),
    [
        ("INFO:     Application startup complete.\n", ""),
        (STATISTICS.format(1, 50) + STATISTICS.format(2, 60), f"{LOAD}, Avg Draft acceptance rate: 60"),
        (STATISTICS.format(1, 50) + STATISTICS.format(2, 60).partition("\n")[0], LOAD),
    ],
)
def test_the_load_is_what_vllm_wrote_last(log: str, load: str) -> None:
    container: Any = SimpleNamespace(logs=lambda **_: log.encode())
    assert status.load_of(container) == load


def test_the_line_to_try_is_quoted_for_a_shell(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "ho me")
    served = served_at(paths.home, Address(host="0.0.0.0"), "a 'b")
    line = clients.curl_line(paths, served)
    words = shlex.split(line)
    assert json.loads(words[words.index("-d") + 1])["model"] == "a 'b" and "--cacert" not in words
    assert f"$(cat '{paths.home}/keys/r')" in line
    signed = served_at(paths.home, Address(host="0.0.0.0", cert=certificate(tmp_path / "own")[0]))
    assert "--cacert" in shlex.split(clients.curl_line(paths, signed))


@pytest.mark.parametrize("json", [False, True])
def test_one_recipe_is_shown_alone_and_one_that_is_none_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    paths, engine = Paths(PROJECT, tmp_path / "cache", tmp_path), Any
    run = [dataclasses.replace(served_at(tmp_path, Address()), recipe=name, ready=True) for name in ("one", "other")]
    monkeypatch.setattr(status, "served_here", lambda _: run)
    monkeypatch.setattr(status, "load_of", lambda _: "")
    status.status(paths, engine, "one", as_json=json)  # also of a recipe that is in no file any more
    shown = capsys.readouterr().out
    assert "one" in shown and "other" not in shown
    with pytest.raises(InputError) as caught:
        status.status(paths, engine, "smolm2", as_json=json)
    assert "smollm2" in str(caught.value)
    status.status(paths, engine, "smollm2", as_json=json)
    assert "other" not in capsys.readouterr().out


def test_an_address_of_another_version_is_not_kept(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    whole = Address(port=8001, cert="/c", tls_key="/k", allow=("/score",), limits=Limits(requests=9))
    write(paths.home, "r", Service(address=whole))
    assert read(paths.home, "r").address == whole
    for change in ({"port": 0}, {"host": "x"}, {"allow": ["/../x"]}, {"limits": {"body": "many"}}):
        path = record_path(paths.home, "r")
        path.write_text(json.dumps({"address": whole.model_dump(mode="json") | change}))
        with pytest.raises(InputError, match=str(path)):
            read(paths.home, "r")


def test_a_damaged_record_shows_no_secret(tmp_path: Path) -> None:
    path = record_path(tmp_path, "r")
    path.parent.mkdir()
    for text in ('{"orders": [{"release": {"env": {"VLLM_API_KEY": "a secret"}}}]}', '{"key": "a secret"'):
        path.write_text(text)
        with pytest.raises(InputError) as caught:
            read(tmp_path, "r")
        assert "a secret" not in str(caught.value)


@pytest.mark.parametrize("record", [None, "{"])
def test_a_server_whose_record_cannot_be_read_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str | None
) -> None:
    """Another user's, say: what answers at the default address is another server."""
    path = record_path(tmp_path, "r")
    path.parent.mkdir()
    if record:
        path.write_text(record)
    attrs: dict[str, Any] = {"HostConfig": {"PortBindings": {"8000/tcp": [{"HostIp": "::1", "HostPort": "8001"}]}}}
    proxy: Any = SimpleNamespace(status="running", attrs=attrs)
    monkeypatch.setattr(records, "find", lambda *_: proxy)
    monkeypatch.setattr(records, "client_of", lambda *_: pytest.fail("asked"))
    labels, engine = {HOME_LABEL: str(tmp_path), records.LABEL: "r"}, Any
    for health in ("healthy", "starting"):
        server: Any = SimpleNamespace(labels=labels, name="s", status="running", health=health)
        found = records.describe(engine, server)
        assert (found.address.host, found.address.port, found.ready) == ("::1", 8001, health == "healthy")


def test_the_unit_of_another_folder_s_project_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for project, named in ((PROJECT, False), (tmp_path / "project", True)):
        paths = Paths(project, tmp_path / "cache", tmp_path / "home")
        write(paths.home, "r", Service(cluster=Cluster(("here", "ssh://b"))))
        unit.show_unit(paths, "r")
        text = capsys.readouterr().out
        assert "\nExecStartPre=" in text and "docker -H ssh://b" in text
        assert (f'SPARKPIN_PROJECT={project}"' in text) == named == ('/bin/sparkpin" serve' in text)


@pytest.mark.parametrize("wrong", [{"limit": "bodies=1"}, {"port": 0}, {"tls_key": "k.pem"}])
def test_a_wrong_option_is_told_before_the_state_of_a_release(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="|".join(f"--{name.replace('_', '-')}" for name in wrong)):
        task.serve(Paths(PROJECT, tmp_path / "cache", tmp_path / "home"), "no-such-release", **wrong)


@pytest.mark.parametrize("more", [{"port": 8001}, {"tag": "base-1"}, {"nodes": "here,ssh://b"}, {"drain": 0}])
def test_a_unit_is_of_what_is_current_as_it_was_served_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    monkeypatch.setattr(task, "current_of", lambda *_: SimpleNamespace(recipe="r"))
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    task.serve(paths, unit=True)
    with pytest.raises(InputError):
        task.serve(paths, unit=True, **more)
