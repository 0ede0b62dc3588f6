"""The order of `up`'s smoke tests: the end of the chain first, no check lost, nothing promoted that was not smoked.

The smoke tests themselves are stand-ins that leave what real ones leave: five real servers take minutes, and none of
them drifts when it is told to. tests/e2e runs the real ones.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import made_releases
import pytest

from sparkpin.build import make
from sparkpin.build.pair import pair
from sparkpin.commands import smoke as commands_smoke
from sparkpin.commands import up
from sparkpin.core.errors import BusyError, EngineError
from sparkpin.core.files import lock, write_json
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Demands, Release, Releases
from sparkpin.smoke import drift, run, server
from sparkpin.smoke.answers import NotApplicable, Wrong
from sparkpin.smoke.evidence import evidence_folder

STAGES = ("base", "hybrid", "mtp", "v2", "v2-tq")
SOONEST = ["v2", "v2-tq"]
FIRST_IS_CURRENT = up.first_is_current


@dataclass
class Chain:
    """happened: in order; levels: the log-probability of a stage's tokens; broken: stages that answer wrongly."""

    plan: up.BuildPlan
    made: tuple[Release, ...]
    happened: list[str] = field(default_factory=list)
    levels: dict[str, float] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    room: int = 1  # servers beside each other

    @property
    def records(self) -> Releases:
        return Releases(self.plan.paths)

    def smoke_together(self, paths: Paths, wanted: tuple[Release, ...]) -> None:
        """Neither finds what the other leaves."""
        self.happened.append("together")
        below = {release.tag: drift.reference(paths, release) for release in wanted}
        self.smoke_releases(paths, wanted, below=below)

    def smoke_releases(self, paths: Paths, wanted: tuple[Release, ...], **known: Any) -> None:
        for release in wanted:
            self.happened.append(release.stage)
            below = known["below"][release.tag] if "below" in known else drift.reference(paths, release)
            level = self.levels.get(release.stage, -1.0)
            own = drift.Reference(release.tag, "t", (1, 2), (level, level))
            check: dict[str, Any] = {"name": "drift", "passed": True, "applicable": True}
            demands = release.demands
            try:
                drift.compared(own, below, demands.drift, demands.parent, "")
            except NotApplicable:
                check["applicable"] = False
            except Wrong:
                check["passed"] = False
            chat = {"name": "chat", "passed": release.stage not in self.broken, "applicable": True}
            result = {"passed": check["passed"] and chat["passed"], "checks": [check, chat]}
            folder = evidence_folder(paths, release)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / drift.FILE, {"text": own.text, "tokens": own.tokens, "logprobs": own.logprobs})
            write_json(folder / "result.json", result)
            self.records.smoked(release.tag, result)

    def first_is_current(self, paths: Paths, release: Release) -> None:
        assert release.smoke_passed and drift.is_compared(release)
        self.happened.append(f"promote {release.stage}")
        self.records.point(release)

    def run(self, *, serve: bool = False) -> dict[str, Release]:
        done = up.smoke_chain(self.plan, self.made, serve=serve)
        return {release.stage: release for release in done}


@pytest.fixture
def chain(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Chain:
    paths = Paths(project, tmp_path / "cache", tmp_path / "home")
    made = []
    for number, stage in enumerate(STAGES, start=1):
        parent = STAGES[number - 2] if number > 1 else ""
        demands = Demands(
            checks=("drift", "mods"), mods=(), acceptance_floor=None, scripted=True, parent=parent,
            drift=0.1 if parent else None,
        )  # fmt: skip
        made.append(made_releases.release(number, stage=stage, recipe="scripted-tiny", demands=demands))
        Releases(paths).save(made[-1])
    found = Chain(up.BuildPlan(paths, pair(project, "scripted-tiny"), ()), tuple(made))
    for module in (up, commands_smoke):
        monkeypatch.setattr(module, "engine_of", lambda paths: None)
    monkeypatch.setattr(up, "obstacle", lambda paths, engine, release: "")
    monkeypatch.setattr(up, "has_room", lambda plan, count: not plan.pairings[-1].stack.gpu and count <= found.room)
    for name in ("smoke_releases", "smoke_together", "first_is_current"):
        monkeypatch.setattr(up, name, getattr(found, name))
    monkeypatch.setattr(up.serving, "serve", lambda *, recipe, release: found.happened.append(f"serve {recipe}"))
    return found


def test_the_end_is_promoted_before_the_others_are_tested_and_no_check_is_lost(
    chain: Chain, capsys: pytest.CaptureFixture[str]
) -> None:
    done = chain.run()
    assert chain.happened == [*SOONEST, "promote v2-tq", "base", "hybrid", "mtp"]
    assert all(release.smoke_passed and drift.is_compared(release) for release in done.values())
    (check, _) = (done["v2"].smoke or {})["checks"]
    assert done["mtp"].tag in check["detail"] and check["compared"]
    assert "invoke serve" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["v2-tq", "v2"])
