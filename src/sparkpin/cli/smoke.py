"""`invoke smoke`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import checkpoint_of
from sparkpin.cli.notes import report
from sparkpin.cli.tasks import Json, Link, Machines, SharedLink, task
from sparkpin.core.errors import InputError, InspectionError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show, show_json
from sparkpin.host.engine import Engine, engine_of
from sparkpin.pins import manifests
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle, with_others
from sparkpin.serve import cluster, linked, service
from sparkpin.serve.cluster import Cluster, ClusterOptions
from sparkpin.serve.proxy import before
from sparkpin.serve.served import change, read
from sparkpin.smoke import server as tested
from sparkpin.smoke.evidence import owes, store_evidence
from sparkpin.smoke.inspect import report as inspection
from sparkpin.smoke.inspect import run as inspecting
from sparkpin.smoke.inspect.gpu import KNOWN
from sparkpin.smoke.mods import compare_kernels
from sparkpin.smoke.server import Place, clear_leftovers, exclusive_run


@task("measure")
def smoke(
    paths: Paths,
    tag: Annotated[str | None, "release to smoke (default: each that is built and not yet smoked)"] = None,
    *,
    recipe: Annotated[str | None, "smoke the releases of this recipe only (default: every recipe)"] = None,
    inspect: Annotated[bool, "run no server: what of TAG's image would fail on its GPU; no record changes"] = False,
    sm: Annotated[int | None, "GPU for --inspect, such as 121 (default: the one of the release's stack)"] = None,
    json: Json = False,
    kernels: Annotated[bool, "run no server: compare TAG's GPU kernels with their specification"] = False,
    nodes: Machines = None,
    link: Link = None,
    shared_link: SharedLink = False,
) -> None:
    """Start each new image with a real server and check its answers.

    invoke smoke v2-tq
    invoke smoke v2-tq --inspect --sm 121
    """
    asked = ClusterOptions(nodes, link, shared_link)
    if inspect or kernels or sm or json:
        if not tag or recipe or asked != ClusterOptions() or inspect == kernels or (kernels and (sm or json)):
            cause = "--kernels, or --inspect with --sm and --json, goes with TAG and with no other option"
            raise InputError(cause, next_step="invoke smoke TAG --inspect (invoke images lists the releases)")
        if inspect:
            inspect_image(paths, Releases(paths).get(tag), sm=sm, as_json=json)
        else:
            show(compare_kernels(paths, engine_of(paths), Releases(paths).get(tag)))
        return
    wanted = [Releases(paths).get(tag, recipe)] if tag else waiting_of(paths, recipe)
    if not wanted:
        show("nothing to smoke: no release with an image waits for its test (invoke smoke TAG repeats one)")
        return
    machines = {one.tag: cluster_of(paths, one, asked) for one in wanted}  # a wrong option ends it before any test
    report(paths, smoke_releases(paths, wanted, machines=machines))


def waiting_of(paths: Paths, recipe: str | None) -> list[Release]:
    """Those that a test here could tell more of, and whose image the engine has: each after the stage below it, which
    it is compared with."""
    engine, records = engine_of(paths), Releases(paths)
    if recipe and not records.record_files(recipe):
        manifests.load_recipe(paths.project, recipe)  # an unknown one is a mistake
    known = [one for one in records.all() if recipe in (None, one.recipe) and one.state in ("built", "inspected")]
    known.sort(key=lambda one: len(one.diff_ids))
    return [one for one in known if engine.image(one.tag) and owes(paths, engine, one)]


def smoke_releases(
    paths: Paths, wanted: Sequence[Release], *, machines: Mapping[str, Cluster | None] = {}
) -> tuple[Release, ...]:
    """One after the other. machines: as of `smoke_release`, by tag."""
    for number, release in enumerate(wanted, start=1):
        say(f"smoke test {number} of {len(wanted)}: {release.tag}")
        smoke_release(paths, release, machines=machines.get(release.tag))
    return tuple(Releases(paths).get(release.tag) for release in wanted)


def smoke_release(paths: Paths, release: Release, *, machines: Cluster | None = None, stays: bool = False) -> None:
    """By a server where one can run here, else by an inspection. The record keeps what came of it. machines: of a
    release for several, where it is not for this one alone. stays: by a server as `serve` starts it, which goes on."""
    from sparkpin.measure.own_server import own_server
    from sparkpin.smoke.run import run_smoke  # slow to import, as all that asks a server

    engine = engine_of(paths)
    require_consistent(paths, release)
    if why := obstacle(paths, engine, release, nodes=1 if machines else None):
        if release.smoke_passed:
            cause = f"{release.tag} has passed its smoke test, and here it can only be inspected: {why}"
            raise InputError(cause, next_step=f"invoke smoke {release.tag} --inspect, which changes no record")
        store_evidence(paths, release, inspecting.run_inspection(paths, engine, release, why))
        return
    checkpoint = checkpoint_of(paths, release)
    if stays:
        with exclusive_run(paths, engine):
            done = run_smoke(paths, engine, release, service.started(paths, engine, release, checkpoint))
    elif machines:
        with (
            joined(paths, engine, release, machines, checkpoint) as places,
            exclusive_run(paths, engine, [place.engine for place in places if place.where]),
        ):
            done = run_smoke(paths, engine, release, before(paths, tested.own_server(paths, release, places)))
    else:
        serving = own_server(paths, engine, release, limit=tested.ANSWER_SECONDS)
        done = run_smoke(paths, engine, release, before(paths, serving))
    store_evidence(paths, release, done)


def inspect_image(paths: Paths, release: Release, *, sm: int | None, as_json: bool) -> None:
    """Examine a release's image, with no record changed. InspectionError where it fails. sm: None for what the
    release's stack names."""
    if sm not in (None, *KNOWN):
        raise InputError(f"--sm: got {sm}, expected a GPU's compute capability", next_step="--sm 121: a DGX Spark's")
    result = inspecting.inspect(paths, engine_of(paths), release, sm=sm)
    if as_json:
        show_json(result.as_json())
    else:
        inspection.show(result)
    if result.errors:
        raise InspectionError(f"{result.subject} {result.verdict}", next_step=result.errors[0].next_step)


