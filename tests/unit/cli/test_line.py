"""What a person types wrongly, how they ask for help, and what a shell completes."""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import INVOKE, PROJECT
from typed import typed

import sparkpin
from sparkpin.cli import line as lines
from sparkpin.cli.line import TaskParser
from sparkpin.cli.tasks import GROUPS, heads
from sparkpin.core import paths, terminal
from sparkpin.core.errors import InputError

PROGRAM = [sys.executable, "-c", "from sparkpin.cli.line import main; main()"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one release of a stage; the records of it are not read."""
    folder = tmp_path / "home/releases/tiny"
    folder.mkdir(parents=True)
    for name in ("v2-0123456789ab.json", "promotions.json", "protected.json"):
        (folder / name).touch()
    monkeypatch.setenv("SPARKPIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--help imagse", "images"),
        ("--lsit", ""),
        ("build --ofline", "--offline"),
        ("serve v2 v3", "serve --help"),
        ("keep", "keep TAG [options]"),
        ("bisect --bad v2", "bisect --good TAG --bad TAG --check CHECK [options]"),
        ("lock --model ''", "lock --help"),
        ("serve ''", "serve [TAG]"),
        ("build --stage", "build --help"),
        ("serve --port 22x", "serve --help"),
        ("recipe export a --format v3", "recipe export --help"),
        ("recipe lsit", "did you mean recipe list?"),
        ("add a b", "add --help"),
        ("prune --keep -1", "prune --help"),
    ],
)
def test_a_slip_is_one_error_with_what_was_meant(line: str, meant: str, capsys: Capture) -> None:
    code, out, err = typed(shlex.split(line), capsys)
    _, _, step = err.partition("\n  next: ")
    assert (code, out) == (2, "") and err.startswith("error: ") and step and meant in step


def test_invoke_reads_a_line_as_sparkpin_does(capsys: Capture) -> None:
    """It loads tasks.py, which hands it our reading."""
    for line in ("serve v2 imagse", "--list"):
        path = os.environ | {"PATH": f"{Path(INVOKE[0]).parent}:{os.environ['PATH']}"}
        done = subprocess.run([*INVOKE, *line.split()], cwd=PROJECT, capture_output=True, text=True, env=path)
        code, *texts = typed(line, capsys)
        out, err = (text.replace("sparkpin ", "invoke ") for text in texts)
        assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


def test_hints_work_as_they_are_typed_where_the_shell_finds_no_such_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.Typed, "program", ".venv/bin/invoke")
    assert terminal.typed("sudo .venv/bin/invoke up, invoke up") == "sudo .venv/bin/invoke up, .venv/bin/invoke up"
    env = {name: value for name, value in os.environ.items() if name != "PATH"} | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([*INVOKE, "serve", "--nonsense"], cwd=PROJECT, capture_output=True, text=True, env=env)
    assert f"{INVOKE[0]} serve --help" in done.stderr


@pytest.mark.parametrize("line", ["recipe", "recipe --help", "recipe -h"])
def test_the_first_word_of_several_tasks_lists_them(line: str, capsys: Capture) -> None:
    code, out, _ = typed(line, capsys)
    assert code == 0 and "recipe check" in out and "serve" not in out.split("inputs:")[1].split("next:")[0]


def test_the_list_of_recipes_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = typed("recipe list", capsys)
    assert code == 0 and max(map(len, out.splitlines())) <= 80


def test_invoke_is_of_the_folder_that_it_stands_in_whatever_project_sparkpin_is_told(project: Path) -> None:
    (project / "stages/another.yaml").touch()
    argv, env = [*INVOKE, "--complete", "--", "invoke", "build", "--stage", ""], {"SPARKPIN_PROJECT": str(project)}
    done = subprocess.run(argv, cwd=PROJECT, env=os.environ | env, capture_output=True, text=True, check=True)
    assert {"base", "v2-tq"} <= set(done.stdout.split()) and "another" not in done.stdout


@pytest.mark.parametrize("line", ["", "--list", "--help"])
def test_the_list_has_a_line_for_each_task_in_its_group(line: str, capsys: Capture) -> None:
    code, out, err = typed(line, capsys)
    rows = out.splitlines()
    assert (code, err) == (0, "") and max(map(len, rows)) <= 80
    assert [row[:-1] for row in rows if row.endswith(":")] == list(GROUPS)
    assert [row.split("  ")[1] for row in rows if row.startswith("  ")] == list(heads())


def test_every_task_is_found_as_text_and_has_help_with_each_of_its_options(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """`heads` reads the files without loading them: what it finds is what they have."""
    monkeypatch.setenv("COLUMNS", "80")
    for name, head in heads().items():
        code, out, err = typed(f"{name} --help", capsys)
        assert (code, err) == (0, "") and out.startswith(f"usage: sparkpin {name}") and head.summary in out
        assert max(map(len, out.splitlines())) <= 80 and f"sparkpin {name}" in out.partition("examples:")[2]
        assert all(one.help for one in TaskParser("sparkpin", name).arguments), f"{name}: each with what it means"
        assert (head.body.__module__, inspect.getdoc(head.body).partition("\n")[0]) == (head.module, head.summary)
    marked = sum(file.read_text().count("\n@task(") for file in (PROJECT / "src/sparkpin/cli").rglob("*.py"))
    assert len(heads()) == marked > 25
    assert typed("--help export", capsys)[1].startswith("usage: sparkpin export TAG PLACE ")


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("serve", {}),
        ("serve v2 --port 8001", {"tag": "v2", "port": 8001}),
        ("export a FILE --with-store", {"tag": "a", "place": "FILE", "with_store": True}),
        ("diff build images", {"before": "build", "after": "images"}),  # tasks' names where a TAG must be
        ("recipe check a --json b", {"what": ["a", "b"], "json": True}),
        ("bench b --compare=a --rounds 2", {"tag": "b", "compare": "a", "rounds": 2}),
        ("up --from oci://h/n", {"from_": "oci://h/n"}),
    ],
)
def test_what_a_task_is_given(line: str, given: dict[str, object]) -> None:
    name, words = lines.find_task(line.split())
    assert TaskParser("sparkpin", name).read(words) == given


@pytest.mark.parametrize(
    ("line", "some", "exactly"),
    [
        ("sparkpin pro", ["promote", "images"], False),
        ("sparkpin promote ", ["current", "v2", "v2-0123456789ab"], True),
        ("sparkpin build --stage ", ["base", "v2-tq"], False),
        ("sparkpin keep v2 --", ["--note", "--remove", "--help"], True),
        ("sparkpin build --stage v2 --stack ", ["cpu", "spark"], True),
        ("sparkpin keep v2 --note ", [], True),
        ("sparkpin recipe export a --format ", ["v1", "v2"], True),
        ("sparkpin recipe ", ["list", "check", "show", "export"], False),
        ("sparkpin -q bu", ["build", "bump"], False),
    ],
)
def test_what_a_line_may_go_on_with(home: Path, line: str, some: list[str], exactly: bool, capsys: Capture) -> None:
    code, out, _ = typed(["--complete", "--", *line.split(" ")], capsys)
    found = out.splitlines()
    assert code == 0 and set(some) <= set(found)
    assert not exactly or found == some


def test_bash_completes_the_word_under_the_cursor(home: Path, tmp_path: Path, capsys: Capture) -> None:
    program = tmp_path / "sparkpin"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    hostile = home / "releases/hostile/v2-$(touch ran)-`touch ran`-0123456789ab.json"
    hostile.parent.mkdir()
    hostile.touch()
    script = f"""{typed("--print-completion-script bash", capsys)[1]}
tried() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sparkpin {program} "${{@: -1}}"; echo "${{COMPREPLY[*]}}"; }}
tried sparkpin promote v2-
tried sparkpin build --stage = v2-t
complete -p sparkpin invoke
"""
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert not (tmp_path / "ran").exists()
    wanted = ["v2-0123456789ab", "v2-tq"]
    wanted += [f"complete -o default -F _sparkpin {name}" for name in ("sparkpin", "invoke")]
    assert done.stdout.splitlines() == wanted
    assert typed("--print-completion-script fish", capsys)[0] == 2


def test_zsh_completes_the_word_under_the_cursor(home: Path, tmp_path: Path, capsys: Capture) -> None:
    if not (zsh := shutil.which("zsh")):
        pytest.skip("no zsh (apt-get install zsh, as root; tests/packages.txt)")
    program = tmp_path / "sparkpin"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(PROGRAM)} "$@"\n')
    program.chmod(0o755)
    script = f"""compdef() {{ print $@ }}; compadd() {{ print ${{(P)2}} }}
{typed("--print-completion-script zsh", capsys)[1]}
words=({program} promote v2-); CURRENT=3; _sparkpin
"""
    done = subprocess.run([zsh, "-fec", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["_sparkpin sparkpin invoke", "current v2 v2-0123456789ab"]


def test_a_broken_package_is_told_with_what_mends_it(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def fail(program: str, words: list[str]) -> None:
        raise ModuleNotFoundError("No module named", name=words[0])

    monkeypatch.setattr(lines, "run", fail)
    code, _, err = typed("idna", capsys)
    assert code == 3 and "./install.sh" in err
    with pytest.raises(ImportError):
        typed("sparkpin.core", capsys)


def test_quiet_leaves_out_progress_and_verbose_adds_the_traceback_of_an_error(home: Path, capsys: Capture) -> None:
    for line, quiet in (("--quiet recipe list", True), ("recipe list -q", True), ("recipe list", False)):
        assert typed(line, capsys)[0] == 0
        terminal.say("a line of progress")
        assert ("a line" not in capsys.readouterr().err) == quiet
    (code, _, brief), (same, _, long) = (typed(f"{option}promote nothing", capsys) for option in ("", "-v "))
    assert "Traceback" not in brief and "Traceback" in long
    assert code == same == 2 and long.endswith(brief)


def test_the_project_is_the_nearest_one_upwards_or_the_one_that_is_named(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The sources have a folder of the name `pins`, too."""
    assert typed("--version", capsys) == (0, f"sparkpin {sparkpin.__version__}\n", "")
    monkeypatch.delenv("SPARKPIN_PROJECT", raising=False)
    for folder, found in (
        (project / "pins/models", project),
        (PROJECT / "src/sparkpin", PROJECT),
        (Path("/"), PROJECT),
    ):
        monkeypatch.chdir(folder)
        assert paths.project_folder() == found, "a checkout's own code works on it from anywhere"
    monkeypatch.setenv("SPARKPIN_PROJECT", str(tmp_path))
    code, out, err = typed("recipe list", capsys)
    assert (code, out) == (2, "") and str(tmp_path) in err
    (project / "recipes/only-here.yaml").write_text((project / "recipes/scripted-tiny.yaml").read_text())
    line = f"sparkpin --project {project} up --recipe "
    assert "only-here" in typed(["--complete", "--", *line.split(" ")], capsys)[1]
    assert typed(f"--project {project} recipe list", capsys)[0] == 0
    assert os.environ["SPARKPIN_PROJECT"] == str(project)


