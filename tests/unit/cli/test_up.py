"""The order of `up`'s smoke tests: the end of the chain first, no check lost, nothing promoted that was not smoked.

The smoke tests themselves are stand-ins that leave what real ones leave: five real servers take minutes, and none of
them drifts when it is told to. tests/e2e runs the real ones.
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import made_releases
import pytest
from evidence_samples import make_sample, pairings
from held_lock import held_lock

from sparkpin.build.pair import pair
from sparkpin.cli import build, up
from sparkpin.cli import serve as commands_serve
from sparkpin.cli import smoke as commands_smoke
from sparkpin.core.errors import BusyError, InputError, SmokeError
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.distribute import digests
from sparkpin.releases.record import Demands, Release, Releases
from sparkpin.serve import switching
from sparkpin.smoke import drift
from sparkpin.smoke.answers import NotApplicable, Wrong
from sparkpin.smoke.evidence import evidence_folder
from sparkpin.smoke.server import smoke_lock

STAGES = ("base", "hybrid", "mtp", "v2", "v2-tq")
LAYERS = tuple(f"sha256:{number:064}" for number in range(len(STAGES)))
REST = ["base", "hybrid", "mtp"]
FIRST_IS_CURRENT, HAS_ROOM, SERVE = up.first_is_current, up.has_room, commands_serve.serve_release


@dataclass
class Chain:
    """happened: in order; levels: the log-probability of a stage's tokens; broken: stages that answer wrongly."""

    plan: up.BuildPlan
    made: tuple[Release, ...]
    happened: list[str] = field(default_factory=list)
    levels: dict[str, float] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    room: bool = True  # for a test beside a server
    served: str | None = None

    @property
    def records(self) -> Releases:
        return Releases(self.plan.paths)

    def smoke_releases(self, paths: Paths, wanted: tuple[Release, ...], **numbers: int) -> None:
        for release in wanted:
            self.happened.append(release.stage)
            below = drift.reference(paths, release)
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
            chat = {"name": "chat", "passed": release.stage not in self.broken, "applicable": True, "detail": ""}
            result = {"passed": check["passed"] and chat["passed"], "checks": [check, chat]}
            folder = evidence_folder(paths, release)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / drift.FILE, {"text": own.text, "tokens": own.tokens, "logprobs": own.logprobs})
            write_json(folder / "result.json", result)
            self.records.smoked(release.tag, result)

    def serve(self, *, release: str, test: switching.Test | None = None) -> None:
        if test:
            self.smoke_releases(self.plan.paths, (self.records.get(release),))
            self.happened[-1] += " as served"
            if self.records.get(release).smoke_failed:
                raise SmokeError("it failed", next_step="mend it")
        self.happened.append(f"serve {release}")

    def first_is_current(self, paths: Paths, release: Release) -> None:
        assert drift.is_compared(release)
        if not release.smoke_passed or self.records.current(release.recipe):
            return
        self.happened.append(f"promote {release.stage}")
        self.records.point(release)

    def run(self, *, serve: bool = False) -> dict[str, Release]:
        done = up.smoke_chain(self.plan, self.made, serve=serve)
        return {release.stage: release for release in done}


def ends_with(end: Release, serve: bool) -> list[str]:
    """The end of the chain first; where it is to be served, by the server that is tested."""
    return [f"{end.stage} as served", f"serve {end.tag}"] if serve else [end.stage]


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
        known = {"demands": demands, "diff_ids": LAYERS[:number]}
        made.append(made_releases.release(number, stage=stage, recipe="scripted-tiny", **known))
        Releases(paths).save(made[-1])
    found = Chain(up.BuildPlan(paths, pair(project, "scripted-tiny"), ()), tuple(made))
    for module in (up, commands_smoke):
        monkeypatch.setattr(module, "engine_of", lambda paths: None)
    monkeypatch.setattr(up, "obstacle", lambda paths, engine, release: "")
    monkeypatch.setattr(up, "has_room", lambda plan: found.room)
    for name in ("smoke_releases", "first_is_current"):
        monkeypatch.setattr(up, name, getattr(found, name))
    monkeypatch.setattr(up, "find", lambda engine, name: found.served)
    monkeypatch.setattr(up, "is_kept_up", lambda container: True)
    monkeypatch.setattr(up, "smoke_of_served", lambda paths: contextlib.nullcontext(len))
    monkeypatch.setattr(up.serving, "serve_release", found.serve)
    return found


