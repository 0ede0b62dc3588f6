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

from sparkpin.commands import releases as commands_releases


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARKPIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("build --stage v9", ["unknown stage 'v9'", "choose one of: base, head, hybrid, "]),
        ("build --recipe qwen", ["unknown recipe 'qwen'", "scripted-tiny"]),
        ("build --stack tpu", ["unknown stack 'tpu'", "cpu"]),
        ("promote sparkpin/scripted-tiny:base-000000000000", ["unknown release", "invoke"]),
        ("serve nonsense", ["unknown release 'nonsense'"]),
        ("serve", ["has no current release", "invoke up"]),
        ("rollback", ["has no current release", "invoke up"]),
        ("smoke --stage v9", ["unknown stage 'v9'", "choose one of: "]),
        ("rollback --recipe qwen", ["unknown recipe 'qwen'", "scripted-tiny"]),
        ("lock --model my --stack cpu", ["--stack cpu locks that stack only", "--model my"]),
        ("checkpoint --model scripted-tiny --verify --dry-run", ["--dry-run tells what would"]),
        ("keep nonsense", ["unknown release 'nonsense'"]),
        ("verify nonsense --sign", ["unknown release 'nonsense'"]),
        ("verify nonsense", ["unknown release 'nonsense', and no file of that name"]),
        ("smoke nonsense", ["unknown release 'nonsense'"]),
        ("reproduce nonsense", ["unknown release 'nonsense'"]),
        ("quality --limits --recipe qwen", ["unknown recipe 'qwen'", "scripted-tiny"]),
        ("quality nonsense", ["unknown release 'nonsense'"]),
        ("bench --rounds 2", ["--rounds is about --compare", "invoke bench --compare A B --rounds 2"]),
        ("bench --rounds 0", ["--rounds is about --compare", "next: invoke bench --compare A B, of two "]),
        ("bench --compare a --dry-run", ["--compare a: with which release?", "invoke bench --compare a TAG"]),
        ("bench --compare x y --rounds 0", ["next: invoke bench --compare x y --rounds "]),
        ("checkpoint --model scripted-tiny --recipe scripted-tiny", ["goes without --recipe and --stack"]),
        ("recipe lsit", ["saw 'lsit'", "choose one of: list, check, show, import, export"]),
        ("recipe import a b", ["invoke recipe import does not take 'b'"]),
        ("recipe show", ["invoke recipe show: of which?", "next: invoke recipe show FILE|NAME"]),
        ("recipe check scripted-tin", ["no recipe 'scripted-tin'", "did you mean scripted-tiny"]),
    ],
)
def test_a_wrong_name_is_one_clear_error(
    home: Path, line: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = typed(line, capsys)
    assert code == 2 and all(part in err for part in [*said, "next: "])
    assert not (home / "releases").exists()


@pytest.mark.parametrize("task", ["images", "status"])
def test_a_home_or_cache_that_is_no_folder_is_not_taken_for_an_empty_one(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, dangling = tmp_path / "file", tmp_path / "dangling"
    file.write_text("not a folder")
    dangling.symlink_to(tmp_path / "away")
    for env, said, step in (
        ({"SPARKPIN_HOME": file}, f"SPARKPIN_HOME: saw {file}, wanted a folder\n", "unset SPARKPIN_HOME\n"),
        ({"SPARKPIN_HOME": dangling}, f"SPARKPIN_HOME: saw {dangling}, wanted a folder\n", "unset SPARKPIN_HOME\n"),
        ({"SPARKPIN_CACHE": file / "x"}, f"saw {file}/x, wanted a folder: {file} is in the way", "SPARKPIN_CACHE\n"),
        (
            {"SPARKPIN_HOME": "", "XDG_DATA_HOME": file},
            f"SPARKPIN_HOME (not set): saw {file}/sparkpin, wanted a folder: {file} is in the way",
            "next: export SPARKPIN_HOME=FOLDER\n",
        ),
    ):
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, str(value))
            code, out, err = typed(task, capsys)
        assert (code, out) == (2, "") and said in err and err.endswith(step), env
    assert file.read_text() == "not a folder" and not (tmp_path / "away").exists()


def test_a_home_that_cannot_be_made_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARKPIN_HOME", "/proc/nope")
    code, _, err = typed("report", capsys)
    assert code == 11 and "error: cannot write to /proc/nope" in err and "SPARKPIN_HOME to folders of " in err


@pytest.mark.parametrize(("instead", "named"), [('"sha1"', ""), ('"\\u001b[2J": 1, "sha256"', "\\x1b[2J")])
def test_a_lock_that_is_damaged_stops_every_build_and_cannot_reach_the_terminal(
    project: Path,
    instead: str,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copy(PROJECT / "tasks.py", project)
    monkeypatch.setenv("SPARKPIN_PROJECT", str(project))
    path = project / "pins/stacks/cpu.lock"
    path.write_text(path.read_text().replace('"sha256"', instead, 1))
    code, _, err = typed("build", capsys)
    assert code == 4 and f"pins/stacks/cpu.lock: debs.0.{named}" in err and "\x1b" not in err
    assert "\n  next: " in err and "invoke lock --stack cpu" in err


def test_an_engine_that_is_named_and_down_is_one_clear_error(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    code, _, err = typed("images", capsys)
    assert code == 3 and "/nowhere/docker.sock" in err and "next: " in err


def test_render_prints_a_dockerfile_and_its_key_does_not_depend_on_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, here, _ = typed("render --stage v2-tq", capsys)
    monkeypatch.setenv("SPARKPIN_PROJECT", str(Checkout.make(tmp_path / "copy").folder))
    code, text, _ = typed("render --stage v2-tq", capsys)
    assert code == 0 and text == here
    assert "FROM sparkpin/stack-cpu:v2-" in text and "turboquant" in text
    assert text.lower().count("build key") == 1
    sizes = [line.split()[2:4] for line in text.splitlines() if line.endswith("tools/install.py")]
    assert sizes and sizes[0][1] == "kB", "a small file is not of 0.0 MB"


SLOW = (
    "cyclonedx",
    "gguf",
    "google",
    "httpx",
    "huggingface_hub",
    "in_toto_attestation",
    "jinja2",
    "numpy",
    "packaging",
)
ROOMS = ("build", "bundle", "checkpoint", "community", "evidence", "history", "measure")
ALL_FOUR = """
import sys
from sparkpin.commands.command_line import SparkpinProgram
for line in ("images", "status", "promote nonsense", "rollback"):
    try:
        SparkpinProgram().run(["sparkpin", *line.split()])
    except SystemExit:
        pass
print(*sys.modules)
"""


def test_what_is_asked_for_many_times_a_day_loads_what_it_uses(tmp_path: Path) -> None:
    """Each of the four has come as far as to ask for an engine, or for its release."""
    env = {**os.environ, "SPARKPIN_HOME": str(tmp_path), "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    done = subprocess.run([sys.executable, "-c", ALL_FOUR], env=env, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"docker", "pydantic", "sparkpin.releases.current", "sparkpin.serve.status"} <= loaded
    assert loaded & {*SLOW, *(f"sparkpin.{room}" for room in ROOMS)} == set()
    assert done.stderr.count("/nowhere/docker.sock") >= 2 and done.stderr.count("error: ") == 4


def test_a_rollback_tells_the_flags_that_change() -> None:
    before = ("vllm", "serve", "/model", "--a", "1", "--b", "--c", '{"x": 1}')
    after = ("vllm", "serve", "/model", "--a", "2", "--b", "--d")
    assert commands_releases.changed_flags(before, before) == ["flags: the same"]
    assert commands_releases.changed_flags(before, after) == [
        "  - --a 1",
        "  - --c '{\"x\": 1}'",
        "  + --a 2",
        "  + --d",
    ]
    short = [("vllm", "serve", "/model", "--port", "8000", "-tp", size) for size in ("2", "4")]
    assert commands_releases.changed_flags(*short) == ["  - -tp 2", "  + -tp 4"]
