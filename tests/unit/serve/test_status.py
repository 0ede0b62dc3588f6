"""What `status` and `logs` show."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import made_releases
import pytest
from certificates import certificate
from evidence_samples import PROJECT

from sparkpin.commands import status as commands_status
from sparkpin.core.errors import DownError, EngineError, InputError
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Releases
from sparkpin.serve import keys, load, status
from sparkpin.serve.address import Address, AddressOptions
from sparkpin.serve.rules import Limits
from sparkpin.serve.served import Served, address_path, keep_address, kept_address


def test_logs_leave_out_the_health_check_and_nothing_else() -> None:
    watch = [
        b'INFO:      - "POST /v1/completions HTTP/1.1" 200 OK\n',
        b'INFO:      - "GET /metrics HTTP/1.1" 200 OK\n',
        b'INFO:     172.20.0.1:0 - "GET /health HTTP/1.1" 200 OK\n',
    ]
    told = [
        b'INFO:     172.20.0.1:0 - "POST /v1/completions HTTP/1.1" 200 OK\n',
        b'INFO:      - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n',
        b'INFO:     172.20.0.1:0 - "GET /v1/models HTTP/1.1" 200 OK\n',
        b"no line yet",
    ]
    assert status.told_to_people(b"".join([*watch, *told])) == told


@pytest.mark.parametrize("size", [1, 7, 60, 10_000])
def test_a_followed_log_is_filtered_by_lines_and_not_by_chunks(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    log = b'one\nINFO:      - "GET /metrics HTTP/1.1" 200 OK\ntwo \xc3\xa7\nthree'
    chunks = [log[at : at + size] for at in range(0, len(log), size)]
    container: Any = SimpleNamespace(logs=lambda **_: iter(chunks))
    status.follow_log(container, 9, "a | ")
    assert capsys.readouterr().out == "a | one\na | two ç\na | three"


def test_with_nothing_served_the_hint_names_the_one_recipe_that_is_current(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    assert status.how_to_serve(paths) == "invoke up"
    Releases(paths).point(made_releases.release(1, "passed"))
    assert status.how_to_serve(paths) == "invoke serve --recipe tiny"
    Releases(paths).point(made_releases.release(2, "passed", recipe="other"))
    assert status.how_to_serve(paths) == "invoke serve"
    assert status.how_to_serve(paths, "other") == "invoke serve --recipe other"
    assert status.how_to_serve(paths, "qwen3.5-122b") == "invoke serve --recipe qwen3.5-122b"
    assert status.how_to_serve(paths, "nosuch") == "invoke recipe list"


def test_a_server_of_another_home_is_marked(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    own = Served(str(paths.home), "tiny", "sparkpin/tiny:v2-1", "c", "127.0.0.1", 8000, "m", "running", True)
    assert status.row(paths, own, None)[0] == "tiny"
    assert status.row(paths, dataclasses.replace(own, home="/elsewhere"), None)[0] == "tiny (another home)"


def test_a_row_tells_where_it_listens_and_the_load_is_a_line() -> None:
    served = Served("h", "r", "sparkpin/r:v2-1", "c", "0.0.0.0", 8000, "m", "running", True, key="x", tls=True)
    assert status.reached_at(served) == "https://0.0.0.0:8000/v1 (key)"
    assert served.url == "https://127.0.0.1:8000/v1"
    assert dataclasses.replace(served, host="::", tls=False).url == "http://[::1]:8000/v1"
    assert status.words(dataclasses.replace(served, ready=False, state="restarting", restarts=2), None).startswith(
        "starts"
    )
    first = "vllm:generation_tokens_total 10.0\nvllm:num_requests_running 1.0\nvllm:kv_cache_usage_perc 0.5\n"
    second = first.replace("10.0", "40.0") + "vllm:prefix_cache_queries_total 8.0\nvllm:prefix_cache_hits_total 2.0\n"
    assert load.line(first, second, 2.0) == "15 tokens/s, 1 running, KV cache 50.0%, prefix cache hits 25%"
    assert load.line("", "", 1.0) == ""


def test_a_server_that_another_run_has_just_replaced_starts() -> None:
    """A double: the moment between the engine's list and its log cannot be had otherwise."""

    def gone(**_: object) -> bytes:
        raise docker.errors.NotFound("No such container")

    served = Served("h", "r", "sparkpin/r:v2-1", "c", "127.0.0.1", 8000, "m", "running", False)
    container: Any = SimpleNamespace(logs=gone)
    assert status.words(served, container).startswith(status.STARTS)


