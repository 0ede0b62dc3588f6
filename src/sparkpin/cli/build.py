"""`invoke build`: plan -> fetch -> build -> attest -> report, or one part of it; and `lock`, which it goes by."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from sparkpin.build.make import at_work, build_releases, fetch_missing
from sparkpin.build.pair import Pairing, pair, require_model_fits
from sparkpin.build.rootfs import native_stack
from sparkpin.cli.notes import notes_of, report
from sparkpin.cli.tasks import Recipe, Stack, Stage, task
from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.names import names_in
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.distribute import digests
from sparkpin.distribute.signing import Keys, ensure_attested
from sparkpin.host.engine import Engine
from sparkpin.host.machine import default_recipe, this_platform
from sparkpin.pins import manifests
from sparkpin.releases.record import Release

Take = Callable[[Engine], Mapping[str, Release]]


@dataclass(frozen=True)
class BuildPlan:
    """What `up` and `build` are about to do, known from files alone: a dry run shows it and ends."""

    paths: Paths
    pairings: tuple[Pairing, ...]  # the chain of stages; the last is the one asked for
    notes: Sequence[str]  # what was overruled, what was chosen, and what vLLM will refuse


@task("build")
def build(
    paths: Paths,
    *,
    stage: Stage = None,
    recipe: Recipe = None,
    stack: Stack = None,
    offline: Annotated[bool, "fetch nothing: what is missing is an error"] = False,
    render: Annotated[bool, "instead: print the Dockerfile of a stage and what its build sees"] = False,
    fetch_only: Annotated[bool, "instead: fetch and verify everything that the locks name"] = False,
    checkpoint_only: Annotated[bool, "instead: make the checkpoint of a stage from the pinned repositories"] = False,
    dry_run: Annotated[bool, "with --checkpoint-only: print the plan, which only reads headers"] = False,
) -> None:
    """Build, seal and tag the images of a recipe up to a stage.

    invoke build --stage v2-tq
    """
    require_one(offline=offline, render=render, fetch_only=fetch_only, checkpoint_only=checkpoint_only)
    if dry_run and not checkpoint_only:
        step = "invoke build --checkpoint-only, with the same options"
        raise InputError("--dry-run goes with --checkpoint-only", next_step=step)
    plan = plan_of(paths, recipe, stage, stack)
    last = plan.pairings[-1]
    if render:
        show_rendered(last)
    elif fetch_only:
        fetch(paths, last)
    elif checkpoint_only:
        act_on_checkpoint(paths, last, dry_run=dry_run)
    else:
        for note in plan.notes:
            say(note)
        report(paths, carry_out(plan, offline=offline), smoked=False)


def require_one(**options: object) -> None:
    """InputError where more than one was given."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if given[1:]:
        raise InputError(f"got {' and '.join(given)}, expected one of them", next_step=f"invoke build {given[0]}")


def plan_of(paths: Paths, recipe: str | None, stage: str | None, stack: str | None) -> BuildPlan:
    pairings = pair(paths.project, recipe or default_recipe(paths.project, stack), stage=stage, stack_name=stack)
    for pairing in pairings:
        require_model_fits(paths, pairing)
    return BuildPlan(paths, pairings, notes_of(paths, pairings[-1]))


def carry_out(plan: BuildPlan, *, offline: bool = False, take: Take = lambda engine: {}) -> tuple[Release, ...]:
    """The releases of the plan, the stage asked for last. take: gives, by tag, those that need not be built."""
    paths = plan.paths
    with at_work(paths) as engine:
        done = dict(take(engine))
        rest = [pairing for pairing in plan.pairings if pairing.tag not in done]
        fetch_missing(paths, engine, rest, offline=offline)
        for pairing, release in zip(rest, build_releases(paths, engine, rest), strict=True):
            ensure_attested(paths, release)  # before the next stage, which may fail
            done[pairing.tag] = release
    releases = tuple(done[pairing.tag] for pairing in plan.pairings)
    compare_published(plan, releases)
    return releases


def compare_published(plan: BuildPlan, releases: Sequence[Release]) -> None:
    """Whether the images are those that the project publishes for these pins, and how many builders got the last."""
    images, last, project = [pairing.rendered for pairing in plan.pairings], releases[-1], plan.paths.project
    published, same = digests.load(project, last.stack), list[str]()
    confirmed = digests.confirmations(project, last.build_key, last.image, Keys.from_env().allowed)
    if published is None and confirmed == digests.Confirmations():
        return
    file = digests.file_of(last.stack)
    for end, release in enumerate(releases, start=1):
        compared = digests.compare(published, images[:end], release.image, release.diff_ids)
        if compared and compared.difference:
            cause = f"image {release.image}, published {compared.published}; {compared.difference}"
            say(f"warning: {release.stage}: NOT the bytes that {file} publishes for these pins: {cause}")
            say(f"  next: invoke reproduce {release.tag}, which shows whether it comes out so again")
        elif compared:
            same.append(release.stage)
    for why in confirmed.uncounted:
        say(f"not counted: {why}")
    for other in confirmed.others:
        say(f"warning: {other} got another image than {last.tag} of these pins")
    what = f"same bytes as published: {', '.join(same)}" if same else "not published for these pins"
    if published and last.stage in published.images and last.stage not in same:
        what += f"; {last.stage}: {digests.difference(published.images, images, last.diff_ids)}"
    show(f"{what} ({file}); {confirmed.line}")


