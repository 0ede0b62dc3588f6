"""`invoke smoke`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import checkpoint_of
from sparkpin.cli import tables
from sparkpin.cli.choose import choose_known, newest_of_stage, require_recipe
from sparkpin.cli.notes import finish
from sparkpin.cli.options import Json, Link, Machines, SharedLink
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import BusyError, EngineError, InputError, InspectionError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show, show_json
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors, engine_of
from sparkpin.pins.nodes import nodes_of
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle, uses_gpu, with_others
from sparkpin.serve import linked, memory_limit, nodes
from sparkpin.serve.launch import LaunchOrder, reached, was_stopped
from sparkpin.serve.nodes import Nodes, NodesOptions
from sparkpin.serve.served import LABEL
from sparkpin.serve.switching import Test
from sparkpin.smoke import drift, kernels
from sparkpin.smoke.evidence import kept, owes
from sparkpin.smoke.inspect import report
from sparkpin.smoke.inspect import run as inspecting
from sparkpin.smoke.inspect.gpu import KNOWN
from sparkpin.smoke.server import Place, alone, clear_leftovers

LOCAL = "127.0.0.1"  # a smoke test has no front

Joined = Callable[[Path], contextlib.AbstractContextManager[Sequence[Place]]]
"""Machines for the nodes of a release, which has this checkpoint here."""


def waiting_for_smoke(paths: Paths, made: Sequence[Release], *, load: bool = False) -> tuple[Release, ...]:
    """Those that no smoke test has told what it could here, and those that failed."""
    if all(release.smoke_passed for release in made):
        return ()
    engine = engine_of(paths)
    return tuple(r for r in made if r.smoke_failed or owes(paths, engine, r, load=load))


@task("measure")
def smoke(
    tag: Annotated[str | None, "release to smoke (default: each that is built and not yet smoked)"] = None,
    *,
    stage: Annotated[str | None, "smoke the newest release of this stage"] = None,
    recipe: Annotated[
        str | None, "smoke the releases of this recipe only (default: every recipe; with --stage the stack's own)"
    ] = None,
    load: Annotated[
        bool,
        "what this machine cannot serve and so inspects: load its libraries and plugins, too, emulated where that "
        "must be (up to 15 minutes a release)",
    ] = False,
    inspect: Annotated[
        bool,
        "without running it, say what of TAG would fail on its GPU: of a release, another image of the engine or a "
        "folder with a root file system",
    ] = False,
    sm: Annotated[str, "GPU for --inspect: 121, 12.1 or sm_121 (default: the one of the image's stack)"] = "",
    json: Json = False,
    kernels: Annotated[
        bool, "without a server: compare the GPU kernels of one release with their specification, and print the table"
    ] = False,
    nodes: Machines = None,
    link: Link = None,
    shared_link: SharedLink = False,
) -> None:
    """Start each new image with a real server and check its answers.

    invoke smoke v2-tq
    invoke smoke v2-tq --inspect --sm 121
    """
    if inspect or sm or json:
        if not inspect or kernels or load or stage or recipe or nodes or link:
            raise InputError(
                "--inspect goes with TAG, --sm and --json, and these with it alone", next_step="invoke smoke --help"
            )
        inspect_image(tag, sm=sm, as_json=json)
    elif kernels:
        compare_kernels(tag=tag, stage=stage, recipe=recipe)
    else:
        smoke_waiting(tag=tag, stage=stage, recipe=recipe, load=load, asked=NodesOptions(nodes, link, shared_link))


def smoke_waiting(*, tag: str | None, stage: str | None, recipe: str | None, load: bool, asked: NodesOptions) -> None:
    paths = Paths.from_env()
    records = Releases(paths)
    if recipe:
        require_recipe(paths, records, recipe)
    if tag:
        wanted = [records.get(tag, recipe)]
    elif stage:
        wanted = [newest_of_stage(paths, choose_known(paths, recipe), stage)]
    else:
        named = asked != NodesOptions()
        known = [release for release in records.all() if recipe in (None, release.recipe)]
        known = [release for release in known if nodes_of(release.argv) > 1] if named else known
        fresh = [release for release in known if release.state in ("built", "inspected")]
        waiting = tuple(fresh) if named else waiting_for_smoke(paths, fresh, load=load)
        wanted = with_image(paths, waiting)
        if not wanted:
            show(nothing_to_smoke(recipe, known=len(known), left_out=len(waiting)))
            for release in known:
                if release.smoke_failed:
                    show(f"{release.tag} failed: {'; '.join(release.smoke_failures)}")
                    show(f"next: invoke smoke {release.tag}")
            return
    over = {one.tag: partial(joined, paths, one, its) for one in wanted if (its := machines_of(paths, one, asked))}
    done = smoke_releases(paths, tuple(wanted), load=load, over=over)
    complete_above(paths, done)
    done = tuple(records.get(one.tag) for one in done)
    tables.show_built(done)
    for one in done:
        if one.smoke_passed and not drift.is_compared(one) and drift.reference(paths, one) is None:
            step = f"invoke smoke --recipe {one.recipe} --stage {one.demands.parent}, which compares the two"
            show(f"{one.tag} was compared with nothing; next: {step}")
    finish(records, done)


def smoke_releases(
    paths: Paths,
    wanted: tuple[Release, ...],
    *,
    load: bool = False,
    done: int = 0,
    total: int = 0,
    over: Mapping[str, Joined] | None = None,
) -> tuple[Release, ...]:
    """A server for each that can run here, one after the other; the others are inspected. load: and their libraries
    loaded, too. done, total: where these are a part of more, to number them. over: by tag, the machines of those that
    are not for this one alone."""
    from sparkpin.smoke.inspected import run_inspection
    from sparkpin.smoke.run import run_smoke  # slow to import, as all that asks a server

    engine = engine_of(paths)
    found = []
    for number, release in enumerate(wanted, start=done + 1):
        say(f"smoke test {number} of {total or len(wanted)}: {release.tag}")
        require_consistent(paths, release)
        machines = (over or {}).get(release.tag)
        if why := obstacle(paths, engine, release, nodes=1 if machines else None):
            if release.smoke_passed:
                raise InputError(
                    f"{release.tag} has passed its smoke test, and here it can only be inspected: {why}",
                    next_step=f"invoke smoke {release.tag} --inspect, which changes no record",
                )
            found.append(kept(paths, release, *run_inspection(paths, engine, release, why, load=load)))
        else:
            gpus = uses_gpu(paths, release)
            checkpoint = checkpoint_of(paths, release)
            if gpus and not machines:  # else vLLM refuses to start next to a server, and the release would be at fault
                with alone(paths, engine):
                    memory_limit.make_room(paths, engine, release, checkpoint)
            with machines(checkpoint) if machines else contextlib.nullcontext(()) as places:
                result, write = run_smoke(paths, engine, release, checkpoint, gpus=gpus, places=places)
            found.append(kept(paths, release, result, write))
    return tuple(found)


@contextlib.contextmanager
def smoke_of_served(paths: Paths) -> Iterator[Test]:
    """The smoke test of a server that is about to be served. No other one runs meanwhile, from before its start."""
    with alone(paths, engine_of(paths)):
        yield partial(smoke_served, paths)


def smoke_served(paths: Paths, container: Container, order: LaunchOrder) -> None:
    """SmokeError where it fails; of a server that somebody stopped meanwhile nothing is kept."""
    from sparkpin.smoke import run

    release, found = order.release, None
    try:
        with reached(container) as port:
            found = run.smoke_served(paths, engine_of(paths), release, container, port, order.timeout)
    except EngineError:
        if not was_stopped(container):
            raise
    if found is None or was_stopped(container):
        raise SmokeError(f"{release.tag} was stopped while it was tested", next_step=f"invoke smoke {release.tag}")
    result, write = found
    if not kept(paths, release, result, write).smoke_passed:
        raise SmokeError(
            f"{release.tag} failed its smoke test and is not served",
            next_step=f"read {result.log_path}, then invoke smoke {release.tag}",
        )


def compare_kernels(*, tag: str | None, stage: str | None, recipe: str | None) -> None:
    """Of one release: the named one, the newest of the stage, or the newest that has kernels, else InputError."""
    paths = Paths.from_env()
    records = Releases(paths)
    if recipe:
        require_recipe(paths, records, recipe)
    if tag:
        release = records.get(tag, recipe)
    elif stage:
        release = newest_of_stage(paths, choose_known(paths, recipe), stage)
    else:
        known = [one for one in records.all() if recipe in (None, one.recipe)]
        if not known:
            raise InputError(
                nothing_to_smoke(recipe, known=0, left_out=0).partition(";")[0], next_step="invoke build --stage v2-tq"
            )
        release = max(known, key=lambda one: (bool(one.demands.kernels), one.created))
    kernels.require_kernels(release)
    show(kernels.compare(paths, engine_of(paths), release))


def inspect_image(subject: str | None, *, sm: str, as_json: bool) -> None:
    """Examine a release, another image of the engine, or a folder, without running it and with no record changed.
    InspectionError where it fails. sm: "" for what the image's stack names."""
    if not subject:
        raise InputError("--inspect: got no TAG", next_step="give a release, another image of the engine, or a folder")
    paths, asked = Paths.from_env(), known_sm(sm)
    engine = None if Path(subject).is_dir() else engine_of(paths)
    result = inspecting.inspect(paths, engine, subject, sm=asked)
    if as_json:
        show_json(result.as_json())
    else:
        report.show(result)
    if errors := result.errors:
        raise InspectionError(f"{result.subject} {result.verdict}", next_step=errors[0].next_step)
    if not as_json:
        show(result.verdict)


