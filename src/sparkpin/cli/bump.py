"""The task `bump`: newer versions on the side, held against the current release, and a verdict."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import at_work, build_releases, checkpoint_of, fetch_missing
from sparkpin.build.pair import Pairing, pair, require_model_fits
from sparkpin.cli.bench import BenchOptions, common, plan_for, subject_of
from sparkpin.cli.bisect import BisectSearch
from sparkpin.cli.choose import choose_recipe, require_recipe
from sparkpin.cli.options import Recipe, Stack
from sparkpin.cli.quality import Pair, compared
from sparkpin.cli.releases import promote
from sparkpin.cli.smoke import smoke_releases
from sparkpin.cli.tasks import task
from sparkpin.core import files, terminal
from sparkpin.core.errors import (
    BuildError,
    BumpError,
    BusyError,
    CheckpointError,
    DiskError,
    InputError,
    InspectionError,
    IntegrityError,
    ManifestError,
    QualityError,
    SmokeError,
    clipped,
)
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.distribute.attest import ensure_attested
from sparkpin.host import preflight
from sparkpin.host.engine import Engine, engine_of
from sparkpin.measure.bench.compare import compare
from sparkpin.measure.bench.ratios import ALL
from sparkpin.measure.bench.record import Comparison, Ratio
from sparkpin.measure.bench.run import BenchPlace
from sparkpin.measure.bench.text import METRICS
from sparkpin.measure.quality import texts
from sparkpin.pins import manifests
from sparkpin.pins.schema import Quality
from sparkpin.releases import quality_allowance, quality_record
from sparkpin.releases.container import require_image
from sparkpin.releases.current import require_current
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases, now
from sparkpin.releases.runs_here import obstacle, uses_gpu
from sparkpin.serve import launch, served
from sparkpin.smoke.inspect import run as inspecting
from sparkpin.smoke.run import run_smoke
from sparkpin.upgrade.bisect import state as states
from sparkpin.upgrade.bisect.changes import ReleaseChange, groups_of
from sparkpin.upgrade.bisect.plan import make_plan
from sparkpin.upgrade.bisect.search import Verdict, minimal
from sparkpin.upgrade.bisect.trial import Bench
from sparkpin.upgrade.bump import record, side
from sparkpin.upgrade.bump.record import Bump, Step

TURNED = (
    *(BuildError, BumpError, CheckpointError, InspectionError, IntegrityError, ManifestError, QualityError, SmokeError),
)
"""What is a verdict on newer versions. All else (no network, disk, engine) ends the run, which can go on later."""
ALLOWED = Quality(kl=0.007, continued_kl=0.01, top1=0.96, perplexity=1.015, tool_calls=0.05, needles=0.1)
"""What newer versions of the same release may cost: reading, what another kernel may (docs/quality.md, stage mtp)."""
SLOWER = 0.03
"""Share of the speed: no more than that is looked at, however sure it is."""
HIGHER = ("output_rate", "decode_rate")  # better; of the other metrics lower is
HOLD, LONGEST = 7, 3650  # days
ROUNDS = 4  # of turns


@dataclass(frozen=True)
class Trial:
    """What is tried against what. paths: of the project on the side."""

    paths: Paths
    engine: Engine
    current: Release
    pairings: tuple[Pairing, ...]
    quick: bool

    def build(self) -> str:
        """The releases of the chain, with their evidence; the last is the one that is tried."""
        absent = sum(file.size for file in self.pairings[-1].stack_lock.files)
        needs = preflight.Needs(cache=absent, home=self.current.size // 10, engine=2 * self.current.size)
        if not Releases(self.paths).find(self.pairings[-1].tag):
            for row in preflight.disk(self.paths, needs, on_top=True):
                if not row.ok:
                    raise DiskError(f"no room for one more image: {row.detail}", next_step=row.fix)
        with at_work(self.paths) as engine:
            fetch_missing(self.paths, engine, self.pairings)
            for made in build_releases(self.paths, engine, self.pairings):
                ensure_attested(self.paths, made, say)
        return f"{terminal.count(len(self.pairings), 'image')}, {terminal.size(made.size)}"

    @property
    def release(self) -> Release:
        return Releases(self.paths).get(self.pairings[-1].tag)

    def inspect(self, release: Release) -> str:
        """InspectionError for what the current release has not."""
        seen = [
            inspecting.inspect(self.paths, self.engine, one.tag, sm=None, say=say) for one in (self.current, release)
        ]
        known = {(row.rule, row.subject, row.what) for row in seen[0].errors}
        if more := [row for row in seen[1].errors if (row.rule, row.subject, row.what) not in known]:
            raise InspectionError("; ".join(f"{row.subject}: {row.text}" for row in more[:3]))
        return seen[1].verdict

    def smoke(self, release: Release) -> str:
        """Kept with the release; the stage below it first, which its answers are compared with."""
        records = Releases(self.paths)
        chain = [records.get(pairing.tag) for pairing in self.pairings[-2:]]
        smoke_releases(self.paths, tuple(one for one in chain if not one.smoke_passed))
        for one in (records.get(one.tag) for one in chain):
            if not one.smoke_passed:
                first, *more = one.smoke_failures or [one.smoke_text]
                raise SmokeError(f"{one.stage}: {clipped(first)}{f' (and {len(more)} more)' if more else ''}")
        return self.release.smoke_text

    def smoke_again(self, release: Release) -> str:
        """Only what failed, of a release that need have no record."""
        records = Releases(self.paths)
        smoked = [records.get(pairing.tag).smoke or {} for pairing in self.pairings[-2:]]
        checks = [check for one in smoked for check in one.get("checks", ()) if not check["passed"]]
        failed = [check["name"].partition("@")[0] for check in checks]
        names = tuple(dict.fromkeys(name for name in failed if name in release.demands.checks))
        asked = dataclasses.replace(release, demands=release.demands.model_copy(update={"checks": names}))
        checkpoint, gpus = checkpoint_of(self.paths, release), uses_gpu(self.paths, release)
        result, _ = run_smoke(self.paths, self.engine, asked, checkpoint, say, gpus=gpus)
        if bad := [f"{check.name}: {check.detail}" for check in result.checks if not check.passed]:
            raise SmokeError(clipped(bad[0]))
        return "passed"

    def quality(self, release: Release, *, keep: bool = True) -> str:
        corpus = texts.load(quick=self.quick)
        found = compared(self.paths, self.engine, Pair(release, self.current, "named"), corpus)
        if keep:
            quality_record.save(self.paths, release, self.current, found)
        lines = quality_allowance.judge(found.overall, found.skills, ALLOWED)
        if more := [quality_allowance.line(one) for one in lines if one.kept == "more"]:
            raise QualityError("; ".join(more))
        return ", ".join(f"{one.name} {one.seen.text()}" for one in lines)

    def speed(self, release: Release, *, keep: bool = True) -> str:
        asked = BenchOptions(self.quick, False, "", "", dry_run=False, as_json=False)
        plan = common([plan_for(self.paths, one, asked) for one in (self.current, release)])
        subjects = subject_of(self.paths, self.current), subject_of(self.paths, release)
        made = compare(BenchPlace.here(self.paths, self.engine, None, say), subjects, plan, ROUNDS, keep=keep)
        return judge_speed(made)

    def judge(self, step: str) -> Callable[[Release], str]:
        """How a combination of changes is held against the current release: nothing is kept of it."""
        if step == "quality":
            return lambda release: self.quality(release, keep=False)
        if step == "speed":
            return lambda release: self.speed(release, keep=False)
        return self.smoke_again if step == "smoke" else self.inspect


def judge_speed(made: Comparison) -> str:
    """BumpError where requests failed, or a 95 % interval lies wholly beyond SLOWER."""
    together = [row for row in made.ratios if row.cell == ALL] or list(made.ratios)
    if made.failed:
        raise BumpError(f"{terminal.count(made.failed, 'request')} of the benchmark were not answered")
    kept = [slower(row) for row in together]
    if slow := [ratio_text(row) for row, one in zip(together, kept, strict=True) if one == "more"]:
        raise BumpError(f"slower: {', '.join(slow)}")
    return ", ".join(map(ratio_text, together)) + (f"; {SLOWER:.0%} slower is not excluded" * ("unclear" in kept))


def slower(row: Ratio) -> quality_record.Kept:
    """Against SLOWER. One round has no interval, and tells nothing."""
    least = row.metric in HIGHER
    figure = quality_record.Figure(value=row.ratio, low=row.low or 0.0, high=row.high or math.inf)
    return quality_allowance.kept(figure, 1 - SLOWER if least else 1 / (1 - SLOWER), least=least, room=0)


def ratio_text(row: Ratio) -> str:
    interval = "" if row.low is None else f" [{row.low:.3f}, {row.high:.3f}]"
    return f"{METRICS[row.metric]} x{row.ratio:.3f}{interval}"


@dataclass(frozen=True)
class StepBench(Bench):
    """Combinations as a step of a bump judges them."""

    step: Callable[[Release], str]

    def judged(self, release: Release, ref: str, chosen: Sequence[ReleaseChange], log: Path) -> tuple[Verdict, str]:
        try:
            self.step(dataclasses.replace(release, tag=ref))
        except TURNED as error:
            log.write_text(f"{error}\n")
            return "bad", error.message.splitlines()[0]
        return "good", "passed"


@dataclass
class Run:
    """A bump under way. folder: of its record."""

    trial: Trial
    folder: Path
    bump: Bump

    def keep(self, **changes: object) -> None:
        self.bump = self.bump.model_copy(update=changes)
        record.write(self.folder, self.bump)

    def carry_out(self) -> None:
        """Each step that no former run of the same versions has told, until one turns."""
        trial = self.trial
        steps: dict[str, Callable[[], str]] = {
            "build": trial.build,
            "inspect": lambda: trial.inspect(trial.release),
            "smoke": lambda: trial.smoke(trial.release),
            "quality": lambda: trial.quality(trial.release),
            "speed": lambda: trial.speed(trial.release),
        }
        for number, (name, step) in enumerate(steps.items(), start=1):
            known = next((one for one in self.bump.steps if one.name == name), None)
            if known is None:
                say(f"step {number} of {len(steps)}: {name}")
                known = self.tried(name, step)
                self.keep(steps=(*self.bump.steps, known), release=trial.pairings[-1].tag)
            if not known.passed:
                guilty = "" if name == "build" else self.blame(known)
                self.keep(verdict="stay", reason=f"{name}: {known.detail}", guilty=guilty)
                return
        self.keep(verdict="promote")

    def tried(self, name: str, step: Callable[[], str]) -> Step:
        begin = time.monotonic()
        passed, detail = True, ""
        try:
            detail = step()
        except TURNED as error:
            require_whole(self.trial.paths, self.trial.engine, self.trial.current)  # else that is what is wrong
            passed, detail = False, error.message.splitlines()[0]
        seconds = round(time.monotonic() - begin, 1)
        return Step.model_validate({"name": name, "passed": passed, "detail": detail, "seconds": seconds})

    def blame(self, step: Step) -> str:
        """The changes that turn a step, or why they cannot be told."""
        trial = self.trial
        paths = Paths(Paths.from_env().project, trial.paths.cache, trial.paths.home)
        try:
            plan = make_plan(paths, trial.current.tag, trial.release.tag)
        except (InputError, IntegrityError) as error:
            return f"what cannot be searched: {error.message}"
        folder = self.folder / states.FOLDER
        say(f"{step.name} turned; which of {terminal.count(len(plan.changes), 'change')} does it?")
        ends = {"bad": [change.id for change in plan.changes]}
        ends |= {"good": []} if step.name in ("quality", "speed") else {}  # they are against the good one itself
        trials = [
            states.Trial.model_validate({"chosen": sorted(ids), "verdict": verdict, "how": step.detail, "seconds": 0})
            for verdict, ids in ends.items()
        ]
        changes = [change.text for change in plan.changes]
        fresh = states.State(good=plan.good.tag, bad=plan.bad.tag, check=step.name, changes=changes, trials=trials)
        bench = StepBench(paths, plan, step.name, False, True, 0, folder, say, trial.judge(step.name))
        folder.mkdir(parents=True, exist_ok=True)
        search = BisectSearch(bench, folder / states.FILE, states.read(folder / states.FILE) or fresh)
        if search.verdict(()) != "good":
            return "something else: the current release does the same now"
        return ", ".join(change.text for change in minimal(groups_of(plan.changes), search.verdict))


@task("measure")
def bump(
    *,
    stack: Stack = None,
    what: Annotated[
        Literal["all", "vllm", "python", "debian", "model"],
        "update only this component: vllm, python, debian or model (default: all)",
        "PART",
    ] = "all",
    to: Annotated[
        str, "a version that the stack is to pin, such as vllm==0.34.0; --apply writes it", "NAME==VERSION"
    ] = "",
    recipe: Recipe = None,
    apply: Annotated[bool, "where the verdict is `promote`: promote it, and write the lock"] = False,
    quick: Annotated[bool, "fewer texts, questions and cells: sooner, and less sure"] = False,
    hold: Annotated[int, "days that a wheel must have been offered for (default: 7; 0: take all)", "DAYS"] = 7,
    busy: Annotated[bool, "promote though the recipe's server answers requests"] = False,
) -> None:
    """Try newer versions against the current release, on the side."""
    if not 0 <= hold <= LONGEST:
        raise InputError(f"--hold: got {hold}, expected 0 to {LONGEST} (days)", next_step=f"--hold {HOLD}")
    paths = Paths.from_env()
    name = choose_recipe(paths, recipe, stack)
    records = Releases(paths)
    require_recipe(paths, records, name)
    current = require_current(records, name)
    pin = manifests.load_recipe(paths.project, name)
    if stack not in (None, pin.stack):
        raise InputError(f"recipe {name!r} is pinned to the stack {pin.stack!r}", next_step="leave --stack out")
    own, model = manifests.load_stack(paths.project, pin.stack), manifests.model_of(paths.project, pin)
    locks = [f"pins/stacks/{own.name}.yaml", *side.locks_of(own, model)]
    moving = side.moving_of(pin, model)
    with project_of(paths, current) as project:
        former = pair(project, name, stage=current.stage)[-1]
    root = paths.home / record.FOLDER
    with files.lock(root / record.LOCK, wait=False), side.side_project(paths) as there:
        fresh = Bump(recipe=name, what=what, time=now(), current=current.tag, changes=[])
        begin, own = time.monotonic(), side.pinned_to(there, own, to)
        try:
            side.lock_newer(there, own, moving, what, hold, say)
            pairings = pair(there.project, name, stage=current.stage)
            require_model_fits(paths, pairings[-1])
        except (IntegrityError, ManifestError) as error:
            step = Step(name="lock", passed=False, detail=error.message, seconds=round(time.monotonic() - begin, 1))
            refused: dict[str, object] = {"steps": (step,), "verdict": "stay", "reason": f"lock: {error.message}"}
            fresh = fresh.model_copy(update=refused)
            record.write(root / identity(current, what, to, error.message), fresh)
            raise stays(fresh, error.next_step) from None
        fresh = fresh.model_copy(update={"changes": side.differences(former, pairings[-1])})
        begun = side.contents(paths, locks, pairings[-1])
        if pairings[-1].tag == current.tag and any(begun.get(file) != hash_of(there, file) for file in locks):
            say(f"{current.tag} is current already, and its lock was not written")  # a run was killed between the two
            finish(paths, there, locks, begun, None, apply=apply, busy=busy)
            return
        if not fresh.changes:
            show(f"nothing newer for {name}: {current.tag} stays")
            for line in side.fixed_by(own, pin, model, moving, what):
                show(f"fixed by {line}")
            return
        show(f"newer for {current.tag}:")
        for line in fresh.changes:
            show(f"  {terminal.printable(line)}")
        require_consistent(paths, current)
        engine = engine_of(paths)
        if why := obstacle(paths, engine, current):
            raise InputError(f"{current.tag} cannot be served here, nor what is newer: {why}", next_step="go there")
        folder = root / identity(current, pairings[-1].key, *(hash_of(there, file) for file in locks), str(quick))
        going = Run(Trial(there, engine, current, pairings, quick), folder, record.read(folder) or fresh)
        if going.bump.steps:
            say(f"known already: {terminal.count(len(going.bump.steps), 'step')} ({folder / record.FILE})")
        if not going.bump.verdict:
            going.carry_out()
        tell(going.bump, folder)
        if going.bump.verdict == "stay":
            raise stays(going.bump, f"nothing was changed; invoke report shows it; to try it anew: rm -r {folder}")
        finish(paths, there, locks, begun, going, apply=apply, busy=busy)


def require_whole(paths: Paths, engine: Engine, release: Release) -> None:
    """IntegrityError and the like where a release is not what its record says: no newer version is to blame then."""
    require_consistent(paths, release)
    require_image(engine, release)


def identity(current: Release, *parts: str) -> str:
    """Names a bump: the same one goes on where it was broken off."""
    return manifests.digest_of([current.key, *parts])[:12]


def stays(bump: Bump, step: str) -> BumpError:
    return BumpError(f"{bump.current} stays: {bump.reason}", next_step=step)


def tell(bump: Bump, folder: Path) -> None:
    rows = [
        (one.name, "ok" if one.passed else "TURNED", terminal.seconds(one.seconds), terminal.printable(one.detail))
        for one in bump.steps
    ]
    terminal.table(("step", "verdict", "seconds", "seen"), rows)
    if bump.guilty:
        show(f"turned by {terminal.printable(bump.guilty)}")
    show(f"verdict: {bump.verdict} ({folder / record.FILE})")


def hash_of(there: Paths, file: str) -> str:
    return files.sha256_file(there.project / file)[0]


def finish(
    paths: Paths,
    there: Paths,
    locks: Sequence[str],
    begun: Mapping[str, str],
    going: Run | None,
    *,
    apply: bool,
    busy: bool,
) -> None:
    """Promote, then write the locks: a run that is killed between the two is ended by the same command. locks: and the
    stack's file. begun: the user's files as they were."""
    if not apply:
        show("nothing was changed; next: the same command with --apply, which promotes it and writes the lock")
        return
    for file, known in begun.items():
        if not (paths.project / file).is_file() or hash_of(paths, file) != known:
            step = "nothing was promoted or written; the same command again"
            raise InputError(f"{file} was changed while newer versions were tried", next_step=step)
    if going:
        release = going.trial.release
        if not busy and (asked := requests_of(paths, going.trial.engine, release.recipe)):
            raise BusyError(
                f"the server of {release.recipe} answers {terminal.count(asked, 'request')}, and nothing was promoted",
                next_step="the same command again, later, or with --busy: what answers goes on until `invoke serve`",
            )
        promote(release.tag)
        going.keep(applied=now())
    for file in locks:
        if begun.get(file) != hash_of(there, file):
            with files.atomic_file(paths.project / file) as out:
                out.write((there.project / file).read_bytes())
            show(f"written: {file}")


def requests_of(paths: Paths, engine: Engine, recipe: str) -> int:
    """Under way at the recipe's server; 0 where none runs."""
    container = served.find(engine, served.name_of(paths, recipe))
    return launch.requests_under_way(container) or 0 if container and served.is_running(container) else 0
