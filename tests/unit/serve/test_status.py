"""What `status` and `logs` show."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
from certificates import certificate
from evidence_samples import PROJECT

from sparkpin.core.errors import EngineError, InputError
from sparkpin.core.paths import Paths
from sparkpin.serve import keys, status
from sparkpin.serve.address import Address, AddressOptions
from sparkpin.serve.rules import Limits
from sparkpin.serve.served import Served, address_path, keep_address, kept_address


def test_a_server_that_another_run_has_just_replaced_starts() -> None:
    """A double: the moment between the engine's list and its log cannot be had otherwise."""

    def gone(**_: object) -> bytes:
        raise docker.errors.NotFound("No such container")

    served = Served("h", "r", "sparkpin/r:v2-1", "c", "127.0.0.1", 8000, "m", "running", False)
    container: Any = SimpleNamespace(logs=gone)
    assert status.words(served, container).startswith(status.STARTS)


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
    for what, value in (("service_of", None), ("proxy_of", None), ("address_of", None), ("describe", served)):
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
    whole = Address(port=8001, cert="/c", tls_key="/k", allow=("/score",), limits=Limits(requests=9))
    keep_address(paths, "r", whole)
    assert kept_address(paths, "r") == whole
    for change in ({"port": 0}, {"host": "x"}, {"allow": ["/../x"]}, {"limits": {"body": "many"}}):
        address_path(paths, "r").write_text(json.dumps(whole.model_dump(mode="json") | change))
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
        keep_address(paths, "r", Address(port=8123))
        status.show_unit(paths, "r", AddressOptions())
        text = capsys.readouterr().out
        assert '"--port" "8123"' in text, "as `stop` left it"
        assert (f'SPARKPIN_PROJECT={project}"' in text) == named == ('/bin/sparkpin" serve' in text)
