"""`invoke build`: plan -> fetch -> build -> attest -> report; with --render and --fetch-only, a part of it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from sparkpin.build import cross_build
from sparkpin.build.make import at_work, build_releases, fetch_missing
from sparkpin.build.pair import Pairing
from sparkpin.cli import checkpoint as checkpoints
from sparkpin.cli import tables
from sparkpin.cli.choose import pairings_of
from sparkpin.cli.notes import finish, notes_of
from sparkpin.cli.options import Recipe, Stack, Stage
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.distribute import digests
from sparkpin.distribute.attest import ensure_attested
from sparkpin.distribute.signing import Keys
from sparkpin.fetch.store import Store
from sparkpin.host.engine import Engine
from sparkpin.host.machine import this_platform
from sparkpin.pins.schema import LockedFile
from sparkpin.releases.record import Release, Releases

Take = Callable[[Engine], Mapping[str, Release]]


@dataclass(frozen=True)
class BuildPlan:
    """What `up` and `build` are about to do, known from files alone: a dry run shows it and ends."""

    paths: Paths
    pairings: tuple[Pairing, ...]  # the chain of stages; the last is the one asked for
    notes: tuple[str, ...]  # what was overruled, what was chosen, and what vLLM will refuse

    @property
    def states(self) -> list[str]:
        """Of each pairing's release."""
        known = [Releases(self.paths).find(pairing.tag) for pairing in self.pairings]
        return [release.state_text if release else "to be built" for release in known]

    @property
    def absent(self) -> list[LockedFile]:
        """Of the stack's lock, what the store has not."""
        store = Store(self.paths.store)
        return [file for file in self.pairings[-1].stack_lock.files if not store.has(file)]


@task("build")
def build(
    *,
    stage: Stage = None,
    recipe: Recipe = None,
    stack: Stack = None,
    offline: Annotated[bool, "fetch nothing: what is missing is an error"] = False,
    render: Annotated[bool, "instead: print the Dockerfile of a stage and what its build sees"] = False,
    fetch_only: Annotated[bool, "instead: fetch and verify everything that the locks name"] = False,
    checkpoint_only: Annotated[bool, "instead: make the checkpoint of a stage from the pinned repositories"] = False,
    model: Annotated[
        str | None, "with --checkpoint-only: a model of pins/models/, without a recipe (default stage: all of its pin)"
    ] = None,
    dry_run: Annotated[bool, "with --checkpoint-only: print the plan, which only reads headers"] = False,
    verify: Annotated[bool, "with --checkpoint-only: compare all bytes of a checkpoint with its sources"] = False,
    deep: Annotated[bool, "with --checkpoint-only: hash the base again, though its files have not changed"] = False,
) -> None:
    """Build, seal and tag the images of a recipe up to a stage.

    invoke build --stage v2-tq
    """
    only = checkpoints.CheckpointOptions(model=model, dry_run=dry_run, verify=verify, deep=deep)
    kinds = {"render": render, "fetch-only": fetch_only, "checkpoint-only": checkpoint_only}
    checkpoints.require_one(kinds, only, offline=offline, stage=stage)
    if render:
        show_rendered(recipe=recipe, stage=stage, stack=stack)
    elif fetch_only:
        fetch(recipe=recipe, stack=stack)
    elif checkpoint_only:
        checkpoints.checkpoint(recipe=recipe, stage=stage, stack=stack, asked=only)
    else:
        plan = plan_of(recipe, stage, stack)
        for note in plan.notes:
            say(note)
        report(plan.paths, carry_out(plan, offline=offline))


def plan_of(recipe: str | None, stage: str | None, stack: str | None) -> BuildPlan:
    paths, pairings = pairings_of(recipe, stage, stack)
    return BuildPlan(paths, pairings, notes_of(paths, pairings[-1]))