def test_the_end_is_tested_first_and_current_once_it_is_compared_and_no_check_is_lost(chain: Chain) -> None:
    done = chain.run()
    assert chain.happened == ["v2-tq", "v2", "promote v2-tq", *REST]
    assert all(release.smoke_passed and drift.is_compared(release) for release in done.values())
    for stage, below in (("v2-tq", "v2"), ("v2", "mtp")):
        (check, _) = (done[stage].smoke or {})["checks"]
        assert done[below].tag in check["detail"] and check["compared"]


@pytest.mark.parametrize("serve", [False, True])
@pytest.mark.parametrize(
    ("levels", "broken", "failed"), [({}, ("v2",), "v2"), ({"v2-tq": -2.0}, (), "v2-tq")], ids=["below", "drift"]
)
def test_an_end_that_cannot_be_compared_or_drifts_is_not_current(
    chain: Chain, capsys: pytest.CaptureFixture[str], levels: dict[str, float], broken: tuple[str, ...], failed: str,
    serve: bool,
) -> None:  # fmt: skip
    chain.levels, chain.broken = levels, broken
    done = chain.run(serve=serve)
    end = done["v2-tq"]
    assert chain.happened == [*ends_with(end, serve), "v2", *REST]
    assert done[failed].state == "failed" and chain.records.current_tag("scripted-tiny") is None
    assert (f"warning: {end.tag}" in capsys.readouterr().out) == serve
    with pytest.raises(SmokeError):  # the exit code of `up`
        up.report(chain.plan.paths, tuple(done.values()), smoked=True)


def test_an_end_that_fails_its_own_checks_is_not_served(chain: Chain) -> None:
    chain.broken = ("v2-tq",)
    assert chain.run(serve=True)["v2-tq"].state == "failed"
    assert chain.happened == ["v2-tq as served", "v2", *REST]


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


def test_drift_that_only_shows_afterwards_fails_the_stage_below(chain: Chain) -> None:
    chain.levels = {"v2": -2.0, "v2-tq": -2.05}
    done = chain.run()
    assert done["v2"].state == "failed" and any("drift" in failure for failure in done["v2"].smoke_failures)
    assert done["v2-tq"].state == "current"


def test_a_server_of_another_release_is_left_alone(chain: Chain) -> None:
    chain.served = "sparkpin/scripted-tiny:other-1"
    chain.run(serve=True)
    assert chain.happened == ["v2-tq", "v2", "promote v2-tq", *REST], "`up` serves what is current afterwards"


def test_a_server_that_is_not_reached_after_its_test_ends_it(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(**asked: Any) -> None:
        chain.serve(**asked)
        raise SmokeError("no answer at its port", next_step="is there a firewall?")

    monkeypatch.setattr(up.serving, "serve_release", serve)
    with pytest.raises(SmokeError, match="no answer at its port"):
        chain.run(serve=True)


def test_without_room_beside_a_server_only_the_end_and_the_stage_below_are_tested(chain: Chain) -> None:
    chain.room = False
    done = chain.run(serve=True)
    assert chain.happened == ["v2-tq", "v2", "promote v2-tq"]
    assert done["mtp"].state == "built"


def test_a_gpu_s_memory_is_the_server_s(chain: Chain) -> None:
    last = chain.plan.pairings[-1]
    gpu = pair(chain.plan.paths.project, "scripted-tiny-spark")[-1].stack.gpu
    stack = last.stack.model_copy(update={"gpu": gpu})
    assert not HAS_ROOM(dataclasses.replace(chain.plan, pairings=(dataclasses.replace(last, stack=stack),)))


def test_another_release_that_is_current_is_not_replaced(chain: Chain) -> None:
    other = made_releases.release(9, stage="v2-tq", recipe="scripted-tiny", smoke={"passed": True, "checks": []})
    chain.records.save(other)
    chain.records.point(other)
    chain.run(serve=True)
    assert chain.records.current_tag("scripted-tiny") == other.tag
    assert not [line for line in chain.happened if line.startswith("serve")]


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


def test_an_up_that_was_cut_off_after_the_end_goes_on_with_the_others(chain: Chain) -> None:
    chain.smoke_releases(chain.plan.paths, chain.made[-1:])
    chain.happened.clear()
    chain.made = tuple(chain.records.get(release.tag) for release in chain.made)
    end = chain.run(serve=True)["v2-tq"]
    assert chain.happened == ["v2", "promote v2-tq", *REST] and drift.is_compared(end)


def test_a_server_that_is_asked_for_too_early_is_to_wait_for_the_test(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_serve.Paths, "from_env", lambda: chain.plan.paths)
    with held_lock(smoke_lock(chain.plan.paths)), pytest.raises(BusyError, match="a smoke test is under way"):
        SERVE(recipe="scripted-tiny")
    with pytest.raises(InputError, match="no current release"):
        SERVE(recipe="scripted-tiny")


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