def known_sm(asked: str) -> int | None:
    """121 for "121", "12.1" and "sm_121"; None for "". InputError for what is no GPU's compute capability."""
    if not asked:
        return None
    found = re.fullmatch(r"(?:sm_)?([0-9]{2,3})|([0-9]{1,2}\.[0-9])", asked)
    number = int((found[1] or found[2]).replace(".", "")) if found else 0
    if number not in KNOWN:
        raise InputError(
            f"--sm: got {asked!r}, expected a GPU's compute capability: 121, 12.1 or sm_121 (DGX Spark), 90 (H100)",
            next_step="for example --sm 121",
        )
    return number


def machines_of(paths: Paths, release: Release, asked: NodesOptions) -> Nodes | None:
    """Those to smoke a release on: as asked, else those that its recipe has, where this one cannot have all of it; None
    for this one alone."""
    known = nodes.kept(paths, release.recipe)
    if asked == NodesOptions() and (not known or not with_others(paths, release)):
        return None
    return asked.applied(known, release, f"invoke smoke {release.tag}")


@contextlib.contextmanager
def joined(paths: Paths, release: Release, its: Nodes, checkpoint: Path) -> Iterator[tuple[Place, ...]]:
    """The machines, each with all that the release needs; they are the recipe's from now on, where it had none."""
    engine = engine_of(paths)
    with nodes.connected(engine, its.urls) as machines:
        clear_leftovers(paths, engine, [machine.engine for machine in machines[1:]])  # they have memory and ports
        require_not_served(engine, release)
        checked = nodes.check(paths, machines, its, release, checkpoint, LOCAL, busy=False)
        if nodes.kept(paths, release.recipe) is None:
            nodes.keep(paths, release.recipe, checked.nodes)
        yield tuple(place_of(checked, machine, release, checkpoint) for machine in machines)