def show_rendered(pairing: Pairing) -> None:
    image = pairing.rendered
    terminal.show_file(f"# {image.ref}\n{image.dockerfile.rstrip()}\n")
    show("# The build sees these files and no network:")
    for file in image.context:
        show(f"#   {(file.identity or file.sha256)[:12]:12} {terminal.size(file.size):>10}  {file.path}")


def fetch(paths: Paths, pairing: Pairing) -> None:
    """All that its locks name, and the root file system that stands in for it on a machine of another architecture."""
    from sparkpin.fetch import model as hub  # slow to import, both
    from sparkpin.fetch import stack as fetching

    stacks = [(pairing.stack, pairing.stack_lock)]
    if (machine := this_platform()) in pairing.stack.build_on:
        stacks.append(native_stack(paths, pairing.stack, machine))
    for stack, lock in stacks:
        fetched = terminal.size(fetching.fetch_stack(paths, stack, lock))
        total = terminal.size(sum(file.size for file in lock.files))
        show(f"stack {stack.name}: {len(lock.files)} files, {total} verified, {fetched} fetched")
    places = hub.fetch_model(paths, pairing.model, pairing.model_lock)
    for name in (*places.folders, *places.tensors):
        show(f"model {pairing.model.name}: all that is taken of {name}")


def act_on_checkpoint(paths: Paths, pairing: Pairing, *, dry_run: bool) -> None:
    """Plan it, or make it."""
    from sparkpin.build import checkpoint as building  # slow to import, with all that fetches
    from sparkpin.checkpoint.plan import summary

    pin, lock, steps = pairing.model, pairing.model_lock, pairing.steps
    if dry_run:
        disk = building.needs_of(paths, pin, lock, [steps]).disk(paths)
        lines = summary(building.plan_checkpoint(paths, pin, lock, steps))
        show("\n".join([*lines, *(f"disk: {row.text}" for row in disk)]))
    else:
        show(str(building.build_checkpoint(paths, pin, lock, steps)))


@task("inputs")
def lock(
    paths: Paths,
    *,
    stack: Annotated[str | None, "lock this stack only"] = None,
    model: Annotated[str | None, "lock this model only"] = None,
    digests: Annotated[bool, "resolve nothing: build what the locks give, write its digests to pins/digests"] = False,
) -> None:
    """Resolve the pins and write their locks (network).

    invoke lock --stack cpu
    invoke lock --model qwen3.5-122b-a10b
    """
    from sparkpin.fetch import lock_model  # slow to import, both
    from sparkpin.fetch.stack import lock_stack

    if model and (stack or digests):
        raise InputError("--model locks that model only", next_step=f"invoke lock --model {model}, then the rest")
    if digests:
        publish_digests(paths, stack)
        return
    for name in [stack] if stack else [] if model else names_in(paths.project / "pins/stacks"):
        lock = lock_stack(paths, name)
        show(f"pins/stacks/{name}.lock: {len(lock.debs)} Debian packages, {len(lock.wheels)} wheels")
    for name in [model] if model else [] if stack else names_in(paths.project / "pins/models"):
        if not model and not manifests.model_lock_file(paths.project, name).is_file():
            show(f"pins/models/{name}.yaml has no lock; to make it: invoke lock --model {name}")
            continue
        for repository in lock_model.lock_model(paths, name).repositories.values():
            size = terminal.size(sum(tensor.size for tensor in repository.tensors))
            parts = f"{len(repository.files)} files, {len(repository.headers)} headers"
            parts += f", {len(repository.tensors)} tensors of {size}" if repository.tensors else ""
            show(f"pins/models/{name}.lock: {repository.repo} at {repository.revision}: {parts}")


def publish_digests(paths: Paths, stack: str | None) -> None:
    """Of one stack, or of each that has published some before. Those for another architecture are not built then, for
    that can take an hour: entries of other pins are removed from their files."""
    if not (wanted := [stack] if stack else names_in(paths.project / digests.FOLDER)):
        cause = f"{digests.FOLDER} has no file yet, and no stack is named"
        raise InputError(cause, next_step="invoke lock --digests --stack cpu")
    with at_work(paths) as engine:
        for name in wanted:
            file = digests.file_of(name)
            if stack or manifests.load_stack(paths.project, name).platform == this_platform():
                show(f"{file}: {digests.publish(paths, engine, name)} images")
            elif gone := digests.remove_stale(paths.project, name):
                show(f"{file}: removed {', '.join(gone)}, of other pins; next: invoke lock --digests --stack {name}")
