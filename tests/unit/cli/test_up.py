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
from sparkpin.core.errors import DiskError, InputError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.distribute import digests
from sparkpin.host.preflight import DiskRow
from sparkpin.releases.record import Demands, Release, Releases

STAGES = ("base", "hybrid", "mtp", "v2", "v2-tq")
RECIPE = "scripted-tiny"


@dataclass
class Chain:
    """happened: in order; broken: stages that answer wrongly; running: tag of what the recipe's server runs."""

    records: Releases
    made: tuple[Release, ...]
    happened: list[str] = field(default_factory=list)
    broken: tuple[str, ...] = ()
    running: str | None = None
    error: BaseException | None = None

    def smoke_releases(self, paths: Paths, wanted: list[Release]) -> None:
        for release in wanted:
            self.smoke(release, release.stage)

    def smoke_release(self, paths: Paths, release: Release, *, stays: bool) -> None:
        assert stays
        self.running = release.tag
        if self.error:
            raise self.error
        self.smoke(release, f"{release.stage} as served")

    def smoke(self, release: Release, what: str) -> None:
        self.happened.append(what)
        below = [one for one in self.now if one.stage == release.demands.parent and one.smoke_passed]
        drift = {"name": "drift", "passed": True, "applicable": bool(below or release.stage == "base")}
        chat = {"name": "chat", "passed": release.stage not in self.broken, "applicable": True, "detail": ""}
        self.records.smoked(release.tag, {"passed": chat["passed"], "checks": [drift, chat]})

    def stop(self, paths: Paths, engine: None, recipe: str) -> None:
        self.happened.append("stop")
        self.running = None

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
        "owes": lambda paths, engine, release: release.smoke is None,
        "smoke_releases": found.smoke_releases,
        "smoke_release": found.smoke_release,
        "running_release": lambda paths, engine, recipe: found.running,
        "require_consistent": lambda *_, **__: [],
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(up, name, stand_in)
    monkeypatch.setattr(up.preflight, "missing", lambda *_, **__: [])
    monkeypatch.setattr(up.current, "promote", found.promote)
    monkeypatch.setattr(up.service, "stop", found.stop)
    monkeypatch.setattr(up.serving, "serve", lambda _, recipe: found.happened.append(f"serve {recipe}"))
    return found


@pytest.mark.parametrize(
    ("options", "happened"),
    [
        ({}, [*STAGES, "promote v2-tq"]),
        ({"serve": True}, [*STAGES[:-1], "v2-tq as served", "promote v2-tq", f"serve {RECIPE}"]),
        ({"no_smoke": True}, []),
        ({"dry_run": True}, []),
    ],
    ids=str,
)
def test_what_is_tested_and_that_a_second_run_tests_nothing(
    chain: Chain, options: dict[str, bool], happened: list[str]
) -> None:
    up.up(chain.records.paths, recipe=RECIPE, **options)
    assert chain.happened == happened
    chain.happened.clear()
    up.up(chain.records.paths, recipe=RECIPE, **options)
    assert chain.happened == [one for one in happened if one.startswith("serve")], "what runs already is left alone"


@pytest.mark.parametrize(
    ("broken", "again"), [("v2", ["v2"]), ("v2-tq", ["v2-tq as served", "stop"])], ids=["below", "end"]
)
def test_an_end_that_fails_or_cannot_be_compared_is_neither_current_nor_served(
    chain: Chain, broken: str, again: list[str]
) -> None:
    chain.broken = (broken,)
    for _ in range(2):
        with pytest.raises(SmokeError):  # the exit code of `up`
            up.up(chain.records.paths, recipe=RECIPE, serve=True)
        assert chain.records.current_tag(RECIPE) is None and chain.running is None
    assert chain.happened == [*STAGES[:-1], "v2-tq as served", "stop", *again], "one that has failed is tested again"


def test_a_test_that_is_broken_off_leaves_no_server(chain: Chain) -> None:
    chain.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        up.up(chain.records.paths, recipe=RECIPE, serve=True)
    assert chain.happened == [*STAGES[:-1], "stop"] and not chain.records.get(chain.made[-1].tag).smoke


def test_a_server_that_runs_is_left_alone_until_the_end_has_passed_beside_it(chain: Chain) -> None:
    chain.running, chain.broken = chain.made[-1].tag, ("v2-tq",)
    with pytest.raises(SmokeError):
        up.up(chain.records.paths, recipe=RECIPE, serve=True)
    assert chain.happened == list(STAGES) and chain.running


@pytest.mark.parametrize("several", ["machines", "releases"])
def test_what_is_tested_by_a_server_of_its_own(chain: Chain, several: str) -> None:
    """An end that takes several servers, or that another release stands before: which stays current."""
    end, passed = chain.made[-1], {"passed": True, "checks": []}
    other = made_releases.release(9, stage="v2-tq", recipe=RECIPE, smoke=passed)
    if several == "machines":
        chain.records.save(dataclasses.replace(end, argv=(*end.argv, "--nnodes", "2")))
    else:
        chain.records.save(other)
        chain.records.point(other)
    up.up(chain.records.paths, recipe=RECIPE, serve=True)
    is_first = several != "releases"
    assert chain.records.current_tag(RECIPE) == (end if is_first else other).tag
    assert chain.happened == [*STAGES, *["promote v2-tq"] * is_first, f"serve {RECIPE}"]


@pytest.mark.parametrize("stack", ["cpu", "spark"])
def test_the_machine_is_asked_for_what_the_named_stack_needs(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, stack: str
) -> None:
    asked = list[str]()
    monkeypatch.setattr(up.preflight, "missing", lambda _, host, of, **__: asked.append(of.name) or [])
    up.up(chain.records.paths, stack=stack, no_smoke=True, dry_run=True)
    assert asked == [stack]


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
    out, err = told(records[1].key, records[1].diff_ids[-1][7:])
    assert not err and records[1].diff_ids[-1] in out, "other pins: no warning, but which layer they have changed"
    _, err = told(entries["hybrid"].image[7:], records[1].diff_ids[-1][7:])
    assert "warning: hybrid" in err and "warning: base" not in err
