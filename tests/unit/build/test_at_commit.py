"""Earlier commits of the project, in a real repository of Git; the old code is a stand-in that leaves builds' records.

With real code and a real engine it takes minutes, so that is run on demand (docs/reproducibility.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from evidence_samples import Sample, copy_of_project, make_sample

from sparkpin.build import at_commit, digests, make
from sparkpin.build.at_commit import reproduce_commit
from sparkpin.build.reproduce import Reproduction
from sparkpin.core.errors import BuildError, InputError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="apt-get install git")
OLD_CODE = """
import json, os, pathlib, sys
from invoke import task

@task
def render(c, recipe=None, stage=None):
    print((pathlib.Path(__file__).parent / "shown").read_text())

@task
def build(c, recipe=None, stage=None):
    assert os.environ["DOCKER_HOST"] == "unix:///own" and "SPARKPIN_SIGNING_KEY" not in os.environ
    assert os.environ["PYTHONPATH"] == str(pathlib.Path("src").absolute())
    images = pathlib.Path(os.environ["SPARKPIN_HOME"]) / "images"
    images.mkdir(parents=True)
    for row in json.loads(pathlib.Path("made.json").read_text()):
        (images / row["stage"]).with_suffix(".json").write_text(json.dumps(row))
    sys.exit(len(recipe or ""))
"""


@dataclasses.dataclass
class Repository:
    """sample: a release whose build an older commit of the project gave; rows: what the stand-in's build leaves."""

    sample: Sample
    paths: Paths
    rows: list[dict[str, Any]]
    fetches: list[Callable[..., str]] = dataclasses.field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.paths.project

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@example", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *who, *arguments], cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self) -> str:
        (self.folder / "made.json").write_text(json.dumps(self.rows))
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", "x")
        return self.git("rev-parse", "HEAD")

    def publish(self) -> None:
        below, entries = 0, dict[str, digests.PublishedImage]()
        for record in self.sample.records:
            entries[record.stage] = digests.entry_of(record, below)
            below = len(record.diff_ids)
        file = self.folder / digests.file_of("cpu")
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(("images:\n", *digests.rows(entries))))

    def reproduced(self, commit: str, recipe: str | None = None) -> Reproduction:
        try:
            return reproduce_commit(self.paths, commit, recipe, "hybrid", print)
        finally:
            assert not list(self.paths.work.glob("reproduce-*")), "nothing of it stays"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    sample = make_sample(tmp_path / "sample")
    project = copy_of_project(tmp_path / "project")
    shutil.rmtree(project / digests.FOLDER)
    (project / "src/sparkpin").mkdir(parents=True)
    (project / "src/sparkpin/__init__.py").write_text("")
    (project / "tasks.py").write_text(OLD_CODE)
    (project / "requirements.lock").write_text("uv==0.0.1 \\\n    --hash=x\nsame==1\n")
    (project / "shown").write_text(f"# {sample.records[-1].ref}\nFROM x\n")
    rows = [json.loads(record.model_dump_json(by_alias=True)) for record in sample.records]
    made = Repository(sample, dataclasses.replace(sample.paths, project=project), rows)
    made.git("init", "--quiet")

    @contextlib.contextmanager
    def engine(*_: object) -> Iterator[tuple[Engine, str]]:
        yield Engine(None, {"DOCKER_HOST": "unix:///own"}), "0"  # type: ignore[arg-type]

    monkeypatch.setattr(at_commit, "private_engine", engine)
    monkeypatch.setattr(make.fetching, "fetch_stack", lambda *args: made.fetches.append(args[-1]))
    monkeypatch.setenv("SPARKPIN_SIGNING_KEY", "/nowhere")
    return made


def test_what_was_published_at_that_commit_counts(repository: Repository) -> None:
    """And not what is published today; the code is the commit's, and what it ran with is said."""
    repository.publish()
    old = repository.commit()
    (repository.folder / digests.file_of("cpu")).write_text("no such file\n")
    (repository.folder / "requirements.lock").write_text("uv==0.0.2\nsame==1\n")
    (repository.folder / "tasks.py").write_text("raise SystemExit('today')\n")
    repository.commit()
    made = repository.reproduced("HEAD^")
    assert made.verdict == "identical" and [stage.stage for stage in made.stages] == ["base", "hybrid"]
    assert old[:12] in made.release and len(repository.fetches) == 1
    said = " ".join(made.notes)
    assert "not with uv==0.0.1" in said and "same==1" not in said and digests.file_of("cpu") in said


def test_other_bytes_and_other_keys_are_different(repository: Repository) -> None:
    repository.publish()
    other = "sha256:" + "0" * 64
    repository.rows[1]["config_digest"] = repository.rows[1]["diff_ids"][-1] = other
    made = repository.reproduced(repository.commit())
    assert [stage.verdict for stage in made.stages] == ["identical", "different"]
    assert "hybrid-int4-fp8" in made.stages[1].lines[0] and made.stages[1].got == other
    repository.rows[1]["key"] = "1" * 64
    assert repository.reproduced(repository.commit()).stages[1].lines[0].count("1" * 64) == 1


def test_where_nothing_was_published_this_machine_s_record_counts(repository: Repository) -> None:
    (repository.folder / "pins/stacks/cpu.yaml").write_text("former: form\n")
    commit = repository.commit()
    made = repository.reproduced(commit)
    assert made.verdict == "identical" and not repository.fetches
    assert any("cannot read those pins" in note for note in made.notes)
    for record in repository.paths.images.iterdir():
        record.unlink()
    with pytest.raises(InputError, match="nothing to compare with"):
        repository.reproduced(commit)


def test_what_nobody_offers_any_more_ends_it_with_advice(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository.publish()

    def gone(_paths: Paths, _stack: object, lock: Any, _say: object, advice: Callable[..., str]) -> None:
        raise NetworkError("a file is gone", next_step=advice(lock.files[:1]))

    monkeypatch.setattr(make.fetching, "fetch_stack", gone)
    with pytest.raises(NetworkError) as caught:
        repository.reproduced(repository.commit())
    for way in ("invoke import", "invoke up --from oci://"):
        assert way in caught.value.next_step


def test_bad_input(repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository.publish()
    commit = repository.commit()
    for wrong in ("nothing", "--help", commit[::-1], f"{commit}:tasks.py"):
        with pytest.raises(InputError, match="wanted a commit"):
            repository.reproduced(wrong)
    assert not capsys.readouterr().out, "nothing is told before the commit is known"
    with pytest.raises(BuildError, match="ended with 2"):
        repository.reproduced(commit, recipe="no")
    repository.git("rm", "--quiet", "-r", "--cached", "src")
    repository.git("commit", "--quiet", "--message", "no code")
    with pytest.raises(InputError, match="holds no sparkpin"):
        repository.reproduced("HEAD")
    inner = dataclasses.replace(repository.paths, project=repository.folder / "mods")  # of another repository
    for paths in (inner, dataclasses.replace(repository.paths, project=tmp_path)):
        with pytest.raises(InputError, match="no checkout of Git"):
            reproduce_commit(paths, commit, None, None, print)
