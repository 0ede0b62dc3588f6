"""The tasks as a person meets them: their list, and one clear error with its own exit code for each mistake."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from checkout import INVOKE, PROJECT, Checkout

from sparkpin.commands import releases as commands_releases

TASKS = [
    "attest",
    "bench",
    "bisect",
    "build",
    "check",
    "checkpoint",
    "client",
    "copy",
    "diff",
    "doctor",
    "export",
    "fetch",
    "images",
    "import",
]
TASKS += [
    "inspect",
    "lock",
    "logs",
    "pin",
    "plan",
    "promote",
    "prune",
    "quality",
    "rebuild",
    "recipe",
    "render",
    "report",
    "reproduce",
    "rollback",
    "roofline",
    "serve",
    "smoke",
]
TASKS += ["status", "stop", "test", "unpin", "up", "verify", "why"]


@pytest.fixture
def copy(tmp_path: Path) -> Checkout:
    return Checkout.make(tmp_path / "copy")


def test_the_list_has_one_line_for_each_task() -> None:
    text = subprocess.run([*INVOKE, "--list"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in text.splitlines()[1:] if line.strip()]
    assert [line.split()[0] for line in lines] == TASKS


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["build", "--stage", "v3"], 2, ["unknown stage 'v3'", "choose one of: base, hybrid, "]),
        (["build", "--recipe", "qwen"], 2, ["unknown recipe 'qwen'", "scripted-tiny"]),
        (["build", "--stack", "tpu"], 2, ["unknown stack 'tpu'", "cpu"]),
        (["promote", "sparkpin/scripted-tiny:base-000000000000"], 2, ["unknown release", "invoke"]),
        (["serve", "--release", "nonsense"], 2, ["unknown release 'nonsense'"]),
        (["serve"], 2, ["has no current release", "invoke up"]),
        (["rollback"], 2, ["has no current release", "invoke up"]),
        (["serve", "--port", "22x"], 2, ["--port: saw '22x', wanted a whole number", "for example --port 8001"]),
        (["smoke", "--stage", "v3"], 2, ["unknown stage 'v3'", "choose one of: "]),
        (["rollback", "--recipe", "qwen"], 2, ["unknown recipe 'qwen'", "scripted-tiny"]),
        (["prune", "--keep", "x"], 2, ["--keep: saw 'x'"]),
        (["prune", "--keep", "-1"], 2, ["--keep: saw '-1', wanted a whole number, 0 or more", "for example --keep 5"]),
        (["lock", "--model", "my", "--stack", "cpu"], 2, ["--stack cpu locks that stack only", "--model my"]),
        (["checkpoint", "--model", "scripted-tiny", "--verify", "--dry-run"], 2, ["--dry-run tells what would"]),
        (["pin", "nonsense"], 2, ["unknown release 'nonsense'"]),
        (["unpin", "nonsense"], 2, ["unknown release 'nonsense'"]),
        (["attest", "nonsense"], 2, ["unknown release 'nonsense'"]),
        (["verify", "nonsense"], 2, ["unknown release 'nonsense', and no file of that name"]),
        (["smoke", "--release", "nonsense"], 2, ["unknown release 'nonsense'"]),
        (["quality", "--limits", "--recipe", "qwen"], 2, ["unknown recipe 'qwen'", "scripted-tiny"]),
        (["bench", "--rounds", "2"], 2, ["--rounds is about --compare", "invoke bench --compare A B --rounds 2"]),
        (["bench", "--rounds", "0"], 2, ["--rounds is about --compare", "next: invoke bench --compare A B, of two "]),
        (["bench", "--other", "x"], 2, ["--other is about --compare", "next: invoke bench --compare A x, of two "]),
        (
            ["bench", "--compare", "x", "--other", "y", "--rounds", "0"],
            2,
            ["next: invoke bench --compare x y --rounds "],
        ),
        (["bench", "--compare", "x", "y", "--other", "z"], 2, ["invoke bench does not take 'y'"]),
    ],
)
def test_a_wrong_name_is_one_clear_error(copy: Checkout, arguments: list[str], code: int, said: list[str]) -> None:
    result = copy.invoke(*arguments)
    assert result.returncode == code
    assert all(part in result.stderr for part in [*said, "next: "])
    assert "Traceback" not in result.stderr
    assert not (copy.home / "releases").exists()


def test_a_home_or_cache_that_is_no_folder_is_not_taken_for_an_empty_one(copy: Checkout, tmp_path: Path) -> None:
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
        for task in ("images", "status"):
            result = copy.invoke(task, **{name: str(value) for name, value in env.items()})
            assert (result.returncode, result.stdout) == (2, ""), env
            assert said in result.stderr and result.stderr.endswith(step), env
    assert file.read_text() == "not a folder" and not (tmp_path / "away").exists()


def test_a_home_that_cannot_be_made_is_one_clear_error(copy: Checkout) -> None:
    result = copy.invoke("report", SPARKPIN_HOME="/proc/nope")
    assert result.returncode == 11 and "Traceback" not in result.stderr
    assert "error: cannot write to /proc/nope" in result.stderr and "SPARKPIN_HOME to folders of " in result.stderr


def test_a_lock_with_a_missing_hash_stops_every_build(copy: Checkout) -> None:
    path = copy.folder / "pins/stacks/cpu.lock"
    first = next(line for line in path.read_text().splitlines() if '"sha256"' in line)
    copy.replace("pins/stacks/cpu.lock", first, first.replace('"sha256"', '"sha1"'))
    result = copy.invoke("build")
    assert result.returncode == 4
    assert "pins/stacks/cpu.lock: debs.0." in result.stderr
    assert "invoke lock --stack cpu" in result.stderr


def test_what_a_file_says_cannot_reach_the_terminal(copy: Checkout) -> None:
    path = copy.folder / "pins/stacks/cpu.lock"
    first = next(line for line in path.read_text().splitlines() if '"sha256"' in line)
    copy.replace("pins/stacks/cpu.lock", first, first.replace('"sha256"', '"\\u001b[2J": 1, "sha256"'))
    result = copy.invoke("build")
    assert result.returncode == 4
    assert "debs.0.\\x1b[2J" in result.stderr and "\x1b" not in result.stderr
    assert "\n  next: " in result.stderr


def test_an_engine_that_is_named_and_down_is_one_clear_error(copy: Checkout) -> None:
    result = copy.invoke("build", DOCKER_HOST="unix:///nowhere/docker.sock")
    assert result.returncode == 3
    assert "/nowhere/docker.sock" in result.stderr
    assert "next: " in result.stderr
    assert "Traceback" not in result.stderr


def test_render_prints_a_dockerfile_and_its_key_does_not_depend_on_the_checkout(copy: Checkout) -> None:
    text = copy.done("render", "--stage", "v2-tq")
    assert "FROM sparkpin/stack-cpu:v2-" in text
    assert "turboquant" in text
    assert text.lower().count("build key") == 1
    sizes = [line.split()[2:4] for line in text.splitlines() if line.endswith("tools/install.py")]
    assert sizes and sizes[0][1] == "kB", "a small file is not of 0.0 MB"
    here = subprocess.run([*INVOKE, "render", "--stage", "v2-tq"], cwd=PROJECT, capture_output=True, text=True)
    assert here.stdout == text


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
