"""`invoke export`, `import`, `copy`, `publish`, `pull`."""

from __future__ import annotations

from pathlib import Path

from sparkpin.bundle import copy as transfer
from sparkpin.bundle import export as exporting
from sparkpin.bundle import registry, take_in
from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host import machine
from sparkpin.host.engine import engine_of
from sparkpin.host.skopeo import Registry
from sparkpin.host.ssh import way_to
from sparkpin.pins.nodes import nodes_of
from sparkpin.releases.record import SIGNATURE, Releases


def export(tag: str, output: str, *, store: bool, checkpoint: bool, image: bool) -> None:
    paths = Paths.from_env()
    release = Releases(paths).get(tag)
    wanted = exporting.BundleParts(store=store, checkpoint=checkpoint, image=image)
    size = exporting.export(paths, lambda: engine_of(paths), release, Path(output), wanted, say)
    show(f"{output}: {release.tag}, {terminal.size(size)}")
    if not store and not checkpoint:
        show(
            "without its checkpoint: the other machine makes it from the model's files, which it has or fetches "
            "(--with-store and --with-checkpoint take along what a machine without network needs)"
        )
    show(f"next, on the other machine: invoke import {Path(output).name}")


def import_bundle(file: str, *, signed: bool) -> None:
    paths = Paths.from_env()
    show_taken_in(paths, take_in.import_bundle(paths, engine_of(paths), Path(file), say, signed=signed))


def publish(tag: str, to: str, *, agreed: bool, ca: str) -> None:
    paths = Paths.from_env()
    place = Registry.parse(to, ca)
    show(f"before anyone publishes an image: {registry.TERMS}, says what may be given to others")
    releases = Releases(paths)
    release = releases.get(tag)
    done = registry.publish(paths, engine_of(paths), release, place, say, agreed=agreed)
    show(f"{tag} is published; elsewhere: invoke pull {done}")
    if not (releases.evidence(release) / SIGNATURE).is_file():
        show(f"not signed, so a pull wants --unsigned; with a key: invoke attest {release.tag}, then publish again")


def pull(source: str, *, unsigned: bool, ca: str) -> None:
    paths = Paths.from_env()
    place = Registry.parse(source, ca)
    show_taken_in(paths, registry.pull(paths, engine_of(paths), place, say, unsigned=unsigned))


def show_taken_in(paths: Paths, done: take_in.Imported) -> None:
    for check in done.checks:
        show(check.line)
    show(f"{done.release.tag} is here, {done.release.state}: what another machine's smoke test said is no proof here")
    if done.release.smoke_passed:
        show(
            f"next: invoke promote {done.release.tag}, then {machine.serve_command(paths.project, done.release.recipe)}"
        )
    else:
        show(f"next: invoke smoke {done.release.tag}, then invoke serve {done.release.tag}")


def copy(tag: str, to: str, *, checkpoint: bool = False, link: str = "", deep: bool = False) -> None:
    paths = Paths.from_env()
    release = Releases(paths).get(tag)
    if deep and not checkpoint:
        raise InputError("--deep: goes with --with-checkpoint", next_step=f"invoke copy {tag} --to {to}")
    way = way_to(to, link) if link else ""
    if way:
        say(f"the link: {to} at {way}")
    engine = engine_of(paths)
    if checkpoint:
        sent, carried = transfer.copy_with_checkpoint(paths, engine, release, to, say, way=way, deep=deep)
    else:
        sent = transfer.copy(paths, engine, release, to, say, way=way)
    show(
        f"{release.tag} is at {to}: sent {terminal.count(sent.layers, 'layer')}, {terminal.size(sent.bytes)}; "
        f"{terminal.count(sent.skipped, 'layer')} were there"
    )
    if checkpoint:
        speed = f", {carried.bytes / 1e6 / carried.seconds:.0f} MB/s over {way or to}" if carried.bytes else ""
        show(
            f"its checkpoint is in volume {carried.volume} there: sent {terminal.count(carried.files, 'file')}, "
            f"{terminal.size(carried.bytes)}{speed}; {terminal.count(carried.whole, 'file')} were there"
        )
    record = f"{release.name}.tar"
    if nodes_of(release.argv) > 1:
        show(f"next, once it is on each: invoke smoke {release.tag} --nodes here,{to},... (docs/nodes.md)")
        return
    show(f"next, for its record: invoke export {release.tag} --no-image -o {record}, and there: invoke import {record}")
