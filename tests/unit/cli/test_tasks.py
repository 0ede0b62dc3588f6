"""The tasks as a person meets them: one clear error with its own exit code for each mistake, and what each loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import PROJECT, Checkout
from typed import typed


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARKPIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    "line",
    [
        "build --stage v9",
        "build --stack tpu",
        "promote sparkpin/scripted-tiny:base-000000000000",
        "serve",
        "serve nonsense",
        "rollback",
        "lock --model my --stack cpu",
        "quality nonsense",
        "smoke nonsense",
        "verify nonsense",
        "reproduce nonsense",
        "bench --rounds 2",
        "bench --compare a b --rounds 0",
        "build --render --fetch-only",
        "build --dry-run",
        "recipe list --json",
        "recipe export scripted-tiny --dry-run",
        "recipe check scripted-tiny --stage v2",
        "recipe show scripted-tiny --stack nope",
    ],
)
def test_a_wrong_name_is_one_clear_error(home: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(line, capsys)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("next: ") == 1
    assert not (home / "releases").exists()


@pytest.mark.parametrize("task", ["images", "status"])
def test_a_home_or_cache_that_is_no_folder_is_not_taken_for_an_empty_one(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, dangling = tmp_path / "file", tmp_path / "dangling"
    file.write_text("not a folder")
    dangling.symlink_to(tmp_path / "away")
    for env in (
        {"SPARKPIN_HOME": file},
        {"SPARKPIN_HOME": dangling},
        {"SPARKPIN_CACHE": file / "x"},
        {"SPARKPIN_HOME": "", "XDG_DATA_HOME": file},
    ):
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, str(value))
            code, out, err = typed(task, capsys)
        assert (code, out) == (2, "") and next(iter(env)) in err, env
    assert file.read_text() == "not a folder" and not (tmp_path / "away").exists()


def test_a_home_that_cannot_be_made_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARKPIN_HOME", "/proc/nope")
    code, _, err = typed("report", capsys)
    assert code == 11 and "/proc/nope" in err


@pytest.mark.parametrize(("instead", "named"), [('"sha1"', ""), ('"\\u001b[2J": 1, "sha256"', "\\x1b[2J")])
def test_a_lock_that_is_damaged_stops_every_build_and_cannot_reach_the_terminal(
    project: Path, instead: str, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(PROJECT / "tasks.py", project)
    monkeypatch.setenv("SPARKPIN_PROJECT", str(project))
    path = project / "pins/stacks/cpu.lock"
    path.write_text(path.read_text().replace('"sha256"', instead, 1))
    code, _, err = typed("build", capsys)
    assert code == 4 and f"pins/stacks/cpu.lock: debs.0.{named}" in err and "\x1b" not in err
    assert "lock --stack cpu" in err


def test_an_engine_that_is_named_and_down_is_one_clear_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    code, _, err = typed("images", capsys)
    assert code == 3 and "/nowhere/docker.sock" in err


def test_render_prints_a_dockerfile_and_its_key_does_not_depend_on_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, here, _ = typed("build --render --stage v2-tq", capsys)
    monkeypatch.setenv("SPARKPIN_PROJECT", str(Checkout.make(tmp_path / "copy").folder))
    code, text, _ = typed("build --render --stage v2-tq", capsys)
    assert code == 0 and text == here
    assert "FROM sparkpin/stack-cpu:v2-" in text and "turboquant" in text
    assert text.lower().count("build key") == 1


SLOW = ["asyncio", "cyclonedx", "gguf", "google", "httpx", "huggingface_hub", "in_toto_attestation", "jinja2", "numpy",
        "packaging"]  # fmt: skip
ROOMS = ("build", "distribute", "history", "measure", "prune", "recipes", "report", "upgrade")
ALL_FOUR = """
import sys
from sparkpin.cli.line import main
for line in ("images", "status", "promote nonsense", "rollback"):
    try:
        main("sparkpin", line.split())
    except SystemExit:
        pass
    print(*sys.modules)
"""


def test_what_is_asked_for_many_times_a_day_loads_what_it_uses(tmp_path: Path) -> None:
    """Each of the four has come as far as to ask for an engine, or for its release."""
    env = {**os.environ, "SPARKPIN_HOME": str(tmp_path), "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    done = subprocess.run([sys.executable, "-c", ALL_FOUR], env=env, capture_output=True, text=True, check=True)
    after_images, *_, loaded = (set(line.split()) for line in done.stdout.splitlines())
    assert after_images & {"yaml", "sparkpin.pins.schema"} == set()
    assert {"docker", "pydantic", "sparkpin.releases.current", "sparkpin.serve.status"} <= loaded
    assert loaded & {*SLOW, *(f"sparkpin.{room}" for room in ROOMS)} == set()
    assert done.stderr.count("/nowhere/docker.sock") >= 2 and done.stderr.count("error: ") == 4