def test_what_fails_or_was_not_compared_is_not_promoted_early(chain: Chain, broken: str) -> None:
    chain.broken = (broken,)
    done = chain.run()
    assert chain.happened == [*SOONEST, "base", "hybrid", "mtp"]
    assert done[broken].state == "failed" and chain.records.current_tag("scripted-tiny") is None


def test_at_the_end_of_up_too_only_what_was_compared_is_promoted(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    promoted: list[str] = []
    monkeypatch.setattr(up.current, "promote", lambda paths, engine, tag, look: promoted.append(tag))
    chain.broken = ("v2",)
    end = chain.run()["v2-tq"]
    assert end.smoke_passed and not drift.is_compared(end)
    FIRST_IS_CURRENT(chain.plan.paths, end)
    assert not promoted
    smoke = {"passed": True, "checks": [{"name": "drift", "passed": True, "applicable": True}]}
    FIRST_IS_CURRENT(chain.plan.paths, dataclasses.replace(end, smoke=smoke))
    assert promoted == [end.tag]


def test_drift_that_only_shows_afterwards_fails_the_stage(chain: Chain) -> None:
    chain.levels = {"v2": -2.0, "v2-tq": -2.05}
    done = chain.run()
    assert done["v2"].state == "failed" and any("drift" in failure for failure in done["v2"].smoke_failures)
    assert done["v2-tq"].state == "current"


def test_drift_of_the_end_keeps_it_from_being_promoted(chain: Chain) -> None:
    chain.levels = {"v2-tq": -2.0}
    assert chain.run()["v2-tq"].state == "failed" and chain.happened == [*SOONEST, "base", "hybrid", "mtp"]


def test_it_is_served_before_the_others_where_there_is_room(chain: Chain) -> None:
    chain.run(serve=True)
    assert chain.happened == [*SOONEST, "promote v2-tq", "serve scripted-tiny", "base", "hybrid", "mtp"]


def test_a_gpu_s_memory_is_the_server_s(chain: Chain, capsys: pytest.CaptureFixture[str]) -> None:
    last = chain.plan.pairings[-1]
    gpu = pair(chain.plan.paths.project, "scripted-tiny-spark")[-1].stack.gpu
    stack = last.stack.model_copy(update={"gpu": gpu})
    chain.plan = dataclasses.replace(chain.plan, pairings=(dataclasses.replace(last, stack=stack),))
    done = chain.run(serve=True)
    assert chain.happened == [*SOONEST, "promote v2-tq", "serve scripted-tiny"]
    assert done["mtp"].state == "built" and "invoke smoke" in capsys.readouterr().out


def test_what_was_smoked_is_not_smoked_again(chain: Chain) -> None:
    chain.run()
    chain.happened.clear()
    chain.made = tuple(chain.records.get(release.tag) for release in chain.made)
    chain.run()
    assert chain.happened == []
    chain.records.update(chain.made[-1].tag, lambda one: dataclasses.replace(one, smoke=None))
    chain.made = tuple(chain.records.get(release.tag) for release in chain.made)
    chain.run()
    assert chain.happened == ["v2-tq"], "the stage below it has left its numbers"


@pytest.mark.parametrize(("level", "current"), [(-1.05, True), (-2.0, False)])
def test_where_there_is_room_for_two_servers_the_end_is_compared_when_both_have_ended(
    chain: Chain, level: float, current: bool
) -> None:
    chain.room, chain.levels = 2, {"v2-tq": level}
    done = chain.run()
    promoted = ["promote v2-tq"] if current else []
    assert chain.happened == ["together", *SOONEST, *promoted, "base", "hybrid", "mtp"]
    assert done["v2-tq"].state == ("current" if current else "failed")
    assert all(drift.is_compared(release) for release in done.values())


def test_when_one_of_two_tests_breaks_off_the_other_ends_before_the_lock_goes(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, begun, removed, held = chain.plan.paths, threading.Event(), threading.Event(), list[bool]()

    def test(paths: Paths, engine: object, release: Release, *_: object, **known: object) -> None:
        if release.stage == SOONEST[0]:
            assert begun.wait(20)
            raise EngineError("gone")
        begun.set()
        assert removed.wait(20), "its server is taken away"
        try:
            with lock(server.smoke_lock(paths), wait=False):
                held.append(False)
        except BusyError:
            held.append(True)
        raise EngineError("its server is gone")

    for name in ("engine_of", "require_consistent", "checkpoint_of"):
        monkeypatch.setattr(make, name, lambda *_: None)
    monkeypatch.setattr(make, "uses_gpu", lambda *_: False)
    monkeypatch.setattr(run, "run_smoke", test)
    monkeypatch.setattr(run, "remove_leftovers", lambda *_: None)
    monkeypatch.setattr(server, "remove_leftovers", lambda *_: removed.set())
    with pytest.raises(EngineError, match="gone"):
        make.smoke_together(paths, chain.made[-2:])
    assert held == [True] and all(release.smoke is None for release in chain.records.all())