def place_of(checked: nodes.Checked, machine: nodes.Machine, release: Release, checkpoint: Path) -> Place:
    from sparkpin.releases.volumes import volume_name  # slow to import

    node, env = linked.node_at(checked, machine.rank, key="")
    if machine.where == nodes.HERE:
        return Place(machine.engine, checkpoint, node, env)
    return Place(machine.engine, volume_name(release.checkpoint_key), node, env, machine.where)


def require_not_served(engine: Engine, release: Release) -> None:
    """BusyError where a model is served on several machines, this one among them: torch's port is the same."""
    with engine_errors():
        for server in engine.containers.list(filters={"label": linked.NODES_LABEL}, ignore_removed=True):
            raise BusyError(
                f"{server.name} is served on several machines, and {release.tag} wants the same ports of their link",
                next_step=f"invoke stop --recipe {server.labels[LABEL]}, then invoke smoke {release.tag}",
            )


def complete_above(paths: Paths, done: Sequence[Release]) -> None:
    """The check `drift` of releases that had nothing to compare with, where one of `done` is what they were built on:
    an older release is not judged by another build of the stage below."""
    records = Releases(paths)
    for recipe in sorted({release.recipe for release in done}):
        for other in records.readable(recipe)[0]:
            below = any(other.diff_ids[: len(one.diff_ids)] == one.diff_ids for one in done)
            if below and other.smoke_passed and not drift.is_compared(other):
                drift.complete(paths, other)


def nothing_to_smoke(recipe: str | None, *, known: int, left_out: int) -> str:
    """known: releases there are; left_out: those that wait for their smoke test and have no image."""
    of = f" of {recipe}" if recipe else ""
    if left_out:
        return f"nothing smoked: {terminal.count(left_out, 'release')}{of} not yet smoked, none of them with an image"
    if not known:
        return f"nothing to smoke: no release{of} is built; next: invoke build{f' --recipe {recipe}' if recipe else ''}"
    return f"nothing to smoke: every release{of} has been smoked (invoke smoke TAG repeats one)"


def with_image(paths: Paths, waiting: Sequence[Release]) -> list[Release]:
    """Those whose image the engine has: nobody asked for the others by name, so they do not stop the rest."""
    if not waiting:
        return []
    engine = engine_of(paths)
    there = [release for release in waiting if engine.image(release.tag)]
    gone = [release.tag for release in waiting if release not in there]
    if gone:
        show(f"left out, the engine has not {tables.images_gone(gone)}")
    return there