def test_the_table_fits_into_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With long names, and all that a column may say; its release and its address stay whole."""
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    tag, name = "sparkpin/qwen3.5-122b-262k:v2-drafter-0123456789ab", "sparkpin-qwen3.5-122b-262k-01234567"
    served = Served("h", "qwen3.5-122b-262k", tag, name, "0.0.0.0", 8000, "m", "exited", False, key="x", restarts=2)
    monkeypatch.setenv("COLUMNS", "80")
    status.show_all(paths, (dataclasses.replace(served, tls=True),), {name: None})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(any(whole in line for line in lines) for whole in ("v2-drafter-0123456789ab", "https://0.0.0.0:8000/v1"))
    (more,) = (line for line in lines if line.startswith("qwen3.5-122b-262k: "))
    assert "2" in more.partition(": ")[2], "how often it was started again"


def test_lines_for_a_shell_are_quoted(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "ho me")
    served = Served(str(paths.home), "r", "sparkpin/r:v2-1", "c", "0.0.0.0", 8000, "a 'b", "running", True, key="x")
    words = shlex.split(status.curl_line(paths, served, ""))
    assert json.loads(words[words.index("-d") + 1])["model"] == "a 'b"
    assert f"$(cat '{paths.home}/keys/r')" in status.curl_line(paths, served, "")
    assert "--cacert" in status.curl_line(paths, served, certificate(tmp_path / "own")[0])


def test_a_shell_takes_the_lines_of_env_as_they_are_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without an engine: what it is asked for is given here."""
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    name = "a '$(touch /tmp/no) b"
    served = Served(str(paths.home), "r", "sparkpin/r:v2-1", "c", "0.0.0.0", 8000, name, "running", True, key="x")
    for what, value in (("service_of", None), ("front_of", None), ("address_of", None), ("describe", served)):
        monkeypatch.setattr(status, what, lambda *_, value=value: value)
    with pytest.raises(InputError, match="is not there"):
        status.show_env(paths, None, None)  # type: ignore[arg-type]
    path = keys.path_of(paths, "r")
    path.parent.mkdir(parents=True)
    path.write_text("k-e;y\n")
    status.show_env(paths, None, None)  # type: ignore[arg-type]
    script = f'{capsys.readouterr().out}\nprintf \'%s\\n\' "$OPENAI_BASE_URL" "$OPENAI_API_KEY" "$OPENAI_MODEL"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["http://127.0.0.1:8000/v1", "k-e;y", name]


def test_an_address_of_another_version_is_not_kept(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    keep_address(paths, "r", '{"port": 8000}')
    assert kept_address(paths, "r") is None
    whole = Address(port=8001, cert="/c", tls_key="/k", allow=("/score",), limits=Limits(requests=9))
    keep_address(paths, "r", whole.text)
    assert kept_address(paths, "r") == whole
    for change in (
        {"port": "8001"},
        {"allow": ["/../x"]},
        {"limits": dataclasses.asdict(Limits()) | {"body": "many"}},
        {"host": 1},
    ):
        address_path(paths, "r").write_text(json.dumps(json.loads(whole.text) | change))
        with pytest.raises(InputError, match=str(address_path(paths, "r"))):
            kept_address(paths, "r")


def test_the_unit_of_another_folder_s_project_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No engine is needed for it."""

    def gone() -> None:
        raise EngineError("no engine")

    monkeypatch.setattr(status.Engine, "connect", gone)
    for project, named in ((PROJECT, False), (tmp_path / "project", True)):
        paths = Paths(project, tmp_path / "cache", tmp_path / "home")
        keep_address(paths, "r", Address(port=8123).text)
        status.show_unit(paths, "r", AddressOptions())
        text = capsys.readouterr().out
        assert '"--port" "8123"' in text, "as `stop` left it"
        assert (f'SPARKPIN_PROJECT={project}"' in text) == named == ('/bin/sparkpin" serve' in text)


@pytest.mark.parametrize("fault", [DownError("down"), EngineError("no engine answers")])
def test_watching_goes_on_when_a_server_or_the_engine_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    looks: list[Exception] = [fault, KeyboardInterrupt()]  # type: ignore[list-item]

    def look(*_: object, **__: object) -> None:
        raise looks.pop(0)

    monkeypatch.setattr(commands_status, "engine_of", lambda _: None)
    monkeypatch.setattr(commands_status.serving, "status", look)
    monkeypatch.setattr(commands_status.time, "sleep", lambda _: None)
    commands_status.status(as_json=False, watch=1)
    assert looks == []
    looks.append(fault)
    with pytest.raises(type(fault)):
        commands_status.status(as_json=False)