def cluster_of(paths: Paths, release: Release, asked: ClusterOptions) -> Cluster | None:
    """Those to smoke a release on: as asked, else those that its recipe has, where this one cannot have all of it; None
    for this one alone."""
    known = read(paths.home, release.recipe).cluster
    if asked == ClusterOptions() and (not known or not with_others(paths, release)):
        return None
    return asked.applied(known, release, f"invoke smoke {release.tag}")


@contextlib.contextmanager
def joined(
    paths: Paths, engine: Engine, release: Release, its: Cluster, checkpoint: Path
) -> Iterator[tuple[Place, ...]]:
    """The machines, each with all that the release needs; they are the recipe's from now on, where it had none."""
    with cluster.connected(engine, its.urls) as found:
        others = [machine.engine for machine in found.values() if machine.where != cluster.HERE]
        clear_leftovers(paths, engine, others)  # they have memory and ports
        checked = cluster.check(paths, found, its, release, checkpoint, "127.0.0.1", {})  # it publishes no port
        machines_known = {"cluster": checked.cluster}
        change(paths.home, release.recipe, lambda one: one if one.cluster else one.model_copy(update=machines_known))
        yield tuple(place_of(checked, rank, checkpoint) for rank in range(len(found)))


def place_of(checked: cluster.Checked, rank: int, checkpoint: Path) -> Place:
    machine, (node, env), room = checked.machines[rank], linked.node_at(checked, rank), checked.rooms[rank]
    is_here = machine.where == cluster.HERE
    folder, where = (checkpoint, "") if is_here else (checked.folders[rank], machine.where)
    return Place(machine.engine, folder, room.limit, node, env, where, room.compilers)
