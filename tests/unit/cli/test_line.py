"""What a person types wrongly, how they ask for help, and what a shell completes."""

from __future__ import annotations

import inspect
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import INVOKE, PROJECT
from checkout_here import CheckoutHere
from typed import typed

import sparkpin
from sparkpin.cli import line as lines
from sparkpin.cli.line import TaskParser
from sparkpin.cli.tasks import heads
from sparkpin.core import paths, terminal
from sparkpin.core.errors import InputError

GROUPS = ["serve", "releases", "measure", "build", "inputs", "prove and carry", "machine", "for developers"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With one release of a stage; the records of it are not read."""
    folder = tmp_path / "home/releases/tiny"
    folder.mkdir(parents=True)
    for name in ("v2-0123456789ab.json", "promotions.json", "protected.json"):
        (folder / name).touch()
    monkeypatch.setenv("SPARKPIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def listed(text: str) -> dict[str, list[str]]:
    """Group -> its tasks."""
    groups: dict[str, list[str]] = {}
    for line in text.splitlines()[1:]:
        if line.endswith(":"):
            groups[line[:-1]] = []
        elif line.startswith("  "):
            groups[list(groups)[-1]].append(line.split()[0])
    return groups


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("--help imagse", "images"),
        ("--lsit", ""),
        ("build --ofline", "--offline"),
        ("serve v2 v3", "serve --help"),
        ("plan scripted-tiny", "plan --help"),
        ("keep", "keep TAG [options]"),
        ("bisect --bad v2", "bisect --good TAG --bad TAG --check CHECK [options]"),
        ("verify --depp x", "--deep"),
        ("lock --model ''", "lock --help"),
        ("serve ''", "serve [TAG]"),
        ("build --stage", "build --help"),
        ("serve --port 22x", "serve --help"),
        ("recipe export a --format v3", "recipe export --help"),
        ("recipe lsit", "did you mean recipe list?"),
        ("recipe import a b", "recipe import --help"),
        ("prune --keep -1", "prune --help"),
    ],
)
def test_a_slip_is_one_error_with_what_was_meant(line: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(shlex.split(line), capsys)
    _, _, step = err.partition("\n  next: ")
    assert (code, out) == (2, "") and err.startswith("error: ") and step and meant in step


def test_invoke_reads_a_line_as_sparkpin_does(capsys: pytest.CaptureFixture[str]) -> None:
    """It loads tasks.py, which hands it our reading."""
    for line in ("serve v2 imagse", "--list"):
        done = subprocess.run([*INVOKE, *line.split()], cwd=PROJECT, capture_output=True, text=True)
        code, *texts = typed(line, capsys)
        assert (done.returncode, done.stdout, done.stderr) == (
            code,
            *(t.replace("sparkpin ", "invoke ") for t in texts),
        )


def test_invoke_is_of_the_folder_that_it_stands_in_whatever_project_sparkpin_is_told(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").touch()
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages/another.yaml").touch()
    argv = [*INVOKE, "--complete", "--", "invoke", "build", "--stage", ""]
    env = {**os.environ, "SPARKPIN_PROJECT": str(tmp_path)}
    done = subprocess.run(argv, cwd=PROJECT, env=env, capture_output=True, text=True, check=True)
    assert {"base", "v2-tq"} <= set(done.stdout.split()) and "another" not in done.stdout


@pytest.mark.parametrize("line", ["", "--list", "--help"])
def test_the_list_has_a_line_for_each_task_in_its_group(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = typed(line, capsys)
    groups = listed(out)
    assert (code, err, list(groups)) == (0, "", GROUPS)
    assert groups["serve"][:2] == ["up", "serve"] and groups["for developers"] == ["test", "check"]
    assert max(map(len, out.splitlines())) <= 80


def test_every_task_is_found_as_text_and_has_help_with_each_of_its_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`heads` reads the files without loading them: what it finds is what they have."""
    monkeypatch.setenv("COLUMNS", "80")
    for name, head in heads().items():
        code, out, err = typed(f"{name} --help", capsys)
        assert (code, err) == (0, "") and out.startswith(f"usage: sparkpin {name}") and head.summary in out
        assert max(map(len, out.splitlines())) <= 80
        assert all(one.help for one in TaskParser("sparkpin", name).arguments), f"{name}: each with what it means"
        assert (head.body.__module__, inspect.getdoc(head.body).partition("\n")[0]) == (head.module, head.summary)
    marked = sum(file.read_text().count("\n@task(") for file in (PROJECT / "src/sparkpin/cli").rglob("*.py"))
    assert len(heads()) == marked > 25


@pytest.mark.parametrize("line", ["export TAG --help", "--help export"])
def test_help_of_a_task_with_positionals(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert typed(line, capsys)[1].startswith("usage: sparkpin export TAG PLACE ")


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


def test_sparkpin_knows_its_version_and_its_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert typed("--version", capsys) == (0, f"sparkpin {sparkpin.__version__}\n", "")
    monkeypatch.chdir("/")
    assert typed("recipe list", capsys)[0] == 0
    monkeypatch.setenv("SPARKPIN_PROJECT", str(tmp_path))
    code, out, err = typed("recipe list", capsys)
    assert (code, out) == (2, "") and f"{tmp_path} is no project" in err


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
        ("sparkpin recipe ", ["list", "check", "import", "show", "export"], False),
        ("sparkpin recipe check --", ["--stack", "--json", "--help"], True),
        ("sparkpin --ver", ["--version"], False),
        ("sparkpin -q bu", ["build", "bump"], False),
    ],
)
def test_what_a_line_may_go_on_with(
    home: Path, line: str, some: list[str], exactly: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = typed(["--complete", "--", *line.split(" ")], capsys)
    found = out.splitlines()
    assert code == 0 and set(some) <= set(found)
    assert not exactly or found == some


def test_bash_completes_the_word_under_the_cursor(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "sparkpin"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from sparkpin.cli.line import main; main()" "$@"\n')
    program.chmod(0o755)
    script = typed("--print-completion-script bash", capsys)[1]
    hostile = home / "releases/hostile/v2-$(touch ran)-`touch ran`-0123456789ab.json"
    hostile.parent.mkdir()
    hostile.touch()
    script += f"""
tried() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sparkpin {program} "${{@: -1}}"; echo "${{COMPREPLY[*]}}"; }}
tried sparkpin promote v2-
tried sparkpin build --stage = v2-t
complete -p sparkpin
"""
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert not (tmp_path / "ran").exists()
    wanted = ["v2-0123456789ab", "v2-tq", "complete -o default -F _sparkpin sparkpin"]
    assert done.stdout.splitlines() == wanted
    assert typed("--print-completion-script fish", capsys)[0] == 2


def test_a_broken_package_is_told_with_what_mends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(program: str, words: list[str]) -> None:
        raise ModuleNotFoundError("No module named", name=words[0])

    monkeypatch.setattr(lines, "run", fail)
    code, _, err = typed("idna", capsys)
    assert code == 3 and "./install.sh" in err
    with pytest.raises(ImportError):
        typed("sparkpin.core", capsys)


@pytest.fixture
def copy(tmp_path: Path) -> CheckoutHere:
    return CheckoutHere.make(tmp_path / "copy")


@pytest.mark.parametrize("line", ["--quiet recipe list", "recipe list -q"])
def test_quiet_leaves_out_progress(copy: CheckoutHere, capfd: pytest.CaptureFixture[str], line: str) -> None:
    assert copy.invoke(*line.split()).returncode == 0
    terminal.say("a line of progress")
    assert copy.invoke("recipe", "list").returncode == 0
    terminal.say("another")
    assert "a line" not in (said := capfd.readouterr().err) and "another" in said


def test_verbose_adds_the_traceback_of_an_error(copy: CheckoutHere) -> None:
    brief, long = (copy.invoke(*options, "promote", "nothing") for options in ([], ["-v"]))
    assert "Traceback" not in brief.stderr and "Traceback" in long.stderr
    assert brief.returncode == long.returncode == 2 and long.stderr.endswith(brief.stderr)


def test_the_project_is_the_nearest_one_upwards(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sources have a folder of the name `pins`, too."""
    monkeypatch.delenv("SPARKPIN_PROJECT", raising=False)
    monkeypatch.chdir(project / "pins/models")
    assert paths.project_folder() == project
    monkeypatch.chdir(PROJECT / "src/sparkpin")
    assert paths.project_folder() == PROJECT
    monkeypatch.chdir("/")
    assert paths.project_folder() == PROJECT, "a checkout's own code works on it from anywhere"
    monkeypatch.setenv("SPARKPIN_PROJECT", str(tmp_path / "other"))
    (project / "recipes/only-here.yaml").write_text((project / "recipes/scripted-tiny.yaml").read_text())
    line = f"sparkpin --project {project} up --recipe "
    assert "only-here" in typed(["--complete", "--", *line.split(" ")], capsys)[1]
    assert typed(f"--project {project} recipe list", capsys)[0] == 0
    assert os.environ["SPARKPIN_PROJECT"] == str(project)


def test_the_nearest_project_is_not_taken_from_another_user_who_only_made_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second user is at hand in a test; where it runs as root, root's own folders are everybody's to trust."""
    monkeypatch.delenv("SPARKPIN_PROJECT", raising=False)
    monkeypatch.delenv("SUDO_UID", raising=False)
    monkeypatch.chdir(project / "recipes")
    owner = project.stat().st_uid
    if not owner:
        os.chown(project, 4711, -1)
        owner = 4711
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(InputError, match="another user's project"):
        paths.project_folder()
    monkeypatch.setenv("SPARKPIN_PROJECT", str(project))
    assert paths.project_folder() == project, "named by a person"
    monkeypatch.delenv("SPARKPIN_PROJECT")
    monkeypatch.setenv("SUDO_UID", str(owner))
    assert paths.project_folder() == project


@pytest.mark.parametrize("line", ["--list", "--complete -- sparkpin", "images --jsn"])
def test_a_reader_that_has_gone_is_no_traceback(line: str) -> None:
    """141 as of a program that the signal ended, or what it would have ended with where it wrote to no pipe."""
    reader, writer = os.pipe()
    os.close(reader)
    program = [sys.executable, "-c", "from sparkpin.cli.line import main; main()"]
    done = subprocess.run([*program, *line.split()], cwd=PROJECT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    wrote = "jsn" not in line
    assert (done.returncode, "Traceback" in done.stderr, "BrokenPipe" in done.stderr) == (141 if wrote else 2, 0, 0)
    assert bool(done.stderr) != wrote