def test_the_nearest_project_is_not_taken_from_another_user_who_only_made_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second user is at hand in a test; where it runs as root, root's own folders are everybody's to trust."""
    for name in ("SPARKPIN_PROJECT", "SUDO_UID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(project / "recipes")
    owner = project.stat().st_uid or 4711
    os.chown(project, owner, -1)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(InputError, match="another user's project"):
        paths.project_folder()
    for name, value in (("SPARKPIN_PROJECT", str(project)), ("SUDO_UID", str(owner))):  # named, or trusted, by a person
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert paths.project_folder() == project


@pytest.mark.parametrize("line", ["--list", "--complete -- sparkpin", "images --jsn"])
def test_a_reader_that_has_gone_is_no_traceback(line: str) -> None:
    """141 as of a program that the signal ended, or what it would have ended with where it wrote to no pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*PROGRAM, *line.split()], cwd=PROJECT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    wrote = "jsn" not in line
    assert (done.returncode, "Traceback" in done.stderr, "BrokenPipe" in done.stderr) == (141 if wrote else 2, 0, 0)
    assert bool(done.stderr) != wrote


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_lost_terminal_ends_a_task_as_ctrl_c_does(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """What it has begun is put right: a switch brings the former server back."""
    monkeypatch.setattr(lines, "run", lambda *_: signal.raise_signal(number))
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # as in a shell, whatever runs these tests
    assert typed("status", capsys)[0] == 130
