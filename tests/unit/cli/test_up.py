"""`invoke up`: what it tests, in which order, and that nothing becomes current that was not tested and compared.

The smoke tests are stand-ins that leave what real ones leave: five real servers take minutes, and none of them drifts
when it is told to. tests/e2e runs the real ones.
"""

from __future__ import annotations

import dataclasses
import io
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_releases
import pytest
from evidence_samples import make_sample, pairings

from sparkpin.build.checkpoint import ModelNeeds
from sparkpin.build.pair import pair
from sparkpin.cli import build, up
from sparkpin.cli.choose import choose_recipe
from sparkpin.core.errors import DiskError, InputError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.distribute import digests
from sparkpin.host.preflight import DiskRow
from sparkpin.releases.record import Demands, Release, Releases

STAGES = ("base", "hybrid", "mtp", "v2", "v2-tq")
RECIPE = "scripted-tiny"


@dataclass
class Chain:
    """happened: in order; broken: stages that answer wrongly."""

    records: Releases
    made: tuple[Release, ...]
    happened: list[str] = field(default_factory=list)
    broken: tuple[str, ...] = ()

    def smoke_releases(self, paths: Paths, wanted: list[Release]) -> None:
        for release in wanted:
            self.happened.append(release.stage)
            below = [one for one in self.now if one.stage == release.demands.parent and one.smoke_passed]
            drift = {"name": "drift", "passed": True, "applicable": bool(below or release.stage == "base")}
            chat = {"name": "chat", "passed": release.stage not in self.broken, "applicable": True, "detail": ""}
            self.records.smoked(release.tag, {"passed": chat["passed"], "checks": [drift, chat]})

    @property
    def now(self) -> list[Release]:
        return [self.records.get(release.tag) for release in self.made]

    def promote(self, paths: Paths, engine: None, release: Release) -> None:
        self.happened.append(f"promote {release.stage}")
        self.records.point(release)


