"""The search between two releases of the tiny recipe: real pins, manifests and locks; no image is built."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shutil
from pathlib import Path

import pytest
from evidence_samples import copy_of_project, edit, make_sample
from places import PROJECT

from sparkpin.cli import upgrade
from sparkpin.core import files
from sparkpin.core.errors import BusyError, DiskError, InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release
from sparkpin.upgrade.bisect_check import Check, run_check
from sparkpin.upgrade.bisect_plan import BisectPlan, make_plan
from sparkpin.upgrade.bisect_search import Trial

RECIPE = "recipes/scripted-tiny.yaml"
Ends = tuple[Path, Release, Release]  # where their records are, the good and the bad release
TIME = "20270101T000000Z"
LENGTH = r'case "$SPARKPIN_COMMAND" in *"--max-model-len 1024"*) echo too short; exit 1;; esac'
"""Cheap: a look at the command line. A prompt of 1,500 tokens would find the same."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Two releases that differ in three settings of the recipe, of which the length breaks the check."""
    where = tmp_path_factory.mktemp("bisect")
    good = make_sample(where, "base").release
    project = copy_of_project(where / "settings")
    edit(
        project,
        RECIPE,
        ("max_model_len: 2048", "max_model_len: 1024"),
        ("max_num_seqs: 4", "max_num_seqs: 2"),
        ("OMP_NUM_THREADS: 1 ", "OMP_NUM_THREADS: 2 "),
    )
    return where, good, make_sample(where, "base", project, "2026-01-03T00:00:00Z").release