def carry_out(plan: BuildPlan, *, offline: bool = False, take: Take = lambda engine: {}) -> tuple[Release, ...]:
    """The releases of the plan, the stage asked for last. take: gives, by tag, those that need not be built."""
    with at_work(plan.paths) as engine:
        taken = take(engine)
        rest = [pairing for pairing in plan.pairings if pairing.tag not in taken]
        fetch_missing(plan.paths, engine, rest, offline=offline)
        built = iter([attest(plan.paths, release) for release in build_releases(plan.paths, engine, rest)])
        releases = tuple(taken.get(pairing.tag) or next(built) for pairing in plan.pairings)
    try:
        compare_published(plan, releases)
    except SparkpinError as error:  # all is built: what others publish changes nothing of it
        say(f"warning: not compared with published digests: {error}")
    return releases


def attest(paths: Paths, release: Release) -> Release:
    """Before the next stage is built, so that one that fails leaves the evidence of those below it."""
    ensure_attested(paths, release)
    return release


def compare_published(plan: BuildPlan, made: Sequence[Release]) -> None:
    """Whether the images are those that the project publishes for these pins, and how many builders got the last."""
    images, last = [pairing.rendered for pairing in plan.pairings], made[-1]
    published = digests.load(plan.paths.project, last.stack)
    confirmed = digests.confirmations(plan.paths.project, last.build_key, last.image, Keys.from_env().allowed)
    if published is None and confirmed == digests.Confirmations():
        return
    file, found = digests.file_of(last.stack), dict[str, list[str]]()
    for end, release in enumerate(made, start=1):
        compared = digests.compare(published, images[:end], release.image, release.diff_ids)
        if compared and compared.difference:
            steps = f"invoke reproduce {release.tag} (does it come out so again?), then invoke diff {release.tag} OTHER"
            say(
                f"warning: {release.stage}: NOT the bytes that {file} publishes for these pins: image {release.image}, "
                f"published {compared.published}; {compared.difference}\n  next: {steps} --files, where OTHER is the "
                "release of who published"
            )
        else:
            what = "same bytes as published" if compared else "not published for these pins"
            found.setdefault(what, []).append(release.stage)
    for why in confirmed.uncounted:
        say(f"not counted: {why}")
    for other in confirmed.others:
        say(f"warning: {other} got another image than {last.tag} of these pins")
    lines = [f"{what}: {', '.join(stages)} ({file})" for what, stages in found.items()]
    show("; ".join([*lines, f"{last.stage} is {confirmed.line}"]))


def report(paths: Paths, made: tuple[Release, ...], *, smoked: bool = False, serves: bool = False) -> None:
    """The table, and what to type next. SmokeError where `smoked`, and one of them failed."""
    tables.show_built(made)
    finish(Releases(paths), made, smoked=smoked, serves=serves)


def show_rendered(*, recipe: str | None, stage: str | None, stack: str | None) -> None:
    _, pairings = pairings_of(recipe, stage, stack)
    last = pairings[-1]
    image = last.rendered
    show(f"# {image.ref}\n{image.dockerfile.rstrip()}\n")
    show("# The build sees these files and no network:")
    for file in image.context:
        show(f"#   {(file.identity or file.sha256)[:12]:12} {terminal.size(file.size):>10}  {file.path}")
    show(f"# A release of it runs: {shlex.join(last.argv)}")
    show(f"# Its checkpoint ({' + '.join(last.steps)}): {last.checkpoint_key}")


def fetch(*, recipe: str | None, stack: str | None) -> None:
    """All that the locks of a recipe name."""
    from sparkpin.fetch import model as hub  # slow to import, both
    from sparkpin.fetch import stack as fetching

    paths, pairings = pairings_of(recipe, None, stack)
    last = pairings[-1]
    wanted = [(last.stack, last.stack_lock)]
    if (machine := this_platform()) in last.stack.build_on:
        wanted.append(cross_build.native_stack(paths, last.stack, machine))
    for one, lock in wanted:
        report = fetching.fetch_stack(paths, one, lock)
        what = "stack" if one is last.stack else "root file system to build it in, stack"
        show(
            f"{what} {one.name}: {report.files} files, {terminal.size(report.bytes_total)} verified, "
            f"{terminal.size(report.bytes_fetched)} fetched"
        )
    places = hub.fetch_model(paths, last.model, last.model_lock)
    for name, folder in places.folders.items():
        show(f"model {last.model.name}: {name} in {folder}")
    for name, tensors in places.tensors.items():
        show(f"model {last.model.name}: {len(tensors)} tensors of {name} in {paths.store}")
