"""What a person types wrongly, and how they ask for help. The real `invoke` ends before a task begins."""

from __future__ import annotations

import importlib.util
import subprocess
from types import ModuleType

import pytest
from checkout import INVOKE, PROJECT
from invoke.collection import Collection

from sparkpin.commands import command_line
from sparkpin.core.errors import InputError


def loaded() -> ModuleType:
    """tasks.py, as invoke loads it: each time anew, since invoke tells what an option means only once."""
    spec = importlib.util.spec_from_file_location("tasks", PROJECT / "tasks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def answer(line: str) -> str | None:
    return command_line.answer(["invoke", *line.split()], Collection.from_module(loaded()))


def invoke(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*INVOKE, *arguments], cwd=PROJECT, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    ("line", "said", "following"),
    [
        ("imagse", "invoke has no task 'imagse'", "did you mean images?"),
        ("--help imagse", "invoke has no task 'imagse'", "did you mean images?"),
        ("xyzzy", "invoke has no task 'xyzzy'", "`invoke` alone lists the tasks"),
        ("build smoek", "invoke build does not take 'smoek'", "did you mean smoke?"),
        ("build --ofline", "invoke build has no option --ofline", "did you mean --offline?"),
        ("render v2-tq", "invoke render does not take 'v2-tq'", "invoke render --stage v2-tq"),
        ("checkpoint scripted-tiny", "invoke checkpoint does not take 'scripted-tiny'", "--model scripted-tiny"),
        ("plan scripted-tiny", "invoke plan does not take 'scripted-tiny'", "invoke plan --recipe scripted-tiny"),
        ("lock my", "invoke lock does not take 'my'", "invoke lock --model my"),
        ("lock cpu", "invoke lock does not take 'cpu'", "invoke lock --stack cpu"),
        ("checkpoint --model=", "invoke checkpoint: --model wants a value", "invoke checkpoint --model MODEL"),
        ("serve v2", "invoke serve does not take 'v2'", "invoke serve --release v2"),
        ("diff a b --after c", "invoke diff has no option --after", "invoke diff --help"),
        ("diff a b c", "invoke diff does not take 'c'", "invoke diff --help"),
        ("pin", "invoke pin: TAG missing", "invoke pin TAG [options]"),
        ("diff a", "invoke diff: AFTER missing", "invoke diff BEFORE AFTER"),
        ("export --with-everything x -o y", "invoke export has no option --with-everything", "invoke export --help"),
        ("verify --depp x", "invoke verify has no option --depp", "did you mean --deep?"),
        ("build --stage", "invoke build: --stage wants a value", "invoke build --stage STAGE"),
        ("build --stage --offline", "invoke build: --stage wants a value", "invoke build --stage STAGE"),
    ],
)
def test_a_slip_is_one_error_with_what_was_meant(line: str, said: str, following: str) -> None:
    with pytest.raises(InputError) as caught:
        answer(line)
    assert caught.value.message == said and following in caught.value.next_step


def test_a_comparison_with_one_release_is_told_how_two_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "bench --compare a --dry-run"
    monkeypatch.setattr("sys.argv", ["pytest", *line.split()])  # tasks.py itself reads it
    with pytest.raises(InputError) as caught:
        answer(line)
    assert caught.value.message == "invoke bench: B missing"
    assert caught.value.next_step.startswith("invoke bench --compare A B [options]")


def test_an_empty_value_is_none() -> None:
    with pytest.raises(InputError, match="invoke checkpoint: --model wants a value"):
        command_line.answer(["invoke", "checkpoint", "--model", ""], Collection.from_module(loaded()))


def test_a_slip_ends_as_every_error_does() -> None:
    result = invoke("imagse")
    wanted = "error: invoke has no task 'imagse'\n  next: did you mean images? `invoke` alone lists the tasks\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", wanted)


@pytest.mark.parametrize("line", ["export --help", "export TAG --help", "--help export", "help export", "export -h"])
def test_help_of_a_task_with_positionals(line: str) -> None:
    lines = (answer(line) or "").splitlines()
    assert lines[0] == "usage: invoke export TAG -o FILE [options]"
    assert "  TAG                release to export" in lines
    assert "  -o, --output FILE  file to write" in lines
    assert max(map(len, lines)) <= 80


def test_help_of_rollback_says_which_release_it_takes() -> None:
    """As `retention.rollback_target`: its own stage's before any other's."""
    text = " ".join((answer("rollback --help") or "").split())
    assert "Back to the stage's last good release, or else any stage's." in text


def test_every_task_has_help_and_bare_invoke_lists_them_all() -> None:
    listed = invoke()
    assert (listed.returncode, listed.stderr) == (0, "")
    names = [line.split()[0] for line in listed.stdout.splitlines() if line.startswith("  ")]
    assert names == sorted(Collection.from_module(loaded()).task_names)
    for name in names:
        text = answer(f"{name} --help")
        assert text and text.startswith(f"usage: invoke {name}")
    shown = invoke("verify", "--help")
    assert (shown.returncode, shown.stderr, shown.stdout.splitlines()[0]) == (
        0,
        "",
        "usage: invoke verify TAG|FILE [options]",
    )


def test_what_follows_is_left_to_the_task() -> None:
    """Values that look like options, several tasks in a line, invoke's own options."""
    lines = ("--echo prune --keep=-1", "prune --keep -1 images", "export TAG -oFILE --no-image", "diff build images")
    for line in (*lines, "--list", "build --echo smoke --stage=v2", "--complete -- inv"):
        assert answer(line) is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("recipe check", ["action"]),
        ("recipe check --stack cpu", ["action"]),
        ("recipe list", ["action"]),
        ("recipe lsit", ["action"]),
        ("recipe check FILE", ["action", "what"]),
        ("recipe import", ["action", "what"]),
        ("recipe", ["action", "what"]),
        ("build", ["action", "what"]),
    ],
)
def test_recipe_check_and_list_alone_want_no_name(line: str, words: list[str]) -> None:
    assert command_line.recipe_words(["invoke", *line.split()]) == words