@pytest.fixture
def paths(home: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A home of its own for each test."""
    where = home[0]
    shutil.copytree(where / "home", tmp_path / "home")
    monkeypatch.setenv("SPARKPIN_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPARKPIN_CACHE", str(where / "cache"))
    return Paths.from_env()


def search(home: Ends, check: str = LENGTH) -> None:
    upgrade.bisect(Paths.from_env(), good=home[1].tag, bad=home[2].tag, check=check, serve=False)


def trials_of(paths: Paths) -> list[Trial]:
    [folder] = paths.home.glob("bisect/*/")
    files = [path for path in folder.glob("*.json") if not path.stem.endswith("-release")]
    return [
        Trial.model_validate_json(path.read_text()) for path in sorted(files, key=lambda path: path.stat().st_mtime)
    ]


def test_the_setting_that_turns_the_check(home: Ends, paths: Paths, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an engine: of flags and variables no image is made, and the check asks for none."""
    search(home)
    text = capsys.readouterr().out
    assert text.count(" -> ") == 4
    found = text[text.index("the check fails") :]
    assert "  ~ --max-model-len 2048 -> --max-model-len 1024\n" in found
    assert "max-num-seqs" not in found and "OMP" not in found
    assert [trial.verdict for trial in trials_of(paths)[:2]] == ["good", "bad"] and len(trials_of(paths)) <= 6


def test_a_killed_search_goes_on(home: Ends, paths: Paths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C within the fourth trial: three are known, and none of them is tried again. Nobody else reads what a check
    got and printed."""
    marks = tmp_path / "marks"
    check = f'echo "$SPARKPIN_COMMAND" >>{marks}; {LENGTH}'
    whole, begun = Check.judge, list[object]()

    def broken(self: Check, *more: object) -> object:
        begun.append(more)
        if len(begun) == 4:
            raise KeyboardInterrupt
        return whole(self, *more)  # type: ignore[arg-type]

    old = os.umask(0)
    try:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Check, "judge", broken)
            search(home, check)
        known = trials_of(paths)
        assert len(known) == 3 == len(marks.read_text().splitlines())
        for _ in range(2):  # the second time all of it is known
            search(home, check)
            assert len(trials_of(paths)) == len(marks.read_text().splitlines())
    finally:
        os.umask(old)
    [folder] = paths.home.glob("bisect/*/")
    assert folder.stat().st_mode & 0o077 == 0
    assert not [path for path in folder.glob("*.json") if path.stat().st_mode & 0o077]


def test_a_result_that_is_none_and_a_search_that_another_run_holds(home: Ends, paths: Paths) -> None:
    search(home)
    [folder] = paths.home.glob("bisect/*/")
    with files.lock(folder / ".lock"), pytest.raises(BusyError):
        search(home)
    path = next(path for path in folder.glob("*.json") if not path.stem.endswith("-release"))
    for other in ("{}", "[]", "no JSON", path.read_text().replace("{", "[")):
        path.write_text(other)
        with pytest.raises(ManifestError) as caught:
            search(home)
        assert f"rm -r {folder}" in caught.value.next_step


def test_another_check_is_another_search(home: Ends, tmp_path: Path) -> None:
    """A script that it names counts by content, wherever in the command it stands; what it writes does not."""
    script = tmp_path / "s"
    plan = make_plan(Paths(PROJECT, home[0] / "cache", home[0] / "home"), home[1].tag, home[2].tag)
    script.write_text("true")

    def name(check: str) -> str:
        return Check(check, serve=False).identity(plan)

    reading = [
        f"sh {script}",
        f"true 2>&1 | sh '{script}'",
        f"true > out; sh {script}",
        f"true {'x' * 300} && sh {script}",
    ]
    before, written = [name(check) for check in reading], name(f"true >> {script}")
    assert [name(check) for check in reading] == before
    script.write_text("false")
    assert not {*before} & {name(check) for check in reading}
    assert name(f"true >> {script}") == written and name("true") not in before


def test_what_says_nothing_of_a_release_ends_the_search(
    home: Ends, paths: Paths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the machine, which a test cannot have: a full disk at the third image. It leaves no verdict."""
    whole, made = BisectPlan.combine, list[object]()

    def full(*asked: object) -> object:
        made.append(asked)
        if len(made) == 3:
            raise DiskError("no space left")
        return whole(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(BisectPlan, "combine", full)
    with pytest.raises(DiskError):
        search(home)
    assert [trial.verdict for trial in trials_of(paths)] == ["good", "bad"]


def test_where_the_bad_release_does_not_start_the_search_is_for_what_keeps_a_server_from_starting(
    home: Ends, paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the place of a server: tests/engine/upgrade/test_bisect_engine.py has real ones."""

    def judge(self: Check, paths: Paths, release: Release, log: Path) -> Trial:
        if "1024" in release.argv:
            return Trial(verdict="unresolved", how="does not start", started=False)
        return Trial(verdict="good", how="")

    monkeypatch.setattr(Check, "judge", judge)
    search(home)
    out = capsys.readouterr().out
    assert "  ~ --max-model-len 2048 -> --max-model-len 1024\n" in out[out.index("the check fails") :]


@pytest.mark.parametrize(
    "check", ["true", "echo never; false", "exit 124", "exit 125", "no-such-program", "kill -9 $$"]
)
def test_ends_that_are_not_what_they_are_said_to_be(home: Ends, paths: Paths, check: str) -> None:
    with pytest.raises(InputError):
        search(home, check)


def test_what_a_check_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    """Whoever holds the pipe open lives. The limit is only there for a failure."""
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        check = f"exec 9>{tmp_path / 'pipe'}; echo opened >&9; sleep 1000 & exit 0"
        assert run_check(check, {}, tmp_path / "log").verdict == "good"
        assert run_check("timeout 0.2 sleep 60", {}, tmp_path / "late").verdict == "unresolved"
        assert os.read(pipe, 100) == b"opened\n"
        assert select.select([pipe], [], [], 300)[0] and os.read(pipe, 100) == b""
    finally:
        os.close(pipe)


def test_what_a_check_is_told(home: Ends, paths: Paths, tmp_path: Path) -> None:
    search(home, f'env >>{tmp_path}/env; cp "$SPARKPIN_RECORD" {tmp_path}; {LENGTH}')
    told = dict(
        line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if line.startswith("SPARKPIN_")
    )
    assert (told["SPARKPIN_MODEL"], told["SPARKPIN_ENDPOINT"]) == ("scripted-tiny", "")
    record = json.loads((tmp_path / Path(told["SPARKPIN_RECORD"]).name).read_text())
    assert told["SPARKPIN_RELEASE"] == f"scripted-tiny:base-{record['key'][:12]}"
    assert told["SPARKPIN_COMMAND"].split()[:3] == record["argv"][:3] == ["vllm", "serve", "/model"]


@pytest.fixture(scope="module")
def remade(tmp_path_factory: pytest.TempPathFactory) -> BisectPlan:
    """Two releases whose images differ: in a wheel and a package of the lock, a mod and a template. A stage differs
    in a remark, and the packages were locked at another time."""
    where = tmp_path_factory.mktemp("remade")
    good = make_sample(where, "hybrid").release
    project = copy_of_project(where / "other")
    lock = json.loads((project / "pins/stacks/cpu.lock").read_text())
    assert lock["time"] not in ("", TIME)
    lock["time"] = TIME
    deb = lock["debs"][0]
    deb.update(version="9:9", file=f"{deb['name']}_9%3a9_amd64.deb", sha256="cd" * 32)
    wheel = next(row for row in lock["wheels"] if row["name"] == "networkx")
    wheel.update(version="0.1", file="networkx-0.1-py3-none-any.whl", sha256="ab" * 32)
    (project / "pins/stacks/cpu.lock").write_text(json.dumps(lock))
    edit(project, "mods/hybrid-int4-fp8/sparkpin_hybrid/count.py", ("\n\n\n", "\n\n\n# edited\n"))
    edit(project, "dockerfiles/mods.Dockerfile.j2", ("FROM", "# edited\nFROM"))
    edit(project, "stages/hybrid.yaml", ("smoke:", "# edited\nsmoke:"))
    bad = make_sample(where, "hybrid", project, "2026-01-03T00:00:00Z").release
    return make_plan(Paths(PROJECT, where / "cache", where / "home"), good.tag, bad.tag)


def test_each_combination_is_an_image_of_its_own(remade: BisectPlan) -> None:
    """A remark in a stage decides no image, so it is no change. Only the ends are images that are there."""
    plan = remade
    mod, wheel, deb = "mod hybrid-int4-fp8", "wheel networkx", "deb base-files"
    template, everything = "file dockerfiles/mods.Dockerfile.j2", frozenset(plan.changes)
    assert everything == {mod, wheel, deb, template}
    ends = [plan.combine(chosen).image for chosen in ((), everything)]
    assert ends == [plan.good.image, plan.bad.image]
    keys = {}
    for chosen in ((), (mod,), (wheel,), (deb,), (template,), (mod, wheel), everything):
        with plan.mixed(chosen) as (project, pairings):
            keys[chosen] = [pairing.rendered.key for pairing in pairings]
            assert ("# edited" in (project / "dockerfiles/mods.Dockerfile.j2").read_text()) == (template in chosen)
            lock = (project / "pins/stacks/cpu.lock").read_text()
            assert ('"0.1"' in lock, '"9:9"' in lock, TIME in lock) == (wheel in chosen, deb in chosen, deb in chosen)
    assert len({tuple(pair) for pair in keys.values()}) == 7
    assert keys[()][-1] == plan.good.build_key and keys[everything][-1] == plan.bad.build_key
    assert keys[(mod,)][0] == keys[()][0] != keys[(wheel,)][0]  # the first stage has no mod: its layers are used again


def test_images_whose_files_are_gone_are_taken_whole(remade: BisectPlan, tmp_path: Path) -> None:
    plan, other = remade, Paths(PROJECT, remade.paths.cache, tmp_path / "home")
    shutil.copytree(plan.paths.home, other.home)
    for path in (other.inputs).rglob(plan.bad.inputs["dockerfiles/mods.Dockerfile.j2"]):
        path.unlink()
    found = make_plan(other, plan.good.tag, plan.bad.tag)
    assert [*found.changes] == ["image as a whole"]
    assert "dockerfiles/mods.Dockerfile.j2" in found.changes["image as a whole"]


def test_what_cannot_be_searched_between(remade: BisectPlan) -> None:
    plan = remade
    with pytest.raises(InputError):
        dataclasses.replace(plan, bad=dataclasses.replace(plan.bad, stack="spark")).image_changes()
    with pytest.raises(InputError):
        make_plan(plan.paths, plan.good.tag, plan.good.tag)


def test_flags_in_another_order(home: Ends, paths: Paths) -> None:
    """Each end stands as it is: an order that is not tried by itself must not come into the good one."""
    good = dataclasses.replace(home[1], argv=("vllm", "serve", "/model", "--dtype", "auto", "--seed", "0"))
    moved = (*good.argv[:3], "--seed", "0", "--dtype", "auto")
    bad = dataclasses.replace(good, argv=moved, env={**good.env, "A": "1", "B": "2"})
    plan = BisectPlan(paths, good, bad, {"variable A": "", "variable B": ""})
    combined = [plan.combine(chosen).argv for chosen in ((), ["variable A"], plan.changes)]
    assert combined == [good.argv, good.argv, bad.argv]