@pytest.fixture
def chain(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    paths = Paths(project, tmp_path / "cache", tmp_path / "home")
    made = []
    for number, stage in enumerate(STAGES, start=1):
        parent = STAGES[number - 2] if number > 1 else ""
        demands = Demands(checks=("drift",), mods=(), acceptance_floor=None, scripted=True, parent=parent, drift=0.1)
        made.append(made_releases.release(number, stage=stage, recipe=RECIPE, demands=demands))
        Releases(paths).save(made[-1])
    found = Chain(Releases(paths), tuple(made))
    stand_ins: dict[str, Any] = {
        "engine_of": lambda paths: None,
        "carry_out": lambda plan, take: tuple(found.now),
        "owes": lambda paths, engine, release, load: release.smoke is None,
        "smoke_releases": found.smoke_releases,
        "require_consistent": lambda *_, **__: [],
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(up, name, stand_in)
    monkeypatch.setattr(Paths, "from_env", lambda: paths)
    monkeypatch.setattr(up.preflight, "missing", lambda *_, **__: [])
    monkeypatch.setattr(up.current, "promote", found.promote)
    monkeypatch.setattr(up.serving, "serve_release", lambda recipe: found.happened.append(f"serve {recipe}"))
    return found


@pytest.mark.parametrize(
    ("options", "happened"),
    [
        ({}, [*STAGES, "promote v2-tq"]),
        ({"serve": True}, ["v2", "v2-tq", "promote v2-tq", f"serve {RECIPE}"]),
        ({"no_smoke": True}, []),
        ({"dry_run": True}, []),
    ],
    ids=str,
)
def test_what_is_tested_and_that_a_second_run_tests_nothing(
    chain: Chain, options: dict[str, bool], happened: list[str]
) -> None:
    up.up(recipe=RECIPE, **options)
    assert chain.happened == happened
    chain.happened.clear()
    up.up(recipe=RECIPE, **options)
    assert chain.happened == [one for one in happened if one.startswith("serve")], "what runs already is left alone"


@pytest.mark.parametrize("broken", ["v2", "v2-tq"])
def test_an_end_that_fails_or_cannot_be_compared_is_neither_current_nor_served(chain: Chain, broken: str) -> None:
    chain.broken = (broken,)
    for _ in range(2):
        with pytest.raises(SmokeError):  # the exit code of `up`
            up.up(recipe=RECIPE, serve=True)
        assert chain.records.current_tag(RECIPE) is None and "serve" not in " ".join(chain.happened)
    assert chain.happened == ["v2", "v2-tq", broken], "one that has failed is tested again"


def test_another_release_that_is_current_is_not_replaced(chain: Chain) -> None:
    other = made_releases.release(9, stage="v2-tq", recipe=RECIPE, smoke={"passed": True, "checks": []})
    chain.records.save(other)
    chain.records.point(other)
    up.up(recipe=RECIPE, serve=True)
    assert chain.records.current_tag(RECIPE) == other.tag and chain.happened[-1] == f"serve {RECIPE}"


@pytest.mark.parametrize("answer", ["", "no\n", None])
def test_nothing_large_is_fetched_unasked(monkeypatch: pytest.MonkeyPatch, answer: str | None) -> None:
    """None: there is no terminal."""
    stdin = io.StringIO(answer)
    stdin.isatty = lambda: answer is not None  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", stdin)
    with pytest.raises(InputError, match=r"73\.00 GB") as caught:
        up.agree(ModelNeeds((), 73 * 10**9, 0))
    assert "--yes" in caught.value.next_step


def test_a_download_that_does_not_fit_is_an_error_before_anything_is_asked(
    chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = SimpleNamespace(fetch=9, repositories=("a/b",), disk=lambda *_: [DiskRow(tmp_path, 9, 5)])
    monkeypatch.setattr(up, "needs_of", lambda *_: needs)
    last = pair(chain.records.paths.project, RECIPE)[-1]
    model = last.model.model_copy(update={"packed": None})
    plan = up.BuildPlan(chain.records.paths, (dataclasses.replace(last, model=model),), ())
    with pytest.raises(DiskError):
        up.model_download(plan, dry_run=False)
    assert up.model_download(plan, dry_run=True) is needs


def test_a_file_in_place_of_a_recipe_s_name_is_to_be_imported(project: Path, tmp_path: Path) -> None:
    paths, foreign = Paths(project, tmp_path / "cache", tmp_path / "home"), tmp_path / "their.yaml"
    foreign.write_text("model: a/b\n")
    for file, step in (
        (foreign, f"recipe import {foreign}"),
        (project / f"recipes/{RECIPE}.yaml", f"--recipe {RECIPE}"),
    ):
        with pytest.raises(InputError) as caught:
            choose_recipe(paths, str(file), None)
        assert step in caught.value.next_step


def test_other_bytes_than_published_are_a_warning_and_other_pins_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample = make_sample(tmp_path)
    records, chain = sample.records, pairings("hybrid", sample.paths.project)
    base = dataclasses.replace(
        sample.release, stage="base", image=records[0].config_digest, diff_ids=tuple(records[0].diff_ids)
    )
    paths = dataclasses.replace(sample.paths, project=tmp_path / "project")
    plan, made = up.BuildPlan(paths, chain, ()), (base, sample.release)
    build.compare_published(plan, made)
    assert capsys.readouterr() == ("", ""), "nothing is published of the stack"

    entries = {"base": digests.entry_of(records[0], 0), "hybrid": digests.entry_of(records[1], len(base.diff_ids))}
    file = paths.project / digests.file_of("cpu")
    file.parent.mkdir(parents=True)

    def told(*edits: str) -> tuple[str, str]:
        text = "".join(("images:\n", *digests.rows(entries)))
        for edit in edits:
            assert edit in text
            text = text.replace(edit, "0" * len(edit))
        file.write_text(text)
        build.compare_published(plan, made)
        return capsys.readouterr()

    assert not told()[1]
    assert not told(records[1].key)[1], "nothing is published for these pins"
    _, err = told(entries["hybrid"].image[7:], records[1].diff_ids[-1][7:])
    assert "warning: hybrid" in err and "warning: base" not in err
