"""`invoke export`, `import`, `copy`."""

from __future__ import annotations

from pathlib import Path

from sparkpin.bundle import copy as transfer
from sparkpin.bundle import export as exporting
from sparkpin.bundle import take_in
from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host import machine as host
from sparkpin.host.engine import engine_of
from sparkpin.releases.record import Releases


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
    done = take_in.import_bundle(paths, engine_of(paths), Path(file), say, signed=signed)
    for check in done.checks:
        show(check.line)
    show(f"{done.release.tag} is here, {done.release.state}: what another machine's smoke test said is no proof here")
    if done.release.smoke_passed:
        show(f"next: invoke promote {done.release.tag}, then {host.serve_command(paths.project, done.release.recipe)}")
    else:
        show(f"next: invoke smoke {done.release.tag}, then invoke serve {done.release.tag}")


def copy(tag: str, to: str) -> None:
    paths = Paths.from_env()
    release = Releases(paths).get(tag)
    sent = transfer.copy(paths, engine_of(paths), release, to, say)
    show(
        f"{release.tag} is at {to}: sent {terminal.count(sent.layers, 'layer')}, {terminal.size(sent.bytes)}; "
        f"{terminal.count(sent.skipped, 'layer')} were there"
    )
    record = f"{release.name}.tar"
    show(f"next, for its record: invoke export {release.tag} --no-image -o {record}, and there: invoke import {record}")
